"""Examples in tuples, lists and dictionaries: every kind gives devices the same bits; what is wrong is named by its place."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import samestep as ss
from samestep import draws
from samestep.backends.torch.backend import backend
from samestep.data.examples import Data
from samestep.data.feed import Feed
from samestep.data.origins import HUGGING_FACE
from samestep.devices import Device, cpu, gpu
from samestep.errors import DevicesDiffer, Invalid, SamestepError, WrongType
from samestep.trees import leaves, mapped

N = 20
IDS = np.arange(2 * N, dtype=np.int32).reshape(N, 2)
IMAGE = np.random.default_rng(0).standard_normal((N, 3)).astype(np.float32)
SMALL = np.arange(N, dtype=np.uint8)
PAIR = ({"ids": IDS, "more": (IMAGE, SMALL)}, [SMALL, IMAGE])
WHOLE = {"ids": IDS, "labels": SMALL, "in": {"side": IMAGE}}
SPANS = [(0, 7), (7, 8), (8, N)]
ORDER = draws.order(3, 0, N)


class Store:
    """A source with [indices]."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return N

    def __getitem__(self, indices: Any) -> Any:
        return mapped(lambda array: array[indices], self.batch)


class Items(Store, Dataset):  # type: ignore[type-arg, misc]
    """A map-style dataset: one example per index."""


def loader(batch: Any, collate: Any) -> Any:
    return DataLoader(Items(batch), collate_fn=collate)


def by_hand(items: list[Any]) -> Any:
    """A collate_fn."""
    return mapped(lambda *parts: torch.from_numpy(np.stack(parts)), *items)


def on_disk(folder: Path, batch: Any) -> Any:
    """The names of files in place of arrays."""
    number = iter(range(99))

    def saved(array: Any) -> Any:
        path = folder / f"{next(number)}.npy"
        np.save(path, array)
        return path

    return mapped(saved, batch)


KINDS: dict[str, Callable[[Any, Path], Any]] = {
    "arrays": lambda batch, _: batch,
    "tensors": lambda batch, _: mapped(torch.from_numpy, batch),
    "files": lambda batch, folder: on_disk(folder, batch),
    "a source": lambda batch, _: Store(batch),
    "a source of tensors": lambda batch, _: Store(mapped(torch.from_numpy, batch)),
    "items": lambda batch, _: Items(batch),
    "items of tensors": lambda batch, _: Items(mapped(torch.from_numpy, batch)),
    "a loader": lambda batch, _: loader(batch, None),
    "a loader with a collate_fn": lambda batch, _: loader(batch, by_hand),
}


def told(tree: Any) -> Any:
    return mapped(lambda array: (str(array.dtype).removeprefix("torch."), array.tolist()), tree)


def given(data: Data, epoch: int = 0, spans: Any = SPANS, **settings: Any) -> list[Any]:
    """What a device gets, shard by shard."""
    feed = Feed(backend, data.train, [cpu()], None, **settings)
    try:
        pass_ = feed.start(ORDER, spans, epoch)
        pass_.prepare(spans)
        return [pass_.shard(span, cpu()) for span in spans]
    finally:
        feed.close()


def labels(array: Any) -> Any:
    return array.astype(np.int64) if array.dtype.kind in "iu" else array


@pytest.mark.parametrize(
    ("kind", "readers"),
    [*itertools.product(KINDS, [None, 0]), ("files", 3), ("items", 3), ("a loader with a collate_fn", 3)],
)
def test_devices_get_a_pair_of_trees(kind: str, readers: int | None, tmp_path: Path) -> None:
    shards = given(Data(KINDS[kind](PAIR, tmp_path), readers=readers))
    for (x, y), (lo, hi) in zip(shards, SPANS, strict=True):
        rows = mapped(lambda array, at=ORDER[lo:hi]: array[at], PAIR)
        assert (told(x), told(y)) == (told(rows[0]), told(mapped(labels, rows[1])))
        assert all(isinstance(leaf, torch.Tensor) for leaf in leaves((x, y)))


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_dictionary_with_its_labels_x_and_y_are_one(kind: str, tmp_path: Path) -> None:
    for (x, y), (lo, hi) in zip(given(Data(KINDS[kind](WHOLE, tmp_path))), SPANS, strict=True):
        assert y is x
        assert told(x) == told(mapped(lambda array, at=ORDER[lo:hi]: array[at], WHOLE))


class Putting:
    """Counts what is put on a device and gathered there."""

    def __init__(self) -> None:
        self.put_, self.taken = 0, 0

    def put(self, array: Any, device: Device) -> Any:
        self.put_ += 1
        return array

    def index(self, order: Any, device: Device) -> Any:
        return order

    def take(self, array: Any, index: Any) -> Any:
        self.taken += 1
        return array[index]


@pytest.mark.parametrize(("batch", "arrays"), [(PAIR, 5), (WHOLE, 3)], ids=["pair", "dictionary"])
def test_every_array_is_put_and_gathered_once(batch: Any, arrays: int) -> None:
    counting: Any = Putting()
    feed = Feed(counting, Data(batch).train, [cpu(), cpu()], None)
    feed.start(ORDER, SPANS).shard(SPANS[0], cpu())
    assert (counting.put_, counting.taken) == (arrays, arrays)


def test_labels_are_checked_where_the_default_loss_takes_them() -> None:
    """A label of -100 at a position does not count; in one row of labels it is a mistake."""
    row, some = np.arange(N) % 3, np.where(np.arange(2 * N).reshape(N, 2) % 4 < 2, -100, 2)
    for y in (row, some, [SMALL], {"labels": some}, {"other": SMALL}):
        assert Feed(backend, Data((IMAGE, y)).train, [cpu()], 3).resident
    for wrong in (row + 1, row - 100, some + 1, {"labels": some + 1}):
        with pytest.raises(Invalid, match="^train y: labels must be from 0 to 2"):
            Feed(backend, Data((IMAGE, wrong)).train, [cpu()], 3)


# Identity


def test_the_identity_of_a_plain_pair_is_what_it_has_always_been() -> None:
    digest = hashlib.sha256(IMAGE.tobytes() + IDS.tobytes()).hexdigest()
    about = {"examples": N, "x": [N, 3], "y": [N, 2], "type": "float32", "sha256": digest}
    assert repr(Data((IMAGE, IDS)).train.identity()) == repr(about)


def test_the_identity_of_trees() -> None:
    about = Data(WHOLE).train.identity()
    assert list(about) == ["examples", "arrays", "sha256"]
    assert about["arrays"] == {
        "['ids']": [N, 2, "int32"],
        "['labels']": [N, "uint8"],
        "['in']['side']": [N, 3, "float32"],
    }
    assert Data(mapped(torch.from_numpy, WHOLE)).train.identity() == about
    assert list(Data(PAIR).train.identity()["arrays"])[:2] == ["x['ids']", "x['more'][0]"]  # type: ignore[call-overload]
    others = [
        WHOLE | {"labels": SMALL + 1}, WHOLE | {"in": {"side": IMAGE + 1}}, {"id": IDS, "labels": SMALL, "in": WHOLE["in"]},
        (WHOLE, SMALL), WHOLE | {"labels": SMALL.view(np.int8)},
    ]  # fmt: skip
    assert all(Data(other).train.identity() != about for other in others)
    samples = {Data(Store(other)).train.identity()["sample"] for other in (WHOLE, *others[:4])}
    assert len(samples) == 5


# What is refused


class Frame:
    """What a DataFrame is, as far as it is looked at."""

    shape, __getitem__, __len__, to_numpy = (N, 3), IMAGE.__getitem__, IMAGE.__len__, IMAGE.copy


class Rows(Frame):
    __module__ = HUGGING_FACE


PAD = "(pad is for items that are read one by one)"
LINES: list[tuple[Any, type[SamestepError], str]] = [
    (({"a": IMAGE, "b": IDS[1:]}, SMALL), Invalid,
     f"train: all arrays must be of one length, got 20 in y and 19 in x['b'] {PAD}"),
    (([IMAGE, IDS], SMALL[:9]), Invalid, f"train: all arrays must be of one length, got 20 in x[1] and 9 in y {PAD}"),
    ({"a": IMAGE, "b": IDS[1:]}, Invalid, f"train: all arrays must be of one length, got 20 in ['a'] and 19 in ['b'] {PAD}"),
    (([IMAGE[:n] for n in range(1, N)], SMALL), Invalid,
     f"train: all arrays must be of one length, got 1 in x[0] and 2 in x[1] {PAD}"),
    (({"a": [1.0, 2.0]}, SMALL), WrongType, "train x['a'] must be an array, got list: convert it with np.asarray"),
    (({"a": None}, SMALL), WrongType, "train x['a'] must be an array, got NoneType: convert it with np.asarray"),
    ((IMAGE, {"a": np.float32(1)}), Invalid, "train y['a'] must have one row per example, got a single number"),
    ({"a": IMAGE, "text": np.array(["a"] * N)}, WrongType,
     "train['text'] must be numbers, got an array of <U1: convert it, or encode it as numbers"),
    ({}, WrongType, "train must be an array, or hold arrays, got {}"),
    ((IMAGE, ()), WrongType, "train y must be an array, or hold arrays, got ()"),
    (({"a": {}, "b": IMAGE}, SMALL), WrongType, "train x['a'] must be an array, or hold arrays, got {}"),
    ((IMAGE, {"a": [SMALL, []]}), WrongType, "train y['a'][1] must be an array, or hold arrays, got []"),
    ((Frame(), SMALL), WrongType, "train x must be an array, got Frame: convert it with to_numpy()"),
    ({"train": Rows(), "test": Rows()}, WrongType,
     "train['train'] must be an array, got Rows: pass one dataset alone, such as dataset['train']"),
    (((IMAGE, SMALL), (IMAGE[:5], SMALL[:5])), WrongType,
     "train must be a pair (x, y), got two pairs: write Data(train=(x, y), test=(x, y))"),
    ({"a": IMAGE[:0]}, Invalid, "train: there are no examples"),
]  # fmt: skip


@pytest.mark.parametrize(("batch", "error", "line"), LINES, ids=range(len(LINES)))
def test_refused_when_data_is_made(batch: Any, error: type[SamestepError], line: str) -> None:
    with pytest.raises(error) as caught:
        Data(batch)
    assert str(caught.value) == line


def test_trees_on_different_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    there = torch.from_numpy(IDS)
    monkeypatch.setattr(type(backend), "device_of", lambda self, array: gpu(1) if array is there else cpu())
    with pytest.raises(DevicesDiffer, match=r"\(x\['a'\] on cuda:1, x\['b'\] on cpu, y on cpu\)"):
        Data(({"a": there, "b": IMAGE}, SMALL))


def one_bad(item: Any, at: int = 5) -> Any:
    return lambda i: item(i) if i == at else {"a": IMAGE[i], "b": int(SMALL[i])}


READS: list[tuple[Any, str]] = [
    (one_bad(lambda i: {"a": IMAGE[i]}),
     "train: all examples must have the same parts, got train['a'], train['b'] in one and train['a'] in another"),
    (one_bad(lambda i: {"a": IMAGE[i], "b": "x"}), "train['b'] must be numbers, got text: remove it, or encode it as numbers"),
    (one_bad(lambda i: {"a": {}, "b": 1}), "train['a'] must be an array, or hold arrays, got {}"),
    (one_bad(lambda i: {"a": IMAGE[i], "b": ()}), "train['b'] must be an array, or hold arrays, got ()"),
    (one_bad(lambda i: {"a": IMAGE[i], "b": None}), "train['b'] must be an array or a number, got NoneType"),
    (one_bad(lambda i: {"a": IMAGE[i][None], "b": 1}),
     "train['a'] must have as many axes in all examples, got shapes (3,) and (1, 3)"),
    (one_bad(lambda i: {"a": IMAGE[i][:2], "b": 1}),
     "train['a'] must be of one shape in all examples, got (3,) and (2,): Data(pad=...) fills up the shorter ones"),
    (one_bad(lambda i: {"a": [[1], [1, 2]], "b": 1}),
     "train['a'] has lists of unequal lengths in one example: make them of one length"),
    (one_bad(lambda i: {"a": IMAGE[i], "b": 1.0}), "train[i] must give a pair (x, y), of one shape and type for all i, but"),
]  # fmt: skip


class Giving(Dataset):  # type: ignore[type-arg]
    def __init__(self, give: Any) -> None:
        self.give = give

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return self.give(i)


@pytest.mark.parametrize(("give", "line"), READS, ids=range(len(READS)))
def test_refused_when_items_are_read(give: Any, line: str) -> None:
    with pytest.raises(WrongType) as caught:
        Data(Giving(give)).train.read(np.arange(4, 8))
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_a_source_that_gives_too_few_names_the_arrays() -> None:
    class Short(Store):
        def __getitem__(self, indices: Any) -> Any:
            return super().__getitem__(indices) | {"labels": SMALL[indices][1:]}

    with pytest.raises(Invalid) as caught:
        Data(Short(WHOLE)).train.read(np.arange(4))
    assert str(caught.value) == "train[indices] was asked for 4 examples and gave 3 in ['labels']"


@pytest.mark.parametrize("change", [lambda x: x.astype(np.float64), lambda x: x[:2]], ids=["type", "shape"])
def test_shards_that_are_not_alike_are_refused(change: Any) -> None:
    data = Data(Giving(lambda i: ({"a": IMAGE[i] if i != ORDER[0] else change(IMAGE[i])}, 1)))
    with pytest.raises(WrongType) as caught:
        given(data, spans=[(0, 1), (1, 2)])
    lines = [
        "train must be of one type, got x['a'] of float32 with y of int64 and x['a'] of float64 with y of int64",
        "train must have examples of one shape, got x['a'] of (2,) with y of () and x['a'] of (3,) with y of (): "
        "Data(pad=...) fills up the shorter ones",
    ]
    assert str(caught.value) in lines


def test_items_whose_keys_come_in_another_order_are_of_one_type() -> None:
    whole = {"b": IMAGE, "a": IMAGE + 1, "labels": SMALL}
    turned = Giving(lambda i: {key: whole[key][i] for key in sorted(whole, reverse=i % 2 == 1)})
    plain = given(Data(Items(whole)), spans=[(i, i + 1) for i in range(N)])
    assert told(given(Data(turned), spans=[(i, i + 1) for i in range(N)])) == told(plain)


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.one(a) - self.other(b)
        return out


def test_names_decide_and_not_the_order_of_keys() -> None:
    """Of test examples, and of items: other items of a shard may come first."""
    y, trainer = SMALL % 4, ss.Trainer(max_epochs=2, batch_size=8, shards=3, devices=2, progress=False)
    x = {"a": IMAGE, "b": IMAGE[::-1]}
    turned = Giving(lambda i: ({key: x[key][i] for key in sorted(x, reverse=i % 2 == 1)}, y[i]))
    plain = trainer.fit(Two(), Data((x, y), (x, y)))
    assert plain.fingerprint != plain.recipe["initial"]
    for train, test in (((x, y), ({"b": x["b"], "a": x["a"]}, y)), (turned, turned)):
        run = trainer.fit(Two(), Data(train, test))
        assert (run.fingerprints, run.history[-1]["test_loss"]) == (plain.fingerprints, plain.history[-1]["test_loss"])
    with pytest.raises(
        Invalid, match=r"^test must have the structure of train: the model takes its examples in another"
    ):
        trainer.fit(Two(), Data((x, y), ((IMAGE, IMAGE), y)))
