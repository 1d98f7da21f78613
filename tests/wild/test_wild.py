"""Models of other packages give the same bits on 1, 2 and 3 devices, in two processes and when stopped and resumed.

What cannot be trained is refused, with a message that says why.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from samestep.errors import SamestepError
from samestep.processes import launch
from samestep.training.fit import Fit
from wild import job, suite

if not suite.FAMILY:
    pytest.skip("`make wild` trains models of other packages", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of packages that are loaded here
    ENTRIES = suite.entries()
if not ENTRIES:
    pytest.skip(f"{suite.FAMILIES[suite.FAMILY][1]} is not installed", allow_module_level=True)


TRAINED = [name for name, entry in ENTRIES.items() if not entry.refused]
REFUSED = [name for name, entry in ENTRIES.items() if entry.refused]
ENGINE = "torch" if suite.FAMILIES[suite.FAMILY][0] == "torch" else "mpi"
pytestmark = pytest.mark.filterwarnings("ignore")  # models of others are not ours to keep quiet


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("socket.getaddrinfo", suite.no_network)


class Stopped(Exception):
    pass


@pytest.fixture
def stopping() -> Iterator[pytest.MonkeyPatch]:
    """Fits end when the first checkpoint is on its way."""
    save = Fit.save

    def stop(self: Fit) -> None:
        save(self)
        raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fit, "save", stop)
        yield patch


@cache
def on_one(name: str) -> dict[str, Any]:
    run = suite.fit(name, ["cpu"])
    prints = [run.recipe["initial"], *run.fingerprints]
    assert len(set(prints)) == 1 + suite.STEPS, "some step changed nothing"
    return json.loads(json.dumps(suite.outcome(run)))


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes saw of the models that were asked for."""
    folder = tmp_path_factory.mktemp("two")
    asked = [item.callspec.params["name"] for item in request.session.items if "two_processes" in item.name]
    command = [sys.executable, job.__file__, str(folder), *asked]
    with (
        open(folder / "output", "w+") as output,
        launch.Processes(command, 2, os.environ, ENGINE, output.fileno()) as processes,
    ):
        status = processes.wait()
        output.seek(0)
        assert status == 0, output.read()
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", TRAINED)
def test_it_is_stopped_on_three_devices_and_resumed_on_two(
    name: str, stopping: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(Stopped):
        suite.fit(name, ["cpu"] * 3, run_dir=tmp_path, checkpoint_every=1)
    stopping.undo()
    run = suite.fit(name, ["cpu"] * 2, run_dir=tmp_path, checkpoint_every=1)
    assert run.resumed == 1
    assert suite.outcome(run) == on_one(name)


if suite.ASKED:  # `make test` has no time for these: the test above is on 1, 2 and 3 devices, too

    @pytest.mark.parametrize("count", [2, 3])
    @pytest.mark.parametrize("name", TRAINED)
    def test_several_devices_give_the_bits_of_one(name: str, count: int) -> None:
        run = suite.fit(name, ["cpu"] * count)
        assert run.devices == ["cpu"] * count
        assert suite.outcome(run) == on_one(name)

    @pytest.mark.skipif(ENGINE == "mpi" and not launch.mpiexec(), reason="needs mpiexec (pip install '.[mpi]')")
    @pytest.mark.parametrize("name", TRAINED)
    def test_two_processes_give_the_bits_of_one(name: str, two: list[dict[str, Any]]) -> None:
        assert [seen[name] for seen in two] == [on_one(name)] * 2


if REFUSED:

    @pytest.mark.parametrize("name", REFUSED)
    def test_it_is_refused_and_told_why(name: str) -> None:
        with pytest.raises(SamestepError, match=ENTRIES[name].refused):
            suite.fit(name, ["cpu"] * 2)
