"""fit: when the device's numbers are looked at, and what is told of them."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import samestep as ss
from samestep.backends.losses import SUM, WEIGHTED, Measure
from samestep.errors import NotFinite
from samestep.models.torch import mlp
from samestep.runs.folder import RunFolder
from samestep.schedules.rates import as_written
from samestep.training import fit as fitting
from samestep.training.fit import Fit

X = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
Y = np.arange(40) % 3


def fit(folder: Path | None, **settings: Any) -> ss.Run:
    given = {"max_epochs": 2, "batch_size": 4, "shards": 2, "devices": "cpu", "progress": False, "run_dir": folder,
             "capture": False}  # fmt: skip # and so one step in each call
    return ss.Trainer(**given | settings).fit(mlp((4, 3), seed=1), (X, Y))


def test_a_look_comes_when_more_than_half_a_second_has_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that goes on by a quarter of a second whenever it is read: once for each step."""
    ticks = itertools.count()
    monkeypatch.setattr(fitting, "time", SimpleNamespace(time=lambda: 0.0, perf_counter=lambda: next(ticks) / 4))
    told: list[Any] = []
    monkeypatch.setattr(Fit, "emit", lambda self, event: told.append(event))
    fit(tmp_path / "run", checkpoint_every=None)
    assert [event["first"] for event in told if event["event"] == "steps"] == [0, 3, 6, 9, 10, 13, 16, 19]
    assert told[0]["parameters"] == 4 * 3 + 3
    told.clear()
    fit(None)
    assert [event["first"] for event in told if event["event"] == "steps"] == [0, 10]  # nobody listens


def looked_at(numbers: Any, **about: Any) -> tuple[Any, Any, Any]:
    """What is told of two steps of the third epoch, the fourth one of its five and the next."""
    told: list[Any] = about.pop("told", [])
    batches = [[(0, 2), (2, 4)], [(4, 6), (6, 8)], [(8, 10), (10, 12)], [(12, 14), (14, 16)], [(16, 18), (18, 19)]]
    one: Any = SimpleNamespace(
        backend=SimpleNamespace(fetch=np.concatenate), settings=SimpleNamespace(shards=2), batches=batches, emit=told.append,
        shape=SimpleNamespace(classes=3, dtype="float32"), result=SimpleNamespace(fingerprints=["before"]),
        measure=Measure(), warned=False, rates=SimpleNamespace(shown=lambda lr: as_written(lr, "float32")),
        group=SimpleNamespace(weighted=False), rehearsal=SimpleNamespace(settle=lambda: None),
    )  # fmt: skip
    one.weights_of = lambda more: Fit.weights_of(one, more)
    vars(one).update(about)
    prints = [np.array([value], np.int64) for value in (-1, 10)]
    pending = list(zip(np.array(numbers, np.float32), prints, strict=True))
    rates = [float(np.float32(lr)) for lr in (0.1, 0.2, 0.3, 0.4, 0.5)]  # as they are applied
    table = Fit.look(one, pending, 2, 3, rates)
    return table, one.result.fingerprints, told


def test_what_is_told_of_some_steps() -> None:
    table, fingerprints, told = looked_at([[1, 2, 0, 1], [3, 4, 2, 1]])
    assert table.tolist() == [[1, 2, 0, 1], [3, 4, 2, 1]]
    assert fingerprints == ["before", "ffffffffffffffff", "000000000000000a"]
    assert told == [
        {
            "event": "steps", "epoch": 3, "first": 13, "lr": [0.4, 0.5], "examples": [4, 3],
            "loss": [[1, 2], [3, 4]], "hits": [[0, 1], [2, 1]], "fingerprint": fingerprints[1:],
        }
    ]  # fmt: skip


def test_a_step_tells_what_its_loss_is_over() -> None:
    numbers = [[1, 2, 0, 1, 5, 7, 8], [3, 4, 2, 1, 6.5, 7, 8]]  # with a metric
    by_weight = {"measure": Measure(kind=WEIGHTED), "group": SimpleNamespace(weighted=True)}
    table, _, told = looked_at(numbers, **by_weight)
    assert table.tolist() == numbers
    assert (told[0]["weight"], told[0]["loss"], told[0]["hits"]) == ([5, 6.5], [[1, 2], [3, 4]], [[0, 1], [2, 1]])
    assert looked_at(numbers, measure=Measure(kind=SUM))[2][0]["weight"] == [1, 1]
    assert "weight" not in looked_at(numbers)[2][0]
    with pytest.warns(UserWarning, match="^a batch has weight 0: its step changes nothing"):
        looked_at([numbers[0], [3, 4, 2, 1, 0, 7, 8]], **by_weight)
    _, _, told = looked_at([[3, 4, 2, 1, 0]] * 2, **by_weight, warned=True)  # once is enough
    assert told[0]["weight"] == [0, 0]


def test_a_metric_that_is_not_finite_is_told() -> None:
    line = r"^a metric or the weight of the loss is not finite at step 14: look at the function"
    with pytest.raises(NotFinite, match=line):
        looked_at([[1, 2, 0, 1, 5], [3, 4, 2, 1, np.nan]])
    with pytest.raises(NotFinite, match=r"^the loss is nan at step 14, shard 1"):  # the cause comes first
        looked_at([[1, 2, 0, 1, 5], [3, np.nan, 2, 1, np.nan]])


def test_the_first_loss_that_is_not_finite_is_told_with_its_rate() -> None:
    line = r"^the loss is inf at step 14, shard 1, with learning rate 0\.5: lower the rate, "
    with pytest.raises(NotFinite, match=line):
        looked_at([[1, 2, 0, 1], [3, np.inf, 2, np.nan]])
    with pytest.raises(NotFinite, match=r"^the loss is nan at step 13, shard 0, with learning rate 0\.4: "):
        looked_at([[np.nan, 2, 0, 1], [3, np.inf, 2, 1]])


def test_steps_before_one_that_is_not_finite_are_told_and_it_is_not() -> None:
    told: list[Any] = []
    result = SimpleNamespace(fingerprints=["before"])
    with pytest.raises(NotFinite, match="at step 14, shard 1"):
        looked_at([[1, 2, 0, 1], [3, np.inf, 2, np.nan]], told=told, result=result)
    assert result.fingerprints == ["before", "ffffffffffffffff"]
    assert told == [
        {
            "event": "steps", "epoch": 3, "first": 13, "lr": [0.4], "examples": [4], "loss": [[1, 2]], "hits": [[0, 1]],
            "fingerprint": result.fingerprints[1:],
        }
    ]  # fmt: skip
    told.clear()
    with pytest.raises(NotFinite, match="at step 13, shard 0"):
        looked_at([[np.nan, 2, 0, 1], [3, 4, 2, 1]], told=told, result=result)  # what comes after it says nothing
    assert (told, len(result.fingerprints)) == ([], 2)


def test_every_checkpoint_is_written_once_and_has_the_loss_of_an_epoch_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[int, Any]] = []
    save = RunFolder.save

    def noted(self: RunFolder, about: Any, tensors: Any) -> None:
        written.append((about["step"], about["metric"]))
        save(self, about, tensors)

    monkeypatch.setattr(RunFolder, "save", noted)
    run = fit(tmp_path, checkpoint_every=5, max_epochs=3)
    losses = [row["train_loss"] for row in run.history]
    assert written == [(5, None), (10, losses[0]), (15, None), (20, losses[1]), (25, None), (30, losses[2])]
    assert len(set(losses)) == 3


def share(output: Any, y: Any) -> Any:
    return output.detach().sum(), (y > 0).sum()


def loss(output: Any, y: Any) -> Any:
    counts = 0.7 + 0.1 * y
    return (torch.nn.functional.cross_entropy(output, y, reduction="none") * counts).sum(), counts.sum()


@pytest.mark.parametrize("own", [None, loss])
def test_history_and_metrics_are_the_same_after_a_resume_amid_an_epoch(
    tmp_path: Path, own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = RunFolder.save
    monkeypatch.setattr(
        RunFolder, "save", lambda self, *given: [save(self, *given), self.writer.flush()]
    )  # none is skipped
    settings: dict[str, Any] = {"loss": own, "metrics": {"share": share}, "checkpoint_every": 3, "keep_checkpoints": 9}
    whole = fit(tmp_path / "whole", **settings)
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for path in (tmp_path / "part").rglob("*.safetensors"):
        if path.name == "weights.safetensors" or path.stem > "step-000000015":
            path.unlink()
    again = fit(tmp_path / "part", **settings)
    assert again.resumed == 15  # of 20 steps, 10 of them an epoch
    assert [row | {"seconds": 0} for row in again.history] == [row | {"seconds": 0} for row in whole.history]
    assert again.fingerprints == whole.fingerprints
    assert len({row[name] for row in whole.history for name in ("train_share", "train_loss")}) == 4


@pytest.mark.parametrize("devices", [1, 3])
def test_early_stopping_follows_a_metric(devices: int, tmp_path: Path) -> None:
    """The best is the second epoch's: with a patience of two, the fourth is the last; resumed, too."""
    values = iter([0.2, 0.9, 0.5, 0.7, 0.95])

    def drawn(self: Any, feed: Any, classes: Any) -> dict[str, float | None]:
        return {"loss": 1.0, "accuracy": 0.5, "high": next(values)}

    x, y = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32), np.arange(12) % 3
    settings = {
        "metrics": {"high": lambda output, y: (output.max(1).values.sum(), len(y))},
        "mode": "max",
        "patience": 2,
    }
    trainer = ss.Trainer(
        9, 6, devices=["cpu"] * devices, run_dir=tmp_path, progress=False, monitor="test_high", **settings
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("samestep.training.replicas.Replicas.evaluate", drawn)
        run = trainer.fit(mlp((5, 4, 3), seed=1), ss.Data((x, y), (x, y)))
    assert [row["test_high"] for row in run.history] == [0.2, 0.9, 0.5, 0.7]
    again = trainer.fit(mlp((5, 4, 3), seed=1), ss.Data((x, y), (x, y)))
    assert (again.resumed, again.fingerprint, len(again.history)) == (8, run.fingerprint, 4)
    assert run.recipe["patience"] == 2
