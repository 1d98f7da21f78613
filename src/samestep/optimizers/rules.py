"""How weights follow from gradient and rate, written once on flat vectors for every framework.

An optimizer is a frozen value. `slots` names the flat vectors that it keeps beside the weights (all start at zero). `update`
returns new weights and new slots from the weights x, the gradient g, the slots, the rate and t, the number of updates already
made. The `direction` of a Descent, times the rate, is what to subtract from the weights, so that this can be done in place.
The rate that is given with one of these, `lr`, is for the Trainer, which takes it out and follows it as its schedule.
All arithmetic is +, -, *, / and square roots, element by element, so neither threads nor slices can change a bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from math import sqrt
from typing import Any

from samestep.checks import BelowOne, Flag, Rate, checked
from samestep.errors import Invalid
from samestep.schedules.rates import RateLike

Vector = Any  # a flat vector of any framework
FrameworkOptimizer = Any  # of torch.optim, optax, keras.optimizers, paddle.optimizer or mxnet.optimizer
State = dict[str, Vector]
Updated = tuple[Vector, State]  # new weights, or the direction to them, and new slots


class Optimizer(ABC):
    """What the Trainer needs from an optimizer. To write your own, derive a frozen dataclass from this."""

    noisy = False  # whether `update` wants z, a vector of N(0, 1) that is the same on every replica
    default_lr = 0.1  # the rate, if nobody says another

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


@dataclass(frozen=True, repr=False)
class Rated:
    """What samestep's own optimizers have in common: a rate that may be given with them."""

    lr: Any = field(default=None, kw_only=True, repr=False)  # as `check_schedule` returns it

    def __repr__(self) -> str:
        told = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name != "lr" or self.lr is not None]
        return f"{type(self).__name__}({', '.join(told)})"


@dataclass(frozen=True, repr=False)
class SGD(Rated, Descent):
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


@dataclass(frozen=True, repr=False)
class AdaGrad(Rated, Descent):
    """AdaGrad; see `adagrad`."""

    slots = ("squares",)
    default_lr = 0.01
    eps: float = 1e-10

    def direction(self, x: Vector, g: Vector, state: State, t: int) -> Updated:
        s = state["squares"] + g * g
        return g / (s**0.5 + self.eps), {"squares": s}


@dataclass(frozen=True, repr=False)
class Adam(Rated, Descent):
    """Adam and AdamW; see `adam` and `adamw`."""

    slots = ("mean", "square")
    default_lr = 0.001
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


@dataclass(frozen=True, repr=False)
class SGLD(Rated, Optimizer):
    """Stochastic gradient Langevin dynamics; see `sgld`."""

    noisy = True
    default_lr = 0.01
    temperature: float = 1.0

    def update(self, x: Vector, g: Vector, state: State, lr: float, t: int = 0, z: Vector = None) -> Updated:
        return x - g * lr + z * sqrt(2 * lr * self.temperature), state


def sgd(lr: RateLike = None, *, momentum: BelowOne = 0.0, nesterov: Flag = False, weight_decay: Rate = 0.0) -> SGD:
    """Stochastic gradient descent, with momentum, Nesterov's look-ahead and weight decay on request.

    g ← g + λx,   v ← βv + g,   x ← x − ηv   (Nesterov: x ← x − η(g + βv))

    lr is the rate η, or whatever `schedule` of the Trainer takes: a schedule, a text, a Plateau, ...; None: 0.1.

    >>> sgd(momentum=0.9)
    SGD(momentum=0.9, nesterov=False, weight_decay=0.0)
    >>> sgd(lr=0.05)
    SGD(lr=constant(0.05), momentum=0.0, nesterov=False, weight_decay=0.0)
    """
    given = checked("sgd", sgd, locals())
    if nesterov and not momentum:
        raise Invalid("sgd: nesterov=True needs a momentum above 0, got momentum=0.0")
    return SGD(**given)


def adagrad(lr: RateLike = None, *, eps: Rate = 1e-10) -> AdaGrad:
    """AdaGrad: coordinates with larger gradients get smaller rates (Duchi, Hazan and Singer 2011).

    s ← s + g²,   x ← x − η g / (√s + ε);   lr is the rate η, as in `sgd`; None: 0.01.

    >>> adagrad()
    AdaGrad(eps=1e-10)
    """
    return AdaGrad(**checked("adagrad", adagrad, locals()))


def adam(
    lr: RateLike = None, *, beta1: BelowOne = 0.9, beta2: BelowOne = 0.999, eps: Rate = 1e-8, weight_decay: Rate = 0.0
) -> Adam:
    """Adam (Kingma and Ba 2015); weight decay is added to the gradient.

    m ← β₁m + (1 − β₁)g,   v ← β₂v + (1 − β₂)g²,   x ← x − η (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)

    lr is the rate η, as in `sgd`; None: 0.001.

    >>> adam()
    Adam(beta1=0.9, beta2=0.999, eps=1e-08, weight_decay=0.0, decoupled=False)
    """
    return Adam(**checked("adam", adam, locals()))


def adamw(
    lr: RateLike = None, *, beta1: BelowOne = 0.9, beta2: BelowOne = 0.999, eps: Rate = 1e-8, weight_decay: Rate = 0.01
) -> Adam:
    """Adam with decoupled weight decay: x ← x − η (… + λx) (Loshchilov and Hutter 2019).

    lr is the rate η, as in `sgd`; None: 0.001.

    >>> adamw(weight_decay=0.1)
    Adam(beta1=0.9, beta2=0.999, eps=1e-08, weight_decay=0.1, decoupled=True)
    """
    return Adam(**checked("adamw", adamw, locals()), decoupled=True)


def sgld(lr: RateLike = None, *, temperature: Rate = 1.0) -> SGLD:
    """Stochastic gradient Langevin dynamics: descent with noise that samples exp(−loss / T) (Welling and Teh 2011).

    x ← x − ηg + √(2ηT) z,   z ~ N(0, 1) from key(seed, step)

    The loss is the mean over examples: T = 1 / (number of examples) samples the posterior. lr is the rate η, as in `sgd`;
    None: 0.01, a tenth of that of sgd, because the error of its samples grows with the rate.

    >>> sgld(temperature=1e-4)
    SGLD(temperature=0.0001)
    """
    return SGLD(**checked("sgld", sgld, locals()))
