"""Fingerprints: a hash of the weights by name at the end of a run, and 64 bits of the vectors after every step.

The second is computed in every step, so it has to be quick. Whole numbers alone are added, which wrap around, so the order of
additions cannot matter. The 64-bit words of a vector are laid out in rows of COLUMNS, and summed along the rows and along the
columns. Where up to three words differ, some sum differs. All these sums, and the words of the last row that is not full, are
then added up, each times an odd number of its own, and so are their upper halves: the product of bit 63 with any odd number
is the same, so two signs that change could cancel each other in one sum of whole words.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, Any]
WORD = 8  # bytes
COLUMNS = 1023  # odd, so that no row's sum stays the same when all signs in it change
TABLE = 1 << 17  # after so many odd numbers they begin again


def of_weights(tensors: Mapping[str, Numbers]) -> str:
    """SHA-256 of weights: of every name, type, shape and byte, in the order of the names.

    >>> of_weights({"w": np.zeros(2, "float32")})[:16]
    '7c5c9b93c3c05a6f'
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        digest.update(json.dumps([name, array.dtype.str, list(np.shape(tensors[name]))]).encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def hashed(*arrays: Any, text: str = "") -> str:
    """A short hash of arrays and a text, to see whether they are the same when they are made again."""
    digest = hashlib.sha256(text.encode())
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:16]


def of_vectors(vectors: Sequence[Numbers]) -> Numbers:
    """64 bits of vectors in host memory."""
    return Fingerprint(vectors)()


@functools.cache
def odd(count: int) -> Numbers:
    """So many odd numbers of 64 bits."""
    numbers = (np.random.Philox(key=0).random_raw(min(count, TABLE)) | np.uint64(1)).view(np.int64)
    return np.resize(numbers, count)


class Fingerprint:
    """The fingerprint of vectors that stay where they are in memory: one number of 64 bits for all of them."""

    def __init__(self, vectors: Sequence[Numbers]) -> None:
        laid_out = [_laid_out(vector.view(np.uint8)) for vector in vectors]
        sizes = [(-(-len(rest) // WORD), len(rows), COLUMNS if len(rows) else 0) for rows, rest in laid_out]
        count = sum(map(sum, sizes))
        self._words, self._odd = np.zeros(2 * count, np.int64), odd(2 * count)  # whole, and upper halves
        self._whole, self._upper = self._words[:count], self._words[count:]
        self._copies, self._sums, at = list[tuple[Numbers, Numbers]](), list[tuple[Numbers, Numbers, Numbers]](), 0
        for (rows, rest), (left, along, down) in zip(laid_out, sizes, strict=True):
            self._copies.append((self._whole[at : at + left].view(np.uint8)[: len(rest)], rest))
            at += left
            if len(rows):
                self._sums.append((rows, self._whole[at : at + along], self._whole[at + along : at + along + down]))
            at += along + down

    def __call__(self) -> Numbers:
        for words, rest in self._copies:
            words[:] = rest
        for rows, along, down in self._sums:
            np.add.reduce(rows, 1, out=along)
            np.add.reduce(rows, 0, out=down)
        np.right_shift(self._whole, 32, out=self._upper)
        total: Numbers = np.einsum("i,i->", self._words, self._odd).reshape(1)  # not @: it adds as it multiplies
        return total


def _laid_out(raw: Numbers) -> tuple[Numbers, Numbers]:
    """The words of a vector in rows, and the bytes of the last row if it is not full."""
    whole = len(raw) // (COLUMNS * WORD) * COLUMNS * WORD
    return raw[:whole].view(np.int64).reshape(-1, COLUMNS), raw[whole:]
