"""A fit that makes several steps in one call: the same run, with everything at the step where it belongs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import samestep as ss
from samestep.backends.steps import Steps
from samestep.backends.torch.backend import TorchBackend
from samestep.models import torch as models
from samestep.training.fit import FIRST


class OneByOne(Steps):
    """What a backend with several steps in a call promises, kept in the simplest way. Notes how many each call had."""

    calls: list[int] = []  # noqa: RUF012

    def __init__(self, group: Any) -> None:
        self.group = group

    def most(self, pass_: Any) -> int:
        return 5

    def __call__(self, batches: Sequence[Any], rates: Sequence[float], t: int) -> tuple[Any, Any]:
        type(self).calls.append(len(batches))
        made = [self.one(batch, lr, t + i) for i, (batch, lr) in enumerate(zip(batches, rates, strict=True))]
        return torch.cat([numbers for numbers, _ in made]), torch.cat([print_ for _, print_ in made])

    def one(self, batch: Any, lr: float, t: int) -> tuple[Any, Any]:
        return self.group.step(batch, lr, t), self.group.replicas[0].fingerprint()


class Stale(OneByOne):
    """A broken twin: every step of a call has the rate of the first one."""

    def __call__(self, batches: Sequence[Any], rates: Sequence[float], t: int) -> tuple[Any, Any]:
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


def test_a_call_ends_where_a_checkpoint_is_due(several: type[OneByOne], plain: ss.Run, tmp_path: Any) -> None:
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
