"""The lanes of a replica: copies of the model that compute shards, one for each thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

L = TypeVar("L", bound=Any)  # with a method `train`


class Lanes(Generic[L]):
    def __init__(self, make: Callable[[], L]) -> None:
        self._make, self._held = make, dict[int, L]()
        self._making = threading.Lock()

    def __call__(self, training: bool) -> L:
        """The lane of this thread, made when it is first asked for, in training mode or in evaluation mode."""
        thread = threading.get_ident()
        if thread not in self._held:
            with self._making:
                self._held[thread] = self._make()
        self._held[thread].train(training)
        return self._held[thread]

    def clear(self) -> None:
        self._held.clear()
