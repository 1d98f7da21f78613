"""Parameters of a gluon model as views of one flat vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mxnet import nd
from mxnet import np as mxnp
from mxnet.context import Context

from samestep.backends.layout import Layout, Tensors, aligned

Array = Any
Vector = Any


class Flat:
    """A vector of parameters of one type, and views of each."""

    def __init__(self, layout: Layout, vector: Vector) -> None:
        self.layout, self.vector = layout, vector
        self.wide = layout.wide("float32")  # the type in which it changes
        self.views: list[Array] = layout.cut(vector)

    @staticmethod
    def of(names: Sequence[str], values: Tensors, context: Context) -> Flat:
        shapes, dtype = tuple(values[name].shape for name in names), values[names[0]].dtype
        layout = Layout(tuple(names), shapes, str(dtype), dtype.kind == "f", aligned(dtype.itemsize))
        return Flat(layout, nd.array(layout.filled(values), context, layout.dtype))

    def twin(self, context: Context) -> Flat:
        """The same parameters in a vector of its own."""
        return Flat(self.layout, self.vector.copyto(context))

    def move(self, delta: Vector) -> None:
        """Add the mean over the examples of the changes that the shards have seen."""
        if not self.layout.real:
            delta = delta.round()  # a counter changes alike in every shard, so the mean is the change
        new = self.vector.astype(self.wide, copy=False) + delta.astype(self.wide)
        new.astype(self.layout.dtype, copy=False).copyto(self.vector)


def as_nd(array: Any) -> Any:
    """An array of mxnet.np as one of mxnet.nd, in the same memory; anything else as it is."""
    return array.as_nd_ndarray() if isinstance(array, mxnp.ndarray) else array
