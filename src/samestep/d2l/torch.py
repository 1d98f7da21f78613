"""The chapters' `d2l` for PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samestep.d2l.names import Names, Taught, door
from samestep.devices import Device


class Module(Taught, nn.Module):
    """A model of the chapters."""


class Torch(Names):
    Module = Module
    normal, arange, zeros, ones, tensor = map(
        staticmethod, (torch.normal, torch.arange, torch.zeros, torch.ones, torch.tensor)
    )
    _framework, _loader = "torch", "load_state_dict"
    _no_grad, _seed = torch.no_grad, staticmethod(torch.manual_seed)
    _zero = staticmethod(lambda parameter: parameter.grad.zero_())

    def _native(self, device: Device) -> torch.device:
        return torch.device(str(device))

    def _device(self, native: Any) -> Device:
        return Device.of(native)

    def loss(self, y_hat: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(y_hat, y, reduction="none")

    def _gradients(self, net: Any, loss: Any, params: Sequence[Tensor], X: Tensor, y: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(loss(net(X, params), y).sum(), params)


names = Torch()
__getattr__, __dir__ = door(names)
