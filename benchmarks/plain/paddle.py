"""A training loop as a user of Paddle writes it: data in memory, batches in a shuffled order, paddle.optimizer.SGD.

Eager, as to_static of the model is not faster on the CPU (backends/paddle.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F


def loop(model: Any, x: np.ndarray, y: np.ndarray, batch: int, rate: float) -> Callable[[int], None]:
    """A function that makes so many steps of SGD on a copy of a paddle.nn.Layer, and waits for the last."""
    model = copy.deepcopy(model)
    model.train()
    examples, labels = paddle.to_tensor(x), paddle.to_tensor(y)
    optimizer = paddle.optimizer.SGD(rate, parameters=model.parameters())

    def go(steps: int) -> None:
        order = paddle.randperm(len(x))
        for i in range(steps):
            start = i * batch % len(x)
            index = order[start : start + batch]
            loss = F.cross_entropy(model(paddle.gather(examples, index)), paddle.gather(labels, index))
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
        loss.item()

    return go
