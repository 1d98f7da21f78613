"""What a portable run costs: the time of a step with SAMESTEP_PORTABLE=1 over that without, on this CPU.

    python benchmarks/portable.py [--backend torch] [--rounds 5] [--models lenet,mlp,wide]

The two take turns, in processes of their own, on one device. A process trains on 5,120 random images in batches of 256, and its
figure is the median epoch after the first. `wide` is an MLP of 784, 1024, 1024 and 10 units. For MXNet, run it with the
Python of its environment.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import subprocess
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES, BATCH, EPOCHS = 5120, 256, 5


def measure(backend: str, name: str) -> float:
    """Milliseconds a step."""
    import numpy as np

    import samestep as ss

    models = importlib.import_module(f"samestep.models.{backend}")
    draw = np.random.default_rng(0)
    data = draw.random((EXAMPLES, 1, 28, 28), dtype=np.float32), draw.integers(0, 10, EXAMPLES)
    model = models.mlp((784, 1024, 1024, 10)) if name == "wide" else getattr(models, name)()
    trainer = ss.Trainer(max_epochs=EPOCHS, batch_size=BATCH, devices="cpu", schedule=0.1, progress=False)
    seconds = [row["seconds"] for row in trainer.fit(model, data).history[1:]]
    return 1e3 * statistics.median(seconds) / (EXAMPLES // BATCH)


def run(backend: str, name: str, portable: bool) -> float:
    command = [sys.executable, __file__, "--measure", backend, name]
    env = os.environ | {"SAMESTEP_PORTABLE": str(int(portable)), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--models", default="lenet,mlp,wide")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        warnings.simplefilter("ignore")
        print(measure(*options.measure))
        return
    for name in options.models.split(","):
        times: dict[bool, list[float]] = {True: [], False: []}
        for i in range(options.rounds):
            for portable in sorted(times, reverse=bool(i % 2)):
                times[portable].append(run(options.backend, name, portable))
        ours, usual = (statistics.median(times[portable]) for portable in (True, False))
        pairs = [a / b for a, b in zip(times[True], times[False], strict=True)]
        spread = f"single rounds {min(pairs):.2f} to {max(pairs):.2f}"
        print(f"{options.backend}, {name}: portable {ours:.1f} ms, usual {usual:.1f} ms", end=", ")
        print(f"ratio {ours / usual:.2f} ({spread})", flush=True)


if __name__ == "__main__":
    main()
