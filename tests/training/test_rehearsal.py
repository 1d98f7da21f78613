"""rehearsal: what differs is named, wherever it lies in what a shard gives. What is found at all is in tests/conformance."""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import samestep as ss
from samestep import draws
from samestep.backends.noise import Noise
from samestep.errors import NotRepeatable, Written
from samestep.training.rehearsal import RESULT, Between, Rehearsal
from samestep.training.replicas import Plan

X = np.random.default_rng(0).standard_normal((12, 4)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, 12)


class Net(nn.Module):
    """Draws from Python's random numbers in one place."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.first, self.middle, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.register_buffer("steady", torch.zeros(3))
        self.register_buffer("drawn", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> Any:
        if self.where == "loss":
            x = x * random.random()
        for name, layer in (("first", self.first), ("middle", self.middle)):
            weight = layer.weight * 1
            if self.where == name and weight.requires_grad:
                weight.register_hook(lambda gradient: gradient * random.random())  # type: ignore[no-untyped-call]
            x = nn.functional.linear(x, weight, layer.bias)
        if self.where == "drawn":
            self.get_buffer("drawn").fill_(random.random())
        return self.last(x)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("loss", "the loss"),
        ("first", "the gradient of 'first.weight'"),
        ("middle", "the gradient of 'middle.weight'"),
        ("drawn", "the change of 'drawn'"),
    ],
)
def test_what_differs_is_named(where: str, name: str, devices: int) -> None:
    trainer = ss.Trainer(1, 12, shards=3, devices=["cpu"] * devices, progress=False)
    with pytest.raises(
        NotRepeatable, match=rf"^shard \d was computed twice before step 0, .*: {name} is not the same; only"
    ):
        trainer.fit(Net(where), (X, Y))


def test_where_nothing_is_drawn_nothing_differs() -> None:
    ss.Trainer(1, 12, shards=3, devices=2, progress=False).fit(Net("nowhere"), (X, Y))


class OfAThread:
    """One of its examples depends on the thread that reads it, whatever is read again there."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, indices: Any) -> tuple[Any, Any]:
        x = X[indices]
        x[indices == SPECIAL, 2] += threading.current_thread() is threading.main_thread()
        return x, Y[indices]


SPECIAL = draws.order(0, 0, 12)[2]


def test_an_example_that_depends_on_the_thread_is_named() -> None:
    line = f"^example {SPECIAL} of train is not the same for another thread; a source must give the same example"
    with pytest.raises(NotRepeatable, match=line):
        ss.Trainer(1, 12, shards=3, progress=False).fit(Net("nowhere"), OfAThread())
    ss.Trainer(1, 12, shards=3, progress=False, rehearse=False).fit(Net("nowhere"), OfAThread())  # nobody notices


# What is computed twice, and where: on devices that only have names


def rehearsal_of(kind: type[Rehearsal], replicas: list[Any], **settings: Any) -> Any:
    """Of rank 1, in a run on four devices: rank 0 has the first of them, this process the others."""
    world = SimpleNamespace(rank=1, collect=lambda text: [b"", text])
    plan = Plan([range(0, 2), range(2, 3), range(3, 4)][-len(replicas) :], [])
    group = SimpleNamespace(replicas=replicas, plan=lambda n: plan, world=world, size=4, processes=[(0, 1), (1, 4)])
    usual = {"rehearse": True, "deterministic": True, "check_every": 1, "seed": 3, "shards": 2}
    fit = SimpleNamespace(
        group=group, settings=SimpleNamespace(**usual | settings), batches=[None] * 4, last=4,
        result=SimpleNamespace(devices=["d0", "d1", "d2", "d3"]),
    )  # fmt: skip
    return kind(fit)  # type: ignore[arg-type]


def replicas_of(count: int, **about: Any) -> list[Any]:
    return [SimpleNamespace(device=f"d{i}", tensors=dict, **about) for i in range(count)]


LAST = 617  # steps: more than there are small numbers, and the last window is not a whole one


class Steps(Rehearsal):
    """Notes what it would check."""

    def __init__(self, fit: Any) -> None:
        super().__init__(fit)
        self.batches, self.shards = list[int](), list[tuple[int, int]]()

    def batch(self, step: int, batch: Any) -> None:
        self.batches.append(step)

    def shard(self, step: int, batch: Any) -> None:
        self.shards.append((step, self._chosen[1]))


@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize("every", [1, 5, "3 epochs", "auto"])
def test_the_first_batch_is_checked_and_one_shard_of_every_window(every: Any, first: int) -> None:
    rehearsal = rehearsal_of(Steps, [], check_every=every)
    rehearsal.fit.last, size = LAST, {"3 epochs": 12, "auto": 100}.get(every, every)
    for step in range(first, LAST):
        rehearsal(step, None)
    windows = [(start, draws.check(3, start // size, min(size, LAST - start))) for start in range(0, LAST, size)]
    assert rehearsal.batches == [first]
    assert rehearsal.shards == [(start + step, number) for start, (step, number) in windows if start + step >= first]


def test_by_itself_a_fit_computes_a_shard_twice_in_every_epoch_but_no_more_than_one_in_a_hundred() -> None:
    for shards, every in ((1, 200), (3, 67), (8, 25), (49, 5), (50, 4), (200, 4)):
        assert rehearsal_of(Steps, [], check_every="auto", shards=shards)._every == every


def test_nothing_is_checked_where_nothing_was_asked_for() -> None:
    for settings in ({"rehearse": False, "check_every": None}, {"deterministic": False}):
        rehearsal = rehearsal_of(Steps, [], **settings)
        rehearsal(0, None)
        assert (rehearsal.batches, rehearsal.shards) == ([], [])


class Noting(Rehearsal):
    """Computes nothing, and notes what it was asked for."""

    def __init__(self, fit: Any) -> None:
        super().__init__(fit)
        self._moves, self.noted = True, list[Any]()

    def _computed(self, batch: Any, work: Any, crossed: bool = False, replayed: bool = False) -> Any:
        self.noted.append((list(work), crossed))
        return [{RESULT: f"{shard}"} for i, shard in work]

    def _look_inside(self, batch: Any, *place: int) -> None:
        self.noted.append(place)

    def _compare(self, one: Any, other: Any, batch: Any, shard: int, places: Any, when: str) -> None:
        assert one == other == {RESULT: f"{shard}"}
        self.noted.append((shard, list(places), when))


def test_a_batch_is_computed_again_backwards_and_each_shard_on_the_next_device() -> None:
    rehearsal = rehearsal_of(Noting, replicas_of(3))
    rehearsal.batch(5, SimpleNamespace(spans=[None] * 4))
    assert rehearsal.noted == [
        ([(0, 0), (0, 1), (1, 2), (2, 3)], False),
        (0, 0),
        ([(0, 3), (2, 2), (1, 1), (1, 0)], True),
        (0, [0, 1], "before step 5, on d0 and on d1"),
        (1, [0, 1], "before step 5, on d0 and on d1"),
        (2, [1, 2], "before step 5, on d1 and on d2"),
        (3, [2, 0], "before step 5, on d2 and on d0"),
    ]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("number", "shard", "places", "on"),
    [
        (0, 0, ([0], [0]), "d0 and on d1"),  # the one of rank 0, and the first one of rank 1
        (5, 1, ([], [0, 1]), "d1 and on d2"),
        (6, 2, ([], [1, 2]), "d2 and on d3"),
        (11, 3, ([0], [2]), "d3 and on d0"),
    ],
)
def test_a_shard_is_computed_by_its_device_and_the_next_one(
    number: int, shard: int, places: Any, on: str, rank: int
) -> None:
    rehearsal, here = rehearsal_of(Noting, replicas_of(3)), places[rank]
    theirs = json.dumps([{RESULT: f"{shard}"}] * len(places[1 - rank])).encode()
    rehearsal.group.world = SimpleNamespace(rank=rank, size=2, collect=lambda text: [theirs, text])
    rehearsal._chosen = 9, number
    rehearsal.shard(9, SimpleNamespace(spans=[None] * 4))
    assert rehearsal.noted == [([(i, shard) for i in here], False), (shard, here, f"at step 9, on {on}")]


@pytest.mark.parametrize(("name", "hint"), [("a", "only the optimizer may"), ("b", "use Trainer(state='b')")])
def test_a_tensor_that_the_first_batch_has_written_is_named(name: str, hint: str) -> None:
    tensors = {"a": np.zeros(2), "b": np.zeros(2)}
    (replica,) = replicas_of(1, layouts=[SimpleNamespace(names=["a"]), SimpleNamespace(names=["b"])])
    replica.tensors = lambda: tensors

    class Writing(Noting):
        def _computed(self, batch: Any, work: Any, crossed: bool = False) -> Any:
            tensors[name][1] = 1

    with pytest.raises(Written) as caught:
        rehearsal_of(Writing, [replica]).batch(0, SimpleNamespace(spans=[None] * 4))
    assert str(caught.value).startswith(f"'{name}' was written to in the forward pass, ")
    assert str(caught.value).endswith(f": {hint}")


@pytest.mark.parametrize(
    ("crossed", "work", "beside", "expected"),
    [
        (True, 3, True, True),
        (True, 2, True, True),
        (True, 1, True, False),
        (True, 3, False, False),
        (False, 3, True, False),
        (None, 3, True, False),
    ],
)
def test_the_first_two_shards_are_crossed_if_they_can_be(
    crossed: bool | None, work: int, beside: bool, expected: bool
) -> None:
    seen = []

    def map_(tasks: Any) -> list[Any]:
        seen.append(hasattr(backend, "before_loss"))
        return [task() for task in tasks]

    class Plain(Rehearsal):
        _watched = _compute = lambda self, *given: given[1]

    replicas = replicas_of(2)
    replicas[0].side_by_side = beside
    rehearsal, backend = rehearsal_of(Plain, replicas), SimpleNamespace(map=map_)
    rehearsal.fit.backend = backend
    given = {} if crossed is None else {"crossed": crossed}
    assert rehearsal._computed(None, [(i % 2, i) for i in range(work)], **given) == list(range(work))
    assert seen == [expected]
    assert not hasattr(backend, "before_loss")


def between(calls: int) -> list[str]:
    """In which order two shards are computed, the first of which comes between forward pass and loss so often."""
    told: list[str] = []
    pool = ThreadPoolExecutor(1)

    def one() -> Any:
        for _ in range(calls):
            told.append("forward")
            crossing()
        told.append("loss")
        return {"one": "1"}

    def other() -> Any:
        crossing()  # it has a loss as well
        told.append("other")
        return {"other": "2"}

    def beside(task: Any) -> Future[Any]:
        return pool.submit(task)

    backend: Any = SimpleNamespace(workers=SimpleNamespace(beside=beside))
    crossing = Between(backend, one, other)
    crossing()  # of a shard that another thread computes: nothing happens
    with pool:
        assert crossing.compute() == [{"one": "1"}, {"other": "2"}]
    return told


def test_another_shard_is_computed_once_between_a_forward_pass_and_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    assert between(1) == ["forward", "other", "loss"]
    assert between(2) == ["forward", "other", "forward", "loss"]
    monkeypatch.setattr(Noise.generator, "taken", True)
    assert between(1) == ["forward", "loss", "other"]  # while one computes alone


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({RESULT: "a"}, {RESULT: "b"}, "which is not the same; only weights"),
        ({RESULT: "b"}, {RESULT: "a"}, "which is not the same; only weights"),
        ({"example 3 of train": "a", RESULT: "a"}, {"example 3 of train": "b", RESULT: "b"},
         "example 3 of train is not the same; a source"),
        ({RESULT: "a"}, {RESULT: "a", "example 3 of train": "b"}, "example 3 of train is not the same; a source"),
        ({RESULT: "a"}, {RESULT: "a"}, None),
    ],
)  # fmt: skip
def test_the_first_thing_that_differs_is_told(one: Any, other: Any, said: str | None) -> None:
    class Which(Rehearsal):
        def _which(self, batch: Any, shard: int, places: Any) -> str:
            return "which"

    rehearsal = rehearsal_of(Which, [])
    one, other = (json.loads(json.dumps(hashes)) for hashes in (one, other))  # as from another process
    if said is None:
        rehearsal._compare(one, other, None, 2, [], "when")
    else:
        with pytest.raises(NotRepeatable, match=f"^shard 2 was computed twice when: {said}"):
            rehearsal._compare(one, other, None, 2, [], "when")


PIECES = ["the gradient of 'a'"] * 3 + [RESULT] + ["the gradient of 'b'"] * 2
PIECES += ["the change of 'c'"] * 2 + [RESULT] + ["the change of 'd'"] + ["the loss"] * 7


def test_what_differs_is_found_by_its_place_in_the_vector() -> None:
    """Two parameters with a gap, two pieces of state of other types, and loss and hits of three shards with a weight."""
    layouts = [
        SimpleNamespace(names=["a", "b"], spans=[(0, 3), (4, 6)], size=6),
        SimpleNamespace(names=["c"], spans=[(0, 2)], size=3),
        SimpleNamespace(names=["d"], spans=[(0, 1)], size=1),
    ]
    found = []
    for place in range(len(PIECES)):
        vectors = np.zeros((2, len(PIECES)))
        vectors[1, place] = 1
        replicas = [
            SimpleNamespace(backend=SimpleNamespace(get=np.asarray), single=lambda batch, shard, mine=mine: mine)
            for mine in vectors
        ]
        replicas[0].layouts, replicas[0].numbers = layouts, 2 * 3 + 1
        rehearsal = rehearsal_of(Rehearsal, replicas, shards=3)
        rehearsal._watched = lambda batch, shard: batch
        found.append(rehearsal._which(None, 0, [0, 1]))
        assert rehearsal._which(None, 0, [0]) == RESULT  # the other one was computed elsewhere
        assert rehearsal._which(None, 0, []) == RESULT
    assert found == PIECES
