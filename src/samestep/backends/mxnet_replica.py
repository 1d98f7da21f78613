"""One whole copy of a gluon model on one device: a shard's gradient as one flat vector. Blocks are copied in mxnet_blocks.py.

The trained weights are one flat vector, the state others, on the replica's *home*, which on the CPU is a context of samestep's
own. What computes is a *lane*: a copy of the block on another context, with its own weights, gradients and state, which
are copied there from home. A context of the CPU is a thread of MXNet's engine: Python only says what is to be computed,
and lanes compute side by side while it goes on. The engine keeps the order of all operations on one array.

State is what a block keeps in parameters that are not differentiable, such as the statistics of batch norm. Parameters
that are merely frozen (grad_req "null") must not be written to; nor must arrays that are attributes of a block, which begin
every shard as they were at the start of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from mxnet import autograd, nd, random
from mxnet import np as mxnp
from mxnet.context import Context
from mxnet.gluon import Block
from mxnet.gluon.parameter import Parameter

from samestep.backends import Deliver, Tensors, bits
from samestep.backends.mxnet_blocks import (
    arrays_in,
    bare,
    blocks_of,
    check_parameters,
    copied,
    model_context,
    parameters_of,
)
from samestep.devices import Device
from samestep.errors import Invalid, WrongType

Array = Any
Vector = Any
Numbers = np.ndarray[Any, Any]
ALIGN = 64  # bytes; every array begins where an allocation of its own would


class Flat:
    """Parameters of one type, one after the other in one vector."""

    def __init__(self, names: Sequence[str], values: dict[str, Numbers], home: Context) -> None:
        self.names, self.shapes = list(names), [values[name].shape for name in names]
        self.dtype = values[self.names[0]].dtype
        self.real = self.dtype.kind == "f"
        self.spans: list[tuple[int, int]] = []
        start, unit = 0, ALIGN // self.dtype.itemsize
        for shape in self.shapes:
            self.spans.append((start, start + prod(shape)))
            start += -(-prod(shape) // unit) * unit
        self.size, self._home = start, home
        zeros = nd.zeros((unit,), home, self.dtype)
        self._pads = [zeros[: -(hi - lo) % unit] if (hi - lo) % unit else None for lo, hi in self.spans]
        self.vector = self.filled(values)

    def cut(self, vector: Any) -> list[Any]:
        """The arrays of such a vector, of MXNet or of NumPy, as views of it."""
        return [vector[lo:hi].reshape(shape) for (lo, hi), shape in zip(self.spans, self.shapes, strict=True)]

    def join(self, arrays: Sequence[Array]) -> list[Vector]:
        """Arrays of these shapes as the pieces of such a vector."""
        pieces = []
        for array, pad in zip(arrays, self._pads, strict=True):
            pieces += [array.reshape((-1,)), *([] if pad is None else [pad])]
        return pieces

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
    weights: list[Parameter]
    state: list[list[Parameter]]  # as the replica's vectors of state
    attributes: list[tuple[dict[str, Any], dict[str, Array]]]  # of each block: all, and the arrays among them at first
    constants: dict[str, tuple[Array, bytes]]  # what must not be written to, and what it was
    fresh: bool = False  # whether the weights are the replica's
    checked: bool = False
    sparse: list[Array] = field(default_factory=list)
    dense: list[Array] = field(default_factory=list)

    def __post_init__(self) -> None:
        for gradient in (p.grad() for p in self.weights):
            (self.dense if gradient.stype == "default" else self.sparse).append(as_nd(gradient))

    def begin(self) -> None:
        """Start a shard with the arrays that blocks had at first."""
        for now, first in self.attributes:
            now.update(first)

    def clear(self) -> None:
        """Set all gradients to zero: the backward pass does not touch those of weights that a shard did not use."""
        for gradient in self.sparse:
            nd.zeros_like(gradient, out=gradient)
        nd.reset_arrays(*self.dense, num_arrays=len(self.dense))


class MxnetReplica:
    def __init__(
        self,
        model: Block,
        loss: Any,
        device: Device,
        shards: int,
        home: Context,
        lanes: Sequence[Context],
        user: Context,
    ) -> None:
        self.device, self.loss, self.shards = device, loss, shards
        self._home, self._user = home, user
        self._contexts, self._turn = list(lanes), 0
        self._lanes: dict[Context, Lane] = {}
        given = parameters_of(model)
        check_parameters(given)
        values = {name: p.list_data()[0].asnumpy() for name, p in given.items()}
        self._numpy = any(isinstance(p.list_data()[0], mxnp.ndarray) for p in given.values())
        self._model = copied(model, bare, model_context(model))
        self._of = parameters_of(self._model)
        first = {id(p): name for name, p in reversed(self._of.items())}  # a parameter may have several names
        self._first = {name: first[id(p)] for name, p in self._of.items()}
        groups: dict[str, list[str]] = {"trained": [], "constant": []}
        for name in dict.fromkeys(self._first.values()):
            p = self._of[name]
            kind = "trained" if p.grad_req != "null" else "constant" if p._differentiable else str(values[name].dtype)
            groups.setdefault(kind, []).append(name)
        self.weights = Flat(groups.pop("trained"), values, home)
        self._constants = {name: values[name] for name in groups.pop("constant")}
        self.state = [Flat(names, values, home) for names in groups.values()]
        self.parameters = self.weights.vector
        ends = [*(lo for lo, _ in self.weights.spans[1:]), self.weights.size]
        self.gaps = [slice(hi, end) for (_, hi), end in zip(self.weights.spans, ends, strict=True)]
        zeros = nd.zeros((shards,), home, self.weights.dtype)
        # around the one number of a shard: (those of the shards before, those of the shards after)
        self._slots = [([zeros[:i]] * (i > 0), [zeros[i + 1 :]] * (i + 1 < shards)) for i in range(shards)]
        self.size = self.weights.size + sum(flat.size for flat in self.state) + 2 * shards
        self.bands = [(0, self.size)]

    # One shard

    def gradient(self, x: Array, y: Array, key: int, shard: int, deliver: Deliver | None = None) -> Vector:
        lane, dtype = self._lane(shard), self.weights.dtype
        before, after = self._slots[shard]
        lane.clear()
        with lane.context:
            seed(key, lane.context)
            x, y = self._given(x, y, lane)
            with autograd.record():
                output = lane.block(x)
                loss = sum_of_losses(self.loss, output, y)
            loss.backward()
            pieces = self.weights.join([as_nd(p.grad()).tostype("default") for p in lane.weights])
            for flat, held in zip(self.state, lane.state, strict=True):
                own = nd.concat(*flat.join([as_nd(p.data()) for p in held]), dim=0)
                pieces.append((own - flat.vector).astype(dtype) * len(y))
            for number in (loss, hits(output, y)):
                pieces += [*before, number.detach().astype(dtype).reshape((1,)), *after]
        whole = nd.empty((self.size,), self._home, dtype)
        nd.concat(*pieces, dim=0, out=whole)
        self._check_constants(lane)
        return whole

    def evaluate(self, x: Array, y: Array, key: int) -> Vector:
        self._turn += 1
        lane = self._lane(self._turn)
        with lane.context, autograd.pause(train_mode=False):
            seed(key, lane.context)
            x, y = self._given(x, y, lane)
            output = lane.block(x)
            numbers = sum_of_losses(self.loss, output, y), hits(output, y)
        whole = nd.empty((2,), self._home, np.float64)
        return nd.concat(*(number.astype(np.float64).reshape((1,)) for number in numbers), dim=0, out=whole)

    def _given(self, x: Array, y: Array, lane: Lane) -> tuple[Array, Array]:
        """The examples as the model wants them, in a lane."""
        x, y = x.as_in_context(lane.context), y.as_in_context(lane.context)
        return (x.as_np_ndarray(), y.as_np_ndarray()) if self._numpy else (x, y)

    # The step's other half

    def assign(self, parameters: Vector) -> None:
        parameters.copyto(self.parameters)
        self.moved()

    def moved(self) -> None:
        """The vector of weights was written to."""
        for lane in self._lanes.values():
            lane.fresh = False

    def advance(self, total: Vector, examples: int) -> None:
        start = self.weights.size
        for flat in self.state:
            delta = total[start : start + flat.size] / examples
            start += flat.size
            if flat.real:
                flat.vector += delta.astype(flat.dtype)
            else:  # a counter changes alike in every shard, so the mean is the change
                flat.vector += delta.round().astype(flat.dtype)

    def fingerprint(self) -> Vector:
        """Computed on the host: MXNet has no operation that takes numbers for their bits. This waits for the weights."""
        total = bits.fingerprint([vector.asnumpy() for vector in [self.parameters, *(f.vector for f in self.state)]])
        return nd.array(total, self._home, np.int64)

    # By name

    def _flats(self) -> list[Flat]:
        """What `vectors` gives the vectors of."""
        return [flat for flat in [self.weights, *self.state] if flat.real]

    def vectors(self) -> list[Vector]:
        return [self.parameters, *(flat.vector for flat in self.state if flat.real)]

    def tensors(self, vectors: Sequence[Vector] | None = None) -> Tensors:
        found = dict(self._constants)
        for flat, vector in zip(self._flats(), self.vectors() if vectors is None else vectors, strict=True):
            found |= flat.named(vector)
        for flat in self.state:
            if not flat.real:
                found |= flat.named(flat.vector)
        return {name: found[first] for name, first in self._first.items()}

    def vectors_from(self, tensors: Tensors) -> list[Vector]:
        return [flat.filled(tensors) for flat in self._flats()]

    def load(self, tensors: Tensors) -> None:
        self.weights.filled(tensors).copyto(self.parameters)
        for flat in self.state:
            flat.filled(tensors).copyto(flat.vector)
        self._constants = {name: np.array(tensors[name]) for name in self._constants}
        self._lanes.clear()

    def named(self, vector: Vector) -> Tensors:
        return self.weights.named(vector)

    def flat(self, named: Tensors) -> Vector:
        return self.weights.filled(named)

    def model(self, vectors: Sequence[Vector] | None = None) -> Block:
        return self._filled(self.tensors(vectors), self._user)

    def release(self) -> None:
        self._lanes.clear()

    def leaves(self) -> list[tuple[str, Parameter, Vector]]:
        """Of each trained parameter its name, what the user's model says of it, and its part of this replica's vector."""
        views = zip(self.weights.names, self.weights.cut(self.parameters), strict=True)
        return [(name, self._of[name], view) for name, view in views]

    # Lanes

    def _lane(self, turn: int) -> Lane:
        """A lane that starts a shard: with the replica's weights and state."""
        context = self._contexts[turn % len(self._contexts)]
        lane = self._lanes.get(context)
        if lane is None:
            lane = self._lanes[context] = self._new_lane(context)
        if not lane.fresh:
            copy_to(self.weights.cut(self.parameters), lane.weights)
            lane.fresh = True
        for flat, held in zip(self.state, lane.state, strict=True):
            copy_to(flat.cut(flat.vector), held)
        lane.begin()
        return lane

    def _new_lane(self, context: Context) -> Lane:
        block = self._filled(self.tensors(), context)
        of = parameters_of(block)
        constants = {name: of[name].data() for name in self._constants}
        for path, one in blocks_of(block):
            constants |= {path + key: array for key, array in arrays_in(one).items()}
        return Lane(
            context,
            block,
            [of[name] for name in self.weights.names],
            [[of[name] for name in flat.names] for flat in self.state],
            [(vars(one), arrays_in(one)) for _, one in blocks_of(block)],
            {name: (array, array.asnumpy().tobytes()) for name, array in constants.items()},
        )

    def _filled(self, tensors: Tensors, context: Context) -> Block:
        """The user's block with these weights, on a context."""
        make = mxnp.array if self._numpy else nd.array
        names = {id(p): name for name, p in self._of.items()}

        def parameter(old: Parameter) -> Parameter:
            new = bare(old)
            value = tensors[names[id(old)]]
            new._init_impl(make(value, ctx=context, dtype=value.dtype), [context])
            return new

        return copied(self._model, parameter, context)

    def _check_constants(self, lane: Lane) -> None:
        if lane.checked:
            return
        lane.checked = True
        for name, (array, before) in lane.constants.items():
            if array.asnumpy().tobytes() != before:
                raise Invalid(
                    f"{name!r} was written to in the forward pass, but is not state, so its value would depend on who "
                    "computed which shard: use self.params.get(name, grad_req='null', differentiable=False)"
                )


def copy_to(arrays: Sequence[Array], parameters: Sequence[Parameter]) -> None:
    for array, p in zip(arrays, parameters, strict=True):
        array.copyto(as_nd(p.data()))


def as_nd(array: Array) -> Array:
    return array.as_nd_ndarray() if isinstance(array, mxnp.ndarray) else array


# Arithmetic


def seed(key: int, context: Context) -> None:
    """Have all that is drawn from now on be drawn from a key: in the order of the program, whoever computes it.

    The contexts of the CPU share one generator (each Python thread has its own), and the engine lets nobody draw before the
    draws that were asked for earlier. MXNet takes 32 bits; setting the generator takes 2 ms, whether the model draws or not.
    """
    random.seed((key ^ key >> 32) & 0x7FFFFFFF, ctx=context)


def sum_of_losses(loss: Any, output: Any, y: Array) -> Array:
    """The sum over examples of the loss, whether `loss` gives one value per example or their mean."""
    if loss is None:
        output, y = as_nd(output), as_nd(y)
        return -nd.pick(nd.log_softmax(output, axis=1), y, axis=1).sum()
    value = loss(output, y)
    if not isinstance(value, nd.NDArray):
        raise WrongType(f"loss must return an array (a loss per example, or their mean), got {type(value).__name__}")
    value = as_nd(value)
    if value.size == 1:
        return value.reshape((1,)) * len(y)
    if len(value) != len(y):
        raise Invalid(
            f"loss must return one value per example ({len(y)}) or their mean, got shape {tuple(value.shape)}"
        )
    return (value.reshape((len(y), -1)).mean(axis=1) if value.ndim > 1 else value).sum()


def hits(output: Any, y: Array) -> Array:
    """How many examples have their highest score at their label; 0 where the output is not one score per class."""
    if isinstance(output, nd.NDArray) and output.ndim == 2 and y.ndim == 1 and np.dtype(y.dtype).kind in "iu":
        scores = as_nd(output).detach()
        return (scores.argmax(axis=1).astype(np.float64) == as_nd(y).astype(np.float64)).sum()
    return nd.zeros((1,))
