"""Gluon blocks: the names of their parameters, and copies of a block around other parameters."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mxnet import nd
from mxnet.context import Context
from mxnet.gluon import Block, HybridBlock
from mxnet.gluon.parameter import Parameter

from samestep.backends.calling import OPTIONS, Style, spread, style_of
from samestep.errors import Invalid, NotBuilt, WrongType
from samestep.trees import Tree


def blocks_of(block: Block, path: str = "") -> Iterator[tuple[str, Block]]:
    """A block and all blocks in it, by path."""
    yield path, block
    for name, child in block._children.items():
        yield from blocks_of(child, f"{path}{name}.")


def parameters_of(model: Block) -> dict[str, Parameter]:
    """All parameters by the names of their attributes, as save_parameters names them.

    Those that are nobody's attribute have the path of their block and the name that it gave them. MXNet's own names would not
    do: they count what the process has made before.
    """
    found = model._collect_params_with_prefix()
    known = {id(p) for p in found.values()}
    for path, block in blocks_of(model):
        for name, p in block.params.items():
            if id(p) not in known:
                found[path + name.removeprefix(block.params.prefix)] = p
                known.add(id(p))
    return found


def style(model: Block, x: Tree, whole: bool) -> Style:
    """How a block takes x: by places alone, so names are brought into the order of its arguments."""
    hybrid = isinstance(model, HybridBlock) and type(model).forward is HybridBlock.forward
    function = model.hybrid_forward if hybrid else model.forward
    found = style_of(function, x, whole, int(hybrid), OPTIONS | set(model._reg_params) if hybrid else OPTIONS)
    if not isinstance(found, tuple):
        return found
    names = list(inspect.signature(function).parameters)[int(hybrid) :]
    places = tuple(name for name in names if name in found)
    if places != tuple(names[: len(found)]):
        raise Invalid(
            f"a block takes its inputs by place, and these leave gaps: {', '.join(found)} of {', '.join(names)}"
        )
    return places


def passed(x: Tree, style: Style) -> list[Any]:
    """What a block is called with."""
    args, named = spread(x, style)
    return [*args, *named.values()]


def arrays_in(block: Block) -> dict[str, Any]:
    """The arrays that a block holds as plain attributes."""
    return {key: value for key, value in vars(block).items() if isinstance(value, nd.NDArray)}


def check_parameters(parameters: dict[str, Parameter]) -> None:
    for name, p in parameters.items():
        if p._data is None:
            raise NotBuilt(
                f"the parameter {name!r} has no value: call initialize(), and use it or give its whole shape"
            )
        if np.dtype(p.list_data()[0].dtype).kind == "V":  # bfloat16
            raise WrongType(f"the parameter {name!r} is of type {p.dtype}, which NumPy does not know: convert it")
        if p._stype != "default":
            raise WrongType(f"the parameter {name!r} is of the storage type {p._stype}: only dense ones can be trained")


def bare(p: Parameter) -> Parameter:
    """A parameter like p without a value."""
    new = copy.copy(p)
    new._data = new._grad = new._ctx_list = new._ctx_map = new._trainer = new._var = None
    new._deferred_init = ()
    if p.grad_req == "add":
        new._grad_req = "write"  # a shard's gradient stands alone
    return new


def copied(model: Block, parameter: Callable[[Parameter], Parameter], context: Context) -> Block:
    """The model, copied around other parameters, with its own arrays on a context; what was compiled is left out."""
    memo: dict[int, Any] = {id(p): parameter(p) for p in parameters_of(model).values()}
    memo |= {id(a): a.copyto(context) for _, block in blocks_of(model) for a in arrays_in(block).values()}
    memo |= {id(block._cached_op): None for _, block in blocks_of(model) if hasattr(block, "_cached_op")}
    return copy.deepcopy(model, memo)
