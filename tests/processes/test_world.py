"""world: what all engines do alike."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from samestep.devices import cpu, gpu
from samestep.errors import Invalid, ProcessFailed
from samestep.processes import torch as engine
from samestep.processes.place import Place
from samestep.processes.world import BYTES, VECTORS, Alone, World, first_line


def test_alone_there_is_nobody_to_talk_to() -> None:
    alone = Alone()
    assert (alone.rank, alone.size, alone.timeout, alone.others) == (0, 1, 0.0, [])
    assert alone.collect(b"x") == [b"x"]
    assert (alone.broadcast(b"x"), alone.broadcast(None)) == (b"x", b"")
    assert alone.agreed(alone.vote(True))
    assert not alone.agreed(alone.vote(False))
    alone.wait(alone.swap([], []))
    with pytest.raises(AssertionError, match="^there is nobody else$"):
        alone.swap([(1, b"")], [])


def test_why_a_process_ends_is_one_line() -> None:
    alone = Alone()
    assert alone.reason(ValueError("boom\nand more of it")) == "rank 0 failed: ValueError: boom"
    assert alone.reason(KeyboardInterrupt()) == "rank 0 failed: KeyboardInterrupt"
    assert (
        alone.reason(ProcessFailed("rank 2 failed: OSError")) == "rank 2 failed: OSError"
    )  # the first cause is handed on
    assert alone.lost(-1, late=False) == "a process is gone: it was killed, or its host was lost"
    assert alone.lost(0, late=False) == "rank 0 is gone: it was killed, or its host was lost"
    assert alone.lost(0, late=True) == "rank 0 has not answered for 0 s: it hangs, or its host cannot be reached"
    assert [first_line(OSError(text)) for text in ("", " \n", " a\nb")] == ["OSError", "OSError", "a"]


@pytest.mark.parametrize(
    ("wanted", "serials", "nccl", "through"),
    [
        ("", [b"a b", b"c"], True, "cuda:1"),
        ("", [b"a b", b"c"], False, "cpu"),
        ("", [b"a b", b"b"], True, "cpu"),  # two processes share a GPU
        ("", [b"a b", b""], True, "cpu"),  # one has none
        ("gloo", [b"a b", b"c"], True, "cpu"),
        ("nccl", [b"a b", b"b"], True, "cuda:1"),
    ],
)
def test_how_vectors_travel(
    wanted: str, serials: list[bytes], nccl: bool, through: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From GPU to GPU if every process has its own; else through the host."""
    world, made, told = object.__new__(engine.TorchWorld), list[str](), list[bytes]()
    monkeypatch.setenv(engine.TRANSPORT, wanted)
    monkeypatch.setattr(world, "collect", lambda text: told.append(text) or serials, raising=False)
    monkeypatch.setattr(engine.torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=index))
    monkeypatch.setattr(engine.torch.cuda, "set_device", lambda device: made.append(str(device)))
    monkeypatch.setattr(engine.dist, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(engine.dist, "new_group", lambda backend, timeout: made.append(backend))
    world.prepare([gpu(1), gpu(0), gpu(0)], 5.0)
    assert str(world._through) == through
    assert made == ([] if through == "cpu" else [through, "nccl"])
    serials[0] = b""
    if not wanted:
        world.prepare([cpu(), cpu()], 6.0)
        assert (str(world._through), world.timeout) == ("cpu", 6.0)
        assert told == [b"1 0", b""]


@pytest.mark.parametrize(
    ("rank", "size", "came", "missing"), [(1, 3, [], [0, 2]), (1, 3, [2], [0]), (0, 3, [1], [1, 2]), (0, 2, [], [1])]
)
def test_who_has_not_come(rank: int, size: int, came: list[int], missing: list[int]) -> None:
    """Alone at the meeting place, or with some who have drawn a number and then wait for the others."""
    store = engine.c10d.HashStore()
    for other in came:
        store.set(f"samestep/number/{other}", f"of {other}")
    assert engine._gather(store, rank, size, 0.05)[1] == missing


def test_everybody_has_come() -> None:
    part, missing = engine._gather(engine.c10d.HashStore(), 0, 1, 5.0)
    assert missing == []
    part.set("x", "y")
    assert part.get("x") == b"y"


@pytest.mark.parametrize(
    ("waits_for", "asked", "cause"),
    [
        ({}, 2, "rank 2 is gone"),  # who is lost leaves no note
        ({2: 1, 1: 3}, 2, "rank 3 is gone"),  # at the end of those who wait for each other
        ({1: 0, 3: 0}, -1, "rank 2 is gone"),  # the library does not tell whom: it is the only silent one
        ({1: 0}, -1, "a process is gone"),  # two are silent
        ({1: 0, 2: 0, 3: 0}, -1, "a process is gone"),  # none is
    ],
)
def test_who_is_lost(waits_for: dict[int, int], asked: int, cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "ALIVE", 0.02)
    store, world = engine.c10d.HashStore(), object.__new__(engine.TorchWorld)
    monkeypatch.setattr(world, "rank", 0, raising=False)
    monkeypatch.setattr(world, "size", 4, raising=False)
    for rank, other in waits_for.items():
        store.set(f"lost/{rank}", json.dumps([other, False]))
    assert world._trace(asked, False, 0.1, store) == f"{cause}: it was killed, or its host was lost"
    assert world._trace(1, False, 0.1, store).startswith(cause)  # what was said first is what all say


def test_one_process_of_torchrun_is_alone() -> None:
    """Without a group: MASTER_ADDR need not even be set."""
    assert isinstance(engine.join(Place(0, 1, 0, 1, "env://", "torchrun"), 1.0, [], lambda array: array), Alone)


# What follows from sends and receives, with threads in the place of processes


class Post(World):
    """Messages between threads: by kind, sender, receiver and number."""

    def __init__(self, rank: int, size: int, sent: dict[Any, bytes], arrived: threading.Condition) -> None:
        super().__init__(rank, size, 60.0)
        self.sent, self.arrived = sent, arrived

    def send(self, kind: str, rank: int, memory: Any, tag: int) -> Any:
        with self.arrived:
            self.sent[kind, self.rank, rank, tag] = memory.tobytes()
            self.arrived.notify_all()
        return lambda: None

    def receive(self, kind: str, rank: int, memory: Any, tag: int) -> Any:
        def wait() -> None:
            with self.arrived:
                assert self.arrived.wait_for(lambda: (kind, rank, self.rank, tag) in self.sent, self.timeout)
                memory[:] = np.frombuffer(self.sent[kind, rank, self.rank, tag], memory.dtype)

        return wait

    def wait(self, works: Any) -> None:
        for _, work in works:
            work()

    def empty(self, size: int, like: Any) -> Any:
        raise NotImplementedError

    bring = fail = empty


def together(size: int, work: Callable[[World], Any]) -> tuple[list[Any], dict[Any, bytes]]:
    """What each process has in the end, and all that was sent."""
    sent, arrived = dict[Any, bytes](), threading.Condition()
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(Post(rank, size, sent, arrived)), range(size))), sent


def test_what_each_has_comes_to_all() -> None:
    """First the lengths, then the bytes; empty ones do not travel."""
    contents = [b"abc", b"", b"d"]
    seen, sent = together(3, lambda world: world.collect(contents[world.rank]))
    assert seen == [contents] * 3
    lengths = {
        (BYTES, a, b, 1): len(contents[a]).to_bytes(8, sys.byteorder) for a in range(3) for b in range(3) if a != b
    }
    assert sent == lengths | {(BYTES, a, b, 3): contents[a] for a in (0, 2) for b in range(3) if a != b}


def test_what_rank_0_has_comes_to_all() -> None:
    seen, sent = together(3, lambda world: world.broadcast(b"of %d" % world.rank))
    assert seen == [b"of 0"] * 3
    assert [text for (_, rank, _, tag), text in sent.items() if tag == 3] == [b"of 0"] * 2
    assert together(2, lambda world: world.broadcast(None))[0] == [b""] * 2


@pytest.mark.parametrize("stops", [[], [0], [2], [0, 1, 2]])
def test_anybody_may_stop_all(stops: list[int]) -> None:
    seen, sent = together(3, lambda world: world.agreed(world.vote(world.rank in stops)))
    assert seen == [bool(stops)] * 3
    assert {key: sent[key] for key in sent if key[1] == 2} == {
        (BYTES, 2, rank, 1): b"\1" if 2 in stops else b"\0" for rank in (0, 1)
    }


def test_every_swap_has_a_number_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of vectors are even, the others odd; none is the one under which nothing is ever sent."""
    world = Post(0, 2, {}, threading.Condition())
    assert [world.expect([])[0] for _ in range(3)] == [0, 2, 4]
    assert [world.expect([], BYTES)[0] for _ in range(3)] == [1, 3, 5]
    leaving, arriving = world.swap([(1, np.arange(2))], [(1, np.zeros(2))])
    assert [rank for rank, _ in leaving + arriving] == [1, 1]
    assert list(world.sent) == [(VECTORS, 0, 1, 6)]
    expected = world.expect([])
    world.swap([], [])
    world.swap([(1, np.arange(2))], expected)
    assert list(world.sent)[1:] == [(VECTORS, 0, 1, 8)]
    world._swaps = dict.fromkeys(world._swaps, (1 << 28) - 1)
    assert [world.expect([], kind)[0] for kind in (VECTORS, BYTES, VECTORS, BYTES)] == [2**29 - 2, 2**29 - 1, 0, 1]
    assert engine.NEVER == 2**31 - 1  # the largest that gloo takes


# PyTorch's world, with stand-ins for its groups


@pytest.fixture
def world() -> Any:
    """Rank 0 of three, without connections."""
    world: Any = object.__new__(engine.TorchWorld)
    World.__init__(world, 0, 3, 2.0)
    world.broken, world._made, world._holder, world._store = False, True, engine.NOBODY, engine.c10d.HashStore()
    world._through = engine.torch.device("cpu")
    return world


class Joined:
    """Stands for a TorchWorld."""

    def __init__(self, place: Place, timeout: float) -> None:
        self.place, self.broken, self.errors, self.prepared = place, False, list[str](), list[Any]()

    def prepare(self, devices: Any, timeout: float) -> None:
        self.prepared.append((devices, timeout))
        if timeout < 0:
            raise KeyboardInterrupt("while it was prepared")

    def fail(self, error: BaseException) -> None:
        self.errors.append(str(error))
        self.broken = True


@pytest.mark.parametrize(
    ("group", "place", "joined"),
    [
        (None, Place(), "alone"),
        (1, Place(), "alone"),
        (2, Place(), "torch"),  # the script has made a group by itself
        (None, Place(0, 2, 0, 2, "env://", "torchrun"), "torch"),
        (1, Place(0, 2, 0, 2, "env://", "torchrun"), "torch"),
        (None, Place(0, 2, 0, 2, "", "mpi"), "mpi"),
        (None, Place(0, 2, 0, 2, "file:///x", "mpi"), "torch"),
        (3, Place(0, 3, 0, 3, "", "mpi"), "torch"),
        (-2, Place(), "alone"),  # this PyTorch has no groups
    ],
)
def test_which_world_is_joined(group: int | None, place: Place, joined: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI's, unless there is a place to meet or a group of the script's own."""
    monkeypatch.setattr(engine, "TorchWorld", Joined)
    monkeypatch.setattr(engine, "_joined", None)
    monkeypatch.setattr(engine.mpi, "join", lambda get, place, timeout: "alone" if place.size == 1 else "mpi")
    monkeypatch.setattr(engine.dist, "is_available", lambda: group != -2)
    monkeypatch.setattr(engine.dist, "is_initialized", lambda: group is not None)
    monkeypatch.setattr(engine.dist, "get_world_size", lambda: abs(group or 1))
    world: Any = engine.join(place, 1.0, [], lambda array: array)
    assert ("torch" if isinstance(world, Joined) else world) == joined


def test_pytorchs_world_is_joined_until_it_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "TorchWorld", Joined)
    monkeypatch.setattr(engine, "_joined", None)
    place, devices = Place(0, 2, 0, 2, "env://", "torchrun"), [gpu(0)]
    first: Any = engine.join(place, 1.0, devices, lambda array: array)
    assert engine.join(place, 2.0, devices, lambda array: array) is first
    assert (first.place, first.prepared) == (place, [(devices, 1.0), (devices, 2.0)])
    with pytest.raises(KeyboardInterrupt):
        engine.join(place, -1.0, devices, lambda array: array)
    assert first.errors == ["while it was prepared"]
    assert engine.join(place, 1.0, devices, lambda array: array) is not first


@pytest.mark.parametrize(
    ("missing", "who"), [([1], "rank 1 has"), ([0], "rank 0 has"), ([1, 2], "ranks 1, 2 have"), ([], "")]
)
@pytest.mark.parametrize(("own", "rank", "holder"), [(False, 1, 5), (True, 0, 0), (True, 2, engine.NOBODY)])
def test_a_world_of_pytorch_is_made(
    own: bool, rank: int, holder: int, missing: list[int], who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a group that the script has, a second one is made beside it."""
    did, stores = list[Any](), dict[str, Any]()
    dist = SimpleNamespace(
        is_initialized=lambda: own, get_rank=lambda: rank, get_world_size=lambda: 4, group=SimpleNamespace(WORLD="all"),
        init_process_group=lambda *given, **named: did.append((given, named)),
        new_group=lambda backend, timeout: (backend, timeout),
    )  # fmt: skip
    monkeypatch.setattr(engine, "dist", dist)
    default = SimpleNamespace(_get_default_store=lambda: "theirs")
    monkeypatch.setattr(engine, "c10d", SimpleNamespace(distributed_c10d=default))
    monkeypatch.setattr(engine, "_stores", stores)
    monkeypatch.setattr(engine, "_meet", lambda place, limit: did.append(limit) or ("store", 5))
    monkeypatch.setattr(engine, "_gather", lambda store, *given: did.append((store, *given)) or ("part", missing))
    place = Place(1, 3, 0, 1, "tcp://a:1", "slurm")
    if missing:
        with pytest.raises(ProcessFailed, match=f"^{who} not come within 2 s: were all started\\?$"):
            engine.TorchWorld(place, 2.0)
        return
    limit = timedelta(seconds=2)
    for _ in range(2):
        world = engine.TorchWorld(place, 2.0)
        assert (world.rank, world.size, world.timeout, world.broken) == (rank, 4 if own else 3, 2.0, False)
        assert (world._made, world._holder, world._store) == (not own, holder, "part")
        assert world._host == (("gloo", limit) if own else "all")
    group = (("gloo",), {"store": "part", "rank": 1, "world_size": 3, "timeout": limit})
    assert did == ([("theirs", rank, 4, 2.0)] * 2 if own else [limit, *[("store", 1, 3, 2.0), group] * 2])


def test_vectors_from_gpu_to_gpu(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends and receives at once, in one batch; bytes go through the host nevertheless."""
    monkeypatch.setattr(engine.dist, "P2POp", lambda act, vector, group, group_peer: (act, vector, group, group_peer))
    monkeypatch.setattr(engine.dist, "batch_isend_irecv", lambda ops: [*ops])
    world._through, world._gpus = SimpleNamespace(type="cuda"), "gpus"
    send, receive = (engine.dist.isend, "a", "gpus", 1), (engine.dist.irecv, "b", "gpus", 2)
    assert world.expect([(2, "b")]) == [(2, "b")]
    assert world.swap([(1, "a")], [(2, "b")]) == ([], [(engine.NOBODY, send), (engine.NOBODY, receive)])
    monkeypatch.setattr(engine.dist, "batch_isend_irecv", None)
    assert world.swap([], []) == ([], [])  # NCCL refuses an empty batch
    assert world.expect([], BYTES) == (1, [])


def test_vectors_through_the_host(world: Any) -> None:
    did, memory = list[Any](), np.arange(3)
    world._host = SimpleNamespace(
        send=lambda what, rank, tag: did.append(("send", what[0].tolist(), rank, tag)),
        recv=lambda what, rank, tag: did.append(("receive", what[0].tolist(), rank, tag)),
    )
    assert world.expect([(2, memory)]) == (0, [(2, None)])
    assert world.swap([(1, memory)], [(2, memory)]) == ([(1, None)], [(2, None)])
    assert did == [("receive", [0, 1, 2], 2, 0), ("receive", [0, 1, 2], 2, 2), ("send", [0, 1, 2], 1, 2)]


def test_how_long_is_waited(world: Any) -> None:
    """NCCL has a limit of its own."""
    waited = list[Any]()
    works = [(rank, SimpleNamespace(wait=lambda *limit: waited.append(limit))) for rank in (0, 1, engine.NOBODY)]
    world.wait(works)
    assert waited == [(timedelta(seconds=2),), (timedelta(seconds=2),), ()]


@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize(("holder", "told"), [(0, False), (1, True), (engine.NOBODY, True)])
def test_a_failure_is_left_in_the_store(
    holder: int, told: bool, made: bool, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who holds the store stays until the others have read it; the connections to all of them are closed."""
    did = list[Any]()

    def receive(what: Any, rank: int, tag: int) -> Any:
        did.append((rank, tag))
        if rank == 1:
            raise RuntimeError("Connection closed by peer")
        return SimpleNamespace(wait=did.append)

    def destroy(group: Any) -> None:
        did.append(group)
        raise ValueError("there is none")

    world._holder, world._made, world._host = holder, made, SimpleNamespace(recv=receive)
    monkeypatch.setattr(engine.dist, "destroy_process_group", destroy)
    monkeypatch.setattr(engine, "_without", lambda store, *given: did.append(given))
    monkeypatch.setattr(engine, "FAREWELL", 5.0)
    world.fail(ValueError("boom"))
    stays = [] if told else [("told", [1, 2], 5.0)]
    moment = timedelta(milliseconds=1)
    assert did == [(1, engine.NEVER), (2, engine.NEVER), moment, *stays, None if made else world._host]
    assert world.broken
    assert world._store.get("cause") == b"rank 0 failed: ValueError: boom"
    assert world._store.check(["told/0"]) is told


def test_a_store_that_does_not_answer_is_asked_once(world: Any) -> None:
    store, forever = world._store, threading.Event()
    assert world._ask(lambda given: given is store) is True

    def gone(store: Any) -> None:
        raise RuntimeError("Connection reset by peer")

    assert world._ask(gone) is None
    assert world._store is store

    def wait(store: Any) -> None:
        assert threading.current_thread().daemon  # it keeps nobody from ending
        forever.wait()

    assert world._ask(wait, 0.01) is None
    assert world._store is None
    assert world._ask(lambda store: "never asked") is None
    forever.set()


@pytest.mark.parametrize("kind", [RuntimeError, OSError, EOFError])
def test_an_error_of_the_library_is_told_as_the_process_that_failed(
    kind: type[Exception], world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "_cause", lambda rank, error: f"rank {rank}: {error}")
    with pytest.raises(ProcessFailed, match="^rank 2: boom$"), world._named(2):
        raise kind("boom")
    with pytest.raises(ProcessFailed, match="^boom$"), world._named(2):
        raise ProcessFailed("boom")


@pytest.mark.parametrize(
    ("error", "late"), [("Timed out waiting", True), ("Timeout after 3 s", True), ("Connection closed by peer", False)]
)
def test_why_the_run_ends(error: str, late: bool, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the store knows; where it does not answer, its holder is the one that is lost."""
    asked = list[Any]()

    def ask(question: Any, seconds: float) -> Any:
        asked.append((question.func, question.args, seconds))
        return said

    monkeypatch.setattr(engine, "PATIENCE", 3.0)
    monkeypatch.setattr(world, "_ask", ask)
    answered = "has not answered for 2 s: it hangs, or its host cannot be reached"
    gone = "is gone: it was killed, or its host was lost"
    said: str | None = "rank 2 failed: OSError"
    assert world._cause(1, RuntimeError(error)) == said
    world._holder = 2
    assert world._cause(1, RuntimeError(error)) == said
    said = None
    assert world._cause(1, RuntimeError(error)) == f"rank 2 {gone}"
    world._store = None
    assert world._cause(1, RuntimeError(error)) == f"rank 2 {answered}"
    for world._holder in (0, engine.NOBODY):  # us, or nobody
        assert world._cause(1, RuntimeError(error)) == f"rank 1 {answered if late else gone}"
    assert asked == [(world._trace, (1, late, 3.2), 4.2)] * 6


@pytest.mark.parametrize(
    ("notes", "asked", "late", "named", "hangs"),
    [
        ({}, 2, True, 2, True),
        ({2: (1, False)}, 2, True, 1, False),  # it has seen that rank 1 is gone
        ({2: (1, True)}, 2, False, 1, True),
        ({1: (2, True), 2: (1, True)}, 1, False, 1, False),  # they wait for each other
        ({1: (0, True)}, 1, True, 1, True),
        ({2: (0, True)}, -1, True, 1, True),
    ],
)
def test_who_hangs_or_is_lost(
    notes: dict[int, tuple[int, bool]], asked: int, late: bool, named: int, hangs: bool, world: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(engine, "ALIVE", 0.02)
    for rank, note in notes.items():
        world._store.set(f"lost/{rank}", json.dumps(note))
    assert world._trace(asked, late, 0.03, world._store) == world.lost(named, hangs)
    assert json.loads(world._store.get("lost/0")) == [asked, late]


def test_how_long_a_note_is_waited_for(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs may notice later than one that is gone; what was waited before counts."""
    now, waited = [100.0], list[Any]()

    def without(store: Any, name: str, ranks: Any, seconds: float) -> list[int]:
        waited.append((name, list(ranks), seconds))
        now[0] += 0.25
        return [rank for rank in ranks if not store.check([f"{name}/{rank}"])]

    monkeypatch.setattr(engine, "ALIVE", 1.0)
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(engine, "_without", without)
    world._store.set("lost/1", json.dumps([2, True]))
    assert world._trace(1, False, 4.0, world._store).startswith("rank 2 has not answered")
    assert waited == [("lost", [1], 1.0), ("lost", [2], 3.75)]
    waited.clear()
    world._store = engine.c10d.HashStore()
    assert world._trace(-1, False, 4.0, world._store).startswith("a process is gone")
    assert waited == [("lost", [1, 2], 1.0)]


@pytest.mark.parametrize(
    ("meet", "rank", "environ", "host", "holds", "holder"),
    [
        ("env://", 0, {}, "a:77", True, 0),
        ("env://", 1, {}, "a:77", False, 0),
        ("env://", 0, {"TORCHELASTIC_USE_AGENT_STORE": "True"}, "a:77", False, engine.NOBODY),
        ("env://", 0, {"TORCHELASTIC_USE_AGENT_STORE": "False"}, "a:77", True, 0),
        ("tcp://[::1]:8", 0, {"TORCHELASTIC_USE_AGENT_STORE": "True"}, "[::1]:8", True, 0),
        ("tcp://b:8", 2, {}, "b:8", False, 0),
    ],
)
def test_where_processes_meet(
    meet: str, rank: int, environ: dict[str, str], host: str, holds: bool, holder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At rank 0, or at torchrun's own store; it is named where it cannot be reached."""
    made, limit = list[Any](), timedelta(seconds=2.5)

    def store(*given: Any, **named: Any) -> str:
        made.append((given, named))
        return "store"

    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name, value in ({"MASTER_ADDR": "a", "MASTER_PORT": "77"} | environ).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(engine, "c10d", SimpleNamespace(TCPStore=store))
    place = Place(rank, 3, 0, 1, meet, "torchrun")
    assert engine._meet(place, limit) == ("store", holder)
    name, _, port = host.rpartition(":")
    assert made == [((name, int(port), 3, holds, limit), {"wait_for_workers": False, "multi_tenant": True})]
    for error in (RuntimeError, ValueError, OSError):

        def fail(*given: Any, error: type[Exception] = error, **named: Any) -> None:
            raise error("port in use\nand more of it")

        monkeypatch.setattr(engine, "c10d", SimpleNamespace(TCPStore=fail))
        with pytest.raises(ProcessFailed) as caught:
            engine._meet(place, limit)
        cannot = f"listen at {host}: port in use" if holds else f"reach {host} within 2.5 s: was rank 0 started?"
        assert str(caught.value) == f"rank {rank} cannot {cannot}"


def test_processes_meet_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "c10d", SimpleNamespace(FileStore=lambda *given: given))
    place = Place(0, 3, 0, 3, "file:///tmp/meet", "torchrun")
    assert engine._meet(place, timedelta(seconds=1)) == (("/tmp/meet", 3), engine.NOBODY)


@pytest.mark.parametrize(("name", "value"), [("MASTER_ADDR", ""), ("MASTER_PORT", "0"), ("MASTER_PORT", "65536")])
def test_addresses_that_cannot_be(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for one in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(one, value if one == name else "1")
    with pytest.raises(Invalid, match=f"^the environment variable {name} must "):
        engine._meet(Place(0, 2, 0, 1, "env://", "torchrun"), timedelta(seconds=1))


def test_three_come_to_a_store_that_was_used_before() -> None:
    """Whatever processes that are no more have left there, nobody takes it for what was said now."""
    store = engine.c10d.HashStore()
    for _ in range(2):
        with ThreadPoolExecutor(3) as pool:
            came = list(pool.map(lambda rank: engine._gather(store, rank, 3, 60.0), range(3)))
        assert [missing for _, missing in came] == [[], [], []]
        came[0][0].set("x", "y")
        assert came[2][0].get("x") == b"y"
        assert not store.check(["x"])


class Breaks:
    """A store that is gone after so many questions."""

    def __init__(self, left: int) -> None:
        self.store, self.left = engine.c10d.HashStore(), left

    def set(self, name: str, value: str) -> None:
        self.store.set(name, value)

    def get(self, name: str) -> Any:
        return self.store.get(name)

    def check(self, names: list[str]) -> Any:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("Connection reset by peer")
        return self.store.check(names)


@pytest.mark.parametrize(("rank", "left", "missing"), [(1, 0, [0]), (2, 5, [0])])
def test_who_is_missing_when_the_store_is_gone(rank: int, left: int, missing: list[int]) -> None:
    """Rank 0, which held it, unless others were seen to be missing."""
    store = Breaks(left)
    assert engine._gather(store, rank, 3, 60.0) == (store, missing)


@pytest.mark.parametrize(("came", "missing"), [(True, [0]), (False, [1])])
def test_who_was_missing_before_the_store_was_gone(
    came: bool, missing: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all were there, it is rank 0, which held the store."""
    checked = list[int]()

    def check(names: list[str]) -> bool:
        checked.append(len(names))
        if checked.count(2) == 2:
            raise RuntimeError("Connection reset by peer")
        return names == ["here/0"] or (came and names == ["here/1"])

    part = SimpleNamespace(set=lambda name, value: None, check=check)
    store = engine.c10d.HashStore()
    monkeypatch.setattr(engine, "c10d", SimpleNamespace(PrefixStore=lambda name, store: part))
    assert engine._gather(store, 0, 2, 60.0) == (store, missing)


@pytest.mark.parametrize(("rank", "missing"), [(0, [2]), (1, [0, 2])])
def test_those_who_have_not_come_in_time(rank: int, missing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleep takes a quarter of a second; after the first look, rank 1 comes to rank 0."""
    now, store, prefix = [100.0], engine.c10d.HashStore(), engine.c10d.PrefixStore

    def sleep(seconds: float) -> None:
        now[0] += 0.25
        if rank == 0 and now[0] == 100.5:
            first, _ = json.loads(store.get("samestep/seen"))
            prefix(f"samestep/{first}", store).set("here/1", "")

    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    assert engine._gather(store, rank, 3, 1.5) == (store, missing)
    assert now == [101.75]


def test_who_leaves_no_note() -> None:
    store = engine.c10d.HashStore()
    store.set("told/2", "")
    assert engine._without(store, "told", [1, 2, 3], 0.01) == [1, 3]
    assert engine._without(store, "told", [2], -5.0) == []
