"""Memory that the processes of one host share, so that a vector is copied twice instead of sent through the network.

Every process has a memory file that it alone writes to. A vector for others is copied there, and a token, a small message in
a pipe, says where it lies; whoever gets the token copies the vector out. The token is written after the vector, so it never
comes too early, and when a process ends, its pipes do: who waits for it knows.

When memory may be written again: a block is given out anew only when every process it was meant for has said that it has read
it. Every token also tells what its sender has read, so this costs no message, and depends neither on the order of calls nor on
their sizes, nor on who holds how many parts. In `across` everybody sends to everybody, so nothing stays unsaid for long.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import struct
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from io import FileIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.errors import Invalid, ProcessFailed

CAPACITY = 1 << 36  # bytes of addresses: a page takes memory only when it is first written to
LINE = 64  # bytes: a block begins at a cache line of its own
TOKEN = struct.Struct("<32q")  # number of the swap, where, how many bytes, how many others were read, where those lie
TOLD = 28  # so many of them at most
PIPE = 1 << 16  # bytes of a pipe, the system's default: many more tokens than `across` lets lie there
LOOK = 100  # milliseconds after which one who waits looks whether this process has failed meanwhile
Bytes = NDArray[np.uint8]


@dataclass
class Block:
    """Memory in use: where it ends, and who has not yet said that it has read it."""

    end: int
    readers: list[int]


@dataclass
class Peer:
    """Another process: its memory, and the pipes to it and from it."""

    memory: Bytes
    to: FileIO
    of: FileIO
    read: deque[int] = field(default_factory=deque)  # its blocks that have been read, which it does not know yet
    tokens: dict[int, deque[tuple[int, int]]] = field(default_factory=dict)  # that have come: where, how many bytes


@dataclass(frozen=True)
class Arrival:
    """A vector that a swap receives through shared memory."""

    memory: Memory
    rank: int
    number: int
    into: Bytes

    def result(self, seconds: float) -> None:
        """Wait for it. EOFError: the other process, or this one, has failed. TimeoutError: nothing has come."""
        self.memory.take(self.rank, self.number, self.into, seconds)


class Memory:
    """What this process shares with others. All of them are asked, and `peers` are those with whom it works both ways."""

    def __init__(self, rank: int, size: int, collect: Callable[[bytes], list[bytes]], wanted: bool = True) -> None:
        self.rank, self.closed = rank, False
        self.peers: dict[int, Peer] = {}
        self._own: Bytes = np.empty(0, np.uint8)
        self._blocks: dict[int, Block] = {}  # by where they begin
        self._open = ExitStack()
        others = [q for q in range(size) if q != rank]
        with ExitStack() as passing:  # what the others open for themselves
            offer, pipes = {}, dict[int, FileIO]()
            if wanted:
                with suppress(ImportError, AttributeError, OSError):  # another system than Linux, or it is not allowed
                    offer = self._offer(others, pipes, passing)
            offers = [json.loads(text) for text in collect(json.dumps(offer).encode())]
            for q in others:
                with suppress(OSError):
                    if offer and offers[q]:
                        pid = offers[q]["pid"]
                        with _look(pid, offers[q]["memory"], "r") as file:
                            window = _map(file, mmap.PROT_READ)
                        to = self._open.enter_context(_look(pid, offers[q][str(rank)], "w"))
                        os.set_blocking(to.fileno(), False)
                        self.peers[q] = Peer(window, to, pipes[q])
            seen = [json.loads(text) for text in collect(json.dumps([*self.peers]).encode())]
        self.peers = {q: peer for q, peer in self.peers.items() if rank in seen[q]}

    def _offer(self, others: list[int], pipes: dict[int, FileIO], passing: ExitStack) -> dict[str, Any]:
        """Make a memory file, and a pipe for each of the others to tell us by; and say how they find them."""
        import fcntl  # not on every system

        file = passing.enter_context(FileIO(os.memfd_create(f"samestep-{uuid.uuid4().hex}"), "r+"))
        file.truncate(CAPACITY)
        self._own = _map(file, mmap.PROT_READ | mmap.PROT_WRITE)
        offer: dict[str, Any] = {"pid": os.getpid(), "memory": _named(file)}
        for q in others:
            of, to = map(FileIO, os.pipe(), "rw")
            pipes[q] = self._open.enter_context(of)
            os.set_blocking(of.fileno(), False)  # a thread that reads as another one closes it must not wait there
            offer[str(q)] = _named(passing.enter_context(to))
            if fcntl.fcntl(of, fcntl.F_GETPIPE_SZ) < PIPE:  # this user has too many
                raise BlockingIOError
        return offer

    def check(self, size: int) -> None:
        """Refuse to go on where not all of so many processes share memory."""
        missing = [str(q) for q in range(size) if q != self.rank and q not in self.peers]
        if missing:
            raise Invalid(
                f"rank {self.rank} cannot share memory with rank {', '.join(missing)}: processes that do must be on one host "
                f"with Linux, of one user, and see each other in /proc"
            )

    def close(self) -> None:
        """Nobody must wait for us any longer, nor a thread of ours for them. Memory goes when nobody refers to it."""
        self.closed = True
        self._open.close()

    def hand(self, number: int, vectors: Sequence[tuple[int, Bytes]]) -> None:
        """Copy vectors to where others can read them, once also what is for many, and tell them."""
        placed: dict[tuple[int, int], int] = {}
        for q, vector in vectors:
            peer, which = self.peers[q], (vector.__array_interface__["data"][0], len(vector))
            if which not in placed:
                placed[which] = self._place(vector)
            where = placed[which]
            self._blocks[where].readers.append(q)
            read = [peer.read.popleft() for _ in range(min(TOLD, len(peer.read)))]
            token = TOKEN.pack(number, where, len(vector), len(read), *read, *[0] * (TOLD - len(read)))
            with suppress(BrokenPipeError, ValueError):  # it is gone, or this pipe closed: who waits for it is told
                if peer.to.write(token) is None:  # better than to wait for one that waits for us
                    raise ProcessFailed(f"rank {q} has not read what rank {self.rank} has told it: its pipe is full")

    def take(self, q: int, number: int, into: Bytes, seconds: float) -> None:
        """Wait until process q has handed on a vector under this number, and copy it out."""
        peer, end = self.peers[q], time.monotonic() + seconds
        while not peer.tokens.get(number):
            self._listen(q, peer, end)
        where, size = peer.tokens[number].popleft()
        if not peer.tokens[number]:
            del peer.tokens[number]
        if size != len(into):
            raise ProcessFailed(
                f"rank {q} has sent {size} bytes for swap {number}, and rank {self.rank} expected {len(into)} for swap "
                f"{number}: do all run the same script?"
            )
        into[:] = peer.memory[where : where + size]
        peer.read.append(where)

    def _listen(self, q: int, peer: Peer, end: float) -> None:
        """Wait for a token of process q, and note what it says."""
        poll, content = select.poll(), b""
        with suppress(ValueError):  # another thread has closed the pipe
            poll.register(peer.of, select.POLLIN)
            while not poll.poll(LOOK) and not self.closed:
                if time.monotonic() > end:
                    raise TimeoutError("timed out")
            content = peer.of.read(TOKEN.size)
        if not content:
            raise EOFError(f"rank {self.rank if self.closed else q} has closed its pipes")
        number, where, size, count, *read = TOKEN.unpack(content)
        peer.tokens.setdefault(number, deque()).append((where, size))
        for start in read[:count]:
            block = self._blocks[start]
            block.readers.remove(q)
            if not block.readers:
                del self._blocks[start]

    def _place(self, vector: Bytes) -> int:
        """Copy a vector to the first free place where it fits: what was used before is still in a cache."""
        start = 0
        for other in sorted(self._blocks):
            if start + len(vector) <= other:
                break
            start = self._blocks[other].end
        end = start + max(-(-len(vector) // LINE), 1) * LINE
        if end > len(self._own):
            raise ProcessFailed(f"rank {self.rank} has {start} bytes in shared memory that nobody has read: it is full")
        self._own[start : start + len(vector)] = vector
        self._blocks[start] = Block(end, [])
        return start


def _map(file: FileIO, how: int) -> Bytes:
    content: Any = mmap.mmap(file.fileno(), CAPACITY, prot=how)  # it keeps the file, which can be closed
    return np.frombuffer(content, np.uint8)


def _named(file: FileIO) -> tuple[int, str]:
    """The number of an open file, and the name that the system has for it."""
    return file.fileno(), os.readlink(f"/proc/self/fd/{file.fileno()}")


def _look(pid: int, named: tuple[int, str], mode: str) -> FileIO:
    """Open what another process has open. OSError: it cannot be reached from here.

    In another container the same numbers may be of another process and another file, so the name is looked at before anything
    is opened: that of a memory file holds a number drawn at random.
    """
    path = f"/proc/{pid}/fd/{named[0]}"
    if os.readlink(path) != named[1]:
        raise FileNotFoundError(path)
    return FileIO(path, mode)
