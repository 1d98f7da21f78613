"""The schedules there are, each declared once, by the formula of its rate at time t/d.

A schedule is computed in float64 and defined for every t >= 0: past its end it holds its last rate. What all of them can
do (warm-up, restarts, epochs, sums), and how a declaration is read, is in algebra.py.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Annotated, Any

from numpy.typing import NDArray

from samestep.checks import AboveZero, Count, Flag, Rate, Share, boundaries, numbers, one_of
from samestep.errors import Invalid
from samestep.schedules.algebra import OPS, CountOrNone, formula, ordered
from samestep.schedules.powers import power, product

__all__ = [
    "constant", "cosine", "drops", "exponential", "geometric", "inverse_power", "natural_exp", "one_cycle", "piecewise",
    "poly", "table", "triangle",
]  # fmt: skip


Per = Annotated[str, one_of("cycle", "step")]
Anneal = Annotated[str, one_of("cos", "linear")]
Boundaries = Annotated[Sequence[int] | NDArray[Any], boundaries]
RateList = Annotated[Sequence[float] | NDArray[Any], numbers]


@formula(ends=lambda lr: 0)
def constant(t: int, d: int, lr: Rate) -> float:
    """The same rate always: η(t) = lr.

    >>> constant(0.1)(7)
    0.1
    """
    return lr


@formula()
def exponential(t: int, d: int, lr: Rate, rate: Rate, every: Count = 1, stair: Flag = False) -> float:
    """Multiplied by `rate` in the course of every `every` updates, or at their end: stair=True.

    η(t) = lr · rate^(t/every), with a stair lr · rate^⌊t/every⌋; `geometric` is the same as a recurrence.

    >>> exponential(1, 0.25, every=2).values(5).tolist()
    [1.0, 0.5, 0.25, 0.125, 0.0625]
    """
    d *= every
    return lr * power(rate, t // d if stair else t / d)


@formula()
def natural_exp(t: int, d: int, lr: Rate, k: Rate) -> float:
    """Exponential decay: η(t) = lr · e^(−k·t).

    >>> natural_exp(1, 0.1)(10)
    0.36787944117144233
    """
    return lr * math.exp(-k * t / d)


@formula()
def inverse_power(t: int, d: int, lr: Rate, beta: Rate = 1.0, alpha: Rate = 0.5) -> float:
    """Polynomial decay: η(t) = lr · (β·t + 1)^(−α); α = ½ suits convex objectives.

    >>> inverse_power(0.1).values(4).tolist()
    [0.1, 0.07071067811865477, 0.057735026918962574, 0.05]
    """
    base = beta * t / d + 1
    return lr / base if alpha == 1 else lr * power(base, -alpha)  # a quotient is rounded once


@formula(ends=lambda lr, T, *_: T)
def poly(t: int, d: int, lr: Rate, T: Count, end: Rate = 0.0, power: AboveZero = 1.0) -> float:
    """From lr to `end` in T updates: η(t) = end + (lr − end)·(1 − t/T)^power. A line by default.

    >>> poly(1, 4).values(6).tolist()
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    d *= T
    return end + (lr - end) * float((1 - min(t, d) / d) ** power)


@formula(ends=lambda lr, T, end: T)
def cosine(t: int, d: int, lr: Rate, T: Count, end: Rate = 0.0) -> float:
    """From lr to `end` in T updates along half a cosine: η(t) = end + (lr − end)·(1 + cos(π·t/T))/2.

    Loshchilov & Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, 2017.

    >>> cosine(0.3, 20, end=0.01)(10)
    0.155
    >>> cosine(0.3, 20, end=0.01).warmup(5).in_epochs()
    cosine(0.3, 20, end=0.01).warmup(5).in_epochs()
    """
    d *= T
    return end + (lr - end) * (1 + math.cos(math.pi * min(t, d) / d)) / 2


@formula(ordered("floor", "lr"))
def geometric(t: int, d: int, lr: Rate, factor: Rate, floor: Rate = 0.0) -> float:
    """Multiplied by `factor` after every update, down to `floor`: η(0) = lr, η(t+1) = max(floor, η(t)·factor).

    Computed as this recurrence, rounding by rounding; lr·factor^t in one go is up to 67 units in the last place away.

    >>> geometric(2, 0.9, floor=1.5).values(5).tolist()
    [2.0, 1.8, 1.62, 1.5, 1.5]
    """
    # The floor at the end is the floor after every step: once a product is below it, all further ones are.
    steps, rest = divmod(t, d)
    rate = product(lr, factor, steps, floor)
    return max(rate * power(factor, rest / d) if rest else rate, floor)


def _one_more(op: str, given: dict[str, Any]) -> None:
    rates, bounds = len(given["values"]), len(given["at"])
    if rates != bounds + 1:
        raise Invalid(f"{op}: values must have one more than at, got {rates} values for {bounds} boundaries")


@formula(_one_more, ends=lambda at, values: max(at, default=0))
def piecewise(t: int, d: int, at: Boundaries, values: RateList) -> float:
    """Constant between boundaries: η(t) = values[number of boundaries ≤ t]; there is one value more than boundaries.

    >>> piecewise([2, 4], [0.3, 0.2, 0.1]).values(6).tolist()
    [0.3, 0.3, 0.2, 0.2, 0.1, 0.1]
    """
    return values[bisect_right(at, t // d)]


@formula(ends=lambda lr, at, factor: max(at, default=0))
def drops(t: int, d: int, lr: Rate, at: Boundaries, factor: Rate) -> float:
    """Multiplied by `factor` at each boundary: η(t) = lr·factor·…·factor, once for every boundary ≤ t.

    >>> drops(0.5, [15, 30], 0.5)([14, 15, 29, 30]).tolist()
    [0.5, 0.25, 0.25, 0.125]
    """
    for _ in range(bisect_right(at, t // d)):
        lr *= factor
    return lr


def _down_like_up(op: str, given: dict[str, Any]) -> None:
    given["down"] = given["down"] or given["up"]


@formula(_down_like_up, ordered("low", "high"))
def triangle(
    t: int, d: int, low: Rate, high: Rate, up: Count, down: CountOrNone = None, decay: Rate = 1.0, per: Per = "cycle"
) -> float:
    """From low to high in `up` updates and back in `down` (as many), over and over; the height may decay.

    η(t) = low + (high − low)·h·decay^c; h rises from 0 to 1 and falls back, c counts cycles (per="step": c = t).
    Smith, Cyclical Learning Rates for Training Neural Networks, 2017; its triangular2 has decay=0.5.

    >>> triangle(0, 1, 2, decay=0.5).values(8).tolist()
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.25, 0.5, 0.25]
    """
    total = up + (down or up)
    turns, ratio = t / (d * total), up / total
    cycle = math.floor(1 + turns)
    x = 1 + turns - cycle
    height = x / ratio if x <= ratio else (x - 1) / (ratio - 1)
    return low + (high - low) * height * power(decay, cycle - 1 if per == "cycle" else t / d)


@formula(ends=lambda peak, T, *_: T - 1)
def one_cycle(
    t: int, d: int, peak: Rate, T: Count, up: Share = 0.3, div: AboveZero = 25.0, final_div: AboveZero = 1e4,
    anneal: Anneal = "cos",
) -> float:  # fmt: skip
    """Up from peak/div to the peak in the first part `up` of T updates, then down to peak/div/final_div at t = T − 1.

    Along half a cosine each way, or a line: anneal="linear".
    Smith & Topin, Super-Convergence: Very Fast Training of Neural Networks Using Large Learning Rates, 2018.

    >>> one_cycle(1, 10, up=0.5, div=4, final_div=4, anneal="linear")([0, 2, 4, 9, 10]).tolist()
    [0.25, 0.625, 1.0, 0.0625, 0.0625]
    """
    now, top, last = min(t / d, T - 1), up * T - 1, T - 1
    first = peak / div
    if now <= top:
        a, b, x = first, peak, now / top if top else 1.0
    else:
        a, b, x = peak, first / final_div, (now - top) / (last - top)
    return (b - a) * x + a if anneal == "linear" else b + (a - b) / 2 * (math.cos(math.pi * x) + 1)


def _not_empty(op: str, given: dict[str, Any]) -> None:
    if not given["values"]:
        raise Invalid(f"{op}: values must have at least one rate, got values=[]")


@formula(_not_empty, ends=lambda values: len(values) - 1)
def table(t: int, d: int, values: RateList) -> float:
    """The rates one by one: η(t) = values[t], and the last one ever after.

    >>> table([0.3, 0.1])([0, 1, 2]).tolist()
    [0.3, 0.1, 0.1]
    """
    return values[min(t // d, len(values) - 1)]


SCHEDULES = {name: OPS[name] for name in __all__}
