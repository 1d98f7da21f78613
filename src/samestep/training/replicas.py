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
from samestep.backends.losses import SUM, WEIGHTED, Measure
from samestep.backends.times import each_timed, timed, timed_as
from samestep.backends.updaters import Clamp
from samestep.data.feed import READ_AHEAD, Batch, Feed, Pass
from samestep.errors import Invalid
from samestep.optimizers.rules import Optimizer
from samestep.optimizers.updating import FlatUpdater
from samestep.processes.exchange import Across
from samestep.processes.world import World
from samestep.runs.checkpoint import pack, unpack
from samestep.shards import Span, cut, cut_pass, parts, tree_sum
from samestep.training.step import Step, StepAcross
from samestep.training.stretch import Threads

if TYPE_CHECKING:
    from samestep.backends.base import Backend, Replica, Vector
    from samestep.backends.steps import Made, Steps
    from samestep.backends.updaters import Updater
    from samestep.devices import Device
    from samestep.training.trainer import Trainer


@dataclass(frozen=True)
class Plan:
    """Who computes what in a step of n shards."""

    shares: Sequence[range]  # the shards of each replica of this process
    held: Sequence[Sequence[Span]]  # the parts of the sum that each process will hold


@dataclass(frozen=True)
class Last:
    """The last numbers of a vector, or the first ones among them."""

    count: int
    first: int | None = None

    def __call__(self, vector: Vector) -> Vector:
        return vector[len(vector) - self.count :][: self.first]


class Replicas:
    """The group of a run: its replicas, each with its optimizer. Of replicas in other processes, only the count is known."""

    def __init__(
        self, settings: Trainer, backend: Backend, model: Any, measure: Measure, devices: Sequence[Device], world: World
    ) -> None:
        """With a replica of the model on each device."""
        self.settings, self.backend, self.measure, self.world = settings, backend, measure, world
        shards, self.weighted = settings.shards, measure.kind == WEIGHTED
        self.replicas = [backend.replica(model, measure, d, shards, settings.capture) for d in devices]
        counts = [int(text) for text in world.collect(str(len(devices)).encode())]
        self.processes = list(pairwise(accumulate(counts, initial=0)))  # the replicas [lo, hi) of each process
        self.size = self.processes[-1][1]
        if self.size > shards:
            need = f"{world.size} processes with {self.size} devices in all need at least {self.size} shards"
            raise Invalid(f"{need}, got shards={shards}: raise shards or use fewer")
        self._kind_of_step = Step if world.size == 1 else StepAcross
        self.numbers = backend.compiled(Last(self.replicas[0].numbers))
        self._weight = backend.compiled(Last(measure.more, 1))

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
        settings, optimizer = self.settings, self.settings.optimizer
        alone = len(self.replicas) == 1 and not settings.compile  # compiled code must not depend on their number
        limit = settings.gradient_clip_val
        clip = Clamp(limit) if limit and settings.gradient_clip_algorithm == "value" else limit
        if isinstance(optimizer, Optimizer):
            given = clip, alone, settings.groups, self.weighted
            return [FlatUpdater(optimizer, replica, *given) for replica in self.replicas]
        return [self.backend.updater(optimizer, replica, clip) for replica in self.replicas]

    def plan(self, n: int) -> Plan:
        share = cut(n, self.size)
        mine = [range(lo, hi) for lo, hi in share[slice(*self.processes[self.world.rank])]]
        return Plan(mine, [parts(share[lo][0], share[hi - 1][1], n) for lo, hi in self.processes])

    def spans_here(self, batches: Sequence[Sequence[Span]], joined: bool = False) -> list[Span]:
        """The shards that this process computes in these batches, in the order in which it asks for their examples.

        `joined`: those that one replica computes of a batch, as one.
        """
        shares = [(batch, share) for batch in batches for share in self.plan(len(batch)).shares if share]
        if joined:
            return [(batch[share[0]][0], batch[share[-1]][1]) for batch, share in shares]
        return [batch[shard] for batch, share in shares for shard in share]

    def follow(self) -> None:
        """Take the weights of rank 0."""
        if self.world.size > 1:
            content = self.world.broadcast(b"".join(pack({}, self.replicas[0].tensors())))
            for replica in self.replicas:
                replica.load(unpack(content, "the model of rank 0").tensors)

    def sums(self, batch: Batch) -> list[Vector]:
        """The sum over all shards of a batch, on the device of each replica."""
        # Shards: each replica computes its own, and adds them up along the tree as far as it can.
        step = self._kind_of_step(self, len(batch.spans))
        tasks = [task for mine in step.tasks(batch) for task in mine]
        # Tree and exchange: the sum over all shards, on every device.
        return step.totals(tasks)

    @cached_property
    def several(self) -> Steps | None:
        """What makes several steps in one call, if this group has that."""
        return self.backend.steps(self) or Threads.of(self) if self.settings.capture else None

    def most(self, pass_: Pass) -> int:
        """How many steps over the examples of a pass `steps` may be asked for."""
        return max(1, self.several.most(pass_)) if self.several else 1

    def steps(self, batches: Sequence[Batch], rates: Sequence[float], t: int) -> list[Made]:
        """Make updates, the first after t updates."""
        if self.several and self.several.most(batches[0].pass_):
            with self.backend.explained(), timed("steps", steps=len(batches)):
                return self.several(batches, rates, t)
        return [self.one(batches[0], rates[0], t)]

    def one(self, batch: Batch, lr: float, t: int) -> Made:
        """Make one update."""
        return self.step(batch, lr, t), self.replicas[0].fingerprint()

    @timed_as("step")
    def step(self, batch: Batch, lr: float, t: int) -> Vector:
        """Make the update after t updates. Returns [loss of each shard | hits of each shard | more], on a device."""
        return self.updated(self.sums(batch), batch.examples, lr, t)

    def updated(self, totals: Sequence[Vector], examples: int, lr: float, t: int) -> Vector:
        """Update every replica from the sum over all shards. Returns the numbers of the step."""
        # Update: the same on every replica.
        z = self.noise(t)
        tasks = [partial(self.update, i, total, examples, lr, t, z) for i, total in enumerate(totals)]
        with timed("update"):
            self.backend.map(each_timed("update", tasks))
        # Numbers: a copy, so that the rest of the vector can be freed.
        return self.backend.concat([self.numbers(totals[0])])

    def update(self, i: int, total: Vector, examples: int, lr: Any, t: Any, z: Any) -> None:
        """Update replica i."""
        replica, backend = self.replicas[i], self.backend
        z = None if z is None else backend.put(z, replica.device)
        over = self._over(total, examples)
        self.updaters[i].follow(total, over, lr, t, z)
        if self.weighted and len(replica.layouts) > 1:  # a batch of weight zero changes nothing
            total = backend.choose(over, total, backend.zeros_like(total))
        replica.advance(total, examples)

    def _over(self, total: Vector, examples: int) -> Any:
        """What the sum over a batch is divided by."""
        return self._weight(total) if self.weighted else 1 if self.measure.kind == SUM else examples

    def gradient(self, batch: Batch) -> Vector:
        """The gradient of the loss of a batch at the weights of now, on the first device. Nothing is changed."""
        total = self.sums(batch)[0]
        return total[: self.replicas[0].layouts[0].size] / self._over(total, batch.examples)

    def noise(self, t: int) -> NDArray[Any] | None:
        """The noise that a noisy optimizer asks for, the same on every replica."""
        optimizer, layout = self.settings.optimizer, self.replicas[0].layouts[0]
        if not (isinstance(optimizer, Optimizer) and optimizer.noisy):
            return None
        z = draws.normal(self.settings.seed, t, layout.size, layout.dtype)
        for gap in layout.padding:
            z[gap] = 0  # padding is in no checkpoint, so it must stay zero
        return z

    @timed_as("evaluation")
    def evaluate(self, feed: Feed, classes: int | None) -> dict[str, float | None]:
        """Loss, accuracy and metrics over all examples of a feed, each counted once. All devices share the work. This waits."""
        n, settings = len(feed.examples), self.settings
        spans = [span for batch in cut_pass(n, settings.batch_size, settings.shards) for span in batch]
        pass_ = feed.start(np.arange(n), self.spans_here([spans]))
        batch = Batch(pass_, spans, draws.evaluation_keys(settings.seed, len(spans)))

        def compute(replica: Replica, shard: int) -> Vector:
            x, y = batch.shard(shard, replica.device)
            return replica.evaluate(x, y, batch.keys[shard])

        shares = zip(self.replicas, self.plan(len(spans)).shares, strict=True)
        work = [(replica, shard) for replica, shards in shares for shard in shards]
        rows, most = [], READ_AHEAD if feed.here else max(len(work), 1)
        for start in range(0, len(work), most):
            piece = work[start : start + most]
            pass_.prepare([spans[shard] for _, shard in piece])
            rows += self.backend.map(each_timed("compute", [partial(compute, *place) for place in piece]))
        home = self.replicas[0].device
        mine: Any = self.backend.fetch([self.backend.put(row, home) for row in rows]) if rows else []
        everybody = self.world.collect(np.asarray(mine, np.float64).tobytes())
        # A row has [loss, hits, more] of a shard.
        table = np.frombuffer(b"".join(everybody), np.float64).reshape(len(spans), -1)
        loss, hits, *more = (tree_sum(column) for column in table.T.tolist())
        return self.summary(loss, None if classes is None else hits, more, n)

    def summary(self, loss: float, hits: float | None, more: Sequence[float], n: int) -> dict[str, float | None]:
        """Loss, accuracy and metrics from sums over n examples."""
        weights, sums = more[self.weighted + 1 :: 2], more[self.weighted :: 2]
        over = {WEIGHTED: more[0] if self.weighted else 0, SUM: 1}.get(self.measure.kind, n)
        found: dict[str, float | None] = {
            "loss": loss / over if over else 0.0, "accuracy": None if hits is None else hits / n}  # fmt: skip
        for (name, _), total, weight in zip(self.measure.metrics, sums, weights, strict=True):
            found[name] = total / weight if weight else None
        return found

    @timed_as("checks")
    def fingerprints(self) -> list[int]:
        """The fingerprint of every replica of the group. This waits."""
        values = self.backend.map([replica.fingerprint for replica in self.replicas])
        mine = b"".join(self.backend.get(value).tobytes() for value in values)
        return [int(value) for value in np.frombuffer(b"".join(self.world.collect(mine)), np.uint64)]

    def close(self) -> None:
        if several := self.__dict__.pop("several", None):  # it was made
            several.release()
        self.sender.shutdown(wait=False, cancel_futures=True)
