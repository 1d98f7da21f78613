"""The chapters' `d2l` for MXNet, with arrays of mxnet.np."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mxnet as mx
from mxnet import autograd, gluon, np, npx

from samestep.d2l.names import HyperParameters, Names, ProgressBoard, door
from samestep.devices import Device
from samestep.runs.run import Run

Array = Any


class Module(gluon.nn.Block, HyperParameters):
    """A model of the chapters: a `net`, a rate `lr`, and a `board`."""

    def __init__(self) -> None:
        super().__init__()
        self.board = ProgressBoard()

    def forward(self, X: Array) -> Array:
        return self.net(X)


class MXNet(Names):
    framework = "mxnet"
    Module = Module
    normal, arange, zeros, ones, tensor = map(staticmethod, (np.random.normal, np.arange, np.zeros, np.ones, np.array))

    def native(self, device: Device) -> mx.Context:
        return mx.cpu(device.index) if device.kind == "cpu" else mx.gpu(device.index)

    def device(self, native: mx.Context) -> Device:
        return Device("cuda" if native.device_type == "gpu" else "cpu", native.device_id)

    def array(self, x: Any) -> Array:
        return np.array(x, dtype="int32" if x.dtype.kind == "i" else x.dtype)

    def accuracy(self, y_hat: Array, y: Array) -> Array:
        found = y_hat.argmax(axis=1) if y_hat.ndim > 1 else y_hat
        return (found.astype(y.dtype) == y).astype("float32").sum()

    def evaluate_accuracy_gpu(self, net: Any, data_iter: Any, device: Any = None) -> float:
        if device is None and isinstance(net, gluon.Block):
            device = next(iter(net.collect_params().values())).list_ctx()[0]
        return super().evaluate_accuracy_gpu(net, data_iter, device)

    def lenet(self, X: Array, params: Sequence[Array]) -> Array:
        W1, b1, W2, b2, W3, b3, W4, b4 = params
        for weight, bias in ((W1, b1), (W2, b2)):
            X = npx.relu(npx.convolution(X, weight, bias, kernel=weight.shape[2:], num_filter=len(weight)))
            X = npx.pooling(X, kernel=(2, 2), stride=(2, 2), pool_type="avg")
        return np.dot(npx.relu(np.dot(X.reshape(X.shape[0], -1), W3) + b3), W4) + b4

    def loss(self, y_hat: Array, y: Array) -> Array:
        return -npx.pick(npx.log_softmax(y_hat), y)

    def gradients(self, net: Any, loss: Any, params: Sequence[Array], X: Array, y: Array) -> Sequence[Array]:
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

    def take(self, model: gluon.Block, run: Run) -> None:
        for name, parameter in model._collect_params_with_prefix().items():
            parameter.set_data(run.state_dict()[name])

    def manual_seed(self, seed: int) -> None:
        super().manual_seed(seed)
        mx.random.seed(seed)


names = MXNet()
__getattr__, __dir__ = door(names)
