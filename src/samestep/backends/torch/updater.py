"""An optimizer of torch.optim on a replica: it updates the replica's own vector, through parameters that are views of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

from samestep.backends.keeping import KeepingUpdater
from samestep.backends.torch.replica import TorchReplica
from samestep.backends.torch.scheduler import Moved, read_all
from samestep.backends.updaters import Clip, in_ratio, rounded
from samestep.errors import Invalid, WrongType
from samestep.fingerprint import of_weights

Factory = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


class TorchUpdater(KeepingUpdater):
    """One replica's optimizer. Every replica has one of its own, and all make the same update."""

    def __init__(self, given: Factory | torch.optim.Optimizer, replica: TorchReplica, clip: Clip) -> None:
        super().__init__(replica, clip)
        ours, frozen = replica.leaves(), replica.frozen()
        if isinstance(given, torch.optim.Optimizer):
            self.optimizer = _copied(given, ours | frozen)
        elif callable(given):
            made = given(list(ours.values()))
            if not isinstance(made, torch.optim.Optimizer):
                raise WrongType(f"optimizer(parameters) must give a torch.optim.Optimizer, got {type(made).__name__}")
            _check_parameters(made, map(id, ours.values()))
            self.optimizer = made
        else:
            raise WrongType(
                "optimizer must be a torch.optim.Optimizer, or a function that makes one from parameters, "
                f"got {type(given).__name__}"
            )
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise WrongType("LBFGS computes the loss several times in an update, which a fit does not: use another")
        self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]  # a scheduler's may begin at 0
        first, *others = [group.get("initial_lr", group["lr"]) for group in self.optimizer.param_groups]
        if not first and any(others):
            raise Invalid("the optimizer's first group has rate 0, and the schedule sets that: put another group first")
        self._leaves = list(ours.values())
        named = dict(zip(replica.layouts[0].names, self._leaves, strict=True))
        named |= {f"frozen.{i}": p for i, p in enumerate(frozen.values())}
        began = self.keep(lambda: self.optimizer, torch.optim.Optimizer, named)
        slots = {name: array for name, array in began.items() if name.startswith("state.")}
        self._past = f", state={of_weights(slots)[:16]}" if slots else ""  # momenta that it came with

    def __repr__(self) -> str:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return f"torch.optim.{type(self.optimizer).__name__}({groups}{self._past})"

    def rate(self) -> float:
        """The rate that the optimizer came with: of its first group. The others keep their ratio to it."""
        return self._rates[0]

    def read(self, scheduler: Any, n: int, unit: str = "step") -> tuple[list[float], Moved]:
        rates, moved = read_all(scheduler, n, unit)
        ours = self.optimizer.param_groups
        for theirs in moved[:1]:
            if len(theirs) != len(ours) or any(name not in ours[i] for i, group in enumerate(theirs) for name in group):
                raise Invalid(
                    f"{type(scheduler).__name__} moves {', '.join(sorted(theirs[0]))} of another optimizer than the one that "
                    f"trains ({type(self.optimizer).__name__}), which has other groups or settings: make both from one"
                )
        return rates, moved

    def apply(self, gradient: torch.Tensor, lr: float, t: int) -> None:
        for parameter, view in zip(self._leaves, self.replica.layouts[0].cut(gradient), strict=True):
            parameter.grad = view
        moved, dtype = self.moved[t] if self.moved else [{}] * len(self._rates), self.replica.layouts[0].dtype
        for group, own, others in zip(self.optimizer.param_groups, self._rates, moved, strict=True):
            rate = others["lr"] if "lr" in others else in_ratio(lr, self._rates[0], own, dtype)
            group.update(others, lr=rounded(rate, dtype))
        self.optimizer.step()


def _copied(given: torch.optim.Optimizer, ours: dict[int, torch.nn.Parameter]) -> torch.optim.Optimizer:
    """A copy of the user's optimizer with our parameters instead of the model's."""
    _check_parameters(given, ours)
    if any(getattr(given, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")):
        raise Invalid(
            "the optimizer has hooks, which a replica's copy of it would not have: pass a function that makes the "
            "optimizer from parameters and adds them"
        )
    return _twin(given, dict(ours))


def _twin(given: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """A copy with all attributes, also of optimizers inside it: torch's own copies have three of them."""
    twin = memo[id(given)] = object.__new__(type(given))
    for name, value in vars(given).items():
        copied = _twin if isinstance(value, torch.optim.Optimizer) and id(value) not in memo else copy.deepcopy
        if name != "step":  # a scheduler puts its counting `step` there
            vars(twin)[name] = copied(value, memo)
    for weight, slots in vars(twin).get("state", {}).items():
        for name, slot in slots.items() if isinstance(weight, torch.Tensor) and isinstance(slots, dict) else ():
            if isinstance(slot, torch.Tensor) and name != "step":  # PyTorch counts on the host
                slots[name] = slot.to(weight.device)
    return twin


def _check_parameters(optimizer: torch.optim.Optimizer, ids: Iterable[int]) -> None:
    if not {id(p) for group in optimizer.param_groups for p in group["params"]} <= set(ids):
        raise Invalid("the optimizer has parameters that are not parameters of the model to be trained")
