"""Whole steps on a GPU as CUDA graphs: recorded once for each shape of a batch, then launched.

A step is two recordings for each GPU. The first gathers the examples of the shards by index, computes the shards on several
streams at once, and adds them along the tree. The second makes the update: clipping, optimizer, state, numbers and
fingerprint. Between the two, replicas on other GPUs and in other processes exchange their parts; where there are none, one
recording holds both, and small models have one of several steps. All that changes from step to step (the place in the order
of examples, the rate, the number of updates made) lies in tables on the GPU, so the host only launches, and nothing waits
for it. Data that is not on the GPU is copied, on a stream of its own, to where the recording reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from samestep.backends.layout import LEAST
from samestep.backends.steps import Made, Steps
from samestep.backends.torch.noise import seed_gpu
from samestep.backends.torch.place import MOST, Parts, Place, Row
from samestep.backends.torch.recorder import SHAPES, Unlike, cause, recording, refused, warm_up, warn
from samestep.data.convert import both
from samestep.data.feed import Batch, Pass
from samestep.devices import Device
from samestep.optimizers.updating import FlatUpdater, is_ours
from samestep.processes.exchange import exchange
from samestep.shards import Fold
from samestep.trees import Tree, leaves

if TYPE_CHECKING:
    from samestep.training.replicas import Replicas

T = TypeVar("T")
UNROLLED = 8  # steps in one recording, where the host has nothing to do between them


@dataclass(frozen=True)
class Held(Batch):
    """A batch whose examples are in memory that a recording reads."""

    held: dict[tuple[int, Device], tuple[Tree, Tree]]

    def shard(self, shard: int, device: Device) -> tuple[Any, Any]:
        """In memory of its own, as everywhere: how it is aligned may decide which kernel computes."""
        return both(torch.clone, *self.held[shard, device])


class Recording:
    """The steps over batches of one shape, on all GPUs of this process."""

    def __init__(self, steps: TorchSteps, batch: Batch) -> None:
        self.steps, self.n, self.examples, self.group = steps, len(batch.spans), batch.examples, steps.group
        self.spans = batch.spans  # their sizes; where they begin is in a table
        # The examples of a batch that is copied to the GPU, in memory that the recording reads.
        self.held = (
            {place: both(torch.clone, *xy) for place, xy in batch.held.items()} if isinstance(batch, Held) else {}
        )
        self.noise: list[dict[int, torch.Generator]] = [{} for _ in steps.places]
        self.graphs: list[tuple[Any, Parts]] = []
        self.updates: list[Any] = []
        self.whole: dict[int, Any] = {}  # with one GPU: so many steps, sums and updates

    def record(self, batch: Batch) -> None:
        """Record the parts of the sum, which are then there for this batch."""
        for place, noise in zip(self.steps.places, self.noise, strict=True):
            with torch.cuda.device(place.native):
                self._record(place, noise, batch)

    def _parts(self, place: Place, noise: dict[int, torch.Generator], row: Row) -> Parts:
        """The parts of the sum that one place holds, computed from where the recording finds the examples."""
        if self.held or row.index is None:
            return place.sums(self.n, lambda shard: self.held[shard, place.device], noise)
        return place.sums(self.n, place.taking(self.spans, row.index, self.steps.feed.resident[place.device]), noise)

    def _rows(self, place: Place, count: int = 1) -> list[Row]:
        return place.rows_of(count, self.examples, gathers=not self.held)

    def _recorded(self, place: Place, noise: dict[int, torch.Generator], compute: Callable[[], T]) -> tuple[Any, T]:
        """The graph of a computation, and what it gave."""
        graph = torch.cuda.CUDAGraph()
        for own in noise.values():
            graph.register_generator_state(own)
        with torch.cuda.device(place.native), recording(graph, self.steps.pool, place.native):
            return graph, compute()

    def _record(self, place: Place, noise: dict[int, torch.Generator], batch: Batch) -> None:
        backend, n = self.group.backend, self.n
        expected: Fold[Tensor] = Fold(n, backend.add)
        mine = [(j, shard) for j, i in enumerate(place.indices) for shard in self.group.plan(n).shares[i]]
        for j, shard in mine:
            expected.add((shard, shard + 1), place.replicas[j].single(batch, shard))
        if not mine:
            return self.graphs.append((None, {}))
        generator = torch.cuda.default_generators[place.native.index or 0]
        seed_gpu(0, place.native)
        (row,) = self._rows(place)
        warm_up(partial(self._parts, place, noise, row), place.aside)
        if generator.get_offset():  # numbers were drawn: each shard has a generator, whose seed is set before a launch
            noise |= {shard: generator.clone_state() for _, shard in mine}
        place.at.sub_(1)

        def compute() -> Parts:
            (row,) = self._rows(place)
            place.at.sub_(1)  # the update has this row, too
            return self._parts(place, noise, row)

        graph, parts = self._recorded(place, noise, compute)
        self.graphs.append((graph, parts))
        self._seed(noise, batch)
        graph.replay()
        for span, part in expected.parts.items():
            if not torch.equal(parts[span].view(torch.uint8), part.view(torch.uint8)):
                raise Unlike

    def record_update(self) -> None:
        """Record the updates; the first one was made operation by operation, so that all is set up."""
        if self.steps.alone:
            self.graphs.clear()  # they have shown that the sums are right, and `whole` has them too
            self.steps.renew_pool()
            return self.record_whole(1)
        for place in self.steps.places:

            def update(place: Place = place, total: Tensor = self.steps.totals[place.device]) -> None:
                place.steps(self._rows(place), lambda row: total, self.examples)

            self.updates.append(self._recorded(place, {}, update)[0])

    def record_whole(self, count: int) -> None:
        """Record so many steps as one, if there is but one GPU: then nothing is exchanged."""
        (place,), (noise,) = self.steps.places, self.noise

        def compute() -> None:
            place.steps(self._rows(place, count), lambda row: self._parts(place, noise, row)[0, self.n], self.examples)

        self.whole[count], _ = self._recorded(place, noise, compute)

    @property
    def several(self) -> bool:
        """Whether it pays to record several steps as one: launching counts, and the host has nothing to do between them."""
        small = self.group.replicas[0].size < LEAST
        return small and bool(self.whole) and not self.held and not any(self.noise)

    def _seed(self, noise: dict[int, torch.Generator], batch: Batch) -> None:
        for shard, own in noise.items():
            own.manual_seed(batch.keys[shard])

    def replay(self, batch: Batch) -> None:
        """Compute the parts of the sum over the shards of a batch, unless `whole` does."""
        if isinstance(batch, Held):
            torch._foreach_copy_(leaves(list(self.held.values())), leaves(list(batch.held.values())))
        for noise in self.noise:
            self._seed(noise, batch)
        for place, (graph, parts) in zip(self.steps.places, self.graphs, strict=bool(self.graphs)):
            if parts:
                with torch.cuda.device(place.native):
                    graph.replay()

    def totals(self) -> list[Tensor]:
        """The sum over all shards, on every GPU here."""
        steps, group, parts = self.steps, self.group, [parts for _, parts in self.graphs]
        if steps.alone:
            return [parts[0][0, self.n]]
        if group.world.size == 1:
            return exchange(
                group.backend, parts, self.n, [place.device for place in steps.places], group.replicas[0].size
            )
        mine = {span: part for own in parts for span, part in own.items()}
        held, size = group.plan(self.n).held, group.replicas[0].size
        total = group.sender.submit(group.across.sum, mine, held, self.n, 0, size).result()
        return [group.across.put(total, place.device) for place in steps.places]


class TorchSteps(Steps):
    """Makes the steps of a group by launching what was recorded; what cannot be recorded is made operation by operation."""

    def __init__(self, group: Replicas) -> None:
        self.group = group
        self.places = [Place(group, device) for device in dict.fromkeys(r.device for r in group.replicas)]
        self.alone = group.world.size == 1 and len(self.places) == 1
        updater = group.updaters[0]
        self.updates = isinstance(updater, FlatUpdater) and is_ours(updater.optimizer)
        self.pool, self.recordings = torch.cuda.graph_pool_handle(), dict[Any, Recording | None]()
        self.totals: dict[Device, Tensor] = {}  # where updates find the sum, if there are several GPUs or processes
        self.wanted = True
        self.feed: Any = None  # of the fit's examples, if they are on the GPU
        self._pass: Pass | None = None  # whose order the places have
        if self.places[0].replicas[0].keeps_state:
            self._give_up("cuDNN draws the dropout between the layers of an RNN from a state that no recording sees")

    @staticmethod
    def of(group: Replicas) -> TorchSteps | None:
        """On GPUs; but not where several processes exchange a large gradient while it is computed."""
        first = group.replicas[0]
        here = first.device.kind == "cuda" and (group.world.size == 1 or len(first.bands) == 1)
        return TorchSteps(group) if here else None

    def most(self, pass_: Pass) -> int:
        return 0 if not self.wanted else 1 if pass_.feed.here else MOST

    def __call__(self, batches: Sequence[Batch], rates: Sequence[float], t: int) -> list[Made]:
        first, pass_, n = self.places[0], batches[0].pass_, len(batches)
        resident = self._is_resident(batches[0])
        for place in self.places:
            order = pass_.order_on[place.device] if resident and self._pass is not pass_ else None
            place.load(batches, rates, t, order)
        self._pass = pass_
        keys = [self._key(batch) for batch in batches] if resident else []
        i = 0
        while i < n:
            batch, lr = batches[i] if resident else self._held(batches[i]), rates[i]
            row: Tensor | None
            made = self.recordings.get(key := keys[i] if resident else self._key(batch))
            if made and made.several and n - i >= UNROLLED and keys[i : i + UNROLLED] == [key] * UNROLLED:
                if UNROLLED in made.whole or self._tried(partial(made.record_whole, UNROLLED)):
                    made.whole[UNROLLED].replay()
                    i += UNROLLED
                continue
            if made is None and key not in self.recordings and self.wanted and len(self.recordings) < SHAPES:
                row = self._first(batch, lr, t + i, key)
            elif made is None:
                row = self.group.step(batch, lr, t + i)
            else:
                made.replay(batch)
                row = self._finish(made, lr, t + i)
            if row is not None:
                first.keep(first.at.fill_(i), row)
                for place in self.places:
                    place.at.fill_(i + 1)
            i += 1
        return [(first.numbers[:n].flatten().clone(), first.prints[:n].clone())]

    def _is_resident(self, batch: Batch) -> bool:
        """Whether the examples are on the GPU for a whole fit. A batch of a loop of one's own is there for one step."""
        feed = batch.pass_.feed
        if feed.resident and self.feed is None and len(feed.examples) > batch.examples:
            self.feed = feed
        return feed is self.feed

    def _held(self, batch: Batch) -> Held:
        """A batch with the examples of the shards that are computed here."""
        spans, held = batch.spans, dict[tuple[int, Device], tuple[Tree, Tree]]()
        shares = [(share, self.group.replicas[i].device) for i, share in enumerate(self.group.plan(len(spans)).shares)]
        for share, device in shares:
            if share and batch.pass_.joined:
                first, last = spans[share[0]][0], spans[share[-1]][1]
                x, y = batch.pass_.block((first, last), device)
                for shard in share:
                    here = slice(spans[shard][0] - first, spans[shard][1] - first)
                    held[shard, device] = both(lambda array, here=here: array[here], x, y)
            else:
                held |= {(shard, device): batch.shard(shard, device) for shard in share}
        return Held(batch.pass_, spans, batch.keys, held)

    def _key(self, batch: Batch) -> Any:
        """What decides which recording fits a batch."""
        sizes = tuple(hi - lo for lo, hi in batch.spans)
        if not isinstance(batch, Held):
            return sizes
        return sizes, tuple((one.shape, one.dtype) for xy in batch.held.values() for one in leaves(xy))

    def _first(self, batch: Batch, lr: float, t: int, key: Any) -> Tensor:
        """A step over a batch of a new shape: recorded on the way. Returns its numbers."""
        self.recordings[key] = None
        made = Recording(self, batch)
        try:
            made.record(batch)
        except RuntimeError as error:  # PyTorch has no class of its own for this
            if isinstance(why := cause(error), torch.OutOfMemoryError) and any(
                place.count > 1 for place in self.places
            ):
                self.recordings.clear()
                self.renew_pool()
                for place in self.places:
                    place.count = max(1, place.count // 2)  # and try again in the next step
            else:
                self._give_up(refused(why))
            return self.group.step(batch, lr, t)
        row = self._updated(made, lr, t)
        self.recordings[key] = made
        for place in self.places if self.updates else ():
            place.replicas[0].fingerprint()  # its tables come to the GPU
        if self.updates:
            self._tried(made.record_update)
        return row

    def _tried(self, record: Callable[[], None]) -> bool:
        """Record something; whether that went well."""
        try:
            record()
        except RuntimeError as error:
            self._give_up(refused(cause(error)))
        return self.wanted

    def _updated(self, made: Recording, lr: float, t: int) -> Tensor:
        """Make the update operation by operation, once the parts are there."""
        totals = dict(zip((place.device for place in self.places), made.totals(), strict=True))
        if not self.alone and self.updates:
            self.totals = self.totals or {device: total.clone() for device, total in totals.items()}
        given = [totals[replica.device] for replica in self.group.replicas]
        return self.group.updated(given, made.examples, lr, t)

    def _finish(self, made: Recording, lr: float, t: int) -> Tensor | None:
        """Exchange the parts if need be, and make the update. Returns the numbers, unless they are in the tables."""
        if made.whole:
            made.whole[1].replay()
            return None
        if not self.updates:
            return self._updated(made, lr, t)
        for place, total in zip(self.places, made.totals(), strict=True):
            if not self.alone:
                self.totals[place.device].copy_(total)
        for place, graph in zip(self.places, made.updates, strict=True):
            with torch.cuda.device(place.native):
                graph.replay()
        return None

    def renew_pool(self) -> None:
        """PyTorch refuses memory whose last graph is gone."""
        if not any(made and (made.graphs or made.whole) for made in self.recordings.values()):
            self.pool = torch.cuda.graph_pool_handle()

    def release(self) -> None:
        self.recordings.clear()

    def _give_up(self, why: str) -> None:
        self.wanted = False
        self.recordings.clear()
        warn("a step", why)
