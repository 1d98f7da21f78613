"""A picture as plain numbers: panels of curves. It is drawn by matplotlib, readable without colours, or told as rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from samestep.backends import find
from samestep.errors import Invalid

# Told apart without colours: by dashes, markers and shades.
STYLES = ["- o #000000", "-- s #0072b2", ": ^ #d55e00", "-. D #777777", "- v #009e73", "-- P #cc79a7", ": X #555555"]
GREY = "#999999"
FAR = 1e30  # what diverges is drawn up to here
COLUMNS = ("x", "y", "low", "high")


@dataclass(frozen=True, eq=False)
class Curve:
    """A line, with a band around it if low and high are given."""

    label: str
    x: Any
    y: Any
    low: Any = None
    high: Any = None
    kind: str = "line"  # or points; path: every point counts; thin: behind the others


@dataclass(frozen=True, eq=False)
class Panel:
    """Curves in one frame, maybe over the contours of an objective."""

    title: str
    xlabel: str
    ylabel: str
    curves: Sequence[Curve]
    log: str = ""  # which axes are logarithmic: "", "x", "y" or "xy"
    over: Any = None  # an objective of the lab


@dataclass(frozen=True, eq=False)
class Picture:
    """Panels, and what can be seen in them, in a sentence."""

    title: str
    panels: Sequence[Panel]
    says: str

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every point of every curve."""
        for panel in self.panels:
            for curve in panel.curves:
                columns = {name: values for name in COLUMNS if (values := getattr(curve, name)) is not None}
                for row in zip(*columns.values(), strict=True):
                    yield {
                        "panel": panel.title,
                        "curve": curve.label,
                        **dict(zip(columns, map(float, row), strict=True)),
                    }

    def draw(self) -> Any:
        """As a figure of matplotlib."""
        n = len(self.panels)
        columns = n if n < 4 else (n + 1) // 2
        size = max(4.6 * columns, 6.4), 4.0 * -(-n // columns) + 0.4
        drawing: Any = find.imported("matplotlib.figure", "plot").Figure(figsize=size, layout="constrained")
        drawing.suptitle(self.title, fontsize=11)
        frames = drawing.subplots(-(-n // columns), columns, squeeze=False).ravel()
        for panel, axes in zip(self.panels, frames, strict=False):
            _draw(panel, axes)
        for axes in frames[n:]:
            axes.remove()
        return drawing

    def save(self, path: str | Path) -> None:
        """Write it to a PNG file (or SVG, or PDF, as the name says)."""
        try:
            self.draw().savefig(path, dpi=110)
        except (OSError, ValueError) as error:
            raise Invalid(f"{path} cannot be written to: {getattr(error, 'strerror', None) or error}") from None

    def _repr_png_(self) -> bytes:
        """What a notebook shows."""
        self.draw().savefig(file := BytesIO(), format="png", dpi=100)
        return file.getvalue()


def _draw(panel: Panel, axes: Any) -> None:
    for number, curve in enumerate(panel.curves):
        line, marker, colour = STYLES[number % len(STYLES)].split()
        x, y = np.asarray(curve.x, float), np.asarray(curve.y, float)
        here = (abs(x) < FAR) & (abs(y) < FAR)  # and not NaN
        x, y = x[here], y[here]
        kinds: dict[str, dict[str, Any]] = {
            "line": {"markevery": 0.12 if len(x) > 8 else 1, "markersize": 4, "linewidth": 1.4},
            "points": {"linestyle": "none", "markersize": 3 if len(x) > 100 else 6, "markerfacecolor": "none"},
            "path": {"marker": "o", "markersize": 2.5, "linewidth": 1},
            "thin": {"marker": "", "linestyle": "-", "color": GREY, "linewidth": 0.7, "zorder": 1},
        }
        style = {"linestyle": line, "marker": marker, "color": colour, **kinds[curve.kind]}
        axes.plot(x, y, label=curve.label, **style)
        if curve.kind == "path":  # where it starts
            axes.plot(x[:1], y[:1], "s", color=colour, markersize=7)
        if curve.low is not None:
            low, high = (np.clip(np.asarray(edge, float)[here], -FAR, FAR) for edge in (curve.low, curve.high))
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
    if any((line.get_xydata() > 0).any() for line in axes.lines):  # else there is nothing to be seen on a log axis
        axes.set(**{f"{axis}scale": "log" for axis in panel.log})
    if panel.over:
        _contours(panel.over, axes)
    axes.set_title(panel.title, fontsize=9)
    axes.grid(alpha=0.25)
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    if len(once) > 1:
        axes.legend(once.values(), once.keys(), fontsize=7)


def _contours(objective: Any, axes: Any) -> None:
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    mesh = np.stack(np.meshgrid(np.linspace(left, right, 131), np.linspace(low, high, 81)))
    gap = objective.value(mesh) - objective.least
    levels = max(float(gap.max()), 1e-9) * np.geomspace(1e-4 if objective.name == "rosenbrock" else 3e-3, 0.9, 9)
    axes.contour(mesh[0], mesh[1], gap, levels=levels, colors="#666666", linewidths=0.7)
    if objective.minimum:
        axes.plot(*[[c] for c in objective.minimum], "*", color="black", markersize=10, label="minimum")
