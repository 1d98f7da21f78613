"""The sum over all shards: `exchange` between the devices of a process, `Across` between processes.

Both work alike. Device (or process) i sums slice i of the vector, along the tree; then all gather the slices. So the result
does not depend on their number, none of them is a bottleneck, and no more bytes move than in a ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from samestep.backends.base import Backend, Vector
from samestep.devices import Device
from samestep.processes.world import Works, World
from samestep.shards import Fold, Span, cut

CHUNK = 1 << 20  # numbers of a slice that are sent at once: while some are added, others travel
AHEAD = 4  # chunks on their way at once


def exchange(
    backend: Backend, parts: Sequence[dict[Span, Vector]], n: int, devices: Sequence[Device], size: int
) -> list[Vector]:
    """From the parts that each device holds, the sum over all n shards on every device."""
    if len(devices) == 1:
        return [parts[0][0, n]]
    slices = cut(size, len(devices))

    def own(lo: int, hi: int, device: Device) -> Vector:
        fold: Fold[Vector] = Fold(n, lambda left, right: left + right)
        for held in parts:
            for span, vector in held.items():
                fold.add(span, backend.put(vector[lo:hi], device))
        return fold.total()

    def gather(device: Device) -> Vector:
        return backend.concat([backend.put(piece, device) for piece in summed])

    summed = backend.map([partial(own, lo, hi, device) for (lo, hi), device in zip(slices, devices, strict=True)])
    return backend.map([partial(gather, device) for device in devices])


@dataclass(frozen=True)
class OnHost:
    """The framework's arithmetic on NumPy's vectors: NumPy's own may differ in numbers too small to be normal."""

    backend: Backend
    device: Device

    def add(self, left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        backend, device = self.backend, self.device
        total = backend.get(backend.add(backend.put(left, device), backend.put(right, device)))
        return left if total is left else self.assign(left, total)

    def assign(self, array: np.ndarray[Any, Any], value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        array[...] = value
        return array

    def put(self, vector: np.ndarray[Any, Any], device: Device) -> Vector:
        return self.backend.copy(vector, device)  # JAX would go on using this memory, which the next step fills anew


class Across:
    """The sum over all processes. It is made once for a group, and keeps its memory from step to step."""

    def __init__(self, world: World, backend: Backend, device: Device, parameters: Vector, size: int) -> None:
        self.world, self.total = world, world.empty(size, parameters)
        on_host = isinstance(self.total, np.ndarray)
        self._arithmetic: Any = OnHost(backend, device) if on_host else backend
        self._received: dict[int, Vector] = {}  # memory for parts: the system gives out none without clearing it
        # Each process begins with another one, so that not all send to the same.
        self._others = [(world.rank + i) % world.size for i in range(1, world.size)]

    def put(self, vector: Vector, device: Device) -> Vector:
        """What `sum` returned, on a device."""
        return self._arithmetic.put(vector, device)

    def sum(self, parts: dict[Span, Vector], held: Sequence[Sequence[Span]], n: int, lo: int, hi: int) -> Vector:
        """From the parts that this process holds of numbers [lo, hi), and those of the others, their sum over n shards.

        held[q] says which parts process q holds, once it has added what it can. The vector that is returned has all numbers
        of the group's vector; those that were not yet summed in this step are not to be used.
        """
        mine: Fold[Vector] = Fold(n, self._arithmetic.add)
        for span, vector in parts.items():
            mine.add(span, self.world.bring(vector))
        own = dict(sorted(mine.parts.items()))
        # The sum replaces the first part, in its memory.
        total = next(iter(own.values())) if own else self.total[lo:hi]
        self._exchange(own, held, n, total)
        if hi - lo == len(self.total):
            return total
        if own:
            self._arithmetic.assign(self.total[lo:hi], total)
        return self.total

    def _exchange(self, parts: dict[Span, Vector], held: Sequence[Sequence[Span]], n: int, total: Vector) -> None:
        """Chunk after chunk, with AHEAD of them on their way. Each goes through the three stages of `chunk`."""
        world, others = self.world, self._others
        leaving: Works = []  # waited for in the end: a sum that comes back shows that the parts for it have arrived

        def chunk(i: int) -> Iterator[None]:
            # Process q sums slices[q]. Send it the parts of its slice, receive those of ours, and expect the others' sums.
            first = i * CHUNK * world.size
            size = min(CHUNK * world.size, len(total) - first)
            slices = [slice(first + lo, first + hi) for lo, hi in cut(size, world.size)]
            mine, filled = slices[world.rank], [q for q in others if len(total[slices[q]])]
            own = total[mine]
            spans = [(q, span) for q in others for span in held[q] if len(own)]
            memory = self._received.get(i % AHEAD)
            if memory is None or len(memory) < len(own) * len(spans):
                memory = self._received[i % AHEAD] = world.empty(len(own) * len(spans), self.total)
            incoming = [(*pair, memory[j * len(own) : (j + 1) * len(own)]) for j, pair in enumerate(spans)]
            outgoing = [(q, part[slices[q]]) for q in filled for part in parts.values()]
            sent, arriving = world.swap(outgoing, [(q, part) for q, _, part in incoming])
            leaving.extend(sent)
            # The sums will lie where the parts that now leave still are: nobody has a sum before it has all the parts.
            sums = world.expect([(q, total[slices[q]]) for q in filled])
            yield
            # Sum our slice along the tree, and send the sum to all.
            world.wait(arriving)
            if len(own):
                fold: Fold[Vector] = Fold(n, partial(self._add, own))
                for j, (span, part) in enumerate(parts.items()):
                    fold.add(span, part[mine] if j else own)
                for _, span, part in incoming:
                    fold.add(span, part)
                if fold.total() is not own:
                    self._arithmetic.assign(own, fold.total())
            sent, arriving = world.swap([(q, own) for q in others if len(own)], sums)
            leaving.extend(sent)
            yield
            world.wait(arriving)

        chunks = [chunk(i) for i in range(-(-len(total) // (CHUNK * world.size)))]
        for i in range(len(chunks) + 2 * AHEAD):
            for j in (i - AHEAD, i, i - 2 * AHEAD):  # the memory of chunk i - AHEAD is free for chunk i after its sum
                if 0 <= j < len(chunks):
                    next(chunks[j], None)
        world.wait(leaving)

    def _add(self, own: Vector, left: Vector, right: Vector) -> Vector:
        # a + b = b + a to the bit, so the sum can grow where it will be needed
        return self._arithmetic.add(right, left) if right is own else self._arithmetic.add(left, right)
