"""MXNet: devices, arrays, and where a run computes. The replica is in replica.py.

Measured on the CPU with MXNet 1.9.1: a convolution or a product of matrices has other bits on another number of OpenMP threads.
That number belongs to the thread of MXNet's engine that computes, and each context of the CPU has such a thread of its own.
oneDNN keeps what it has prepared for a number of threads for as long as the thread lives. So a run computes on contexts that
nobody else uses, other ones for every `threads_per_shard`, and their threads are told to compute with so many. One Python
thread asks for everything: the engine does not wait, so a second one would gain nothing.

A block that was hybridized is computed compiled. Most have the same bits then, but gluon's BatchNorm may not, so the recipe
tells. samestep hybridizes nothing by itself: a block need not allow it, and it is not faster on the CPU. All random operations
draw from the one generator that the CPU has for a Python thread. MXNet does not give away its state, so after a run it goes on
from a number that it gave before. There are no GPUs here: MXNet 1.9.1 knows none of today's, so none was tried.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.base import MXNetError
from mxnet.context import Context

from samestep.backends.base import Backend, Task
from samestep.backends.losses import (
    IGNORED,
    Measure,
    Shape,
    check_examples,
    check_weights,
    class_axis,
    convert,
    not_floats,
    not_trained,
)  # fmt: skip
from samestep.backends.mxnet import numerics
from samestep.backends.mxnet.blocks import arrays_in, blocks_of, parameters_of, passed, style
from samestep.backends.mxnet.content import content
from samestep.backends.mxnet.engine import check_soon, idle_view, use_threads
from samestep.backends.mxnet.flat import as_nd
from samestep.backends.mxnet.noise import seed
from samestep.backends.mxnet.replica import MxnetReplica
from samestep.backends.mxnet.updater import MxnetUpdater
from samestep.backends.workers import side_by_side
from samestep.devices import Device, cpu
from samestep.errors import Invalid, WrongType
from samestep.trees import Tree, mapped

TYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool")
# Numbers of contexts of the CPU that are samestep's. A run on cpu:i keeps its vectors on HOMES + i, and computes shards on
# those from LANES * threads_per_shard on.
HOMES, LANES = 256, 512
# What would let the machine into the bits: who computes, from which generator, and MXNet's own kernels for recurrent layers,
# which give other bits each time (oneDNN's do not).
ENVIRONMENT = {
    "MXNET_ENGINE_TYPE": "ThreadedEnginePerDevice",
    "MXNET_CPU_WORKER_NTHREADS": "1",
    "MXNET_CPU_PARALLEL_RAND_COPY": "1",
    "MXNET_USE_MKLDNN_RNN": "1",
}
LIMITS = {"OMP_DYNAMIC", "OMP_THREAD_LIMIT", "OMP_MAX_ACTIVE_LEVELS"}  # with fewer threads than asked, oneDNN gives NaN


class MxnetBackend(Backend):
    name, an_array = "mxnet", "an array"

    def __init__(self) -> None:
        super().__init__()
        self._lanes: list[Context] = []  # while a run lasts
        self._next: Any = None  # from where the user's generator goes on after a run

    # Devices

    def devices(self) -> list[Device]:
        return [cpu()]

    def usable(self, device: Device) -> bool:
        """The CPU has many numbers. Only one is listed, or a count of devices would use them all."""
        return device.kind == "cpu" and device.index < HOMES

    def _home(self, device: Device) -> Context:
        """Where arrays of a device are put: while a run lasts, on a context that computes with one thread."""
        self.require(device)
        return mx.cpu(HOMES + device.index if self._lanes else device.index)

    def state_dict(self, model: gluon.Block) -> dict[str, Any]:
        return {name: parameter.data() for name, parameter in model._collect_params_with_prefix().items()}

    # Arrays

    def owns(self, thing: object) -> bool:
        return isinstance(thing, (nd.NDArray, gluon.Block))

    def is_array(self, thing: object) -> bool:
        return isinstance(thing, nd.NDArray)

    def device_of(self, array: Any) -> Device:
        return Device("cpu", array.ctx.device_id % HOMES) if isinstance(array, nd.NDArray) else cpu()

    def put(self, array: Any, device: Device) -> Any:
        is_there = isinstance(array, nd.NDArray) and array.ctx == self._home(device)
        return array if is_there else self.copy(array, device)

    def full(self, shape: tuple[int, ...], value: float, device: Device, dtype: str) -> Any:
        if not shape:
            raise Invalid("full: MXNet has no arrays without a dimension: use shape (1,)")
        return nd.full(shape, value, self._home(device), dtype)

    def get(self, array: Any) -> np.ndarray[Any, Any]:
        with self.explained():
            numbers = array.asnumpy() if isinstance(array, nd.NDArray) else np.asarray(array)
        check_soon()
        return numbers

    def copy(self, array: Any, device: Device, gradient: bool = False) -> Any:
        context = self._home(device)
        new = array.copyto(context) if isinstance(array, nd.NDArray) else _array(array, context)
        if gradient:
            new.attach_grad()
        return new

    def assign(self, array: Any, value: Any) -> Any:
        value.copyto(array)
        return array

    def take(self, array: Any, index: Any) -> Any:
        if isinstance(array, mx.np.ndarray):
            return array.take(index.as_np_ndarray(), axis=0, mode="clip")
        # In a run, to a context that computes: one that keeps vectors has other work.
        rows = nd.empty((len(index), *array.shape[1:]), self._lanes[0] if self._lanes else array.ctx, array.dtype)
        return nd.take(array, index, axis=0, mode="clip", out=rows)

    def add(self, left: Any, right: Any) -> Any:
        left += right
        return left

    def concat(self, vectors: Sequence[Any]) -> Any:
        if isinstance(vectors[0], mx.np.ndarray):
            return mx.np.concatenate(list(vectors))
        return nd.concat(*vectors, dim=0)

    def zeros_like(self, vector: Any) -> Any:
        return nd.zeros_like(vector)

    def clip(self, vector: Any, limit: float) -> Any:
        norm = (vector * vector).sum().sqrt()
        return vector * (limit / nd.maximum(norm, limit))

    def in_memory(self, vector: Any) -> np.ndarray[Any, Any]:
        return idle_view(vector)

    # A run

    require_portable = staticmethod(numerics.require_portable)
    numerics = staticmethod(numerics.found)
    content = staticmethod(content)

    @contextmanager
    def session(self, devices: Sequence[Device], *, deterministic: bool, threads: int) -> Iterator[None]:
        for name, value in ENVIRONMENT.items():
            if (found := os.environ.get(name, value)) != value:
                raise Invalid(f"{name}={found} lets the machine into the bits: unset it, or use {name}={value}")
        if threads > 1 and (limits := LIMITS & os.environ.keys()):
            raise Invalid(f"{limits.pop()} may keep threads from a shard: unset it, or use threads_per_shard=1")
        with self.workers.at_work(devices, threads), autograd.pause():  # a fit inside record(), too
            with suppress(MXNetError):
                nd.waitall()  # raises what failed before this run, and would else do so in the middle of it
            self._lanes = [mx.cpu(LANES * threads + i) for i in range(side_by_side(threads))]
            for context in set(map(self._home, devices)):
                use_threads(context, 1)
            for context in self._lanes:
                use_threads(context, threads)
            try:
                yield
            finally:
                self._lanes, number, self._next = [], self._next, None
                with suppress(MXNetError):
                    nd.waitall()  # nobody else computes with what is let go now
                if number is not None:
                    seed(int(number.asscalar()), mx.cpu())

    def map(self, tasks: Sequence[Task]) -> list[Any]:
        with self.explained():
            return [task() for task in tasks]  # the engine's threads compute side by side

    # Models

    style = staticmethod(style)

    def probe(self, model: Any, measure: Any, x: Tree, y: Tree, name: str = "x") -> Shape:
        measure = Measure.of(measure)
        parameters = parameters_of(model).values()
        types = (str(np.dtype(p.dtype)) for p in parameters if p.grad_req != "null")
        dtype = check_weights(self.describe(model), types)
        check_examples(name, x, dtype, y)
        try:
            context = next(iter(parameters)).list_ctx()[0]
        except RuntimeError:
            raise Invalid("the model has no weights yet: call model.initialize() first") from None
        held = [(vars(block), arrays_in(block)) for _, block in blocks_of(model)]
        kept = [a for p in parameters if p.grad_req == "null" and p._data for a in p.list_data()]
        state = [(a, a.copy()) for a in [*kept, *(a for _, arrays in held for a in arrays.values())]]
        as_given = nd.NDArray.as_np_ndarray if mx.util.is_np_array() else nd.NDArray.as_nd_ndarray
        try:
            with context, autograd.pause(train_mode=False), self.explained():
                given, labels = (mapped(lambda one: as_given(_array(one, context)), tree) for tree in (x, y))
                shape = self.described(measure, model(*passed(given, measure.style)), labels, y, dtype)
                nd.waitall()
        except (MXNetError, TypeError, ValueError) as error:
            if not_floats(x) and re.search("(?i)dtype|type|expected", str(error)):
                raise convert(name, x, dtype) from None
            raise
        finally:
            for array, value in state:
                value.copyto(array)
            for attributes, arrays in held:  # those that the pass has made are let go
                for key in [key for key, value in attributes.items() if isinstance(value, nd.NDArray)]:
                    del attributes[key]
                attributes.update(arrays)
        return shape

    def replica(self, model: Any, measure: Any, device: Device, shards: int, capture: bool = True) -> MxnetReplica:
        home = self._home(device)
        if self._lanes and self._next is None:  # weights that had to be drawn have been drawn by now
            self._next = nd.random.randint(0, 2**31 - 1, ctx=mx.cpu())
        with self.explained():
            return MxnetReplica(self, model, measure, device, shards, home, *(self._lanes or [home]))

    def updater(self, optimizer: Any, replica: MxnetReplica, clip: Any) -> MxnetUpdater:
        return MxnetUpdater(optimizer, replica, clip)

    def rates(self, scheduler: Any, n: int, unit: str = "step") -> list[float]:
        if not isinstance(scheduler, mx.lr_scheduler.LRScheduler):
            raise WrongType(f"schedule must be an mxnet.lr_scheduler.LRScheduler, got {type(scheduler).__name__}")
        twin, first = copy.deepcopy(scheduler), unit == "step"  # MXNet counts an update before it asks for its rate
        return [float(twin(first + t)) for t in range(n)]

    # Losses: arrays of mxnet.nd, which have at least one dimension

    def cross_entropy(self, output: Any, y: Any) -> Any:
        return -nd.pick(nd.log_softmax(as_nd(output), axis=1), as_nd(y), axis=1).sum()

    def by_position(self, output: Any, y: Any) -> tuple[Any, Any]:
        scores, labels = as_nd(output), as_nd(y)
        axis = class_axis(scores.shape, labels.shape)
        counts = (labels != IGNORED).astype(np.promote_types(scores.dtype, np.float32))
        each = nd.pick(nd.log_softmax(scores, axis=axis), nd.maximum(labels, 0), axis=axis).astype(counts.dtype)
        return -(each * counts).sum(), counts.sum()

    def number(self, value: Any, like: Any) -> Any:
        dtype = np.promote_types(like.dtype, np.float32)
        if not isinstance(value, nd.NDArray):
            return nd.full((1,), float(value), like.ctx, dtype)
        return as_nd(value).detach().astype(dtype).reshape((1,))

    def call_loss(self, loss: Any, output: Any, y: Tree) -> Any:
        pair = isinstance(loss, gluon.loss.Loss) and isinstance(y, (tuple, list))  # labels, and the weights of examples
        value = loss(output, *y) if pair else loss(output, y)
        if isinstance(value, (tuple, list)):
            return [as_nd(one) for one in value]
        value = as_nd(value)
        return value.reshape((1,)) if isinstance(value, nd.NDArray) and self.is_single(value) else value

    def is_single(self, value: Any) -> bool:
        return bool(value.size == 1)

    def count_hits(self, output: Any, y: Any) -> Any:
        best = as_nd(output).argmax(axis=1)
        return nd.sum(best == nd.cast(as_nd(y), dtype=best.dtype))

    def zero(self, like: Any) -> Any:
        return nd.zeros((1,), like.ctx)

    # Errors

    def explain(self, error: Exception) -> Exception | None:
        if elsewhere := re.match("Parameter ('.*') was not initialized on context", str(error)):
            return not_trained(elsewhere[1])
        return super().explain(error)


def _array(numbers: Any, context: Context) -> Any:
    """A new array on a context, of the type that the numbers have."""
    numbers = np.asarray(numbers)
    if str(numbers.dtype) not in TYPES:
        raise WrongType(f"mxnet has no {numbers.dtype} arrays: convert them, for example with x.astype('float32')")
    return nd.array(numbers, context, numbers.dtype)


backend: Backend = MxnetBackend()
