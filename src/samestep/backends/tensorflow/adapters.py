"""Brings a user's model into one form: its variables by name, and a call. It may be a Keras model or a tf.Module."""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from samestep.backends.calling import Style, style_of
from samestep.backends.layout import Tensors
from samestep.backends.names import anew, unnumbered
from samestep.backends.pair import Given
from samestep.errors import Invalid, WrongType, told
from samestep.trees import Tree

Tensor = Any
Variables = dict[str, tf.Variable]


class Adapter(ABC):
    """A user's model."""

    model: Any
    trained: Variables
    state: Variables  # what forward passes may change
    constraints: dict[str, Any]  # of trained variables: functions that an optimizer of Keras applies after an update

    @property
    def variables(self) -> Variables:
        return self.trained | self.state

    def values(self) -> Tensors:
        """A copy of the value of every variable."""
        return {name: np.array(variable.numpy()) for name, variable in self.variables.items()}

    @abstractmethod
    def __call__(self, given: Given, train: bool) -> tuple[Any, list[Tensor]]:
        """The output, and losses of the layers themselves, such as weight decay: each counts once for a whole batch."""

    @abstractmethod
    def copied(self, example: Given | None) -> Any:
        """Another model of this kind; the values of its weights are still to be set."""


class KerasAdapter(Adapter):
    """A Keras model, or layer."""

    def __init__(self, model: keras.Layer) -> None:
        self.model = model
        trained = {id(variable) for variable in model.trainable_variables}
        named = list(zip(keras_names(model), model.weights, strict=True))
        self.trained = {name: v.value for name, v in named if id(v) in trained}
        self.state = {name: v.value for name, v in named if id(v) not in trained}
        self.constraints = {name: v.constraint for name, v in named if id(v) in trained and v.constraint}

    def __call__(self, given: Given, train: bool) -> tuple[Any, list[Tensor]]:
        x, named = self._passed(given)
        output = self.model(*x, **named, training=train)
        losses = list(self.model.losses)
        self.model._clear_losses()  # they belong to the graph being traced, and are of no use outside it
        return output, losses

    def _passed(self, given: Given) -> Given:
        """A functional model takes inputs by name in one dictionary."""
        x, named = given
        return ([named], {}) if named and is_functional(self.model) else (x, named)

    def copied(self, example: Given | None) -> Any:
        try:
            twin = self._made_again()
            if not twin.built and example is None:
                twin.build_from_config(self.model.get_build_config())
            elif not twin.built and example:
                x, named = example
                twin(*x, **named)
            if [w.shape for w in twin.weights] != [w.shape for w in self.model.weights]:
                raise Invalid("it then has other weights")
            if {id(v) for v in twin.variables} & {id(v) for v in self.model.variables}:
                raise Invalid("it then shares weights with the first")
        except Exception as error:
            raise Invalid(
                f"the model {type(self.model).__name__} cannot be copied: give it get_config(), as Keras asks of models that "
                f"are saved ({told(error)})"
            ) from None
        for layer, own in zip(self.model._flatten_layers(), twin._flatten_layers(), strict=True):
            own.trainable = layer.trainable
        return twin

    def _made_again(self) -> Any:
        if is_functional(self.model):
            return keras.models.clone_model(self.model)
        config, words = self.model.get_config(), inspect.signature(type(self.model)).parameters
        if all(word.kind is not word.VAR_KEYWORD for word in words.values()):
            # Keras's own entries, such as `dtype` and `trainable`, are arguments that many classes do not take.
            config = {word: value for word, value in config.items() if word in words}
        return type(self.model).from_config(config)


class ModuleAdapter(Adapter):
    """A tf.Module that can be called. Keras layers among its attributes are part of it."""

    def __init__(self, model: tf.Module) -> None:
        self.model = model
        if not callable(model):
            raise WrongType(f"a tf.Module must have __call__(x) to be trained, and {type(model).__name__} has none")
        self.trained, self.state, self.constraints = {}, {}, {}
        for path, leaf in model._flatten(
            predicate=lambda one: isinstance(one, (tf.Variable, keras.Layer)), with_path=True
        ):
            name = ".".join(map(str, path))
            if isinstance(leaf, keras.Layer):
                inner = KerasAdapter(leaf)
                for kind in ("trained", "state", "constraints"):
                    vars(self)[kind] |= {f"{name}.{within}": one for within, one in vars(inner)[kind].items()}
            else:
                (self.trained if leaf.trainable else self.state)[name] = leaf
        function = type(model).__call__
        function = getattr(function, "python_function", function)  # a tf.function is traced anew anyway
        self._words = {"training", "train", "is_training"} & inspect.signature(function).parameters.keys()
        try:
            self._function = tf.autograph.to_graph(function)  # for conditions and loops over tensors
        except Exception:  # there is no source to read, as in an interactive session
            self._function = function

    def __call__(self, given: Given, train: bool) -> tuple[Any, list[Tensor]]:
        x, named = given
        return self._function(self.model, *x, **named, **dict.fromkeys(self._words, train)), []

    def copied(self, example: Given | None) -> Any:
        return copy.deepcopy(self.model)


def is_functional(model: Any) -> bool:
    """Whether a model was made from layers alone: its class says nothing about its inputs."""
    return isinstance(model, keras.Sequential) or hasattr(model, "operations")


def style(model: Any, x: Tree, whole: bool) -> Style:
    """How a model takes x. A functional one takes what it has inputs for."""
    if not isinstance(model, keras.Layer):
        return style_of(getattr(call := type(model).__call__, "python_function", call), x, whole, skip=1)
    if not is_functional(model):
        return style_of(model.call, x, whole)
    inputs = {tensor.name for tensor in getattr(model, "inputs", None) or []}
    known = tuple(key for key in x if key in inputs) if isinstance(x, Mapping) else ()
    if isinstance(x, Mapping) and (len(known) < len(inputs) or not (whole or len(known) == len(x))):
        raise Invalid(f"the model has inputs called {', '.join(sorted(inputs))}, got {', '.join(map(str, x))}")
    return known or False


def adapter_of(model: Any) -> Adapter:
    return KerasAdapter(model) if isinstance(model, keras.Layer) else ModuleAdapter(model)


def keras_names(model: keras.Layer) -> list[str]:
    """A name for each of the model's weights: its path, without the model's own name and without Keras's numbers."""
    layers = {(name := layer.name): unnumbered(name, type(layer).__name__) for layer in model._flatten_layers()}
    return anew([weight.path for weight in model.weights], layers, model.name)
