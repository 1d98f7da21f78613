"""Optimizers at work: what an Updater must do, and what those of every framework do alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from samestep.backends.base import Backend, Vector
from samestep.backends.layout import Tensors


class Updater(ABC):
    """An optimizer at work on one replica."""

    replica: Any
    fixed = False  # its rate is inside it, where no schedule can reach
    moved: Sequence[Any] = ()  # what a scheduler sets beside the rate, update by update

    def rate(self) -> float | None:
        """The rate that the optimizer came with, if it has one."""
        return None

    def read(self, scheduler: Any, n: int) -> tuple[list[float], Sequence[Any]]:
        """The rates of the first n updates of a scheduler of the framework, and what else it sets, as `moved`."""
        return self.replica.backend.rates(scheduler, n), ()

    @abstractmethod
    def follow(self, total: Vector, examples: int, lr: float, t: int, z: Vector) -> None:
        """Make the update after t updates, from the sum over all shards; z is noise, if the optimizer wants any."""

    @abstractmethod
    def tensors(self) -> Tensors:
        """Its state by name, on the host; it may share memory."""

    @abstractmethod
    def load(self, tensors: Tensors) -> None:
        """Take a state that `tensors` returned."""


class NativeUpdater(Updater):
    """An optimizer of the framework itself. Its repr is in the recipe, so it must say all that decides the update."""

    def __init__(self, replica: Any, clip: float) -> None:
        self.replica = replica
        backend: Backend = replica.backend
        self._mean = backend.compiled(Mean(backend, replica.layouts[0].size, clip))

    def follow(self, total: Vector, examples: int, lr: float, t: int, z: Vector) -> None:
        self.apply(self._mean(total, examples), lr, t)

    @abstractmethod
    def apply(self, gradient: Vector, lr: float, t: int) -> None:
        """Make the update from the gradient of the mean loss."""


@dataclass(frozen=True)
class Mean:
    """The gradient of the mean loss from the sum over all shards, clipped."""

    backend: Backend
    size: int  # of the gradient: it is the first part of the sum
    clip: float  # the largest norm, or 0
    in_place: bool = False  # whether the sum may be overwritten

    def __call__(self, total: Vector, examples: int) -> Vector:
        gradient = total[: self.size]
        if self.in_place:
            gradient /= examples
        else:
            gradient = gradient / examples
        return self.backend.clip(gradient, self.clip) if self.clip else gradient
