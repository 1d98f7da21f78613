"""Averages over the path of the weights. They often generalise better than the last weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from samestep.backends.base import Replica
from samestep.checks import BelowOne, Count, Steps, checked, one_of
from samestep.errors import Invalid


@dataclass(frozen=True)
class Average:
    """Which weights of the path are averaged, and how much each counts; see `swa`, `path_average` and `ema`."""

    kind: str
    start: int = 0
    every: int = 1
    unit: str = "epochs"


@dataclass(frozen=True)
class Exponential(Average):
    """An average that forgets; see `ema`."""

    decay: float = 0.999


def swa(start: Count, every: Count = 1, unit: Annotated[str, one_of("epochs", "steps")] = "epochs") -> Average:
    """Stochastic weight averaging: the plain mean of the weights after `start`, `start + every`, ... epochs or steps.

    Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization, 2018.

    >>> swa(15)
    Average(kind='swa', start=15, every=1, unit='epochs')
    """
    return Average("swa", **checked("swa", swa, locals()))


def path_average() -> Average:
    """The mean of all weights of the path, each weighted by its rate: x̄ = Σ ηₜ·xₜ / Σ ηₜ.

    The average for which the convergence of SGD on convex objectives is proved.

    >>> path_average()
    Average(kind='path', start=0, every=1, unit='epochs')
    """
    return Average("path")


def ema(decay: BelowOne = 0.999, start: Steps = 0) -> Exponential:
    """The exponential moving average of the weights after every step from step `start` on: x̄ ← x̄ + (x − x̄)(1 − decay).

    It begins with a copy of the first of them.

    >>> ema(0.99)
    Exponential(kind='ema', start=0, every=1, unit='steps', decay=0.99)
    """
    given = checked("ema", ema, locals())
    return Exponential("ema", given["start"], unit="steps", decay=given["decay"])


class Averager:
    """Keeps an average of one replica's weights, and of its buffers of real numbers, while it trains, if one is wanted."""

    def __init__(self, average: Average | None, replica: Replica, steps_per_epoch: int, max_epochs: int) -> None:
        average = average or Average("none")
        self.average, self.replica = average, replica
        self.total = 0.0  # how much all that was averaged so far counts
        self.vectors: list[Any] = []
        self.wanted = average.kind != "none"
        scale = steps_per_epoch if average.unit == "epochs" else 1
        self._start, self._every = average.start * scale, average.every * scale
        if self._start > steps_per_epoch * max_epochs:
            raise Invalid(f"{average.kind}: start={average.start} {average.unit} is after the end of the training")

    def before(self, lr: float) -> None:
        """Called before an update with this rate."""
        if self.average.kind == "path":
            self._add(lr)

    def after(self, t: int) -> None:
        """Called after an update, when t updates have been made."""
        if self.average.kind in ("swa", "ema") and t >= self._start and (t - self._start) % self._every == 0:
            self._add(1.0)

    def restore(self, total: float, tensors: Any) -> None:
        """Go on from the average that a checkpoint holds."""
        self.total = total
        self.vectors = self.replica.real_vectors_from(tensors) if tensors else []

    def _add(self, weight: float) -> None:
        if weight == 0:
            return
        self.total += weight
        now = self.replica.real_vectors()
        if not self.vectors:
            self.vectors = [vector * 1.0 for vector in now]
        else:
            share = 1 - self.average.decay if isinstance(self.average, Exponential) else weight / self.total
            self.vectors = [mean + (vector - mean) * share for mean, vector in zip(self.vectors, now, strict=True)]
