"""exchange: the sum over devices and over processes is the tree's, to the bit, and moves no more than a ring does."""

from __future__ import annotations

import re
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import process_job
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.backends import find
from samestep.devices import cpu
from samestep.errors import Invalid
from samestep.processes import exchange
from samestep.processes.exchange import Across
from samestep.processes.world import World
from samestep.shards import Fold, cut, parts

BACKEND = find.load("torch")
DEADLINE = process_job.DEADLINE


def bits(vector: torch.Tensor) -> bytes:
    return bytes(vector.numpy().tobytes())


def floats(count: int, size: int, seed: int = 0) -> list[torch.Tensor]:
    """Vectors over eight orders of magnitude, so that the order of additions shows in the bits."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-4, 5, (count, size), generator=generator)
    return list((torch.randn((count, size), generator=generator) * 10.0**exponents).unbind())


def along_the_tree(vectors: list[torch.Tensor]) -> torch.Tensor:
    power = 1
    while 2 * power < len(vectors):
        power *= 2
    return vectors[0] if len(vectors) == 1 else along_the_tree(vectors[:power]) + along_the_tree(vectors[power:])


# Between the devices of a process


def exchanged(vectors: list[torch.Tensor], devices: int) -> list[torch.Tensor]:
    """What a step does: every device folds the shards it holds, then the parts are exchanged."""
    n, held = len(vectors), []
    for lo, hi in cut(n, devices):
        fold: Fold[torch.Tensor] = Fold(n, lambda left, right: left + right)
        for shard in range(lo, hi):
            fold.add((shard, shard + 1), vectors[shard])
        held.append(fold.parts)
    return exchange.exchange(BACKEND, held, n, [cpu()] * devices, len(vectors[0]))


@pytest.mark.parametrize("size", [1, 3, 11, 1000])
@pytest.mark.parametrize("shards", [7, 8])
def test_exchange_gives_the_same_bits_on_any_number_of_devices(shards: int, size: int) -> None:
    vectors = floats(shards, size)
    expected = bits(along_the_tree(vectors))
    for devices in range(1, 9):  # also one device more than there are shards
        assert [bits(total) for total in exchanged(vectors, devices)] == [expected] * devices
    assert [bits(vector) for vector in vectors] == [bits(vector) for vector in floats(shards, size)]


def test_exchange_gives_the_same_bits_in_the_threads_of_a_session() -> None:
    vectors = floats(8, 1000)
    with BACKEND.session([cpu()], deterministic=True, threads=1):
        results = [bits(total) for devices in range(1, 9) for total in exchanged(vectors, devices)]
    assert set(results) == {bits(along_the_tree(vectors))}


def test_exchange_leaves_every_device_a_vector_of_its_own() -> None:
    totals = exchanged([torch.ones(5) for _ in range(4)], 3)
    totals[0].zero_()
    assert [total.tolist() for total in totals] == [[0.0] * 5, [4.0] * 5, [4.0] * 5]


def test_exchange_copies_nothing_on_one_device() -> None:
    vector = torch.ones(5)
    [total] = exchange.exchange(BACKEND, [{(0, 3): vector}], 3, [cpu()], 5)
    assert total is vector


def test_exchange_notices_a_lost_part() -> None:
    held: list[dict[tuple[int, int], Any]] = [{(0, 1): torch.ones(2)}, {}]
    message = "the sum over 2 shards is not complete: it has parts [(0, 1)]"
    with pytest.raises(Invalid, match=f"^{re.escape(message)}$"):
        exchange.exchange(BACKEND, held, 2, [cpu(), cpu()], 2)


# Between processes, with threads in their place


class Mail:
    """Messages between threads that stand for processes."""

    def __init__(self) -> None:
        self.messages: dict[
            Any, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # as it was sent, and the memory it was sent from
        self.arrived = threading.Condition()


class Thread(World):
    """A world as demanding as a real one may be: what is being sent must not change before it has arrived, and what is to be
    received is worth nothing before it was waited for."""

    def __init__(self, rank: int, size: int, mail: Mail, lose: bool = False) -> None:
        super().__init__(rank, size, DEADLINE)
        self.mail, self.lose, self.sent, self.swaps = mail, lose, 0, 0
        self.made = list[int]()  # numbers that memory was asked for

    def swap(self, sends: Any, receives: Any) -> Any:
        for i, (to, vector) in enumerate(sends):
            assert len(vector) > 0
            self.sent += len(vector)
            content = vector.clone()
            if self.lose and self.swaps == 0 and i == 0:
                content = vector = torch.zeros_like(vector)
            with self.mail.arrived:
                self.mail.messages[self.rank, to, self.swaps, sum(q == to for q, _ in sends[:i])] = content, vector
                self.mail.arrived.notify_all()
        keys = [(q, self.rank, self.swaps, sum(p == q for p, _ in receives[:i])) for i, (q, _) in enumerate(receives)]
        self.swaps += 1
        return [], list(zip(keys, (memory for _, memory in receives), strict=True))

    def expect(self, receives: Any) -> Any:
        return receives

    def wait(self, works: Any) -> None:
        for key, memory in works:
            with self.mail.arrived:
                assert self.mail.arrived.wait_for(lambda key=key: key in self.mail.messages, DEADLINE), key
                content, now = self.mail.messages.pop(key)
                assert bits(content) == bits(now), "it was changed on its way"
                memory.copy_(content)

    def empty(self, size: int, like: torch.Tensor) -> torch.Tensor:
        self.made.append(size)
        return torch.full((size,), torch.nan, dtype=like.dtype)

    def bring(self, vector: torch.Tensor) -> torch.Tensor:
        return vector

    def send(self, *_: Any) -> None:
        raise NotImplementedError

    receive = fail = send


def summed(
    vectors: list[torch.Tensor],
    shares: list[tuple[int, int]],
    across: type[Across] = Across,
    lose: bool = False,
    bands: int = 1,
) -> tuple[list[torch.Tensor | BaseException], list[Thread]]:
    """What every process has in the end, each with its share of the shards; and their worlds."""
    n, count, mail = len(vectors), len(shares), Mail()
    held = [parts(lo, hi, n) for lo, hi in shares]
    worlds = [Thread(rank, count, mail, lose=lose and rank == 0) for rank in range(count)]
    results: list[Any] = [None] * count

    def work(rank: int) -> None:
        try:
            made = across(worlds[rank], BACKEND, cpu(), vectors[0], len(vectors[0]))
            for lo, hi in cut(len(vectors[0]), max(1, min(bands, len(vectors[0])))):
                mine = {(shard, shard + 1): vectors[shard][lo:hi].clone() for shard in range(*shares[rank])}
                results[rank] = made.sum(mine, held, n, lo, hi)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE)
        assert not thread.is_alive()
    return results, worlds


def check_across(vectors: list[torch.Tensor], shares: list[tuple[int, int]], **broken: Any) -> list[Thread]:
    expected = bits(along_the_tree(vectors))
    results, worlds = summed(vectors, shares, **broken)
    for result in results:
        assert isinstance(result, torch.Tensor), result
        assert bits(result) == expected
    return worlds


@settings(max_examples=150, deadline=None)
@given(
    shards=st.integers(1, 11), hosts=st.lists(st.integers(1, 3), min_size=2, max_size=5), size=st.integers(0, 70),
    chunk=st.sampled_from([1, 3, 1 << 19]), seed=st.integers(0, 99),
    bands=st.integers(1, 3),
)  # fmt: skip
def test_across_adds_along_the_tree(
    shards: int, hosts: list[int], size: int, chunk: int, seed: int, bands: int
) -> None:
    """Any number of processes with any number of devices; also more than there are shards, or numbers to add."""
    cuts = cut(shards, sum(hosts))
    edges = [sum(hosts[:i]) for i in range(len(hosts) + 1)]
    shares = [(cuts[lo][0], cuts[hi - 1][1]) for lo, hi in pairwise(edges)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "CHUNK", chunk)
        worlds = check_across(floats(shards, size, seed), shares, bands=bands)
    assert len({world.swaps for world in worlds}) == 1
    assert not worlds[0].mail.messages  # nothing was sent that nobody wanted


@pytest.mark.parametrize("chunk", [3, 1 << 19])
@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("size", [1, 5, 64, 75])
def test_across_sends_what_a_ring_sends(size: int, count: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """2(k - 1)/k of the vector, up to the rounding of slices; over all processes, exactly that."""
    monkeypatch.setattr(exchange, "CHUNK", chunk)
    sent = [world.sent for world in check_across(floats(8, size), cut(8, count))]
    assert sum(sent) == 2 * (count - 1) * size
    chunks = -(-size // (chunk * count))
    assert all(abs(numbers * count - 2 * (count - 1) * size) <= chunks * count * count for numbers in sent)
    if size % count == 0:
        assert sent == [2 * (count - 1) * size // count] * count


def test_across_sends_a_third_more_where_three_share_eight_shards() -> None:
    """Two processes hold two parts each, one holds one: 5/3 of what a ring's first half sends, and its second half."""
    sent = [world.sent for world in check_across(floats(8, 30), cut(8, 3))]
    assert sent == [2 * 20 + 20, 2 * 20 + 20, 20 + 20]


@pytest.mark.parametrize(
    ("size", "chunk", "bands", "made"),
    [
        (29, 1 << 19, 3, [[29, 4 * 3], [29, 3 * 3], [29, 3 * 4]]),  # bands of 10, 10 and 9 numbers
        (
            30,
            1,
            1,
            [[30, 3, 3, 3, 3], [30, 3, 3, 3, 3], [30, 4, 4, 4, 4]],
        ),  # ten chunks, of which four are on their way
    ],
)
def test_across_keeps_its_memory(
    size: int, chunk: int, bands: int, made: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the sum, and for the parts of others: three, three and four of them."""
    monkeypatch.setattr(exchange, "CHUNK", chunk)
    assert [world.made for world in check_across(floats(8, size), cut(8, 3), bands=bands)] == made


def test_across_begins_chunks_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten chunks, of which four are on their way at once: s for a swap, e for what is expected, w for a wait."""
    did = list[str]()

    class Noted(Thread):
        def swap(self, sends: Any, receives: Any) -> Any:
            did.append("s")
            return [], []

        def expect(self, receives: Any) -> Any:
            did.append("e")

        def wait(self, works: Any) -> None:
            did.append("w")

    monkeypatch.setattr(exchange, "CHUNK", 1)
    vector = torch.arange(10.0)
    across = Across(Noted(0, 1, Mail()), BACKEND, cpu(), vector, 10)
    assert across.sum({(0, 1): vector}, [[(0, 1)]], 1, 0, 10) is vector  # not a copy
    assert "".join(did) == "se" * 4 + "wsse" * 4 + "wssew" * 2 + "wsw" * 4 + "w" * 4 + "w"


def test_across_returns_the_whole_vector_also_for_a_part_of_it() -> None:
    vector = torch.arange(3.0)
    across = Across(Thread(0, 1, Mail()), BACKEND, cpu(), vector, 3)
    for lo, hi in [(1, 2), (0, 1), (2, 3)]:
        assert across.sum({(0, 1): vector[lo:hi]}, [[(0, 1)]], 1, lo, hi) is across.total
    assert across.total.tolist() == [0, 1, 2]


def test_across_adds_where_the_sum_will_be_needed() -> None:
    across = Across(Thread(1, 4, Mail()), BACKEND, cpu(), torch.ones(2), 2)
    own, left, right = torch.ones(2), torch.ones(2), torch.ones(2)
    assert across._add(own, left, own) is own
    assert across._add(own, own, right) is own
    assert across._add(own, left, right) is left
    assert (own.tolist(), left.tolist(), right.tolist()) == ([3, 3], [2, 2], [1, 1])
    assert across._others == [2, 3, 0]  # each process begins with another one


class InOrderOfRanks(Across):
    sum = process_job.in_order_of_ranks


def test_across_notices_broken_twins() -> None:
    vectors = floats(8, 30)
    check_across(vectors, cut(8, 3))
    with pytest.raises(AssertionError):
        check_across(vectors, cut(8, 3), across=InOrderOfRanks)
    with pytest.raises(AssertionError):
        check_across(vectors, cut(8, 3), lose=True)


def test_across_notices_a_part_that_is_missing() -> None:
    """Where a process says that it holds less than it should, the sum is refused."""

    class Forgetful(Across):
        def sum(self, parts: Any, held: Any, n: int, lo: int, hi: int) -> Any:
            kept = {span: parts[span] for span in [(0, 1), (1, 2), (3, 4), (6, 7), (7, 8)] if span in parts}
            return super().sum(kept, [spans[:1] for spans in held], n, lo, hi)

    results, _ = summed(floats(8, 30), cut(8, 3), Forgetful)
    message = "the sum over 8 shards is not complete: it has parts [(0, 2), (3, 4), (6, 8)]"
    assert [str(result) for result in results] == [message] * 3


# Vectors in host memory, which NumPy holds and the framework adds


class Host:
    """A framework with arrays that must not be written to, whose sums have no numbers too small to be normal."""

    def put(self, array: Any, device: Any) -> Any:
        new = np.array(array)
        new.flags.writeable = False
        return new

    copy = put

    def get(self, array: Any) -> Any:
        return array

    def add(self, left: Any, right: Any) -> Any:
        total = left + right
        return self.put(np.where(np.abs(total) < np.finfo(np.float32).tiny, np.float32(0), total), None)


class InHostMemory(Thread):
    def empty(self, size: int, like: Any) -> Any:
        return np.full(size, np.nan, np.float32)


def test_the_framework_adds_into_memory_that_is_numpys() -> None:
    host: Any = Host()
    left, right = np.array([1, 1e-38, 3], np.float32), np.array([2, -9e-39, 4], np.float32)
    arithmetic = Across(InHostMemory(0, 2, Mail()), host, cpu(), left, 3)._arithmetic
    memory = left.copy()
    assert arithmetic.add(memory, right) is memory
    assert memory.tolist() == host.add(left, right).tolist() == [3, 0, 7]
    assert memory.tolist() != (left + right).tolist()  # a twin that adds with NumPy would be seen


def test_what_is_put_on_a_device_is_a_copy_of_memory_that_the_next_step_fills() -> None:
    host: Any = Host()
    across = Across(InHostMemory(0, 2, Mail()), host, cpu(), None, 3)
    across.total[:] = [0, 1, 2]
    placed = across.put(across.total, cpu())
    across.total[:] = 7
    assert placed.tolist() == [0, 1, 2]
