"""One whole copy of a JAX model on one device: vectors, and the program that computes with them (program.py)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from samestep.backends.base import Backend, Replica, Task
from samestep.backends.by_id import ById
from samestep.backends.jax.adapters import Adapter
from samestep.backends.jax.flat import FlatTree
from samestep.backends.jax.program import program
from samestep.backends.layout import Numbers, Tensors, on_host
from samestep.devices import Device
from samestep.draws import halves
from samestep.errors import Invalid
from samestep.fingerprint import hashed
from samestep.shards import parts
from samestep.trees import Tree, length

if TYPE_CHECKING:
    from samestep.data.feed import Batch
    from samestep.training.step import ReplicaSums

Array = Any
Vector = Any
LOOPED = ("cuda",)  # devices that are given many shards in one launch; a CPU computes shards side by side
ADDRESS = re.compile(" at 0x[0-9a-f]+")  # in the text of a program
ROOM = 1 << 26  # bytes that the vectors of all shards of a batch may take for that


class JaxReplica(Replica):
    def __init__(
        self,
        backend: Backend,
        adapted: tuple[Adapter, Any, Any],
        measure: Any,
        device: Device,
        shards: int,
        native: Any,
    ) -> None:
        """`native` is the device object on which the user's arrays are: a run may compute on another (clients.py)."""
        super().__init__(backend, measure, device, shards)
        self._adapter, params, state = adapted
        self._native, self._given = native, list(map(id, jax.tree.leaves(params)))
        self.trees = FlatTree.of(params), FlatTree.of(state)
        if len(self.trees[0].layouts) != 1:
            raise Invalid("the parameters to train must all be of one type")
        names = [name for tree in self.trees for name in tree.names]
        if len(set(names)) < len(names):
            raise Invalid(f"two tensors of the model have one name: {', '.join(sorted(names))}")
        self.names = {name: name for name in names}
        self.layouts = [layout for tree in self.trees for layout in tree.layouts]
        vectors = [*self.trees[0].flatten(params), *self.trees[1].flatten(state)]
        self.replace([backend.put(vector, device) for vector in vectors])
        own = self.measure
        metrics = tuple((name, ById.wrap(f)) for name, f in own.metrics)
        wrapped = replace(own, loss=ById.wrap(own.function), metrics=metrics)
        self.program = program(backend, self._adapter, wrapped, *self.trees, shards, device.kind)
        self.looped = device.kind in LOOPED and 1 < shards <= ROOM // (self.size * self.parameters.dtype.itemsize)

    @property
    def vectors(self) -> list[Vector]:
        return [self._parameters, *self.state]

    def replace(self, vectors: Sequence[Vector]) -> None:
        self._parameters, *state = vectors
        self.state = tuple(state)

    def gradient(self, x: Tree, y: Tree, key: int, shard: int, training: bool = True) -> Vector:
        if self.looped and training:
            rows = self._loop(x, y, np.arange(length(y)).reshape(1, -1), [key], shard)
            return self.program.partial_sums(shard, shard + 1, self.shards, (1,), [rows])[0]
        compute = self.program.gradient if training else self.program.slope
        return compute(self._parameters, self.state, x, y, halves(key, np.uint32), np.int32(shard))

    def single(self, batch: Batch, shard: int) -> Vector:
        if not (self.looped and (resident := batch.pass_.feed.resident)):
            return super().single(batch, shard)
        index = batch.pass_.order[slice(*batch.spans[shard])].reshape(1, -1)
        return self._loop(*resident[self.device], index, [batch.keys[shard]], shard)[0]

    def tasks(self, batch: Batch, shards: range, sums: ReplicaSums) -> list[Task]:
        resident = batch.pass_.feed.resident
        if not (self.looped and shards and resident):
            return super().tasks(batch, shards, sums)

        def compute() -> None:
            """One launch for all neighbours of one size: there are at most two sizes."""
            results, counts = [], []
            for size, alike in groupby(shards, lambda shard: batch.spans[shard][1] - batch.spans[shard][0]):
                these = list(alike)
                lo, hi = batch.spans[these[0]][0], batch.spans[these[-1]][1]
                index, keys = batch.pass_.order[lo:hi].reshape(-1, size), [batch.keys[shard] for shard in these]
                results.append(self._loop(*resident[self.device], index, keys, these[0]))
                counts.append(len(these))
            lo, hi, n = shards.start, shards.stop, len(batch.spans)
            vectors = self.program.partial_sums(lo, hi, n, tuple(counts), results)
            for span, vector in zip(parts(lo, hi, n), vectors, strict=True):
                sums.add(span, vector)

        return [compute]

    def _loop(self, x: Tree, y: Tree, index: Numbers, keys: Sequence[int], first: int) -> Array:
        """One launch for shards of one size, whose examples are these rows of x and y."""
        count, size = index.shape
        padded = np.zeros((self.shards, size), np.int32)
        padded[:count] = index
        words = np.zeros((self.shards, 2), np.uint32)
        words[:count] = in_words(keys)
        given = self._parameters, self.state, x, y, padded, words
        return self.program.gradients(*given, np.int32(first), np.int32(count))

    def inside(self, x: Tree, y: Tree) -> tuple[list[str], list[str]]:
        given = self._parameters, self.state, x, y, halves(0, np.uint32), np.int32(0)
        used = self.program.gradient.trace(*given).jaxpr
        anew = jax.make_jaxpr(lambda *given: self.program.shard(*given))(*given)
        names, constants = self.trees[0].names, set(map(id, used.consts))
        strangers = [repr(name) for name, leaf in zip(names, self._given, strict=True) if leaf in constants]
        return strangers, [hashed(*one.consts, text=ADDRESS.sub("", str(one))) for one in (used, anew)]

    def evaluate(self, x: Tree, y: Tree, key: int) -> Vector:
        return self.program.evaluate(self._parameters, self.state, x, y, halves(key, np.uint32))

    def assign(self, parameters: Vector) -> None:
        self._parameters = parameters

    def advance(self, total: Vector, examples: int) -> None:
        if self.state:
            self.state = self.program.advance(self.state, total, self._parameters.dtype.type(examples))

    def fingerprint(self) -> Vector:
        return self.program.fingerprint((self._parameters, *self.state))

    def tensors(self, vectors: Sequence[Vector] | None = None) -> Tensors:
        return {name: on_host(array) for name, array in super().tensors(vectors).items()}

    def model_of(self, tensors: Tensors) -> Any:
        params, state = jax.device_put([tree.filled(tensors) for tree in self.trees], self._native)
        return self._adapter.model(params, state)


def in_words(keys: Any) -> Numbers:
    """Many keys at once, as `halves` has each of them."""
    numbers = np.array(keys, np.uint64)
    return np.stack([numbers >> np.uint64(32), numbers & np.uint64(0xFFFFFFFF)], -1).astype(np.uint32)
