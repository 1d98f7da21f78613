"""What a fit measures, found before it begins: how the model takes its examples, what kind of loss it has, the metrics.

A loss must be one of the batch, whichever way that is cut into shards. One that a user has written is tried: on the first
batch as a whole, and shard by shard. Its gradient is tried, too: at the start of a training all tokens may cost the same, and
then a mean over tokens has the value, but not the gradient, of a mean over shards. Any loss is tried with made-up numbers if
the output is of another shape than y, such as (n, 1) and (n,): most would compare every output with every y.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from samestep import draws
from samestep.backends.losses import MEAN, SUM, WEIGHTED, Measure, Shape, Wide
from samestep.data.convert import narrowed
from samestep.data.feed import Feed, Pass
from samestep.devices import cpu
from samestep.errors import Invalid, OutOfMemory, WrongType
from samestep.processes import place
from samestep.shards import Span, cut, tree_sum
from samestep.signals import heard

if TYPE_CHECKING:
    from samestep.backends.base import Backend, Replica
    from samestep.backends.layout import Numbers
    from samestep.data.examples import Arrays
    from samestep.data.source import Source
    from samestep.devices import Device
    from samestep.training.trainer import Trainer

# By how much two ways to add may differ, of losses and of gradients; a model of float32 may compute in 16 bits.
ROUNDING = {"float32": (1e-3, 1e-2), "float64": (1e-9, 1e-7)}
ALIKE = {  # what to do about shapes of one output and one y
    ((1,), ()): "y[:, None], or output.squeeze(1) in the model",
    ((), (1,)): "y[:, 0], or output[:, None] in the model",
}


def check_metrics(metrics: Any) -> tuple[tuple[str, Any], ...]:
    """The functions of (output, y) by name, from what a user gave."""
    if not isinstance(metrics, Mapping):
        raise WrongType(f"metrics must be a dictionary of functions by name, got {type(metrics).__name__}")
    for name, metric in metrics.items():
        if not (isinstance(name, str) and name.isidentifier()):
            raise WrongType(f"metrics: a name must be a Python name, such as 'top5', got {name!r}")
        if not callable(metric) or name in ("loss", "accuracy"):
            what = "is there already" if callable(metric) else f"must be a function, got {type(metric).__name__}"
            raise WrongType(f"metrics: {name!r} {what}; pass functions of (output, y) that return (sum, weight)")
    return tuple(metrics.items())


def measured(settings: Trainer, backend: Backend, model: Any, examples: Arrays | Source) -> tuple[Shape, Measure]:
    """What the model does with the first example, and what is measured."""
    x, y = examples.read(np.arange(1), settings.seed, 0)
    measure = Measure(settings.loss, MEAN, check_metrics(settings.metrics), backend.style(model, x, y is x))
    with heard(False):  # but not while the model itself computes
        told, name = "", f"{examples.name} x"
        try:
            shape = backend.probe(model, measure, x, y, name)
        except Wide as wide:
            told = str(wide)
        if told:  # not in the `except`: an error of the model's own stands alone
            shape = backend.probe(model, measure, *narrowed(x, y), name)
            if place.find().rank == 0:
                warnings.warn(told, stacklevel=4)
    measure = replace(measure, kind=shape.kind)
    if shape.unlike and compares_all(backend, measure, shape, y.dtype.kind):
        output, target = (f"(n{''.join(f', {size}' for size in one)}{',' * (not one)})" for one in shape.unlike)
        told = f"the output is of shape {output} and {examples.name} y of {target}, and the loss compares every output with"
        raise Invalid(f"{told} every y: use {ALIKE.get(shape.unlike, 'one shape for both')}")
    return shape, measure


def compares_all(backend: Backend, measure: Measure, shape: Shape, kind: str) -> bool:
    """Whether a loss depends on the numbers in y, but not on which y belongs to which output."""
    assert shape.unlike
    chance, (size, axes) = np.random.default_rng(0), ((5, *one) for one in shape.unlike)
    output, y = chance.random(size).astype(shape.dtype), chance.random(axes).astype(shape.dtype)
    if kind != "f":  # 0, 1, 0, 1, 0
        y = np.indices(axes)[0] % 2

    def loss(y: Numbers) -> float:
        tensors = (backend.put(array, cpu()) for array in (output, y))
        return float(np.sum(backend.get(backend.loss_of(measure, *tensors)[0])))

    with warnings.catch_warnings(), suppress(Exception):  # it may want other numbers, and fail in any way
        warnings.simplefilter("ignore")
        right, turned, others = loss(y), loss(np.roll(y, 1, axis=0)), loss(1 - y)
        return abs(turned - right) <= 1e-5 * abs(right) and abs(others - right) > 1e-3 * abs(right)
    return False


def checked(
    settings: Trainer, backend: Backend, model: Any, shape: Shape, measure: Measure, feed: Feed, device: Device,
    trains: bool = True,
) -> Measure:  # fmt: skip
    """What is measured, if the loss of the first batch is the same by its shards as for the whole. A sum shows here, too.

    trains: whether there will be steps, so that the gradient counts, too.
    """
    n, tree, key = min(settings.batch_size, len(feed.examples)), tree_sum, draws.evaluation_keys(settings.seed, 2)
    if not shape.foreign or n < 2:
        return measure
    spans = [(0, n), *(span for span in cut(n, max(2, settings.shards)) if span[0] < span[1])]
    pass_ = feed.start(draws.order(settings.seed, 0, len(feed.examples), settings.sampling), spans)
    replica = backend.replica(model, measure, device, settings.shards, capture=False)

    def evaluate(pass_: Pass, span: Span, key: int) -> Any:
        return backend.get(replica.evaluate(*pass_.shard(span, device), key)).astype(np.float64)

    pass_.prepare(spans)
    try:  # one after the other: what hides something in a global is for the rehearsal to find
        ((whole, *rows),) = backend.map([lambda: [evaluate(pass_, span, key[0]) for span in spans]])
        (again,) = backend.map([partial(evaluate, pass_.again(spans[1]), spans[1], key[1])])
    except OutOfMemory:
        return measure  # the whole is larger than what is to be computed
    if not np.array_equal(again, rows[0], equal_nan=True):
        return measure  # it draws random numbers in evaluation, too: no two of these are alike
    sizes = [hi - lo for lo, hi in spans]
    over = [row[2] for row in (whole, *rows)] if measure.kind == WEIGHTED else sizes
    losses, (rounding, slack) = [row[0] for row in rows], ROUNDING[shape.dtype]

    def alike(by_shards: float, of_whole: float) -> bool:
        least = max(abs(loss / size) for loss, size in zip(losses, sizes[1:], strict=True))  # if they cancel out
        return bool(abs(by_shards - of_whole) <= rounding * max(abs(of_whole), least))

    finite = np.isfinite(whole[0])  # if not, the first step tells; if only shards are not, they have nothing to average
    if not finite or not over[0] or measure.kind == SUM:
        return measure
    by_shards = tree(losses) / tree(over[1:])
    if alike(by_shards, whole[0] / over[0]):
        passes = [pass_.again(span) for span in (*spans, spans[1])] if trains and replica.slopes else []
        try:
            (apart,) = backend.map([partial(_apart, replica, passes, over, key)])
        except OutOfMemory:
            return measure
        if not apart > slack:
            return measure
        told = f"the gradient of the first batch and that by its shards differ by {apart:.1%}"
    else:
        values = [loss / size for loss, size in zip(losses, sizes[1:], strict=True)]
        if measure.kind == MEAN and alike(tree(values), whole[0] / n):
            return replace(measure, kind=SUM)
        told = f"the loss of the first batch is {whole[0] / over[0]:.6g}, and by its shards {by_shards:.6g}"
    again = pass_.again(spans[1]).shard(spans[1], device)
    ((_, traces),) = backend.map([partial(replica.inside, *again)])
    if len(set(traces)) > 1:
        return measure  # it is another program each time it is traced: the rehearsal tells
    how = "Return (sum, weight) from it" if settings.loss else "Pass loss=f(output, batch) that returns (sum, weight)"
    raise Invalid(
        f"{told}: the loss couples examples, or is a mean over something else. {how}, which are added up over the shards and "
        "then divided; or say with loss=samestep.per_shard(f) that the shard is meant"
    )


def _apart(replica: Replica, passes: Sequence[Pass], over: Sequence[float], keys: Sequence[int]) -> float:
    """How far the gradient of a batch is from that by its shards, relative to those of the shards: of the passes, the first
    is over the whole batch, and each other one over a shard; the last is over the first shard once more.

    In evaluation mode, where there is no noise and no statistics of a batch. 0 if there is noise all the same.
    """
    if not passes:
        return 0.0
    layout, get = replica.layouts[0], replica.backend.get

    def gradient(pass_: Pass, key: int) -> Numbers:
        x, y = pass_.shard(pass_.spans[0], replica.device)
        return get(replica.gradient(x, y, key, 0, training=False))[: layout.size]

    far, lengths, (whole, *parts, again) = np.zeros(layout.size, layout.dtype), 0.0, passes
    for i, pass_ in enumerate(parts):
        found = gradient(pass_, keys[0])
        if i == 0 and not np.array_equal(found, gradient(again, keys[1]), equal_nan=True):
            return 0.0
        far += found
        lengths += float(np.linalg.norm(found))
    total = tree_sum(over[1:])
    far -= gradient(whole, keys[0]) * (total / over[0])
    return float(np.linalg.norm(far)) / lengths if lengths else 0.0
