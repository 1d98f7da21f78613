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
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from rich.console import Console

from samestep.d2l import drawing
from samestep.d2l.standins import standing_in
from samestep.errors import Invalid
from samestep.screen import plot

TABS = {"pytorch": "torch", "jax": "jax", "tensorflow": "tensorflow", "paddle": "paddle", "mxnet": "mxnet"}
FENCE = re.compile(r"^```[ {.]*python.*?\n(.*?)(?:^```|\Z)", re.M | re.S)
MARK = re.compile(r"^(?:#@|%%)tab +(.+)$", re.M)
MAGIC = re.compile(r"^[%!].*$", re.M)  # what is for the notebook itself, or for a shell


class Cell(NamedTuple):
    """Code of a chapter, the number of its first line, and the tabs it belongs to; none: all of them."""

    number: int
    line: int
    code: str
    tabs: tuple[str, ...]


def read(path: Path) -> list[Cell]:
    """The cells of a chapter."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            found = [(1, "".join(cell["source"])) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        else:
            found = [(text.count("\n", 0, cell.start(1)) + 1, cell[1]) for cell in FENCE.finditer(text)]
    except OSError as error:
        raise Invalid(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise Invalid(f"{path} is not a chapter in Markdown or a notebook: {error}") from None
    if not found:
        raise Invalid(f"{path} has no cells of Python")
    tabs = [tuple(re.split(r"[\s,]+", mark[1].strip())) if (mark := MARK.search(code)) else () for _, code in found]
    usual = ("mxnet",) if any(tabs) and "tab.interact_select" not in text else ()
    return [
        Cell(number, line, code, () if "all" in own else own or usual)
        for number, ((line, code), own) in enumerate(zip(found, tabs, strict=True), 1)
    ]


class Mended(ast.NodeTransformer):
    """A cell as today's frameworks take it, with another number of epochs if one is given."""

    def __init__(self, tab: str, epochs: int | None) -> None:
        self.tab, self.epochs = tab, epochs

    def _count(self, name: str, value: Any) -> None:
        if self.epochs and name.endswith("_epochs") and isinstance(value, ast.Constant):
            value.value = self.epochs

    def visit_Assign(self, node: ast.Assign) -> Any:
        parts = [getattr(side, "elts", [side]) for side in (node.targets[0], node.value)]
        for name, number in zip(*parts, strict=False):
            self._count(ast.unparse(name), number)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        for keyword in node.keywords:
            self._count(keyword.arg or "", keyword.value)
        name, bare = ast.unparse(node.func), not [*node.args, *node.keywords]
        if name == "d2l.plot" and not node.keywords and node.args and isinstance(node.args[-1], ast.ListComp):
            drawn = node.args[-1]  # [lr(t) for t in ...], which tells how to label the axes
            node.args += [ast.Constant(ast.unparse(part)) for part in (drawn.generators[0].target, drawn.elt)]
        return node.func if self.tab == "jax" and bare and name.endswith(".device") else node  # x.device() of older JAX


def run(path: Path, tab: str | None, epochs: int | None = None, figures: Path | None = None, seed: int = 0,
        examples: int | None = None, console: Console | None = None) -> dict[str, Any]:  # fmt: skip
    """Run the cells of a tab, in order; what they have defined is returned."""
    cells, console = read(path), console or Console(highlight=False, soft_wrap=True)
    there = [name for name in TABS if any(name in cell.tabs for cell in cells)]
    there = there or [tab for tab, name in TABS.items() if any(f"d2l import {name}" in cell.code for cell in cells)]
    tab = there[0] if tab is None and len(there) == 1 else tab
    if tab is None or tab not in (there or TABS):
        has = "several tabs: choose with --tab" if tab is None else f"no tab {tab}: it has"
        raise Invalid(f"{path} has {has} {', '.join(there or TABS)}")
    if figures:
        try:
            figures.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Invalid(f"{figures} cannot be made: {error.strerror}") from None
    chosen = SimpleNamespace(selected=lambda *names: tab in names, interact_select=lambda *names: None)
    space: dict[str, Any] = {"__name__": "__main__", "tab": chosen}
    drawing.pyplot().switch_backend("agg")  # no windows
    drawing.pyplot().close("all")
    with standing_in(TABS[tab], seed, examples):
        for cell in cells:
            if not cell.tabs or tab in cell.tabs:
                console.print(f"[cell {cell.number}, line {cell.line}]", style="dim", markup=False)
                _run(cell, path, space, Mended(tab, epochs))
                _show(cell, figures, console)
    return space


def _run(cell: Cell, path: Path, space: dict[str, Any], mended: Mended) -> None:
    """Run one cell, and show what its last line gives. Commands for the notebook or a shell are left out."""
    chapter, above = f"{path}, cell ", "\n" * (cell.line - 1)
    name = f"{chapter}{cell.number}"
    try:
        try:
            tree: Any = ast.parse(above + cell.code, name)
        except SyntaxError:
            tree = ast.parse(above + MAGIC.sub("", cell.code), name)
            for command in re.findall(r"^!.*$", cell.code, re.M):
                print(f"left out, as it is for a shell: {command.strip()}")
        linecache.cache[name] = len(cell.code), None, (above + cell.code).splitlines(keepends=True), name
        tree = ast.fix_missing_locations(mended.visit(tree))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), space)
        value = eval(compile(ast.Expression(last.value), name, "eval"), space) if last else None
        if value is not None and not cell.code.rstrip().endswith(";"):
            print(repr(value))
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        places = {f.filename.removeprefix(f"{path}, "): f.lineno for f in frames if f.filename.startswith(chapter)}
        syntax = error.lineno if isinstance(error, SyntaxError) else cell.line
        where = ", in ".join(f"{at}, line {line}" for at, line in (places or {f"cell {cell.number}": syntax}).items())
        raise Invalid(f"{path}: {where}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from None


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
