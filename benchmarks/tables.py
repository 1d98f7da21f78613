"""Writes the measured tables into README.md and benchmarks/README.md, from benchmarks/results.

    python benchmarks/tables.py [--check]

Each table stands between <!-- name --> and <!-- end -->. With --check nothing is written; exit status 1 if a table is stale.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path

from chapters import shown

HERE = Path(__file__).parent
KINDS = ("cpu", "cpu16", "gpu")
FRAMEWORKS = ("torch", "jax", "tensorflow", "paddle", "mxnet")


def table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def results(name: str) -> list[dict]:
    paths = [HERE / "results" / f"{name}-{kind}.json" for kind in KINDS]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def about(result: dict) -> str:
    machine = result["machine"]
    framework = result.get("framework", f"torch {machine['torch']}")
    return f"{machine['name']}, {framework}, Python {machine['python']}, {result['date']}"


def sameness() -> str:
    """Devices x fingerprint x seconds per epoch."""
    rows = []
    for result in results("sameness"):
        machine = result["machine"]
        cores = machine["name"].split(" of ")[0]
        name = f"CPU, {cores}" if machine["short"] == "cpu" else machine["name"].removeprefix("NVIDIA ")
        for row in result["rows"]:
            devices = f"{row['devices']} device{'s' if row['devices'] > 1 else ''}"
            rows.append([name, devices, f"`{row['fingerprint'][:16]}`", f"{row['seconds']:.2f}"])
    return table(["machine", "devices", "fingerprint of the weights", "s/epoch"], rows)


def cost() -> str:
    """Time per step against a plain PyTorch loop."""
    blocks = []
    for result in results("cost"):
        rows = [
            [r["name"], f"{r['ms']:.2f}", f"{r['least']:.2f} - {r['most']:.2f}", f"{r['ratio']:.2f}"]
            for r in result["rows"]
        ]
        title = f"{about(result)}; {result['rounds']} rounds of {result['steps']} steps"
        blocks.append(f"{title}\n\n{table(['', 'ms/step', 'least - most', 'ratio'], rows)}")
    return "\n\n".join(blocks)


def schedules() -> str:
    """The schedule chapter's five schedules after 30 epochs."""
    blocks = []
    for result in results("schedules"):
        rows = []
        for row in result["rows"]:
            low, high = row["published"]
            seeds = [f"{run[-1]:.3f}" for run in row["curves"]["test_accuracy"]]
            cells = [
                row["name"],
                f"{row['mean']:.3f} ± {row['spread']:.3f}",
                ", ".join(seeds),
                f"{low:.3f} - {high:.3f}",
            ]
            rows.append([*cells, f"{row['gap']:.3f}"])
        header = ["schedule", "test accuracy", "seeds 0 - 4", "published", "train - test"]
        blocks.append(f"{about(result)}; {result['epochs']} epochs, {result['seeds']} seeds\n\n{table(header, rows)}")
    return "\n\n".join(blocks)


def chapters() -> str:
    """The schedule chapter's own trainings, in its three tabs, as it stands."""
    path = HERE / "results" / "chapters-cpu.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    about = ", ".join(sorted({row["machine"] for row in rows}))
    return f"{about}; 30 epochs\n\n{shown(rows)}"


def accuracy() -> str:
    """The multi-device chapter's job over several seeds, in every framework that was measured."""
    blocks = []
    names = ["accuracy", *(f"accuracy-{framework}" for framework in FRAMEWORKS[1:])]
    for result in [result for name in names for result in results(name)]:
        last = [row["curve"][-1] for row in result["rows"]]
        seeds = ", ".join(f"{value:.4f}" for value in last)
        if len(last) == 1:
            blocks.append(f"{about(result)}: {seeds} (seed 0 only)")
            continue
        mean, spread = statistics.mean(last), statistics.stdev(last)
        blocks.append(f"{about(result)}: {mean:.3f} ± {spread:.3f} (seeds 0 to {len(last) - 1}: {seeds})")
    return "\n\n".join(blocks)


def chaos() -> str:
    """Kills at random moments, by moment."""
    blocks = []
    for result in results("chaos"):
        moments = {"step": "a step was logged", "checkpoint": "a checkpoint was being written",
                   "opening": "the run folder was being opened", "end": "the final weights were being written"}  # fmt: skip
        rows = []
        for moment in [*moments, ""]:
            kills = [row for row in result["rows"] if moment in ("", row["moment"])]
            counts = [len(kills), sum(row["killed"] == "all" for row in kills), sum(row["half"] > 0 for row in kills),
                      sum(row["another"] for row in kills)]  # fmt: skip
            rows.append([moments.get(moment, "all"), *map(str, counts)])
        header = ["killed when", "kills", "all processes at once", "left a half-written file", "resumed in another way"]
        runs, kills = (f"{result[f'{what}_same']} of {result[what]} {what}" for what in ("runs", "kills"))
        words = f"{runs}, with {kills}, ended with the bits of the run that nobody killed"
        blocks.append(f"{about(result)}; {words}\n\n{table(header, rows)}")
    return "\n\n".join(blocks)


def checkpoint() -> str:
    """What a checkpoint costs."""
    blocks = []
    for result in results("checkpoint"):
        small, large = result["rows"]
        ratio = f"{small['ratio']:.3f} ({small['least']:.3f} - {small['most']:.3f})"
        written = f"{small['written']} of {small['steps']} written"
        rows = [
            ["LeNet, no checkpoint", f"{small['without']:.2f} ms/step", ""],
            ["LeNet, one after every step", f"{small['with']:.2f} ms/step", f"{ratio}; {written}"],
            [f"{large['name']}: a step waits", f"{large['waits']:.0f} ms", f"of a step of {large['step']:.0f} ms"],
            [f"{large['name']}: one plain copy of the same tensors", f"{large['copy']:.0f} ms", ""],
        ]
        blocks.append(f"{about(result)}; {result['rounds']} rounds\n\n{table(['', '', 'ratio'], rows)}")
    return "\n\n".join(blocks)


def exchange() -> str:
    """The exchange between processes against all_reduce."""
    header = ["processes", "vector", "all_reduce", "samestep", "ratio", "vectors sent by a process", "by a ring"]
    blocks = []
    for two, four in zip(results("exchange-2"), results("exchange-4"), strict=True):
        rows = [
            [str(r["processes"]), f"{r['megabytes']:g} MB", f"{r['all_reduce']:.1f} ms", f"{r['ours']:.1f} ms",
             f"{r['ratio']:.2f}", f"{r['bytes']:.2f}", f"{r['ring']:.2f}"] for r in two["rows"] + four["rows"]
        ]  # fmt: skip
        blocks.append(f"{about(two)}\n\n{table(header, rows)}")
    return "\n\n".join(blocks)


def frameworks() -> str:
    """A step of samestep against each framework's own plain loop."""
    rows, titles = [], []
    for framework in FRAMEWORKS:
        for result in results(f"frameworks-{framework}"):
            titles.append(f"{about(result)}; {result['rounds']} rounds")
            for model in dict.fromkeys(row["model"] for row in result["rows"]):
                plain, *ours = (row for row in result["rows"] if row["model"] == model)
                cells = [f"{r['ms']:.2f} ms, **{r['ratio']:.2f}** ({r['low']:.2f} - {r['high']:.2f})" for r in ours]
                rows.append([framework, model, f"{plain['ms']:.2f} ms", *cells])
    header = ["framework", "model", "a step of its plain loop", "samestep, 1 shard, **ratio** (quartiles)", "8 shards"]
    return "\n\n".join([table(header, rows), *titles])


def price() -> str:
    """In short: the time of a step over that of a plain PyTorch loop."""
    rows = []
    for model, names in (("LeNet", ("cost",)), ("MLP (784, 256, 10)", ("frameworks-torch",))):
        for result in [one for name in names for one in results(name)]:
            machine = result["machine"]
            name = (
                machine["name"].removeprefix("NVIDIA ")
                if machine["short"] != "cpu"
                else "CPU, " + machine["name"].split(" of ")[0]
            )
            found = [r for r in result["rows"] if r.get("model", "lenet") == ("lenet" if model == "LeNet" else "mlp")]
            ratio = {shards: r["ratio"] for r in found for shards in (1, 8) if f" {shards} shard" in r["name"]}
            rows.append([f"{model}, {name}", "1.00", f"{ratio[8]:.2f}", f"{ratio[1]:.2f}"])
    return table(["batch 256", "plain PyTorch loop", "samestep, 8 shards (the default)", "1 shard"], rows)


def readers() -> str:
    """A slow data set, read by several processes."""
    blocks = []
    for result in results("readers"):
        keys = ("plain", "ours", "ratio", "plain_all", "ours_all")
        rows = [[f"{row['item']} 2 ms", *(f"{row[key]:.2f}" for key in keys)] for row in result["rows"]]
        header = [
            "an item",
            "DataLoader, s/epoch",
            "samestep, s/epoch",
            "ratio",
            "DataLoader, whole",
            "samestep, whole",
        ]
        title = (
            f"{about(result)}; {result['rounds']} rounds of {result['epochs']} epochs, {result['readers']} processes"
        )
        blocks.append(f"{title}\n\n{table(header, rows)}")
    return "\n\n".join(blocks)


def speed() -> str:
    """A step beside what else there is."""
    blocks = []
    for name in ("small", "large", "gpt2", "workspace"):
        for result in results(f"speed-{name}"):
            rows = []
            for r in result["rows"]:
                memory = f"{r['memory'] / 2**20:,.0f}" if r.get("memory") else ""
                spread = f"{r['least']:.2f} - {r['most']:.2f}" if r["samples"] > 1 else "one sample"
                ratio = f"{r['ratio']:.2f}" if r["ratio"] else ""
                rows.append([r["model"], r["precision"], r["name"], f"{r['ms']:.3f}", spread, ratio, memory])
            header = ["model", "precision", "", "ms/step", "least - most", "of plain", "MiB"]
            note = f". {result['note']}" if "note" in result else ""
            how = result["options"] if len(result["options"]) < 150 else "h200.sh"
            title = f"{about(result)}; {result['rounds']} rounds; {how}{note}"
            blocks.append(f"{title}\n\n{table(header, rows)}")
    return "\n\n".join(blocks)


def cpu() -> str:
    """A step on the CPU beside other ways to train."""
    blocks = []
    for result in results("cpu"):
        rows = [
            [
                r["model"],
                r["name"],
                f"{r['ms']:.2f}" if r["ms"] else "",
                f"{r['ratio']:.2f} ({r['low']:.2f} - {r['high']:.2f})",
            ]
            for r in result["rows"]
        ]
        header = ["model", "", "ms/step", "of the plain loop, or as named"]
        blocks.append(f"{about(result)}; {result['rounds']} rounds\n\n{table(header, rows)}")
    return "\n\n".join(blocks)


def streaming() -> str:
    """Examples in a file against examples in memory."""
    rows, titles = [], []
    for result in results("streaming"):
        titles.append(f"{about(result)}; {result['gib']:g} GiB, {result['rounds']} rounds")
        for r in result["rows"]:
            ratios = f"{r['ratio']:.2f}" + (
                f" ({min(r['ratios']):.2f} - {max(r['ratios']):.2f})" if r["ratios"] else ""
            )
            rows.append([result["machine"]["name"], r["model"], r["way"], f"{r['ms']:.2f}", f"{r['gbs']:.2f}", ratios])
    header = ["machine", "model", "examples", "ms/step", "GB/s", "of in memory"]
    return "\n\n".join([table(header, rows), *titles])


def growth() -> str:
    """How the time of a step grows."""
    rows, titles = [], []
    for result in results("growth"):
        titles.append(f"{about(result)}; {result['rounds']} rounds")
        for label, slope in result["slopes"].items():
            panel, _, peer = label.partition(", ")
            mine = [r for r in result["rows"] if r["panel"] == panel]
            ends = [f"{1e3 * r['plain' if peer else 'seconds']:.2f} ms at {r['x']:,}" for r in (mine[0], mine[-1])]
            rows.append([result["machine"]["name"], label, *ends, "" if slope is None else f"{slope:.2f}"])
    return "\n\n".join([table(["machine", "with more", "first", "last", "slope"], rows), *titles])


MAKERS = (
    price,
    speed,
    cpu,
    streaming,
    growth,
    sameness,
    accuracy,
    chapters,
    cost,
    frameworks,
    schedules,
    chaos,
    checkpoint,
    exchange,
    readers,
)
TABLES = {make.__name__: make for make in MAKERS}


def main() -> int:
    stale = 0
    for path in (HERE.parent / "README.md", HERE / "README.md"):
        old = path.read_text()
        new = old
        for name, make in TABLES.items():
            new = re.sub(
                rf"(<!-- {name} -->\n).*?(<!-- end -->)",
                lambda m, make=make: f"{m[1]}{make()}\n{m[2]}",
                new,
                flags=re.S,
            )
        if new != old:
            stale += 1
            if "--check" not in sys.argv:
                path.write_text(new)
                print(f"wrote {path.name}")
    return stale if "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
