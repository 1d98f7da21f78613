"""Rates for a model of your own, in any framework: a range test, and the largest stable rate that its curvature implies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any
from unittest.mock import patch

import numpy as np

from samestep import draws
from samestep.checks import above_zero, whole
from samestep.data.feed import Batch
from samestep.errors import Invalid
from samestep.optimizers.rules import SGD
from samestep.screen.pictures import Curve, Panel, Picture
from samestep.signals import heard
from samestep.training.fit import Fit
from samestep.training.group import Made
from samestep.training.trainer import Trainer, matching

SMOOTH = 0.9  # of the smoothed loss, how much is kept with each step
WORSE = 4  # a loss so many times the least one has diverged
BELOW = 10  # the rate that is suggested is so many times below that of the least loss
NUDGE = 1e-2  # how far weights are moved to measure curvature, against their length: it smooths kinks
EXAMPLES = 2048  # of which curvature is measured, or an epoch if it has fewer
SETTLED = 5, 0.01  # power iteration ends when this many products have changed the value by no more than this share


class Taken(BaseException):
    """Ends a script at its first fit, and holds what it would train, and how."""

    def __init__(self, trainer: Trainer, model: Any, data: Any, weights: Any = None) -> None:
        self.fit = trainer, model, data, weights


def taken(run: Callable[[], object]) -> tuple[Trainer, Any, Any, Any]:
    """What some code would train at its first fit: a Trainer, a model, data, and weights to start from. It ends there."""

    def take(*given: Any, **named: Any) -> None:
        raise Taken(*given, **named)

    with patch.object(Trainer, "fit", take):
        try:
            run()
        except Taken as found:
            return found.fit
    raise Invalid("nothing was trained: the script must make a samestep.Trainer and call its fit")


@contextmanager
def prepared(trainer: Trainer, model: Any, data: Any, weights: Any = None) -> Iterator[Fit]:
    """A fit that is ready for its first step, and makes none by itself. It writes nothing."""
    backend, data = matching(model, data, optimizer=trainer.optimizer, schedule=trainer.schedule, loss=trainer.loss)
    with trainer.session(backend) as (devices, world), heard():
        fit = Fit(replace(trainer, average=None), backend, model, data, devices, world, weights)
        try:
            fit.group.follow()
            yield fit
        finally:
            fit.close_feeds()
            fit.group.close()


def batches(fit: Fit) -> Iterator[Batch]:
    """Batch after batch, without end, as the fit would take them."""
    for t in count():
        epoch, i = divmod(t, len(fit.batches))
        if i == 0:
            pass_, keys = fit.passing(epoch), draws.keys_from(fit.settings.seed, t, fit.settings.shards)
        pass_.prepare(fit.group.spans_here([fit.batches[i]]) if fit.feed.here else [])
        yield Batch(pass_, fit.batches[i], next(keys))


def range_test(fit: Fit, low: float = 1e-5, high: float = 10.0, steps: int = 100) -> Picture:
    """Train with a rate that grows from step to step, until the loss diverges: its losses, and the rate that they suggest."""
    if above_zero("", "the lowest rate", low) >= above_zero("", "the highest rate", high):
        raise Invalid(f"the lowest rate must be below the highest, got {low:g} and {high:g}")
    if fit.rates.inside:
        raise Invalid(
            "this optimizer has its rate inside, where a range test cannot change it: use another one for the test"
        )
    losses, smooth, mean, diverged = list[float](), list[float](), 0.0, False
    rates = np.geomspace(low, high, whole("", "steps", steps, 10))
    for t, (lr, batch) in enumerate(zip(rates.tolist(), batches(fit), strict=False)):
        numbers = fit.group.step(batch, lr, t)
        loss = Made(t, batch.examples, fit.group, numbers, None, fit.shape).loss  # waits for the device
        mean = SMOOTH * mean + (1 - SMOOTH) * loss
        if diverged := not np.isfinite(loss):
            break
        losses.append(loss)
        smooth.append(mean / (1 - SMOOTH ** (t + 1)))
        if diverged := smooth[-1] - min(smooth) > (WORSE - 1) * abs(min(smooth)):
            break
    if not losses:
        raise Invalid(f"the loss is not finite at the first step, with rate {low:g}: look at the model and its data")
    best, used = int(np.argmin(smooth)), rates[: len(losses)]
    end = f"it diverges at {used[-1]:.2g}" if diverged else f"it is finite up to {high:g}"
    curves = [Curve("of each step", used, losses, kind="thin"), Curve("smoothed", used, smooth)]
    hint = f"It does not fall: try more steps, or rates from below {low:g} on."
    if best:
        suggested = float(f"{used[best] / BELOW:.1g}")  # one digit: it is a hint
        curves.append(Curve("suggestion", [suggested], [np.interp(suggested, used, smooth)], kind="points"))
        hint = f"A rate to try: {suggested:g}."
    says = f"The loss is least at a rate of {used[best]:.2g}; {end}. {hint}"
    return Picture("Range test", [Panel(f"{len(used)} steps", "rate", "loss", curves, "x")], says)


@dataclass(frozen=True)
class Curvature:
    """The largest eigenvalue of the Hessian of a batch's loss, and the rates up to which descent on it is stable."""

    eigenvalue: float
    products: int  # of the Hessian with a vector
    converged: bool
    momentum: float  # of the script's own SGD; 0 for other optimizers

    def rate(self, momentum: float = 0.0) -> float:
        """2/λ; with momentum β (2 + 2β)/λ."""
        return (2 + 2 * momentum) / self.eigenvalue if self.eigenvalue > 0 else np.inf


def curvature(fit: Fit, most: int = 200) -> Curvature:
    """The largest eigenvalue for the first batches, to about 1 %, by power iteration over differences of gradients.

    Of models with kinks (ReLU, max-pool) it is the curvature over a hundredth of the length of the weights.
    """
    most, group = whole("", "products", most, 2), fit.group
    several = min(len(fit.batches), -(-EXAMPLES // fit.settings.batch_size))
    first, backend = group.replicas[0], fit.backend
    layout, x = first.layouts[0], np.array(backend.get(first.parameters), np.float64)
    step = NUDGE * (float(np.linalg.norm(x)) or 1.0)

    def gradient(at: Any) -> Any:
        for replica in group.replicas:
            replica.assign(replica.to_vector(at.astype(layout.dtype)))
        each = [(batch.examples, np.array(backend.get(group.gradient(batch)), np.float64))
                for batch in islice(batches(fit), several)]  # fmt: skip
        return np.average([g for _, g in each], 0, [n for n, _ in each])

    def largest(shift: float) -> tuple[list[float], bool]:
        """Estimates of the eigenvalue of H − shift·I that is largest in size, and whether they have settled."""
        v, values, (back, share) = draws.lab(fit.settings.seed, 0, 0).standard_normal(len(x)), list[float](), SETTLED
        for gap in layout.padding:
            v[gap] = 0
        while len(values) < most and np.any(v):
            v /= np.linalg.norm(v)
            product = (gradient(x + step * v) - gradient(x - step * v)) / (2 * step) - shift * v
            values.append(float(v @ product))
            if len(values) > back and abs(values[-1] - values[-1 - back]) <= share * abs(values[-1]):
                return values, True
            v = product
        return values, False

    values, settled = largest(0.0)
    eigenvalue, products = values[-1], len(values)
    if eigenvalue < 0:  # the one of largest size is negative; seen from there, the largest one is farthest away
        values, also = largest(eigenvalue)
        eigenvalue, products, settled = eigenvalue + values[-1], products + len(values), settled and also
    gradient(x)  # puts the weights back
    optimizer = fit.settings.optimizer
    return Curvature(eigenvalue, products, settled, optimizer.momentum if isinstance(optimizer, SGD) else 0.0)
