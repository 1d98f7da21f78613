"""The engine of `samestep verify`: runs a recipe in many ways, kills and resumes it, and compares every step.

Every run is made of processes of its own (`samestep train ...`) and writes to a folder of its own. The first one, on the
fewest devices, is the reference; a run is the same if its log, every step's fingerprint and its last tensors are.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from rich.table import Table

from samestep.checks import show, whole
from samestep.errors import Invalid
from samestep.processes.launch import Processes, engine_for
from samestep.processes.place import OVERRIDES
from samestep.runs import diff
from samestep.runs.diff import Difference, counted
from samestep.runs.log import events
from samestep.runs.run import Run

COUNT = "0*[1-9][0-9]{0,8}"
POLL = 0.001  # seconds between two looks at a log
TAIL = 1 << 20  # bytes; the last line about steps is in the last so many of a log
LINES = 20  # of what a failed run printed are shown
BAD = ("DIFFERS", "FAILED")  # verdicts


@dataclass(frozen=True)
class Way:
    """How a run is spread: over so many processes, each with so many devices.

    >>> print(Way(), Way(3), Way(1, 2), Way(3, 2), sep=", ")
    1 device, 3 devices, 2 processes, 2 processes x 3 devices
    """

    devices: int = 1
    processes: int = 1

    @property
    def total(self) -> int:
        return self.devices * self.processes

    def __str__(self) -> str:
        devices, processes = counted(self.devices, "device"), f"{self.processes} processes"
        return devices if self.processes == 1 else processes if self.devices == 1 else f"{processes} x {devices}"


@dataclass(frozen=True)
class Job:
    """What is run: a script and its arguments, or (None) the built-in job; each for so many epochs, if that is said."""

    script: Path | None = None
    arguments: Sequence[str] = ()
    epochs: int | None = None
    backend: str | None = None  # the framework of the built-in job

    def __str__(self) -> str:
        return str(self.script or "the built-in job" + (f" with {self.backend}" if self.backend else ""))

    def command(self, way: Way, folder: Path, every: int | None = None) -> list[str]:
        options = {"devices": way.devices, "run-dir": folder, "resume": "auto", "epochs": self.epochs,
                   "checkpoint-every": every, "backend": self.backend}  # fmt: skip
        given = [f"--{name}={value}" for name, value in options.items() if value is not None]
        rest = [*([str(self.script)] if self.script else []), *(["--", *self.arguments] if self.arguments else [])]
        return [sys.executable, "-m", "samestep", "train", "--quiet", *given, *rest]


class Start(Processes):
    """The processes of a run, started in one way; they are all ended when the `with` is left."""

    def __init__(self, job: Job, way: Way, folder: Path, every: int | None = None) -> None:
        self.folder, self.survivors = folder, 0
        self.output = folder.with_name(folder.name + ".txt")  # what they print
        env = {name: value for name, value in os.environ.items() if name != OVERRIDES} | {"PYTHONUNBUFFERED": "1"}
        engine = engine_for(job.script, job.backend) if way.processes > 1 else "torch"
        with open(self.output, "wb") as output:
            super().__init__(job.command(way, folder, every), way.processes, env, engine, output.fileno())

    def until(self, condition: Callable[[], bool]) -> bool:
        """Wait until a condition holds; False if a process has ended before it does."""
        while not condition():
            if any(state is not None for state in self.poll()):
                return False
            time.sleep(POLL)
        return True

    def lose(self, ranks: Sequence[int]) -> bool:
        """Kill processes and wait for the others, which notice it; False if all of those had ended already.

        `survivors` are those that did not end by themselves, and were killed in the end.
        """
        self.until(lambda: all(self._read(f"{rank}.pid") for rank in ranks))  # before, there is nobody to kill
        self.kill(ranks)
        self.wait()
        states = self.poll()
        self.survivors = states.count(None)
        self.kill()
        return any(states[rank] == -signal.SIGKILL for rank in ranks)

    def steps(self) -> int:
        """How many steps the log tells of."""
        with suppress(OSError), open(self.folder / "events.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            for line in reversed(file.read().split(b"\n")[:-1]):  # the last one is not yet whole
                if line.startswith(b'{"event": "steps"'):
                    event = json.loads(line)
                    return int(event["first"]) + len(event["fingerprint"])
        return 0

    def said(self) -> str:
        """The end of what the processes printed."""
        return "\n".join(self.output.read_text(errors="replace").rstrip().splitlines()[-LINES:])


@dataclass
class Row:
    """One run: in which way, and what became of it."""

    way: str
    folder: str = ""
    verdict: str = "running"  # then reference, same, DIFFERS, FAILED, does not fit, or not killed
    steps: int | None = None
    killed_at: int | None = None  # the step it was to be killed at
    resumed_at: int | None = None  # the step it went on from; 0: from the start
    fingerprint: str = ""
    message: str = ""  # of a run that failed


@dataclass
class Report:
    """What was run and found."""

    job: str
    seed: int
    runs: list[Row] = field(default_factory=list)
    difference: Difference | None = None  # the first one, of
    differs: str = ""  # this run from the reference
    kept: str = ""  # the folder that holds the runs

    @property
    def same(self) -> bool:
        return not any(row.verdict in BAD for row in self.runs)

    def conclusion(self) -> str:
        """What was found, in words."""
        bad = next((row for row in self.runs if row.verdict in BAD), None)
        kept = f"\nthe runs are kept in {self.kept}" if self.kept else ""
        if bad and bad.verdict == "FAILED":
            return f"{self.job} failed on {bad.way}:\n{bad.message}{kept}"
        if self.difference:
            return f"A: {self.runs[0].way}; B: {self.differs}\n{diff.describe(self.difference)}{kept}"
        ran = [row for row in self.runs if row.verdict in ("reference", "same")]
        kills = sum(row.killed_at is not None for row in ran)
        early = sum(row.verdict == "not killed" for row in self.runs)
        words = f"the same in {counted(len(ran) - kills, 'way')}" + f" and after {counted(kills, 'kill')}" * bool(kills)
        first = f"{words}: {counted(ran[0].steps or 0, 'step')}, fingerprint {ran[0].fingerprint}"
        return first + f"\n{counted(early, 'run')} ended before the kill: more steps are needed" * bool(early) + kept

    def to_json(self) -> str:
        difference = json.loads(diff.to_json(self.difference)) if self.difference else None
        return json.dumps({"same": self.same, **asdict(self), "difference": difference}, indent=2)


def counts(option: str, text: str) -> list[int]:
    """The numbers of `--devices 1,2,3`, each once, in rising order.

    >>> counts("--devices", "8,1,2,2")
    [1, 2, 8]
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(COUNT, part) for part in parts):
        raise Invalid(f"{option} must be counts such as 1,2,3, got {show(text)}")
    return sorted({int(part) for part in parts})


def choose(devices: Sequence[int], processes: Sequence[int], shards: int, every: bool = False) -> list[Way]:
    """The ways to run in: every number of devices in the fewest processes, every number of processes with the fewest
    devices, and the largest mixed one that fits; or every combination.

    >>> print(*choose([1, 2, 3, 8], [1, 2, 3], shards=8), sep=", ")
    1 device, 2 devices, 3 devices, 8 devices, 2 processes, 3 processes, 2 processes x 3 devices
    """
    if every:
        return [Way(d, p) for p in processes for d in devices]
    chosen = [Way(d, processes[0]) for d in devices] + [Way(devices[0], p) for p in processes[1:]]
    mixed = [Way(d, p) for p in processes[1:] for d in devices[1:] if d * p <= shards]
    return chosen + ([max(mixed, key=lambda way: (way.total, way.devices))] if mixed else [])


def draw(ways: Sequence[Way], steps: int, resume_on: str, chance: random.Random) -> tuple[Way, Way, list[int], int]:
    """A kill: of a run in which way, resumed in which of these ways, of which processes, at which step."""
    first = chance.choice(ways)
    others = [way for way in ways if way != first] or [first]
    then = {"random": chance.choice(others), "same": first}.get(resume_on) or Way(int(resume_on))
    one = first.processes > 1 and chance.random() < 0.5
    ranks = [chance.randrange(first.processes)] if one else list(range(first.processes))
    return first, then, ranks, chance.randint(1, max(1, steps - 1))


def verify(
    job: Job, devices: Sequence[int] = (1, 2, 3, 8), processes: Sequence[int] = (1, 2, 3), *,
    every: bool = False, kill: int = 3, resume_on: str = "random", seed: int = 0, keep: Path | None = None,
    tell: Callable[[Report], None] = lambda report: None,
) -> Report:  # fmt: skip
    """Run a job in many ways, kill and resume it, and compare. `tell` is called whenever there is something new to show.

    Where the runs are not the same, their folders are kept, in a temporary folder if no other is named.
    """
    if job.epochs is not None:
        whole("", "--epochs", job.epochs, 1)
    whole("", "--kill", kill)
    if resume_on not in ("random", "same") and not re.fullmatch(COUNT, resume_on):
        raise Invalid(f"--resume-on must be random, same or a number of devices, got {show(resume_on)}")
    report, chance = Report(str(job), seed), random.Random(seed)
    try:
        root = Path(tempfile.mkdtemp(prefix="samestep-verify-")) if keep is None else keep
        root.mkdir(parents=True, exist_ok=True)
        if os.listdir(root):
            raise OSError("Not empty")
    except OSError as error:
        raise Invalid(f"--keep needs a new or empty folder, got {keep}: {error.strerror or error}") from None
    runs = Runs(job, root, report, partial(tell, report), tidy=keep is None)
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # which ends what was started
    try:
        runs.refer(Way(devices[0], processes[0]))
        if resume_on.isdecimal() and int(resume_on) > runs.shards:
            raise Invalid(f"--resume-on {resume_on} needs at least {resume_on} shards, got shards={runs.shards}")
        for way in choose(devices, processes, runs.shards, every)[1:]:
            runs.run(way)
        fitting = [Way(d, p) for p in processes for d in devices if d * p <= runs.shards]
        for number in range(1, kill + 1):
            runs.kill(number, *draw(fitting, len(runs.first.fingerprints), resume_on, chance))
    finally:
        signal.signal(signal.SIGTERM, before)
        if keep is None and report.same:
            shutil.rmtree(root, ignore_errors=True)
        else:
            report.kept = str(root)
    return report


class Runs:
    """Makes the runs of a verification, and compares them with the first."""

    def __init__(self, job: Job, root: Path, report: Report, tell: Callable[[], None], tidy: bool) -> None:
        self.job, self.root, self.report, self.tell, self.tidy = job, root, report, tell, tidy

    def refer(self, way: Way) -> None:
        """The run that all others are compared with; if it cannot be had, there is nothing to verify."""
        row, folder = self._row(str(way))
        with Start(self.job, way, folder) as start:
            status = start.wait()
        log = folder / "events.jsonl"
        ends = [event for event in events(log.read_bytes()) if event["event"] == "end"] if log.exists() else []
        one = "a run folder holds one run, so leave one fit in it"
        if len(ends) > 1:
            raise Invalid(f"{self.job} fits more than once: {one}")
        if status:
            when = f" after its fit had ended ({one})" if ends else f" on {way}"
            raise Invalid(f"{self.job} failed{when} with status {status}:", f"\n{start.said()}")
        if not ends:
            raise Invalid(f"{self.job} has left no run: a script to verify makes a samestep.Trainer and calls its fit")
        self.run_folder, self.first = folder, Run.load(folder)
        self.shards = int(self.first.recipe["shards"])
        row.verdict, row.steps, row.fingerprint = "reference", len(self.first.fingerprints), self.first.fingerprint
        self.tell()

    def run(self, way: Way) -> None:
        row, folder = self._row(str(way))
        if way.total > self.shards:
            row.verdict = "does not fit"
            return self.tell()
        with Start(self.job, way, folder) as start:
            self._judge(row, start, start.wait())

    def kill(self, number: int, first: Way, then: Way, ranks: Sequence[int], step: int) -> None:
        """Kill a run at a step, all of its processes or some, and resume it in another way."""
        who = "" if len(ranks) == first.processes else f"rank {ranks[0]} "
        row, folder = self._row(f"{first}, {who}killed at step {step}, then {then}", f"kill {number}")
        row.killed_at = step
        with Start(self.job, first, folder, every=1) as start:
            hit = start.until(lambda: start.steps() >= step) and start.lose(ranks)
            status = start.wait()
        if hit:
            with Start(self.job, then, folder, every=1) as start:
                status = start.wait()
            log = events((folder / "events.jsonl").read_bytes())
            row.resumed_at = max((event["step"] for event in log if event["event"] == "resume"), default=0)
        self._judge(row, start, status, "same" if hit else "not killed")

    def _row(self, way: str, name: str = "") -> tuple[Row, Path]:
        folder = self.root / (name or way).replace(" ", "-")
        row = Row(way, str(folder))
        self.report.runs.append(row)
        self.tell()
        return row, folder

    def _judge(self, row: Row, start: Start, status: int, good: str = "same") -> None:
        """Compare a run that has ended with the first one."""
        try:
            if status:
                raise Invalid("", start.said())
            run = Run.load(start.folder)
            if run.interrupted:
                raise Invalid(f"it was interrupted: {start.said()}")
        except Invalid as error:
            row.verdict, row.message = "FAILED", str(error)
            return self.tell()
        row.steps, row.fingerprint = len(run.fingerprints), run.fingerprint
        found = diff.compare(self.run_folder, start.folder)
        same = (run.fingerprints, run.fingerprint) == (self.first.fingerprints, self.first.fingerprint) and found.same
        row.verdict = good if same else "DIFFERS"
        if not same and self.report.difference is None:
            self.report.difference, self.report.differs = found, row.way
        if same and self.tidy:
            shutil.rmtree(start.folder)
        self.tell()


def table(report: Report) -> Table:
    """The runs as a table."""
    made = Table("way", box=None, pad_edge=False)
    for name in ("steps", "resumed at", "fingerprint", ""):
        made.add_column(name, justify="right" if name in ("steps", "resumed at") else "left", no_wrap=True)
    for row in report.runs:
        numbers = ["" if number is None else str(number) for number in (row.steps, row.resumed_at)]
        made.add_row(row.way, *numbers, row.fingerprint[:16], row.verdict)
    return made
