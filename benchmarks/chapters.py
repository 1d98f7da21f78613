"""The schedule chapter as it is, with its own epochs: each of its five trainings, in each of its tabs, over several seeds.

    python benchmarks/chapters.py FOLDER [--seeds 3] [--jobs constant cosine] [--tabs pytorch] [--at-once 2]
    python benchmarks/chapters.py FOLDER --controls    with what is suspected changed, where a mean is below the published runs
    python benchmarks/chapters.py --table

FOLDER holds the chapters. Every training is `samestep chapter` in a process of its own, with one thread: all cells are run as
they stand, but only one of the calls of `train` trains. What there is in the results is not run again, so that it can be
interrupted. Published are the test accuracies after 30 epochs in the chapter's editions.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from machine import machine, table

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "chapters-cpu.json"
MXNET = HERE.parent / ".venv-mxnet" / "bin" / "python"  # made by `make test`
TABS = ("pytorch", "mxnet", "tensorflow")
JOBS = {
    "constant": (0.877, 0.897), "square root": (0.876, 0.905), "multi-factor": (0.869, 0.907),
    "cosine": (0.892, 0.911), "warm-up + cosine": (0.878, 0.913),
}  # fmt: skip
# What is suspected where a mean is below the published runs, and the change to the chapter's text that shows it (--controls).
CONTROLS = {
    **{("mxnet", job): ("counted in epochs, not in minibatches", {old: new}) for job, old, new in (
        ("square root", "pow(num_update + 1.0", "pow(num_update // 235 + 1.0"),
        ("cosine", "lr_scheduler.CosineScheduler(max_update=20", "lr_scheduler.CosineScheduler(max_update=20 * 235"),
        ("warm-up + cosine", "lr_scheduler.CosineScheduler(20, warmup_steps=5",
         "lr_scheduler.CosineScheduler(20 * 235, warmup_steps=5 * 235"),
    )},
    **{("tensorflow", job): (
        "with max-pools and ReLU, not average pools and a sigmoid",
        {"layers.AvgPool2D": "layers.MaxPool2D", "activation='sigmoid'": "activation='relu'"},
    ) for job in ("square root", "cosine")},
}  # fmt: skip
LINE = re.compile(r"train loss (\S+), train acc (\S+), test acc (\S+)")
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
ONLY = """
```{{.python .input}}
#@tab {tab}
trains, calls = train, []
def train(*args, **options):
    calls.append(args)
    return trains(*args, **options) if len(calls) == {number} else None
```
"""


def chapter(folder: Path, tab: str, number: int, changes: dict[str, str]) -> str:
    """The chapter, with one cell more, before the first training: only call `number` of `train` trains."""
    [file] = [file for file in sorted(folder.iterdir()) if "sec_scheduler`" in file.read_text(encoding="utf-8")[:200]]
    text = file.read_text(encoding="utf-8")
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    before = text.index("\n```{.python .input}\nlr, num_epochs = 0.3, 30")
    return text[:before] + ONLY.format(tab=tab, number=number) + text[before:]


def train(folder: Path, tab: str, job: str, seed: int, control: bool) -> dict[str, object]:
    python, number, began = str(MXNET) if tab == "mxnet" else sys.executable, list(JOBS).index(job) + 1, time.time()
    changes = CONTROLS[tab, job][1] if control else {}
    with tempfile.TemporaryDirectory() as place:
        (file := Path(place) / "chapter.md").write_text(chapter(folder, tab, number, changes), encoding="utf-8")
        command = [python, "-m", "samestep", "chapter", str(file), "--tab", tab, "--seed", str(seed)]
        done = subprocess.run(
            [*command, "--figures", place], capture_output=True, text=True, env=os.environ | ONE_THREAD
        )
    if done.returncode:
        raise RuntimeError(f"{tab}, {job}, seed {seed}: {done.stderr[-500:]}")
    [(loss, accuracy, test)] = [map(float, found) for found in LINE.findall(done.stdout)]
    return {"tab": tab, "job": job, "seed": seed, "control": control, "train_loss": loss, "train_accuracy": accuracy,
            "test_accuracy": test,
            "seconds": round(time.time() - began), "machine": machine()["name"]}  # fmt: skip


def shown(rows: list[dict[str, object]]) -> str:
    cells = []
    for job, (low, high) in JOBS.items():
        for tab in TABS:
            here = [row for row in rows if (row["job"], row["tab"]) == (job, tab)]
            last = [float(str(row["test_accuracy"])) for row in here if not row.get("control")]
            if last:
                mean = statistics.mean(last)
                where = "inside" if low <= mean <= high else "below" if mean < low else "above"
                if where != "inside" and len(last) > 1:
                    error = statistics.stdev(last) / len(last) ** 0.5
                    where += f" by {max(low - mean, mean - high) / error:.1f} standard errors"
                each = ", ".join(f"{value:.3f}" for value in sorted(last))
                for row in (row for row in here if row.get("control")):
                    where += f"; {CONTROLS[tab, job][0]}, seed {row['seed']} gives {row['test_accuracy']:.3f}"
                cells.append([job, tab, f"{mean:.3f}", each, f"{low:.3f} - {high:.3f}", where])
    return table(["schedule", "tab", "mean", "seeds", "published", "the mean is"], cells)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=JOBS)
    parser.add_argument("--tabs", nargs="+", default=list(TABS), choices=TABS)
    parser.add_argument("--at-once", type=int, default=os.cpu_count())
    parser.add_argument("--controls", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    if not options.table:
        wanted = [(t, job, seed, False) for job in options.jobs for seed in range(options.seeds) for t in options.tabs]
        wanted = [(*control, 0, True) for control in CONTROLS] if options.controls else wanted
        there = {(row["tab"], row["job"], row["seed"], row.get("control", False)) for row in rows}

        def one(what: tuple[str, str, int, bool]) -> None:
            rows.append(train(options.folder, *what))
            print(rows[-1], flush=True)
            RESULTS.write_text(json.dumps({"rows": rows}, indent=1) + "\n")

        with ThreadPoolExecutor(options.at_once) as pool:
            list(pool.map(one, [what for what in wanted if what not in there]))
    print(shown(rows))


if __name__ == "__main__":
    main()
