"""Optimizers at work: what an Updater must do, and what those of every framework do alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from samestep.backends.base import Backend, Vector
from samestep.backends.layout import Tensors


@dataclass(frozen=True)
class Clamp:
    """Clipping by value: every number of the gradient is kept between -limit and limit."""

    limit: float


Clip = float | Clamp  # the largest norm, 0 for none; or clipping by value


class Updater(ABC):
    """An optimizer at work on one replica."""

    replica: Any
    fixed = ""  # if its rate is inside it, where no schedule can reach: what to do instead
    moved: Sequence[Any] = ()  # what a scheduler sets beside the rate, update by update

    def rate(self) -> float | None:
        """The rate that the optimizer came with, if it has one."""
        return None

    def read(self, scheduler: Any, n: int, unit: str = "step") -> tuple[list[float], Sequence[Any]]:
        """The first n rates of a scheduler of the framework, and what else it sets, as `moved`."""
        return self.replica.backend.rates(scheduler, n, unit), ()

    @abstractmethod
    def follow(self, total: Vector, over: Any, lr: float, t: int, z: Vector) -> None:
        """Make the update after t updates, from the sum over all shards; z is noise, if the optimizer wants any.

        The sum is to be divided by `over`: a number, or a vector of one number on the device. If that is zero, nothing changes.
        """

    def on_host(self, over: Any) -> float:
        """`over` as a number. This waits for the device if it is a vector there."""
        return over if isinstance(over, int) else float(self.replica.backend.get(over)[0])

    @abstractmethod
    def tensors(self) -> Tensors:
        """Its state by name, on the host; it may share memory."""

    @abstractmethod
    def load(self, tensors: Tensors) -> None:
        """Take a state that `tensors` returned."""


class NativeUpdater(Updater):
    """An optimizer of the framework itself. Its repr is in the recipe, so it must say all that decides the update."""

    def __init__(self, replica: Any, clip: Clip) -> None:
        self.replica = replica
        backend: Backend = replica.backend
        self._mean = backend.compiled(Mean(backend, replica.layouts[0].size, clip))

    def follow(self, total: Vector, over: Any, lr: float, t: int, z: Vector) -> None:
        if number := self.on_host(over):
            self.apply(self._mean(total, number), lr, t)

    @abstractmethod
    def apply(self, gradient: Vector, lr: float, t: int) -> None:
        """Make the update from the gradient of the mean loss."""


def in_ratio(lr: float, first: float, own: float, dtype: str) -> float:
    """The rate of a group that came with its `own`, when the rate of the first group goes from `first` to lr.

    >>> in_ratio(0.5, 0.25, 0.125, "float32"), in_ratio(rounded(0.3, "float32"), 0.3, 0.1, "float32")
    (0.25, 0.1)
    """
    if own == first:
        return lr
    return own if lr == rounded(first, dtype) else lr * (own / first)


def rounded(rate: float, dtype: str) -> float:
    """A rate as it is applied to weights of this type."""
    return float(np.dtype(dtype).type(rate))


@dataclass(frozen=True)
class Mean:
    """The gradient of the loss from the sum over all shards, clipped."""

    backend: Backend
    size: int  # of the gradient: it is the first part of the sum
    clip: Clip
    in_place: bool = False  # whether the sum may be overwritten
    spans: tuple[tuple[int, int, bool], ...] = ()  # lo, hi, and whether it is frozen: that has no part in the norm

    def __call__(self, total: Vector, over: Any) -> Vector:
        gradient = total[: self.size]
        if self.in_place:
            gradient /= over
        else:
            gradient = gradient / over
        if isinstance(self.clip, Clamp):
            return self.backend.clamp(gradient, self.clip.limit)
        if not (self.clip and self.spans):
            return self.backend.clip(gradient, self.clip) if self.clip else gradient
        moving = [gradient[lo:hi] for lo, hi, frozen in self.spans if not frozen]
        clipped, start, pieces = self.backend.clip(self.backend.concat(moving), self.clip), 0, list[Vector]()
        for lo, hi, frozen in self.spans:
            pieces.append(gradient[lo:hi] if frozen else clipped[start : start + hi - lo])
            start += 0 if frozen else hi - lo
        return self.backend.concat(pieces)
