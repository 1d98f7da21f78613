"""One of samestep's optimizers at work on one replica: the update, from the sum over all shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from samestep.optimizers.rules import SGD, AdaGrad, Adam, Descent

if TYPE_CHECKING:
    from samestep.backends import Backend, Replica, Vector
    from samestep.data.examples import Pass
    from samestep.optimizers.rules import Optimizer
    from samestep.shards import Span


def compiled(backend: Backend, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled where the backend wants that (Backend.compiled)."""
    made: Callable[..., Any] = getattr(backend, "compiled", lambda function: function)(function)
    return made


def mean(about: Any, total: Vector, examples: int) -> Vector:
    """The gradient of the mean loss from the sum over all shards, clipped; where the total is only ours, in its place."""
    backend, size, limit, ours = about
    gradient = total[:size]
    if ours:
        gradient /= examples
    else:
        gradient = gradient / examples
    return backend.clip(gradient, limit) if limit else gradient


def update(about: Any, x: Vector, state: Any, total: Vector, examples: int, lr: float, t: int, z: Vector) -> Any:
    *how, optimizer = about
    gradient = mean(how, total, examples)
    if getattr(type(optimizer), "update", None) is not Descent.update:  # a user's, or one derived from ours
        return optimizer.update(x, gradient, state, lr, t, z)
    change, state = optimizer.change(x, gradient, state, lr, t)
    x -= change  # in place where vectors can be written to
    return x, state


BLOCK = 1 << 16  # numbers: what is computed of them on the way to an update stays in a core's cache


def update_in_place(
    optimizer: Descent, x: NDArray[Any], state: Any, total: NDArray[Any], examples: int, lr: float, t: int
) -> None:
    """`update` in the vectors' own memory, block by block: every number is computed for itself, so no bit changes."""
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


class FlatUpdater:
    """One of samestep's optimizers at work on one replica."""

    def __init__(self, optimizer: Optimizer, replica: Replica, backend: Backend, clip: float, alone: bool) -> None:
        self.optimizer: Any = optimizer
        self.replica: Any = replica
        self.state = {name: backend.zeros_like(replica.parameters) for name in optimizer.slots}
        self._about = backend, len(replica.parameters), clip, alone, optimizer
        plain = type(optimizer) in (SGD, AdaGrad, Adam)  # others may look at t and the rate, which compiling forbids
        self._update = compiled(backend, update) if plain else update
        self.whole: bool = plain and not clip and getattr(replica, "in_one_go", lambda optimizer: False)(optimizer)
        # of a framework that lets NumPy work in the memory of its vectors
        self._in_memory = getattr(backend, "in_memory", None) if plain and replica.device.kind == "cpu" else None

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def rate(self) -> None:
        return None

    def follow(self, total: Vector, examples: int, lr: float, t: int, z: Vector) -> None:
        """Make the update, from the sum over all shards."""
        x, (*how, _), numpy = self.replica.parameters, self._about, self._in_memory
        if numpy:
            if how[2]:
                total, examples = mean(how, total, examples), 1
            state = {name: numpy(slot) for name, slot in self.state.items()}
            update_in_place(self.optimizer, numpy(x), state, numpy(total), examples, lr, t)
            self.replica.assign(x)
        else:
            parameters, self.state = self._update(self._about, x, self.state, total, examples, lr, t, z)
            self.replica.assign(parameters)

    def step(self, pass_: Pass, span: Span, key: int, lr: float, t: int) -> Vector:
        """A whole step of one shard, if it is `whole`: [loss, hits]."""
        numbers, self.state = self.replica.whole(pass_, span, key, self.optimizer, self.state, lr, t)
        return numbers

    def tensors(self) -> dict[str, NDArray[Any]]:
        named = {slot: self.replica.named(vector) for slot, vector in self.state.items()}
        return {f"{slot}:{name}": tensor for slot, tensors in named.items() for name, tensor in tensors.items()}

    def load(self, tensors: dict[str, NDArray[Any]]) -> None:
        for slot in self.state:
            mine = {name.partition(":")[2]: t for name, t in tensors.items() if name.startswith(f"{slot}:")}
            self.state[slot] = self.replica.flat(mine)
