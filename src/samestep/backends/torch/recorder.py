"""A shard's computation as a CUDA graph: recorded once per shape, then launched once, instead of hundreds of times.

The time of a small model's step goes into launching kernels, and S shards launch S times as many. A graph avoids that. It
replays the same kernels on the same shapes, so the bits are the same as without it. A shard's result may depend only on
weights, buffers, examples and key: a model that looks at anything else while it computes (a counter in Python, a number on
the host) breaks samestep's contract. Some of this can be noticed: a model that reads the device or draws on the host while it
computes is not recorded, but computed operation by operation. So is one whose recording gives other bits than its operations,
with a warning, and one with a layer that is known to keep state where no graph can see it (`keeps_state`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from samestep.trees import Tree, leaves, mapped

Compute = Callable[[Tree, Tree], tuple[Tensor, ...]]
SHAPES = 8  # that are recorded for one replica; a graph keeps the memory of its shard
WARM_UP = 3  # computations before recording: libraries set themselves up in the first ones


def keeps_state(model: torch.nn.Module) -> bool:
    """Whether a layer has state in a library that a graph would hold on to after it is gone.

    cuDNN draws the dropout between the layers of an RNN from a state of its own, one for each GPU. When the generator is
    seeded, which is so before every shard, the next call makes a new one, and a graph would still read the old one's memory.
    """
    return any(isinstance(m, torch.nn.RNNBase) and m.dropout > 0 and m.num_layers > 1 for m in model.modules())


class Recorded:
    """One computation on one shape of input."""

    def __init__(self, compute: Compute, x: Tree, y: Tree, pool: Any) -> None:
        self.x, self.y = mapped(torch.clone, x), mapped(torch.clone, y)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.out = compute(self.x, self.y)

    def __call__(self, x: Tree, y: Tree) -> tuple[Tensor, ...]:
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
            self._record(compute, x, y, shape)
            if shape in self._recorded:
                results = []
                for way in (compute, self._recorded[shape]):
                    seed()
                    results.append([part.clone().view(torch.uint8) for part in way(x, y)])
                if not all(map(torch.equal, *results)):
                    self._give_up("its bits are not those of its operations: it depends on more than its arguments")
        return self._recorded.get(shape)

    def _give_up(self, why: str = "") -> None:
        self.wanted = False
        self._recorded.clear()
        if why:
            warnings.warn(f"a shard's computation is not recorded on the GPU, and so slower: {why}", stacklevel=2)

    def _record(self, compute: Compute, x: Tree, y: Tree, shape: Any) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        drawn = torch.default_generator.get_state()
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                compute(x, y)
        torch.cuda.current_stream().wait_stream(side)
        if not torch.equal(drawn, torch.default_generator.get_state()):
            self.wanted = False  # a number drawn on the host would be frozen
            return
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        spare = generator.clone_state()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # which is so if the model fails
                self._recorded[shape] = Recorded(compute, x, y, self._pool)
        except RuntimeError as error:  # PyTorch has no class of its own for this
            if isinstance(error, torch.OutOfMemoryError):
                raise
            generator.graphsafe_set_state(spare)  # the old one still believes that it is being recorded
            self._give_up("" if "captur" in str(error) else str(error).splitlines()[0])
