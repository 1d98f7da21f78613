"""The models of the chapters in JAX, and `Pair`, the form in which any function with its parameters is a model.

The models are plain functions of a dictionary of weights. Names and layouts are those of every framework here, so the
weights move between frameworks as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from samestep import models
from samestep.backends.pair import Pair as Pair  # public under this name
from samestep.errors import Invalid

Array = Any
Tree = dict[str, Any]


def _conv(x: Array, weight: Array, stride: int = 1, padding: int = 0) -> Array:
    pads = ((padding, padding),) * 2
    return lax.conv_general_dilated(x, weight, (stride, stride), pads, dimension_numbers=("NCHW", "OIHW", "NCHW"))


def _images_last(x: Array) -> Array:
    """(n, channels, height, width) as (channels, height, width, n), the layout of the next two."""
    return x.transpose(1, 2, 3, 0)


def _patches(w: Tree, name: str, x: Array, padding: int = 0) -> Array:
    """A convolution as one product of matrices: on a CPU, XLA's own and its gradients are slow."""
    weight, bias = w[f"{name}.weight"], w[f"{name}.bias"]
    x = jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    out, _, rows, columns = weight.shape
    height, width = x.shape[1] - rows + 1, x.shape[2] - columns + 1
    shifted = [x[:, i : i + height, j : j + width] for i in range(rows) for j in range(columns)]
    product = weight.reshape(out, -1) @ jnp.stack(shifted, 1).reshape(-1, height * width * x.shape[3])
    return product.reshape(out, height, width, -1) + bias[:, None, None, None]


def _pairs(x: Array) -> Array:
    """Rows and columns two by two, those left over dropped: what pooling over 2 x 2 takes mean or maximum of."""
    channels, height, width, n = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    return x.reshape(channels, height // 2, 2, width // 2, 2, n)


def _dense(w: Tree, name: str, x: Array) -> Array:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


@dataclass(frozen=True)
class LeNet:
    """Convolution, ReLU, average-pool, twice; then two dense layers."""

    def __call__(self, w: Tree, x: Array) -> Array:
        x = _pairs(jax.nn.relu(_patches(w, "conv1", _images_last(x)))).mean((2, 4))
        x = _pairs(jax.nn.relu(_patches(w, "conv2", x))).mean((2, 4))
        return _dense(w, "dense2", jax.nn.relu(_dense(w, "dense1", x.reshape(-1, x.shape[3]).T)))


@dataclass(frozen=True)
class LeNetModern:
    """LeNet with ReLU and max-pooling."""

    def __call__(self, w: Tree, x: Array) -> Array:
        x = _pairs(jax.nn.relu(_patches(w, "conv1", _images_last(x), padding=2))).max((2, 4))
        x = _pairs(jax.nn.relu(_patches(w, "conv2", x))).max((2, 4))
        x = jax.nn.relu(_dense(w, "dense1", x.reshape(-1, x.shape[3]).T))
        return _dense(w, "dense3", jax.nn.relu(_dense(w, "dense2", x)))


@dataclass(frozen=True)
class MLP:
    """Dense layers with ReLU and dropout between them."""

    depth: int
    dropout: float

    def __call__(self, w: Tree, x: Array, *, key: Any, train: bool) -> Array:
        x = x.reshape(len(x), -1)
        for i in range(1, self.depth):
            x = jax.nn.relu(_dense(w, f"dense{i}", x))
            if train and self.dropout:
                kept = jax.random.bernoulli(jax.random.fold_in(key, i), 1 - self.dropout, x.shape)
                x = jnp.where(kept, x / (1 - self.dropout), 0)
        return _dense(w, f"dense{self.depth}", x)


@dataclass(frozen=True)
class ResNet18:
    """ResNet-18, with batch norm: running statistics are its state."""

    def __call__(self, w: Tree, state: Tree, x: Array, *, train: bool) -> tuple[Array, Tree]:
        new = dict(state)

        def norm(name: str, x: Array) -> Array:
            mean, var = state[f"{name}.running_mean"], state[f"{name}.running_var"]
            if train:
                count = x.size // x.shape[1]
                here, spread = x.mean((0, 2, 3)), x.var((0, 2, 3))
                new[f"{name}.running_mean"] = mean * 0.9 + here * 0.1
                new[f"{name}.running_var"] = var * 0.9 + spread * (0.1 * count / max(count - 1, 1))
                new[f"{name}.num_batches_tracked"] = state[f"{name}.num_batches_tracked"] + 1
                mean, var = here, spread
            scale = w[f"{name}.weight"] * lax.rsqrt(var + 1e-5)
            return x * scale[:, None, None] + (w[f"{name}.bias"] - mean * scale)[:, None, None]

        def residual(name: str, x: Array, stride: int) -> Array:
            y = jax.nn.relu(norm(f"{name}.norm1", _conv(x, w[f"{name}.conv1.weight"], stride, 1)))
            y = norm(f"{name}.norm2", _conv(y, w[f"{name}.conv2.weight"], 1, 1))
            if f"{name}.conv3.weight" in w:
                x = norm(f"{name}.norm3", _conv(x, w[f"{name}.conv3.weight"], stride))
            return jax.nn.relu(y + x)

        x = jax.nn.relu(norm("norm", _conv(x, w["conv.weight"], 2, 3)))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), ((0, 0), (0, 0), (1, 1), (1, 1)))
        for stage in range(1, 5):
            for block in (1, 2):
                x = residual(f"stage{stage}.block{block}", x, 2 if stage > 1 and block == 1 else 1)
        return _dense(w, "dense", x.mean((2, 3))), new


def _start(apply: Any, weights: models.Weights, state: Tree | None = None) -> Pair:
    return Pair(apply, {name: jnp.asarray(weight) for name, weight in weights.items()}, state)


def lenet_function(x: Array, params: Sequence[Array]) -> Array:
    """LeNet of the multi-device chapter, as a function of a list of parameters (models.lenet_params)."""
    return LeNet()({name: w.T if w.ndim == 2 else w for name, w in zip(models.lenet(), params, strict=True)}, x)


def lenet(seed: int = 0) -> Pair:
    """LeNet of the multi-device chapter."""
    return _start(LeNet(), models.lenet(seed))


def lenet_modern(seed: int = 0) -> Pair:
    """LeNet of the schedule chapter."""
    return _start(LeNetModern(), models.lenet_modern(seed))


def mlp(sizes: tuple[int, ...] = (784, 256, 10), dropout: float = 0.5, seed: int = 0) -> Pair:
    """Dense layers of the given sizes with dropout between them."""
    if len(sizes) < 2:
        raise Invalid(f"mlp: sizes must name at least an input and an output size, got sizes={sizes}")
    if not 0 <= dropout < 1:
        raise Invalid(f"mlp: dropout must be at least 0 and below 1, got dropout={dropout}")
    return _start(MLP(len(sizes) - 1, dropout), models.mlp(tuple(sizes), seed))


def resnet18(channels: int = 1, classes: int = 10, width: int = 64, seed: int = 0) -> Pair:
    """ResNet-18 with `width` channels in its first stage."""
    weights, state = models.resnet18(channels, classes, width, seed), {}
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        if weight.ndim == 1 and layer != name:  # of the weights, only those of norms are vectors
            state[f"{layer}.running_mean"] = jnp.zeros(len(weight))
            state[f"{layer}.running_var"] = jnp.ones(len(weight))
            state[f"{layer}.num_batches_tracked"] = jnp.asarray(np.int32(0))
    return _start(ResNet18(), weights, state)
