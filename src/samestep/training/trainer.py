"""The Trainer: fits and evaluates with a user's settings. The loop itself is in fit.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from samestep import backends
from samestep.backends.base import Backend
from samestep.data.examples import Arrays, Data
from samestep.data.feed import Feed, probe
from samestep.devices import Device, resolve
from samestep.processes.place import find
from samestep.processes.world import World
from samestep.runs.run import Run
from samestep.training.fit import Fit
from samestep.training.group import Group
from samestep.training.settings import Settings


@dataclass
class Trainer(Settings):
    """Trains a model on any number of devices, with the same result to the last bit.

    max_epochs         passes over the data
    batch_size         examples per update; the last batch of an epoch may be smaller, nothing is dropped
    shards             the pieces a batch is cut into: up to this many devices can share the work
    devices            "auto" (every GPU, else the CPU), a count, a name, or a list; a device may be named more than once
    optimizer          samestep.sgd(...), adam(...), ...; or the framework's own, or a function that makes it from parameters
    schedule           the learning rate: a number, a schedule such as samestep.cosine(...), a Plateau, a scheduler of the
                       framework, or any function of t, the number of updates already made; None: 0.1, or the rate
                       that the framework's own optimizer came with
    gradient_clip_val  a longer gradient is scaled down to this norm; 0 for no clipping
    seed               decides the order of examples and all noise
    average            samestep.swa(...) or samestep.path_average(): also average the weights over their path
    run_dir            the folder to write the run to; None writes nothing
    checkpoint_every   a number of steps, or a text such as "1 epoch" or "30 s"; None writes no checkpoints
    keep_checkpoints   how many of the last ones are kept, beside the best one (lowest test loss at the end of an epoch)
    resume             "auto": resume if run_dir holds a checkpoint of this recipe; False: never; or a path to resume from
    progress           show progress; None: if standard error is a terminal
    threads_per_shard  threads of arithmetic for each shard on the CPU
    loss               loss(output, y): one value per example, or their mean; None: softmax cross-entropy
    sampling           "without_replacement", or "with_replacement"
    capture            on GPUs, record the computation of a shard once and replay it: faster, same bits
    deterministic      False allows operations without a deterministic kernel, and gives up sameness
    timeout            with several processes, how many seconds one may take to answer before it is given up
    num_gpus           the chapters' name for `devices`: how many GPUs (replicas on the CPU, if there is none), 0 for the CPU
    """

    def fit(self, model: Any, data: Any) -> Run:
        """Train a copy of the model and return the run; the model itself is left as it was."""
        backend, data = backends.of_model(model), as_data(data)
        given = {"optimizer": self.optimizer, "schedule": self.schedule, "loss": self.loss}
        backends.check_mixed(backend, model, **given, **arrays_of(data))
        with self._session(backend) as (devices, world):
            return Fit(self, backend, model, data, devices, world).run()

    @contextmanager
    def _session(self, backend: Backend) -> Iterator[tuple[list[Device], World]]:
        """The devices of this process, and the other processes; an error in one of them ends all."""
        place = find()
        devices = resolve(self.devices, self.shards, backend, place)
        with backend.session(devices, deterministic=self.deterministic, threads=self.threads_per_shard):
            world = backend.world(place, self.timeout, devices)
            try:
                yield devices, world
            except BaseException as error:
                world.fail(error)
                raise

    def evaluate(self, model: Any, data: Any) -> dict[str, Any]:
        """Loss and accuracy of a model on the test examples (the training examples if there are no others)."""
        backend, data = backends.of_model(model), as_data(data)
        backends.check_mixed(backend, model, loss=self.loss, **arrays_of(data))
        with self._session(backend) as (devices, world):
            examples = data.test or data.train
            shape = probe(backend, model, self.loss, examples)
            group = Group.of(self, backend, model, devices, world)
            group.follow()
            feed = Feed(backend, examples, devices, shape.classes if self.loss is None else None)
            try:
                loss, accuracy = group.evaluate(feed, self.batch_size, shape.classes)
            finally:
                feed.close()
                group.close()
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


def as_data(data: Any) -> Data:
    return data if isinstance(data, Data) else Data(train=data)


def arrays_of(data: Data) -> dict[str, Any]:
    """The arrays of the examples, by their names in messages. Sources are left out: they are read as NumPy anyway."""
    given = [examples for examples in (data.train, data.test) if isinstance(examples, Arrays)]
    return {f"{examples.name}_{which}": getattr(examples, which) for examples in given for which in ("x", "y")}
