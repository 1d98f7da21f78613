"""JAX on a GPU: LeNet, batch 256, in ms per step: many steps in one launch against one by one, and whether the bits agree.

    python benchmarks/jax_loop.py [--device cuda] [--steps 234] [--epochs 4] [--replicas 1 8] [--only looped/graphs ...]

A way is how the loop over the shards is compiled (WAY in backends/jax/steps.py) and what CUDA graphs may hold. `one by one` is
capture=False. The peer is plain JAX: an epoch in one lax.scan, with the whole batch as one shard.
"""

from __future__ import annotations

import argparse
import time
import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import samestep as ss
from samestep.backends.jax import replica, steps
from samestep.models import jax as models

BATCH = 256
LOOPS = {name: value for name, value in steps.GRAPHS.items() if "scheduling" not in name}  # loops in CUDA graphs
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "graphs": LOOPS,
    "concurrent": {**LOOPS, "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"},
}
WAYS = ["looped/graphs", "unrolled/graphs", "unrolled/concurrent", "looped/plain", "unrolled/plain"]
Row = tuple[float, str]


def fit(data: ss.Data, epochs: int, devices: list[str], way: str, shards: int) -> Row:
    """ms per step of the fastest epoch after the first two, which hold the compiling; and the fingerprint."""
    captured = "/" in way
    if captured:
        steps.WAY, options = way.split("/")
        steps.GRAPHS.clear()
        steps.GRAPHS.update(OPTIONS[options])
        steps.launch.cache_clear()
    trainer = ss.Trainer(
        max_epochs=epochs, batch_size=BATCH, devices=devices, shards=shards, schedule=0.05, progress=False, capture=captured,
        check_every=None, optimizer=ss.sgd(),
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run = trainer.fit(models.lenet(), data)
    notes = "".join(f"  ! {warning.message}"[:160] for warning in told)
    seconds = min(row["seconds"] for row in run.history[min(2, epochs - 1) :])
    return seconds / len(run.fingerprints) * epochs * 1e3, run.fingerprint[:12] + notes


def peer(data: ss.Data, epochs: int, device: str) -> float:
    """ms per step of plain JAX."""
    pair, on = models.lenet(), jax.devices("gpu" if device == "cuda" else device)[0]
    x, y = (jax.device_put(array, on) for array in (data.train.x, data.train.y.astype(np.int32)))
    weights = jax.device_put(pair.params, on)

    def loss(weights: Any, index: Any) -> Any:
        scores = jax.nn.log_softmax(pair.apply(weights, jnp.take(x, index, axis=0, mode="clip")))
        return -jnp.where(jnp.arange(10) == jnp.take(y, index, mode="clip")[:, None], scores, 0).sum() / BATCH

    def step(weights: Any, index: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(weights, index)
        return jax.tree.map(lambda w, g: w - 0.05 * g, weights, gradient), value

    epoch = jax.jit(partial(jax.lax.scan, step))
    found = []
    for number in range(epochs):
        order = np.random.default_rng(number).permutation(len(y)).astype(np.int32).reshape(-1, BATCH)
        began = time.perf_counter()
        weights, losses = epoch(weights, order)
        np.asarray(losses)
        found.append((time.perf_counter() - began) / len(order) * 1e3)
    return min(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=234)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--replicas", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--only", nargs="*", default=WAYS)
    options = parser.parse_args()
    replica.LOOPED = ("cpu", "cuda")
    random, n = np.random.default_rng(0), BATCH * options.steps
    data = ss.Data(train=(random.random((n, 1, 28, 28), dtype=np.float32), random.integers(0, 10, n)))
    print(
        f"JAX {jax.__version__}, {jax.devices()[0].device_kind}; the peer: {peer(data, options.epochs, options.device):.3f}"
    )
    prints: dict[int, set[str]] = {}
    for shards in (1, 8):
        for way in ["one by one", *options.only]:
            if shards == 1 and way.startswith("unrolled"):
                continue  # there is no loop
            for count in [k for k in options.replicas if k <= shards]:
                began = time.perf_counter()
                ms, found = fit(data, options.epochs, [options.device] * count, way, shards)
                took = time.perf_counter() - began
                print(f"{shards} shards  {way:20} {count} replicas {ms:8.3f} ms  ({took:.0f} s)  {found}", flush=True)
                prints.setdefault(shards, set()).add(found.split()[0])
    for shards, different in prints.items():
        print(f"{shards} shards: {'the same bits everywhere' if len(different) == 1 else f'BITS DIFFER: {different}'}")


if __name__ == "__main__":
    main()
