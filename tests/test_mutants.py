"""mutants: what is changed, which tests are run for it, and what counts as noticed. None of this needs cosmic-ray."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import executed
import pytest
from executed import Map, Tree
from mutants import Mutant, core, function_at, meaning, noticed

CODE = """import os

LIMIT = 3


@decorated
class Thing:
    size: int = 1

    @property
    def room(self):
        def inner():
            return 2
        return inner() * LIMIT


def alone(x: int | None) -> int:
    return x + 1
"""


@pytest.mark.parametrize(
    ("line", "name"),
    [(3, ""), (6, "Thing"), (8, "Thing"), (10, "Thing.room"), (13, "Thing.room"), (14, "Thing.room"), (18, "alone")],
)
def test_the_function_that_a_line_is_in(line: int, name: str) -> None:
    assert function_at(CODE, line) == name


def test_what_is_never_executed_has_no_meaning() -> None:
    assert meaning(CODE.replace("int | None", "int & None").replace("int:", "str:")) == meaning(CODE)
    assert meaning(CODE + "\n# a comment") == meaning(CODE)
    assert meaning(CODE.replace("x + 1", "x - 1")) != meaning(CODE)
    assert meaning(CODE.replace("int = 1", "int = 2")) != meaning(CODE)


def test_a_change_is_known_by_its_words() -> None:
    change = Mutant("draws.py", "order", "", "    a = f(x + 1, strict=True)", "    a = f(x + 1, strict= False)")
    assert change.is_same("draws.py", "strict=True", "strict=False")
    assert change.is_same("*", "f(x + 1, strict=True)", "f(x+1, strict=False)")
    assert not change.is_same("shards.py", "strict=True", "strict=False")
    assert not change.is_same("draws.py", "x + 1", "x - 1")
    assert not change.is_same("draws.py", "True", "None")
    assert change.is_same("draws.py", "a =", "*")
    assert not change.is_same("draws.py", "f(x + 1", "*")


def test_the_core_has_no_models_and_no_other_frameworks() -> None:
    files = core()
    assert {"shards.py", "training/step.py", "backends/torch/flat.py", "backends/jax/flat.py"} < set(files)
    assert not [name for name in files if name.startswith(("models/", "d2l/", "backends/paddle/"))]


def recording(folder: Path, file: str = "tests/a.py") -> Path:
    """Of three files: two quick tests and a slow one, one in another backend, and a file that starts processes."""
    tests = {file: 9.0, f"{file}::quick": 1.0, f"{file}::slow": 5.0, f"{file}::quickest": 0.5}
    runs: dict[str, Any] = {
        f"torch {file}": {"seconds": tests, "functions": {"x.py::f": [1, 2, 3], "x.py::C.g": [2], "x.py::<module>": [0]}},
        "torch tests/b.py": {"seconds": {"tests/b.py": 7.0, "tests/b.py::t": 7.0}, "functions": {"x.py::f": [0]}},
        "jax tests/c.py": {"seconds": {"tests/c.py": 2.0, "tests/c.py::t": 2.0}, "functions": {"x.py::f": [1]}},
    }  # fmt: skip
    (folder / "map.json").write_text(json.dumps(runs))
    return folder / "map.json"


def test_the_quickest_tests_of_every_file_are_run_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = Map(recording(tmp_path))

    def stages(function: str) -> list[list[str]]:
        return [[test.name for test in stage] for stage in tests.stages("x.py", function)]

    assert stages("f") == [
        ["tests/a.py::quickest", "tests/a.py::quick", "tests/b.py"],
        ["tests/c.py::t"],
        ["tests/a.py::slow"],
    ]
    own = Map(recording(tmp_path, "tests/test_x.py"))  # tests of the file of the same name come first, also slow ones
    assert [test.name for test in next(own.stages("x.py", "f"))] == [
        "tests/test_x.py::quickest", "tests/test_x.py::quick", "tests/test_x.py::slow", "tests/b.py",
    ]  # fmt: skip
    assert stages("C") == stages("C.g") == [["tests/a.py::slow"]]
    everything = [test for stage in stages("f") for test in stage]
    assert sorted(test for stage in stages("a new function") for test in stage) == sorted(everything)
    assert [*tests.stages("y.py", "f")] == []
    monkeypatch.setattr(executed, "FIRST", 1.0)
    tests.limit = 6.0
    assert stages("f") == [["tests/a.py::quickest"], ["tests/a.py::quick"], ["tests/c.py::t"]]


class Fake(Tree):
    """A tree whose tests fail as they are told: `always`, or only when the code has been changed."""

    always: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    status = 1

    def run(
        self, backend: str, tests: Any, limit: float, watch: bool = False, known: Any = ()
    ) -> tuple[int, list[list[Any]]]:
        notes = []
        for test in tests:
            if f"--deselect={test}" in tests or test.startswith("--"):
                continue
            notes.append(["begin", test])
            if test in self.always or (test in self.changed and self.file("x.py").read_text() == "new"):
                return self.status, notes
        return 0, notes


@pytest.mark.parametrize(
    ("always", "changed", "status", "by"),
    [
        ((), (), 1, ""),
        ((), ("tests/a.py::slow",), 1, "tests/a.py::slow"),
        (("tests/a.py::quick",), (), 1, ""),
        (("tests/a.py::quick",), ("tests/b.py",), 1, "tests/b.py"),
        ((), ("tests/c.py::t",), 124, "tests/c.py::t hangs"),
    ],
    ids=["by none", "by one", "by one that fails anyway", "by another one", "by one that hangs"],
)
def test_noticed_is_what_fails_only_with_the_change(
    always: tuple[str, ...], changed: tuple[str, ...], status: int, by: str, tmp_path: Path
) -> None:
    tree = Fake(tmp_path)
    for name, value in (("always", always), ("changed", changed), ("status", status)):
        object.__setattr__(tree, name, value)
    tree.file("x.py").parent.mkdir(parents=True)
    tree.file("x.py").write_text("old")
    assert noticed(Mutant("x.py", "f", "new", "old", "new"), tree, Map(recording(tmp_path))) == by
    assert tree.file("x.py").read_text() == "old"


THING = """
def called(x):
    return x + 1

def by_a_fixture():
    return 2

class Started:
    def elsewhere(self):
        return 3

def never():
    return 4
"""
TESTS = """
import subprocess, sys
import pytest
from samestep import thing

@pytest.fixture(scope="module")
def two():
    return thing.by_a_fixture()

def test_directly():
    assert thing.called(1) == 2
    sys.settrace(None)  # as one that has had its own use of it; the tests after it are watched nevertheless

def test_with_a_fixture(two):
    assert two == 2

def test_in_another_process():
    code = "from samestep.thing import Started; print(Started().elsewhere())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "3\\n"

def test_that_fails_anyway():
    assert thing.never() == 5
"""

NEW = """
def test_new():
    assert thing.called(2) == 3
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one module and one file of tests."""
    root = tmp_path / "checkout"
    for name in ("src/samestep", "tests", "examples", "benchmarks", "docs"):
        (root / name).mkdir(parents=True)
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "src/samestep/__init__.py"):
        (root / name).touch()
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = ["-p", "no:cacheprovider"]')
    (root / "src" / "samestep" / "thing.py").write_text(THING)
    (root / "tests" / "test_thing.py").write_text(TESTS)
    plugin = Path(executed.__file__).read_text().replace('"torch", "torch._inductor", "torch.distributed", ', "")
    (root / "tests" / "executed.py").write_text(plugin)  # nothing here needs PyTorch
    monkeypatch.setattr(executed, "ROOT", root)
    monkeypatch.setattr(executed, "runs", lambda: [("torch", "tests/test_thing.py")])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return root


@pytest.fixture
def tree(small: Path, tmp_path: Path) -> Iterator[Tree]:
    with closing(Tree.of(tmp_path / "tree")) as tree:
        yield tree


def test_what_is_recorded_and_what_is_noticed_then(small: Path, tree: Tree, tmp_path: Path) -> None:
    trees = SimpleQueue[Tree]()
    trees.put(tree)
    executed.record(tmp_path / "map.json", trees, 1)
    tests = Map(tmp_path / "map.json")
    found = {name: [test.name for test in each] for name, each in tests.tests.items() if "<" not in name}
    start = "tests/test_thing.py"
    assert found.pop("thing.py::Started") == [start, f"{start}::test_in_another_process"]  # the class, when it is made
    assert found == {
        "thing.py::called": [f"{start}::test_directly"],
        "thing.py::by_a_fixture": [start],
        "thing.py::Started.elsewhere": [f"{start}::test_in_another_process"],
    }

    def by(function: str, before: str, after: str) -> str:
        return noticed(Mutant("thing.py", function, THING.replace(before, after), before, after), tree, tests)

    assert by("called", "x + 1", "x - 1") == f"{start}::test_directly"
    file = tree.root / "tests" / "test_thing.py"
    file.write_text(TESTS.replace("assert thing.called(1) == 2", "thing.never()") + NEW)
    executed.record(tmp_path / "map.json", trees, 1)
    again = Map(tmp_path / "map.json").tests  # of the test that is new
    assert [test.name for test in again["thing.py::called"]] == [f"{start}::test_directly", f"{start}::test_new"]
    assert "thing.py::never" not in again
    executed.record(tmp_path / "map.json", trees, 1, [start])  # of all
    again = Map(tmp_path / "map.json").tests
    assert [test.name for test in again["thing.py::called"]] == [f"{start}::test_new"]
    assert [test.name for test in again["thing.py::never"]] == [f"{start}::test_directly"]
    file.write_text(TESTS)
    assert by("called", "x + 1", "1 + x") == ""
    assert by("by_a_fixture", "return 2", "return 3") == f"{start}::test_with_a_fixture"
    assert by("called", "def called(x):", "def called(y, x=g):") == "importing it"
    assert tree.file("thing.py").read_text() == THING
    assert (small / "src" / "samestep" / "thing.py").read_text() == THING


def test_names_of_tests_that_are_not_there_do_not_keep_others_from_running(tree: Tree) -> None:
    """A name may have a text of Python's in it, which another version writes otherwise."""
    file = "tests/test_thing.py"
    status, notes = tree.run(
        "torch", [f"{file}::test_with_a_fixture", f"{file}::gone[x]", f"{file}::test_directly"], 60
    )
    assert status == 0
    assert [note[1] for note in notes if note[0] == "begin"] == [
        f"{file}::test_with_a_fixture",
        f"{file}::test_directly",
    ]
    assert tree.run("torch", [f"{file}::gone[x]"], 60)[0] == 0
    assert tree.run("torch", [file], 60)[0] == 1  # all of them, of which one fails
