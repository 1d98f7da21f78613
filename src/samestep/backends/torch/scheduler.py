"""What a PyTorch scheduler sets at every update: the rate, maybe one for each group, and for some the momentum too."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from samestep.checks import show, whole
from samestep.errors import Invalid, WrongType

Moved = list[list[dict[str, Any]]]  # by update and group: what it moves beside the rate, or rates that differ


def read(scheduler: LRScheduler, n: int, unit: str = "step") -> list[float]:
    """The next n rates of any PyTorch scheduler; it and its optimizer stay as they are. What it counts is for messages.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    >>> read(torch.optim.lr_scheduler.MultiStepLR(optimizer, [2], 0.5), 4)
    [0.5, 0.5, 0.25, 0.25]
    """
    rates, moved = read_all(scheduler, n, unit)
    for t, groups in enumerate(moved):
        if len(now := {group.get("lr", rates[t]) for group in groups}) > 1:
            what = f"read: all parameter groups must have one rate, got {sorted(now)} at {unit} {t}"
            raise Invalid(f"{what}: samestep's optimizers have groups of their own, Trainer(groups=...)")
    if moved:
        raise Invalid(
            f"{type(scheduler).__name__} moves {', '.join(sorted(moved[0][0]))} as well as the rate, which only an optimizer "
            "of torch.optim follows: pass the scheduler's as optimizer, or cycle_momentum=False to the scheduler"
        )
    return rates


def read_all(scheduler: LRScheduler, n: int, unit: str = "step") -> tuple[list[float], Moved]:
    """The next n rates, those of the first group, and what else the scheduler moves."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise Invalid("read: ReduceLROnPlateau follows a metric, not the number of updates: use samestep.Plateau")
    if not isinstance(scheduler, LRScheduler):
        raise WrongType(f"read: scheduler must be a torch.optim.lr_scheduler.LRScheduler, got {show(scheduler)}")
    n, optimizer = whole("read", "n", n), scheduler.optimizer
    # The copy shares the weights and leaves out the momenta: it is never asked to update anything.
    memo: dict[int, Any] = {id(weight): weight for group in optimizer.param_groups for weight in group["params"]}
    memo[id(optimizer.state)] = defaultdict(dict)
    twin = copy.deepcopy(scheduler, memo)
    rates, settings = list[float](), list[list[dict[str, Any]]]()
    with warnings.catch_warnings(action="ignore"):  # that no update is made between the steps
        for t in range(n):
            try:
                if t:
                    twin.step()
            except ValueError as error:
                raise Invalid(f"{type(scheduler).__name__} ends before {n} {unit}s: {error}") from None
            groups = twin.optimizer.param_groups
            settings.append([{**group, "params": None, "lr": float(group["lr"])} for group in groups])
            rates.append(settings[-1][0]["lr"])
    changes = (zip(groups, settings[0], strict=True) for groups in settings)
    names = {name for pairs in changes for now, first in pairs for name in now if now[name] != first.get(name)} - {"lr"}
    names |= {"lr" for now in settings for group in now if group["lr"] != now[0]["lr"]}
    return rates, [[{k: group[k] for k in names & group.keys()} for group in now] for now in settings if names]
