"""From nothing to 90 % on Fashion-MNIST: how many of 20 trainings get there, and in how many seconds.

    SAMESTEP_DATA=FOLDER python benchmarks/ninety.py [--seeds 20] [--model lenet_modern] [--epochs 12] [--batch 512]
        [--lr 0.1] [--momentum 0.9] [--decay 0.001] [--warmup 0.25] [--compile] [--precision tf32] [--shards 8]
    python benchmarks/ninety.py --tiny          a few examples, to see that it runs

Each run is one `Trainer.fit` with another seed, which draws the weights, the order and the noise. What is timed:
`fit` is the wall time from the call of `fit` to its return: hashing the data, copying them to the device, recording, all
epochs, the final weights; not the reading of the files, and not the test, which is made once, after the clock was
stopped. `epochs` is the sum of row["seconds"] over the epochs, so without what comes before the first of them. No run is
left out: the first one also pays for what the process loads once (CUDA's context is made before it). SAMESTEP_DATA is the
folder with the four files of Fashion-MNIST.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
import traceback
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from machine import keep, machine, table

import samestep as ss
from samestep.models import torch as models

GOAL = 0.90
MEAN, DEVIATION = 0.2860, 0.3530  # of the training images


def settings(options: argparse.Namespace, steps: int, seed: int) -> dict[str, Any]:
    """Those of the Trainer."""
    last = options.epochs * steps
    rates = ss.one_cycle(options.lr, last, up=options.warmup) if options.warmup else ss.cosine(options.lr, last)
    given = {"max_epochs": options.epochs, "batch_size": options.batch, "shards": options.shards, "seed": seed}
    rule = ss.sgd(momentum=options.momentum, nesterov=options.momentum > 0, weight_decay=options.decay)
    given |= {"optimizer": rule, "schedule": rates, "progress": False, "devices": options.devices}
    new = {"compile": options.compile, "precision": options.precision, "streams": options.streams}
    return given | {name: value for name, value in new.items() if value}


def one(options: argparse.Namespace, data: ss.Data, seed: int) -> dict[str, Any]:
    """One training and its test."""
    model = getattr(models, options.model)(seed=seed)
    steps = -(-len(data.train) // options.batch)
    trainer = ss.Trainer(**settings(options, steps, seed))
    only = copy.copy(data)
    only.test = None
    began = time.perf_counter()
    run = trainer.fit(model, only)
    wall = time.perf_counter() - began
    return {
        "seed": seed, "accuracy": trainer.evaluate(run.model, data)["accuracy"], "fit": wall,
        "epochs": sum(row["seconds"] for row in run.history), "last_epoch": run.history[-1]["seconds"],
        "fingerprint": run.fingerprint,
    }  # fmt: skip


def counted(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """How many came to the goal, and how many did so in two seconds."""
    reached = [row for row in rows if row["accuracy"] >= GOAL]
    return len(reached), sum(row["fit"] <= 2 for row in reached)


def kept(options: argparse.Namespace, rows: list[dict[str, Any]], about: dict[str, Any], quiet: bool = False) -> None:
    reached, both = counted(rows)
    if not options.tiny or os.environ.get("OUT"):
        keep("ninety", rows, quiet, recipe=about, reached=reached, in_two_seconds=both, goal=GOAL)


def examples(options: argparse.Namespace) -> ss.Data:
    if options.tiny:
        random = np.random.default_rng(0)
        x, y = random.random((512, 1, 28, 28), dtype=np.float32), random.integers(0, 10, 512)
        return ss.Data(train=(x, y), test=(x, y))
    data = ss.fashion_mnist()
    if not options.raw:  # each pixel with mean 0 and deviation 1 over the training images
        data = ss.Data(
            *(((half.x - np.float32(MEAN)) / np.float32(DEVIATION), half.y) for half in (data.train, data.test))
        )
    return data


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--model", default="lenet_modern")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--decay", type=float, default=1e-3)
    parser.add_argument(
        "--warmup", type=float, default=0.25, help="the share of steps in which one_cycle rises; 0: cosine"
    )
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--precision", default="", help="as the Trainer takes it; empty: its default")
    parser.add_argument("--streams", type=int, default=0)
    parser.add_argument("--raw", action="store_true", help="pixels from 0 to 1, as they come")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.seeds, options.epochs, options.batch = min(options.seeds, 2), 2, 128
    unknown = {"compile", "precision", "streams"} - {field.name for field in fields(ss.Trainer)}
    if wanted := [name for name in sorted(unknown) if getattr(options, name)]:
        parser.error(f"this samestep has no {', '.join(wanted)}")
    data, rows = examples(options), []
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
    about = {name: value for name, value in vars(options).items() if name not in ("seeds", "first", "tiny", "devices")}
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    for seed in range(options.first, options.first + options.seeds):
        try:
            rows.append(one(options, data, seed))
        except Exception:
            print(f"seed {seed} failed:\n" + "\n".join(traceback.format_exc().splitlines()[-4:]), flush=True)
            continue
        row = rows[-1]
        print(f"seed {seed}: {row['accuracy']:.4f}, fit {row['fit']:.2f} s, epochs {row['epochs']:.2f} s", flush=True)
        kept(options, rows, about, quiet=True)
    if not rows:
        raise SystemExit("no run came to its end")

    def spread(name: str) -> tuple[float, float]:
        values = [row[name] for row in rows]
        return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0

    reached, both = counted(rows)
    cells = []
    for name in ("accuracy", "fit", "epochs"):
        mean, deviation = spread(name)
        values = [row[name] for row in rows]
        digits = 4 if name == "accuracy" else 3
        cells.append([
            {"fit": "fit, s (all of it)", "epochs": "its epochs, s"}.get(name, "test accuracy"),
            f"{mean:.{digits}f} ± {deviation:.{digits}f}", f"{min(values):.{digits}f}", f"{max(values):.{digits}f}",
        ])  # fmt: skip
    print(f"{machine()['name']}, torch {machine()['torch']}; {len(rows)} of {options.seeds} runs came to their end")
    print(table(["", "mean ± sd", "least", "most"], cells))
    print(
        f"{reached} of {len(rows)} reached {GOAL:.2f}; {both} of {len(rows)} did so with a fit of at most 2 s",
        flush=True,
    )
    kept(options, rows, about)


if __name__ == "__main__":
    main()
