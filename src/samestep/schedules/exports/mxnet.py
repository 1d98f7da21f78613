"""A schedule as an MXNet LRScheduler."""

from __future__ import annotations

from mxnet.lr_scheduler import LRScheduler  # type: ignore[import-not-found, unused-ignore]

from samestep.errors import Invalid
from samestep.schedules.algebra import Schedule, must_be_schedule


class Scheduler(LRScheduler):  # type: ignore[misc, unused-ignore]
    """The schedule as an mxnet.lr_scheduler.LRScheduler, for Trainer(..., "sgd", {"lr_scheduler": Scheduler(s)}).

    A pure function of the count; MXNet pickles it with its optimizers. They, and so gluon's Trainer, count an update before
    they ask for its rate: the first one asks for num_update = 1 and gets s(0). num_update = 0 is asked only when
    `learning_rate` is read before any update: s(0), too.

    >>> from samestep.schedules.kinds import poly
    >>> [Scheduler(poly(1.0, 4))(num_update) for num_update in (0, 1, 2)]
    [1.0, 1.0, 0.75]
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = must_be_schedule("mxnet.scheduler", "schedule", schedule)
        super().__init__(base_lr=schedule(0))

    @property
    def base_lr(self) -> float:
        return self.schedule(0)

    @base_lr.setter
    def base_lr(self, rate: float) -> None:
        """An optimizer that is given a learning_rate as well sets it here."""
        if rate != self.schedule(0):
            raise Invalid(f"mxnet.scheduler: the schedule sets the rate: leave learning_rate={rate} out")

    def __call__(self, num_update: int) -> float:
        return self.schedule(max(num_update - 1, 0))
