"""The same training with other settings, side by side, with several seeds: which rate, warm-up, exponent or batch is best?"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from samestep.checks import show
from samestep.data.examples import Data
from samestep.errors import Invalid
from samestep.optimizers.rules import Optimizer
from samestep.runs.log import events
from samestep.schedules.algebra import Schedule
from samestep.schedules.kinds import constant
from samestep.schedules.rates import check_schedule
from samestep.screen.pictures import Curve, Panel, Picture
from samestep.training.trainer import Trainer

USUAL = {"rate": "0.01,0.03,0.1,0.3", "warmup": "0,1,2", "exponent": "0,0.25,0.5,1", "batch": "1,2,4,8", "schedule": ""}
RULES: dict[str, Callable[[float], float]] = {"same rate": lambda k: 1.0, "linear": float, "square root": math.sqrt}
SCORES = ("test_accuracy", "test_loss", "train_loss")  # the first one that there is decides
DIVERGED = re.compile("not finite|loss is (nan|-?inf)")  # what such a run says at its end


@dataclass
class Setting:
    """What is tried: options of `samestep train`, and the histories of the runs that came to their end with them."""

    label: str
    value: float  # where it stands on the axis
    curve: str  # to which it belongs
    options: dict[str, Any]
    histories: list[list[dict[str, Any]]] = field(default_factory=list)
    diverged: int = 0

    def ends(self, column: str) -> list[float]:
        """The last values of a column of the history."""
        return [rows[-1][column] for rows in self.histories if rows[-1].get(column) is not None]

    def row(self) -> dict[str, Any]:
        """Means over the seeds after the last epoch, and how far seeds are apart."""
        found = {"setting": self.label, **self.options, "runs": len(self.histories), "diverged": self.diverged}
        for name in ("train_loss", "train_accuracy", "test_loss", "test_accuracy"):
            if values := self.ends(name):
                found |= {name: fmean(values), f"{name}_std": stdev(values) if len(values) > 1 else None}
        return found


class Base(NamedTuple):
    """What a sweep changes one thing of: the rate, or its peak; None: it is not known."""

    lr: float | None
    epochs: int
    batch_size: int

    @staticmethod
    def of(trainer: Trainer, model: Any, data: Any, weights: Any) -> Base:
        """Of a fit as it would be."""
        schedule, data = trainer.schedule, data if isinstance(data, Data) else Data(data)
        if schedule is None and isinstance(trainer.optimizer, Optimizer):
            schedule = constant(trainer.optimizer.default_lr)
        peak = None
        if isinstance(schedule, Schedule):
            steps = -(-len(data.train) // trainer.batch_size)
            peak = float(f"{schedule.bind(steps).values(steps * trainer.max_epochs).max():.4g}")
        return Base(peak, trainer.max_epochs, trainer.batch_size)


def settings(of: str, values: str, base: Base) -> list[Setting]:
    """What a sweep tries: numbers with commas between, or schedules with semicolons.

    >>> [one.options["schedule"] for one in settings("warmup", "0,2", Base(lr=0.1, epochs=5, batch_size=256))]
    ['cosine(0.1, 5).in_epochs(smooth=True)', 'cosine(0.1, 3).warmup(2).in_epochs(smooth=True)']
    """
    if of not in USUAL:
        raise Invalid(f"--of must be one of {', '.join(USUAL)}, got {show(of)}")
    texts = [text.strip() for text in (values or USUAL[of]).split(";" if of == "schedule" else ",")]
    if base.lr is None and of not in ("rate", "schedule"):
        raise Invalid("the rate that is trained with is not known: say --lr")
    found = [one for number, text in enumerate(texts) for one in _settings(of, text, number, *base)]
    if len({one.label for one in found}) < len(found):
        raise Invalid(f"--values must be different, got {show(values)}")
    return found


def _settings(of: str, text: str, number: int, lr: float | None, epochs: int, batch_size: int) -> Iterator[Setting]:
    if of == "schedule":
        check_schedule("", "--values", text)
        yield Setting(text, number, text, {"schedule": text})
        return
    counted = of in ("warmup", "batch")
    try:
        x = int(text) if counted else float(text)
        if not (x > 0 or (x == 0 and of in ("warmup", "exponent"))) or not x < math.inf:
            raise ValueError
    except ValueError:
        kind = "whole numbers" if counted else "numbers"
        raise Invalid(f"--values of {of} must be {kind} with commas between, got {show(text)}") from None
    lr = lr or 0.0
    if of == "rate":
        yield Setting(f"rate {text}", x, of, {"lr": x})
    elif of == "exponent":
        yield Setting(f"exponent {text}", x, of, {"schedule": f"inverse_power({lr:g}, 1, {text}).in_epochs()"})
    elif of == "warmup":
        if x >= epochs:
            raise Invalid(f"a warm-up must be shorter than the {epochs} epochs, got {text}: raise --epochs")
        warm = f".warmup({text})" if x else ""
        yield Setting(
            f"warm-up {text}", x, of, {"schedule": f"cosine({lr:g}, {epochs - x}){warm}.in_epochs(smooth=True)"}
        )
    else:
        for rule, times in RULES.items() if x > 1 else [("", RULES["linear"])]:  # once is the same with every rule
            label = f"{text} x {batch_size}" + f", {rule}" * (x > 1)
            yield Setting(label, x, rule, {"batch-size": int(x) * batch_size, "lr": lr * times(x)})


def sweep(
    tried: Sequence[Setting], options: dict[str, Any], rest: Sequence[str], folder: Path, seeds: int, at_once: int,
    tell: Callable[[str], None],
) -> None:  # fmt: skip
    """Train with every setting and seed, so many at a time, each on its share of the cores.

    Every run has a folder, and goes on from what is there. So the same sweep again resumes, and repeats nothing.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    shares, running = [cores[i::at_once] for i in range(at_once)], set[subprocess.Popen[str]]()

    def claim() -> None:
        if mine := shares.pop():
            os.sched_setaffinity(0, mine)  # of this thread, and of all that it starts

    def run(setting: Setting, seed: int) -> tuple[Setting, Path, int, str]:
        place = folder / re.sub(r"[^\w.]+", "-", f"{setting.label} seed {seed}")
        chosen = options | setting.options | {"seed": seed, "run-dir": place}
        given = [f"--{name}={value}" for name, value in chosen.items()]
        # In a session of its own: Ctrl-C reaches it through us, once.
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "start_new_session": True}
        with subprocess.Popen(
            [sys.executable, "-m", "samestep", "train", "--quiet", *given, *rest], text=True, **quiet
        ) as process:
            running.add(process)
            said = process.communicate()[1]
            running.discard(process)
        return setting, place, process.returncode, said

    pool = ThreadPoolExecutor(at_once, initializer=claim)
    try:
        runs = [pool.submit(run, setting, seed) for seed in range(seeds) for setting in tried]
        for number, done in enumerate(as_completed(runs), 1):
            setting, place, status, said = done.result()
            if status and not DIVERGED.search(said):
                how = "once that is mended, the same command goes on; or choose another --folder"
                raise Invalid(f"{place.name} ended with status {status} ({how}):", f"\n{said.strip()}")
            if status:
                setting.diverged += 1
            else:
                log = events((place / "events.jsonl").read_bytes())
                setting.histories.append([event for event in log if event["event"] == "epoch"])
            tell(f"{number}/{len(runs)} {place.name}: " + ("diverged" if status else _last(setting.histories[-1])))
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in running.copy():
            process.send_signal(signal.SIGINT)  # each writes a checkpoint
        raise
    finally:
        pool.shutdown()


def _score(rows: Sequence[dict[str, Any]]) -> str:
    return next(name for name in SCORES if rows[-1].get(name) is not None)


def _last(rows: Sequence[dict[str, Any]]) -> str:
    return f"{_score(rows).replace('_', ' ')} {rows[-1][_score(rows)]:.4g}"


def picture(of: str, tried: Sequence[Setting]) -> Picture:
    """The scores against what was varied, with a band from the worst seed to the best; and how the training loss fell."""
    ended = [one for one in tried if one.histories]
    lost = "".join(f" Diverged: {one.diverged} of {one.label}." for one in tried if one.diverged)
    if not ended:
        return Picture(f"Sweep of {of}", [], f"Nothing came to its end.{lost} Try lower rates.")
    by, scores, falls = _score(ended[0].histories[0]), list[Curve](), list[Curve]()
    for name in dict.fromkeys(one.curve for one in ended if one.curve):
        mine = [one for one in ended if one.curve in (name, "")]
        ends = [one.ends(by) for one in mine]
        bands = [fmean(e) for e in ends], [min(e) for e in ends], [max(e) for e in ends]
        scores.append(Curve(name, [one.value for one in mine], *bands))
    for one in ended:
        means = [fmean(row["train_loss"] for row in rows) for rows in zip(*one.histories, strict=False)]
        falls.append(Curve(one.label, range(1, len(means) + 1), means))
    best = (max if by == "test_accuracy" else min)(ended, key=lambda one: fmean(one.ends(by)))
    values, what = best.ends(by), by.replace("_", " ")
    spread = f", {min(values):.4g} to {max(values):.4g} over {len(values)} seeds" * (len(values) > 1)
    axes = Panel("after the last epoch", of, what, scores, "x" if of in ("rate", "batch") else "")
    says = f"The best mean {what} is {fmean(values):.4g}{spread}: {best.label}.{lost}"
    return Picture(f"Sweep of {of}", [axes, Panel("on the way", "epoch", "train loss", falls)], says)
