"""A linear model of every form of input, and losses by hand, in JAX."""

from functools import partial

import jax
import jax.numpy as jnp
import optax

from samestep.models.jax import Pair


def Line(weight):
    return Pair(lambda w, x: x @ w, jnp.asarray(weight))


def Two(weight):
    return Pair(lambda w, left, right: (left + right) @ w, jnp.asarray(weight))


def Named(weight):
    return Pair(
        lambda w, right, left=None: {"logits": (left + right) @ w, "other": (left, [right])}, jnp.asarray(weight)
    )


def Own(weight):
    def apply(w, left, right, labels):
        scores = (left + right) @ w
        return {"loss": each(scores, labels).mean(), "logits": scores}

    return Pair(apply, jnp.asarray(weight))


def First(weight):
    return Pair(lambda w, x: jnp.moveaxis(x @ w, -1, 1), jnp.asarray(weight))


def each(output, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(output), jnp.maximum(labels, 0)[..., None], -1)[..., 0]


def total(array):
    return array.sum()


def real(array):
    return array.astype("float64")


def exactly(scores, labels):
    return (scores.argmax(-1) == labels).sum()


def standard(weights):
    """optax's give a value for every position: the mean of each example's mean."""
    return {"optax": (optax.softmax_cross_entropy_with_integer_labels, "means")}


def half(scores):
    return scores.astype("bfloat16")


def tried():
    return {"dice": (optax.losses.multiclass_generalized_dice_loss, True)}


def sums():
    return {"reduced": (partial(optax.losses.ranking_softmax_loss, reduce_fn=jnp.sum), True)}
