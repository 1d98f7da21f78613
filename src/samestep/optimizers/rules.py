"""How weights follow from gradient and rate, written once on flat vectors for every framework.

An optimizer is a frozen value. `slots` names the flat vectors that it keeps beside the weights (all start at zero). `update`
returns new weights and new slots from the weights x, the gradient g, the slots, the rate and t, the number of updates already
made. The `direction` of a Descent, times the rate, is what to subtract from the weights, so that this can be done in place.
All arithmetic is +, -, *, / and square roots, element by element, so neither threads nor slices can change a bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import sqrt
from typing import Any

from samestep.checks import BelowOne, Flag, Rate, checked
from samestep.errors import Invalid

Vector = Any  # a flat vector of any framework
FrameworkOptimizer = Any  # of torch.optim, optax, keras.optimizers, paddle.optimizer or mxnet.optimizer
State = dict[str, Vector]
Updated = tuple[Vector, State]  # new weights, or the direction to them, and new slots


class Optimizer(ABC):
    """What the Trainer needs from an optimizer. To write your own, derive a frozen dataclass from this."""

    noisy = False  # whether `update` wants z, a vector of N(0, 1) that is the same on every replica

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the vectors that it keeps beside the weights; all start at zero."""
        return ()

    @abstractmethod
    def update(self, x: Vector, g: Vector, state: State, lr: float, t: int = 0, z: Vector = None) -> Updated:
        """New weights and new slots."""


class Descent(Optimizer):
    """An optimizer without noise: it subtracts a direction times the rate from the weights."""

    @abstractmethod
    def direction(self, x: Vector, g: Vector, state: State, t: int) -> Updated: ...

    def update(self, x: Vector, g: Vector, state: State, lr: float, t: int = 0, z: Vector = None) -> Updated:
        direction, state = self.direction(x, g, state, t)
        return x - direction * lr, state


@dataclass(frozen=True)
class SGD(Descent):
    """Stochastic gradient descent; see `sgd`."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    @property
    def slots(self) -> tuple[str, ...]:
        return ("velocity",) if self.momentum else ()

    def direction(self, x: Vector, g: Vector, state: State, t: int) -> Updated:
        if self.weight_decay:
            g = g + x * self.weight_decay
        if not self.momentum:
            return g, state
        v = state["velocity"] * self.momentum + g
        return g + v * self.momentum if self.nesterov else v, {"velocity": v}


@dataclass(frozen=True)
class AdaGrad(Descent):
    """AdaGrad; see `adagrad`."""

    slots = ("squares",)
    eps: float = 1e-10

    def direction(self, x: Vector, g: Vector, state: State, t: int) -> Updated:
        s = state["squares"] + g * g
        return g / (s**0.5 + self.eps), {"squares": s}


@dataclass(frozen=True)
class Adam(Descent):
    """Adam and AdamW; see `adam` and `adamw`."""

    slots = ("mean", "square")
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    def direction(self, x: Vector, g: Vector, state: State, t: int) -> Updated:
        if self.weight_decay and not self.decoupled:
            g = g + x * self.weight_decay
        m = state["mean"] * self.beta1 + g * (1 - self.beta1)
        v = state["square"] * self.beta2 + g * g * (1 - self.beta2)
        # corrected for the zeros that m and v start from
        direction = (m / (1 - self.beta1 ** (t + 1))) / ((v / (1 - self.beta2 ** (t + 1))) ** 0.5 + self.eps)
        if self.weight_decay and self.decoupled:
            direction = direction + x * self.weight_decay
        return direction, {"mean": m, "square": v}


@dataclass(frozen=True)
class SGLD(Optimizer):
    """Stochastic gradient Langevin dynamics; see `sgld`."""

    noisy = True
    temperature: float = 1.0

    def update(self, x: Vector, g: Vector, state: State, lr: float, t: int = 0, z: Vector = None) -> Updated:
        return x - g * lr + z * sqrt(2 * lr * self.temperature), state


def sgd(momentum: BelowOne = 0.0, nesterov: Flag = False, weight_decay: Rate = 0.0) -> SGD:
    """Stochastic gradient descent, with momentum, Nesterov's look-ahead and weight decay on request.

    g ← g + λx,   v ← βv + g,   x ← x − ηv   (Nesterov: x ← x − η(g + βv))

    >>> sgd(momentum=0.9)
    SGD(momentum=0.9, nesterov=False, weight_decay=0.0)
    """
    given = checked("sgd", sgd, locals())
    if nesterov and not momentum:
        raise Invalid("sgd: nesterov=True needs a momentum above 0, got momentum=0.0")
    return SGD(**given)


def adagrad(eps: Rate = 1e-10) -> AdaGrad:
    """AdaGrad: coordinates with larger gradients get smaller rates (Duchi, Hazan and Singer 2011).

    s ← s + g²,   x ← x − η g / (√s + ε)

    >>> adagrad()
    AdaGrad(eps=1e-10)
    """
    return AdaGrad(**checked("adagrad", adagrad, locals()))


def adam(beta1: BelowOne = 0.9, beta2: BelowOne = 0.999, eps: Rate = 1e-8, weight_decay: Rate = 0.0) -> Adam:
    """Adam (Kingma and Ba 2015); weight decay is added to the gradient.

    m ← β₁m + (1 − β₁)g,   v ← β₂v + (1 − β₂)g²,   x ← x − η (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)

    >>> adam()
    Adam(beta1=0.9, beta2=0.999, eps=1e-08, weight_decay=0.0, decoupled=False)
    """
    return Adam(**checked("adam", adam, locals()))


def adamw(beta1: BelowOne = 0.9, beta2: BelowOne = 0.999, eps: Rate = 1e-8, weight_decay: Rate = 0.01) -> Adam:
    """Adam with decoupled weight decay: x ← x − η (… + λx) (Loshchilov and Hutter 2019).

    >>> adamw(weight_decay=0.1)
    Adam(beta1=0.9, beta2=0.999, eps=1e-08, weight_decay=0.1, decoupled=True)
    """
    return Adam(**checked("adamw", adamw, locals()), decoupled=True)


def sgld(temperature: Rate = 1.0) -> SGLD:
    """Stochastic gradient Langevin dynamics: descent with noise that samples exp(−loss / T) (Welling and Teh 2011).

    x ← x − ηg + √(2ηT) z,   z ~ N(0, 1) from key(seed, step)

    The loss is the mean over examples: T = 1 / (number of examples) samples the posterior.

    >>> sgld(temperature=1e-4)
    SGLD(temperature=0.0001)
    """
    return SGLD(**checked("sgld", sgld, locals()))
