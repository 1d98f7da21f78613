"""A loop of one's own: a Group makes one step at a time, from whatever batch it is given, as a fit does."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from samestep import draws, fingerprint
from samestep.backends.losses import Measure, Shape
from samestep.data.examples import Data
from samestep.data.feed import Batch, Feed
from samestep.errors import Invalid, WrongType
from samestep.optimizers import rules
from samestep.processes import place
from samestep.processes.world import World
from samestep.runs import checkpoint
from samestep.runs.checkpoint import Checkpoint, Tensors
from samestep.schedules.kinds import constant
from samestep.schedules.rates import Rates, rate
from samestep.shards import cut_pass, tree_sum
from samestep.training.measuring import checked, measured
from samestep.training.replicas import Replicas
from samestep.training.trainer import Trainer, matching

SETTINGS = {"gradient_clip_val", "gradient_clip_algorithm", "groups", "metrics", "threads_per_shard", "capture",
            "deterministic", "state", "timeout", "portable", "batch_size"}  # fmt: skip # of a Trainer


class Group:
    """The replicas of a model on any number of devices, for a loop of your own: the bits that a fit makes of these batches.

    >>> import torch, samestep as ss
    >>> group = ss.Group(torch.nn.Linear(4, 3), optimizer=ss.adamw(), shards=2, devices=["cpu", "cpu"])
    >>> made = group.step(torch.ones(6, 4), torch.zeros(6, dtype=torch.int64), lr=0.01)
    >>> made.step, made.loss > 0
    (1, True)

    Every process of a run gives the whole batch, and computes its shards of it. Other settings of the Trainer: metrics,
    gradient_clip_val, gradient_clip_algorithm, groups, threads_per_shard, capture, deterministic, state, timeout, portable,
    and batch_size, of which only evaluations take note.
    """

    def __init__(
        self, model: Any, *, optimizer: Any = None, shards: int = 8, devices: Any = "auto", loss: Any = None, seed: int = 0,
        **settings: Any,
    ) -> None:  # fmt: skip
        if unknown := settings.keys() - SETTINGS:
            raise Invalid(f"Group has no {', '.join(sorted(unknown))}: it takes {', '.join(sorted(SETTINGS))}")
        optimizer = rules.sgd() if optimizer is None else optimizer
        given = {"optimizer": optimizer, "shards": shards, "devices": devices, "loss": loss, "seed": seed}
        self.settings = Trainer(1, **{"batch_size": 256, **given, **settings})
        self.steps = 0  # made so far
        self._given, self._start = model, Checkpoint({}, {})  # what it begins from, if it was loaded
        self._world: World | None = None
        self._replicas: Replicas | None = None

    def step(self, x: Any, y: Any = None, lr: Any = None) -> Made:
        """Make one update from a batch: x and y, or the whole batch as one dictionary.

        lr is the rate; None: 0.1, or the rate that a framework's own optimizer came with.
        """
        with self._at_work(x, y) as (replicas, feed):
            examples, shards = len(feed.examples), self.settings.shards
            given = None if lr is None else constant(rate("lr", lr))
            rates = Rates(given, replicas.updaters, 1, 1, self._shape)
            (spans,) = cut_pass(examples, examples, shards)
            keys = next(draws.keys_from(self.settings.seed, self.steps, shards))
            pass_ = feed.start(np.arange(examples), replicas.spans_here([spans]))
            pass_.prepare(replicas.spans_here([spans]))
            numbers = replicas.step(Batch(pass_, spans, keys), rates.epoch(0)[0], self.steps)
            self.steps += 1
            return Made(self.steps, examples, replicas, numbers, replicas.replicas[0].fingerprint(), self._shape)

    def evaluate(self, x: Any, y: Any = None) -> dict[str, float | None]:
        """Loss, accuracy and metrics of these examples, in evaluation mode."""
        with self._at_work(x, y) as (replicas, feed):
            return replicas.evaluate(feed, self._shape.classes)

    @property
    def model(self) -> Any:
        """A model of the framework with the weights of now."""
        return self._first("model").model()

    @property
    def rank(self) -> int:
        """Of this process among those of the run."""
        return place.find().rank if self._world is None else self._world.rank

    def weights(self) -> Tensors:
        """The weights of now by name, as NumPy."""
        return {name: np.array(tensor) for name, tensor in self._first("weights").tensors().items()}

    @property
    def fingerprint(self) -> str:
        """A hash of the weights of now."""
        return fingerprint.of_weights(self.weights())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write weights, the optimizer's state and the number of steps to a file. All processes call this; one writes."""
        first, replicas = self._first("save"), self._replicas
        assert replicas is not None
        groups = {"model": first.tensors(), "optimizer": replicas.updaters[0].tensors()}
        tensors = {
            f"{kind}:{name}": np.array(tensor) for kind, named in groups.items() for name, tensor in named.items()
        }
        about = {"step": self.steps, "seed": self.settings.seed, "shards": self.settings.shards, **self._optimizer()}
        if replicas.world.rank == 0:
            try:
                checkpoint.write(Path(path), checkpoint.pack(about, tensors))
            except OSError as error:
                raise Invalid(f"{path} cannot be written: {error.strerror or error}") from error
        replicas.world.collect(b"")

    @staticmethod
    def load(path: str | os.PathLike[str], model: Any, **settings: Any) -> Group:
        """The group that `save` wrote, around a model of the same kind; seed, shards and an optimizer of samestep's are known.

        All else is given again: loss, devices, which may be others, and an optimizer of the framework's.
        """
        found = checkpoint.read(Path(path))
        about = found.about
        if "recipe" in about:
            raise Invalid(f"{path} was written by a fit: start from it with Trainer.fit(model, data, weights=...)")
        kind, fields = about["optimizer"] or (None, {})
        known = {"seed": about["seed"], "shards": about["shards"]}
        known |= {"optimizer": getattr(rules, kind)(**fields)} if kind else {}
        group = Group(model, **{**known, **settings})
        for name, value in {"seed": group.settings.seed, "shards": group.settings.shards, **group._optimizer()}.items():
            if about[name] != value:
                raise Invalid(f"{path} was saved with {name}={about[name]}, and not with {value}")
        group.steps, group._start = found.step, found
        return group

    def _optimizer(self) -> dict[str, Any]:
        """samestep's own optimizer as its class and settings."""
        optimizer = self.settings.optimizer
        ours = type(optimizer).__module__ == rules.__name__
        return {"optimizer": [type(optimizer).__name__, dataclasses.asdict(optimizer)] if ours else None}

    def _first(self, what: str) -> Any:
        if self._replicas is None:
            raise Invalid(f"{what}: the group has not made a step yet, and has no replicas")
        return self._replicas.replicas[0]

    @contextmanager
    def _at_work(self, x: Any, y: Any) -> Iterator[tuple[Replicas, Feed]]:
        """The replicas, made from the first batch, and the way of this batch to their devices."""
        settings = self.settings
        if y is None and not isinstance(x, Mapping):
            raise WrongType(
                f"a Group needs x and y, or one dictionary with the labels in it, got {type(x).__name__} alone"
            )
        backend, data = matching(
            self._given, Data(x if y is None else (x, y)), optimizer=settings.optimizer, loss=settings.loss
        )
        with settings.session(backend, self._world, keep=True) as (devices, self._world):
            if self._replicas is None:
                self._shape, self._measure = measured(settings, backend, self._given, data.train)
            feed = Feed(backend, data.train, devices, self._shape.labels)
            try:
                if self._replicas is None:
                    self._replicas = self._made(feed, devices)
                yield self._replicas, feed
            finally:
                feed.close()

    _shape: Shape
    _measure: Measure

    def _made(self, feed: Feed, devices: Any) -> Replicas:
        assert self._world is not None
        settings, backend = self.settings, feed.backend
        self._measure = checked(settings, backend, self._given, self._shape, self._measure, feed, devices[0])
        replicas = Replicas(settings, backend, self._given, self._measure, devices, self._world)
        if self._start.tensors:
            theirs, ours = self._start.group("model"), replicas.replicas[0].tensors()
            for name in {**ours, **theirs}:
                shapes = [tensors[name].shape if name in tensors else None for tensors in (theirs, ours)]
                if shapes[0] != shapes[1]:
                    raise Invalid(
                        f"another model was saved: its {name!r} had shape {shapes[0]}, and has {shapes[1]} here"
                    )
            for replica, updater in zip(replicas.replicas, replicas.updaters, strict=True):
                replica.load(self._start.group("model"))
                updater.load(self._start.group("optimizer"))
        replicas.follow()
        weakref.finalize(self, backend.workers.let_go)
        return replicas


class Made:
    """What one step of a Group was: numbers are fetched from the device when they are first asked for."""

    def __init__(self, step: int, examples: int, replicas: Replicas, numbers: Any, print_: Any, shape: Shape) -> None:
        self.step = step  # how many have been made, with this one
        self._examples, self._replicas, self._shape = examples, replicas, shape
        self._numbers, self._print = numbers, print_
        self._found: dict[str, float | None] = {}

    def _all(self) -> dict[str, float | None]:
        if not self._found:
            replicas, shards = self._replicas, self._replicas.settings.shards
            table = np.asarray(replicas.backend.get(self._numbers), np.float64).tolist()
            hits = None if self._shape.classes is None else sum(table[shards : 2 * shards])
            self._found = replicas.summary(tree_sum(table[:shards]), hits, table[2 * shards :], self._examples)
        return self._found

    @property
    def loss(self) -> float:
        """Of the batch, before the update."""
        return float(self._all()["loss"] or 0.0)

    @property
    def accuracy(self) -> float | None:
        """The share of examples with the highest score at their label, if there is one score per class."""
        return self._all()["accuracy"]

    @property
    def metrics(self) -> dict[str, float | None]:
        """The metrics by name."""
        return {name: value for name, value in self._all().items() if name not in ("loss", "accuracy")}

    @property
    def fingerprint(self) -> str:
        """Of the weights and the state after the update, as a run has it for every step."""
        value = np.asarray(self._replicas.backend.fetch([self._print])).view(np.uint64)
        return f"{int(value[0]):016x}"

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={value:.4g}" for name, value in self._all().items() if value is not None)
        return f"Made(step={self.step}, {told})"
