"""What is trained: a script of the user's, or one of samestep's models on Fashion-MNIST, with a recipe of its own."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console

from samestep.backends import find
from samestep.errors import Invalid
from samestep.models import NAMES
from samestep.processes.launch import numbered
from samestep.processes.place import OVERRIDES

USUAL = "lenet_modern"
out = Console(highlight=False, soft_wrap=True)


def recipe(name: str, epochs: int, batch_size: int) -> tuple[Any, float]:
    """Schedule and momentum of a model, for so many epochs with batches of this size."""
    from samestep.schedules.kinds import constant, cosine

    if name != USUAL:
        return constant(0.2), 0.0
    # The rate follows the size of a batch (Goyal et al. 2017), up to where it was tried. A single epoch has no warm-up.
    peak, warm = min(batch_size / 2560, 0.2), min(epochs - 1, 1)
    return cosine(peak, epochs - warm).warmup(warm).in_epochs(smooth=True), 0.9


def check(script: Path | None, **of_built_in: Any) -> None:
    """Refuse a script that is not there, and what does not go with a script."""
    for name, value in of_built_in.items():
        if script is not None and value is not None:
            raise Invalid(f"--{name} goes with the built-in job; {script} has a model and an optimizer of its own")
    if script is not None and not os.path.isfile(script):
        raise Invalid(f"{script} is not a file")


def run_script(script: Path, arguments: list[str], given: dict[str, Any]) -> None:
    """Run a script as Python would, with these settings in place of those of its Trainer."""
    from samestep.training.trainer import Trainer

    os.environ[OVERRIDES], before = json.dumps(given), Trainer.made
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
    if given and Trainer.made == before and not numbered():  # the first process speaks for all
        sys.stderr.write(f"samestep: {script} has made no Trainer, so that the options had no effect\n")


def train(name: str, framework: str, momentum: float | None, given: dict[str, Any]) -> None:
    """Train a model with its recipe, except for what is given, and print the result."""
    from samestep.data.fashion import fashion_mnist
    from samestep.devices import resolve
    from samestep.optimizers.rules import sgd
    from samestep.training.progress import TITLE
    from samestep.training.trainer import Trainer

    if name not in NAMES:
        raise Invalid(f"unknown model {name!r}: choose one of {', '.join(NAMES)}")
    folder = f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    settings: dict[str, Any] = {"max_epochs": 10, "batch_size": 256, "run_dir": folder} | given
    schedule, usual = recipe(name, max(settings["max_epochs"], 1), max(settings["batch_size"], 1))
    momentum = usual if momentum is None else momentum
    trainer = Trainer(optimizer=sgd(momentum=momentum), **{"schedule": schedule, **settings})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No ccache found")  # Paddle's
        backend = find.load(framework)
    resolve(trainer.devices, trainer.shards, backend)  # before the data is fetched
    models = importlib.import_module(f"samestep.models.{framework}")
    book = ', as in "Dive into Deep Learning"' * (name == "lenet" and (trainer.schedule, momentum) == (schedule, usual))
    how = f"SGD{f' with momentum {momentum:g}' * bool(momentum)}, rate {trainer.schedule}"
    title = TITLE.set(f"{name} on Fashion-MNIST{book}: {how}")
    try:
        run = trainer.fit(getattr(models, name)(seed=trainer.seed), fashion_mnist())
    finally:
        TITLE.reset(title)
    if run.rank or run.interrupted:
        return  # the first process speaks for all; of an interrupted one the fit has said how to resume it
    last, seconds = run.history[-1], [row["seconds"] for row in run.history]
    speed = f"{sum(seconds) / len(seconds):.2f} s/epoch, on {', '.join(run.devices)}"
    out.print(f"test accuracy {last['test_accuracy']:.4f}, {speed}\nfingerprint {run.fingerprint}")
    if run.folder:
        out.print(f"run folder {run.folder}", markup=False)
