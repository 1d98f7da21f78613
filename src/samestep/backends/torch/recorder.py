"""What a shard computes as a CUDA graph: recorded once per shape, then launched once, instead of hundreds of times.

steps.py records whole steps of training. Here is what both need, and the recording of one shard's evaluation. A graph replays
the same kernels on the same shapes, so the bits are the same as without it. A shard's result may depend only on weights,
buffers, examples and key: a model that looks at anything else while it computes (a counter in Python, a number on the host)
breaks samestep's contract. Some of this can be noticed: a model that reads the device or draws on the host while it computes
is not recorded, but computed operation by operation, and so is one whose recording gives other bits than its operations. A
warning says so. A layer that is known to keep state where no graph can see it is not recorded either (`keeps_state`).
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from samestep.trees import Tree, leaves, mapped

Compute = Callable[[Tree, Tree], Tensor]
SHAPES = 8  # that are recorded for one replica; a graph keeps the memory of its shard
WARM_UP = 3  # computations before recording: libraries set themselves up in the first ones


def keeps_state(model: torch.nn.Module) -> bool:
    """Whether a layer has state in a library that a graph would hold on to after it is gone.

    cuDNN draws the dropout between the layers of an RNN from a state of its own, one for each GPU. When the generator is
    seeded, which is so before every shard, the next call makes a new one, and a graph would still read the old one's memory.
    """
    return any(isinstance(m, torch.nn.RNNBase) and m.dropout > 0 and m.num_layers > 1 for m in model.modules())


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> Iterator[None]:
    """What is computed here is recorded. Afterwards the GPU's generator is as if nothing had been."""
    generator, collecting = torch.cuda.default_generators[device.index or 0], gc.isenabled()
    spare = generator.clone_state()
    gc.disable()  # older recordings must not be freed meanwhile
    torch._C._cuda_clearCublasWorkspaces()  # cuBLAS is to work in memory that this recording keeps
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # which is so if the model fails
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                yield
    finally:
        generator.graphsafe_set_state(spare)  # the old one may still believe that it is being recorded
        torch._C._cuda_clearCublasWorkspaces()
        if collecting:
            gc.enable()


def cause(error: BaseException) -> BaseException:
    """The first error: leaving a recording that has failed raises others."""
    while isinstance(error.__context__, Exception):
        error = error.__context__
    return error


def refused(error: BaseException) -> str:
    """Why something cannot be recorded, in one line. Memory that has run out is another matter."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return "it looks at numbers of the device while it computes" if "captur" in first else first


def warn(what: str, why: str) -> None:
    warnings.warn(f"{what} is not recorded on the GPU, and so slower: {why}", stacklevel=2)


class Recorded:
    """One computation on one shape of input."""

    def __init__(self, compute: Compute, x: Tree, y: Tree, pool: Any) -> None:
        self.x, self.y = mapped(torch.clone, x), mapped(torch.clone, y)
        self.graph = torch.cuda.CUDAGraph()
        with recording(self.graph, pool, next(iter(leaves(x))).device):
            self.out = compute(self.x, self.y)

    def __call__(self, x: Tree, y: Tree) -> Tensor:
        for own, new in zip(leaves((self.x, self.y)), leaves((x, y)), strict=True):
            own.copy_(new)
        self.graph.replay()
        return self.out  # overwritten by the next call


class Recorder:
    """Records a computation when a new shape comes; one that cannot be recorded must be computed without."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self._recorded: dict[Any, Recorded] = {}
        self._pool: Any = None

    def find(self, compute: Compute, x: Tree, y: Tree, seed: Callable[[], None]) -> Recorded | None:
        """The recording for this shape, made and checked if it is a new one; `seed` sets the generator to the shard's key."""
        shape = tuple((one.shape, one.dtype, one.stride()) for one in leaves((x, y)))
        if self.wanted and shape not in self._recorded and len(self._recorded) < SHAPES:
            try:
                self._record(compute, x, y, shape)
                results = []
                for way in (compute, self._recorded[shape]):
                    seed()
                    results.append(way(x, y).clone().view(torch.uint8))
                if not torch.equal(*results):
                    raise Unlike
            except RuntimeError as error:  # PyTorch has no class of its own for this
                self.wanted = False
                self._recorded.clear()
                warn("an evaluation", refused(cause(error)))
        return self._recorded.get(shape)

    def _record(self, compute: Compute, x: Tree, y: Tree, shape: Any) -> None:
        warm_up(lambda: compute(x, y), _side(next(iter(leaves(x))).device))
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._recorded[shape] = Recorded(compute, x, y, self._pool)


@functools.cache
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Unlike(RuntimeError):
    def __init__(self) -> None:
        super().__init__("its bits are not those of its operations: it depends on more than its arguments")


def warm_up(compute: Callable[[], object], side: torch.cuda.Stream) -> None:
    """Compute a few times on a stream apart: libraries set themselves up in the first ones."""
    side.wait_stream(torch.cuda.current_stream())
    drawn = torch.default_generator.get_state()
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            compute()
    torch.cuda.current_stream().wait_stream(side)
    if not torch.equal(drawn, torch.default_generator.get_state()):
        raise RuntimeError("it draws numbers on the host, which a recording would freeze")
