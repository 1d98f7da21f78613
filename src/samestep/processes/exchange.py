"""The ways to sum over devices.

`exchange` is the one that a training step uses: devices hand on their parts, and every slice of the vector is summed along
the tree by the device that owns it, so that no device is a bottleneck and no bytes move that a ring would not move.
`across` does the same between processes. `allreduce` sums one array per device, in the chapter's way and in three others, to
teach with and to compare.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from samestep.backends.arrays import same_device
from samestep.devices import Device, resolve
from samestep.errors import Invalid, WrongType
from samestep.shards import Fold, Span, cut

if TYPE_CHECKING:
    from samestep.backends import Array, Backend, Vector
    from samestep.processes.world import World

CHUNK = 1 << 20  # numbers of a slice that are sent at once: while some are added, others travel
AHEAD = 4  # chunks on their way at once
WAYS = ("tree", "gather", "ring", "sharded")


def exchange(
    backend: Backend, parts: Sequence[dict[Span, Vector]], n: int, devices: Sequence[Device], size: int
) -> list[Vector]:
    """From the parts that each device holds, the sum over all n shards on every device.

    Device i sums slice i of the vector; then every device gathers the slices. Additions go along the tree, wherever they
    happen, so the result does not depend on the devices.
    """
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


def across(
    world: World,
    backend: Backend,
    parts: dict[Span, Vector],
    held: Sequence[Sequence[Span]],
    n: int,
    memory: Vector,
    rooms: dict[int, Vector] | None = None,
) -> Vector:
    """From the parts that this process holds, and those that the others hold, the sum over all n shards.

    held[q] says which parts process q holds. Process q sums slice q along the tree; then every process gathers the slices.
    The sum replaces the first part, in its memory; that of a process without parts goes to `memory`. What arrives is
    received in `rooms`, memory that a caller keeps for the next time: the system gives out no memory without clearing it.
    """
    mine = list(parts.values())
    total, rooms = mine[0] if mine else memory, {} if rooms is None else rooms
    others = [(world.rank + i) % world.size for i in range(1, world.size)]  # so that not all begin with the same one
    spans = [(q, span) for q in others for span in held[q]]
    gathered: deque[Any] = deque()  # sums of others
    ends: list[Any] = []  # need not be waited for earlier: a sum that comes back tells that the parts have arrived

    def begin(i: int) -> tuple[list[Span], dict[Span, Vector], Any, Any]:
        """Hand out the parts of a chunk: to each process those of its slice; and expect its sum in return."""
        a, b = chunks[i]
        slices = [(a + lo, a + hi) for lo, hi in cut(b - a, world.size)]
        own = slices[world.rank][1] - slices[world.rank][0]
        room = rooms.get(i % AHEAD)
        if room is None or len(room) < own * len(spans):
            room = rooms[i % AHEAD] = world.empty(own * len(spans), memory)
        incoming = [(q, span, room[j * own : (j + 1) * own]) for j, (q, span) in enumerate(spans) if own]
        outgoing = [(q, part[slice(*slices[q])]) for q in others for part in mine if slices[q][0] < slices[q][1]]
        leaving, arriving = world.swap(outgoing, [(q, part) for q, _, part in incoming])
        ends.append(leaving)
        # The sums will lie where the parts that now leave still are: nobody has a sum before it has all the parts.
        sums = world.expect([(q, total[slice(*slices[q])]) for q in others if slices[q][0] < slices[q][1]])
        return slices, {span: part for _, span, part in incoming}, arriving, sums

    def finish(slices: list[Span], incoming: dict[Span, Vector], arriving: Any, sums: Any) -> Any:
        """Sum our slice of a chunk, and hand it to all; theirs are to be waited for."""
        world.wait(arriving)
        lo, hi = slices[world.rank]
        own = total[lo:hi]

        def plus(left: Vector, right: Vector) -> Vector:
            # a + b = b + a to the bit, so the sum can grow where it will be needed
            return backend.add(right, left) if right is own else backend.add(left, right)

        if lo < hi:
            fold: Fold[Vector] = Fold(n, plus)
            for i, (span, part) in enumerate(parts.items()):
                fold.add(span, part[lo:hi] if i else own)
            for span, part in incoming.items():
                fold.add(span, part)
            if fold.total() is not own:
                backend.assign(own, fold.total())
        leaving, theirs = world.swap([(q, own) for q in others if lo < hi], sums)
        ends.append(leaving)
        return theirs

    chunks = [(a, min(a + CHUNK * world.size, len(total))) for a in range(0, len(total), CHUNK * world.size)]
    begun = deque(begin(i) for i in range(min(AHEAD, len(chunks))))
    for i in range(len(chunks)):
        gathered.append(finish(*begun.popleft()))
        if len(gathered) > AHEAD:  # not in the end: more and more would lie in the memory of those who share it with us
            world.wait(gathered.popleft())
        if i + AHEAD < len(chunks):
            begun.append(begin(i + AHEAD))
    for works in [*gathered, *ends]:
        world.wait(works)
    return total


class Across:
    """The sum over the shards of all processes."""

    def __init__(self, world: World, backend: Backend, device: Device, parameters: Vector, size: int) -> None:
        import numpy as np

        from samestep.processes.sockets import OnHost

        self.world, self.rooms = world, dict[int, Any]()
        self.memory = world.empty(size, parameters)
        self.arithmetic: Any = OnHost(backend, device) if isinstance(self.memory, np.ndarray) else backend
        self.backend = backend

    def sum(self, parts: dict[Span, Vector], held: Sequence[Sequence[Span]], n: int, lo: int, hi: int) -> Vector:
        local: Fold[Vector] = Fold(n, self.arithmetic.add)
        for span, vector in parts.items():
            local.add(span, self.world.bring(vector))
        mine = dict(sorted(local.parts.items()))
        total = across(self.world, self.arithmetic, mine, held, n, self.memory[lo:hi], self.rooms)
        if (lo, hi) != (0, len(self.memory)):
            self.arithmetic.assign(self.memory[lo:hi], total)
        return total

    def put(self, vector: Vector, device: Device) -> Vector:
        place = self.arithmetic.put if self.arithmetic is self.backend else self.arithmetic.place
        return place(vector, device)


def allreduce(arrays: list[Array], how: str = "tree") -> list[Array]:
    """Sum a list of arrays, one per device, and leave the sum on every device.

    tree     along the tree of samestep, on the first device, then copied to the others
    gather   the first device adds the others' arrays in turn, then copies the sum to them (the chapter's; what a
             parameter server does)
    ring     k − 1 rounds of passing partial sums to the next device and k − 1 of passing sums: every device sends
             2(k − 1)/k of an array. Each slice is added in another order, so this is not the sum along the tree
    sharded  device i sums slice i along the tree, then the slices are gathered: a ring's bytes, the tree's order

    Arrays are changed in place where the framework has mutable arrays; the arrays that hold the sum are returned.

    >>> import torch
    >>> allreduce([torch.tensor([1.0]), torch.tensor([2.0])])
    [tensor([3.]), tensor([3.])]
    """
    from samestep import backends

    if how not in WAYS:
        raise Invalid(f"allreduce: how must be one of {', '.join(WAYS)}, got how={how!r}")
    if not isinstance(arrays, (list, tuple)) or not arrays:
        raise WrongType(f"allreduce: expected a list of arrays, one per device, got {arrays!r}")
    owners = [backends.of_array(array) for array in arrays]
    if len({backend.name for backend in owners}) > 1:
        raise WrongType(f"allreduce: arrays of several frameworks: {', '.join(b.name for b in owners)}")
    if not all(owner.owns(array) for owner, array in zip(owners, arrays, strict=True)):
        raise WrongType(
            f"allreduce: expected arrays of {owners[0].name}, got {type(arrays[0]).__name__}: put(x, device) them"
        )
    types = {str(array.dtype) for array in arrays}
    if len(types) > 1:
        raise WrongType(f"allreduce: arrays must be of one type, got {' and '.join(sorted(types))}")
    shapes = {tuple(array.shape) for array in arrays}
    if len(shapes) > 1:
        raise Invalid(f"allreduce: arrays must have one shape, got {' and '.join(map(str, sorted(shapes)))}")
    backend = owners[0]
    devices = [backend.device_of(array) for array in arrays]
    flats = [backend.reshape(array, (-1,)) for array in arrays]
    sums = {"tree": _tree, "gather": _gather, "ring": _ring, "sharded": _sharded}[how](backend, flats, devices)
    shape = arrays[0].shape
    return [backend.assign(array, backend.reshape(total, shape)) for array, total in zip(arrays, sums, strict=True)]


def _tree(backend: Backend, vectors: list[Vector], devices: list[Device]) -> list[Vector]:
    fold: Fold[Vector] = Fold(len(vectors), lambda left, right: left + right)
    for i, vector in enumerate(vectors):
        fold.add((i, i + 1), backend.put(vector, devices[0]))
    return [backend.put(fold.total(), device) for device in devices]


def _gather(backend: Backend, vectors: list[Vector], devices: list[Device]) -> list[Vector]:
    total = vectors[0]
    for vector in vectors[1:]:
        total = total + backend.put(vector, devices[0])
    return [backend.put(total, device) for device in devices]


def _sharded(backend: Backend, vectors: list[Vector], devices: list[Device]) -> list[Vector]:
    k, size = len(vectors), len(vectors[0])
    return exchange(backend, [{(i, i + 1): vector} for i, vector in enumerate(vectors)], k, devices, size)


def _ring(backend: Backend, vectors: list[Vector], devices: list[Device]) -> list[Vector]:
    k, slices = len(vectors), cut(len(vectors[0]), len(vectors))
    held = [[vector[lo:hi] for lo, hi in slices] for vector in vectors]
    for hop in range(k - 1):  # reduce: after it, device d holds the sum of slice d + 1
        sent = [held[d][(d - hop) % k] for d in range(k)]
        for d in range(k):
            to = (d + 1) % k
            slot = (d - hop) % k
            held[to][slot] = held[to][slot] + backend.put(sent[d], devices[to])
    for hop in range(k - 1):  # gather: the sums go once round
        sent = [held[d][(d + 1 - hop) % k] for d in range(k)]
        for d in range(k):
            to = (d + 1) % k
            held[to][(d + 1 - hop) % k] = backend.put(sent[d], devices[to])
    return [backend.concat(row) for row in held]


def split_batch(x: Array, y: Array, devices: Any) -> tuple[list[Array], list[Array]]:
    """Cut a batch over devices: two lists, one piece of x and of y per device, sizes differing by at most one.

    Devices are named as for a Trainer: a list, a count, or "auto".

    >>> import torch
    >>> xs, ys = split_batch(torch.arange(10).reshape(5, 2), torch.arange(5), ["cpu", "cpu"])
    >>> [len(piece) for piece in xs], ys[1]
    ([3, 2], tensor([3, 4]))
    """
    from samestep import backends

    if len(x) != len(y):
        raise Invalid(f"split_batch: x and y must be of one length, got {len(x)} examples and {len(y)} labels")
    same_device(x=x, y=y)
    backend = backends.of_array(x)
    places = resolve(devices, shards=1 << 62, backend=backend)  # a piece may be empty
    spans = list(zip(cut(len(x), len(places)), places, strict=True))
    return ([backend.put(x[lo:hi], place) for (lo, hi), place in spans],
            [backend.put(y[lo:hi], place) for (lo, hi), place in spans])  # fmt: skip


def replicate(parameters: Sequence[Array], device: Device | str) -> list[Array]:
    """A copy of a list of parameters on a device, with gradients of zero attached (the chapter's `get_params`).

    The copy shares storage with nothing, also where the parameters are already on that device.

    >>> import torch
    >>> [weight] = replicate([torch.ones(2)], "cpu")
    >>> weight, weight.grad
    (tensor([1., 1.], requires_grad=True), tensor([0., 0.]))
    """
    from samestep import backends

    return [backends.of_array(p).copy(p, Device.of(device), gradient=True) for p in parameters]
