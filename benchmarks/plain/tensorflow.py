"""A training loop as a user of TensorFlow and Keras writes it: data in memory, one tf.function for a step, Keras's SGD."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf


def loop(model: Any, x: np.ndarray, y: np.ndarray, batch: int, rate: float) -> Callable[[int], None]:
    """A function that makes so many steps of SGD on a copy of a model, and waits for the last."""
    model = copy.deepcopy(model)
    examples, labels = tf.constant(x), tf.constant(y)
    optimizer = keras.optimizers.SGD(rate)
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(index: Any) -> Any:
        inputs, wanted = tf.gather(examples, index), tf.gather(labels, index)
        with tf.GradientTape() as tape:
            loss = cross_entropy(wanted, model(inputs, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    def go(steps: int) -> None:
        order = tf.random.shuffle(tf.range(len(x)))
        for i in range(steps):
            start = i * batch % len(x)
            loss = step(order[start : start + batch])
        loss.numpy()

    return go
