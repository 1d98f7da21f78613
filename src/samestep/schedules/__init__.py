"""Learning rates: what a schedule is, the kinds there are, reading one from text, and the rates of a fit."""

from samestep.schedules import kinds
from samestep.schedules.algebra import Schedule
from samestep.schedules.kinds import *  # noqa: F403
from samestep.schedules.plateau import Plateau

__all__ = ["Plateau", "Schedule"]
__all__ += kinds.__all__
