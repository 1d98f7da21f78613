"""Examples: from arrays in memory or files, or from any source that can be read by index."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep import trees
from samestep.backends import arrays
from samestep.backends.find import frameworks_of, of_array
from samestep.checks import show, whole
from samestep.content import WHOLE
from samestep.data.base import Examples, sample, sha256
from samestep.data.convert import Pad, as_batch, halves, named, real
from samestep.data.origins import HUGGING_FACE, of, opened
from samestep.data.source import Source
from samestep.errors import Invalid, WrongType
from samestep.trees import Tree


class Data:
    """Examples to train on and, if given, to test on.

    Each of the two is a pair (x, y) or one dictionary with the labels in it, where x and y are arrays or tuples, lists and
    dictionaries of arrays; the name of a NumPy file; or a source: something with `len()` whose `[indices]` gives such a batch
    for an array of indices, a torch map-style dataset or DataLoader, a Hugging Face dataset, or a tf.data.Dataset.

    transform   f(x, y, rng) -> (x, y) for each training example as it is read; f(batch, rng) -> batch for dictionaries
    readers     how many processes read ahead, each with a copy of the source (threads, for arrays and thread_safe sources).
                0: the thread that runs the fit reads. None: one thread, or up to four if the source allows it
    pad         the number that fills shorter items up to the longest of their shard; or a number for each key
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

    def head(self, n: int) -> Data:
        """The first n training examples and the first n test examples, for a quick try.

        >>> Data(train=(np.zeros((6, 2)), np.arange(6))).head(4)
        Data(train=4 examples, test=None)
        """
        n, new = whole("head", "n", n, 1), copy.copy(self)
        new.train, new.test = self.train[:n], None if self.test is None else self.test[:n]
        return new


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

    def __repr__(self) -> str:
        about = (f"{label.strip()} {_kind(array)} {tuple(array.shape[1:])}" for label, array in named("", self.batch))
        return f"{self.name}: {len(self):,} examples, {', '.join(about)}"

    def _some(self, chosen: NDArray[np.int64], key: Any) -> Arrays:
        at_once = isinstance(key, slice) and key.step in (None, 1)  # then NumPy copies nothing
        rows = trees.mapped(lambda array: array[key] if at_once else _rows(array, chosen), self.batch)
        transform = self.transform.function if self.transform else False
        return Arrays(self.name, rows).with_settings(self.readers, self.pad, self.pad_to, transform)  # type: ignore[no-any-return]

    def fetch(self, indices: NDArray[np.int64]) -> Tree:
        return as_batch(self.name, trees.mapped(lambda array: _rows(array, indices), self.batch))

    def identity(self, varies: bool = False) -> dict[str, object]:
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
            return {**about, "sha256": sha256(self.batch)}
        return {**about, **sample(self, varies)}


def examples(name: str, given: Any) -> Arrays | Source:
    """Arrays or a source, from anything that `Data` takes."""
    if isinstance(given, (Arrays, Source)):
        same = copy.copy(given)
        same.name = name  # training examples may be a test set now
        return same
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
    if isinstance(given, np.ndarray) or (frameworks_of(given) and hasattr(given, "dtype")):
        raise WrongType(f"{name} must be a pair (x, y) or one dictionary of arrays, got an array alone: {name}=(x, y)")
    return Source(name, given)


def _kind(array: Any) -> str:
    """The type of an array of any framework, as NumPy names it."""
    return str(re.findall(r"\w+", str(array.dtype))[-1])


def _rows(array: Any, indices: NDArray[np.int64]) -> Any:
    if isinstance(array, np.ndarray):
        return array[indices]
    backend = of_array(array)
    return backend.take(array, backend.put(indices, backend.device_of(array)))
