"""The chapters' `d2l` for TensorFlow. Images have their channels last; parameters are variables, gradients come from a tape."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import samestep.backends.tensorflow.backend  # noqa: F401  (it must be there before TensorFlow starts its threads)

# isort: split
import keras
import tensorflow as tf

from samestep.d2l.names import Batches, Functions, Names, Taught, Timer
from samestep.devices import Device

Tensor = Any


class Module(Taught, keras.Model):
    """A model of the chapters."""


class TrainCallback(keras.callbacks.Callback):
    """Draws loss and accuracies after each epoch of a Keras fit, and says the last ones with the speed."""

    def __init__(self, net: Any, train_iter: Any, test_iter: Any, num_epochs: int, device_name: str) -> None:
        super().__init__()
        self.net, self.train_iter, self.test_iter, self.num_epochs = net, train_iter, test_iter, num_epochs
        self.device_name, self.timer = device_name, Timer()
        self.animator = Names.Animator("epoch", "", ["train loss", "train acc", "test acc"], [1, num_epochs])

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.timer.start()

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        self.timer.stop()
        found = (
            logs["loss"],
            logs["accuracy"],
            self.net.evaluate(self.test_iter, verbose=0, return_dict=True)["accuracy"],
        )
        self.animator.add(epoch + 1, found)
        if epoch == self.num_epochs - 1:
            speed = self.num_epochs * sum(len(y) for _, y in self.train_iter) / self.timer.sum()
            print(f"train loss {found[0]:.3f}, train acc {found[1]:.3f}, test acc {found[2]:.3f}")
            print(f"{speed:.1f} examples/sec on {self.device_name}")


class TensorFlow(Names):
    Module, TrainCallback = Module, TrainCallback
    _framework, _loader, _channels_last = "tensorflow", "set_weights", True
    _seed = staticmethod(keras.utils.set_random_seed)
    _functions = Functions(normal=tf.random.normal, arange=tf.range, zeros=tf.zeros, ones=tf.ones)

    def _native(self, device: Device) -> Any:
        return tf.device(f"/{'CPU' if device.kind == 'cpu' else 'GPU'}:{device.index}")

    def _device(self, native: Any) -> Device:
        spec = tf.DeviceSpec.from_string(native if isinstance(native, str) else native._device_name)
        return Device.of(f"{spec.device_type.lower()}:{spec.device_index or 0}")

    def load_data_fashion_mnist(self, batch_size: int, resize: Any = None) -> Sequence[Any]:
        return list(map(_dataset, super().load_data_fashion_mnist(batch_size, resize)))

    def accuracy(self, y_hat: Tensor, y: Tensor) -> Tensor:
        found = tf.argmax(y_hat, 1) if len(y_hat.shape) > 1 else y_hat
        return tf.reduce_sum(tf.cast(tf.cast(found, y.dtype) == y, tf.float32))

    def loss(self, y_hat: Tensor, y: Tensor) -> Tensor:
        return tf.nn.sparse_softmax_cross_entropy_with_logits(y, y_hat)

    def _gradients(self, net: Any, loss: Any, params: Sequence[Tensor], X: Tensor, y: Tensor) -> Sequence[Tensor]:
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(loss(net(X, params), y))
        return tape.gradient(value, list(params))


def _dataset(batches: Batches) -> Any:
    """As Keras takes it. Every pass over it has another order."""
    signature = tuple(tf.TensorSpec((None, *part.shape[1:]), part.dtype) for part in next(iter(batches)))
    made = tf.data.Dataset.from_generator(lambda: batches, output_signature=signature)
    batches.epoch = 0  # the first was to see shapes
    return made.apply(tf.data.experimental.assert_cardinality(len(batches))).prefetch(2)


names = TensorFlow()
__getattr__, __dir__ = partial(getattr, names), names.__dir__
