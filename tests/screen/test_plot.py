"""The command `samestep schedule` and what it draws."""

import csv
import io
import json
import struct
import sys
import unicodedata
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from samestep.schedules.text import parse
from samestep.screen import cli, plot

COSINE = "cosine(0.3, 15, end=0.01).warmup(5)"


@pytest.fixture
def samestep(monkeypatch, capsys, tmp_path):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["samestep", "schedule", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.run()
        done = capsys.readouterr()
        return end.value.code or 0, done.out, done.err

    monkeypatch.chdir(tmp_path)
    return call


def test_numbers_as_json_and_csv_are_exact(samestep):
    status, out, _ = samestep(COSINE, "drops(0.5, [15, 30], 0.5)", "--steps", 40, "--json")
    told = json.loads(out)
    assert (status, told["unit"]) == (0, "steps")
    assert [row["values"] for row in told["schedules"]] == [
        parse(COSINE).values(41).tolist(), parse("drops(0.5, [15, 30], 0.5)").values(41).tolist(),
    ]  # fmt: skip
    assert told["schedules"][0]["schedule"] == parse(COSINE).to_json()
    status, out, _ = samestep(COSINE, "--steps", 40, "--csv")
    rows = list(csv.reader(io.StringIO(out)))
    assert rows[0] == ["t", COSINE]
    assert [float(row[1]) for row in rows[1:]] == parse(COSINE).values(41).tolist()


def test_epochs(samestep):
    told = json.loads(samestep("cosine(0.3, 20).in_epochs()", "--epochs", 30, "--json")[1])
    assert told["unit"] == "epochs"
    assert told["schedules"][0]["values"] == parse("cosine(0.3, 20)").values(31).tolist()
    told = json.loads(
        samestep("poly(1, 4).in_epochs()", "constant(1)", "--epochs", 2, "--steps-per-epoch", 3, "--json")[1]
    )
    assert told["unit"] == "steps"
    assert told["schedules"][0]["values"] == [1.0, 1.0, 1.0, 0.75, 0.75, 0.75, 0.5]


def test_how_many_are_shown(samestep):
    assert len(json.loads(samestep("constant(1)", "--json")[1])["schedules"][0]["values"]) == 101
    assert samestep("poly(1, 4)", "--steps", 3, "--csv")[1] == 't,"poly(1.0, 4)"\n0,1.0\n1,0.75\n2,0.5\n3,0.25\n'
    told = json.loads(samestep("poly(1, 4).in_epochs()", "--epochs", 1, "--steps-per-epoch", 1, "--json")[1])
    assert (told["unit"], told["schedules"][0]["values"]) == ("steps", [1.0, 0.75])
    assert json.loads(samestep("constant(1)", "--steps", 1, "--json")[1])["schedules"][0]["values"] == [1.0, 1.0]


@pytest.mark.parametrize(("room", "width"), [(90, 90), (110, 110), (200, 110)])
def test_a_plot_takes_the_room_that_there_is_up_to_110_columns(samestep, monkeypatch, room, width):
    monkeypatch.setattr(cli, "out", Console(width=room, file=io.StringIO()))
    samestep("constant(1)")
    assert len(cli.out.file.getvalue().splitlines()[0]) == width


def test_a_small_plot_to_the_letter():
    curve = {"a": np.array([0.0, 1.0, 2.0])}
    assert plot.terminal(curve, "steps", width=20, height=3).plain.splitlines() == [
        " 2┤           ⢀⣀⠤⠔⠒⠉",
        " 1┤     ⢀⣀⠤⠔⠒⠉⠁     ",
        " 0┤⣀⠤⠔⠒⠉⠁           ",
        "  └─────────────────",
        "   0         2 steps",
        "   ━━ a",
    ]


def test_a_plot_of_nothing_but_zeros_and_one_in_a_narrow_terminal():
    lines = plot.terminal({"a": np.zeros(2)}, "steps", width=5, height=3).plain.splitlines()
    assert lines == ["  0.5┤" + " " * 10, "    0┤" + "⠤" * 10, " -0.5┤" + " " * 10, "     └" + "─" * 10,
                     "      0  1 steps", "      ━━ a"]  # fmt: skip


def test_every_curve_has_its_colour_in_the_plot_and_in_the_legend():
    text = plot.terminal({str(i): np.full(2, i) for i in range(13)}, "steps", width=20, height=26)
    spans = [(text.plain.count("\n", 0, span.start), span.style) for span in text.spans]
    rows = [25, 23, 21, 19, 17, 15, 13, 10, 8, 6, 4, 2, 0]
    colours = [*plot.COLOURS, *plot.COLOURS, plot.COLOURS[0]]
    drawn = [(row, colour) for row, colour in zip(rows, colours, strict=True) for _ in range(16)]
    assert sorted(spans) == sorted([*drawn, *((28 + i, colour) for i, colour in enumerate(colours))])


def test_the_terminal_shows_range_unit_and_legend(samestep):
    status, out, err = samestep(COSINE, "geometric(0.4, 0.9)", "--steps", 40)
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert lines[0].split("┤")[0].strip() == "0.4"
    assert "40 steps" in out
    assert lines[-2].strip() == f"━━ {COSINE}"
    assert lines[-1].strip() == "━━ geometric(0.4, 0.9)"
    assert {len(line) for line in lines[:16]} == {80}


def test_a_curve_has_a_dot_in_every_column_and_no_gaps():
    """Falling from top to bottom: the dots go from the first row to the last, each touching the one before."""
    dots = plot._dots(np.linspace(1, 0, 7), 1, 0, 64, 150)
    columns = [sorted(row for row, column in dots if column == c) for c in range(150)]
    assert columns[0][0] == 0
    assert columns[-1][-1] == 63
    assert all(after[0] <= before[-1] + 1 for before, after in pairwise(columns))
    step = plot._dots(np.array([1.0] * 500 + [0.0] * 500), 1, 0, 8, 20)
    assert {row for row, column in step if column < 9} == {0}
    assert {row for row, column in step if column > 11} == {7}
    assert {row for row, _ in step} == set(range(8))


def test_a_column_shows_as_many_points_as_it_takes_to_have_one_for_every_value():
    """5 values, 2 columns: 3 points each, at 0, 0.8, 1.6 and at 2.4, 3.2, 4."""
    dots = plot._dots(np.array([0.0, 0.0, 1.0, 0.0, 0.0]), 1, 0, 11, 2)
    assert dots == [(row, column) for column in (0, 1) for row in range(4, 11)]


def test_a_column_begins_next_to_where_the_one_before_ended():
    dots = plot._dots(np.array([0.7, 0.0, 0.5]), 1, 0, 11, 3)
    assert dots == [(3, 0), *((row, 1) for row in range(4, 11)), *((row, 2) for row in range(5, 10))]


def test_a_constant_is_drawn_in_the_middle():
    text = plot.terminal({"constant(0.1)": np.full(10, 0.1)}, "steps", width=60, height=9).plain
    assert [line[-20:].strip() != "" for line in text.splitlines()[:9]] == [False] * 4 + [True] + [False] * 4


def test_the_frame_names_the_ends_and_the_middle():
    lines = plot.terminal({"line": np.linspace(1.0, 3.0, 50)}, "steps", height=10).plain.splitlines()
    assert [lines[row].split("┤")[0].strip() for row in (0, 5, 9)] == ["3", "2", "1"]
    assert {len(line) for line in lines[:10]} == {80}
    assert len(plot.terminal({"line": np.arange(5)}, "steps").plain.splitlines()) == 16 + 3


def test_dots_are_where_unicode_has_them():
    names = [[unicodedata.name(chr(0x2800 + bit)).rpartition("-")[2] for bit in row] for row in plot.DOTS]
    assert names == [["1", "4"], ["2", "5"], ["3", "6"], ["7", "8"]]


def test_figures(samestep, tmp_path):
    pytest.importorskip("matplotlib")
    said = "a.png: the rates of 100 steps\nb.svg: the rates of 100 steps\n"
    assert samestep(COSINE, "--png", "a.png", "--svg", "b.svg") == (0, said, "")
    status, out, err = samestep(COSINE, "--png", "a.png", "--json")  # what another program reads stays as it is
    assert (status, json.loads(out)["unit"], err) == (0, "steps", "a.png: the rates of 100 steps\n")
    png = (tmp_path / "a.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", png[16:24]) == (1050, 600)
    svg = (tmp_path / "b.svg").read_text()
    assert "<svg" in svg
    assert "learning rate" in svg


def test_a_figure_that_cannot_be_written(samestep, tmp_path):
    pytest.importorskip("matplotlib")
    told = "samestep: no/a.png cannot be written to: No such file or directory\n"
    assert samestep("constant(1)", "--png", "no/a.png") == (2, "", told)
    assert list(tmp_path.iterdir()) == []


def test_a_figure_begins_at_0_and_shows_every_curve(monkeypatch, tmp_path):
    drawn = []
    figures = pytest.importorskip("matplotlib.figure")
    kept = SimpleNamespace(Figure=lambda **given: drawn.append(figures.Figure(**given)) or drawn[0])
    monkeypatch.setattr(plot.find, "imported", lambda *names: kept)
    plot.figure({"a": np.array([0.5, 0.25]), "b": np.array([0.75, 0.5, 0.3])}, "steps", tmp_path / "a.svg")
    [axes], [legend] = drawn[0].axes, drawn[0].legends
    assert [line.get_xydata().tolist() for line in axes.lines] == [
        [[0, 0.5], [1, 0.25]],
        [[0, 0.75], [1, 0.5], [2, 0.3]],
    ]
    assert [line.get_linewidth() for line in axes.lines] == [1.8, 1.8]
    assert axes.get_ylim()[0] == 0.0
    assert axes.get_xgridlines()[0].get_alpha() == 0.3
    assert [(text.get_text(), text.get_fontsize()) for text in legend.get_texts()] == [("a", 8), ("b", 8)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cosin(1, 2)"], "schedule: no schedule is called 'cosin'; did you mean cosine?"),
        (["cosine(0.1, 0)"], "cosine: T must be at least 1, got T=0"),
        (["__import__('os').system('touch x')"], None),
        (["constant(1)", "--steps", "0"], "--steps must be at least 1, got --steps=0"),
        (["constant(1)", "--epochs", "3"], "schedules in steps and an axis in epochs need --steps-per-epoch"),
        (["constant(1)", "constant(1).in_epochs()"], "schedules in steps and an axis in epochs need --steps-per-epoch"),
        (["constant(1)", "--json", "--csv"], "choose one of --json and --csv"),
        (["constant(1)", "--steps", "3", "--epochs", "3"], "choose one of --steps and --epochs"),
        (["constant(1)", "--png", "a.jpg"], "--png needs a file that ends in .png, got a.jpg"),
        (["constant(1)", "--png", "a.svg"], "--png needs a file that ends in .png, got a.svg"),
        (["constant(1)", "--svg", "a.png"], "--svg needs a file that ends in .svg, got a.png"),
        (["constant(1)", "--epochs", "0", "--steps-per-epoch", "1"], "--epochs must be at least 1, got --epochs=0"),
        (
            ["constant(1)", "--steps-per-epoch", "0"],
            "--steps-per-epoch must be at least 1, got --steps-per-epoch=0",
        ),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(samestep, tmp_path, arguments, message):
    status, out, err = samestep(*arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert message is None or err == f"samestep: {message}\n"
    assert list(tmp_path.iterdir()) == []
