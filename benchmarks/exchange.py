"""The exchange between processes of one host against torch.distributed.all_reduce with gloo: same processes, same vectors.

    python benchmarks/exchange.py [--processes 2,4] [--megabytes 1,3,10,30,100]

all_reduce adds in an order of its own, which depends on the number of processes, and sends by TCP. Ours adds along the tree,
and its vectors are moved by MPI. Both have one core for each process, if there are so many, and each process holds one part
of eight shards. Rounds alternate; the figure is the median over the rounds of the slowest process. Bytes are those of the
vectors that a process sends to others.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from machine import keep, version

from samestep import shards
from samestep.backends.torch.backend import backend
from samestep.devices import cpu
from samestep.processes import exchange
from samestep.processes.launch import launch
from samestep.processes.mpi import MpiWorld, join
from samestep.processes.place import find

SHARDS = 8


def measure(megabytes: list[float]) -> None:
    torch.set_num_threads(1)
    place = find()
    dist.init_process_group("gloo", init_method=place.meet, rank=place.rank, world_size=place.size)
    world, sent = join(backend.get, place, 60.0), 0
    assert isinstance(world, MpiWorld)
    send = world.send

    def counting(kind: str, rank: int, memory: object, tag: int) -> object:
        nonlocal sent
        sent += memory.nbytes if kind == "vectors" else 0
        return send(kind, rank, memory, tag)

    world.send = counting
    k, rank = world.size, world.rank
    held = [shards.parts(lo, hi, SHARDS)[:1] for lo, hi in shards.cut(SHARDS, k)]
    rows = []
    for size in megabytes:
        n = int(size * 1e6 / 4)
        vector = torch.randn(n)
        across = exchange.Across(world, backend, cpu(), vector, n)
        times: dict[str, list[float]] = {"all_reduce": [], "ours": []}
        for _ in range(max(31, int(300 / size))):
            for name in times:
                vector.normal_()
                world.collect(b"")
                began = time.perf_counter()
                if name == "ours":
                    sent = 0
                    across.sum({held[rank][0]: vector}, held, SHARDS, 0, n)
                else:
                    dist.all_reduce(vector)
                mine = time.perf_counter() - began
                times[name].append(max(float(text) for text in world.collect(repr(mine).encode())))
        ours, theirs = (1e3 * statistics.median(times[name][2:]) for name in ("ours", "all_reduce"))
        rows.append({"processes": k, "megabytes": size, "ours": ours, "all_reduce": theirs, "ratio": ours / theirs,
                     "bytes": sent / (4 * n), "ring": 2 * (k - 1) / k})  # fmt: skip
        if rank == 0:
            print(rows[-1], file=sys.stderr, flush=True)
    if rank == 0:
        keep(f"exchange-{k}", rows, mpi=f"mpi4py {version('mpi4py')}, mpich {version('mpich')}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", default="2,4")
    parser.add_argument("--megabytes", default="1,3,10,30,100")
    options = parser.parse_args()
    if find().size > 1:
        measure([float(size) for size in options.megabytes.split(",")])
        return
    for k in map(int, options.processes.split(",")):
        if launch([sys.executable, str(Path(__file__)), "--megabytes", options.megabytes], k, "mpi"):
            sys.exit(1)


if __name__ == "__main__":
    main()
