"""What stands for Paddle's objects in the recipe (samestep/content.py): layers with their settings, tensors as numbers."""

from __future__ import annotations

import types
from typing import Any

import paddle
from paddle.base import core
from paddle.base.framework import EagerParamBase
from paddle.jit.dy2static.program_translator import StaticFunction

from samestep.content import Model

# Attributes with tensors, layers and state, which are told in their own way; with names that count what a process has made;
# with what Paddle notes for itself. Of layers, of parameters, of optimizers, of schedulers.
HIDDEN = {
    "_parameters", "_buffers", "_sub_layers", "_full_name", "_helper", "_op_recorder", "_loaddict_holder", "_built",
    "_original_funcs", "_init_func", "_init_op_creator", "_parameter_list", "_param_groups", "_accumulators",
    "_accumulators_holder", "_learning_rate_map", "helper", "_opti_name_list", "_param_device_map", "_params_name",
    "_already_create_accumulator", "_auxiliary_vars", "_master_weights", "_master_grads", "fusion_storage",
    "merged_model_params", "_var_name",
}  # fmt: skip


def content(thing: Any, weights: bool) -> Any:
    if isinstance(thing, paddle.nn.Layer):
        return _layer(thing, weights)
    if isinstance(thing, StaticFunction):  # compiling changes no meaning
        return thing._dygraph_function
    if isinstance(thing, paddle.Tensor):
        return _told(thing, weights or not isinstance(thing, EagerParamBase))
    if isinstance(thing, paddle.optimizer.Optimizer):
        groups = [{**group, "params": [_told(p, False) for p in group["params"]]} if isinstance(group, dict)
                  else _told(group, False) for group in thing._param_groups or []]  # fmt: skip
        return [type(thing), _settings(thing), groups]
    if isinstance(thing, paddle.optimizer.lr.LRScheduler):
        return [type(thing), _settings(thing)]
    return str(thing) if isinstance(thing, (paddle.dtype, core.Place, core.CPUPlace)) else None


def _layer(layer: Any, weights: bool) -> Model:
    own = [(name, _told(p, weights)) for name, p in layer._parameters.items()]
    for name, buffer in layer._buffers.items():
        # One that is not saved counts, unless it is computed from weights, as by weight_norm, or by a kernel, as in LSTM.
        unsaved = name in layer._non_persistable_buffer_names_set and name != "_dropout_state"
        own.append((name, _told(buffer, weights or (unsaved and buffer is not None and buffer.stop_gradient))))
    return Model(type(layer), [_settings(layer), own], dict(layer._sub_layers))


def _settings(thing: Any) -> dict[str, Any]:
    """The other attributes; of its own methods only the function, and of hooks not the keys, which count those of a process."""
    found = {}
    for name, value in vars(thing).items():
        if name in HIDDEN or (name == "forward" and isinstance(value, StaticFunction)):  # as to_static(layer) makes it
            continue
        if isinstance(value, types.MethodType) and value.__self__ is thing:
            value = value.__func__
        found[name] = list(value.values()) if "hooks" in name and isinstance(value, dict) else value
    return found


def _told(tensor: Any, values: bool) -> Any:
    if tensor is None:
        return None
    about = [str(tensor.dtype), list(tensor.shape), tensor.stop_gradient]
    if isinstance(tensor, EagerParamBase):  # its own rate and decay, whether it is clipped
        about.append(_settings(tensor))
    return [*about, tensor.detach().numpy()] if values and tensor._is_initialized() and tensor.is_dense() else about
