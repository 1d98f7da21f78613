"""A training loop as a user of Paddle writes it: data in memory, batches in a shuffled order, paddle.optimizer.SGD,
and the loss and accuracy of the epoch, as the chapters do.

Eager, as to_static of the model is not faster on the CPU (backends/paddle.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F

THREADS = 1  # with which Paddle computes unless it is told otherwise


def loop(model: Any, x: np.ndarray, y: np.ndarray, batch: int, rate: float) -> Callable[[int], tuple[float, float]]:
    """A function that makes so many steps of SGD on a copy of a paddle.nn.Layer, and gives mean loss and accuracy."""
    model = copy.deepcopy(model)
    model.train()
    examples, labels = paddle.to_tensor(x), paddle.to_tensor(y)
    optimizer = paddle.optimizer.SGD(rate, parameters=model.parameters())

    def go(steps: int) -> tuple[float, float]:
        order = paddle.randperm(len(x))
        total, hits = paddle.zeros([]), paddle.zeros([], "int64")
        for i in range(steps):
            start = i * batch % len(x)
            index = order[start : start + batch]
            y_hat, wanted = model(paddle.gather(examples, index)), paddle.gather(labels, index)
            loss = F.cross_entropy(y_hat, wanted)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            with paddle.no_grad():
                total += loss * batch
                hits += (y_hat.argmax(1) == wanted).sum()
        return float(total) / steps / batch, float(hits) / steps / batch

    return go
