"""How fast the lab descends: 10,000 paths of 1,000 steps at once, against the chapter's loop, one path after the other.

    taskset -c 0 python benchmarks/lab.py [--rounds 5]

Both take noisy steps on x1² + 2·x2² with a rate of 0.1, on one core. The chapter's loop makes 10 paths a round; times are per
path and step. Rounds alternate.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import statistics
import time

from machine import keep, table

from samestep.lab import descend, train_2d

PATHS, STEPS, FEW = 10_000, 1_000, 10


def chapters(x1: float, x2: float, s1: float, s2: float) -> tuple[float, float, float, float]:
    """One step of SGD as the chapter writes it."""
    g1, g2 = 2 * x1 + random.gauss(0, 1), 4 * x2 + random.gauss(0, 1)
    return x1 - 0.1 * g1, x2 - 0.1 * g2, 0, 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    ours, theirs = list[float](), list[float]()
    for _ in range(parser.parse_args().rounds):
        began = time.perf_counter()
        descend("quadratic", schedule=0.1, steps=STEPS, trajectories=PATHS)
        ours.append(time.perf_counter() - began)
        began = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            for _ in range(FEW):
                train_2d(chapters, steps=STEPS)
        theirs.append((time.perf_counter() - began) * PATHS / FEW)
    rows = [{"of": name, "seconds": seconds} for name, seconds in (("lab", ours), ("the chapter's loop", theirs))]
    keep("lab", rows, paths=PATHS, steps=STEPS)
    middle = [statistics.median(row["seconds"]) for row in rows]
    print(table(["10,000 paths of 1,000 steps", "s (least to most)", "ratio"], [
        [row["of"], f"{half:.2f} ({min(row['seconds']):.2f} to {max(row['seconds']):.2f})", f"{half / middle[0]:.1f}"]
        for row, half in zip(rows, middle, strict=True)
    ]))  # fmt: skip


if __name__ == "__main__":
    main()
