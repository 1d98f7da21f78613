"""What a thread does, from when to when, for a profile (training/profile.py). Without a profile, nothing is kept.

    with timed("data", shard=3): ...        @timed_as("evaluation")        backend.map(each_timed("compute", tasks))

What is inside of something else is taken out of its time, so that each moment of a thread counts once.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from time import perf_counter_ns
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
WHOLE = ("evaluation", "checkpoints", "checks")  # count all that is done meanwhile, by whatever thread
KEPT = 200_000  # of them are kept, some 25 MB in a file; later ones are only added up
OURS = 1 << 23  # the number of samestep's process in a trace, beside the framework's: no real one is as large
WATCHED = 1 << 20  # the number of the track that says when the framework's profiler watched
NOTHING = nullcontext()


class Track:
    """What one thread has done."""

    def __init__(self) -> None:
        self.name, self.id = threading.current_thread().name, threading.get_native_id()
        self.sums: dict[str, int] = defaultdict(int)  # the nanoseconds of each row of the table
        self.open: Timed | None = None


class Times:
    """What all threads do from now on. The first track is that of the thread that makes it."""

    def __init__(self) -> None:
        self.step, self.whole = 0, ""  # the step that is made; which of WHOLE the first thread is in
        self.events = list[tuple[Track, str, int, int, dict[str, Any]]]()  # name, beginning, end, what else is known
        self.tracks: list[Track] = []
        self._here = threading.local()
        self.first, self.began = self.track(), perf_counter_ns()

    def track(self) -> Track:
        """That of this thread."""
        if not hasattr(self._here, "track"):
            self._here.track = Track()
            self.tracks.append(self._here.track)
        return self._here.track  # type: ignore[no-any-return]

    def trace(self, ended: int) -> list[dict[str, Any]]:
        """Events in the trace-event format of Chrome, in microseconds since the beginning: a track for each thread."""
        kept = [(self.first, "fit", self.began, ended, {}), *self.events]
        number = {track: i for i, track in enumerate(self.tracks)}
        names = [("process_name", 0, "samestep"), *(("thread_name", i, track.name) for track, i in number.items())]
        kept.sort(key=lambda event: (event[2], -event[3]))  # what is around comes first
        return [
            *({"ph": "M", "pid": OURS, "tid": i, "ts": 0, "name": what, "args": {"name": name}} for what, i, name in names),
            *({"ph": "X", "pid": OURS, "tid": number[track], "ts": (lo - self.began) / 1e3, "dur": (hi - lo) / 1e3,
               "name": name, "args": about} for track, name, lo, hi, about in kept),
        ]  # fmt: skip


class Timed:
    outer: Timed | None
    row: str

    def __init__(self, times: Times, name: str, about: dict[str, Any]) -> None:
        self.times, self.name, self.about = times, name, about

    def __enter__(self) -> None:
        times = self.times
        self.track = track = times.track()
        self.outer, track.open = track.open, self
        around = self.outer.row if self.outer else "" if track is times.first else times.whole
        self.row = around if around in WHOLE else self.name
        if track is times.first:
            times.whole = self.row
        self.about, self.inner, self.began = {"step": times.step, **self.about}, 0, perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        ended, times, track, outer = perf_counter_ns(), self.times, self.track, self.outer
        track.sums[self.row] += ended - self.began - self.inner
        track.open = outer
        if outer:
            outer.inner += ended - self.began
        if track is times.first:
            times.whole = outer.row if outer else ""
        if len(times.events) < KEPT:
            times.events.append((track, self.name, self.began, ended, self.about))


_now: Times | None = None  # of the run that goes on


def at(step: int) -> None:
    """From now on, this step is made."""
    if _now is not None:
        _now.step = step


def keep(times: Times | None) -> None:
    """From now on, all is kept here; None: nowhere."""
    global _now
    _now = times


def timed(name: str, **about: Any) -> AbstractContextManager[None]:
    """For the time of a `with`, this thread does what the name says: a row of the profile's table."""
    return NOTHING if _now is None else Timed(_now, name, about)


def timed_as(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`timed` for a whole function."""

    def around(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def around_it(*args: P.args, **named: P.kwargs) -> R:
            with timed(name):
                return function(*args, **named)

        return around_it

    return around


def each_timed(name: str, tasks: Sequence[Callable[[], Any]]) -> Sequence[Callable[[], Any]]:
    """Tasks, each of them timed by the thread that runs it."""
    return tasks if _now is None else [partial(_run, name, i, task) for i, task in enumerate(tasks)]


def _run(name: str, i: int, task: Callable[[], Any]) -> Any:
    with timed(name, task=i):
        return task()


def seen(who: str, began: float, ended: float, busy: dict[str, float]) -> list[dict[str, Any]]:
    """The first events of what a framework's profiler gives: when it watched, and for how long each device was busy."""
    where = {"pid": OURS, "tid": WATCHED, "ts": began}
    return [{"ph": "X", "name": "watched", **where, "dur": ended - began, "args": busy},
            {"ph": "M", "name": "thread_name", **where, "args": {"name": who}}]  # fmt: skip


def covered(spans: Iterable[tuple[float, float]], began: float, ended: float) -> float:
    """For how long, between two moments, at least one of these goes on.

    >>> covered([(4, 6), (0, 2), (1, 3), (9, 12)], 1, 10)
    5.0
    """
    total, last = 0.0, began
    for lo, hi in sorted(spans):
        total += max(min(hi, ended) - max(lo, last), 0)
        last = max(last, hi)
    return total
