"""The chapters' `d2l` for PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samestep.d2l.names import Functions, Names, Taught
from samestep.devices import Device


class Module(Taught, nn.Module):
    """A model of the chapters."""


class Torch(Names):
    Module = Module
    _framework, _loader, _no_grad, _seed = "torch", "load_state_dict", torch.no_grad, staticmethod(torch.manual_seed)
    _functions = Functions(normal=torch.normal, arange=torch.arange, zeros=torch.zeros, ones=torch.ones)

    def _native(self, device: Device) -> torch.device:
        return torch.device(str(device))

    def _device(self, native: Any) -> Device:
        return Device.of(native)

    def loss(self, y_hat: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(y_hat, y, reduction="none")

    def _gradients(self, net: Any, loss: Any, params: Sequence[Tensor], X: Tensor, y: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(loss(net(X, params), y).sum(), params)


names = Torch()
__getattr__, __dir__ = partial(getattr, names), names.__dir__
