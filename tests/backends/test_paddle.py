"""What is particular to Paddle: state, its one generator, compiled layers, its optimizers. Sameness is in conformance/."""

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest

if os.environ.get("SAMESTEP_TEST_BACKEND", "torch") != "paddle":
    pytest.skip("one framework per process: set SAMESTEP_TEST_BACKEND=paddle", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that there is no ccache
    import paddle

import paddle.nn.functional as F
from bits_reference import of_bytes
from conformance import modes, suite
from paddle import nn
from paddle.distributed.fleet.utils import recompute

import samestep as ss
from samestep import draws, models
from samestep.backends.noise import ALONE, APART, FREE
from samestep.backends.paddle.backend import backend
from samestep.backends.paddle.exact import REFUSED, check_optimizer, exact
from samestep.backends.paddle.flat import Flat, numpy_view
from samestep.backends.paddle.losses import weighted
from samestep.backends.paddle.noise import GENERATOR, PaddleNoise, state
from samestep.backends.paddle.updater import PaddleUpdater
from samestep.content import Content
from samestep.errors import Invalid
from samestep.fingerprint import of_vectors
from samestep.models import paddle as models_paddle

pytestmark = pytest.mark.filterwarnings("ignore:When training, we now always track")  # Paddle's batch norm, every time
random = np.random.default_rng(0)
X = random.random((90, 1, 28, 28), dtype=np.float32)
Y = random.integers(0, 10, 90)
SMALL = X.reshape(90, -1)[:, :12].copy()


def fit(model, x=X, y=Y, **settings):
    settings = {"max_epochs": 2, "batch_size": 32, "devices": 1, "progress": False} | settings
    return ss.Trainer(**settings).fit(model, (x, y))


def seeded(make):
    """A model whose weights are drawn from seed 0."""

    @functools.wraps(make)
    def made(*args):
        paddle.seed(0)
        return make(*args)

    return made


@seeded
def dense(*middle):
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 6), *(middle or (nn.Tanh(),)), nn.Linear(6, 10))


def same_on_three(make, **settings):
    """The run on one device, after comparing it with runs on two and on three."""
    runs = [fit(make(), x=SMALL, devices=k, **settings) for k in (1, 2, 3)]
    assert runs[0].recipe["initial"] != runs[0].fingerprint
    for run in runs[1:]:
        suite.same(runs[0], run)
    return runs[0]


def replica_of(model, loss=None, shards=2):
    return backend.replica(model, loss, ss.cpu(), shards)


def tensor(array):
    return backend.put(array, ss.cpu())


# Against the framework itself; against references in float64 see conformance/


@pytest.mark.parametrize("name", models.NAMES)
def test_models_have_the_names_and_layouts_of_every_framework(name):
    before = state()
    model, weights = getattr(models_paddle, name)(), getattr(models, name)()
    assert state() == before  # nothing was drawn
    tensors = replica_of(model).tensors()
    assert all(tensors[key].tobytes() == weight.tobytes() for key, weight in weights.items())
    assert all(".running_" in key or ".num_batches_tracked" in key for key in tensors.keys() - weights.keys())


def test_the_norm_of_the_models_against_numpy():
    norm, x = models_paddle.Norm(3), random.standard_normal((5, 3, 4, 2)).astype(np.float32)
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
    expected = (x - mean[:, None, None]) / np.sqrt(var + 1e-5)[:, None, None]
    np.testing.assert_allclose(norm(tensor(x)).numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(norm.running_mean.numpy(), 0.1 * mean, rtol=1e-5)
    np.testing.assert_allclose(norm.running_var.numpy(), 0.9 + 0.1 * var * 40 / 39, rtol=1e-5)
    assert norm.num_batches_tracked.item() == 1


def test_bad_sizes_of_an_mlp():
    with pytest.raises(ss.SamestepError, match="sizes must name at least"):
        models_paddle.mlp((3,))
    with pytest.raises(ss.SamestepError, match="dropout must be at least 0 and below 1"):
        models_paddle.mlp(dropout=1.0)


# Against a plain loop


def plain(model, optimizer, x, epochs=2, batch=32):
    """Paddle's own loop over the same order of examples."""
    for epoch in range(epochs):
        order = draws.order(0, epoch, len(x))
        for lo in range(0, len(x), batch):
            chosen = order[lo : lo + batch]
            F.cross_entropy(model(tensor(x[chosen])), tensor(Y[chosen])).backward()
            optimizer.step()
            optimizer.clear_grad()
    return {name: t.numpy() for name, t in model.state_dict().items()}


def close(ours, theirs, start):
    for name, weight in theirs.items():
        moved = np.abs(weight - start[name].numpy()).max()
        assert moved > 0
        np.testing.assert_allclose(ours[name], weight, atol=1e-4 * moved + 1e-7)


@pytest.mark.parametrize("shards", [1, 8])
def test_parity_with_a_plain_loop(shards):
    """Equal to rounding after two epochs, with our optimizer and with Paddle's."""
    twin, model = models_paddle.lenet_modern(), models_paddle.lenet_modern()
    expected = plain(twin, paddle.optimizer.Momentum(0.05, 0.9, parameters=twin.parameters()), X)
    theirs = paddle.optimizer.Momentum(0.05, 0.9, parameters=model.parameters())
    for settings in ({"optimizer": ss.sgd(momentum=0.9), "schedule": 0.05}, {"optimizer": theirs}):
        close(fit(model, shards=shards, **settings).weights(), expected, model.state_dict())


def test_a_gradient_that_is_a_weight_is_taken_before_it_moves():
    """The gradients of a and b are b and a themselves."""

    class Product(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx, a, b):
            ctx.held = a.detach(), b.detach()
            return (a * b).sum()

        @staticmethod
        def backward(ctx, _):
            return ctx.held[1], ctx.held[0]

    class Model(nn.Layer):
        def __init__(self):
            super().__init__()
            ones = nn.initializer.Constant(1.0)
            self.a = self.create_parameter([64], default_initializer=ones)
            self.b = self.create_parameter([64], default_initializer=ones)

        def forward(self, x):
            return x.mean() * 0 + Product.apply(self.a, self.b)

    settings = {"rehearse": False, "check_every": None}  # Paddle frees such a weight with the gradient
    run = fit(Model(), X[:1], Y[:1], shards=1, schedule=0.25, max_epochs=1, loss=lambda output, y: output, **settings)
    assert [set(weight.ravel()) for weight in run.weights().values()] == [{0.75}, {0.75}]


# What a layer keeps


def test_a_layer_with_batch_norm_and_dropout():
    make = functools.partial(dense, nn.BatchNorm1D(6), nn.ReLU(), nn.Dropout(0.5))
    run = same_on_three(make)
    assert not np.array_equal(run.weights()["2._mean"], np.zeros(6))
    trained = run.model
    assert isinstance(trained, nn.Sequential)
    assert np.array_equal(trained[2]._mean.numpy(), run.weights()["2._mean"])
    assert ss.Trainer(devices=2, batch_size=32).evaluate(trained, (SMALL, Y))["examples"] == 90
    again = fit(trained, x=SMALL)
    assert again.recipe["initial"] == run.fingerprint != again.fingerprint


def test_one_shard_has_the_statistics_of_a_plain_loop():
    def make():
        return dense(nn.BatchNorm1D(6, momentum=0.5))

    twin = make()
    expected = plain(twin, paddle.optimizer.SGD(0.1, parameters=twin.parameters()), SMALL)
    ours = fit(make(), x=SMALL, shards=1).weights()
    for name in ("2._mean", "2._variance"):
        np.testing.assert_allclose(ours[name], expected[name], rtol=1e-4, atol=1e-6)


class Counting(nn.Layer):
    """Keeps state in all ways: written in place, made anew, and a thing that only looks like state."""

    def __init__(self):
        super().__init__()
        paddle.seed(0)
        self.dense = nn.Linear(12, 10)
        self.register_buffer("sum", paddle.zeros([]))
        self.register_buffer("steps", paddle.zeros([2], "int64"))
        self.register_buffer("kept", paddle.ones([1]), persistable=False)

    def forward(self, x):
        if self.training:
            paddle.assign(self.sum + x.mean(), self.sum)
            self.steps = self.steps + 1
        self.kept = self.kept + 1.0
        self.last = self.dense(x) * (self.kept - 1)  # in Paddle this makes it a buffer
        return self.last


def test_buffers_are_the_mean_over_examples():
    run = same_on_three(Counting, max_epochs=1, batch_size=90, shards=7)
    np.testing.assert_allclose(run.weights()["sum"], SMALL.mean(), rtol=1e-5)
    assert run.weights()["steps"].tolist() == [1, 1]
    assert set(run.weights()) == {"dense.weight", "dense.bias", "sum", "steps"}
    assert run.model.kept.item() == 1  # as it was at the start of the run


def test_a_model_that_is_called_after_the_fit_does_not_change_the_run():
    model = Counting()
    run = fit(model, x=SMALL)
    model(tensor(SMALL))  # puts other tensors in the places of its buffers
    trained = run.model
    assert {name: t.numpy().tobytes() for name, t in trained.state_dict().items()} == {
        name: a.tobytes() for name, a in run.weights().items()
    }


class Hidden(nn.Layer):
    """Writes to what is no state."""

    def __init__(self, way):
        super().__init__()
        self.dense, self.way = nn.Linear(12, 10), way
        self.register_buffer("seen", paddle.zeros([12]), persistable=False)
        self.mean = self.create_parameter([12])
        self.mean.stop_gradient = True

    def forward(self, x):
        if self.training and self.way == "in place":
            paddle.assign(self.seen + 1, self.seen)
        if self.way == "by a kernel":
            x = F.batch_norm(x, self.mean, self.seen, training=self.training)
        return self.dense(x)


@pytest.mark.parametrize(("way", "name"), [("in place", "seen"), ("by a kernel", "mean")])
def test_state_that_is_not_kept_is_an_error(way, name):
    with pytest.raises(ss.SamestepError, match=f"'{name}' was written to in the forward pass"):
        fit(Hidden(way), x=SMALL)


class Tied(nn.Layer):
    """Weights that are shared, frozen, of few rows, unused; a part in evaluation mode."""

    def __init__(self):
        super().__init__()
        paddle.seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.words = nn.Embedding(40, 4, sparse=True)
        self.frozen, self.unused = nn.Linear(4, 10), nn.Linear(3, 3)
        self.frozen.weight.stop_gradient = True
        self.norm = nn.BatchNorm1D(4)
        self.norm.eval()

    def forward(self, x):
        return self.frozen(self.second(self.norm(self.first(self.words(x).mean(1)))))


def test_shared_frozen_and_sparse_weights():
    x = random.integers(0, 40, (90, 5))
    runs = [fit(Tied(), x=x, devices=k) for k in (1, 3)]
    suite.same(*runs)
    weights, start = runs[0].weights(), {name: t.numpy() for name, t in Tied().state_dict().items()}
    assert weights["first.weight"].tobytes() == weights["second.weight"].tobytes()
    for name in ("frozen.weight", "unused.weight", "norm._mean"):
        assert weights[name].tobytes() == start[name].tobytes()
    assert not np.array_equal(weights["words.weight"], start["words.weight"])
    assert runs[0].model.frozen.weight.stop_gradient
    whole = Tied()
    whole.words._sparse = False
    np.testing.assert_allclose(fit(whole, x=x).weights()["words.weight"], weights["words.weight"], atol=1e-6)


@pytest.mark.parametrize("wrap", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_layers_with_hooks(wrap):
    @seeded
    def make():
        return nn.Sequential(wrap(nn.Linear(12, 6)), nn.Tanh(), nn.Linear(6, 10))

    same_on_three(make)


@seeded
def recurrent():
    class Last(nn.Layer):
        def __init__(self):
            super().__init__()
            self.lstm, self.dense = nn.LSTM(3, 5, num_layers=2, dropout=0.3), nn.Linear(5, 10)

        def forward(self, x):
            return self.dense(self.lstm(x.reshape([-1, 4, 3]))[0][:, -1])

    return Last()


def test_a_recurrent_layer():
    same_on_three(recurrent)


def test_float64():
    @seeded
    def make():
        return dense().to(dtype="float64")

    runs = [fit(make(), x=SMALL.astype(np.float64), devices=k) for k in (1, 3)]
    suite.same(*runs)
    assert runs[0].weights()["1.weight"].dtype == np.float64


def test_fit_leaves_the_model_alone():
    model = dense(nn.BatchNorm1D(6))
    before = {name: t.numpy().tobytes() for name, t in model.state_dict().items()}
    model.eval()
    run = fit(model, x=SMALL)
    assert run.fingerprint != run.recipe["initial"]
    assert {name: t.numpy().tobytes() for name, t in model.state_dict().items()} == before
    assert not any(layer.training for layer in model.sublayers(include_self=True))
    assert all(p.grad is None for p in model.parameters())


def test_average():
    run = fit(models_paddle.lenet_modern(), average=ss.swa(1))
    assert run.average is not None
    assert run.average_model(tensor(X[:2])).shape == [2, 10]


# Noise


class Again(nn.Layer):
    """Dropout in a part that is computed again in the backward pass."""

    def __init__(self, reentrant):
        super().__init__()
        paddle.seed(0)
        self.reentrant = reentrant
        self.part, self.last = nn.Sequential(nn.Linear(12, 6), nn.Dropout(0.5)), nn.Linear(6, 10)

    def forward(self, x):
        if not self.training:
            return self.last(self.part(x))
        x.stop_gradient = False
        return self.last(recompute(self.part, x, use_reentrant=self.reentrant))


NOISY = {
    "nothing drawn": (dense, FREE),
    "dropout": (functools.partial(dense, nn.Dropout(0.5)), APART),
    "recompute": (functools.partial(Again, True), ALONE),
    "recompute with hooks": (functools.partial(Again, False), ALONE),
    "compiled": (lambda: paddle.jit.to_static(dense(nn.Dropout(0.5))), APART),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", NOISY)
def test_ways_of_drawing(name):
    make, way = NOISY[name]
    replica = replica_of(make())
    first = [replica.gradient(tensor(SMALL[:8]), tensor(Y[:8]), key, 0).numpy() for key in (5, 6, 5)]
    assert replica._noise[True].way == way
    assert first[0].tobytes() == first[2].tobytes()
    assert (first[0].tobytes() == first[1].tobytes()) == (way == FREE)
    replica._noise[True].way = ALONE  # the most general way draws the same numbers
    assert replica.gradient(tensor(SMALL[:8]), tensor(Y[:8]), 5, 0).numpy().tobytes() == first[0].tobytes()
    same_on_three(make)


def test_the_numbers_are_those_of_paddle_seed():
    x = tensor(SMALL[:8])
    model = dense(nn.Dropout(0.5))
    paddle.seed(77)
    loss = F.cross_entropy(model(x), tensor(Y[:8]), reduction="sum").item()
    vector = replica_of(model).gradient(x, tensor(Y[:8]), key=77, shard=0)
    assert vector[-4].item() == pytest.approx(loss, rel=1e-6)


class Sometimes(nn.Layer):
    """Draws for some examples only: the first shard does not show it."""

    def __init__(self):
        super().__init__()
        paddle.seed(0)
        self.dense = nn.Linear(12, 10)

    def forward(self, x):
        if float(x[0, 0]) > 0.5:
            x = F.dropout(x, 0.5, training=self.training)
        return self.dense(x)


def test_a_model_that_draws_late_is_found_out():
    same_on_three(Sometimes)


def test_threads_that_compute_side_by_side_do_not_see_each_other():
    """Sixteen threads, one model with batch norm: every shard has the bits it has alone."""
    replica = replica_of(models_paddle.resnet18(width=4), shards=1)
    x = random.random((32, 1, 40, 40), dtype=np.float32)
    shards = [(tensor(x[i : i + 4]), tensor(Y[i : i + 4])) for i in range(0, 32, 4)]
    alone = [replica.gradient(*shard, key=1, shard=0).numpy().tobytes() for shard in shards]
    found, together = {}, threading.Barrier(16)

    def work(i):
        together.wait()  # all live at once, so each has a lane of its own
        for n in range(2):
            found[i, n] = replica.gradient(*shards[i % 8], key=1, shard=0).numpy().tobytes()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(replica.lane._held) == 17
    assert all(found[i, n] == alone[i % 8] for i in range(16) for n in range(2))


def test_the_user_gets_the_generator_back():
    paddle.seed(3)
    before = state()
    fit(dense(nn.Dropout(0.5)), x=SMALL)
    paddle.seed(3)
    assert state() == before
    model = models_paddle.mlp((784, 32, 10))
    paddle.seed(3)
    flags = paddle.get_flags(["FLAGS_new_executor_serial_run"])
    fit(model, devices=2)
    ss.Trainer(devices=2).evaluate(model, (X, Y))
    assert state() == before
    assert paddle.get_flags(["FLAGS_new_executor_serial_run"]) == flags
    assert paddle.get_device() == "cpu"
    assert PaddleNoise.generator._inside == 0


# Compiled


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", suite.MODELS)
def test_compiled_layers_have_the_bits_of_the_suite(name):
    """Paddle builds a program for every replica and every size of a shard, which takes long: 2 replicas, sizes 2 and 1."""

    def run(model, k):
        trainer = ss.Trainer(max_epochs=2, batch_size=16, devices=k, progress=False)
        return trainer.fit(model, suite.data(name, 20))

    make = getattr(suite.zoo, name)
    eager = run(make(), 3)
    suite.same(eager, run(paddle.jit.to_static(make(), full_graph=True), 2))


# Losses


def test_losses_of_examples_their_mean_and_their_sum_agree():
    each = functools.partial(F.cross_entropy, reduction="none")
    whole = nn.CrossEntropyLoss(reduction="sum")
    losses = [None, each, F.cross_entropy, whole, lambda o, y: each(o, y).reshape([-1, 1])]
    rates = [0.1 / (16 if loss is whole else 1) for loss in losses]
    runs = [fit(dense(), SMALL[:32], Y[:32], loss=loss, schedule=rate, batch_size=16)
            for loss, rate in zip(losses, rates, strict=True)]  # fmt: skip
    for run in runs[1:]:
        for name, weight in run.weights().items():
            np.testing.assert_allclose(weight, runs[0].weights()[name], atol=1e-6)


def test_bad_losses():
    with pytest.raises(ss.SamestepError, match="one value per example"):
        fit(dense(), x=SMALL, loss=lambda output, y: output.reshape([-1]))
    with pytest.raises(ss.SamestepError, match="loss must return a tensor"):
        fit(dense(), x=SMALL, loss=lambda output, y: 1.0)


def test_a_loss_of_real_numbers():
    run = fit(dense(), x=SMALL, y=SMALL[:, :10], loss=nn.MSELoss())
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
        fit(models_paddle.lenet(), x=(X * 9).astype(np.uint8))
    with paddle.LazyGuard():
        lazy = nn.Linear(12, 10)
    with pytest.raises(ss.SamestepError, match="made under paddle.LazyGuard"):
        fit(lazy, x=SMALL)
    with pytest.raises(ss.SamestepError, match="made under paddle.LazyGuard"):
        ss.Trainer(devices="cpu").prepare_model(lazy)
    with pytest.raises(ss.SamestepError, match="has no parameters to train"):
        fit(nn.Flatten())
    with pytest.raises(ss.SamestepError, match="paddle has no uint16 arrays"):
        ss.put(np.zeros(3, np.uint16), "cpu", backend="paddle")
    with pytest.raises(ss.SamestepError, match="must all be float32 or all float64, got bfloat16"):
        fit(dense().to(dtype="bfloat16"), x=SMALL)


def test_out_of_memory():
    with pytest.raises(ss.SamestepError, match="the device ran out of memory.*: raise shards"):
        backend.map([lambda: paddle.zeros([1 << 44])])


# paddle.optimizer


def halves(parameters):
    """Two groups, one of them at half the rate and with weight decay."""
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "learning_rate": 0.5, "weight_decay": 0.1}]
    return paddle.optimizer.Adam(0.01, parameters=groups)


OPTIMIZERS = {
    "SGD": paddle.optimizer.SGD,
    "Adam": functools.partial(paddle.optimizer.Adam, 0.01),
    "AdamW": lambda p: paddle.optimizer.AdamW(0.01, weight_decay=0.1, parameters=p),
    "RMSProp": functools.partial(paddle.optimizer.RMSProp, 0.01, momentum=0.5, centered=True),
    "clipped": lambda p: paddle.optimizer.Momentum(
        0.1, parameters=p, grad_clip=nn.ClipGradByGlobalNorm(0.1), weight_decay=0.01
    ),
    "NAdam": functools.partial(paddle.optimizer.NAdam, 0.01),
    "Lamb": functools.partial(paddle.optimizer.Lamb, 0.01),
    "Adadelta": functools.partial(paddle.optimizer.Adadelta, 0.1),
    "groups": halves,
}


def given(name, parameters):
    make = OPTIMIZERS[name]
    return make(parameters) if name in ("AdamW", "clipped", "groups") else make(parameters=parameters)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_paddle(name):
    twin = dense()
    expected = plain(twin, given(name, twin.parameters()), SMALL)
    run = same_on_three(dense, optimizer=OPTIMIZERS[name])
    close(run.weights(), expected, dense().state_dict())
    model = dense()
    instance = given(name, model.parameters())
    suite.same(run, fit(model, x=SMALL, optimizer=instance, devices=2))
    assert all(not held for held in instance._accumulators.values())  # the user's is left as it was
    assert type(instance).__name__ in run.recipe["optimizer"]


def test_an_optimizer_with_a_past_and_frozen_parameters():
    model = dense(nn.BatchNorm1D(6))
    optimizer = paddle.optimizer.Momentum(0.05, 0.9, parameters=model.parameters())
    fresh = fit(model, x=SMALL, optimizer=optimizer)
    plain(model, optimizer, SMALL)
    past = {name: t.numpy() for name, t in optimizer.state_dict().items()}
    runs = [fit(model, x=SMALL, optimizer=optimizer, devices=k) for k in (1, 3)]
    suite.same(*runs)
    assert runs[0].recipe["optimizer"] != fresh.recipe["optimizer"]
    assert all(np.array_equal(t.numpy(), past[name]) for name, t in optimizer.state_dict().items())
    expected, start = plain(model, optimizer, SMALL), runs[0].weights()
    np.testing.assert_allclose(
        fit(model, x=SMALL, optimizer=optimizer, max_epochs=1, shards=1).weights()["1.weight"],
        expected["1.weight"],
        atol=1,
    )
    assert start.keys() == expected.keys()


class Remembering(paddle.optimizer.Momentum):
    """It divides gradients by a count, and adds a mean of them: a number, a list, and a tensor that it makes later."""

    def __init__(self, learning_rate=0.3, parameters=None):
        super().__init__(learning_rate, 0.9, parameters=parameters)
        self.count, self.past, self.means = 0, [1.5], {}

    def step(self):
        self.count += 1
        self.past.append(self.count / 2)
        for p in self._parameter_list:
            self.means["all"] = self.means.get("all", paddle.zeros([])) + p.grad.mean()
            p.grad = p.grad / len(self.past) + self.means["all"]
        super().step()


@pytest.mark.parametrize("made", ["by a class", "from the model"])
def test_what_an_optimizer_keeps_in_attributes_is_resumed(made, tmp_path, monkeypatch):
    def trained(**settings):
        model = dense()
        optimizer = Remembering if made == "by a class" else Remembering(parameters=model.parameters())
        return fit(model, x=SMALL, optimizer=optimizer, **settings)

    whole = trained()
    trained(run_dir=tmp_path, max_epochs=1)
    shutil.copytree(tmp_path, tmp_path / "twin")
    resumed = trained(run_dir=tmp_path, devices=2)
    assert resumed.resumed == 3
    suite.same(resumed, whole)
    load = PaddleUpdater.load

    def forget(self, tensors):
        load(self, tensors)
        self.optimizer.count, self.optimizer.past, self.optimizer.means = 0, [1.5], {}

    monkeypatch.setattr(PaddleUpdater, "load", forget)
    assert trained(run_dir=tmp_path / "twin").fingerprint != whole.fingerprint


def test_an_optimizer_inside_another_is_refused():
    """Its own LookAhead takes the rate for its alpha."""
    make = lambda parameters: paddle.incubate.LookAhead(paddle.optimizer.SGD(0.1, parameters=parameters))  # noqa: E731
    with pytest.raises(ss.SamestepError) as refused:
        fit(dense(), x=SMALL, optimizer=make)
    assert str(refused.value) == (
        "the optimizer sets no rate of the one inside it (inner_optimizer), nor keeps its state: use one"
    )


PARAM_ATTR = {
    "rate": (paddle.ParamAttr(learning_rate=0.5), "1.weight has learning_rate=0.5, regularizer=None, which"),
    "decay": (
        paddle.ParamAttr(regularizer=paddle.regularizer.L2Decay(0.1)),
        "1.weight has learning_rate=1.0, regularizer=L2Decay",
    ),
}


@pytest.mark.parametrize("kind", PARAM_ATTR)
def test_rates_and_decays_of_parameters_are_followed_by_paddle_and_refused_by_samesteps_optimizers(kind):
    def special(attr=PARAM_ATTR[kind][0]):
        paddle.seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 6, weight_attr=attr), nn.Tanh(), nn.Linear(6, 10))

    make = functools.partial(paddle.optimizer.Momentum, 0.3)
    twin = special()
    expected = plain(twin, make(parameters=twin.parameters()), SMALL)
    run = same_on_three(special, optimizer=make)
    close(run.weights(), expected, special().state_dict())
    assert run.fingerprint != fit(special(None), x=SMALL, optimizer=make).fingerprint
    with pytest.raises(ss.SamestepError) as refused:
        fit(special(), x=SMALL, optimizer=ss.sgd())
    assert str(refused.value).startswith(PARAM_ATTR[kind][1])
    assert str(refused.value).endswith("samestep's optimizers do not follow: use one of paddle, or leave it out")


def test_the_schedule_sets_the_rate():
    run = fit(dense(), x=SMALL, optimizer=paddle.optimizer.SGD, schedule=ss.poly(0.2, 6))
    assert run.history[-1]["lr"] == pytest.approx(0.2 / 6)
    ours = fit(dense(), x=SMALL, optimizer=ss.sgd(), schedule=ss.poly(0.2, 6))
    for name, weight in ours.weights().items():
        np.testing.assert_allclose(run.weights()[name], weight, atol=1e-6)
    assert fit(dense(), x=SMALL, optimizer=functools.partial(paddle.optimizer.SGD, 0.25)).history[0]["lr"] == 0.25


def test_groups_keep_their_ratio_to_the_schedule():
    slow = {"params": [2, 3], "learning_rate": 0.5}
    make = lambda p: paddle.optimizer.SGD(0.7, parameters=[{"params": p[:2]}, slow | {"params": p[2:]}])  # noqa: E731
    run = fit(dense(), x=SMALL, optimizer=make, schedule=ss.poly(0.2, 6))
    last = max(run.weights())[0]  # the second layer
    ours = fit(dense(), x=SMALL, groups={f"{last}.*": ss.group(lr_scale=0.5)}, schedule=ss.poly(0.2, 6)).weights()
    plain = fit(dense(), x=SMALL, schedule=ss.poly(0.2, 6)).weights()
    for name, weight in ours.items():
        np.testing.assert_allclose(run.weights()[name], weight, atol=1e-6)
        assert np.abs(plain[name] - weight).max() > 1e-4


def test_bad_optimizers():
    model, scheduler = dense(), paddle.optimizer.lr.ExponentialDecay(0.1, 0.9)
    with pytest.raises(ss.SamestepError, match="has a scheduler inside .ExponentialDecay."):
        fit(model, x=SMALL, optimizer=paddle.optimizer.SGD(scheduler, parameters=model.parameters()))
    with pytest.raises(ss.SamestepError, match="has a scheduler inside .ExponentialDecay."):  # it would be ignored
        fit(model, x=SMALL, optimizer=paddle.optimizer.SGD(scheduler, parameters=model.parameters()), lr=0.1)
    with pytest.raises(ss.SamestepError, match="not parameters of the model to be trained"):
        fit(model, x=SMALL, optimizer=paddle.optimizer.SGD(0.1, parameters=dense().parameters()))
    with pytest.raises(ss.SamestepError, match="must be a paddle.optimizer.Optimizer"):
        fit(model, x=SMALL, optimizer=lambda parameters: 3)
    with pytest.raises(ss.SamestepError, match="LBFGS computes the loss several times"):
        fit(model, x=SMALL, optimizer=paddle.optimizer.LBFGS)


def test_rates_of_a_scheduler():
    scheduler = paddle.optimizer.lr.StepDecay(0.4, step_size=2, gamma=0.5)
    assert backend.rates(scheduler, 5) == [0.4, 0.4, 0.2, 0.2, 0.1]
    assert scheduler.last_epoch == 0
    with pytest.raises(ss.SamestepError, match="use samestep.Plateau"):
        backend.rates(paddle.optimizer.lr.ReduceOnPlateau(0.1), 2)
    with pytest.raises(ss.SamestepError, match="must be a paddle.optimizer.lr.LRScheduler"):
        backend.rates("linear", 2)


# Checkpoints


class Interrupted(Exception):
    pass


@pytest.mark.parametrize(
    "optimizer", [ss.adam(), functools.partial(paddle.optimizer.Adam, 0.1)], ids=["ours", "theirs"]
)
@pytest.mark.parametrize("step", [1, 3, 4])
def test_killed_and_resumed_on_other_devices(step, optimizer, tmp_path, monkeypatch):
    monkeypatch.setattr("samestep.training.measuring._apart", lambda *about: 0.0)  # shards are counted
    settings = {"x": SMALL, "shards": 4, "optimizer": optimizer, "checkpoint_every": 1, "average": ss.path_average(),
                "rehearse": False, "check_every": None}  # fmt: skip
    whole = fit(dense(nn.BatchNorm1D(6), nn.Dropout(0.5)), devices=3, loss=F.cross_entropy, **settings)
    shards = 0

    def cross_entropy(output, y):
        nonlocal shards
        shards += not output.stop_gradient
        if shards == step * 4 + 2:
            raise Interrupted
        return F.cross_entropy(output, y)

    cross_entropy.__qualname__ = "cross_entropy"
    with pytest.raises(Interrupted):
        fit(
            dense(nn.BatchNorm1D(6), nn.Dropout(0.5)),
            devices=2,
            loss=cross_entropy,
            run_dir=tmp_path / "run",
            **settings,
        )
    model = dense(nn.BatchNorm1D(6), nn.Dropout(0.5))
    # the loss without the interruption is other code
    run = fit(model, devices=4, loss=F.cross_entropy, run_dir=tmp_path / "run", accept="code", **settings)
    assert run.resumed == step
    suite.same(whole, run)
    assert all(run.average[name].tobytes() == array.tobytes() for name, array in whole.average.items())


def test_what_is_saved_comes_back_to_the_bit():
    make = functools.partial(models_paddle.resnet18, width=4)
    one, other = replica_of(make()), replica_of(make(seed=1))
    one.load({name: a + a + 3 for name, a in one.tensors().items()})
    assert one.fingerprint().item() != other.fingerprint().item()
    other.load(one.tensors())
    assert one.fingerprint().item() == other.fingerprint().item()
    assert all(np.array_equal(a, other.tensors()[name]) for name, a in one.tensors().items())
    for mine, back in zip(one.real_vectors(), one.real_vectors_from(one.tensors()), strict=True):
        assert mine.numpy().tobytes() == back.numpy().tobytes()
    assert one.flat(one.named(one.parameters)).numpy().tobytes() == one.parameters.numpy().tobytes()
    assert {name: a.shape for name, a in one.named(one.parameters).items()} == {
        name: a.shape for name, a in models.resnet18(width=4).items()
    }


def test_weights_move_to_numpy_and_back(tmp_path):
    run = fit(models_paddle.lenet_modern(), run_dir=tmp_path / "run")
    from safetensors.numpy import load_file

    tensors = load_file(tmp_path / "run" / "weights.safetensors")
    model = models_paddle.lenet_modern(seed=1)
    assert model.set_state_dict(tensors) == ([], [])
    expected = run.model(tensor(X[:4])).numpy()
    assert model(tensor(X[:4])).numpy().tobytes() == expected.tobytes()


# Devices and vectors


def test_device_functions():
    array = paddle.ones([3])
    assert ss.put(array, "cpu") is array
    assert ss.device_of(array) == ss.cpu()
    assert isinstance(ss.put(np.ones(3, np.float32), "cpu", backend="paddle"), paddle.Tensor)
    assert isinstance(ss.get(array), np.ndarray)
    assert backend.devices() == [ss.cpu()]
    total, used = backend.memory(ss.cpu())
    assert 0 < used < total
    assert ss.try_gpu(backend="paddle") == ss.cpu()
    with pytest.raises(ss.SamestepError, match="device cuda:0 is not there: paddle sees cpu"):
        ss.put(array, "cuda")


def test_copies_share_nothing_and_have_gradients():
    weight = paddle.ones([2, 3])
    [copied] = ss.replicate([weight], "cpu")
    assert copied.grad.numpy().tolist() == np.zeros((2, 3)).tolist()
    assert not copied.stop_gradient
    backend.assign(copied, paddle.full([2, 3], 5.0))
    assert weight.sum().item() == 6
    assert copied.sum().item() == 30


@pytest.mark.parametrize("how", ["tree", "gather", "ring", "sharded"])
def test_allreduce(how):
    arrays = [paddle.full([2, 3], float(i)) for i in range(1, 4)]
    sums = ss.allreduce(arrays, how)
    assert all(np.array_equal(total.numpy(), np.full((2, 3), 6.0)) for total in sums)
    assert all(array.sum().item() == 36 for array in arrays)  # in place


def test_vectors_are_laid_out_as_the_models_tensors():
    tensors = [paddle.to_tensor(np.full(shape, i, np.float32)) for i, shape in enumerate([(3,), (), (2, 9)])]
    flat = Flat.of(["a", "b", "c"], tensors)
    assert [start * 4 % 64 for start, _ in flat.layout.spans] == [0, 0, 0]
    assert [view.tolist() for view in flat.views.values()] == [t.tolist() for t in tensors]
    assert paddle.concat(flat.pieces(tensors)).tolist() == flat.vector.tolist()


def test_fingerprints_see_every_bit_and_place():
    def of(*numbers):
        layer = nn.Layer()
        layer.weight = layer.create_parameter([len(numbers)])
        layer.weight.set_value(np.array(numbers, np.float32))
        return replica_of(layer, shards=1).fingerprint().item()

    some = [(1, 2, 0), (2, 1, 0), (-1, -2, 0), (-1, 2, 0), (1, 2, -0.0), (1, 2, 0, 0)]
    assert len({of(*numbers) for numbers in some}) == 5  # a zero at the end is padding
    rows = np.zeros(1 << 18, np.float32)
    seen = set()
    for place in (0, 1, 1 << 16, (1 << 16) + 1, (1 << 17), (1 << 18) - 1):
        rows[:] = 0
        rows[place] = 1
        seen.add(of(*rows))
    assert len(seen) == 6
    # two signs, the highest bits: where the sum wraps around, they must not cancel each other
    signs = [[-0.0 if place in (i, j) else 0.0 for place in range(16)] for i in range(16) for j in range(i + 1)]
    assert len({of(*numbers) for numbers in signs}) == len(signs) == 136


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "uint8", "bool"])
@pytest.mark.parametrize("n", [0, 1, 17, 8192, 40_007])
def test_fingerprints_against_whole_numbers_of_python(n, dtype):
    vector = (random.random(n) * 100).astype(dtype)
    found = of_vectors([numpy_view(tensor(vector))])
    assert int(found[0]) % (1 << 64) == of_bytes(vector.tobytes())


def test_fingerprints_follow_every_way_to_write():
    replica = replica_of(dense(nn.BatchNorm1D(6)))
    total = replica.gradient(tensor(SMALL[:8]), tensor(Y[:8]), 1, 0)
    updater = backend.updater(paddle.optimizer.SGD, replica, 0.0)
    seen = {replica.fingerprint().item()}
    for write in (
        lambda: replica.assign(replica.parameters - 1.0),
        lambda: replica.advance(total, 8),
        lambda: replica.load({name: array + 1 for name, array in replica.tensors().items()}),
        lambda: updater.follow(total, 8, 0.1, 0, None),
    ):
        write()
        seen.add(replica.fingerprint().item())
        assert replica.fingerprint() == of_vectors([backend.get(vector) for vector in replica.vectors])
    assert len(seen) == 5


SCRIPT = """
import warnings; warnings.simplefilter("ignore")
import numpy as np, samestep as ss
from samestep.models.paddle import lenet
r = np.random.default_rng(0)
x, y = r.random((300, 1, 28, 28), dtype=np.float32), r.integers(0, 10, 300)
print(ss.Trainer(max_epochs=1, devices=2, progress=False).fit(lenet(), (x, y)).fingerprint)
"""


def test_the_threads_of_mkl_have_no_way_in():
    """In processes of their own: Paddle takes its number of threads from OMP_NUM_THREADS when it is imported."""
    prints = set()
    for threads in ("1", "2", "7"):
        env = os.environ | {"OMP_NUM_THREADS": threads}
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        prints.add(done.stdout.strip())
    assert len(prints) == 1


THREADS = """
import warnings; warnings.simplefilter("ignore")
import os, sys, numpy as np
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])
import samestep as ss
from paddle import nn
from samestep.backends.paddle.backend import MKL
from samestep.models.paddle import mlp
seen = set()

class Watched(nn.Layer):
    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        if self.training:
            seen.add(MKL.MKL_Get_Max_Threads())
        return self.inner(x)

r = np.random.default_rng(0)
x, y = r.random((96, 1, 28, 28), dtype=np.float32), r.integers(0, 10, 96)
trainer = ss.Trainer(max_epochs=1, batch_size=32, shards=1, threads_per_shard=int(sys.argv[2]), progress=False)
print(trainer.fit(Watched(), (x, y)).fingerprint, *seen)
"""


def test_a_shards_threads_are_those_asked_for_and_the_cores_have_no_say():
    """Whether another number of threads gives other bits depends on the CPU: MKL's do on Intel's."""

    def run(cores, threads):
        given = [sys.executable, "-c", THREADS, str(cores), str(threads)]
        done = subprocess.run(given, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    one, two = run(1, 2), run(2, 2)  # on a machine of one core, the same twice
    assert one == two
    assert two[1:] == ["2"]
    assert run(2, 1)[1:] == ["1"]


def test_the_generator_is_paddles():
    assert GENERATOR.initial_seed() == paddle.framework.core.default_cpu_generator().initial_seed()


# Numerics: settings that are pinned or refused, and portable runs

PORTABLE = """
import warnings
warnings.simplefilter("ignore")
{first}
import numpy as np, paddle, samestep as ss
from paddle import nn
{then}
random = np.random.default_rng(0)
x, y = random.random((24, 12), dtype=np.float32), random.integers(0, 10, 24)
paddle.seed(0)
model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1D(16), nn.ReLU(), nn.Linear(16, 10))
trainer = ss.Trainer(max_epochs=1, batch_size=12, shards=2, devices=1, progress=False, portable=True, optimizer=ss.adam())
try:
    recipe = trainer.fit(model, (x, y)).recipe
    print(recipe["portable"], recipe["numerics"]["mkl_branch"], "cpu" in recipe["numerics"], recipe["unchecked"])
except ss.SamestepError as error:
    print(error)
"""
IN_TIME = 'import os; os.environ["SAMESTEP_PORTABLE"] = "1"'


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        (IN_TIME, "paddle.ones([8, 8]) @ paddle.ones([8, 8])", "True 3 False []"),
        ("", "", "True 3 False []"),  # nothing was computed before
        ("", "paddle.ones([8, 8]) @ paddle.ones([8, 8])", "SAMESTEP_PORTABLE=1 before Python starts"),
    ],
)
def test_a_portable_run_needs_its_variables_before_paddle_computes(first, then, said):
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("SAMESTEP_PORT", "MKL_", "ONEDNN_"))
    }
    code = PORTABLE.format(first=first, then=then)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert said in done.stdout


def test_square_roots_of_a_portable_run_are_exact_and_afterwards_as_before():
    x, before = tensor(X.ravel() + 0.1), paddle._C_ops.sqrt
    with exact():
        assert paddle.sqrt(x).numpy().tobytes() == np.sqrt(x.numpy()).tobytes()
        assert x.sqrt().dtype == paddle.float32
        out = paddle.zeros_like(x)
        paddle.sqrt(x=x, out=out)
        assert out.numpy().tobytes() == np.sqrt(x.numpy()).tobytes()
    assert paddle._C_ops.sqrt is before
    assert paddle.nn.functional.common.sqrt is before


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_of_a_portable_run_agrees_with_paddles_own(training):
    def computed():
        layer = nn.BatchNorm2D(3)
        layer.train() if training else layer.eval()
        x = tensor(X[:12].reshape(4, 3, 28, 28).copy())
        x.stop_gradient = False
        (layer(x) ** 3).sum().backward()
        return [t.numpy() for t in (x.grad, layer.weight.grad, layer._mean, layer._variance)]

    ours, theirs = computed(), computed()
    with exact():
        ours = computed()
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == their.dtype
        np.testing.assert_allclose(our, their, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", REFUSED)
def test_an_optimizer_that_is_not_portable_is_refused_and_says_what_to_use(kind):
    made = getattr(paddle.optimizer, kind)(learning_rate=0.1, parameters=dense().parameters())
    with pytest.raises(Invalid, match=rf"portable: Paddle's {kind} has other bits .* ss.adam"):
        check_optimizer(made, portable=True)
    check_optimizer(paddle.optimizer.Momentum(parameters=dense().parameters()), portable=True)
    check_optimizer(made, portable=False)


def test_a_fit_inside_no_grad_is_the_same():
    with paddle.no_grad():
        inside = fit(dense(), x=SMALL, shards=1)
    suite.same(inside, fit(dense(), x=SMALL, shards=1))


def test_the_recipe_knows_neither_counters_nor_what_a_forward_pass_leaves():
    def model():
        paddle.seed(0)
        layer = nn.LSTM(3, 4, num_layers=2, dropout=0.2)
        normed = nn.utils.weight_norm(nn.Linear(4, 4))
        normed.register_forward_pre_hook(layer_of_user)
        return nn.Sequential(nn.BatchNorm1D(4), normed, nn.utils.spectral_norm(nn.Linear(4, 4)), layer)

    def parts(model):
        found = Content(backend.content)
        found.add("model", model, weights=False)
        assert not found.unchecked
        return found.parts

    first, second = model(), model()
    assert parts(first) == parts(second)
    for layer, width in zip(first, (4, 4, 4, None), strict=True):
        layer(paddle.rand([2, width] if width else [2, 3, 3]))
    after = parts(first)
    assert [name for name in after if after[name] != parts(second)[name]] == ["model.0"]  # Paddle notes NCHW for NCL
    assert parts(paddle.jit.to_static(model())) == parts(second)


def layer_of_user(layer, inputs):
    return None


# Modes around a fit, and state of any type


@contextlib.contextmanager
def between(on, off):
    on()
    try:
        yield
    finally:
        off()


TAKEN = {
    "no_grad": paddle.no_grad,
    "auto_cast": lambda: paddle.amp.auto_cast(dtype="bfloat16"),
    "auto_cast O2": lambda: paddle.amp.auto_cast(dtype="bfloat16", level="O2"),
    "saved_tensors_hooks": lambda: paddle.autograd.saved_tensors_hooks(lambda t: t, lambda t: t),
    "unique_name": paddle.utils.unique_name.guard,
    "program_guard": lambda: paddle.static.program_guard(paddle.static.Program()),
    "set_device": lambda: between(lambda: paddle.set_device("cpu"), lambda: None),
    "check_nan_inf": lambda: between(
        lambda: paddle.set_flags({"FLAGS_check_nan_inf": True}),
        lambda: paddle.set_flags({"FLAGS_check_nan_inf": False}),
    ),
}


@pytest.mark.filterwarnings("ignore:amp_guard can only be enabled")
@pytest.mark.parametrize("name", TAKEN)
def test_a_mode_around_a_fit_has_no_way_in(name, monkeypatch):
    model = dense(nn.BatchNorm1D(6), nn.Dropout(0.5))
    found = modes.outcome(monkeypatch, TAKEN[name], lambda k: fit(model, x=SMALL, devices=k, shards=4))
    plain = fit(model, x=SMALL, shards=4)
    assert found == (plain.fingerprints, plain.recipe)


class Made(nn.Layer):
    """Makes a tensor of the default type."""

    def forward(self, x):
        return x + (paddle.full([6], 0.1) * 3).astype("float32")


def test_the_default_type_is_taken_by_all_threads_and_is_in_the_recipe(monkeypatch):
    def around():
        return between(lambda: paddle.set_default_dtype("float64"), lambda: paddle.set_default_dtype("float32"))

    model = dense(Made())
    _, recipe = modes.outcome(monkeypatch, around, lambda k: fit(model, x=SMALL, devices=k, shards=4))
    assert recipe["numerics"]["settings"]["default_dtype"] == "float64"


def test_static_mode_is_refused(monkeypatch):
    model = dense()
    said = modes.outcome(
        monkeypatch,
        lambda: between(paddle.enable_static, paddle.disable_static),
        lambda k: fit(model, x=SMALL, devices=k),
    )
    assert said == "Paddle is in static mode, where a run cannot compute: call paddle.disable_static() first"


STATES = {  # at the start, and after nine steps
    "float16": ([0.25, 3], [9.25, 12]), "float64": ([0.25, 1e300], [9.25, 1e300]), "int8": ([-3, 100], [6, 109]),
    "uint8": ([250, 3], [3, 12]), "int64": ([2**62 + 1, -5], [2**62 + 10, 4]), "bool": ([True, False], [False, True]),
}  # fmt: skip


class Holding(nn.Layer):
    def __init__(self, dtype, start, changes=False, frozen=False):
        super().__init__()
        self.inner, self.changes = nn.Linear(12, 10), changes
        value = paddle.to_tensor(np.array(start)).astype(dtype)
        if frozen:
            self.s = self.create_parameter([2], dtype=dtype)
            self.s.set_value(value)
            self.s.stop_gradient = True
        else:
            self.register_buffer("s", value)

    def forward(self, x):
        if self.training and self.changes:  # Paddle adds no float16 on the CPU
            now, kind = self.s, self.s.dtype
            wide = "float32" if kind == paddle.float16 else kind
            self.s = ~now if kind == paddle.bool else (now.astype(wide) + paddle.ones([2], wide)).astype(kind)
        return self.inner(x)


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("dtype", STATES)
def test_buffers_of_any_type_survive(dtype, changes, tmp_path):
    start, end = STATES[dtype]
    value = end if changes else start
    make = functools.partial(seeded(Holding), dtype, start, changes)
    run = modes.survives(fit, make, "s", value, tmp_path / "run", x=SMALL, shards=4)
    assert (str(run.model.s.dtype), run.model.s.numpy().tolist()) == (f"paddle.{dtype}", value)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_frozen_parameters_of_16_bits_survive(dtype, tmp_path):
    """NumPy has no bfloat16: the run holds float32, and the model has bfloat16 again."""
    make = functools.partial(seeded(Holding), dtype, [0.25, 3], False, True)
    run = modes.survives(fit, make, "s", [0.25, 3], tmp_path / "run", x=SMALL, shards=4)
    assert str(run.model.s.dtype) == f"paddle.{dtype}"
    assert run.model.s.astype("float32").numpy().tolist() == [0.25, 3]
    assert str(run.weights()["s"].dtype) == {"bfloat16": "float32"}.get(dtype, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "complex64", "float8_e4m3fn"])
def test_buffers_of_other_types_are_refused(dtype):
    with pytest.raises(ss.SamestepError, match=f"a tensor of the model is of type {dtype}: it must be one of float16"):
        fit(Holding(dtype, [1, 2]), x=SMALL)


def test_a_hidden_buffer_that_would_come_back_as_another_type_is_refused():
    model = Holding("int8", [1, 2])
    model.register_buffer("t", paddle.ones([2]).astype("float8_e4m3fn"), persistable=False)
    with pytest.raises(ss.SamestepError, match="t is of type float8_e4m3fn, which NumPy does not know: convert it"):
        fit(model, x=SMALL)


def over_weights():
    """Losses, scores and labels: all that Paddle's own mean may be over."""
    random = np.random.default_rng(0)
    scores, counts = paddle.to_tensor(random.normal(size=(6, 3, 5))), paddle.to_tensor([0.5, 2, 1, 3, 0.25], "float64")
    labels, chances = random.integers(0, 5, (6, 3)), paddle.to_tensor(random.dirichlet(np.ones(5), (6, 3)))
    labels[0] = 2
    y, some = paddle.to_tensor(labels), paddle.to_tensor(np.where(random.random((6, 3)) < 0.5, -100, labels))
    layer, function = nn.CrossEntropyLoss, functools.partial(F.cross_entropy, weight=counts, ignore_index=2)
    return {
        "all": (F.cross_entropy, scores, y, False),
        "below zero": (layer(), scores, some, False),  # Paddle divides by all of them
        "ignored": (layer(ignore_index=2), scores, y, True),
        "classes": (layer(weight=counts), scores, some, True),
        "classes, one ignored": (function, scores, y, True),
        "classes at 1": (layer(weight=counts, axis=1), scores.transpose([0, 2, 1]), y.unsqueeze(1), True),
        "a place for the class": (layer(weight=counts), scores, y.unsqueeze(-1), True),
        "chances": (layer(soft_label=True), scores, chances, False),
        "chances, classes": (layer(soft_label=True, weight=counts), scores, chances, True),
        "smoothed": (layer(label_smoothing=0.1), scores, y, False),
        "smoothed, classes": (layer(label_smoothing=0.1, weight=counts), scores, y, True),
        "smoothed, one-hot": (
            layer(label_smoothing=0.1, weight=counts),
            scores,
            F.one_hot(y, 5).astype("float64"),
            True,
        ),
        "logs": (nn.NLLLoss(weight=counts, ignore_index=2), F.log_softmax(scores[:, 0]), y[:, 0], True),
        "a sum": (nn.NLLLoss(reduction="sum"), F.log_softmax(scores[:, 0]), y[:, 0], None),
        "none": (layer(reduction="none", weight=counts), scores, y, None),
        "another": (lambda output, y: F.cross_entropy(output, y), scores, y, False),
    }


def test_losses_over_a_weight_are_paddles_own_mean():
    for name, (loss, output, y, over) in over_weights().items():
        parts = [weighted(loss, output[lo:hi], y[lo:hi]) for lo, hi in ((0, 1), (1, 3), (3, 6))]
        assert [part is not None for part in parts] == [bool(over)] * 3, name
        if over is None:
            continue
        if over:
            total, weight = (float(sum(column)) for column in zip(*parts, strict=True))
        else:  # a mean over the examples
            total, weight = (
                sum((hi - lo) * float(loss(output[lo:hi], y[lo:hi])) for lo, hi in ((0, 1), (1, 3), (3, 6))),
                6,
            )
        assert abs(total / weight - float(loss(output, y))) < 1e-14, name


def test_a_number_is_not_rounded_to_half_precision():
    for value in (0.1, paddle.to_tensor([0.1], "float64"), 257):
        for kind, wide in (("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")):
            number = backend.number(value, paddle.zeros([], kind))
            assert (str(number.dtype), number.shape) == (f"paddle.{wide}", [])
            assert float(number) == np.dtype(wide).type(257 if value == 257 else 0.1)


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3)])
def test_ignored_labels_of_nll_are_left_out(shape):
    """Against sums by hand: at an ignored label, Paddle's own gradient writes outside of its memory."""
    random, places = np.random.default_rng(0), () if shape == (1,) else shape
    scores, counts = random.normal(size=(6, 5, *places)), np.array([0.5, 2, 1, 3, 0.25])
    y = random.integers(0, 5, (6, *shape))
    y[1:3] = 2
    for settings in ({}, {"weight": counts}, {"ignore_index": 2}, {"ignore_index": 2, "weight": counts}):
        labels = y if "ignore_index" in settings else np.where(y == 2, -100, y)
        weights = settings.get("weight", np.ones(5))[y] * (y != 2)
        one = np.moveaxis(np.eye(5)[y] * weights[..., None], -1, 1).reshape(scores.shape)
        output = paddle.to_tensor(scores, stop_gradient=False)
        given = {name: paddle.to_tensor(value) if name == "weight" else value for name, value in settings.items()}
        total, weight = weighted(nn.NLLLoss(**given), output, paddle.to_tensor(labels))
        total.backward()
        assert abs(float(total) + (scores * one).sum()) < 1e-13
        assert abs(float(weight) - weights.sum()) < 1e-13
        assert (output.grad.numpy() == -one).all()


def test_a_loss_per_shard_with_parameters_is_refused():
    class Scaled(nn.Layer):
        def __init__(self):
            super().__init__()
            self.scale = self.create_parameter([1])

        def forward(self, output, y):
            return (output * self.scale).mean()

    for loss in (Scaled(), ss.per_shard(Scaled())):
        with pytest.raises(ss.SamestepError, match=r"depends on a parameter \('scale' of the loss\)"):
            backend.replica(nn.Linear(2, 2), loss, ss.cpu(), 2)
