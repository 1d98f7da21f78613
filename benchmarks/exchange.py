"""The exchange between processes of one host against torch.distributed.all_reduce with gloo: same processes, same vectors.

    python benchmarks/exchange.py [--processes 2,4] [--megabytes 1,10,100]

all_reduce adds in an order of its own, which depends on the number of processes, and sends by TCP; ours adds along the tree,
and its vectors go through memory that the processes share, or by TCP with gloo as well where SAMESTEP_TRANSPORT=gloo. Each
holds one part of eight shards. Rounds alternate; the figure is the median over the rounds of the slowest process. Bytes are
those of the vectors that a process hands to another, whichever way they go.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
import torch.distributed as dist
from machine import keep

from samestep import shards
from samestep.backends.torch import backend as backends
from samestep.devices import cpu
from samestep.processes import exchange
from samestep.processes import place as processes
from samestep.processes.torch import TorchWorld

SHARDS = 8


class Counting:
    """The world, with the bytes that this process hands to others counted: all of them go by `swap`."""

    def __init__(self, world: TorchWorld) -> None:
        self.world, self.bytes = world, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.world, name)

    def swap(self, sends: list, receives: object) -> object:
        self.bytes += sum(vector.numel() * vector.element_size() for _, vector in sends)
        return self.world.swap(sends, receives)


def measure(megabytes: list[float]) -> None:
    torch.set_num_threads(1)
    world = Counting(TorchWorld(processes.find(), 60.0))
    world.prepare([cpu()], 60.0)
    k, rank = world.size, world.rank
    held = [shards.parts(lo, hi, SHARDS) for lo, hi in shards.cut(SHARDS, k)]
    rows = []
    for size in megabytes:
        n = int(size * 1e6 / 4)
        vector, memory, rooms = torch.randn(n), torch.empty(n), dict[int, torch.Tensor]()
        times: dict[str, list[float]] = {"all_reduce": [], "ours": []}
        for _ in range(max(31, int(300 / size))):
            for name in times:
                vector.normal_()
                world.collect(b"")
                began = time.perf_counter()
                if name == "ours":
                    world.bytes = 0
                    parts = {held[rank][0]: vector}
                    exchange.across(world, backends.backend, parts, [h[:1] for h in held], SHARDS, memory, rooms)
                else:
                    dist.all_reduce(vector)
                mine = time.perf_counter() - began
                slowest = max(float(text) for text in world.collect(repr(mine).encode()))
                times[name].append(slowest)
        ours, theirs = (1e3 * statistics.median(times[name][2:]) for name in ("ours", "all_reduce"))
        rows.append({"processes": k, "megabytes": size, "ours": ours, "all_reduce": theirs, "ratio": ours / theirs,
                     "bytes": world.bytes / (4 * n), "ring": 2 * (k - 1) / k})  # fmt: skip
        if rank == 0:
            print(rows[-1], file=sys.stderr, flush=True)
    if rank == 0:
        keep(f"exchange-{k}", rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", default="2,4")
    parser.add_argument("--megabytes", default="1,3,10,30,100")
    options = parser.parse_args()
    if processes.find().size > 1:
        measure([float(size) for size in options.megabytes.split(",")])
        return
    for k in map(int, options.processes.split(",")):
        if processes.launch([sys.executable, __file__, "--megabytes", options.megabytes], k):
            sys.exit(1)


if __name__ == "__main__":
    main()
