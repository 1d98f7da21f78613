"""A training loop as a user of TensorFlow and Keras writes it: data in memory, one tf.function for a step, Keras's SGD,
and the loss and accuracy of the epoch, as the chapters do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf


def loop(model: Any, x: np.ndarray, y: np.ndarray, batch: int, rate: float) -> Callable[[int], tuple[float, float]]:
    """A function that makes so many steps of SGD on a copy of a model, and gives mean loss and accuracy."""
    model = copy.deepcopy(model)
    examples, labels = tf.constant(x), tf.constant(y)
    optimizer = keras.optimizers.SGD(rate)
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    total, hits = tf.Variable(0.0), tf.Variable(0, dtype=tf.int64)

    @tf.function
    def step(index: Any) -> None:
        inputs, wanted = tf.gather(examples, index), tf.gather(labels, index)
        with tf.GradientTape() as tape:
            y_hat = model(inputs, training=True)
            loss = cross_entropy(wanted, y_hat)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        total.assign_add(loss * batch)
        hits.assign_add(tf.math.count_nonzero(tf.argmax(y_hat, 1) == wanted))

    def go(steps: int) -> tuple[float, float]:
        order = tf.random.shuffle(tf.range(len(x)))
        total.assign(0.0)
        hits.assign(0)
        for i in range(steps):
            start = i * batch % len(x)
            step(order[start : start + batch])
        return float(total.numpy()) / steps / batch, float(hits.numpy()) / steps / batch

    return go
