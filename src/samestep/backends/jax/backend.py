"""JAX: devices, arrays, and where a run computes. The replica is in jax_replica.py, optax in jax_optimizer.py.

XLA cuts the work of one operation over a pool of threads as large as the machine has cores, and adds up what they give: on
another number of cores a sum, a product of matrices or a convolution's gradient has other bits. The pool's size cannot be
set for one computation, only for a client, when it is made. So a run on the CPU computes on a client of its own, with a pool
of `threads_per_shard`. Shards side by side share that pool, and each has the thread that calls it besides; how the work of
an operation is cut depends on the size of the pool alone.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax._src.distributed import global_state  # there is no public name for what jax.distributed.initialize has set up
from jaxlib import xla_client

from samestep.backends import Shape
from samestep.backends.jax.adapters import LinenForm, form_of
from samestep.backends.jax.program import sum_of_losses
from samestep.backends.jax.replica import JaxReplica
from samestep.backends.jax.updater import OptaxUpdater
from samestep.backends.probing import check_examples, check_output, check_weights
from samestep.backends.workers import Crew, side_by_side
from samestep.devices import Device, cpu, gpu, host_memory
from samestep.errors import Invalid, OutOfMemory, WrongType
from samestep.models.jax import Pair
from samestep.processes.mpi import join
from samestep.processes.place import Place
from samestep.processes.world import World

THREADS = "PJRT_NPROC"  # what XLA reads for the size of its pool when a client is made


CLIENTS: dict[Any, int] = {}  # JAX's device of each client made here → the number of the CPU device that it stands for


@functools.cache
def computing(threads: int, asynchronous: bool, index: int) -> Any:
    """A CPU device of the user's once more, as that of a client that has a pool of `threads`.

    If not asynchronous, it computes in the thread that calls it: so shards run side by side. One client for each device, as
    the pool of a client with many devices has at least as many threads.
    """
    cpus()  # the user's client first, with the threads it would have had
    before = os.environ.get(THREADS)
    os.environ[THREADS] = str(threads)
    try:
        place = xla_client.make_cpu_client(asynchronous=asynchronous).local_devices()[0]
    finally:
        if before is None:
            del os.environ[THREADS]
        else:
            os.environ[THREADS] = before
    CLIENTS[place] = index
    return place


def cpus() -> list[Any]:
    """Several if jax_num_cpu_devices says so. Like those of the GPUs, not those of other processes (jax.distributed)."""
    return jax.local_devices(backend="cpu")


@functools.cache
def gpus() -> list[Any]:
    try:
        return jax.local_devices(backend="gpu")
    except RuntimeError:  # this JAX has none
        return []


class JaxBackend:
    name = "jax"
    version = jax.__version__

    def __init__(self) -> None:
        self._crew = Crew()
        self._run: tuple[int, bool] | None = None  # while one lasts: what `computing` is to make for the CPU
        self._made: dict[int, tuple[Any, Any]] = {}  # id of a model → the model, and the variables made for it

    # Devices

    def devices(self) -> list[Device]:
        return [*map(cpu, range(len(cpus()))), *map(gpu, range(len(gpus())))]

    def memory(self, device: Device) -> tuple[int, int]:
        if device.kind == "cuda":
            about = self._home(device).memory_stats()
            return about["bytes_limit"], about["bytes_in_use"]
        return host_memory()

    def _home(self, device: Device) -> Any:
        """JAX's own object for a device."""
        if device not in self.devices():
            raise Invalid(
                f"device {device} is not there: jax sees {', '.join(map(str, self.devices()))} on this machine"
            )
        return (cpus() if device.kind == "cpu" else gpus())[device.index]

    def _place(self, device: Device) -> Any:
        """Where arrays of a device are put: while a run lasts, those of a CPU on the client that computes."""
        home = self._home(device)
        return computing(*self._run, device.index) if self._run and device.kind == "cpu" else home

    # Arrays

    def owns(self, thing: object) -> bool:
        return isinstance(thing, (jax.Array, nn.Module, nnx.Module, Pair))

    def device_of(self, array: Any) -> Device:
        if not isinstance(array, jax.Array):
            return cpu()
        places = array.devices()
        if len(places) > 1:
            raise Invalid(f"expected an array on one device, got one spread over {len(places)}")
        (place,) = places
        if place.platform != "cpu":
            return gpu(gpus().index(place))
        return cpu(CLIENTS[place] if place in CLIENTS else cpus().index(place))

    def put(self, array: Any, device: Device) -> Any:
        place = self._place(device)
        if isinstance(array, jax.Array) and array.devices() == {place}:
            return array
        return jax.device_put(checked(array), place)

    def get(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array)

    place = put

    def copy(self, array: Any, device: Device, gradient: bool = False) -> Any:
        """JAX's arrays have no gradient attached, and cannot be written to: `gradient` asks for nothing here."""
        return jax.device_put(np.array(checked(array)), self._place(device))

    def assign(self, array: Any, value: Any) -> Any:
        return value

    def reshape(self, array: Any, shape: Sequence[int]) -> Any:
        return array.reshape(shape)

    def take(self, array: Any, index: Any) -> Any:
        return rows(array, index)

    def index(self, order: np.ndarray[Any, Any], device: Device) -> np.ndarray[Any, Any]:
        """On the host: slices of it are cheap there, and JAX takes them along when it launches a computation."""
        return order.astype(np.int32)

    def add(self, left: Any, right: Any) -> Any:
        return left + right

    def concat(self, vectors: Sequence[Any]) -> Any:
        return vectors[0] if len(vectors) == 1 else jnp.concatenate(list(vectors))

    def fetch(self, vectors: Sequence[Any]) -> np.ndarray[Any, Any]:
        return np.concatenate(jax.device_get(list(vectors)))  # JAX would compile a program for every number of them

    def zeros_like(self, vector: Any) -> Any:
        return vector * 0

    def clip(self, vector: Any, limit: float) -> Any:
        return clipped(vector, vector.dtype.type(limit))

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return with_numbers(function)

    # A run

    @contextmanager
    def session(self, devices: Sequence[Device], *, deterministic: bool, threads: int) -> Iterator[None]:
        with self._crew.at_work(devices, threads):
            # Where no two shards run side by side, Python goes on while one is computed.
            self._run = threads, side_by_side(threads) == 1
            try:
                yield
            finally:
                self._run = None
                self._made.clear()

    def map(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        with explained():
            return [tasks[0]()] if len(tasks) == 1 else self._crew.map(tasks)

    # Models

    def describe(self, model: Any) -> str:
        if isinstance(model, Pair):
            return getattr(model.apply, "__qualname__", None) or type(model.apply).__name__
        return type(model).__name__

    def probe(self, model: Any, loss: Any, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], name: str = "x") -> Shape:
        if id(model) not in self._made:
            first = jax.device_put(checked(x), self._home(cpu()))
            if isinstance(model, Pair) and callable(model.params):
                self._made[id(model)] = model, model.params(jax.random.key(0), first)
            elif isinstance(model, nn.Module) and model.scope is None:
                self._made[id(model)] = model, LinenForm(model).init(first)
        form, params, state = form_of(model, self._made)
        dtype = check_weights(self.describe(model), (str(jnp.asarray(leaf).dtype) for leaf in jax.tree.leaves(params)))
        check_examples(name, x, dtype)

        def forward(x: Any, y: Any) -> Any:
            output, _ = form(params, state, x, jax.random.key(0), False)
            return output, None if loss is None else sum_of_losses(loss, output, y, "cpu")

        output, _ = jax.eval_shape(forward, checked(x), checked(y))  # shapes alone: nothing is computed
        return check_output("array", getattr(output, "shape", None), type(output).__name__, y, loss, dtype)

    def replica(self, model: Any, loss: Any, device: Device, shards: int, capture: bool = True) -> JaxReplica:
        with explained():
            given = form_of(model, self._made)
            return JaxReplica(given, loss, device, shards, self._place(device), self._home(device))

    def updater(self, optimizer: Any, replica: JaxReplica) -> OptaxUpdater:
        return OptaxUpdater(optimizer, replica)

    def world(self, place: Place, timeout: float, devices: Sequence[Device]) -> World:
        no_other_processes()
        return join(self.get, place, timeout)

    def rates(self, scheduler: Any, n: int) -> list[float]:
        raise WrongType(f"schedule must be a number or a function of t, as optax's are, got {type(scheduler).__name__}")


def no_other_processes() -> None:
    """Refuse processes that know of each other by jax.distributed: those of samestep find each other by MPI."""
    count = global_state.num_processes
    if global_state.client is not None and count > 1:
        raise Invalid(
            f"jax.distributed.initialize has joined {count} processes, and samestep joins them by MPI: leave it out, and start "
            f"the script with `mpiexec -n {count} python ...`"
        )


def checked(array: Any) -> Any:
    """Without jax_enable_x64 JAX makes 32 bits of 64; whole numbers that do not fit would come out as others."""
    array = array if isinstance(array, jax.Array) else np.asarray(array)
    if array.dtype in (np.int64, np.uint64) and not jax.config.read("jax_enable_x64"):
        small = np.iinfo(np.int32 if array.dtype == np.int64 else np.uint32)
        if array.size and not (small.min <= array.min() and array.max() <= small.max):
            raise Invalid("whole numbers beyond 32 bits need jax.config.update('jax_enable_x64', True)")
    return array


@jax.jit
def rows(array: Any, index: Any) -> Any:
    return jnp.take(array, index, axis=0, mode="clip")


@jax.jit
def clipped(vector: Any, limit: Any) -> Any:
    norm = jnp.sqrt((vector * vector).sum())
    return vector * (limit / jnp.maximum(norm, limit))


@functools.lru_cache(maxsize=16)
def with_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a constant, vectors and Python's numbers, compiled once for each constant."""
    program = jax.jit(function, static_argnums=0)

    def call(*args: Any) -> Any:
        with jax.enable_x64(True):  # numbers stay float64 until they meet a vector, as they would without compiling
            return program(*args)

    return call


@contextmanager
def explained() -> Iterator[None]:
    """Turn JAX's errors that have a known remedy into samestep's, which name it."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error):
            raise OutOfMemory(
                f"the device ran out of memory ({str(error).splitlines()[0]}): raise shards (smaller shards need less), "
                "or lower the batch size"
            ) from error
        raise


backend = JaxBackend()
