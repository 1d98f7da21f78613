"""What a fit leaves behind: its history, fingerprints and weights, in memory and in a run folder.

recipe.json          all that decides the result
events.jsonl         one JSON object a line: start, steps (loss of every shard, fingerprint after every step), epoch, end
weights.safetensors  the final weights, by name
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.algebra import Schedule
from samestep.errors import Invalid

Tensors = dict[str, NDArray[Any]]
Event = dict[str, Any]
FILES = ("recipe.json", "events.jsonl", "weights.safetensors")


def fingerprint(tensors: Tensors) -> str:
    """SHA-256 of weights: of every name, type, shape and byte, in the order of the names.

    >>> fingerprint({"w": np.zeros(2, "float32")})[:16]
    '7c5c9b93c3c05a6f'
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        digest.update(json.dumps([name, array.dtype.str, list(np.shape(tensors[name]))]).encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


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

    @staticmethod
    def load(folder: str | Path) -> Run:
        """Read a finished run back from its folder."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        folder = Path(folder)
        for name in FILES:
            if not os.path.isfile(folder / name):
                raise Invalid(f"{folder} is not the folder of a finished run: {name} is missing")
        try:
            name = "recipe.json"
            recipe = json.loads((folder / name).read_text())
            name = "events.jsonl"
            events = [json.loads(line) for line in (folder / name).read_text().splitlines()]
            name = "weights.safetensors"
            tensors = load_file(folder / name)
            name = "average.safetensors"
            average = load_file(folder / name) if os.path.isfile(folder / name) else None
        except (ValueError, SafetensorError) as error:
            raise Invalid(f"{folder / name} is damaged: {error}") from error
        run = Run(recipe, [], folder=folder, average=average, _tensors=tensors)
        for event in events:
            kind = event.pop("event")
            if kind == "start":
                run.devices = event["devices"]
            elif kind == "steps":
                run.fingerprints += event["fingerprint"]
            elif kind == "epoch":
                run.history.append(event)
            elif kind == "end":
                run.fingerprint = event["fingerprint"]
        if fingerprint(tensors) != run.fingerprint:
            raise Invalid(f"{folder / 'weights.safetensors'} is damaged: its weights do not have the run's fingerprint")
        return run


class RunFolder:
    """Writes a run folder while a fit goes on."""

    def __init__(self, path: str | os.PathLike[str], recipe: dict[str, Any]) -> None:
        self.path = Path(path)
        if os.path.exists(self.path / "recipe.json"):
            raise Invalid(f"run folder {self.path} already holds a run: choose another, or delete it")
        self._made: list[Path] = []
        self._begun = False
        try:
            for folder in [self.path, *self.path.parents]:
                if os.path.exists(folder):
                    break
                self._made.append(folder)
            self.path.mkdir(parents=True, exist_ok=True)
            _write(self.path / "recipe.json", json.dumps(recipe, indent=2).encode() + b"\n")
            self._events = open(self.path / "events.jsonl", "w")  # noqa: SIM115 - open for as long as the fit lasts
        except OSError as error:
            for name in ("recipe.json", "recipe.json.tmp"):  # no run was there before: these are ours
                with suppress(OSError):
                    (self.path / name).unlink()
            self._remove()
            reason = error.strerror or str(error)
            raise Invalid(
                f"run folder {self.path} cannot be written to: {reason}; pass another run_dir, or None"
            ) from error

    def __call__(self, event: Event) -> None:
        self._events.write(json.dumps(event) + "\n")
        if event["event"] != "start":
            self._begun = True
            self._events.flush()

    def weights(self, tensors: Tensors, name: str = "weights.safetensors") -> None:
        from safetensors.numpy import save

        _write(self.path / name, save(tensors))

    def close(self, failed: bool) -> None:
        """End the run folder. A fit that failed before anything was learned from it leaves nothing behind."""
        self._events.close()
        if failed and not self._begun:
            (self.path / "events.jsonl").unlink()
            (self.path / "recipe.json").unlink()
            self._remove()

    def _remove(self) -> None:
        for folder in self._made:
            with suppress(OSError):  # not made, or not empty
                folder.rmdir()


def _write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
