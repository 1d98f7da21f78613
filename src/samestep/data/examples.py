"""Examples: from arrays in memory or files, or from any source that can be read by index."""

from __future__ import annotations

import copy
import hashlib
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep import trees
from samestep.backends import arrays
from samestep.backends.find import frameworks_of, load, of_array
from samestep.checks import show, whole
from samestep.content import WHOLE, Content
from samestep.data.convert import Pad, as_batch, halves, key_of, named, numbers, real, rows, stack
from samestep.data.origins import HUGGING_FACE, TensorFlow, by_item, check_loader, of, opened, unloaded
from samestep.data.transform import Transform
from samestep.errors import Invalid, SamestepError, WrongType
from samestep.trees import Tree

SAMPLE, AGAIN = 32, 4  # examples of a source or a large file that are hashed, and of them those that are read once more
READING = threading.RLock()  # for sources that are not thread-safe: one for all, as two may share a file


class Data:
    """Examples to train on and, if given, to test on.

    Each of the two is a pair (x, y) or one dictionary with the labels in it, where x and y are arrays or tuples, lists and
    dictionaries of arrays; the name of a NumPy file; or a source: something with `len()` whose `[indices]` gives such a batch
    for an array of indices, a torch map-style dataset or DataLoader, a Hugging Face dataset, or a tf.data.Dataset.

    transform   f(x, y, rng) -> (x, y) for each training example as it is read; f(batch, rng) -> batch for dictionaries
    readers     how many threads may read at a time; 0: the one that runs the fit; None: one, or several for arrays
    pad         what shorter arrays of a shard are filled up with, of items or after a transform: a number, or one for each key
    pad_to      fill up to a multiple of this length

    >>> Data(train=(np.zeros((6, 2), "float32"), np.arange(6)))
    Data(train=6 examples, test=None)
    """

    def __init__(
        self, train: Tree, test: Tree | None = None, *, transform: Callable[..., Tree] | None = None,
        readers: int | None = None, pad: Pad = None, pad_to: int = 1,
    ) -> None:  # fmt: skip
        if transform is not None and not callable(transform):
            raise WrongType(f"transform must be a function of (x, y, rng), got {show(transform)}")
        fillings = list(pad.values()) if isinstance(pad, Mapping) else [pad]
        if pad is not None and not all(isinstance(filling, (int, float, np.number)) for filling in fillings):
            raise WrongType(f"pad must be a number, or numbers by key, got pad={show(pad)}")
        pad = trees.mapped(lambda one: one.item() if isinstance(one, np.number) else one, pad)  # as recipes can hold it
        readers, pad_to = None if readers is None else whole("", "readers", readers), whole("", "pad_to", pad_to, 1)
        self.train = examples("train", train).with_settings(readers, pad, pad_to, transform)
        self.test = None if test is None else examples("test", test).with_settings(readers, pad, pad_to, False)
        if pad_to > 1 and self.train.pad is None:
            raise Invalid(f"pad_to={pad_to} needs pad, the number to fill up with, such as pad=0")
        if pad is not None and not any(part.by_item or part.transform for part in (self.train, self.test) if part):
            raise Invalid(f"pad={show(pad)} is for items read one by one, and these are whole batches: pad them first")

    def __repr__(self) -> str:
        return f"Data(train={len(self.train)} examples, test={f'{len(self.test)} examples' if self.test else None})"


class Examples(ABC):
    """What arrays and sources have in common. Their batches are pairs of trees, or dictionaries."""

    name: str
    thread_safe = False
    in_memory = False
    by_item = False  # whether items are stacked here
    readers: int | None = None
    pad: Pad = None
    pad_to = 1
    transform: Transform | None = None

    def with_settings(self, readers: int | None, pad: Pad, pad_to: int, transform: Any) -> Any:
        new = copy.copy(self)  # the same examples may be in other data
        new.readers, new.pad = self.readers if readers is None else readers, self.pad if pad is None else pad
        new.pad_to, new.thread_safe = self.pad_to if pad_to == 1 else pad_to, self.thread_safe or bool(readers)
        function = self.transform.function if transform is None and self.transform else transform  # False: without one
        new.transform = Transform(self.name, function, new.pad, new.pad_to) if callable(function) else None
        return new

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def fetch(self, indices: NDArray[np.int64]) -> Tree:
        """The batch of these examples, with NumPy arrays, as they are before a transform."""

    def items(self, indices: NDArray[np.int64]) -> list[Tree]:
        """These examples one by one, as they are before a transform."""
        return rows(self.fetch(indices), len(indices))

    def read(self, indices: NDArray[np.int64], seed: int = 0, epoch: int = 0) -> tuple[Tree, Tree]:
        """x and y of these examples; of dictionaries, both are the dictionary."""
        done = self.transform.stacked(self.items(indices), indices, seed, epoch) if self.transform else None
        x, y = done or halves(self.fetch(indices))
        if self.name == "train" and isinstance(self.pad, Mapping):  # test examples may lack what a transform makes
            keys = {key_of(label) for label, _ in named("", x if y is x else (x, y))}
            if not self.pad.keys() <= keys:
                raise Invalid(f"pad must name parts of train ({', '.join(sorted(keys))}), got pad={self.pad}")
        return x, y

    @abstractmethod
    def identity(self) -> dict[str, object]:
        """What tells this data from other data."""

    def code(self) -> dict[str, Any]:
        """What was given with the data and decides, by its code and settings, what an example is. After `identity`."""
        return {} if self.transform is None else {"transform": self.transform.function}

    def check(self, batch_size: int, sampling: str) -> None:  # noqa: B027
        """Refuse examples that come with other batches than the Trainer's."""

    def _padding(self) -> dict[str, object]:
        return {} if self.pad is None else {"pad": self.pad, "pad_to": self.pad_to}


class Arrays(Examples):
    """Examples as arrays of one length. Of a dictionary with the labels in it, x and y are both the dictionary."""

    thread_safe = True

    def __init__(self, name: str, batch: Tree) -> None:
        self.name, (self.x, self.y) = name, halves(batch)
        self.batch = batch
        found = dict(named(name, batch))
        for label, array in found.items():
            if isinstance(array, (Mapping, tuple, list)):
                raise WrongType(f"{label} must be an array, or hold arrays, got {show(array)}")
            ours = isinstance(array, (np.ndarray, np.generic)) or frameworks_of(array)
            if not ours or not hasattr(array, "shape") or not hasattr(array, "__getitem__"):
                whole = re.sub(r"(\[\d+\])+$", "", label)  # of a list of numbers, not each number
                kind = type(array).__name__ if whole == label else "list"
                how = "convert it with " + ("to_numpy()" if hasattr(array, "to_numpy") else "np.asarray")
                how = "pass one dataset alone, such as dataset['train']" if of(array, HUGGING_FACE) else how
                raise WrongType(f"{whole} must be an array, got {kind}: {how}")
            if len(array.shape) == 0:
                raise Invalid(f"{label} must have one row per example, got a single number")
            real(label, array)
        short = {label.removeprefix(name).strip(): array for label, array in found.items()}
        lengths = {label: len(array) for label, array in short.items()}
        if len(set(lengths.values())) > 1:
            if lengths.keys() == {"x", "y"}:
                told = f"x and y must be of one length, got {lengths['x']} examples and {lengths['y']} labels"
            else:
                two = " and ".join([*{n: f"{n} in {at}" for at, n in lengths.items()}.values()][:2])
                told = f"all arrays must be of one length, got {two} (pad is for items that are read one by one)"
            raise Invalid(f"{name}: {told}")
        if len(self) == 0:
            raise Invalid(f"{name}: there are no examples")
        if not all(isinstance(array, np.ndarray) for array in found.values()):
            arrays.same_device(**short)
        self.in_memory = not any(isinstance(array, np.memmap) for array in found.values())

    def __len__(self) -> int:
        return trees.length(self.x)

    def fetch(self, indices: NDArray[np.int64]) -> Tree:
        return as_batch(self.name, trees.mapped(lambda array: _rows(array, indices), self.batch))

    def identity(self) -> dict[str, object]:
        """What tells this data from other data: sizes and a hash of every byte; of large files, of some examples."""
        about: dict[str, object] = {"examples": len(self)}
        found = dict(named("", self.batch))
        kinds = {label: str(array.dtype).removeprefix("torch.") for label, array in found.items()}
        if found.keys() == {" x", " y"}:
            about |= {"x": list(self.x.shape), "y": list(self.y.shape), "type": kinds[" x"]}
        else:
            about["arrays"] = {label.strip(): [*array.shape, kinds[label]] for label, array in found.items()}
        about |= self._padding()
        if self.in_memory or sum(array.nbytes for array in found.values()) <= WHOLE:
            return {**about, "sha256": _sha256(self.batch)}
        return {**about, **_sample(self)}


class Source(Examples):
    """Examples read by index from something larger than memory; by one thread at a time, unless it is `thread_safe`."""

    def __init__(self, name: str, source: Any) -> None:
        if of(source, "tensorflow.python.data", "DatasetV2"):
            source = TensorFlow(name, source)
        self.name, (self.source, self.collate, self.loader) = name, unloaded(name, source)
        source = self.source
        self.thread_safe = getattr(source, "thread_safe", False) is True
        self.by_item = self.collate is None and (by_item(source) or self.loader is not None)
        single = isinstance(source, type) or getattr(source, "shape", None) == ()  # these only seem to have a length
        if single or not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
            told = f"{name} must be a pair (x, y) or a source with len() and [indices]"
            raise WrongType(f"{told}, got {type(source).__name__}")
        if len(source) == 0:
            raise Invalid(f"{name}: there are no examples")

    def __len__(self) -> int:
        return len(self.source)

    def fetch(self, indices: NDArray[np.int64]) -> Tree:
        with self._asking():
            if self.by_item:
                return stack(self.name, self._items(indices), self.pad, self.pad_to)
            batch = self._collated(indices) if self.collate else as_batch(self.name, self.source[indices])
            lengths = {label.strip(): len(array) for label, array in named("", batch)}
        if set(lengths.values()) != {len(indices)}:
            gave = [f"{n} in {label}" for label, n in lengths.items() if n != len(indices) or len(lengths) == 2]
            asked, told = f"was asked for {len(indices)} examples", " and ".join(gave[:4]) or "nothing"
            who = "its collate_fn" if self.collate else "[indices]"
            raise Invalid(f"{self.name}{': ' if self.collate else ''}{who} {asked} and gave {told}")
        return batch

    def items(self, indices: NDArray[np.int64]) -> list[Tree]:
        if not self.by_item:
            return super().items(indices)
        with self._asking():
            return self._items(indices)

    def _items(self, indices: NDArray[np.int64]) -> list[Tree]:
        items = self._untyped(indices)
        full = all(array.size for item in items for array in trees.leaves(item))
        return items if full else [self._typed(item) for item in items]

    def _collated(self, indices: NDArray[np.int64]) -> Tree:
        raw = self._raw(indices)
        try:
            batch = as_batch(self.name, self.collate(raw))
            list(map(len, trees.leaves(batch)))  # a single number has no length
            return batch
        except SamestepError:
            raise
        except (TypeError, ValueError, IndexError) as error:
            wanted = "its collate_fn must give a pair (x, y) or a dictionary"
            raise WrongType(f"{self.name}: {wanted}, but it raised {type(error).__name__}: {error}") from error

    def _untyped(self, indices: NDArray[np.int64]) -> list[Tree]:
        short = of(self.source, HUGGING_FACE)  # which gives Python's numbers for columns of any type
        return [as_batch(self.name, item, short) for item in self._raw(indices)]

    def _typed(self, item: Tree) -> Tree:
        types = (array.dtype if array.size else self._types.get(at, array.dtype) for at, array in named("", item))
        return trees.mapped(lambda array: array.astype(next(types), copy=False), item)

    @cached_property
    def _types(self) -> dict[str, Any]:
        """The type of each array, from the first of 1000 examples where it is not empty: an empty list has none."""
        types: dict[str, Any] = {}
        for i in np.unique(np.linspace(0, len(self) - 1, 1000).astype(np.int64)):  # whoever reads, and whichever shard
            found = dict(named("", self._untyped(np.array([i]))[0]))
            types = {label: array.dtype for label, array in found.items() if array.size} | types
            if found.keys() <= types.keys():
                break
        return types

    def _raw(self, indices: NDArray[np.int64]) -> list[Any]:
        many = getattr(self.source, "__getitems__", None)
        return list(many(indices.tolist()) if many else map(self.source.__getitem__, indices.tolist()))

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Ask the source, alone if it must be; what it does wrong is told in one line."""
        try:
            with nullcontext() if self.thread_safe else READING:
                yield
        except SamestepError:
            raise
        except (TypeError, ValueError, IndexError) as error:
            who = type(self.source).__name__
            wanted = f"[indices] must give a pair of arrays (x, y) for an array of indices, but {who}"
            if self.by_item or self.collate:
                wanted = f"[i] must give a pair (x, y), of one shape and type for all i, but {who}"
            raise WrongType(f"{self.name}{wanted} raised {type(error).__name__}: {error}") from error
        except Exception as error:
            if "SQLite objects created in a thread" not in str(error):
                raise
            how = "connect to SQLite with check_same_thread=False, or use Data(readers=0)"
            raise Invalid(f"{self.name}: {how}: a thread reads it") from error

    def check(self, batch_size: int, sampling: str) -> None:
        if self.loader:
            check_loader(self.name, self.loader, batch_size, sampling)

    def identity(self) -> dict[str, object]:
        """What tells this data from other data: a version, if it has one, and a hash of some examples."""
        about: dict[str, object] = {"examples": len(self), "source": type(self.source).__name__}
        version = getattr(self.source, "version", None) or getattr(self.source, "_fingerprint", None)
        if isinstance(version, (str, int)):
            about["version"] = version
        about |= self._padding()
        before = self._attributes()
        about |= _sample(self)
        after = self._attributes()
        self._kept = [name for name, value in before.items() if after.get(name) == value]
        return about

    def code(self) -> dict[str, Any]:
        """The source for its code and settings: all but what reading changes, such as a cache, as `identity` has seen."""
        settings = [type(self.source), {name: getattr(self.source, name, None) for name in self._kept}]
        collate = {f"collate_fn of {self.name}": self.collate} if self.collate else {}
        return {self.name: settings, **collate, **super().code()}

    def _attributes(self) -> dict[str, str]:
        found, given = Content(_known), getattr(self.source, "__dict__", {})
        if of(self.source, HUGGING_FACE):  # its version tells the rest, which may be a large file
            given = {name: value for name, value in given.items() if name.startswith("_format")}
        for name, value in given.items():
            found.add(name, value)
        return found.parts


def _known(thing: Any, weights: bool) -> Any:
    """`content` of whichever framework an object is of."""
    frameworks = sorted(frameworks_of(thing))
    return load(frameworks[0]).content(thing, weights) if frameworks else None


def examples(name: str, given: Any) -> Arrays | Source:
    """Arrays or a source, from anything that `Data` takes."""
    if isinstance(given, (Arrays, Source)):
        return given
    given = opened(name, given)
    if isinstance(given, Mapping):
        return Arrays(name, given)
    if isinstance(given, (tuple, list)):
        if len(given) != 2:
            raise WrongType(f"{name} must be a pair (x, y), got {len(given)} things")
        lengths = [{len(leaf) for leaf in trees.leaves(part) if getattr(leaf, "shape", ())} for part in given]
        if all(isinstance(part, tuple) for part in given) and lengths[0] != lengths[1] and len(lengths[0]) == 1:
            raise WrongType(f"{name} must be a pair (x, y), got two pairs: write Data(train=(x, y), test=(x, y))")
        return Arrays(name, tuple(given))
    if isinstance(given, np.memmap):
        raise WrongType(f"{name} must be a pair (x, y) or one dictionary of arrays, got an array alone")
    return Source(name, given)


def _sample(given: Examples) -> dict[str, object]:
    """A hash of some examples; None if they are others when they are read again, so that nothing can be told."""
    chosen = np.unique(np.linspace(0, len(given) - 1, SAMPLE).astype(np.int64))  # the same ones each time
    batch = given.fetch(chosen)
    again, once = given.fetch(chosen[:AGAIN]), trees.mapped(lambda array: array[:AGAIN], batch)
    if [a.shape for a in trees.leaves(again)] != [a.shape for a in trees.leaves(once)]:  # filled up to another longest
        once = given.fetch(chosen[:AGAIN])
    return {"sample": _sha256(batch) if _sha256(again) == _sha256(once) else None}


def _sha256(batch: Tree) -> str:
    digest, found = hashlib.sha256(), dict(named("", batch))
    if found.keys() != {" x", " y"}:
        digest.update(repr(list(found)).encode())
    for array in found.values():
        digest.update(np.ascontiguousarray(numbers(array)).data)
    return digest.hexdigest()


def _rows(array: Any, indices: NDArray[np.int64]) -> Any:
    if isinstance(array, np.ndarray):
        return array[indices]
    backend = of_array(array)
    return backend.take(array, backend.put(indices, backend.device_of(array)))
