"""by_id, replacing, lanes: functions as keys, attributes replaced for a while, and a lane for each thread."""

from __future__ import annotations

import inspect
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from samestep.backends.by_id import ById
from samestep.backends.lanes import Lanes
from samestep.backends.replacing import noted, replaced


class Equal:
    """Equal to all others of its class, and without a hash."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    def __call__(self, x: int, *, by: int = 2) -> int:
        return x * by


def test_a_function_that_cannot_be_hashed_is_equal_only_to_itself() -> None:
    one, other = Equal(), Equal()
    wrapped = ById.wrap(one)
    assert isinstance(wrapped, ById)
    assert (wrapped(3), wrapped(3, by=5)) == (6, 15)
    assert list(inspect.signature(wrapped).parameters) == ["x", "by"]
    assert {wrapped: "found"}[ById.wrap(one)] == "found"
    assert wrapped != ById.wrap(other)
    assert wrapped != SimpleNamespace(function=one)
    assert wrapped != 3
    assert ById.wrap(len) is len


def test_attributes_are_replaced_for_a_while() -> None:
    home = SimpleNamespace(first=1, second=2)
    with pytest.raises(OSError), replaced([(home, "first", 10), (home, "second", 20)]):
        assert (home.first, home.second) == (10, 20)
        raise OSError
    assert (home.first, home.second) == (1, 2)


def test_functions_that_are_called_are_noted() -> None:
    home = SimpleNamespace(add=lambda a, b=1: a + b, other=len)
    with noted([(home, "add"), (home, "other")]) as called:
        assert (home.add(2), home.add(2, b=5)) == (3, 7)
    assert home.add(1) == 2
    assert (called, home.other) == (["add", "add"], len)


def test_every_thread_has_a_lane_of_its_own() -> None:
    modes = list[bool]()
    lanes: Lanes[Any] = Lanes(lambda: SimpleNamespace(train=modes.append))
    found = [lanes(True), lanes(False)]
    thread = threading.Thread(target=lambda: found.append(lanes(True)))
    thread.start()
    thread.join()
    assert (found[0] is found[1], found[0] is found[2], modes) == (True, False, [True, False, True])
    lanes.clear()
    assert lanes(True) is not found[0]
