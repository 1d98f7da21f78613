"""A fit that makes several steps in one call: the same run, with everything at the step where it belongs. And CPU threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from patience import be_patient
from torch import nn

import samestep as ss
from samestep import draws
from samestep.backends import workers
from samestep.backends.steps import Made, Steps
from samestep.backends.torch.backend import TorchBackend
from samestep.backends.torch.replica import TorchReplica
from samestep.errors import ReplicasDiffer
from samestep.models import torch as models
from samestep.training.fit import FIRST
from samestep.training.replicas import Replicas
from samestep.training.stretch import Stretch


class OneByOne(Steps):
    """What a backend with several steps in a call promises, kept in the simplest way. Notes how many each call had."""

    calls: list[int] = []  # noqa: RUF012

    def __init__(self, group: Any) -> None:
        self.group = group

    def most(self, pass_: Any) -> int:
        return 5

    def __call__(self, batches: Sequence[Any], rates: Sequence[float], t: int) -> list[Made]:
        type(self).calls.append(len(batches))
        return [self.one(batch, lr, t + i) for i, (batch, lr) in enumerate(zip(batches, rates, strict=True))]

    def one(self, batch: Any, lr: float, t: int) -> tuple[Any, Any]:
        return self.group.step(batch, lr, t), self.group.replicas[0].fingerprint()


class Stale(OneByOne):
    """A broken twin: every step of a call has the rate of the first one."""

    def __call__(self, batches: Sequence[Any], rates: Sequence[float], t: int) -> list[Made]:
        return super().__call__(batches, [rates[0]] * len(rates), t)


@pytest.fixture(params=[OneByOne])
def several(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> type[OneByOne]:
    monkeypatch.setattr(TorchBackend, "steps", lambda self, group: request.param(group))
    request.param.calls = []
    return request.param


def fit(**settings: Any) -> ss.Run:
    draw = np.random.default_rng(0)
    data = ss.Data((draw.random((130, 1, 28, 28), dtype=np.float32), draw.integers(0, 10, 130)))
    usual = {"max_epochs": 2, "batch_size": 10, "devices": "cpu", "progress": False, "lr": ss.cosine(0.1, 26)}
    return ss.Trainer(**{**usual, **settings}).fit(models.mlp(), data)


@pytest.fixture(scope="module")
def plain() -> ss.Run:
    return fit()


def test_the_run_is_the_same(plain: ss.Run, several: type[OneByOne]) -> None:
    run = fit()
    assert (run.fingerprint, run.fingerprints) == (plain.fingerprint, plain.fingerprints)
    drop = lambda rows: [{name: value for name, value in row.items() if name != "seconds"} for row in rows]  # noqa: E731
    assert drop(run.history) == drop(plain.history)
    assert sum(several.calls) == 26
    assert max(several.calls) == min(5, FIRST)


@pytest.mark.parametrize("several", [Stale], indirect=True)
def test_a_stale_rate_is_noticed(plain: ss.Run, several: type[OneByOne]) -> None:
    assert fit().fingerprints != plain.fingerprints


def test_nobody_asks_for_several_steps_without_capture(several: type[OneByOne]) -> None:
    fit(capture=False)
    assert several.calls == []


def test_a_call_ends_where_a_checkpoint_is_due(
    several: type[OneByOne], plain: ss.Run, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch)
    run = fit(checkpoint_every=4, run_dir=tmp_path / "run", keep_checkpoints=99, check_every=None)
    assert run.fingerprints == plain.fingerprints
    assert {4, 8, 12, 13, 16, 20, 24, 26} <= set(np.cumsum(several.calls).tolist())  # 13 steps an epoch
    steps = sorted(int(file.stem.removeprefix("step-")) for file in (tmp_path / "run" / "checkpoints").iterdir())
    assert steps == [4, 8, 12, 16, 20, 24, 26]


def test_a_call_ends_before_a_step_that_is_checked(several: type[OneByOne], monkeypatch: pytest.MonkeyPatch) -> None:
    from samestep.training.rehearsal import Rehearsal

    checked, shard = list[int](), Rehearsal.shard
    monkeypatch.setattr(Rehearsal, "shard", lambda self, step, batch: [checked.append(step), shard(self, step, batch)])
    fit(check_every=4)
    begins = {sum(several.calls[:i]) for i in range(len(several.calls))}
    assert len(checked) == 7
    assert set(checked) <= begins


@pytest.mark.parametrize("average", [ss.path_average(), ss.ema(0.9), ss.swa(1)])
def test_an_average_sees_every_step(average: Any, several: type[OneByOne], plain: ss.Run) -> None:
    run = fit(average=average)
    assert several.calls == [1] * 26
    assert run.fingerprints == plain.fingerprints
    different = {name for name, array in run.average.items() if not np.array_equal(array, run.weights()[name])}
    assert different == set(run.average)


def test_a_fit_that_is_resumed_goes_on_in_the_middle_of_an_epoch(
    several: type[OneByOne], plain: ss.Run, tmp_path: Any
) -> None:
    folder = tmp_path / "run"
    fit(checkpoint_every=7, run_dir=folder, keep_checkpoints=99)
    several.calls.clear()
    at = folder / "checkpoints" / "step-000000007.safetensors"
    run = fit(checkpoint_every=7, run_dir=tmp_path / "again", resume=at)
    assert run.resumed == 7
    assert sum(several.calls) == 19
    assert run.fingerprints == plain.fingerprints


# Threads that go on by themselves


@pytest.mark.parametrize("cores", [2, 3, 5])
@pytest.mark.parametrize(("shards", "devices"), [(1, 1), (4, 1), (7, 1), (4, 2), (7, 3), (7, 7)])
def test_threads_that_go_on_give_the_bits_of_one_step_after_the_other(
    cores: int, shards: int, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "cores", lambda: cores)
    made, prepared = list[int](), Stretch._prepared
    monkeypatch.setattr(Stretch, "_prepared", lambda self, i: (made.append(i), prepared(self, i))[1])
    run = fit(shards=shards, devices=["cpu"] * devices)
    assert max(made) > 0  # several in one call
    made.clear()
    plain = fit(shards=shards, capture=False)
    assert (run.fingerprint, run.fingerprints) == (plain.fingerprint, plain.fingerprints)
    assert made == []


def test_a_thread_that_goes_on_with_old_weights_is_noticed(plain: ss.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: an update that comes a step late."""
    monkeypatch.setattr(workers, "cores", lambda: 2)
    update, late = Replicas.update, list[Any]()

    def updated(self: Replicas, *given: Any) -> None:
        late.append(given)
        if len(late) > 1:
            update(self, *late.pop(0))

    monkeypatch.setattr(Replicas, "update", updated)
    assert fit().fingerprints[1:] != plain.fingerprints[1:]


def test_a_replica_that_is_not_updated_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "cores", lambda: 2)
    update = Replicas.update
    monkeypatch.setattr(Replicas, "update", lambda self, i, *given: None if i == 2 else update(self, i, *given))
    with pytest.raises(ReplicasDiffer, match="no longer equal"):
        fit(devices=["cpu"] * 3)


def test_threads_have_shards_in_equal_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3 replicas with 3, 3 and 2 of 8 shards, 2 threads compute 4 each: one of them has shards of two replicas."""
    monkeypatch.setattr(workers, "cores", lambda: 2)
    asked, tasks = list[tuple[int, range]](), TorchReplica.tasks

    def telling(self: TorchReplica, batch: Any, shards: range, sums: Any) -> Any:
        asked.append((id(self), shards))
        return tasks(self, batch, shards, sums)

    monkeypatch.setattr(TorchReplica, "tasks", telling)
    fit(devices=["cpu"] * 3, shards=8, rehearse=False, check_every=None)
    replicas = list(dict.fromkeys(one for one, _ in asked))
    first = [(replicas.index(one), *shards) for one, shards in asked[:6] if shards]
    assert first == [(0, 0, 1, 2), (1, 3), (1, 4, 5), (2, 6, 7)]


class Stops(nn.Module):
    """Fails in one shard of the tenth step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(784, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x == 7).any():
            raise ValueError("seven")
        return self.layer(x.flatten(1))


@pytest.mark.parametrize("where", ["shard", "update", "fingerprint"])
def test_an_error_ends_all_threads(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "cores", lambda: 3)
    draw = np.random.default_rng(0)
    x, y = draw.random((130, 1, 28, 28), dtype=np.float32), draw.integers(0, 10, 130)
    if where == "shard":
        x[draws.order(0, 0, 130)[95]] = 7
    else:
        owner = Replicas if where == "update" else TorchReplica
        done, usual = list[int](), getattr(owner, where)

        def fails(self: Any, *given: Any) -> Any:
            done.append(1)
            if len(done) == 10:
                raise ValueError("seven")
            return usual(self, *given)

        monkeypatch.setattr(owner, where, fails)
    before = threading.active_count()
    trainer = ss.Trainer(
        max_epochs=2, batch_size=10, devices="cpu", progress=False, shards=4, check_every=None, rehearse=False
    )
    with pytest.raises(ValueError, match="seven"):
        trainer.fit(Stops(), ss.Data((x, y)))
    assert threading.active_count() == before
