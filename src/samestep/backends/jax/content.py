"""What stands for JAX's objects in the recipe (samestep/content.py): modules with their settings, arrays as numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax import nnx

from samestep.backends.layout import path_name
from samestep.backends.pair import Pair
from samestep.content import Model, divided

NNX = getattr(nnx, "Pytree", nnx.Module)  # also streams of noise
Jitted = type(jax.jit(lambda: None))
HIDDEN = {"deterministic", "use_running_average"}  # training and evaluation set these


def content(thing: Any, weights: bool) -> Any:
    if isinstance(thing, Pair):
        init = thing.params if callable(thing.params) else _leaves(thing.params, weights)
        return Model(Pair, [thing.apply, init, _leaves(thing.state, weights)])
    if isinstance(thing, nn.Module):
        module = thing if thing.scope is None else thing.unbind()[0]  # one bound to its variables is the same module
        own = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.name != "parent"}
        return Model(type(thing), *divided(own, (nn.Module, NNX)))
    if isinstance(thing, NNX):
        books = ("_object__", "_pytree__")  # which nnx keeps
        own = {name: one for name, one in vars(thing).items() if not (name in HIDDEN or name.startswith(books))}
        return Model(type(thing), *divided(own, (nn.Module, NNX)))
    if isinstance(thing, nnx.Variable):  # also of noise: the keys of a run decide it, not where a stream begins
        return [type(thing), thing.get_metadata(), _leaves(thing.get_value(), weights)]
    if isinstance(thing, jax.Array) and not isinstance(thing, jax.core.Tracer) and not thing.is_deleted():
        return _told(thing, True)
    if isinstance(thing, Jitted):
        return ["jit", thing.__wrapped__]
    if isinstance(thing, jax.tree_util.PyTreeDef):
        return str(thing)
    if isinstance(thing, jax.Device):
        return f"device {thing.platform}"  # processes of one run have different ones
    return None


def _leaves(tree: Any, values: bool) -> Any:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(path_name(path), _told(leaf, values)) for path, leaf in leaves]


def _told(leaf: Any, values: bool) -> Any:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return ["key", str(leaf.dtype), list(leaf.shape), jax.random.key_data(leaf) if values else None]
    array = np.asarray(leaf)
    about = [str(array.dtype), list(array.shape), bool(getattr(leaf, "weak_type", False))]
    return [*about, array.reshape(-1).view(np.uint8)] if values else about
