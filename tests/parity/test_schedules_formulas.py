"""Schedules against those of transformers and timm, written here from their published formulas: no package is needed.

transformers: docs "Optimization", get_linear_schedule_with_warmup, get_cosine_schedule_with_warmup, get_wsd_schedule.
timm: CosineLRScheduler, MultiStepLRScheduler.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable

import pytest

from parity.tolerances import STEPS, agree
from samestep.schedules.kinds import constant, cosine, drops, piecewise, poly


def rates_of(rate: Callable[[int], float], n: int = STEPS) -> list[float]:
    return [rate(t) for t in range(n)]


# transformers: a factor of the rate, from 0 to 1


def hf_linear(t: int, n: int, T: int) -> float:
    """Up to 1 at t = n, down to 0 at t = T."""
    return t / n if t < n else max(0.0, (T - t) / (T - n))


def hf_cosine(t: int, n: int, T: int, cycles: float = 0.5) -> float:
    """Up to 1 at t = n, then so many waves of a cosine until t = T."""
    if t < n:
        return t / n
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * ((t - n) / (T - n)))))


def hf_wsd(t: int, n: int, stable: int, decay: int, ratio: float) -> float:
    """Up from the ratio to 1 in n steps, there for a while, down to the ratio along half a cosine."""
    if t < n:
        return t / n * (1.0 - ratio) + ratio
    if t < n + stable:
        return 1.0
    if t < n + stable + decay:
        progress = (t - n - stable) / decay
        return 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * progress)) * (1.0 - ratio) + ratio
    return ratio


TRAININGS = [(0.1, 20, 300), (3e-4, 100, 390), (1.0, 7, 333), (0.3, 33, 399)]


@pytest.mark.parametrize(("lr", "n", "T"), TRAININGS)
def test_transformers_linear(lr: float, n: int, T: int) -> None:
    agree("two roundings", rates_of(lambda t: lr * hf_linear(t, n, T)), poly(lr, T - n).warmup(n))


@pytest.mark.parametrize(("lr", "n", "T"), TRAININGS)
def test_transformers_cosine(lr: float, n: int, T: int) -> None:
    agree("two roundings", rates_of(lambda t: lr * hf_cosine(t, n, T), T + 1), cosine(lr, T - n).warmup(n))


@pytest.mark.parametrize(
    ("lr", "n", "stable", "decay", "ratio"),
    [(0.1, 20, 200, 100, 0.0), (3e-4, 50, 150, 150, 0.1), (1.0, 7, 293, 50, 0.01), (0.3, 33, 200, 99, 0.2)],
)
def test_transformers_wsd(lr: float, n: int, stable: int, decay: int, ratio: float) -> None:
    ours = constant(lr).then(cosine(lr, decay, lr * ratio), stable).warmup(n, lr * ratio)
    agree("two roundings", rates_of(lambda t: lr * hf_wsd(t, n, stable, decay, ratio)), ours)


def test_trap_the_cosine_of_transformers_rises_again_past_its_end() -> None:
    assert hf_cosine(100, 0, 100) == 0
    assert hf_cosine(200, 0, 100) == 1
    assert cosine(1, 100)(200) == 0


# timm: lr_min + (lr - lr_min)/2 · (1 + cos(π·t/T)), then lr_min


def timm_cosine(t: int, lr: float, T: int, low: float, k: float = 1.0) -> float:
    return low + 0.5 * (lr - low) * (1 + math.cos(math.pi * t**k / T**k)) if t < T else low


@pytest.mark.parametrize(("lr", "T", "low"), [(0.1, 300, 0.0), (0.3, 333, 1e-5), (1.0, 250, 0.01), (5e-4, 300, 1e-6)])
def test_timm_cosine(lr: float, T: int, low: float) -> None:
    agree("equal", rates_of(lambda t: timm_cosine(t, lr, T, low)), cosine(lr, T, low))


@pytest.mark.parametrize(("lr", "T", "low"), [(0.1, 300, 0.0), (0.3, 333, 1e-5), (1.0, 250, 0.01)])
def test_timm_cosine_with_warm_up(lr: float, T: int, low: float) -> None:
    """With warmup_prefix; timm multiplies t by (lr - start)/n, rounded, where samestep divides last."""
    n, start = 20, 1e-6

    def theirs(t: int) -> float:
        return start + t * ((lr - start) / n) if t < n else timm_cosine(t - n, lr, T, low)

    agree("two roundings", rates_of(theirs), cosine(lr, T, low).warmup(n, start))


MULTI_STEPS = [(0.1, [100, 200, 300], 0.1), (0.3, [50, 60, 70, 350], 0.33), (1.0, [1, 2, 300], 0.5)]


@pytest.mark.parametrize(("lr", "at", "factor"), MULTI_STEPS)
def test_timm_multi_step(lr: float, at: list[int], factor: float) -> None:
    """timm counts the boundaries up to t + 1, so it drops a step before everybody else, at b - 1."""
    theirs = rates_of(lambda t: lr * factor ** bisect_right(at, t + 1))
    early = [boundary - 1 for boundary in at]
    agree("equal", theirs, piecewise(early, [lr * factor**k for k in range(len(at) + 1)]))
    # timm multiplies by a power of the factor, PyTorch and samestep by the factor, again and again.
    agree("equal" if factor == 0.5 else "one rounding", theirs, drops(lr, early, factor))
