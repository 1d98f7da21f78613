"""Resuming in one process: stopped anywhere, by anything, and gone on with on any number of devices, a fit ends with the same
bits, or says in one line why it cannot go on.

Run as a script, this file is the fit that the tests of signals and locks start in a process of its own.
"""

from __future__ import annotations

import copy
import fcntl
import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conformance import suite
from patience import be_patient, one_by_one
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from torch import nn

import samestep as ss
from samestep import draws
from samestep import fingerprint as bits
from samestep.backends.torch.backend import backend
from samestep.backends.torch.fingerprint import VectorFingerprint
from samestep.backends.torch.replica import TorchReplica
from samestep.backends.torch.updater import TorchUpdater
from samestep.devices import cpu
from samestep.errors import Invalid, WrongType
from samestep.fingerprint import of_weights
from samestep.optimizers.averaging import Averager
from samestep.optimizers.updating import FlatUpdater
from samestep.processes.place import OVERRIDES
from samestep.runs import checkpoint
from samestep.runs.checkpoint import paths, read
from samestep.runs.run import Run, export
from samestep.schedules.rates import Rates
from samestep.training import measuring
from samestep.training.fit import Fit

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((44, 12)).astype(np.float32)
Y = RANDOM.integers(0, 3, 44)
STEPS, SHARDS, EPOCHS = 4, 3, 2  # 12 + 12 + 12 + 8 examples an epoch, in shards of 4, and of 3, 3 and 2
DEADLINE = 180.0  # seconds after which a test that waits has failed


# What is trained


class Interrupted(Exception):
    pass


class Fuse:
    """Does something while the shards of chosen updates of a fit are computed: fails, if nothing else is said."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.arm()

    def arm(self, *after: int, act: Callable[[], None] | None = None) -> None:
        """`after` so many updates of the next fit; without any, nothing is done."""
        self.after, self.act, self.shards = after, act, 0

    def __getstate__(self) -> None:
        """Nothing of it decides a bit, so the recipe is not to know it."""

    def burn(self) -> None:
        with self.lock:
            update, shard = divmod(self.shards, SHARDS)
            self.shards += 1
        if update in self.after and shard == 1:
            if self.act is None:
                raise Interrupted
            self.act()


FUSE = Fuse()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


@pytest.fixture(autouse=True, scope="module")
def unchecked() -> Iterator[None]:
    """A fuse counts shards, so only those of updates may be computed, one by one: no rehearsal, no spot checks, no trial."""
    with pytest.MonkeyPatch.context() as patch:
        one_by_one(patch)
        patch.setattr(measuring, "_apart", lambda *about: 0.0)
        patch.setenv(OVERRIDES, json.dumps({"rehearse": False, "check_every": None}))
        yield


@pytest.fixture(autouse=True)
def safe() -> Iterator[None]:
    yield
    FUSE.arm()


def loss(output: Any, y: Any) -> Any:
    if output.requires_grad:
        FUSE.burn()
    return F.cross_entropy(output, y, reduction="none")


def dense(*middle: nn.Module, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 6), *(middle or (nn.Tanh(),)), nn.Linear(6, 3))


def matrices() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))


class Tied(nn.Module):
    """Weights that are shared, frozen, and in another order in memory; and statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 3).requires_grad_(False)

    def forward(self, x: Any) -> Any:
        hidden = self.norm(self.conv(x.view(-1, 3, 2, 2)).flatten(1))
        return self.frozen(torch.tanh(self.second(self.first(hidden))))


class Source:
    """Examples that are read by index, ahead of training."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, indices: Any) -> Any:
        return X[indices], Y[indices]


@functools.cache
def mapped() -> tuple[Any, Any]:
    """The examples in files, mapped into memory."""
    import tempfile

    arrays = []
    for array in (X, Y):
        with tempfile.NamedTemporaryFile() as file:
            found = np.memmap(file.name, array.dtype, "w+", shape=array.shape)
        found[:] = array
        arrays.append(found)
    return arrays[0], arrays[1]


class Case(NamedTuple):
    model: Callable[[], nn.Module] = dense
    settings: dict[str, Any] = {}  # noqa: RUF012 - never written to
    data: Callable[[], Any] = lambda: (X, Y)


PLAIN = Case()


def fit(case: Case = PLAIN, **settings: Any) -> Run:
    """A fit of a case; with `model` and `data` other ones than the case's."""
    given: dict[str, Any] = {
        "max_epochs": EPOCHS, "batch_size": 12, "shards": SHARDS, "devices": 1, "progress": False, "loss": loss,
        "schedule": ss.cosine(0.3, 9),
    } | case.settings | settings  # fmt: skip
    if isinstance(given["devices"], int):  # also where there are GPUs, which would record the loss
        given["devices"] = ["cpu"] * given["devices"]
    model = given.pop("model", None) or case.model()
    train = given.pop("data", None) or case.data()
    x = X.astype(np.float64) if next(model.parameters()).dtype == torch.float64 else X
    train = (x, Y) if isinstance(train, tuple) and train[0] is X else train  # in the type of the model
    return ss.Trainer(**given).fit(model, ss.Data(train=train, test=(x[:9] + 1, Y[:9])))


def interrupted(case: Case, after: int, **settings: Any) -> None:
    """A fit that fails while it computes the update after so many updates."""
    FUSE.arm(after)
    with pytest.raises(Interrupted):
        fit(case, **settings)
    FUSE.arm()


def same(a: Run, b: Run) -> None:
    """Equal to the last bit: weights, the fingerprint of every step, history, average, and the rates that were applied."""
    suite.same(a, b)
    assert (a.average is None) == (b.average is None)
    for name, tensor in (a.average or {}).items():
        assert tensor.tobytes() == (b.average or {})[name].tobytes(), f"the average of {name} differs"
    assert a.average_metrics == b.average_metrics
    assert repr(a.schedule) == repr(b.schedule)


OPTIM = torch.optim
TORCH: dict[str, Any] = {
    "SGD with momentum": lambda p: OPTIM.SGD(p, momentum=0.9, nesterov=True),
    "SGD": OPTIM.SGD, "Adam": OPTIM.Adam, "Adam amsgrad": lambda p: OPTIM.Adam(p, amsgrad=True), "AdamW": OPTIM.AdamW,
    "NAdam": OPTIM.NAdam, "RAdam": OPTIM.RAdam, "Adamax": OPTIM.Adamax, "Adagrad": OPTIM.Adagrad,
    "Adadelta": OPTIM.Adadelta, "Rprop": OPTIM.Rprop, "ASGD": lambda p: OPTIM.ASGD(p, t0=2), "Adafactor": OPTIM.Adafactor,
    "RMSprop": lambda p: OPTIM.RMSprop(p, centered=True, momentum=0.9),
}  # fmt: skip
PLATEAU = {"schedule": ss.Plateau(0.5, patience=0, threshold=0.9), "max_epochs": 4}  # drops after every epoch
CASES: dict[str, Case] = {
    "sgd": Case(),
    "momentum": Case(settings={"optimizer": ss.sgd(momentum=0.9, nesterov=True, weight_decay=0.01)}),
    "adam, clipped, float64": Case(lambda: dense().double(), {"optimizer": ss.adamw(), "gradient_clip_val": 0.1}),
    "adagrad": Case(settings={"optimizer": ss.adagrad()}),
    "sgld": Case(settings={"optimizer": ss.sgld(temperature=1e-3)}),
    "batch norm": Case(lambda: dense(nn.BatchNorm1d(6)), {"optimizer": ss.adam()}),
    "dropout": Case(lambda: dense(nn.Dropout(0.5)), {"optimizer": ss.sgd(momentum=0.9)}),
    "plateau": Case(settings=PLATEAU),
    "swa of epochs": Case(lambda: dense(nn.BatchNorm1d(6)), {"average": ss.swa(1)}),
    "swa of steps": Case(settings={"average": ss.swa(3, 2, "steps")}),
    "path average": Case(lambda: dense(nn.BatchNorm1d(6)), {"average": ss.path_average()}),
    "moving average": Case(lambda: dense(nn.BatchNorm1d(6)), {"average": ss.ema(0.5, 2)}),
    "groups": Case(
        settings={
            "optimizer": ss.adamw(),
            "gradient_clip_val": 0.1,
            "groups": {"*weight": ss.group(lr_scale=0.5), "0.bias": ss.group(frozen=True)},
        }
    ),
    "with replacement": Case(settings={"sampling": "with_replacement", "optimizer": ss.sgd(momentum=0.9)}),
    "memory map": Case(data=mapped),
    "source": Case(data=Source),
    "tied, frozen and channels last": Case(Tied, {"optimizer": ss.adam()}),
    "tied, frozen and channels last with torch": Case(Tied, {"optimizer": OPTIM.Adam}),
}


@functools.cache
def whole(name: str) -> Run:
    """The case, never interrupted."""
    run = fit(CASES[name])
    assert run.resumed is None
    assert run.recipe["initial"] != run.fingerprint, "training changed nothing: there is nothing to compare"
    assert len(set(run.fingerprints)) == len(run.fingerprints), "some step changed nothing"
    return run


# Interrupted anywhere


def check(name: str, folder: Path, every: Any, steps: Any) -> None:
    """Interrupt a case after each of these numbers of steps, go on with it on other devices, and compare."""
    expected, case = whole(name), CASES[name]
    due = every if isinstance(every, int) else STEPS
    for after in steps:
        settings = {"run_dir": folder / f"{every}-{after}", "checkpoint_every": every}
        interrupted(case, after, devices=1 + after % 3, **settings)
        run = fit(case, devices=1 + (after + 1) % 3, **settings)
        assert run.resumed == (after // due * due or None)
        same(run, expected)
        stored = Run.load(settings["run_dir"])
        assert (stored.fingerprints, stored.history) == (expected.fingerprints, run.history)


@pytest.mark.parametrize("every", [1, 3, "1 epoch"])
def test_interrupted_at_every_step(every: Any, tmp_path: Path) -> None:
    check("momentum", tmp_path, every, range(STEPS * EPOCHS))


@pytest.mark.parametrize("name", [name for name in CASES if name != "momentum"])
def test_whatever_is_trained_can_be_interrupted_at_every_step(name: str, tmp_path: Path) -> None:
    last = STEPS * CASES[name].settings.get("max_epochs", EPOCHS)
    for i, every in enumerate((1, 3, "1 epoch")):
        check(name, tmp_path, every, range(i, last, 3))


KINDS = [pytest.param("cuda", marks=pytest.mark.skipif(ss.num_gpus() == 0, reason="needs a CUDA GPU"))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_as_well(kind: str, name: str, tmp_path: Path) -> None:
    """Stopped between two steps: the loss that fails would be recorded, and not called again."""
    case, expected = CASES[name], fit(CASES[name], devices=kind)
    for after, count in ((1, 2), (3, 3), (5, 1)):
        with pytest.MonkeyPatch.context() as patch:
            stopping(patch, after)
            with pytest.raises(Interrupted):
                fit(case, run_dir=tmp_path / str(after), checkpoint_every=1, devices=kind)
        run = fit(case, run_dir=tmp_path / str(after), devices=[kind] * count)
        assert run.resumed == after
        same(run, expected)


def stopping(patch: pytest.MonkeyPatch, after: int) -> None:
    """Fail between two steps, which needs nothing of the framework."""
    from samestep.training.replicas import Replicas

    step = Replicas.step

    def fail(self: Replicas, batch: Any, lr: float, t: int) -> Any:
        if t == after:
            raise Interrupted
        return step(self, batch, lr, t)

    patch.setattr(Replicas, "step", fail)


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_every_optimizer_of_torch(name: str, precision: str, tmp_path: Path) -> None:
    """Each keeps another state: tensors of the weights' shape and others, of their type and others, and plain numbers."""
    case = Case(lambda: dense().to(getattr(torch, precision)), {"optimizer": TORCH[name], "schedule": 0.05})
    expected = fit(case)
    interrupted(case, 3, run_dir=tmp_path, checkpoint_every=1)
    interrupted(case, 2, run_dir=tmp_path, checkpoint_every=1, devices=3)
    run = fit(case, run_dir=tmp_path, devices=2)
    assert run.resumed == 5
    same(run, expected)


@pytest.mark.skipif(not hasattr(OPTIM, "Muon"), reason="this torch has no Muon")
def test_muon(tmp_path: Path) -> None:
    case = Case(matrices, {"optimizer": getattr(OPTIM, "Muon", None)})
    interrupted(case, 3, run_dir=tmp_path, checkpoint_every=1)
    same(fit(case, run_dir=tmp_path, devices=2), fit(case))


def test_an_optimizer_that_was_made_by_the_user_and_has_a_past(tmp_path: Path) -> None:
    """An optimizer object, with momenta of its own before the fit, in groups, and a scheduler of torch."""

    def settings(model: nn.Module) -> dict[str, Any]:
        groups = [{"params": model[0].parameters(), "weight_decay": 0.1}, {"params": model[2].parameters()}]
        optimizer = OPTIM.SGD(groups, lr=0.2, momentum=0.9)
        model(torch.ones(1, 12)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer, "schedule": OPTIM.lr_scheduler.StepLR(optimizer, 3, 0.5)}

    interrupted(Case(), 3, run_dir=tmp_path, checkpoint_every=1, **settings(dense()))
    interrupted(Case(), 2, run_dir=tmp_path, checkpoint_every=1, devices=3, **settings(dense()))
    run = fit(run_dir=tmp_path, **settings(dense()))
    assert run.resumed == 5
    same(run, fit(**settings(dense())))


# What an optimizer keeps in attributes of its own


class Counting(OPTIM.SGD):
    """A rate that falls with a count of its own, and a mean of the gradients that it makes when it first needs it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.3)
        self.count, self.mean, self.past = 0, {}, [("begin", None)]  # type: ignore[var-annotated]

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for p in self.param_groups[0]["params"]:
            self.mean[p] = self.mean.get(p, torch.zeros_like(p)) * 0.5 + p.grad
            p.grad = self.mean[p] / self.count
        self.past.append((f"update {self.count}", float(self.param_groups[0]["lr"])))
        self.param_groups[0]["seen"] = torch.tensor([self.count, len(self.past)])
        return super().step(closure)


class SlowWeights(OPTIM.Adam):
    """Lookahead as a subclass: slow weights in a list, from the start on."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.k = 0

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.k = (self.k + 1) % 2
        for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
            if self.k == 0:
                p.data.copy_(slow.lerp_(p.data, 0.5))


class Lookahead(OPTIM.Optimizer):
    """Lookahead as packages have it: around another optimizer, with groups in common and a state_dict of its own kind."""

    def __init__(self, inner: Any, alpha: float = 0.5) -> None:
        self.inner, self.alpha, self.param_groups, self.fast = inner, alpha, inner.param_groups, inner.state
        self.state: Any = defaultdict(dict)
        self.defaults: Any = {}
        for group in self.param_groups:
            group["counter"] = 0

    def state_dict(self) -> Any:
        return {"slow": {}, "fast": self.inner.state_dict()}

    def step(self, closure: Any = None) -> Any:
        self.inner.step()
        for group in self.param_groups:
            group["counter"] += 1
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if group["counter"] % 2 == 0:
                    p.data.copy_(slow.add_(p.data - slow, alpha=self.alpha))
                    assert self.fast[p] is self.inner.state[p]


class Views(OPTIM.SGD):
    """One momentum for all weights, and views of it."""

    def __init__(self, parameters: Any, late: bool = False) -> None:
        super().__init__(parameters, lr=0.3)
        if not late:
            self.make()

    def make(self) -> None:
        self.flat = torch.zeros(sum(p.numel() for p in self.param_groups[0]["params"]))
        pieces = self.flat.split([p.numel() for p in self.param_groups[0]["params"]])
        self.views = [piece.view_as(p) for piece, p in zip(pieces, self.param_groups[0]["params"], strict=True)]

    def step(self, closure: Any = None) -> Any:
        if not hasattr(self, "flat"):
            self.make()
        self.flat.mul_(0.9)
        for p, view in zip(self.param_groups[0]["params"], self.views, strict=True):
            p.grad = view.add_(p.grad).clone()
        return super().step(closure)


KEEPING: dict[str, Any] = {
    "a count and lazy tensors": Counting, "slow weights": SlowWeights, "views of one vector": Views,
    "an optimizer inside": lambda p: Lookahead(OPTIM.Adam(p, lr=0.01)),
    "a counting one inside": lambda p: Lookahead(Counting(p), alpha=0.7),
}  # fmt: skip


@pytest.mark.parametrize("model", [dense, Tied])
@pytest.mark.parametrize("made", ["by a function", "from the model"])
@pytest.mark.parametrize("name", KEEPING)
def test_what_an_optimizer_keeps_in_attributes(name: str, made: str, model: Any, tmp_path: Path) -> None:
    case = Case(model, {"optimizer": KEEPING[name], "schedule": 0.05})

    def given() -> dict[str, Any]:
        if made == "by a function":
            return {}
        mine = model()
        return {"model": mine, "optimizer": KEEPING[name]([p for p in mine.parameters() if p.requires_grad])}

    expected = fit(case, **given())
    interrupted(case, 3, run_dir=tmp_path, checkpoint_every=1, **given())
    interrupted(case, 2, run_dir=tmp_path, checkpoint_every=1, devices=3, **given())
    run = fit(case, run_dir=tmp_path, devices=2, **given())
    assert run.resumed == 5
    same(run, expected)


@pytest.mark.parametrize("name", KEEPING)
def test_an_optimizer_that_forgets_its_attributes_is_rejected(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: only what torch calls state is restored, as it once was."""
    case, load = Case(settings={"optimizer": KEEPING[name], "schedule": 0.05}), TorchUpdater.load

    def forgetful(self: Any, tensors: Any) -> None:
        fresh = TorchUpdater(KEEPING[name], self.replica, 0.0)
        load(self, tensors)
        for old, new in zip(self.optimizer.param_groups, fresh.optimizer.param_groups, strict=True):
            new.update({key: value for key, value in old.items() if key != "params"})
        for old, new in zip(self._leaves, fresh._leaves, strict=True):
            fresh.optimizer.state[new] = self.optimizer.state[old]
        self.optimizer, self._leaves = fresh.optimizer, fresh._leaves

    interrupted(case, 3, run_dir=tmp_path, checkpoint_every=1)
    monkeypatch.setattr(TorchUpdater, "load", forgetful)
    assert fit(case, run_dir=tmp_path, checkpoint_every=None).fingerprint != fit(case).fingerprint


def test_attributes_in_the_checkpoint_have_names(tmp_path: Path) -> None:
    fit(Case(settings={"optimizer": KEEPING["a counting one inside"]}), run_dir=tmp_path)
    stored = load_file(sorted((tmp_path / "checkpoints").iterdir())[-1])
    names = {name.removeprefix("optimizer:") for name in stored if name.startswith("optimizer:")}
    assert {"state.0.weight.slow", "inner.mean.2.bias", "inner.param_groups.0.seen", "attributes"} <= names
    text = stored["optimizer:attributes"].tobytes().decode()
    assert '["counter", 8]' in text
    assert f'"update {STEPS * EPOCHS}"' in text


class Drawing(OPTIM.SGD):
    """It draws from a generator of its own."""

    def __init__(self, parameters: Any, kind: str) -> None:
        super().__init__(parameters, lr=0.1)
        self.kind, self.draw = kind, random.Random(0) if kind == "Random" else torch.Generator()
        self.recent = deque([1.0], maxlen=3)

    def step(self, closure: Any = None) -> Any:
        if self.kind == "deque":
            self.recent.append(2.0)
        elif self.kind == "Random":
            self.draw.random()
        elif self.kind == "Generator":
            torch.rand(1, generator=self.draw)
        elif self.kind == "object":
            self.memory = Fuse()
        return super().step(closure)


@pytest.mark.parametrize(("kind", "named"), [
    ("deque", "deque (recent)"), ("Random", "Random (draw)"), ("Generator", "Generator (draw)"), ("object", "Fuse (memory)"),
])  # fmt: skip
def test_what_a_checkpoint_cannot_hold_is_refused_by_name(kind: str, named: str, tmp_path: Path) -> None:
    case = Case(settings={"optimizer": lambda p: Drawing(p, kind)})
    with pytest.raises(WrongType) as refused:
        fit(case, run_dir=tmp_path)
    assert str(refused.value) == (
        f"the optimizer keeps a {named}, which updates change and a checkpoint cannot hold: pass checkpoint_every=None, or "
        "another optimizer"
    )
    fit(case, run_dir=tmp_path / "none", checkpoint_every=None)
    fit(
        Case(settings={"optimizer": lambda p: Drawing(p, "none")}), run_dir=tmp_path / "idle"
    )  # the twin: they stay as they are


def test_memory_that_is_shared_by_what_was_made_later_is_refused(tmp_path: Path) -> None:
    """Restored one by one, they would no longer share it."""
    with pytest.raises(WrongType, match=r"keeps a Tensor \(views.0\), which"):
        fit(Case(settings={"optimizer": lambda p: Views(p, late=True)}), run_dir=tmp_path)


def test_the_checkpoint_of_another_optimizer(tmp_path: Path) -> None:
    updater = backend.updater(Counting, backend.replica(dense(), None, cpu(), 1), 0.0)
    with pytest.raises(Invalid, match="^the checkpoint is of another optimizer: 'attributes' is only in one of them$"):
        updater.load({"0.momentum_buffer": np.zeros(1)})


def test_a_setting_of_an_optimizer_is_in_the_recipe(tmp_path: Path) -> None:
    """Else the one in the checkpoint would win, without a word."""
    model = dense()
    fit(model=model, optimizer=Lookahead(OPTIM.SGD(model.parameters())), run_dir=tmp_path, max_epochs=1)
    with pytest.raises(Invalid, match="optimizer has other code or content"):
        fit(model=model, optimizer=Lookahead(OPTIM.SGD(model.parameters()), alpha=0.4), run_dir=tmp_path)


# Schedulers that move more than the rate


def cycling(model: nn.Module, kind: str) -> dict[str, Any]:
    if kind == "CyclicLR":
        optimizer: Any = OPTIM.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "schedule": OPTIM.lr_scheduler.CyclicLR(optimizer, 0.01, 0.3, 2)}
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "weight_decay": 0.1}]
    optimizer = OPTIM.AdamW(groups) if "Adam" in kind else OPTIM.SGD(groups, lr=0.1, momentum=0.9)
    return {"optimizer": optimizer, "schedule": OPTIM.lr_scheduler.OneCycleLR(optimizer, 0.3, STEPS * EPOCHS)}


@pytest.mark.parametrize("kind", ["OneCycleLR", "OneCycleLR of Adam", "CyclicLR"])
def test_a_scheduler_that_moves_momenta(kind: str, tmp_path: Path) -> None:
    expected = fit(model=(model := dense()), **cycling(model, kind))
    interrupted(PLAIN, 3, model=(model := dense()), run_dir=tmp_path, checkpoint_every=1, **cycling(model, kind))
    interrupted(
        PLAIN, 2, model=(model := dense()), run_dir=tmp_path, checkpoint_every=1, devices=3, **cycling(model, kind)
    )
    run = fit(model=(model := dense()), run_dir=tmp_path, devices=2, **cycling(model, kind))
    assert run.resumed == 5
    same(run, expected)


def test_schedulers_and_more_epochs(tmp_path: Path) -> None:
    """One of a fixed length ends there, which is said; others go on."""
    schedulers: dict[str, Any] = {
        "StepLR": lambda o: OPTIM.lr_scheduler.StepLR(o, 3, 0.5),
        "LambdaLR": lambda o: OPTIM.lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
        "CyclicLR": lambda o: OPTIM.lr_scheduler.CyclicLR(o, 0.01, 0.3, 2),
        "OneCycleLR": lambda o: OPTIM.lr_scheduler.OneCycleLR(o, 0.3, STEPS * EPOCHS),
    }
    for name, make in schedulers.items():

        def longer(epochs: int, make: Any = make, **settings: Any) -> Run:
            model = dense()
            optimizer = OPTIM.SGD(model.parameters(), lr=0.1, momentum=0.9)
            return fit(model=model, optimizer=optimizer, schedule=make(optimizer), max_epochs=epochs, **settings)

        longer(EPOCHS - 1, run_dir=tmp_path / name)
        run = longer(EPOCHS, run_dir=tmp_path / name)
        assert run.resumed == STEPS * (EPOCHS - 1)
        same(run, longer(EPOCHS))
    with pytest.raises(Invalid) as refused:
        longer(EPOCHS + 1, run_dir=tmp_path / "OneCycleLR")
    assert str(refused.value) == (
        f"OneCycleLR ends before {STEPS * (EPOCHS + 1)} steps: Tried to step {STEPS * EPOCHS + 1} "
        f"times. The specified number of total steps is {STEPS * EPOCHS}"
    )


# Again and again, and other ways to stop


def test_interrupted_again_and_again(tmp_path: Path) -> None:
    """One step a fit, each on another number of devices: as many fits as steps."""
    case, last = CASES["batch norm"], STEPS * EPOCHS
    for step in range(last):
        if step + 1 < last:
            interrupted(case, 1, run_dir=tmp_path, checkpoint_every=1, devices=1 + step % 3, keep_checkpoints=1)
    run = fit(case, run_dir=tmp_path, devices=2)
    assert run.resumed == last - 1
    same(run, whole("batch norm"))
    told = [json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (told.count("start"), told.count("resume"), told.count("end")) == (1, last - 1, 1)


def test_killed_before_the_first_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was learned is in the log, but there is nothing to go on from: it starts anew."""
    with monkeypatch.context() as patch:
        patch.setattr("samestep.training.fit.LIVE", -1.0)
        interrupted(Case(), 3, run_dir=tmp_path, checkpoint_every="1 epoch")
    told = [json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert told == ["start", "steps", "steps", "steps"]
    assert paths(tmp_path) == []
    run = fit(run_dir=tmp_path, devices=2)
    assert run.resumed is None
    same(run, whole("sgd"))
    told = [json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert told == ["start", "steps", "epoch", "steps", "epoch", "end"]


def test_killed_before_anything_was_written(tmp_path: Path) -> None:
    fit(run_dir=tmp_path / "whole", checkpoint_every=None)
    (tmp_path / "run").mkdir()
    for name in ("lock", "events.jsonl", "recipe.json.tmp"):
        (tmp_path / "run" / name).touch()
    same(fit(run_dir=tmp_path / "run"), whole("sgd"))
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    shutil.copy(tmp_path / "whole" / "recipe.json", tmp_path / "run")
    (tmp_path / "run" / "events.jsonl").write_bytes(b'{"event": "sta')
    same(fit(run_dir=tmp_path / "run", resume="auto"), whole("sgd"))


def test_a_source_that_fails(tmp_path: Path) -> None:
    class Failing(Source):
        reads, most = 0, 10**9

        def __getitem__(self, indices: Any) -> Any:
            self.reads += 1
            if self.reads > self.most:
                raise OSError("gone")
            return super().__getitem__(indices)

    source = Failing()
    fit(data=source, max_epochs=1)
    source.reads, source.most = 0, source.reads + SHARDS  # the second epoch ends after one step
    with pytest.raises(OSError, match="^gone$"):
        fit(data=source, run_dir=tmp_path, checkpoint_every=1)
    source.most = 10**9
    run = fit(data=source, run_dir=tmp_path, devices=3, accept="code")  # `most` is a setting of its
    assert run.resumed is not None
    assert run.resumed <= 5  # it had been read ahead
    same(run, whole("source"))


def test_how_the_numbers_are_looked_at_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small entries in the log, some of them of half an epoch, are put together again."""
    monkeypatch.setattr("samestep.training.fit.LIVE", -1.0)
    interrupted(Case(), 6, run_dir=tmp_path, checkpoint_every=2)
    same(fit(run_dir=tmp_path), whole("sgd"))


def test_regression_and_no_test_examples(tmp_path: Path) -> None:
    """No hits to be restored, and the training loss in place of the test loss."""
    trainer = functools.partial(
        ss.Trainer,
        max_epochs=2,
        batch_size=12,
        shards=SHARDS,
        devices="cpu",
        progress=False,
        loss=square,
        schedule=0.01,
    )
    data = (X, (X[:, :3] * 2).astype(np.float32))
    FUSE.arm(6)
    with pytest.raises(Interrupted):
        trainer(run_dir=tmp_path, checkpoint_every=1).fit(dense(), data)
    FUSE.arm()
    run = trainer(run_dir=tmp_path, devices=["cpu"] * 2).fit(dense(), data)
    assert (run.resumed, run.history[0]["train_accuracy"]) == (6, None)
    same(run, trainer().fit(dense(), data))


def square(output: Any, y: Any) -> Any:
    if output.requires_grad:
        FUSE.burn()
    return ((output - y.reshape(len(y), -1)) ** 2).sum(1)


def test_progress_says_that_it_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    interrupted(Case(), 5, run_dir=tmp_path, checkpoint_every=1)
    capsys.readouterr()
    fit(run_dir=tmp_path, progress=True, devices=2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3  # what is trained, where it goes on, and the one epoch that was left
    assert "2 x cpu" in lines[0]
    assert lines[1] == "resumed after step 5"
    assert lines[2].startswith("epoch   2/2 ")


# Broken twins, which the comparison above must reject


def forgets_the_order(patch: pytest.MonkeyPatch) -> None:
    """Goes on with the examples with which the epoch began."""
    restore, order, place = Fit.restore, draws.order, {"first": 0}

    def remember(self: Fit, found: Any, log: Any) -> None:
        restore(self, found, log)
        place["first"] = self.step % STEPS * 12

    def from_the_beginning(*arguments: Any) -> Any:
        return np.roll(order(*arguments), place.pop("first", 0))

    patch.setattr(Fit, "restore", remember)
    patch.setattr(draws, "order", from_the_beginning)


def forgets_the_optimizer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FlatUpdater, "load", lambda self, tensors: None)
    patch.setattr(TorchUpdater, "load", lambda self, tensors: None)


def forgets_the_buffers(patch: pytest.MonkeyPatch) -> None:
    load = TorchReplica.load
    patch.setattr(
        TorchReplica, "load", lambda self, tensors: load(self, tensors | {
            name: tensor.copy() for name, tensor in self.tensors().items() if "running" in name or "num_" in name
        })
    )  # fmt: skip


def forgets_the_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TorchReplica, "load", lambda self, tensors: None)


def forgets_the_weight_of_the_average(patch: pytest.MonkeyPatch) -> None:
    restore = Averager.restore
    patch.setattr(Averager, "restore", lambda self, total, tensors: restore(self, 0.0, tensors))


def forgets_the_average(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Averager, "restore", lambda self, total, tensors: None)


def forgets_what_was_observed(patch: pytest.MonkeyPatch) -> None:
    restore = Fit.restore

    def without(self: Fit, found: Any, log: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Rates, "observe", lambda self, row: None)
            restore(self, found, log)

    patch.setattr(Fit, "restore", without)


def forgets_the_step(patch: pytest.MonkeyPatch) -> None:
    """Draws its noise, and corrects the bias of Adam, as if it had just begun."""
    restore, keys, before = Fit.restore, draws.keys_from, {"steps": 0}

    def remember(self: Fit, found: Any, log: Any) -> None:
        restore(self, found, log)
        before["steps"] = found.step

    patch.setattr(Fit, "restore", remember)
    patch.setattr(draws, "keys_from", lambda seed, step, shards: keys(seed, step - before["steps"], shards))


def forgets_the_losses_of_half_an_epoch(patch: pytest.MonkeyPatch) -> None:
    restore = Fit.restore

    def without(self: Fit, found: Any, log: Any) -> None:
        restore(self, found, log)
        self.table = [np.zeros_like(rows) for rows in self.table]

    patch.setattr(Fit, "restore", without)


def restores_one_replica(patch: pytest.MonkeyPatch) -> None:
    """All but the first replica of a group keep the weights with which they began."""
    load, seen = TorchReplica.load, []

    def first(self: TorchReplica, tensors: Any) -> None:
        seen.append(self)
        if len(seen) == 1:
            load(self, tensors)

    patch.setattr(TorchReplica, "load", first)


@pytest.mark.parametrize(
    ("breakage", "name", "after"),
    [
        (forgets_the_order, "sgd", 2),
        (forgets_the_order, "with replacement", 6),
        (forgets_the_optimizer, "momentum", 2),
        (forgets_the_optimizer, "batch norm", 5),  # Adam
        (forgets_the_optimizer, "tied, frozen and channels last with torch", 3),
        (forgets_the_buffers, "batch norm", 4),
        (forgets_the_weights, "sgd", 1),
        (forgets_the_weight_of_the_average, "path average", 3),
        (forgets_the_weight_of_the_average, "swa of steps", 6),
        (forgets_the_average, "swa of epochs", 5),
        (forgets_what_was_observed, "plateau", 9),
        (forgets_the_step, "dropout", 2),
        (forgets_the_losses_of_half_an_epoch, "sgd", 6),
    ],
)
def test_broken_resuming_is_rejected(
    breakage: Callable[[pytest.MonkeyPatch], None],
    name: str,
    after: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(name, tmp_path / "right", 1, [after])
    breakage(monkeypatch)
    with pytest.raises(AssertionError):
        check(name, tmp_path / "wrong", 1, [after])


def test_a_replica_that_is_not_restored_is_noticed_by_the_fit_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(Case(), 3, run_dir=tmp_path, checkpoint_every=1)
    restores_one_replica(monkeypatch)
    with pytest.raises(ss.SamestepError, match="^after step 4 the replicas on cpu, cpu are no longer equal"):
        fit(run_dir=tmp_path, devices=2)


def every_tensor_counts(of: Callable[[TorchReplica], Any]) -> None:
    """A fingerprint must change with one bit of any element of any tensor that training can change."""
    replica = TorchReplica(backend, Tied(), None, cpu(), SHARDS, capture=True)
    before = of(replica)
    assert of(replica) == before
    tensors = {name: np.array(tensor) for name, tensor in replica.tensors().items()}
    for name, tensor in tensors.items():
        for place in range(tensor.size) if "frozen" not in name else []:
            other = copy.deepcopy(tensors)
            bits = np.ascontiguousarray(other[name]).reshape(-1).view(f"u{tensor.dtype.itemsize}")
            bits[place] ^= 1
            other[name] = bits.view(tensor.dtype).reshape(tensor.shape)
            if name == "first.weight":  # of which second.weight is another name
                other["second.weight"] = other[name]
            if name != "second.weight":
                replica.load(other)
                assert of(replica) != before, f"element {place} of {name} does not count"
    replica.load(tensors)
    assert of(replica) == before


def of_a_step(replica: TorchReplica) -> int:
    return int(replica.fingerprint())


def of_a_run(replica: TorchReplica) -> str:
    return of_weights(replica.tensors())


def test_fingerprints_count_every_tensor() -> None:
    every_tensor_counts(of_a_step)
    every_tensor_counts(of_a_run)


def test_fingerprints_that_ignore_a_tensor_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(names: str) -> Callable[[TorchReplica], str]:
        return lambda replica: of_weights({n: t for n, t in replica.tensors().items() if not re.search(names, n)})

    for names in ("norm.running_mean", "norm.num_batches_tracked", "conv.bias", "^(first|second).weight"):
        with pytest.raises(AssertionError, match="does not count"):
            every_tensor_counts(without(names))
    with monkeypatch.context() as patch:  # the weights alone: the statistics of batch norm are not looked at
        patch.setattr(TorchReplica, "fingerprint", lambda self: VectorFingerprint([self.weights.vector])())
        with pytest.raises(AssertionError, match=r"element 0 of norm\.running_mean does not count"):
            every_tensor_counts(of_a_step)
    with monkeypatch.context() as patch:  # all but the last weight
        laid_out = bits._laid_out
        patch.setattr(bits, "_laid_out", lambda raw: laid_out(raw[: -16 * 4]))
        with pytest.raises(AssertionError, match="does not count"):
            every_tensor_counts(of_a_step)
    every_tensor_counts(of_a_step)


def test_a_fingerprint_of_weights_alone_would_not_see_forgotten_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why the fingerprint of a step covers the buffers: without them, a resume that forgets them looks right."""
    weights = lambda self: VectorFingerprint([self.weights.vector])()  # noqa: E731
    case = Case(lambda: dense(nn.BatchNorm1d(6)))
    honest = fit(case).fingerprints
    monkeypatch.setattr(TorchReplica, "fingerprint", weights)
    forgets_the_buffers(monkeypatch)
    interrupted(case, 3, run_dir=tmp_path, checkpoint_every=1)
    run = fit(case, run_dir=tmp_path)
    blind = fit(case)
    assert run.fingerprints == blind.fingerprints  # the broken pair sees nothing
    assert run.fingerprint != blind.fingerprint  # the hash of the whole model does
    assert honest != blind.fingerprints


# Runs that have ended, longer and shorter ones


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("name", ["momentum", "path average", "plateau", "tied, frozen and channels last"])
def test_a_run_that_has_ended_is_given_back(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    first = fit(case, run_dir=tmp_path, devices=2)
    again = fit(case, run_dir=tmp_path, devices=3)
    assert again.resumed == first.history[-1]["step"]
    assert again.devices == ["cpu"] * 3
    assert again.folder == tmp_path
    same(first, again)
    assert again.history == first.history  # seconds too: nothing was computed again
    trained, x = again.model, torch.from_numpy(X)
    assert torch.equal(trained.eval()(x), first.model.eval()(x))
    if first.average:
        assert torch.equal(again.average_model.eval()(x), first.average_model.eval()(x))
    assert Run.load(tmp_path).history == first.history
    assert "weights.safetensors" in listing(tmp_path)


@pytest.mark.filterwarnings("ignore:schedule. cosine:UserWarning")  # it ends before the longer run does
@pytest.mark.parametrize("every", [1, "1 epoch", "2 epochs"])
@pytest.mark.parametrize("name", ["momentum", "plateau", "swa of epochs", "dropout"])
def test_more_epochs_equal_the_longer_run(name: str, every: Any, tmp_path: Path) -> None:
    case, epochs = CASES[name], CASES[name].settings.get("max_epochs", EPOCHS)
    fit(case, run_dir=tmp_path, checkpoint_every=every)
    longer = fit(case, run_dir=tmp_path, checkpoint_every=every, max_epochs=epochs + 3, devices=2)
    assert longer.resumed == epochs * STEPS
    same(longer, fit(case, max_epochs=epochs + 3))
    assert json.loads((tmp_path / "recipe.json").read_text())["max_epochs"] == epochs + 3
    assert Run.load(tmp_path).history == longer.history


def test_while_a_run_is_made_longer_it_has_no_last_weights(tmp_path: Path) -> None:
    case = CASES["path average"]
    fit(case, run_dir=tmp_path)
    assert {"weights.safetensors", "average.safetensors"} <= set(listing(tmp_path))
    interrupted(case, 2, run_dir=tmp_path, max_epochs=3, checkpoint_every=1)
    assert not {"weights.safetensors", "average.safetensors"} & set(listing(tmp_path))
    now = Run.load(tmp_path)
    assert (now.interrupted, len(now.fingerprints), now.average is None) == (True, 10, False)
    assert export(tmp_path, tmp_path / "now.safetensors") == 10  # not those of step 8
    same(fit(case, run_dir=tmp_path, max_epochs=3), fit(case, max_epochs=3))


def test_fewer_epochs_are_refused(tmp_path: Path) -> None:
    first = fit(run_dir=tmp_path, max_epochs=3)
    before = contents(tmp_path)
    with pytest.raises(Invalid) as caught:
        fit(run_dir=tmp_path, max_epochs=2)
    assert str(caught.value) == (
        f"{tmp_path} holds this run up to step 12, and max_epochs=2 ends at step 8: raise max_epochs, or choose another "
        "run_dir"
    )
    assert contents(tmp_path) == before
    assert Run.load(tmp_path).fingerprint == first.fingerprint


def test_a_run_that_ended_without_checkpoints_is_not_made_again(tmp_path: Path) -> None:
    fit(run_dir=tmp_path, checkpoint_every=None)
    before = contents(tmp_path)
    with pytest.raises(Invalid) as caught:
        fit(run_dir=tmp_path)
    assert str(caught.value) == (
        f"run folder {tmp_path} holds a finished run without a checkpoint: choose another run_dir, or delete it"
    )
    assert contents(tmp_path) == before


# What `resume` asks for


def test_never(tmp_path: Path) -> None:
    run = fit(run_dir=tmp_path / "run", resume=False)
    before = contents(tmp_path)
    with pytest.raises(Invalid) as caught:
        fit(run_dir=tmp_path / "run", resume=False)
    assert str(caught.value) == (f"run folder {tmp_path / 'run'} already holds a run: choose another, or delete it")
    assert contents(tmp_path) == before
    same(run, whole("sgd"))
    (tmp_path / "run" / "recipe.json").unlink()  # the checkpoints are still a run
    with pytest.raises(Invalid, match="already holds a run"):
        fit(run_dir=tmp_path / "run", resume=False)


@pytest.mark.parametrize("given", ["file", "folder"])
def test_from_another_folder(given: str, tmp_path: Path, patient: None) -> None:
    """A branch: the old run is left as it was, the new one has all that came before."""
    case = CASES["batch norm"]
    interrupted(case, 6, run_dir=tmp_path / "old", checkpoint_every=1)
    before = contents(tmp_path / "old")
    source, step = (paths(tmp_path / "old")[-2], 5) if given == "file" else (str(tmp_path / "old"), 6)
    run = fit(case, run_dir=tmp_path / "new", resume=source, devices=2)
    assert (run.resumed, run.folder) == (step, tmp_path / "new")
    same(run, whole("batch norm"))
    assert contents(tmp_path / "old") == before
    same(Run.load(tmp_path / "new"), whole_on_disk(case, tmp_path / "whole"))
    same(fit(case, run_dir=tmp_path / "new", max_epochs=3), fit(case, max_epochs=3))


def whole_on_disk(case: Case, folder: Path) -> Run:
    fit(case, run_dir=folder)
    return Run.load(folder)


def test_a_branch_that_is_killed_before_its_first_checkpoint_goes_on_where_it_branched_off(tmp_path: Path) -> None:
    case = Case(settings={"optimizer": ss.adam()})
    interrupted(case, 3, run_dir=tmp_path / "old", checkpoint_every=1)
    interrupted(case, 2, run_dir=tmp_path / "new", resume=tmp_path / "old", checkpoint_every=None)
    shutil.rmtree(tmp_path / "old")
    run = fit(case, run_dir=tmp_path / "new", devices=2)
    assert run.resumed == 3
    same(run, fit(case))


def test_back_to_an_earlier_step(tmp_path: Path, patient: None) -> None:
    case = CASES["momentum"]
    fit(case, run_dir=tmp_path, checkpoint_every=1, keep_checkpoints=99)
    step, *newer = paths(tmp_path)[2:]
    assert step.name == "step-000000003.safetensors"
    before = contents(tmp_path)
    FUSE.arm(1)
    with pytest.raises(Interrupted), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(case, run_dir=tmp_path, resume=os.path.relpath(step), checkpoint_every=1, keep_checkpoints=99)
    FUSE.arm()
    assert [(str(one.message), one.filename) for one in told] == [
        (
            f"checkpoint {file} is newer than the one that the run goes on from; it is kept as {file.name}.aside",
            __file__,
        )
        for file in newer
    ]
    assert [path.name for path in paths(tmp_path)] == [f"step-{n:09d}.safetensors" for n in (1, 2, 3, 4)]
    for file in (*newer, tmp_path / "events.jsonl", tmp_path / "weights.safetensors"):  # none of it was lost
        assert before[str(file.relative_to(tmp_path))][0] == file.with_name(file.name + ".aside").read_bytes()
    run = fit(case, run_dir=tmp_path, checkpoint_every=1, devices=2)
    assert run.resumed == 4
    same(run, whole("momentum"))


def test_the_model_may_be_another_one_if_a_path_is_given(tmp_path: Path) -> None:
    """Its weights are replaced anyway; only by default they are asked for, so that nobody goes on by mistake."""
    interrupted(Case(), 3, run_dir=tmp_path / "old", checkpoint_every=1)
    run = fit(run_dir=tmp_path / "new", resume=tmp_path / "old", model=dense(seed=9))
    assert run.resumed == 3
    same(run, whole("sgd"))


def test_what_cannot_be_resumed_from(tmp_path: Path) -> None:
    interrupted(Case(), 3, run_dir=tmp_path / "old", checkpoint_every=1)
    fit(run_dir=tmp_path / "taken", max_epochs=1)
    (tmp_path / "empty").mkdir()
    before = contents(tmp_path)

    def refused(message: str, **settings: Any) -> None:
        with pytest.raises(Invalid) as caught:
            fit(**{"run_dir": tmp_path / "new" / "one"} | settings)
        assert str(caught.value) == message
        assert contents(tmp_path) == before
        assert not (tmp_path / "new").exists()

    refused(f"resume: {tmp_path / 'none'} is not there", resume=tmp_path / "none")
    refused(f"resume: {tmp_path / 'empty'} has no checkpoint that can be used", resume=tmp_path / "empty")
    refused(
        f"run folder {tmp_path / 'taken'} already holds another run than {tmp_path / 'old'}: choose another, or delete it",
        run_dir=tmp_path / "taken", resume=tmp_path / "old",
    )  # fmt: skip
    refused(
        f"{tmp_path / 'old'} holds a run of another recipe (seed is 1, was 0): choose another run_dir, or delete it",
        resume=tmp_path / "old", seed=1,
    )  # fmt: skip
    refused(
        f"{tmp_path / 'old'} holds a run of another recipe (seed is 1, was 0): choose another run_dir, or delete it",
        resume=paths(tmp_path / "old")[0], seed=1,
    )  # fmt: skip
    weights = tmp_path / "taken" / "weights.safetensors"
    with pytest.warns(UserWarning, match=f"checkpoint {weights} cannot be used, and there is none before it: "):
        refused(f"resume: {weights} has no checkpoint that can be used", resume=weights)
    refused("resume needs a run_dir to go on in: the folder of the run, or a new one", run_dir=None, resume=weights)


# Another recipe


OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 1}, "seed is 1, was 0"),
    "shards": ({"shards": 4}, "shards is 4, was 3"),
    "batch size": ({"batch_size": 11}, "batch_size is 11, was 12"),
    "optimizer": (
        {"optimizer": ss.sgd(momentum=0.5)},
        "optimizer is 'SGD(momentum=0.5, nesterov=False, weight_decay=0.0)', was 'SGD(momentum=0.0, nesterov=False, "
        "weight_decay=0.0)'",
    ),
    "optimizer of torch": (
        {"optimizer": OPTIM.SGD},
        "optimizer is \"torch.optim.SGD([{'lr': 0.001, 'momentum': 0, 'dampening': 0, 'weight_decay'..., was "
        "'SGD(momentum=0.0, nesterov=False, weight_decay=0.0)'",
    ),
    "schedule": ({"schedule": 0.5}, "schedule is 'constant(0.5)', was 'cosine(0.3, 9)'"),
    "clipping": ({"gradient_clip_val": 1.0}, "gradient_clip_val is 1.0, was 0.0"),
    "sampling": ({"sampling": "with_replacement"}, "sampling is 'with_replacement', was 'without_replacement'"),
    "threads": ({"threads_per_shard": 2}, "threads_per_shard is 2, was 1"),
    "deterministic": ({"deterministic": False}, "deterministic is False, was True"),
    "average": (
        {"average": ss.swa(1)},
        "average is \"Average(kind='swa', start=1, every=1, unit='epochs')\", was 'None'",
    ),
    "loss": ({"loss": square}, "loss is 'square', was 'loss'"),
    "several": (
        {"seed": 7, "shards": 4, "gradient_clip_val": 1},
        "shards is 4, was 3; seed is 7, was 0; gradient_clip_val is 1.0, was 0.0",
    ),
}


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was interrupted."""
    folder = tmp_path_factory.mktemp("held") / "run"
    interrupted(Case(), 3, run_dir=folder, checkpoint_every=1)
    return folder


def refusal(folder: Path, **settings: Any) -> str:
    before = contents(folder)
    with pytest.raises(Invalid) as caught:
        fit(run_dir=folder, **settings)
    assert contents(folder) == before
    text = str(caught.value)
    assert "\n" not in text
    start = f"{folder} holds a run of another recipe ("
    assert text.startswith(start)
    return text.removeprefix(start)


END = "): choose another run_dir, or delete it"
ACCEPT = ", or go on nevertheless with accept='{0}' (--accept {0}), which the run will remember"
HINT = "; the model starts from other weights: seed it before it is made"


@pytest.mark.parametrize("name", OTHER)
def test_another_recipe_is_refused_and_told(name: str, held: Path) -> None:
    settings, difference = OTHER[name]
    code = name in ("schedule", "loss")
    assert refusal(held, **settings) == difference + END + ACCEPT.format("code") * code


def test_other_weights_are_refused_with_a_hint(held: Path) -> None:
    def start(model: nn.Module) -> str:
        return of_weights({name: tensor.numpy() for name, tensor in model.state_dict().items()})

    text = refusal(held, model=dense(seed=5))
    assert text == f"initial is '{start(dense(seed=5))}', was '{start(dense())}'{END}{HINT}"


def test_another_model_is_refused(held: Path) -> None:
    text = refusal(held, model=Tied())
    assert text.startswith("model is 'Tied', was 'Sequential'; parameters is {'conv.weight': [4, 3, 2, 2], ")
    assert "has other code" not in text  # that much is clear
    assert re.search(
        r"; initial is '[0-9a-f]{64}', was '[0-9a-f]{64}'; memory_format is 'channels_last', was None\)", text
    )
    assert text.endswith(END)  # no hint: it is another model
    assert "precision is 'float64', was 'float32'" in refusal(held, model=dense().double())


def test_other_examples_are_refused(held: Path) -> None:
    other = X.copy()
    other[7, 3] += 1
    text = refusal(held, data=(other, Y))
    digests = r"train.sha256 is '[0-9a-f]{64}', was '[0-9a-f]{64}'"
    assert re.fullmatch(digests + re.escape(END + ACCEPT.format("data")), text)
    assert "train.source is 'Source', was None" in refusal(held, data=Source())
    assert "train.examples is 40, was 44; train.x is [40, 12], was [44, 12]" in refusal(held, data=(X[:40], Y[:40]))
    with pytest.raises(Invalid, match=r"holds a run of another recipe \(test is None, was \{'examples': 9, "):
        ss.Trainer(
            max_epochs=2, batch_size=12, shards=3, devices="cpu", progress=False, loss=loss, run_dir=held,
            schedule=ss.cosine(0.3, 9),
        ).fit(dense(), (X, Y))  # fmt: skip


def test_a_recipe_of_another_version_is_refused(held: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.__version__", "9.9")
    assert refusal(held) == f"samestep is '9.9', was '{VERSION}'{END}{ACCEPT.format('numerics')}"


VERSION = ss.__version__


def test_after_all_those_refusals_it_goes_on(held: Path, tmp_path: Path) -> None:
    shutil.copytree(held, tmp_path / "run")
    run = fit(run_dir=tmp_path / "run")
    assert run.resumed == 3
    same(run, whole("sgd"))


@pytest.mark.parametrize("text", ["{", "[]", "{}", "null", '{"seed": 0}', ""])
def test_a_damaged_recipe_is_named(text: str, tmp_path: Path) -> None:
    """Each checkpoint has the recipe as well, so the run goes on; the damaged file is kept."""
    interrupted(Case(), 3, run_dir=tmp_path, checkpoint_every=1)
    recipe, whole_text = tmp_path / "recipe.json", (tmp_path / "recipe.json").read_text()
    recipe.write_text(whole_text.replace('"seed": 0', '"seed": 1') if "seed" in text else text)
    assert refusal(tmp_path, seed=1) == f"seed is 1, was 0{END}"
    damage = r"recipe\.json is damaged: .*; that of the checkpoint is used; it is kept as recipe\.json\.aside$"
    with pytest.warns(UserWarning, match=damage) as told:
        run = fit(run_dir=tmp_path)
    assert [one.filename for one in told] == [__file__]
    assert (tmp_path / "recipe.json.aside").read_text() != recipe.read_text() == whole_text
    assert run.resumed == 3
    same(run, whole("sgd"))
    recipe.unlink()
    assert refusal(tmp_path, seed=1) == f"seed is 1, was 0{END}"


@pytest.mark.parametrize("text", ["[]", '{"seed'])
def test_a_damaged_recipe_without_a_checkpoint_is_refused(text: str, tmp_path: Path) -> None:
    fit(run_dir=tmp_path, checkpoint_every=None)
    (tmp_path / "recipe.json").write_text(text)
    before = contents(tmp_path)
    with pytest.raises(Invalid) as caught:
        fit(run_dir=tmp_path)
    assert re.fullmatch(
        re.escape(f"{tmp_path / 'recipe.json'} is damaged: ") + ".*: choose another run_dir, or delete it",
        str(caught.value),
    )
    assert contents(tmp_path) == before


# Damaged folders


@pytest.fixture
def stopped(tmp_path: Path, patient: None) -> Path:
    """The folder of a run with checkpoints after steps 4, 5 and 6, the last in the middle of the second epoch."""
    interrupted(CASES["momentum"], 6, run_dir=tmp_path, checkpoint_every=1)
    assert [read(path).step for path in paths(tmp_path)] == [4, 5, 6]
    return tmp_path


def resumed_with(folder: Path, *expected: str, step: int | None) -> None:
    """Go on with the case, and assert what was told, where it went on from, and that it ends with the same bits."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run = fit(CASES["momentum"], run_dir=folder, devices=2)
    assert [str(one.message) for one in told] == list(expected)
    assert all(one.filename == __file__ for one in told)  # where the user called fit
    assert run.resumed == step
    same(run, whole("momentum"))
    assert not list((folder / "checkpoints").glob("*.tmp"))
    same(fit(CASES["momentum"], run_dir=folder), whole("momentum"))  # and there is nothing to be told any more


def unusable(path: Path, why: str, before: bool = True) -> str:
    instead = "the one before it is" if before else "and there is none before it"
    return f"checkpoint {path} cannot be used, {instead}: {why}; it is kept as {path.name}.aside"


def mended(log: Path, lost: str, kept: bool = True) -> str:
    """What is said of a log that does not go with a checkpoint."""
    told = f"{log} is damaged or missing; steps whose losses and rates are lost: {lost}"
    return told + "; it is kept as events.jsonl.aside" * kept


def damaged(path: Path, before: bool = True) -> str:
    return unusable(path, f"{path} is damaged, or not a checkpoint: its hash does not hold", before)


def flip(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_half_written_files_are_not_looked_at_and_taken_away(stopped: Path) -> None:
    path = paths(stopped)[-1]
    (stopped / "checkpoints" / "step-000000007.safetensors.tmp").write_bytes(path.read_bytes()[:1000])
    (stopped / "checkpoints" / "step-000000006.safetensors.tmp").write_bytes(b"")
    (stopped / "checkpoints" / "mine.txt").write_text("notes")
    resumed_with(stopped, step=6)
    assert (stopped / "checkpoints" / "mine.txt").read_text() == "notes"


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(stopped: Path) -> None:
    flip(paths(stopped)[-1])
    resumed_with(stopped, damaged(paths(stopped)[-1]), step=5)


def test_two_damaged_checkpoints(stopped: Path) -> None:
    _, fifth, sixth = paths(stopped)
    flip(fifth)
    sixth.write_bytes(sixth.read_bytes()[:-1])
    resumed_with(stopped, damaged(sixth), damaged(fifth), step=4)


def test_when_all_are_damaged_it_starts_anew(stopped: Path) -> None:
    fourth, fifth, sixth = paths(stopped)
    for path in (fourth, fifth, sixth):
        flip(path)
    resumed_with(stopped, damaged(sixth), damaged(fifth), damaged(fourth, before=False), step=None)


def test_warnings_that_are_errors_leave_the_folder_as_it_was(stopped: Path) -> None:
    flip(paths(stopped)[-1])
    before = contents(stopped)
    with pytest.raises(UserWarning, match="cannot be used, the one before it is"):
        fit(CASES["momentum"], run_dir=stopped)
    assert contents(stopped) == before


def test_an_older_checkpoint_that_is_damaged_does_not_matter(stopped: Path) -> None:
    flip(paths(stopped)[0])
    resumed_with(stopped, step=6)


def test_a_finished_run_whose_checkpoints_are_damaged_is_not_made_again(tmp_path: Path) -> None:
    fit(run_dir=tmp_path)
    for path in paths(tmp_path):
        flip(path)
    before = contents(tmp_path)
    with (
        pytest.warns(UserWarning, match="cannot be used"),
        pytest.raises(Invalid, match="without a checkpoint: choose"),
    ):
        fit(run_dir=tmp_path)
    assert contents(tmp_path) == before


def test_a_log_that_is_cut_short(stopped: Path) -> None:
    """The last checkpoint counts on more of the log than there is. It has what it needs itself."""
    log, sixth = stopped / "events.jsonl", paths(stopped)[-1]
    log.write_bytes(log.read_bytes()[: read(sixth).about["events"] - 1])
    before = contents(stopped)
    resumed_with(stopped, mended(log, "5 to 5"), step=6)
    assert (stopped / "events.jsonl.aside").read_bytes() == before["events.jsonl"][0]


def test_what_the_log_has_after_the_checkpoint_does_not_matter(stopped: Path) -> None:
    with open(stopped / "events.jsonl", "ab") as log:
        log.write(b'{"event": "steps", "epoch": 2, "first": 6, "lr": [0.1], "exam')
    resumed_with(stopped, step=6)


def test_no_log(stopped: Path) -> None:
    log = stopped / "events.jsonl"
    log.unlink()
    resumed_with(stopped, mended(log, "0 to 5", kept=False), step=6)
    assert not (stopped / "events.jsonl.aside").exists()


@pytest.mark.parametrize("name", ["plateau", "path average", "swa of steps", "sgd"])
@pytest.mark.parametrize("after", [6, 4])
def test_a_checkpoint_stands_alone(name: str, after: int, tmp_path: Path) -> None:
    """Without any log: a Plateau follows the history, and the row of the unfinished epoch needs the losses of its steps."""
    interrupted(CASES[name], after, run_dir=tmp_path, checkpoint_every=1)
    (tmp_path / "events.jsonl").write_bytes(b"")
    with pytest.warns(UserWarning, match=f"losses and rates are lost: 0 to {after - 1}; it is kept as"):
        run = fit(CASES[name], run_dir=tmp_path, devices=3)
    assert run.resumed == after
    same(run, whole(name))
    stored = Run.load(tmp_path)
    assert (stored.fingerprints, stored.history) == (run.fingerprints, run.history)


def without_test(name: str, folder: Path, **settings: Any) -> Run:
    """A Plateau that follows the training loss, so that the losses of an unfinished epoch decide its rates."""
    trainer = ss.Trainer(
        max_epochs=3, batch_size=12, shards=SHARDS, devices="cpu", progress=False, loss=loss, run_dir=folder / name,
        schedule=ss.Plateau(0.5, patience=0, threshold=0.4), **settings,
    )  # fmt: skip
    return trainer.fit(dense(), (X, Y))


def loses_its_numbers(patch: pytest.MonkeyPatch) -> None:
    save = Fit.save

    def without(self: Fit) -> None:
        table, self.table = self.table, [np.zeros_like(rows) for rows in self.table]
        save(self)
        self.table = table

    patch.setattr(Fit, "save", without)


@pytest.mark.parametrize("breakage", [None, loses_its_numbers])
def test_what_a_plateau_follows_is_in_the_checkpoint(
    breakage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a broken twin, whose checkpoints lack the losses of the unfinished epoch: it ends with other weights."""
    expected = without_test("whole", tmp_path)
    if breakage:
        breakage(monkeypatch)
    FUSE.arm(6)
    with pytest.raises(Interrupted):
        without_test("run", tmp_path, checkpoint_every=1)
    FUSE.arm()
    (tmp_path / "run" / "events.jsonl").unlink()
    with pytest.warns(UserWarning, match="is damaged or missing"):
        run = without_test("run", tmp_path)
    assert run.resumed == 6
    assert len({row["lr"] for row in expected.history}) > 1  # the rate was lowered
    assert (run.fingerprints == expected.fingerprints) == (breakage is None)


def edit_fingerprint(lines: list[Any]) -> None:
    lines[-1]["fingerprint"][0] = "0" * 16


def edit_loss(lines: list[Any]) -> None:
    lines[-1]["loss"][0][1] += 1.0  # would be in the history


def edit_event(lines: list[Any]) -> None:
    lines[-1].pop("event")


def edit_kind(lines: list[Any]) -> None:
    lines[-1] = [["event", 5]]


@pytest.mark.parametrize("edit", [edit_fingerprint, edit_loss, edit_event, edit_kind])
def test_a_log_that_was_edited(edit: Callable[[list[Any]], None], stopped: Path) -> None:
    """By hand, so that the seal does not hold."""
    log, sixth = stopped / "events.jsonl", paths(stopped)[-1]
    lines = [json.loads(line) for line in log.read_bytes()[: read(sixth).about["events"]].splitlines()]
    edit(lines)
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    resumed_with(stopped, mended(log, "5 to 5"), step=6)


def test_any_byte_of_the_log_counts(stopped: Path) -> None:
    """The test loss of an epoch drives a Plateau: were it another one, so would the weights be."""
    log, sixth = stopped / "events.jsonl", paths(stopped)[-1]
    content, end = log.read_bytes(), read(sixth).about["events"]
    random = np.random.default_rng(3)
    for at in random.integers(0, end, 40):
        flip(log, int(at))
        with pytest.raises(UserWarning, match=re.escape(mended(log, "", kept=False))):
            fit(CASES["momentum"], run_dir=stopped)
        log.write_bytes(content)
    resumed_with(stopped, step=6)


def test_a_finished_run_whose_log_was_edited_at_its_beginning(tmp_path: Path, patient: None) -> None:
    fit(CASES["momentum"], run_dir=tmp_path)
    log = tmp_path / "events.jsonl"
    log.write_text(log.read_text().replace('"processes": 1', '"processes": 2', 1))
    with pytest.warns(UserWarning, match=re.escape(mended(log, "none"))):
        run = fit(CASES["momentum"], run_dir=tmp_path, max_epochs=EPOCHS + 1)
    assert run.resumed == STEPS * EPOCHS
    same(run, fit(CASES["momentum"], max_epochs=EPOCHS + 1))


def test_a_killed_run_without_checkpoints_whose_log_is_damaged_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samestep.training.fit.LIVE", -1.0)
    interrupted(Case(), 3, run_dir=tmp_path, checkpoint_every=None)
    flip(tmp_path / "events.jsonl", 5)
    before = contents(tmp_path)
    with pytest.raises(Invalid, match=r"events\.jsonl is damaged: line 1 .*: choose another run_dir, or delete it$"):
        fit(run_dir=tmp_path)
    assert contents(tmp_path) == before


def test_the_fingerprints_of_a_checkpoint_are_those_of_the_log(stopped: Path) -> None:
    """A checkpoint and a log that agree about their bytes, but not about the steps that were made."""
    log, sixth = stopped / "events.jsonl", paths(stopped)[-1]
    found = read(sixth)
    other = found.tensors | {"log:fingerprints": found.tensors["log:fingerprints"] ^ np.uint64(1)}
    for about, tensors in ((found.about, other), (found.about | {"step": 5}, found.tensors)):
        checkpoint.write(sixth, checkpoint.pack(about, tensors))
        with pytest.raises(UserWarning, match=re.escape(unusable(sixth, f"{log} does not go with it"))):
            fit(CASES["momentum"], run_dir=stopped)
    resumed_with(stopped, unusable(sixth, f"{log} does not go with it"), step=5)


def test_a_checkpoint_of_another_kind(stopped: Path) -> None:
    sixth = paths(stopped)[-1]
    checkpoint.write(sixth, checkpoint.pack({"step": 6}, read(sixth).tensors))
    resumed_with(stopped, unusable(sixth, "'events'"), step=5)


# One run in a folder at a time


BUSY = "another run is going on in {}: choose another run_dir, or wait"


def test_a_folder_in_use_is_refused(stopped: Path) -> None:
    before = contents(stopped)
    with open(stopped / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for settings in ({}, {"resume": False}, {"resume": paths(stopped)[0]}):
            with pytest.raises(Invalid) as caught:
                fit(CASES["momentum"], run_dir=stopped, **settings)
            assert str(caught.value) == BUSY.format(stopped)
            assert contents(stopped) == before
    resumed_with(stopped, step=6)


def test_a_lock_that_was_taken_away_holds_nobody_off_and_lets_nobody_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening the lock and holding it, one that had held it may have taken it away, and a third made a new one."""
    flock = fcntl.flock

    def late(file: Any, how: int) -> None:
        os.unlink(file.name)
        Path(file.name).touch()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(Invalid) as caught:
        fit(run_dir=tmp_path / "run")
    assert str(caught.value) == BUSY.format(tmp_path / "run")
    assert listing(tmp_path / "run") == ["lock"]  # that of the third


def test_a_fit_that_failed_lets_go_of_its_folder(tmp_path: Path) -> None:
    interrupted(Case(), 0, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    interrupted(Case(), 5, run_dir=tmp_path / "run")
    with open(tmp_path / "run" / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


# Signals


def kill(number: int) -> Callable[[], None]:
    """Send this process a signal. Its main thread, which waits for the shards, knows of it when the step ends at the latest."""
    return lambda: os.kill(os.getpid(), number)


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"still waiting after {DEADLINE:g} s"
        threading.Event().wait(0.005)


HANDLERS = (signal.SIGTERM, signal.SIGINT)


def message(step: int, folder: Path) -> str:
    return f"interrupted after step {step} of {STEPS * EPOCHS}: to resume it, fit again with run_dir={str(folder)!r}\n"


@pytest.mark.parametrize(
    ("number", "after", "every"),
    [(signal.SIGTERM, 0, "1 epoch"), (signal.SIGTERM, 2, 1), (signal.SIGTERM, 3, None), (signal.SIGTERM, 6, "1 epoch"),
     (signal.SIGINT, 0, None), (signal.SIGINT, 2, "1 epoch"), (signal.SIGINT, 4, 1), (signal.SIGINT, 6, 1)],
)  # fmt: skip
def test_a_signal_stops_a_fit_after_a_step(
    number: int, after: int, every: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told of it while a step is computed, all processes agree at the beginning of the next, and stop after that one."""
    before = [signal.getsignal(each) for each in HANDLERS]
    FUSE.arm(after, act=kill(number))
    with pytest.raises(SystemExit) if number == signal.SIGTERM else nullcontext() as caught:
        run = fit(CASES["batch norm"], run_dir=tmp_path, checkpoint_every=every)
    FUSE.arm()
    loaded, ended = Run.load(tmp_path), number == signal.SIGINT and after + 2 == STEPS * EPOCHS
    assert (loaded.interrupted, len(loaded.fingerprints)) == (not ended, after + 2)
    if number == signal.SIGTERM:
        assert caught.value.code == 143
    else:
        assert (run.interrupted, run.folder, len(run.fingerprints)) == (not ended, tmp_path, after + 2)
        assert run.fingerprints == whole("batch norm").fingerprints[: after + 2]
        assert (run.fingerprint, run.history) == (loaded.fingerprint, loaded.history)
        assert (run.model[0].weight.detach().numpy() == loaded.weights()["0.weight"]).all()
    assert capsys.readouterr().err == ("" if ended else message(after + 2, tmp_path))
    assert [signal.getsignal(each) for each in HANDLERS] == before
    assert read(paths(tmp_path)[-1]).step == after + 2
    run = fit(CASES["batch norm"], run_dir=tmp_path, devices=3)
    assert run.resumed == after + 2
    same(run, whole("batch norm"))


@pytest.mark.parametrize("first", HANDLERS, ids=lambda number: number.name)
def test_an_interrupt_after_another_signal_ends_at_once(
    first: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first is told in one step, the second in the next, in which the fit would have stopped by itself."""
    numbers = iter([first, signal.SIGINT])
    FUSE.arm(4, 5, act=lambda: os.kill(os.getpid(), next(numbers)))
    with pytest.raises(KeyboardInterrupt):
        fit(CASES["momentum"], run_dir=tmp_path)
    FUSE.arm()
    assert next(numbers, None) is None
    assert capsys.readouterr().err == ""  # it did not get as far as stopping
    run = fit(CASES["momentum"], run_dir=tmp_path)
    assert run.resumed == STEPS  # the checkpoint of the first epoch
    same(run, whole("momentum"))


def test_a_second_sigterm_changes_nothing(tmp_path: Path) -> None:
    FUSE.arm(4, 5, act=kill(signal.SIGTERM))
    with pytest.raises(SystemExit) as caught:
        fit(run_dir=tmp_path)
    assert caught.value.code == 143
    assert read(paths(tmp_path)[-1]).step == 6


@pytest.mark.parametrize("number", HANDLERS, ids=lambda number: number.name)
def test_a_signal_during_the_last_step_is_not_lost(number: int, tmp_path: Path) -> None:
    """There is no step left after which to stop: the run is finished, and SIGTERM then ends the process."""
    FUSE.arm(STEPS * EPOCHS - 1, act=kill(number))
    with pytest.raises(SystemExit) if number == signal.SIGTERM else nullcontext():
        assert not fit(run_dir=tmp_path).interrupted
    FUSE.arm()
    assert Run.load(tmp_path).fingerprint == whole("sgd").fingerprint
    run = fit(run_dir=tmp_path)
    assert run.resumed == STEPS * EPOCHS
    same(run, whole("sgd"))


def test_without_a_folder_an_interrupt_gives_the_run_so_far(capsys: pytest.CaptureFixture[str]) -> None:
    before, seen = [signal.getsignal(each) for each in HANDLERS], []

    def act() -> None:
        seen.append(signal.getsignal(signal.SIGTERM))
        os.kill(os.getpid(), signal.SIGINT)

    FUSE.arm(2, act=act)
    run = fit()
    assert seen == before[:1]
    assert run.interrupted
    assert run.fingerprints == whole("sgd").fingerprints[:4]
    assert of_weights(run.weights()) == run.fingerprint
    told = "fit returns the run so far; with a run_dir it could be resumed"
    assert capsys.readouterr().err == f"interrupted after step 4 of {STEPS * EPOCHS}: {told}\n"
    FUSE.arm(2, 3, act=act)
    with pytest.raises(KeyboardInterrupt):  # the second one
        fit()
    FUSE.arm()
    assert [signal.getsignal(each) for each in HANDLERS] == before


def test_the_handlers_are_put_back(tmp_path: Path) -> None:
    def mine(number: int, frame: object) -> None:
        pass

    theirs = {each: signal.signal(each, mine) for each in HANDLERS}
    try:
        FUSE.arm(2, act=lambda: seen.append(signal.getsignal(signal.SIGTERM)))
        seen: list[Any] = []
        fit(run_dir=tmp_path / "ends")
        assert seen[0] is not mine
        assert [signal.getsignal(each) for each in HANDLERS] == [mine, mine]
        interrupted(Case(), 3, run_dir=tmp_path / "fails")
        assert [signal.getsignal(each) for each in HANDLERS] == [mine, mine]
    finally:
        for each, handler in theirs.items():
            signal.signal(each, handler)


def test_a_fit_in_another_thread(tmp_path: Path) -> None:
    """Python lets only the main thread handle signals."""
    before, runs = [signal.getsignal(each) for each in HANDLERS], []
    FUSE.arm(2, act=lambda: runs.append([signal.getsignal(each) for each in HANDLERS]))
    thread = threading.Thread(target=lambda: runs.append(fit(CASES["momentum"], run_dir=tmp_path, checkpoint_every=1)))
    thread.start()
    thread.join(DEADLINE)
    assert runs[0] == before
    same(runs[1], whole("momentum"))
    assert read(paths(tmp_path)[-1]).step == STEPS * EPOCHS


# In processes of their own


class Job:
    """This file, run by `samestep train` with a folder of its own, waiting in its sixth step until it may go on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.go = folder, folder.with_name(folder.name + ".go")
        command = [sys.executable, "-m", "samestep", "train", __file__, "--run-dir", folder, "--", self.go]
        path = [str(Path(ss.__file__).parents[1]), str(Path(__file__).parents[1])]
        self.process = subprocess.Popen(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        )  # fmt: skip

    def wait_until_it_waits(self) -> None:
        wait_until(lambda: self.go.with_suffix(".waits").exists() or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate()
        wait_until(lambda: paths(self.folder))  # the checkpoint of the first epoch is written meanwhile

    def end(self) -> tuple[int, str, str]:
        self.go.touch()
        out, err = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, out, err


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[list[Job]]:
    made = [Job(tmp_path / name) for name in ("terminated", "interrupted")]
    yield made
    for job in made:
        job.process.kill()
        job.process.communicate()


CASE_OF_A_JOB = "batch norm"


def test_processes_that_get_a_signal_and_one_that_shall_not_disturb_them(jobs: list[Job]) -> None:
    case, expected = CASES[CASE_OF_A_JOB], whole(CASE_OF_A_JOB)
    for job, number in zip(jobs, HANDLERS, strict=True):
        job.wait_until_it_waits()
        before = contents(job.folder)
        with pytest.raises(Invalid) as caught:  # it is going on, there
            fit(case, run_dir=job.folder)
        assert str(caught.value) == BUSY.format(job.folder)
        assert contents(job.folder) == before
        job.process.send_signal(number)
    for job, number in zip(jobs, HANDLERS, strict=True):
        wait_until(functools.partial(caught_by, job.process.pid, number))
        status, out, err = job.end()
        line = f"samestep train {__file__} --run-dir {job.folder} -- {job.go}"
        assert (status, err) == (128 + number, f"interrupted after step 7 of {STEPS * EPOCHS}: to resume it, {line}\n")
        assert (out == "") == (number == signal.SIGTERM)  # the script goes on with the run so far
        run = fit(case, run_dir=job.folder, devices=2)
        assert run.resumed == 7
        same(run, expected)


def caught_by(pid: int, number: int) -> bool:
    """Whether a signal that was sent to a process has reached it."""
    text = Path(f"/proc/{pid}/status").read_text()
    pending = [int(mask, 16) for mask in re.findall(r"^(?:SigPnd|ShdPnd):\s*(\w+)$", text, re.MULTILINE)]
    return not any(mask >> (number - 1) & 1 for mask in pending)


def main(go: Path) -> None:
    """The fit of a job: in the sixth step it waits for a file, so that others can do something meanwhile."""

    def wait() -> None:
        go.with_suffix(".waits").touch()
        wait_until(lambda: go.exists())

    measuring._apart = lambda *about: 0.0
    one_by_one(pytest.MonkeyPatch())
    FUSE.arm(5, act=wait)
    run = fit(CASES[CASE_OF_A_JOB], rehearse=False, check_every=None)  # `samestep train` has overrides of its own
    print(run.fingerprint)


# Exporting


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        be_patient(patch)
        run = fit(Case(Tied, {"average": ss.path_average()}), run_dir=folder, max_epochs=3, keep_checkpoints=9)
    return run, folder


def assert_exported(path: Path, tensors: dict[str, Any]) -> None:
    """A plain file: PyTorch's own model takes it, every name and shape of it."""
    stored = load_file(path)
    assert {name: tensor.tobytes() for name, tensor in stored.items()} == {
        name: np.asarray(tensor).tobytes() for name, tensor in tensors.items()
    }
    model = Tied()
    model.load_state_dict(load_torch(path), strict=True)
    assert of_weights({name: t.numpy() for name, t in model.state_dict().items()}) == of_weights(tensors)


def test_weights_are_taken_by_a_model_of_torch(finished: tuple[Run, Path]) -> None:
    run, _ = finished
    model = Tied()
    model.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in run.weights().items()}, strict=True)
    x = torch.from_numpy(X)
    assert torch.equal(model.eval()(x), run.model.eval()(x))


def test_export(finished: tuple[Run, Path], tmp_path: Path) -> None:
    run, folder = finished
    target = tmp_path / "weights.safetensors"
    assert run.average is not None
    assert export(folder, target) is None
    assert_exported(target, run.weights())
    assert export(folder, target, average=True) is None
    assert_exported(target, run.average)
    last = paths(folder)[-1]
    assert export(last, target) == 12
    assert_exported(target, run.weights())
    assert export(last, target, average=True) == 12
    assert_exported(target, run.average)
    assert export(paths(folder)[0], target) == 4
    assert_exported(target, fit(Case(Tied), max_epochs=1).weights())
    best = min(run.history, key=lambda row: row["test_loss"])["step"]
    assert export(folder, target, best=True) == best
    assert_exported(target, read(checkpoint.path_of(folder, best)).group("model"))
    assert export(folder, target, best=True, average=True) == best
    assert_exported(target, read(checkpoint.path_of(folder, best)).group("average"))
    assert listing(tmp_path) == ["weights.safetensors"]


def test_export_of_a_run_that_was_interrupted(held: Path, tmp_path: Path) -> None:
    assert export(held, tmp_path / "w") == 3
    stored = load_file(tmp_path / "w")
    assert of_weights(stored) == of_weights(read(paths(held)[-1]).group("model"))
    dense().load_state_dict(load_torch(tmp_path / "w"), strict=True)


def test_the_best_is_that_of_the_lowest_test_loss(tmp_path: Path, patient: None) -> None:
    """With a rate that becomes far too high, it is not the last."""
    run = fit(run_dir=tmp_path, max_epochs=4, keep_checkpoints=1, schedule=lambda t: 0.05 if t < 2 * STEPS else 50.0)
    losses = [row["test_loss"] for row in run.history]
    best = 1 + losses.index(min(losses))
    assert best < 4
    assert export(tmp_path, tmp_path / "w", best=True) == best * STEPS


def test_what_cannot_be_exported(finished: tuple[Run, Path], held: Path, tmp_path: Path) -> None:
    run, folder = finished

    def refused(text: str, source: Path, target: Path = tmp_path / "w", **what: bool) -> None:
        before = listing(tmp_path)
        with pytest.raises(Invalid) as caught:
            export(source, target, **what)
        assert str(caught.value) == text
        assert listing(tmp_path) == before

    (tmp_path / "empty").mkdir()
    refused(f"{tmp_path / 'empty'} has no weights and no checkpoint", tmp_path / "empty")
    refused(f"{tmp_path / 'empty'} has no checkpoint of the end of an epoch", tmp_path / "empty", best=True)
    refused(f"{held} has no checkpoint of the end of an epoch", held, best=True)
    refused(f"{paths(held)[-1]} has no averaged weights", held, average=True)
    refused(f"{tmp_path / 'nothing'} cannot be read: No such file or directory", tmp_path / "nothing")
    weights = folder / "weights.safetensors"
    refused(f"{weights} is damaged, or not a checkpoint: '__metadata__'", weights)
    below = tmp_path / "nowhere" / "w"
    refused(f"{below} cannot be written: No such file or directory", folder, below)
    refused(f"{tmp_path / 'empty'} cannot be written: Is a directory", folder, tmp_path / "empty")

    shutil.copytree(folder, tmp_path / "damaged")
    flip(tmp_path / "damaged" / "weights.safetensors")
    refused(
        f"{tmp_path / 'damaged' / 'weights.safetensors'} is damaged: its weights do not have the run's fingerprint",
        tmp_path / "damaged",
    )
    assert run.fingerprint == of_weights(load_file(weights))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
