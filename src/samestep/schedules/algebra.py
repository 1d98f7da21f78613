"""What every schedule can do: be called, shown, stored and combined. The schedules themselves are in schedules.py.

Time is kept as an exact fraction n/d of two integers. At a whole t it is t/1; inside a stretched clock (a restart with
longer and longer periods, an epoch of many steps) d grows instead of t being rounded. So the ends of periods are exact
at any t, and `cosine(lr, 20)` stretched over epochs of 100 steps has the very bits of `cosine(lr, 2000)`.

Every rate is computed by Python's own float arithmetic, one t after the other: an array of t gives the bits that its
elements give, on every processor.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, overload

import numpy as np
from numpy.typing import NDArray

from samestep.checks import at_most, choice, flag, number, show, whole
from samestep.errors import Invalid, WrongType
from samestep.schedules.exports import Exports
from samestep.schedules.powers import power

VERSION = 1  # of the JSON form
LIMIT = 2**63  # t must be below: what an int64 holds
OPS: dict[str, Callable[..., Schedule]] = {}  # how each operation is made; schedules.py adds its own


@dataclass(frozen=True, repr=False)
class Schedule(Exports, ABC):
    """The learning rate as a pure function of t, the number of updates already made: the first update uses s(0).

    Call it with a whole number for a float, with an array of them for an array of float64. Schedules are values: frozen,
    hashable, equal when they are built alike; `repr` evaluates back.

    >>> from samestep.schedules.kinds import poly
    >>> s = poly(1.0, 4)
    >>> s(1), s.shift(1)(1), s.hold(1)(3), s.every(2)(3), s.clip(0.5, 0.6)(1), s.floor(0.5)(3), s.then(2 * s, 3)(4)
    (0.75, 0.5, 0.75, 0.75, 0.6, 0.5, 1.5)
    """

    op: ClassVar[str]
    binding: ClassVar[int] = 3  # how tightly its repr holds together: 1 a sum, 2 a product, 3 a call
    __array_ufunc__ = None  # so that np.float64(2) * s asks the schedule, not NumPy

    @abstractmethod
    def _at(self, n: int, d: int) -> float:
        """The rate at time n/d."""

    @overload
    def __call__(self, t: int | np.integer[Any]) -> float: ...
    @overload
    def __call__(self, t: NDArray[np.integer[Any]] | Sequence[int]) -> NDArray[np.float64]: ...
    def __call__(self, t: Any) -> Any:
        if isinstance(t, (int, np.integer)) and not isinstance(t, bool):
            return self._rate(int(t))
        array = np.asarray(t) if isinstance(t, (np.ndarray, list, tuple, range)) else None
        if array is None or (array.size and array.dtype.kind not in "iu"):
            raise WrongType(f"{self.op}: t must be a whole number or an array of them, got t={show(t)}")
        return np.array([self._rate(x) for x in array.ravel().tolist()], np.float64).reshape(array.shape)

    def _rate(self, t: int) -> float:
        if not 0 <= t < LIMIT:
            raise Invalid(f"{self.op}: t must be {'at least 0' if t < 0 else 'below 2**63'}, got t={show(t)}")
        try:
            rate = self._at(t, 1)
        except OverflowError:
            rate = math.inf
        if not math.isfinite(rate):
            raise Invalid(f"{self.op}: the rate at t={t} is too large for a float: use .clip(lo, hi) or .hold(at)")
        return rate

    def values(self, n: int) -> NDArray[np.float64]:
        """The rates of the first n updates: s(0), ..., s(n - 1)."""
        return self(np.arange(whole("values", "n", n)))

    def warmup(self, n: int, start: float = 0.0, mode: str = "linear") -> Schedule:
        """Go from `start` to s(0) in n updates (or stay at `start`: mode="constant"), then follow s from its beginning.

        η(t) = start + (s(0) − start)·t/n for t < n, then s(t − n).

        >>> from samestep.schedules.kinds import constant
        >>> constant(1.0).warmup(4).values(6).tolist()
        [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
        """
        _in_steps("warmup", self)
        mode = choice("warmup", "mode", mode, ("linear", "constant"))
        return Warmup(self, whole("warmup", "n", n), number("warmup", "start", start), mode)

    def then(self, other: Schedule, at: int) -> Schedule:
        """Follow s until t = at, then `other` from its beginning: η(t) = s(t) for t < at, then other(t − at)."""
        _in_steps("then", self, must_be_schedule("then", "other", other))
        return Then(self, other, whole("then", "at", at))

    def restart(self, period: int, mult: int = 1, decay: float = 1.0) -> Schedule:
        """Begin s again after each period; a period is `mult` times as long as the one before, and s stretched to fill it.

        In period k, which starts at a_k = period·(1 + mult + … + mult^(k−1)): η(t) = decay^k · s((t − a_k) / mult^k).
        Loshchilov & Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, 2017.

        >>> from samestep.schedules.kinds import poly
        >>> poly(1.0, 2).restart(2, mult=2, decay=0.5).values(8).tolist()
        [1.0, 0.5, 0.5, 0.375, 0.25, 0.125, 0.25, 0.21875]
        """
        _in_steps("restart", self)
        period, mult = whole("restart", "period", period, 1), whole("restart", "mult", mult, 1)
        return Restart(self, period, mult, number("restart", "decay", decay))

    def shift(self, k: int) -> Schedule:
        """Skip the first k rates: η(t) = s(t + k)."""
        _in_steps("shift", self)
        return Shift(self, whole("shift", "k", k))

    def hold(self, at: int) -> Schedule:
        """Stay at s(at) from t = at on: η(t) = s(min(t, at))."""
        _in_steps("hold", self)
        return Hold(self, whole("hold", "at", at))

    def every(self, n: int) -> Schedule:
        """Use each rate for n updates: η(t) = s(⌊t/n⌋)."""
        _in_steps("every", self)
        return Every(self, whole("every", "n", n, 1))

    def clip(self, lo: float, hi: float) -> Schedule:
        """Keep the rate between lo and hi: η(t) = min(max(s(t), lo), hi)."""
        lo, hi = number("clip", "lo", lo), number("clip", "hi", hi)
        at_most("clip", "lo", lo, "hi", hi)
        return Clip(self, lo, hi)

    def floor(self, lo: float) -> Schedule:
        """Keep the rate at lo or above: η(t) = max(s(t), lo)."""
        return Floor(self, number("floor", "lo", lo))

    def in_epochs(self, steps_per_epoch: int | None = None, smooth: bool = False) -> Schedule:
        """Count epochs where s counts t: s(e) holds through epoch e; smooth: s moves within the epoch as well.

        η(t) = s(⌊t / steps_per_epoch⌋), smooth: s(t / steps_per_epoch). Without steps_per_epoch, the Trainer supplies it.

        >>> from samestep.schedules.kinds import poly
        >>> poly(1.0, 4).in_epochs(2).values(6).tolist()
        [1.0, 1.0, 0.75, 0.75, 0.5, 0.5]
        """
        if self._epochs():
            raise Invalid("in_epochs: the schedule has its unit already: .in_epochs() was applied to a part of it")
        if steps_per_epoch is not None:
            steps_per_epoch = whole("in_epochs", "steps_per_epoch", steps_per_epoch, 1)
        return InEpochs(self, steps_per_epoch, flag("in_epochs", "smooth", smooth))

    def __add__(self, other: Any) -> Schedule:
        return Add(self, _same_unit("+", self, other))

    __radd__ = __add__

    def __mul__(self, other: Any) -> Schedule:
        if isinstance(other, Schedule):
            return Multiply(self, _same_unit("*", self, other))
        return Scale(self, number("*", "factor", other))

    __rmul__ = __mul__

    # The unit of time

    @property
    def unit(self) -> str:
        """What the schedule counts: "steps", or "epochs" as long as nobody said how many steps an epoch has."""
        return "epochs" if any(part.steps_per_epoch is None for part in self._epochs()) else "steps"

    def bind(self, steps_per_epoch: int) -> Schedule:
        """The schedule in steps, for epochs of so many; one that is in steps already is returned as it is."""
        whole("bind", "steps_per_epoch", steps_per_epoch, 1)
        bound = {
            field.name: value.bind(steps_per_epoch)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Schedule) and value.unit == "epochs"
        }
        return replace(self, **bound) if bound else self

    def _epochs(self) -> list[InEpochs]:
        """The parts of it that count epochs."""
        values = [getattr(self, field.name) for field in fields(self)]
        return [part for value in values if isinstance(value, Schedule) for part in value._epochs()]

    # Showing and storing

    def _arguments(self) -> list[tuple[inspect.Parameter, Any]]:
        parameters = inspect.signature(OPS[self.op]).parameters.values()
        return [(p, getattr(self, field.name)) for p, field in zip(parameters, fields(self), strict=True)]

    def __repr__(self) -> str:
        head, shown = self.op, []
        for parameter, value in self._arguments():
            text = repr(list(value) if isinstance(value, tuple) else value)
            if parameter.name == "self":
                head = f"{_held(value, 3)}.{self.op}"
            elif parameter.default is parameter.empty:
                shown.append(text)
            elif value != parameter.default:
                shown.append(f"{parameter.name}={text}")
        return f"{head}({', '.join(shown)})"

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary that `from_json` turns back into an equal schedule."""
        result: dict[str, Any] = {"op": self.op, "version": VERSION}
        for parameter, value in self._arguments():
            plain = value.to_json() if isinstance(value, Schedule) else value
            name = "of" if parameter.name == "self" else parameter.name
            result[name] = list(plain) if isinstance(plain, tuple) else plain
        return result


def must_be_schedule(where: str, name: str, value: Any) -> Schedule:
    if not isinstance(value, Schedule):
        raise WrongType(f"{where}: {name} must be a schedule, such as constant(0.1), got {name}={show(value)}")
    return value


def _in_steps(where: str, *schedules: Schedule) -> None:
    if any(schedule.unit == "epochs" for schedule in schedules):
        raise Invalid(f"{where}: counts steps, but the schedule epochs: put .{where}(...) before .in_epochs()")


def _same_unit(sign: str, mine: Schedule, other: Any) -> Schedule:
    if not isinstance(other, Schedule):
        raise WrongType(f"{sign}: both sides must be schedules, such as constant(0.1), got {show(other)}")
    if mine.unit != other.unit:
        raise Invalid(f"{sign}: one side counts steps, the other epochs: combine first, (a {sign} b).in_epochs()")
    return other


def _held(schedule: Schedule, binding: int) -> str:
    """Its repr, in parentheses where it would otherwise fall apart."""
    return repr(schedule) if schedule.binding >= binding else f"({schedule!r})"


@dataclass(frozen=True, repr=False)
class Warmup(Schedule):
    op = "warmup"
    of: Schedule
    n: int
    start: float
    mode: str

    def _at(self, n: int, d: int) -> float:
        if n >= self.n * d:
            return self.of._at(n - self.n * d, d)
        if self.mode == "constant":
            return self.start
        return self.start + (self.of._at(0, 1) - self.start) * n / (self.n * d)


@dataclass(frozen=True, repr=False)
class Then(Schedule):
    op = "then"
    of: Schedule
    other: Schedule
    at: int

    def _at(self, n: int, d: int) -> float:
        return self.of._at(n, d) if n < self.at * d else self.other._at(n - self.at * d, d)


@dataclass(frozen=True, repr=False)
class Restart(Schedule):
    op = "restart"
    of: Schedule
    period: int
    mult: int
    decay: float

    def _at(self, n: int, d: int) -> float:
        k, length = 0, self.period * d
        if self.mult == 1:
            k, n = divmod(n, length)
        while n >= length:
            k, n, d, length = k + 1, n - length, d * self.mult, length * self.mult
        return power(self.decay, k) * self.of._at(n, d)


@dataclass(frozen=True, repr=False)
class Shift(Schedule):
    op = "shift"
    of: Schedule
    k: int

    def _at(self, n: int, d: int) -> float:
        return self.of._at(n + self.k * d, d)


@dataclass(frozen=True, repr=False)
class Hold(Schedule):
    op = "hold"
    of: Schedule
    at: int

    def _at(self, n: int, d: int) -> float:
        return self.of._at(n, d) if n < self.at * d else self.of._at(self.at, 1)


@dataclass(frozen=True, repr=False)
class Every(Schedule):
    op = "every"
    of: Schedule
    n: int

    def _at(self, n: int, d: int) -> float:
        return self.of._at(n // (self.n * d), 1)


@dataclass(frozen=True, repr=False)
class Clip(Schedule):
    op = "clip"
    of: Schedule
    lo: float
    hi: float

    def _at(self, n: int, d: int) -> float:
        return min(max(self.of._at(n, d), self.lo), self.hi)


@dataclass(frozen=True, repr=False)
class Floor(Schedule):
    op = "floor"
    of: Schedule
    lo: float

    def _at(self, n: int, d: int) -> float:
        return max(self.of._at(n, d), self.lo)


@dataclass(frozen=True, repr=False)
class InEpochs(Schedule):
    op = "in_epochs"
    of: Schedule
    steps_per_epoch: int | None
    smooth: bool

    def bind(self, steps_per_epoch: int) -> Schedule:
        n = whole("bind", "steps_per_epoch", steps_per_epoch, 1)
        return replace(self, steps_per_epoch=n) if self.steps_per_epoch is None else self

    def _epochs(self) -> list[InEpochs]:
        return [self]

    def _at(self, n: int, d: int) -> float:
        if self.steps_per_epoch is None:
            raise Invalid("in_epochs: how many steps has an epoch? say .in_epochs(steps_per_epoch), or .bind(...)")
        d *= self.steps_per_epoch
        return self.of._at(n, d) if self.smooth else self.of._at(n // d, 1)


@dataclass(frozen=True, repr=False)
class Add(Schedule):
    op, binding = "add", 1
    a: Schedule
    b: Schedule

    def _at(self, n: int, d: int) -> float:
        return self.a._at(n, d) + self.b._at(n, d)

    def __repr__(self) -> str:
        return f"{_held(self.a, 1)} + {_held(self.b, 2)}"


@dataclass(frozen=True, repr=False)
class Multiply(Schedule):
    op, binding = "multiply", 2
    a: Schedule
    b: Schedule

    def _at(self, n: int, d: int) -> float:
        return self.a._at(n, d) * self.b._at(n, d)

    def __repr__(self) -> str:
        return f"{_held(self.a, 2)} * {_held(self.b, 3)}"


@dataclass(frozen=True, repr=False)
class Scale(Schedule):
    op, binding = "scale", 2
    of: Schedule
    by: float

    def _at(self, n: int, d: int) -> float:
        return self.by * self.of._at(n, d)

    def __repr__(self) -> str:
        return f"{self.by!r} * {_held(self.of, 3)}"


METHODS: dict[str, Callable[..., Schedule]] = {
    name: getattr(Schedule, name)
    for name in ("warmup", "then", "restart", "shift", "hold", "every", "clip", "floor", "in_epochs")
}
OPS.update(METHODS)
OPS["add"] = lambda a, b: must_be_schedule("add", "a", a) + b
OPS["multiply"] = lambda a, b: must_be_schedule("multiply", "a", a) * must_be_schedule("multiply", "b", b)
OPS["scale"] = lambda of, by: must_be_schedule("scale", "of", of) * number("scale", "by", by)
