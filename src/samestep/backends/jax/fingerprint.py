"""The fingerprint of JAX's vectors after a step: 64 bits in two words of 32, as 64-bit integers would need jax_enable_x64.

Each word of the vectors is hashed with its position, and the hashes are added modulo 2³². Integers wrap around, so the order
of the additions cannot matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

Array = Any


def fingerprint(vectors: Sequence[Array]) -> Array:
    sums, position = (jnp.uint32(0), jnp.uint32(0)), 0
    for vector in vectors:
        width = {1: jnp.uint8, 2: jnp.uint16}.get(vector.dtype.itemsize, jnp.uint32)
        words = vector.reshape(-1).view(width).astype(jnp.uint32)
        hashes = hashed(words, jax.lax.iota(jnp.uint32, words.size) + jnp.uint32(position))
        position += words.size
        # Both sums in one reduction: the weights are read once.
        sums = add(sums, jax.lax.reduce(hashes, (jnp.uint32(0), jnp.uint32(0)), add, (0,)))
    return jnp.stack(sums)


def add(left: Sequence[Array], right: Sequence[Array]) -> tuple[Array, Array]:
    return left[0] + right[0], left[1] + right[1]


def hashed(words: Array, positions: Array) -> tuple[Array, Array]:
    """Two hashes of every word and its position; the second is no multiple of the first, so it says something new."""
    words = words + positions * jnp.uint32(0x9E3779B1)
    words = (words ^ (words >> 15)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 12)) * jnp.uint32(0xC2B2AE35)
    return words, words ^ (words >> 15)
