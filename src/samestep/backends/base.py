"""What a framework must provide.

Two protocols are all that samestep asks of a framework. Weights and gradients are flat vectors, so the tree, the
exchange between devices and the optimizers are written once, with +, * and slices.

What a shard gives is one flat vector, so that one addition and one transfer carry all of it:

    [ gradient | count x change of every buffer | loss of shard 0..S-1 | hits of shard 0..S-1 ]

The gradient and the losses are sums over the examples of the shard. A shard writes only its own loss and hits and leaves
the other slots zero: after the tree every replica knows every shard's loss, exactly, and a NaN can be traced to its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from samestep.devices import Device
from samestep.processes.place import Place
from samestep.processes.world import World
from samestep.shards import Span

Array = Any  # an array of the framework
Vector = Any  # a flat vector of the framework
Tensors = dict[str, np.ndarray[Any, Any]]  # by name, on the host
Deliver = Callable[[int, Vector], None]  # takes the number of a band and the band


@dataclass(frozen=True)
class Shape:
    """What a model does with one example, found out before training starts."""

    classes: int | None  # the length of the output if it is one score per class, else None
    dtype: str  # of the weights, as NumPy names it


class Replica(Protocol):
    """One whole copy of the model on one device.

    One that is `looped` is asked for all its shards at once, where their examples are on the device: gradients(pass_, spans,
    keys, shards) gives the parts of these shards (JAX on GPUs). One with whole(pass_, span, key, optimizer, slots, lr, t) makes
    a step of one shard in one go, if in_one_go(optimizer) says so, and returns [loss, hits], for `get`, and the slots.
    """

    device: Device
    parameters: Vector  # the trainable weights; writing to it is what `assign` is for
    size: int  # of the vector that `gradient` returns
    bands: Sequence[Span]  # ranges of it, in the order in which the backward pass is likely to finish them
    gaps: Sequence[slice]  # where no weight lies in `parameters`; zero from beginning to end

    def gradient(self, x: Array, y: Array, key: int, shard: int, deliver: Deliver | None = None) -> Vector:
        """The vector described above for one shard, with noise drawn from the key.

        Each band is handed to `deliver` as soon as it is there.
        """

    def evaluate(self, x: Array, y: Array, key: int) -> Vector:
        """[loss, hits] of these examples, summed, with the model in evaluation mode."""

    def assign(self, parameters: Vector) -> None:
        """Take new weights."""

    def advance(self, total: Vector, examples: int) -> None:
        """Take the buffers' changes out of the sum over all shards."""

    def fingerprint(self) -> Vector:
        """64 bits of all weights and buffers, by integer arithmetic, still on the device: one number, or two of 32."""

    def vectors(self) -> list[Vector]:
        """The weights and the buffers of real numbers, as flat vectors."""

    def tensors(self, vectors: Sequence[Vector] | None = None) -> dict[str, np.ndarray[Any, Any]]:
        """Weights and buffers by name, on the host; from other vectors than this replica's own on request.

        They may share memory with the replica: copy what is to be kept.
        """

    def vectors_from(self, tensors: Tensors) -> list[Vector]:
        """The inverse of `tensors` for its vectors, on this replica's device."""

    def load(self, tensors: Tensors) -> None:
        """Take weights and buffers by name."""

    def named(self, vector: Vector) -> Tensors:
        """A vector in the layout of `parameters` (a gradient, a momentum) by the names of the weights, on the host."""

    def flat(self, named: Tensors) -> Vector:
        """The inverse of `named`."""

    def model(self, vectors: Sequence[Vector] | None = None) -> Any:
        """A model of the framework with these weights, for the user."""

    def release(self) -> None:
        """Let go of what only computing needs; weights and buffers stay."""


class Updater(Protocol):
    """An optimizer at work on one replica. One that has its rate inside, where no schedule can reach, is `fixed`."""

    def rate(self) -> float | None:
        """The rate that the optimizer came with, if it has one."""

    def __call__(self, gradient: Vector, lr: float, t: int, z: Vector) -> None: ...
    def tensors(self) -> Tensors:
        """Its state by name, on the host; it may share memory."""

    def load(self, tensors: Tensors) -> None:
        """Take a state that `tensors` gave."""


class Backend(Protocol):
    """One framework.

    It may offer more. compiled(function): a function of a constant, vectors and Python's numbers, compiled; numbers must reach
    the vectors as they would without. index(order, device): what slices of the order of examples are taken from, for `take`.
    in_memory(vector): a vector on the CPU as NumPy, without a copy, to be updated there. fetch(vectors): `get` of their
    `concat`. virtual(device): whether a device can be used that is not listed.
    """

    name: str

    def devices(self) -> list[Device]: ...
    def memory(self, device: Device) -> tuple[int, int]:
        """Bytes in all and bytes in use on a device."""

    def owns(self, array: object) -> bool: ...
    def device_of(self, array: Array) -> Device: ...
    def put(self, array: Array, device: Device) -> Array:
        """The array on the device: the same object when it is already there."""

    def get(self, array: Array) -> np.ndarray[Any, Any]:
        """The array in host memory. The only place that waits for a device."""

    def place(self, vector: Vector, device: Device) -> Vector:
        """A vector on a device, never sharing storage with what it was made from unless it is the same device."""

    def copy(self, array: Array, device: Device, gradient: bool = False) -> Array:
        """A new array on a device, which shares storage with nothing; with a gradient of zeros attached on request."""

    def assign(self, array: Array, value: Array) -> Array:
        """Write a value into an array where arrays are mutable; returns the array that now holds it."""

    def reshape(self, array: Array, shape: Sequence[int]) -> Array: ...
    def take(self, array: Array, index: Array) -> Array: ...
    def add(self, left: Vector, right: Vector) -> Vector:
        """left + right; may reuse the storage of left."""

    def concat(self, vectors: Sequence[Vector]) -> Vector: ...
    def zeros_like(self, vector: Vector) -> Vector: ...
    def clip(self, vector: Vector, limit: float) -> Vector:
        """The vector scaled down to norm `limit` where it is longer, without waiting for the device."""

    def session(self, devices: Sequence[Device], *, deterministic: bool, threads: int) -> AbstractContextManager[None]:
        """Everything the framework must be told for the time of a run; put back as it was afterwards."""

    def map(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run tasks that do not depend on each other, side by side where the device needs threads for that."""

    def probe(self, model: Any, loss: Any, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], name: str) -> Shape:
        """Pass one example through the model (creating lazy weights) and say what came out."""

    def replica(self, model: Any, loss: Any, device: Device, shards: int, capture: bool = True) -> Replica:
        """A copy of the model on a device; `capture` allows recording its computation (see Trainer)."""

    def updater(self, optimizer: Any, replica: Any) -> Updater:
        """The framework's own optimizer, or a function that makes one from parameters, at work on a replica."""

    def rates(self, scheduler: Any, n: int) -> list[float]:
        """The rates of the first n updates of a scheduler of the framework, which is left as it was."""

    def world(self, place: Place, timeout: float, devices: Sequence[Device]) -> World:
        """The processes of this run; `timeout` is how many seconds one may take to answer."""

    def describe(self, model: Any) -> str:
        """The model in one word."""
