"""What a person sees during a fit: a live bar in a terminal, one line per epoch elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from samestep.runs.log import Event


def show(wanted: bool | None) -> Display | None:
    """A display on standard error, if wanted; by default (None), if standard error is a terminal."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    return Display(console) if wanted or (wanted is None and console.is_terminal) else None


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


class Display:
    """Listens to the events of a fit."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar: Progress | None = None

    def __call__(self, event: Event) -> None:
        getattr(self, f"_{event['event']}", lambda _: None)(event)

    def close(self) -> None:
        if self.bar:
            self.bar.stop()

    def _start(self, event: Event) -> None:
        self.epochs, devices = event["epochs"], event["devices"]
        names = ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices))
        steps = f"{event['steps_per_epoch']} steps an epoch over {event['examples']:,} examples"
        model = f"{event['model']} ({event['parameters']:,} weights)"
        self.console.print(f"{model} on {names}: {steps}, {event['shards']} shards a step")
        if self.console.is_terminal:
            epoch, numbers = TextColumn("{task.description}"), TextColumn("{task.fields[numbers]}")
            columns = epoch, BarColumn(bar_width=24), numbers, TimeRemainingColumn(compact=True)
            self.bar = Progress(*columns, console=self.console, transient=True)
            total = self.epochs * event["steps_per_epoch"]
            self.task = self.bar.add_task(f"epoch   1/{self.epochs}", total=total, numbers="-")
            self.bar.start()
        self._since = time.perf_counter()
        if event["event"] == "resume":
            self.console.print(f"going on after step {event['step']}")

    _resume = _start

    def _steps(self, event: Event) -> None:
        now, count = time.perf_counter(), sum(event["examples"])
        if self.bar:
            loss = sum(map(sum, event["loss"])) / (sum(event.get("weight") or event["examples"]) or 1)
            accuracy = None if event["hits"] is None else sum(map(sum, event["hits"])) / count
            speed = f"rate {event['lr'][-1]:.4g} {count / (now - self._since):,.0f} examples/s"
            numbers = f"loss {loss:.4f}  accuracy {percent(accuracy)}  {speed}"
            epoch, done = f"epoch {event['epoch']:>3}/{self.epochs}", event["first"] + len(event["lr"])
            self.bar.update(self.task, description=epoch, completed=done, numbers=numbers)
        self._since = now

    def _epoch(self, event: Event) -> None:
        line = f"epoch {event['epoch']:>3}/{self.epochs}  train {event['train_loss']:.4f} {percent(event['train_accuracy'])}"
        if event["test_loss"] is not None:
            line += f"  test {event['test_loss']:.4f} {percent(event['test_accuracy'])}"
        self.console.print(f"{line}  rate {event['lr']:.4g}  {event['seconds']:.2f} s")
        self._since = time.perf_counter()  # the time of the evaluation is not counted as training
