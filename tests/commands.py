"""Commands as a user would give them, in an environment that knows of no other process."""

from __future__ import annotations

import os
import re
import subprocess
import sys

DEADLINE = 120.0  # seconds: these load PyTorch, more of them than there are cores
PLACES = re.compile("RANK|WORLD_SIZE|LOCAL_.*|MASTER_.*|SLURM_.*|SAMESTEP_.*|TORCHELASTIC_.*|PMI_.*|MPI_.*")
OUTSIDE = {name: value for name, value in os.environ.items() if not PLACES.fullmatch(name)}
OUTSIDE["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"


def command(*arguments: object, **environ: str) -> subprocess.Popen[str]:
    """A command with its standard error at hand, in an environment that knows of no other process."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)], env=OUTSIDE | environ, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit status, and what it said."""
    try:
        _, said = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, said


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
