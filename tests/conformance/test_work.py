"""Losses and batches as people have them: the full batch's gradient, whatever the shards; the same bits on any devices."""

import importlib

import numpy as np
import pytest
from sources import cut

import samestep as ss
from conformance import suite
from conformance.precision import computing_in
from samestep.backends.losses import Measure

work = importlib.import_module(f"conformance.zoo_work_{suite.BACKEND}")
KIND = "cuda" if ss.num_gpus() else "cpu"
N, LENGTH, FEATURES, CLASSES = 24, 3, 4, 5
RANDOM = np.random.default_rng(0)
X, START = RANDOM.normal(size=(2, N, LENGTH, FEATURES)), RANDOM.normal(size=(FEATURES, CLASSES))
LABELS = RANDOM.integers(0, CLASSES, (N, LENGTH))
SOME = np.where(RANDOM.random((N, LENGTH)) < 0.5, -100, LABELS)  # some ignored
SOME[7:14] = -100  # and all of some shards
MASK = RANDOM.random((N, LENGTH))
COUNTS = np.array([0.5, 2.0, 1.0, 3.0, 0.25])  # of classes
PLACES = [(1, 1), (2, 1), (3, 1), (3, 2), (3, 3), (8, 1)]  # shards and devices


def full(x, labels, weights, divisor=None):
    """The loss of the whole batch and its gradient, in float64, by hand."""
    scores = x @ START
    scores -= scores.max(-1, keepdims=True)
    chances = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    one = np.eye(CLASSES)[np.maximum(labels, 0)]
    over = weights.sum() if divisor is None else divisor
    loss = -(np.log(chances) * one).sum(-1) * weights
    return loss.sum() / over, np.einsum("nlf,nlc->fc", x, (chances - one) * weights[..., None]) / over


def fit(model, data, shards, devices, start=START, **settings):
    settings = {"batch_size": N, "schedule": 1.0} | settings
    trainer = ss.Trainer(1, shards=shards, devices=[KIND] * devices, progress=False, **settings)
    with computing_in("float64"):
        return trainer.fit(model(start), data)


def check(model, data, expected, places=PLACES, **settings):
    """Assert that one step follows the gradient of the whole batch, and that devices change no bit."""
    runs = {place: fit(model, data, *place, **settings) for place in places}
    loss, gradient = expected
    for (shards, _), run in runs.items():
        (moved,) = run.weights().values()
        assert np.abs(START - moved - gradient).max() < 1e-12 * max(1, np.abs(gradient).max())
        assert abs(run.history[0]["train_loss"] - loss) < 1e-12 * max(1, abs(loss))
        suite.same(run, runs[shards, 1])
    return run


def weighted(output, y):
    labels, mask = y["labels"], work.real(y["mask"])
    return work.total(work.each(output, labels) * mask), work.total(mask)


def test_a_loss_over_a_weight_is_that_of_the_whole_batch():
    check(work.Line, (X[0], {"labels": LABELS, "mask": MASK}), full(X[0], LABELS, MASK), loss=weighted)


def test_a_mean_of_means_would_be_seen():
    """The broken twin: what a scalar loss would have given."""
    means = [full(X[0][i : i + 8], LABELS[i : i + 8], MASK[i : i + 8]) for i in (0, 8, 16)]
    twin = np.mean([loss for loss, _ in means]), np.mean([gradient for _, gradient in means], 0)
    with pytest.raises(AssertionError):
        check(work.Line, (X[0], {"labels": LABELS, "mask": MASK}), twin, [(3, 1)], loss=weighted)


@pytest.mark.parametrize("model", [work.Line, work.First])
def test_the_default_loss_at_every_position(model):
    run = check(model, (X[0], SOME), full(X[0], SOME, 1.0 * (SOME != -100)), PLACES[2:5])
    assert run.recipe["loss_over"] == "weighted"


@pytest.mark.parametrize("name", work.standard(COUNTS))
def test_the_losses_of_the_framework(name):
    loss, counts = work.standard(COUNTS)[name]
    labels, weights = SOME, 1.0 * (SOME != -100)
    if isinstance(counts, np.ndarray):
        weights = weights * counts[np.maximum(SOME, 0)]
    elif counts:  # the mean of each example's mean
        labels, weights = LABELS, np.ones(LABELS.shape)
    model = work.First if suite.BACKEND == "torch" else work.Line
    check(model, (X[0], labels), full(X[0], labels, weights), PLACES[:4], loss=loss)


def test_a_sum_is_a_sum():
    run = check(
        work.Line,
        (X[0], LABELS),
        full(X[0], LABELS, np.ones(LABELS.shape), 1),
        PLACES[:4],
        loss=lambda output, y: work.total(work.each(output, y)),
    )
    assert run.recipe["loss_over"] == "sum"


FLAT = X[0][:, 0]  # one position
CHANCES = np.eye(CLASSES)[LABELS[:, 0]]


@pytest.mark.filterwarnings("ignore:size_average")
def test_a_sum_of_the_framework_is_found():
    expected = full(X[0][:, :1], LABELS[:, :1], np.ones((N, 1)), 1)
    for loss, chances in work.sums().values():
        check(work.Line, (FLAT, CHANCES if chances else LABELS[:, 0]), expected, PLACES[:4], loss=loss)


def test_a_loss_of_the_framework_that_is_no_mean_over_examples_is_refused():
    for loss, chances in work.tried().values():
        with pytest.raises(ss.SamestepError, match="of the first batch .* couples examples"):
            fit(work.Line, (FLAT, CHANCES if chances else LABELS[:, 0]), 3, 1, loss=loss)


def test_a_negative_weight_is_a_weight():
    def negative(output, y):
        return tuple(-number for number in weighted(output, y))

    data = X[0], {"labels": LABELS, "mask": MASK}
    check(work.Line, data, full(X[0], LABELS, MASK), PLACES[2:5], loss=negative)
    check(work.Line, data, full(X[0], LABELS, MASK), PLACES[2:4], loss=negative, optimizer=ss.sgd(momentum=0.9))


def test_a_weight_is_not_counted_in_16_bits():
    """4,099 would be 4,096 or 4,100."""
    backend = importlib.import_module(f"samestep.backends.{suite.BACKEND}.backend").backend
    y = np.arange(4102).reshape(1, -1) % 2
    y[0, :3] = -100
    scores = work.half(backend.put(np.zeros((1, 4102, 2), np.float32), ss.cpu()))
    loss, weight = backend.loss_of(Measure(), scores, backend.put(y, ss.cpu()))
    assert backend.get(backend.number(weight, loss)).item() == 4099


def test_a_mean_over_something_else_is_refused():
    def tokens(output, y):
        return work.total(work.each(output, y) * work.real(y >= 0)) / work.total(work.real(y >= 0))

    with pytest.raises(
        ss.SamestepError, match=r"^the loss of the first .* couples examples.*\(sum, weight\).*per_shard"
    ):
        fit(work.Line, (X[0], SOME), 3, 1, loss=tokens)
    # With weights of zero all tokens cost the same, and only the gradient tells.
    some = np.where(np.arange(LENGTH) <= np.arange(N)[:, None] % 4, LABELS, -100)
    with pytest.raises(ss.SamestepError, match="^the gradient of the first batch and that by its shards differ by "):
        fit(work.Line, (X[0], some), 5, 1, start=0 * START, loss=tokens)
    assert np.isfinite(fit(work.Line, (X[0][:6], SOME[:6]), 2, 1, loss=ss.per_shard(tokens)).history[0]["train_loss"])


def test_a_batch_of_weight_zero_changes_nothing():
    """Neither weights nor momenta: the step after it is the one that would have come instead."""
    labels = np.where(np.arange(N)[:, None] < 8, LABELS, -100)
    settings = {"sampling": "in_order", "batch_size": 8, "optimizer": ss.sgd(momentum=0.9)}
    with pytest.warns(UserWarning, match="weight 0"):
        run = fit(work.Line, (X[0], labels), 3, 2, **settings)
    first, *others = run.fingerprints
    assert others == [first, first] != [run.recipe["initial"]] * 2
    loss, _ = full(X[0][:8], LABELS[:8], np.ones((8, LENGTH)))
    assert run.history[0]["train_loss"] == pytest.approx(loss, abs=1e-12)
    with pytest.warns(UserWarning, match="weight 0"):
        again = fit(work.Line, (X[0], np.roll(labels, 8, 0)), 3, 1, **settings)
    (weight,), (moved,) = (
        again.weights().values(),
        fit(work.Line, (X[0][8:16], LABELS[:8]), 3, 1, **settings).weights().values(),
    )
    assert weight.tobytes() == moved.tobytes()


SUM = X.sum(0)


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (work.Two, (X[0], X[1])),
        (work.Two, [X[0], X[1]]),
        (work.Two, {"left": X[0], "right": X[1]}),
        (work.Named, {"left": X[0], "right": X[1]}),
    ],
)
def test_inputs_by_place_and_by_name(model, x):
    check(model, (x, LABELS), full(SUM, LABELS, np.ones(LABELS.shape)), PLACES[3:4] + PLACES[2:3])


def test_a_whole_batch_as_one_dictionary():
    batch = {"left": X[0], "labels": LABELS, "right": X[1], "mask": MASK}

    def loss(output, batch):
        return weighted(output["logits"], batch)

    check(work.Named, batch, full(SUM, LABELS, MASK), PLACES[2:4], loss=loss)
    check(work.Named, batch, full(SUM, LABELS, np.ones(LABELS.shape)), PLACES[2:4])
    check(work.Own, batch, full(SUM, LABELS, np.ones(LABELS.shape)), PLACES[2:4])


@pytest.mark.parametrize("kind", ["uint8", "int32"])
def test_labels_of_any_whole_numbers_in_a_dictionary(kind):
    for labels in (LABELS, LABELS[:, 0]):
        x = X if labels.ndim > 1 else X[:, :, 0]
        batch = {"left": x[0], "labels": labels.astype(kind), "right": x[1]}
        rows, each = x.sum(0).reshape(N, -1, FEATURES), labels.reshape(N, -1)
        run = check(work.Named, batch, full(rows, each, np.ones(each.shape)), PLACES[2:4])
    assert run.history[0]["train_accuracy"] == ((rows @ START).argmax(-1) == each).mean()


def test_metrics_are_exact():
    def share(output, y):
        return work.exactly(output, y), y.shape[1] * work.total(work.real(y[:, 0] >= 0))

    def nothing(output, y):
        return work.total(output) * 0, 0

    def of_numpy(output, y):
        return np.float32(1), np.int64(2)

    data = ss.Data((X[0], LABELS), (X[0], LABELS))
    metrics = {"share": share, "no": nothing, "numpy": of_numpy}
    runs = [fit(work.Line, data, *place, metrics=metrics) for place in PLACES[2:]]
    expected = ((X[0] @ START).argmax(-1) == LABELS).mean()
    for run in runs:
        row = run.history[0]
        assert row["train_share"] == pytest.approx(expected, abs=1e-15)
        (weight,) = run.weights().values()
        assert row["test_share"] == pytest.approx(((X[0] @ weight).argmax(-1) == LABELS).mean(), abs=1e-15)
        assert (row["train_no"], row["test_no"], row["train_numpy"], row["test_numpy"]) == (None, None, 0.5, 0.5)


@pytest.mark.parametrize(
    ("model", "x", "y", "settings", "message"),
    [
        (work.Two, {"left": X[0], "rihgt": X[1]}, LABELS, {}, "does not take rihgt"),
        (work.Two, (X[0], X[1], X[1]), LABELS, {}, "takes 2 inputs .left, right., got 3"),
        (
            work.Line,
            X[0],
            LABELS,
            {"metrics": {"one": lambda output, y: work.total(output)}},
            "metric 'one' must return",
        ),
        (
            work.Line,
            X[0],
            LABELS,
            {"loss": lambda output, y: (work.total(output),) * 3},
            "loss must return .sum, weight.",
        ),
    ],
)
def test_bad_input_is_told_in_one_line(model, x, y, settings, message):
    with pytest.raises(ss.SamestepError, match=message) as caught:
        fit(model, (x, y), 2, 1, **settings)
    assert "\n" not in str(caught.value)


def test_augmented_examples_of_unequal_length():
    def run(shards, devices, readers, transform=cut, **settings):
        data = ss.Data((X[0], LABELS), transform=transform, pad=-100, readers=readers)
        return fit(work.Line, data, shards, devices, batch_size=16, **settings)

    one = run(3, 1, None)
    for devices, readers in ((2, 0), (3, 3)):
        suite.same(one, run(3, devices, readers))
    assert run(3, 1, None, seed=1).fingerprint != one.fingerprint
    with pytest.raises(ss.SamestepError, match="is not the same"):
        run(3, 1, None, lambda x, y, rng: (x * np.random.random(), y))
