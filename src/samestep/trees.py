"""Examples as people have them: arrays in tuples, lists and dictionaries, nested. No framework is imported here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any

Tree = Any  # an array, or a tuple, list or dictionary of trees


def paths(tree: Tree, name: str = "") -> Iterator[tuple[str, Any]]:
    """The arrays of a tree, each with where it lies; and what holds none, as it is.

    >>> list(paths({"ids": 1, "pair": (2, 3)}, "x"))
    [("x['ids']", 1), ("x['pair'][0]", 2), ("x['pair'][1]", 3)]
    """
    if isinstance(tree, (Mapping, tuple, list)) and len(tree):
        for key, inner in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from paths(inner, f"{name}[{key!r}]")
    else:
        yield name, tree


def leaves(tree: Tree) -> list[Any]:
    """The arrays of a tree. Those of a dictionary come by its sorted keys: trees of one structure give them in one order."""
    if isinstance(tree, (Mapping, tuple, list)):
        inside = [tree[key] for key in sorted(tree, key=repr)] if isinstance(tree, Mapping) else tree
        return [leaf for inner in inside for leaf in leaves(inner)]
    return [tree]


def mapped(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """The tree of function(leaf, ...), with leaves from trees of one structure. Every kind of mapping becomes a dictionary.

    >>> mapped(lambda a, b: a + b, {"a": 1, "b": (2, 3)}, {"a": 10, "b": (20, 30)})
    {'a': 11, 'b': (22, 33)}
    """
    if isinstance(tree, Mapping):
        return {key: mapped(function, inner, *(other[key] for other in others)) for key, inner in tree.items()}
    if isinstance(tree, (tuple, list)):
        inside = [mapped(function, *inner) for inner in zip(tree, *others, strict=True)]
        return inside if isinstance(tree, list) else tuple(inside)
    return function(tree, *others)


def filled(tree: Tree, arrays: Iterable[Any]) -> Tree:
    """A tree of this structure with other arrays, which come in the order of `leaves`."""
    number = count()
    numbered = mapped(lambda _: next(number), tree)
    return mapped(dict(zip(leaves(numbered), arrays, strict=True)).__getitem__, numbered)


def first(tree: Tree) -> Any:
    """The first array of a tree."""
    return leaves(tree)[0]


def length(tree: Tree) -> int:
    """How many examples a tree has."""
    return len(first(tree))
