"""chapter: which cells of a chapter are run, in which order, and what is said of those that fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import DEADLINE, OUTSIDE
from PIL import Image

from samestep.d2l import chapter
from samestep.d2l.names import Batches
from samestep.errors import Invalid, SamestepError

SMALL = Path(__file__).with_name("small_chapter.md")
TABBED = """# Tabs, as in the older chapters
```{.python .input}
which = ["mxnet, as no tab is named"]
```

```{.python .input}
#@tab pytorch
which = ["pytorch"]
```

```{.python .input}
#@tab pytorch, mxnet
which.append("two")
```

    which.append("not a cell")

```bash
which
```

```{.python .input}
#@tab all
which.append("all")
which
```
"""


def run(path: Path, tab: str | None = "pytorch", **options: Any) -> dict[str, Any]:
    return chapter.run(path, tab, **options)


@pytest.fixture
def tabbed(tmp_path: Path) -> Path:
    (file := tmp_path / "tabbed.md").write_text(TABBED)
    return file


def one(tmp_path: Path, code: str) -> Path:
    """A chapter of one cell, which begins in line 4."""
    (file := tmp_path / "one.md").write_text(f"# One\n\n```python\n{code}\n```\n")
    return file


# Cells


def test_cells_of_a_tab_run_in_order(tabbed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tabbed)["which"] == ["pytorch", "two", "all"]
    out = capsys.readouterr().out
    assert out.splitlines() == [
        "[cell 2, line 7]",
        "[cell 3, line 12]",
        "[cell 4, line 23]",
        "['pytorch', 'two', 'all']",
    ]


def test_a_cell_that_names_no_tab_is_mxnets_where_others_name_one(tabbed: Path) -> None:
    assert [cell.tabs for cell in chapter.read(tabbed)] == [("mxnet",), ("pytorch",), ("pytorch", "mxnet"), ()]


def test_a_chapter_without_tabs_is_run_whole(tmp_path: Path) -> None:
    (file := tmp_path / "plain.md").write_text("```python\na = 1\n```\n```{.python .input}\nb = a + 1\n```\n")
    assert run(file, "pytorch")["b"] == 2


def test_a_notebook(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# A notebook"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "from d2l import torch as d2l\n", "a = 3"]},
        {"cell_type": "code", "source": "a * 2"},
        {"cell_type": "code", "source": "a;"},
    ]
    (file := tmp_path / "book.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}))
    assert run(file)["a"] == 3
    assert capsys.readouterr().out.splitlines() == ["[cell 1, line 1]", "[cell 2, line 1]", "6", "[cell 3, line 1]"]


def test_what_only_the_chapter_replaces_is_back_afterwards() -> None:
    import torch

    before = torch.nn.parallel.scatter, torch.cuda.synchronize, torch.cuda.device_count
    run(SMALL, epochs=2, seed=3, examples=10)
    assert (torch.nn.parallel.scatter, torch.cuda.synchronize, torch.cuda.device_count) == before
    assert (Batches.seed, Batches.examples, "d2l" in sys.modules) == (0, None, False)
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError)):
            torch.ones(1, device="cuda")


def test_epochs_are_replaced_wherever_a_cell_says_how_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(run(SMALL)["animator"].X[0]) == 30
    space = run(SMALL, epochs=2)
    assert (space["num_epochs"], space["max_epochs"], space["lr"], len(space["animator"].X[0])) == (2, 2, 0.1, 2)
    assert "(2, 2, False)\n" in capsys.readouterr().out


def test_a_seed_decides_what_a_cell_draws(tmp_path: Path) -> None:
    file = one(
        tmp_path,
        "from d2l import torch as d2l\nimport torch\ndrawn = torch.rand(3).tolist()\nseed = torch.initial_seed()",
    )
    first, again, other = (run(file, seed=seed) for seed in (1, 1, 2))
    assert first["drawn"] == again["drawn"] != other["drawn"]
    assert (first["seed"], other["seed"]) == (1, 2)


# Figures


def test_figures_in_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(SMALL, epochs=4, figures=tmp_path / "new" / "folder")
    [file] = (tmp_path / "new" / "folder").iterdir()
    assert file.name == "cell-08.png"
    assert f"figure {file}" in capsys.readouterr().out
    image = Image.open(file)
    assert image.size == (525, 375)
    assert len(set(image.convert("RGB").get_flattened_data())) > 20  # something was drawn


def test_figures_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    run(SMALL, epochs=4)
    out = capsys.readouterr().out
    assert any("\u2800" < sign <= "\u28ff" for sign in out)
    assert "epoch" in out
    assert "━━ a" in out


# Bad input


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("a = 1\nb = a / 0", "cell 1, line 5: ZeroDivisionError: division by zero"),
        ("def f():\n    raise ValueError('no')\n\nf()", "cell 1, line 5: ValueError: no"),
        ("a = 1\nb = (", "cell 1, line 5: SyntaxError: '(' was never closed"),
        (
            "from d2l import torch as d2l\nd2l.nothing",
            "cell 1, line 5: AttributeError: samestep.d2l.torch has no 'nothing'",
        ),
    ],
)
def test_a_cell_that_fails_is_named_with_its_line(tmp_path: Path, code: str, said: str) -> None:
    with pytest.raises(Invalid) as error:
        run(one(tmp_path, code))
    assert f"one.md: {said}" in str(error.value)


def test_an_error_in_a_function_of_another_cell_names_both(tmp_path: Path) -> None:
    (file := tmp_path / "two.md").write_text("```python\ndef f():\n    return [][1]\n```\n\n```python\n\nf()\n```\n")
    with pytest.raises(Invalid, match=r"two.md: cell 2, line 8, in cell 1, line 3: IndexError: list index"):
        run(file)


def test_cells_after_one_that_fails_are_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "two.md").write_text("```python\n1 / 0\n```\n\n```python\nprint('later')\n```\n")
    with pytest.raises(Invalid):
        run(file)
    assert "later" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "tab", "said"),
    [
        ("not-there.md", None, "pytorch", "not-there.md cannot be read: No such file or directory"),
        ("empty.md", "# No code\n", "pytorch", "empty.md has no cells of Python"),
        ("a.ipynb", "{}", "pytorch", "a.ipynb is not a chapter in Markdown or a notebook: 'cells'"),
        ("a.ipynb", "[", "pytorch", "a.ipynb is not a chapter in Markdown or a notebook: Expecting value"),
        ("bytes.md", b"\xff\xfe\x00", "pytorch", "bytes.md is not a chapter in Markdown or a notebook: 'utf-8'"),
        ("t.md", TABBED, "paddle", "t.md has no tab paddle: it has pytorch, mxnet"),
        ("t.md", TABBED, "keras", "t.md has no tab keras: it has pytorch, mxnet"),
        ("t.md", TABBED, None, "t.md has several tabs: choose with --tab pytorch, mxnet"),
    ],
)
def test_bad_chapters(tmp_path: Path, name: str, content: str | bytes | None, tab: str | None, said: str) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(Invalid) as error:
        run(file, tab)
    assert said in str(error.value)


def test_a_folder_that_cannot_be_made(tmp_path: Path, tabbed: Path) -> None:
    with pytest.raises(Invalid, match="tabbed.md cannot be made: File exists"):
        run(tabbed, figures=tabbed)


@pytest.mark.parametrize("says", ["#@tab pytorch", "from d2l import torch as d2l"])
def test_the_only_tab_need_not_be_named(tmp_path: Path, says: str) -> None:
    file = one(tmp_path, f"{says}\na = 1")
    assert run(file, None)["a"] == 1
    with pytest.raises(Invalid, match="one.md has no tab jax: it has pytorch"):
        run(file, "jax")


def test_a_framework_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mxnet", None)
    with pytest.raises(SamestepError, match="'mxnet' is not installed; it needs an environment of its own"):
        run(one(tmp_path, "from d2l import mxnet as d2l"), None)


# The command


def samestep(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "samestep", *map(str, arguments)]
    return subprocess.run(command, env=OUTSIDE, capture_output=True, text=True, timeout=DEADLINE)


def test_the_command(tmp_path: Path) -> None:
    file = one(tmp_path, "from d2l import torch as d2l\nnum_epochs = 9\nd2l.try_all_gpus(), num_epochs")
    done = samestep("chapter", file, "--tab", "pytorch", "--epochs", 3)
    assert done.returncode == 0
    assert done.stdout.splitlines() == ["[cell 1, line 4]", "([device(type='cpu')], 3)"]


@pytest.mark.parametrize(
    ("code", "options", "said"),
    [
        ("a = 1\n1 / 0", [], "cell 1, line 5: ZeroDivisionError: division by zero"),
        ("a = 1", ["--epochs", "0"], "--epochs must be at least 1, got --epochs=0"),
        ("a = 1", ["--examples", "-1"], "--examples must be at least 1, got --examples=-1"),
    ],
)
def test_bad_input_has_status_2(tmp_path: Path, code: str, options: list[str], said: str) -> None:
    done = samestep("chapter", one(tmp_path, code), "--tab", "pytorch", *options)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


def test_a_plot_of_a_function_is_labelled_with_what_the_cell_says(tmp_path: Path) -> None:
    code = """from d2l import torch as d2l
scheduler = lambda t: 0.1 * t
d2l.plot(d2l.arange(5), [scheduler(t) for t in range(5)])
ours = d2l.plt.gcf().axes[0].get_xlabel(), d2l.plt.gcf().axes[0].get_ylabel()
d2l.plot([1, 2, 3], [[1, 4, 9], [1, 8, 27]], 'x', 'f(x)', legend=['square', 'cube'])
theirs = d2l.plt.gcf().axes[0].get_xlabel(), [line.get_ydata().tolist() for line in d2l.plt.gcf().axes[0].lines]
d2l.plot([3, 1, 2])
alone = [line.get_xydata().tolist() for line in d2l.plt.gcf().axes[0].lines]"""
    space = run(one(tmp_path, code), figures=tmp_path)
    assert space["ours"] == ("t", "scheduler(t)")
    assert space["theirs"] == ("x", [[1, 4, 9], [1, 8, 27]])
    assert space["alone"] == [[[0, 3], [1, 1], [2, 2]]]
    assert sorted(file.name for file in tmp_path.glob("*.png")) == ["cell-01-2.png", "cell-01-3.png", "cell-01.png"]


def test_an_animator_takes_numbers_tuples_and_arrays(tmp_path: Path) -> None:
    code = """from d2l import torch as d2l
import torch
animator = d2l.Animator('epoch', xlim=[0, 3])
animator.add(1, torch.tensor(2.5))
animator.add(2, 3)
both = d2l.Animator()
both.add(1, (None, 4))
both.add((2, 3), torch.tensor([5.0, 6.0]))"""
    space = run(one(tmp_path, code), figures=tmp_path)
    assert (space["animator"].X, space["animator"].Y) == ([[1, 2]], [[2.5, 3]])
    assert (space["both"].X, space["both"].Y) == ([[2], [1, 3]], [[5], [4, 6]])


def test_epochs_of_a_call_are_replaced_too_and_devices_of_other_tabs_are_left_alone(tmp_path: Path) -> None:
    code = """from d2l import torch as d2l
class Thing:
    def device(self):
        return 'asked'
trainer = d2l.Trainer(max_epochs=10, num_gpus=0)
found = Thing().device()"""
    space = run(one(tmp_path, code), epochs=3)
    assert (space["trainer"].max_epochs, space["found"]) == (3, "asked")
