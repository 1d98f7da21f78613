"""noise: which way is taken when, whatever the framework; and who is let in to the one generator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from samestep.backends.noise import ALONE, APART, FREE, Access, Noise


class Told(Noise):
    """Says which ways it was asked to take, and whether it was alone. The generator moves on when `draw` is called."""

    def __init__(self, first: int = FREE, gives: bool = True) -> None:
        self.generator, self.drawn, self.ways = Access(), 0, list[str]()
        self.answer, self.gives = first, gives

    def draw(self) -> None:
        self.drawn += 1

    def took(self, way: str, forward: Callable[[], Any], backward: Callable[[Any], Any]) -> Any:
        self.ways.append(f"{way}{' taken' * self.generator.taken}")
        return backward(forward())

    def first(self, key: int, forward: Callable[[], Any], backward: Callable[[Any], Any]) -> tuple[int, Any]:
        result = self.took(f"first {key}", forward, backward)
        return self.answer, (result,) if self.gives else None

    def position(self) -> int:
        return self.drawn

    def is_at(self, position: int) -> bool:
        return position == self.drawn

    def apart(self, key: int, forward: Callable[[], Any], backward: Callable[[Any], Any]) -> Any:
        result = self.took(f"apart {key}", forward, backward)
        return (result,) if self.gives else None

    def alone(self, key: int, forward: Callable[[], Any], backward: Callable[[Any], Any]) -> Any:
        return self.took(f"alone {key}", forward, backward)


def compute(noise: Told, *keys: int) -> list[int]:
    return [noise.compute(key, lambda key=key: key, lambda gave: 10 * gave) for key in keys]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("first", "gives", "ways", "at_last"),
    [
        (FREE, True, ["first 1 taken"], FREE),
        (FREE, False, ["first 1 taken"], FREE),
        (APART, True, ["first 1 taken", "apart 2"], APART),
        (APART, False, ["first 1 taken", "apart 1", "alone 1 taken", "alone 2 taken"], ALONE),
        (ALONE, True, ["first 1 taken", "alone 2 taken"], ALONE),
        (ALONE, False, ["first 1 taken", "alone 1 taken", "alone 2 taken"], ALONE),
    ],
)
def test_the_way_is_the_one_that_the_first_shard_showed(first: int, gives: bool, ways: list[str], at_last: int) -> None:
    noise = Told(first, gives)
    assert noise.way is None
    assert compute(noise, 1, 2) == [10, 20]
    assert (noise.ways, noise.way) == (ways, at_last)
    assert noise.generator.taken is False


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("after", "ways"), [(APART, ["apart 2"]), (ALONE, ["alone 2 taken"])])
def test_a_model_that_draws_later_is_computed_again_in_the_next_way(
    after: int, ways: list[str], backward: bool
) -> None:
    noise, passes = Told(), [lambda *gave: None, lambda *gave: noise.draw()]
    noise.after_free = after
    compute(noise, 1)
    noise.compute(2, passes[not backward], passes[backward])
    assert (noise.ways[1:], noise.way) == (ways, after)
    assert Noise.after_free == ALONE


def test_a_shard_beside_one_that_draws_is_computed_again() -> None:
    """Its own backward pass draws nothing, but it cannot know who drew."""
    noise, inside, drawn = Told(), threading.Event(), threading.Event()
    compute(noise, 1)
    passes = []

    def backward(gave: int) -> int:
        passes.append(gave)
        if len(passes) == 1:
            inside.set()
            assert drawn.wait(60)
        return 10 * gave

    def draws() -> None:
        assert inside.wait(60)
        noise.draw()
        drawn.set()

    other = threading.Thread(target=draws)
    other.start()
    assert noise.compute(2, lambda: 2, backward) == 20
    other.join()
    assert (passes, noise.ways[1:]) == ([2, 2], ["alone 2 taken"])


class Task:
    """A task that ends when somebody has asked whether it has."""

    def __init__(self) -> None:
        self.answers = list[bool]()

    def add_done_callback(self, tell: Callable[[Any], None]) -> None:
        self.tell = tell

    def done(self) -> bool:
        if not self.answers:
            threading.Thread(target=self.tell, args=[self]).start()  # it waits until the one who asks sleeps
        self.answers.append(bool(self.answers))
        return self.answers[-1]


def test_whoever_waits_inside_waits_until_the_task_is_done() -> None:
    access = Access()
    assert access.taken is False
    for _ in range(2):
        task: Any = Task()
        with access.shared():
            access.wait(task)
        assert task.answers == [False, True]
        with access.alone():
            assert access.taken is True
        assert access.taken is False


def test_those_who_ask_to_be_alone_are_counted() -> None:
    access: Any = Access()
    access._asking = 5  # others
    with access.alone():
        assert access._asking == 5
    task: Any = Task()
    task.tell = lambda task: None
    access.wait(task)  # for nobody, as they could not come in
    assert task.answers == [False]
