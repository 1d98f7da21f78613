"""A schedule as an optax schedule: a function of the count that can be compiled."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp  # type: ignore[import-not-found, unused-ignore]
import numpy as np
from jax import Array  # type: ignore[import-not-found, unused-ignore]
from jax.typing import ArrayLike  # type: ignore[import-not-found, unused-ignore]

from samestep.checks import whole
from samestep.schedules.algebra import Schedule, must_be_schedule


def schedule_fn(schedule: Schedule, steps: int) -> Callable[[ArrayLike], Array]:
    """The schedule as count -> float32 rate, for optax.sgd(schedule_fn(s, steps)) and under jit, scan and vmap.

    A table of `steps` rates, so that XLA evaluates no formula: compiled, t/T would be multiplied by 1/T.

    >>> from samestep.schedules.kinds import poly
    >>> [float(schedule_fn(poly(1.0, 4), 4)(count)) for count in (0, 1, 3, 9)]
    [1.0, 0.75, 0.25, 0.25]
    """
    schedule = must_be_schedule("optax.schedule_fn", "schedule", schedule)
    table = schedule.values(whole("optax.schedule_fn", "steps", steps, 1)).astype(np.float32)
    return lambda count: jnp.take(jnp.asarray(table), jnp.asarray(count), mode="clip")
