"""Curvature and range tests in every framework: NumPy knows the Hessian of softmax regression; same bits on all devices."""

import importlib

import numpy as np
import pytest

import samestep as ss
from conformance import suite
from samestep.tuning.probing import curvature, prepared, range_test

KIND = "cuda" if ss.num_gpus() else "cpu"
N, D, CLASSES = 36, 5, 3
RNG = np.random.default_rng(5)
X = RNG.standard_normal((N, D)).astype(np.float32)
Y = RNG.integers(0, CLASSES, N)


def ready(devices, **settings):
    model = importlib.import_module(f"samestep.models.{suite.BACKEND}").mlp((D, CLASSES), seed=2)
    given = {"batch_size": N, "shards": 4, "devices": [KIND] * devices, "progress": False, **settings}
    return prepared(ss.Trainer(1, **given), model, (X, Y))


def exact(weights):
    """The largest eigenvalue of the mean of (diag(p) − ppᵀ) ⊗ aaᵀ, a = (x, 1)."""
    (w,) = [one for one in weights.values() if one.ndim == 2]
    (b,) = [one for one in weights.values() if one.ndim == 1]
    w = w if w.shape == (D, CLASSES) else w.T
    scores = X.astype(np.float64) @ w + b
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    a = np.column_stack([X, np.ones(N)]).astype(np.float64)
    hessian = sum(np.kron(np.diag(q) - np.outer(q, q), np.outer(r, r)) for q, r in zip(p, a, strict=True)) / N
    return np.linalg.eigvalsh(hessian)[-1]


def test_the_curvature_of_softmax_regression():
    found = []
    for devices in (1, 3):
        with ready(devices) as fit:
            found.append(curvature(fit))
            assert found[-1].eigenvalue == pytest.approx(exact(fit.group.replicas[0].tensors()), rel=0.02)
    assert found[0] == found[1]  # the same bits, on a number of devices that does not divide the shards
    with ready(1, shards=2) as fit:  # a broken twin: another order of additions
        assert curvature(fit).eigenvalue != found[0].eigenvalue
    assert found[0].converged
    with ready(1, batch_size=8) as fit:
        assert curvature(fit).eigenvalue == pytest.approx(
            found[0].eigenvalue, rel=0.01
        )  # over all batches of the epoch


def test_a_range_test_on_one_device_and_three():
    found = []
    for devices in (1, 3):
        with ready(devices, batch_size=12, optimizer=ss.sgd(momentum=0.9)) as fit:
            found.append(list(range_test(fit, 1e-4, 1e3, 50).rows()))
    assert found[0] == found[1]
    with ready(1, batch_size=12, optimizer=ss.sgd(momentum=0.9), seed=1) as fit:  # a broken twin: other batches
        assert list(range_test(fit, 1e-4, 1e3, 50).rows()) != found[0]
    steps = [row for row in found[0] if row["curve"] == "of each step"]
    assert 20 < len(steps) < 50  # it has diverged before the end
    assert steps[20]["y"] < steps[0]["y"]
