"""A shard's computation on the CPU, recorded once and replayed without Python: threads then really compute side by side.

The Python of a small model's shard takes longer than its arithmetic, and threads take turns at it. So the operations of the
forward and the backward pass are written down once for each shape of examples, and PyTorch's own interpreter calls the same
operations on the same shapes in the same order. The bits are the same. As on a GPU (recorder.py), a shard's result may depend
only on weights, buffers, examples and key. What draws numbers, or looks at the numbers in a tensor while it computes, is not
recorded: the computation must also be possible with tensors that hold no numbers. Nor are models with hooks, which may be
there for what they do beside. Recording takes as long as hundreds of small shards, so it begins after AFTER of them.
"""

from __future__ import annotations

import ctypes
import operator
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from samestep.backends.noise import FREE, Noise
from samestep.trees import Tree, filled, leaves

if TYPE_CHECKING:
    from samestep.backends.torch.lane import Lane
    from samestep.backends.torch.replica import TorchReplica

AFTER = 256  # shards of a shape by operations; then it is recorded
SHAPES = 8  # that a thread records for one replica
FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OTHER = "its bits are not those of its operations: it depends on more than its arguments"


def keep_memory() -> None:
    """Have glibc keep what threads free, in blocks up to 32 MB: as far as its own thresholds grow in the first thread.

    In the others it gives large blocks back to the system, which clears them anew for every shard.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return
    for threshold, size in ((-1, 1 << 30), (-3, 32 << 20)):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        mallopt(threshold, size)


def prove(compute: Callable[..., Any], given: Sequence[Tensor]) -> None:
    """Compute with tensors that hold no numbers. This fails if anything looks at them."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # imports much

    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        compute(*map(fake.from_tensor, given))


class Recorded:
    """The computation of a shard's vector for one shape of examples."""

    def __init__(self, replica: TorchReplica, x: Tree, y: Tree) -> None:
        from torch.fx.experimental.proxy_tensor import make_fx

        self.size, self.like, shards = replica.size, replica.parameters, replica.shards
        more = torch.arange(2 * shards, replica.numbers)
        self.places = [torch.cat([torch.tensor([i, shards + i]), more]) for i in range(shards)]  # of a shard's numbers
        start = replica.size - replica.numbers

        def compute(lane: Lane, vector: Tensor, places: Tensor, *arrays: Tensor) -> Tensor:
            given = filled((x,) if y is x else (x, y), arrays)
            pieces, (_, loss, _, _, hits, _, *others) = replica._compute(lane, given[0], given[-1], None, 0)
            torch.cat(pieces, out=vector[:start])
            vector[start:].zero_().index_copy_(0, places, torch.cat([loss, hits, *others]))
            return vector

        given = [torch.empty(self.size, dtype=self.like.dtype), self.places[0], *leaves((x,) if y is x else (x, y))]
        prove(partial(compute, replica.lanes(1)[0]), given)
        self.program = Program(make_fx(partial(compute, replica.lanes(1)[0]), _allow_non_fake_inputs=True)(*given))

    def __call__(self, x: Tree, y: Tree, shard: int) -> Tensor:
        vector = self.like.new_empty(self.size)
        torch._C._set_graph_executor_optimize(False)  # of this thread: else it may choose other operations
        with torch.inference_mode():
            self.program.function(
                vector, self.places[shard], *leaves((x,) if y is x else (x, y)), *self.program.tensors
            )
        return vector


class Traced:
    """The vectors of shards in the steps of a fit. What checks them computes by operations, and sees what these hide."""

    def __init__(self, replica: TorchReplica, wanted: bool) -> None:
        self.replica, self.noise, modules = replica, replica._noise, list(replica._model.modules())
        self.wanted = wanted and not any(getattr(module, name) for module in modules for name in HOOKS)
        if wanted:
            keep_memory()
        self._seen, self._recorded = Counter[Any](), dict[Any, Recorded]()

    def __call__(self, x: Tree, y: Tree, key: int, shard: int) -> Tensor:
        if not self.wanted or self.noise.way != FREE:
            return self.replica.gradient(x, y, key, shard)
        thread = threading.get_ident() if self.replica.state else 0  # with buffers of its own, each has its recordings
        kind = thread, y is x, *((array.shape, array.stride(), array.dtype) for array in leaves((x, y)))
        if recorded := self._recorded.get(kind):
            return recorded(x, y, shard)
        vector = self.replica.gradient(x, y, key, shard)
        n = self._seen[kind] = self._seen[kind] + 1
        if n == AFTER:
            self._record(kind, x, y, shard, vector)
        return vector

    def _record(self, kind: Any, x: Tree, y: Tree, shard: int, vector: Tensor) -> None:
        """Record this shard's computation, if it gives the same vector."""
        with Noise.generator.alone():  # nobody else computes: fx changes the modules' class for a moment
            if kind in self._recorded or sum(one[0] == kind[0] for one in self._recorded) == SHAPES:
                return
            try:
                with warnings.catch_warnings(action="ignore"):
                    recorded = Recorded(self.replica, x, y)
                same = torch.equal(recorded(x, y, shard).view(torch.uint8), vector.view(torch.uint8))
            except Exception:  # there are many, and the operations say what is wrong if anything is
                self.wanted = False
                return
        if same:
            self._recorded[kind] = recorded
        else:
            self.wanted = False
            warnings.warn(f"a shard's computation is not recorded on the CPU, and so slower: {OTHER}", stacklevel=2)


class Program:
    """The operations of a recording, as PyTorch's interpreter takes them."""

    def __init__(self, traced: fx.GraphModule) -> None:
        self.graph, self.tensors = torch._C.Graph(), list[Tensor]()  # which it takes after its other arguments
        self.values: dict[fx.Node, Any] = {}
        for node in traced.graph.find_nodes(op="placeholder"):
            self.values[node] = self.graph.addInput(node.name)
        for node in traced.graph.find_nodes(op="get_attr"):
            self.values[node] = self.graph.addInput(node.name)
            self.tensors.append(getattr(traced, node.target).detach())
        for node in traced.graph.nodes:
            if node.op == "call_function":
                self.values[node] = self._called(node)
            elif node.op == "output":
                self.graph.registerOutput(self.values[node.args[0]])
        self.function = torch._C._create_function_from_graph("shard", self.graph)

    def _called(self, node: fx.Node) -> Any:
        op: Any = node.target
        first: Any = node.args[0] if node.args else None
        if op is operator.getitem:
            return self.values[first][node.args[1]]
        if op is torch.ops.aten.detach.default:  # nothing has a gradient here
            return self.values[first]
        if torch.Tag.nondeterministic_seeded in op.tags:
            raise NotImplementedError(f"{op} draws numbers")
        given = [
            *node.args,
            *(node.kwargs.get(a.name, a.default_value) for a in op._schema.arguments[len(node.args) :]),
        ]
        inputs = [self._value(one, a.type) for one, a in zip(given, op._schema.arguments, strict=True)]
        made = self._put(op._schema.name, inputs, [result.type for result in op._schema.returns])
        if isinstance(node.meta["val"], list):
            return self._put("prim::ListUnpack", made, [torch._C.TensorType.get()] * len(node.meta["val"]))
        return made[0] if len(made) == 1 else made

    def _value(self, given: Any, kind: Any) -> Any:
        """An argument of an operation."""
        if isinstance(given, fx.Node):
            return self.values[given]
        if isinstance(given, (list, tuple)):
            kind = kind.getElementType() if isinstance(kind, torch.OptionalType) else kind
            return self._put("prim::ListConstruct", [self._value(one, kind.getElementType()) for one in given], [kind])[
                0
            ]
        if isinstance(given, torch.memory_format):
            given = FORMATS.index(given)
        return self.graph.insertConstant(float(given) if str(kind) == "float" else given)

    def _put(self, name: str, inputs: Sequence[Any], kinds: Sequence[Any]) -> list[Any]:
        node = self.graph.insertNode(self.graph.create(name, inputs, len(kinds)))
        for value, kind in zip(node.outputs(), kinds, strict=True):
            value.setType(kind)
        return list(node.outputs())
