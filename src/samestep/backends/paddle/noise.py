"""Random numbers of a shard's own in Paddle: those that follow after paddle.seed(key(seed, step, shard)).

On a GPU one thread launches everything, so its generator is seeded before each shard. On the CPU all threads share Paddle's
one generator, so there are three ways, each slower and more general than the one before, and all drawing the same numbers:

    FREE    the model draws nothing: shards side by side
    AHEAD   it draws in the forward pass: one forward pass at a time, backward passes side by side
    ALONE   one shard at a time: recomputing (fleet.utils.recompute) draws again in the backward pass

The first shard is computed alone, to see which one will do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import paddle
from paddle.base import core

from samestep.backends.workers import Access

T = TypeVar("T")
R = TypeVar("R")
FREE, AHEAD, ALONE = range(3)
GENERATOR = core.default_cpu_generator()
TWIN = type(GENERATOR)()  # draws along with it between shards: if a model has drawn, the two are out of step


class Noise:
    """Gives the shards of one replica their random numbers."""

    _generator = Access()  # by all replicas
    _drawing = threading.Lock()

    def __init__(self, place: Any) -> None:
        self._place = place
        self.way: int | None = None

    def compute(self, key: int, forward: Callable[[], T], backward: Callable[[T], R]) -> R:
        """backward(forward()), with the numbers that both draw taken from this key."""
        if self._place.is_gpu_place():  # one thread launches everything
            index = self._place.gpu_device_id()
            paddle.set_device(f"gpu:{index}")
            core.default_cuda_generator(index).manual_seed(key)
            GENERATOR.manual_seed(key)
            return backward(forward())
        if self.way is None:
            with self._seeded(key):
                if self.way is None:
                    return self._first(forward, backward)
        if self.way == FREE:
            with self._generator.shared():
                outcome = forward()
                quiet = self._in_step()
            if quiet:
                return backward(outcome)
            self.way = ALONE  # it draws after all, and nobody has seen where
        with self._seeded(key):
            outcome = forward()
            if self.way == ALONE:
                return backward(outcome)
        return backward(outcome)

    def _first(self, forward: Callable[[], T], backward: Callable[[T], R]) -> R:
        before = position()
        with watched() as touched:
            outcome = forward()
            after = position()
            result = backward(outcome)
        later = touched or position() != after
        self.way = ALONE if later else FREE if after == before else AHEAD
        return result

    @contextmanager
    def _seeded(self, key: int) -> Iterator[None]:
        with self._generator.alone():
            GENERATOR.manual_seed(key)
            try:
                yield
            finally:
                GENERATOR.manual_seed(0)
                TWIN.manual_seed(0)

    def _in_step(self) -> bool:
        """Whether nobody has drawn from the generator since its twin was set to the same. To read its state takes longer."""
        with self._drawing:
            return bool(GENERATOR.random() == TWIN.random())


def position() -> str:
    """Where the generator stands: all words of its state, without the address that comes first."""
    return str(GENERATOR.get_state()).split(" ", 4)[4]


@contextmanager
def watched() -> Iterator[list[str]]:
    """Notes what Python code asks for that all threads share: the generator itself, hooks on saved tensors."""
    touched: list[str] = []
    spied = [(core, "default_cpu_generator"), (core.eager, "register_saved_tensors_hooks")]

    def noting(name: str, original: Any) -> Any:
        def call(*args: Any) -> Any:
            touched.append(name)
            return original(*args)

        return call

    before = [(module, name, getattr(module, name)) for module, name in spied]
    try:
        for module, name, original in before:
            setattr(module, name, noting(name, original))
        yield touched
    finally:
        for module, name, original in before:
            setattr(module, name, original)
