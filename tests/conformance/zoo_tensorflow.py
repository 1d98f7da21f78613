"""The models of the conformance suite in TensorFlow, small enough for many fits."""

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework import config

from samestep.backends.tensorflow.replica import TensorflowReplica as Replica  # noqa: F401
from samestep.models import tensorflow as models


def lenet():
    return models.lenet()


def lenet_modern():
    return models.lenet_modern()


def mlp_with_dropout():
    return models.mlp((784, 32, 10), dropout=0.5)


def resnet_with_batch_norm():
    return models.resnet18(width=4)


def small_with_batch_norm():
    """Convolution, batch norm, dropout and a dense layer."""
    layers, (one, two) = keras.layers, (keras.initializers.GlorotUniform(seed) for seed in (1, 2))
    return keras.Sequential([
        keras.Input((1, 28, 28)), layers.Permute((2, 3, 1)), layers.Conv2D(4, 5, 4, kernel_initializer=one),
        layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.3), layers.Flatten(),
        layers.Dense(10, kernel_initializer=two),
    ])  # fmt: skip


class Words(keras.Model):
    """An embedding, averaged: its gradient is a scatter-add. Its weights are made from the first example."""

    def __init__(self):
        super().__init__()
        start = keras.initializers.GlorotUniform
        self.embedding = keras.layers.Embedding(50, 8, embeddings_initializer=start(seed=1))
        self.dense = keras.layers.Dense(10, kernel_initializer=start(seed=2))

    def call(self, x):
        return self.dense(keras.ops.mean(self.embedding(x), 1))


def embedding():
    return Words()


# What the recipe must see (test_recipe.py)


class Small(keras.Model):
    """A model whose settings and activation can be chosen."""

    def __init__(self, rate=0.5, momentum=0.9, frozen=False):
        super().__init__()
        layers, start = keras.layers, keras.initializers.GlorotUniform
        self.first = layers.Dense(8, kernel_initializer=start(seed=1), trainable=not frozen)
        self.norm, self.drop = layers.BatchNormalization(momentum=momentum), layers.Dropout(rate)
        self.last = layers.Dense(10, kernel_initializer=start(seed=2))

    def call(self, x, training=False):
        x = self.norm(self.first(keras.ops.reshape(x, (-1, 784))), training=training)
        return self.last(self.drop(keras.ops.relu(x), training=training))


def tanh_instead():
    class Small(globals()["Small"]):
        def call(self, x, training=False):
            x = self.norm(self.first(keras.ops.reshape(x, (-1, 784))), training=training)
            return self.last(self.drop(keras.ops.tanh(x), training=training))

    return Small()


def relu_as_before():
    class Small(globals()["Small"]):
        def call(self, x, training=False):
            x = self.norm(self.first(keras.ops.reshape(x, (-1, 784))), training=training)
            return self.last(self.drop(keras.ops.relu(x), training=training))

    return Small()


def small(**settings):
    return Small(**settings)


def functional(activation="relu", backwards=False, factor=1):
    """The difference of two layers, taken the one or the other way."""
    layers, start = keras.layers, keras.initializers.GlorotUniform
    x = keras.Input((1, 28, 28))
    one = layers.Dense(8, activation, kernel_initializer=start(seed=1))(layers.Flatten()(x))
    two = layers.Dense(8, kernel_initializer=start(seed=2))(one)
    scaled = layers.Lambda(lambda x: factor * x)(layers.Subtract()([two, one] if backwards else [one, two]))
    return keras.Model(x, layers.Dense(10, kernel_initializer=start(seed=3))(scaled))


def losses(weight):
    return lambda output, y: weight * tf.nn.sparse_softmax_cross_entropy_with_logits(y, output)


def weighted(weights):
    return lambda output, y: tf.nn.sparse_softmax_cross_entropy_with_logits(y, output) * tf.gather(weights, y)


def called(factor):
    """A model with a method of its own."""
    model = Small()
    model.last.call = lambda x, training=None: factor * keras.ops.matmul(x, model.last.kernel)
    return model


def changes():
    """What is changed between a stop and a resume → before, after, and the part that must be named."""
    each, sparse = tf.nn.sparse_softmax_cross_entropy_with_logits, keras.losses.SparseCategoricalCrossentropy
    sgd, cosine = keras.optimizers.SGD, keras.optimizers.schedules.CosineDecay
    return {
        "the body of a loss": ({"loss": lambda o, y: each(y, o)}, {"loss": lambda o, y: each(y, o) * 2}, "<lambda>()"),
        "what a loss closes over": ({"loss": losses(1.0)}, {"loss": losses(2.0)}, "<lambda>()"),
        "a setting of a loss": ({"loss": sparse(from_logits=True)}, {"loss": sparse()}, "loss"),
        "class weights": ({"loss": weighted(tf.ones(10))}, {"loss": weighted(tf.range(10.0))}, "<lambda>()"),
        "an activation": ({"model": relu_as_before}, {"model": tanh_instead}, "Small.call()"),
        "a dropout rate": ({}, {"model": lambda: small(rate=0.2)}, "model.drop"),
        "the momentum of batch norm": ({}, {"model": lambda: small(momentum=0.7)}, "model.norm"),
        "a frozen layer": ({}, {"model": lambda: small(frozen=True)}, "model.first"),
        "a method of one object": ({"model": lambda: called(1)}, {"model": lambda: called(2)}, "<lambda>()"),
        "the activation of a layer": ({"model": functional}, {"model": lambda: functional("tanh")}, "model.dense"),
        "how layers are connected": ({"model": functional}, {"model": lambda: functional(backwards=True)}, "model"),
        "a Lambda layer": ({"model": functional}, {"model": lambda: functional(factor=2)}, "<lambda>()"),
        "the formula of a schedule": ({"schedule": lambda t: 0.1}, {"schedule": lambda t: 0.1 + t}, "<lambda>()"),
        "how an optimizer is made": ({"optimizer": lambda v: sgd(0.1)}, {"optimizer": lambda v: sgd(0.1 * bool(v))},
                                     "<lambda>()"),
        "a scheduler": ({"schedule": lambda: cosine(0.1, 50)}, {"schedule": lambda: cosine(0.1, 60)}, "schedule"),
    }  # fmt: skip


def settings():
    """Settings of the framework that change numbers: how to set each, and how to put it back."""
    options, jit = tf.config.optimizer.set_experimental_options, tf.config.optimizer.set_jit
    eagerly, tf32 = tf.config.run_functions_eagerly, tf.config.experimental.enable_tensor_float_32_execution
    kept = keras.config
    return {
        "floatx": (lambda: kept.set_floatx("float64"), lambda: kept.set_floatx("float32")),
        "epsilon": (lambda: kept.set_epsilon(1e-3), lambda: kept.set_epsilon(1e-7)),
        "image data format": (lambda: kept.set_image_data_format("channels_first"),
                              lambda: kept.set_image_data_format("channels_last")),
        "dtype policy": (lambda: kept.set_dtype_policy("mixed_bfloat16"), lambda: kept.set_dtype_policy("float32")),
        "TensorFloat-32": (lambda: tf32(False), lambda: tf32(True)),
        "jit": (lambda: jit("autoclustering"), lambda: jit(False)),
        "graph optimizer": (lambda: options({"disable_meta_optimizer": True}),
                            lambda: options({"disable_meta_optimizer": False})),
        "functions run eagerly": (lambda: eagerly(True), lambda: eagerly(False)),
        "determinism": (tf.config.experimental.enable_op_determinism, config.disable_op_determinism),
    }  # fmt: skip


# What breaks the rules (test_rehearsal.py)


class Plain(tf.Module):
    def __init__(self, factor=lambda: 1.0):
        super().__init__()
        self.factor = factor
        self.weight = tf.Variable(tf.reshape(tf.range(18.0), (6, 3)) / 18)

    def __call__(self, x):
        return x @ self.weight * self.factor()


class Scale(tf.Module):
    def __init__(self):
        super().__init__()
        self.scale = tf.Variable(1.0)

    def __call__(self, output, y):
        return entropy_of(output * self.scale, y)


def entropy_of(output, y):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(y, output)


def unruly(counter, draws):
    """What is done → the model, settings, what the error says, and what happens without a rehearsal."""
    traced = "another program when it is traced again"
    return {
        "Python's random": (lambda: Plain(draws.random), {}, f"{traced}.*Python's", "differs"),
        "a counter": (lambda: Plain(counter), {}, traced, "differs"),
        "a loss with a counter": (Plain, {"loss": lambda o, y: entropy_of(o, y) * counter()}, traced, "differs"),
        "a loss with a parameter": (Plain, {"loss": Scale()}, "not among its variables", None),
    }  # fmt: skip


def late(counter):
    """A model that begins to look at a counter after some calls."""
    return Plain(lambda: tf.numpy_function(lambda: np.float32(counter()), [], tf.float32))
