"""JAX on a GPU: all shards of a replica in one launch against one shard at a time; time per step, and whether the bits agree.

    python benchmarks/jax_loop.py [--rounds 3] [--steps 40] [--device cuda]

LeNet, LeNet with max-pooling, an MLP with dropout, a small ResNet with batch norm; batch 250, so that shards differ in size.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np

import samestep as ss
from samestep.backends.jax import replica as jax_replica
from samestep.models import jax as models

BATCH = 250
MODELS = {
    "lenet": models.lenet,
    "lenet_modern": models.lenet_modern,
    "mlp": models.mlp,
    "resnet18, width 4": lambda: models.resnet18(width=4),
}


def fit(model: object, data: ss.Data, devices: list[str], looped: bool) -> ss.Run:
    jax_replica.LOOPED = ("cpu", "cuda") if looped else ()
    return ss.Trainer(max_epochs=2, batch_size=BATCH, devices=devices, schedule=0.05, progress=False).fit(model, data)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    random, n = np.random.default_rng(0), BATCH * options.steps
    data = ss.Data(train=(random.random((n, 1, 40, 40), dtype=np.float32)[:, :, :28, :28], random.integers(0, 10, n)))
    large = ss.Data(train=(random.random((n, 1, 40, 40), dtype=np.float32), random.integers(0, 10, n)))
    for name, make in MODELS.items():
        model, examples, times, prints = make(), large if "resnet" in name else data, {}, {}
        for devices in (1, 3, 8):
            for looped in (True, False):
                for _ in range(options.rounds):
                    run = fit(model, examples, [options.device] * devices, looped)
                    times.setdefault((devices, looped), []).append(run.history[-1]["seconds"] / options.steps * 1e3)
                    prints.setdefault(looped, set()).add(run.fingerprint)
        for (devices, looped), ms in times.items():
            how = "one launch" if looped else "one shard at a time"
            print(f"{name}: {devices} replicas, {how}: {statistics.median(ms):.3f} ms/step")
        print(
            f"{name}: same on 1, 3 and 8 replicas: {len(prints[True]) == 1} in one launch, {len(prints[False]) == 1} alone;"
        )
        print(f"{name}: both alike: {prints[True] == prints[False]}", flush=True)


if __name__ == "__main__":
    main()
