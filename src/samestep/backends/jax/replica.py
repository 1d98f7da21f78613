"""One whole copy of a JAX model on one device: vectors, and the program that computes with them (jax_program.py)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from samestep.backends import Deliver, Tensors
from samestep.backends.jax.adapters import ById
from samestep.backends.jax.book import Book, Line, halves, told
from samestep.backends.jax.program import Layout, is_real, program
from samestep.devices import Device
from samestep.errors import Invalid
from samestep.optimizers.rules import SGD, AdaGrad
from samestep.shards import Span, parts

if TYPE_CHECKING:
    from samestep.data.examples import Pass

Array = Any
Vector = Any
LOOPED = ("cuda",)  # devices that are given many shards in one launch; a CPU computes shards side by side
ROOM = 1 << 26  # bytes that the vectors of all shards of a batch may take for that


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
        self._leaves: list[Array] | None = None  # the weights, after a whole step; else they are in the vector
        self._vector: Vector | None = put(self.layouts[0].flatten(params)[0])
        self._print: Vector | None = None  # fingerprint of the weights, where a step has given it
        self._dtype = jnp.dtype(self.layouts[0].types[0])
        self._step: tuple[Any, Any] = None, None  # an optimizer, and a whole step with it
        self._book: Book | None = None  # what whole steps have said
        self.state = put(self.layouts[1].flatten(state))
        self.program = program(self._form, ById.wrap(loss), *self.layouts, shards, device.kind)
        self.size = self.program.size
        room = shards * self.size * self.parameters.dtype.itemsize
        self.looped = device.kind in LOOPED and shards > 1 and room <= ROOM
        self.bands = [(0, self.size)]  # what is compiled gives all at once

    @property
    def parameters(self) -> Vector:
        if self._vector is None:
            self._vector = self.program.joined(self._leaves)
        return self._vector

    def gradient(self, x: Array, y: Array, key: int, shard: int, deliver: Deliver | None = None) -> Vector:
        if self.looped:
            rows = self._loop(x, y, np.arange(len(y)).reshape(1, -1), [key], shard)
            return self.program.sums(shard, shard + 1, self.shards, (1,), [rows])[0]
        return self.program.gradient(self.parameters, self.state, x, y, halves(key), np.int32(shard))

    def gradients(self, pass_: Pass, spans: Sequence[Span], keys: Sequence[int], shards: range) -> dict[Span, Vector]:
        x, y = pass_.feed.resident[self.device]
        results, runs = [], []
        for size, alike in groupby(shards, lambda shard: spans[shard][1] - spans[shard][0]):
            run = list(alike)
            index = pass_.order[spans[run[0]][0] : spans[run[-1]][1]].reshape(len(run), size)
            results.append(self._loop(x, y, index, [keys[shard] for shard in run], run[0]))
            runs.append(len(run))
        lo, hi, n = shards.start, shards.stop, len(spans)
        return dict(zip(parts(lo, hi, n), self.program.sums(lo, hi, n, tuple(runs), results), strict=True))

    def _loop(self, x: Array, y: Array, index: np.ndarray[Any, Any], keys: Sequence[int], first: int) -> Array:
        """One launch for shards of one size, whose examples are these rows of x and y."""
        count, size = index.shape
        padded = np.zeros((self.shards, size), np.int32)
        padded[:count] = index
        words = np.zeros((self.shards, 2), np.uint32)
        words[:count] = [halves(key) for key in keys]
        about = np.int32(first), np.int32(count)
        return self.program.gradients(self.parameters, self.state, x, y, padded, words, *about)

    def whole(
        self, pass_: Pass, span: Span, key: int, optimizer: Any, slots: dict[str, Any], lr: float, t: int
    ) -> tuple[Vector, dict[str, Any]]:
        """A whole step of one shard in one launch: [loss, hits], and the slots, leaf by leaf from now on."""
        lo, hi = span
        if pass_.feed.resident:
            x, y = pass_.feed.resident[self.device]
            index = pass_.order[lo:hi]
        else:
            x, y = pass_.shard(span, self.device)
            index = np.arange(hi - lo)
        leaves = self._leaves or self.program.split(self._vector)
        slots = {name: slot if isinstance(slot, list) else self.program.split(slot) for name, slot in slots.items()}
        if self._step[0] is not optimizer:
            self._step = optimizer, self.program.step(optimizer)
        if self._book is None or self._book.closed:
            self._book = Book(self._dtype, self._place)
        book, number = self._book, self._book.used
        about = told(number, key, lr, self._dtype, index)
        self._leaves, slots, book.array, self.state = self._step[1](leaves, slots, book.array, self.state, x, y, about)
        book.used += 1
        self._vector, self._print = None, Line(book, number, numbers=False)
        return Line(book, number, numbers=True), slots

    def in_one_go(self, optimizer: Any) -> bool:
        """Whether `whole` can make the steps of this optimizer: no power of t, which wants more bits than a launch is given."""
        return isinstance(optimizer, (SGD, AdaGrad))

    def evaluate(self, x: Array, y: Array, key: int) -> Vector:
        return self.program.evaluate(self.parameters, self.state, x, y, halves(key))

    def assign(self, parameters: Vector) -> None:
        self._vector, self._leaves, self._print = parameters, None, None

    def advance(self, total: Vector, examples: int) -> None:
        if self.state:
            self._print = None
            self.state = self.program.advance(self.state, total, self.parameters.dtype.type(examples))

    def fingerprint(self) -> Vector:
        return self.program.fingerprint((self.parameters, *self.state)) if self._print is None else self._print

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
        self.assign(self.flat(tensors))
        self.state = self._flattened(self.layouts[1], tensors)

    def named(self, vector: Vector) -> Tensors:
        if isinstance(vector, list):  # leaf by leaf
            return dict(zip(self.layouts[0].names, map(np.asarray, vector), strict=True))
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
