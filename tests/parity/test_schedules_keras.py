"""Schedules against Keras, on TensorFlow: our schedule in its training loops, its schedules against ours, and its traps."""

# ruff: noqa: E402  (Keras and TensorFlow are asked for first)

from __future__ import annotations

import doctest
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

from keras.optimizers import SGD, schedules

import samestep.schedules.exports.keras
from parity.tolerances import EXPORTED, STEPS, UPDATES, agree, float32
from samestep.errors import Invalid, WrongType
from samestep.schedules.algebra import Schedule
from samestep.schedules.exports.keras import Scheduled, callback
from samestep.schedules.kinds import cosine, exponential, geometric, piecewise, poly

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras, with NumPy 2
by_name = pytest.mark.parametrize("name", EXPORTED)


def test_doctests() -> None:
    assert doctest.testmod(samestep.schedules.exports.keras).failed == 0


# The export in training loops


class Loop:
    """A linear model with loss w·1: the gradient is 1, so a step from w = 0 leaves -rate, in float32, in w."""

    def __init__(self, optimizer: Any, compiled: bool | None = None) -> None:
        """compiled: in a tf.function (False) or by XLA (True); else eager."""
        self.optimizer = optimizer
        self.weight = keras.Variable(np.zeros((1, 1), np.float32))
        optimizer.build([self.weight])
        self.step = self._step if compiled is None else tf.function(self._step, jit_compile=compiled)

    def _step(self) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.ones((1, 1)) @ self.weight.value)
        self.optimizer.apply([tape.gradient(loss, self.weight.value)], [self.weight])

    def run(self, n: int) -> list[np.float32]:
        rates = []
        for _ in range(n):
            self.weight.assign([[0.0]])
            self.step()
            rates.append(np.float32(-self.weight.numpy()[0, 0]))
        return rates


@by_name
@pytest.mark.parametrize("compiled", [None, False, True], ids=["eager", "function", "xla"])
def test_the_rate_that_was_applied(name: str, compiled: bool | None) -> None:
    loop = Loop(SGD(Scheduled(EXPORTED[name], UPDATES)), compiled)
    assert loop.run(UPDATES) == float32(EXPORTED[name])


class Applied(keras.callbacks.Callback):
    """Sets the weight to 0 before each batch and notes the rate that it shows afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[np.float32] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.set_weights([np.zeros((1, 1), np.float32)])

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.rates.append(np.float32(-self.model.get_weights()[0][0, 0]))


def linear(optimizer: Any, **settings: Any) -> Any:
    """The model for `fit`: the absolute distance from w·1 to a target far below has the gradient 1 as well."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(optimizer, loss="mean_absolute_error", **settings)
    return model


def fit(model: Any, n: int, callbacks: Any = (), **settings: Any) -> list[np.float32]:
    """Train for n updates an epoch."""
    applied = Applied()
    x, y = np.ones((n, 1), np.float32), np.full((n, 1), -1e6, np.float32)
    model.fit(x, y, batch_size=1, verbose=0, callbacks=[*callbacks, applied], **settings)
    return applied.rates


@by_name
def test_the_rate_that_fit_applied(name: str) -> None:
    model = linear(SGD(Scheduled(EXPORTED[name], UPDATES)), jit_compile=False)
    assert fit(model, UPDATES // 2, epochs=2) == float32(EXPORTED[name])


def test_the_rate_that_fit_applied_compiled_by_xla() -> None:
    model = linear(SGD(Scheduled(EXPORTED["restarts"], UPDATES)), jit_compile=True)
    assert fit(model, UPDATES) == float32(EXPORTED["restarts"])


@pytest.mark.parametrize("name", ["cosine, warm-up", "drops", "in epochs"])
def test_a_saved_model_goes_on(name: str, tmp_path: Path) -> None:
    model = linear(SGD(Scheduled(EXPORTED[name], UPDATES)), jit_compile=False)
    rates = fit(model, 23)
    model.save(tmp_path / "model.keras")
    model = keras.models.load_model(tmp_path / "model.keras")
    ours = model.optimizer._learning_rate
    assert (type(ours), ours.schedule, ours.steps) == (Scheduled, EXPORTED[name], UPDATES)
    assert rates + fit(model, UPDATES - 23) == float32(EXPORTED[name])


@by_name
@pytest.mark.parametrize("order", ["variables first", "schedule first"])
def test_restored_in_any_order(name: str, order: str) -> None:
    """All that Keras keeps is the count, in the optimizer's variables."""
    first = Loop(SGD(Scheduled(EXPORTED[name], UPDATES)), compiled=False)
    rates = first.run(23)
    config, values = first.optimizer.get_config(), [variable.numpy() for variable in first.optimizer.variables]
    assert values == [23]
    second = Loop(SGD.from_config(config) if order == "schedule first" else SGD(123.0))
    second.optimizer.iterations.assign(values[0])
    if order == "variables first":
        second.optimizer.learning_rate = Scheduled.from_config(config["learning_rate"]["config"])
    assert rates + second.run(UPDATES - 23) == float32(EXPORTED[name])


def test_past_the_table_the_last_rate_is_held() -> None:
    loop = Loop(SGD(Scheduled(poly(1, 50), 20)), compiled=False)
    assert loop.run(UPDATES) == float32(poly(1, 50).hold(19))


@pytest.mark.parametrize("ours", [cosine(0.3, 8, end=0.01).warmup(2).in_epochs(), EXPORTED["drops"].shift(12)])
def test_one_rate_an_epoch(ours: Schedule) -> None:
    """With the callback, and the same rates when training goes on at a later epoch."""
    model = linear(SGD(123.0), jit_compile=False)
    expected = float32(ours.bind(1).every(3), 36)
    assert fit(model, 3, [callback(ours)], epochs=5) == expected[:15]
    assert fit(model, 3, [callback(ours)], initial_epoch=5, epochs=12) == expected[15:]


def test_where_a_schedule_ends_no_steps_are_needed() -> None:
    schedule = cosine(0.3, 8).warmup(3)
    ours = schedule.keras()
    assert (ours.steps, ours.get_config()["steps"]) == (12, 12)
    assert Loop(SGD(ours), compiled=False).run(UPDATES) == float32(schedule)
    with pytest.raises(
        Invalid, match=r"^keras.schedule: geometric\(0.1, 0.9\) has no end: say how many steps will be "
    ):
        geometric(0.1, 0.9).keras()


def test_refused() -> None:
    in_epochs = cosine(0.3, 8).in_epochs()
    with pytest.raises(Invalid, match=r"how many steps has an epoch\? .* \.bind"):
        Scheduled(in_epochs, 40)
    with pytest.raises(Invalid, match=r"keras.callback: sets one rate an epoch, but the schedule counts steps"):
        callback(in_epochs.bind(5))
    with pytest.raises(Invalid, match="steps must be at least 1, got steps=0"):
        Scheduled(poly(1, 5), 0)
    for function in (lambda: Scheduled(0.1, 5), lambda: callback(0.1)):  # type: ignore[arg-type]
        with pytest.raises(WrongType, match=r"schedule must be a schedule, .* got schedule=0.1"):
            function()


# Keras's schedules


def rates_of(theirs: Callable[[Any], Any], n: int = STEPS) -> list[float]:
    function = tf.function(theirs)
    return [float(function(tf.constant(step, tf.int64))) for step in range(n)]


@pytest.mark.parametrize(
    ("at", "values"), [([15, 30], [0.5, 0.25, 0.125]), ([100, 200, 300], [0.1, 0.02, 0.003, 1e-4]), ([0], [0.1, 0.2])]
)
def test_piecewise(at: list[int], values: list[float]) -> None:
    """Keras changes the rate at step > boundary, a step later than everybody else."""
    theirs = schedules.PiecewiseConstantDecay(at, values)
    agree("equal in float32", rates_of(theirs), piecewise([boundary + 1 for boundary in at], values))


COSINES = [(0.1, 20, 300, 0.0), (0.3, 50, 350, 0.01), (1.0, 7, 390, 1e-3)]


@pytest.mark.parametrize(("peak", "n", "T", "end"), COSINES)
def test_cosine(peak: float, n: int, T: int, end: float) -> None:
    agree("float32", rates_of(schedules.CosineDecay(peak, T, end / peak)), cosine(peak, T, end))


@pytest.mark.parametrize("start", [0.0, 0.01])
@pytest.mark.parametrize(("peak", "n", "T", "end"), COSINES)
def test_cosine_with_warm_up(peak: float, n: int, T: int, end: float, start: float) -> None:
    theirs = schedules.CosineDecay(start, T - n, end / peak, warmup_target=peak, warmup_steps=n)
    agree("float32", rates_of(theirs), cosine(peak, T - n, end).warmup(n, start))


# Traps


def test_trap_integer_rates_give_zero() -> None:
    """Keras computes in the type of the first rate, here int32: 0.9^t becomes 0, and the model stands still."""
    theirs = Loop(SGD(schedules.ExponentialDecay(1, 100, 0.9)))
    assert theirs.run(5) == [1, 0, 0, 0, 0]
    ours = exponential(1, 0.9, every=100)
    assert Loop(SGD(Scheduled(ours, 5))).run(5) == float32(ours, 5)


def test_trap_gradient_accumulation_counts_micro_steps() -> None:
    """With four parts to a step, Keras asks for the rates of t = 3, 7, 11, ...: four times too fast.

    A schedule is not told. Ours says what is meant: .every(4).
    """
    k, ours = 4, poly(1, 10)

    def updates(optimizer: Any) -> list[np.float32]:
        return Loop(optimizer, compiled=False).run(10 * k)[k - 1 :: k]

    theirs = updates(SGD(schedules.PolynomialDecay(1.0, 10, 0.0), gradient_accumulation_steps=k))
    assert theirs == pytest.approx([ours(k * t + k - 1) for t in range(10)])
    assert theirs[2:] == [0] * 8  # done after a quarter
    assert updates(SGD(Scheduled(ours.every(k), 10 * k), gradient_accumulation_steps=k)) == float32(ours, 10)
