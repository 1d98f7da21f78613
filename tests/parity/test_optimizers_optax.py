"""samestep's optimizers against optax, on the flat vectors of NumPy and JAX. Where a convention differs, the test names it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from samestep.optimizers.rules import Adam, Optimizer, adagrad, adam, adamw, sgd

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy

STEPS, SIZE = 200, 50
# Both sides do the same arithmetic, each with roundings of its own, on weights of about 1. Measured: 1.2e-7 and 4e-16.
TOLERANCES = {"float32": 5e-7, "float64": 2e-15}
# optax rounds beta2 to float32 before it takes 1 - beta2^t; for 0.999 that is 1.3e-5 of the first step's square. samestep
# computes it in float64. Measured: 4e-6.
ADAM_IN_FLOAT32 = 1e-5


@pytest.fixture(params=TOLERANCES)
def dtype(request: pytest.FixtureRequest) -> Iterator[str]:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", request.param == "float64")
    yield request.param
    jax.config.update("jax_enable_x64", before)


def rates(dtype: str) -> Any:
    """1/t decay, rounded once, for both sides alike."""
    return (0.1 / (1 + np.arange(STEPS) / 20)).astype(dtype)


def problem(dtype: str) -> tuple[Any, Any, Any]:
    """A start, the curvatures of a bowl, and the noise of each step's gradient."""
    random = np.random.default_rng(0)
    start, noise = random.standard_normal(SIZE), random.standard_normal((STEPS, SIZE))
    return start.astype(dtype), np.linspace(0.1, 2.0, SIZE).astype(dtype), noise.astype(dtype)


def ours(optimizer: Optimizer, dtype: str, place: Any, slots: float = 0.0) -> Any:
    x, curvature, noise = map(place, problem(dtype))
    state = dict.fromkeys(optimizer.slots, x * 0 + slots)
    for t, lr in enumerate(rates(dtype).tolist()):
        x, state = optimizer.update(x, x * curvature + noise[t], state, lr, t, None)
    assert x.dtype == dtype
    return np.asarray(x)


def theirs(make: Any, dtype: str) -> Any:
    table = jnp.asarray(rates(dtype))
    optimizer = make(lambda count: table[count])
    x, curvature, noise = map(jnp.asarray, problem(dtype))
    state = optimizer.init(x)

    @jax.jit
    def step(x: Any, state: Any, z: Any) -> Any:
        updates, state = optimizer.update(x * curvature + z, state, x)
        return optax.apply_updates(x, updates), state

    for t in range(STEPS):
        x, state = step(x, state, noise[t])
    assert x.dtype == dtype
    return np.asarray(x)


def decayed(weight_decay: float, make: Any) -> Any:
    """optax adds a weight decay to the gradient by a transformation of its own."""
    return lambda lr: optax.chain(optax.add_decayed_weights(weight_decay), make(lr))


PAIRS = [
    (sgd(), optax.sgd),
    (sgd(weight_decay=0.01), decayed(0.01, optax.sgd)),
    (sgd(momentum=0.9), lambda lr: optax.sgd(lr, momentum=0.9)),
    (sgd(momentum=0.9, nesterov=True), lambda lr: optax.sgd(lr, momentum=0.9, nesterov=True)),
    (
        sgd(momentum=0.9, nesterov=True, weight_decay=0.01),
        decayed(0.01, lambda lr: optax.sgd(lr, momentum=0.9, nesterov=True)),
    ),
    (adam(), optax.adam),
    (adam(beta1=0.8, beta2=0.95, eps=1e-3), lambda lr: optax.adam(lr, 0.8, 0.95, 1e-3)),
    (adam(weight_decay=0.01), decayed(0.01, optax.adam)),
    (adamw(weight_decay=0.1), lambda lr: optax.adamw(lr, weight_decay=0.1)),
]


def agree(optimizer: Optimizer, a: Any, b: Any, dtype: str) -> None:
    assert np.linalg.norm(a - problem(dtype)[0]) > 1  # there was something to compare
    tolerance = ADAM_IN_FLOAT32 if isinstance(optimizer, Adam) and dtype == "float32" else TOLERANCES[dtype]
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def differ(a: Any, b: Any) -> None:
    assert np.abs(a - b).max() > 1e-3


@pytest.mark.parametrize("place", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize(("optimizer", "make"), PAIRS, ids=[repr(optimizer) for optimizer, _ in PAIRS])
def test_parity_over_200_steps_of_a_changing_rate(optimizer: Optimizer, make: Any, place: Any, dtype: str) -> None:
    agree(optimizer, ours(optimizer, dtype, place), theirs(make, dtype), dtype)


@pytest.mark.parametrize("place", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_adagrad_without_eps_and_from_zero(place: Any, dtype: str) -> None:
    same = theirs(lambda lr: optax.adagrad(lr, initial_accumulator_value=0.0, eps=0.0), dtype)
    agree(adagrad(), ours(adagrad(eps=0), dtype, place), same, dtype)


def test_adagrad_of_optax_starts_at_a_tenth_and_has_its_eps_inside_the_root(dtype: str) -> None:
    """Both are one number under the root: optax's default is samestep's adagrad(eps=0) with slots that start at 0.1 + 1e-7."""
    default = theirs(optax.adagrad, dtype)
    agree(adagrad(), ours(adagrad(eps=0), dtype, jnp.asarray, slots=0.1 + 1e-7), default, dtype)
    differ(ours(adagrad(), dtype, jnp.asarray), default)


def test_adamw_of_optax_decays_a_hundredth_of_what_samesteps_does_by_default(dtype: str) -> None:
    """1e-4 there, 1e-2 here, as in torch."""
    default = theirs(optax.adamw, dtype)
    agree(adamw(), ours(adamw(weight_decay=1e-4), dtype, jnp.asarray), default, dtype)
    differ(ours(adamw(), dtype, jnp.asarray), default)
