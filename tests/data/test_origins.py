"""Loaders, Hugging Face datasets, NumPy files, and items of unequal lengths: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sources import X, Y
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import samestep as ss
from samestep.data.examples import Data, Source
from samestep.data.origins import HUGGING_FACE
from samestep.errors import DataUnavailable, Invalid, SamestepError, WrongType
from samestep.models.torch import mlp

TENSORS = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))


def fit(data: Any, **settings: Any) -> ss.Run:
    given = {"max_epochs": 2, "batch_size": 16, "shards": 3, "devices": 1, "progress": False} | settings
    return ss.Trainer(**given).fit(mlp((5, 4, 3), seed=1), data)


def collated(items: list[Any]) -> Any:
    return torch.stack([x for x, _ in items]), [int(y) for _, y in items]


def doubled(items: list[Any]) -> Any:
    return 2 * torch.stack([x for x, _ in items]), [int(y) for _, y in items]


# Loaders


@pytest.mark.parametrize(
    ("loader", "sampling"),
    [
        (DataLoader(TENSORS, 16, shuffle=True), "without_replacement"),
        (DataLoader(TENSORS, 16), "in_order"),
        (DataLoader(TENSORS, 16, sampler=RandomSampler(TENSORS, replacement=True)), "with_replacement"),
        (DataLoader(TENSORS, 16, shuffle=True, collate_fn=collated), "without_replacement"),
    ],
)
def test_a_loader_gives_what_its_dataset_gives(loader: DataLoader[Any], sampling: str) -> None:
    test = DataLoader(Subset(TENSORS, range(11)), 16, shuffle=True)  # the order of an evaluation is nobody's business
    data = Data(loader, test)
    assert data.train.loader == {"batch_size": 16, "sampling": sampling, "drop_last": False}
    run, plain = fit(data, sampling=sampling, devices=2), fit(Data((X, Y), (X[:11], Y[:11])), sampling=sampling)
    assert (run.fingerprint, run.history[-1]["test_loss"]) == (plain.fingerprint, plain.history[-1]["test_loss"])
    assert run.fingerprint != run.recipe["initial"]


def test_orders_are_orders() -> None:
    assert len({fit((X, Y), sampling=sampling).fingerprint for sampling in ss.draws.SAMPLINGS}) == 3


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"batch_size": 8}, "train: the DataLoader has batch_size=16 and the Trainer 8: use Trainer(batch_size=16), or pass "
         "its dataset instead of it"),
        ({"sampling": "in_order"}, "train: the DataLoader has sampling without_replacement and the Trainer in_order: use "
         "Trainer(sampling='without_replacement'), or pass its dataset instead of it"),
    ],
)  # fmt: skip
def test_a_loader_of_other_batches_is_refused(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(Invalid) as caught:
        fit(DataLoader(TENSORS, 16, shuffle=True), **settings)
    assert str(caught.value) == line


def test_a_loader_that_drops_examples_is_refused() -> None:
    with pytest.raises(Invalid) as caught:
        fit(Data((X, Y), DataLoader(TENSORS, 16, drop_last=True)))
    how = "make it with drop_last=False, or pass its dataset instead of it"
    assert str(caught.value) == f"test: the DataLoader has drop_last=True, and samestep drops no example: {how}"


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter([])


class Mine(SequentialSampler):
    pass


class Pairs(BatchSampler):
    pass


ORDER = "pass its dataset: the Trainer draws the order of examples"
STREAM = "train must be read by index, not an IterableDataset: pass a map-style dataset or arrays"


@pytest.mark.parametrize(
    ("loader", "line"),
    [
        (Stream(), STREAM),
        (DataLoader(Stream()), STREAM),
        (DataLoader(TENSORS, sampler=Mine(TENSORS)), f"train: this DataLoader has an order of its own (Mine): {ORDER}"),
        (DataLoader(TENSORS, sampler=WeightedRandomSampler([1.0] * 50, 50)),
         f"train: this DataLoader has an order of its own (WeightedRandomSampler): {ORDER}"),
        (DataLoader(TENSORS, sampler=SubsetRandomSampler(range(50))),
         f"train: this DataLoader has an order of its own (SubsetRandomSampler): {ORDER}"),
        (DataLoader(TENSORS, batch_sampler=Pairs(SequentialSampler(TENSORS), 2, False)),
         f"train: this DataLoader has an order of its own (Pairs): {ORDER}"),
        (DataLoader(TENSORS, batch_size=None), f"train: this DataLoader has an order of its own (NoneType): {ORDER}"),
        (DataLoader(TENSORS, sampler=RandomSampler(TENSORS, num_samples=20)),
         f"train: this DataLoader draws 20 of 50 examples in an epoch: {ORDER}"),
    ],
)  # fmt: skip
def test_a_loader_whose_order_is_its_own_is_refused(loader: Any, line: str) -> None:
    with pytest.raises(WrongType) as caught:
        Data(loader)
    assert str(caught.value) == line


def test_a_collate_fn_that_drops_an_example_is_refused() -> None:
    source = Source("train", DataLoader(TENSORS, collate_fn=lambda items: collated(items[1:])))
    with pytest.raises(Invalid) as caught:
        source.read(np.arange(4))
    assert str(caught.value) == "train: its collate_fn was asked for 4 examples and gave 3 in x and 3 in y"


def test_a_collate_fn_and_what_pads_are_in_the_recipe() -> None:
    def recipe(collate: Any = None, **settings: Any) -> dict[str, Any]:
        return fit(Data(DataLoader(TENSORS, 16, shuffle=True, collate_fn=collate), **settings), max_epochs=1).recipe

    one, other = recipe(collated)["code"], recipe(doubled)["code"]
    assert one.keys() ^ other.keys() == {"collated()", "doubled()"}
    assert one["collate_fn of train"] != other["collate_fn of train"]
    plain, padded = recipe()["train"], recipe(pad=np.int32(0))["train"]
    assert padded == plain | {"pad": 0, "pad_to": 1}


def test_a_loader_may_have_any_list_of_examples_pictures_too() -> None:
    class Picture:
        __array_interface__ = X[3].__array_interface__

    items: Any = [(X[0], 1), (Picture(), 2)]
    x, y = Data(DataLoader(items, shuffle=True)).train.read(np.array([1, 0]))
    assert (x.tolist(), y.tolist()) == (X[[3, 0]].tolist(), [2, 1])


# Hugging Face


class Columns:
    """What a Hugging Face dataset is, as far as it is read: Python's numbers, lists and texts in dictionaries."""

    __module__ = HUGGING_FACE

    def __init__(self, **columns: list[Any]) -> None:
        self.columns, self._format_type, self._fingerprint = columns, "python", "f"

    def __len__(self) -> int:
        return 4

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [{name: column[i] for name, column in self.columns.items()} for i in indices]

    def __getitem__(self, indices: Any) -> Any:
        raise AssertionError("it gives columns, not examples")


IDS = [[1, 2, 3], [4], [], [5, 6]]


def test_lists_become_arrays() -> None:
    data = Data(Columns(ids=[[1, 2]] * 4, label=[0, 1, 2, 3], value=[0.5] * 4, box=[[[0.5, 1.0]]] * 4))
    x, y = data.train.read(np.array([2, 1]))
    assert y is x
    assert {name: (str(array.dtype), array.tolist()) for name, array in x.items()} == {
        "ids": ("int64", [[1, 2], [1, 2]]), "label": ("int64", [2, 1]), "value": ("float32", [0.5, 0.5]),
        "box": ("float32", [[[0.5, 1.0]]] * 2),
    }  # fmt: skip
    about = data.train.identity()
    assert about["version"] == "f"
    assert data.train.code()["train"][1] == {"_format_type": "python"}  # its columns may be a file of any size


def test_a_column_of_texts_is_named() -> None:
    with pytest.raises(WrongType) as caught:
        Data(Columns(ids=[1] * 4, text=["a"] * 4)).train.read(np.arange(2))
    assert str(caught.value) == "train['text'] must be numbers, got text: remove it, or encode it as numbers"


# Unequal lengths


@pytest.mark.parametrize(
    ("settings", "indices", "ids"),
    [
        ({"pad": 0}, [0, 1, 2], [[1, 2, 3], [4, 0, 0], [0, 0, 0]]),
        ({"pad": {"ids": -1}}, [3, 1], [[5, 6], [4, -1]]),
        ({"pad": 0, "pad_to": 4}, [1, 3], [[4, 0, 0, 0], [5, 6, 0, 0]]),
        ({"pad": 0, "pad_to": 4}, [1], [[4, 0, 0, 0]]),
        ({"pad": 0, "pad_to": 3}, [0, 0], [[1, 2, 3], [1, 2, 3]]),
        ({"pad": 0}, [1], [[4]]),
    ],
)
def test_a_shard_is_filled_up_to_its_longest(settings: dict[str, Any], indices: list[int], ids: list[Any]) -> None:
    data = Data(Columns(ids=IDS, label=[0, 1, 2, 3]), **settings)
    x, _ = data.train.read(np.array(indices))
    assert (x["ids"].tolist(), x["label"].tolist()) == (ids, indices)
    assert x["ids"].dtype == np.int64
    assert data.train.identity()["sample"]  # also if four examples are shorter than all that are looked at


class Ragged(Dataset):  # type: ignore[type-arg]
    """Items whose axes differ: x of (1..3, 2) and (2, 1..3), y of any type."""

    def __init__(self, y: Any = np.float32) -> None:
        self.y = y

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        n = 1 + i % 3
        return (torch.full((n, 2), 1.0), np.full((2, n), 2, np.int32)), np.full(n, 3, self.y)


def test_any_axis_is_filled_up_and_y_by_its_own_name() -> None:
    (one, other), y = Data(Ragged(), pad={"x": 9, "y": -1}).train.read(np.array([0, 1]))
    assert one.tolist() == [[[1, 1], [9, 9]], [[1, 1], [1, 1]]]
    assert other.tolist() == [[[2, 9], [2, 9]], [[2, 2], [2, 2]]]
    assert y.tolist() == [[3, -1], [3, 3]]
    assert (one.dtype, other.dtype, y.dtype) == (np.float32, np.int32, np.float32)
    rounded = Data(Ragged(), pad=9, pad_to=4).train.read(np.array([0, 1]))[0]
    assert [array.shape for array in rounded] == [(2, 4, 2), (2, 4, 4)]  # the first axis, and those that differ


class Mean(torch.nn.Module):
    """Takes any number of rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = torch.nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.dense(x).mean(1)
        return out


class Sentences(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        return X[i : i + 1 + i % 7], int(Y[i])


def test_a_fit_on_unequal_lengths_is_the_same_on_any_devices() -> None:
    def run(devices: int, **settings: Any) -> str:
        trainer = ss.Trainer(max_epochs=2, batch_size=16, shards=3, devices=devices, progress=False)
        return trainer.fit(Mean(), Data(Sentences(), Sentences(), pad=0, **settings)).fingerprint

    assert run(1) == run(2) == run(3, readers=0) != run(1, pad_to=8)


@pytest.mark.parametrize(
    ("dataset", "settings", "line"),
    [
        (Ragged(), {}, "train x[0] must be of one shape in all examples, got (1, 2) and (2, 2): Data(pad=...) fills up the "
         "shorter ones"),
        (Ragged(), {"pad": {"x": 0}}, "train y must be of one shape in all examples, got (1,) and (2,): Data(pad=...) fills "
         "up the shorter ones"),
        (Ragged(), {"pad": 0.5}, "train x[1] is of int32, which cannot hold pad=0.5: use another one, or convert it"),
        (Ragged(np.bool_), {"pad": 2}, "train y is of bool, which cannot hold pad=2: use another one, or convert it"),
        (Ragged(), {"pad": float("nan")}, "train x[1] is of int32, which cannot hold pad=nan: use another one, or convert it"),
        (Columns(ids=IDS), {"pad": {"id": 0}}, "train['ids'] must be of one shape in all examples, got (1,) and (0,): "
         "Data(pad=...) fills up the shorter ones"),
    ],
)  # fmt: skip
def test_unequal_lengths_are_refused(dataset: Any, settings: dict[str, Any], line: str) -> None:
    indices = np.array([0, 1]) if isinstance(dataset, Ragged) else np.array([1, 2])
    with pytest.raises(SamestepError) as caught:
        Data(dataset, **settings).train.read(indices)
    assert str(caught.value) == line


def test_what_pads_is_checked() -> None:
    for pad in ("0", {"ids": None}, [0], [], {"ids": [0]}):
        with pytest.raises(WrongType, match=r"^pad must be a number, or numbers by key, got pad="):
            Data((X, Y), pad=pad)  # type: ignore[arg-type]
    with pytest.raises(Invalid, match=r"^pad_to must be at least 1, got pad_to=0$"):
        Data((X, Y), pad_to=0)
    with pytest.raises(WrongType, match=r"^readers must be a whole number, got readers='all'$"):
        Data((X, Y), readers="all")  # type: ignore[arg-type]
    with pytest.raises(WrongType, match=r"^transform must be a function of \(x, y, rng\), got 3$"):
        Data((X, Y), transform=3)  # type: ignore[arg-type]


# Files


def test_numpy_files(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    np.savez(tmp_path / "pair.npz", y=Y, x=X)
    np.savez(tmp_path / "more.npz", ids=X, y=Y, x=X)
    pair = Data(train=(str(tmp_path / "x.npy"), Y), test=tmp_path / "pair.npz")
    assert isinstance(pair.train.x, np.memmap)
    for examples in (pair.train, pair.test):
        x, y = examples.read(np.array([7, 3]))
        assert (x.tolist(), y.tolist()) == (X[[7, 3]].tolist(), Y[[7, 3]].tolist())
    x, y = Data(tmp_path / "more.npz").train.read(np.array([7, 3]))
    assert y is x
    assert (x["ids"].tolist(), x["y"].tolist()) == (X[[7, 3]].tolist(), Y[[7, 3]].tolist())
    assert fit(pair).fingerprint == fit((X, Y)).fingerprint


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("1, 2, 3")
    (tmp_path / "empty.npy").touch()
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 and no more")
    np.save(tmp_path / "objects.npy", np.array([{}, {}]))
    for name in ("text", "empty.npy", "broken.npz", "objects.npy", "missing.npy"):
        with pytest.raises(DataUnavailable) as caught:
            Data((tmp_path / name, Y))
        wanted = "must be a NumPy file (.npy or .npz) without Python objects, but: "
        assert str(caught.value).startswith(f"train: {tmp_path / name} {wanted}")
        assert "\n" not in str(caught.value)
    np.save(tmp_path / "x.npy", X)
    assert Data((X, Y), test=(tmp_path / "x.npy", Y)).test
    with pytest.raises(
        WrongType, match=r"^train must be a pair \(x, y\) or one dictionary of arrays, got an array alone$"
    ):
        Data(tmp_path / "x.npy")
