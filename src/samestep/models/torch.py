"""The models of the chapters in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep import models
from samestep.errors import Invalid


def _start(model: nn.Module, weights: models.Weights) -> nn.Module:
    missing, unknown = model.load_state_dict({k: torch.from_numpy(v) for k, v in weights.items()}, strict=False)
    assert not unknown, unknown
    assert all("running" in name or "tracked" in name for name in missing), missing
    return model


def _bare(layer: type[nn.Module], *args: int, **options: object) -> nn.Module:
    """A layer whose weights are not drawn: they are about to be loaded, and PyTorch's generator is left alone."""
    return nn.utils.skip_init(layer, *args, **options)


class LeNet(nn.Module):
    """Convolution, ReLU, average-pool, twice; then two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = _bare(nn.Conv2d, 1, 20, kernel_size=3), _bare(nn.Conv2d, 20, 50, kernel_size=5)
        self.dense1, self.dense2 = _bare(nn.Linear, 800, 128), _bare(nn.Linear, 128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(F.relu(self.conv1(x)), 2)
        x = F.avg_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.dense1(x.flatten(1)))
        return self.dense2(x)


class LeNetModern(nn.Module):
    """LeNet with ReLU and max-pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = _bare(nn.Conv2d, 1, 6, kernel_size=5, padding=2)
        self.conv2 = _bare(nn.Conv2d, 6, 16, kernel_size=5)
        self.dense1, self.dense2 = _bare(nn.Linear, 400, 120), _bare(nn.Linear, 120, 84)
        self.dense3 = _bare(nn.Linear, 84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.dense1(x.flatten(1)))
        return self.dense3(F.relu(self.dense2(x)))


class MLP(nn.Module):
    """Dense layers with ReLU and dropout between them."""

    def __init__(self, sizes: tuple[int, ...], dropout: float) -> None:
        super().__init__()
        self.depth, self.dropout = len(sizes) - 1, dropout
        for i, (inner, out) in enumerate(pairwise(sizes), 1):
            setattr(self, f"dense{i}", _bare(nn.Linear, inner, out))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for i in range(1, self.depth):
            x = F.dropout(F.relu(getattr(self, f"dense{i}")(x)), self.dropout, self.training)
        return getattr(self, f"dense{self.depth}")(x)


class Residual(nn.Module):
    """Two convolutions with batch norm, added to their input."""

    def __init__(self, inner: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _bare(nn.Conv2d, inner, out, kernel_size=3, padding=1, stride=stride, bias=False)
        self.conv2 = _bare(nn.Conv2d, out, out, kernel_size=3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        if inner != out:
            self.conv3 = _bare(nn.Conv2d, inner, out, kernel_size=1, stride=stride, bias=False)
            self.norm3 = nn.BatchNorm2d(out)
        self.projects = inner != out

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + (self.norm3(self.conv3(x)) if self.projects else x))


class ResNet18(nn.Module):
    def __init__(self, channels: int, classes: int, width: int) -> None:
        super().__init__()
        self.conv = _bare(nn.Conv2d, channels, width, kernel_size=7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(width)
        inner = width
        for stage in range(4):
            out = width << stage
            blocks = nn.Sequential()
            for block in range(2):
                blocks.add_module(f"block{block + 1}", Residual(inner, out, 2 if stage and not block else 1))
                inner = out
            self.add_module(f"stage{stage + 1}", blocks)
        self.dense = _bare(nn.Linear, inner, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 3, stride=2, padding=1)
        x = self.stage4(self.stage3(self.stage2(self.stage1(x))))
        return self.dense(x.mean((2, 3)))


def lenet_function(x: Tensor, params: Sequence[Tensor]) -> Tensor:
    """LeNet of the multi-device chapter, as a function of a list of parameters (models.lenet_params)."""
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    for weight, bias in ((W1, b1), (W2, b2)):
        x = F.avg_pool2d(F.relu(F.conv2d(x, weight, bias)), 2)
    return F.relu(x.flatten(1) @ W3 + b3) @ W4 + b4


def lenet(seed: int = 0) -> nn.Module:
    """LeNet of the multi-device chapter."""
    return _start(LeNet(), models.lenet(seed))


def lenet_modern(seed: int = 0) -> nn.Module:
    """LeNet of the schedule chapter."""
    return _start(LeNetModern(), models.lenet_modern(seed))


def mlp(sizes: tuple[int, ...] = (784, 256, 10), dropout: float = 0.5, seed: int = 0) -> nn.Module:
    """Dense layers of the given sizes with dropout between them."""
    if len(sizes) < 2:
        raise Invalid(f"mlp: sizes must name at least an input and an output size, got sizes={sizes}")
    if not 0 <= dropout < 1:
        raise Invalid(f"mlp: dropout must be at least 0 and below 1, got dropout={dropout}")
    return _start(MLP(tuple(sizes), dropout), models.mlp(tuple(sizes), seed))


def resnet18(channels: int = 1, classes: int = 10, width: int = 64, seed: int = 0) -> nn.Module:
    """ResNet-18 with `width` channels in its first stage."""
    return _start(ResNet18(channels, classes, width), models.resnet18(channels, classes, width, seed))
