"""The models of the conformance suite in TensorFlow, small enough for many fits."""

import keras

from samestep.backends.tensorflow.replica import TensorflowReplica as Replica  # noqa: F401
from samestep.models import tensorflow as models


def lenet():
    return models.lenet()


def lenet_modern():
    return models.lenet_modern()


def mlp_with_dropout():
    return models.mlp((784, 32, 10), dropout=0.5)


def resnet_with_batch_norm():
    return models.resnet18(width=4)


def small_with_batch_norm():
    """Convolution, batch norm, dropout and a dense layer."""
    layers, (one, two) = keras.layers, (keras.initializers.GlorotUniform(seed) for seed in (1, 2))
    return keras.Sequential([
        keras.Input((1, 28, 28)), layers.Permute((2, 3, 1)), layers.Conv2D(4, 5, 4, kernel_initializer=one),
        layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.3), layers.Flatten(),
        layers.Dense(10, kernel_initializer=two),
    ])  # fmt: skip


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
