"""One fit: passes over the data, steps, evaluation, and telling listeners what happened. No framework is imported here."""

from __future__ import annotations

import fnmatch
import json
import math
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from signal import SIGTERM
from typing import TYPE_CHECKING, Any

import numpy as np

from samestep import draws, fingerprint
from samestep.backends.base import Backend
from samestep.backends.losses import MEAN
from samestep.backends.times import timed, timed_as
from samestep.data.examples import Data
from samestep.data.feed import Batch, Feed, Pass
from samestep.devices import Device
from samestep.errors import Invalid, NotFinite, ReplicasDiffer
from samestep.optimizers.averaging import Averager
from samestep.processes.world import World
from samestep.runs.checkpoint import Cadence, Checkpoint, Tensors, pack, unpack
from samestep.runs.folder import RunFolder
from samestep.runs.log import Event, events
from samestep.runs.run import Run
from samestep.schedules.rates import Rates, doubt
from samestep.shards import cut_pass, tree_total
from samestep.signals import Signals, heard
from samestep.training.measuring import checked, measured
from samestep.training.profile import Profile
from samestep.training.progress import show, stopped
from samestep.training.recipe import recipe
from samestep.training.rehearsal import Rehearsal
from samestep.training.replicas import Replicas
from samestep.training.start import put_into

if TYPE_CHECKING:
    from samestep.training.trainer import Trainer

LIVE = 0.5  # seconds between two looks at the device's numbers when somebody watches; each look waits for the device
FIRST = 8  # steps that are made at once before it is known how long one takes


def copied(tensors: Tensors) -> Tensors:
    return {name: np.array(tensor) for name, tensor in tensors.items()}


class Fit:
    """What one fit needs while it runs."""

    def __init__(
        self, settings: Trainer, backend: Backend, model: Any, data: Data, devices: list[Device], world: World,
        weights: Any = None,
    ) -> None:  # fmt: skip
        self.settings, self.backend, self.data, self.devices, self.world = settings, backend, data, devices, world
        for examples in (data.train, data.test):
            if examples:
                examples.check(settings.batch_size, settings.sampling)
        self.shape, self.measure = measured(settings, backend, model, data.train)
        if data.test:
            _, other = measured(settings, backend, model, data.test)  # an error comes now, and not after an epoch
            ways = [(m.kind, sorted(m.style) if isinstance(m.style, tuple) else m.style) for m in (other, self.measure)]
            if ways[0] != ways[1]:
                raise Invalid("test must have the structure of train: the model takes its examples in another way")
        labels, dtype = self.shape.labels, self.shape.dtype
        self.feed = Feed(backend, data.train, devices, labels, settings.seed, dtype)
        self.test = Feed(backend, data.test, devices, labels, dtype=dtype) if data.test else None
        try:
            self.prepare(model, weights)
        except BaseException:  # threads and workers may already read for the feeds
            self.close_feeds()
            raise

    def close_feeds(self) -> None:
        for feed in (self.feed, self.test):
            if feed:
                feed.close()

    def prepare(self, model: Any, weights: Any) -> None:
        """Make the replicas and all else that the loop needs."""
        settings, backend, data, devices, world = self.settings, self.backend, self.data, self.devices, self.world
        self.measure = checked(settings, backend, model, self.shape, self.measure, self.feed, devices[0])
        self.group = Replicas(settings, backend, model, self.measure, devices, world)
        if weights is not None:
            put_into(self.group.replicas, weights)  # before there are optimizers, which may copy them
        self.batches = cut_pass(len(data.train), settings.batch_size, settings.shards)
        first, steps = self.group.replicas[0], len(self.batches)
        for pattern in settings.state:
            if not fnmatch.filter(first.names.keys() - set(first.layouts[0].names), pattern):
                raise Invalid(f"state: nothing that is not trained is called {pattern!r}: Run.weights() has the names")
        scores = ["loss", *["accuracy"][: self.shape.classes is not None], *settings.metrics]
        columns = [f"{of}_{name}" for of in ("train", "test")[: 1 + bool(data.test)] for name in scores]
        if settings.monitor not in (None, *columns):
            raise Invalid(f"monitor: this fit has {', '.join(columns)}, got {settings.monitor!r}")
        self.rates = Rates(
            settings.schedule, self.group.updaters, steps, settings.max_epochs, self.shape, settings.monitor, settings.unit
        )  # fmt: skip
        if world.rank == 0 and (told := doubt(settings.schedule, steps, settings.max_epochs)):
            warnings.warn(told, stacklevel=4)
        self.averager = Averager(settings.average, first, steps, settings.max_epochs)
        about = recipe(self, model)
        names = [json.loads(text) for text in world.collect(json.dumps(list(map(str, devices))).encode())]
        self.result = Run(about, [name for mine in names for name in mine], rank=world.rank)
        self.result._maker = lambda tensors: backend.evaluating(first.model_of(tensors))
        self.step, self.warned = 0, False  # updates made; whether of a batch of weight zero
        self.best: tuple[int, list[Any]] | None = None  # after how many epochs, and the vectors
        self.paces = list[float]()  # seconds a step, at each look; the first has compiling in it
        self.next: Pass | None = None  # of the next epoch: its examples are read ahead, too
        self.last = steps * settings.max_epochs
        self.table: list[np.ndarray[Any, Any]] = []  # [losses | hits | more] of this epoch's steps, as far as fetched
        self.cadence = Cadence(settings.checkpoint_every, steps)
        self.rehearsal, self.profile = Rehearsal(self), Profile(self)
        self.folder: RunFolder | None = None
        self.start: Event = {
            "event": "start", "time": time.time(), "devices": self.result.devices, "processes": world.size,
            "epochs": settings.max_epochs, "steps_per_epoch": steps, "examples": len(data.train),
            "shards": settings.shards, "model": about["model"],
            "parameters": sum(math.prod(shape) for shape in about["parameters"].values()),
        }  # fmt: skip

    def run(self) -> Run:
        settings, first, failed = self.settings, self.world.rank == 0, True
        display = show(settings.progress) if first else None
        try:
            self.profile.begin()
            if first and settings.run_dir is not None:
                self.folder = RunFolder(
                    settings.run_dir, self.result.recipe, settings.resume, settings.keep_checkpoints, self.last, settings.accept
                )  # fmt: skip
            self.listeners = [listener for listener in (self.folder, display) if listener]
            with Signals(settings.run_dir is not None) as self.signals, heard():
                self.begin()
                for epoch in range(self.step // len(self.batches), settings.max_epochs):
                    if self.result.interrupted or self.stalled():
                        break
                    self.epoch(epoch)
                self.end()
            failed = False
            if self.signals.number == SIGTERM:  # after the last vote: the run is complete, but the signal still counts
                raise SystemExit(128 + SIGTERM)
        finally:
            self.close_feeds()
            for closing in (display, self.group, self.profile):
                if closing:
                    closing.close()
            self.group.replicas[0].release()  # the run keeps this replica, for its model
            if self.folder:
                self.folder.close(failed)
        return self.result

    def begin(self) -> None:
        """Start, or resume from a checkpoint, which rank 0 reads and sends to the others."""
        found = self.folder.checkpoint if self.folder else None
        log = self.folder.log if self.folder else b""
        if self.world.size > 1:
            self.result.recipe = json.loads(self.world.broadcast(json.dumps(self.result.recipe).encode()))
            log = self.world.broadcast(log)
            content = self.world.broadcast(b"".join(pack(found.about, found.tensors)) if found else b"")
            found = unpack(content, "the checkpoint of rank 0") if content else None
        if found:
            self.restore(found, list(events(log)))
            accepted = self.folder.accepted if self.folder else {}
            self.emit({**self.start, "event": "resume", "step": self.step, "accepted": accepted})
            if self.folder and (unknown := "; ".join(self.result.recipe["unchecked"])):
                warnings.warn(f"resumed without checking whether these have changed: {unknown}", stacklevel=4)
        else:
            self.group.follow()
            self.emit(self.start)

    def restore(self, found: Checkpoint, log: list[Event]) -> None:
        """Bring everything to the state that it had at this checkpoint."""
        for replica, updater in zip(self.group.replicas, self.group.updaters, strict=True):
            replica.load(found.group("model"))
            updater.load(found.group("optimizer"))
        self.averager.restore(found.about["average"], found.group("average"))
        devices = self.result.devices
        self.result.replay(log)
        self.result.devices, self.result.resumed, self.step = devices, found.step, found.step
        for row in self.result.history:
            self.rates.observe(row)
        if "log:numbers" in found.tensors:
            self.table.append(found.tensors["log:numbers"].reshape(-1, self.group.replicas[0].numbers))

    @timed_as("checkpoints")
    def save(self) -> None:
        """Write a checkpoint in another thread. This waits only for a copy of the tensors."""
        if not self.folder:
            return
        row = None if self.step % len(self.batches) else self.result.history[-1]
        about = {
            "step": self.step, "time": time.time(), "recipe": self.result.recipe, "history": list(self.result.history),
            "average": self.averager.total if self.settings.average else None,
            "metric": None if row is None else self.watched(row),
        }  # fmt: skip
        first = self.group.replicas[0]
        groups = {"model": first.tensors(), "optimizer": self.group.updaters[0].tensors()}
        groups["log"] = {"fingerprints": np.frombuffer(bytes.fromhex("".join(self.result.fingerprints)), ">u8")}
        if self.table:
            groups["log"]["numbers"] = np.concatenate(self.table)
        if self.averager.vectors:
            groups["average"] = first.tensors(self.averager.vectors)
        tensors = {f"{kind}:{name}": tensor for kind, named in groups.items() for name, tensor in named.items()}
        self.folder.save(about, tensors)

    def watched(self, row: dict[str, Any]) -> float:
        """What says which checkpoint is the best: the lower, the better."""
        name = self.settings.monitor or ("train_loss" if row["test_loss"] is None else "test_loss")
        value = math.inf if row[name] is None else row[name]
        return -value if self.settings.mode == "max" else value

    def stalled(self) -> bool:
        """Whether the last `patience` epochs have brought nothing better. It follows from the history alone."""
        values = [self.watched(row) for row in self.result.history]
        patience = self.settings.patience
        return patience is not None and bool(values) and len(values) - 1 - values.index(min(values)) >= patience

    def end(self) -> None:
        tensors = copied(self.group.replicas[0].tensors())
        if self.best:
            epochs, vectors = self.best
            self.result._best, self.best = (epochs, copied(self.group.replicas[0].tensors(vectors))), None
        if not all(np.isfinite(tensor).all() for tensor in tensors.values() if tensor.dtype.kind == "f"):
            raise NotFinite("the weights are not finite after the last step: lower the rate, or clip the gradient")
        self.result._tensors, self.result.fingerprint = tensors, fingerprint.of_weights(tensors)
        self.result.schedule = self.rates.applied()
        self.result.folder = Path(self.settings.run_dir) if self.settings.run_dir is not None else None
        if self.result.interrupted:
            return self.average(evaluate=False)
        if self.folder:
            if self.settings.checkpoint_every is not None:
                self.save()
                self.folder.writer.flush()  # a run killed with weights but no checkpoint could not be resumed
            self.folder.weights(tensors)
        self.average()
        average = fingerprint.of_weights(self.result.average) if self.result.average else None
        self.emit({"event": "end", "time": time.time(), "fingerprint": self.result.fingerprint, "average": average})
        self.world.collect(b"")  # all end together, when rank 0 has written everything

    def emit(self, event: Event) -> None:
        for listener in self.listeners:
            listener(event)

    def epoch(self, epoch: int) -> None:
        """Run an epoch, or the rest of it."""
        settings, began = self.settings, time.perf_counter()
        steps = len(self.batches)
        start = self.step - epoch * steps
        rates = self.rates.epoch(epoch)
        pass_, self.next, goes_on = self.next or self.passing(epoch, start), None, epoch + 1 < settings.max_epochs
        if not self.feed.resident and goes_on:
            self.next = pass_.then = self.passing(epoch + 1)
        keys = draws.keys_from(settings.seed, self.step, settings.shards)
        pending: list[tuple[Any, Any]] = []  # [losses | hits | more] and fingerprints of steps not yet fetched
        looked, i, from_ = time.perf_counter(), start, start
        while i < steps:
            self.profile.at(self.step)
            vote = self.world.vote(self.signals.number)
            self.averager.before(rates[i])
            first = Batch(pass_, self.batches[i], next(keys))
            self.rehearsal(self.step, first)  # it also says how far it is to its next check
            n = self.stretch(pass_, i)
            batches = [first, *(Batch(pass_, spans, next(keys)) for spans in self.batches[i + 1 : i + n])]
            pass_.prepare(self.group.spans_here(self.batches[i : i + n]) if self.feed.here else [])
            pending += self.group.steps(batches, rates[i : i + n], self.step)
            i, self.step = i + n, self.step + n
            self.averager.after(self.step)
            stop, last = self.world.agreed(vote), i == steps
            due = stop or (self.folder is not None and not last and self.cadence.due(self.step))
            if last and goes_on:  # while the device still computes
                self.next = self.next or self.passing(epoch + 1)
                self.rates.prepare(epoch + 1)
            if due or last or (self.listeners and time.perf_counter() - looked > LIVE):
                self.table.append(self.look(pending, epoch, from_, rates))
                now = time.perf_counter()
                self.paces.append((now - looked) / (i - from_))
                looked, from_, pending = now, i, []
            if due and not last:
                self.save()
                if stop:
                    return self.stop(stop)
        if len(set(self.group.fingerprints())) > 1:  # waits for every device
            what = f"after step {self.step} the replicas on {', '.join(self.result.devices)} are no longer equal"
            why = "something outside samestep wrote to one of them, or a device computes wrongly"
            raise ReplicasDiffer(f"{what}: {why}")
        table, self.table, shards = np.concatenate(self.table), [], settings.shards
        losses, hits, more = table[:, :shards], table[:, shards : 2 * shards], table[:, 2 * shards :]
        train = self.group.summary(
            math.fsum(tree_total([*losses.T])), None if self.shape.classes is None else float(hits.sum()),
            [math.fsum(column) for column in more.T], len(self.data.train),
        )  # fmt: skip
        row: dict[str, Any] = {
            "epoch": epoch + 1, "step": self.step, "lr": self.rates.shown(rates[-1]),
            **{f"train_{name}": value for name, value in train.items()}, **{f"test_{name}": None for name in train},
            "seconds": time.perf_counter() - began,
        }  # fmt: skip
        if self.test:
            row |= {f"test_{name}": value for name, value in self.group.evaluate(self.test, self.shape.classes).items()}
            if not math.isfinite(row["test_loss"]):
                what = f"the test loss is {row['test_loss']} after step {row['step']}"
                raise NotFinite(f"{what}: lower the rate, clip the gradient, or look at the test examples")
        self.rates.observe(row)
        self.result.history.append(row)
        if self.watched(row) < min(map(self.watched, self.result.history[:-1]), default=math.inf):
            self.best = None  # frees the one before it
            self.best = epoch + 1, self.group.replicas[0].copies()
        self.emit({"event": "epoch", **row})
        if stop or (self.cadence.due(self.step) and self.step < self.last):
            self.save()
        if stop == SIGTERM or (stop and self.step < self.last):
            self.stop(stop)

    def stretch(self, pass_: Pass, i: int) -> int:
        """How many steps, from step i of this epoch on, are made before anybody may stop them, look at them or check them."""
        if self.world.size > 1 or self.averager.wanted or self.signals.number:
            return 1
        most = FIRST if len(self.paces) < 2 else max(1, int(LIVE / 2 / self.paces[-1]))
        left = (part.left(self.step) for part in (self.cadence, self.rehearsal, self.profile))
        return min(most, len(self.batches) - i, self.group.most(pass_), *left)

    @timed_as("data")
    def passing(self, epoch: int, start: int = 0) -> Pass:
        """The examples of an epoch, from a step on."""
        order = draws.order(self.settings.seed, epoch, len(self.data.train), self.settings.sampling)
        joined = self.feed.joins
        asked = [] if self.feed.resident else self.group.spans_here(self.batches[start:], joined)
        return self.feed.start(order, asked, epoch, joined)

    def stop(self, number: int) -> None:
        """Stop because a signal asked for it, once the checkpoint has been written: SIGTERM ends the process."""
        if self.folder:
            self.folder.writer.flush()
        if self.world.rank == 0:
            print(stopped(self.step, self.last, self.folder.path if self.folder else None), file=sys.stderr)
        self.world.collect(b"")
        self.result.interrupted = True
        if number == SIGTERM:
            raise SystemExit(128 + SIGTERM)

    def look(
        self, pending: Sequence[tuple[Any, Any]], epoch: int, start: int, rates: list[float]
    ) -> np.ndarray[Any, Any]:
        """Fetch the numbers of some steps from the device, all at once: the one place where training waits."""
        with timed("looking"):
            numbers = self.backend.fetch([numbers for numbers, _ in pending])
            prints = self.backend.fetch([prints for _, prints in pending]).view(np.uint64)
            self.rehearsal.settle()
        table, shards = np.asarray(numbers, np.float64).reshape(len(prints), -1), self.settings.shards
        first, losses, more = epoch * len(self.batches) + start, table[:, :shards], table[:, 2 * shards :]
        wrong = np.argwhere(~np.isfinite(table))
        count = int(wrong[0][0]) if len(wrong) else len(table)  # the finite steps before: the log keeps them
        hexes = [f"{int(value):016x}" for value in prints[:count]]
        self.result.fingerprints += hexes
        if count:
            self.emit({
                "event": "steps", "epoch": epoch + 1, "first": first,
                "lr": [self.rates.shown(lr) for lr in rates[start : start + count]],
                "examples": [spans[-1][1] - spans[0][0] for spans in self.batches[start : start + count]],
                "loss": losses[:count].tolist(),
                "hits": None if self.shape.classes is None else table[:count, shards : 2 * shards].astype(int).tolist(),
                "fingerprint": hexes, **self.weights_of(more[:count]),
            })  # fmt: skip
        if len(wrong):
            step, place = wrong[0]
            if place >= 2 * shards:
                what = f"a metric or the weight of the loss is not finite at step {first + step}"
                raise NotFinite(f"{what}: look at the function that gives it")
            where = f"at step {first + step}, shard {place % shards}, with learning rate {rates[start + step]:g}"
            advice = "lower the rate, clip the gradient, or look at that shard's examples"
            raise NotFinite(f"the loss is {losses[step, place % shards]} {where}: {advice}")
        return table

    def weights_of(self, more: np.ndarray[Any, Any]) -> dict[str, Any]:
        """What the losses of some steps are divided by, if it is not the number of examples."""
        if self.measure.kind == MEAN:
            return {}
        weights = more[:, 0].tolist() if self.group.weighted else [1.0] * len(more)
        if 0 in weights and not self.warned:
            self.warned = True
            warnings.warn("a batch has weight 0: its step changes nothing; the log tells of each", stacklevel=5)
        return {"weight": weights}

    def average(self, evaluate: bool = True) -> None:
        """Add the averaged weights to the run; keep and evaluate them, if the run has come to its end."""
        first, vectors = self.group.replicas[0], self.averager.vectors
        if not vectors:
            return  # none was wanted, or every rate was zero
        self.result.average = copied(first.tensors(vectors))
        if self.folder and evaluate:
            self.folder.weights(self.result.average, "average.safetensors")
        if self.test and evaluate:
            group = Replicas(self.settings, self.backend, first.model(vectors), self.measure, self.devices, self.world)
            found = group.evaluate(self.test, self.shape.classes)
            group.close()
            self.result.average_metrics = {f"test_{name}": value for name, value in found.items()}
