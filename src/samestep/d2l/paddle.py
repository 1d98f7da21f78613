"""The chapters' `d2l` for Paddle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import paddle
from paddle import nn

from samestep.d2l.names import Functions, Names, Taught
from samestep.devices import Device

Tensor = Any


class Module(Taught, nn.Layer):
    """A model of the chapters."""


class Paddle(Names):
    Module = Module
    _framework, _loader, _no_grad, _seed = "paddle", "set_state_dict", paddle.no_grad, staticmethod(paddle.seed)
    _functions = Functions(normal=paddle.normal, arange=paddle.arange, zeros=paddle.zeros, ones=paddle.ones)

    def _native(self, device: Device) -> Any:
        return paddle.CPUPlace() if device.kind == "cpu" else paddle.CUDAPlace(device.index)

    def _device(self, native: Any) -> Device:
        return Device("cuda", native.get_device_id()) if isinstance(native, paddle.CUDAPlace) else Device("cpu")

    def loss(self, y_hat: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(y_hat, y, reduction="none").flatten()

    def _gradients(self, net: Any, loss: Any, params: Sequence[Tensor], X: Tensor, y: Tensor) -> Sequence[Tensor]:
        return paddle.grad(loss(net(X, params), y).sum(), list(params))


names = Paddle()
__getattr__, __dir__ = partial(getattr, names), names.__dir__
