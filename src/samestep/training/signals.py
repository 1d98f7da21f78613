"""Signals during a fit: SIGTERM and SIGINT ask it to stop after its step."""

from __future__ import annotations

import signal
import threading
from typing import Any


class Signals:
    """SIGTERM and SIGINT ask the fit to stop after its step; a second SIGINT stops it at once."""

    def __init__(self, wanted: bool) -> None:
        self.number = 0  # the signal that came; 0: none
        self._before: dict[int, Any] = {}
        self._wanted = wanted and threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Signals:
        if self._wanted:
            self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and self.number:
            raise KeyboardInterrupt
        self.number = number

    def end(self) -> None:
        """End as if nobody had caught the signal. It may have gone to another process instead of this one."""
        if self.number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + (self.number or signal.SIGTERM))
