"""pair: what a function with its parameters is given; it needs no JAX."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from samestep.backends.pair import Pair, call, told
from samestep.errors import Invalid, WrongType


def test_a_pair_is_called_as_in_evaluation() -> None:
    assert Pair(lambda w, x: (w, x), 2)(3) == (2, 3)
    assert Pair(lambda w, s, x, train, key: ((w, s, x, train, key), "new"), 2, 0)(3) == (2, 0, 3, False, None)
    assert Pair.__module__ == "samestep.models.jax"


def test_a_pair_is_itself_and_stays_as_it_is() -> None:
    def apply(w: Any, x: Any) -> Any:
        return x

    assert Pair(apply, 1) != Pair(apply, 1)
    assert len({Pair(apply, [1]), Pair(apply, [1])}) == 2
    assert Pair(apply, 1).state is None
    with pytest.raises(FrozenInstanceError):
        Pair(apply, 1).params = 2  # type: ignore[misc]


def test_what_is_no_pair() -> None:
    Pair(lambda w, x: x, lambda key, x: 1)
    Pair(lambda w, s, x: (x, s), 1, 0)
    with pytest.raises(WrongType, match=r"^Pair: apply must be a function of \(params, x\), got 3$"):
        Pair(3, 1)  # type: ignore[arg-type]
    with pytest.raises(Invalid, match=r"^Pair: init\(key, x\) makes parameters only: with a state, call it and pass"):
        Pair(lambda w, s, x: (x, s), lambda key, x: 1, 0)


@pytest.mark.parametrize("train", [True, False])
def test_a_function_is_given_what_it_names(train: bool) -> None:
    key = "key" if train else None
    assert call(lambda w, x, key: (w, x, key), 1, None, ([2], {}), "key", train) == ((1, 2, key), None)
    assert call(lambda w, x, train: (w, x, train), 1, None, ([], {"x": 2}), "key", train) == ((1, 2, train), None)
    assert call(lambda w, s, x, y: ((w, x, y), s + 1), 1, 5, ([2, 3], {}), "key", train) == ((1, 2, 3), 6)


@pytest.mark.parametrize("train", [True, False])
def test_there_are_several_words_for_training(train: bool) -> None:
    def module(
        x: Any, train: Any, training: Any, is_training: Any, deterministic: Any, use_running_average: Any
    ) -> None:
        raise AssertionError

    words = {"train": train, "training": train, "is_training": train}
    assert told(module, train) == {**words, "deterministic": not train, "use_running_average": not train}
    assert told(lambda x: x, train) == {}
