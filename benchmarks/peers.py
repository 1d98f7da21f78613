"""Models, and other ways to train them, to be measured beside samestep: loops by hand, CUDA graphs, Lightning, Accelerate, JAX.

The models: LeNet (batch 256, images like Fashion-MNIST's, float32); an MLP of 784, 256 and 10 units (the same); ResNet-18
(3 x 32 x 32, batch 512); a GPT of 11 million weights (64 x 256 tokens); GPT-2 of 124 million (16 x 1024 tokens). The last three
in tf32 and in bfloat16, GPT-2 in bfloat16. `jax`: LeNet in JAX.

The peers: a plain loop (a random batch by index on the device, zero_grad, forward, backward, a step of torch.optim; loss and
hits summed on the device); the same with channels_last, with torch.compile, with mode="reduce-overhead"; a CUDA graph of
the whole step, which draws the batch, too, also with the model compiled, with cudnn.benchmark; the same with deterministic
kernels and without cudnn.benchmark, whose bits are the same each time, as samestep's are; Lightning and Accelerate as
users write them (LeNet and MLP). All have the same optimizer and precision: SGD, with momentum for ResNet; AdamW, fused, for
the GPTs. tf32: both switches of PyTorch on; float32: both off; bfloat16: autocast around forward and loss, the switches off.
Of JAX: a jitted step, and a scan over a whole epoch.
"""

from __future__ import annotations

import copy
import gc
import importlib
import time
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep as ss
from samestep.models import torch as models

FIXED = "deterministic"
Measure = Callable[[], list[float]]  # milliseconds of a step, of one or more samples


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
        "resnet18": Case("ResNet-18, 3 x 32 x 32, batch 512", partial(models.resnet18, 3), 512, 98 if cuda else 2, (3, 32, 32),
                         momentum=0.9, precisions=both, images=True),
        "gpt": Case("GPT of 11 M, 64 x 256 tokens", partial(GPT, 6, 384, 6, 257, 256, 0.2, False), 64, 100 if cuda else 1,
                    (256,), 257, adamw=True, rate=1e-3, precisions=both, tokens=True),
        "gpt2": Case("GPT-2 of 124 M, 16 x 1024 tokens", partial(GPT, 12, 768, 12, 50304, 1024), 16, 60 if cuda else 1,
                     (1024,), 50257, adamw=True, rate=3e-4, precisions=("bfloat16",), tokens=True, at_once=True),
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
def switches(precision: str, benchmark: bool = False, fixed: bool = False) -> Iterator[None]:
    """PyTorch's own switches, for a peer; samestep has settings of its own. fixed: kernels with the same bits each time."""
    cudnn, tf32 = torch.backends.cudnn, precision == "tf32"

    def set_to(tf32_products: bool, tf32: bool, benchmark: bool, fixed: bool) -> None:
        torch.set_float32_matmul_precision("high" if tf32_products else "highest")
        cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = tf32, benchmark, fixed
        torch.use_deterministic_algorithms(fixed)
        torch.utils.deterministic.fill_uninitialized_memory = not fixed

    set_to(tf32, tf32, benchmark, fixed)
    try:
        yield
    finally:  # as PyTorch begins
        set_to(False, True, False, False)


class Loop:
    """A loop as it is written by hand."""

    def __init__(
        self, case: Case, x: Tensor, y: Tensor, precision: str, last: bool = False, mode: str = "", **how: Any
    ) -> None:
        self.case, self.x, self.y, self.last, self.device = case, x, y, last, x.device.type
        self.precision, self.benchmark, self.fixed = precision, False, False
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
        with switches(self.precision, self.benchmark, self.fixed):
            self.go(3)
            synchronize()
            began = time.perf_counter()
            self.go(self.case.steps)
            synchronize()
            return [(time.perf_counter() - began) / self.case.steps * 1e3]


class Graph(Loop):
    """The whole step, from the choice of the batch to the update, as one CUDA graph."""

    def __init__(self, *args: Any, fixed: bool = False, **how: Any) -> None:
        super().__init__(*args, **how, capturable=True)
        self.benchmark, self.fixed = not fixed, fixed
        with switches(self.precision, self.benchmark, fixed):
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


def lightning(case: Case, x: Tensor, y: Tensor, precision: str) -> Measure:
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


def accelerate(case: Case, x: Tensor, y: Tensor, precision: str) -> Measure:
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


def peers(case: Case, x: Tensor, y: Tensor, precision: str, device: str = "") -> dict[str, Callable[[], Measure]]:
    """By name: what makes a function that gives the milliseconds of a step. The first is what all are compared with."""
    cuda, loop, graph = "cuda" in (device or x.device.type), partial(Loop, case), partial(Graph, case)
    first = {"x": x, "y": y, "precision": precision}
    last = first | {"x": x.permute(0, 2, 3, 1).contiguous(), "last": True} if case.images else first
    fused = {} if case.adamw else {"fused": True}
    best, how = (last, ", channels last") if case.images and not case.small else (first, "")
    found: dict[str, Any] = {"plain loop": partial(loop, **first)}
    if cuda:
        found[f"CUDA graph, model compiled{how}"] = partial(graph, **best, **fused, mode="default")
        found[f"CUDA graph, model compiled{how}, {FIXED}"] = partial(graph, **best, **fused, mode="default", fixed=True)
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


def jax_peers(case: Case, x: np.ndarray, y: np.ndarray) -> dict[str, Callable[[], Measure]]:
    """Loops of JAX: one jitted step after the other, and a whole epoch in one scan."""

    def timed(go: Callable[[int], Any]) -> Measure:
        def measure() -> list[float]:
            go(case.steps)
            began = time.perf_counter()
            go(case.steps)
            return [(time.perf_counter() - began) / case.steps * 1e3]

        return measure

    def plain() -> Measure:
        return timed(importlib.import_module("plain.jax").loop(case.make(), x, y, case.batch, case.rate))

    def scan() -> Measure:
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
