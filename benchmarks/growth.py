"""How the time of a step grows: with shards, replicas, parameters and the batch, with the slope that was fitted.

    python benchmarks/growth.py [--device cuda] [--rounds 3] [--budget 110] [--panels shards,batch] [--compile]
    python benchmarks/growth.py --tiny            few points, to see that it runs
    python benchmarks/growth.py --draw growth-gpu.json      only the figure, from kept numbers

LeNet at batch 256 with 1 to 64 shards; the same with 8 shards on 1 to 8 replicas, which share the one device; an MLP of 10⁴ to
10⁸ parameters at batch 256 with 8 shards; LeNet with 8 shards at batches of 32 to 4096. A point is the median over --rounds
epochs of a fit, after a first one, with the least and the most. The slope is that of a line through the upper half of the
points, in logarithms: 1 is proportional. The work grows with slope 1 in parameters and in the batch, with slope 0 in shards.
On one device, k replicas update k models, so that part of the work grows with slope 1. For parameters and the batch, a plain
loop (plain/torch.py) is measured beside it: what has no room in a cache takes longer for everybody.

It writes growth-*.json and growth-*.png where the results are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import HERE, RESULTS, keep, machine, table
from plain.torch import loop

import samestep as ss
from samestep.models import torch as models

LABELS = {
    "shards": "shards (LeNet, batch 256)", "replicas": "replicas on one device (LeNet, 8 shards)",
    "parameters": "parameters (MLP, batch 256, 8 shards)", "batch": "batch (LeNet, 8 shards)",
}  # fmt: skip
EPOCH = 0.5  # seconds, about; what is recorded on CPUs is recorded in the first one
MOST, LEAST = 200, 3  # steps of an epoch


def width(parameters: float) -> int:
    """Of the two hidden layers of an MLP of so many parameters, 784 inputs and 10 outputs."""
    return max(1, round((-(784 + 12) + math.sqrt((784 + 12) ** 2 + 4 * (parameters - 10))) / 2))


def random_data(examples: int) -> ss.Data:
    random = np.random.default_rng(0)
    return ss.Data(train=(random.random((examples, 1, 28, 28), dtype=np.float32), random.integers(0, 10, examples)))


def timed(model: Any, data: ss.Data, epochs: int, **settings: Any) -> list[float]:
    """Seconds per step of each epoch but the first."""
    with warnings.catch_warnings():
        warnings.simplefilter("once")
        run = ss.Trainer(max_epochs=epochs, schedule=0.01, progress=False, **settings).fit(model, data)
    steps = run.history[0]["step"]
    return [row["seconds"] / steps for row in run.history[1:]]


def point(model: Any, batch: int, rounds: int, peer: bool = False, **settings: Any) -> dict[str, float]:
    """On CPUs, a short fit says how many steps there is time for; then the fit that counts; then a plain loop, if wanted."""
    steps = room = max(LEAST, (400 << 20) // (batch * 28 * 28 * 4))  # of memory for examples
    if settings["devices"][0].startswith("cpu"):
        try_out = timed(model, random_data(LEAST * batch), 2, batch_size=batch, **settings)[0]
        steps = min(room, max(LEAST, int(EPOCH / try_out)))
    steps = min(MOST, steps)
    data = random_data(steps * batch)
    seconds = timed(model, data, rounds + 1, batch_size=batch, **settings)
    found = {"seconds": statistics.median(seconds), "least": min(seconds), "most": max(seconds), "steps": steps}
    return found | {"plain": plain(model, data, batch, steps, rounds)} if peer else found


def plain(model: Any, data: ss.Data, batch: int, steps: int, rounds: int) -> float:
    """Seconds per step of a plain loop on the same examples: the median of so many epochs, after a first one."""
    go, seconds = loop(model, data.train.x, data.train.y, batch, 0.01), []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        go(steps)  # waits for the device
        seconds.append((time.perf_counter() - began) / steps)
    return statistics.median(seconds[1:])


def slope(xs: list[float], ys: list[float]) -> float | None:
    """Of the upper half of the points, in logarithms."""
    half = len(xs) // 2
    if len(xs) - half < 2:
        return None
    return float(np.polyfit(np.log(xs[half:]), np.log(ys[half:]), 1)[0])


def grids(options: argparse.Namespace) -> dict[str, list[int]]:
    powers = [2**i for i in range(13)]
    found = {
        "shards": powers[:7], "replicas": [1, 2, 3, 4, 5, 6, 7, 8],
        "parameters": [round(10 ** (i / 2)) for i in range(8, 17)], "batch": powers[5:],
    }  # fmt: skip
    if options.tiny:
        found = {"shards": [1, 2, 4], "replicas": [1, 2], "parameters": [10**4, 10**5, 10**6], "batch": [32, 64, 128]}
    return {name: found[name] for name in options.panels.split(",")}


def measured(name: str, value: int, options: argparse.Namespace) -> dict[str, float]:
    device, extra = options.device, {"compile": True} if options.compile else {}
    how = {"rounds": options.rounds, "devices": [device], "shards": 8, **extra}
    if name == "shards":
        return point(models.lenet(), 256, **how | {"shards": value})
    if name == "replicas":
        return point(models.lenet(), 256, **how | {"devices": [device] * value})
    if name == "batch":
        return point(models.lenet(), value, peer=True, **how)
    hidden = width(value)
    model = models.mlp((784, hidden, hidden, 10), dropout=0.0)
    found = point(model, 256, peer=True, **how)
    return found | {"parameters": sum(weights.numel() for weights in model.parameters())}


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys(row["panel"] for row in result["rows"]))
    figure, axes = plt.subplots(2, 2, figsize=(10, 7.5), layout="constrained")
    for axis, name in zip(axes.flat, panels, strict=False):
        rows = [row for row in result["rows"] if row["panel"] == name]
        xs, ys = ([row[key] for row in rows] for key in ("x", "seconds"))
        ms = [1e3 * y for y in ys]
        errors = [
            [1e3 * (row["seconds"] - row["least"]) for row in rows],
            [1e3 * (row["most"] - row["seconds"]) for row in rows],
        ]
        axis.errorbar(
            xs, ms, yerr=errors, color="black", marker="o", markersize=4, linewidth=1.2, capsize=2, label="measured"
        )
        found = result["slopes"].get(name)
        half = len(xs) // 2
        if found is not None:
            middle, level = (math.exp(statistics.mean(map(math.log, values[half:]))) for values in (xs, ms))
            line = np.array([xs[half], xs[-1]], float)
            label = f"slope {found:.2f}, upper half"
            axis.plot(
                line,
                level * (line / middle) ** found,
                color="black",
                linestyle="--",
                linewidth=2.5,
                alpha=0.5,
                label=label,
            )
            ends = np.array([xs[0], xs[-1]], float)
            axis.plot(ends, ms[-1] * ends / ends[-1], color="black", linestyle=":", linewidth=1, label="slope 1")
        if "plain" in rows[0]:
            axis.plot(
                xs, [1e3 * row["plain"] for row in rows], color="0.5", marker="s", markersize=4, label="plain loop"
            )
        axis.set_xscale("log", base=10 if name == "parameters" else 2)
        axis.set_yscale("log")
        low, high = min(ms), max(ms)
        axis.set_ylim(low / 2.5, high * 2.5)
        if name != "parameters":
            axis.set_xticks(xs, [str(x) for x in xs])
        axis.set_xlabel(LABELS[name])
        axis.set_ylabel("ms per step")
        axis.grid(color="0.85", linewidth=0.6)
        axis.legend(frameon=False, fontsize=9)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(
        f"samestep, {result['machine']['name']}, torch {result['machine']['torch']}, {result['date']}", fontsize=11
    )
    figure.savefig(path, dpi=130)
    print(f"drawn in {path}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--budget", type=float, default=110, help="seconds in all; points that no longer fit are left out"
    )
    parser.add_argument("--panels", default=",".join(LABELS))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--draw", metavar="FILE", help="draw kept numbers")
    options = parser.parse_args()
    if options.draw:
        path = Path(options.draw)
        return draw(json.loads(path.read_text()), path.with_suffix(".png"))
    where, began, rows, slopes = machine(), time.perf_counter(), [], {}
    print(f"{where['name']}, torch {where['torch']}; {options.rounds} rounds", flush=True)
    todo = grids(options)
    for number, (name, values) in enumerate(todo.items()):
        until = began + options.budget * (number + 1) / len(todo)  # what one panel does not need, the next ones have
        mine = []
        for value in values:
            if time.perf_counter() > until:
                print(f"  {name} from {value} on: left out, the time is over", flush=True)
                break
            try:
                found = measured(name, value, options)
            except Exception:
                last = [line for line in traceback.format_exc().splitlines() if line.strip(" ^~|")][-3:]
                print(f"  {name} {value} failed:\n" + "\n".join(f"    {line[:200]}" for line in last), flush=True)
                continue
            mine.append({"panel": name, "x": found.pop("parameters", value), **found})
            took = time.perf_counter() - began
            if not options.tiny:
                keep("growth", rows + mine, quiet=True, slopes=slopes, rounds=options.rounds, compile=options.compile)
            print(
                f"  {name} {value}: {1e3 * found['seconds']:.3f} ms ({found['steps']} steps; {took:.0f} s)", flush=True
            )
        for key, label in (("seconds", name), ("plain", f"{name}, plain loop")):
            if mine and key in mine[0]:
                slopes[label] = slope([row["x"] for row in mine], [row[key] for row in mine])
        rows += mine
    cells = []
    for label, found in slopes.items():
        name, _, peer = label.partition(", ")
        mine = [row for row in rows if row["panel"] == name]
        ends = [f"{1e3 * row['plain' if peer else 'seconds']:.3f} ms at {row['x']}" for row in (mine[0], mine[-1])]
        cells.append([peer or LABELS[name], *ends, "" if found is None else f"{found:.2f}"])
    print(table(["", "first", "last", "slope of the upper half"], cells), flush=True)
    kept = RESULTS if not options.tiny or os.environ.get("OUT") else None
    if kept:
        keep("growth", rows, slopes=slopes, rounds=options.rounds, compile=options.compile)
        path = kept / f"growth-{where['short']}.json"
        try:
            draw(json.loads(path.read_text()), path.with_suffix(".png"))
        except Exception as error:
            print(f"not drawn here ({error}): python {HERE.name}/growth.py --draw {path.name}")


if __name__ == "__main__":
    main()
