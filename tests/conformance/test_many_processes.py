"""The same bits from several processes as from one: on the CPU, and on a GPU that they share."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

import samestep as ss
from conformance import many_processes as job
from conformance import suite
from samestep.processes import launch
from samestep.training.replicas import Replicas


class Stopped(Exception):
    pass


@pytest.fixture(scope="module")
def expected() -> dict[str, dict]:
    """In this process, on one device; and on two, which is the same."""
    seen = {name: job.outcome(job.fit(name, ["cpu"])) for name in job.MODELS}
    suite.same(job.fit("normed", ["cpu"]), job.fit("normed", ["cpu"] * 2))
    prints = [run["prints"] for run in seen.values()]
    assert all(len(steps) == len(set(steps)) for steps in prints), "some step changed nothing"
    return seen


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """A run that one process has begun."""
    folder = tmp_path_factory.mktemp("begun") / "run"

    def fail(self, *rest):
        if rest[-1] == job.STOP:
            raise Stopped
        return step(self, *rest)

    with pytest.MonkeyPatch.context() as patch:
        step = Replicas.step
        patch.setattr(Replicas, "step", fail)
        with pytest.raises(Stopped):
            job.fit(job.MODELS[0], ["cpu"], run_dir=folder, checkpoint_every=1)
    return folder


ENGINE = "torch" if suite.BACKEND == "torch" else "mpi"
if ENGINE == "mpi" and not launch.mpiexec():
    pytest.skip("needs mpiexec (pip install '.[mpi]')", allow_module_level=True)


def started(count: int, folder: Path, *more: object) -> tuple[int, str, list[dict]]:
    """The exit status of several processes, what they printed, and what each saw."""
    command = [sys.executable, job.__file__, str(folder), *map(str, more)]
    with (
        open(folder / "output", "w+") as output,
        launch.Processes(command, count, os.environ, ENGINE, output.fileno()) as processes,
    ):
        status = processes.wait()
        output.seek(0)
        return status, output.read(), [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(count)]


@pytest.fixture(scope="module")
def killed(begun: Path, tmp_path_factory) -> tuple[int, str, list[dict]]:
    """Two processes, which at last go on with what was begun, until one of them is killed."""
    return started(2, tmp_path_factory.mktemp("two"), "cpu", begun)


@pytest.fixture(scope="module")
def two(killed) -> list[dict]:
    return killed[-1]


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> list[dict]:
    status, said, told = started(3, tmp_path_factory.mktemp("three"), "cpu")
    assert status == 0, said
    return told


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", job.MODELS)
@pytest.mark.parametrize("count", ["two", "three"])
def test_several_processes_give_the_bits_of_one(count, name, devices, expected, request):
    told = request.getfixturevalue(count)
    for seen in told:
        assert seen[f"{name} on {devices}"] == expected[name] | {"devices": ["cpu"] * devices * len(told)}


@pytest.mark.parametrize("count", ["two", "three"])
def test_own_loops_and_fine_tuning_in_several_processes(count, request):
    told = request.getfixturevalue(count)
    alone = job.own_loop(["cpu"]), job.fine_tuned(["cpu"])
    assert len(set(alone[0])) == 3
    for seen in told:
        assert (seen["own loop"], seen["fine-tuned"]) == alone


@pytest.mark.parametrize("count", ["two", "three"])
def test_a_twin_that_loses_a_part_is_rejected(count, expected, request):
    told, whole = request.getfixturevalue(count), expected[job.MODELS[0]]
    for seen in told:
        assert seen["twin"] == told[0]["twin"]
        assert seen["twin"]["recipe"] == whole["recipe"]
        assert not {*seen["twin"]["prints"]} & {*whole["prints"]}


def test_a_killed_process_is_named(killed):
    """By the other one, or by the launcher where mpiexec ends all."""
    status, said, _ = killed
    assert status == 128 + signal.SIGKILL
    assert "rank 1 is gone: it was killed, or its host was lost\n" in said


def test_a_run_goes_on_with_two_processes_and_then_with_one(two, begun, expected):
    """One process makes a step, two make another until one of them is killed, and one goes on from there."""
    run = job.fit(job.MODELS[0], ["cpu"], run_dir=begun)
    assert run.resumed == job.STOP + 1
    assert job.outcome(run) == expected[job.MODELS[0]]


@pytest.mark.skipif(suite.BACKEND != "torch" or ss.num_gpus() == 0, reason="needs a CUDA GPU, and PyTorch")
@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_on_one_gpu(count, tmp_path):
    for seen in started(count, tmp_path, "cuda")[-1]:
        for name in job.MODELS:
            assert seen[f"{name} on 2"] == job.outcome(job.fit(name, ["cuda"])) | {"devices": ["cuda:0"] * 2 * count}
