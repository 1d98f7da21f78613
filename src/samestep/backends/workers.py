"""The threads that compute shards side by side on the CPU, and what they must take turns at.

One run at a time goes on in a process, and a framework's one random generator is used by many threads or by one alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from samestep.devices import Device
from samestep.errors import Invalid
from samestep.processes.place import find


def side_by_side(threads: int) -> int:
    """How many shards can be computed at a time with `threads` each; the processes on a host share its cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // threads // find().local_size)


class Crew:
    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._busy = threading.Lock()

    @property
    def hired(self) -> bool:
        """Whether there are threads beside the caller's."""
        return self._pool is not None

    @contextmanager
    def at_work(
        self, devices: Sequence[Device], threads: int, prepare: Callable[[], object] = lambda: None, least: int = 1
    ) -> Iterator[None]:
        """For the time of a run: on the CPU so many threads that each can compute with `threads` of its own.

        `prepare` is called in each thread first. Where fewer than `least` threads would do, the caller's computes.
        """
        if not self._busy.acquire(blocking=False):
            raise Invalid(
                "a fit or an evaluation is already going on in this process: wait for it, or use another process"
            )
        try:
            if devices[0].kind == "cpu":
                count = side_by_side(threads)
                if count >= least:
                    self._pool = ThreadPoolExecutor(count, "samestep", initializer=prepare)
            yield
        finally:
            if self._pool:
                self._pool.shutdown(cancel_futures=True)
                self._pool = None
            self._busy.release()

    def map(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run tasks that do not depend on each other, side by side if there are threads."""
        if self._pool is None:  # on GPUs, launching is all there is to do, and it does not wait
            return [task() for task in tasks]
        futures = [self._pool.submit(task) for task in tasks]
        wait(futures)
        return [future.result() for future in futures]


class Access:
    """Many at a time, or one alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:  # held throughout: nobody comes in
            self._changed.wait_for(lambda: self._inside == 0)
            yield
