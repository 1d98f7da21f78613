"""LeNet on Fashion-MNIST on several numbers of devices: the fingerprint after training, and the seconds per epoch.

    python benchmarks/sameness.py [--epochs 3] [--devices 1,2,3,8]

On one GPU, or on the CPU, the devices are replicas on it: they share its arithmetic, so more of them are not faster here.
"""

from __future__ import annotations

import argparse
import statistics

from machine import keep, machine, table

import samestep as ss
from samestep.models import torch as models


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--devices", default="1,2,3,8")
    options = parser.parse_args()
    data, rows = ss.fashion_mnist(), []
    for count in map(int, options.devices.split(",")):
        trainer = ss.Trainer(max_epochs=options.epochs, schedule=0.2, devices=count, progress=False)
        run = trainer.fit(models.lenet(), data)
        seconds = statistics.median(row["seconds"] for row in run.history)
        accuracy = run.history[-1]["test_accuracy"]
        rows.append({"devices": count, "fingerprint": run.fingerprint, "seconds": seconds, "test_accuracy": accuracy})
        print(
            f"{count} devices  {run.fingerprint[:16]}  {seconds:.2f} s/epoch  test accuracy {accuracy:.4f}", flush=True
        )
    assert len({row["fingerprint"] for row in rows}) == 1, "the fingerprints differ"
    print(f"\n{machine()['name']}, {options.epochs} epochs")
    cells = [[str(r["devices"]), r["fingerprint"][:16], f"{r['seconds']:.2f}"] for r in rows]
    print(table(["devices", "fingerprint", "s/epoch"], cells))
    keep("sameness", rows, epochs=options.epochs)


if __name__ == "__main__":
    main()
