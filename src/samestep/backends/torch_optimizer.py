"""An optimizer of torch.optim on a replica: it updates the replica's own vector, through parameters that are views of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

from samestep.backends.torch_replica import TorchReplica
from samestep.errors import Invalid, WrongType

Factory = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


class TorchUpdater:
    """One replica's optimizer. Every replica has one of its own, and all make the same update."""

    def __init__(self, given: Factory | torch.optim.Optimizer, replica: TorchReplica) -> None:
        self._replica = replica
        ours = replica.leaves()
        if isinstance(given, torch.optim.Optimizer):
            wanted = [p for group in given.param_groups for p in group["params"]]
            if any(id(p) not in ours for p in wanted):
                raise Invalid("the optimizer has parameters that are not parameters of the model to be trained")
            self.optimizer = copy.deepcopy(given, dict(ours))  # around the replica's parameters instead of the model's
        else:
            made = given(list(ours.values()))
            if not isinstance(made, torch.optim.Optimizer):
                raise WrongType(f"optimizer(parameters) must give a torch.optim.Optimizer, got {type(made).__name__}")
            self.optimizer = made
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise WrongType(
                "LBFGS computes the loss several times in one update, which the Trainer does not: use another"
            )
        self._pieces = list(zip(ours.values(), replica.weights.pieces, strict=True))

    def __repr__(self) -> str:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return f"torch.optim.{type(self.optimizer).__name__}({groups})"

    def rate(self) -> float:
        """The rate that the optimizer came with."""
        rates = {float(group["lr"]) for group in self.optimizer.param_groups}
        if len(rates) > 1:
            raise Invalid(
                f"the optimizer has groups with different rates ({', '.join(map(str, sorted(rates)))}), "
                "and the Trainer sets one rate for all: give every group the same"
            )
        return rates.pop()

    def __call__(self, gradient: torch.Tensor, lr: float, t: int, z: Any) -> None:
        for parameter, piece in self._pieces:
            parameter.grad = piece.view(gradient)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
