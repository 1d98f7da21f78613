"""Optimizers of torch.optim in the Trainer: the weights of a plain loop, the same bits on any number of devices."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conformance import suite
from torch import nn
from torch.optim import lr_scheduler

import samestep as ss
from samestep import draws
from samestep.backends.find import load
from samestep.backends.losses import Measure
from samestep.backends.torch import recorder
from samestep.backends.torch.recorder import Recorder, keeps_state
from samestep.backends.torch.scheduler import read_all
from samestep.backends.torch.updater import TorchUpdater, _copied
from samestep.devices import Device
from samestep.errors import Invalid, OutOfMemory, WrongType
from samestep.optimizers.averaging import swa
from samestep.optimizers.updating import FlatUpdater
from samestep.schedules.kinds import cosine

ROUNDING = 1e-12  # relative, float64: the gradient's sums in another order, over 8 updates


def numbers(dtype=np.float64):
    random = np.random.default_rng(0)
    return random.standard_normal((61, 12)).astype(dtype), random.integers(0, 3, 61)


def net(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def trainer(**settings):
    return ss.Trainer(**{"max_epochs": 2, "batch_size": 16, "progress": False, "devices": 3, "seed": 3} | settings)


def loop(model, optimizer, schedule=None):
    """The plain loop of PyTorch over the same batches, 2 epochs of 4."""
    x, y = map(torch.from_numpy, numbers())
    for t, (epoch, first) in enumerate(itertools.product(range(2), range(0, 61, 16))):
        index = torch.from_numpy(draws.order(3, epoch, 61)[first : first + 16])
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] if schedule is None else schedule(t)
        optimizer.zero_grad()
        F.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()
    return model


def plain(state):
    """A state_dict in numbers, to be compared with ==."""
    if isinstance(state, torch.Tensor):
        return state.tolist()
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return [plain(value) for value in state] if isinstance(state, list) else state


def agree(run, model):
    start = net().state_dict()
    for name, values in model.state_dict().items():
        assert not torch.equal(values, start[name])
        np.testing.assert_allclose(run.weights()[name], values.numpy(), rtol=ROUNDING, atol=ROUNDING)


def decay_of_matrices_only(parameters):
    """AdamW as it is used in practice: two groups, and no decay of biases."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.5},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.02)


FACTORIES = {
    "SGD": torch.optim.SGD,
    "SGD, momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02, amsgrad=True),
    "AdamW, two groups": decay_of_matrices_only,
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.05, lr_decay=0.1),
    "Rprop": torch.optim.Rprop,
}


# The weights of a plain loop


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_gives_the_weights_of_a_plain_loop(name):
    run = trainer(optimizer=FACTORIES[name]).fit(net(), numbers())
    model = net()
    agree(run, loop(model, FACTORIES[name](model.parameters())))


@pytest.mark.parametrize("name", FACTORIES)
def test_an_optimizer_made_from_the_model_gives_the_weights_of_a_plain_loop_and_is_left_as_it_was(name):
    model = net()
    optimizer = FACTORIES[name](model.parameters())
    before = plain(optimizer.state_dict()), plain(model.state_dict())
    run = trainer(optimizer=optimizer).fit(model, numbers())
    assert (plain(optimizer.state_dict()), plain(model.state_dict())) == before
    assert all(p.grad is None for p in model.parameters())
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in model.parameters()}
    suite.same(run, trainer(optimizer=optimizer).fit(model, numbers()))  # a second fit starts anew
    factory = trainer(optimizer=FACTORIES[name]).fit(net(), numbers())
    suite.same(run, factory)  # a factory comes to the same
    assert {**run.recipe, "code": 0} == {**factory.recipe, "code": 0}  # a function is code
    agree(run, loop(model, optimizer))  # last: the plain loop trains the model itself


def test_an_optimizer_with_a_past_goes_on_from_there():
    """Its momenta are taken over, by a copy."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loop(model, optimizer)
    before = plain(optimizer.state_dict())
    run = trainer(optimizer=optimizer).fit(model, numbers())
    assert plain(optimizer.state_dict()) == before
    assert before["state"]
    agree(run, loop(model, optimizer))
    fresh = trainer(optimizer=functools.partial(torch.optim.Adam, lr=0.02)).fit(model, numbers())
    assert fresh.fingerprint != run.fingerprint
    assert fresh.recipe["optimizer"] != run.recipe["optimizer"]


@pytest.mark.parametrize("name", ["SGD, momentum", "AdamW, two groups"])
def test_the_rate_is_that_of_the_schedule_if_there_is_one(name):
    schedule = cosine(0.05, 12, end=0.01).warmup(2)
    run = trainer(optimizer=FACTORIES[name], schedule=schedule).fit(net(), numbers())
    model = net()
    agree(run, loop(model, FACTORIES[name](model.parameters()), schedule))
    assert [row["lr"] for row in run.history] == [schedule(3), schedule(7)]


def test_without_a_schedule_the_rate_is_the_optimizers_own():
    for optimizer, lr in ((FACTORIES["RMSprop"], 0.01), (torch.optim.SGD, 1e-3), (decay_of_matrices_only, 0.02)):
        run = trainer(optimizer=optimizer).fit(net(), numbers())
        assert [row["lr"] for row in run.history] == [lr, lr]
        assert run.recipe["schedule"] == f"constant({lr})"


def test_a_rate_that_is_a_tensor_is_left_as_it_was():
    model, lr = net(), torch.tensor(0.125)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    run = trainer(optimizer=optimizer).fit(model, numbers())
    suite.same(run, trainer(optimizer=functools.partial(torch.optim.SGD, lr=0.125)).fit(net(), numbers()))
    trainer(optimizer=optimizer, schedule=0.5).fit(model, numbers())
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.125


def test_samesteps_optimizers_and_torchs_agree():
    for ours, theirs in (
        (ss.sgd(momentum=0.9), functools.partial(torch.optim.SGD, momentum=0.9)),
        (ss.sgd(momentum=0.9, nesterov=True, weight_decay=0.1), functools.partial(
            torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1)),
    ):  # fmt: skip
        one = trainer(optimizer=ours, schedule=0.1).fit(net(), numbers())
        two = trainer(optimizer=theirs, schedule=0.1).fit(net(), numbers())
        for name, values in one.weights().items():
            np.testing.assert_allclose(two.weights()[name], values, rtol=ROUNDING, atol=ROUNDING)


def test_the_gradient_is_clipped_before_torch_sees_it():
    settings = {"schedule": 1.0, "gradient_clip_val": 0.01, "max_epochs": 1, "batch_size": 61}
    run = trainer(optimizer=torch.optim.SGD, **settings).fit(net(), numbers())
    moved = [run.weights()[name] - values.numpy() for name, values in net().state_dict().items()]
    assert np.sqrt(sum((change**2).sum() for change in moved)) == pytest.approx(0.01, rel=ROUNDING)


def two_rates(parameters, first=0.3, second=0.1):
    head, *rest = parameters
    return torch.optim.AdamW([{"params": rest, "lr": first}, {"params": [head], "lr": second}], weight_decay=0.1)


@pytest.mark.parametrize("second", [0.1, 0.0, 0.3])
def test_groups_with_different_rates_keep_their_ratio(second):
    """Without a schedule their own rates; with one, the first group's is that of the schedule."""
    make = functools.partial(two_rates, second=second)
    model = net()
    optimizer = make(model.parameters())
    run = trainer(optimizer=optimizer).fit(model, numbers())
    suite.same(run, trainer(optimizer=make, devices=1).fit(net(), numbers()))
    assert [row["lr"] for row in run.history] == [0.3, 0.3]
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, second]
    expected = loop(model, optimizer)
    for name, values in expected.state_dict().items():
        np.testing.assert_allclose(run.weights()[name], values.numpy(), rtol=ROUNDING, atol=ROUNDING)
    model = net()
    optimizer = make(model.parameters())
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    run = trainer(optimizer=make, schedule=lambda t: 0.3 / (1 + t)).fit(net(), numbers())
    for name, values in loop(model, optimizer).state_dict().items():
        np.testing.assert_allclose(run.weights()[name], values.numpy(), rtol=ROUNDING, atol=ROUNDING)


def test_the_rates_of_groups_are_rounded_as_those_of_the_schedule_are():
    replica = load("torch").replica(net(torch.float32), None, Device("cpu", 0), 2)
    updater = TorchUpdater(two_rates, replica, 0.0)
    gradient, own = torch.zeros_like(replica.parameters), float(np.float32(0.3))
    for lr, expected in ((own, 0.1), (0.5, 0.5 * (0.1 / 0.3))):
        updater.apply(gradient, lr, 0)
        assert [group["lr"] for group in updater.optimizer.param_groups] == [lr, float(np.float32(expected))]
    updater.moved = [[{"lr": 0.5}, {"lr": 0.7}]]
    updater.apply(gradient, 0.5, 0)
    assert [group["lr"] for group in updater.optimizer.param_groups] == [0.5, float(np.float32(0.7))]


RATES = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda t: 1 / (1 + t), lambda t: 0.9**t]),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.3, 0.1], 8),
    "from zero": lambda o: lr_scheduler.LambdaLR(o, [lambda t: t / 10, lambda t: 1.0]),
    "equal at first": lambda o: lr_scheduler.LambdaLR(o, [lambda t: 1.0, lambda t: 3.0 / (1 + t)]),
}


@pytest.mark.parametrize("name", RATES)
def test_a_scheduler_with_a_rate_for_each_group_is_followed(name, tmp_path):
    def trained(**settings):
        model = net()
        optimizer = two_rates(model.parameters())
        return trainer(optimizer=optimizer, schedule=RATES[name](optimizer), **settings).fit(model, numbers())

    model = net()
    optimizer = two_rates(model.parameters())
    scheduler = RATES[name](optimizer)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    run, plain = trained(), loop(model, optimizer)
    agree(run, plain)
    trained(devices=1, max_epochs=1, run_dir=tmp_path)
    resumed = trained(devices=2, run_dir=tmp_path)
    assert resumed.resumed == 4
    suite.same(run, resumed)
    for other, message in (
        (ss.adamw(), "^read: all parameter groups must have one rate, .*, Trainer"),
        (torch.optim.AdamW, "of another optimizer than the one that trains .AdamW., which has other groups"),
    ):
        with pytest.raises(Invalid, match=message):
            trainer(optimizer=other, schedule=RATES[name](two_rates(net().parameters()))).fit(net(), numbers())


def adam_in_groups(parameters):
    first, *rest = parameters
    return torch.optim.Adam([{"params": [first], "betas": (0.8, 0.99)}, {"params": rest}])


MOVING = {
    "OneCycleLR": (functools.partial(torch.optim.SGD, momentum=0.9), lambda o: lr_scheduler.OneCycleLR(o, 0.3, 8)),
    "OneCycleLR, betas of groups": (adam_in_groups, lambda o: lr_scheduler.OneCycleLR(o, 0.1, 8)),
    "CyclicLR": (functools.partial(torch.optim.SGD, nesterov=True, momentum=0.9),
                 lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.3, 3, base_momentum=0.5)),
    "weight decay": (functools.partial(torch.optim.SGD, lr=0.1, weight_decay=0.1), lambda o: DecayToo(o)),
}  # fmt: skip


class DecayToo(lr_scheduler.StepLR):
    """A scheduler of somebody's own."""

    def __init__(self, optimizer):
        super().__init__(optimizer, 3, 0.5)

    def get_lr(self):
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 * (1 + self.last_epoch)
        return super().get_lr()


@pytest.mark.parametrize("name", MOVING)
def test_a_scheduler_that_moves_more_than_the_rate_is_followed(name, monkeypatch):
    def trained(**settings):
        model = net()
        optimizer = MOVING[name][0](model.parameters())
        scheduler = MOVING[name][1](optimizer)
        before = repr(optimizer.param_groups)
        run = trainer(optimizer=optimizer, schedule=scheduler, **settings).fit(model, numbers())
        assert repr(optimizer.param_groups) == before
        return run

    model = net()
    optimizer = MOVING[name][0](model.parameters())
    scheduler = MOVING[name][1](optimizer)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    run, plain = trained(), loop(model, optimizer)
    agree(run, plain)
    suite.same(run, trained(devices=1))
    monkeypatch.setattr(TorchUpdater, "moved", property(lambda self: (), lambda self, value: None), raising=False)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):  # the twin: only the rate, as it once was
        agree(trained(), plain)


def test_a_scheduler_of_an_optimizer_that_does_not_train():
    """What can be followed is: a factory with the same groups and settings. Anything else is refused."""
    make, schedule = MOVING["OneCycleLR"]

    def run(optimizer, **settings):
        return trainer(optimizer=optimizer, schedule=schedule(make(net().parameters())), **settings).fit(
            net(), numbers()
        )

    model = net()
    optimizer = make(model.parameters())
    suite.same(run(make), trainer(optimizer=optimizer, schedule=schedule(optimizer)).fit(model, numbers()))
    with pytest.raises(Invalid) as refused:
        run(ss.sgd(momentum=0.9))
    assert str(refused.value) == (
        "OneCycleLR moves momentum as well as the rate, which only an optimizer of torch.optim follows: pass the scheduler's "
        "as optimizer, or cycle_momentum=False to the scheduler"
    )
    for other in (torch.optim.Adam, decay_of_matrices_only):
        with pytest.raises(
            Invalid, match=r"^OneCycleLR moves momentum of another optimizer .* trains \(Adam.?\), which has"
        ):
            run(other)
    plain = functools.partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=8, cycle_momentum=False)
    trainer(optimizer=ss.sgd(momentum=0.9), schedule=plain(make(net().parameters()))).fit(net(), numbers())


def groups_of_sgd(parameters, count, **settings):
    parameters = list(parameters)
    groups = [{"params": [p]} for p in parameters[: count - 1]] + [{"params": parameters[count - 1 :]}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, **settings)


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1), (2, 2), (3, 3)])
def test_a_scheduler_is_followed_by_an_optimizer_with_as_many_groups(theirs, ours):
    replica = load("torch").replica(net(), None, Device("cpu", 0), 2)
    updater = TorchUpdater(functools.partial(groups_of_sgd, count=ours), replica, 0.0)
    scheduler = lr_scheduler.OneCycleLR(groups_of_sgd(net().parameters(), theirs), 0.3, 8)
    if theirs == ours:
        rates, moved = updater.read(scheduler, 3)
        assert (len(rates), [len(groups) for groups in moved]) == (3, [ours] * 3)
        assert all(group.keys() == {"momentum"} for groups in moved for group in groups)
    else:
        with pytest.raises(
            Invalid, match=r"^OneCycleLR moves momentum of another optimizer .* trains \(SGD\), which has"
        ):
            updater.read(scheduler, 3)


def test_an_optimizer_is_told_with_a_short_hash_of_its_past():
    model = nn.Sequential(nn.Linear(12, 3), nn.BatchNorm1d(3))
    replica = load("torch").replica(model, None, Device("cpu", 0), 2)
    optimizer = torch.optim.SGD([{"".join(["par", "ams"]): list(model.parameters())}], lr=0.5)
    about = str([{k: v for k, v in optimizer.param_groups[0].items() if k != "params"}])
    updater = TorchUpdater(optimizer, replica, 0.0)
    assert repr(updater) == f"torch.optim.SGD({about})"
    updater.apply(torch.ones_like(replica.parameters), 0.25, 0)
    for name, weights in model.named_parameters():
        assert replica.tensors()[name].tolist() == (weights.detach() - 0.25).tolist()
    optimizer.state[model[0].bias]["momentum_buffer"] = torch.ones(3)
    past = repr(TorchUpdater(optimizer, replica, 0.0)).removeprefix(f"torch.optim.SGD({about}")
    assert re.fullmatch(r", state=[0-9a-f]{16}\)", past)


class Late(lr_scheduler.LambdaLR):
    """Sets what the optimizer does not have from the second update on, and something else as it is."""

    def get_lr(self):
        for group in self.optimizer.param_groups:
            group["momentum"] = float(str(group["momentum"]))  # the same number, another object
            if self.last_epoch >= 2:
                group["late"] = 3
        return super().get_lr()


def test_what_a_scheduler_moves_is_what_is_not_always_the_same():
    def scheduler():
        return Late(groups_of_sgd(net().parameters(), 2), lambda t: 1.0)

    assert read_all(scheduler(), 1) == ([0.1], [])
    assert read_all(scheduler(), 2) == ([0.1, 0.1], [])
    assert read_all(scheduler(), 4) == ([0.1] * 4, [[{}, {}]] * 2 + [[{"late": 3}] * 2] * 2)


def test_a_scheduler_that_ends_too_soon():
    optimizer = torch.optim.SGD(net().parameters())
    with pytest.raises(Invalid, match="^OneCycleLR ends before 8 steps: Tried to step 7 times"):
        trainer(schedule=lr_scheduler.OneCycleLR(optimizer, 0.1, 6, cycle_momentum=False)).fit(net(), numbers())


# The same bits


@pytest.mark.parametrize("model", ["lenet_modern", "mlp_with_dropout"])
@pytest.mark.parametrize("name", ["SGD, momentum", "Adam", "AdamW, two groups", "RMSprop", "Adagrad"])
def test_same_bits_on_any_number_of_devices(name, model):
    rate = lambda t: 0.01 / (1 + t)  # noqa: E731
    suite.check(lambda k: suite.fit(model, k, optimizer=FACTORIES[name], schedule=rate), (2, 3, 8))


def test_an_optimizer_made_from_the_model_has_the_same_bits_on_any_number_of_devices():
    def run_on(count):
        model = suite.zoo.mlp_with_dropout()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        return trainer(devices=count, optimizer=optimizer).fit(model, suite.data("mlp_with_dropout", 61))

    suite.check(run_on, (2, 3, 8))


class Tied(nn.Module):
    """Two layers with one weight, one that is frozen, and one with the memory of channels-last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 3).requires_grad_(False)
        self.double()

    def forward(self, x):
        return self.frozen(self.second(self.first(self.conv(x.view(-1, 3, 2, 2)).flatten(1))))


@pytest.mark.parametrize("made", ["by a factory", "from the trained parameters", "from all parameters"])
def test_tied_and_frozen_parameters(made):
    """An optimizer skips a parameter without a gradient: a frozen one stays, also with weight decay."""
    make = functools.partial(torch.optim.AdamW, lr=0.02, weight_decay=0.5)

    def run_on(count):
        model = Tied()
        trained = (
            model.parameters() if made == "from all parameters" else [p for p in model.parameters() if p.requires_grad]
        )
        return trainer(devices=count, optimizer=make if made == "by a factory" else make(trained)).fit(model, numbers())

    suite.check(run_on, (2, 3))
    model, start, weights = Tied(), Tied().state_dict(), run_on(1).weights()
    loop(model, make(model.parameters()))
    for name, values in model.state_dict().items():
        np.testing.assert_allclose(weights[name], values.numpy(), rtol=ROUNDING, atol=ROUNDING)
        assert name.startswith("frozen") == torch.equal(values, start[name])
    assert weights["first.weight"].tobytes() == weights["second.weight"].tobytes()
    assert weights["frozen.weight"].tobytes() == start["frozen.weight"].numpy().tobytes()


def test_parameters_that_the_optimizer_does_not_have_stay():
    model = net()
    run = trainer(optimizer=torch.optim.SGD(model[2].parameters(), lr=0.1)).fit(model, numbers())
    assert run.weights()["0.weight"].tobytes() == model[0].weight.detach().numpy().tobytes()
    assert (run.weights()["2.weight"] != model[2].weight.detach().numpy()).any()


class Counted(nn.Module):
    """Scores whose gradients are small whole numbers: how often a word was seen. So every sum of them is exact."""

    def __init__(self, sparse):
        super().__init__()
        self.words = nn.Embedding(7, 3, sparse=sparse)
        nn.init.zeros_(self.words.weight)

    def forward(self, x):
        return self.words(x).sum(1)


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("shards", [1, 8])
def test_a_sparse_gradient_has_the_numbers_of_a_dense_one(shards, sparse):
    x, y = np.random.default_rng(0).integers(0, 6, (32, 5)), np.arange(32) % 3  # word 6 is never seen
    settings = {"batch_size": 16, "shards": shards, "devices": 1, "schedule": 1.0}
    loss = lambda output, y: output.sum(1) * (y + 1)  # noqa: E731
    run = trainer(loss=loss, **settings).fit(Counted(sparse), (x, y))
    expected = np.zeros((7, 3), np.float32)
    np.add.at(expected, x, -(y[:, None, None] + 1) * 2 / 16)  # two epochs; a batch's mean
    assert run.weights()["words.weight"].tolist() == expected.tolist()
    assert (expected[:6] != 0).all()


class Scaled(torch.optim.SGD):
    """An optimizer of somebody's own, with something to remember."""

    def __init__(self, parameters, scale):
        super().__init__(parameters, lr=0.1)
        self.scale = scale

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.grad = p.grad * self.scale
        return super().step(closure)


def test_an_optimizer_of_ones_own():
    model = net()
    made = trainer(optimizer=Scaled(model.parameters(), 2.0)).fit(model, numbers())
    suite.same(made, trainer(optimizer=lambda parameters: Scaled(parameters, 2.0)).fit(net(), numbers()))
    agree(made, loop(model, Scaled(model.parameters(), 2.0)))


# Evaluation, the recipe, what is refused


@pytest.mark.parametrize("settings", [{}, {"average": swa(1)}], ids=["plain", "average"])
def test_a_trainer_with_an_optimizer_made_from_a_model_can_evaluate_others(settings):
    model, (x, y) = net(), numbers()
    data = ss.Data((x, y), (x[:20], y[:20]))
    fitting = trainer(optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **settings)
    run = fitting.fit(model, data)
    result = fitting.evaluate(run.model, data)
    last = run.history[-1]
    assert result == {"loss": last["test_loss"], "accuracy": last["test_accuracy"], "examples": 20}
    assert fitting.evaluate(net(), data)["loss"] != result["loss"]


def test_an_evaluation_makes_no_optimizer():
    def never(parameters):
        raise AssertionError("an evaluation updates nothing")

    assert trainer(optimizer=never).evaluate(net(), numbers())["examples"] == 61


def test_the_recipe_tells_class_and_settings():
    run = trainer(optimizer=decay_of_matrices_only, schedule=0.5).fit(net(), numbers())
    text = run.recipe["optimizer"]
    assert text.startswith("torch.optim.AdamW([{")
    assert "'weight_decay': 0.5" in text
    assert "'weight_decay': 0.0" in text
    assert "'lr': 0.02" in text  # what it came with; what was applied is in the schedule
    assert "tensor" not in text.lower()
    assert (
        run.recipe["optimizer"] == trainer(optimizer=decay_of_matrices_only).fit(net(), numbers()).recipe["optimizer"]
    )


NO_RATIO = "the optimizer's first group has rate 0, and the schedule sets that: put another group first"
HOOKS = (
    "the optimizer has hooks, which a replica's copy of it would not have: pass a function that makes the optimizer from "
    "parameters and adds them"
)
FOREIGN = "the optimizer has parameters that are not parameters of the model to be trained"


def no_first_rate(parameters):
    return two_rates(parameters, 0.0)


@pytest.mark.parametrize(
    ("optimizer", "kind", "message"),
    [
        (lambda parameters: None, WrongType, "optimizer(parameters) must give a torch.optim.Optimizer, got NoneType"),
        (lambda parameters: parameters, WrongType, "optimizer(parameters) must give a torch.optim.Optimizer, got list"),
        (lambda parameters: ss.sgd(), WrongType, "optimizer(parameters) must give a torch.optim.Optimizer, got SGD"),
        (torch.optim.LBFGS, WrongType,
         "LBFGS computes the loss several times in an update, which a fit does not: use another"),
        (no_first_rate, Invalid, NO_RATIO),
        (lambda parameters: torch.optim.SGD(net().parameters()), Invalid, FOREIGN),
    ],
    ids=["None", "list", "samestep's", "LBFGS", "no first rate", "another model's"],
)  # fmt: skip
@pytest.mark.parametrize("schedule", [None, 0.1], ids=["own rate", "schedule"])
def test_factories_that_cannot_be_used(optimizer, kind, message, schedule, tmp_path):
    with pytest.raises(kind) as caught:
        trainer(optimizer=optimizer, schedule=schedule, run_dir=tmp_path / "run").fit(net(), numbers())
    assert type(caught.value) is kind
    assert str(caught.value) == message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("schedule", [None, 0.1], ids=["own rate", "schedule"])
def test_optimizers_that_cannot_be_used(schedule):
    model = net()
    mine = list(model.parameters())
    hooked, hooked_before = torch.optim.SGD(mine), torch.optim.SGD(mine)
    hooked.register_step_post_hook(lambda *_: None)
    hooked_before.register_step_pre_hook(lambda *_: None)
    for optimizer, kind, message in (
        (torch.optim.SGD(net().parameters()), Invalid, FOREIGN),
        (torch.optim.SGD([*mine, nn.Parameter(torch.zeros(1))]), Invalid, FOREIGN),
        (no_first_rate(mine), Invalid, NO_RATIO),
        (torch.optim.LBFGS(mine), WrongType, "LBFGS computes the loss several times in an update, "
         "which a fit does not: use another"),
        (torch.optim.lr_scheduler.StepLR(torch.optim.SGD(mine), 2), WrongType,
         "optimizer must be a torch.optim.Optimizer, or a function that makes one from parameters, got StepLR"),
        (hooked, Invalid, HOOKS), (hooked_before, Invalid, HOOKS),
    ):  # fmt: skip
        with pytest.raises(kind) as caught:
            trainer(optimizer=optimizer, schedule=schedule).fit(model, numbers())
        assert type(caught.value) is kind
        assert str(caught.value) == message


def test_the_state_of_an_optimizer_goes_where_the_weights_are():
    """As on a GPU, whose replicas get copies of an optimizer that was made on the CPU."""
    model = net()
    elsewhere = {id(p): nn.Parameter(p.detach().to("meta")) for p in model.parameters()}
    slots = _copied(torch.optim.Adagrad(model.parameters()), elsewhere).state.values()
    assert [(str(s["sum"].device), str(s["step"].device)) for s in slots] == [("meta", "cpu")] * len(elsewhere)
    adam = torch.optim.Adam(model.parameters())
    names = ["exp_avg", "".join(["st", "ep"]), "zeta"]  # of a file, as it may be, not the same object as "step"
    adam.state[model[0].weight] = {name: torch.ones(()) for name in names} | {"own": 3}
    (found,) = _copied(adam, elsewhere).state.values()
    assert [str(found[name].device) for name in names] == ["meta", "cpu", "meta"]
    assert found["own"] == 3


class Around(torch.optim.Optimizer):
    """An optimizer around another, which leaves out what torch.optim sets up and may keep what it likes as its state."""

    def __init__(self, inner, **own):
        self.inner, self.param_groups = inner, inner.param_groups
        vars(self).update(own)


@pytest.mark.parametrize("own", [{}, {"state": {"count": 3, "all": {"slow": torch.ones(2)}}}])
def test_any_state_of_an_optimizer_is_copied(own):
    mine = list(net().parameters())
    given = Around(torch.optim.Adagrad(mine), tail=3, **own)
    vars(given)["".join(["st", "ep"])] = print  # as of a scheduler, which counts
    given.inner.outer = given
    twin = _copied(given, {id(p): p for p in mine})
    assert (twin.tail, twin.inner.outer, "step" in vars(twin)) == (3, twin, False)
    assert twin.inner is not given.inner
    assert repr(vars(twin).get("state")) == repr(own.get("state"))


def test_of_several_losses_per_example_the_mean_counts():
    value = torch.tensor([[1.0, 2.0, 6.0], [4.0, 5.0, 9.0]])
    for given in (value, value.reshape(2, 3, 1)):
        assert (
            load("torch").loss_of(Measure(lambda output, y, given=given: given), None, torch.zeros(2))[0].item() == 9.0
        )


def test_tensors_on_two_devices_are_one_line():
    """What PyTorch says on a GPU when a closure holds the user's own layer, which is on the CPU."""
    said = (
        "Expected all tensors to be on the same device, but got mat1 is on cuda:0, different from other tensors on cpu"
    )
    error = load("torch").explain(RuntimeError(said))
    assert str(error).startswith("the model mixes devices, as by a closure that holds a layer")
    assert said in str(error)
    assert load("torch").explain(RuntimeError("something else")) is None


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (MemoryError("no more"), "the device ran out of memory"),
        (MemoryError(), "the device ran out of memory"),
        (
            RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 13 has a total capacity of 7.00 GiB"),
            "cuda:13 ran out of memory when 2.50 GiB were asked for",
        ),
        (
            ValueError("RESOURCE_EXHAUSTED: OOM when allocating tensor with shape[8,1024] and type float"),
            "the device ran out of memory when [8,1024] were asked for",
        ),
    ],
)
def test_memory_that_has_run_out_is_told_in_one_line(error, where):
    with pytest.raises(OutOfMemory) as caught, load("torch").explained():
        raise error
    assert str(caught.value) == f"{where}: raise shards (smaller shards need less), or lower the batch size"
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_function_of_samesteps_that_was_not_called():
    with pytest.raises(
        WrongType, match=r"^optimizer must be one of samestep's, such as samestep.sgd\(\), .*<function sgd"
    ):
        trainer(optimizer=ss.sgd)


# Numerics


LATE = """
import torch
product = torch.ones(300, 300) @ torch.ones(300, 300)  # MKL and ATen have chosen their kernels
import numpy as np, samestep as ss
trainer = ss.Trainer(1, 4, shards=2, devices=1, progress=False, portable={portable})
print(trainer.fit(torch.nn.Linear(3, 4), (np.zeros((4, 3), np.float32), np.arange(4))).recipe["portable"])
"""


def of_late(portable: Any, **environ: str) -> subprocess.CompletedProcess[str]:
    usual = {name: value for name, value in os.environ.items() if name not in ("ATEN_CPU_CAPABILITY", "MKL_CBWR")}
    return subprocess.run(
        [sys.executable, "-c", LATE.format(portable=portable)], env=usual | environ, capture_output=True, text=True
    )


@pytest.mark.parametrize(("portable", "environ"), [(True, {}), (None, {"SAMESTEP_PORTABLE": "1"})])
def test_portable_too_late(portable: Any, environ: dict[str, str]) -> None:
    done = of_late(portable, **environ)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("samestep.errors.Invalid: portable: ")
    assert "Set SAMESTEP_PORTABLE=1 before Python starts" in last
    assert "samestep train --portable my.py" in last


def test_portable_in_time_or_not_asked_for() -> None:
    assert of_late(None).stdout == "False\n"
    set_before = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}
    assert of_late(True, **set_before).stdout == "True\n"


def test_roots_of_portable_runs_are_exact_and_only_there() -> None:
    from samestep.backends.torch import kernels

    x = torch.rand(5000, generator=torch.Generator().manual_seed(0))
    exact = np.sqrt(x.numpy())
    ways = {
        "sqrt": torch.sqrt, "in place": lambda x: x.clone().sqrt_(), "power": lambda x: x**0.5,
        "power in place": lambda x: x.clone().pow_(0.5), "out": lambda x: torch.sqrt(x, out=torch.empty(0)),
        "foreach": lambda x: torch._foreach_sqrt([x])[0], "double": lambda x: x.double().sqrt().float(),
        "strided": lambda x: torch.stack([x, x], 1)[:, 0].sqrt(), "one": lambda x: torch.stack([v.sqrt() for v in x[:9]]),
    }  # fmt: skip
    before = torch.sqrt(x)
    with kernels.of_every_cpu():
        for name, way in ways.items():
            got = way(x).numpy()
            assert got.tobytes() == exact[: len(got)].tobytes(), name
        y = x[:5].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(y.sqrt().sum(), y)
        assert torch.equal(gradient, 1 / (2 * y.detach().sqrt()))
        assert torch.isnan(torch.sqrt(torch.tensor([-1.0]))).all()
        assert torch.equal(torch.tensor([2.0, 3.0]) ** 2, torch.tensor([4.0, 9.0]))
        assert [(torch.tensor([4.0]) ** n).item() for n in (-1, -0.5, 1.5)] == [0.25, 0.5, 8.0]
        assert torch.tensor([4.0, 16.0]).pow_(-2).tolist() == [1 / 16, 1 / 256]
        assert torch.sqrt(torch.tensor([4, 9])).tolist() == [2.0, 3.0]
        assert torch.sqrt(torch.tensor([4.0], dtype=torch.bfloat16)).tolist() == [2.0]
    assert torch.equal(torch.sqrt(x), before)


def test_products_of_portable_runs_are_those_of_onednn_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from samestep.backends.torch import kernels

    calls, product = [], kernels._product
    monkeypatch.setattr(kernels, "_product", lambda *given: calls.append(given) or product(*given))
    torch.manual_seed(0)
    a, b, bias = torch.randn(37, 700), torch.randn(700, 41), torch.randn(41)
    by_onednn = torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")
    usual = torch.addmm(bias, a, b)
    with kernels.of_every_cpu():
        assert torch.equal(torch.addmm(bias, a, b), by_onednn)
        assert torch.equal(F.linear(a, b.t(), bias), by_onednn)
        assert len(calls) == 2
        assert torch.equal(torch.mm(a, b, out=torch.empty(0)), torch.mm(a, b))  # so recorded shards do it
        del calls[2:]
        for x in (a, a.t().contiguous().t(), torch.stack([a, a], 2)[:, :, 0], torch.cat([a, a], 1)[:, :700]):
            torch.testing.assert_close((x @ b).double(), a.double() @ b.double(), rtol=0, atol=1e-3)
        one = torch.ones(()).expand(37, 41)  # such is the gradient of a sum
        torch.testing.assert_close(a.t() @ one, a.sum(0)[:, None].expand(700, 41), rtol=0, atol=1e-3)
        assert len(calls) == 7
        # What is not oneDNN's is as it was: other types, scales and shapes, nothing at all, errors.
        assert (torch.ones(2, 0) @ torch.ones(0, 3)).tolist() == [[0.0] * 3] * 2
        assert (torch.ones(0, 2) @ torch.ones(2, 3)).shape == (0, 3)
        assert torch.addmm(torch.ones(1), torch.ones(1, 2), torch.ones(2, 1), beta=3, alpha=2).tolist() == [[7.0]]
        assert (torch.ones(2, 2, dtype=torch.float64) @ torch.ones(2, 2, dtype=torch.float64)).tolist() == [
            [2.0] * 2
        ] * 2
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.ones(2, 3) @ torch.ones(2, 3)
    assert torch.equal(torch.addmm(bias, a, b), usual)
    assert len(calls) == 7


def test_which_products_are_onednns() -> None:
    from samestep.backends.torch.kernels import _is_ours

    def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype)

    assert _is_ours(ones(1, 1), ones(1, 1))
    assert _is_ours(ones(2, 3), ones(3, 4))
    assert _is_ours(ones(2, 3), ones(3, 3))
    for a, b in (
        (ones(2, 3, dtype=torch.float64), ones(3, 4)), (ones(2, 3), ones(3, 4, dtype=torch.float64)),
        (ones(2, 3, dtype=torch.float64), ones(3, 4, dtype=torch.float64)),
        (ones(2, 3), ones(2, 3)), (ones(2, 3), ones(4, 2)), (ones(3, 2), ones(3, 2)), (ones(2, 0), ones(0, 3)),
        (ones(0, 2), ones(2, 3)), (ones(2, 2), ones(2, 0)),
    ):  # fmt: skip
        assert not _is_ours(a, b)


@pytest.mark.parametrize(
    ("bias", "scales", "ours"),
    [
        ((4,), {}, True), ((4,), {"beta": 1.0}, True),
        ((4,), {"beta": 2}, False), ((4,), {"alpha": 2}, False), ((4,), {"beta": 2, "alpha": 2}, False),
        ((4,), {"beta": 0, "alpha": 0}, False), ((4,), {"beta": 0}, False), ((4,), {"alpha": 0}, False),
        ((1,), {}, False), ((), {}, False), ((2, 4), {}, False), ((6, 4), {}, False), ((6, 1), {}, False),
    ],
)  # fmt: skip
def test_a_bias_is_added_by_onednn_if_it_is_plain(
    bias: Any, scales: Any, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from samestep.backends.torch import kernels

    calls, product = [], kernels._product
    monkeypatch.setattr(kernels, "_product", lambda *given: calls.append(given) or product(*given))
    rows = bias[0] if len(bias) == 2 else 2
    added, a, b = torch.arange(float(np.prod(bias))).reshape(bias), torch.ones(rows, 3), torch.full((3, 4), 2.0)
    with kernels.of_every_cpu():
        found = torch.addmm(added, a, b, **scales)
        assert len(calls) == ours
        with pytest.raises(RuntimeError, match="dtype"):
            torch.addmm(added.double(), a, b)
        with pytest.raises(RuntimeError):
            torch.addmm(added, a, b[:2])
        assert torch.addmm(added.double(), a.double(), b.double(), **scales).dtype == torch.float64
    assert len(calls) == ours
    expected = scales.get("beta", 1) * added.numpy() + scales.get("alpha", 1) * (a.numpy() @ b.numpy())
    assert found.tolist() == expected.tolist()


def test_a_matrix_that_lies_one_way_or_the_other_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    from samestep.backends.torch.kernels import _product

    given: list[Any] = []
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda *about: given.append(about))
    a, b, wide = torch.ones(2, 3), torch.ones(3, 4), torch.ones(6, 8)
    _product(a, b)
    _product(torch.ones(3, 2).t(), torch.ones(4, 3).t(), torch.ones(4))
    assert [x.is_contiguous() for about in given for x in about[:2]] == [True, False, False, True]
    assert [about[2] is None for about in given] == [True, False]
    given.clear()
    _product(wide[::3, :3], wide[::2, ::2])
    assert [x.is_contiguous() for x in given[0][:2]] == [True, True]


def test_a_compiled_model_is_not_portable(monkeypatch: pytest.MonkeyPatch) -> None:
    from samestep.backends.torch.backend import backend

    monkeypatch.setattr(backend, "portable", True)
    model = nn.Sequential(nn.Linear(3, 4))
    backend.replica(model, None, Device("cpu", 0), 2)
    with warnings.catch_warnings(action="ignore"):
        compiled = nn.Sequential(torch.compile(model))
    with pytest.raises(Invalid, match="torch.compile writes kernels for this CPU"):
        backend.replica(compiled, None, Device("cpu", 0), 2)


def test_autocast_around_a_fit_is_refused() -> None:
    model, batch = torch.nn.Linear(3, 4), (np.zeros((4, 3), np.float32), np.arange(4))
    trainer = ss.Trainer(1, 4, shards=2, devices="cpu", progress=False)
    group = ss.Group(model, shards=2, devices="cpu")
    message = (
        "autocast (cpu) around a fit reaches only some of its threads: use it in the model's forward or "
        "Trainer(precision='bfloat16')"
    )
    with torch.autocast("cpu"):
        for call in (lambda: trainer.fit(model, batch), lambda: group.step(*batch)):
            with pytest.raises(Invalid, match=f"^{re.escape(message)}$"):
                call()
    group.step(*batch)


# Recordings, with something that stands for a CUDA graph


class Graph:
    """Computes `result`, whatever it is given."""

    def __init__(self, result: torch.Tensor) -> None:
        self.result = result

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.result


class Recording(Recorder):
    """Records no graph, but what a computation gave for the first time."""

    def _record(self, compute: Any, x: torch.Tensor, y: torch.Tensor, shape: Any) -> None:
        self._recorded[shape] = Graph(compute(x, y).clone())  # type: ignore[assignment]


def counted() -> tuple[Any, list[str]]:
    """A computation that depends on its first argument alone, and what was done."""
    done: list[str] = []

    def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        done.append(f"computed {len(x)}")
        return (x * 2).reshape(-1)

    return compute, done


def test_a_shape_is_recorded_once_and_compared_with_the_same_noise() -> None:
    (compute, done), recording, y = counted(), Recording(wanted=True), torch.zeros(1)
    found = recording.find(compute, torch.ones(2), y, lambda: done.append("seeded"))
    assert found is not None
    assert done == ["computed 2", "seeded", "computed 2", "seeded"]  # recorded, computed, and replayed
    assert recording.find(compute, torch.ones(2), y, lambda: None) is found
    others = [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(2, 3), torch.ones(3, 2).t()]
    assert len({id(recording.find(compute, x, y, lambda: None)) for x in others} | {id(found)}) == 5
    assert recording.find(compute, torch.ones(2), torch.zeros(2), lambda: None) is not found
    assert len(done) == 4 + 2 * 5


def test_so_many_shapes_are_recorded_and_no_more() -> None:
    (compute, _), recording, y = counted(), Recording(wanted=True), torch.zeros(1)
    found = [recording.find(compute, torch.ones(n), y, lambda: None) for n in range(1, 11)]
    assert [graph is not None for graph in found] == [True] * 8 + [False] * 2
    assert recording.find(compute, torch.ones(3), y, lambda: None) is found[2]


def test_what_is_not_wanted_is_not_recorded() -> None:
    compute, done = counted()
    assert Recording(wanted=False).find(compute, torch.ones(2), torch.zeros(1), lambda: None) is None
    assert done == []


def test_a_recording_with_other_bits_is_given_up_with_a_warning() -> None:
    calls, recording, y = itertools.count(), Recording(wanted=True), torch.zeros(1)
    compute = lambda x, y: x + next(calls)  # noqa: E731
    with pytest.warns(UserWarning, match="is not recorded on the GPU, and so slower: its bits are not those of its"):
        assert recording.find(compute, torch.ones(2), y, lambda: None) is None
    assert recording.find(compute, torch.ones(3), y, lambda: None) is None  # and nothing is tried again
    assert next(calls) == 2


def test_an_rnn_with_dropout_between_its_layers_keeps_state() -> None:
    def kept(kind: Any, *sizes: int, **settings: Any) -> bool:
        return keeps_state(nn.Sequential(nn.Linear(2, 2), kind(2, 2, *sizes, **settings)))

    assert kept(nn.LSTM, 2, dropout=0.5)
    assert kept(nn.RNN, 3, dropout=0.1)
    assert not kept(nn.GRU, 2)
    assert not kept(nn.Linear)
    with warnings.catch_warnings(action="ignore"):  # PyTorch warns that this dropout has no effect
        assert not kept(nn.GRU, 1, dropout=0.5)


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU without one, for what happens around a recording. Which states its generator was given."""
    given: list[str] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    generator = SimpleNamespace(clone_state=lambda: "as it was", graphsafe_set_state=given.append)
    monkeypatch.setattr(recorder, "_side", lambda device: stream)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: given.append("cleared"), raising=False)
    for name, fake in {
        "Stream": lambda *device: stream, "current_stream": lambda: stream, "stream": lambda stream: nullcontext(),
        "graph_pool_handle": lambda: "pool", "current_device": lambda: 0, "default_generators": [generator],
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    return given


def failing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    def fail(*about: Any) -> None:
        raise error

    monkeypatch.setattr(recorder, "Recorded", fail)
    return Recorder(wanted=True)


def test_a_model_that_cannot_be_recorded_is_computed_without(
    restored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one line that says why."""
    given = counted()[0], torch.ones(2), torch.zeros(1), lambda: None
    for said, told in {
        "operation not permitted when stream is capturing": "it looks at numbers of the device while it computes",
        "the library is gone\nand more of it": "the library is gone",
    }.items():
        refused = failing(RuntimeError(said), monkeypatch)
        with pytest.warns(UserWarning, match=f"an evaluation is not recorded on the GPU, and so slower: {told}$"):
            assert refused.find(*given) is None
        assert not refused.wanted
    full = failing(torch.OutOfMemoryError("no memory"), monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        full.find(*given)


def test_a_recording_that_fails_leaves_all_as_it_was(restored: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[bool] = []

    @contextmanager
    def graph(*about: Any, **settings: Any) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("capturing stream has unjoined work")  # what PyTorch says on the way out

    monkeypatch.setattr(torch.cuda, "graph", graph)
    with (
        pytest.raises(RuntimeError, match="unjoined") as caught,
        recorder.recording(None, "pool", torch.device("cuda", 0)),
    ):  # type: ignore[arg-type]
        inside.append(gc.isenabled())
        raise RuntimeError("a library said no")
    assert str(recorder.cause(caught.value)) == "a library said no"
    assert (inside, gc.isenabled()) == ([False], True)
    assert restored == ["cleared", "as it was", "cleared"]


def test_recordings_share_their_memory(restored: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each comes after some computations that are not recorded."""
    (compute, done), pools, y = counted(), itertools.count(), torch.zeros(1)
    made: list[Any] = []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: f"pool {next(pools)}")
    monkeypatch.setattr(recorder, "Recorded", lambda *about: made.append(about) or (lambda x, y: about[0](x, y)))
    recording = Recorder(wanted=True)
    for n in (2, 3):
        assert recording.find(compute, torch.ones(n), y, lambda: None) is not None
    assert [about[3] for about in made] == ["pool 0"] * 2
    assert done == ["computed 2"] * (recorder.WARM_UP + 2) + ["computed 3"] * (recorder.WARM_UP + 2)
    assert recording.wanted


def test_a_model_that_draws_on_the_host_is_not_recorded(restored: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = failing(AssertionError("it was recorded"), monkeypatch)
    with pytest.warns(UserWarning, match="it draws numbers on the host"):
        assert drawing.find(lambda x, y: x + torch.rand(2), torch.ones(2), torch.zeros(1), lambda: None) is None
    assert (drawing.wanted, restored) == (False, [])


@pytest.mark.parametrize("optimizer", [ss.sgd(momentum=0.9), ss.adagrad(), ss.adamw(weight_decay=0.1)], ids=repr)
def test_on_the_cpu_samestep_s_optimizers_compute_as_numpy_does(optimizer):
    """NumPy's square roots are correctly rounded. Those of PyTorch are not on every CPU, and would not be portable."""
    replica = load("torch").replica(net(torch.float32), None, Device.of("cpu"), 4)
    updater, weights = FlatUpdater(optimizer, replica, 0.0, True), replica.parameters.numpy().copy()
    state = {name: np.zeros_like(weights) for name in optimizer.slots}
    draw, twins = np.random.default_rng(0), list[bool]()
    for t in range(3):
        total = draw.standard_normal(replica.size, dtype=np.float32)
        updater.follow(torch.from_numpy(total.copy()), 60, 0.01, t, None)
        gradient = total[: len(weights)] / 60
        twin, _ = optimizer.update(weights.copy(), gradient, state, 0.01 * (1 + 1e-6), t)
        weights, state = optimizer.update(weights, gradient, state, 0.01, t)
        assert np.array_equal(replica.parameters.numpy(), weights)
        twins.append(np.array_equal(replica.parameters.numpy(), twin))
    assert not all(twins)
