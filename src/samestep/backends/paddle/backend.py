"""Paddle: devices, arrays, and what Paddle must be told for the time of a run. The replica is in replica.py.

Only the CPU: nobody has run this on a GPU.

Measured with Paddle 3.3.1: MKL's products have other bits on another number of threads. MKL takes no more threads than there
are cores, unless it is told to. A Paddle without MKL computes every shard with one thread. Sums, embedding gradients and batch
norm run in one thread in one order. All random operations draw from one generator (noise.py), except `class_center_sample`,
which draws from the operating system and cannot be reproduced. A layer that has been through `paddle.jit.to_static` is computed
compiled, one shard after the other, as Paddle switches the whole process while it builds a program. It gives the same bits and
is not faster, so samestep compiles nothing by itself.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.base import core
from paddle.jit.dy2static.program_translator import StaticFunction

from samestep.backends.base import Backend, Task
from samestep.backends.calling import Style, spread, style_of
from samestep.backends.layout import Numbers
from samestep.backends.losses import (
    IGNORED,
    Measure,
    Shape,
    check_examples,
    check_weights,
    class_axis,
    convert,
    not_floats,
)  # fmt: skip
from samestep.backends.paddle import numerics
from samestep.backends.paddle.content import content
from samestep.backends.paddle.exact import check_optimizer, exact
from samestep.backends.paddle.flat import CPU, Tensor, Vector, dtype_of, numpy_view
from samestep.backends.paddle.losses import weighted
from samestep.backends.paddle.noise import GENERATOR
from samestep.backends.paddle.numerics import MKL
from samestep.backends.paddle.replica import PaddleReplica
from samestep.backends.paddle.updater import PaddleUpdater
from samestep.backends.replacing import noted
from samestep.devices import Device, cpu
from samestep.errors import Invalid, WrongType
from samestep.trees import Tree, mapped

FLAGS = {
    "FLAGS_new_executor_serial_run": True,  # a compiled layer, too, in the thread that calls it
    "FLAGS_use_stride_kernel": True,  # else a slice is a copy and not a view
    "FLAGS_enable_unique_name": False,  # else parameters do not keep their names, by which optimizers know them
}


class PaddleBackend(Backend):
    name = "paddle"

    def __init__(self) -> None:
        super().__init__()
        self._in_turn = False  # whether the model of this run is compiled, so that shards are computed in turn

    # Devices

    def devices(self) -> list[Device]:
        return [cpu()]

    def evaluating(self, model: paddle.nn.Layer) -> paddle.nn.Layer:
        model.eval()
        return model

    def state_dict(self, model: paddle.nn.Layer) -> Any:
        return model.state_dict()

    # Arrays

    def owns(self, thing: object) -> bool:
        return isinstance(thing, (paddle.Tensor, paddle.nn.Layer))

    def is_array(self, thing: object) -> bool:
        return isinstance(thing, paddle.Tensor)

    def device_of(self, array: Any) -> Device:
        return cpu()

    def put(self, array: Any, device: Device) -> Tensor:
        self.require(device)
        return array if isinstance(array, paddle.Tensor) else paddle.to_tensor(checked(array), place=CPU)

    def full(self, shape: tuple[int, ...], value: float, device: Device, dtype: str) -> Tensor:
        checked(np.empty(0, dtype))
        return paddle.full(shape, value, dtype, device=CPU)

    def get(self, array: Any) -> Numbers:
        return array.numpy() if isinstance(array, paddle.Tensor) else np.asarray(array)

    def fetch(self, vectors: Sequence[Vector]) -> Numbers:
        return np.concatenate([self.get(vector) for vector in vectors])  # fingerprints are NumPy's

    def copy(self, array: Any, device: Device, gradient: bool = False) -> Tensor:
        self.require(device)
        if isinstance(array, paddle.Tensor):
            new = array.detach()._copy_to(CPU, True)
        else:
            new = paddle.to_tensor(checked(array), place=CPU)
        if gradient:
            new.stop_gradient = False
            new.grad = paddle.zeros_like(new)
        return new

    def assign(self, array: Tensor, value: Tensor) -> Tensor:
        with paddle.no_grad():
            paddle.assign(value, array)
        return array

    def take(self, array: Tensor, index: Tensor) -> Tensor:
        # A fresh allocation: the shard's memory is aligned alike, wherever in the data its examples lie.
        return paddle.gather(array, index)

    def add(self, left: Vector, right: Vector) -> Vector:
        return left.add_(right)

    def concat(self, vectors: Sequence[Vector]) -> Vector:
        return paddle.concat(list(vectors))

    def zeros_like(self, vector: Vector) -> Vector:
        return paddle.zeros_like(vector)

    def in_memory(self, vector: Vector) -> Numbers:
        return numpy_view(vector)

    def clip(self, vector: Vector, limit: float) -> Vector:
        norm = (vector * vector).sum().sqrt()
        return vector * (limit / norm.clip(min=limit))

    # A run

    require_portable = staticmethod(numerics.require_portable)
    numerics = staticmethod(numerics.found)
    content = staticmethod(content)

    @contextmanager
    def session(self, devices: Sequence[Device], *, deterministic: bool, threads: int) -> Iterator[None]:
        if not paddle.in_dynamic_mode():
            raise Invalid("Paddle is in static mode, where a run cannot compute: call paddle.disable_static() first")
        taken = threads if MKL else 1
        prepare = partial(core.set_num_threads, taken)
        replacing = exact() if self.portable else nullcontext()
        try:
            with self.workers.at_work(devices, threads, prepare), self._settings(), exactly(taken), replacing:
                yield
        finally:
            self._in_turn = False

    @contextmanager
    def _settings(self) -> Iterator[None]:
        before, device, noise = paddle.get_flags(list(FLAGS)), paddle.get_device(), GENERATOR.get_state()
        prim = core._is_eager_prim_enabled()  # of this thread alone
        paddle.set_flags(FLAGS)
        paddle.set_device("cpu")
        core.set_prim_eager_enabled(False)
        try:
            with paddle.enable_grad():  # a fit inside no_grad, too
                yield
        finally:
            core.set_prim_eager_enabled(prim)
            paddle.set_device(device)
            paddle.set_flags(before)
            GENERATOR.set_state(noise)

    def map(self, tasks: Sequence[Task]) -> list[Any]:
        if not self._in_turn:
            return super().map(tasks)
        with self.explained():
            return [task() for task in tasks]

    # Models

    def style(self, model: paddle.nn.Layer, x: Tree, whole: bool) -> Style:
        return style_of(model.forward, x, whole)

    def probe(self, model: paddle.nn.Layer, measure: Any, x: Tree, y: Tree, name: str = "x") -> Shape:
        measure = Measure.of(measure)
        weights = [p for p in model.parameters() if not p.stop_gradient]
        dtype = check_weights(self.describe(model), map(dtype_of, weights))
        check_examples(name, x, dtype, y)
        check_made(model)
        modes = [(layer, layer.training, dict(layer._buffers)) for layer in model.sublayers(include_self=True)]
        noise = GENERATOR.get_state()
        model.eval()
        try:
            with paddle.no_grad(), self.explained(), noted([(StaticFunction, "__call__")]) as called:
                given, named = spread(mapped(partial(self.put, device=cpu()), x), measure.style)
                output = model(*given, **named)
                shape = self.described(measure, output, mapped(partial(self.put, device=cpu()), y), y, dtype)
            self._in_turn = bool(called) or any(isinstance(layer.forward, StaticFunction) for layer, *_ in modes)
            if self._in_turn and self.portable:
                raise Invalid("portable: a compiled layer may have other bits on other CPUs: leave out to_static")
        except (RuntimeError, ValueError, TypeError) as error:
            if not_floats(x) and re.search("(?i)dtype|data ?type|type of data", str(error)):
                raise convert(name, x, dtype) from None
            raise
        finally:
            for layer, mode, buffers in modes:
                layer.training = mode
                layer._buffers.clear()
                layer._buffers.update(buffers)
            GENERATOR.set_state(noise)
        return shape

    def replica(
        self, model: paddle.nn.Layer, measure: Any, device: Device, shards: int, capture: bool = True
    ) -> PaddleReplica:
        self.require(device)
        check_made(model)
        with self.explained():
            return PaddleReplica(self, model, measure, device, shards)

    def updater(self, optimizer: Any, replica: PaddleReplica, clip: Any) -> PaddleUpdater:
        updater = PaddleUpdater(optimizer, replica, clip)
        check_optimizer(updater.optimizer, self.portable)
        return updater

    def rates(self, scheduler: Any, n: int, unit: str = "step") -> list[float]:
        if isinstance(scheduler, paddle.optimizer.lr.ReduceOnPlateau):
            raise Invalid("ReduceOnPlateau follows a metric, not the number of updates: use samestep.Plateau")
        if not isinstance(scheduler, paddle.optimizer.lr.LRScheduler):
            raise WrongType(f"schedule must be a paddle.optimizer.lr.LRScheduler, got {type(scheduler).__name__}")
        twin, found = copy.deepcopy(scheduler), []
        for _ in range(n):
            found.append(float(twin()))
            twin.step()
        return found

    # Losses

    def cross_entropy(self, output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y.astype("int64"), reduction="sum")

    def by_position(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        axis = class_axis(tuple(output.shape), tuple(y.shape))
        y = y.astype("int64").unsqueeze(axis)
        return F.cross_entropy(output, y, ignore_index=IGNORED, axis=axis, reduction="sum"), (y != IGNORED).sum()

    def call_loss(self, loss: Any, output: Any, y: Tree) -> Any:
        return weighted(loss, output, y) or loss(output, y)

    def number(self, value: Any, like: Tensor) -> Tensor:
        dtype = paddle.float64 if like.dtype == paddle.float64 else paddle.float32
        if isinstance(value, paddle.Tensor):
            return value.detach().astype(dtype).reshape([])
        return paddle.to_tensor(value, dtype, CPU)

    def count_hits(self, output: Tensor, y: Tensor) -> Tensor:
        return (output.detach().argmax(1) == y.astype("int64")).sum()

    def zero(self, like: Tensor) -> Tensor:
        return paddle.zeros([])


def check_made(model: paddle.nn.Layer) -> None:
    if not all(p._is_initialized() for p in model.parameters()):
        raise Invalid("the model was made under paddle.LazyGuard: call initialize() of each parameter first")


def checked(array: Any) -> Numbers:
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


backend: Backend = PaddleBackend()
