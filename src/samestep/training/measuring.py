"""What a fit measures, found before it begins: how the model takes its examples, what kind of loss it has, the metrics.

A loss must be one of the batch, whichever way that is cut into shards. One that a user has written is tried: on the first
batch as a whole, and shard by shard. Its gradient is tried, too: at the start of a training all tokens may cost the same, and
then a mean over tokens has the value, but not the gradient, of a mean over shards. A loss of the framework's is tried, too, if
the output is of shape (n, 1) and y of (n,): most would compare every output with every y.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from samestep import draws
from samestep.backends.losses import MEAN, SUM, WEIGHTED, Measure, Shape, Wide
from samestep.data.convert import narrowed
from samestep.data.feed import Feed, Pass
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
ORDER = {"float32": 1e-5, "float64": 1e-12}  # the same numbers, added in another order


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
    return shape, replace(measure, kind=shape.kind)


def checked(
    settings: Trainer, backend: Backend, model: Any, shape: Shape, measure: Measure, feed: Feed, device: Device,
    trains: bool = True,
) -> Measure:  # fmt: skip
    """What is measured, if the loss of the first batch is the same by its shards as for the whole. A sum shows here, too.

    trains: whether there will be steps, so that the gradient counts, too.
    """
    n, tree, key = min(settings.batch_size, len(feed.examples)), tree_sum, draws.evaluation_keys(settings.seed, 2)
    unlike = shape.column is not None  # the shapes of output and y
    if not (shape.foreign or unlike) or n < 2:
        return measure
    spans = [(0, n), *(span for span in cut(n, max(2, settings.shards)) if span[0] < span[1])]
    sampling = "without_replacement" if unlike else settings.sampling  # in order, all y of a batch may be equal
    pass_ = feed.start(draws.order(settings.seed, 0, len(feed.examples), sampling), spans)
    replica = backend.replica(model, measure, device, settings.shards, capture=False)

    def evaluate(pass_: Pass, span: Span, key: int, turned: bool = False) -> Any:
        x, y = pass_.shard(span, device)
        if turned:  # every output meets the y of another example
            y = backend.put(np.roll(backend.get(y), 1, axis=0), device)
        return backend.get(replica.evaluate(x, y, key)).astype(np.float64)

    pass_.prepare(spans)
    try:  # one after the other: what hides something in a global is for the rehearsal to find
        ((whole, *rows),) = backend.map([lambda: [evaluate(pass_, span, key[0]) for span in spans]])
        (again,) = backend.map([partial(evaluate, pass_.again(spans[1]), spans[1], key[1])])
    except OutOfMemory:
        return measure  # the whole is larger than what is to be computed
    if not np.array_equal(again, rows[0], equal_nan=True):
        return measure  # it draws random numbers in evaluation, too: no two of these are alike
    sizes, (rounding, slack) = [hi - lo for lo, hi in spans], ROUNDING[shape.dtype]
    over = _over(measure.kind, [whole, *rows], sizes)
    # If the whole is not finite, the first step tells; if only shards are not, they have nothing to average.
    if not np.isfinite(whole[0]) or not over[0] or (measure.kind == SUM and not unlike):
        return measure
    kind = _kind(measure.kind, [whole, *rows], sizes, rounding)
    if kind == measure.kind:
        passes = [pass_.again(span) for span in (*spans, spans[1])] if trains and replica.slopes else []
        try:
            (apart,) = backend.map([partial(_apart, replica, passes, over, key)])
        except OutOfMemory:
            return measure
        if not apart > slack:
            return measure
        told = f"the gradient of the first batch and that by its shards differ by {apart:.1%}"
    elif kind:
        return replace(measure, kind=kind)
    else:
        by_shards = tree([row[0] for row in rows]) / tree(over[1:])
        told = f"the loss of the first batch is {whole[0] / over[0]:.6g}, and by its shards {by_shards:.6g}"
    again = pass_.again(spans[1]).shard(spans[1], device)
    ((_, traces),) = backend.map([partial(replica.inside, *again)])
    if len(set(traces)) > 1:
        return measure  # it is another program each time it is traced: the rehearsal tells
    turn = partial(evaluate, pass_.again(spans[0]), spans[0], key[0], turned=True)
    turned = backend.map([turn])[0] if unlike else [np.inf]
    if abs(turned[0] - whole[0]) <= ORDER[shape.dtype] * abs(whole[0]):  # whichever y belongs to an output
        two, how = f"({n}, 1) and y of ({n},)", "y[:, None], or output.squeeze(1)"
        if not shape.column:
            two, how = f"({n},) and y of ({n}, 1)", "y[:, 0], or output[:, None]"
        told = f"the output is of shape {two}, and the loss compares every output with every y"
        raise Invalid(f"{told}: use {how} in the model")
    how = "Return (sum, weight) from it" if settings.loss else "Pass loss=f(output, batch) that returns (sum, weight)"
    raise Invalid(
        f"{told}: the loss couples examples, or is a mean over something else. {how}, which are added up over the shards and "
        "then divided; or say with loss=samestep.per_shard(f) that the shard is meant"
    )


def _over(kind: str, table: Sequence[Any], sizes: Sequence[float]) -> Sequence[float]:
    """What the losses of a batch and of its shards are divided by; `table` has [loss, hits, more] of each."""
    if kind == SUM:
        return [1.0, *(1 / len(table[1:]) for _ in table[1:])]
    return [row[2] for row in table] if kind == WEIGHTED else sizes


def _kind(kind: str, table: Sequence[Any], sizes: Sequence[float], rounding: float) -> str | None:
    """As what the loss of a batch follows from those of its shards: as this kind, or as a sum; None: it does not."""
    over, (whole, *losses) = _over(kind, table, sizes), [row[0] for row in table]
    values = [loss / size for loss, size in zip(losses, sizes[1:], strict=True)]

    def alike(by_shards: float, of_whole: float) -> bool:
        most = max(abs(of_whole), *map(abs, values))  # they may cancel out
        return bool(abs(by_shards - of_whole) <= rounding * most)

    if alike(tree_sum(losses) / tree_sum(over[1:]), whole / over[0]):
        return kind
    return SUM if kind == MEAN and alike(tree_sum(values), whole / sizes[0]) else None


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
