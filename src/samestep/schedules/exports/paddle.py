"""A schedule as a Paddle LRScheduler."""

from __future__ import annotations

from typing import Any

from paddle.optimizer.lr import LRScheduler  # type: ignore[import-not-found, unused-ignore]

from samestep.schedules.algebra import Schedule, must_be_schedule
from samestep.schedules.text import check_state


class Scheduler(LRScheduler):  # type: ignore[misc, unused-ignore]
    """The schedule as a paddle.optimizer.lr.LRScheduler, for SGD(learning_rate=Scheduler(s), ...): update t uses s(t).

    Call `step()` after each step of the optimizer. The rate is a function of `last_epoch` alone.

    >>> from samestep.schedules.kinds import poly
    >>> rate = Scheduler(poly(1.0, 4))
    >>> rate.step()
    >>> rate()
    0.75
    """

    def __init__(self, schedule: Schedule, last_epoch: int = -1) -> None:
        self.schedule = must_be_schedule("paddle.scheduler", "schedule", schedule)
        super().__init__(schedule(0), last_epoch)

    def get_lr(self) -> float:
        return self.schedule(self.last_epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, as plain values; Paddle's optimizers save it with their own state."""
        return {"schedule": self.schedule.to_json(), "last_epoch": self.last_epoch, "last_lr": self.last_lr}

    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a `state_dict` of the same schedule."""
        check_state("set_state_dict", self.schedule, state_dict, self.state_dict())
        self.last_epoch = int(state_dict["last_epoch"])
        self.last_lr = self.get_lr()

    set_dict = set_state_dict
