"""What one of several processes does in test_many_processes.py: `many_processes.py FOLDER DEVICE [RUN]`.

It fits the models on one device and on two, makes steps in a loop of its own, and fine-tunes; then it fits once more as a
broken twin would; then it goes on with a run, in which the last process is killed at the step after. What a process saw is
left in FOLDER/rank-R.json. One start does all this, as some frameworks take long to start.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import samestep as ss
from conformance import suite
from samestep.errors import ProcessFailed
from samestep.fingerprint import of_weights
from samestep.processes.exchange import Across
from samestep.processes.place import find
from samestep.runs.checkpoint import path_of
from samestep.training.replicas import Replicas


@functools.cache  # what was compiled for a function is found again
def jax():
    from jax import numpy as jnp
    from jax.nn import relu

    from samestep.models.jax import Pair

    def normed(w, state, x, train):
        x = x.reshape(-1, 28, 28) @ w["first"]
        here = {"mean": x.mean((0, 1)), "variance": x.var((0, 1))}
        used = here if train else state
        x = relu((x - used["mean"]) / jnp.sqrt(used["variance"] + 1e-5)).reshape(-1, 112) @ w["last"]
        return x, {name: 0.9 * state[name] + 0.1 * here[name] for name in state} if train else state

    draw = np.random.default_rng(0).standard_normal
    weights = {"first": draw((28, 4), np.float32) / 5, "last": draw((112, 10), np.float32) / 10}
    return Pair(normed, weights, {"mean": np.zeros(4, np.float32), "variance": np.ones(4, np.float32)})


def tensorflow():
    from keras import Input, Sequential, initializers, layers

    one, two = (initializers.GlorotUniform(seed) for seed in (1, 2))
    return Sequential([
        Input((1, 28, 28)), layers.Permute((2, 3, 1)), layers.Conv2D(4, 5, 4, kernel_initializer=one),
        layers.BatchNormalization(), layers.ReLU(), layers.Flatten(), layers.Dense(10, kernel_initializer=two),
    ])  # fmt: skip


def paddle():
    import paddle
    from paddle import nn

    from samestep.models.paddle import Norm

    paddle.seed(0)
    layers = nn.Conv2D(1, 4, 5, 4), Norm(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
    return nn.Sequential(*layers)


def torch():
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 5, 4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


def mxnet():
    import mxnet as mx
    from mxnet.gluon import nn

    mx.random.seed(0)
    model = nn.HybridSequential()
    model.add(nn.Conv2D(4, 5, 4, in_channels=1), nn.BatchNorm(in_channels=4), nn.Activation("relu"), nn.Flatten(),
              nn.Dense(10, in_units=144))  # fmt: skip
    model.initialize()
    return model


# A small one with batch norm: to compile the suite's in every process would take most of the test's time.
suite.zoo.normed = globals()[suite.BACKEND]
MODELS = ("mlp_with_dropout", "normed")
# Examples and batch size: a last batch of two that leaves most processes without a part, and shards of two and of one. For
# every other size of a shard, JAX and TensorFlow would compile anew, in every process.
SIZES = {"mlp_with_dropout": (12, 5), "normed": (20, 12)}
STOP = 1  # step after which the run is given to other processes


def fit(name: str, devices: list[str], **settings) -> ss.Run:
    return suite.fit(name, devices, *SIZES[name], **settings)


def outcome(run: ss.Run) -> dict:
    """All of a run that must be the same in every process, whoever has computed it."""
    weights = {name: tensor.tobytes().hex() for name, tensor in run.weights().items()}
    whole = {"prints": run.fingerprints, "weights": weights, "rows": suite.numbers(run), "recipe": run.recipe,
            "fingerprint": [run.fingerprint, of_weights(run.weights())]}  # fmt: skip
    return json.loads(json.dumps(whole))


def own_loop(devices: list[str]) -> list[str]:
    """What two steps of a Group give."""
    x, y = suite.data(MODELS[0], 12).train.read(np.arange(12))
    group = ss.Group(getattr(suite.zoo, MODELS[0])(), devices=devices, optimizer=ss.adam(), seed=3)
    return [*(group.step(x[i : i + 5], y[i : i + 5], lr=0.01).fingerprint for i in (0, 5)), group.fingerprint]


def fine_tuned(devices: list[str]) -> dict:
    """A fit with augmented examples, starting weights, groups and a moving average."""
    (x, y), model = suite.data(MODELS[0], 12).train.read(np.arange(12)), getattr(suite.zoo, MODELS[0])
    settings = {"groups": {"*": ss.group(lr_scale=0.5)}, "average": ss.ema(0.5), "gradient_clip_val": 0.01}
    trainer = ss.Trainer(1, 5, devices=devices, progress=False, gradient_clip_algorithm="value", **settings)
    start = {name: tensor + 0.01 for name, tensor in fit(MODELS[0], devices).weights().items()}
    run = trainer.fit(model(), ss.Data((x, y), transform=shifted), weights=start)
    return {**outcome(run), "average": of_weights(run.average)}


def shifted(x, y, rng):
    return np.roll(x, int(rng.integers(28)), -1), y


def losing_a_part(self, parts, *rest):
    """Twin of `Across.sum`: what the last process holds does not reach the others."""
    if self.world.rank == self.world.size - 1:
        parts = {span: vector * 0 for span, vector in parts.items()}
    return sum_up(self, parts, *rest)


sum_up = Across.sum


def killed_after(steps: int, run: Path) -> None:
    """Kill the last process when so many steps have been made, and rank 0 has written their checkpoint."""
    go_on = Replicas.step

    def stepping(self, batch, lr, t):
        if t == steps and self.world.rank == self.world.size - 1:
            end = time.monotonic() + 60
            while not path_of(run, steps).exists() and time.monotonic() < end:  # mpiexec ends rank 0 at once, too
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return go_on(self, batch, lr, t)

    Replicas.step = stepping


def main(folder: str, device: str, run: str = "") -> None:
    seen, rank = {}, find().rank

    def tell() -> None:
        Path(folder, f"rank-{rank}.json").write_text(json.dumps(seen))

    for name in MODELS:
        for count in (1, 2):
            result = fit(name, [device] * count)
            seen[f"{name} on {count}"] = outcome(result) | {"devices": result.devices}
    seen["own loop"], seen["fine-tuned"] = own_loop([device]), fine_tuned([device])
    Across.sum = losing_a_part
    seen["twin"] = outcome(fit(MODELS[0], [device]))
    Across.sum = sum_up
    tell()
    if run:
        killed_after(STOP + 1, Path(run))
        try:
            fit(MODELS[0], [device], run_dir=run, checkpoint_every=1, timeout=60)
        except ProcessFailed as error:
            print(error, file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
