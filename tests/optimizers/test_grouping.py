"""Groups of weights: against torch.optim with parameter groups, segment by segment in NumPy, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samestep as ss
from samestep import draws
from samestep.backends.layout import Layout
from samestep.backends.updaters import Clamp
from samestep.errors import Invalid, WrongType
from samestep.optimizers import updating
from samestep.optimizers.grouping import ParameterGroup, Segment, group, segments_of
from samestep.optimizers.rules import Optimizer, adagrad, adam, adamw, sgd, sgld
from samestep.optimizers.updating import FlatUpdater

ROUNDING = 1e-12  # relative, float64, over 8 steps: torch orders the factors of Adam in its own way
SPANS = {"a": (0, 5), "b": (8, 11), "c": (16, 18), "d": (24, 25)}  # of 8 numbers each, padded
SIZE = 32


class Numpy:
    name = "fake"

    def __init__(self, in_memory: bool) -> None:
        self.seen = in_memory

    def scalar(self, value: Any, device: Any) -> Any:
        return value

    def assign(self, array: Any, value: Any) -> Any:
        array[...] = value
        return array

    def in_memory(self, vector: Any) -> Any:
        return vector if self.seen else None

    def compiled(self, function: Any) -> Any:
        return function

    zeros_like, concat = staticmethod(np.zeros_like), staticmethod(np.concatenate)

    def clip(self, vector: Any, limit: float) -> Any:
        return vector * (limit / np.sqrt((vector * vector).sum()))

    def clamp(self, vector: Any, limit: float) -> Any:
        return vector.clip(-limit, limit)


class Replica:
    """Four tensors; `c` has a second name, as tied weights do, and `state` is not trained."""

    def __init__(self, in_memory: bool = True) -> None:
        self.backend, self.device = Numpy(in_memory), ss.cpu()
        shapes = tuple((hi - lo,) for lo, hi in SPANS.values())
        self.layouts = [Layout(tuple(SPANS), shapes, "float64", unit=8)]
        self.names = {name: name for name in SPANS} | {"tied": "c", "state": "state"}
        self.parameters = np.zeros(SIZE)
        for lo, hi in SPANS.values():
            self.parameters[lo:hi] = np.linspace(-1, 1, hi - lo)

    def own_settings(self, decays: bool) -> dict[str, str]:
        self.decays = decays
        return {}

    def assign(self, parameters: Any) -> None:
        self.parameters = parameters


def segments(optimizer: Optimizer, groups: Any) -> list[tuple[int, int, Any, float, bool]]:
    replica: Any = Replica()
    found = segments_of(replica, optimizer, groups)
    return [(one.lo, one.hi, one.optimizer, one.lr_scale, one.frozen) for one in found]


def test_neighbours_of_one_group_are_one_segment_with_the_padding_behind_them() -> None:
    slow, plain = group(lr_scale=0.5), sgd(momentum=0.9)
    assert segments(plain, {"[ab]": slow}) == [(0, 16, plain, 0.5, False), (16, 32, plain, 1.0, False)]
    assert segments(plain, {"b": slow, "[abd]": group(weight_decay=0.1)}) == [
        (0, 8, sgd(momentum=0.9, weight_decay=0.1), 1.0, False), (8, 16, plain, 0.5, False), (16, 24, plain, 1.0, False),
        (24, 32, sgd(momentum=0.9, weight_decay=0.1), 1.0, False),
    ]  # fmt: skip
    assert segments(plain, {"ti*": group(frozen=True)})[1] == (16, 24, plain, 1.0, True)
    assert segments(plain, {"*": group()}) == [(0, 32, plain, 1.0, False)]


def test_a_tensor_without_numbers_has_no_segment() -> None:
    replica: Any = Replica()
    replica.layouts = [Layout(("a", "b"), ((0,), (3,)), "float64", unit=8)]
    assert segments_of(replica, sgd(), {"a": group(lr_scale=0.5)}) == (Segment(0, 8, sgd()),)


def by_hand(optimizer: Any, groups: Any, totals: Any, clip: Any) -> Any:
    """Each tensor alone, as a vector of its own."""
    x = {name: Replica().parameters[lo:hi] for name, (lo, hi) in SPANS.items()}
    state = {name: {slot: np.zeros_like(x[name]) for slot in optimizer.slots} for name in x}
    for t, total in enumerate(totals):
        g = {name: total[lo:hi] / 3 for name, (lo, hi) in SPANS.items()}
        moving = [name for name in x if not groups.get(name, group()).frozen]
        if isinstance(clip, Clamp):
            g = {name: one.clip(-clip.limit, clip.limit) for name, one in g.items()}
        elif clip:
            norm = np.sqrt(sum((g[name] ** 2).sum() for name in moving))
            g = {name: one * (clip / norm) for name, one in g.items()}
        for name in moving:
            own = groups.get(name, group())
            decay = {} if own.weight_decay is None else {"weight_decay": own.weight_decay}
            rule = type(optimizer)(**vars(optimizer) | decay)
            z = np.ones_like(x[name])
            x[name], state[name] = rule.update(x[name], g[name], state[name], 0.5 * own.lr_scale, t, z)
    return x, state


@pytest.mark.parametrize("clip", [0.0, 0.25, Clamp(0.1)], ids=repr)
@pytest.mark.parametrize(
    "optimizer",
    [sgd(), sgd(momentum=0.9, nesterov=True, weight_decay=0.1), adagrad(), adam(), adamw(), sgld(temperature=0.1)],
    ids=repr,
)
@pytest.mark.parametrize("in_memory", [True, False])
def test_every_tensor_is_updated_by_its_groups_rule(
    in_memory: bool, optimizer: Any, clip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updating, "BLOCK", 3)
    groups = {"a": group(lr_scale=0.5), "b": group(frozen=True)}
    if hasattr(optimizer, "weight_decay"):
        groups["d"] = group(weight_decay=0.25)
    replica: Any = Replica(in_memory)
    made = FlatUpdater(optimizer, replica, clip, False, groups)
    totals = np.random.default_rng(0).standard_normal((3, SIZE + 4))
    inside = np.zeros(SIZE + 4, bool)
    for lo, hi in SPANS.values():
        inside[lo:hi] = True
    totals[:, ~inside] = 0
    for t, total in enumerate(totals):
        made.follow(total, 3, 0.5, t, inside[:SIZE].astype(float))
    weights, state = by_hand(optimizer, groups, totals, clip)
    for name, (lo, hi) in SPANS.items():
        np.testing.assert_allclose(replica.parameters[lo:hi], weights[name], rtol=1e-14, atol=1e-15)
        for slot, vector in made.state.items():
            np.testing.assert_allclose(vector[lo:hi], state[name][slot], rtol=1e-14, atol=1e-15)
    assert not replica.parameters[~inside[:SIZE]].any()
    assert (replica.parameters[8:11] == Replica().parameters[8:11]).all()


def test_a_group_that_decays_makes_an_optimizer_that_does() -> None:
    for optimizer, groups, decays in ((sgd(), {"a": group(weight_decay=0.1)}, True), (adamw(), {}, True),
                                      (adamw(), {"*": group(weight_decay=0.0)}, False)):  # fmt: skip
        replica: Any = Replica()
        FlatUpdater(optimizer, replica, 0.0, False, groups)
        assert replica.decays is decays


# Against torch.optim


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def numbers() -> Any:
    random = np.random.default_rng(0)
    return random.standard_normal((61, 12)), random.integers(0, 3, 61)


def fit(**settings: Any) -> ss.Run:
    base = {"max_epochs": 2, "batch_size": 16, "progress": False, "devices": 2, "schedule": ss.poly(0.02, 16)}
    return ss.Trainer(**base | settings).fit(net(), numbers())


def test_the_weights_of_adamw_of_torch_with_parameter_groups() -> None:
    """Fine-tuning as it is usually done: a frozen layer, a slower one, no decay of biases, clipping."""
    groups = {"0.*": ss.group(frozen=True), "2.weight": ss.group(lr_scale=0.1), "*.bias": ss.group(weight_decay=0.0)}
    run = fit(optimizer=ss.adamw(weight_decay=0.5), groups=groups, gradient_clip_val=0.05)
    model: Any = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [{"params": [model[2].weight], "scale": 0.1}, {"params": [model[2].bias, model[4].bias], "weight_decay": 0.0},
         {"params": [model[4].weight]}], weight_decay=0.5)  # fmt: skip
    x, y = map(torch.from_numpy, numbers())
    for t in range(8):
        index = torch.from_numpy(draws.order(0, t // 4, 61)[t % 4 * 16 :][:16])
        for one in optimizer.param_groups:
            one["lr"] = ss.poly(0.02, 16)(t) * one.get("scale", 1.0)
        optimizer.zero_grad()
        F.cross_entropy(model(x[index]), y[index]).backward()
        gradients = [p.grad for p in model.parameters() if p.requires_grad]
        norm = nn.utils.get_total_norm(gradients)
        assert norm > 0.05
        for gradient in gradients:
            gradient *= 0.05 / norm
        optimizer.step()
    start = net().state_dict()
    for name, tensor in model.state_dict().items():
        np.testing.assert_allclose(run.weights()[name], tensor.numpy(), rtol=ROUNDING, atol=ROUNDING)
        assert (run.weights()[name] == start[name].numpy()).all() == name.startswith("0.")


def test_groups_are_in_the_recipe_in_their_order_and_only_if_there_are_some(tmp_path: Any) -> None:
    one, two = {"0.*": ss.group(lr_scale=0.5)}, {"*.bias": ss.group(frozen=True)}
    run = fit(groups=one | two, run_dir=tmp_path)
    assert run.recipe["groups"] == [
        "0.*: ParameterGroup(lr_scale=0.5, weight_decay=None, frozen=False)",
        "*.bias: ParameterGroup(lr_scale=1.0, weight_decay=None, frozen=True)",
    ]
    assert not fit().recipe.keys() & {"groups", "gradient_clip_algorithm"}
    assert fit(groups={"*": ss.group()}).fingerprints == fit().fingerprints
    with pytest.raises(Invalid, match=r"groups is \['\*.bias: .*, was \['0"):
        fit(groups=two | one, run_dir=tmp_path)


# What is refused


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"lr_scale": -1}, Invalid, "group: lr_scale must be finite and at least 0, got lr_scale=-1"),
        ({"lr_scale": None}, WrongType, "group: lr_scale must be a number, got lr_scale=None"),
        ({"weight_decay": "no"}, WrongType, "group: weight_decay must be a number, got weight_decay='no'"),
        ({"frozen": 1}, WrongType, "group: frozen must be True or False, got frozen=1"),
        ({"frozen": True, "lr_scale": 0.5}, Invalid,
         "group: frozen weights are never updated: leave out lr_scale and weight_decay, or frozen"),
        ({"frozen": True, "weight_decay": 0.0}, Invalid,
         "group: frozen weights are never updated: leave out lr_scale and weight_decay, or frozen"),
    ],
)  # fmt: skip
def test_bad_groups(arguments: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind) as caught:
        group(**arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"groups": [("a", group())]}, WrongType,
         "groups must be a dictionary from patterns to samestep.group(...), got [('a', ParameterGroup(lr_scale=1.0, "
         "weight_decay=None, frozen=False))]"),
        ({"groups": {3: group()}}, WrongType, None),
        ({"groups": {"0.*": 0.1}}, WrongType, "groups['0.*'] must be samestep.group(...), got 0.1"),
        ({"groups": {"0.*": group(weight_decay=0.0)}, "optimizer": adagrad()}, Invalid,
         "groups['0.*'] has a weight_decay, and AdaGrad has none: use sgd, adam or adamw, or leave it out"),
        ({"groups": {"0.*": group()}, "optimizer": torch.optim.SGD}, Invalid,
         "groups are for samestep's optimizers: with one of the framework, use its own parameter groups"),
        ({"groups": {"4.wight": group()}}, Invalid,
         "groups: no trained weight is called '4.wight'; there are, among others, 4.weight, 2.weight, 0.weight"),
        ({"groups": {"*": group(frozen=True)}}, Invalid,
         "groups: every weight is frozen, and nothing would be trained: leave some out"),
    ],
)  # fmt: skip
def test_groups_that_a_trainer_refuses(settings: Any, kind: Any, message: str | None) -> None:
    with pytest.raises(kind) as caught:
        fit(**settings)
    assert str(caught.value) == message or message is None


def test_a_group_is_a_value() -> None:
    assert group(lr_scale=np.float32(0.5)) == ParameterGroup(0.5) != group()
    assert ss.group is group
