"""MXNet: devices, arrays, and where a run computes. The replica is in mxnet_replica.py.

Measured on the CPU with MXNet 1.9.1: a convolution or a product of matrices has other bits on another number of OpenMP threads;
that number belongs to the thread of MXNet's engine that computes, each context of the CPU has such a thread of its own, and
oneDNN keeps what it has prepared for a number of threads for as long as the thread lives. So a run on the CPU computes on
contexts that nobody else uses, other ones for every `threads_per_shard`, whose threads were told to compute with so many. One
Python thread asks for everything: the engine does not wait, so others would have nothing to gain.

A block that was hybridized is computed compiled, with the same bits; samestep hybridizes nothing by itself, as a block need not
allow it, and it is not faster on the CPU. All random operations draw from the one generator that the CPU has for a Python
thread, whose state MXNet does not give away: after a run it goes on from a number that it gave before. Nothing has been
measured on GPUs: MXNet 1.9.1 knows none of today's.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.base import MXNetError
from mxnet.context import Context

from samestep.backends import Shape, Tensors
from samestep.backends.mxnet.blocks import arrays_in, blocks_of, model_context, parameters_of
from samestep.backends.mxnet.engine import check_soon, in_memory, use_threads
from samestep.backends.mxnet.noise import seed
from samestep.backends.mxnet.replica import MxnetReplica, sum_of_losses
from samestep.backends.probing import check_examples, check_output, check_weights, convert
from samestep.backends.workers import Crew, side_by_side
from samestep.devices import Device, cpu, gpu, host_memory
from samestep.errors import Invalid, OutOfMemory, WrongType
from samestep.processes.mpi import join
from samestep.processes.place import Place
from samestep.processes.world import World
from samestep.runs.run import fingerprint

# What cuDNN may do, read whenever an operation is made.
os.environ.setdefault("MXNET_ENFORCE_DETERMINISM", "1")
os.environ.setdefault("MXNET_CUDNN_AUTOTUNE_DEFAULT", "0")

TYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool")
# Numbers of contexts of the CPU that are samestep's: where a run on cpu:i keeps its vectors; and times `threads_per_shard`,
# from where on shards are computed.
HOMES, LANES = 256, 512
# What MXNet reads when it starts and would let into the bits: who computes, and from which generator.
ENVIRONMENT = {
    "MXNET_ENGINE_TYPE": "ThreadedEnginePerDevice",
    "MXNET_CPU_WORKER_NTHREADS": "1",
    "MXNET_CPU_PARALLEL_RAND_COPY": "1",
}


class MxnetBackend:
    name = "mxnet"
    version = mx.__version__

    def __init__(self) -> None:
        self._crew = Crew()
        self._lanes: list[Context] = []  # while a run on the CPU lasts
        self._next: dict[Context, Any] | None = None  # where the user's generators go on after a run

    # Devices

    def devices(self) -> list[Device]:
        return [cpu(), *(gpu(i) for i in range(mx.context.num_gpus()))]

    def memory(self, device: Device) -> tuple[int, int]:
        if device.kind == "cuda":
            free, total = mx.context.gpu_memory_info(device.index)
            return total, total - free
        return host_memory()

    def virtual(self, device: Device) -> bool:
        """Whether it is the CPU under another number; those are not listed, or a count of devices would use them all."""
        return device.kind == "cpu" and device.index < HOMES

    def _user(self, device: Device) -> Context:
        """MXNet's own object for a device."""
        if self.virtual(device):  # as many as one likes
            return mx.cpu(device.index)
        if device not in self.devices():
            raise Invalid(
                f"device {device} is not there: mxnet sees {', '.join(map(str, self.devices()))} on this machine"
            )
        return mx.gpu(device.index)

    def _home(self, device: Device) -> Context:
        """Where arrays of a device are put: while a run lasts, on a CPU that computes with one thread."""
        context = self._user(device)
        return mx.cpu(HOMES + device.index) if self._lanes and device.kind == "cpu" else context

    # Arrays

    def owns(self, thing: object) -> bool:
        return isinstance(thing, (nd.NDArray, gluon.Block))

    def device_of(self, array: Any) -> Device:
        context = array.ctx if isinstance(array, nd.NDArray) else mx.cpu()
        if context.device_type == "gpu":
            return gpu(context.device_id)
        return Device("cpu", context.device_id % HOMES)

    def put(self, array: Any, device: Device) -> Any:
        context = self._home(device)
        if isinstance(array, nd.NDArray):
            return array if array.ctx == context else array.copyto(context)
        return nd.array(checked(array), context, checked(array).dtype)

    def get(self, array: Any) -> np.ndarray[Any, Any]:
        with explained():
            numbers = array.asnumpy() if isinstance(array, nd.NDArray) else np.asarray(array)
        check_soon()
        return numbers

    place = put

    def copy(self, array: Any, device: Device, gradient: bool = False) -> Any:
        context = self._home(device)
        new = array.copyto(context) if isinstance(array, nd.NDArray) else self.put(array, device)
        if gradient:
            new.attach_grad()
        return new

    def assign(self, array: Any, value: Any) -> Any:
        value.copyto(array)
        return array

    def reshape(self, array: Any, shape: Sequence[int]) -> Any:
        return array.reshape(tuple(shape))

    def take(self, array: Any, index: Any) -> Any:
        if isinstance(array, mx.np.ndarray):
            return array.take(index.as_np_ndarray(), axis=0, mode="clip")
        # in a run to where it is computed with, or next to it
        rows = nd.empty((len(index), *array.shape[1:]), self._lanes[0] if self._lanes else array.ctx, array.dtype)
        return nd.take(array, index, axis=0, mode="clip", out=rows)

    def add(self, left: Any, right: Any) -> Any:
        left += right
        return left

    def concat(self, vectors: Sequence[Any]) -> Any:
        if isinstance(vectors[0], np.ndarray):  # fingerprints are made on the host
            return np.concatenate(vectors)
        join = mx.np.concatenate if isinstance(vectors[0], mx.np.ndarray) else lambda parts: nd.concat(*parts, dim=0)
        return vectors[0].copy() if len(vectors) == 1 else join(list(vectors))

    def zeros_like(self, vector: Any) -> Any:
        return nd.zeros_like(vector)

    def in_memory(self, vector: Any) -> np.ndarray[Any, Any]:
        """A vector on the CPU as NumPy, in its own memory."""
        return in_memory(vector)

    def clip(self, vector: Any, limit: float) -> Any:
        norm = (vector * vector).sum().sqrt()
        return vector * (limit / nd.maximum(norm, limit))

    # A run

    @contextmanager
    def session(self, devices: Sequence[Device], *, deterministic: bool, threads: int) -> Iterator[None]:
        for name, value in ENVIRONMENT.items():
            if os.environ.get(name, value) != value:
                raise Invalid(
                    f"{name}={os.environ[name]} lets the machine into the bits: unset it, or use {name}={value}"
                )
        with self._crew.at_work(devices, threads):
            with suppress(MXNetError):
                nd.waitall()  # raises what failed before this run, and would else do so in the middle of it
            if devices[0].kind == "cpu":
                self._lanes = [mx.cpu(LANES * threads + i) for i in range(side_by_side(threads))]
                for context in set(map(self._home, devices)):
                    use_threads(context, 1)
                for context in self._lanes:
                    use_threads(context, threads)
            after: dict[Context, Any] = {}
            self._next = after
            try:
                yield
            finally:
                self._lanes, self._next = [], None
                with suppress(MXNetError):
                    nd.waitall()  # nobody else computes with what is let go now
                for context, number in after.items():
                    seed(int(number.asscalar()), context)

    def map(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        with explained():
            return [task() for task in tasks]

    # Models

    def describe(self, model: Any) -> str:
        return type(model).__name__

    def probe(self, model: Any, loss: Any, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], name: str = "x") -> Shape:
        parameters = parameters_of(model).values()
        trained = [p for p in parameters if p.grad_req != "null"]
        dtype = check_weights(self.describe(model), (str(np.dtype(p.dtype)) for p in trained))
        check_examples(name, x, dtype)
        try:
            context = model_context(model)
        except RuntimeError as error:
            raise Invalid("the model has no weights yet: call model.initialize() first") from error
        held = [(vars(block), arrays_in(block)) for _, block in blocks_of(model)]
        kept = [a for p in parameters if p.grad_req == "null" and p._data for a in p.list_data()]
        state = [(a, a.copy()) for a in [*kept, *(a for _, arrays in held for a in arrays.values())]]
        numpy = mx.util.is_np_array()

        def given(array: np.ndarray[Any, Any]) -> Any:
            array = nd.array(checked(array), context, array.dtype)
            return array.as_np_ndarray() if numpy else array

        try:
            with context, autograd.pause(train_mode=False), explained():
                output = model(given(x))
                if loss is not None:
                    sum_of_losses(loss, output, given(y))
                nd.waitall()
        except (MXNetError, TypeError, ValueError) as error:
            if x.dtype.kind != "f" and re.search("(?i)dtype|type|expected", str(error)):
                raise convert(name, x, dtype) from error
            raise
        finally:
            for array, value in state:
                value.copyto(array)
            for attributes, arrays in held:  # those that the pass has made are let go
                for key in [key for key, value in attributes.items() if isinstance(value, nd.NDArray)]:
                    del attributes[key]
                attributes.update(arrays)
        shape = tuple(output.shape) if isinstance(output, nd.NDArray) else None
        return check_output("array", shape, type(output).__name__, y, loss, dtype)

    def replica(self, model: Any, loss: Any, device: Device, shards: int, capture: bool = True) -> MxnetReplica:
        home = self._home(device)
        generator = mx.cpu() if device.kind == "cpu" else home
        if self._next is not None and generator not in self._next:
            # weights that had to be drawn have been drawn by now
            self._next[generator] = nd.random.randint(0, 2**31 - 1, ctx=generator)
        with explained():
            return MxnetReplica(model, loss, device, shards, home, self._lanes or [home], self._user(device))

    def updater(self, optimizer: Any, replica: MxnetReplica) -> MxnetUpdater:
        return MxnetUpdater(optimizer, replica)

    def rates(self, scheduler: Any, n: int) -> list[float]:
        if not isinstance(scheduler, mx.lr_scheduler.LRScheduler):
            raise WrongType(f"schedule must be an mxnet.lr_scheduler.LRScheduler, got {type(scheduler).__name__}")
        twin = copy.deepcopy(scheduler)
        return [float(twin(t + 1)) for t in range(n)]  # MXNet counts an update before it asks for its rate

    def world(self, place: Place, timeout: float, devices: Sequence[Device]) -> World:
        return join(self.get, place, timeout)


def checked(array: Any) -> np.ndarray[Any, Any]:
    """An array of a type that MXNet has."""
    array = np.asarray(array)
    if str(array.dtype) not in TYPES:
        raise WrongType(f"mxnet has no {array.dtype} arrays: convert them, for example with x.astype('float32')")
    return array


@contextmanager
def explained() -> Iterator[None]:
    """Turn MXNet's errors that have a known remedy into samestep's, which name it."""
    try:
        yield
    except (MemoryError, MXNetError) as error:
        text = str(error)
        if isinstance(error, MemoryError) or re.search("(?i)allocate .*memory|out of memory", text):
            raise OutOfMemory(
                f"{'a GPU' if 'cuda' in text.lower() else 'cpu'} ran out of memory: "
                "raise shards (smaller shards need less), or lower the batch size"
            ) from error
        raise


# mxnet.optimizer


class MxnetUpdater:
    """An optimizer of mxnet.optimizer at work on one replica, on arrays that are views of the replica's vector."""

    def __init__(self, given: Any, replica: MxnetReplica) -> None:
        if isinstance(given, str) and given.lower() not in mx.optimizer.Optimizer.opt_registry:
            known = ", ".join(sorted(mx.optimizer.Optimizer.opt_registry))
            raise Invalid(f"optimizer: mxnet has no {given!r}, only {known}")
        made = mx.optimizer.create(given) if isinstance(given, str) else given
        if not isinstance(made, mx.optimizer.Optimizer) and callable(made):
            made = made()
        if not isinstance(made, mx.optimizer.Optimizer):
            raise WrongType(
                "optimizer must be an mxnet.optimizer.Optimizer, the name of one, or a function that makes one, "
                f"got {type(made).__name__}"
            )
        self._scheduler = made.lr_scheduler
        self.optimizer = made = copy.deepcopy(made)
        made.lr_scheduler = None  # the schedule sets the rate
        self._leaves = replica.leaves()
        made.param_dict = {i: about for i, (_, about, _) in enumerate(self._leaves)}  # for lr_mult and wd_mult
        self._replica = replica
        self._cut = replica.weights.cut
        self._state = [made.create_state_multi_precision(i, view) for i, (_, _, view) in enumerate(self._leaves)]

    def __repr__(self) -> str:
        about: dict[str, Any] = {name: value for name, value in sorted(vars(self.optimizer).items())
                 if isinstance(value, (bool, int, float, str)) and name not in ("lr", "num_update")}  # fmt: skip
        about["mults"] = [(p.lr_mult, p.wd_mult) for _, p, _ in self._leaves]
        return f"mxnet.optimizer.{type(self.optimizer).__name__}({about}, state={fingerprint(self.tensors())[:16]})"

    def rate(self) -> float:
        """The rate that the optimizer came with."""
        if self._scheduler is not None:
            raise Invalid(
                f"the optimizer has a scheduler inside ({type(self._scheduler).__name__}), which the Trainer does not step: "
                "pass the scheduler as schedule, and a number to the optimizer"
            )
        return float(self.optimizer.lr)

    def __call__(self, gradient: Any, lr: float, t: int, z: Any) -> None:
        optimizer = self.optimizer
        optimizer.lr, optimizer.num_update = lr, t
        optimizer._index_update_count = dict.fromkeys(range(len(self._leaves)), t)
        for i, ((_, _, weight), part) in enumerate(zip(self._leaves, self._cut(gradient), strict=True)):
            optimizer.update_multi_precision(i, weight, part, self._state[i])
        self._replica.moved()

    def _slots(self) -> dict[str, Any]:
        found = {}
        for (name, _, _), state in zip(self._leaves, self._state, strict=True):
            for i, array in enumerate(state if isinstance(state, (tuple, list)) else [state]):
                if array is not None:
                    found[f"{i}:{name}"] = array
        return found

    def tensors(self) -> Tensors:
        return {name: array.asnumpy() for name, array in self._slots().items()}

    def load(self, tensors: Tensors) -> None:
        for name, array in self._slots().items():
            array[:] = tensors[name]


backend = MxnetBackend()
