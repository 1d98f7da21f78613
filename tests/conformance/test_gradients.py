"""One shard's gradient in each framework against a backward pass written by hand (reference.py), in both precisions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import reference

import samestep as ss
from conformance import suite
from conformance.precision import PRECISIONS, computing_in, double
from samestep import models
from samestep.backends import find

EXAMPLES, SHARDS, SHARD = 6, 8, 3
MODELS = ("mlp", "lenet", "lenet_modern")


class Tolerance(NamedTuple):
    loss: float  # relative
    gradient: float  # of each tensor: the largest difference over the largest value
    reason: str


# By kind of arithmetic. u is half an ulp of 1: 6e-8 in float32, 1e-16 in float64.
TOLERANCES = {
    "float32": Tolerance(
        2e-6,
        1e-5,
        "a chain of sums of up to 4,000 products, rounded at random: √4000 u = 4e-6; no ReLU changes sides here",
    ),
    "float64": Tolerance(2e-15, 2e-14, "the same sums, √4000 u = 7e-15; the reference rounds as much"),
}


def numbers(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.random((EXAMPLES, 1, 28, 28)), random.integers(0, 10, EXAMPLES)


def start(model: str) -> models.Weights:
    """Weights with biases that are not zero, so that a wrong use of them would show; those of LeNet ten times as large as
    in the chapter, as they are after some training: from its start gradients are so small that they show little."""
    random = np.random.default_rng(1)
    weights = models.mlp((784, 32, 10)) if model == "mlp" else getattr(models, model)()
    scale = np.float32(10 if model == "lenet" else 1)
    return {
        name: scale * weight + 0.01 * random.standard_normal(weight.shape).astype(np.float32) * (weight.ndim == 1)
        for name, weight in weights.items()
    }


def model_of(name: str, precision: str):
    """A model of the framework under test that starts from `start`."""
    arguments = ((784, 32, 10), 0.0) if name == "mlp" else ()
    given = getattr(suite.zoo.models, name)(*arguments)
    return models.load(given if precision == "float32" else double(given, *arguments), start(name))


def gradient(name: str, precision: str) -> tuple[float, dict[str, np.ndarray], int]:
    """Loss, gradient and hits of one shard, as the framework computes them."""
    (x, y), device = numbers(), ss.cpu()
    x = x.astype(precision)
    with computing_in(precision):
        model = model_of(name, precision)
        backend = find.of_model(model)
        with backend.session([device], deterministic=True, threads=1):
            backend.probe(model, None, x[:1], y[:1], "x")
            replica = backend.replica(model, None, device, SHARDS)
            vector = replica.gradient(backend.put(x, device), backend.put(y, device), 1, SHARD)
            assert len(vector) == replica.size
            losses, hits = np.split(np.array(backend.get(vector)[-2 * SHARDS :]), 2)
            named = replica.named(vector[: len(replica.parameters)])
    assert np.flatnonzero(losses).tolist() == [SHARD], "a shard writes its own loss and no other"
    assert hits.sum() == hits[SHARD]
    return float(losses[SHARD]), {key: np.array(value) for key, value in named.items()}, int(hits[SHARD])


def agree(
    precision: str, ours: tuple[float, dict[str, np.ndarray], int], theirs: tuple[float, reference.Weights]
) -> None:
    """Assert that a loss and a gradient are those of the reference."""
    loss, slope, reason = TOLERANCES[precision]
    assert abs(ours[0] - theirs[0]) <= loss * theirs[0], f"the loss is {ours[0]!r}, not {theirs[0]!r}; {reason}"
    assert ours[1].keys() == theirs[1].keys()
    for name, expected in theirs[1].items():
        got = ours[1][name]
        assert got.shape == expected.shape
        assert got.dtype == precision
        largest = np.abs(expected).max()
        assert largest > 0, f"the gradient of {name} is zero: there is nothing to compare"
        off = np.abs(got - expected).max() / largest
        assert off <= slope, f"the gradient of {name} is off by {off:.1e} of its largest value; {reason}"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_of_a_shard_is_the_one_by_hand(name: str, precision: str) -> None:
    x, y = numbers()
    expected, found = reference.gradient(name, start(name), x.astype(precision), y), gradient(name, precision)
    agree(precision, found, expected)
    output, _ = reference.run(reference.steps(name, start(name)), start(name), x)
    assert found[2] == (output.argmax(1) == y).sum()


def along(name: str, tensor: str, layers: list[reference.Layer] | None = None) -> tuple[float, float]:
    """The slope of the loss along some direction in one tensor: by the backward pass, and by the loss on both sides."""
    x, y = numbers()
    weights = {key: weight.astype(np.float64) for key, weight in start(name).items()}
    direction = np.random.default_rng(2).standard_normal(weights[tensor].shape)
    direction /= np.linalg.norm(direction)
    _, gradients = reference.gradient(name, weights, x, y, layers)
    ends = []
    for sign in (1, -1):
        moved = weights | {tensor: weights[tensor] + sign * 1e-6 * direction}
        output, _ = reference.run(layers or reference.steps(name, moved), moved, x)
        ends.append(reference.loss_of(output, y)[0])
    return float((gradients[tensor] * direction).sum()), (ends[0] - ends[1]) / 2e-6


TENSORS = [(name, tensor) for name in MODELS for tensor in start(name)]


@pytest.mark.parametrize(("name", "tensor"), TENSORS)
def test_the_backward_pass_by_hand_is_the_slope_of_the_loss(name: str, tensor: str) -> None:
    slope, measured = along(name, tensor)
    assert abs(slope) > 1e-6
    # the loss is about 14, rounded to 2e-15: over a distance of 2e-6 that is 1e-9; and no ReLU changes sides on the way
    assert slope == pytest.approx(measured, rel=1e-6, abs=1e-8)


# Broken twins: a backward pass with one wrong term, which both comparisons must reject.


def pool_forgets_to_divide(layers: list[reference.Layer]) -> None:
    good = layers[2]
    layers[2] = good._replace(backward=lambda w, x, dy: good.backward(w, x, 4 * dy))


def filter_is_turned_round(layers: list[reference.Layer]) -> None:
    """The gradient by a convolution's input, with the filter the wrong way round."""
    good = layers[3]

    def backward(w, x, dy):
        turned = w | {"conv2.weight": w["conv2.weight"][:, :, ::-1, ::-1]}
        return good.backward(w, x, dy)[0], good.backward(turned, x, dy)[1]

    layers[3] = good._replace(backward=backward)


def an_example_is_forgotten(layers: list[reference.Layer]) -> None:
    """The bias of the first convolution without the last example."""
    good = layers[0]

    def backward(w, x, dy):
        found, dx = good.backward(w, x, dy)
        return found | {"conv1.bias": dy[:-1].sum((0, 2, 3))}, dx

    layers[0] = good._replace(backward=backward)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("breakage", [pool_forgets_to_divide, filter_is_turned_round, an_example_is_forgotten])
def test_a_wrong_term_is_rejected(breakage, precision: str) -> None:
    x, y = numbers()
    layers = reference.steps("lenet", start("lenet"))
    breakage(layers)
    wrong = reference.gradient("lenet", start("lenet"), x.astype(precision), y, layers)
    with pytest.raises(AssertionError, match="the gradient of conv1"):
        agree(precision, gradient("lenet", precision), wrong)
    slope, measured = along("lenet", "conv1.bias", layers)
    assert slope != pytest.approx(measured, rel=1e-6, abs=1e-8)


def far(name: str, training: bool) -> float:
    """How far the gradient of a batch is from the sum over its two shards, relative to these."""
    (x, y), device, model = suite.data(name, 12).train.read(np.arange(12)), ss.cpu(), getattr(suite.zoo, name)()
    backend = find.of_model(model)
    with backend.session([device], deterministic=True, threads=1):
        backend.probe(model, None, x[:1], y[:1], "x")
        replica = backend.replica(model, None, device, 2)
        if not replica.slopes:
            pytest.skip("this framework has no right gradient in evaluation mode")
        cut = [slice(0, 12), slice(0, 5), slice(5, 12)]
        given = [[backend.put(np.ascontiguousarray(array[span]), device) for array in (x, y)] for span in cut]
        found = [np.array(backend.get(replica.gradient(*pair, 1, 0, training))) for pair in given]
    whole, *shards = (vector[: replica.layouts[0].size].astype(np.float64) for vector in found)
    return float(np.linalg.norm(whole - sum(shards)) / sum(map(np.linalg.norm, shards)))


@pytest.mark.parametrize("name", suite.MODELS)
def test_in_evaluation_mode_a_gradient_is_the_sum_over_shards(name: str) -> None:
    """By this a loss is judged before a fit begins (training/measuring.py, which lets pass 0.01)."""
    if suite.BACKEND == "mxnet" and name == "mlp_with_dropout":
        assert far(name, training=False) > 0.01  # it has none without noise, which is seen
        return
    assert far(name, training=False) < 1e-4
    if name in ("mlp_with_dropout", suite.NORMED):  # noise and statistics are the shard's
        assert far(name, training=True) > 0.01
