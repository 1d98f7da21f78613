"""The cost of sameness: time per step at 1, 2, 8 and 16 shards against a plain PyTorch loop, in one run.

    python benchmarks/cost.py [--rounds 5] [--steps 40]

LeNet, batch 256, data on the device. The plain loop draws a random batch, does zero_grad, forward, backward and a step of
torch.optim.SGD, with PyTorch's own settings. Rounds of the peers alternate; the median over rounds is kept, with the least
and the most.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import numpy as np
import torch
import torch.nn.functional as F
from machine import keep, machine, table

import samestep as ss
from samestep.models import torch as models

BATCH = 256


def plain(x: torch.Tensor, y: torch.Tensor, steps: int) -> float:
    model = models.lenet().to(x.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def go(count: int) -> None:
        for _ in range(count):
            index = torch.randint(len(x), (BATCH,), device=x.device)
            optimizer.zero_grad()
            F.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
        if x.is_cuda:
            torch.cuda.synchronize()

    go(5)
    began = time.perf_counter()
    go(steps)
    return (time.perf_counter() - began) / steps


def ours(data: ss.Data, shards: int, threads: int) -> float:
    """Seconds per step over one epoch, the second of a fit, everything that a fit does between its steps included."""
    trainer = ss.Trainer(max_epochs=2, batch_size=BATCH, shards=shards, threads_per_shard=threads, progress=False)
    row = trainer.fit(models.lenet(), data).history[-1]
    return row["seconds"] / (row["step"] / 2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cores = len(os.sched_getaffinity(0))
    random = np.random.default_rng(0)
    n = BATCH * options.steps
    x, y = random.random((n, 1, 28, 28), dtype=np.float32), random.integers(0, 10, n)
    data = ss.Data(train=(x, y))
    placed = torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)
    peers = {"plain PyTorch loop": lambda: plain(*placed, options.steps)}
    for shards in (1, 2, 8, 16):
        # one shard has all cores for itself; two or more share them out
        threads = 1 if device == "cuda" else max(1, cores // shards)
        name = f"samestep, {shards} shards" if shards > 1 else "samestep, 1 shard"
        peers[name] = lambda shards=shards, threads=threads: ours(data, shards, threads)
    times: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(options.rounds):
        for name, peer in peers.items():
            times[name].append(peer() * 1e3)
    base = statistics.median(times["plain PyTorch loop"])
    rows = [
        {
            "name": name,
            "ms": statistics.median(t),
            "least": min(t),
            "most": max(t),
            "ratio": statistics.median(t) / base,
        }
        for name, t in times.items()
    ]
    where, what = machine(), f"LeNet, batch {BATCH}, {options.rounds} rounds of {options.steps} steps"
    print(f"{where['name']}, torch {where['torch']}, {what}")
    cells = [[r["name"], f"{r['ms']:.2f}", f"{r['least']:.2f} - {r['most']:.2f}", f"{r['ratio']:.2f}"] for r in rows]
    print(table(["", "ms/step", "least - most", "ratio"], cells))
    keep("cost", rows, rounds=options.rounds, steps=options.steps, batch=BATCH)


if __name__ == "__main__":
    main()
