"""What an engine must do: move numbers between the processes of a run. It adds nothing; samestep does that.

An engine sends memory to a process, receives memory from one, and waits. What follows from these (everybody's bytes to
everybody, a vote, the words for a process that is lost) is the same for all engines, and stands here.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np

from samestep.backends.times import timed_as
from samestep.errors import ProcessFailed

TRANSPORT = "SAMESTEP_TRANSPORT"  # how PyTorch's vectors travel, to overrule the choice: gloo or nccl
VECTORS, BYTES = "vectors", "bytes"  # the exchange thread moves vectors; the main thread moves everything else
TAGS = 1 << 28  # numbers of swaps, before they start anew
Works = list[tuple[int, Any]]  # a rank, and what is on its way to it or from it
Bytes = np.ndarray[Any, Any]


class World(abc.ABC):
    """The processes of a run, and how numbers get from one to another."""

    def __init__(self, rank: int = 0, size: int = 1, timeout: float = 0.0) -> None:
        self.rank, self.size = rank, size
        self.timeout = timeout  # seconds after which a process that does not answer is given up
        self._swaps = {VECTORS: 0, BYTES: 0}

    @property
    def others(self) -> list[int]:
        """The ranks of the other processes."""
        return [rank for rank in range(self.size) if rank != self.rank]

    # What an engine provides

    @abc.abstractmethod
    def send(self, kind: str, rank: int, memory: Any, tag: int) -> Any:
        """Begin to send memory to a process, under a number."""

    @abc.abstractmethod
    def receive(self, kind: str, rank: int, memory: Any, tag: int) -> Any:
        """Begin to receive what a process sends under that number."""

    @abc.abstractmethod
    def wait(self, works: Works) -> None:
        """Wait for what has begun; ProcessFailed names the process that does not answer."""

    @abc.abstractmethod
    def empty(self, size: int, like: Any) -> Any:
        """Memory for so many numbers, where `swap` can reach it."""

    @abc.abstractmethod
    def bring(self, vector: Any) -> Any:
        """A vector, brought to where `swap` can reach it."""

    @abc.abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tell the others why this process ends."""

    # Vectors

    def expect(self, receives: Sequence[tuple[int, Any]], kind: str = VECTORS) -> Any:
        """Begin to receive for a later swap, which is given what this returns: its number, and what will arrive."""
        # Every swap has a number of its own, the same in all processes: receives begin in another order than sends.
        tag = self._swaps[kind] % TAGS * 2 + (kind == BYTES)
        self._swaps[kind] += 1
        return tag, [(rank, self.receive(kind, rank, memory, tag)) for rank, memory in receives]

    def swap(self, sends: Sequence[tuple[int, Any]], receives: Any) -> tuple[Works, Works]:
        """Begin to send vectors, and to receive others into memory: what leaves and what arrives, to be waited for."""
        return self._swap(VECTORS, sends, receives)

    def _swap(self, kind: str, sends: Sequence[tuple[int, Any]], receives: Any) -> tuple[Works, Works]:
        tag, arriving = receives if isinstance(receives, tuple) else self.expect(receives, kind)
        return [(rank, self.send(kind, rank, memory, tag)) for rank, memory in sends], arriving

    # Everything else

    def collect(self, content: bytes) -> list[bytes]:
        """What each process has, on every process. This waits."""
        length, lengths = np.array([len(content)]), {rank: np.zeros(1, np.int64) for rank in self.others}
        self.wait(self._tell(length, lengths))
        mine = np.frombuffer(bytearray(content), np.uint8)
        memory = {rank: np.empty(int(size[0]), np.uint8) for rank, size in lengths.items()}
        self.wait(self._tell(mine, memory))
        return [content if rank == self.rank else memory[rank].tobytes() for rank in range(self.size)]

    def _tell(self, mine: Bytes, theirs: dict[int, Bytes]) -> Works:
        """Begin to send an array to all others, and to receive theirs; empty ones do not travel."""
        sends = [(rank, mine) for rank in theirs if len(mine)]
        leaving, arriving = self._swap(BYTES, sends, [(rank, array) for rank, array in theirs.items() if len(array)])
        return leaving + arriving

    def broadcast(self, content: bytes | None) -> bytes:
        """What process 0 has, on every process. This waits."""
        return self.collect(content or b"" if self.rank == 0 else b"")[0]

    def vote(self, stop: int) -> tuple[list[Bytes], Works]:
        """Begin to ask whether anybody was told to stop, by which signal; `agreed` waits for the answer, the same for all."""
        mine, theirs = np.array([stop], np.uint8), {rank: np.zeros(1, np.uint8) for rank in self.others}
        return [mine, *theirs.values()], self._tell(mine, theirs)

    @timed_as("exchange")
    def agreed(self, vote: tuple[list[Bytes], Works]) -> int:
        """The signal by which anybody was told to stop; 0: nobody was. SIGTERM is above SIGINT. This waits."""
        votes, works = vote
        self.wait(works)
        return max(int(one[0]) for one in votes)

    # Failures

    def reason(self, error: BaseException) -> str:
        """Why this process ends, in one line for the others: an error of its own, or what it heard from another."""
        if isinstance(error, ProcessFailed):
            return str(error)
        said = f": {first_line(error)}" if str(error).strip() else ""
        return f"rank {self.rank} failed: {type(error).__name__}{said}"

    def lost(self, rank: int, late: bool) -> str:
        """That a process is gone, or late; -1: it is not known which one."""
        who = "a process" if rank < 0 else f"rank {rank}"
        if late:
            return f"{who} has not answered for {self.timeout:g} s: it hangs, or its host cannot be reached"
        return gone(who)


def gone(who: str) -> str:
    return f"{who} is gone: it was killed, or its host was lost"


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


class Alone(World):
    """A world of one process, where nothing has to be moved."""

    def send(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("there is nobody else")

    receive = empty = bring = send

    def wait(self, *args: Any, **kwargs: Any) -> None:
        """There is nothing to wait for."""

    fail = wait
