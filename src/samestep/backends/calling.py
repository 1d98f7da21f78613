"""How a model takes its examples: model(x), model(*x) or model(**x). Its signature decides, once, before a run begins."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Set
from typing import Any

from samestep.errors import Invalid
from samestep.trees import Tree

Style = tuple[str, ...] | bool  # names: model(**those of x); True: model(*x); False: model(x)
OPTIONS = frozenset(
    {"train", "training", "is_training", "deterministic", "use_running_average"}
)  # which samestep gives


def style_of(function: Callable[..., Any], x: Tree, whole: bool, skip: int = 0, options: Set[str] = OPTIONS) -> Style:
    """How to pass x to a function, without its first `skip` arguments.

    whole: x is a whole batch, labels and all, of which the model gets what it has names for.
    options: arguments that are not for examples.

    >>> style_of(lambda ids, mask=None: 0, {"ids": 1, "labels": 2}, True), style_of(lambda a, b: 0, (1, 2), False)
    (('ids',), True)
    """
    if not isinstance(x, (Mapping, tuple, list)):
        return False
    try:
        given = list(inspect.signature(function).parameters.values())[skip:]
    except (TypeError, ValueError):  # it has no signature
        return tuple(x) if isinstance(x, Mapping) else True
    if isinstance(x, Mapping) and (taken := [one.name for one in given if one.name in options and one.name in x]):
        raise Invalid(
            f"the model's argument {taken[0]!r} is not for examples, and they have one of that name: rename it"
        )
    given = [one for one in given if one.name not in options]
    places = [one for one in given if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = sum(one.default is one.empty for one in places)
    if isinstance(x, Mapping):
        names = {one.name for one in given if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
        known = tuple(key for key in x if key in names)
        anything = any(one.kind is one.VAR_KEYWORD for one in given)
        if (whole and known) or len(known) == len(x) or anything:
            plain = (one for one in given if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD))
            missing = [one.name for one in plain if one.default is one.empty and one.name not in known]
            if missing:
                raise Invalid(f"the model needs {', '.join(missing)}, got {', '.join(map(str, x))}")
            return known if whole and known else tuple(x)
        if len(places) == 1 and not known:
            return False
        unknown = ", ".join(str(key) for key in x if key not in names)
        raise Invalid(f"the model does not take {unknown}: it takes {', '.join(sorted(names))}")
    if needed <= len(x) and (len(x) <= len(places) or any(one.kind is one.VAR_POSITIONAL for one in given)):
        return True
    if needed <= 1 <= len(places):
        return False
    raise Invalid(f"the model takes {len(places)} inputs ({', '.join(one.name for one in places)}), got {len(x)}")


def spread(x: Tree, style: Style) -> tuple[list[Any], dict[str, Any]]:
    """The arguments for a model.

    >>> spread({"ids": 1, "labels": 2}, ("ids",)), spread((1, 2), True), spread((1, 2), False)
    (([], {'ids': 1}), ([1, 2], {}), ([(1, 2)], {}))
    """
    if isinstance(style, tuple):
        return [], {name: x[name] for name in style}
    return (list(x), {}) if style else ([x], {})
