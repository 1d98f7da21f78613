"""Every random choice of a run, as a pure function of its seed: the order of examples, the keys of noise.

No generator lives from one step to the next, so there is no state that a worker, a resume or the number of devices could
change. The numbers are raw draws of Philox, a counter-based generator whose output NumPy promises never to change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.errors import Invalid

SAMPLINGS = ("without_replacement", "with_replacement", "in_order")
_ORDER, _NOISE, _EVALUATION, _LANGEVIN, _CHECK, _EXAMPLE, _LAB = 1, 2, 3, 4, 5, 6, 7


def _philox(seed: int, purpose: int, index: int, outer: int = 0) -> np.random.Philox:
    # The key says which stream, the upper half of the counter where in it: no two (purpose, index, outer) overlap.
    key, counter = np.array([seed, purpose], np.uint64), np.array([0, 0, index, outer], np.uint64)
    return np.random.Philox(key=key, counter=counter)


def order(seed: int, epoch: int, n: int, sampling: str = "without_replacement") -> NDArray[np.int64]:
    """The order of n examples in an epoch: a pure function of (seed, epoch).

    Without replacement: the order that sorts n draws of 64 bits. With replacement: n draws, modulo n. In order: 0 to n - 1.

    >>> order(0, 0, 5), order(0, 1, 5)
    (array([3, 2, 4, 1, 0]), array([4, 3, 0, 1, 2]))
    """
    if sampling == "in_order":
        return np.arange(n, dtype=np.int64)
    draws = _philox(seed, _ORDER, epoch).random_raw(n)
    if sampling == "without_replacement":
        found = np.argsort(draws)
        ordered = draws[found]
        if (ordered[1:] == ordered[:-1]).any():  # else there is but one order, and the quicker way has found it
            found = np.argsort(draws, kind="stable")
        return found.astype(np.int64)
    if sampling == "with_replacement":
        return (draws % np.uint64(n)).astype(np.int64)
    raise Invalid(f"sampling must be one of {', '.join(SAMPLINGS)}, got {sampling!r}")


def keys_from(seed: int, step: int, shards: int) -> Iterator[list[int]]:
    """key(seed, step, shard) for every shard of a step, and of each one after it: what dropout and other noise are drawn from.

    >>> steps = keys_from(0, 0, 2)
    >>> next(steps) == next(keys_from(0, 0, 8))[:2], next(steps) == next(keys_from(0, 1, 2))
    (True, True)
    """
    # One generator for all steps: to make it anew takes longer than to draw from it.
    generator, one = _philox(seed, _NOISE, step), np.uint64(1)
    on = 2**128 - -(-shards // 4)  # to the next step's place; a turn of the counter is four draws
    while True:
        yield (generator.random_raw(shards) >> one).tolist()  # 63 bits: every framework's seed holds them
        generator.advance(on)


def evaluation_keys(seed: int, shards: int) -> list[int]:
    """The keys of an evaluation, for models that draw random numbers there too: the same in every evaluation."""
    return [key >> 1 for key in _philox(seed, _EVALUATION, 0).random_raw(shards).tolist()]


def example(seed: int, epoch: int, index: int) -> np.random.Generator:
    """What the transform of one example draws from in one epoch, whoever reads it and whenever.

    >>> example(0, 1, 2).integers(1000, size=3)
    array([167, 806, 431])
    """
    return np.random.Generator(_philox(seed, _EXAMPLE, index, epoch))


def normal(seed: int, step: int, n: int, dtype: str) -> NDArray[Any]:
    """n draws of N(0, 1) for one step, on the host, so that every replica gets the same."""
    return np.random.Generator(_philox(seed, _LANGEVIN, step)).standard_normal(n).astype(dtype)


def lab(seed: int, step: int, kind: int) -> np.random.Generator:
    """What the paths of the lab draw from in one step, each kind of draw from its own."""
    return np.random.Generator(_philox(seed, _LAB, step, kind))


def check(seed: int, window: int, steps: int) -> tuple[int, int]:
    """Which of these steps is checked (training/rehearsal.py), and a number that chooses the shard."""
    step, shard = _philox(seed, _CHECK, window).random_raw(2).tolist()
    return step % steps, shard


def halves(key: int, dtype: Any = np.int64) -> NDArray[Any]:
    """A key as two numbers of 32 bits, which is how frameworks take a seed.

    >>> halves(3 << 32 | 5)
    array([3, 5])
    """
    return np.array([key >> 32, key & 0xFFFFFFFF], dtype)
