"""A loop of one's own: a Group makes one step at a time, from whatever batch it is given, as a fit does."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from samestep import draws, fingerprint
from samestep.backends.base import Model, Replica
from samestep.backends.find import of_model
from samestep.backends.losses import MEAN, Measure, PerShard, Shape
from samestep.checks import show
from samestep.data.convert import named
from samestep.data.examples import Data
from samestep.data.feed import Batch, Feed
from samestep.devices import Devices, resolve
from samestep.errors import Invalid, WrongType
from samestep.optimizers import rules
from samestep.optimizers.rules import FrameworkOptimizer
from samestep.processes import place
from samestep.processes.world import World
from samestep.runs import checkpoint
from samestep.runs.checkpoint import Checkpoint, Tensors
from samestep.schedules.algebra import Schedule
from samestep.schedules.kinds import constant
from samestep.schedules.plateau import Plateau
from samestep.schedules.rates import Rates, as_written, counts, rate
from samestep.schedules.text import from_json
from samestep.shards import cut_pass, tree_sum
from samestep.training.measuring import checked, measured
from samestep.training.recipe import agreed
from samestep.training.replicas import Replicas
from samestep.training.trainer import Trainer, matching
from samestep.trees import Tree

SETTINGS = {"gradient_clip_val", "gradient_clip_algorithm", "groups", "metrics", "threads_per_shard", "capture",
            "deterministic", "state", "timeout", "portable", "batch_size", "precision", "memory_format", "compile",
            "streams"}  # fmt: skip # of a Trainer
FUNCTION = "function"  # stands in a file for a rate that cannot be stored
Setting = Any  # of one of these
ALIKE = SETTINGS - {"timeout", "capture", "streams"} | {"seed", "shards"}  # in all processes


class Group:
    """The replicas of a model on any number of devices, for a loop of your own: the bits that a fit makes of these batches.

    >>> import torch, samestep as ss
    >>> group = ss.Group(torch.nn.Linear(4, 3), optimizer=ss.adamw(), shards=2, devices=["cpu", "cpu"])
    >>> made = group.step(torch.ones(6, 4), torch.zeros(6, dtype=torch.int64), lr=0.01)
    >>> made.step, made.loss > 0
    (1, True)

    Every process of a run gives the whole batch, and computes its shards of it. A group does not rehearse, and goes on after
    a loss that is not finite. Other settings of the Trainer: metrics, gradient_clip_val, gradient_clip_algorithm, groups,
    threads_per_shard, capture, deterministic, state, timeout, portable, precision, memory_format, compile, streams, and
    batch_size, of which only evaluations take note.
    """

    def __init__(
        self, model: Model, *, optimizer: rules.Optimizer | FrameworkOptimizer | Callable[..., FrameworkOptimizer] = None,
        shards: int = 8, devices: Devices = "auto", loss: Callable[[Any, Any], Any] | PerShard | None = None, seed: int = 0,
        **settings: Setting,
    ) -> None:  # fmt: skip
        if unknown := settings.keys() - SETTINGS:
            raise Invalid(f"Group has no {', '.join(sorted(unknown))}: it takes {', '.join(sorted(SETTINGS))}")
        optimizer = rules.sgd() if optimizer is None else optimizer
        given = {"optimizer": optimizer, "shards": shards, "devices": devices, "loss": loss, "seed": seed}
        self.settings = Trainer(1, **{"batch_size": 256, **given, **settings})
        self._rate: Any = self.settings.schedule
        in_epochs = isinstance(self._rate, Schedule) and self._rate.unit == "epochs"
        if in_epochs or isinstance(self._rate, Plateau) or counts(self._rate):
            how = "give a schedule in steps, such as .in_epochs(steps_per_epoch), or lr to every step"
            raise Invalid(f"a Group has no epochs and no schedulers, got the rate {show(self._rate)}: {how}")
        self.steps = 0  # made so far
        self._by_hand: float | None = None
        self._changes: list[tuple[int, float | None]] = []  # a step, and the rate from there on
        self._given, self._start = model, Checkpoint({}, {})  # what it begins from, if it was loaded
        self._world: World | None = None
        self._replicas: Replicas | None = None
        self._kinds: list[str] = []  # of batches: names, types and shapes of their arrays

    def step(self, x: Tree, y: Tree | None = None, lr: float | None = None) -> Made:
        """Make one update from a batch: x and y, or the whole batch as one dictionary.

        lr is the rate of this step alone; None: `group.lr`.
        """
        lr = self._next() if lr is None else rate("lr", lr)
        given = None if lr is None else constant(lr)
        with self._at_work(x, y, f"step {self.steps}", repr(given)) as (replicas, feed):
            examples, shards = len(feed.examples), self.settings.shards
            rates = Rates(given, replicas.updaters, 1, 1, self._shape)
            (spans,) = cut_pass(examples, examples, shards)
            keys = next(draws.keys_from(self.settings.seed, self.steps, shards))
            pass_ = feed.start(np.arange(examples), replicas.spans_here([spans]))
            pass_.prepare(replicas.spans_here([spans]))
            numbers = replicas.step(Batch(pass_, spans, keys), rates.epoch(0)[0], self.steps)
            shown = rates.shown(rates.epoch(0)[0]) if lr is None else lr
            if not self._changes or self._changes[-1][1] != shown:
                self._changes.append((self.steps, shown))
            self.steps += 1
            return Made(self.steps, examples, replicas, numbers, replicas.replicas[0].fingerprint(), self._shape)

    def evaluate(self, x: Tree, y: Tree | None = None) -> dict[str, float | None]:
        """Loss, accuracy and metrics of these examples, in evaluation mode."""
        with self._at_work(x, y, "evaluation") as (replicas, feed):
            return replicas.evaluate(feed, self._shape.classes)

    @property
    def lr(self) -> float | None:
        """The rate of the next step: set by hand, or that of the optimizer; None if only the optimizer knows it.

        A rate that is set holds until another is; None gives the choice back to the optimizer.
        """
        if (lr := self._next()) is not None:
            return lr
        optimizer, updater = self.settings.optimizer, self._replicas and self._replicas.updaters[0]
        if isinstance(optimizer, rules.Optimizer):
            return optimizer.default_lr
        own = updater or of_model(self._given).updater(optimizer, self._first(), 0.0)
        lr = None if own.fixed else own.rate()
        return None if lr is None else as_written(lr, own.replica.layouts[0].dtype)

    @lr.setter
    def lr(self, lr: float | None) -> None:
        self._by_hand = None if lr is None else rate("lr", lr)

    def _next(self) -> float | None:
        """The rate of the next step, as far as it was given to this group."""
        if self._by_hand is not None or not self._rate:
            return self._by_hand
        return rate("lr", self._rate(self.steps))

    @property
    def rates(self) -> list[float | None]:
        """The rates of all steps made so far; None for one of which only the optimizer knew it."""
        return [lr for (at, lr), (end, _) in pairwise([*self._changes, (self.steps, None)]) for _ in range(at, end)]

    @property
    def model(self) -> Model:
        """A model of the framework with the weights of now, in evaluation mode."""
        first = self._first()
        return first.backend.evaluating(first.model())

    @property
    def rank(self) -> int:
        """Of this process among those of the run."""
        return place.find().rank if self._world is None else self._world.rank

    def weights(self) -> Tensors:
        """The weights of now by name, as NumPy."""
        return {name: np.array(tensor) for name, tensor in self._first().tensors().items()}

    @property
    def fingerprint(self) -> str:
        """A hash of the weights of now."""
        return fingerprint.of_weights(self.weights())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write weights, the optimizer's state and the number of steps to a file. All processes call this; one writes."""
        replicas, tensors = self._replicas, self._start.tensors
        if replicas:
            groups = {"model": replicas.replicas[0].tensors(), "optimizer": replicas.updaters[0].tensors()}
            named = [(f"{kind}:{name}", tensor) for kind, group in groups.items() for name, tensor in group.items()]
            tensors = {name: np.array(tensor) for name, tensor in named}
            tensors["rates:from"] = np.array([at for at, _ in self._changes], np.int64)
            tensors["rates:lr"] = np.array([lr for _, lr in self._changes], np.float64)  # None is NaN
        elif not tensors:
            raise Invalid("save: the group has not made a step yet")
        about = {"step": self.steps, "seed": self.settings.seed, "shards": self.settings.shards, **self._optimizer()}
        about["lr"] = self._rate.to_json() if isinstance(self._rate, Schedule) else self._rate and FUNCTION
        about["by_hand"] = self._by_hand
        if self.rank == 0:
            try:
                checkpoint.write(Path(path), checkpoint.pack(about, tensors))
            except (OSError, TypeError) as error:
                raise Invalid(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from None
        if replicas:
            replicas.world.collect(b"")

    @staticmethod
    def load(path: str | os.PathLike[str], model: Model, **settings: Setting) -> Group:
        """The group that `save` wrote, around a model of the same kind; seed, shards and an optimizer of samestep's are known,
        with the rate that it was given; so are a rate that was set by hand, and all rates so far.

        All else is given again: loss, devices, which may be others, and an optimizer of the framework's.
        """
        found = checkpoint.read(Path(path))
        about = found.about
        if "recipe" in about:
            how = "Trainer.fit(model, data, weights=the folder of the run)"
            raise Invalid(f"{path} was written by a fit: start from its weights with {how}")
        kind, fields = about["optimizer"] or (None, {})
        known = {"seed": about["seed"], "shards": about["shards"]}
        if kind and "optimizer" not in settings:
            if (lr := about.get("lr")) == FUNCTION:
                raise Invalid(f"{path} was saved with a function as the rate: give the optimizer and its lr again")
            known["optimizer"] = getattr(rules, kind)(**fields, lr=lr and from_json(lr))
        group = Group(model, **{**known, **settings})
        for name, value in {"seed": group.settings.seed, "shards": group.settings.shards, **group._optimizer()}.items():
            if about[name] != value:
                was, now = ("the framework's own" if one is None else one for one in (about[name], value))
                raise Invalid(
                    f"{path} was saved with {name}={was}, and not with {now}: give the one that it was saved with"
                )
        group.steps, group._start, group._by_hand = found.step, found, about.get("by_hand")
        past = found.group("rates") or {"from": np.zeros(1, np.int64), "lr": np.full(1, np.nan)}  # of an older file
        changes = zip(past["from"].tolist(), past["lr"].tolist(), strict=True)
        group._changes = [(at, None if np.isnan(lr) else lr) for at, lr in changes]
        return group

    def _optimizer(self) -> dict[str, Any]:
        """samestep's own optimizer as its class and settings."""
        optimizer: Any = self.settings.optimizer
        if type(optimizer).__module__ != rules.__name__:
            return {"optimizer": None}
        fields = {name: value for name, value in dataclasses.asdict(optimizer).items() if name != "lr"}
        return {"optimizer": [type(optimizer).__name__, fields]}

    def _first(self) -> Replica:
        """The first replica; before the first step, one with the weights that the group begins from."""
        if self._replicas:
            return self._replicas.replicas[0]
        settings, backend = self.settings, of_model(self._given)
        device = resolve(settings.devices, settings.shards, backend)[0]
        replica = backend.replica(self._given, settings.loss, device, settings.shards)
        self._put_into([replica])
        return replica

    @contextmanager
    def _at_work(self, x: Any, y: Any, *call: str) -> Iterator[tuple[Replicas, Feed]]:
        """The replicas, made from the first batch, and the way of this batch to their devices, for a call of this name."""
        settings = self.settings
        if y is None and not isinstance(x, Mapping):
            raise WrongType(
                f"a Group needs x and y, or one dictionary with the labels in it, got {type(x).__name__} alone"
            )
        backend, data = matching(
            self._given, Data(x if y is None else (x, y)), optimizer=settings.optimizer, loss=settings.loss
        )
        with settings.session(backend, self._world, keep=True) as (devices, self._world):
            if self._world.size > 1:
                told = {"call": call, **data.train.identity(), **({} if self._replicas else self._alike())}
                agreed(self._world, told, "batch or setting (every process gives the whole batch)")
            arrays = dict(named("", data.train.batch)).items()
            kinds = ", ".join(f"{name.strip()} of {array.dtype} {tuple(array.shape[1:])}" for name, array in arrays)
            if kinds not in self._kinds:  # its errors are told as those of a fit
                shape, measure = measured(settings, backend, self._given, data.train)
                if self._kinds and (shape, measure.style) != (self._shape, self._measure.style):
                    raise Invalid(f"a batch must have the structure of the first one, {self._kinds[0]}, got {kinds}")
                if not self._kinds:
                    self._shape, self._measure = shape, measure
                self._kinds.append(kinds)
            feed = Feed(backend, data.train, devices, self._shape.labels, dtype=self._shape.dtype)
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
        if self._shape.foreign and self._measure.kind == MEAN and len(feed.examples) < 2:
            raise Invalid(
                "the first batch of a Group must have two examples or more, got 1: whether its loss is a mean or a sum is seen "
                "there; or return (sum, weight) from it"
            )
        self._measure = checked(settings, backend, self._given, self._shape, self._measure, feed, devices[0])
        replicas = Replicas(settings, backend, self._given, self._measure, devices, self._world)
        self._put_into(replicas.replicas)
        for updater in replicas.updaters if self._start.tensors else ():
            updater.load(self._start.group("optimizer"))
        replicas.follow()
        weakref.finalize(self, backend.workers.let_go)
        return replicas

    def _put_into(self, replicas: Sequence[Replica]) -> None:
        """Put the weights that were saved into replicas, if there are any."""
        if not self._start.tensors:
            return
        theirs, ours = self._start.group("model"), replicas[0].tensors()
        for name in {**ours, **theirs}:
            was, now = (tensors[name].shape if name in tensors else None for tensors in (theirs, ours))
            if was != now:
                raise Invalid(f"another model was saved: its {name!r} had shape {was}, and has {now} here")
        for replica in replicas:
            replica.load(theirs)

    def _alike(self) -> dict[str, Any]:
        """Settings that must be alike in all processes."""
        found = {name: getattr(self.settings, name) for name in sorted(ALIKE)}
        told = {name: list(value) if name == "metrics" else repr(value) for name, value in found.items()}
        return {**told, **self._optimizer()}


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
