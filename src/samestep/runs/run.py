"""What a fit leaves behind: its history, fingerprints and weights, in memory and in a run folder.

recipe.json          all that decides the result, with a hash of itself
events.jsonl         what happened: start, resume, steps (losses of shards, fingerprint after every step), epoch, end (log.py)
checkpoints/         what the run can be resumed from (checkpoint.py)
weights.safetensors  the final weights, by name
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from samestep.backends import find
from samestep.backends.base import Model
from samestep.devices import cpu
from samestep.errors import Invalid, WrongType
from samestep.fingerprint import of_weights
from samestep.runs import checkpoint
from samestep.runs.checkpoint import Checkpoint, Tensors
from samestep.runs.log import Event, events
from samestep.runs.recipe import read_recipe
from samestep.schedules.algebra import Schedule

State = Any  # weights, as a framework's own loader takes them


@dataclass(repr=False)
class Run:
    """The result of a fit. The model that was passed to `fit` is left as it was: `model` is the trained one.

    history          a row for each epoch: epoch, step, lr (of its last step), train_loss, train_accuracy, test_loss,
                     test_accuracy, seconds, and each metric as train_name and test_name
    fingerprint      a hash of the final weights; fingerprints: one for every step
    interrupted      whether it was stopped before its end: then this is the run so far
    resumed          the step that this fit resumed from; None: it began anew
    recipe           all that decides the result; devices: on which it ran; rank: of this process
    folder           where rank 0 keeps it; None: nowhere
    schedule         the rates that were applied, in steps, if they follow from a schedule
    average          the averaged weights by name, if asked for; average_metrics: their test scores

    >>> run = Run({"framework": "torch"}, ["cpu"], [{"epoch": 1, "test_loss": 0.25, "lr": 0.1}], "5542dae2c06d40b2", ["5542"])
    >>> run
    Run(1 epoch, 1 step on cpu, test_loss 0.25, fingerprint 5542dae2c06d40b2)
    """

    recipe: dict[str, Any]
    devices: list[str]
    history: list[dict[str, Any]] = field(default_factory=list)
    fingerprint: str = ""
    fingerprints: list[str] = field(default_factory=list)  # after every step
    folder: Path | None = None
    schedule: Schedule | None = None  # that was applied, in steps, if it is one
    average: Tensors | None = field(default=None, compare=False)  # the averaged weights by name, if asked for
    average_metrics: dict[str, float | None] | None = None
    rank: int = 0  # of this process; all processes of a run end with the same result
    resumed: int | None = None  # the step that this fit went on from, if it did
    interrupted: bool = False  # stopped before its end: this is the run so far
    _tensors: Tensors = field(default_factory=dict, compare=False)
    _best: tuple[int, Tensors] | None = field(default=None, compare=False)  # its number of epochs, and the weights
    _maker: Callable[[Tensors], Any] | None = field(default=None, compare=False)  # makes a model from weights by name
    _made: dict[str, Any] = field(default_factory=dict, compare=False)  # models, each made when it is first asked for

    def __repr__(self) -> str:
        """One line: how far it got, where, how well, and the beginning of its fingerprint."""
        row = self.history[-1] if self.history else {}
        kind = "train_" if row.get("test_loss") is None else "test_"
        scores = [f"{name} {value:.4g}" for name, value in row.items() if name.startswith(kind) and value is not None]
        where = ", ".join(f"{self.devices.count(name)} x {name}" for name in dict.fromkeys(self.devices))
        done = {"epoch": len(self.history), "step": len(self.fingerprints)}
        counts = ", ".join(f"{n} {name}{'s' * (n != 1)}" for name, n in done.items())
        told = [f"{counts} on {where.removeprefix('1 x ')}", *scores]
        told += ["interrupted"] * self.interrupted + [f"fingerprint {self.fingerprint[:16]}"]
        told += [str(self.folder)] * (self.folder is not None)
        return f"Run({', '.join(told)})"

    def weights(self) -> Tensors:
        """The final weights by name, as NumPy."""
        return dict(self._tensors)

    @property
    def model(self) -> Model:
        """The trained model, in evaluation mode: one object, however often it is asked for.

        A run that was loaded from its folder has none. There, `run.model(my_model)` gives a copy of yours with its weights.
        """
        return self._model("model", self._tensors)

    @property
    def average_model(self) -> Model:
        """The same with the averaged weights."""
        if self.average is None:
            how = "pass average=samestep.swa(...) to the Trainer, and ask the run itself, not run.best"
            raise Invalid(f"this run has no average: {how}")
        return self._model("average_model", self.average)

    def _model(self, name: str, tensors: Tensors) -> Any:
        if self._maker is None:
            return Loaded(name, tensors)
        if name not in self._made:
            self._made[name] = self._maker(tensors)
        return self._made[name]

    def state_dict(self) -> State:
        """The weights as the framework's own loader takes them.

        load_state_dict of PyTorch, set_state_dict of Paddle, set_weights of Keras, mxnet.nd.save and load_parameters of gluon,
        bind of flax.linen (its variables), nnx.update (an nnx.State). Of a loaded run: the framework's tensors by name.
        """
        backend = find.load(self.recipe["framework"])
        if self._maker is None:
            return {name: backend.put(np.array(array), cpu()) for name, array in self._tensors.items()}
        return backend.state_dict(self._maker(self._tensors))  # not of `model`, which may be trained further

    @property
    def best(self) -> Run:
        """The run as it was at the end of its best epoch: the one with the least test loss, or as `monitor` and `mode` say.

        It has a `model`, a `history` and `weights()`. Of a run that was loaded or resumed: the best checkpoint that was kept.
        """
        epochs, tensors = self._best or self._best_kept()
        prints = self.fingerprints[: self.history[epochs - 1]["step"]]
        return Run(self.recipe, self.devices, self.history[:epochs], of_weights(tensors), prints, self.folder, rank=self.rank,
                   _tensors=tensors, _maker=self._maker, _made=self._made.setdefault("best", {}))  # fmt: skip

    def _best_kept(self) -> tuple[int, Tensors]:
        files = checkpoint.paths(self.folder) if self.folder else []
        judged = [(value, file) for file in files if (value := checkpoint.metric(file)) is not None]
        for _, file in sorted(judged):
            with suppress(Invalid):  # it is damaged
                kept = checkpoint.read(file)
                return len(kept.about["history"]), kept.group("model")
        why = "no checkpoint of the end of an epoch was kept" if self.history else "none has ended yet"
        raise Invalid(f"this run has no best epoch: {why}")

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
        """Read a run back from its folder. One that was interrupted, or killed, is as it was at its last checkpoint."""
        folder = Path(folder)
        recipe, log = read_folder(folder)
        run = Run(recipe, [], folder=folder)
        run.replay(log)
        if run.fingerprint:
            run._tensors, run.average = read_weights(folder, run.fingerprint, log[-1].get("average"))
        else:
            found, path = last_checkpoint(folder), folder / "events.jsonl"
            if hashlib.sha256(path.read_bytes()[: found.about["events"]]).hexdigest() != found.about["events_sha256"]:
                raise Invalid(f"{path} is damaged: it ends before the checkpoint of step {found.step}")
            run._take(found)
        return run

    def _take(self, found: Checkpoint) -> None:
        """Go back to a checkpoint."""
        self.interrupted, self.history = True, found.about["history"]
        self.fingerprints = [f"{value:016x}" for value in found.tensors["log:fingerprints"]]
        self._tensors, self.average = found.group("model"), found.group("average") or None
        self.fingerprint = of_weights(self._tensors)


@dataclass(frozen=True, repr=False)
class Loaded:
    """What a run that was loaded has in the place of a model: a function that puts its weights into one."""

    name: str
    tensors: Tensors

    def __call__(self, model: Any) -> Any:
        """A copy of this model with the weights of the run, in evaluation mode."""
        from samestep.models import load

        backend = find.of_model(model)
        if backend.is_array(model):
            raise WrongType(
                f"a loaded run has no model yet: {self.name}(my_model) takes one of yours, got {type(model).__name__}"
            )
        return backend.evaluating(load(model, self.tensors))

    def __repr__(self) -> str:
        return f"<a loaded run has weights, but no model: {self.name}(my_model) puts them into a copy of yours>"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name if name.startswith("_") or name in ("name", "tensors") else repr(self))


def last_checkpoint(folder: Path) -> Checkpoint:
    """The newest checkpoint of a run folder that is whole."""
    for file in reversed(checkpoint.paths(folder)):
        with suppress(Invalid):
            return checkpoint.read(file)
    raise Invalid(
        f"{folder} holds a run that has not come to an end, and no checkpoint of it: there is nothing to load"
    )


def read_folder(folder: Path) -> tuple[dict[str, Any], list[Event]]:
    """The recipe and the log of a run."""
    readers: dict[str, Any] = {"recipe.json": read_recipe, "events.jsonl": lambda log: list(events(log))}
    try:
        for name, reader in readers.items():
            readers[name] = reader((folder / name).read_bytes())
    except OSError as error:
        raise Invalid(f"{folder} is not the folder of a run: {name} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise Invalid(f"{folder / name} is damaged: {error}") from None
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
        raise Invalid(f"{path} is damaged: {error}") from None


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
    except (OSError, ValueError) as error:  # a path without a name
        raise Invalid(f"{target} cannot be written: {getattr(error, 'strerror', None) or error}") from None
    return step
