"""Kills a training at random moments, resumes it each time in another way, and compares the end with that of a run in peace.

    python benchmarks/chaos.py [--kills 100] [--per-run 5] [--seed 0]

A run is killed several times before it may end. Each time SIGKILL goes to all of its processes or to one of them, at a moment
that is drawn from the seed: when a step has been logged, while a checkpoint is being written, when the run has just opened
its folder, or while the final weights are being written. tests/chaos/test_chaos.py calls this with few kills.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from samestep.runs import checkpoint
from samestep.runs.log import events
from samestep.runs.run import Run
from samestep.runs.verify import Job, Start, Way

JOB = Job(Path(__file__).parent.parent / "tests" / "chaos" / "job.py")
WAYS = [*map(Way, (1, 2, 3, 5, 8)), Way(1, 2), Way(2, 2), Way(4, 2), Way(1, 3)]
MOMENTS = {"step": 10, "checkpoint": 8, "opening": 1, "end": 1}  # and how often each is drawn
DEADLINE = 300  # seconds; a run that is not where it should be by then hangs


@dataclass
class Kill:
    """One kill, and the resume that followed it."""

    run: int
    way: str
    killed: str  # all, or the rank of the one process
    moment: str
    at: int  # the step that was waited for
    logged: int  # steps in the log when it was dead
    half: int  # half-written files that were left
    newest: int  # step of the newest checkpoint that was left, 0 if none
    survivors: int  # processes that did not end by themselves when another was killed
    then: str = ""
    resumed: int | None = None  # the step that was gone on from; None: killed again before it had
    another: bool = False  # on another number of devices or processes

    @property
    def lost(self) -> bool:
        """Whether the resume did not go on from the newest checkpoint."""
        return self.resumed not in (None, self.newest)


@dataclass
class Ending:
    """A run that was killed several times, at its end."""

    run: int
    fingerprint: str
    same: bool  # every step, and the weights


def newest(folder: Path) -> int:
    """The step of the newest checkpoint; every one that is there must be whole, whenever the run was killed."""
    return max((checkpoint.read(path).step for path in checkpoint.paths(folder)), default=0)


def half_written(folder: Path, since: float) -> int:
    """How many files this start was writing when it was killed."""
    return sum(path.stat().st_mtime >= since for path in folder.rglob("*.tmp"))


def reached(start: Start, moment: str, step: int) -> Callable[[], bool]:
    """Whether the moment has come, told from what this start has written, not from what it found."""
    log, recipe, weights = (start.folder / name for name in ("events.jsonl", "recipe.json", "weights.safetensors"))

    def state(path: Path) -> object:
        try:
            found = path.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    before, deadline = {path: state(path) for path in (log, recipe, weights)}, time.monotonic() + DEADLINE

    def changed(path: Path) -> bool:
        return state(path) not in (None, before[path])

    def now() -> bool:
        assert time.monotonic() < deadline, (
            f"{start.folder} is not at {moment} {step} after {DEADLINE} s:\n{start.said()}"
        )
        if moment == "opening":
            return changed(recipe) or changed(log)
        if moment == "end":
            return changed(weights) or weights.with_name(weights.name + ".tmp").exists()
        if not changed(log) or start.steps() < step:
            return False
        return moment == "step" or any((start.folder / checkpoint.FOLDER).glob("*.tmp"))

    return now


def went_on(folder: Path, since: float) -> int | None:
    """The step that the last start went on from, if it came so far."""
    log = folder / "events.jsonl"
    told = events(log.read_bytes()) if log.exists() else []
    new = [event for event in told if event["event"] in ("start", "resume") and event["time"] > since]
    return int(new[-1].get("step", 0)) if new else None


def one_run(
    number: int,
    folder: Path,
    moments: Sequence[str],
    reference: Run,
    chance: random.Random,
    job: Job,
    ways: Sequence[Way],
) -> Iterator[Kill | Ending]:
    """A run that is killed at these moments and then ends."""
    steps = sorted(chance.sample(range(1, len(reference.fingerprints)), len(moments)))
    way, kill, hit = chance.choice(ways), None, True
    for moment, step in [*zip(moments, steps, strict=True), ("", 0)]:
        ranks = list(range(way.processes))
        if way.processes > 1 and chance.random() < 0.5:
            ranks = [chance.choice(ranks)]
        since = time.time()
        with Start(job, way, folder, every=1) as start:
            hit = bool(moment) and start.until(reached(start, moment, step)) and start.lose(ranks)
            status = start.wait()
        if kill:
            kill.resumed = went_on(folder, since)
            yield kill
        if not hit:  # it was left in peace, or it was too quick: the kills that are missing fall to another run
            assert not status, f"{way} failed:\n{start.said()}"
            break
        killed = "all" if len(ranks) == way.processes else f"rank {ranks[0]}"
        left = half_written(folder, since), newest(folder), start.survivors
        kill = Kill(number, str(way), killed, moment, step, start.steps(), *left)
        way, last = chance.choice([other for other in ways if other != way]), way
        kill.then, kill.another = str(way), way != last
    run = Run.load(folder)
    same = (run.fingerprint, run.fingerprints) == (reference.fingerprint, reference.fingerprints)
    yield Ending(number, run.fingerprint, same)


def in_peace(folder: Path, job: Job = JOB) -> Run:
    """The run that nobody kills."""
    with Start(job, Way(), folder) as start:
        status = start.wait()
    assert not status, start.said()
    return Run.load(folder)


def chaos(kills: int, per_run: int, seed: int, root: Path) -> tuple[Run, list[Kill], list[Ending]]:
    """So many kills, spread over as many runs as it takes."""
    chance, found, endings = random.Random(seed), list[Kill](), list[Ending]()
    reference = in_peace(root / "peace")
    while len(found) < kills:
        count, number = min(per_run, kills - len(found)), len(endings) + 1
        drawn = chance.choices(list(MOMENTS), list(MOMENTS.values()), k=count)
        # After the weights are written only the end itself is left.
        drawn = [moment if moment != "end" or i == count - 1 else "step" for i, moment in enumerate(drawn)]
        for what in one_run(number, root / f"run-{number}", drawn, reference, chance, JOB, WAYS):
            if isinstance(what, Ending):
                endings.append(what)
                print(f"run {number}: {what.fingerprint[:16]} {'same' if what.same else 'DIFFERS'}", flush=True)
            else:
                found.append(what)
                print(f"{len(found):>4}  {what.way}, {what.killed} killed at {what.moment} {what.at}; {what.then} goes on "
                      f"from {what.resumed}", flush=True)  # fmt: skip
    return reference, found, endings


def main() -> int:
    from machine import keep, machine, table

    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--per-run", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"{options.kills} kills, {options.per_run} a run, drawn from seed {options.seed}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="samestep-chaos-") as folder:
        reference, kills, endings = chaos(options.kills, options.per_run, options.seed, Path(folder))
    seconds = round(time.monotonic() - began)
    good = {ending.run for ending in endings if ending.same}
    figures = {
        "runs": len(endings), "runs_same": len(good), "kills": len(kills),
        "kills_same": sum(kill.run in good for kill in kills), "half_written": sum(kill.half > 0 for kill in kills),
        "another_way": sum(kill.another for kill in kills), "lost": sum(kill.lost for kill in kills),
        "survivors": sum(kill.survivors for kill in kills),
    }  # fmt: skip
    print(f"\n{machine()['name']}, {seconds} s\n")
    rows = []
    for moment in [*MOMENTS, ""]:
        those = [kill for kill in kills if moment in ("", kill.moment)]
        every, half = sum(kill.killed == "all" for kill in those), sum(kill.half > 0 for kill in those)
        another, same = sum(kill.another for kill in those), sum(kill.run in good for kill in those)
        cells = (len(those), every, len(those) - every, half, another, same)
        rows.append([moment or "all", *map(str, cells)])
    header = ["killed at", "kills", "all processes", "one of several", "file half-written", "resumed in another way",
              "same end"]  # fmt: skip
    print(table(header, rows))
    print(
        f"\n{len(good)} of {len(endings)} runs have every fingerprint of the run in peace, {reference.fingerprint[:16]}\n"
        f"{figures['lost']} resumes were from an older checkpoint than there was; {figures['survivors']} processes hung "
        "when another was killed"
    )
    keep("chaos", [asdict(kill) for kill in kills], seed=options.seed, seconds=seconds,
         steps=len(reference.fingerprints), fingerprint=reference.fingerprint, **figures)  # fmt: skip
    return 0 if len(good) == len(endings) and not figures["lost"] and not figures["survivors"] else 1


if __name__ == "__main__":
    sys.exit(main())
