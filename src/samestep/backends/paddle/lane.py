"""What a replica of Paddle is made of: vectors of tensors, and lanes that compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import paddle

from samestep.backends.layout import ALIGN, places
from samestep.errors import WrongType

Tensor = Any
Vector = Any
Numbers = np.ndarray[Any, Any]
Place = tuple[dict[str, Any], str, Tensor]  # a layer's dictionary of tensors, a name in it, and the tensor that is ours
TYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")


class Flat:
    """Tensors of one type, one after the other in one vector, which is made from them."""

    def __init__(self, tensors: Sequence[Tensor], place: Any) -> None:
        self.ids, self.shapes, kind = [id(t) for t in tensors], [tuple(t.shape) for t in tensors], name_of(tensors[0])
        if kind not in TYPES:
            raise WrongType(f"a tensor of the model is of type {kind}: it must be one of {', '.join(TYPES)}")
        self.dtype = np.dtype(kind)
        self.real = self.dtype.kind == "f"
        self.spans, self.size = places([prod(shape) for shape in self.shapes], self.dtype.itemsize)
        self._place, unit = place, ALIGN // self.dtype.itemsize
        zeros = paddle.to_tensor(np.zeros(unit, self.dtype), place=place)
        self._pads = [zeros[: -(hi - lo) % unit] if (hi - lo) % unit else None for lo, hi in self.spans]
        self.vector = self.filled([t.numpy() for t in tensors])

    def cut(self, vector: Any) -> list[Any]:
        """The tensors of such a vector, of Paddle or of NumPy, as views of it."""
        return [vector[lo:hi].reshape(shape) for (lo, hi), shape in zip(self.spans, self.shapes, strict=True)]

    def join(self, tensors: Sequence[Tensor]) -> list[Vector]:
        """Tensors of these shapes as the pieces of such a vector."""
        pieces = []
        for tensor, pad, (lo, hi) in zip(tensors, self._pads, self.spans, strict=True):
            pieces += [tensor.reshape([-1])] * (hi > lo) + [pad] * (pad is not None)
        return pieces

    def filled(self, arrays: Sequence[Numbers]) -> Vector:
        """A new vector that holds these arrays."""
        whole = np.zeros(self.size, self.dtype)
        for view, array in zip(self.cut(whole), arrays, strict=True):
            view[...] = array
        return paddle.to_tensor(whole, place=self._place)


@dataclass
class Lane:
    layer: paddle.nn.Layer
    parameters: list[Tensor]
    state: list[tuple[Vector, list[Place]]]  # a vector, and its views
    modes: list[bool]
    buffers: list[tuple[dict[str, Any], dict[str, Any]]]  # of each layer: its dictionary, and what was in it at first
    constants: dict[str, tuple[Tensor, int]]  # with the version each had at first
    training: bool = True

    def train(self, training: bool) -> None:
        """Switch between training and evaluation, keeping parts that the user has put into evaluation mode as they are."""
        if training != self.training:
            self.training = training
            for layer, mode in zip(self.layer.sublayers(include_self=True), self.modes, strict=True):
                layer.training = training and mode

    def begin(self, start: Sequence[Flat]) -> None:
        """Start a shard from a replica's state."""
        for now, first in self.buffers:
            now.clear()
            now.update(first)
        for (own, _), flat in zip(self.state, start, strict=True):
            paddle.assign(flat.vector, own)

    def change(self, i: int, start: Flat) -> Vector:
        """What a shard did to a vector of the state."""
        own, views = self.state[i]
        if not all(held[name] is view for held, name, view in views):  # `self.count = self.count + 1` makes a new one
            own = paddle.concat(start.join([held[name].detach().astype(own.dtype) for held, name, _ in views]))
        return own - start.vector if start.real else own.astype("int64") - start.vector.astype("int64")


def name_of(thing: Any) -> str:
    """The type of a tensor, as NumPy names it."""
    return str(thing.dtype).removeprefix("paddle.")
