"""What a JAX model can come as (a Pair, a flax module of linen or nnx), brought into one form: an `Adapter`."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from samestep.backends.by_id import ById
from samestep.backends.pair import Given, Pair, call, told
from samestep.errors import NotBuilt

Key = Any


class Adapter(ABC):
    """A model as a pure function of its parameters and its state. It can be hashed, so programs are found by it."""

    @abstractmethod
    def __call__(self, params: Any, state: Any, given: Given, key: Key, train: bool) -> tuple[Any, Any]:
        """(output, state)."""

    @abstractmethod
    def model(self, params: Any, state: Any) -> Any:
        """The user's model again, with these values."""


@dataclass(frozen=True)
class PairAdapter(Adapter):
    function: Any

    def __call__(self, params: Any, state: Any, given: Given, key: Key, train: bool) -> tuple[Any, Any]:
        return call(self.function, params, state, given, key, train)

    def model(self, params: Any, state: Any) -> Pair:
        return Pair(self.function, params, state)


@dataclass(frozen=True)
class LinenAdapter(Adapter):
    """For a flax.linen.Module: the collection `params` is trained, the others are its state."""

    module: nn.Module

    def __hash__(self) -> int:
        try:
            return hash(self.module)
        except TypeError:  # a field of it cannot be hashed
            return id(self.module)

    def options(self, train: bool) -> dict[str, bool]:
        return told(type(self.module).__call__, train)

    def __call__(self, params: Any, state: Any, given: Given, key: Key, train: bool) -> tuple[Any, Any]:
        (x, named), variables, rngs = given, {"params": params, **state}, streams(key)
        named = {**named, **self.options(train)}
        if not (train and state):
            return self.module.apply(variables, *x, rngs=rngs, **named), state
        output, new = self.module.apply(variables, *x, rngs=rngs, mutable=list(state), **named)
        return output, {name: new.get(name, state[name]) for name in state}

    def model(self, params: Any, state: Any) -> nn.Module:
        return self.module.bind({"params": params, **state})


@functools.partial(jax.jit, static_argnums=0)
def drawn(adapter: LinenAdapter, given: Given) -> Any:
    """New variables, from seed 0. Compiled once for a module: its next fit finds this."""
    x, named = given
    return adapter.module.init(streams(jax.random.key(0)), *x, **named, **adapter.options(False))


def streams(key: Key) -> dict[str, Key]:
    """linen draws from the stream `params` whatever has no stream of its own."""
    return {"dropout": key, "params": jax.random.fold_in(key, 1)}


@dataclass(frozen=True)
class NnxAdapter(Adapter):
    """For a flax.nnx.Module: its nnx.Param are trained; its random streams start anew from every shard's key."""

    graph: Any
    streams: Any = field(compare=False)  # the user's own, to be given back

    def __call__(self, params: Any, state: Any, given: Given, key: Key, train: bool) -> tuple[Any, Any]:
        leaves, structure = jax.tree.flatten(self.streams)
        fresh = []
        for i, leaf in enumerate(leaves):
            own, counts = jax.random.fold_in(key, i), not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            # A leaf that is no key counts what was drawn.
            fresh.append(jnp.zeros_like(leaf) if counts else jax.random.split(own, leaf.shape) if leaf.shape else own)
        module = nnx.merge(self.graph, params, jax.tree.unflatten(structure, fresh), state, copy=True)
        module.train() if train else module.eval()
        x, named = given
        output = module(*x, **named)
        return output, nnx.split(module, nnx.Param, nnx.RngState, ...)[3]

    def model(self, params: Any, state: Any) -> nnx.Module:
        return nnx.merge(self.graph, params, self.streams, state, copy=True)


def adapt(model: Any, made: dict[int, tuple[Any, Any]]) -> tuple[Adapter, Any, Any]:
    """(adapter, params, state) of a model; `made` has the variables that a probe made, by the model's id."""
    if isinstance(model, Pair):
        params = made[id(model)][1] if id(model) in made else model.params
        if callable(params):
            raise NotBuilt("the parameters of this Pair are not made yet: pass Pair(apply, init(key, x))")
        return PairAdapter(ById.wrap(model.apply)), params, model.state
    if isinstance(model, nnx.Module):
        graph, params, streams, state = nnx.split(model, nnx.Param, nnx.RngState, ...)
        return NnxAdapter(graph, streams), params, state
    if model.scope is not None:
        module, variables = model.unbind()
    elif id(model) in made:
        module, variables = model, made[id(model)][1]
    else:
        raise NotBuilt("this flax module has no variables yet: pass model.bind(model.init(key, x))")
    state = dict(variables)
    return LinenAdapter(module), state.pop("params", {}), state
