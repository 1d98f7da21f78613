"""Shards on the CPU that are recorded and replayed: the bits of their operations, and what is not recorded."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conformance import suite
from torch import nn

import samestep as ss
from samestep.backends.find import load
from samestep.backends.torch import traced
from samestep.backends.torch.kernels import of_every_cpu
from samestep.backends.torch.traced import Program, Recorded
from samestep.devices import Device
from samestep.shards import Fold, parts


class Many(nn.Module):
    """Operations with lists, with several results, with indices and with small arguments of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.recurrent, self.norm, self.out = (
            nn.Embedding(50, 16), nn.GRU(16, 12, batch_first=True), nn.LayerNorm(12), nn.Linear(12, 10)
        )  # fmt: skip
        self.register_buffer("order", torch.tensor([5, 0, 3, 1, 4, 2]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls = self.calls + 1
        x = self.words(x)[:, self.order]
        left, right = (x @ x.mT @ x).split([2, 4], dim=1)
        x, _ = self.recurrent(torch.cat([F.gelu(left, approximate="tanh"), right.clamp(-1, 1)], 1))
        first, *_, last = x.unbind(1)
        return self.out(self.norm(first + last) * torch.tensor(2.0))


class Wide(nn.Module):
    """Images with their channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(1, 6, 5), nn.BatchNorm2d(6), nn.Linear(6, 10)

    def forward(self, x):
        x = F.silu(self.norm(self.conv(x.repeat(1, 1, 1, 1).contiguous(memory_format=torch.channels_last))))
        return self.out(F.max_pool2d(F.interpolate(x, scale_factor=0.5), 2).mean((2, 3)))


def line(change):
    """A model of one layer, after something was done to its input."""

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(change(x))

    return Line()


MODELS = {
    "one layer": (lambda: line(torch.relu), (6,)),
    "LeNet": (suite.zoo.lenet, (1, 28, 28)),
    "batch norm": (suite.zoo.resnet_with_batch_norm, (1, 40, 40)),
    "many": (Many, None),
    "wide": (Wide, (1, 28, 28)),
}


def examples(shape, seed, n=6):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 50, (n, 6), generator=draw) if shape is None else torch.randn(n, *shape, generator=draw)
    return x, torch.randint(0, 3, (n,), generator=draw)


def replica(model):
    return load("torch").replica(model, None, Device.of("cpu"), 4)


def fit(model, **settings):
    numbers = np.random.default_rng(0)
    data = numbers.normal(size=(60, 6)).astype("float32"), numbers.integers(0, 3, 60)
    given = {"max_epochs": 2, "batch_size": 16, "shards": 4, "progress": False} | settings
    return ss.Trainer(**given).fit(model, data)


@pytest.fixture
def made(monkeypatch):
    """Recordings are made early; the list has the shapes for which there was one."""
    shapes, record = [], traced.Traced._record

    def watched(self, kind, *given):
        before = set(self._recorded)
        record(self, kind, *given)
        shapes.extend(set(self._recorded) - before - set(shapes))  # several threads may come with one

    monkeypatch.setattr(traced, "AFTER", 0)
    monkeypatch.setattr(traced.Traced, "_record", watched)
    return shapes


@pytest.mark.parametrize("kernels", [nullcontext, of_every_cpu])
@pytest.mark.parametrize("name", MODELS)
def test_a_recording_has_the_bits_of_its_operations_for_other_examples_and_other_weights(name, kernels):
    with kernels():
        replay_beside_operations(*MODELS[name])


def replay_beside_operations(make, shape):
    torch.manual_seed(0)
    one = replica(make())
    program = Program(one, [Recorded(one, *examples(shape, 0))])

    def replay(x, y, shard):
        return one._traced._alone(program, x, y, shard)

    for seed, shard in enumerate((0, 3, 1)):
        x, y = examples(shape, seed)
        vector = one.gradient(x, y, 0, shard)
        assert torch.equal(replay(x, y, shard).view(torch.uint8), vector.view(torch.uint8))
        one.advance(vector, len(y))
        one.assign(one.parameters - 0.01 * vector[: one.layouts[0].size])
    assert not torch.equal(replay(x, y, 2), replay(x, y, 1))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shards", [range(4), range(3), range(1, 4)])
def test_neighbours_in_one_call_are_the_sums_of_shards_by_operations(name, shards):
    """Shards of two sizes, taken out of a whole data set. The twin: the same vectors, added in another order."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    one = replica(make())
    x, y = examples(shape, 7, n=30)
    order, spans = torch.randperm(30, generator=torch.Generator().manual_seed(1)), [(0, 6), (6, 12), (12, 17), (17, 22)]
    sizes = [spans[shard][1] - spans[shard][0] for shard in shards]
    recorded = {size: Recorded(one, x[:size].clone(), y[:size].clone()) for size in set(sizes)}
    wanted = parts(shards[0], shards[-1] + 1, 4)
    held = []
    program = Program(one, [recorded[size] for size in sizes], wanted, held)
    index = order[spans[shards[0]][0] : spans[shards[-1]][1]]
    program(x, y, index.flip(0))  # its vectors are filled again by the next call
    found = program(x, y, index)
    vectors = {
        shard: one.gradient(x[order[slice(*spans[shard])]], y[order[slice(*spans[shard])]], 0, shard)
        for shard in shards
    }
    fold = Fold(4, torch.add)
    for shard in shards:
        fold.add((shard, shard + 1), vectors[shard])
    assert list(found) == wanted
    for span in wanted:
        assert torch.equal(found[span].view(torch.uint8), fold.parts[span].view(torch.uint8))
    if shards == range(4):
        others = vectors[0] + (vectors[1] + (vectors[2] + vectors[3]))
        assert not torch.equal(found[0, 4], others)
        assert len(held) == 3  # one that was added to another is filled again


@pytest.mark.parametrize("name", ["lenet", "resnet_with_batch_norm", "embedding"])
def test_a_fit_has_the_bits_of_one_without_recordings(name, made):
    without = suite.fit(name, 1, capture=False)
    assert made == []
    for devices in (1, 3):
        suite.same(suite.fit(name, devices), without)
        assert made
        made.clear()


def test_another_operation_in_a_recording_is_seen(made, monkeypatch):
    """The twin: a recording with an error in it is not used."""
    put = Program._put

    def wrong(self, name, inputs, kinds):
        return put(self, "aten::sin" if name == "aten::tanh" else name, inputs, kinds)

    right = fit(line(torch.tanh), capture=False)
    suite.same(fit(line(torch.tanh)), right)
    assert made
    made.clear()
    monkeypatch.setattr(Program, "_put", wrong)
    with pytest.warns(UserWarning, match="not recorded on the CPU, and so slower: its bits are not those of its oper"):
        suite.same(fit(line(torch.tanh)), right)
    assert made == []


def hooked():
    model = line(torch.tanh)
    model.layer.register_forward_hook(lambda layer, given, out: None)
    return model


UNRECORDABLE = {
    "an item": lambda: line(lambda x: x * (1 if x.sum().item() > 0 else 2)),
    "a condition": lambda: line(lambda x: x if (x > 9).any() else x * 2),
    "NumPy": lambda: line(lambda x: x * float(x.numpy().max())),
    "a list": lambda: line(lambda x: x + torch.tensor(x.tolist())),
    "a shape": lambda: line(lambda x: x * len(x[x[:, 0] > 0])),
    "noise": lambda: line(lambda x: F.dropout(x, 0.5)),
    "a hook": hooked,
}


@pytest.mark.parametrize("name", UNRECORDABLE)
def test_what_looks_at_numbers_or_draws_is_not_recorded(name, made):
    run = fit(UNRECORDABLE[name]())
    assert made == []
    suite.same(run, fit(UNRECORDABLE[name](), capture=False))
    suite.same(run, fit(UNRECORDABLE[name](), devices=3))


def test_without_the_proof_a_number_would_be_frozen(made, monkeypatch):
    """The twin: the first examples decide for all. No comparison with these shows it, but the check of a later shard does."""
    model = UNRECORDABLE["NumPy"]
    right = fit(model(), capture=False)
    monkeypatch.setattr(traced, "prove", lambda *given: None)
    wrong = fit(model(), check_every=None)
    assert made
    assert wrong.fingerprint != right.fingerprint
    with pytest.raises(ss.SamestepError, match="was computed twice at step"):
        fit(model())


def test_a_counter_in_python_is_found_by_comparing(made):
    calls = itertools.count(1)
    with pytest.warns(UserWarning, match="it depends on more than its arguments"):
        fit(line(lambda x: x * (1 + next(calls) / 64)), rehearse=False, check_every=None)
    assert made == []


def test_a_spot_check_sees_behind_a_recording(made):
    """It computes by operations, so what has changed since is found, though the recording hides it."""
    calls = itertools.count(1)
    model = line(lambda x: x * (1 + max(0, next(calls) - 80)))
    with pytest.raises(ss.SamestepError, match="was computed twice at step"):
        fit(model, max_epochs=40, check_every=1)
    assert made


def test_only_so_many_shapes_are_recorded(made, monkeypatch):
    monkeypatch.setattr(traced, "SHAPES", 2)
    numbers = np.random.default_rng(0)
    data = numbers.normal(size=(60, 6)).astype("float32"), numbers.integers(0, 3, 60)
    group = ss.Group(line(torch.tanh), shards=2, devices="cpu")
    for n in (8, 10, 12, 14) * 3:
        group.step(data[0][:n], data[1][:n], lr=0.1)
    assert len(made) == 2


def test_nothing_is_recorded_in_a_short_run(monkeypatch):
    monkeypatch.setattr(traced, "AFTER", 600)
    monkeypatch.setattr(traced.Traced, "_record", lambda *given: pytest.fail("recorded"))
    fit(line(torch.tanh))
