"""How shards that are computed side by side draw their noise, where the framework has one generator for all threads.

There are three ways, each slower and more general than the one before, and all draw the same numbers:

    FREE     the model draws nothing: nothing to do
    APART    the framework can keep the draws of threads apart, each in its own way
    ALONE    one shard at a time, with the shared generator set to the shard's key

The first shard is computed alone, to see which way will do. A model that turns out to draw more takes a later way.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")
FREE, APART, ALONE = range(3)
Result = tuple[R] | None  # None: it must be computed again, in a more general way


class Access:
    """Lets in many threads at a time, or one alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = self._asking = 0
        self.taken = False  # by one alone

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:  # held throughout: nobody comes in
            self._asking += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._inside == 0)
            self._asking, self.taken = self._asking - 1, True
            try:
                yield
            finally:
                self.taken = False

    def wait(self, task: Future[Any]) -> None:
        """Wait, inside, for a task of another thread; unless that one waits until nobody is inside."""
        task.add_done_callback(self._tell)
        with self._changed:
            self._changed.wait_for(lambda: task.done() or self._asking > 0)

    def _tell(self, task: Future[Any]) -> None:
        with self._changed:
            self._changed.notify_all()


class Noise(ABC):
    """Gives the shards of one replica their random numbers, on the CPU."""

    generator = Access()  # to the framework's one generator, for all replicas
    way: int | None = None

    def compute(self, key: int, forward: Callable[[], T], backward: Callable[[T], R]) -> R:
        """backward(forward()), with the numbers that both draw taken from this key."""
        if self.way is None:
            with self.generator.alone():
                if self.way is None:
                    self.way, result = self.first(key, forward, backward)
                    if result is not None:
                        return result[0]
        if self.way == FREE:
            with self.generator.shared():
                before = self.position()
                outcome = forward()
                if self.is_at(before):
                    gave = backward(outcome)
                    if self.is_at(before):
                        return gave
            # This shard drew, or one beside it: computed again, in a way that draws from the key, both are right.
            self.way = self.after_free
        if self.way == APART:
            result = self.apart(key, forward, backward)
            if result is not None:
                return result[0]
            self.way = ALONE
        with self.generator.alone():
            return self.alone(key, forward, backward)

    after_free = ALONE  # the way of a model that was believed to draw nothing

    @abstractmethod
    def first(self, key: int, forward: Callable[[], T], backward: Callable[[T], R]) -> tuple[int, Result[R]]:
        """The way that will do, found by computing the first shard, and the result of that shard."""

    @abstractmethod
    def position(self) -> Any:
        """The state of the shared generator, or whatever tells `is_at` whether anybody has drawn from it."""

    @abstractmethod
    def is_at(self, position: Any) -> bool: ...
    @abstractmethod
    def apart(self, key: int, forward: Callable[[], T], backward: Callable[[T], R]) -> Result[R]: ...
    @abstractmethod
    def alone(self, key: int, forward: Callable[[], T], backward: Callable[[T], R]) -> R: ...
