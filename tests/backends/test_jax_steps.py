"""Many steps of JAX in one launch have the bits of steps made one by one. On a GPU this is the way; here the CPU takes it."""

import functools
import os

import numpy as np
import pytest

if os.environ.get("SAMESTEP_TEST_BACKEND", "torch") != "jax":
    pytest.skip("one framework per process: set SAMESTEP_TEST_BACKEND=jax", allow_module_level=True)

import jax
import jax.numpy as jnp
import optax
from conformance import precision, suite

import samestep as ss
from samestep.backends.jax import program as jax_program
from samestep.backends.jax import replica as jax_replica
from samestep.backends.jax import steps as jax_steps
from samestep.backends.jax.steps import JaxSteps, Launch
from samestep.backends.jax.updater import update_of
from samestep.draws import halves
from samestep.models.jax import Pair
from samestep.training import fit as jax_fit

pytestmark = pytest.mark.filterwarnings("error:steps are made one by one")
random = np.random.default_rng(0)
X, Y = random.random((40, 6), dtype=np.float32), random.integers(0, 3, 40)
Y[16:32] = 0
W = random.standard_normal((6, 3), dtype=np.float32)


def barrier(arrays):
    """One that holds on a CPU, too: a branch, of which XLA cannot know that it is always taken."""
    number = (arrays[0].reshape(-1)[0] != 0).astype(np.int32)
    return jax.lax.cond(number * (number - 1) == 0, lambda a: a, lambda a: [x * 0 for x in a], list(arrays))


@pytest.fixture(autouse=True)
def looped(monkeypatch):
    jax_steps.launch.cache_clear()
    jax_program.program.cache_clear()
    monkeypatch.setattr(jax_program, "barrier", barrier)
    monkeypatch.setattr(jax_replica, "LOOPED", ("cpu", "cuda"))
    monkeypatch.setattr(jax_fit, "LIVE", 1e6)  # as many steps at once as there are, however long one takes


@pytest.fixture
def launches(monkeypatch):
    """How many steps were made in each launch."""
    launched, made = JaxSteps._launched, []

    def counted(self, sizes, batches, rates, t):
        made.append(len(batches))
        return launched(self, sizes, batches, rates, t)

    monkeypatch.setattr(JaxSteps, "_launched", counted)
    return made


def net(w, state, x, key, train):
    """A dense layer behind dropout, with a running mean and a counter."""
    here = x.mean(0)
    if train:
        x = jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0)
    return x @ w["weight"] + w["bias"], {"mean": 0.9 * state["mean"] + 0.1 * here, "count": state["count"] + 1}


def fit(devices=1, dtype=np.float32, epochs=2, **settings):
    """Batches of 16, 16 and 8 examples over 3 shards, of which some have an example more than others."""
    weights = {"weight": W.astype(dtype), "bias": np.zeros(3, dtype)}
    model = Pair(net, weights, {"mean": jnp.zeros(6, dtype), "count": jnp.int32(0)})
    settings = {"batch_size": 16, "shards": 3, "schedule": lambda t: 0.1 / (1 + t)} | settings
    trainer = ss.Trainer(max_epochs=epochs, devices=["cpu"] * devices, progress=False, check_every=None, **settings)
    return trainer.fit(model, ss.Data(train=(X.astype(dtype), Y)))


def check(launches, counts=(1, 2, 3), **settings):
    alone = fit(capture=False, **settings)
    assert not launches
    assert len(set(alone.fingerprints)) == len(alone.fingerprints) == 6
    for count in counts:
        suite.same(fit(count, **settings), alone)
    assert launches.count(2) == 3 * len(counts), "two steps of an epoch go together; once, they are compared"


def weighted(output, y):
    """Only examples with a label above 0 count."""
    weight = (y > 0).astype(output.dtype)
    return (optax.softmax_cross_entropy_with_integer_labels(output, y) * weight).sum(), weight.sum()


def summed(output, y):
    return optax.softmax_cross_entropy_with_integer_labels(output, y).sum()


summed.reduction = "sum"
momentum = functools.partial(optax.sgd, momentum=0.9, nesterov=True)
CASES = {
    "sgd": {"optimizer": ss.sgd(momentum=0.9, nesterov=True, weight_decay=0.1)},
    "adam": {"optimizer": ss.adam(), "gradient_clip_val": 0.1},
    "adamw": {"optimizer": ss.adamw(), "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "adagrad": {"optimizer": ss.adagrad()},
    "groups": {"optimizer": ss.adamw(), "groups": {"bias": ss.group(lr_scale=0.3, weight_decay=0.0)}},
    "frozen": {"optimizer": ss.adam(), "groups": {"bias": ss.group(frozen=True)}, "gradient_clip_val": 0.1},
    "a rate": {"optimizer": momentum, "gradient_clip_val": 0.1},
    "hyperparameters": {"optimizer": optax.inject_hyperparams(optax.adam)(0.001)},
    "a fixed rate": {"optimizer": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01)), "schedule": None},
    "metrics": {"metrics": {"bias": lambda output, y: (output.sum(), len(y))}},
    "one shard": {"shards": 1, "optimizer": ss.adam()},
}


@pytest.mark.parametrize("case", CASES)
def test_many_steps_in_a_launch_are_those_made_one_by_one(case, launches):
    check(launches, (1,) if case == "one shard" else (2,), **CASES[case])


@pytest.mark.parametrize("model", ["lenet", "mlp_with_dropout", suite.NORMED])
def test_the_zoo_in_launches(model, launches):
    alone = suite.fit(model, 1, capture=False)
    assert not launches
    suite.same(suite.fit(model, 8), alone)
    assert launches


@pytest.mark.parametrize("optimizer", [ss.adam(), momentum, optax.inject_hyperparams(optax.adam)(0.001)])
def test_many_steps_in_double_precision(optimizer, launches):
    with precision.computing_in("float64"):
        check(launches, (2,), dtype=np.float64, optimizer=optimizer, gradient_clip_val=0.1)


@pytest.mark.filterwarnings("ignore:a batch has weight 0")
@pytest.mark.parametrize("optimizer", [ss.sgd(momentum=0.9), momentum])
@pytest.mark.parametrize("loss", [weighted, summed])
def test_many_steps_of_losses_over_something_else(loss, optimizer, launches):
    """A sum; and one over a weight, which is zero for two of the batches: these change nothing."""
    given = {"optimizer": optimizer, "loss": loss, "sampling": "in_order"}
    alone = fit(capture=False, **given)
    assert len(set(alone.fingerprints)) == (6 if loss is summed else 4)
    suite.same(fit(2, **given), alone)
    assert 2 in launches


def test_a_loop_over_the_shards_has_the_same_bits(launches, monkeypatch):
    monkeypatch.setattr(jax_steps, "WAY", "looped")
    check(launches, (3,), optimizer=ss.adam())


def test_a_launch_with_a_stale_rate_is_another_run(monkeypatch):
    """The broken twin: one step of the second epoch has another rate. Of each size, the first two are compared."""
    alone = fit(capture=False, schedule=lambda t: 2.0**-t)

    def stale(self, x, state, total, over, lr, t, updated=Launch.updated):
        return updated(self, x, state, total, over, lr * (1 + (t == 4)), t)

    monkeypatch.setattr(Launch, "updated", stale)
    run = fit(schedule=lambda t: 2.0**-t)
    assert [a == b for a, b in zip(run.fingerprints, alone.fingerprints, strict=True)] == [True] * 4 + [False] * 2


def dropped(self, vectors, data, order, start, keys, edges, total=Launch.total):
    return total(self, vectors, data, order, start, keys, edges - edges[-1:] // 3)  # without the last of three


def failed(self, *given):
    raise RuntimeError("XLA said no")


def forgetful(self, x, state, total, over, lr, t, updated=Launch.updated):
    return updated(
        self, x, jax.tree.map(lambda slot: slot * 2, state), total, over, lr, t
    )  # seen once the state is not zero


def test_a_launch_that_differs_from_its_second_step_on_is_found_and_left(monkeypatch):
    alone = fit(capture=False, optimizer=ss.adam())
    monkeypatch.setattr(Launch, "updated", forgetful)
    with pytest.warns(UserWarning, match="not many in one launch, and so slower: its bits are others"):
        suite.same(fit(2, optimizer=ss.adam()), alone)


@pytest.mark.parametrize(("broken", "why"), [(dropped, "its bits are others"), (failed, "XLA said no")])
def test_a_launch_that_is_not_like_steps_alone_is_found_and_left(broken, why, monkeypatch):
    """The broken twins: a launch without a shard, and one that cannot be compiled."""
    alone = fit(capture=False)
    monkeypatch.setattr(jax_steps, "WAY", "looped")
    monkeypatch.setattr(Launch, "total", broken)
    with pytest.warns(UserWarning, match=f"not many in one launch, and so slower: .*{why}"):
        suite.same(fit(2), alone)


def test_who_gets_launches(monkeypatch):
    """Not several devices, optimizers with noise or of a user's, data that is read, or models too large for the loop."""

    def steps(devices=("cpu", "cpu"), **settings):
        found = []
        monkeypatch.setattr(JaxSteps, "__init__", lambda self, group: found.append(group))
        monkeypatch.setattr(JaxSteps, "most", lambda self, pass_: 0)
        fit(settings.pop("count", 2), **settings)
        return bool(found)

    class Own(type(ss.sgd())):
        pass

    assert steps()
    assert not steps(capture=False)
    assert not steps(optimizer=ss.sgld())
    assert not steps(optimizer=Own())
    monkeypatch.setattr(jax_replica, "LOOPED", ("cuda",))
    assert not steps()


def test_going_on_one_by_one_after_a_launch_and_the_other_way_round(tmp_path):
    """Checkpoints, averages and what goes on from them find the weights and the optimizer's state of the last step."""
    given = {"optimizer": ss.adam(), "run_dir": tmp_path}
    whole = fit(optimizer=ss.adam(), capture=False, epochs=3)
    for epochs, capture in ((1, True), (2, False), (3, True)):
        run = fit(2, capture=capture, epochs=epochs, **given)
    assert run.resumed == 6
    suite.same(run, whole)


def test_keys_in_words():
    keys = [[0, 1], [(1 << 63) - 1, 3 << 32 | 5]]
    assert jax_replica.in_words(keys).tolist() == [[halves(key).tolist() for key in row] for row in keys]


@pytest.mark.skipif(ss.num_gpus() == 0, reason="needs a CUDA GPU")
@pytest.mark.parametrize("model", suite.MODELS)
def test_the_zoo_in_launches_on_a_gpu(model, launches, monkeypatch):
    monkeypatch.setattr(jax_program, "barrier", jax.lax.optimization_barrier)
    alone = suite.fit(model, "cuda", capture=False)
    assert not launches
    for count in (1, 2, 3, 8):
        suite.same(suite.fit(model, ["cuda"] * count), alone)
    assert launches


def test_an_update_alone_is_compiled_for_a_gpu_as_one_in_a_launch_is(monkeypatch):
    """Else XLA may choose another kernel for a norm, or choose by a stopwatch."""
    asked = []
    monkeypatch.setattr(jax, "jit", lambda function, **options: asked.append(options["compiler_options"]) or function)
    jax_steps.Compiled(sum)
    update_of(optax.sgd, "rate", None)
    assert asked == [jax_program.GPU] * 2
