"""Several steps in one call, where a backend can: then the device does not wait for Python between them.

The bits are those of `Replicas.step`, one step after the other; nothing else may depend on which way was taken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samestep.data.feed import Batch, Pass

Vector = Any  # a flat vector of the framework
# Of some steps: what `Replicas.step` returns, and the fingerprints of the first replica after them. Both are on a device.
Made = tuple[Vector, Vector]


class Steps(ABC):
    """Makes steps of one group of replicas."""

    @abstractmethod
    def most(self, pass_: Pass) -> int:
        """How many steps over the examples of this pass one call may make; 0: none, they are made one by one."""

    @abstractmethod
    def __call__(self, batches: Sequence[Batch], rates: Sequence[float], t: int) -> list[Made]:
        """Make these updates, the first of them after t updates, on all replicas of this process."""

    def release(self) -> None:  # noqa: B027
        """Free what only making steps needs."""
