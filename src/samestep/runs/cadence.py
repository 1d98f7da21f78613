"""When a checkpoint is due, from what a user writes as `checkpoint_every`."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np

from samestep.checks import MOST, show, whole
from samestep.errors import Invalid, WrongType


class Cadence:
    """When a checkpoint is due: every so many steps, epochs or seconds.

    >>> Cadence("2 epochs", steps_per_epoch=235).every, Cadence(50, 235).every, Cadence("30 s", 235).seconds
    (470, 50, 30.0)
    """

    def __init__(self, every: int | str | None, steps_per_epoch: int) -> None:
        count, unit = parse(every) if every is not None else (0, "steps")
        self.every = int(count) * (steps_per_epoch if unit == "epochs" else 1) if unit != "seconds" else 0
        self.seconds = float(count) if unit == "seconds" else 0.0
        self._last = time.monotonic()

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` updates."""
        if self.seconds and time.monotonic() - self._last >= self.seconds:
            self._last = time.monotonic()
            return True
        return bool(self.every) and step % self.every == 0


UNITS = {"step": "steps", "epoch": "epochs", "s": "seconds", "second": "seconds", "min": "minutes", "minute": "minutes",
         "h": "hours", "hour": "hours"}  # fmt: skip
SECONDS = {"minutes": 60, "hours": 3600}


def parse(every: Any) -> tuple[float, str]:
    """What a user writes as `checkpoint_every`, as a number of steps, epochs or seconds.

    >>> parse(100), parse("1 epoch"), parse("5 min")
    ((100, 'steps'), (1, 'epochs'), (300.0, 'seconds'))
    """
    if isinstance(every, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", every)
        word = found[2] if found else ""
        unit = UNITS.get(word) or UNITS.get(word.removesuffix("s"), "" if word else "steps")
        if found and unit in SECONDS:
            count, unit = float(found[1]) * SECONDS[unit], "seconds"
        elif found:
            count = float(found[1])
        if found and unit == "seconds" and count > 0:
            return count, unit
        if found and unit in ("steps", "epochs") and found[1].isdecimal() and 1 <= count <= MOST:
            return int(count), unit
        raise Invalid(
            f"checkpoint_every must be a number of steps, or such as '1 epoch', '30 s' or '5 min', got {every!r}"
        )
    if isinstance(every, bool) or not isinstance(every, (int, np.integer)):
        raise WrongType(
            f"checkpoint_every must be a number of steps, or such as '1 epoch' or '30 s', or None, got {show(every)}"
        )
    return whole("", "checkpoint_every", every, 1), "steps"
