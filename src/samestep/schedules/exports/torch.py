"""A schedule as a PyTorch LRScheduler."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.schedules.algebra import Schedule, must_be_schedule
from samestep.schedules.text import check_state


class Scheduler(LRScheduler):
    """The schedule as a torch.optim.lr_scheduler.LRScheduler: update t uses s(t) in every parameter group.

    Call `step()` after each `optimizer.step()`. The rate is a function of `last_epoch` alone: the optimizer's own lr is
    ignored, and it does not matter whether the optimizer or the scheduler is restored first. In SequentialLR it starts at
    s(0) when its turn comes; in a ChainedScheduler it sets the rate and does not multiply it, so put it last, or multiply
    schedules: a * b.

    >>> from samestep.schedules.kinds import poly
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    >>> Scheduler(poly(1.0, 4), optimizer).get_last_lr()
    [1.0]
    """

    def __init__(self, schedule: Schedule, optimizer: Optimizer, last_epoch: int = -1) -> None:
        self.schedule = must_be_schedule("torch.scheduler", "schedule", schedule)
        if isinstance(optimizer, Optimizer):
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", copy.deepcopy(group["lr"]))  # SequentialLR, last_epoch ask for it
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        rate = self.schedule(self.last_epoch)
        return [rate for _ in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, as plain values; `applied`: the optimizer's rate is this one's, not that of a neighbour.

        SequentialLR saves and loads all its parts; only the one at work may set the rate when it is loaded.
        """
        groups = zip(self.optimizer.param_groups, self._last_lr, strict=False)
        applied = self.last_epoch >= 0 and all(float(group["lr"]) == float(last) for group, last in groups)
        return {"schedule": self.schedule.to_json(), "last_epoch": self.last_epoch, "applied": applied}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a `state_dict` of the same schedule, before or after the optimizer is restored."""
        check_state("load_state_dict", self.schedule, state_dict, self.state_dict())
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = self.last_epoch + 1
        self._last_lr = self.get_lr() if self.last_epoch >= 0 else []
        if state_dict["applied"]:
            for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            self._last_lr = [copy.deepcopy(group["lr"]) for group in self.optimizer.param_groups]
