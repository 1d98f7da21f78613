"""One whole copy of a gluon model on one device: a shard's gradient as one flat vector.

The trained weights are one flat vector, and the state is others, on the replica's *home*: in a run, a context of samestep's
own. Lanes compute (lane.py), each on another context and so side by side, with weights, gradients and state of their own.
Weights and state are copied there from home. The engine keeps the order of all operations on one array.

State is what a block keeps in parameters that are not differentiable, such as the statistics of batch norm. Parameters that
are merely frozen (grad_req "null") must not be written to. Nor must arrays that are attributes of a block: they begin every
shard as they were at the start of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, nd
from mxnet import np as mxnp
from mxnet.context import Context
from mxnet.gluon import Block
from mxnet.gluon.parameter import Parameter

from samestep.backends.base import Array, Backend, Replica, Vector
from samestep.backends.layout import Tensors
from samestep.backends.losses import not_trained
from samestep.backends.mxnet.blocks import bare, check_parameters, copied, parameters_of, passed
from samestep.backends.mxnet.engine import idle_view, numpy_view, soon
from samestep.backends.mxnet.flat import Flat
from samestep.backends.mxnet.lane import Lane
from samestep.backends.mxnet.noise import drawn_from
from samestep.devices import Device
from samestep.fingerprint import Fingerprint
from samestep.trees import Tree, length, mapped


class MxnetReplica(Replica):
    def __init__(
        self, backend: Backend, model: Block, measure: Any, device: Device, shards: int, home: Context, *lanes: Context
    ) -> None:
        super().__init__(backend, measure, device, shards)
        loss = self.measure.function
        for name in loss.collect_params() if isinstance(loss, Block) else ():
            raise not_trained(f"{name!r} of the loss")
        self._home, self._contexts = home, lanes
        self._turn = 0  # evaluations so far
        # By context, and whether it is for training: an evaluation may change the memory layout of weights.
        self._lanes: dict[tuple[Context, bool], Lane] = {}
        given = parameters_of(model)
        check_parameters(given)
        values = {name: p.list_data()[0].asnumpy() for name, p in given.items()}
        self._numpy = any(isinstance(p.list_data()[0], mxnp.ndarray) for p in given.values())
        self._model = copied(model, bare, home)
        self._parameters = parameters_of(self._model)
        first = {id(p): name for name, p in reversed(self._parameters.items())}  # a parameter may have several names
        self.names = {name: first[id(p)] for name, p in self._parameters.items()}
        groups: dict[str, list[str]] = {"trained": [], "constant": []}
        for name in dict.fromkeys(self.names.values()):
            p = self._parameters[name]
            kind = "trained" if p.grad_req != "null" else "constant" if p._differentiable else str(values[name].dtype)
            groups.setdefault(kind, []).append(name)
        self.weights = Flat.of(groups.pop("trained"), values, home)
        self._constants = {name: values[name] for name in groups.pop("constant")}
        self.state = [Flat.of(names, values, home) for names in groups.values()]
        self.layouts = [flat.layout for flat in [self.weights, *self.state]]
        self._fingerprint = Fingerprint([idle_view(vector) for vector in self.vectors])  # they never move in memory
        self.slopes = not self.state

    @property
    def vectors(self) -> list[Vector]:
        return [flat.vector for flat in [self.weights, *self.state]]

    # One shard

    def gradient(self, x: Tree, y: Tree, key: int, shard: int, training: bool = True) -> Vector:
        lane = self._lane(shard, training=True)  # in evaluation mode, the gradients of pooling and RNNs are wrong
        dtype, start = self.layouts[0].dtype, self.layouts[0].size
        with lane.context:
            x, y = self._given(x, y, lane)
            with drawn_from(key, lane.context, lane.graphs):
                with autograd.record():
                    numbers = self.backend.measured(self.measure, lane.block(*passed(x, self.measure.style)), y)
                numbers[0].backward()
            lane.gather()
            for flat, own in zip(self.state, lane.state, strict=True):
                now, first = (each.vector.astype(flat.wide, copy=False) for each in (own, flat))
                change = (now - first).astype(dtype) * length(y)
                change.copyto(lane.vector[start : start + flat.layout.size])
                start += flat.layout.size
        lane.check_constants()
        places = shard, self.shards + shard, *range(2 * self.shards, self.numbers)
        for i, number in zip(places, numbers, strict=True):
            number.copyto(lane.vector[start + i : start + i + 1])
        vector = nd.empty((self.size,), self._home, dtype)
        lane.vector.copyto(vector)
        return vector

    def evaluate(self, x: Tree, y: Tree, key: int) -> Vector:
        self._turn += 1
        lane = self._lane(self._turn, training=False)
        with lane.context, autograd.pause(train_mode=False):
            x, y = self._given(x, y, lane)
            with drawn_from(key, lane.context, lane.graphs):
                numbers = self.backend.measured(self.measure, lane.block(*passed(x, self.measure.style)), y)
        all_ = nd.empty((len(numbers),), self._home, np.float64)
        return nd.concat(*(number.astype(np.float64).reshape((1,)) for number in numbers), dim=0, out=all_)

    def _given(self, x: Tree, y: Tree, lane: Lane) -> tuple[Tree, Tree]:
        """The examples as the model wants them, in a lane."""

        def moved(array: Array) -> Array:
            array = array.as_in_context(lane.context)
            return array.as_np_ndarray() if self._numpy else array

        return mapped(moved, x), mapped(moved, y)

    # The step's other half

    def assign(self, parameters: Vector) -> None:
        if parameters is not self.parameters:
            parameters.copyto(self.parameters)
        self.moved()

    def moved(self) -> None:
        """The vector of weights was written to."""
        for lane in self._lanes.values():
            lane.fresh = False

    def fingerprint(self) -> Vector:
        """By NumPy, when the engine has the weights: no operation of MXNet's takes numbers for their bits."""
        number = nd.empty((1,), self._home, np.int64)

        def compute() -> None:
            numpy_view(number)[:] = self._fingerprint()

        soon(compute, self._home, self.vectors, [number])
        return number

    def leaves(self) -> list[tuple[str, Parameter, Array]]:
        """Of each trained parameter its name, what the user's model says of it, and its part of this replica's vector."""
        names = self.layouts[0].names
        return [(name, self._parameters[name], view) for name, view in zip(names, self.weights.views, strict=True)]

    def own_settings(self, decays: bool) -> dict[str, str]:
        found = {name: f"lr_mult={p.lr_mult}" for name, p, _ in self.leaves() if p.lr_mult != 1}
        return found | {name: f"wd_mult={p.wd_mult}" for name, p, _ in self.leaves() if decays and p.wd_mult != 1}

    # By name

    def replace(self, vectors: Sequence[Vector]) -> None:
        for own, new in zip(self.vectors, vectors, strict=True):
            new.copyto(own)
        self.moved()

    def constants(self) -> Tensors:
        return dict(self._constants)

    def take_constants(self, tensors: Tensors) -> None:
        self._constants = {name: np.array(tensors[name]) for name in self._constants}
        self._lanes.clear()

    def model_of(self, tensors: Tensors) -> Block:
        return self._copy(tensors, mx.cpu(self.device.index))

    # Lanes

    def _lane(self, turn: int, training: bool) -> Lane:
        """A lane, ready for a shard."""
        context = self._contexts[turn % len(self._contexts)]
        lane = self._lanes.get((context, training))
        if lane is None:
            block, state = self._copy(self.tensors(), context), [flat.twin(context) for flat in self.state]
            lane = Lane(context, block, self.measure.loss, self.layouts[0], state, list(self._constants), self.size)
            self._lanes[context, training] = lane
        lane.begin(self.weights, self.state)
        return lane

    def _copy(self, tensors: Tensors, context: Context) -> Block:
        """The user's block, copied around these tensors, on a context."""
        make = mxnp.array if self._numpy else nd.array
        names = {id(p): name for name, p in self._parameters.items()}

        def parameter(old: Parameter) -> Parameter:
            new, value = bare(old), tensors[names[id(old)]]
            new._init_impl(make(value, ctx=context, dtype=value.dtype), [context])
            return new

        return copied(self._model, parameter, context)

    def release(self) -> None:
        self._lanes.clear()
