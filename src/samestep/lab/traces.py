"""Paths of gradient descent in two dimensions: taken by `train_2d`, drawn by `show_trace_2d`, as in the chapter on SGD."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from samestep.backends import find

START = (-5.0, -2.0)
Point = tuple[float, float]


def train_2d(trainer: Callable[..., Any], steps: int = 20, f_grad: Callable[..., Any] | None = None) -> list[Point]:
    """The points that `trainer` visits from (−5, −2) on, with the first one. It gets x1, x2, two states, and f_grad if given.

    >>> path = train_2d(lambda x1, x2, s1, s2: (x1 / 2, x2 / 2, s1, s2), steps=2)
    epoch 2, x1: -1.250000, x2: -0.500000
    >>> path
    [(-5.0, -2.0), (-2.5, -1.0), (-1.25, -0.5)]
    """
    x1, x2, s1, s2 = *START, 0, 0
    path = [START]
    for _ in range(steps):
        x1, x2, s1, s2 = trainer(x1, x2, s1, s2, *([f_grad] if f_grad else []))
        path.append((_number(x1), _number(x2)))
    print(f"epoch {steps}, x1: {path[-1][0]:f}, x2: {path[-1][1]:f}")
    return path


def _number(x: Any) -> float:
    """Of an array of one number, of any framework."""
    return float(x.item() if hasattr(x, "item") else np.asarray(x).item())


def show_trace_2d(f: Callable[..., Any], results: Sequence[Point]) -> None:
    """Draw a path over the contours of f."""
    pyplot = find.imported("matplotlib.pyplot", "plot")
    path = np.asarray(results, float)
    (left, low), (right, high) = (edge(np.vstack([path, corner]), 0) for edge, corner in zip(
        (np.min, np.max), ([-5.5, -3.0], [1.0, 1.0]), strict=True))  # fmt: skip
    x1, x2 = np.meshgrid(np.linspace(left, right, 131), np.linspace(low, high, 81))
    _, axes = pyplot.subplots(figsize=(3.5, 2.5), layout="constrained")
    axes.plot(*path.T, "-o", color="tab:orange", markersize=4, linewidth=1.2)
    axes.contour(x1, x2, f(x1, x2), colors="tab:blue", linewidths=0.8)
    axes.set(xlabel="x1", ylabel="x2")
