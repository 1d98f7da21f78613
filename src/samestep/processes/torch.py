"""Several processes with torch.distributed: gloo through host memory, or NCCL from GPU to GPU.

Only sends and receives are used: so it is known which process owes an answer, and the library never adds anything.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from samestep.devices import Device
from samestep.errors import Invalid, ProcessFailed
from samestep.processes import mpi
from samestep.processes.place import PORTS, Place, number
from samestep.processes.world import TRANSPORT, VECTORS, Works, World, first_line

CAUSE = "cause"  # in the store: why the run ends
PATIENCE = 3.0  # seconds within which the store answers, if it can be reached at all
ALIVE = 1.0  # seconds within which a process that has closed its connections says why, if it can
FAREWELL = 5.0  # seconds that a failing process which holds the store stays at most, so that the others can read why
NOBODY = -1
NEVER = 2**31 - 1  # a tag under which nothing is ever sent

c10d: Any = dist  # stores are there, but not exported by name

_joined: TorchWorld | None = None
_stores: dict[str, tuple[Any, int]] = {}  # by where they are met: a process comes there once


def join(place: Place, timeout: float, devices: Sequence[Device], get: mpi.Get) -> World:
    """The world of this process: joined once, and used by every fit that follows.

    One that mpiexec has started is MPI's, unless there is a place to meet or the script has a process group of its own.
    """
    global _joined
    own_group = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not own_group and (place.size == 1 or not place.meet):
        return mpi.join(get, place, timeout)
    if _joined is None or _joined.broken:
        _joined = TorchWorld(place, timeout)
    try:
        _joined.prepare(devices, timeout)
    except BaseException as error:
        _joined.fail(error)
        raise
    return _joined


class TorchWorld(World):
    """A World whose processes torch.distributed connects; its vectors are PyTorch's."""

    def __init__(self, place: Place, timeout: float) -> None:
        self._made = not dist.is_initialized()  # else by the user's script, whose group it stays
        rank, size = (place.rank, place.size) if self._made else (dist.get_rank(), dist.get_world_size())
        super().__init__(rank, size, timeout)
        self.broken, limit = False, timedelta(seconds=timeout)
        if self._made:
            if place.meet not in _stores:
                _stores[place.meet] = _meet(place, limit)
            store, self._holder = _stores[place.meet]
        else:
            store, self._holder = c10d.distributed_c10d._get_default_store(), 0 if self.rank == 0 else NOBODY
        self._store, missing = _gather(store, self.rank, self.size, timeout)
        if missing:
            who = f"ranks {', '.join(map(str, missing))} have" if missing[1:] else f"rank {missing[0]} has"
            raise ProcessFailed(f"{who} not come within {timeout:g} s: were all started?")
        with self._named(NOBODY):
            if self._made:
                dist.init_process_group("gloo", store=self._store, rank=self.rank, world_size=self.size, timeout=limit)
            self._host: Any = dist.group.WORLD if self._made else dist.new_group(backend="gloo", timeout=limit)

    def prepare(self, devices: Sequence[Device], timeout: float) -> None:
        """Choose how vectors travel: from GPU to GPU where every process has GPUs of its own, else through the host."""
        self.timeout = timeout
        wanted = os.environ.get(TRANSPORT, "")
        if wanted not in ("", "gloo", "nccl"):
            raise Invalid(f"{TRANSPORT} must be gloo or nccl, got {wanted!r}")
        indices = [device.index for device in dict.fromkeys(devices) if device.kind == "cuda"]
        mine = " ".join(str(torch.cuda.get_device_properties(index).uuid) for index in indices)
        gpus = [text.decode().split() for text in self.collect(mine.encode())]
        serials = [serial for found in gpus for serial in found]
        own = all(gpus) and len(serials) == len(set(serials))
        direct = wanted == "nccl" or (own and not wanted and dist.is_nccl_available())
        self._through = torch.device(str(devices[0]) if direct else "cpu")
        if direct:
            torch.cuda.set_device(self._through)
            self._gpus = dist.new_group(backend="nccl", timeout=timedelta(seconds=timeout))

    # Vectors

    def swap(self, sends: Sequence[tuple[int, Any]], receives: Any) -> tuple[Works, Works]:
        if self._through.type == "cuda":
            with self._named(NOBODY):
                ops = [dist.P2POp(dist.isend, v, group=self._gpus, group_peer=q) for q, v in sends]
                ops += [dist.P2POp(dist.irecv, v, group=self._gpus, group_peer=q) for q, v in receives]
                return [], [(NOBODY, work) for work in (dist.batch_isend_irecv(ops) if ops else [])]
        return super().swap(sends, receives)

    def expect(self, receives: Sequence[tuple[int, Any]], kind: str = VECTORS) -> Any:
        # Gloo sends nothing before the other side has said that it is ready. NCCL must have both at once.
        return receives if kind == VECTORS and self._through.type == "cuda" else super().expect(receives, kind)

    def send(self, kind: str, rank: int, memory: Any, tag: int) -> Any:
        with self._named(rank):
            return self._host.send([torch.as_tensor(memory)], rank, tag)

    def receive(self, kind: str, rank: int, memory: Any, tag: int) -> Any:
        with self._named(rank):
            return self._host.recv([torch.as_tensor(memory)], rank, tag)

    def wait(self, works: Works) -> None:
        for rank, work in works:
            with self._named(rank):
                work.wait(timedelta(seconds=self.timeout)) if rank >= 0 else work.wait()

    def empty(self, size: int, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(size, dtype=like.dtype, device=self._through)

    def bring(self, vector: torch.Tensor) -> torch.Tensor:
        return vector.to(self._through)

    # Failures

    def fail(self, error: BaseException) -> None:
        reason = self.reason(error)
        self._ask(lambda store: store.compare_set(CAUSE, "", reason))
        self.broken = True
        # Close the connections: nobody must wait for us any longer, nor a thread of ours for them. Gloo does that when a wait
        # takes too long; to destroy the group closes nothing for as long as anything refers to it.
        for rank in self.others:  # from one that is closed already, nothing can be waited for
            with suppress(RuntimeError):
                self._host.recv([torch.zeros(1)], rank, NEVER).wait(timedelta(milliseconds=1))
        if self._holder == self.rank:
            self._ask(lambda store: _without(store, "told", self.others, FAREWELL), FAREWELL)
        else:
            self._ask(lambda store: store.set(f"told/{self.rank}", ""))
        with suppress(RuntimeError, ValueError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.destroy_process_group(None if self._made else self._host)

    def _ask(self, question: Callable[[Any], Any], seconds: float = PATIENCE) -> Any:
        """What the store says to a question, if anything: where its host cannot be reached, the question has no end."""
        store, answers = self._store, list[Any]()
        if store is None:
            return None

        def ask() -> None:
            with suppress(RuntimeError):  # it is gone, with the process that held it
                answers.append(question(store))

        thread = threading.Thread(target=ask, name="samestep-ask", daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            self._store = None  # once is enough
        return answers[0] if answers else None

    @contextmanager
    def _named(self, rank: int) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError, EOFError) as error:
            if isinstance(error, ProcessFailed):
                raise
            raise ProcessFailed(self._cause(rank, error)) from None

    def _cause(self, rank: int, error: Exception) -> str:
        late = "imed out" in str(error) or "imeout" in str(error)
        patience = PATIENCE + self.timeout / 10  # they have not all begun to wait at one moment
        cause = self._ask(partial(self._trace, rank, late, patience), patience + 1)
        if cause is None and self._holder not in (self.rank, NOBODY):
            return self.lost(self._holder, late=self._store is None)  # the one waited for may only have noticed earlier
        return cause or self.lost(rank, late)

    def _trace(self, rank: int, late: bool, patience: float, store: Any) -> str:
        """Why the run ends: what a failing process has said, or who is lost at the end of the chain of those who wait.

        Whoever fails says why before it closes its connections. One that has waited in vain closes them as well, but is
        alive: it leaves a note of whom it has waited for.
        """
        if not store.check([CAUSE]):
            store.set(f"lost/{self.rank}", json.dumps([rank, late]))
            asked, began = {self.rank}, time.monotonic()
            if rank < 0:  # not told by the library
                silent = _without(store, "lost", self.others, ALIVE)
                rank = silent[0] if len(silent) == 1 else NOBODY
            culprit = rank, late
            while rank >= 0 and rank not in asked:
                asked.add(rank)
                if _without(store, "lost", [rank], began + (patience if late else ALIVE) - time.monotonic()):
                    culprit = rank, late
                    break
                rank, late = json.loads(store.get(f"lost/{rank}"))
            store.compare_set(CAUSE, "", self.lost(*culprit))
        return str(store.get(CAUSE), "utf-8")


def _meet(place: Place, limit: timedelta) -> tuple[Any, int]:
    """The store that all processes reach, and which of them holds it."""
    if place.meet.startswith("file://"):
        return c10d.FileStore(place.meet.removeprefix("file://"), place.size), NOBODY
    if place.meet == "env://":
        host, port = os.environ.get("MASTER_ADDR", ""), number(os.environ, "MASTER_PORT", within=PORTS)
        if not host:
            raise Invalid("the environment variable MASTER_ADDR must name the host of rank 0, and is not set")
    else:
        host, port = place.meet.removeprefix("tcp://").rpartition(":")[0], int(place.meet.rpartition(":")[2])
    torchruns = place.meet == "env://" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    holder = NOBODY if torchruns else 0  # torchrun holds it itself
    holds = place.rank == holder
    try:
        store = c10d.TCPStore(host, port, place.size, holds, limit, wait_for_workers=False, multi_tenant=True)
    except (RuntimeError, ValueError, OSError) as error:
        reach = f"reach {host}:{port} within {limit.total_seconds():g} s: was rank 0 started?"
        cannot = f"listen at {host}:{port}: {first_line(error)}" if holds else reach
        raise ProcessFailed(f"rank {place.rank} cannot {cannot}") from None
    return store, holder


def _gather(store: Any, rank: int, size: int, seconds: float) -> tuple[Any, list[int]]:
    """Wait for all processes: a part of the store that nobody has used before, and the ranks that have not come.

    torchrun keeps its store when it starts its processes again, and all that survive a failure come to the same one, so
    what lies there may be of processes that are no more. Therefore everybody draws a number, rank 0 says which numbers it
    has seen, and whoever finds its own among them knows that this was said now.
    """
    mine, said, end = uuid.uuid4().hex, "", time.monotonic() + seconds
    numbers, here = [f"samestep/number/{r}" for r in range(size)], [f"here/{r}" for r in range(size)]
    part: Any = None
    missing, look = [0], 0.0  # as of the last look: whoever holds the store may be the first to give up
    try:
        store.set(numbers[rank], mine)
        while not (part and part.check(here)):
            if rank == 0:
                seen = json.dumps([mine, [store.get(key).decode() for key in numbers if store.check([key])]])
                if seen != said:
                    store.set("samestep/seen", seen)
                    said = seen
            if not part and store.check(["samestep/seen"]):
                first, drawn = json.loads(store.get("samestep/seen"))
                if mine in drawn:
                    part = c10d.PrefixStore(f"samestep/{first}", store)
                    part.set(here[rank], "")
            now = time.monotonic()
            if part and now > min(look, end):
                missing, look = [r for r, key in enumerate(here) if not part.check([key])], now + 0.5
            if now > end and not part:
                missing = [r for r, key in enumerate(numbers) if r == 0 or not store.check([key])]
            if now > end and missing:
                return store, missing
            time.sleep(0.01)
    except RuntimeError:  # the store is gone
        return store, missing or [0]
    return part, []


def _without(store: Any, name: str, ranks: Sequence[int], seconds: float) -> list[int]:
    """Which of these ranks leave no note of this name in the store within so many seconds."""
    end, missing = time.monotonic() + seconds, []
    for rank in ranks:
        try:
            store.wait([f"{name}/{rank}"], timedelta(seconds=max(end - time.monotonic(), 0.001)))
        except RuntimeError:
            missing.append(rank)
    return missing
