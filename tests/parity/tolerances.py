"""How closely a peer's rates must agree with samestep's, by kind of arithmetic; and the schedules every export is tried on.

The unit is the ulp of the peak: the distance to the next float at the highest rate of the peer. Where a peer means another
t (Keras drops after a boundary, MXNet counts from 1, timm from a step before), the tests say so; a tolerance never hides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from samestep.schedules.algebra import Schedule
from samestep.schedules.kinds import cosine, drops, geometric, one_cycle

STEPS = 400  # rates that are compared


class Tolerance(NamedTuple):
    ulps: float  # of the peak
    relative: float  # to the rate at each t
    dtype: type[np.floating[Any]]
    reason: str


TOLERANCES = {
    "equal": Tolerance(0, 0, np.float64, "the same operations in the same order: equal to the bit"),
    "equal in float32": Tolerance(0, 0, np.float32, "the peer only selects among given rates, in float32"),
    "one rounding": Tolerance(1, 0, np.float64, "the same closed formula, one operation in another order"),
    "two roundings": Tolerance(2, 0, np.float64, "the same closed formula, several operations in another order"),
    "float32": Tolerance(2, 0, np.float32, "the peer evaluates the whole formula in float32"),
    "recursion": Tolerance(
        0, 1e-12, np.float64, "the peer multiplies its last rate by a quotient: its error grows with t"
    ),
}


def agree(kind: str, theirs: Sequence[Any], ours: Schedule) -> None:
    """Compare what the peer gave at t = 0, 1, 2, ... with the schedule."""
    ulps, relative, dtype, reason = TOLERANCES[kind]
    got, expected = np.asarray(theirs, dtype), ours.values(len(theirs)).astype(dtype)
    assert got.min() < got.max(), "a constant rate shows nothing"
    excess = np.abs(got - expected) - (ulps * np.spacing(got.max()) + relative * expected)
    t = int(excess.argmax())
    assert excess[t] <= 0, f"t={t}: {got[t]!r}, samestep {expected[t]!r}; allowed {ulps} ulps, {relative}: {reason}"


EXPORTED: dict[str, Schedule] = {
    "cosine, warm-up": cosine(0.3, 40, end=0.01).warmup(10),
    "geometric": geometric(2, 0.9, floor=0.01),
    "drops": drops(0.5, [15, 30], 0.5),
    "one cycle": one_cycle(0.4, 50),
    "restarts": cosine(0.3, 10).restart(10, mult=2, decay=0.7),
    "in epochs": cosine(0.3, 8, end=0.01).warmup(2).in_epochs(7),
}
UPDATES = 60  # of a training loop: past the end of most of them


def float32(schedule: Schedule, n: int = UPDATES) -> list[np.float32]:
    """What an optimizer in float32 must have applied in its first n updates."""
    return list(schedule.values(n).astype(np.float32))
