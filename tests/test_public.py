"""The public face: its names, that importing it is light, and who may import a framework."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import samestep

PACKAGE = Path(samestep.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
FRAMEWORKS = ("torch", "jax", "tensorflow", "paddle", "mxnet")
ONE_FILE_EACH = ("models", "schedules/exports", "d2l", "processes")

NAMES = [
    "Data", "Device", "Plateau", "Run", "SamestepError", "Schedule", "Trainer", "adagrad", "adam", "adamw", "allreduce",
    "constant", "cosine", "cpu", "device_of", "drops", "exponential", "fashion_mnist", "geometric", "get", "gpu",
    "inverse_power", "natural_exp", "num_gpus", "one_cycle", "path_average", "piecewise", "poly", "put", "replicate", "sgd",
    "sgld", "split_batch", "swa", "table", "triangle", "try_all_gpus", "try_gpu",
]  # fmt: skip


def test_the_names_are_frozen() -> None:
    assert sorted(samestep.__all__) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there_and_explained(name: str) -> None:
    thing = getattr(samestep, name)
    assert thing.__name__ == name
    assert thing.__module__.startswith("samestep.")
    assert thing.__doc__


def test_dir_shows_the_names_and_nothing_else() -> None:
    assert dir(samestep) == sorted([*NAMES, "__version__"])


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'samestep' has no attribute 'Trainor'$"):
        samestep.Trainor  # noqa: B018
    assert not hasattr(samestep, "torch")


def imported_by(code: str, names: tuple[str, ...]) -> list[str]:
    """Which of these modules a fresh Python has loaded after running the code."""
    code += f"\nimport sys; print(*(name for name in {names!r} if name in sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_import_is_light() -> None:
    assert imported_by("import samestep", (*FRAMEWORKS, "numpy", "rich", "samestep")) == ["samestep"]


def test_the_trainer_needs_no_framework() -> None:
    code = "import samestep; samestep.Trainer(optimizer=samestep.sgd(momentum=0.9)); samestep.cpu()"
    assert imported_by(code, (*FRAMEWORKS, "samestep.training.trainer")) == ["samestep.training.trainer"]


def relative(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_every_file_says_why_it_exists(file: Path) -> None:
    first = file.read_text().lstrip().splitlines()[0]
    assert ast.get_docstring(ast.parse(file.read_text()))
    assert first.startswith(('"""', 'r"""'))


def on_import(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run when the module is imported: all but those inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from on_import(node)


def frameworks_of(code: str) -> set[str]:
    names: set[str] = set()
    for node in on_import(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif node.level == 0 and node.module:
            names.add(node.module)
    return {name.split(".")[0] for name in names} & set(FRAMEWORKS)


def may_import(file: str) -> set[str]:
    """backends/x/*.py, and x.py in the rooms that have one file a framework."""
    *rooms, name = file.removesuffix(".py").split("/")
    owner = rooms[-1] if rooms[:1] == ["backends"] else name if "/".join(rooms) in ONE_FILE_EACH else ""
    return {{"optax": "jax", "keras": "tensorflow"}.get(owner, owner)} & set(FRAMEWORKS)


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_only_the_files_of_a_framework_import_it(file: Path) -> None:
    assert frameworks_of(file.read_text()) <= may_import(relative(file))


def test_the_check_above_sees_what_it_should() -> None:
    assert frameworks_of((PACKAGE / "backends" / "torch" / "backend.py").read_text()) == {"torch"}
    assert frameworks_of("try:\n    import torch.nn as nn\nexcept ImportError:\n    pass") == {"torch"}
    assert frameworks_of("class A:\n    from jax import numpy") == {"jax"}
    assert frameworks_of("def f():\n    import torch\nfrom . import torch\nfrom samestep.models import torch") == set()
    assert may_import("backends/torch/replica.py") == may_import("models/torch.py") == {"torch"}
    assert may_import("training/step.py") == may_import("backends/__init__.py") == may_import("torch.py") == set()
