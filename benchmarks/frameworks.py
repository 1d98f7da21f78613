"""Time per step of a framework's own plain loop against samestep on it, in one run.

    python benchmarks/frameworks.py --backend jax [--models lenet,mlp] [--rounds 9]

LeNet and an MLP (784, 256, 10), batch 256, SGD, data on the device. The plain loops are in plain/, one file a framework;
they keep the loss and the accuracy of the epoch, as the chapters' loops do. samestep runs with 1 shard, which has all cores
for itself, and with 8; its figure is that of a whole epoch of a fit, with metrics, fingerprints and the order of examples in
it. The plain loop is run just before and just after each, and the ratio is the median of the ratios to it: a machine that
others use too is slow for all three or for none.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from machine import keep, machine, table

import samestep as ss
from samestep import backends

BATCH, RATE = 256, 0.1
MODELS: dict[str, dict[str, Any]] = {"lenet": {}, "mlp": {"dropout": 0.0}}
STEPS = {"lenet": 20, "mlp": 100}  # of an epoch: a step of LeNet takes ten times as long, or more


def plain(go: Callable[[int], tuple[float, float]], steps: int) -> float:
    began = time.perf_counter()
    go(steps)
    return (time.perf_counter() - began) / steps


def ours(model: Any, data: ss.Data, shards: int, threads: int) -> float:
    """Seconds per step over the second epoch of a fit."""
    trainer = ss.Trainer(
        max_epochs=2, batch_size=BATCH, shards=shards, threads_per_shard=threads, schedule=RATE, progress=False
    )
    row = trainer.fit(model, data).history[-1]
    return row["seconds"] / (row["step"] / 2)


def measure(backend: str, name: str, rounds: int, steps: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    n = BATCH * steps
    x, y = random.random((n, 1, 28, 28), dtype=np.float32), random.integers(0, 10, n)
    model = getattr(importlib.import_module(f"samestep.models.{backend}"), name)(**MODELS[name])
    go = importlib.import_module(f"plain.{backend}").loop(model, x, y, BATCH, RATE)
    go(steps)  # compiles
    data, cores = ss.Data(train=(x, y)), len(os.sched_getaffinity(0))
    peers = {
        "samestep, 1 shard": lambda: ours(model, data, 1, cores),
        "samestep, 8 shards": lambda: ours(model, data, 8, 1),
    }
    base, times = [plain(go, steps)], {peer: list[tuple[float, float]]() for peer in peers}
    for _ in range(rounds):
        for peer, run in peers.items():
            mine = run()
            base.append(plain(go, steps))
            times[peer].append((mine, (base[-2] + base[-1]) / 2))  # the plain loop just before, and just after
    rows: list[dict[str, Any]] = [{"model": name, "name": f"plain {backend} loop", "ms": 1e3 * statistics.median(base)}]
    for peer, pairs in times.items():
        ratios = [mine / theirs for mine, theirs in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
        ms = 1e3 * statistics.median(mine for mine, _ in pairs)
        rows.append({"model": name, "name": peer, "ms": ms, "ratio": middle, "low": low, "high": high})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="jax")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rows = [
        row for name in options.models.split(",") for row in measure(options.backend, name, options.rounds, STEPS[name])
    ]
    what = f"batch {BATCH}, {options.rounds} rounds"
    print(f"{machine()['name']}, {options.backend} {backends.installed(options.backend)}, {what}")
    cells = [
        [r["model"], r["name"], f"{r['ms']:.2f}"]
        + ([f"{r['ratio']:.2f}", f"{r['low']:.2f} - {r['high']:.2f}"] if "ratio" in r else ["", ""])
        for r in rows
    ]
    print(table(["model", "", "ms/step", "ratio", "quartiles"], cells))
    framework = f"{options.backend} {backends.installed(options.backend)}"
    keep(f"frameworks-{options.backend}", rows, framework=framework, rounds=options.rounds)


if __name__ == "__main__":
    main()
