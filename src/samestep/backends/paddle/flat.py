"""Tensors of a Paddle model as views of one flat vector. All of them are on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from samestep.backends.layout import Layout, Numbers, aligned
from samestep.errors import WrongType

Tensor = Any
Vector = Any
CPU = paddle.CPUPlace()
TYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")


class Flat:
    """A vector of tensors of one type, and views of each."""

    def __init__(self, layout: Layout, vector: Vector) -> None:
        self.layout, self.vector = layout, vector
        self.wide = layout.wide("float32") if layout.real else "int64"  # the type in which it changes
        self.views: dict[str, Tensor] = layout.named(vector)
        zeros = paddle.to_tensor(np.zeros(layout.unit, layout.dtype), place=CPU)
        sizes = [gap.stop - gap.start for gap in layout.padding]
        self._padding = [[zeros[:size]] if size else [] for size in sizes]

    @staticmethod
    def of(names: Sequence[str], tensors: Sequence[Tensor]) -> Flat:
        kind = dtype_of(tensors[0])
        if kind not in TYPES:
            raise WrongType(f"a tensor of the model is of type {kind}: it must be one of {', '.join(TYPES)}")
        shapes, dtype = tuple(tuple(tensor.shape) for tensor in tensors), np.dtype(kind)
        layout = Layout(tuple(names), shapes, kind, dtype.kind == "f", aligned(dtype.itemsize))
        arrays = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        return Flat(layout, paddle.to_tensor(layout.filled(arrays), place=CPU))

    def pieces(self, tensors: Sequence[Tensor]) -> list[Vector]:
        """Tensors of these shapes as the pieces of such a vector."""
        found = []
        for tensor, padding, (lo, hi) in zip(tensors, self._padding, self.layout.spans, strict=True):
            found += [tensor.reshape([-1])] * (hi > lo) + padding
        return found

    def move(self, delta: Vector) -> None:
        """Add the mean over the examples of the changes that the shards have seen."""
        # A counter changes alike in every shard, so the mean is the change.
        new = self.vector.astype(self.wide) + (delta if self.layout.real else delta.round()).astype(self.wide)
        paddle.assign(new.astype(self.vector.dtype), self.vector)

    def twin(self) -> Flat:
        """The same tensors in a vector of its own."""
        return Flat(self.layout, self.vector.clone())


def dtype_of(tensor: Tensor) -> str:
    """The type of a tensor, as NumPy names it."""
    return str(tensor.dtype).removeprefix("paddle.")


def numpy_view(tensor: Tensor) -> Numbers:
    """A tensor as NumPy, in its own memory."""
    numbers: Numbers = np.from_dlpack(tensor.detach())
    return numbers
