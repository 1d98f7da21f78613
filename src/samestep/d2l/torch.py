"""The chapters' `d2l` for PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.d2l.names import HyperParameters, Names, ProgressBoard, door
from samestep.devices import Device
from samestep.runs.run import Run


class Module(nn.Module, HyperParameters):
    """A model of the chapters: a `net`, a rate `lr`, and a `board`."""

    def __init__(self) -> None:
        super().__init__()
        self.board = ProgressBoard()

    def forward(self, X: Tensor) -> Tensor:
        return self.net(X)


class Torch(Names):
    framework = "torch"
    Module = Module
    normal, arange = staticmethod(torch.normal), staticmethod(torch.arange)
    zeros, ones, rand, tensor = map(staticmethod, (torch.zeros, torch.ones, torch.rand, torch.tensor))

    def native(self, device: Device) -> torch.device:
        return torch.device(str(device))

    def device(self, native: Any) -> Device:
        return Device.of(native)

    def accuracy(self, y_hat: Tensor, y: Tensor) -> Tensor:
        return ((y_hat.argmax(1) if y_hat.ndim > 1 else y_hat) == y).sum().float()

    @contextmanager
    def evaluating(self, net: Any) -> Iterator[Any]:
        modes = [(part, part.training) for part in net.modules()] if isinstance(net, nn.Module) else []
        home = next((p.device for p in net.parameters()), None) if modes else None
        for part, _ in modes:
            part.training = False
        with torch.no_grad():
            yield home
        for part, mode in modes:
            part.training = mode

    def lenet(self, X: Tensor, params: Sequence[Tensor]) -> Tensor:
        W1, b1, W2, b2, W3, b3, W4, b4 = params
        for weight, bias in ((W1, b1), (W2, b2)):
            X = F.avg_pool2d(F.relu(F.conv2d(X, weight, bias)), 2)
        return F.relu(X.flatten(1) @ W3 + b3) @ W4 + b4

    def loss(self, y_hat: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(y_hat, y, reduction="none")

    def gradients(self, net: Any, loss: Any, params: Sequence[Tensor], X: Tensor, y: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(loss(net(X, params), y).sum(), params)

    def sgd(self, params: list[Tensor], *rest: Any) -> None:
        with torch.no_grad():
            super().sgd(params, *rest)
            for p in params:
                p.grad = None if p.grad is None else p.grad.zero_()

    def take(self, model: nn.Module, run: Run) -> None:
        model.load_state_dict(run.state_dict())

    def manual_seed(self, seed: int) -> None:
        super().manual_seed(seed)
        torch.manual_seed(seed)


names = Torch()
__getattr__, __dir__ = door(names)
