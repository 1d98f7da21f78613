"""The way of examples to the devices.

Arrays that fit are put on each device once, and a shard is gathered there. Everything else (np.memmap, a map-style dataset,
arrays too large for the device or with a transform) is read ahead, by threads or processes, shard by shard, or by the thread
that runs the fit. All ways give the same numbers.
"""

from __future__ import annotations

import os
import threading
import warnings
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from samestep import trees
from samestep.backends.losses import IGNORED, part
from samestep.backends.times import timed, timed_as
from samestep.data.convert import PADDING, both, labels, named, narrowed, numbers
from samestep.data.examples import Arrays
from samestep.data.readers import NAME, Workers
from samestep.data.source import Source
from samestep.devices import Device
from samestep.errors import Invalid, WrongType
from samestep.shards import Span
from samestep.trees import Tree

if TYPE_CHECKING:
    from samestep.backends.base import Backend

READ_AHEAD, JOINED = 32, 4  # shards; or so many times those that are joined
SHARE_OF_DEVICE = 0.25  # of a GPU's free memory that data may take and still be kept there


def check_labels(name: str, y: Tree, classes: int | None) -> None:
    """Labels must be whole numbers from 0 to classes - 1: a GPU kernel would not say so, but crash."""
    y = part(y, "labels", "label") if isinstance(y, Mapping) else y
    if classes is None or not isinstance(y, np.ndarray):
        return
    counted = y if y.ndim == 1 else y[y != IGNORED]
    if counted.size and not 0 <= int(counted.min()) <= int(counted.max()) < classes:
        wanted = f"labels must be from 0 to {classes - 1}, as the model gives {classes} scores"
        raise Invalid(f"{name} y: {wanted}, got labels from {int(counted.min())} to {int(counted.max())}")


class Feed:
    """Brings examples to the devices that compute; made once for a run and used for every pass."""

    def __init__(
        self, backend: Backend, examples: Arrays | Source, devices: Sequence[Device], classes: int | None, seed: int = 0,
        dtype: str = "",
    ) -> None:  # fmt: skip
        """dtype: of the model; for one of float32, examples of float64 are converted."""
        self.backend, self.examples, self.classes, self.seed = backend, examples, classes, seed
        self._device = devices[0]
        self._suited = narrowed if dtype == "float32" else lambda x, y: (x, y)
        self.resident: dict[Device, tuple[Tree, Tree]] = {}
        self._readers: ThreadPoolExecutor | None = None
        self._workers: Workers | None = None
        self._kinds, self._shapes = set[str](), set[str]()  # of shards; of examples
        if isinstance(examples, Arrays) and examples.in_memory and not examples.transform:
            x, y = both(numbers, examples.x, examples.y)
            y = y if y is x else trees.mapped(labels, y)
            check_labels(examples.name, y, classes)
            x, y = self._suited(x, y)
            size = sum(array.nbytes for array in trees.leaves(x if y is x else (x, y)))
            if all(self._fits(device, size) for device in set(devices)):
                for device in set(devices):
                    self.resident[device] = both(lambda array, device=device: backend.put(array, device), x, y)

    def _fits(self, device: Device, size: int) -> bool:
        if device.kind == "cpu":
            return True  # it is there already
        total, used = self.backend.memory(device)
        return size <= (total - used) * SHARE_OF_DEVICE

    @property
    def here(self) -> bool:
        """Whether the thread that runs the fit reads, and `Pass.prepare` must be called before shards are asked for."""
        return self.examples.readers == 0 and not self.resident

    @property
    def joins(self) -> bool:
        """Whether neighbouring shards should be read and sent as one: few large copies leave Python's lock to the fit."""
        given = self.examples
        plain = isinstance(given, Arrays) and not given.transform and given.pad is None
        return plain and self._device.kind == "cuda" and not self.resident and not self.here

    def start(self, order: NDArray[np.int64], spans: Sequence[Span], epoch: int = 0, joined: bool = False) -> Pass:
        """Begin a pass: `spans` are what is read at once, in the order in which it will be asked for, as ranges of `order`.

        That is one shard, or, if `joined`, neighbouring ones, in ascending order.
        """
        if not self.resident and not self._readers and not self.here:
            self._readers = ThreadPoolExecutor(self._staff(), NAME)
        pass_ = Pass(self, order, spans, epoch, joined)
        pass_.order_on = {device: self.backend.index(order, device) for device in self.resident}
        return pass_

    def _staff(self) -> int:
        """Start the processes that are to read, if any; returns how many threads read, or ask them."""
        examples, readers = self.examples, self.examples.readers
        several = min(4, os.cpu_count() or 1) if examples.thread_safe else 1
        given: Any = examples.transform if isinstance(examples, Arrays) else None if examples.thread_safe else examples
        if not readers or not given:
            return readers or several
        try:
            self._workers = Workers(given, readers)
        except Exception as error:
            who = f"readers={readers}: {'one thread reads' if several == 1 else f'{several} threads read'} {examples.name}"
            warnings.warn(f"{who} instead, as no other process can get it: {error}", stacklevel=2)
            return several
        return readers

    @timed_as("data")
    def read(self, indices: NDArray[np.int64], epoch: int) -> tuple[Tree, Tree]:
        """x and y of these examples, read by a worker if there are any."""
        if self._workers is None:
            return self.examples.read(indices, self.seed, epoch)
        # Of arrays, a worker has only the transform.
        rows = [] if isinstance(self.examples, Source) else [self.examples.fetch(indices)]
        x, y = self._workers.read(*rows, indices, self.seed, epoch)
        return x, y

    def checked(self, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        """A shard as it was read, if it is like those before it."""
        name = self.examples.name
        check_labels(name, y, self.classes)
        found = {label.strip(): array for label, array in sorted(named("", x if y is x else (x, y)))}
        self._kinds.add(" with ".join(f"{label} of {array.dtype}" for label, array in found.items()))
        if len(self._kinds) > 1:
            raise WrongType(f"{name} must be of one type, got {' and '.join(sorted(self._kinds))}")
        if self.examples.pad is None and (self.examples.by_item or self.examples.transform):
            self._shapes.add(" with ".join(f"{label} of {array.shape[1:]}" for label, array in found.items()))
            if len(self._shapes) > 1:
                told = " and ".join(sorted(self._shapes))
                raise WrongType(f"{name} must have examples of one shape, got {told}: {PADDING}")
        return both(np.ascontiguousarray, *self._suited(x, y))  # kernels are chosen by how memory lies, too

    def fetched(self, indices: NDArray[np.int64], epoch: int) -> tuple[Tree, Tree]:
        """What a thread that reads ahead brings: examples as they were read and checked, ready to go to a device."""
        x, y = self.checked(*self.read(indices, epoch))
        return both(lambda array: self.backend.staged(array, self._device), x, y)

    def close(self) -> None:
        if self._readers:
            self._readers.shutdown(cancel_futures=True)
        if self._workers:
            self._workers.close()


class Pass:
    """One pass over the examples in a given order."""

    def __init__(self, feed: Feed, order: NDArray[np.int64], spans: Sequence[Span], epoch: int, joined: bool) -> None:
        self.feed, self.order, self.spans, self.epoch, self.joined = feed, order, list(spans), epoch, joined
        self.order_on = dict[Device, Any]()
        self._ahead: dict[Span, Future[tuple[Tree, Tree]]] = {}
        self._prepared: dict[Span, tuple[Tree, Tree]] = {}
        self._next = 0
        self._lock, self._lock_of_parts = threading.Lock(), threading.Lock()
        self.then: Pass | None = None  # what will be asked for after this pass, and is read ahead, too
        self._most = JOINED if joined else READ_AHEAD
        self._parts: dict[Span, tuple[Tree, Tree, int]] = {}  # on a device; how much of it is still to come

    def prepare(self, spans: Sequence[Span]) -> None:
        """Read these shards in this thread, if that is who reads; else they are read ahead when they are asked for."""
        if self.feed.here:
            self._prepared |= {span: self.read(span) for span in spans}

    def again(self, span: Span) -> Pass:
        """A pass over one shard of this one, which is read anew."""
        new = Pass(self.feed, self.order, [span], self.epoch, joined=False)
        new.order_on = self.order_on  # a GPU computes by it: what is sent there comes only after that
        new.prepare([span])
        return new

    @timed_as("data")
    def read(self, span: Span) -> tuple[Tree, Tree]:
        """The examples of one shard on the host, read by this thread."""
        return self.feed.examples.read(self.order[slice(*span)], self.feed.seed, self.epoch)

    def shard(self, span: Span, device: Device) -> tuple[Tree, Tree]:
        """The examples of one shard, on a device."""
        backend = self.feed.backend
        if self.feed.resident:
            index = self.order_on[device][span[0] : span[1]]
            return both(lambda array: backend.take(array, index), *self.feed.resident[device])
        if self.joined:
            return self._part(span, device)
        read = self.feed.checked(*self._prepared.pop(span)) if self.feed.here else self._read(span)
        # A copy, even on the CPU: memory that the framework allocated is aligned alike for every shard and run.
        return both(lambda array: backend.copy(array, device), *read)

    def block(self, span: Span, device: Device) -> tuple[Tree, Tree]:
        """The examples that are read at once, on a device."""
        with timed("data"):
            return both(lambda array: self.feed.backend.copy(array, device), *self._read(span))

    def _part(self, span: Span, device: Device) -> tuple[Tree, Tree]:
        """A shard out of those that are read at once, in memory of its own."""
        block = self.spans[bisect_right(self.spans, span[0], key=lambda one: one[0]) - 1]
        with self._lock_of_parts:
            if block not in self._parts:
                self._parts[block] = *self.block(block, device), block[1] - block[0]
            x, y, left = self._parts.pop(block)
            if left > span[1] - span[0]:
                self._parts[block] = x, y, left - (span[1] - span[0])
        lo, hi = span[0] - block[0], span[1] - block[0]
        return both(lambda array: self.feed.backend.copy(array[lo:hi], device), x, y)

    def _read(self, span: Span) -> tuple[Tree, Tree]:
        readers = self.feed._readers
        assert readers is not None
        with self._lock:
            while self._next < len(self.spans) and (len(self._ahead) < self._most or span not in self._ahead):
                self._submit(readers)
            while self.then and self.then._next < min(len(self.then.spans), self._most - len(self._ahead)):
                self.then._submit(readers)
            reading = self._ahead.pop(span)
        return reading.result()  # waits if the source is slower than the device

    def _submit(self, readers: ThreadPoolExecutor) -> None:
        wanted = self.spans[self._next]
        self._ahead[wanted] = readers.submit(self.feed.fetched, self.order[wanted[0] : wanted[1]], self.epoch)
        self._next += 1


@dataclass(frozen=True)
class Batch:
    """The shards of one step: where their examples lie in the pass, and the keys that their noise is drawn from."""

    pass_: Pass
    spans: Sequence[Span]
    keys: Sequence[int]

    @property
    def examples(self) -> int:
        return self.spans[-1][1] - self.spans[0][0]

    def shard(self, shard: int, device: Device) -> tuple[Any, Any]:
        """The examples of one shard, on a device."""
        with timed("data", shard=shard):
            return self.pass_.shard(self.spans[shard], device)
