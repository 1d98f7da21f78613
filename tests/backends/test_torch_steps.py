"""Recorded steps on a GPU that is made up: a graph computes its function again. What is recorded is right, and when.

tests/conformance/test_capture.py and benchmarks/gpu_same.py do the same on a real one.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conformance import suite
from torch import nn

import samestep as ss
from samestep.backends.torch import place, steps
from samestep.backends.torch.backend import TorchBackend
from samestep.backends.torch.steps import Recording, TorchSteps
from samestep.optimizers.updating import FlatUpdater


class Graph:
    """Computes again, and leaves what comes out where it was the first time."""

    def __init__(self, compute: Any, log: list[str], name: str) -> None:
        self.compute, self.out, self.log, self.name = compute, None, log, name

    def replay(self) -> None:
        self.log.append(self.name)
        new = self.compute()
        if self.out is None:
            self.out = new
        for span, part in (self.out or {}).items():
            part.copy_(new[span])


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fits on the CPU believe that they record. What was launched."""
    done: list[str] = []
    pools = dict[Any, weakref.WeakSet[Graph]]()
    stream = SimpleNamespace(wait_stream=lambda other: None)
    generator = SimpleNamespace(get_offset=lambda: 0)
    fakes = {"current_stream": lambda *a: stream, "stream": lambda s: nullcontext(), "device": lambda d: nullcontext(),
             "graph_pool_handle": object, "default_generators": [generator]}  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(place, "streams", lambda device, count: [stream] * count)
    monkeypatch.setattr(steps, "seed_gpu", lambda key, device: None)
    monkeypatch.setattr(steps, "warm_up", lambda compute, side: compute())

    def recorded(self: Recording, where: Any, noise: Any, compute: Any) -> Any:
        name = compute.__qualname__.split(".")[1].strip("_")
        graph, held, at, pool = Graph(compute, done, name), [], where.at.clone(), self.steps.pool
        assert pool not in pools or pools[pool], "PyTorch refuses memory whose last graph is gone"
        pools.setdefault(pool, weakref.WeakSet()).add(graph)
        for replica in where.replicas:
            held += [(vector, vector.clone()) for vector in replica.vectors]
        slots = [updater.state for updater in self.group.updaters if isinstance(updater, FlatUpdater)]
        held += [(slot, slot.clone()) for state in slots for slot in state.values()]
        held += [(table, table.clone()) for table in (where.numbers, where.prints)]
        graph.out = compute()  # recording computes nothing: all is put back
        for vector, before in held:
            vector.copy_(before)
        where.at.copy_(at)
        return graph, graph.out

    monkeypatch.setattr(Recording, "_recorded", recorded)
    monkeypatch.setattr(TorchBackend, "steps", lambda self, group: TorchSteps(group))
    # slots stay where they are, and numbers that change are on the device, as on a GPU
    monkeypatch.setattr(TorchBackend, "scalar", lambda self, value, device: torch.as_tensor(value, dtype=torch.float64))
    monkeypatch.setattr(FlatUpdater, "follow", follow)
    return done


def follow(self: Any, total: Any, over: Any, lr: Any, t: Any, z: Any) -> None:
    backend, x = self.replica.backend, self.replica.parameters
    x, new = self._update(x, self.state, total, over, backend.scalar(lr, None), backend.scalar(t, None), z)
    for name, slot in self.state.items():
        slot.copy_(new[name])
    self.replica.assign(x)


def fit(model: str = "lenet_modern", data: Any = None, **settings: Any) -> ss.Run:
    usual = {"max_epochs": 2, "batch_size": 20, "devices": "cpu", "progress": False, "optimizer": ss.sgd(momentum=0.9),
             "schedule": lambda t: 0.1 / (1 + t)}  # fmt: skip
    trainer = ss.Trainer(**{**usual, **settings})  # type: ignore[arg-type]
    return trainer.fit(getattr(suite.zoo, model)(), suite.data(model, 250) if data is None else data)


SETTINGS: dict[str, dict[str, Any]] = {
    "one replica": {},
    "three replicas": {"devices": ["cpu"] * 3},
    "an optimizer with two slots": {"optimizer": ss.adam()},
    "clipping": {"gradient_clip_val": 0.1, "devices": ["cpu"] * 2},
    "checkpoints and checks": {"check_every": 3},
    "one shard": {"shards": 1},
    "one stream": {"streams": 1},
    "an optimizer of PyTorch's": {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "schedule": 0.1},
    "noise in the optimizer": {"optimizer": ss.sgld(temperature=1e-6), "schedule": 0.01},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_recorded_steps_are_those_one_by_one(name: str, log: list[str]) -> None:
    one = fit(capture=False, **SETTINGS[name])
    assert log == []
    suite.same(one, fit(**SETTINGS[name]))
    assert log


class Stream:
    """What was asked of each stream, in order: to wait for another, or to compute a shard."""

    now: Any = None
    done: list[tuple[str, str, str]]

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_stream(self, other: Any) -> None:
        Stream.done.append((self.name, "waits for", other.name))

    def __enter__(self) -> None:
        self.before, Stream.now = Stream.now, self

    def __exit__(self, *error: object) -> None:
        Stream.now = self.before


def test_shards_are_side_by_side_on_streams_that_wait_for_none_of_them(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main, others = Stream("main"), [Stream(f"{i}") for i in range(9)]
    monkeypatch.setattr(Stream, "now", main)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: Stream.now)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(place, "streams", lambda device, count: others[:count])
    seen = list[list[tuple[str, str, str]]]()

    def sums(self: place.Place, n: int, take: Any, noise: Any, usual: Any = place.Place.sums) -> Any:
        def taken(shard: int) -> Any:
            Stream.done.append((Stream.now.name, "computes", str(shard)))
            return take(shard)

        Stream.done = []
        parts = usual(self, n, taken, noise)
        seen.append(list(Stream.done))
        return parts

    monkeypatch.setattr(place.Place, "sums", sums)
    monkeypatch.setattr(place.Place, "update", lambda self, *given: None)
    Stream.done = []
    fit(max_epochs=1, shards=4)
    done = seen[-1]
    shards = [one for one in done if one[1] == "computes"]
    assert len({stream for stream, *_ in shards}) == len(shards) == 4, "each shard on a stream of its own"
    forked = [("1", "waits for", "main"), ("2", "waits for", "main"), ("3", "waits for", "main")]
    assert done[:3] == forked, "before a shard is on main, or they would wait for it"
    assert done[-3:] == [("main", "waits for", stream) for stream in "123"]
    joins = [("main", "waits for", "1"), ("3", "waits for", "main")]
    assert joins[0] in done[3:-3]
    assert joins[1] not in done[3:]


@pytest.mark.parametrize(("aligned", "gathers"), [(1, 1), (1 << 30, 8)])
def test_examples_are_gathered_at_once_if_every_shard_is_aligned(
    aligned: int, gathers: int, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, taken = fit(capture=False), list[int]()

    def taking(self: place.Place, spans: Any, index: Any, resident: Any, usual: Any = place.Place.taking) -> Any:
        before = calls.count
        take = usual(self, spans, index, resident)
        found = [label for shard in range(len(spans)) for label in take(shard)[1].tolist()]
        taken.append((calls.count - before) // 2)  # of x and of y
        assert found == resident[1][index].tolist()
        return take

    calls = Calls(torch.Tensor.index_select)
    monkeypatch.setattr(torch.Tensor, "index_select", lambda *given: calls(*given))
    monkeypatch.setattr(place.Place, "taking", taking)
    monkeypatch.setattr(place, "ALIGNED", aligned)
    suite.same(one, fit())
    assert set(taken) == {gathers}


class Calls:
    """Counts the calls of a function."""

    def __init__(self, function: Any) -> None:
        self.function, self.count = function, 0

    def __call__(self, *given: Any) -> Any:
        self.count += 1
        return self.function(*given)


def test_statistics_of_batches_and_a_batch_that_is_smaller(log: list[str]) -> None:
    suite.same(fit(suite.NORMED, capture=False), fit(suite.NORMED, devices=["cpu"] * 2))
    assert set(log) == {"record", "record_whole"}


def test_several_steps_are_one_launch_if_the_model_is_small(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    one = fit("lenet", capture=False)
    monkeypatch.setattr(steps, "UNROLLED", 3)
    suite.same(one, fit("lenet"))
    launched = log.count("record_whole")
    log.clear()
    monkeypatch.setattr(steps, "LEAST", 1)
    suite.same(one, fit("lenet"))
    assert launched < log.count("record_whole")


def test_what_is_read_is_copied_to_where_the_recording_reads(log: list[str]) -> None:
    data = suite.data("lenet", 250)
    x, y = np.asarray(data.train.x), np.asarray(data.train.y)
    given = ss.Data((x, y), transform=lambda x, y, rng: (x + np.float32(0.25) * rng.random(dtype=np.float32), y))
    suite.same(fit("lenet", given, capture=False), fit("lenet", given))
    assert "record_whole" in log


def test_a_batch_of_a_loop_of_one_s_own(log: list[str]) -> None:
    data = suite.data("lenet", 100)
    x, y = np.asarray(data.train.x), np.asarray(data.train.y)
    prints = []
    for capture in (False, True):
        group = ss.Group(suite.zoo.lenet(), devices="cpu", capture=capture, optimizer=ss.sgd(momentum=0.9))
        prints.append([group.step(x[i : i + 20], y[i : i + 20]).fingerprint for i in range(0, 100, 20)])
    assert prints[0] == prints[1]


def test_where_parts_are_exchanged_sums_and_updates_are_recorded_apart(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, init = fit(capture=False), TorchSteps.__init__

    def several(self: TorchSteps, group: Any) -> None:
        init(self, group)
        self.alone = False

    monkeypatch.setattr(TorchSteps, "__init__", several)
    suite.same(one, fit())
    assert set(log) == {"record", "record_update"}


@pytest.mark.parametrize("broken", ["rows_of", "sums", "keep"])
def test_a_broken_twin_is_another_run(broken: str, log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that stands still, a shard that is left out (found while it is recorded), numbers of the wrong step."""
    one, right = fit(capture=False), getattr(place.Place, broken)

    def rows_of(self: Any, *given: Any, **named: Any) -> Any:
        return [
            place.Row(row.at, row.index, torch.full_like(row.rate, 0.1), row.t) for row in right(self, *given, **named)
        ]

    def sums(self: Any, n: int, take: Any, noise: Any) -> Any:
        return right(self, n, lambda shard: take(max(shard, 1)), noise)

    def keep(self: Any, at: Any, numbers: Any) -> None:
        right(self, (at - 1).clamp(min=0), numbers)

    monkeypatch.setattr(place.Place, broken, locals()[broken])
    with pytest.warns(UserWarning, match="its bits are not those") if broken == "sums" else nullcontext():
        run = fit()
    assert (run.fingerprints == one.fingerprints) is (broken == "sums")


def test_what_fails_while_it_is_recorded_costs_a_warning(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    one = fit(capture=False)
    for name in ("record", "record_update"):

        def fail(*given: Any) -> None:
            raise RuntimeError("the library is gone\nand more of it")

        with monkeypatch.context() as patch:
            patch.setattr(Recording, name, fail)
            with pytest.warns(
                UserWarning, match="a step is not recorded on the GPU, and so slower: the library is gone$"
            ):
                suite.same(one, fit())


def test_with_too_little_memory_fewer_shards_are_computed_at_once(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, record, counts = fit(capture=False), Recording.record, list[int]()

    def full(self: Recording, batch: Any) -> None:
        counts.append(self.steps.places[0].count)
        if counts[-1] > 2:
            raise torch.OutOfMemoryError("no memory")
        record(self, batch)

    monkeypatch.setattr(Recording, "record", full)
    suite.same(one, fit())
    assert counts[:3] == [8, 4, 2]


def test_a_model_with_a_state_that_nobody_sees_is_not_recorded(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.GRU(28, 4, 2, dropout=0.5, batch_first=True), nn.Linear(4, 10)

        def forward(self, x: torch.Tensor) -> Any:
            return self.out(self.rnn(x[:, 0])[0][:, -1])

    trainer = ss.Trainer(max_epochs=1, batch_size=20, devices="cpu", progress=False)
    with pytest.warns(UserWarning, match="cuDNN draws the dropout between the layers of an RNN"):
        trainer.fit(Rows(), suite.data("lenet", 40))
    assert log == []
