"""An optimizer of mxnet.optimizer on a replica: it updates the replica's own vector, through arrays that are views of it."""

from __future__ import annotations

import copy
from typing import Any

import mxnet as mx

from samestep.backends.keeping import KeepingUpdater
from samestep.backends.mxnet.replica import MxnetReplica
from samestep.backends.updaters import Clip
from samestep.errors import Invalid, WrongType
from samestep.fingerprint import of_weights

# What a run sets at every update, and what names parameters.
SET = {"lr", "num_update", "_index_update_count", "_all_index_update_counts", "param_dict", "idx2name", "sym_info"}


class MxnetUpdater(KeepingUpdater):
    """One replica's optimizer. Every replica has one of its own, and all make the same update."""

    def __init__(self, given: Any, replica: MxnetReplica, clip: Clip) -> None:
        super().__init__(replica, clip)
        self.optimizer = made = copy.deepcopy(_made(given))
        self._scheduler, made.lr_scheduler = made.lr_scheduler, None  # the schedule sets the rate
        self._first_rate = made.lr
        if made.lr_mult or made.wd_mult:
            raise Invalid(
                "in Gluon, set_lr_mult and set_wd_mult of an optimizer have no effect: set them on parameters"
            )
        self._leaves = replica.leaves()
        made.param_dict = {i: about for i, (_, about, _) in enumerate(self._leaves)}  # for lr_mult and wd_mult
        self._state = [made.create_state_multi_precision(i, view) for i, (_, _, view) in enumerate(self._leaves)]
        named = {f"parameter:{name}": view for name, _, view in self._leaves}
        root = {"state": dict(zip(replica.layouts[0].names, self._state, strict=True)), "optimizer": made}
        self._past = of_weights(self.keep(lambda: root, mx.optimizer.Optimizer, named, SET))[:16]

    def __repr__(self) -> str:
        about: dict[str, Any] = {name: value for name, value in sorted(vars(self.optimizer).items())
                 if isinstance(value, (bool, int, float, str)) and name not in ("lr", "num_update")}  # fmt: skip
        about["mults"] = [(p.lr_mult, p.wd_mult) for _, p, _ in self._leaves]
        return f"mxnet.optimizer.{type(self.optimizer).__name__}({about}, state={self._past})"

    def rate(self) -> float:
        """The rate that the optimizer came with."""
        if self._scheduler is not None:
            raise Invalid(
                f"the optimizer has a scheduler inside ({type(self._scheduler).__name__}), which the Trainer does not step: "
                "pass the scheduler as schedule, and a number to the optimizer"
            )
        return float(self._first_rate)

    def apply(self, gradient: Any, lr: float, t: int) -> None:
        optimizer, parts = self.optimizer, self.replica.layouts[0].cut(gradient)
        optimizer.lr, optimizer.num_update = lr, t
        optimizer._index_update_count = dict.fromkeys(range(len(self._leaves)), t)
        for i, ((_, _, weight), part) in enumerate(zip(self._leaves, parts, strict=True)):
            optimizer.update_multi_precision(i, weight, part, self._state[i])
        self.replica.moved()


def _made(given: Any) -> Any:
    """The optimizer that a user means by a name, a function that makes one, or one as it is."""
    if isinstance(given, str):
        if given.lower() not in mx.optimizer.Optimizer.opt_registry:
            known = ", ".join(sorted(mx.optimizer.Optimizer.opt_registry))
            raise Invalid(f"optimizer: mxnet has no {given!r}, only {known}")
        return mx.optimizer.create(given)
    made = given() if callable(given) and not isinstance(given, mx.optimizer.Optimizer) else given
    if not isinstance(made, mx.optimizer.Optimizer):
        raise WrongType(
            f"optimizer must be an mxnet.optimizer.Optimizer, or a function that makes one, got {type(made).__name__}"
        )
    return made
