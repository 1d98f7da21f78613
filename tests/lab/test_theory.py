"""theory against measurement: exact distributions, the bound and its tightness, sampling, Langevin dynamics."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import samestep as ss
from samestep import draws, lab
from samestep.errors import Invalid
from samestep.lab import objectives, theory
from samestep.lab.descent import descend
from samestep.lab.figures import CONSTANT, EXPONENTIAL, POLYNOMIAL

SEEDS = 20_000
PUBLISHED = {  # MISSION.md: mean and standard deviation of the last point
    CONSTANT: (50, (-0.0001, 0.0), (0.167, 0.125)),
    EXPONENTIAL: (1000, (-0.826, -0.045), (0.075, 0.040)),
    POLYNOMIAL: (50, (-0.012, 0.0), (0.105, 0.075)),
}


@pytest.mark.parametrize("schedule", PUBLISHED, ids=str)
def test_the_chapters_runs_have_the_exact_distribution(schedule: ss.Schedule) -> None:
    steps, means, deviations = PUBLISHED[schedule]
    made = descend("quadratic", schedule=schedule, steps=steps, trajectories=SEEDS)
    exact = theory.moments((2, 4), (-5, -2), made.rates)
    mean, std = exact.mean[-1], exact.variance[-1] ** 0.5
    assert (mean, std) == (pytest.approx(means, abs=6e-4), pytest.approx(deviations, abs=6e-4))
    assert (abs(made.mean[-1] - mean) < 3 * std / SEEDS**0.5).all()
    assert (abs(made.std[-1] - std) < 3 * std / (2 * SEEDS) ** 0.5).all()
    late = descend("quadratic", schedule=schedule.shift(3), steps=steps, trajectories=SEEDS)  # a broken twin
    if schedule is not CONSTANT:
        assert (abs(late.mean[-1] - mean) > 3 * std / SEEDS**0.5).any()


def test_the_noise_of_a_constant_rate_does_not_fall_with_more_steps() -> None:
    made = descend("quadratic", schedule=0.1, steps=2000, trajectories=5000)
    floor = np.array([theory.stationary(0.1, h) for h in (2, 4)]) ** 0.5
    late = made.std[made.t >= 50]
    assert (abs(late / floor - 1) < 5 / (2 * 5000) ** 0.5).all()
    halved = descend("quadratic", schedule=0.05, steps=2000, trajectories=5000)
    assert (halved.std[-1] < 0.75 * floor).all()


def test_exponential_stops_short_and_polynomial_wins() -> None:
    ends = {s: descend("quadratic", schedule=s, steps=1000, trajectories=2000).distance[0, -1] for s in PUBLISHED}
    assert ends[POLYNOMIAL] < ends[CONSTANT] / 2 < ends[EXPONENTIAL] / 4
    longer = descend("quadratic", schedule=EXPONENTIAL, steps=5000, trajectories=2000).distance[0, -1]
    assert longer == pytest.approx(ends[EXPONENTIAL], rel=1e-6)


SCHEDULES = [
    0.01,
    "inverse_power(0.05, 0.1)",
    "natural_exp(0.05, 0.02)",
    "cosine(0.05, 300)",
    "triangle(0.001, 0.03, 20)",
]
CONVEX = ["quadratic", "quadratic(1, 30)", "absolute", "absolute(1)", "least_squares", "logistic"]


def hardest(steps: int) -> objectives.Objective:
    """f(x) = max(x_1, …, x_T, −1/√T), from 0: each gradient shows one new coordinate (Nemirovski and Yudin 1983)."""
    least = -(steps**-0.5)
    first = lambda x: x.argmax(0) == np.arange(steps)[:, None]  # noqa: E731
    return objectives.Objective(
        f"hardest({steps})", lambda x: np.maximum(x.max(0), least), lambda x: 1.0 * (first(x) & (x.max(0) > least)),
        (0.0,) * steps, (least,) * steps, lipschitz=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", [*CONVEX, "hardest"])
def test_the_mean_over_seeds_obeys_the_bound_after_every_step(name: str, schedule: object) -> None:
    f = hardest(300) if name == "hardest" else objectives.objective(name)
    noise = 0.0 if f.examples is not None else 0.1 if name == "hardest" else 1.0
    made = descend(f, schedule=schedule, steps=300, trajectories=300, noise=noise, record=300)
    limit, norm = theory.bound_of(made)
    assert (made.average_gap[0, 1:] <= limit).all()
    assert norm > 0


def test_the_norm_of_gradients_is_what_theory_says() -> None:
    """Of a quadratic and of least squares it is exact: measured over many paths, at the last step."""
    for name, noise in (("quadratic", 1.0), ("least_squares", 0.0)):
        f = objectives.objective(name)
        norms = theory.gradient_norms(f, [0.05] * 40, f.start, noise)
        x = descend(f, schedule=0.05, steps=39, trajectories=SEEDS, noise=noise).last
        rng = np.random.default_rng(1)
        if f.examples is None:
            g = f.gradient(x) + rng.standard_normal(x.shape)
        else:
            g = f.of_examples(x, rng.integers(len(f.examples[1]), size=(1, SEEDS)))
        squares = (g * g).sum(0)
        assert abs(squares.mean() - norms[-1] ** 2) < 4 * squares.std() / SEEDS**0.5


def test_single_seeds_may_be_above_the_bound_that_their_mean_obeys() -> None:
    f = objectives.absolute(1)
    made = descend(f, schedule=0.025, steps=200, trajectories=500, noise=0.3, record=200, keep=500)
    limit, _ = theory.bound_of(made)
    above = made.average_gaps[1:] > limit[:, None]
    assert above[-1].mean() > 0.1
    assert (made.average_gap[0, 1:] <= limit).all()


@pytest.mark.parametrize("steps", [4, 50, 225])
def test_the_bound_is_met_in_the_worst_case(steps: int) -> None:
    f = hardest(steps)
    made = descend(f, schedule=theory.best_rate(1, 1, steps), steps=steps, noise=0, record=max(steps, 2))
    assert made.average_gap[0, -1] == pytest.approx(1 / math.sqrt(steps), rel=1e-12)  # rL/√T
    assert theory.bound_of(made)[0][-1] == pytest.approx(1 / math.sqrt(steps), rel=1e-12)
    # |x| from r in T steps of length r/T: equal as well, at a rate that is not the best
    line = descend("absolute(1)", schedule=5 / steps, steps=steps, noise=0)
    assert line.average_gap[0, -1] == pytest.approx(theory.bound_of(line)[0][-1], rel=1e-9)


def test_the_best_rate_is_where_the_bound_is_least() -> None:
    best = theory.best_rate(3, 2, 100)
    at = {factor: theory.bound([factor * best] * 100, 3, 2)[-1] for factor in (0.9, 1, 1.1)}
    assert at[1] == pytest.approx(3 * 2 / 10)
    assert at[0.9] > at[1] < at[1.1]


def test_a_step_makes_progress_while_the_gap_is_above_its_limit() -> None:
    f, rate = objectives.absolute(), 0.1
    made = descend(f, schedule=rate, steps=200, trajectories=5000, record=200)
    norm = theory.gradient_norms(f, made.rates, f.start, 1.0)[0]
    gap = theory.progress_gap(rate, norm)
    squares = made.mean**2 + made.std**2  # E of each coordinate's distance, squared
    closer = np.diff(squares.sum(1)) < 0
    above = made.gap[0, :-1] > 1.05 * gap  # of a mean over 5,000 paths
    assert 10 < above.sum() < 150
    assert closer[above].all()
    assert not closer.all()


def test_rates_and_curvature_that_no_theory_covers_are_refused() -> None:
    with pytest.raises(Invalid, match="rosenbrock: its gradients have no bound that is known"):
        theory.gradient_norms(objectives.rosenbrock(), [0.1], (0, 0))
    with pytest.raises(Invalid, match="known for quadratics and least squares"):
        theory.posterior(objectives.objective("logistic"), 0.1)
    assert theory.stationary(0.5, 4) == math.inf


@pytest.mark.parametrize("n", [10, 100, 1000, 10_000, 100_000])
def test_what_draws_with_replacement_show(n: int) -> None:
    tries = max(20, 20_000 // n)
    counts = [np.bincount(draws.order(1, k, n, "with_replacement"), minlength=n) for k in range(tries)]
    for share, exact in (
        ([(count > 0).mean() for count in counts], 1 - (1 - 1 / n) ** n),
        ([(count == 1).mean() for count in counts], (1 - 1 / n) ** (n - 1)),
    ):
        assert abs(np.mean(share) - exact) < 4 * np.std(share) / tries**0.5 + 1e-12
    assert theory.seen(n) == pytest.approx(1 - (1 - 1 / n) ** n)
    assert theory.seen_once(n) == pytest.approx(n / (n - 1) * (1 - 1 / n) ** n)
    without = np.bincount(draws.order(1, 0, n), minlength=n)
    assert (without == 1).all()


def test_sampling_with_replacement_has_more_variance() -> None:
    made = {how: descend("least_squares", schedule=0.001, steps=5000, trajectories=300, sampling=how)
            for how in ("with_replacement", "without_replacement")}  # fmt: skip
    ends = [one.std[-1] for one in made.values()]  # after twenty whole passes
    assert (ends[0] > 2 * ends[1]).all()


def test_noise_on_the_gradient_is_a_random_loss_with_variances_of_a_quarter_and_a_sixteenth() -> None:
    exact = theory.moments((2, 4), (-5, -2), [0.1] * 50).variance[-1] ** 0.5
    for jitter, same in (((0.5, 0.25), True), ((0.5, 0.5), False), ((1.0, 0.25), False)):
        made = descend("quadratic", steps=50, trajectories=SEEDS, noise=0, jitter=jitter)
        near = (abs(made.std[-1] - exact) < 3 * exact / (2 * SEEDS) ** 0.5).all()
        assert near == same
    # Path by path: w = −ξ/h turns one into the other, up to rounding.
    x, h, xi = np.array([-5.0, -2.0]), np.array([2.0, 4.0]), np.random.default_rng(0).standard_normal((50, 2))
    one, other = x, x
    for row in xi:
        one, other = one - 0.1 * (h * one + row), other - 0.1 * h * (other - -row / h)
    assert one == pytest.approx(other, rel=1e-12)


@pytest.mark.parametrize("name", ["least_squares", "quadratic(1, 5)"])
def test_sgld_samples_the_posterior(name: str) -> None:
    f, rate, temperature, m = objectives.objective(name), 0.05, 0.01, 4_000
    mean, covariance = theory.posterior(f, temperature)
    how: dict[str, Any] = {"steps": 400, "trajectories": m, "noise": 0, "sampling": "full", "start": f.minimum}
    made = descend(f, ss.sgld(temperature=temperature), rate, **how)
    assert (abs(made.last.mean(1) - mean) < 4 * (covariance.diagonal() / m) ** 0.5).all()
    # A finite rate makes it wider, by 1/(1 − ηh/2) along each axis of curvature h: the stated error.
    h, axes = np.linalg.eigh(temperature * np.linalg.inv(covariance))
    along = (axes.T @ (made.last - mean[:, None])).var(1)
    assert along == pytest.approx(temperature / (h * (1 - rate * h / 2)), rel=4 * (2 / m) ** 0.5)
    measured = np.cov(made.last)
    assert abs(measured - covariance).max() < (rate * h.max() / 2 + 4 * (2 / m) ** 0.5) * covariance.max()
    cold = descend(
        f,
        ss.sgld(temperature=temperature / 2),
        rate,
        steps=400,
        trajectories=m,
        noise=0,
        sampling="full",
        start=f.minimum,
    )
    assert abs(np.cov(cold.last) - covariance).max() > 0.3 * covariance.max()


def test_the_door_of_the_lab() -> None:
    assert lab.descend is descend
    assert lab.figure("coverage", trajectories=10).panels
