"""Schedules against MXNet: our scheduler in its training loop, and its schedulers against ours.

MXNet's optimizers count an update before they ask for its rate, so the first one asks for num_update = 1; ours are
compared at t = num_update - 1.
"""

from __future__ import annotations

import doctest
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # MXNet uses names that NumPy has deprecated
    mx = pytest.importorskip("mxnet")

from mxnet import autograd, gluon, lr_scheduler

import samestep.schedules.exports.mxnet
from parity.tolerances import EXPORTED, STEPS, UPDATES, agree, float32
from samestep.errors import Invalid, WrongType
from samestep.schedules.algebra import Schedule
from samestep.schedules.exports.mxnet import Scheduler as scheduler
from samestep.schedules.kinds import constant, cosine, drops, geometric, poly

by_name = pytest.mark.parametrize("name", EXPORTED)


def test_doctests() -> None:
    assert doctest.testmod(samestep.schedules.exports.mxnet).failed == 0


# The export in a training loop


class Loop:
    """A linear model with loss w·1: the gradient is 1, so a step from w = 0 leaves -rate, in float32, in w."""

    def __init__(self, scheduler: Any, kvstore: str | None = "device", **settings: Any) -> None:
        self.model = gluon.nn.Dense(1, use_bias=False, in_units=1)
        self.model.initialize()
        settings = {"lr_scheduler": scheduler, **settings}
        self.trainer = gluon.Trainer(self.model.collect_params(), "sgd", settings, kvstore=kvstore)

    def run(self, n: int) -> list[np.float32]:
        rates = []
        for _ in range(n):
            self.model.weight.set_data(mx.nd.zeros((1, 1)))
            with autograd.record():
                loss = self.model(mx.nd.ones((1, 1))).sum()
            loss.backward()
            self.trainer.step(1)
            rates.append(np.float32(-self.model.weight.data().asscalar()))
        return rates


@by_name
@pytest.mark.parametrize("kvstore", ["device", None])
def test_the_rate_that_was_applied(name: str, kvstore: str | None) -> None:
    assert Loop(scheduler(EXPORTED[name]), kvstore).run(UPDATES) == float32(EXPORTED[name])


@by_name
def test_the_rate_that_an_optimizer_applied_without_a_trainer(name: str) -> None:
    update, weight, rates = mx.optimizer.get_updater(mx.optimizer.SGD(lr_scheduler=scheduler(EXPORTED[name]))), None, []
    for _ in range(UPDATES):
        weight = mx.nd.zeros((1,))
        update(0, mx.nd.ones((1,)), weight)
        rates.append(np.float32(-weight.asscalar()))
    assert rates == float32(EXPORTED[name])


def test_what_the_trainer_asks_for() -> None:
    asked: list[int] = []

    class Spy(lr_scheduler.LRScheduler):
        def __call__(self, num_update: int) -> float:
            asked.append(num_update)
            return 0.1

    loop = Loop(Spy())
    assert (loop.trainer.learning_rate, asked) == (0.1, [0])  # read before any update
    loop.run(3)
    assert asked == [0, 1, 2, 3]


def test_what_the_trainer_shows() -> None:
    """Its learning_rate is that of the last update; before the first one, of that."""
    loop = Loop(scheduler(poly(1, 4)))
    shown = [loop.trainer.learning_rate]
    for _ in range(3):
        loop.run(1)
        shown.append(loop.trainer.learning_rate)
    assert shown == [1.0, 1.0, 0.75, 0.5]


def test_in_epochs_without_and_with_bind() -> None:
    schedule = cosine(0.3, 8).in_epochs()
    with pytest.raises(Invalid, match=r"how many steps has an epoch\? .* \.bind"):
        scheduler(schedule)
    assert Loop(scheduler(schedule.bind(5))).run(UPDATES) == float32(schedule.bind(5))


@by_name
def test_restored(name: str, tmp_path: Path) -> None:
    """The trainer saves its optimizer with the scheduler and the count, all in one: there is no order to get wrong."""
    first = Loop(scheduler(EXPORTED[name]))
    rates = first.run(23)
    first.trainer.save_states(str(tmp_path / "states"))
    second = Loop(scheduler(EXPORTED[name]))
    second.trainer.load_states(str(tmp_path / "states"))
    assert rates + second.run(UPDATES - 23) == float32(EXPORTED[name])


@by_name
def test_begun_at_a_count(name: str) -> None:
    loop = Loop(scheduler(EXPORTED[name]), begin_num_update=23)
    assert loop.run(UPDATES - 23) == float32(EXPORTED[name])[23:]


def test_refused() -> None:
    with pytest.raises(Invalid, match="mxnet.scheduler: the schedule sets the rate: leave learning_rate=0.5 out"):
        Loop(scheduler(poly(1, 4)), learning_rate=0.5)
    with pytest.raises(WrongType, match=r"mxnet.scheduler: schedule must be a schedule, .* got schedule=0.1"):
        scheduler(0.1)  # type: ignore[arg-type]


# MXNet's schedulers


def rates_of(theirs: Any, n: int = STEPS) -> list[float]:
    """What the trainer gets: it counts from 1."""
    return [theirs(num_update) for num_update in range(1, n + 1)]


def warmed(after: Schedule, lr: float, n: int, start: float, mode: str) -> Schedule:
    """A warm-up that replaces the first rates of a schedule, as MXNet's step schedulers have it, on a count from 1."""
    return constant(lr).warmup(n, start, mode).shift(1).then(after.shift(n - 1), n - 1) if n else after


WARM_UPS = [(0, 0.0, "linear"), (20, 0.0, "linear"), (33, 0.05, "linear"), (25, 0.05, "constant")]
warm_ups = pytest.mark.parametrize(("n", "start", "mode"), WARM_UPS)


@warm_ups
@pytest.mark.parametrize(
    ("lr", "factor", "every", "floor"), [(2.0, 0.9, 1, 1e-2), (0.1, 0.5, 30, 1e-8), (0.3, 0.93, 7, 1e-4)]
)
def test_factor(lr: float, factor: float, every: int, floor: float, n: int, start: float, mode: str) -> None:
    theirs = lr_scheduler.FactorScheduler(every, factor, floor, lr, n, start, mode)
    agree("equal", rates_of(theirs), warmed(geometric(lr, factor, floor).every(every), lr, n, start, mode))


@warm_ups
@pytest.mark.parametrize(
    ("lr", "at", "factor"), [(0.5, [15, 30], 0.5), (0.1, [100, 200, 300], 0.1), (0.3, [5, 70], 0.33)]
)
def test_multi_factor(lr: float, at: list[int], factor: float, n: int, start: float, mode: str) -> None:
    """It drops at num_update > boundary, which is t >= boundary."""
    theirs = lr_scheduler.MultiFactorScheduler(list(at), factor, lr, n, start, mode)
    agree("equal", rates_of(theirs), warmed(drops(lr, at, factor), lr, n, start, mode))


@warm_ups
@pytest.mark.parametrize(("lr", "T", "power", "end"), [(0.1, 300, 2, 0.0), (0.3, 350, 1, 0.01), (1.0, 390, 3, 1e-3)])
def test_poly(lr: float, T: int, power: int, end: float, n: int, start: float, mode: str) -> None:
    """MXNet counts the warm-up in the number of updates, and skips the rate of count 0."""
    theirs = lr_scheduler.PolyScheduler(T, lr, power, end, n, start, mode)
    agree("equal", rates_of(theirs), poly(lr, T - n, end, power).warmup(n, start, mode).shift(1))


@warm_ups
@pytest.mark.parametrize(("lr", "T", "end"), [(0.1, 300, 0.0), (0.3, 350, 0.01), (1.0, 390, 1e-3)])
def test_cosine(lr: float, T: int, end: float, n: int, start: float, mode: str) -> None:
    theirs = lr_scheduler.CosineScheduler(T, lr, end, n, start, mode)
    agree("equal", rates_of(theirs), cosine(lr, T - n, end).warmup(n, start, mode).shift(1))


def test_a_warm_up_leads_to_where_the_schedule_begins() -> None:
    """end + (lr - end) is not lr here, but an ulp above: ours rises to that, MXNet's to lr, where its schedule is not."""
    ours = cosine(0.01, 280, end=0.001)
    theirs = lr_scheduler.CosineScheduler(300, 0.01, 0.001, 20)
    assert ours(0) == theirs(20) == np.nextafter(0.01, 1)
    agree("two roundings", rates_of(theirs), ours.warmup(20).shift(1))


# Traps


def test_trap_the_schedulers_of_mxnet_change_when_they_are_called() -> None:
    """Asked for a late rate, to plot it, theirs never comes back: count 1 then has another rate."""
    theirs, ours = lr_scheduler.FactorScheduler(1, 0.5, base_lr=1.0), scheduler(geometric(1, 0.5))
    assert (theirs(1), theirs(4), theirs(1)) == (1.0, 0.125, 0.125)
    assert (ours(1), ours(4), ours(1)) == (1.0, 0.125, 1.0)
