"""Several processes over TCP sockets, with the standard library and NumPy: for frameworks that have no sends and receives.

Vectors go through memory where processes share it (memory.py), else by a connection of their own, straight into the memory
where they are wanted. The rest goes by another, to which a thread always listens: when a process fails, it says why there, and
when it is killed, the connection ends. Nothing is added here: the framework does that (OnHost), as its additions may differ
from NumPy's in numbers too small to be normal.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from samestep.errors import Invalid, ProcessFailed
from samestep.processes.meeting import PATIENCE, Links, Meeting, connect, exactly, gone
from samestep.processes.memory import Arrival, Memory
from samestep.processes.place import TRANSPORT, Place
from samestep.processes.world import Alone, World

if TYPE_CHECKING:
    from samestep.backends import Backend, Vector
    from samestep.devices import Device

HEADER = struct.Struct("<cQQ")  # what it is, its number, and how many bytes follow
SMALL = 1 << 16  # bytes that are cheaper copied than sent apart from their header
DATA, CAUSE, ASK, ANSWER = b"d", b"c", b"?", b"!"
Works = list[tuple[int, Future[Any] | Arrival]]
Get = Callable[[Any], np.ndarray[Any, Any]]
Told = tuple[bytes, int, Works]  # what this process says to all, under which number

_joined: SocketWorld | None = None


def join(get: Get, place: Place, timeout: float, meeting: Meeting | None = None) -> World:
    """The world of this process: joined once, and used by every fit that follows, until one fails.

    `get` is the framework's way to bring an array to host memory.
    """
    global _joined
    if place.size == 1:
        return Alone()
    if _joined is None or _joined.broken:
        _joined = SocketWorld(get, place, timeout, meeting)
    _joined.get, _joined.timeout = get, timeout
    try:
        _joined.prepare()
    except BaseException as error:
        _joined.fail(error)
        raise
    return _joined


@dataclass(frozen=True)
class OnHost:
    """The framework's arithmetic on vectors in host memory, where SocketWorld moves them."""

    backend: Backend
    device: Device

    def add(self, left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        backend, device = self.backend, self.device
        total = backend.get(backend.add(backend.put(left, device), backend.put(right, device)))
        return left if total is left else self.assign(left, total)

    def assign(self, array: np.ndarray[Any, Any], value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        array[...] = value
        return array

    def place(self, vector: np.ndarray[Any, Any], device: Device) -> Vector:
        return self.backend.copy(vector, device)  # JAX would go on using this memory, which the next step fills anew


class Peer:
    """Another process: its connections, and the threads that write to them and read from them."""

    def __init__(self, rank: int, links: Links) -> None:
        self.talk, self.vector = links[rank, "talk"], links[rank, "vector"]
        self.talking, self.sending, self.receiving = (
            ThreadPoolExecutor(1, f"samestep-{what}-{rank}") for what in ("talk", "send", "receive")
        )
        self.left = threading.Event()  # nothing more is expected of it

    def say(self, kind: bytes, number: int, content: bytes = b"") -> Future[None]:
        return self.talking.submit(_send, self.talk, kind, number, content)

    def close(self) -> None:
        """Close the connections when all that is under way on them has ended."""
        with suppress(RuntimeError):  # as this process ends, threads take no more work, and need not
            self.talking.submit(self.talk.close)
            self.sending.submit(self.receiving.submit, self.vector.close)


class SocketWorld:
    """A World between whose processes TCP carries everything; vectors are NumPy's."""

    def __init__(self, get: Get, place: Place, timeout: float, meeting: Meeting | None = None) -> None:
        self.get, self.rank, self.size, self.timeout = get, place.rank, place.size, timeout
        self.cause, self.broken = "", False  # why the run ends, and whether this process has taken note of it
        self._lock = threading.Lock()
        self._numbers = dict.fromkeys(("talk", "vector", "ask"), 0)
        self._inbox: dict[tuple[int, bytes, int], Future[bytes]] = {}
        self._awaited: dict[int, int] = {}  # by thread: whom it waits for
        self._memory = Memory(0, 1, lambda content: [content], wanted=False)  # shared with nobody yet
        links: Links = {}
        try:
            connect(place, timeout, links, meeting)
        except BaseException as error:
            for (_, channel), link in links.items():
                with suppress(OSError):
                    if channel == "talk":
                        _send(link, CAUSE, 0, self._said(error).encode())
                link.close()
            raise
        self._peers = {rank: Peer(rank, links) for rank in range(place.size) if rank != place.rank}
        for rank in self._peers:
            threading.Thread(target=self._listen, args=(rank,), name=f"samestep-listen-{rank}", daemon=True).start()

    def prepare(self) -> None:
        """Choose how vectors travel: through shared memory where that can be, else by TCP."""
        wanted = os.environ.get(TRANSPORT, "")
        if wanted not in ("", "sockets", "shared"):
            raise Invalid(f"{TRANSPORT} must be sockets or shared, got {wanted!r}")
        self._memory.close()
        self._memory = Memory(self.rank, self.size, self.collect, wanted != "sockets")
        if wanted == "shared":
            self._memory.check(self.size)

    # Vectors

    def swap(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> tuple[Works, Works]:
        number, leaving, arriving = self._next("vector"), Works(), Works()
        shared = self._memory.peers
        for rank, memory in receives:
            if rank in shared:
                arriving.append((rank, Arrival(self._memory, rank, number, memory.view(np.uint8))))
            else:
                arriving.append((rank, self._peers[rank].receiving.submit(self._receive, rank, number, memory)))
        self._memory.hand(number, [(rank, vector.view(np.uint8)) for rank, vector in sends if rank in shared])
        for rank, vector in sends:
            if rank not in shared:
                peer = self._peers[rank]
                leaving.append((rank, peer.sending.submit(_send, peer.vector, DATA, number, vector.view(np.uint8))))
        return leaving, arriving

    def expect(self, receives: Sequence[tuple[int, Any]]) -> Sequence[tuple[int, Any]]:
        return receives  # a socket is read in order, so not before its turn

    def _receive(self, rank: int, number: int, memory: np.ndarray[Any, Any]) -> None:
        link = self._peers[rank].vector
        _, got, length = HEADER.unpack(exactly(link, bytearray(HEADER.size)))
        if (got, length) != (number, memory.nbytes):
            raise ProcessFailed(
                f"rank {rank} has sent {length} bytes for swap {got}, and rank {self.rank} expected {memory.nbytes} for swap "
                f"{number}: do all run the same script?"
            )
        exactly(link, memory.view(np.uint8))

    def wait(self, works: Works) -> None:
        for rank, work in works:
            self._await(rank, work)

    def empty(self, size: int, like: Any) -> np.ndarray[Any, Any]:
        return np.empty(size, str(like.dtype).rpartition(".")[2].rstrip("'>"))  # MXNet's types are classes of NumPy

    def bring(self, vector: Any) -> np.ndarray[Any, Any]:
        return np.require(self.get(vector), requirements=["C", "W"])  # JAX's must not be written to

    # Everything else

    def collect(self, content: bytes) -> list[bytes]:
        return self._gather(self._tell(content))

    def broadcast(self, content: bytes | None) -> bytes:
        return self.collect(content or b"" if self.rank == 0 else b"")[0]

    def vote(self, stop: bool) -> Told:
        return self._tell(bytes([stop]))

    def agreed(self, vote: Told) -> bool:
        return bytes([True]) in self._gather(vote)

    def _tell(self, content: bytes) -> Told:
        number = self._next("talk")
        return content, number, [(rank, peer.say(DATA, number, content)) for rank, peer in self._peers.items()]

    def _gather(self, told: Told) -> list[bytes]:
        content, number, works = told
        self.wait(works)
        return [content if rank == self.rank else self._take(rank, DATA, number) for rank in range(self.size)]

    def _take(self, rank: int, kind: bytes, number: int, seconds: float | None = None) -> bytes:
        """What a process has said, or will say, under a number."""
        said = self._expected(rank, kind, number)
        try:
            return said.result(seconds) if seconds else self._await(rank, said)
        finally:
            with self._lock:
                self._inbox.pop((rank, kind, number), None)

    def _expected(self, rank: int, kind: bytes, number: int) -> Future[bytes]:
        with self._lock:
            said = self._inbox.setdefault((rank, kind, number), Future())
            if self._peers[rank].left.is_set() and not said.done():
                said.set_exception(EOFError())
            return said

    def _next(self, channel: str) -> int:
        with self._lock:
            self._numbers[channel] += 1
            return self._numbers[channel]

    def _listen(self, rank: int) -> None:
        peer = self._peers[rank]
        try:
            while True:
                kind, number, length = HEADER.unpack(exactly(peer.talk, bytearray(HEADER.size)))
                content = bytes(exactly(peer.talk, bytearray(length)))
                if kind == CAUSE:
                    self._lose(rank, content.decode())
                elif kind == ASK:
                    peer.say(ANSWER, number, str([*self._awaited.values(), self.rank][0]).encode())
                else:
                    said = self._expected(rank, kind, number)
                    with self._lock:
                        if not said.done():
                            said.set_result(content)
        except (OSError, EOFError, RuntimeError):  # the last as this process itself ends
            self._lose(rank)
            peer.close()

    # Failures

    def fail(self, error: BaseException) -> None:
        self.broken = True
        self._memory.close()
        for rank, peer in self._peers.items():
            self._lose(rank, self._said(error))
            with suppress(OSError):
                peer.vector.shutdown(socket.SHUT_RDWR)  # a thread of ours may wait there, and one of theirs
        wait_for([peer.say(CAUSE, 0, self.cause.encode()) for peer in self._peers.values()], PATIENCE)
        for peer in self._peers.values():
            with suppress(OSError):
                peer.talk.shutdown(socket.SHUT_WR)  # after what was said

    def _said(self, error: BaseException) -> str:
        if isinstance(error, ProcessFailed):
            return str(error)
        lines = str(error).strip().splitlines()
        return f"rank {self.rank} failed: {type(error).__name__}{f': {lines[0]}' if lines else ''}"

    def _lose(self, rank: int, cause: str = "") -> None:
        """Expect nothing more of a process. Others may still say what was asked of them, and will end in their turn."""
        with self._lock:
            self.cause = self.cause or cause  # the first one counts
            self._peers[rank].left.set()
            for (who, *_), said in self._inbox.items():
                if who == rank and not said.done():
                    said.set_exception(EOFError())

    def _await(self, rank: int, work: Future[Any] | Arrival) -> Any:
        """What a work gives, which another process has a part in."""
        thread = threading.get_ident()
        self._awaited[thread] = rank  # and if nothing comes, it stays known: others who waited for us will ask
        try:
            result = work.result(self.timeout)
        except TimeoutError:
            raise ProcessFailed(self._late(rank)) from None
        except (OSError, EOFError) as error:
            if not self.cause:  # whoever fails says why, by the other connection, before it closes this one
                self._peers[rank].left.wait(PATIENCE)
            raise ProcessFailed(self.cause or gone(rank)) from error
        del self._awaited[thread]
        return result

    def _late(self, rank: int) -> str:
        """Why the run ends when a process has not answered: it may itself wait for one that waits for one that hangs."""
        first, asked = rank, {self.rank}
        while rank not in asked:
            asked.add(rank)
            number = self._next("ask")
            self._peers[rank].say(ASK, number)
            try:
                whom = int(self._take(rank, ANSWER, number, PATIENCE))
            except (OSError, EOFError):  # TimeoutError, too: not even this does it answer
                break
            if whom == rank:  # it waits for nobody
                break
            rank = whom
        else:
            rank = first
        return self.cause or (
            f"rank {rank} has not answered for {self.timeout:g} s: it hangs, or its host cannot be reached"
        )


def _send(link: socket.socket, kind: bytes, number: int, content: Any) -> None:
    header, view = HEADER.pack(kind, number, len(content)), memoryview(content)
    if len(view) < SMALL:
        link.sendall(header + view)
    else:
        link.sendall(header)
        link.sendall(view)
