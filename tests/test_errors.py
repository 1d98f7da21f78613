"""errors: one exception stands alone, and names the line of the user's code that it comes from."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import samestep as ss
from samestep.errors import Invalid, SamestepError, lines, place, told
from samestep.models.torch import mlp

PACKAGE = Path(ss.__file__).parent


def chains(code: str) -> list[str]:
    """What is raised while another error is handled, and does not hide that one."""
    handlers = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ExceptHandler)]
    raised = [node for handler in handlers for node in ast.walk(handler) if isinstance(node, ast.Raise) and node.exc]
    return [ast.unparse(node) for node in raised if not (node.cause and ast.unparse(node.cause) == "None")]


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_error_has_a_chain(file: Path) -> None:
    assert chains(file.read_text()) == []


def test_a_chain_is_seen() -> None:
    body = "try:\n    f()\nexcept OSError as error:\n    "
    assert chains(body + "raise Invalid('x') from error") == ["raise Invalid('x') from error"]
    assert chains(body + "if error:\n        raise Invalid('x')") == ["raise Invalid('x')"]
    assert chains(body + "raise Invalid('x') from None") == chains(body + "raise") == []


class Source:
    def __init__(self, fails: str = "") -> None:
        self.fails = fails

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: Any) -> Any:
        if self.fails:
            int(self.fails)
        return np.zeros((len(i), 5), np.float32), np.zeros(len(i), int)


def fit(data: Any, **given: Any) -> ss.Run:
    return ss.Trainer(1, 8, devices="cpu", progress=False).fit(mlp((5, 3)), data, **given)


def line(text: str) -> int:
    """The number of the first line of this file that has a text."""
    return next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line)


PAIR = np.zeros((8, 5), np.float32), np.zeros(8, int)
REAL: dict[str, Callable[[], Any]] = {
    f"Source raised ValueError: invalid literal for int() with base 10: 'q' (test_errors.py, line {line('int(self.fails)')})":
        lambda: fit(Source("q")),
    "nowhere is not a safetensors file that can be read": lambda: fit(PAIR, weights="nowhere"),
    "is not the folder of a run": lambda: ss.Run.load("nowhere"),
    "schedule: cannot read": lambda: ss.Trainer(1, schedule="cosine("),
    "nowhere.npz must be a NumPy file": lambda: ss.Data(train="nowhere.npz"),
}  # fmt: skip


@pytest.mark.parametrize("message", REAL)
def test_one_exception(message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SamestepError) as caught:
        REAL[message]()
    assert message in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_an_error_of_a_model_passes_through_alone() -> None:
    def loss(output: Any, y: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        ss.Trainer(1, 8, devices="cpu", progress=False, loss=loss).fit(mlp((5, 3)), PAIR)
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)
    assert place(caught.value) == f"test_errors.py, line {line('raise KeyError')}"


def test_the_lines_of_the_user() -> None:
    with pytest.raises(Invalid) as ours:
        ss.Trainer(0)
    assert [at.tb_frame.f_code.co_name for at in lines(ours.value)] == ["test_the_lines_of_the_user"]
    with pytest.raises(json.JSONDecodeError) as pythons:
        json.loads("{")
    name, where = "JSONDecodeError: Expecting property name", f"(test_errors.py, line {line('json.loads(')})"
    assert told(pythons.value).startswith(name)
    assert told(pythons.value).endswith(where)
    assert (place(KeyError("x")), told(KeyError("x")), told(OSError())) == ("", "KeyError: 'x'", "OSError")
