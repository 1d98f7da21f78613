"""What a person sees during a fit: one line per epoch, and in a terminal or a notebook two more that change."""

from __future__ import annotations

import os
import shlex
import sys
import time
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from samestep.processes.place import COMMAND
from samestep.runs.log import Event

TITLE: ContextVar[str] = ContextVar("title", default="")  # of the job, to be said first
WIDEST = 100  # columns of the bar; a notebook has so many, too


def show(wanted: bool | None) -> Display | None:
    """A display, unless it is not wanted: in the cell of a notebook, else on standard error."""
    if wanted is False:
        return None
    console = Console(stderr=True, highlight=False, soft_wrap=True, force_jupyter=False)
    ipython = sys.modules.get("IPython")
    if hasattr(ipython and ipython.get_ipython(), "kernel"):
        return Notebook(console)
    return Terminal(console) if console.is_terminal and not console.is_dumb_terminal else Display(console)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def rate(lr: float | None) -> list[str]:
    """What there is to say of a rate: nothing, if only the optimizer knows it."""
    return [] if lr is None else [f"rate {lr:.4g}"]


def clock(seconds: float | None) -> str:
    """
    >>> clock(83.4), clock(3723), clock(None)
    ('1:23', '1:02:03', '-:--')
    """
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


class Display:
    """Listens to the events of a fit, and says lines. What changes all the time is left out."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def __call__(self, event: Event) -> None:
        getattr(self, f"_{event['event']}", lambda _: None)(event)

    def say(self, line: str) -> None:
        self.console.print(line, markup=False)

    def draw(self, bar: str, done: int, numbers: str) -> None:
        """Show how far the run is: a bar whose first `done` characters are done, and numbers."""

    def close(self) -> None:
        """Leave everything as it was."""

    def _start(self, event: Event) -> None:
        self.epochs, devices = event["epochs"], event["devices"]
        self.steps, self.first = self.epochs * event["steps_per_epoch"], event.get("step", 0)
        names = ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices))
        steps = f"{event['steps_per_epoch']} steps an epoch over {event['examples']:,} examples"
        model = f"{event['model']} ({event['parameters']:,} weights)"
        if TITLE.get():
            self.say(TITLE.get())
        self.say(f"{model} on {names}: {steps}, {event['shards']} shards a step")
        if event["event"] == "resume":
            self.say(f"resumed after step {event['step']}")
        self.began = self.since = time.perf_counter()
        self._draw(min(self.first * self.epochs // self.steps + 1, self.epochs), self.first, [])

    _resume = _start

    def _steps(self, event: Event) -> None:
        now, count, steps = time.perf_counter(), sum(event["examples"]), len(event["lr"])
        loss = sum(map(sum, event["loss"])) / (sum(event.get("weight") or event["examples"]) or 1)
        scores = f"loss {loss:.4f}"
        if event["hits"] is not None:
            scores += f"  accuracy {percent(sum(map(sum, event['hits'])) / count)}"
        over = f"(last {f'{steps} steps' if steps > 1 else 'step'})"
        speed = count / max(now - self.since, 1e-9)
        parts = [f"{scores} {over}", f"{speed:,.0f} examples/s", *rate(event["lr"][-1])]
        self.since = now
        self._draw(event["epoch"], event["first"] + steps, parts)

    def _draw(self, epoch: int, step: int, numbers: list[str]) -> None:
        """The whole run as a bar, with the time that is left if it goes on as since its start; and as many numbers as fit."""
        left = (time.perf_counter() - self.began) / (step - self.first) * (self.steps - step) if numbers else None
        before, after = f"epoch {epoch:>3}/{self.epochs}  step {step}/{self.steps}  ", f"  left {clock(left)}"
        width = min(self.console.width, WIDEST)
        room = max(width - len(before) - len(after), 0)
        full, empty = "#-" if self.console.options.ascii_only else "━─"
        done = room * step // self.steps
        bar = before + full * done + empty * (room - done) + after
        while len("  ".join(numbers)) > width:
            numbers = numbers[:-1]
        self.draw(bar[:width], len(before) + done, "  ".join(numbers))

    def _epoch(self, event: Event) -> None:
        line = f"epoch {event['epoch']:>3}/{self.epochs}  train {event['train_loss']:.4f} {percent(event['train_accuracy'])}"
        if event["test_loss"] is not None:
            line += f"  test {event['test_loss']:.4f} {percent(event['test_accuracy'])}"
        self.say("  ".join([line, *rate(event["lr"]), f"{event['seconds']:.2f} s"]))
        self.since = time.perf_counter()  # the time of the evaluation is not counted as training


class Terminal(Display):
    """The bar stands below all lines, and is gone at the end."""

    live: Live | None = None

    def draw(self, bar: str, done: int, numbers: str) -> None:
        if not self.live:
            # What a script prints goes where it would go without the bar: above it, or into a file.
            above = sys.stdout.isatty()
            self.live = Live(console=self.console, transient=True, auto_refresh=False, redirect_stdout=above)
            self.live.start()
        text = Text(f"{bar}\n{numbers}")
        text.stylize("cyan", bar.find("━"), done)
        self.live.update(text, refresh=True)

    def close(self) -> None:
        if self.live:
            self.live.stop()


class Notebook(Display):
    """All lines are one output of the cell, which changes; no widgets are needed."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.lines, self.bar = list[str](), ""
        self.handle: Any = import_module("IPython.display").display(self._shown(), raw=True, display_id=True)

    def _shown(self) -> dict[str, str]:
        return {"text/plain": "\n".join([*self.lines, self.bar])}

    def say(self, line: str) -> None:
        self.lines.append(line)
        self.handle.update(self._shown(), raw=True)

    def draw(self, bar: str, done: int, numbers: str) -> None:
        self.bar = f"{bar}\n{numbers}"
        self.handle.update(self._shown(), raw=True)

    def close(self) -> None:
        self.bar = ""
        self.handle.update(self._shown(), raw=True)


def stopped(step: int, last: int, folder: Path | None) -> str:
    """What a person reads when a fit was stopped by a signal: how to go on."""
    told = f"interrupted after step {step} of {last}: "
    if folder is None:
        return told + "fit returns the run so far; with a run_dir it could be resumed"
    command = os.environ.get(COMMAND, "")
    if "--run-dir" not in command:  # it is in the script, or follows from the time
        command = command.replace("train", f"train --run-dir {shlex.quote(str(folder))}", 1)
    return f"{told}to resume it, {command or f'fit again with run_dir={str(folder)!r}'}"
