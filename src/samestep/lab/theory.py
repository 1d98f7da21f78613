"""What theory says of stochastic gradient descent, to be held against what is measured."""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import numpy as np

from samestep.errors import Invalid
from samestep.lab.descent import Descent
from samestep.lab.objectives import Numbers, Objective


def bound(rates: Numbers, r: float, lipschitz: Numbers) -> Numbers:
    """E[R(x̄_T)] − R* ≤ (r² + Σ L²η_t²) / (2Σ η_t), after each T = 1, 2, …: for convex R, and in expectation only.

    x̄_T = Σ η_t·x_t / Σ η_t over the first T points. r is the distance of the first one from the minimum, L² a bound on the mean
    square of the stochastic gradient, for all steps or for each.

    >>> bound([0.1, 0.1], r=1, lipschitz=1).round(9).tolist()
    [5.05, 2.55]
    """
    eta = np.asarray(rates, np.float64)
    with np.errstate(divide="ignore"):
        return (r * r + np.cumsum(np.square(lipschitz) * eta**2)) / (2 * np.cumsum(eta))


def best_rate(r: float, lipschitz: float, steps: int) -> float:
    """The constant rate for which the bound after so many steps is least, r/(L√T): it is rL/√T then."""
    return r / (lipschitz * sqrt(steps))


def progress_gap(rate: float, lipschitz: float) -> float:
    """While the gap R(x) − R* is above ηL²/2, a step brings x closer to the minimum, on average."""
    return rate * lipschitz**2 / 2


class Moments(NamedTuple):
    """Mean and variance of every coordinate before each step and after the last: arrays of shape (steps + 1, d)."""

    mean: Numbers
    variance: Numbers


def moments(diagonal: Numbers, start: Numbers, rates: Numbers, noise: float = 1.0) -> Moments:
    """Exactly: x ← (1 − ηh)·x − ησz on a quadratic, so the mean is multiplied by 1 − ηh and the variance by its square, + η²σ².

    >>> found = moments([2, 4], [-5, -2], [0.1] * 50)
    >>> found.mean[-1].round(4).tolist(), np.sqrt(found.variance[-1]).round(3).tolist()
    ([-0.0001, -0.0], [0.167, 0.125])
    """
    h, mean = np.asarray(diagonal, np.float64), [np.asarray(start, np.float64)]
    variance = [np.zeros_like(h)]
    for eta in np.asarray(rates, np.float64):
        mean.append((1 - eta * h) * mean[-1])
        variance.append((1 - eta * h) ** 2 * variance[-1] + (eta * noise) ** 2)
    return Moments(np.array(mean), np.array(variance))


def stationary(rate: float, curvature: float, noise: float = 1.0) -> float:
    """The variance that a constant rate ends with, however long it goes on: ησ² / (h·(2 − ηh)); infinite from η = 2/h on."""
    return rate * noise**2 / (curvature * (2 - rate * curvature)) if rate * curvature < 2 else np.inf


def gradient_norms(objective: Objective, rates: Numbers, start: Numbers, noise: float = 0.0) -> Numbers:
    """L for each step of SGD: the root of the mean square of the stochastic gradient, or a bound on it. From theory alone.

    Where gradients are bounded it is that bound. On a quadratic with noise, and on least squares with one example a step, drawn
    with replacement, the second moments of x follow a linear recurrence, so the mean square is known exactly.
    """
    if objective.lipschitz is not None:
        return np.full(len(rates), sqrt(objective.lipschitz**2 + noise**2 * len(objective.start)))
    if objective.diagonal is not None:
        mean, variance = moments(objective.diagonal, start, rates, noise)
        squares = np.square(objective.diagonal) * (mean**2 + variance)
        return np.sqrt(squares[:-1].sum(1) + noise**2 * len(objective.diagonal))
    if objective.examples is None:
        raise Invalid(f"{objective.name}: its gradients have no bound that is known")
    a, y = objective.examples
    # In coordinates (x, 1): the gradient of example i is a_i·(u_i·(x, 1)) with u_i = (a_i, −y_i).
    u, lift = np.column_stack([a, -y]), np.column_stack([a, np.zeros(len(y))])
    point, found, square = np.append(start, 1.0), list[float](), (a * a).sum(1)
    second, own = np.outer(point, point), np.diag([noise**2] * a.shape[1] + [0.0])
    for rate in rates:
        residual = ((u @ second) * u).sum(1)  # E (a_i·x − y_i)²
        found.append(float(np.sqrt((square * residual).mean() + np.trace(own))))
        drift, spread = lift.T @ (u @ second) / len(y), (lift * residual[:, None]).T @ lift / len(y)
        second = second - rate * (drift + drift.T) + rate**2 * (spread + own)
    return np.array(found)


def bound_of(made: Descent) -> tuple[Numbers, float]:
    """The bound after each T for the rates that a descent took, and its L: the largest of all steps."""
    norm = float(gradient_norms(made.objective, made.rates, made.start, made.noise).max(initial=0))
    return bound(made.rates, away(made), norm), norm


def away(made: Descent) -> float:
    """r, how far from the minimum a descent starts."""
    return float(np.linalg.norm(made.start - (made.objective.minimum or 0.0)))


def seen(n: int) -> float:
    """The share of n examples that n draws with replacement show at least once: 1 − (1 − 1/n)^n, nearly 1 − 1/e ≈ 0.63."""
    return float(1 - (1 - 1 / n) ** n)


def seen_once(n: int) -> float:
    """The share that they show exactly once: (1 − 1/n)^(n−1), nearly 1/e ≈ 0.37."""
    return float((1 - 1 / n) ** (n - 1))


def posterior(objective: Objective, temperature: float) -> tuple[Numbers, Numbers]:
    """Mean and covariance of exp(−f/T), f a quadratic or least squares: the minimum, and T times the inverse Hessian."""
    if objective.diagonal is not None:
        hessian = np.diag(objective.diagonal)
    elif objective.examples is not None and objective.curvature and objective.curvature[0] > 0:
        a, y = objective.examples
        hessian = a.T @ a / len(y)
    else:
        raise Invalid(f"{objective.name}: the covariance of exp(-f/T) is known for quadratics and least squares alone")
    return np.array(objective.minimum), temperature * np.linalg.inv(hessian)
