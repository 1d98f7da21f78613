"""draws: the order of examples and the keys of noise are pure functions, and their values never change."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.draws import SAMPLINGS, check, evaluation_keys, halves, keys_from, normal, order
from samestep.errors import Invalid

properties = settings(max_examples=100, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**64 - 1)


def keys(seed: int, step: int, shards: int) -> list[int]:
    return next(keys_from(seed, step, shards))


# The order of examples


@properties
@given(seed=seeds, epoch=st.integers(0, 10_000), n=st.integers(0, 300))
def test_an_order_is_a_permutation(seed: int, epoch: int, n: int) -> None:
    drawn = order(seed, epoch, n)
    assert drawn.dtype == np.int64
    assert sorted(drawn.tolist()) == list(range(n))


@properties
@given(seed=seeds, epoch=st.integers(0, 10_000), n=st.integers(0, 300))
def test_with_replacement_stays_in_range(seed: int, epoch: int, n: int) -> None:
    drawn = order(seed, epoch, n, "with_replacement")
    assert drawn.dtype == np.int64
    assert drawn.shape == (n,)
    assert set(drawn.tolist()) <= set(range(n))


@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
def test_every_epoch_and_every_seed_has_an_order_of_its_own(sampling: str) -> None:
    drawn = {tuple(order(seed, epoch, 50, sampling).tolist()) for seed in range(20) for epoch in range(20)}
    assert len(drawn) == 400


@pytest.mark.parametrize(
    ("seed", "epoch", "sampling", "expected"),
    [
        (0, 0, "without_replacement", [5, 3, 7, 8, 2, 4, 1, 0, 6, 9]),
        (7, 3, "without_replacement", [5, 6, 1, 2, 4, 0, 9, 7, 8, 3]),
        (0, 0, "with_replacement", [8, 1, 3, 4, 7, 0, 2, 9, 7, 3]),
        (7, 3, "with_replacement", [2, 0, 2, 0, 3, 0, 4, 7, 2, 3]),
    ],
)
def test_the_order_never_changes(seed: int, epoch: int, sampling: str, expected: list[int]) -> None:
    assert order(seed, epoch, 10, sampling).tolist() == expected


def test_without_replacement_is_the_default() -> None:
    assert order(0, 0, 10).tolist() == order(0, 0, 10, "without_replacement").tolist()


def test_with_replacement_sees_about_63_percent_of_the_examples() -> None:
    assert len(set(order(0, 0, 10_000, "with_replacement").tolist())) == 6333  # 1 - 1/e = 0.632


def test_an_unknown_sampling_is_refused_with_the_choices() -> None:
    with pytest.raises(Invalid) as error:
        order(0, 0, 10, "bootstrap")
    assert (
        str(error.value) == "sampling must be one of without_replacement, with_replacement, in_order, got 'bootstrap'"
    )


# The keys of noise


def test_the_keys_never_change() -> None:
    assert keys(0, 0, 4) == [7511823885658883584, 4055339641634980115, 2764429336009658625, 5641236176109869208]
    assert keys(7, 3, 2) == [8484706117949205824, 2488803133783167671]
    assert evaluation_keys(0, 2) == [4382569712675524041, 4500283782566495603]


@properties
@given(seed=seeds, step=st.integers(0, 2**40), few=st.integers(1, 16), more=st.integers(0, 16))
def test_a_key_does_not_depend_on_the_number_of_shards(seed: int, step: int, few: int, more: int) -> None:
    assert keys(seed, step, few) == keys(seed, step, few + more)[:few]
    assert evaluation_keys(seed, few) == evaluation_keys(seed, few + more)[:few]


def test_every_seed_step_and_shard_has_a_key_of_its_own() -> None:
    grid = [key for seed in range(3) for step in range(200) for key in keys(seed, step, 16)]
    evaluation = [key for seed in range(3) for key in evaluation_keys(seed, 200)]
    assert len(set(grid)) == len(grid) == 9600
    assert len(set(evaluation)) == len(evaluation) == 600
    assert not set(grid) & set(evaluation)


def test_a_key_is_a_python_int_that_uses_all_of_63_bits() -> None:
    grid = [key for step in range(200) for key in keys(0, step, 16)] + evaluation_keys(0, 200)
    every, some = (1 << 63) - 1, 0
    for key in grid:
        assert type(key) is int
        assert 0 <= key < 1 << 63
        every, some = every & key, some | key
    assert (every, some) == (0, (1 << 63) - 1)  # no bit is always set, none never


def test_a_key_as_two_numbers_of_32_bits() -> None:
    assert halves(2**63 - 1).tolist() == [2**31 - 1, 2**32 - 1]
    assert halves(7 << 32 | 9, np.uint32).tolist() == [7, 9]
    assert (halves(0).dtype, halves(0, np.uint32).dtype) == (np.int64, np.uint32)


def raw(seed: int, purpose: int, index: int) -> np.random.Philox:
    return np.random.Philox(key=np.array([seed, purpose], np.uint64), counter=np.array([0, 0, index, 0], np.uint64))


def test_every_purpose_has_draws_of_its_own() -> None:
    """By a number, which never changes: 4 for the noise of an optimizer, 5 for the steps that are checked."""
    expected = np.random.Generator(raw(7, 4, 3)).standard_normal(5)
    assert normal(7, 3, 5, "float64").tolist() == expected.tolist()
    assert normal(7, 3, 5, "float32").tolist() == expected.astype(np.float32).tolist()
    for window in range(5):
        step, shard = raw(7, 5, window).random_raw(2).tolist()
        assert check(7, window, 10) == (step % 10, shard)


def test_draws_neither_read_nor_move_a_global_generator() -> None:
    def everything() -> list[list[int]]:
        return [*(order(1, 2, 30, sampling).tolist() for sampling in SAMPLINGS), keys(1, 2, 8), evaluation_keys(1, 8)]

    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        np.random.seed(1)
        random.seed(1)
        first = everything()
        after = np.random.random(), random.random()
        np.random.seed(1)
        random.seed(1)
        assert after == (np.random.random(), random.random())
        np.random.seed(2)
        random.seed(2)
        assert everything() == first
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


@pytest.mark.parametrize("shards", [1, 3, 4, 5, 8, 33])
@pytest.mark.parametrize(("seed", "step"), [(0, 0), (7, 1000), (2**64 - 1, 2**40)])
def test_keys_one_step_after_the_other_are_those_of_each_step(seed: int, step: int, shards: int) -> None:
    found = list(itertools.islice(keys_from(seed, step, shards), 5))
    counters = [np.array([0, 0, step + i, 0], np.uint64) for i in range(5)]
    fresh = [np.random.Philox(key=np.array([seed, 2], np.uint64), counter=c).random_raw(shards) for c in counters]
    assert found == [[int(key) >> 1 for key in np.atleast_1d(raw)] for raw in fresh]


def test_an_order_of_equal_draws_is_that_of_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick sort may not decide between equal draws: they keep the order of the examples."""
    drawn = np.random.default_rng(0).integers(1, 50, 1000).astype(np.uint64)
    drawn[500] = 0  # the least of them comes once
    monkeypatch.setattr("samestep.draws._philox", lambda *about: SimpleNamespace(random_raw=lambda count: drawn))
    assert order(0, 0, 1000).tolist() == sorted(range(1000), key=lambda i: (drawn[i], i))
    assert np.argsort(drawn).tolist() != order(0, 0, 1000).tolist()  # what it would be
