"""The compiled functions of a model, which all its replicas share: a shard's gradient as one flat vector, and evaluation."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from samestep import draws
from samestep.backends.base import Backend
from samestep.backends.layout import INSTEAD, Layout, Numbers, by_type
from samestep.backends.losses import check_weights
from samestep.backends.tensorflow.adapters import Tensor, Variables, adapter_of
from samestep.backends.tensorflow.graph import Compiled, Piece, compiled
from samestep.errors import WrongType


class Program:
    def __init__(self, backend: Backend, model: Any, loss: Any, shards: int, threads: int) -> None:
        self.backend, self.loss, self.shards, self.threads = backend, loss, shards, threads
        self.adapter = own = adapter_of(model)
        self.dtype = check_weights(backend.describe(model), (variable.dtype.name for variable in own.trained.values()))
        self.layouts = [*layouts_of(own.trained), *layouts_of(own.state)]
        self._trained, *self._state = [[own.variables[name] for name in layout.names] for layout in self.layouts]
        self._functions: dict[tuple[Any, ...], Compiled] = {}
        self._by_size: set[bool] = set()  # train: whether every number of examples needs a graph of its own
        self._making = threading.Lock()
        self.updates: dict[int, Compiled] = {}  # of Keras's optimizers, by id: all replicas share them
        self.example: Numbers | None = None

    def __call__(
        self, train: bool, vectors: Sequence[Numbers], x: Numbers, y: Numbers, key: int, shard: int
    ) -> Numbers:
        with self._making:
            function = self._function(train, x, y)
        (result,) = function(*vectors, draws.halves(key), x, y, np.int32(shard))
        return result

    def _function(self, train: bool, x: Numbers, y: Numbers) -> Compiled:
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

    def _compiled(self, train: bool, x: Numbers, y: Numbers, examples: int | None) -> Compiled:
        """One graph for any number of examples if `examples` is None. Kernels see the shard's own shape in either case."""
        vectors = [tf.TensorSpec((layout.size,), layout.dtype) for layout in self.layouts]
        pieces = [Piece(variable, i, lo, hi) for i, group in enumerate([self._trained, *self._state])
                  for variable, (lo, hi) in zip(group, self.layouts[i].spans, strict=True)]  # fmt: skip
        return compiled(self.traced(train, x, y, examples), vectors, pieces, self.threads)

    def traced(self, train: bool, x: Numbers, y: Numbers, examples: int | None) -> Any:
        specs = [tf.TensorSpec((examples, *array.shape[1:]), array.dtype) for array in (x, y)]
        function = tf.function(self.gradient if train else self.evaluate, autograph=False)
        return function.get_concrete_function(*specs, tf.TensorSpec((), tf.int32))

    def release(self) -> None:
        """Let go of the graphs and their threads; they are made again when they are needed."""
        self._functions.clear()
        self.updates.clear()

    # What is traced

    def gradient(self, x: Tensor, y: Tensor, shard: Tensor) -> Tensor:
        groups = zip(self._state, self.layouts[1:], strict=True)
        state = [(variable, layout.wide(self.dtype)) for group, layout in groups for variable in group]
        before = [tf.cast(variable.read_value(), wide) for variable, wide in state]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            for variable in self._trained:
                tape.watch(variable)
            loss, right = self._numbers(x, y, True)
        gradients = tape.gradient(loss, self._trained, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        count, mine = tf.cast(tf.shape(y)[0], self.dtype), tf.range(self.shards) == shard
        vector = [tf.reshape(tf.convert_to_tensor(gradient), (-1,)) for gradient in gradients]
        for (variable, wide), start in zip(state, before, strict=True):
            change = tf.cast(tf.cast(variable.read_value(), wide) - start, self.dtype) * count
            vector.append(tf.reshape(change, (-1,)))
        slots = [tf.where(mine, tf.cast(number, self.dtype), 0) for number in (loss, right)]
        return tf.concat([*vector, *slots], 0)

    def evaluate(self, x: Tensor, y: Tensor, shard: Tensor) -> Tensor:
        return tf.stack([tf.cast(number, tf.float64) for number in self._numbers(x, y, False)])

    def _numbers(self, x: Tensor, y: Tensor, train: bool) -> tuple[Tensor, Tensor]:
        """The loss and the hits of these examples, summed."""
        output, own = self.adapter(x, train)
        loss = self.backend.sum_of_losses(self.loss, output, y)
        for each in own:
            loss += tf.cast(each, loss.dtype) * self.backend.count(y, loss)
        return loss, self.backend.hits(output, y)


def layouts_of(variables: Variables) -> tuple[Layout, ...]:
    """One for each type of number."""
    kinds = [variable.dtype for variable in variables.values()]
    for name, kind in zip(variables, kinds, strict=True):
        if not (kind.is_floating or kind.is_integer or kind.is_bool):
            raise WrongType(f"{name} is of type {kind.name}: {INSTEAD}")
    shapes = [tuple(variable.shape) for variable in variables.values()]
    return by_type(list(variables), shapes, [(kind.name, kind.is_floating) for kind in kinds])[1]
