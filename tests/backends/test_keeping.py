"""keeping: what an optimizer keeps is stored and made again, with arrays of a framework that is made up."""

from __future__ import annotations

import json
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from samestep.backends.keeping import TEXT, KeepingUpdater
from samestep.devices import Device, cpu, gpu
from samestep.errors import Invalid, WrongType


class Array:
    """An array that does not tell where it lies in memory."""

    def __init__(self, values: Any, device: Device | None = None) -> None:
        self.values, self.device = np.asarray(values, np.float32), device or cpu()


class Tensor(Array):
    def data_ptr(self) -> int:
        return self.values.ctypes.data


class Framework:
    compiled = staticmethod(lambda function: function)
    content = staticmethod(lambda thing, weights: None)

    def is_array(self, thing: object) -> bool:
        return isinstance(thing, Array)

    def get(self, array: Array) -> Any:
        return array.values.copy(order="K")

    def device_of(self, array: Array) -> Device:
        return array.device

    def put(self, array: Any, device: Device) -> Array:
        return Tensor(array, device)

    def assign(self, array: Array, value: Array) -> None:
        assert array.device == value.device
        array.values[...] = value.values

    def copy(self, array: Any, device: Device) -> Array:
        return Tensor(array, device)


class Optimizer:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Kept(KeepingUpdater):
    def __init__(self, optimizer: Optimizer, besides: Any = (), **named: Any) -> None:
        replica = SimpleNamespace(backend=Framework(), layouts=[SimpleNamespace(size=1)], device=gpu(1))
        super().__init__(replica, 0.0)
        self.optimizer, self.began = optimizer, dict[str, Any]()
        self.began = self.keep(lambda: self.optimizer, Optimizer, named, besides)

    def apply(self, gradient: Any, lr: float, t: int) -> None: ...

    def told(self) -> dict[str, Any]:
        """What is told of each attribute."""
        kind, path, held, inside = json.loads(self.tensors()[TEXT].tobytes())
        assert (kind, path, held) == ("object", "", True)
        return dict(inside)


def test_what_is_told_of_each_thing() -> None:
    weight, slot = Tensor([1, 2]), Tensor([[1, 2, 3], [4, 5, 6]], gpu(1))
    inner = Optimizer(step=3, secret=4)
    optimizer = Optimizer(
        weight=weight, slots={weight: {"mean": slot}}, again=slot, numbers=[1, 2.5, None, True, "text"], pair=(1, [2]),
        inner=inner, attributes=Array(np.zeros((2, 3)).T), secret=5, rule=len,
    )  # fmt: skip
    kept = Kept(optimizer, ("secret",), weight=weight)
    found = kept.tensors()
    assert {name: array.shape for name, array in found.items() if name != TEXT} == {
        "slots.weight.mean": (2, 3), "attributes'": (3, 2),
    }  # fmt: skip
    mean = ["array", "slots.weight.mean", True, [[0, 1], True]]
    same = ["same", "weight", False, None]
    assert kept.told() == {
        "weight": same,
        "slots": ["dict", "slots", True, [[same, ["dict", "slots.weight", True, [["mean", mean]]]]]],
        "again": ["same", "slots.weight.mean", False, None],
        "numbers": ["list", "numbers", True, [1, 2.5, None, True, "text"]],
        "pair": ["tuple", "pair", True, [1, ["list", "pair.1", True, [2]]]],
        "inner": ["object", "inner", True, [["step", 3], ["secret", 4]]],
        "attributes": ["array", "attributes'", True, [[1, 0], False]],
        "rule": ["unchanged", "rule", True, []],
    }


def test_what_was_there_all_the_time_is_the_same_object_again() -> None:
    weight, slot, plain = Tensor([1, 2]), Tensor(np.arange(6).reshape(2, 3).T), Array([7])
    inner = Optimizer(step=3)
    optimizer = Optimizer(weight=weight, slots={weight: slot}, numbers=[1, 2], pair=(1, plain), inner=inner, rule=len)
    optimizer.secret = "before"
    kept = Kept(optimizer, ("secret",), weight=weight)
    stored = {name: np.array(array) for name, array in kept.tensors().items()}
    before = dict(vars(optimizer))
    slot.values[...] = 0
    plain.values[...] = 0
    inner.step, inner.added, optimizer.added = 9, 1, 2
    optimizer.numbers.append(3)
    optimizer.slots["added"] = 4
    optimizer.secret = "after"
    optimizer.pair = None
    kept.load(stored)
    assert vars(optimizer) == before | {"secret": "after"}
    assert all(vars(optimizer)[name] is before[name] for name in ("weight", "slots", "numbers", "inner", "rule"))
    assert (optimizer.numbers, vars(inner), optimizer.slots) == ([1, 2], {"step": 3}, {weight: slot})
    assert (optimizer.pair[0], optimizer.pair[1] is plain) == (1, True)
    assert (slot.values.tolist(), plain.values.tolist()) == ([[0, 3], [1, 4], [2, 5]], [7])


def test_what_came_later_is_made_anew_where_it_was() -> None:
    optimizer = Optimizer(numbers=[1], old=0)
    kept = Kept(optimizer)
    shared = Tensor(np.arange(6).reshape(2, 3).T, gpu(1))
    optimizer.numbers = [1]  # an equal list, but another one
    optimizer.slots, optimizer.pair = {"a": shared, "b": [shared, Array([5])]}, ((), {})
    optimizer.nobody, optimizer.somebody = Array([6]), Array([7])
    told = kept.told()
    assert (told["numbers"], told["slots"][2]) == (["list", "numbers", False, [1]], False)
    assert told["nobody"][:3] == ["array", "nobody", False]
    stored = {name: np.array(array) for name, array in kept.tensors().items()}
    optimizer = Optimizer(numbers=[1], old=1)
    new = Kept(optimizer)
    new.load(stored)
    assert list(vars(optimizer)) == ["numbers", "old", "slots", "pair", "nobody", "somebody"]
    assert (optimizer.numbers, optimizer.old, optimizer.pair) == ([1], 0, ((), {}))
    made, again = optimizer.slots["a"], optimizer.slots["b"]
    assert (made.values.tolist(), made.values.strides, made.device) == ([[0, 3], [1, 4], [2, 5]], (4, 12), gpu(1))
    assert (again[0] is made, again[1].values.tolist(), again[1].device) == (True, [5], cpu())
    assert (optimizer.nobody.values.tolist(), optimizer.somebody.values.tolist()) == ([6], [7])


@pytest.mark.parametrize("first", ["a", "z"])
def test_a_new_view_of_memory_that_another_has_cannot_be_stored(first: str) -> None:
    values = np.arange(3, dtype=np.float32)
    optimizer = Optimizer(**{first: Tensor(values)})
    kept = Kept(optimizer)
    optimizer.m = Tensor(values)
    with pytest.raises(WrongType, match=r"^the optimizer keeps a Tensor \(m\), which updates change and a checkpoint"):
        kept.tensors()
    both = Kept(Optimizer(**{first: Tensor(values), "m": Tensor(values)}))  # it was there from the beginning
    assert [both.told()[name][0] for name in (first, "m")] == ["array", "array"]


@pytest.mark.parametrize("thing", [OrderedDict(a=1), Optimizer(step=1), {1, 2}], ids=lambda thing: type(thing).__name__)
def test_what_cannot_be_made_again_must_not_come_or_change(thing: Any) -> None:
    optimizer = Optimizer()
    kept = Kept(optimizer)
    optimizer.inside = [1, thing]
    kind = type(thing).__name__
    with pytest.raises(WrongType) as error:
        kept.tensors()
    assert str(error.value) == (
        f"the optimizer keeps a {kind} (inside.1), which updates change and a checkpoint cannot hold: "
        "pass checkpoint_every=None, or another optimizer"
    )
    assert Kept(optimizer).told()["inside"][2] is True


def test_what_is_unchanged_may_be_of_any_kind() -> None:
    thing = {1, 2}
    optimizer = Optimizer(thing=thing)
    kept = Kept(optimizer)
    stored = kept.tensors()
    optimizer.thing = {2, 1}  # equal will do
    assert kept.told()["thing"] == ["unchanged", "thing", True, []]
    kept.load(stored)
    assert optimizer.thing is thing
    thing.add(3)
    with pytest.raises(WrongType, match=r"^the optimizer keeps a set \(thing\)"):
        kept.tensors()


def test_a_checkpoint_of_another_optimizer_is_refused() -> None:
    stored = Kept(Optimizer(inner=Optimizer(step=1))).tensors()
    with pytest.raises(Invalid) as error:
        Kept(Optimizer(step=1)).load(stored)
    assert str(error.value) == "the checkpoint is of another optimizer: 'inner' is only in one of them"
