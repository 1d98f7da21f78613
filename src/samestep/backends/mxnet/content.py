"""What stands for MXNet's objects in the recipe (samestep/content.py): blocks with their settings, arrays as numbers.

MXNet names blocks, parameters and operations by counters of the process (dense0_weight). No such name counts.
"""

from __future__ import annotations

import re
from typing import Any

import mxnet as mx
from mxnet.gluon import Block, ParameterDict, SymbolBlock
from mxnet.gluon.parameter import Parameter
from mxnet.ndarray import NDArray

from samestep.content import Model

# Of a block: names, what is told in its own way, and what a forward pass fills.
HIDDEN = {"_prefix", "_empty_prefix", "_name", "_scope", "_params", "_children", "_reg_params", "_cached_graph", "_cached_op",
          "_cached_op_args", "_in_format", "_out_format"}  # fmt: skip
# Of an optimizer: which parameters it has, by names, and counts of updates. A run sets both.
COUNTED = {"param_dict", "idx2name", "sym_info", "num_update", "_index_update_count", "_all_index_update_counts"}


def content(thing: Any, weights: bool) -> Any:
    if isinstance(thing, SymbolBlock):  # its parameters are in the order of its graph
        return Model(SymbolBlock, [thing._cached_graph[1], list(thing.params.values())])
    if isinstance(thing, Block):
        hidden = HIDDEN | thing._children.keys() | thing._reg_params.keys()
        return Model.of(thing, hidden, [dict(thing._reg_params), thing.params], thing._children)
    if isinstance(thing, ParameterDict):
        return {name.removeprefix(thing.prefix): p for name, p in thing.items()}
    if isinstance(thing, Parameter):
        about = [type(thing), str(thing.dtype), list(thing.shape or ()), thing.grad_req, thing.lr_mult, thing.wd_mult]
        value = thing.list_data()[0] if weights and thing._data else None
        return [*about, thing._differentiable, thing._stype, thing._grad_stype, value]
    if isinstance(thing, NDArray):
        return [type(thing), thing.stype, thing.asnumpy()]
    if isinstance(thing, mx.symbol.Symbol):
        return re.sub(r'"name": "[^"]*"', "", thing.tojson())  # its nodes are told apart by their places
    if isinstance(thing, mx.Context):
        return f"context {thing.device_type}"  # processes of one run have different ones
    if isinstance(thing, mx.optimizer.Optimizer):
        return [type(thing), {name: value for name, value in vars(thing).items() if name not in COUNTED}]
    return None
