"""Learning rates: what a schedule is, the kinds there are, reading one from text, and the rates of a fit."""

from samestep.schedules.algebra import Schedule
from samestep.schedules.kinds import *  # noqa: F403
from samestep.schedules.plateau import Plateau

__all__ = [  # noqa: F405
    "Plateau", "Schedule", "constant", "cosine", "drops", "exponential", "geometric", "inverse_power", "natural_exp",
    "one_cycle", "piecewise", "poly", "table", "triangle",
]  # fmt: skip
