"""A training loop as a user of JAX and optax writes it: data on the device, one jitted step, its memory reused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from samestep.models.jax import Pair


def loop(model: Any, x: np.ndarray, y: np.ndarray, batch: int, rate: float) -> Callable[[int], None]:
    """A function that makes so many steps of SGD on a samestep.models.jax.Pair, and waits for the last."""
    examples, labels = jnp.asarray(x), jnp.asarray(y, jnp.int32)
    optimizer = optax.sgd(rate)
    random = np.random.default_rng(0)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(Pair(model.apply, params)(x), y).mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, examples: jax.Array, labels: jax.Array, index: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, examples[index], labels[index])
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    params = jax.tree.map(jnp.copy, model.params)
    state = optimizer.init(params)

    def go(steps: int) -> None:
        nonlocal params, state
        order = random.permutation(len(x)).astype(np.int32)
        for i in range(steps):
            start = i * batch % len(x)
            params, state, value = step(params, state, examples, labels, order[start : start + batch])
        value.block_until_ready()

    return go
