"""The fingerprints of Paddle's vectors: on the CPU by NumPy in their own memory (bits.py), which is quicker;
on a GPU they stay there. Both give the same number."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from samestep.backends import bits

Vector = Any
BLOCK = bits.COLUMNS * 2048  # numbers that a GPU takes at a time: their products are 128 MiB


def fingerprint(vectors: Sequence[Vector]) -> Any:
    """One number of 64 bits for all these vectors, on their device."""
    place = vectors[0].place
    if not place.is_gpu_place():
        return bits.fingerprint([in_memory(vector) for vector in vectors])
    return (paddle.concat([on_gpu(vector) for vector in vectors]) * odd_on(place)[1][: len(vectors)]).sum().reshape([1])


def in_memory(vector: Vector) -> np.ndarray[Any, Any]:
    """A vector on the CPU as NumPy, without a copy."""
    numbers: np.ndarray[Any, Any] = np.from_dlpack(vector.detach())
    return numbers


@functools.cache
def odd_on(place: Any) -> tuple[Vector, Vector]:
    of_columns, of_rows = (paddle.to_tensor(numbers, place=place) for numbers in bits.odd())
    return of_columns, of_rows


def on_gpu(vector: Vector) -> Vector:
    of_columns, of_rows = odd_on(vector.place)
    width = f"int{8 * vector.element_size()}"
    numbers = vector if str(vector.dtype) == f"paddle.{width}" else vector.view(width)
    whole, sums = len(numbers) // bits.COLUMNS * bits.COLUMNS, []
    for lo in range(0, whole, BLOCK):
        rows = numbers[lo : min(lo + BLOCK, whole)].reshape([-1, bits.COLUMNS]).astype("int64")
        sums.append((rows * of_columns).sum(1))
    rest = numbers[whole:].astype("int64")
    sums.append((rest * of_columns[: len(rest)]).sum().reshape([1]))
    total = paddle.concat(sums)
    return (total * of_rows[paddle.arange(len(total)) % bits.ROWS]).sum().reshape([1])
