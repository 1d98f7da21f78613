"""The multi-device chapter's job over several seeds: LeNet on Fashion-MNIST, 10 epochs, batch 256, rate 0.2.

    python benchmarks/accuracy.py [--seeds 5]

The chapter's editions print one run each: test accuracies of .83 to .85.
"""

from __future__ import annotations

import argparse
import statistics

from machine import keep, machine, table

import samestep as ss
from samestep.models import torch as models


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    data, rows = ss.fashion_mnist(), []
    for seed in range(options.seeds):
        trainer = ss.Trainer(max_epochs=10, schedule=0.2, seed=seed, progress=False)
        run = trainer.fit(models.lenet(seed=seed), data)
        rows.append(
            {"seed": seed, "fingerprint": run.fingerprint, "curve": [row["test_accuracy"] for row in run.history]}
        )
        print(seed, rows[-1]["curve"][-1], run.fingerprint[:16], flush=True)
    last = [row["curve"][-1] for row in rows]
    print(f"{machine()['name']}: {statistics.mean(last):.4f} ± {statistics.stdev(last):.4f}")
    print(table(["seed", "test accuracy"], [[str(row["seed"]), f"{row['curve'][-1]:.4f}"] for row in rows]))
    keep("accuracy", rows)


if __name__ == "__main__":
    main()
