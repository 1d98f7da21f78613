"""Refusing an argument that cannot be used, in one line: `cosine: T must be at least 1, got T=0`. `where` may be empty.

Each function returns the argument in its plain Python form (int, float, tuple), so that equal values are stored alike.
A value of the wrong kind is a WrongType (a TypeError), a value out of range an Invalid (a ValueError).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import pairwise
from typing import Annotated, Any, get_origin, get_type_hints

import numpy as np

from samestep.errors import Invalid, WrongType

MOST = 2**53  # every whole number up to here is exact in float64
Check = Callable[[str, str, Any], Any]  # of one argument: where, name and value to the value kept


def show(value: object) -> str:
    """A value in one line of bearable length."""
    try:
        text = " ".join(repr(value.tolist() if isinstance(value, np.ndarray) else value).split())
    except Exception:  # a number of too many digits, among others
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 80 else text[:77] + "..."


def nearest(name: object, names: Iterable[str]) -> str:
    """What somebody who wrote this name may have meant."""
    near = difflib.get_close_matches(name, names) if isinstance(name, str) else []
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(names))}"


def _require(right: bool, where: str, name: str, what: str, value: object, error: type[Exception] = Invalid) -> None:
    if not right:
        raise error(f"{_at(where)}{name} must be {what}, got {name}={show(value)}")


def _at(where: str) -> str:
    return f"{where}: " if where else ""


def whole(where: str, name: str, value: Any, least: int = 0, most: int = MOST) -> int:
    """A count: a whole number from `least` to `most`."""
    right = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    _require(right, where, name, "a whole number", value, WrongType)
    value = int(value)
    _require(value >= least, where, name, f"at least {least}", value)
    _require(value <= most, where, name, f"at most {most}", value)
    return int(value)


def number(where: str, name: str, value: Any) -> float:
    """A rate or a factor: finite and at least 0."""
    result = _float(where, name, value)
    _require(0 <= result < math.inf, where, name, "finite and at least 0", value)
    return result


def finite(where: str, name: str, value: Any) -> float:
    """A measurement: any number but NaN and the infinite ones."""
    result = _float(where, name, value)
    _require(math.isfinite(result), where, name, "finite", value)
    return result


def _float(where: str, name: str, value: Any) -> float:
    right = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    _require(right, where, name, "a number", value, WrongType)
    try:
        return float(value) + 0.0  # -0.0 becomes 0.0: what is equal has equal bits
    except OverflowError:
        return math.inf


def above_zero(where: str, name: str, value: Any) -> float:
    result = number(where, name, value)
    _require(result > 0, where, name, "above 0", value)
    return result


def below_one(where: str, name: str, value: Any) -> float:
    result = number(where, name, value)
    _require(result < 1, where, name, "below 1", result)
    return result


def share(where: str, name: str, value: Any) -> float:
    result = number(where, name, value)
    _require(result <= 1, where, name, "at most 1", result)
    return result


def at_most(where: str, name: str, value: float, other: str, limit: float) -> None:
    if value > limit:
        raise Invalid(f"{_at(where)}{name} must be at most {other}, got {name}={value} and {other}={limit}")


def flag(where: str, name: str, value: Any) -> bool:
    _require(isinstance(value, (bool, np.bool_)), where, name, "True or False", value, WrongType)
    return bool(value)


def choice(where: str, name: str, value: Any, choices: tuple[str, ...]) -> str:
    _require(isinstance(value, str), where, name, "a string", value, WrongType)
    _require(value in choices, where, name, f"one of {', '.join(map(repr, choices))}", value)
    return str(value)


def numbers(where: str, name: str, values: Any) -> tuple[float, ...]:
    """A list of rates."""
    return tuple(number(where, f"{name}[{i}]", value) for i, value in enumerate(_listed(where, name, values)))


def boundaries(where: str, name: str, values: Any) -> tuple[int, ...]:
    """An increasing list of counts."""
    result = tuple(whole(where, f"{name}[{i}]", value) for i, value in enumerate(_listed(where, name, values)))
    _require(all(before < after for before, after in pairwise(result)), where, name, "increasing", list(result))
    return result


def texts(where: str, name: str, value: Any) -> tuple[str, ...]:
    """A list of texts, or one text with commas between."""
    found = value.split(",") if isinstance(value, str) else _listed(where, name, value)
    _require(all(isinstance(text, str) for text in found), where, name, "texts", value, WrongType)
    return tuple(found)


def _listed(where: str, name: str, values: Any) -> list[Any]:
    right = values.ndim == 1 if isinstance(values, np.ndarray) else isinstance(values, (list, tuple, range))
    _require(right, where, name, "a list", values, WrongType)
    _require(len(values) <= 10**8, where, name, "shorter", values)  # what fits into memory
    return list(values)


# Checks that stand beside the types of a function's arguments


def one_of(*choices: str) -> Check:
    return partial(choice, choices=choices)


Rate = Annotated[float, number]
AboveZero = Annotated[float, above_zero]
BelowOne = Annotated[float, below_one]
Share = Annotated[float, share]
Steps = Annotated[int, whole]  # 0 or more
Count = Annotated[int, partial(whole, least=1)]
Flag = Annotated[bool, flag]


@cache
def checks(function: Callable[..., Any]) -> dict[str, Check]:
    """How the arguments of a function are checked: the second part of each Annotated[type, check]."""
    hints = get_type_hints(function, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if get_origin(hint) is Annotated}


def checked(where: str, function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a function was given, each as its check returns it."""
    return {name: check(where, name, given[name]) for name, check in checks(function).items()}
