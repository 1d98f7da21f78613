"""The models of the chapters in TensorFlow.

Each is a keras.Model that keeps its weights under the names and in the layouts of every framework here (convolutions as
(out, in, height, width), dense layers as (out, in)), so the weights move between frameworks as they are. TensorFlow computes
on the CPU with channels last: examples and filters are transposed on the way in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import samestep.backends.tensorflow.backend  # noqa: F401  (it must be there before TensorFlow starts its threads)

# isort: split
import keras
import tensorflow as tf

from samestep import models
from samestep.errors import Invalid

Tensor = Any
registered: Callable[[type], type] = keras.saving.register_keras_serializable(package="samestep")


class Named(keras.Model):
    """A model whose weights have the names and shapes of a dictionary of NumPy arrays, and are zero until they are loaded.

    `arguments` are those that it was made from, for Keras to make another one.
    """

    def __init__(self, weights: models.Weights, arguments: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._arguments = arguments or {}
        self.w = {name: self.add_weight(shape=array.shape, initializer="zeros", name=name)
                  for name, array in weights.items()}  # fmt: skip
        self.built = True

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self._arguments}

    def load(self, weights: models.Weights) -> Named:
        for name, array in weights.items():
            self.w[name].assign(array)
        return self

    def conv(self, name: str, x: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
        pads = [[0, 0], [padding, padding], [padding, padding], [0, 0]]
        filters = tf.transpose(self.w[f"{name}.weight"], (2, 3, 1, 0))
        y = tf.nn.conv2d(x, filters, stride, pads if padding else "VALID")
        return tf.nn.bias_add(y, self.w[f"{name}.bias"].value) if f"{name}.bias" in self.w else y

    def dense(self, name: str, x: Tensor) -> Tensor:
        return tf.matmul(x, self.w[f"{name}.weight"], transpose_b=True) + self.w[f"{name}.bias"]


def channels_last(x: Tensor) -> Tensor:
    return tf.transpose(x, (0, 2, 3, 1))


def channels_first(x: Tensor) -> Tensor:
    return tf.transpose(x, (0, 3, 1, 2))


def rows(x: Tensor) -> Tensor:
    """One row per example."""
    return tf.reshape(x, (-1, prod(x.shape[1:])))


@registered
class LeNet(Named):
    """Convolution, ReLU, average-pool, twice; then two dense layers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(models.lenet(), **options)

    def call(self, x: Tensor) -> Tensor:
        x = tf.nn.avg_pool2d(tf.nn.relu(self.conv("conv1", channels_last(x))), 2, 2, "VALID")
        x = tf.nn.avg_pool2d(tf.nn.relu(self.conv("conv2", x)), 2, 2, "VALID")
        return self.dense("dense2", tf.nn.relu(self.dense("dense1", rows(channels_first(x)))))


@registered
class LeNetModern(Named):
    """LeNet with ReLU and max-pooling."""

    def __init__(self, **options: Any) -> None:
        super().__init__(models.lenet_modern(), **options)

    def call(self, x: Tensor) -> Tensor:
        x = tf.nn.max_pool2d(tf.nn.relu(self.conv("conv1", channels_last(x), padding=2)), 2, 2, "VALID")
        x = tf.nn.max_pool2d(tf.nn.relu(self.conv("conv2", x)), 2, 2, "VALID")
        x = tf.nn.relu(self.dense("dense1", rows(channels_first(x))))
        return self.dense("dense3", tf.nn.relu(self.dense("dense2", x)))


@registered
class MLP(Named):
    """Dense layers with ReLU and dropout between them."""

    def __init__(self, sizes: tuple[int, ...], dropout: float, **options: Any) -> None:
        super().__init__(models.mlp(tuple(sizes)), {"sizes": list(sizes), "dropout": dropout}, **options)
        self.depth, self.dropout = len(sizes) - 1, dropout
        self.noise = keras.random.SeedGenerator(0)

    def call(self, x: Tensor, training: bool = False) -> Tensor:
        x = rows(x)
        for i in range(1, self.depth):
            x = tf.nn.relu(self.dense(f"dense{i}", x))
            if training and self.dropout:
                x = keras.random.dropout(x, self.dropout, seed=self.noise)
        return self.dense(f"dense{self.depth}", x)


@registered
class ResNet18(Named):
    """ResNet-18, with batch norm: running statistics as PyTorch has them."""

    def __init__(self, channels: int, classes: int, width: int, **options: Any) -> None:
        weights = models.resnet18(channels, classes, width)
        super().__init__(weights, {"channels": channels, "classes": classes, "width": width}, **options)
        for name, array in weights.items():
            layer = name.removesuffix(".weight")
            if array.ndim == 1 and layer != name:  # of the weights, only those of norms are vectors
                for kind, start in (("running_mean", "zeros"), ("running_var", "ones")):
                    self.w[f"{layer}.{kind}"] = self.add_weight(
                        shape=array.shape, initializer=start, trainable=False, name=f"{layer}.{kind}"
                    )
                counter = f"{layer}.num_batches_tracked"
                self.w[counter] = self.add_weight(
                    shape=(), initializer="zeros", dtype="int64", trainable=False, name=counter
                )

    def norm(self, name: str, x: Tensor, training: bool) -> Tensor:
        mean, var = (self.w[f"{name}.{kind}"] for kind in ("running_mean", "running_var"))
        here, spread = tf.nn.moments(x, (0, 1, 2)) if training else (mean.value, var.value)
        if training:
            n = tf.cast(tf.size(x) // x.shape[-1], x.dtype)
            mean.assign(mean * 0.9 + here * 0.1)
            var.assign(var * 0.9 + spread * (0.1 * n / (n - 1)))  # running statistics take the variance with n - 1
            self.w[f"{name}.num_batches_tracked"].assign_add(1)
        weight, bias = (self.w[f"{name}.{kind}"].value for kind in ("weight", "bias"))
        # Not TensorFlow's fused operation: that has other bits on other CPUs.
        return tf.nn.batch_normalization(x, here, spread, bias, weight, 1e-5)

    def residual(self, name: str, x: Tensor, stride: int, training: bool) -> Tensor:
        y = tf.nn.relu(self.norm(f"{name}.norm1", self.conv(f"{name}.conv1", x, stride, 1), training))
        y = self.norm(f"{name}.norm2", self.conv(f"{name}.conv2", y, 1, 1), training)
        if f"{name}.conv3.weight" in self.w:
            x = self.norm(f"{name}.norm3", self.conv(f"{name}.conv3", x, stride), training)
        return tf.nn.relu(y + x)

    def call(self, x: Tensor, training: bool = False) -> Tensor:
        x = tf.nn.relu(self.norm("norm", self.conv("conv", channels_last(x), 2, 3), training))
        x = tf.nn.max_pool2d(x, 3, 2, [[0, 0], [1, 1], [1, 1], [0, 0]])
        for stage in range(1, 5):
            for block in (1, 2):
                stride = 2 if stage > 1 and block == 1 else 1
                x = self.residual(f"stage{stage}.block{block}", x, stride, training)
        return self.dense("dense", tf.reduce_mean(x, (1, 2)))


def lenet_function(x: Tensor, params: Sequence[Tensor]) -> Tensor:
    """LeNet of the multi-device chapter, as a function of a list of parameters (models.lenet_params). Channels are last."""
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    for weight, bias in ((W1, b1), (W2, b2)):
        x = tf.nn.relu(tf.nn.conv2d(x, tf.transpose(weight, (2, 3, 1, 0)), 1, "VALID") + bias)
        x = tf.nn.avg_pool2d(x, 2, 2, "VALID")
    return tf.nn.relu(rows(channels_first(x)) @ W3 + b3) @ W4 + b4


def lenet(seed: int = 0) -> keras.Model:
    """LeNet of the multi-device chapter."""
    return LeNet().load(models.lenet(seed))


def lenet_modern(seed: int = 0) -> keras.Model:
    """LeNet of the schedule chapter."""
    return LeNetModern().load(models.lenet_modern(seed))


def mlp(sizes: tuple[int, ...] = (784, 256, 10), dropout: float = 0.5, seed: int = 0) -> keras.Model:
    """Dense layers of the given sizes with dropout between them."""
    if len(sizes) < 2:
        raise Invalid(f"mlp: sizes must name at least an input and an output size, got sizes={sizes}")
    if not 0 <= dropout < 1:
        raise Invalid(f"mlp: dropout must be at least 0 and below 1, got dropout={dropout}")
    return MLP(tuple(sizes), dropout).load(models.mlp(tuple(sizes), seed))


def resnet18(channels: int = 1, classes: int = 10, width: int = 64, seed: int = 0) -> keras.Model:
    """ResNet-18 with `width` channels in its first stage."""
    return ResNet18(channels, classes, width).load(models.resnet18(channels, classes, width, seed))
