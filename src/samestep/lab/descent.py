"""Gradient descent along thousands of paths at once, with any optimizer and any schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from samestep import draws
from samestep.checks import choice, finite, number, show, whole
from samestep.errors import Invalid
from samestep.lab.objectives import Numbers, Objective, objective
from samestep.optimizers.rules import Optimizer, sgd
from samestep.schedules.algebra import Schedule
from samestep.schedules.plateau import Plateau
from samestep.schedules.rates import RateLike, check_schedule, counts, rate

SAMPLINGS = ("with_replacement", "without_replacement", "full")
MOST = 10**8  # numbers in memory at once
BAND = (0.1, 0.9)  # quantiles


@dataclass(frozen=True, eq=False)
class Descent:
    """What became of the paths. Arrays follow the times `t`; the rows of a band are the mean, and the 10 % and 90 % quantiles.

    t              numbers of updates made at which was measured: 0, …, steps; rates: of every update
    mean, std      of each coordinate over the paths, (times, d)
    distance       band of the distance to the minimum; gap: of f(x) − f(minimum)
    average_gap    the same for x̄, the average of the points before the last, weighted by their rates
    last           where the paths have ended, (d, paths)
    paths          every point of the first ones, (steps + 1, d, kept); average_gaps: of these, (times, kept)
    """

    objective: Objective
    start: Numbers
    noise: float
    rates: Numbers
    t: Numbers
    last: Numbers
    paths: Numbers
    mean: Numbers
    std: Numbers
    distance: Numbers
    gap: Numbers
    average_gap: Numbers
    average_gaps: Numbers


def descend(
    on: str | Objective, optimizer: Optimizer | None = None, schedule: RateLike = 0.1, *, steps: int = 50,
    trajectories: int = 1, start: Sequence[float] | None = None, noise: float | None = None,
    jitter: float | Sequence[float] = 0.0, sampling: str | None = None, batch: int = 1, seed: int = 0, keep: int = 1,
    record: int = 100,
) -> Descent:  # fmt: skip
    """Descend on an objective from `start`, many times, each time with other noise.

    noise      standard deviation of what is added to each coordinate of the gradient  [1; with examples 0]
    jitter     standard deviation of w in the random loss f(x − w), for all coordinates or for each
    sampling   how examples are drawn, `batch` of them a step: with_replacement, without_replacement, or full: all of them
    seed       path k is the same however many others there are
    record     at how many times to measure, close together at first; all of them if there are no more steps

    A Plateau sees the mean of the objective over all paths, before every step.

    >>> descend("quadratic", steps=50, noise=0).last.ravel().round(6).tolist()
    [-7.1e-05, -0.0]
    """
    f, optimizer = objective(on), optimizer or sgd()
    steps, trajectories = whole("", "steps", steps), whole("", "trajectories", trajectories, 1)
    batch, keep, seed = whole("", "batch", batch, 1), whole("", "keep", keep), whole("", "seed", seed, most=2**64 - 1)
    noise = float(f.examples is None) if noise is None else number("", "noise", noise)
    sampling = choice("", "sampling", sampling or ("full" if f.examples is None else "with_replacement"), SAMPLINGS)
    if f.examples is None and sampling != "full":
        raise Invalid(f"sampling: {f.name} has no examples to draw, only a gradient: leave it out, and say noise")
    if f.examples is not None and len(f.examples[1]) % batch:
        raise Invalid(f"batch must divide the {len(f.examples[1])} examples of {f.name}, got batch={batch}")
    origin = np.array(f.start if start is None else [finite("", "start", one) for one in start], np.float64)
    if origin.shape != (len(f.start),):
        raise Invalid(f"start: {f.name} has {len(f.start)} coordinates, got {show(start)}")
    if max(len(origin) * trajectories * batch, (steps + 1) * min(keep, trajectories) * len(origin)) > MOST:
        raise Invalid(f"{trajectories} paths of {steps} steps do not fit into memory: ask for fewer, or keep fewer")
    spread: Numbers = np.broadcast_to(np.asarray(jitter, np.float64), origin.shape)[:, None]
    plateau, rates = _rates(schedule, optimizer, steps)
    x: Numbers = np.repeat(origin[:, None], trajectories, 1)
    state, average, weight, order = {name: np.zeros_like(x) for name in optimizer.slots}, x, 0.0, np.empty((0, 0), int)
    record = whole("", "record", record, 2)
    at = np.rint(np.geomspace(1, steps, record)) if steps > record else np.arange(1, steps + 1)
    times, kept = {0, *at.astype(int).tolist()}, min(keep, trajectories)
    paths, rows = np.empty((steps + 1, len(origin), kept)), list[tuple[Any, ...]]()
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # a rate that is too large is worth seeing
        for t in range(steps + 1):
            paths[t] = x[:, :kept]
            if t in times:
                rows.append(_measured(f, x, average, kept))
            if t == steps:
                break
            if plateau:
                rates[t] = plateau.observe(float(np.nan_to_num(f.value(x).mean(), nan=1e300)), t + 1)
            eta = float(rates[t])
            weight += eta
            average = average + (x - average) * (eta / weight) if eta else average
            drawn = lambda kind: draws.lab(seed, t, kind).standard_normal((trajectories, len(origin))).T  # noqa: B023, E731
            w = x - spread * drawn(0) if spread.any() else x
            if sampling == "full":
                g = f.gradient(w)
            else:
                place = t * batch % len(f.examples[1])  # type: ignore[index]
                order = order if place else _order(f, sampling, draws.lab(seed, t, 3), trajectories)
                g = f.of_examples(w, order[place : place + batch])
            g = g + noise * drawn(1) if noise else g
            x, state = optimizer.update(x, g, state, eta, t, drawn(2) if optimizer.noisy else None)
    mean, std, distance, gap, average_gap, own = (np.array(column) for column in zip(*rows, strict=True))
    measured = np.array(sorted(times)), x, paths, mean, std, distance.T, gap.T, average_gap.T, own
    return Descent(f, origin, noise, rates, *measured)


def _rates(schedule: Any, optimizer: Optimizer, steps: int) -> tuple[Plateau | None, Numbers]:
    own = getattr(optimizer, "lr", None)
    schedule = check_schedule("", "schedule", schedule if own is None else own)
    if schedule is None:
        return None, np.full(steps, optimizer.default_lr)
    if isinstance(schedule, Plateau):
        return Plateau.from_state(schedule.state()), np.zeros(steps)
    if counts(schedule):
        raise Invalid(f"schedule: the lab takes samestep's schedules and functions of t, got {show(schedule)}")
    if isinstance(schedule, Schedule) and schedule.unit == "epochs":
        raise Invalid(f"schedule: the lab has no epochs, got {schedule}: leave .in_epochs() out, or bind(...) it")
    return None, np.array([rate("schedule", schedule(t)) for t in range(steps)], np.float64)


def _order(f: Objective, sampling: str, source: np.random.Generator, paths: int) -> Numbers:
    """The examples of each path in one pass, (n, paths)."""
    n = len(f.examples[1])  # type: ignore[index]
    return (source.integers(n, size=(paths, n)) if sampling == SAMPLINGS[0] else source.random((paths, n)).argsort(1)).T


def _measured(f: Objective, x: Numbers, average: Numbers, kept: int) -> tuple[Any, ...]:
    away, averaged = np.linalg.norm(x - np.reshape(f.minimum or 0, (-1, 1)), axis=0), f.value(average) - f.least
    bands = [np.array([one.mean(), *np.quantile(one, BAND)]) for one in (away, f.value(x) - f.least, averaged)]
    return x.mean(1), x.std(1), *bands, averaged[:kept]
