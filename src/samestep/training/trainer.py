"""The Trainer: what a user decides about a fit, checked at once; it fits and evaluates. The loop itself is in fit.py."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any

import numpy as np

from samestep import draws, portable
from samestep.backends.arrays import get
from samestep.backends.base import Array, Backend, Model
from samestep.backends.find import check_mixed, frameworks_of, of_array, of_model
from samestep.backends.losses import PerShard
from samestep.backends.making import FORMATS, PRECISIONS, Making
from samestep.checks import MOST, choice, flag, show, texts, whole
from samestep.data.convert import named
from samestep.data.examples import Arrays, Data
from samestep.data.feed import Feed
from samestep.data.readers import NAME, UNGUARDED
from samestep.devices import Device, Devices, resolve
from samestep.errors import Invalid, NotBuilt, WrongType
from samestep.optimizers.averaging import Average
from samestep.optimizers.grouping import Groups, check_groups
from samestep.optimizers.rules import FrameworkOptimizer, Optimizer, Rated, adagrad, adam, adamw, sgd, sgld
from samestep.processes import place
from samestep.processes.world import World
from samestep.runs.checkpoint import Tensors, parse
from samestep.runs.recipe import ACCEPT
from samestep.runs.run import Run
from samestep.schedules.algebra import Schedule
from samestep.schedules.plateau import Plateau
from samestep.schedules.rates import RateLike, check_schedule, rate
from samestep.signals import Guard, heard
from samestep.training.fit import Fit
from samestep.training.measuring import check_metrics, checked, measured
from samestep.training.profile import check_profile
from samestep.training.rehearsal import AUTO
from samestep.training.replicas import Replicas
from samestep.trees import Tree, mapped


@dataclass
class Trainer:
    """Trains a model on any number of devices, with the same result to the last bit.

    max_epochs         passes over the data
    batch_size         examples per update; the last batch of an epoch may be smaller, nothing is dropped
    shards             the pieces a batch is cut into: up to this many devices can share the work
    devices            "auto" (every GPU, else the CPU), a count, a name, or a list; a device may be named more than once
    optimizer          samestep.sgd(...), adam(...), ...; or the framework's own, or a function that makes it from parameters
    schedule           the learning rate: a number, a schedule such as samestep.cosine(...), a Plateau, a scheduler of the
                       framework, or any function of t, the number of updates already made; None: the `lr` or the default of
                       samestep's optimizer, or the rate that the framework's own came with
    lr                 the same as `schedule`; say one of the two
    unit               what the schedule counts: "step", or "epoch": then t is the number of epochs already made, for a
                       function and a scheduler of the framework, too; a Plateau counts epochs anyway
    groups             weights with a rate or decay of their own, or frozen, by pattern of their names (docs/fine-tuning.md):
                       {"backbone.*": samestep.group(lr_scale=0.1)}; the first pattern that matches decides
    gradient_clip_val  a longer gradient is scaled down to this norm; 0 for no clipping
    gradient_clip_algorithm   "norm", or "value": every number of the gradient is kept within ±gradient_clip_val
    seed               decides the order of examples and all noise
    average            samestep.swa(...), ema(...) or path_average(): also average the weights over their path
    run_dir            the folder to write the run to; None writes nothing
    checkpoint_every   a number of steps, or a text such as "1 epoch" or "30 s"; None writes no checkpoints
    keep_checkpoints   how many of the latest checkpoints are kept; the best one, of those at the end of an epoch, is kept too
    monitor, mode      the column of the history that says which is the best, and that a Plateau follows, such as "test_top5";
                       mode="max" if more is better; None: the test loss (the training loss without test examples)
    patience           stop early, after so many epochs in a row that were not better in that column; None: never
    resume             "auto": resume if run_dir holds a checkpoint of this recipe; False: never; or a path to resume from
    progress           False: show none. Else a bar in a terminal or a notebook, and one line an epoch anywhere else
    profile            a file, or True for profile.json in the run folder: show where a step's time goes (docs/speed.md)
    threads_per_shard  threads of arithmetic for each shard on the CPU
    loss               loss(output, y): one value per example, their mean, or (sum, weight); None: softmax cross-entropy, or
                       the model's own output.loss (docs/losses.md)
    metrics            {name: function of (output, y) that returns (sum, weight)}: in the history as train_name and test_name
    sampling           "without_replacement", "with_replacement" or "in_order"
    precision          of products: "float32", "tf32" (GPUs) or "bfloat16" (PyTorch's autocast); weights and sums stay float32
    memory_format      of images and the weights of convolutions: "contiguous" or "channels_last" (PyTorch); "auto" is
                       channels_last on CPUs if the model can compute that way, but not in a portable run
    compile            compile shards and update with torch.compile: often faster, and other bits than without
    streams            how many shards a GPU computes at once, which costs memory and decides no bit; None: as many as help
    capture            record steps or shards once and replay them: faster, same bits
    deterministic      False allows operations without a deterministic kernel, and gives up sameness
    rehearse           compute the first batch twice before the first update, and stop if its bits differ
    check_every        a number of steps or epochs: this often, one shard is computed twice, and its bits compared; None: never;
                       "auto": once an epoch, or less often where epochs are short (docs/checks.md)
    state              names of frozen parameters that the forward pass writes, such as "encoder_k.*": they become state
    timeout            with several processes, how many seconds one may take to answer before it is given up
    portable           True: the same bits on every x86-64 CPU with AVX2 (docs/numerics.md); None: if SAMESTEP_PORTABLE=1
    accept             what may have changed when a run is resumed: "numerics", "code", "data", or several; it is written
                       into the run
    num_gpus           the chapters' name for `devices`: how many GPUs (replicas on the CPU, if there is none), 0 for the CPU
    """

    max_epochs: int = 10
    batch_size: int = 256
    _: KW_ONLY
    shards: int = 8
    devices: Devices = "auto"
    optimizer: Optimizer | FrameworkOptimizer | Callable[..., FrameworkOptimizer] = field(default_factory=sgd)
    schedule: RateLike = None
    lr: RateLike = None
    unit: str = "step"
    groups: Groups = field(default_factory=dict)
    gradient_clip_val: float = 0.0
    gradient_clip_algorithm: str = "norm"
    seed: int = 0
    average: Average | None = None
    run_dir: str | os.PathLike[str] | None = None
    checkpoint_every: int | str | None = "1 epoch"
    keep_checkpoints: int = 3
    monitor: str | None = None
    mode: str = "min"
    patience: int | None = None
    resume: str | os.PathLike[str] | bool = "auto"
    progress: bool | None = None
    profile: str | os.PathLike[str] | bool | None = None
    threads_per_shard: int = 1
    loss: Callable[[Any, Any], Any] | PerShard | None = None
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    sampling: str = "without_replacement"
    precision: str = "float32"
    memory_format: str = "auto"
    compile: bool = False
    streams: int | None = None
    capture: bool = True
    deterministic: bool = True
    rehearse: bool = True
    check_every: int | str | None = AUTO
    state: str | Sequence[str] = ()
    timeout: float = 300.0
    portable: bool | None = None
    accept: str | Sequence[str] = ()
    num_gpus: int | None = None

    made = 0  # how many there were in this process; no setting, so without a type

    def __post_init__(self) -> None:
        Trainer.made += 1
        try:
            overrides = {**json.loads(text := os.environ.get(place.OVERRIDES, "{}"))}
        except (ValueError, TypeError, RecursionError):
            raise Invalid(f"{place.OVERRIDES} must be a JSON object of settings, got {show(text)}: unset it") from None
        for name, value in overrides.items():
            if name not in {f.name for f in fields(self)}:
                raise Invalid(f"{place.OVERRIDES}: Trainer has no {name!r}")
            setattr(self, name, value)
        if "devices" in overrides:
            self.num_gpus = None  # another name for it, which the script may use
        self._take_rate(overrides.keys() & {"lr", "schedule"})
        if self.num_gpus is not None:
            self.num_gpus = whole("", "num_gpus", self.num_gpus)
            self.devices = self.num_gpus or "cpu"
        for name in ("max_epochs", "batch_size", "shards", "threads_per_shard", "keep_checkpoints"):
            setattr(self, name, whole("", name, getattr(self, name), 1, 2**20 if name == "shards" else MOST))
        for name in ("progress", "capture", "deterministic", "portable", "rehearse", "compile"):
            if getattr(self, name) is not None or name not in ("progress", "portable"):
                setattr(self, name, flag("", name, getattr(self, name)))
        choice("", "precision", self.precision, PRECISIONS)
        choice("", "memory_format", self.memory_format, FORMATS)
        self.streams = None if self.streams is None else whole("", "streams", self.streams, 1)
        self.seed = whole("", "seed", self.seed, most=2**64 - 1)
        uncalled = any(self.optimizer is made for made in (sgd, adam, adamw, adagrad, sgld))  # without its ()
        theirs = frameworks_of(self.optimizer) or callable(self.optimizer)
        if not isinstance(self.optimizer, Optimizer) and (uncalled or not theirs):
            raise WrongType(
                "optimizer must be one of samestep's, such as samestep.sgd(), or the framework's own, or a function that "
                f"makes one from parameters, got {show(self.optimizer)}"
            )
        if not isinstance(self.average, (Average, type(None))):
            raise WrongType(f"average must be samestep.swa(...), ema(...) or path_average(), got {show(self.average)}")
        self.groups = check_groups(self.groups, self.optimizer)
        self.gradient_clip_val = rate("gradient_clip_val", self.gradient_clip_val)
        choice("", "gradient_clip_algorithm", self.gradient_clip_algorithm, ("norm", "value"))
        if not isinstance(self.run_dir, (str, os.PathLike, type(None))) or "\0" in str(self.run_dir):
            raise WrongType(f"run_dir must be a path or None, got run_dir={show(self.run_dir)}")
        if self.checkpoint_every is not None:
            parse(self.checkpoint_every, "checkpoint_every")
        if self.check_every not in (None, AUTO) and parse(self.check_every, "check_every")[1] == "seconds":
            raise Invalid(f"check_every must be a number of steps or epochs, got {show(self.check_every)}")
        if self.resume is True or not isinstance(self.resume, (str, os.PathLike, bool)):
            raise WrongType(f"resume must be 'auto', False or a path, got resume={show(self.resume)}")
        path = self.resume not in ("auto", False)
        if path and not os.path.exists(self.resume):
            raise Invalid(f"resume: {self.resume} is not there")
        if path and self.run_dir is None:
            raise Invalid("resume needs a run_dir to go on in: the folder of the run, or a new one")
        self.timeout = rate("timeout", self.timeout)
        if not self.timeout:
            raise Invalid("timeout must be above 0, got timeout=0")
        self.portable = portable.wanted() if self.portable is None else self.portable
        if self.portable:
            portable.set_up()
        self.accept, self.state = texts("", "accept", self.accept), texts("", "state", self.state)
        if not set(self.accept) <= ACCEPT.keys():
            raise Invalid(f"accept takes {', '.join(ACCEPT)}, got {show(self.accept)}")
        check_metrics(self.metrics)
        check_profile(self.profile, self.run_dir)
        self.patience = None if self.patience is None else whole("", "patience", self.patience, 1)
        if not isinstance(self.monitor, (str, type(None))) or self.mode not in ("min", "max"):
            raise Invalid(
                f"monitor must be a column of the history, and mode min or max, got {self.monitor!r}, {self.mode!r}"
            )
        if self.mode == "max" and self.monitor is None:
            raise Invalid("mode='max' needs a monitor, such as monitor='test_accuracy': a lower loss is better")
        if self.monitor and isinstance(self.schedule, Plateau) and self.schedule.settings["mode"] != self.mode:
            mode = self.schedule.settings["mode"]
            raise Invalid(
                f"Plateau(mode={mode!r}) follows {self.monitor}, of which the Trainer says mode={self.mode!r}"
            )
        if self.loss is not None and not callable(self.loss) and not isinstance(self.loss, PerShard):
            raise WrongType(f"loss must be a function of (output, y), got {show(self.loss)}")
        if not isinstance(self.sampling, str) or self.sampling not in draws.SAMPLINGS:
            raise Invalid(f"sampling must be one of {', '.join(draws.SAMPLINGS)}, got sampling={show(self.sampling)}")

    def _take_rate(self, overridden: Set[str]) -> None:
        """Bring the rate from where the user wrote it, in one place only, to `schedule`."""
        own = self.optimizer.lr if isinstance(self.optimizer, Rated) else None
        given = {"schedule": self.schedule, "lr": self.lr, "the optimizer's lr": own}
        given = {name: value for name, value in given.items() if value is not None}
        if overridden:  # what the command line says counts, wherever the script has said another
            given = {name: value for name, value in given.items() if name in overridden}
        if len(given) > 1:
            told = " and ".join(f"{name}={show(value)}" for name, value in given.items())
            raise Invalid(f"the rate must be given in one place, got {told}: leave all but one out")
        self.schedule = self.lr = None
        for name, value in given.items():
            self.schedule = check_schedule("", name, value)
        if choice("", "unit", self.unit, ("step", "epoch")) == "epoch":
            if self.schedule is None:
                raise Invalid("unit='epoch' is for a schedule, and there is none: pass schedule=... or leave unit out")
            if isinstance(self.schedule, Schedule) and self.schedule.unit == "steps":
                self.schedule = self.schedule.in_epochs()
        if isinstance(self.optimizer, Rated):
            self.optimizer = replace(self.optimizer, lr=None)

    def fit(
        self, model: Model, data: Data | Tree, weights: Tensors | Run | str | os.PathLike[str] | None = None
    ) -> Run:
        """Train a copy of the model and return the run; the model itself is left as it was.

        `weights` to start from, instead of the model's, all or some of them: a dictionary by name, a Run, the folder of a
        run, or a safetensors file.
        """
        backend, data = matching(model, data, optimizer=self.optimizer, schedule=self.schedule, loss=self.loss)
        with self.session(backend) as (devices, world):
            with heard():
                fit = Fit(self, backend, model, data, devices, world, weights)
            return fit.run()

    @contextmanager
    def session(
        self, backend: Backend, world: World | None = None, keep: bool = False
    ) -> Iterator[tuple[list[Device], World]]:
        """The devices of this process, and the other processes; an error in one of them ends all.

        world: that of an earlier session; keep: have threads wait for the next one.
        """
        if multiprocessing.current_process().name == NAME:  # a script without `if __name__ == "__main__":`
            sys.exit(UNGUARDED)
        here = place.find()
        devices = resolve(self.devices, self.shards, backend, here)
        backend.state = self.state
        backend.making = Making(self.precision, self.memory_format, self.compile, self.streams)
        backend.portable = bool(self.portable) and devices[0].kind == "cpu"
        backend.check_making(devices)
        if backend.portable:
            backend.require_portable()
        backend.workers.keeping = keep
        with Guard(), backend.session(devices, deterministic=self.deterministic, threads=self.threads_per_shard):
            with heard():
                world = world or backend.world(here, self.timeout, devices)
            try:
                yield devices, world
            except BaseException as error:
                world.fail(error)
                raise

    def evaluate(self, model: Model, data: Data | Tree) -> dict[str, float | None]:
        """Loss and accuracy of a model on the test examples (the training examples if there are no others)."""
        backend, data = matching(model, data, loss=self.loss)
        with self.session(backend) as (devices, world), ExitStack() as last, heard():
            examples = data.test or data.train
            shape, measure = measured(self, backend, model, examples)
            feed = Feed(backend, examples, devices, shape.labels, self.seed, shape.dtype)
            last.callback(feed.close)
            measure = checked(self, backend, model, shape, measure, feed, devices[0], trains=False)
            group = Replicas(self, backend, model, measure, devices, world)
            last.callback(group.close)
            group.follow()
            found = group.evaluate(feed, shape.classes)
        return {**found, "examples": len(examples)}

    def prepare_batch(self, batch: Sequence[Array]) -> list[Array]:
        """The arrays of a batch on the first device of this trainer."""
        backend = of_array(batch[0])
        device = resolve(self.devices, self.shards, backend)[0]
        return [backend.put(array, device) for array in batch]

    def prepare_model(self, model: Model, x: Tree | None = None) -> Model:
        """A copy of the model on the first device of this trainer.

        x is a batch, for a model whose weights are not made yet (a lazy layer, a module of flax): its first example makes them.
        """
        backend = of_model(model)
        device = resolve(self.devices, self.shards, backend)[0]
        try:
            if x is not None:
                examples = Arrays("batch", (mapped(_first, x), np.zeros(1, np.int64)))
                loss = PerShard(lambda output, y: (y[0], 1.0))  # one for any output
                measured(replace(self, loss=loss, metrics={}), backend, model, examples)
            return backend.replica(model, self.loss, device, self.shards).model()
        except NotBuilt as error:
            raise NotBuilt(f"{error}; or pass a batch, prepare_model(model, x)" if x is None else str(error)) from None
        finally:
            backend.forget()


def _first(array: Any) -> Any:
    """The first example of a batch, on the host."""
    if not getattr(array, "shape", ()):
        raise WrongType(f"prepare_model: x must be a batch, an array with one row per example, got {show(array)}")
    return get(array[:1])


def matching(model: Any, data: Any, **given: Any) -> tuple[Backend, Data]:
    """The backend of a model, and the data. What is given and the arrays of the data must be of the same framework."""
    backend, data = of_model(model), data if isinstance(data, Data) else Data(train=data)
    for examples in (data.train, data.test):
        if isinstance(examples, Arrays):  # sources are read as NumPy anyway
            given |= dict(named(examples.name, examples.batch))
    check_mixed(backend, model, **given)
    return backend, data
