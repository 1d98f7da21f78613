"""bench: what is counted, what is concluded, and what the command prints. No time is asserted: every machine has its own."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samestep.backends import find
from samestep.bench import devices as module
from samestep.bench.devices import Answer, Bench, Row, of_copies, of_pairs, of_products, of_two
from samestep.devices import Device, cpu, gpu
from samestep.screen import cli

NAMES = ["products", "logging", "at_once", "copies", "calls"]
OTHERS = dict.fromkeys(("jax", "tensorflow", "paddle"), sys.executable)
OTHERS["mxnet"] = str(Path(__file__).parents[2] / ".venv-mxnet" / "bin" / "python")


def made_up(
    device: str, what: object, seconds: float, spread: float = 0.1, flop: int = 10**9, size: int = 10**9
) -> Row:
    return module.row(device, str(what), flop, size, seconds, seconds * (1 - spread), seconds * (1 + spread))


def bench(*there: Device) -> Bench:
    """PyTorch on the CPU, which passes for these devices."""
    torch = find.load("torch")

    class Pretended(type(torch)):  # type: ignore[misc]
        def devices(self) -> list[Device]:
            return list(there)

        def put(self, array: Any, device: Device) -> Any:
            self.require(device)
            return torch.put(array, cpu())

    return Bench(Pretended(), quick=True)


@pytest.fixture(scope="module")
def alone() -> dict[str, Answer]:
    return {answer.name: answer for answer in bench(cpu()).answers()}


@pytest.fixture(scope="module")
def two_gpus() -> dict[str, Answer]:
    return {answer.name: answer for answer in bench(cpu(), gpu(0), gpu(1)).answers()}


# What is measured


def test_every_question_has_rows_in_order_and_a_conclusion(
    alone: dict[str, Answer], two_gpus: dict[str, Answer]
) -> None:
    for answers in (alone, two_gpus):
        assert list(answers) == NAMES
        for answer in answers.values():
            assert answer.conclusion.endswith(".")
            for row in answer.rows:
                assert 0 < row.low <= row.seconds <= row.high
                assert row.gflop_per_s == row.flop / row.seconds / 1e9
                assert row.gb_per_s == row.bytes / row.seconds / 1e9


def test_flops_and_bytes(alone: dict[str, Answer]) -> None:
    counted = {name: [(row.device, row.what, row.flop, row.bytes) for row in alone[name].rows] for name in alone}
    assert counted["products"] == [("cpu", str(n), 2 * n**3, 3 * 4 * n**2) for n in (16, 64, 256)]
    ways = ("logged one by one", "kept and fetched once")
    assert counted["logging"] == [("cpu", way, 100 * 2_020_000, 100 * 160_000) for way in ways]
    assert counted["calls"] == [
        ("cpu", way, 100 * 2 * 32**3, 100 * 12 * 32**2) for way in ("a call for each", "one call for all")
    ]
    pairs = (("cpu", "in turn, n = 256"), ("cpu and cpu", "at once, n = 256"))
    assert counted["at_once"] == [(*pair, 4 * 256**3, 24 * 256**2) for pair in pairs]
    assert counted["copies"] == [
        ("copy in cpu", "4 KiB", 0, 2 * 2**12),
        ("copy in cpu", "4 MiB", 0, 2 * 2**22),
        ("read in cpu", "4 MiB", 2 * 1024**2, 4 * (1024**2 + 2 * 1024)),
    ]


def test_gpus_are_beside_the_cpu_and_have_larger_products(two_gpus: dict[str, Answer]) -> None:
    sizes = [(row.device, int(row.what)) for row in two_gpus["products"].rows]
    assert sizes == [
        *((name, n) for n in (16, 64, 256) for name in ("cpu", "cuda:0", "cuda:1")), ("cuda:0", 1024), ("cuda:1", 1024),
    ]  # fmt: skip
    assert {row.device for row in two_gpus["logging"].rows} == {"cpu", "cuda:0", "cuda:1"}
    assert [row.device for row in two_gpus["at_once"].rows] == ["cuda:0", "cuda:0 and cuda:1"]
    assert list(dict.fromkeys(row.device for row in two_gpus["copies"].rows)) == [
        "copy in cpu", "read in cpu",
        "copy in cuda:0", "host → cuda:0", "cuda:0 → host", "cuda:0 → cuda:1", "read in cuda:0",
        "copy in cuda:1", "host → cuda:1", "cuda:1 → host", "cuda:1 → cuda:0", "read in cuda:1",
    ]  # fmt: skip
    assert {row.bytes for row in two_gpus["copies"].rows if "→" in row.device} == {2**12, 2**22}


def test_one_device_stands_for_two() -> None:
    assert bench(cpu(), gpu(0)).pair == [gpu(0), gpu(0)]
    assert bench(cpu()).pair == [cpu(), cpu()]
    assert bench(cpu(), cpu(1)).pair == [cpu(), cpu(1)]
    assert bench(cpu(), gpu(0), gpu(1), gpu(2)).pair == [gpu(0), gpu(1)]


def test_the_clock_stops_when_all_that_was_started_is_done() -> None:
    one, seen = bench(cpu()), list[Any]()
    one.wait = seen.append
    one.clock(module.Task(cpu(), "", 0, 1, lambda given: given + 1, make=lambda: 1), 3)
    assert seen == [[1, 1, 1], [2, 2, 2]]


def test_short_tasks_are_repeated_but_do_not_fill_the_memory() -> None:
    one, times = bench(cpu()), list[int]()
    one.clock = lambda task, n: times.append(n) or 1e-5 * n  # type: ignore[assignment, func-returns-value]
    assert one.measure([module.Task(cpu(), "a", 0, 1, lambda _: 0)])[0].seconds == pytest.approx(1e-5)
    one.measure([module.Task(cpu(), "b", 0, module.HELD // 2, lambda _: 0)])
    one.measure([module.Task(cpu(), "c", 0, module.HELD * 2, lambda _: 0)])
    assert times == [1, 1, 100, 100, 100, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1]


def test_the_operations_compute_what_they_are_to_compute() -> None:
    one, a = bench(cpu()), np.random.default_rng(0).random((5, 5), np.float32)
    array = one.backend.put(a, cpu())
    np.testing.assert_allclose(one.backend.get(one.times(array, array)), a @ a, rtol=1e-5)
    np.testing.assert_allclose(one.backend.get(one.norm(array)), [[np.linalg.norm(a)]], rtol=1e-5)
    np.testing.assert_array_equal(one.backend.get(one.copy(array)), a)


# What is concluded


def test_of_products() -> None:
    host = [made_up("cpu", n, n / 1000) for n in (10, 100, 1000)]
    assert of_products(host) == "There is no GPU to compare with. The CPU does 100 GFLOP/s at n = 10 and 100 at n = 10."
    late = [made_up("cuda:0", n, 0.05) for n in (10, 100, 1000, 2000)]
    said = of_products([*host, *late]).split(". ")[1]
    assert (
        said == "cuda:0 is clearly faster from n = 100 on: 0.2 times as fast at n = 10, 20 times as fast at n = 1000."
    )
    never = [made_up("cuda:0", n, n / 1000) for n in (10, 100, 1000)]
    said = of_products([*host, *never]).split(". ")[1]
    assert said.startswith("cuda:0 is not clearly faster up to n = 1000: 1 times as fast at n = 10")
    gap = [made_up("cuda:0", n, s) for n, s in ((10, 0.001), (100, 1.0), (1000, 0.001))]
    assert "clearly faster from n = 1000 on" in of_products([*host, *gap])
    assert (
        of_products([*host, *late, *(made_up("cuda:1", n, 0.001) for n in (10, 100, 1000))]).count("clearly faster")
        == 2
    )


def test_of_pairs() -> None:
    slow, fast, alike = made_up("cpu", "one by one", 3.0), made_up("cpu", "kept", 1.0), made_up("cpu", "kept", 2.9)
    assert of_pairs([slow, fast]) == "cpu: kept is 3 times as fast as one by one."
    assert of_pairs([fast, slow]) == "cpu: one by one is 0.333 times as fast as kept."
    assert of_pairs([slow, alike]) == "cpu: kept is not clearly faster or slower than one by one."
    assert of_pairs([slow, fast, slow, alike]).count(".") == 2


@pytest.mark.parametrize(
    ("seconds", "spread", "seen"),
    [(1.0, 0.1, "nearly linear"), (1.5, 0.1, "a gain, but not linear"), (2.0, 0.1, "no gain"), (2.5, 0.01, "no gain")],
)
def test_of_two(seconds: float, spread: float, seen: str) -> None:
    turn = made_up("cuda:0", "in turn", 2.0, spread)
    said = of_two([turn, made_up("cuda:0 and cuda:1", "at once", seconds, spread)])
    assert said.endswith(f": {seen}.")
    assert said.startswith("At once on cuda:0 and cuda:1 is ")
    alone = of_two([turn, made_up("cuda:0 and cuda:0", "at once", seconds, spread)])
    assert alone.endswith(f": {seen}. There is only cuda:0: it stands for two, which share it.")


def test_of_copies() -> None:
    host = [
        made_up("copy in cpu", "4 KiB", 0.5),
        made_up("copy in cpu", "64 MiB", 0.1),
        made_up("read in cpu", "64 MiB", 0.1),
    ]
    said = "There is no GPU, so nothing is transferred. In the host's memory: 2 GB/s with 4 KiB, 10 GB/s with 64 MiB."
    assert of_copies(host) == said
    moved = [
        made_up(way, size, s)
        for way in ("host → cuda:0", "cuda:0 → host")
        for size, s in (("4 KiB", 10), ("1 MiB", 0.05))
    ]
    rates = "0.1 GB/s with 4 KiB, 20 GB/s with 1 MiB"
    assert of_copies([*host, *moved]) == f"host → cuda:0: {rates}. cuda:0 → host: {rates}."


def test_numbers_in_a_cell() -> None:
    cells = [module.timed(made_up("cpu", "a", s)) for s in (2e-6, 1.5e-3, 12.0)]
    assert cells == ["2 (1.8–2.2) µs", "1.5 (1.35–1.65) ms", "12 (10.8–13.2) s"]
    assert [module.short(n) for n in (0.0123, 1.0, 12.34, 1234.5)] == ["0.0123", "1", "12.3", "1,234"]
    assert [module.shown(n) for n in (2**12, 2**26)] == ["4 KiB", "64 MiB"]


def test_tables_have_devices_side_by_side_and_copies_sizes(two_gpus: dict[str, Answer]) -> None:
    header = {name: [column.header for column in answer.table().columns] for name, answer in two_gpus.items()}
    beside = ["", "cpu", "GFLOP/s", "cuda:0", "GFLOP/s", "cuda:1", "GFLOP/s"]
    assert header["products"] == header["logging"] == header["calls"] == beside
    assert header["at_once"] == ["", "cuda:0", "GFLOP/s", "cuda:0 and cuda:1", "GFLOP/s"]
    assert header["copies"] == ["", "4 KiB", "GB/s", "4 MiB", "GB/s"]
    last = [list(column.cells)[-1] for column in two_gpus["products"].table().columns]
    assert last[:3] == ["1024", "", ""]  # too large for the CPU


# The figure


def test_the_roofline_of_three_devices(
    two_gpus: dict[str, Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures, drawn = pytest.importorskip("matplotlib.figure"), list[Any]()
    init = figures.Figure.__init__
    monkeypatch.setattr(figures.Figure, "__init__", lambda self, **given: drawn.append(self) or init(self, **given))
    module.roofline("mine", two_gpus["products"].rows, two_gpus["copies"].rows, tmp_path / "a.png")
    png = (tmp_path / "a.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", png[16:24]) == (1050, 690)
    [axes] = drawn[0].axes
    roofs, points = axes.lines[::2], axes.lines[1::2]
    assert len({line.get_linestyle() for line in roofs}) == len({line.get_marker() for line in points}) == 3
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("arithmetic intensity in FLOP per byte", "GFLOP/s")
    for line, roof in zip(points, roofs, strict=True):
        assert max(line.get_ydata()) == roof.get_ydata()[-1]  # the level is what was reached
        assert line.get_xdata()[1:4] == pytest.approx([16 / 6, 64 / 6, 256 / 6])
        assert line.get_xdata()[0] == pytest.approx(0.5, rel=0.01)


# The command


@pytest.fixture
def samestep(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Any]:
    def call(*arguments: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["samestep", "bench", "devices", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.run()
        return end.value.code or 0, *capsys.readouterr()

    monkeypatch.chdir(tmp_path)
    return call


def test_tables_and_conclusions_are_printed(samestep: Callable[..., Any], tmp_path: Path) -> None:
    status, out, err = samestep("--quick")
    assert (status, err) == (0, "")
    for text in (
        "Products of two",
        "100 products of 100 x 100",
        "Two products",
        "Memory and copies",
        "32 x 32",
        "GFLOP/s",
    ):
        assert text in out
    assert list(tmp_path.iterdir()) == []


def test_json_and_a_figure(samestep: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    status, out, err = samestep("--quick", "--json", "--png", "a.png")
    told = json.loads(out)
    assert (status, err) == (0, "a.png: the roofline of this machine\n")
    assert (told["backend"], told["version"], told["rounds"]) == ("torch", find.installed("torch"), 3)
    assert told["devices"][0] == "cpu"
    assert [name for name in told if name in NAMES] == NAMES
    assert told["products"]["rows"][0]["what"] == "16"
    assert told["products"]["rows"][0]["gflop_per_s"] > 0
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "caffe"], "no backend 'caffe': samestep has torch, jax, tensorflow, paddle, mxnet"),
        (["--png", "a.jpg"], "--png needs a file that ends in .png, got a.jpg"),
        (["--png", "no/a.png"], "no/a.png cannot be written to: there is no folder no"),
    ],
)
def test_bad_input_is_one_line(
    samestep: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(Bench, "measure", lambda *_: pytest.fail("something was measured"))
    assert samestep(*arguments) == (2, "", f"samestep: {message}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_framework_or_matplotlib_that_is_not_installed(
    samestep: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "installed", lambda name: None)
    status, out, err = samestep("--backend", "mxnet")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("samestep: 'mxnet' is not installed; ")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, out, err = samestep("--png", "a.png")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("samestep: 'matplotlib' is not installed; ")


def test_a_figure_that_cannot_be_written(alone: dict[str, Answer], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "a.png").mkdir()
    with pytest.raises(module.Invalid, match="cannot be written to: Is a directory"):
        module.roofline("", alone["products"].rows, alone["copies"].rows, tmp_path / "a.png")


@pytest.mark.parametrize("name", OTHERS)
def test_every_framework_measures(name: str, tmp_path: Path) -> None:
    python = Path(OTHERS[name])
    if not python.exists() or (name != "mxnet" and not find.installed(name)):
        pytest.skip(f"{name} is not installed")
    env = os.environ | {"PYTHONPATH": str(Path(module.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [str(python), "-m", "samestep", "bench", "devices", "--quick", "--json", "--backend", name]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["backend"], [key for key in told if key in NAMES]) == (name, NAMES)
