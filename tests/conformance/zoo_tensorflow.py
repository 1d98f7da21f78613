"""The models of the conformance suite in TensorFlow, small enough for many fits."""

import keras

from samestep.backends.tensorflow_replica import TensorflowReplica as Replica  # noqa: F401
from samestep.models import tensorflow as models


def lenet():
    return models.lenet()


def lenet_modern():
    return models.lenet_modern()


def mlp_with_dropout():
    return models.mlp((784, 32, 10), dropout=0.5)


def resnet_with_batch_norm():
    return models.resnet18(width=4)


class Words(keras.Model):
    """An embedding, averaged: its gradient is a scatter-add. Its weights are made from the first example."""

    def __init__(self):
        super().__init__()
        start = keras.initializers.GlorotUniform
        self.embedding = keras.layers.Embedding(50, 8, embeddings_initializer=start(seed=1))
        self.dense = keras.layers.Dense(10, kernel_initializer=start(seed=2))

    def call(self, x):
        return self.dense(keras.ops.mean(self.embedding(x), 1))


def embedding():
    return Words()
