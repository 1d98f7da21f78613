"""The chapters' `d2l` for JAX. Arrays cannot be written to: `train_batch` and `sgd` put new ones into the lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from samestep import models
from samestep.d2l.names import Batches, HyperParameters, Names, ProgressBoard, door
from samestep.devices import Device
from samestep.models.jax import LeNet

Array = Any


class Module(nn.Module, HyperParameters):
    """A model of the chapters: a rate `lr` and a `board`. Its fields are its hyperparameters."""

    board: Any = field(default_factory=ProgressBoard, init=False, repr=False, compare=False)


class Jax(Names):
    framework = "jax"
    Module = Module
    arange, zeros, ones, tensor = map(staticmethod, (jnp.arange, jnp.zeros, jnp.ones, jnp.array))

    def normal(self, shape: Sequence[int], key: Any = None) -> Array:
        return jax.random.normal(jax.random.PRNGKey(Batches.seed) if key is None else key, shape)

    def native(self, device: Device) -> Any:
        return jax.devices("cpu" if device.kind == "cpu" else "gpu")[device.index]

    def device(self, native: Any) -> Device:
        if native.platform == "cpu":
            return Device("cpu", jax.devices("cpu").index(native))
        return Device("cuda", jax.devices("gpu").index(native))

    def accuracy(self, y_hat: Array, y: Array) -> Array:
        return ((y_hat.argmax(1) if y_hat.ndim > 1 else y_hat) == y).sum().astype("float32")

    def lenet(self, X: Array, params: Sequence[Array]) -> Array:
        return LeNet()({name: w.T if w.ndim == 2 else w for name, w in zip(models.lenet(), params, strict=True)}, X)

    def loss(self, y_hat: Array, y: Array) -> Array:
        return -jnp.take_along_axis(jax.nn.log_softmax(y_hat), y[:, None], 1)[:, 0]

    def gradients(self, net: Any, loss: Any, params: Sequence[Array], X: Array, y: Array) -> Sequence[Array]:
        return _gradients(net, loss, list(params), X, y)


_gradients = jax.jit(
    lambda net, loss, params, X, y: jax.grad(lambda p: loss(net(X, p), y).sum())(params), static_argnums=(0, 1)
)
names = Jax()
__getattr__, __dir__ = door(names)
