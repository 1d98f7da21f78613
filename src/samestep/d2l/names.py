"""The names that the chapters use as `d2l.…`, with the chapters' signatures. What differs by framework is in its own file.

Each is thin over samestep, and mends what the chapters' own code does wrong: replicas never share storage, sums go along
one tree, nothing is lost of uneven batches, and numbers stay on their device until somebody asks for them.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace as Functions
from typing import Any

import numpy as np

from samestep import draws, lab, models
from samestep.backends import arrays, find
from samestep.backends.base import Array
from samestep.d2l import drawing
from samestep.data import fashion
from samestep.data.examples import Data
from samestep.devices import Device, cpu, gpu
from samestep.processes import by_hand
from samestep.runs.run import Run
from samestep.training import trainer as samesteps

Native = Any  # a device, as the framework has it


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
        return self.sum() / len(self.times)

    def sum(self) -> float:
        return sum(self.times)


class Accumulator:
    """Sums of n numbers. They stay on their device until one is asked for: `add` does not wait."""

    def __init__(self, n: int) -> None:
        self.data: list[Any] = [0.0] * n

    def add(self, *args: Any) -> None:
        self.data = [a + (b.detach() if hasattr(b, "detach") else b) for a, b in zip(self.data, args, strict=True)]

    def __getitem__(self, i: int) -> float:
        return float(self.data[i])


def add_to_class(Class: type) -> Callable[[Callable[..., Any]], None]:
    """Register a function as a method of a class that exists already."""
    return lambda function: setattr(Class, function.__name__, function)


class HyperParameters:
    """Has the arguments of its `__init__` as attributes, once that has called `save_hyperparameters`."""

    def save_hyperparameters(self, ignore: Sequence[str] = ()) -> None:
        frame: Any = inspect.currentframe()
        code, values = frame.f_back.f_code, frame.f_back.f_locals
        names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
        self.hparams = {name: values[name] for name in names if name not in ignore and not name.startswith("_")}
        for name, value in self.hparams.items():
            setattr(self, name, value)


class Taught(HyperParameters):
    """What a Module of the chapters is beside a model of its framework: a `net`, a rate `lr`, and a `board`."""

    def __init__(self) -> None:
        super().__init__()
        self.board = drawing.ProgressBoard()

    def forward(self, X: Any) -> Any:
        return self.net(X)

    call = forward


class Batches:
    """Batches of arrays: as often as it is iterated over, in another order. None is dropped."""

    examples: int | None = None  # at most so many are given
    seed = 0

    def __init__(self, d2l: Names, x: Any, y: Any, batch_size: int, resize: Any = None, shuffled: bool = True) -> None:
        self.x, self.y, self.batch_size, self.shuffled, self.epoch = x, y, batch_size, shuffled, 0
        self._d2l, self._side = d2l, max(resize) if isinstance(resize, (tuple, list)) else resize

    def __len__(self) -> int:
        return -(-len(self.x) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Array, Array]]:
        way = "without_replacement" if self.shuffled else "in_order"
        order = draws.order(Batches.seed, self.epoch, len(self.x), way)
        self.epoch += 1
        for start in range(0, len(self.x), self.batch_size):
            rows = order[start : start + self.batch_size]
            x = self._resized(self.x[rows]).transpose((0, 2, 3, 1) if self._d2l._channels_last else (0, 1, 2, 3))
            yield self._d2l._array(x), self._d2l._array(self.y[rows])

    def _resized(self, x: Any) -> Any:
        """Images of another size, by the two nearest pixels in each direction."""
        old, new = x.shape[-1], self._side or x.shape[-1]
        at = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
        near = np.maximum(0, 1 - np.abs(at[:, None] - np.arange(old))).astype(np.float32)
        return x if old == new else near @ x @ near.T


def _fashion() -> list[tuple[Any, Any]]:
    """What of Fashion-MNIST is used: (x, y) to train on, and to test on."""
    return [(x[: Batches.examples], y[: Batches.examples]) for x, y in fashion.load()]


class Trainer(HyperParameters):
    """The chapters' trainer of the chapters' modules, with samestep's step on as many devices as `num_gpus` says.

    `fit` leaves the trained weights in the model, as in the chapters (JAX's models hold none: run.model does), draws on the
    model's board, and returns the run.
    """

    d2l: Names

    def __init__(self, max_epochs: int, num_gpus: int = 0, gradient_clip_val: float = 0) -> None:
        self.save_hyperparameters()
        self.gpus = [self.d2l.gpu(i) for i in range(min(num_gpus, self.d2l.num_gpus()))]

    def prepare_batch(self, batch: Sequence[Array]) -> list[Array]:
        return [self.d2l.to(array, self.gpus[0]) for array in batch] if self.gpus else list(batch)

    def prepare_model(self, model: Any) -> None:
        self.model, model.board.xlim = model, [0, self.max_epochs]
        object.__setattr__(model, "trainer", self)  # not as a part of the model; and JAX's are frozen

    def fit(self, model: Any, data: Any) -> Run:
        """Train on data with train_dataloader(), val_dataloader() and a batch_size."""
        self.prepare_model(model)
        own: Any = {"optimizer": model.configure_optimizers()} if hasattr(model, "configure_optimizers") else {}
        trainer = samesteps.Trainer(
            self.max_epochs, data.batch_size, devices=self.num_gpus or "cpu", seed=Batches.seed, progress=False,
            gradient_clip_val=self.gradient_clip_val, lr=None if own else getattr(model, "lr", None),
            loss=getattr(model, "loss", None), **own,
        )  # fmt: skip
        run = trainer.fit(model, Data(*map(self.d2l._collected, (data.train_dataloader(), data.val_dataloader()))))
        self.d2l._take(model, run)
        for row in run.history:
            for name, label in (("train_loss", "train_loss"), ("test_loss", "val_loss"), ("test_accuracy", "val_acc")):
                if row[name] is not None:
                    model.board.draw(row["epoch"], row[name], label)
        return run


class Names:
    """What `d2l` is, for one framework. Names with a _ are what a framework says or does otherwise."""

    _virtual = False  # whether GPUs that are not there are stood for by those that are
    Timer, Accumulator, HyperParameters, add_to_class = Timer, Accumulator, HyperParameters, staticmethod(add_to_class)
    Animator, ProgressBoard, plot = drawing.Animator, drawing.ProgressBoard, staticmethod(drawing.plot)
    train_2d, show_trace_2d = staticmethod(lab.train_2d), staticmethod(lab.show_trace_2d)
    plt = property(lambda self: drawing.pyplot())
    lenet = property(lambda self: self._models.lenet_function)  # a function of (X, params)
    loss: Callable[[Array, Array], Array]  # softmax cross-entropy of each example
    _framework: str
    _native: Callable[[Device], Native]  # the framework's own object for a device
    _device: Callable[[Native], Device]  # the inverse
    _gradients: Callable[..., Sequence[Array]]  # of the summed loss, from (net, loss, params, X, y)
    _no_grad: Callable[[], Any] = nullcontext
    _channels_last = False  # of images
    _loader = ""  # the method of a model that takes its weights
    _seed: Any = staticmethod(lambda seed: None)  # sets the framework's generator
    _functions: Functions  # the framework's own that the chapters call d2l's

    def __init__(self) -> None:
        self._backend, self._models = find.load(self._framework), getattr(models, self._framework)
        self.Trainer = type("Trainer", (Trainer,), {"d2l": self, "__doc__": Trainer.__doc__})

    # Devices

    def cpu(self) -> Native:
        return self._native(cpu())

    def gpu(self, i: int = 0) -> Native:
        """GPU number i, whether it is there or not."""
        return self._native(gpu(i))

    def num_gpus(self) -> int:
        return arrays.num_gpus(self._backend)

    def try_gpu(self, i: int = 0) -> Native:
        """gpu(i) if it is there, else cpu(); while a chapter runs, one GPU stands for several."""
        there = self.num_gpus()
        return self.gpu(i % there) if there and (i < there or self._virtual) else self.cpu()

    def try_all_gpus(self) -> list[Native]:
        """All GPUs, or [cpu()] if there is none."""
        return [self.gpu(i) for i in range(self.num_gpus())] or [self.cpu()]

    def to(self, x: Array, device: Native) -> Array:
        """The array on the device: the same object when it is there already."""
        return self._backend.put(x, self._device(device))

    # Data

    def _array(self, x: Any) -> Array:
        """An array of NumPy as one of the framework, on the CPU."""
        return self._backend.put(x, cpu())

    def _collected(self, batches: Iterable[tuple[Array, Array]]) -> Any:
        """The examples of all batches as two arrays of NumPy."""
        x, y = zip(*(map(self._backend.get, batch) for batch in batches), strict=True)
        return np.concatenate(x), np.concatenate(y)

    def load_data_fashion_mnist(self, batch_size: int, resize: Any = None) -> Sequence[Any]:
        """Batches to train on, in another order in every epoch, and batches to test on."""
        return [Batches(self, *part, batch_size, resize, i == 0) for i, part in enumerate(_fashion())]

    def FashionMNIST(self, batch_size: int = 64, resize: Any = (28, 28)) -> Any:
        """The same for a Trainer."""
        train, val = (lambda i=i: self.load_data_fashion_mnist(batch_size, resize)[i] for i in (0, 1))
        return Functions(batch_size=batch_size, train_dataloader=train, val_dataloader=val)

    # Scores

    def accuracy(self, y_hat: Array, y: Array) -> Any:
        """How many predictions are right: one number, on its device."""
        return ((y_hat.argmax(1) if y_hat.ndim > 1 else y_hat) == y).sum() * 1.0

    def _home(self, net: Any) -> Native:
        """The device of a model's parameters; None: it does not say."""
        first = next(iter(net.parameters()), None) if hasattr(net, "parameters") else None
        return None if first is None else self._native(self._backend.device_of(first))

    def evaluate_accuracy_gpu(self, net: Any, data_iter: Any, device: Native = None) -> float:
        """The share of right predictions, counted on the device, in evaluation mode."""
        metric, trains, device = Accumulator(2), getattr(net, "training", False), device or self._home(net)
        if trains:
            net.eval()
        with self._no_grad():
            for x, y in data_iter:
                x, y = (self.to(array, device) if device else array for array in (x, y))
                metric.add(self.accuracy(net(x), y), len(y))
        if trains:
            net.train()
        return metric[0] / metric[1]

    def evaluate_accuracy_gpus(self, net: Any, data_iter: Any, split_f: Any = None) -> float:
        """The same, of a model, on all devices at once. Batches are cut as always: split_f is not needed."""
        trainer = samesteps.Trainer(devices=self.num_gpus() or "cpu", progress=False)
        return float(trainer.evaluate(net, Data(self._collected(data_iter)))["accuracy"] or 0)

    # Data-parallel training by hand

    def init_params(self, seed: int | None = None) -> list[Array]:
        """W1, b1, … W4, b4 of LeNet: N(0, 1) · 0.01, and zeros."""
        return list(map(self._array, models.lenet_params(Batches.seed if seed is None else seed)))

    def sgd(self, params: list[Array], *rest: Any) -> None:
        """One update: sgd(params, lr, batch_size) from the parameters' gradients; sgd(params, grads, lr, batch_size)."""
        grads, lr, batch_size = rest if len(rest) == 3 else ([p.grad for p in params], *rest)
        with self._no_grad():
            for i, (p, g) in enumerate(zip(params, grads, strict=True)):
                params[i] = self._backend.assign(p, p - lr * g / batch_size)
                if len(rest) == 2:
                    self._backend.assign(g, g * 0)  # a backward pass may add to it

    def get_params(self, params: Sequence[Array], device: Native) -> list[Array]:
        """A copy of the parameters on a device, with gradients attached. It shares storage with nothing."""
        return by_hand.replicate(params, self._device(device))

    def allreduce(self, data: list[Array]) -> None:
        """Sum a list of arrays, one per device, and leave the sum in all of them."""
        data[:] = by_hand.allreduce(data)

    def split_batch(self, X: Array, y: Array, devices: Sequence[Native]) -> tuple[list[Array], list[Array]]:
        """X and y cut over devices: sizes differ by at most one."""
        return by_hand.split_batch(X, y, [self._device(native) for native in devices])

    def train_batch(self, X: Array, y: Array, device_params: list[list[Array]], devices: Sequence[Native], lr: float,
                    net: Any = None, loss: Any = None) -> None:  # fmt: skip
        """One step on one batch: the same bits on any number of devices up to 8, as a batch is always cut into 8 shards."""
        homes, net, loss = list(map(self._device, devices)), net or self.lenet, loss or self.loss
        found = by_hand.gradient(X, y, device_params, homes, lambda *given: self._gradients(net, loss, *given))
        for params, grads in zip(device_params, found, strict=True):
            self.sgd(params, grads, lr, len(X))

    def train(self, num_gpus: int, batch_size: int, lr: float, num_epochs: int = 10, params: Any = None) -> Run:
        """The chapter's job: LeNet on Fashion-MNIST on num_gpus devices. The weights do not depend on how many there are."""
        settings: Any = {"lr": lr, "devices": num_gpus or "cpu", "seed": Batches.seed, "progress": False}
        given = zip(models.lenet(), map(self._backend.get, params or ()), strict=False)
        start = {name: array.T if array.ndim == 2 else array for name, array in given}
        model, data = self._models.lenet(Batches.seed), Data(*_fashion())
        run = samesteps.Trainer(num_epochs, batch_size, **settings).fit(model, data, weights=start or None)
        animator = drawing.Animator("epoch", "test acc", xlim=[1, num_epochs])
        for row in run.history:
            animator.add(row["epoch"], (row["test_accuracy"],))
        seconds = sum(row["seconds"] for row in run.history) / num_epochs
        devices = map(self._native, map(Device.of, run.devices))  # TensorFlow's say nothing of themselves
        shown = [getattr(device, "_device_name", device) for device in devices]
        print(f"test acc: {run.history[-1]['test_accuracy']:.2f}, {seconds:.1f} sec/epoch on {shown}")
        return run

    def resnet18(self, num_classes: int, in_channels: int = 1) -> Any:
        return self._models.resnet18(channels=in_channels, classes=num_classes, seed=Batches.seed)

    def _take(self, model: Any, run: Run) -> None:
        """Put the trained weights into the user's model."""
        if self._loader:
            getattr(model, self._loader)(run.state_dict())

    def manual_seed(self, seed: int) -> None:
        """Of samestep's draws and of the framework's generator."""
        Batches.seed = seed
        self._seed(seed)

    def __getattr__(self, name: str) -> Any:
        if name in vars(self._functions):
            return getattr(self._functions, name)
        raise AttributeError(f"samestep.d2l.{self._framework} has no {name!r}: it has {', '.join(dir(self))}")

    def __dir__(self) -> list[str]:
        names = {*dir(type(self)), *vars(self), *vars(self._functions)}
        return sorted(name for name in names if not name.startswith("_"))
