"""The chapters' `d2l` for Paddle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn

from samestep.d2l.names import HyperParameters, Names, ProgressBoard, door
from samestep.devices import Device
from samestep.runs.run import Run

Tensor = Any


class Module(nn.Layer, HyperParameters):
    """A model of the chapters: a `net`, a rate `lr`, and a `board`."""

    def __init__(self) -> None:
        super().__init__()
        self.board = ProgressBoard()

    def forward(self, X: Tensor) -> Tensor:
        return self.net(X)


class Paddle(Names):
    framework = "paddle"
    Module = Module
    normal, arange, zeros, ones, tensor = map(
        staticmethod, (paddle.normal, paddle.arange, paddle.zeros, paddle.ones, paddle.to_tensor)
    )

    def native(self, device: Device) -> Any:
        return paddle.CPUPlace() if device.kind == "cpu" else paddle.CUDAPlace(device.index)

    def device(self, native: Any) -> Device:
        return Device("cuda", native.get_device_id()) if isinstance(native, paddle.CUDAPlace) else Device("cpu")

    def accuracy(self, y_hat: Tensor, y: Tensor) -> Tensor:
        return ((y_hat.argmax(1) if y_hat.ndim > 1 else y_hat) == y.flatten()).astype("float32").sum()

    @contextmanager
    def evaluating(self, net: Any) -> Iterator[Any]:
        modes = [(part, part.training) for part in net.sublayers(True)] if isinstance(net, nn.Layer) else []
        for part, _ in modes:
            part.training = False
        with paddle.no_grad():
            yield None
        for part, mode in modes:
            part.training = mode

    def lenet(self, X: Tensor, params: Sequence[Tensor]) -> Tensor:
        W1, b1, W2, b2, W3, b3, W4, b4 = params
        for weight, bias in ((W1, b1), (W2, b2)):
            X = F.avg_pool2d(F.relu(F.conv2d(X, weight, bias)), 2, 2)
        return F.relu(X.flatten(1) @ W3 + b3) @ W4 + b4

    def loss(self, y_hat: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(y_hat, y, reduction="none").flatten()

    def gradients(self, net: Any, loss: Any, params: Sequence[Tensor], X: Tensor, y: Tensor) -> Sequence[Tensor]:
        return paddle.grad(loss(net(X, params), y).sum(), list(params))

    def sgd(self, params: list[Tensor], *rest: Any) -> None:
        with paddle.no_grad():
            super().sgd(params, *rest)
        for p in params:
            p.clear_gradient()

    def take(self, model: nn.Layer, run: Run) -> None:
        model.set_state_dict(run.state_dict())

    def manual_seed(self, seed: int) -> None:
        super().manual_seed(seed)
        paddle.seed(seed)


names = Paddle()
__getattr__, __dir__ = door(names)
