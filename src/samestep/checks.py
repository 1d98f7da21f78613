"""Refusing an argument that cannot be used, in one line: `cosine: T must be at least 1, got T=0`. `where` may be empty.

Each function returns the argument in its plain Python form (int, float, tuple), so that equal values are stored alike.
A value of the wrong kind is a WrongType (a TypeError), a value out of range an Invalid (a ValueError).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from samestep.errors import Invalid, WrongType

MOST = 2**53  # every whole number up to here is exact in float64


def _at(where: str) -> str:
    return f"{where}: " if where else ""


def show(value: object) -> str:
    """A value in one line of bearable length."""
    text = " ".join(repr(value.tolist() if isinstance(value, np.ndarray) else value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def nearest(name: object, names: Iterable[str]) -> str:
    """What somebody who wrote this name may have meant."""
    near = difflib.get_close_matches(name, names) if isinstance(name, str) else []
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(names))}"


def whole(where: str, name: str, value: Any, least: int = 0, most: int = MOST) -> int:
    """A count: a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise WrongType(f"{_at(where)}{name} must be a whole number, got {name}={show(value)}")
    if value < least:
        raise Invalid(f"{_at(where)}{name} must be at least {least}, got {name}={show(int(value))}")
    if value > most:
        raise Invalid(f"{_at(where)}{name} must be at most {most}, got {name}={show(int(value))}")
    return int(value)


def number(where: str, name: str, value: Any) -> float:
    """A rate or a factor: finite and at least 0."""
    result = _float(where, name, value)
    if not 0 <= result < math.inf:
        raise Invalid(f"{_at(where)}{name} must be finite and at least 0, got {name}={show(value)}")
    return result


def finite(where: str, name: str, value: Any) -> float:
    """A measurement: any number but NaN and the infinite ones."""
    result = _float(where, name, value)
    if not math.isfinite(result):
        raise Invalid(f"{_at(where)}{name} must be finite, got {name}={show(value)}")
    return result


def _float(where: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise WrongType(f"{_at(where)}{name} must be a number, got {name}={show(value)}")
    try:
        return float(value) + 0.0  # -0.0 becomes 0.0: what is equal has equal bits
    except OverflowError:
        return math.inf


def above_zero(where: str, name: str, value: Any) -> float:
    result = number(where, name, value)
    if not result:
        raise Invalid(f"{_at(where)}{name} must be above 0, got {name}={show(value)}")
    return result


def at_most(where: str, name: str, value: float, other: str, limit: float) -> None:
    if value > limit:
        raise Invalid(f"{_at(where)}{name} must be at most {other}, got {name}={value} and {other}={limit}")


def flag(where: str, name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise WrongType(f"{_at(where)}{name} must be True or False, got {name}={show(value)}")
    return bool(value)


def choice(where: str, name: str, value: Any, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str):
        raise WrongType(f"{_at(where)}{name} must be a string, got {name}={show(value)}")
    if value not in choices:
        raise Invalid(f"{_at(where)}{name} must be one of {', '.join(map(repr, choices))}, got {name}={show(value)}")
    return str(value)


def numbers(where: str, name: str, values: Any) -> tuple[float, ...]:
    """A list of rates."""
    return tuple(number(where, f"{name}[{i}]", value) for i, value in enumerate(_listed(where, name, values)))


def boundaries(where: str, name: str, values: Any) -> tuple[int, ...]:
    """An increasing list of counts."""
    result = tuple(whole(where, f"{name}[{i}]", value) for i, value in enumerate(_listed(where, name, values)))
    if any(after <= before for before, after in pairwise(result)):
        raise Invalid(f"{_at(where)}{name} must be increasing, got {name}={show(list(result))}")
    return result


def _listed(where: str, name: str, values: Any) -> list[Any]:
    if isinstance(values, np.ndarray) and values.ndim == 1:
        return list(values)
    if not isinstance(values, (list, tuple, range)):
        raise WrongType(f"{_at(where)}{name} must be a list of numbers, got {name}={show(values)}")
    return list(values)
