"""A schedule as an optax schedule: a function of the count that can be compiled."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp  # type: ignore[import-not-found, unused-ignore]
from jax import Array  # type: ignore[import-not-found, unused-ignore]
from jax.typing import ArrayLike  # type: ignore[import-not-found, unused-ignore]

from samestep.schedules.algebra import Schedule, must_be_schedule
from samestep.schedules.exports import rate_table


def schedule_fn(schedule: Schedule, steps: int | None = None) -> Callable[[ArrayLike], Array]:
    """The schedule as count -> float32 rate, for optax.sgd(schedule_fn(s, steps)) and under jit, scan and vmap.

    A table of `steps` rates (None: up to the end), so that XLA evaluates no formula: compiled, t/T would be multiplied by 1/T.

    >>> from samestep.schedules.kinds import poly
    >>> [float(schedule_fn(poly(1.0, 4), 4)(count)) for count in (0, 1, 3, 9)]
    [1.0, 0.75, 0.25, 0.25]
    """
    where = "optax.schedule_fn"
    table = rate_table(where, must_be_schedule(where, "schedule", schedule), steps)
    return lambda count: jnp.take(jnp.asarray(table), jnp.asarray(count), mode="clip")
