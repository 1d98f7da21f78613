"""JAX's own objects for devices, and the clients on which runs compute on the CPU.

XLA divides the work of one operation among a pool of threads as large as the machine has cores, and adds up what they give.
On another number of cores, a sum, a product of matrices or a convolution's gradient has other bits. The size of the pool
cannot be set for one computation, only for a client, when it is made. So a run on the CPU computes on a client of its own,
with a pool of `threads_per_shard`. Shards side by side share that pool, and each has the thread that calls it besides. How
the work of an operation is divided depends on the size of the pool alone.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jaxlib import xla_client

from samestep.backends.numerics import variable

CLIENTS: dict[Any, int] = {}  # JAX's device of each client made here → the number of the CPU device that it stands for


@functools.cache
def computing(threads: int, asynchronous: bool, index: int) -> Any:
    """A second object for one of the user's CPU devices: that of a client with a pool of `threads`.

    If not asynchronous, it computes in the thread that calls it: so shards run side by side. Each device has a client of
    its own, as the pool of a client with many devices has at least as many threads.
    """
    cpus()  # the user's client first, with the threads it would have had
    with variable("PJRT_NPROC", str(threads)):  # what XLA reads for the size of its pool when a client is made
        native = xla_client.make_cpu_client(asynchronous=asynchronous).local_devices()[0]
    CLIENTS[native] = index
    return native


def cpus() -> list[Any]:
    """Several if jax_num_cpu_devices says so. Devices of other processes (jax.distributed) are left out, also by `gpus`."""
    return jax.local_devices(backend="cpu")


@functools.cache
def gpus() -> list[Any]:
    try:
        return jax.local_devices(backend="gpu")
    except RuntimeError:  # this JAX has none
        return []
