"""A step of LeNet with this tree against the same step with another commit: what a change of the code costs.

    python benchmarks/against.py COMMIT [--backend jax] [--shards 8,1] [--rounds 5]

The two take turns, in processes of their own, on one device. A process trains on 5,120 random images in batches of 256, and its
figure is the median epoch after the first. Printed are the medians over the rounds and the ratio, this tree to the commit.
For MXNet, run it with the Python of its environment.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES, BATCH, EPOCHS = 5120, 256, 6


def measure(backend: str, shards: int) -> float:
    """Milliseconds a step."""
    import numpy as np

    import samestep as ss

    draw = np.random.default_rng(0)
    data = draw.random((EXAMPLES, 1, 28, 28), dtype=np.float32), draw.integers(0, 10, EXAMPLES)
    model = importlib.import_module(f"samestep.models.{backend}").lenet()
    trainer = ss.Trainer(max_epochs=EPOCHS, batch_size=BATCH, shards=shards, devices=1, schedule=0.1, progress=False)
    seconds = [row["seconds"] for row in trainer.fit(model, data).history[1:]]
    return 1e3 * statistics.median(seconds) / (EXAMPLES // BATCH)


def run(tree: Path, backend: str, shards: int) -> float:
    command = [sys.executable, __file__, "--measure", backend, str(shards)]
    env = os.environ | {"PYTHONPATH": str(tree / "src"), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--shards", default="8,1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        warnings.simplefilter("ignore")
        print(measure(options.measure[0], int(options.measure[1])))
        return
    if not options.commit:
        parser.error("name the commit to compare with")
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", options.commit, "src"], cwd=ROOT, stdout=subprocess.PIPE, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        trees = {"this tree": ROOT, options.commit: Path(folder)}
        for shards in map(int, options.shards.split(",")):
            times: dict[str, list[float]] = {name: [] for name in trees}
            for i in range(options.rounds):
                for name in sorted(trees, reverse=bool(i % 2)):
                    times[name].append(run(trees[name], options.backend, shards))
            ours, theirs = (statistics.median(times[name]) for name in trees)
            pairs = [a / b for a, b in zip(*times.values(), strict=True)]
            spread = f"single rounds {min(pairs):.2f} to {max(pairs):.2f}"
            print(f"{options.backend}, {shards} shards: {ours:.1f} ms, {options.commit} {theirs:.1f} ms", end=", ")
            print(f"ratio {ours / theirs:.3f} ({spread})", flush=True)


if __name__ == "__main__":
    main()
