"""What products, copies and waiting cost on the devices of this machine: the command `samestep bench devices`.

Every time is the median of several rounds, after a warm-up. What is compared takes turns. The clock stops when all devices
are done. Short tasks are repeated within a round. Numbers are float32.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from samestep.backends import find
from samestep.backends.base import Array, Backend
from samestep.backends.workers import cores
from samestep.devices import Device, cpu
from samestep.errors import Invalid
from samestep.screen.plot import check_figure

HELD = 2**28  # bytes of results that may pile up on a device within a round
LINEAR = 1.8  # two devices are nearly linear if they are so many times as fast as one
STYLES = (("-", "o", "black"), ("--", "s", "white"), (":", "^", "lightgrey"), ("-.", "D", "grey"))  # line, marker, fill


def operations(framework: str) -> tuple[Callable[..., Any], ...]:
    """What a Backend does not have.

    A product of matrices or of batches of them; the Frobenius norm as a 1 x 1 array; a copy, or what reads and writes as many
    bytes; waiting for results and for all devices; and where TensorFlow is to compute, which it does not see from its inputs.
    """
    it, anywhere = importlib.import_module(framework), lambda device: nullcontext()
    if framework == "torch":
        norm, gpus = partial(it.linalg.vector_norm, keepdim=True), range(it.cuda.device_count())
        return it.matmul, norm, it.clone, lambda _: [*map(it.cuda.synchronize, gpus)], anywhere
    if framework == "jax":
        norm = partial(it.numpy.linalg.norm, keepdims=True)
        return it.numpy.matmul, norm, it.numpy.copy, it.block_until_ready, anywhere
    if framework == "tensorflow":
        wait, on = it.test.experimental.sync_devices, lambda d: it.device(f"{'GC'[d.kind == 'cpu']}PU:{d.index}")
        return it.matmul, partial(it.norm, keepdims=True), it.negative, lambda _: wait(), on
    if framework == "paddle":  # samestep uses it on the CPU, where it returns when it is done
        return it.matmul, partial(it.linalg.norm, keepdim=True), it.clone, lambda _: None, anywhere
    nd = it.nd
    return nd.linalg.gemm2, partial(nd.norm, keepdims=True), nd.NDArray.copy, lambda _: nd.waitall(), anywhere


@dataclass(frozen=True)
class Row:
    """One measurement. Times are in seconds: the median, and from `low` to `high` the middle half of the rounds."""

    device: str
    what: str
    flop: int
    bytes: int
    seconds: float
    low: float
    high: float
    gflop_per_s: float
    gb_per_s: float

    def beside(self, other: Row) -> str:
        if self.high < other.low or other.high < self.low:
            return f"{short(other.seconds / self.seconds)} times as fast as"
        return "not clearly faster or slower than"  # the spreads overlap


@dataclass(frozen=True)
class Answer:
    """What was measured for one question, and what it says."""

    name: str
    title: str
    rows: list[Row]
    conclusion: str

    def table(self) -> Table:
        """The devices side by side; of copies, the sizes."""
        copies = self.name == "copies"
        cells = {(r.device, r.what) if copies else (r.what, r.device): r for r in self.rows}
        table = Table(title=self.title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        across, unit = dict.fromkeys(name for _, name in cells), "GB/s" if copies else "GFLOP/s"
        for text in ["", *(text for name in across for text in (name, unit))]:
            table.add_column(text, justify="right" if text else "left", no_wrap=True)
        for down in dict.fromkeys(name for name, _ in cells):
            row = [cells.get((down, name)) for name in across]
            texts = [(timed(r), short(r.gb_per_s if copies else r.gflop_per_s)) if r else ("", "") for r in row]
            table.add_row(down, *(text for pair in texts for text in pair))
        return table


class Task(NamedTuple):
    """Something to measure: `run`, given what `make` has made before the clock starts."""

    device: Device
    what: str
    flop: int
    bytes: int
    run: Callable[[Any], Any]
    label: str = ""  # instead of the device's name
    make: Callable[[], Any] = lambda: None


class Bench:
    """The measurements in one framework. `quick`: smaller and fewer, only to see that all works."""

    def __init__(self, backend: Backend, quick: bool = False) -> None:
        self.times, self.norm, self.copy, self.wait, self.on = operations(backend.name)
        self.backend, self.quick, self.random = backend, quick, np.random.default_rng(0)
        self.rounds, self.least, self.count = (3, 0.001, 100) if quick else (7, 0.01, 1000)  # least: seconds of a round
        gpus = [device for device in backend.devices() if device.kind == "cuda"]
        self.devices, self.pair = [cpu(), *gpus], ((gpus or backend.devices()) * 2)[:2]  # a single one stands for two

    def about(self) -> dict[str, Any]:
        found = {"backend": self.backend.name, "version": find.installed(self.backend.name), "cores": cores()}
        return found | {"devices": list(map(str, self.devices)), "rounds": self.rounds}

    def answers(self) -> Iterator[Answer]:
        """One question after the other."""
        sizes, count = [16, 64, 256, 1024] if self.quick else [2**i for i in range(4, 14)], self.count
        asked: Any = (
            ("products", "Products of two n x n matrices", map(self.products, sizes), of_products),
            ("logging", f"{count} products of 100 x 100 and their norms", map(self.logging, self.devices), of_pairs),
            ("at_once", "Two products, on two devices and on one", map(self.at_once, [self.pair]), of_two),
            ("copies", "Memory and copies", map(self.copies, self.devices), of_copies),
            ("calls", f"{count} products of 32 x 32", map(self.calls, self.devices), of_pairs),
        )
        for name, title, groups, conclude in asked:
            rows = [row for tasks in groups for row in self.measure(tasks)]
            yield Answer(name, title, rows, conclude(rows))

    def products(self, n: int) -> list[Task]:
        most = 256 if self.quick else 2048  # more would take a CPU too long
        return [self.product(device, n, n) for device in self.devices if device.kind == "cuda" or n <= most]

    def logging(self, device: Device) -> list[Task]:
        a, b, get = self.array(device, 100, 100), self.array(device, 100, 100), self.backend.get
        flop, size = self.count * (2 * 100**3 + 2 * 100**2), self.count * 16 * 100**2

        def norms() -> Iterator[Array]:
            return (self.norm(self.times(a, b)) for _ in range(self.count))

        return [
            Task(device, "logged one by one", flop, size, lambda _: [float(get(norm)[0, 0]) for norm in norms()]),
            Task(device, "kept and fetched once", flop, size, lambda _: get(self.backend.concat([*norms()]))),
        ]

    def at_once(self, pair: Sequence[Device]) -> list[Task]:
        n = (1024 if self.quick else 4096) if pair[0].kind == "cuda" else (256 if self.quick else 1024)
        tasks = [self.product(device, n, n) for device in pair]
        flop, size, names = 2 * tasks[0].flop, 2 * tasks[0].bytes, f"{pair[0]} and {pair[1]}"

        def run(task: Task) -> Any:
            with self.on(task.device):
                return task.run(None)

        pool = ThreadPoolExecutor(2)  # a CPU may make its caller wait
        return [
            Task(pair[0], f"in turn, n = {n}", flop, size, lambda _: [run(tasks[0]), run(tasks[0])]),
            Task(pair[0], f"at once, n = {n}", flop, size, lambda _: [*pool.map(run, tasks)], names),
        ]

    def copies(self, device: Device) -> list[Task]:
        large = 2**22 if self.quick else 2**28 if device.kind == "cuda" else 2**26
        n = int((large // 4) ** 0.5)  # a matrix times a vector: it is read, and little else is done
        read = self.product(device, n, 1)._replace(label=f"read in {device}", what=shown(large))
        return [*self.moves(device, 2**12), *self.moves(device, large), read]

    def moves(self, device: Device, size: int) -> list[Task]:
        """Within a device, bytes that are read and bytes that are written count; between devices, bytes that move."""
        put, host, array = self.backend.put, self.random.random(size // 4, np.float32), self.array(device, size // 4)
        ways: dict[str, Callable[[Any], Any]] = {}
        if device.kind == "cuda":
            ways = {f"host → {device}": lambda _: put(host, device), f"{device} → host": self.backend.get}
            ways |= {f"{device} → {to}": partial(put, device=to) for to in self.pair if to != device}
        fresh = partial(self.copy, array)  # JAX fetches an array once, and keeps what it has fetched
        moves = [Task(device, shown(size), 0, size, run, way, fresh) for way, run in ways.items()]
        return [Task(device, shown(size), 0, 2 * size, lambda _: fresh(), f"copy in {device}"), *moves]

    def calls(self, device: Device, n: int = 32) -> list[Task]:
        flop, size, shape = self.count * 2 * n**3, self.count * 12 * n**2, (self.count, n, n)
        a, b = self.array(device, *shape), self.array(device, *shape)
        pairs = [(self.array(device, n, n), self.array(device, n, n)) for _ in range(self.count)]
        return [
            Task(device, "a call for each", flop, size, lambda _: [self.times(*pair) for pair in pairs]),
            Task(device, "one call for all", flop, size, lambda _: self.times(a, b)),
        ]

    def product(self, device: Device, n: int, columns: int) -> Task:
        """n x n times n x columns. The bytes: every number is read once, or written once."""
        a, b = self.array(device, n, n), self.array(device, n, columns)
        return Task(device, str(n), 2 * n * n * columns, 4 * (n * n + 2 * n * columns), lambda _: self.times(a, b))

    def array(self, device: Device, *shape: int) -> Array:
        return self.backend.put(self.random.random(shape, np.float32), device)

    def measure(self, tasks: list[Task]) -> list[Row]:
        once = [min(self.clock(task, 1), self.clock(task, 1)) for task in tasks]  # the first one compiles
        often = [max(1, min(1000, HELD // t.bytes, int(self.least / s))) for t, s in zip(tasks, once, strict=True)]
        rounds = [[self.clock(t, n) / n for t, n in zip(tasks, often, strict=True)] for _ in range(self.rounds)]
        found = zip(tasks, *np.quantile(rounds, (0.5, 0.25, 0.75), axis=0).tolist(), strict=True)
        return [row(t.label or str(t.device), t.what, t.flop, t.bytes, *seconds) for t, *seconds in found]

    def clock(self, task: Task, times: int) -> float:
        with self.on(task.device):
            made = [task.make() for _ in range(times)]
            self.wait(made)
            start = time.perf_counter()
            done = [task.run(given) for given in made]
            self.wait(done)
            return time.perf_counter() - start


def row(device: str, what: str, flop: int, size: int, seconds: float, low: float, high: float) -> Row:
    return Row(device, what, flop, size, seconds, low, high, flop / seconds / 1e9, size / seconds / 1e9)


def short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def timed(row: Row) -> str:
    unit, size = ("s", 1.0) if row.low >= 1 else ("ms", 1e-3) if row.low >= 1e-3 else ("µs", 1e-6)
    return f"{short(row.seconds / size)} ({short(row.low / size)}–{short(row.high / size)}) {unit}"


def shown(size: int) -> str:
    return f"{size >> 20} MiB" if size >> 20 else f"{size >> 10} KiB"


def of_products(rows: list[Row]) -> str:
    host, *gpus = ({int(r.what): r for r in rows if r.device == name} for name in dict.fromkeys(r.device for r in rows))
    best, least, most = max(host.values(), key=lambda row: row.gflop_per_s), min(host), max(host)
    rates = f"{short(host[least].gflop_per_s)} GFLOP/s at n = {least} and {short(best.gflop_per_s)} at n = {best.what}"
    said = ["There is no GPU to compare with."] * (not gpus) + [f"The CPU does {rates}."]
    for gpu in gpus:
        wins = list(takewhile(lambda n: gpu[n].high < host[n].low, sorted(host, reverse=True)))  # noqa: B023
        since = f"clearly faster from n = {wins[-1]} on" if wins else f"not clearly faster up to n = {most}"
        at = ", ".join(f"{short(host[n].seconds / gpu[n].seconds)} times as fast at n = {n}" for n in (least, most))
        said.append(f"{gpu[least].device} is {since}: {at}.")
    return " ".join(said)


def of_pairs(rows: list[Row]) -> str:
    pairs = zip(rows[::2], rows[1::2], strict=True)
    return " ".join(f"{b.device}: {b.what} is {b.beside(a)} {a.what}." for a, b in pairs)


def of_two(rows: list[Row]) -> str:
    turn, both = rows
    gain = "a gain, but not linear" if both.high < turn.low else "no gain"
    seen = "nearly linear" if turn.seconds / both.seconds >= LINEAR else gain
    alone = both.device == f"{turn.device} and {turn.device}"
    said = f"At once on {both.device} is {both.beside(turn)} one after the other on {turn.device}: {seen}."
    return said + f" There is only {turn.device}: it stands for two, which share it." * alone


def of_copies(rows: list[Row]) -> str:
    rates: dict[str, list[str]] = {}
    for row in rows:
        rates.setdefault(row.device, []).append(f"{short(row.gb_per_s)} GB/s with {row.what}")
    moved = [f"{name}: {', '.join(found)}." for name, found in rates.items() if "→" in name]
    none = f"There is no GPU, so nothing is transferred. In the host's memory: {', '.join(rates[rows[0].device])}."
    return " ".join(moved) or none


def roofline(title: str, products: list[Row], copies: list[Row], path: Path) -> None:
    """Draw how many GFLOP/s memory (the slope) and arithmetic (the level) allow, and what products reach."""
    drawing = check_figure(path).Figure(figsize=(7, 4.6), layout="constrained")
    axes, end = drawing.subplots(), 1.6 * max(r.flop / r.bytes for r in products)
    for number, device in enumerate(dict.fromkeys(r.device for r in products)):
        line, marker, fill = STYLES[number % len(STYLES)]
        *_, copy, read = (r for r in copies if r.device in (f"copy in {device}", f"read in {device}"))  # the large ones
        points = [read, *(r for r in products if r.device == device)]
        slope, level = max(copy.gb_per_s, read.gb_per_s), max(r.gflop_per_s for r in points)
        x, label = np.array([0.25, level / slope, end]), f"{device}: {short(slope)} GB/s, {short(level)} GFLOP/s"
        axes.loglog(x, np.minimum(level, slope * x), line, color="black", label=label)
        at = [r.flop / r.bytes for r in points], [r.gflop_per_s for r in points]
        axes.loglog(*at, marker, color="black", markerfacecolor=fill, label=f"{device}, measured")
        axes.annotate("matrix times vector", (at[0][0], at[1][0]), (8, -4), textcoords="offset points", fontsize=8)
    sizes, above = (
        sorted({int(r.what) for r in products}),
        axes.secondary_xaxis("top", functions=(lambda x: 6 * x, lambda n: n / 6)),
    )
    above.set_xlabel("n, of a product of two n x n matrices")
    above.set_xticks(sizes, map(str, sizes))
    above.set_xticks([], minor=True)
    axes.set_ylim(top=2 * axes.get_ylim()[1])
    axes.set(title=title, xlabel="arithmetic intensity in FLOP per byte", ylabel="GFLOP/s", xlim=(0.25, end))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    try:
        drawing.savefig(path, dpi=150)
    except OSError as error:
        raise Invalid(f"{path} cannot be written to: {error.strerror or error}") from None
