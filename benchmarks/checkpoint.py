"""What a checkpoint costs: LeNet with one after every step, and how long a step of a large model waits for one.

    python benchmarks/checkpoint.py [--large 100]        millions of weights of the large model

LeNet: rounds without and with checkpoints alternate. The large model: the time that a step waits for its checkpoint, beside
the time of one plain copy of the same tensors, taken in the same step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from math import isqrt
from pathlib import Path

import numpy as np
import torch
from machine import keep, machine, table

import samestep as ss
from samestep.models import torch as models
from samestep.runs.checkpoint import Writer

STEPS, ROUNDS = 40, 7


def lenet(data: ss.Data, every: int | None) -> tuple[float, int]:
    """Milliseconds a step, and checkpoints written a step."""
    written: list[int] = []

    class Counting(Writer):
        def close(self) -> None:
            super().close()
            written.append(self.written)

    import samestep.runs.run

    samestep.run.Writer = Counting  # type: ignore[misc]
    try:
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # not /tmp, which may be memory
            trainer = ss.Trainer(
                max_epochs=3, schedule=0.1, run_dir=f"{folder}/run", checkpoint_every=every, progress=False
            )
            run = trainer.fit(models.lenet(), data)
    finally:
        samestep.run.Writer = Writer  # type: ignore[misc]
    return 1e3 * statistics.mean(row["seconds"] for row in run.history[1:]) / STEPS, written[0]


def large(millions: int) -> dict:
    """How long the steps of a large model wait for a checkpoint, and how long a copy takes."""
    width = isqrt(millions * 1_000_000)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, width), torch.nn.Linear(width, width), torch.nn.Linear(width, 10))
    waits: list[float] = []
    copies: list[float] = []
    memory: dict[str, np.ndarray] = {}
    submit = Writer.submit

    def timed(self: Writer, about: dict, tensors: dict) -> None:
        began = time.perf_counter()
        submit(self, about, tensors)
        waits.append(time.perf_counter() - began)
        began = time.perf_counter()
        for name, tensor in tensors.items():
            if name in memory:
                np.copyto(memory[name], tensor)
            else:
                memory[name] = np.array(tensor)
        copies.append(time.perf_counter() - began)

    Writer.submit = timed  # type: ignore[method-assign]
    x, y = np.random.default_rng(0).random((64 * 8, 32), "float32"), np.zeros(64 * 8, np.int64)
    try:
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            trainer = ss.Trainer(max_epochs=1, batch_size=64, shards=2, schedule=1e-3, run_dir=f"{folder}/run",
                                 checkpoint_every=1, keep_checkpoints=1, progress=False)  # fmt: skip
            run = trainer.fit(model, (x, y))
    finally:
        Writer.submit = submit  # type: ignore[method-assign]
    steps = run.history[0]["seconds"] / 8
    # without the first few, in which files and memory are new
    return {"name": f"{millions} M weights", "step": 1e3 * steps, "waits": 1e3 * statistics.median(waits[3:]),
            "copy": 1e3 * statistics.median(copies[3:])}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--large", type=int, default=100)
    options = parser.parse_args()
    x, y = np.random.default_rng(0).random((STEPS * 256, 1, 28, 28), "float32"), np.zeros(STEPS * 256, np.int64)
    times: dict[int | None, list[float]] = {None: [], 1: []}
    written = 0
    for _ in range(ROUNDS):
        for every in times:
            ms, count = lenet(ss.Data((x, y)), every)
            times[every].append(ms)
            written = max(written, count)
            print(every, f"{ms:.2f} ms/step", f"{count} written", file=sys.stderr, flush=True)
    ratios = [b / a for a, b in zip(times[None], times[1], strict=True)]
    without, with_ = (statistics.median(times[every]) for every in times)
    rows = [{"name": "LeNet", "without": without, "with": with_, "ratio": statistics.median(ratios),
             "least": min(ratios), "most": max(ratios), "written": written, "steps": 3 * STEPS}]  # fmt: skip
    rows.append(large(options.large))
    print(machine()["name"])
    print(table(["LeNet", "ms/step", ""], [["no checkpoint", f"{without:.2f}", ""],
          ["one after every step", f"{with_:.2f}", f"{rows[0]['ratio']:.3f}"]]))  # fmt: skip
    print(table([rows[1]["name"], "ms"], [["a step", f"{rows[1]['step']:.0f}"], ["it waits", f"{rows[1]['waits']:.0f}"],
          ["a copy", f"{rows[1]['copy']:.0f}"]]))  # fmt: skip
    keep("checkpoint", rows, rounds=ROUNDS)


if __name__ == "__main__":
    main()
