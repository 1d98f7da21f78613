"""A schedule as an object of each framework: a scheduler that its own training loop takes, one file each.

Rates are computed in float64 by the schedule itself and rounded once, to float32, by the framework or in a table. A table
has the first `steps` rates, 4 bytes each, and stays at the last, s(steps - 1). Where the schedule ends, it goes up to there;
for one without an end, give as many steps as will be trained.
Only the file of a framework imports it; `Exports` gives every schedule the methods that lead there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from samestep.backends import find
from samestep.checks import whole
from samestep.errors import Invalid

if TYPE_CHECKING:
    from samestep.schedules.algebra import Schedule


def _file(name: str) -> Any:
    return find.imported(f"samestep.schedules.exports.{name}", find.ALSO.get(name, name))


def rate_table(where: str, schedule: Schedule, steps: int | None) -> NDArray[np.float32]:
    """The first `steps` rates; None: those up to the end of the schedule."""
    if steps is None and schedule.length is None:
        raise Invalid(f"{where}: {schedule} has no end: say how many steps will be trained, steps=...")
    n = (schedule.length or 0) + 1 if steps is None else whole(where, "steps", steps, 1)
    return schedule.values(n).astype(np.float32)


class Exports:
    """A schedule's ways into the frameworks."""

    def torch(self, optimizer: Any, last_epoch: int = -1) -> Any:
        """A torch.optim.lr_scheduler.LRScheduler for this optimizer: call its step() after every update."""
        return _file("torch").Scheduler(self, optimizer, last_epoch)

    def optax(self, steps: int | None = None) -> Any:
        """A function of the count, as optax has them, under jit too: a table of `steps` rates; the last is held.

        None: as many as it takes to the end of the schedule.
        """
        return _file("optax").schedule_fn(self, steps)

    def keras(self, steps: int | None = None) -> Any:
        """A keras LearningRateSchedule: a table of `steps` rates, None: up to the end of the schedule; the last is held."""
        return _file("keras").Scheduled(self, steps)

    def keras_callback(self) -> Any:
        """A Keras callback that sets the rate of every epoch."""
        return _file("keras").callback(self)

    def paddle(self, last_epoch: int = -1) -> Any:
        """A paddle.optimizer.lr.LRScheduler."""
        return _file("paddle").Scheduler(self, last_epoch)

    def mxnet(self) -> Any:
        """An mxnet.lr_scheduler.LRScheduler."""
        return _file("mxnet").Scheduler(self)
