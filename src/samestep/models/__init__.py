"""The models of the chapters, and the numbers they start from.

The starting weights are NumPy arrays, by name, in one layout: convolutions as (out, in, height, width), dense layers as
(out, in). They depend on the seed alone, so a model starts from the same numbers in every framework. The models themselves
are in one file per framework (`samestep.models.torch`). They keep these names and layouts, so what one framework has trained
another can `load`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import pairwise
from math import prod, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from samestep.errors import Invalid, WrongType

if TYPE_CHECKING:
    from samestep.devices import Device

Weights = dict[str, NDArray[np.float32]]
NAMES = ("lenet", "lenet_modern", "mlp", "resnet18")


class _Draw:
    """Draws weights one layer after the other from one generator."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.Generator(np.random.Philox(key=seed))
        self.weights: Weights = {}

    def layer(
        self, name: str, shape: tuple[int, ...], scale: float | str, bias: bool = True, gain: float = 1.0
    ) -> None:
        out, inner, area = shape[0], prod(shape[1:]), prod(shape[2:])
        if scale == "glorot":  # U(−a, a), a = √(6 / (fan in + fan out)), Glorot and Bengio 2010
            edge = sqrt(6 / (inner + out * area))
            weight = self.generator.uniform(-edge, edge, shape)
        else:  # N(0, σ²); He et al. 2015: σ² = 2 / fan, which keeps the size of activations, or of gradients, through ReLUs
            sigma = {"he": sqrt(2 / inner), "he out": sqrt(2 / (out * area))}.get(str(scale), scale)
            weight = self.generator.standard_normal(shape) * float(sigma)
        self.weights[f"{name}.weight"] = (weight * gain).astype(np.float32)
        if bias:
            self.weights[f"{name}.bias"] = np.zeros(out, np.float32)

    def norm(self, name: str, channels: int) -> None:
        self.weights[f"{name}.weight"] = np.ones(channels, np.float32)
        self.weights[f"{name}.bias"] = np.zeros(channels, np.float32)


def lenet(seed: int = 0) -> Weights:
    """LeNet of the multi-device chapter: N(0, 1) · 0.01, zero biases.

    >>> {name: weight.shape for name, weight in lenet().items() if weight.ndim > 1}
    {'conv1.weight': (20, 1, 3, 3), 'conv2.weight': (50, 20, 5, 5), 'dense1.weight': (128, 800), 'dense2.weight': (10, 128)}
    """
    draw = _Draw(seed)
    draw.layer("conv1", (20, 1, 3, 3), 0.01)
    draw.layer("conv2", (50, 20, 5, 5), 0.01)
    draw.layer("dense1", (128, 800), 0.01)
    draw.layer("dense2", (10, 128), 0.01)
    return draw.weights


def lenet_params(seed: int = 0) -> list[NDArray[np.float32]]:
    """The same numbers as the chapter's list, for `lenet_function`: W1, b1, ... W4, b4, with dense layers as (in, out).

    >>> [array.shape for array in lenet_params()][4:]
    [(800, 128), (128,), (128, 10), (10,)]
    """
    return [np.ascontiguousarray(weight.T) if weight.ndim == 2 else weight for weight in lenet(seed).values()]


def lenet_modern(seed: int = 0) -> Weights:
    """LeNet of the schedule chapter: 6 and 16 channels, then 120, 84 and 10 units.

    The output layer starts at a tenth, so that the first steps at the chapter's rates of 0.3 and 0.5 leave its ReLUs alive.
    """
    draw = _Draw(seed)
    draw.layer("conv1", (6, 1, 5, 5), "he")
    draw.layer("conv2", (16, 6, 5, 5), "he")
    draw.layer("dense1", (120, 400), "he")
    draw.layer("dense2", (84, 120), "he")
    draw.layer("dense3", (10, 84), "he", gain=0.1)
    return draw.weights


def mlp(sizes: tuple[int, ...] = (784, 256, 10), seed: int = 0) -> Weights:
    """Dense layers of the given sizes."""
    draw = _Draw(seed)
    for i, (inner, out) in enumerate(pairwise(sizes), 1):
        draw.layer(f"dense{i}", (out, inner), "glorot")
    return draw.weights


def resnet18(channels: int = 1, classes: int = 10, width: int = 64, seed: int = 0) -> Weights:
    """ResNet-18 (He et al. 2016) with `width` channels in its first stage."""
    draw = _Draw(seed)
    draw.layer("conv", (width, channels, 7, 7), "he out", bias=False)
    draw.norm("norm", width)
    inner = width
    for stage in range(4):
        out = width << stage
        for block in range(2):
            name = f"stage{stage + 1}.block{block + 1}"
            draw.layer(f"{name}.conv1", (out, inner, 3, 3), "he out", bias=False)
            draw.norm(f"{name}.norm1", out)
            draw.layer(f"{name}.conv2", (out, out, 3, 3), "he out", bias=False)
            draw.norm(f"{name}.norm2", out)
            if inner != out:
                draw.layer(f"{name}.conv3", (out, inner, 1, 1), "he out", bias=False)
                draw.norm(f"{name}.norm3", out)
            inner = out
    draw.layer("dense", (classes, inner), "glorot")
    return draw.weights


def load(
    model: Any, weights: Mapping[str, NDArray[Any]] | str | os.PathLike[str], device: Device | str | None = None
) -> Any:
    """A copy of a model, of any framework, with other weights: a dictionary by name, or a safetensors file.

    It is on `device`, the CPU if none is named. Names and shapes must be the model's own, buffers included; numbers are
    converted to its types. The models of this package have one set of names and shapes in all frameworks:

        samestep export runs/of-torch weights.safetensors
        samestep.models.load(samestep.models.jax.lenet(), "weights.safetensors")
    """
    from samestep.backends import find
    from samestep.devices import Device, cpu

    backend, there = find.of_model(model), cpu() if device is None else Device.of(device)
    backend.require(there)
    replica = backend.replica(model, None, there, 1)
    own, given = replica.tensors(), _read(weights)
    for words, names in (
        ("has no", own.keys() - given.keys()),
        ("has, and the model has not,", given.keys() - own.keys()),
    ):
        if names:
            raise Invalid(f"load: {_of(weights)} {words} {', '.join(sorted(names)[:5])}{' ...' * (len(names) > 5)}")
    taken = {}
    for name, tensor in own.items():
        array = np.asarray(given[name])
        if (
            array.shape != tensor.shape and not array.size == tensor.size == 1
        ):  # MXNet has no arrays without a dimension
            raise Invalid(
                f"load: {name} of {_of(weights)} has shape {array.shape}, and that of the model {tensor.shape}"
            )
        taken[name] = array.reshape(tensor.shape).astype(tensor.dtype)
    replica.load(taken)
    return replica.model()


def _of(weights: object) -> str:
    return str(weights) if isinstance(weights, (str, os.PathLike)) else "the dictionary"


def _read(weights: Any) -> Mapping[str, NDArray[Any]]:
    if isinstance(weights, Mapping):
        return weights
    if not isinstance(weights, (str, os.PathLike)):
        raise WrongType(
            f"load: weights must be a dictionary of arrays or a safetensors file, got {type(weights).__name__}"
        )
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(weights)
    except (OSError, ValueError, SafetensorError) as error:
        raise Invalid(f"load: {weights} is not a safetensors file that can be read: {error}") from None


def __getattr__(name: str) -> Any:  # `from samestep.models import torch` says what to install, if it is not there
    from samestep.backends import find

    if name in find.FRAMEWORKS:
        return find.imported(f"samestep.models.{name}", name)
    raise AttributeError(f"module 'samestep.models' has no attribute {name!r}")
