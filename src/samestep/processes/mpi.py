"""Several processes with MPI, for every framework: mpiexec or SLURM starts them, mpi4py moves vectors in host memory.

Only sends and receives that do not wait are used. Whoever waits for them looks again and again, gives its core to others in
between, and listens for alarms: when a process fails it tells the others why. MPI itself would wait for ever.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from samestep.errors import BackendMissing, Invalid, ProcessFailed, install
from samestep.processes.place import Place
from samestep.processes.world import BYTES, VECTORS, Alone, Works, World, first_line

FAILED, ENDED, ASK, ANSWER = range(4)  # kinds of alarms: the tags of their messages
PATIENCE = 1.0  # seconds within which a waiting process answers, and what a failed one has sent still arrives
FAREWELL = 3.0  # seconds that a failed process waits for the others to end by themselves
LONGEST = 4000  # bytes of an alarm
QUICK = 100  # times to look before a wait sleeps: most answers come at once
NAP, REST = 0.00005, 0.001  # seconds to sleep between two looks, at first, and after a while
ABSENT = "not all processes have come within {:g} s: were all started, and has none ended?"
Get = Callable[[Any], np.ndarray[Any, Any]]

_joined: MpiWorld | None = None


def join(get: Get, place: Place, timeout: float) -> World:
    """The world of this process: joined once, and used by every fit that follows, until one fails.

    `get` is the framework's way to bring an array to host memory.
    """
    global _joined
    if place.size == 1:
        return Alone()
    if place.started_by == "torchrun":
        ours = "" if place.meet.startswith("file://") else f" or `samestep train --processes {place.size} ...`"
        how = f"these {place.size} processes were started with RANK and WORLD_SIZE, as by torchrun, which is for PyTorch alone"
        raise Invalid(f"{how}: start them with `mpiexec -n {place.size} python ...`{ours}")
    if _joined is None:
        _joined = MpiWorld(place, timeout)
    elif _joined.broken:
        raise ProcessFailed("a fit has failed, and its processes cannot be joined again: start the script anew")
    _joined.get, _joined.timeout = get, timeout
    return _joined


def initialized(place: Place, timeout: float) -> Any:
    """The module MPI of mpi4py, initialized; it is not said to end by itself, as `MpiWorld.leave` does that."""
    try:
        import mpi4py
    except ImportError:
        raise BackendMissing(f"'mpi4py' is not installed; {install('mpi')}") from None
    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BackendMissing(f"mpi4py finds no MPI ({first_line(error)}); {install('mpi')}") from None
    if not MPI.Is_initialized():
        # MPI waits here for all processes, for ever. Called through ctypes it lets other threads of Python run meanwhile.
        watch = threading.Timer(timeout, _give_up, (ABSENT.format(timeout),))
        watch.daemon = True
        watch.start()
        ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
        watch.cancel()
        MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise Invalid("MPI was initialized without THREAD_MULTIPLE, which the exchange needs: leave it to samestep")
    if MPI.COMM_WORLD.size != place.size:
        known = f"{place.size} processes were started, and MPI knows of {MPI.COMM_WORLD.size}"
        raise Invalid(f"{known}: use the mpiexec of the MPI that mpi4py uses, or `srun --mpi=pmi2`")
    return MPI


def _give_up(message: str) -> None:
    print(f"samestep: {message}", file=sys.stderr, flush=True)
    os._exit(1)  # the main thread is inside MPI, and will not come back


class MpiWorld(World):
    """A World whose processes MPI connects; its vectors are NumPy's."""

    get: Get

    def __init__(self, place: Place, timeout: float) -> None:
        self._mpi = initialized(place, timeout)
        world = self._mpi.COMM_WORLD
        super().__init__(world.rank, world.size, timeout)
        self._slurm = place.started_by == "slurm"
        self.broken, self.cause = False, ""  # whether a fit has failed here, and why the run ends
        self._ended: dict[int, float] = {}  # by rank: since when nothing more is to be expected of it
        self._gone: set[int] = set()  # those whose script has ended
        self._awaited: dict[int, int] = {}  # by thread: whom it waits for
        self._answers: dict[int, int] = {}  # by rank: whom it waits for
        self._said: list[Any] = []  # alarms on their way, with their memory
        self._lock = threading.Lock()
        comms, requests = zip(*(world.Idup() for _ in range(3)), strict=True)
        self._comms, self._alarms = {VECTORS: comms[0], BYTES: comms[1]}, comms[2]
        end, tries = time.monotonic() + timeout, 0
        while not self._mpi.Request.Testall(requests):
            if time.monotonic() > end:
                raise ProcessFailed(ABSENT.format(timeout))
            tries = _pause(tries)
        atexit.register(self.leave)

    # Vectors, and everything else

    def send(self, kind: str, rank: int, memory: Any, tag: int) -> Any:
        return self._comms[kind].Isend([memory.view(np.uint8), self._mpi.BYTE], rank, tag)

    def receive(self, kind: str, rank: int, memory: Any, tag: int) -> Any:
        return self._comms[kind].Irecv([memory.view(np.uint8), self._mpi.BYTE], rank, tag)

    def empty(self, size: int, like: Any) -> np.ndarray[Any, Any]:
        return np.empty(size, str(like.dtype).rpartition(".")[2].rstrip("'>"))  # MXNet's types are classes of NumPy

    def bring(self, vector: Any) -> np.ndarray[Any, Any]:
        return np.require(self.get(vector), requirements=["C", "W"])  # JAX's must not be written to

    def wait(self, works: Works) -> None:
        began, tries, thread = time.monotonic(), 0, threading.get_ident()
        while works := [(rank, work) for rank, work in works if not self._done(rank, work)]:
            self._awaited[thread] = works[0][0]
            tries = _pause(tries)
            if tries > QUICK:
                self._look(works, time.monotonic() - began)
        self._awaited.pop(thread, None)

    def _done(self, rank: int, work: Any) -> bool:
        try:
            return bool(work.Test())
        except self._mpi.Exception:  # between hosts: the connection is gone
            raise ProcessFailed(self.cause or self.lost(rank, late=False)) from None

    def _look(self, works: Works, waited: float) -> None:
        """While waiting: is there still something to wait for?"""
        self._listen()
        now = time.monotonic()
        for rank, _ in works:
            if now - self._ended.get(rank, now) > PATIENCE:
                raise ProcessFailed(self.cause or f"rank {rank} has ended before the others: see what it printed")
        if self.broken:  # this is the exchange thread, and the main thread has failed
            raise ProcessFailed(self.cause)
        if waited > self.timeout:
            raise ProcessFailed(self._late(works[0][0]))

    def _late(self, rank: int) -> str:
        """Why the run ends when a process has not answered: it may itself wait for one that waits for one that hangs."""
        first, asked = rank, {self.rank}
        while rank not in asked:
            asked.add(rank)
            self._answers.pop(rank, None)
            self._say(ASK, [rank])
            end, tries = time.monotonic() + PATIENCE, 0
            while rank not in self._answers and time.monotonic() < end:
                tries = _pause(tries)
                self._listen()
            whom = self._answers.get(rank, rank)  # one that does not even answer this, or waits for nobody, hangs
            if whom == rank:
                return self.cause or self.lost(rank, late=True)
            rank = whom
        return self.cause or self.lost(first, late=True)  # they wait for each other

    # Alarms

    def _say(self, kind: int, ranks: list[int], text: str = "") -> None:
        memory = np.frombuffer(bytearray(text.encode()[:LONGEST]), np.uint8)
        for rank in ranks:
            self._said.append((self._alarms.Isend([memory, self._mpi.BYTE], rank, kind), memory))

    def _listen(self) -> None:
        """Take in the alarms that have come."""
        status = self._mpi.Status()
        with self._lock:  # the main thread and the exchange thread
            while message := self._alarms.Improbe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status):
                memory = bytearray(status.Get_count(self._mpi.BYTE))
                message.Recv([memory, self._mpi.BYTE])
                self._take(status.Get_source(), status.Get_tag(), memory.decode(errors="replace"))

    def _take(self, rank: int, kind: int, text: str) -> None:
        if kind == ASK:
            self._say(ANSWER, [rank], str([*self._awaited.values(), self.rank][0]))
        elif kind == ANSWER:
            self._answers[rank] = int(text)
        else:
            self.cause = self.cause or text  # the first one counts
            self._ended.setdefault(rank, time.monotonic())
            if kind == ENDED:
                self._gone.add(rank)

    def fail(self, error: BaseException) -> None:
        if not self.broken:
            self.cause = self.cause or self.reason(error)
            self.broken = True
            self._say(FAILED, self.others, self.cause)

    def leave(self) -> None:
        """When this process ends: wait for the others, as mpiexec kills those that are left behind.

        After a failure that is for a moment only; then all are ended, also one that hangs.
        """
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._say(ENDED, self.others, self.cause)
        end = float("inf")
        while len(self._gone) < self.size - 1 or not all(request.Test() for request, _ in self._said):
            self._listen()
            if self.cause and end == float("inf"):
                end = time.monotonic() + FAREWELL
            if time.monotonic() > end:
                if self._slurm:
                    self._mpi.COMM_WORLD.Abort(1)
                os._exit(1)  # mpiexec ends the others when one ends in this way; srun may not
            time.sleep(REST)
        if not self.cause:
            self._mpi.Finalize()  # after a failure this could wait for what never comes


def _pause(tries: int) -> int:
    """Between two looks: give the core away; how often that was done."""
    time.sleep(0 if tries < QUICK else NAP if tries < 20 * QUICK else REST)
    return tries + 1
