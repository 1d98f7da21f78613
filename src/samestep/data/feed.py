"""The way of examples to the devices.

Arrays that fit are put on each device once, and a shard is gathered there. Everything else (np.memmap, a map-style dataset,
arrays too large for the device) is read ahead, by threads or workers, shard by shard. All ways give the same numbers.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from samestep.data.examples import Arrays, Numbers, Source, labels, numbers
from samestep.data.readers import NAME, Workers
from samestep.devices import Device
from samestep.errors import Invalid, WrongType
from samestep.shards import Span

if TYPE_CHECKING:
    from samestep.backends.base import Backend

READ_AHEAD = 32  # shards
SHARE_OF_DEVICE = 0.25  # of a GPU's free memory that data may take and still be kept there


def check_labels(name: str, y: Numbers, classes: int | None) -> None:
    """Labels must be whole numbers from 0 to classes - 1: a GPU kernel would not say so, but crash."""
    if classes is not None and not 0 <= int(y.min()) <= int(y.max()) < classes:
        wanted = f"labels must be from 0 to {classes - 1}, as the model gives {classes} scores"
        raise Invalid(f"{name} y: {wanted}, got labels from {int(y.min())} to {int(y.max())}")


class Feed:
    """Brings examples to the devices that compute; made once for a run and used for every pass."""

    def __init__(
        self, backend: Backend, examples: Arrays | Source, devices: Sequence[Device], classes: int | None, workers: int = 0
    ) -> None:  # fmt: skip
        self.backend, self.examples, self.classes = backend, examples, classes
        self.resident: dict[Device, tuple[Any, Any]] = {}
        self._readers: ThreadPoolExecutor | None = None
        self._workers: Workers | None = None
        self._count, self._kinds = workers, set[str]()  # of workers; of shards
        if isinstance(examples, Arrays) and examples.in_memory:
            x, y = numbers(examples.x), labels(numbers(examples.y))
            check_labels(examples.name, y, classes)
            if all(self._fits(device, x.nbytes + y.nbytes) for device in set(devices)):
                self.resident = {device: (backend.put(x, device), backend.put(y, device)) for device in set(devices)}

    def _fits(self, device: Device, size: int) -> bool:
        if device.kind == "cpu":
            return True  # it is there already
        total, used = self.backend.memory(device)
        return size <= (total - used) * SHARE_OF_DEVICE

    def start(self, order: NDArray[np.int64], spans: Sequence[Span]) -> Pass:
        """Begin a pass: `spans` are the shards, in the order in which they will be asked for, as ranges of `order`."""
        if not self.resident and not self._readers:
            threads = min(4, os.cpu_count() or 1) if self.examples.thread_safe else 1
            if self._count and isinstance(self.examples, Source):
                try:
                    self._workers, threads = Workers(self.examples, self._count), self._count
                except Exception as error:
                    instead = f"workers={self._count}: one thread reads {self.examples.name} instead"
                    warnings.warn(f"{instead}, as no worker can get it: {error}", stacklevel=2)
            self._readers = ThreadPoolExecutor(threads, NAME)
        return Pass(self, order, spans)

    def checked(self, x: Numbers, y: Numbers) -> tuple[Numbers, Numbers]:
        """A shard as it was read, if it is like those before it."""
        check_labels(self.examples.name, y, self.classes)
        self._kinds.add(f"x of {x.dtype} with y of {y.dtype}")
        if len(self._kinds) > 1:
            raise WrongType(f"{self.examples.name} must be of one type, got {' and '.join(sorted(self._kinds))}")
        return np.ascontiguousarray(x), np.ascontiguousarray(y)  # kernels are chosen by how memory lies, too

    def close(self) -> None:
        if self._readers:
            self._readers.shutdown(cancel_futures=True)
        if self._workers:
            self._workers.close()


class Pass:
    """One pass over the examples in a given order."""

    def __init__(self, feed: Feed, order: NDArray[np.int64], spans: Sequence[Span]) -> None:
        self.feed, self.order, self.spans = feed, order, list(spans)
        self._order_on = {device: feed.backend.index(order, device) for device in feed.resident}
        self._ahead: dict[Span, Future[tuple[Numbers, Numbers]]] = {}
        self._next = 0
        self._lock = threading.Lock()

    def shard(self, span: Span, device: Device) -> tuple[Any, Any]:
        """The examples of one shard, on a device."""
        backend = self.feed.backend
        if self.feed.resident:
            index = self._order_on[device][span[0] : span[1]]
            x, y = self.feed.resident[device]
            return backend.take(x, index), backend.take(y, index)
        x, y = self._read(span)
        # A copy, even on the CPU: memory that the framework allocated is aligned alike for every shard and run.
        return backend.copy(x, device), backend.copy(y, device)

    def _read(self, span: Span) -> tuple[Numbers, Numbers]:
        readers, read = self.feed._readers, (self.feed._workers or self.feed.examples).read
        assert readers is not None
        with self._lock:
            while self._next < len(self.spans) and (len(self._ahead) < READ_AHEAD or span not in self._ahead):
                wanted = self.spans[self._next]
                self._ahead[wanted] = readers.submit(read, self.order[wanted[0] : wanted[1]])
                self._next += 1
            reading = self._ahead.pop(span)
        return self.feed.checked(*reading.result())  # waits if the source is slower than the device


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
        return self.pass_.shard(self.spans[shard], device)
