"""rehearsal: what differs is named, wherever it lies in what a shard gives. What is found at all is in tests/conformance."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import samestep as ss
from samestep import draws
from samestep.errors import NotRepeatable

X = np.random.default_rng(0).standard_normal((12, 4)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, 12)


class Net(nn.Module):
    """Draws from Python's random numbers in one place."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.first, self.middle, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.register_buffer("steady", torch.zeros(3))
        self.register_buffer("drawn", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> Any:
        if self.where == "loss":
            x = x * random.random()
        for name, layer in (("first", self.first), ("middle", self.middle)):
            weight = layer.weight * 1
            if self.where == name and weight.requires_grad:
                weight.register_hook(lambda gradient: gradient * random.random())  # type: ignore[no-untyped-call]
            x = nn.functional.linear(x, weight, layer.bias)
        if self.where == "drawn":
            self.get_buffer("drawn").fill_(random.random())
        return self.last(x)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("loss", "the loss"),
        ("first", "the gradient of 'first.weight'"),
        ("middle", "the gradient of 'middle.weight'"),
        ("drawn", "the change of 'drawn'"),
    ],
)
def test_what_differs_is_named(where: str, name: str, devices: int) -> None:
    trainer = ss.Trainer(1, 12, shards=3, devices=["cpu"] * devices, progress=False)
    with pytest.raises(
        NotRepeatable, match=rf"^shard \d was computed twice before step 0, .*: {name} is not the same; only"
    ):
        trainer.fit(Net(where), (X, Y))


def test_where_nothing_is_drawn_nothing_differs() -> None:
    ss.Trainer(1, 12, shards=3, devices=2, progress=False).fit(Net("nowhere"), (X, Y))


class OfAThread:
    """One of its examples depends on the thread that reads it, whatever is read again there."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, indices: Any) -> tuple[Any, Any]:
        x = X[indices]
        x[indices == SPECIAL, 2] += threading.current_thread() is threading.main_thread()
        return x, Y[indices]


SPECIAL = draws.order(0, 0, 12)[2]


def test_an_example_that_depends_on_the_thread_is_named() -> None:
    line = f"^example {SPECIAL} of train is not the same for another thread; a source must give the same example"
    with pytest.raises(NotRepeatable, match=line):
        ss.Trainer(1, 12, shards=3, progress=False).fit(Net("nowhere"), OfAThread())
    ss.Trainer(1, 12, shards=3, progress=False, rehearse=False).fit(Net("nowhere"), OfAThread())  # nobody notices
