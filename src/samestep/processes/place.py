"""Several processes, on one host or on many, as one group of devices.

A process learns its place from the variables that torchrun or SLURM set, or from `samestep train --processes k`, which
starts the processes itself. An engine (a World: PyTorch's, or sockets.py) only moves numbers between them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from samestep.errors import Invalid

TRANSPORT = "SAMESTEP_TRANSPORT"  # how vectors travel, to overrule the choice: shared; gloo, nccl (PyTorch); sockets
OVERRIDES = "SAMESTEP_OVERRIDES"  # a JSON object: what `samestep train SCRIPT --devices 4` changes in its Trainer
MEET = "SAMESTEP_MEET"  # where the processes that samestep itself started meet: a file


@dataclass(frozen=True)
class Place:
    """Where a process stands among those of its run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among those on its host
    local_size: int = 1
    meet: str = ""  # where they meet: env:// (MASTER_ADDR and MASTER_PORT), tcp://host:port or file:///path


def find(environ: Mapping[str, str] = os.environ) -> Place:
    """The place of this process, from the variables of whoever started it.

    >>> find({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    Place(rank=3, size=4, local_rank=1, local_size=2, meet='env://')
    >>> find({})
    Place(rank=0, size=1, local_rank=0, local_size=1, meet='')
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        rank, size = number(environ, "RANK"), number(environ, "WORLD_SIZE")
        local = number(environ, "LOCAL_RANK", 0), number(environ, "LOCAL_WORLD_SIZE", 1)
        meet = environ.get(MEET) or "env://"
        _check("RANK", rank, "WORLD_SIZE", size)
        if "LOCAL_WORLD_SIZE" in environ:
            _check("LOCAL_RANK", local[0], "LOCAL_WORLD_SIZE", local[1])
        return Place(rank, size, *local, meet) if size > 1 else Place()
    if number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1 and "SLURM_PROCID" in environ:  # inside srun, with several tasks
        size, node = number(environ, "SLURM_STEP_NUM_TASKS"), number(environ, "SLURM_NODEID", 0)
        host = environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST", "127.0.0.1"))
        job = number(environ, "SLURM_JOB_ID", 0) * 7 + number(environ, "SLURM_STEP_ID", 0)
        port = number(environ, "MASTER_PORT", 20000 + job % 20000)
        per_node = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
        rank, local_rank = number(environ, "SLURM_PROCID"), number(environ, "SLURM_LOCALID", 0)
        here = per_node[node] if 0 <= node < len(per_node) else local_rank + 1
        _check("SLURM_PROCID", rank, "SLURM_STEP_NUM_TASKS", size)
        _check("SLURM_LOCALID", local_rank, "the tasks of its node", here)
        return Place(rank, size, local_rank, here, f"tcp://{host}:{port}")
    return Place()


def _check(name: str, rank: int, of: str, size: int) -> None:
    if not 0 <= rank < size:
        raise Invalid(f"{name} must be from 0 to {of} - 1 = {size - 1}, got {name}={rank}")


def number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The whole number that a variable holds."""
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise Invalid(f"the environment variable {name} must be a whole number, got {text!r}") from None


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
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def launch(command: Sequence[str], count: int) -> int:
    """Start `count` processes of a command as one run, wait for all, and return the exit status.

    The first that fails ends the others. SIGINT and SIGTERM are handed on, so that they can write a checkpoint.
    """
    with tempfile.TemporaryDirectory(prefix="samestep-") as folder:
        children: list[subprocess.Popen[bytes]] = []
        asked: list[int] = []

        def hand_on(signum: int, frame: object) -> None:
            asked.append(signum)
            for child in children:
                if child.poll() is None:
                    child.send_signal(signum)

        before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for rank in range(count):
                if asked:
                    break
                env = {**os.environ, MEET: f"file://{folder}/meet", "RANK": str(rank), "WORLD_SIZE": str(count)}
                env |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
                env.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
                # A session of its own: a Ctrl-C in the terminal reaches it through us, once.
                children.append(subprocess.Popen(command, env=env, start_new_session=True))
                for signum in asked:  # it came while this one was being started
                    children[-1].send_signal(signum)
            status = _wait(children)
            return 128 + asked[0] if asked and status else status
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
            for child in children:
                child.wait()
            for number, handler in before.items():
                signal.signal(number, handler)


GRACE = 10.0  # seconds that the other processes have to end by themselves after one has failed


def _wait(children: list[subprocess.Popen[bytes]]) -> int:
    """Wait until all have ended, or until GRACE after the first failure."""
    failed, deadline = 0, 0.0
    while True:
        states = [child.poll() for child in children]
        if not failed and any(states):
            failed = next(state for state in states if state)
            deadline = time.monotonic() + GRACE
        if None not in states or (failed and time.monotonic() > deadline):
            return failed if failed >= 0 else 128 - failed  # as a shell tells that a signal ended it
        time.sleep(0.05)
