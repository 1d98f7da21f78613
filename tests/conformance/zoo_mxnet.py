"""The models of the conformance suite in MXNet, small enough for many fits."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # MXNet uses names that NumPy has deprecated
    import mxnet as mx

from mxnet.gluon import HybridBlock, nn

from samestep.backends.mxnet.replica import MxnetReplica as Replica  # noqa: F401
from samestep.models import mxnet as models


def lenet():
    return models.lenet()


def lenet_modern():
    return models.lenet_modern()


def mlp_with_dropout():
    return models.mlp((784, 32, 10), dropout=0.5)


def resnet_with_batch_norm():
    return models.resnet18(width=4)


class Words(HybridBlock):
    """An embedding, averaged: its gradient is a scatter-add."""

    def __init__(self):
        super().__init__()
        self.embedding, self.dense = nn.Embedding(50, 8), nn.Dense(10, in_units=8)

    def hybrid_forward(self, F, x):
        return self.dense(F.mean(self.embedding(x), axis=1))


def embedding():
    mx.random.seed(0)
    model = Words()
    model.initialize()
    return model
