"""The place of a process in its run, from the variables that torchrun, SLURM, mpiexec or launch.py have set."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.checks import show
from samestep.errors import Invalid

OVERRIDES = "SAMESTEP_OVERRIDES"  # a JSON object: what `samestep train SCRIPT --devices 4` changes in its Trainer
COMMAND = "SAMESTEP_COMMAND"  # the command line that a script is run by, as one would type it
MEET = "SAMESTEP_MEET"  # where the processes that samestep itself started can meet: a file
# What torchrun calls rank, size, local rank and local size, and what mpiexec does: MPICH (Hydra) and Open MPI.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MPIEXEC = (
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
PORTS = range(1, 1 << 16)


@dataclass(frozen=True)
class Place:
    """Where a process stands among those of its run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among those on its host
    local_size: int = 1
    meet: str = ""  # where they meet: env:// (MASTER_ADDR and MASTER_PORT), tcp://host:port or file:///path
    started_by: str = ""  # torchrun (or RANK and WORLD_SIZE, set by hand), mpi, slurm; "": it is alone


def find(environ: Mapping[str, str] = os.environ) -> Place:
    """The place of this process.

    >>> find({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
    Place(rank=3, size=4, local_rank=1, local_size=2, meet='', started_by='mpi')
    >>> find({})
    Place(rank=0, size=1, local_rank=0, local_size=1, meet='', started_by='')
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _numbered(environ, TORCHRUN, "env://", "torchrun")
    in_step = number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1 and "SLURM_PROCID" in environ  # of srun
    for names in MPIEXEC:  # before SLURM, inside which mpiexec may run; SLURM's own PMI sets no local rank
        if set(names if in_step else names[:2]) <= set(environ):
            return _numbered(environ, names, "", "mpi")
    if in_step:
        size, node = number(environ, "SLURM_STEP_NUM_TASKS"), number(environ, "SLURM_NODEID", 0)
        host = environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST", "127.0.0.1"))
        job = number(environ, "SLURM_JOB_ID", 0) * 7 + number(environ, "SLURM_STEP_ID", 0)
        port = number(environ, "MASTER_PORT", 20000 + job % 20000, PORTS)
        per_node = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
        rank, local_rank = number(environ, "SLURM_PROCID"), number(environ, "SLURM_LOCALID", 0)
        here = per_node[node] if 0 <= node < len(per_node) else local_rank + 1
        _check("SLURM_PROCID", rank, "SLURM_STEP_NUM_TASKS", size)
        _check("SLURM_LOCALID", local_rank, "the tasks of its node", here)
        return Place(rank, size, local_rank, here, f"tcp://{host}:{port}", "slurm")
    for names in (TORCHRUN, *MPIEXEC):  # some, but not those that count; scripts for SLURM may set a size of 1 alone
        found = [name for name in names if name in environ]
        if found and number(environ, names[1], 0) != 1:
            missing = " and ".join(name for name in names[:2] if name not in environ)
            raise Invalid(f"{found[0]} is set and {missing} not: set {names[0]} and {names[1]}, or unset {found[0]}")
    return Place()


def _numbered(environ: Mapping[str, str], names: tuple[str, str, str, str], meet: str, started_by: str) -> Place:
    """The place that four variables tell; the local ones may be missing."""
    rank, size = number(environ, names[0]), number(environ, names[1])
    local_rank, local_size = number(environ, names[2], 0), number(environ, names[3], 1)
    _check(names[0], rank, names[1], size)
    if names[3] in environ:
        _check(names[2], local_rank, names[3], local_size)
    if size == 1:
        return Place()
    return Place(rank, size, local_rank, local_size, environ.get(MEET) or meet, started_by)


def _check(name: str, rank: int, of: str, size: int) -> None:
    if not 0 <= rank < size:
        raise Invalid(f"{name} must be from 0 to {of} - 1 = {size - 1}, got {name}={rank}")


def number(environ: Mapping[str, str], name: str, default: int | None = None, within: range | None = None) -> int:
    """The whole number that a variable holds."""
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        value = int(text or "")
    except ValueError:
        raise Invalid(f"the environment variable {name} must be a whole number, got {show(text)}") from None
    if within and value not in within:
        raise Invalid(f"the environment variable {name} must be from {within[0]} to {within[-1]}, got {show(value)}")
    return value


def first_host(nodes: str) -> str:
    """The first host of a list as SLURM writes it.

    >>> first_host("node[03-05,9],gpu1"), first_host("alpha,beta")
    ('node03', 'alpha')
    """
    found = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    if not found:
        raise Invalid(f"SLURM_STEP_NODELIST must be a list of hosts, got {nodes!r}")
    return found[1] + (found[2] or "") + (found[3] or "")


def tasks_per_node(text: str) -> list[int]:
    """How many processes are on each host, as SLURM writes it.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    found = re.findall(r"(\d{1,6})(?:\(x(\d{1,6})\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]
