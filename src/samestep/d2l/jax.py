"""The chapters' `d2l` for JAX. Arrays cannot be written to: `train_batch` and `sgd` put new ones into the lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from samestep.d2l.names import Batches, Functions, HyperParameters, Names
from samestep.devices import Device

Array = Any


class Module(nn.Module, HyperParameters):
    """A model of the chapters. Its fields are its hyperparameters."""

    board: Any = field(default_factory=Names.ProgressBoard, init=False, repr=False, compare=False)


class Jax(Names):
    Module = Module
    _framework = "jax"
    _functions = Functions(arange=jnp.arange, zeros=jnp.zeros, ones=jnp.ones)

    def normal(self, shape: Sequence[int], key: Any = None) -> Array:
        return jax.random.normal(jax.random.PRNGKey(Batches.seed) if key is None else key, shape)

    def _native(self, device: Device) -> Any:
        return jax.devices("cpu" if device.kind == "cpu" else "gpu")[device.index]

    def _device(self, native: Any) -> Device:
        kind = "cpu" if native.platform == "cpu" else "gpu"
        return Device.of(f"{kind}:{jax.devices(kind).index(native)}")

    def loss(self, y_hat: Array, y: Array) -> Array:
        return -jnp.take_along_axis(jax.nn.log_softmax(y_hat), y[:, None], 1)[:, 0]

    def _gradients(self, net: Any, loss: Any, params: Sequence[Array], X: Array, y: Array) -> Sequence[Array]:
        return _gradients(net, loss, list(params), X, y)


_gradients = jax.jit(
    lambda net, loss, params, X, y: jax.grad(lambda p: loss(net(X, p), y).sum())(params), static_argnums=(0, 1)
)
names = Jax()
__getattr__, __dir__ = partial(getattr, names), names.__dir__
