"""base: what every framework's replica does alike, with one that is made of NumPy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from samestep.backends.base import Backend, Replica
from samestep.backends.layout import Layout
from samestep.backends.updaters import NativeUpdater, Updater
from samestep.devices import cpu
from samestep.errors import WrongType

ARRAYS = SimpleNamespace(
    name="fake", state=("frozen.*", ""), get=np.asarray, copy=lambda numbers, device: np.array(numbers),
    compiled=lambda function: function, clip=lambda vector, limit: vector * limit,
    rates=lambda scheduler, n, unit: [scheduler] * n,
)  # fmt: skip


class Numpy(Replica):
    """Two weights, and state of whole and of real numbers."""

    def __init__(self) -> None:
        super().__init__(ARRAYS, None, cpu(), 3)  # type: ignore[arg-type]
        self.layouts = [
            Layout(("w", "b"), ((2,), (1,)), "float64"),
            Layout(("n",), ((2,),), "int64", real=False),
            Layout(("mean",), ((1,),), "float64"),
        ]
        self.names = {"mean": "mean", "again": "w", "n": "n", "fixed": "fixed", "b": "b"}
        self.held: list[Any] = [np.array([1.0, 2.0, 3.0]), np.array([4, 5]), np.array([6.0])]
        self.state = [SimpleNamespace(layout=layout, move=self.move) for layout in self.layouts[1:]]
        self.moved, self.taken = list[Any](), list[Any]()

    def move(self, change: Any) -> None:
        self.moved.append(change.tolist())

    @property
    def vectors(self) -> list[Any]:
        return self.held

    def constants(self) -> Any:
        return {"fixed": np.array([7.0])}

    def take_constants(self, tensors: Any) -> None:
        self.taken.append(tensors["fixed"].tolist())

    def gradient(self, x: Any, y: Any, key: int, shard: int) -> Any:
        return (x, y, key, shard)

    def replace(self, vectors: Any) -> None:
        self.held = list(vectors)

    def model_of(self, tensors: Any) -> Any:
        return {name: tensor.tolist() for name, tensor in tensors.items()}

    evaluate = assign = fingerprint = None  # type: ignore[assignment]


def test_a_shards_vector_holds_gradient_state_losses_and_hits() -> None:
    one = Numpy()
    assert (one.size, one.bands) == (3 + 2 + 1 + 2 * 3, [(0, 12)])
    assert one.parameters is one.held[0]
    assert one.inside(None, None) == ([], [])
    assert one.own_settings(True) == {}
    one.advance(np.arange(12.0), 2)
    assert one.moved == [[1.5, 2.0], [2.5]]


def test_a_task_adds_one_shard() -> None:
    one, added = Numpy(), list[Any]()
    batch: Any = SimpleNamespace(shard=lambda shard, device: (f"x{shard}", device), keys=[10, 11, 12, 13])
    sums: Any = SimpleNamespace(add=lambda span, vector: added.append((span, vector)))
    for task in one.tasks(batch, range(1, 3), sums):
        task()
    assert added == [((1, 2), ("x1", cpu(), 11, 1)), ((2, 3), ("x2", cpu(), 12, 2))]


def test_tensors_by_name_and_back() -> None:
    one = Numpy()
    own = {"mean": [6.0], "again": [1.0, 2.0], "n": [4, 5], "fixed": [7.0], "b": [3.0]}
    assert one.model() == own
    assert list(one.tensors()) == list(own)
    assert [vector.tolist() for vector in one.real_vectors()] == [[1.0, 2.0, 3.0], [6.0]]
    averages = [np.array([0.5, 1.5, 2.5]), np.array([8.0])]
    assert one.model(averages) == own | {"mean": [8.0], "again": [0.5, 1.5], "b": [2.5]}
    found = {name: np.array(value) for name, value in (own | {"w": [9.0, 8.0], "n": [1, 2]}).items()}
    assert [vector.tolist() for vector in one.real_vectors_from(found)] == [[9.0, 8.0, 3.0], [6.0]]
    one.load(found)
    assert [vector.tolist() for vector in one.vectors] == [[9.0, 8.0, 3.0], [1, 2], [6.0]]
    assert one.taken == [[7.0]]
    named = one.named(np.array([1.0, 2.0, 3.0]))
    assert {name: tensor.tolist() for name, tensor in named.items()} == {"w": [1.0, 2.0], "b": [3.0]}
    assert one.flat(named).tolist() == [1.0, 2.0, 3.0]


def test_state_is_what_was_declared() -> None:
    one = Numpy()
    assert [one.is_state(name) for name in ("frozen.a", "Frozen.a", "a", None, "")] == [True, False, False, True, True]


def test_what_is_so_unless_a_framework_says_otherwise() -> None:
    assert Numpy().side_by_side is False
    assert (Backend.portable, Backend.state, Updater.fixed, Updater.moved) == (False, (), "", ())
    assert Backend.describe(ARRAYS, Numpy()) == "Numpy"  # type: ignore[arg-type]
    assert Backend.in_memory(ARRAYS, np.ones(1)) is None  # type: ignore[arg-type]
    assert Backend.reshape(ARRAYS, np.ones(6), [2, 3]).shape == (2, 3)  # type: ignore[arg-type]
    with pytest.raises(WrongType, match="^schedule must be a number or a function of t, got dict$"):
        Backend.rates(ARRAYS, {}, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(("clip", "gradient"), [(0.0, [1.0, 2.0, 3.0]), (0.5, [0.5, 1.0, 1.5])])
def test_an_optimizer_of_the_framework_gets_the_mean_and_leaves_the_sum(clip: float, gradient: list[float]) -> None:
    class Told(NativeUpdater):
        tensors = load = None  # type: ignore[assignment]

        def apply(self, gradient: Any, lr: float, t: int) -> None:
            self.told = (gradient.tolist(), lr, t)

    one, total = Told(Numpy(), clip), np.arange(2.0, 26.0, 2.0)
    one.follow(total, 2, 0.1, 5, None)
    assert (one.told, total.tolist()) == ((gradient, 0.1, 5), list(range(2, 26, 2)))
    assert (one.rate(), one.read("scheduler", 2)) == (None, (["scheduler", "scheduler"], ()))
