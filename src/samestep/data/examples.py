"""Examples: from arrays in memory, or from any source that can be read by index."""

from __future__ import annotations

import hashlib
import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.backends import arrays
from samestep.backends.find import frameworks_of, load, of_array
from samestep.content import WHOLE, Content
from samestep.errors import Invalid, WrongType

Numbers = NDArray[Any]
SAMPLE, AGAIN = 32, 4  # examples of a source or a large file that are hashed, and of them those that are read once more
READING = threading.RLock()  # for sources that are not thread-safe: one for all, as two may share a file


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
        self.name, self.thread_safe = name, True
        for label, array in ((f"{name} x", x), (f"{name} y", y)):
            if not hasattr(array, "shape") or not hasattr(array, "__getitem__"):
                raise WrongType(f"{label} must be an array, got {type(array).__name__}: convert it with np.asarray")
            if len(array.shape) == 0:
                raise Invalid(f"{label} must have one row per example, got a single number")
            real(label, array)
        if len(x) != len(y):
            raise Invalid(f"{name}: x and y must be of one length, got {len(x)} examples and {len(y)} labels")
        if len(x) == 0:
            raise Invalid(f"{name}: there are no examples")
        if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray):
            arrays.same_device(x=x, y=y)
        self.x, self.y = x, y
        self.in_memory = not isinstance(x, np.memmap) and not isinstance(y, np.memmap)

    def __len__(self) -> int:
        return len(self.x)

    def read(self, indices: NDArray[np.int64]) -> tuple[Numbers, Numbers]:
        return numbers(_rows(self.x, indices)), labels(numbers(_rows(self.y, indices)))

    def identity(self) -> dict[str, object]:
        """What tells this data from other data: sizes and a hash of every byte; of large files, of some examples."""
        about: dict[str, object] = {"examples": len(self), "x": list(self.x.shape), "y": list(self.y.shape)}
        about["type"] = str(self.x.dtype).removeprefix("torch.")
        if self.in_memory or self.x.nbytes + self.y.nbytes <= WHOLE:
            return {**about, "sha256": _sha256(self.x, self.y)}
        return {**about, **_sample(self)}


class Source:
    """Examples read by index from something larger than memory; by one thread at a time, unless it is `thread_safe`."""

    def __init__(self, name: str, source: Any) -> None:
        self.name, self.source, self.thread_safe = name, source, getattr(source, "thread_safe", False) is True
        self.by_item = any(base.__module__.startswith("torch.utils.data") for base in type(source).__mro__)
        single = isinstance(source, type) or getattr(source, "shape", None) == ()  # these only seem to have a length
        if single or not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
            raise WrongType(
                f"{name} must be a pair (x, y) or a source with len() and [indices], got {type(source).__name__}"
            )
        if len(source) == 0:
            raise Invalid(f"{name}: there are no examples")

    def __len__(self) -> int:
        return len(self.source)

    def read(self, indices: NDArray[np.int64]) -> tuple[Numbers, Numbers]:
        try:
            with nullcontext() if self.thread_safe else READING:
                x, y = self._items(indices.tolist()) if self.by_item else map(numbers, self.source[indices])
            n, of_x, of_y = len(indices), len(x), len(y)
        except (TypeError, ValueError, IndexError) as error:
            one = "[i] must give a pair (x, y), of one shape and type for all i"
            many = "[indices] must give a pair of arrays (x, y) for an array of indices"
            raised = f"{type(self.source).__name__} raised {type(error).__name__}: {error}"
            raise WrongType(f"{self.name}{one if self.by_item else many}, but {raised}") from error
        except Exception as error:
            if "SQLite objects created in a thread" not in str(error):
                raise
            raise Invalid(f"{self.name}: connect to SQLite with check_same_thread=False: a thread reads it") from error
        if (of_x, of_y) != (n, n):
            raise Invalid(f"{self.name}[indices] was asked for {n} examples and gave {of_x} in x and {of_y} in y")
        return real(f"{self.name} x", x), labels(real(f"{self.name} y", y))

    def _items(self, indices: list[int]) -> tuple[Numbers, Numbers]:
        many = getattr(self.source, "__getitems__", None)
        pairs = [(x, y) for x, y in (many(indices) if many else map(self.source.__getitem__, indices))]
        x, y = [numbers(x)[None] for x, _ in pairs], [labels(numbers(y))[None] for _, y in pairs]
        return np.concatenate(x, casting="no"), np.concatenate(y, casting="no")

    def identity(self) -> dict[str, object]:
        """What tells this data from other data: a version, if it has one, and a hash of some examples."""
        about: dict[str, object] = {"examples": len(self), "source": type(self.source).__name__}
        version = getattr(self.source, "version", None) or getattr(self.source, "_fingerprint", None)
        if isinstance(version, (str, int)):
            about["version"] = version
        before = self._attributes()
        about |= _sample(self)
        after = self._attributes()
        self._kept = [name for name, value in before.items() if after.get(name) == value]
        return about

    def settings(self) -> object:
        """The source for its code and settings: all but what reading changes, such as a cache, as `identity` has seen."""
        return [type(self.source), {name: getattr(self.source, name, None) for name in self._kept}]

    def _attributes(self) -> dict[str, str]:
        found = Content(_known)
        for name, value in getattr(self.source, "__dict__", {}).items():
            found.add(name, value)
        return found.parts


def _known(thing: Any, weights: bool) -> Any:
    """`content` of whichever framework an object is of."""
    frameworks = sorted(frameworks_of(thing))
    return load(frameworks[0]).content(thing, weights) if frameworks else None


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


def _sample(examples: Arrays | Source) -> dict[str, object]:
    """A hash of some examples; None if they are others when they are read again, so that nothing can be told."""
    chosen = np.unique(np.linspace(0, len(examples) - 1, SAMPLE).astype(np.int64))  # the same ones each time
    x, y = examples.read(chosen)
    again = examples.read(chosen[:AGAIN])
    return {"sample": _sha256(x, y) if _sha256(*again) == _sha256(x[:AGAIN], y[:AGAIN]) else None}


def _sha256(*parts: Any) -> str:
    digest = hashlib.sha256()
    for array in parts:
        digest.update(np.ascontiguousarray(numbers(array)).data)
    return digest.hexdigest()


def real(label: str, array: Any) -> Any:
    """Refuse texts, dates, objects and records. A type that NumPy does not know itself, such as bfloat16, is of numbers."""
    if isinstance(array, np.ndarray) and (array.dtype.kind in "USOMm" or array.dtype.type is np.void):
        raise WrongType(f"{label} must be numbers, got an array of {array.dtype}: convert it, or encode it as numbers")
    return array


def numbers(array: Any) -> Numbers:
    """The array as NumPy; a tensor of a framework is read from its device."""
    return np.asarray(array if isinstance(array, (np.ndarray, np.generic, int, float)) else arrays.get(array))


def _rows(array: Any, indices: NDArray[np.int64]) -> Any:
    if isinstance(array, np.ndarray):
        return array[indices]
    backend = of_array(array)
    return backend.take(array, backend.put(indices, backend.device_of(array)))


def labels(y: Numbers) -> Numbers:
    """Whole numbers as int64, whatever they came as."""
    return y.astype(np.int64) if y.dtype.kind in "iu" else y
