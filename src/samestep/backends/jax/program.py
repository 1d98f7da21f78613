"""What is compiled for a JAX model: a shard's gradient as one flat vector, many shards in one launch, a whole step
in one launch, evaluation, fingerprint.

All replicas of a model share its program; a replica has the vectors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from samestep.backends.jax.book import heard, written
from samestep.errors import Invalid, WrongType
from samestep.shards import Fold, parts

Array = Any
Vector = Any
Key = Any


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

    @property
    def size(self) -> int:
        """Of the vector that a shard gives."""
        states = sum(self.state.size(dtype) for dtype in self.state.types)
        return self.params.size(self.params.types[0]) + states + 2 * self.shards

    def shard(
        self, parameters: Vector, state: tuple[Vector, ...], x: Array, y: Array, key: Array, shard: Array
    ) -> Vector:
        """What one shard gives, as described in backends/__init__.py."""
        numbers, changes, gradients = self.pieces(self.params.unflatten([parameters]), state, x, y, key)
        mine = jnp.arange(self.shards) == shard
        slots = [jnp.where(mine, number, 0) for number in numbers]
        return jnp.concatenate([*self.params.flatten(gradients), *changes, *slots])

    def pieces(
        self, params: Any, state: tuple[Vector, ...], x: Array, y: Array, key: Array
    ) -> tuple[list[Array], list[Vector], Any]:
        """Loss and hits of one shard, the changes of its state times its examples, and its gradient as a tree."""

        def forward(params: Any) -> tuple[Array, tuple[Array, Any]]:
            # nnx changes its variables, and may do so only in the trace in which they were made: in here
            output, new = self.form(params, self.state.unflatten(state), x, noise(key), True)
            return sum_of_losses(self.loss, output, y, self.kind), (hits(output, y), new)

        (loss, (right, new)), gradients = jax.value_and_grad(forward, has_aux=True)(params)
        if jax.tree.structure(new) != self.state.tree:
            raise Invalid("the state that the model returns must have the structure of the one it was given")
        dtype, after = self.params.types[0], self.state.flatten(new)
        changes = [(now - before).astype(dtype) * len(y) for now, before in zip(after, state, strict=True)]
        return [number.astype(dtype) for number in (loss, right)], changes, gradients

    @functools.cached_property
    def gradient(self) -> Any:
        return compiled(self.shard, self.kind)

    @functools.cached_property
    def gradients(self) -> Any:
        """Shards `first`, `first + 1`, ... of one size, whose examples are rows of x and y; row i of the result is of one.

        How many turns the loop makes is a number that it is given, and memory is there for all shards of a batch. So the
        very same code computes a shard whether it is alone on its device or one of many, and its bits are the same.
        """

        def compute(
            parameters: Vector, state: tuple[Vector, ...], x: Array, y: Array, index: Array, keys: Array, first: Array,
            count: Array,
        ) -> Array:  # fmt: skip
            def turn(i: Array, rows: Array) -> Array:
                # The barrier: what the examples were taken from must not be seen by what computes with them.
                taken = [jnp.take(array, index[i], axis=0, mode="clip") for array in (x, y)]
                here, labels = jax.lax.optimization_barrier(taken)
                return rows.at[i].set(self.shard(parameters, state, here, labels, keys[i], first + i))

            return jax.lax.fori_loop(0, count, turn, jnp.zeros((self.shards, self.size), parameters.dtype))

        return compiled(compute, self.kind)

    @functools.cached_property
    def sums(self) -> Any:
        """The parts of shards [lo, hi) of n, from the rows that `gradients` gave for one run of shards after the other."""

        def compute(lo: int, hi: int, n: int, runs: tuple[int, ...], results: Sequence[Array]) -> list[Vector]:
            fold: Fold[Vector] = Fold(n, lambda left, right: left + right)
            rows = [rows[i] for count, rows in zip(runs, results, strict=True) for i in range(count)]
            for shard, row in zip(range(lo, hi), rows, strict=True):
                fold.add((shard, shard + 1), row)
            return [fold.parts[span] for span in parts(lo, hi, n)]

        return compiled(compute, self.kind, static_argnums=(0, 1, 2, 3))

    @functools.lru_cache(maxsize=16)  # noqa: B019 as many as programs are kept
    def step(self, optimizer: Any) -> Any:
        """A whole step of one shard, with weights and slots leaf by leaf; `about` says which line of the book is its own, from
        what key it draws, its rate, and which rows of x and y are its examples (jax_book.told).

        No vector is put together, and the memory of weights, slots and book is used again. Bits may be others than those of a
        step in several launches, so a run is made in one way from beginning to end.
        """

        def compute(
            leaves: list[Array], slots: dict[str, list[Array]], book: Array, state: tuple[Vector, ...], x: Array,
            y: Array, about: Array,
        ) -> tuple[list[Array], dict[str, list[Array]], Array, tuple[Vector, ...]]:  # fmt: skip
            number, key, lr, index = heard(about, jnp.dtype(self.params.types[0]))
            here, labels = (jnp.take(array, index, axis=0, mode="clip") for array in (x, y))
            numbers, changes, gradients = self.pieces(self.params.tree.unflatten(leaves), state, here, labels, key)
            examples, new, kept = lr.dtype.type(len(labels)), [], {name: list[Array]() for name in slots}
            for i, (weights, gradient) in enumerate(zip(leaves, jax.tree.leaves(gradients), strict=True)):
                mine = {name: slot[i] for name, slot in slots.items()}
                change, mine = optimizer.change(weights, gradient / examples, mine, lr, 0)
                new.append(weights - change)
                for name, slot in mine.items():
                    kept[name].append(slot)
            state = tuple(moved(before, change / examples) for before, change in zip(state, changes, strict=True))
            return new, kept, written(book, number, numbers, bits([*new, *state])), state

        return compiled(compute, self.kind, donate_argnums=(0, 1, 2))

    @functools.cached_property
    def split(self) -> Any:
        """The leaves that lie in a vector, in memory of their own."""
        return compiled(lambda v: [jnp.copy(leaf) for leaf in jax.tree.leaves(self.params.unflatten([v]))], self.kind)

    @functools.cached_property
    def joined(self) -> Any:
        return compiled(lambda leaves: self.params.flatten(leaves)[0], self.kind)

    @functools.cached_property
    def evaluate(self) -> Any:
        def compute(parameters: Vector, state: tuple[Vector, ...], x: Array, y: Array, key: Array) -> Vector:
            tree = self.params.unflatten([parameters])
            output, _ = self.form(tree, self.state.unflatten(state), x, noise(key), False)
            return jnp.stack([number.astype(parameters.dtype)
                              for number in (sum_of_losses(self.loss, output, y, self.kind), hits(output, y))])  # fmt: skip

        return compiled(compute, self.kind)

    @functools.cached_property
    def advance(self) -> Any:
        def compute(state: tuple[Vector, ...], total: Vector, examples: Array) -> tuple[Vector, ...]:
            new, start = [], self.params.size(self.params.types[0])
            for vector in state:
                new.append(moved(vector, total[start : start + len(vector)] / examples))
                start += len(vector)
            return tuple(new)

        return compiled(compute, self.kind)

    @functools.cached_property
    def fingerprint(self) -> Any:
        return compiled(bits, self.kind)


def compiled(function: Callable[..., Any], kind: str, **options: Any) -> Any:
    # On a GPU: kernels with one order of additions, and the same ones in every run, whatever a stopwatch says.
    gpu = {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}
    return jax.jit(function, compiler_options=gpu if kind == "cuda" else None, **options)


# The same model again (another replica, the next fit) finds its functions compiled.
program = functools.lru_cache(maxsize=16)(Program)


def moved(vector: Vector, change: Vector) -> Vector:
    # a counter changes alike in every shard, so the mean over them is its change
    return vector + (change if is_real(vector) else jnp.round(change)).astype(vector.dtype)


def noise(key: Array) -> Key:
    return jax.random.wrap_key_data(key, impl="threefry2x32")


def is_real(vector: Vector) -> bool:
    return bool(jnp.issubdtype(vector.dtype, jnp.floating))


def sum_of_losses(loss: Any, output: Any, y: Array, kind: str) -> Array:
    """The sum over examples of the loss, whether `loss` gives one value per example or their mean."""
    if loss is None:
        return cross_entropy(output, y, kind).sum()
    value = loss(output, y)
    if not hasattr(value, "ndim"):
        raise WrongType(f"loss must return an array (a loss per example, or their mean), got {type(value).__name__}")
    if value.ndim == 0:
        return value * len(y)
    if len(value) != len(y):
        raise Invalid(f"loss must return one value per example ({len(y)}) or their mean, got shape {value.shape}")
    return value.reshape(len(y), -1).mean(1).sum()


def cross_entropy(output: Array, y: Array, kind: str) -> Array:
    scores = jax.nn.log_softmax(output)
    if kind == "cpu":
        return -jnp.take_along_axis(scores, y[..., None], -1)[..., 0]
    # The gradient of taking one is a scatter, which is slow where its order is to be the same.
    return -jnp.where(jnp.arange(output.shape[-1]) == y[..., None], scores, 0).sum(-1)


def hits(output: Any, y: Array) -> Array:
    """How many examples have their highest score at their label; 0 where the output is not one score per class."""
    if getattr(output, "ndim", 0) == 2 and y.ndim == 1 and jnp.issubdtype(y.dtype, jnp.integer):
        return (output.argmax(1) == y).sum()
    return jnp.zeros(())


def bits(vectors: Sequence[Array]) -> Vector:
    """Two sums of 32-bit hashes, of each word of the weights with its place, modulo 2³²: together 64 bits.

    Integers wrap around, so the order of the additions cannot matter. 64-bit integers would need jax_enable_x64.
    """
    sums, place = (jnp.uint32(0), jnp.uint32(0)), 0
    for vector in vectors:
        width = {1: jnp.uint8, 2: jnp.uint16}.get(vector.dtype.itemsize, jnp.uint32)
        words = jnp.atleast_1d(jax.lax.bitcast_convert_type(vector, width)).astype(jnp.uint32)
        hashes = mixed(words, jax.lax.iota(jnp.uint32, words.size).reshape(words.shape) + jnp.uint32(place))
        place += words.size
        if words.ndim > 1:  # first along rows, so that several threads can share them
            hashes = added(hashes, range(1, words.ndim))
        sums = both(sums, added(hashes, range(1)))
    return jnp.stack(sums)


def both(a: Sequence[Array], b: Sequence[Array]) -> tuple[Array, Array]:
    return a[0] + b[0], a[1] + b[1]


def added(hashes: Sequence[Array], axes: range) -> tuple[Array, Array]:
    """Both sums at once: one way through the weights."""
    first, second = jax.lax.reduce(tuple(hashes), (jnp.uint32(0), jnp.uint32(0)), both, tuple(axes))
    return first, second


def mixed(words: Array, places: Array) -> tuple[Array, Array]:
    """Two hashes of every word and its place; the second is no multiple of the first, so it says something new."""
    words = words + places * jnp.uint32(0x9E3779B1)
    words = (words ^ (words >> 15)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 12)) * jnp.uint32(0xC2B2AE35)
    return words, words ^ (words >> 15)
