"""What is particular to JAX: its kinds of models, its compiled step, its threads, optax. Sameness is in conformance/."""

import contextlib
import dataclasses
import doctest
import functools
import gc
import json
import os
import re
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

if os.environ.get("SAMESTEP_TEST_BACKEND", "torch") != "jax":
    pytest.skip("one framework per process: set SAMESTEP_TEST_BACKEND=jax", allow_module_level=True)

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from conformance import modes, suite
from flax import nnx
from jax.experimental.compute_on import compute_on
from jax.experimental.xla_metadata import set_xla_metadata

import samestep as ss
from samestep import draws, models
from samestep.backends import eigen
from samestep.backends.base import Backend
from samestep.backends.jax import backend as backends_jax
from samestep.backends.jax import numerics as jax_numerics
from samestep.backends.jax import replica as jax_replica
from samestep.backends.jax.adapters import LinenAdapter, adapt, drawn
from samestep.backends.jax.backend import checked
from samestep.backends.jax.clients import computing
from samestep.backends.jax.content import _told, content
from samestep.backends.jax.fingerprint import fingerprint
from samestep.backends.jax.program import jitted
from samestep.backends.losses import Measure
from samestep.backends.updaters import Mean
from samestep.content import Content
from samestep.data import feed as data
from samestep.models import jax as models_jax
from samestep.models.jax import Pair
from samestep.optimizers import updating
from samestep.training.replicas import Replicas

backend = backends_jax.backend
random = np.random.default_rng(0)
X = random.random((90, 1, 28, 28), dtype=np.float32)
Y = random.integers(0, 10, 90)


def fit(model, x=X, y=Y, **settings):
    settings = {"max_epochs": 2, "batch_size": 32, "devices": 1, "progress": False} | settings
    return ss.Trainer(**settings).fit(model, (x, y))


def line(n=3):
    return Pair(lambda w, x: x.reshape(len(x), -1)[:, :4] @ w["slope"], {"slope": jnp.zeros((4, n))})


def plain():
    """Quick to compile, and without noise."""
    return models_jax.mlp((784, 32, 10), dropout=0)


def probed(model, x=X, y=Y, loss=None, shards=2):
    backend.probe(model, loss, x[:1], y[:1])
    return backend.replica(model, loss, ss.cpu(), shards)


def test_doctests():
    for module in (models_jax, backends_jax):
        assert doctest.testmod(module).failed == 0


# Against the framework itself; against references in float64 see conformance/


@pytest.mark.parametrize("name", models.NAMES)
def test_models_have_the_names_and_layouts_of_every_framework(name):
    model, weights = getattr(models_jax, name)(), getattr(models, name)()
    tensors = backend.replica(model, None, ss.cpu(), 1).tensors()
    assert all(tensors[key].tobytes() == weight.tobytes() for key, weight in weights.items())
    assert all(".running_" in key or ".num_batches_tracked" in key for key in tensors.keys() - weights.keys())


# Against a plain loop


@pytest.mark.parametrize("shards", [1, 8])
def test_parity_with_a_plain_loop_of_optax(shards):
    """The same order of examples, one jitted step: equal to rounding after two epochs."""
    model = plain()
    optimizer = optax.sgd(0.05, momentum=0.9)

    @jax.jit
    def step(params, state, x, y):
        def loss(params):
            output = model.apply(params, x, key=None, train=True)
            return optax.softmax_cross_entropy_with_integer_labels(output, y).mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    params, state = model.params, optimizer.init(model.params)
    for epoch in range(2):
        order = draws.order(0, epoch, len(X))
        for lo in range(0, len(X), 32):
            chosen = order[lo : lo + 32]
            params, state = step(params, state, X[chosen], Y[chosen])
    for settings in ({"optimizer": ss.sgd(momentum=0.9), "schedule": 0.05}, {"optimizer": optimizer}):
        weights = fit(model, shards=shards, **settings).weights()
        for name, start in model.params.items():
            moved = np.abs(params[name] - start).max()
            assert moved > 0
            np.testing.assert_allclose(weights[name], params[name], atol=1e-4 * moved + 1e-7)


# Kinds of models


class Dense(nn.Module):
    """Dropout, batch norm, and both words for training."""

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dense(8)(x.reshape(len(x), -1))
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(10)(nn.Dropout(0.5, deterministic=not train)(nn.relu(x)))


def test_a_linen_module():
    runs = [fit(Dense(), devices=k) for k in (1, 3)]
    assert runs[0].fingerprints == runs[1].fingerprints
    assert {"Dense_0.kernel", "batch_stats.BatchNorm_0.mean"} <= set(runs[0].weights())
    # the trained model is the module bound to its variables: it can be called, evaluated, and trained further
    trained = runs[0].model
    assert trained(jnp.asarray(X[:2]), train=False).shape == (2, 10)
    evaluated = ss.Trainer(devices=2, batch_size=32).evaluate(trained, (X, Y))
    assert evaluated["examples"] == 90
    again = fit(trained)
    assert again.recipe["initial"] == runs[0].fingerprint != again.fingerprint
    mine = Dense().bind(runs[0].state_dict())
    assert jnp.array_equal(mine(X[:2], train=False), trained(X[:2], train=False))


def test_a_linen_module_bound_to_variables_starts_from_them():
    module = Dense()
    variables = module.init(
        {"params": jax.random.key(3), "dropout": jax.random.key(4)}, jnp.asarray(X[:1]), train=False
    )
    bound = fit(module.bind(variables))
    assert bound.recipe["initial"] != fit(module).recipe["initial"]
    mine = ss.Trainer(devices="cpu").prepare_model(module.bind(variables))
    assert jnp.array_equal(mine.variables["params"]["Dense_0"]["kernel"], variables["params"]["Dense_0"]["kernel"])


class Graph(nnx.Module):
    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(784, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.dropout, self.last = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(8, 10, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x.reshape(len(x), -1))))))


def test_an_nnx_module():
    model = Graph(nnx.Rngs(0))
    before = jnp.copy(model.first.kernel.get_value())
    runs = [fit(model, devices=k) for k in (1, 3)]
    assert runs[0].fingerprints == runs[1].fingerprints
    assert {"first.kernel", "norm.mean"} <= set(runs[0].weights())
    assert jnp.array_equal(model.first.kernel.get_value(), before)
    trained = runs[0].model
    assert np.array_equal(trained.first.kernel.get_value(), runs[0].weights()["first.kernel"])
    assert jnp.array_equal(trained(X[:2]), trained(X[:2]))  # in evaluation mode, without dropout
    mine = Graph(nnx.Rngs(1))
    nnx.update(mine, runs[0].state_dict())
    mine.eval()
    assert jnp.array_equal(mine(X[:2]), trained(X[:2]))
    assert not np.array_equal(runs[0].weights()["norm.mean"], np.zeros(8))
    assert fit(model, seed=1).fingerprint != runs[0].fingerprint


def test_a_module_without_variables_says_what_to_do():
    with pytest.raises(ss.SamestepError, match="has no variables yet: pass model.bind"):
        ss.Trainer(devices="cpu").prepare_model(Dense())


def test_a_pair_with_an_init_and_one_without():
    def init(key, x):
        return [jax.random.normal(key, (4, 10)) * 0.1]

    def apply(params, x):
        return x.reshape(len(x), -1)[:, :4] @ params[0]

    made = fit(Pair(apply, init))
    given = fit(Pair(apply, init(jax.random.key(0), None)))
    assert made.fingerprints == given.fingerprints
    assert list(made.weights()) == ["0"]
    assert made.model(jnp.asarray(X[:3])).shape == (3, 10)


def test_running_statistics_are_the_mean_over_examples():
    def apply(params, state, x, train):
        mean = x.mean()
        return x.reshape(len(x), -1)[:, :10] * params, {"sum": state["sum"] + mean, "steps": state["steps"] + 1}

    model = Pair(apply, jnp.ones(10), {"sum": jnp.zeros(()), "steps": jnp.asarray(0)})
    weights = fit(model, max_epochs=1, batch_size=90, shards=7).weights()
    np.testing.assert_allclose(weights["sum"], X.mean(), rtol=1e-5)
    assert weights["steps"] == 1


def test_a_state_of_three_types_of_number():
    """bfloat16 is real, though not to NumPy: an average takes it, and a checkpoint brings it back."""
    state = {"half": jnp.asarray([1.5, 2.5], jnp.bfloat16), "count": jnp.asarray(3), "sum": jnp.ones(2)}
    replica = probed(Pair(lambda w, state, x: (x.reshape(len(x), -1)[:, :10] * w, state), jnp.ones(10), state))
    assert [(layout.dtype, layout.real) for layout in replica.layouts] == [
        ("float32", True), ("int32", False), ("bfloat16", True), ("float32", True),
    ]  # fmt: skip
    tensors, before = replica.tensors(), replica.fingerprint().tolist()
    assert [vector.dtype for vector in replica.real_vectors()] == [jnp.float32, jnp.bfloat16, jnp.float32]
    assert list(tensors) == ["", "count", "half", "sum"]
    replica.replace([vector * 0 for vector in replica.vectors])
    assert replica.fingerprint().tolist() != before
    replica.load(tensors)
    assert replica.fingerprint().tolist() == before
    assert replica.model().state["half"].tolist() == [1.5, 2.5]


def test_average():
    run = fit(plain(), average=ss.swa(1))
    assert run.average is not None
    assert run.average_model(jnp.asarray(X[:2])).shape == (2, 10)


# Losses


def test_losses_of_examples_and_their_mean_agree():
    def each(output, y):
        return optax.softmax_cross_entropy_with_integer_labels(output, y)

    runs = [fit(plain(), loss=loss) for loss in (None, each, lambda o, y: each(o, y).mean())]
    for run in runs[1:]:
        for name, weight in run.weights().items():
            np.testing.assert_allclose(weight, runs[0].weights()[name], atol=1e-6)


def test_a_loss_of_the_wrong_length():
    with pytest.raises(ss.SamestepError, match="one value per example"):
        fit(line(), loss=lambda output, y: output.reshape(-1))


# Errors


def test_labels_out_of_range():
    with pytest.raises(ss.SamestepError, match="labels must be from 0 to 2, as the model gives 3 scores"):
        fit(line())


def test_nan_names_step_and_shard():
    x = X.copy()
    x[draws.order(0, 0, 90)[32 + 31]] = np.nan  # the last example of the second batch
    with pytest.raises(ss.SamestepError, match="at step 1, shard 7"):
        fit(line(10), x=x, max_epochs=1)


def test_other_types_are_named():
    with pytest.raises(ss.SamestepError, match="float16 and the model float32"):
        fit(line(10), x=X.astype(np.float16))
    with pytest.raises(ss.SamestepError, match="has no parameters to train"):
        fit(Pair(lambda params, x: x, {}))
    with pytest.raises(ss.SamestepError, match="beyond 32 bits"):
        ss.put(np.array([2**40]), "cpu", backend="jax")
    with pytest.raises(ss.SamestepError, match="Pair of a function and its parameters"):
        ss.Trainer().fit(object(), (X, Y))


def test_out_of_memory_says_how_much_was_asked_and_what_to_do():
    def apply(w, x, train):
        return x.reshape(len(x), -1)[:, :10] * w + (jnp.ones((len(x), 10, 1 << 40)).cumsum(2)[:, :, 7] if train else 0)

    with pytest.raises(ss.SamestepError, match=r"ran out of memory when \d+ bytes were asked for: raise shards"):
        fit(Pair(apply, jnp.ones(10)))


# optax


def test_a_function_of_the_rate_follows_the_schedule():
    schedule = optax.cosine_decay_schedule(0.05, 6)
    theirs = fit(line(10), optimizer=optax.sgd(schedule))
    ours = fit(line(10), optimizer=optax.sgd, schedule=schedule)
    injected = fit(line(10), optimizer=optax.inject_hyperparams(optax.sgd)(0.7), schedule=schedule)
    for run in (ours, injected):
        np.testing.assert_allclose(run.weights()["slope"], theirs.weights()["slope"], rtol=1e-5)
    assert ours.history[-1]["lr"] == pytest.approx(float(schedule(5)))
    assert theirs.history[-1]["lr"] is None  # only the optimizer knows it
    assert theirs.schedule is None


def test_a_function_without_a_rate_is_an_error():
    with pytest.raises(ss.SamestepError, match=r"^this optimizer has no rate of its own: pass lr=... to the Trainer$"):
        fit(line(10), optimizer=optax.adam)


def test_an_injected_rate_is_the_default():
    falling = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.exponential_decay(0.25, 1, 0.5))
    with pytest.raises(ss.SamestepError, match="^lr cannot be applied: this optimizer has its rate inside"):
        fit(line(10), optimizer=falling, schedule=0.1)  # its schedule would go on, whatever lr is
    assert {row["lr"] for row in fit(line(10), optimizer=falling).history} == {None}
    run = fit(line(10), optimizer=optax.inject_hyperparams(optax.sgd)(learning_rate=0.25))
    assert run.history[0]["lr"] == 0.25


def test_a_schedule_for_a_transformation_that_has_its_rate_inside_is_an_error():
    told = r"^lr cannot be applied: this optimizer has its rate inside. Leave lr out, or pass the function .*optax.adam"
    with pytest.raises(ss.SamestepError, match=told):
        fit(line(10), optimizer=optax.adam(0.1), schedule=0.1)


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (lambda: optax.adam(0.1), r"function, which raised TypeError: .*takes 0 positional arguments"),
        (lambda rate: 3, "function$"),
        (nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.adam(0.1), wrt=nnx.Param), "Optimizer"),
    ],
)
def test_what_is_no_transformation_is_one_line(given, got):
    kinds = r"an optax transformation, such as optax.adam\(1e-3\), or a function that makes one from a rate"
    with pytest.raises(ss.SamestepError, match=f"^optimizer must be {kinds}, got {got}"):
        fit(line(10), optimizer=given)


def test_optax_is_the_same_on_any_number_of_devices():
    make = functools.partial(optax.adamw, weight_decay=0.1)
    runs = [fit(models_jax.mlp((784, 32, 10)), optimizer=make, schedule=0.01, devices=k) for k in (1, 2, 5)]
    assert runs[0].fingerprints == runs[1].fingerprints == runs[2].fingerprints
    assert runs[0].recipe == runs[1].recipe
    other = fit(models_jax.mlp((784, 32, 10)), optimizer=optax.adam, schedule=0.01)
    assert other.recipe["optimizer"] != runs[0].recipe["optimizer"]


def in_groups(rate):
    """A slower first layer, a frozen bias, and decay of one weight."""
    kinds = {"slow": optax.sgd(rate * 0.1), "frozen": optax.set_to_zero(), "plain": optax.sgd(rate)}
    labels = {"dense1.weight": "slow", "dense1.bias": "slow", "dense2.weight": "plain", "dense2.bias": "frozen"}
    decayed = optax.masked(optax.add_decayed_weights(0.1), {name: name == "dense2.weight" for name in labels})
    return optax.chain(decayed, optax.multi_transform(kinds, labels))


def test_groups_of_optax_are_followed_and_agree_with_samesteps(tmp_path):
    """multi_transform and masked, with a rate from the schedule and with rates of their own."""
    slow, decayed, frozen = ss.group(lr_scale=0.1), ss.group(weight_decay=0.1), ss.group(frozen=True)
    ours = fit(plain(), groups={"dense1.*": slow, "*.weight": decayed, "*": frozen}, schedule=0.05).weights()
    theirs = fit(plain(), optimizer=in_groups, schedule=0.05, run_dir=tmp_path, max_epochs=1)
    theirs = fit(plain(), optimizer=in_groups, schedule=0.05, run_dir=tmp_path, devices=2)
    assert theirs.resumed
    for run in (theirs, fit(plain(), optimizer=in_groups(0.05))):
        for name, start in plain().params.items():
            moved = np.abs(ours[name] - start).max()
            assert (moved == 0) == (name == "dense2.bias")
            np.testing.assert_allclose(run.weights()[name], ours[name], atol=1e-4 * moved)


# Devices


def test_device_functions():
    array = jnp.ones(3)
    assert ss.put(array, "cpu") is array
    assert ss.device_of(array) == ss.cpu()
    assert isinstance(ss.put(np.ones(3, np.float32), "cpu"), jax.Array)
    assert isinstance(ss.get(array), np.ndarray)
    assert backend.devices()[0] == ss.cpu()
    total, used = backend.memory(ss.cpu())
    assert 0 < used < total
    if ss.num_gpus() == 0:
        assert ss.try_gpu() == ss.cpu()
        with pytest.raises(ss.SamestepError, match="device cuda:0 is not there: jax sees cpu"):
            ss.put(array, "cuda")


@pytest.mark.parametrize("how", ["tree", "gather", "ring", "sharded"])
def test_allreduce(how):
    arrays = [jnp.full((2, 3), float(i)) for i in range(1, 4)]
    sums = ss.allreduce(arrays, how)
    assert all(np.array_equal(total, np.full((2, 3), 6.0)) for total in sums)
    assert float(arrays[0][0, 0]) == 1.0


def test_fingerprints_see_every_bit_and_place():
    def of(*numbers):
        model = Pair(lambda w, x: x * w, jnp.asarray(numbers, jnp.float32))
        return backend.replica(model, None, ss.cpu(), 1).fingerprint()

    seen = {
        bytes(np.asarray(of(*numbers))) for numbers in [(1, 2, 0), (2, 1, 0), (-1, -2, 0), (-1, 2, 0), (1, 2, -0.0)]
    }
    assert len(seen) == 5


# Threads


def wide(**settings):
    """A fit whose products of matrices are large enough for XLA to cut them over threads."""
    return fit(models_jax.mlp((784, 256, 10)), X[:64], Y[:64], max_epochs=1, batch_size=64, shards=8, **settings)


def in_a_process(script, **variables):
    """What a script prints, in a process of its own: XLA makes its pool of threads once."""
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


SCRIPT = """
import os
if os.environ["CORES"] == "1": os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
import numpy as np, samestep as ss
from samestep.models.jax import mlp
r = np.random.default_rng(0)
x, y = r.random((768, 1, 28, 28), dtype=np.float32), r.integers(0, 10, 768)
for threads, devices in ((1, 2), (2, 1), (2, 2), (2, 3)):
    trainer = ss.Trainer(max_epochs=1, batch_size=768, shards=3, devices=devices, threads_per_shard=threads, progress=False)
    print(trainer.fit(mlp((784, 256, 10)), (x, y)).fingerprint)
"""


def test_the_pool_of_xla_has_no_way_in():
    """Neither the cores of the machine nor the pool that XLA would make, but threads_per_shard, decides the bits."""
    prints = {tuple(in_a_process(SCRIPT, PJRT_NPROC=pool, CORES=cores)) for pool, cores in (("1", "2"), ("16", "1"))}
    assert len(prints) == 1
    ((one, *two),) = prints
    assert len(set(two)) == 1
    assert one != two[0], "two threads compute as one would: there is nothing to compare"


@pytest.mark.parametrize("cores", [1, 2, 16])
def test_two_threads_per_shard_are_the_same_side_by_side_and_in_turn(cores, monkeypatch):
    one = wide(threads_per_shard=2)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    assert {wide(threads_per_shard=2, devices=k).fingerprint for k in (1, 2, 3, 8)} == {one.fingerprint}
    assert computing(2, cores < 4, 0).platform == "cpu"


# Many shards in one launch, as on GPUs


def looped(monkeypatch):
    monkeypatch.setattr(jax_replica, "LOOPED", ("cpu", "cuda"))


@pytest.mark.parametrize(
    ("model", "batches"),
    [
        ("mlp_with_dropout", "large and a smaller last"),
        ("embedding", "5 and a last 2"),
        ("small_with_batch_norm", "5 and a last 2"),
    ],
)
def test_a_loop_over_shards_is_the_same_on_any_number_of_devices(model, batches, monkeypatch):
    looped(monkeypatch)
    loop, turns = jax_replica.JaxReplica._loop, []

    def counted(self, x, y, index, keys, first):
        turns.append(len(keys))
        return loop(self, x, y, index, keys, first)

    monkeypatch.setattr(jax_replica.JaxReplica, "_loop", counted)
    suite.check(
        lambda k: suite.fit(model, k, *suite.BATCHES[batches], capture=False), (2, 3, 5, 7, 8)
    )  # no launches of steps
    assert min(turns) == 1 < max(turns)


def test_examples_that_are_read_have_the_bits_of_those_on_the_device(monkeypatch):
    """What is too large for the device comes shard by shard: a loop of one turn."""
    looped(monkeypatch)
    here = fit(models_jax.mlp((784, 32, 10)))
    monkeypatch.setattr(data.Feed, "_fits", lambda self, device, size: False)
    read = fit(models_jax.mlp((784, 32, 10)))
    assert here.fingerprints == read.fingerprints


def test_a_shard_among_others_has_the_bits_of_a_shard_alone(monkeypatch):
    """And the broken twin has not: all shards in one product, so that its shape depends on how many they are."""
    looped(monkeypatch)
    replica = probed(models_jax.mlp((784, 64, 10)), shards=8)
    index, keys = np.arange(80).reshape(8, 10), list(range(1, 9))
    x, y = jnp.asarray(X), jnp.asarray(Y)

    def one(index, key, shard, parameters):
        return replica.program.shard(parameters, replica.state, x[index], y[index], key, shard)

    twin = jax.jit(jax.vmap(one, (0, 0, 0, None)))

    def in_one_product(lo, hi):
        words = np.array([draws.halves(key) for key in keys[lo:hi]], np.uint32)
        return twin(index[lo:hi], words, np.arange(lo, hi), replica.parameters)

    def in_turn(lo, hi):
        return replica._loop(x, y, index[lo:hi], keys[lo:hi], lo)[: hi - lo]

    for compute, same in ((in_turn, True), (in_one_product, False)):
        many = np.asarray(compute(0, 8))
        alone = np.concatenate([np.asarray(compute(shard, shard + 1)) for shard in range(8)])
        np.testing.assert_allclose(many, alone, atol=1e-5)
        assert (many.tobytes() == alone.tobytes()) == same


def test_large_models_are_computed_one_shard_at_a_time(monkeypatch):
    looped(monkeypatch)
    assert probed(line(), shards=2).looped
    monkeypatch.setattr(jax_replica, "ROOM", 2 * probed(line(), shards=2).size * 4 - 1)
    assert not probed(line(), shards=2).looped


# The update, compiled


@pytest.mark.parametrize(
    "optimizer", [ss.sgd(momentum=0.9, nesterov=True, weight_decay=0.1), ss.adam(), ss.adamw(), ss.adagrad()]
)
def test_compiled_updates_keep_the_numbers_of_the_host_in_float64(optimizer):
    """Tolerance: a dozen roundings of float32. Adam's 1 - 0.999 in float32 would be off by 2e-5."""

    def go(compile_, x, g, state):
        update = compile_(updating.Update(Mean(backend, 1000, 0.0), optimizer))
        for t in range(3):
            x, state = update(x, state, g, 2, 0.1, t, None)
        return np.asarray(x, np.float64)

    x, g = random.random(1000), random.random(1000)
    expected = go(lambda function: function, x.copy(), g, dict.fromkeys(optimizer.slots, np.zeros(1000)))
    x, g, zeros = (jnp.asarray(a, jnp.float32) for a in (x, g, np.zeros(1000)))
    moved = np.abs(expected - x).max()
    assert moved > 0.01
    found = go(backend.compiled, x, g, dict.fromkeys(optimizer.slots, zeros))
    np.testing.assert_allclose(found, expected, atol=2e-6 * max(1, moved))
    if isinstance(optimizer, type(ss.adam())):
        assert np.abs(go(jax.jit, x, g, dict.fromkeys(optimizer.slots, zeros)) - expected).max() > 2e-6


# Memory


def copies_of_the_examples(devices, monkeypatch):
    """How many arrays as large as all examples there are on the client of a run, at most, while it lasts."""
    seen, make = [], Replicas.step

    def watched(self, *rest):
        client = self.replicas[0].parameters.devices().pop().client
        gc.collect()
        seen.append(sum(array.shape == X.shape for array in client.live_arrays()))
        return make(self, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Replicas, "step", watched)
        fit(line(10), devices=devices)
    return max(seen)


def test_replicas_of_one_device_share_one_copy_of_the_examples(monkeypatch):
    assert [copies_of_the_examples(k, monkeypatch) for k in (1, 3, 8)] == [1, 1, 1]
    make = data.Feed.__init__

    def greedy(self, backend, examples, devices, *rest):
        make(self, backend, examples, devices, *rest)
        self.own = [backend.copy(examples.x, device) for device in devices[1:]]

    monkeypatch.setattr(data.Feed, "__init__", greedy)
    assert copies_of_the_examples(3, monkeypatch) == 3


# Several devices of one CPU

VIRTUAL = """
import jax, numpy as np, samestep as ss
from samestep.backends import find
from samestep.models.jax import mlp
from samestep.training.replicas import Replicas
assert list(map(str, find.load("jax").devices())) == ["cpu", "cpu:1", "cpu:2", "cpu:3"]
array = ss.put(np.arange(3, dtype=np.float32), "cpu:2", backend="jax")
assert array.devices() == {jax.devices("cpu")[2]} and ss.device_of(array) == ss.Device("cpu", 2)
assert ss.put(array, "cpu:2") is array and ss.device_of(ss.put(array, "cpu:1")) == ss.Device("cpu", 1)
assert ss.get(array).tolist() == [0, 1, 2]
[copy] = ss.replicate([array], "cpu:3")
assert ss.device_of(copy) == ss.Device("cpu", 3) and ss.get(copy).tolist() == [0, 1, 2]
r = np.random.default_rng(0)
x, y = r.random((64, 784), dtype=np.float32), r.integers(0, 10, 64)
make = Replicas.__init__
def init(made, *given):
    make(made, *given)
    places = {replica.parameters.devices().pop() for replica in made.replicas}
    assert len(places) == len({str(replica.device) for replica in made.replicas})
    assert [ss.device_of(replica.parameters) for replica in made.replicas] == [replica.device for replica in made.replicas]
Replicas.__init__ = init
for devices in ("cpu", ["cpu:0", "cpu:1", "cpu:2", "cpu:3"], 3, ["cpu:3"]):
    run = ss.Trainer(max_epochs=2, batch_size=32, devices=devices, progress=False).fit(mlp((784, 32, 10), 0), (x, y))
    assert run.model.params["dense1.weight"].devices() == {jax.devices("cpu")[3 if devices == ["cpu:3"] else 0]}
    print(run.fingerprint)
"""


def test_virtual_devices():
    prints = in_a_process(VIRTUAL, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert len(prints) == 4
    assert len(set(prints)) == 1


def test_nothing_of_the_run_stays_behind():
    before = dict(os.environ)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = fit(line(10))
    assert dict(os.environ) == before
    assert run.model.params["slope"].devices() == {jax.devices("cpu")[0]}
    assert not backend._made


# Fingerprints


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_fingerprints_against_whole_numbers_of_python(dtype):
    leaves = [(random.random(shape) * 100).astype(dtype) for shape in [(3, 5, 7), (4,), (), (2, 300)]]
    first = second = place = 0
    for leaf in leaves:
        for word in np.ravel(leaf).view(f"uint{8 * leaf.dtype.itemsize}").tolist():
            word = (word + place * 0x9E3779B1) % 2**32
            word = (word ^ word >> 15) * 0x85EBCA6B % 2**32
            word = (word ^ word >> 12) * 0xC2B2AE35 % 2**32
            first, second, place = first + word, second + (word ^ word >> 15), place + 1
    assert fingerprint([jnp.asarray(leaf) for leaf in leaves]).tolist() == [first % 2**32, second % 2**32]


def test_signs_that_change_show_in_the_fingerprint():
    """They are the highest bits: where a sum wraps around, they must not cancel each other."""
    prints = jax.jit(lambda numbers: fingerprint([numbers]))
    signs = [[[-0.0 if place in (i, j) else 0.0 for place in range(16)]] for i in range(16) for j in range(i + 1)]
    assert len({tuple(prints(np.array(numbers, np.float32)).tolist()) for numbers in signs}) == len(signs) == 136
    all_of_them = np.zeros((64, 64), np.float32)
    assert prints(all_of_them).tolist() != prints(-all_of_them).tolist()


# The recipe: what it knows of models, settings and flags


def told(thing, weights=False):
    found = Content(backend.content)
    found.add("model", thing, weights)
    assert found.unchecked == []
    return found.told()


def test_what_a_model_went_through_is_no_part_of_it():
    model, used = Graph(nnx.Rngs(0)), Graph(nnx.Rngs(1))
    used.train()
    used(jnp.asarray(X[:8]))  # draws noise, and moves the running statistics
    used.eval()
    assert told(model) == told(used)
    assert told(model, True) != told(used, True)
    module = Dense()
    variables = module.init(
        {"params": jax.random.key(3), "dropout": jax.random.key(4)}, jnp.asarray(X[:1]), train=False
    )
    assert told(module) == told(module.bind(variables))
    assert told(line()) == told(Pair(line().apply, {"slope": jnp.ones((4, 3))})) != told(line(4))


def test_layers_in_lists_and_dictionaries_have_names():
    def blocks(rate):
        return nnx.List([nnx.Dropout(0.5), nnx.Dropout(rate)])

    def seen(one, other):
        return {name for name, value in told(one).items() if told(other).get(name) != value}

    assert seen(blocks(0.1), blocks(0.2)) == {"model.1"}
    assert seen(*(nn.Sequential([nn.Dense(2), nn.relu, nn.Dropout(rate)]) for rate in (0.1, 0.2))) == {"model.layers.2"}
    assert seen(*(nn.Sequential([nn.Dense(2), act]) for act in (nn.relu, nn.gelu))) == {"model"}
    deep = [
        nn.Sequential([[nn.Sequential([nn.Dropout(0.5)]), nn.Sequential([nn.Dropout(rate)])]]) for rate in (0.1, 0.2)
    ]
    assert seen(*deep) == {"model.layers.0 2"}  # two of one name


def test_functions_of_jax_and_optax_are_looked_into():
    @jax.custom_vjp
    def twice(x):
        return 2 * x

    twice.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))
    for made in (jax.jit(twice), jax.vmap(twice), jax.checkpoint(twice), jax.nn.relu, optax.adam(0.1), jax.random.key(0),
                 optax.inject_hyperparams(optax.adamw)(0.1), jnp.ones(2, jnp.bfloat16), jax.devices()[0],
                 optax.chain(optax.clip(1.0), optax.sgd(optax.cosine_decay_schedule(0.1, 9), 0.9))):  # fmt: skip
        assert told(made, True)
    assert told(optax.adam(0.1)) != told(optax.adam(0.2))
    assert told(jnp.ones(2, jnp.bfloat16)) != told(jnp.ones(2, jnp.float16))


def test_a_context_reaches_all_threads(monkeypatch):
    """JAX's contexts hold for the thread that enters them. Shards side by side are computed in others."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(3))
    with jax.threefry_partitionable(False):
        runs = [fit(models_jax.mlp((784, 32, 10)), devices=k) for k in (1, 3)]
    assert runs[0].fingerprints == runs[1].fingerprints
    jax.config.update("jax_threefry_partitionable", False)
    try:
        runs.append(fit(models_jax.mlp((784, 32, 10))))
    finally:
        jax.config.update("jax_threefry_partitionable", True)
    assert runs[0].fingerprints == runs[2].fingerprints != fit(models_jax.mlp((784, 32, 10))).fingerprints
    assert runs[0].recipe == runs[2].recipe
    assert runs[0].recipe["numerics"]["settings"]["threefry_partitionable"] == "False"


def test_what_was_compiled_under_other_settings_is_compiled_anew(monkeypatch):
    """JAX itself would find the program of the first fit again. Whether that has other bits depends on the CPU."""
    cleared, clear = [], jax.clear_caches
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(clear()))

    def optimizations(off):
        jax.config.update("jax_disable_most_optimizations", off)
        return fit(models_jax.mlp((784, 32, 10)), optimizer=ss.adam()).fingerprints

    try:
        first, _, third = [optimizations(off) for off in (False, True, False)]
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    assert first == third
    assert len(cleared) in (2, 3)  # after each change, and if a test before this one had other settings


FLAGS = """
import os, json
import jax, numpy as np
if os.environ.get("EARLY"): jax.numpy.ones(3)
if os.environ.get("LATE"): os.environ["XLA_FLAGS"] = os.environ["LATE"]
import samestep as ss
from samestep.models.jax import mlp
r = np.random.default_rng(0)
x, y = r.random((64, 784), dtype=np.float32), r.integers(0, 10, 64)
portable = True if "PORTABLE" in os.environ else None
try:
    run = ss.Trainer(max_epochs=1, batch_size=32, portable=portable, progress=False).fit(mlp((784, 32, 10), 0), (x, y))
    print(json.dumps([run.fingerprint, run.recipe["portable"], run.recipe["numerics"]]))
except ss.SamestepError as error:
    print(json.dumps(str(error)))
"""


def flagged(**variables):
    return json.loads(" ".join(in_a_process(FLAGS, **variables)))


def test_flags_of_xla_count_if_they_came_in_time(tmp_path):
    usual, other, late, quiet = (
        flagged(XLA_FLAGS=""), flagged(XLA_FLAGS="--xla_cpu_enable_fast_math=true"),
        flagged(XLA_FLAGS="", EARLY="1", LATE="--xla_cpu_enable_fast_math=true"),
        flagged(XLA_FLAGS=f"--xla_dump_to={tmp_path} --xla_force_host_platform_device_count=2"),
    )  # fmt: skip
    assert usual == late == quiet
    assert usual[2]["xla_flags"] != other[2]["xla_flags"]


def test_a_portable_run_needs_its_flags_in_time():
    for variables in ({"SAMESTEP_PORTABLE": "1"}, {"PORTABLE": "1"}):
        fingerprint, portable, numerics = flagged(XLA_FLAGS="", **variables)
        assert fingerprint
        assert portable is True
        assert "cpu" not in numerics
    message = flagged(XLA_FLAGS="", PORTABLE="1", EARLY="1")
    assert message.startswith(
        "portable: JAX has already read its XLA_FLAGS. Set SAMESTEP_PORTABLE=1 before Python starts"
    )


def test_processes_of_jax_distributed_are_told_of_mpiexec(monkeypatch):
    monkeypatch.setattr(backends_jax.global_state, "client", object())
    monkeypatch.setattr(backends_jax.global_state, "num_processes", 2)
    message = "samestep joins them by MPI: leave it out, and start the script with `mpiexec -n 2 python ...`$"
    with pytest.raises(ValueError, match=f"^jax.distributed.initialize has joined 2 processes, and {message}"):
        fit(line())


# Modes around a fit, and state of any type


@contextlib.contextmanager
def option(name, value):
    with jax.config._value_holders[name](value):
        yield


TAKEN = {
    "nothing": contextlib.nullcontext,
    "enable_x64": lambda: jax.enable_x64(True),
    "default_matmul_precision": lambda: jax.default_matmul_precision("bfloat16"),
    "default_device": lambda: jax.default_device(jax.devices("cpu")[0]),
    "disable_jit": lambda: jax.disable_jit(),
    "debug_nans": lambda: jax.debug_nans(True),
    "default_prng_impl": lambda: jax.default_prng_impl("rbg"),
    "threefry_partitionable": lambda: jax.threefry_partitionable(False),
    "numpy_dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "legacy_prng_key": lambda: jax.legacy_prng_key("error"),
    "checking_leaks": lambda: jax.checking_leaks(),
    "named_scope": lambda: jax.named_scope("a"),
}
STOPPED = {
    "mesh_context": lambda: jax.sharding.Mesh(np.array(jax.devices("cpu")), ("x",)),
    "set_mesh": lambda: jax.set_mesh(jax.make_mesh((1,), ("x",))),
    "compute_on_context": lambda: compute_on("device_host"),
    "xla_metadata_context": lambda: set_xla_metadata(a="b"),
    "jax_transfer_guard_host_to_device=disallow": lambda: jax.transfer_guard("disallow"),
    "jax_transfer_guard_device_to_host=disallow": lambda: jax.transfer_guard_device_to_host("disallow"),
    "jax_no_tracing=True": lambda: option("jax_no_tracing", True),
    "jax_no_execution=True": lambda: option("jax_no_execution", True),
    "jax_thread_guard=True": lambda: option("jax_thread_guard", True),
}


def noisy():
    """Draws, and sees the types that Python's numbers get: what modes may change."""

    def apply(w, x, key, train):
        z = (
            jax.random.uniform(key, (10,)).astype(jnp.float32) * jnp.float32(0.1)
            if train
            else jnp.zeros(10, jnp.float32)
        )
        return x.reshape(len(x), -1)[:, :4] @ w["slope"] + z + jnp.asarray(jnp.arange(10) / 3).astype(jnp.float32)

    return Pair(apply, {"slope": jnp.zeros((4, 10), jnp.float32)})


@pytest.mark.parametrize("name", TAKEN)
def test_a_mode_around_a_fit_is_taken_by_all_of_it(name, monkeypatch):
    model = noisy()
    examples = X[:64], Y[:64]
    fingerprints, recipe = modes.outcome(monkeypatch, TAKEN[name], lambda k: fit(model, *examples, devices=k, shards=2))
    assert len(set(fingerprints)) == 4
    if name in recipe["numerics"]["settings"]:  # those that change numbers are in the recipe
        assert recipe["numerics"]["settings"][name] != fit(noisy()).recipe["numerics"]["settings"][name]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", STOPPED)
def test_a_mode_that_cannot_be_taken_is_refused(name, monkeypatch):
    model = noisy()
    said = modes.outcome(monkeypatch, STOPPED[name], lambda k: fit(model, devices=k, shards=4))
    assert said == f"JAX's {name} would hold for some threads of a run only, or stop it: leave it out there"


def test_the_thread_that_exchanges_with_other_processes_has_the_modes_too():
    def kind(threads):
        with threads:
            return threads.submit(lambda: str(backend.put(np.array([1 / 3]), ss.cpu()).dtype)).result()

    with jax.enable_x64(True), backend.session([ss.cpu()], deterministic=True, threads=1):
        assert kind(Replicas.sender.func(SimpleNamespace(backend=backend))) == "float64"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert kind(ThreadPoolExecutor(1)) == "float32"  # as it was: half of the bits are lost


class Recurrent(nnx.Module):
    def __init__(self, cell, rngs):
        self.rnn, self.drop = nnx.RNN(cell(7, 8, rngs=rngs)), nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(8, 10, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(self.rnn(x.reshape(len(x), -1)[:, :28].reshape(-1, 4, 7))[:, -1]))


@pytest.mark.parametrize("cell", [nnx.LSTMCell, nnx.GRUCell, nnx.OptimizedLSTMCell])
def test_recurrent_nnx_modules(cell):
    model = Recurrent(cell, nnx.Rngs(0))
    runs = [fit(model, devices=k, shards=4) for k in (1, 3)]
    suite.same(*runs)
    moved = {name for name, w in runs[0].weights().items() if "rnn" in name and w.any()}
    assert moved
    assert runs[0].model(jnp.asarray(X[:2])).shape == (2, 10)


@pytest.mark.parametrize("make", [lambda: Recurrent(nnx.GRUCell, nnx.Rngs(0)), lambda: Writing(nnx.Rngs(0))])
def test_without_a_copy_nnx_modules_that_write_cannot_be_trained(make, monkeypatch):
    merge = nnx.merge
    monkeypatch.setattr(nnx, "merge", lambda *parts, copy: merge(*parts))
    with pytest.raises(Exception, match="different trace level"):
        fit(make())


class Calls(nnx.Variable):
    pass


class Writing(nnx.Module):
    """Writes its variables in evaluation, too."""

    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(784, 10, rngs=rngs), nnx.BatchNorm(10, rngs=rngs)
        self.calls = Calls(jnp.array(0))

    def __call__(self, x):
        self.calls.set_value(self.calls.get_value() + 1)
        return self.norm(self.first(x.reshape(len(x), -1)), use_running_average=False)


def test_nnx_variables_that_are_written_in_evaluation():
    model = Writing(nnx.Rngs(0))
    both = ss.Data(train=(X, Y), test=(X[:40], Y[:40]))
    trainers = [ss.Trainer(max_epochs=2, batch_size=32, devices=k, progress=False) for k in (1, 2, 3)]
    runs = [trainer.fit(model, both) for trainer in trainers]
    for run in runs[1:]:
        suite.same(runs[0], run)
    assert runs[0].weights()["calls"] == 6  # steps: what evaluation writes is dropped
    assert runs[0].weights()["norm.mean"].any()
    assert model.calls.get_value() == 0
    trained = runs[0].model
    assert trainers[1].evaluate(trained, (X, Y)) == trainers[0].evaluate(trained, (X, Y))
    assert trained.calls.get_value() == 6


STATES = {  # at the start, and after nine steps
    "float16": ([0.25, 3], [9.25, 12]), "bfloat16": ([0.25, 3], [9.25, 12]), "float8_e4m3fn": ([1, 3], [10, 12]),
    "int8": ([-3, 100], [6, 109]), "uint8": ([250, 3], [3, 12]), "uint32": ([2**32 - 5, 3], [4, 12]),
    "bool": ([True, False], [False, True]),
}  # fmt: skip


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("dtype", STATES)
def test_state_of_any_type_survives(dtype, changes, tmp_path):
    start, end = STATES[dtype]

    def apply(w, state, x):
        now = state["s"]
        new = ~now if dtype == "bool" else (now.astype("float32") + 1).astype(dtype) if "float" in dtype else now + 1
        return x.reshape(len(x), -1)[:, :4] @ w["slope"], {"s": new if changes else now}

    def make():
        return Pair(apply, {"slope": jnp.zeros((4, 10))}, {"s": jnp.asarray(start, dtype)})

    run = modes.survives(fit, make, "s", end if changes else start, tmp_path / "run", shards=4)
    assert run.model.state["s"].dtype == jnp.dtype(dtype)
    assert np.asarray(run.model.state["s"]).tolist() == (end if changes else start)


@pytest.mark.parametrize("state", [jnp.ones(2, jnp.complex64), jax.random.key(0), jnp.ones(2, "int4")])
def test_state_of_other_types_is_refused(state):
    model = Pair(
        lambda w, state, x: (x.reshape(len(x), -1)[:, :4] @ w["slope"], state),
        {"slope": jnp.zeros((4, 10))},
        {"s": state},
    )
    with pytest.raises(
        ss.SamestepError, match="s is of type .*: state must be of real or whole numbers, or true and false"
    ):
        fit(model)


def test_an_optimizer_with_momenta_of_16_bits_is_resumed(tmp_path):
    make = functools.partial(optax.adam, mu_dtype=jnp.bfloat16)
    settings = {"optimizer": make, "schedule": 0.01}
    fit(line(10), run_dir=tmp_path / "run", max_epochs=1, **settings)
    assert fit(line(10), run_dir=tmp_path / "run", **settings).fingerprints == fit(line(10), **settings).fingerprints


def test_eigens_caches_are_asked_of_the_library_itself():
    """They decide in which order XLA's CPU sums, so they are in the recipe: three sizes."""
    sizes = eigen.caches(jax_numerics.LIBRARY)
    assert sizes is not None
    assert len(sizes) == 3
    assert min(sizes) > 0


def test_a_pair_that_cannot_be_made():
    with pytest.raises(ss.SamestepError, match=r"^Pair: init\(key, x\) makes parameters only: with a state, call it"):
        Pair(lambda w, s, x: (x, s), lambda key, x: jnp.ones(3), {"sum": jnp.zeros(())})
    with pytest.raises(ss.SamestepError, match=r"^Pair: apply must be a function of \(params, x\), got 3"):
        Pair(3, jnp.ones(3))
    Pair(lambda w, x: x, lambda key, x: jnp.ones(3))
    Pair(lambda w, s, x: (x, s), jnp.ones(3), {"sum": jnp.zeros(())})


def test_an_array_is_put_where_a_run_computes():
    """While a run lasts, that is another client of JAX than the user's."""
    theirs = jax.device_put(jnp.arange(3.0), jax.devices("cpu")[0])
    assert backend.put(theirs, ss.cpu()) is theirs
    with backend.session([ss.cpu()], deterministic=True, threads=1):
        ours = backend.put(theirs, ss.cpu())
        assert ours.devices() != theirs.devices()
        assert backend.put(ours, ss.cpu()) is ours
        assert backend.device_of(ours) == ss.cpu()
    assert ours.tolist() == theirs.tolist()


# Its parts, one by one


def small():
    """A model of whole numbers: in training its outputs are x0, x1 and 0, and in evaluation they are 1 more."""

    def apply(w, state, x, train):
        return x @ w + (0 if train else 1), {"count": state["count"] + 1, "total": state["total"] + x.sum()}

    state = {"count": jnp.asarray(5), "total": jnp.asarray([8.0, 9.0])}
    model = Pair(apply, jnp.asarray([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), state)
    return backend.replica(model, lambda output, y: output.sum(1), ss.cpu(), 5)


ROWS = np.array([[1, 2], [4, 3], [0, 5], [2, 2], [7, 1], [3, 9], [6, 8]], np.float32)
LABELS = np.array([1, 0, 0, 1, 0, 1, 2], np.int32)
HITS = [1, 1, 0, 0, 1, 1, 0]  # of two that are as high, the first counts


def of_shard(rows, shard):
    """What a shard of these rows gives, by hand."""
    x, n = ROWS[rows], len(rows)
    slots = [[number * (i == shard) for i in range(5)] for number in (x.sum(), sum(HITS[row] for row in rows))]
    return np.array([*[x[:, 0].sum()] * 3, *[x[:, 1].sum()] * 3, n, *[n * x.sum()] * 2, *slots[0], *slots[1]])


def test_what_a_shard_gives_number_by_number():
    """Gradient, changes of the state times examples, loss and hits in the shard's own places: alone, and in a loop."""
    replica = small()
    assert not replica.looped
    order, spans, keys = np.array([3, 0, 6, 1, 5, 4, 2]), [(0, 2), (2, 4), (4, 6), (6, 7)], [7, 8, 9, 10]
    expected = [of_shard(order[lo:hi], shard) for shard, (lo, hi) in enumerate(spans)]
    x, y = jnp.asarray(ROWS), jnp.asarray(LABELS)
    resident = {ss.cpu(): (x, y)}
    feed = SimpleNamespace(resident=resident)
    asked = []

    def shard(number, device):
        asked.append((number, device))
        rows = order[slice(*spans[number])]
        return ROWS[rows], LABELS[rows]

    batch = SimpleNamespace(pass_=SimpleNamespace(order=order, feed=feed), spans=spans, keys=keys, shard=shard)

    def sums(shards):
        found = {}
        tasks = replica.tasks(batch, shards, SimpleNamespace(add=lambda span, vector: found.update({span: vector})))
        for task in tasks:
            task()
        return len(tasks), {span: vector.tolist() for span, vector in found.items()}

    for looped, there in ((False, resident), (True, resident), (True, None)):
        replica.looped, feed.resident = looped, there
        asked.clear()
        assert [replica.single(batch, i).tolist() for i in (1, 2)] == [expected[i].tolist() for i in (1, 2)]
        assert sums(range(2, 2)) == (0, {})
        if looped and there:
            assert asked == []
            assert sums(range(4)) == (1, {(0, 4): sum(expected).tolist()})
        else:
            assert sums(range(1, 3)) == (2, {(i, i + 1): expected[i].tolist() for i in (1, 2)})
            assert asked == [(i, ss.cpu()) for i in (1, 2, 1, 2)]
    launched = []
    replica._loop = lambda *about: launched.append(about) or jnp.zeros((5, 19))
    for looped in (False, True):
        replica.looped = looped
        replica.single(batch, 2)
        assert len(launched) == looped
    del replica._loop
    rows = replica._loop(x, y, order[2:6].reshape(2, 2), keys[1:3], 1)
    assert rows.tolist() == [*(row.tolist() for row in expected[1:3]), *[[0.0] * 19] * 3]


def test_the_state_moves_by_its_mean_change_and_counters_by_whole_numbers():
    replica = small()
    replica.advance(jnp.asarray([50.0] * 6 + [8.0, 3.5, 14.0] + [60.0] * 10), 7)
    assert [vector.tolist() for vector in replica.state] == [[6], [8.5, 11.0]]
    x, y = jnp.asarray(ROWS), jnp.asarray(LABELS)
    assert replica.evaluate(x, y, 0).tolist() == [ROWS.sum() + 3 * len(ROWS), sum(HITS)]
    assert [vector.tolist() for vector in replica.state] == [[6], [8.5, 11.0]]


def test_what_a_program_computes_is_compiled_and_on_a_gpu_in_one_order(monkeypatch):
    program = small().program
    for name in ("gradient", "gradients", "partial_sums", "evaluate", "advance", "fingerprint"):
        assert hasattr(getattr(program, name), "lower")
    assert hasattr(drawn, "lower")
    monkeypatch.setattr(jax, "jit", lambda function, **options: options)
    made = [jitted(lambda self: 0, inline=True).func(SimpleNamespace(kind=kind)) for kind in ("cuda", "cpu")]
    options = {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}
    assert made == [{"compiler_options": options, "inline": True}, {"compiler_options": None, "inline": True}]


def test_cross_entropy_takes_no_single_scores_on_a_gpu(monkeypatch):
    """In whole numbers any order gives the same sum."""
    monkeypatch.setattr(jax.nn, "log_softmax", lambda output: -output)
    output = jnp.asarray([[[1.0, 2.0, 4.0, 8.0], [16.0, 32.0, 64.0, 3.0], [9.0, 5.0, 7.0, 6.0]]])
    y = jnp.asarray([[2, 0, 3]])
    assert backend.cross_entropy(output, y) == 4 + 16 + 6
    assert [int(part) for part in backend.by_position(output, y.at[0, 1].set(-100))] == [4 + 6, 2]
    monkeypatch.setattr(backend, "_run_on_gpu", True)
    monkeypatch.setattr(jnp, "take_along_axis", None)
    assert backend.cross_entropy(output, y) == 4 + 16 + 6
    assert [int(part) for part in backend.by_position(output, y.at[0, 1].set(-100))] == [4 + 6, 2]


def test_what_cannot_be_a_replica():
    def replica(params, state=None, apply=lambda w, x: x):
        return backend.replica(Pair(apply, params, state), None, ss.cpu(), 2)

    for params in ({}, {"a": jnp.ones(2), "b": jnp.ones(2, jnp.int32)}):
        with pytest.raises(ss.SamestepError, match="^the parameters to train must all be of one type$"):
            replica(params)
    with pytest.raises(ss.SamestepError, match="^two tensors of the model have one name: a, a, b$"):
        replica({"a": jnp.ones(2)}, {"b": jnp.ones(2), "a": jnp.ones(2)})
    with pytest.raises(ss.SamestepError, match="^the parameters of this Pair are not made yet: pass Pair"):
        replica(lambda key, x: jnp.ones(3))
    assert len(replica({f"w{i}": jnp.ones(1) for i in range(300)}).names) == 300
    grows = replica(jnp.ones(2), [jnp.ones(2)], lambda w, state, x: (x * w, [*state, 1.0]))
    with pytest.raises(ss.SamestepError, match="must have the structure of the one it was given"):
        grows.gradient(jnp.ones((1, 2)), jnp.zeros(1, jnp.int32), 0, 0)


def test_a_loss_with_parameters_of_its_own_is_refused():
    class Scaled(nnx.Module):
        def __init__(self, scale):
            self.scale = scale

        def __call__(self, output, y):
            return output.sum(1)

    model = Pair(lambda w, x: x * w, jnp.ones(2))
    assert backend.replica(model, Scaled(2.0), ss.cpu(), 2).shards == 2
    with pytest.raises(ss.SamestepError, match=r"depends on a parameter \(of Scaled\) that is not part of what is"):
        backend.replica(model, Scaled(nnx.Param(jnp.ones(2))), ss.cpu(), 2)
    with pytest.raises(ss.SamestepError, match=r"depends on a parameter \(of Scaled\)"):
        backend.replica(model, ss.per_shard(Scaled(nnx.Param(jnp.ones(2)))), ss.cpu(), 2)


def test_a_loss_per_shard_need_not_be_hashable():
    @dataclasses.dataclass
    class Scaled:
        scale: float

        def __call__(self, output, y):
            return (output * self.scale).mean()

    model, x = Pair(lambda w, x: x * w, jnp.ones(2)), np.ones((4, 2), np.float32)
    for loss in (Scaled(3.0), ss.per_shard(Scaled(3.0))):
        run = ss.Trainer(1, 4, shards=2, devices="cpu", loss=loss, progress=False).fit(model, (x, np.zeros(4, int)))
        assert run.history[0]["train_loss"] == 3.0


def test_a_sum_over_the_classes_of_each_example_is_no_sum_over_examples():
    loss, scores = functools.partial(optax.losses.dice_loss, reduction="sum"), jnp.arange(30.0).reshape(6, 5) / 9
    y = jnp.eye(6)[:, :5]
    shape = backend.described(Measure(loss), scores, y, np.asarray(y), "float32")
    assert (shape.kind, loss(scores, y).shape) == ("mean", (6,))
    assert backend.loss_of(Measure(loss, shape.kind), scores, y)[0] == loss(scores, y).sum()


def test_shards_in_one_launch_need_room_for_all_of_them(monkeypatch):
    model = line()
    assert not probed(model, shards=2).looped  # on a CPU
    looped(monkeypatch)
    assert [probed(model, shards=shards).looped for shards in (1, 2, 3)] == [False, True, True]
    size = probed(model, shards=2).size
    assert size == 12 + 2 * 2
    for room, enough in ((2 * size * 4, True), (2 * size * 4 - 1, False)):
        monkeypatch.setattr(jax_replica, "ROOM", room)
        assert probed(model, shards=2).looped == enough


class Card:
    """A GPU that is not there."""

    platform, device_kind, core_count = "gpu", "H", 132

    def memory_stats(self):
        return {"bytes_limit": 100, "bytes_in_use": 7}


def test_gpus_of_jax(monkeypatch):
    cards = [Card(), Card()]
    monkeypatch.setattr(backends_jax, "gpus", lambda: cards)
    monkeypatch.setattr(jax_numerics, "gpus", lambda: cards)
    monkeypatch.setattr(jax_numerics, "cuda_versions", SimpleNamespace(cudnn_get_version=lambda: 9))
    assert backend.devices()[-2:] == [ss.gpu(0), ss.gpu(1)]
    assert backend.memory(ss.gpu(1)) == (100, 7)
    with backend.session([ss.gpu(1)], deterministic=True, threads=1):
        assert backend._native(ss.gpu(1)) is cards[1]
    about = jax_numerics.found([ss.gpu(0), ss.gpu(1)], False)
    assert about["gpu"] == "H, 132 SMs"
    assert (about["cudnn"], about["cublas"]) == (9, None)
    assert not {"caches", "cpu"} & set(about)
    cards[1].core_count = 78
    assert jax_numerics.found([ss.gpu(0), ss.gpu(1)], False)["gpu"] == "H, 132 SMs, H, 78 SMs"

    class Array:
        def __init__(self, *natives):
            self.natives = natives

        def devices(self):
            return set(self.natives)

    monkeypatch.setattr(jax, "Array", Array)
    assert backend.device_of(Array(cards[1])) == ss.gpu(1)
    assert backend.device_of(Array(jax.devices("cpu")[0])) == ss.cpu()
    assert backend.device_of(np.ones(2)) == ss.cpu()
    with pytest.raises(ss.SamestepError, match="^expected an array on one device, got one spread over 2$"):
        backend.device_of(Array(*cards))
    put = []
    monkeypatch.setattr(jax, "device_put", lambda array, native: put.append(native))
    monkeypatch.setattr(backends_jax, "checked", lambda array: array)
    backend.put(Array(*cards), ss.gpu(1))
    assert put == [cards[1]]  # an array that also lies elsewhere is put there alone


def test_what_is_found_of_a_cpu_and_of_the_build(monkeypatch):
    monkeypatch.setattr(jax_numerics, "version", SimpleNamespace(_git_hash="0123456789abcdef0123"))
    monkeypatch.setattr(jax_numerics, "version_str", "0.9.1")
    about, there = jax_numerics.found([ss.cpu()], False), jax_numerics.found([ss.cpu()], True)
    assert about["build"] == "0.9.1 0123456789abcdef01"
    assert len(about["xla_flags"]) == 16
    assert about == {**there, "cpu": about["cpu"]}
    for fixed, said in ((True, "fixed"), (False, eigen.caches(jax_numerics.LIBRARY))):
        monkeypatch.setattr(eigen, "has_fixed", lambda library, fixed=fixed: fixed)
        assert jax_numerics.found([ss.cpu()], True)["caches"] == said


def test_flags_that_only_write_files_are_left_out(monkeypatch):
    debug = SimpleNamespace(
        xla_cpu_enable_fast_math=True, xla_dump_to="there", xla_force_host_platform_device_count=4, xla_gpu_autotune=3
    )
    options = SimpleNamespace(
        executable_build_options=SimpleNamespace(debug_options=debug),
        SerializeAsString=lambda: repr(list(vars(debug).values())).encode(),
    )
    monkeypatch.setattr(jax_numerics.xla_client, "CompileOptions", lambda: options)
    assert jax_numerics.flags() == b"[True, '', 0, 3]"


def test_portable_needs_xlas_flag_and_exact_roots(monkeypatch):
    fixed = []
    monkeypatch.setattr(jax_numerics.numerics, "require_avx2", lambda: None)
    monkeypatch.setattr(eigen, "fix_caches", lambda *given: fixed.append(given))
    monkeypatch.setattr(jax, "jit", lambda function: function)
    for flags, off, enough in ((b".AVX2.", 0, True), (b".AVX2.", 1e-7, False), (b"", 0, False), (b"", 1e-7, False)):
        monkeypatch.setattr(jax_numerics, "flags", lambda flags=flags: flags)
        monkeypatch.setattr(jax.lax, "rsqrt", lambda x, off=off: 1 / np.sqrt(np.asarray(x)) + np.float32(off))
        with contextlib.nullcontext() if enough else pytest.raises(ss.SamestepError, match="has already read its XLA"):
            jax_numerics.require_portable()
    assert fixed == [(jax_numerics.LIBRARY, f"JAX {jax.__version__}")]


def test_a_run_computes_in_its_own_threads_only_if_shards_are_side_by_side(monkeypatch):
    for cores, threads, asynchronous in ((1, 1, True), (2, 1, False), (2, 2, True), (3, 2, True), (4, 2, False)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        with backend.session([ss.cpu()], deterministic=True, threads=threads):
            assert backend._run == (threads, asynchronous)
        assert backend._run is None


def test_caches_are_cleared_only_when_settings_have_changed(monkeypatch):
    def sessions(n):
        cleared = []
        with monkeypatch.context() as patch:
            patch.setattr(jax, "clear_caches", lambda: cleared.append(1))
            for _ in range(n):
                with backend.session([ss.cpu()], deterministic=True, threads=1):
                    pass
        return len(cleared)

    sessions(1)
    assert sessions(2) == 0
    with jax.default_matmul_precision("bfloat16"):
        assert sessions(2) == 1
    assert sessions(2) == 1


def test_arrays_and_losses_in_small_numbers():
    vector = jnp.asarray([3.0, 4.0])
    assert backend.clip(vector, 2.5).tolist() == [1.5, 2.0]
    assert backend.clip(vector, 8.0).tolist() == [3.0, 4.0]
    assert backend.zeros_like(vector).tolist() == [0.0, 0.0]
    assert backend.concat([vector]) is vector
    assert backend.sum_of_means(jnp.asarray([[1.0, 2.0, 3.0], [3.0, 5.0, 7.0]])) == 7.0
    assert backend.count_hits(jnp.asarray([[1, 2, 0], [5, 3, 4], [0, 0, 1], [9, 1, 1]]), jnp.asarray([1, 1, 1, 0])) == 2
    assert backend.compiled(sum) is backend.compiled(sum)


def test_whole_numbers_that_fit_into_32_bits_are_taken():
    array, key = jnp.ones(3), jax.random.key(0)
    assert checked(array) is array
    assert checked(key) is key
    assert checked([-1.5, 2.0**40]).tolist() == [-1.5, 2.0**40]
    for kind, least, most in ((np.int64, -(2**31), 2**31 - 1), (np.uint64, 0, 2**32 - 1)):
        assert checked(np.array([], kind)).tolist() == []
        assert checked(np.array([least, most], kind)).tolist() == [least, most]
        beyond = [np.array([3, most + 1], kind), *([np.array([3, least - 1], kind)] if least else [])]
        for numbers in beyond:
            with pytest.raises(ss.SamestepError, match="^whole numbers beyond 32 bits need"):
                checked(numbers)
            with jax.enable_x64(True):
                assert checked(numbers) is numbers


def test_a_probe_evaluates_one_example_without_computing():
    seen = []

    class Callable:
        def __call__(self, w, x, train):
            seen.append((train, isinstance(x, jax.core.Tracer)))
            return x * w

    def wrong(output, y):
        raise ValueError("this loss")

    x, y = np.ones((1, 3), np.float32), np.zeros(1, np.int32)
    model = Pair(Callable(), jnp.ones(3))
    assert backend.probe(model, None, x, y).classes == 3
    assert seen == [(False, True)]
    with pytest.raises(ValueError, match="this loss"):
        backend.probe(model, wrong, x, y)
    assert backend.describe(model) == "Callable"
    assert backend.describe(Pair(wrong, jnp.ones(3))).endswith("<locals>.wrong")
    assert backend.describe(Dense()) == "Dense"


class Counted(nn.Module):
    """Its state counts calls, also in evaluation where it may; its one weight is a part of a key."""

    field: object = None

    @nn.compact
    def __call__(self, x, train):
        calls = self.variable("counts", "calls", lambda: jnp.zeros(()))
        if self.is_mutable_collection("counts"):
            calls.value = calls.value + (2 if train else 1)
        return x * self.param("w", lambda key: jax.random.key_data(key)[0].astype(jnp.float32))


def test_a_linen_module_is_drawn_from_seed_0_and_writes_its_state_in_training_alone():
    x, key = jnp.ones((1, 3)), jax.random.key(0)
    module = Counted()
    rngs = {"dropout": key, "params": jax.random.fold_in(key, 1)}
    variables = module.init(rngs, x, train=False)
    try:
        backend.probe(module, None, np.ones((1, 3), np.float32), np.zeros(1, np.int32))
        adapter, params, state = adapt(module, backend._made)
        assert (float(params["w"]), float(state["counts"]["calls"])) == (float(variables["params"]["w"]), 1.0)
        for train in (False, True):
            _, new = adapter(params, state, ([x], {}), key, train)
            assert float(new["counts"]["calls"]) == (3.0 if train else 1.0)
        bound = module.bind(variables)
        backend.probe(bound, None, np.ones((1, 3), np.float32), np.zeros(1, np.int32))
        assert list(backend._made) == [id(module)]
    finally:
        backend._made.clear()
    unhashable = Counted(np.ones(2))
    assert hash(LinenAdapter(unhashable)) == id(unhashable)
    assert hash(LinenAdapter(module)) == hash(module)


class Streams(nnx.Module):
    """Shows the keys of its streams, and whether it is in training; writes its state."""

    def __init__(self):
        self.one, self.many = nnx.Rngs(a=0), nnx.Rngs(b=1).fork(split=3)
        self.weight, self.mean, self.drop = nnx.Param(jnp.ones(2)), nnx.BatchStat(jnp.zeros(3)), nnx.Dropout(0.5)

    def __call__(self, x):
        self.mean.set_value(self.mean.get_value() + 1)
        keys = [jax.random.key_data(stream.key.get_value()) for stream in (self.one.a, self.many.b)]
        return [*keys, not self.drop.deterministic]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_stream_of_an_nnx_module_has_a_key_of_its_own():
    adapter, params, state = adapt(Streams(), {})
    key = jax.random.key(5)
    (one, many, training), new = adapter(params, state, ([jnp.ones(2)], {}), key, True)
    assert training
    assert [leaf.tolist() for leaf in jax.tree.leaves([state, new])] == [[0.0] * 3, [1.0] * 3]  # state as it was
    leaves = jax.tree.leaves(adapter.streams)
    places = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    single, several = sorted(places, key=lambda i: leaves[i].ndim)
    assert one.tolist() == jax.random.key_data(jax.random.fold_in(key, single)).tolist()
    assert many.tolist() == jax.random.key_data(jax.random.split(jax.random.fold_in(key, several), 3)).tolist()
    assert adapt(Streams(), {})[0] == adapter


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trained_nnx_module_draws_from_streams_of_its_own():
    adapter, params, state = adapt(Streams(), {})
    first = adapter.model(params, state)
    before = first.one.a.count.get_value()
    first.one.a()
    assert first.one.a.count.get_value() == before + 1
    assert adapter.model(params, state).one.a.count.get_value() == before


def test_what_stands_for_arrays_functions_and_devices():
    ones, keys = jnp.ones(2), [jax.random.key(i) for i in range(2)]
    assert told(ones) != told(jnp.zeros(2))
    assert told(keys[0]) != told(keys[1])
    for name, leaf in (("key", keys[0]), ("array", np.ones(2))):
        pairs = [Pair(max, {"w": leaf}), Pair(max, {"w": jax.random.key(7) if name == "key" else np.zeros(2)})]
        assert told(pairs[0]) == told(pairs[1])
        assert told(pairs[0], True) != told(pairs[1], True)
    assert _told(np.ones((2, 3), np.float32), False) == ["float32", [2, 3], False]
    assert _told(np.ones((1, 2), np.uint8), True)[3].tolist() == [1, 1]
    assert _told(jnp.asarray(1.0), False)[2] is True
    makers = [Pair(max, lambda key, x: jnp.ones(3)), Pair(max, lambda key, x: jnp.zeros(3))]
    assert told(makers[0]) != told(makers[1])
    assert told(jax.jit(lambda x: x + 1)) != told(jax.jit(lambda x: x + 2))
    tree = jax.tree.structure([1, 2])
    assert content(tree, True) == str(tree)
    assert content(jax.devices("cpu")[0], True) == "device cpu"
    assert content(object(), True) is None
    seen = []
    jax.eval_shape(lambda x: seen.append(content(x, True)) or x, ones)
    ones.delete()
    assert [*seen, content(ones, True)] == [None, None]


def test_jax_distributed_with_one_process_is_no_reason_to_refuse(monkeypatch):
    monkeypatch.setattr(Backend, "world", lambda self, place, timeout, devices: "joined")
    for client, count in ((object(), 1), (None, 1), (None, 2)):
        monkeypatch.setattr(backends_jax.global_state, "client", client)
        monkeypatch.setattr(backends_jax.global_state, "num_processes", count)
        assert backend.world(None, 1.0, []) == "joined"
    monkeypatch.setattr(backends_jax.global_state, "client", object())
    with pytest.raises(ss.SamestepError, match="has joined 2 processes"):
        backend.world(None, 1.0, [])


def test_three_ways_of_a_rate_into_an_update_of_optax():
    replica = backend.replica(Pair(lambda w, x: x * w, jnp.ones(2)), None, ss.cpu(), 2)
    ways = [optax.sgd, optax.inject_hyperparams(optax.sgd)(learning_rate=0.25), optax.sgd(0.125)]
    updaters = [backend.updater(way, replica, 0.0) for way in ways]
    assert [updater.rate() for updater in updaters] == [None, 0.25, 1.0]
    assert [bool(updater.fixed) for updater in updaters] == [False, False, True]
    for updater, moved in zip(updaters, (0.5, 0.5, 0.125), strict=True):
        replica.assign(jnp.asarray([3.0, 3.0]))
        updater.apply(jnp.asarray([2.0, 2.0]), 0.5, 0)
        assert replica.parameters.tolist() == [3 - 2 * moved] * 2
        assert hasattr(updater._update, "lower")
        assert re.fullmatch(r"optax\([0-9a-f]{16}\)", repr(updater))
    assert len(set(map(repr, updaters))) == 3
    assert backend.updater(optax.sgd, replica, 0.0)._update is updaters[0]._update


def test_what_is_no_transformation_of_optax():
    replica = backend.replica(Pair(lambda w, x: x * w, jnp.ones(2)), None, ss.cpu(), 2)
    made = optax.sgd(0.1)
    for half in (SimpleNamespace(init=made.init), SimpleNamespace(update=made.update)):
        with pytest.raises(ss.SamestepError, match="^optimizer must be an optax transformation, .* got function$"):
            backend.updater(lambda rate, half=half: half, replica, 0.0)

    rates = []

    def rated(rate):
        rates.append(rate)
        return optax.sgd(rate)

    for name in ("init", "update"):  # a function that has one of the two names is still a function of the rate
        rated.__dict__.clear()
        setattr(rated, name, None)
        assert backend.updater(rated, replica, 0.0).rate() is None
    assert rates == [0.1, 0.1]  # what the first state is made with; updates have the schedule's
