"""The models of the conformance suite in Paddle, small enough for many fits."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that there is no ccache
    import paddle

from paddle import nn

from samestep.backends.paddle.replica import PaddleReplica as Replica  # noqa: F401
from samestep.models import paddle as models


def lenet():
    return models.lenet()


def lenet_modern():
    return models.lenet_modern()


def mlp_with_dropout():
    return models.mlp((784, 32, 10), dropout=0.5)


def resnet_with_batch_norm():
    return models.resnet18(width=4)


class Words(nn.Layer):
    """An embedding, averaged: its gradient is a scatter-add."""

    def __init__(self):
        super().__init__()
        paddle.seed(0)
        self.embedding, self.dense = nn.Embedding(50, 8), nn.Linear(8, 10)

    def forward(self, x):
        return self.dense(self.embedding(x).mean(1))


def embedding():
    return Words()
