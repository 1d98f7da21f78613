"""What all examples have in common, be they arrays or read from a source: slices, transforms, and what they are known by."""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.data.convert import Pad, halves, key_of, named, numbers, rows
from samestep.data.transform import Transform
from samestep.errors import Invalid, NotRepeatable, WrongType
from samestep.trees import Tree

SAMPLE = 32  # examples of a source or a large file that are hashed, and read twice
RANDOM = (
    "put what is random into Data(transform=f), where f(x, y, rng) draws from rng, or give up sameness with "
    "Trainer(deterministic=False)"
)


class Examples(ABC):
    """What arrays and sources have in common. Their batches are pairs of trees, or dictionaries.

    `examples[5]` is one of them as NumPy arrays, `examples[:100]` some of them, and `x, y = examples` are all, each without a
    transform.
    """

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
        new.pad_to = self.pad_to if pad_to == 1 else pad_to
        function = self.transform.function if transform is None and self.transform else transform  # False: without one
        new.transform = Transform(self.name, function, new.pad, new.pad_to) if callable(function) else None
        return new

    @abstractmethod
    def __len__(self) -> int: ...

    def __getitem__(self, key: Any) -> Any:
        chosen = np.arange(len(self))[key]  # NumPy tells which keys are wrong
        if np.ndim(chosen) == 0:
            return self.items(chosen[None])[0]
        if chosen.ndim > 1 or not len(chosen):
            raise Invalid(
                f"{self.name}[...] must choose at least one example, along one axis, got shape {chosen.shape}"
            )
        return self._some(chosen, key)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(batch := self.batch, Mapping):
            raise WrongType(f"{self.name} is one dictionary, not a pair (x, y): take data.{self.name}.batch")
        return iter(batch)

    batch: Tree  # all of them, as they were given

    @abstractmethod
    def _some(self, chosen: NDArray[np.int64], key: Any) -> Any:
        """Those that were chosen, of the same kind and with the same settings; `key` is how a user chose them."""

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
    def identity(self, varies: bool = False) -> dict[str, object]:
        """What tells this data from other data. varies: whether examples may change from one reading to the next."""

    def code(self) -> dict[str, Any]:
        """What was given with the data and decides, by its code and settings, what an example is. After `identity`."""
        return {} if self.transform is None else {"transform": self.transform.function}

    def check(self, batch_size: int, sampling: str) -> None:  # noqa: B027
        """Refuse examples that come with other batches than the Trainer's."""

    def _padding(self) -> dict[str, object]:
        return {} if self.pad is None else {"pad": self.pad, "pad_to": self.pad_to}


def sample(given: Examples, varies: bool) -> dict[str, object]:
    """A hash of some examples, if they are the same when they are read again. If they may vary, None: nothing can be told."""
    chosen = np.unique(np.linspace(0, len(given) - 1, SAMPLE).astype(np.int64))  # the same ones each time
    batch, again = given.fetch(chosen), given.fetch(chosen)
    pairs = zip(chosen.tolist(), rows(batch, len(chosen)), rows(again, len(chosen)), strict=True)
    differ = [i for i, one, other in pairs if sha256(one) != sha256(other)]
    if differ and not varies:
        raise NotRepeatable(f"example {differ[0]} of {given.name} is another one when it is read again: {RANDOM}")
    return {"sample": None if differ else sha256(batch)}


def sha256(batch: Tree) -> str:
    digest, found = hashlib.sha256(), dict(named("", batch))
    if found.keys() != {" x", " y"}:
        digest.update(repr(list(found)).encode())
    for array in found.values():
        digest.update(np.ascontiguousarray(numbers(array)).data)
    return digest.hexdigest()
