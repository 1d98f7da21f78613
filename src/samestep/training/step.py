"""One step, and one evaluation, over the replicas of a group.

g_s   = gradient of shard s, on whichever device holds it
G     = tree(g_0, ..., g_{S-1})
x     = optimizer(x, G / B, lr)      the same on every replica
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from samestep import draws
from samestep.errors import Invalid
from samestep.optimizers.updating import FlatUpdater, compiled, mean
from samestep.processes.exchange import Across, exchange
from samestep.processes.world import Alone, World
from samestep.runs.checkpoint import pack, unpack
from samestep.shards import Fold, Span, cut, parts

if TYPE_CHECKING:
    from samestep.backends import Backend, Replica, Vector
    from samestep.data.examples import Pass


def tail(size: int, total: Vector) -> Vector:
    return total[-size:]


class Group:
    """The replicas of a run, each with its optimizer: those of this process, and what is known of those of others."""

    def __init__(
        self,
        backend: Backend,
        replicas: Sequence[Replica],
        optimizer: Any,
        shards: int,
        clip: float = 0.0,
        seed: int = 0,
        world: World | None = None,
    ) -> None:
        self.backend, self.replicas = backend, list(replicas)
        self.world: World = world or Alone()
        counts = [int(text) for text in self.world.collect(str(len(self.replicas)).encode())]
        self.processes = list(pairwise(accumulate(counts, initial=0)))  # the replicas [lo, hi) of the group in each
        self.size = self.processes[-1][1]
        if self.size > shards:
            raise Invalid(
                f"{self.world.size} processes with {self.size} devices in all need at least {self.size} shards, got "
                f"shards={shards}: raise shards or use fewer"
            )
        self._sender = ThreadPoolExecutor(1, "samestep-exchange") if self.world.size > 1 else None
        self.optimizer, self.shards, self.clip, self.seed = optimizer, shards, clip, seed
        self.noisy = bool(getattr(optimizer, "noisy", False))
        self._plans: dict[int, tuple[list[range], list[list[Span]]]] = {}

    @cached_property
    def across(self) -> Across:
        """The sum over all processes."""
        first = self.replicas[0]
        return Across(self.world, self.backend, first.device, first.parameters, first.size)

    def plan(self, n: int) -> tuple[list[range], list[list[Span]]]:
        """Which of n shards each replica of this process computes, and which parts of their sum each process will hold."""
        if n not in self._plans:
            share = cut(n, self.size)
            mine = [range(lo, hi) for lo, hi in share[slice(*self.processes[self.world.rank])]]
            self._plans[n] = mine, [parts(share[lo][0], share[hi - 1][1], n) for lo, hi in self.processes]
        return self._plans[n]

    def follow(self) -> None:
        """Take the weights that rank 0 has."""
        if self.world.size > 1:
            content = self.world.broadcast(b"".join(pack({}, self.replicas[0].tensors())))
            for replica in self.replicas:
                replica.load(unpack(content, "the model of rank 0").tensors)

    @cached_property
    def updaters(self) -> list[Any]:
        """Made when they are first asked for: an evaluation needs none, and may be of another model than the optimizer's."""
        flat = hasattr(self.optimizer, "slots")
        return [
            FlatUpdater(self.optimizer, r, self.backend, self.clip, alone=len(self.replicas) == 1)
            if flat
            else self.backend.updater(self.optimizer, r)
            for r in self.replicas
        ]

    @cached_property
    def whole(self) -> bool:
        """Whether a step is one shard, all of whose step one replica can make in one go."""
        return self.shards == 1 and bool(getattr(self.updaters[0], "whole", False))

    def step(self, pass_: Pass, spans: Sequence[Span], keys: Sequence[int], lr: float, t: int) -> Vector:
        """Make the update after t updates, from the shards of one batch.

        Returns [loss of each shard | hits of each shard], on a device.
        """
        if self.whole:
            (numbers,) = self.backend.map([partial(self.updaters[0].step, pass_, spans[0], keys[0], lr, t)])
            return numbers
        n, examples = len(spans), spans[-1][1] - spans[0][0]
        step = Step(self, n)

        def compute(replica: Replica, i: int, shard: int) -> None:
            x, y = pass_.shard(spans[shard], replica.device)
            if self._sender and len(step.bands) > 1:
                replica.gradient(x, y, keys[shard], shard, partial(step.deliver, i, (shard, shard + 1)))
            else:
                step.deliver(i, (shard, shard + 1), 0, replica.gradient(x, y, keys[shard], shard))

        def launch(replica: Any, i: int, shards: range) -> None:
            for span, vector in replica.gradients(pass_, spans, keys, shards).items():
                step.deliver(i, span, 0, vector)

        tasks: list[Any] = []
        for i, (replica, shards) in enumerate(zip(self.replicas, step.shards, strict=True)):
            if shards and pass_.feed.resident and getattr(replica, "looped", False):
                tasks.append(partial(launch, replica, i, shards))
            else:
                tasks += [partial(compute, replica, i, shard) for shard in shards]
        if self._sender:
            sending = self._sender.submit(step.send)
            try:
                self.backend.map(tasks)
            except BaseException:
                step.give_up()
                raise
            total = sending.result()  # waits for the other processes
            totals = [self.across.put(total, replica.device) for replica in self.replicas]
        else:
            self.backend.map(tasks)
            devices = [replica.device for replica in self.replicas]
            held = [bands[0].parts for bands in step.folds]
            totals = exchange(self.backend, held, n, devices, self.replicas[0].size)
        z = self._noise(t) if self.noisy else None
        self.backend.map([partial(self._update, i, total, examples, lr, t, z) for i, total in enumerate(totals)])
        numbers = compiled(self.backend, tail)(2 * self.shards, totals[0])
        return self.backend.concat([numbers])  # a copy: the rest of the vector is let go

    def _update(self, i: int, total: Vector, examples: int, lr: float, t: int, z: Any) -> None:
        replica, updater = self.replicas[i], self.updaters[i]
        z = None if z is None else self.backend.put(z, replica.device)
        if isinstance(updater, FlatUpdater):
            updater.follow(total, examples, lr, t, z)
        else:
            about = self.backend, len(replica.parameters), self.clip, False
            updater(compiled(self.backend, mean)(about, total, examples), lr, t, z)
        replica.advance(total, examples)

    def _noise(self, t: int) -> NDArray[Any]:
        parameters = self.replicas[0].parameters
        dtype = str(parameters.dtype).rpartition(".")[2].rstrip("'>")  # MXNet's types are classes of NumPy
        z = draws.normal(self.seed, t, len(parameters), dtype)
        for gap in self.replicas[0].gaps:
            z[gap] = 0  # in no checkpoint, so it must not move
        return z

    def evaluate(self, pass_: Pass, spans: Sequence[Span], keys: Sequence[int]) -> NDArray[np.float64]:
        """[loss, hits] of every shard of a pass, each example once, all devices sharing the work. This waits."""

        def compute(replica: Replica, shard: int) -> Vector:
            x, y = pass_.shard(spans[shard], replica.device)
            return replica.evaluate(x, y, keys[shard])

        shares = zip(self.replicas, self.plan(len(spans))[0], strict=True)
        tasks = [partial(compute, replica, shard) for replica, shards in shares for shard in shards]
        rows, home = self.backend.map(tasks), self.replicas[0].device
        table: Any = (
            self.backend.get(self.backend.concat([self.backend.place(row, home) for row in rows]))
            if rows
            else np.empty(0)
        )
        everybody = self.world.collect(np.asarray(table, np.float64).tobytes())
        return np.frombuffer(b"".join(everybody), np.float64).reshape(-1, 2)

    def fingerprints(self) -> list[int]:
        """The fingerprint of every replica of the group. This waits."""
        values = self.backend.map([replica.fingerprint for replica in self.replicas])
        mine = b"".join(self.backend.get(value).tobytes() for value in values)
        return [int(value) for value in np.frombuffer(b"".join(self.world.collect(mine)), np.uint64)]

    def close(self) -> None:
        if self._sender:
            self._sender.shutdown(wait=False, cancel_futures=True)


class Step:
    """The sums of one step while it is computed, band by band.

    A band is a range of the vector. In a run of several processes a band is sent as soon as the last shard of this process
    has produced it, while the backward pass still computes the others: last layers first, in one order in all processes.
    """

    def __init__(self, group: Group, n: int) -> None:
        self.group, self.n = group, n
        first = group.replicas[0]
        self.bands = first.bands if group.world.size > 1 else [(0, first.size)]
        self.shards, self.held = group.plan(n)
        self.folds: list[list[Fold[Vector]]] = [[Fold(n, group.backend.add) for _ in self.bands] for _ in self.shards]
        self._missing = [sum(map(len, self.shards))] * len(self.bands)
        self._ready = [threading.Event() for _ in self.bands]
        self._lock = threading.Lock()
        self._given_up = False
        if not self._missing[0]:
            self._all_ready()

    def deliver(self, i: int, span: Span, band: int, vector: Vector) -> None:
        """Add a band of a part that replica i has computed, mostly one shard."""
        self.folds[i][band].add(span, vector)
        with self._lock:
            self._missing[band] -= span[1] - span[0]
            if not self._missing[band]:
                self._ready[band].set()

    def send(self) -> Vector:
        """Exchange every band with the other processes once it is ready; the sum over all shards of all processes."""
        total: Vector = None
        for band, (lo, hi) in enumerate(self.bands):
            self._ready[band].wait()
            if self._given_up:
                break
            parts = {span: vector for bands in self.folds for span, vector in bands[band].parts.items()}
            total = self.group.across.sum(parts, self.held, self.n, lo, hi)
        return total

    def give_up(self) -> None:
        """A shard failed: what is not ready will not come."""
        self._given_up = True
        self._all_ready()

    def _all_ready(self) -> None:
        for event in self._ready:
            event.set()
