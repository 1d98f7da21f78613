"""Schedules against optax: our table in its training loop, its schedules against ours, and its traps."""

# ruff: noqa: E402  (JAX and optax are asked for first)

from __future__ import annotations

import doctest
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp

import samestep.schedules.exports.optax
from parity.tolerances import EXPORTED, STEPS, UPDATES, agree, float32
from samestep.errors import Invalid, WrongType
from samestep.schedules.algebra import Schedule
from samestep.schedules.exports.optax import schedule_fn
from samestep.schedules.kinds import cosine, drops, exponential, poly

by_name = pytest.mark.parametrize("name", EXPORTED)


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    """The tolerances and the traps are those of XLA's CPU compiler."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def test_doctests() -> None:
    assert doctest.testmod(samestep.schedules.exports.optax).failed == 0


# The export in a training loop


class Loop:
    """A linear model with loss w·1: the gradient is 1, so a step from w = 0 leaves -rate, in float32, in w."""

    def __init__(self, optimizer: Any, compiled: bool = True) -> None:
        self.optimizer = optimizer
        self.state = optimizer.init(jnp.zeros((1, 1)))
        self.step = jax.jit(self._step) if compiled else self._step

    def _step(self, state: Any, _: Any = None) -> tuple[Any, Any]:
        weight = jnp.zeros((1, 1))
        gradient = jax.grad(lambda w: (jnp.ones((1, 1)) @ w).sum())(weight)
        updates, state = self.optimizer.update(gradient, state, weight)
        return state, -optax.apply_updates(weight, updates)[0, 0]

    def run(self, n: int) -> list[np.float32]:
        rates = []
        for _ in range(n):
            self.state, rate = self.step(self.state)
            rates.append(np.float32(rate))
        return rates


@by_name
@pytest.mark.parametrize("compiled", [True, False], ids=["jit", "eager"])
def test_the_rate_that_was_applied(name: str, compiled: bool) -> None:
    loop = Loop(optax.sgd(schedule_fn(EXPORTED[name], UPDATES)), compiled)
    assert loop.run(UPDATES) == float32(EXPORTED[name])


@by_name
def test_the_rate_that_was_applied_in_a_scan(name: str) -> None:
    loop = Loop(optax.sgd(schedule_fn(EXPORTED[name], UPDATES)))
    _, rates = jax.jit(lambda state: jax.lax.scan(loop._step, state, length=UPDATES))(loop.state)
    assert list(np.asarray(rates)) == float32(EXPORTED[name])


def test_as_a_hyperparameter_that_is_injected() -> None:
    schedule = EXPORTED["restarts"]
    loop = Loop(optax.inject_hyperparams(optax.sgd)(learning_rate=schedule_fn(schedule, UPDATES)))
    assert loop.run(UPDATES) == float32(schedule)


@by_name
def test_restored(name: str) -> None:
    """All that optax keeps is the count, in the optimizer's state: there is no order to get wrong."""
    first = Loop(optax.sgd(schedule_fn(EXPORTED[name], UPDATES)))
    rates = first.run(23)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(first.state)]
    second = Loop(optax.sgd(schedule_fn(EXPORTED[name], UPDATES)))
    second.state = jax.tree.unflatten(jax.tree.structure(second.state), leaves)
    assert rates + second.run(UPDATES - 23) == float32(EXPORTED[name])


def test_past_the_table_the_last_rate_is_held() -> None:
    schedule = poly(1, 50)
    assert Loop(optax.sgd(schedule_fn(schedule, 20))).run(UPDATES) == float32(schedule.hold(19))
    rate = jax.jit(schedule_fn(schedule, 20))
    assert rate(jnp.int32(2**31 - 1)) == rate(19) == np.float32(schedule(19))


def test_arrays_of_counts() -> None:
    rate = schedule_fn(EXPORTED["one cycle"], UPDATES)
    counts = jnp.arange(UPDATES)
    for rates in (rate(counts), jax.vmap(rate)(counts), jax.jit(rate)(counts)):
        assert rates.dtype == jnp.float32
        assert list(np.asarray(rates)) == float32(EXPORTED["one cycle"])


def test_in_epochs_without_and_with_bind() -> None:
    schedule = cosine(0.3, 8).in_epochs()
    with pytest.raises(Invalid, match=r"how many steps has an epoch\? .* \.bind"):
        schedule_fn(schedule, 40)
    assert Loop(optax.sgd(schedule_fn(schedule.bind(5), 40))).run(40) == float32(schedule.bind(5), 40)


def test_where_a_schedule_ends_no_steps_are_needed() -> None:
    for schedule in (cosine(0.3, 8).warmup(3), poly(0.1, 4).in_epochs(5), drops(0.1, [4, 7], 0.5)):
        assert list(np.asarray(schedule.optax()(jnp.arange(UPDATES)))) == float32(schedule)
    with pytest.raises(Invalid) as caught:
        exponential(0.1, 0.9).optax()
    assert str(caught.value) == (
        "optax.schedule_fn: exponential(0.1, 0.9) has no end: say how many steps will be trained, steps=..."
    )
    with pytest.raises(Invalid, match=r"how many steps has an epoch\? .* \.bind"):
        poly(0.1, 4).in_epochs().optax()


def test_refused() -> None:
    with pytest.raises(Invalid, match="steps must be at least 1, got steps=0"):
        schedule_fn(poly(1, 5), 0)
    with pytest.raises(WrongType, match=r"optax.schedule_fn: schedule must be a schedule, .* got schedule=0.1"):
        schedule_fn(0.1, 5)  # type: ignore[arg-type]


# optax's schedules


def rates_of(schedule: Callable[[Any], Any], compiled: bool, n: int = STEPS) -> list[float]:
    function = jax.jit(schedule) if compiled else schedule
    return [float(function(jnp.int32(count))) for count in range(n)]


both = pytest.mark.parametrize("compiled", [True, False], ids=["jit", "eager"])
COSINES = [(0.1, 20, 300, 0.0, 0.0), (0.3, 50, 350, 0.01, 0.0), (1.0, 7, 390, 1e-3, 0.1), (1e-3, 100, 400, 1e-5, 1e-6)]


@both
@pytest.mark.parametrize(("peak", "n", "T", "end", "start"), COSINES)
def test_cosine_with_warm_up(peak: float, n: int, T: int, end: float, start: float, compiled: bool) -> None:
    """optax counts the warm-up in the number of steps."""
    theirs = optax.warmup_cosine_decay_schedule(start, peak, n, T, end)
    agree("float32", rates_of(theirs, compiled), cosine(peak, T - n, end).warmup(n, start))


@both
@pytest.mark.parametrize(("peak", "n", "T", "end", "start"), COSINES)
def test_cosine(peak: float, n: int, T: int, end: float, start: float, compiled: bool) -> None:
    agree("float32", rates_of(optax.cosine_decay_schedule(peak, T, end / peak), compiled), cosine(peak, T, end))


@both
@pytest.mark.parametrize(("lr", "factor", "every", "stair"), [(0.1, 0.5, 30, True), (1.0, 0.9, 50, False)])
def test_exponential(lr: float, factor: float, every: int, stair: bool, compiled: bool) -> None:
    theirs = optax.exponential_decay(lr, every, factor, staircase=stair)
    agree("float32", rates_of(theirs, compiled), exponential(lr, factor, every, stair))


@both
@pytest.mark.parametrize(("lr", "at", "factor"), [(0.5, [15, 30], 0.5), (0.1, [100, 200, 300], 0.1)])
def test_drops(lr: float, at: list[int], factor: float, compiled: bool) -> None:
    theirs = optax.piecewise_constant_schedule(lr, dict.fromkeys(at, factor))
    agree("float32", rates_of(theirs, compiled), drops(lr, at, factor))


# Traps


def ours_and_theirs(theirs: Any, schedule: Schedule, counts: list[int]) -> tuple[list[float], list[float], list[float]]:
    """Their rates, eager and compiled, and ours, compiled."""
    functions = (theirs, jax.jit(theirs), jax.jit(schedule_fn(schedule, 2000)))
    eager, compiled, ours = ([float(function(jnp.int32(count))) for count in counts] for function in functions)
    return eager, compiled, ours


def test_trap_polynomial_is_nan_under_jit() -> None:
    """Compiled, t/T is t · (1/T): 1 - 1000/1000 becomes less than 0, and its root NaN. So does the model."""
    theirs = optax.polynomial_schedule(0.1, 0.0, 0.5, 1000)
    eager, compiled, ours = ours_and_theirs(theirs, poly(0.1, 1000, power=0.5), [1000, 1001, 1500])
    assert eager == [0, 0, 0]
    assert np.isnan(compiled).all()
    assert ours == [0, 0, 0]

    loop = Loop(optax.sgd(theirs))
    assert np.isnan(loop.run(1001)[-1])
    loop = Loop(optax.sgd(schedule_fn(poly(0.1, 1000, power=0.5), 1001)))
    assert loop.run(1001)[-1] == 0


def test_trap_linear_is_negative_under_jit() -> None:
    theirs = optax.linear_schedule(0.1, 0.0, 1000)
    eager, compiled, ours = ours_and_theirs(theirs, poly(0.1, 1000), [1000, 1001, 1500])
    assert eager == [0, 0, 0]
    assert all(-1e-8 < rate < 0 for rate in compiled)
    assert ours == [0, 0, 0]
