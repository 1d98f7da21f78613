"""How weights follow from gradient and rate, written once on flat vectors for every framework.

An optimizer is a frozen value. `slots` names the flat vectors it keeps beside the weights (all start at zero);
`update` returns new weights and new slots. Only +, - and * of whole vectors: each is rounded once, alike on every
thread and vector unit, so neither threads nor slices can change a bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from samestep.errors import Invalid, WrongType

Vector = Any  # a flat vector of any framework


class Optimizer(Protocol):
    @property
    def slots(self) -> tuple[str, ...]: ...

    def update(self, x: Vector, g: Vector, state: dict[str, Vector], lr: float) -> tuple[Vector, dict[str, Vector]]: ...


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent; see `sgd`."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    @property
    def slots(self) -> tuple[str, ...]:
        return ("velocity",) if self.momentum else ()

    def update(self, x: Vector, g: Vector, state: dict[str, Vector], lr: float) -> tuple[Vector, dict[str, Vector]]:
        if self.weight_decay:
            g = g + x * self.weight_decay
        if not self.momentum:
            return x - g * lr, state
        v = state["velocity"] * self.momentum + g
        direction = g + v * self.momentum if self.nesterov else v
        return x - direction * lr, {"velocity": v}


def sgd(momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> SGD:
    """Stochastic gradient descent, with momentum, Nesterov's look-ahead and weight decay on request.

    g ← g + λx,   v ← βv + g,   x ← x − ηv   (Nesterov: x ← x − η(g + βv))

    >>> sgd(momentum=0.9)
    SGD(momentum=0.9, nesterov=False, weight_decay=0.0)
    """
    momentum = _number("momentum", momentum)
    weight_decay = _number("weight_decay", weight_decay)
    if not 0 <= momentum < 1:
        raise Invalid(f"sgd: momentum must be at least 0 and below 1, got momentum={momentum}")
    if not 0 <= weight_decay < float("inf"):
        raise Invalid(f"sgd: weight_decay must be finite and at least 0, got weight_decay={weight_decay}")
    if not isinstance(nesterov, bool):
        raise WrongType(f"sgd: nesterov must be True or False, got nesterov={nesterov!r}")
    if nesterov and not momentum:
        raise Invalid("sgd: nesterov=True needs a momentum above 0, got momentum=0.0")
    return SGD(momentum, nesterov, weight_decay)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise WrongType(f"sgd: {name} must be a number, got {name}={value!r}")
    return float(value)
