"""mpi: what is refused before any process is joined, and what a joined one does. The real MPI is in test_processes.py."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from samestep.errors import BackendMissing, Invalid, ProcessFailed
from samestep.processes import mpi
from samestep.processes.place import Place
from samestep.processes.world import BYTES, VECTORS, Alone


def get(array: Any) -> Any:
    return array


def test_one_process_is_alone() -> None:
    assert isinstance(mpi.join(get, Place(), 1.0), Alone)


@pytest.mark.parametrize(
    ("meet", "advice"), [("env://", " or `samestep train --processes 4 ...`"), ("file:///there", "")]
)
def test_processes_that_torchrun_has_started_are_told_of_mpiexec(meet: str, advice: str) -> None:
    with pytest.raises(Invalid) as error:
        mpi.join(get, Place(1, 4, 1, 4, meet, "torchrun"), 1.0)
    assert str(error.value) == (
        "these 4 processes were started with RANK and WORLD_SIZE, as by torchrun, which is for PyTorch alone: start them with "
        f"`mpiexec -n 4 python ...`{advice}"
    )


def test_mpi4py_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(BackendMissing) as error:
        mpi.join(get, Place(0, 2, 0, 2, "", "mpi"), 1.0)
    assert str(error.value) == "'mpi4py' is not installed; in a clone of samestep: pip install '.[mpi]'"


def test_a_world_that_has_failed_is_not_joined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = mpi.MpiWorld.__new__(mpi.MpiWorld)
    broken.broken = True
    monkeypatch.setattr(mpi, "_joined", broken)
    with pytest.raises(
        ProcessFailed, match="^a fit has failed, and its processes cannot be joined again: start the script"
    ):
        mpi.join(get, Place(0, 2, 0, 2, "", "mpi"), 1.0)


def test_a_connection_that_is_gone_is_a_process_that_is_gone() -> None:
    class Gone(Exception):
        pass

    def test() -> bool:
        raise Gone

    world = mpi.MpiWorld.__new__(mpi.MpiWorld)
    world.rank, world.size, world.cause, world._mpi = 0, 3, "", SimpleNamespace(Exception=Gone)
    assert world._done(2, SimpleNamespace(Test=lambda: 1)) is True
    with pytest.raises(ProcessFailed, match="^rank 2 is gone: it was killed, or its host was lost$"):
        world._done(2, SimpleNamespace(Test=test))
    world.cause = "rank 1 failed: OSError"
    with pytest.raises(ProcessFailed, match="^rank 1 failed: OSError$"):
        world._done(2, SimpleNamespace(Test=test))


# What joined processes do, with stand-ins for MPI and for the clock


class Clock:
    """Stands for the module `time`: a sleep of any length takes one second."""

    def __init__(self) -> None:
        self.now, self.slept = 100.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 1.0
        self.slept.append(seconds)


class Comm:
    """Stands for a communicator of rank 0 of four: what is sent is kept, and what has come is given out."""

    rank, size = 0, 4

    def __init__(self) -> None:
        self.sent, self.came, self.ended = list[Any](), list[tuple[int, int, str]](), list[int]()
        self.answers: dict[int, Any] = {}  # by rank: whom it says that it waits for
        self.late = 0  # so many looks in vain, before what has come is seen

    def Idup(self) -> tuple[Comm, str]:
        return Comm(), "request"

    def Isend(self, what: Any, rank: int, tag: int) -> Any:
        self.sent.append((bytes(what[0]), what[1], rank, tag))
        if tag == mpi.ASK and rank in self.answers:
            self.came.append((rank, mpi.ANSWER, str(self.answers[rank])))
        return SimpleNamespace(Test=lambda: True)

    def Irecv(self, what: Any, rank: int, tag: int) -> Any:
        what[0][:] = 7
        return rank, tag

    def Improbe(self, source: str, tag: str, status: Any) -> Any:
        assert (source, tag) == ("any source", "any tag")
        self.late -= 1
        if self.late >= 0 or not self.came:
            return None
        rank, kind, text = self.came.pop(0)
        status.Get_source, status.Get_tag, status.Get_count = lambda: rank, lambda: kind, lambda unit: len(text)
        return SimpleNamespace(Recv=lambda what: what[0].__setitem__(slice(None), text.encode()))

    def Abort(self, status: int) -> None:
        self.ended.append(status)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(mpi, "time", clock)
    return clock


@pytest.fixture
def stands_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module MPI, for `MpiWorld`; `tests` are the answers to whether all have come."""
    module: Any = SimpleNamespace(
        COMM_WORLD=Comm(), BYTE="byte", ANY_SOURCE="any source", ANY_TAG="any tag", Status=SimpleNamespace, tests=[True],
        finalized=[], awaited=[],
    )  # fmt: skip
    module.Request = SimpleNamespace(Testall=lambda requests: module.awaited.append(requests) or module.tests.pop(0))
    module.Finalize = lambda: module.finalized.append(True)
    monkeypatch.setattr(mpi, "initialized", lambda place, timeout: module)
    monkeypatch.setattr(mpi.atexit, "register", lambda leave: setattr(module, "leave", leave))
    return module


@pytest.fixture
def world(stands_in: Any, clock: Clock) -> Any:
    return mpi.MpiWorld(Place(0, 4, 0, 4, "", "mpi"), 5.0)


def test_a_world_that_mpi_connects(world: Any, stands_in: Any) -> None:
    assert (world.rank, world.size, world.timeout, world.broken, world.cause) == (0, 4, 5.0, False, "")
    assert stands_in.leave == world.leave
    assert stands_in.awaited == [("request",) * 3]
    comms = [world._comms[VECTORS], world._comms[BYTES], world._alarms]
    assert len(set(map(id, comms))) == 3
    world.send(VECTORS, 2, np.array([1, 2], np.uint16), 6)
    world.send(BYTES, 1, np.array([3], np.uint8), 7)
    assert [comm.sent for comm in comms] == [[(b"\1\0\2\0", "byte", 2, 6)], [(b"\3", "byte", 1, 7)], []]
    memory = np.zeros(2, np.uint8)
    assert world.receive(VECTORS, 3, memory, 8) == (3, 8)
    assert memory.tolist() == [7, 7]


@pytest.mark.parametrize(("by", "slurm"), [("mpi", False), ("slurm", True), ("torchrun", False)])
def test_whom_slurm_has_started(by: str, slurm: bool, stands_in: Any) -> None:
    assert mpi.MpiWorld(Place(0, 4, 0, 4, "", by), 5.0)._slurm is slurm


def test_not_all_have_come(stands_in: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "QUICK", 1)
    stands_in.tests[:] = [False, False, True]
    mpi.MpiWorld(Place(0, 4, 0, 4, "", "mpi"), 5.0)
    assert clock.slept == [0, mpi.NAP]
    stands_in.tests[:] = [False] * 99
    with pytest.raises(ProcessFailed) as error:
        mpi.MpiWorld(Place(0, 4, 0, 4, "", "mpi"), 5.0)
    assert str(error.value) == "not all processes have come within 5 s: were all started, and has none ended?"
    assert len(clock.slept) == 2 + 6


@pytest.mark.parametrize("dtype", [np.dtype("float32"), "torch.float32", "<class 'numpy.float32'>"])
def test_memory_for_the_numbers_of_any_framework(dtype: Any, world: Any) -> None:
    memory = world.empty(3, SimpleNamespace(dtype=dtype))
    assert (memory.shape, memory.dtype) == ((3,), np.float32)


def test_what_is_brought_can_be_written_to(world: Any) -> None:
    array = np.arange(3.0)
    array.flags.writeable = False
    world.get = lambda vector: vector[::-1]
    brought = world.bring(array)
    brought += 1
    assert brought.tolist() == [3, 2, 1]


def test_a_wait_looks_for_alarms_after_a_while(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is known whom it waits for: the first that has not answered."""
    monkeypatch.setattr(mpi, "QUICK", 2)
    answers, looks = {1: [True], 2: [False] * 5 + [True], 3: [False] * 4 + [True]}, list[Any]()
    monkeypatch.setattr(world, "_look", lambda works, waited: looks.append((waited, [*world._awaited.values()])))
    world.wait([(rank, SimpleNamespace(Test=lambda rank=rank: answers[rank].pop(0))) for rank in (1, 2, 3)])
    assert looks == [(3.0, [2]), (4.0, [2]), (5.0, [2])]
    assert world._awaited == {}
    assert answers == {1: [], 2: [], 3: []}


def test_what_ends_a_wait(world: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "PATIENCE", 2.0)
    monkeypatch.setattr(world, "_late", lambda rank: f"rank {rank} is late")
    works = [(1, None), (2, None)]

    def ends() -> str:
        with pytest.raises(ProcessFailed) as error:
            world._look(works, 5.0)
        return str(error.value)

    world._look(works, 5.0)
    with pytest.raises(ProcessFailed, match="^rank 1 is late$"):
        world._look(works, 5.5)
    world._ended = {2: 98.0, 3: 0.0}  # nothing is awaited from rank 3
    world._look(works, 5.0)  # what it has sent may still arrive
    clock.now = 100.5
    assert ends() == "rank 2 has ended before the others: see what it printed"
    world.cause = "rank 3 failed: OSError"
    assert ends() == "rank 3 failed: OSError"
    world._ended = {}
    world._look(works, 5.0)
    world.broken = True
    assert ends() == "rank 3 failed: OSError"


@pytest.mark.parametrize(
    ("answers", "named", "seconds"),
    [
        ({}, 1, 3),  # it does not even say whom it waits for
        ({1: 1}, 1, 1),  # it waits for nobody
        ({1: 2}, 2, 4),
        ({1: 3, 3: 2, 2: 2}, 2, 3),
        ({1: 2, 2: 3, 3: 1}, 1, 3),  # they wait for each other
        ({1: 0}, 1, 1),  # it waits for us
        ({1: 300, 300: 300}, 300, 2),
    ],
)
def test_who_hangs(
    answers: dict[int, int], named: int, seconds: int, world: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi, "PATIENCE", 3.0)
    world._alarms.answers = answers
    world._answers = {1: 3}  # said earlier
    assert world._late(1) == f"rank {named} has not answered for 5 s: it hangs, or its host cannot be reached"
    assert clock.now == 100.0 + seconds
    assert {kind for _, _, _, kind in world._alarms.sent} == {mpi.ASK}
    world.cause = "rank 3 failed: OSError"
    assert world._late(1) == "rank 3 failed: OSError"


def test_an_answer_that_takes_a_while(world: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "PATIENCE", 3.0)
    monkeypatch.setattr(mpi, "QUICK", 1)
    world._alarms.answers, world._alarms.late = {1: 2, 2: 2}, 2
    assert world._late(1).startswith("rank 2 has not answered")
    assert clock.slept == [0, mpi.NAP, mpi.NAP, 0]


def test_alarms(world: Any, clock: Clock) -> None:
    world._alarms.came = [(3, mpi.ASK, ""), (1, mpi.ANSWER, "2")]
    world._listen()
    assert world._alarms.sent == [(b"0", "byte", 3, mpi.ANSWER)]  # it waits for nobody
    assert (world._answers, world.cause, world._ended, world._gone) == ({1: 2}, "", {}, set())
    world._awaited = {11: 2, 12: 1}
    world._alarms.came = [(3, mpi.ASK, ""), (1, mpi.FAILED, "rank 1 failed"), (2, mpi.ENDED, "rank 2 failed")]
    world._listen()
    assert world._alarms.sent[1:] == [(b"2", "byte", 3, mpi.ANSWER)]
    assert (world.cause, world._ended, world._gone) == ("rank 1 failed", {1: 100.0, 2: 100.0}, {2})
    clock.now = 101.0
    world._take(1, mpi.ENDED, "")
    assert (world.cause, world._ended, world._gone) == ("rank 1 failed", {1: 100.0, 2: 100.0}, {1, 2})


def test_a_failure_is_told_once_and_in_few_words(world: Any) -> None:
    world.fail(ValueError("x" * 5000))
    assert (world.broken, len(world.cause)) == (True, len("rank 0 failed: ValueError: ") + 5000)
    assert world._alarms.sent == [(world.cause[:4000].encode(), "byte", rank, mpi.FAILED) for rank in (1, 2, 3)]
    world.fail(ValueError("again"))
    assert len(world._alarms.sent) == 3


def test_what_was_heard_from_another_is_handed_on(world: Any) -> None:
    world.cause = "rank 2 failed: OSError"
    world.fail(ValueError("boom"))
    assert [text for text, *_ in world._alarms.sent] == [b"rank 2 failed: OSError"] * 3


class Stream:
    def __init__(self) -> None:
        self.text, self.flushed = "", 0

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        self.flushed += 1


def test_leaving_waits_for_all(world: Any, clock: Clock, stands_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long they take, and until all that was said has arrived."""
    streams = [Stream(), Stream()]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    monkeypatch.setattr(mpi, "FAREWELL", 3.0)
    arrived = [False, False, True, True, True]
    world._said.append((SimpleNamespace(Test=lambda: arrived.pop(0)), None))
    world._alarms.came, world._alarms.late = [(rank, mpi.ENDED, "") for rank in (3, 1, 2)], 9
    world.leave()
    assert [stream.flushed for stream in streams] == [1, 1]
    assert world._alarms.sent == [(b"", "byte", rank, mpi.ENDED) for rank in (1, 2, 3)]
    assert (clock.slept, stands_in.finalized) == ([mpi.REST] * 12, [True])


@pytest.mark.parametrize("slurm", [False, True])
def test_leaving_after_a_failure(slurm: bool, world: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a moment; then all are ended."""

    class Ended(Exception):
        pass

    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(mpi.os, "_exit", end)
    monkeypatch.setattr(mpi, "FAREWELL", 3.0)
    world._slurm = slurm
    world._alarms.came, world._alarms.late = [(1, mpi.FAILED, "rank 1 failed")], 2
    with pytest.raises(Ended, match="^1$"):
        world.leave()
    assert clock.now == 100.0 + 2 + 3 + 1  # it was heard after two looks
    assert world._mpi.COMM_WORLD.ended == ([1] if slurm else [])


def test_leaving_when_all_have_left_after_a_failure(world: Any, clock: Clock, stands_in: Any) -> None:
    world.cause, world._gone = "rank 1 failed", {1, 2, 3}
    world.leave()
    assert (clock.slept, stands_in.finalized) == ([], [])


def test_pauses_get_longer(clock: Clock) -> None:
    assert [mpi._pause(tries) for tries in (0, 99, 100, 1999, 2000)] == [1, 100, 101, 2000, 2001]
    assert clock.slept == [0, 0, mpi.NAP, mpi.NAP, mpi.REST]


# Joining, with stand-ins


def test_a_world_is_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Any]()

    def make(place: Place, timeout: float) -> Any:
        made.append(SimpleNamespace(broken=False))
        return made[-1]

    monkeypatch.setattr(mpi, "MpiWorld", make)
    monkeypatch.setattr(mpi, "_joined", None)
    for by, timeout in (("mpi", 1.0), ("slurm", 2.0), ("", 3.0)):
        world: Any = mpi.join(get, Place(0, 2, 0, 2, "", by), timeout)
        assert (world, world.get, world.timeout) == (made[0], get, timeout)
    assert len(made) == 1


@pytest.fixture
def mpi4py(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands for the package: MPI is initialized, with all threads, for a thousand processes."""
    package: Any = ModuleType("mpi4py")
    package.rc = SimpleNamespace(initialize=True, finalize=True)
    package.MPI = SimpleNamespace(
        Is_initialized=lambda: True, Query_thread=lambda: int("3000"), THREAD_MULTIPLE=3000, __file__="mpi.so",
        ERRORS_RETURN="returned",
        COMM_WORLD=SimpleNamespace(size=int("1000"), Set_errhandler=lambda how: setattr(package, "errors", how)),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    return package


MANY = Place(0, 1000, 0, 2, "", "mpi")


def test_mpi_that_is_initialized_already(mpi4py: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mpi.initialized(MANY, 1.0) is mpi4py.MPI
    assert mpi4py.rc == SimpleNamespace(initialize=False, finalize=False)
    mpi4py.rc = SimpleNamespace(initialize=True, finalize=True)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi4py.MPI)  # by the user's script
    assert mpi.initialized(MANY, 1.0) is mpi4py.MPI
    assert mpi4py.rc == SimpleNamespace(initialize=True, finalize=True)


def test_mpi_is_initialized_under_watch(mpi4py: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for all processes, and would do so for ever."""
    did = list[Any]()

    class Timer:
        daemon = False

        def __init__(self, seconds: float, act: Any, arguments: Any) -> None:
            did.append((seconds, act, arguments))

        def start(self) -> None:
            did.append(("start", self.daemon))

        def cancel(self) -> None:
            did.append("cancel")

    def library(file: str) -> Any:
        return SimpleNamespace(MPI_Init_thread=lambda _, __, threads, got: did.append((file, threads)))

    monkeypatch.setattr(mpi.threading, "Timer", Timer)
    monkeypatch.setattr(mpi.ctypes, "CDLL", library)
    mpi4py.MPI.Is_initialized = lambda: False
    assert mpi.initialized(MANY, 2.0) is mpi4py.MPI
    absent = "not all processes have come within 2 s: were all started, and has none ended?"
    assert did == [(2.0, mpi._give_up, (absent,)), ("start", True), ("mpi.so", 3000), "cancel"]
    assert mpi4py.errors == "returned"


@pytest.mark.parametrize("size", [999, 1001])
def test_mpi_that_knows_of_other_processes(size: int, mpi4py: Any) -> None:
    mpi4py.MPI.COMM_WORLD.size = size
    with pytest.raises(Invalid) as error:
        mpi.initialized(MANY, 1.0)
    assert str(error.value) == (
        f"1000 processes were started, and MPI knows of {size}: use the mpiexec of the MPI that mpi4py uses, or "
        "`srun --mpi=pmi2`"
    )


def test_mpi_for_one_thread(mpi4py: Any) -> None:
    mpi4py.MPI.Query_thread = lambda: 2
    with pytest.raises(
        Invalid, match="^MPI was initialized without THREAD_MULTIPLE, which the exchange needs: leave it"
    ):
        mpi.initialized(MANY, 1.0)


@pytest.mark.parametrize("kind", [ImportError, RuntimeError])
def test_mpi4py_without_mpi(kind: type[Exception], mpi4py: Any) -> None:
    def fail(name: str) -> Any:
        raise kind("no libmpi.so\nand more of it")

    del mpi4py.MPI
    mpi4py.__getattr__ = fail
    with pytest.raises(BackendMissing) as error:
        mpi.initialized(MANY, 1.0)
    assert str(error.value) == "mpi4py finds no MPI (no libmpi.so); in a clone of samestep: pip install '.[mpi]'"


def test_giving_up_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, ended = Stream(), list[int]()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(mpi.os, "_exit", ended.append)
    mpi._give_up("nobody has come")
    assert (stream.text, stream.flushed, ended) == ("samestep: nobody has come\n", 1, [1])
