"""The models of the chapters in Paddle.

Names and layouts of weights are those of every framework here, so that they move between frameworks as they are. Paddle's own
dense layer keeps its weight as (in, out), and its batch norm calls its statistics otherwise: hence `Dense` and `Norm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from samestep import models
from samestep.errors import Invalid

# Weights are about to be loaded: drawing them would only move Paddle's generator.
ZEROS = nn.initializer.Constant(0.0)


def _start(model: nn.Layer, weights: models.Weights) -> nn.Layer:
    state = model.state_dict()
    rest = state.keys() - weights.keys()
    assert all("running" in name or "tracked" in name for name in rest), rest
    for name, weight in weights.items():
        state[name].set_value(weight)
    return model


class Dense(nn.Layer):
    """x Wᵀ + b, with W as (out, in)."""

    def __init__(self, inner: int, out: int) -> None:
        super().__init__()
        self.weight = self.create_parameter([out, inner], default_initializer=ZEROS)
        self.bias = self.create_parameter([out], is_bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return paddle.matmul(x, self.weight, transpose_y=True) + self.bias


class Norm(nn.Layer):
    """Batch norm over (batch, height, width), with the running variance unbiased as in the other frameworks."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        ones = nn.initializer.Constant(1.0)
        self.weight = self.create_parameter([channels], default_initializer=ones)
        self.bias = self.create_parameter([channels], is_bias=True)
        self.register_buffer("running_mean", paddle.zeros([channels]))
        self.register_buffer("running_var", paddle.ones([channels]))
        self.register_buffer("num_batches_tracked", paddle.zeros([], "int64"))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)
        # with a momentum of 0 Paddle leaves the batch's own statistics where it would keep the running ones
        mean, var = paddle.zeros_like(self.running_mean), paddle.zeros_like(self.running_var)
        y = F.batch_norm(x, mean, var, self.weight, self.bias, training=True, momentum=0.0)
        count = x.shape[0] * x.shape[2] * x.shape[3]
        with paddle.no_grad():
            paddle.assign(self.running_mean * 0.9 + mean * 0.1, self.running_mean)
            paddle.assign(self.running_var * 0.9 + var * (0.1 * count / max(count - 1, 1)), self.running_var)
            paddle.assign(self.num_batches_tracked + 1, self.num_batches_tracked)
        return y


def _conv(inner: int, out: int, size: int, padding: int = 0, stride: int = 1, bias: bool = True) -> nn.Layer:
    options = {"weight_attr": ZEROS, "bias_attr": None if bias else False}
    return nn.Conv2D(inner, out, size, stride=stride, padding=padding, **options)


class LeNet(nn.Layer):
    """Convolution, ReLU, average-pool, twice; then two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = _conv(1, 20, 3), _conv(20, 50, 5)
        self.dense1, self.dense2 = Dense(800, 128), Dense(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(F.relu(self.conv1(x)), 2)
        x = F.avg_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.dense1(x.flatten(1)))
        return self.dense2(x)


class LeNetModern(nn.Layer):
    """LeNet with ReLU and max-pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = _conv(1, 6, 5, padding=2), _conv(6, 16, 5)
        self.dense1, self.dense2, self.dense3 = Dense(400, 120), Dense(120, 84), Dense(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.dense1(x.flatten(1)))
        return self.dense3(F.relu(self.dense2(x)))


class MLP(nn.Layer):
    """Dense layers with ReLU and dropout between them."""

    def __init__(self, sizes: tuple[int, ...], dropout: float) -> None:
        super().__init__()
        self.depth, self.dropout = len(sizes) - 1, dropout
        for i, (inner, out) in enumerate(pairwise(sizes), 1):
            self.add_sublayer(f"dense{i}", Dense(inner, out))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for i in range(1, self.depth):
            x = F.dropout(F.relu(getattr(self, f"dense{i}")(x)), self.dropout, training=self.training)
        return getattr(self, f"dense{self.depth}")(x)


class Residual(nn.Layer):
    """Two convolutions with batch norm, added to their input."""

    def __init__(self, inner: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inner, out, 3, padding=1, stride=stride, bias=False)
        self.conv2 = _conv(out, out, 3, padding=1, bias=False)
        self.norm1, self.norm2 = Norm(out), Norm(out)
        self.projects = inner != out
        if self.projects:
            self.conv3, self.norm3 = _conv(inner, out, 1, stride=stride, bias=False), Norm(out)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + (self.norm3(self.conv3(x)) if self.projects else x))


class ResNet18(nn.Layer):
    """Eight residual blocks in four stages."""

    def __init__(self, channels: int, classes: int, width: int) -> None:
        super().__init__()
        self.conv, self.norm = _conv(channels, width, 7, padding=3, stride=2, bias=False), Norm(width)
        inner = width
        for stage in range(4):
            out = width << stage
            blocks = nn.Sequential()
            for block in range(2):
                blocks.add_sublayer(f"block{block + 1}", Residual(inner, out, 2 if stage and not block else 1))
                inner = out
            self.add_sublayer(f"stage{stage + 1}", blocks)
        self.dense = Dense(inner, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 3, stride=2, padding=1)
        x = self.stage4(self.stage3(self.stage2(self.stage1(x))))
        return self.dense(x.mean([2, 3]))


def lenet_function(x: Tensor, params: Sequence[Tensor]) -> Tensor:
    """LeNet of the multi-device chapter, as a function of a list of parameters (models.lenet_params)."""
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    for weight, bias in ((W1, b1), (W2, b2)):
        x = F.avg_pool2d(F.relu(F.conv2d(x, weight, bias)), 2, 2)
    return F.relu(x.flatten(1) @ W3 + b3) @ W4 + b4


def lenet(seed: int = 0) -> nn.Layer:
    """LeNet of the multi-device chapter."""
    return _start(LeNet(), models.lenet(seed))


def lenet_modern(seed: int = 0) -> nn.Layer:
    """LeNet of the schedule chapter."""
    return _start(LeNetModern(), models.lenet_modern(seed))


def mlp(sizes: tuple[int, ...] = (784, 256, 10), dropout: float = 0.5, seed: int = 0) -> nn.Layer:
    """Dense layers of the given sizes with dropout between them."""
    if len(sizes) < 2:
        raise Invalid(f"mlp: sizes must name at least an input and an output size, got sizes={sizes}")
    if not 0 <= dropout < 1:
        raise Invalid(f"mlp: dropout must be at least 0 and below 1, got dropout={dropout}")
    return _start(MLP(tuple(sizes), dropout), models.mlp(tuple(sizes), seed))


def resnet18(channels: int = 1, classes: int = 10, width: int = 64, seed: int = 0) -> nn.Layer:
    """ResNet-18 with `width` channels in its first stage."""
    return _start(ResNet18(channels, classes, width), models.resnet18(channels, classes, width, seed))
