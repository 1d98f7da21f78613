"""Runs the cells of a chapter of the book, one tab of them, as a notebook would: `samestep chapter FILE --tab pytorch`.

A chapter is the book's Markdown, or a notebook. A cell says which tabs it belongs to: `#@tab pytorch, jax`, `%%tab all`.
Where a chapter has tabs, a cell that says none belongs to the book's first one, mxnet; to all, if the reader chooses the tab
in the chapter (`tab.interact_select`); and where there are no tabs at all, every cell is run.
"""

from __future__ import annotations

import ast
import json
import linecache
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from samestep.d2l import drawing
from samestep.d2l.names import Batches
from samestep.d2l.standins import standing_in
from samestep.errors import Invalid
from samestep.screen import plot

TABS = {"pytorch": "torch", "jax": "jax", "tensorflow": "tensorflow", "paddle": "paddle", "mxnet": "mxnet"}
FIRST = "mxnet"  # the book's first framework
FENCE = re.compile(r"^```[ {.]*python.*?\n(.*?)(?:^```|\Z)", re.M | re.S)
MARK = re.compile(r"^(?:#@|%%)tab +(.+)$", re.M)
CHOOSES = "interact_select"
EPOCHS = ("num_epochs", "max_epochs")


@dataclass(frozen=True)
class Cell:
    """Code of a chapter, the number of its first line, and the tabs it belongs to; none: all of them."""

    number: int
    line: int
    code: str
    tabs: tuple[str, ...] = ()


def read(path: Path) -> list[Cell]:
    """The cells of a chapter."""
    try:
        text = path.read_text(encoding="utf-8")
        found = list(_of_notebook(text) if path.suffix == ".ipynb" else _of_markdown(text))
    except OSError as error:
        raise Invalid(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Invalid(f"{path} is not a chapter in Markdown or a notebook: {error}") from None
    if not found:
        raise Invalid(f"{path} has no cells of Python")
    tabs = [tuple(re.split(r"[\s,]+", mark[1].strip())) if (mark := MARK.search(code)) else () for _, code in found]
    usual = (FIRST,) if any(tabs) and CHOOSES not in text else ()
    return [
        Cell(number, line, code, () if "all" in own else own or usual)
        for number, ((line, code), own) in enumerate(zip(found, tabs, strict=True), 1)
    ]


def _of_markdown(text: str) -> Iterator[tuple[int, str]]:
    for found in FENCE.finditer(text):
        yield text.count("\n", 0, found.start(1)) + 1, found[1]


def _of_notebook(text: str) -> Iterator[tuple[int, str]]:
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] == "code":
            yield 1, "".join(cell["source"])


class Mended(ast.NodeTransformer):
    """A cell as today's frameworks take it, with another number of epochs if one is given."""

    def __init__(self, epochs: int | None) -> None:
        self.epochs = epochs

    def visit_Assign(self, node: ast.Assign) -> Any:
        targets, values = [node.targets[0]], [node.value]
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            targets, values = node.targets[0].elts, node.value.elts
        for target, value in zip(targets, values, strict=False):
            if self.epochs and isinstance(target, ast.Name) and target.id in EPOCHS and isinstance(value, ast.Constant):
                value.value = self.epochs
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        asks = isinstance(node.func, ast.Attribute) and node.func.attr == "device"
        return node.func if asks and not node.args and not node.keywords else node  # JAX's x.device() became x.device


def run(path: Path, tab: str | None, epochs: int | None = None, figures: Path | None = None, seed: int = 0,
        examples: int | None = None, console: Console | None = None) -> dict[str, Any]:  # fmt: skip
    """Run the cells of a tab, in order; what they have defined is returned."""
    cells, console = read(path), console or Console(highlight=False, soft_wrap=True)
    there = [name for name in TABS if any(name in cell.tabs for cell in cells)]
    if tab not in TABS and (tab is not None or len(there) != 1):
        raise Invalid(f"--tab must be one of {', '.join(there or TABS)}, got {tab}")
    tab = tab or there[0]
    if there and tab not in there:
        raise Invalid(f"{path} has no tab {tab}: it has {', '.join(there)}")
    if figures:
        try:
            figures.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Invalid(f"{figures} cannot be made: {error.strerror}") from None
    chosen = SimpleNamespace(selected=lambda *names: tab in names, interact_select=lambda *names: None)
    space: dict[str, Any] = {"__name__": "__main__", "tab": chosen}
    with standing_in(TABS[tab]) as d2l:
        Batches.examples = examples
        d2l.manual_seed(seed)
        for cell in cells:
            if not cell.tabs or tab in cell.tabs:
                console.print(f"[cell {cell.number}, line {cell.line}]", style="dim", markup=False)
                _run(cell, path, space, epochs)
                _show(cell, figures, console)
    return space


def _run(cell: Cell, path: Path, space: dict[str, Any], epochs: int | None) -> None:
    """Run one cell, and show what its last line gives. Lines for the notebook itself (%, !) are left out."""
    name = f"{path}, cell {cell.number}"
    code = "\n" * (cell.line - 1) + re.sub(r"^[ \t]*[%!].*$", "", cell.code, flags=re.M)
    linecache.cache[name] = len(code), None, code.splitlines(keepends=True), name
    try:
        tree = ast.fix_missing_locations(Mended(epochs).visit(ast.parse(code, name)))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), space)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), space)
            if value is not None and not cell.code.rstrip().endswith(";"):
                print(repr(value))
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
        line = error.lineno if isinstance(error, SyntaxError) and not lines else (lines or [cell.line])[-1]
        said = next(iter(str(error).strip().splitlines()), "")
        raise Invalid(f"{path}: cell {cell.number}, line {line}: {type(error).__name__}: {said}") from error


def _show(cell: Cell, folder: Path | None, console: Console) -> None:
    """The figures that a cell has drawn: in the folder, or in the terminal."""
    pyplot = drawing.pyplot()
    for i, number in enumerate(pyplot.get_fignums()):
        figure = pyplot.figure(number)
        if folder:
            file = folder / f"cell-{cell.number:02}{f'-{i + 1}' * (i > 0)}.png"
            figure.savefig(file, dpi=150)
            console.print(f"figure {file}", markup=False)
        else:
            console.print(plot.of_figure(figure))
    pyplot.close("all")
