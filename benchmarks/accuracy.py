"""The multi-device chapter's job over several seeds: LeNet on Fashion-MNIST, 10 epochs, batch 256, rate 0.2.

    python benchmarks/accuracy.py [--backend torch] [--seeds 5] [--python PYTHON]

Every run is `samestep train --model lenet --backend NAME` in a process of its own, with PYTHON: MXNet has one of its own. What
each framework gave is kept apart. The chapter's editions print one run each: test accuracies of .83 to .85.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import keep, machine, table

from samestep import Run

OWN = Path(__file__).parents[1] / ".venv-mxnet" / "bin" / "python"  # made by `make test`


def train(python: str, backend: str, seed: int, folder: str) -> Run:
    options = ["--backend", backend, "--seed", str(seed), "--run-dir", folder, "--checkpoint-every", "10 epochs"]
    subprocess.run([python, "-m", "samestep", "train", "--model", "lenet", "--quiet", *options], check=True)
    return Run.load(folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--python", help="the Python to run it with")
    options = parser.parse_args()
    python, rows = options.python or (str(OWN) if options.backend == "mxnet" else sys.executable), []
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            run = train(python, options.backend, seed, folder)
        rows.append(
            {"seed": seed, "fingerprint": run.fingerprint, "curve": [row["test_accuracy"] for row in run.history]}
        )
        print(seed, rows[-1]["curve"][-1], run.fingerprint[:16], flush=True)
    last = [row["curve"][-1] for row in rows]
    spread = statistics.stdev(last) if len(last) > 1 else 0.0
    print(f"{options.backend}, {machine()['name']}: {statistics.mean(last):.4f} ± {spread:.4f}")
    print(table(["seed", "test accuracy"], [[str(row["seed"]), f"{row['curve'][-1]:.4f}"] for row in rows]))
    name = "accuracy" if options.backend == "torch" else f"accuracy-{options.backend}"
    keep(name, rows, framework=f"{options.backend} {run.recipe['version']}")


if __name__ == "__main__":
    main()
