"""What a framework must provide: a Backend; a Replica (replica.py), an Updater (updaters.py). What all do alike stands once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from samestep.backends.calling import Style
from samestep.backends.layout import Numbers
from samestep.backends.losses import Losses
from samestep.backends.losses import Shape as Shape
from samestep.backends.making import Making
from samestep.backends.replica import Replica as Replica
from samestep.backends.replica import Task as Task
from samestep.backends.workers import Workers
from samestep.devices import Device, host_memory
from samestep.errors import Invalid, WrongType, out_of_memory
from samestep.signals import heard
from samestep.trees import Tree

if TYPE_CHECKING:
    from samestep.backends.steps import Steps
    from samestep.backends.updaters import Clip, Updater
    from samestep.processes.place import Place
    from samestep.processes.world import World
    from samestep.training.replicas import Replicas

Array = Any  # an array of the framework
Model = Any  # a model of the framework
Vector = Any  # a flat vector of the framework


class Backend(Losses):
    """One framework."""

    name: str

    portable = False  # whether the run that goes on is to have the same bits on every CPU
    state: Sequence[str] = ()  # patterns: the names of frozen parameters that may be written to in this run
    making = Making()  # how the shards of this run are computed
    goes_on = False  # whether the threads that compute shards may go on from step to step by themselves

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

    def staged(self, array: Array, device: Device) -> Array:
        """An array on the host, in memory from which `copy` brings it to a device most quickly; called by threads that read."""
        return array

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
