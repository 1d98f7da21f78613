"""The learning rate that is driven by a metric: it drops when progress stalls. The only schedule with a state."""

from __future__ import annotations

from typing import Annotated, Any

from samestep.checks import Rate, Steps, at_most, checked, finite, one_of, show, whole
from samestep.errors import Invalid, WrongType
from samestep.schedules.algebra import Schedule
from samestep.schedules.kinds import piecewise

VERSION = 1  # of the stored state


class Plateau:
    """Multiplies the rate by `factor` when a metric has not become better for more than `patience` observations.

    lr ← max(lr·factor, floor), after `patience` + 1 observations in a row that are not better. Better, for mode="min", is
    metric < best·(1 − threshold), or metric < best − threshold with threshold_mode="abs"; for mode="max", greater than
    best·(1 + threshold) or best + threshold. After a drop, `cooldown` observations are not held against it; a drop by
    `eps` or less is not made. To the bit what torch.optim.lr_scheduler.ReduceLROnPlateau does.

    >>> plateau = Plateau(0.1, patience=1)
    >>> [plateau.observe(loss) for loss in (0.9, 0.5, 0.6, 0.5, 0.4)]
    [0.1, 0.1, 0.1, 0.05, 0.05]
    >>> plateau.trace()
    piecewise([4], [0.1, 0.05])
    """

    def __init__(
        self, lr: Rate, factor: Rate = 0.5, patience: Steps = 10, threshold: Rate = 1e-4, cooldown: Steps = 0,
        floor: Rate = 0.0, mode: Annotated[str, one_of("min", "max")] = "min",
        threshold_mode: Annotated[str, one_of("rel", "abs")] = "rel", eps: Rate = 1e-8,
    ) -> None:  # fmt: skip
        self.settings = checked("Plateau", Plateau.__init__, locals())
        at_most("Plateau", "floor", self.settings["floor"], "lr", self.settings["lr"])
        if self.settings["factor"] >= 1:
            raise Invalid(f"Plateau: factor must be below 1, got factor={factor}")
        if threshold_mode == "rel" and self.settings["threshold"] >= 1:
            raise Invalid(f"Plateau: threshold must be below 1 with threshold_mode='rel', got threshold={threshold}")
        self._t = 0  # the time of the last observation
        self._best: float | None = None
        self._bad = 0  # observations in a row that were not better
        self._cooling = 0  # observations of the cooldown still to come
        self._at: list[int] = []  # when the rate changed
        self._values: list[float] = [self.settings["lr"]]

    def __repr__(self) -> str:
        return f"Plateau({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"

    @property
    def lr(self) -> float:
        """The current rate."""
        return self._values[-1]

    def observe(self, metric: float, t: int | None = None) -> float:
        """Take note of the metric after an epoch or an evaluation, and return the rate from now on.

        t is the time, in epochs or in updates made, whichever the trace shall count; without it, observations are counted.
        """
        t = self._t + 1 if t is None else whole("observe", "t", t)
        if t <= self._t:
            raise Invalid(f"observe: t must be above that of the last observation, {self._t}, got t={t}")
        metric = finite("observe", "metric", metric)
        self._t = t
        if self._best is None or self._is_better(metric, self._best):
            self._best, self._bad = metric, 0
        else:
            self._bad += 1
        if self._cooling:
            self._cooling, self._bad = self._cooling - 1, 0
        if self._bad > self.settings["patience"]:
            self._cooling, self._bad = self.settings["cooldown"], 0
            lr = max(self.lr * self.settings["factor"], self.settings["floor"])
            if self.lr - lr > self.settings["eps"]:
                self._at.append(t)
                self._values.append(lr)
        return self.lr

    def _is_better(self, metric: float, best: float) -> bool:
        sign = 1.0 if self.settings["mode"] == "min" else -1.0  # greater is less, seen from the other side of 0
        threshold = sign * self.settings["threshold"]
        bound = best * (1.0 - threshold) if self.settings["threshold_mode"] == "rel" else best - threshold
        return bool(sign * metric < sign * bound)

    def trace(self) -> Schedule:
        """What happened, as a schedule that replays it, in the unit in which it was observed.

        Observed after every epoch, it counts epochs: say `.trace().in_epochs()`.
        """
        return piecewise(self._at, self._values)

    def state(self) -> dict[str, Any]:
        """All of it as a plain dictionary, for JSON: from_state goes on from there as if nothing had happened."""
        return {
            "version": VERSION, "settings": dict(self.settings), "t": self._t, "best": self._best, "bad": self._bad,
            "cooling": self._cooling, "at": list(self._at), "values": list(self._values),
        }  # fmt: skip

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Plateau:
        """The Plateau whose `state()` this is."""
        like, settings = cls(0.0).state(), state.get("settings") if isinstance(state, dict) else None
        if not isinstance(settings, dict) or (state.keys(), settings.keys()) != (like.keys(), like["settings"].keys()):
            raise WrongType(f"from_state: state must be what state() gave, got state={show(state)}")
        plateau = cls(**settings)
        if state["version"] != VERSION:
            raise Invalid(f"from_state: version must be {VERSION}, got version={show(state['version'])}")
        piecewise(state["at"], state["values"])  # refuses what is not one
        counts = (whole("from_state", name, state[name]) for name in ("t", "bad", "cooling"))
        plateau._t, plateau._bad, plateau._cooling = counts
        plateau._best = None if state["best"] is None else finite("from_state", "best", state["best"])
        plateau._at, plateau._values = list(state["at"]), list(state["values"])
        return plateau
