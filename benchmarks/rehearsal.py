"""What a run's own checks cost: the rehearsal as a number of steps, and the spot checks as a part of an epoch.

    python benchmarks/rehearsal.py [--backend torch] [--devices auto] [--epochs 4] [--models lenet,mlp]

Each model trains on 60,000 random images in batches of 256, in 8 shards. The checks are timed where they stand, in the fit
itself; a step's time is that of the epochs after the first, without them. So the two figures are of one run.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
import warnings

import numpy as np

import samestep as ss
from samestep.data.feed import Batch
from samestep.training import rehearsal

EXAMPLES, BATCH = 60_000, 256
TIMES: dict[str, list[float]] = {}


def timed(name: str) -> None:
    """Have a method of the rehearsal write down how long it takes. It fetches results, so it ends when the device has ended."""
    method = getattr(rehearsal.Rehearsal, name)

    def call(self: rehearsal.Rehearsal, step: int, batch: Batch) -> None:
        self.group.fingerprints()  # waits for the steps before
        start = time.perf_counter()
        method(self, step, batch)
        TIMES.setdefault(name, []).append(time.perf_counter() - start)

    setattr(rehearsal.Rehearsal, name, call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--models", default="lenet,mlp")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    models = importlib.import_module(f"samestep.models.{options.backend}")
    draw = np.random.default_rng(0)
    data = draw.random((EXAMPLES, 1, 28, 28), dtype=np.float32), draw.integers(0, 10, EXAMPLES)
    for name in ("batch", "shard"):
        timed(name)
    for name in options.models.split(","):
        TIMES.clear()
        trainer = ss.Trainer(options.epochs, BATCH, devices=options.devices, schedule=0.1, progress=False)
        history = trainer.fit(getattr(models, name)(), data).history
        checks = TIMES["shard"][1:]
        epoch = statistics.median(row["seconds"] - own for row, own in zip(history[1:], checks, strict=True))
        step, check = epoch / -(-EXAMPLES // BATCH), statistics.median(checks)
        whole = TIMES["batch"][0]
        print(f"{options.backend}, {name}: step {1e3 * step:.2f} ms", end="; ")
        print(f"rehearsal {1e3 * whole:.0f} ms = {whole / step:.1f} steps, with what is compiled or recorded", end="; ")
        print(f"spot check {1e3 * check:.1f} ms = {check / epoch:.2%} of an epoch", flush=True)


if __name__ == "__main__":
    main()
