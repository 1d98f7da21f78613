"""Time per step of a framework's own plain loop against samestep on it, in one run.

    python benchmarks/frameworks.py --backend jax [--models lenet,mlp] [--rounds 9] [--shards 1,8]

LeNet and an MLP (784, 256, 10), batch 256, SGD, data on the device. The plain loops are in plain/, one file a framework;
they keep the loss and the accuracy of the epoch, as the chapters' loops do. samestep runs with 1 shard, which has as many
threads as the plain loop, and with 8; its figure is that of a whole epoch of a fit, with metrics, fingerprints and the
order of examples in it. The plain loop is run just before and just after each, and the ratio is the median of the ratios to
it: a machine that others use too is slow for all three or for none.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from machine import keep, machine, table

import samestep as ss
from samestep.backends import find

BATCH, RATE = 256, 0.1
MODELS: dict[str, dict[str, Any]] = {"lenet": {}, "mlp": {"dropout": 0.0}}
STEPS = {"lenet": 20, "mlp": 234}  # of an epoch: as Fashion-MNIST has, but a step of LeNet takes ten times as long


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


def measure(backend: str, name: str, rounds: int, steps: int, shards: Sequence[int]) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    examples = BATCH * steps
    x, y = random.random((examples, 1, 28, 28), dtype=np.float32), random.integers(0, 10, examples)
    model = getattr(importlib.import_module(f"samestep.models.{backend}"), name)(**MODELS[name])
    peer = importlib.import_module(f"plain.{backend}")
    go = peer.loop(model, x, y, BATCH, RATE)
    go(steps)  # compiles
    data, threads = ss.Data(train=(x, y)), getattr(peer, "THREADS", len(os.sched_getaffinity(0)))
    base, times = [plain(go, steps)], {n: list[tuple[float, float]]() for n in shards}
    for n, pairs in times.items():
        for _ in range(rounds):
            mine = ours(model, data, n, threads if n == 1 else 1)
            base.append(plain(go, steps))
            pairs.append((mine, (base[-2] + base[-1]) / 2))  # the plain loop just before, and just after
    rows: list[dict[str, Any]] = [{"model": name, "name": f"plain {backend} loop", "ms": 1e3 * statistics.median(base)}]
    for n, pairs in times.items():
        ratios = [mine / theirs for mine, theirs in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
        ms = 1e3 * statistics.median(mine for mine, _ in pairs)
        way = f"samestep, {n} shard{'s' * (n > 1)}"
        rows.append({"model": name, "name": way, "ms": ms, "ratio": middle, "low": low, "high": high})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="jax")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shards", default="1,8")
    options = parser.parse_args()
    shards = [int(n) for n in options.shards.split(",")]
    names = options.models.split(",")
    rows = [row for name in names for row in measure(options.backend, name, options.rounds, STEPS[name], shards)]
    what = f"batch {BATCH}, {options.rounds} rounds"
    print(f"{machine()['name']}, {options.backend} {find.installed(options.backend)}, {what}")
    cells = [
        [r["model"], r["name"], f"{r['ms']:.2f}"]
        + ([f"{r['ratio']:.2f}", f"{r['low']:.2f} - {r['high']:.2f}"] if "ratio" in r else ["", ""])
        for r in rows
    ]
    print(table(["model", "", "ms/step", "ratio", "quartiles"], cells))
    framework = f"{options.backend} {find.installed(options.backend)}"
    keep(f"frameworks-{options.backend}", rows, framework=framework, rounds=options.rounds)


if __name__ == "__main__":
    main()
