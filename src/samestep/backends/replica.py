"""One whole copy of a model on one device: what a framework must provide, and what all do alike.

Weights and gradients are flat vectors, so the tree, the exchange between devices and the optimizers are written once, with
+, * and slices. What a shard gives is one flat vector, so that one addition and one transfer carry all of it:

    [ gradient | count x change of every buffer | loss of shard 0..S-1 | hits of shard 0..S-1 | more ]

The gradient and the losses are sums over the examples of the shard. A shard writes only its own loss and hits and leaves
the other slots zero: after the tree every replica knows every shard's loss, exactly, and a NaN can be traced to its shard.
`more` are the weight of a weighted loss, and sum and weight of every metric: of these, all know the sum over the shards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from samestep.backends.layout import Layout, Numbers, Tensors
from samestep.backends.losses import Measure
from samestep.devices import Device
from samestep.fingerprint import of_vectors
from samestep.shards import Span
from samestep.trees import Tree

if TYPE_CHECKING:
    from samestep.backends.base import Backend
    from samestep.data.feed import Batch
    from samestep.training.step import ReplicaSums

Vector = Any  # a flat vector of the framework
Task = Callable[[], Any]


class Replica(ABC):
    """One whole copy of the model on one device, as flat vectors: the trained weights, then the state.

    State is what forward passes change, such as running statistics: one vector for each type of number.
    """

    layouts: Sequence[Layout]  # of the weights, and of each vector of the state
    names: dict[str, str]  # each name of a tensor, in the user's order → its name in a layout or in `constants`

    def __init__(self, backend: Backend, measure: Any, device: Device, shards: int) -> None:
        self.backend, self.measure, self.device, self.shards = backend, Measure.of(measure), device, shards

    # What is computed

    slopes = True  # whether `gradient` is right with training=False
    side_by_side = False  # whether several Python threads compute shards of this replica

    @property
    def size(self) -> int:
        """The length of the vector that `gradient` returns."""
        return sum(layout.size for layout in self.layouts) + self.numbers

    @property
    def numbers(self) -> int:
        """How many numbers are in that vector after gradient and changes."""
        return 2 * self.shards + self.measure.more

    @property
    def bands(self) -> Sequence[Span]:
        """Ranges of that vector, in the order in which the backward pass is likely to finish them."""
        return [(0, self.size)]

    @abstractmethod
    def gradient(self, x: Tree, y: Tree, key: int, shard: int, training: bool = True) -> Vector:
        """The vector described above for one shard, with noise drawn from the key, in training mode or in evaluation mode."""

    def tasks(self, batch: Batch, shards: range, sums: ReplicaSums) -> list[Task]:
        """The tasks that compute these shards of a batch. They do not depend on each other."""

        def compute(shard: int) -> None:
            sums.add((shard, shard + 1), self.single(batch, shard))

        return [partial(compute, shard) for shard in shards]

    def replayed(self, batch: Batch, shard: int) -> Vector:
        """What `tasks` gives for one shard, from a recording if it has one. `single` has the same bits, by operations."""
        return self.single(batch, shard)

    def single(self, batch: Batch, shard: int) -> Vector:
        """What `tasks` computes for one shard."""
        x, y = batch.shard(shard, self.device)
        return self.gradient(x, y, batch.keys[shard], shard)

    def is_state(self, name: str | None) -> bool:
        """Whether the user has declared a frozen parameter as state."""
        return any(fnmatchcase(name or "", pattern) for pattern in self.backend.state)

    def inside(self, x: Tree, y: Tree) -> tuple[list[str], list[str]]:
        """Parameters that the loss depends on and that are not this replica's; hashes of more than one trace of the program."""
        return [], []

    @abstractmethod
    def evaluate(self, x: Tree, y: Tree, key: int) -> Vector:
        """[loss, hits, more] of these examples, summed, with the model in evaluation mode."""

    @abstractmethod
    def assign(self, parameters: Vector) -> None:
        """Take new weights."""

    state: Sequence[Any]  # what holds the state: of each type of number one, with its layout and `move`

    def advance(self, total: Vector, examples: int) -> None:
        """Apply the changes of the state, which are in the sum over all shards."""
        start = self.layouts[0].size
        for flat in self.state:
            flat.move(total[start : start + flat.layout.size] / examples)
            start += flat.layout.size

    @abstractmethod
    def fingerprint(self) -> Vector:
        """64 bits of all vectors, by integer arithmetic, left on the device: one number, or two of 32 bits."""

    def digest(self, vector: Vector) -> Vector:
        """64 bits of a vector that a shard gave, on the device or on the host."""
        return of_vectors([self.backend.get(vector)])

    def release(self) -> None:  # noqa: B027
        """Free what only computing needs; weights and state stay."""

    # Its vectors

    @property
    @abstractmethod
    def vectors(self) -> list[Vector]:
        """The weights and the state, in the order of the layouts."""

    @property
    def parameters(self) -> Vector:
        """The trained weights; `assign` writes to them."""
        return self.vectors[0]

    @abstractmethod
    def replace(self, vectors: Sequence[Vector]) -> None:
        """Take other values for all vectors."""

    def constants(self) -> Tensors:
        """The tensors that never change, by name, on the host."""
        return {}

    def own_settings(self, decays: bool) -> dict[str, str]:
        """Trained tensors that the framework's optimizers update in another way than the rest, maybe only in decay → how."""
        return {}

    def take_constants(self, tensors: Tensors) -> None:  # noqa: B027
        """Take other values for the constants that are among these tensors."""

    def to_vector(self, numbers: Numbers) -> Vector:
        """A vector on this replica's device."""
        return self.backend.copy(numbers, self.device)

    # By name, on the host

    def real_vectors(self) -> list[Vector]:
        """The vectors of real numbers. Averages are taken of these."""
        return [vector for vector, layout in zip(self.vectors, self.layouts, strict=True) if layout.real]

    def copies(self) -> list[Vector]:
        """Copies of all vectors: where they are if that is faster, else on the host."""
        return [np.array(self.backend.get(vector)) for vector in self.vectors]

    def tensors(self, vectors: Sequence[Vector] | None = None) -> Tensors:
        """All tensors by name, from this replica's own vectors, or from others: of all, or only those of real numbers.

        They may share memory with the replica: copy what you keep.
        """
        found, given = self.constants(), iter(self.vectors if vectors is None else vectors)
        every = vectors is None or len(vectors) == len(self.layouts)
        for layout, own in zip(self.layouts, self.vectors, strict=True):
            found |= layout.named(self.backend.get(next(given) if layout.real or every else own))
        return {name: found[known] for name, known in self.names.items()}

    def real_vectors_from(self, tensors: Tensors) -> list[Vector]:
        """The inverse of `tensors(vectors)`."""
        return [self.to_vector(layout.filled(tensors)) for layout in self.layouts if layout.real]

    def load(self, tensors: Tensors) -> None:
        """Take all tensors by name."""
        self.replace([self.to_vector(layout.filled(tensors)) for layout in self.layouts])
        self.take_constants(tensors)

    def named(self, vector: Vector) -> Tensors:
        """A vector in the layout of the weights (a gradient, a momentum) by their names."""
        return self.layouts[0].named(self.backend.get(vector))

    def flat(self, named: Tensors) -> Vector:
        """The inverse of `named`."""
        return self.to_vector(self.layouts[0].filled(named))

    def model(self, vectors: Sequence[Vector] | None = None) -> Any:
        """A model of the framework with these weights, for the user."""
        return self.model_of(self.tensors(vectors))

    @abstractmethod
    def model_of(self, tensors: Tensors) -> Any:
        """A copy of the user's model with these tensors."""
