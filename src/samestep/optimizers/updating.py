"""Applies one of samestep's optimizers to one replica: the update, from the sum over all shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from samestep.backends.base import Replica, Vector
from samestep.backends.updaters import Mean, Updater
from samestep.errors import Invalid
from samestep.optimizers.rules import SGD, AdaGrad, Adam, Descent, Optimizer, State, Updated

BLOCK = 1 << 16  # numbers at a time: few enough that intermediate results stay in a core's cache


@dataclass(frozen=True)
class Update:
    """An update as a function, which a backend may compile."""

    mean: Mean
    optimizer: Optimizer

    def __call__(self, x: Vector, state: State, total: Vector, examples: int, lr: float, t: int, z: Vector) -> Updated:
        gradient = self.mean(total, examples)
        if not is_ours(self.optimizer):
            return self.optimizer.update(x, gradient, state, lr, t, z)
        direction, state = self.optimizer.direction(x, gradient, state, t)
        x -= direction * lr  # in place where vectors can be written to
        return x, state


def is_ours(optimizer: Optimizer) -> TypeGuard[Descent]:
    """Whether it is exactly one of these: a derived one may look at t and the rate, which compiling forbids."""
    return type(optimizer) in (SGD, AdaGrad, Adam)


class FlatUpdater(Updater):
    """One of samestep's optimizers at work on one replica."""

    def __init__(self, optimizer: Optimizer, replica: Replica, clip: float, alone: bool) -> None:
        """`alone`: no other replica of this process gets the same sum, so it may be overwritten."""
        backend = replica.backend
        self.optimizer, self.replica = optimizer, replica
        for name, how in replica.own_settings(bool(getattr(optimizer, "weight_decay", 0))).items():
            what = f"{name} has {how}, which samestep's optimizers do not follow"
            raise Invalid(f"{what}: use one of {backend.name}, or leave it out")
        self.state = {name: backend.zeros_like(replica.parameters) for name in optimizer.slots}
        self._mean = Mean(backend, replica.layouts[0].size, clip, in_place=alone)
        update = Update(self._mean, optimizer)
        self._update = backend.compiled(update) if is_ours(optimizer) else update
        self._on_host = replica.device.kind == "cpu" and backend.in_memory(replica.parameters) is not None

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def follow(self, total: Vector, examples: int, lr: float, t: int, z: Vector) -> None:
        x = self.replica.parameters
        if self._on_host and is_ours(self.optimizer):
            self._follow_in_memory(self.optimizer, x, total, examples, lr, t)
        else:
            x, self.state = self._update(x, self.state, total, examples, lr, t, z)
        self.replica.assign(x)

    def _follow_in_memory(self, optimizer: Descent, x: Vector, total: Vector, examples: int, lr: float, t: int) -> None:
        """The update in the vectors' own memory, block by block. Every number is computed alone, so no bit changes."""
        if self._mean.clip:
            total, examples = self._mean(total, examples), 1
        numpy: Any = self.replica.backend.in_memory
        x, total, state = numpy(x), numpy(total), {name: numpy(slot) for name, slot in self.state.items()}
        change = np.empty(min(BLOCK, len(x)), x.dtype)
        for lo in range(0, len(x), BLOCK):
            part = slice(lo, min(lo + BLOCK, len(x)))
            slots = {name: slot[part] for name, slot in state.items()}
            gradient = total[part] if examples == 1 else total[part] / examples
            direction, slots = optimizer.direction(x[part], gradient, slots, t)
            here = change[: part.stop - lo]
            np.multiply(direction, lr, out=here)
            np.subtract(x[part], here, out=x[part])
            for name, slot in slots.items():
                state[name][part] = slot

    def tensors(self) -> dict[str, NDArray[Any]]:
        named = {slot: self.replica.named(vector) for slot, vector in self.state.items()}
        return {f"{slot}:{name}": tensor for slot, tensors in named.items() for name, tensor in tensors.items()}

    def load(self, tensors: dict[str, NDArray[Any]]) -> None:
        for slot in self.state:
            mine = {name.partition(":")[2]: t for name, t in tensors.items() if name.startswith(f"{slot}:")}
            self.state[slot] = self.replica.flat(mine)
