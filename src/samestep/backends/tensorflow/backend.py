"""TensorFlow: devices, arrays, and where a run computes. graph.py says what in TensorFlow could let the number of cores in.

While a run lasts, arrays are NumPy's. A session takes and gives them without a copy, and the optimizers' arithmetic on them is
the same on any number of cores. Outside of a run, arrays are TensorFlow's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend import get_keras_mask

from samestep.backends.base import Backend
from samestep.backends.calling import spread
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
    wants_labels_first,
)  # fmt: skip
from samestep.backends.tensorflow import numerics
from samestep.backends.tensorflow.adapters import adapter_of, style
from samestep.backends.tensorflow.content import content
from samestep.backends.tensorflow.graph import own_threads
from samestep.backends.tensorflow.losses import weighted
from samestep.backends.tensorflow.program import Program
from samestep.backends.tensorflow.replica import TensorflowReplica
from samestep.backends.tensorflow.updater import TensorflowUpdater
from samestep.backends.workers import cores
from samestep.devices import Device, cpu, gpu
from samestep.errors import BackendMissing, Invalid, NotBuilt
from samestep.trees import Tree, first, mapped

if (other := keras.backend.backend()) != "tensorflow":
    raise BackendMissing(f"Keras computes with {other}: set KERAS_BACKEND=tensorflow before it is imported")

ARRAYS = tf.Tensor, tf.Variable, keras.Variable


class TensorflowBackend(Backend):
    name, goes_on = "tensorflow", True

    def __init__(self) -> None:
        super().__init__()
        self._running, self._threads = False, 1
        self._programs: dict[tuple[Any, ...], Program] = {}  # of the models of this run

    # Devices

    def devices(self) -> list[Device]:
        return [*map(cpu, range(logical("CPU"))), *map(gpu, range(logical("GPU")))]

    def _native(self, device: Device) -> Any:
        """Where TensorFlow makes arrays on this device, for `with`."""
        return tf.device(f"/{'CPU' if device.kind == 'cpu' else 'GPU'}:{device.index}")

    def state_dict(self, model: Any) -> Any:
        return model.get_weights() if isinstance(model, keras.Layer) else adapter_of(model).values()

    # Arrays

    def owns(self, thing: object) -> bool:
        return isinstance(thing, (*ARRAYS, tf.Module, keras.Layer))

    def is_array(self, thing: object) -> bool:
        return isinstance(thing, tf.Tensor)

    def device_of(self, array: Any) -> Device:
        array = array.value if isinstance(array, keras.Variable) else array
        if not isinstance(array, ARRAYS):
            return cpu()
        spec = tf.DeviceSpec.from_string(array.device)
        return (gpu if spec.device_type == "GPU" else cpu)(spec.device_index or 0)

    def put(self, array: Any, device: Device) -> Any:
        self.require(device)
        if self._running:
            return np.require(self.get(array), requirements=["C"])
        ours = isinstance(array, ARRAYS)
        if ours and self.device_of(array) == device:
            return array
        with self._native(device):
            return tf.identity(array) if ours else tf.constant(array)

    def full(self, shape: tuple[int, ...], value: float, device: Device, dtype: str) -> Any:
        with self._native(device):
            return tf.fill(shape, tf.constant(value, dtype))

    def get(self, array: Any) -> Numbers:
        return array.numpy() if isinstance(array, ARRAYS) else np.asarray(array)

    def copy(self, array: Any, device: Device, gradient: bool = False) -> Any:
        """TensorFlow's gradients come from a tape and are those of variables: `gradient` makes a variable."""
        self.require(device)
        array = np.array(self.get(array))
        if self._running:
            return array
        with self._native(device):
            return tf.Variable(array) if gradient else tf.constant(array)

    def assign(self, array: Any, value: Any) -> Any:
        if isinstance(array, np.ndarray):
            array[...] = value
        elif isinstance(array, (tf.Variable, keras.Variable)):
            array.assign(value)
        else:
            return self.put(value, self.device_of(array))  # arithmetic leaves its results on the first device
        return array

    def reshape(self, array: Any, shape: Sequence[int]) -> Any:
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

    def in_memory(self, vector: Any) -> Numbers:
        return self.get(vector)

    def clip(self, vector: Any, limit: float) -> Any:
        array = self.get(vector)  # NumPy's sum: TensorFlow's would depend on the number of threads
        norm = np.sqrt((array * array).sum())
        return vector * (array.dtype.type(limit) / np.maximum(norm, array.dtype.type(limit)))

    # A run

    require_portable, content = staticmethod(numerics.require_portable), staticmethod(content)
    numerics = staticmethod(numerics.found)

    @contextmanager
    def session(self, devices: Sequence[Device], *, deterministic: bool, threads: int) -> Iterator[None]:
        if devices[0].kind == "cuda":
            raise Invalid("training on GPUs is not there yet for TensorFlow: use devices='cpu'")
        if not own_threads() and pool() != threads:
            ways = "import samestep.backends.tensorflow before the first tensor, or set TF_OVERRIDE_GLOBAL_THREADPOOL=1"
            raise Invalid(f"TensorFlow has a pool of {pool()} threads that the result would depend on: {ways}")
        numerics.check_scopes()
        same = partial(keras.config.set_dtype_policy, keras.config.dtype_policy())  # of this thread alone
        with self.workers.at_work(devices, threads, same):
            self._running, self._threads = True, threads
            try:
                yield
            finally:
                self._running, self._threads = False, 1
                self._programs.clear()

    # Models

    style = staticmethod(style)

    def probe(self, model: Any, measure: Any, x: Tree, y: Tree, name: str = "x") -> Shape:
        adapter, measure = adapter_of(model), Measure.of(measure)
        before = adapter.values()
        known = [variable.dtype.name for variable in adapter.trained.values()]
        if known:
            check_examples(name, x, check_weights(self.describe(model), known), y)
        try:
            with self.explained():
                # This makes the weights of a model that has none yet.
                output, _ = adapter(spread(mapped(tf.constant, x), measure.style), False)
                dtype = check_weights(self.describe(model), (v.dtype.name for v in adapter_of(model).trained.values()))
                check_examples(name, x, dtype, y)
                return self.described(measure, output, mapped(tf.constant, y), y, dtype)
        except (TypeError, tf.errors.InvalidArgumentError) as error:
            if not_floats(x) and known and "float" in str(error):
                raise convert(name, x, known[0]) from None
            raise
        finally:
            for key, variable in adapter.variables.items():  # a tf.Module may count its calls
                if variable.numpy().tobytes() != before[key].tobytes():
                    variable.assign(before[key])

    def replica(self, model: Any, measure: Any, device: Device, shards: int, capture: bool = True) -> TensorflowReplica:
        self.require(device)
        if isinstance(model, keras.Layer) and not model.built and not model.weights:  # a fit builds it
            raise NotBuilt(f"the model {self.describe(model)} has no weights yet: call it once, or model.build(shape)")
        # One program for all replicas of a run, and no longer: the model can be changed before the next one.
        key = id(model), shards
        program = self._programs.get(key)
        if not program or program.measure != Measure.of(measure):
            program = Program(self, model, measure, shards, self._threads)
        if self._running:
            self._programs[key] = program
        return TensorflowReplica(self, program, device)

    def updater(self, optimizer: Any, replica: TensorflowReplica, clip: Any) -> TensorflowUpdater:
        return TensorflowUpdater(optimizer, replica, clip)

    # Losses. While a function is traced, shapes are known only in part: the number of examples may be None.

    def cross_entropy(self, output: Any, y: Any) -> Any:
        return tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(y, tf.int64), output))

    def by_position(self, output: Any, y: Any) -> tuple[Any, Any]:
        axis, rank = class_axis(tuple(output.shape), tuple(y.shape)), len(output.shape)
        scores = tf.transpose(output, [*(i for i in range(rank) if i != axis), axis])
        y, mask = tf.cast(y, tf.int64), get_keras_mask(output)
        counts = y != IGNORED if mask is None else (y != IGNORED) & tf.cast(mask, tf.bool)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.where(y != IGNORED, y, 0), scores)
        return tf.reduce_sum(each * tf.cast(counts, scores.dtype)), tf.math.count_nonzero(counts)

    def call_loss(self, loss: Any, output: Any, y: Tree) -> Any:
        if isinstance(output, np.ndarray):  # which `put` gives during a run
            output, y = tf.constant(output), mapped(tf.constant, y)
        value = weighted(loss, output, y)
        if value is None:
            value = loss(y, output) if wants_labels_first(loss) else loss(output, y)
        if self.is_array(value) and value.shape.rank != 0 and value.shape[0] is None:
            return tf.reshape(value, (tf.shape(first(y))[0], -1))  # one row per example
        return value

    def count(self, y: Tree, like: Any) -> Any:
        return tf.cast(tf.shape(first(y))[0], like.dtype)

    def number(self, value: Any, like: Any) -> Any:
        dtype = tf.float64 if like.dtype == tf.float64 else tf.float32
        # of Python's numbers: tf.cast would round them first
        given = value if tf.is_tensor(value) else tf.constant(value, dtype)
        return tf.reshape(tf.cast(tf.stop_gradient(given), dtype), ())

    def sum_of_means(self, value: Any) -> Any:
        return tf.reduce_sum(tf.reduce_mean(tf.reshape(value, (tf.shape(value)[0], -1)), 1))

    def has_scores(self, output: Any, y: Any) -> bool:
        return self.is_array(output) and output.shape.rank == 2 and super().has_scores(output, y)

    def count_hits(self, output: Any, y: Any) -> Any:
        return tf.reduce_sum(tf.cast(tf.argmax(output, 1) == tf.cast(y, tf.int64), tf.int64))

    def zero(self, like: Any) -> Any:
        return tf.zeros(())


def logical(kind: str) -> int:
    """How many devices of a kind there are. tf.config.list_logical_devices would start TensorFlow and end its configuration."""
    cut = tf.config.get_logical_device_configuration
    return sum(len(cut(one) or [one]) for one in tf.config.list_physical_devices(kind))


def pool() -> int:
    """How many threads TensorFlow's own pool has."""
    asked = tf.config.threading.get_intra_op_parallelism_threads() or int(os.environ.get("TF_NUM_INTRAOP_THREADS", 0))
    return asked or cores()


backend: Backend = TensorflowBackend()
