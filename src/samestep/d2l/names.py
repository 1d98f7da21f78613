"""The names that the chapters use as `d2l.…`, with the chapters' signatures. What differs by framework is in its own file.

Each is thin over samestep, and mends what the chapters' own code does wrong: replicas never share storage, sums go along
one tree, nothing is lost of uneven batches, and numbers stay on their device until somebody asks for them.
"""

from __future__ import annotations

import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import numpy as np

from samestep import draws, lab, models
from samestep.backends import arrays, find
from samestep.backends.base import Array, Backend
from samestep.d2l import by_hand, drawing
from samestep.d2l.drawing import ProgressBoard as ProgressBoard
from samestep.data import fashion
from samestep.data.examples import Data
from samestep.devices import Device, cpu, gpu
from samestep.runs.run import Run
from samestep.shards import Fold, cut
from samestep.training import trainer as samesteps

Native = Any  # a device, as the framework has it
SHARDS = 8  # that a batch is cut into: up to so many devices give the same bits


class Timer:
    """Times of several runs. It runs from when it is made, or from `start`, to `stop`."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.start()

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self) -> float:
        self.times.append(time.perf_counter() - self._began)
        return self.times[-1]

    def avg(self) -> float:
        return sum(self.times) / len(self.times)

    def sum(self) -> float:
        return sum(self.times)

    def cumsum(self) -> list[float]:
        return np.cumsum(self.times).tolist()  # type: ignore[no-any-return]


class Accumulator:
    """Sums of n numbers. They stay on their device until one is asked for: `add` does not wait."""

    def __init__(self, n: int) -> None:
        self.data: list[Any] = [0.0] * n

    def add(self, *args: Any) -> None:
        self.data = [a + b for a, b in zip(self.data, args, strict=True)]

    def reset(self) -> None:
        self.data = [0.0] * len(self.data)

    def __getitem__(self, i: int) -> float:
        return float(self.data[i])


def add_to_class(Class: type) -> Callable[[Callable[..., Any]], None]:
    """Register a function as a method of a class that exists already."""
    return lambda function: setattr(Class, function.__name__, function)


class HyperParameters:
    """Has the arguments of its `__init__` as attributes."""

    def save_hyperparameters(self, ignore: Sequence[str] = ()) -> None:
        """Called in `__init__`: keep its arguments."""
        frame = inspect.currentframe()
        assert frame
        assert frame.f_back
        code, values = frame.f_back.f_code, frame.f_back.f_locals
        names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
        self.hparams = {name: values[name] for name in names if name not in ignore and not name.startswith("_")}
        for name, value in self.hparams.items():
            setattr(self, name, value)


class Batches:
    """Batches of arrays: as often as it is iterated over, in another order. None is dropped."""

    examples = 0  # at most so many are given; 0: all
    seed = 0

    def __init__(self, d2l: Names, x: Any, y: Any, batch_size: int, resize: Any = None, shuffled: bool = True) -> None:
        n = Batches.examples or len(x)
        self.x, self.y, self.batch_size, self.shuffled, self.epoch = x[:n], y[:n], batch_size, shuffled, 0
        self._d2l, self._side = d2l, max(resize) if isinstance(resize, (tuple, list)) else resize

    def __len__(self) -> int:
        return -(-len(self.x) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Array, Array]]:
        way = "without_replacement" if self.shuffled else "in_order"
        order = draws.order(Batches.seed, self.epoch, len(self.x), way)
        self.epoch += 1
        for start in range(0, len(self.x), self.batch_size):
            rows = order[start : start + self.batch_size]
            yield self._d2l.images(self._resized(self.x[rows])), self._d2l.array(self.y[rows])

    def _resized(self, x: Any) -> Any:
        """Images of another size, by the two nearest pixels in each direction."""
        if not self._side or self._side == x.shape[-1]:
            return x
        at = np.clip((np.arange(self._side) + 0.5) * x.shape[-1] / self._side - 0.5, 0, x.shape[-1] - 1)
        near = np.maximum(0, 1 - np.abs(at[:, None] - np.arange(x.shape[-1]))).astype(np.float32)
        return near @ x @ near.T


class Trainer(HyperParameters):
    """The chapters' trainer: of the chapters' modules, on as many devices as `num_gpus` says, with samestep's step.

    `fit` leaves the trained weights in the model, as in the chapters, draws on its board, and returns the run.
    """

    d2l: Names

    def __init__(self, max_epochs: int, num_gpus: int = 0, gradient_clip_val: float = 0) -> None:
        self.save_hyperparameters()
        self.gpus = [self.d2l.gpu(i) for i in range(min(num_gpus, self.d2l.num_gpus()))]

    max_epochs: int
    num_gpus: int
    gradient_clip_val: float

    def prepare_batch(self, batch: Sequence[Array]) -> list[Array]:
        return [self.d2l.to(array, self.gpus[0]) for array in batch] if self.gpus else list(batch)

    def prepare_model(self, model: Any) -> None:
        self.model = model
        model.board.xlim = [0, self.max_epochs]
        object.__setattr__(model, "trainer", self)  # not as a part of the model, or of a frozen one

    def fit(self, model: Any, data: Any) -> Run:
        """Train on data with train_dataloader(), val_dataloader() and a batch_size."""
        self.prepare_model(model)
        examples, rate = self.d2l.collected(data.train_dataloader()), getattr(model, "lr", None)
        settings = {"loss": model.loss} if hasattr(model, "loss") else {}
        trainer = samesteps.Trainer(
            self.max_epochs, data.batch_size, devices=self.num_gpus or "cpu", seed=Batches.seed, lr=rate,
            gradient_clip_val=self.gradient_clip_val, progress=False, **settings,
        )  # fmt: skip
        run = trainer.fit(model, Data(examples, self.d2l.collected(data.val_dataloader())))
        self.d2l.take(model, run)
        for row in run.history:
            for name in ("train_loss", "test_loss", "test_accuracy"):
                if row[name] is not None:
                    model.board.draw(row["epoch"], row[name], name.replace("test", "val").replace("uracy", ""))
        return run


class FashionMNIST:
    """Fashion-MNIST for a Trainer, in batches."""

    d2l: Names

    def __init__(self, batch_size: int = 64, resize: Any = (28, 28)) -> None:
        self.batch_size = batch_size
        self._loaders = self.d2l.load_data_fashion_mnist(batch_size, resize)

    def train_dataloader(self) -> Batches:
        return self._loaders[0]

    def val_dataloader(self) -> Batches:
        return self._loaders[1]


class Names(ABC):
    """What `d2l` is, for one framework."""

    framework: str
    virtual = False  # whether GPUs that are not there are stood for by those that are
    Timer, Accumulator, HyperParameters, add_to_class = Timer, Accumulator, HyperParameters, staticmethod(add_to_class)
    Animator, ProgressBoard, plot = drawing.Animator, drawing.ProgressBoard, staticmethod(drawing.plot)
    train_2d, show_trace_2d = staticmethod(lab.train_2d), staticmethod(lab.show_trace_2d)

    def __init__(self) -> None:
        self.Trainer = type("Trainer", (Trainer,), {"d2l": self, "__doc__": Trainer.__doc__})
        self.FashionMNIST = type("FashionMNIST", (FashionMNIST,), {"d2l": self, "__doc__": FashionMNIST.__doc__})

    @property
    def _backend(self) -> Backend:
        return find.load(self.framework)

    @property
    def plt(self) -> Any:
        return drawing.pyplot()

    # Devices

    @abstractmethod
    def native(self, device: Device) -> Native:
        """The framework's own object for a device."""

    @abstractmethod
    def device(self, native: Native) -> Device:
        """The inverse."""

    def cpu(self) -> Native:
        return self.native(cpu())

    def gpu(self, i: int = 0) -> Native:
        """GPU number i, whether it is there or not."""
        return self.native(gpu(i))

    def num_gpus(self) -> int:
        return arrays.num_gpus(self._backend)

    def try_gpu(self, i: int = 0) -> Native:
        """gpu(i) if it is there, else cpu()."""
        there = self.num_gpus()
        return self.gpu(i % there if self.virtual else i) if i < there or (there and self.virtual) else self.cpu()

    def try_all_gpus(self) -> list[Native]:
        """All GPUs, or [cpu()] if there is none."""
        return [self.gpu(i) for i in range(self.num_gpus())] or [self.cpu()]

    def to(self, x: Array, device: Native) -> Array:
        """The array on the device: the same object when it is there already."""
        return self._backend.put(x, self.device(device))

    # Data

    def array(self, x: Any) -> Array:
        """An array of NumPy as one of the framework, on the CPU."""
        return self._backend.put(x, cpu())

    def images(self, x: Any) -> Array:
        """The same of images, with the axis of channels where the framework wants it."""
        return self.array(x)

    def load_data_fashion_mnist(self, batch_size: int, resize: Any = None) -> tuple[Any, Any]:
        """Batches to train on, in another order in every epoch, and batches to test on."""
        train, test = fashion.load()
        return Batches(self, *train, batch_size, resize), Batches(self, *test, batch_size, resize, shuffled=False)

    def collected(self, batches: Iterable[tuple[Array, Array]]) -> tuple[Any, Any]:
        """The examples of all batches as two arrays of NumPy."""
        x, y = zip(*([self._backend.get(array) for array in batch] for batch in batches), strict=True)
        return np.concatenate(x), np.concatenate(y)

    # Scores

    @abstractmethod
    def accuracy(self, y_hat: Array, y: Array) -> Any:
        """How many predictions are right: one number, on its device."""

    def evaluating(self, net: Any) -> AbstractContextManager[Any]:
        """The time of an evaluation: without gradients, in evaluation mode."""
        return nullcontext()

    def evaluate_accuracy_gpu(self, net: Any, data_iter: Any, device: Native = None) -> float:
        """The share of right predictions, counted on the device."""
        metric = Accumulator(2)
        with self.evaluating(net) as home:
            device = device or home
            for x, y in data_iter:
                x, y = (self.to(array, device) if device else array for array in (x, y))
                metric.add(self.accuracy(net(x), y), len(y))
        return metric[0] / metric[1]

    def evaluate_accuracy_gpus(self, net: Any, data_iter: Any, split_f: Any = None) -> float:
        """The same, of a model, on all devices at once. Batches are cut as always, so split_f is not needed."""
        trainer = samesteps.Trainer(devices=self.num_gpus() or "cpu", progress=False)
        return float(trainer.evaluate(net, Data(self.collected(data_iter)))["accuracy"] or 0)

    # Data-parallel training by hand

    @abstractmethod
    def lenet(self, X: Array, params: Sequence[Array]) -> Array:
        """LeNet of the chapter, as a function of a list of parameters."""

    @abstractmethod
    def loss(self, y_hat: Array, y: Array) -> Array:
        """Softmax cross-entropy of each example."""

    @abstractmethod
    def gradients(self, net: Any, loss: Any, params: Sequence[Array], X: Array, y: Array) -> Sequence[Array]:
        """The gradient of the summed loss by each of the parameters."""

    def init_params(self, seed: int | None = None) -> list[Array]:
        """W1, b1, … W4, b4 of LeNet: N(0, 1) · 0.01, and zeros."""
        weights = models.lenet(Batches.seed if seed is None else seed).values()
        return [self.array(np.ascontiguousarray(w.T) if w.ndim == 2 else w) for w in weights]

    def sgd(self, params: list[Array], *rest: Any) -> None:
        """sgd(params, lr, batch_size): one update from the parameters' gradients, or from sgd(params, grads, lr, batch_size)."""
        grads, lr, batch_size = rest if len(rest) == 3 else ([p.grad for p in params], *rest)
        for i, (p, g) in enumerate(zip(params, grads, strict=True)):
            params[i] = self._backend.assign(p, p - lr * g / batch_size)

    def get_params(self, params: Sequence[Array], device: Native) -> list[Array]:
        """A copy of the parameters on a device, with gradients attached. It shares storage with nothing."""
        return [self._backend.copy(p, self.device(device), gradient=True) for p in params]

    def allreduce(self, data: list[Array]) -> None:
        """Sum a list of arrays, one per device, and leave the sum in all of them."""
        data[:] = by_hand.allreduce(data)

    def split_batch(self, X: Array, y: Array, devices: Sequence[Native]) -> tuple[list[Array], list[Array]]:
        """X and y cut over devices: sizes differ by at most one."""
        return by_hand.split_batch(X, y, [self.device(native) for native in devices])

    def train_batch(self, X: Array, y: Array, device_params: list[list[Array]], devices: Sequence[Native], lr: float,
                    net: Any = None, loss: Any = None) -> None:  # fmt: skip
        """One step on one batch: the same bits on any number of devices up to 8, as the batch is always cut into 8 shards."""
        homes, put = [self.device(native) for native in devices], self._backend.put
        folds = [Fold[Array](SHARDS, lambda left, right: left + right) for _ in device_params[0]]
        spans = iter(enumerate(cut(len(X), SHARDS)))
        for params, home, (lo, hi) in zip(device_params, homes, cut(SHARDS, len(homes)), strict=True):
            for shard, (start, end) in (next(spans) for _ in range(lo, hi)):
                x_shard, y_shard = put(X[start:end], home), put(y[start:end], home)
                grads = self.gradients(net or self.lenet, loss or self.loss, params, x_shard, y_shard) if start < end else [
                    self._backend.zeros_like(p) for p in params]  # fmt: skip
                for fold, gradient in zip(folds, grads, strict=True):
                    fold.add((shard, shard + 1), put(gradient, homes[0]))
        for params, home in zip(device_params, homes, strict=True):
            Names.sgd(self, params, [put(fold.total(), home) for fold in folds], lr, len(X))

    def train(self, num_gpus: int, batch_size: int, lr: float, num_epochs: int = 10, params: Any = None) -> Run:
        """The chapter's job: LeNet on Fashion-MNIST on num_gpus devices. The weights do not depend on how many there are."""
        devices, names = [self.try_gpu(i) for i in range(num_gpus)], models.lenet()
        n = Batches.examples or None
        (x, y), (test_x, test_y) = fashion.load()
        given = None if params is None else dict(zip(names, map(self._backend.get, params), strict=True))
        start = {name: w.T if w.ndim == 2 else w for name, w in given.items()} if given else None
        model = find.imported(f"samestep.models.{self.framework}", self.framework).lenet(Batches.seed)
        trainer = samesteps.Trainer(
            num_epochs, batch_size, lr=lr, seed=Batches.seed, progress=False, devices=list(map(self.device, devices)) or "cpu"
        )  # fmt: skip
        run = trainer.fit(model, Data((x[:n], y[:n]), (test_x[:n], test_y[:n])), weights=start)
        animator = drawing.Animator("epoch", "test acc", xlim=[1, num_epochs])
        for row in run.history:
            animator.add(row["epoch"], (row["test_accuracy"],))
        seconds = sum(row["seconds"] for row in run.history) / num_epochs
        shown = [getattr(device, "_device_name", device) for device in devices]  # TensorFlow's says nothing of itself
        print(f"test acc: {run.history[-1]['test_accuracy']:.2f}, {seconds:.1f} sec/epoch on {shown}")
        return run

    # Models

    def resnet18(self, num_classes: int, in_channels: int = 1) -> Any:
        make = find.imported(f"samestep.models.{self.framework}", self.framework).resnet18
        return make(channels=in_channels, classes=num_classes, seed=Batches.seed)

    def take(self, model: Any, run: Run) -> None:
        """Put the trained weights into the user's model."""

    def manual_seed(self, seed: int) -> None:
        """Of samestep's draws; a framework adds its own generator."""
        Batches.seed = seed


def door(names: Names) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of the module that has these names."""
    public = sorted(name for name in chain(dir(names), vars(names)) if not name.startswith("_"))

    def get(name: str) -> Any:
        if name not in public:
            raise AttributeError(f"samestep.d2l.{names.framework} has no {name!r}: it has {', '.join(public)}")
        return getattr(names, name)

    return get, lambda: public
