"""The threads that compute shards side by side on the CPU. A process has one run at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from samestep.devices import Device
from samestep.errors import Invalid
from samestep.processes.place import find


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(threads: int) -> int:
    """How many shards can be computed at a time with `threads` each; the processes on a host share its cores."""
    return max(1, cores() // threads // find().local_size)


class Workers:
    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self.count = 1  # how many threads compute in this run: the caller's, if there are no others
        self.keeping = False  # whether threads wait for a next run: those of a Group are to know their lanes again
        self._kept: dict[str, ThreadPoolExecutor] = {}  # by what they were made for
        self._busy = threading.Lock()
        self.prepare: Callable[[], object] = lambda: None  # what a thread of the run calls first

    @property
    def there(self) -> bool:
        """Whether there are threads beside the caller's."""
        return self._pool is not None

    @contextmanager
    def at_work(
        self, devices: Sequence[Device], threads: int, prepare: Callable[[], object] = lambda: None, least: int = 1
    ) -> Iterator[None]:
        """During a run on the CPU: threads for as many shards as fit side by side, with `threads` each.

        Each thread calls `prepare` first. If fewer than `least` threads fit, the caller's thread computes.
        """
        if not self._busy.acquire(blocking=False):
            raise Invalid("a fit or an evaluation is already going on in this process: wait for it, or use another")
        self.prepare = prepare
        try:
            count = self.count = side_by_side(threads) if devices[0].kind == "cpu" else 1
            if devices[0].kind == "cpu" and count >= least:
                kind = f"{count} {prepare}" if self.keeping else ""
                self._pool = self._kept.pop(kind, None) or ThreadPoolExecutor(count, "samestep", initializer=prepare)
            yield
        finally:
            if self._pool and self.keeping:
                self._kept[kind] = self._pool
            elif self._pool:
                self._pool.shutdown(cancel_futures=True)
            self._pool = None
            self._busy.release()

    def let_go(self) -> None:
        """End the threads that wait for a next run."""
        while self._kept:
            self._kept.popitem()[1].shutdown()

    def beside(self, task: Callable[[], Any]) -> Future[Any]:
        """Start a task in a thread of its own."""
        pool = ThreadPoolExecutor(1, "samestep-beside", initializer=self.prepare)
        future = pool.submit(task)
        pool.shutdown(wait=False)
        return future

    def map(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run tasks that do not depend on each other, side by side if there are threads."""
        if self._pool is None:  # on a GPU, a task only launches work and does not wait
            return [task() for task in tasks]
        futures = [self._pool.submit(task) for task in tasks]
        wait(futures)
        return [future.result() for future in futures]
