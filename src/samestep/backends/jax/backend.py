"""JAX: devices, arrays, and on which client a run computes (clients.py says why)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax._src.distributed import global_state  # there is no public name for what jax.distributed.initialize has set up

from samestep.backends.base import Backend
from samestep.backends.calling import OPTIONS, Style, spread, style_of
from samestep.backends.jax import numerics
from samestep.backends.jax.adapters import LinenAdapter, adapt, drawn
from samestep.backends.jax.clients import CLIENTS, computing, cpus, gpus
from samestep.backends.jax.content import content
from samestep.backends.jax.replica import JaxReplica
from samestep.backends.jax.steps import Compiled, JaxSteps, can_launch
from samestep.backends.jax.updater import JaxUpdater
from samestep.backends.layout import Numbers
from samestep.backends.losses import IGNORED, Measure, Shape, check_examples, check_weights, class_axis, not_trained
from samestep.backends.pair import Pair
from samestep.backends.workers import side_by_side
from samestep.devices import Device, cpu, gpu, host_memory
from samestep.errors import Invalid
from samestep.processes.place import Place
from samestep.processes.world import World
from samestep.trees import Tree, mapped

if TYPE_CHECKING:
    from samestep.backends.steps import Steps
    from samestep.training.replicas import Replicas

rows = jax.jit(lambda array, index: jnp.take(array, index, axis=0, mode="clip"))
clipped = jax.jit(lambda vector, limit: vector * (limit / jnp.maximum(jnp.sqrt((vector * vector).sum()), limit)))


class JaxBackend(Backend):
    name, goes_on = "jax", True
    an_array = "an array"

    def __init__(self) -> None:
        super().__init__()
        self._run: tuple[int, bool] | None = None  # while one lasts: what `computing` is to make for the CPU
        self._run_on_gpu = False
        self._settings = numerics.settings()  # of the last run
        self._made: dict[int, tuple[Any, Any]] = {}  # id of a model → the model, and the variables made for it

    # Devices

    def devices(self) -> list[Device]:
        return [*map(cpu, range(len(cpus()))), *map(gpu, range(len(gpus())))]

    def memory(self, device: Device) -> tuple[int, int]:
        if device.kind == "cuda":
            about = self._users_native(device).memory_stats()
            return about["bytes_limit"], about["bytes_in_use"]
        return host_memory()

    def _users_native(self, device: Device) -> Any:
        """JAX's own object for a device, as the user has it."""
        self.require(device)
        return (cpus() if device.kind == "cpu" else gpus())[device.index]

    def _native(self, device: Device) -> Any:
        """Where arrays of a device are put: while a run lasts, those of a CPU on the client that computes."""
        native = self._users_native(device)
        return computing(*self._run, device.index) if self._run and device.kind == "cpu" else native

    def evaluating(self, model: Any) -> Any:
        if isinstance(model, nnx.Module):
            model.eval()
        return model

    def state_dict(self, model: Any) -> Any:
        if isinstance(model, Pair):
            return model.params if model.state is None else (model.params, model.state)
        return nnx.state(model) if isinstance(model, nnx.Module) else model.variables

    # Arrays

    def owns(self, thing: object) -> bool:
        return isinstance(thing, (jax.Array, nn.Module, nnx.Module, Pair))

    def is_array(self, thing: object) -> bool:
        return isinstance(thing, (jax.Array, jax.ShapeDtypeStruct, np.ndarray))  # a probe has shapes alone

    def device_of(self, array: Any) -> Device:
        if not isinstance(array, jax.Array):
            return cpu()
        natives = array.devices()
        if len(natives) > 1:
            raise Invalid(f"expected an array on one device, got one spread over {len(natives)}")
        (native,) = natives
        if native.platform != "cpu":
            return gpu(gpus().index(native))
        return cpu(CLIENTS[native] if native in CLIENTS else cpus().index(native))

    def put(self, array: Any, device: Device) -> Any:
        native = self._native(device)
        if isinstance(array, jax.Array) and array.devices() == {native}:
            return array
        return jax.device_put(checked(array), native)

    def full(self, shape: tuple[int, ...], value: float, device: Device, dtype: str) -> Any:
        return jnp.full(shape, checked(np.array(value, dtype)), device=self._native(device))

    def get(self, array: Any) -> Numbers:
        return np.asarray(array)

    def fetch(self, vectors: Sequence[Any]) -> Numbers:
        return np.concatenate(jax.device_get(list(vectors)))  # JAX would compile a program for every number of them

    def copy(self, array: Any, device: Device, gradient: bool = False) -> Any:
        """JAX's arrays have no gradient attached, and cannot be written to: `gradient` asks for nothing here."""
        return jax.device_put(np.array(checked(array)), self._native(device))

    def assign(self, array: Any, value: Any) -> Any:
        return value

    def take(self, array: Any, index: Any) -> Any:
        return rows(array, index)

    def index(self, order: Numbers, device: Device) -> Numbers:
        """On the host: slices of it are cheap there, and JAX takes them along when it launches a computation."""
        return order.astype(np.int32)

    def add(self, left: Any, right: Any) -> Any:
        return left + right

    def concat(self, vectors: Sequence[Any]) -> Any:
        return jnp.concatenate(list(vectors))

    def zeros_like(self, vector: Any) -> Any:
        return vector * 0

    def clip(self, vector: Any, limit: float) -> Any:
        # Apart from what comes before and after: XLA fuses that in one way in a step alone, and in another in many.
        barrier = jax.lax.optimization_barrier
        return barrier(clipped(barrier(vector), vector.dtype.type(limit)))

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return Compiled(function)

    # A run

    content, require_portable = staticmethod(content), staticmethod(numerics.require_portable)
    numerics = staticmethod(numerics.found)

    @contextmanager
    def session(self, devices: Sequence[Device], *, deterministic: bool, threads: int) -> Iterator[None]:
        numerics.check_contexts()
        same = functools.partial(numerics.take_over, dict(jax.config.values))  # as in this thread
        with self.workers.at_work(devices, threads, same):
            if numerics.settings() != self._settings:
                jax.clear_caches()  # what was compiled under other settings may not fit these
            self._settings = numerics.settings()
            # Where no two shards run side by side, Python goes on while one is computed.
            self._run = threads, side_by_side(threads) == 1
            self._run_on_gpu = devices[0].kind == "cuda"
            try:
                yield
            finally:
                self._run, self._run_on_gpu = None, False
                self.forget()

    # Models

    def forget(self) -> None:
        self._made.clear()

    def describe(self, model: Any) -> str:
        if isinstance(model, Pair):
            return getattr(model.apply, "__qualname__", None) or type(model.apply).__name__
        return super().describe(model)

    def style(self, model: Any, x: Tree, whole: bool) -> Style:
        if isinstance(model, Pair):
            return style_of(model.apply, x, whole, 1 + (model.state is not None), OPTIONS | {"key"})
        return style_of(type(model).__call__, x, whole, skip=1)

    def probe(self, model: Any, measure: Any, x: Tree, y: Tree, name: str = "x") -> Shape:
        measure = Measure.of(measure)
        if id(model) not in self._made:
            first = jax.device_put(mapped(checked, x), self._users_native(cpu()))
            if isinstance(model, Pair) and callable(model.params):
                self._made[id(model)] = model, model.params(jax.random.key(0), first)
            elif isinstance(model, nn.Module) and model.scope is None:
                self._made[id(model)] = model, drawn(LinenAdapter(model), spread(first, measure.style))
        adapter, params, state = adapt(model, self._made)
        dtype = check_weights(self.describe(model), (str(jnp.asarray(leaf).dtype) for leaf in jax.tree.leaves(params)))
        check_examples(name, x, dtype, y)

        found: list[Shape] = []

        def forward(x: Any, labels: Any) -> None:
            output, _ = adapter(params, state, spread(x, measure.style), jax.random.key(0), False)
            found.append(self.described(measure, output, labels, y, dtype))

        jax.eval_shape(forward, mapped(checked, x), mapped(checked, y))  # shapes alone: nothing is computed
        return found[0]

    def replica(self, model: Any, measure: Any, device: Device, shards: int, capture: bool = True) -> JaxReplica:
        loss = Measure.of(measure).function
        if isinstance(loss, nnx.Module) and jax.tree.leaves(nnx.state(loss, nnx.Param)):
            raise not_trained(f"of {type(loss).__name__}")
        with self.explained():
            adapted = adapt(model, self._made)
            return JaxReplica(self, adapted, measure, device, shards, self._users_native(device))

    def updater(self, optimizer: Any, replica: JaxReplica, clip: Any) -> JaxUpdater:
        return JaxUpdater(optimizer, replica, clip)

    def steps(self, group: Replicas) -> Steps | None:
        return JaxSteps(group) if can_launch(group) else None

    def world(self, place: Place, timeout: float, devices: Sequence[Device]) -> World:
        count = global_state.num_processes
        if global_state.client is not None and count > 1:
            raise Invalid(
                f"jax.distributed.initialize has joined {count} processes, and samestep joins them by MPI: leave it out, and "
                f"start the script with `mpiexec -n {count} python ...`"
            )
        return super().world(place, timeout, devices)

    # Losses

    def cross_entropy(self, output: Any, y: Any) -> Any:
        return self._by_position(output, y).sum()

    def _by_position(self, output: Any, y: Any) -> Any:
        if self._run_on_gpu:
            # The other way takes one score, and the gradient of that is a scatter: slow on a GPU in one fixed order.
            label = jnp.arange(output.shape[-1]) == y[..., None]
            return -jnp.where(label, jax.nn.log_softmax(output), 0).sum(-1)
        return -jnp.take_along_axis(jax.nn.log_softmax(output), y[..., None], -1)[..., 0]

    def by_position(self, output: Any, y: Any) -> tuple[Any, Any]:
        scores, counts = jnp.moveaxis(output, class_axis(output.shape, y.shape), -1), y != IGNORED
        return jnp.where(counts, self._by_position(scores, jnp.where(counts, y, 0)), 0).sum(), counts.sum()

    def number(self, value: Any, like: Any) -> Any:
        return jax.lax.stop_gradient(jnp.asarray(value, jnp.promote_types(like.dtype, jnp.float32)).reshape(()))

    def choose(self, weight: Any, new: Any, old: Any) -> Any:
        return jnp.where(weight != 0, new, old)

    def sum_of_means(self, value: Any) -> Any:
        # One formula for all shapes: XLA need not give another one the same bits.
        return value.reshape(len(value), -1).mean(1).sum()

    def count_hits(self, output: Any, y: Any) -> Any:
        return (output.argmax(1) == y).sum()

    def zero(self, like: Any) -> Any:
        return jnp.zeros(())


def checked(array: Any) -> Any:
    """Without jax_enable_x64 JAX makes 32 bits of 64; whole numbers that do not fit would come out as others."""
    array = array if isinstance(array, jax.Array) else np.asarray(array)
    if array.dtype in (np.int64, np.uint64) and not jax.config.read("jax_enable_x64"):
        small = np.iinfo(np.int32 if array.dtype == np.int64 else np.uint32)
        if array.size and not (small.min <= array.min() and array.max() <= small.max):
            raise Invalid("whole numbers beyond 32 bits need jax.config.update('jax_enable_x64', True)")
    return array


backend: Backend = JaxBackend()
