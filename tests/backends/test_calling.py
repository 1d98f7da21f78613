"""calling: how a model takes its examples, from its signature."""

from __future__ import annotations

from typing import Any

import pytest

from samestep.backends.calling import spread, style_of
from samestep.errors import Invalid

PAIR, BATCH = (1, 2), {"ids": 1, "labels": 2}


@pytest.mark.parametrize(
    ("model", "x", "whole", "style"),
    [
        (lambda x: 0, 5, False, False),
        (lambda a, b=0: 0, 5, True, False),
        # Dictionaries: by name if the model has all names, or takes any
        (lambda labels, ids: 0, BATCH, False, ("ids", "labels")),
        (lambda *, ids, labels=0: 0, BATCH, False, ("ids", "labels")),
        (lambda **named: 0, BATCH, False, ("ids", "labels")),
        (lambda **named: 0, BATCH, True, ("ids", "labels")),
        # or as they are, to a model of one input
        (lambda x: 0, BATCH, False, False),
        (lambda x=None: 0, BATCH, False, False),
        (lambda x, training=False: 0, BATCH, False, False),
        (lambda ids, /: 0, BATCH, False, False),
        # A whole batch: what the model has names for
        (lambda ids: 0, BATCH, True, ("ids",)),
        (lambda ids, mask=None: 0, BATCH, True, ("ids",)),
        (lambda mask=0, *, labels: 0, BATCH, True, ("labels",)),
        (lambda x: 0, BATCH, True, False),
        # Tuples and lists: by place if there are as many places
        (lambda a, b: 0, PAIR, False, True),
        (lambda a, b: 0, list(PAIR), False, True),
        (lambda a, b, c=0: 0, PAIR, False, True),
        (lambda a, b, /: 0, PAIR, False, True),
        (lambda *all: 0, PAIR, False, True),
        (lambda a, *more: 0, PAIR, False, True),
        (lambda a, b=0: 0, PAIR, False, True),
        # or as they are
        (lambda x: 0, PAIR, False, False),
        (lambda x=0: 0, PAIR, False, False),
        (lambda x, train=False: 0, PAIR, False, False),
        (lambda x, deterministic=True, use_running_average=None: 0, PAIR, False, False),
        (lambda query, key=None: 0, {"query": 1, "key": 2}, True, ("query", "key")),
        (lambda query, key, value: 0, (1, 2, 3), False, True),
        (lambda x, *, b=0: 0, PAIR, False, False),
        # What has no signature gets all that there is
        (type, BATCH, False, ("ids", "labels")),
        (type, PAIR, False, True),
    ],
)
def test_the_signature_decides(model: Any, x: Any, whole: bool, style: Any) -> None:
    assert style_of(model, x, whole) == style
    if model is not type:
        given, named = spread(x, style)
        model(*given, **named)  # it does take them so


def test_options_are_not_for_examples() -> None:
    def model(x: Any, key: Any = None) -> None: ...

    assert style_of(model, PAIR, False) is True
    assert style_of(model, PAIR, False, options={"key"}) is False
    with pytest.raises(Invalid) as error:
        style_of(model, {"x": 1, "key": 2}, True, options={"key"})
    told = "the model's argument 'key' is not for examples, and they have one of that name: rename it"
    assert str(error.value) == told
    assert style_of(model, {"x": 1}, True, options={"key"}) == ("x",)


def test_the_first_arguments_may_be_weights() -> None:
    assert style_of(lambda params, state, a, b: 0, PAIR, False, skip=2) is True
    assert style_of(lambda params, x: 0, PAIR, False, skip=1) is False
    assert style_of(lambda ids, labels, x: 0, BATCH, True, skip=2) is False


@pytest.mark.parametrize(
    ("model", "x", "message"),
    [
        (lambda x, mask=None: 0, BATCH, "the model does not take ids, labels: it takes mask, x"),
        (lambda b, a: 0, BATCH, "the model does not take ids, labels: it takes a, b"),
        (lambda ids, mask: 0, BATCH, "the model does not take labels: it takes ids, mask"),
        (lambda a=0, b=0: 0, {"a": 1, 3: 2}, "the model does not take 3: it takes a, b"),
        (lambda a, b: 0, {"a": 1}, "the model needs b, got a"),
        (lambda a, *, b, c, d=0: 0, {"a": 1}, "the model needs b, c, got a"),
        (lambda a, **named: 0, BATCH, "the model needs a, got ids, labels"),
        (lambda labels, ids, /: 0, {"labels": 1}, "the model does not take labels: it takes "),
        (lambda a, b: 0, (1, 2, 3), "the model takes 2 inputs (a, b), got 3"),
        (lambda a, b, c, train: 0, PAIR, "the model takes 3 inputs (a, b, c), got 2"),
        (lambda: 0, PAIR, "the model takes 0 inputs (), got 2"),
        (lambda a, b, *more: 0, (1,), "the model takes 2 inputs (a, b), got 1"),
    ],
)
def test_what_a_model_cannot_take(model: Any, x: Any, message: str) -> None:
    with pytest.raises(Invalid) as error:
        style_of(model, x, False)
    assert str(error.value) == message


def test_a_whole_batch_without_what_the_model_needs() -> None:
    with pytest.raises(Invalid, match="^the model needs mask, got ids, labels$"):
        style_of(lambda ids, mask: 0, BATCH, True)


def test_how_arguments_are_spread() -> None:
    assert spread(BATCH, ("labels",)) == ([], {"labels": 2})
    assert spread(PAIR, True) == spread(list(PAIR), True) == ([1, 2], {})
    assert spread(PAIR, False) == ([PAIR], {})
    assert spread(BATCH, False) == ([BATCH], {})
