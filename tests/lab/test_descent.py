"""descend: paths, their statistics, optimizers, schedules, sampling; bad input is refused."""

from __future__ import annotations

import numpy as np
import pytest

import samestep as ss
from samestep.errors import Invalid, SamestepError
from samestep.lab.descent import descend


def test_plain_descent_follows_the_formula() -> None:
    made = descend("quadratic", schedule=0.1, steps=20, noise=0)
    t = np.arange(21)
    assert made.paths[:, :, 0] == pytest.approx(np.stack([-5 * 0.8**t, -2 * 0.6**t], 1))
    assert made.t.tolist() == t.tolist()
    assert made.gap[0] == pytest.approx(25 * 0.64**t + 8 * 0.36**t)
    assert made.distance[0] == pytest.approx(np.hypot(5 * 0.8**t, 2 * 0.6**t))


def test_a_path_is_the_same_however_many_others_there_are() -> None:
    for options in ({}, {"jitter": 0.3}, {"optimizer": ss.sgld()}):
        few, many = (descend("quadratic", trajectories=m, keep=3, **options) for m in (3, 50))  # type: ignore[arg-type]
        assert (few.paths == many.paths).all()
    few, many = (descend("logistic", trajectories=m, keep=3, steps=600) for m in (3, 50))
    assert (few.paths == many.paths).all()
    assert (few.paths != descend("logistic", trajectories=3, keep=3, steps=600, seed=1).paths).any()


@pytest.mark.parametrize(
    "optimizer", [ss.sgd(momentum=0.9), ss.sgd(momentum=0.5, nesterov=True), ss.adagrad(), ss.adam()]
)
def test_optimizers_are_those_of_samestep(optimizer: object) -> None:
    made = descend("quadratic", optimizer, 0.05, steps=30, noise=0)  # type: ignore[arg-type]
    x, state = np.array([-5.0, -2.0]), {name: np.zeros(2) for name in optimizer.slots}  # type: ignore[attr-defined]
    for t in range(30):
        x, state = optimizer.update(x, np.array([2.0, 4.0]) * x, state, 0.05, t)  # type: ignore[attr-defined]
    assert (made.last[:, 0] == x).all()


def test_the_average_is_weighted_by_the_rates() -> None:
    made = descend("quadratic", schedule="inverse_power(0.1, 1)", steps=10, keep=1)
    eta, points = made.rates, made.paths[:, :, 0]
    for T in (1, 4, 10):
        mean = (eta[:T, None] * points[:T]).sum(0) / eta[:T].sum()
        assert made.average_gaps[T, 0] == pytest.approx(made.objective.value(mean))


def test_times_are_few_and_close_together_at_first_and_the_band_holds_what_it_says() -> None:
    made = descend("quadratic", steps=5000, trajectories=200, record=50)
    assert len(made.t) <= 51
    assert made.t[[0, 1, -1]].tolist() == [0, 1, 5000]
    ends = np.linalg.norm(made.last, axis=0)
    assert made.distance[:, -1] == pytest.approx([ends.mean(), *np.quantile(ends, [0.1, 0.9])])


def test_a_plateau_drops_when_the_mean_stalls_and_is_left_as_it_was() -> None:
    plateau = ss.Plateau(0.2, factor=0.5, patience=5)
    made = descend("quadratic", schedule=plateau, steps=300, trajectories=50)
    assert plateau.lr == made.rates[0] == 0.2
    assert made.rates[-1] < 0.05
    assert set(np.unique(made.rates[1:] / made.rates[:-1])) == {0.5, 1.0}


def test_every_pass_without_replacement_shows_each_example_once() -> None:
    """With a rate so small that x stays, the sum of a pass is the gradient of all examples."""
    made = descend("least_squares", schedule=1e-9, steps=500, trajectories=20, sampling="without_replacement", keep=20)
    change = (made.paths[0] - made.paths[250]) / (250 * 1e-9)
    f = made.objective
    assert change == pytest.approx(f.gradient(made.paths[0]), rel=1e-4)
    other = descend("least_squares", schedule=1e-9, steps=250, trajectories=20, sampling="with_replacement", keep=20)
    assert (other.paths[0] - other.paths[250]) / (250 * 1e-9) != pytest.approx(f.gradient(made.paths[0]), rel=1e-4)
    one, two = np.diff(made.paths[:251], axis=0), np.diff(made.paths[250:], axis=0)
    assert (abs(one - two) > 1e-12).any()  # another order in every pass


def test_a_batch_is_the_mean_of_its_examples() -> None:
    whole = descend("logistic", schedule=0.1, steps=4, batch=250, sampling="without_replacement")
    full = descend("logistic", schedule=0.1, steps=4, sampling="full")
    assert whole.last == pytest.approx(full.last, rel=1e-12)


def test_a_rate_that_is_too_large_diverges_and_is_told() -> None:
    made = descend("quadratic", schedule=1.1, steps=5000, noise=0)
    assert not np.isfinite(made.distance[0, -1])
    assert np.isfinite(made.distance[0, 0])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": -1}, "steps must be at least 0"),
        ({"trajectories": 0}, "trajectories must be at least 1"),
        ({"noise": -1}, "noise must be finite and at least 0"),
        ({"start": (1, 2, 3)}, "has 2 coordinates, got (1, 2, 3)"),
        ({"start": (float("nan"), 0)}, "start must be finite"),
        ({"schedule": "cosin(1)"}, "did you mean cosine?"),
        ({"schedule": ss.cosine(0.1, 5).in_epochs()}, "the lab has no epochs"),
        ({"schedule": -0.1}, "at least 0"),
        ({"sampling": "with_replacement"}, "has no examples to draw"),
        ({"trajectories": 10**9}, "do not fit into memory"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"record": 1}, "record must be at least 2"),
    ],
)
def test_bad_input_is_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(SamestepError) as refused:
        descend("quadratic", **options)  # type: ignore[arg-type]
    assert says in str(refused.value)


def test_examples_and_batches_that_do_not_fit_are_refused() -> None:
    with pytest.raises(Invalid, match="batch must divide the 250 examples of logistic, got batch=7"):
        descend("logistic", batch=7)
    with pytest.raises(Invalid, match="sampling must be one of"):
        descend("logistic", sampling="sometimes")
