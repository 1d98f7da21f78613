"""The TensorFlow backend: gradients against float64, the forms a model can come in, noise, threads, Keras's optimizers."""

import contextlib
import doctest
import functools
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

if os.environ.get("SAMESTEP_TEST_BACKEND", "torch") != "tensorflow":
    pytest.skip("one framework per process: set SAMESTEP_TEST_BACKEND=tensorflow", allow_module_level=True)

import keras
import tensorflow as tf
from conformance import modes

import samestep as ss
from samestep import draws, fingerprint, models
from samestep import portable as switch
from samestep.backends import eigen, names, symbols
from samestep.backends.losses import Measure
from samestep.backends.tensorflow import adapters, graph, numerics, program, replica, updater
from samestep.backends.tensorflow import backend as backend_module
from samestep.models import tensorflow as models_tensorflow
from samestep.training.replicas import Replicas

backend = backend_module.backend
random = np.random.default_rng(0)
X = random.random((90, 1, 28, 28), dtype=np.float32)
Y = random.integers(0, 10, 90)
L = keras.layers
set_dtype_policy = keras.config.set_dtype_policy


def fit(model, x=X, y=Y, **settings):
    settings = {"max_epochs": 2, "batch_size": 32, "devices": 1, "progress": False} | settings
    return ss.Trainer(**settings).fit(model, (x, y))


def same(make, counts=(3,), **settings):
    """The run on one device, which must be that on several."""
    one = fit(make(), **settings)
    assert one.fingerprint != one.recipe["initial"]
    for k in counts:
        other = fit(make(), devices=k, **settings)
        assert other.recipe == one.recipe
        assert other.fingerprints == one.fingerprints
    return one


def line(n=10):
    """The simplest model: of four numbers."""
    return keras.Sequential([L.Flatten(), L.Lambda(lambda x: x[:, :4]), L.Dense(n, kernel_initializer="zeros")])


def test_doctests():
    for module in (models_tensorflow, backend_module, adapters, graph, names, program, replica, updater):
        assert doctest.testmod(module).failed == 0


# Against the framework itself; against references in float64 see conformance/


@pytest.mark.parametrize("name", models.NAMES)
def test_models_have_the_names_and_layouts_of_every_framework(name):
    model, weights = getattr(models_tensorflow, name)(), getattr(models, name)()
    tensors = backend.replica(model, None, ss.cpu(), 1).tensors()
    assert all(tensors[key].tobytes() == weight.tobytes() for key, weight in weights.items())
    others = {key.rpartition(".")[2] for key in tensors.keys() - weights.keys()}
    assert others == ({"running_mean", "running_var", "num_batches_tracked"} if name == "resnet18" else set())


def test_batch_norm_against_numpy():
    """Of one shard: the statistics of its examples, and the running ones with n - 1 and a momentum of 0.1."""
    model = models_tensorflow.resnet18(width=4)
    replica = backend.replica(model, None, ss.cpu(), 1)
    x = np.pad(X[:20], ((0, 0), (0, 0), (3, 3), (3, 3))).astype(np.float64)
    windows = np.lib.stride_tricks.sliding_window_view(x, (7, 7), axis=(2, 3))[:, :, ::2, ::2]
    seen = np.einsum("nchwij,ocij->nohw", windows, model.w["conv.weight"].numpy().astype(np.float64))
    replica.advance(replica.gradient(X[:20], Y[:20], key=0, shard=0), 20)
    tensors = replica.tensors()
    np.testing.assert_allclose(tensors["norm.running_mean"], 0.1 * seen.mean((0, 2, 3)), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(tensors["norm.running_var"], 0.9 + 0.1 * seen.var((0, 2, 3), ddof=1), rtol=1e-5)
    assert tensors["norm.num_batches_tracked"] == 1
    assert tensors["norm.num_batches_tracked"].dtype == np.int64


# Against a plain loop


@pytest.mark.parametrize("shards", [1, 8])
def test_parity_with_a_plain_loop_of_keras(shards):
    """The same order of examples, one tf.function: equal to rounding after two epochs."""
    model, start = models_tensorflow.lenet_modern(), models.lenet_modern()
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function(reduce_retracing=True)
    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)

    for epoch in range(2):
        order = draws.order(0, epoch, len(X))
        for lo in range(0, len(X), 32):
            step(tf.constant(X[order[lo : lo + 32]]), tf.constant(Y[order[lo : lo + 32]]))
    theirs = {name: variable.numpy() for name, variable in model.w.items()}
    for settings in (
        {"optimizer": ss.sgd(momentum=0.9), "schedule": 0.05},
        {"optimizer": lambda _: keras.optimizers.SGD(0.05, momentum=0.9)},
        {"optimizer": ss.sgd(momentum=0.9), "schedule": 0.05, "loss": loss},
    ):
        weights = fit(models_tensorflow.lenet_modern(), shards=shards, **settings).weights()
        for name, expected in theirs.items():
            moved = np.abs(expected - start[name]).max()
            assert moved > 0
            np.testing.assert_allclose(weights[name], expected, atol=1e-4 * moved + 1e-7)


# Forms of models


def sequential():
    keras.utils.set_random_seed(0)
    return keras.Sequential([L.Flatten(), L.Dense(8), L.BatchNormalization(), L.ReLU(), L.Dropout(0.5), L.Dense(10)])


def functional():
    keras.utils.set_random_seed(0)
    x = keras.Input((1, 28, 28))
    hidden = L.Dropout(0.3)(L.Dense(8, activation="relu", name="mine")(L.Flatten()(x)))
    return keras.Model(x, L.Dense(10)(hidden))


class Block(keras.layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.dense, self.norm = L.Dense(units), L.BatchNormalization()

    def call(self, x, training=False):
        return self.norm(self.dense(x), training=training)


class Own(keras.Model):
    """A class of the user's own, with layers inside layers, which has no weights before it is first called."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(0)
        self.blocks, self.last = [Block(8), Block(6)], L.Dense(10)
        self.noise = keras.random.SeedGenerator(3)

    def call(self, x, training=False):
        x = keras.ops.reshape(x, (keras.ops.shape(x)[0], -1))
        for block in self.blocks:
            x = keras.ops.relu(block(x, training=training))
        if training:
            x = x + 0.1 * keras.random.normal((6,), seed=self.noise)
        return self.last(x)


NAMES = {
    sequential: {"dense/kernel", "dense_1/bias", "batch_normalization/moving_mean"},
    functional: {"mine/kernel", "dense/kernel"},
    Own: {"block/dense/kernel", "block_1/dense/kernel", "block_1/batch_normalization/gamma", "dense/bias"},
}


@pytest.mark.parametrize("make", NAMES)
def test_a_keras_model(make):
    run = same(make)
    assert set(run.weights()) >= NAMES[make]
    assert not any("seed" in name for name in run.weights())
    assert fit(make(), seed=1).fingerprint != run.fingerprint
    # the trained model can be called, evaluated, and trained further
    trained = run.model
    assert trained(X[:2]).shape == (2, 10)
    assert ss.Trainer(devices=2, batch_size=32).evaluate(trained, (X, Y))["examples"] == 90
    again = fit(trained)
    assert again.recipe["initial"] == run.fingerprint != again.fingerprint


def test_the_model_is_left_as_it_was():
    model = sequential()
    model(X[:1])
    before = [variable.numpy() for variable in model.variables]
    fit(model, devices=2)
    for variable, value in zip(model.variables, before, strict=True):
        assert np.array_equal(variable.numpy(), value)
    mine = ss.Trainer(devices="cpu").prepare_model(model)
    assert mine is not model
    assert np.array_equal(mine.weights[0], model.weights[0])


def test_layers_that_do_not_learn():
    model = sequential()
    model(X[:1])
    model.layers[1].trainable = False
    run = fit(model)
    assert np.array_equal(run.weights()["dense/kernel"], model.weights[0])
    assert not np.array_equal(run.weights()["dense_1/kernel"], model.layers[-1].kernel)


def test_losses_of_layers_count_once_for_a_batch():
    """Weight decay by a regularizer is weight decay by the optimizer: λ/2·|w|² has the gradient λw."""

    def make(decay):
        start = keras.initializers.GlorotUniform(seed=1)
        penalty = keras.regularizers.L2(0.05) if decay else None
        return keras.Sequential(
            [L.Flatten(), L.Dense(10, use_bias=False, kernel_initializer=start, kernel_regularizer=penalty)]
        )

    inside = same(lambda: make(True))
    outside = fit(make(False), optimizer=ss.sgd(weight_decay=0.1))
    for name, weight in inside.weights().items():
        np.testing.assert_allclose(weight, outside.weights()[name], atol=1e-6)
    assert inside.history[0]["train_loss"] > outside.history[0]["train_loss"]


def test_a_recurrent_model():
    def make():
        keras.utils.set_random_seed(0)
        return keras.Sequential([L.Reshape((28, 28)), L.LSTM(8, dropout=0.2, recurrent_dropout=0.2), L.Dense(10)])

    same(make)


class Module(tf.Module):
    """With a counter, dropout from TensorFlow's own generator, and a condition on a tensor."""

    def __init__(self):
        super().__init__()
        start = models.mlp((784, 8, 10))
        self.layers = [tf.Variable(start["dense1.weight"].T), tf.Variable(start["dense2.weight"].T)]
        self.calls = tf.Variable(0, trainable=False)
        self.mean = tf.Variable(tf.zeros(()), trainable=False)

    @tf.function
    def __call__(self, x, training):
        x = tf.reshape(x, (tf.shape(x)[0], 784))
        if training:
            self.calls.assign_add(1)
            self.mean.assign_add(tf.reduce_mean(x))
        x = tf.nn.relu(x @ self.layers[0])
        if tf.reduce_sum(x) > 1e9:
            x = x * 0.5
        if training:
            x = tf.nn.dropout(x, 0.5) + 0.01 * tf.random.normal(tf.shape(x)) * tf.random.truncated_normal((8,))
            x = x * tf.cast(tf.random.uniform((8,), 0, 5, tf.int32) > 0, tf.float32)
        return x @ self.layers[1]


def test_a_tf_module():
    model = Module()
    model(tf.constant(X[:4]), tf.constant(True))  # its own traces are of no use to a run
    model.calls.assign(0)
    model.mean.assign(0.0)
    run = fit(model)
    assert run.fingerprints == fit(model, devices=3).fingerprints
    assert set(run.weights()) == {"layers.0", "layers.1", "calls", "mean"}
    assert run.weights()["calls"] == 6  # one for each update
    np.testing.assert_allclose(run.weights()["mean"], 2 * 3 * X.mean(), rtol=0.01)
    assert model.calls.numpy() == 0
    assert run.model(X[:2], False).shape == (2, 10)
    assert run.model.calls.numpy() == 6
    assert fit(Module(), seed=1).fingerprint != run.fingerprint


def test_a_keras_layer_within_a_tf_module():
    class Mixed(tf.Module):
        def __init__(self):
            super().__init__()
            keras.utils.set_random_seed(0)
            self.inner, self.scale = Block(10), tf.Variable(tf.ones(10))
            self.generator = tf.random.Generator.from_seed(1)

        def __call__(self, x, training):
            x = (
                self.inner(tf.reshape(x, (len(x), -1)), training=training) * self.scale
            )  # len: it needs the size of a batch
            return x + 0.1 * self.generator.normal((10,)) if training else x

    run = same(Mixed)
    assert {"inner.dense/kernel", "inner.batch_normalization/moving_mean", "scale"} <= set(run.weights())
    assert fit(Mixed(), seed=1).fingerprint != run.fingerprint


def test_running_statistics_are_the_mean_over_examples():
    weights = fit(Module(), max_epochs=1, batch_size=90, shards=7).weights()
    np.testing.assert_allclose(weights["mean"], X.mean(), rtol=1e-5)
    assert weights["calls"] == 1


# The recipe


@keras.saving.register_keras_serializable()
class Scale(L.Layer):
    """Weights without names, which Keras calls variable_7 and so on."""

    def build(self, shape):
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones")
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.shift = self.add_weight(shape=(shape[-1],), initializer="zeros")

    def call(self, x):
        return x * self.factor + self.shift


def unnamed():
    keras.utils.set_random_seed(0)
    return keras.Sequential([L.Flatten(), Scale(), keras.Sequential([L.Dense(8), Scale(), L.Dense(10)])])


def after_a_class():
    """Weights that the class itself makes, before its layers have any."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            keras.utils.set_random_seed(0)
            self.first, self.inner = self.add_weight(shape=(784,), initializer="ones"), unnamed()
            self.last = keras.Variable(np.ones(10, np.float32))

        def call(self, x):
            return self.inner(keras.ops.reshape(x, (-1, 784)) * self.first) * self.last

    return Model()


def recurrent():
    """Layers that are named after others."""
    keras.utils.set_random_seed(0)
    return keras.Sequential([L.Reshape((28, 28)), L.Bidirectional(L.LSTM(4)), L.Dense(10)])


def transferred():
    """A layer whose weights were made in another model."""
    keras.utils.set_random_seed(0)
    other = keras.Sequential([keras.Input((1, 28, 28)), L.Flatten(), L.Dense(8), L.Dense(3)])
    return keras.Model(other.inputs[0], L.Dense(10)(other.layers[1].output))


AGAIN = {
    unnamed: ["scale/variable", "scale/variable_2", "sequential/scale/variable_5", "sequential/dense_1/bias"],
    after_a_class: ["variable", "variable_1", "sequential/scale/variable_4", "sequential/sequential/dense/bias"],
    recurrent: ["bidirectional/forward_lstm/lstm_cell/bias", "bidirectional/backward_lstm/lstm_cell/kernel"],
    transferred: ["sequential/dense/kernel", "dense/bias"],
    functional: ["mine/kernel", "dense/kernel"],
    Own: ["block_1/dense/kernel"],
}


@pytest.mark.parametrize("make", AGAIN)
def test_a_model_made_again_goes_on_where_the_first_one_stopped(make, tmp_path):
    """Whatever else was made in the process: names, recipe and fingerprint depend on the model alone."""
    first = fit(make(), run_dir=tmp_path, max_epochs=1)
    unnamed()(X[:3])
    made = make()
    made(X[:2])
    made.compile("adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    made.evaluate(X[:2], Y[:2], verbose=0)
    second = fit(made, max_epochs=1)
    assert second.recipe == first.recipe
    assert second.recipe["unchecked"] == []
    assert second.fingerprint == first.fingerprint
    assert set(AGAIN[make]) <= set(second.weights())
    resumed = fit(make(), run_dir=tmp_path)
    assert resumed.resumed == 3
    assert resumed.fingerprints == fit(make()).fingerprints
    trained = {array.tobytes() for array in resumed.weights().values()}
    assert {weight.numpy().tobytes() for weight in resumed.model.weights} == trained


PORTABLE = """
import ctypes
import numpy as np, samestep as ss, keras, tensorflow as tf
BEFORE
from samestep.backends import eigen
from samestep.backends.tensorflow import numerics
from samestep.models.tensorflow import lenet
r = np.random.default_rng(0)
x, y = r.random((96, 1, 28, 28), dtype=np.float32), r.integers(0, 10, 96)
for portable in (True, None):
    run = ss.Trainer(max_epochs=1, batch_size=48, devices=1, progress=False, portable=portable).fit(lenet(), (x, y))
    print(run.recipe["portable"], "cpu" in run.recipe["numerics"], run.recipe["numerics"]["caches"], run.fingerprint)

sizes = (ctypes.c_long * 3).from_address(eigen.address(numerics.KERNELS, "_Z" + eigen.SIZES))
for new in ([48 << 10, 2 << 20, 96 << 20], [8 << 10, 32 << 10, 1 << 20], eigen.EVERYWHERE):
    product = tf.linalg.matmul(x.reshape(96, 784), np.resize(x, (784, 64))).numpy()
    print(list(sizes), product.sum(), hash(product.tobytes()))
    sizes[:] = new

class Operation(tf.Module):
    def __init__(self, function):
        super().__init__()
        self.scale, self.function = tf.Variable(np.ones((784, 10), np.float32) / 784), function

    def __call__(self, x):
        return self.function(tf.reshape(x, (-1, 784)) @ self.scale + 0.5)

def outputs(function):
    from samestep.backends.tensorflow.backend import backend
    replica = backend.replica(Operation(function), lambda output, y: output, ss.cpu(), 1)
    return replica.evaluate(x, y, 0)[0]

for ours, same in ((tf.math.rsqrt, lambda x: 1 / tf.sqrt(x)), (tf.math.reciprocal, lambda x: 1 / x),
                   (tf.math.erfc, lambda x: 1 - tf.math.erf(x)), (tf.nn.softmax, lambda x: tf.exp(tf.nn.log_softmax(x)))):
    print(outputs(ours) == outputs(same))
outputs(tf.atan)
"""


def portable(before="", **variables):
    env = {name: value for name, value in os.environ.items() if name not in switch.ENVIRONMENT["tensorflow"]}
    code = PORTABLE.replace("BEFORE", before)
    return subprocess.run([sys.executable, "-c", code], env=env | variables, capture_output=True, text=True)


GREETS = """
import os, sys, types
from importlib import machinery
class Found:  # a TensorFlow whose libraries print
    def find_spec(self, name, path=None, target=None):
        if name == "tensorflow":
            return machinery.ModuleSpec(name, self)
    def create_module(self, spec): pass
    def exec_module(self, module):
        os.write(2, b"I0000 port.cc:153] oneDNN custom operations are on. You may see\\nE0000 no memory\\n")
        if "broken" in sys.argv:
            raise ImportError("a library is missing")
sys.meta_path.insert(0, Found())
import samestep.backends.tensorflow
os.write(2, b"after\\n")
"""


def test_tensorflow_starts_without_a_word_about_rounding():
    done = subprocess.run(
        [sys.executable, "-c", "import samestep; from samestep.models import tensorflow"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = subprocess.run([sys.executable, "-c", GREETS], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "E0000 no memory\nafter\n")  # nothing else is lost
    done = subprocess.run([sys.executable, "-c", GREETS, "broken"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("E0000 no memory\n")
    assert done.stderr.endswith("ImportError: a library is missing\n")


def test_a_portable_run():
    """In a process of its own, with the variables set in time. Eigen's sums follow the sizes of caches, which are set, too."""
    done = portable(SAMESTEP_PORTABLE="1")
    first, second, usual, *others = done.stdout.splitlines()
    assert first.startswith("True False fixed ")
    assert first == second
    assert usual.startswith("[32768, 1048576, 33554432] ")
    assert len({line.split()[-1] for line in (usual, *others[:2])}) > 1
    # operations that begin with an estimate of the CPU's are replaced, or named
    assert others[2:] == ["True"] * 4
    assert "portable: Atan, as used here, gives other bits on other CPUs" in done.stderr


def test_a_portable_run_that_comes_too_late():
    done = portable("keras.ops.matmul(np.ones((9, 9)), np.ones((9, 9)))", TF_ENABLE_ONEDNN_OPTS="1")
    assert (
        "portable: TensorFlow has already chosen its kernels by the CPU. Set SAMESTEP_PORTABLE=1 before" in done.stderr
    )


def test_a_build_that_hides_its_caches_cannot_be_portable(monkeypatch):
    assert symbols.function(numerics.FRAMEWORK, "no_such_function") is None
    assert symbols.function(numerics.FRAMEWORK / "not there", eigen.QUERY) is None
    monkeypatch.setattr(eigen, "SIZES", "no_such_name")
    with pytest.raises(ss.SamestepError, match="portable: X sums in an order that depends on the CPU's caches"):
        eigen.fix_caches(numerics.KERNELS, "X")
    assert not eigen.has_fixed(numerics.KERNELS)


def test_average():
    run = fit(sequential(), average=ss.swa(1))
    assert run.average is not None
    assert run.average_model(X[:2]).shape == (2, 10)


def test_a_model_that_cannot_be_copied_says_what_to_do():
    class Closed(keras.Model):
        def __init__(self, thing):
            super().__init__()
            self.dense = L.Dense(10)

        def call(self, x):
            return self.dense(keras.ops.reshape(x, (-1, 784)))

    run = fit(Closed(object()))
    assert run.weights()["dense/bias"].any()
    with pytest.raises(ss.SamestepError, match="the model Closed cannot be copied: give it get_config"):
        _ = run.model


# Noise


def draws_of(model, key):
    replica = backend.replica(model, lambda output, y: tf.reduce_sum(output, 1), ss.cpu(), 1)
    return [replica.gradient(X[:9], Y[:9], key, 0).tobytes() for _ in range(2)]


def global_noise():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = L.Dense(10, kernel_initializer="zeros")

        def call(self, x):
            return self.dense(keras.ops.reshape(x, (-1, 784)) * keras.random.uniform((784,)))

    return Model()


@pytest.mark.parametrize("make", [sequential, functional, Own, Module, global_noise])
def test_noise_comes_from_the_key_and_from_nothing_else(make):
    keras.utils.set_random_seed(1)
    model = make()
    backend.probe(model, None, X[:1], Y[:1])
    first, again = draws_of(model, 5)
    assert first == again == draws_of(model, 5)[0]
    assert first != draws_of(model, 6)[0]
    assert first != draws_of(model, 5 + (1 << 40))[0]


def test_dropout_drops_as_many_as_it_should_and_not_the_same_in_every_layer():
    class Twice(keras.Model):
        def __init__(self):
            super().__init__()
            self.scale = self.add_weight(shape=(2, 784), initializer="ones")
            self.first, self.second = L.Dropout(0.3), L.Dropout(0.3)

        def call(self, x, training=False):
            x = keras.ops.ones_like(keras.ops.reshape(x, (-1, 784)))
            layers = (self.first, self.second)
            return keras.ops.stack([layer(x, training=training) * self.scale[i] for i, layer in enumerate(layers)], 1)

    model = Twice()
    replica = backend.replica(model, lambda o, y: tf.reduce_sum(tf.reshape(o, (-1, 1568)), 1), ss.cpu(), 1)
    kept = replica.gradient(X[:80], Y[:80], 1, 0)[:1568].reshape(2, 784) * 0.7
    np.testing.assert_allclose(kept.mean(1) / 80, 0.7, atol=0.01)
    assert abs(np.corrcoef(kept)[0, 1]) < 0.15


def test_an_operation_that_cannot_be_given_a_seed_is_named():
    class Shuffles(tf.Module):
        def __init__(self):
            self.w = tf.Variable(tf.zeros((784, 10)))

        def __call__(self, x, training):
            x = tf.reshape(x, (-1, 784)) @ self.w
            return tf.random.shuffle(x) if training else x

    with pytest.raises(ss.SamestepError, match="RandomShuffle draws from a state of its own"):
        fit(Shuffles())


def test_a_variable_that_is_not_the_models_is_named():
    hidden = tf.Variable(1.0, name="hidden")

    class Uses(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = L.Dense(10)

        def call(self, x):
            hidden.assign_add(1.0)
            return self.dense(keras.ops.reshape(x, (-1, 784)) * hidden)

    with pytest.raises(ss.SamestepError, match="the model uses 'hidden:0', which is not among its variables"):
        fit(Uses())


# Losses


def test_losses_of_examples_and_their_mean_agree():
    def each(output, y):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(y, output)

    whole = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    losses = {None: 0.1, each: 0.1, (lambda o, y: tf.reduce_mean(each(o, y))): 0.1, whole: 0.1 / 16}
    runs = [fit(models_tensorflow.lenet_modern(), X[:32], Y[:32], loss=loss, schedule=rate, batch_size=16)
            for loss, rate in losses.items()]  # fmt: skip
    for run in runs[1:]:
        for name, weight in run.weights().items():
            np.testing.assert_allclose(weight, runs[0].weights()[name], atol=1e-6)


def test_a_loss_whose_shape_is_not_known_while_it_is_traced():
    def each(output, y):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(y, output)

    def hidden(output, y):
        value = each(output, y)
        return value if tf.executing_eagerly() else v1.placeholder_with_default(value, None)

    v1 = tf.compat.v1
    assert fit(line(), loss=hidden).fingerprints == fit(line(), loss=each).fingerprints


def test_a_loss_of_the_wrong_length_or_kind():
    with pytest.raises(ss.SamestepError, match="one value per example .* got shape"):
        fit(line(), loss=lambda output, y: tf.reduce_mean(output, (0, 1), keepdims=True)[0])
    with pytest.raises(ss.SamestepError, match="one value per example"):
        fit(line(3), loss=lambda output, y: tf.reshape(output, (-1,)))
    with pytest.raises(ss.SamestepError, match="loss must return a tensor .* got float"):
        fit(line(), loss=lambda output, y: 1.0)


# Errors


def test_labels_out_of_range():
    with pytest.raises(ss.SamestepError, match="labels must be from 0 to 2, as the model gives 3 scores"):
        fit(line(3))


def test_nan_names_step_and_shard():
    x = X.copy()
    x[draws.order(0, 0, 90)[32 + 31]] = np.nan  # the last example of the second batch
    with pytest.raises(ss.SamestepError, match="at step 1, shard 7"):
        fit(line(), x=x, max_epochs=1)


def test_other_types_are_named():
    with pytest.raises(ss.SamestepError, match="float16 and the model float32"):
        fit(line(), x=X.astype(np.float16))
    with pytest.raises(ss.SamestepError, match="has no parameters to train"):
        fit(keras.Sequential([L.Flatten()]))
    with pytest.raises(ss.SamestepError, match="must have __call__"):
        fit(tf.Module())
    with pytest.raises(
        ss.SamestepError, match=r"^the model Sequential has no weights yet: call it once, or model.build"
    ):
        models.load(keras.Sequential([L.Dense(2)]), {})


def test_float64_and_bytes():
    def make():
        start = keras.initializers.GlorotUniform(seed=1)
        return keras.Sequential([L.Flatten(dtype="float64"), L.Dense(10, dtype="float64", kernel_initializer=start)])

    assert same(make, x=X.astype(np.float64)).weights()["dense/kernel"].dtype == np.float64
    coded = (X * 255).astype(np.uint8)
    same(
        lambda: keras.Sequential([L.Rescaling(1 / 255), L.Flatten(), L.Dense(10, kernel_initializer="zeros")]), x=coded
    )


def test_out_of_memory_says_what_to_do():
    def fail():
        raise tf.errors.ResourceExhaustedError(
            None, None, "OOM when allocating tensor with shape[10,20] and type float"
        )

    with pytest.raises(ss.SamestepError, match=r"the device ran out of memory when \[10,20\] were .* shards"):
        backend.map([fail])


# samestep's optimizers, and Keras's


@pytest.mark.parametrize(
    "optimizer", [ss.sgd(momentum=0.9, nesterov=True), ss.adagrad(), ss.adamw(), ss.sgld(temperature=1e-4)]
)
def test_the_optimizers_of_samestep(optimizer):
    same(lambda: models_tensorflow.mlp((784, 16, 10)), counts=(2, 5), optimizer=optimizer, schedule=0.01)


@pytest.mark.parametrize("optimizer", [ss.sgd(momentum=0.9, nesterov=True), ss.adagrad(), ss.adam()])
def test_an_update_in_place_has_the_bits_of_one_on_whole_vectors(optimizer, monkeypatch):
    def run():
        return fit(models_tensorflow.mlp((784, 16, 10)), optimizer=optimizer, schedule=0.01, max_epochs=1).fingerprints

    blocks = run()
    monkeypatch.setattr("samestep.optimizers.updating.BLOCK", 1000)
    assert run() == blocks
    monkeypatch.delattr(type(backend), "in_memory")
    assert run() == blocks


def adam(variables):
    return keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.5)


def test_an_optimizer_of_keras_is_the_same_on_any_number_of_devices():
    run = same(lambda: models_tensorflow.mlp((784, 16, 10)), counts=(2, 5), optimizer=adam)
    assert run.history[-1]["lr"] == 0.01
    other = fit(models_tensorflow.mlp((784, 16, 10)), optimizer=keras.optimizers.Adam)
    assert other.recipe["optimizer"] != run.recipe["optimizer"]
    assert "keras.optimizers.AdamW({" in run.recipe["optimizer"]


def test_an_optimizer_of_keras_follows_the_schedule():
    schedule = keras.optimizers.schedules.CosineDecay(0.05, 6)
    inside = fit(line(), optimizer=lambda _: keras.optimizers.SGD(schedule))
    ours = fit(line(), optimizer=lambda _: keras.optimizers.SGD(0.7), schedule=schedule)
    np.testing.assert_allclose(ours.weights()["dense/kernel"], inside.weights()["dense/kernel"], rtol=1e-5, atol=1e-7)
    assert ours.history[-1]["lr"] == pytest.approx(float(schedule(5)))
    assert inside.history[-1]["lr"] is None  # only the optimizer knows it
    with pytest.raises(ss.SamestepError, match="has its rate inside. Leave lr out, or give the optimizer a number"):
        fit(line(), optimizer=lambda _: keras.optimizers.SGD(schedule), schedule=0.1)


def test_an_optimizer_goes_on_from_the_momenta_that_it_came_with():
    replica = backend.replica(models_tensorflow.mlp((784, 16, 10)), None, ss.cpu(), 1)
    total = np.ones(replica.size, np.float32)
    given = keras.optimizers.SGD(0.1, momentum=0.5)
    first = backend.updater(given, replica, 0.0)
    first.follow(total, 1, 0.1, 0, None)
    assert not given.built
    given.build([keras.Variable(array) for array in replica.named(replica.parameters).values()])
    given.variables[-1].assign(np.full(given.variables[-1].shape, 2.0))
    given.iterations.assign(1)
    second = backend.updater(given, replica, 0.0)
    assert repr(second) != repr(first)
    before = replica.named(replica.parameters.copy())
    second.follow(total, 1, 0.1, 0, None)
    moved = {name: (array - before[name]).mean() for name, array in replica.named(replica.parameters).items()}
    np.testing.assert_allclose(list(moved.values()), [-0.1, -0.1, -0.1, 1.0 - 0.1], rtol=1e-5)
    # its state by name, and back
    third = backend.updater(given, replica, 0.0)
    third.load(second.tensors())
    assert {name: a.tobytes() for name, a in third.tensors().items()} == {
        n: a.tobytes() for n, a in second.tensors().items()
    }


def test_optimizers_that_cannot_be_used():
    with pytest.raises(ss.SamestepError, match=r"optimizer must be a keras.optimizers.Optimizer"):
        fit(line(), optimizer=lambda variables: 3)
    with pytest.raises(ss.SamestepError, match="LossScaleOptimizer"):
        fit(line(), optimizer=lambda _: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    with pytest.raises(ss.SamestepError, match=r"^use_ema without .*: pass average=samestep.ema\(...\) instead$"):
        fit(line(), optimizer=keras.optimizers.SGD(0.1, use_ema=True))
    fit(line(), optimizer=keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2))


class Counting(keras.optimizers.SGD):
    """It divides the rate by the number of updates: counted in a variable of its own, in Python, or in a list of Python."""

    def __init__(self, learning_rate=0.5, kind="variable", **settings):
        super().__init__(learning_rate, **settings)
        self.kind, self.count, self.past = kind, 0, [0]

    def build(self, variables):
        super().build(variables)
        self.times = self.add_variable((), dtype="float32", name="times")

    def apply(self, gradients, variables=None):
        self.times.assign_add(1.0)
        if self.kind == "number":
            self.count += 1
        elif self.kind == "list":
            self.past.append(1)
        return super().apply([gradient / self.times for gradient in gradients], variables)


def test_an_optimizer_of_keras_with_a_variable_of_its_own_is_resumed(tmp_path, monkeypatch):
    whole = fit(line(), optimizer=lambda _: Counting())
    fit(line(), optimizer=lambda _: Counting(), run_dir=tmp_path, max_epochs=1)
    shutil.copytree(tmp_path, tmp_path / "twin")
    resumed = fit(line(), optimizer=lambda _: Counting(), run_dir=tmp_path, devices=2)
    assert resumed.resumed == 3
    assert resumed.fingerprints == whole.fingerprints
    load = updater.TensorflowUpdater.load
    forget = lambda self, tensors: load(self, tensors | {"times": np.zeros((), np.float32)})  # noqa: E731
    monkeypatch.setattr(updater.TensorflowUpdater, "load", forget)  # the twin: without it, other bits
    twin = fit(line(), optimizer=lambda _: Counting(), run_dir=tmp_path / "twin")
    assert twin.fingerprint != whole.fingerprint


@pytest.mark.parametrize(("kind", "name"), [("number", "count"), ("list", "past")])
def test_an_optimizer_of_keras_that_counts_in_python_is_refused(kind, name):
    with pytest.raises(ss.SamestepError) as refused:
        fit(line(), optimizer=lambda _: Counting(kind=kind))
    assert str(refused.value) == (
        f"the optimizer changes {name} in Python, but an update is compiled once: use add_variable"
    )


def test_what_a_copy_of_an_optimizer_of_keras_would_lack_is_refused():
    excluding = keras.optimizers.AdamW()
    excluding.exclude_from_weight_decay(var_names=["bias"])
    for given, name in ((Counting(kind="other"), "kind"), (excluding, "_exclude_from_weight_decay")):
        with pytest.raises(ss.SamestepError) as refused:
            fit(line(), optimizer=given)
        assert str(refused.value) == (
            f"get_config() of the optimizer leaves out {name}: pass a function that makes it from variables"
        )
    fit(line(), optimizer=Counting())  # the twin: the copy is the same


def test_weights_that_an_optimizer_of_keras_leaves_out_of_decay():
    """The nearest that Keras has to groups of parameters; after one step."""

    def excluding(variables):
        made = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        made.exclude_from_weight_decay(var_names=["bias"])
        return made

    def weights(optimizer):
        model = models_tensorflow.mlp((784, 16, 10))
        start = {name: np.ones_like(variable) for name, variable in model.w.items()}
        trainer = ss.Trainer(1, len(X), optimizer=optimizer, progress=False, devices="cpu")
        return trainer.fit(model, (X, Y), weights=start).weights()

    found, all_of_them = weights(excluding), weights(lambda _: keras.optimizers.AdamW(0.01, weight_decay=0.5))
    none = weights(lambda _: keras.optimizers.Adam(0.01))
    for name in found:
        same, other = (none, all_of_them) if name.endswith("bias") else (all_of_them, none)
        assert (found[name] == same[name]).all()
        assert (found[name] != other[name]).any()


def test_constraints_are_applied_by_keras_and_refused_by_samesteps_optimizers():
    def limited(constraint=None):
        rule = keras.constraints.MaxNorm(0.05) if constraint else None
        layer = L.Dense(10, kernel_initializer="zeros", kernel_constraint=rule)
        return keras.Sequential([L.Flatten(), L.Lambda(lambda x: x[:, :4]), layer])

    optimizer = functools.partial(keras.optimizers.SGD, 0.5)
    run = same(lambda: limited(True), optimizer=lambda _: optimizer())
    longest = np.linalg.norm(run.weights()["dense/kernel"], axis=0).max()
    assert longest == pytest.approx(0.05, rel=1e-3)
    free = fit(limited(), optimizer=lambda _: optimizer())
    assert np.linalg.norm(free.weights()["dense/kernel"], axis=0).max() > 0.06
    with pytest.raises(ss.SamestepError) as refused:
        fit(limited(True), optimizer=ss.sgd())
    assert str(refused.value) == (
        "dense/kernel has the constraint MaxNorm, which samestep's optimizers do not follow: use one of tensorflow, or leave "
        "it out"
    )


# Checkpoints


@pytest.mark.parametrize("optimizer", [ss.adam(), adam], ids=["samestep", "keras"])
def test_killed_and_resumed_on_another_number_of_devices(optimizer, tmp_path, monkeypatch):
    settings = {"optimizer": optimizer, "schedule": 0.01, "average": ss.swa(1)}
    whole = fit(Own(), devices=2, **settings)
    step, seen = Replicas.step, []

    def dying(self, *rest):
        seen.append(rest)
        if len(seen) == 5:
            raise KeyboardInterrupt
        return step(self, *rest)

    monkeypatch.setattr(Replicas, "step", dying)
    with pytest.raises(KeyboardInterrupt):
        fit(Own(), devices=3, run_dir=tmp_path / "run", checkpoint_every=2, **settings)
    monkeypatch.setattr(Replicas, "step", step)
    rest = fit(Own(), devices=1, run_dir=tmp_path / "run", checkpoint_every=2, **settings)
    assert rest.resumed == 4
    assert rest.fingerprints == whole.fingerprints
    assert {n: a.tobytes() for n, a in rest.weights().items()} == {n: a.tobytes() for n, a in whole.weights().items()}
    assert {n: a.tobytes() for n, a in rest.average.items()} == {n: a.tobytes() for n, a in whole.average.items()}


def test_tensors_and_vectors_to_the_bit_and_back():
    model = models_tensorflow.resnet18(width=4)
    replica, other = (backend.replica(model, None, ss.cpu(), 2) for _ in range(2))
    replica.assign(replica.parameters + np.float32(1e-3))
    replica.advance(replica.gradient(X[:9], Y[:9], 3, 1), 9)
    tensors = {name: array.copy() for name, array in replica.tensors().items()}
    other.load(tensors)
    assert other.fingerprint() == replica.fingerprint()
    assert other.parameters is not replica.parameters
    for ours, theirs in zip(replica.real_vectors(), other.real_vectors_from(tensors), strict=True):
        assert ours.tobytes() == theirs.tobytes()
    gradient = replica.gradient(X[:9], Y[:9], 4, 0)[: len(replica.parameters)]
    assert replica.flat(replica.named(gradient)).tobytes() == gradient.tobytes()


def test_fingerprints_see_every_bit_and_place():
    def of(*numbers):
        replica = backend.replica(models_tensorflow.mlp((784, 1)), None, ss.cpu(), 1)
        replica.parameters[: len(numbers)] = numbers
        return replica.fingerprint().tobytes()

    assert len({of(*n) for n in [(1, 2, 0), (2, 1, 0), (-1, -2, 0), (-1, 2, 0), (1, 2, -0.0)]}) == 5
    vector = np.zeros(200_000, np.float32)
    seen = set()
    for place in (0, 1, 65_535, 65_536, 131_072, 199_999):
        vector[:] = 0
        vector[place] = 1
        seen.add(fingerprint.of_vectors([vector]).tobytes())
    assert len(seen) == 6


# Devices


def test_device_functions():
    array = tf.ones(3)
    assert ss.put(array, "cpu") is array
    assert ss.device_of(array) == ss.cpu()
    assert isinstance(ss.put(np.ones(3, np.float32), "cpu", backend="tensorflow"), tf.Tensor)
    assert isinstance(ss.get(array), np.ndarray)
    assert backend.devices()[0] == ss.cpu()
    total, used = backend.memory(ss.cpu())
    assert 0 < used < total
    (copy,) = ss.replicate([array], "cpu")
    assert isinstance(copy, tf.Variable)
    assert ss.device_of(copy) == ss.cpu()
    if ss.num_gpus("tensorflow") == 0:
        assert ss.try_gpu(backend="tensorflow") == ss.cpu()
        with pytest.raises(ss.SamestepError, match="device cuda:0 is not there: tensorflow sees cpu"):
            ss.put(array, "cuda")


VIRTUAL = """
import sys
import numpy as np, samestep as ss
from samestep.backends.tensorflow.backend import backend
import tensorflow as tf
from samestep.models.tensorflow import mlp

assert [str(device) for device in backend.devices()][:1] == ["cpu"]  # asking does not start TensorFlow
(whole,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(whole, [tf.config.LogicalDeviceConfiguration()] * 3)
assert [str(device) for device in backend.devices() if device.kind == "cpu"] == ["cpu", "cpu:1", "cpu:2"]
for given in (np.arange(3.0), tf.range(3.0), tf.Variable(tf.range(3.0))):
    there = ss.put(given, "cpu:2", "tensorflow")
    assert there.device.endswith("CPU:2") and ss.device_of(there) == ss.cpu(2) != ss.cpu()
    assert ss.put(there, "cpu:2") is there
    assert ss.device_of(ss.put(there, "cpu:0")) == ss.cpu(), "cpu:0 is the first one"
    assert ss.get(there).tolist() == [0, 1, 2]
(copy,) = ss.replicate([there], "cpu:1")
assert isinstance(copy, tf.Variable) and ss.device_of(copy) == ss.cpu(1)
for how in ("tree", "gather", "ring", "sharded"):
    sums = ss.allreduce([ss.put(np.full(4, 1.0 + i), f"cpu:{i}", "tensorflow") for i in range(3)], how)
    assert [ss.device_of(total) for total in sums] == [ss.cpu(i) for i in range(3)]
    assert all(ss.get(total).tolist() == [6] * 4 for total in sums)
try:
    ss.put(there, "cpu:3")
except ss.SamestepError as error:
    assert str(error).startswith("device cpu:3 is not there: tensorflow sees cpu, cpu:1, cpu:2"), error
else:
    sys.exit("cpu:3 was taken")

random = np.random.default_rng(0)
x, y = random.random((90, 1, 28, 28), dtype=np.float32), random.integers(0, 10, 90)
for devices in ("auto", ["cpu:0", "cpu:1", "cpu:2"], 2, ["cpu:2"]):
    run = ss.Trainer(max_epochs=2, batch_size=32, devices=devices, progress=False).fit(mlp(dropout=0.5), (x, y))
    print(*run.devices, run.fingerprint, run.fingerprint == run.recipe["initial"])
"""


def test_logical_devices():
    """In a process of its own: TensorFlow cuts the CPU into devices before it starts, or not at all."""
    done = subprocess.run([sys.executable, "-c", VIRTUAL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    one = fit(models_tensorflow.mlp(dropout=0.5))
    devices = [["cpu"], ["cpu", "cpu:1", "cpu:2"], ["cpu", "cpu:1"], ["cpu:2"]]
    assert rows == [[*names, one.fingerprint, "False"] for names in devices]


@pytest.mark.parametrize("how", ["tree", "gather", "ring", "sharded"])
def test_allreduce(how):
    arrays = [tf.fill((2, 3), float(i)) for i in range(1, 4)]
    assert all(np.array_equal(total, np.full((2, 3), 6.0)) for total in ss.allreduce(arrays, how))
    variables = [tf.Variable(array) for array in arrays]
    assert ss.allreduce(variables, how)[1] is variables[1]
    assert variables[1].numpy()[0, 0] == 6


def test_data_as_tensors():
    assert fit(line(), tf.constant(X), tf.constant(Y)).fingerprints == fit(line()).fingerprints


def test_an_optimizer_object_of_keras():
    given = keras.optimizers.Adam(0.01)
    assert (
        fit(line(), optimizer=given).fingerprints == fit(line(), optimizer=given, schedule=0.01, devices=3).fingerprints
    )
    assert not given.built


def test_a_loss_object_has_one_name_in_every_process():
    run = fit(line(), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    assert " at 0x" not in run.recipe["loss"]


def test_a_model_of_no_framework():
    with pytest.raises(ss.SamestepError, match=r"tensorflow \(a keras.Model or a tf.Module\)"):
        fit(object())
    assert ss.device_of(keras.Variable(1.0)) == ss.cpu()


# Compiled


EAGER = f"""
import sys
sys.path.insert(0, {os.path.dirname(os.path.dirname(__file__))!r})
import samestep as ss
from conformance import suite
from samestep.backends.tensorflow.backend import backend
import tensorflow as tf

for name in sys.argv[1:]:
    model, data = getattr(suite.zoo, name)(), suite.data(name, 20).train
    backend.probe(model, None, data.x[:1], data.y[:1])
    replica = backend.replica(model, None, ss.cpu(), 2)
    compiled = replica.gradient(data.x, data.y, 1, 1)
    eager = replica.program.gradient(tf.constant(data.x), tf.constant(data.y), tf.constant(1)).numpy()
    assert compiled[: len(replica.parameters)].any()
    print(name, compiled.tobytes() == eager.tobytes())
"""


def eager(threads, *names):
    env = os.environ | {"TF_NUM_INTRAOP_THREADS": threads}
    done = subprocess.run([sys.executable, "-c", EAGER, *names], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(line.split() for line in done.stdout.splitlines())


def test_the_compiled_step_has_the_bits_of_the_eager_one():
    """Outside of a run TensorFlow computes with the pool of the process, so it must be of one thread, as a shard's is.

    Noise is not compared: in a compiled step it comes from the shard's key, and eagerly from a state that goes on.
    """
    names = "lenet", "lenet_modern", "resnet_with_batch_norm", "embedding"
    assert eager("1", *names) == dict.fromkeys(names, "True")
    # with other threads it is otherwise, so there is something to compare
    assert eager("2", "lenet_modern") == {"lenet_modern": "False"}


# Threads


SCRIPT = """
import numpy as np, keras, samestep as ss
BEFORE
from samestep.models.tensorflow import lenet
r = np.random.default_rng(0)
x, y = r.random((300, 1, 28, 28), dtype=np.float32), r.integers(0, 10, 300)
print(ss.Trainer(max_epochs=1, devices=2, progress=False).fit(lenet(), (x, y)).fingerprint)
"""


@functools.cache
def script(threads, before=""):
    env = os.environ | {"TF_NUM_INTRAOP_THREADS": threads}
    env.pop("TF_OVERRIDE_GLOBAL_THREADPOOL", None)
    code = SCRIPT.replace("BEFORE", before)
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


def test_the_pool_of_tensorflow_has_no_way_in():
    """In processes of their own: TensorFlow makes its pool of threads once, by the number of cores or by this variable."""
    done = [script(threads) for threads in ("1", "16")]
    assert not any(run.returncode for run in done), done[0].stderr
    assert len({run.stdout for run in done}) == 1


def test_a_pool_that_was_made_too_early_is_an_error():
    early = script("4", "import os; os.environ['TF_OVERRIDE_GLOBAL_THREADPOOL'] = '0'; keras.ops.ones(3)")
    assert "has a pool of 4 threads that the result would depend on" in early.stderr
    harmless = script("1", "import os; os.environ['TF_OVERRIDE_GLOBAL_THREADPOOL'] = '0'; keras.ops.ones(3)")
    assert harmless.stdout == script("1").stdout != ""


def test_a_model_that_is_made_before_the_backend_is_loaded():
    early = script("4", "keras.ops.ones(3)")
    assert early.stdout == script("1").stdout != "", early.stderr


def test_two_threads_per_shard_are_two():
    one, two = (fit(models_tensorflow.lenet(), threads_per_shard=n, shards=1, batch_size=90) for n in (1, 2))
    assert one.fingerprint != two.fingerprint


def test_nothing_of_the_run_stays_behind():
    before = dict(os.environ)
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    fit(line())
    assert dict(os.environ) == before
    assert tf.config.threading.get_intra_op_parallelism_threads() == threads
    assert not backend._programs
    assert isinstance(backend.put(X, ss.cpu()), tf.Tensor)


def test_importing_samestep_imports_no_tensorflow():
    code = (
        "import sys, samestep, samestep.training.trainer; print('tensorflow' in sys.modules or 'keras' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


# Modes around a fit, and state of any type


class Policed(L.Layer):
    """Computes in the type of Keras' policy, as it is when it is called."""

    def __init__(self):
        super().__init__()
        self.inner = L.Dense(10, kernel_initializer="ones")
        self.inner.build((None, 8))
        self.built = True

    def call(self, x):
        kind = keras.config.dtype_policy().compute_dtype
        return self.inner(keras.ops.cast(keras.ops.cast(keras.ops.reshape(x, (-1, 784))[:, :8], kind), "float32"))


@contextlib.contextmanager
def between(on, off):
    on()
    try:
        yield
    finally:
        off()


def policy(name):
    return between(lambda: keras.config.set_dtype_policy(name), lambda: keras.config.set_dtype_policy("float32"))


def eagerly():
    run = tf.config.run_functions_eagerly
    return between(lambda: run(True), lambda: run(False))


TAKEN = {
    "nothing": contextlib.nullcontext,
    "tf.device": lambda: tf.device("/GPU:0"),
    "a tape": lambda: tf.GradientTape(persistent=True),
    "init_scope": tf.init_scope,
    "stop_recording": None,
    "run_functions_eagerly": eagerly,
    "name_scope": lambda: tf.name_scope("a"),
    "keras.name_scope": lambda: keras.name_scope("a"),
    "keras.device": lambda: keras.device("cpu:0"),
    "variable_creator_scope": lambda: tf.variable_creator_scope(lambda make, **about: make(**about)),
}
STOPPED = {
    "a tf.distribute strategy": lambda: tf.distribute.OneDeviceStrategy("/CPU:0").scope(),
    "a graph": lambda: tf.Graph().as_default(),
    "stateless_scope": keras.StatelessScope,
}


@pytest.mark.parametrize("shards", [1, 4])  # one shard was computed in the thread that has the scope
@pytest.mark.parametrize("name", TAKEN)
def test_a_scope_around_a_fit_has_no_way_in(name, shards, monkeypatch):
    def run(devices):
        return fit(model, devices=min(devices, shards), shards=shards, max_epochs=1)

    model = Policed()
    if name == "stop_recording":  # it wants a tape that records
        tape = tf.GradientTape(persistent=True)
        with tape:
            found = modes.outcome(monkeypatch, tape.stop_recording, run)
    else:
        found = modes.outcome(monkeypatch, TAKEN[name], run)
    plain = run(1)
    assert found == (plain.fingerprints, plain.recipe)


def test_in_the_users_thread_a_scope_would_change_the_gradient(monkeypatch):
    plain = fit(Policed(), shards=1, max_epochs=1)
    monkeypatch.setattr(type(backend), "map", lambda self, tasks: [task() for task in tasks])  # in the user's thread
    with tf.init_scope():
        twin = fit(Policed(), shards=1, max_epochs=1, rehearse=False, check_every=None)
    assert twin.fingerprints != plain.fingerprints


def test_the_policy_of_keras_is_that_of_every_thread(monkeypatch):
    """Keras keeps it for each thread, and the recipe has that of the user's."""
    model = Policed()
    fingerprints, recipe = modes.outcome(
        monkeypatch, lambda: policy("mixed_bfloat16"), lambda k: fit(model, devices=k, shards=4)
    )
    assert recipe["numerics"]["settings"]["dtype_policy"] == "mixed_bfloat16"
    assert fingerprints != fit(model, shards=4).fingerprints
    monkeypatch.setattr(keras.config, "set_dtype_policy", lambda policy: None)  # the twin: threads have Keras' default
    before = keras.config.dtype_policy()
    set_dtype_policy("mixed_bfloat16")
    try:
        assert fit(model, shards=4).fingerprints == fit(model, shards=4, devices=2).fingerprints != fingerprints
    finally:
        set_dtype_policy(before)


@pytest.mark.parametrize("name", STOPPED)
def test_a_scope_that_changes_variables_is_refused(name, monkeypatch):
    model = Policed()
    said = modes.outcome(monkeypatch, STOPPED[name], lambda k: fit(model, devices=k, shards=4))
    assert said == f"the fit is inside {name}, where variables are others: leave it out, around a fit"


STATES = {  # at the start, and after nine steps
    "float16": ([0.25, 3], [9.25, 12]), "bfloat16": ([0.25, 3], [9.25, 12]), "int8": ([-3, 100], [6, 109]),
    "uint8": ([250, 3], [3, 12]), "int64": ([2**62 + 1, -5], [2**62 + 10, 4]), "bool": ([True, False], [False, True]),
}  # fmt: skip


def cast(start, dtype):
    return tf.constant(start) if dtype == "string" else tf.cast(tf.constant(start), dtype)


class Holding(tf.Module):
    def __init__(self, dtype, start, changes):
        super().__init__()
        self.w = tf.Variable(tf.zeros((4, 10)))
        self.s, self.changes = tf.Variable(cast(start, dtype), trainable=False), changes

    def __call__(self, x, training=False):
        if training and self.changes:
            now = self.s.read_value()
            self.s.assign(tf.logical_not(now) if now.dtype == tf.bool else now + tf.ones_like(now))
        return tf.reshape(x, (-1, 784))[:, :4] @ self.w


class Layered(L.Layer):
    def __init__(self, dtype, start, changes):
        super().__init__()
        self.inner, self.about = L.Dense(10, kernel_initializer="zeros"), (dtype, start, changes)
        self.inner.build((None, 4))
        self.s = self.add_weight(shape=(2,), dtype=dtype, trainable=False, initializer="zeros", name="s")
        self.s.assign(cast(start, dtype))
        self.built = True

    def call(self, x, training=False):
        if training and self.about[2]:
            now = self.s.value.read_value()
            self.s.assign(tf.logical_not(now) if now.dtype == tf.bool else now + tf.ones_like(now))
        return self.inner(tf.reshape(x, (-1, 784))[:, :4])

    def get_config(self):
        return dict(zip(("dtype", "start", "changes"), self.about, strict=True))


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("dtype", STATES)
@pytest.mark.parametrize("make", [Holding, Layered])
def test_state_of_any_type_survives(make, dtype, changes, tmp_path):
    start, end = STATES[dtype]
    value = end if changes else start
    run = modes.survives(fit, lambda: make(dtype, start, changes), "s", value, tmp_path / "run", shards=4)
    found = run.model.s.numpy()
    assert (str(found.dtype), found.tolist()) == (dtype, value)


@pytest.mark.parametrize(("dtype", "start"), [("complex64", [1j, 2]), ("string", ["a", "b"])])
def test_state_of_other_types_is_refused(dtype, start):
    with pytest.raises(
        ss.SamestepError, match=f"s is of type {dtype}: state must be of real or whole numbers, or true"
    ):
        fit(Holding(dtype, start, False))


# tf.data


def doubled(x, y):
    return 2 * x, y


def test_a_dataset_that_can_be_indexed_gives_what_its_arrays_give():
    given = tf.data.Dataset.from_tensor_slices((X / 2, Y)).map(doubled).cache().prefetch(2)
    run, plain = [fit_data(data) for data in (ss.Data(given), (X, Y))]
    assert run.fingerprint == plain.fingerprint != run.recipe["initial"]
    assert {"train", "doubled()"} <= run.recipe["code"].keys()
    x, y = ss.Data(tf.data.Dataset.from_tensor_slices({"a": X, "b": Y})).train.read(np.array([7, 3]))
    assert y is x
    assert (x["a"].tolist(), x["b"].tolist()) == (X[[7, 3]].tolist(), Y[[7, 3]].tolist())


def fit_data(data):
    settings = {"max_epochs": 1, "batch_size": 32, "devices": 2, "progress": False}
    return ss.Trainer(**settings).fit(models_tensorflow.lenet_modern(), data)


def test_a_dataset_that_cannot_be_indexed_is_refused():
    rows = tf.data.Dataset.from_tensor_slices((X, Y))
    drawn = tf.data.Dataset.from_generator(lambda: iter(X), output_signature=tf.TensorSpec((1, 28, 28), tf.float32))
    known = drawn.apply(tf.data.experimental.assert_cardinality(90))
    cannot = "train: TensorFlow cannot index this tf.data.Dataset ({}): pass arrays or a source"
    lines = {
        "train: pass the tf.data.Dataset from before shuffle(): the Trainer draws the order": rows.shuffle(9).prefetch(
            1
        ),
        "train: pass the tf.data.Dataset from before batch(): the Trainer cuts batches": rows.batch(9),
        cannot.format("its length is not known"): drawn,
        cannot.format("it has no elements by index"): known,
    }
    for line, given in lines.items():
        with pytest.raises(TypeError) as caught:
            ss.Data(given).train.read(np.arange(2))
        assert str(caught.value) == line


def test_losses_over_a_weight_are_those_of_keras(in_float64):
    """Masks of layers, ignored classes and weights of examples: parts add up to the loss of the whole."""
    random = np.random.default_rng(0)
    ids, labels, each, one = (
        random.integers(0, 4, (6, 3)),
        random.integers(0, 5, (6, 3)),
        random.random((6, 3)),
        random.random((6, 1)),
    )
    ids[2], some = 0, np.where(random.random((6, 3)) < 0.5, -1, labels)
    masked = keras.Sequential([keras.layers.Embedding(4, 4, mask_zero=True), keras.layers.Dense(5)])
    plain = keras.Sequential([keras.layers.Embedding(4, 4), masked.layers[1]])
    masked(ids)
    plain(ids)
    plain.layers[0].set_weights(masked.layers[0].get_weights())
    usual = functools.partial(keras.losses.SparseCategoricalCrossentropy, from_logits=True)
    by_weight = usual(reduction="mean_with_sample_weight")
    usual_but_one, whole = usual(ignore_class=-1), usual(reduction="sum")
    cases = [
        (usual(), masked, labels, None), (usual_but_one, plain, some, None), (usual_but_one, masked, some, None),
        (usual(), masked, labels, each), (usual_but_one, masked, some, each), (by_weight, plain, labels, each),
        (by_weight, plain, labels, one), (by_weight, masked, labels, each), (by_weight, masked, labels, None),
        (usual(), plain, labels, each), (whole, plain, labels, each), (whole, masked, labels, None),
        (keras.losses.MeanSquaredError(), masked, random.normal(size=(6, 3, 5)), None),
    ]  # fmt: skip
    for i, (loss, model, y, weights) in enumerate(cases):
        totals, kind = [], "sum" if loss.reduction == "sum" else "mean"
        for part in (slice(0, 1), slice(1, 3), slice(3, 6)):
            given = y[part] if weights is None else (y[part], weights[part])
            totals.append(backend_module.backend.loss_of(Measure(loss, kind), model(ids[part]), given))
        total, weight = sum(float(one) for one, _ in totals), [other for _, other in totals]
        over = {"sum": 1, "mean": 6}[kind] if weight[0] is None else sum(map(float, weight))
        assert abs(total / over - float(loss(y, model(ids), sample_weight=weights))) < 1e-14, i
        assert (weight[0] is not None) == (i < 9 or i == 12)


def test_weights_of_examples_may_have_a_last_axis_of_one():
    """As Keras has it; they were once broadcast against the losses."""
    random = np.random.default_rng(0)
    scores, y, weights = tf.constant(random.normal(size=(6, 5))), random.integers(0, 5, 6), random.random((6, 1))
    usual = functools.partial(keras.losses.SparseCategoricalCrossentropy, from_logits=True, dtype="float64")
    for loss in (usual(reduction="mean_with_sample_weight"), usual(ignore_class=2), usual()):
        expected = float(loss(y, scores, sample_weight=weights))
        for given in ((y, weights), [y, weights], [y, weights[:, 0]]):
            total, weight = backend.loss_of(Measure(loss), scores, given)
            assert abs(float(total) / float(6 if weight is None else weight) - expected) < 1e-14
        if weight is not None:
            with pytest.raises(
                ss.SamestepError, match=r"^weights must have the shape of the loss, \(6,\), got \(6, 2\): "
            ):
                backend.loss_of(Measure(loss), scores, (y, np.ones((6, 2))))


def test_the_default_loss_follows_masks(in_float64):
    random = np.random.default_rng(0)
    ids, labels = random.integers(0, 4, (6, 3)), random.integers(0, 5, (6, 3))
    labels[0, 0], ids[0, 0] = -100, 1
    layers = keras.layers.Embedding(4, 4, mask_zero=True, dtype="float64"), keras.layers.Dense(5, dtype="float64")
    model = keras.Sequential(layers)
    total, weight = backend.loss_of(Measure(), model(ids), tf.constant(labels))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-100)
    assert weight == ((ids != 0) & (labels != -100)).sum()
    assert abs(float(total) / float(weight) - float(loss(labels, model(ids)))) < 1e-14


class Doubled(keras.losses.MeanSquaredError):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return 2 * super().__call__(y_true, y_pred, sample_weight)


def test_what_is_not_a_usual_loss_of_keras_is_called_as_it_is():
    output, y = tf.constant([[1.0], [3.0]]), tf.constant([[0.0], [0.0]])
    assert backend_module.backend.loss_of(Measure(Doubled()), output, y) == (20.0, None)
    assert backend_module.backend.loss_of(Measure(keras.losses.mean_squared_error), output, y) == (10.0, None)
    assert backend_module.backend.loss_of(Measure(keras.losses.MeanSquaredError(reduction=None)), output, y) == (
        10.0,
        None,
    )


def test_a_number_is_not_rounded_to_half_precision():
    for value in (0.1, tf.constant([0.1], tf.float64), 257):
        for kind, wide in ((tf.bfloat16, tf.float32), (tf.float32, tf.float32), (tf.float64, tf.float64)):
            number = backend_module.backend.number(value, tf.zeros((), kind))
            assert (number.dtype, number.shape) == (wide, ())
            assert number.numpy() == wide.as_numpy_dtype(257 if isinstance(value, int) else 0.1)


@pytest.fixture
def in_float64():
    before = keras.backend.floatx()
    keras.backend.set_floatx("float64")
    yield
    keras.backend.set_floatx(before)


def test_losses_of_keras_take_a_column_and_a_row() -> None:
    """They give y the shape of the output themselves."""
    x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")

    def run(y: np.ndarray) -> ss.Run:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        loss = keras.losses.MeanSquaredError()
        return ss.Trainer(1, 12, shards=3, devices=1, loss=loss, schedule=0.01, progress=False).fit(model, (x, y))

    assert run(x[:, 0]).fingerprints == run(x[:, :1]).fingerprints
