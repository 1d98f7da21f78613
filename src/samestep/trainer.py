"""The loop: passes over the data, steps, evaluation, and telling listeners what happened. No framework is imported here."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from samestep import backends, draws
from samestep.backends import Backend, Shape
from samestep.data import Data, Feed
from samestep.devices import resolve
from samestep.errors import Invalid, NotFinite, ReplicasDiffer, WrongType
from samestep.optimizers import Optimizer, sgd
from samestep.progress import show
from samestep.run import Event, Run, RunFolder, fingerprint
from samestep.shards import cut_pass, tree_sum
from samestep.step import Group

LIVE = 0.5  # seconds between two looks at the device's numbers when somebody watches; each look waits for the device
OVERRIDES = (
    "SAMESTEP_OVERRIDES"  # a JSON object: what `samestep train SCRIPT --devices 4` changes in the script's Trainer
)


@dataclass(kw_only=True)
class Trainer:
    """Trains a model on any number of devices, with the same result to the last bit on any number of them.

    max_epochs         passes over the data
    batch_size         examples per update; the last batch of an epoch may be smaller, nothing is dropped
    shards             the pieces a batch is cut into: up to this many devices can share the work
    devices            "auto" (every GPU, else the CPU), a count, a name, or a list; a device may be named more than once
    optimizer          samestep.sgd(...)
    schedule           the learning rate: a number, or any function of t, the number of updates already made
    gradient_clip_val  the gradient is scaled down to this norm where it is longer; 0 for no clipping
    seed               decides the order of examples and all noise
    run_dir            the folder to write the run to; None writes nothing
    progress           show progress; None: if standard error is a terminal
    threads_per_shard  threads of arithmetic for each shard on the CPU
    loss               loss(output, y): one value per example, or their mean; None: softmax cross-entropy
    sampling           "without_replacement", or "with_replacement"
    capture            on GPUs, record the computation of a shard once and replay it: faster, same bits
    deterministic      False allows operations without a deterministic kernel, and gives up sameness
    num_gpus           the chapters' name for `devices`: so many GPUs (or replicas on the CPU, if there is none), 0 for the CPU
    """

    max_epochs: int = 10
    batch_size: int = 256
    shards: int = 8
    devices: Any = "auto"
    optimizer: Optimizer = field(default_factory=sgd)
    schedule: float | Callable[[int], float] = 0.1
    gradient_clip_val: float = 0.0
    seed: int = 0
    run_dir: str | os.PathLike[str] | None = None
    progress: bool | None = None
    threads_per_shard: int = 1
    loss: Callable[[Any, Any], Any] | None = None
    sampling: str = "without_replacement"
    capture: bool = True
    deterministic: bool = True
    num_gpus: int | None = None

    def __post_init__(self) -> None:
        names = {f.name for f in fields(self)}
        overrides = json.loads(os.environ.get(OVERRIDES, "{}"))
        for name, value in overrides.items():
            if name not in names:
                raise Invalid(f"{OVERRIDES}: Trainer has no {name!r}")
            setattr(self, name, value)
        if "devices" in overrides:
            self.num_gpus = None  # the script's other word for it
        if self.num_gpus is not None:
            self.num_gpus = whole("num_gpus", self.num_gpus, 0)
            self.devices = self.num_gpus or "cpu"
        for name in ("max_epochs", "batch_size", "shards", "threads_per_shard"):
            setattr(self, name, whole(name, getattr(self, name), 1))
        self.seed = whole("seed", self.seed, 0)
        if self.seed >= 1 << 64:
            raise Invalid(f"seed must be below 2**64, got seed={self.seed}")
        if not hasattr(self.optimizer, "update"):
            raise WrongType(f"optimizer must be an optimizer such as samestep.sgd(), got {self.optimizer!r}")
        if not callable(self.schedule):
            self.schedule = rate("schedule", self.schedule)
        self.gradient_clip_val = rate("gradient_clip_val", self.gradient_clip_val)
        if not isinstance(self.run_dir, (str, os.PathLike, type(None))):
            raise WrongType(f"run_dir must be a path or None, got run_dir={self.run_dir!r}")
        if self.loss is not None and not callable(self.loss):
            raise WrongType(f"loss must be a function of (output, y), got {self.loss!r}")
        if self.sampling not in draws.SAMPLINGS:
            raise Invalid(f"sampling must be one of {', '.join(draws.SAMPLINGS)}, got sampling={self.sampling!r}")

    def lr(self, t: int) -> float:
        """The learning rate of the update after t updates."""
        return rate(f"schedule({t})", self.schedule(t)) if callable(self.schedule) else float(self.schedule)

    def fit(self, model: Any, data: Any) -> Run:
        """Train a copy of the model and return the run; the model itself is left as it was."""
        backend, data = backends.of_model(model), as_data(data)
        devices = resolve(self.devices, self.shards, backend)
        with backend.session(devices, deterministic=self.deterministic, threads=self.threads_per_shard):
            return _Fit(self, backend, model, data, devices).run()

    def evaluate(self, model: Any, data: Any) -> dict[str, Any]:
        """Loss and accuracy of a model on the test examples (the training examples if there are no others)."""
        backend, data = backends.of_model(model), as_data(data)
        devices = resolve(self.devices, self.shards, backend)
        with backend.session(devices, deterministic=self.deterministic, threads=self.threads_per_shard):
            examples = data.test or data.train
            shape = probe(backend, self, model, examples)
            group = self._group(backend, model, devices)
            feed = _feed(backend, self, examples, devices, shape)
            try:
                loss, accuracy = self._evaluate(group, feed, shape)
            finally:
                feed.close()
        return {"loss": loss, "accuracy": accuracy, "examples": len(examples)}

    def prepare_batch(self, batch: Sequence[Any]) -> list[Any]:
        """The arrays of a batch on the first device of this trainer."""
        backend = backends.of_array(batch[0])
        device = resolve(self.devices, self.shards, backend)[0]
        return [backend.put(array, device) for array in batch]

    def prepare_model(self, model: Any) -> Any:
        """A copy of the model on the first device of this trainer."""
        backend = backends.of_model(model)
        device = resolve(self.devices, self.shards, backend)[0]
        return backend.replica(model, self.loss, device, self.shards).model()

    def _group(self, backend: Backend, model: Any, devices: Sequence[Any]) -> Group:
        replicas = [backend.replica(model, self.loss, device, self.shards, self.capture) for device in devices]
        return Group(backend, replicas, self.optimizer, self.shards, float(self.gradient_clip_val))

    def _evaluate(self, group: Group, feed: Feed, shape: Shape) -> tuple[float, float | None]:
        n = len(feed.examples)
        spans = [span for batch in cut_pass(n, self.batch_size, self.shards) for span in batch]
        keys = draws.evaluation_keys(self.seed, len(spans))
        table = group.evaluate(feed.start(np.arange(n), spans), spans, keys)
        accuracy = None if shape.classes is None else float(table[:, 1].sum()) / n
        return tree_sum(table[:, 0].tolist()) / n, accuracy


class _Fit:
    """One fit: what it needs while it lasts."""

    def __init__(self, trainer: Trainer, backend: Backend, model: Any, data: Data, devices: list[Any]) -> None:
        self.trainer, self.backend, self.data, self.devices = trainer, backend, data, devices
        self.shape = probe(backend, trainer, model, data.train)
        if data.test:
            probe(backend, trainer, model, data.test)  # what cannot be evaluated is found before an epoch is spent
        self.feed = _feed(backend, trainer, data.train, devices, self.shape)
        self.test = _feed(backend, trainer, data.test, devices, self.shape) if data.test else None
        self.group = trainer._group(backend, model, devices)
        self.batches = cut_pass(len(data.train), trainer.batch_size, trainer.shards)
        first = self.group.replicas[0]
        about = recipe(trainer, backend, model, data, self.shape, first.tensors(), devices[0].kind)
        self.result = Run(about, list(map(str, devices)), _model=first.model)
        self.start: Event = {
            "event": "start", "time": time.time(), "devices": self.result.devices, "epochs": trainer.max_epochs,
            "steps_per_epoch": len(self.batches), "examples": len(data.train), "shards": trainer.shards,
            "model": about["model"], "parameters": sum(math.prod(shape) for shape in about["parameters"].values()),
        }  # fmt: skip

    def run(self) -> Run:
        folder = RunFolder(self.trainer.run_dir, self.result.recipe) if self.trainer.run_dir is not None else None
        display = show(self.trainer.progress)
        self.listeners = [listener for listener in (folder, display) if listener]
        failed = True
        try:
            self.emit(self.start)
            for epoch in range(self.trainer.max_epochs):
                self.epoch(epoch)
            tensors = self.result._tensors = self.group.replicas[0].tensors()
            if not all(np.isfinite(tensor).all() for tensor in tensors.values() if tensor.dtype.kind == "f"):
                raise NotFinite("the weights are not finite after the last step: lower the rate, or clip the gradient")
            self.result.fingerprint = fingerprint(tensors)
            if folder:
                folder.weights(tensors)
                self.result.folder = folder.path
            self.emit({"event": "end", "time": time.time(), "fingerprint": self.result.fingerprint})
            failed = False
        finally:
            for closing in (self.feed, self.test, display):
                if closing:
                    closing.close()
            if folder:
                folder.close(failed)
        return self.result

    def emit(self, event: Event) -> None:
        for listener in self.listeners:
            listener(event)

    def epoch(self, epoch: int) -> None:
        trainer, began = self.trainer, time.perf_counter()
        first = epoch * len(self.batches)
        rates = [self.rounded(trainer.lr(first + i)) for i in range(len(self.batches))]
        order = draws.order(trainer.seed, epoch, len(self.data.train), trainer.sampling)
        pass_ = self.feed.start(order, [span for batch in self.batches for span in batch])
        pending: list[tuple[Any, Any]] = []  # [losses | hits] and fingerprint of steps not yet looked at, on the device
        table: list[np.ndarray[Any, Any]] = []
        looked = time.perf_counter()
        for i, spans in enumerate(self.batches):
            keys = draws.keys(trainer.seed, first + i, trainer.shards)
            numbers = self.group.step(pass_, spans, keys, rates[i])
            pending.append((numbers, self.group.replicas[0].fingerprint()))
            if i + 1 == len(self.batches) or (self.listeners and time.perf_counter() - looked > LIVE):
                table.append(self.look(pending, epoch, i + 1 - len(pending), rates))
                pending, looked = [], time.perf_counter()
        self.compare_replicas(first + len(self.batches))  # waits for every device
        seconds = time.perf_counter() - began
        steps = np.concatenate(table)
        n = len(self.data.train)
        row: dict[str, Any] = {
            "epoch": epoch + 1, "step": first + len(self.batches), "lr": rates[-1],
            "train_loss": math.fsum(tree_sum(losses.tolist()) for losses in steps[:, 0]) / n,
            "train_accuracy": None if self.shape.classes is None else float(steps[:, 1].sum()) / n,
            "test_loss": None, "test_accuracy": None, "seconds": seconds,
        }  # fmt: skip
        if self.test:
            row["test_loss"], row["test_accuracy"] = trainer._evaluate(self.group, self.test, self.shape)
            if not math.isfinite(row["test_loss"]):
                raise NotFinite(
                    f"the test loss is {row['test_loss']} after step {row['step']}: lower the rate, clip the gradient, "
                    "or look at the test examples"
                )
        self.result.history.append(row)
        self.emit({"event": "epoch", **row})

    def look(self, pending: list[tuple[Any, Any]], epoch: int, start: int, rates: list[float]) -> np.ndarray[Any, Any]:
        """Fetch the numbers of some steps from the device, all at once: the one place where training waits."""
        backend, shards = self.backend, self.trainer.shards
        numbers = backend.get(backend.concat([numbers for numbers, _ in pending]))
        prints = backend.get(backend.concat([print_ for _, print_ in pending]))
        table = np.asarray(numbers, np.float64).reshape(-1, 2, shards)
        first = epoch * len(self.batches) + start
        if not np.isfinite(table).all():
            step, _, shard = np.argwhere(~np.isfinite(table))[0]
            raise NotFinite(
                f"the loss is {table[step, 0, shard]} at step {first + step}, shard {shard}, with learning rate "
                f"{rates[start + step]:g}: lower the rate, clip the gradient, or look at that shard's examples"
            )
        hexes = [f"{int(value) & (1 << 64) - 1:016x}" for value in prints]
        self.result.fingerprints += hexes
        batches = self.batches[start : start + len(pending)]
        self.emit({
            "event": "steps", "epoch": epoch + 1, "first": first, "lr": rates[start : start + len(pending)],
            "examples": [spans[-1][1] - spans[0][0] for spans in batches], "loss": table[:, 0].tolist(),
            "hits": None if self.shape.classes is None else table[:, 1].astype(int).tolist(), "fingerprint": hexes,
        })  # fmt: skip
        return table

    def rounded(self, lr: float) -> float:
        """The rate as the weights' type has it: rounded once."""
        with np.errstate(over="ignore"):
            rounded = float(np.dtype(self.shape.dtype).type(lr))
        if not math.isfinite(rounded):
            raise Invalid(f"a learning rate of {lr:g} is too large for {self.shape.dtype}")
        return rounded

    def compare_replicas(self, step: int) -> None:
        prints = [int(self.backend.get(value)[0]) for value in self.group.fingerprints()]
        if len(set(prints)) > 1:
            raise ReplicasDiffer(
                f"after step {step} the replicas on {', '.join(self.result.devices)} are no longer equal: something outside "
                "samestep wrote to one of them, or a device computes wrongly"
            )


def as_data(data: Any) -> Data:
    return data if isinstance(data, Data) else Data(train=data)


def probe(backend: Backend, trainer: Trainer, model: Any, examples: Any) -> Shape:
    x, y = examples.read(np.arange(1))
    return backend.probe(model, trainer.loss, x, y, f"{examples.name} x")


def _feed(backend: Backend, trainer: Trainer, examples: Any, devices: Sequence[Any], shape: Shape) -> Feed:
    return Feed(backend, examples, devices, shape.classes if trainer.loss is None else None)


def recipe(
    trainer: Trainer, backend: Backend, model: Any, data: Data, shape: Shape, tensors: Any, kind: str
) -> dict[str, Any]:
    """All that decides the result of a fit. The devices are not in it: only their kind is."""
    from samestep import __version__

    return {
        "samestep": __version__, "framework": backend.name, "version": backends.installed(backend.name), "device": kind,
        "model": backend.describe(model), "parameters": {name: list(t.shape) for name, t in tensors.items()},
        "initial": fingerprint(tensors), "precision": shape.dtype,
        "train": data.train.identity(), "test": data.test.identity() if data.test else None,
        **{name: getattr(trainer, name) for name in ("max_epochs", "batch_size", "shards", "seed", "sampling",
           "gradient_clip_val", "threads_per_shard", "deterministic")},
        "optimizer": repr(trainer.optimizer), "schedule": named(trainer.schedule), "loss": named(trainer.loss),
    }  # fmt: skip


def named(thing: Any) -> str:
    """A name that is the same in every process: a function's own, for anything else its repr."""
    return getattr(thing, "__qualname__", None) or repr(thing)


def whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise WrongType(f"{name} must be a whole number, got {name}={value!r}")
    if value < least:
        raise Invalid(f"{name} must be at least {least}, got {name}={value}")
    return int(value)


def rate(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise WrongType(f"{name} must be a number, got {value!r}")
    if not (math.isfinite(value) and value >= 0):
        raise Invalid(f"{name} must be finite and at least 0, got {value}")
    return float(value)
