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
        self._since = 0.0

    def __call__(self, event: Event) -> None:
        getattr(self, f"_{event['event']}", lambda _: None)(event)

    def close(self) -> None:
        if self.bar:
            self.bar.stop()

    def _start(self, event: Event) -> None:
        self.epochs, devices = event["epochs"], event["devices"]
        names = ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices))
        self.console.print(
            f"{event['model']} ({event['parameters']:,} weights) on {names}: {event['steps_per_epoch']} steps an epoch "
            f"over {event['examples']:,} examples, {event['shards']} shards a step"
        )
        if self.console.is_terminal:
            self.bar = Progress(
                TextColumn("epoch {task.fields[epoch]:>3}/{task.fields[epochs]}"),
                BarColumn(bar_width=24),
                TextColumn("loss {task.fields[loss]}  accuracy {task.fields[accuracy]}  rate {task.fields[lr]}"),
                TextColumn("{task.fields[speed]} examples/s"),
                TimeRemainingColumn(compact=True),
                console=self.console,
                transient=True,
            )
            fields = {"epoch": 1, "epochs": self.epochs, "loss": "-", "accuracy": "-", "lr": "-", "speed": "-"}
            self.task = self.bar.add_task("fit", total=self.epochs * event["steps_per_epoch"], **fields)
            self.bar.start()
        self._since = time.perf_counter()

    def _resume(self, event: Event) -> None:
        self._start(event)
        self.console.print(f"going on after step {event['step']}")

    def _steps(self, event: Event) -> None:
        now, count = time.perf_counter(), sum(event["examples"])
        if self.bar:
            loss = sum(map(sum, event["loss"])) / count
            accuracy = None if event["hits"] is None else sum(map(sum, event["hits"])) / count
            self.bar.update(
                self.task,
                completed=event["first"] + len(event["lr"]),
                epoch=event["epoch"],
                loss=f"{loss:.4f}",
                accuracy=percent(accuracy),
                lr=f"{event['lr'][-1]:.4g}",
                speed=f"{count / (now - self._since):,.0f}",
            )
        self._since = now

    def _epoch(self, event: Event) -> None:
        line = f"epoch {event['epoch']:>3}/{self.epochs}  train {event['train_loss']:.4f} {percent(event['train_accuracy'])}"
        if event["test_loss"] is not None:
            line += f"  test {event['test_loss']:.4f} {percent(event['test_accuracy'])}"
        self.console.print(f"{line}  rate {event['lr']:.4g}  {event['seconds']:.2f} s")
        self._since = time.perf_counter()  # the time of the evaluation is not counted as training

    def _end(self, event: Event) -> None:
        self.close()
