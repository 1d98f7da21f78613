"""Paddle: devices, arrays, and what Paddle must be told for the time of a run. The replica is in paddle_replica.py.

Measured on the CPU with Paddle 3.3.1: MKL's products have other bits on another number of threads, and MKL takes no more
than there are cores, unless it is told to; then the bits are those of `threads_per_shard`, on one core or on many. A Paddle
without MKL computes every shard with one thread. Sums, embedding gradients and batch norm run in one thread in one order; all
random operations draw from the one generator of the device (paddle_noise.py), except
`class_center_sample`, which draws from the operating system and cannot be reproduced. A layer that has been through
`paddle.jit.to_static` is computed compiled, one shard after the other, as Paddle switches the whole process while it builds
a program; it gives the same bits and is not faster on the CPU, so samestep compiles nothing by itself.
"""

from __future__ import annotations

import copy
import ctypes
import inspect
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.base import core
from paddle.jit.dy2static.program_translator import StaticFunction

from samestep.backends import Shape, Tensors
from samestep.backends.paddle.fingerprint import in_memory
from samestep.backends.paddle.lane import name_of
from samestep.backends.paddle.noise import GENERATOR
from samestep.backends.paddle.replica import PaddleReplica, sum_of_losses
from samestep.backends.probing import check_examples, check_output, check_weights, convert
from samestep.backends.workers import Crew
from samestep.devices import Device, cpu, gpu, host_memory
from samestep.errors import Invalid, OutOfMemory, WrongType
from samestep.processes.mpi import join
from samestep.processes.place import Place
from samestep.processes.world import World
from samestep.runs.run import fingerprint

# cuBLAS is deterministic only with a fixed workspace, and reads this once, when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Each is set if this Paddle has it; these three belong to a Paddle for GPUs.
DETERMINISTIC = {"FLAGS_cudnn_deterministic": True, "FLAGS_embedding_deterministic": 1,
                 "FLAGS_cudnn_exhaustive_search": False}  # fmt: skip
IN_ONE_THREAD = {"FLAGS_new_executor_serial_run": True}  # a compiled layer, too, in the thread that calls it
MKL = next((ctypes.CDLL(str(path)) for path in Path(paddle.__file__).parent.glob("libs/libmklml_intel.so")), None)


class PaddleBackend:
    name = "paddle"
    version = paddle.__version__

    def __init__(self) -> None:
        self._crew = Crew()
        self._compiled = False  # whether the model of this run is

    # Devices

    def devices(self) -> list[Device]:
        return [cpu(), *(gpu(i) for i in range(paddle.device.cuda.device_count()))]

    def memory(self, device: Device) -> tuple[int, int]:
        if device.kind == "cuda":
            total = paddle.device.cuda.get_device_properties(device.index).total_memory
            return total, paddle.device.cuda.memory_reserved(device.index)
        return host_memory()

    def _place(self, device: Device) -> Any:
        """Paddle's own object for a device."""
        if device not in self.devices():
            raise Invalid(
                f"device {device} is not there: paddle sees {', '.join(map(str, self.devices()))} on this machine"
            )
        return paddle.CPUPlace() if device.kind == "cpu" else paddle.CUDAPlace(device.index)

    # Arrays

    def owns(self, thing: object) -> bool:
        return isinstance(thing, (paddle.Tensor, paddle.nn.Layer))

    def device_of(self, array: Any) -> Device:
        if not isinstance(array, paddle.Tensor) or not array.place.is_gpu_place():
            return cpu()
        return gpu(array.place.gpu_device_id())

    def put(self, array: Any, device: Device) -> Any:
        place = self._place(device)
        if not isinstance(array, paddle.Tensor):
            return paddle.to_tensor(checked(array), place=place)
        return array if self.device_of(array) == device else array._copy_to(place, device.kind == "cpu")

    def get(self, array: Any) -> np.ndarray[Any, Any]:
        return array.numpy() if isinstance(array, paddle.Tensor) else np.asarray(array)

    place = put

    def copy(self, array: Any, device: Device, gradient: bool = False) -> Any:
        place = self._place(device)
        if isinstance(array, paddle.Tensor):
            new = array.detach()._copy_to(place, True)
        else:
            new = paddle.to_tensor(checked(array), place=place)
        if gradient:
            new.stop_gradient = False
            new.grad = paddle.zeros_like(new)
        return new

    def assign(self, array: Any, value: Any) -> Any:
        with paddle.no_grad():
            paddle.assign(value, array)
        return array

    def reshape(self, array: Any, shape: Sequence[int]) -> Any:
        return array.reshape(shape)

    def take(self, array: Any, index: Any) -> Any:
        # A fresh allocation: the shard's memory is aligned alike, wherever in the data its examples lie.
        return paddle.gather(array, index)

    def add(self, left: Any, right: Any) -> Any:
        return left.add_(right)

    def concat(self, vectors: Sequence[Any]) -> Any:
        if isinstance(vectors[0], np.ndarray):  # fingerprints
            return np.concatenate(vectors)
        return paddle.concat(list(vectors))

    def zeros_like(self, vector: Any) -> Any:
        return paddle.zeros_like(vector)

    def in_memory(self, vector: Any) -> np.ndarray[Any, Any]:
        """A vector on the CPU as NumPy, in its own memory."""
        return in_memory(vector)

    def clip(self, vector: Any, limit: float) -> Any:
        norm = (vector * vector).sum().sqrt()
        return vector * (limit / norm.clip(min=limit))

    # A run

    @contextmanager
    def session(self, devices: Sequence[Device], *, deterministic: bool, threads: int) -> Iterator[None]:
        taken = threads if MKL else 1
        prepare = partial(core.set_num_threads, taken)
        with self._crew.at_work(devices, threads, prepare), self._settings(devices, deterministic), exactly(taken):
            yield

    @contextmanager
    def _settings(self, devices: Sequence[Device], deterministic: bool) -> Iterator[None]:
        wanted = IN_ONE_THREAD | (DETERMINISTIC if deterministic else {})
        flags = {name: value for name, value in wanted.items() if name in core.globals().keys()}  # noqa: SIM118
        before, device = paddle.get_flags(list(flags)), paddle.get_device()
        noise = GENERATOR.get_state(), paddle.get_rng_state(device)
        paddle.set_flags(flags)
        paddle.set_device(str(devices[0]).replace("cuda", "gpu"))
        try:
            yield
        finally:
            paddle.set_device(device)
            paddle.set_flags(before)
            paddle.set_rng_state(noise[1], device)
            GENERATOR.set_state(noise[0])
            self._compiled = False

    def map(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        with explained():
            here = self._compiled or len(tasks) == 1  # to change the thread takes time, and changes no bit
            return [task() for task in tasks] if here else self._crew.map(tasks)

    # Models

    def describe(self, model: Any) -> str:
        return type(model).__name__

    def probe(self, model: Any, loss: Any, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], name: str = "x") -> Shape:
        weights = [p for p in model.parameters() if not p.stop_gradient]
        dtype = check_weights(self.describe(model), map(name_of, weights))
        check_examples(name, x, dtype)
        if not all(p._is_initialized() for p in weights):
            raise Invalid(
                "the model was made under paddle.LazyGuard: call initialize() of each of its parameters first"
            )
        device = self.device_of(weights[0])
        modes = [(layer, layer.training, dict(layer._buffers)) for layer in model.sublayers(include_self=True)]
        noise = paddle.get_rng_state()
        model.eval()
        try:
            with paddle.no_grad(), explained(), noting_compiled() as called:
                output = model(self.put(x, device))
                if loss is not None:
                    sum_of_losses(loss, output, self.put(y, device))
            self._compiled = bool(called) or any(isinstance(layer.forward, StaticFunction) for layer, *_ in modes)
        except (RuntimeError, ValueError, TypeError) as error:
            if x.dtype.kind != "f" and re.search("(?i)dtype|data ?type|type of data", str(error)):
                raise convert(name, x, dtype) from error
            raise
        finally:
            for layer, mode, buffers in modes:
                layer.training = mode
                layer._buffers.clear()
                layer._buffers.update(buffers)
            paddle.set_rng_state(noise)
        shape = tuple(output.shape) if isinstance(output, paddle.Tensor) else None
        return check_output("tensor", shape, type(output).__name__, y, loss, dtype)

    def replica(self, model: Any, loss: Any, device: Device, shards: int, capture: bool = True) -> PaddleReplica:
        with explained():
            return PaddleReplica(model, loss, device, shards, self._place(device))

    def updater(self, optimizer: Any, replica: PaddleReplica) -> PaddleUpdater:
        return PaddleUpdater(optimizer, replica)

    def rates(self, scheduler: Any, n: int) -> list[float]:
        if isinstance(scheduler, paddle.optimizer.lr.ReduceOnPlateau):
            raise Invalid("ReduceOnPlateau follows a metric, not the number of updates: use samestep.Plateau")
        if not isinstance(scheduler, paddle.optimizer.lr.LRScheduler):
            raise WrongType(f"schedule must be a paddle.optimizer.lr.LRScheduler, got {type(scheduler).__name__}")
        twin, found = copy.deepcopy(scheduler), []
        for _ in range(n):
            found.append(float(twin()))
            twin.step()
        return found

    def world(self, place: Place, timeout: float, devices: Sequence[Device]) -> World:
        return join(self.get, place, timeout)


def checked(array: Any) -> np.ndarray[Any, Any]:
    """An array that Paddle can hold: it takes uint16 for bfloat16, and does not know the larger unsigned types."""
    array = np.asarray(array)
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        raise WrongType(f"paddle has no {array.dtype} arrays: convert them, for example with x.astype('int64')")
    return array


@contextmanager
def exactly(threads: int) -> Iterator[None]:
    """So many threads for a product of matrices, also where there are fewer cores."""
    before = MKL.MKL_Get_Dynamic() if MKL else 0
    if MKL:
        MKL.MKL_Set_Dynamic(0)
    core.set_num_threads(threads)
    try:
        yield
    finally:
        core.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # what Paddle starts with
        if MKL:
            MKL.MKL_Set_Dynamic(before)


@contextmanager
def noting_compiled() -> Iterator[list[Any]]:
    """Notes the functions that have been through to_static while they are called."""
    called, original = [], StaticFunction.__call__

    def call(self: Any, *args: Any, **options: Any) -> Any:
        called.append(self)
        return original(self, *args, **options)

    StaticFunction.__call__ = call
    try:
        yield called
    finally:
        StaticFunction.__call__ = original


@contextmanager
def explained() -> Iterator[None]:
    """Turn Paddle's errors that have a known remedy into samestep's, which name it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        if isinstance(error, MemoryError) or "ResourceExhausted" in text or "Out of memory" in text:
            asked = re.search(r"[Cc]annot allocate ([\d.]+ ?\w+)", text)
            place = re.search(r"GPU (\d+)", text)
            raise OutOfMemory(
                f"{f'cuda:{place[1]}' if place else 'cpu'} ran out of memory when "
                f"{asked[1] if asked else 'more memory than there is'} were asked for: "
                "raise shards (smaller shards need less), or lower the batch size"
            ) from error
        raise


# paddle.optimizer


class PaddleUpdater:
    """An optimizer of paddle.optimizer at work on one replica, on parameters that are views of the replica's vector."""

    _one = threading.Lock()  # Paddle's optimizers keep some of their books in the whole process

    def __init__(self, given: Any, replica: PaddleReplica) -> None:
        self._leaves = replica.leaves()
        ours = [mine for _, mine in self._leaves]
        with self._one:
            if isinstance(given, paddle.optimizer.Optimizer):
                made = self._copied(given)
            elif callable(given):
                # Paddle's own classes take the rate first
                by_name = "parameters" in inspect.signature(given).parameters
                made = given(parameters=ours) if by_name else given(ours)
            else:
                made = given
            if not isinstance(made, paddle.optimizer.Optimizer):
                raise WrongType(
                    "optimizer must be a paddle.optimizer.Optimizer, or a function that makes one from parameters, "
                    f"got {type(made).__name__}"
                )
            if isinstance(made, paddle.optimizer.LBFGS):
                raise WrongType(
                    "LBFGS computes the loss several times in one update, which the Trainer does not: use another"
                )
            check_parameters(made, ours)
            self.optimizer, self._rate = made, made._learning_rate
            made._learning_rate = made.get_lr()  # a number, so that it can be set
            create_slots(made)
        self._names = {mine.name: replica.name_of(theirs) for theirs, mine in self._leaves}
        self._views = replica.weights.cut
        self._past = self.tensors()

    def _copied(self, given: Any) -> Any:
        """The user's optimizer, copied around our parameters instead of around the model's."""
        memo: dict[int, Any] = {id(theirs): mine for theirs, mine in self._leaves}
        memo |= {id(given._learning_rate_map): {}, id(given.helper): None}  # they hold on to a program
        check_parameters(given, [theirs for theirs, _ in self._leaves])
        return copy.deepcopy(given, memo)

    def __repr__(self) -> str:
        about: dict[str, Any] = {name.strip("_"): value for name, value in sorted(vars(self.optimizer).items())
                 if isinstance(value, (bool, int, float, str)) and name != "_learning_rate"}  # fmt: skip
        about |= {
            name.strip("_"): str(getattr(self.optimizer, name, None)) for name in ("regularization", "_grad_clip")
        }
        about["groups"] = [{name: str(value) for name, value in group.items() if name != "params"}
                           for group in groups_of(self.optimizer) if isinstance(group, dict)]  # fmt: skip
        return f"paddle.optimizer.{type(self.optimizer).__name__}({about}, state={fingerprint(self._past)[:16]})"

    def rate(self) -> float:
        """The rate that the optimizer came with."""
        if not isinstance(self._rate, float):
            raise Invalid(
                f"the optimizer has a scheduler inside ({type(self._rate).__name__}), which the Trainer does not step: pass "
                "the scheduler as schedule, and a number to the optimizer"
            )
        return self._rate

    def __call__(self, gradient: Any, lr: float, t: int, z: Any) -> None:
        for (_, parameter), view in zip(self._leaves, self._views(gradient), strict=True):
            parameter.grad = view
        with self._one:
            self.optimizer.set_lr(lr)
            self.optimizer.step()

    def _slots(self) -> dict[str, Any]:
        return {
            f"{slot}:{self._names[parameter]}": tensor
            for slot, held in self.optimizer._accumulators.items()
            for parameter, tensor in held.items()
        }

    def tensors(self) -> Tensors:
        return {name: tensor.numpy() for name, tensor in self._slots().items()}

    def load(self, tensors: Tensors) -> None:
        for name, tensor in self._slots().items():
            tensor.set_value(tensors[name])


def groups_of(optimizer: Any) -> list[Any]:
    """Its groups of parameters, without those that are not trained: a list each, or a dictionary that has one."""
    groups = optimizer._param_groups
    if not (groups and isinstance(groups[0], dict)):
        return [[p for p in groups or [] if not p.stop_gradient]]
    return [{**group, "params": [p for p in group["params"] if not p.stop_gradient]} for group in groups]


def check_parameters(optimizer: Any, trained: Sequence[Any]) -> None:
    groups = groups_of(optimizer)
    theirs = {id(p) for group in groups for p in (group["params"] if isinstance(group, dict) else group)}
    if not theirs <= {id(p) for p in trained}:
        raise Invalid("the optimizer has parameters that are not parameters of the model to be trained")


def create_slots(optimizer: Any) -> None:
    """Have the optimizer create its state now, not in its first step: a checkpoint may have to be loaded before."""
    for group in groups_of(optimizer):
        optimizer._create_accumulators(paddle.base.framework.default_main_program().global_block(), group)


backend = PaddleBackend()
