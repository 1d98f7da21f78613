"""Applies one of samestep's optimizers to one replica: the update, from the sum over all shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from samestep.backends.base import Replica, Vector
from samestep.backends.updaters import Clip, Mean, Updater
from samestep.errors import Invalid
from samestep.optimizers.grouping import Groups, Segment, segments_of
from samestep.optimizers.rules import SGD, AdaGrad, Adam, Descent, Optimizer, State, Updated

BLOCK = 1 << 16  # numbers at a time: few enough that intermediate results stay in a core's cache


@dataclass(frozen=True)
class Update:
    """An update as a function, which a backend may compile."""

    mean: Mean
    optimizer: Optimizer
    segments: tuple[Segment, ...] = ()  # if there are groups
    weighted: bool = False  # over a weight, a vector of one number: if that is zero, nothing changes
    stays: bool = False  # the results are written where x and the state are: a recorded step knows where that is

    def __call__(self, x: Vector, state: State, total: Vector, over: Any, lr: float, t: int, z: Vector) -> Updated:
        gradient, backend = self.mean(total, over), self.mean.backend
        if self.weighted:
            new, slots = self._moved(x * 1, gradient, state, lr, t, z)  # of a copy: it may have to stay as it was
            new, slots = backend.choose(over, new, x), {k: backend.choose(over, slots[k], state[k]) for k in slots}
        else:
            new, slots = self._moved(x, gradient, state, lr, t, z)
        if self.stays:
            return backend.assign(x, new), {name: backend.assign(state[name], slot) for name, slot in slots.items()}
        return new, slots

    def _moved(self, x: Vector, gradient: Vector, state: State, lr: float, t: int, z: Vector) -> Updated:
        if not self.segments:
            return _updated(self.optimizer, x, gradient, state, lr, t, z)
        parts = list[Updated]()
        for one in self.segments:
            new: Updated = x[one.part], {name: slot[one.part] for name, slot in state.items()}
            if not one.frozen:
                noise = None if z is None else z[one.part]
                new = _updated(one.optimizer, new[0], gradient[one.part], new[1], lr * one.lr_scale, t, noise)
            parts.append(new)
        concat = self.mean.backend.concat
        return concat([x for x, _ in parts]), {name: concat([slots[name] for _, slots in parts]) for name in state}


def _updated(optimizer: Optimizer, x: Vector, g: Vector, state: State, lr: float, t: int, z: Vector) -> Updated:
    if not is_ours(optimizer):
        return optimizer.update(x, g, state, lr, t, z)
    direction, state = optimizer.direction(x, g, state, t)
    x -= direction * lr  # in place where vectors can be written to
    return x, state


def is_ours(optimizer: Optimizer) -> TypeGuard[Descent]:
    """Whether it is exactly one of these: a derived one may look at t and the rate, which compiling forbids."""
    return type(optimizer) in (SGD, AdaGrad, Adam)


class FlatUpdater(Updater):
    """One of samestep's optimizers at work on one replica."""

    def __init__(
        self,
        optimizer: Optimizer,
        replica: Replica,
        clip: Clip,
        alone: bool,
        groups: Groups | None = None,
        weighted: bool = False,
    ) -> None:
        """`alone`: no other replica of this process gets the same sum, so it may be overwritten."""
        backend, size = replica.backend, replica.layouts[0].size
        self.optimizer, self.replica = optimizer, replica
        segments = segments_of(replica, optimizer, groups) if groups else ()
        self._segments = segments or (Segment(0, size, optimizer),)
        decays = any(bool(getattr(one.optimizer, "weight_decay", 0)) for one in self._segments)
        for name, how in replica.own_settings(decays).items():
            what = f"{name} has {how}, which samestep's optimizers do not follow"
            raise Invalid(f"{what}: use one of {backend.name}, or leave it out")
        self.state = {name: backend.zeros_like(replica.parameters) for name in optimizer.slots}
        spans = tuple((one.lo, one.hi, one.frozen) for one in segments)
        self._mean = Mean(backend, size, clip, alone, spans if any(one.frozen for one in segments) else ())
        update = Update(self._mean, optimizer, segments, weighted, stays=replica.device.kind == "cuda")
        self._update = backend.compiled(update) if is_ours(optimizer) else update
        self._on_host = replica.device.kind == "cpu" and backend.in_memory(replica.parameters) is not None

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def rate(self) -> float:
        return self.optimizer.default_lr

    def follow(self, total: Vector, over: Any, lr: float, t: int, z: Vector) -> None:
        x = self.replica.parameters
        if self._on_host and is_ours(self.optimizer):
            if number := self.on_host(over):
                self._follow_in_memory(x, total, number, lr, t)
        elif is_ours(self.optimizer):
            backend, device = self.replica.backend, self.replica.device
            rate, made = backend.scalar(lr, device), backend.scalar(t, device)
            x, self.state = self._update(x, self.state, total, over, rate, made, z)
        else:
            x, self.state = self._update(x, self.state, total, over, lr, t, z)
        self.replica.assign(x)

    def _follow_in_memory(self, x: Vector, total: Vector, over: float, lr: float, t: int) -> None:
        """The update in the vectors' own memory, block by block. Every number is computed alone, so no bit changes."""
        if self._mean.clip:
            total, over = self._mean(total, over), 1
        numpy: Any = self.replica.backend.in_memory
        x, total, state = numpy(x), numpy(total), {name: numpy(slot) for name, slot in self.state.items()}
        change, mean = np.empty((2, min(BLOCK, len(x))), x.dtype)
        blocks = [(one, lo) for one in self._segments if not one.frozen for lo in range(one.lo, one.hi, BLOCK)]
        for own, lo in blocks:
            part, rule = slice(lo, min(lo + BLOCK, own.hi)), cast(Descent, own.optimizer)
            slots = {name: slot[part] for name, slot in state.items()}
            gradient = total[part] if over == 1 else np.divide(total[part], over, out=mean[: part.stop - lo])
            direction, slots = rule.direction(x[part], gradient, slots, t)
            here = change[: part.stop - lo]
            np.multiply(direction, lr * own.lr_scale, out=here)
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
