"""Time per step on the CPU: samestep beside plain loops, Lightning and Accelerate, and two cores beside one, in one run.

    PYTHONPATH=folder-of-the-peers python benchmarks/cpu.py [--models lenet,mlp] [--rounds 7] [--only samestep,plain]

LeNet and an MLP (784, 256, 10), batch 256, SGD. All keep loss and accuracy of the epoch. The peers are those of peers.py; a
package that is missing is told, and left out. samestep's figure is that of a whole epoch of a fit, with metrics, fingerprints,
checks and the order of examples in it: the median of the second to the fifth, as shards may be recorded in the first two.

Every round runs all of them once, in turn, the plain loop first. A ratio is to the plain loop of the same round, and the
figures are medians, with the lowest and the highest ratio: a machine that others use too is slow for all or for none. "one
core" is a fit on one of the cores that this process has.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import peers
import torch
from machine import keep, machine, table

import samestep as ss
from samestep.processes.place import find

HALVED = "samestep, 8 shards, two fits at once, one core each, halved"
STARTED_BY = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"],
    "mpiexec": [str(Path(sys.executable).with_name("mpiexec")), "-n", "2", sys.executable],
}
WAYS: dict[str, dict[str, Any]] = {
    "samestep, 1 shard": {"shards": 1},
    "samestep, 8 shards": {"shards": 8},
    "samestep, 8 shards, step by step": {"shards": 8, "capture": False},
    "samestep, 8 shards, one core": {"shards": 8, "cores": 1},
    "samestep, 8 shards, 2 devices": {"shards": 8, "devices": ["cpu", "cpu"]},
    "samestep, 8 shards, 2 processes": {"shards": 8, "by": "torchrun"},
    "samestep, 8 shards, 2 processes, MPI": {"shards": 8, "by": "mpiexec"},
    HALVED: {"shards": 8, "cores": 1, "beside": True},
    "samestep, 8 shards, contiguous": {"shards": 8, "memory_format": "contiguous"},
    "samestep, 8 shards, compiled": {"shards": 8, "compile": True},
}
PEERS = "plain loop", "plain loop, channels last", "Lightning", "Accelerate"
PAIRS = (  # what is compared with what
    ("8 shards / 1 shard", "samestep, 8 shards", "samestep, 1 shard"),
    ("2 cores against 1", "samestep, 8 shards, one core", "samestep, 8 shards"),
    ("2 devices against 1 core", "samestep, 8 shards, one core", "samestep, 8 shards, 2 devices"),
    ("2 processes against 1 core", "samestep, 8 shards, one core", "samestep, 8 shards, 2 processes"),
    ("2 processes with MPI against 1 core", "samestep, 8 shards, one core", "samestep, 8 shards, 2 processes, MPI"),
    ("what the machine gives: two fits at once against one", "samestep, 8 shards, one core", HALVED),
    ("Lightning / 8 shards", "Lightning", "samestep, 8 shards"),
    ("Accelerate / 8 shards", "Accelerate", "samestep, 8 shards"),
    ("Lightning / 8 shards, contiguous", "Lightning", "samestep, 8 shards, contiguous"),
    ("Plain loop, channels last / 8 shards", "plain loop, channels last", "samestep, 8 shards"),
)


@contextmanager
def on(cores: int | None, last: bool = False) -> Iterator[None]:
    """So many of this process's cores, the first or the last ones, for this thread and those that it starts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before, reverse=last)[:cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def alone(case: peers.Case) -> list[str]:
    """The arguments with which this script fits a model, and prints the milliseconds of a step."""
    return [
        __file__,
        "--one",
        next(n for n, one in peers.cases(tiny=False, cuda=False).items() if one.name == case.name),
    ]


def processes(case: peers.Case, by: str) -> float:
    """The same in two processes."""
    done = subprocess.run([*STARTED_BY[by], *alone(case)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return float(done.stdout.split()[-1])


@contextmanager
def another(case: peers.Case) -> Iterator[None]:
    """Meanwhile, the same fit goes on and on in another process, on another core."""
    with on(1, last=True):
        other = subprocess.Popen([sys.executable, *alone(case), "--again"], stdout=subprocess.PIPE, text=True)
    assert other.stdout
    other.stdout.readline()  # the first one has ended
    try:
        yield
    finally:
        other.kill()
        other.communicate()


def ours(case: peers.Case, data: ss.Data, cores: int | None = None, **settings: Any) -> float:
    """Milliseconds a step over an epoch of a fit, the first one apart."""
    if by := settings.pop("by", ""):
        return processes(case, by)
    if settings.pop("beside", False):
        with another(case):
            return ours(case, data, cores, **settings) / 2
    threads = len(os.sched_getaffinity(0)) if settings["shards"] == 1 else 1
    given = {"max_epochs": 5, "devices": "cpu", "schedule": case.rate, "threads_per_shard": threads, "progress": False}
    with on(cores):
        run = ss.Trainer(**{**given, "batch_size": case.batch, **settings}).fit(case.make(), data)
    return statistics.median(row["seconds"] for row in run.history[1:]) / case.steps * 1e3


def ways(case: peers.Case, only: list[str]) -> dict[str, Callable[[], float]]:
    """By name: what gives the milliseconds of a step."""
    numbers, known = case.examples(), {one.name for one in fields(ss.Trainer)} | {"cores", "by", "beside"}
    x, y = map(torch.from_numpy, numbers)
    found: dict[str, Callable[[], float]] = {}
    theirs, data = peers.peers(case, x, y, "float32"), ss.Data(train=numbers)
    for name in PEERS:
        if name in theirs and (name == PEERS[0] or any(word in name for word in only)):
            try:
                if name in ("Lightning", "Accelerate"):
                    importlib.import_module(name.lower())
                peer = theirs[name]()
                found[name] = lambda peer=peer: statistics.mean(peer())
            except ImportError as error:
                print(f"{name} is left out: {error}; install it into a folder, and name that in PYTHONPATH")
    for name, settings in WAYS.items():
        if missing := settings.keys() - known:
            print(f"{name!r} is left out: this Trainer has no {', '.join(missing)}")
        elif any(word in name for word in only) and (case.images or "memory_format" not in settings):
            found[name] = partial(ours, case, data, **settings)
    return found


def measure(case: peers.Case, rounds: int, only: list[str]) -> list[dict[str, Any]]:
    found = ways(case, only)
    times: dict[str, list[float]] = {name: [] for name in found}
    for i in range(rounds + 1):
        for name, work in list(found.items()):
            try:
                ms = work()
            except Exception as error:
                print(f"{name} failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
                found.pop(name), times.pop(name)
                continue
            if i:  # the first time, much is set up
                times[name].append(ms)
    rows = []
    for name, mine in times.items():
        ratios = [a / b for a, b in zip(mine, times[PEERS[0]], strict=True)]
        spread = {"ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
        rows.append({"model": case.name, "name": name, "ms": statistics.median(mine), "least": min(mine), **spread})
    for what, upper, lower in PAIRS:
        if upper in times and lower in times:
            ratios = [a / b for a, b in zip(times[upper], times[lower], strict=True)]
            spread = {"ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
            rows.append({"model": case.name, "name": what, "ms": None, "least": None, **spread})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="lenet,mlp")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="parts of names, with commas between; the plain loop always runs")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--again", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        case = peers.cases(tiny=False, cuda=False)[options.one]
        data = ss.Data(train=case.examples())
        while ms := ours(case, data, shards=8):
            if find().rank == 0:
                print(ms, flush=True)
            if not options.again:
                return
    if torch.cuda.is_available():
        raise SystemExit("this benchmark is for the CPU: hide the GPU with CUDA_VISIBLE_DEVICES=")
    cases, began = peers.cases(tiny=False, cuda=False), time.perf_counter()
    rows = [
        row
        for name in options.models.split(",")
        for row in measure(cases[name], options.rounds, options.only.split(","))
    ]
    print(
        f"{machine()['name']}, PyTorch {torch.__version__}, {options.rounds} rounds, {time.perf_counter() - began:.0f} s"
    )

    def cell(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    header = ["model", "", "ms/step", "least", "ratio", "lowest - highest"]
    print(table(header, [[r["model"], r["name"], cell(r["ms"]), cell(r["least"]), cell(r["ratio"]),
                          f"{r['low']:.2f} - {r['high']:.2f}"] for r in rows]))  # fmt: skip
    keep("cpu", rows, rounds=options.rounds, load=os.getloadavg()[0])


if __name__ == "__main__":
    main()
