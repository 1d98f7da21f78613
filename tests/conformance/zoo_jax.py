"""The models of the conformance suite in JAX, small enough for many fits."""

import flax.linen as nn

from samestep.backends.jax_replica import JaxReplica as Replica  # noqa: F401
from samestep.models import jax as models


def lenet():
    return models.lenet()


def lenet_modern():
    return models.lenet_modern()


def mlp_with_dropout():
    return models.mlp((784, 32, 10), dropout=0.5)


def resnet_with_batch_norm():
    return models.resnet18(width=4)


class Words(nn.Module):
    """An embedding, averaged: its gradient is a scatter-add. A flax module, whose weights are made from the first example."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.Embed(50, 8)(x).mean(1))


def embedding():
    return Words()
