"""group: who computes what, and how it ends. What a group computes is in test_trainer.py and in tests/conformance."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from samestep.backends.losses import MEAN, SUM, WEIGHTED, Measure
from samestep.backends.torch.backend import backend
from samestep.data.examples import Data
from samestep.data.feed import Feed
from samestep.devices import cpu
from samestep.errors import Invalid
from samestep.models.torch import mlp
from samestep.training.replicas import Replicas
from samestep.training.trainer import Trainer

DEADLINE = 20.0  # seconds that only a broken test waits


class World:
    """Of three processes: this is rank 1, and the others have so many devices, and say so."""

    size, rank = 3, 1

    def __init__(self, *devices: int) -> None:
        self.others = [str(count).encode() for count in devices]

    def collect(self, content: bytes) -> list[bytes]:
        return [self.others[0], content, self.others[1]]

    def broadcast(self, content: bytes) -> bytes:
        return self.sent


def group_of(world: Any, count: int = 1, shards: int = 8) -> Replicas:
    return Replicas(
        Trainer(shards=shards, batch_size=16), backend, mlp((5, 4, 3), seed=1), Measure(), [cpu()] * count, world
    )


def test_the_replicas_of_all_processes_share_the_shards_of_a_step() -> None:
    group = group_of(World(2, 3), 2)
    assert (group.size, group.processes) == (7, [(0, 2), (2, 4), (4, 7)])
    plan = group.plan(8)
    assert plan.shares == [range(3, 4), range(4, 5)]
    assert plan.held == [[(0, 2), (2, 3)], [(3, 4), (4, 5)], [(5, 6), (6, 8)]]
    with pytest.raises(Invalid) as caught:
        group_of(World(3, 4), 2)
    assert str(caught.value) == (
        "3 processes with 9 devices in all need at least 9 shards, got shards=8: raise shards or use fewer"
    )


def test_a_process_without_shards_takes_what_the_others_have_evaluated() -> None:
    world = World(1, 1)
    group = group_of(world)
    world.others = [np.array([1.5, 1, 2.5, 0]).tobytes(), b""]
    group.plan = lambda n: SimpleNamespace(shares=[range(0)])  # type: ignore[method-assign, assignment, return-value]
    x, y = np.zeros((2, 5), np.float32), np.zeros(2, int)
    assert group.evaluate(Feed(backend, Data((x, y)).train, [cpu()], 3), 3) == {"loss": 2.0, "accuracy": 0.5}


def test_sums_become_losses_and_metrics() -> None:
    """Loss and metrics over their weights; nothing over a weight of zero."""
    metrics = ("low", None), ("high", None)

    def summary(hits: float | None, more: list[float], kind: str = MEAN) -> Any:
        group: Any = SimpleNamespace(measure=Measure(None, kind, metrics[: len(more) // 2]), weighted=kind == WEIGHTED)
        return Replicas.summary(group, 6.0, hits, more, 12)

    assert summary(3.0, []) == {"loss": 0.5, "accuracy": 0.25}
    assert summary(None, [], SUM) == {"loss": 6.0, "accuracy": None}
    assert summary(None, [4.0], WEIGHTED) == {"loss": 1.5, "accuracy": None}
    assert summary(0.0, [0.0], WEIGHTED) == {"loss": 0.0, "accuracy": 0.0}
    assert summary(None, [4.0, 3.0, 6.0, 5.0, 0.0], WEIGHTED) == {
        "loss": 1.5,
        "accuracy": None,
        "low": 0.5,
        "high": None,
    }
    assert summary(None, [3.0, 6.0, 8.0, 2.0]) == {"loss": 0.5, "accuracy": None, "low": 0.5, "high": 4.0}
    assert summary(None, [3.0, 6.0], SUM) == {"loss": 6.0, "accuracy": None, "low": 0.5}


def test_two_processes_take_the_weights_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    from samestep.runs.checkpoint import pack

    world: Any = World(1, 1)
    group, weights = (
        group_of(world, 2),
        {name: p.detach().numpy() for name, p in mlp((5, 4, 3), seed=2).named_parameters()},
    )
    world.size, world.sent = 2, b"".join(pack({}, weights))
    group.follow()
    for replica in group.replicas:
        assert {name: np.array(tensor).tolist() for name, tensor in replica.tensors().items()} == {
            name: tensor.tolist() for name, tensor in weights.items()
        }


def test_a_group_that_is_closed_does_not_wait_for_what_other_processes_would_send() -> None:
    """After a failure they may never do so."""
    released, pool = threading.Event(), ThreadPoolExecutor(1)
    waiting, next_one = pool.submit(released.wait, DEADLINE), pool.submit(list)
    group: Any = SimpleNamespace(sender=pool)
    Replicas.close(group)
    assert next_one.cancelled()
    assert not waiting.done()
    released.set()
    assert waiting.result()
