"""The commands of the lab: what they print and draw, for good input and bad."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import pytest
from screen.command import Samestep, samestep, sealed

from samestep.lab.figures import FIGURES
from samestep.tuning.sweep import Setting

SCRIPT = """
import sys
import torch, samestep as ss
torch.manual_seed(0)
x, y = torch.randn(40, 4), torch.randint(0, 3, (40,))
if __name__ == "__main__":
    trainer = ss.Trainer(3, int((sys.argv[1:] or [8])[0]), lr=0.25, devices="cpu")
    run = trainer.fit(torch.nn.Linear(4, 3), ss.Data((x, y), (x, y)))
    print("trained", run)
"""


@pytest.fixture(autouse=True)
def here(sealed: None) -> None:
    Path("my.py").write_text(SCRIPT)


def written() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*") if path.name != "__pycache__")


def test_the_figures_are_listed(samestep: Samestep) -> None:
    for command in (["figure", "--list"], ["figure"], ["run"]):
        done = samestep("lab", *command)
        assert (done.status, done.err) == (0, "")
        assert [line.split()[0] for line in done.out.splitlines()[::2]] == list(FIGURES)
        assert "takes objective, optimizer, schedule, noise, steps, start, seed\n" in done.out


def test_a_figure_in_the_terminal_and_in_a_file(samestep: Samestep) -> None:
    options = ("path", "--schedule", "0.1", "--noise", "0", "--start", "-5,-2", "--steps", "50")
    done = samestep("lab", "figure", *options)
    assert (done.status, done.err) == (0, "")
    assert "⠉" in done.out or "⠒" in done.out
    assert done.out.endswith("The paths end at (-0.000, -0.000).\n")
    done = samestep("lab", "figure", *options, "--png", "path.png")
    assert done.out == "path.png: Paths of gradient descent\nThe paths end at (-0.000, -0.000).\n"
    assert Path("path.png").read_bytes()[:4] == b"\x89PNG"


def test_the_table_behind_a_figure(samestep: Samestep) -> None:
    options = ("lab", "run", "distance", "--steps", "40", "--trajectories", "5", "--seed", "3")
    done = samestep(*options)
    lines = done.out.splitlines()
    assert lines[0].split() == ["panel", "curve", "x", "y", "low", "high"]
    assert lines[1].split()[:3] == ["5", "paths", "constant(0.1)"]
    assert lines[-1].startswith("At the end, on average: ")
    told = json.loads(samestep(*options, "--json").out)
    assert told["title"] == "How far from the minimum?"
    rows = list(csv.DictReader(io.StringIO(samestep(*options, "--csv").out)))
    assert [float(row["y"]) for row in rows] == [row["y"] for row in told["rows"]]
    assert len(rows) == 2 * 3 * 40 + 40
    again = samestep(*options, "--json", "--png", "d.png")
    assert (json.loads(again.out), again.err) == (told, "d.png: How far from the minimum?\n")


def test_a_descent_that_diverges_is_drawn_and_told_in_plain_json(samestep: Samestep) -> None:
    options = ("distance", "--schedule", "1.5", "--schedule", "0.1", "--trajectories", "3")
    assert samestep("lab", "figure", *options, "--png", "d.png").status == 0
    assert samestep("lab", "figure", *options).status == 0
    rows = json.loads(samestep("lab", "run", *options, "--json").out, parse_constant=pytest.fail)["rows"]
    assert rows[-1]["y"] == 0.1
    assert None in [row["y"] for row in rows]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("figure", "pth"), "figure: there is no 'pth'; did you mean path?"),
        (("figure", "path", "--start", "1,b"), "start must be a number, got start='b'"),
        (("figure", "path", "--start", "nan,1"), "start must be finite"),
        (
            ("figure", "path", "--schedule", "cosin(1, 2)"),
            "schedule: no schedule is called 'cosin'; did you mean cosine?",
        ),
        (("figure", "path", "--schedule", "-1"), "at least 0"),
        (("figure", "path", "--optimizer", "open('x')"), "optimizer: there is no 'open'"),
        (("figure", "path", "--steps", "-1"), "steps must be at least 1"),
        (("figure", "wells", "--steps", "3"), "wells takes seed; it has no use for steps"),
        (("figure", "path", "--png", "a.gif"), "--png needs a file that ends in .png, got a.gif"),
        (("figure", "path", "--png", "no/a.png"), "no/a.png cannot be written to: there is no folder no"),
        (("run", "path", "--json", "--csv"), "choose one of --json and --csv"),
        (("rates", "none.py"), "none.py is not a file"),
        (("rates", "my.py", "--model", "mlp"), "--model goes with the built-in job"),
        (("rates", "my.py", "--from", "1", "--to", "0.5"), "the lowest rate must be below the highest, got 1 and 0.5"),
        (("curvature", "my.py", "--products", "0"), "products must be at least 2"),
        (("curvature", "my.py", "--devices", "99"), "99"),
        (("sweep", "my.py", "--of", "what"), "--of must be one of rate, warmup, exponent, batch, schedule, got 'what'"),
        (("sweep", "my.py", "--values", "0.1,-1"), "--values of rate must be numbers with commas between, got '-1'"),
        (("sweep", "my.py", "--of", "warmup", "--values", "1.5"), "--values of warmup must be whole numbers"),
        (("sweep", "my.py", "--of", "warmup", "--values", "3"), "a warm-up must be shorter than the 3 epochs, got 3"),
        (("sweep", "my.py", "--of", "schedule", "--values", "x"), "schedule: unknown name 'x'"),
        (("sweep", "my.py", "--values", "1,1"), "--values must be different"),
        (("sweep", "my.py", "--seeds", "0"), "--seeds must be at least 1"),
        (("sweep", "my.py", "--at-once", "0"), "--at-once must be at least 1"),
        (("sweep", "my.py", "--epochs", "0"), "max_epochs must be at least 1"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(arguments: tuple[str, ...], says: str, samestep: Samestep) -> None:
    done = samestep("lab", *arguments)
    assert (done.status, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert says in done.err
    assert written() == ["my.py"]


def test_a_range_test_of_a_script(samestep: Samestep) -> None:
    done = samestep("lab", "rates", "my.py", "--from", "0.001", "--to", "1e4", "--steps", "40", "--png", "r.png")
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("r.png: Range test\nThe loss is least at a rate of ")  # and the script printed nothing
    told = json.loads(samestep("lab", "rates", "my.py", "--json").out)
    steps = [row for row in told["rows"] if row["curve"] == "of each step"]
    assert 10 <= len(steps) <= 100
    assert written() == ["my.py", "r.png"]


def test_a_range_test_of_the_built_in_job(samestep: Samestep) -> None:
    done = samestep("lab", "rates", "--model", "mlp", "--steps", "20")
    assert (done.status, done.err) == (0, "")
    assert "The loss is least at a rate of" in done.out
    assert written() == ["my.py"]


def test_the_curvature_of_a_script(samestep: Samestep) -> None:
    done = samestep("lab", "curvature", "my.py")
    assert [line.split(":")[0].split(" (")[0].rsplit(" ", 1)[0] for line in done.out.splitlines()] == [
        "largest eigenvalue", "largest stable rate with momentum", "largest stable rate with momentum",
    ]  # fmt: skip
    told = json.loads(samestep("lab", "curvature", "my.py", "--json", "--", "20").out)  # in batches of 20
    assert told["largest_stable_rate"]["momentum 0"] == pytest.approx(2 / told["eigenvalue"])
    assert told["largest_stable_rate"]["momentum 0.9"] == pytest.approx(3.8 / told["eigenvalue"])
    few = samestep("lab", "curvature", "my.py", "--products", "2")
    assert "(after 2 products, not settled: kinks of the loss" in few.out


@pytest.mark.parametrize(
    ("arguments", "options", "rest"),
    [
        (("--model", "mlp", "--lr", "0.05"), {"model": "mlp", "epochs": 10, "batch-size": 256}, []),
        (("my.py", "--lr", "0.05", "--epochs", "2"), {"epochs": 2, "batch-size": 8}, ["my.py"]),
        (("my.py", "--lr", "0.05", "--", "20"), {"epochs": 3, "batch-size": 20}, ["my.py", "--", "20"]),
    ],
)
def test_a_sweep_takes_what_is_not_said_from_the_job(
    arguments: tuple[str, ...],
    options: dict[str, object],
    rest: list[str],
    samestep: Samestep,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[object] = []

    def sweep(tried: list[Setting], *given: object) -> None:
        seen.extend([[one.options["lr"] for one in tried], *given[:2]])
        tried[0].histories = [[{"train_loss": 1.0, "test_loss": 2.0, "test_accuracy": 0.5}]]

    monkeypatch.setattr("samestep.tuning.sweep.sweep", sweep)
    done = samestep("lab", "sweep", "--of", "batch", "--values", "1,4", *arguments)
    assert (done.status, done.err) == (0, "")
    assert seen == [[0.05, 0.05, 0.2, 0.1], options, rest]
    assert "The best mean test accuracy is 0.5: 1 x" in done.out


def test_without_matplotlib_numbers_are_told_and_figures_refused_at_once(
    samestep: Samestep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for command in (("figure", "path"), ("figure", "path", "--png", "p.png"), ("rates", "my.py")):
        done = samestep("lab", *command)
        assert (done.status, done.out) == (2, "")
        assert "matplotlib" in done.err
    assert samestep("lab", "run", "path", "--schedule", "0.1").status == 0
    assert samestep("lab", "rates", "my.py", "--json").status == 0
