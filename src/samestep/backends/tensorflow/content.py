"""What stands for the objects of Keras and TensorFlow in the recipe (samestep/content.py): no names that Keras made up."""

from __future__ import annotations

import functools
import types
from typing import Any

import keras
import tensorflow as tf

from samestep.backends.names import unnumbered
from samestep.content import Model

# Of what a Keras layer has from its base classes, the settings; and what calls and Keras's own fit leave in a model.
KEPT = {"_trainable", "_dtype_policy", "activity_regularizer", "autocast", "_supports_masking", "_convert_input_args"}
LEFT = {"optimizer", "history", "_eval_epoch_iterator", "_build_input_shape"}
BESIDES = "_self_", "_compile", "stop_"  # how such names begin
# Their values are weights already, or come from the recipe's seed; metrics train nothing.
BY_KIND = keras.Initializer, keras.random.SeedGenerator, tf.random.Generator, keras.Metric
PARTS = keras.Operation, tf.Module  # a Keras layer is an operation


def content(thing: Any, weights: bool) -> Any:
    if isinstance(thing, (keras.Variable, tf.Variable)):
        about = [thing.dtype, list(thing.shape), thing.trainable, getattr(thing, "regularizer", None)]
        return [*about, thing.numpy()] if weights else about
    if isinstance(thing, tf.Tensor):
        return thing.numpy() if hasattr(thing, "numpy") else [thing.dtype, str(thing.shape)]  # one of a graph
    if isinstance(thing, BY_KIND):
        return type(thing)
    if isinstance(thing, (*PARTS, keras.Loss)):
        return model(thing)
    if isinstance(thing, keras.Optimizer):  # its configuration would not tell the code of a user's schedule
        rate = thing._learning_rate if callable(thing._learning_rate) else float(thing.learning_rate)
        return [type(thing), thing.get_config() | {"name": None, "learning_rate": rate}]
    if isinstance(thing, keras.optimizers.schedules.LearningRateSchedule):
        return [type(thing), vars(thing) | {"name": None}]
    if isinstance(thing, tf.types.experimental.PolymorphicFunction):
        return ["tf.function", thing.python_function, thing._jit_compile, thing._autograph]
    if isinstance(thing, types.FunctionType) and hasattr(thing, "_tf_decorator"):  # most functions of TensorFlow
        return [thing._tf_decorator.decorator_name, thing._tf_decorator.decorated_target]
    if isinstance(thing, (list, tuple, dict, set)) and type(thing).__module__.startswith(("keras.", "tensorflow.")):
        return next(kind(thing) for kind in (list, tuple, dict, set) if isinstance(thing, kind))  # watched by a model
    return None


def model(thing: Any) -> Model:
    """A model or a layer. What lies below it is named after the attribute that holds it, or has its own name."""
    if isinstance(thing, keras.layers.InputLayer):
        return Model(type(thing), [list(thing.batch_shape[1:]), thing.dtype])
    below: dict[str, Any] = {}
    state = {name: apart(value, name, below) for name, value in vars(thing).items()
             if not (name in bookkeeping() or name.startswith(BESIDES))}  # fmt: skip
    held, operations = {id(layer) for layer in below.values()}, getattr(thing, "operations", [])
    for layer in operations or getattr(thing, "_layers", []):
        if id(layer) not in held:
            name = unnumbered(layer.name, type(layer).__name__)
            names = (f"{name}_{n}".removesuffix("_0") for n in range(len(below) + 1))
            below[next(name for name in names if name not in below)] = layer
    return Model(type(thing), [state, graph(thing) if operations else None], below)


def apart(value: Any, path: str, below: dict[str, Any]) -> Any:
    """An attribute without the layers in it, which go below."""
    if isinstance(value, PARTS):
        below[path] = value
        return path
    if isinstance(value, (list, tuple)):
        return [apart(one, f"{path}.{i}", below) for i, one in enumerate(value)]
    return {key: apart(one, f"{path}.{key}", below) for key, one in value.items()} if isinstance(value, dict) else value


def graph(functional: Any) -> Any:
    """How the layers of a functional model are connected. They may have been called outside of it, too."""
    calls = [(number, node) for number, layer in enumerate(functional.operations)
             for i, node in enumerate(layer._inbound_nodes) if f"{id(layer)}_ib-{i}" in functional._nodes]  # fmt: skip
    places = {id(tensor): [i, j] for i, (_, node) in enumerate(calls) for j, tensor in enumerate(node.outputs)}
    inputs = [(number, node.arguments.args, node.arguments.kwargs) for number, node in calls]
    parts = [inputs, functional.inputs, functional.outputs]
    return keras.tree.map_structure(lambda one: places.get(id(one), one), parts)


@functools.cache
def bookkeeping() -> set[str]:
    """The attributes of every layer, model or module, but for the settings among them."""
    x = keras.Input((1,), name="x")
    bare = keras.Layer(name="a"), keras.Sequential([x], name="b"), keras.Model(x, x, name="c"), tf.Module(name="d")
    return {name for one in bare for name in vars(one)} - KEPT | LEFT
