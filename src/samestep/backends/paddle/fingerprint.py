"""The fingerprints of Paddle's vectors: on the CPU by NumPy in their own memory (bits.py), which is quicker;
on a GPU they stay there. Both give the same number."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from samestep import fingerprint as bits

Vector = Any


class Print:
    """The fingerprint of vectors that are written to: one number of 64 bits for all of them, on their device."""

    def __init__(self, vectors: Sequence[Vector]) -> None:
        self._vectors, self._on_gpu = list(vectors), vectors[0].place.is_gpu_place()
        self._where: list[int] = []
        self._on_host = bits.Print([])

    def __call__(self) -> Any:
        if self._on_gpu:
            return on_gpu(self._vectors)
        where = [vector.data_ptr() for vector in self._vectors]
        if where != self._where:  # an operation has put a vector elsewhere
            self._where, self._on_host = where, bits.Print([in_memory(vector) for vector in self._vectors])
        return self._on_host()


def in_memory(vector: Vector) -> np.ndarray[Any, Any]:
    """A vector on the CPU as NumPy, without a copy."""
    numbers: np.ndarray[Any, Any] = np.from_dlpack(vector.detach())
    return numbers


@functools.cache
def odd_on(place: Any, count: int) -> Vector:
    return paddle.to_tensor(bits.odd(count), place=place)


def on_gpu(vectors: Sequence[Vector]) -> Vector:
    """What bits.fingerprint gives, computed by Paddle."""
    parts = [part for vector in vectors if len(vector) for part in sums(vector)]
    if not parts:
        return paddle.zeros([1], "int64")
    words = paddle.concat(parts)
    both = paddle.concat([words, words >> 32])
    return (both * odd_on(both.place, len(both))).sum().reshape([1])


def sums(vector: Vector) -> list[Vector]:
    raw = vector if str(vector.dtype) == "paddle.uint8" else vector.view("uint8")
    whole, over = len(raw) // (bits.COLUMNS * bits.WORD) * bits.COLUMNS, -len(raw) % bits.WORD
    words = (paddle.concat([raw, paddle.zeros([over], "uint8")]) if over else raw).view("int64")
    found = [words[whole:]] if len(words) > whole else []
    if whole:
        rows = words[:whole].reshape([-1, bits.COLUMNS])
        found += [rows.sum(1), rows.sum(0)]
    return found
