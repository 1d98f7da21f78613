"""Each shard's own random numbers in PyTorch: dropout and other noise are drawn from key(seed, step, shard).

On a GPU one thread launches everything, so its generator is seeded before each shard. On the CPU several threads share
PyTorch's one generator (backends/noise.py has the ways). To keep threads apart, each has a generator of its own, which is
handed to every random operation. This does not work for torch.utils.checkpoint, which draws again in the backward pass, and
for the few operations that take no generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.backends.noise import ALONE, APART, FREE, Noise, R, Result, T


def seed_gpu(key: int, device: torch.device) -> None:
    """Draw the numbers of the next shard on a GPU from this key."""
    torch.default_generator.manual_seed(key)
    torch.cuda.default_generators[device.index or 0].manual_seed(key)


class DrawnElsewhere(Exception):
    """A random number was drawn where a generator cannot be handed in."""


@cache
def with_generator(func: Any) -> Any:
    """The overload of an operation that takes a generator and what this one takes; None if there is none."""

    def takes(of: Any) -> dict[str, str]:
        return {argument.name: str(argument.type) for argument in of._schema.arguments}

    overloads = (getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads())
    return next((one for one in overloads if takes(one) == takes(func) | {"generator": "Optional[Generator]"}), None)


def draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a random operation draws: attention without dropout does not."""
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    given = dict(zip(names, args, strict=False)) | kwargs
    return bool(given.get("dropout_p", 0.0))


class OwnGenerator(TorchDispatchMode):
    """While active in a thread, every random operation of that thread draws from a generator of its own."""

    def __init__(self, key: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(key)
        self.forward, self.drawn = True, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            torch.Tag.nondeterministic_seeded in func.tags
            and kwargs.get("generator") is None
            and draws(func, args, kwargs)
        ):
            func = with_generator(func)
            if func is None or not self.forward:
                raise DrawnElsewhere
            self.drawn = True
            kwargs = {**kwargs, "generator": self.generator}
        return func(*args, **kwargs)


class TorchNoise(Noise):
    def __init__(self, compiled: bool = False) -> None:
        self._compiled, self.after_free = compiled, ALONE if compiled else APART

    def first(self, key: int, forward: Callable[[], T], backward: Callable[[T], R]) -> tuple[int, Result[R]]:
        if self._compiled:  # what torch.compile has met in a mode it never compiles again
            with torch.compiler.set_stance("force_eager"):
                _, drawn = self._own(key, forward, backward)
            return ALONE if drawn else FREE, (self.alone(key, forward, backward),)
        result, drawn = self._own(key, forward, backward)
        return ALONE if result is None else APART if drawn else FREE, result

    def position(self) -> torch.Tensor:
        return torch.default_generator.get_state()

    def is_at(self, position: torch.Tensor) -> bool:
        return torch.equal(position, self.position())

    def apart(self, key: int, forward: Callable[[], T], backward: Callable[[T], R]) -> Result[R]:
        with self.generator.shared():
            result, _ = self._own(key, forward, backward)
            return result

    def alone(self, key: int, forward: Callable[[], T], backward: Callable[[T], R]) -> R:
        torch.default_generator.manual_seed(key)
        return backward(forward())

    def _own(self, key: int, forward: Callable[[], T], backward: Callable[[T], R]) -> tuple[Result[R], bool]:
        """The result, or None if a number was drawn elsewhere; and whether any was drawn."""
        with OwnGenerator(key) as mode:
            try:
                outcome = forward()
                mode.forward = False
                return (backward(outcome),), mode.drawn
            except DrawnElsewhere:
                return None, True
