"""What a replica of MXNet is made of: vectors of parameters, and lanes that compute.

A lane is a copy of the block on a context of its own. Its state and its gradients are views of vectors, so that they are moved
by one operation, whatever the number of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from mxnet import autograd, nd
from mxnet.context import Context
from mxnet.gluon import Block
from mxnet.gluon.parameter import Parameter

from samestep import fingerprint as bits
from samestep.backends import Tensors
from samestep.backends.layout import places
from samestep.backends.mxnet.engine import memory
from samestep.backends.mxnet.noise import Graphs

Array = Any
Vector = Any
Numbers = np.ndarray[Any, Any]


class Flat:
    """Parameters of one type, one after the other in one vector."""

    def __init__(self, names: Sequence[str], values: dict[str, Numbers], home: Context) -> None:
        self.names, self.shapes = list(names), [values[name].shape for name in names]
        self.dtype = values[self.names[0]].dtype
        self.real = self.dtype.kind == "f"
        self.spans, self.size = places([prod(shape) for shape in self.shapes], self.dtype.itemsize)
        self._home = home
        self.vector = self.filled(values)

    def cut(self, vector: Any) -> list[Any]:
        """The arrays of such a vector, of MXNet or of NumPy, as views of it."""
        return [vector[lo:hi].reshape(shape) for (lo, hi), shape in zip(self.spans, self.shapes, strict=True)]

    def filled(self, values: dict[str, Numbers]) -> Vector:
        """A new vector that holds these arrays."""
        whole = np.zeros(self.size, self.dtype)
        for view, name in zip(self.cut(whole), self.names, strict=True):
            view[...] = values[name].reshape(view.shape)
        return nd.array(whole, self._home, self.dtype)

    def named(self, vector: Vector) -> Tensors:
        return dict(zip(self.names, self.cut(vector.asnumpy()), strict=True))


@dataclass
class Lane:
    context: Context
    block: Block
    trained: list[Parameter]
    weights: list[Array]  # no views: an evaluation may change the layout of their memory
    state: list[Vector]  # of which the parameters are views
    whole: Vector  # what a shard gives
    gradients: list[Array]  # views of it, to which the backward pass writes
    attributes: list[tuple[dict[str, Any], dict[str, Array]]]  # of each block: all, and the arrays among them at first
    constants: dict[str, tuple[Array, bytes]]  # what must not be written to, and what it was
    graphs: Graphs
    fresh: bool = False  # whether the weights are the replica's
    clean: bool = False  # whether the gradients are zero
    checked: bool = False

    def __post_init__(self) -> None:
        self._scales: dict[int, Array] = {}
        pairs = list(zip(self.trained, self.gradients, strict=True))
        self._sparse = [(p.grad(), dense) for p, dense in pairs if p._grad_stype != "default"]
        for p, dense in pairs:
            if p._grad_stype == "default":
                autograd.mark_variables(p.data(), dense)

    def begin(self) -> None:
        """Start a shard with the arrays that blocks had at first, and with gradients of zero.

        The backward pass does not touch those of weights that the shard does not use.
        """
        for now, first in self.attributes:
            now.update(first)
        if not self.clean:
            nd.reset_arrays(self.whole, num_arrays=1)
        self.clean = False
        for gradient, _ in self._sparse:
            nd.zeros_like(gradient, out=gradient)

    def scale(self, examples: int, loss: Array) -> Array:
        """With which to begin the backward pass, for the gradient of the mean instead of the sum."""
        if examples not in self._scales:
            self._scales[examples] = nd.full(loss.shape, 1 / examples, self.context, loss.dtype)
        return self._scales[examples]

    def gather(self) -> None:
        """Bring gradients of few rows to where the others are."""
        for gradient, dense in self._sparse:
            gradient.tostype("default").copyto(dense)


class OnHost:
    """A replica's weights and a lane of it in NumPy's hands, in their own memory, for a function that the engine calls."""

    def __init__(self, flat: Flat, lane: Lane) -> None:
        self.lane, self._flat = lane, flat

    @cached_property
    def weights(self) -> Numbers:
        return memory(self._flat.vector)

    @cached_property
    def total(self) -> Numbers:
        return memory(self.lane.whole)

    @cached_property
    def fingerprint(self) -> bits.Print:
        return bits.Print([self.weights])

    @cached_property
    def _pairs(self) -> list[tuple[Numbers, Numbers]]:
        return list(zip(map(memory, self.lane.weights), self._flat.cut(self.weights), strict=True))

    def descend(self, lr: float) -> None:
        """What plain SGD does with a gradient of the mean, in the gradient's memory, which is zeroed next."""
        change = self.total[: len(self.weights)]
        np.multiply(change, lr, out=change)
        np.subtract(self.weights, change, out=self.weights)

    def refresh(self) -> None:
        """Make the lane ready for the next step: with the weights, and gradients of zero."""
        for own, new in self._pairs:
            own[...] = new
        self.total.fill(0)
