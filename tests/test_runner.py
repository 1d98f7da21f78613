"""run.py: with which Pythons the tests are run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import run

ROOT = Path(__file__).parents[1]


def test_other_pythons_run_the_core_and_pytorchs_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there, missing = (tmp_path / f".venv-3.{minor}" / "bin" / "python" for minor in (12, 13))
    there.parent.mkdir(parents=True)
    there.touch()
    found = {one.name: one for one in run.runs(None, [there, missing])}
    (other,) = (one for one in found.values() if one.python == str(there))
    assert (other.name, other.backend) == ("Python 3.12: PyTorch, and what needs no framework", "torch")
    assert other.files == []  # all, but what needs other frameworks, and processes, which are tested beside it
    assert set(other.but) == {run.TESTS / name for name in [*run.PROCESSES, "examples", "wild"]}
    said = capsys.readouterr().out
    assert f"the tests with Python 3.13 are skipped: it is not installed, or has no environment ({missing})\n" in said
    assert "3.12" not in said


def test_every_version_that_the_package_names_is_tested() -> None:
    named = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    (others,) = re.findall(r"^OTHERS := (.*)", (ROOT / "Makefile").read_text(), re.M)
    assert named == ["3.11", *others.split()]
