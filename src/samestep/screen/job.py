"""The built-in job: one of samestep's models on Fashion-MNIST, with a recipe of its own."""

from __future__ import annotations

import importlib
import time
import warnings
from typing import Any

from rich.console import Console

from samestep.backends import find
from samestep.errors import Invalid
from samestep.models import NAMES

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
