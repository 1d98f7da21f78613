"""Schedules against PyTorch: our scheduler in its training loop, its schedulers against ours, and its traps."""

# ruff: noqa: E402  (PyTorch is asked for first)

from __future__ import annotations

import copy
import doctest
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.optim import SGD, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

import samestep.schedules.exports.torch
from parity.tolerances import EXPORTED, STEPS, UPDATES, agree, float32
from samestep.backends.torch.scheduler import read, read_all
from samestep.errors import Invalid, WrongType
from samestep.schedules.algebra import Schedule
from samestep.schedules.exports.torch import Scheduler as scheduler
from samestep.schedules.kinds import constant, cosine, drops, geometric, one_cycle, poly, triangle

Make = Callable[[Optimizer], LRScheduler]
by_name = pytest.mark.parametrize("name", EXPORTED)


def test_doctests() -> None:
    assert doctest.testmod(samestep.schedules.exports.torch).failed == 0


# The export in a training loop


class Loop:
    """A linear model with loss w·1: the gradient is 1, so a step from w = 0 leaves -rate, in float32, in w."""

    def __init__(self, lr: Any = 123.0, **settings: Any) -> None:
        self.model = torch.nn.Linear(1, 1, bias=False)
        self.optimizer = SGD(self.model.parameters(), lr=lr, **settings)

    def update(self) -> np.float32:
        with torch.no_grad():
            self.model.weight.zero_()
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 1)).sum().backward()
        self.optimizer.step()
        return np.float32(-self.model.weight.item())

    def run(self, scheduler: LRScheduler, n: int) -> list[np.float32]:
        rates = []
        for _ in range(n):
            rates.append(self.update())
            scheduler.step()
        return rates


@by_name
@pytest.mark.parametrize(
    "settings", [{}, {"foreach": True}, {"lr": torch.tensor(123.0)}], ids=["", "foreach", "tensor"]
)
def test_the_rate_that_was_applied(name: str, settings: dict[str, Any]) -> None:
    loop = Loop(**copy.deepcopy(settings))
    assert loop.run(scheduler(EXPORTED[name], loop.optimizer), UPDATES) == float32(EXPORTED[name])


def test_in_epochs_without_and_with_bind() -> None:
    schedule = cosine(0.3, 8).in_epochs()
    with pytest.raises(Invalid, match=r"how many steps has an epoch\? .* \.bind"):
        scheduler(schedule, Loop().optimizer)
    loop = Loop()
    assert loop.run(scheduler(schedule.bind(5), loop.optimizer), UPDATES) == float32(schedule.bind(5))


def test_every_group_has_the_rate() -> None:
    weights = [torch.zeros(1, requires_grad=True) for _ in range(3)]
    optimizer = SGD([{"params": weights[:1]}, {"params": weights[1:2], "lr": 5.0}], lr=1.0)
    ours = scheduler(poly(1, 4), optimizer)
    optimizer.add_param_group({"params": weights[2:]})
    assert ours.state_dict()["applied"]  # as far as it has set a rate
    optimizer.step()
    ours.step()
    assert [group["lr"] for group in optimizer.param_groups] == ours.get_last_lr() == [0.75] * 3


def test_it_starts_with_the_first_rate() -> None:
    assert poly(1, 4).torch(Loop().optimizer).state_dict() == scheduler(poly(1, 4), Loop().optimizer).state_dict()
    assert poly(1, 4).torch(Loop().optimizer).get_last_lr() == [1.0]
    assert poly(1, 4).torch(Loop().optimizer, 1).get_last_lr() == [0.5]


def test_it_starts_after_last_epoch() -> None:
    loop, schedule = Loop(), EXPORTED["restarts"]
    assert loop.run(scheduler(schedule, loop.optimizer, last_epoch=11), 40) == float32(schedule.shift(12), 40)


def saved(*objects: Any) -> list[dict[str, Any]]:
    file = io.BytesIO()
    torch.save([each.state_dict() for each in objects], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def restored(make: Make, states: list[dict[str, Any]], order: str, **settings: Any) -> tuple[Loop, LRScheduler]:
    """A new loop and scheduler, built (b) and loaded (s), with the optimizer loaded (o) in between."""
    loop = Loop(**settings)
    for action in order:
        if action == "b":
            ours = make(loop.optimizer)
        elif action == "s":
            ours.load_state_dict(states[1])
        else:
            loop.optimizer.load_state_dict(states[0])
    return loop, ours


@by_name
@pytest.mark.parametrize("order", ["obs", "bos", "bso"])
@pytest.mark.parametrize("tensor", [False, True])
def test_restored_in_any_order(name: str, order: str, tensor: bool) -> None:
    def lr() -> Any:
        return torch.tensor(9.0) if tensor else 9.0

    loop = Loop(lr())
    first = scheduler(EXPORTED[name], loop.optimizer)
    rates = loop.run(first, 23)
    states = saved(loop.optimizer, first)
    json.dumps(states[1])  # plain
    loop, second = restored(lambda o: scheduler(EXPORTED[name], o), states, order, lr=lr())
    assert isinstance(loop.optimizer.param_groups[0]["lr"], torch.Tensor) == tensor
    assert second._step_count == first._step_count == 24  # PyTorch warns of a first step that comes too early
    assert rates + loop.run(second, UPDATES - 23) == float32(EXPORTED[name])


def ours_in_sequence(optimizer: Optimizer) -> LRScheduler:
    parts = [scheduler(each, optimizer) for each in (drops(0.5, [4], 0.5), cosine(0.3, 10), poly(2, 9))]
    return lr_scheduler.SequentialLR(optimizer, parts, [12, 20])


def ours_that_begin_alike(optimizer: Optimizer) -> LRScheduler:
    parts = [scheduler(each, optimizer) for each in (constant(0.3), cosine(0.3, 10))]
    return lr_scheduler.SequentialLR(optimizer, parts, [12])


def ours_after_theirs(optimizer: Optimizer) -> LRScheduler:
    parts = [lr_scheduler.MultiStepLR(optimizer, [5], 0.5), scheduler(cosine(0.3, 30), optimizer)]
    return lr_scheduler.SequentialLR(optimizer, parts, [12])


def ours_before_theirs(optimizer: Optimizer) -> LRScheduler:
    """With a part of 1.0 at its start, where ours started, too."""
    parts = [scheduler(cosine(1, 30), optimizer), lr_scheduler.ConstantLR(optimizer, 0.5, 8)]
    return lr_scheduler.SequentialLR(optimizer, parts, [12])


def ours_for_one_update(optimizer: Optimizer) -> LRScheduler:
    """What comes after it is first below ours, then above it."""
    parts = [scheduler(constant(1), optimizer), lr_scheduler.ConstantLR(optimizer, 0.1, 8)]
    return lr_scheduler.SequentialLR(optimizer, parts, [1])


def ours_alone_in_a_chain(optimizer: Optimizer) -> LRScheduler:
    return lr_scheduler.ChainedScheduler([scheduler(cosine(0.3, 30), optimizer)])


def ours_last_in_a_chain(optimizer: Optimizer) -> LRScheduler:
    first = lr_scheduler.ExponentialLR(optimizer, 0.9)
    return lr_scheduler.ChainedScheduler([first, scheduler(cosine(0.3, 30), optimizer)])


COMPOSED: list[tuple[Make, Schedule]] = [
    (ours_in_sequence, drops(0.5, [4], 0.5).then(cosine(0.3, 10).then(poly(2, 9), 8), 12)),
    (ours_that_begin_alike, constant(0.3).then(cosine(0.3, 10), 12)),
    (ours_after_theirs, drops(2, [5], 0.5).then(cosine(0.3, 30), 12)),
    (ours_before_theirs, cosine(1, 30).then(constant(2).warmup(8, start=1, mode="constant"), 12)),
    (ours_for_one_update, constant(1).then(constant(2).warmup(8, start=0.2, mode="constant"), 1)),
    (ours_alone_in_a_chain, cosine(0.3, 30)),
    (ours_last_in_a_chain, cosine(0.3, 30)),
]


@pytest.mark.parametrize("lr", [2.0, torch.tensor(2.0)], ids=["", "tensor"])
@pytest.mark.parametrize(("make", "schedule"), COMPOSED)
def test_within_sequences_and_chains(make: Make, schedule: Schedule, lr: Any) -> None:
    loop = Loop(copy.deepcopy(lr))
    assert loop.run(make(loop.optimizer), UPDATES) == float32(schedule)


@pytest.mark.parametrize("at", [3, 11, 12, 15, 20, 30])
@pytest.mark.parametrize("order", ["obs", "bos", "bso"])
@pytest.mark.parametrize(("make", "schedule"), COMPOSED)
def test_sequences_and_chains_restored(make: Make, schedule: Schedule, order: str, at: int) -> None:
    """In any order while ours is at work; PyTorch's own parts set no rate when loaded: the optimizer must, after `b`."""
    theirs_at_work = {
        ours_after_theirs: range(12), ours_before_theirs: range(12, UPDATES), ours_for_one_update: range(1, UPDATES),
    }  # fmt: skip
    if order == "obs" and at in theirs_at_work.get(make, ()):
        order = "bos"
    loop = Loop(2.0)
    first = make(loop.optimizer)
    rates = loop.run(first, at)
    loop, second = restored(make, saved(loop.optimizer, first), order, lr=2.0)
    loop, third = restored(make, saved(loop.optimizer, second), order, lr=2.0)
    assert rates + loop.run(third, UPDATES - at) == float32(schedule)


def test_the_state_of_another_scheduler_is_refused() -> None:
    optimizer = Loop().optimizer
    ours = scheduler(poly(1, 4), optimizer)
    with pytest.raises(Invalid, match=r"must be that of poly\(1.0, 4\), got that of poly\(1.0, 5\)"):
        ours.load_state_dict(scheduler(poly(1, 5), Loop().optimizer).state_dict())
    with pytest.raises(Invalid, match=r"must be that of poly\(1.0, 4\), got {'step_size': 3"):
        ours.load_state_dict(lr_scheduler.StepLR(Loop().optimizer, 3).state_dict())
    with pytest.raises(WrongType, match=r"torch.scheduler: schedule must be a schedule, .* got schedule=0.1"):
        scheduler(0.1, optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="int is not an Optimizer"):
        scheduler(poly(1, 4), 3)  # type: ignore[arg-type]


# Reading the rates of a scheduler


def test_read_changes_nothing() -> None:
    loop = Loop(0.5, momentum=0.9)
    theirs = lr_scheduler.OneCycleLR(loop.optimizer, 0.5, 100)
    loop.run(theirs, 10)
    before = copy.deepcopy((theirs.state_dict(), loop.optimizer.state_dict()))
    rates, moved = read_all(theirs, 50)
    assert (theirs.state_dict(), loop.optimizer.state_dict()) == before
    assert theirs.optimizer is loop.optimizer
    assert [np.float32(rate) for rate in rates] == float32(one_cycle(0.5, 100).shift(10), 50)
    assert loop.optimizer.state  # the momentum is still there
    loop.run(theirs, 20)
    assert [moved[20][0]["momentum"]] == [group["momentum"] for group in loop.optimizer.param_groups]
    assert len({groups[0]["momentum"] for groups in moved}) > 40


def test_read_copies_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the weights nor the momenta, however large."""
    loop = Loop(0.5, momentum=0.9)
    theirs = lr_scheduler.MultiStepLR(loop.optimizer, [15], 0.5)
    loop.run(theirs, 10)

    def refuse(tensor: Any, memo: Any) -> None:
        raise AssertionError("copied")

    for kind in (torch.Tensor, torch.nn.Parameter):
        monkeypatch.setattr(kind, "__deepcopy__", refuse)
    assert read(theirs, 7) == [0.5] * 5 + [0.25] * 2


def test_read_refuses() -> None:
    weights = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    optimizer = SGD([{"params": weights[:1]}, {"params": weights[1:], "lr": 5.0}], lr=1.0)
    with pytest.raises(Invalid, match=r"read: all parameter groups must have one rate, got \[1.0, 5.0\] at step 0"):
        read(lr_scheduler.StepLR(optimizer, 3), 4)
    with pytest.raises(Invalid, match="read: ReduceLROnPlateau .* use samestep.Plateau"):
        read(lr_scheduler.ReduceLROnPlateau(optimizer), 4)
    with pytest.raises(WrongType, match="read: scheduler must be .* got 3"):
        read(3, 4)  # type: ignore[arg-type]
    with pytest.raises(Invalid, match="read: n must be at least 0"):
        read(lr_scheduler.StepLR(optimizer, 3), -1)


# PyTorch's schedulers


def rates_of(lr: float, make: Make, n: int = STEPS) -> list[float]:
    """The rates that the optimizer has at its updates; read() must give the same ones beforehand."""
    loop = Loop(lr)
    theirs = make(loop.optimizer)
    expected, rates = read(theirs, n), []
    for t in range(n):
        if t:
            theirs.step()
        rates.append(loop.optimizer.param_groups[0]["lr"])
        loop.optimizer.step()
    assert expected == rates
    return rates


@pytest.mark.parametrize(
    ("lr", "at", "factor"), [(0.5, [15, 30], 0.5), (0.1, [100, 200, 300], 0.1), (0.3, [1, 7, 250], 0.33)]
)
def test_multi_step(lr: float, at: list[int], factor: float) -> None:
    agree("equal", rates_of(lr, lambda o: lr_scheduler.MultiStepLR(o, at, factor)), drops(lr, at, factor))


@pytest.mark.parametrize(("lr", "every", "factor"), [(0.1, 30, 0.1), (0.3, 7, 0.9), (1.0, 1, 0.99)])
def test_step(lr: float, every: int, factor: float) -> None:
    agree("equal", rates_of(lr, lambda o: lr_scheduler.StepLR(o, every, factor)), geometric(lr, factor).every(every))


@pytest.mark.parametrize(("lr", "factor"), [(0.1, 0.9), (0.3, 0.99), (2.0, 0.95)])
def test_exponential(lr: float, factor: float) -> None:
    agree("equal", rates_of(lr, lambda o: lr_scheduler.ExponentialLR(o, factor)), geometric(lr, factor))


@pytest.mark.parametrize(("lr", "factor", "n"), [(0.1, 1 / 3, 5), (0.3, 0.1, 50), (0.2, 0.5, 300)])
def test_constant(lr: float, factor: float, n: int) -> None:
    ours = constant(lr).warmup(n, start=lr * factor, mode="constant")
    agree("equal", rates_of(lr, lambda o: lr_scheduler.ConstantLR(o, factor, n)), ours)


def test_constant_that_does_not_come_back() -> None:
    """ConstantLR divides the rate by what it had multiplied it with: 0.1 · 0.1 · (1 / 0.1) is not 0.1, but an ulp above."""
    theirs = rates_of(0.1, lambda o: lr_scheduler.ConstantLR(o, 0.1, 5))
    assert theirs[-1] == 0.1 * 0.1 * (1.0 / 0.1) == np.nextafter(0.1, 1)
    agree("one rounding", theirs, constant(0.1).warmup(5, start=0.1 * 0.1, mode="constant"))
    agree("equal", theirs, constant(theirs[-1]).warmup(5, start=0.1 * 0.1, mode="constant"))


@pytest.mark.parametrize(("lr", "T", "mult", "end"), [(0.1, 10, 2, 0.0), (0.3, 7, 3, 0.01), (0.5, 50, 1, 1e-4)])
def test_cosine_with_warm_restarts(lr: float, T: int, mult: int, end: float) -> None:
    theirs = rates_of(lr, lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T, mult, end))
    agree("equal", theirs, cosine(lr, T, end).restart(T, mult))


@pytest.mark.parametrize(("low", "high", "up", "down"), [(0.001, 0.1, 20, None), (0.01, 0.3, 7, 13), (0.1, 1.0, 33, 5)])
@pytest.mark.parametrize(
    ("mode", "decay", "per"), [("triangular", 1, "cycle"), ("triangular2", 0.5, "cycle"), ("exp_range", 0.99, "step")]
)
def test_cyclic(low: float, high: float, up: int, down: int | None, mode: Any, decay: float, per: str) -> None:
    def make(optimizer: Optimizer) -> LRScheduler:
        return lr_scheduler.CyclicLR(optimizer, low, high, up, down, mode, gamma=0.99, cycle_momentum=False)

    agree("equal", rates_of(low, make), triangle(low, high, up, down, decay, per))


ONE_CYCLES: list[Any] = [(0.1, 400, 0.3, 25.0, 1e4, "cos"), (1.0, 333, 0.25, 10.0, 100.0, "linear"),
                         (0.3, 350, 0.45, 25.0, 1e3, "cos")]  # fmt: skip


@pytest.mark.parametrize(("peak", "T", "up", "div", "final_div", "anneal"), ONE_CYCLES)
def test_one_cycle(peak: float, T: int, up: float, div: float, final_div: float, anneal: Any) -> None:
    def make(optimizer: Optimizer) -> LRScheduler:
        return lr_scheduler.OneCycleLR(
            optimizer, peak, T, pct_start=up, anneal_strategy=anneal, cycle_momentum=False, div_factor=div,
            final_div_factor=final_div,
        )  # fmt: skip

    agree("equal", rates_of(peak, make, T), one_cycle(peak, T, up, div, final_div, anneal))


COSINES = [(0.1, 400, 0.0), (0.3, 350, 0.01), (1.0, 301, 1e-3)]


@pytest.mark.parametrize(("lr", "T", "end"), [*COSINES, (0.3, 5000, 0.01)])
def test_cosine(lr: float, T: int, end: float) -> None:
    agree("recursion", rates_of(lr, lambda o: lr_scheduler.CosineAnnealingLR(o, T, end), T + 1), cosine(lr, T, end))


@pytest.mark.parametrize(("lr", "T", "end"), COSINES)
def test_cosine_in_its_closed_form(lr: float, T: int, end: float) -> None:
    """PyTorch has the formula as well, but uses the recursion: what differs above is its drift."""
    theirs, rates = lr_scheduler.CosineAnnealingLR(Loop(lr).optimizer, T, end), []
    for theirs.last_epoch in range(T + 1):
        rates.append(theirs._get_closed_form_lr()[0])
    agree("equal", rates, cosine(lr, T, end))


WARMED = [(0.1, 10, 390, 0.0, 1e-3), (0.3, 50, 300, 0.01, 1 / 3), (1.0, 7, 343, 1e-3, 0.1)]


@pytest.mark.parametrize(("lr", "n", "T", "end", "factor"), WARMED)
def test_warm_up_and_cosine_in_sequence(lr: float, n: int, T: int, end: float, factor: float) -> None:
    """Both of them are recursions: up to 6.5 ulps of the peak here."""

    def make(optimizer: Optimizer) -> LRScheduler:
        linear = lr_scheduler.LinearLR(optimizer, factor, 1.0, n)
        return lr_scheduler.SequentialLR(optimizer, [linear, lr_scheduler.CosineAnnealingLR(optimizer, T, end)], [n])

    agree("recursion", rates_of(lr, make, n + T + 1), cosine(lr, T, end).warmup(n, start=lr * factor))


@pytest.mark.parametrize(("lr", "n", "T", "end", "factor"), WARMED)
def test_warm_up_and_cosine_in_their_closed_forms(lr: float, n: int, T: int, end: float, factor: float) -> None:
    linear = lr_scheduler.LinearLR(Loop(lr).optimizer, factor, 1.0, n)
    falling, rates = lr_scheduler.CosineAnnealingLR(Loop(lr).optimizer, T, end), []
    for linear.last_epoch in range(n):
        rates.append(linear._get_closed_form_lr()[0])
    for falling.last_epoch in range(T + 1):
        rates.append(falling._get_closed_form_lr()[0])
    agree("two roundings", rates, cosine(lr, T, end).warmup(n, start=lr * factor))


CHAINS = [(0.1, 0.1, 10, 0.9), (0.3, 0.5, 50, 0.99), (1.0, 1 / 3, 20, 0.97)]


@pytest.mark.parametrize(("lr", "factor", "n", "decay"), CHAINS)
def test_a_chain_is_a_product(lr: float, factor: float, n: int, decay: float) -> None:
    def make(optimizer: Optimizer) -> LRScheduler:
        first = lr_scheduler.ConstantLR(optimizer, factor, n)
        return lr_scheduler.ChainedScheduler([first, lr_scheduler.ExponentialLR(optimizer, decay)])

    ours = geometric(lr, decay) * constant(1).warmup(n, start=factor, mode="constant")
    agree("two roundings", rates_of(lr, make), ours)


@pytest.mark.parametrize(("lr", "factor", "n", "decay"), CHAINS)
def test_a_chain_with_a_recursion_is_a_product(lr: float, factor: float, n: int, decay: float) -> None:
    """LinearLR's recursion drifts: up to 5 ulps of the peak here."""

    def make(optimizer: Optimizer) -> LRScheduler:
        first = lr_scheduler.LinearLR(optimizer, factor, 1.0, n)
        return lr_scheduler.ChainedScheduler([first, lr_scheduler.ExponentialLR(optimizer, decay)])

    agree("recursion", rates_of(lr, make), geometric(lr, decay) * constant(1).warmup(n, start=factor))


@pytest.mark.parametrize(
    ("lr", "start", "end", "n"), [(0.1, 1e-3, 1.0, 100), (0.3, 1 / 3, 1.0, 50), (1.0, 1.0, 0.1, 300)]
)
def test_linear(lr: float, start: float, end: float, n: int) -> None:
    agree("recursion", rates_of(lr, lambda o: lr_scheduler.LinearLR(o, start, end, n)), poly(lr * start, n, lr * end))


@pytest.mark.parametrize(("lr", "power", "n"), [(0.1, 1.0, 390), (0.3, 2.0, 300), (1.0, 0.5, 350)])
def test_polynomial(lr: float, power: float, n: int) -> None:
    agree("recursion", rates_of(lr, lambda o: lr_scheduler.PolynomialLR(o, n, power)), poly(lr, n, power=power))


# Traps


RESTORED_FIRST: list[Any] = [
    pytest.param(
        lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 5),
        constant(1).warmup(5, start=0.1),
        id="LinearLR",
    ),
    pytest.param(
        lambda o: lr_scheduler.ConstantLR(o, 0.1, 5),
        constant(1).warmup(5, start=0.1, mode="constant"),
        id="ConstantLR",
    ),
]


@pytest.mark.parametrize(("make", "schedule"), RESTORED_FIRST)
def test_trap_restoring_the_optimizer_first_leaves_the_rate_ten_times_too_low(make: Make, schedule: Schedule) -> None:
    """https://github.com/pytorch/pytorch/issues/65342: building the scheduler multiplies the restored rate once more."""
    loop = Loop(1.0)
    theirs = make(loop.optimizer)
    loop.run(theirs, 20)
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(1.0)
    wrong, theirs = restored(make, saved(loop.optimizer, theirs), "obs")
    assert wrong.run(theirs, 10) == pytest.approx([0.1] * 10)

    loop = Loop(1.0)
    ours = scheduler(schedule, loop.optimizer)
    loop.run(ours, 20)
    right, ours = restored(lambda o: scheduler(schedule, o), saved(loop.optimizer, ours), "obs")
    assert right.run(ours, 10) == [1.0] * 10


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_trap_a_sequence_in_a_sequence_shifts_a_step() -> None:
    """https://github.com/pytorch/pytorch/issues/196243: the inner sequence is one step ahead of its parts."""

    def inner(optimizer: Optimizer) -> LRScheduler:
        parts: list[LRScheduler] = [lr_scheduler.ConstantLR(optimizer, factor, 100) for factor in (0.5, 0.25)]
        return lr_scheduler.SequentialLR(optimizer, parts, [3])

    def outer(optimizer: Optimizer) -> LRScheduler:
        last = lr_scheduler.ConstantLR(optimizer, 0.125, 100)
        return lr_scheduler.SequentialLR(optimizer, [inner(optimizer), last], [5])

    assert rates_of(1.0, inner, 7) == [0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25]
    assert rates_of(1.0, outer, 7) == [0.5, 0.5, 0.25, 0.25, 0.25, 0.125, 0.125]  # 0.25 comes a step too soon

    ours = constant(0.5).then(constant(0.25), 3).then(constant(0.125), 5)
    loop = Loop(1.0)
    assert loop.run(scheduler(ours, loop.optimizer), 7) == [0.5, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]


def test_trap_one_cycle_jumps_at_its_end() -> None:
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = lr_scheduler.OneCycleLR(optimizer, 1.0, 100, anneal_strategy="linear", cycle_momentum=False)
    rates, ours = read(theirs, 101), one_cycle(1.0, 100, anneal="linear")
    assert rates[:100] == ours.values(100).tolist()
    assert rates[100] < 0  # a line goes on below 0, a cosine up again
    with pytest.raises(ValueError, match="Tried to step 101 times"):
        read(theirs, 102)
    assert ours(100) == ours(10_000) == ours(99) == pytest.approx(4e-6)

    rising = read(lr_scheduler.OneCycleLR(optimizer, 1.0, 100, cycle_momentum=False), 101)
    assert rising[100] > 100 * rising[99]
    assert one_cycle(1.0, 100)(100) == rising[99]


def test_trap_cosine_rises_again_past_its_end() -> None:
    theirs = rates_of(0.3, lambda o: lr_scheduler.CosineAnnealingLR(o, 100, 0.01), 201)
    assert theirs[100] == pytest.approx(0.01)
    assert theirs[200] == pytest.approx(0.3)
    assert cosine(0.3, 100, end=0.01)(200) == 0.01


def test_trap_accelerate_steps_once_per_process() -> None:
    """https://github.com/huggingface/accelerate/issues/1382: its scheduler, by hand, on four processes."""
    schedule, processes = cosine(0.3, 100), 4

    class Prepared:
        """What Accelerator.prepare makes of a scheduler, unless batches are split: a step for every process."""

        def __init__(self, scheduler: LRScheduler) -> None:
            self.scheduler = scheduler

        def step(self) -> None:
            for _ in range(processes):
                self.scheduler.step()

    wrong, right = Loop(), Loop()
    theirs: Any = Prepared(lr_scheduler.LambdaLR(wrong.optimizer, lambda t: schedule(t) / 123.0))
    assert wrong.run(theirs, 40) == pytest.approx([schedule(processes * t) for t in range(40)], rel=1e-6, abs=1e-9)
    assert right.run(scheduler(schedule, right.optimizer), 40) == float32(schedule, 40)
