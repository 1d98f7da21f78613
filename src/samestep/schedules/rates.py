"""From what a user writes as `lr` or `schedule` to the rate of every update.

    None                      the default of the optimizer, or the rate that a framework's own came with
    0.1                       always that
    "cosine(0.3, 20)"         an expression, as on the command line
    cosine(0.3, 20)           a schedule; one in epochs is told how many steps an epoch has
    Plateau(0.1)              follows the test loss (the training loss without test examples); accuracy with mode="max"
    any function of t         t is the number of updates already made
    a framework's scheduler   its rates are read from a copy; it counts steps. Of PyTorch's, momenta that it moves are followed

With unit="epoch" the last two count epochs: the rate of count e holds through epoch e.

Whatever it is, the rate of an update depends on t (and for Plateau on the metrics), never on the number of devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import numpy as np

from samestep.checks import number
from samestep.errors import Invalid
from samestep.schedules.algebra import Schedule
from samestep.schedules.kinds import constant, table
from samestep.schedules.plateau import Plateau
from samestep.schedules.text import parse

if TYPE_CHECKING:
    from samestep.backends.base import Shape
    from samestep.backends.updaters import Updater


FITTING = ("cosine", "poly", "one_cycle", "table")  # schedules that are made as long as a run; others have milestones
STATED = ("then", "hold", "add")  # what says by itself how to go on
NOTHING = 1e-3  # of the highest rate: what is left below trains next to nothing


class Scheduler(Protocol):
    """A scheduler of a framework."""

    def step(self, *args: Any, **named: Any) -> Any: ...


def check_schedule(where: str, name: str, schedule: Any) -> Any:
    """What a user passed as `schedule` or `lr`, a number or a text turned into a schedule; other kinds as they are."""
    if isinstance(schedule, str):
        return parse(schedule)
    if schedule is None or callable(schedule) or isinstance(schedule, Plateau) or hasattr(schedule, "step"):
        return schedule
    return constant(rate(name, schedule, where))


RateLike = Annotated[float | str | Schedule | Plateau | Callable[[int], Any] | Scheduler | None, check_schedule]


def counts(schedule: Any) -> bool:
    """Whether a scheduler counts steps by itself: Paddle's and MXNet's can be called, but mean another t."""
    return callable(getattr(schedule, "step", None)) or hasattr(schedule, "base_lr")


@functools.lru_cache(1 << 12)
def as_written(lr: float, dtype: str) -> float:
    """A rate as a person would write it: the shortest decimal number that is the same rate, once rounded to this type.

    >>> as_written(0.05000000074505806, "float32"), as_written(0.05000000074505806, "float64")
    (0.05, 0.05000000074505806)
    """
    return float(str(np.dtype(dtype).type(lr)))


def doubt(schedule: Any, steps: int, max_epochs: int) -> str | None:
    """What to say of a schedule that trains nothing for long, most likely because another one was meant.

    In steps, it is over long before the run. Not of one that stays at a rate worth having and is no shorter than a count of
    epochs would be, nor of milestones. In epochs, a warm-up from 0 holds the 0 through the first one.

    >>> from samestep.schedules.kinds import cosine, drops
    >>> print(doubt(cosine(0.1, 10), 235, 10))  # doctest: +ELLIPSIS
    schedule: cosine(0.1, 10) ends at step 10 of 2350, and the rate stays at 0 from there on: it counts steps; ...
    >>> doubt(cosine(0.1, 500, end=0.01), 235, 10), doubt(drops(0.1, [5, 8], 0.1), 235, 10)
    (None, None)
    >>> print(doubt(cosine(0.1, 9).warmup(1).in_epochs(), 235, 10))  # doctest: +ELLIPSIS
    schedule: cosine(0.1, 9).warmup(1).in_epochs() is 0 through the whole first epoch: with .in_epochs(smooth=True) ...
    """
    if not isinstance(schedule, Schedule):
        return None
    if schedule._epochs():
        first, last, later = (schedule.bind(steps)(t) for t in (0, steps - 1, steps))
        how = "with .in_epochs(smooth=True) it moves within an epoch"
        dead = first == last == 0 < later and min(steps, max_epochs) > 1
        return f"schedule: {schedule} is 0 through the whole first epoch: {how}" if dead else None
    if not schedule.length:
        return None
    n, total = schedule.length, steps * max_epochs
    ops = {part.op for part in schedule._parts()}
    if 2 * n >= total or not ops & {*FITTING} or ops & {*STATED}:
        return None
    peak, last = schedule(range(0, n, 1 + n // 64)).max(), schedule(n)
    if last >= peak or (last > NOTHING * peak and n > 2 * max_epochs):
        return None
    how = f"ends at step {n} of {total}, and the rate stays at {last:g} from there on"
    return f"schedule: {schedule} {how}: it counts steps; .in_epochs() makes it count epochs"


class Rates:
    """The rates of one fit, epoch by epoch, rounded once to the type of the weights."""

    def __init__(
        self, schedule: Any, updaters: Sequence[Updater], steps_per_epoch: int, max_epochs: int, shape: Shape,
        monitor: str | None = None, unit: str = "step",
    ) -> None:  # fmt: skip
        self.steps, self.dtype, self.monitor = steps_per_epoch, shape.dtype, monitor
        self.plateau: Plateau | None = None
        self.unit = "step" if isinstance(schedule, (Schedule, Plateau)) else unit  # those two say it themselves
        length = steps_per_epoch if self.unit == "epoch" else 1  # of one count, in steps
        self.inside = bool(updaters[0].fixed)  # the optimizer itself knows its rate, and nobody else
        if schedule is not None and self.inside:
            raise Invalid(
                f"lr cannot be applied: this optimizer has its rate inside. Leave lr out, or {updaters[0].fixed}"
            )
        own = None if counts(schedule) else updaters[0].rate()  # refuses a scheduler inside, which would be ignored
        if schedule is None:
            if own is None:
                raise Invalid("this optimizer has no rate of its own: pass lr=... to the Trainer")
            schedule = constant(own)
        if isinstance(schedule, Plateau):
            self._past = schedule.state()
            self.plateau = plateau = Plateau.from_state(self._past)  # a copy: the user's is left as it was
            self._rate: Callable[[int], Any] = lambda t: plateau.lr
            if schedule.settings["mode"] == "max" and shape.classes is None and not monitor:
                raise Invalid("Plateau(mode='max') follows the accuracy, and this model has none: use mode='min'")
        elif isinstance(schedule, Schedule):
            self._rate = schedule.bind(steps_per_epoch)
        elif callable(schedule) and not counts(schedule):
            self._rate = lambda t: schedule(t // length)
        else:  # a framework's scheduler
            rates, moved = updaters[0].read(schedule, steps_per_epoch * max_epochs // length, self.unit)
            self._rate = table(rates).every(length) if length > 1 else table(rates)
            moved = [now for now in moved for _ in range(length)]
            for updater in updaters:
                updater.moved = moved
        self.given, self._ahead = schedule, (-1, list[float]())  # an epoch, and its rates

    def shown(self, lr: float) -> float | None:
        """A rate for the history and the log; None if the optimizer has another one inside."""
        return None if self.inside else as_written(lr, self.dtype)

    def prepare(self, epoch: int) -> None:
        """Compute the rates of an epoch beforehand, while a device is busy, if nothing else can decide them."""
        if isinstance(self._rate, Schedule):
            with suppress(Exception):  # an error is told when its epoch begins: the one before it is kept
                self._ahead = epoch, self.epoch(epoch)

    def epoch(self, epoch: int) -> list[float]:
        """The rates of all updates of an epoch."""
        if self._ahead[0] == epoch:
            return self._ahead[1]
        steps = range(epoch * self.steps, (epoch + 1) * self.steps)
        written = [rate(f"schedule({t})", self._rate(t)) for t in steps]
        with np.errstate(over="ignore"):
            rounded = np.array(written, self.dtype)
        for large in np.extract(~np.isfinite(rounded), written)[:1]:
            raise Invalid(f"a learning rate of {large:g} is too large for {self.dtype}")
        return [float(lr) for lr in rounded]

    def observe(self, row: dict[str, Any]) -> None:
        """Take note of the numbers of an epoch: of one column of the history, or of the loss or the accuracy."""
        if self.plateau and self.monitor:
            if row[self.monitor] is None:
                raise Invalid(f"monitor: {self.monitor} has no value after epoch {row['epoch']}: its weight is 0")
            self.plateau.observe(row[self.monitor])
        elif self.plateau:
            which = "accuracy" if self.plateau.settings["mode"] == "max" else "loss"
            self.plateau.observe(row[f"test_{which}"] if row["test_loss"] is not None else row[f"train_{which}"])

    def __repr__(self) -> str:
        """A name that is the same in every process: that of a function or a scheduler's class, else its repr.

        The recipe knows the code of a function and the content of a scheduler in another place.
        """
        if self.plateau and self._past["t"]:
            return f"Plateau.from_state({self._past})"
        if isinstance(self.given, (Schedule, Plateau)):
            return repr(self.given)
        return str(getattr(self.given, "__qualname__", type(self.given).__qualname__))

    def applied(self) -> Schedule | None:
        """The schedule that was applied, in steps, if it is one: for Plateau, its trace."""
        if self.plateau:
            trace, past = self.plateau.trace(), self._past["t"]  # what was observed before this fit is not part of it
            return (trace.shift(past) if past else trace).in_epochs(self.steps)
        return self._rate if isinstance(self._rate, Schedule) and not self.inside else None


def rate(name: str, value: Any, where: str = "") -> float:
    """A rate as a float: finite and not negative. Scalars of any framework will do."""
    if not isinstance(value, (bool, np.bool_, str)):
        with suppress(TypeError, ValueError, OverflowError):  # an array of several, among others
            value = float(value)
    return number(where, name, value)
