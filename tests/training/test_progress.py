"""progress: what a person sees of a fit, in a terminal and elsewhere."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from patience import one_by_one
from rich.console import Console

import samestep as ss
from samestep.errors import NotFinite
from samestep.models.torch import mlp
from samestep.training.progress import TITLE, Display, Notebook, Terminal, percent, show

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


def display(terminal: bool, width: int = 120, **given: Any) -> tuple[Any, Screen]:
    screen = Screen()
    console = Console(file=screen, force_terminal=terminal, width=width, highlight=False, soft_wrap=True, **given)
    return (Terminal if terminal else Display)(console), screen


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
    assert screen.take() == f"{first}resumed after step 7\n"
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


def drawn(screen: Screen) -> list[str]:
    """The two lines that were drawn last."""
    return screen.take().split("\n")[-2:]


@pytest.fixture
def live(clock: SimpleNamespace) -> Iterator[Callable[..., tuple[Any, Screen]]]:
    """Displays in a terminal that have started, and end with the test."""
    made: list[Any] = []

    def start(width: int = 120, event: dict[str, Any] = START, **given: Any) -> tuple[Any, Screen]:
        shown, screen = display(True, width, **given)
        made.append(shown)
        shown(event)
        return shown, screen

    yield start
    for shown in made:
        shown.close()


def test_the_bar_spans_the_whole_run(clock: SimpleNamespace, live: Callable[..., tuple[Any, Screen]]) -> None:
    shown, screen = live()
    assert drawn(screen) == ["epoch   1/12  step 0/60  " + 64 * "─" + "  left -:--", ""]
    clock.now = 4.0
    shown(STEPS)  # the 8th of 60 steps is made, after 4 s: 26 s are left
    bar = "epoch   2/12  step 8/60  " + 8 * "━" + 56 * "─" + "  left 0:26"
    numbers = "loss 1.2500  accuracy 75.00 % (last 3 steps)  128 examples/s  rate 0.125"
    assert drawn(screen) == [bar, numbers]
    clock.now = 5.0
    shown(STEPS | {name: STEPS[name][:1] for name in ("lr", "examples", "loss", "hits")} | {"first": 8})
    assert drawn(screen)[1] == "loss 1.2500  accuracy 75.00 % (last step)  256 examples/s  rate 0.3"


@pytest.mark.parametrize(
    ("width", "numbers"),
    [
        (120, "loss 1.2500  accuracy 75.00 % (last 3 steps)  128 examples/s  rate 0.125"),
        (80, "loss 1.2500  accuracy 75.00 % (last 3 steps)  128 examples/s  rate 0.125"),
        (60, "loss 1.2500  accuracy 75.00 % (last 3 steps)  128 examples/s"),
        (59, "loss 1.2500  accuracy 75.00 % (last 3 steps)"),
        (30, ""),
    ],
)
def test_the_bar_fits(
    width: int, numbers: str, clock: SimpleNamespace, live: Callable[..., tuple[Any, Screen]]
) -> None:
    """A line that the terminal breaks would stay there."""
    shown, screen = live(width)
    clock.now = 4.0
    screen.take()
    shown(STEPS)
    bar, *rest = screen.take().splitlines()
    assert (len(bar), "".join(rest)) == (min(width, 100), numbers)
    assert bar.startswith("epoch   2/12  step 8/60  ")


def test_the_bar_of_a_run_that_goes_on_begins_where_it_was(
    clock: SimpleNamespace, live: Callable[..., tuple[Any, Screen]]
) -> None:
    _, screen = live(event=START | {"event": "resume", "step": 60})  # which is complete
    assert drawn(screen)[0].startswith("epoch  12/12  step 60/60  ━━━")
    shown, screen = live(event=START | {"event": "resume", "step": 5})
    assert drawn(screen)[0].startswith("epoch   2/12  step 5/60  ━━━━━─")
    clock.now = 3.0
    shown(STEPS)
    assert drawn(screen)[0].endswith("━" + 56 * "─" + "  left 0:52")  # 3 steps took 3 s


def test_speed_does_not_count_the_evaluation(clock: SimpleNamespace, live: Callable[..., tuple[Any, Screen]]) -> None:
    shown, screen = live()
    shown(EPOCH)
    clock.now = 100.0  # the evaluation ends, and with it the epoch
    shown(EPOCH)
    clock.now = 100.5
    shown(STEPS)
    bar, numbers = drawn(screen)
    assert "1,024 examples/s" in numbers
    assert bar.endswith("  left 10:53")  # but the evaluations to come are in the time that is left


def test_live_bar_without_accuracy(clock: SimpleNamespace, live: Callable[..., tuple[Any, Screen]]) -> None:
    shown, screen = live()
    clock.now = 1.0
    shown(STEPS | {"hits": None})
    assert drawn(screen)[1].startswith("loss 1.2500 (last 3 steps)  512 examples/s")


def test_the_bar_is_coloured_where_that_is_wanted(
    clock: SimpleNamespace, live: Callable[..., tuple[Any, Screen]]
) -> None:
    for given, coloured in (
        ({"color_system": "standard"}, True),
        ({"color_system": "standard", "no_color": True}, False),
    ):
        shown, screen = live(**given)
        clock.now += 1
        shown(STEPS)
        assert ("\x1b[36m━" in screen.getvalue()) == coloured


def test_the_bar_ends_with_the_fit() -> None:
    shown, screen = display(terminal=True)
    shown(START)
    assert shown.live.is_started
    shown({"event": "end", "time": 1.0, "fingerprint": "ab"})  # says nothing, and the fit closes it
    shown.close()
    assert not shown.live.is_started
    assert screen.getvalue().endswith("\x1b[1A\x1b[2K")  # its lines are gone
    shown.close()  # a second time is no error
    assert screen.getvalue().count("\x1b[?25l") == screen.getvalue().count("\x1b[?25h") == 1  # the cursor is back


# A fit


def test_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    fit(progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_title_comes_first() -> None:
    shown, screen = display(terminal=False)
    token = TITLE.set("lenet on [Fashion]")
    shown(START)
    TITLE.reset(token)
    assert screen.take().splitlines()[0] == "lenet on [Fashion]"


@pytest.mark.parametrize("wanted", [None, True])
def test_progress_of_a_fit_is_one_line_per_epoch(
    wanted: bool | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # lines are not broken where somebody searches for them
    monkeypatch.setattr("samestep.training.fit.LIVE", -1.0)
    run = fit(progress=wanted)
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


def test_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert show(False) is None
    assert {type(show(wanted)) for wanted in (True, None)} == {Display}

    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stderr", Tty())
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "dumb")  # it cannot move its cursor
    assert type(show(None)) is Display
    monkeypatch.setenv("TERM", "xterm-256color")
    shown = show(None)
    assert isinstance(shown, Terminal)
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
    assert not shown.live.is_started
    written = screen.getvalue()
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1
    epochs = [line for line in screen.take().splitlines() if "train" in line and line.endswith(" s")]
    assert len(epochs) == (0 if broken else 3)  # above the bar, one line each


# A notebook


class Handle:
    """The output of a cell, which can be changed."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def update(self, content: dict[str, str], raw: bool) -> None:
        assert raw
        self.texts.append(content["text/plain"])


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[Handle]:
    """The outputs of the cells of a notebook, made up."""
    outputs: list[Handle] = []

    def output(content: dict[str, str], raw: bool, display_id: bool) -> Handle:
        assert raw
        assert display_id
        outputs.append(Handle())
        return outputs[-1]

    modules: dict[str, Any] = {"IPython": ModuleType("IPython"), "IPython.display": ModuleType("IPython.display")}
    vars(modules["IPython"])["get_ipython"] = lambda: SimpleNamespace(kernel="here")
    vars(modules["IPython.display"])["display"] = output
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return outputs


def test_a_fit_in_a_notebook_is_one_output(
    notebook: list[Handle], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samestep.training.fit.LIVE", -1.0)  # a look after every step
    one_by_one(monkeypatch)
    run = fit()
    assert capsys.readouterr() == ("", "")
    ((texts),) = [handle.texts for handle in notebook]
    bars = [text.splitlines()[-2] for text in texts if "left" in text.splitlines()[-2:][0]]
    assert len(set(bars)) >= 9
    assert any(bar.startswith("epoch   2/3  step 4/9  ━") for bar in bars)
    first, *lines = texts[-1].strip().splitlines()
    assert "MLP" in first
    assert [line.split()[1] for line in lines] == ["1/3", "2/3", "3/3"]
    assert f"{run.history[-1]['test_loss']:.4f}" in lines[-1]


def test_a_fit_that_is_quiet_or_in_a_shell_of_ipython_is_no_output(notebook: list[Handle]) -> None:
    assert show(False) is None
    assert type(show(None)) is type(show(True)) is Notebook
    vars(sys.modules["IPython"])["get_ipython"] = SimpleNamespace  # the shell in a terminal
    assert type(show(None)) is not Notebook
    vars(sys.modules["IPython"])["get_ipython"] = lambda: None  # imported by a script
    assert type(show(None)) is not Notebook
