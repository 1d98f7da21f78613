"""The defects of the chapters' code that samestep settles: each is shown as the chapter has it, then as it is here.

The rows of PyTorch, and those that need no framework. The other frameworks' are in conformance/test_defects.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from schedules.test_chapters import CosineScheduler, FactorScheduler, MultiFactorScheduler
from torch import Tensor, nn
from torch.nn import functional as F

import samestep as ss
from samestep import lab
from samestep.backends import find
from samestep.d2l import torch as d2l
from samestep.d2l.names import Batches
from samestep.d2l.standins import standing_in
from samestep.d2l.torch import names
from samestep.data import fashion
from samestep.devices import resolve
from samestep.training.replicas import Replicas

CPU = torch.device("cpu")
LR = 0.2
Given = list[tuple[Tensor, Tensor]]

# Chapters 000 and 001, PyTorch: LeNet by hand on several devices. `scatter` takes no CPU: while a chapter runs, samestep's
# stand-in does. `sgd` is the book's d2l.sgd.


def lenet(X: Tensor, params: Sequence[Tensor]) -> Tensor:
    h1_conv = F.conv2d(input=X, weight=params[0], bias=params[1])
    h1 = F.avg_pool2d(input=F.relu(h1_conv), kernel_size=(2, 2), stride=(2, 2))
    h2_conv = F.conv2d(input=h1, weight=params[2], bias=params[3])
    h2 = F.avg_pool2d(input=F.relu(h2_conv), kernel_size=(2, 2), stride=(2, 2))
    h2 = h2.reshape(h2.shape[0], -1)
    h3 = F.relu(torch.mm(h2, params[4]) + params[5])
    return torch.mm(h3, params[6]) + params[7]


loss = nn.CrossEntropyLoss(reduction="none")


def get_params(params: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    new_params = [p.to(device) for p in params]
    for p in new_params:
        p.requires_grad_()
    return new_params


def allreduce(data: list[Tensor]) -> None:
    for i in range(1, len(data)):
        data[0][:] += data[i].to(data[0].device)
    for i in range(1, len(data)):
        data[i][:] = data[0].to(data[i].device)


def split_batch(X: Tensor, y: Tensor, devices: Sequence[torch.device]) -> tuple[Any, Any]:
    assert X.shape[0] == y.shape[0]
    return nn.parallel.scatter(X, devices), nn.parallel.scatter(y, devices)


def sgd(params: Sequence[Tensor], lr: float, batch_size: int) -> None:
    with torch.no_grad():
        for param in params:
            param -= lr * param.grad / batch_size
            param.grad.zero_()


def train_batch(X: Tensor, y: Tensor, device_params: Any, devices: Sequence[torch.device], lr: float) -> None:
    X_shards, y_shards = split_batch(X, y, devices)
    ls = [
        loss(lenet(X_shard, device_W), y_shard).sum()
        for X_shard, y_shard, device_W in zip(X_shards, y_shards, device_params, strict=False)
    ]
    for l in ls:  # noqa: E741
        l.backward()
    with torch.no_grad():
        for i in range(len(device_params[0])):
            allreduce([device_params[c][i].grad for c in range(len(devices))])
    for param in device_params:
        sgd(param, lr, X.shape[0])


# What both are given


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several threads of PyTorch wait for each other, for long where other tests use the same cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Given]:
    """So many batches of 256 from Fashion-MNIST."""

    def absent(*_: Any) -> None:
        pytest.skip("Fashion-MNIST is not on this machine, and tests fetch nothing")

    def found(n: int) -> Given:
        monkeypatch.setattr(Batches, "examples", 256 * n)
        monkeypatch.setattr(fashion, "_fetch", absent)
        return list(d2l.load_data_fashion_mnist(256)[0])

    return found


@pytest.fixture
def pyplot() -> Iterator[None]:
    """`train` and the chapters' Trainer draw."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    yield
    pyplot.close("all")


def made(n: int) -> tuple[Tensor, Tensor]:
    """Images and labels from random numbers."""
    generator = torch.Generator().manual_seed(n)
    return torch.rand((n, 1, 28, 28), generator=generator), torch.randint(10, (n,), generator=generator)


def copies(params: Sequence[Tensor]) -> list[Tensor]:
    """What the chapter's get_params gives on another GPU."""
    return [p.detach().clone().requires_grad_() for p in params]


def trained(train_batch: Any, replicas: list[list[Tensor]], given: Given) -> list[Tensor]:
    """The first replica after a step on each batch, on CPUs: a chapter's stand-ins are there."""
    with standing_in("torch"):
        for X, y in given:
            train_batch(X, y, replicas, [CPU] * len(replicas), LR)
    return replicas[0]


def bits(params: Sequence[Tensor]) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in params]


def apart(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return max(float((p - q).detach().abs().max()) for p, q in zip(a, b, strict=True))


def small(n: int = 24) -> tuple[nn.Module, ss.Data]:
    torch.manual_seed(0)
    x, y = torch.randn(n, 5), torch.randint(3, (n,))
    return nn.Linear(5, 3), ss.Data(train=(x.numpy(), y.numpy()))


def fit(**settings: Any) -> ss.Run:
    """Four steps an epoch."""
    return ss.Trainer(batch_size=6, progress=False, **settings).fit(*small())


# The chapter's training, with its own definitions


def test_the_chapters_training_on_one_device_is_ours_to_rounding_after_50_steps(batches: Any) -> None:
    """From the same start on the same batches: 2e-9 apart after a step, about 1e-4 after 50, where weights have moved by 0.03.

    Rounding grows by itself that far: the chapter's own copies on two devices are as far from its one device.
    """
    given, params = batches(50), d2l.init_params()
    theirs, ours = [get_params(d2l.init_params(), CPU)], [d2l.get_params(params, CPU)]
    assert apart(trained(train_batch, theirs, given[:1]), trained(d2l.train_batch, ours, given[:1])) <= 1e-8
    assert apart(trained(train_batch, theirs, given[1:]), trained(d2l.train_batch, ours, given[1:])) <= 1e-3
    assert apart(ours[0], params) > 0.01, "training changed little: there is nothing to compare"


def test_the_chapters_training_on_two_devices_that_are_the_cpu_is_not_that_on_one(batches: Any) -> None:
    """Its replicas are one and step twice as far. Ours are, to the bit, where one device is."""
    given = batches(2)

    def on(k: int, train_batch: Any, get_params: Any) -> list[Tensor]:
        params = d2l.init_params()
        return trained(train_batch, [get_params(params, CPU) for _ in range(k)], given)

    theirs, ours = (
        [on(k, *way) for k in (1, 2)] for way in ((train_batch, get_params), (d2l.train_batch, d2l.get_params))
    )
    assert apart(*theirs) > 0.005
    assert bits(ours[0]) == bits(ours[1])
    assert apart(ours[0], theirs[0]) <= 1e-6


# The rows, in the order of the table


def test_sums_in_device_order_drift_apart() -> None:
    """Sums in device order: k=1 and k=2 drift apart. One fixed tree over fixed shards: same bits for every k."""
    given = [made(256), made(100), made(77)]
    one, two = (trained(train_batch, [copies(d2l.init_params()) for _ in range(k)], given) for k in (1, 2))
    assert bits(one) != bits(two)
    assert 0 < apart(one, two) <= 1e-5  # by rounding alone
    ours = bits(trained(d2l.train_batch, [d2l.get_params(d2l.init_params(), CPU)], given))
    for k in (2, 3, 8):
        replicas = [d2l.get_params(d2l.init_params(), CPU) for _ in range(k)]
        trained(d2l.train_batch, replicas, given)
        assert all(bits(replica) == ours for replica in replicas)


class TestGetParamsAliases:
    """PyTorch's get_params aliases what is already on the device. Replicas never share storage; a new fit starts anew."""

    @pytest.mark.parametrize("k", [1, 2, 3])
    def test_replicas_step_too_far(self, k: int) -> None:
        """2^(k−1) times."""
        (X, y), params = made(12), d2l.init_params()
        before, summed = copies(params), copies(params)
        for x, labels in zip(X.chunk(k), y.chunk(k), strict=True):
            loss(lenet(x, summed), labels).sum().backward()
        replicas = [get_params(params, CPU) for _ in range(k)]
        assert all(replica[i] is params[i] for replica in replicas for i in range(8))
        theirs = trained(train_batch, replicas, [(X, y)])
        too_far = [b - LR * (2 ** (k - 1) * s.grad) / 12 for b, s in zip(before, summed, strict=True)]
        assert bits(theirs) == bits(too_far) != bits(before)

        ours = [d2l.get_params(before, CPU) for _ in range(k)]
        assert len({p.data_ptr() for replica in [before, *ours] for p in replica}) == 8 * (k + 1)
        assert all(not p.grad.any() for replica in ours for p in replica)
        right = trained(d2l.train_batch, [d2l.get_params(before, CPU)], [(X, y)])
        trained(d2l.train_batch, ours, [(X, y)])
        assert all(bits(replica) == bits(right) for replica in ours)

    def test_a_second_training_goes_on_from_the_first(self) -> None:
        given, params = [made(12)], d2l.init_params()
        first = bits(trained(train_batch, [get_params(params, CPU)], given))
        assert bits(params) == first != bits(d2l.init_params())
        assert bits(trained(train_batch, [get_params(params, CPU)], given)) != first

        params = d2l.init_params()
        first = bits(trained(d2l.train_batch, [d2l.get_params(params, CPU)], given))
        assert bits(params) == bits(d2l.init_params()) != first
        assert bits(trained(d2l.train_batch, [d2l.get_params(params, CPU)], given)) == first
        model, data = small()
        runs = [ss.Trainer(1, 6, lr=LR, progress=False).fit(model, data) for _ in range(2)]
        assert runs[0].fingerprint == runs[1].fingerprint != runs[0].recipe["initial"]


def test_uneven_batches_give_fewer_shards_than_devices() -> None:
    """Here shard sizes differ by at most one, and a batch smaller than the shards leaves some empty; no example is lost."""
    X, y = made(5)
    with standing_in("torch"):
        assert [len(piece) for piece in split_batch(X, y, [CPU] * 4)[0]] == [2, 2, 1]
    with pytest.raises(AttributeError, match="NoneType"):  # the gradient of the replica that got nothing
        trained(train_batch, [copies(d2l.init_params()) for _ in range(4)], [(X, y)])
    assert [len(piece) for piece in d2l.split_batch(X, y, [CPU] * 4)[0]] == [2, 1, 1, 1]
    assert sorted(len(piece) for piece in d2l.split_batch(X, y, [CPU] * 8)[0]) == [0] * 3 + [1] * 5
    ours = [[d2l.get_params(d2l.init_params(), CPU) for _ in range(k)] for k in (1, 4, 8)]
    one, four, eight = (bits(trained(d2l.train_batch, replicas, [(X, y)])) for replicas in ours)
    assert one == four == eight != bits(d2l.init_params())


def test_nothing_multi_device_runs_without_gpus() -> None:
    """Nothing multi-device runs without GPUs. Any number of replicas on any machine: a device may be used more than once."""
    X, y = made(4)
    with pytest.raises(ValueError, match="non cpu device"):
        split_batch(X, y, [CPU, CPU])  # what try_gpu(0) and try_gpu(1) are
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError, AttributeError)):
            nn.parallel.scatter(torch.arange(20).reshape(4, 5), [torch.device("cuda:0"), torch.device("cuda:1")])
    pieces, labels = d2l.split_batch(X, y, [CPU, CPU, CPU])
    assert [len(piece) for piece in pieces] == [len(piece) for piece in labels] == [2, 1, 1]
    runs = [fit(max_epochs=1, devices=["cpu"] * k) for k in (1, 3, 8)]
    assert [run.devices for run in runs] == [["cpu"], ["cpu"] * 3, ["cpu"] * 8]
    assert len({run.fingerprint for run in runs}) == 1


def test_one_gpu_has_two_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same row: with one GPU, the chapter's two devices are a GPU and a CPU. Here, the GPU is used twice."""

    monkeypatch.setattr(names, "num_gpus", lambda: 1)
    assert [d2l.try_gpu(i) for i in range(2)] == [d2l.gpu(0), CPU]
    one = SimpleNamespace(devices=lambda: [ss.cpu(), ss.gpu(0)], require=lambda device: None)
    asked = list[Any]()
    monkeypatch.setattr(fashion, "load", lambda: (made(2), made(2)))
    monkeypatch.setattr(
        "samestep.training.trainer.Trainer.fit", lambda self, *_, **__: asked.append(self.devices) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        d2l.train(num_gpus=2, batch_size=256, lr=LR)
    assert resolve(asked[0], shards=8, backend=one) == [ss.gpu(0), ss.gpu(0)]


def test_synchronize_waits_for_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`synchronize()` waits for one device. Here for all: in a chapter that is run, and at the end of an epoch of a fit."""
    busy, current = {0, 1, 2}, [0]

    class On:
        """torch.cuda.device on a machine of three GPUs."""

        def __init__(self, device: Any) -> None:
            self.index = current[-1] if device is None else device

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *_: Any) -> None:
            current.pop()

    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "_lazy_init", lambda: None)
        patched.setattr(torch.cuda, "device", On)
        patched.setattr(torch._C, "_cuda_synchronize", lambda: busy.discard(current[-1]), raising=False)
        patched.setattr(torch.cuda, "device_count", lambda: 3)
        torch.cuda.synchronize()
        assert busy == {1, 2}
        with standing_in("torch"):
            torch.cuda.synchronize()
        assert busy == set()

    read, original = [], Replicas.fingerprints

    def fingerprints(self: Replicas) -> list[int]:
        read.append(original(self))
        return read[-1]

    monkeypatch.setattr(Replicas, "fingerprints", fingerprints)
    fit(max_epochs=2, devices=["cpu"] * 3)
    assert [len(of_all) for of_all in read] == [3, 3]  # of every replica: to read it is to wait for its device


def epochs_of_the_chapter(rate: float, scheduler: Any, epochs: int) -> Iterator[tuple[float, bool]]:
    """Chapter 003's `train`: the rate of each epoch, and whether the weights have moved in it."""
    net, data = small()
    x, y = torch.from_numpy(data.train.x), torch.from_numpy(data.train.y)
    trainer = torch.optim.SGD(net.parameters(), lr=rate)
    for epoch in range(epochs):
        used, before = trainer.param_groups[0]["lr"], bits(list(net.parameters()))
        for rows in torch.arange(24).split(6):
            trainer.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            trainer.step()
        for param_group in trainer.param_groups:
            param_group["lr"] = scheduler(epoch)
        yield used, bits(list(net.parameters())) != before


def test_the_rate_of_an_epoch_is_applied_after_it() -> None:
    """Warm-up starts at full rate, then a dead epoch. The rate for update t is lr(t), set before it."""
    theirs = list(epochs_of_the_chapter(0.3, CosineScheduler(20, 0.3, 0.01, warmup_steps=5), 4))
    assert theirs == [(0.3, True), (0.0, False), (0.06, True), (0.12, True)]
    schedule = ss.cosine(0.3, 15, end=0.01).warmup(5)
    with pytest.warns(UserWarning, match="is 0 through the whole first epoch"):  # it is what was asked for, and said
        run = fit(max_epochs=4, schedule=schedule.in_epochs())
    assert [row["lr"] for row in run.history] == [schedule(e) for e in range(4)] == [0.0, 0.06, 0.12, 0.18]
    assert len(set(run.fingerprints[:4])) == 1  # epoch 0, of rate 0
    assert len(set(run.fingerprints[3:])) == 13  # every step from then on
    once = fit(max_epochs=1, schedule=lambda t: 0.3 if t == 0 else 0.0)
    assert len(set(once.fingerprints)) == 1  # the first step moves, no other
    assert once.fingerprint != once.recipe["initial"]
    assert fit(max_epochs=1, schedule=0.0).fingerprint == run.recipe["initial"] != run.fingerprint


class TestAScheduleChangesWhenItIsCalled:
    """Calling or plotting changes it; cosine fails first called past T; resuming forgets. It is a pure function of t here."""

    def test_calling_and_plotting(self) -> None:
        theirs = FactorScheduler(0.9, 1e-2, 2.0)
        assert (theirs(0), theirs(0)) == (1.8, 1.62)
        plotted = [theirs(t) for t in range(50)]
        assert theirs(0) == 1e-2 != plotted[0]
        ours = ss.geometric(2, 0.9, floor=1e-2).shift(1)
        assert (ours(0), ours(0)) == (1.8, 1.8)
        fresh = FactorScheduler(0.9, 1e-2, 2.0)
        assert [ours(t) for t in range(50)] == [ours(t) for t in range(50)] == [fresh(t) for t in range(50)]
        assert ours(0) == 1.8

    def test_cosine_past_its_end(self) -> None:
        with pytest.raises(AttributeError, match="base_lr"):
            CosineScheduler(20, 0.3, 0.01)(21)
        assert ss.cosine(0.3, 20, end=0.01)(21) == 0.01

    def test_resuming(self) -> None:
        def rates(scheduler: Any, first: int) -> list[float]:
            return [scheduler(epoch) for epoch in range(first, 40)]

        whole = rates(MultiFactorScheduler([15, 30], 0.5, 0.5), 0)
        assert rates(MultiFactorScheduler([15, 30], 0.5, 0.5), 20)[0] == 0.5 != whole[20]
        assert rates(ss.drops(0.5, [15, 30], 0.5), 20) == whole[20:]


def test_try_all_gpus_returns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`try_all_gpus()` returns [], against its own docstring. Here [cpu()]."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert [torch.device(f"cuda:{i}") for i in range(torch.cuda.device_count())] == []
    assert d2l.try_all_gpus() == [CPU] == [d2l.cpu()]
    assert ss.try_all_gpus("torch") == [ss.cpu()]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert d2l.try_all_gpus() == [torch.device("cuda:0"), torch.device("cuda:1")]


def test_a_trainer_with_two_gpus_uses_one(monkeypatch: pytest.MonkeyPatch, pyplot: None) -> None:
    """`Trainer(num_gpus=2)` uses one GPU. Here both."""
    used: list[torch.device] = []

    class Moved:
        """A model or an array: says where it is moved to."""

        def to(self, device: torch.device) -> Moved:
            used.append(device)
            return self

    class Trainer:
        def __init__(self, num_gpus: int) -> None:
            self.gpus = [d2l.gpu(i) for i in range(min(num_gpus, d2l.num_gpus()))]

        def prepare_batch(self, batch: Any) -> Any:
            if self.gpus:
                batch = [a.to(self.gpus[0]) for a in batch]
            return batch

        def prepare_model(self, model: Any) -> None:
            if self.gpus:
                model.to(self.gpus[0])

    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "device_count", lambda: 2)
        theirs = Trainer(num_gpus=2)
        theirs.prepare_model(Moved())
        for _ in range(3):
            theirs.prepare_batch([Moved(), Moved()])
        assert theirs.gpus == [d2l.gpu(0), d2l.gpu(1)]
        assert set(used) == {d2l.gpu(0)}
        assert resolve(2, 8, find.load("torch")) == [ss.gpu(0), ss.gpu(1)]

    class Linear(d2l.Module):  # type: ignore[name-defined]
        def __init__(self, lr: float) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = small()[0]

    class Examples:
        batch_size = 6

        def train_dataloader(self) -> Any:
            train = small()[1].train
            return [(torch.from_numpy(train.x), torch.from_numpy(train.y))]

        val_dataloader = train_dataloader

    runs = [d2l.Trainer(max_epochs=1, num_gpus=k).fit(Linear(0.1), Examples()) for k in (1, 2)]
    assert [len(run.devices) for run in runs] == [1, 2]
    assert runs[0].fingerprints == runs[1].fingerprints
    assert runs[0].fingerprint == runs[1].fingerprint != runs[0].recipe["initial"]


def test_metrics_wait_for_the_device_in_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics force a host synchronisation every batch. Here they are accumulated on the device.

    A tensor on the device "meta" has no value that the host could read: what asks for one fails.
    """

    class Accumulator:
        def __init__(self, n: int) -> None:
            self.data = [0.0] * n

        def add(self, *args: Any) -> None:
            self.data = [a + float(b) for a, b in zip(self.data, args, strict=True)]

    def accuracy(y_hat: Tensor, y: Tensor) -> float:
        return float((y_hat.argmax(axis=1).type(y.dtype) == y).sum())

    y_hat, y = torch.empty(6, 3, device="meta"), torch.empty(6, dtype=torch.int64, device="meta")
    l = F.cross_entropy(y_hat, y)  # noqa: E741
    with pytest.raises(RuntimeError, match="meta"):
        Accumulator(1).add(l * 6)
    with pytest.raises(RuntimeError, match="meta"):
        accuracy(y_hat, y)
    metric = d2l.Accumulator(3)
    for _ in range(3):
        metric.add(l * 6, d2l.accuracy(y_hat, y), 6)
    assert metric[2] == 18.0
    with pytest.raises(RuntimeError, match="meta"):
        metric[0]

    backend, read = find.load("torch"), []
    for name in ("get", "fetch"):
        original = getattr(backend, name)
        monkeypatch.setattr(backend, name, lambda *args, original=original: read.append(1) or original(*args))
    counts = []
    for batches in (2, 4, 40):
        read.clear()
        assert len(ss.Trainer(1, 6, lr=0.1, progress=False).fit(*small(6 * batches)).fingerprints) == batches
        counts.append(len(read))
    assert counts[0] == counts[1] == counts[2] > 0


def test_schedules_of_sgd_start_at_2() -> None:
    """SGD schedules start at t=2 through a global counter. t starts at 0 here; the chapter's curves are `.shift(2)`."""
    t = 1

    def exponential_lr() -> float:
        nonlocal t  # in a notebook, global
        t += 1
        return math.exp(-0.1 * t)

    def path(lr: Callable[[], float], steps: int = 50) -> list[tuple[float, float]]:
        noise = np.random.default_rng(0)

        def sgd(x1: float, x2: float, s1: float, s2: float, f_grad: Any) -> tuple[float, float, float, float]:
            g1, g2 = f_grad(x1, x2)
            g1, g2, eta_t = g1 + noise.standard_normal(), g2 + noise.standard_normal(), 0.1 * lr()
            return x1 - eta_t * g1, x2 - eta_t * g2, 0, 0

        return lab.train_2d(sgd, steps, f_grad=lambda x1, x2: (2 * x1, 4 * x2))

    theirs = path(exponential_lr)
    assert t == 51
    assert path(exponential_lr) != theirs, "the counter did not go on"
    schedule = ss.natural_exp(1, 0.1)
    assert [path(map(schedule.shift(2), range(50)).__next__) for _ in range(2)] == [theirs, theirs]
    assert (schedule(0), schedule.shift(2)(0)) == (1.0, math.exp(-0.2))
    assert path(map(schedule, range(50)).__next__) != theirs
