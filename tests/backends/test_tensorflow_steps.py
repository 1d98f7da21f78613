"""TensorFlow: how a step calls its graphs. The bits are those of Session.run, and of threads that keep denormal numbers."""

import os

import numpy as np
import pytest

if os.environ.get("SAMESTEP_TEST_BACKEND", "torch") != "tensorflow":
    pytest.skip("one framework per process: set SAMESTEP_TEST_BACKEND=tensorflow", allow_module_level=True)

import keras
import tensorflow as tf

import samestep as ss
from samestep.backends.tensorflow import graph

random = np.random.default_rng(0)
X, Y = random.random((52, 12), dtype=np.float32), random.integers(0, 10, 52)
OPTIMIZERS = [ss.adam(), keras.optimizers.Adam(0.01)]  # computed by NumPy; called as a graph, too


def model():
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense
    made = keras.Sequential([dense(20), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), dense(10)])
    made.build((None, 12))
    return made


def fit(optimizer, devices=1, threads=1):
    settings = {"max_epochs": 2, "batch_size": 20, "shards": 8, "schedule": 0.05, "progress": False}
    trainer = ss.Trainer(**settings, optimizer=optimizer, devices=devices, threads_per_shard=threads)
    return trainer.fit(model(), (X, Y)).fingerprints


def by_session_run(within, outputs, inputs):
    """What a graph is called by otherwise."""
    return lambda *arrays: within.run(outputs, dict(zip(inputs, arrays, strict=True)))


def slightly_off(within, outputs, inputs):
    """The broken twin: another graph than the one that was asked for, by a little."""

    def call(*arrays):
        first, *rest = by_session_run(within, outputs, inputs)(*arrays)
        return [first * first.dtype.type(1.001), *rest]

    return call


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_bits_are_those_of_session_run(monkeypatch, optimizer, threads):
    found = fit(optimizer, threads=threads)
    assert fit(optimizer, devices=3, threads=threads) == found
    monkeypatch.setattr(graph, "callable_of", by_session_run)
    assert fit(optimizer, threads=threads) == found
    monkeypatch.setattr(graph, "callable_of", slightly_off)
    assert fit(optimizer, threads=threads)[0] != found[0]


def test_a_fit_does_not_call_session_run(monkeypatch):
    assert graph.own_threads()  # which calls it, once in a process

    def refused(*_):
        raise NotImplementedError("Session.run")

    monkeypatch.setattr(graph.v1.Session, "run", refused)
    fit(ss.sgd())
    monkeypatch.setattr(graph, "callable_of", by_session_run)
    with pytest.raises(NotImplementedError, match=r"Session\.run"):
        fit(ss.sgd())


def test_the_thread_that_calls_keeps_denormal_numbers():
    """The broken twin computes in threads of TensorFlow's, as it would have to if shards were branches of one graph."""
    left, right = (np.full(100, value, np.float32) for value in (1.3e-38, -1.2e-38))
    with tf.Graph().as_default() as made:
        inputs = [graph.v1.placeholder(tf.float32, (None,)) for _ in range(2)]
        total = inputs[0] + inputs[1]
    (found,) = graph.callable_of(graph.session(made, 1), [total], inputs)(left, right)
    assert (found == left + right).all()
    assert found.all()
    twin = graph.v1.Session(graph=made, config=graph.v1.ConfigProto(inter_op_parallelism_threads=2))
    (found,) = graph.callable_of(twin, [total], inputs)(left, right)
    assert not found.any()
