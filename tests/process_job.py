"""What the processes of test_processes.py do: fits of a small zoo, accidents at a chosen step, and broken twins.

    process_job.py JOB FOLDER [SETTINGS as JSON]

What a process saw, and the error that ended it, is left in FOLDER/rank-R.json. It is run by `samestep train`, by torchrun
and by hand; most tests fork it from a process that has loaded PyTorch already (`enter`), as loading takes seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._inductor.config  # what determinism asks for in the first fit: a fork should have it already
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import samestep as ss
from samestep import draws
from samestep.backends import layout as layouts
from samestep.backends.torch.backend import backend as torch_backend
from samestep.backends.torch.replica import TorchReplica
from samestep.devices import cpu
from samestep.errors import NotFinite, ProcessFailed
from samestep.fingerprint import of_weights
from samestep.processes.exchange import Across
from samestep.processes.mpi import MpiWorld
from samestep.processes.place import find
from samestep.processes.torch import TorchWorld
from samestep.training import fit
from samestep.training.replicas import Replicas
from samestep.training.step import StepAcross
from samestep.training.stretch import Threads

DEADLINE = 60.0  # seconds after which a condition that does not come is a failure
RANDOM = np.random.default_rng(0)
N = 35  # batches of 16, 16 and 3: the last one has fewer shards than there may be devices
X, Y = RANDOM.standard_normal((N, 12)).astype(np.float32), RANDOM.integers(0, 3, N)
TOKENS = RANDOM.integers(0, 10, (N, 5))
NUMBERS = "numbers.npy"  # X as a file, for a memmap


# The zoo


class Embedded(nn.Module):
    """A bag of words whose scores use the embedding again, if tied."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words, self.hidden, self.scores = nn.Embedding(10, 6), nn.Linear(6, 6), nn.Linear(6, 10, bias=False)
        if tied:
            self.scores.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(torch.tanh(self.hidden(self.words(x).mean(1))))


class Partial(nn.Module):
    """One layer is never used, one not always, and one is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.middle = nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.sometimes, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.middle.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle(torch.tanh(self.first(x)))
        return self.last(x + self.sometimes(x) if float(x.detach()[0, 0]) > 0 else x)


class Again(nn.Module):
    """The middle is computed again in the backward pass, where its dropout draws again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 16), nn.Linear(16, 3)
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.middle, torch.tanh(self.first(x)), use_reentrant=False))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


def conv() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
                         nn.Dropout(0.2), nn.Flatten(), nn.Linear(48, 3))  # fmt: skip


def deep() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 12)), nn.BatchNorm1d(1, affine=False), nn.Flatten(), nn.Linear(12, 12),
                         nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 3))  # fmt: skip


def unseeded() -> nn.Module:
    torch.manual_seed(1000 + find().rank)
    return mlp()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def arrays(folder: Path) -> ss.Data:
    return ss.Data((X, Y), (X[:21] + 1, Y[:21]))


def words(folder: Path) -> ss.Data:
    return ss.Data((TOKENS, Y), (TOKENS[:2], Y[:2]))  # fewer to evaluate than there are devices


def memmap(folder: Path) -> ss.Data:
    x = np.load(folder / NUMBERS, mmap_mode="r")
    assert isinstance(x, np.memmap)
    return ss.Data((x, Y), (x[:21], Y[:21]))


def plain(folder: Path) -> ss.Data:
    return ss.Data((X, Y))


SMALL = 32  # numbers of a band, where there are to be several
# name → how to make the model, the data, the Trainer's settings, and the size of a band
ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[Path], ss.Data], dict[str, Any], int]] = {
    "dropout": (mlp, arrays, {}, 0),
    "seven shards": (mlp, arrays, {"shards": 7, "optimizer": ss.sgd(momentum=0.9)}, 0),
    "batch norm": (conv, arrays, {"optimizer": ss.sgd(momentum=0.9), "gradient_clip_val": 0.5}, 0),
    "embedding": (lambda: Embedded(False), words, {"optimizer": ss.adam(), "schedule": ss.cosine(0.05, 8)}, 0),
    "swa": (conv, arrays, {"average": ss.swa(2, 2, unit="steps"), "optimizer": ss.adam()}, 0),
    "sgld": (mlp, arrays, {"optimizer": ss.sgld(), "schedule": 0.01}, 0),
    "memmap": (mlp, memmap, {"optimizer": ss.adam(), "schedule": 0.01, "sampling": "with_replacement"}, 0),
    "unseeded": (unseeded, arrays, {"shards": 7}, 0),
    "bands": (deep, arrays, {"optimizer": ss.sgd(momentum=0.9), "gradient_clip_val": 0.5}, SMALL),
    "bands, seven shards": (deep, memmap, {"shards": 7}, SMALL),
    "bands, unused": (Partial, arrays, {"optimizer": ss.adam(), "schedule": 0.01}, SMALL),
    "bands, tied": (lambda: Embedded(True), words, {"optimizer": ss.sgd(momentum=0.5)}, SMALL),
    "bands, again": (Again, arrays, {"optimizer": ss.sgd(momentum=0.9)}, SMALL),
    "bands, torch's": (deep, plain, {"optimizer": adamw, "schedule": None}, SMALL),
}


def trained(name: str, folder: Path, devices: int, **settings: Any) -> tuple[ss.Trainer, ss.Data, ss.Run, int]:
    """One fit of the zoo; with the number of bands that a vector goes in."""
    make, load, own, band = ZOO[name]
    given = {"max_epochs": 2, "batch_size": 16, "schedule": 0.1, "progress": False, "devices": ["cpu"] * devices}
    torch.manual_seed(0)
    model, examples = make(), load(folder)
    before, layouts.LEAST = layouts.LEAST, band or layouts.LEAST
    try:
        bands = len(torch_backend.replica(model, None, cpu(), 8).bands)
        trainer = ss.Trainer(**{**given, **own, **settings})
        return trainer, examples, trainer.fit(model, examples), bands
    finally:
        layouts.LEAST = before


def outcome(result: ss.Run) -> dict[str, Any]:
    """All of a run that must be the same, whoever computed it."""
    rows = [{name: value for name, value in row.items() if name != "seconds"} for row in result.history]
    average = None if result.average is None else of_weights(result.average)
    return {
        "fingerprint": result.fingerprint, "fingerprints": result.fingerprints, "history": rows, "recipe": result.recipe,
        "average": average, "average_metrics": result.average_metrics,
    }  # fmt: skip


def zoo(folder: Path, names: list[str] | None = None, counts: tuple[int, ...] = (1, 2)) -> dict[str, Any]:
    """Fit models of the zoo on each number of devices per process, and evaluate what came out."""
    seen: dict[str, Any] = {}
    for name in names or ZOO:
        for devices in counts:
            if find().size * devices <= ZOO[name][2].get("shards", 8):
                trainer, examples, result, bands = trained(name, folder, devices)
                seen[f"{name} on {devices}"] = {
                    "run": outcome(result), "evaluated": trainer.evaluate(result.model, examples),
                    "weights": of_weights(result.weights()), "rank": result.rank, "devices": result.devices,
                    "bands": bands,
                }  # fmt: skip
    return seen


def one(folder: Path, name: str = "dropout", devices: int = 1, **settings: Any) -> dict[str, Any]:
    """One fit, with what befalls it."""
    result = trained(name, folder, devices, **settings)[2]
    best = result.best.fingerprint if result.folder and not result.interrupted else None
    return {"run": outcome(result), "resumed": result.resumed, "folder": str(result.folder), "best": best}


def several(folder: Path, fits: int = 1, **settings: Any) -> dict[str, Any]:
    """So many fits, one after the other."""
    return [{}, *(one(folder, **settings) for _ in range(fits))][-1]


def again(folder: Path) -> dict[str, Any]:
    """A fit that fails in every process alike, and one after it."""
    try:
        one(folder, schedule=1e30)
    except NotFinite as error:
        return one(folder) | {"before": str(error)}
    raise AssertionError("it has not failed")


def evaluated(folder: Path) -> dict[str, Any]:
    """The evaluation of a model that every process has made for itself."""
    return ss.Trainer(devices="cpu", batch_size=16).evaluate(unseeded(), arrays(folder))


def own_steps(folder: Path, rows: Sequence[int] = (0, 12), lr: float = 0.1, seed: int = 0) -> dict[str, Any]:
    """Two steps of a Group, the second from some rows of the examples."""
    torch.manual_seed(0)
    group, given = ss.Group(mlp(), devices=["cpu"], seed=seed), slice(*rows)
    group.step(X[:12], Y[:12], lr=0.1)
    return {"prints": group.step(X[given], Y[given], lr=lr).fingerprint}


def own_group(folder: Path, **settings: Any) -> dict[str, Any]:
    """A script that uses torch.distributed itself, before samestep and after it."""
    dist.init_process_group("gloo")
    try:
        seen = one(folder, **settings)
    except (ValueError, ProcessFailed) as error:
        seen = {"caught": str(error)}
    numbers = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(numbers, torch.tensor([float(dist.get_rank())]))
    dist.destroy_process_group()
    return {**seen, "gathered": [float(number) for number in numbers]}


# Accidents


def await_(what: Callable[[], Any], name: str) -> None:
    """Wait for a condition that has nothing to notify us."""
    end = time.monotonic() + DEADLINE
    while not what():
        if time.monotonic() > end:
            raise TimeoutError(name)
        time.sleep(0.01)


def befall(how: str, at: int, where: str = "before") -> None:
    """Have something happen to this process in the step after `at` updates."""
    step_of, compute, added = Replicas.step, TorchReplica._compute, StepAcross._added
    now, shards, happened = -1, 0, False

    def happen() -> None:
        nonlocal happened
        if not happened:
            happened = True
            if how == "raise":
                raise ValueError("boom\nand more of it")
            number = {"kill": "KILL", "stop": "STOP", "terminate": "TERM", "interrupt": "INT"}[how]
            os.kill(os.getpid(), getattr(signal, f"SIG{number}"))

    def stepping(self: Any, batch: Any, lr: float, t: int) -> Any:
        nonlocal now, shards
        now, shards = t, 0
        if t == at and where == "before":
            happen()
        numbers = step_of(self, batch, lr, t)
        if t == at and where == "after":
            happen()
        return numbers

    def computing(self: Any, *arguments: Any) -> Any:
        nonlocal shards
        shards += 1
        if now == at and where == "middle" and shards == 2:
            happen()
        return compute(self, *arguments)

    def adding(self: Any, band: int, span: Any) -> None:
        added(self, band, span)
        if now == at and where == "bands" and not self._missing[0]:
            happen()  # the first band is on its way, the others will never come

    Replicas.step, StepAcross._added = stepping, adding  # type: ignore[method-assign]
    Threads.of = staticmethod(lambda group: None)  # type: ignore[assignment,method-assign] # one step in each call
    TorchReplica._compute = computing  # type: ignore[method-assign]


def befall_between(at: int) -> None:
    """Stop this process in a swap of the step after `at` updates, when the first of the others has its numbers."""
    kind = TorchWorld if find().meet else MpiWorld
    swap, step_of = kind.swap, Replicas.step
    now = -1

    def stepping(self: Any, batch: Any, lr: float, t: int) -> Any:
        nonlocal now
        now = t
        return step_of(self, batch, lr, t)

    def swapping(self: Any, sends: Any, receives: Any) -> Any:
        if now == at:
            first = min(rank for rank, _ in sends)
            works = swap(self, [(r, v) for r, v in sends if r == first], [(r, v) for r, v in receives if r == first])
            for work in works:
                self.wait(work)
            os.kill(os.getpid(), signal.SIGSTOP)
        return swap(self, sends, receives)

    Replicas.step, kind.swap = stepping, swapping  # type: ignore[method-assign]


class Pausing(nn.Module):
    """Two layers; between them, the backward pass can be held up."""

    def __init__(self, pause: Callable[[], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(12, 8), nn.Linear(8, 3)

        class Pause(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                pause()
                return gradient

        self.pause = Pause.apply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.pause(torch.tanh(self.first(x))))


def pausing(pause: Callable[[], None], devices: int = 1) -> ss.Run:
    trainer = ss.Trainer(max_epochs=1, batch_size=16, progress=False, devices=["cpu"] * devices)
    return trainer.fit(Pausing(pause), ss.Data((X[:16], Y[:16])))  # one step


def overlap(folder: Path, devices: int = 1, deadline: float = DEADLINE) -> dict[str, Any]:
    """A step in which the first layer's backward waits until the last layer's band has been summed over all processes.

    If bands were sent after the backward pass, this would wait for ever; it waits until the deadline.
    """
    told: list[str] = []
    summed = threading.Event()
    sum_up, added, compute = Across.sum, StepAcross._added, TorchReplica._compute
    steps: list[StepAcross] = []

    def pause() -> None:
        if steps and not steps[-1]._missing[0]:  # all shards of this process have delivered their first band
            told.append("the first layer's backward waits")
            if not summed.wait(deadline):
                raise TimeoutError("no band was sent while the backward pass went on")

    def adding(self: Any, band: int, span: Any) -> None:
        steps.append(self)
        with self._lock:
            last = self._missing[band] == 1
        if last:
            told.append(f"band {band} is ready")
        added(self, band, span)

    def summing(*arguments: Any) -> Any:
        told.append("sending begins")
        total = sum_up(*arguments)
        told.append("sending ends")
        summed.set()
        return total

    def computing(self: Any, *arguments: Any) -> Any:
        vector = compute(self, *arguments)
        told.append("a shard's backward ends")
        return vector

    Across.sum, StepAcross._added = summing, adding  # type: ignore[method-assign]
    TorchReplica._compute = computing  # type: ignore[method-assign]
    layouts.LEAST = SMALL
    return {"run": outcome(pausing(pause, devices)), "told": told}


# Broken twins


def in_order_of_ranks(self: Any, parts: Any, held: Any, n: int, lo: int, hi: int) -> Any:
    """Twin of `Across.sum`: whole vectors are sent, and every process adds them from left to right."""
    world, mine = self.world, {span: self.world.bring(vector) for span, vector in sorted(parts.items())}
    others = [q for q in range(world.size) if q != world.rank]
    incoming = {q: [world.empty(hi - lo, self.total) for _ in held[q]] for q in others}
    sends = [(q, part.clone()) for q in others for part in mine.values()]
    for works in world.swap(sends, [(q, v) for q, vectors in incoming.items() for v in vectors]):
        world.wait(works)
    vectors = [v for q in range(world.size) for v in (mine.values() if q == world.rank else incoming[q])]
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total += vector
    return total


def twin(name: str) -> None:
    """Break something."""
    rank = find().rank
    if name == "adds in the order of ranks":
        Across.sum = in_order_of_ranks  # type: ignore[method-assign]
    elif name in ("loses a part", "loses a sum"):
        swap, swaps = TorchWorld.swap, 0

        def losing(self: Any, sends: Any, receives: Any) -> Any:
            nonlocal swaps
            swaps += 1
            if rank == 1 and swaps == (3 if name == "loses a part" else 4):  # the second step's first swap, or its last
                sends = [(q, torch.zeros_like(vector) if i == 0 else vector) for i, (q, vector) in enumerate(sends)]
            return swap(self, sends, receives)

        TorchWorld.swap = losing  # type: ignore[method-assign]
    elif name == "computes wrongly":
        gradient = TorchReplica.gradient
        TorchReplica.gradient = lambda *given: gradient(*given) * (1 + rank / 1e6)  # type: ignore[method-assign]
    elif name == "shuffles by rank":
        order = draws.order
        draws.order = lambda seed, *rest: order(seed + rank, *rest)
    elif name == "sends at the end":
        send_all = StepAcross._send

        def waiting(self: Any) -> Any:
            for event in self._ready:
                event.wait()
            return send_all(self)

        StepAcross._send = waiting  # type: ignore[method-assign]
    elif name == "saves what rank 0 has":
        save, send = fit.Fit.save, StepAcross._send
        local: list[torch.Tensor] = []

        def sending(self: Any) -> Any:
            for event in self._ready:
                event.wait()
            local[:] = [next(iter(self.sums[0].folds[0].parts.values())).clone()]
            return send(self)

        def saving(self: Any) -> None:
            replica, updater = self.group.replicas[0], self.group.updaters[0]
            whole = updater.state
            updater.state = dict.fromkeys(whole, local[0][: len(replica.parameters)] / 16)
            save(self)
            updater.state = whole

        fit.Fit.save, StepAcross._send = saving, sending  # type: ignore[method-assign]
    else:
        raise ValueError(name)


# One process

JOBS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "zoo": zoo, "one": one, "again": again, "evaluated": evaluated, "own group": own_group, "overlap": overlap,
    "several": several, "own steps": own_steps,
}  # fmt: skip


def main(job: str, folder: str, settings: str = "{}") -> None:
    given, rank, into = json.loads(settings), find().rank, Path(folder)
    given |= given.pop(f"rank {rank}", {})  # what only this process is told
    given = {key: value for key, value in given.items() if not key.startswith("rank ")}
    os.environ.update(given.pop("environ", {}))
    catch, seen = given.pop("catch", False), {"pid": os.getpid()}
    stopped: list[int] = []
    stop = fit.Fit.stop

    def stopping(self: Any, number: int) -> None:
        stopped.append(self.step)
        stop(self, number)

    fit.Fit.stop = stopping  # type: ignore[method-assign]

    def tell() -> None:
        temporary = into / f"rank-{rank}.tmp"
        temporary.write_text(json.dumps(seen | {"stopped": stopped}))
        temporary.rename(into / f"rank-{rank}.json")

    try:
        if "twin" in given:
            twin(given.pop("twin"))
        if "befall" in given:
            befall(*given.pop("befall"))
        if "befall between" in given:
            befall_between(given.pop("befall between"))
        seen |= JOBS[job](into, **given)
    except BaseException as error:
        seen["error"] = [type(error).__name__, str(error)]
        if not catch:
            raise
        tell()
        await_((into / "go on").exists, "the others have not ended")
    finally:
        tell()


def enter(environ: dict[str, str], output: str, *arguments: str) -> None:
    """`main` in a process that was forked, with an environment and with its output in a file."""
    with open(output, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environ)
    main(*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
