"""Data-parallel training by hand, as in the chapter: sum arrays over devices, cut a batch, copy parameters, make a step.

These are to teach with and to compare; a training step uses `exchange`. `allreduce` sums in the chapter's way and in three
others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from samestep.backends import find
from samestep.backends.arrays import same_device
from samestep.devices import Device, Devices, resolve
from samestep.errors import Invalid, WrongType
from samestep.processes.exchange import exchange
from samestep.shards import Fold, cut

if TYPE_CHECKING:
    from samestep.backends.base import Array, Backend, Vector

WAYS = ("tree", "gather", "ring", "sharded")


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
    if how not in WAYS:
        raise Invalid(f"allreduce: how must be one of {', '.join(WAYS)}, got how={how!r}")
    if not isinstance(arrays, (list, tuple)) or not arrays:
        raise WrongType(f"allreduce: expected a list of arrays, one per device, got {arrays!r}")
    owners = [find.of_array(array) for array in arrays]
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


def split_batch(x: Array, y: Array, devices: Devices) -> tuple[list[Array], list[Array]]:
    """Cut a batch over devices: two lists, one piece of x and of y per device, sizes differing by at most one.

    Devices are named as for a Trainer: a list, a count, or "auto".

    >>> import torch
    >>> xs, ys = split_batch(torch.arange(10).reshape(5, 2), torch.arange(5), ["cpu", "cpu"])
    >>> [len(piece) for piece in xs], ys[1]
    ([3, 2], tensor([3, 4]))
    """
    if len(x) != len(y):
        raise Invalid(f"split_batch: x and y must be of one length, got {len(x)} examples and {len(y)} labels")
    same_device(x=x, y=y)
    backend = find.of_array(x)
    found = resolve(devices, shards=1 << 62, backend=backend)  # a piece may be empty
    spans = list(zip(cut(len(x), len(found)), found, strict=True))
    return ([backend.put(x[lo:hi], device) for (lo, hi), device in spans],
            [backend.put(y[lo:hi], device) for (lo, hi), device in spans])  # fmt: skip


def replicate(parameters: Sequence[Array], device: Device | str) -> list[Array]:
    """A copy of a list of parameters on a device, with gradients of zero attached (the chapter's `get_params`).

    The copy shares storage with nothing, also where the parameters are already on that device.

    >>> import torch
    >>> [weight] = replicate([torch.ones(2)], "cpu")
    >>> weight, weight.grad
    (tensor([1., 1.], requires_grad=True), tensor([0., 0.]))
    """
    return [find.of_array(p).copy(p, Device.of(device), gradient=True) for p in parameters]


Gradients = Callable[..., Sequence[Any]]  # of (parameters, x, y)


def gradient(
    x: Array,
    y: Array,
    replicas: Sequence[Sequence[Array]],
    devices: Sequence[Device],
    gradients: Gradients,
    shards: int = 8,
) -> list[list[Array]]:
    """The gradient of a batch by each parameter, on every device: the same bits for any number of devices up to `shards`.

    `gradients` gives those of the summed loss of some examples. A batch smaller than `shards` has a shard for each example.
    """
    backend, spans = find.of_array(x), cut(len(x), min(shards, len(x)))
    folds = [Fold[Any](len(spans), lambda left, right: left + right) for _ in replicas[0]]
    for parameters, device, (first, end) in zip(replicas, devices, cut(len(spans), len(devices)), strict=True):
        for shard in range(first, end):
            lo, hi = spans[shard]
            found = gradients(parameters, backend.put(x[lo:hi], device), backend.put(y[lo:hi], device))
            for fold, part in zip(folds, found, strict=True):
                fold.add((shard, shard + 1), backend.put(part, devices[0]))
    return [[backend.put(fold.total(), device) for fold in folds] for device in devices]
