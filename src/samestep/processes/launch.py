"""Starting the processes of a run on this machine: by ourselves for PyTorch, by mpiexec for the other frameworks.

Each process can be signalled and killed alone. The first that fails ends the others, and so does the end of the launcher.
What they fail of, they leave with the launcher, which says it once.
"""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from samestep.backends.find import ALSO, FRAMEWORKS
from samestep.errors import BackendMissing, install
from samestep.processes import rank as wrapper
from samestep.processes.place import MEET, MPIEXEC, TORCHRUN
from samestep.processes.world import gone

GRACE = 10.0  # seconds that the other processes have to end by themselves after one has failed
POLL = 0.02  # seconds between two looks
TOLD = "SAMESTEP_TOLD"  # in the environment of the processes: the folder in which they leave why they end
# What would tell a process of other processes than those that are started here.
PLACE = (*TORCHRUN, "SLURM_STEP_NUM_TASKS", MEET, TOLD, *sum(MPIEXEC, ()))


def launch(command: Sequence[str], count: int, engine: str = "torch") -> int:
    """Start `count` processes of a command as one run, wait for all, and return the exit status.

    SIGINT and SIGTERM are handed on, so that they can write a checkpoint.
    """
    processes = Processes(command, count, os.environ, engine)
    before = {number: signal.signal(number, processes.signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with processes:
            status = processes.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 + processes.asked[0] if processes.asked and status else status


def leave(text: str, heard: bool) -> bool:
    """Leave with the launcher, if this process has one, why the process ends: of itself, or as it heard of another."""
    folder, rank = os.environ.get(TOLD), numbered()
    if folder:
        Path(folder, f"{rank}.{'heard' if heard else 'error'}").write_text(text)
    return bool(folder)


def numbered() -> int:
    """The rank of this process, whoever has started it."""
    names = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK")
    return int(next((os.environ[name] for name in names if os.environ.get(name, "").isdecimal()), 0))


def engine_for(script: Path | None, backend: str | None) -> str:
    """The engine that fits a script, or (None) the built-in job with a backend: "torch", or "mpi" for all others."""
    names = {backend or "torch"} if script is None else frameworks(script)
    if names == {"torch"}:
        return "torch"
    if mpiexec():
        return "mpi"
    if names and "torch" not in names:
        raise BackendMissing(f"several processes of {min(names)} need mpiexec; {install('mpi')}")
    return "torch"


def frameworks(script: Path) -> set[str]:
    """The frameworks whose packages, or whose models of samestep, a script imports."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()  # whoever runs it will say what is wrong
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    packages = {name.removeprefix("samestep.models.").partition(".")[0] for name in names}
    return {ALSO.get(package, package) for package in packages} & set(FRAMEWORKS)


def mpiexec() -> str | None:
    """The mpiexec of this Python's environment, or the one that a shell would find."""
    return shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or shutil.which("mpiexec")


class Processes:
    """The processes of a run on this machine, started at the begin of a `with`; all are ended at its end.

    Each is run by rank.py, which tells its number and how it has ended. Their output goes to a file that is open, or where
    ours goes; what mpiexec itself prints when a process fails is kept out of sight, as it does not say which rank it was.
    """

    def __init__(
        self, command: Sequence[str], count: int, environ: Mapping[str, str], engine: str, output: int | None = None
    ) -> None:
        self.command, self.count, self.engine = list(command), count, engine
        self.asked: list[int] = []  # signals that they are to get
        self._got = [0] * count  # by rank: how many of them it has got
        self._starters: list[subprocess.Popen[bytes]] = []  # by rank: what we have started it with
        self._folder = tempfile.TemporaryDirectory(prefix="samestep-")
        self._told = Path(self._folder.name)
        self._env = {name: value for name, value in environ.items() if name not in PLACE}
        if count > 1:
            self._env |= {MEET: f"file://{self._folder.name}/meet", TOLD: self._folder.name}
            self._env.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        # Copies, which the processes inherit. Through mpiexec their output would be no terminal.
        self._shown = [os.dup(number if output is None else output) for number in (1, 2)]
        self._lifeline, self._ours = os.pipe()  # rank.py waits for us to let go of the other end

    def __exit__(self, *_: object) -> None:
        self.kill()
        for file in (*self._shown, self._lifeline, self._ours):
            os.close(file)
        for starter in self._starters:
            starter.terminate()  # mpiexec, if it still runs: it ends those that have not told their numbers yet
            with suppress(subprocess.TimeoutExpired):
                starter.wait(GRACE)
            starter.kill()
            starter.wait()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        if self.engine == "mpi":
            if not (program := mpiexec()):
                raise BackendMissing(f"mpiexec is not there; {install('mpi')}")
            env = {name: value for name, value in self._env.items() if not name.startswith("SLURM_")}  # on this host
            one = self._start([program, "-n", str(self.count)], env | {"HYDRA_LAUNCHER": "fork"})
            self._starters = [one] * self.count
        else:
            for rank in range(self.count):
                if self.count > 1:
                    self._env |= zip(TORCHRUN, map(str, (rank, self.count, rank, self.count)), strict=True)
                self._starters.append(self._start([], self._env))
        return self

    def _start(self, before: list[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start the command, run by rank.py, in a session of its own.

        So a Ctrl-C in the terminal reaches it through us, once, and what it starts dies with it.
        """
        arguments = map(str, (self._lifeline, self._folder.name, *self._shown))
        wrapped = [*before, sys.executable, "-I", "-S", wrapper.__file__, *arguments, *self.command]
        with open(self._told / "own", "ab") as own:
            return subprocess.Popen(
                wrapped, env=env, start_new_session=True, pass_fds=[*self._shown, self._lifeline],
                stdin=subprocess.DEVNULL, stdout=own, stderr=own,
            )  # fmt: skip

    def states(self) -> list[int | None]:
        """How each process has ended, as subprocess tells it; None: it runs."""
        ended = [starter.poll() is not None for starter in self._starters]
        states = [self._read(f"{rank}.status") for rank in range(len(ended))]
        # One that has left no word was killed with the program that would have left it.
        return [-signal.SIGKILL if state is None and ended[rank] else state for rank, state in enumerate(states)]

    def _first(self, states: Sequence[int | None]) -> int | None:
        """The rank that has failed first, if one has."""
        told = sorted((file.stat().st_mtime_ns, int(file.stem)) for file in self._told.glob("*.status"))
        return next((rank for rank in [*(rank for _, rank in told), *range(self.count)] if states[rank]), None)

    def _note(self, failed: int) -> int:
        """Say why the run has failed: every error once, with its rank unless it is rank 0's as well; whose status counts.

        What processes only heard of another one is said if that one could not say it itself.
        """
        ranks = range(self.count)
        found = [(rank, self._left(f"{rank}.error")) for rank in reversed(ranks)]
        own = {text: rank for rank, text in found if text}  # of equal ones, the lowest
        heard = next((text for rank in ranks if (text := self._left(f"{rank}.heard"))), "")
        if not any(self._read(f"{rank}.pid") for rank in ranks):  # none was started, and mpiexec says why
            heard = self._left("own")
        elif (self._read(f"{failed}.status") or 0) < 0 and not self.asked:
            heard = heard or f"samestep: {gone(f'rank {failed}')}\n"
        in_order = sorted((rank, text) for text, rank in own.items())
        said = [f"rank {rank}: {text}" if rank else text for rank, text in in_order]
        os.write(self._shown[1], ("".join(said) or heard).encode())
        return min(own.values(), default=failed)

    def _left(self, name: str) -> str:
        """What a process has left, if it has."""
        return file.read_text() if (file := self._told / name).exists() else ""

    def _read(self, name: str) -> int | None:
        """What rank.py has told, if it has."""
        with suppress(FileNotFoundError):
            return int((self._told / name).read_text())
        return None

    def poll(self) -> list[int | None]:
        """`states`, after signals were handed to those that have not got them yet."""
        states = self.states()
        for rank, state in enumerate(states):
            while state is None and self._got[rank] < len(self.asked) and (pid := self._read(f"{rank}.pid")):
                self._got[rank] += 1
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, self.asked[self._got[rank] - 1])
        return states

    def signal(self, number: int, frame: object = None) -> None:
        """Hand a signal to every process."""
        self.asked.append(number)

    def kill(self, ranks: Sequence[int] | None = None) -> None:
        """SIGKILL to processes (all of them, if none is named) and to whatever they started."""
        for rank, state in enumerate(self.states()):
            if state is None and (ranks is None or rank in ranks) and (pid := self._read(f"{rank}.pid")):
                with suppress(ProcessLookupError, PermissionError):  # it has just ended
                    os.killpg(os.getpgid(pid), signal.SIGKILL)

    def wait(self) -> int:
        """Wait until all have ended, or until GRACE after the first failure; the exit status."""
        failed, deadline = None, float("inf")
        while True:
            states = self.poll()
            if failed is None and (failed := self._first(states)) is not None:
                deadline = time.monotonic() + GRACE
            if None not in states or time.monotonic() > deadline:
                status = 0 if failed is None else states[self._note(failed)] or 0
                return status if status >= 0 else 128 - status  # as a shell tells that a signal ended it
            time.sleep(POLL)
