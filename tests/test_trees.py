"""trees: arrays in tuples, lists and dictionaries."""

from __future__ import annotations

from collections import OrderedDict, UserDict

import numpy as np
import pytest

from samestep import trees

TREE = {"b": [1, (2,)], "a": {"c": 3}, "none": ()}


def test_the_arrays_of_a_tree_come_by_sorted_keys_and_their_places_in_its_own_order() -> None:
    other = {key: TREE[key] for key in reversed(TREE)}
    assert trees.leaves(TREE) == trees.leaves(other) == [3, 1, 2]
    places = [("x['b'][0]", 1), ("x['b'][1][0]", 2), ("x['a']['c']", 3), ("x['none']", ())]
    assert list(trees.paths(TREE, "x")) == places
    assert trees.first(TREE) == 3
    assert (trees.leaves(5), list(trees.paths(5)), trees.first(5)) == ([5], [("", 5)], 5)
    assert trees.length(({"a": np.zeros((7, 2))}, np.zeros(3))) == 7


def test_a_tree_keeps_its_structure_and_every_mapping_becomes_a_dictionary() -> None:
    assert trees.mapped(lambda leaf: -leaf, TREE) == {"b": [-1, (-2,)], "a": {"c": -3}, "none": ()}
    filled = trees.filled(TREE, "xyz")
    assert filled == {"b": ["y", ("z",)], "a": {"c": "x"}, "none": ()}
    assert (list(filled), trees.leaves(filled)) == (["b", "a", "none"], ["x", "y", "z"])
    for other in (UserDict(a=1), OrderedDict(a=1)):
        assert type(trees.mapped(abs, other)) is dict
        assert trees.leaves(other) == [1]
    assert trees.mapped(max, {"a": 1, "b": [4]}, {"b": [3], "a": 2}) == {"a": 2, "b": [4]}  # by name
    with pytest.raises(ValueError, match="zip"):
        trees.mapped(max, [1, 2], [1])
    with pytest.raises(KeyError):
        trees.mapped(max, {"a": 1}, {"b": 1})
