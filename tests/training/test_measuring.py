"""measuring: what kind of loss it is, and whether it is one of the batch, whichever way that is cut."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samestep as ss
from samestep.backends.losses import MEAN, SUM, WEIGHTED, Measure
from samestep.backends.torch.backend import backend
from samestep.data.examples import Data
from samestep.data.feed import Feed
from samestep.devices import cpu
from samestep.errors import Invalid, OutOfMemory, WrongType
from samestep.models.torch import mlp
from samestep.training import measuring

DOCS = Path(__file__).parents[2] / "docs"
N = 12
X = np.random.default_rng(0).standard_normal((N, 4))
Y = np.arange(N) % 3


def checked(loss: Any, shards: int = 3, n: int = N, model: Any = None, trains: bool = True, **settings: Any) -> Measure:
    """What becomes of a loss before a fit begins; N examples are one batch."""
    model, data = model or mlp((4, 3), seed=1).double(), Data((X[:n], Y[:n]))
    trainer = ss.Trainer(**{"shards": shards, "batch_size": N, "loss": loss, "devices": "cpu"} | settings)
    with backend.session([cpu()], deterministic=True, threads=1):
        shape, measure = measuring.measured(trainer, backend, model, data.train)
        feed = Feed(backend, data.train, [cpu()], None)
        try:
            return measuring.checked(trainer, backend, model, shape, measure, feed, cpu(), trains)
        finally:
            feed.close()


def mean(output: Any, y: Any) -> Any:
    return F.cross_entropy(output, y)


def total(output: Any, y: Any) -> Any:
    return F.cross_entropy(output, y, reduction="sum")


def pair(output: Any, y: Any) -> Any:
    counts = 1.0 * (y > 0)
    return (F.cross_entropy(output, y, reduction="none") * counts).sum(), counts.sum()


def means(output: Any, y: Any) -> Any:
    top, bottom = pair(output, y)
    return top / bottom.clamp(min=1)


def contrastive(output: Any, y: Any) -> Any:
    return F.cross_entropy(output @ output.T, torch.arange(len(y)))


def paired(output: Any, y: Any) -> Any:
    """Coupled, though it gives a weight."""
    return contrastive(output, y) * len(y), len(y)


@pytest.mark.parametrize("shards", [1, 2, 3, 5, N])
@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (mean, MEAN),
        (total, SUM),
        (pair, WEIGHTED),
        (lambda output, y: F.mse_loss(output[:, 0], y * 1.0, reduction="none"), MEAN),
    ],
)
def test_a_loss_of_the_batch_is_taken_for_what_it_is(loss: Any, kind: str, shards: int) -> None:
    assert checked(loss, shards).kind == kind


@pytest.mark.parametrize("shards", [1, 3, 5])  # also one: the loss of another number of shards would be another
@pytest.mark.parametrize("loss", [contrastive, means, paired, lambda output, y: total(output, y) * len(y)])
def test_a_loss_that_couples_examples_is_refused(loss: Any, shards: int) -> None:
    with pytest.raises(Invalid) as error:
        checked(loss, shards)
    assert str(error.value).startswith("the loss of the first batch is ")
    assert str(error.value).endswith("or say with loss=samestep.per_shard(f) that the shard is meant")
    assert checked(ss.per_shard(loss), shards).kind == (WEIGHTED if loss is paired else MEAN)


def test_both_losses_are_told() -> None:
    with pytest.raises(Invalid) as error:
        checked(lambda output, y: output.sum() * 0 + len(y) ** 2, 3)  # 12 examples as 4 + 4 + 4
    assert "of the first batch is 144, and by its shards 16: the loss couples examples" in str(error.value)


def mean_of_tokens(output: Any, y: Any) -> Any:
    """As many tokens as the label says, all alike: for weights of zero, each costs log(3)."""
    return (F.cross_entropy(output, y, reduction="none") * (1 + y)).sum() / (1 + y).sum()


def test_a_gradient_that_depends_on_the_shards_is_refused_though_the_loss_does_not() -> None:
    def blank() -> Any:
        model = mlp((4, 3), seed=1).double()
        for p in model.parameters():
            p.data.zero_()
        return model

    with pytest.raises(Invalid) as error:
        checked(mean_of_tokens, 5, model=blank())
    assert str(error.value).startswith(
        "the gradient of the first batch and that by its shards differ by 19.3%: the loss "
    )
    assert checked(mean_of_tokens, 5, trains=False, model=blank()).kind == MEAN  # an evaluation is right
    assert (
        checked(mean_of_tokens, 4, model=blank(), sampling="in_order").kind == MEAN
    )  # each shard has the labels 0, 1, 2
    pairs = lambda output, y: (mean_of_tokens(output, y) * (1 + y).sum(), (1 + y).sum())  # noqa: E731
    assert checked(pairs, 5, model=blank()).kind == WEIGHTED
    drawn = lambda output, y: mean_of_tokens(output, y) + (output * torch.randn_like(output)).mean()  # noqa: E731
    assert checked(drawn, 5, model=blank()).kind == MEAN  # for weights of zero, its value is no noise
    frozen = lambda output, y: output.sum() * 0 + 1  # noqa: E731
    assert checked(frozen, 5, model=blank()).kind == MEAN  # no gradient at all is the same one


def test_losses_that_cancel_out_are_still_the_same() -> None:
    """The whole is zero but for rounding, and its parts are not."""
    model = mlp((4, 3), seed=1).double()
    middle = model(torch.from_numpy(X)).sum(1).mean().detach()
    assert checked(lambda output, y: (output.sum(1) - middle).mean(), 5, model=model).kind == MEAN


def test_what_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(output: Any, y: Any) -> Any:
        return contrastive(output, y) * torch.rand((), dtype=output.dtype)

    assert checked(noisy).kind == MEAN  # no two of its values are alike
    assert checked(contrastive, n=1).kind == MEAN  # one example couples nothing
    assert checked(lambda output, y: output.sum() * torch.nan).kind == MEAN  # the first step tells
    assert checked(lambda output, y: (output.sum(), 0)).kind == WEIGHTED  # the first batch counts nothing
    monkeypatch.setattr(backend, "replica", None)
    assert measuring.checked(ss.Trainer(), backend, None, measuring.Shape(3, "float32"), Measure(), Feed(  # a framework's own
        backend, Data((X, Y)).train, [cpu()], None), cpu()) == Measure()  # fmt: skip


def test_no_memory_for_the_whole_batch_is_no_failure() -> None:
    def loss(output: Any, y: Any) -> Any:
        if len(y) == N:
            raise OutOfMemory("the device ran out of memory")
        return contrastive(output, y)

    assert checked(loss).kind == MEAN
    with pytest.raises(Invalid):
        checked(contrastive)


class Own(nn.Module):
    """A model with a loss of its own, which is a mean or a sum."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.layer, self.reduction = mlp((4, 3), seed=1).double(), reduction

    def forward(self, x: Any, labels: Any) -> Any:
        scores = self.layer(x)
        return {"logits": scores, "loss": F.cross_entropy(scores, labels, reduction=self.reduction)}


def test_the_sum_that_a_model_computes_itself_is_a_sum() -> None:
    """Its step is B times as long, not B times B / S."""
    weights = {}
    for reduction, rate in (("mean", 0.5), ("sum", 0.5 / N)):
        trainer = ss.Trainer(1, N, shards=3, devices="cpu", schedule=rate, progress=False)
        run = trainer.fit(Own(reduction), {"x": X, "labels": Y})
        weights[reduction] = np.concatenate([weight.ravel() for weight in run.weights().values()])
        assert run.recipe.get("loss_over", "mean") == reduction
        own = F.cross_entropy(Own("mean").layer(torch.from_numpy(X)), torch.from_numpy(Y), reduction=reduction)
        assert abs(run.history[0]["train_loss"] - own.item()) < 1e-12
    assert np.abs(weights["mean"] - weights["sum"]).max() < 1e-14


class Causal(nn.Module):
    """A language model as Hugging Face has them: the scores at a token are for the next one; its loss is a mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Embedding(7, 5), nn.Tanh(), nn.Linear(5, 7)).double()
        for p in self.inner.parameters():
            p.data *= 1e-4  # each token costs log(7), but for 1e-4 of it

    def forward(self, input_ids: Any, labels: Any) -> Any:
        scores = self.inner(input_ids)
        loss = F.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(logits=scores, loss=loss)


def test_the_loss_that_the_docs_give_for_language_models() -> None:
    """Their own is refused if labels are padded; that of docs/losses.md follows the whole batch, for any number of shards."""
    rng, made = np.random.default_rng(0), dict[str, Any](F=F)
    ids = rng.integers(0, 7, (16, 9))
    labels = np.where(np.arange(9) < rng.integers(2, 9, (16, 1)), ids, -100)
    [code] = re.findall(r"```python\n(def loss\(output, batch\).*?)```", (DOCS / "losses.md").read_text(), re.DOTALL)
    exec(code, made)

    def fit(**settings: Any) -> Any:
        trainer = ss.Trainer(1, 16, schedule=1.0, progress=False, **settings)
        return trainer.fit(Causal(), {"input_ids": ids, "labels": labels})

    with pytest.raises(Invalid, match=r"^the .* first batch .* Pass loss=f.output, batch. that returns .sum, weight.,"):
        fit(shards=4, devices=1)
    model = Causal()
    model(torch.from_numpy(ids), torch.from_numpy(labels)).loss.backward()
    expected = {name: (p - p.grad).detach().numpy() for name, p in model.named_parameters() if p.grad is not None}
    prints = set()
    for shards, devices in ((1, 1), (2, 1), (8, 1), (8, 3)):
        run = fit(shards=shards, devices=devices, loss=made["loss"])
        assert all(np.abs(run.weights()[name] - weight).max() < 1e-13 for name, weight in expected.items())
        prints |= {run.fingerprint} if shards == 8 else set()
    assert len(prints) == 1


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ([max], "metrics must be a dictionary of functions by name, got list"),
        ({"top 5": max}, "metrics: a name must be a Python name, such as 'top5', got 'top 5'"),
        ({3: max}, "metrics: a name must be a Python name, such as 'top5', got 3"),
        ({"loss": max}, "metrics: 'loss' is there already; pass functions of (output, y) that return (sum, weight)"),
        (
            {"accuracy": max},
            "metrics: 'accuracy' is there already; pass functions of (output, y) that return (sum, weight)",
        ),
        (
            {"top": 3},
            "metrics: 'top' must be a function, got int; pass functions of (output, y) that return (sum, weight)",
        ),
    ],
)
def test_metrics_that_are_none(metrics: Any, message: str) -> None:
    with pytest.raises(WrongType) as error:
        measuring.check_metrics(metrics)
    assert str(error.value) == message


def test_metrics_by_name() -> None:
    assert measuring.check_metrics({"b": max, "a": min}) == (("b", max), ("a", min))
    assert measuring.check_metrics({}) == ()


# Outputs of shape (n, 1) and y of (n,)


def told_of_shapes(loss: Any, model: Any = None, y: Any = X[:, 0]) -> str:
    """What a fit says to such a loss; "" if it accepts it."""
    trainer = ss.Trainer(1, N, shards=3, devices=1, loss=loss, schedule=0.01, progress=False)
    try:
        trainer.fit(model or nn.Linear(4, 1).double(), (X, y))
    except Invalid as error:
        return str(error)
    return ""


BROADCAST = (
    "the output is of shape (n, 1) and train y of (n,), and the loss compares every output with every y: use y[:, None], or "
    "output.squeeze(1) in the model"
)
BROADCASTING = {
    "a mean": nn.MSELoss(), "by example": nn.L1Loss(reduction="none"), "a sum": nn.HuberLoss(reduction="sum"),
    "a function": F.smooth_l1_loss,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using a target size")  # which is all that PyTorch says
@pytest.mark.parametrize("name", BROADCASTING)
def test_losses_of_pytorch_that_broadcast_are_refused(name: str) -> None:
    assert told_of_shapes(BROADCASTING[name]) == BROADCAST
    assert told_of_shapes(BROADCASTING[name], y=X[:, :1]) == ""


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_model_that_gives_one_number_for_all_hides_nothing() -> None:
    """Then the loss of all pairs is the loss, but its gradient is another one."""
    model = nn.Linear(4, 1).double()
    nn.init.zeros_(model.weight)
    assert told_of_shapes(nn.MSELoss(), model) == BROADCAST


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("loss", [nn.MSELoss(), lambda output, y: ((output - y) ** 2).mean()])
def test_labels_that_are_all_equal_hide_nothing(loss: Any) -> None:
    assert told_of_shapes(loss, y=0 * X[:, 0]) == BROADCAST


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    ("size", "shape", "told"),
    [
        ((1, 1), (), "(n, 1, 1) and train y of (n,)"),
        ((3,), (1, 3), "(n, 3) and train y of (n, 1, 3)"),
    ],
)
def test_other_shapes_that_broadcast_are_refused(size: Any, shape: Any, told: str) -> None:
    y = np.random.default_rng(1).standard_normal((N, *shape))
    model = nn.Sequential(nn.Linear(4, int(np.prod(size))), nn.Unflatten(1, size)).double()
    what = f"the output is of shape {told}, and the loss compares every output with every y: use one shape for both"
    assert told_of_shapes(nn.MSELoss(), model, y) == what


def test_a_loss_that_does_not_look_at_y_is_accepted() -> None:
    assert told_of_shapes(lambda output, y: (output**2).mean()) == ""


def test_losses_that_want_these_shapes_are_accepted() -> None:
    assert told_of_shapes(lambda output, y: (output.squeeze(1) - y) ** 2) == ""
    assert told_of_shapes(lambda output, y: F.mse_loss(output.flatten(), y, reduction="sum")) == ""
    assert told_of_shapes(ss.per_shard(lambda output, y: ((output - y) ** 2).mean())) == ""  # it is meant


@pytest.mark.parametrize("seed", [8, 16, 23])
def test_a_loss_that_couples_examples_is_not_told_of_shapes(seed: int) -> None:
    """With these seeds, the same loss of all pairs is by its shards nearly what it is of the whole."""
    x = np.random.default_rng(0).standard_normal((1000, 20), dtype="float32")
    torch.manual_seed(seed)
    trainer = ss.Trainer(
        1, devices=1, loss=lambda output, y: ((output - y[:, None]) ** 2).mean().sqrt(), progress=False
    )
    with pytest.raises(Invalid, match="the loss couples examples"):
        trainer.fit(nn.Linear(20, 1), (x, x[:, 0]))
