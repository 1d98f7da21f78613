"""probing: a range test takes a fit's steps and suggests a rate; curvature is the Hessian's, and rates up to 2/λ are stable."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import samestep as ss
from samestep.errors import Invalid, NotFinite
from samestep.runs.log import events
from samestep.screen.pictures import Picture
from samestep.shards import tree_sum
from samestep.tuning import probing
from samestep.tuning.probing import prepared, range_test, taken

RNG = np.random.default_rng(3)
X = RNG.standard_normal((48, 4)).astype(np.float32) * [1, 2, 0.5, 1]
Y = (X @ [[1.0], [-2.0], [3.0], [0.5]] + RNG.standard_normal((48, 1)) / 10).astype(np.float32)
X = X.astype(np.float32)
LAMBDA = float(np.linalg.eigvalsh(2 * X.T.astype(float) @ X / 48)[-1])  # of the mean of (x·w − y)²


def linear() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 1, bias=False)


def trainer(**settings: Any) -> ss.Trainer:
    given = {
        "max_epochs": 1,
        "batch_size": 48,
        "shards": 4,
        "loss": torch.nn.MSELoss(),
        "progress": False,
        "devices": "cpu",
    }
    return ss.Trainer(**{**given, **settings})


def curvature(settings: dict[str, Any], model: Any = None, data: Any = (X, Y), **options: Any) -> probing.Curvature:
    with prepared(trainer(**settings), model or linear(), data) as fit:
        return probing.curvature(fit, **options)


@pytest.mark.parametrize("batch_size", [48, 7])  # in one batch, or in seven, the last of which is smaller
def test_the_curvature_of_least_squares(batch_size: int) -> None:
    found = curvature({"batch_size": batch_size})
    assert found.converged
    assert found.eigenvalue == pytest.approx(LAMBDA, rel=0.01)
    assert found.rate() == pytest.approx(2 / LAMBDA, rel=0.01)
    assert found.rate(0.9) == pytest.approx(3.8 / LAMBDA, rel=0.01)
    assert found.momentum == 0
    assert curvature({"optimizer": ss.sgd(momentum=0.8)}).momentum == 0.8


def test_the_largest_eigenvalue_is_found_where_the_one_of_largest_size_is_negative() -> None:
    def saddle(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean over rows of the identity is ½(w1² + 3·w2² − 9·w3²)/4."""
        return (output * output * y / 2)[:, 0]

    x, y = np.eye(4, dtype=np.float32), np.array([[1], [3], [-9], [0]], np.float32)
    settings = {"loss": saddle, "batch_size": 4, "shards": 1}
    assert curvature(settings, data=(x, y)).eigenvalue == pytest.approx(0.75, rel=0.05)
    downhill = curvature(settings, data=(x, -abs(y)))
    assert abs(downhill.eigenvalue) < 0.05
    assert probing.Curvature(-1.0, 5, True, 0.0).rate() == np.inf  # there, no rate is too large for a step


def test_a_smooth_net_has_the_curvature_of_double_backward() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    weights = list(model.parameters())
    loss = torch.nn.functional.mse_loss(model(torch.tensor(X)), torch.tensor(Y))
    flat = torch.cat([g.ravel() for g in torch.autograd.grad(loss, weights, create_graph=True)])
    rows = [torch.cat([g.ravel() for g in torch.autograd.grad(one, weights, retain_graph=True)]) for one in flat]
    exact = float(torch.linalg.eigvalsh(torch.stack(rows))[-1])
    assert curvature({}, model).eigenvalue == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rates_below_the_limit_are_stable_and_rates_above_it_are_not(momentum: float) -> None:
    found = curvature({"optimizer": ss.sgd(momentum=momentum)})
    for factor, stable in ((0.95, True), (1.05, False)):
        given = {"optimizer": ss.sgd(momentum=momentum), "schedule": factor * found.rate(momentum), "max_epochs": 600}
        try:
            last = trainer(**given).fit(linear(), (X, Y)).history[-1]["train_loss"]
        except NotFinite:
            last = np.inf
        assert (last < 1) == stable


def test_weights_and_state_are_left_as_they_were() -> None:
    model = linear()
    before = model.weight.detach().clone()
    with prepared(trainer(), model, (X, Y)) as fit:
        probing.curvature(fit)
        assert (fit.group.replicas[0].tensors()["weight"] == before.numpy()).all()
    assert (model.weight == before).all()


def test_products_are_limited_and_it_is_told() -> None:
    found = curvature({}, most=3)
    assert (found.products, found.converged) == (3, False)
    with pytest.raises(Invalid, match="products must be at least 2"):
        curvature({}, most=1)


def ranged(low: float = 1e-4, high: float = 100.0, steps: int = 60, **settings: Any) -> Picture:
    with prepared(trainer(**{"batch_size": 12, **settings}), linear(), (X, Y)) as fit:
        return range_test(fit, low, high, steps)


def numbers(picture: Picture, label: str) -> tuple[list[float], list[float]]:
    (curve,) = [curve for curve in picture.panels[0].curves if curve.label == label]
    return list(curve.x), list(curve.y)


def test_the_steps_of_a_range_test_are_those_of_a_fit(tmp_path: Any) -> None:
    rates, losses = numbers(ranged(), "of each step")
    settings = {"batch_size": 12, "schedule": ss.table(np.geomspace(1e-4, 100, 60)[:16]), "max_epochs": 4}
    trainer(**settings, run_dir=tmp_path / "run").fit(linear(), (X, Y))
    log = [event for event in events((tmp_path / "run/events.jsonl").read_bytes()) if event["event"] == "steps"]
    made = [tree_sum(shards) / 12 for event in log for shards in event["loss"]]
    assert losses[:16] == pytest.approx(made, rel=1e-6)
    assert rates == pytest.approx(np.geomspace(1e-4, 100, 60)[: len(rates)])


def test_the_same_test_on_other_devices_has_the_same_bits() -> None:
    assert list(ranged(devices=["cpu"] * 3).rows()) == list(ranged().rows())


def test_it_stops_when_the_loss_diverges_keeps_the_finite_steps_and_suggests_a_rate_that_is_stable() -> None:
    picture = ranged()
    rates, losses = numbers(picture, "of each step")
    assert len(rates) < 60
    assert np.isfinite(losses).all()
    told = r"The loss is least at a rate of ([\d.]+); it diverges at ([\d.]+)\. A rate to try: ([\d.]+)\."
    found = re.fullmatch(told, picture.says)
    assert found, picture.says
    least, diverged, suggested = map(float, found.groups())
    assert suggested < least < diverged
    assert suggested < 2 / LAMBDA < 1.5 * diverged
    assert numbers(picture, "suggestion")[0] == [suggested]


def test_a_loss_that_never_falls_gives_no_suggestion() -> None:
    picture = ranged(low=50.0, high=100.0, steps=10)
    assert "It does not fall: try more steps, or rates from below 50 on." in picture.says
    assert [curve.label for curve in picture.panels[0].curves] == ["of each step", "smoothed"]
    assert "it is finite up to 0.001" in ranged(high=1e-3, steps=20).says


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"low": 0.0}, "the lowest rate must be above 0"),
        ({"low": 1.0, "high": 0.1}, "the lowest rate must be below the highest, got 1 and 0.1"),
        ({"steps": 5}, "steps must be at least 10"),
        ({"high": float("nan")}, "the highest rate must be finite"),
    ],
)
def test_bad_input_is_refused(options: dict[str, float], says: str) -> None:
    with pytest.raises(Invalid) as refused:
        ranged(**options)  # type: ignore[arg-type]
    assert says in str(refused.value)


def test_a_loss_that_is_not_finite_at_once_is_told() -> None:
    broken = X.copy()
    broken[:] = np.inf
    with (
        prepared(trainer(rehearse=False), linear(), (broken, Y)) as fit,
        pytest.raises(Invalid, match="at the first step"),
    ):
        range_test(fit)


def test_sources_that_are_read_as_they_are_needed_will_do() -> None:
    class Slow:
        def __len__(self) -> int:
            return len(X)

        def __getitem__(self, index: Any) -> Any:
            return X[index], Y[index]

    for readers in (0, None):
        data = ss.Data(Slow(), readers=readers)
        assert curvature({"batch_size": 12}, data=data).eigenvalue == curvature({"batch_size": 12}).eigenvalue
        with prepared(trainer(batch_size=12), linear(), data) as fit:
            found = range_test(fit, 1e-4, 100.0, 60)
        assert list(found.rows()) == list(ranged().rows())


def test_code_is_ended_at_its_first_fit() -> None:
    seen = []

    def script() -> None:
        try:
            trainer().fit(linear(), (X, Y), weights={"weight": np.ones((1, 4), np.float32)})
        except Exception:
            seen.append("caught")
        seen.append("went on")

    found, model, data, weights = taken(script)
    assert (seen, found.batch_size, data[0].shape, list(weights)) == ([], 48, (48, 4), ["weight"])
    with prepared(found, model, data, weights) as fit:
        assert (fit.group.replicas[0].tensors()["weight"] == 1).all()
    with pytest.raises(Invalid, match="nothing was trained"):
        taken(lambda: None)
    assert ss.Trainer.fit.__qualname__ == "Trainer.fit"
