"""data: every kind of examples gives the same training to the bit; what cannot be used is refused in one line.

`fit` is two epochs of a tiny MLP with dropout; 50 examples in batches of 16 leave a last batch that is smaller than
its three shards.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import samestep as ss
from samestep import draws
from samestep.backends.torch.backend import backend
from samestep.data.examples import Data
from samestep.data.feed import JOINED, READ_AHEAD, Feed
from samestep.data.source import Source
from samestep.devices import Device, cpu, gpu
from samestep.errors import DevicesDiffer, Invalid, NotRepeatable, WrongType
from samestep.models.torch import mlp

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((50, 5)).astype(np.float32)
Y = RANDOM.integers(0, 3, 50)
TX, TY = X[:11] + 1, Y[:11]


UNCHECKED = {"rehearse": False, "check_every": None}  # each example is read once


def fit(data: Any, **settings: Any) -> ss.Run:
    given = {"max_epochs": 2, "batch_size": 16, "shards": 3, "devices": 1, "progress": False} | settings
    return ss.Trainer(**given).fit(mlp((5, 4, 3), seed=1), data)


class Store:
    """A source: len() and [indices]. `give` may change what it returns."""

    def __init__(self, x: Any = X, y: Any = Y, give: Callable[[Any], Any] | None = None) -> None:
        self.x, self.y, self.give = x, y, give

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, indices: Any) -> Any:
        return self.give(indices) if self.give else (self.x[indices], self.y[indices])


class Items(Dataset):  # type: ignore[type-arg]
    """A map-style dataset of torch: one example per index."""

    def __init__(self, give: Callable[[int], Any] = lambda i: (torch.from_numpy(X[i]), int(Y[i]))) -> None:
        self.give = give
        self.asked: list[Any] = []

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> Any:
        self.asked.append(i)
        return self.give(i)


class ManyItems(Items):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked.append(indices)
        return [self.give(i) for i in indices]


def test_an_item_that_ends_an_iterator_does_not_end_its_shard() -> None:
    """`next` of an iterator that has ended raises what `map` would take for its own end."""

    def give(i: int) -> Any:
        if i == 7:
            raise StopIteration
        return X[i], int(Y[i])

    with pytest.raises(StopIteration):
        Source("train", Items(give)).read(np.arange(10))


def test_as_many_items_must_come_as_were_asked_for() -> None:
    class Short(ManyItems):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return super().__getitems__(indices[:-1])

    with pytest.raises(Invalid, match="^train: __getitems__ was asked for 4 examples and gave 3$"):
        Source("train", Short()).read(np.arange(4))


def on_disk(folder: Path, name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    np.save(folder / f"{name}.npy", array)
    return np.load(folder / f"{name}.npy", mmap_mode="r")


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array = array.copy()
    array.flags.writeable = False
    return array


KINDS: dict[str, Callable[[Path], Any]] = {
    "a list of two arrays": lambda _: [X, Y],
    "columns": lambda _: (np.asfortranarray(X), Y),
    "every second column": lambda _: (np.repeat(X, 2, axis=1)[:, ::2], Y),
    "read-only arrays": lambda _: (read_only(X), read_only(Y)),
    "uint8 labels": lambda _: (X, Y.astype(np.uint8)),
    "int32 labels": lambda _: (X, Y.astype(np.int32)),
    "tensors": lambda _: (torch.from_numpy(X), torch.from_numpy(Y)),
    "a tensor and an array": lambda _: (torch.from_numpy(X), Y.astype(np.uint8)),
    "memmaps": lambda folder: (on_disk(folder, "x", X), on_disk(folder, "y", Y)),
    "a memmap and an array": lambda folder: (on_disk(folder, "x", X), Y),
    "a source": lambda _: Store(),
    "a source of tensors": lambda _: Store(torch.from_numpy(X), torch.from_numpy(Y).to(torch.uint8)),
    "a source with a list of labels": lambda _: Store(give=lambda i: (X[i], Y[i].tolist())),
    "TensorDataset": lambda _: TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
    "a map-style dataset": lambda _: Items(),
    "a map-style dataset of arrays": lambda _: Items(lambda i: (X[i], Y[i])),
    "a map-style dataset with __getitems__": lambda _: ManyItems(),
}


@pytest.fixture(scope="module")
def plain() -> ss.Run:
    run = fit((X, Y))
    assert run.fingerprint != run.recipe["initial"]  # it learned something: sameness is not that of doing nothing
    return run


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_from_every_kind_of_examples_on_any_number_of_devices(
    kind: str, plain: ss.Run, tmp_path: Path
) -> None:
    given = KINDS[kind](tmp_path)
    for devices in (1, 2, 3):
        run = fit(given, devices=devices)
        assert (run.fingerprints, run.fingerprint) == (plain.fingerprints, plain.fingerprint), devices
        assert run.history[-1]["train_loss"] == plain.history[-1]["train_loss"]


@pytest.mark.parametrize("sampling", draws.SAMPLINGS)
def test_same_test_loss_from_a_source(sampling: str) -> None:
    one = fit(Data((X, Y), (TX, TY)), sampling=sampling).history
    other = fit(Data(Store(), Store(TX, TY)), sampling=sampling, devices=2).history
    for row in one + other:
        del row["seconds"]
    assert one == other
    assert one[-1]["test_loss"] > 0


def test_another_byte_gives_another_fingerprint(plain: ss.Run) -> None:
    x = X.copy()
    x[49, 4] += 1
    assert fit((x, Y)).fingerprint != plain.fingerprint


def test_a_map_style_dataset_is_asked_once_for_a_shard_if_it_can_answer() -> None:
    by_item, by_shard = Items(), ManyItems()
    fit(by_item, max_epochs=1, **UNCHECKED)
    fit(by_shard, max_epochs=1, **UNCHECKED)
    assert all(isinstance(asked, int) for asked in by_item.asked)
    # the first example shows what the model gives; 32 are hashed, and read again
    assert len(by_item.asked) == 1 + 32 + 32 + 50
    assert sorted(by_item.asked[65:]) == list(range(50))
    # three batches of 16 and one of 2, in three shards each; one of the last is empty
    assert sorted(map(len, by_shard.asked)) == sorted([1, 32, 32, *[6, 5, 5] * 3, 1, 1])


def test_data_shows_how_many_examples_it_has() -> None:
    assert repr(Data(train=(X, Y))) == "Data(train=50 examples, test=None)"
    assert repr(Data(train=(X, Y), test=Store(TX, TY))) == "Data(train=50 examples, test=11 examples)"
    assert repr(Data(train=(LARGE, LARGE))) == "Data(train=576 examples, test=None)"


# What is refused, with the line that says why


@pytest.mark.parametrize(
    ("train", "error", "message"),
    [
        ((X, Y[:-1]), Invalid, "train: x and y must be of one length, got 50 examples and 49 labels"),
        ((X[:-1], Y), Invalid, "train: x and y must be of one length, got 49 examples and 50 labels"),
        ((X[:0], Y[:0]), Invalid, "train: there are no examples"),
        ((np.float32(1), Y), Invalid, "train x must have one row per example, got a single number"),
        ((X, np.array(1)), Invalid, "train y must have one row per example, got a single number"),
        ((X, Y, Y), WrongType, "train must be a pair (x, y), got 3 things"),
        ([X], WrongType, "train must be a pair (x, y), got 1 things"),
        (((X, Y), (TX, TY)), WrongType,
         "train must be a pair (x, y), got two pairs: write Data(train=(x, y), test=(x, y))"),
        ((X.tolist(), Y), WrongType, "train x must be an array, got list: convert it with np.asarray"),
        ((X, Y.tolist()), WrongType, "train y must be an array, got list: convert it with np.asarray"),
        (None, WrongType, "train must be a pair (x, y) or a source with len() and [indices], got NoneType"),
        (iter([]), WrongType, "train must be a pair (x, y) or a source with len() and [indices], got list_iterator"),
        (Store, WrongType, "train must be a pair (x, y) or a source with len() and [indices], got type"),
        (X, WrongType, "train must be a pair (x, y) or one dictionary of arrays, got an array alone: train=(x, y)"),
        (Store(X[:0], Y[:0]), Invalid, "train: there are no examples"),
    ],
)  # fmt: skip
def test_refused_when_data_is_made(train: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        Data(train=train)
    assert str(caught.value) == message
    with pytest.raises(error) as caught:
        Data(train=(X, Y), test=train if train is not None else iter([]))
    assert str(caught.value).startswith("test")


ON_GPU, BESIDE = torch.from_numpy(X), torch.from_numpy(Y)


@pytest.mark.parametrize(
    ("pair", "where"),
    [
        ((ON_GPU, Y), "x on cuda:1, y on cpu"),
        ((ON_GPU, BESIDE), "x on cuda:1, y on cpu"),
        ((X[:, 0], ON_GPU), "x on cpu, y on cuda:1"),
    ],
    ids=["a tensor and an array", "two tensors", "an array and a tensor"],
)
def test_x_and_y_on_different_devices_are_refused_when_data_is_made(
    pair: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be no GPU here: the backend is told that one of the tensors is on it."""
    monkeypatch.setattr(type(backend), "device_of", lambda self, array: gpu(1) if array is ON_GPU else cpu())
    message = f"arrays are on different devices ({where}): move them to one with samestep.put(x, device)"
    for make in (lambda: Data(train=pair), lambda: Data(train=(X, Y), test=pair)):
        with pytest.raises(DevicesDiffer) as caught:
            make()
        assert str(caught.value) == message
    assert len(Data(train=(ON_GPU, ON_GPU)).train) == len(Data(train=(BESIDE, Y)).train) == 50


def after_the_first(give: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Right for the single example that shows what the model gives, wrong in training."""
    return lambda i: (X[i], Y[i]) if len(i) == 1 else give(i)


PAIR = "train[indices] must give a pair of arrays (x, y) for an array of indices, but Store raised "


@pytest.mark.parametrize("when", [lambda give: give, after_the_first], ids=["first", "later"])
@pytest.mark.parametrize(
    ("give", "error", "message"),
    [
        (lambda i: None, WrongType, PAIR + "TypeError: "),
        (lambda i: (X[i], Y[i], i), WrongType, PAIR + "ValueError: too many values to unpack (expected 2)"),
        (lambda i: X[i + 50], WrongType, PAIR + "IndexError: index "),
        (lambda i: int("x"), WrongType, PAIR + "ValueError: invalid literal for int() with base 10: 'x'"),
        (lambda i: (X[i][1:], Y[i]), Invalid, "train[indices] was asked for "),
        (lambda i: (X[i], Y[:0]), Invalid, "train[indices] was asked for "),
        (lambda i: (X[[*i, 0]], Y[i]), Invalid, "train[indices] was asked for "),
        (lambda i: (X[i], np.int64(1)), WrongType, "train[indices] must give "),
        (lambda i: (X[i], None), WrongType, ""),
    ],
    ids=["None", "three", "IndexError", "ValueError", "short x", "short y", "long x", "a number", "no labels"],
)
def test_source_with_a_wrong_answer(
    give: Callable[[Any], Any], error: type[Exception], message: str, when: Callable[[Any], Any]
) -> None:
    with pytest.raises(error) as caught:
        fit(Store(give=when(give)), devices=2)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_source_that_is_short_says_by_how_much() -> None:
    with pytest.raises(Invalid) as caught:
        fit(Store(give=after_the_first(lambda i: (X[i][2:], Y[i][1:]))), shards=1)
    assert str(caught.value) == "train[indices] was asked for 32 examples and gave 30 in x and 31 in y"


@pytest.mark.parametrize(
    "give",
    [
        lambda i: (X[i], Y[i], i),
        lambda i: X[i],
        lambda i: 1.0,
    ],
    ids=["three", "x alone", "a number"],
)
def test_map_style_dataset_with_a_wrong_item(give: Callable[[int], Any]) -> None:
    with pytest.raises((WrongType, Invalid), match=r"^train\["):
        fit(Items(give), shards=1)


# Labels and types


@pytest.mark.parametrize(("label", "span"), [(-1, "-1 to 2"), (3, "0 to 3")])
def test_labels_out_of_range_in_arrays(label: int, span: str) -> None:
    y = Y.copy()
    y[20] = label
    message = f"y: labels must be from 0 to 2, as the model gives 3 scores, got labels from {span}"
    with pytest.raises(Invalid) as caught:
        fit((X, y))
    assert str(caught.value) == f"train {message}"
    with pytest.raises(Invalid) as caught:
        fit(Data((X, Y), (torch.from_numpy(X), torch.from_numpy(y))))
    assert str(caught.value) == f"test {message}"


@pytest.mark.parametrize(("label", "span"), [(-1, r"-1 to \d"), (7, r"\d to 7")])
@pytest.mark.parametrize("kind", ["source", "dataset", "memmap"])
def test_labels_out_of_range_in_a_source(label: int, span: str, kind: str, tmp_path: Path) -> None:
    y = Y.copy()
    y[20] = label
    train = {
        "source": lambda: Store(X, y),
        "dataset": lambda: Items(lambda i: (X[i], y[i])),
        "memmap": lambda: (X, on_disk(tmp_path, "y", y)),
    }[kind]()
    line = f"y: labels must be from 0 to 2, as the model gives 3 scores, got labels from {span}$"
    with pytest.raises(Invalid, match=f"^train {line}"):
        fit(train)
    with pytest.raises(Invalid, match=f"^test {line}"):
        fit(Data((X, Y), train))


def test_labels_may_be_anything_for_a_loss_of_ones_own() -> None:
    def squares(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((output - y[:, None]) ** 2).mean(1)

    arrays, source = fit((X, Y - 1), loss=squares), fit(Store(X, Y - 1), loss=squares)
    assert arrays.fingerprint == source.fingerprint


@pytest.mark.parametrize("kind", [lambda x, y: (x, y), Store, lambda x, y: Items(lambda i: (x[i], y[i]))])
def test_float64_with_a_float32_model(kind: Callable[[Any, Any], Any]) -> None:
    line = "train x is float64 and the model float32: converted to float32; pass x.astype('float32') to be silent"
    with pytest.warns(UserWarning, match="^train x is float64") as caught:
        run = fit(kind(X.astype(np.float64), Y), devices=2)
    assert [str(one.message) for one in caught] == [line]  # once
    assert run.fingerprints == fit(kind(X, Y)).fingerprints
    assert run.recipe["train"] != fit(kind(X, Y)).recipe["train"]  # what was given counts


def test_float64_in_a_tree_and_in_y() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(5, 1)
            torch.nn.init.ones_(self.layer.weight)
            torch.nn.init.ones_(self.layer.bias)

        def forward(self, x: Any) -> Any:
            assert x["n"].dtype == torch.int32  # is left as it is
            return self.layer(x["a"]) + x["n"][:, None]

    def run(kind: str) -> ss.Run:
        data = {"a": X.astype(kind), "n": np.arange(50, dtype="i4")}, X[:, :1].astype(kind)
        return ss.Trainer(1, 16, devices=1, loss=torch.nn.MSELoss(), schedule=1e-4, progress=False).fit(Two(), data)

    line = r"^train x\['a'\] and train y are float64 and the model float32: converted to float32; pass x\.astype"
    with pytest.warns(UserWarning, match=line):
        wide = run("f8")
    assert wide.fingerprints == run("f4").fingerprints


def test_float64_with_a_float64_model() -> None:
    def run(devices: int) -> ss.Run:
        model = mlp((5, 4, 3), seed=1).double()
        return ss.Trainer(max_epochs=1, shards=3, devices=devices, progress=False).fit(model, (X.astype("float64"), Y))

    assert run(1).fingerprint == run(3).fingerprint
    assert run(1).recipe["precision"] == "float64"


def test_types_of_the_test_examples_are_looked_at_before_training() -> None:
    train = Items()
    with pytest.raises(WrongType, match=r"^test x is float16 and the model float32"):
        fit(Data(train, (TX.astype(np.float16), TY)))
    assert len(train.asked) <= 1  # nothing was trained on


def test_bytes_with_a_model_that_wants_numbers() -> None:
    with pytest.raises(WrongType, match="uint8"):
        fit((X.astype(np.uint8), Y))


# Where they are kept


class Counting:
    """A framework whose devices have 1000 bytes, of which `free` are not in use."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.placed: list[tuple[str, int]] = []

    def memory(self, device: Device) -> tuple[int, int]:
        return 1000, 1000 - self.free

    def put(self, array: Any, device: Device) -> Any:
        self.placed.append((str(device), array.nbytes))
        return array

    def index(self, order: Any, device: Device) -> Any:
        return order

    def take(self, array: Any, index: Any) -> Any:
        return array[index]

    def copy(self, array: Any, device: Device) -> Any:
        raise AssertionError("it was read, not gathered")


def fed(counting: Counting, device: Device) -> Feed:
    framework: Any = counting
    return Feed(framework, Data((X, Y)).train, [device, device], 3)  # 1000 bytes and 400


def test_arrays_in_memory_are_put_on_the_cpu_once_and_gathered_there_however_little_is_free() -> None:
    """They take no more memory than they have already."""
    counting = Counting(free=0)
    feed = fed(counting, cpu())
    assert counting.placed == [("cpu", 1000), ("cpu", 400)]
    assert feed._readers is None
    order = draws.order(5, 0, 50)
    x, y = feed.start(order, [(0, 4)]).shard((0, 4), cpu())
    assert (x.tolist(), y.tolist()) == (X[order[:4]].tolist(), Y[order[:4]].tolist())
    assert len(counting.placed) == 2
    assert feed._readers is None
    x, _ = Feed(backend, Data((X, Y)).train, [cpu()], 3).resident[cpu()]
    assert x.data_ptr() == X.ctypes.data  # PyTorch uses their memory


def test_arrays_are_put_on_a_gpu_if_a_quarter_of_what_is_free_will_do() -> None:
    enough, more, short = Counting(free=5600), Counting(free=9000), Counting(free=5599)
    feed = fed(enough, gpu(0))
    assert (enough.placed, feed._readers) == ([("cuda:0", 1000), ("cuda:0", 400)], None)
    assert fed(more, gpu(0)).resident
    feed = fed(short, gpu(0))
    assert (short.placed, feed.resident) == ([], {})


# Reading ahead


LOOKS = 3  # reads before the first shard: one example for the model, 32 for the recipe, and these again


class Recorder(Store):
    """A source that notes who reads what, and how far ahead."""

    def __init__(self, x: Any = X, y: Any = Y) -> None:
        super().__init__(x, y)
        self.lock = threading.Condition()
        self.reads: list[list[int]] = []
        self.threads: list[str] = []
        self.consumed = 0
        self.furthest = 0  # the most reads begun beyond what was consumed

    def __getitem__(self, indices: Any) -> Any:
        with self.lock:
            self.reads.append(indices.tolist())
            self.threads.append(threading.current_thread().name)
            self.furthest = max(self.furthest, len(self.reads) - self.consumed)
            self.lock.notify_all()
        return super().__getitem__(indices)

    def wait_for(self, reads: int) -> None:
        with self.lock:
            assert self.lock.wait_for(lambda: len(self.reads) >= reads, timeout=30), (
                f"{len(self.reads)} of {reads} reads"
            )


def flat(reads: list[list[int]]) -> list[int]:
    return [i for read in reads for i in read]


MANY = 9 * READ_AHEAD
LARGE = np.arange(2 * MANY, dtype=np.float32)[:, None]
SPANS = [(i, i + 2) for i in range(0, 2 * MANY, 2)]


@pytest.fixture
def ahead() -> Any:
    """A source of 2 x 288 examples, an order, and a pass over it that has not begun."""
    source = Recorder(LARGE, np.zeros(len(LARGE), int))
    feed = Feed(backend, Source("train", source), [cpu()], 1)
    order = draws.order(5, 0, len(LARGE))
    yield source, order, feed.start(order, SPANS)
    feed.close()


def test_never_more_than_read_ahead_shards_ahead_and_always_that_many(ahead: Any) -> None:
    source, order, pass_ = ahead
    assert source.reads == []
    for i, span in enumerate(SPANS):
        x, _ = pass_.shard(span, cpu())
        assert x[:, 0].tolist() == order[span[0] : span[1]].tolist()
        source.wait_for(min(i + READ_AHEAD, MANY))  # read on, without being asked
        with source.lock:
            assert len(source.reads) == min(i + READ_AHEAD, MANY)
            source.consumed += 1
    assert source.furthest == READ_AHEAD
    # each shard once, by the readers
    assert Counter(map(tuple, source.reads)) == Counter(tuple(order[a:b]) for a, b in SPANS)
    assert all(name.startswith("samestep-read") for name in source.threads)


def test_at_the_end_of_a_pass_the_next_one_is_read_ahead(ahead: Any) -> None:
    source, order, pass_ = ahead
    other = draws.order(5, 1, len(LARGE))
    pass_.then = pass_.feed.start(other, SPANS, 1)
    for span in SPANS[:-4]:
        pass_.shard(span, cpu())
    source.wait_for(MANY + READ_AHEAD - 5)
    assert flat(source.reads[MANY:]) == other[: 2 * (READ_AHEAD - 5)].tolist()
    for span in SPANS[-4:]:
        pass_.shard(span, cpu())
    source.wait_for(MANY + READ_AHEAD - 1)
    for span in SPANS:
        x, _ = pass_.then.shard(span, cpu())
        assert x[:, 0].tolist() == other[span[0] : span[1]].tolist()
    # each shard once, and in order: nothing was read twice
    assert flat(source.reads) == [*order, *other]


def test_neighbouring_shards_are_read_as_one_and_handed_out_one_by_one(ahead: Any) -> None:
    source, order, plain = ahead
    joined = [(lo, lo + 8) for lo in range(0, 2 * MANY, 8)]
    pass_ = plain.feed.start(order, joined, joined=True)
    for i in range(0, len(SPANS), 4):
        for span in (SPANS[i + k] for k in (2, 0, 3, 1)):  # in any order
            x, _ = pass_.shard(span, cpu())
            assert x[:, 0].tolist() == order[span[0] : span[1]].tolist()
            assert x.storage_offset() == 0  # in memory of its own
            source.wait_for(min(i // 4 + JOINED, len(joined)))
        assert pass_._parts == {}  # nothing is kept that was handed out
        source.consumed += 1
    assert flat(source.reads) == order.tolist()
    assert {len(read) for read in source.reads} == {8}
    assert source.furthest == JOINED
    x, _ = plain.feed.start(order, joined, joined=True).block(joined[0], cpu())
    assert x[:, 0].tolist() == order[:8].tolist()


def test_shards_are_joined_if_arrays_are_streamed_to_a_gpu() -> None:
    assert fed(Counting(free=0), gpu(0)).joins
    assert not fed(Counting(free=9000), gpu(0)).joins  # they are there already
    assert not fed(Counting(free=0), cpu()).joins
    source: Any = Counting(free=0)
    assert not Feed(source, Source("train", Recorder(LARGE, np.zeros(len(LARGE), int))), [gpu(0)], 1).joins
    transformed = Data((X, Y), transform=lambda x, y: (x, y)).train
    assert not Feed(source, transformed, [gpu(0)], 3).joins


def test_one_thread_reads_in_the_order_of_the_pass() -> None:
    source = Recorder()
    fit(source, devices=2, **UNCHECKED)
    assert source.threads[0] == threading.current_thread().name  # the one example that shows what the model gives
    assert source.reads[0] == [0]
    assert set(source.threads[LOOKS:]) == {"samestep-read_0"}
    orders = [draws.order(0, epoch, 50).tolist() for epoch in range(2)]
    assert flat(source.reads[LOOKS:]) == orders[0] + orders[1]


@pytest.mark.parametrize("devices", [1, 3])
def test_each_example_once_per_epoch(devices: int) -> None:
    train, test = Recorder(), Recorder(TX, TY)
    fit(Data(train, test), devices=devices, max_epochs=3, **UNCHECKED)
    assert Counter(flat(train.reads[LOOKS:])) == dict.fromkeys(range(50), 3)
    counts = Counter(flat(test.reads[LOOKS:]))
    assert all(counts[i] == 3 for i in range(1, 11))  # example 0 may be looked at once more, before training
    assert counts[0] in (3, 4)


def test_with_replacement_reads_what_was_drawn() -> None:
    source = Recorder()
    fit(source, max_epochs=1, sampling="with_replacement", **UNCHECKED)
    drawn = draws.order(0, 0, 50, "with_replacement").tolist()
    assert Counter(flat(source.reads[LOOKS:])) == Counter(drawn)
    assert max(Counter(drawn).values()) > 1


def test_shards_may_be_asked_for_in_another_order(ahead: Any) -> None:
    _, order, pass_ = ahead
    for late in (40, 0):  # all up to the first of them are read, which are enough for the second
        assert pass_.shard(SPANS[late], cpu())[0][0, 0] == order[2 * late]
        assert pass_._next == 41
    for a, b in [*SPANS[:40:-1], *SPANS[39:0:-1]]:
        assert pass_.shard((a, b), cpu())[0][:, 0].tolist() == order[a:b].tolist()


@pytest.mark.parametrize("kind", ["source", "dataset"])
@pytest.mark.parametrize("devices", [1, 2])
def test_an_error_in_a_reading_thread_reaches_the_caller(kind: str, devices: int) -> None:
    def broken(i: Any) -> Any:
        if np.any(np.asarray(i) == 33):
            raise OSError("disk 4 does not answer")
        return X[i], Y[i]

    with pytest.raises(OSError, match=r"^disk 4 does not answer$"):
        fit(Store(give=broken) if kind == "source" else Items(broken), devices=devices)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("samestep")]


def test_no_threads_are_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []  # so that it is not the garbage collector that ends them

    class Kept(Feed):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            kept.append(self)

    for module in ("fit", "trainer"):
        monkeypatch.setattr(f"samestep.training.{module}.Feed", Kept)
    fit(Data(Store(), Store(TX, TY)))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("samestep")]
    ss.Trainer(devices=1, progress=False).evaluate(mlp((5, 4, 3)), Store())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("samestep")]
    assert len(kept) == 3


# What tells data from other data


def identity(x: Any, y: Any) -> dict[str, object]:
    return Data(train=(x, y)).train.identity()


def test_identity_of_arrays() -> None:
    about = identity(X, Y)
    assert about["examples"] == 50
    assert (about["x"], about["y"]) == ([50, 5], [50])
    assert identity(X.copy(), Y.copy()) == about
    assert identity(torch.from_numpy(X), torch.from_numpy(Y)) == about
    assert identity(np.asfortranarray(X), Y) == about


@pytest.mark.parametrize("where", [0, 1, X.nbytes // 2, X.nbytes - 1])
def test_identity_changes_with_every_byte_of_x(where: int) -> None:
    x = X.copy()
    x.view(np.uint8).reshape(-1)[where] ^= 1
    assert identity(x, Y)["sha256"] != identity(X, Y)["sha256"]


@pytest.mark.parametrize("where", [0, Y.nbytes - 1])
def test_identity_changes_with_every_byte_of_y(where: int) -> None:
    y = Y.copy()
    y.view(np.uint8)[where] ^= 1
    assert identity(X, y)["sha256"] != identity(X, Y)["sha256"]


def test_identity_changes_with_shape_and_type() -> None:
    assert identity(X.reshape(50, 5, 1), Y) != identity(X, Y)
    assert identity(X.view(np.int32), Y) != identity(X, Y)  # the same bytes, other numbers


def test_identity_of_a_source_is_a_sample_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(x: Any = X, y: Any = Y) -> dict[str, Any]:
        return Data(train=Store(x, y)).train.identity()

    source = Recorder()
    about = Data(train=source).train.identity()
    assert list(about) == ["examples", "source", "sample"]
    chosen, again = source.reads
    assert (len(chosen), chosen[0], chosen[-1], again) == (32, 0, 49, chosen)
    assert seen() == seen(X.copy())
    for place in (0, 49, chosen[10]):
        other = X.copy()
        other[place, 1] += 1
        assert seen(other)["sample"] != seen()["sample"]
        assert identity(on_disk(tmp_path, f"x{place}", other), Y) != identity(on_disk(tmp_path, "x", X), Y)
    assert "sha256" in identity(on_disk(tmp_path, "x", X), Y)
    monkeypatch.setattr("samestep.data.examples.WHOLE", 1400)
    assert "sha256" in identity(on_disk(tmp_path, "x", X), Y)
    monkeypatch.setattr("samestep.data.examples.WHOLE", 1399)  # bytes: more is too much to be hashed
    assert identity(on_disk(tmp_path, "x", X), Y)["sample"] == seen()["sample"]


@pytest.mark.parametrize(
    ("about", "version"),
    [({"version": 3}, 3), ({"_fingerprint": "f"}, "f"), ({"version": "v", "_fingerprint": "f"}, "v"), ({"version": 1.5}, None)],
)  # fmt: skip
def test_identity_of_a_source_has_its_version(about: dict[str, Any], version: Any) -> None:
    source = Store()
    vars(source).update(about)
    assert Data(train=source).train.identity().get("version") == version


VARIES = (
    "is another one when it is read again: put what is random into Data(transform=f), where f(x, y, rng) draws from rng, or "
    "give up sameness with Trainer(deterministic=False)"
)


@pytest.mark.parametrize("name", ["train", "test"])
def test_a_source_that_is_different_each_time_is_refused(name: str) -> None:
    random = np.random.default_rng(0)
    flipping = Items(lambda i: (X[i] if random.random() < 0.5 or i < 9 else -X[i], Y[i]))
    data = Data(flipping) if name == "train" else Data((X, Y), flipping)
    with pytest.raises(NotRepeatable) as caught:
        fit(data, **UNCHECKED)
    index = int(str(caught.value).split()[1])
    assert index >= 9  # those before are the same each time
    assert str(caught.value) == f"example {index} of {name} {VARIES}"


def test_a_source_that_is_different_each_time_without_sameness() -> None:
    random = np.random.default_rng(0)
    source = Store(give=lambda i: (X[i] + random.random(), Y[i]))
    assert [Data(train=source).train.identity(varies=True)["sample"] for _ in range(8)] == [None] * 8
    run = fit(source, deterministic=False)
    assert "train, which gives other examples each time" in run.recipe["unchecked"]
    assert fit(Store(), deterministic=False).recipe["train"]["sample"] is not None


def test_code_and_settings_of_a_source_are_in_the_recipe_but_not_its_cache() -> None:
    class Cached(Store):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor, self.cache, self.reads = factor, {}, 0

        def __getitem__(self, i: Any) -> Any:
            self.reads += 1
            self.cache[self.reads] = x, y = super().__getitem__(i)
            return x, y

    source = Cached(1.0)
    code = [fit(given).recipe["code"] for given in (source, source, Cached(1.0), Cached(2.0))]
    assert code[0] == code[1] == code[2]
    assert {name for name in code[3] if code[3][name] != code[0][name]} == {"train"}
    assert {"class Cached", "Cached.__getitem__()"} < set(code[0])
