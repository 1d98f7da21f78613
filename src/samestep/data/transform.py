"""What is done to each training example when it is read, such as a random crop.

Its random numbers are drawn from (seed, epoch, index of the example) alone. So they are the same in whichever shard, thread
or process the example is read, and there is no state that a checkpoint would have to keep.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep import draws, trees
from samestep.data.convert import Pad, as_batch, halves, rows, stack
from samestep.errors import WrongType
from samestep.trees import Tree


@dataclass(frozen=True)
class Transform:
    """f(x, y, rng) -> (x, y), or f(batch, rng) -> batch for examples that are dictionaries; and how to stack the results."""

    name: str  # of the examples
    function: Callable[..., Any]
    pad: Pad = None
    pad_to: int = 1

    def read(self, batch: Tree, indices: NDArray[np.int64], seed: int, epoch: int) -> tuple[Tree, Tree]:
        """x and y of a batch of examples that have these indices."""
        return self.stacked(rows(batch, len(indices)), indices, seed, epoch)

    def stacked(self, items: Sequence[Tree], indices: NDArray[np.int64], seed: int, epoch: int) -> tuple[Tree, Tree]:
        wanted = ["batch", "rng"] if isinstance(items[0], Mapping) else ["x", "y", "rng"]
        try:
            inspect.signature(self.function).bind(*wanted)
        except (TypeError, ValueError) as error:
            if isinstance(error, TypeError):  # else it has no signature
                raise WrongType(f"{self.name}: transform must take ({', '.join(wanted)}), but: {error}") from None
        numbered = zip(items, indices.tolist(), strict=True)
        done = [self._one(item, draws.example(seed, epoch, index)) for item, index in numbered]
        try:
            return halves(stack(self.name, done, self.pad, self.pad_to))
        except WrongType:
            raise
        except TypeError as error:
            raise WrongType(f"{self.name}: transform must give one type for all examples, but: {error}") from None

    def _one(self, item: Tree, rng: np.random.Generator) -> Tree:
        item = trees.mapped(np.array, item)  # a copy: what is written to it stays here
        if isinstance(item, Mapping):
            given, right = self.function(item, rng), "(batch, rng) a dictionary"
            wrong = not isinstance(given, Mapping)
        else:
            given, right = self.function(*item, rng), "(x, y, rng) a pair (x, y)"
            wrong = not isinstance(given, (tuple, list)) or len(given) != 2
        if wrong:
            raise WrongType(f"{self.name}: transform must give for {right}, got {type(given).__name__}")
        return as_batch(self.name, given)
