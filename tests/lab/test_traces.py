"""traces: the points that a trainer visits, and the figure of them."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from samestep import lab
from samestep.d2l import torch as d2l


@pytest.fixture(autouse=True)
def figures() -> Iterator[None]:
    mpl.use("agg")
    yield
    plt.close("all")


def f(x1, x2):
    return x1**2 + 2 * x2**2


def f_grad(x1, x2):
    return 2 * x1, 4 * x2


def descent(x1, x2, s1, s2, f_grad):
    g1, g2 = f_grad(x1, x2)
    return x1 - 0.1 * g1, x2 - 0.1 * g2, s1 + 1, 0


def test_the_chapters_names_are_those_of_the_lab() -> None:
    assert d2l.train_2d is lab.train_2d
    assert d2l.show_trace_2d is lab.show_trace_2d


def test_a_path_begins_where_the_chapters_do(capsys: pytest.CaptureFixture[str]) -> None:
    path = lab.train_2d(descent, steps=50, f_grad=f_grad)
    assert (len(path), path[0]) == (51, (-5.0, -2.0))
    assert path[1] == (-4.0, -1.2)
    assert path[50] == pytest.approx((-5 * 0.8**50, -2 * 0.6**50))
    assert capsys.readouterr().out == f"epoch 50, x1: {path[50][0]:f}, x2: {path[50][1]:f}\n"


def test_a_trainer_keeps_its_state_and_may_do_without_a_gradient() -> None:
    seen = []

    def trainer(x1, x2, s1, s2):
        seen.append((s1, s2))
        return x1 + 1, x2, s1 + 1, s2 + 2

    assert lab.train_2d(trainer, steps=3)[-1] == (-2.0, -2.0)
    assert seen == [(0, 0), (1, 2), (2, 4)]


@pytest.mark.parametrize("of_one", [torch.tensor([0.5]), np.array([0.5]), np.float32(0.5), 0.5])
def test_arrays_of_one_number_are_numbers(of_one: object) -> None:
    assert lab.train_2d(lambda *_: (of_one, of_one, 0, 0), steps=1)[-1] == (0.5, 0.5)


def test_the_figure_has_the_path_over_contours_and_shows_all_of_it() -> None:
    path = [(-5.0, -2.0), (3.0, 2.0), (0.0, -4.0)]
    lab.show_trace_2d(f, path)
    axes = plt.gcf().axes[0]
    assert axes.lines[0].get_xydata().tolist() == [list(point) for point in path]
    assert len(axes.collections) == 1  # the contours
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("x1", "x2")
    left, right, low, high = *axes.get_xlim(), *axes.get_ylim()
    assert left <= -5.5 < 3 <= right
    assert low <= -4 < 2 <= high
