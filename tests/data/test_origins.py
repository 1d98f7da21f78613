"""Loaders, Hugging Face datasets, NumPy files, and items of unequal lengths: what is read, and what is refused."""

from __future__ import annotations

import copy
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sources import Table, X, Y
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
CUT = "train: this DataLoader has a batch_sampler, or batch_size=None"
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
        (DataLoader(TENSORS, batch_sampler=Pairs(SequentialSampler(TENSORS), 2, False)), f"{CUT}: {ORDER}"),
        (DataLoader(TENSORS, batch_sampler=BatchSampler(RandomSampler(TENSORS), 20, False)), f"{CUT}: {ORDER}"),
        (DataLoader(TENSORS, batch_size=None), f"{CUT}: {ORDER}"),
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


GIVE = "train: its collate_fn must give a pair (x, y) or a dictionary, but it raised "


@pytest.mark.parametrize(
    ("dataset", "collate", "line"),
    [
        (TENSORS, lambda items: items[0]["q"], f"{GIVE}TypeError: tuple indices must be integers or slices, not str"),
        (TENSORS, lambda items: 3, f"{GIVE}TypeError: cannot unpack non-iterable int object"),
        (TENSORS, lambda items: (X[0], 1), f"{GIVE}TypeError: len() of unsized object"),
        (Subset(TENSORS, [0, 99]), collated, "train[i] must give a pair (x, y), of one shape and type for all i, but Subset "
         "raised IndexError: index 99 is out of bounds for dimension 0 with size 50"),
    ],
)  # fmt: skip
def test_an_error_in_a_collate_fn_names_it(dataset: Any, collate: Any, line: str) -> None:
    with pytest.raises(WrongType) as caught:
        Source("train", DataLoader(dataset, collate_fn=collate)).read(np.arange(2))
    where = rf" \(test_origins.py, line {collate.__code__.co_firstlineno}\)"
    assert re.fullmatch(f"{re.escape(line)}({where})?", str(caught.value))
    assert bool(re.search(where, str(caught.value))) == ("tuple indices" in line)  # where the user's own line raised it


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


# TensorFlow, in a process of its own

INDEXED = """
import numpy as np, keras, tensorflow as tf, samestep as ss
x, y = np.random.default_rng(0).standard_normal((2, 40, 5)).astype("f4"), np.arange(40) % 3
rows = tf.data.Dataset.from_tensor_slices((x[0], y))
def checked(x, y):
    tf.debugging.assert_less(y, tf.constant(1, tf.int64), "a label of mine")
    return x, y
for dataset in (rows.enumerate().map(lambda i, pair: pair), rows.map(checked)):
    try:
        ss.Data(dataset).train.read(np.array([1]))
    except TypeError as error:
        print(error)
def fit(train, test):
    keras.utils.set_random_seed(0)
    a, b = keras.Input((5,), name="a"), keras.Input((5,), name="b")
    model = keras.Model({"a": a, "b": b}, keras.layers.Dense(3)(a) - keras.layers.Dense(3)(b))
    run = ss.Trainer(max_epochs=2, batch_size=16, shards=3, devices=2, progress=False).fit(model, ss.Data(train, test))
    return run.fingerprint, run.history[-1]["test_loss"]
ab, ba = ({"a": x[0], "b": x[1]}, y), ({"b": x[1], "a": x[0]}, y)
class Turned:
    def __len__(self):
        return 40
    def __getitem__(self, i):
        return {key: both[i] for key, both in (ab if i[0] % 2 else ba)[0].items()}, y[i]
print(fit(ab, ab) == fit(ab, ba) == fit(Turned(), Turned()))
"""


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow")
def test_tensorflow_tells_what_it_cannot_index_and_takes_arrays_by_name() -> None:
    ran = subprocess.run([sys.executable, "-c", INDEXED], capture_output=True, text=True, check=False)
    cannot = (
        "train: TensorFlow cannot index this tf.data.Dataset (it has no elements by index): pass arrays or a source"
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    refused, raised, same = ran.stdout.splitlines()
    assert refused == cannot
    assert raised.startswith("train[1]: it raised InvalidArgumentError: ")
    assert "a label of mine" in raised
    assert same == "True"


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


class Lists(Dataset):  # type: ignore[type-arg]
    """IDS in lists, in pairs and tuples, or after another key."""

    def __init__(self, give: Any) -> None:
        self.give = give

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        return self.give(i)


@pytest.mark.parametrize("read", [[2], [2, 2], [1, 2], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("transform", [None, lambda *given: given[0] if len(given) == 2 else given[:2]])
@pytest.mark.parametrize(
    "dataset",
    [
        Columns(ids=IDS),
        Columns(ids=[IDS[2], *IDS[1:]]),
        Lists(lambda i: {"ids": IDS[i]}),
        Lists(lambda i: {"ids": IDS[i], "more": np.float32(i)} if i else {"more": np.float32(i), "ids": []}),
        Lists(lambda i: ((np.float32(i), IDS[i]), i)),
    ],
    ids=["columns", "first is empty", "lists", "another order", "tuples"],
)
def test_an_empty_list_has_the_type_of_the_others(dataset: Any, transform: Any, read: list[int]) -> None:
    """Whichever examples are in its shard, and whoever reads it."""
    source = Data(dataset, pad=0, transform=transform).train
    for copied in (source, copy.copy(source)):
        x, y = copied.read(np.array(read))
        ids, others = (x["ids"], x.get("more", np.float32())) if y is x else (x[1], x[0])
        assert (ids.dtype, others.dtype) == (np.int64, np.float32)
        assert ids.shape == (len(read), max(len(dataset_ids(dataset, i)) for i in read))


def dataset_ids(dataset: Any, i: int) -> Any:
    if isinstance(dataset, Columns):
        return dataset.columns["ids"][i]
    given = dataset[i]
    return given["ids"] if isinstance(given, dict) else given[0][1]


def test_lists_that_are_empty_in_all_examples_stay_as_they_are() -> None:
    x, _ = Data(Columns(ids=IDS, none=[[]] * 4), pad=0).train.read(np.array([2]))
    assert (x["ids"].dtype, x["none"].dtype, x["none"].shape) == (np.int64, np.float32, (1, 0))


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


WHOLE = "is for items read one by one, and these are whole batches: pad them first"


@pytest.mark.parametrize(
    ("train", "settings", "line"),
    [
        ((X, Y), {"pad": 0}, f"pad=0 {WHOLE}"),
        (Table(), {"pad": {"x": 1}}, f"pad={{'x': 1}} {WHOLE}"),
        (DataLoader(TENSORS, 16, collate_fn=collated), {"pad": 0, "pad_to": 64}, f"pad=0 {WHOLE}"),
        (TENSORS, {"pad_to": 8}, "pad_to=8 needs pad, the number to fill up with, such as pad=0"),
        (TENSORS, {"pad": {"y": 0, "zz": 0}}, "pad must name parts of train (x, y), got pad={'y': 0, 'zz': 0}"),
        (Columns(ids=IDS), {"pad": {"id": 0}}, "pad must name parts of train (ids), got pad={'id': 0}"),
    ],
)  # fmt: skip
def test_padding_that_would_do_nothing_is_refused(train: Any, settings: dict[str, Any], line: str) -> None:
    with pytest.raises(Invalid) as caught:
        Data(train, **settings).train.read(np.arange(1))
    assert str(caught.value) == line


def test_padding_may_be_for_one_of_the_two_and_for_what_a_transform_makes() -> None:
    assert Data((X, Y), TENSORS, pad=0).test.pad == Data(TENSORS, (X, Y), pad=0).train.pad == 0
    data = Data(
        {"ids": X}, {"ids": X}, transform=lambda b, rng: b | {"n": b["ids"][: rng.integers(1, 4)]}, pad={"n": 0}
    )
    assert data.train.read(np.arange(9))[0]["n"].shape == (9, 3)
    assert data.test.read(np.arange(9))[0].keys() == {"ids"}
    data = Data(Columns(ids=IDS[:1] * 4), transform=lambda b, rng: b | {"n": b["ids"]}, pad={"n": 0})
    assert data.train.identity()["sample"]  # looks at them as they are before the transform


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
        WrongType,
        match=r"^train must be a pair \(x, y\) or one dictionary of arrays, got an array alone: train=\(x, y\)$",
    ):
        Data(tmp_path / "x.npy")
