"""One run, every framework: after 100 steps each has the weights of a training written by hand in NumPy (reference.py).

They then agree with each other, too. In float64 they agree to rounding. In float32 a unit that is almost at zero now and then
lands on the other side of its ReLU, in one framework and not in the other; how much that may cost is in the table.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import reference

import samestep as ss
from conformance import suite
from conformance.precision import PRECISIONS, computing_in, double
from samestep import draws, models
from samestep.backends import find
from samestep.backends.base import Backend
from samestep.data import fashion
from samestep.fingerprint import of_weights
from samestep.screen import cli

STEPS, BATCH, RATE = 100, 16, 0.05


class Tolerance(NamedTuple):
    whole: float  # ‖a - b‖ / ‖b‖ over all weights as one vector
    each: float  # of each tensor: the largest difference over the largest value
    reason: str


TOLERANCES = {
    "float32": Tolerance(
        5e-5, np.inf, "half of 1e-4: two frameworks may be off to two sides, and biases are small numbers"
    ),
    "float64": Tolerance(1e-14, 1e-12, "100 steps, each rounded: 100 u = 1e-14, of the weights that move most"),
}


def examples() -> tuple[np.ndarray, np.ndarray]:
    """Ten images under noise, in float32."""
    random = np.random.default_rng(0)
    y = random.integers(0, 10, STEPS * BATCH)
    x = 0.5 * random.random((10, 1, 28, 28))[y] + 0.5 * random.random((len(y), 1, 28, 28))
    return x.astype(np.float32), y


@cache
def by_hand() -> tuple[reference.Weights, list[float]]:
    """The weights after all steps of plain gradient descent, and the loss of every step."""
    x, y = examples()
    weights = {name: weight.astype(np.float64) for name, weight in models.lenet_modern().items()}
    order, losses = draws.order(0, 0, len(y), "without_replacement"), []
    for start in range(0, len(y), BATCH):
        chosen = order[start : start + BATCH]
        loss, gradient = reference.gradient("lenet_modern", weights, x[chosen], y[chosen])
        losses.append(loss / BATCH)
        weights = {name: weight - RATE * gradient[name] / BATCH for name, weight in weights.items()}
    return weights, losses


def fit(precision: str, seed: int = 0) -> ss.Run:
    x, y = examples()
    trainer = ss.Trainer(max_epochs=1, batch_size=BATCH, schedule=RATE, devices="cpu", progress=False, seed=seed)
    with computing_in(precision):
        model = suite.zoo.models.lenet_modern()
        if precision == "float64":
            model = models.load(double(model), models.lenet_modern())
        return trainer.fit(model, (x.astype(precision), y))


def norm(tensors: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum((tensor.astype(np.float64) ** 2).sum() for tensor in tensors.values())))


def agree(precision: str, ours: dict[str, np.ndarray], theirs: reference.Weights) -> None:
    whole, each, reason = TOLERANCES[precision]
    assert {name: tensor.shape for name, tensor in ours.items()} == {name: t.shape for name, t in theirs.items()}
    apart = {name: ours[name] - tensor for name, tensor in theirs.items()}
    assert norm(apart) <= whole * norm(theirs), f"off by {norm(apart) / norm(theirs):.1e}: {reason}"
    for name, tensor in theirs.items():
        off = np.abs(apart[name]).max() / np.abs(tensor).max()
        assert off <= each, f"{name} is off by {off:.1e}: {reason}"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_hundred_steps_are_those_by_hand(precision: str) -> None:
    """Its twin, a training in another order, is rejected."""
    expected, losses = by_hand()
    moved = norm({name: tensor - models.lenet_modern()[name] for name, tensor in expected.items()}) / norm(expected)
    assert moved > 0.01, "training changed little: there is nothing to compare"
    assert np.mean(losses[-20:]) < np.mean(losses[:20]) - 0.1, "nothing was learned"
    run = fit(precision)
    agree(precision, run.weights(), expected)
    assert run.history[0]["train_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    with pytest.raises(AssertionError, match="^off by "):
        agree(precision, fit(precision, seed=1).weights(), expected)


def test_the_command_trains_with_this_framework(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`samestep train --backend`: from the numbers that all frameworks start from, with the result of the same fit."""
    x, y = examples()
    train, test = (x[:64], y[:64]), (x[64:96], y[64:96])
    monkeypatch.setattr(fashion, "load", lambda: (train, test))
    options = [
        "--backend",
        suite.BACKEND,
        "--epochs",
        "1",
        "--batch-size",
        "16",
        "--run-dir",
        str(tmp_path / "run"),
        "-q",
    ]
    monkeypatch.setattr(sys, "argv", ["samestep", "train", *options])
    with pytest.raises(SystemExit) as ended:
        cli.run()
        sys.exit(0)
    said = capsys.readouterr()
    assert (ended.value.code or 0, said.err) == (0, "")
    run = ss.Run.load(tmp_path / "run")
    assert f"fingerprint {run.fingerprint}" in said.out
    assert (run.recipe["framework"], run.recipe["initial"]) == (suite.BACKEND, of_weights(models.lenet_modern()))
    schedule = ss.cosine(0.00625, 1).warmup(0).in_epochs(smooth=True)
    trainer = ss.Trainer(max_epochs=1, batch_size=16, optimizer=ss.sgd(momentum=0.9), schedule=schedule, progress=False)
    suite.same(run, trainer.fit(suite.zoo.models.lenet_modern(), ss.Data(train=train, test=test)))


def test_methods_have_the_defaults_that_the_base_promises() -> None:
    def defaults(method: Callable[..., Any]) -> dict[str, Any]:
        parameters = inspect.signature(method).parameters.values()
        return {one.name: one.default for one in parameters if one.default is not one.empty}

    promised = {name: defaults(method) for name, method in vars(Backend).items() if inspect.isfunction(method)}
    backend = find.load(suite.BACKEND)
    assert {name: defaults(getattr(type(backend), name)) for name in promised} == promised
    backend.require(backend.devices()[0])
