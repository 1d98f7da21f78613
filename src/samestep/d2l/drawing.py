"""Curves as the chapters draw them: `plot`, and an Animator and a ProgressBoard that grow while a model trains.

They are figures of pyplot: a notebook shows them, live; `samestep chapter` writes them to files, or draws them in the terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np

from samestep.backends import find

SIZE = (3.5, 2.5)


def pyplot() -> Any:
    return find.imported("matplotlib.pyplot", "plot")


def plot(X: Any, Y: Any = None, *args: Any, figsize: Any = SIZE, axes: Any = None, **options: Any) -> None:
    """Draw curves: Y over X, each one curve or a list of them; without Y, X over 0, 1, 2, ... All else is as of an Animator."""
    animator = Animator(*args, figsize=figsize, **options)
    X, Y = (curves if curves is None or np.ndim(curves[0]) else [curves] for curves in (X, Y))
    X, Y = ([range(len(y)) for y in X], X) if Y is None else (X, Y)
    for x, y in zip(list(X) * (len(Y) // len(X)), Y, strict=True):
        animator.X.append([float(number) for number in x])
        animator.Y.append([float(number) for number in y])
    animator.draw_all(axes)


class Animator:
    """Curves that grow: `add(x, (y1, y2, None))` adds a point to each curve that has one. X and Y hold all of them."""

    def __init__(
        self, xlabel: str | None = None, ylabel: str | None = None, legend: Sequence[str] | None = None, xlim: Any = None,
        ylim: Any = None, xscale: str = "linear", yscale: str = "linear", fmts: Sequence[str] = ("-", "m--", "g-.", "r:"),
        nrows: int = 1, ncols: int = 1, figsize: tuple[float, float] = SIZE,
    ) -> None:  # fmt: skip
        self.xlabel, self.ylabel, self.legend, self.xlim, self.ylim = xlabel, ylabel, list(legend or []), xlim, ylim
        self.scales, self.fmts, self.grid, self.figsize = (xscale, yscale), fmts, (nrows, ncols), figsize
        self.X: list[list[float]] = []
        self.Y: list[list[float]] = []
        self.fig: Any = None

    def add(self, x: Any, y: Any) -> None:
        y = y if isinstance(y, (list, tuple)) or getattr(y, "ndim", False) else [y]  # an array may be one number
        x = x if isinstance(x, (list, tuple)) or getattr(x, "ndim", False) else [x] * len(y)
        self.X, self.Y = self.X or [[] for _ in y], self.Y or [[] for _ in y]
        for xs, ys, a, b in zip(self.X, self.Y, x, y, strict=True):
            if a is not None and b is not None:
                xs.append(float(a))
                ys.append(float(b))
        self.draw_all()

    def draw_all(self, axes: Any = None) -> None:
        """Draw all curves anew; in a notebook, in the place of what was shown before."""
        if axes is None:
            self.fig = self.fig or pyplot().figure(figsize=self.figsize, layout="constrained")
            self.fig.clf()
            axes = np.ravel(self.fig.subplots(*self.grid))[0]
        for xs, ys, style in zip(self.X, self.Y, cycle(self.fmts), strict=False):
            axes.plot(xs, ys, style, marker="." if len(xs) == 1 else None)  # a line of one point would not be seen
        axes.set(xlabel=self.xlabel or "", ylabel=self.ylabel or "", xscale=self.scales[0], yscale=self.scales[1])
        limits = {"xlim": self.xlim, "ylim": self.ylim}
        axes.set(**{name: limit for name, limit in limits.items() if limit and limit[0] != limit[1]})
        axes.grid(visible=True, alpha=0.4)
        if self.legend:
            axes.legend(axes.lines, self.legend, fontsize=8)
        ipython = sys.modules.get("IPython")
        if self.fig and hasattr(ipython and ipython.get_ipython(), "kernel"):
            display = find.imported("IPython.display", "plot")
            display.display(self.fig)
            display.clear_output(wait=True)


class ProgressBoard(Animator):
    """Curves by label: `draw` adds a point to one, or the mean of every_n of them."""

    display = True

    def draw(self, x: Any, y: Any, label: str, every_n: int = 1) -> None:
        waiting = vars(self).setdefault("waiting", {}).setdefault(label, [])
        waiting.append((float(x), float(y)))
        if len(waiting) >= every_n:
            if label not in self.legend:
                self.legend, self.X, self.Y = [*self.legend, label], [*self.X, []], [*self.Y, []]
            for curves, value in zip((self.X, self.Y), np.mean(waiting, 0), strict=True):
                curves[self.legend.index(label)].append(float(value))
            waiting.clear()
            if self.display:
                self.draw_all()
