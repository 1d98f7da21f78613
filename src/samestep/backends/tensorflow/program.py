"""The compiled functions of a model, which all its replicas share: a shard's gradient as one flat vector, and evaluation."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from samestep import draws
from samestep.backends.base import Backend
from samestep.backends.calling import spread
from samestep.backends.layout import INSTEAD, Layout, Numbers, by_type
from samestep.backends.losses import SUM, WEIGHTED, Measure, check_weights
from samestep.backends.pair import Given
from samestep.backends.tensorflow.adapters import Tensor, Variables, adapter_of
from samestep.backends.tensorflow.graph import Compiled, Piece, compiled
from samestep.errors import Invalid, WrongType
from samestep.trees import Tree, filled, first, leaves, length, mapped


class Program:
    def __init__(self, backend: Backend, model: Any, measure: Any, shards: int, threads: int) -> None:
        self.backend, self.measure, self.shards, self.threads = backend, Measure.of(measure), shards, threads
        self.adapter = own = adapter_of(model)
        self.dtype = check_weights(backend.describe(model), (variable.dtype.name for variable in own.trained.values()))
        self.layouts = [*layouts_of(own.trained), *layouts_of(own.state)]
        self._trained, *self._state = [[own.variables[name] for name in layout.names] for layout in self.layouts]
        self._functions: dict[tuple[Any, ...], Compiled] = {}
        self._by_size: set[str] = set()  # kinds: those for which every number of examples needs a graph of its own
        self._making = threading.Lock()
        self.updates: dict[int, Compiled] = {}  # of Keras's optimizers, by id: all replicas share them
        self.example: Given | None = None

    def __call__(self, kind: str, vectors: Sequence[Numbers], x: Tree, y: Tree, key: int, shard: int) -> Numbers:
        """What a kind of function ("gradient", "slope" or "evaluate") gives for a shard."""
        with self._making:
            function = self._function(kind, x, y)
        (result,) = function(*vectors, draws.halves(key), *leaves((x, y)), np.int32(shard))
        return result

    def _function(self, kind: str, x: Tree, y: Tree) -> Compiled:
        key: tuple[Any, ...] = (kind, *((array.shape[1:], array.dtype) for array in leaves((x, y))))
        if key not in self._functions and kind not in self._by_size:
            try:
                self._functions[key] = self._compiled(kind, x, y, None)
            except Exception:  # some models must know how many examples there are; other errors come up again
                self._by_size.add(kind)
        if kind in self._by_size:
            key = *key, length(y)
            if key not in self._functions:
                self._functions[key] = self._compiled(kind, x, y, length(y))
        return self._functions[key]

    def _compiled(self, kind: str, x: Tree, y: Tree, examples: int | None) -> Compiled:
        """One graph for any number of examples if `examples` is None. Kernels see the shard's own shape in either case."""
        self.example = spread(mapped(lambda array: array[:1], x), self.measure.style)
        vectors = [tf.TensorSpec((layout.size,), layout.dtype) for layout in self.layouts]
        pieces = [Piece(variable, i, lo, hi) for i, group in enumerate([self._trained, *self._state])
                  for variable, (lo, hi) in zip(group, self.layouts[i].spans, strict=True)]  # fmt: skip
        return compiled(self.traced(kind, x, y, examples), vectors, pieces, self.threads)

    def traced(self, kind: str, x: Tree, y: Tree, examples: int | None) -> Any:
        specs = [tf.TensorSpec((examples, *array.shape[1:]), array.dtype) for array in leaves((x, y))]
        compute = getattr(self, kind)

        def function(*arrays: Tensor) -> Tensor:
            *given, shard = arrays
            here, labels = filled((x, y), given)
            return compute(here, labels, shard)

        return tf.function(function, autograph=False).get_concrete_function(*specs, tf.TensorSpec((), tf.int32))

    def release(self) -> None:
        """Let go of the graphs and their threads; they are made again when they are needed."""
        self._functions.clear()
        self.updates.clear()

    # What is traced

    def gradient(self, x: Tree, y: Tree, shard: Tensor, train: bool = True) -> Tensor:
        groups = zip(self._state, self.layouts[1:], strict=True)
        state = [(variable, layout.wide(self.dtype)) for group, layout in groups for variable in group]
        before = [tf.cast(variable.read_value(), wide) for variable, wide in state]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            for variable in self._trained:
                tape.watch(variable)
            loss, right, *more = self._numbers(x, y, train)
        gradients = tape.gradient(loss, self._trained, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        count, mine = tf.cast(tf.shape(first(y))[0], self.dtype), tf.range(self.shards) == shard
        vector = [tf.reshape(tf.convert_to_tensor(gradient), (-1,)) for gradient in gradients]
        for (variable, wide), start in zip(state, before, strict=True):
            change = tf.cast(tf.cast(variable.read_value(), wide) - start, self.dtype) * count
            vector.append(tf.reshape(change, (-1,)))
        slots = [tf.where(mine, tf.cast(number, self.dtype), 0) for number in (loss, right)]
        return tf.concat([*vector, *slots, *(tf.reshape(tf.cast(number, self.dtype), (1,)) for number in more)], 0)

    def slope(self, x: Tree, y: Tree, shard: Tensor) -> Tensor:
        return self.gradient(x, y, shard, train=False)

    def evaluate(self, x: Tree, y: Tree, shard: Tensor) -> Tensor:
        return tf.stack([tf.cast(number, tf.float64) for number in self._numbers(x, y, False)])

    def _numbers(self, x: Tree, y: Tree, train: bool) -> list[Tensor]:
        """Loss, hits and what else is measured of these examples, summed."""
        output, own = self.adapter(spread(x, self.measure.style), train)
        loss, hits, *more = self.backend.measured(self.measure, output, y)
        if own and self.measure.kind == SUM:
            raise Invalid("a loss that is a sum, beside losses of layers themselves (regularizers): use a mean")
        for each in own:  # over whatever the loss is over
            over = more[0] if self.measure.kind == WEIGHTED else self.backend.count(y, loss)
            loss += tf.cast(tf.cast(each, over.dtype) * over, loss.dtype)
        return [loss, hits, *more]


def layouts_of(variables: Variables) -> tuple[Layout, ...]:
    """One for each type of number."""
    kinds = [variable.dtype for variable in variables.values()]
    for name, kind in zip(variables, kinds, strict=True):
        if not (kind.is_floating or kind.is_integer or kind.is_bool):
            raise WrongType(f"{name} is of type {kind.name}: {INSTEAD}")
    shapes = [tuple(variable.shape) for variable in variables.values()]
    return by_type(list(variables), shapes, [(kind.name, kind.is_floating) for kind in kinds])[1]
