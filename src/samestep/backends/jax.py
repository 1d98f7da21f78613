"""JAX: devices, arrays, and where a run computes. The replica is in jax_replica.py.

XLA cuts the work of one operation over a pool of threads as large as the machine has cores, and adds up what they give: on
another number of cores a sum, a product of matrices or a convolution's gradient has other bits. The pool's size cannot be
set for one computation, only for a client, when it is made. So a run on the CPU computes on a client of its own, with one
thread, in the thread that calls it: shards side by side, each in one thread. `threads_per_shard` above 1 is therefore
taken as 1 as far as arithmetic goes; it only means fewer shards side by side.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxlib import xla_client

from samestep.backends import Shape, Tensors
from samestep.backends.crew import Crew
from samestep.backends.jax_replica import ById, JaxReplica, Layout, LinenForm, form_of, sum_of_losses
from samestep.backends.probing import check_examples, check_output, check_weights
from samestep.devices import Device, cpu, gpu, host_memory
from samestep.errors import Invalid, OutOfMemory, WrongType
from samestep.models.jax import Pair
from samestep.processes import Alone, Place, World

THREADS = "PJRT_NPROC"  # what XLA reads for the size of its pool when a client is made


@functools.cache
def one_thread() -> Any:
    """The CPU as a device of a client that computes with one thread, in the thread that calls it."""
    jax.devices("cpu")  # the user's client first, with the threads it would have had
    before = os.environ.get(THREADS)
    os.environ[THREADS] = "1"
    try:
        return xla_client.make_cpu_client(asynchronous=False).local_devices()[0]
    finally:
        if before is None:
            del os.environ[THREADS]
        else:
            os.environ[THREADS] = before


@functools.cache
def gpus() -> list[Any]:
    try:
        return jax.devices("gpu")
    except RuntimeError:  # this JAX has none
        return []


class JaxBackend:
    name = "jax"
    version = jax.__version__

    def __init__(self) -> None:
        self._crew = Crew()
        self._running = False
        self._made: dict[int, tuple[Any, Any]] = {}  # id of a model → the model, and the variables made for it

    # Devices

    def devices(self) -> list[Device]:
        return [cpu(), *(gpu(i) for i in range(len(gpus())))]

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
        return jax.devices("cpu")[0] if device.kind == "cpu" else gpus()[device.index]

    def _place(self, device: Device) -> Any:
        """Where arrays of a device are put: while a run lasts, the CPU is the one that computes with one thread."""
        home = self._home(device)
        return one_thread() if self._running and device.kind == "cpu" else home

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
        return cpu() if place.platform == "cpu" else gpu(gpus().index(place))

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

    def add(self, left: Any, right: Any) -> Any:
        return left + right

    def concat(self, vectors: Sequence[Any]) -> Any:
        return vectors[0] if len(vectors) == 1 else jnp.concatenate(list(vectors))

    def zeros_like(self, vector: Any) -> Any:
        return vector * 0

    def clip(self, vector: Any, limit: float) -> Any:
        return clipped(vector, vector.dtype.type(limit))

    # A run

    @contextmanager
    def session(self, devices: Sequence[Device], *, deterministic: bool, threads: int) -> Iterator[None]:
        with self._crew.at_work(devices, threads):
            self._running = True
            try:
                yield
            finally:
                self._running = False
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
            return output, None if loss is None else sum_of_losses(loss, output, y)

        output, _ = jax.eval_shape(forward, checked(x), checked(y))  # shapes alone: nothing is computed
        return check_output("array", getattr(output, "shape", None), type(output).__name__, y, loss, dtype)

    def replica(self, model: Any, loss: Any, device: Device, shards: int, capture: bool = True) -> JaxReplica:
        with explained():
            given = form_of(model, self._made)
            return JaxReplica(given, loss, device, shards, self._place(device), self._home(device))

    def updater(self, optimizer: Any, replica: JaxReplica) -> OptaxUpdater:
        return OptaxUpdater(optimizer, replica)

    def world(self, place: Place, timeout: float, devices: Sequence[Device]) -> World:
        if place.size > 1:
            raise Invalid("several processes are not there yet for JAX: use several devices in one process")
        return Alone()

    def rates(self, scheduler: Any, n: int) -> list[float]:
        raise WrongType(f"schedule must be a number or a function of t, as optax's are, got {type(scheduler).__name__}")


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


# optax


class OptaxUpdater:
    """An optax transformation at work on one replica, on the model's own tree. The rate comes to it in one of three ways:

    optax.adam, partial(optax.sgd, momentum=0.9)        a function of the rate: it is called with schedule(t)
    optax.inject_hyperparams(optax.adam)(0.001)         its learning_rate is set to schedule(t); schedule=None keeps it
    optax.adam(0.001)                                   its rate is inside it: used as it is, and a schedule is an error
    """

    def __init__(self, given: Any, replica: JaxReplica) -> None:
        self.replica = replica
        ready = hasattr(given, "init") and hasattr(given, "update")
        made = given if ready else given(0.1)
        if not (hasattr(made, "init") and hasattr(made, "update")):
            raise WrongType(
                "optimizer must be an optax transformation, or a function that makes one from a rate, "
                f"got {type(given).__name__}"
            )
        layout = replica.layouts[0]
        way = "rate" if not ready else "fixed"
        self.state = jax.jit(lambda vector: made.init(layout.unflatten([vector])))(replica.parameters)
        if ready and "learning_rate" in getattr(self.state, "hyperparams", {}):
            way = "hyperparams"
        self.fixed = way == "fixed"
        self._way, self._update = way, update_of(ById.wrap(given), way, layout)

    def __repr__(self) -> str:
        """What it computes, hashed: an optax transformation does not say what it was made from."""
        one = self.replica.parameters.dtype.type(1)
        program = jax.make_jaxpr(self._update)(self.replica.parameters, self.replica.parameters, self.state, one)
        return f"optax({hashlib.sha256(str(program).encode()).hexdigest()[:16]})"

    def rate(self) -> float | None:
        """The rate that it came with; 1 stands for a rate that is inside it and cannot be seen."""
        if self._way == "hyperparams":
            return float(self.state.hyperparams["learning_rate"])
        return 1.0 if self.fixed else None

    def __call__(self, gradient: Any, lr: float, t: int, z: Any) -> None:
        if self.fixed and lr != 1:
            raise Invalid(
                f"schedule asks for a rate of {lr:g}, but this optax transformation has its rate inside: pass the function "
                "itself (optimizer=optax.adam), use optax.inject_hyperparams, or leave schedule out"
            )
        replica = self.replica
        rate = replica.parameters.dtype.type(lr)
        parameters, self.state = self._update(replica.parameters, gradient, self.state, rate)
        replica.assign(parameters)

    def tensors(self) -> Tensors:
        leaves, _ = jax.tree_util.tree_flatten_with_path(self.state)
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}

    def load(self, tensors: Tensors) -> None:
        paths, structure = jax.tree_util.tree_flatten_with_path(self.state)
        leaves = [tensors[jax.tree_util.keystr(path)] for path, _ in paths]
        self.state = jax.device_put(jax.tree.unflatten(structure, leaves), self.replica.parameters.sharding)


@functools.lru_cache(maxsize=16)
def update_of(given: Any, way: str, layout: Layout) -> Any:
    given = given.it if isinstance(given, ById) else given

    @jax.jit
    def update(parameters: Any, gradient: Any, state: Any, lr: Any) -> tuple[Any, Any]:
        params, gradients = layout.unflatten([parameters]), layout.unflatten([gradient])
        if way == "hyperparams":
            state = state._replace(hyperparams={**state.hyperparams, "learning_rate": lr})
        transformation = given(lr) if way == "rate" else given
        updates, state = transformation.update(gradients, state, params)
        moved = jax.tree.map(lambda p, u: p + u.astype(p.dtype), params, updates)
        return layout.flatten(moved)[0], state

    return update


backend = JaxBackend()
