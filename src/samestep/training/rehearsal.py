"""Before its first update a run computes its first batch twice, and later, about once an epoch, one shard twice.

samestep can promise equal bits if a shard's result depends on nothing but weights, state, examples and key. Nobody can see that
in a model's code. So the run tries it: in another order, on other devices and threads, with examples that are read anew, and
once with another shard computed between a forward pass and its loss. Whatever differs is named, and the fit stops. Nothing
that is computed here is used for training.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from samestep import draws
from samestep.backends.losses import not_trained
from samestep.backends.noise import Noise
from samestep.backends.times import timed_as
from samestep.checks import MOST
from samestep.data.feed import Batch
from samestep.errors import Invalid, NotRepeatable, SamestepError, Written, told
from samestep.fingerprint import hashed
from samestep.runs.checkpoint import Cadence
from samestep.shards import cut
from samestep.trees import leaves

if TYPE_CHECKING:
    from samestep.backends.base import Backend, Replica
    from samestep.devices import Device
    from samestep.training.fit import Fit

Hashes = dict[str, str]  # of what a shard took and gave, by name; causes come before what follows from them
AUTO, COST = "auto", 0.01  # once an epoch, or so rarely that in a long fit no larger share of shards is computed for it
RESULT = "its result"
READ = (
    "a source must give the same example for an index each time: does it draw, or share a file position or a cache? What is "
    "random belongs into Data(transform=f), where f(x, y, rng) draws from rng alone"
)
COMPUTED = (
    "only weights, state, examples and key may decide it: does the model or the loss use Python's or NumPy's random numbers, a "
    "generator of its own, a counter, a global or a cache? If not, a device computes wrongly"
)


@dataclass(frozen=True)
class Watched(Batch):
    """A batch that keeps the examples that it gives, and hashes them when it is asked to."""

    seen: dict[int, list[Any]] = field(default_factory=dict)  # the arrays of a shard

    def shard(self, shard: int, device: Device) -> tuple[Any, Any]:
        x, y = super().shard(shard, device)
        self.seen[shard] = leaves(x) if y is x else leaves((x, y))
        return x, y

    def hashes(self) -> Hashes:
        """A checksum of every example; 32 bits are enough to see a difference, and quick."""
        found, feed = Hashes(), self.pass_.feed
        for shard, arrays in self.seen.items():
            sums = np.zeros(len(arrays[0]), np.int64).tolist()
            for array in map(feed.backend.get, arrays):
                rows = np.ascontiguousarray(array).reshape(len(array), array[0].size).view(np.uint8)
                sums = [crc32(row.data, before) for row, before in zip(rows, sums, strict=True)]
            indices = self.pass_.order[slice(*self.spans[shard])].tolist()
            found |= {
                f"example {index} of {feed.examples.name}": f"{one:x}" for index, one in zip(indices, sums, strict=True)
            }
        return found


class Between:
    """Makes one shard wait between its forward pass and its loss, until another one has been computed as a whole."""

    def __init__(self, backend: Backend, one: Callable[[], Hashes], other: Callable[[], Hashes]) -> None:
        self.backend, self.one, self.other = backend, one, other
        self._thread, self._done = 0, list[Future[Hashes]]()

    def __call__(self) -> None:
        alone = Noise.generator.taken  # then nothing else is computed at this moment of a run, either
        if threading.get_ident() == self._thread and not self._done and not alone:
            self._done.append(self.backend.workers.beside(self.other))
            Noise.generator.wait(self._done[0])

    def compute(self) -> list[Hashes]:
        self._thread = threading.get_ident()
        return [self.one(), self._done[0].result() if self._done else self.other()]


class Rehearsal:
    def __init__(self, fit: Fit) -> None:
        self.fit, self.group, settings = fit, fit.group, fit.settings
        self._wanted = settings.rehearse and settings.deterministic
        every, steps = settings.check_every if settings.deterministic else None, len(fit.batches)
        if every == AUTO:
            every = max(steps, math.ceil(2 / settings.shards / COST))
        self._every = Cadence(every, steps).every  # in each window of so many steps, one is checked; 0: none
        self._moves = False  # whether a trained weight has a gradient
        self._unsettled: Callable[[], None] = lambda: None
        self._chosen = -1, 0  # the step to be checked in the window that goes on, and a number that chooses the shard

    @timed_as("checks")
    def __call__(self, step: int, batch: Batch) -> None:
        """Before a step: check what is to be checked now."""
        if self._wanted:
            self._wanted = False
            self.batch(step, batch)
        if self._every and self._is_chosen(step):
            self.shard(step, batch)

    def left(self, step: int) -> int:
        """How many steps may be made, from this one on, before the next one that may have to be checked."""
        if not self._every:
            return MOST
        chosen = self._chosen[0] - step
        return chosen if chosen > 0 else self._every - step % self._every

    def batch(self, step: int, batch: Batch) -> None:
        """Compute a batch twice, and compare."""
        replicas, shares = self.group.replicas, self.group.plan(len(batch.spans)).shares
        work = [(i, shard) for i, share in enumerate(shares) for shard in share]
        turned = [((i + 1) % len(replicas), shard) for i, shard in reversed(work)]
        before = [{name: hashed(tensor) for name, tensor in replica.tensors().items()} for replica in replicas]
        first = self._first(batch, work)
        for replica, held in zip(replicas, before, strict=True):
            for name, tensor in replica.tensors().items():
                if hashed(tensor) != held[name]:
                    trained = name in replica.layouts[0].names
                    raise Written(repr(name), "only the optimizer may" if trained else f"use Trainer(state={name!r})")
        if not any(self.group.world.collect(b"x" * self._moves)):
            raise Invalid(
                "no trained weight gets a gradient: the fit trains a copy of the model, and the loss does not depend on the "
                "copy's weights; does the model call itself through a closure (m.forward = lambda x: m.layer(x))?"
            )
        for place in work[:1]:
            self._look_inside(batch, *place)
        try:
            again = self._computed(batch, turned, crossed=True)
        except SamestepError:
            raise
        except Exception as error:
            what = f"the first batch could be computed once, but not again ({told(error)})"
            raise NotRepeatable(f"{what}; {COMPUTED}") from None
        for (i, shard), (j, _), one, other in zip(work, reversed(turned), first, reversed(again), strict=True):
            when = f"before step {step}, on {replicas[i].device} and on {replicas[j].device}"
            self._compare(one, other, batch, shard, (i, j), when)

    def _first(self, batch: Batch, work: Sequence[tuple[int, int]]) -> list[Hashes]:
        """What the batch gives. An error that only comes side by side has another cause than the code it comes from."""
        try:
            return self._computed(batch, work)
        except SamestepError:
            raise
        except Exception as error:
            said = told(error)
        for place in work:
            self._computed(batch, [place])
        raise NotRepeatable(f"the first batch could be computed in turn, but not side by side ({said}); {COMPUTED}")

    def shard(self, step: int, batch: Batch) -> None:
        """Compute a shard twice, on two devices if there are two, and compare."""
        group, shard = self.group, self._chosen[1] % len(batch.spans)
        owner = next(i for i, (lo, hi) in enumerate(cut(len(batch.spans), group.size)) if lo <= shard < hi)
        places, (lo, hi) = [owner, (owner + 1) % group.size], group.processes[group.world.rank]
        here = [i - lo for i in places if lo <= i < hi]
        on, and_on = [self.fit.result.devices[i] for i in places]
        when = f"at step {step}, on {on} and on {and_on}"
        if group.world.size == 1 and group.most(batch.pass_) > 1 and not group.backend.workers.there:
            # The device need not wait for what the host compares. The examples are looked at if something differs.
            launched = [self._launch(group.replicas[i], shard, self._watched(batch, shard)) for i in here]

            def settle() -> None:
                one, other = (hashes(examples=False) for hashes in launched)
                if one != other:
                    self._compare(launched[0](), launched[1](), batch, shard, here, when)

            self._unsettled = settle
            return
        # The first as it is in a step: a recording that has gone stale is not like the operations.
        mine = self._computed(batch, [(i, shard) for i in here], replayed=lo <= owner < hi)
        one, other = [row for text in group.world.collect(json.dumps(mine).encode()) for row in json.loads(text)]
        self._compare(one, other, batch, shard, here, when)

    @timed_as("checks")
    def settle(self) -> None:
        """Compare what was computed twice and not yet compared; called where the fit waits for the device anyway."""
        unsettled, self._unsettled = self._unsettled, lambda: None
        unsettled()

    def _is_chosen(self, step: int) -> bool:
        start = step - step % self._every
        if self._chosen[0] < start:
            steps = min(self._every, self.fit.last - start)
            chosen, number = draws.check(self.fit.settings.seed, start // self._every, steps)
            self._chosen = start + chosen, number
        return step == self._chosen[0]

    def _computed(
        self, batch: Batch, work: Sequence[tuple[int, int]], crossed: bool = False, replayed: bool = False
    ) -> list[Hashes]:
        """What these shards give; crossed: the second between the forward pass and the loss of the first; replayed: the
        first as it is in a step.
        """
        backend, replicas = self.fit.backend, self.group.replicas
        tasks = [partial(self._compute, replicas[i], shard, self._watched(batch, shard), replayed and not k)
                 for k, (i, shard) in enumerate(work)]  # fmt: skip
        if not (crossed and len(work) > 1 and replicas[0].side_by_side):
            return backend.map(tasks)
        backend.before_loss = between = Between(backend, *tasks[:2])
        try:
            both, *others = backend.map([between.compute, *tasks[2:]])
        finally:
            del backend.before_loss
        return [*both, *others]

    def _look_inside(self, batch: Batch, i: int, shard: int) -> None:
        """What cannot be seen in results: other examples for other readers, untrained parameters, constants of Python's."""
        replica, span, backend = self.group.replicas[i], batch.spans[shard], self.fit.backend
        x, y = batch.pass_.again(span).shard(span, replica.device)
        train, indices = self.fit.data.train, batch.pass_.order[slice(*span)]
        read = batch.pass_.feed.checked(*batch.pass_.read(span))
        for ours, theirs in zip(leaves(read), leaves((x, y)), strict=True):
            for index, one, other in zip(indices, ours, backend.get(theirs), strict=True):
                if not np.array_equal(one, other, equal_nan=ours.dtype.kind == "f"):
                    raise NotRepeatable(f"example {index} of {train.name} is not the same for another thread; {READ}")
        ((strangers, traces),) = backend.map([partial(replica.inside, x, y)])
        for name in strangers:
            raise not_trained(name)
        if len(set(traces)) > 1:
            raise NotRepeatable(f"the model or the loss is another program when it is traced again; {COMPUTED}")

    @timed_as("compute")
    def _compute(self, replica: Replica, shard: int, batch: Watched, replayed: bool = False) -> Hashes:
        return self._launch(replica, shard, batch, replayed)()

    def _launch(self, replica: Replica, shard: int, batch: Watched, replayed: bool = False) -> Callable[..., Hashes]:
        """Compute a shard; returns what gives the hashes, of its examples too if wanted, and may wait for the device."""
        get, vector = replica.backend.get, (replica.replayed if replayed else replica.single)(batch, shard)
        if not self._moves:  # a shard of weight zero cannot tell
            zero = self.group.weighted and not get(vector)[-replica.measure.more]
            self._moves = zero or bool(get(vector)[: replica.layouts[0].size].any())
        digest = replica.digest(vector)
        return lambda examples=True: {**(batch.hashes() if examples else {}), RESULT: hashed(get(digest))}

    def _watched(self, batch: Batch, shard: int) -> Watched:
        return Watched(batch.pass_.again(batch.spans[shard]), batch.spans, batch.keys)

    def _compare(self, one: Hashes, other: Hashes, batch: Batch, shard: int, places: Sequence[int], when: str) -> None:
        """Raise for the first thing that differs. `places`: those replicas of this process that computed the two."""
        for name in one | other:
            if one.get(name) != other.get(name):
                what = self._which(batch, shard, places) if name == RESULT else name
                why = READ if name.startswith("example ") else COMPUTED
                raise NotRepeatable(f"shard {shard} was computed twice {when}: {what} is not the same; {why}")

    def _which(self, batch: Batch, shard: int, places: Sequence[int]) -> str:
        """What differs in the result, if it does so once more and both can be had here."""
        replicas = [self.group.replicas[i] for i in places]
        vectors = [one.backend.get(one.single(self._watched(batch, shard), shard)) for one in replicas]
        pieces: dict[str, tuple[int, int | None]] = {"the loss": (-self.group.replicas[0].numbers, None)}
        start = 0
        for i, layout in enumerate(replicas[0].layouts if replicas else ()):
            what = "the change of" if i else "the gradient of"
            pieces |= {f"{what} {name!r}": (start + lo, start + hi)
                       for name, (lo, hi) in zip(layout.names, layout.spans, strict=True)}  # fmt: skip
            start += layout.size
        differ = (
            name for name, span in pieces.items() if len({hashed(vector[slice(*span)]) for vector in vectors}) > 1
        )
        return next(differ, RESULT)
