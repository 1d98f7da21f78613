"""Objectives to descend on: value and gradient, and what theory needs to know of them. Coordinates come first in every array.

So `value` and `gradient` take one point (d,), many (d, m), or a whole mesh (d, 131, 81).
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from samestep.checks import above_zero, nearest, show, whole
from samestep.errors import Invalid

Numbers = Any  # an array of float64
LARGEST = 10**4


@dataclass(frozen=True, eq=False)
class Objective:
    """f, its gradient, where it is least, and its constants, where they exist.

    curvature    the least and the largest eigenvalue of the Hessian anywhere; None: unknown, or there is no bound
    lipschitz    a bound on the norm of the gradient anywhere; with examples, on the root of its mean square over them
    diagonal     the eigenvalues, coordinate by coordinate, of a quadratic along the axes: there, theory is exact
    examples     a_1, …, a_n and y of a mean of losses l(a_i·x, y_i); slope: the derivative l'
    """

    name: str
    value: Callable[[Numbers], Numbers]
    gradient: Callable[[Numbers], Numbers]
    start: tuple[float, ...]
    minimum: tuple[float, ...] | None = None
    curvature: tuple[float, float] | None = None
    lipschitz: float | None = None
    diagonal: tuple[float, ...] | None = None
    examples: tuple[Numbers, Numbers] | None = None
    slope: Callable[[Numbers, Numbers], Numbers] | None = None

    @property
    def least(self) -> float:
        """The value at the minimum."""
        return 0.0 if self.minimum is None else float(self.value(np.array(self.minimum)))

    def of_examples(self, x: Numbers, chosen: Numbers) -> Numbers:
        """The mean gradient of some examples, `chosen` (b, m), at the points x (d, m)."""
        assert self.examples
        assert self.slope
        a, y = self.examples[0].T[:, chosen], self.examples[1][chosen]
        return (a * self.slope((a * x[:, None]).sum(0), y)).mean(1)


def _along(values: Numbers, x: Numbers) -> Numbers:
    """Values, one for each first index of x."""
    return np.reshape(values, (-1, *[1] * (np.ndim(x) - 1)))


def quadratic(*curvatures: float) -> Objective:
    """f(x) = ½ Σ h_i·x_i²; the chapter's x1² + 2·x2² has curvatures 2 and 4.

    >>> quadratic(2, 4).gradient(np.array([-5.0, -2.0]))
    array([-10.,  -8.])
    """
    h = tuple(above_zero("quadratic", "each curvature", one) for one in curvatures or (2, 4))
    start, name = (-5.0, -2.0) if len(h) == 2 else (-5.0,) * len(h), f"quadratic({', '.join(f'{one:g}' for one in h)})"
    return Objective(name, lambda x: (_along(h, x) * x * x).sum(0) / 2, lambda x: _along(h, x) * x, start,
                     (0.0,) * len(h), (min(h), max(h)), diagonal=h)  # fmt: skip


def rosenbrock() -> Objective:
    """f(x) = (1 − x1)² + 100·(x2 − x1²)²: a bent valley, flat along its floor; not convex."""
    side = lambda x: x[1] - x[0] ** 2
    slope = lambda x: np.stack([2 * (x[0] - 1) - 400 * x[0] * side(x), 200 * side(x)])
    return Objective("rosenbrock", lambda x: (1 - x[0]) ** 2 + 100 * side(x) ** 2, slope, (-1.5, 2.0), (1.0, 1.0))


def absolute(d: int = 2) -> Objective:
    """f(x) = |x1| + … + |xd|: its gradient does not shrink near the minimum."""
    start = (-5.0, -2.0, *[0.0] * whole("absolute", "d", d, 1, LARGEST))[:d]
    return Objective(f"absolute({d})", lambda x: abs(x).sum(0), np.sign, start, (0.0,) * d, lipschitz=d**0.5)


def wells(hidden: int | None = None) -> Objective:
    """f(x) = x²(1 + sin x): 0 at x = 0 and at every −π/2 + 2πk, all equally deep.

    With `hidden`, the well at −π/2 + 2π·hidden is deeper by 1, through a bump that is zero outside of it: who has not looked
    into each well cannot know which is the deepest.
    """
    at = np.inf if hidden is None else -np.pi / 2 + 2 * np.pi * whole("wells", "hidden", hidden, -LARGEST, LARGEST)
    inside = lambda x: np.maximum(1 - (x - at) ** 2, 0)  # 1 in the middle of the hidden well
    bump = lambda x: 0 if hidden is None else 6 * inside(x) ** 2 * (x - at)  # its gradient
    return Objective(
        "wells" if hidden is None else f"wells({hidden})", lambda x: (x * x * (1 + np.sin(x)) - inside(x) ** 3).sum(0),
        lambda x: 2 * x * (1 + np.sin(x)) + x * x * np.cos(x) + bump(x), (8.0,), None if hidden is None else (at,),
    )  # fmt: skip


def minima(objective: Objective, low: float, high: float, grid: int = 20_001) -> Numbers:
    """All local minima of an objective of one coordinate in [low, high]: where its gradient turns from negative to positive.

    >>> minima(wells(), -2, 5).round(4).tolist()
    [-1.5708, 0.0, 4.7124]
    """
    x = np.linspace(low, high, grid) + 1e-7 * (high - low) / grid  # off round numbers, where it may be just 0
    g = objective.gradient(x[None])[0]
    turns = (g[:-1] < 0) & (g[1:] > 0)
    left, right = x[:-1][turns], x[1:][turns]
    for _ in range(60):
        middle = (left + right) / 2
        down = objective.gradient(middle[None])[0] < 0
        left, right = np.where(down, middle, left), np.where(down, right, middle)
    return (left + right) / 2


def least_squares(a: Numbers, y: Numbers) -> Objective:
    """f(x) = 1/n Σ ½(a_i·x − y_i)²: a linear model with squared loss."""
    return _linear("least_squares", a, y, lambda z, y: (z - y) ** 2 / 2, lambda z, y: z - y, lambda z, y: 1 + 0 * z, 1)


def logistic(a: Numbers, y: Numbers) -> Objective:
    """f(x) = 1/n Σ log(1 + exp(−y_i·a_i·x)), y_i = ±1. Its gradients are bounded everywhere: L² = 1/n Σ ‖a_i‖²."""
    slope = lambda z, y: -y / (1 + np.exp(np.clip(y * z, -500, 500)))
    bend = lambda z, y: -slope(z, y) * (y + slope(z, y))
    return _linear("logistic", a, y, lambda z, y: np.logaddexp(0, -y * z), slope, bend, 0.25)


def _linear(name: str, a: Numbers, y: Numbers, loss: Any, slope: Any, bend: Any, most: float) -> Objective:
    """A mean of losses of a linear model. bend: the second derivative of the loss, at most `most`."""
    a, y = np.asarray(a, np.float64), np.asarray(y, np.float64)
    if a.ndim != 2 or y.shape != a.shape[:1] or not np.isfinite(a).all() or not np.isfinite(y).all():
        raise Invalid(f"{name}: needs finite a of shape (n, d) and y of shape (n,), got {a.shape} and {y.shape}")
    (n, d), x = a.shape, np.zeros(a.shape[1])
    for _ in range(50):  # Newton's method
        hessian = a.T @ (a * bend(a @ x, y)[:, None]) / n
        x = x - np.linalg.lstsq(hessian, a.T @ slope(a @ x, y) / n, rcond=None)[0]
    if not abs(a.T @ slope(a @ x, y) / n).max() < 1e-9 or (most < 1 and (y * (a @ x) > 0).all()):
        raise Invalid(f"{name}: has no minimum on these examples: a plane separates the classes")
    eigenvalues = np.linalg.eigvalsh(a.T @ a / n).tolist()
    score = lambda x: np.tensordot(a, x, 1)  # (n, …)
    return Objective(
        name, lambda x: loss(z := score(x), _along(y, z)).mean(0),
        lambda x: np.tensordot(a.T, slope(z := score(x), _along(y, z)), 1) / n, (-2.0, -1.0, *[0.0] * d)[:d], tuple(x.tolist()),
        (eigenvalues[0] if most == 1 else 0.0, eigenvalues[-1] * most),
        None if most == 1 else float((a * a).sum(1).mean() ** 0.5), None, (a, y), slope,
    )  # fmt: skip


@cache
def clothes(examples: int = 250) -> tuple[Numbers, Numbers]:
    """Dresses (+1) and shirts (−1) of Fashion-MNIST: how bright the upper and the lower half are, standardised."""
    from samestep.data.fashion import load

    (images, labels), _ = load()
    chosen = np.flatnonzero((labels == 3) | (labels == 6))[:examples]
    halves = images[chosen].reshape(-1, 2, 14 * 28).mean(2, dtype=np.float64)
    return (halves - halves.mean(0)) / halves.std(0), np.where(labels[chosen] == 3, 1.0, -1.0)


OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "quadratic": quadratic, "rosenbrock": rosenbrock, "absolute": absolute, "wells": wells,
    "least_squares": lambda: least_squares(*clothes()), "logistic": lambda: logistic(*clothes()),
}  # fmt: skip


def objective(text: str | Objective) -> Objective:
    """The objective of a name, with its numbers if it takes any.

    >>> objective("quadratic(1, 100)").curvature
    (1.0, 100.0)
    """
    made: Objective = text if isinstance(text, Objective) else read("objective", text, OBJECTIVES)
    return made


def read(what: str, text: str, known: Mapping[str, Callable[..., Any]]) -> Any:
    """What a text such as quadratic(1, 100) or sgd(momentum=0.9) stands for. It is never run as code."""
    try:
        tree: Any = ast.parse(str(text).strip(), mode="eval").body
        call: Any = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
        name, args = call.func.id, [ast.literal_eval(one) for one in call.args]
        named = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        if name in known:
            inspect.signature(known[name]).bind(*args, **named)
    except (SyntaxError, ValueError, TypeError, AttributeError, MemoryError, RecursionError) as error:
        told = error if isinstance(error, TypeError) else "write a name, and what it takes in brackets"
        raise Invalid(f"{what}: cannot read {show(text)}: {told}") from None
    if name not in known:
        raise Invalid(f"{what}: there is no {show(name)}; {nearest(name, known)}")
    return known[name](*args, **named)
