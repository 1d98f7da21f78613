"""A schedule as a Keras LearningRateSchedule, one rate a step, or as a callback, one rate an epoch."""

from __future__ import annotations

from typing import Any

import keras  # type: ignore[import-not-found, unused-ignore]

from samestep.errors import Invalid
from samestep.schedules.algebra import Schedule, must_be_schedule
from samestep.schedules.exports import rate_table
from samestep.schedules.text import from_json


@keras.saving.register_keras_serializable(package="samestep")
class Scheduled(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc, unused-ignore]
    """The schedule for a Keras optimizer, SGD(learning_rate=Scheduled(s, steps)), eager, compiled or in `fit`.

    A table of `steps` rates (None: up to the end). With gradient_accumulation_steps=k Keras counts the parts of a step: use
    s.every(k), and k times the steps. Import this module before a saved model is loaded.

    >>> from samestep.schedules.kinds import poly
    >>> [float(Scheduled(poly(1.0, 4), 4)(step)) for step in (0, 1, 3, 9)]
    [1.0, 0.75, 0.25, 0.25]
    """

    def __init__(self, schedule: Schedule, steps: int | None = None) -> None:
        super().__init__()
        self.schedule = must_be_schedule("keras.schedule", "schedule", schedule)
        self.table = rate_table("keras.schedule", schedule, steps)
        self.steps = len(self.table)

    def __call__(self, step: Any) -> Any:
        index = keras.ops.clip(keras.ops.convert_to_tensor(step), 0, self.steps - 1)
        return keras.ops.take(keras.ops.convert_to_tensor(self.table), keras.ops.cast(index, "int32"))

    def get_config(self) -> dict[str, Any]:
        return {"schedule": self.schedule.to_json(), "steps": self.steps}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Scheduled:
        return cls(from_json(config["schedule"]), config["steps"])


def callback(schedule: Schedule) -> keras.callbacks.Callback:
    """A Keras callback that sets the rate at the beginning of each epoch: s(e) through epoch e, also with initial_epoch.

    For schedules `.in_epochs()`, and for those whose t is meant to be the epoch.

    >>> from samestep.schedules.kinds import poly
    >>> callback(poly(1.0, 4).in_epochs()).schedule(1, 0.0)
    0.75
    """
    schedule = must_be_schedule("keras.callback", "schedule", schedule)
    if schedule.unit == "steps" and schedule._epochs():
        raise Invalid("keras.callback: sets one rate an epoch, but the schedule counts steps: use .in_epochs()")
    by_epoch = schedule.bind(1)
    return keras.callbacks.LearningRateScheduler(lambda epoch, rate: by_epoch(epoch))
