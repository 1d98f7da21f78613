"""The rates of a PyTorch scheduler as a list."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from samestep.checks import show, whole
from samestep.errors import Invalid, WrongType


def read(scheduler: LRScheduler, n: int) -> list[float]:
    """The rates of the next n updates under any PyTorch scheduler; the scheduler and its optimizer stay as they are.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    >>> read(torch.optim.lr_scheduler.MultiStepLR(optimizer, [2], 0.5), 4)
    [0.5, 0.5, 0.25, 0.25]
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        raise Invalid("read: ReduceLROnPlateau follows a metric, not the number of updates: use samestep.Plateau")
    if not isinstance(scheduler, LRScheduler):
        raise WrongType(f"read: scheduler must be a torch.optim.lr_scheduler.LRScheduler, got {show(scheduler)}")
    n = whole("read", "n", n)
    optimizer = scheduler.optimizer
    # The copy shares the weights and leaves out the momenta: it is never asked to update anything.
    memo: dict[int, Any] = {id(weight): weight for group in optimizer.param_groups for weight in group["params"]}
    memo[id(optimizer.state)] = defaultdict(dict)
    twin = copy.deepcopy(scheduler, memo)
    rates: list[float] = []
    with warnings.catch_warnings(action="ignore"):  # that no update is made between the steps
        for t in range(n):
            if t:
                twin.step()
            now = {float(group["lr"]) for group in twin.optimizer.param_groups}
            if len(now) > 1:
                raise Invalid(f"read: all parameter groups must have one rate, got {sorted(now)} at update {t}")
            rates.append(now.pop())
    return rates
