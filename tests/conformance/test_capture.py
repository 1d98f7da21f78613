"""Recording steps on a GPU changes how fast they are, and no bit."""

import pytest

import samestep as ss
from conformance import suite

if suite.BACKEND != "torch":
    pytest.skip("recording is PyTorch's: the other frameworks compile", allow_module_level=True)
pytestmark = pytest.mark.skipif(ss.num_gpus() == 0, reason="needs a CUDA GPU")
torch = pytest.importorskip("torch")
maybe = pytest.mark.filterwarnings("ignore:(a step|an evaluation) is not recorded on the GPU")


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


@maybe
@pytest.mark.parametrize("draws", [False, True], ids=["reads the device", "draws on the host"])
def test_what_cannot_be_recorded_is_computed_all_the_same(draws):
    def fit(k, **settings):
        trainer = ss.Trainer(max_epochs=2, batch_size=50, devices=["cuda"] * k, progress=False, **settings)
        return trainer.fit(Reads(draws), suite.data("lenet", 120))

    suite.check(fit, (2, 3))
    with pytest.warns(
        UserWarning, match="not recorded.*numbers on the host" if draws else "not recorded.*looks at numbers"
    ):
        one = fit(1)
    suite.same(one, fit(1, capture=False))
    assert len({row["train_loss"] for row in fit(1).history}) == 2


class Sequence(torch.nn.Module):
    """An RNN of cuDNN over the rows of an image."""

    def __init__(self, kind, layers, dropout, both, hidden=8, rows=28):
        super().__init__()
        torch.manual_seed(0)
        make = {"RNN": torch.nn.RNN, "LSTM": torch.nn.LSTM, "GRU": torch.nn.GRU}[kind]
        self.rnn = make(28, hidden, layers, batch_first=True, dropout=dropout, bidirectional=both)
        self.rows, self.dense = rows, torch.nn.Linear(hidden * (1 + both), 10)

    def forward(self, x):
        return self.dense(self.rnn(x[:, 0, : self.rows])[0][:, -1])


RNNS = [(kind, layers, dropout, both) for kind in ("RNN", "LSTM", "GRU") for layers in (1, 2, 3)
        for dropout in (0.0, 0.2) for both in (False, True) if layers > 1 or not dropout]  # fmt: skip


def fit_rnn(*model, k=1, n=70, batch_size=32, **settings):
    trainer = ss.Trainer(
        max_epochs=2, batch_size=batch_size, shards=4, devices=["cuda"] * k, progress=False, **settings
    )
    return trainer.fit(Sequence(*model), suite.data("lenet", n))


@maybe
@pytest.mark.parametrize("model", RNNS, ids=lambda model: "-".join(map(str, model)))
def test_rnns_of_all_kinds(model):
    """Among them those whose dropout cuDNN draws from a state of its own, which no graph may hold on to."""
    one = fit_rnn(*model)
    suite.same(one, fit_rnn(*model, capture=False))
    suite.same(one, fit_rnn(*model, k=3))
    assert (fit_rnn(*model, seed=1).fingerprint != one.fingerprint) is True


@maybe
@pytest.mark.parametrize(("hidden", "rows", "n", "batch_size"), [(5, 3, 40, 17), (64, 28, 130, 64), (1, 1, 9, 9)])
def test_rnns_of_several_shapes(hidden, rows, n, batch_size):
    model, sizes = ("LSTM", 2, 0.2, False, hidden, rows), {"n": n, "batch_size": batch_size}
    suite.same(fit_rnn(*model, **sizes), fit_rnn(*model, **sizes, capture=False, k=2))


@maybe
def test_the_masks_between_layers_come_from_the_key_of_the_shard():
    """With a rate of 0 both orders of two shards give one result in any case; here only as each has masks of its own."""
    from samestep.backends.torch.backend import backend
    from samestep.devices import gpu

    def gradients(order):
        replica = backend.replica(Sequence("LSTM", 2, 0.5, False).cuda(), None, gpu(0), 2)
        x, y = (
            torch.rand(6, 1, 28, 28, device="cuda", generator=torch.Generator("cuda").manual_seed(1)),
            torch.arange(6).cuda(),
        )
        return {key: replica.gradient(x, y, key, 0).cpu() for key in order}

    with backend.session([gpu(0)], deterministic=True, threads=1):
        forth, back = gradients((5, 6)), gradients((6, 5))
    assert torch.equal(forth[5], back[5])
    assert torch.equal(forth[6], back[6])
    assert not torch.equal(forth[5], forth[6])


class Counts(torch.nn.Module):
    """Depends on how often it was called: a recording would freeze the first number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.calls = torch.nn.Linear(784, 10), 0

    def forward(self, x):
        self.calls += self.training
        return self.dense(x.flatten(1)) * (1 + self.calls)


def test_a_recording_with_other_bits_costs_a_warning():
    with pytest.warns(UserWarning, match="not recorded on the GPU.*depends on more than its arguments"):
        ss.Trainer(max_epochs=1, batch_size=50, devices="cuda", progress=False, rehearse=False, check_every=None).fit(
            Counts(), suite.data("lenet", 120)
        )


class Other(torch.autograd.Function):
    """Fails while it is recorded, in a way that has nothing to do with recording."""

    @staticmethod
    def forward(ctx, x):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a library said no")
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g


def test_a_model_that_breaks_under_recording_costs_a_warning():
    class Breaks(Counts):
        def forward(self, x):
            return self.dense(Other.apply(x.flatten(1)))

    def fit(**settings):
        return ss.Trainer(max_epochs=1, batch_size=50, devices="cuda", progress=False, **settings).fit(
            Breaks(), suite.data("lenet", 120)
        )

    with pytest.warns(UserWarning, match="not recorded on the GPU, and so slower: a library said no"):
        run = fit()
    suite.same(run, fit(capture=False))


HIDDEN = {
    "attention": lambda: torch.nn.TransformerEncoderLayer(28, 4, 32, dropout=0.1, batch_first=True),
    "fft": lambda: _Rows(lambda x: torch.fft.rfft(x).real[..., :28]),
    "matrix products": lambda: _Rows(lambda x: x @ x.transpose(1, 2) / 28),
    "solve": lambda: _Rows(lambda x: torch.linalg.solve(x @ x.transpose(1, 2) + torch.eye(28, device=x.device), x)),
    "sdpa": lambda: _Rows(lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)),
    "noise": lambda: _Rows(lambda x: torch.nn.functional.gumbel_softmax(x) + torch.randn_like(x)),
}


class _Rows(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@maybe
@pytest.mark.parametrize("name", HIDDEN)
def test_libraries_that_keep_something_beside(name):
    """Plans of cuFFT, workspaces of cuBLAS and cuSOLVER, offsets of Philox: recorded or not, the same bits."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.inner, self.last = torch.nn.Linear(28, 28), HIDDEN[name](), torch.nn.LazyLinear(10)

        def forward(self, x):
            return self.last(self.inner(self.first(x[:, 0])).flatten(1))

    def fit(k, **settings):
        trainer = ss.Trainer(max_epochs=2, batch_size=32, shards=4, devices=["cuda"] * k, progress=False, **settings)
        torch.manual_seed(0)
        return trainer.fit(Net(), suite.data("lenet", 70))

    suite.same(fit(1), fit(1, capture=False))
    suite.same(fit(1), fit(3))
