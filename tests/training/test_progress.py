"""progress: what a person sees of a fit, in a terminal and elsewhere."""

from __future__ import annotations

import io
import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import samestep as ss
from samestep.errors import NotFinite
from samestep.models.torch import mlp
from samestep.training.progress import Display, percent, show

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((40, 5)).astype(np.float32)
Y = RANDOM.integers(0, 3, 40)
DATA = ss.Data(train=(X, Y), test=(X[:9], Y[:9]))

START = {
    "event": "start", "time": 0.0, "devices": ["cuda:0", "cuda:1", "cuda:0"], "epochs": 12, "steps_per_epoch": 5,
    "examples": 1200, "shards": 8, "model": "LeNet", "parameters": 129068,
}  # fmt: skip
STEPS = {  # 512 examples, loss 640 / 512, 384 hits
    "event": "steps", "epoch": 2, "first": 5, "lr": [0.3, 0.2, 0.125], "examples": [256, 128, 128],
    "loss": [[300.0, 20.0], [320.0, 0.0], [0.0, 0.0]], "hits": [[128, 64], [192, 0], [0, 0]],
    "fingerprint": ["0" * 16, "1" * 16, "2" * 16],
}  # fmt: skip
EPOCH = {
    "event": "epoch", "epoch": 2, "step": 10, "lr": 0.125, "train_loss": 1.23456, "train_accuracy": 0.54321,
    "test_loss": 0.98765, "test_accuracy": 0.6789, "seconds": 3.456,
}  # fmt: skip
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Screen(io.StringIO):
    def take(self) -> str:
        """What was written since the last time, without colours and movements."""
        text = CONTROL.sub("", self.getvalue()).replace("\r", "")
        self.seek(0)
        self.truncate()
        return text


def display(terminal: bool) -> tuple[Display, Screen]:
    screen = Screen()
    return Display(Console(file=screen, force_terminal=terminal, width=120, highlight=False)), screen


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that the display reads, set by hand."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("samestep.training.progress.time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def fit(data: Any = DATA, **settings: Any) -> ss.Run:
    given = {"max_epochs": 3, "batch_size": 16, "shards": 4, "devices": 2} | settings
    return ss.Trainer(**given).fit(mlp((5, 4, 3), seed=1), data)


# Not a terminal


def test_first_line_says_what_is_trained() -> None:
    shown, screen = display(terminal=False)
    shown(START)
    text = screen.take()
    for part in ("LeNet", "129,068", "2 x cuda:0, 1 x cuda:1", "1,200 examples", "5 steps", "8 shards"):
        assert part in text
    assert text.count("\n") == 1


def test_one_line_per_epoch_with_its_numbers() -> None:
    shown, screen = display(terminal=False)
    shown(START)
    screen.take()
    shown(STEPS)
    assert screen.take() == ""
    shown(EPOCH)
    text = screen.take()
    assert text.startswith("epoch   2/12 ")
    assert re.search(r"train.* 1\.2346 .*54\.32 %.* test .*0\.9877 .*67\.89 %", text)
    assert re.search(r"rate 0\.125 ", text)
    assert text.endswith(" 3.46 s\n")
    assert text.count("\n") == 1
    shown({"event": "end", "time": 1.0, "fingerprint": "ab"})
    assert screen.take() == ""


def test_a_run_that_goes_on_says_from_where() -> None:
    shown, screen = display(terminal=False)
    shown(START)
    first = screen.take()
    shown(json.loads(json.dumps(START | {"event": "resume", "step": 7})))  # as the folder of the run has it
    assert screen.take() == f"{first}going on after step 7\n"
    shown(EPOCH)
    assert screen.take().startswith("epoch   2/12 ")


def test_no_test_examples_and_no_accuracy() -> None:
    shown, screen = display(terminal=False)
    shown(START)
    screen.take()
    shown(EPOCH | {"test_loss": None, "test_accuracy": None, "train_accuracy": None})
    text = screen.take()
    assert "test" not in text
    assert "%" not in text
    assert " - " in text


def test_events_of_a_later_version_are_no_error() -> None:
    shown, screen = display(terminal=False)
    shown({"event": "checkpoint", "step": 3})
    assert screen.take() == ""


def test_percent() -> None:
    assert [percent(value) for value in (0.0, 0.12345, 1.0, None)] == ["0.00 %", "12.35 %", "100.00 %", "-"]


# A terminal


def test_live_bar(clock: SimpleNamespace) -> None:
    shown, screen = display(terminal=True)
    shown(START)
    try:
        assert shown.bar is not None
        screen.take()
        clock.now = 3.0
        shown(STEPS)
        shown.bar.refresh()
        text = screen.take()
        task = shown.bar.tasks[0]
        assert (task.completed, task.total) == (8, 60)
        assert vars(shown.bar.columns[1])["bar_width"] == 24
    finally:
        shown.close()
    for part in ("epoch   2/12", "loss 1.2500", "accuracy 75.00 %", "rate 0.125", "171 examples/s --:--"):
        assert part in text


def test_the_bar_of_a_run_that_goes_on_begins_where_it_was(clock: SimpleNamespace) -> None:
    shown, _ = display(terminal=True)
    shown(START | {"event": "resume", "step": 5})
    try:
        assert shown.bar is not None
        clock.now = 2.0
        shown(STEPS)
        assert (shown.bar.tasks[0].completed, shown.bar.tasks[0].total) == (8, 60)
    finally:
        shown.close()


def test_speed_does_not_count_the_evaluation(clock: SimpleNamespace) -> None:
    shown, screen = display(terminal=True)
    shown(START)
    try:
        assert shown.bar is not None
        shown(EPOCH)
        clock.now = 100.0  # the evaluation ends, and with it the epoch
        shown(EPOCH)
        clock.now = 100.5
        screen.take()
        shown(STEPS)
        shown.bar.refresh()
        assert "1,024 examples/s" in screen.take()
    finally:
        shown.close()


def test_live_bar_without_accuracy(clock: SimpleNamespace) -> None:
    shown, screen = display(terminal=True)
    shown(START)
    try:
        assert shown.bar is not None
        clock.now = 1.0
        screen.take()
        shown(STEPS | {"hits": None})
        shown.bar.refresh()
        assert "accuracy - " in screen.take()
    finally:
        shown.close()


def test_the_bar_ends_with_the_fit() -> None:
    shown, screen = display(terminal=True)
    shown(START)
    assert shown.bar is not None
    assert shown.bar.live.is_started
    shown({"event": "end", "time": 1.0, "fingerprint": "ab"})  # says nothing, and the fit closes it
    shown.close()
    assert not shown.bar.live.is_started
    assert screen.getvalue().endswith("\x1b[1A\x1b[2K")  # its line is gone
    shown.close()  # a second time is no error
    assert screen.getvalue().count("\x1b[?25l") == screen.getvalue().count("\x1b[?25h") == 1  # the cursor is back


# A fit


def test_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    fit(progress=False)
    fit(progress=None)  # not a terminal
    assert capsys.readouterr() == ("", "")


def test_progress_of_a_fit_is_one_line_per_epoch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # lines are not broken where somebody searches for them
    monkeypatch.setattr("samestep.training.fit.LIVE", -1.0)
    run = fit(progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    first, *lines = err.splitlines()
    assert "MLP" in first
    assert "2 x cpu" in first
    assert len(lines) == 3
    for line, row in zip(lines, run.history, strict=True):
        assert line.startswith(f"epoch   {row['epoch']}/3 ")
        for number in (row["train_loss"], row["test_loss"]):
            assert f" {number:.4f} " in line
        for share in (row["train_accuracy"], row["test_accuracy"]):
            assert f" {100 * share:.2f} % " in line
        assert "rate 0.1 " in line


def test_progress_changes_no_bit(capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(progress=True).fingerprints == fit(progress=False).fingerprints


def test_show_by_default_only_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert show(None) is None
    assert show(False) is None
    assert isinstance(show(True), Display)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = show(None)
    assert isinstance(shown, Display)
    assert show(False) is None
    shown.console.print("epoch 1")
    assert sys.stderr.getvalue() == "epoch 1\n"  # numbers are not coloured


@pytest.mark.parametrize("broken", [False, True])
def test_a_fit_in_a_terminal_leaves_it_as_it_was(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, screen = display(terminal=True)
    monkeypatch.setattr("samestep.training.fit.show", lambda wanted: shown)
    if broken:
        with pytest.raises(NotFinite):
            fit((np.full_like(X, np.nan), Y))
    else:
        fit()
    assert shown.bar is not None
    assert not shown.bar.live.is_started
    written = screen.getvalue()
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1
    epochs = [line for line in screen.take().splitlines() if "train" in line and line.endswith(" s")]
    assert len(epochs) == (0 if broken else 3)  # above the bar, one line each
