"""losses: what a loss may return and what is made of it, what counts as a hit, and checks with one example; in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samestep.backends import losses
from samestep.errors import Invalid, WrongType


class Numpy(losses.Losses):
    an_array = "an array"

    def is_array(self, thing: object) -> bool:
        return isinstance(thing, np.ndarray | np.generic)

    def cross_entropy(self, output: Any, y: Any) -> Any:
        return "the default loss"

    def count_hits(self, output: Any, y: Any) -> Any:
        return int((output.argmax(1) == y).sum())

    def zero(self, like: Any) -> Any:
        return 0


BACKEND = Numpy()


def summed(value: Any, y: Any, **attributes: Any) -> Any:
    def loss(output: Any, y: Any) -> Any:
        return value

    vars(loss).update(attributes)
    return BACKEND.sum_of_losses(loss, None, y)


def test_a_loss_gives_one_value_per_example_or_their_mean_or_their_sum() -> None:
    y = np.zeros((4, 3))
    assert summed(np.float64(2.5), y) == summed(np.float64(2.5), y, reduction="mean") == 10
    assert summed(np.float64(2.5), y, reduction="sum") == 2.5
    assert summed(np.float64(2.5), y, reduction="sum_over_batch_size") == 10  # as Keras calls the mean
    assert summed(np.array([1.0, 2.0, 4.0, 8.0]), y) == 15
    assert summed(np.array([[1.0, 2.0], [4.0, 8.0], [0.0, 1.0], [2.0, 2.0]]), y) == 1.5 + 6 + 0.5 + 2
    assert summed(np.array([[[1.0, 2.0], [4.0, 5.0]]] * 4), y) == 12
    assert summed(np.ones(300), np.zeros(300)) == 300
    assert BACKEND.sum_of_losses(None, None, y) == "the default loss"


@pytest.mark.parametrize("shape", [(3,), (5,), (3, 4), (1,)])
def test_a_loss_of_another_length_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(Invalid) as error:
        summed(np.ones(shape), np.zeros((4, 2)))
    assert str(error.value) == f"loss must return one value per example (4) or their mean, got shape {shape}"


def test_a_loss_that_is_no_array_is_refused() -> None:
    with pytest.raises(WrongType) as error:
        summed(2.5, np.zeros(4))
    assert str(error.value) == "loss must return an array (a loss per example, or their mean), got float"


def test_hits_are_counted_where_there_is_one_score_per_class() -> None:
    scores, labels = np.array([[1.0, 2.0], [2.0, 1.0], [0.0, 3.0]]), np.array([1, 1, 1])
    assert BACKEND.hits(scores, labels) == 2
    assert BACKEND.hits(scores, labels.astype(np.uint8)) == 2
    for output, y in [
        (scores.tolist(), labels),
        (scores[:, :, None], labels),
        (scores[:, 0], labels),
        (scores, labels[:, None]),
        (scores, labels[0]),
        (scores, labels.astype(np.float32)),
    ]:
        assert BACKEND.hits(output, y) == 0


@pytest.mark.parametrize(
    ("output", "y", "loss", "classes"),
    [
        ((1, 7), [3], None, 7),
        ((1, 7), [3], "own", 7),
        ((1, 7), [3.0], "own", None),
        ((1, 7), [[3, 4]], "own", None),
        ((1, 7, 2), [[3, 4]], None, None),
        ((1, 7, 2), [3], "own", None),
        ((1,), [3], "own", None),
        ((), [3], "own", None),
        (None, [3], "own", None),
    ],
)
def test_what_a_model_makes_of_one_example(output: Any, y: Any, loss: Any, classes: int | None) -> None:
    given = {"a": 1} if output is None else np.zeros(output)
    assert BACKEND.check_output(given, np.array(y), loss, "float32") == losses.Shape(classes, "float32")


@pytest.mark.parametrize(
    ("output", "y", "got"),
    [
        ((1,), [3], "an array of shape (1,) and labels of int64"),
        ((), [3], "an array of shape () and labels of int64"),
        ((1, 7), [3.0], "an array of shape (1, 7) and labels of float64"),
        (None, [3], "dict and labels of int64"),
    ],
)
def test_what_the_default_loss_cannot_take(output: Any, y: Any, got: str) -> None:
    with pytest.raises(WrongType) as error:
        BACKEND.check_output({"a": 1} if output is None else np.zeros(output), np.array(y), None, "float32")
    assert str(error.value) == (
        "the default loss, softmax cross-entropy, needs an array of scores per class and whole-number labels, "
        f"got {got}: pass loss=f(output, y)"
    )


def test_labels_of_another_shape_are_refused() -> None:
    with pytest.raises(Invalid) as error:
        BACKEND.check_output(np.zeros((1, 7)), np.zeros((1, 2, 3), int), None, "float32")
    assert str(error.value) == "labels must be of shape (n,), got (n, 2, 3): use y.reshape(-1)"


def test_the_type_of_the_weights() -> None:
    assert losses.check_weights("Net", ["float32", "float32"]) == "float32"
    assert losses.check_weights("Net", iter(["float64"])) == "float64"
    with pytest.raises(Invalid, match="^the model Net has no parameters to train$"):
        losses.check_weights("Net", [])
    for found in (["float16"], ["float32", "float64"]):
        with pytest.raises(WrongType) as error:
            losses.check_weights("Net", [*reversed(found), *found])
        named = ", ".join(found)
        assert str(error.value) == f"the trained parameters must all be float32 or all float64, got {named}"


def test_the_type_of_the_examples() -> None:
    for dtype in ("float32", "uint8", "int64", "bool", "complex64"):
        losses.check_examples("x", np.zeros(1, dtype), "float32")
    for dtype in ("float16", "float64"):
        with pytest.raises(WrongType) as error:
            losses.check_examples("train x", np.zeros(1, dtype), "float32")
        advice = "convert one, for example with x.astype('float32')"
        assert str(error.value) == f"train x is {dtype} and the model float32: {advice}"


def test_whether_a_loss_takes_the_labels_first() -> None:
    assert losses.wants_labels_first(lambda y_true, y_pred: 0)
    for loss in (lambda y_pred, y_true: 0, lambda z, y_true: 0, lambda: 0, 3, type):  # the last two have no signature
        assert losses.wants_labels_first(loss) is False


def test_the_leaves_of_a_graph_are_found_once_each() -> None:
    def node(*below: Any, **attributes: Any) -> Any:
        made = type("Node", (), attributes)()
        made.next_functions = tuple((one, 0) for one in below)
        return made

    first, second = node(variable="first"), node(variable="second")
    middle = node(first, second)
    assert losses.leaves(node(middle, first, None, node(middle))) == ["first", "second"]
    assert losses.leaves(None) == []
