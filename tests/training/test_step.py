"""step: what is sent to the other processes, and what is not once a shard has failed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from samestep.training.replicas import Plan
from samestep.training.step import Step, StepAcross

DEADLINE = 60.0  # seconds after which a condition that does not come is a failure
BANDS = [(4, 6), (2, 4), (0, 2)]  # as they are computed: the last layer's first


class Across:
    """Stands for the other processes: adds nothing, and notes which bands it was given, with which shards."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, list[Any]]] = []
        self.first = threading.Event()

    def sum(self, parts: Any, held: Any, n: int, lo: int, hi: int) -> str:
        self.sent.append((lo, sorted(parts)))
        self.first.set()
        return "the total"

    def put(self, total: str, device: str) -> tuple[str, str]:
        return total, device


class Watched(ThreadPoolExecutor):
    """The thread that sends, and what it was asked for."""

    def submit(self, *given: Any) -> Any:
        self.asked = super().submit(*given)
        return self.asked


def group_of(shares: Sequence[range], map_: Callable[[Any], Any]) -> Any:
    """A group of which this process computes `shares`, of 4 shards."""
    replicas = [SimpleNamespace(bands=BANDS, size=6, device=f"device {i}") for i in range(len(shares))]
    backend = SimpleNamespace(add=np.add, map=map_)
    plan = Plan(shares, [])
    return SimpleNamespace(
        replicas=replicas, backend=backend, across=Across(), sender=Watched(1), plan=lambda n: plan, processes=[]
    )


def in_turn(tasks: Any) -> None:
    for task in tasks:
        task()


def delivered(step: StepAcross, replica: int, shard: int, bands: Sequence[int]) -> None:
    for band in bands:
        step.sums[replica].add((shard, shard + 1), np.ones(2), band)


def test_every_band_is_sent_once_all_shards_of_this_process_have_it() -> None:
    group = group_of([range(1, 2), range(2, 4)], in_turn)
    step = StepAcross(group, 4)

    def last() -> None:
        step.sums[1].add((2, 4), np.ones(2))  # two shards at once; of the first band, if none is named
        assert group.across.first.wait(DEADLINE)  # while the other bands are not there yet
        for shard in (2, 3):
            delivered(step, 1, shard, [1, 2])

    assert step.totals([lambda: delivered(step, 0, 1, [0, 1, 2]), last]) == [
        ("the total", "device 0"),
        ("the total", "device 1"),
    ]
    assert group.across.sent == [(lo, [(1, 2), (2, 4)]) for lo, _ in BANDS]


def test_in_one_process_there_is_one_band_the_whole_vector() -> None:
    step = Step(group_of([range(0, 3), range(3, 4)], in_turn), 4)
    assert step.bands == [(0, 6)]
    assert [len(sums.folds) for sums in step.sums] == [1, 1]


def test_a_process_without_shards_sends_at_once() -> None:
    group = group_of([range(0, 0)], in_turn)
    assert StepAcross(group, 4).totals([]) == [("the total", "device 0")]
    assert group.across.sent == [(lo, []) for lo, _ in BANDS]


@pytest.mark.parametrize("bands", [[], [0], [0, 1]])
def test_after_a_shard_has_failed_the_sender_ends_and_sends_no_band_that_is_not_whole(bands: list[int]) -> None:
    """Otherwise the others would add up less than all shards, or this process would not end."""
    group = group_of([range(0, 2)], in_turn)
    step = StepAcross(group, 4)

    def fails() -> None:
        delivered(step, 0, 1, bands)
        raise ValueError("boom")

    with pytest.raises(ValueError, match="^boom$"):
        step.totals([lambda: delivered(step, 0, 0, [0, 1, 2]), fails])
    group.sender.asked.result(DEADLINE)
    sent = [lo for lo, _ in group.across.sent]
    assert sent == [lo for lo, _ in BANDS][: len(sent)]
    assert len(sent) <= len(bands)  # the failure may come before a band that is ready is sent
