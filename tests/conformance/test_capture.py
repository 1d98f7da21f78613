"""Recording a shard's computation on a GPU changes how fast it is, and no bit."""

import pytest

import samestep as ss
from conformance import suite

if suite.BACKEND != "torch":
    pytest.skip("recording is PyTorch's: the other frameworks compile", allow_module_level=True)
pytestmark = pytest.mark.skipif(ss.num_gpus() == 0, reason="needs a CUDA GPU")
torch = pytest.importorskip("torch")


@pytest.mark.parametrize("model", suite.MODELS)
def test_recorded_and_not_recorded_are_the_same(model):
    suite.same(suite.fit(model, ["cuda"] * 3), suite.fit(model, "cuda", capture=False))


class Reads(torch.nn.Module):
    """Looks at the device, or draws on the host, while it computes: not to be recorded."""

    def __init__(self, draws):
        super().__init__()
        torch.manual_seed(0)
        self.draws, self.dense = draws, torch.nn.Linear(784, 10)

    def forward(self, x):
        x = torch.nn.functional.dropout(x.flatten(1), 0.5, self.training)
        chance = torch.rand(1) if self.draws else x.mean()
        return self.dense(x * (2.0 if chance.item() > 0.25 else 1.0))


@pytest.mark.parametrize("draws", [False, True], ids=["reads the device", "draws on the host"])
def test_what_cannot_be_recorded_is_computed_all_the_same(draws):
    def fit(k, **settings):
        trainer = ss.Trainer(max_epochs=2, batch_size=50, devices=["cuda"] * k, progress=False, **settings)
        return trainer.fit(Reads(draws), suite.data("lenet", 120))

    suite.check(fit, (2, 3))
    suite.same(fit(1), fit(1, capture=False))
    assert len({row["train_loss"] for row in fit(1).history}) == 2
