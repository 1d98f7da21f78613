"""What is particular to MXNet: its engine's threads, state, its one generator, its optimizers. Sameness is in conformance/."""

import copy
import functools
import os
import re
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pytest

if os.environ.get("SAMESTEP_TEST_BACKEND", "torch") != "mxnet":
    pytest.skip("one framework per process: set SAMESTEP_TEST_BACKEND=mxnet", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # MXNet uses names that NumPy has deprecated
    import mxnet as mx

from conformance import modes, suite
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

import samestep as ss
from samestep import draws, models
from samestep.backends.mxnet import backend as backends_mxnet
from samestep.backends.mxnet import noise as mxnet_noise
from samestep.backends.mxnet.blocks import parameters_of
from samestep.backends.mxnet.flat import Flat
from samestep.backends.mxnet.updater import SET, MxnetUpdater
from samestep.content import Content
from samestep.models import mxnet as models_mxnet

backend = backends_mxnet.backend
random = np.random.default_rng(0)
X = random.random((90, 1, 28, 28), dtype=np.float32)
Y = random.integers(0, 10, 90)
SMALL = X.reshape(90, -1)[:, :12].copy()
entropy = gluon.loss.SoftmaxCrossEntropyLoss()


def fit(model, x=X, y=Y, **settings):
    settings = {"max_epochs": 2, "batch_size": 32, "devices": 1, "progress": False} | settings
    return ss.Trainer(**settings).fit(model, (x, y))


def seeded(make):
    """A model whose weights are drawn from seed 0."""

    @functools.wraps(make)
    def initialized(*args):
        mx.random.seed(0)
        model = make(*args)
        model.initialize(mx.init.Xavier())
        return model

    return initialized


@seeded
def dense(*middle):
    model = nn.HybridSequential()
    model.add(nn.Dense(6, in_units=12), *(make() for make in middle or [lambda: nn.Activation("tanh")]), nn.Dense(10))
    return model


def dropout():
    return nn.Dropout(0.5)


def made(model):
    """The model with the weights that its first example makes."""
    model(array(SMALL[:1]))
    return model


def same_on_three(make, **settings):
    """The run on one device, after comparing it with runs on two and on three."""
    runs = [fit(make(), devices=k, **({"x": SMALL} | settings)) for k in (1, 2, 3)]
    assert runs[0].recipe["initial"] != runs[0].fingerprint
    for run in runs[1:]:
        suite.same(runs[0], run)
    return runs[0]


def replica_of(model, loss=None, shards=2):
    return backend.replica(model, loss, ss.cpu(), shards)


def array(numbers):
    return backend.put(numbers, ss.cpu())


def values(model):
    return {name: p.data().asnumpy() for name, p in parameters_of(model).items()}


def drawn():
    return mx.nd.random.uniform(shape=(5,)).asnumpy().tobytes()


# Against the framework itself; against references in float64 see conformance/


@pytest.mark.parametrize("name", models.NAMES)
def test_models_have_the_names_and_layouts_of_every_framework(name):
    mx.random.seed(3)
    before = drawn()
    mx.random.seed(3)
    model, weights = getattr(models_mxnet, name)(), getattr(models, name)()
    assert drawn() == before  # nothing was drawn
    tensors = replica_of(model).tensors()
    assert all(tensors[key].tobytes() == weight.tobytes() for key, weight in weights.items())
    assert all(
        ".running_" in key or ".num_batches_tracked" in key for key in tensors.keys() - weights.keys() if "." in key
    )


def test_the_norm_of_the_models_against_numpy():
    norm, x = models_mxnet.Norm(3), random.standard_normal((5, 3, 4, 2)).astype(np.float32)
    norm.initialize()
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
    expected = (x - mean[:, None, None]) / np.sqrt(var + 1e-5)[:, None, None]
    with autograd.record():
        y = norm(array(x))
    np.testing.assert_allclose(y.asnumpy(), expected, atol=1e-5)
    forward = values(norm)
    y.backward(array(random.standard_normal(x.shape).astype(np.float32)))
    assert {name: a.tobytes() for name, a in values(norm).items()} == {name: a.tobytes() for name, a in forward.items()}
    np.testing.assert_allclose(forward["running_mean"], 0.1 * mean, rtol=1e-5)
    np.testing.assert_allclose(forward["running_var"], 0.9 + 0.1 * var * 40 / 39, rtol=1e-5)
    assert forward["num_batches_tracked"].tolist() == [1]
    still = (x - forward["running_mean"][:, None, None]) / np.sqrt(forward["running_var"] + 1e-5)[:, None, None]
    np.testing.assert_allclose(norm(array(x)).asnumpy(), still, atol=1e-5)


def test_bad_sizes_of_an_mlp():
    with pytest.raises(ss.SamestepError, match="sizes must name at least"):
        models_mxnet.mlp((3,))
    with pytest.raises(ss.SamestepError, match="dropout must be at least 0 and below 1"):
        models_mxnet.mlp(dropout=1.0)


# Against a plain loop


def plain(model, optimizer, x, epochs=2, batch=32):
    """MXNet's own loop over the same order of examples."""
    trainer = gluon.Trainer(model.collect_params(), optimizer)
    for epoch in range(epochs):
        order = draws.order(0, epoch, len(x))
        for lo in range(0, len(x), batch):
            chosen = order[lo : lo + batch]
            with autograd.record():
                loss = entropy(model(array(x[chosen])), array(Y[chosen]))
            loss.backward()
            trainer.step(len(chosen))
    return values(model)


def close(ours, theirs, start):
    for name, weight in theirs.items():
        moved = np.abs(weight - start[name]).max()
        assert moved > 0
        np.testing.assert_allclose(ours[name], weight, atol=1e-4 * moved + 1e-7)


@pytest.mark.parametrize("shards", [1, 8])
def test_parity_with_a_plain_loop(shards):
    """Equal to rounding after two epochs, with our optimizer and with MXNet's."""
    make = functools.partial(mx.optimizer.SGD, learning_rate=0.05, momentum=0.9)
    expected = plain(models_mxnet.lenet_modern(), make(), X)
    for settings in ({"optimizer": ss.sgd(momentum=0.9), "schedule": 0.05}, {"optimizer": make}):
        model = models_mxnet.lenet_modern()
        close(fit(model, shards=shards, **settings).weights(), expected, values(model))


# What a block keeps


def test_a_block_with_batch_norm_and_dropout():
    run = same_on_three(functools.partial(dense, nn.BatchNorm, dropout))
    assert not np.array_equal(run.weights()["1.running_mean"], np.zeros(6))
    trained = run.model
    assert isinstance(trained, nn.HybridSequential)
    assert trained[1].running_mean.list_ctx() == [mx.cpu()]
    assert np.array_equal(values(trained)["1.running_mean"], run.weights()["1.running_mean"])
    assert ss.Trainer(devices=2, batch_size=32).evaluate(trained, (SMALL, Y))["examples"] == 90
    again = fit(trained, x=SMALL)
    assert again.recipe["initial"] == run.fingerprint != again.fingerprint


def test_one_shard_has_the_statistics_of_a_plain_loop():
    make = functools.partial(dense, functools.partial(nn.BatchNorm, momentum=0.5))
    expected = plain(make(), "sgd", SMALL)
    ours = fit(make(), x=SMALL, shards=1, schedule=0.01).weights()
    for name in ("1.running_mean", "1.running_var"):
        np.testing.assert_allclose(ours[name], expected[name], rtol=1e-4, atol=1e-6)


class Counting(gluon.Block):
    """Keeps state of real and of whole numbers."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(10, in_units=12)
        state = {"grad_req": "null", "differentiable": False, "init": "zeros"}
        self.sum = self.params.get("sum", shape=(1,), **state)
        self.steps = self.params.get("steps", shape=(2,), dtype="int64", **state)

    def forward(self, x):
        self.last = self.dense(x)
        if autograd.is_training():
            with autograd.pause():
                self.sum.set_data(self.sum.data() + x.mean())
                self.steps.set_data(self.steps.data() + 1)
        return self.last


def test_state_is_the_mean_over_examples():
    run = same_on_three(seeded(Counting), max_epochs=1, batch_size=90, shards=7)
    np.testing.assert_allclose(run.weights()["sum"], [SMALL.mean()], rtol=1e-5)
    assert run.weights()["steps"].tolist() == [1, 1]
    assert set(run.weights()) == {"dense.weight", "dense.bias", "sum", "steps"}


class Hidden(gluon.Block):
    """Writes to what is no state."""

    def __init__(self, way):
        super().__init__()
        self.dense, self.way, self.seen = nn.Dense(10, in_units=12), way, nd.zeros((12,))
        self.frozen = self.params.get("frozen", shape=(12,), grad_req="null", init="ones")

    def forward(self, x):
        if self.way == "in place":
            self.seen[:] = 1
        if self.way == "anew":
            self.seen = self.seen + 1
        if self.way == "frozen":
            self.frozen.set_data(nd.zeros((12,)))
        self.last = x + self.seen.as_in_context(x.context)
        return self.dense(self.last)


@pytest.mark.parametrize(("way", "name"), [("in place", "seen"), ("frozen", "frozen")])
def test_what_is_not_state_must_not_be_written_to(way, name):
    with pytest.raises(ss.SamestepError, match=f"'{name}' was written to in the forward pass"):
        fit(seeded(Hidden)(way), x=SMALL)


def test_attributes_begin_every_shard_as_they_were():
    model = seeded(Hidden)("anew")
    runs = [fit(model, x=SMALL, devices=k) for k in (1, 3)]
    suite.same(*runs)
    assert [one.seen.asnumpy().tolist() for one in (model, runs[0].model)] == [[0.0] * 12] * 2
    assert not hasattr(model, "last")


class Tied(gluon.HybridBlock):
    """Weights that are shared, frozen, of few rows, constant."""

    def __init__(self, sparse=True):
        super().__init__()
        self.first = nn.Dense(4, in_units=4)
        self.second = nn.Dense(4, in_units=4, params=self.first.params)
        self.words = nn.Embedding(40, 4, sparse_grad=sparse)
        self.frozen = nn.Dense(10, in_units=4)
        self.frozen.weight.grad_req = "null"
        self.scale = self.params.get_constant("scale", [2.0])

    def hybrid_forward(self, F, x, scale):
        x = F.broadcast_mul(F.mean(self.words(x), axis=1), scale)
        return self.frozen(self.second(self.first(x)))


def test_shared_frozen_and_sparse_weights():
    x = random.integers(0, 40, (90, 5))
    run = same_on_three(seeded(Tied), x=x)
    weights, start = run.weights(), values(seeded(Tied)())
    assert weights["first.weight"].tobytes() == weights["second.weight"].tobytes() != start["first.weight"].tobytes()
    for name in ("frozen.weight", "scale"):
        assert weights[name].tobytes() == start[name].tobytes()
    assert not np.array_equal(weights["words.weight"], start["words.weight"])
    assert run.model.frozen.weight.grad_req == "null"
    whole = fit(seeded(Tied)(False), x=x)
    np.testing.assert_allclose(whole.weights()["words.weight"], weights["words.weight"], atol=1e-6)


class Sometimes(gluon.Block):
    """Uses a weight, and draws, for some examples only: no shard must see what another one left behind."""

    def __init__(self):
        super().__init__()
        self.dense, self.other = nn.Dense(10, in_units=12), nn.Dense(10, in_units=12)

    def forward(self, x):
        rare = float(x[0, 0].asscalar()) > 0.7
        return self.dense(x) + self.other(nd.Dropout(x, p=0.5)) if rare else self.dense(x)


def test_a_weight_that_few_shards_use():
    run = same_on_three(seeded(Sometimes))
    assert not np.array_equal(run.weights()["other.weight"], values(seeded(Sometimes)())["other.weight"])
    replica = replica_of(seeded(Sometimes)(), shards=1)
    rare, common = np.full((4, 12), 0.9, np.float32), np.full((4, 12), 0.1, np.float32)
    first, _, again = (replica.gradient(array(x), array(Y[:4]), 1, 0).asnumpy() for x in (common, rare, common))
    assert first.tobytes() == again.tobytes()
    assert not replica.named(nd.array(again)[: len(replica.parameters)])["other.weight"].any()


WAYS = {
    "dropout": lambda: nd.Dropout(nd.ones((9,)), p=0.5, mode="always"),
    "uniform": lambda: nd.random.uniform(shape=(9,)),
    "shuffle": lambda: nd.random.shuffle(nd.arange(9)),
    "multinomial": lambda: nd.random.multinomial(nd.ones((9,)) / 9, shape=9),
    "numpy normal": lambda: mx.np.random.normal(size=9),
    "numpy choice": lambda: mx.np.random.choice(9, size=9),
    "numpy gumbel": lambda: mx.np.random.gumbel(size=9),
    "numpy power": lambda: mx.np.random.power(2.0, size=9),
    "numpy multinomial": lambda: mx.np.random.multinomial(9, [0.5, 0.5], size=9),
}


@pytest.mark.parametrize("name", WAYS)
def test_what_draws_is_known_and_draws_from_the_key(name):
    def drawn_with(key):
        with mxnet_noise.drawn_from(key, mx.cpu(), mxnet_noise.Graphs()), autograd.train_mode():
            return WAYS[name]().asnumpy().tobytes()

    first, other, again = map(drawn_with, (5, 6, 5))
    assert first == again
    assert len({first, other, drawn_with(7), drawn_with(8)}) > 1  # a key changes what is drawn


@pytest.mark.parametrize("hybrid", [False, True])
def test_the_generator_is_set_for_shards_that_draw_only(hybrid, monkeypatch):
    keys, seed = [], mxnet_noise.seed
    monkeypatch.setattr(mxnet_noise, "seed", lambda key, context: keys.append(key) or seed(key, context))

    def run(*middle):
        keys.clear()
        model = dense(*middle)
        if hybrid:
            model.hybridize()
        fit(model, x=SMALL, max_epochs=1, shards=2, devices=2, rehearse=False, check_every=None)
        return len(keys), len(set(keys))

    assert run() == run(lambda: nn.Dropout(0.0)) == (0, 0)
    assert run(dropout) == (6, 6)  # two shards of three batches


def test_what_fails_in_the_engine_is_raised(monkeypatch):
    def broken(*_):
        raise ArithmeticError("broken")

    monkeypatch.setattr("samestep.fingerprint.Fingerprint.__call__", broken)
    with pytest.raises(ArithmeticError, match="broken"):
        fit(dense(), x=SMALL, shards=1)


class Last(gluon.HybridBlock):
    """A recurrent layer with dropout between its two."""

    def __init__(self):
        super().__init__()
        self.lstm, self.dense = gluon.rnn.LSTM(5, 2, dropout=0.3, layout="NTC", input_size=3), nn.Dense(10, in_units=5)

    def hybrid_forward(self, F, x):
        return self.dense(F.slice_axis(self.lstm(F.reshape(x, (-1, 4, 3))), axis=1, begin=3, end=4))


def test_a_recurrent_block():
    same_on_three(seeded(Last))


def test_float64():
    def make():
        model = dense()
        model.cast("float64")
        return model

    run = same_on_three(make, x=SMALL.astype(np.float64))
    assert run.weights()["0.weight"].dtype == np.float64


def test_weights_that_are_made_from_the_first_example():
    def make():
        mx.random.seed(0)
        model = nn.Dense(10)
        model.initialize()
        return model

    run = same_on_three(make)  # from the draws that MXNet's own loop would make them from
    assert run.recipe["initial"] == fit(made(make()), x=SMALL).recipe["initial"]


def test_blocks_of_mxnet_numpy():
    mx.npx.set_np()
    try:
        run = same_on_three(functools.partial(dense, nn.BatchNorm, dropout), loss=entropy, gradient_clip_val=0.5)
        assert isinstance(run.model(mx.np.array(SMALL[:2])), mx.np.ndarray)
    finally:
        mx.npx.reset_np()
    assert run.weights()["0.weight"].shape == (6, 12)


def test_fit_leaves_the_model_alone():
    model = made(dense(nn.BatchNorm))
    before = {name: a.tobytes() for name, a in values(model).items()}
    run = fit(model, x=SMALL)
    assert run.fingerprint != run.recipe["initial"]
    assert {name: a.tobytes() for name, a in values(model).items()} == before
    assert not any(p.grad().asnumpy().any() for p in model.collect_params().values() if p.grad_req != "null")
    weights = {name: a.tobytes() for name, a in run.weights().items()}
    model[0].weight.set_data(nd.zeros((6, 12)))
    assert {name: a.tobytes() for name, a in values(run.model).items()} == weights


def test_average():
    run = fit(models_mxnet.lenet_modern(), average=ss.swa(1))
    assert run.average is not None
    assert run.average_model(array(X[:2])).shape == (2, 10)


def test_every_optimizer_of_samestep():
    for optimizer in (
        ss.adagrad(),
        ss.adamw(),
        ss.sgld(temperature=1e-4),
        ss.sgd(momentum=0.9, nesterov=True, weight_decay=0.1),
    ):
        same_on_three(dense, optimizer=optimizer, schedule=0.01)


# Noise


def test_noise_is_of_the_key_alone():
    replica = replica_of(made(dense(dropout)))
    drawn = [replica.gradient(array(SMALL[:8]), array(Y[:8]), key, 0).asnumpy().tobytes() for key in (5, 6, 5, 7 << 32)]
    assert drawn[0] == drawn[2]
    assert len(set(drawn)) == 3
    model, x, y = made(dense(dropout)), array(SMALL[:8]), array(Y[:8])
    mx.random.seed(77, ctx=mx.cpu())
    with autograd.record():
        loss = entropy(model(x), y).sum().asscalar()
    vector = replica_of(model).gradient(x, y, key=77, shard=0)
    assert vector[-4].asscalar() == pytest.approx(loss, rel=1e-6)


def test_the_users_generator_goes_on_from_itself():
    """MXNet does not give away the state of its generator; what follows depends on it, and not on the run."""
    noisy, quiet = made(dense(dropout)), made(dense())
    runs = {
        "noisy": functools.partial(fit, noisy, x=SMALL, devices=3),
        "quiet": functools.partial(fit, quiet, x=SMALL, max_epochs=1),
        "evaluated": functools.partial(ss.Trainer(devices=2).evaluate, noisy, (SMALL, Y)),
    }
    follows = {}
    for name, run in runs.items():
        for seed in (3, 4):
            mx.random.seed(seed)
            run()
            follows[name, seed] = drawn()
    assert len({follows[name, 3] for name in runs}) == len({follows[name, 4] for name in runs}) == 1
    assert follows["noisy", 3] != follows["noisy", 4]


# The engine


def test_shards_side_by_side_do_not_see_each_other():
    """A model with batch norm, on one lane and on five, with evaluations between: every shard has the bits it has alone."""
    x = random.random((32, 1, 40, 40), dtype=np.float32)
    shards = [(array(x[i : i + 4]), array(Y[i : i + 4])) for i in range(0, 32, 4)]
    found = []
    for count in (1, 5):
        with backend.session([ss.cpu()], deterministic=True, threads=1):
            backend._lanes = [mx.cpu(backends_mxnet.LANES + i) for i in range(count)]
            for context in backend._lanes:
                backends_mxnet.use_threads(context, 1)
            replica = replica_of(models_mxnet.resnet18(width=4), shards=8)
            first = [replica.gradient(*shard, key=1, shard=i) for i, shard in enumerate(shards)]
            tests = [replica.evaluate(*shard, key=1) for shard in shards * 2]
            again = [replica.gradient(*shard, key=1, shard=i) for i, shard in enumerate(shards)]
            assert len(replica._lanes) == 2 * count  # an evaluation has its own
            found.append([vector.asnumpy().tobytes() for vector in (*first, *tests)])
            assert [vector.asnumpy().tobytes() for vector in again] == found[-1][:8]
    assert found[0] == found[1]


SCRIPT = """
import ctypes, sys, warnings; warnings.simplefilter("ignore")
import mxnet as mx, numpy as np, samestep as ss
from samestep.backends.mxnet import backend, engine
from samestep.models.mxnet import lenet
if sys.argv[1] == "broken":
    backend.use_threads = lambda context, count: None
r = np.random.default_rng(0)
x, y = r.random((300, 1, 28, 28), dtype=np.float32), r.integers(0, 10, 300)
threads = int(sys.argv[2])
run = ss.Trainer(max_epochs=1, devices=2, threads_per_shard=threads, progress=False).fit(lenet(), (x, y))
has, library = [], ctypes.CDLL(mx.libinfo.find_lib_path()[0])
engine.soon(lambda: has.append(library.omp_get_max_threads()), mx.cpu(backend.LANES * threads), [], [])
mx.nd.waitall()
print(run.fingerprint, *has)
"""


def computed(way="whole", threads=1, **env):
    """The fingerprint of a run, and how many threads of OpenMP's compute a shard: whether two have other bits than one is a
    matter of the CPU. In a process of its own, as MXNet reads OMP_NUM_THREADS when it is imported.
    """
    command = [sys.executable, "-c", SCRIPT, way, str(threads)]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def test_the_threads_of_openmp_have_no_way_in():
    for threads in (1, 2):
        (found,) = {computed(threads=threads, OMP_NUM_THREADS=pool) for pool in ("1", "2", "7")}
        assert re.fullmatch(f"[0-9a-f]{{64}} {threads}", found)


def test_without_samesteps_setting_they_would():
    found = [computed("broken", OMP_NUM_THREADS=pool).split()[1] for pool in ("1", "2")]
    assert found == ["1", "2"]


@pytest.mark.parametrize("name", backends_mxnet.ENVIRONMENT)
def test_settings_that_would_let_the_machine_in(name, monkeypatch):
    model = dense()  # MXNet reads some when it first computes
    monkeypatch.setenv(name, "7")
    with pytest.raises(ss.SamestepError, match=f"{name}=7 lets the machine into the bits: unset it"):
        fit(model, x=SMALL)


@pytest.mark.parametrize("name", sorted(backends_mxnet.LIMITS))
def test_limits_of_threads(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    fit(dense(), x=SMALL)
    with pytest.raises(ss.SamestepError, match=f"{name} may keep threads from a shard: unset it"):
        fit(dense(), x=SMALL, threads_per_shard=2)


@pytest.mark.parametrize("name", suite.MODELS)
def test_hybridized_blocks_have_the_bits_of_the_suite(name):
    def run(model, k):
        trainer = ss.Trainer(max_epochs=2, batch_size=16, devices=k, progress=False)
        return trainer.fit(model, suite.data(name, 20))

    make, compiled = getattr(suite.zoo, name), getattr(suite.zoo, name)()
    compiled.hybridize(static_alloc=True, static_shape=name != "embedding")
    trained = run(compiled, 2)
    suite.same(run(make(), 3), trained)
    suite.same(run(make(), 1), run(compiled, 2))  # it has been called, and so compiled, by now
    if isinstance(compiled, gluon.HybridBlock):
        assert trained.model._active


def test_an_imported_graph(tmp_path):
    model = models_mxnet.lenet_modern()
    model.hybridize()
    model(array(X[:1]))
    model.export(str(tmp_path / "lenet"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that types are inferred
        read = gluon.SymbolBlock.imports(
            str(tmp_path / "lenet-symbol.json"), ["data"], str(tmp_path / "lenet-0000.params")
        )
    runs = [fit(read, devices=k) for k in (1, 3)]
    suite.same(*runs)
    ours = fit(models_mxnet.lenet_modern()).weights()
    theirs = runs[0].weights()
    assert sorted(a.tobytes() for a in ours.values()) == sorted(a.tobytes() for a in theirs.values())


# Losses


def test_losses_of_examples_and_their_mean_agree():
    losses = [
        None,
        entropy,
        lambda output, y: entropy(output, y).mean(),
        lambda output, y: entropy(output, y).reshape((-1, 1)),
    ]
    runs = [fit(dense(), x=SMALL, loss=loss) for loss in losses]
    for run in runs[1:]:
        for name, weight in run.weights().items():
            np.testing.assert_allclose(weight, runs[0].weights()[name], atol=1e-6)


def test_bad_losses():
    with pytest.raises(ss.SamestepError, match="one value per example"):
        fit(dense(), x=SMALL, loss=lambda output, y: output.reshape((-1,)))
    with pytest.raises(ss.SamestepError, match="loss must return an array"):
        fit(dense(), x=SMALL, loss=lambda output, y: 1.0)


def test_a_loss_of_real_numbers():
    run = same_on_three(dense, y=SMALL[:, :10], loss=gluon.loss.L2Loss())
    assert run.history[-1]["train_accuracy"] is None
    assert run.history[-1]["train_loss"] < run.history[0]["train_loss"]


# Errors


def test_labels_out_of_range():
    with pytest.raises(ss.SamestepError, match="labels must be from 0 to 9"):
        fit(dense(), x=SMALL, y=Y + 1)


def test_nan_names_step_and_shard():
    x = SMALL.copy()
    x[draws.order(0, 0, 90)[32 + 31]] = np.nan  # the last example of the second batch
    with pytest.raises(ss.SamestepError, match="at step 1, shard 7"):
        fit(dense(), x=x, max_epochs=1)


def test_other_types_are_named():
    with pytest.raises(ss.SamestepError, match="float16 and the model float32"):
        fit(dense(), x=SMALL.astype(np.float16))
    with pytest.raises(ss.SamestepError, match=r"train x is int64 and the model float32: convert one"):
        fit(dense(), x=(SMALL * 9).astype(np.int64))
    with pytest.raises(ss.SamestepError, match=r"train x is uint8 and the model float32: convert one"):
        fit(models_mxnet.lenet(), x=(X * 9).astype(np.uint8))
    with pytest.raises(ss.SamestepError, match="has no weights yet: call model.initialize"):
        fit(nn.Dense(10, in_units=12), x=SMALL)
    with pytest.raises(ss.SamestepError, match="has no parameters to train"):
        fit(nn.Flatten())
    with pytest.raises(ss.SamestepError, match="mxnet has no uint16 arrays"):
        ss.put(np.zeros(3, np.uint16), "cpu", backend="mxnet")
    half = dense()
    half.cast("float16")
    with pytest.raises(ss.SamestepError, match="must all be float32 or all float64, got float16"):
        fit(half, x=SMALL)


def test_a_parameter_without_a_value():
    class Unused(gluon.Block):
        def __init__(self):
            super().__init__()
            self.dense, self.unused = nn.Dense(10), nn.Dense(10)

        def forward(self, x):
            return self.dense(x)

    with pytest.raises(ss.SamestepError, match="the parameter 'unused.weight' has no value"):
        fit(seeded(Unused)(), x=SMALL)


FULL = """
import resource, warnings; warnings.simplefilter("ignore")
import mxnet as mx, numpy as np, samestep as ss
from samestep.backends.mxnet.backend import backend
from samestep.models.mxnet import mlp
mx.nd.ones(3).asnumpy()
resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
for make in (mx.nd.ones, mx.nd.empty):
    try:
        backend.map([lambda: make((2**31 - 2,), dtype="float64").asnumpy()])
    except ss.SamestepError as error:
        print(error)
print(len(ss.Trainer(max_epochs=1, progress=False).fit(mlp(), (np.ones((9, 784), "float32"), np.arange(9))).fingerprint))
"""


def test_out_of_memory():
    """In a process with less memory than the machine; what comes after it is not hurt."""
    done = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True)
    error = "the device ran out of memory"
    *told, last = done.stdout.splitlines()
    assert [line.startswith(error) for line in told] == [True, True], done.stderr
    assert last == "64"


# mxnet.optimizer

OPTIMIZERS = {
    "SGD": functools.partial(mx.optimizer.SGD, learning_rate=0.1, momentum=0.9, wd=0.01),
    "Adam": mx.optimizer.Adam,
    "RMSProp": functools.partial(mx.optimizer.RMSProp, centered=True),
    "NAG": functools.partial(mx.optimizer.NAG, learning_rate=0.1, momentum=0.9),
    "AdaGrad": functools.partial(mx.optimizer.AdaGrad, learning_rate=0.1),
    "Ftrl": functools.partial(mx.optimizer.Ftrl, learning_rate=0.1),
    "LAMB": functools.partial(mx.optimizer.LAMB, learning_rate=0.01),
    "clipped": functools.partial(mx.optimizer.Adamax, clip_gradient=0.001),
}


def slower():
    """One layer at half the rate and without weight decay."""
    model = dense()
    model[0].weight.lr_mult, model[0].weight.wd_mult = 0.5, 0.0
    return model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_mxnet(name):
    expected = plain(slower(), OPTIMIZERS[name](), SMALL)
    run = same_on_three(slower, optimizer=OPTIMIZERS[name])
    close(run.weights(), expected, values(made(slower())))
    assert type(OPTIMIZERS[name]()).__name__ in run.recipe["optimizer"]
    assert run.recipe["optimizer"] != fit(dense(), x=SMALL, optimizer=OPTIMIZERS[name]).recipe["optimizer"]


def test_an_optimizer_by_name_or_as_it_is():
    replica = replica_of(made(dense()))
    given = mx.optimizer.Adam(learning_rate=0.25)
    assert backend.updater(given, replica, 0.0).rate() == 0.25
    assert backend.updater("adam", replica, 0.0).rate() == 0.001
    assert given.param_dict == {}  # it is copied
    updater = backend.updater(given, replica, 0.0)
    before = replica.parameters.asnumpy()
    updater.apply(nd.ones_like(replica.parameters), 0.5, 0)
    moved = replica.named(nd.array(before) - replica.parameters)
    assert all(np.allclose(step, 0.5, atol=1e-5) for step in moved.values())
    assert set(updater.tensors()) == {f"state.{name}.{slot}" for slot in (0, 1) for name in moved} | {"attributes"}


class Remembering(mx.optimizer.AdaGrad):
    """It divides gradients by a count, and adds a mean of them: numbers, a list, and an array that it makes later."""

    def __init__(self):
        super().__init__(learning_rate=0.1)
        self.count, self.past, self.means = 0, [1.5], {}

    def update(self, index, weight, grad, state):
        self.count += index == 0
        self.past.append(self.count / 2)
        self.means[index] = self.means.get(index, nd.zeros((1,))) * 0.5 + grad.mean()
        super().update(index, weight, grad / len(self.past) + self.means[index], state)


KEEPING = {"Nadam": mx.optimizer.Nadam, "counts": Remembering, "by the user": Remembering()}


@pytest.mark.parametrize("name", KEEPING)
def test_what_an_optimizer_keeps_in_attributes_is_resumed(name, tmp_path, monkeypatch):
    """MXNet's own Nadam keeps a product of momenta in an attribute."""
    whole = fit(dense(), x=SMALL, optimizer=KEEPING[name])
    fit(dense(), x=SMALL, optimizer=KEEPING[name], run_dir=tmp_path, max_epochs=1)
    shutil.copytree(tmp_path, tmp_path / "twin")
    resumed = fit(dense(), x=SMALL, optimizer=KEEPING[name], run_dir=tmp_path, devices=2)
    assert resumed.resumed == 3
    suite.same(resumed, whole)
    load = MxnetUpdater.load

    def forget(self, tensors):
        before = {key: copy.deepcopy(one) for key, one in vars(self.optimizer).items() if key not in SET}
        load(self, tensors)
        vars(self.optimizer).update(before)

    monkeypatch.setattr(MxnetUpdater, "load", forget)
    twin = fit(dense(), x=SMALL, optimizer=KEEPING[name], run_dir=tmp_path / "twin")
    assert twin.fingerprint != whole.fingerprint


def test_what_a_checkpoint_cannot_hold_is_refused_by_name(tmp_path):
    class Drawing(mx.optimizer.AdaGrad):
        def __init__(self):
            super().__init__(learning_rate=0.1)
            self.draw = np.random.default_rng(0)

        def update(self, index, weight, grad, state):
            super().update(index, weight, grad * self.draw.random(), state)

    with pytest.raises(
        ss.SamestepError, match=r"^the optimizer keeps a Generator \(optimizer.draw\), which updates change"
    ):
        fit(dense(), x=SMALL, optimizer=Drawing, run_dir=tmp_path)


def test_rates_and_decays_of_parameters_are_refused_by_samesteps_optimizers():
    """Those of MXNet follow them: see `slower`."""
    with pytest.raises(ss.SamestepError) as refused:
        fit(slower(), x=SMALL, optimizer=ss.sgd())
    assert str(refused.value) == (
        "0.weight has lr_mult=0.5, which samestep's optimizers do not follow: use one of mxnet, or leave it out"
    )
    model = dense()
    model[0].bias.wd_mult = 0.0
    fit(model, x=SMALL, optimizer=ss.sgd())  # nothing decays
    with pytest.raises(ss.SamestepError, match=r"^0.bias has wd_mult=0.0, which"):
        fit(model, x=SMALL, optimizer=ss.sgd(weight_decay=0.1))


def test_the_schedule_sets_the_rate():
    run = fit(dense(), x=SMALL, optimizer=mx.optimizer.SGD, schedule=ss.poly(0.2, 6))
    assert run.history[-1]["lr"] == pytest.approx(0.2 / 6)
    ours = fit(dense(), x=SMALL, optimizer=ss.sgd(), schedule=ss.poly(0.2, 6))
    for name, weight in ours.weights().items():
        np.testing.assert_allclose(run.weights()[name], weight, atol=1e-6)


def test_bad_optimizers():
    inside = functools.partial(mx.optimizer.SGD, lr_scheduler=mx.lr_scheduler.FactorScheduler(2))
    with pytest.raises(ss.SamestepError, match="has a scheduler inside .FactorScheduler."):
        fit(dense(), x=SMALL, optimizer=inside)
    with pytest.raises(ss.SamestepError, match="has a scheduler inside .FactorScheduler."):  # it would be ignored
        fit(dense(), x=SMALL, optimizer=inside, lr=0.1)
    mult = mx.optimizer.SGD()
    mult.set_lr_mult({"0.weight": 0.5})
    with pytest.raises(
        ss.SamestepError, match="^in Gluon, set_lr_mult .* of an optimizer have no effect: set them on parameters$"
    ):
        fit(dense(), x=SMALL, optimizer=mult)
    with pytest.raises(ss.SamestepError, match="must be an mxnet.optimizer.Optimizer"):
        fit(dense(), x=SMALL, optimizer=lambda: 3)
    with pytest.raises(ss.SamestepError, match="mxnet has no 'nothing', only adadelta, adagrad, adam, "):
        backend.updater("nothing", replica_of(made(dense())), 0.0)


def test_rates_of_a_scheduler():
    scheduler = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.4)
    assert backend.rates(scheduler, 5) == [0.4, 0.4, 0.2, 0.2, 0.1]
    assert scheduler.base_lr == 0.4
    with pytest.raises(ss.SamestepError, match="must be an mxnet.lr_scheduler.LRScheduler"):
        backend.rates("linear", 2)


# Checkpoints


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("optimizer", [ss.adam(), mx.optimizer.Adam], ids=["ours", "theirs"])
@pytest.mark.parametrize("step", [1, 3, 4])
def test_killed_and_resumed_on_other_devices(step, optimizer, tmp_path):
    make = functools.partial(dense, nn.BatchNorm, dropout)
    settings = {
        "x": SMALL,
        "shards": 4,
        "optimizer": optimizer,
        "checkpoint_every": 1,
        # shards are counted
        "rehearse": False,
        "check_every": None,
        "average": ss.path_average(),
    }
    whole = fit(make(), devices=3, loss=entropy, **settings)
    shards = 0

    class Interrupting:
        def __repr__(self):
            return repr(entropy)

        def __call__(self, output, y):
            nonlocal shards
            shards += autograd.is_training()
            if shards == step * 4 + 2:
                raise Interrupted
            return entropy(output, y)

    with pytest.raises(Interrupted):
        fit(make(), devices=2, loss=Interrupting(), run_dir=tmp_path / "run", **settings)
    run = fit(make(), devices=4, loss=entropy, run_dir=tmp_path / "run", accept="code", **settings)  # of the loss
    assert run.resumed == step
    suite.same(whole, run)
    assert all(run.average[name].tobytes() == a.tobytes() for name, a in whole.average.items())


def test_what_is_saved_comes_back_to_the_bit():
    make = functools.partial(models_mxnet.resnet18, width=4)
    one, other = replica_of(make()), replica_of(make(seed=1))
    one.load({name: a + a + 3 for name, a in one.tensors().items()})
    assert one.fingerprint().asscalar() != other.fingerprint().asscalar()
    other.load(one.tensors())
    assert one.fingerprint().asscalar() == other.fingerprint().asscalar()
    assert all(np.array_equal(a, other.tensors()[name]) for name, a in one.tensors().items())
    for mine, back in zip(one.real_vectors(), one.real_vectors_from(one.tensors()), strict=True):
        assert mine.asnumpy().tobytes() == back.asnumpy().tobytes()
    assert one.flat(one.named(one.parameters)).asnumpy().tobytes() == one.parameters.asnumpy().tobytes()
    assert {name: a.shape for name, a in one.named(one.parameters).items()} == {
        name: a.shape for name, a in models.resnet18(width=4).items()
    }


def test_weights_move_to_numpy_and_back(tmp_path):
    run = fit(models_mxnet.lenet_modern(), run_dir=tmp_path / "run")
    from safetensors.numpy import load_file

    tensors = load_file(tmp_path / "run" / "weights.safetensors")
    model = models_mxnet.lenet_modern(seed=1)
    for name, p in parameters_of(model).items():
        p.set_data(nd.array(tensors.pop(name)))
    assert not tensors
    expected = run.model(array(X[:4])).asnumpy()
    assert model(array(X[:4])).asnumpy().tobytes() == expected.tobytes()


# Devices and vectors


def test_device_functions():
    one = nd.ones((3,))
    assert ss.put(one, "cpu") is one
    assert ss.device_of(one) == ss.cpu()
    assert isinstance(ss.put(np.ones(3, np.float32), "cpu", backend="mxnet"), nd.NDArray)
    assert isinstance(ss.get(one), np.ndarray)
    assert backend.devices()[0] == ss.cpu()
    total, used = backend.memory(ss.cpu())
    assert 0 < used < total
    assert ss.try_gpu(backend="mxnet") == ss.cpu()
    with pytest.raises(ss.SamestepError, match="device cuda:0 is not there: mxnet sees cpu"):
        ss.put(one, "cuda")


def test_data_of_mxnet():
    expected = fit(made(dense()), x=SMALL)
    for make in (nd.array, mx.np.array):
        x, y = make(SMALL, dtype="float32"), make(Y, dtype="int64")
        run = fit(made(dense()), x=x, y=y)
        assert run.fingerprint == expected.fingerprint
        assert ss.Trainer().prepare_batch([x, y])[0] is x


def test_virtual_devices():
    second = ss.Device("cpu", 2)
    there = backend.put(np.arange(3), second)
    assert there.context == mx.cpu(2)
    assert there.dtype == np.int64
    assert backend.device_of(there) == second
    assert backend.put(there, second) is there
    assert backend.put(there, ss.cpu()).context == mx.cpu(0)
    with backend.session([second], deterministic=True, threads=1):
        inside = backend.put(there, second)
        assert inside.context not in (mx.cpu(0), mx.cpu(2))
        assert backend.device_of(inside) == second


def test_copies_share_nothing_and_have_gradients():
    weight = nd.ones((2, 3))
    [copied] = ss.replicate([weight], "cpu")
    assert copied.grad.asnumpy().tolist() == np.zeros((2, 3)).tolist()
    backend.assign(copied, nd.full((2, 3), 5.0))
    assert weight.sum().asscalar() == 6
    assert copied.sum().asscalar() == 30


@pytest.mark.parametrize("how", ["tree", "gather", "ring", "sharded"])
def test_allreduce(how):
    arrays = [nd.full((2, 3), float(i), ctx=mx.cpu(i)) for i in range(1, 4)]
    sums = ss.allreduce(arrays, how)
    assert all(np.array_equal(total.asnumpy(), np.full((2, 3), 6.0)) for total in sums)
    assert all(one.sum().asscalar() == 36 for one in arrays)  # in place
    assert [total.context for total in sums] == [mx.cpu(i) for i in range(1, 4)]


def test_vectors_are_laid_out_as_the_models_arrays():
    arrays = {str(i): np.full(shape, i, np.float32) for i, shape in enumerate([(3,), (1,), (2, 9)], 1)}
    flat = Flat.of(list(arrays), arrays, mx.cpu())
    assert [start * 4 % 64 for start, _ in flat.layout.spans] == [0, 0, 0]
    assert [view.asnumpy().tolist() for view in flat.views] == [a.tolist() for a in arrays.values()]


def test_fingerprints_see_every_bit_and_place():
    def of(*numbers):
        model = nn.Dense(1, in_units=len(numbers), use_bias=False)
        model.initialize()
        model.weight.set_data(nd.array([numbers]))
        return replica_of(model).fingerprint().asscalar()

    some = [(1, 2, 0), (2, 1, 0), (-1, -2, 0), (-1, 2, 0), (1, 2, -0.0), (1, 2, 0, 0)]
    assert len({of(*numbers) for numbers in some}) == 5  # a zero at the end is padding
    rows = np.zeros(1 << 18, np.float32)
    seen = set()
    for place in (0, 1, 1 << 16, (1 << 16) + 1, (1 << 17), (1 << 18) - 1):
        rows[:] = 0
        rows[place] = 1
        seen.add(of(*rows))
    assert len(seen) == 6


def test_the_cpu_under_several_numbers():
    """cpu(i) of MXNet: virtual devices, with the bits of one, and one device for all who ask for a count."""
    x, y = np.random.default_rng(0).random((60, 1, 28, 28), dtype=np.float32), np.arange(60) % 10

    def fit(devices):
        return ss.Trainer(1, 20, devices=devices, progress=False).fit(models_mxnet.mlp(), (x, y))

    runs = [fit(devices) for devices in ("cpu", ["cpu:0", "cpu:1"], ["cpu:5", "cpu:2", "cpu:9"])]
    assert [run.devices for run in runs] == [["cpu"], ["cpu", "cpu:1"], ["cpu:5", "cpu:2", "cpu:9"]]
    assert len({run.fingerprint for run in runs}) == len({tuple(run.fingerprints) for run in runs}) == 1
    assert fit(3).devices == ["cpu"] * 3
    with pytest.raises(ss.SamestepError, match="device cpu:256 is not there: mxnet sees cpu on this machine"):
        fit(["cpu:256"])


# The recipe

PORTABLE = """
import sys, warnings; warnings.simplefilter("ignore")
{before}
import mxnet as mx, numpy as np, samestep as ss
from samestep.models.mxnet import mlp
run = ss.Trainer(max_epochs=1, portable=True, progress=False).fit(mlp(), (np.ones((9, 784), "float32"), np.arange(9)))
print(run.recipe["portable"], "cpu" in run.recipe["numerics"], run.recipe["numerics"]["kernels"])
"""


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("import samestep as ss; ss.Trainer(portable=True)", "True False Haswell"),
        ("import os; os.environ['OPENBLAS_CORETYPE'] = 'Prescott'",
         "kernels for Prescott when MXNet was imported. Import samestep before mxnet. Set SAMESTEP_PORTABLE=1"),
    ],
    ids=["in time", "too late for OpenBLAS"],
)  # fmt: skip
def test_portable_runs_must_begin_in_time(before, expected):
    code = PORTABLE.format(before=before)
    free = {
        name: value for name, value in os.environ.items() if not name.startswith(("OPENBLAS", "DNNL", "SAMESTEP_P"))
    }
    done = subprocess.run([sys.executable, "-c", code], env=free, capture_output=True, text=True)
    assert re.search(expected, done.stdout or done.stderr.splitlines()[-1]), done.stderr


class Unscoped(gluon.Block):
    """A parameter that is no attribute, in a block that is made outside of the model's name scope."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Dense(10, in_units=12)
        self.inner.params.get("scale", shape=(1,), init="ones")

    def forward(self, x):
        scale = next(p for name, p in self.inner.params.items() if name.endswith("scale"))
        return self.inner(x) * scale.data(x.context)


def test_names_and_recipes_do_not_count_what_the_process_has_made(tmp_path):
    make = seeded(Unscoped)
    runs = [fit(make(), x=SMALL, max_epochs=epochs, run_dir=tmp_path) for epochs in (1, 2)]
    assert list(runs[0].weights()) == ["inner.weight", "inner.bias", "inner.scale"]
    assert runs[1].resumed == 3
    assert runs[0].recipe["code"] == runs[1].recipe["code"]


def parts(thing):
    found = Content(backend.content)
    found.add("it", thing, weights=False)
    assert not found.unchecked
    return found.told()


def graph(n):
    x = mx.sym.var("x", dtype="float32")
    return gluon.SymbolBlock(mx.sym.FullyConnected(x, num_hidden=n), x)


LAYERS = {
    "convolutions": lambda: nn.Conv2D(3, 3, activation="relu"),
    "transposed": lambda: nn.Conv2DTranspose(3, 3),
    "pools": lambda: nn.GlobalAvgPool2D(),
    "norms": lambda: nn.LayerNorm(in_channels=4),
    "functions": lambda: nn.HybridLambda("tanh"),
    "lambdas": lambda: nn.Lambda(lambda x: x * 2),
    "recurrences": lambda: gluon.rnn.LSTM(3, 2, dropout=0.1),
    "cells": lambda: gluon.rnn.ResidualCell(gluon.rnn.GRUCell(3)),
    "losses": lambda: gluon.loss.CTCLoss(),
    "zoo": lambda: gluon.model_zoo.vision.get_model("squeezenet1.0"),
    "optimizers": lambda: mx.optimizer.Adam(lr_scheduler=mx.lr_scheduler.CosineScheduler(5)),
    "initializers": mx.init.Xavier,
    "graphs": lambda: graph(3),
    "arrays": lambda: [nd.ones(3), mx.np.ones(3), nd.ones((2, 2)).tostype("csr"), mx.cpu(2)],
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_made_again_has_the_same_content(name):
    assert parts(LAYERS[name]()) == parts(LAYERS[name]())


def test_what_a_forward_pass_leaves_does_not_count():
    fresh, used = dense(), made(dense())
    made(fresh)
    used.hybridize()
    fresh.hybridize()
    for _ in range(2):
        made(used)
    assert parts(used) == parts(made(fresh))
    assert parts(used) != parts(made(dense()))  # compiled, a block may have other bits


def test_graphs_differ_by_what_they_compute():
    assert parts(graph(3)) != parts(graph(4))


# Modes around a fit, and state of any type

TAKEN = {
    "record": autograd.record,
    "record in prediction": lambda: autograd.record(train_mode=False),
    "pause": autograd.pause,
    "predict_mode": autograd.predict_mode,
    "train_mode": autograd.train_mode,
    "another context": lambda: mx.Context("cpu", 1),
    "a GPU that is not there": lambda: mx.Context("gpu", 0),
    "bulk": lambda: mx.engine.bulk(50),
    "attributes": lambda: mx.AttrScope(ctx_group="a"),
    "names": lambda: mx.name.Prefix("a"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_mode_around_a_fit_has_no_way_in(name, monkeypatch):
    model = made(dense(nn.BatchNorm, dropout))
    found = modes.outcome(monkeypatch, TAKEN[name], lambda k: fit(model, x=SMALL, devices=k, shards=4))
    plain = fit(model, x=SMALL, shards=4)
    assert found == (plain.fingerprints, plain.recipe)


def test_shapes_of_numpy_are_taken_and_in_the_recipe(monkeypatch):
    model = made(dense())
    _, recipe = modes.outcome(
        monkeypatch, lambda: mx.util.np_shape(True), lambda k: fit(model, x=SMALL, devices=k, shards=4)
    )
    assert recipe["numerics"]["settings"]["np_shape"] is True


STATES = {  # at the start, and after nine steps
    "float16": ([0.25, 3], [9.25, 12]), "float64": ([0.25, 1e300], [9.25, 1e300]), "int8": ([-3, 100], [6, 109]),
    "uint8": ([250, 3], [3, 12]), "int64": ([2**62 + 1, -5], [2**62 + 10, 4]), "bool": ([True, False], [False, True]),
}  # fmt: skip


class Holding(gluon.Block):
    def __init__(self, dtype, start=None, changes=False, frozen=False):
        super().__init__()
        self.changes = changes
        with self.name_scope():
            self.inner = nn.Dense(10, in_units=12)
            self.s = self.params.get("s", shape=(2,), dtype=dtype, grad_req="null", differentiable=frozen, init="zeros")
        mx.random.seed(0)
        self.initialize()
        if start is not None:
            self.s.set_data(mx.nd.array(np.array(start), dtype=dtype))

    def forward(self, x):
        now = self.s.data()
        if self.changes and autograd.is_training():
            with autograd.pause():
                new = 1 - now.astype("float32") if now.dtype == np.bool_ else now + mx.nd.ones(2, now.ctx, now.dtype)
                new.astype(now.dtype).copyto(now)
        return self.inner(x)


@pytest.mark.parametrize("how", ["state", "changes", "frozen"])
@pytest.mark.parametrize("dtype", STATES)
def test_state_of_any_type_survives(dtype, how, tmp_path):
    start, end = STATES[dtype]
    value = end if how == "changes" else start
    make = functools.partial(Holding, dtype, start, how == "changes", how == "frozen")
    run = modes.survives(fit, make, "s", value, tmp_path / "run", x=SMALL, shards=4)
    found = run.model.s.data()
    assert (np.dtype(found.dtype).name, found.asnumpy().tolist()) == (dtype, value)


def test_bfloat16_is_refused():
    with pytest.raises(ss.SamestepError, match="the parameter 's' is of type .*bfloat16.*, which NumPy does not know"):
        fit(Holding(np.dtype([("bfloat16", np.uint16)])), x=SMALL)


def test_a_loss_per_shard_with_parameters_is_refused():
    class Scaled(gluon.Block):
        def __init__(self):
            super().__init__()
            self.scale = self.params.get("scale", shape=(1,))

        def forward(self, output, y):
            return (output * self.scale.data()).mean()

    model = gluon.nn.Dense(2, in_units=2)
    model.initialize()
    for loss in (Scaled(), ss.per_shard(Scaled())):
        with pytest.raises(ss.SamestepError, match=r"depends on a parameter \('.*scale' of the loss\)"):
            backend.replica(model, loss, ss.cpu(), 2)
