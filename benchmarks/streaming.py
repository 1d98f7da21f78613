"""A memory-mapped data set against the same examples in memory: time of a step, and how fast examples can be read at all.

    python benchmarks/streaming.py [--gib 4] [--models small,resnet18] [--rounds 3] [--steps N] [--folder FOLDER]
    python benchmarks/streaming.py --tiny             a few megabytes, to see that it runs

An np.memmap of uint8 images of 3 x 64 x 64 in a temporary folder, GIB large; it was just written, and so is in the page cache
if the machine has the memory. `Trainer.fit` trains on it, and on a copy in memory, which by the default rule stays on the
device if it takes up to a quarter of its free memory. Both have the same examples in the same order, so the fingerprints of all
steps must be equal. The model divides by 255 itself: bytes stay bytes until they are on the device. An epoch goes over all
images; or it has --steps steps over every n-th image, so that it still goes from one end of the file to the other: by default
so for ResNet-18 and on CPUs. A step's time is that of whole epochs, the second and later ones; rounds alternate.

The floors: one thread that only gathers shuffled batches (x[indices]); and that reads the file from its beginning to its end.
Models: small (two convolutions, stride 2) and ResNet-18, at batch 512.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from machine import keep, machine, table
from torch import Tensor, nn

import samestep as ss
from samestep.models import torch as models

IMAGE, CLASSES = (3, 64, 64), 10
BYTES = 3 * 64 * 64
STEPS = {True: {"resnet18": 100}, False: {"small": 40, "resnet18": 4}}  # of an epoch, with a GPU and without; else all


class Scaled(nn.Module):
    """A network that takes bytes."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x.float() / 255)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 20, 5, stride=2, padding=2), nn.Conv2d(20, 50, 5, stride=2, padding=2)
        self.dense1, self.dense2 = nn.Linear(50 * 8 * 8, 128), nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.dense2(F.relu(self.dense1(F.avg_pool2d(x, 2).flatten(1))))


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Scaled(Small() if name == "small" else models.resnet18(3, CLASSES, width=8 if name == "tiny" else 64))


def written(path: Path, images: int) -> np.memmap:
    """The file, opened for reading."""
    random, block = np.random.default_rng(0), 4096
    noise = random.integers(0, 256, (block, *IMAGE), np.uint8)
    with open(path, "wb") as file:
        for start in range(0, images, block):
            n = min(block, images - start)
            number = np.arange(start, start + n, dtype="<u4").view(np.uint8)  # so that no two images are the same
            noise[:n, 0, 0, :4] = number.reshape(n, 4)
            noise[:n].tofile(file)
    return np.memmap(path, np.uint8, "r", shape=(images, *IMAGE))


def floors(images: np.ndarray, batch: int) -> dict[str, float]:
    """Milliseconds for a batch, by one thread that does nothing else; and gigabytes a second."""
    order = np.random.default_rng(1).permutation(len(images))
    count = min(len(images) // batch, 200)
    began = time.perf_counter()
    for i in range(count):
        images[order[i * batch : (i + 1) * batch]]
    gathered = time.perf_counter() - began
    n, began = min(len(images), 1 << 17), time.perf_counter()
    for start in range(0, n, 4096):
        np.ascontiguousarray(images[start : start + 4096]).max()
    whole, bytes_ = time.perf_counter() - began, batch * count * BYTES
    return {"ms": gathered / count * 1e3, "gather_gbs": bytes_ / gathered / 1e9, "scan_gbs": n * BYTES / whole / 1e9}


def fit(name: str, data: ss.Data, epochs: int, options: argparse.Namespace) -> tuple[float, ss.Run, list[str]]:
    """Milliseconds per step over the second and later epochs."""
    settings: dict[str, Any] = {"precision": options.precision} if options.precision else {}
    if options.compile:
        settings["compile"] = True
    if options.last:
        settings["memory_format"] = "channels_last"
    if missing := settings.keys() - {one.name for one in fields(ss.Trainer)}:
        raise NotImplementedError(f"this samestep's Trainer has no {', '.join(sorted(missing))}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = ss.Trainer(
            max_epochs=epochs, batch_size=options.batch, shards=options.shards, devices=[options.device], schedule=0.01,
            optimizer=ss.sgd(momentum=0.9), progress=False, **settings,
        ).fit(model(name), data)  # fmt: skip
    steps = run.history[0]["step"]
    said = [str(one.message).splitlines()[0][:200] for one in caught]
    return statistics.mean(row["seconds"] for row in run.history[1:]) / steps * 1e3, run, said


def compare(
    name: str, ways: dict[str, ss.Data], options: argparse.Namespace, kept: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    times: dict[str, list[float]] = {way: [] for way in ways}
    prints, ratios = {}, []
    for number in range(options.rounds):
        for way, data in ways.items():
            began = time.perf_counter()
            ms, run, said = fit(name, data, 2, options)
            times[way].append(ms)
            prints.setdefault(way, run.fingerprints)
            if not number:
                steps = run.history[0]["step"]
                print(
                    f"  {name}, {way}: {ms:.3f} ms, {steps} steps, {time.perf_counter() - began:.1f} s in all",
                    flush=True,
                )
                for line in dict.fromkeys(said):
                    print(f"    says: {line}", flush=True)
        ratios.append(times["memory-mapped"][-1] / times["in memory"][-1])
        kept(rows_of(name, options, times, ratios, prints["memory-mapped"] == prints["in memory"]))
    return rows_of(name, options, times, ratios, prints["memory-mapped"] == prints["in memory"])


def rows_of(
    name: str, options: argparse.Namespace, times: dict[str, list[float]], ratios: list[float], same: bool
) -> list[dict[str, Any]]:
    found = []
    for way, values in times.items():
        ms = statistics.median(values)
        found.append({
            "model": name, "way": way, "ms": ms, "least": min(values), "most": max(values), "same": same,
            "gbs": options.batch * BYTES / ms / 1e6, "ratio": ms / statistics.median(times["in memory"]),
            "ratios": ratios if way == "memory-mapped" else [],
        })  # fmt: skip
    return found


def one(
    name: str, file: np.memmap, steps: int, options: argparse.Namespace, rows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The rows of one model, after those of others, with an epoch of so many steps; 0: over all images."""
    every = max(1, len(file) // (steps * options.batch)) if steps else 1
    chosen = file[::every][: steps * options.batch or None]
    labels = np.random.default_rng(2).integers(0, CLASSES, len(chosen))
    floor = floors(chosen, options.batch)
    told = "one thread gathers {ms:.3f} ms a batch ({gather_gbs:.2f} GB/s), and scans {scan_gbs:.2f} GB/s"
    print(f"  {name}, {len(chosen)} images; floor: {told.format(**floor)}", flush=True)
    copy = np.array(chosen)
    assert isinstance(chosen, np.memmap), "a fit must see that this is a file"
    assert not isinstance(copy, np.memmap)
    ways = {"in memory": ss.Data(train=(copy, labels)), "memory-mapped": ss.Data(train=(chosen, labels))}

    def told_of(mine: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**row, "images": len(chosen), "every": every, "floor": floor} for row in mine]

    return told_of(compare(name, ways, options, lambda mine: kept(options, [*rows, *told_of(mine)], quiet=True)))


def kept(options: argparse.Namespace, rows: list[dict[str, Any]], quiet: bool = False) -> None:
    if rows and (not options.tiny or os.environ.get("OUT")):
        about = {name: getattr(options, name) for name in ("gib", "batch", "rounds")}
        keep("streaming", rows, quiet, **about, options=" ".join(sys.argv[1:]))


def main() -> None:
    parser = argparse.ArgumentParser()
    cuda = torch.cuda.is_available()
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--models", default="small,resnet18" if cuda else "small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--steps", type=int, help="of an epoch; 0: over all images; default: as fits the model")
    parser.add_argument("--precision", default="", help="as the Trainer takes it")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--last", action="store_true", help="channels last")
    parser.add_argument("--folder", help="for the file; default: a temporary one")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.gib, options.batch, options.rounds, options.steps, options.models = 0.02, 64, 2, 4, "small,tiny"
    where, rows = machine(), []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        images, began = int(options.gib * 2**30) // BYTES, time.perf_counter()
        file = written(Path(folder) / "images.bin", images)
        gib = images * BYTES / 2**30
        print(
            f"{where['name']}, torch {where['torch']}; {gib:.2f} GiB written in {time.perf_counter() - began:.1f} s",
            flush=True,
        )
        for name in options.models.split(","):
            try:
                steps = options.steps if options.steps is not None else STEPS[cuda].get(name, 0)
                rows += one(name, file, steps, options, rows)
            except Exception:
                last = [line for line in traceback.format_exc().splitlines() if line.strip(" ^~|")][-4:]
                print(f"  {name} failed:\n" + "\n".join(f"    {line[:200]}" for line in last), flush=True)
        del file
    cells = [
        [r["model"], r["way"], f"{r['ms']:.3f}", f"{r['least']:.3f} - {r['most']:.3f}", f"{r['gbs']:.3f}", f"{r['ratio']:.3f}",
         "same" if r["same"] else "DIFFERENT"] for r in rows
    ]  # fmt: skip
    print(table(["model", "examples", "ms/step", "least - most", "GB/s", "of in memory", "bits"], cells), flush=True)
    kept(options, rows)


if __name__ == "__main__":
    main()
