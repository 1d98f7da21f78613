"""An optimizer of torch.optim on a replica: it updates the replica's own vector, through parameters that are views of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from samestep.backends.base import NativeUpdater
from samestep.backends.torch.replica import TorchReplica
from samestep.errors import Invalid, WrongType
from samestep.fingerprint import of_weights

NUMBER = "#"  # at the end of a name: a plain number, not a tensor
Factory = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


class TorchUpdater(NativeUpdater):
    """One replica's optimizer. Every replica has one of its own, and all make the same update."""

    def __init__(self, given: Factory | torch.optim.Optimizer, replica: TorchReplica, clip: float) -> None:
        super().__init__(replica, clip)
        ours = replica.leaves()
        if isinstance(given, torch.optim.Optimizer):
            self.optimizer = _copied(given, ours | replica.frozen())
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
            raise WrongType(
                "LBFGS computes the loss several times in one update, which the Trainer does not: use another"
            )
        rates = {float(group["lr"]) for group in self.optimizer.param_groups}
        if len(rates) > 1:
            raise Invalid(
                f"the optimizer has groups with different rates ({', '.join(map(str, sorted(rates)))}), "
                "and the Trainer sets one rate for all: give every group the same"
            )
        self._rate = rates.pop()
        self._leaves = list(ours.values())

    def __repr__(self) -> str:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        state = self.optimizer.state_dict()["state"]
        slots = {f"{i}.{name}": np.asarray(torch.as_tensor(slot).cpu())
                 for i, slots in state.items() for name, slot in slots.items() if slot is not None}  # fmt: skip
        past = f", state={of_weights(slots)[:16]}" if slots else ""  # momenta that it came with
        return f"torch.optim.{type(self.optimizer).__name__}({groups}{past})"

    def rate(self) -> float:
        """The rate that the optimizer came with."""
        return self._rate

    def apply(self, gradient: torch.Tensor, lr: float, t: int) -> None:
        for parameter, view in zip(self._leaves, self.replica.layouts[0].cut(gradient), strict=True):
            parameter.grad = view
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def tensors(self) -> dict[str, np.ndarray[Any, Any]]:
        found: dict[str, np.ndarray[Any, Any]] = {}
        for i, slots in self.optimizer.state_dict()["state"].items():
            for name, slot in slots.items():
                if isinstance(slot, torch.Tensor):
                    found[f"{i}.{name}"] = slot.detach().cpu().numpy()
                elif isinstance(slot, (bool, int, float)):
                    found[f"{i}.{name}{NUMBER}"] = np.asarray(slot)
                elif slot is not None:
                    raise WrongType(
                        f"the optimizer keeps a {type(slot).__name__} ({name}), which a checkpoint cannot hold: "
                        "pass checkpoint_every=None, or another optimizer"
                    )
        for i, group in enumerate(self.optimizer.param_groups):  # some optimizers count there
            found |= {f"group.{i}.{name}{NUMBER}": np.asarray(value) for name, value in group.items()
                      if name != "lr" and isinstance(value, (bool, int, float))}  # fmt: skip
        return found

    def load(self, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        whole = self.optimizer.state_dict()
        state: dict[int, dict[str, Any]] = {}
        for key, array in tensors.items():
            i, _, name = key.partition(".")
            value = array.item() if name.endswith(NUMBER) else torch.from_numpy(array.copy())
            name = name.removesuffix(NUMBER)
            if i == "group":
                i, _, name = name.partition(".")
                whole["param_groups"][int(i)][name] = value
            else:
                state.setdefault(int(i), {})[name] = value
        self.optimizer.load_state_dict({**whole, "state": state})
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for number, slots in state.items():  # torch gave them the weights' type, and the memory order of the file
            like, held = parameters[number].detach(), self.optimizer.state[parameters[number]]
            for name, slot in slots.items():
                if isinstance(slot, torch.Tensor):
                    shaped = like if slot.shape == like.shape else slot
                    held[name] = torch.empty_like(shaped, dtype=slot.dtype, device=held[name].device).copy_(slot)


def _copied(given: torch.optim.Optimizer, ours: dict[int, torch.nn.Parameter]) -> torch.optim.Optimizer:
    """A copy of the user's optimizer with our parameters instead of the model's."""
    _check_parameters(given, ours)
    if given._optimizer_step_pre_hooks or given._optimizer_step_post_hooks:
        raise Invalid(
            "the optimizer has hooks, which a replica's copy of it would not have: pass a function that makes the "
            "optimizer from parameters and adds them"
        )
    memo: dict[int, Any] = dict(ours)
    twin = copy.deepcopy(given, memo)
    for name, value in vars(given).items():  # torch copies its own three attributes; a subclass may need the others
        if name not in vars(twin) and name != "step":  # a scheduler puts its counting `step` there
            setattr(twin, name, copy.deepcopy(value, memo))
    return twin


def _check_parameters(optimizer: torch.optim.Optimizer, ids: Iterable[int]) -> None:
    if not {id(p) for group in optimizer.param_groups for p in group["params"]} <= set(ids):
        raise Invalid("the optimizer has parameters that are not parameters of the model to be trained")
