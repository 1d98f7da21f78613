"""The chapters' schedules, run as they stand there, quirks and all, against samestep's: equal to the bit at every t.

Each function of CHAPTERS yields what the chapter's own code gives at t = 0, 1, 2, ..., called once for each, in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
import torch

from samestep.schedules.algebra import Schedule
from samestep.schedules.kinds import constant, cosine, drops, geometric, inverse_power, natural_exp

STEPS = 1000

# Chapter 002: functions without arguments; two of them move a global counter, which starts at 1, before they use it.

t = 1


def constant_lr() -> float:
    return 1


def exponential_lr() -> float:
    global t
    t += 1
    return math.exp(-0.1 * t)


def polynomial_lr() -> float:
    global t
    t += 1
    return float((1 + 0.1 * t) ** (-0.5))


def counted(function: Callable[[], float]) -> Iterator[float]:
    global t
    t = 1
    while True:
        yield function()


# Chapter 003: objects that are called with t; some change when they are.


class SquareRootScheduler:
    def __init__(self, lr: float = 0.1) -> None:
        self.lr = lr

    def __call__(self, num_update: int) -> float:
        return float(self.lr * pow(num_update + 1.0, -0.5))


class FactorScheduler:
    def __init__(self, factor: float = 1, stop_factor_lr: float = 1e-7, base_lr: float = 0.1) -> None:
        self.factor, self.stop_factor_lr, self.base_lr = factor, stop_factor_lr, base_lr

    def __call__(self, num_update: int) -> float:
        self.base_lr = max(self.stop_factor_lr, self.base_lr * self.factor)
        return self.base_lr


class MultiFactorScheduler:
    def __init__(self, step: list[int], factor: float, base_lr: float) -> None:
        self.step, self.factor, self.base_lr = step, factor, base_lr

    def __call__(self, epoch: int) -> float:
        if epoch in self.step:
            self.base_lr = self.base_lr * self.factor
        return self.base_lr


class CosineScheduler:
    base_lr: float  # not there before the first call

    def __init__(
        self,
        max_update: int,
        base_lr: float = 0.01,
        final_lr: float = 0,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
    ) -> None:
        self.base_lr_orig, self.max_update, self.final_lr = base_lr, max_update, final_lr
        self.warmup_steps, self.warmup_begin_lr = warmup_steps, warmup_begin_lr
        self.max_steps = self.max_update - self.warmup_steps

    def get_warmup_lr(self, epoch: int) -> float:
        increase = (self.base_lr_orig - self.warmup_begin_lr) * float(epoch) / float(self.warmup_steps)
        return self.warmup_begin_lr + increase

    def __call__(self, epoch: int) -> float:
        if epoch < self.warmup_steps:
            return self.get_warmup_lr(epoch)
        if epoch <= self.max_update:
            angle = math.pi * (epoch - self.warmup_steps) / self.max_steps
            self.base_lr = self.final_lr + (self.base_lr_orig - self.final_lr) * (1 + math.cos(angle)) / 2
        return self.base_lr


def multi_step_lr() -> Iterator[float]:
    """The PyTorch tab: the framework's own scheduler, read before it is moved on."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[15, 30], gamma=0.5)
    while True:
        yield float(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()


def mxnet_multi_factor() -> Iterator[float]:
    """The MXNet tab: it drops when the count of updates, which starts at 1 in training, has gone past a boundary."""
    base_lr, ahead = 0.5, [15, 30]
    for num_update in count(1):
        while ahead and num_update > ahead[0]:
            base_lr *= 0.5
            del ahead[0]
        yield base_lr


CHAPTERS: list[Any] = [
    pytest.param(lambda: counted(constant_lr), constant(1), id="002-constant"),
    pytest.param(lambda: counted(exponential_lr), natural_exp(1, 0.1).shift(2), id="002-exponential"),
    pytest.param(lambda: counted(polynomial_lr), inverse_power(1, 0.1, 0.5).shift(2), id="002-polynomial"),
    pytest.param(lambda: map(SquareRootScheduler(0.1), count()), inverse_power(0.1, 1, 0.5), id="003-square-root"),
    pytest.param(
        lambda: map(FactorScheduler(0.9, 1e-2, 2.0), count()), geometric(2, 0.9, floor=1e-2).shift(1), id="003-factor"
    ),
    pytest.param(
        lambda: map(MultiFactorScheduler([15, 30], 0.5, 0.5), count()), drops(0.5, [15, 30], 0.5), id="003-multi-factor"
    ),
    pytest.param(multi_step_lr, drops(0.5, [15, 30], 0.5), id="003-multi-factor-torch"),
    pytest.param(mxnet_multi_factor, drops(0.5, [15, 30], 0.5), id="003-multi-factor-mxnet"),
    pytest.param(
        lambda: map(CosineScheduler(20, base_lr=0.3, final_lr=0.01), count()),
        cosine(0.3, 20, end=0.01),
        id="003-cosine",
    ),
    pytest.param(
        lambda: map(CosineScheduler(20, warmup_steps=5, base_lr=0.3, final_lr=0.01), count()),
        cosine(0.3, 15, end=0.01).warmup(5),
        id="003-cosine-warm-up",
    ),
]


@pytest.mark.parametrize(("chapter", "schedule"), CHAPTERS)
def test_equal_to_the_bit_at_every_t(chapter: Callable[[], Iterator[float]], schedule: Schedule) -> None:
    theirs = list(islice(chapter(), STEPS))
    assert [schedule(t) for t in range(STEPS)] == theirs
    assert schedule.values(STEPS).tobytes() == np.array(theirs, np.float64).tobytes()


def test_002_multiplies_its_schedules_by_eta() -> None:
    """The step of the chapter uses eta * lr(), with eta = 0.1."""
    theirs = [0.1 * rate for rate in islice(counted(exponential_lr), STEPS)]
    assert (0.1 * natural_exp(1, 0.1).shift(2)).values(STEPS).tolist() == theirs


def test_003_warm_up_from_another_rate() -> None:
    chapter = CosineScheduler(20, warmup_steps=5, base_lr=0.3, final_lr=0.01, warmup_begin_lr=0.1)
    assert cosine(0.3, 15, end=0.01).warmup(5, start=0.1).values(200).tolist() == [chapter(t) for t in range(200)]


# What samestep leaves behind: the chapters' objects are not functions of t.


def test_quirk_002_the_counter_goes_on_where_the_last_plot_stopped() -> None:
    rates = counted(exponential_lr)
    assert next(rates) == math.exp(-0.2)  # not exp(-0.1), nor exp(0)
    assert next(rates) != math.exp(-0.2)
    schedule = natural_exp(1, 0.1).shift(2)
    assert schedule(0) == schedule(0) == math.exp(-0.2)


def test_quirk_003_calling_the_factor_scheduler_changes_it() -> None:
    chapter, schedule = FactorScheduler(0.9, 1e-2, 2.0), geometric(2, 0.9, floor=1e-2).shift(1)
    assert chapter(0) != chapter(0)
    assert schedule(0) == schedule(0) == 1.8


def test_quirk_003_the_multi_factor_scheduler_forgets_what_it_has_not_seen() -> None:
    assert MultiFactorScheduler([15, 30], 0.5, 0.5)(40) == 0.5
    assert drops(0.5, [15, 30], 0.5)(40) == 0.125


def test_quirk_003_cosine_fails_when_first_called_past_its_end() -> None:
    with pytest.raises(AttributeError):
        CosineScheduler(20, base_lr=0.3, final_lr=0.01)(21)
    assert cosine(0.3, 20, end=0.01)(21) == cosine(0.3, 20, end=0.01)(20) == 0.01


def test_bite_the_closed_form_is_not_the_factor_scheduler() -> None:
    theirs = list(islice(map(FactorScheduler(0.9, 1e-2, 2.0), count()), STEPS))
    assert [max(1e-2, 2 * 0.9 ** (t + 1)) for t in range(STEPS)] != theirs
