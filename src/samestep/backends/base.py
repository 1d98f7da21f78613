"""What a framework must provide: a Backend, a Replica (and, in updaters.py, an Updater). What all do alike is here, once.

Weights and gradients are flat vectors, so the tree, the exchange between devices and the optimizers are written once, with
+, * and slices. What a shard gives is one flat vector, so that one addition and one transfer carry all of it:

    [ gradient | count x change of every buffer | loss of shard 0..S-1 | hits of shard 0..S-1 | more ]

The gradient and the losses are sums over the examples of the shard. A shard writes only its own loss and hits and leaves
the other slots zero: after the tree every replica knows every shard's loss, exactly, and a NaN can be traced to its shard.
`more` are the weight of a weighted loss, and sum and weight of every metric: of these, all know the sum over the shards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

from samestep.backends.calling import Style
from samestep.backends.layout import Layout, Numbers, Tensors
from samestep.backends.losses import Losses, Measure
from samestep.backends.losses import Shape as Shape
from samestep.backends.making import Making
from samestep.backends.workers import Workers
from samestep.devices import Device, host_memory
from samestep.errors import Invalid, WrongType, out_of_memory
from samestep.fingerprint import of_vectors
from samestep.shards import Span
from samestep.signals import heard
from samestep.trees import Tree

if TYPE_CHECKING:
    from samestep.backends.steps import Steps
    from samestep.backends.updaters import Clip, Updater
    from samestep.data.feed import Batch
    from samestep.processes.place import Place
    from samestep.processes.world import World
    from samestep.training.replicas import Replicas
    from samestep.training.step import ReplicaSums

Array = Any  # an array of the framework
Model = Any  # a model of the framework
Vector = Any  # a flat vector of the framework
Task = Callable[[], Any]


class Replica(ABC):
    """One whole copy of the model on one device, as flat vectors: the trained weights, then the state.

    State is what forward passes change, such as running statistics: one vector for each type of number.
    """

    layouts: Sequence[Layout]  # of the weights, and of each vector of the state
    names: dict[str, str]  # each name of a tensor, in the user's order → its name in a layout or in `constants`

    def __init__(self, backend: Backend, measure: Any, device: Device, shards: int) -> None:
        self.backend, self.measure, self.device, self.shards = backend, Measure.of(measure), device, shards

    # What is computed

    slopes = True  # whether `gradient` is right with training=False
    side_by_side = False  # whether several Python threads compute shards of this replica

    @property
    def size(self) -> int:
        """The length of the vector that `gradient` returns."""
        return sum(layout.size for layout in self.layouts) + self.numbers

    @property
    def numbers(self) -> int:
        """How many numbers are in that vector after gradient and changes."""
        return 2 * self.shards + self.measure.more

    @property
    def bands(self) -> Sequence[Span]:
        """Ranges of that vector, in the order in which the backward pass is likely to finish them."""
        return [(0, self.size)]

    @abstractmethod
    def gradient(self, x: Tree, y: Tree, key: int, shard: int, training: bool = True) -> Vector:
        """The vector described above for one shard, with noise drawn from the key, in training mode or in evaluation mode."""

    def tasks(self, batch: Batch, shards: range, sums: ReplicaSums) -> list[Task]:
        """The tasks that compute these shards of a batch. They do not depend on each other."""

        def compute(shard: int) -> None:
            sums.add((shard, shard + 1), self.single(batch, shard))

        return [partial(compute, shard) for shard in shards]

    def single(self, batch: Batch, shard: int) -> Vector:
        """What `tasks` computes for one shard."""
        x, y = batch.shard(shard, self.device)
        return self.gradient(x, y, batch.keys[shard], shard)

    def is_state(self, name: str | None) -> bool:
        """Whether the user has declared a frozen parameter as state."""
        return any(fnmatchcase(name or "", pattern) for pattern in self.backend.state)

    def inside(self, x: Tree, y: Tree) -> tuple[list[str], list[str]]:
        """Parameters that the loss depends on and that are not this replica's; hashes of more than one trace of the program."""
        return [], []

    @abstractmethod
    def evaluate(self, x: Tree, y: Tree, key: int) -> Vector:
        """[loss, hits, more] of these examples, summed, with the model in evaluation mode."""

    @abstractmethod
    def assign(self, parameters: Vector) -> None:
        """Take new weights."""

    state: Sequence[Any]  # what holds the state: of each type of number one, with its layout and `move`

    def advance(self, total: Vector, examples: int) -> None:
        """Apply the changes of the state, which are in the sum over all shards."""
        start = self.layouts[0].size
        for flat in self.state:
            flat.move(total[start : start + flat.layout.size] / examples)
            start += flat.layout.size

    @abstractmethod
    def fingerprint(self) -> Vector:
        """64 bits of all vectors, by integer arithmetic, left on the device: one number, or two of 32 bits."""

    def digest(self, vector: Vector) -> Vector:
        """64 bits of a vector that a shard gave, on the device or on the host."""
        return of_vectors([self.backend.get(vector)])

    def release(self) -> None:  # noqa: B027
        """Free what only computing needs; weights and state stay."""

    # Its vectors

    @property
    @abstractmethod
    def vectors(self) -> list[Vector]:
        """The weights and the state, in the order of the layouts."""

    @property
    def parameters(self) -> Vector:
        """The trained weights; `assign` writes to them."""
        return self.vectors[0]

    @abstractmethod
    def replace(self, vectors: Sequence[Vector]) -> None:
        """Take other values for all vectors."""

    def constants(self) -> Tensors:
        """The tensors that never change, by name, on the host."""
        return {}

    def own_settings(self, decays: bool) -> dict[str, str]:
        """Trained tensors that the framework's optimizers update in another way than the rest, maybe only in decay → how."""
        return {}

    def take_constants(self, tensors: Tensors) -> None:  # noqa: B027
        """Take other values for the constants that are among these tensors."""

    def to_vector(self, numbers: Numbers) -> Vector:
        """A vector on this replica's device."""
        return self.backend.copy(numbers, self.device)

    # By name, on the host

    def real_vectors(self) -> list[Vector]:
        """The vectors of real numbers. Averages are taken of these."""
        return [vector for vector, layout in zip(self.vectors, self.layouts, strict=True) if layout.real]

    def tensors(self, vectors: Sequence[Vector] | None = None) -> Tensors:
        """All tensors by name. Those of real numbers come from `vectors`, or from this replica's own.

        They may share memory with the replica: copy what you keep.
        """
        found, reals = self.constants(), iter(self.real_vectors() if vectors is None else vectors)
        for layout, own in zip(self.layouts, self.vectors, strict=True):
            found |= layout.named(self.backend.get(next(reals) if layout.real else own))
        return {name: found[known] for name, known in self.names.items()}

    def real_vectors_from(self, tensors: Tensors) -> list[Vector]:
        """The inverse of `tensors(vectors)`."""
        return [self.to_vector(layout.filled(tensors)) for layout in self.layouts if layout.real]

    def load(self, tensors: Tensors) -> None:
        """Take all tensors by name."""
        self.replace([self.to_vector(layout.filled(tensors)) for layout in self.layouts])
        self.take_constants(tensors)

    def named(self, vector: Vector) -> Tensors:
        """A vector in the layout of the weights (a gradient, a momentum) by their names."""
        return self.layouts[0].named(self.backend.get(vector))

    def flat(self, named: Tensors) -> Vector:
        """The inverse of `named`."""
        return self.to_vector(self.layouts[0].filled(named))

    def model(self, vectors: Sequence[Vector] | None = None) -> Any:
        """A model of the framework with these weights, for the user."""
        return self.model_of(self.tensors(vectors))

    @abstractmethod
    def model_of(self, tensors: Tensors) -> Any:
        """A copy of the user's model with these tensors."""


class Backend(Losses):
    """One framework."""

    name: str

    portable = False  # whether the run that goes on is to have the same bits on every CPU
    state: Sequence[str] = ()  # patterns: the names of frozen parameters that may be written to in this run
    making = Making()  # how the shards of this run are computed

    def __init__(self) -> None:
        self.workers = Workers()

    # Devices

    @abstractmethod
    def devices(self) -> list[Device]: ...

    def usable(self, device: Device) -> bool:
        """Whether a device can be used. This may be so for one that is not listed."""
        return device in self.devices()

    def require(self, device: Device) -> None:
        if not self.usable(device):
            listed = ", ".join(map(str, self.devices()))
            raise Invalid(f"device {device} is not there: {self.name} sees {listed} on this machine")

    def memory(self, device: Device) -> tuple[int, int]:
        """Bytes in all and bytes in use on a device."""
        return host_memory()

    def evaluating(self, model: Any) -> Any:
        """A model in evaluation mode, if its framework has modes."""
        return model

    @abstractmethod
    def state_dict(self, model: Any) -> Any:
        """The weights of a model as the framework's own loader takes them."""

    # Arrays

    @abstractmethod
    def owns(self, thing: object) -> bool:
        """Whether it is an array or a model of this framework."""

    @abstractmethod
    def device_of(self, array: Array) -> Device: ...
    @abstractmethod
    def put(self, array: Array, device: Device) -> Array:
        """The array on the device: the same object when it is already there."""

    @abstractmethod
    def full(self, shape: tuple[int, ...], value: float, device: Device, dtype: str) -> Array: ...
    @abstractmethod
    def get(self, array: Array) -> Numbers:
        """The array in host memory. Only this and `fetch` wait for a device."""

    def fetch(self, vectors: Sequence[Vector]) -> Numbers:
        """Vectors, one after the other, in host memory."""
        return self.get(self.concat(vectors))

    @abstractmethod
    def copy(self, array: Array, device: Device, gradient: bool = False) -> Array:
        """A new array on a device, which shares storage with nothing; with a gradient of zeros attached on request."""

    @abstractmethod
    def assign(self, array: Array, value: Array) -> Array:
        """Write a value into an array where arrays are mutable; returns the array that now holds it."""

    def reshape(self, array: Array, shape: Sequence[int]) -> Array:
        return array.reshape(tuple(shape))

    @abstractmethod
    def take(self, array: Array, index: Array) -> Array:
        """The rows of an array."""

    def index(self, order: Numbers, device: Device) -> Array:
        """The order of examples as an array; slices of it are given to `take`."""
        return self.put(order, device)

    @abstractmethod
    def add(self, left: Vector, right: Vector) -> Vector:
        """left + right; may reuse the storage of left."""

    @abstractmethod
    def concat(self, vectors: Sequence[Vector]) -> Vector: ...
    @abstractmethod
    def zeros_like(self, vector: Vector) -> Vector: ...
    def choose(self, weight: Vector, new: Vector, old: Vector) -> Vector:
        """`new` if a weight, a vector of one number, is not zero, else `old`."""
        return new if self.get(weight)[0] != 0 else old

    @abstractmethod
    def clip(self, vector: Vector, limit: float) -> Vector:
        """The vector, scaled down to norm `limit` if it is longer, without waiting for the device."""

    def scalar(self, value: float, device: Device) -> Any:
        """A number that changes from step to step, as it meets vectors of a device."""
        return value

    def clamp(self, vector: Vector, limit: float) -> Vector:
        """The vector, each number of it between -limit and limit."""
        return vector.clip(-limit, limit)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of vectors and Python's numbers, compiled, with the same bits; equal ones are compiled once."""
        return function

    def in_memory(self, vector: Vector) -> Numbers | None:
        """A vector on the CPU as NumPy, without a copy, to be updated in place; None: use the framework's operations."""
        return None

    # A run

    @abstractmethod
    def numerics(self, devices: Sequence[Device], travels: bool) -> dict[str, Any]:
        """All that decides numbers beside the recipe's other entries: builds, libraries, settings, kernels, the machine.

        Of a run that travels from CPU to CPU, only what must be the same on all of them.
        """

    def check_making(self, devices: Sequence[Device]) -> None:
        """Refuse what `making` asks for and the framework or the devices do not have."""
        self.making.only_of_pytorch(self.name)

    @abstractmethod
    def require_portable(self) -> None:
        """Refuse a portable run if the framework has not started with the variables that it needs (portable.py)."""

    @abstractmethod
    def content(self, thing: Any, weights: bool) -> Any:
        """What stands for an object of this framework when it is told from others (content.py); None: it is not one.

        The values of weights and of state that is saved with them count only if asked for.
        """

    @abstractmethod
    def session(self, devices: Sequence[Device], *, deterministic: bool, threads: int) -> AbstractContextManager[None]:
        """The settings that the framework needs during a run. Afterwards they are as before."""

    def map(self, tasks: Sequence[Task]) -> list[Any]:
        """Run tasks that do not depend on each other, side by side where the device needs threads for that."""
        # A single one, too: the caller's thread may have another number of threads, and modes of its own.
        with self.explained():
            return self.workers.map(tasks)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn an error of the framework that has a known remedy into samestep's, which names the remedy."""
        try:
            with heard():
                yield
        except Exception as error:
            better = self.explain(error)
            if better is None:
                raise
            raise better from None

    def explain(self, error: Exception) -> Exception | None:
        """samestep's error for one of the framework's, if it has a known remedy."""
        return out_of_memory(error)

    def world(self, place: Place, timeout: float, devices: Sequence[Device]) -> World:
        """The processes of this run; `timeout` is how many seconds one may take to answer."""
        from samestep.processes import mpi

        return mpi.join(self.get, place, timeout)

    # Models

    def describe(self, model: Any) -> str:
        """The model in one word."""
        return type(model).__name__

    @abstractmethod
    def style(self, model: Any, x: Tree, whole: bool) -> Style:
        """How the model takes x (calling.py)."""

    @abstractmethod
    def probe(self, model: Any, measure: Any, x: Tree, y: Tree, name: str = "x") -> Shape:
        """Pass one example through the model (creating lazy weights) and return what came out; `name` is for messages."""

    def forget(self) -> None:
        """Let go of weights that a probe has made and that the model itself does not hold."""

    @abstractmethod
    def replica(self, model: Any, measure: Any, device: Device, shards: int, capture: bool = True) -> Replica:
        """A copy of the model on a device; `measure`: a Measure, or a loss alone; `capture`: allow recording (see Trainer)."""

    @abstractmethod
    def updater(self, optimizer: Any, replica: Any, clip: Clip) -> Updater:
        """An updater for the framework's own optimizer, or for a function that makes one from parameters."""

    def profiler(self, devices: Sequence[Device]) -> AbstractContextManager[list[dict[str, Any]]] | None:
        """What watches devices for a profile while it is entered, and in the end fills a list with events of a trace."""
        return None

    def steps(self, group: Replicas) -> Steps | None:
        """What makes several steps of a group in one call; None: they are made one by one."""
        return None

    def rates(self, scheduler: Any, n: int, unit: str = "step") -> list[float]:
        """The first n rates of a scheduler of the framework, which counts steps or epochs, and is left as it was."""
        raise WrongType(f"schedule must be a number or a function of t, got {type(scheduler).__name__}")
