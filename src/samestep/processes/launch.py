"""Starting the processes of a run on this machine: by ourselves for PyTorch, by mpiexec for the other frameworks.

Each process can be signalled and killed alone. The first that fails ends the others.
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
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from samestep.backends.find import ALSO, FRAMEWORKS
from samestep.errors import BackendMissing
from samestep.processes import rank as wrapper
from samestep.processes.place import MEET, MPIEXEC, TORCHRUN
from samestep.processes.world import gone

GRACE = 10.0  # seconds that the other processes have to end by themselves after one has failed
POLL = 0.02  # seconds between two looks
# What would tell a process of other processes than those that are started here.
PLACE = (*TORCHRUN, "SLURM_STEP_NUM_TASKS", MEET, *sum(MPIEXEC, ()))


def launch(command: Sequence[str], count: int, engine: str = "torch") -> int:
    """Start `count` processes of a command as one run, wait for all, and return the exit status.

    SIGINT and SIGTERM are handed on, so that they can write a checkpoint.
    """
    with of(engine)(command, count, os.environ) as started:
        before = {number: signal.signal(number, started.signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            started.start()
            status = started.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return 128 + started.asked[0] if started.asked and status else status


def engine_for(script: Path | None, backend: str | None) -> str:
    """The engine that fits a script, or (None) the built-in job with a backend: "torch", or "mpi" for all others."""
    names = {backend or "torch"} if script is None else frameworks(script)
    if names == {"torch"}:
        return "torch"
    if mpiexec():
        return "mpi"
    if names and "torch" not in names:
        raise BackendMissing(f"several processes of {min(names)} need mpiexec; pip install 'samestep[mpi]'")
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


def of(engine: str) -> type[Processes]:
    return ByMpiexec if engine == "mpi" else Processes


class Processes(AbstractContextManager["Processes"]):
    """The processes of a run on this machine, which torch.distributed connects; all are ended when the `with` is left.

    Their output goes to a file that is open, or where ours goes.
    """

    def __init__(
        self, command: Sequence[str], count: int, environ: Mapping[str, str], output: int | None = None
    ) -> None:
        self.command, self.count = list(command), count
        self.children: list[subprocess.Popen[bytes]] = []  # what we have started
        self.asked: list[int] = []  # signals that they are to get
        self._due: list[list[int]] = [[] for _ in range(count)]  # by rank: those that it has not got yet
        self._folder = tempfile.TemporaryDirectory(prefix="samestep-")
        self._env = {name: value for name, value in environ.items() if name not in PLACE}
        if count > 1:
            self._env[MEET] = f"file://{self._folder.name}/meet"
            self._env.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        self._output = output
        self._shown: list[int] = []  # what mpiexec's processes print to: copies, to be closed

    def __exit__(self, *_: object) -> None:
        self.kill()
        for child in self.children:
            child.terminate()  # mpiexec, if it still runs: it ends those that have not told their numbers yet
            with suppress(subprocess.TimeoutExpired):
                child.wait(GRACE)
            child.kill()
            child.wait()
        for file in self._shown:
            os.close(file)
        self._folder.cleanup()

    def start(self) -> None:
        for rank in range(self.count):
            if self.count > 1:
                self._env |= zip(TORCHRUN, map(str, (rank, self.count, rank, self.count)), strict=True)
            # A session of its own: a Ctrl-C in the terminal reaches it through us, once, and what it starts dies with it.
            self.children.append(subprocess.Popen(
                self.command, env=self._env, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output,
            ))  # fmt: skip

    def states(self) -> list[int | None]:
        """How each process has ended, as subprocess tells it; None: it runs."""
        return [child.poll() for child in self.children]

    def first(self, states: Sequence[int | None]) -> int | None:
        """The rank that has failed first, if one has."""
        return next((rank for rank, state in enumerate(states) if state), None)

    def _pid(self, rank: int) -> int | None:
        """The number of a process, once it is known."""
        return self.children[rank].pid

    def _note(self, rank: int) -> None:
        """Say what the processes themselves cannot say when one has failed. Here the others notice, and name it."""

    def poll(self) -> list[int | None]:
        """`states`, after signals were handed to those that have not got them yet."""
        states = self.states()
        for rank, state in enumerate(states):
            while state is None and self._due[rank] and (pid := self._pid(rank)):
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, self._due[rank].pop(0))
        return states

    def signal(self, number: int, frame: object = None) -> None:
        """Hand a signal to every process."""
        self.asked.append(number)
        for due in self._due:
            due.append(number)

    def kill(self, ranks: Sequence[int] | None = None) -> None:
        """SIGKILL to processes (all of them, if none is named) and to whatever they started."""
        for rank, state in enumerate(self.states()):
            if state is None and (ranks is None or rank in ranks) and (pid := self._pid(rank)):
                with suppress(ProcessLookupError, PermissionError):  # it has just ended
                    os.killpg(os.getpgid(pid), signal.SIGKILL)

    def wait(self) -> int:
        """Wait until all have ended, or until GRACE after the first failure; the exit status."""
        status, deadline = 0, float("inf")
        while True:
            states = self.poll()
            if not status and (failed := self.first(states)) is not None:
                status, deadline = states[failed] or 0, time.monotonic() + GRACE
                self._note(failed)
            if None not in states or time.monotonic() > deadline:
                return status if status >= 0 else 128 - status  # as a shell tells that a signal ended it
            time.sleep(POLL)


class ByMpiexec(Processes):
    """Processes that mpiexec starts, each by rank.py, which tells its number and how it has ended.

    What mpiexec itself prints when a process fails is kept out of sight: it does not say which rank it was.
    """

    def start(self) -> None:
        if not (program := mpiexec()):
            raise BackendMissing("mpiexec is not there; pip install 'samestep[mpi]'")
        # Copies, which the processes inherit. Through mpiexec their output would be no terminal.
        self._shown += [os.dup(number if self._output is None else self._output) for number in (1, 2)]
        ours = [sys.executable, "-I", "-S", wrapper.__file__, self._folder.name, *map(str, self._shown)]
        env = {name: value for name, value in self._env.items() if not name.startswith("SLURM_")}  # here, on this host
        # A session of its own, as mpiexec would end all of them at a Ctrl-C.
        with open(Path(self._folder.name, "mpiexec"), "wb") as own:
            self.children.append(subprocess.Popen(
                [program, "-n", str(self.count), *ours, *self.command], env=env | {"HYDRA_LAUNCHER": "fork"},
                stdin=subprocess.DEVNULL, stdout=own, stderr=own, pass_fds=self._shown, start_new_session=True,
            ))  # fmt: skip

    def states(self) -> list[int | None]:
        ended = all(child.poll() is not None for child in self.children)
        states = [self._read(f"{rank}.status") for rank in range(self.count)]
        # One that has left no word when mpiexec has ended was killed with the program that would have left it.
        return [-signal.SIGKILL if state is None and ended else state for state in states]

    def first(self, states: Sequence[int | None]) -> int | None:
        files = Path(self._folder.name).glob("*.status")
        told = [rank for _, rank in sorted((file.stat().st_mtime_ns, int(file.stem)) for file in files)]
        return next((rank for rank in [*told, *range(self.count)] if states[rank]), None)

    def _pid(self, rank: int) -> int | None:
        return self._read(f"{rank}.pid")

    def _note(self, rank: int) -> None:
        if not any(map(self._pid, range(self.count))):  # nothing was started, and mpiexec says why
            os.write(self._shown[1], Path(self._folder.name, "mpiexec").read_bytes())
        elif (self._read(f"{rank}.status") or 0) < 0 and not self.asked:
            os.write(self._shown[1], f"samestep: {gone(f'rank {rank}')}\n".encode())

    def _read(self, name: str) -> int | None:
        with suppress(FileNotFoundError):
            return int(Path(self._folder.name, name).read_text())
        return None
