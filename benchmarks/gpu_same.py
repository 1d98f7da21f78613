"""The same bits in every way to compute a recipe, on a GPU; and other bits of other recipes.

    python benchmarks/gpu_same.py [--budget 165] [--device cuda] [--only TEXT,TEXT] [--no-jax] [--parts 4]
    python benchmarks/gpu_same.py --tiny            few recipes and ways, to see that it runs

Small models, two epochs, a batch that the shards do not divide, and a last one that is smaller. Every recipe (optimizer,
clipping, dropout, batch norm, precision, layout, compiled or not, labels that are ignored, class weights) is trained once as
the Trainer does by itself, and then in other ways: again; operation by operation (capture=False); with 1, 2 and 8 streams; on
2, 3 and 8 replicas, which share the device; with data streamed from a file; several of these at once; and resumed from a
checkpoint of the first epoch on another number of replicas. The fingerprints after every step must be equal (==). Recipes that
differ in precision, optimizer, clipping or shards must end differently. What a fit warns of is printed: a way that was not
captured says so. Several processes share the recipes, and as many those of JAX, if it is installed.

The output ends with `N passed, M failed, K left out`; the exit status is 1 if any failed. When the budget (seconds) is over,
the rest is left out, which is said.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from machine import keep, machine

import samestep as ss

CLASSES, VOCABULARY, LENGTH, IGNORED = 10, 64, 8, -100
KNOWN = {one.name for one in fields(ss.Trainer)}
Batch = tuple[np.ndarray, np.ndarray]


def images(n: int) -> Batch:
    random = np.random.default_rng(0)
    return random.random((n, 3, 12, 12), dtype=np.float32), random.integers(0, CLASSES, n)


def grey(n: int) -> Batch:
    random = np.random.default_rng(0)
    return random.random((n, 1, 28, 28), dtype=np.float32), random.integers(0, CLASSES, n)


def tokens(n: int) -> Batch:
    """A third of the labels does not count."""
    random = np.random.default_rng(0)
    y = random.integers(0, VOCABULARY, (n, LENGTH))
    return random.integers(0, VOCABULARY, (n, LENGTH)), np.where(random.random(y.shape) < 0.3, IGNORED, y)


@dataclass
class Recipe:
    name: str
    model: Callable[[], Any]
    batch: Batch
    settings: dict[str, Any] = field(default_factory=dict)
    ways: tuple[str, ...] = ()  # by name; none: all


# name of a way: what it changes. "streamed" is about the data, "resumed" from which number of replicas to which one.
WAYS: dict[str, dict[str, Any]] = {
    "again": {}, "operation by operation": {"capture": False},
    "2 replicas": {"replicas": 2}, "3 replicas": {"replicas": 3}, "8 replicas": {"replicas": 8},
    "streamed": {"streamed": True}, "1 stream": {"streams": 1}, "2 streams": {"streams": 2}, "8 streams": {"streams": 8},
    "streamed, 3 replicas, operation by operation": {"streamed": True, "replicas": 3, "capture": False},
    "streamed, 3 replicas, 2 streams": {"streamed": True, "replicas": 3, "streams": 2},
    "resumed: 1 replica, then 3": {"resumed": (1, 3)},
    "resumed: 2 replicas, then 1, operation by operation": {"resumed": (2, 1), "capture": False},
}  # fmt: skip
FEW = ("operation by operation", "3 replicas", "1 stream", "streamed", "resumed: 1 replica, then 3")
SOME = (*FEW, "8 replicas", "8 streams", "streamed, 3 replicas, 2 streams")


def torch_recipes() -> tuple[list[Recipe], list[tuple[str, str]]]:
    """And the pairs that must differ."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Images(nn.Module):
        """Convolutions, batch norm, dropout."""

        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.norm1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
            self.conv2, self.norm2 = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32)
            self.dense1, self.drop, self.dense2 = nn.Linear(32 * 9, 64), nn.Dropout(0.3), nn.Linear(64, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
            x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
            return self.dense2(self.drop(F.relu(self.dense1(x.flatten(1)))))

    class Tokens(nn.Module):
        """Attention with dropout; scores at every position."""

        def __init__(self) -> None:
            super().__init__()
            self.token, self.place, self.norm = nn.Embedding(VOCABULARY, 32), nn.Embedding(LENGTH, 32), nn.LayerNorm(32)
            self.qkv, self.drop, self.scores = nn.Linear(32, 96), nn.Dropout(0.2), nn.Linear(32, VOCABULARY)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.token(x) + self.place.weight
            q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            x = x + self.drop(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            return self.scores(x).float()

    def made(kind: Callable[[], Any]) -> Callable[[], Any]:
        def make() -> Any:
            torch.manual_seed(0)
            return kind()

        return make

    picture, text, sgd = made(Images), made(Tokens), {"optimizer": ss.sgd(momentum=0.9), "schedule": 0.05}
    adamw = {"optimizer": ss.adamw(weight_decay=0.1), "schedule": 1e-2}
    schedule = {"schedule": ss.cosine(0.05, 6).warmup(2)}
    some, even, words = images(250), images(200), tokens(90)
    weights = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, CLASSES), ignore_index=3)
    small = {"batch_size": 40}
    found = [
        Recipe("images, SGD", picture, some, sgd),
        Recipe("images, SGD, tf32", picture, some, sgd | {"precision": "tf32"}),
        Recipe("images, SGD, bfloat16", picture, some, sgd | {"precision": "bfloat16"}),
        Recipe("tokens, AdamW", text, words, adamw | small),
        Recipe("images, Adam, norm clipped", picture, some,
               {"optimizer": ss.adam(), "schedule": 1e-2, "gradient_clip_val": 0.1}),
        Recipe("images, SGD, channels last", picture, some, sgd | {"memory_format": "channels_last"}),
        Recipe("images, SGD, compiled", picture, even, sgd | {"compile": True, "batch_size": 80}, FEW),
        Recipe("tokens, AdamW, bfloat16", text, words, adamw | small | {"precision": "bfloat16"}),
        Recipe("images, SGD, norm clipped", picture, some, sgd | {"gradient_clip_val": 0.1}, SOME),
        Recipe("images, SGD, values clipped", picture, some,
               sgd | {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, SOME),
        Recipe("images, AdamW, warm-up and cosine", picture, some, adamw | schedule, SOME),
        Recipe("images, SGD, class weights and ignore_index", picture, some, sgd | {"loss": weights}, SOME),
        Recipe("images, SGD, channels last, bfloat16", picture, some,
               sgd | {"memory_format": "channels_last", "precision": "bfloat16"}, SOME),
        Recipe("images, SGD, 1 shard", picture, some, sgd | {"shards": 1}, FEW),
        Recipe("images, SGD, 5 shards", picture, some, sgd | {"shards": 5}, SOME),
        Recipe("images, SGD, with replacement, seed 1", picture, some,
               sgd | {"sampling": "with_replacement", "seed": 1}, SOME),
        Recipe("tokens, SGD of PyTorch", text, words,
               small | {"optimizer": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True)}, SOME),
        Recipe("tokens, AdamW, compiled, bfloat16", text, tokens(80),
               adamw | small | {"compile": True, "precision": "bfloat16"}, FEW),
    ]  # fmt: skip
    first = "images, SGD"
    differ = [
        (first, f"{first}, {name}")
        for name in ("tf32", "bfloat16", "norm clipped", "values clipped", "5 shards", "1 shard")
    ]
    differ += [(f"{first}, tf32", f"{first}, bfloat16"), ("tokens, AdamW", "tokens, AdamW, bfloat16")]
    return found, differ


def jax_recipes() -> tuple[list[Recipe], list[tuple[str, str]]]:
    from samestep.models import jax as models

    sgd = {"optimizer": ss.sgd(momentum=0.9), "schedule": 0.05}
    some = grey(250)
    found = [
        Recipe("JAX: MLP with dropout, SGD", models.mlp, some, sgd),
        Recipe("JAX: LeNet with max-pooling, SGD", models.lenet_modern, some, sgd),
        Recipe("JAX: MLP with dropout, Adam, norm clipped", models.mlp, some,
               {"optimizer": ss.adam(), "schedule": 1e-3, "gradient_clip_val": 0.1}),
        Recipe("JAX: LeNet, Adam", models.lenet, some, {"optimizer": ss.adam(), "schedule": 1e-3}, ways=FEW),
    ]  # fmt: skip
    return found, [("JAX: MLP with dropout, SGD", "JAX: MLP with dropout, Adam, norm clipped")]


class Checks:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder, self.began = options, folder, time.perf_counter()
        self.passed, self.failed, self.left, self.fits = 0, 0, 0, 0
        self.rows: list[dict[str, Any]] = []
        self.prints: dict[str, list[str]] = {}
        self.files: dict[int, np.memmap] = {}

    def over(self) -> bool:
        return time.perf_counter() - self.began > self.options.budget

    def check(self, name: str, right: bool, wrong: str) -> None:
        self.passed, self.failed = self.passed + right, self.failed + (not right)
        self.rows.append({"name": name, "right": right, **({} if right else {"wrong": wrong})})
        if not right:
            print(f"FAILED {name}: {wrong}", flush=True)

    def data(self, recipe: Recipe, streamed: bool) -> ss.Data:
        x, y = recipe.batch
        if not streamed:
            return ss.Data(train=(x, y))
        if id(x) not in self.files:
            path = self.folder / f"{len(self.files)}.npy"
            np.save(path, x)
            self.files[id(x)] = np.load(path, mmap_mode="r")
        return ss.Data(train=(self.files[id(x)], y))

    def fit(self, recipe: Recipe, way: dict[str, Any]) -> ss.Run:
        """Train it in this way."""
        way = dict(way)
        data, resumed = self.data(recipe, way.pop("streamed", False)), way.pop("resumed", None)
        given = {"max_epochs": 2, "batch_size": 100, "shards": 8, "progress": False} | recipe.settings
        counts = resumed or (way.pop("replicas", 1),)
        given |= way
        if missing := given.keys() - KNOWN:
            raise NotImplementedError(f"this samestep's Trainer has no {', '.join(sorted(missing))}")
        if not resumed:
            return self.one(recipe, data, counts[0], given)
        home = Path(tempfile.mkdtemp(dir=self.folder))
        begun = {"max_epochs": 1, "run_dir": home / "first", "checkpoint_every": 2, "keep_checkpoints": 99}
        self.one(recipe, data, counts[0], given | begun)
        # The one after two steps, unless it was left out because the one before was still being written.
        file = min((home / "first" / "checkpoints").glob("*.safetensors"))
        again = self.one(recipe, data, counts[1], given | {"run_dir": home / "second", "resume": file})
        assert again.resumed is not None, "it did not resume"
        assert 0 < again.resumed < len(again.fingerprints), f"it resumed from step {again.resumed}"
        return again

    def one(self, recipe: Recipe, data: ss.Data, replicas: int, given: dict[str, Any]) -> ss.Run:
        self.fits += 1
        return ss.Trainer(devices=[self.options.device] * replicas, **given).fit(recipe.model(), data)

    def attempt(self, recipe: Recipe, name: str, way: dict[str, Any]) -> list[str] | None:
        """The fingerprints after every step; None if it failed, which is counted."""
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run = self.fit(recipe, way)
            heard = [one for one in caught if not issubclass(one.category, (DeprecationWarning, FutureWarning))]
            for said in dict.fromkeys(str(one.message).splitlines()[0][:220] for one in heard):
                print(f"  {recipe.name}, {name}, says: {said}", flush=True)
            return [*run.fingerprints, run.fingerprint]
        except Exception as error:
            last = [line.strip() for line in traceback.format_exc().splitlines() if line.strip(" ^~|")][-3:]
            short = str(error) if isinstance(error, NotImplementedError) else " | ".join(last)
            self.check(f"{recipe.name}, {name}", False, short[:600])
            return None

    def recipe(self, recipe: Recipe) -> None:
        """All ways of one recipe."""
        shards = recipe.settings.get("shards", 8)
        ways = {name: way for name, way in WAYS.items() if not recipe.ways or name in recipe.ways}
        ways = {
            name: way for name, way in ways.items()
            if max(way.get("replicas", 1), *way.get("resumed", (1,)), 1) <= shards
            and (self.options.framework == "torch" or "streams" not in way)
        }  # fmt: skip
        if self.options.tiny:
            ways = {name: way for name, way in ways.items() if name in FEW}
        began = time.perf_counter()
        if self.over():
            self.left += len(ways)
            print(f"  {recipe.name}: left out, the time is over", flush=True)
            return
        wanted = self.attempt(recipe, "by itself", {})
        if wanted is None:
            self.left += len(ways)
            return
        self.prints[recipe.name] = wanted
        same = 0
        for name, way in ways.items():
            if self.over():
                self.left += 1
                print(f"  {recipe.name}, {name}: left out, the time is over", flush=True)
                continue
            found = self.attempt(recipe, name, way)
            if found is not None:
                steps = [i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b]
                where = (
                    f"other bits from step {steps[0] + 1} of {len(wanted) - 1} on"
                    if steps
                    else "another number of steps"
                )
                self.check(f"{recipe.name}, {name}", found == wanted, where)
                same += found == wanted
        took = time.perf_counter() - began
        print(f"  {recipe.name}: {same} of {len(ways)} ways the same, {wanted[-1][:16]}, {took:.1f} s", flush=True)

    def differ(self, pairs: list[tuple[str, str]]) -> None:
        for one, other in pairs:
            if one not in self.prints or other not in self.prints:
                continue
            self.check(
                f"{one} / {other}",
                self.prints[one][-1] != self.prints[other][-1],
                "the same bits, though the recipes differ",
            )

    def summary(self) -> dict[str, Any]:
        took = time.perf_counter() - self.began
        counts = {"passed": self.passed, "failed": self.failed, "left": self.left, "fits": self.fits, "seconds": took}
        return {"framework": self.options.framework, **counts, "rows": self.rows}


def started(options: argparse.Namespace, framework: str, part: int, folder: Path) -> subprocess.Popen[bytes]:
    """The same script for a part of the recipes, in a process of its own."""
    command = [sys.executable, __file__, "--framework", framework, "--part", str(part), "--parts", str(options.parts)]
    command += ["--answer", str(folder / f"{framework}{part}.json"), "--budget", str(options.budget - 5)]
    command += ["--device", options.device, "--only", options.only, *["--tiny"] * options.tiny]
    variables = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if options.device == "cpu":
        variables |= {"JAX_PLATFORMS": "cpu"}
    with open(folder / f"{framework}{part}.log", "wb") as out:
        return subprocess.Popen(command, env=variables, stdout=out, stderr=subprocess.STDOUT)


def recipes_of(options: argparse.Namespace) -> list[Recipe]:
    """Those of this process."""
    recipes = torch_recipes()[0] if options.framework == "torch" else jax_recipes()[0]
    if options.only:
        recipes = [one for one in recipes if any(part in one.name for part in options.only.split(","))]
    elif options.tiny:
        recipes = recipes[:4] if options.framework == "torch" else recipes[:1]
    cpu = options.device == "cpu"  # tf32 is for GPUs
    recipes = [one for one in recipes if not (cpu and one.settings.get("precision") == "tf32")]
    return recipes[options.part :: options.parts]


def part(options: argparse.Namespace) -> None:
    """Be one of the processes."""
    with tempfile.TemporaryDirectory() as folder:
        checks = Checks(options, Path(folder))
        for recipe in recipes_of(options):
            checks.recipe(recipe)
        Path(options.answer).write_text(json.dumps(checks.summary() | {"prints": checks.prints}))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=float, default=165)
    parser.add_argument("--device", default="")
    parser.add_argument("--only", default="", help="recipes by parts of their names")
    parser.add_argument("--no-jax", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--parts", type=int, default=4, help="processes at a time for each framework")
    parser.add_argument("--framework", default="", choices=("torch", "jax"), help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        part(options)
        return 0
    import torch

    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    where, frameworks = machine(), ["torch", *["jax"] * bool(find_spec("jax") and not options.no_jax)]
    print(f"{where['name']}, torch {where['torch']}, Python {where['python']}, samestep {ss.__version__}", flush=True)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        here, until = Path(folder), time.monotonic() + options.budget + 5
        them = {(name, i): started(options, name, i, here) for name in frameworks for i in range(options.parts)}
        checks = Checks(options, here)
        for (name, i), process in them.items():
            try:
                process.wait(max(1.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            print((here / f"{name}{i}.log").read_text(errors="replace").rstrip(), flush=True)
            answer = here / f"{name}{i}.json"
            if answer.exists():
                found.append(json.loads(answer.read_text()))
                checks.prints |= found[-1].pop("prints")
            else:
                print(f"{name}, part {i}: no answer, status {process.returncode}")
                found.append(
                    {"framework": name, "passed": 0, "failed": 1, "left": 0, "fits": 0, "seconds": 0.0, "rows": []}
                )
        checks.differ([*torch_recipes()[1], *(jax_recipes()[1] if "jax" in frameworks else [])])
        found.append(checks.summary() | {"framework": "other recipes, other bits"})
    for one in found:
        print(
            "{framework}: {passed} passed, {failed} failed, {left} left out, in {fits} fits and {seconds:.0f} s".format(
                **one
            )
        )
    passed, failed, left = (sum(one[name] for one in found) for name in ("passed", "failed", "left"))
    if not options.tiny or os.environ.get("OUT"):
        keep("gpu-same", found, passed=passed, failed=failed, left=left)
    print(f"{passed} passed, {failed} failed, {left} left out")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
