"""What shards compute on the CPU, recorded once and replayed without Python: threads then really compute side by side.

The Python of a small model's shard takes longer than its arithmetic, and threads take turns at it. So the operations of the
forward and the backward pass are written down once for each shape of examples, and PyTorch's own interpreter calls the same
operations on the same shapes in the same order. One call takes the examples of neighbouring shards, computes one shard after
the other, and adds them along the tree. The bits are the same. As on a GPU (recorder.py), a shard's result may depend only on
weights, buffers, examples and key. What draws numbers, or looks at the numbers in a tensor while it computes, is not recorded:
the computation must also be possible with tensors that hold no numbers. Nor are models with hooks, which may be there for what
they do beside. Recording takes as long as hundreds of small shards, so it begins when AFTER seconds were spent on them.
"""

from __future__ import annotations

import ctypes
import itertools
import operator
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from samestep.backends.noise import FREE, Noise
from samestep.shards import Fold, Span, parts
from samestep.trees import Tree, filled, leaves, length

if TYPE_CHECKING:
    from samestep.backends.torch.replica import TorchReplica
    from samestep.data.feed import Batch

aten = torch.ops.aten
AFTER = 0.5  # seconds for shards of a shape by operations, of all threads that share a recording; then it is made
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
    """The operations of a shard's vector, for one shape of examples. They take the vector, the slots in it and the examples."""

    def __init__(self, replica: TorchReplica, x: Tree, y: Tree) -> None:
        from torch.fx.experimental.proxy_tensor import make_fx

        arrays, vector = arrays_of(x, y), replica.parameters.new_empty(replica.size)
        self.size, self.arrays = length(x), len(arrays)
        slots = slots_of(replica, vector, 0)
        lane, count, start = replica.lanes(1)[0], len(slots), replica.size - replica.numbers

        def compute(vector: Tensor, *given: Tensor) -> Tensor:
            both = filled((x,) if y is x else (x, y), given[count:])
            pieces, (_, loss, _, _, hits, _, *others) = replica._compute(lane, both[0], both[-1], None, 0)
            torch.cat(pieces, out=vector[:start])
            vector[start:].zero_()
            for slot, number in zip(given[:count], (loss, hits, *others), strict=True):
                slot.copy_(number)
            return vector

        prove(compute, [vector, *slots, *arrays])
        traced = make_fx(compute, _allow_non_fake_inputs=True)(vector, *slots, *arrays)
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


def slots_of(replica: TorchReplica, vector: Tensor, shard: int) -> list[Tensor]:
    """Where the numbers of a shard lie in its vector: loss, hits and more."""
    start = replica.size - replica.numbers
    own = [shard, replica.shards + shard, *range(2 * replica.shards, replica.numbers)]
    return [vector[start + i : start + i + 1] for i in own]


class Traced:
    """The vectors of shards in the steps of a fit. What checks them computes by operations, and sees what these hide."""

    def __init__(self, replica: TorchReplica, wanted: bool) -> None:
        self.replica, self.noise, modules = replica, replica._noise, list(replica._model.modules())
        self.wanted = wanted and not any(getattr(module, name) for module in modules for name in HOOKS)
        if wanted:
            keep_memory()
        self._spent: dict[Any, float] = defaultdict(float)  # seconds, by operations
        self._recorded, self._programs = dict[Any, Recorded](), dict[Any, Program]()
        self._vectors: dict[int, list[Tensor]] = {}  # of neighbours, by the first of them

    def sums(self, batch: Batch, shards: range) -> dict[Span, Tensor]:
        """The parts of the sum over a batch that neighbouring shards give."""
        n, device, resident = len(batch.spans), self.replica.device, batch.pass_.feed.resident
        if resident and self._recorded:
            lo, hi = batch.spans[shards[0]][0], batch.spans[shards[-1]][1]
            sizes = tuple(batch.spans[shard][1] - batch.spans[shard][0] for shard in shards)
            if program := self._program(*resident[device], sizes, tuple(parts(shards[0], shards[-1] + 1, n))):
                index = batch.pass_.order_on[device][lo:hi]
                return program(*arrays_of(*resident[device]), index)  # its vectors are free: the step before has ended
        fold: Fold[Tensor] = Fold(n, self.replica.backend.add)
        for shard in shards:
            fold.add((shard, shard + 1), self.one(*batch.shard(shard, device), batch.keys[shard], shard))
        return fold.parts

    def one(self, x: Tree, y: Tree, key: int, shard: int) -> Tensor:
        """The vector of one shard."""
        if program := self._program(x, y, (length(x),)):
            return self._alone(program, x, y, shard)
        began = time.perf_counter()
        vector = self.replica.gradient(x, y, key, shard)
        if self.wanted and self.noise.way == FREE:
            kind = self._kind(x, y, length(x))
            self._spent[kind] += time.perf_counter() - began
            if self._spent[kind] > AFTER:
                self._spent[kind] = 0
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
            recorded = [one for size in sizes if (one := self._recorded.get(self._kind(x, y, size)))]
            if len(recorded) < len(sizes):
                return None
            vectors = self._vectors.setdefault(spans[0][0], []) if spans else []
            self._programs[key] = Program(self.replica, recorded, spans, vectors)
        return self._programs[key]

    def _alone(self, program: Program, x: Tree, y: Tree, shard: int) -> Tensor:
        """The vector of one shard, by a program for any one."""
        vector = self.replica.parameters.new_empty(self.replica.size)
        program(vector, *slots_of(self.replica, vector, shard), *arrays_of(x, y))
        return vector

    def _record(self, kind: Any, x: Tree, y: Tree, shard: int, vector: Tensor) -> None:
        """Record this shard's computation, if it gives the same vector."""
        with Noise.generator.alone():  # nobody else computes: fx changes the modules' class for a moment
            if kind in self._recorded or sum(one[0] == kind[0] for one in self._recorded) == SHAPES:
                return
            try:
                with warnings.catch_warnings(action="ignore"):
                    recorded = Recorded(self.replica, x, y)
                found = self._alone(Program(self.replica, [recorded]), x, y, shard)
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

    It takes what the recording of one shard takes. Or, if `spans` says which parts of the sum are wanted, it takes the arrays
    of a data set and the rows among them, and computes in `vectors`, of which it makes as many as it needs. These stay: glibc
    gives large ones back to the system, which clears them anew.
    """

    def __init__(
        self, replica: TorchReplica, shards: Sequence[Recorded], spans: Sequence[Span] = (), vectors: Any = ()
    ) -> None:
        """`vectors`: a list, to which more are added if need be."""
        self.held = dict[fx.Node, Tensor]()  # what is there before a call
        self.parts = dict[Span, Tensor]()  # what a call gives
        graph, remaining, row, free = fx.Graph(), iter(shards), 0, list[fx.Node]()

        def hold(tensor: Tensor) -> fx.Node:
            node = graph.placeholder(f"held{len(self.held)}")
            self.held[node] = tensor
            return node

        def more() -> Iterator[fx.Node]:
            """Vectors to be filled: those that have been added to others, and then new ones."""
            for i in itertools.count():
                while free:
                    yield free.pop()
                if i == len(vectors):
                    vectors.append(replica.parameters.new_empty(replica.size))
                yield hold(vectors[i])

        def add(left: fx.Node, right: fx.Node) -> fx.Node:
            graph.call_function(aten.add_.Tensor, (left, right))
            free.append(right)
            return left

        if not spans:
            graph.graph_copy(shards[0].graph, {node: graph.placeholder(node.name) for node in shards[0].given})
        else:
            arrays = [graph.placeholder(f"array{i}") for i in range(shards[0].arrays)]
            index, empty = graph.placeholder("index"), more()
        for lo, hi in spans:
            fold: Fold[fx.Node] = Fold(hi - lo, add)
            for i in range(lo, hi):
                one, vector = next(remaining), next(empty)
                rows = graph.call_function(aten.slice.Tensor, (index, 0, row, row + one.size))
                row += one.size
                slots = map(hold, slots_of(replica, self.held[vector], i))
                examples = [graph.call_function(aten.index_select.default, (array, 0, rows)) for array in arrays]
                graph.graph_copy(one.graph, dict(zip(one.given, [vector, *slots, *examples], strict=True)))
                fold.add((i - lo, i - lo + 1), vector)
            self.parts[lo, hi] = self.held[fold.total()]
        self._translate(graph)

    def __call__(self, *given: Tensor) -> dict[Span, Tensor]:
        torch._C._set_graph_executor_optimize(False)  # of this thread: else it may choose other operations
        with torch.inference_mode():
            self.function(*given, *self.tensors)
        return self.parts

    def _translate(self, graph: fx.Graph) -> None:
        self.graph, self.values = torch._C.Graph(), dict[fx.Node, Any]()
        self.inputs = dict[int, tuple[Any, Tensor]]()  # what operations need of what is held, by id
        for node in graph.nodes:
            if node.op == "get_attr":
                self.held[node] = node.meta["tensor"]
            elif node.op == "placeholder" and node not in self.held:
                self.values[node] = self.graph.addInput(node.name)
            elif node.op == "call_function":
                self.values[node] = self._called(node)
        self.graph.registerOutput(self.graph.insertConstant(None))  # all is in the vectors
        self.tensors = [tensor for _, tensor in self.inputs.values()]
        self.function = torch._C._create_function_from_graph("shards", self.graph)

    def _called(self, node: fx.Node) -> Any:
        op: Any = node.target
        first: Any = node.args[0] if node.args else None
        if op is operator.getitem:
            return self.values[first][node.args[1]]
        if op is aten.detach.default:  # nothing has a gradient here
            return self._value(first, None)
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
        if isinstance(given, fx.Node) and given in self.held:
            tensor = self.held[given]
            if id(tensor) not in self.inputs:
                self.inputs[id(tensor)] = self.graph.addInput(), tensor
            return self.inputs[id(tensor)][0]
        if isinstance(given, fx.Node):
            return self.values[given]
        if isinstance(given, (list, tuple)):
            kind = kind.getElementType() if isinstance(kind, torch.OptionalType) else kind
            values = [self._value(one, kind.getElementType()) for one in given]
            return self._put("prim::ListConstruct", values, [kind])[0]
        if isinstance(given, torch.memory_format):
            given = FORMATS.index(given)
        return self.graph.insertConstant(float(given) if str(kind) == "float" else given)

    def _put(self, name: str, inputs: Sequence[Any], kinds: Sequence[Any]) -> list[Any]:
        node = self.graph.insertNode(self.graph.create(name, inputs, len(kinds)))
        for value, kind in zip(node.outputs(), kinds, strict=True):
            value.setType(kind)
        return list(node.outputs())
