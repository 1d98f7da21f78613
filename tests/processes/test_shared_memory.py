"""memory: vectors that go from one process to another through memory that they share.

Processes are threads of this one, which see their own files as those of others, and which agree through Table. That processes
do the same is tested with sockets (test_sockets.py) and with PyTorch (test_processes.py), where some are killed as well.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.errors import Invalid, ProcessFailed
from samestep.processes.memory import Arrival, Memory
from samestep.processes.place import exchange, memory
from samestep.shards import Fold, cut, parts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs the memory files of Linux")

DEADLINE = 60.0  # seconds after which what does not come is a failure


class Table:
    """Where all lay down what they have, and read what the others have."""

    def __init__(self, count: int, change: Callable[[int, Any], Any] = lambda rank, content: content) -> None:
        self.contents: list[bytes] = [b""] * count
        self.change, self.barrier = change, threading.Barrier(count, timeout=DEADLINE)

    def collect(self, rank: int, content: bytes) -> list[bytes]:
        self.contents[rank] = json.dumps(self.change(rank, json.loads(content))).encode()
        self.barrier.wait()
        seen = list(self.contents)
        self.barrier.wait()
        return seen


class Sharing:
    """A world that has nothing but memory, with NumPy's arithmetic."""

    def __init__(self, shared: Memory, size: int) -> None:
        self.memory, self.rank, self.size, self.swaps = shared, shared.rank, size, 0

    def swap(self, sends: Any, receives: Any) -> Any:
        self.swaps += 1
        self.memory.hand(self.swaps, [(q, vector.view(np.uint8)) for q, vector in sends])
        return [], [Arrival(self.memory, q, self.swaps, into.view(np.uint8)) for q, into in receives]

    def expect(self, receives: Any) -> Any:
        return receives

    def wait(self, works: list[Arrival]) -> None:
        for work in works:
            work.result(DEADLINE)

    def empty(self, size: int, like: Any) -> Any:
        return np.empty(size, like.dtype)

    def add(self, left: Any, right: Any) -> Any:
        return np.add(left, right, out=left)

    def assign(self, array: Any, value: Any) -> Any:
        array[...] = value
        return array


@dataclass
class Made:
    """Memories of so many processes, and threads for them."""

    pool: ThreadPoolExecutor

    def each(self, work: Callable[[Any], Any], given: list[Any]) -> list[Any]:
        return [future.result(2 * DEADLINE) for future in [self.pool.submit(work, thing) for thing in given]]

    def memories(
        self,
        count: int,
        change: Any = lambda rank, content: content,
        kind: Any = Memory,
        wanted: Any = lambda rank: True,
    ) -> list[Any]:
        table = Table(count, change)

        def make(rank: int) -> Memory:
            return kind(rank, count, lambda content: table.collect(rank, content), wanted(rank))

        return self.each(make, list(range(count)))


@pytest.fixture(scope="module")
def made() -> Iterator[Made]:
    opened: list[Memory] = []
    begin = Memory.__init__
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(8) as pool:
        patch.setattr(Memory, "__init__", lambda self, *given: (opened.append(self), begin(self, *given))[1])
        yield Made(pool)
        for one in opened:
            one.close()


def numbers(size: int, dtype: str = "f4", seed: int = 0) -> Any:
    """Over eight orders of magnitude, so that the order of additions shows in the bits."""
    random = np.random.default_rng(seed)
    return (random.standard_normal(size) * 10.0 ** random.integers(-4, 5, size)).astype(dtype)


def along_the_tree(vectors: list[Any]) -> Any:
    power = 1
    while 2 * power < len(vectors):
        power *= 2
    return vectors[0] if len(vectors) == 1 else along_the_tree(vectors[:power]) + along_the_tree(vectors[power:])


# The sum over processes


def check_across(made: Made, memories: list[Any], calls: list[tuple[int, int, str]]) -> None:
    """Calls of `across`, one after the other with nothing between them: each of so many shards, numbers, and type."""
    count = len(memories)
    given = [[numbers(size, dtype, 100 * i + s) for s in range(n)] for i, (n, size, dtype) in enumerate(calls)]
    worlds = [Sharing(shared, count) for shared in memories]

    def work(world: Sharing) -> list[bytes]:
        results = []
        for (n, size, dtype), vectors in zip(calls, given, strict=True):
            shares = cut(n, count)
            fold: Fold[Any] = Fold(n, world.add)
            for shard in range(*shares[world.rank]):
                fold.add((shard, shard + 1), vectors[shard].copy())
            held = [parts(lo, hi, n) for lo, hi in shares]
            mine, into = dict(sorted(fold.parts.items())), np.full(size, 7, dtype)
            anything: Any = world
            results.append(exchange.across(anything, anything, mine, held, n, into).tobytes())
        return results

    for results in made.each(work, worlds):
        for i, (result, vectors) in enumerate(zip(results, given, strict=True)):
            same = result == along_the_tree(vectors).tobytes()
            assert same, calls[i]  # of the bytes themselves, pytest would spell out how a megabyte differs


CALL = st.tuples(st.integers(1, 11), st.integers(0, 70), st.sampled_from(["f4", "f8", "f2", "i8"]))


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 4), chunk=st.sampled_from([1, 3, 1 << 19]), calls=st.lists(CALL, min_size=1, max_size=6))
def test_across_adds_along_the_tree(made: Made, count: int, chunk: int, calls: list[tuple[int, int, str]]) -> None:
    """Calls of different sizes and types; also fewer shards than processes, or fewer numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "CHUNK", chunk)
        memories = made.memories(count)
        assert [set(one.peers) for one in memories] == [set(range(count)) - {rank} for rank in range(count)]
        check_across(made, memories, calls)
        for one in memories:
            one.close()


LARGE = [(8, 200_000, "f4"), (8, 1_000, "f8"), (3, 100_001, "f8"), (8, 200_000, "f4")] * 2


def test_across_with_vectors_larger_than_a_page(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "CHUNK", 10_000)
    check_across(made, made.memories(3), LARGE)


class Early(Memory):
    """Twin whose tokens come before the vectors are there: they are written with the next one."""

    def _place(self, vector: Any) -> int:
        where = super()._place(np.zeros_like(vector))
        for start, content in vars(self).setdefault("late", []):
            self._own[start : start + len(content)] = content
        vars(self)["late"] = [(where, vector.copy())]
        return where


def test_a_twin_whose_tokens_come_too_early_is_rejected(made: Made) -> None:
    check_across(made, made.memories(2), LARGE[:2])
    with pytest.raises(AssertionError):
        check_across(made, made.memories(2, kind=Early), LARGE[:2])


# Writing again


def taken(of: Memory, q: int, number: int, size: int) -> bytes:
    into = np.zeros(size, np.uint8)
    of.take(q, number, into, DEADLINE)
    return into.tobytes()


def check_nothing_is_written_over(first: Memory, second: Memory) -> None:
    vectors = [np.full(5000 + i, i, np.uint8) for i in range(6)]
    for i, vector in enumerate(vectors):
        first.hand(i, [(1, vector)])
    for i in (3, 1, 0, 2, 5, 4):
        same = taken(second, 0, i, 5000 + i) == vectors[i].tobytes()
        assert same, i


def test_what_nobody_has_read_is_not_written_over(made: Made) -> None:
    check_nothing_is_written_over(*made.memories(2))


def test_a_twin_that_writes_to_the_same_place_at_once_is_rejected(made: Made) -> None:
    class Hasty(Memory):
        def _place(self, vector: Any) -> int:
            self._blocks.clear()
            return super()._place(vector)

    with pytest.raises(AssertionError):
        check_nothing_is_written_over(*made.memories(2, kind=Hasty))


def test_what_all_have_read_is_written_over(made: Made) -> None:
    """A block is for two readers; it is free when the second has said that it has read it, and not before."""
    first, *others = made.memories(3)
    vector = np.arange(100, dtype=np.uint8)
    first.hand(0, [(1, vector), (2, vector)])
    assert {start: (block.end, block.readers) for start, block in first._blocks.items()} == {0: (128, [1, 2])}
    for q, other in enumerate(others, start=1):
        assert taken(other, 0, 0, 100) == vector.tobytes()
        other.hand(1, [(0, vector[:1])])
        first.hand(2, [(1, vector[:50])])
        assert sorted(first._blocks) == ([0, 128] if q == 1 else [0, 128, 192])
        assert taken(first, q, 1, 1) == b"\0"
        assert first._blocks.get(0) == (memory.Block(128, [2]) if q == 1 else None)
    first.hand(3, [(2, vector)])
    assert taken(others[1], 0, 3, 100) == vector.tobytes()
    assert sorted(first._blocks) == [0, 128, 192]


def test_memory_does_not_grow_with_the_number_of_calls(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "CHUNK", 10)
    memories, ends = made.memories(3), []
    for _ in range(3):
        check_across(made, memories, [(8, 100, "f4"), (8, 37, "f8"), (2, 64, "f4")] * 10)
        ends.append([max(block.end for block in one._blocks.values()) for one in memories])
        assert all(len(one._blocks) + len(peer.read) < 20 for one in memories for peer in one.peers.values())
    assert max(map(max, ends)) < 10_000


def test_more_has_been_read_than_a_token_can_tell(made: Made) -> None:
    """The rest is told by the next one."""
    first, second = made.memories(2)
    for i in range(40):
        first.hand(i, [(1, np.full(3, i, np.uint8))])
    assert [taken(second, 0, i, 3) for i in range(40)] == [bytes([i] * 3) for i in range(40)]
    for left in (12, 0):
        second.hand(0, [(0, np.zeros(1, np.uint8))])
        taken(first, 1, 0, 1)
        assert len(first._blocks) == left


# With whom


def test_one_that_does_not_want_shares_with_nobody(made: Made) -> None:
    memories = made.memories(3, wanted=lambda rank: rank != 1)
    assert [set(one.peers) for one in memories] == [{2}, set(), {0}]


@pytest.mark.parametrize(
    "what", ["another process", "another memory file", "another file", "nothing", "no such process"]
)
def test_what_is_not_the_others_memory_is_refused(what: str, made: Made) -> None:
    """As in another container, where the same numbers are those of something else."""
    other = os.memfd_create(f"samestep-{'0' * 32}") if what == "another memory file" else os.open(__file__, os.O_RDONLY)

    def change(rank: int, content: Any) -> Any:
        if rank == 1 and "pid" in content:
            number, name = content["memory"]
            content["memory"] = {"nothing": 1 << 20, "another process": number}.get(what, other), name
            content["pid"] = {"another process": os.getppid(), "no such process": 1 << 30}.get(what, content["pid"])
        return content

    try:
        memories = made.memories(3, change)
        assert [set(one.peers) for one in memories] == [{2}, set(), {0}]
    finally:
        os.close(other)


@pytest.mark.parametrize("lacks", ["memfd_create", "pipe"])
def test_where_the_system_has_none_nobody_shares(lacks: str, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError("not here")

    monkeypatch.setattr(os, lacks, refuse) if lacks == "pipe" else monkeypatch.delattr(os, lacks)
    assert [one.peers for one in made.memories(2)] == [{}, {}]


def test_sharing_with_all_can_be_asked_for(made: Made) -> None:
    one, _, _ = made.memories(3)
    one.check(3)
    alone, other, _ = made.memories(3, wanted=lambda rank: rank != 0)
    message = (
        "cannot share memory with rank {}: processes that do must be on one host with Linux, of one user, and see each other "
        "in /proc"
    )
    with pytest.raises(Invalid) as error:
        alone.check(3)
    assert str(error.value) == f"rank 0 {message.format('1, 2')}"
    with pytest.raises(Invalid) as error:
        other.check(3)
    assert str(error.value) == f"rank 1 {message.format('0')}"


# Failures


def test_one_that_is_waited_for_closes_its_pipes(made: Made) -> None:
    first, second = made.memories(2)
    second.hand(1, [(0, np.ones(3, np.uint8))])
    waiting = made.pool.submit(first.take, 1, 2, np.zeros(3, np.uint8), DEADLINE)
    second.close()
    with pytest.raises(EOFError, match="rank 1 has closed its pipes"):
        waiting.result(DEADLINE)
    assert taken(first, 1, 1, 3) == b"\1\1\1"  # what it has said before counts
    first.hand(2, [(1, np.ones(3, np.uint8))])  # to nobody


def test_one_that_waits_closes_its_own_pipes(made: Made) -> None:
    """A thread waits for another process when this one fails."""
    first, _ = made.memories(2)
    waiting = made.pool.submit(first.take, 1, 1, np.zeros(3, np.uint8), DEADLINE)
    first.close()
    with pytest.raises(EOFError, match="rank 0 has closed its pipes"):
        waiting.result(DEADLINE)
    with pytest.raises(EOFError, match="rank 0 has closed its pipes"):
        first.take(1, 1, np.zeros(3, np.uint8), DEADLINE)
    first.hand(2, [(1, np.ones(3, np.uint8))])  # to nobody


def check_that_it_notices(made: Made, first: Memory, second: Memory) -> None:
    """This process fails, and has not yet closed the pipe when a thread looks: the thread must not wait there for ever."""
    first.closed = True
    waiting = made.pool.submit(first.take, 1, 1, np.zeros(3, np.uint8), DEADLINE)
    try:
        with pytest.raises(EOFError, match="rank 0 has closed its pipes"):
            waiting.result(20 * memory.LOOK / 1000)
    finally:
        second.close()  # lets a thread go that does wait


def test_one_that_waits_notices_before_its_pipes_are_closed(made: Made) -> None:
    check_that_it_notices(made, *made.memories(2))


def test_a_twin_whose_pipes_make_a_reader_wait_is_rejected(made: Made) -> None:
    first, second = made.memories(2)
    os.set_blocking(first.peers[1].of.fileno(), True)
    with pytest.raises(TimeoutError):
        check_that_it_notices(made, first, second)


def test_one_that_says_nothing_is_given_up(made: Made) -> None:
    first, _ = made.memories(2)
    with pytest.raises(TimeoutError, match="timed out"):
        first.take(1, 1, np.zeros(3, np.uint8), 0.01)


def test_another_length_than_expected_is_told(made: Made) -> None:
    first, second = made.memories(2)
    first.hand(4, [(1, np.zeros(3, np.uint8))])
    message = "rank 0 has sent 3 bytes for swap 4, and rank 1 expected 2 for swap 4: do all run the same script?"
    with pytest.raises(ProcessFailed) as error:
        taken(second, 0, 4, 2)
    assert str(error.value) == message


def test_a_pipe_that_nobody_reads_is_no_reason_to_wait(made: Made) -> None:
    first, _ = made.memories(2)
    with pytest.raises(ProcessFailed, match="rank 1 has not read what rank 0 has told it: its pipe is full"):
        for _ in range(memory.PIPE):
            first.hand(1, [(1, np.zeros(1, np.uint8))])


def test_memory_that_nobody_reads_is_not_without_end(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CAPACITY", 1 << 12)
    first, _ = made.memories(2)
    with pytest.raises(ProcessFailed, match="rank 0 has 4096 bytes in shared memory that nobody has read: it is full"):
        for i in range(5):
            first.hand(i, [(1, np.zeros(1024, np.uint8))])
