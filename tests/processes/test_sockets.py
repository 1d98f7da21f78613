"""sockets and meeting: processes that find each other, and vectors that get from one to another, without any framework.

Most worlds here are threads of this process, with real sockets between them; where one is killed or stopped, they are
processes. Nothing depends on how long anything takes, except that what never comes is given up at a deadline.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samestep.devices import cpu
from samestep.errors import Invalid, ProcessFailed
from samestep.processes.memory import Memory
from samestep.processes.place import Alone, Place, exchange, sockets
from samestep.processes.sockets import OnHost, SocketWorld, join
from samestep.shards import Fold, cut, parts

DEADLINE = 60.0  # seconds after which what does not come is a failure
GONE = "rank {} is gone: it was killed, or its host was lost"
LATE = "rank {} has not answered for {:g} s: it hangs, or its host cannot be reached"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@dataclass
class Threads:
    """Ranks as threads of this process."""

    pool: ThreadPoolExecutor
    meet: str

    def start(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self.pool.submit(work, *arguments)

    def each(self, work: Callable[[Any], Any], given: list[Any]) -> list[Any]:
        """What `work` gives for each, side by side; an error is given as it is."""

        def outcome(thing: Any) -> Any:
            try:
                return work(thing)
            except Exception as error:
                return error

        return [future.result(DEADLINE) for future in [self.pool.submit(outcome, thing) for thing in given]]

    def worlds(self, count: int, timeout: float = DEADLINE) -> list[SocketWorld]:
        places = [Place(rank, count, rank, count, self.meet) for rank in range(count)]
        made = self.each(lambda place: SocketWorld(np.asarray, place, DEADLINE), places)
        assert all(isinstance(world, SocketWorld) for world in made), made
        for world in made:
            world.timeout = timeout
        return made


@pytest.fixture
def threads(tmp_path: Path) -> Iterator[Threads]:
    made: list[SocketWorld] = []
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(32) as pool:
        begin = SocketWorld.__init__

        def noting(self: Any, *arguments: Any) -> None:
            begin(self, *arguments)
            made.append(self)

        patch.setattr(SocketWorld, "__init__", noting)
        yield Threads(pool, f"file://{tmp_path}/meet")
        for world in made:
            world.fail(RuntimeError("the test is over"))


def messages(errors: list[Any]) -> list[str]:
    assert all(isinstance(error, ProcessFailed) for error in errors), errors
    return [str(error) for error in errors]


# Moving numbers


@pytest.mark.parametrize("count", [2, 3, 4])
def test_all_learn_what_each_one_has(count: int, threads: Threads) -> None:
    worlds = threads.worlds(count)
    assert [(world.rank, world.size) for world in worlds] == [(rank, count) for rank in range(count)]
    contents = [bytes([rank]) * rank * 100_000 for rank in range(count)]  # that of rank 0 is empty
    assert threads.each(lambda world: world.collect(contents[world.rank]), worlds) == [contents] * count
    given = [b"of rank 0", *[None] * (count - 1)]
    assert threads.each(lambda world: world.broadcast(given[world.rank]), worlds) == [b"of rank 0"] * count
    for wants in range(-1, count):
        told = threads.each(lambda world: world.agreed(world.vote(world.rank == wants)), worlds)  # noqa: B023
        assert told == [wants >= 0] * count


@pytest.mark.parametrize("count", [2, 3])
def test_all_send_much_to_all_at_once(count: int, threads: Threads) -> None:
    """Far more than fits on the way; several swaps are begun before the first is waited for, and votes come between them."""
    size, worlds = 3_000_000, threads.worlds(count)

    def work(world: SocketWorld) -> list[list[float]]:
        others = [rank for rank in range(count) if rank != world.rank]
        swaps, seen = [], []
        for i in range(3):
            vector = np.full(size, 10 * world.rank + i, np.float32)
            into = {rank: np.full(size, np.nan, np.float32) for rank in others}
            swaps.append((*world.swap([(rank, vector) for rank in others], list(into.items())), into, vector))
            vote = world.vote(i == 2)
            assert world.agreed(vote) == (i == 2)
        for leaving, arriving, into, vector in swaps:
            world.wait(arriving)
            world.wait(leaving)
            assert (vector == vector[0]).all()
            seen.append([float(v[0]) for v in into.values() if (v == v[0]).all()])
        return seen

    for rank, seen in enumerate(threads.each(work, worlds)):
        assert seen == [[10.0 * q + i for q in range(count) if q != rank] for i in range(3)]


def test_several_vectors_to_one_process_arrive_in_order_also_where_they_are_empty(threads: Threads) -> None:
    first, second = threads.worlds(2)
    sent = [np.arange(n, dtype=np.float64) for n in (5, 0, 70_000)]
    into = [np.full(len(v), np.nan) for v in sent]
    leaving, nothing = first.swap([(1, v) for v in sent], [])
    _, arriving = second.swap([], [(0, v) for v in into])
    assert nothing == []
    second.wait(arriving)
    first.wait(leaving)
    assert [v.tobytes() for v in into] == [v.tobytes() for v in sent]


def test_a_swap_that_does_not_fit_is_told(threads: Threads) -> None:
    first, second = threads.worlds(2)
    first.swap([(1, np.zeros(3))], [])
    _, arriving = second.swap([], [(0, np.zeros(2))])
    message = "rank 0 has sent 24 bytes for swap 1, and rank 1 expected 16 for swap 1: do all run the same script?"
    assert messages(threads.each(second.wait, [arriving])) == [message]


class Host:
    """A framework whose arrays cannot be written to, and whose additions give zero for numbers too small to be normal."""

    tiny = np.finfo(np.float32).tiny

    def put(self, array: Any, device: Any) -> Any:
        new = np.array(array)
        new.setflags(write=False)
        return new

    copy = put

    def get(self, array: Any) -> Any:
        return array

    def add(self, left: Any, right: Any) -> Any:
        total = left + right
        return self.put(np.where(np.abs(total) < self.tiny, np.float32(0), total), None)


def vectors(count: int, size: int) -> list[Any]:
    """Over eight orders of magnitude, so that the order of additions shows; some so small that NumPy and Host differ."""
    random = np.random.default_rng(0)
    many = random.standard_normal((count, size)) * 10.0 ** random.integers(-4, 5, (count, size))
    many[:, ::3] *= 1e-38
    return list(many.astype(np.float32))


def along_the_tree(add: Any, parts: list[Any]) -> Any:
    power = 1
    while 2 * power < len(parts):
        power *= 2
    if len(parts) == 1:
        return parts[0]
    return add(along_the_tree(add, parts[:power]), along_the_tree(add, parts[power:]))


def summed(worlds: list[SocketWorld], threads: Threads, shards: list[Any], arithmetic: Any) -> list[Any]:
    """The sum over all shards, on every process."""
    n, count, host = len(shards), len(worlds), Host()
    shares = cut(n, count)
    held = [parts(lo, hi, n) for lo, hi in shares]

    def work(world: SocketWorld) -> Any:
        world.get = host.get
        fold: Fold[Any] = Fold(n, arithmetic.add)
        for shard in range(*shares[world.rank]):
            brought = world.bring(host.put(shards[shard], None))
            assert brought.flags.writeable
            fold.add((shard, shard + 1), brought)
        memory = world.empty(len(shards[0]), shards[0])
        assert memory.dtype == np.float32
        return exchange.across(world, arithmetic, dict(sorted(fold.parts.items())), held, n, memory)

    return threads.each(work, worlds)


@pytest.fixture(params=["sockets", "shared", "both"])
def worlds_by(request: Any, threads: Threads, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[SocketWorld]]:
    """Makes the worlds of so many ranks, between which vectors travel in this way; with both, rank 1 is elsewhere."""

    def make(count: int) -> list[SocketWorld]:
        made = threads.worlds(count)
        if request.param == "both":
            monkeypatch.setattr(sockets, "Memory", lambda rank, *given: Memory(rank, *given[:2], rank != 1))
        else:
            monkeypatch.setenv("SAMESTEP_TRANSPORT", request.param)
        threads.each(lambda world: world.prepare(), made)
        sharing = {"sockets": set(), "shared": {0, 1, 2, 3}, "both": {0, 2, 3}}[request.param] & {*range(count)}
        for world in made:
            assert {*world._memory.peers} == (sharing - {world.rank} if world.rank in sharing else set())
        return made

    return make


@pytest.mark.parametrize(("count", "chunk"), [(2, 1 << 21), (3, 7), (4, 100)])
def test_the_framework_adds_along_the_tree(
    count: int, chunk: int, worlds_by: Any, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its own arithmetic, into memory that it knows nothing of; three or four processes share two shards as well."""
    monkeypatch.setattr(exchange, "CHUNK", chunk)
    host: Any = Host()
    worlds = worlds_by(count)
    for n in (8, 2, 8):
        shards = vectors(n, 300)
        expected = along_the_tree(host.add, shards)
        assert expected.tobytes() != along_the_tree(np.add, shards).tobytes(), "there is nothing to tell apart"
        for total in summed(worlds, threads, shards, OnHost(host, cpu())):
            assert total.tobytes() == expected.tobytes()


def test_a_twin_that_adds_with_numpy_is_rejected(threads: Threads) -> None:
    class Twin(OnHost):
        def add(self, left: Any, right: Any) -> Any:
            return np.add(left, right, out=left)

    host: Any = Host()
    shards = vectors(8, 300)
    for total in summed(threads.worlds(2), threads, shards, Twin(host, cpu())):
        assert total.tobytes() == along_the_tree(np.add, shards).tobytes()
        assert total.tobytes() != along_the_tree(host.add, shards).tobytes()


def test_arithmetic_on_the_host_copies_what_the_next_step_would_change() -> None:
    host: Any = Host()
    memory = np.arange(3, dtype=np.float32)
    placed = OnHost(host, cpu()).place(memory, cpu())
    memory[:] = 7
    assert placed.tolist() == [0, 1, 2]


# Failures


def test_a_failure_is_told_to_all_with_its_cause(worlds_by: Any, threads: Threads) -> None:
    """Whatever they wait for: rank 0 for what rank 1 says, rank 2 for a vector of rank 0."""
    worlds = worlds_by(3)

    def work(world: SocketWorld) -> Any:
        try:
            if world.rank == 0:
                return world.collect(b"")
            return world.wait(world.swap([], [(0, np.zeros(5))])[1])
        except ProcessFailed as error:
            world.fail(error)  # as the Trainer does
            raise

    others = threads.start(lambda: threads.each(work, [worlds[0], worlds[2]]))
    worlds[1].fail(ValueError("boom\nand more of it"))
    assert messages(others.result(DEADLINE)) == ["rank 1 failed: ValueError: boom"] * 2
    assert [world.cause for world in worlds] == ["rank 1 failed: ValueError: boom"] * 3
    assert messages(threads.each(lambda w: w.collect(b""), worlds)) == ["rank 1 failed: ValueError: boom"] * 3


def test_one_that_ends_with_an_error_disturbs_nobody_who_does_not_need_it(threads: Threads) -> None:
    """A signal has asked all to stop: rank 0 has ended so when rank 1 still waits for what rank 2 will say."""
    worlds = threads.worlds(3)
    told = [world._tell(bytes([world.rank])) for world in worlds[:2]]
    worlds[0].wait(told[0][2])
    worlds[0].fail(SystemExit(143))
    assert worlds[1]._peers[0].left.wait(DEADLINE)
    worlds[2]._tell(b"\2")
    assert worlds[1]._gather(told[1]) == [b"\0", b"\1", b"\2"]
    assert messages(threads.each(lambda w: w.collect(b""), worlds[1:2])) == ["rank 0 failed: SystemExit: 143"]


def test_the_first_cause_counts_and_an_error_without_words_has_a_name(threads: Threads) -> None:
    worlds = threads.worlds(2)
    worlds[0].fail(KeyboardInterrupt())
    worlds[0].fail(ValueError("later"))
    [error] = threads.each(lambda w: w.collect(b""), worlds[1:])
    assert str(error) == worlds[0].cause == "rank 0 failed: KeyboardInterrupt"


def test_one_that_leaves_when_it_has_said_all_disturbs_nobody(threads: Threads) -> None:
    """Rank 1 has got all it needs and is gone; rank 0 still waits for rank 2."""
    worlds = threads.worlds(3)
    told = worlds[1]._tell(b"1")
    worlds[1].wait(told[2])
    last, early = worlds[0]._tell(b"0"), worlds[0]._peers[1].left
    for link in (worlds[1]._peers[0].talk, worlds[1]._peers[0].vector):
        link.shutdown(socket.SHUT_WR)
    assert early.wait(DEADLINE)
    worlds[2]._tell(b"2")
    assert worlds[0]._gather(last) == [b"0", b"1", b"2"]
    assert messages(threads.each(lambda w: w.collect(b""), worlds[:1])) == [GONE.format(1)]


def test_who_hangs_is_found_at_the_end_of_the_chain(worlds_by: Any, threads: Threads) -> None:
    """Rank 0 waits for rank 1, which waits for rank 2, which does something else for ever."""
    worlds = worlds_by(3)
    for world in worlds:
        world.timeout = 0.5

    def work(world: SocketWorld) -> None:
        _, arriving = world.swap([], [(world.rank + 1, np.zeros(5))])
        world.wait(arriving)

    assert messages(threads.each(work, worlds[:2])) == [LATE.format(2, 0.5)] * 2


def test_a_twin_that_names_whom_it_waited_for_is_rejected(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = threads.worlds(3)
    monkeypatch.setattr(SocketWorld, "_take", lambda *_: (_ for _ in ()).throw(TimeoutError))  # nobody is asked
    with pytest.raises(AssertionError):
        test_who_hangs_is_found_at_the_end_of_the_chain(lambda count: worlds, threads)


def test_two_that_wait_for_each_other_name_each_other(threads: Threads) -> None:
    def work(world: SocketWorld) -> None:
        _, arriving = world.swap([], [(1 - world.rank, np.zeros(5))])
        world.wait(arriving)

    found = messages(threads.each(work, threads.worlds(2, timeout=0.5)))
    assert set(found) <= {LATE.format(0, 0.5), LATE.format(1, 0.5)}  # whoever is first tells the other


PROCESS = """
import json, os, signal, sys
import numpy as np
from samestep.errors import ProcessFailed
from samestep.processes.place import Place
from samestep.processes.sockets import SocketWorld

rank, size, meet, timeout, what, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]), *sys.argv[5:]
world = SocketWorld(np.asarray, Place(rank, size, rank, size, meet), 60)
world.prepare()
others = [q for q in range(size) if q != rank]
big = np.zeros(4_000_000)
try:
    world.collect(b"")
    world.timeout = timeout  # not before all are there
    if rank == 1 and what in ("SIGKILL", "SIGSTOP"):
        world.swap([(others[0], big)], [])  # on its way; another will wait for it in vain
        os.kill(os.getpid(), getattr(signal, what))
    if rank == 1 and what == "error":
        world.swap([(others[0], big)], [])
        raise ValueError("boom")
    leaving, arriving = world.swap([(q, big) for q in others], [(q, np.empty_like(big)) for q in others])
    world.wait(arriving)
    world.wait(leaving)
    world.collect(b"")
    said = "whole"
except BaseException as error:
    world.fail(error)
    said = str(error)
with open(f"{folder}/{rank}", "w") as file:
    file.write(said)
"""


def run(count: int, meet: str, timeout: float, what: str, transport: str, folder: Path) -> list[tuple[int, str]]:
    """Exit status and last words of processes; of one that is stopped, nothing is awaited."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, *map(str, (rank, count, meet, timeout, what, folder))],
            env={**os.environ, "SAMESTEP_TRANSPORT": transport},
        )
        for rank in range(count)
    ]
    try:
        ended = [process for rank, process in enumerate(running) if not (what == "SIGSTOP" and rank == 1)]
        for process in ended:
            process.wait(DEADLINE)
        said = [folder / str(rank) for rank in range(count)]
        return [
            (process.returncode, path.read_text() if path.exists() else "")
            for process, path in zip(running, said, strict=True)
        ]
    finally:
        for process in running:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("nothing", ["whole"] * 3),
        ("error", ["rank 1 failed: ValueError: boom", "boom", "rank 1 failed: ValueError: boom"]),
        ("SIGKILL", [GONE.format(1), "", GONE.format(1)]),
        ("SIGSTOP", [LATE.format(1, 3), "", LATE.format(1, 3)]),
    ],
)
@pytest.mark.parametrize("transport", ["sockets", "shared"])
def test_processes_end_with_the_name_of_the_one_that_failed(
    transport: str, what: str, words: list[str], tmp_path: Path
) -> None:
    ended = run(3, f"file://{tmp_path}/meet", 3 if what == "SIGSTOP" else DEADLINE, what, transport, tmp_path)
    assert [said for _, said in ended] == words
    status = {"SIGKILL": -signal.SIGKILL, "SIGSTOP": None}.get(what, 0)
    assert [code for code, _ in ended] == [0, status, 0]


# Joining

AGAIN = """
import sys
import numpy as np
from samestep.errors import ProcessFailed
from samestep.processes.place import Place
from samestep.processes.sockets import join

rank, meet, folder = int(sys.argv[1]), *sys.argv[2:]
place = Place(rank, 2, rank, 2, meet)
world = join(np.asarray, place, 60)
assert join(np.asarray, place, 50) is world and world.timeout == 50
if rank == 1:
    world.fail(ValueError("boom"))
try:
    said = str(world.collect(b""))
except ProcessFailed as error:
    said = str(error)
    world.fail(error)
other = join(np.asarray, place, 60)
assert other is not world
with open(f"{folder}/{rank}", "w") as file:
    file.write(f"{said}, {other.collect(bytes([rank]))}")
"""


@pytest.mark.parametrize("way", ["file", "tcp"])
def test_a_world_is_joined_once_until_it_fails_and_then_anew(way: str, tmp_path: Path) -> None:
    """All come to the same place again, where what the one that failed has left disturbs nobody."""
    meet = f"file://{tmp_path}/meet" if way == "file" else f"tcp://127.0.0.1:{free_port()}"
    running = [subprocess.Popen([sys.executable, "-c", AGAIN, str(rank), meet, str(tmp_path)]) for rank in range(2)]
    assert [process.wait(DEADLINE) for process in running] == [0, 0]
    words = "rank 1 failed: ValueError: boom, [b'\\x00', b'\\x01']"
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [words] * 2


def test_a_transport_that_is_none(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMESTEP_TRANSPORT", "gloo")
    [error, _] = threads.each(lambda world: world.prepare(), threads.worlds(2))
    assert isinstance(error, Invalid)
    assert str(error) == "SAMESTEP_TRANSPORT must be sockets or shared, got 'gloo'"


def test_one_process_is_alone() -> None:
    assert isinstance(join(np.asarray, Place(), 5.0), Alone)
