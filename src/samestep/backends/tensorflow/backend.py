"""TensorFlow: devices, arrays, and where a run computes. The replica is in tensorflow_replica.py, the threads and the noise in
tensorflow_graph.py, which also says what of TensorFlow could let the number of cores in.

While a run lasts, arrays on the CPU are NumPy's: a session takes them and gives them without a copy, and the optimizers'
arithmetic is the same on any number of cores.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# TensorFlow reads these once, when it starts. The first one lets every session have threads of its own; TensorFlow's own are as
# many as before. The other keeps its news (INFO) from standard error, where progress is shown; warnings still come.
os.environ.setdefault("TF_OVERRIDE_GLOBAL_THREADPOOL", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

import keras
import numpy as np
import tensorflow as tf

from samestep.backends import Shape, Tensors
from samestep.backends.probing import check_examples, check_output, check_weights, convert
from samestep.backends.tensorflow.graph import Piece, compiled, own_threads
from samestep.backends.tensorflow.replica import Program, TensorflowReplica, form_of, sum_of_losses
from samestep.backends.workers import Crew
from samestep.devices import Device, cpu, gpu, host_memory
from samestep.errors import BackendMissing, Invalid, OutOfMemory, WrongType
from samestep.processes.mpi import join
from samestep.processes.place import Place
from samestep.processes.world import World
from samestep.runs.run import fingerprint

if keras.backend.backend() != "tensorflow":
    raise BackendMissing(
        f"Keras computes with {keras.backend.backend()} in this process: set KERAS_BACKEND=tensorflow before it is imported"
    )


class TensorflowBackend:
    name = "tensorflow"
    version = tf.__version__

    def __init__(self) -> None:
        self._crew = Crew()
        self._running = False
        self._threads = 1
        self._programs: dict[tuple[Any, ...], Program] = {}  # of the models of this run

    # Devices

    def devices(self) -> list[Device]:
        return [*map(cpu, range(logical("CPU"))), *map(gpu, range(logical("GPU")))]

    def memory(self, device: Device) -> tuple[int, int]:
        if device.kind == "cuda":
            used = tf.config.experimental.get_memory_info(f"GPU:{device.index}")["current"]
            return used, used  # how much there is in all, TensorFlow does not say
        return host_memory()

    def _place(self, device: Device) -> str:
        """TensorFlow's own name for a device."""
        if device not in self.devices():
            raise Invalid(
                f"device {device} is not there: tensorflow sees {', '.join(map(str, self.devices()))} on this machine"
            )
        return f"/{'CPU' if device.kind == 'cpu' else 'GPU'}:{device.index}"

    # Arrays

    def owns(self, thing: object) -> bool:
        return isinstance(thing, (tf.Tensor, tf.Variable, keras.Variable, tf.Module, keras.Layer))

    def device_of(self, array: Any) -> Device:
        array = array.value if isinstance(array, keras.Variable) else array
        if not isinstance(array, (tf.Tensor, tf.Variable)):
            return cpu()
        spec = tf.DeviceSpec.from_string(array.device)
        return (gpu if spec.device_type == "GPU" else cpu)(spec.device_index or 0)

    def put(self, array: Any, device: Device) -> Any:
        place, ours = self._place(device), isinstance(array, (tf.Tensor, tf.Variable, keras.Variable))
        if self._running and device.kind == "cpu":
            return np.require(self.get(array), requirements=["C"])
        if ours and self.device_of(array) == device:
            return array
        with tf.device(place):
            return tf.identity(array) if ours else tf.constant(array)

    def get(self, array: Any) -> np.ndarray[Any, Any]:
        return array.numpy() if hasattr(array, "numpy") else np.asarray(array)

    place = put

    def copy(self, array: Any, device: Device, gradient: bool = False) -> Any:
        """In TensorFlow it is a variable that has gradients, and they come from a tape: `gradient` makes a variable."""
        place, array = self._place(device), np.array(self.get(array))
        if self._running and device.kind == "cpu":
            return array
        with tf.device(place):
            return tf.Variable(array) if gradient else tf.constant(array)

    def assign(self, array: Any, value: Any) -> Any:
        if isinstance(array, np.ndarray):
            array[...] = value
        elif isinstance(array, (tf.Variable, keras.Variable)):
            array.assign(value)
        else:
            return self.put(value, self.device_of(array))  # arithmetic leaves its results on the first device
        return array

    def reshape(self, array: Any, shape: Any) -> Any:
        """TensorFlow's arrays have no method for it."""
        return array.reshape(shape) if isinstance(array, np.ndarray) else tf.reshape(array, shape)

    def take(self, array: Any, index: Any) -> Any:
        return np.take(array, index, axis=0) if isinstance(array, np.ndarray) else tf.gather(array, index)

    def add(self, left: Any, right: Any) -> Any:
        return np.add(left, right, out=left) if isinstance(left, np.ndarray) else left + right

    def concat(self, vectors: Sequence[Any]) -> Any:
        return np.concatenate(vectors) if isinstance(vectors[0], np.ndarray) else tf.concat(vectors, 0)

    def zeros_like(self, vector: Any) -> Any:
        return np.zeros_like(vector) if isinstance(vector, np.ndarray) else tf.zeros_like(vector)

    def in_memory(self, vector: Any) -> np.ndarray[Any, Any]:
        """A vector of a run on the CPU as NumPy, in its own memory."""
        return self.get(vector)

    def clip(self, vector: Any, limit: float) -> Any:
        array = self.get(vector)  # NumPy's sum: TensorFlow's would depend on the number of threads
        norm = np.sqrt((array * array).sum())
        return vector * (array.dtype.type(limit) / np.maximum(norm, array.dtype.type(limit)))

    # A run

    @contextmanager
    def session(self, devices: Sequence[Device], *, deterministic: bool, threads: int) -> Iterator[None]:
        if devices[0].kind == "cuda":
            raise Invalid("training on GPUs is not there yet for TensorFlow: use devices='cpu'")
        if not own_threads() and pool() != threads:
            raise Invalid(
                f"TensorFlow was started before samestep was imported, with a pool of {pool()} threads that the result would "
                "depend on: import samestep.backends.tensorflow, or set TF_OVERRIDE_GLOBAL_THREADPOOL=1, before the first "
                "tensor or model is made"
            )
        with self._crew.at_work(devices, threads):
            self._running, self._threads = True, threads
            try:
                yield
            finally:
                self._running, self._threads = False, 1
                self._programs.clear()

    def map(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        with explained():
            return [tasks[0]()] if len(tasks) == 1 else self._crew.map(tasks)

    # Models

    def describe(self, model: Any) -> str:
        return type(model).__name__

    def probe(self, model: Any, loss: Any, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], name: str = "x") -> Shape:
        before = values(model)
        known = [variable.dtype.name for variable in form_of(model).trained.values()]
        if known:
            check_examples(name, x, check_weights(self.describe(model), known))
        form, first = form_of(model), tf.constant(x)
        try:
            with explained():
                output, _ = form(first, False)  # makes the weights of a model that has none yet
                if loss is not None:
                    sum_of_losses(loss, output, tf.constant(y))
        except (TypeError, tf.errors.InvalidArgumentError) as error:
            if x.dtype.kind != "f" and known and "float" in str(error):
                raise convert(name, x, known[0]) from error
            raise
        finally:
            for variable, value in before:  # a tf.Module may count its calls
                if not np.array_equal(variable.numpy(), value, equal_nan=True):
                    variable.assign(value)
        dtype = check_weights(self.describe(model), (v.dtype.name for v in form_of(model).trained.values()))
        check_examples(name, x, dtype)
        shape = tuple(output.shape) if isinstance(output, tf.Tensor) else None
        return check_output("tensor", shape, type(output).__name__, y, loss, dtype)

    def replica(self, model: Any, loss: Any, device: Device, shards: int, capture: bool = True) -> TensorflowReplica:
        self._place(device)
        make = functools.partial(Program, model, loss, shards, self._threads)
        if not self._running:
            return TensorflowReplica(make(), device)
        # One program for all replicas of a run, and no longer: a model can be changed before the next one.
        program = self._programs.setdefault((id(model), id(loss), shards), make())
        return TensorflowReplica(program, device)

    def updater(self, optimizer: Any, replica: TensorflowReplica) -> KerasUpdater:
        return KerasUpdater(optimizer, replica)

    def world(self, place: Place, timeout: float, devices: Sequence[Device]) -> World:
        return join(self.get, place, timeout)

    def rates(self, scheduler: Any, n: int) -> list[float]:
        raise WrongType(f"schedule must be a number or a function of t, as Keras's are, got {type(scheduler).__name__}")


def logical(kind: str) -> int:
    """How many devices of a kind there are; one may have been cut into several (tf.config.set_logical_device_configuration).

    tf.config.list_logical_devices would start TensorFlow, after which nothing can be configured.
    """
    return sum(
        len(tf.config.get_logical_device_configuration(one) or [one]) for one in tf.config.list_physical_devices(kind)
    )


def pool() -> int:
    """How many threads TensorFlow's own pool has."""
    asked = tf.config.threading.get_intra_op_parallelism_threads() or int(os.environ.get("TF_NUM_INTRAOP_THREADS", 0))
    return asked or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def values(model: Any) -> list[tuple[tf.Variable, np.ndarray[Any, Any]]]:
    form = form_of(model)
    return [(variable, np.array(variable.numpy())) for variable in (form.trained | form.state).values()]


@contextmanager
def explained() -> Iterator[None]:
    """Turn TensorFlow's errors that have a known remedy into samestep's, which name it."""
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        raise OutOfMemory(
            f"the device ran out of memory ({str(error).splitlines()[0]}): raise shards (smaller shards need less), "
            "or lower the batch size"
        ) from error


# Keras's optimizers

NO_NOISE = np.zeros(2, np.int64)  # the key: optimizers draw nothing


class KerasUpdater:
    """An optimizer of Keras at work on one replica, on the model's own tensors; or a function that makes one from variables.

    Its learning_rate is set to schedule(t); schedule=None keeps the one that it came with. If that is a LearningRateSchedule,
    it is inside: it is used as it is, and another schedule is an error.
    """

    def __init__(self, given: Any, replica: TensorflowReplica) -> None:
        self.replica = replica
        self._variables = [keras.Variable(array, name=name.replace("/", "."))
                           for name, array in replica.named(replica.parameters).items()]  # fmt: skip
        made = given() if isinstance(given, type) else given
        made = made if isinstance(made, keras.optimizers.Optimizer) else made(self._variables)
        if not isinstance(made, keras.optimizers.Optimizer):
            raise WrongType(
                "optimizer must be a keras.optimizers.Optimizer, or a function that makes one from variables, "
                f"got {type(given).__name__}"
            )
        if isinstance(made, keras.optimizers.LossScaleOptimizer):
            raise WrongType(
                "LossScaleOptimizer wants the loss scaled, which the Trainer does not: use the one inside it"
            )
        if made is given and hasattr(made, "_exclude_from_weight_decay"):
            raise Invalid(
                "the optimizer excludes variables from weight decay, which a replica's copy of it would not: pass a function "
                "that makes the optimizer from variables and excludes those"
            )
        self.optimizer = type(made).from_config(made.get_config()) if made is given else made
        self.optimizer.build(self._variables)
        if made is given and made.built:  # momenta that it came with
            for mine, theirs in zip(self.optimizer.variables, made.variables, strict=True):
                mine.assign(theirs)
        names = [variable.path for variable in self.optimizer.variables]
        rates = [i for i, name in enumerate(names) if name.endswith("/learning_rate")]
        inside = isinstance(self.optimizer.get_config()["learning_rate"], dict)
        self.fixed, self._rate = inside, None if inside else rates[0]
        self._names = [name.partition("/")[2] for name in names]
        self.state = [np.array(variable.numpy()) for variable in self.optimizer.variables]
        self._first = None if inside else float(self.state[rates[0]])
        self._began = fingerprint(self.tensors())[:16] if int(self.state[0]) else ""  # of what it came with
        shared = replica.program.updates
        self._update = shared.get(id(given)) or shared.setdefault(id(given), self._compiled())

    def __repr__(self) -> str:
        settings = {name: value for name, value in self.optimizer.get_config().items() if name != "name"}
        past = f", state={self._began}" if self._began else ""
        return f"keras.optimizers.{type(self.optimizer).__name__}({settings}{past})"

    def rate(self) -> float | None:
        """The rate that it came with; 1 stands for a rate that is inside it and cannot be seen."""
        return 1.0 if self.fixed else self._first

    def __call__(self, gradient: Any, lr: float, t: int, z: Any) -> None:
        if self._rate is not None:
            self.state[self._rate] = np.asarray(lr, self.state[self._rate].dtype)
        flat = [array.reshape(-1) for array in self.state]
        parameters, *new = self._update(self.replica.parameters, *flat, NO_NOISE, gradient)
        self.state = [array.reshape(old.shape) for array, old in zip(new, self.state, strict=True)]
        self.replica.assign(parameters)

    def _compiled(self) -> Any:
        layout, variables = self.replica.layouts[0], self.optimizer.variables

        def update(gradient: Any) -> list[Any]:
            sizes = [stop - start for start, stop in layout.places]
            rows = zip(tf.split(gradient, sizes), layout.shapes, strict=True)
            self.optimizer.apply([tf.reshape(piece, shape) for piece, shape in rows], self._variables)
            moved = [tf.reshape(variable.value, (-1,)) for variable in self._variables]
            return [tf.concat(moved, 0), *(tf.reshape(variable.value, (-1,)) for variable in variables)]

        flat = tf.TensorSpec(self.replica.parameters.shape, self.replica.parameters.dtype)
        traced = tf.function(update, autograph=False).get_concrete_function(flat)
        vectors = [flat, *(tf.TensorSpec((array.size,), array.dtype) for array in self.state)]
        weights = [Piece(v.value, 0, *place) for v, place in zip(self._variables, layout.places, strict=True)]
        slots = [
            Piece(v.value, i, 0, array.size) for i, (v, array) in enumerate(zip(variables, self.state, strict=True), 1)
        ]
        return compiled(traced, vectors, [*weights, *slots], self.replica.program.threads)

    def tensors(self) -> Tensors:
        return dict(zip(self._names, self.state, strict=True))

    def load(self, tensors: Tensors) -> None:
        self.state = [np.array(tensors[name]) for name in self._names]


backend = TensorflowBackend()
