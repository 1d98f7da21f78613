"""A training loop as a user of MXNet writes it: hybridized, data in memory, batches in a shuffled order, gluon.Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mxnet import autograd, gluon, nd

from samestep import cpu
from samestep.backends import load


def loop(model: Any, x: np.ndarray, y: np.ndarray, batch: int, rate: float) -> Callable[[int], None]:
    """A function that makes so many steps of SGD on a copy of a gluon.Block, and waits for the last."""
    model = load("mxnet").replica(model, None, cpu(), 1).model()
    model.hybridize(static_alloc=True)
    examples, labels = nd.array(x), nd.array(y)
    trainer = gluon.Trainer(model.collect_params(), "sgd", {"learning_rate": rate})
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

    def go(steps: int) -> None:
        order = nd.array(np.random.permutation(len(x)))
        for i in range(steps):
            start = i * batch % len(x)
            index = order[start : start + batch]
            with autograd.record():
                loss = loss_of(model(examples.take(index)), labels.take(index))
            loss.backward()
            trainer.step(batch)
        nd.waitall()

    return go
