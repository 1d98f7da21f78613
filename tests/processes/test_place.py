"""place: what the variables of torchrun, SLURM and mpiexec say about a process, and which devices are its own."""

from __future__ import annotations

from typing import Any

import pytest

from samestep.backends.base import Backend
from samestep.devices import cpu, gpu, resolve
from samestep.errors import Invalid
from samestep.processes.place import MEET, Place, find, first_host, tasks_per_node


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, Place()),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Place()),
        ({"WORLD_SIZE": "1"}, Place()),  # of a script for SLURM, run with one task
        ({"MASTER_ADDR": "a", "MASTER_PORT": "x"}, Place()),  # set for good in many a shell
        (
            {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            Place(1, 3, 0, 1, "env://", "torchrun"),
        ),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Place(1, 2, 0, 1, "env://", "torchrun")),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, Place(1, 2, 1, 1, "env://", "torchrun")),
        (
            {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"},
            Place(5, 6, 1, 2, "env://", "torchrun"),
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", MEET: "file:///x"},
            Place(1, 2, 1, 2, "file:///x", "torchrun"),
        ),
    ],
)
def test_place_by_torchrun_or_by_hand(environ: dict[str, str], place: Place) -> None:
    assert find(environ) == place


SRUN = {
    "SLURM_JOB_ID": "4242", "SLURM_STEP_ID": "1", "SLURM_NTASKS": "5", "SLURM_STEP_NUM_TASKS": "5", "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_STEP_NODELIST": "gpu[07-08],login", "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({}, Place(4, 5, 0, 1, "tcp://gpu07:29695", "slurm")),
        (
            {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"},
            Place(3, 5, 1, 2, "tcp://gpu07:29695", "slurm"),
        ),
        (
            {"SLURM_STEP_ID": "2"},
            Place(4, 5, 0, 1, "tcp://gpu07:29696", "slurm"),
        ),  # two steps of a job do not meet each other
        ({"MASTER_ADDR": "other", "MASTER_PORT": "77"}, Place(4, 5, 0, 1, "tcp://other:77", "slurm")),
        ({"SLURM_JOB_ID": "1000"}, Place(4, 5, 0, 1, "tcp://gpu07:27001", "slurm")),
        ({"SLURM_JOB_ID": "10000"}, Place(4, 5, 0, 1, "tcp://gpu07:30001", "slurm")),  # above 40000 it begins anew
        ({"MASTER_PORT": "1"}, Place(4, 5, 0, 1, "tcp://gpu07:1", "slurm")),
        ({"MASTER_PORT": "65535"}, Place(4, 5, 0, 1, "tcp://gpu07:65535", "slurm")),
        ({"SLURM_NODEID": "0"}, Place(4, 5, 0, 2, "tcp://gpu07:29695", "slurm")),
        (
            {"SLURM_NODEID": "3", "SLURM_LOCALID": "2"},
            Place(4, 5, 2, 3, "tcp://gpu07:29695", "slurm"),
        ),  # not told of it
        ({"SLURM_NODEID": "4"}, Place(4, 5, 0, 1, "tcp://gpu07:29695", "slurm")),
        ({"SLURM_NODEID": "-1", "SLURM_LOCALID": "2"}, Place(4, 5, 2, 3, "tcp://gpu07:29695", "slurm")),
        ({"SLURM_STEP_NUM_TASKS": "0", "SLURM_PROCID": "0"}, Place()),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, Place()),  # a script inside a batch job
        ({"RANK": "0", "WORLD_SIZE": "2"}, Place(0, 2, 0, 1, "env://", "torchrun")),  # torchrun inside srun
        ({"RANK": "0", "WORLD_SIZE": "1"}, Place()),
    ],
)
def test_place_by_slurm(change: dict[str, str], place: Place) -> None:
    assert find(SRUN | change) == place


def test_what_slurm_does_not_tell() -> None:
    """Two tasks on this host, the first of the first job's first step."""
    two = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    assert find(two) == Place(1, 2, 0, 2, "tcp://127.0.0.1:20000", "slurm")
    assert find(two | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}) == Place(1, 2, 0, 1, "tcp://127.0.0.1:20000", "slurm")
    assert find({"SLURM_PROCID": "0"}) == find({"SLURM_STEP_NUM_TASKS": "2"}) == Place()


ONE_TASK = SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        (HYDRA, Place(3, 4, 1, 2, "", "mpi")),
        (OPEN_MPI, Place(3, 4, 1, 2, "", "mpi")),
        (HYDRA | {MEET: "file:///x"}, Place(3, 4, 1, 2, "file:///x", "mpi")),  # started by samestep
        (HYDRA | {"PMI_RANK": "0", "PMI_SIZE": "1"}, Place()),
        (SRUN | HYDRA, Place(3, 4, 1, 2, "", "mpi")),  # mpiexec inside srun
        (SRUN | {"PMI_RANK": "4", "PMI_SIZE": "5"}, Place(4, 5, 0, 1, "tcp://gpu07:29695", "slurm")),  # SLURM's own PMI
        (
            SRUN | {"PMI_RANK": "4", "PMI_SIZE": "5", "MPI_LOCALRANKID": "0"},
            Place(4, 5, 0, 1, "tcp://gpu07:29695", "slurm"),
        ),
        (ONE_TASK | {"PMI_RANK": "0", "PMI_SIZE": "1"}, Place()),
        (SRUN | {"WORLD_SIZE": "5", "LOCAL_RANK": "0"}, Place(4, 5, 0, 1, "tcp://gpu07:29695", "slurm")),  # its scripts
        (OPEN_MPI | {"LOCAL_RANK": "1"}, Place(3, 4, 1, 2, "", "mpi")),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, Place(3, 4, 0, 1, "", "mpi")),  # of launchers that tell nothing of hosts
        (HYDRA | {"RANK": "0", "WORLD_SIZE": "2"}, Place(0, 2, 0, 1, "env://", "torchrun")),
    ],
)
def test_place_by_mpiexec(environ: dict[str, str], place: Place) -> None:
    assert find(environ) == place


def test_salloc_without_srun_is_one_process() -> None:
    assert find({"SLURM_JOB_ID": "4242", "SLURM_NTASKS": "5", "SLURM_JOB_NODELIST": "gpu[07-08]"}) == Place()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "the environment variable RANK must be a whole number, got 'x'"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "the environment variable WORLD_SIZE must be a whole number, got ''"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK must be from 0 to WORLD_SIZE - 1 = 1, got RANK=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK must be from 0 to WORLD_SIZE - 1 = 1, got RANK=-1"),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            "LOCAL_RANK must be from 0 to LOCAL_WORLD_SIZE - 1 = 1, got LOCAL_RANK=2",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "a"},
            "the environment variable LOCAL_RANK must be a whole number, got 'a'",
        ),
        (
            SRUN | {"SLURM_PROCID": "5"},
            "SLURM_PROCID must be from 0 to SLURM_STEP_NUM_TASKS - 1 = 4, got SLURM_PROCID=5",
        ),
        (
            SRUN | {"SLURM_LOCALID": "1"},
            "SLURM_LOCALID must be from 0 to the tasks of its node - 1 = 0, got SLURM_LOCALID=1",
        ),
        (HYDRA | {"PMI_RANK": "4"}, "PMI_RANK must be from 0 to PMI_SIZE - 1 = 3, got PMI_RANK=4"),
        (SRUN | {"SLURM_JOB_ID": "a.b"}, "the environment variable SLURM_JOB_ID must be a whole number, got 'a.b'"),
        (SRUN | {"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST must be a list of hosts, got ''"),
        (
            SRUN | {"MASTER_PORT": "99999"},
            "the environment variable MASTER_PORT must be from 1 to 65535, got 99999",
        ),
        (
            SRUN | {"MASTER_PORT": "65536"},
            "the environment variable MASTER_PORT must be from 1 to 65535, got 65536",
        ),
        (SRUN | {"MASTER_PORT": "0"}, "the environment variable MASTER_PORT must be from 1 to 65535, got 0"),
        ({"RANK": "1"}, "RANK is set and WORLD_SIZE not: set RANK and WORLD_SIZE, or unset RANK"),
        ({"RANK": "0"}, "RANK is set and WORLD_SIZE not: set RANK and WORLD_SIZE, or unset RANK"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set and RANK not: set RANK and WORLD_SIZE, or unset WORLD_SIZE"),
        ({"WORLD_SIZE": "x"}, "the environment variable WORLD_SIZE must be a whole number, got 'x'"),
        (
            {"LOCAL_RANK": "0"},
            "LOCAL_RANK is set and RANK and WORLD_SIZE not: set RANK and WORLD_SIZE, or unset LOCAL_RANK",
        ),
        (ONE_TASK | {"RANK": "3"}, "RANK is set and WORLD_SIZE not: set RANK and WORLD_SIZE, or unset RANK"),
        ({"PMI_RANK": "1"}, "PMI_RANK is set and PMI_SIZE not: set PMI_RANK and PMI_SIZE, or unset PMI_RANK"),
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            "OMPI_COMM_WORLD_SIZE is set and OMPI_COMM_WORLD_RANK not: set OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE, "
            "or unset OMPI_COMM_WORLD_SIZE",
        ),
    ],
)
def test_a_place_that_cannot_be(environ: dict[str, str], message: str) -> None:
    with pytest.raises(Invalid) as error:
        find(environ)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("a", "a"), ("a,b", "a"), ("n[1-3]", "n1"), ("n[1,3]", "n1"), ("n[010-020,30],m", "n010"), ("n[4]-ib,m", "n4-ib")],
)
def test_first_host_of_a_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(("text", "counts"), [("3", [3]), ("2(x3)", [2, 2, 2]), ("4,2(x2),1", [4, 2, 2, 1])])
def test_tasks_of_nodes(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


class FourGpus:
    name = "fake"

    def devices(self) -> list[Any]:
        return [cpu(), *map(gpu, range(4))]

    usable, require = Backend.usable, Backend.require


@pytest.mark.parametrize(
    ("asked", "local", "devices"),
    [
        ("auto", (0, 1), [0, 1, 2, 3]),
        ("auto", (0, 2), [0, 1]),
        ("auto", (1, 2), [2, 3]),
        ("auto", (0, 3), [0, 1]),
        ("auto", (2, 3), [3]),
        ("auto", (3, 4), [3]),
        ("auto", (1, 6), [1]),
        ("auto", (5, 6), [1]),  # more processes than GPUs: they share
        (1, (1, 2), [2]),
        (2, (1, 2), [2, 3]),
        (3, (1, 2), [2, 3, 2]),
        ("2", (3, 4), [3, 3]),
        (["cuda:0", "cuda:3"], (1, 2), [0, 3]),  # what is named is meant
        ("cuda:1", (1, 2), [1]),
    ],
)
def test_processes_on_a_host_share_its_gpus(asked: Any, local: tuple[int, int], devices: list[int]) -> None:
    backend: Any = FourGpus()
    assert resolve(asked, 8, backend, Place(local[0], local[1], *local)) == [gpu(i) for i in devices]


def test_the_cpu_is_named_also_where_gpus_are_shared() -> None:
    backend: Any = FourGpus()
    assert resolve("cpu", 8, backend, Place(1, 2, 1, 2)) == [cpu()]
    assert resolve(["cpu", "cpu"], 8, backend, Place(1, 2, 1, 2)) == [cpu(), cpu()]
