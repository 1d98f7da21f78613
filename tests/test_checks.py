"""checks: what is refused, at which bounds and in which words; and in which form values are kept. portable: what it sets."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from samestep import checks, portable
from samestep.errors import Invalid, SamestepError, WrongType


def refused(error: type[Exception], check: Callable[..., Any], *given: Any) -> str:
    with pytest.raises(SamestepError) as caught:
        check("", "n", *given)
    assert type(caught.value) is error
    return str(caught.value).removeprefix("n must be ")


class Unshown:
    def __repr__(self) -> str:
        raise RuntimeError


def test_a_value_in_one_line_of_bearable_length() -> None:
    assert checks.show("a" * 78) == repr("a" * 78)
    assert checks.show("a" * 79) == "'" + "a" * 76 + "..."
    assert checks.show(np.array([[1, 2], [3, 4]])) == "[[1, 2], [3, 4]]"
    assert checks.show(Unshown()) == "a Unshown that cannot be shown"


def test_what_was_meant() -> None:
    names = ["beta", "alpha"]
    assert checks.nearest("alpa", names) == "did you mean alpha?"
    assert checks.nearest("z", names) == checks.nearest(5, names) == "there are alpha, beta"


def test_whole_numbers() -> None:
    most = 9007199254740992
    assert [checks.whole("", "n", value) for value in (0, np.int8(1), most)] == [0, 1, most]
    assert type(checks.whole("", "n", np.int8(1))) is int
    assert checks.whole("", "n", 2, 2, 2) == 2
    assert refused(Invalid, checks.whole, -1) == "at least 0, got n=-1"
    assert refused(Invalid, checks.whole, 300, 301) == "at least 301, got n=300"
    assert refused(Invalid, checks.whole, most + 1) == f"at most {most}, got n={most + 1}"
    assert refused(Invalid, checks.whole, 301, 0, 300) == "at most 300, got n=301"
    for value in (True, 1.0, "1", None):
        assert refused(WrongType, checks.whole, value) == f"a whole number, got n={value!r}"
    with pytest.raises(Invalid, match="^cosine: T must be at least 1, got T=0$"):
        checks.checked("cosine", counted, {"T": 0, "rate": 1})


def counted(T: checks.Count, rate: checks.Rate, other: int = 0) -> None:
    pass


def test_the_checks_of_a_function_stand_beside_its_types() -> None:
    assert checks.checked("f", counted, {"T": np.int64(300), "rate": 1}) == {"T": 300, "rate": 1.0}
    assert checks.checks(counted).keys() == {"T", "rate"}


def test_numbers_and_their_bounds() -> None:
    for check, good, bad in (
        (checks.number, [0, 0.5, 2.0, 1e308], {-1e-9: "finite and at least 0", math.inf: "finite and at least 0"}),
        (checks.finite, [-2.5, 0, 7], {math.inf: "finite", -math.inf: "finite"}),
        (checks.above_zero, [5e-324, 0.5, 1.5], {0.0: "above 0"}),
        (checks.below_one, [0, 0.5, 0.9999999], {1.0: "below 1", 1.5: "below 1"}),
        (checks.share, [0, 0.5, 1], {1.0000001: "at most 1", 2.0: "at most 1"}),
    ):
        assert [check("", "n", value) for value in good] == good
        assert {value: refused(Invalid, check, value) for value in bad} == {
            v: f"{what}, got n={v}" for v, what in bad.items()
        }
        assert refused(Invalid, check, math.nan).endswith(", got n=nan")
        assert refused(WrongType, check, True) == "a number, got n=True"
        assert refused(WrongType, check, "1") == "a number, got n='1'"
        assert type(check("", "n", np.float32(0.5))) is float
    assert math.copysign(1, checks.number("", "n", -0.0)) == 1
    assert refused(Invalid, checks.number, 10**400).startswith("finite and at least 0, got n=1000")


def test_one_number_against_another() -> None:
    checks.at_most("f", "a", 300.0, "b", 300.0)
    checks.at_most("f", "a", 1, "b", 2)
    with pytest.raises(Invalid, match="^f: a must be at most b, got a=2 and b=1$"):
        checks.at_most("f", "a", 2, "b", 1)


def test_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.numbers("", "n", np.array([1, 2])) == (1.0, 2.0)
    assert checks.boundaries("", "n", range(3000)) == tuple(range(3000))
    assert checks.boundaries("", "n", [5]) == (5,)
    assert refused(Invalid, checks.boundaries, [1, 300, 300]) == "increasing, got n=[1, 300, 300]"
    assert refused(Invalid, checks.boundaries, (2, 1)) == "increasing, got n=[2, 1]"
    for value, told in ((np.array(1), "1"), (np.zeros((2, 1)), "[[0.0], [0.0]]"), ("12", "'12'"), ({1: 2}, "{1: 2}")):
        assert refused(WrongType, checks.numbers, value) == f"a list, got n={told}"
    with pytest.raises(Invalid, match=r"^n\[1\] must be finite and at least 0, got n\[1\]=-1$"):
        checks.numbers("", "n", [1, -1])
    assert refused(Invalid, checks.numbers, range(10**8 + 1)) == "shorter, got n=range(0, 100000001)"
    as_it_is = type("AsItIs", (), {"__new__": lambda cls, values: values})  # a list would take a gigabyte
    monkeypatch.setattr(checks, "list", as_it_is, raising=False)
    assert checks._listed("", "n", range(10**8)) == range(10**8)


def test_texts_choices_and_flags() -> None:
    assert checks.texts("", "n", "a,b") == checks.texts("", "n", ["a", "b"]) == ("a", "b")
    assert refused(WrongType, checks.texts, ["a", 1]) == "texts, got n=['a', 1]"
    assert checks.one_of("a", "b")("", "n", "b") == "b"
    assert refused(Invalid, checks.one_of("a", "b"), "c") == "one of 'a', 'b', got n='c'"
    assert refused(WrongType, checks.one_of("a", "b"), 1) == "a string, got n=1"
    assert (checks.flag("", "n", np.True_), checks.flag("", "n", False)) == (True, False)
    assert refused(WrongType, checks.flag, 1) == "True or False, got n=1"


def test_what_a_portable_run_needs_is_added_to_the_flags_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = "--xla_cpu_max_isa=AVX2 --xla_cpu_enable_platform_dependent_math=false"
    for before, after in (
        ("", needed),
        ("--mine=1", f"--mine=1 {needed}"),
        (f"{needed} --mine=1", f"{needed} --mine=1"),
    ):
        monkeypatch.setattr(os, "environ", {"XLA_FLAGS": before, "MKL_CBWR": "AUTO"})
        assert not portable.wanted()
        portable.set_up()
        assert portable.wanted()
        assert os.environ == {
            "SAMESTEP_PORTABLE": "1", "XLA_FLAGS": after, "MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2", "TF_ENABLE_ONEDNN_OPTS": "0", "OPENBLAS_CORETYPE": "Haswell",
            "DNNL_MAX_CPU_ISA": "AVX2",
        }  # fmt: skip
