"""Schedules against Paddle: our scheduler in its training loop, its schedulers against ours, and its traps."""

from __future__ import annotations

import doctest
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that there is no ccache
    paddle = pytest.importorskip("paddle")

from paddle.optimizer import lr as schedulers

import samestep.schedules.exports.paddle
from parity.tolerances import EXPORTED, STEPS, UPDATES, agree, float32
from samestep.errors import Invalid, WrongType
from samestep.schedules.exports.paddle import Scheduler as scheduler
from samestep.schedules.kinds import cosine, drops, exponential, inverse_power, natural_exp, piecewise, poly

by_name = pytest.mark.parametrize("name", EXPORTED)


def test_doctests() -> None:
    assert doctest.testmod(samestep.schedules.exports.paddle).failed == 0


# The export in a training loop


class Loop:
    """A linear model with loss w·1: the gradient is 1, so a step from w = 0 leaves -rate, in float32, in w."""

    def __init__(self, scheduler: Any, kind: Any = paddle.optimizer.SGD) -> None:
        self.scheduler = scheduler
        self.model = paddle.nn.Linear(1, 1, bias_attr=False)
        self.optimizer = kind(learning_rate=scheduler, parameters=self.model.parameters())

    def run(self, n: int) -> list[np.float32]:
        rates = []
        for _ in range(n):
            self.model.weight.set_value(paddle.zeros([1, 1]))
            self.model(paddle.ones([1, 1])).sum().backward()
            self.optimizer.step()
            self.optimizer.clear_grad()
            self.scheduler.step()
            rates.append(np.float32(-self.model.weight.numpy()[0, 0]))
        return rates


@by_name
def test_the_rate_that_was_applied(name: str) -> None:
    assert Loop(scheduler(EXPORTED[name])).run(UPDATES) == float32(EXPORTED[name])


def test_in_epochs_without_and_with_bind() -> None:
    schedule = cosine(0.3, 8).in_epochs()
    with pytest.raises(Invalid, match=r"how many steps has an epoch\? .* \.bind"):
        scheduler(schedule)
    assert Loop(scheduler(schedule.bind(5))).run(UPDATES) == float32(schedule.bind(5))


def test_it_starts_after_last_epoch() -> None:
    schedule = EXPORTED["restarts"]
    assert Loop(scheduler(schedule, last_epoch=11)).run(40) == float32(schedule.shift(12), 40)


def test_behind_the_warm_up_of_paddle() -> None:
    theirs = schedulers.LinearWarmup(scheduler(cosine(0.5, 30)), 8, 0.0, 0.5)
    assert Loop(theirs).run(UPDATES) == float32(cosine(0.5, 30).warmup(8))


@by_name
@pytest.mark.parametrize("order", ["os", "so", "o", "s"])
def test_restored_in_any_order(name: str, order: str, tmp_path: Path) -> None:
    """The optimizer (o) and the scheduler (s); either is enough, for Paddle's optimizers keep the state of both."""
    first = Loop(scheduler(EXPORTED[name]))
    rates = first.run(23)
    paddle.save(first.optimizer.state_dict(), str(tmp_path / "o.pdopt"))
    paddle.save(first.scheduler.state_dict(), str(tmp_path / "s.pdopt"))
    second = Loop(scheduler(EXPORTED[name]))
    for each in order:
        restored = {"o": second.optimizer, "s": second.scheduler}[each]
        restored.set_state_dict(paddle.load(str(tmp_path / f"{each}.pdopt")))
    assert rates + second.run(UPDATES - 23) == float32(EXPORTED[name])


def test_the_state_of_another_scheduler_is_refused() -> None:
    ours = scheduler(poly(1, 4))
    with pytest.raises(Invalid, match=r"must be that of poly\(1.0, 4\), got that of poly\(1.0, 5\)"):
        ours.set_state_dict(scheduler(poly(1, 5)).state_dict())
    with pytest.raises(Invalid, match=r"must be that of poly\(1.0, 4\), got that of poly\(1.0, 5\)"):
        Loop(ours).optimizer.set_state_dict(Loop(scheduler(poly(1, 5))).optimizer.state_dict())
    with pytest.raises(Invalid, match=r"must be that of poly\(1.0, 4\), got {'last_epoch': 0"):
        ours.set_dict(schedulers.StepDecay(0.1, 3).state_dict())
    with pytest.raises(WrongType, match=r"paddle.scheduler: schedule must be a schedule, .* got schedule=0.1"):
        scheduler(0.1)  # type: ignore[arg-type]


# Paddle's schedulers


def rates_of(theirs: Any, n: int = STEPS) -> list[float]:
    rates = []
    for _ in range(n):
        rates.append(theirs())
        theirs.step()
    return rates


POLYNOMIALS = [(0.1, 300, 1e-4, 1.0), (0.3, 350, 0.01, 2.0), (1.0, 390, 0.0, 0.9), (0.5, 300, 0.003, 0.5)]


@pytest.mark.parametrize(("lr", "T", "end", "power"), POLYNOMIALS)
def test_polynomial(lr: float, T: int, end: float, power: float) -> None:
    agree("equal", rates_of(schedulers.PolynomialDecay(lr, T, end, power)), poly(lr, T, end, power))


@pytest.mark.parametrize(("n", "start"), [(20, 0.0), (37, 0.01)])
@pytest.mark.parametrize(("lr", "T", "end", "power"), POLYNOMIALS)
def test_polynomial_with_warm_up(lr: float, T: int, end: float, power: float, n: int, start: float) -> None:
    theirs = schedulers.LinearWarmup(schedulers.PolynomialDecay(lr, T, end, power), n, start, lr)
    agree("equal", rates_of(theirs), poly(lr, T, end, power).warmup(n, start))


def test_a_warm_up_leads_to_where_the_schedule_begins() -> None:
    """end + (lr - end) is not lr here, but an ulp above: ours rises to that, Paddle's to lr, where its schedule is not."""
    ours = poly(0.01, 300, end=0.001)
    assert ours(0) == schedulers.PolynomialDecay(0.01, 300, 0.001)() == np.nextafter(0.01, 1)
    theirs = schedulers.LinearWarmup(schedulers.PolynomialDecay(0.01, 300, 0.001), 20, 0.0, 0.01)
    agree("two roundings", rates_of(theirs), ours.warmup(20))
    theirs = schedulers.LinearWarmup(schedulers.PolynomialDecay(0.01, 300, 0.001), 20, 0.0, ours(0))
    agree("equal", rates_of(theirs), ours.warmup(20))


@pytest.mark.parametrize(("lr", "k"), [(0.1, 0.1), (0.5, 0.01), (3.0, 0.33)])
def test_inverse_time(lr: float, k: float) -> None:
    agree("equal", rates_of(schedulers.InverseTimeDecay(lr, k)), inverse_power(lr, k, 1))


@pytest.mark.parametrize(("lr", "k"), [(0.1, 0.1), (0.5, 0.01), (3.0, 0.33)])
def test_natural_exp(lr: float, k: float) -> None:
    agree("equal", rates_of(schedulers.NaturalExpDecay(lr, k)), natural_exp(lr, k))


@pytest.mark.parametrize(("width", "n", "factor"), [(512, 100, 1.0), (256, 40, 2.0), (64, 150, 0.5)])
def test_noam(width: int, n: int, factor: float) -> None:
    """width^(-1/2) · min(t^(-1/2), t · n^(-3/2)): a warm-up to 1/sqrt(n), then 1/sqrt(t)."""
    ours = factor * width**-0.5 * inverse_power(1, 1, 0.5).shift(n - 1).warmup(n)
    agree("one rounding", rates_of(schedulers.NoamDecay(width, n, factor)), ours)


@pytest.mark.parametrize(("lr", "factor"), [(0.1, 0.9), (0.5, 0.99), (1.0, 0.5)])
def test_exponential(lr: float, factor: float) -> None:
    agree("equal", rates_of(schedulers.ExponentialDecay(lr, factor)), exponential(lr, factor))
    agree("equal", rates_of(schedulers.StepDecay(lr, 30, factor)), exponential(lr, factor, 30, stair=True))


@pytest.mark.parametrize(("lr", "at", "factor"), [(0.5, [15, 30], 0.5), (0.1, [100, 200, 300], 0.1)])
def test_drops(lr: float, at: list[int], factor: float) -> None:
    """Paddle multiplies by a power of the factor, PyTorch and samestep by the factor, again and again."""
    theirs = rates_of(schedulers.MultiStepDecay(lr, at, factor))
    agree("one rounding", theirs, drops(lr, at, factor))
    values = [lr * factor**k for k in range(len(at) + 1)]
    agree("equal", theirs, piecewise(at, values))
    agree("equal", rates_of(schedulers.PiecewiseDecay(at, values)), piecewise(at, values))


COSINES = [(0.1, 400, 0.0), (0.3, 350, 0.01), (1.0, 301, 1e-3)]


@pytest.mark.parametrize(("lr", "T", "end"), COSINES)
def test_cosine(lr: float, T: int, end: float) -> None:
    agree("recursion", rates_of(schedulers.CosineAnnealingDecay(lr, T, end), T + 1), cosine(lr, T, end))


# Traps


def test_trap_cosine_rises_again_past_its_end() -> None:
    theirs = rates_of(schedulers.CosineAnnealingDecay(0.3, 100, 0.01), 201)
    assert theirs[100] == pytest.approx(0.01)
    assert theirs[200] == pytest.approx(0.3)
    assert rates_of(scheduler(cosine(0.3, 100, end=0.01)), 201)[200] == 0.01
