"""What shards compute on the CPU, recorded once and replayed without Python: threads then really compute side by side.

The Python of a small model's shard takes longer than its arithmetic, and threads take turns at it. So the operations of the
forward and the backward pass are written down once for each shape of examples, and PyTorch's own interpreter calls the same
operations on the same shapes in the same order. One call takes the examples of neighbouring shards, computes one shard after
the other, and adds them along the tree. The bits are the same. As on a GPU (recorder.py), a shard's result may depend only on
weights, buffers, examples and key. What draws numbers, or looks at the numbers in a tensor while it computes, is not recorded:
the computation must also be possible with tensors that hold no numbers. Nor are models with hooks, which may be there for what
they do beside. Recording takes as long as hundreds of small shards, so it begins after AFTER of them.
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
from samestep.shards import Fold, Span, parts
from samestep.trees import Tree, filled, leaves, length

if TYPE_CHECKING:
    from samestep.backends.torch.lane import Lane
    from samestep.backends.torch.replica import TorchReplica
    from samestep.data.feed import Batch

aten = torch.ops.aten
AFTER = 256  # shards of a shape by operations; then it is recorded
SHAPES = 8  # that a thread records for one replica
FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
VIEWS = (aten.view.default, aten.permute.default, aten.t.default, aten.detach.default)
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
    """The operations of a shard's vector, for one shape of examples."""

    def __init__(self, replica: TorchReplica, x: Tree, y: Tree) -> None:
        from torch.fx.experimental.proxy_tensor import make_fx

        start, self.size, arrays = replica.size - replica.numbers, length(x), arrays_of(x, y)

        def compute(lane: Lane, vector: Tensor, places: Tensor, *arrays: Tensor) -> Tensor:
            given = filled((x,) if y is x else (x, y), arrays)
            pieces, (_, loss, _, _, hits, _, *others) = replica._compute(lane, given[0], given[-1], None, 0)
            torch.cat(pieces, out=vector[:start])
            vector[start:].zero_().index_copy_(0, places, torch.cat([loss, hits, *others]))
            return vector

        given = [replica.parameters.new_empty(replica.size), places(replica)[0], *arrays]
        prove(partial(compute, replica.lanes(1)[0]), given)
        traced = make_fx(partial(compute, replica.lanes(1)[0]), _allow_non_fake_inputs=True)(*given)
        for node in traced.graph.find_nodes(op="get_attr"):
            node.meta["tensor"] = getattr(traced, node.target).detach()
        self.graph = traced.graph
        self._write_in_place()
        self.given = self.graph.find_nodes(op="placeholder")

    def _write_in_place(self) -> None:
        """Compute products that are gradients where they lie in the vector, and copy all other pieces there."""
        graph, start = self.graph, 0
        (together,) = graph.find_nodes(op="call_function", target=aten.cat.out)
        for piece in together.args[0]:
            size, origin = piece.meta["val"].numel(), piece
            while origin.target in VIEWS and origin.meta["val"].numel() == size:
                origin = origin.args[0]
            product = origin.target is aten.mm.default and origin.meta["val"].is_contiguous()
            with graph.inserting_before(origin if product else together):
                place = graph.call_function(aten.slice.Tensor, (next(iter(graph.nodes)), 0, start, start + size))
                if product:
                    place = graph.call_function(aten.view.default, (place, list(origin.meta["val"].shape)))
                    made = graph.call_function(aten.mm.out, origin.args, {"out": place})
                    made.meta = origin.meta
                    origin.replace_all_uses_with(made)
                    graph.erase_node(origin)
                elif size:
                    graph.call_function(aten.copy_.default, (place, piece))
            start += size
        graph.erase_node(together)
        graph.eliminate_dead_code()


def places(replica: TorchReplica) -> list[Tensor]:
    """Where the numbers of each shard lie among those at the end of its vector."""
    more = torch.arange(2 * replica.shards, replica.numbers)
    return [torch.cat([torch.tensor([i, replica.shards + i]), more]) for i in range(replica.shards)]


class Traced:
    """The vectors of shards in the steps of a fit. What checks them computes by operations, and sees what these hide."""

    def __init__(self, replica: TorchReplica, wanted: bool) -> None:
        self.replica, self.noise, modules = replica, replica._noise, list(replica._model.modules())
        self.wanted = wanted and not any(getattr(module, name) for module in modules for name in HOOKS)
        if wanted:
            keep_memory()
        self._places, self._seen = places(replica), Counter[Any]()
        self._recorded, self._programs = dict[Any, Recorded](), dict[Any, Program]()

    def sums(self, batch: Batch, shards: range) -> dict[Span, Tensor]:
        """The parts of the sum over a batch that neighbouring shards give."""
        n, device, resident = len(batch.spans), self.replica.device, batch.pass_.feed.resident
        if resident and self._recorded:
            lo, hi = batch.spans[shards[0]][0], batch.spans[shards[-1]][1]
            sizes = tuple(batch.spans[shard][1] - batch.spans[shard][0] for shard in shards)
            spans = tuple((a - shards[0], b - shards[0]) for a, b in parts(shards[0], shards[-1] + 1, n))
            if program := self._program(*resident[device], sizes, spans):
                index = batch.pass_.order_on[device][lo:hi]
                return self._run(program, [*arrays_of(*resident[device]), index], shards)
        fold: Fold[Tensor] = Fold(n, self.replica.backend.add)
        for shard in shards:
            fold.add((shard, shard + 1), self.one(*batch.shard(shard, device), batch.keys[shard], shard))
        return fold.parts

    def one(self, x: Tree, y: Tree, key: int, shard: int) -> Tensor:
        """The vector of one shard."""
        if program := self._program(x, y, (length(x),)):
            return self._run(program, arrays_of(x, y), range(shard, shard + 1))[shard, shard + 1]
        vector = self.replica.gradient(x, y, key, shard)
        if self.wanted and self.noise.way == FREE:
            kind = self._kind(x, y, length(x))
            n = self._seen[kind] = self._seen[kind] + 1
            if n == AFTER:
                self._record(kind, x, y, shard, vector)
        return vector

    def _kind(self, x: Tree, y: Tree, size: int) -> Any:
        """What decides which recording fits a shard of so many examples."""
        thread = threading.get_ident() if self.replica.state else 0  # with buffers of its own, each has its recordings
        return thread, y is x, size, *((array.shape[1:], array.stride(), array.dtype) for array in arrays_of(x, y))

    def _program(self, x: Tree, y: Tree, sizes: Sequence[int], spans: Sequence[Span] = ()) -> Program | None:
        """What computes shards of these sizes, if all are recorded; with `spans`, their examples are taken out of x and y."""
        if not self._recorded or not self.wanted or self.noise.way != FREE:
            return None
        key = self._kind(x, y, 0), sizes, spans
        if key not in self._programs:
            recorded = [self._recorded.get(self._kind(x, y, size)) for size in sizes]
            if None in recorded:
                return None
            self._programs[key] = Program([one for one in recorded if one], spans)
        return self._programs[key]

    def _run(self, program: Program, given: Sequence[Tensor], shards: range) -> dict[Span, Tensor]:
        vectors = [self.replica.parameters.new_empty(self.replica.size) for _ in range(program.vectors)]
        torch._C._set_graph_executor_optimize(False)  # of this thread: else it may choose other operations
        with torch.inference_mode():
            program.function(*given, *(self._places[shard] for shard in shards), *vectors, *program.tensors)
        return {(shards[0] + lo, shards[0] + hi): vectors[i] for (lo, hi), i in program.parts.items()}

    def _record(self, kind: Any, x: Tree, y: Tree, shard: int, vector: Tensor) -> None:
        """Record this shard's computation, if it gives the same vector."""
        with Noise.generator.alone():  # nobody else computes: fx changes the modules' class for a moment
            if kind in self._recorded or sum(one[0] == kind[0] for one in self._recorded) == SHAPES:
                return
            try:
                with warnings.catch_warnings(action="ignore"):
                    recorded = Recorded(self.replica, x, y)
                found = self._run(Program([recorded]), arrays_of(x, y), range(shard, shard + 1))[shard, shard + 1]
            except Exception:  # there are many, and the operations say what is wrong if anything is
                self.wanted = False
                return
        if torch.equal(found.view(torch.uint8), vector.view(torch.uint8)):
            self._recorded[kind] = recorded
        else:
            self.wanted = False
            warnings.warn(f"a shard's computation is not recorded on the CPU, and so slower: {OTHER}", stacklevel=2)


def arrays_of(x: Tree, y: Tree) -> list[Tensor]:
    return leaves((x,) if y is x else (x, y))


class Program:
    """What neighbouring shards compute, in one call of PyTorch's interpreter.

    Its arguments are the examples of one shard; or, if `spans` says which parts of the sum are wanted, those of a data set
    and the rows among them. Then the places of the shards' numbers, the vectors that it fills, and `tensors`.
    """

    def __init__(self, shards: Sequence[Recorded], spans: Sequence[Span] = ()) -> None:
        graph, row, vectors, free = fx.Graph(), 0, list[fx.Node](), list[fx.Node]()
        arrays = [graph.placeholder(f"array{i}") for i in range(len(shards[0].given) - 2)]
        index = graph.placeholder("index") if spans else None
        places = [graph.placeholder(f"places{i}") for i in range(len(shards))]

        def add(left: fx.Node, right: fx.Node) -> fx.Node:
            graph.call_function(aten.add_.Tensor, (left, right))
            free.append(right)  # to be filled again
            return left

        self.parts = dict[Span, int]()  # which of the vectors has a part in the end
        for lo, hi in spans or [(0, 1)]:
            fold: Fold[fx.Node] = Fold(hi - lo, add)
            for i in range(lo, hi):
                if not free:
                    vectors.append(graph.placeholder(f"vector{len(vectors)}"))
                    free.append(vectors[-1])
                examples = arrays
                if index:
                    rows = graph.call_function(aten.slice.Tensor, (index, 0, row, row + shards[i].size))
                    examples = [graph.call_function(aten.index_select.default, (array, 0, rows)) for array in arrays]
                row, vector = row + shards[i].size, free.pop()
                graph.graph_copy(
                    shards[i].graph, dict(zip(shards[i].given, [vector, places[i], *examples], strict=True))
                )
                fold.add((i - lo, i - lo + 1), vector)
            self.parts[lo, hi] = vectors.index(fold.total())
        self.vectors = len(vectors)
        self._translate(graph)

    def _translate(self, graph: fx.Graph) -> None:
        self.graph, self.tensors, self.values = torch._C.Graph(), list[Tensor](), dict[fx.Node, Any]()
        for node in graph.find_nodes(op="placeholder"):
            self.values[node] = self.graph.addInput(node.name)
        held = dict[int, Any]()  # of several shards, but once in `tensors`
        for node in graph.find_nodes(op="get_attr"):
            tensor = node.meta["tensor"]
            if id(tensor) not in held:
                held[id(tensor)] = self.graph.addInput(node.name)
                self.tensors.append(tensor)
            self.values[node] = held[id(tensor)]
        for node in graph.nodes:
            if node.op == "call_function":
                self.values[node] = self._called(node)
        self.graph.registerOutput(self.graph.insertConstant(None))  # all is in the vectors
        self.function = torch._C._create_function_from_graph("shards", self.graph)

    def _called(self, node: fx.Node) -> Any:
        op: Any = node.target
        first: Any = node.args[0] if node.args else None
        if op is operator.getitem:
            return self.values[first][node.args[1]]
        if op is aten.detach.default:  # nothing has a gradient here
            return self.values[first]
        if torch.Tag.nondeterministic_seeded in op.tags:
            raise NotImplementedError(f"{op} draws numbers")
        given = [
            *node.args,
            *(node.kwargs.get(a.name, a.default_value) for a in op._schema.arguments[len(node.args) :]),
        ]
        inputs = [self._value(one, a.type) for one, a in zip(given, op._schema.arguments, strict=True)]
        made = self._put(op._schema.name, inputs, [result.type for result in op._schema.returns])
        if isinstance(node.meta.get("val"), list):
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
