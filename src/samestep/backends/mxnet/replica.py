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
from typing import Any

import numpy as np
from mxnet import autograd, nd
from mxnet import np as mxnp
from mxnet.context import Context
from mxnet.gluon import Block
from mxnet.gluon.parameter import Parameter

from samestep import fingerprint as bits
from samestep.backends import Deliver, Tensors
from samestep.backends.mxnet.blocks import (
    arrays_in,
    bare,
    blocks_of,
    check_parameters,
    copied,
    model_context,
    parameters_of,
)
from samestep.backends.mxnet.engine import memory, soon
from samestep.backends.mxnet.lane import Flat, Lane, OnHost
from samestep.backends.mxnet.noise import Graphs, drawn_from
from samestep.data.examples import Pass
from samestep.devices import Device
from samestep.errors import Invalid, WrongType
from samestep.optimizers.rules import SGD, Descent
from samestep.optimizers.updating import update_in_place
from samestep.shards import Span

Array = Any
Vector = Any


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
        # Of an evaluation others than of training: it may change how weights lie in memory.
        self._lanes: dict[tuple[Context, bool], Lane] = {}
        self._one: OnHost | None = None  # for whole steps
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
        self._views = self.weights.cut(self.parameters)
        ends = [*(lo for lo, _ in self.weights.spans[1:]), self.weights.size]
        self.gaps = [slice(hi, end) for (_, hi), end in zip(self.weights.spans, ends, strict=True)]
        self.size = self.weights.size + sum(flat.size for flat in self.state) + 2 * shards
        self.bands = [(0, self.size)]
        self._printer: bits.Print | None = None  # of vectors that are written to, and stay where they are
        self._print: Vector = None  # the fingerprint, where it is known, and that before the last whole step
        self._behind: Vector = None

    # One shard

    def gradient(self, x: Array, y: Array, key: int, shard: int, deliver: Deliver | None = None) -> Vector:
        lane = self._lane(shard)
        start = self.size - 2 * self.shards + shard
        loss, output, y = self._computed(x, y, key, lane)
        with lane.context:
            right = hits(output, y)
        for number in (loss, right):
            number.copyto(lane.whole[start : start + 1])
            start += self.shards
        vector = nd.empty((self.size,), self._home, self.weights.dtype)
        lane.whole.copyto(vector)
        return vector

    def _computed(self, x: Array, y: Array, key: int, lane: Lane, of_mean: bool = False) -> tuple[Array, Any, Array]:
        """The loss of a shard, what the model gave, and the labels; the gradient and the changes of state are in the lane.

        The gradient is that of the sum of losses, or of their mean.
        """
        with lane.context:
            x, y = self._given(x, y, lane)
            with drawn_from(key, lane.context, lane.graphs):
                with autograd.record():
                    output = lane.block(x)
                    loss = sum_of_losses(self.loss, output, y)
                loss.backward(lane.scale(len(y), loss) if of_mean else None)
            lane.gather()
            start = self.weights.size
            for flat, own in zip(self.state, lane.state, strict=True):
                change = (own - flat.vector).astype(self.weights.dtype) * len(y)
                change.copyto(lane.whole[start : start + flat.size])
                start += flat.size
        self._check_constants(lane)
        return loss, output, y

    def whole(
        self, pass_: Pass, span: Span, key: int, optimizer: Descent, slots: dict[str, Vector], lr: float, t: int
    ) -> tuple[Vector, dict[str, Vector]]:
        """A whole step of one shard, for which Python waits only when it is two steps ahead: [loss, hits], and the slots.

        Whatever need not be an operation of MXNet's is done by functions that its engine calls: to ask for an operation takes
        longer than many of them do.
        """
        if self._behind is not None:
            self._behind.wait_to_read()
        x, y = pass_.shard(span, self.device)
        lane, examples = self._lane(0), span[1] - span[0]
        exact = examples & (examples - 1) == 0  # a power of two: the bits are the same whenever it is divided by
        loss, output, y = self._computed(x, y, key, lane, of_mean=exact)
        best = as_nd(output).argmax(axis=1) if has_scores(output, y) else loss
        labels, stateless = as_nd(y), not self.state
        numbers, place = nd.empty((2,), self._home, loss.dtype), nd.empty((1,), self._home, np.int64)
        if self._one is None or self._one.lane is not lane:
            self._one = OnHost(self.weights, lane)
        one = self._one

        def update() -> None:
            if exact and stateless and optimizer == SGD():
                one.descend(lr)
            else:
                state = {name: memory(slot) for name, slot in slots.items()}
                update_in_place(optimizer, one.weights, state, one.total, 1 if exact else examples, lr, t)
            if stateless:
                one.refresh()

        def tell() -> None:  # while the next step begins
            right = 0 if best is loss else np.count_nonzero(memory(best) == memory(labels))
            memory(numbers)[:] = memory(loss)[0], right
            if stateless:
                memory(place)[:] = one.fingerprint()

        soon(update, self._home, [], [self.parameters, lane.whole, *lane.weights, *slots.values()])
        given = [loss, labels] if best is loss else [loss, labels, best]
        soon(tell, self._home, [self.parameters, *given], [numbers, place])
        behind = self._print
        self.moved()
        lane.fresh = lane.clean = stateless
        self.advance(lane.whole, examples)
        self._behind, self._print = behind, place if stateless else self.fingerprint()
        return numbers, slots

    def in_one_go(self, optimizer: Any) -> bool:
        """Whether `whole` can make the steps of this optimizer."""
        return self.device.kind == "cpu" and isinstance(optimizer, Descent)

    def evaluate(self, x: Array, y: Array, key: int) -> Vector:
        self._turn += 1
        lane = self._lane(self._turn, training=False)
        with lane.context, autograd.pause(train_mode=False):
            x, y = self._given(x, y, lane)
            with drawn_from(key, lane.context, lane.graphs):
                output = lane.block(x)
                loss = sum_of_losses(self.loss, output, y)
            numbers = loss, hits(output, y)
        whole = nd.empty((2,), self._home, np.float64)
        return nd.concat(*(number.astype(np.float64).reshape((1,)) for number in numbers), dim=0, out=whole)

    def _given(self, x: Array, y: Array, lane: Lane) -> tuple[Array, Array]:
        """The examples as the model wants them, in a lane."""
        x, y = x.as_in_context(lane.context), y.as_in_context(lane.context)
        return (x.as_np_ndarray(), y.as_np_ndarray()) if self._numpy else (x, y)

    # The step's other half

    def assign(self, parameters: Vector) -> None:
        if parameters is not self.parameters:
            parameters.copyto(self.parameters)
        self.moved()

    def moved(self) -> None:
        """The vector of weights was written to."""
        self._print = None
        for lane in self._lanes.values():
            lane.fresh = False

    def advance(self, total: Vector, examples: int) -> None:
        start, self._print = self.weights.size, None
        for flat in self.state:
            delta = total[start : start + flat.size] / examples
            start += flat.size
            if flat.real:
                flat.vector += delta.astype(flat.dtype)
            else:  # a counter changes alike in every shard, so the mean is the change
                flat.vector += delta.round().astype(flat.dtype)

    def fingerprint(self) -> Vector:
        """On the CPU by NumPy, when the weights are there; MXNet has no operation that takes numbers for their bits."""
        if self._print is not None:
            return self._print
        vectors = [self.parameters, *(flat.vector for flat in self.state)]
        if self.device.kind != "cpu":
            return bits.fingerprint([vector.asnumpy() for vector in vectors])  # waits
        place = nd.empty((1,), self._home, np.int64)

        def compute() -> None:
            if self._printer is None:
                self._printer = bits.Print([memory(vector) for vector in vectors])
            memory(place)[:] = self._printer()

        soon(compute, self._home, vectors, [place])
        return place

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
        self._print = None

    def named(self, vector: Vector) -> Tensors:
        return self.weights.named(vector)

    def flat(self, named: Tensors) -> Vector:
        return self.weights.filled(named)

    def model(self, vectors: Sequence[Vector] | None = None) -> Block:
        return self._filled(self.tensors(vectors), self._user)

    def release(self) -> None:
        self._lanes.clear()
        self._one = None

    def leaves(self) -> list[tuple[str, Parameter, Vector]]:
        """Of each trained parameter its name, what the user's model says of it, and its part of this replica's vector."""
        views = zip(self.weights.names, self.weights.cut(self.parameters), strict=True)
        return [(name, self._of[name], view) for name, view in views]

    # Lanes

    def _lane(self, turn: int, training: bool = True) -> Lane:
        """A lane that starts a shard: with the replica's weights and state."""
        context = self._contexts[turn % len(self._contexts)]
        lane = self._lanes.get((context, training))
        if lane is None:
            lane = self._lanes[context, training] = self._new_lane(context)
        if not lane.fresh:
            for view, own in zip(self._views, lane.weights, strict=True):
                view.copyto(own)
            lane.fresh = True
        for flat, held in zip(self.state, lane.state, strict=True):
            flat.vector.copyto(held)
        lane.begin()
        return lane

    def _new_lane(self, context: Context) -> Lane:
        block = self._filled(self.tensors(), context)
        of = parameters_of(block)
        held = [flat.vector.copyto(context) for flat in self.state]
        for flat, vector in zip(self.state, held, strict=True):
            for name, view in zip(flat.names, flat.cut(vector), strict=True):
                of[name]._data = [view.as_np_ndarray() if self._numpy else view]
        whole = nd.zeros((self.size,), context, self.weights.dtype)
        constants = {name: of[name].data() for name in self._constants}
        for path, one in blocks_of(block):
            constants |= {path + key: array for key, array in arrays_in(one).items()}
        return Lane(
            context,
            block,
            [of[name] for name in self.weights.names],
            [as_nd(of[name].data()) for name in self.weights.names],
            held,
            whole,
            self.weights.cut(whole),
            [(vars(one), arrays_in(one)) for _, one in blocks_of(block)],
            {name: (array, array.asnumpy().tobytes()) for name, array in constants.items()},
            Graphs(block, *([self.loss] if isinstance(self.loss, Block) else [])),
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


def as_nd(array: Array) -> Array:
    return array.as_nd_ndarray() if isinstance(array, mxnp.ndarray) else array


# Arithmetic


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


def has_scores(output: Any, y: Array) -> bool:
    """Whether the output is one score per class, for labels."""
    return isinstance(output, nd.NDArray) and output.ndim == 2 and y.ndim == 1 and np.dtype(y.dtype).kind in "iu"


def hits(output: Any, y: Array) -> Array:
    """How many examples have their highest score at their label; 0 where the output is not one score per class."""
    if has_scores(output, y):
        best = as_nd(output).argmax(axis=1)
        return nd.sum(best == nd.cast(as_nd(y), dtype=best.dtype))
    return nd.zeros((1,))
