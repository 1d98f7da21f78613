"""losses: what a loss may return and what is made of it, what counts as a hit, and checks with one example; in NumPy."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from samestep.backends import losses
from samestep.backends.losses import MEAN, SUM, WEIGHTED, Measure, Shape
from samestep.errors import Invalid, WrongType


class Numpy(losses.Losses):
    an_array = "an array"

    def is_array(self, thing: object) -> bool:
        return isinstance(thing, np.ndarray | np.generic)

    def cross_entropy(self, output: Any, y: Any) -> Any:
        return "the default loss"

    def by_position(self, output: Any, y: Any) -> Any:
        return "the default loss at every position", "how many"

    def number(self, value: Any, like: Any) -> Any:
        return np.asarray(value, like.dtype)

    def count_hits(self, output: Any, y: Any) -> Any:
        return int((output.argmax(1) == y).sum())

    def zero(self, like: Any) -> Any:
        return 0


BACKEND = Numpy()


def described(loss: Any, output: Any, y: Any, **more: Any) -> Shape:
    return BACKEND.described(Measure(loss, **more), output, y, y, "float32")


def summed(value: Any, y: Any, **attributes: Any) -> Any:
    def loss(output: Any, y: Any) -> Any:
        return value

    vars(loss).update(attributes)
    shape = BACKEND.described(Measure(loss), None, y, y, "float32")
    return BACKEND.loss_of(Measure(loss, shape.kind), None, y)[0]


def test_a_loss_gives_one_value_per_example_or_their_mean_or_their_sum() -> None:
    y = np.zeros((4, 3))
    assert summed(np.float64(2.5), y) == summed(np.float64(2.5), y, reduction="mean") == 10
    assert summed(np.float64(2.5), y, reduction="sum") == 2.5
    assert summed(np.array([1.0, 2.0, 4.0, 8.0]), y, reduction="sum") == 15  # over the classes of each, perhaps
    for value, kind in ((np.ones(4), MEAN), (np.float64(1), SUM)):
        loss = functools.partial(lambda output, y, reduction, value: value, reduction="sum", value=value)
        assert described(loss, None, y).kind == kind
    assert summed(np.float64(2.5), y, reduction="sum_over_batch_size") == 10  # as Keras calls the mean
    assert summed(np.array([1.0, 2.0, 4.0, 8.0]), y) == 15
    assert summed(np.array([[1.0, 2.0], [4.0, 8.0], [0.0, 1.0], [2.0, 2.0]]), y) == 1.5 + 6 + 0.5 + 2
    assert summed(np.array([[[1.0, 2.0], [4.0, 5.0]]] * 4), y) == 12
    assert summed(np.ones(300), np.zeros(300)) == 300
    assert BACKEND.loss_of(Measure(), y, y[:, 0]) == ("the default loss", None)
    assert BACKEND.loss_of(Measure(), y, y) == ("the default loss at every position", "how many")


@pytest.mark.parametrize("shape", [(3,), (5,), (3, 4), (1,)])
def test_a_loss_of_another_length_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(Invalid) as error:
        summed(np.ones(shape), np.zeros((4, 2)))
    assert str(error.value) == f"loss must return one value per example (4) or their mean, got shape {shape}"


def test_a_loss_that_is_no_array_is_refused() -> None:
    with pytest.raises(WrongType) as error:
        summed(2.5, np.zeros(4))
    assert (
        str(error.value) == "loss must return an array (a loss per example, or their mean) or (sum, weight), got float"
    )


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
        ((1, 1), [3], "own", None),
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
    given, labels = {"a": 1} if output is None else np.zeros(output), np.array(y)
    kind = WEIGHTED if loss is None and labels.ndim > 1 else MEAN
    measure = Measure(loss and (lambda output, y: np.float32(1)))
    counted = None if loss else 7  # of classes, if labels are to be checked
    unlike = {((1, 7), "[3.0]"): ((7,), ()), ((1, 1), "[3]"): ((1,), ())}.get((output, repr(y)))
    expected = Shape(classes, "float32", kind, loss is not None, counted, unlike)
    assert BACKEND.described(measure, given, labels, labels, "float32") == expected


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
        described(None, {"a": 1} if output is None else np.zeros(output), np.array(y))
    assert str(error.value) == (
        "the default loss, softmax cross-entropy, needs an array of scores per class and whole-number labels, "
        f"got {got}: pass loss=f(output, y)"
    )


def test_labels_of_another_shape_are_refused() -> None:
    with pytest.raises(Invalid) as error:
        described(None, np.zeros((1, 7)), np.zeros((1, 2, 3), int))
    assert str(error.value) == "labels must be of shape (n,), got (n, 2, 3): use y.reshape(-1)"
    with pytest.raises(Invalid, match=r"^labels must be of shape \(n,\), got \(n, 7\): use y.argmax\(1\)$"):  # one-hot
        described(None, np.zeros((1, 7)), np.eye(7, dtype=int)[:1])


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
        losses.check_examples("x", np.zeros(1, dtype), "float32", np.zeros(1, int))
    for dtype, model in (("float16", "float32"), ("float32", "float64")):
        with pytest.raises(WrongType) as error:
            losses.check_examples("train x", np.zeros(1, dtype), model, np.zeros(1, int))
        advice = f"convert one, for example with x.astype('{model}')"
        assert str(error.value) == f"train x is {dtype} and the model {model}: {advice}"


@pytest.mark.parametrize(
    ("x", "y", "told"),
    [(8, 8, "train x and train y are float64 and the model float32: converted to float32; pass x.astype"),
     (8, 4, "train x is float64 and the model float32: converted to float32; pass x.astype"),
     (4, 8, "train y is float64 and the model float32: converted to float32; pass y.astype")],
)  # fmt: skip
def test_float64_for_a_float32_model_is_told(x: int, y: int, told: str) -> None:
    arrays = np.zeros(1, f"f{x}"), np.zeros(1, f"f{y}")
    with pytest.raises(losses.Wide) as error:
        losses.check_examples("train x", arrays[0], "float32", arrays[1])
    assert str(error.value) == f"{told}('float32') to be silent"
    losses.check_examples("train x", np.zeros(1), "float64", arrays[1])


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


def gives(value: Any) -> Any:
    return lambda output, y: value


Y = np.zeros((4, 3))


def test_a_loss_may_give_its_sum_and_its_weight() -> None:
    for value in ((np.float64(6), np.int64(3)), [np.float64(6), 2.5], (np.float64(6), 0)):
        assert BACKEND.loss_of(Measure(gives(value), WEIGHTED), None, Y) == tuple(value)
        assert described(gives(value), None, Y).kind == WEIGHTED
    numbers = BACKEND.measured(Measure(gives((np.float32(6), 0.1)), WEIGHTED), None, Y)
    assert (numbers, numbers[2].dtype) == ([6, 0, np.float32(0.1)], np.float32)


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ((np.float64(1),), "tuple"),
        ((np.float64(1),) * 3, "tuple"),
        ((np.ones(4), np.float64(1)), "tuple of (4,), ()"),
        ((np.float64(1), np.ones(1)), "tuple of (), (1,)"),
        ([np.float64(1), None], "list of (), None"),
        ((1.5, 2), "tuple of 1.5, 2"),  # it has no gradient
    ],
)
def test_a_pair_that_is_none(value: Any, got: str) -> None:
    with pytest.raises(WrongType) as error:
        BACKEND.loss_of(Measure(gives(value)), None, Y)
    assert str(error.value) == f"loss must return (sum, weight), two single numbers, got {got}"


def test_a_loss_gives_a_weight_for_every_batch_or_for_none() -> None:
    for value, kind in (((np.float64(1), 2), MEAN), (np.float64(1), WEIGHTED), ((np.float64(1), 2), SUM)):
        with pytest.raises(WrongType, match=r"^loss must give \(sum, weight\) for every batch, or for none$"):
            BACKEND.measured(Measure(gives(value), kind), None, Y)


def test_metrics_come_after_loss_and_hits() -> None:
    scores, labels = np.array([[1.0, 2.0], [2.0, 1.0]]), np.array([1, 1])
    metrics = ("low", lambda output, y: (output.min(), len(y))), ("two", lambda output, y: [2, 0.5])
    measure = Measure(gives(np.float64(5)), metrics=metrics)
    assert BACKEND.measured(measure, scores, labels) == [10, 1, 1, 2, 2, 0.5]
    weighted = Measure(gives((np.float64(5), 7)), WEIGHTED, metrics)
    assert BACKEND.measured(weighted, scores, labels) == [5, 1, 7, 1, 2, 2, 0.5]
    assert (Measure().more, measure.more, weighted.more) == (0, 4, 5)
    assert Measure.of(weighted) is weighted
    assert Measure.of(max) == Measure(max)
    for value, got in ((np.float64(1), "()"), (3, "int"), ((1, np.ones(2)), "tuple of 1, (2,)")):
        with pytest.raises(WrongType) as error:
            described(gives(np.float64(1)), scores, labels, metrics=(("mine", gives(value)),))
        assert str(error.value) == f"metric 'mine' must return (sum, weight), two single numbers, got {got}"


@pytest.mark.parametrize("output", [{"loss": np.float64(2.5)}, SimpleNamespace(loss=np.float64(2.5), logits=None)])
def test_the_loss_of_a_model_itself(output: Any) -> None:
    assert BACKEND.loss_of(Measure(), output, Y) == (10, None)
    assert BACKEND.loss_of(Measure(kind=SUM), output, Y) == (2.5, None)
    assert BACKEND.loss_of(Measure(gives(np.float64(1))), output, Y) == (4, None)  # the user's goes first
    assert described(None, output, Y) == Shape(None, "float32", MEAN, True)


def test_the_loss_of_a_model_may_be_all_that_a_loss_may_be() -> None:
    assert BACKEND.loss_of(Measure(), {"loss": np.arange(4.0)}, Y) == (6, None)
    assert BACKEND.loss_of(Measure(), {"loss": (np.float64(3), 2)}, Y) == (3, 2)
    with pytest.raises(
        Invalid, match=r"^loss must return one value per example \(4\) or their mean, got shape \(3,\)$"
    ):
        BACKEND.loss_of(Measure(), {"loss": np.arange(3.0)}, Y)


def test_scores_and_labels_are_found_in_outputs_and_batches() -> None:
    scores, labels = np.array([[1.0, 2.0], [2.0, 1.0]]), np.array([1, 1])
    for output in (scores, {"logits": scores}, SimpleNamespace(logits=scores, loss=None)):
        for y in (labels, {"x": 0, "labels": labels}, {"label": labels, "labels": None}):
            assert BACKEND.scores(output) is scores
            assert BACKEND.labels(y) is labels
            assert described(None, output, y) == Shape(2, "float32", labels=2)
    assert BACKEND.hits({"logits": scores}, {"labels": labels}) == 1
    assert BACKEND.hits({"scores": scores}, {"labels": labels}) == 0
    for output, y, got in (
        (scores, {"target": labels}, "an array of shape (2, 2) and labels of dict"),
        ((scores,), labels, "tuple and labels of int64"),
    ):
        with pytest.raises(WrongType) as error:
            described(None, output, y)
        assert f"got {got}: pass loss" in str(error.value)


def test_the_first_part_that_is_there() -> None:
    for thing in ({"a": None, "b": 2, "c": 3}, SimpleNamespace(a=None, b=2, c=3)):
        assert losses.part(thing, "no", "a", "b", "c") == 2
        assert losses.part(thing, "no", "a") is None


def test_where_the_classes_lie() -> None:
    assert losses.class_axis((6, 3, 5), (6, 3)) == 2
    assert losses.class_axis((6, 5, 3), (6, 3)) == 1
    assert losses.class_axis((6, 5), (6,)) == 1
    assert losses.class_axis((6, 5, 3, 2), (6, 3, 2)) == 1
    needs = "the default loss needs scores of shape (B, L, V) or (B, V, L) for labels of shape (B, L), got "
    for scores, labels, got in (
        ((6, 3, 3), (6, 3), "(6, 3, 3) for (6, 3), which could be either"),
        ((6, 5, 4), (6, 3), "(6, 5, 4) for (6, 3)"),
        ((6, 3, 5, 2), (6, 3, 2), "(6, 3, 5, 2) for (6, 3, 2)"),
    ):
        with pytest.raises(Invalid) as error:
            losses.class_axis(scores, labels)
        assert str(error.value) == f"{needs}{got}: pass loss=f(output, y)"


def test_the_settings_of_a_loss() -> None:
    assert losses.setting(functools.partial(max, key=3), "key") == 3
    assert losses.setting(functools.partial(max), "key") is None
    assert losses.setting(SimpleNamespace(key=3), "key") == 3
    assert losses.setting(None, "key") is None


def test_whose_loss_it_is() -> None:
    def own(module: str, name: str = "mse") -> Any:
        def loss(output: Any, y: Any) -> Any: ...

        loss.__module__, loss.__name__ = module, name
        return loss

    for module in ("torch.nn.modules.loss", "keras.src.losses", "optax", "jax.numpy", "samestep.d2l.torch"):
        assert not losses.foreign(own(module))
        assert losses.foreign(functools.partial(own(module), reduction=sum))  # it may be a sum now
    for module in ("__main__", "torchmetrics.functional", "my.torch", "builtins"):
        assert losses.foreign(own(module))
        assert losses.foreign(functools.partial(own(module), weight=3))
        assert not losses.foreign(losses.per_shard(own(module)))
    assert losses.foreign(own("optax.losses._self_supervised", "ntxent"))  # it couples examples
    assert losses.foreign(own("optax.losses._segmentation", "multiclass_generalized_dice_loss"))
    for module in ("torch.jit._script", "torch._dynamo.eval_frame", "paddle.jit.dy2static.program_translator"):
        assert losses.foreign(own(module))  # what is inside is not known
    assert losses.foreign(functools.wraps(own("torch.nn.functional"))(own("torch.compiler")))
    names = ("Dice", "Circle", "MeanSquaredError")
    kinds = [type(name, (), {"__module__": "keras.src.losses.losses"}) for name in names]
    assert [losses.foreign(kind()) for kind in kinds] == [True, True, False]


def test_a_loss_per_shard() -> None:
    one = losses.per_shard(gives(np.float64(2)))
    assert BACKEND.loss_of(Measure(one), None, Y) == (8, None)
    assert described(one, None, Y) == Shape(None, "float32", MEAN, False)
    with pytest.raises(WrongType, match=r"^per_shard needs a function of \(output, y\), got float$"):
        losses.per_shard(3.5)  # type: ignore[arg-type]


def test_the_type_of_examples_in_a_tree() -> None:
    tree = {"ids": np.zeros(1, int), "pair": (np.zeros(1, np.float32), np.zeros(1))}
    with pytest.raises(WrongType, match=r"^train x\['pair'\]\[1\] is float64 and the model float32: converted"):
        losses.check_examples("train x", tree, "float32", tree)
    assert "is int64 and float32 and float64 and the model" in str(losses.convert("x", tree, "float32"))
    assert losses.not_floats(tree)
    assert not losses.not_floats([np.zeros(1)])


def test_numbers_of_numpy_are_numbers() -> None:
    class Arrays(Numpy):
        def is_array(self, thing: object) -> bool:
            return isinstance(thing, np.ndarray)

    for pair in ((np.float32(1), 2), (np.int64(3), np.float16(4))):
        assert Arrays()._pair("metric 'm'", pair) == pair
