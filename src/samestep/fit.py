"""One fit: passes over the data, steps, evaluation, and telling listeners what happened. No framework is imported here."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from samestep import backends, draws
from samestep.averaging import Averager
from samestep.backends import Backend, Shape
from samestep.data import Data, Feed
from samestep.devices import Device
from samestep.errors import NotFinite, ReplicasDiffer
from samestep.progress import show
from samestep.rates import Rates
from samestep.run import Event, Run, RunFolder, fingerprint
from samestep.shards import cut_pass, tree_sum
from samestep.step import Group

if TYPE_CHECKING:
    from samestep.trainer import Trainer

LIVE = 0.5  # seconds between two looks at the device's numbers when somebody watches; each look waits for the device


class Fit:
    """One fit: what it needs while it lasts."""

    def __init__(self, trainer: Trainer, backend: Backend, model: Any, data: Data, devices: list[Device]) -> None:
        self.trainer, self.backend, self.data, self.devices = trainer, backend, data, devices
        self.shape = probe(backend, trainer, model, data.train)
        if data.test:
            probe(backend, trainer, model, data.test)  # what cannot be evaluated is found before an epoch is spent
        self.group = trainer._group(backend, model, devices)
        self.batches = cut_pass(len(data.train), trainer.batch_size, trainer.shards)
        first, steps = self.group.replicas[0], len(self.batches)
        updater = self.group.updaters[0]
        self.rates = Rates(trainer.schedule, backend, updater, steps, trainer.max_epochs, self.shape)
        self.averager = Averager(trainer.average, first, steps, trainer.max_epochs) if trainer.average else None
        self.feed = feed_of(backend, trainer, data.train, devices, self.shape)
        self.test = feed_of(backend, trainer, data.test, devices, self.shape) if data.test else None
        about = recipe(trainer, backend, model, data, self.shape, first.tensors(), devices[0].kind)
        about |= {"optimizer": repr(updater), "schedule": repr(self.rates)}
        self.result = Run(about, list(map(str, devices)))
        self.result._model = first.model
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
            self.result.schedule = self.rates.applied()
            if folder:
                folder.weights(tensors)
                self.result.folder = folder.path
            if self.averager:
                self.average(folder)
            self.emit({"event": "end", "time": time.time(), "fingerprint": self.result.fingerprint})
            failed = False
        finally:
            for closing in (self.feed, self.test, display):
                if closing:
                    closing.close()
            self.group.replicas[0].release()  # the run keeps it, for its model
            if folder:
                folder.close(failed)
        return self.result

    def emit(self, event: Event) -> None:
        for listener in self.listeners:
            listener(event)

    def epoch(self, epoch: int) -> None:
        trainer, began = self.trainer, time.perf_counter()
        first = epoch * len(self.batches)
        rates = self.rates.epoch(epoch)
        order = draws.order(trainer.seed, epoch, len(self.data.train), trainer.sampling)
        pass_ = self.feed.start(order, [span for batch in self.batches for span in batch])
        pending: list[tuple[Any, Any]] = []  # [losses | hits] and fingerprint of steps not yet looked at, on the device
        table: list[np.ndarray[Any, Any]] = []
        looked = time.perf_counter()
        for i, spans in enumerate(self.batches):
            keys = draws.keys(trainer.seed, first + i, trainer.shards)
            if self.averager:
                self.averager.before(first + i, rates[i])
            numbers = self.group.step(pass_, spans, keys, rates[i], first + i)
            if self.averager:
                self.averager.after(first + i + 1)
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
            row["test_loss"], row["test_accuracy"] = evaluate(trainer, self.group, self.test, self.shape)
            if not math.isfinite(row["test_loss"]):
                raise NotFinite(
                    f"the test loss is {row['test_loss']} after step {row['step']}: lower the rate, clip the gradient, "
                    "or look at the test examples"
                )
        self.rates.observe(row)
        self.result.history.append(row)
        self.emit({"event": "epoch", **row})

    def look(self, pending: list[tuple[Any, Any]], epoch: int, start: int, rates: list[float]) -> np.ndarray[Any, Any]:
        """Fetch the numbers of some steps from the device, all at once: the one place where training waits."""
        backend, shards = self.backend, self.trainer.shards
        numbers = backend.get(backend.concat([numbers for numbers, _ in pending]))
        prints = backend.get(backend.concat([print_ for _, print_ in pending])).view(np.uint64)
        table = np.asarray(numbers, np.float64).reshape(-1, 2, shards)
        first = epoch * len(self.batches) + start
        if not np.isfinite(table).all():
            step, _, shard = np.argwhere(~np.isfinite(table))[0]
            raise NotFinite(
                f"the loss is {table[step, 0, shard]} at step {first + step}, shard {shard}, with learning rate "
                f"{rates[start + step]:g}: lower the rate, clip the gradient, or look at that shard's examples"
            )
        hexes = [f"{int(value):016x}" for value in prints]
        self.result.fingerprints += hexes
        batches = self.batches[start : start + len(pending)]
        self.emit({
            "event": "steps", "epoch": epoch + 1, "first": first, "lr": rates[start : start + len(pending)],
            "examples": [spans[-1][1] - spans[0][0] for spans in batches], "loss": table[:, 0].tolist(),
            "hits": None if self.shape.classes is None else table[:, 1].astype(int).tolist(), "fingerprint": hexes,
        })  # fmt: skip
        return table

    def average(self, folder: RunFolder | None) -> None:
        """Take the averaged weights into the run, and evaluate them."""
        assert self.averager is not None
        trainer, first, vectors = self.trainer, self.group.replicas[0], self.averager.vectors
        if not vectors:
            return  # every rate was zero
        self.result.average = first.tensors(vectors)
        self.result._average_model = lambda: first.model(vectors)
        if folder:
            folder.weights(self.result.average, "average.safetensors")
        if self.test:
            group = trainer._group(self.backend, first.model(vectors), self.devices)
            loss, accuracy = evaluate(trainer, group, self.test, self.shape)
            self.result.average_metrics = {"test_loss": loss, "test_accuracy": accuracy}

    def compare_replicas(self, step: int) -> None:
        prints = [int(self.backend.get(value).view(np.uint64)[0]) for value in self.group.fingerprints()]
        if len(set(prints)) > 1:
            raise ReplicasDiffer(
                f"after step {step} the replicas on {', '.join(self.result.devices)} are no longer equal: something outside "
                "samestep wrote to one of them, or a device computes wrongly"
            )


def evaluate(trainer: Trainer, group: Group, feed: Feed, shape: Shape) -> tuple[float, float | None]:
    """Mean loss and accuracy over all examples of a feed, each taken once."""
    n = len(feed.examples)
    spans = [span for batch in cut_pass(n, trainer.batch_size, trainer.shards) for span in batch]
    keys = draws.evaluation_keys(trainer.seed, len(spans))
    table = group.evaluate(feed.start(np.arange(n), spans), spans, keys)
    accuracy = None if shape.classes is None else float(table[:, 1].sum()) / n
    return tree_sum(table[:, 0].tolist()) / n, accuracy


def probe(backend: Backend, trainer: Trainer, model: Any, examples: Any) -> Shape:
    x, y = examples.read(np.arange(1))
    return backend.probe(model, trainer.loss, x, y, f"{examples.name} x")


def feed_of(backend: Backend, trainer: Trainer, examples: Any, devices: Sequence[Any], shape: Shape) -> Feed:
    return Feed(backend, examples, devices, shape.classes if trainer.loss is None else None)


def recipe(
    trainer: Trainer, backend: Backend, model: Any, data: Data, shape: Shape, tensors: Any, kind: str
) -> dict[str, Any]:
    """All that decides the result of a fit, but for optimizer and schedule. Of the devices, only the kind is in it."""
    from samestep import __version__

    return {
        "samestep": __version__, "framework": backend.name, "version": backends.installed(backend.name), "device": kind,
        "model": backend.describe(model), "parameters": {name: list(t.shape) for name, t in tensors.items()},
        "initial": fingerprint(tensors), "precision": shape.dtype,
        "train": data.train.identity(), "test": data.test.identity() if data.test else None,
        **{name: getattr(trainer, name) for name in ("max_epochs", "batch_size", "shards", "seed", "sampling",
           "gradient_clip_val", "threads_per_shard", "deterministic")},
        "average": repr(trainer.average), "loss": getattr(trainer.loss, "__qualname__", None) or repr(trainer.loss),
    }  # fmt: skip
