"""What every backend must show: one recipe, the same bits on any number of devices.

`check` is the heart of the suite. It compares with == on bytes, and first makes sure that there was something to compare:
that the weights moved, and that shards and devices of different sizes took part.
"""

from __future__ import annotations

import importlib
import os

import numpy as np

import samestep as ss

BACKEND = os.environ.get("SAMESTEP_TEST_BACKEND", "torch")
zoo = importlib.import_module(f"conformance.zoo_{BACKEND}")

# JAX compiles for every size of a shard and TensorFlow in every fit: of the ResNet, for longer than all else takes. There,
# a small model with a convolution, batch norm and dropout stands for it, and the ResNet itself is in one test.
COMPILES = BACKEND in ("jax", "tensorflow")
NORMED = "small_with_batch_norm" if COMPILES else "resnet_with_batch_norm"
MODELS = ("lenet", "lenet_modern", "mlp_with_dropout", NORMED, "embedding")
# Examples and batch size: 49, 125 and 250 over 8 shards do not divide, the last batch is smaller; batches of 5 leave shards
# empty. Frameworks that compute longer, of which there are four, have fewer examples, and those that compile few sizes of
# shards: 7 and 6, and 6 for the last batch and for evaluation.
LARGE = (97, 49) if COMPILES else (346, 250) if BACKEND == "torch" else (173, 125)
BATCHES = {"large and a smaller last": LARGE, "5 and a last 2": (12, 5)}


def data(model: str, n: int) -> ss.Data:
    random = np.random.default_rng(n)
    # images of 40 x 40 leave 2 x 2 at the end of the ResNet: batch norm needs more than one value, also in a shard of one
    side = 40 if model == "resnet_with_batch_norm" else 28
    x = random.integers(0, 50, (n, 6)) if model == "embedding" else random.random((n, 1, side, side), dtype=np.float32)
    y = random.integers(0, 10, n)
    return ss.Data(train=(x, y), test=(x[: n // 2], y[: n // 2]))


def fit(model: str, devices, n: int = LARGE[0], batch_size: int = LARGE[1], **settings) -> ss.Run:
    settings = {
        "optimizer": ss.sgd(momentum=0.9),
        "schedule": lambda t: 0.1 / (1 + t),
        "gradient_clip_val": 1.0,
    } | settings
    trainer = ss.Trainer(max_epochs=2, batch_size=batch_size, devices=devices, progress=False, **settings)
    return trainer.fit(getattr(zoo, model)(), data(model, n))


def numbers(run: ss.Run) -> list[dict]:
    """The history without the one column that is not a result."""
    return [{key: value for key, value in row.items() if key != "seconds"} for row in run.history]


def same(a: ss.Run, b: ss.Run) -> None:
    """Assert that two runs are the same to the last bit, after every step."""
    ours, theirs = a.weights(), b.weights()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype
        assert ours[name].tobytes() == theirs[name].tobytes(), f"{name} differs"
    assert a.fingerprints == b.fingerprints
    assert a.fingerprint == b.fingerprint
    assert numbers(a) == numbers(b)


def check(run_on, counts) -> None:
    """Assert that `run_on(k)` gives the same run for one device and for each of `counts`."""
    one = run_on(1)
    assert one.recipe["initial"] != one.fingerprint, "training changed nothing: there is nothing to compare"
    assert len(set(one.fingerprints)) == len(one.fingerprints), "some step changed nothing"
    for count in counts:
        other = run_on(count)
        assert len(other.devices) == count
        assert other.recipe == one.recipe
        same(one, other)


def everywhere(model: str, folder, **settings) -> ss.Run:
    """Assert that a run is the same on 1, 2 and 3 devices, and resumed on others after each of its first steps."""
    kept = {"run_dir": folder / "run", "checkpoint_every": 1, "keep_checkpoints": 99}
    one = fit(model, "cpu", **kept, **settings)
    for count in (2, 3):
        same(one, fit(model, ["cpu"] * count, **settings))
        path = folder / "run" / "checkpoints" / f"step-{count - 1:09}.safetensors"
        resumed = fit(model, ["cpu"] * count, run_dir=folder / f"resumed-{count}", resume=path, **settings)
        assert resumed.resumed == count - 1
        same(one, resumed)
    return one
