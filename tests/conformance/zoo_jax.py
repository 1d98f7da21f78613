"""The models of the conformance suite in JAX, small enough for many fits."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from samestep.backends.jax.replica import JaxReplica as Replica  # noqa: F401
from samestep.models import jax as models


def lenet():
    return models.lenet()


def lenet_modern():
    return models.lenet_modern()


def mlp_with_dropout():
    return models.mlp((784, 32, 10), dropout=0.5)


def resnet_with_batch_norm():
    return models.resnet18(width=4)


def small(w, state, x, key, train):
    """Convolution, batch norm, dropout and a dense layer."""
    x = jax.lax.conv_general_dilated(x, w["filters"], (4, 4), "VALID")
    here = {"mean": x.mean((0, 2, 3)), "variance": x.var((0, 2, 3))}
    mean, variance = (here if train else state).values()
    x = jax.nn.relu((x - mean[:, None, None]) / jnp.sqrt(variance + 1e-5)[:, None, None]).reshape(len(x), -1)
    if train:
        x = jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0)
        state = {name: 0.9 * state[name] + 0.1 * here[name] for name in here}
    return x @ w["dense"], state


def small_with_batch_norm():
    draw = np.random.default_rng(0).standard_normal
    weights = {"filters": draw((4, 1, 5, 5), np.float32) / 5, "dense": draw((144, 10), np.float32) / 12}
    return models.Pair(small, weights, {"mean": jnp.zeros(4), "variance": jnp.ones(4)})


class Words(nn.Module):
    """An embedding, averaged: its gradient is a scatter-add. A flax module, whose weights are made from the first example."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.Embed(50, 8)(x).mean(1))


def embedding():
    return Words()
