"""updating: the update in a vector's own memory and the one by operations have the same bits; in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samestep.backends.layout import Layout
from samestep.devices import Device, cpu, gpu
from samestep.errors import Invalid
from samestep.optimizers import updating
from samestep.optimizers.rules import SGD, Optimizer, adagrad, adam, adamw, sgd, sgld
from samestep.optimizers.updating import FlatUpdater

SIZE, RATES = 8, (0.5, 0.3, 0.7)


class Numpy:
    """A framework whose vectors can be had as NumPy where they are, or cannot."""

    name = "fake"

    def __init__(self, in_memory: bool) -> None:
        self.seen, self.compiled_ones = in_memory, list[Any]()

    def scalar(self, value: Any, device: Any) -> Any:
        return value

    def assign(self, array: Any, value: Any) -> Any:
        array[...] = value
        return array

    def in_memory(self, vector: Any) -> Any:
        return vector if self.seen else None

    def compiled(self, function: Any) -> Any:
        self.compiled_ones.append(function)
        return lambda *given: function(*given)

    def zeros_like(self, vector: Any) -> Any:
        return np.zeros_like(vector)

    def clip(self, vector: Any, limit: float) -> Any:
        return vector * np.float32(limit)


class Replica:
    def __init__(self, in_memory: bool = True, device: Device | None = None, **settings: str) -> None:
        self.backend, self.device, self.settings = Numpy(in_memory), device or cpu(), settings
        self.layouts = [Layout(("a", "b"), ((5,), (3,)), "float32"), Layout(("c",), ((2,),), "float32")]
        self.parameters = np.linspace(-1, 1, SIZE, dtype=np.float32)
        self.decays = list[bool]()

    def own_settings(self, decays: bool) -> dict[str, str]:
        self.decays.append(decays)
        return self.settings

    def assign(self, parameters: Any) -> None:
        self.parameters = parameters

    def named(self, vector: Any) -> Any:
        return self.layouts[0].named(vector)

    def flat(self, named: Any) -> Any:
        return self.layouts[0].filled(named)


def updater(optimizer: Optimizer, replica: Any, clip: float = 0.0, alone: bool = False) -> FlatUpdater:
    return FlatUpdater(optimizer, replica, clip, alone)


def updated(optimizer: Optimizer, replica: Any, clip: float, examples: int, **settings: Any) -> Any:
    """The weights and what is kept after some updates, and what the sums are then."""
    made = updater(optimizer, replica, clip, **settings)
    random = np.random.default_rng(0)
    totals = random.standard_normal((3, SIZE + 4)).astype(np.float32)
    before = totals.copy()
    for t, lr in enumerate(RATES):
        made.follow(totals[t], examples, lr, t, np.ones(SIZE, np.float32))
    kept = {name: vector.tobytes() for name, vector in made.tensors().items()}
    return (replica.parameters.tobytes(), kept), (totals == before).all()


@pytest.mark.parametrize("examples", [1, 2, 5])
@pytest.mark.parametrize("clip", [0.0, 0.25])
@pytest.mark.parametrize(
    "optimizer", [sgd(), sgd(momentum=0.9, nesterov=True, weight_decay=0.1), adagrad(), adam(), adamw()], ids=repr
)
def test_both_ways_have_the_same_bits(
    optimizer: Any, clip: float, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = updated(optimizer, Replica(in_memory=False), clip, examples)
    for block in (3, 8, 1 << 16):
        monkeypatch.setattr(updating, "BLOCK", block)
        found, untouched = updated(optimizer, Replica(), clip, examples)
        assert (found, untouched) == (expected, True)
    x = np.linspace(-1, 1, SIZE, dtype=np.float32)
    assert expected[0] != x.tobytes()
    state = dict.fromkeys(optimizer.slots, np.zeros(SIZE, np.float32))
    for t, total in enumerate(np.random.default_rng(0).standard_normal((3, SIZE + 4)).astype(np.float32)):
        gradient = total[:SIZE] / examples
        x, state = optimizer.update(x, gradient * np.float32(clip) if clip else gradient, state, RATES[t], t)
    assert expected[0] == x.tobytes()


def test_the_vectors_are_those_that_were_there() -> None:
    replica: Any = Replica()
    x = replica.parameters
    made = updater(sgd(momentum=0.9), replica)
    slot = made.state["velocity"]
    made.follow(np.ones(SIZE, np.float32), 1, 0.5, 0, None)
    assert replica.parameters is x
    assert made.state["velocity"] is slot
    assert slot.tolist() == [1.0] * SIZE


def test_a_sum_that_nobody_else_has_may_be_overwritten() -> None:
    kept = updated(sgd(), Replica(in_memory=False), 0.0, 4)
    alone = updated(sgd(), Replica(in_memory=False), 0.0, 4, alone=True)
    assert (kept[0], kept[1], alone[1]) == (alone[0], True, False)


def test_what_is_compiled_and_what_is_done_in_memory() -> None:
    class Mine(SGD):
        def update(self, x, g, state, lr, t=0, z=None):  # type: ignore[no-untyped-def]
            return x + z, state

    for optimizer in (Mine(), sgld()):
        replica: Any = Replica()
        made = updater(optimizer, replica)
        made.follow(np.zeros(SIZE, np.float32), 1, 0.5, 0, np.ones(SIZE, np.float32))
        assert replica.backend.compiled_ones == []
        assert replica.parameters.tolist() == (np.linspace(-1, 1, SIZE, dtype=np.float32) + np.float32(1)).tolist()
    replica = Replica(device=gpu(0))  # whose memory NumPy does not see
    replica.backend.in_memory = None
    made = updater(sgd(), replica)
    assert [type(function) for function in replica.backend.compiled_ones] == [updating.Update]
    made.follow(np.ones(SIZE, np.float32), 2, 0.5, 0, None)
    assert replica.parameters.tolist() == (np.linspace(-1, 1, SIZE, dtype=np.float32) - np.float32(0.25)).tolist()


def test_a_setting_of_a_weight_that_cannot_be_followed_is_refused() -> None:
    for optimizer, decays in ((sgd(), False), (sgd(weight_decay=0.1), True), (adagrad(), False), (sgld(), False)):
        replica: Any = Replica()
        updater(optimizer, replica)
        assert replica.decays == [decays]
    with pytest.raises(Invalid) as error:
        updater(sgd(), Replica(weight="lr_mult=2"))
    assert str(error.value) == (
        "weight has lr_mult=2, which samestep's optimizers do not follow: use one of fake, or leave it out"
    )


def test_what_is_kept_is_loaded_by_name() -> None:
    made = updater(adam(), Replica())
    made.follow(np.arange(SIZE, dtype=np.float32), 1, 0.5, 0, None)
    stored = {name: np.array(tensor) for name, tensor in made.tensors().items()}
    assert list(stored) == ["mean:a", "mean:b", "square:a", "square:b"]
    other = updater(adam(), Replica())
    other.load(stored)
    assert {name: vector.tolist() for name, vector in other.state.items()} == {
        name: vector.tolist() for name, vector in made.state.items()
    }
    assert repr(other) == repr(adam())
