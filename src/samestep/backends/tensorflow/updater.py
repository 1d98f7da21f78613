"""An optimizer of Keras on a replica: its update is compiled like a gradient, and its state is NumPy arrays."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from samestep import draws
from samestep.backends.base import NativeUpdater
from samestep.backends.layout import Numbers, Tensors
from samestep.backends.tensorflow.graph import Compiled, Piece, compiled
from samestep.backends.tensorflow.replica import TensorflowReplica
from samestep.errors import Invalid, WrongType
from samestep.fingerprint import of_weights


class TensorflowUpdater(NativeUpdater):
    """An optimizer of Keras, or a function that makes one from variables, at work on one replica.

    Its learning_rate is set to schedule(t); schedule=None keeps the one that it came with. If that is a LearningRateSchedule,
    the rate is inside it: it is used as it is, and another schedule is an error.
    """

    def __init__(self, given: Any, replica: TensorflowReplica, clip: float) -> None:
        super().__init__(replica, clip)
        self._variables = [keras.Variable(array, name=name.replace("/", "."))
                           for name, array in replica.named(replica.parameters).items()]  # fmt: skip
        self.optimizer = made_for(self._variables, given)
        names = [variable.path for variable in self.optimizer.variables]
        self._names = [name.partition("/")[2] for name in names]
        self.state = [np.array(variable.numpy()) for variable in self.optimizer.variables]
        self.fixed = isinstance(self.optimizer.get_config()["learning_rate"], dict)
        rates = [i for i, name in enumerate(names) if name.endswith("/learning_rate")]
        self._rate_index = None if self.fixed else rates[0]
        self._first_rate = 1.0 if self._rate_index is None else float(self.state[self._rate_index])
        self._began = of_weights(self.tensors())[:16] if int(self.state[0]) else ""  # momenta that it came with
        shared = replica.program.updates
        self._update = shared.get(id(given)) or shared.setdefault(id(given), self._compiled())

    def __repr__(self) -> str:
        settings = {name: value for name, value in self.optimizer.get_config().items() if name != "name"}
        past = f", state={self._began}" if self._began else ""
        return f"keras.optimizers.{type(self.optimizer).__name__}({settings}{past})"

    def rate(self) -> float:
        """The rate that it came with; 1 stands for a rate that is inside it and cannot be seen."""
        return self._first_rate

    def apply(self, gradient: Numbers, lr: float, t: int) -> None:
        if self._rate_index is not None:
            self.state[self._rate_index] = np.asarray(lr, self.state[self._rate_index].dtype)
        flat = [array.reshape(-1) for array in self.state]
        parameters, *new = self._update(self.replica.parameters, *flat, draws.halves(0), gradient)  # they draw nothing
        self.state = [array.reshape(old.shape) for array, old in zip(new, self.state, strict=True)]
        self.replica.assign(parameters)

    def _compiled(self) -> Compiled:
        layout, variables = self.replica.layouts[0], self.optimizer.variables

        def update(gradient: Any) -> list[Any]:
            pieces = tf.split(gradient, [hi - lo for lo, hi in layout.spans])
            gradients = [tf.reshape(piece, shape) for piece, shape in zip(pieces, layout.shapes, strict=True)]
            self.optimizer.apply(gradients, self._variables)
            moved = [tf.reshape(variable.value, (-1,)) for variable in self._variables]
            return [tf.concat(moved, 0), *(tf.reshape(variable.value, (-1,)) for variable in variables)]

        flat = tf.TensorSpec((layout.size,), layout.dtype)
        traced = tf.function(update, autograph=False).get_concrete_function(flat)
        vectors = [flat, *(tf.TensorSpec((array.size,), array.dtype) for array in self.state)]
        weights = [Piece(v.value, 0, lo, hi) for v, (lo, hi) in zip(self._variables, layout.spans, strict=True)]
        slots = [Piece(v.value, i, 0, a.size) for i, (v, a) in enumerate(zip(variables, self.state, strict=True), 1)]
        return compiled(traced, vectors, [*weights, *slots], self.replica.program.threads)

    def tensors(self) -> Tensors:
        return dict(zip(self._names, self.state, strict=True))

    def load(self, tensors: Tensors) -> None:
        self.state = [np.array(tensors[name]) for name in self._names]


def made_for(variables: list[keras.Variable], given: Any) -> keras.optimizers.Optimizer:
    """The user's optimizer, copied or made for these variables."""
    made = given() if isinstance(given, type) else given
    made = made if isinstance(made, keras.optimizers.Optimizer) else made(variables)
    if not isinstance(made, keras.optimizers.Optimizer):
        raise WrongType(
            "optimizer must be a keras.optimizers.Optimizer, or a function that makes one from variables, "
            f"got {type(given).__name__}"
        )
    if isinstance(made, keras.optimizers.LossScaleOptimizer):
        raise WrongType("LossScaleOptimizer wants the loss scaled, which the Trainer does not: use the one inside it")
    if made is given and hasattr(made, "_exclude_from_weight_decay"):
        raise Invalid(
            "the optimizer excludes variables from weight decay, which a replica's copy of it would not: pass a function "
            "that makes the optimizer from variables and excludes those"
        )
    optimizer = type(made).from_config(made.get_config()) if made is given else made
    optimizer.build(variables)
    if made is given and made.built:  # momenta that it came with
        for mine, theirs in zip(optimizer.variables, made.variables, strict=True):
            mine.assign(theirs)
    return optimizer
