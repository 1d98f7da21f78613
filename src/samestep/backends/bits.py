"""64 bits of vectors in host memory, for fingerprints, by whole numbers alone: they wrap around, so the order of additions
cannot matter. It is computed in every step, so it has to be quick.

The 64-bit words of a vector are laid out in rows of COLUMNS, and summed along the rows, each times an odd number of its
column, and along the columns. Where up to three words differ, some sum differs. The sums, and the words of the last row
that is not full, are then summed in halves of 32 bits, each times an odd number of its own: the product of bit 63 with any
odd number is the same, so that two signs which change could cancel each other in one sum of whole words.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, Any]
WORD = 8  # bytes
COLUMNS = 1 << 12  # their numbers stay in a core's cache while a model computes
TABLE = 1 << 17  # after so many odd numbers they begin again


@functools.cache
def odd(count: int) -> Numbers:
    """So many odd numbers of 64 bits."""
    numbers = (np.random.Philox(key=0).random_raw(min(count, TABLE)) | np.uint64(1)).view(np.int64)
    return np.resize(numbers, count)


def fingerprint(vectors: Sequence[Numbers]) -> Numbers:
    """One number of 64 bits for all these vectors."""
    return _of_sums([bits(vector) for vector in vectors])


def bits(vector: Numbers) -> Numbers:
    """One number of 64 bits for a vector."""
    raw = vector.view(np.uint8)
    whole = len(raw) // (COLUMNS * WORD) * COLUMNS * WORD
    rest = raw[whole:]
    if len(rest) % WORD:
        rest = np.append(rest, np.zeros(-len(rest) % WORD, np.uint8))
    sums = [rest.view(np.int64)]
    if whole:
        rows = raw[:whole].view(np.int64).reshape(-1, COLUMNS)
        sums += [np.einsum("ij,j->i", rows, odd(COLUMNS)), np.add.reduce(rows, 0)]  # einsum adds as it multiplies
    return _of_sums(sums)


def _of_sums(sums: Sequence[Numbers]) -> Numbers:
    halves = np.concatenate(sums).view(np.int32)
    total: Numbers = np.einsum("i,i->", halves, odd(len(halves))).reshape(1)
    return total
