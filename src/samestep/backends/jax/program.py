"""What is compiled for a JAX model: a shard's gradient as one flat vector, many shards in one launch, evaluation.

All replicas of a model share its program; a replica has the vectors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from samestep.backends.base import Backend
from samestep.backends.calling import spread
from samestep.backends.jax.adapters import Adapter
from samestep.backends.jax.fingerprint import fingerprint
from samestep.backends.jax.flat import FlatTree
from samestep.backends.losses import Measure
from samestep.errors import Invalid
from samestep.shards import Fold, parts
from samestep.trees import Tree, length, mapped

Array = Any
Vector = Any
State = tuple[Vector, ...]


# On a GPU: kernels with one order of additions, and the same ones in every run, whatever a stopwatch says.
GPU = {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}


barrier = jax.lax.optimization_barrier  # on a GPU; for CPUs, XLA drops it before it fuses operations


def jitted(method: Callable[..., Any], more: Mapping[str, Any] = {}, **options: Any) -> Any:
    """A method of a program, compiled on first use; `more` are options of XLA on a GPU."""

    def compiled(program: Any) -> Any:
        gpu = {**GPU, **more} if program.kind == "cuda" else None
        return jax.jit(partial(method, program), compiler_options=gpu, **options)

    return functools.cached_property(compiled)


def taken(arrays: Tree, index: Array) -> Tree:
    """These rows of arrays."""
    return mapped(lambda array: jnp.take(array, index, axis=0, mode="clip"), arrays)


def apart(
    function: Callable[..., Any], *given: Any, like: Sequence[Any] | None = None, wide: bool | None = None
) -> Any:
    """What a function gives inside a larger program, with the bits of a program of its own.

    XLA must not see where its arguments come from, nor where its results go. It is traced with arguments of the types of
    `like`, and wide says whether there are 64 bits then.
    """
    with jax.enable_x64(jax.config.jax_enable_x64 if wide is None else wide):
        jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*(given if like is None else like))
    leaves = zip(jax.tree.leaves(given), jaxpr.in_avals, strict=True)
    given = barrier([jax.lax.convert_element_type(leaf, aval.dtype) for leaf, aval in leaves])
    found = barrier(jaxpr_as_fun(jaxpr)(*given))
    return jax.tree.unflatten(jax.tree.structure(shapes), found)


@dataclass(frozen=True)
class Program:
    """The compiled functions of a model, for any replica of it."""

    backend: Backend
    adapter: Adapter
    measure: Measure
    params: FlatTree  # of one vector
    state: FlatTree
    shards: int
    kind: str  # of device

    @property
    def size(self) -> int:
        """The length of what a shard gives."""
        size = sum(layout.size for tree in (self.params, self.state) for layout in tree.layouts)
        return size + 2 * self.shards + self.measure.more

    def shard(
        self, parameters: Vector, state: State, x: Tree, y: Tree, key: Array, shard: Array, train: bool = True
    ) -> Vector:
        """What one shard gives, as described in backends/base.py."""

        def forward(params: Any) -> tuple[Array, tuple[list[Array], Any]]:
            # nnx changes its variables, and may do so only in the trace in which they were made: they are copied in here.
            numbers, new = self.numbers(params, self.state.unflatten(state), x, y, key, train)
            return numbers[0], (numbers[1:], new if train else self.state.unflatten(state))

        params = self.params.unflatten([parameters])
        (loss, ((hits, *more), new)), gradients = jax.value_and_grad(forward, has_aux=True)(params)
        if jax.tree.structure(new) != self.state.structure:
            raise Invalid("the state that the model returns must have the structure of the one it was given")
        dtype, after = parameters.dtype, self.state.flatten(new)
        wide = [layout.wide(str(dtype)) for layout in self.state.layouts]
        changes = [(now.astype(kind) - before.astype(kind)).astype(dtype) * length(y)
                   for now, before, kind in zip(after, state, wide, strict=True)]  # fmt: skip
        mine = jnp.arange(self.shards) == shard
        slots = [jnp.where(mine, number.astype(dtype), 0) for number in (loss, hits)]
        more = [number.astype(dtype).reshape(1) for number in more]
        return jnp.concatenate([*self.params.flatten(gradients), *changes, *slots, *more])

    def numbers(self, params: Any, state: Any, x: Tree, y: Tree, key: Array, train: bool) -> tuple[list[Array], Any]:
        """Loss, hits and what else is measured, and the new state."""
        output, new = self.adapter(params, state, spread(x, self.measure.style), noise(key), train)
        return self.backend.measured(self.measure, output, y), new

    gradient = jitted(shard)
    slope = jitted(lambda self, *given: self.shard(*given, train=False))

    @jitted
    def gradients(
        self, parameters: Vector, state: State, x: Tree, y: Tree, index: Array, keys: Array, first: Array, n: Array
    ) -> Array:
        """Shards `first`, `first + 1`, ... of one size: row i of the result is of one. Row i of `index` says which rows of
        x and y are its examples.

        How many turns the loop makes is a number that it is given, and memory is there for all shards of a batch. So the
        very same code computes a shard whether it is alone on its device or one of many, and its bits are the same.
        """

        def turn(i: Array, rows: Array) -> Array:
            row = apart(self.shard, parameters, state, *taken([x, y], index[i]), keys[i], first + i)
            return jax.lax.dynamic_update_index_in_dim(rows, row, i, 0)

        return jax.lax.fori_loop(0, n, turn, jnp.zeros((self.shards, self.size), parameters.dtype))

    @partial(jitted, static_argnums=(0, 1, 2, 3))
    def partial_sums(self, lo: int, hi: int, n: int, counts: tuple[int, ...], results: Sequence[Array]) -> list[Vector]:
        """The parts of the sum over shards [lo, hi) of n. Each result is of one call of `gradients`; counts says for how
        many shards it was.
        """
        fold: Fold[Vector] = Fold(n, lambda left, right: left + right)
        rows = [rows[i] for count, rows in zip(counts, results, strict=True) for i in range(count)]
        for shard, row in zip(range(lo, hi), rows, strict=True):
            fold.add((shard, shard + 1), row)
        return [fold.parts[span] for span in parts(lo, hi, n)]

    @jitted
    def evaluate(self, parameters: Vector, state: State, x: Tree, y: Tree, key: Array) -> Vector:
        params = self.params.unflatten([parameters])
        numbers, _ = self.numbers(params, self.state.unflatten(state), x, y, key, False)
        return jnp.stack([number.astype(parameters.dtype) for number in numbers])

    @jitted
    def advance(self, state: State, total: Vector, examples: Array) -> State:
        new, start = [], self.params.layouts[0].size
        for layout, vector in zip(self.state.layouts, state, strict=True):
            change = total[start : start + layout.size] / examples
            # A counter changes alike in every shard, so the mean over them is its change.
            wide = vector.astype(layout.wide(str(total.dtype)))
            new.append((wide + (change if layout.real else jnp.round(change)).astype(wide.dtype)).astype(vector.dtype))
            start += layout.size
        return tuple(new)

    fingerprint = jitted(lambda self, vectors: fingerprint(vectors))


# The same model again (another replica, the next fit) finds its functions compiled.
program = functools.lru_cache(maxsize=16)(Program)


def noise(key: Array) -> Any:
    return jax.random.wrap_key_data(key, impl="threefry2x32")
