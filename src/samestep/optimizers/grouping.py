"""Groups of weights that an optimizer treats in another way: found by name, kept as segments of the flat vector."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Annotated, Any, cast

from samestep.backends.base import Replica
from samestep.checks import Flag, Rate, checked, number, show
from samestep.errors import Invalid, WrongType
from samestep.optimizers.rules import Optimizer


def _decay(where: str, name: str, value: Any) -> float | None:
    return None if value is None else number(where, name, value)


@dataclass(frozen=True)
class ParameterGroup:
    """How the weights of a group differ from the others; see `group`."""

    lr_scale: float = 1.0
    weight_decay: float | None = None
    frozen: bool = False


Groups = Mapping[str, ParameterGroup]  # by pattern of names


def group(
    lr_scale: Rate = 1.0, weight_decay: Annotated[float | None, _decay] = None, frozen: Flag = False
) -> ParameterGroup:
    """Weights with another rate (that of the schedule, times `lr_scale`), another decay, or none of both (`frozen`).

    Frozen weights stay as they are: no update, no decay, no noise, and no part in the norm of the gradient.

    >>> group(lr_scale=0.1)
    ParameterGroup(lr_scale=0.1, weight_decay=None, frozen=False)
    """
    made = ParameterGroup(**checked("group", group, locals()))
    if made.frozen and made != ParameterGroup(frozen=True):
        raise Invalid("group: frozen weights are never updated: leave out lr_scale and weight_decay, or frozen")
    return made


def check_groups(groups: Any, optimizer: Any) -> dict[str, ParameterGroup]:
    """What a user passed as `groups`, beside this optimizer."""
    if not isinstance(groups, Mapping) or not all(isinstance(pattern, str) for pattern in groups):
        raise WrongType(f"groups must be a dictionary from patterns to samestep.group(...), got {show(groups)}")
    if groups and not isinstance(optimizer, Optimizer):
        raise Invalid("groups are for samestep's optimizers: with one of the framework, use its own parameter groups")
    for pattern, one in groups.items():
        if not isinstance(one, ParameterGroup):
            raise WrongType(f"groups[{pattern!r}] must be samestep.group(...), got {show(one)}")
        if one.weight_decay is not None and "weight_decay" not in getattr(optimizer, "__dataclass_fields__", ()):
            what = f"groups[{pattern!r}] has a weight_decay, and {type(optimizer).__name__} has none"
            raise Invalid(f"{what}: use sgd, adam or adamw, or leave it out")
    return dict(groups)


@dataclass(frozen=True)
class Segment:
    """The numbers [lo, hi) of the flat vector, updated alike. Padding belongs to the tensor before it."""

    lo: int
    hi: int
    optimizer: Optimizer
    lr_scale: float = 1.0
    frozen: bool = False

    @property
    def part(self) -> slice:
        return slice(self.lo, self.hi)


def segments_of(replica: Replica, optimizer: Optimizer, groups: Groups) -> tuple[Segment, ...]:
    """The trained weights in segments. The first pattern that one of a tensor's names matches decides."""
    layout, names = replica.layouts[0], dict[str, list[str]]()  # tied weights have several
    for name, known in replica.names.items():
        names.setdefault(known, []).append(name)
    trained = [name for known in layout.names for name in names[known]]
    for pattern in groups:
        if not any(fnmatchcase(name, pattern) for name in trained):
            near = ", ".join(difflib.get_close_matches(pattern, trained, cutoff=0))
            raise Invalid(f"groups: no trained weight is called {pattern!r}; there are, among others, {near}")
    chosen = []
    for known in layout.names:
        fitting = (one for pattern, one in groups.items() if any(fnmatchcase(name, pattern) for name in names[known]))
        chosen.append(next(fitting, ParameterGroup()))
    if all(one.frozen for one in chosen):
        raise Invalid("groups: every weight is frozen, and nothing would be trained: leave some out")
    starts, found = [*(lo for lo, _ in layout.spans), layout.size], list[Segment]()
    for one, tensors in groupby(range(len(chosen)), chosen.__getitem__):
        own, rule = list(tensors), cast(Any, optimizer)
        if one.weight_decay is not None:
            rule = replace(rule, weight_decay=one.weight_decay)
        found.append(Segment(starts[own[0]], starts[own[-1] + 1], rule, one.lr_scale, one.frozen))
    return tuple(segment for segment in found if segment.lo < segment.hi)
