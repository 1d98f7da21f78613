"""The schedule chapter's five schedules: LeNet on Fashion-MNIST, 30 epochs, batch 256, several seeds.

    python benchmarks/schedules.py [--seeds 5] [--epochs 30] [--clip 1]
    python benchmarks/schedules.py --draw        the figure, from the figures that are kept

Each seed draws its own starting weights and its own order of examples. The published figures are test accuracies after
30 epochs, over the chapter's frameworks and editions. The gradient is clipped to norm 1, which the chapter does not do:
without it some seeds never learn at a rate of 0.5, and the last epochs at a constant 0.3 jump up and down.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).parent
CLIP = 1.0
SCHEDULES = {
    "constant": ("constant(0.3)", (0.877, 0.897)),
    "square root": ("inverse_power(0.1, 1, 0.5).in_epochs()", (0.876, 0.905)),
    "multi-factor": ("drops(0.5, [15, 30], 0.5).in_epochs()", (0.869, 0.907)),
    "cosine": ("cosine(0.3, 20, end=0.01).in_epochs()", (0.892, 0.911)),
    "warm-up + cosine": ("cosine(0.3, 15, end=0.01).warmup(5).in_epochs()", (0.878, 0.913)),
}


def measure(seeds: int, epochs: int, clip: float) -> None:
    from machine import keep, machine, table

    import samestep as ss
    from samestep.models import torch as models

    data, rows, cells = ss.fashion_mnist(), [], []
    for name, (schedule, published) in SCHEDULES.items():
        runs = []
        for seed in range(seeds):
            trainer = ss.Trainer(
                max_epochs=epochs, schedule=schedule, shards=1, gradient_clip_val=clip, seed=seed, progress=False
            )
            runs.append(trainer.fit(models.lenet_modern(seed=seed), data).history)
            print(name, seed, runs[-1][-1], file=sys.stderr, flush=True)
        last = [run[-1]["test_accuracy"] for run in runs]
        mean, spread = statistics.mean(last), statistics.stdev(last)
        gap = statistics.mean(run[-1]["train_accuracy"] - run[-1]["test_accuracy"] for run in runs)
        curves = {
            column: [[run[e][column] for e in range(epochs)] for run in runs]
            for column in ("train_loss", "train_accuracy", "test_accuracy")
        }
        rows.append({"name": name, "schedule": schedule, "published": published, "mean": mean, "spread": spread,
                     "least": min(last), "most": max(last), "gap": gap, "curves": curves})  # fmt: skip
        cells.append([name, f"{mean:.3f} ± {spread:.3f}", f"{published[0]:.3f} - {published[1]:.3f}", f"{gap:.3f}"])
    print(f"{machine()['name']}, {epochs} epochs, {seeds} seeds")
    print(table(["schedule", "test accuracy", "published", "train - test"], cells))
    keep("schedules" if clip == CLIP else f"schedules-clip{clip:g}", rows, epochs=epochs, seeds=seeds, clip=clip)


def draw() -> None:
    import numpy as np
    from matplotlib.figure import Figure

    result = json.loads((HERE / "results" / "schedules-gpu.json").read_text())
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, column in zip(figure.subplots(1, 2), ("test_accuracy", "train_loss"), strict=True):
        for row in result["rows"]:
            curves = np.array(row["curves"][column])
            epochs = np.arange(1, curves.shape[1] + 1)
            [line] = axes.plot(epochs, curves.mean(0), label=row["name"])
            axes.fill_between(epochs, curves.min(0), curves.max(0), color=line.get_color(), alpha=0.15, linewidth=0)
        axes.set(xlabel="epoch", ylabel=column.replace("_", " "))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylim(0.7, 0.93)
    figure.axes[0].legend(fontsize=8)
    figure.suptitle(f"LeNet on Fashion-MNIST: mean and range of {result['seeds']} seeds", fontsize=10)
    figure.savefig(HERE / "results" / "schedules.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--clip", type=float, default=CLIP)
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    if options.draw:
        draw()
    else:
        measure(options.seeds, options.epochs, options.clip)


if __name__ == "__main__":
    main()
