"""A training loop as a user of JAX and optax writes it: data on the device, one jitted step, its memory reused, and
the loss and accuracy of the epoch, as the chapters do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from samestep.models.jax import Pair


def loop(model: Any, x: np.ndarray, y: np.ndarray, batch: int, rate: float) -> Callable[[int], tuple[float, float]]:
    """A function that makes so many steps of SGD on a samestep.models.jax.Pair, and gives mean loss and accuracy."""
    examples, labels = jnp.asarray(x), jnp.asarray(y, jnp.int32)
    optimizer = optax.sgd(rate)
    random = np.random.default_rng(0)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        y_hat = Pair(model.apply, params)(x)
        return optax.softmax_cross_entropy_with_integer_labels(y_hat, y).mean(), (y_hat.argmax(1) == y).sum()

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2, 3))
    def step(params: Any, state: Any, total: Any, hits: Any, examples: Any, labels: Any, index: Any) -> Any:
        (value, right), gradient = jax.value_and_grad(loss, has_aux=True)(params, examples[index], labels[index])
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, total + value * batch, hits + right

    params = jax.tree.map(jnp.copy, model.params)
    state = optimizer.init(params)

    def go(steps: int) -> tuple[float, float]:
        nonlocal params, state
        order = random.permutation(len(x)).astype(np.int32)
        total, hits = jnp.zeros(()), jnp.zeros((), jnp.int32)
        for i in range(steps):
            start = i * batch % len(x)
            index = order[start : start + batch]
            params, state, total, hits = step(params, state, total, hits, examples, labels, index)
        return float(total) / steps / batch, float(hits) / steps / batch

    return go
