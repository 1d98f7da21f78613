"""Reading a schedule from JSON, or from text, such as 'cosine(0.3, 20, end=0.01).warmup(5)', which is never run as code.

Python's parser gives the tree of a text; only what is listed here is then built: numbers, strings, lists, True, False,
None, + and *, the schedules, and their methods. Length and depth are limited, so that no text can take long.
"""

from __future__ import annotations

import ast
import inspect
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from samestep.checks import checks, nearest, show
from samestep.errors import Invalid, WrongType
from samestep.schedules.algebra import FORMULAS, METHODS, OPS, VERSION, Schedule, must_be_schedule, parameters
from samestep.schedules.kinds import SCHEDULES

LONGEST = 20_000  # characters
DEEPEST = 100  # levels of the tree, and schedules within schedules in JSON


def parse(text: str) -> Schedule:
    """The schedule that an expression describes.

    >>> parse("2 * poly(0.1, 100) + constant(1e-3)")
    2.0 * poly(0.1, 100) + constant(0.001)
    >>> parse("cosin(0.3, 20)")
    Traceback (most recent call last):
    samestep.errors.Invalid: schedule: no schedule is called 'cosin'; did you mean cosine?
    """
    if not isinstance(text, str):
        raise WrongType(f"schedule: needs a string, such as 'cosine(0.3, 20)', got {show(text)}")
    if len(text) > LONGEST:
        raise Invalid(f"schedule: must have at most {LONGEST} characters, got {len(text)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise Invalid(f"schedule: cannot read {show(text)}: {reason}") from None
    except (MemoryError, RecursionError):
        raise Invalid(f"schedule: {show(text)} is nested too deeply: at most {DEEPEST} levels") from None
    result = _build(tree, DEEPEST)
    if not isinstance(result, Schedule):
        raise Invalid(f"schedule: {show(text)} is not a schedule, such as constant(0.1)")
    return result


def _build(node: ast.expr, depth: int) -> Any:
    """The value of a node: a schedule, number, string, list, True, False or None."""
    if depth == 0:
        raise Invalid(f"schedule: the expression is nested too deeply: at most {DEEPEST} levels")
    depth -= 1
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            value = _build(operand, depth)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                _refuse(node)
            return -value if isinstance(sign, ast.USub) else value
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_build(element, depth) for element in elements]
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() as sign, right=right):
            a, b = _build(left, depth), _build(right, depth)
            if not isinstance(a, Schedule) and not isinstance(b, Schedule):
                _refuse(node)  # among others 'x' * 10**9
            return a + b if isinstance(sign, ast.Add) else a * b
        case ast.Call(func=ast.Name(id=name)):
            return _call(_known("no schedule is called", name, SCHEDULES), [], node, depth)
        case ast.Call(func=ast.Attribute(value=value, attr=name)):
            make = _known("a schedule has no method", name, METHODS)
            of = _build(value, depth)
            if not isinstance(of, Schedule):
                raise Invalid(f"schedule: .{name}() needs a schedule before the dot, got {show(of)}")
            return _call(make, [of], node, depth)
        case ast.Name(id=name):
            make = _known("unknown name", name, SCHEDULES)
            raise Invalid(f"schedule: {name} needs arguments: {', '.join(inspect.signature(make).parameters)}")
    _refuse(node)


def _known(message: str, name: str, known: dict[str, Callable[..., Schedule]]) -> Callable[..., Schedule]:
    if name not in known:
        raise Invalid(f"schedule: {message} {show(name)}; {nearest(name, known)}")
    return known[name]


def _call(make: Callable[..., Schedule], before: list[Any], node: ast.Call, depth: int) -> Schedule:
    positional = before + [_build(argument, depth) for argument in node.args]
    if any(keyword.arg is None for keyword in node.keywords):  # **
        _refuse(node)
    named = {str(keyword.arg): _build(keyword.value, depth) for keyword in node.keywords}
    return make(*positional, **named)


def _refuse(node: ast.expr) -> NoReturn:
    try:
        code = show(ast.unparse(node))
    except (RecursionError, ValueError):
        code = f"what stands at column {node.col_offset + 1}"
    raise Invalid(f"schedule: {code} is not allowed: only schedules, their methods, numbers, lists, + and *")


def from_json(stored: dict[str, Any], depth: int = DEEPEST) -> Schedule:
    """The schedule that `to_json` stored.

    >>> from_json({"op": "warmup", "version": 1, "of": {"op": "constant", "version": 1, "lr": 0.1}, "n": 5})
    constant(0.1).warmup(5)
    """
    if not isinstance(stored, dict):
        raise WrongType(f"from_json: a schedule must be an object with op and version, got {show(stored)}")
    if depth == 0:
        raise Invalid(f"from_json: schedules must be nested at most {DEEPEST} deep")
    op, version = stored.get("op"), stored.get("version")
    if not isinstance(op, str) or op not in OPS:
        raise Invalid(f"from_json: there is no op {show(op)}; {nearest(op, OPS)}")
    if version != VERSION:
        raise Invalid(f"from_json: {op}: version must be {VERSION}, got version={show(version)}")
    known, checked_by = parameters(op), checks(FORMULAS[op])
    given = {name: value for name, value in stored.items() if name not in ("op", "version")}
    needed = {name for name, parameter in known.items() if parameter.default is parameter.empty}
    if not needed <= given.keys() <= known.keys():
        raise Invalid(f"from_json: {op} has {', '.join(known)}, got {', '.join(map(show, given))}")
    for name, value in given.items():
        if name == "of" or checked_by[name] is must_be_schedule:
            given[name] = from_json(value, depth - 1)
    return OPS[op](**{known[name].name: value for name, value in given.items()})


def check_state(where: str, schedule: Schedule, state: dict[str, Any], own: dict[str, Any]) -> None:
    """Refuse a state that is not like the `own` one of a framework's scheduler, or of another schedule."""
    if state.keys() != own.keys():
        raise Invalid(f"{where}: the state must be that of {schedule}, got {show(state)}")
    stored = from_json(state["schedule"])
    if stored != schedule:
        raise Invalid(f"{where}: the state must be that of {schedule}, got that of {stored}")
