"""fit: when the device's numbers are looked at, and what is told of them."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import samestep as ss
from samestep.errors import NotFinite
from samestep.models.torch import mlp
from samestep.runs.folder import RunFolder
from samestep.training import fit as fitting
from samestep.training.fit import Fit

X = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
Y = np.arange(40) % 3


def fit(folder: Path | None, **settings: Any) -> ss.Run:
    given = {"max_epochs": 2, "batch_size": 4, "shards": 2, "devices": "cpu", "progress": False, "run_dir": folder}
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
    told: list[Any] = []
    batches = [[(0, 2), (2, 4)], [(4, 6), (6, 8)], [(8, 10), (10, 12)], [(12, 14), (14, 16)], [(16, 18), (18, 19)]]
    one: Any = SimpleNamespace(
        backend=SimpleNamespace(fetch=np.concatenate), settings=SimpleNamespace(shards=2), batches=batches, emit=told.append,
        shape=SimpleNamespace(classes=3), result=SimpleNamespace(fingerprints=["before"]),
    )  # fmt: skip
    vars(one).update(about)
    prints = [np.array([value], np.int64) for value in (-1, 10)]
    pending = list(zip(np.array(numbers, np.float32), prints, strict=True))
    table = Fit.look(one, pending, 2, 3, [0.1, 0.2, 0.3, 0.4, 0.5])
    return table, one.result.fingerprints, told


def test_what_is_told_of_some_steps() -> None:
    table, fingerprints, told = looked_at([[1, 2, 0, 1], [3, 4, 2, 1]])
    assert table.tolist() == [[[1, 2], [0, 1]], [[3, 4], [2, 1]]]
    assert fingerprints == ["before", "ffffffffffffffff", "000000000000000a"]
    assert told == [
        {
            "event": "steps", "epoch": 3, "first": 13, "lr": [0.4, 0.5], "examples": [4, 3],
            "loss": [[1, 2], [3, 4]], "hits": [[0, 1], [2, 1]], "fingerprint": fingerprints[1:],
        }
    ]  # fmt: skip


def test_the_first_loss_that_is_not_finite_is_told_with_its_rate() -> None:
    line = r"^the loss is inf at step 14, shard 1, with learning rate 0\.5: lower the rate, "
    with pytest.raises(NotFinite, match=line):
        looked_at([[1, 2, 0, 1], [3, np.inf, 2, np.nan]])
    with pytest.raises(NotFinite, match=r"^the loss is nan at step 13, shard 0, with learning rate 0\.4: "):
        looked_at([[np.nan, 2, 0, 1], [3, np.inf, 2, 1]])


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
