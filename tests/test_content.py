"""content.py: equal code and content give equal hashes, in any process; anything that can change a bit gives others."""

from __future__ import annotations

import argparse
import functools
import logging
import math
import os
import pathlib
import re
import subprocess
import sys
import threading
import types
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import pytest

from samestep import content
from samestep.content import MOST, Content, Model, divided

FACTOR = 2.0
SETTINGS = argparse.Namespace(smooth=0.1, epochs=3)


def parts(thing: Any) -> dict[str, str]:
    found = Content()
    found.add("it", thing)
    assert found.unchecked == []
    assert {len(digest) for digest in found.parts.values()} == {16}
    return found.parts


def changed(one: Any, other: Any) -> set[str]:
    a, b = parts(one), parts(other)
    return {name for name in {**a, **b} if a.get(name) != b.get(name)}


@dataclass
class Point:
    x: float = 0.0
    more: list[int] = field(default_factory=list)


class Slots:
    __slots__ = ("a",)

    def __init__(self, a: int) -> None:
        self.a = a


Pair = namedtuple("Pair", "a b")
Colour = Enum("Colour", "RED BLUE")


def made(value: Any) -> Any:
    return lambda x: x * value


def loops() -> list[Any]:
    found: list[Any] = [1]
    found.append(found)
    return found


def code(text: str, **space: Any) -> Any:
    space = {"__name__": "mine", **space}
    exec(text, space)
    return space["f"]


def with_attributes(**values: Any) -> Any:
    function = code("def f(x): return x")
    vars(function).update(values)
    return function


def holds_itself() -> Any:
    space = types.SimpleNamespace()
    space.inner = space
    return space


ALIKE = {
    "numbers": lambda: [1, 1.5, True, None, "a", b"b", 2j, ...],
    "array": lambda: np.arange(6).reshape(2, 3).T,
    "set": lambda: {"a", "b", "c", 1, (2, 3)},
    "object": lambda: Point(1.0, [2]),
    "slots": lambda: Slots(3),
    "named tuple": lambda: Pair(1, [2]),
    "enum": lambda: Colour.RED,
    "lambda": lambda: made([1]),
    "partial": lambda: functools.partial(made, 3),
    "method": lambda: Point(1.0).__eq__,
    "library": lambda: [
        np.tanh,
        np.linalg.norm,
        len,
        "".join,
        re.compile("a"),
        pathlib.Path("a"),
        logging.getLogger("a"),
    ],
    "class": lambda: [Point, Slots, Colour],
    "generator": lambda: np.random.default_rng(3),
    "loop": loops,
    "ordered": lambda: OrderedDict(a=1),
    "code": lambda: code("def f(x):\n    return x + 1"),
    "a text in a function": lambda: code(f"def f(x):\n    'text {os.urandom(4).hex()}'\n    return x + 1"),
    "an attribute that has the name of a global": lambda: f_of("return x.lock", lock=threading.Lock()),
    "and of one of a function inside": lambda: f_of("return lambda: x.lock", lock=threading.Lock()),
    "what a function is around": lambda: with_attributes(__wrapped__=os.urandom(4)),
    "what every module has": lambda: f_of("return __name__", __name__=os.urandom(4).hex()),
    "a variable that is not there yet": lambda: code(
        "def g():\n def f(): return k\n if not 1: k = 1\n return f\nf = g()"
    ),
    "a namespace that holds itself": lambda: f_of("return s.inner", s=holds_itself()),
    "array of objects": lambda: np.array([[1], "a"], object),
    "method of an array": lambda: np.ones(3).sum,
    "lines": lambda: code("\n" * ord(os.urandom(1)) + "def f(x): return x"),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_alike_has_the_same_parts(name: str) -> None:
    assert changed(ALIKE[name](), ALIKE[name]()) == set()


DIFFERENT = {
    "type of a number": (1, 1.0), "sign of zero": (0.0, -0.0), "text": ("a", b"a"), "order": ([1, 2], [2, 1]),
    "list or tuple": ([1], (1,)), "keys": ({"a": 1}, {"b": 1}), "array": (np.arange(3), np.array([0, 1, 3])),
    "type of an array": (np.arange(3), np.arange(3.0)), "shape": (np.zeros((2, 3)), np.zeros((3, 2))),
    "attribute": (Point(1.0), Point(2.0)), "inside": (Point(1.0, [1]), Point(1.0, [2])), "slot": (Slots(1), Slots(2)),
    "member": (Colour.RED, Colour.BLUE), "arguments": (functools.partial(made, 1), functools.partial(made, 2)),
    "function of a library": (np.tanh, np.sin), "pattern": (re.compile("a"), re.compile("b")),
    "state": (np.random.default_rng(1), np.random.default_rng(2)), "set": ({1, 2}, {1, 3}),
    "items of a mapping": (OrderedDict(a=1), OrderedDict(a=2)), "library": (math.sin, np.sin),
    "array of objects": (np.array([[1], "a"], object), np.array([[2], "a"], object)),
    "method of an array": (np.ones(3).sum, np.zeros(3).sum),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_is_different_has_another_hash(name: str) -> None:
    assert "it" in changed(*DIFFERENT[name])


def f_of(body: str, **space: Any) -> Any:
    return code(f"def f(x, *, y=1):\n    {body}", **space)


FUNCTIONS = {
    "an operation": (f_of("return x + 1"), f_of("return x - 1")),
    "a constant": (f_of("return x + 1"), f_of("return x + 2")),
    "a name": (f_of("return abs(x)"), f_of("return len(x)")),
    "a function inside": (f_of("return lambda: x + 1"), f_of("return lambda: x + 2")),
    "a constant after a text": [code(f"def f(x):\n 'text'\n return x + {number}") for number in (1000.5, 2000.5)],
    "an attribute": (with_attributes(a=1), with_attributes(a=2)),
    "an attribute with a capital": (with_attributes(A=1), with_attributes(A=2)),
    "a global with underscores before": (f_of("return x * __k", __k=1), f_of("return x * __k", __k=2)),
    "a global with underscores after": (f_of("return x * k__", k__=1), f_of("return x * k__", k__=2)),
    "a default": (code("def f(x=1): return x"), code("def f(x=2): return x")),
    "a global": (f_of("return x * k", k=1), f_of("return x * k", k=2)),
    "a function it calls": [f_of("return g(x)", g=code(f"def f(x): return {body}")) for body in ("x", "-x")],
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_code_is_known(name: str) -> None:
    names = changed(*FUNCTIONS[name])
    assert names in ({"f()"}, {"f() 2"})  # only what was changed, not whoever calls it


def test_what_a_function_closes_over_and_of_namespaces_only_what_it_uses() -> None:
    assert changed(made(1), made(2)) == {"<lambda>()"}
    one, other, more = (argparse.Namespace(smooth=s, epochs=e) for s, e in ((0.1, 3), (0.2, 3), (0.1, 9)))
    assert changed(f_of("return x * s.smooth", s=one), f_of("return x * s.smooth", s=other)) == {"f()"}
    assert changed(f_of("return x * s.smooth", s=one), f_of("return x * s.smooth", s=more)) == set()
    inner = "return lambda: x * s.smooth"
    assert changed(f_of(inner, s=one), f_of(inner, s=other)) == {"f()"}
    assert changed(f_of(inner, s=one), f_of(inner, s=more)) == set()
    arrays = [types.SimpleNamespace(smooth=np.full(3, value)) for value in (1, 2)]
    assert changed(*(f_of("return x * s.smooth", s=s) for s in arrays)) == {"f()"}
    helpers = [types.ModuleType("helpers") for _ in range(3)]
    for module, value, unused in zip(helpers, (1, 2, 1), (1, 1, 2), strict=True):
        module.used, module.unused = value, unused  # type: ignore[attr-defined]
    assert changed(f_of("return m.used", m=helpers[0]), f_of("return m.used", m=helpers[1])) == {"f()"}
    assert changed(f_of("return m.used", m=helpers[0]), f_of("return m.used", m=helpers[2])) == set()


def test_classes_are_known_by_their_methods_and_bases() -> None:
    def kinds(body: str, base: type = object) -> Any:
        return type("K", (base,), {"f": code(body), "__module__": "mine"})()

    assert changed(kinds("def f(self): return 1"), kinds("def f(self): return 2")) == {"f()"}
    one, other = type(kinds("def f(self): return 1")), type(kinds("def f(self): return 2"))
    assert {"f()"} == changed(kinds("def f(self): return 3", one), kinds("def f(self): return 3", other))
    assert changed(kinds("def f(self): return 1"), kinds("def f(self): return 1")) == set()


def test_a_closure_of_a_library_is_known_by_what_it_holds() -> None:
    one, other = (functools.lru_cache(maxsize)(len) for maxsize in (1, 2))
    assert changed(one, one) == set()
    del other
    first, second = (np.vectorize(np.tanh, otypes=[kind]) for kind in ("f", "d"))
    assert "it" in changed(first, second)


@pytest.mark.parametrize("thing", [threading.Lock(), (i for i in range(3)), sys.__stdout__, threading.local()])
def test_what_cannot_be_looked_into_is_listed(thing: Any) -> None:
    found = Content()
    found.add("it", {"inside": thing})
    assert len(found.unchecked) == 1
    assert found.unchecked[0].startswith("it: ")


def test_deep_and_many() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    found = Content()
    found.add("deep", deep)  # no error
    assert found.unchecked

    class Layer:
        def __init__(self, below: dict[str, Any], rate: float = 0.0) -> None:
            self.below, self.rate = below, rate

    def known(thing: Any, weights: bool) -> Any:
        return Model(Layer, thing.rate, thing.below) if isinstance(thing, Layer) else None

    def told(rate: float, many: int) -> dict[str, str]:
        found = Content(known)
        found.add("model", Layer({f"l{i}": Layer({"drop": Layer({}, rate if i == 7 else 0.0)}) for i in range(many)}))
        return found.told()

    a, b = told(0.1, 20), told(0.2, 20)
    assert {name for name in a if a[name] != b[name]} == {"model.l7.drop"}
    a, b = told(0.1, MOST), told(0.2, MOST)
    assert len(a) < 10
    assert {name for name in a if a[name] != b[name]} == {"layers"}


def test_a_thousand_parts_are_told_one_by_one() -> None:
    """Of more, all that are parts of another one together."""
    found = Content()
    found.parts = {"m": "0", "f()": "1", "n.x": "2"} | {f"m.{i}": "3" for i in range(997)}
    assert found.told() == found.parts
    found.parts["m.997"] = "3"
    told = found.told()
    assert told == {"m": "0", "f()": "1", "n.x": "2", "layers": told["layers"]}
    found.parts["m.997"] = "4"
    assert found.told()["layers"] != told["layers"]
    assert len(told["layers"]) == 16


def test_of_a_large_array_a_thousand_rows_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    assert content.WHOLE == 268_435_456  # bytes
    monkeypatch.setattr(content, "WHOLE", 16_384)
    for rows, step in ((2048, 2), (2049, 3)):
        one = np.zeros((rows, 2))
        seen = []
        for row in range(7):
            other = one.copy()
            other[row, 1] = 1
            seen.append(changed(one, other) == {"it"})
        assert seen == [row % step == 0 for row in range(7)]
    one, other = np.zeros(2048), np.zeros(2048)  # which is not too large
    other[1] = 1
    assert changed(one, other) == {"it"}


def test_hashes_never_change() -> None:
    """Another version of samestep would else refuse to go on with a run."""
    things = {
        "plain": [1, 1.5, True, None, "a", b"b"], "nested": {"a": (1, {2})}, "array": np.arange(3, dtype="<i4"),
        "ordered": OrderedDict(a=1), "function": math.sin,
    }  # fmt: skip
    assert {name: parts(thing)["it"] for name, thing in things.items()} == {
        "plain": "4cd9c407ae04a27e", "nested": "9437171ba800d099", "array": "425ca36d72860d2e", "ordered": "eae4847b0f33f3f8",
        "function": "91d4f9e37303b48f",
    }  # fmt: skip


def test_the_values_of_weights_count_unless_it_is_said() -> None:
    asked: list[bool] = []
    found = Content(lambda thing, weights: asked.append(weights))
    found.add("one", [])
    found.add("other", (), weights=False)
    assert asked == [True, False]


def test_a_package_is_known_by_its_version() -> None:
    assert (content._version("numpy.linalg"), content._version("json.decoder")) == (np.__version__, "")
    assert content._version("of_nobody") == ""
    assert content._is_installed("numpy.of_a_name_that_is_not_there_any_more")
    assert not content._is_installed("of_nobody")
    assert not content._is_installed(None)


def test_the_same_in_another_process() -> None:
    """Sets of texts come in another order there."""
    code = "import test_content as t; print({name: t.parts(make()) for name, make in t.ALIKE.items()})"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(seen) == 1


class Layers(list[Any]):
    """A layer that is a list itself."""


def test_layers_in_lists_and_dictionaries_have_names_of_their_own() -> None:
    one, two, whole = Layers("a"), Layers("b"), Layers([Layers("c")])
    given = {"plain": one, "blocks": [one, 3], "by": {"x": two}, "whole": whole, "sizes": (1, 2), "n": 7}
    state, layers = divided(given, Layers)
    assert layers == {"plain": one, "blocks.0": one, "by.x": two, "whole": whole}
    assert [layers[name] is given[name] for name in ("plain", "whole")] == [True, True]
    assert state["blocks"] == [list, {"blocks.1": 3}]
    assert state["by"] == [dict, {}]
    assert (state["sizes"], state["n"]) == ((1, 2), 7)


def test_a_layer_is_told_by_its_attributes() -> None:
    """Hooks without the numbers under which they are kept, other dictionaries as they are."""
    layer = types.SimpleNamespace(forward_hooks={7: len}, sizes={1: 2}, hooks_seen=3, secret=4)
    state = {"forward_hooks": [len], "sizes": {1: 2}, "hooks_seen": 3}
    assert Model.of(layer, {"secret"}, [5], {"a": 6}) == Model(types.SimpleNamespace, [state, [5]], {"a": 6})


def test_methods_in_c_are_told_by_their_class() -> None:
    assert changed(str.join, bytes.join) == {"it"}
    assert changed(str.join, str.join) == set()
    assert changed("a".join, "b".join) == {"it"}  # and bound ones by what they belong to
