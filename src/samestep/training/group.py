"""The replicas of a run as one group: one step, and one evaluation.

g_s   = gradient of shard s, on whichever device holds it
G     = tree(g_0, ..., g_{S-1})
x     = optimizer(x, G / B, lr)      the same on every replica
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from samestep import draws
from samestep.data.feed import Batch, Feed
from samestep.errors import Invalid
from samestep.optimizers.rules import Optimizer
from samestep.optimizers.updating import FlatUpdater
from samestep.processes.exchange import Across
from samestep.processes.world import World
from samestep.runs.checkpoint import pack, unpack
from samestep.shards import Span, cut, cut_pass, parts, tree_sum
from samestep.signals import heard
from samestep.training.step import Step, StepAcross

if TYPE_CHECKING:
    from samestep.backends.base import Backend, Replica, Shape, Vector
    from samestep.backends.updaters import Updater
    from samestep.data.examples import Arrays, Source
    from samestep.devices import Device
    from samestep.training.trainer import Trainer


def probe(backend: Backend, model: Any, loss: Any, examples: Arrays | Source) -> Shape:
    """What the model does with the first example."""
    x, y = examples.read(np.arange(1))
    with heard(False):  # but not while the model itself computes
        return backend.probe(model, loss, x, y, f"{examples.name} x")


@dataclass(frozen=True)
class Plan:
    """Who computes what in a step of n shards."""

    shares: Sequence[range]  # the shards of each replica of this process
    held: Sequence[Sequence[Span]]  # the parts of the sum that each process will hold


@dataclass(frozen=True)
class Last:
    """The last numbers of a vector."""

    count: int

    def __call__(self, vector: Vector) -> Vector:
        return vector[-self.count :]


class Group:
    """The replicas of a run, each with its optimizer. Of replicas in other processes, only the count is known."""

    def __init__(
        self, settings: Trainer, backend: Backend, model: Any, devices: Sequence[Device], world: World
    ) -> None:
        """With a replica of the model on each device."""
        self.settings, self.backend, self.world, shards = settings, backend, world, settings.shards
        self.replicas = [backend.replica(model, settings.loss, d, shards, settings.capture) for d in devices]
        counts = [int(text) for text in world.collect(str(len(devices)).encode())]
        self.processes = list(pairwise(accumulate(counts, initial=0)))  # the replicas [lo, hi) of each process
        self.size = self.processes[-1][1]
        if self.size > shards:
            need = f"{world.size} processes with {self.size} devices in all need at least {self.size} shards"
            raise Invalid(f"{need}, got shards={shards}: raise shards or use fewer")
        self._kind_of_step = Step if world.size == 1 else StepAcross
        self._numbers = backend.compiled(Last(2 * shards))

    @cached_property
    def across(self) -> Across:
        """Sums over the processes."""
        first = self.replicas[0]
        return Across(self.world, self.backend, first.device, first.parameters, first.size)

    @cached_property
    def sender(self) -> ThreadPoolExecutor:
        """The thread that exchanges sums with other processes while shards are computed."""
        return ThreadPoolExecutor(1, "samestep-exchange", initializer=self.backend.workers.prepare)

    @cached_property
    def updaters(self) -> list[Updater]:
        """Made on first use: an evaluation needs none, and its model may not be the optimizer's."""
        optimizer, clip, alone = self.settings.optimizer, self.settings.gradient_clip_val, len(self.replicas) == 1
        if isinstance(optimizer, Optimizer):
            return [FlatUpdater(optimizer, replica, clip, alone) for replica in self.replicas]
        return [self.backend.updater(optimizer, replica, clip) for replica in self.replicas]

    def plan(self, n: int) -> Plan:
        share = cut(n, self.size)
        mine = [range(lo, hi) for lo, hi in share[slice(*self.processes[self.world.rank])]]
        return Plan(mine, [parts(share[lo][0], share[hi - 1][1], n) for lo, hi in self.processes])

    def spans_here(self, batches: Sequence[Sequence[Span]]) -> list[Span]:
        """The shards that this process computes in these batches, in the order in which it asks for their examples."""
        return [batch[shard] for batch in batches for share in self.plan(len(batch)).shares for shard in share]

    def follow(self) -> None:
        """Take the weights of rank 0."""
        if self.world.size > 1:
            content = self.world.broadcast(b"".join(pack({}, self.replicas[0].tensors())))
            for replica in self.replicas:
                replica.load(unpack(content, "the model of rank 0").tensors)

    def step(self, batch: Batch, lr: float, t: int) -> Vector:
        """Make the update after t updates. Returns [loss of each shard | hits of each shard], on a device."""
        # Shards: each replica computes its own, and adds them up along the tree as far as it can.
        step = self._kind_of_step(self, len(batch.spans))
        work = zip(self.replicas, step.shares, step.sums, strict=True)
        tasks = [task for replica, shards, sums in work for task in replica.tasks(batch, shards, sums)]
        # Tree and exchange: the sum over all shards, on every device.
        totals = step.totals(tasks)
        # Update: the same on every replica.
        z = self._noise(t)
        self.backend.map([partial(self._update, i, total, batch.examples, lr, t, z) for i, total in enumerate(totals)])
        # Numbers: a copy, so that the rest of the vector can be freed.
        return self.backend.concat([self._numbers(totals[0])])

    def _update(self, i: int, total: Vector, examples: int, lr: float, t: int, z: Any) -> None:
        replica = self.replicas[i]
        z = None if z is None else self.backend.put(z, replica.device)
        self.updaters[i].follow(total, examples, lr, t, z)
        replica.advance(total, examples)

    def _noise(self, t: int) -> NDArray[Any] | None:
        """The noise that a noisy optimizer asks for, the same on every replica."""
        optimizer, layout = self.settings.optimizer, self.replicas[0].layouts[0]
        if not (isinstance(optimizer, Optimizer) and optimizer.noisy):
            return None
        z = draws.normal(self.settings.seed, t, layout.size, layout.dtype)
        for gap in layout.padding:
            z[gap] = 0  # padding is in no checkpoint, so it must stay zero
        return z

    def evaluate(self, feed: Feed, classes: int | None) -> tuple[float, float | None]:
        """Mean loss and accuracy over all examples of a feed, each counted once. All devices share the work. This waits."""
        n, settings = len(feed.examples), self.settings
        spans = [span for batch in cut_pass(n, settings.batch_size, settings.shards) for span in batch]
        pass_ = feed.start(np.arange(n), self.spans_here([spans]))
        batch = Batch(pass_, spans, draws.evaluation_keys(settings.seed, len(spans)))

        def compute(replica: Replica, shard: int) -> Vector:
            x, y = batch.shard(shard, replica.device)
            return replica.evaluate(x, y, batch.keys[shard])

        shares = zip(self.replicas, self.plan(len(spans)).shares, strict=True)
        rows = self.backend.map([partial(compute, replica, shard) for replica, shards in shares for shard in shards])
        home = self.replicas[0].device
        mine: Any = self.backend.fetch([self.backend.put(row, home) for row in rows]) if rows else []
        everybody = self.world.collect(np.asarray(mine, np.float64).tobytes())
        table = np.frombuffer(b"".join(everybody), np.float64).reshape(-1, 2)  # [loss, hits] of every shard
        return tree_sum(table[:, 0].tolist()) / n, None if classes is None else float(table[:, 1].sum()) / n

    def fingerprints(self) -> list[int]:
        """The fingerprint of every replica of the group. This waits."""
        values = self.backend.map([replica.fingerprint for replica in self.replicas])
        mine = b"".join(self.backend.get(value).tobytes() for value in values)
        return [int(value) for value in np.frombuffer(b"".join(self.world.collect(mine)), np.uint64)]

    def close(self) -> None:
        self.sender.shutdown(wait=False, cancel_futures=True)
