"""Evaluation: the mean loss and the accuracy over all examples, each taken once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from samestep import draws
from samestep.backends.base import Backend, Shape
from samestep.data.feed import Batch, Feed
from samestep.shards import cut_pass, tree_sum

if TYPE_CHECKING:
    from samestep.devices import Device
    from samestep.training.group import Group
    from samestep.training.settings import Settings


def probe(backend: Backend, settings: Settings, model: Any, examples: Any) -> Shape:
    """What the model does with the first example."""
    x, y = examples.read(np.arange(1))
    return backend.probe(model, settings.loss, x, y, f"{examples.name} x")


def feed_of(backend: Backend, settings: Settings, examples: Any, devices: Sequence[Device], shape: Shape) -> Feed:
    return Feed(backend, examples, devices, shape.classes if settings.loss is None else None)


def evaluate(settings: Settings, group: Group, feed: Feed, shape: Shape) -> tuple[float, float | None]:
    """Mean loss and accuracy over all examples of a feed."""
    n = len(feed.examples)
    spans = [span for batch in cut_pass(n, settings.batch_size, settings.shards) for span in batch]
    keys = draws.evaluation_keys(settings.seed, len(spans))
    pass_ = feed.start(np.arange(n), group.spans_here([spans]))
    table = group.evaluate(Batch(pass_, spans, keys))
    accuracy = None if shape.classes is None else float(table[:, 1].sum()) / n
    return tree_sum(table[:, 0].tolist()) / n, accuracy
