"""transform: what is drawn for an example depends on seed, epoch and index alone, whoever reads it; readers: who reads."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import numpy as np
import pytest
import torch
from sources import Table, X, Y, jitter
from torch.utils.data import DataLoader, TensorDataset

import samestep as ss
from samestep import draws
from samestep.backends.torch.backend import backend
from samestep.data import feed as feeding
from samestep.data.examples import Data
from samestep.data.feed import READ_AHEAD, Feed
from samestep.devices import cpu
from samestep.errors import NotRepeatable, WrongType
from samestep.models.torch import mlp

TENSORS = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))


def fit(data: Any, **settings: Any) -> ss.Run:
    given = {"max_epochs": 2, "batch_size": 16, "shards": 3, "devices": 1, "progress": False} | settings
    return ss.Trainer(**given).fit(mlp((5, 4, 3), seed=1), data)


def by_hand(seed: int, epoch: int, indices: Any) -> Any:
    drawn = [draws.example(seed, epoch, i).standard_normal(5).astype(np.float32) for i in indices]
    return X[indices] + np.stack(drawn)


def read(data: Data, order: Any, size: int, epoch: int = 0, seed: int = 0) -> Any:
    """x of all examples, in their own order, read in shards of a size."""
    feed = Feed(backend, data.train, [cpu()], None, seed)
    spans = [(i, min(i + size, len(order))) for i in range(0, len(order), size)]
    try:
        pass_ = feed.start(np.asarray(order), spans, epoch)
        pass_.prepare(spans)
        x = np.concatenate([pass_.shard(span, cpu())[0].numpy() for span in spans])
    finally:
        feed.close()
    assert not feed.resident
    return x[np.argsort(order)]


WAYS: dict[str, Any] = {
    "arrays": lambda readers: Data((X, Y), transform=jitter, readers=readers),
    "tensors": lambda readers: Data((torch.from_numpy(X), Y), transform=jitter, readers=readers),
    "a source": lambda readers: Data(Table(), transform=jitter, readers=readers),
    "items": lambda readers: Data(TENSORS, transform=jitter, readers=readers),
    "a loader": lambda readers: Data(
        DataLoader(TENSORS, collate_fn=torch.utils.data.default_collate), transform=jitter
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("readers", [None, 0])
def test_an_example_is_the_same_whoever_reads_it(way: str, readers: int | None) -> None:
    data = WAYS[way](readers)
    for seed, epoch in ((0, 0), (0, 1), (7, 0)):
        expected = by_hand(seed, epoch, range(50))
        for order, size in ((draws.order(0, 0, 50), 7), (np.arange(50), 50)):
            assert (read(data, order, size, epoch, seed=seed) == expected).all()


@pytest.mark.parametrize("way", ["arrays", "a source", "items"])
def test_in_worker_processes_too(way: str) -> None:
    assert (read(WAYS[way](2), draws.order(0, 0, 50), 7, 3) == by_hand(0, 3, range(50))).all()


def test_no_two_draws_are_alike() -> None:
    places = [(s, e, i) for s in range(3) for e in range(3) for i in range(50)]
    assert len({draws.example(*place).bytes(8) for place in places}) == len(places)
    assert draws.example(1, 2, 3).bytes(64) == draws.example(1, 2, 3).bytes(64)


def test_a_fit_is_the_same_on_any_devices_and_with_any_readers() -> None:
    plain = fit(Data((X, Y), (X[:11], Y[:11])))
    run = fit(Data((X, Y), (X[:11], Y[:11]), transform=jitter))
    assert run.fingerprint != plain.fingerprint
    for data, settings in (
        (Data(TENSORS, (X[:11], Y[:11]), transform=jitter), {"devices": 3}),
        (Data(Table(), Table(X[:11], Y[:11]), transform=jitter, readers=0), {"devices": 2}),
        (Data((X, Y), (X[:11], Y[:11]), transform=jitter, readers=3), {}),
    ):
        other = fit(data, **settings)
        assert other.fingerprints == run.fingerprints
        assert other.history[-1]["test_loss"] == run.history[-1]["test_loss"]  # test examples are not transformed


def test_a_fit_trains_on_what_was_drawn_for_its_epochs() -> None:
    seen: dict[float, Any] = {}

    def noting(x: Any, y: Any, rng: Any) -> Any:
        x, y = jitter(x, y, rng)
        seen[float(x[0])] = x
        return x, y

    fit(Data((X, Y), transform=noting), seed=5)
    wanted = {row.tobytes() for epoch in (0, 1) for row in by_hand(5, epoch, range(50))}
    assert wanted <= {row.tobytes() for row in seen.values()}
    assert len(seen) <= 100 + 1  # and what the first example is for the model to be looked at


def test_a_dictionary_is_given_and_taken_as_one() -> None:
    def moved(batch: Any, rng: Any) -> Any:
        batch["ids"] += rng.integers(10)
        return {"ids": batch["ids"], "half": batch["labels"] / 2}

    ids = np.arange(100).reshape(50, 2)
    data = Data({"ids": ids, "labels": Y}, transform=moved)
    x, y = data.train.read(np.array([4, 2, 4]), 0, 1)
    shift = [draws.example(0, 1, i).integers(10) for i in (4, 2, 4)]
    assert y is x
    assert x["ids"].tolist() == [(ids[i] + n).tolist() for i, n in zip((4, 2, 4), shift, strict=True)]
    assert x["half"].tolist() == (Y[[4, 2, 4]] / 2).tolist()
    assert ids[4].tolist() == [8, 9]  # what a transform writes to is its own


def test_items_may_be_written_to() -> None:
    def zeroed(x: Any, y: Any, rng: Any) -> Any:
        x[:] = 0
        return x, y

    before = X.copy()
    assert not Data(TENSORS, transform=zeroed).train.read(np.arange(4))[0].any()
    assert (before == X).all()


def test_transformed_examples_may_be_padded() -> None:
    def cropped(x: Any, y: Any, rng: Any) -> Any:
        return x[: 1 + y], y

    x, _ = Data((X, np.arange(50) % 3), transform=cropped, pad=7).train.read(np.arange(3))
    assert x.tolist() == [[X[0, 0], 7, 7], [*X[1, :2], 7], X[2, :3].tolist()]


@pytest.mark.parametrize(
    ("transform", "line"),
    [
        (lambda x, y, rng: x, "train: transform must give for (x, y, rng) a pair (x, y), got ndarray"),
        (lambda x, y, rng: (x, y, 1), "train: transform must give for (x, y, rng) a pair (x, y), got tuple"),
        (lambda x, y, rng: (x if y == Y[0] else x[:2], y), "train x must be of one shape in all examples, got "),
        (
            lambda x, y, rng: (x.astype("f8") if y else x, y),
            "train: transform must give one type for all examples, but: ",
        ),
        (lambda x, y, rng: (x, "a"), "train y must be numbers, got text: remove it, or encode it as numbers"),
    ],
)
def test_a_wrong_transform_is_told_in_one_line(transform: Any, line: str) -> None:
    with pytest.raises(WrongType) as caught:
        fit(Data((X, Y), transform=transform))
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
    with pytest.raises(WrongType, match=r"^train: transform must give for \(batch, rng\) a dictionary, got list$"):
        Data({"x": X}, transform=lambda batch, rng: [batch]).train.read(np.arange(1))


@pytest.mark.parametrize(
    ("train", "transform", "line"),
    [
        ((X, Y), lambda x, y: (x, y), "(x, y, rng), but: too many positional arguments"),
        (TENSORS, lambda batch, rng: batch, "(x, y, rng), but: too many positional arguments"),
        ({"x": X}, lambda x, y, rng: (x, y), "(batch, rng), but: missing a required argument: 'rng'"),
        (Table(), lambda x, y, *, rng: (x, y), "(x, y, rng), but: too many positional arguments"),
    ],
)
def test_a_transform_of_another_form_is_told_in_one_line(train: Any, transform: Any, line: str) -> None:
    with pytest.raises(WrongType) as caught:
        Data(train, transform=transform).train.read(np.arange(2))
    assert str(caught.value) == f"train: transform must take {line}"


def test_a_transform_without_a_signature_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    real = inspect.signature
    with pytest.raises(ValueError, match="no signature"):
        real(max)
    monkeypatch.setattr("samestep.data.transform.inspect.signature", lambda function: real(max))
    assert (Data((X, Y), transform=lambda x, y, rng: (x + 1, y)).train.read(np.arange(2))[0] == X[:2] + 1).all()


def test_shards_of_different_shapes_are_refused() -> None:
    data = Data((X, np.arange(50) % 2), transform=lambda x, y, rng: (x[: 1 + y], y))
    with pytest.raises(
        WrongType, match=r"^train must have examples of one shape, got x of \(1,\) with y of \(\) and x of"
    ):
        read(data, np.arange(50), 1)


def test_an_error_of_a_transform_is_its_own() -> None:
    def broken(x: Any, y: Any, rng: Any) -> Any:
        raise ValueError("no such crop")

    with pytest.raises(ValueError, match=r"^no such crop$"):
        fit(Data(TENSORS, transform=broken))


def test_a_transform_that_draws_elsewhere_is_noticed() -> None:
    """The broken twin."""
    random = np.random.default_rng(0)
    with pytest.raises(NotRepeatable, match=r"example \d+ of train is not the same"):
        fit(Data((X, Y), transform=lambda x, y, rng: (x + random.random(dtype=np.float32), y)))


def test_the_code_of_a_transform_is_in_the_recipe() -> None:
    def shifted(by: float) -> Any:
        def shift(x: Any, y: Any, rng: Any) -> Any:
            return x + np.float32(by), y

        return shift

    code = [
        fit(Data((X, Y), transform=f), max_epochs=1).recipe["code"] for f in (shifted(1), shifted(1), shifted(2), None)
    ]
    assert code[0] == code[1] != code[2]
    assert {"transform", "shift()"} <= code[0].keys() - code[3].keys()


def test_a_transform_that_no_worker_can_get_is_run_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding.os, "cpu_count", lambda: 3)
    for given, who in ((Table(), "one thread reads"), ((X, Y), "3 threads read")):
        data = Data(given, transform=lambda x, y, rng: jitter(x, y, rng), readers=2)
        line = f"^readers=2: {who} train instead, as no other process can get it"
        with pytest.warns(UserWarning, match=line):
            assert (read(data, np.arange(50), 9) == by_hand(0, 0, range(50))).all()


# Readers


class Noting(Table):
    """Notes which threads read, and how many at a time if they wait for each other."""

    def __init__(self, together: int = 1) -> None:
        super().__init__()
        self.threads, self.most, self.ahead = set[str](), 0, 0
        self.barrier = threading.Barrier(together, timeout=60)

    def __getitem__(self, indices: Any) -> Any:
        self.barrier.wait()
        self.threads.add(threading.current_thread().name)
        return super().__getitem__(indices)


def test_no_readers_the_thread_of_the_fit_reads_all() -> None:
    train, test = Noting(), Noting()
    run = fit(Data(train, test, readers=0), devices=2, check_every=1)
    assert train.threads == test.threads == {threading.current_thread().name}
    assert run.fingerprint == fit((X, Y)).fingerprint
    found = ss.Trainer(devices=2, shards=3, batch_size=16, progress=False).evaluate(
        mlp((5, 4, 3)), Data(test, readers=0)
    )
    assert found == ss.Trainer(devices=2, shards=3, batch_size=16, progress=False).evaluate(mlp((5, 4, 3)), (X, Y))
    assert test.threads == {threading.current_thread().name}


def test_an_evaluation_without_readers_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    prepare = ss.data.feed.Pass.prepare
    monkeypatch.setattr(
        ss.data.feed.Pass, "prepare", lambda self, spans: (pieces.append(len(spans)), prepare(self, spans))
    )
    ss.Trainer(shards=2, batch_size=2, devices=1, progress=False).evaluate(mlp((5, 4, 3)), Data(Table(), readers=0))
    assert pieces == [READ_AHEAD, 50 - READ_AHEAD]


@pytest.mark.parametrize("readers", [1, 3])
def test_so_many_threads_read_at_a_time(readers: int) -> None:
    source = Noting(readers)
    source.thread_safe = True  # type: ignore[attr-defined]
    feed = Feed(backend, Data(source, readers=readers).train, [cpu()], None)
    spans = [(i, i + 1) for i in range(2 * readers)]
    pass_ = feed.start(np.arange(50), spans)
    assert [pass_.shard(span, cpu())[0].tolist() for span in spans] == X[: 2 * readers, None].tolist()
    feed.close()
    assert source.threads == {f"samestep-read_{i}" for i in range(readers)}


def test_the_same_examples_may_be_in_other_data() -> None:
    """As they are, unless something is given anew; what is tested on is not transformed."""

    def told(part: Any) -> Any:
        return part.transform and part.transform.function, part.readers, part.pad, part.pad_to

    def other(x: Any, y: Any, rng: Any) -> Any:
        return x, y

    one = Data(Table(), TENSORS, transform=jitter, readers=2, pad=0, pad_to=4)
    assert told(Data(one.train).train) == told(one.train) == (jitter, 2, 0, 4)
    again = Data(one.train, one.train, transform=other, readers=0, pad=1)
    assert (told(again.train), told(again.test)) == ((other, 0, 1, 4), (None, 0, 1, 4))
    assert (again.train.transform.pad, again.train.transform.pad_to) == (1, 4)
    assert told(Data(one.test, pad_to=2).train) == (None, 2, 0, 2)
    assert (Data(one.train).train.read(np.arange(9), 0, 1)[0][:, :5] == by_hand(0, 1, range(9))).all()
    assert told(one.train) == (jitter, 2, 0, 4)
