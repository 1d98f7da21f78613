"""What a fit leaves behind: its history, fingerprints and weights, in memory and in a run folder.

recipe.json          all that decides the result, with a hash of itself
events.jsonl         what happened: start, resume, steps (losses of shards, fingerprint after every step), epoch, end (log.py)
checkpoints/         what the run can be resumed from (checkpoint.py)
weights.safetensors  the final weights, by name
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from samestep.backends.base import Model
from samestep.errors import Invalid
from samestep.fingerprint import of_weights
from samestep.runs import checkpoint
from samestep.runs.checkpoint import Tensors
from samestep.runs.log import Event, events
from samestep.runs.recipe import read_recipe
from samestep.schedules.algebra import Schedule


@dataclass
class Run:
    """The result of a fit. `model` is the trained model; the one that was passed to `fit` is left as it was."""

    recipe: dict[str, Any]
    devices: list[str]
    history: list[dict[str, Any]] = field(default_factory=list)
    fingerprint: str = ""
    fingerprints: list[str] = field(default_factory=list, repr=False)  # after every step
    folder: Path | None = None
    schedule: Schedule | None = field(default=None, repr=False)  # that was applied, in steps, if it is one
    average: Tensors | None = field(default=None, repr=False)  # the averaged weights by name, if asked for
    average_metrics: dict[str, float | None] | None = None
    rank: int = 0  # of this process; all processes of a run end with the same result
    resumed: int | None = None  # the step that this fit went on from, if it did
    _tensors: Tensors = field(default_factory=dict, repr=False)
    _model: Callable[[], Any] | None = field(default=None, repr=False)
    _average_model: Callable[[], Any] | None = field(default=None, repr=False)

    def weights(self) -> Tensors:
        """The final weights by name, as NumPy."""
        return dict(self._tensors)

    @property
    def model(self) -> Model:
        """A model of the framework with the final weights."""
        return self._made(self._model, "weights()")

    @property
    def average_model(self) -> Model:
        """A model of the framework with the averaged weights."""
        if self.average is None:
            raise Invalid("this run has no average: pass average=samestep.swa(...) to the Trainer")
        return self._made(self._average_model, "average")

    def _made(self, model: Callable[[], Any] | None, weights: str) -> Any:
        if model is None:
            raise Invalid(f"a run that was loaded from its folder has no model: put its {weights} into one of yours")
        return model()

    def replay(self, events: Iterable[Event]) -> None:
        """Take in what a log tells."""
        for event in events:
            kind = event["event"]
            if kind in ("start", "resume"):
                self.devices = event["devices"]
            elif kind in ("steps", "lost"):
                self.fingerprints += event["fingerprint"]
            elif kind == "epoch":
                self.history.append({name: value for name, value in event.items() if name != "event"})
            elif kind == "end":
                self.fingerprint = event["fingerprint"]

    @staticmethod
    def load(folder: str | Path) -> Run:
        """Read a finished run back from its folder."""
        folder = Path(folder)
        recipe, log = read_folder(folder)
        run = Run(recipe, [], folder=folder)
        run.replay(log)
        if not run.fingerprint:
            raise Invalid(f"{folder} is not the folder of a finished run: events.jsonl does not come to an end")
        run._tensors, run.average = read_weights(folder, run.fingerprint, log[-1].get("average"))
        return run


def read_folder(folder: Path) -> tuple[dict[str, Any], list[Event]]:
    """The recipe and the log of a run."""
    readers: dict[str, Any] = {"recipe.json": read_recipe, "events.jsonl": lambda log: list(events(log))}
    try:
        for name, reader in readers.items():
            readers[name] = reader((folder / name).read_bytes())
    except OSError as error:
        raise Invalid(f"{folder} is not the folder of a run: {name} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise Invalid(f"{folder / name} is damaged: {error}") from error
    return readers["recipe.json"], readers["events.jsonl"]


def read_weights(folder: Path, fingerprint: str, average: str | None) -> tuple[Tensors, Tensors | None]:
    """The final weights of a run and the averaged ones, if there are any. They must have the fingerprints that its log told."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    found: list[Tensors | None] = []
    try:
        for name, told in (("weights.safetensors", fingerprint), ("average.safetensors", average)):
            path = folder / name
            found.append(load_file(path) if told or os.path.isfile(path) else None)
            if told and of_weights(found[-1] or {}) != told:
                raise ValueError("its weights do not have the run's fingerprint")
        return found[0] or {}, found[1]
    except (OSError, ValueError, SafetensorError) as error:
        raise Invalid(f"{path} is damaged: {error}") from error


def plain(tensors: Tensors) -> bytes:
    """Tensors as a plain safetensors file."""
    from safetensors.numpy import save

    # In the order of their dimensions: save writes memory as it lies, and that of channels-last weights lies otherwise.
    return save({name: np.asarray(tensor, order="C") for name, tensor in tensors.items()})


def export(source: Path, target: Path, best: bool = False, average: bool = False) -> int | None:
    """Write the weights of a run or of a checkpoint as a plain safetensors file; returns the step, or None for the end."""
    step = None
    final = source / ("average.safetensors" if average else "weights.safetensors")
    if os.path.exists(final) and not best:
        run = Run.load(source)  # which verifies them
        tensors = run.average or {} if average else run.weights()
    else:
        if os.path.isdir(source):
            files = checkpoint.paths(source)
            found = (
                checkpoint.best({file: checkpoint.metric(file) for file in files}) if best else max(files, default=None)
            )
            if not found:
                what = "checkpoint of the end of an epoch" if best else "weights and no checkpoint"
                raise Invalid(f"{source} has no {what}")
            source = found
        kept = checkpoint.read(source)
        step, tensors = kept.step, kept.group("average" if average else "model")
        if not tensors:
            raise Invalid(f"{source} has no averaged weights")
    try:
        checkpoint.write(target, [plain(tensors)])
    except OSError as error:
        raise Invalid(f"{target} cannot be written: {error.strerror or error}") from error
    return step
