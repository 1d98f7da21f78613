"""Several steps on the CPU in one call: the threads go on from one step to the next, and nobody hands them tasks in between.

To wake a thread takes longer than many a shard, so a thread sleeps only until the others have computed theirs. The one that
comes last makes the update. The bits are those of one step after the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from samestep.backends.steps import Made, Steps
from samestep.backends.times import at, each_timed, timed
from samestep.training.step import Step

if TYPE_CHECKING:
    from samestep.backends.replica import Task
    from samestep.data.feed import Batch, Pass
    from samestep.training.replicas import Replicas

MOST, AT_ONCE = 64, 0.25  # steps in one call, and seconds; nobody can stop them in between


class Threads(Steps):
    """Makes the steps of replicas on the CPU."""

    def __init__(self, group: Replicas) -> None:
        self.group, self._most = group, 1

    @staticmethod
    def of(group: Replicas) -> Threads | None:
        """If threads compute the shards, and no other process or GPU has a part in their sum."""
        backend, devices = group.backend, {replica.device for replica in group.replicas}
        here = group.world.size == 1 and len(devices) == 1 and backend.workers.there
        return Threads(group) if here and backend.goes_on else None

    def most(self, pass_: Pass) -> int:
        return 1 if pass_.feed.here else self._most

    def __call__(self, batches: Sequence[Batch], rates: Sequence[float], t: int) -> list[Made]:
        group, workers, began = self.group, self.group.backend.workers, time.perf_counter()
        if len(batches) == 1:
            made = [group.one(batches[0], rates[0], t)]
        else:
            stretch = Stretch(group, batches, rates, t)
            workers.map([partial(stretch.work, i) for i in range(workers.count)])
            made = list(zip(stretch.numbers, stretch.prints, strict=True))
        self._most = max(1, min(MOST, int(AT_ONCE * len(batches) / (time.perf_counter() - began))))
        return made


class Stretch:
    """Some steps, one after the other."""

    def __init__(self, group: Replicas, batches: Sequence[Batch], rates: Sequence[float], t: int) -> None:
        self.group, self.steps, self.t = group, list(zip(batches, rates, strict=True)), t
        self.numbers, self.prints = list[Any](), list[Any]()  # of each step that was made
        self._turns = [SimpleQueue[None]() for _ in range(group.backend.workers.count)]  # what a thread waits for
        self._lock, self._there, self._failed = threading.Lock(), 0, False
        self._now = self._next = self._prepared(0)

    def work(self, thread: int) -> None:
        """What one of the threads does."""
        try:
            for i in range(len(self.steps)):
                with self._lock:  # free once the step before has ended
                    _, tasks = self._now
                for task in each_timed("compute", tasks[thread]):
                    task()
                with self._lock:
                    self._there += 1
                    last = self._there == len(self._turns)
                    if self._there == 1:  # the others still compute
                        self._meanwhile(i)
                    if last:
                        self._end(i)
                        self._wake(thread)
                if not last:
                    with timed("waiting"):
                        self._turns[thread].get()
                if self._failed:
                    return
        except BaseException:
            self._failed = True
            self._wake(thread)
            raise

    def _prepared(self, i: int) -> tuple[Step, list[list[Task]]]:
        """Step i, and the tasks of each thread."""
        batch, _ = self.steps[i]
        step = Step(self.group, len(batch.spans))
        return step, step.tasks(batch)

    def _meanwhile(self, i: int) -> None:
        """What need not wait for step i: the fingerprint after the step before, and what comes next."""
        if i:
            self._print()
        if i + 1 < len(self.steps):
            self._next = self._prepared(i + 1)

    def _end(self, i: int) -> None:
        """All shards of a step are there: make the update."""
        group, t, (batch, lr) = self.group, self.t + i, self.steps[i]
        total = self._now[0].total()
        with timed("update"):
            z = group.noise(t)
            for replica in range(len(group.replicas)):
                group.update(replica, total, batch.examples, lr, t, z)
        self.numbers.append(group.backend.concat([group.numbers(total)]))  # a copy, so that the rest can be freed
        self._now, self._there = self._next, 0
        at(t + 1)
        if i + 1 == len(self.steps):
            self._print()

    def _print(self) -> None:
        self.prints.append(self.group.replicas[0].fingerprint())

    def _wake(self, thread: int) -> None:
        """Let the other threads go on."""
        for i, turn in enumerate(self._turns):
            if i != thread:
                turn.put(None)
