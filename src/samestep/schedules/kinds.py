"""The learning rate as a pure function of t, the number of updates already made: the first update uses s(0).

A schedule is a frozen value, computed in float64 and defined for every t >= 0: past its end it holds its last rate.
Calling, plotting or storing one never changes it. What they all can do (warm-up, restarts, epochs, sums) is in algebra.py.
"""

from __future__ import annotations

import inspect
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from samestep.checks import above_zero, at_most, boundaries, choice, flag, nearest, number, numbers, show, whole
from samestep.errors import Invalid, WrongType
from samestep.schedules.algebra import OPS, VERSION, Schedule
from samestep.schedules.powers import power, product

DEEPEST = 100  # schedules within schedules that from_json reads
PARTS = ("of", "other", "a", "b")  # names of arguments that are schedules


@dataclass(frozen=True, repr=False)
class Constant(Schedule):
    op = "constant"
    lr: float

    def _at(self, n: int, d: int) -> float:
        return self.lr


def constant(lr: float) -> Schedule:
    """The same rate always: η(t) = lr.

    >>> constant(0.1)(7)
    0.1
    """
    return Constant(number("constant", "lr", lr))


@dataclass(frozen=True, repr=False)
class Exponential(Schedule):
    op = "exponential"
    lr: float
    rate: float
    every_: int
    stair: bool

    def _at(self, n: int, d: int) -> float:
        d *= self.every_
        return self.lr * power(self.rate, n // d if self.stair else n / d)


def exponential(lr: float, rate: float, every: int = 1, stair: bool = False) -> Schedule:
    """Multiplied by `rate` in the course of every `every` updates, or at their end: stair=True.

    η(t) = lr · rate^(t/every), with a stair lr · rate^⌊t/every⌋; `geometric` is the same as a recurrence.

    >>> exponential(1, 0.25, every=2).values(5).tolist()
    [1.0, 0.5, 0.25, 0.125, 0.0625]
    """
    lr, rate = number("exponential", "lr", lr), number("exponential", "rate", rate)
    every = whole("exponential", "every", every, 1)
    return Exponential(lr, rate, every, flag("exponential", "stair", stair))


@dataclass(frozen=True, repr=False)
class NaturalExp(Schedule):
    op = "natural_exp"
    lr: float
    k: float

    def _at(self, n: int, d: int) -> float:
        return self.lr * math.exp(-self.k * n / d)


def natural_exp(lr: float, k: float) -> Schedule:
    """Exponential decay: η(t) = lr · e^(−k·t).

    >>> natural_exp(1, 0.1)(10)
    0.36787944117144233
    """
    return NaturalExp(number("natural_exp", "lr", lr), number("natural_exp", "k", k))


@dataclass(frozen=True, repr=False)
class InversePower(Schedule):
    op = "inverse_power"
    lr: float
    beta: float
    alpha: float

    def _at(self, n: int, d: int) -> float:
        base = self.beta * n / d + 1
        return self.lr / base if self.alpha == 1 else self.lr * power(base, -self.alpha)  # a quotient is rounded once


def inverse_power(lr: float, beta: float = 1.0, alpha: float = 0.5) -> Schedule:
    """Polynomial decay: η(t) = lr · (β·t + 1)^(−α); α = ½ suits convex objectives.

    >>> inverse_power(0.1).values(4).tolist()
    [0.1, 0.07071067811865477, 0.057735026918962574, 0.05]
    """
    lr, beta = number("inverse_power", "lr", lr), number("inverse_power", "beta", beta)
    return InversePower(lr, beta, number("inverse_power", "alpha", alpha))


@dataclass(frozen=True, repr=False)
class Poly(Schedule):
    op = "poly"
    lr: float
    T: int
    end: float
    power: float

    def _at(self, n: int, d: int) -> float:
        d *= self.T
        return self.end + (self.lr - self.end) * power(1 - min(n, d) / d, self.power)


def poly(lr: float, T: int, end: float = 0.0, power: float = 1.0) -> Schedule:
    """From lr to `end` in T updates: η(t) = end + (lr − end)·(1 − t/T)^power. A line by default.

    >>> poly(1, 4).values(6).tolist()
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    lr, T, end = number("poly", "lr", lr), whole("poly", "T", T, 1), number("poly", "end", end)
    return Poly(lr, T, end, above_zero("poly", "power", power))


@dataclass(frozen=True, repr=False)
class Cosine(Schedule):
    op = "cosine"
    lr: float
    T: int
    end: float

    def _at(self, n: int, d: int) -> float:
        d *= self.T
        return self.end + (self.lr - self.end) * (1 + math.cos(math.pi * min(n, d) / d)) / 2


def cosine(lr: float, T: int, end: float = 0.0) -> Schedule:
    """From lr to `end` in T updates along half a cosine: η(t) = end + (lr − end)·(1 + cos(π·t/T))/2.

    Loshchilov & Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, 2017.

    >>> cosine(0.3, 20, end=0.01)(10)
    0.155
    >>> cosine(0.3, 20, end=0.01).warmup(5).in_epochs()
    cosine(0.3, 20, end=0.01).warmup(5).in_epochs()
    """
    return Cosine(number("cosine", "lr", lr), whole("cosine", "T", T, 1), number("cosine", "end", end))


@dataclass(frozen=True, repr=False)
class Geometric(Schedule):
    op = "geometric"
    lr: float
    factor: float
    floor_: float

    def _at(self, n: int, d: int) -> float:
        # The floor at the end is the floor after every step: once a product is below it, all further ones are.
        t, rest = divmod(n, d)
        rate = product(self.lr, self.factor, t, self.floor_)
        return max(rate * power(self.factor, rest / d) if rest else rate, self.floor_)


def geometric(lr: float, factor: float, floor: float = 0.0) -> Schedule:
    """Multiplied by `factor` after every update, down to `floor`: η(0) = lr, η(t+1) = max(floor, η(t)·factor).

    Computed as this recurrence, rounding by rounding; lr·factor^t in one go is up to 67 units in the last place away.

    >>> geometric(2, 0.9, floor=1.5).values(5).tolist()
    [2.0, 1.8, 1.62, 1.5, 1.5]
    """
    lr, factor = number("geometric", "lr", lr), number("geometric", "factor", factor)
    floor = number("geometric", "floor", floor)
    at_most("geometric", "floor", floor, "lr", lr)
    return Geometric(lr, factor, floor)


@dataclass(frozen=True, repr=False)
class Piecewise(Schedule):
    op = "piecewise"
    at: tuple[int, ...]
    values_: tuple[float, ...]

    def _at(self, n: int, d: int) -> float:
        return self.values_[bisect_right(self.at, n // d)]


def piecewise(at: Sequence[int] | NDArray[Any], values: Sequence[float] | NDArray[Any]) -> Schedule:
    """Constant between boundaries: η(t) = values[number of boundaries ≤ t]; there is one value more than boundaries.

    >>> piecewise([2, 4], [0.3, 0.2, 0.1]).values(6).tolist()
    [0.3, 0.3, 0.2, 0.2, 0.1, 0.1]
    """
    at, values = boundaries("piecewise", "at", at), numbers("piecewise", "values", values)
    if len(values) != len(at) + 1:
        raise Invalid(
            f"piecewise: values must have one more than at, got {len(values)} values for {len(at)} boundaries"
        )
    return Piecewise(at, values)


@dataclass(frozen=True, repr=False)
class Drops(Schedule):
    op = "drops"
    lr: float
    at: tuple[int, ...]
    factor: float

    def _at(self, n: int, d: int) -> float:
        rate = self.lr
        for _ in range(bisect_right(self.at, n // d)):
            rate *= self.factor
        return rate


def drops(lr: float, at: Sequence[int] | NDArray[Any], factor: float) -> Schedule:
    """Multiplied by `factor` at each boundary: η(t) = lr·factor·…·factor, once for every boundary ≤ t.

    >>> drops(0.5, [15, 30], 0.5)([14, 15, 29, 30]).tolist()
    [0.5, 0.25, 0.25, 0.125]
    """
    return Drops(number("drops", "lr", lr), boundaries("drops", "at", at), number("drops", "factor", factor))


@dataclass(frozen=True, repr=False)
class Triangle(Schedule):
    op = "triangle"
    low: float
    high: float
    up: int
    down: int
    decay: float
    per: str

    def _at(self, n: int, d: int) -> float:
        total = self.up + self.down
        turns, ratio = n / (d * total), self.up / total
        cycle = math.floor(1 + turns)
        x = 1 + turns - cycle
        height = x / ratio if x <= ratio else (x - 1) / (ratio - 1)
        return self.low + (self.high - self.low) * height * power(
            self.decay, cycle - 1 if self.per == "cycle" else n / d
        )


def triangle(
    low: float, high: float, up: int, down: int | None = None, decay: float = 1.0, per: str = "cycle"
) -> Schedule:
    """From low to high in `up` updates and back in `down` (as many), over and over; the height may decay.

    η(t) = low + (high − low)·h·decay^c; h rises from 0 to 1 and falls back, c counts cycles (per="step": c = t).
    Smith, Cyclical Learning Rates for Training Neural Networks, 2017; its triangular2 has decay=0.5.

    >>> triangle(0, 1, 2, decay=0.5).values(8).tolist()
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.25, 0.5, 0.25]
    """
    low, high = number("triangle", "low", low), number("triangle", "high", high)
    at_most("triangle", "low", low, "high", high)
    up = whole("triangle", "up", up, 1)
    down = up if down is None else whole("triangle", "down", down, 1)
    decay, per = number("triangle", "decay", decay), choice("triangle", "per", per, ("cycle", "step"))
    return Triangle(low, high, up, down, decay, per)


@dataclass(frozen=True, repr=False)
class OneCycle(Schedule):
    op = "one_cycle"
    peak: float
    T: int
    up: float
    div: float
    final_div: float
    anneal: str

    def _at(self, n: int, d: int) -> float:
        t, top, last = min(n / d, self.T - 1), self.up * self.T - 1, self.T - 1
        first = self.peak / self.div
        if t <= top:
            a, b, x = first, self.peak, t / top if top else 1.0
        else:
            a, b, x = self.peak, first / self.final_div, (t - top) / (last - top)
        return (b - a) * x + a if self.anneal == "linear" else b + (a - b) / 2 * (math.cos(math.pi * x) + 1)


def one_cycle(
    peak: float, T: int, up: float = 0.3, div: float = 25.0, final_div: float = 1e4, anneal: str = "cos"
) -> Schedule:
    """Up from peak/div to the peak in the first part `up` of T updates, then down to peak/div/final_div at t = T − 1.

    Along half a cosine each way, or a line: anneal="linear".
    Smith & Topin, Super-Convergence: Very Fast Training of Neural Networks Using Large Learning Rates, 2018.

    >>> one_cycle(1, 10, up=0.5, div=4, final_div=4, anneal="linear")([0, 2, 4, 9, 10]).tolist()
    [0.25, 0.625, 1.0, 0.0625, 0.0625]
    """
    peak, T, up = number("one_cycle", "peak", peak), whole("one_cycle", "T", T, 1), number("one_cycle", "up", up)
    if up > 1:
        raise Invalid(f"one_cycle: up must be at most 1, got up={up}")
    div, final_div = above_zero("one_cycle", "div", div), above_zero("one_cycle", "final_div", final_div)
    return OneCycle(peak, T, up, div, final_div, choice("one_cycle", "anneal", anneal, ("cos", "linear")))


@dataclass(frozen=True, repr=False)
class Table(Schedule):
    op = "table"
    values_: tuple[float, ...]

    def _at(self, n: int, d: int) -> float:
        return self.values_[min(n // d, len(self.values_) - 1)]


def table(values: Sequence[float] | NDArray[Any]) -> Schedule:
    """The rates one by one: η(t) = values[t], and the last one ever after.

    >>> table([0.3, 0.1])([0, 1, 2]).tolist()
    [0.3, 0.1, 0.1]
    """
    values = numbers("table", "values", values)
    if not values:
        raise Invalid("table: values must have at least one rate, got values=[]")
    return Table(values)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    function.__name__: function
    for function in (
        constant, exponential, natural_exp, inverse_power, poly, cosine, geometric, piecewise, drops, triangle, one_cycle,
        table,
    )
}  # fmt: skip
OPS.update(SCHEDULES)


def from_json(stored: dict[str, Any]) -> Schedule:
    """The schedule that `to_json` stored.

    >>> from_json({"op": "warmup", "version": 1, "of": {"op": "constant", "version": 1, "lr": 0.1}, "n": 5})
    constant(0.1).warmup(5)
    """
    return _from_json(stored, DEEPEST)


def _from_json(stored: Any, depth: int) -> Schedule:
    if not isinstance(stored, dict):
        raise WrongType(f"from_json: a schedule must be an object with op and version, got {show(stored)}")
    if depth == 0:
        raise Invalid(f"from_json: schedules must be nested at most {DEEPEST} deep")
    op, version = stored.get("op"), stored.get("version")
    if not isinstance(op, str) or op not in OPS:
        raise Invalid(f"from_json: there is no op {show(op)}; {nearest(op, OPS)}")
    if version != VERSION:
        raise Invalid(f"from_json: {op}: version must be {VERSION}, got version={show(version)}")
    parameters = {"of" if name == "self" else name: p for name, p in inspect.signature(OPS[op]).parameters.items()}
    arguments = {}
    for name, value in stored.items():
        if name in parameters:
            arguments[parameters[name].name] = _from_json(value, depth - 1) if name in PARTS else value
        elif name not in ("op", "version"):
            raise Invalid(f"from_json: {op} has {', '.join(parameters)}, got {show(name)}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in stored:
            raise Invalid(f"from_json: {op} needs {name}, got {', '.join(map(show, stored))}")
    return OPS[op](**arguments)
