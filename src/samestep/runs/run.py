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
    def model(self) -> Any:
        """A model of the framework with the final weights."""
        if self._model is None:
            raise Invalid("a run that was loaded from its folder has no model: put its weights() into one of yours")
        return self._model()

    @property
    def average_model(self) -> Any:
        """A model of the framework with the averaged weights."""
        if self._average_model is None and self.average is not None:
            raise Invalid("a run that was loaded from its folder has no model: put its average into one of yours")
        if self._average_model is None:
            raise Invalid("this run has no average: pass average=samestep.swa(...) to the Trainer")
        return self._average_model()

    def replay(self, events: Iterable[Event]) -> None:
        """Take in what a log tells."""
        for event in events:
            kind = event["event"]
            if kind in ("start", "resume"):
                self.devices = event["devices"]
            elif kind == "steps":
                self.fingerprints += event["fingerprint"]
            elif kind == "epoch":
                self.history.append({name: value for name, value in event.items() if name != "event"})
            elif kind == "end":
                self.fingerprint = event["fingerprint"]

    @staticmethod
    def load(folder: str | Path) -> Run:
        """Read a finished run back from its folder."""
        folder = Path(folder)
        for name in ("recipe.json", "events.jsonl", "weights.safetensors"):
            if not os.path.isfile(folder / name):
                raise Invalid(f"{folder} is not the folder of a finished run: {name} is missing")
        try:
            name = "recipe.json"
            recipe = read_recipe((folder / name).read_bytes())
            name = "events.jsonl"
            log = list(events((folder / name).read_bytes()))
        except ValueError as error:
            raise Invalid(f"{folder / name} is damaged: {error}") from error
        run = Run(recipe, [], folder=folder)
        run.replay(log)
        if not run.fingerprint:
            raise Invalid(f"{folder} is not the folder of a finished run: events.jsonl does not come to an end")
        run._tensors, run.average = read_weights(folder, run.fingerprint)
        return run


def read_weights(folder: Path, fingerprint: str) -> tuple[Tensors, Tensors | None]:
    """The final weights of a run, which must have its fingerprint, and the averaged ones if there are any."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = folder / "weights.safetensors"
    try:
        weights = load_file(path)
        if of_weights(weights) != fingerprint:
            raise ValueError("its weights do not have the run's fingerprint")
        path = folder / "average.safetensors"
        return weights, load_file(path) if os.path.isfile(path) else None
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
    if final.exists() and not best:
        run = Run.load(source)  # which verifies them
        tensors = run.average or {} if average else run.weights()
    else:
        if os.path.isdir(source):
            files = checkpoint.paths(source)
            found = max(files, default=None)
            if best:
                found = checkpoint.best({file: checkpoint.metric(file) for file in files})
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
