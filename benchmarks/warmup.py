"""Whether a warm-up helps a deep net: ResNet-18 at a large rate, with warm-ups of 0, 1 and 3 of 8 epochs, three seeds each.

    python benchmarks/warmup.py [FOLDER]        about 15 minutes on two cores; with a folder it can be interrupted and repeated

The trainings are those of `samestep lab sweep examples/warmup.py --of warmup`; beside their scores, how far the weights have
drifted: the length of the way from the first weights to the last, against the length of the first.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from machine import keep, table

import samestep as ss
from samestep.models.torch import resnet18

HERE = Path(__file__).parent
SEEDS, WARM, RATE = 3, (0, 1, 3), 0.3


def drift(folder: Path, seed: int) -> float:
    start = {name: tensor.detach().numpy() for name, tensor in resnet18(seed=seed).named_parameters()}
    end = ss.Run.load(folder).weights()
    moved = sum(float(((end[name] - tensor) ** 2).sum()) for name, tensor in start.items())
    return (moved / sum(float((tensor**2).sum()) for tensor in start.values())) ** 0.5


def main() -> None:
    with tempfile.TemporaryDirectory() if len(sys.argv) < 2 else nullcontext(sys.argv[1]) as folder:
        values = ",".join(map(str, WARM))
        options = [
            "--of",
            "warmup",
            "--values",
            values,
            "--lr",
            str(RATE),
            "--seeds",
            str(SEEDS),
            "--folder",
            folder,
            "--json",
        ]
        script = str(HERE.parent / "examples" / "warmup.py")
        command = [sys.executable, "-m", "samestep", "lab", "sweep", script, *options]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows = json.loads(done.stdout)["rows"]
        for row, warm in zip(rows, WARM, strict=True):
            row["drift"] = [drift(Path(folder) / f"warm-up-{warm}-seed-{seed}", seed) for seed in range(SEEDS)]
    keep("warmup", rows, rate=RATE, seeds=SEEDS)
    shown = [[row["setting"], f"{row['train_loss']:.3f}", f"{row['test_accuracy']:.3f} ± {row['test_accuracy_std']:.3f}",
              f"{np.mean(row['drift']):.2f}"] for row in rows]  # fmt: skip
    print(table(["", "train loss", "test accuracy", "drift"], shown))


if __name__ == "__main__":
    main()
