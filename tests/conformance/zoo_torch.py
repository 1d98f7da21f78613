"""The models of the conformance suite in PyTorch, small enough for many fits."""

import torch
from torch import nn

from samestep.backends.torch.replica import TorchReplica as Replica  # noqa: F401
from samestep.models import torch as models


def lenet():
    return models.lenet()


def lenet_modern():
    return models.lenet_modern()


def mlp_with_dropout():
    return models.mlp((784, 32, 10), dropout=0.5)


def resnet_with_batch_norm():
    return models.resnet18(width=4)


class Words(nn.Module):
    """An embedding, averaged: its gradient is a scatter-add."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.dense = nn.Embedding(50, 8), nn.Linear(8, 10)

    def forward(self, x):
        return self.dense(self.embedding(x).mean(1))


def embedding():
    return Words()
