"""A training loop as a user of MXNet writes it: hybridized, data in memory, batches in a shuffled order, gluon.Trainer,
and the loss and accuracy of the epoch, as the chapters do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mxnet import autograd, gluon, nd

from samestep import cpu
from samestep.backends.find import load


def loop(model: Any, x: np.ndarray, y: np.ndarray, batch: int, rate: float) -> Callable[[int], tuple[float, float]]:
    """A function that makes so many steps of SGD on a copy of a gluon.HybridBlock, and gives mean loss and accuracy.

    The block itself is hybridized too, so that whoever takes it next has it as fast.
    """
    model.hybridize(static_alloc=True)
    model = load("mxnet").replica(model, None, cpu(), 1).model()
    model.hybridize(static_alloc=True)
    examples, labels = nd.array(x), nd.array(y)
    trainer = gluon.Trainer(model.collect_params(), "sgd", {"learning_rate": rate})
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

    def go(steps: int) -> tuple[float, float]:
        order = nd.array(np.random.permutation(len(x)))
        total, hits = nd.zeros(1), nd.zeros(1)
        for i in range(steps):
            start = i * batch % len(x)
            index = order[start : start + batch]
            wanted = labels.take(index)
            with autograd.record():
                y_hat = model(examples.take(index))
                loss = loss_of(y_hat, wanted)
            loss.backward()
            trainer.step(batch)
            total += loss.sum()
            hits += (y_hat.argmax(1) == wanted).sum()
        return total.asscalar() / steps / batch, hits.asscalar() / steps / batch

    return go
