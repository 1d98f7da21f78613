"""schedules: formulas and laws of the algebra, round trips, parity with torch, every error, and Plateau."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from samestep.errors import Invalid, SamestepError, WrongType
from samestep.schedules.algebra import METHODS, OPS, Schedule
from samestep.schedules.kinds import (
    SCHEDULES,
    constant,
    cosine,
    drops,
    exponential,
    geometric,
    inverse_power,
    natural_exp,
    one_cycle,
    piecewise,
    poly,
    table,
    triangle,
)
from samestep.schedules.plateau import Plateau
from samestep.schedules.powers import CHUNK, LONGEST, product
from samestep.schedules.text import from_json, parse

properties = settings(max_examples=100, deadline=None, derandomize=True, database=None)

# Random trees

rates = st.floats(0, 10)
counts = st.integers(1, 30)
shares = st.floats(0, 1)
times = st.lists(st.integers(0, 500) | st.integers(0, 2**63 - 1), min_size=1, max_size=12)


@st.composite
def boundaries(draw: st.DrawFn) -> list[int]:
    return sorted(draw(st.sets(st.integers(0, 60), max_size=4)))


@st.composite
def pieces(draw: st.DrawFn) -> Schedule:
    at = draw(boundaries())
    return piecewise(at, draw(st.lists(rates, min_size=len(at) + 1, max_size=len(at) + 1)))


@st.composite
def triangles(draw: st.DrawFn) -> Schedule:
    low, high = sorted([draw(rates), draw(rates)])
    down = draw(counts | st.none())
    return triangle(low, high, draw(counts), down, draw(shares), draw(st.sampled_from(["cycle", "step"])))


leaves = st.one_of(
    st.builds(constant, rates),
    st.builds(exponential, rates, shares, counts, st.booleans()),
    st.builds(natural_exp, rates, rates),
    st.builds(inverse_power, rates, rates, rates),
    st.builds(poly, rates, counts, rates, st.floats(0.1, 5)),
    st.builds(cosine, rates, counts, rates),
    st.builds(lambda lr, factor, share: geometric(lr, factor, lr * share), rates, st.floats(0, 0.999), shares),
    pieces(),
    st.builds(drops, rates, boundaries(), shares),
    triangles(),
    st.builds(
        one_cycle, rates, counts, shares, st.floats(1, 50), st.floats(1, 1e5), st.sampled_from(["cos", "linear"])
    ),
    st.builds(table, st.lists(rates, min_size=1, max_size=8)),
)


def trees(depth: int, base: st.SearchStrategy[Schedule] = leaves) -> st.SearchStrategy[Schedule]:
    if depth == 0:
        return base
    s = st.deferred(lambda: trees(depth - 1, base))
    modes = st.sampled_from(["linear", "constant"])
    return st.one_of(
        base,
        st.builds(lambda s, n, start, mode: s.warmup(n, start, mode), s, st.integers(0, 30), rates, modes),
        st.builds(lambda a, b, at: a.then(b, at), s, s, st.integers(0, 60)),
        st.builds(lambda s, p, m, decay: s.restart(p, m, decay), s, counts, st.integers(1, 3), shares),
        st.builds(lambda s, k: s.shift(k), s, st.integers(0, 60)),
        st.builds(lambda s, at: s.hold(at), s, st.integers(0, 60)),
        st.builds(lambda s, n: s.every(n), s, counts),
        st.builds(lambda s, lo, more: s.clip(lo, lo + more), s, rates, rates),
        st.builds(lambda s, lo: s.floor(lo), s, rates),
        st.builds(lambda a, b: a + b, s, s),
        st.builds(lambda a, b: a * b, s, s),
        st.builds(lambda s, factor: factor * s, s, rates),
    )


plain = trees(3)
in_steps = plain | trees(2, st.builds(lambda s, n, smooth: s.in_epochs(n, smooth), trees(1), counts, st.booleans()))
in_epochs = st.builds(lambda s, smooth: s.in_epochs(smooth=smooth), trees(2), st.booleans())
in_epochs = in_epochs | st.builds(lambda a, b: 2 * (a + b).clip(0, 5), in_epochs, in_epochs)
everything = in_steps | in_epochs


def bits(values: Any) -> bytes:
    return np.asarray(values, np.float64).tobytes()


@properties
@given(s=in_steps, ts=times)
def test_a_schedule_is_a_pure_function_of_t(s: Schedule, ts: list[int]) -> None:
    shown, stored, hashed = repr(s), s.to_json(), hash(s)
    once = [s(t) for t in ts]
    s.values(50)  # a plot
    assert bits([s(t) for t in reversed(ts)]) == bits(once[::-1])
    assert bits([from_json(stored)(t) for t in ts]) == bits(once)  # one that has never been called
    assert (repr(s), s.to_json(), hash(s)) == (shown, stored, hashed)


@properties
@given(s=in_steps, ts=times)
def test_scalars_and_arrays_agree_to_the_bit(s: Schedule, ts: list[int]) -> None:
    one_by_one = [s(t) for t in ts]
    assert all(type(rate) is float and 0 <= rate < math.inf for rate in one_by_one)
    array = s(np.array(ts))
    assert array.dtype == np.float64
    assert array.shape == (len(ts),)
    assert bits(one_by_one) == bits(array) == bits(s(ts)) == bits(s(np.array(ts, np.uint64)))
    assert bits(one_by_one) == bits([s(np.int64(t)) for t in ts])


def test_the_shape_of_t_is_kept() -> None:
    s = cosine(0.3, 20).warmup(5)
    t = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    assert s(t).shape == (2, 3, 4)
    assert bits(s(t)) == bits(s.values(24))
    assert bits(s(np.asfortranarray(t))) == bits(s(t))
    assert s(np.array(3)).shape == ()
    assert s([]).shape == s(np.arange(0)).shape == (0,)
    assert bits(s(range(24))) == bits(s.values(24))


@properties
@given(s=everything)
def test_round_trips(s: Schedule) -> None:
    copies = [
        eval(repr(s), {"__builtins__": {}}, dict(SCHEDULES)),
        parse(repr(s)),
        from_json(json.loads(json.dumps(s.to_json(), allow_nan=False))),
        pickle.loads(pickle.dumps(s)),
        copy.deepcopy(s),
    ]
    for other in copies:
        assert other == s
        assert type(other) is type(s)
        assert hash(other) == hash(s)
        assert repr(other) == repr(s)
        assert other.unit == s.unit
        assert bits(other.bind(7).values(40)) == bits(s.bind(7).values(40))


@pytest.mark.parametrize(
    "shown",
    [
        "cosine(0.3, 20, end=0.01).warmup(5).in_epochs()",
        "cosine(0.3, 20, end=0.01).warmup(5, start=0.1, mode='constant').in_epochs(steps_per_epoch=235, smooth=True)",
        "inverse_power(0.1)",
        "exponential(0.1, 0.5, every=10, stair=True)",
        "geometric(2.0, 0.9, floor=0.01).floor(0.1).every(2)",
        "piecewise([], [1.0]) + table([1e-05, 1e+20]) + drops(0.5, [15, 30], 0.5)",
        "(constant(1.0) + constant(2.0)) * constant(3.0)",
        "constant(1.0) + (constant(2.0) + constant(3.0))",
        "constant(1.0) * (constant(2.0) * constant(3.0))",
        "constant(1.0) + constant(2.0) * constant(3.0)",
        "2.0 * constant(1.0) * constant(2.0)",
        "2.0 * (constant(1.0) * constant(2.0))",
        "2.0 * (3.0 * constant(1.0))",
        "(2.0 * constant(1.0)).clip(0.0, 1.0)",
        "(constant(1.0) + constant(2.0)).then(constant(1.0) + constant(2.0), 5)",
        "triangle(0.0, 1.0, 5, down=5)",
        "one_cycle(1.0, 100, anneal='linear')",
        "poly(0.1, 100, power=2.0).restart(10, mult=2).shift(3).hold(4)",
    ],
)
def test_repr_is_the_expression(shown: str) -> None:
    assert repr(eval(shown, {"__builtins__": {}}, dict(SCHEDULES))) == shown


def test_equal_means_built_alike() -> None:
    int_: Any = np.int64
    float_: Any = np.float32
    assert cosine(1, 20) == cosine(1.0, int_(20), end=0) == cosine(float_(1), T=20, end=-0.0)
    assert hash(cosine(1, 20)) == hash(cosine(1.0, int_(20), end=0))
    assert repr(cosine(1, 20, end=0)) == "cosine(1.0, 20)"
    assert cosine(1, 20) != cosine(1, 21)
    assert cosine(1, 20) != poly(1, 20)
    assert constant(1) + constant(2) != constant(2) + constant(1)
    assert triangle(0, 1, 5) == triangle(0, 1, 5, 5)
    assert (
        piecewise([1, 2], [3, 2, 1])
        == piecewise((1, 2), np.array([3.0, 2.0, 1.0]))
        == piecewise(range(1, 3), (3, 2, 1))
    )
    assert len({constant(1), constant(1.0), constant(2)}) == 2


def test_exports_start_with_the_first_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = SimpleNamespace(Scheduler=lambda *given: given)
    monkeypatch.setattr("samestep.schedules.exports._file", lambda name: kept)
    s = constant(1)
    assert (s.torch("optimizer"), s.paddle()) == ((s, "optimizer", -1), (s, -1))


def test_a_schedule_is_documented_by_its_formula() -> None:
    assert [make.__name__ for make in SCHEDULES.values()] == list(SCHEDULES)
    assert str(constant.__doc__).startswith("The same rate always: η(t) = lr.")


def test_schedules_are_frozen() -> None:
    s: Any = cosine(0.3, 20)
    with pytest.raises(AttributeError):
        s.lr = 0.1
    with pytest.raises(AttributeError):
        del s.T


def test_threads_may_share_a_schedule() -> None:
    s = geometric(3.7, 0.99999)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: bits(s(np.arange(0, 5 * CHUNK, 997))), range(8)))
    assert len(set(results)) == 1


# The formulas, by hand


@pytest.mark.parametrize(
    ("s", "expected"),
    [
        (constant(0.1), [0.1] * 6),
        (exponential(8, 0.5), [8, 4, 2, 1, 0.5, 0.25]),
        (exponential(8, 0.25, every=2), [8, 4, 2, 1, 0.5, 0.25]),
        (exponential(8, 0.25, every=2, stair=True), [8, 8, 2, 2, 0.5, 0.5]),
        (exponential(1, 2), [1, 2, 4, 8, 16, 32]),
        (natural_exp(2, 0.5), [2 * math.exp(-0.5 * t) for t in range(6)]),
        (inverse_power(1, 3, 0.5), [1, 0.5, 7**-0.5, 10**-0.5, 13**-0.5, 0.25]),
        (inverse_power(6, 1, 1), [6, 3, 2, 1.5, 6 / 5, 1]),
        (inverse_power(1, 1, 2), [1, 0.25, 3**-2, 0.0625, 5**-2, 6**-2]),
        (poly(1, 4), [1, 0.75, 0.5, 0.25, 0, 0]),
        (poly(1, 4, end=0.5), [1, 0.875, 0.75, 0.625, 0.5, 0.5]),
        (poly(0, 4, end=1), [0, 0.25, 0.5, 0.75, 1, 1]),
        (poly(16, 4, power=2), [16, 9, 4, 1, 0, 0]),
        (cosine(1, 4), [1, (1 + math.cos(math.pi / 4)) / 2, 0.5, (1 + math.cos(3 * math.pi / 4)) / 2, 0, 0]),
        (geometric(16, 0.5, floor=3), [16, 8, 4, 3, 3, 3]),
        (geometric(1, 2), [1, 2, 4, 8, 16, 32]),
        (piecewise([2, 3], [3, 2, 1]), [3, 3, 2, 1, 1, 1]),
        (piecewise([0], [3, 2]), [2] * 6),
        (piecewise([], [3]), [3] * 6),
        (drops(8, [1, 3, 4], 0.5), [8, 4, 4, 2, 1, 1]),
        (triangle(1, 3, 2), [1, 2, 3, 2, 1, 2]),
        (triangle(0, 4, 1, 3), [0, 4, 4 * (2 / 3), 4 * (1 / 3), 0, 4]),
        (triangle(0, 1, 1, decay=0.5), [0, 1, 0, 0.5, 0, 0.25]),
        (triangle(0, 1, 1, decay=0.5, per="step"), [0, 0.5, 0, 0.125, 0, 0.03125]),
        (triangle(0, 1, 1, decay=0.25, per="step").in_epochs(2, smooth=True), [0, 0.25, 0.25, 0.0625, 0, 0.015625]),
        (one_cycle(1, 5, up=0.6, div=4, final_div=2, anneal="linear"), [0.25, 0.625, 1, 0.5625, 0.125, 0.125]),
        (table([3, 1, 2]), [3, 1, 2, 2, 2, 2]),
        (constant(1).warmup(4), [0, 0.25, 0.5, 0.75, 1, 1]),
        (poly(1, 4).warmup(2, start=2), [2, 1.5, 1, 0.75, 0.5, 0.25]),
        (poly(1, 4).warmup(2, start=0.5, mode="constant"), [0.5, 0.5, 1, 0.75, 0.5, 0.25]),
        (poly(1, 4).warmup(0), [1, 0.75, 0.5, 0.25, 0, 0]),
        (poly(1, 4).then(table([7, 8]), 3), [1, 0.75, 0.5, 7, 8, 8]),
        (poly(1, 2).restart(2), [1, 0.5, 1, 0.5, 1, 0.5]),
        (poly(1, 2).restart(3), [1, 0.5, 0, 1, 0.5, 0]),
        (poly(1, 2).restart(2, mult=2, decay=0.5), [1, 0.5, 0.5, 0.375, 0.25, 0.125]),
        (poly(1, 4).shift(2), [0.5, 0.25, 0, 0, 0, 0]),
        (poly(1, 4).hold(2), [1, 0.75, 0.5, 0.5, 0.5, 0.5]),
        (poly(1, 4).every(2), [1, 1, 0.75, 0.75, 0.5, 0.5]),
        (poly(1, 4).clip(0.25, 0.5), [0.5, 0.5, 0.5, 0.25, 0.25, 0.25]),
        (poly(1, 4).floor(0.5), [1, 0.75, 0.5, 0.5, 0.5, 0.5]),
        (poly(1, 4) * table([1, 2]), [1, 1.5, 1, 0.5, 0, 0]),
        (poly(1, 4) + table([1, 2]), [2, 2.75, 2.5, 2.25, 2, 2]),
        (2 * poly(1, 4), [2, 1.5, 1, 0.5, 0, 0]),
        (np.float64(2) * poly(1, 4) * np.int64(2), [4, 3, 2, 1, 0, 0]),
        (poly(1, 2).in_epochs(2), [1, 1, 0.5, 0.5, 0, 0]),
        (poly(1, 2).in_epochs(2, smooth=True), [1, 0.75, 0.5, 0.25, 0, 0]),
        (constant(1).warmup(2).in_epochs(2, smooth=True), [0, 0.25, 0.5, 0.75, 1, 1]),
        (constant(1).warmup(2).in_epochs(2), [0, 0, 0.5, 0.5, 1, 1]),
    ],
    ids=repr,
)
def test_by_hand(s: Schedule, expected: list[float]) -> None:
    assert s.values(6).tolist() == expected


@properties
@given(s=plain, b=plain, t=st.integers(0, 300), n=counts, x=rates, y=rates)
def test_what_each_combination_means(s: Schedule, b: Schedule, t: int, n: int, x: float, y: float) -> None:
    lo, hi = sorted([x, y])
    assert s.warmup(n, x)(t) == (s(t - n) if t >= n else x + (s(0) - x) * t / n)
    assert s.warmup(n, x, "constant")(t) == (s(t - n) if t >= n else x)
    assert s.then(b, n)(t) == (s(t) if t < n else b(t - n))
    assert s.shift(n)(t) == s(t + n)
    assert s.hold(n)(t) == s(min(t, n))
    assert s.every(n)(t) == s.in_epochs(n)(t) == s(t // n)
    assert s.clip(lo, hi)(t) == min(max(s(t), lo), hi)
    assert s.floor(lo)(t) == max(s(t), lo)
    assert s.restart(n, decay=0.5)(t) == 0.5 ** (t // n) * s(t % n)
    assert (s * b)(t) == s(t) * b(t)
    assert (s + b)(t) == s(t) + b(t)
    assert (x * s)(t) == (s * x)(t) == x * s(t)
    assert s.values(n).tolist() == [s(t) for t in range(n)]


@properties
@given(a=plain, b=plain, c=plain, m=st.integers(0, 30), more=st.integers(0, 30))
def test_then_is_associative(a: Schedule, b: Schedule, c: Schedule, m: int, more: int) -> None:
    n = m + more
    assert bits(a.then(b, m).then(c, n).values(100)) == bits(a.then(b.then(c, n - m), m).values(100))


@properties
@given(s=plain, j=st.integers(0, 30), k=st.integers(0, 30), n=counts)
def test_clocks_compose(s: Schedule, j: int, k: int, n: int) -> None:
    assert bits(s.shift(j).shift(k).values(60)) == bits(s.shift(j + k).values(60))
    assert bits(s.warmup(j).shift(j).values(60)) == bits(s.values(60))
    assert bits(s.every(j + 1).every(n).values(60)) == bits(s.every((j + 1) * n).values(60))
    assert bits(s.hold(j).hold(k).values(60)) == bits(s.hold(min(j, k)).values(60))


# Bounds, ends and joints


@properties
@given(lr=rates, end=rates, T=counts, power=st.floats(0.1, 5))
def test_cosine_and_poly_stay_between_their_ends(lr: float, end: float, T: int, power: float) -> None:
    for s in (cosine(lr, T, end), poly(lr, T, end, power)):
        values = s.values(T + 5)
        ulp = math.ulp(max(lr, end))  # end + (lr - end) is rounded twice, so that s(0) may miss lr by this
        assert values.min() >= min(end, lr - (ulp if lr < end else 0))
        assert values.max() <= max(end, lr + (ulp if lr > end else 0))
        assert abs(s(0) - lr) <= ulp
        assert set(values[T:].tolist()) == {end}


@properties
@given(s=triangles(), ts=times)
def test_triangle_stays_between_low_and_high(s: Any, ts: list[int]) -> None:
    assert all(s.low <= rate <= s.high + math.ulp(s.high) for rate in s(ts))


@properties
@given(lr=rates, rate=shares, every=counts, k=rates, beta=rates, alpha=rates, ts=times)
def test_decays_stay_below_their_beginning(
    lr: float, rate: float, every: int, k: float, beta: float, alpha: float, ts: list[int]
) -> None:
    for s in (exponential(lr, rate, every), natural_exp(lr, k), inverse_power(lr, beta, alpha), geometric(lr, rate)):
        assert s(0) == lr
        assert all(0 <= value <= lr for value in s(ts))


@pytest.mark.parametrize(
    ("s", "end"),
    [
        (constant(0.1), 0),
        (poly(0.1, 10, 0.01, 2), 10),
        (cosine(0.1, 10, 0.01), 10),
        (piecewise([3, 9], [3, 2, 1]), 9),
        (drops(1, [3, 9], 0.1), 9),
        (one_cycle(0.1, 10), 9),
        (one_cycle(0.1, 10, anneal="linear"), 9),
        (table([3, 2, 1]), 2),
        (geometric(1, 0.5, floor=1e-3), 10),
        (cosine(0.1, 10).warmup(5), 15),
        (constant(1).then(poly(0.1, 10), 7), 17),
        (natural_exp(1, 0.1).hold(20), 20),
        (cosine(0.1, 10).every(3), 30),
        (cosine(0.1, 10).in_epochs(7), 70),
        (cosine(0.1, 10).in_epochs(7, smooth=True), 70),
    ],
    ids=repr,
)
def test_past_its_end_a_schedule_holds_its_last_rate(s: Schedule, end: int) -> None:
    last = s(end)
    assert {s(end + more) for more in (0, 1, 2, 100, 10**6, 2**53, 2**62)} == {last}
    assert end == 0 or s(end - 1) != last


@properties
@given(lr=rates, end=rates, T=counts, power=st.floats(1, 4), n=st.integers(1, 50))
def test_cosine_and_poly_have_no_jumps(lr: float, end: float, T: int, power: float, n: int) -> None:
    """Seen at n points between two updates, a rate moves no further than the steepest slope allows."""
    for s, slope in ((cosine(lr, T, end), math.pi / 2), (poly(lr, T, end, power), power)):
        fine = s.in_epochs(n, smooth=True).values((T + 2) * n)
        step = slope * abs(lr - end) / (T * n)
        assert np.abs(np.diff(fine)).max() <= step + 4 * math.ulp(10)


@pytest.mark.parametrize("anneal", ["cos", "linear"])
@pytest.mark.parametrize("up", [0.3, 0.5, 1 / 3])
def test_one_cycle_has_no_jumps(anneal: str, up: float) -> None:
    n, T = 1000, 10
    s = one_cycle(1, T, up, anneal=anneal)
    fine = s.in_epochs(n, smooth=True).values((T + 2) * n)
    step = math.pi / 2 / ((up * T - 1) * n) * 1.001
    assert np.abs(np.diff(fine)).max() <= step
    assert 1 - step <= fine.max() <= 1  # the peak may lie between two of the points
    assert abs(s(0) - 1 / 25) <= math.ulp(1)  # torch's formulas, which these are to the bit, round at the ends as well
    assert abs(fine[-1] - 1 / 25 / 1e4) <= math.ulp(1)


@properties
@given(s=plain, n=counts, start=rates)
def test_a_warm_up_meets_the_schedule_behind_it(s: Schedule, n: int, start: float) -> None:
    warm = s.warmup(n, start)
    assert warm(0) == start
    assert warm(n) == s(0)
    steps = np.diff(warm.values(n + 1))
    assert np.abs(steps - (s(0) - start) / n).max() <= 2 * math.ulp(max(s(0), start))


# Clocks: restarts and epochs


def starts(period: int, mult: int) -> Iterator[tuple[int, int]]:
    """(k, start of period k) as long as t may be, in integers."""
    k, at = 0, 0
    while at < 2**63 and k < 2000:
        yield k, at
        at += period * mult**k
        k += 1


@pytest.mark.parametrize("period", [1, 2, 3, 10])
@pytest.mark.parametrize("mult", [1, 2, 3])
def test_restarts_come_exactly_on_time(period: int, mult: int) -> None:
    s = table([1 + i for i in range(period)]).restart(period, mult)
    numbered = constant(1).restart(period, mult, decay=0.5)
    for k, at in starts(period, mult):
        length = mult**k  # updates for each entry of the table
        for entry in range(period):
            for t in (at + entry * length, at + (entry + 1) * length - 1):
                if t < 2**63:
                    assert s(t) == 1 + entry
                    assert numbered(t) == 0.5**k


def test_bite_a_restart_by_logarithm_comes_late() -> None:
    """The formula with a logarithm is wrong at boundaries that the test above visits."""

    def cycle(t: int, period: int, mult: int) -> int:
        return int(math.log(t / period * (mult - 1) + 1, mult))

    assert any(cycle(at, 1, 3) != k for k, at in starts(1, 3) if k)


@pytest.mark.parametrize("period", [1, 7, 1000])
def test_restarts_of_one_length_at_huge_t(period: int) -> None:
    s = table(range(1, period + 1)).restart(period)
    for k in (10**6, 10**12, 2**53 + 1, 2**63 // period - 1):
        assert s(k * period) == 1
        assert s(k * period - 1) == period


@properties
@given(s=plain, period=counts, mult=st.integers(2, 4), t=st.integers(0, 2000))
def test_a_longer_period_is_the_schedule_stretched(s: Schedule, period: int, mult: int, t: int) -> None:
    k, at = [(k, at) for k, at in starts(period, mult) if at <= t][-1]
    assert s.restart(period, mult)(t) == s.in_epochs(mult**k, smooth=True)(t - at)


@properties
@given(lr=rates, end=rates, T=counts, warm=st.integers(0, 10), n=st.integers(1, 300), power=st.floats(0.1, 5))
def test_smooth_epochs_have_the_bits_of_steps(lr: float, end: float, T: int, warm: int, n: int, power: float) -> None:
    steps = cosine(lr, T * n, end).warmup(warm * n).then(poly(lr, T * n, end, power), 40 * n)
    epochs = cosine(lr, T, end).warmup(warm).then(poly(lr, T, end, power), 40)
    t = np.random.default_rng(n).integers(0, 90 * n, 200)
    assert bits(epochs.in_epochs(n, smooth=True)(t)) == bits(steps(t))


@pytest.mark.parametrize(
    ("epochs", "steps"),
    [
        (poly(1, 4).shift(2), poly(1, 12).shift(6)),
        (poly(1, 4).hold(2), poly(1, 12).hold(6)),
        (poly(1, 4).every(2), poly(1, 4).every(6)),
        (poly(1, 4).restart(2), poly(1, 12).restart(6)),
        (poly(1, 4).restart(2, mult=2), poly(1, 12).restart(6, mult=2)),
        (exponential(1, 0.5, every=2), exponential(1, 0.5, every=6)),
        (exponential(1, 0.5, every=2, stair=True), exponential(1, 0.5, every=6, stair=True)),
        (natural_exp(1, 0.75), natural_exp(1, 0.25)),
        (inverse_power(1, 1.5, 1), inverse_power(1, 0.5, 1)),
        (piecewise([2, 3], [3, 2, 1]), piecewise([6, 9], [3, 2, 1])),
        (drops(8, [1, 4], 0.5), drops(8, [3, 12], 0.5)),
        (table([3, 1, 2]), table([3, 3, 3, 1, 1, 1, 2])),
        (triangle(0, 1, 2, 1, decay=0.5), triangle(0, 1, 6, 3, decay=0.5)),
    ],
    ids=repr,
)
def test_every_kind_moves_smoothly_through_epochs_of_three_steps(epochs: Schedule, steps: Schedule) -> None:
    assert epochs.in_epochs(3, smooth=True).values(40).tolist() == steps.values(40).tolist()


@properties
@given(s=in_epochs, n=st.integers(1, 20))
def test_an_epoch_schedule_is_bound_before_it_is_called(s: Schedule, n: int) -> None:
    assert s.unit == "epochs"
    for call in (lambda: s(0), lambda: s.values(3), lambda: s(np.arange(3))):
        with pytest.raises(Invalid) as error:
            call()
        assert str(error.value) == (
            "in_epochs: how many steps has an epoch? say .in_epochs(steps_per_epoch), or .bind(...)"
        )
    bound = s.bind(n)
    assert bound.unit == "steps"
    assert bound.bind(n + 1) is bound
    assert s.unit == "epochs"  # the schedule itself is left as it was
    assert s.bind(1).unit == "steps"


def test_binding_reaches_every_part() -> None:
    a, b = poly(1, 4), table([1, 2, 3])
    assert (a.in_epochs() + b.in_epochs(smooth=True)).bind(10) == a.in_epochs(10) + b.in_epochs(10, smooth=True)
    s = (2 * (a.in_epochs() * b.in_epochs())).clip(0, 1).floor(0.5)
    assert s.bind(3) == (2 * (a.in_epochs(3) * b.in_epochs(3))).clip(0, 1).floor(0.5)
    assert bits((a.in_epochs() + b.in_epochs()).bind(3).values(20)) == bits((a + b).in_epochs(3).values(20))
    assert a.bind(3) is a
    assert a.in_epochs(5).warmup(3).unit == "steps"  # it says how many steps an epoch has, so these are steps
    assert a.warmup(3).in_epochs().bind(5)(14) == 0.5 * (2 / 3) + 0.5 * (2 / 3) == 2 / 3


# The recurrence


@pytest.mark.parametrize("factor", [0.999999, 0.9, 0.0, 1.0, 1.00001])
def test_geometric_is_the_recurrence_across_chunks(factor: float) -> None:
    rate, t = 2.0, [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 17]
    expected = {}
    for step in range(t[-1] + 1):
        expected[step] = rate
        rate = max(1e-3, rate * factor)
    for order in (t, t[::-1]):
        assert [geometric(2, factor, floor=1e-3)(step) for step in order] == [expected[step] for step in order]


@properties
@given(lr=st.floats(1e-3, 10), factor=st.floats(0, 1.1), share=shares, n=st.integers(1, 3000))
def test_geometric_is_the_recurrence(lr: float, factor: float, share: float, n: int) -> None:
    expected, rate, floor = [], lr, lr * share
    for _ in range(n):
        expected.append(rate)
        rate = max(floor, rate * factor)
    assert geometric(lr, factor, floor).values(n).tolist() == expected


def test_geometric_knows_when_nothing_changes_any_more() -> None:
    assert geometric(1, 0.5)(2**62) == 0.0
    assert geometric(1, 0.9)(2**62) == geometric(1, 0.9)(20_000) > 0  # the smallest numbers are rounded to themselves
    assert geometric(1, 1)(2**62) == 1.0
    assert geometric(1, 0.9999999, floor=0.5)(2**62) == 0.5
    assert geometric(0, 5)(2**62) == 0.0


def test_geometric_between_two_updates() -> None:
    assert geometric(1, 0.25).in_epochs(2, smooth=True).values(5).tolist() == [1, 0.5, 0.25, 0.125, 0.0625]
    assert geometric(1, 0.25, floor=0.2).in_epochs(2, smooth=True).values(5).tolist() == [1, 0.5, 0.25, 0.2, 0.2]


def test_a_recurrence_that_would_take_hours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.schedules.powers.LONGEST", 4 * CHUNK)
    with pytest.raises(Invalid) as error:
        geometric(1.5, 0.9999999)(10**15)
    assert LONGEST == 2**30
    assert str(error.value) == (
        f"geometric: t must be at most {4 * CHUNK}, got t=1000000000000000: use exponential, which needs no steps"
    )
    assert product(1.5, 0.9999999, 3 * CHUNK, 0.0) == geometric(1.5, 0.9999999)(3 * CHUNK)
    assert geometric(1.25, 0.9999999)(4 * CHUNK) < geometric(1.25, 0.9999999)(4 * CHUNK - 1)
    with pytest.raises(Invalid, match=f"^geometric: t must be at most {4 * CHUNK}, got t={5 * CHUNK}: "):
        geometric(1.25, 0.9999999)(5 * CHUNK)


# Too large


def test_a_rate_too_large_for_a_float_is_an_error_unless_it_is_bounded() -> None:
    for s in (exponential(1, 1.1), geometric(1, 1.1), constant(1).restart(1, decay=2), triangle(0, 1, 1, decay=2)):
        with pytest.raises(Invalid) as error:
            s(10**6 + 1)
        assert str(error.value) == (
            f"{s.op}: the rate at t=1000001 is too large for a float: use .clip(lo, hi) or .hold(at)"
        )
        assert s.clip(0, 3)(10**6 + 1) == 3
        assert s.hold(9)(10**6 + 1) == s(9)
    with pytest.raises(Invalid):
        (constant(0) * exponential(1, 1.1))(10**6)


def test_absurd_clocks_are_an_error_in_one_line() -> None:
    s = constant(1.0) + poly(1, 10)
    for _ in range(30):
        s = s.shift(2**53).restart(1, mult=2**53)
    assert s(0) <= 2
    absurd = (natural_exp(1, 1) + inverse_power(1)).shift(2**53)
    for _ in range(30):
        absurd = absurd.restart(1, mult=2**53).shift(2**53)
    with pytest.raises(Invalid, match=r"^shift: the rate at t=0 is too large"):
        absurd(0)


# Parity with torch: equal to the bit


def torch_rates(make: Callable[[torch.optim.Optimizer], Any], lr: float, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr, momentum=0.9)
    scheduler = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(("low", "high", "up", "down"), [(0.001, 0.1, 7, None), (0.01, 0.3, 5, 12), (0.0, 1.0, 1, 3)])
def test_triangle_is_cyclic_lr(low: float, high: float, up: int, down: int | None) -> None:
    modes: list[tuple[Any, float, Schedule]] = [
        ("triangular", 1.0, triangle(low, high, up, down)),
        ("triangular2", 1.0, triangle(low, high, up, down, decay=0.5)),
        ("exp_range", 0.99, triangle(low, high, up, down, decay=0.99, per="step")),
    ]
    for mode, gamma, s in modes:
        theirs = torch_rates(lambda o: lr_scheduler.CyclicLR(o, low, high, up, down, mode, gamma), 0.1, 300)  # noqa: B023
        assert s.values(300).tolist() == theirs


@pytest.mark.parametrize("anneal", ["cos", "linear"])
@pytest.mark.parametrize(("T", "up"), [(100, 0.3), (57, 0.1), (10, 0.0), (10, 1.0), (10, 0.05), (2, 0.3), (3, 0.5)])
def test_one_cycle_is_one_cycle_lr(anneal: str, T: int, up: float) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.7, T, pct_start=up, anneal_strategy=anneal)  # type: ignore[arg-type]
    theirs = []
    for t in range(T):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if t < T - 1:
            scheduler.step()
    s = one_cycle(0.7, T, up, anneal=anneal)
    assert s.values(T).tolist() == theirs
    assert s(T) == s(10 * T) == theirs[-1]  # where OneCycleLR jumps, and then raises


def test_one_cycle_where_one_cycle_lr_divides_by_zero() -> None:
    assert one_cycle(1, 10, up=0.1)(0) == 1
    assert one_cycle(1, 1, up=1)(0) == 1
    assert one_cycle(1, 1)(0) == 1 / 25 / 1e4


@pytest.mark.parametrize("mult", [1, 2, 3])
def test_restarted_cosine_is_cosine_annealing_warm_restarts(mult: int) -> None:
    theirs = torch_rates(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 7, mult, 0.01), 0.3, 700)
    assert cosine(0.3, 7, end=0.01).restart(7, mult).values(700).tolist() == theirs


def test_recurrences_are_those_of_torch() -> None:
    assert geometric(0.3, 0.97).values(300).tolist() == torch_rates(
        lambda o: lr_scheduler.ExponentialLR(o, 0.97), 0.3, 300
    )
    assert geometric(0.3, 0.9).every(7).values(300).tolist() == torch_rates(
        lambda o: lr_scheduler.StepLR(o, 7, 0.9), 0.3, 300
    )
    assert drops(0.3, [5, 50, 120], 0.3).values(300).tolist() == torch_rates(
        lambda o: lr_scheduler.MultiStepLR(o, [5, 50, 120], 0.3), 0.3, 300
    )


# Every error


def cases() -> Iterator[tuple[Callable[[], Any], type[SamestepError], str]]:
    s, e = constant(0.1), constant(0.1).in_epochs()
    any_: Any = None
    yield lambda: cosine(0.3, 0), Invalid, "cosine: T must be at least 1, got T=0"
    yield lambda: cosine(0.3, -3), Invalid, "cosine: T must be at least 1, got T=-3"
    yield lambda: cosine(0.3, 2**53 + 1), Invalid, f"cosine: T must be at most {2**53}, got T={2**53 + 1}"
    yield lambda: cosine(0.3, 20.0), WrongType, "cosine: T must be a whole number, got T=20.0"  # type: ignore[arg-type]
    yield lambda: cosine(0.3, True), WrongType, "cosine: T must be a whole number, got T=True"
    yield lambda: cosine(0.3, "20"), WrongType, "cosine: T must be a whole number, got T='20'"  # type: ignore[arg-type]
    yield lambda: cosine(math.nan, 20), Invalid, "cosine: lr must be finite and at least 0, got lr=nan"
    yield lambda: cosine(math.inf, 20), Invalid, "cosine: lr must be finite and at least 0, got lr=inf"
    yield lambda: cosine(-0.3, 20), Invalid, "cosine: lr must be finite and at least 0, got lr=-0.3"
    yield lambda: cosine(0.3, 20, -1), Invalid, "cosine: end must be finite and at least 0, got end=-1"
    yield lambda: cosine(any_, 20), WrongType, "cosine: lr must be a number, got lr=None"
    yield lambda: cosine(1j, 20), WrongType, "cosine: lr must be a number, got lr=1j"  # type: ignore[arg-type]
    yield lambda: constant(True), WrongType, "constant: lr must be a number, got lr=True"
    yield lambda: constant("0.1"), WrongType, "constant: lr must be a number, got lr='0.1'"  # type: ignore[arg-type]
    yield lambda: constant(np.ones(2)), WrongType, "constant: lr must be a number, got lr=[1.0, 1.0]"  # type: ignore[arg-type]
    huge = "1" + 76 * "0" + "..."
    yield lambda: constant(10**400), Invalid, f"constant: lr must be finite and at least 0, got lr={huge}"
    yield lambda: exponential(1, -0.5), Invalid, "exponential: rate must be finite and at least 0, got rate=-0.5"
    yield lambda: exponential(1, 0.5, 0), Invalid, "exponential: every must be at least 1, got every=0"
    bad: Any = 1
    yield lambda: exponential(1, 0.5, 1, bad), WrongType, "exponential: stair must be True or False, got stair=1"
    yield lambda: natural_exp(1, -1), Invalid, "natural_exp: k must be finite and at least 0, got k=-1"
    yield lambda: inverse_power(1, -1), Invalid, "inverse_power: beta must be finite and at least 0, got beta=-1"
    yield lambda: inverse_power(1, 1, -1), Invalid, "inverse_power: alpha must be finite and at least 0, got alpha=-1"
    yield lambda: poly(1, 0), Invalid, "poly: T must be at least 1, got T=0"
    yield lambda: poly(1, 5, power=0), Invalid, "poly: power must be above 0, got power=0"
    yield lambda: geometric(1, -1), Invalid, "geometric: factor must be finite and at least 0, got factor=-1"
    yield lambda: geometric(1, 0.5, 2), Invalid, "geometric: floor must be at most lr, got floor=2.0 and lr=1.0"
    yield lambda: piecewise([30, 15], [3, 2, 1]), Invalid, "piecewise: at must be increasing, got at=[30, 15]"
    yield lambda: piecewise([15, 15], [3, 2, 1]), Invalid, "piecewise: at must be increasing, got at=[15, 15]"
    yield (
        lambda: piecewise([1, 2], [3, 2]),
        Invalid,
        "piecewise: values must have one more than at, got 2 values for 2 boundaries",
    )
    yield (
        lambda: piecewise([1], [3, 2, 1]),
        Invalid,
        "piecewise: values must have one more than at, got 3 values for 1 boundaries",
    )
    yield lambda: piecewise([1.5], [3, 2]), WrongType, "piecewise: at[0] must be a whole number, got at[0]=1.5"  # type: ignore[list-item]
    yield lambda: piecewise([-1], [3, 2]), Invalid, "piecewise: at[0] must be at least 0, got at[0]=-1"
    yield (
        lambda: piecewise([1], [3, math.nan]),
        Invalid,
        "piecewise: values[1] must be finite and at least 0, got values[1]=nan",
    )
    yield lambda: piecewise(any_, [1]), WrongType, "piecewise: at must be a list, got at=None"
    yield lambda: piecewise("12", [1]), WrongType, "piecewise: at must be a list, got at='12'"  # type: ignore[arg-type]
    yield lambda: drops(1, [5, 2], 0.5), Invalid, "drops: at must be increasing, got at=[5, 2]"
    yield lambda: drops(1, [2], -0.5), Invalid, "drops: factor must be finite and at least 0, got factor=-0.5"
    yield lambda: triangle(2, 1, 5), Invalid, "triangle: low must be at most high, got low=2.0 and high=1.0"
    yield lambda: triangle(0, 1, 0), Invalid, "triangle: up must be at least 1, got up=0"
    yield lambda: triangle(0, 1, 1, 0), Invalid, "triangle: down must be at least 1, got down=0"
    yield (
        lambda: triangle(0, 1, 1, per="epoch"),
        Invalid,
        "triangle: per must be one of 'cycle', 'step', got per='epoch'",
    )
    yield lambda: one_cycle(1, 0), Invalid, "one_cycle: T must be at least 1, got T=0"
    yield lambda: one_cycle(1, 10, up=1.5), Invalid, "one_cycle: up must be at most 1, got up=1.5"
    yield lambda: one_cycle(1, 10, div=0), Invalid, "one_cycle: div must be above 0, got div=0"
    yield lambda: one_cycle(1, 10, final_div=0), Invalid, "one_cycle: final_div must be above 0, got final_div=0"
    yield (
        lambda: one_cycle(1, 10, anneal="cosine"),
        Invalid,
        "one_cycle: anneal must be one of 'cos', 'linear', got anneal='cosine'",
    )
    yield lambda: table([]), Invalid, "table: values must have at least one rate, got values=[]"
    yield lambda: table(0.1), WrongType, "table: values must be a list, got values=0.1"  # type: ignore[arg-type]
    yield lambda: s.warmup(-1), Invalid, "warmup: n must be at least 0, got n=-1"
    yield lambda: s.warmup(2.5), WrongType, "warmup: n must be a whole number, got n=2.5"  # type: ignore[arg-type]
    yield lambda: s.warmup(5, -1), Invalid, "warmup: start must be finite and at least 0, got start=-1"
    yield (
        lambda: s.warmup(5, mode="cosine"),
        Invalid,
        "warmup: mode must be one of 'linear', 'constant', got mode='cosine'",
    )
    yield lambda: s.warmup(5, mode=any_), WrongType, "warmup: mode must be a string, got mode=None"
    yield (
        lambda: s.then(0.1, 5),  # type: ignore[arg-type]
        WrongType,
        "then: other must be a schedule, such as constant(0.1), got other=0.1",
    )
    yield lambda: s.then(s, -5), Invalid, "then: at must be at least 0, got at=-5"
    yield lambda: s.restart(0), Invalid, "restart: period must be at least 1, got period=0"
    yield lambda: s.restart(5, 0), Invalid, "restart: mult must be at least 1, got mult=0"
    yield lambda: s.restart(5, 1.5), WrongType, "restart: mult must be a whole number, got mult=1.5"  # type: ignore[arg-type]
    yield lambda: s.restart(5, decay=-1), Invalid, "restart: decay must be finite and at least 0, got decay=-1"
    yield lambda: s.shift(-1), Invalid, "shift: k must be at least 0, got k=-1"
    yield lambda: s.hold(-1), Invalid, "hold: at must be at least 0, got at=-1"
    yield lambda: s.every(0), Invalid, "every: n must be at least 1, got n=0"
    yield lambda: s.clip(2, 1), Invalid, "clip: lo must be at most hi, got lo=2.0 and hi=1.0"
    yield lambda: s.clip(0, math.inf), Invalid, "clip: hi must be finite and at least 0, got hi=inf"
    yield lambda: s.floor(-1), Invalid, "floor: lo must be finite and at least 0, got lo=-1"
    yield lambda: -1 * s, Invalid, "*: factor must be finite and at least 0, got factor=-1"
    yield lambda: s * True, WrongType, "*: factor must be a number, got factor=True"
    yield lambda: s * "2", WrongType, "*: factor must be a number, got factor='2'"
    yield lambda: np.ones(2) * s, WrongType, "*: factor must be a number, got factor=[1.0, 1.0]"
    yield lambda: s + 1, WrongType, "+: both sides must be schedules, such as constant(0.1), got 1"
    yield lambda: 1 + s, WrongType, "+: both sides must be schedules, such as constant(0.1), got 1"
    yield lambda: s.values(-1), Invalid, "values: n must be at least 0, got n=-1"
    yield lambda: s(-1), Invalid, "constant: t must be at least 0, got t=-1"
    yield lambda: s([3, -1]), Invalid, "constant: t must be at least 0, got t=-1"
    yield lambda: s(2**63), Invalid, f"constant: t must be below 2**63, got t={2**63}"
    t = "constant: t must be a whole number or an array of them, got t="
    yield lambda: s(2.5), WrongType, t + "2.5"  # type: ignore[call-overload]
    yield lambda: s(True), WrongType, t + "True"
    yield lambda: s("5"), WrongType, t + "'5'"  # type: ignore[arg-type]
    yield lambda: s(any_), WrongType, t + "None"
    yield lambda: s(np.array([0.5])), WrongType, t + "[0.5]"
    yield lambda: s([[1], [2, 3]]), WrongType, t + "[[1], [2, 3]]"  # type: ignore[list-item]
    yield lambda: s(np.array([True])), WrongType, t + "[True]"
    yield lambda: s.in_epochs(0), Invalid, "in_epochs: steps_per_epoch must be at least 1, got steps_per_epoch=0"
    yield lambda: s.in_epochs(smooth=any_), WrongType, "in_epochs: smooth must be True or False, got smooth=None"
    yield lambda: s.bind(0), Invalid, "bind: steps_per_epoch must be at least 1, got steps_per_epoch=0"
    yield lambda: e.bind(1.5), WrongType, "bind: steps_per_epoch must be a whole number, got steps_per_epoch=1.5"  # type: ignore[arg-type]
    again = "in_epochs: the schedule has its unit already: .in_epochs() was applied to a part of it"
    yield e.in_epochs, Invalid, again
    yield s.in_epochs(5).warmup(3).in_epochs, Invalid, again
    for name, call in {
        "warmup": lambda: e.warmup(5),
        "then": lambda: e.then(s, 5),
        "restart": lambda: e.restart(5),
        "shift": lambda: e.shift(5),
        "hold": lambda: e.hold(5),
        "every": lambda: (e + e).clip(0, 1).every(5),
    }.items():
        message = f"{name}: counts steps, but the schedule epochs: put .{name}(...) before .in_epochs()"
        yield call, Invalid, message
    yield (
        lambda: s.then(e, 5),
        Invalid,
        "then: counts steps, but the schedule epochs: put .then(...) before .in_epochs()",
    )
    plus = "+: one side counts steps, the other epochs: combine first, (a + b).in_epochs()"
    yield lambda: s + e, Invalid, plus
    yield lambda: e + s, Invalid, plus
    yield lambda: e * s.in_epochs(5), Invalid, plus.replace("+", "*")
    yield lambda: from_json(any_), WrongType, "from_json: a schedule must be an object with op and version, got None"
    yield (
        lambda: from_json({"op": "cosin", "version": 1}),
        Invalid,
        "from_json: there is no op 'cosin'; did you mean cosine?",
    )
    yield lambda: from_json({}), Invalid, f"from_json: there is no op None; there are {', '.join(sorted(OPS))}"
    stored = s.to_json()
    for version in (0, 2):
        yield (
            partial(from_json, {**stored, "version": version}),
            Invalid,
            f"from_json: constant: version must be 1, got version={version}",
        )
    yield lambda: from_json({**stored, "x": 2}), Invalid, "from_json: constant has lr, got 'lr', 'x'"
    yield (
        lambda: from_json({"op": "constant", "version": 1}),
        Invalid,
        "from_json: constant has lr, got ",
    )
    yield (
        lambda: from_json({"op": "shift", "version": 1, "self": stored, "k": 1}),
        Invalid,
        "from_json: shift has of, k, got 'self', 'k'",
    )
    yield lambda: from_json({**stored, "lr": True}), WrongType, "constant: lr must be a number, got lr=True"
    yield (
        lambda: from_json({"op": "add", "version": 1, "a": stored, "b": e.to_json()}),
        Invalid,
        plus,
    )


@pytest.mark.parametrize(("call", "kind", "message"), [pytest.param(*case, id=case[2][:60]) for case in cases()])
def test_errors(call: Callable[[], Any], kind: type[SamestepError], message: str) -> None:
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == message
    assert isinstance(error.value, ValueError if kind is Invalid else TypeError)


def test_every_schedule_and_method_has_its_errors_tested() -> None:
    named = {message.split(":")[0] for _, _, message in cases()}
    assert named >= SCHEDULES.keys() | METHODS.keys()


def test_deep_json_is_refused() -> None:
    stored = constant(1).to_json()
    for _ in range(99):
        stored = {"op": "shift", "version": 1, "of": stored, "k": 1}
    assert from_json(stored).to_json() == stored
    stored = {"op": "shift", "version": 1, "of": stored, "k": 1}
    with pytest.raises(Invalid, match=r"^from_json: schedules must be nested at most 100 deep$"):
        from_json(stored)


def test_json_leaves_the_dictionary_alone() -> None:
    stored = cosine(0.3, 20).warmup(5).to_json()
    before = copy.deepcopy(stored)
    from_json(stored)
    assert stored == before
    assert stored == {
        "op": "warmup", "version": 1, "n": 5, "start": 0.0, "mode": "linear",
        "of": {"op": "cosine", "version": 1, "lr": 0.3, "T": 20, "end": 0.0},
    }  # fmt: skip


# Plateau

metrics = st.lists(st.integers(0, 12).map(lambda n: n / 8) | st.floats(-2, 2), max_size=60)
choices = st.fixed_dictionaries(
    {
        "factor": st.sampled_from([0.5, 0.1, 0.3, 0.0]),
        "patience": st.integers(0, 4),
        "threshold": st.sampled_from([0.0, 1e-4, 0.1, 0.5]),
        "cooldown": st.integers(0, 3),
        "floor": st.sampled_from([0.0, 1e-3, 0.01, 0.1]),
        "mode": st.sampled_from(["min", "max"]),
        "threshold_mode": st.sampled_from(["rel", "abs"]),
        "eps": st.sampled_from([1e-8, 0.0, 0.02]),
    }
)


@properties
@given(seen=metrics, options=choices)
def test_plateau_is_reduce_lr_on_plateau(seen: list[float], options: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    theirs = lr_scheduler.ReduceLROnPlateau(
        optimizer, min_lr=options["floor"], **{name: value for name, value in options.items() if name != "floor"}
    )
    ours = Plateau(0.3, **options)
    for metric in seen:
        optimizer.step()
        theirs.step(metric)
        assert ours.observe(metric) == ours.lr == optimizer.param_groups[0]["lr"]


def reference(lr: float, seen: list[Fraction], patience: int, cooldown: int) -> list[Fraction]:
    """Read from the definition, with exact numbers: threshold 0, factor 1/2, smaller is better.

    A drop comes at the first observation after which more than `patience` observations, outside cooldowns, have passed
    since the last one that was better than all before it.
    """
    found, rate, fresh = [], Fraction(lr), 0  # fresh: observations before this one no longer count
    for i, metric in enumerate(seen):
        if i == 0 or metric < min(seen[:i]):
            fresh = max(fresh, i + 1)
        if i + 1 - fresh > patience:
            rate /= 2
            fresh = i + 1 + cooldown
        found.append(rate)
    return found


@properties
@given(seen=st.lists(st.integers(0, 20), max_size=60), patience=st.integers(0, 4), cooldown=st.integers(0, 4))
def test_plateau_is_what_it_says(seen: list[int], patience: int, cooldown: int) -> None:
    plateau = Plateau(1.0, 0.5, patience, threshold=0, cooldown=cooldown, eps=0)
    assert [plateau.observe(metric) for metric in seen] == reference(1.0, list(map(Fraction, seen)), patience, cooldown)


@properties
@given(seen=metrics, options=choices, data=st.data())
def test_plateau_goes_on_as_if_nothing_had_happened(seen: list[float], options: dict[str, Any], data: Any) -> None:
    cut = data.draw(st.integers(0, len(seen)))
    whole, first = Plateau(0.3, **options), Plateau(0.3, **options)
    expected = [whole.observe(metric) for metric in seen]
    found = [first.observe(metric) for metric in seen[:cut]]
    state = json.loads(json.dumps(first.state(), allow_nan=False))
    second = Plateau.from_state(state)
    assert found + [second.observe(metric) for metric in seen[cut:]] == expected
    assert whole.state() == second.state()
    assert state == first.state()  # nothing is shared with the ones that went on
    assert repr(second) == repr(whole)


@properties
@given(seen=metrics, options=choices)
def test_the_trace_replays_what_happened(seen: list[float], options: dict[str, Any]) -> None:
    plateau = Plateau(0.3, **options)
    used = []  # the rate of each epoch, before it is observed
    for metric in seen:
        used.append(plateau.lr)
        plateau.observe(metric)
    used.append(plateau.lr)
    assert plateau.trace().values(len(used)).tolist() == used
    assert plateau.trace().in_epochs(3).values(3 * len(used)).tolist() == np.repeat(used, 3).tolist()


def test_a_new_plateau_has_seen_nothing_and_says_all_its_settings() -> None:
    plateau = Plateau(0.1)
    assert repr(plateau) == (
        "Plateau(lr=0.1, factor=0.5, patience=10, threshold=0.0001, cooldown=0, floor=0.0, mode='min', "
        "threshold_mode='rel', eps=1e-08)"
    )
    assert plateau.state() == {
        "version": 1, "settings": plateau.settings, "t": 0, "best": None, "bad": 0, "cooling": 0, "at": [], "values": [0.1],
    }  # fmt: skip


def test_an_absolute_threshold_may_be_above_1() -> None:
    plateau = Plateau(0.5, patience=0, threshold=2, threshold_mode="abs")
    assert [plateau.observe(metric) for metric in (9.0, 6.0, 5.0)] == [0.5, 0.5, 0.25]


def test_a_drop_by_eps_is_not_made() -> None:
    plateaus = [Plateau(0.5, patience=0, eps=eps) for eps in (0.25, 0.2)]
    assert [[plateau.observe(1.0) for _ in range(2)] for plateau in plateaus] == [[0.5, 0.5], [0.5, 0.25]]


def test_a_trace_in_updates() -> None:
    plateau = Plateau(0.4, patience=0)
    for metric, t in [(1.0, 100), (1.0, 200), (0.5, 250), (0.6, 400)]:
        plateau.observe(metric, t=t)
    assert plateau.trace() == piecewise([200, 400], [0.4, 0.2, 0.1])
    plateau.observe(0.7)
    assert plateau.trace() == piecewise([200, 400, 401], [0.4, 0.2, 0.1, 0.05])
    for t in (400, 401):
        with pytest.raises(Invalid) as error:
            plateau.observe(0.1, t=t)
        assert str(error.value) == f"observe: t must be above that of the last observation, 401, got t={t}"


def plateau_cases() -> Iterator[tuple[Callable[[], Any], type[SamestepError], str]]:
    p, any_ = Plateau(0.1), None  # type: tuple[Plateau, Any]
    yield lambda: Plateau(-1), Invalid, "Plateau: lr must be finite and at least 0, got lr=-1"
    yield lambda: Plateau(0.1, 1), Invalid, "Plateau: factor must be below 1, got factor=1"
    yield lambda: Plateau(0.1, 2), Invalid, "Plateau: factor must be below 1, got factor=2"
    yield lambda: Plateau(0.1, patience=-1), Invalid, "Plateau: patience must be at least 0, got patience=-1"
    yield lambda: Plateau(0.1, cooldown=True), WrongType, "Plateau: cooldown must be a whole number, got cooldown=True"
    yield lambda: Plateau(0.1, floor=0.2), Invalid, "Plateau: floor must be at most lr, got floor=0.2 and lr=0.1"
    yield lambda: Plateau(0.1, mode="low"), Invalid, "Plateau: mode must be one of 'min', 'max', got mode='low'"
    for threshold, mode in ((1, "rel"), (2, "".join(("r", "el")))):  # a text that is equal, though not the same object
        yield (
            partial(Plateau, 0.1, threshold=threshold, threshold_mode=mode),
            Invalid,
            f"Plateau: threshold must be below 1 with threshold_mode='rel', got threshold={threshold}",
        )
    yield (
        lambda: Plateau(0.1, threshold_mode="r"),
        Invalid,
        "Plateau: threshold_mode must be one of 'rel', 'abs', got threshold_mode='r'",
    )
    yield lambda: p.observe(math.nan), Invalid, "observe: metric must be finite, got metric=nan"
    yield lambda: p.observe(math.inf), Invalid, "observe: metric must be finite, got metric=inf"
    yield lambda: p.observe(any_), WrongType, "observe: metric must be a number, got metric=None"
    yield lambda: p.observe(True), WrongType, "observe: metric must be a number, got metric=True"
    yield lambda: p.observe(1, t=0), Invalid, "observe: t must be above that of the last observation, 0, got t=0"
    yield lambda: Plateau.from_state(any_), WrongType, "from_state: state must be what state() gave, got state=None"
    from_state, state = Plateau.from_state, p.state()
    yield lambda: from_state({}), WrongType, "from_state: state must be what state() gave, got state={}"
    for version in (0, 2):
        message = f"from_state: version must be 1, got version={version}"
        yield partial(from_state, {**state, "version": version}), Invalid, message
    yield lambda: from_state({**state, "bad": -1}), Invalid, "from_state: bad must be at least 0, got bad=-1"
    yield lambda: from_state({**state, "at": None}), WrongType, "piecewise: at must be a list, got at=None"


@pytest.mark.parametrize(
    ("call", "kind", "message"), [pytest.param(*case, id=case[2][:60]) for case in plateau_cases()]
)
def test_errors_of_plateau(call: Callable[[], Any], kind: type[SamestepError], message: str) -> None:
    test_errors(call, kind, message)


def test_a_refused_observation_or_state_changes_nothing() -> None:
    plateau = Plateau(0.1, patience=1)
    plateau.observe(0.5)
    before = plateau.state()
    with pytest.raises(Invalid):
        plateau.observe(math.nan, t=7)
    with pytest.raises(SamestepError):
        Plateau.from_state({**before, "at": [2, 1], "values": [3, 2, 1]})
    with pytest.raises(WrongType, match=r"^from_state: state must be what state\(\) gave"):
        Plateau.from_state({**before, "settings": {"rate": 1}})
    with pytest.raises(WrongType, match=r"^from_state: state must be what state\(\) gave"):
        Plateau.from_state({**before, "more": 1})
    assert plateau.state() == before


# Where a schedule ends


@pytest.mark.parametrize(
    ("schedule", "length"),
    [
        (constant(0.1), 0),
        (poly(0.1, 10), 10),
        (cosine(0.1, 10), 10),
        (one_cycle(0.1, 10), 9),
        (table([0.3, 0.2, 0.1]), 2),
        (drops(0.1, [5, 8], 0.1), 8),
        (drops(0.1, [], 0.1), 0),
        (piecewise([2, 4], [0.3, 0.2, 0.1]), 4),
        (cosine(0.1, 10).warmup(3), 13),
        (constant(0.1).warmup(3), 3),
        (exponential(0.1, 0.5).then(poly(0.1, 4), 6), 10),
        (cosine(0.1, 10).shift(4), 6),
        (constant(0.1).shift(4), 0),
        (exponential(0.1, 0.5).hold(7), 7),
        (cosine(0.1, 10).hold(70), 10),
        (cosine(0.1, 10).every(3), 30),
        (2 * cosine(0.1, 10) + poly(0.1, 12, end=0.01) * drops(0.1, [15], 0.1), 15),
        (cosine(0.1, 10).clip(0.0, 0.05).floor(1e-4), 10),
        (cosine(0.1, 10).in_epochs(), 10),  # epochs, its unit
        (cosine(0.1, 10).in_epochs().bind(7), 70),
        (cosine(0.1, 10).in_epochs(7, smooth=True), 70),
    ],
    ids=repr,
)
def test_a_schedule_knows_where_it_ends(schedule: Schedule, length: int) -> None:
    assert schedule.length == length
    if schedule.unit == "steps":
        last = schedule(length)
        assert schedule(range(length, length + 50)).tolist() == [last] * 50
        assert length == 0 or schedule(length - 1) != last or schedule.op == "floor"  # and not before


@pytest.mark.parametrize(
    "schedule",
    [exponential(0.1, 0.9), geometric(0.1, 0.9), natural_exp(0.1, 0.1), inverse_power(0.1), triangle(0, 1, 5),
     cosine(0.1, 10).restart(10), exponential(0.1, 0.9).warmup(3), cosine(0.1, 10) + exponential(0.1, 0.9),
     cosine(0.1, 10).then(triangle(0, 1, 5), 10), exponential(0.1, 0.9).in_epochs(10)],
    ids=repr,
)  # fmt: skip
def test_a_schedule_without_an_end_says_so(schedule: Schedule) -> None:
    assert schedule.length is None


@properties
@given(pieces(), st.integers(1, 5))
def test_past_its_end_no_schedule_changes(schedule: Schedule, steps_per_epoch: int) -> None:
    schedule = schedule.bind(steps_per_epoch)
    if schedule.length is not None and schedule.length < 10**6:
        assert len(set(schedule(range(schedule.length, schedule.length + 100)).tolist())) == 1
