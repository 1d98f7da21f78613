"""Mistakes with shapes and types that frameworks let pass: told at the start, in every framework alike."""

import importlib
import warnings

import numpy as np
import pytest
import sources

import samestep as ss
from conformance import suite
from conformance.precision import computing_in

work = importlib.import_module(f"conformance.zoo_work_{suite.BACKEND}")
RANDOM = np.random.default_rng(0)
X, START = RANDOM.normal(size=(24, 4)), RANDOM.normal(size=(4, 1))
Y = RANDOM.normal(size=24)
COLUMN = (
    "the output is of shape (n, 1) and train y of (n,), and the loss compares every output with every y: use y[:, None], or "
    "output.squeeze(1) in the model"
)
ROW = (
    "the output is of shape (n,) and train y of (n, 1), and the loss compares every output with every y: use y[:, 0], or "
    "output[:, None] in the model"
)


def flat(array):
    return array.reshape((-1,)) if suite.BACKEND != "tensorflow" else array[:, 0]


def fit(x, y, start=START, **settings):
    trainer = ss.Trainer(1, 12, shards=3, devices=1, schedule=0.01, progress=False, **settings)
    with computing_in("float64"):
        return trainer.fit(work.Line(start), (x, y))


def squares(output, y):
    return (output - y) ** 2


def count(y):
    return work.total(y * 0 + 1)


LOSSES = {
    "by example": squares,
    "a mean": lambda output, y: work.total(squares(output, y)) / work.total(squares(output, y) * 0 + 1),
    "a sum": lambda output, y: work.total(squares(output, y)),
    "over a weight": lambda output, y: (work.total(squares(output, y)), count(y)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_outputs_in_a_column_and_labels_in_a_row(name):
    with pytest.raises(ss.SamestepError) as caught:
        fit(X, Y, loss=LOSSES[name])
    assert str(caught.value) == COLUMN
    with pytest.raises(ss.SamestepError) as caught:
        fit(X, Y[:, None], START[:, 0], loss=LOSSES[name])
    assert str(caught.value) == ROW
    right = fit(X, Y[:, None], loss=LOSSES[name]).history[0]["train_loss"]
    assert np.isclose(right, fit(X, Y, START[:, 0], loss=LOSSES[name]).history[0]["train_loss"], rtol=1e-12)


def test_a_loss_that_takes_them_as_they_are():
    right = fit(X, Y[:, None], loss=squares)
    suite.same(fit(X, Y, loss=lambda output, y: squares(flat(output), y)), right)


def test_what_couples_examples_for_another_reason_is_told_as_such():
    def weighted(output, y):
        weight = work.real(y * y)
        return work.total(weight * squares(flat(output), y)) / work.total(weight)

    with pytest.raises(
        ss.SamestepError, match="couples examples, or is a mean over something else. Return .sum, weight."
    ):
        fit(X, Y, loss=weighted)


def test_labels_that_are_equal_in_the_first_batch_hide_nothing():
    with pytest.raises(ss.SamestepError) as caught:
        fit(X, np.sort(np.sign(Y)), loss=squares, sampling="in_order")
    assert str(caught.value) == COLUMN


def test_one_output_has_no_accuracy():
    """It is not the score of a class: the largest of one would always be class 0."""
    labels = (Y > 0).astype("int64")
    run = fit(X, labels, loss=lambda output, y: squares(flat(output), work.real(y)))
    assert run.history[0]["train_accuracy"] is None
    two = fit(X, labels, np.hstack([START, -START]), loss=lambda output, y: squares(output[:, 0], work.real(y)))
    assert two.history[0]["train_accuracy"] is not None


def test_test_examples_of_another_shape_are_refused():
    """A loss that compares all with all would only show in the scores."""
    trainer = ss.Trainer(1, 12, shards=3, devices=1, progress=False, loss=squares)
    with (
        computing_in("float64"),
        pytest.raises(ss.SamestepError, match=r"^the output is of shape \(n, 1\) and test y of \(n,\)"),
    ):
        trainer.fit(work.Line(START), ss.Data((X, Y[:, None]), (X, Y)))


def test_an_error_of_the_model_stands_alone_also_with_float64():
    data = suite.data("mlp_with_dropout", 20)
    with pytest.raises(Exception) as caught:
        ss.Trainer(1, 10, devices="cpu", progress=False).fit(
            suite.zoo.mlp_with_dropout(), (data.train.x[:, :, :20].astype("float64"), data.train.y)
        )
    chain, one = [], caught.value
    while one := one.__cause__ or (None if one.__suppress_context__ else one.__context__):
        chain.append(one)
    assert not [one for one in chain if type(one).__module__.startswith("samestep")]


@pytest.mark.parametrize("devices", [1, 2])
def test_float64_for_a_float32_model(devices):
    def run(kind):
        x, y = suite.data("mlp_with_dropout", 24).train
        data = ss.Data((x.astype(kind), y), (x[:9].astype(kind), y[:9]))
        trainer = ss.Trainer(2, 12, shards=3, devices=devices, progress=False)
        return trainer.fit(suite.zoo.mlp_with_dropout(), data)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wide = run("float64")
    told = "x is float64 and the model float32: converted to float32; pass x.astype('float32') to be silent"
    assert [str(one.message) for one in caught if "float64" in str(one.message)] == [f"train {told}", f"test {told}"]
    suite.same(wide, run("float32"))


def test_readers_change_no_bit():
    x, y = suite.data("mlp_with_dropout", 24).train

    def run(readers, devices):
        data = ss.Data(sources.Table(x, y), sources.Table(x[:9], y[:9]), readers=readers)
        trainer = ss.Trainer(2, 10, shards=3, devices=devices, progress=False)
        return trainer.fit(suite.zoo.mlp_with_dropout(), data)

    one = run(None, 1)
    for readers, devices in ((0, 2), (3, 3)):
        suite.same(one, run(readers, devices))
