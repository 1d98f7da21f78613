"""What a JAX model can come as, brought into one *form*: a pure function (params, state, x, key, train) -> (output, state)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from samestep.errors import Invalid
from samestep.models.jax import Pair, call

Array = Any
Key = Any


@dataclass(frozen=True)
class PairForm:
    """Of a Pair."""

    function: Any

    def __call__(self, params: Any, state: Any, x: Array, key: Key, train: bool) -> tuple[Any, Any]:
        return call(self.function, params, state, x, key, train)

    def model(self, params: Any, state: Any) -> Pair:
        return Pair(self.function, params, state)


@dataclass(frozen=True)
class LinenForm:
    """Of a flax.linen.Module: the collection `params` is trained, the others are its state."""

    module: nn.Module

    def __hash__(self) -> int:
        try:
            return hash(self.module)
        except TypeError:  # a field of it cannot be hashed
            return id(self.module)

    def options(self, train: bool) -> dict[str, bool]:
        """The argument by which the module is told whether it trains, by whichever name it goes there."""
        named = inspect.signature(type(self.module).__call__).parameters
        words = {"train": train, "training": train, "is_training": train,
                 "deterministic": not train, "use_running_average": not train}  # fmt: skip
        return {word: value for word, value in words.items() if word in named}

    def __call__(self, params: Any, state: Any, x: Array, key: Key, train: bool) -> tuple[Any, Any]:
        variables, rngs = {"params": params, **state}, streams(key)
        if not (train and state):
            return self.module.apply(variables, x, rngs=rngs, **self.options(train)), state
        output, new = self.module.apply(variables, x, rngs=rngs, mutable=list(state), **self.options(train))
        return output, {name: new.get(name, state[name]) for name in state}

    def init(self, x: Array) -> dict[str, Any]:
        """The variables drawn from seed 0."""
        return dict(drawn(self, x))

    def model(self, params: Any, state: Any) -> nn.Module:
        return self.module.bind({"params": params, **state})


@functools.partial(jax.jit, static_argnums=0)
def drawn(form: LinenForm, x: Array) -> Any:
    """Compiled once for a module: the next fit of it finds this."""
    return form.module.init(streams(jax.random.key(0)), x, **form.options(False))


def streams(key: Key) -> dict[str, Key]:
    """linen draws from the stream `params` whatever has no stream of its own."""
    return {"dropout": key, "params": jax.random.fold_in(key, 1)}


@dataclass(frozen=True)
class NnxForm:
    """Of a flax.nnx.Module: its nnx.Param are trained; its random streams start anew from every shard's key."""

    graph: Any
    streams: Any = field(compare=False)  # the user's own, to be given back

    @staticmethod
    def split(model: nnx.Module) -> tuple[NnxForm, Any, Any]:
        graph, params, streams, state = nnx.split(model, nnx.Param, nnx.RngState, ...)
        return NnxForm(graph, streams), params, state

    def __call__(self, params: Any, state: Any, x: Array, key: Key, train: bool) -> tuple[Any, Any]:
        leaves, structure = jax.tree.flatten(self.streams)
        fresh = []
        for i, leaf in enumerate(leaves):
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                own = jax.random.fold_in(key, i)
                fresh.append(jax.random.split(own, leaf.shape) if leaf.shape else own)
            else:
                fresh.append(jnp.zeros(leaf.shape, leaf.dtype))  # how many were drawn
        module = nnx.merge(self.graph, params, jax.tree.unflatten(structure, fresh), state)
        module.train() if train else module.eval()
        output = module(x)
        return output, nnx.split(module, nnx.Param, nnx.RngState, ...)[3]

    def model(self, params: Any, state: Any) -> nnx.Module:
        return nnx.merge(self.graph, params, self.streams, state)


def form_of(model: Any, made: dict[int, tuple[Any, Any]]) -> tuple[Any, Any, Any]:
    """(form, params, state) of a model; `made` has the variables that a probe made, by the model's id."""
    if isinstance(model, Pair):
        params = made[id(model)][1] if id(model) in made else model.params
        if callable(params):
            raise Invalid("the parameters of this Pair are not made yet: pass Pair(apply, init(key, x))")
        return PairForm(ById.wrap(model.apply)), params, model.state
    if isinstance(model, nnx.Module):
        return NnxForm.split(model)
    if model.scope is not None:
        module, variables = model.unbind()
    elif id(model) in made:
        module, variables = model, made[id(model)][1]
    else:
        raise Invalid("this flax module has no variables yet: pass model.bind(model.init(key, x))")
    state = dict(variables)
    return LinenForm(module), state.pop("params", {}), state


class ById:
    """A function that cannot be hashed, told from others by what it is."""

    def __init__(self, it: Callable[..., Any]) -> None:
        self.it = it
        self.__signature__ = inspect.signature(it)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.it(*args, **options)

    def __hash__(self) -> int:
        return id(self.it)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.it is self.it

    @staticmethod
    def wrap(thing: Any) -> Any:
        try:
            hash(thing)
        except TypeError:
            return ById(thing)
        return thing
