"""What is said to whole steps, and what they say of themselves.

Every array that a launch takes or gives costs time, and one that is fetched costs more. So all that a step is told comes in
one array, and all that many steps say is written into another, a line each: loss and hits, and two words of fingerprint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any
LINES = 256
HEAD = 5  # words that a step is told before the index: its line, two of its key, two of its rate


class Book:
    """The lines of some steps, one after the other."""

    def __init__(self, dtype: Any, place: Any) -> None:
        self.kind = np.float64 if np.dtype(dtype).itemsize == 8 else np.float32  # smaller ones lie in it exactly
        self.words = 2 * np.dtype(self.kind).itemsize // 4  # of loss and hits
        self.array: Array = jax.device_put(np.zeros((LINES, self.words + 2), np.uint32), place)
        self.used = 0
        self._read: np.ndarray[Any, Any] | None = None

    @property
    def closed(self) -> bool:
        """Whether nothing more may be written: what has been read has readers."""
        return self.used == LINES or self._read is not None

    def read(self) -> np.ndarray[Any, Any]:
        if self._read is None:
            self._read = np.asarray(self.array)
        return self._read


@dataclass(frozen=True)
class Line:
    """One part of a line, for NumPy to read: either its numbers, or its fingerprint."""

    book: Book
    number: int
    numbers: bool

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        line: np.ndarray[Any, Any] = self.book.read()[self.number]
        words = self.book.words
        return line[:words].view(self.book.kind) if self.numbers else line[words:]


def written(book: Array, number: Array, numbers: list[Array], prints: Array) -> Array:
    """The book with one more line, in a compiled step."""
    kind = jnp.float64 if numbers[0].dtype.itemsize == 8 else jnp.float32
    words = jax.lax.bitcast_convert_type(jnp.stack(numbers).astype(kind), jnp.uint32).reshape(-1)
    return jax.lax.dynamic_update_slice(book, jnp.concatenate([words, prints])[None], (number, 0))


def told(number: int, key: int, lr: float, dtype: Any, index: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Line, key, rate and examples of a step."""
    rate = np.array([dtype.type(lr)]).astype(np.float64 if dtype.itemsize == 8 else np.float32).view(np.int32)
    about = np.zeros(HEAD + len(index), np.int32)
    about[0], about[1:3], about[3 : 3 + len(rate)], about[HEAD:] = number, halves(key).view(np.int32), rate, index
    return about


def heard(about: Array, dtype: Any) -> tuple[Array, Array, Array, Array]:
    """The same, in a compiled step."""
    wide = dtype.itemsize == 8
    rate = jax.lax.bitcast_convert_type(about[3:5] if wide else about[3], jnp.float64 if wide else jnp.float32)
    return about[0], jax.lax.bitcast_convert_type(about[1:3], jnp.uint32), rate.astype(dtype), about[HEAD:]


def halves(key: int) -> np.ndarray[Any, Any]:
    """The 64 bits of a key as the two words that jax.random wants."""
    return np.array([key >> 32 & 0xFFFFFFFF, key & 0xFFFFFFFF], np.uint32)
