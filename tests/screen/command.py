"""The command, run in this process, in an empty folder, on made-up images."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from samestep.data import fashion
from samestep.processes.place import COMMAND, OVERRIDES
from samestep.screen import cli
from samestep.signals import Signals

RANDOM = np.random.default_rng(0)
TRAIN, TEST = ((RANDOM.random((n, 1, 28, 28), np.float32), RANDOM.integers(0, 10, n)) for n in (64, 32))


class Done(NamedTuple):
    status: object
    out: str
    err: str


Samestep = Callable[..., Done]


@pytest.fixture
def sealed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder to work in; no real data, and no way to fetch any."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(fashion, "load", lambda: (TRAIN, TEST))
    monkeypatch.setattr(fashion, "_fetch", lambda folder: pytest.fail("a download was tried"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SAMESTEP_DATA", raising=False)
    monkeypatch.setattr(fashion, "DEBIAN", tmp_path / "debian")


@pytest.fixture
def samestep(capsys: pytest.CaptureFixture[str]) -> Samestep:
    """Runs the command and says how it ended. What it changes in this process is put back."""

    def call(*arguments: object) -> Done:
        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["samestep", *map(str, arguments)])
            patch.setattr(sys, "path", sys.path[:])
            patch.setenv(OVERRIDES, "{}")
            patch.setenv(COMMAND, "")
            patch.setattr(Signals, "came", 0)
            with pytest.raises(SystemExit) as ended:
                cli.run()
                sys.exit(0)
        return Done(ended.value.code or 0, *capsys.readouterr())

    return call
