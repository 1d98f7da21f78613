"""An optimizer of Keras on a replica: its update is compiled like a gradient, and its state is NumPy arrays."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from samestep import draws
from samestep.backends.layout import Numbers, Tensors
from samestep.backends.tensorflow.graph import Compiled, Piece, compiled
from samestep.backends.tensorflow.replica import TensorflowReplica
from samestep.backends.updaters import Clip, NativeUpdater
from samestep.errors import Invalid, WrongType
from samestep.fingerprint import of_weights


class TensorflowUpdater(NativeUpdater):
    """An optimizer of Keras, or a function that makes one from variables, at work on one replica.

    Its learning_rate is set to schedule(t); schedule=None keeps the one that it came with. If that is a LearningRateSchedule,
    the rate is inside it: it is used as it is, and another schedule is an error.
    """

    def __init__(self, given: Any, replica: TensorflowReplica, clip: Clip) -> None:
        super().__init__(replica, clip)
        self._variables = [keras.Variable(array, name=name.replace("/", "."))
                           for name, array in replica.named(replica.parameters).items()]  # fmt: skip
        for name, constraint in replica.program.adapter.constraints.items():
            self._variables[replica.layouts[0].names.index(name)].constraint = constraint
        self.optimizer = made_for(self._variables, given)
        names = [variable.path for variable in self.optimizer.variables]
        self._names = [name.partition("/")[2] for name in names]
        self.state = [np.array(variable.numpy()) for variable in self.optimizer.variables]
        inside = isinstance(self.optimizer.get_config()["learning_rate"], dict)
        self.fixed = "give the optimizer a number for its learning_rate" * inside
        self._rate_index = None if self.fixed else [name.endswith("/learning_rate") for name in names].index(True)
        self._first_rate = 1.0 if self._rate_index is None else float(self.state[self._rate_index])
        self._past = f", state={of_weights(self.tensors())[:16]}" if int(self.state[0]) else ""  # what it came with
        shared = replica.program.updates
        self._update = shared.get(id(given)) or shared.setdefault(id(given), self._compiled())

    def __repr__(self) -> str:
        settings = {name: value for name, value in self.optimizer.get_config().items() if name != "name"}
        return f"keras.optimizers.{type(self.optimizer).__name__}({settings}{self._past})"

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

        flat, before = tf.TensorSpec((layout.size,), layout.dtype), in_python(self.optimizer)
        traced = tf.function(update, autograph=False).get_concrete_function(flat)
        for name in sorted(dict(before ^ in_python(self.optimizer))):
            raise WrongType(f"the optimizer changes {name} in Python, but an update is compiled once: use add_variable")
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
        kinds = "a keras.optimizers.Optimizer, or a function that makes one from variables"
        raise WrongType(f"optimizer must be {kinds}, got {type(given).__name__}")
    if isinstance(made, keras.optimizers.LossScaleOptimizer):
        raise WrongType("LossScaleOptimizer wants the loss scaled, which the Trainer does not: use the one inside it")
    if made.use_ema and not made.ema_overwrite_frequency:  # Keras's own fit puts the average into the model at its end
        raise WrongType(
            "use_ema without ema_overwrite_frequency has no effect here: pass average=samestep.ema(...) instead"
        )
    optimizer = type(made).from_config(made.get_config()) if made is given else made
    optimizer.build(variables)
    for name in sorted(dict(in_python(made) - in_python(optimizer))):
        raise Invalid(f"get_config() of the optimizer leaves out {name}: pass a function that makes it from variables")
    if made is given and made.built:  # momenta that it came with
        for mine, theirs in zip(optimizer.variables, made.variables, strict=True):
            mine.assign(theirs)
    return optimizer


def in_python(optimizer: Any) -> set[tuple[str, str]]:
    """What an optimizer keeps in Python, not in variables, as text; but for what all of Keras's have, and caches."""
    own = {name: repr(vars(optimizer)[name]) for name in vars(optimizer).keys() - vars(keras.optimizers.Optimizer(1.0))}
    return {(name, text) for name, text in own.items() if "<" not in text and "_cache" not in name}
