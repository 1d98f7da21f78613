"""names: weights are called the same in every model of a kind, and those that are kept are found again."""

from __future__ import annotations

import pytest

from samestep.backends.names import anew, kept_among, unnumbered
from samestep.errors import Invalid


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        ("m/scale_3/k m/scale_7/k m/scale_3/b", "scale/k scale_1/k scale/b"),
        ("a/dense_3/k b/dense_4/k a/dense_5/k", "a/dense/k b/dense/k a/dense_1/k"),
        ("z/m/dense_3/k a/m/k", "z/m/dense/k a/m/k"),
        ("m/conv_1/k m/dense_2/k m/block_5/k", "conv/k dense/k block/k"),
        ("m/b/variable_1 m/b/variable", "b/variable_1 b/variable"),
        ("m/variable_12 m/k m/variable_7 m/variable_30", "variable_1 k variable variable_2"),
        ("m/variables/k variable_4", "variables/k variable"),
        ("k k k", "k k_1 k_2"),
        ("m/k/a m/k_1 m/k m/k", "k/a k_1 k k_2"),
        ("m/given_1/k m/given_2/k m/given/k", "chosen/k other/k given/k"),
    ],
)
def test_every_model_counts_from_the_beginning(paths: str, names: str) -> None:
    layers = {"given_1": "chosen", "given_2": "other", "given": "given"}
    assert " ".join(anew(paths.split(), layers, "m")) == names


def test_a_path_keeps_its_beginning_where_the_model_has_no_name() -> None:
    assert anew(["m/dense_2/k", "/k"], {}) == ["m/dense/k", "k"]


def test_what_is_kept_is_found_by_itself_or_by_its_name() -> None:
    first, second, third = object(), object(), object()
    named = [("first", first), ("second", second), ("third", third)]
    kept = {"other": second, "first": object(), "nobody": object()}
    assert kept_among(named, kept) == {"other": second, "first": first}
    many = {str(i): object() for i in range(300)}
    assert kept_among(list(many.items()), many) == many
    with pytest.raises(Invalid) as error:
        kept_among([*named, ("first", object())], kept)
    assert str(error.value) == (
        "a tensor of the model has the name of one of the loss: call that part of the model something else"
    )


def test_a_number_is_keras_own_only_after_the_name_of_the_class() -> None:
    names = ("dense", "dense_12", "my_dense_1", "forward_dense_2", "dense_a")
    assert [unnumbered(name, "Dense") for name in names] == ["dense", "dense", "my_dense_1", "forward_dense", "dense_a"]
    assert unnumbered("conv2d_transpose_3", "Conv2DTranspose") == "conv2d_transpose"
