"""An optimizer of paddle.optimizer on a replica: it updates the replica's own vector, through parameters that are its views."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Sequence
from typing import Any

import paddle

from samestep.backends.keeping import KeepingUpdater
from samestep.backends.paddle.content import HIDDEN
from samestep.backends.paddle.flat import Tensor, Vector
from samestep.backends.paddle.replica import PaddleReplica
from samestep.backends.updaters import Clip
from samestep.errors import Invalid, WrongType
from samestep.fingerprint import of_weights


class PaddleUpdater(KeepingUpdater):
    """One replica's optimizer. Every replica has one of its own, and all make the same update."""

    _one = threading.Lock()  # Paddle's optimizers keep some of what they know in the whole process

    def __init__(self, given: Any, replica: PaddleReplica, clip: Clip) -> None:
        super().__init__(replica, clip)
        leaves = replica.leaves()
        self._parameters = [mine for _, mine in leaves]
        with self._one:
            made = _copied(given, leaves) if isinstance(given, paddle.optimizer.Optimizer) else self._made(given)
            if isinstance(made, paddle.optimizer.LBFGS):
                raise WrongType("LBFGS computes the loss several times in one update: use another optimizer")
            for name, inner in vars(made).items():
                if isinstance(inner, paddle.optimizer.Optimizer):
                    raise WrongType(
                        f"the optimizer sets no rate of the one inside it ({name}), nor keeps its state: use one"
                    )
            _check_parameters(made, self._parameters)
            self.optimizer, self._rate = made, made._learning_rate
            made._learning_rate = made.get_lr()  # a number, so that it can be set
            _create_slots(made)
        names = replica.layouts[0].names
        self._names = {p.name: name for p, name in zip(self._parameters, names, strict=True)}
        named = dict(zip(names, self._parameters, strict=True))
        besides = HIDDEN | {"_learning_rate", "clear_gradients", "_param_dict"}
        began = self.keep(
            lambda: {"optimizer": made, "state": self._slots()}, paddle.optimizer.Optimizer, named, besides
        )
        self._past = of_weights(began)[:16]

    def _made(self, given: Any) -> Any:
        """The optimizer that the user's function makes from our parameters."""
        made = given
        if callable(given):
            # Paddle's own classes take the rate first
            by_name = "parameters" in inspect.signature(given).parameters
            made = given(parameters=self._parameters) if by_name else given(self._parameters)
        if not isinstance(made, paddle.optimizer.Optimizer):
            raise WrongType(
                "optimizer must be a paddle.optimizer.Optimizer, or a function that makes one from parameters, "
                f"got {type(made).__name__}"
            )
        return made

    def __repr__(self) -> str:
        about: dict[str, Any] = {name.strip("_"): value for name, value in sorted(vars(self.optimizer).items())
                 if isinstance(value, (bool, int, float, str)) and name != "_learning_rate"}  # fmt: skip
        beside = ("regularization", "_grad_clip")
        about |= {name.strip("_"): str(getattr(self.optimizer, name, None)) for name in beside}
        if choose := getattr(self.optimizer, "_apply_decay_param_fun", None):  # by names, which are not in the recipe
            about["decayed"] = [bool(choose(p.name)) for p in self._parameters]
        about["groups"] = [{name: str(value) for name, value in group.items() if name != "params"}
                           for group in _groups_of(self.optimizer) if isinstance(group, dict)]  # fmt: skip
        return f"paddle.optimizer.{type(self.optimizer).__name__}({about}, state={self._past})"

    def rate(self) -> float:
        """The rate that the optimizer came with."""
        if not isinstance(self._rate, float):
            raise Invalid(
                f"the optimizer has a scheduler inside ({type(self._rate).__name__}), which the Trainer does not step: pass "
                "the scheduler as schedule, and a number to the optimizer"
            )
        return self._rate

    def apply(self, gradient: Vector, lr: float, t: int) -> None:
        for parameter, view in zip(self._parameters, self.replica.layouts[0].cut(gradient), strict=True):
            parameter.grad = view
        with self._one:
            self.optimizer.set_lr(lr)
            self.optimizer.step()

    def _slots(self) -> dict[str, Tensor]:
        slots = self.optimizer._accumulators.items()
        return {f"{slot}:{self._names[name]}": tensor for slot, held in slots for name, tensor in held.items()}


def _copied(given: Any, leaves: Sequence[tuple[Tensor, Tensor]]) -> Any:
    """The user's optimizer, copied around our parameters instead of around the model's."""
    memo: dict[int, Any] = {id(theirs): mine for theirs, mine in leaves}
    memo |= {id(given._learning_rate_map): {}, id(given.helper): None}  # they hold on to a program
    _check_parameters(given, [theirs for theirs, _ in leaves])
    return copy.deepcopy(given, memo)


def _groups_of(optimizer: Any) -> list[Any]:
    """Its groups of parameters, without those that are not trained: a list each, or a dictionary that has one."""
    groups = optimizer._param_groups
    if not (groups and isinstance(groups[0], dict)):
        return [[p for p in groups or [] if not p.stop_gradient]]
    return [{**group, "params": [p for p in group["params"] if not p.stop_gradient]} for group in groups]


def _check_parameters(optimizer: Any, trained: Sequence[Tensor]) -> None:
    groups = _groups_of(optimizer)
    theirs = {id(p) for group in groups for p in (group["params"] if isinstance(group, dict) else group)}
    if not theirs <= {id(p) for p in trained}:
        raise Invalid("the optimizer has parameters that are not parameters of the model to be trained")


def _create_slots(optimizer: Any) -> None:
    """Have the optimizer create its state now, not in its first step: a checkpoint may have to be loaded before."""
    for group in _groups_of(optimizer):
        optimizer._create_accumulators(paddle.base.framework.default_main_program().global_block(), group)
