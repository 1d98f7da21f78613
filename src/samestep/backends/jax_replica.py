"""One whole copy of a JAX model on one device: a shard's gradient as one flat vector, computed by one compiled function.

A model is brought into one *form*, a pure function (params, state, x, key, train) -> (output, state), whatever it came as.
From a form and the layout of its trees a *program* is compiled. All replicas share it; a replica has the vectors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from samestep.backends import Deliver, Tensors
from samestep.devices import Device
from samestep.errors import Invalid, WrongType
from samestep.models.jax import Pair, call

Array = Any
Vector = Any
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
        make = jax.jit(lambda x: self.module.init(streams(jax.random.key(0)), x, **self.options(False)))
        return dict(make(x))

    def model(self, params: Any, state: Any) -> nn.Module:
        return self.module.bind({"params": params, **state})


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


@dataclass(frozen=True)
class Layout:
    """How the leaves of a tree lie in flat vectors, one vector for each type of number."""

    tree: Any
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @staticmethod
    def of(tree: Any) -> Layout:
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        names = tuple(".".join(map(step_name, nnx_variable(path))) for path, _ in leaves)
        arrays = [jnp.asarray(leaf) for _, leaf in leaves]
        for name, array in zip(names, arrays, strict=True):
            if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
                raise WrongType(f"{name} is of type {array.dtype}: weights and state must be real or whole numbers")
        return Layout(structure, names, tuple(a.shape for a in arrays), tuple(str(a.dtype) for a in arrays))

    @functools.cached_property
    def types(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.dtypes))

    def size(self, dtype: str) -> int:
        return sum(int(np.prod(s)) for s, d in zip(self.shapes, self.dtypes, strict=True) if d == dtype)

    def flatten(self, tree: Any) -> tuple[Vector, ...]:
        leaves = [jnp.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(tree)]
        return tuple(
            jnp.concatenate([leaf for leaf, d in zip(leaves, self.dtypes, strict=True) if d == dtype])
            for dtype in self.types
        )

    def unflatten(self, vectors: Sequence[Vector]) -> Any:
        held, at, leaves = dict(zip(self.types, vectors, strict=True)), dict.fromkeys(self.types, 0), []
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            start = at[dtype]
            at[dtype] = stop = start + int(np.prod(shape))
            leaves.append(held[dtype][start:stop].reshape(shape))
        return jax.tree.unflatten(self.tree, leaves)


def nnx_variable(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """In nnx every leaf is the attribute `value` of a variable, which goes without saying."""
    return path[:-1] if path and getattr(path[-1], "name", None) == "value" else path


def step_name(step: Any) -> str:
    return str(getattr(step, "key", getattr(step, "idx", getattr(step, "name", step))))


@dataclass(frozen=True)
class Program:
    """The compiled functions of a model, for any replica of it."""

    form: Any
    loss: Any
    params: Layout
    state: Layout
    shards: int
    kind: str

    @functools.cached_property
    def gradient(self) -> Any:
        def compute(
            parameters: Vector, state: tuple[Vector, ...], x: Array, y: Array, key: Array, shard: Array
        ) -> Vector:
            def forward(params: Any) -> tuple[Array, tuple[Array, Any]]:
                # nnx changes its variables, and may do so only in the trace in which they were made: in here
                output, new = self.form(params, self.state.unflatten(state), x, noise(key), True)
                return sum_of_losses(self.loss, output, y), (hits(output, y), new)

            tree = self.params.unflatten([parameters])
            (loss, (right, new)), gradients = jax.value_and_grad(forward, has_aux=True)(tree)
            if jax.tree.structure(new) != self.state.tree:
                raise Invalid("the state that the model returns must have the structure of the one it was given")
            dtype, mine = parameters.dtype, jnp.arange(self.shards) == shard
            changes = [
                (now - before).astype(dtype) * len(y)
                for now, before in zip(self.state.flatten(new), state, strict=True)
            ]
            slots = [jnp.where(mine, number.astype(dtype), 0) for number in (loss, right)]
            return jnp.concatenate([*self.params.flatten(gradients), *changes, *slots])

        return self.compiled(compute)

    @functools.cached_property
    def evaluate(self) -> Any:
        def compute(parameters: Vector, state: tuple[Vector, ...], x: Array, y: Array, key: Array) -> Vector:
            tree = self.params.unflatten([parameters])
            output, _ = self.form(tree, self.state.unflatten(state), x, noise(key), False)
            return jnp.stack([number.astype(parameters.dtype)
                              for number in (sum_of_losses(self.loss, output, y), hits(output, y))])  # fmt: skip

        return self.compiled(compute)

    @functools.cached_property
    def advance(self) -> Any:
        def compute(state: tuple[Vector, ...], total: Vector, examples: Array) -> tuple[Vector, ...]:
            new, start = [], self.params.size(self.params.types[0])
            for vector in state:
                mean = total[start : start + len(vector)] / examples
                start += len(vector)
                # a counter changes alike in every shard, so the mean is the change
                new.append(vector + (mean if is_real(vector) else jnp.round(mean)).astype(vector.dtype))
            return tuple(new)

        return self.compiled(compute)

    @functools.cached_property
    def fingerprint(self) -> Any:
        return self.compiled(lambda vectors: bits(vectors))

    def compiled(self, function: Callable[..., Any]) -> Any:
        # On a GPU: kernels with one order of additions, and the same ones in every run, whatever a stopwatch says.
        options: dict[str, Any] = {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}
        return jax.jit(function, compiler_options=options if self.kind == "cuda" else None)


# The same model again (another replica, the next fit) finds its functions compiled.
program = functools.lru_cache(maxsize=16)(Program)


def noise(key: Array) -> Key:
    return jax.random.wrap_key_data(key, impl="threefry2x32")


def halves(key: int) -> np.ndarray[Any, Any]:
    """The 64 bits of a key as the two words that jax.random wants."""
    return np.array([key >> 32 & 0xFFFFFFFF, key & 0xFFFFFFFF], np.uint32)


def is_real(vector: Vector) -> bool:
    return bool(jnp.issubdtype(vector.dtype, jnp.floating))


def sum_of_losses(loss: Any, output: Any, y: Array) -> Array:
    """The sum over examples of the loss, whether `loss` gives one value per example or their mean."""
    if loss is None:
        chosen = jnp.arange(output.shape[-1]) == y[..., None]  # no gather: its gradient would be a scatter
        return -jnp.where(chosen, jax.nn.log_softmax(output), 0).sum()
    value = loss(output, y)
    if not hasattr(value, "ndim"):
        raise WrongType(f"loss must return an array (a loss per example, or their mean), got {type(value).__name__}")
    if value.ndim == 0:
        return value * len(y)
    if len(value) != len(y):
        raise Invalid(f"loss must return one value per example ({len(y)}) or their mean, got shape {value.shape}")
    return value.reshape(len(y), -1).mean(1).sum()


def hits(output: Any, y: Array) -> Array:
    """How many examples have their highest score at their label; 0 where the output is not one score per class."""
    if getattr(output, "ndim", 0) == 2 and y.ndim == 1 and jnp.issubdtype(y.dtype, jnp.integer):
        return (output.argmax(1) == y).sum()
    return jnp.zeros(())


def bits(vectors: Sequence[Vector]) -> Vector:
    """Two sums of 32-bit hashes, one of each word of the weights and its place, modulo 2³²: together 64 bits.

    Integers wrap around, so the order of the additions cannot matter. 64-bit integers would need jax_enable_x64.
    """
    sums, place = [jnp.uint32(0), jnp.uint32(0)], 0
    for vector in vectors:
        width = {1: jnp.uint8, 2: jnp.uint16}.get(vector.dtype.itemsize, jnp.uint32)
        words = jax.lax.bitcast_convert_type(vector, width).reshape(-1).astype(jnp.uint32)
        here = jax.lax.iota(jnp.uint32, len(words)) + jnp.uint32(place)
        place += len(words)
        for i, odd in enumerate((0x9E3779B1, 0x85EBCA77)):
            hashed = mixed(words + mixed(here * jnp.uint32(odd) + jnp.uint32(i + 1)))
            sums[i] = sums[i] + hashed.sum(dtype=jnp.uint32)
    return jnp.stack(sums)


def mixed(words: Array) -> Array:
    """Every bit of a word has its way to every bit of the result (the last steps of MurmurHash3)."""
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return words ^ (words >> 16)


class JaxReplica:
    gaps: Sequence[slice] = ()

    def __init__(
        self, given: tuple[Any, Any, Any], loss: Any, device: Device, shards: int, place: Any, home: Any
    ) -> None:
        """`place` is where to compute, `home` where the user's arrays of this device live."""
        self._form, params, state = given
        self.device, self.shards, self._place, self._home = device, shards, place, home
        self.layouts = Layout.of(params), Layout.of(state)
        if len(self.layouts[0].types) != 1:
            raise Invalid("the parameters to train must all be of one type")
        names = [name for layout in self.layouts for name in layout.names]
        if len(set(names)) < len(names):
            raise Invalid(f"two tensors of the model have one name: {', '.join(sorted(names))}")
        put = functools.partial(jax.device_put, device=place)
        self.parameters = put(self.layouts[0].flatten(params)[0])
        self.state = put(self.layouts[1].flatten(state))
        self.program = program(self._form, ById.wrap(loss), *self.layouts, shards, device.kind)
        self.size = len(self.parameters) + sum(map(len, self.state)) + 2 * shards
        self.bands = [(0, self.size)]  # what is compiled gives all at once

    def gradient(self, x: Array, y: Array, key: int, shard: int, deliver: Deliver | None = None) -> Vector:
        return self.program.gradient(self.parameters, self.state, x, y, halves(key), np.int32(shard))

    def evaluate(self, x: Array, y: Array, key: int) -> Vector:
        return self.program.evaluate(self.parameters, self.state, x, y, halves(key))

    def assign(self, parameters: Vector) -> None:
        self.parameters = parameters

    def advance(self, total: Vector, examples: int) -> None:
        if self.state:
            self.state = self.program.advance(self.state, total, self.parameters.dtype.type(examples))

    def fingerprint(self) -> Vector:
        return self.program.fingerprint((self.parameters, *self.state))

    def vectors(self) -> list[Vector]:
        return [self.parameters, *filter(is_real, self.state)]

    def trees(self, vectors: Sequence[Vector] | None = None) -> tuple[Any, Any]:
        """(params, state) as the user's trees, taken from other vectors than this replica's on request."""
        parameters, *reals = self.vectors() if vectors is None else vectors
        rest = iter(reals)
        state = [next(rest) if is_real(vector) else vector for vector in self.state]
        trees = self.layouts[0].unflatten([parameters]), self.layouts[1].unflatten(state)
        params, others = jax.device_put(trees, self._home)
        return params, others

    def tensors(self, vectors: Sequence[Vector] | None = None) -> dict[str, np.ndarray[Any, Any]]:
        leaves = jax.tree.leaves(self.trees(vectors))
        names = [name for layout in self.layouts for name in layout.names]
        return {name: np.array(leaf) for name, leaf in zip(names, leaves, strict=True)}

    def vectors_from(self, tensors: Tensors) -> list[Vector]:
        return [self.flat(tensors), *filter(is_real, self._flattened(self.layouts[1], tensors))]

    def load(self, tensors: Tensors) -> None:
        self.parameters, self.state = self.flat(tensors), self._flattened(self.layouts[1], tensors)

    def named(self, vector: Vector) -> Tensors:
        leaves = jax.tree.leaves(self.layouts[0].unflatten([np.asarray(vector)]))
        return dict(zip(self.layouts[0].names, leaves, strict=True))

    def flat(self, named: Tensors) -> Vector:
        return self._flattened(self.layouts[0], named)[0]

    def _flattened(self, layout: Layout, tensors: Tensors) -> tuple[Vector, ...]:
        tree = jax.tree.unflatten(layout.tree, [tensors[name] for name in layout.names])
        vectors: tuple[Vector, ...] = jax.device_put(layout.flatten(tree), self._place)
        return vectors

    def model(self, vectors: Sequence[Vector] | None = None) -> Any:
        return self._form.model(*self.trees(vectors))

    def release(self) -> None:
        """Nothing to let go of: what was compiled is kept for the next fit of the same model."""
