"""Random numbers of a shard's own in PyTorch: dropout and other noise are drawn from key(seed, step, shard).

On a GPU one thread launches everything, so its generator is seeded before each shard. On the CPU several threads share
PyTorch's one generator, so there are three ways, each slower and more general than the one before, and all drawing the same
numbers:

    FREE    the model draws nothing
    OWN     every thread draws from a generator of its own, handed to each operation as it is called
    ALONE   one shard at a time, with the shared generator: torch.utils.checkpoint draws again in the backward pass, and
            some operations take no generator

The first shard is computed in the second way, alone, to see which one will do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.backends.workers import Access

T = TypeVar("T")
R = TypeVar("R")
FREE, OWN, ALONE = range(3)


class DrawnElsewhere(Exception):
    """A random number was drawn where a generator cannot be handed in."""


class OwnGenerator(TorchDispatchMode):
    """While active in a thread, every random operation of that thread draws from a generator of its own."""

    def __init__(self, key: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(key)
        self.forward, self.drawn = True, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            if not any(argument.name == "generator" for argument in func._schema.arguments):
                func = getattr(func.overloadpacket, "generator", None)
            if func is None or not self.forward:
                raise DrawnElsewhere
            self.drawn = True
            kwargs = {**kwargs, "generator": self.generator}
        return func(*args, **kwargs)


class Noise:
    """Gives the shards of one replica their random numbers."""

    _generator = Access()  # to PyTorch's shared generator, by all replicas

    def __init__(self, place: torch.device) -> None:
        self.place = place
        self.way: int | None = None

    def seed(self, key: int) -> None:
        """On a GPU: the numbers of the next shard are drawn from this key."""
        torch.default_generator.manual_seed(key)
        torch.cuda.default_generators[self.place.index or 0].manual_seed(key)

    def compute(self, key: int, forward: Callable[[], T], backward: Callable[[T], R]) -> R:
        """On the CPU: backward(forward()), with the numbers that both draw taken from this key."""
        if self.way is None:
            with self._generator.alone():
                if self.way is None:
                    result, drawn = self._own(key, forward, backward)
                    self.way = ALONE if result is None else OWN if drawn else FREE
                    if result is not None:
                        return result[0]
        shared = torch.default_generator
        if self.way == FREE:
            with self._generator.shared():
                before = shared.get_state()
                outcome = forward()
                if torch.equal(before, shared.get_state()):
                    return backward(outcome)
            self.way = OWN  # it draws after all
        if self.way == OWN:
            with self._generator.shared():
                result, _ = self._own(key, forward, backward)
            if result is not None:
                return result[0]
            self.way = ALONE
        with self._generator.alone():
            shared.manual_seed(key)
            return backward(forward())

    def _own(self, key: int, forward: Callable[[], T], backward: Callable[[T], R]) -> tuple[tuple[R] | None, bool]:
        """The result, or None if a number was drawn elsewhere; and whether any was drawn."""
        with OwnGenerator(key) as mode:
            try:
                outcome = forward()
                mode.forward = False
                return (backward(outcome),), mode.drawn
            except DrawnElsewhere:
                return None, True
