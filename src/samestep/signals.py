"""Signals during a fit: they never come between lines that belong together, and a run folder gets a checkpoint first.

Python raises KeyboardInterrupt between any two lines, also in a `finally`, and what that would have put back stays changed.
So a Guard holds interrupts back until it is left. They are `heard` where errors of others could be raised as well (in a
user's model, while waiting): there one is raised at once, and no second one after it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_guard: Guard | None = None  # the innermost one


def _here() -> bool:
    """Python handles signals in the main thread only."""
    return threading.current_thread() is threading.main_thread()


class Guard:
    """For the time of a `with`, interrupts are held back, except where they are `heard`."""

    _heard = _raised = _came = False  # now; so what follows only puts things back; one is held back

    def __enter__(self) -> None:
        global _guard
        self._before: Any = signal.getsignal(signal.SIGINT)
        if _here() and callable(self._before):  # else they are ignored
            signal.signal(signal.SIGINT, self._take)
            self._outer, _guard = _guard, self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        global _guard
        if _guard is self:
            _guard = self._outer
            signal.signal(signal.SIGINT, self._before)
            if self._came and not (kind and issubclass(kind, KeyboardInterrupt)):
                signal.raise_signal(signal.SIGINT)

    def _take(self, number: int, frame: Any) -> None:
        self._came = True
        if self._heard and not self._raised:
            self._came, self._raised = False, True
            self._before(number, frame)
            self._raised = False  # a handler of the user's own, which raises nothing

    def _switch(self, heard: bool) -> None:
        self._heard = heard
        if self._came:
            self._take(signal.SIGINT, None)


@contextmanager
def heard(now: bool = True) -> Iterator[None]:
    """Inside a Guard, for the time of a `with`: interrupts are heard, or (now=False) held back."""
    guard = (_here() and _guard) or Guard()  # or one that nobody asks
    before = guard._heard
    try:
        guard._switch(now)
        yield
    finally:
        guard._switch(before)


class Signals:
    """SIGINT asks the fit to stop after its step; a second one stops it at once. With a run folder, SIGTERM asks, too."""

    came = 0  # how often a SIGINT has asked, in all fits of this process: the command ends as one that was interrupted

    def __init__(self, folder: bool) -> None:
        self.number = 0  # the signal that came; 0: none
        self._before: dict[int, Any] = {}
        self._folder = folder

    def __enter__(self) -> Signals:
        for number in (signal.SIGTERM, signal.SIGINT) if _here() else ():
            before: Any = signal.getsignal(number)
            users = _guard._before if _guard and number == signal.SIGINT else before
            # Without a folder, only if the user has no handler, and the signal is not ignored, as it is in the background.
            if self._folder or users is signal.default_int_handler:
                self._before[number] = before
                signal.signal(number, self._ask)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.number == signal.SIGINT and kind and issubclass(kind, Exception):
            signal.raise_signal(signal.SIGINT)  # a fit that failed before it could stop does not make up for it

    def _ask(self, number: int, frame: Any) -> None:
        if number != signal.SIGINT or not self.number:
            self.number = number
            Signals.came += number == signal.SIGINT
        elif callable(before := self._before[number]):
            before(number, frame)
        else:
            signal.default_int_handler(number, frame)
