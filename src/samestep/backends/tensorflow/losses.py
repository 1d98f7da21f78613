"""Keras's losses whose mean is one over a weight: outputs are masked, labels ignored, or examples weighted."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask  # there is no public name for what layers say of padding

from samestep.errors import Invalid


def weighted(loss: Any, output: Any, y: Any) -> Any:
    """(sum, weight) of such a loss, or the loss with the weights of its examples, if y is (labels, weights); else None."""
    if not isinstance(loss, keras.losses.Loss) or type(loss).__call__ is not keras.losses.Loss.__call__:
        return None
    labels, weights = y if isinstance(y, (tuple, list)) and len(y) == 2 else (y, None)
    if loss.reduction not in ("sum_over_batch_size", "mean", "mean_with_sample_weight"):
        return None if weights is None else loss(labels, output, sample_weight=weights)
    values = loss.call(tf.cast(labels, loss.dtype), tf.cast(output, loss.dtype))
    masks = [tf.cast(mask, loss.dtype) for mask in (get_keras_mask(output), get_keras_mask(values)) if mask is not None]
    over_weights = loss.reduction == "mean_with_sample_weight" and weights is not None
    if not masks and not over_weights:
        return None if weights is None else loss(labels, output, sample_weight=weights)
    shares = counts = masks[0] * masks[-1] if masks else 1
    if weights is not None:
        if len(weights.shape) == len(values.shape) + 1 and weights.shape[-1] == 1:
            weights = tf.squeeze(weights, -1)  # as Keras does
        ranks = len(values.shape) - len(weights.shape)
        if ranks < 0:
            raise Invalid(f"weights must have the shape of the loss, {values.shape}, got {weights.shape}: reshape them")
        shares = tf.reshape(tf.cast(weights, loss.dtype), (*tf.unstack(tf.shape(weights)), *[1] * ranks)) * counts
    return tf.reduce_sum(values * shares), tf.reduce_sum(shares if over_weights else counts)
