"""A source: examples that are read by index, as they are needed, from something that may be larger than memory."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep import trees
from samestep.backends.find import frameworks_of, load
from samestep.content import Content
from samestep.data.base import Examples, sample, sha256
from samestep.data.convert import as_batch, named, stack
from samestep.data.origins import HUGGING_FACE, TensorFlow, by_item, check_loader, of, unloaded
from samestep.errors import Invalid, SamestepError, WrongType, place, told
from samestep.trees import Tree

READING = threading.RLock()  # for sources that are not thread-safe: one for all, as two may share a file


class Source(Examples):
    """Examples read by index from something larger than memory; by one thread at a time, unless it is `thread_safe`."""

    chosen: NDArray[np.int64] | None = None  # indices, if not all examples of the source are in it

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
        return len(self.source if self.chosen is None else self.chosen)

    def __repr__(self) -> str:
        return f"{self.name}: {len(self):,} examples, read from {type(self.source).__name__}"

    @property
    def batch(self) -> Tree:
        return self.fetch(np.arange(len(self)))

    def _some(self, chosen: NDArray[np.int64], key: Any) -> Source:
        new = copy.copy(self)
        vars(new).pop("_types", None)
        new.chosen = chosen if self.chosen is None else self.chosen[chosen]
        return new

    def _asked(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The indices that the source knows these examples by."""
        return indices if self.chosen is None else self.chosen[indices]

    def fetch(self, indices: NDArray[np.int64]) -> Tree:
        with self._asking():
            if self.by_item:
                return stack(self.name, self._items(indices), self.pad, self.pad_to)
            batch = self._collated(indices) if self.collate else as_batch(self.name, self.source[self._asked(indices)])
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
            raise WrongType(f"{self.name}: {wanted}, but it raised {told(error)}") from None

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
        asked = self._asked(indices).tolist()
        found = list(many(asked)) if many else [self.source[i] for i in asked]
        if len(found) != len(asked):
            raise Invalid(f"{self.name}: __getitems__ was asked for {len(asked)} examples and gave {len(found)}")
        return found

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Ask the source, alone if it must be; what it does wrong is told in one line."""
        try:
            with nullcontext() if self.thread_safe else READING:
                yield
        except SamestepError:
            raise
        except (TypeError, ValueError, IndexError) as error:
            if (self.by_item or self.collate) and place(error):
                raise  # the user's own code failed: an item is not asked for in any unusual way
            who = type(self.source).__name__
            wanted = f"[indices] must give a pair of arrays (x, y) for an array of indices, but {who}"
            if self.by_item or self.collate:
                wanted = f"[i] must give a pair (x, y), of one shape and type for all i, but {who}"
            raise WrongType(f"{self.name}{wanted} raised {told(error)}") from None
        except Exception as error:
            if "SQLite objects created in a thread" not in str(error):
                raise
            how = "connect to SQLite with check_same_thread=False, or use Data(readers=0)"
            raise Invalid(f"{self.name}: {how}: a thread reads it") from None

    def check(self, batch_size: int, sampling: str) -> None:
        if self.loader:
            check_loader(self.name, self.loader, batch_size, sampling)

    def identity(self, varies: bool = False) -> dict[str, object]:
        """What tells this data from other data: a version, if it has one, and a hash of some examples."""
        about: dict[str, object] = {"examples": len(self), "source": type(self.source).__name__}
        version = getattr(self.source, "version", None) or getattr(self.source, "_fingerprint", None)
        if isinstance(version, (str, int)):
            about["version"] = version
        if self.chosen is not None:
            about["chosen"] = sha256((self.chosen, self.chosen[:0]))
        about |= self._padding()
        before = self._attributes()
        about |= sample(self, varies)
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
