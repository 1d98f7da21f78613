"""recipe: what tells one recipe from another, in words of bearable length; and the file that holds one."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from samestep.runs.recipe import differences, in_words, read_recipe, recipe_text, shown


def test_the_file_of_a_recipe() -> None:
    text, digest = recipe_text({"seed": 0}), hashlib.sha256(b'{"seed": 0}').hexdigest()
    assert text.decode() == f'{{\n  "seed": 0,\n  "sha256": "{digest}"\n}}\n'
    assert read_recipe(text) == {"seed": 0}
    for other in ("0" * 64, "f" * 64):
        with pytest.raises(ValueError, match="^it was changed after it was written$"):
            read_recipe(text.replace(digest.encode(), other.encode()))
    with pytest.raises(ValueError, match="^it is not a recipe$"):
        read_recipe(b"[]")


def test_values_that_are_equal_and_not_the_same_are_told() -> None:
    assert differences({"batch_size": 1, "seed": 0}, {"batch_size": 1.0, "seed": False}) == {
        "batch_size": "batch_size is 1, was 1.0",
        "seed": "seed is 0, was False",
    }


def test_the_order_of_parameters_and_what_comes_besides_do_not_matter() -> None:
    one: dict[str, Any] = {"a": 1, "parameters": {"v": [2], "w": [3]}, "seed": 0}
    assert differences(one | {"seed": 1}, one | {"parameters": {"w": [3], "v": [2]}}, ["a"]) == {
        "seed": "seed is 1, was 0"
    }
    told = "parameters is {'v': [2], 'w': [3]}, in B {'w': [3], 'v': [4]}"
    assert differences(one, one | {"parameters": {"w": [3], "v": [4]}, "a": 2}, ["a"], "in B") == {"parameters": told}
    told = "parameters is {'v': [2], 'w': [3]}, was {'v': [1], 'w': [3]}"
    assert differences(one, one | {"parameters": {"v": [1], "w": [3]}}) == {"parameters": told}


def test_what_is_inside_is_told_by_itself_unless_one_has_nothing_there() -> None:
    inner, verb = {"examples": 9, "x": [9]}, "in B"
    for name in ("above", "test"):  # before and after "code" and "parameters"
        found = differences({name: inner}, {name: inner | {"examples": 8}}, (), verb)
        assert found == {f"{name}.examples": f"{name}.examples is 9, in B 8"}
        assert differences({name: inner}, {name: None}) == {name: f"{name} is {inner}, was None"}
        assert differences({name: None}, {name: inner}) == {name: f"{name} is None, was {inner}"}
        assert differences({}, {name: inner}) == {name: f"{name} is None, was {inner}"}


def test_other_code_is_told_by_its_names_unless_more_is_known() -> None:
    ours, theirs = {"a()": "1", "b()": "2", "c()": "3"}, {"a()": "2", "b()": "1", "c()": "3"}
    code = {f"code.{name}": f"{name} has other code or content" for name in ("a()", "b()")}
    assert differences({"code": ours}, {"code": theirs}) == code
    seed = {"seed": "seed is 1, was 0"}
    assert differences({"seed": 1, "code": ours}, {"seed": 0, "code": theirs}) == seed | code
    loss = {"loss": "loss is 'one', was 'other'"}
    assert differences({"loss": "one", "code": ours}, {"loss": "other", "code": theirs}) == loss
    assert (
        differences({"loss": "one", "seed": 1, "code": ours}, {"loss": "other", "seed": 0, "code": theirs})
        == loss | seed
    )


@pytest.mark.parametrize(("count", "more"), [(5, ""), (6, ""), (7, "; and 1 more"), (13, "; and 7 more")])
def test_six_differences_are_told_and_the_others_counted(count: int, more: str) -> None:
    found = {f"{i}": f"{i} is 0, was 1" for i in range(count)}
    assert in_words(found) == "; ".join(list(found.values())[:6]) + more


@pytest.mark.parametrize(
    ("alike", "rest", "found"),
    [(38, 40, "_" * 38 + "a" * 39 + "..."), (39, 39, "..." + "_" * 19 + "a" * 40), (39, 38, "_" * 39 + "a" * 38),
     (39, 99, "..." + "_" * 19 + "a" * 58 + "...")],
)  # fmt: skip
def test_long_texts_are_shown_from_where_they_differ(alike: int, rest: int, found: str) -> None:
    """From a fourth of the width before it, if that is beyond the middle and the text does not fit."""
    rest += found.startswith("...")
    assert shown("_" * alike + "a" * rest, "_" * alike + "b" * rest)[0] == found


def test_of_two_texts_only_the_one_that_does_not_fit_is_shortened() -> None:
    assert shown("ab", "ac", width=1) == ("...b", "...c")
    assert shown("a  b\nc", "a b c" + "d" * 80) == ("a b c", "a b c" + "d" * 72 + "...")
