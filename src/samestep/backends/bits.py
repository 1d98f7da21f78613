"""64 bits of vectors in host memory, for fingerprints, by whole numbers alone: they wrap around, so the order of additions
cannot matter. It is computed in every step, so it has to be quick.

The 64-bit words of a vector are laid out in rows of COLUMNS, and summed along the rows and along the columns. Where up to
three words differ, some sum differs. All these sums, and the words of the last row that is not full, are then added up, each
times an odd number of its own, and so are their upper halves: the product of bit 63 with any odd number is the same, so that
two signs which change could cancel each other in one sum of whole words.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, Any]
WORD = 8  # bytes
COLUMNS = 1023  # odd, so that no row's sum stays the same when all signs in it change
TABLE = 1 << 17  # after so many odd numbers they begin again


@functools.cache
def odd(count: int) -> Numbers:
    """So many odd numbers of 64 bits."""
    numbers = (np.random.Philox(key=0).random_raw(min(count, TABLE)) | np.uint64(1)).view(np.int64)
    return np.resize(numbers, count)


def fingerprint(vectors: Sequence[Numbers]) -> Numbers:
    """One number of 64 bits for all these vectors."""
    words = np.concatenate([part for vector in vectors for part in sums(vector)])
    both = np.concatenate([words, words >> 32])
    total: Numbers = np.einsum("i,i->", both, odd(len(both))).reshape(1)  # not @: it adds as it multiplies
    return total


def sums(vector: Numbers) -> list[Numbers]:
    """What a vector contributes: its last words, and the sums along rows and columns."""
    raw = vector.view(np.uint8)
    whole = len(raw) // (COLUMNS * WORD) * COLUMNS * WORD
    rest = raw[whole:]
    if len(rest) % WORD:
        rest = np.append(rest, np.zeros(-len(rest) % WORD, np.uint8))
    if not whole:
        return [rest.view(np.int64)]
    rows = raw[:whole].view(np.int64).reshape(-1, COLUMNS)
    return [rest.view(np.int64), np.add.reduce(rows, 1), np.add.reduce(rows, 0)]
