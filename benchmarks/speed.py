"""Time and memory of a step: samestep beside what else there is for PyTorch and JAX, in one run, in alternating rounds.

    python benchmarks/speed.py [--models lenet,jax/resnet18,gpt/gpt2] [--precision tf32,bfloat16] [--rounds 5] [--budget 120]
        [--names "NAME|NAME"] [--only TEXT,TEXT] [--without TEXT,TEXT] [--replicas 1,2,3,8] [--device cuda]
        [--kernels "NAME|NAME"] [--file speed]
    python benchmarks/speed.py --tiny           small models and few steps, to see that it runs

peers.py has the models and the peers. Every configuration has a process of its own. Those of the models between two slashes
prepare side by side (imports, torch.compile, recording), for at most --budget seconds; what is not ready then is left out. Then
they are measured in turns, one at a time, while the others sleep: the first of all, the second of all, and so on.

samestep's figures are from whole epochs of one fit, the second and later ones: `seconds` of the history over the steps, with
all that a fit does in them (metrics, fingerprints, checks, the order of examples). What a fit warns of is printed.

Memory is torch.cuda.max_memory_allocated from before a configuration is made to after its first steps, less what was
allocated before: so without the examples, and for samestep without its own copy of them. `replicas` tells whether the
fingerprints of every step are those of one replica.

--names chooses by names; --only and --without by parts of them, and then the plain loop always runs. --kernels: after the
rounds, these have one turn more under PyTorch's profiler: which kernels took how long, and for which share of an epoch no
kernel ran; "starved" counts only what is longer than between the kernels of a graph. "host" is what samestep's own thread
does for a step, over an epoch, with the order of examples and the spot check; of large models it has waiting in it, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import peers
import torch
from machine import keep, machine, table
from peers import Case, cases
from turns import Child, Turns

import samestep as ss
from samestep.training.fit import Fit
from samestep.training.replicas import Replicas

KERNELS = 25  # how many are told
GAP = 10_000  # nanoseconds without a kernel, after which the GPU waits for the host; between kernels of a graph it is 1 µs


def configurations(case: Case, precision: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By name: settings of the Trainer."""
    found = {}

    def add(shards: int, compiled: bool = False, last: bool = False, count: int = 1) -> None:
        name = f"samestep, {shards} shard{'s' * (shards > 1)}" + ", compile" * compiled
        name += ", channels last" * last + f", {count} replicas" * (count > 1)
        given: dict[str, Any] = {"shards": shards, "count": count}
        given |= {} if case.jax else {"precision": precision}
        given |= ({"compile": True} if compiled else {}) | ({"memory_format": "channels_last"} if last else {})
        found[name] = given

    last = case.images and not case.small
    for compiled in (False,) if case.jax else (False, True):
        for shards in (8, 1):
            add(shards, compiled, last)
    if case.replicas:
        for count in options.counts:
            add(8, count=count)
    if case.images:
        add(8, last=not last)
        if case.small:
            add(8, compiled=True, last=True)
    for name, settings in json.loads(options.also).items():
        found[f"samestep, {name}"] = {"count": 1, **({} if case.jax else {"precision": precision}), **settings}
    return found


def known(options: argparse.Namespace) -> dict[str, Case]:
    found = cases(options.tiny, "cuda" in options.device)
    return {name: replace(case, steps=options.steps or case.steps) for name, case in found.items()}


# One configuration, in a process of its own


def kernels(work: Callable[[], Any], steps: int) -> dict[str, Any]:
    """What ran on the GPU meanwhile."""
    from torch.profiler import ProfilerActivity, profile

    import samestep.backends.torch.profile  # noqa: F401  # its settings of the profiler, without which CUDA graphs may crash

    if not torch.cuda.is_initialized():
        work()
        return {}

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    found, spans = defaultdict[str, list[float]](list), list[tuple[int, int]]()
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0:
            found[event.name()].append(event.duration_ns() / 1e3)
            spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
    if not spans:
        return {}
    spans.sort()
    busy, starved, end = 0, 0, spans[0][0]
    for lo, hi in spans:
        busy += max(0, hi - max(lo, end))
        starved += max(0, lo - end) if lo - end > GAP else 0
        end = max(end, hi)
    top = sorted(found.items(), key=lambda item: -sum(item[1]))
    return {
        "idle": 1 - busy / (end - spans[0][0]), "starved": starved / (end - spans[0][0]),
        "count": len(spans) / steps, "busy": busy / steps / 1e6, "sum": sum(map(sum, found.values())) / steps / 1e3,
        "top": [[name[:110], len(times) / steps, sum(times) / steps] for name, times in top[:KERNELS]],
    }  # fmt: skip


def awake(device: str) -> None:
    """Let the GPU's clock rise before a turn."""
    if "cuda" in device and torch.cuda.is_initialized():
        a, until = torch.ones(4096, 4096, device=device), time.perf_counter() + 0.05
        while time.perf_counter() < until:
            a @ a
            torch.cuda.synchronize()


def served(turns: Turns, device: str, steps: int, measure: peers.Measure) -> None:
    """Measure a peer whenever it is asked for."""
    while word := turns.wait():
        awake(device)
        if word == "kernels":
            turns.say(kernels=kernels(measure, steps + 3))
        else:
            turns.say(samples=measure())


def fitted(turns: Turns, case: Case, given: dict[str, Any], device: str, before: int) -> None:
    """A fit whose epochs, but for the first, are turns."""
    count, epoch, look, launch, x_y = given.pop("count"), Fit.epoch, Fit.look, Replicas.steps, case.examples()
    waited, launched = list[float](), list[tuple[float, int]]()
    if "cpu" in device and given["shards"] == 1:
        given["threads_per_shard"] = len(os.sched_getaffinity(0))

    def looking(self: Fit, *given: Any) -> Any:
        began = time.perf_counter()
        try:
            return look(self, *given)
        finally:
            waited.append(time.perf_counter() - began)

    def launching(self: Replicas, batches: Any, *given: Any) -> Any:
        began = time.perf_counter()
        made = launch(self, batches, *given)
        launched.append((time.perf_counter() - began, len(batches)))
        return made

    def in_turn(self: Fit, number: int) -> None:
        if not number:
            epoch(self, number)
            turns.about["memory"] = None if case.jax else memory(before + sum(part.nbytes for part in x_y))
            return
        word = turns.wait()
        awake(device)
        if word == "kernels":
            turns.say(kernels=kernels(lambda: epoch(self, number), case.steps))
        else:
            waited.clear()
            launched.clear()
            epoch(self, number)
            seconds = self.result.history[-1]["seconds"]
            turns.about["prints"] = ss.fingerprint.of_weights({"prints": prints_of(self)})
            # A launch waits where too many are under way, so the quickest one is what launching takes.
            other = seconds - sum(waited) - sum(took for took, _ in launched)
            host = other / case.steps + min(took / n for took, n in launched)
            turns.say(samples=[seconds / case.steps * 1e3], host=[host * 1e6] if "cuda" in device else [])

    Fit.epoch, Fit.look, Replicas.steps = in_turn, looking, launching
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        turns.about["said"] = said = []
        quiet = DeprecationWarning, FutureWarning
        warnings.showwarning = lambda message, category, *rest: (
            None if issubclass(category, quiet) else said.append(f"{category.__name__}: {message}"[:300])
        )
        del caught
        ss.Trainer(
            max_epochs=1000, batch_size=case.batch, devices=[device] * count, optimizer=case.ours(), schedule=case.rate,
            progress=False, **given,
        ).fit(case.make(), ss.Data(train=x_y))  # fmt: skip


def prints_of(fit: Fit) -> Any:
    import numpy as np

    return np.array([int(one, 16) for one in fit.result.fingerprints], np.uint64)


def memory(before: int) -> int | None:
    return torch.cuda.max_memory_allocated() - before if torch.cuda.is_initialized() else None


def one(options: argparse.Namespace) -> None:
    """Be the process of one configuration."""
    turns, case = Turns(), known(options)[options.models]
    cuda, ours = "cuda" in options.device and not case.jax, configurations(case, options.precision, options)
    if cuda:  # libraries take their working space once, which is nobody's
        torch.ones(64, 64, device=options.device) @ torch.ones(64, 64, device=options.device)
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    if options.one in ours:
        return fitted(turns, case, ours[options.one], options.device, before)
    x, y = case.examples()
    if case.jax:
        measure = peers.jax_peers(case, x, y)[options.one]()
    else:
        on = [torch.from_numpy(part).to(options.device) for part in (x, y)]
        before = torch.cuda.memory_allocated() if cuda else 0
        measure = peers.peers(case, *on, options.precision)[options.one]()
    measure()
    turns.about["memory"] = None if case.jax else memory(before)
    served(turns, options.device, case.steps, measure)


# All of them


@dataclass
class Entry:
    case: Case
    precision: str
    name: str
    child: Child
    samples: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)  # microseconds
    about: dict[str, Any] = field(default_factory=dict)


def wanted(name: str, options: argparse.Namespace) -> bool:
    if options.names:
        return name in options.names.split("|")
    chosen = not options.only or any(part in name for part in options.only.split(","))
    out = bool(options.without) and any(part in name for part in options.without.split(","))
    return (chosen or name == "plain loop") and not out


def started(names: list[str], options: argparse.Namespace) -> list[Entry]:
    """The processes of these models."""
    models, found = known(options), list[tuple[str, str, str]]()
    empty = torch.empty(0, 0, 0, 0)
    for model in names:
        case = models[model]
        chosen = [one for one in case.precisions if one in options.precision.split(",")]
        for precision in chosen or case.precisions:
            given = case, empty, empty
            theirs = peers.jax_peers(*given) if case.jax else peers.peers(*given, precision, options.device)
            both = [*theirs, *configurations(case, precision, options)]
            found += [(model, precision, name) for name in both if wanted(name, options)]
    compiling = sum("compile" in name for _, _, name in found)
    env = {
        # Processes that compile would each start as many compilers as there are cores.
        "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, min(8, (os.cpu_count() or 1) // max(1, compiling)))),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    entries = []
    for model, precision, name in found:
        command = [__file__, "--models", model, "--precision", precision, "--one", name, "--device", options.device]
        command += ["--replicas", options.replicas, "--also", options.also, "--steps", str(options.steps)]
        command += ["--tiny"] * options.tiny
        own = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if peers.FIXED in name else {}
        entries.append(Entry(models[model], precision, name, Child(name, command, env | own)))
    return entries


def measured(
    names: list[str], options: argparse.Namespace, kept: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """The rows of models that prepare side by side; those so far are given to `kept` after every round."""
    began, entries = time.monotonic(), started(names, options)
    for entry in list(entries):
        label = f"  {entry.case.name}, {entry.precision}, {entry.name}"
        answer = entry.child.heard(began + options.budget)
        if answer is None:
            alive = entry.child.process.poll() is None
            entry.child.kill()
            print(
                f"{label}: {'not ready in time' if alive else 'failed'}",
                *entry.child.told[-6:],
                sep="\n      ",
                flush=True,
            )
            entries.remove(entry)
            continue
        entry.about = answer
    print(f"  {len(entries)} are ready after {time.monotonic() - began:.0f} s", flush=True)
    for word in ["go"] * options.rounds + ["kernels"] * bool(options.kernels):
        if time.monotonic() - began > options.seconds:
            print(f"  the {options.seconds:g} s are over", flush=True)
            break
        for entry in list(entries):
            if word == "kernels" and entry.name not in options.kernels.split("|"):
                continue
            answer = entry.child.ask(word)
            if answer is None:
                print(f"  {entry.name} failed", *entry.child.told[-6:], sep="\n      ", flush=True)
                entry.child.kill()
                entries.remove(entry)
                continue
            entry.samples += answer.get("samples", [])
            entry.host += answer.get("host", [])
            entry.about["kernels"] = answer.get("kernels")
        kept([row(entry, entries) for entry in entries])
    for entry in entries:
        entry.about |= entry.child.end()
    return [row(entry, entries) for entry in entries]


def row(entry: Entry, entries: list[Entry]) -> dict[str, Any]:
    mine = [other for other in entries if (other.case, other.precision) == (entry.case, entry.precision)]
    ms, about = statistics.median(entry.samples), entry.about
    plain = next((other for other in mine if other.name == "plain loop"), None)
    theirs = [statistics.median(other.samples) for other in mine if "samestep" not in other.name]
    home, _, count = entry.name.rpartition(", ")
    first = next((other for other in mine if other.name == home and count.endswith(" replicas")), None)
    both = [one.about.get("prints") for one in (entry, first) if one]
    same = "" if len(both) < 2 or None in both else "same" if both[0] == both[1] else "DIFFERENT"
    ratio = (
        about["memory"] / plain.about["memory"] if plain and plain.about.get("memory") and about.get("memory") else None
    )
    return {
        "model": entry.case.name, "precision": entry.precision, "name": entry.name, "ms": ms, "least": min(entry.samples),
        "most": max(entry.samples), "samples": len(entry.samples),
        "ratio": ms / statistics.median(plain.samples) if plain else None, "best": ms / min(theirs) if theirs else None,
        "memory": about.get("memory"), "memory_ratio": ratio, "prepared": about["prepared"], "said": about.get("said", []),
        "same": same,
        "kernels": about.get("kernels"), "host": statistics.median(entry.host) if entry.host else None,
    }  # fmt: skip


def compared(rows: list[dict[str, Any]]) -> list[str]:
    """What is asked for, in one line each: shards against one, replicas against one, and against the peers."""
    ms, lines = {one["name"]: one["ms"] for one in rows}, []
    for name in ms:
        one = name.replace("8 shards", "1 shard")
        if name.startswith("samestep, 8 shards") and one != name and one in ms:
            lines.append(f"{name}: {ms[name] / ms[one]:.2f} of 1 shard")
        home, _, count = name.rpartition(", ")
        if count.endswith(" replicas") and home in ms:
            lines.append(f"{name}: {ms[name] / ms[home]:.2f} of 1 replica")
    for name in ms:
        if name.startswith("samestep") and "replicas" not in name:
            theirs = [f"{other} {ms[other] / ms[name]:.2f}" for other in ms if not other.startswith("samestep")]
            lines.append(f"{name}: times as fast as {'; '.join(theirs)}" if theirs else "")
    return [line for line in lines if line]


def shown(rows: list[dict[str, Any]]) -> str:
    def ratio(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    header = [
        "",
        "ms/step",
        "least - most",
        "of plain",
        "of best peer",
        "MiB",
        "of plain",
        "prepared",
        "replicas",
        "host, us",
        "idle",
        "starved",
    ]
    cells = []
    for one in rows:
        memory = "" if one["memory"] is None else f"{one['memory'] / 2**20:.0f}"
        seen = one["kernels"] or {}
        cells.append([
            one["name"], f"{one['ms']:.3f}", f"{one['least']:.3f} - {one['most']:.3f}", ratio(one["ratio"]), ratio(one["best"]),
            memory, ratio(one["memory_ratio"]), f"{one['prepared']:.0f} s", one["same"],
            "" if one["host"] is None else f"{one['host']:.0f}",
            *(f"{seen[of]:.1%}" if seen else "" for of in ("idle", "starved")),
        ])  # fmt: skip
    return table(header, cells)


def kept(
    options: argparse.Namespace, rows: list[dict[str, Any]], more: Sequence[dict[str, Any]] = (), quiet: bool = True
) -> None:
    if not options.tiny or os.environ.get("OUT"):
        keep(options.file, [*rows, *more], quiet, rounds=options.rounds, options=" ".join(sys.argv[1:]))


def main() -> None:
    parser = argparse.ArgumentParser()
    cuda = torch.cuda.is_available()
    parser.add_argument("--models", default="lenet,jax/resnet18,gpt/gpt2" if cuda else "lenet/mlp")
    parser.add_argument("--precision", default="", help="only these of the model's own")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--budget", type=float, default=120, help="seconds for preparing the models between two slashes"
    )
    parser.add_argument(
        "--seconds", type=float, default=600, help="seconds for those in all, after which no round begins"
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--without", default="")
    parser.add_argument("--names", default="", help="only these, with | between")
    parser.add_argument("--file", default="speed", help="where the figures are kept, without -gpu.json")
    parser.add_argument("--replicas", default="1,2,3,8" if cuda else "1,2")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--kernels", default="", help="names, with | between")
    parser.add_argument("--also", default="{}", help="more settings of the Trainer by name, as JSON")
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: as the model has them")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.counts = [int(count) for count in options.replicas.split(",")]
    if options.one:
        return one(options)
    where, rows = machine(), []
    groups = [names.split(",") for names in options.models.split("/")]
    if unknown := {name for names in groups for name in names} - known(options).keys():
        parser.error(f"--models takes {', '.join(known(options))}, got {', '.join(sorted(unknown))}")
    print(f"{where['name']}, torch {where['torch']}, Python {where['python']}", flush=True)
    for names in groups:
        began = time.monotonic()
        print(f"\n{', '.join(names)}, {options.rounds} rounds", flush=True)

        found = measured(names, options, partial(kept, options, rows))
        for model, precision in dict.fromkeys((one["model"], one["precision"]) for one in found):
            mine = [one for one in found if (one["model"], one["precision"]) == (model, precision)]
            print(f"\n{model}, {precision}\n{shown(mine)}")
            print("\n".join(f"  {line}" for line in compared(mine)))
            for one_ in mine:
                for said in dict.fromkeys(one_["said"]):
                    print(f"  {one_['name']} says: {said}")
        print(f"{', '.join(names)}: {time.monotonic() - began:.0f} s in all", flush=True)
        rows += found
        kept(options, rows, quiet=False)


if __name__ == "__main__":
    main()
