"""Random numbers of a shard's own in MXNet: those that follow after mx.random.seed(key(seed, step, shard)).

The contexts of the CPU share one generator, and each Python thread has its own. The engine makes draws in the order in which
they were asked for. Setting the generator takes 2 ms, whether anybody draws or not: more than a small model takes for a shard.
So it is set just before the first operation of a shard that draws, and a model that draws nothing never pays.

MXNet does not tell which operations draw, but in MXNet 1.9.1 their names do. An operation that was loaded later is taken for
one that draws. So is a compiled graph of which nothing is known.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mxnet import random
from mxnet.base import _LIB, check_call
from mxnet.context import Context
from mxnet.gluon import Block
from mxnet.operator import get_all_registered_operators

from samestep.backends.mxnet.blocks import blocks_of
from samestep.backends.replacing import replaced

DRAWS = re.compile(
    "(?i)random|sample_|_sample$|shuffle|custom|native|_ndarray|^(uniform|normal)$|^_npi_(bernoulli|choice|exponential|gamma|gumbel|logistic|"
    "multinomial|normal|normal_n|pareto|powerd|rayleigh|uniform|uniform_n|weibull)$"
)
BUILT_IN = frozenset(get_all_registered_operators())


def seed(key: int, context: Context) -> None:
    """Have all that is drawn from now on be drawn from a key, of which MXNet takes 32 bits."""
    random.seed((key ^ key >> 32) & 0x7FFFFFFF, ctx=context)


def draws(name: str, settings: Mapping[str, str]) -> bool:
    """Whether an operation may draw."""
    if re.search("(?i)dropout|rnn$", name):
        return float(settings.get("p", 1)) > 0
    if re.search("(?i)leaky_?relu", name):
        return settings.get("act_type") == "rrelu"
    return bool(DRAWS.search(name)) or name not in BUILT_IN


def graph_draws(graph: dict[str, Any]) -> bool:
    """Whether an operation of a graph may, or one of the graphs inside it."""
    nodes = [node for node in graph["nodes"] if node["op"] != "null"]
    inside = [part for node in nodes for part in node.get("subgraphs", [])]
    return any(draws(node["op"], node.get("attrs", {})) for node in nodes) or any(map(graph_draws, inside))


@functools.cache
def _suspect(handle: int) -> str | None:
    """The name of an operation, if it may draw with some settings."""
    name = ctypes.c_char_p()
    check_call(_LIB.MXSymbolGetAtomicSymbolName(ctypes.c_void_p(handle), ctypes.byref(name)))
    found = (name.value or b"unknown").decode()
    return found if draws(found, {"act_type": "rrelu"}) else None


class Graphs:
    """Which compiled graphs of a model and of a loss may draw."""

    def __init__(self, *given: Any) -> None:
        self._blocks = [pair[1] for one in given if isinstance(one, Block) for pair in blocks_of(one)]
        # With the graph itself: once a graph is let go, another may get its handle.
        self._known: dict[int, tuple[Any, bool]] = {}

    def draw(self, handle: int) -> bool:
        if handle not in self._known:
            for block in self._blocks:
                compiled = getattr(block, "_cached_op", None)
                if compiled is not None and compiled.handle.value == handle:
                    self._known[handle] = compiled, graph_draws(json.loads(block._cached_graph[1].tojson()))
        return handle not in self._known or self._known[handle][1]


@contextmanager
def drawn_from(key: int, context: Context, graphs: Graphs) -> Iterator[None]:
    """While this lasts, what this thread draws on a context is drawn from a key."""
    invoke, invoke_graph = _LIB.MXImperativeInvokeEx, _LIB.MXInvokeCachedOpEx  # all operations come through these two
    thread, waiting = threading.get_ident(), True

    def first() -> None:
        nonlocal waiting
        waiting = False
        seed(key, context)

    def operation(handle: Any, *given: Any) -> int:
        if waiting and (name := _suspect(handle.value)) and threading.get_ident() == thread:
            settings = {option.decode(): value.decode() for option, value in zip(given[5], given[6], strict=True)}
            if draws(name, settings):
                first()
        return int(invoke(handle, *given))

    def compiled(handle: Any, *given: Any) -> int:
        if waiting and graphs.draw(handle.value) and threading.get_ident() == thread:
            first()
        return int(invoke_graph(handle, *given))

    with replaced([(_LIB, "MXImperativeInvokeEx", operation), (_LIB, "MXInvokeCachedOpEx", compiled)]):
        yield
