"""Whether a slow data set keeps up: `Data(readers=4)` against a plain PyTorch loop over `DataLoader(num_workers=4)`.

    python benchmarks/readers.py [--rounds 3] [--epochs 4] [--readers 4]

An item takes 2 ms, once by waiting (a disk, a network) and once by computing (decoding). A small MLP trains on 2048 of them
in batches of 256, samestep in 8 shards. Rounds of the two alternate. An epoch's time is the median of those after the first.
The whole time has the start of the workers in it; samestep spawns them, where PyTorch forks, and first checks each fit.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import torch
from machine import keep, table
from torch.utils.data import DataLoader, Dataset

import samestep as ss
from samestep.models.torch import mlp

EXAMPLES, BATCH, SECONDS = 2048, 256, 0.002


class Slow(Dataset):  # type: ignore[type-arg]
    """Items that take 2 ms."""

    def __init__(self, computes: bool) -> None:
        self.computes = computes

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, i: int) -> Any:
        if self.computes:
            end = time.thread_time() + SECONDS  # of work, however many share a core
            while time.thread_time() < end:
                pass
        else:
            time.sleep(SECONDS)
        return torch.full((32,), float(i % 97)) / 97, i % 10


def plain(computes: bool, epochs: int, readers: int) -> list[float]:
    """Seconds of each epoch of the loop that a user of PyTorch would write."""
    torch.manual_seed(0)
    model, loss = mlp((32, 64, 10)), torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Slow(computes), batch_size=BATCH, shuffle=True, num_workers=readers)
    seconds = []
    for _ in range(epochs):
        began, total = time.perf_counter(), 0.0
        for x, y in loader:
            optimizer.zero_grad()
            value = loss(model(x), y)
            value.backward()
            optimizer.step()
            total += value.item()
        seconds.append(time.perf_counter() - began)
    return seconds


def ours(computes: bool, epochs: int, readers: int) -> list[float]:
    """Seconds of each epoch of a fit."""
    trainer = ss.Trainer(epochs, BATCH, shards=8, devices="cpu", schedule=0.1, progress=False)
    run = trainer.fit(mlp((32, 64, 10)), ss.Data(Slow(computes), readers=readers))
    return [row["seconds"] for row in run.history]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 3), ("epochs", 4), ("readers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # PyTorch's, of more workers than cores
    rows = []
    for kind, computes in (("waits", False), ("computes", True)):
        found: dict[str, list[tuple[float, float]]] = {"plain": [], "ours": []}
        for _ in range(options.rounds):
            for name, run in (("plain", plain), ("ours", ours)):
                began = time.perf_counter()
                seconds = run(computes, options.epochs, options.readers)
                found[name].append((statistics.median(seconds[1:]), time.perf_counter() - began))
        (theirs, whole), (own, all_) = (
            [statistics.median(part) for part in zip(*found[name], strict=True)] for name in found
        )
        rows.append(
            {"item": kind, "plain": theirs, "ours": own, "ratio": own / theirs, "plain_all": whole, "ours_all": all_}
        )
    header = [
        "2 ms an item, which",
        "DataLoader, s/epoch",
        "samestep, s/epoch",
        "ratio",
        "whole, s",
        "samestep, whole, s",
    ]
    cells = [
        [r["item"], *(f"{r[key]:.2f}" for key in ("plain", "ours", "ratio", "plain_all", "ours_all"))] for r in rows
    ]
    print(table(header, cells))
    keep("readers", rows, rounds=options.rounds, epochs=options.epochs, readers=options.readers)


if __name__ == "__main__":
    main()
