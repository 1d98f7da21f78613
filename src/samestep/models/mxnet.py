"""The models of the chapters in MXNet.

Names and layouts of weights are those of every framework here, so that they move between frameworks as they are. MXNet's own
batch norm calls its weights otherwise, and takes the biased variance into its running statistics: hence `Norm`. That one is
a Block, as a graph of MXNet cannot write to an array; all models but ResNet-18 are HybridBlocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import mxnet as mx
from mxnet import autograd, nd
from mxnet.gluon import Block, HybridBlock, nn

from samestep import models
from samestep.errors import Invalid

Array = Any


def _start(model: Block, weights: models.Weights) -> Block:
    model.initialize(mx.init.Zero())  # drawing the weights would only move MXNet's generator
    parameters = model._collect_params_with_prefix()
    rest = parameters.keys() - weights.keys()
    assert all("running" in name or "tracked" in name for name in rest), rest
    for name, weight in weights.items():
        parameters[name].set_data(nd.array(weight))
    return model


class Norm(Block):
    """Batch norm over (batch, height, width), with the running variance unbiased as in the other frameworks."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        state = {"grad_req": "null", "differentiable": False}
        self.weight = self.params.get("weight", shape=(channels,), init="ones")
        self.bias = self.params.get("bias", shape=(channels,), init="zeros")
        self.running_mean = self.params.get("running_mean", shape=(channels,), init="zeros", **state)
        self.running_var = self.params.get("running_var", shape=(channels,), init="ones", **state)
        # MXNet's arrays have at least one dimension
        self.num_batches_tracked = self.params.get("tracked", shape=(1,), dtype="int64", init="zeros", **state)

    def forward(self, x: Array) -> Array:
        weight, bias, mean, var, tracked = (p.data(x.context) for p in self._reg_params.values())
        settings = {"eps": 1e-5, "fix_gamma": False}
        if not autograd.is_training():
            return nd.BatchNorm(x, weight, bias, mean, var, use_global_stats=True, **settings)
        # with a momentum of 1 MXNet's own update of the statistics, in the backward pass, changes nothing
        y, here, scale = nd.BatchNorm(x, weight, bias, mean, var, momentum=1, output_mean_var=True, **settings)
        count = x.shape[0] * x.shape[2] * x.shape[3]
        with autograd.pause():
            spread = 1 / (scale * scale) - 1e-5  # scale is 1 / √(variance + ε)
            mean *= 0.9
            mean += here * 0.1
            var *= 0.9
            var += spread * (0.1 * count / max(count - 1, 1))
            tracked += 1
        return y


def _conv(inner: int, out: int, size: int, padding: int = 0, stride: int = 1, bias: bool = True) -> nn.Conv2D:
    return nn.Conv2D(out, size, stride, padding, in_channels=inner, use_bias=bias)


def _dense(inner: int, out: int) -> nn.Dense:
    return nn.Dense(out, in_units=inner)


def _pool(F: Any, x: Array, kind: str, size: int = 2, padding: int = 0) -> Array:
    return F.Pooling(x, kernel=(size, size), stride=(2, 2), pad=(padding, padding), pool_type=kind)


class LeNet(HybridBlock):
    """Convolution, ReLU, average-pool, twice; then two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = _conv(1, 20, 3), _conv(20, 50, 5)
        self.dense1, self.dense2 = _dense(800, 128), _dense(128, 10)

    def hybrid_forward(self, F: Any, x: Array) -> Array:
        x = _pool(F, F.relu(self.conv1(x)), "avg")
        x = _pool(F, F.relu(self.conv2(x)), "avg")
        return self.dense2(F.relu(self.dense1(x)))


class LeNetModern(HybridBlock):
    """LeNet with ReLU and max-pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = _conv(1, 6, 5, padding=2), _conv(6, 16, 5)
        self.dense1, self.dense2, self.dense3 = _dense(400, 120), _dense(120, 84), _dense(84, 10)

    def hybrid_forward(self, F: Any, x: Array) -> Array:
        x = _pool(F, F.relu(self.conv1(x)), "max")
        x = _pool(F, F.relu(self.conv2(x)), "max")
        return self.dense3(F.relu(self.dense2(F.relu(self.dense1(x)))))


class MLP(HybridBlock):
    """Dense layers with ReLU and dropout between them."""

    def __init__(self, sizes: tuple[int, ...], dropout: float) -> None:
        super().__init__()
        self.depth, self.dropout = len(sizes) - 1, dropout
        for i, (inner, out) in enumerate(pairwise(sizes), 1):
            setattr(self, f"dense{i}", _dense(inner, out))

    def hybrid_forward(self, F: Any, x: Array) -> Array:
        for i in range(1, self.depth):
            x = F.Dropout(F.relu(getattr(self, f"dense{i}")(x)), p=self.dropout)
        return getattr(self, f"dense{self.depth}")(x)


class Residual(Block):
    """Two convolutions with batch norm, added to their input."""

    def __init__(self, inner: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inner, out, 3, padding=1, stride=stride, bias=False)
        self.conv2 = _conv(out, out, 3, padding=1, bias=False)
        self.norm1, self.norm2 = Norm(out), Norm(out)
        self.projects = inner != out
        if self.projects:
            self.conv3, self.norm3 = _conv(inner, out, 1, stride=stride, bias=False), Norm(out)

    def forward(self, x: Array) -> Array:
        y = self.norm2(self.conv2(nd.relu(self.norm1(self.conv1(x)))))
        return nd.relu(y + (self.norm3(self.conv3(x)) if self.projects else x))


class Stage(Block):
    """Residual blocks, one after the other; the first may halve the image."""

    def __init__(self, inner: int, out: int, stride: int) -> None:
        super().__init__()
        self.block1, self.block2 = Residual(inner, out, stride), Residual(out, out, 1)

    def forward(self, x: Array) -> Array:
        return self.block2(self.block1(x))


class ResNet18(Block):
    """Eight residual blocks in four stages."""

    def __init__(self, channels: int, classes: int, width: int) -> None:
        super().__init__()
        self.conv, self.norm = _conv(channels, width, 7, padding=3, stride=2, bias=False), Norm(width)
        self.stage1, self.stage2 = Stage(width, width, 1), Stage(width, 2 * width, 2)
        self.stage3, self.stage4 = Stage(2 * width, 4 * width, 2), Stage(4 * width, 8 * width, 2)
        self.dense = _dense(8 * width, classes)

    def forward(self, x: Array) -> Array:
        x = _pool(nd, nd.relu(self.norm(self.conv(x))), "max", 3, 1)
        x = self.stage4(self.stage3(self.stage2(self.stage1(x))))
        return self.dense(x.mean(axis=(2, 3)))


def lenet_function(x: Array, params: Sequence[Array]) -> Array:
    """LeNet of the multi-device chapter, as a function of a list of parameters (models.lenet_params), all of mxnet.np."""
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    for weight, bias in ((W1, b1), (W2, b2)):
        x = mx.npx.relu(mx.npx.convolution(x, weight, bias, kernel=weight.shape[2:], num_filter=len(weight)))
        x = mx.npx.pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="avg")
    return mx.np.dot(mx.npx.relu(mx.np.dot(x.reshape(x.shape[0], -1), W3) + b3), W4) + b4


def lenet(seed: int = 0) -> Block:
    """LeNet of the multi-device chapter."""
    return _start(LeNet(), models.lenet(seed))


def lenet_modern(seed: int = 0) -> Block:
    """LeNet of the schedule chapter."""
    return _start(LeNetModern(), models.lenet_modern(seed))


def mlp(sizes: tuple[int, ...] = (784, 256, 10), dropout: float = 0.5, seed: int = 0) -> Block:
    """Dense layers of the given sizes with dropout between them."""
    if len(sizes) < 2:
        raise Invalid(f"mlp: sizes must name at least an input and an output size, got sizes={sizes}")
    if not 0 <= dropout < 1:
        raise Invalid(f"mlp: dropout must be at least 0 and below 1, got dropout={dropout}")
    return _start(MLP(tuple(sizes), dropout), models.mlp(tuple(sizes), seed))


def resnet18(channels: int = 1, classes: int = 10, width: int = 64, seed: int = 0) -> Block:
    """ResNet-18 with `width` channels in its first stage."""
    return _start(ResNet18(channels, classes, width), models.resnet18(channels, classes, width, seed))
