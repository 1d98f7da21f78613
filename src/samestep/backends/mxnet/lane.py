"""What computes shards in MXNet: a *lane*, a copy of the block on a context of its own.

A lane's state and gradients are views of vectors, so one operation moves them, whatever the number of parameters. Its weights
are no views: an evaluation may change the layout of their memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mxnet import autograd, nd
from mxnet import np as mxnp
from mxnet.context import Context
from mxnet.gluon import Block

from samestep.backends.layout import Layout
from samestep.backends.mxnet.blocks import arrays_in, blocks_of, parameters_of
from samestep.backends.mxnet.flat import Array, Flat, as_nd
from samestep.backends.mxnet.noise import Graphs
from samestep.errors import Written


class Lane:
    def __init__(
        self, context: Context, block: Block, loss: Any, layout: Layout, state: list[Flat], fixed: list[str], size: int
    ) -> None:
        """`layout` is that of the weights, `fixed` the names of constants, `size` that of the vector a shard gives."""
        self.context, self.block, self.state, self.graphs = context, block, state, Graphs(block, loss)
        self.fresh = False  # whether the weights are the replica's
        self.vector = nd.zeros((size,), context, layout.dtype)
        parameters, blocks = parameters_of(block), list(blocks_of(block))
        trained = [parameters[name] for name in layout.names]
        self.weights = [as_nd(p.data()) for p in trained]
        self._sparse: list[tuple[Array, Array]] = []  # gradients of few rows, and where they belong in the vector
        for p, view in zip(trained, layout.cut(self.vector), strict=True):
            if p._grad_stype == "default":
                autograd.mark_variables(p.data(), view)  # the backward pass writes to the vector
            else:
                self._sparse.append((p.grad(), view))
        for flat in state:
            for name, view in zip(flat.layout.names, flat.views, strict=True):
                p = parameters[name]
                p._data = [view.as_np_ndarray() if isinstance(p.data(), mxnp.ndarray) else view]
        # Of each block: all its attributes, and the arrays among them at first.
        self._attributes = [(vars(one), arrays_in(one)) for _, one in blocks]
        constants = {name: parameters[name].data() for name in fixed}
        constants |= {path + key: array for path, one in blocks for key, array in arrays_in(one).items()}
        # What must not be written to, and what it was; forgotten when it has been checked once.
        self._fixed = {name: (array, array.asnumpy().tobytes()) for name, array in constants.items()}

    def begin(self, weights: Flat, state: Sequence[Flat]) -> None:
        """Start a shard, with the replica's weights and state, and with the arrays that blocks had at first.

        Gradients start at zero: the backward pass does not touch those of weights that the shard does not use.
        """
        if not self.fresh:
            for view, own in zip(weights.views, self.weights, strict=True):
                view.copyto(own)
            self.fresh = True
        for flat, mine in zip(state, self.state, strict=True):
            flat.vector.copyto(mine.vector)
        for attributes, first in self._attributes:
            attributes.update(first)
        nd.reset_arrays(self.vector, num_arrays=1)
        for gradient, _ in self._sparse:
            nd.zeros_like(gradient, out=gradient)

    def gather(self) -> None:
        """Bring gradients of few rows to where the others are."""
        for gradient, view in self._sparse:
            gradient.tostype("default").copyto(view)

    def check_constants(self) -> None:
        """After the first shard only: reading them waits for the shard."""
        fixed, self._fixed = self._fixed, {}
        for name, (array, before) in fixed.items():
            if array.asnumpy().tobytes() != before:
                raise Written(repr(name), "use self.params.get(name, grad_req='null', differentiable=False)")
