"""Many steps in one launch, for replicas that all live on one GPU: neither Python nor the host has a part in them.

Every piece of a step is compiled apart from the others (`apart`), with the arguments that it has when steps are made one by
one. So it has the same bits; the first launch of each kind is compared with steps made alone, all the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from samestep.backends.jax import replica as replicas
from samestep.backends.jax.fingerprint import fingerprint
from samestep.backends.jax.program import GPU, Program, apart, jitted, taken
from samestep.backends.jax.updater import JaxUpdater
from samestep.backends.losses import SUM, WEIGHTED
from samestep.backends.steps import Made, Steps
from samestep.backends.updaters import Mean
from samestep.errors import told
from samestep.optimizers.updating import FlatUpdater
from samestep.shards import cut

if TYPE_CHECKING:
    from samestep.data.feed import Batch, Pass
    from samestep.training.replicas import Replicas

Array = Any
Vector = Any
MOST = 256  # steps in one launch
# How shards come into the program: one after the other in its text ("unrolled"), or in a loop ("looped"). Unrolled ones are
# computed side by side, but take so many times as long to compile.
WAY, MOST_UNROLLED = "unrolled", 16
# CUDA graphs with the loops inside, and side by side what can be so: LeNet with 8 shards takes 0.40 ms a
# step on an H200, and 0.84 in turn. Without graphs the host is asked before every turn of a loop.
GRAPHS = {
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_graph_min_graph_size": 1,
}

pick, put = partial(jax.lax.dynamic_index_in_dim, keepdims=False), partial(jax.lax.dynamic_update_index_in_dim, axis=0)


class Compiled:
    """A function, compiled: its numbers stay float64 until they meet a vector, as they would without compiling."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self._program = function, jax.jit(function, compiler_options=GPU)

    def __call__(self, *args: Any) -> Any:
        with jax.enable_x64(True):
            return self._program(*args)


@dataclass(frozen=True)
class Firsts:
    """The first numbers of arrays on a device, as one vector. A slice there would be compiled for every length."""

    pieces: Sequence[tuple[Array, int]]

    def __array__(self, *_: Any, **__: Any) -> Any:
        return np.concatenate([np.asarray(array).reshape(-1)[:n] for array, n in self.pieces])

    def copy_to_host_async(self) -> None:
        for array, _ in self.pieces:
            array.copy_to_host_async()


@dataclass(frozen=True)
class Launch:
    """A program that makes up to MOST steps of batches whose shards have these sizes."""

    program: Program
    mean: Mean | None  # if the optimizer is optax's
    update: Any
    replicas: int
    sizes: tuple[int, ...]
    wide: bool  # whether the user has 64 bits
    way: str

    kind = property(lambda self: self.program.kind)

    @partial(jitted, more=GRAPHS)
    def steps(
        self, vectors: Any, states: Any, data: Any, order: Array, keys: Array, rates: Array, edges: Array, start: Array,
        n: Array, t: Array, over: Array, examples: Array,
    ) -> Any:  # fmt: skip
        """n steps, the first of them after t updates, from `start` on in the order of the examples."""
        program, count = self.program, 2 * self.program.shards + self.program.measure.more
        advance = program.advance.__wrapped__

        def step(i: Array, carry: Any) -> Any:
            vectors, states, numbers, prints = carry
            total = self.total(vectors, data, order, start + i * sum(self.sizes), pick(keys, i), edges)
            divisor = total[len(total) - program.measure.more :][:1] if program.measure.kind == WEIGHTED else over
            changes = total
            if program.measure.kind == WEIGHTED:  # a batch of weight zero changes nothing
                changes = program.backend.choose(divisor, total, total * 0)
            new, lr = [], pick(rates, i)
            for (x, *state), slots in zip(vectors, states, strict=True):
                x, slots = self.updated(x, slots, total, divisor, lr, t + i)
                moved = apart(advance, tuple(state), changes, examples, wide=self.wide) if state else ()
                new.append(((x, *moved), slots))
            vectors, states = zip(*new, strict=True)
            print_ = apart(fingerprint, vectors[0], wide=self.wide)
            return vectors, states, put(numbers, total[len(total) - count :], i), put(prints, print_, i)

        numbers, prints = jnp.zeros((MOST, count), vectors[0][0].dtype), jnp.zeros((MOST, 2), jnp.uint32)
        return jax.lax.fori_loop(0, n, step, (vectors, states, numbers, prints))

    def total(self, vectors: Any, data: Any, order: Array, start: Array, keys: Array, edges: Array) -> Vector:
        """The sum over all shards of a batch. Each is computed with the weights of its replica."""
        program, n = self.program, len(self.sizes)
        owners = [i for i, (lo, hi) in enumerate(cut(n, self.replicas)) for _ in range(lo, hi)]

        def one(weights: Sequence[Vector], shard: Any, first: Any, size: int) -> Vector:
            index = jax.lax.dynamic_slice_in_dim(order, first, size)
            given = (weights[0], tuple(weights[1:]), *taken(data, index), pick(keys, shard), jnp.int32(shard))
            return apart(program.shard, *given, wide=self.wide)

        if n == 1 or self.way == "unrolled":
            places = enumerate(zip(np.cumsum((0, *self.sizes)).tolist(), self.sizes, owners, strict=False))
            rows = [one(vectors[i], shard, start + at, size)[None] for shard, (at, size, i) in places]
        else:
            stacks, owner, lo = [jnp.stack(same) for same in zip(*vectors, strict=True)], jnp.array(owners), 0
            rows = [jnp.zeros((n, program.size), stacks[0].dtype)]
            for run, (size, alike) in enumerate(groupby(self.sizes)):
                hi = lo + len(list(alike))

                def turn(shard: Array, table: Array, start: Array = start - lo * size, size: int = size) -> Array:
                    row = one([pick(stack, pick(owner, shard)) for stack in stacks], shard, start + shard * size, size)
                    return put(table, row, shard)

                rows = [jax.lax.fori_loop(edges[run], edges[run + 1], turn, *rows)]
                lo, start = hi, start + (hi - lo) * size
        counts = tuple(map(len, rows))
        (total,) = apart(lambda rows: program.partial_sums.__wrapped__(0, n, n, counts, rows), rows, wide=self.wide)
        return total

    def updated(self, x: Vector, state: Any, total: Vector, over: Array, lr: Array, t: Array) -> tuple[Vector, Any]:
        """New weights and a new state of the optimizer. Numbers are traced as Python's, which have no type of their own."""
        weighted = self.program.measure.kind == WEIGHTED
        if self.mean is None:
            like = x, state, total, over if weighted else 1, 0.1, 0, None
            found: tuple[Vector, Any] = apart(self.update, x, state, total, over, lr, t, None, like=like, wide=True)
            return found
        divisor = over[0] if weighted else over  # a number of the host's, which a weight becomes there
        gradient = apart(self.mean, total, divisor, like=(total, 1.0 if weighted else 1), wide=True)
        new = apart(self.update, x, gradient, state, lr.astype(x.dtype), wide=self.wide)
        if weighted:
            new = jax.tree.map(lambda now, before: jnp.where(divisor != 0, now, before), new, (x, state))
        return new[0], new[1]


launch = lru_cache(maxsize=16)(Launch)


def can_launch(group: Replicas) -> bool:
    """Whether the replicas of a group are all on one device that takes many steps at once, with an optimizer that can."""
    first, updater = group.replicas[0], group.updaters[0]
    there = group.world.size == 1 and {one.device for one in group.replicas} == {first.device}
    there = there and first.device.kind in replicas.LOOPED and (first.looped or first.shards == 1)
    known = isinstance(updater._update if isinstance(updater, FlatUpdater) else updater, (Compiled, JaxUpdater))
    return there and known and not jax.config.jax_disable_jit


class JaxSteps(Steps):
    def __init__(self, group: Replicas) -> None:
        self.group, self.backend = group, group.backend
        self._same: dict[tuple[int, ...], bool] = {}  # sizes of shards → whether a launch has the bits of a step alone
        self._order: tuple[Pass | None, Array] = None, None  # a pass, and its order on the device

    def most(self, pass_: Pass) -> int:
        return MOST if pass_.feed.resident else 0

    def __call__(self, batches: Sequence[Batch], rates: Sequence[float], t: int) -> list[Made]:
        found, done = list[tuple[Any, Any]](), 0
        for sizes, alike in groupby(batches, lambda batch: tuple(hi - lo for lo, hi in batch.spans)):
            these = list(alike)
            given = these, rates[done : done + len(these)], t + done
            if sizes not in self._same:
                self._same[sizes] = self._compared(sizes, these[:2], given[1][:2], t + done)
            found += self._launched(sizes, *given) if self._same[sizes] else self._alone(*given)
            done += len(these)
        numbers, prints = zip(*found, strict=True)
        return [(Firsts(numbers), Firsts(prints))]

    def _launched(self, sizes: tuple[int, ...], batches: Sequence[Batch], rates: Sequence[float], t: int) -> Any:
        group, first, batch = self.group, self.group.replicas[0], batches[0]
        if self._order[0] is not batch.pass_:
            index = self.backend.index(batch.pass_.order, first.device)
            self._order = batch.pass_, self.backend.put(index, first.device)
        updater, n = group.updaters[0], len(batches)
        mean = updater._mean.function if isinstance(updater, JaxUpdater) else None
        update = updater._update.__wrapped__ if mean else updater._update.function
        wide = bool(jax.config.jax_enable_x64)
        way = WAY if len(sizes) <= MOST_UNROLLED else "looped"
        program = launch(first.program, mean, update, len(group.replicas), sizes, wide, way)
        keys, table = np.zeros((MOST, first.shards, 2), np.uint32), np.zeros(MOST)
        keys[:n], table[:n] = replicas.in_words([batch.keys for batch in batches]), rates
        edges = np.cumsum([0, *(len(list(alike)) for _, alike in groupby(sizes))])  # of runs of shards of one size
        over = 1 if first.measure.kind == SUM else batch.examples
        vectors, states = zip(*self._state(), strict=True)
        with jax.enable_x64(True):
            vectors, states, numbers, prints = program.steps(
                vectors, states, list(batch.pass_.feed.resident[first.device]), self._order[1], keys, table,
                edges, batch.spans[0][0], n, t, over, first.parameters.dtype.type(batch.examples),
            )  # fmt: skip
        self._put(list(zip(vectors, states, strict=True)))
        return [((numbers, n * numbers.shape[1]), (prints, n * 2))]

    def _alone(self, batches: Sequence[Batch], rates: Sequence[float], t: int) -> Any:
        """The same steps, made one by one."""
        for i, (batch, lr) in enumerate(zip(batches, rates, strict=True)):
            numbers, print_ = self.group.step(batch, lr, t + i), self.group.replicas[0].fingerprint()
            yield (numbers, len(numbers)), (print_, 2)

    def _compared(self, sizes: tuple[int, ...], batches: Sequence[Batch], rates: Sequence[float], t: int) -> bool:
        """Whether steps have the same bits in a launch and alone. Afterwards everything is as before.

        Two of them, if there are so many: in the first one, an optimizer's state may be zero, which hides differences.
        """
        before, found = self._state(), list[list[bytes]]()
        why = "its bits are others than those of steps alone"
        for make in (self._alone, partial(self._launched, sizes)):
            try:
                made = [Firsts(one) for one in zip(*make(batches, rates, t), strict=True)]
                found.append([np.asarray(leaf).tobytes() for leaf in [*made, *jax.tree.leaves(self._state())]])
            except Exception as error:
                if not found:
                    raise
                found.append([])
                why = told(error)
            finally:
                self._put(before)
        if found[0] != found[1]:
            warnings.warn(f"steps are made one by one, not many in one launch, and so slower: {why}", stacklevel=2)
        return found[0] == found[1]

    def _state(self) -> list[tuple[Any, Any]]:
        """All that a step changes, replica by replica."""
        both = zip(self.group.replicas, self.group.updaters, strict=True)
        return [(tuple(replica.vectors), updater.state) for replica, updater in both]

    def _put(self, state: Sequence[tuple[Any, Any]]) -> None:
        for replica, updater, (vectors, own) in zip(self.group.replicas, self.group.updaters, state, strict=True):
            replica.replace(vectors)
            updater.state = own
