"""The Trainer's schedule: whatever it is, update t is made with schedule(t), on any number of devices.

The model here is a meter: one weight whose gradient is exactly 1, so that every update takes exactly its rate off it.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conformance import suite
from patience import one_by_one
from torch import nn
from torch.optim import lr_scheduler

import samestep as ss
from samestep.backends.losses import Shape
from samestep.errors import Invalid, WrongType
from samestep.optimizers.averaging import path_average
from samestep.schedules.kinds import (
    constant,
    cosine,
    drops,
    exponential,
    geometric,
    natural_exp,
    one_cycle,
    piecewise,
    poly,
    table,
    triangle,
)
from samestep.schedules.plateau import Plateau
from samestep.schedules.rates import Rates, as_written, doubt
from samestep.schedules.text import parse

STEPS, EPOCHS = 5, 3  # 71 examples in batches of 16: the last has 7


class Meter(nn.Module):
    """Its loss is its weight, times the label."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=dtype))

    def forward(self, x):
        return self.weight * x


def weight(output, y):
    return output * y


def data(dtype=np.float32):
    """Training on it moves the weight; the loss on the test examples is 0, whatever the weight."""
    return ss.Data((np.ones(71, dtype), np.ones(71, dtype)), (np.ones(9, dtype), np.zeros(9, dtype)))


def trainer(**settings):
    base = {"max_epochs": EPOCHS, "batch_size": 16, "progress": False, "devices": "cpu", "loss": weight}
    return ss.Trainer(**base | settings)


def events(folder):
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def lrs(folder):
    """The rates of all updates, as the run folder tells them."""
    return [lr for event in events(folder) if event["event"] == "steps" for lr in event["lr"]]


def metered(rates, dtype=np.float32):
    """The weight after updates with these rates, each subtracted with one rounding."""
    value = dtype(0)
    for rate in rates:
        value = dtype(value - dtype(rate))
    return value


def check(folder, expected, model=None, dtype=np.float32, counts=(1, 3), **settings):
    """Fit on some numbers of devices: each update is told, and made, with the rate expected, rounded once."""
    told = [float(str(dtype(rate))) for rate in expected]  # as it was written: 0.05, not 0.05000000074505806
    assert [dtype(rate) for rate in told] == [dtype(rate) for rate in expected]
    runs = []
    for count in counts:
        path = folder / str(count)
        run = trainer(devices=count, run_dir=path, **settings).fit(model or Meter(), data(dtype))
        assert len(run.devices) == count
        assert lrs(path) == told
        assert [row["lr"] for row in run.history] == told[STEPS - 1 :: STEPS]
        [final] = run.weights().values()
        assert final.tobytes() == metered(expected, dtype).tobytes()
        runs.append(run)
    for other in runs[1:]:
        assert other.recipe == runs[0].recipe
        suite.same(other, runs[0])
    return runs[0]


def by_hand(t):
    return 0.3 / (1 + t)


class Halving:
    """A function of t that is an object."""

    def __init__(self, lr):
        self.lr = lr

    def __call__(self, t):
        return self.lr / 2**t


T = range(STEPS * EPOCHS)
KINDS = {
    "number": (0.3, [0.3] * len(T), "constant(0.3)"),
    "whole number": (1, [1] * len(T), "constant(1.0)"),
    "zero": (0, [0] * len(T), "constant(0.0)"),
    "NumPy number": (np.float32(0.3), [np.float32(0.3)] * len(T), "constant(0.30000001192092896)"),
    "torch number": (torch.tensor(0.25), [0.25] * len(T), "constant(0.25)"),
    "none": (None, [0.1] * len(T), "constant(0.1)"),
    "steps": (
        cosine(0.3, 12, end=0.01).warmup(4),
        [cosine(0.3, 12, end=0.01).warmup(4)(t) for t in T],
        "cosine(0.3, 12, end=0.01).warmup(4)",
    ),
    "steps, past the end": (drops(0.5, [2, 4], 0.1), [0.5] * 2 + [0.5 * 0.1] * 2 + [0.5 * 0.1 * 0.1] * 11,
                            "drops(0.5, [2, 4], 0.1)"),
    "epochs": (
        natural_exp(0.3, 0.5).in_epochs(),
        [natural_exp(0.3, 0.5)(t // STEPS) for t in T],
        "natural_exp(0.3, 0.5).in_epochs()",
    ),
    "epochs, smooth": (
        poly(0.3, 3).in_epochs(smooth=True),
        [poly(0.3, 3 * STEPS)(t) for t in T],
        "poly(0.3, 3).in_epochs(smooth=True)",
    ),
    "epochs of the user's length": (
        drops(0.3, [1, 2], 0.5).in_epochs(7),
        [0.3] * 7 + [0.15] * 7 + [0.075],
        "drops(0.3, [1, 2], 0.5).in_epochs(steps_per_epoch=7)",
    ),
    "epochs, combined": (
        2 * (cosine(0.1, 3) + constant(0.01)).in_epochs(),
        [2 * (cosine(0.1, 3)(t // STEPS) + 0.01) for t in T],
        "2.0 * (cosine(0.1, 3) + constant(0.01)).in_epochs()",
    ),
    "expression": (
        " geometric(0.4, 0.9).warmup(3) ",
        [geometric(0.4, 0.9).warmup(3)(t) for t in T],
        "geometric(0.4, 0.9).warmup(3)",
    ),
    "expression in epochs": (
        "cosine(0.3, 3).in_epochs()",
        [cosine(0.3, 3)(t // STEPS) for t in T],
        "cosine(0.3, 3).in_epochs()",
    ),
    "function": (by_hand, [0.3 / (1 + t) for t in T], "by_hand"),
    "lambda": (lambda t: 0.1 * t, [0.1 * t for t in T], "<lambda>"),
    "partial": (functools.partial(pow, 0.5), [0.5**t for t in T], "partial"),
    "object": (Halving(0.8), [0.8 / 2**t for t in T], "Halving"),
    "function to NumPy": (lambda t: np.float64(0.3) / (1 + t), [0.3 / (1 + t) for t in T], "<lambda>"),
    "function to NumPy arrays": (lambda t: np.array(0.3) * t, [0.3 * t for t in T], "<lambda>"),
    "function to torch": (
        lambda t: torch.tensor(0.3, dtype=torch.float64) / (1 + t), [0.3 / (1 + t) for t in T], "<lambda>"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_update_t_is_made_with_the_rate_of_t(kind, tmp_path):
    schedule, expected, text = KINDS[kind]
    run = check(tmp_path, expected, schedule=schedule)
    assert run.recipe["schedule"] == json.loads((tmp_path / "1" / "recipe.json").read_text())["schedule"] == text


@pytest.mark.parametrize("kind", KINDS)
def test_the_schedule_applied_is_in_the_run_if_it_is_one(kind):
    schedule, expected, _ = KINDS[kind]
    run = trainer(schedule=schedule).fit(Meter(), data())
    if callable(schedule) and not hasattr(schedule, "values"):
        assert run.schedule is None
    else:
        assert run.schedule.unit == "steps"
        assert run.schedule.values(len(T)).astype(np.float32).tolist() == np.float32(expected).tolist()
        again = trainer(schedule=run.schedule).fit(Meter(), data())
        suite.same(run, again)
        stored = trainer(schedule=repr(run.schedule)).fit(Meter(), data())
        suite.same(run, stored)


def test_weights_of_float64_get_rates_of_float64(tmp_path):
    schedule = cosine(0.3, 12, end=0.01)
    check(tmp_path, schedule.values(len(T)), Meter(torch.float64), np.float64, schedule=schedule)


def test_an_epoch_is_as_many_steps_as_it_takes_to_see_every_example(tmp_path):
    """n / batch_size, rounded up: 71 examples are 5 batches of 16, 71 of 1, and 1 of 71 or more."""
    schedule = geometric(0.5, 0.5).in_epochs()
    for batch_size, steps in ((16, 5), (1, 71), (70, 2), (71, 1), (1000, 1)):
        run = trainer(schedule=schedule, batch_size=batch_size, run_dir=tmp_path / str(batch_size), shards=1).fit(
            Meter(), data()
        )
        assert run.history[-1]["step"] == 3 * steps
        assert lrs(tmp_path / str(batch_size)) == [0.5] * steps + [0.25] * steps + [0.125] * steps


def test_a_schedule_is_asked_once_for_every_update_whatever_the_number_of_devices():
    """Accelerate steps it once per process (#1382)."""
    for count in (1, 2, 8):
        asked = []
        trainer(devices=count, schedule=lambda t: asked.append(t) or 0.1).fit(Meter(), data())  # noqa: B023
        assert asked == list(T)


def test_the_rates_on_the_way_are_told_in_pieces_too(tmp_path, monkeypatch):
    """Somebody who watches is told every half second; the rates of all pieces together are the same."""
    one_by_one(monkeypatch)
    monkeypatch.setattr("samestep.training.fit.LIVE", 0.0)
    schedule = poly(0.3, 20)
    check(tmp_path, schedule.values(len(T)), schedule=schedule)
    steps = [event for event in events(tmp_path / "1") if event["event"] == "steps"]
    assert [(event["first"], len(event["lr"])) for event in steps] == [(t, 1) for t in T]


# Schedulers of the framework


def made(make, lr=0.4):
    """An optimizer and a scheduler of torch."""
    optimizer = torch.optim.SGD([torch.zeros((), requires_grad=True)], lr=lr)
    return optimizer, make(optimizer)


def rates_in_a_loop(make, lr=0.4):
    optimizer, scheduler = made(make, lr)
    rates = []
    for _ in T:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 4, 0.5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 9, 0.01),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, len(T), cycle_momentum=False),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


def state_of(optimizer, scheduler):
    """All that a fit could change, as text."""
    return repr((optimizer.state_dict(), vars(scheduler) | {"optimizer": None}, dict(optimizer.state)))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_of_torch_counts_steps_and_is_left_as_it_was(name, tmp_path):
    expected = rates_in_a_loop(SCHEDULERS[name])
    assert len(set(expected)) > 3
    optimizer, scheduler = made(SCHEDULERS[name])
    before = state_of(optimizer, scheduler)
    run = check(tmp_path, expected, schedule=scheduler)
    assert state_of(optimizer, scheduler) == before
    assert optimizer.param_groups[0]["lr"] == expected[0]
    assert run.recipe["schedule"] == type(scheduler).__name__  # its content is in recipe["code"]
    assert "schedule" in run.recipe["code"]
    assert run.schedule == table(expected)


def test_a_scheduler_of_torch_that_was_stepped_goes_on_from_there(tmp_path):
    optimizer, scheduler = made(SCHEDULERS["StepLR"])
    expected = (rates_in_a_loop(SCHEDULERS["StepLR"]) + [0.4 * 0.5**3, 0.4 * 0.5**4, 0.4 * 0.5**4])[3:]
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    before = state_of(optimizer, scheduler)
    check(tmp_path, expected, schedule=scheduler)
    assert state_of(optimizer, scheduler) == before


def test_a_scheduler_of_the_optimizer_that_is_used(tmp_path):
    model = Meter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    scheduler = lr_scheduler.StepLR(optimizer, 4, 0.5)
    before = state_of(optimizer, scheduler)
    check(tmp_path, rates_in_a_loop(SCHEDULERS["StepLR"]), model, optimizer=optimizer, schedule=scheduler)
    assert state_of(optimizer, scheduler) == before


def test_schedulers_that_cannot_be_used():
    optimizer, plateau = made(lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(Invalid, match="ReduceLROnPlateau follows a metric, .* use samestep.Plateau$"):
        trainer(schedule=plateau).fit(Meter(), data())
    with pytest.raises(WrongType, match="must be a torch.optim.lr_scheduler.LRScheduler, got SGD"):
        trainer(schedule=optimizer).fit(Meter(), data())
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in (0.1, 0.2)]
    two = lr_scheduler.StepLR(torch.optim.SGD(groups), 2)
    with pytest.raises(Invalid, match=r"all parameter groups must have one rate, got \[0.1, 0.2\] at step 0"):
        trainer(schedule=two).fit(Meter(), data())


# None, and the rate of an optimizer of torch


@pytest.mark.parametrize(
    "optimizer",
    [functools.partial(torch.optim.SGD, lr=0.25), lambda parameters: torch.optim.SGD(parameters, lr=0.25)],
    ids=["partial", "lambda"],
)
def test_without_a_schedule_an_optimizer_of_torch_keeps_its_rate(optimizer, tmp_path):
    run = check(tmp_path / "own", [0.25] * len(T), optimizer=optimizer)
    assert run.recipe["schedule"] == "constant(0.25)"
    run = check(tmp_path / "schedule", [by_hand(t) for t in T], optimizer=optimizer, schedule=by_hand)
    assert run.recipe["schedule"] == "by_hand"


def test_without_a_schedule_an_optimizer_of_torch_that_was_made_before_keeps_its_rate(tmp_path):
    model = Meter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    check(tmp_path / "own", [0.25] * len(T), model, optimizer=optimizer)
    check(tmp_path / "zero", [0.0] * len(T), model, optimizer=optimizer, schedule=0)  # 0 is a rate, not the lack of one
    assert optimizer.param_groups[0]["lr"] == 0.25


# Plateau


def test_plateau_drops_when_the_test_loss_stalls(tmp_path):
    """A loss of 0 cannot become better: with a patience of 1, every second observation after the first drops the rate."""
    plateau = Plateau(0.4, factor=0.5, patience=1)
    before = plateau.state()
    epochs = [0.4, 0.4, 0.4, 0.2, 0.2, 0.1, 0.1]
    expected = [lr for lr in epochs for _ in range(STEPS)]
    run = check(tmp_path, expected, counts=(1, 2, 3), schedule=plateau, max_epochs=7)
    assert [row["test_loss"] for row in run.history] == [0.0] * 7
    assert plateau.state() == before
    assert run.recipe["schedule"] == repr(plateau)

    # 7 observations were made, the last of them after the end: its drop is in the trace as well
    assert repr(run.schedule) == "piecewise([3, 5, 7], [0.4, 0.2, 0.1, 0.05]).in_epochs(steps_per_epoch=5)"
    assert run.schedule.values(7 * STEPS).tolist() == expected
    suite.same(run, trainer(schedule=run.schedule, max_epochs=7).fit(Meter(), data()))
    suite.same(run, trainer(schedule=repr(run.schedule), max_epochs=7).fit(Meter(), data()))


def noisy():
    """A classification that cannot be learned: its loss goes up and down."""
    random = np.random.default_rng(0)
    return random.standard_normal((60, 12)).astype(np.float32), random.integers(0, 3, 60)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.5), nn.Linear(8, 3))


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("with_test", [True, False], ids=["test", "train"])
def test_plateau_follows_loss_or_accuracy_of_test_or_training_examples(mode, with_test, tmp_path):
    x, y = noisy()
    examples = ss.Data((x, y), (x[:20], (y[:20] + 1) % 3)) if with_test else (x, y)
    plateau = Plateau(0.4, patience=0, mode="".join(mode))  # a text that is equal, though not the same object
    settings = {"loss": None, "schedule": plateau, "max_epochs": 8}
    runs = [trainer(devices=["cpu"] * count, **settings).fit(net(), examples) for count in (1, 2, 3)]
    for other in runs[1:]:
        suite.same(other, runs[0])
        assert other.schedule == runs[0].schedule

    follow = ("test_" if with_test else "train_") + ("loss" if mode == "min" else "accuracy")
    twin, expected = Plateau(0.4, patience=0, mode=mode), []
    for row in runs[0].history:
        expected.append(twin.lr)
        twin.observe(row[follow])
    assert [row["lr"] for row in runs[0].history] == expected
    assert len(set(expected)) > 1  # it did drop
    suite.same(runs[0], trainer(loss=None, schedule=runs[0].schedule, max_epochs=8).fit(net(), examples))


def test_a_plateau_with_a_past_goes_on_from_there_and_its_trace_begins_with_the_fit(tmp_path):
    plateau = Plateau(0.8, patience=0)
    for metric in (1.0, 1.0, 1.0):
        plateau.observe(metric)
    assert plateau.lr == 0.2
    before = plateau.state()
    # the first loss of 0 is better than the 1.0 before; all later ones are not
    expected = [lr for lr in (0.2, 0.2, 0.1) for _ in range(STEPS)]
    run = check(tmp_path, expected, schedule=plateau)
    assert plateau.state() == before
    assert run.recipe["schedule"] != repr(Plateau(0.8, patience=0))  # its past decides the result as well
    assert run.schedule.values(len(T)).tolist() == expected
    suite.same(run, trainer(schedule=run.schedule).fit(Meter(), data()))


def test_plateau_of_an_accuracy_that_there_is_none_of_is_refused_before_anything_is_done(tmp_path):
    with pytest.raises(Invalid) as caught:
        trainer(schedule=Plateau(0.1, mode="".join("max")), run_dir=tmp_path / "run").fit(Meter(), data())
    assert str(caught.value) == ("Plateau(mode='max') follows the accuracy, and this model has none: use mode='min'")
    assert not (tmp_path / "run").exists()


def test_plateau_of_a_metric_without_a_value_is_told_by_name():
    settings = {"schedule": Plateau(0.1), "metrics": {"rare": lambda output, y: (0, 0)}, "monitor": "train_rare"}
    with pytest.raises(Invalid) as caught:
        trainer(**settings).fit(Meter(), data())
    assert str(caught.value) == "monitor: train_rare has no value after epoch 1: its weight is 0"


# What is in the recipe, and what is refused


def test_the_recipe_names_a_schedule_alike_in_every_fit():
    """Never an address in memory: two fits of one recipe have the same one."""
    makers = [
        lambda: lambda t: 0.1,
        lambda: functools.partial(pow, 0.5),
        lambda: Halving(0.1),
        lambda: Halving(0.1).__call__,
        lambda: Plateau(0.1),
        lambda: made(SCHEDULERS["LambdaLR"])[1],
        lambda: cosine(0.3, 20).in_epochs(),
        lambda: np.float64(0.1),
    ]
    for make in makers:
        one, two = (trainer(schedule=make()).fit(Meter(), data()).recipe["schedule"] for _ in range(2))
        assert one == two
        assert not re.search("0x|object at", one)


@pytest.mark.parametrize(
    ("schedule", "kind", "message"),
    [
        (1e39, Invalid, "a learning rate of 1e+39 is too large for float32"),
        (lambda t: -0.1, Invalid, "schedule(0) must be finite and at least 0, got schedule(0)=-0.1"),
        (
            lambda t: 0.1 if t < 7 else float("nan"),
            Invalid,
            "schedule(7) must be finite and at least 0, got schedule(7)=nan",
        ),
        (lambda t: "0.1", WrongType, "schedule(0) must be a number, got schedule(0)='0.1'"),
        (lambda t: None, WrongType, "schedule(0) must be a number, got schedule(0)=None"),
        (lambda t: True, WrongType, "schedule(0) must be a number, got schedule(0)=True"),
        (lambda t: [0.1], WrongType, "schedule(0) must be a number, got schedule(0)=[0.1]"),
        (lambda t: np.array([0.1, 0.2]), WrongType, "schedule(0) must be a number, got schedule(0)=[0.1, 0.2]"),
        (lambda t: torch.ones(2), WrongType, "schedule(0) must be a number, got schedule(0)=tensor([1., 1.])"),
        (lambda t: np.True_, WrongType, "schedule(0) must be a number, got schedule(0)=np.True_"),
        (
            lambda t: 10**400,
            Invalid,
            f"schedule(0) must be finite and at least 0, got schedule(0)={str(10**400)[:77]}...",
        ),
        (np.array([0.1, 0.2]), WrongType, "schedule must be a number, got schedule=[0.1, 0.2]"),
        ("cosine(0.3", Invalid, "schedule: cannot read 'cosine(0.3': '(' was never closed"),
        ("0.1", Invalid, "schedule: '0.1' is not a schedule, such as constant(0.1)"),
    ],
)
def test_rates_that_cannot_be_used(schedule, kind, message):
    with pytest.raises(kind) as caught:
        trainer(schedule=schedule).fit(Meter(), data())
    assert type(caught.value) is kind
    assert str(caught.value) == message


def test_the_users_schedule_is_not_copied_or_changed():
    schedule = cosine(0.3, 20).in_epochs()
    given = trainer(schedule=schedule, average=path_average())
    given.fit(Meter(), data())
    assert given.schedule is schedule
    assert schedule == copy.deepcopy(schedule) == parse("cosine(0.3, 20).in_epochs()")
    assert schedule.unit == "epochs"


@pytest.mark.parametrize(
    ("attributes", "rate"), [({"step": print}, 0.5), ({"base_lr": 2.0}, 0.5), ({"step": 3}, 0.25), ({}, 0.25)]
)
def test_what_counts_by_itself_is_read_and_not_called(attributes, rate):
    """Schedulers of Paddle have step(), those of MXNet a base_lr. Both can be called, but mean another t."""
    scheduler = type("Scheduler", (), {"__call__": lambda self, t: 0.25, **attributes})()
    updater = SimpleNamespace(fixed="", rate=lambda: 0.1, read=lambda schedule, n, unit: ([0.5] * n, ()))
    assert Rates(scheduler, [updater], 2, 3, Shape(None, "float32")).epoch(1) == [rate, rate]


def test_rates_that_nothing_else_decides_are_computed_beforehand():
    updater, asked = SimpleNamespace(fixed="", rate=lambda: 0.1), []

    def function(t):
        asked.append(t)
        return 0.5

    for schedule in (cosine(0.3, 8), function, Plateau(0.5)):
        rates, plain = (Rates(schedule, [updater], 2, 4, Shape(None, "float32")) for _ in range(2))
        rates.prepare(1)
        assert asked == []
        assert [rates.epoch(epoch) for epoch in (1, 0, 1, 2)] == [plain.epoch(epoch) for epoch in (1, 0, 1, 2)]
        assert (rates.epoch(1) is rates.epoch(1)) is isinstance(schedule, ss.Schedule)
        asked.clear()


def test_a_rate_that_is_too_large_is_told_after_the_epoch_before_it_was_kept(tmp_path):
    """The rates of an epoch are computed while the one before it is still on the device."""
    wrong = trainer(schedule=ss.piecewise([2 * STEPS], [0.01, 1e39]), run_dir=tmp_path / "run")
    with pytest.raises(Invalid, match="a learning rate of 1e\\+39 is too large for float32"):
        wrong.fit(Meter(), data())
    told = [event["step"] for event in events(tmp_path / "run") if event["event"] == "epoch"]
    assert told == [STEPS, 2 * STEPS]
    assert len(lrs(tmp_path / "run")) == 2 * STEPS


# A schedule that ends long before the run

COUNTS_STEPS = "it counts steps; .in_epochs() makes it count epochs"


@pytest.mark.parametrize(
    ("schedule", "end", "rate"),
    [
        (cosine(0.1, 10), 10, "0"),
        (cosine(0.1, 10, end=0.01), 10, "0.01"),
        (cosine(0.3, 8).warmup(2), 10, "0"),
        (cosine(0.3, 10, end=0.01).warmup(5), 15, "0.01"),
        (poly(0.1, 10), 10, "0"),
        (poly(0.1, 1000), 1000, "0"),
        (one_cycle(0.1, 10), 9, "4e-07"),
        (one_cycle(0.1, 500), 499, "4e-07"),
        (2 * cosine(0.1, 10).floor(1e-3), 10, "0.002"),
        (table([0.1 / (1 + t) for t in range(10)]), 9, "0.01"),
    ],
    ids=repr,
)
def test_a_schedule_that_is_over_early_is_told(schedule, end, rate):
    told = (
        f"schedule: {schedule} ends at step {end} of 2350, and the rate stays at {rate} from there on: {COUNTS_STEPS}"
    )
    assert doubt(schedule, 235, 10) == told
    assert doubt(schedule.in_epochs(smooth=True), 235, 10) is None
    assert doubt(schedule.in_epochs(235, smooth=True), 235, 10) is None
    assert doubt(schedule, end, 2) is None  # it lasts for half of the run


@pytest.mark.parametrize(
    "schedule",
    [None, constant(0.1), constant(0.1).warmup(5), drops(0.1, [5, 8], 0.1), piecewise([5, 8], [0.1, 0.01, 0.001]),
     constant(0.1).warmup(5) * drops(1, [1000], 0.1), cosine(0.1, 500, end=0.01), exponential(0.1, 0.9), triangle(0, 1, 5),
     cosine(0.1, 10).restart(10), cosine(0.1, 10).then(constant(0.2), 10), table([0.1] * 10),
     cosine(0.1, 10).then(constant(0.01), 10), cosine(0.1, 10) + constant(0.01), cosine(0.1, 10).hold(8),
     Plateau(0.1), by_hand],
    ids=repr,
)  # fmt: skip
def test_what_is_meant_to_stay_at_its_rate_is_not_told(schedule):
    assert doubt(schedule, 235, 10) is None


def test_a_warm_up_that_is_0_through_the_first_epoch_is_told():
    warm = cosine(0.3, 8).warmup(2)
    how = "with .in_epochs(smooth=True) it moves within an epoch"
    told = f"schedule: {warm}.in_epochs() is 0 through the whole first epoch: {how}"
    assert doubt(warm.in_epochs(), 235, 10) == told
    assert doubt(warm.in_epochs(235), 235, 10) == told.replace("() is", "(steps_per_epoch=235) is")
    for one in (
        warm.in_epochs(smooth=True),
        cosine(0.3, 8).warmup(2, start=0.01).in_epochs(),
        constant(0.0).in_epochs(),
    ):
        assert doubt(one, 235, 10) is None
    assert doubt(warm.in_epochs(), 235, 1) is None  # nothing else could be done in one epoch
    assert doubt(warm.in_epochs(), 1, 10) is None  # nor in epochs of one step


def test_it_is_told_once_in_a_fit():
    """Not in every epoch, and from where the user called fit."""
    message = f"schedule: cosine(0.1, 3) ends at step 3 of 15, and the rate stays at 0 from there on: {COUNTS_STEPS}"
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$") as caught:
        run = trainer(schedule=cosine(0.1, 3)).fit(Meter(), data())
    assert [warning.filename for warning in caught] == [__file__]
    assert [row["lr"] for row in run.history] == [0.0, 0.0, 0.0]
    trainer(schedule=cosine(0.1, 3).in_epochs()).fit(Meter(), data())  # a warning would be an error here


# Rates as they were written


def test_a_rate_reads_as_it_was_written():
    run = trainer(schedule=0.05).fit(Meter(), data())
    assert [row["lr"] for row in run.history] == [0.05] * EPOCHS
    assert run.weights()["weight"] == metered([0.05] * len(T))  # and is applied as before
    assert metered([0.05]) != 0.05


def test_the_rate_that_was_applied_follows_from_what_is_told():
    random = np.random.default_rng(0)
    for dtype in ("float16", "float32", "float64"):
        kind = np.dtype(dtype).type
        for lr in (kind(10.0**exponent * random.random()) for exponent in random.uniform(-6, 1, 2000)):
            told = as_written(float(lr), dtype)
            assert kind(told) == lr
            assert as_written(told, dtype) == told
    assert as_written(float(np.float32(0.1)), "float64") != 0.1  # the broken twin: another type has other digits


# unit="epoch"


UNITS = {
    "schedule": (cosine(0.3, 3), "cosine(0.3, 3).in_epochs()"),
    "schedule in epochs already": (cosine(0.3, 3).in_epochs(), "cosine(0.3, 3).in_epochs()"),
    "expression": ("cosine(0.3, 3)", "cosine(0.3, 3).in_epochs()"),
    "function": (lambda epoch: cosine(0.3, 3)(epoch), "<lambda>"),
}


@pytest.mark.parametrize("kind", UNITS)
@pytest.mark.parametrize("where", ["schedule", "lr", "optimizer"])
def test_with_unit_epoch_a_schedule_counts_epochs(kind, where, tmp_path):
    schedule, text = UNITS[kind]
    given = {"optimizer": ss.sgd(schedule)} if where == "optimizer" else {where: schedule}
    run = check(tmp_path, [cosine(0.3, 3)(t // STEPS) for t in T], unit="epoch", **given)
    assert run.recipe["schedule"] == text
    assert run.recipe.get("unit") == ("epoch" if kind == "function" else None)
    assert trainer(unit="epoch", **given).schedule == trainer(unit="epoch", schedule=schedule).schedule


def test_a_function_is_asked_for_the_epoch_before_it_begins():
    asked = []
    trainer(schedule=lambda epoch: asked.append(epoch) or 0.1, unit="epoch").fit(Meter(), data())
    assert asked == [epoch for epoch in range(EPOCHS) for _ in range(STEPS)]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_with_unit_epoch_a_scheduler_of_torch_counts_epochs(name, tmp_path):
    by_step = rates_in_a_loop(SCHEDULERS[name])
    expected = [by_step[t // STEPS] for t in T]
    assert by_step[: len(T)] != expected
    optimizer, scheduler = made(SCHEDULERS[name])
    before = state_of(optimizer, scheduler)
    run = check(tmp_path, expected, schedule=scheduler, unit="epoch")
    assert state_of(optimizer, scheduler) == before
    assert run.schedule.values(len(T)).tolist() == expected
    assert run.recipe["unit"] == "epoch"


def test_momenta_that_a_scheduler_moves_are_followed_by_the_epoch():
    """As in a loop of torch that steps the scheduler after every epoch."""

    def three(counts):
        model = Meter(torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, lr_scheduler.OneCycleLR(optimizer, 0.4, counts)

    def fit(unit, counts):
        model, optimizer, scheduler = three(counts)
        run = trainer(optimizer=optimizer, schedule=scheduler, unit=unit).fit(model, data(np.float64))
        return float(run.weights()["weight"])

    model, optimizer, scheduler = three(EPOCHS)
    momenta = []
    for epoch in range(EPOCHS):
        momenta.append(optimizer.param_groups[0]["momentum"])
        for _ in range(STEPS):
            optimizer.zero_grad()
            model.weight.backward()
            optimizer.step()
        if epoch + 1 < EPOCHS:
            scheduler.step()
    assert len(set(momenta)) > 1
    assert fit("epoch", EPOCHS) == pytest.approx(model.weight.item(), rel=1e-12)
    assert fit("step", STEPS * EPOCHS) != pytest.approx(model.weight.item(), rel=1e-3)
    with pytest.raises(Invalid, match="^OneCycleLR ends before 3 epochs: Tried to step 2 times"):
        fit("epoch", 1)


def test_a_plateau_and_a_number_have_no_other_unit():
    runs = [trainer(schedule=Plateau(0.1, patience=0), unit=unit).fit(Meter(), data()) for unit in ("step", "epoch")]
    suite.same(*runs)
    assert runs[0].recipe == runs[1].recipe
    suite.same(*(trainer(lr=0.1, unit=unit).fit(Meter(), data()) for unit in ("step", "epoch")))


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"unit": "epochs", "lr": 0.1}, Invalid, "unit must be one of 'step', 'epoch', got unit='epochs'"),
        ({"unit": None, "lr": 0.1}, WrongType, "unit must be a string, got unit=None"),
        (
            {"unit": "epoch"},
            Invalid,
            "unit='epoch' is for a schedule, and there is none: pass schedule=... or leave unit out",
        ),
        (
            {"unit": "epoch", "schedule": cosine(0.3, 3).in_epochs(7)},
            Invalid,
            "in_epochs: the schedule has its unit already: .in_epochs() was applied to a part of it",
        ),
    ],
)
def test_units_that_are_refused(settings, error, said):
    with pytest.raises(error) as raised:
        trainer(**settings)
    assert str(raised.value) == said
