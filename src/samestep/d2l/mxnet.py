"""The chapters' `d2l` for MXNet, with arrays of mxnet.np."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mxnet as mx
from mxnet import autograd, gluon, np, npx

from samestep.d2l.names import Functions, Names, Taught
from samestep.devices import Device
from samestep.runs.run import Run

Array = Any


class Module(Taught, gluon.nn.Block):
    """A model of the chapters."""


class MXNet(Names):
    Module = Module
    _framework, _seed = "mxnet", staticmethod(mx.random.seed)
    _functions = Functions(normal=np.random.normal, arange=np.arange, zeros=np.zeros, ones=np.ones)

    def _native(self, device: Device) -> mx.Context:
        return mx.Context("cpu" if device.kind == "cpu" else "gpu", device.index)

    def _device(self, native: mx.Context) -> Device:
        return Device.of(f"{native.device_type}:{native.device_id}")

    def _array(self, x: Any) -> Array:
        return np.array(x, dtype="int32" if x.dtype.kind == "i" else x.dtype)

    def accuracy(self, y_hat: Array, y: Array) -> Array:
        found = y_hat.argmax(axis=1) if y_hat.ndim > 1 else y_hat
        return (found.astype(y.dtype) == y).astype("float32").sum()

    def _home(self, net: Any) -> mx.Context:
        parameters = net.collect_params().values() if isinstance(net, gluon.Block) else ()
        return next((parameter.list_ctx()[0] for parameter in parameters), None)

    def loss(self, y_hat: Array, y: Array) -> Array:
        return -npx.pick(npx.log_softmax(y_hat), y)

    def _gradients(self, net: Any, loss: Any, params: Sequence[Array], X: Array, y: Array) -> Sequence[Array]:
        with autograd.record():
            value = loss(net(X, params), y).sum()
        value.backward()
        return [p.grad.copy() for p in params]

    def train(self, *args: Any, **options: Any) -> Run:
        with mx.util.np_array(False), mx.util.np_shape(False):  # samestep's LeNet is of mxnet.nd
            return super().train(*args, **options)

    def resnet18(self, num_classes: int, in_channels: int = 1) -> gluon.Block:
        """gluon's own, to be initialized: samestep's is of mxnet.nd. It sees the channels in the first batch."""
        return gluon.model_zoo.vision.resnet18_v1(classes=num_classes, thumbnail=True)

    def _take(self, model: gluon.Block, run: Run) -> None:
        for name, array in run.state_dict().items():
            model._collect_params_with_prefix()[name].set_data(array)


names = MXNet()
__getattr__, __dir__ = partial(getattr, names), names.__dir__
