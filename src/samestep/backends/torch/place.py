"""One GPU in recorded steps: what is recorded there, and the memory in which a recording finds what changes from step to step.

Each stream computes neighbouring shards, so it can add them up by itself: memory is needed for as many shards as there are
streams. What one stream has allocated and another one reads is kept until all have come together again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samestep.data.convert import both
from samestep.data.feed import Batch
from samestep.devices import Device
from samestep.shards import Fold, Span, cut
from samestep.trees import Tree, leaves

if TYPE_CHECKING:
    from samestep.training.replicas import Replicas

MOST = 64  # steps in one call
AT_ONCE = 2 << 30  # bytes of gradients that are computed at once, unless `streams` says how many
STREAMS = 8
ALIGNED = 256  # bytes: what begins there is as good as memory of its own
Take = Callable[[int], tuple[Tree, Tree]]  # the examples of a shard
Parts = dict[Span, Tensor]


@functools.cache
def streams(device: Device, count: int) -> list[torch.cuda.Stream]:
    """The same ones for every run: libraries keep memory for each stream."""
    return [torch.cuda.Stream(str(device)) for _ in range(count)]


@dataclass(frozen=True)
class Row:
    """What changes from step to step, on the GPU: the row in the tables, the examples, the rate, the updates made."""

    at: Tensor
    index: Tensor | None
    rate: Tensor
    t: Tensor


class Place:
    """The replicas on one GPU, and the memory in which their recordings find what changes from step to step."""

    def __init__(self, group: Replicas, device: Device) -> None:
        self.group, self.device, self.native = group, device, torch.device(str(device))
        self.indices = [i for i, replica in enumerate(group.replicas) if replica.device == device]
        self.replicas: list[Any] = [group.replicas[i] for i in self.indices]
        first, making = self.replicas[0], group.backend.making
        room = max(1, AT_ONCE // (first.size * first.parameters.element_size()))
        count = min(making.streams or min(room, STREAMS), group.settings.shards)
        with torch.cuda.device(self.native):
            self.aside, *self.streams = streams(device, 1 + max(count, len(self.indices)))
            self.lanes = [replica.lanes(len(self.streams)) for replica in self.replicas]
            self.at = torch.zeros(1, dtype=torch.int64, device=self.native)
            self.t = torch.zeros((), dtype=torch.float64, device=self.native)
            self.starts = torch.zeros(MOST, dtype=torch.int64, device=self.native)
            self.rates = torch.zeros(MOST, dtype=torch.float64, device=self.native)
            self.rows = torch.arange(MOST, device=self.native)
            self.numbers = torch.zeros(MOST, first.numbers, dtype=first.parameters.dtype, device=self.native)
            self.prints = torch.zeros(MOST, dtype=torch.int64, device=self.native)
            self.span = torch.arange(group.settings.batch_size, device=self.native)
        self.order: Tensor | None = None
        self.count = count

    def load(self, batches: Sequence[Batch], rates: Sequence[float], t: int, order: Tensor | None) -> None:
        """Write down what the next steps need."""
        starts = torch.tensor([batch.spans[0][0] for batch in batches], dtype=torch.int64)
        self.starts[: len(batches)].copy_(starts, non_blocking=True)
        self.rates[: len(batches)].copy_(torch.tensor(rates, dtype=torch.float64), non_blocking=True)
        self.t.fill_(t)
        self.at.zero_()
        if order is not None:
            self.order = torch.empty_like(order) if self.order is None else self.order
            self.order.copy_(order)

    # What is recorded

    def rows_of(self, count: int, examples: int, gathers: bool) -> list[Row]:
        """What the tables say of the next steps; the tables go on behind them."""
        at = self.at + self.rows[:count]
        index: Tensor | None = None
        if gathers and self.order is not None:
            places = self.starts.index_select(0, at)[:, None] + self.span[:examples]
            index = self.order.index_select(0, places.flatten()).view(count, examples)
        rates, made = self.rates.index_select(0, at), self.t + at
        self.at.add_(count)
        return [Row(at[i : i + 1], None if index is None else index[i], rates[i], made[i]) for i in range(count)]

    def taking(self, spans: Sequence[Span], index: Tensor, resident: tuple[Tree, Tree]) -> Take:
        """The gathering of examples from data on the GPU: at once, if each shard then begins where memory of its own may."""
        shares = self.group.plan(len(spans)).shares
        mine = [spans[shard] for i in self.indices for shard in shares[i]]
        first, start, stop = spans[0][0], mine[0][0], mine[-1][1]
        sizes = [array[:1].numel() * array.element_size() for array in leaves(resident)]
        together = all((lo - start) * size % ALIGNED == 0 for lo, _ in mine for size in sizes)
        whole = (
            both(lambda array: array.index_select(0, index[start - first : stop - first]), *resident)
            if together
            else None
        )

        def take(shard: int) -> tuple[Tree, Tree]:
            lo, hi = spans[shard]
            if whole is not None:
                return both(lambda array: array[lo - start : hi - start], *whole)
            here = index[lo - first : hi - first]
            return both(lambda array: array.index_select(0, here), *resident)

        return take

    def sums(self, n: int, take: Take, noise: dict[int, torch.Generator]) -> Parts:
        """The parts of the sum over n shards that the replicas here hold. `noise`: of each shard that draws any."""
        shares, main = self.group.plan(n).shares, torch.cuda.current_stream()
        work = [(j, shard) for j, i in enumerate(self.indices) for shard in shares[i]]
        generator, kept = torch.cuda.default_generators[self.native.index or 0], list[Any]()

        def join(left: tuple[Tensor, Any], right: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
            (total, stream), (other, theirs) = left, right
            stream.wait_stream(theirs)
            kept.append(other)
            with torch.cuda.stream(stream):
                return total.add_(other), stream

        together: Fold[tuple[Tensor, Any]] = Fold(n, join)
        shared = cut(len(work), min(self.count, len(work)))
        streams = [main, *self.streams][: len(shared)]
        for stream in streams[1:]:
            stream.wait_stream(main)  # before there is a shard on it
        for s, ((lo, hi), stream) in enumerate(zip(shared, streams, strict=True)):
            own: Fold[Tensor] = Fold(n, lambda left, right: left.add_(right))
            with torch.cuda.stream(stream):
                for j, shard in work[lo:hi]:
                    if noise:
                        generator.graphsafe_set_state(noise[shard])
                    x, y = take(shard)
                    before = own.parts.pop((shard - 1, shard), None) if shard % 2 else None  # the left one of a pair
                    vector = self.replicas[j].drawn(self.lanes[j][s], x, y, shard, before)
                    own.add((shard if before is None else shard - 1, shard + 1), vector)
            for span, vector in own.parts.items():
                together.add(span, (vector, stream))
        for stream in streams[1:]:
            main.wait_stream(stream)
        return {span: vector for span, (vector, _) in together.parts.items()}

    def update(self, total: Tensor, examples: int, row: Row) -> None:
        """The update of the replicas here."""
        main = torch.cuda.current_stream()
        streams = self.streams[: len(self.indices)] if len(self.indices) > 1 else [main]
        for i, stream in zip(self.indices, streams, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                self.group.update(i, total, examples, row.rate, row.t, None)
        for stream in streams:
            main.wait_stream(stream)

    def keep(self, at: Tensor, numbers: Tensor) -> None:
        """Write a step's numbers and fingerprint into the tables."""
        here = self.rows == at
        torch.where(here[:, None], numbers, self.numbers, out=self.numbers)
        torch.where(here, self.replicas[0].fingerprint(), self.prints, out=self.prints)

    def steps(self, rows: Sequence[Row], sums: Callable[[Row], Tensor], examples: int) -> None:
        """Whole steps, with nothing to exchange. A fingerprint is computed beside the shards of the next step."""
        main, kept = torch.cuda.current_stream(), list[Tensor]()
        for i, row in enumerate(rows):
            total = sums(row)
            if i:
                main.wait_stream(self.aside)  # it has read the weights, and the sum before this one
            self.update(total, examples, row)
            self.aside.wait_stream(main)
            with torch.cuda.stream(self.aside):
                self.keep(row.at, self.group.numbers(total))
            kept[:] = [total]  # as another stream reads it
        main.wait_stream(self.aside)
