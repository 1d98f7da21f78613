"""Powers as schedules need them: without an exception where they grow too large, and as products rounded one by one."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from samestep.errors import Invalid

CHUNK = 2**14  # products that are computed at once
LONGEST = 2**30  # factors: a few seconds of work


def power(base: float, exponent: float) -> float:
    """base ** exponent, infinite where a float cannot hold it: a schedule that is clipped may still use it.

    >>> power(2, 0.5), power(2, 5000)
    (1.4142135623730951, inf)
    """
    try:
        return float(base**exponent)
    except OverflowError:
        return math.inf


def product(start: float, factor: float, t: int, floor: float) -> float:
    """start · factor · factor · …, t times, rounded after each; or any number below `floor` once it has gone below it.

    >>> product(2.0, 0.9, 4, 0.0), 2.0 * 0.9**4
    (1.3122000000000003, 1.3122)
    """
    firsts = _firsts(start, factor)
    wanted, i = divmod(t, CHUNK)
    for chunk in range(len(firsts) - 1, wanted):
        first = firsts[chunk]
        if first * factor == first or first < floor:
            return first  # it stays so
        if chunk * CHUNK >= LONGEST:
            raise Invalid(f"geometric: t must be at most {LONGEST}, got t={t}: use exponential, which needs no steps")
        firsts[chunk + 1] = float(_chunk(first, factor)[-1]) * factor
    return float(_chunk(firsts[wanted], factor)[i])


@lru_cache(maxsize=64)
def _firsts(start: float, factor: float) -> dict[int, float]:
    """The first product of each chunk, as far as they are known. Two threads may fill in the same one: it is equal."""
    return {0: start}


@lru_cache(maxsize=64)
def _chunk(first: float, factor: float) -> NDArray[np.float64]:
    values = np.full(CHUNK, factor)
    values[0] = first
    with np.errstate(all="ignore"):
        return np.multiply.accumulate(values)  # one after the other
