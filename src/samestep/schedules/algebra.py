"""What every schedule can do: be declared, called, shown, stored and combined. The schedules themselves are in kinds.py.

A schedule is declared once, as the formula of its rate: a function of the time and of its arguments, whose annotations
say how each argument is checked. `formula` and `method` turn it into the function that users call; repr, JSON and the
reading of text follow from its signature.

Time is an exact fraction t/d of two integers. At a whole t it is t/1; inside a stretched clock (a restart with longer and
longer periods, an epoch of many steps) d grows instead of t being rounded. So the ends of periods are exact at any t, and
`cosine(lr, 20)` stretched over epochs of 100 steps has the very bits of `cosine(lr, 2000)`.

Every rate is computed by Python's own float arithmetic, one t after the other: an array of t gives the bits that its
elements give, on every processor.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Annotated, Any, Concatenate, ParamSpec, overload

import numpy as np
from numpy.typing import NDArray

from samestep.checks import Count, Flag, Rate, Steps, at_most, checked, number, one_of, show, whole
from samestep.errors import Invalid, WrongType
from samestep.schedules.exports import Exports
from samestep.schedules.powers import power

VERSION = 1  # of the JSON form
LIMIT = 2**63  # t must be below: what an int64 holds
# For repr: the sign, and how tightly it binds; a call binds by 3.
SIGNS = {"add": ("+", 1), "multiply": ("*", 2), "scale": ("*", 2)}

P = ParamSpec("P")
Need = Callable[[str, dict[str, Any]], None]  # of all together: refuses them, or fills one in


def must_be_schedule(where: str, name: str, value: Any) -> Schedule:
    if not isinstance(value, Schedule):
        raise WrongType(f"{where}: {name} must be a schedule, such as constant(0.1), got {name}={show(value)}")
    return value


def _count_or_none(where: str, name: str, value: Any) -> int | None:
    return None if value is None else whole(where, name, value, 1)


Part = Annotated["Schedule", must_be_schedule]
CountOrNone = Annotated[int | None, _count_or_none]


def ordered(low: str, high: str) -> Need:
    return lambda op, given: at_most(op, low, given[low], high, given[high])


def in_steps(op: str, given: dict[str, Any]) -> None:
    if any(isinstance(value, Schedule) and value.unit == "epochs" for value in given.values()):
        raise Invalid(f"{op}: counts steps, but the schedule epochs: put .{op}(...) before .in_epochs()")


def no_unit_yet(op: str, given: dict[str, Any]) -> None:
    if given["self"]._epochs():
        raise Invalid(f"{op}: the schedule has its unit already: .in_epochs() was applied to a part of it")


def same_unit(op: str, given: dict[str, Any]) -> None:
    if given["a"].unit != given["b"].unit:
        sign, _ = SIGNS[op]
        raise Invalid(f"{sign}: one side counts steps, the other epochs: combine first, (a {sign} b).in_epochs()")


FORMULAS: dict[str, Callable[..., float]] = {}  # what was declared, by name
ENDS: dict[str, Callable[..., float]] = {}  # its arguments to the time from which on its rate stays as it is
OPS: dict[str, Callable[..., Schedule]] = {}  # what users call: without the time, it makes a schedule


@cache
def parameters(op: str) -> dict[str, inspect.Parameter]:
    """The arguments of an operation, by their names in JSON, where `self` is `of`."""
    return {"of" if name == "self" else name: p for name, p in inspect.signature(OPS[op]).parameters.items()}


def never(*arguments: Any) -> float:
    return math.inf


def formula(
    *needs: Need, ends: Callable[..., float] = never
) -> Callable[[Callable[Concatenate[int, int, P], float]], Callable[P, Schedule]]:
    """Declares a schedule by its formula: the rate at time t/d; and when it ends, if it does."""
    return partial(_declare, needs, ends)


def method(
    *needs: Need, ends: Callable[..., float] = never
) -> Callable[[Callable[Concatenate[Schedule, int, int, P], float]], Callable[Concatenate[Schedule, P], Schedule]]:
    """The same for a schedule that is made of another, `self`."""
    return partial(_declare, needs, ends)


def _declare(
    needs: tuple[Need, ...], ends: Callable[..., float], formula: Callable[..., float]
) -> Callable[..., Schedule]:
    op, signature = formula.__name__, inspect.signature(formula)
    timeless = [p for p in signature.parameters.values() if p.name not in ("t", "d")]
    signature = signature.replace(parameters=timeless, return_annotation="Schedule")

    @wraps(formula)
    def make(*args: Any, **named: Any) -> Schedule:
        try:
            bound = signature.bind(*args, **named)
        except TypeError as error:
            raise WrongType(f"{op}: {error}") from None
        bound.apply_defaults()
        given = bound.arguments | checked(op, formula, bound.arguments)
        for need in needs:
            need(op, given)
        return Schedule(op, tuple(given.values()))

    vars(make)["__signature__"] = signature
    FORMULAS[op], OPS[op], ENDS[op] = formula, make, ends
    return make


@dataclass(frozen=True, repr=False)
class Schedule(Exports):
    """The learning rate as a pure function of t, the number of updates already made: the first update uses s(0).

    Call it with a whole number for a float, with an array of them for an array of float64. Schedules are values: frozen,
    hashable, equal when they are built alike; `repr` evaluates back.

    >>> from samestep.schedules.kinds import poly
    >>> s = poly(1.0, 4)
    >>> s(1), s.shift(1)(1), s.hold(1)(3), s.every(2)(3), s.clip(0.5, 0.6)(1), s.floor(0.5)(3), s.then(2 * s, 3)(4)
    (0.75, 0.5, 0.75, 0.75, 0.6, 0.5, 1.5)
    """

    op: str
    arguments: tuple[Any, ...]  # checked, all of them
    __array_ufunc__ = None  # so that np.float64(2) * s asks the schedule, not NumPy

    def __post_init__(self) -> None:
        """Arguments can be read by their names, s.lr, but for `values`, `every` and `floor`, which are methods."""
        named = zip(parameters(self.op), self.arguments, strict=True)
        vars(self).update({name: value for name, value in named if not hasattr(Schedule, name)})

    def _at(self, t: int, d: int) -> float:
        """The rate at time t/d."""
        if self.op in METHODS:
            return FORMULAS[self.op](self.arguments[0], t, d, *self.arguments[1:])
        return FORMULAS[self.op](t, d, *self.arguments)

    @overload
    def __call__(self, t: int | np.integer[Any]) -> float: ...
    @overload
    def __call__(self, t: NDArray[np.integer[Any]] | Sequence[int]) -> NDArray[np.float64]: ...
    def __call__(self, t: Any) -> Any:
        if isinstance(t, (int, np.integer)) and not isinstance(t, bool):
            return self._rate(int(t))
        try:
            array = np.asarray(t) if isinstance(t, (np.ndarray, list, tuple, range)) else None
        except ValueError:  # lists of several lengths
            array = None
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

    @property
    def length(self) -> int | None:
        """From which t on the rate stays as it is, s(t) = s(length), in its `unit`; None if it has no such end.

        >>> from samestep.schedules.kinds import cosine, exponential
        >>> cosine(0.3, 20).warmup(5).length, cosine(0.3, 20).in_epochs(100).length, exponential(0.3, 0.9).length
        (25, 2000, None)
        """
        end = self._end()
        return None if end == math.inf else int(end)

    def _end(self) -> float:
        return ENDS[self.op](*self.arguments)

    @method(in_steps, ends=lambda of, n, *_: n + of._end())
    def warmup(
        self, t: int, d: int, n: Steps, start: Rate = 0.0, mode: Annotated[str, one_of("linear", "constant")] = "linear"
    ) -> float:
        """Go from `start` to s(0) in n updates (or stay at `start`: mode="constant"), then follow s from its beginning.

        η(t) = start + (s(0) − start)·t/n for t < n, then s(t − n).

        >>> from samestep.schedules.kinds import constant
        >>> constant(1.0).warmup(4).values(6).tolist()
        [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
        """
        if t >= n * d:
            return self._at(t - n * d, d)
        return start if mode == "constant" else start + (self._at(0, 1) - start) * t / (n * d)

    @method(in_steps, ends=lambda of, other, at: at + other._end())
    def then(self, t: int, d: int, other: Part, at: Steps) -> float:
        """Follow s until t = at, then `other` from its beginning: η(t) = s(t) for t < at, then other(t − at)."""
        return self._at(t, d) if t < at * d else other._at(t - at * d, d)

    @method(in_steps)
    def restart(self, t: int, d: int, period: Count, mult: Count = 1, decay: Rate = 1.0) -> float:
        """Begin s again after each period; a period is `mult` times as long as the one before, and s stretched to fill it.

        In period k, which starts at a_k = period·(1 + mult + … + mult^(k−1)): η(t) = decay^k · s((t − a_k) / mult^k).
        Loshchilov & Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, 2017.

        >>> from samestep.schedules.kinds import poly
        >>> poly(1.0, 2).restart(2, mult=2, decay=0.5).values(8).tolist()
        [1.0, 0.5, 0.5, 0.375, 0.25, 0.125, 0.25, 0.21875]
        """
        k, length = 0, period * d
        if mult == 1:
            k, t = divmod(t, length)
        while t >= length:
            k, t, d, length = k + 1, t - length, d * mult, length * mult
        return power(decay, k) * self._at(t, d)

    @method(in_steps, ends=lambda of, k: max(of._end() - k, 0))
    def shift(self, t: int, d: int, k: Steps) -> float:
        """Skip the first k rates: η(t) = s(t + k)."""
        return self._at(t + k * d, d)

    @method(in_steps, ends=lambda of, at: min(of._end(), at))
    def hold(self, t: int, d: int, at: Steps) -> float:
        """Stay at s(at) from t = at on: η(t) = s(min(t, at))."""
        return self._at(t, d) if t < at * d else self._at(at, 1)

    @method(in_steps, ends=lambda of, n: of._end() * n)
    def every(self, t: int, d: int, n: Count) -> float:
        """Use each rate for n updates: η(t) = s(⌊t/n⌋)."""
        return self._at(t // (n * d), 1)

    @method(ordered("lo", "hi"), ends=lambda of, *_: of._end())
    def clip(self, t: int, d: int, lo: Rate, hi: Rate) -> float:
        """Keep the rate between lo and hi: η(t) = min(max(s(t), lo), hi)."""
        return min(max(self._at(t, d), lo), hi)

    @method(ends=lambda of, *_: of._end())
    def floor(self, t: int, d: int, lo: Rate) -> float:
        """Keep the rate at lo or above: η(t) = max(s(t), lo)."""
        return max(self._at(t, d), lo)

    @method(no_unit_yet, ends=lambda of, steps_per_epoch, smooth: of._end() * (steps_per_epoch or 1))
    def in_epochs(self, t: int, d: int, steps_per_epoch: CountOrNone = None, smooth: Flag = False) -> float:
        """Count epochs where s counts t: s(e) holds through epoch e; smooth: s moves within the epoch as well.

        η(t) = s(⌊t / steps_per_epoch⌋), smooth: s(t / steps_per_epoch). Without steps_per_epoch, the Trainer supplies it.

        >>> from samestep.schedules.kinds import poly
        >>> poly(1.0, 4).in_epochs(2).values(6).tolist()
        [1.0, 1.0, 0.75, 0.75, 0.5, 0.5]
        """
        if steps_per_epoch is None:
            raise Invalid("in_epochs: how many steps has an epoch? say .in_epochs(steps_per_epoch), or .bind(...)")
        d *= steps_per_epoch
        return self._at(t, d) if smooth else self._at(t // d, 1)

    def __add__(self, other: Any) -> Schedule:
        if not isinstance(other, Schedule):
            raise WrongType(f"+: both sides must be schedules, such as constant(0.1), got {show(other)}")
        return add(self, other)

    __radd__ = __add__

    def __mul__(self, other: Any) -> Schedule:
        return multiply(self, other) if isinstance(other, Schedule) else scale(self, number("*", "factor", other))

    __rmul__ = __mul__

    # The unit of time

    @property
    def unit(self) -> str:
        """What the schedule counts: "steps", or "epochs" as long as nobody said how many steps an epoch has."""
        return "epochs" if None in self._epochs() else "steps"

    def bind(self, steps_per_epoch: int) -> Schedule:
        """The schedule in steps, for epochs of so many; one that is in steps already is returned as it is."""
        n = whole("bind", "steps_per_epoch", steps_per_epoch, 1)
        if self.unit == "steps":
            return self
        if self.op == "in_epochs":
            of, _, smooth = self.arguments
            return Schedule(self.op, (of, n, smooth))
        return Schedule(self.op, tuple(x.bind(n) if isinstance(x, Schedule) else x for x in self.arguments))

    def _epochs(self) -> list[int | None]:
        """The steps per epoch of each part that counts epochs."""
        return [part.arguments[1] for part in self._parts() if part.op == "in_epochs"]

    def _parts(self) -> list[Schedule]:
        """This schedule and all that it is made of."""
        return [self, *(part for value in self.arguments if isinstance(value, Schedule) for part in value._parts())]

    # Showing and storing

    def __repr__(self) -> str:
        if self.op in SIGNS:
            sign, binding = SIGNS[self.op]
            left, right = reversed(self.arguments) if self.op == "scale" else self.arguments
            return f"{_held(left, binding)} {sign} {_held(right, binding + 1)}"
        head, shown = self.op, []
        for parameter, value in zip(parameters(self.op).values(), self.arguments, strict=True):
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
        for name, value in zip(parameters(self.op), self.arguments, strict=True):
            plain = value.to_json() if isinstance(value, Schedule) else value
            result[name] = list(plain) if isinstance(plain, tuple) else plain
        return result


def _held(value: Any, binding: int) -> str:
    """Its repr, in parentheses where it would otherwise fall apart."""
    loose = isinstance(value, Schedule) and SIGNS.get(value.op, ("", 3))[1] < binding
    return f"({value!r})" if loose else repr(value)


METHODS = dict(OPS)  # those that are declared so far


@formula(same_unit, ends=lambda a, b: max(a._end(), b._end()))
def add(t: int, d: int, a: Part, b: Part) -> float:
    return a._at(t, d) + b._at(t, d)


@formula(same_unit, ends=lambda a, b: max(a._end(), b._end()))
def multiply(t: int, d: int, a: Part, b: Part) -> float:
    return a._at(t, d) * b._at(t, d)


@formula(ends=lambda of, by: of._end())
def scale(t: int, d: int, of: Part, by: Rate) -> float:
    return by * of._at(t, d)
