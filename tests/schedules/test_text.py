"""expressions: what is read, what is refused and how, and that no text can do harm. Round trips are in test_schedules.py."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.errors import Invalid, SamestepError, WrongType
from samestep.schedules import text as expressions
from samestep.schedules.algebra import METHODS, Schedule
from samestep.schedules.kinds import (
    SCHEDULES,
    constant,
    cosine,
    drops,
    exponential,
    geometric,
    one_cycle,
    piecewise,
    poly,
    table,
    triangle,
)
from samestep.schedules.text import DEEPEST, LONGEST, parse

properties = settings(max_examples=500, deadline=None, derandomize=True, database=None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cosine(0.3, 20, end=0.01).warmup(5)", cosine(0.3, 20, end=0.01).warmup(5)),
        ("  cosine( .3, T=20,\n end = 1e-2 )  # a comment", cosine(0.3, 20, end=0.01)),
        ("2 * poly(0.1, 100) + constant(1e-3)", 2 * poly(0.1, 100) + constant(1e-3)),
        ("poly(0.1, 100) * 2", 2 * poly(0.1, 100)),
        ("(constant(1) + constant(+2)) * constant(1_000.5)", (constant(1) + constant(2)) * constant(1000.5)),
        ("constant(1) + constant(2) * constant(3)", constant(1) + constant(2) * constant(3)),
        ("piecewise([10, 20], [1, .5, -0.0])", piecewise([10, 20], [1, 0.5, 0])),
        ("drops(0.5, (15, 30), 0.5)", drops(0.5, [15, 30], 0.5)),
        ("table([1E-3])", table([1e-3])),
        ("exponential(1, 0.5, every=10, stair=True)", exponential(1, 0.5, 10, True)),
        ("triangle(0, 1, 5, down=None, per='step')", triangle(0, 1, 5, per="step")),
        ('one_cycle(1, 100, anneal="linear")', one_cycle(1, 100, anneal="linear")),
        ("geometric(2, .9, floor=1e-2).floor(.1).every(0x10)", geometric(2, 0.9, 0.01).floor(0.1).every(16)),
        ("constant(1).then(other=constant(2), at=5)", constant(1).then(constant(2), 5)),
        (
            "constant(1).restart(10, mult=2, decay=.5).shift(1).hold(9)",
            constant(1).restart(10, 2, 0.5).shift(1).hold(9),
        ),
        ("constant(1).clip(0, .5).in_epochs(smooth=False)", constant(1).clip(0, 0.5).in_epochs()),
        ("constant(1).in_epochs(steps_per_epoch=None)", constant(1).in_epochs()),
        ("constant(1).in_epochs(235, True)", constant(1).in_epochs(235, smooth=True)),
    ],
)
def test_what_is_read(text: str, expected: Schedule) -> None:
    assert parse(text) == expected


def test_every_schedule_and_method_can_be_written() -> None:
    minimal = {
        "exponential": "1, 1", "natural_exp": "1, 1", "poly": "1, 1", "cosine": "1, 1", "geometric": "1, 1",
        "piecewise": "[], [1]", "drops": "1, [], 1", "triangle": "1, 1, 1", "one_cycle": "1, 1", "table": "[1]",
        "then": "constant(1), 1", "clip": "1, 1", "in_epochs": "",
    }  # fmt: skip
    for name in SCHEDULES:
        assert parse(f"{name}({minimal.get(name, '1')})").op == name
    for name in METHODS:
        assert parse(f"constant(1).{name}({minimal.get(name, '1')})").op == name


ONLY = "is not allowed: only schedules, their methods, numbers, lists, + and *"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "schedule: cannot read '': invalid syntax"),
        ("cosine(0.3, 20", "schedule: cannot read 'cosine(0.3, 20': '(' was never closed"),
        ("x = constant(1)", "schedule: cannot read 'x = constant(1)': invalid syntax"),
        ("constant(1)\nconstant(2)", "schedule: cannot read 'constant(1)\\nconstant(2)': invalid syntax"),
        ("cosin(0.3, 20)", "schedule: no schedule is called 'cosin'; did you mean cosine?"),
        ("eval('1')", f"schedule: no schedule is called 'eval'; there are {', '.join(sorted(SCHEDULES))}"),
        ("__import__('os')", f"schedule: no schedule is called '__import__'; there are {', '.join(sorted(SCHEDULES))}"),
        ("Cosine(1, 1)", "schedule: no schedule is called 'Cosine'; did you mean cosine?"),
        ("constant(lr)", f"schedule: unknown name 'lr'; there are {', '.join(sorted(SCHEDULES))}"),
        ("constant(tabel)", "schedule: unknown name 'tabel'; did you mean table?"),
        ("constant(inf)", f"schedule: unknown name 'inf'; there are {', '.join(sorted(SCHEDULES))}"),
        ("cosine", "schedule: cosine needs arguments: lr, T, end"),
        ("constant(1).warmpu(5)", "schedule: a schedule has no method 'warmpu'; did you mean warmup?"),
        (
            "constant(1).values(5)",
            f"schedule: a schedule has no method 'values'; there are {', '.join(sorted(METHODS))}",
        ),
        (
            "constant(1).__class__()",
            f"schedule: a schedule has no method '__class__'; there are {', '.join(sorted(METHODS))}",
        ),
        ("constant(1)._at(1, 1)", f"schedule: a schedule has no method '_at'; there are {', '.join(sorted(METHODS))}"),
        ("constant(1).lr", f"schedule: 'constant(1).lr' {ONLY}"),
        ("constant(1).warmup", f"schedule: 'constant(1).warmup' {ONLY}"),
        ("constant(1).warmup.__globals__", f"schedule: 'constant(1).warmup.__globals__' {ONLY}"),
        ("(5).warmup(1)", "schedule: .warmup() needs a schedule before the dot, got 5"),
        ("'a'.floor(1)", "schedule: .floor() needs a schedule before the dot, got 'a'"),
        ("constant(1)(5)", f"schedule: 'constant(1)(5)' {ONLY}"),
        ("9**9**9", f"schedule: '9 ** 9 ** 9' {ONLY}"),
        ("constant(9**9**9)", f"schedule: '9 ** 9 ** 9' {ONLY}"),
        ("constant(1 / 3)", f"schedule: '1 / 3' {ONLY}"),
        ("constant(2 * 3)", f"schedule: '2 * 3' {ONLY}"),
        ("constant('a' * 999999999)", f"schedule: \"'a' * 999999999\" {ONLY}"),
        ("table([1] * 999999999)", f"schedule: '[1] * 999999999' {ONLY}"),
        ("-constant(1)", f"schedule: '-constant(1)' {ONLY}"),
        ("constant(-True)", f"schedule: '-True' {ONLY}"),
        ("constant(~1)", f"schedule: '~1' {ONLY}"),
        ("constant(1) - constant(1)", f"schedule: 'constant(1) - constant(1)' {ONLY}"),
        ("constant(1) if 1 else 2", f"schedule: 'constant(1) if 1 else 2' {ONLY}"),
        ("lambda: 1", f"schedule: 'lambda: 1' {ONLY}"),
        ("constant((x := 1))", f"schedule: '(x := 1)' {ONLY}"),
        ("table([x for x in [1]])", f"schedule: '[x for x in [1]]' {ONLY}"),
        ("table([*[1]])", f"schedule: '*[1]' {ONLY}"),
        ("constant(*[1])", f"schedule: '*[1]' {ONLY}"),
        ("constant(**{})", f"schedule: 'constant(**{{}})' {ONLY}"),
        ("constant({})", f"schedule: '{{}}' {ONLY}"),
        ("constant([1][0])", f"schedule: '[1][0]' {ONLY}"),
        ("constant(1j)", f"schedule: '1j' {ONLY}"),
        ("constant(b'1')", f"schedule: \"b'1'\" {ONLY}"),
        ("constant(f'{1}')", f"schedule: \"f'{{1}}'\" {ONLY}"),
        ("constant(...)", f"schedule: '...' {ONLY}"),
        ("0.1", "schedule: '0.1' is not a schedule, such as constant(0.1)"),
        ("[constant(1)]", "schedule: '[constant(1)]' is not a schedule, such as constant(0.1)"),
        ("cosine(0.3, 0)", "cosine: T must be at least 1, got T=0"),
        ("constant(1e999)", "constant: lr must be finite and at least 0, got lr=inf"),
        ("-1 * constant(1)", "*: factor must be finite and at least 0, got factor=-1"),
        (
            "constant(1).in_epochs() + constant(1)",
            "+: one side counts steps, the other epochs: combine first, (a + b).in_epochs()",
        ),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(Invalid) as error:
        parse(text)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cosine(0.3, 20.0)", "cosine: T must be a whole number, got T=20.0"),
        ("cosine(0.3)", "cosine: missing a required argument: 'T'"),
        ("cosine(0.3, 20, 0, 1)", "cosine: too many positional arguments"),
        ("cosine(0.3, 20, stop=1)", "cosine: got an unexpected keyword argument 'stop'"),
        ("constant(1).warmup(5, self=1)", "warmup: multiple values for argument 'self'"),
        ("cosine('0.3', 20)", "cosine: lr must be a number, got lr='0.3'"),
        ("constant(1) + 1", "+: both sides must be schedules, such as constant(0.1), got 1"),
        ("'a' * constant(1)", "*: factor must be a number, got factor='a'"),
        ("[1] * constant(1)", "*: factor must be a number, got factor=[1]"),
        ("constant(constant(1))", "constant: lr must be a number, got lr=constant(1.0)"),
    ],
)
def test_what_is_of_the_wrong_kind(text: str, message: str) -> None:
    with pytest.raises(WrongType) as error:
        parse(text)
    assert str(error.value) == message


def test_what_is_not_text() -> None:
    for thing in (None, 0.1, b"constant(1)", constant(1)):
        text: Any = thing
        with pytest.raises(WrongType, match=r"^schedule: needs a string, such as 'cosine\(0.3, 20\)', got "):
            parse(text)


def test_depth_is_limited() -> None:
    assert parse("constant(1)" + ".shift(1)" * (DEEPEST - 2)).op == "shift"
    assert parse("+".join(["constant(1)"] * (DEEPEST - 1))).op == "add"
    for text in ("constant(1)" + ".shift(1)" * (DEEPEST - 1), "+".join(["constant(1)"] * DEEPEST)):
        with pytest.raises(Invalid, match=r"^schedule: the expression is nested too deeply: at most 100 levels$"):
            parse(text)


def test_what_is_too_long_to_be_shown_is_told_by_its_column() -> None:
    """A number that Python does not write in decimals."""
    with pytest.raises(Invalid) as error:
        parse(f"constant(~0x{'f' * 9999})")
    assert str(error.value) == f"schedule: what stands at column 10 {ONLY}"


def test_the_longest_text() -> None:
    assert parse("constant(1)".ljust(20_000))(0) == 1
    with pytest.raises(Invalid):
        parse("constant(1)".ljust(20_001))


HOSTILE = [
    "(" * 5000,
    "(" * 150 + ")" * 150,
    "-" * (LONGEST - 1) + "1",
    "[" * 190 + "]" * 190,
    "constant(" * 150 + "1" + ")" * 150,
    "constant(1)" + ".shift(1)" * 2000,
    "constant(1)" + "+constant(1)" * 1600,
    "constant(" + "9" * 5000 + ")",
    "constant(" + "9" * 400 + ")",
    "constant(" + "9*" * 5000 + "9)",
    "lambda:" * 2000 + "1",
    "not " * 4000 + "1",
    "1 if 1 else " * 1500 + "1",
    "constant(1)" + "(1)" * 5000,
    "a." * 9000 + "b",
    "constant('\\d')",
    "constant('\\N{BELL}')",
    "constant(1)\0",
    "\ud800",
    "1if 1else 1",
    "'a' 'b'",
    "{" * 100,
    "f'{" * 60,
    "\t\x0c\r\n",
    "constant(1)\n\n\n)",
    "x" * LONGEST,
    " " * (LONGEST + 1),
    "constant(1).restart(1, mult=9007199254740992)" + ".shift(9007199254740992)" * 90 + "x",
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:20]))
def test_hostile_text_gets_one_short_line(text: str) -> None:
    with pytest.raises(SamestepError) as error:
        parse(text)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


words = st.sampled_from([
    *SCHEDULES, *METHODS, "(", ")", "(", ")", ".", ",", "+", "*", "**", "-", "=", "[", "]", "1", "0.5", "10", "1e9", "True",
    "None", "'linear'", "end", "mode", "T", "lambda", ":", "{", "}", " ", "\n", "@", "__class__", "constant(1)", ".shift(1)",
])  # fmt: skip


@properties
@given(st.lists(words, max_size=25).map("".join) | st.text(max_size=40))
def test_any_text_is_a_schedule_or_one_line(text: str) -> None:
    try:
        found: Schedule | SamestepError = parse(text)
    except SamestepError as error:
        found = error
    if isinstance(found, Schedule):
        assert parse(repr(found)) == found
    else:
        assert "\n" not in str(found)


def test_nothing_is_evaluated() -> None:
    tree = ast.parse(Path(str(expressions.__file__)).read_text())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not names & {"eval", "exec", "compile", "getattr", "setattr", "globals", "locals", "vars", "__import__"}
    with pytest.raises(Invalid):
        parse("__import__('antigravity')")
    assert "antigravity" not in sys.modules
