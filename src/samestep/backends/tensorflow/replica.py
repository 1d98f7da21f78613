"""One whole copy of a TensorFlow model: a shard's gradient as one flat vector, computed by one compiled graph.

A model is brought into one *form*, which knows its variables by name and calls it, whether it is Keras's or a tf.Module. From
a form a *program* is compiled (tensorflow_graph.py). All replicas share it; a replica has the vectors, as NumPy arrays.
"""

from __future__ import annotations

import copy
import inspect
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from samestep import fingerprint as bits
from samestep.backends import Deliver, Tensors
from samestep.backends.tensorflow.graph import Compiled, Piece, compiled
from samestep.devices import Device
from samestep.errors import Invalid, WrongType

Array = Any
Tensor = Any
Vector = np.ndarray[Any, Any]
Variables = dict[str, tf.Variable]
ALIGN = 64  # bytes; TensorFlow reads an array that begins so without copying it


class KerasForm:
    """Of a Keras model, or layer."""

    def __init__(self, model: keras.Layer) -> None:
        self.model = model
        trained = {id(variable) for variable in model.trainable_variables}
        names = list(zip(keras_names(model), model.weights, strict=True))
        self.trained: Variables = {name: v.value for name, v in names if id(v) in trained}
        self.state: Variables = {name: v.value for name, v in names if id(v) not in trained}

    def __call__(self, x: Tensor, train: bool) -> tuple[Any, list[Tensor]]:
        """The output, and losses that layers have of themselves, such as weight decay: each once for a whole batch."""
        output = self.model(x, training=train)
        losses = list(self.model.losses)
        self.model._clear_losses()  # these are parts of a graph, and of no use outside it
        return output, losses

    def copied(self, example: Array | None) -> Any:
        """Another one of this kind; the values of its weights are still to be set."""
        try:
            twin = self._made_again()
            if not twin.built:
                if example is None:
                    twin.build_from_config(self.model.get_build_config())
                else:
                    twin(example)
            if [w.shape for w in twin.weights] != [w.shape for w in self.model.weights]:
                raise Invalid("it then has other weights")
            if {id(v) for v in twin.variables} & {id(v) for v in self.model.variables}:
                raise Invalid("it then shares weights with the first")
        except Exception as error:
            raise Invalid(
                f"the model {type(self.model).__name__} cannot be copied: give it get_config(), as Keras asks of models that "
                f"are saved ({str(error).splitlines()[0]})"
            ) from error
        for layer, own in zip(self.model._flatten_layers(), twin._flatten_layers(), strict=True):
            own.trainable = layer.trainable
        return twin

    def _made_again(self) -> Any:
        if isinstance(self.model, keras.Sequential) or hasattr(self.model, "operations"):  # of inputs and outputs
            return keras.models.clone_model(self.model)
        config, words = self.model.get_config(), inspect.signature(type(self.model)).parameters
        if all(word.kind is not word.VAR_KEYWORD for word in words.values()):
            config = {
                word: value for word, value in config.items() if word in words
            }  # many take no `dtype`, `trainable`
        return type(self.model).from_config(config)


class ModuleForm:
    """Of a tf.Module that can be called; Keras layers among its attributes are part of it."""

    def __init__(self, model: tf.Module) -> None:
        self.model = model
        if not callable(model):
            raise WrongType(f"a tf.Module must have __call__(x) to be trained, and {type(model).__name__} has none")
        self.trained: Variables = {}
        self.state: Variables = {}
        for path, leaf in model._flatten(predicate=is_leaf, with_path=True):
            name = ".".join(map(str, path))
            if isinstance(leaf, keras.Layer):
                inner = KerasForm(leaf)
                self.trained |= {f"{name}.{within}": variable for within, variable in inner.trained.items()}
                self.state |= {f"{name}.{within}": variable for within, variable in inner.state.items()}
            else:
                (self.trained if leaf.trainable else self.state)[name] = leaf
        function = type(model).__call__
        function = getattr(function, "python_function", function)  # of a tf.function: it is going to be traced anyway
        words = inspect.signature(function).parameters
        self._words = [word for word in ("training", "train", "is_training") if word in words]
        try:
            self._function = tf.autograph.to_graph(function)  # conditions and loops over tensors, as in a tf.function
        except Exception:  # there is no source to read, as in an interactive session
            self._function = function

    def __call__(self, x: Tensor, train: bool) -> tuple[Any, list[Tensor]]:
        return self._function(self.model, x, **dict.fromkeys(self._words, train)), []

    def copied(self, example: Array | None) -> Any:
        return copy.deepcopy(self.model)


def is_leaf(thing: Any) -> bool:
    return isinstance(thing, (tf.Variable, keras.Layer))


def form_of(model: Any) -> Any:
    return KerasForm(model) if isinstance(model, keras.Layer) else ModuleForm(model)


def keras_names(model: keras.Layer) -> list[str]:
    """A name for each of the model's weights: its path, without the model's own name.

    Keras numbers the layers that nobody named through all models of a process: dense_7. Here they are numbered anew, within
    the model, or a second model of the same kind would have weights of other names.
    """
    layers = model._flatten_layers(include_self=False)
    numbered = {layer.name: base for layer in layers for base in [snake(type(layer).__name__)]
                if re.fullmatch(rf"{re.escape(base)}(_\d+)?", layer.name)}  # fmt: skip
    renamed: dict[tuple[str, ...], str] = {}
    taken: set[str] = set()
    names = []
    for weight in model.weights:
        steps = weight.path.split("/")
        steps, own = steps[1:] if steps[0] == model.name and len(steps) > 1 else steps, []
        for i, step in enumerate(steps[:-1]):
            place = tuple(steps[: i + 1])
            if place not in renamed:
                base = numbered.get(step, step)
                same = [new for old, new in renamed.items() if old[:-1] == place[:-1] and numbered.get(old[-1]) == base]
                renamed[place] = f"{base}_{len(same)}" if same else base
            own.append(renamed[place])
        name = wanted = "/".join([*own, steps[-1]])
        number = 1
        while name in taken:
            name, number = f"{wanted}_{number}", number + 1
        taken.add(name)
        names.append(name)
    return names


def snake(name: str) -> str:
    """Conv2DTranspose → conv2d_transpose, as Keras has it."""
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()


class Layout:
    """How tensors lie in flat vectors, one vector for each type of number."""

    def __init__(self, variables: Variables) -> None:
        self.names, self.variables = list(variables), list(variables.values())
        self.shapes = [tuple(variable.shape) for variable in self.variables]
        self.dtypes = [variable.dtype.name for variable in self.variables]
        for name, variable in variables.items():
            if not (variable.dtype.is_floating or variable.dtype.is_integer):
                raise WrongType(
                    f"{name} is of type {variable.dtype.name}: weights and state must be real or whole numbers"
                )
        self.types = list(dict.fromkeys(self.dtypes))
        self.sizes = dict.fromkeys(self.types, 0)
        self.places = []  # (start, stop) of each tensor in the vector of its type
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            start = self.sizes[dtype]
            self.sizes[dtype] = stop = start + int(np.prod(shape))
            self.places.append((start, stop))

    def flatten(self, arrays: Sequence[Any]) -> list[Vector]:
        vectors = {dtype: aligned(size, dtype) for dtype, size in self.sizes.items()}
        for array, dtype, (start, stop) in zip(arrays, self.dtypes, self.places, strict=True):
            vectors[dtype][start:stop] = np.asarray(array).reshape(-1)
        return list(vectors.values())

    def views(self, vectors: Sequence[Vector]) -> Tensors:
        held = dict(zip(self.types, vectors, strict=True))
        rows = zip(self.names, self.shapes, self.dtypes, self.places, strict=True)
        return {name: held[dtype][start:stop].reshape(shape) for name, shape, dtype, (start, stop) in rows}

    def pieces(self, first: int) -> Iterator[Piece]:
        """Where the values of the variables lie if the vectors are numbered from `first`."""
        for variable, dtype, place in zip(self.variables, self.dtypes, self.places, strict=True):
            yield Piece(variable, first + self.types.index(dtype), *place)

    def specs(self) -> list[tf.TensorSpec]:
        return [tf.TensorSpec((size,), dtype) for dtype, size in self.sizes.items()]


def aligned(size: int, dtype: str) -> Vector:
    width = np.dtype(dtype).itemsize
    memory = np.zeros(size * width + ALIGN, np.uint8)
    start = -memory.ctypes.data % ALIGN
    return memory[start : start + size * width].view(dtype)


class Program:
    """The compiled functions of a model, for any replica of it."""

    def __init__(self, model: Any, loss: Any, shards: int, threads: int) -> None:
        self.form, self.loss, self.shards, self.threads = form_of(model), loss, shards, threads
        self.trained, self.state = Layout(self.form.trained), Layout(self.form.state)
        if len(self.trained.types) != 1:
            raise Invalid("the parameters to train must all be of one type, and there must be some")
        self.dtype = self.trained.types[0]
        self._functions: dict[tuple[Any, ...], Compiled] = {}
        self._by_size: set[bool] = set()  # train: whether every number of examples needs a graph of its own
        self._making = threading.Lock()
        self.updates: dict[int, Compiled] = {}  # of the framework's own optimizer, which all replicas share
        self.example: Array | None = None

    def __call__(self, train: bool, vectors: Sequence[Vector], x: Array, y: Array, key: int, shard: int) -> Vector:
        with self._making:
            function = self._function(train, x, y)
        (result,) = function(*vectors, halves(key), x, y, np.int32(shard))
        return result

    def _function(self, train: bool, x: Array, y: Array) -> Compiled:
        self.example = x[:1]
        kind: tuple[Any, ...] = (train, x.shape[1:], x.dtype, y.shape[1:], y.dtype)
        if kind not in self._functions and train not in self._by_size:
            try:
                self._functions[kind] = self._compiled(train, x, y, None)
            except Exception:  # some models must know how many examples there are; other errors come up again
                self._by_size.add(train)
        if train in self._by_size:
            kind = *kind, len(y)
            if kind not in self._functions:
                self._functions[kind] = self._compiled(train, x, y, len(y))
        return self._functions[kind]

    def _compiled(self, train: bool, x: Array, y: Array, examples: int | None) -> Compiled:
        """One graph for any number of examples if `examples` is None. Kernels see the shard's own shape in either case."""
        specs = [tf.TensorSpec((examples, *array.shape[1:]), array.dtype) for array in (x, y)]
        function = tf.function(self.gradient if train else self.evaluate, autograph=False)
        traced = function.get_concrete_function(*specs, tf.TensorSpec((), tf.int32))
        vectors = [*self.trained.specs(), *self.state.specs()]
        return compiled(traced, vectors, [*self.trained.pieces(0), *self.state.pieces(1)], self.threads)

    def release(self) -> None:
        """Let go of the graphs and their threads; they are made again when they are needed."""
        self._functions.clear()
        self.updates.clear()

    def gradient(self, x: Tensor, y: Tensor, shard: Tensor) -> Tensor:
        before = [variable.read_value() for variable in self.state.variables]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            for variable in self.trained.variables:
                tape.watch(variable)
            loss, right = self._numbers(x, y, True)
        gradients = tape.gradient(loss, self.trained.variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        count, mine = tf.cast(tf.shape(y)[0], self.dtype), tf.range(self.shards) == shard
        vector = [tf.reshape(tf.convert_to_tensor(gradient), (-1,)) for gradient in gradients]
        for dtype in self.state.types:
            for variable, start, own in zip(self.state.variables, before, self.state.dtypes, strict=True):
                if own == dtype:
                    change = tf.cast(variable.read_value() - start, self.dtype) * count
                    vector.append(tf.reshape(change, (-1,)))
        slots = [tf.where(mine, number, 0) for number in (tf.cast(loss, self.dtype), tf.cast(right, self.dtype))]
        return tf.concat([*vector, *slots], 0)

    def evaluate(self, x: Tensor, y: Tensor, shard: Tensor) -> Tensor:
        return tf.stack([tf.cast(number, tf.float64) for number in self._numbers(x, y, False)])

    def _numbers(self, x: Tensor, y: Tensor, train: bool) -> tuple[Tensor, Tensor]:
        output, own = self.form(x, train)
        loss = sum_of_losses(self.loss, output, y)
        for each in own:
            loss += tf.cast(each, loss.dtype) * tf.cast(tf.shape(y)[0], loss.dtype)
        return loss, hits(output, y)


def halves(key: int) -> np.ndarray[Any, Any]:
    return np.array([key >> 32 & 0xFFFFFFFF, key & 0xFFFFFFFF], np.int64)


def sum_of_losses(loss: Any, output: Any, y: Tensor) -> Tensor:
    """The sum over examples of the loss, whether `loss` gives one value per example or their mean."""
    if loss is None:
        return tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(y, output))
    value = loss(y, output) if wants_labels_first(loss) else loss(output, y)
    if not isinstance(value, tf.Tensor):
        raise WrongType(f"loss must return a tensor (a loss per example, or their mean), got {type(value).__name__}")
    count = tf.shape(y)[0]
    if value.shape.rank == 0:
        return value if getattr(loss, "reduction", None) == "sum" else value * tf.cast(count, value.dtype)
    if not value.shape[:1].is_compatible_with(y.shape[:1]):
        raise Invalid(
            f"loss must return one value per example ({y.shape[0]}) or their mean, got shape {tuple(value.shape)}"
        )
    return tf.reduce_sum(tf.reduce_mean(tf.reshape(value, (count, -1)), 1))


def wants_labels_first(loss: Any) -> bool:
    """Keras's own losses are functions of (y_true, y_pred)."""
    try:
        return next(iter(inspect.signature(loss).parameters), "") == "y_true"
    except (TypeError, ValueError):  # it has no signature
        return False


def hits(output: Any, y: Tensor) -> Tensor:
    """How many examples have their highest score at their label; 0 where the output is not one score per class."""
    if isinstance(output, tf.Tensor) and output.shape.rank == 2 and y.shape.rank == 1 and y.dtype.is_integer:
        return tf.reduce_sum(tf.cast(tf.argmax(output, 1) == tf.cast(y, tf.int64), tf.int64))
    return tf.zeros(())


class TensorflowReplica:
    gaps: Sequence[slice] = ()

    def __init__(self, program: Program, device: Device) -> None:
        self.device, self.program, self.shards = device, program, program.shards
        self.layouts = program.trained, program.state
        (self.parameters,) = self.layouts[0].flatten([variable.numpy() for variable in self.layouts[0].variables])
        self.state = self.layouts[1].flatten([variable.numpy() for variable in self.layouts[1].variables])
        self._print = bits.Print([])
        self.size = len(self.parameters) + sum(map(len, self.state)) + 2 * self.shards
        self.bands = [(0, self.size)]  # what is compiled gives all at once

    def gradient(self, x: Array, y: Array, key: int, shard: int, deliver: Deliver | None = None) -> Vector:
        return self.program(True, [self.parameters, *self.state], x, y, key, shard)

    def evaluate(self, x: Array, y: Array, key: int) -> Vector:
        return self.program(False, [self.parameters, *self.state], x, y, key, 0)

    def assign(self, parameters: Vector) -> None:
        if parameters is not self.parameters:  # an update in place
            self.parameters[:] = parameters

    def advance(self, total: Vector, examples: int) -> None:
        start = len(self.parameters)
        for vector in self.state:
            mean = total[start : start + len(vector)] / examples
            start += len(vector)
            # a counter changes alike in every shard, so the mean is the change
            vector += (mean if is_real(vector) else np.round(mean)).astype(vector.dtype)

    def fingerprint(self) -> Vector:
        vectors = [self.parameters, *self.state]
        if not self._print.is_of(vectors):
            self._print = bits.Print(vectors)
        return self._print()

    def vectors(self) -> list[Vector]:
        return [self.parameters, *filter(is_real, self.state)]

    def tensors(self, vectors: Sequence[Vector] | None = None) -> Tensors:
        parameters, *reals = self.vectors() if vectors is None else vectors
        rest = iter(reals)
        state = [next(rest) if is_real(vector) else vector for vector in self.state]
        return self.layouts[0].views([parameters]) | self.layouts[1].views(state)

    def vectors_from(self, tensors: Tensors) -> list[Vector]:
        return [self.flat(tensors), *filter(is_real, self._flattened(self.layouts[1], tensors))]

    def load(self, tensors: Tensors) -> None:
        self.parameters, self.state = self.flat(tensors), self._flattened(self.layouts[1], tensors)

    def named(self, vector: Vector) -> Tensors:
        return self.layouts[0].views([vector])

    def flat(self, named: Tensors) -> Vector:
        return self._flattened(self.layouts[0], named)[0]

    def _flattened(self, layout: Layout, tensors: Tensors) -> list[Vector]:
        return layout.flatten([tensors[name] for name in layout.names])

    def model(self, vectors: Sequence[Vector] | None = None) -> Any:
        twin, tensors = self.program.form.copied(self.program.example), self.tensors(vectors)
        form = form_of(twin)
        for name, variable in (form.trained | form.state).items():
            variable.assign(tensors[name])
        return twin

    def release(self) -> None:
        self.program.release()


def is_real(vector: Vector) -> bool:
    return vector.dtype.kind == "f"
