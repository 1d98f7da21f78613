"""The sums of one step: the vectors of all shards are added along the tree, and every replica gets the result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from samestep.backends.times import each_timed, timed
from samestep.processes.exchange import exchange
from samestep.shards import Fold, Span, cut

if TYPE_CHECKING:
    from samestep.backends.base import Vector
    from samestep.backends.replica import Task
    from samestep.data.feed import Batch
    from samestep.training.replicas import Replicas

Tell = Callable[[int, Span], None]  # called after each addition, with its band and its shards


@dataclass(frozen=True)
class ReplicaSums:
    """Where one replica adds up the vectors of its shards, band by band: a band is a range of the vector."""

    bands: Sequence[Span]
    folds: Sequence[Fold[Vector]]  # one for each band
    tell: Tell

    def add(self, span: Span, vector: Vector, band: int = 0) -> None:
        self.folds[band].add(span, vector)
        self.tell(band, span)


class Step:
    """The sums of a step whose replicas are all in this process."""

    def __init__(
        self, group: Replicas, n: int, bands: Sequence[Span] = (), tell: Tell = lambda band, span: None
    ) -> None:
        self.group, self.n, self.shares = group, n, group.plan(n).shares
        self.bands = bands or [(0, group.replicas[0].size)]
        folds = [[Fold(n, group.backend.add) for _ in self.bands] for _ in self.shares]
        self.sums = [ReplicaSums(self.bands, mine, tell) for mine in folds]

    def tasks(self, batch: Batch) -> list[list[Task]]:
        """What computes the shards of this process: for each thread neighbours, about as many as for the others.

        A replica computes its own shards, and adds them up along the tree as far as it can.
        """
        first, last = self.shares[0].start, self.shares[-1].stop
        found: list[list[Task]] = []
        for lo, hi in cut(last - first, self.group.backend.workers.count):
            here = [range(max(share.start, first + lo), min(share.stop, first + hi)) for share in self.shares]
            work = zip(self.group.replicas, here, self.sums, strict=True)
            found.append([task for replica, shards, sums in work for task in replica.tasks(batch, shards, sums)])
        return found

    def total(self) -> Vector:
        """The sum over all shards, once they have been computed. All replicas are on one device."""
        first, *others = (fold for sums in self.sums for fold in sums.folds)
        with timed("exchange"):
            for fold in others:
                for span, part in fold.parts.items():
                    first.add(span, part)
            return first.total()

    def totals(self, tasks: Sequence[Task]) -> list[Vector]:
        """Run the tasks. Returns the sum over all shards, on the device of each replica."""
        group = self.group
        with timed("compute"):
            group.backend.map(each_timed("compute", tasks))
        devices = [replica.device for replica in group.replicas]
        held = [fold.parts for sums in self.sums for fold in sums.folds]
        with timed("exchange"):
            return exchange(group.backend, held, self.n, devices, group.replicas[0].size)


class StepAcross(Step):
    """The sums of a step in several processes.

    A band is sent as soon as the last shard of this process has produced it, while the backward pass still computes
    other bands. Bands of the last layers come first. All processes send in the same order.
    """

    def __init__(self, group: Replicas, n: int) -> None:
        super().__init__(group, n, group.replicas[0].bands, self._added)
        self._lock = threading.Lock()
        self._ready = [threading.Event() for _ in self.bands]
        self._failed = False
        self._missing = [sum(map(len, self.shares))] * len(self.bands)  # shards of this process, for each band
        if not any(self._missing):
            self._all_ready()

    def _added(self, band: int, span: Span) -> None:
        with self._lock:
            self._missing[band] -= span[1] - span[0]
            if not self._missing[band]:
                self._ready[band].set()

    def totals(self, tasks: Sequence[Task]) -> list[Vector]:
        group = self.group
        sending = group.sender.submit(self._send)
        try:
            with timed("compute"):
                group.backend.map(each_timed("compute", tasks))
        except BaseException:
            self._failed = True  # bands that are not ready will not come
            self._all_ready()
            raise
        with timed("exchange"):
            total = sending.result()  # waits for the other processes
        return [group.across.put(total, replica.device) for replica in group.replicas]

    def _send(self) -> Vector:
        """Exchange every band with the other processes once it is ready. Returns the sum over all shards of all processes."""
        across, held, total = self.group.across, self.group.plan(self.n).held, None
        for band, (lo, hi) in enumerate(self.bands):
            self._ready[band].wait()
            if self._failed:
                break
            parts = {span: part for sums in self.sums for span, part in sums.folds[band].parts.items()}
            with timed("exchange", band=band):
                total = across.sum(parts, held, self.n, lo, hi)
        return total

    def _all_ready(self) -> None:
        for event in self._ready:
            event.set()
