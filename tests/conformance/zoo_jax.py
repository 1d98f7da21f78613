"""The models of the conformance suite in JAX, small enough for many fits."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from samestep.backends.jax.replica import JaxReplica as Replica  # noqa: F401
from samestep.models import jax as models


def lenet():
    return models.lenet()


def lenet_modern():
    return models.lenet_modern()


def mlp_with_dropout():
    return models.mlp((784, 32, 10), dropout=0.5)


def resnet_with_batch_norm():
    return models.resnet18(width=4)


def convolution(w, state, x, key, train):
    """Convolution, batch norm, dropout and a dense layer."""
    x = jax.lax.conv_general_dilated(x, w["filters"], (4, 4), "VALID")
    here = {"mean": x.mean((0, 2, 3)), "variance": x.var((0, 2, 3))}
    mean, variance = (here if train else state).values()
    x = jax.nn.relu((x - mean[:, None, None]) / jnp.sqrt(variance + 1e-5)[:, None, None]).reshape(len(x), -1)
    if train:
        x = jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0)
        state = {name: 0.9 * state[name] + 0.1 * here[name] for name in here}
    return x @ w["dense"], state


def small_with_batch_norm():
    draw = np.random.default_rng(0).standard_normal
    weights = {"filters": draw((4, 1, 5, 5), np.float32) / 5, "dense": draw((144, 10), np.float32) / 12}
    return models.Pair(convolution, weights, {"mean": jnp.zeros(4), "variance": jnp.ones(4)})


class Words(nn.Module):
    """An embedding, averaged: its gradient is a scatter-add. A flax module, whose weights are made from the first example."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.Embed(50, 8)(x).mean(1))


def embedding():
    return Words()


# What the recipe must see (test_recipe.py)


class Small(nnx.Module):
    """A model whose settings and activation can be chosen."""

    def __init__(self, rate=0.5, momentum=0.9, frozen=False):
        rngs = nnx.Rngs(0)
        self.first, self.norm = nnx.Linear(784, 8, rngs=rngs), nnx.BatchNorm(8, momentum=momentum, rngs=rngs)
        self.drop, self.last = nnx.Dropout(rate, rngs=rngs), nnx.Linear(8, 10, rngs=rngs)
        if frozen:
            self.first.kernel = Frozen(self.first.kernel.get_value())

    def __call__(self, x):
        return self.last(self.drop(nnx.relu(self.norm(self.first(x.reshape(len(x), -1))))))


class Frozen(nnx.Variable):
    """What is no nnx.Param is not trained."""


def tanh_instead():
    class Small(globals()["Small"]):
        def __call__(self, x):
            return self.last(self.drop(jnp.tanh(self.norm(self.first(x.reshape(len(x), -1))))))

    return Small()


def relu_as_before():
    class Small(globals()["Small"]):
        def __call__(self, x):
            return self.last(self.drop(nnx.relu(self.norm(self.first(x.reshape(len(x), -1))))))

    return Small()


def small(**settings):
    return Small(**settings)


class Fields(nn.Module):
    """The other kind of flax: a layer that is a field, and a setting."""

    drop: nn.Module
    factor: float = 1.0

    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(10)(self.drop(x.reshape(len(x), -1) * self.factor, deterministic=not train))


def pair(factor):
    return models.Pair(lambda w, x: x.reshape(len(x), -1) @ w * factor, jnp.zeros((784, 10)))


cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def losses(weight):
    return lambda output, y: weight * cross_entropy(output, y)


def weighted(output, y, weights):
    return weights[y] * cross_entropy(output, y)


def changes():
    """What is changed between a stop and a resume → before, after, and the part that must be named."""
    rising, smooth = functools.partial(weighted, weights=jnp.arange(10.0)), optax.smooth_labels
    smoothed = functools.partial(
        lambda o, y, alpha: optax.softmax_cross_entropy(o, smooth(jax.nn.one_hot(y, 10), alpha))
    )
    return {
        "the body of a loss": ({"loss": lambda o, y: cross_entropy(o, y)}, {"loss": lambda o, y: cross_entropy(o, y) * 2},
                               "<lambda>()"),
        "what a loss closes over": ({"loss": losses(1.0)}, {"loss": losses(2.0)}, "<lambda>()"),
        "a setting of a loss": ({"loss": functools.partial(smoothed, alpha=0.0)},
                                {"loss": functools.partial(smoothed, alpha=0.1)}, "loss"),
        "class weights": ({"loss": functools.partial(weighted, weights=jnp.ones(10))}, {"loss": rising}, "loss"),
        "an activation": ({"model": relu_as_before}, {"model": tanh_instead}, "Small.__call__()"),
        "a dropout rate": ({}, {"model": lambda: small(rate=0.2)}, "model.drop"),
        "the momentum of batch norm": ({}, {"model": lambda: small(momentum=0.7)}, "model.norm"),
        "a frozen layer": ({}, {"model": lambda: small(frozen=True)}, "model.first"),
        "a layer of a linen module": ({"model": lambda: Fields(nn.Dropout(0.5))}, {"model": lambda: Fields(nn.Dropout(0.2))},
                                      "model.drop"),
        "a field of a linen module": ({"model": lambda: Fields(nn.Dropout(0.5))},
                                      {"model": lambda: Fields(nn.Dropout(0.5), 2.0)}, "model"),
        "what a Pair closes over": ({"model": lambda: pair(1.0)}, {"model": lambda: pair(2.0)}, "<lambda>()"),
        "the formula of a schedule": ({"schedule": lambda t: 0.1}, {"schedule": lambda t: 0.1 + t}, "<lambda>()"),
        "how an optimizer is made": ({"optimizer": lambda lr: optax.sgd(lr), "lr": 0.1},
                                     {"optimizer": lambda lr: optax.sgd(learning_rate=lr), "lr": 0.1}, "<lambda>()"),
        "a scheduler": ({"schedule": lambda: optax.cosine_decay_schedule(0.1, 5)},
                        {"schedule": lambda: optax.cosine_decay_schedule(0.1, 6)}, "schedule"),
    }  # fmt: skip


def settings():
    """Settings of the framework that change numbers: how to set each, and how to put it back."""

    def setting(name, value):
        before = jax.config.values[name]
        return lambda: jax.config.update(name, value), lambda: jax.config.update(name, before)

    def context(made):
        return made.__enter__, lambda: made.__exit__(None, None, None)

    return {
        "matmul precision": setting("jax_default_matmul_precision", "bfloat16"),
        "64 bits": setting("jax_enable_x64", True),
        "generator": setting("jax_default_prng_impl", "rbg"),
        "threefry": setting("jax_threefry_partitionable", False),
        "seed offset": setting("jax_random_seed_offset", 7),
        "no jit": setting("jax_disable_jit", True),
        "no optimizations": setting("jax_disable_most_optimizations", True),
        "matmul precision, as a context": context(jax.default_matmul_precision("bfloat16")),
        "threefry, as a context": context(jax.threefry_partitionable(False)),
    }


# What breaks the rules (test_rehearsal.py)


class Plain(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.inner, self.outer = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.relu(self.inner(x)))


class ThroughALambda(Plain):
    def __init__(self):
        super().__init__()
        self.through = lambda x: self.outer(x)

    def __call__(self, x):
        return self.through(nnx.relu(self.inner(x)))


class LearnedScale(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, output, y):
        return cross_entropy(output * self.scale[...], y)


def line(factor=lambda: 1.0):
    """A linear model, times whatever a function gives."""
    return models.Pair(lambda w, x: x @ w["weight"] * factor(), {"weight": jnp.ones((6, 3)) * jnp.arange(3)})


def call_itself():
    weights = {"weight": jnp.ones((6, 3))}
    return models.Pair(lambda w, x: x @ weights["weight"], weights)


def unruly(counter, draws):
    """What is done → the model, settings, what the error says, and what happens without a rehearsal."""
    traced = "another program when it is traced again"
    return {
        "a model calls itself through a closure": (call_itself, {}, "no trained weight gets a gradient", "stays"),
        "a layer is called through a closure": (ThroughALambda, {}, "depends on a parameter .'outer.(kernel|bias)'", "moves"),
        "Python's random": (lambda: line(draws.random), {}, f"{traced}.*Python's", "differs"),
        "a counter": (lambda: line(counter), {}, traced, "differs"),
        "a loss with a counter": (line, {"loss": lambda o, y: cross_entropy(o, y) * counter()}, traced, None),
        "a loss with a parameter": (Plain, {"loss": LearnedScale()}, "a parameter .of LearnedScale", None),
    }  # fmt: skip


def late(counter):
    """A model that begins to look at a counter after some calls."""
    return line(lambda: jax.pure_callback(lambda: np.float32(counter()), jax.ShapeDtypeStruct((), jnp.float32)))
