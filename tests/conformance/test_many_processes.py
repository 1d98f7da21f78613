"""The same bits from several processes as from one: on the CPU, and on a GPU that they share."""

import json
import signal
import socket
import sys
from pathlib import Path

import pytest

import samestep as ss
from conformance import many_processes as job
from conformance import suite
from samestep.processes.place import launch
from samestep.training.group import Group


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
        step = Group.step
        patch.setattr(Group, "step", fail)
        with pytest.raises(Stopped):
            job.fit(job.MODELS[0], ["cpu"], run_dir=folder, checkpoint_every=1)
    return folder


def started(count: int, folder: Path, status: int, *more: object) -> list[dict]:
    """What each of several processes saw."""
    assert launch([sys.executable, job.__file__, str(folder), *map(str, more)], count) == status
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(count)]


@pytest.fixture(scope="module")
def two(begun: Path, tmp_path_factory) -> list[dict]:
    """Two processes, which at last go on with what was begun, until one of them is killed."""
    return started(2, tmp_path_factory.mktemp("two"), 128 + signal.SIGKILL, "cpu", f"run={begun}")


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> list[dict]:
    """Three processes; those of JAX know of each other by jax.distributed, which the script has set up."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        more = [f"jax=127.0.0.1:{free.getsockname()[1]}"] if suite.BACKEND == "jax" else []
    return started(3, tmp_path_factory.mktemp("three"), 0, "cpu", *more)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", job.MODELS)
@pytest.mark.parametrize("count", ["two", "three"])
def test_several_processes_give_the_bits_of_one(count, name, devices, expected, request):
    told = request.getfixturevalue(count)
    for seen in told:
        assert seen[f"{name} on {devices}"] == expected[name] | {"devices": ["cpu"] * devices * len(told)}


@pytest.mark.parametrize("count", ["two", "three"])
def test_a_twin_that_loses_a_part_is_rejected(count, expected, request):
    told, whole = request.getfixturevalue(count), expected[job.MODELS[0]]
    for seen in told:
        assert seen["twin"] == told[0]["twin"]
        assert seen["twin"]["recipe"] == whole["recipe"]
        assert not {*seen["twin"]["prints"]} & {*whole["prints"]}


def test_a_killed_process_is_named_by_the_others(two):
    assert two[0]["failed"] == "rank 1 is gone: it was killed, or its host was lost"


def test_a_run_goes_on_with_two_processes_and_then_with_one(two, begun, expected):
    """One process makes a step, two make another until one of them is killed, and one goes on from there."""
    run = job.fit(job.MODELS[0], ["cpu"], run_dir=begun)
    assert run.resumed == job.STOP + 1
    assert job.outcome(run) == expected[job.MODELS[0]]


@pytest.mark.skipif(suite.BACKEND != "torch" or ss.num_gpus() == 0, reason="needs a CUDA GPU, and PyTorch")
@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_on_one_gpu(count, tmp_path):
    for seen in started(count, tmp_path, 0, "cuda"):
        for name in job.MODELS:
            assert seen[f"{name} on 2"] == job.outcome(job.fit(name, ["cuda"])) | {"devices": ["cuda:0"] * 2 * count}
