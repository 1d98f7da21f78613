"""recipe: what it says of the things that a user gives. What a resume makes of it is in tests/runs and tests/conformance."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import samestep as ss
from samestep.models.torch import mlp
from samestep.training.recipe import _name, _tells_all

X = np.random.default_rng(0).standard_normal((12, 4)).astype(np.float32)
Y = np.arange(12) % 3


class Weighted(nn.Module):
    """A loss with weights of its own."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([weight, 1.0, 1.0]))

    def forward(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, y, self.get_buffer("weight"), reduction="none")


class Scaled:
    """A source with a model among its settings."""

    def __init__(self, scale: float) -> None:
        self.scale = Weighted(scale)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, indices: Any) -> Any:
        return X[indices] * np.sign(self.scale.get_buffer("weight")[0].numpy()), Y[indices]


def recipe(seed: int = 1, loss: float = 1.0, source: float = 1.0) -> dict[str, Any]:
    trainer = ss.Trainer(1, 12, shards=2, devices="cpu", loss=Weighted(loss), progress=False, rehearse=False)
    return trainer.fit(mlp((4, 3), seed=seed), Scaled(source)).recipe


def test_weights_of_the_model_are_no_code_those_of_all_else_are() -> None:
    usual = recipe()
    assert usual["unchecked"] == []
    assert usual["numerics"]["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"

    def changed(**other: Any) -> set[str]:
        return {name for name, value in recipe(**other).items() if value != usual[name]}

    assert changed() == set()
    assert changed(seed=2) == {"initial"}
    assert changed(loss=2.0) == changed(source=2.0) == {"code"}


def own(thing: object) -> object:
    """Of a class that a user has made from one of samestep's."""
    return object.__new__(type("Own", (type(thing),), {"__module__": "users", "__repr__": object.__repr__}))


@pytest.mark.parametrize(
    ("thing", "all_of_it"),
    [
        (None, True),
        (ss.sgd(), True),
        (ss.constant(0.1), True),
        (ss.Plateau(0.1), True),
        (own(ss.sgd()), False),
        (own(ss.constant(0.1)), False),
        (ss.cpu(), False),
        (0.1, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_repr_of_samesteps_own_things_says_all(thing: Any, all_of_it: bool) -> None:
    assert _tells_all(thing) == all_of_it


class Called:
    def __call__(self, output: Any, y: Any) -> Any:
        return output


def test_the_name_of_a_loss() -> None:
    called = Called()
    assert _name(None) == "None"
    assert _name(nn.functional.cross_entropy) == "cross_entropy"
    assert _name(functools.partial(nn.functional.cross_entropy, reduction="sum")) == "cross_entropy"
    assert _name(nn.MSELoss()) == "MSELoss()"
    assert _name(called) == _name(functools.partial(called, y=1)) == f"<{Called.__module__}.Called object>"
