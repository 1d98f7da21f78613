"""data.train and data.test: they show themselves, and can be sliced, indexed and unpacked; what is left is as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sources import Table, X, Y, jitter
from torch.utils.data import DataLoader, TensorDataset

import samestep as ss
from samestep.data.examples import Arrays, Data
from samestep.data.source import Source
from samestep.errors import Invalid, WrongType
from samestep.models.torch import mlp

TENSORS = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
WHOLE = {"ids": X, "labels": Y}
KINDS: dict[str, Any] = {
    "arrays": lambda: (X, Y),
    "tensors": lambda: (torch.from_numpy(X), torch.from_numpy(Y)),
    "a source": Table,
    "items": lambda: TENSORS,
    "a loader": lambda: DataLoader(TENSORS, batch_size=16, shuffle=True),
}
KEYS: dict[str, Any] = {
    "a slice": slice(7, 30),
    "with a step": slice(40, 2, -3),
    "a list": [3, 5, 5, -1],
    "an array": np.array([9, 0]),
    "a mask": np.arange(50) % 7 == 2,
}


def fit(data: Any, **settings: Any) -> ss.Run:
    given = {"max_epochs": 2, "batch_size": 16, "shards": 3, "devices": 1, "progress": False} | settings
    return ss.Trainer(**given).fit(mlp((5, 4, 3), seed=1), data)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", KEYS)
def test_a_part_is_of_the_same_kind_and_has_the_chosen_examples(kind: str, key: str) -> None:
    whole = Data(KINDS[kind]()).train
    some = whole[KEYS[key]]
    assert type(some) is type(whole)
    x, y = some
    assert (np.asarray(x).tolist(), np.asarray(y).tolist()) == (X[KEYS[key]].tolist(), Y[KEYS[key]].tolist())
    assert (len(some), len(whole)) == (len(X[KEYS[key]]), 50)
    nested = some[1:]
    assert np.asarray(nested.batch[0]).tolist() == X[KEYS[key]][1:].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_one_example_is_numpy(kind: str) -> None:
    data = Data(KINDS[kind]())
    for i in (0, 5, -1, np.int64(7)):
        x, y = data.train[i]
        assert isinstance(x, np.ndarray)
        assert (x.tolist(), y) == (X[i].tolist(), Y[i])
    x, y = data.train[10:][5]
    assert (x.tolist(), y) == (X[15].tolist(), Y[15])
    with pytest.raises(IndexError, match="50"):
        data.train[50]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_on_a_part_has_the_bits_of_a_fit_on_those_examples(kind: str) -> None:
    data = Data(KINDS[kind]())
    run = fit(Data(data.train[10:40], data.train[40:]))
    assert run.fingerprints == fit(Data((X[10:40], Y[10:40]), (X[40:], Y[40:]))).fingerprints
    assert run.history[-1]["test_loss"] == fit(Data((X[10:40], Y[10:40]), (X[40:], Y[40:]))).history[-1]["test_loss"]
    assert fit(data.train[:30]).fingerprints == fit((X[:30], Y[:30])).fingerprints != run.fingerprints


def test_a_source_is_read_only_when_it_is_asked() -> None:
    class Noting(Table):
        def __init__(self) -> None:
            super().__init__()
            self.read: list[int] = []

        def __getitem__(self, indices: Any) -> Any:
            self.read += np.asarray(indices).tolist()
            return super().__getitem__(indices)

    source = Noting()
    some = Data(source).train[20:40][::2]
    assert (repr(some), len(some), source.read) == ("train: 10 examples, read from Noting", 10, [])
    some.fetch(np.array([0, 3]))
    assert source.read == [20, 26]


def test_views_of_arrays_and_files_are_not_copied(tmp_path: Path) -> None:
    assert np.shares_memory(Data((X, Y)).train[5:20].x, X)
    np.save(tmp_path / "x.npy", X)
    mapped = Data((tmp_path / "x.npy", Y)).train
    assert [mapped[5:].in_memory, mapped[[5, 6]].in_memory, mapped.in_memory] == [False, True, False]


def test_settings_and_names_go_along() -> None:
    data = Data((X, Y), (X, Y), transform=jitter, readers=2, pad=0, pad_to=4)
    new = Data(train=data.train[:20], test=data.train[20:])
    told = [
        (p.name, len(p), p.transform and p.transform.function, p.readers, p.pad, p.pad_to)
        for p in (new.train, new.test)
    ]
    assert told == [("train", 20, jitter, 2, 0, 4), ("test", 30, None, 2, 0, 4)]
    assert (data.train.name, data.train.transform.function) == ("train", jitter)
    assert Data(data.test[:3]).train.name == "train"
    source = Data(Table(), transform=jitter, readers=2).train[4:]
    assert (source.transform.function, source.readers) == (jitter, 2)


def test_a_part_of_a_source_is_known_by_the_indices() -> None:
    whole = Data(Table()).train
    order = np.r_[np.arange(48), 49, 48]
    parts = [whole, whole[:49], whole[1:], whole[::-1], whole[:], whole[order]]
    told = [str(part.identity()) for part in parts]
    assert len(set(told)) == len(told)
    assert str(whole[1:].identity()) == str(Data(Table()).train[1:].identity())
    assert "chosen" not in told[0]


def test_a_dictionary_is_not_unpacked() -> None:
    for given in (WHOLE, Table(X, Y)):
        train = Data(given).train if given is WHOLE else Data(Dictionaries()).train
        with pytest.raises(WrongType, match=r"^train is one dictionary, not a pair \(x, y\): take data\.train\.batch$"):
            _x, _y = train
        assert train[:4].batch["ids"].tolist() == X[:4].tolist()
        assert train[2]["labels"] == Y[2]


class Dictionaries(Table):
    def __getitem__(self, indices: Any) -> Any:
        return {"ids": X[indices], "labels": Y[indices]}


@pytest.mark.parametrize("key", [slice(9, 9), [], np.zeros(50, bool), np.zeros((2, 2), int)])
def test_no_examples_or_a_table_of_them_are_refused(key: Any) -> None:
    with pytest.raises(
        Invalid, match=r"^train\[\.\.\.\] must choose at least one example, along one axis, got shape \("
    ):
        Data((X, Y)).train[key]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ((np.zeros((60000, 1, 28, 28), "u1"), np.zeros(60000, int)), "train: 60,000 examples, x uint8 (1, 28, 28), y int64 ()"),
        ((torch.zeros(3, 4), torch.zeros(3, 1)), "train: 3 examples, x float32 (4,), y float32 (1,)"),
        (({"a": X, "b": Y}, Y), "train: 50 examples, x['a'] float32 (5,), x['b'] int64 (), y int64 ()"),
        (WHOLE, "train: 50 examples, ['ids'] float32 (5,), ['labels'] int64 ()"),
        (TENSORS, "train: 50 examples, read from TensorDataset"),
    ],
)  # fmt: skip
def test_examples_show_themselves(given: Any, line: str) -> None:
    assert repr(Data(given).train) == line


@pytest.mark.parametrize("kind", KINDS)
def test_head(kind: str) -> None:
    data = Data(KINDS[kind](), Data(KINDS[kind]()).train[:20])
    few, all_ = data.head(30), data.head(99)
    assert [repr(few), repr(all_)] == [
        "Data(train=30 examples, test=20 examples)",
        "Data(train=50 examples, test=20 examples)",
    ]
    assert fit(few).fingerprints == fit((X[:30], Y[:30])).fingerprints
    assert repr(Data(KINDS[kind]()).head(1)) == "Data(train=1 examples, test=None)"
    with pytest.raises(Invalid, match="^head: n must be at least 1, got n=0$"):
        data.head(0)


def test_kinds_are_told_apart() -> None:
    assert isinstance(Data((X, Y)).train[:3], Arrays)
    assert isinstance(Data(Table()).train[:3], Source)
