"""noise of PyTorch: which way a model's draws take, and that all ways give the same numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from samestep.backends.noise import ALONE, APART, FREE, Access
from samestep.backends.torch.noise import DrawnElsewhere, OwnGenerator, TorchNoise, with_generator

DRAWS: dict[str, tuple[Callable[[], Any], int]] = {
    "nothing": (lambda: torch.ones(3), FREE),
    "rand": (lambda: torch.rand(3), APART),
    "dropout": (lambda: torch.nn.functional.dropout(torch.ones(50)), APART),
    "normal_": (lambda: torch.empty(3).normal_(), APART),
    "one without a generator": (lambda: torch.native_dropout(torch.ones(50), 0.5, True)[0], ALONE),
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_way_of_a_model_is_found_by_its_first_shard(name: str) -> None:
    draw, way = DRAWS[name]
    noise, alone = TorchNoise(), TorchNoise()
    alone.way = ALONE
    results = [noise.compute(key, draw, lambda result: result) for key in (7, 8, 7)]
    assert noise.way == way
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[0], results[1]) == (way == FREE)
    for key, result in zip((7, 8, 7), results, strict=True):
        assert torch.equal(result, alone.compute(key, draw, lambda one: one))


def test_what_is_drawn_backwards_is_drawn_alone() -> None:
    noise = TorchNoise()
    noise.compute(7, lambda: torch.ones(3), lambda result: result * torch.rand(3))
    assert noise.way == ALONE


def test_a_model_that_draws_later_takes_the_next_way() -> None:
    noise = TorchNoise()
    noise.compute(7, lambda: torch.ones(3), lambda result: result)
    assert noise.way == FREE
    first = noise.compute(7, lambda: torch.rand(3), lambda result: result)
    assert noise.way == APART
    assert torch.equal(first, noise.compute(7, lambda: torch.rand(3), lambda result: result))


def test_an_operation_and_the_one_that_takes_a_generator() -> None:
    with OwnGenerator(3) as mode:
        found = torch.rand(4)
        own = torch.rand(4, generator=torch.Generator().manual_seed(5))
    assert mode.drawn
    assert torch.equal(found, torch.rand(4, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(own, torch.rand(4, generator=torch.Generator().manual_seed(5)))  # the user's own is left alone
    assert with_generator(torch.ops.aten.add.Tensor) is None
    mode = OwnGenerator(3)
    mode.forward = False
    with pytest.raises(DrawnElsewhere), mode:
        torch.rand(4)


def test_whoever_waits_inside_lets_in_one_that_asks_to_be_alone() -> None:
    """Else the two would wait for each other."""
    access, inside, never = Access(), threading.Event(), Future[Any]()
    left = list[str]()

    def wait() -> None:
        with access.shared():
            inside.set()
            access.wait(never)
            left.append("inside")

    def alone() -> None:
        with access.alone():
            left.append(f"taken: {access.taken}")

    threads = [threading.Thread(target=wait, daemon=True), threading.Thread(target=alone, daemon=True)]
    threads[0].start()
    assert inside.wait(60)
    threads[1].start()
    threads[1].join(60)
    assert left == ["inside", "taken: True"]
    assert not access.taken
    done = Future[Any]()
    done.set_result(1)
    access.wait(done)  # there is nothing to wait for
