"""Forward and backward passes of the MLP and of both LeNets by hand, in NumPy and float64: what every framework must give.

Each layer is a pair of functions, `forward(w, x) -> (y, kept)` and `backward(w, kept, dy) -> (dw, dx)`, in the layouts of
samestep.models: examples and filters with channels first, dense weights as (out, in). Nothing of samestep is used here.
`steps` names the layers of a model; `gradient` runs them forward, then backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = dict[str, Array]


class Layer(NamedTuple):
    forward: Callable[[Weights, Array], tuple[Array, Array]]  # (output, what the backward pass needs)
    backward: Callable[[Weights, Array, Array], tuple[Weights, Array]]  # (gradients of weights, of the input)


def dense(name: str) -> Layer:
    """y = x Wᵀ + b."""

    def forward(w: Weights, x: Array) -> tuple[Array, Array]:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"], x

    def backward(w: Weights, x: Array, dy: Array) -> tuple[Weights, Array]:
        return {f"{name}.weight": dy.T @ x, f"{name}.bias": dy.sum(0)}, dy @ w[f"{name}.weight"]

    return Layer(forward, backward)


def conv(name: str, padding: int = 0) -> Layer:
    """y[n, o, i, j] = b[o] + Σ_cuv W[o, c, u, v] x[n, c, i + u, j + v], with zeros around x."""
    around = ((0, 0), (0, 0), (padding, padding), (padding, padding))

    def forward(w: Weights, x: Array) -> tuple[Array, Array]:
        weight, padded = w[f"{name}.weight"], np.pad(x, around)
        windows = sliding_window_view(padded, weight.shape[2:], (2, 3))  # n c i j u v
        y = np.einsum("ncijuv,ocuv->noij", windows, weight, optimize=True)
        return y + w[f"{name}.bias"][:, None, None], padded

    def backward(w: Weights, padded: Array, dy: Array) -> tuple[Weights, Array]:
        weight = w[f"{name}.weight"]
        windows = sliding_window_view(padded, weight.shape[2:], (2, 3))
        dw = np.einsum("ncijuv,noij->ocuv", windows, dy, optimize=True)
        dx, (rows, columns) = np.zeros_like(padded), dy.shape[2:]
        for u in range(weight.shape[2]):
            for v in range(weight.shape[3]):
                moved = np.einsum("noij,oc->ncij", dy, weight[:, :, u, v], optimize=True)
                dx[:, :, u : u + rows, v : v + columns] += moved
        inside = slice(padding, -padding or None)
        return {f"{name}.weight": dw, f"{name}.bias": dy.sum((0, 2, 3))}, dx[:, :, inside, inside]

    return Layer(forward, backward)


def relu() -> Layer:
    """y = max(x, 0), with slope 0 at 0."""
    return Layer(lambda w, x: (np.maximum(x, 0), x), lambda w, x, dy: ({}, dy * (x > 0)))


def _blocks(x: Array) -> Array:
    """Blocks of 2 x 2, their four values last; an odd row or column at the end is left out."""
    n, c, rows, columns = x.shape[0], x.shape[1], x.shape[2] // 2, x.shape[3] // 2
    cut = x[:, :, : 2 * rows, : 2 * columns].reshape(n, c, rows, 2, columns, 2)
    return cut.transpose(0, 1, 2, 4, 3, 5).reshape(n, c, rows, columns, 4)


def _unblocks(blocks: Array, like: Array) -> Array:
    n, c, rows, columns, _ = blocks.shape
    x = np.zeros_like(like)
    spread = blocks.reshape(n, c, rows, columns, 2, 2).transpose(0, 1, 2, 4, 3, 5)
    x[:, :, : 2 * rows, : 2 * columns] = spread.reshape(n, c, 2 * rows, 2 * columns)
    return x


def average_pool() -> Layer:
    """The mean of each block of 2 x 2."""

    def backward(w: Weights, x: Array, dy: Array) -> tuple[Weights, Array]:
        return {}, _unblocks(np.repeat(dy[..., None] / 4, 4, -1), x)

    return Layer(lambda w, x: (_blocks(x).mean(-1), x), backward)


def max_pool() -> Layer:
    """The largest value of each block of 2 x 2; of equal ones the first."""

    def backward(w: Weights, x: Array, dy: Array) -> tuple[Weights, Array]:
        blocks = _blocks(x)
        chosen = np.arange(4) == blocks.argmax(-1)[..., None]
        return {}, _unblocks(chosen * dy[..., None], x)

    return Layer(lambda w, x: (_blocks(x).max(-1), x), backward)


def flatten() -> Layer:
    return Layer(lambda w, x: (x.reshape(len(x), -1), x), lambda w, x, dy: ({}, dy.reshape(x.shape)))


def steps(model: str, weights: Weights) -> list[Layer]:
    """The layers of a model."""
    if model == "lenet":
        head = [conv("conv1"), relu(), average_pool(), conv("conv2"), relu(), average_pool()]
    elif model == "lenet_modern":
        head = [conv("conv1", padding=2), relu(), max_pool(), conv("conv2"), relu(), max_pool()]
    else:
        head = []
    names = sorted(name.removesuffix(".weight") for name in weights if name.startswith("dense") and "weight" in name)
    tail = [layer for name in names for layer in (dense(name), relu())][:-1]
    return [*head, flatten(), *tail]


def loss_of(output: Array, y: NDArray[np.int64]) -> tuple[float, Array]:
    """Softmax cross-entropy, summed over the examples, and its gradient."""
    shifted = output - output.max(1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    rows = np.arange(len(y))
    slope = np.exp(logs)
    slope[rows, y] -= 1
    return float(-logs[rows, y].sum()), slope


def run(layers: list[Layer], weights: Weights, x: Array) -> tuple[Array, list[Array]]:
    """The output, and what each layer kept."""
    kept = []
    for layer in layers:
        x, keep = layer.forward(weights, x)
        kept.append(keep)
    return x, kept


def gradient(
    model: str, weights: Weights, x: Array, y: NDArray[np.int64], layers: list[Layer] | None = None
) -> tuple[float, Weights]:
    """The loss of these examples and its gradient by every weight, both summed over the examples."""
    weights = {name: np.asarray(weight, np.float64) for name, weight in weights.items()}
    layers = layers or steps(model, weights)
    output, kept = run(layers, weights, np.asarray(x, np.float64))
    loss, slope = loss_of(output, y)
    gradients: Weights = {}
    for layer, keep in zip(reversed(layers), reversed(kept), strict=True):
        found, slope = layer.backward(weights, keep, slope)
        gradients |= found
    return loss, gradients
