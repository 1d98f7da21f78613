"""sweep: what is tried; it runs side by side, resumes and ends in one table and one figure; divergence and errors are told."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import samestep as ss
from samestep.errors import Invalid
from samestep.tuning.sweep import Base, Setting, picture, settings, sweep

SCRIPT = """
import sys
import numpy as np, torch, samestep as ss
rng = np.random.default_rng(0)
x = rng.standard_normal((60, 4)).astype("float32")
data = ss.Data((x[:40], x[:40].argmax(1)), (x[40:], x[40:].argmax(1)))
if __name__ == "__main__":
    assert "--fail" not in sys.argv, "as asked"
    trainer = ss.Trainer(2, 20, lr=0.5, shards=2, devices="cpu")
    torch.manual_seed(trainer.seed)
    open("started", "a").write(f"{trainer.schedule(0)}\\n")
    trainer.fit(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), data)
"""
BASE = Base(lr=0.1, epochs=5, batch_size=64)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(SCRIPT)


def lab(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "samestep", "lab", "sweep", "my.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("of", "values", "options"),
    [
        ("rate", "0.1, 1", {"rate 0.1": {"lr": 0.1}, "rate 1": {"lr": 1.0}}),
        ("exponent", "0,0.5", {
            "exponent 0": {"schedule": "inverse_power(0.1, 1, 0).in_epochs()"},
            "exponent 0.5": {"schedule": "inverse_power(0.1, 1, 0.5).in_epochs()"},
        }),
        ("batch", "1,4", {
            "1 x 64": {"batch-size": 64, "lr": 0.1}, "4 x 64, same rate": {"batch-size": 256, "lr": 0.1},
            "4 x 64, linear": {"batch-size": 256, "lr": 0.4}, "4 x 64, square root": {"batch-size": 256, "lr": 0.2},
        }),
        ("schedule", "constant(0.1); cosine(0.3, 5).in_epochs()", {
            "constant(0.1)": {"schedule": "constant(0.1)"},
            "cosine(0.3, 5).in_epochs()": {"schedule": "cosine(0.3, 5).in_epochs()"},
        }),
    ],
)  # fmt: skip
def test_what_is_tried(of: str, values: str, options: dict[str, object]) -> None:
    assert {one.label: one.options for one in settings(of, values, BASE)} == options


@pytest.mark.parametrize("of", ["rate", "warmup", "exponent", "batch"])
def test_there_is_something_usual_to_try(of: str) -> None:
    assert len(settings(of, "", BASE)) >= 3


def test_the_base_is_that_of_the_job() -> None:
    data = np.zeros((40, 1), np.float32), np.zeros(40, np.int64)
    for given, peak in (
        ({"schedule": ss.cosine(0.3, 2).warmup(2).in_epochs()}, 0.3), ({"lr": 0.05}, 0.05), ({}, 0.1),
        ({"optimizer": ss.adam()}, 0.001), ({"schedule": lambda t: 0.1}, None),
    ):  # fmt: skip
        assert Base.of(ss.Trainer(4, 10, **given), None, data, None) == Base(peak, 4, 10)  # type: ignore[arg-type]
    with pytest.raises(Invalid, match="the rate that is trained with is not known: say --lr"):
        settings("batch", "2", Base(None, 4, 10))


def test_a_sweep_ends_in_one_table_and_one_figure_and_resumes() -> None:
    done = lab("--values", "0.1,0.5", "--seeds", "2", "--png", "s.png", "--csv")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["setting"] for row in rows] == ["rate 0.1", "rate 0.5"]
    assert all(row["runs"] == "2" and row["diverged"] == "0" for row in rows)
    assert sorted(line.split()[1] for line in done.stderr.splitlines() if "/4 " in line) == [
        "rate-0.1-seed-0:", "rate-0.1-seed-1:", "rate-0.5-seed-0:", "rate-0.5-seed-1:",
    ]  # fmt: skip
    ends = [ss.Run.load(f"sweeps/rate-0.5-seed-{seed}").history[-1]["test_accuracy"] for seed in (0, 1)]
    assert float(rows[1]["test_accuracy"]) == pytest.approx(sum(ends) / 2)
    assert Path("s.png").read_bytes()[:4] == b"\x89PNG"
    logs = {path: path.read_bytes() for path in Path("sweeps").rglob("weights.safetensors")}
    more = lab("--values", "0.1,0.5", "--seeds", "3", "--json")  # goes on, with one seed more
    told = json.loads(more.stdout)
    assert [row["runs"] for row in told["rows"]] == [3, 3]
    assert {path: path.read_bytes() for path in logs} == logs
    assert "over 3 seeds" in told["says"]


def test_runs_that_diverge_are_counted_and_the_others_go_on() -> None:
    done = lab("--values", "0.1,1e38")
    assert done.returncode == 0, done.stderr
    assert "rate-1e38-seed-0: diverged\n" in done.stderr
    assert "Diverged: 1 of rate 1e38." in done.stdout
    assert done.stdout.splitlines()[1].split()[:3] == ["rate", "0.1", "0.1"]
    only = lab("--values", "1e38", "--folder", "other", "--png", "nothing.png")
    last = "Nothing came to its end. Diverged: 1 of rate 1e38. Try lower rates."
    assert (only.returncode, only.stdout.splitlines()[-1]) == (0, last)
    assert not Path("nothing.png").exists()


def test_a_script_that_fails_ends_the_sweep_with_what_it_said() -> None:
    tried = settings("rate", "0.1,0.2", BASE)
    with pytest.raises(Invalid, match=r"(?s)seed-0 ended with status 1 \(once that is mended, .*\):.*as asked"):
        sweep(tried, {}, ["my.py", "--", "--fail"], Path("runs"), 1, 2, lambda line: None)


def test_an_interrupted_sweep_stops_what_runs_and_goes_on_when_repeated() -> None:
    arguments = ["--values", "0.1,0.2,0.3", "--epochs", "3000", "--at-once", "1", "--json"]
    command = [sys.executable, "-m", "samestep", "lab", "sweep", "my.py", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    log = Path("sweeps/rate-0.1-seed-0/events.jsonl")
    deadline = time.monotonic() + 120
    while not (log.exists() and b'"epoch"' in log.read_bytes()):  # until it trains
        assert process.poll() is None
        assert time.monotonic() < deadline
        os.sched_yield()
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode not in (0, 2)
    assert Path("started").read_text().split() == ["0.5", "0.1"]  # looked at, then trained; no other was started
    stopped = ss.Run.load("sweeps/rate-0.1-seed-0")
    assert stopped.interrupted
    assert 0 < len(stopped.history) < 3000


def test_the_picture_of_scores_and_losses() -> None:
    def rows(*accuracies: float) -> list[dict[str, float]]:
        return [{"train_loss": 1 - a, "test_loss": 1 - a, "test_accuracy": a} for a in accuracies]

    tried = settings("batch", "1,2", BASE)
    for one, ends in zip(tried, ([0.5, 0.6], [0.4, 0.4], [0.8, 0.6], [0.7]), strict=True):
        one.histories = [rows(0.1, end) for end in ends]
    made = picture("batch", tried)
    scores = {curve.label: (list(curve.x), list(curve.y)) for curve in made.panels[0].curves}
    assert scores["linear"] == ([1, 2], [pytest.approx(0.55), pytest.approx(0.7)])
    assert scores["same rate"][1] == [pytest.approx(0.55), pytest.approx(0.4)]
    assert "The best mean test accuracy is 0.7, 0.6 to 0.8 over 2 seeds: 2 x 64, linear." in made.says
    assert len(made.panels[1].curves) == 4
    tried[3].histories[0][-1]["test_accuracy"] = 0.9  # a broken twin: another one is best
    assert "square root" in picture("batch", tried).says
    assert Setting("a", 0, "a", {}, [[{"train_loss": 2.0}]]).row() == {
        "setting": "a", "runs": 1, "diverged": 0, "train_loss": 2.0, "train_loss_std": None,
    }  # fmt: skip
