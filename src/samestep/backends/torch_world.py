"""Several processes with torch.distributed: gloo through host memory, or NCCL from GPU to GPU.

Only sends and receives are used, so that it is known which process owes an answer, and so that nothing is ever added by
the library.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from samestep.devices import Device
from samestep.errors import Invalid, ProcessFailed
from samestep.processes import Alone, Place, World

CAUSE = "samestep/cause"  # in the store: why the run ends
TRANSPORT = "SAMESTEP_TRANSPORT"  # gloo or nccl, to overrule the choice
Works = list[tuple[int, Any]]

c10d: Any = dist  # stores are there, but not exported by name

_joined: TorchWorld | None = None


def join(place: Place, timeout: float, devices: Sequence[Device]) -> World:
    """The world of this process: joined once, and used by every fit that follows."""
    global _joined
    if place.size == 1 and not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return Alone()
    if _joined is None or _joined.broken:
        _joined = TorchWorld(place, timeout)
    _joined.prepare(devices, timeout)
    return _joined


class TorchWorld:
    def __init__(self, place: Place, timeout: float) -> None:
        self.timeout, self.broken = timeout, False
        self._tags = {"host": 0, "vector": 0}
        limit = timedelta(seconds=timeout)
        if dist.is_initialized():  # by the user's script
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self._store = c10d.PrefixStore("samestep", c10d.distributed_c10d._get_default_store())
            self._host = dist.new_group(backend="gloo", timeout=limit)
        else:
            self.rank, self.size = place.rank, place.size
            self._store = self._meet(place, limit)
            dist.init_process_group("gloo", store=self._store, rank=self.rank, world_size=self.size, timeout=limit)
            self._host = dist.group.WORLD
        self._vector, self._through = self._host, torch.device("cpu")

    def _meet(self, place: Place, limit: timedelta) -> Any:
        """The store that all processes reach, once all have come."""
        try:
            if place.meet.startswith("file://"):
                store: Any = c10d.FileStore(place.meet.removeprefix("file://"), place.size)
            elif place.meet == "env://":
                store = next(iter(c10d.rendezvous("env://", timeout=limit)))[0]
            else:
                host, _, port = place.meet.removeprefix("tcp://").rpartition(":")
                store = c10d.TCPStore(host, int(port), place.size, place.rank == 0, limit, wait_for_workers=False)
        except (RuntimeError, ValueError, OSError) as error:
            raise ProcessFailed(f"rank {place.rank} cannot reach the others: {_first_line(error)}") from error
        store.set(f"samestep/here/{place.rank}", b"1")
        missing = list(range(place.size))
        for rank in range(place.size):
            with suppress(RuntimeError):
                store.wait(
                    [f"samestep/here/{rank}"], limit if len(missing) == place.size - rank else timedelta(milliseconds=1)
                )
                missing.remove(rank)
        if missing:
            names = ", ".join(map(str, missing))
            raise ProcessFailed(f"rank {names} has not come within {limit.total_seconds():g} s: was it started?")
        return store

    def prepare(self, devices: Sequence[Device], timeout: float) -> None:
        """Choose how vectors travel: from GPU to GPU where every process has GPUs of its own, else through the host."""
        self.timeout = timeout
        wanted = os.environ.get(TRANSPORT, "")
        if wanted not in ("", "gloo", "nccl"):
            raise Invalid(f"{TRANSPORT} must be gloo or nccl, got {wanted!r}")
        mine = os.uname().nodename + "".join(f" {_serial(d)}" for d in dict.fromkeys(devices) if d.kind == "cuda")
        hosts = [text.decode().split() for text in self.collect(mine.encode())]
        serials = [serial for _, *found in hosts for serial in found]
        own = all(len(found) > 1 for found in hosts) and len(serials) == len(set(serials))
        if wanted == "nccl" or (own and not wanted and dist.is_nccl_available()):
            self._through = torch.device(str(devices[0]))
            torch.cuda.set_device(self._through)
            self._vector = dist.new_group(backend="nccl", timeout=timedelta(seconds=timeout))
        else:
            self._vector, self._through = self._host, torch.device("cpu")

    # Vectors

    def swap(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> Works:
        with self._named(None):
            if self._through.type == "cuda":
                ops = [dist.P2POp(dist.isend, v, group=self._vector, group_peer=q) for q, v in sends]
                ops += [dist.P2POp(dist.irecv, v, group=self._vector, group_peer=q) for q, v in receives]
                return [(-1, work) for work in (dist.batch_isend_irecv(ops) if ops else [])]
            return self._host_swap("vector", sends, receives)

    def _host_swap(self, kind: str, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> Works:
        # A tag of its own for every swap: two threads swap, one vectors and one the rest, each in the same order everywhere.
        tag = self._tags[kind] * 2 + (kind == "host")
        self._tags[kind] += 1
        works: Works = []
        for rank, vector in sends:
            with self._named(rank):
                works.append((rank, self._host.send([vector], rank, tag)))
        for rank, memory in receives:
            with self._named(rank):
                works.append((rank, self._host.recv([memory], rank, tag)))
        return works

    def wait(self, works: Works) -> None:
        for rank, work in works:
            with self._named(rank):
                work.wait(timedelta(seconds=self.timeout)) if rank >= 0 else work.wait()

    def empty(self, size: int, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(size, dtype=like.dtype, device=self._through)

    def bring(self, vector: torch.Tensor) -> torch.Tensor:
        return vector.to(self._through)

    # Everything else

    def collect(self, content: bytes) -> list[bytes]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        length = torch.tensor([len(content)])
        lengths = {rank: torch.zeros(1, dtype=torch.int64) for rank in others}
        self.wait(self._host_swap("host", [(rank, length) for rank in others], list(lengths.items())))
        memory = {rank: np.empty(int(size), np.uint8) for rank, size in lengths.items()}
        mine = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
        self.wait(
            self._host_swap(
                "host",
                [(rank, mine) for rank in others if len(content)],
                [(rank, torch.from_numpy(array)) for rank, array in memory.items() if len(array)],
            )
        )
        return [content if rank == self.rank else memory[rank].tobytes() for rank in range(self.size)]

    def broadcast(self, content: bytes | None) -> bytes:
        return self.collect(content or b"" if self.rank == 0 else b"")[0]

    def vote(self, stop: bool) -> tuple[bool, list[torch.Tensor], Works]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        mine, answers = torch.tensor([stop], dtype=torch.uint8), [torch.zeros(1, dtype=torch.uint8) for _ in others]
        works = self._host_swap("host", [(rank, mine) for rank in others], list(zip(others, answers, strict=True)))
        return stop, answers, works

    def agreed(self, vote: tuple[bool, list[torch.Tensor], Works]) -> bool:
        stop, answers, works = vote
        self.wait(works)
        return stop or any(bool(answer) for answer in answers)

    # Failures

    def fail(self, error: BaseException) -> None:
        text = str(error) if isinstance(error, ProcessFailed) else f"rank {self.rank} failed: {_named(error)}"
        with suppress(RuntimeError):  # the store may be gone, with the process that held it
            if not self._store.check([CAUSE]):
                self._store.set(CAUSE, text)
        self.broken = True
        with suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.destroy_process_group()  # closes the connections: nobody waits for us any longer

    @contextmanager
    def _named(self, rank: int | None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, ProcessFailed):
                raise
            raise ProcessFailed(self._cause(rank, error)) from error

    def _cause(self, rank: int | None, error: Exception) -> str:
        late = "imed out" in str(error) or "imeout" in str(error)
        with suppress(RuntimeError):
            # Whoever fails says why before it closes its connections, so the cause is there unless it was killed.
            if self._store.check([CAUSE]):
                return str(self._store.get(CAUSE), "utf-8")
        who = "a process" if rank is None or rank < 0 else f"rank {rank}"
        if late:
            return f"{who} has not answered for {self.timeout:g} s: it hangs, or its host cannot be reached"
        return f"{who} is gone: it was killed, or its host was lost"


def _serial(device: Device) -> str:
    return str(torch.cuda.get_device_properties(device.index).uuid)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {_first_line(error)}" if str(error) else type(error).__name__


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
