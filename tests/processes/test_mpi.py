"""mpi: what is refused before any process is joined. What joined processes do is in test_processes.py."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from samestep.errors import BackendMissing, Invalid, ProcessFailed
from samestep.processes import mpi
from samestep.processes.place import Place
from samestep.processes.world import Alone


def get(array: Any) -> Any:
    return array


def test_one_process_is_alone() -> None:
    assert isinstance(mpi.join(get, Place(), 1.0), Alone)


@pytest.mark.parametrize(
    ("meet", "advice"), [("env://", " or `samestep train --processes 4 ...`"), ("file:///there", "")]
)
def test_processes_that_torchrun_has_started_are_told_of_mpiexec(meet: str, advice: str) -> None:
    with pytest.raises(Invalid) as error:
        mpi.join(get, Place(1, 4, 1, 4, meet, "torchrun"), 1.0)
    assert str(error.value) == (
        "these 4 processes were started with RANK and WORLD_SIZE, as by torchrun, which is for PyTorch alone: start them with "
        f"`mpiexec -n 4 python ...`{advice}"
    )


def test_mpi4py_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(BackendMissing) as error:
        mpi.join(get, Place(0, 2, 0, 2, "", "mpi"), 1.0)
    assert str(error.value) == "'mpi4py' is not installed; pip install 'samestep[mpi]'"


def test_a_world_that_has_failed_is_not_joined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = mpi.MpiWorld.__new__(mpi.MpiWorld)
    broken.broken = True
    monkeypatch.setattr(mpi, "_joined", broken)
    with pytest.raises(
        ProcessFailed, match="^a fit has failed, and its processes cannot be joined again: start the script"
    ):
        mpi.join(get, Place(0, 2, 0, 2, "", "mpi"), 1.0)


def test_a_connection_that_is_gone_is_a_process_that_is_gone() -> None:
    class Gone(Exception):
        pass

    def test() -> bool:
        raise Gone

    world = mpi.MpiWorld.__new__(mpi.MpiWorld)
    world.rank, world.size, world.cause, world._mpi = 0, 3, "", SimpleNamespace(Exception=Gone)
    assert world._done(2, SimpleNamespace(Test=lambda: 1)) is True
    with pytest.raises(ProcessFailed, match="^rank 2 is gone: it was killed, or its host was lost$"):
        world._done(2, SimpleNamespace(Test=test))
    world.cause = "rank 1 failed: OSError"
    with pytest.raises(ProcessFailed, match="^rank 1 failed: OSError$"):
        world._done(2, SimpleNamespace(Test=test))
