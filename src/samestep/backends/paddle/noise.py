"""Random numbers of a shard's own in Paddle: those that follow after paddle.seed(key(seed, step, shard)).

All threads share Paddle's one generator, and an operation cannot be given another (backends/noise.py says in which ways shards
can draw). Threads are kept apart in time: one forward pass at a time, backward passes side by side. That does not do
for recomputing (fleet.utils.recompute), which draws again in the backward pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paddle.base import core

from samestep.backends.noise import ALONE, APART, FREE, Noise, R, Result, T
from samestep.backends.replacing import noted

GENERATOR = core.default_cpu_generator()
# What Python code can ask for that all threads share: the generator itself, hooks on saved tensors.
SHARED = [(core, "default_cpu_generator"), (core.eager, "register_saved_tensors_hooks")]
TWIN = type(GENERATOR)()  # draws the same numbers between shards: where the two differ, a model has drawn


class PaddleNoise(Noise):
    _drawing = threading.Lock()

    def first(self, key: int, forward: Callable[[], T], backward: Callable[[T], R]) -> tuple[int, Result[R]]:
        with seeded(key), noted(SHARED) as touched:
            before = state()
            outcome = forward()
            after = state()
            result = backward(outcome)
            later = touched or state() != after
        return ALONE if later else FREE if after == before else APART, (result,)

    def position(self) -> None:
        """Nothing: the twin knows it. Reading the generator's state takes longer."""

    def is_at(self, position: None) -> bool:
        with self._drawing:
            return bool(GENERATOR.random() == TWIN.random())

    def apart(self, key: int, forward: Callable[[], T], backward: Callable[[T], R]) -> Result[R]:
        with self.generator.alone(), seeded(key):
            outcome = forward()
        return (backward(outcome),)

    def alone(self, key: int, forward: Callable[[], T], backward: Callable[[T], R]) -> R:
        with seeded(key):
            return backward(forward())


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """Draw from this key; afterwards, the generator and its twin stand at the same place."""
    GENERATOR.manual_seed(key)
    try:
        yield
    finally:
        GENERATOR.manual_seed(0)
        TWIN.manual_seed(0)


def state() -> str:
    """Where the generator stands: all words of its state, without the address that comes first."""
    return str(GENERATOR.get_state()).split(" ", 4)[4]
