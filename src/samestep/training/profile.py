"""Where a step's time goes: a table at the end of a fit, and a trace file for https://ui.perfetto.dev. It decides no bit."""

from __future__ import annotations

import gzip
import json
import math
import os
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from samestep.backends.times import KEPT, Times, keep, timed
from samestep.checks import MOST, show
from samestep.errors import Invalid, WrongType
from samestep.runs.checkpoint import write

if TYPE_CHECKING:
    from samestep.training.fit import Fit

FILE = "profile.json"
FIRST, STEPS = 10, 10  # steps of a fit before those that the framework's profiler watches, and how many it watches
ROWS = {
    "host": "Python between the rest", "data": "read, order, to the device", "compute": "shards: forward, backward",
    "steps": "whole steps in one call", "exchange": "devices, processes", "update": "optimizer",
    "waiting": "for the other threads", "looking": "waits for devices",
    "evaluation": "", "checkpoints": "", "checks": "rehearsal, spot checks", "profiler": "of the framework",
}  # fmt: skip


def check_profile(profile: Any, run_dir: Any) -> None:
    """Refuse what is no file that could be written."""
    if profile is None or isinstance(profile, bool):
        return
    if not isinstance(profile, (str, os.PathLike)) or "\0" in str(profile):
        raise WrongType(f"profile must be a path, True or None, got profile={show(profile)}")
    path = Path(profile)
    if os.path.isdir(path):
        raise Invalid(f"profile: {path} is a folder: name a file in it, such as {path / FILE}")
    if not os.path.isdir(path.parent) and (run_dir is None or path.parent != Path(run_dir)):
        raise Invalid(f"profile: the folder {path.parent} is not there: make it, or name another one")


class Profile:
    """That of one fit, on rank 0. If none is wanted, it does nothing."""

    def __init__(self, fit: Fit) -> None:
        wanted = fit.world.rank == 0 and fit.settings.profile
        self.path = Path(fit.settings.run_dir or ".", FILE) if wanted is True else Path(wanted) if wanted else None
        self.fit, self._first, self.times = fit, 0, Times() if self.path else None
        self._profiler = fit.backend.profiler(fit.devices) if wanted else None
        self._watching, self._steps = ExitStack(), range(0)  # from and to which step it watches
        self.watched: list[dict[str, Any]] = []  # what it saw

    def begin(self) -> None:
        if self.path:
            self.times = Times()
            keep(self.times)

    def at(self, step: int) -> None:
        """Before a step, of which `left` says how many may then be made in one call."""
        if not self.times:
            return
        if not self._steps:
            self._first, usual = step, range(step + FIRST, step + FIRST + STEPS)
            self._steps = usual if usual.stop <= self.fit.last else range(step, self.fit.last)
        self.times.step = step
        if step in (self._steps.start, self._steps.stop):
            self._watch(step == self._steps.start)

    def left(self, step: int) -> int:
        """How many steps may be made before the framework's profiler is to be started or ended."""
        edges = (self._steps.start, self._steps.stop) if self._profiler else ()
        return min((edge - step for edge in edges if edge > step), default=MOST)

    def _watch(self, on: bool) -> None:
        with timed("profiler"):
            try:
                if on and self._profiler:
                    self.watched = self._watching.enter_context(self._profiler)
                else:
                    self._watching.close()
            except Exception as error:  # no reason to lose a run
                self.watched = []
                warnings.warn(f"profile: {self.fit.backend.name}'s profiler failed: {error}", stacklevel=2)

    def close(self) -> None:
        """Print the table, and write the file."""
        if not (self.times and self.path):
            return
        self._watch(on=False)
        keep(None)
        ended = perf_counter_ns()
        Console(stderr=True, highlight=False).print(self.table(self.times, (ended - self.times.began) / 1e9))
        sys.stderr.write(f"{self.told(self.times)}\n")
        try:
            content = json.dumps({"traceEvents": self.trace(self.times, ended), "displayTimeUnit": "ms"}).encode()
            write(self.path, [gzip.compress(content) if self.path.suffix == ".gz" else content])
        except OSError as error:
            warnings.warn(f"profile: {self.path} cannot be written: {error.strerror or error}", stacklevel=2)

    def table(self, times: Times, seconds: float) -> Table:
        """Each moment of the thread that runs the fit is in one row."""
        made = self.fit.step - self._first if self._steps else 0
        table = Table(box=None, pad_edge=False)
        for name in ("", "", "seconds", "a step", "share", "others"):
            table.add_column(name, justify="right" if name else "left", no_wrap=True)

        def add(row: str, what: str, given: float, over: float, steps: int, others: float = 0.0) -> None:
            each = given / steps if steps else 0.0
            per = f"{1e3 * each:.2f} ms" if each >= 1e-3 else f"{1e6 * each:.0f} µs"
            table.add_row(row, what, f"{given:.3f}", per, f"{given / over:.1%}", f"{others:.3f}" if others else "")

        own = {row: times.first.sums[row] / 1e9 for row in ROWS}
        own["host"] = seconds - math.fsum(own[row] for row in ROWS if row != "host")
        for row, what in ROWS.items():
            others = sum(track.sums[row] for track in times.tracks if track is not times.first) / 1e9
            if max(own[row], others) >= 1e-4:  # what takes less has no row
                add(row, what, own[row], seconds, made, others)
        add("fit", f"{made} steps", seconds, seconds, made)
        watched = min(self.fit.step, self._steps.stop) - self._steps.start
        for event in self.watched[:1]:
            for device, busy in event["args"].items():
                add(device, "busy, while watched", busy / 1e6, event["dur"] / 1e6, watched)
                add("", "idle", (event["dur"] - busy) / 1e6, event["dur"] / 1e6, watched)
        return table

    def told(self, times: Times) -> str:
        """What stands below the table."""
        first, last = self._steps.start, min(self._steps.stop, self.fit.step) - 1
        seen = f"watched steps {first} to {last}" if self.watched else "saw no step"
        who = (
            f"'s profiler {seen}" if self._profiler else " tells nothing of its devices: these are samestep's own times"
        )
        cut = f", of many times the first {KEPT:,}" * (len(times.events) >= KEPT)
        whose = "Of the thread that runs the fit; others: the seconds of samestep's other threads."
        return f"{whose}\n{self.fit.backend.name}{who}.\nOpen it at https://ui.perfetto.dev: {self.path}{cut}"

    def trace(self, times: Times, ended: int) -> list[dict[str, Any]]:
        """The times of all threads and what the framework's profiler saw, in microseconds since the beginning."""
        pid, names = os.getpid(), {track.id: track.name for track in times.tracks}
        watched = [e for e in self.watched if (e["name"], e["pid"]) != ("thread_name", pid) or e["tid"] not in names]
        about = {"ph": "M", "name": "thread_name", "pid": pid, "ts": 0}  # it knows some of them, by their numbers
        named = [{**about, "tid": i, "args": {"name": name}} for i, name in names.items() if watched]
        return [*times.trace(ended), *named, *({**event, "ts": event["ts"] - times.began / 1e3} for event in watched)]
