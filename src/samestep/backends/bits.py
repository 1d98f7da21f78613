"""64 bits of vectors in host memory, for fingerprints: Σ mᵢ·bitsᵢ modulo 2⁶⁴ with odd mᵢ.

Integers wrap around, so the order of the additions cannot matter. mᵢ is the product of a multiplier for the row and one for the
column, with a vector laid out in rows of COLUMNS. It is computed in every step, so it has to be quick.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, Any]
COLUMNS = 1 << 13  # their multipliers stay in a core's cache while a model computes
ROWS = 1 << 16  # after so many rows their multipliers begin again


@functools.cache
def odd() -> tuple[Numbers, Numbers]:
    """Odd numbers for the columns, and others for the rows."""
    numbers = (np.random.Philox(key=0).random_raw(COLUMNS + ROWS) | np.uint64(1)).view(np.int64)
    return numbers[:COLUMNS], numbers[COLUMNS:]


def fingerprint(vectors: Sequence[Numbers]) -> Numbers:
    """One number of 64 bits for all these vectors."""
    return _of_rows(np.concatenate([bits(vector) for vector in vectors]))


def bits(vector: Numbers) -> Numbers:
    """One number of 64 bits for a vector."""
    numbers, of_columns = vector.view(f"i{vector.itemsize}"), odd()[0]
    whole = len(numbers) // COLUMNS * COLUMNS
    rest = numbers[whole:]
    # einsum, not @: it widens the numbers a few at a time, in the cache
    sums = np.einsum("ij,j->i", numbers[:whole].reshape(-1, COLUMNS), of_columns)
    return _of_rows(np.append(sums, np.einsum("i,i->", rest, of_columns[: len(rest)])))


def _of_rows(sums: Numbers) -> Numbers:
    total: Numbers = np.einsum("i,i->", sums, odd()[1][np.arange(len(sums)) % ROWS]).reshape(1)
    return total
