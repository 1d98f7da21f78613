"""One step, and one evaluation, over the replicas of a group.

g_s   = gradient of shard s, on whichever device holds it
G     = tree(g_0, ..., g_{S-1})
x     = optimizer(x, G / B, lr)      the same on every replica
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from samestep import draws
from samestep.exchange import exchange
from samestep.shards import Fold, Span, cut

if TYPE_CHECKING:
    from samestep.backends import Backend, Replica, Updater, Vector
    from samestep.data import Pass
    from samestep.optimizers import Optimizer


class FlatUpdater:
    """One of samestep's optimizers at work on one replica."""

    def __init__(self, optimizer: Optimizer, replica: Replica, backend: Backend) -> None:
        self.optimizer, self.replica = optimizer, replica
        self.state = {name: backend.zeros_like(replica.parameters) for name in optimizer.slots}

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def rate(self) -> None:
        return None

    def __call__(self, gradient: Vector, lr: float, t: int, z: Vector) -> None:
        parameters, self.state = self.optimizer.update(self.replica.parameters, gradient, self.state, lr, t, z)
        self.replica.assign(parameters)


class Group:
    """The replicas of a run, each with its optimizer."""

    def __init__(
        self,
        backend: Backend,
        replicas: Sequence[Replica],
        optimizer: Any,
        shards: int,
        clip: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.backend, self.replicas = backend, list(replicas)
        self.optimizer, self.shards, self.clip, self.seed = optimizer, shards, clip, seed
        self.noisy = bool(getattr(optimizer, "noisy", False))

    @cached_property
    def updaters(self) -> list[Updater]:
        """Made when they are first asked for: an evaluation needs none, and may be of another model than the optimizer's."""
        flat = hasattr(self.optimizer, "slots")
        return [
            FlatUpdater(self.optimizer, r, self.backend) if flat else self.backend.updater(self.optimizer, r)
            for r in self.replicas
        ]

    def step(self, pass_: Pass, spans: Sequence[Span], keys: Sequence[int], lr: float, t: int) -> Vector:
        """Make the update after t updates, from the shards of one batch.

        Returns [loss of each shard | hits of each shard], on a device.
        """
        n, examples = len(spans), spans[-1][1] - spans[0][0]
        folds: list[Fold[Vector]] = [Fold(n, self.backend.add) for _ in self.replicas]

        def compute(replica: Replica, fold: Fold[Vector], shard: int) -> None:
            x, y = pass_.shard(spans[shard], replica.device)
            fold.add((shard, shard + 1), replica.gradient(x, y, keys[shard], shard))

        tasks = []
        for (lo, hi), replica, fold in zip(cut(n, len(self.replicas)), self.replicas, folds, strict=True):
            tasks += [partial(compute, replica, fold, shard) for shard in range(lo, hi)]
        self.backend.map(tasks)
        devices = [replica.device for replica in self.replicas]
        totals = exchange(self.backend, [fold.parts for fold in folds], n, devices, self.replicas[0].size)
        z = self._noise(t) if self.noisy else None
        self.backend.map([partial(self._update, i, total, examples, lr, t, z) for i, total in enumerate(totals)])
        return self.backend.concat([totals[0][-2 * self.shards :]])  # a copy: the rest of the vector is let go

    def _update(self, i: int, total: Vector, examples: int, lr: float, t: int, z: Any) -> None:
        replica = self.replicas[i]
        gradient = total[: len(replica.parameters)] / examples
        if self.clip:
            gradient = self.backend.clip(gradient, self.clip)
        self.updaters[i](gradient, lr, t, None if z is None else self.backend.put(z, replica.device))
        replica.advance(total, examples)

    def _noise(self, t: int) -> NDArray[Any]:
        parameters = self.replicas[0].parameters
        return draws.normal(self.seed, t, len(parameters), str(parameters.dtype).rpartition(".")[2])

    def evaluate(self, pass_: Pass, spans: Sequence[Span], keys: Sequence[int]) -> NDArray[np.float64]:
        """[loss, hits] of every shard of a pass, each example once, all devices sharing the work. This waits."""

        def compute(replica: Replica, shard: int) -> Vector:
            x, y = pass_.shard(spans[shard], replica.device)
            return replica.evaluate(x, y, keys[shard])

        tasks = []
        for (lo, hi), replica in zip(cut(len(spans), len(self.replicas)), self.replicas, strict=True):
            tasks += [partial(compute, replica, shard) for shard in range(lo, hi)]
        rows = self.backend.map(tasks)
        home = self.replicas[0].device
        table: Any = self.backend.get(self.backend.concat([self.backend.place(row, home) for row in rows]))
        return np.asarray(table, np.float64).reshape(-1, 2)

    def fingerprints(self) -> list[Vector]:
        """The fingerprint of every replica."""
        return self.backend.map([replica.fingerprint for replica in self.replicas])
