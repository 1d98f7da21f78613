"""world: what all engines do alike."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from samestep.devices import gpu
from samestep.errors import ProcessFailed
from samestep.processes import torch as engine
from samestep.processes.place import Place
from samestep.processes.world import Alone


def test_alone_there_is_nobody_to_talk_to() -> None:
    alone = Alone()
    assert (alone.rank, alone.size) == (0, 1)
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
    world, made = object.__new__(engine.TorchWorld), list[str]()
    monkeypatch.setenv(engine.TRANSPORT, wanted)
    monkeypatch.setattr(world, "collect", lambda text: serials, raising=False)
    monkeypatch.setattr(engine.torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=index))
    monkeypatch.setattr(engine.torch.cuda, "set_device", lambda device: made.append(str(device)))
    monkeypatch.setattr(engine.dist, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(engine.dist, "new_group", lambda backend, timeout: made.append(backend))
    world.prepare([gpu(1), gpu(0)], 5.0)
    assert str(world._through) == through
    assert made == ([] if through == "cpu" else [through, "nccl"])


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
