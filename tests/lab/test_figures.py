"""figures: every one draws, says what it found, takes the options that it names and refuses others."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import samestep as ss
from samestep import lab
from samestep.errors import Invalid
from samestep.lab.figures import FIGURES, figure

QUICK = {"steps": 30, "trajectories": 20}


def quick(name: str, **more: object) -> dict[str, object]:
    return {n: v for n, v in QUICK.items() if n in FIGURES[name].takes and n not in more} | more


def curves(name: str, **options: object) -> list[tuple[str, str]]:
    picture = figure(name, **options)
    return [(panel.title, curve.label) for panel in picture.panels for curve in panel.curves]


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_draws_and_says_what_it_found(name: str, tmp_path: Path) -> None:
    picture = figure(name, **quick(name))
    path = tmp_path / f"{name}.png"
    picture.save(path)
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert picture._repr_png_()[:4] == b"\x89PNG"
    assert re.fullmatch(r"[A-Z0-9κ].*\.", picture.says)
    rows = list(picture.rows())
    assert {(row["panel"], row["curve"]) for row in rows} == {
        (p.title, c.label) for p in picture.panels for c in p.curves
    }
    assert all(isinstance(row["y"], float) for row in rows)
    assert str(FIGURES[name].make.__doc__).endswith(".")


@pytest.mark.parametrize("name", [name for name in FIGURES if "seed" in FIGURES[name].takes and name != "wells"])
def test_the_seed_decides(name: str) -> None:
    one, again, other = (list(figure(name, **quick(name, seed=seed)).rows()) for seed in (1, 1, 2))
    assert one == again
    assert one != other


def test_the_chapters_three_runs_have_its_steps() -> None:
    assert curves("path") == [
        ("constant(0.1), 50 steps", "50 steps"), ("natural_exp(0.1, 0.1).shift(2), 1000 steps", "1000 steps"),
        ("inverse_power(0.1, beta=0.1).shift(2), 50 steps", "50 steps"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "panels"),
    [
        ({"noise": [0, 1]}, ["noise 0", "noise 1"]),  # the defaults that belong together give way
        ({"schedule": 0.05}, ["0.05"]),
        ({"steps": 7}, ["constant(0.1)", "natural_exp(0.1, 0.1).shift(2)", "inverse_power(0.1, beta=0.1).shift(2)"]),
        ({"schedule": [0.1, 0.2], "noise": 0}, ["0.1", "0.2"]),
        ({"optimizer": ["sgd", "adam"], "schedule": [0.1, 0.2]}, ["sgd, 0.1", "adam, 0.2"]),
        ({"optimizer": ss.sgd(momentum=0.5), "schedule": 0.1}, ["0.1"]),
        ({"steps": [3, 4]}, ["3 steps", "4 steps"]),
    ],
)
def test_settings_side_by_side(options: dict[str, object], panels: list[str]) -> None:
    assert [title for title, _ in curves("path", **options)] == panels


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("pth", {}, "there is no 'pth'; did you mean path?"),
        ("coverage", {"noise": 1}, "coverage takes seed, trajectories; it has no use for noise"),
        ("path", {"noise": [0, 1], "schedule": [0.1, 0.2, 0.3]}, "got 3 of schedule, 2 of noise"),
        ("path", {"objective": "absolute(3)"}, "needs an objective of two coordinates, absolute(3) has 3"),
        ("path", {"optimizer": "sgdd"}, "optimizer: there is no 'sgdd'; did you mean sgd"),
        ("path", {"optimizer": "sgd(speed=1)"}, "got an unexpected keyword argument 'speed'"),
        ("bound", {"objective": "rosenbrock"}, "its gradients have no bound that is known"),
        ("floor", {"steps": 0}, "figure: steps must be at least 1"),
        ("path", {"steps": [5, 0], "schedule": [0.1, 0.1]}, "figure: steps must be at least 1"),
        ("rate", {"objective": "quadratic"}, "needs an objective with bounded gradients"),
        ("sgld", {"objective": "logistic"}, "known for quadratics and least squares alone"),
    ],
)
def test_bad_input_is_refused(name: str, options: dict[str, object], says: str) -> None:
    with pytest.raises(Invalid) as refused:
        figure(name, **options)
    assert says in str(refused.value)


def test_what_figures_say_is_measured() -> None:
    assert "1037 steps" in figure("conditioning").says
    assert figure("conditioning", steps=100).says == "κ = 300 takes nan steps, κ = 1.2 takes 3."  # never near in so few
    assert figure("wells").says.startswith("11 minima, all 0;")
    shares = [float(share) for share in re.findall(r"([\d.]+)%", figure("sgld", steps=300).says)]
    assert shares == [pytest.approx(50, abs=5), pytest.approx(95, abs=2)]
    gaps = [float(gap) for gap in re.findall(r"([\d.e-]+) with", figure("cost").says)]
    assert gaps == sorted(gaps)  # the fewer examples a step takes, the further they have brought it
    reached = float(re.findall(r"at most ([\d.]+)%", figure("bound", steps=200, trajectories=300).says)[0])
    assert 99 < reached <= 100


def test_a_path_that_diverges_is_shown_until_it_is_far_away() -> None:
    picture = figure("path", schedule=1.2, steps=200, noise=0)
    assert picture.says == "The paths end at infinity (it diverges)."
    (curve,) = picture.panels[0].curves
    assert len(curve.x) == 10
    assert np.abs(curve.x).max() < 1e6


def test_the_door_of_the_lab() -> None:
    assert lab.figure is figure
    assert lab.FIGURES is FIGURES


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("distance", {"schedule": 1e9}), ("bound", {"objective": "quadratic", "schedule": 1e9}), ("floor", {"schedule": 3.0}),
        ("path", {"schedule": 1e300}), ("bound", {"objective": "least_squares", "schedule": 1e3}),
        ("sgld", {"schedule": 500.0}), ("average", {"objective": "rosenbrock", "schedule": 1.0}),
        ("adaptive", {"schedule": 1e200}), ("conditioning", {"steps": 1}), ("random-loss", {"steps": 1}),
    ],
)  # fmt: skip
def test_what_diverges_or_is_short_is_drawn_without_a_warning(name: str, options: dict[str, object]) -> None:
    assert figure(name, **quick(name, **options))._repr_png_()[:4] == b"\x89PNG"
