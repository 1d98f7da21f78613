"""Examples: from arrays in memory, or from any source that can be read by index; and their way to the devices.

Arrays that fit are put on each device once, and a shard is gathered there. Everything else (np.memmap, a map-style dataset,
arrays too large for the device) is read ahead by threads, shard by shard. Both ways give the same numbers.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from samestep.devices import Device, same_device
from samestep.errors import Invalid, WrongType
from samestep.shards import Span

if TYPE_CHECKING:
    from samestep.backends import Backend

Numbers = NDArray[Any]
READ_AHEAD = 32  # shards
SHARE_OF_DEVICE = 0.25  # of a GPU's free memory that data may take and still be kept there


class Data:
    """Examples to train on and, if given, to test on.

    Each of the two is a pair of arrays (x, y), or a source: something with `len()` whose `[indices]` gives the pair of
    arrays for an array of indices, or a torch map-style dataset, which is read item by item.

    >>> Data(train=(np.zeros((6, 2), "float32"), np.arange(6)))
    Data(train=6 examples, test=None)
    """

    def __init__(self, train: Any, test: Any = None) -> None:
        self.train = examples("train", train)
        self.test = None if test is None else examples("test", test)

    def __repr__(self) -> str:
        return f"Data(train={len(self.train)} examples, test={f'{len(self.test)} examples' if self.test else None})"


class Arrays:
    """Examples as two arrays of one length."""

    def __init__(self, name: str, x: Any, y: Any) -> None:
        self.name = name
        for label, array in ((f"{name} x", x), (f"{name} y", y)):
            if not hasattr(array, "shape") or not hasattr(array, "__getitem__"):
                raise WrongType(f"{label} must be an array, got {type(array).__name__}: convert it with np.asarray")
            if len(array.shape) == 0:
                raise Invalid(f"{label} must have one row per example, got a single number")
        if len(x) != len(y):
            raise Invalid(f"{name}: x and y must be of one length, got {len(x)} examples and {len(y)} labels")
        if len(x) == 0:
            raise Invalid(f"{name}: there are no examples")
        if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray):
            same_device(x=x, y=y)
        self.x, self.y = x, y
        self.in_memory = not isinstance(x, np.memmap) and not isinstance(y, np.memmap)

    def __len__(self) -> int:
        return len(self.x)

    def read(self, indices: NDArray[np.int64]) -> tuple[Numbers, Numbers]:
        return _numbers(_rows(self.x, indices)), _labels(_numbers(_rows(self.y, indices)))

    def identity(self) -> dict[str, object]:
        """What tells this data from other data: sizes and, for arrays in memory, a hash of every byte."""
        about: dict[str, object] = {"examples": len(self), "x": list(self.x.shape), "y": list(self.y.shape)}
        about["type"] = str(self.x.dtype).removeprefix("torch.")
        if self.in_memory:
            digest = hashlib.sha256()
            for array in (self.x, self.y):
                digest.update(np.ascontiguousarray(_numbers(array)).data)
            about["sha256"] = digest.hexdigest()
        return about


class Source:
    """Examples read by index from something larger than memory."""

    in_memory = False

    def __init__(self, name: str, source: Any) -> None:
        self.name, self.source = name, source
        bases = {base.__module__ for base in type(source).__mro__}
        self.by_item = any(module.startswith("torch.utils.data") for module in bases)
        if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
            raise WrongType(
                f"{name} must be a pair (x, y) or a source with len() and [indices], got {type(source).__name__}"
            )
        if len(source) == 0:
            raise Invalid(f"{name}: there are no examples")

    def __len__(self) -> int:
        return len(self.source)

    def read(self, indices: NDArray[np.int64]) -> tuple[Numbers, Numbers]:
        try:
            x, y = self._items(indices.tolist()) if self.by_item else map(_numbers, self.source[indices])
            sizes = len(x), len(y)
        except (TypeError, ValueError, IndexError) as error:
            what = (
                f"{self.name}[i] must give a pair (x, y), of one shape for all i,"
                if self.by_item
                else (f"{self.name}[indices] must give a pair of arrays (x, y) for an array of indices,")
            )
            raise WrongType(
                f"{what} but {type(self.source).__name__} raised {type(error).__name__}: {error}"
            ) from error
        if sizes != (len(indices), len(indices)):
            raise Invalid(
                f"{self.name}[indices] was asked for {len(indices)} examples and gave {sizes[0]} in x and {sizes[1]} in y"
            )
        return x, _labels(y)

    def _items(self, indices: list[int]) -> tuple[Numbers, Numbers]:
        many = getattr(self.source, "__getitems__", None)
        pairs = [(x, y) for x, y in (many(indices) if many else map(self.source.__getitem__, indices))]
        return np.stack([_numbers(x) for x, _ in pairs]), np.stack([_numbers(y) for _, y in pairs])

    def identity(self) -> dict[str, object]:
        return {"examples": len(self), "source": type(self.source).__name__}


def examples(name: str, given: Any) -> Arrays | Source:
    if isinstance(given, (Arrays, Source)):
        return given
    if isinstance(given, (tuple, list)):
        if len(given) != 2:
            raise WrongType(f"{name} must be a pair (x, y), got {len(given)} things")
        if all(isinstance(part, tuple) for part in given):
            raise WrongType(f"{name} must be a pair (x, y), got two pairs: write Data(train=(x, y), test=(x, y))")
        return Arrays(name, *given)
    return Source(name, given)


def _numbers(array: Any) -> Numbers:
    """The array as NumPy; a tensor of a framework is read from its device."""
    if isinstance(array, (np.ndarray, np.generic, int, float)):
        return np.asarray(array)
    from samestep import devices

    return np.asarray(devices.get(array))


def _rows(array: Any, indices: NDArray[np.int64]) -> Any:
    if isinstance(array, np.ndarray):
        return array[indices]
    from samestep import backends

    backend = backends.of_array(array)
    return backend.take(array, backend.put(indices, backend.device_of(array)))


def _labels(y: Numbers) -> Numbers:
    return y.astype(np.int64) if y.dtype.kind in "iu" else y


def check_labels(name: str, y: Numbers, classes: int | None) -> None:
    """Labels must be whole numbers from 0 to classes - 1: a GPU kernel would not say so, but crash."""
    if classes is None:
        return
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= classes:
        raise Invalid(
            f"{name} y: labels must be from 0 to {classes - 1}, as the model gives {classes} scores, "
            f"got labels from {low} to {high}"
        )


class Feed:
    """Brings examples to the devices that compute; made once for a run and used for every pass."""

    def __init__(
        self, backend: Backend, examples: Arrays | Source, devices: Sequence[Device], classes: int | None
    ) -> None:
        self.backend, self.examples, self.classes = backend, examples, classes
        self.resident: dict[Device, tuple[Any, Any]] = {}
        self._readers: ThreadPoolExecutor | None = None
        if isinstance(examples, Arrays) and examples.in_memory:
            x, y = _numbers(examples.x), _labels(_numbers(examples.y))
            check_labels(examples.name, y, classes)
            if all(self._fits(device, x.nbytes + y.nbytes) for device in set(devices)):
                self.resident = {device: (backend.put(x, device), backend.put(y, device)) for device in set(devices)}
        if not self.resident:
            self._readers = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "samestep-read")

    def _fits(self, device: Device, size: int) -> bool:
        if device.kind == "cpu":
            return True  # it is there already
        total, used = self.backend.memory(device)
        return size <= (total - used) * SHARE_OF_DEVICE

    def start(self, order: NDArray[np.int64], spans: Sequence[Span]) -> Pass:
        """Begin a pass: `spans` are the shards, in the order in which they will be asked for, as ranges of `order`."""
        return Pass(self, order, spans)

    def read(self, indices: NDArray[np.int64]) -> tuple[Numbers, Numbers]:
        x, y = self.examples.read(indices)
        check_labels(self.examples.name, y, self.classes)
        return x, y

    def close(self) -> None:
        if self._readers:
            self._readers.shutdown(cancel_futures=True)


class Pass:
    """One pass over the examples in a given order."""

    def __init__(self, feed: Feed, order: NDArray[np.int64], spans: Sequence[Span]) -> None:
        self.feed, self.order, self.spans = feed, order, list(spans)
        index = getattr(feed.backend, "index", feed.backend.put)  # JAX would compile every slice of an array of its own
        self._order_on = {device: index(order, device) for device in feed.resident}
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
        readers = self.feed._readers
        assert readers is not None
        with self._lock:
            while self._next < len(self.spans) and (len(self._ahead) < READ_AHEAD or span not in self._ahead):
                wanted = self.spans[self._next]
                self._ahead[wanted] = readers.submit(self.feed.read, self.order[wanted[0] : wanted[1]])
                self._next += 1
            reading = self._ahead.pop(span)
        return reading.result()  # waits if the source is slower than the device
