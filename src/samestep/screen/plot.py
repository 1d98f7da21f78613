"""Draws curves: in a terminal, with dots of Braille characters, or in a PNG or SVG file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from samestep.backends import find
from samestep.errors import Invalid

Curves = dict[str, NDArray[np.float64]]  # label → values at 0, 1, 2, ...
COLOURS = ("cyan", "yellow", "magenta", "green", "red", "blue")
# The bit of each dot in a Braille character (U+2800 + bits), by row and column of its 4 x 2 dots.
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def terminal(curves: Curves, unit: str, width: int = 80, height: int = 16) -> Text:
    """The curves as text, `width` characters wide: a frame with the range of values, and a legend below."""
    top, bottom = max(float(v.max()) for v in curves.values()), min(float(v.min()) for v in curves.values())
    if top == bottom:  # a line in the middle
        top, bottom = top + (abs(top) or 1.0) / 2, bottom - (abs(top) or 1.0) / 2
    names = [f"{value:.4g}" for value in (top, (top + bottom) / 2, bottom)]
    margin = max(map(len, names)) + 1
    columns = max(10, width - margin - 1)
    bits = np.zeros((height, columns), int)
    owner = np.zeros_like(bits)
    for number, values in enumerate(curves.values()):
        for row, column in _dots(values, top, bottom, 4 * height, 2 * columns):
            bits[row // 4, column // 2] |= DOTS[row % 4][column % 2]
            owner[row // 4, column // 2] = number
    text = Text()
    for row in range(height):
        label = {0: names[0], height // 2: names[1], height - 1: names[2]}.get(row, "")
        text.append(f"{label:>{margin}}┤" if label else f"{'':>{margin}}│")
        for column in range(columns):
            style = COLOURS[owner[row, column] % len(COLOURS)] if bits[row, column] else ""
            text.append(chr(0x2800 + bits[row, column]) if bits[row, column] else " ", style)
        text.append("\n")
    last = f"{max(map(len, curves.values())) - 1} {unit}"
    text.append(f"{'':>{margin}}└{'─' * columns}\n{'':>{margin}} 0{last:>{columns - 1}}\n")
    for number, label in enumerate(curves):
        text.append(f"{'':>{margin}} ")
        text.append("━━ ", COLOURS[number % len(COLOURS)])
        text.append(f"{label}\n")
    return text


def _dots(values: NDArray[np.float64], top: float, bottom: float, rows: int, columns: int) -> Sequence[tuple[int, int]]:
    """The dots of one curve: for each column, all rows between the lowest and the highest value that fall into it."""
    fine = -(-len(values) // columns)  # points for each column
    points = np.interp(np.linspace(0, len(values) - 1, columns * fine), np.arange(len(values)), values)
    level = np.rint((top - points) / (top - bottom) * (rows - 1)).astype(int).reshape(columns, fine)
    before = np.concatenate([level[:1, :1], level[:-1, -1:]]).ravel()  # where the column to the left ended: no gaps
    low, high = np.minimum(level.min(1), before + 1), np.maximum(level.max(1), before - 1)
    return [(row, column) for column in range(columns) for row in range(low[column], high[column] + 1)]


def figure(curves: Curves, unit: str, path: Path) -> None:
    """Draw the curves into a PNG or SVG file, as its name says."""
    drawing = find.imported("matplotlib.figure", "plot").Figure(figsize=(7, 4), layout="constrained")
    axes: Any = drawing.subplots()
    for label, values in curves.items():
        axes.plot(np.arange(len(values)), values, label=label, linewidth=1.8)
    axes.set(xlabel=unit, ylabel="learning rate")
    axes.set_ylim(bottom=min(0.0, *(float(values.min()) for values in curves.values())))
    axes.grid(alpha=0.3)
    drawing.legend(loc="outside upper left", fontsize=8)  # never over a curve
    try:
        drawing.savefig(path, dpi=150)
    except OSError as error:
        raise Invalid(f"{path} cannot be written to: {error.strerror or error}") from None


def check_figure(path: Path) -> Any:
    """What draws figures. It is an error, before anything is computed, if it is missing or the file cannot be written."""
    if path.suffix.lower() != ".png":
        raise Invalid(f"--png needs a file that ends in .png, got {path}")
    if not path.parent.is_dir():
        raise Invalid(f"{path} cannot be written to: there is no folder {path.parent}")
    return find.imported("matplotlib.figure", "plot")


def of_figure(figure: Any, width: int = 72, height: int = 14, axes: Any = None) -> Text:
    """The lines of a figure of matplotlib as text: of its first axes, or of these, with limits, labels and legend."""
    axes, text = axes or figure.axes[0], Text()
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    bits, owner = np.zeros((2, height, width), int)
    for number, line in enumerate(axes.lines):
        places = axes.transAxes.inverted().transform(axes.transData.transform(line.get_xydata().astype(float)))
        places = places[np.isfinite(places).all(1)] * [2 * width - 1, 4 * height - 1]
        for start, end in zip(places, [*places[1:], *places[-1:]], strict=True):
            for x, y in np.rint(np.linspace(start, end, 2 + int(np.abs(end - start).max()))).astype(int):
                if 0 <= x < 2 * width and 0 <= y < 4 * height:
                    row = 4 * height - 1 - y
                    bits[row // 4, x // 2] |= DOTS[row % 4][x % 2]
                    owner[row // 4, x // 2] = number
    for row in range(height):
        text.append(f"{high if row == 0 else low:9.4g}┤" if row in (0, height - 1) else f"{'':9}│")
        for dots, number in zip(bits[row], owner[row], strict=True):
            text.append(chr(0x2800 + dots) if dots else " ", COLOURS[number % len(COLOURS)] if dots else "")
        text.append("\n")
    text.append(f"{'':9}└{'─' * width}\n{'':9} {left:<10.4g}{axes.get_xlabel():^{width - 20}}{right:>10.4g}\n")
    names = [label.get_text() for label in axes.get_legend().get_texts()] if axes.get_legend() else [axes.get_ylabel()]
    for number, name in enumerate(filter(None, names)):
        text.append(f"{'':10}━━ ", COLOURS[number % len(COLOURS)])
        text.append(f"{name}\n")
    return text
