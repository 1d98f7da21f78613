"""objectives: gradients, minima and constants are what they say; what cannot be one is refused."""

from __future__ import annotations

import numpy as np
import pytest

from samestep.errors import Invalid, SamestepError
from samestep.lab import objectives
from samestep.lab.objectives import Objective, minima, objective

NAMES = ["quadratic", "quadratic(1, 100)", "quadratic(3)", "rosenbrock", "absolute", "wells", "wells(2)",
         "least_squares", "logistic"]  # fmt: skip
RNG = np.random.default_rng(0)


def numeric(f: Objective, x: np.ndarray) -> np.ndarray:
    e = 1e-6 * np.eye(len(x))
    return np.array([(f.value(x + row) - f.value(x - row)) / 2e-6 for row in e])


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_that_of_the_value(name: str) -> None:
    f = objective(name)
    for _ in range(10):
        x = np.array(f.start) + RNG.standard_normal(len(f.start))
        assert f.gradient(x) == pytest.approx(numeric(f, x), rel=1e-5, abs=1e-5)
    twin = Objective("broken", f.value, lambda x: 1.02 * f.gradient(x) + 0.01, f.start)
    assert twin.gradient(x) != pytest.approx(numeric(f, x), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_one_point_many_points_and_a_mesh_give_the_same(name: str) -> None:
    f = objective(name)
    mesh = RNG.standard_normal((len(f.start), 3, 4))
    values, gradients = f.value(mesh), f.gradient(mesh)
    for i, j in ((0, 0), (2, 3)):
        assert values[i, j] == pytest.approx(f.value(mesh[:, i, j]), rel=1e-12)
        assert gradients[:, i, j] == pytest.approx(f.gradient(mesh[:, i, j]), rel=1e-12)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "wells"])
def test_nothing_is_below_the_minimum(name: str) -> None:
    f = objective(name)
    for scale in (1e-3, 0.1, 10):
        around = np.array(f.minimum)[:, None] + scale * RNG.standard_normal((len(f.start), 1000))
        assert (f.value(around) >= f.least).all()


@pytest.mark.parametrize("name", ["quadratic", "quadratic(1, 100)", "least_squares", "logistic"])
def test_curvature_is_between_its_bounds_and_they_are_met(name: str) -> None:
    f, e = objective(name), 1e-4
    low, high = f.curvature or (0, 0)
    seen = []
    for scale in (0.01, 1, 5):
        x = np.array(f.minimum) + scale * RNG.standard_normal(len(f.start))
        h = np.array([(f.gradient(x + e * row) - f.gradient(x - e * row)) / (2 * e) for row in np.eye(len(x))])
        seen += np.linalg.eigvalsh((h + h.T) / 2).tolist()
    assert low - 1e-6 <= min(seen)
    assert max(seen) <= high + 1e-6
    if name != "logistic":  # whose second derivative is at most a quarter, and less than that where it was looked at
        assert (min(seen), max(seen)) == (pytest.approx(low, rel=1e-4), pytest.approx(high, rel=1e-4))


@pytest.mark.parametrize("name", ["absolute", "absolute(1)", "logistic"])
def test_gradients_are_within_the_lipschitz_constant_everywhere_and_reach_it(name: str) -> None:
    f = objective(name)
    if f.examples is not None:
        x = 1e3 * RNG.standard_normal((2, 400))
        each = np.stack([f.of_examples(x, np.full((1, 400), i)) for i in range(len(f.examples[1]))])
        norms = (each**2).sum(1).mean(0) ** 0.5
    else:
        norms = np.linalg.norm(f.gradient(10 * RNG.standard_normal((len(f.start), 400))), axis=0)
    assert norms.max() <= (f.lipschitz or 0) * (1 + 1e-12)
    assert norms.max() > 0.7 * (f.lipschitz or 0)


def test_the_gradients_of_all_examples_have_the_gradient_as_their_mean() -> None:
    for name in ("least_squares", "logistic"):
        f = objective(name)
        n, x = len((f.examples or [0, []])[1]), RNG.standard_normal((2, 3))
        everything = f.of_examples(x, np.arange(n)[:, None].repeat(3, 1))
        assert everything == pytest.approx(f.gradient(x), rel=1e-12)
        assert f.of_examples(x, np.arange(n - 1)[:, None].repeat(3, 1)) != pytest.approx(f.gradient(x), rel=1e-12)


def test_least_squares_has_the_minimum_of_numpy() -> None:
    a, y = RNG.standard_normal((40, 3)), RNG.standard_normal(40)
    f = objectives.least_squares(a, y)
    assert f.minimum == pytest.approx(np.linalg.lstsq(a, y, rcond=None)[0])
    assert f.start == (-2.0, -1.0, 0.0)


def test_all_minima_of_the_wells() -> None:
    found = minima(objectives.wells(), -30, 30)
    exact = sorted([0.0, *(-np.pi / 2 + 2 * np.pi * k for k in range(-4, 6))])
    assert found == pytest.approx(exact, abs=1e-9)
    f = objectives.wells()
    assert f.value(found[None]) == pytest.approx(0, abs=1e-12)
    for x in found:  # verified: both sides are higher, and it is flat there
        assert f.value(np.array([x - 1e-3])) > f.value(np.array([x])) < f.value(np.array([x + 1e-3]))
    dense = np.linspace(-30, 30, 600_001)
    values = f.value(dense[None])
    assert ((values[1:-1] < values[:-2]) & (values[1:-1] < values[2:])).sum() == len(exact)


@pytest.mark.parametrize("hidden", range(-4, 6))
def test_a_hidden_well_is_the_deepest_and_nothing_outside_tells_of_it(hidden: int) -> None:
    plain, f = objectives.wells(), objectives.wells(hidden)
    at = -np.pi / 2 + 2 * np.pi * hidden
    x = np.linspace(-30, 30, 5001)
    outside = x[abs(x - at) > 1]
    assert f.minimum == (at,)
    assert f.least == pytest.approx(-1)
    assert (f.value(outside[None]) == plain.value(outside[None])).all()
    assert (f.gradient(outside[None]) == plain.gradient(outside[None])).all()
    found = minima(f, -30, 30)
    deepest = found[f.value(found[None]).argmin()]
    assert (len(found), deepest) == (11, pytest.approx(at))
    others = found[abs(found - at) > 1]  # who visits all wells but one has seen only zeros
    assert f.value(others[None]) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("quadratc", "there is no 'quadratc'; did you mean quadratic?"),
        ("quadratic(1, x)", "cannot read 'quadratic(1, x)'"),
        ("quadratic(0, 1)", "quadratic: each curvature must be above 0"),
        ("quadratic(1e999)", "quadratic: each curvature must be finite"),
        ("absolute(0)", "absolute: d must be at least 1, got d=0"),
        ("absolute(10000000)", "d must be at most 10000"),
        ("wells(1.5)", "wells: hidden must be a whole number"),
        ("rosenbrock(3)", "cannot read 'rosenbrock(3)': too many positional arguments"),
        ("", "cannot read ''"),
        ("().__class__()", "cannot read '().__class__()': write a name"),
        ("quadratic(" * 300 + ")" * 300, "cannot read"),
    ],
)
def test_what_is_no_objective_is_refused(text: str, says: str) -> None:
    with pytest.raises(SamestepError) as refused:
        objective(text)
    assert says in str(refused.value)


def test_examples_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(Invalid, match="a plane separates the classes"):
        objectives.logistic([[1.0], [2.0], [-1.0]], [1, 1, -1])
    with pytest.raises(Invalid, match=r"needs finite a of shape \(n, d\)"):
        objectives.least_squares([1.0, 2.0], [1.0, 2.0])
    with pytest.raises(Invalid, match="needs finite a"):
        objectives.least_squares([[np.nan]], [1.0])
