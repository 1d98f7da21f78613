"""Time and memory of a step: samestep beside what else there is for PyTorch, in one process, in alternating rounds.

    python benchmarks/speed.py [--models lenet,jax,resnet18,gpt,gpt2] [--precision tf32,bfloat16] [--rounds 5] [--budget 120]
        [--only TEXT,TEXT] [--without TEXT,TEXT] [--peers none] [--replicas 1,2,3,8] [--device cuda]
    python benchmarks/speed.py --tiny           small models and few steps, to see that it runs

The models: LeNet (batch 256, images like Fashion-MNIST's, float32); an MLP of 784, 256 and 10 units (the same); ResNet-18
(3 x 32 x 32, batch 512); a GPT of 11 million weights (64 x 256 tokens); GPT-2 of 124 million (16 x 1024 tokens). The last three
in tf32 and in bfloat16, GPT-2 in bfloat16. On a CPU: LeNet and the MLP. `jax`: LeNet in JAX, beside a jitted step and beside a
scan over a whole epoch, written by hand.

The peers: a plain loop (a random batch by index on the device, zero_grad, forward, backward, a step of torch.optim; loss and
hits summed on the device); the same with channels_last, with torch.compile, with mode="reduce-overhead"; a CUDA graph of
the whole step, which draws the batch, too, also with the model compiled, and with cudnn.benchmark; Lightning and Accelerate as
users write them (LeNet and MLP). All have the same optimizer and precision: SGD, with momentum for ResNet; AdamW, fused, for
the GPTs. tf32: both switches of PyTorch on; float32: both off; bfloat16: autocast around forward and loss, the switches off.

samestep's figures are from whole epochs of a fit, the second and later ones: `seconds` of the history over the steps, with
all that a fit does in them (metrics, fingerprints, checks, the order of examples). A round is a fit of 3 epochs; what takes
long to prepare (compile, GPT-2) is one fit of rounds + 1 epochs, and each but the first is a sample. What a fit warns of is
printed.

Memory is torch.cuda.max_memory_allocated from before a configuration is made to after its first steps, less what was
allocated before: so without the examples, and for samestep without its own copy of them. `replicas` tells whether the
fingerprints of every step are those of one replica.

--only and --without choose by parts of names (the plain loop always runs); --budget: seconds for one model at one
precision, after which nothing more is prepared. What matters most comes first.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import os
import statistics
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from machine import keep, machine, table
from torch import Tensor, nn

import samestep as ss
from samestep.models import torch as models

KNOWN = {one.name for one in fields(ss.Trainer)}


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.dropout = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))


class GPT(nn.Module):
    """GPT-2, with one matrix for the tokens that come in and the scores that go out; the loss is over all positions."""

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        vocabulary: int,
        context: int,
        dropout: float = 0.0,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)), nn.LayerNorm(width))
        self.scores = None if tied else nn.Linear(width, vocabulary, bias=False)
        for weights in self.parameters():
            if weights.ndim > 1:
                nn.init.normal_(weights, std=0.02)

    def forward(self, x: Tensor) -> Tensor:  # (B, L) -> (B, L, vocabulary)
        x = self.blocks(self.token(x) + self.place.weight[: x.shape[1]])
        return F.linear(x, self.token.weight if self.scores is None else self.scores.weight).float()


@dataclass
class Case:
    """A model with its data and optimizer."""

    name: str
    make: Callable[[], nn.Module]
    batch: int
    steps: int  # of an epoch
    shape: tuple[int, ...]  # of an example; of tokens: its length
    classes: int = 10
    momentum: float = 0.0
    adamw: bool = False
    rate: float = 0.01
    precisions: tuple[str, ...] = ("float32",)
    at_once: bool = False  # all epochs in one fit, as a fit takes long to prepare
    tokens: bool = False
    images: bool = False
    small: bool = False  # a model for which the frameworks around PyTorch are measured, too
    replicas: bool = False
    jax: bool = False

    def examples(self) -> tuple[np.ndarray, np.ndarray]:
        random, n = np.random.default_rng(0), self.batch * self.steps
        if self.tokens:
            text = random.integers(0, self.classes, (n, self.shape[0] + 1))
            return np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:])
        return random.random((n, *self.shape), dtype=np.float32), random.integers(0, self.classes, n)

    def optimizer(self, model: nn.Module, **how: Any) -> torch.optim.Optimizer:
        if self.adamw:
            return torch.optim.AdamW(model.parameters(), lr=self.rate, weight_decay=0.1, fused=True, **how)
        how.pop("capturable", None)
        return torch.optim.SGD(model.parameters(), lr=self.rate, momentum=self.momentum, **how)

    def ours(self) -> Any:
        return ss.adamw(weight_decay=0.1) if self.adamw else ss.sgd(momentum=self.momentum)


def cases(tiny: bool, cuda: bool) -> dict[str, Case]:
    image, both, own = (1, 28, 28), ("tf32", "bfloat16"), ("JAX's own precision",)
    steps = 234 if cuda else 40  # as many as Fashion-MNIST has
    mlp = partial(models.mlp, dropout=0.0)
    if tiny:
        return {
            "lenet": Case("LeNet", models.lenet, 32, 4, image, small=True, replicas=True, images=True),
            "mlp": Case("MLP", mlp, 32, 4, image, small=True, replicas=True),
            "jax": Case("LeNet in JAX", jax_model, 32, 4, image, precisions=own, at_once=True, replicas=True, jax=True),
            "resnet18": Case("ResNet-18", partial(models.resnet18, 3, width=4), 16, 3, (3, 32, 32), momentum=0.9,
                             precisions=both, images=True),
            "gpt": Case("GPT", partial(GPT, 2, 32, 2, 64, 16, 0.2, False), 8, 3, (16,), 64, adamw=True, rate=1e-3,
                        precisions=both, tokens=True),
            "gpt2": Case("GPT-2", partial(GPT, 2, 32, 2, 128, 16), 8, 3, (16,), 100, adamw=True, rate=1e-3,
                         precisions=("bfloat16",), tokens=True, at_once=True),
        }  # fmt: skip
    return {
        "lenet": Case("LeNet, batch 256", models.lenet, 256, steps, image, small=True, replicas=True, images=True),
        "mlp": Case("MLP 784-256-10, batch 256", mlp, 256, 234, image, small=True, replicas=True),
        "jax": Case("LeNet in JAX, batch 256", jax_model, 256, steps, image, precisions=own, at_once=True, replicas=True,
                    jax=True),
        "resnet18": Case("ResNet-18, 3 x 32 x 32, batch 512", partial(models.resnet18, 3), 512, 40 if cuda else 2, (3, 32, 32),
                         momentum=0.9, precisions=both, images=True),
        "gpt": Case("GPT of 11 M, 64 x 256 tokens", partial(GPT, 6, 384, 6, 257, 256, 0.2, False), 64, 30 if cuda else 1,
                    (256,), 257, adamw=True, rate=1e-3, precisions=both, tokens=True),
        "gpt2": Case("GPT-2 of 124 M, 16 x 1024 tokens", partial(GPT, 12, 768, 12, 50304, 1024), 16, 20 if cuda else 1, (1024,),
                     50257, adamw=True, rate=3e-4, precisions=("bfloat16",), tokens=True, at_once=True),
    }  # fmt: skip


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@contextmanager
def switches(precision: str, benchmark: bool = False) -> Iterator[None]:
    """PyTorch's own switches, for a peer; samestep has settings of its own."""
    cudnn, tf32 = torch.backends.cudnn, precision == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    cudnn.allow_tf32, cudnn.benchmark = tf32, benchmark
    try:
        yield
    finally:  # as PyTorch begins
        torch.set_float32_matmul_precision("highest")
        cudnn.allow_tf32, cudnn.benchmark = True, False


def told() -> str:
    """The last lines of the error that is being handled."""
    lines = [line.rstrip() for line in traceback.format_exc().splitlines() if line.strip(" ^~|")]
    if isinstance(sys.exception(), NotImplementedError):
        lines = lines[-1:]
    return "\n".join(f"    {line[:200]}" for line in lines[-4:])


# The peers


class Loop:
    """A loop as it is written by hand."""

    def __init__(
        self, case: Case, x: Tensor, y: Tensor, precision: str, last: bool = False, mode: str = "", **how: Any
    ) -> None:
        self.case, self.x, self.y, self.last, self.device = case, x, y, last, x.device.type
        self.precision, self.benchmark = precision, False
        torch.manual_seed(0)
        self.model = copy.deepcopy(case.make()).to(self.device).train()
        if last:
            self.model = self.model.to(memory_format=torch.channels_last)
        self.optimizer = case.optimizer(self.model, **how)
        self.total = torch.zeros((), device=self.device)
        self.hits = torch.zeros((), dtype=torch.int64, device=self.device)
        self.compute, self.marks = self.computing(), mode == "reduce-overhead"
        if mode:
            self.compute = torch.compile(self.compute, mode=mode)

    def computing(self) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Loss and hits of a batch. The function has code of its own: torch.compile counts compilations by code."""
        model, tokens = self.model, self.case.tokens
        sixteen, device = self.precision == "bfloat16", self.device

        def compute(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast(device, torch.bfloat16, enabled=sixteen):
                scores = model(x)
                if tokens:
                    return F.cross_entropy(scores.flatten(0, 1), y.flatten()), y.new_zeros(())
                return F.cross_entropy(scores, y), (scores.detach().argmax(1) == y).sum()

        own = compute.__code__.replace(co_name=f"compute_{id(self)}")
        return types.FunctionType(own, globals(), own.co_name, None, compute.__closure__)

    def step(self) -> None:
        index = torch.randint(len(self.x), (self.case.batch,), device=self.device)
        x, y = self.x[index], self.y[index]
        if self.last:
            x = x.permute(0, 3, 1, 2)  # the examples are kept with their channels last
        if self.marks:
            torch.compiler.cudagraph_mark_step_begin()
        self.optimizer.zero_grad()
        loss, hits = self.compute(x, y)
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            self.total += loss.detach()
            self.hits += hits

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        float(self.total), int(self.hits)

    def __call__(self) -> list[float]:
        with switches(self.precision, self.benchmark):
            self.go(3)
            synchronize()
            began = time.perf_counter()
            self.go(self.case.steps)
            synchronize()
            return [(time.perf_counter() - began) / self.case.steps * 1e3]


class Graph(Loop):
    """The whole step, from the choice of the batch to the update, as one CUDA graph."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how, capturable=True)
        self.benchmark = True
        with switches(self.precision, True):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(4):
                    self.step()
            torch.cuda.current_stream().wait_stream(side)
            self.optimizer.zero_grad(set_to_none=True)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.step()

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.graph.replay()
        float(self.total), int(self.hits)


class OneThread(Loop):
    def __call__(self) -> list[float]:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return super().__call__()
        finally:
            torch.set_num_threads(before)


class Examples(torch.utils.data.Dataset):
    """Tensors on the device, read a batch at a time."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def __getitems__(self, index: list[int]) -> tuple[Tensor, Tensor]:  # DataLoader asks for a whole batch by this
        return self.x[index], self.y[index]


def as_it_is(batch: Any) -> Any:
    return batch


def loader(case: Case, x: Tensor, y: Tensor) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(Examples(x, y), batch_size=case.batch, shuffle=True, collate_fn=as_it_is)


def lightning(case: Case, x: Tensor, y: Tensor, precision: str) -> Callable[[], list[float]]:
    """As a user of Lightning writes it; the time from the end of the first epoch to the end of the second."""
    try:
        pl = importlib.import_module("lightning.pytorch")
    except ImportError:
        pl = importlib.import_module("pytorch_lightning")
    import logging

    for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = copy.deepcopy(case.make())
            self.ends: list[float] = []

        def on_train_start(self) -> None:
            self.total = torch.zeros((), device=self.device)
            self.hits = torch.zeros((), dtype=torch.int64, device=self.device)

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            x, y = batch
            scores = self.model(x)
            loss = F.cross_entropy(scores, y)
            self.total += loss.detach()
            self.hits += (scores.detach().argmax(1) == y).sum()
            return loss

        def on_train_epoch_end(self) -> None:
            float(self.total), int(self.hits)
            synchronize()
            self.ends.append(time.perf_counter())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return case.optimizer(self)

    def measure() -> list[float]:
        with switches(precision), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = Module()
            trainer = pl.Trainer(
                max_epochs=2, accelerator="auto" if x.is_cuda else "cpu", devices=1, logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            trainer.fit(module, loader(case, x, y))
            return [(module.ends[1] - module.ends[0]) / case.steps * 1e3]

    return measure


def accelerate(case: Case, x: Tensor, y: Tensor, precision: str) -> Callable[[], list[float]]:
    """As a user of Accelerate writes it; the second epoch."""
    Accelerator = importlib.import_module("accelerate").Accelerator

    def measure() -> list[float]:
        with switches(precision), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            accelerator = Accelerator(cpu=not x.is_cuda)
            model = copy.deepcopy(case.make())
            model, optimizer, batches = accelerator.prepare(model, case.optimizer(model), loader(case, x, y))
            total = torch.zeros((), device=accelerator.device)
            hits = torch.zeros((), dtype=torch.int64, device=accelerator.device)
            model.train()
            ends = []
            for _ in range(2):
                for inputs, labels in batches:
                    optimizer.zero_grad()
                    scores = model(inputs)
                    loss = F.cross_entropy(scores, labels)
                    accelerator.backward(loss)
                    optimizer.step()
                    total += loss.detach()
                    hits += (scores.detach().argmax(1) == labels).sum()
                float(total), int(hits)
                synchronize()
                ends.append(time.perf_counter())
            accelerator.free_memory()
            return [(ends[1] - ends[0]) / case.steps * 1e3]

    return measure


def peers(case: Case, x: Tensor, y: Tensor, precision: str) -> dict[str, Callable[[], Callable[[], list[float]]]]:
    """By name: what makes a function that gives the milliseconds of a step. The first is what all are compared with."""
    cuda, loop, graph = x.is_cuda, partial(Loop, case), partial(Graph, case)
    first = {"x": x, "y": y, "precision": precision}
    last = first | {"x": x.permute(0, 2, 3, 1).contiguous(), "last": True} if case.images else first
    fused = {} if case.adamw else {"fused": True}
    best, how = (last, ", channels last") if case.images and not case.small else (first, "")
    found: dict[str, Any] = {"plain loop": partial(loop, **first)}
    if cuda:
        found[f"CUDA graph, model compiled{how}"] = partial(graph, **best, **fused, mode="default")
    found[f"torch.compile{how}"] = partial(loop, **best, mode="default")
    if case.small:
        found["Lightning"] = lambda: lightning(case, x, y, precision)
        found["Accelerate"] = lambda: accelerate(case, x, y, precision)
    if cuda:
        found[f"torch.compile, reduce-overhead{how}"] = partial(loop, **best, mode="reduce-overhead")
        found[f"CUDA graph of the step{how}"] = partial(graph, **best, **fused)
    else:
        found["plain loop, 1 thread"] = partial(OneThread, case, **first)
    if case.images:
        found["plain loop, channels last"] = partial(loop, **last)
        if case.small and not cuda:
            found["torch.compile, channels last"] = partial(loop, **last, mode="default")
    return found


def jax_model() -> Any:
    return importlib.import_module("samestep.models.jax").lenet()


def jax_peers(case: Case, x: np.ndarray, y: np.ndarray) -> dict[str, Callable[[], Callable[[], list[float]]]]:
    """Loops of JAX: one jitted step after the other, and a whole epoch in one scan."""

    def timed(go: Callable[[int], Any]) -> Callable[[], list[float]]:
        def measure() -> list[float]:
            go(case.steps)
            began = time.perf_counter()
            go(case.steps)
            return [(time.perf_counter() - began) / case.steps * 1e3]

        return measure

    def plain() -> Callable[[], list[float]]:
        return timed(importlib.import_module("plain.jax").loop(case.make(), x, y, case.batch, case.rate))

    def scan() -> Callable[[], list[float]]:
        import jax
        import jax.numpy as jnp
        import optax

        model, optimizer = case.make(), optax.sgd(case.rate)
        params = jax.tree.map(jnp.copy, model.params)
        examples, labels, random = jnp.asarray(x), jnp.asarray(y, jnp.int32), np.random.default_rng(0)

        def loss(params: Any, x: Any, y: Any) -> tuple[Any, Any]:
            scores = type(model)(model.apply, params)(x)
            return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean(), (scores.argmax(1) == y).sum()

        @partial(jax.jit, donate_argnums=(0, 1))
        def epoch(params: Any, state: Any, examples: Any, labels: Any, order: Any) -> Any:
            def step(carry: Any, index: Any) -> tuple[Any, None]:
                params, state, total, hits = carry
                (value, right), gradient = jax.value_and_grad(loss, has_aux=True)(
                    params, examples[index], labels[index]
                )
                updates, state = optimizer.update(gradient, state, params)
                return (optax.apply_updates(params, updates), state, total + value, hits + right), None

            return jax.lax.scan(step, (params, state, jnp.zeros(()), jnp.zeros((), jnp.int32)), order)[0]

        kept = [params, optimizer.init(params)]

        def go(steps: int) -> tuple[float, int]:
            order = random.permutation(len(x)).astype(np.int32).reshape(steps, case.batch)
            kept[0], kept[1], total, hits = epoch(*kept, examples, labels, order)
            return float(total), int(hits)

        return timed(go)

    return {"plain loop": plain, "an epoch in one scan": scan}


# samestep


def configurations(case: Case, precision: str, replicas: list[int]) -> dict[str, dict[str, Any]]:
    """By name: settings of the Trainer."""
    found = {}

    def add(shards: int, compiled: bool = False, last: bool = False, count: int = 1) -> None:
        name = f"samestep, {shards} shard{'s' * (shards > 1)}" + ", compile" * compiled
        name += ", channels last" * last + f", {count} replicas" * (count > 1)
        given: dict[str, Any] = {"shards": shards, "count": count, "precision": precision}
        given |= ({"compile": True} if compiled else {}) | ({"memory_format": "channels_last"} if last else {})
        found[name] = given

    last = case.images and not case.small
    for compiled in (False,) if case.jax else (False, True):
        for shards in (8, 1):
            add(shards, compiled, last)
    if case.replicas:
        for count in replicas:
            add(8, count=count)
    if case.images:
        add(8, last=not last)
        if case.small:
            add(8, compiled=True, last=True)
    return found


@dataclass
class Entry:
    name: str
    measure: Callable[[], list[float]] | None = None  # None: all is measured
    samples: list[float] = field(default_factory=list)
    memory: int | None = None
    reserved: int | None = None
    prepared: float = 0.0  # seconds
    prints: tuple[str, ...] = ()
    said: list[str] = field(default_factory=list)
    how: str = "rounds"


class Ours:
    """Fits with some settings."""

    def __init__(
        self, entry: Entry, case: Case, data: ss.Data, given: dict[str, Any], device: str, rounds: int
    ) -> None:
        self.entry, self.case, self.data, self.rounds = entry, case, data, rounds
        self.count, self.settings = given["count"], {name: value for name, value in given.items() if name != "count"}
        if case.jax or ("precision" not in KNOWN and self.settings["precision"] == "float32"):
            del self.settings["precision"]
        if missing := self.settings.keys() - KNOWN:
            raise NotImplementedError(f"this samestep's Trainer has no {', '.join(sorted(missing))}")
        self.devices = [device] * self.count
        self.at_once = case.at_once or bool(given.get("compile"))
        if "cpu" in device and self.settings["shards"] == 1:
            self.settings["threads_per_shard"] = len(os.sched_getaffinity(0))

    def fit(self, epochs: int) -> list[float]:
        torch.manual_seed(0)
        model = self.case.make()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = ss.Trainer(
                max_epochs=epochs, batch_size=self.case.batch, devices=self.devices, optimizer=self.case.ours(),
                schedule=self.case.rate, progress=False, **self.settings,
            ).fit(model, self.data)  # fmt: skip
        heard = [one for one in caught if not issubclass(one.category, (DeprecationWarning, FutureWarning))]
        self.entry.said += [f"{one.category.__name__}: {one.message}".splitlines()[0][:200] for one in heard]
        self.entry.prints = tuple(run.fingerprints)
        return [row["seconds"] / self.case.steps * 1e3 for row in run.history]

    def first(self) -> list[float]:
        return self.fit(self.rounds + 1)[1:] if self.at_once else self.fit(2)[1:]

    def __call__(self) -> list[float]:
        return [statistics.mean(self.fit(3)[1:])]


def prepare(entry: Entry, work: Callable[[], list[float]], ours: int | None) -> list[float]:
    """Its first samples, with what memory it takes; ours: the bytes of the examples that samestep puts on the device itself."""
    clean()
    began, cuda = time.perf_counter(), torch.cuda.is_available()
    before = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if cuda else (0, 0)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    samples = work()
    if cuda:
        entry.memory = torch.cuda.max_memory_allocated() - before[0] - (ours or 0)
        entry.reserved = torch.cuda.max_memory_reserved() - before[1] - (ours or 0)
    entry.prepared = time.perf_counter() - began
    clean()
    return samples


def measure(case: Case, precision: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one model at one precision."""
    device, began, entries = options.device, time.perf_counter(), []
    examples = case.examples()
    x, y = (torch.from_numpy(part).to("cpu" if case.jax else device) for part in examples)
    data, size = ss.Data(train=examples), sum(part.nbytes for part in examples)
    replicas = [int(count) for count in options.replicas.split(",")]
    print(f"\n{case.name}, {precision}, {options.rounds} rounds of {case.steps} steps", flush=True)

    def wanted(name: str) -> bool:
        chosen = not options.only or any(part in name for part in options.only.split(","))
        return chosen and not (options.without and any(part in name for part in options.without.split(",")))

    def attempt(name: str, make: Callable[[Entry], Callable[[], list[float]]], ours: int | None = None) -> None:
        if time.perf_counter() - began > options.budget:
            print(f"  {name}: left out, the {options.budget:g} s of this section are over", flush=True)
            return
        entry = Entry(name)

        def work() -> list[float]:
            entry.measure = make(entry)
            if not isinstance(entry.measure, Ours):
                return entry.measure()
            samples = entry.measure.first()
            if entry.measure.at_once:
                entry.measure, entry.samples, entry.how = None, samples, "one fit"
            return samples

        try:
            samples = prepare(entry, work, ours)
        except Exception:
            print(f"  {name} failed:\n{told()}", flush=True)
            clean()
            return
        if case.jax:  # PyTorch does not know of its memory
            entry.memory = entry.reserved = None
        memory = "" if entry.memory is None else f", {entry.memory / 2**20:.0f} MiB"
        ms = statistics.median(samples)
        print(f"  {name}: {ms:.3f} ms at first, prepared in {entry.prepared:.1f} s{memory}", flush=True)
        for said in dict.fromkeys(entry.said):
            print(f"    says: {said}", flush=True)
        entries.append(entry)

    theirs: dict[str, Any] = {}
    if options.peers == "all":
        theirs = jax_peers(case, *examples) if case.jax else peers(case, x, y, precision)
    if x.is_cuda:  # libraries take their working space once, which is nobody's
        torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
    todo = [(name, lambda entry, make=make: make(), None) for name, make in theirs.items()]
    for name, given in configurations(case, precision, replicas).items():
        todo.append((name, lambda entry, given=given: Ours(entry, case, data, given, device, options.rounds), size))
    # In turns, so that the budget cuts off the end of both.
    order = [one for pair in zip_longest(todo[: len(theirs)], todo[len(theirs) :]) for one in pair if one]
    for name, make, bytes_ in order:
        if name == "plain loop" or wanted(name):
            attempt(name, make, bytes_)
    for number in range(options.rounds):
        for entry in entries:
            if entry.measure:
                try:
                    entry.samples += entry.measure()
                except Exception:
                    print(f"  {entry.name} failed in round {number + 1}:\n{told()}", flush=True)
                    entry.measure = None
    found = [row(entry, entries, case, precision) for entry in entries if entry.samples]
    same(found, entries)
    entries.clear()
    try:
        torch._dynamo.reset()
        clean()
    except Exception:
        print(f"  cleaning up failed:\n{told()}", flush=True)
    return found


def row(entry: Entry, entries: list[Entry], case: Case, precision: str) -> dict[str, Any]:
    ms = statistics.median(entry.samples)
    plain = next((other for other in entries if other.name == "plain loop" and other.samples), None)
    theirs = [statistics.median(other.samples) for other in entries if "samestep" not in other.name and other.samples]
    return {
        "model": case.name, "precision": precision, "name": entry.name, "ms": ms, "least": min(entry.samples),
        "most": max(entry.samples), "samples": len(entry.samples), "how": entry.how,
        "ratio": ms / statistics.median(plain.samples) if plain else None, "best": ms / min(theirs) if theirs else None,
        "memory": entry.memory, "reserved": entry.reserved, "prepared": entry.prepared,
        "memory_ratio": entry.memory / plain.memory if plain and plain.memory and entry.memory is not None else None,
        "fingerprint": entry.prints[-1] if entry.prints else "", "said": list(dict.fromkeys(entry.said)),
    }  # fmt: skip


def same(rows: list[dict[str, Any]], entries: list[Entry]) -> None:
    """Compare the fingerprints of runs that differ in the number of replicas only."""
    prints = {entry.name: entry.prints for entry in entries}
    for one in rows:
        home, _, count = one["name"].rpartition(", ")
        if count.endswith(" replicas") and prints.get(home):
            steps = min(len(prints[home]), len(prints[one["name"]]))
            equal = steps > 0 and prints[home][:steps] == prints[one["name"]][:steps]
            one["same"] = "same" if equal else "DIFFERENT"


def compared(rows: list[dict[str, Any]]) -> list[str]:
    """What is asked for, in one line each: shards against one, replicas against one, and against the peers."""
    ms, lines = {one["name"]: one["ms"] for one in rows}, []
    for name in ms:
        one = name.replace("8 shards", "1 shard")
        if name.startswith("samestep, 8 shards") and one != name and one in ms:
            lines.append(f"{name}: {ms[name] / ms[one]:.2f} of 1 shard")
        home, _, count = name.rpartition(", ")
        if count.endswith(" replicas") and home in ms:
            lines.append(f"{name}: {ms[name] / ms[home]:.2f} of 1 replica")
    for name in ms:
        if name.startswith("samestep") and "replicas" not in name:
            theirs = [f"{other} {ms[other] / ms[name]:.2f}" for other in ms if not other.startswith("samestep")]
            lines.append(f"{name}: times as fast as {'; '.join(theirs)}" if theirs else "")
    return [line for line in lines if line]


def shown(rows: list[dict[str, Any]]) -> str:
    def ratio(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    header = ["", "ms/step", "least - most", "of plain", "of best peer", "MiB", "of plain", "from", "replicas"]
    cells = []
    for one in rows:
        memory = "" if one["memory"] is None else f"{one['memory'] / 2**20:.0f}"
        cells.append([
            one["name"], f"{one['ms']:.3f}", f"{one['least']:.3f} - {one['most']:.3f}", ratio(one["ratio"]), ratio(one["best"]),
            memory, ratio(one["memory_ratio"]), f"{one['samples']}, {one['how']}", one.get("same", ""),
        ])  # fmt: skip
    return table(header, cells)


def main() -> None:
    parser = argparse.ArgumentParser()
    cuda = torch.cuda.is_available()
    parser.add_argument("--models", default="lenet,jax,resnet18,gpt,gpt2" if cuda else "lenet,mlp")
    parser.add_argument("--precision", default="", help="only these of the model's own")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=120)
    parser.add_argument("--only", default="")
    parser.add_argument("--without", default="")
    parser.add_argument("--peers", default="all", choices=("all", "none"))
    parser.add_argument("--replicas", default="1,2,3,8" if cuda else "1,2")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # for JAX, beside PyTorch
    where, rows, known = machine(), [], cases(options.tiny, cuda)
    names = options.models.split(",")
    if unknown := set(names) - known.keys():
        parser.error(f"--models takes {', '.join(known)}, got {', '.join(sorted(unknown))}")
    print(f"{where['name']}, torch {where['torch']}, Python {where['python']}", flush=True)
    file = "speed" if len(names) > 2 else f"speed-{'-'.join(names)}"
    for name in names:
        case = known[name]
        chosen = [one for one in case.precisions if one in options.precision.split(",")]
        for precision in chosen or case.precisions:
            began = time.perf_counter()
            try:
                found = measure(case, precision, options)
            except Exception:
                print(f"{case.name}, {precision} failed:\n{told()}", flush=True)
                continue
            print(f"{case.name}, {precision}: {time.perf_counter() - began:.0f} s in all\n{shown(found)}")
            print("\n".join(f"  {line}" for line in compared(found)), flush=True)
            rows += found
            if not options.tiny or os.environ.get("OUT"):
                keep(file, rows, rounds=options.rounds, options=" ".join(sys.argv[1:]))


if __name__ == "__main__":
    main()
