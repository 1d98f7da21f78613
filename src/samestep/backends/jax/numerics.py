"""What decides JAX's numbers beside the model: its build, settings and kernels. docs/numerics.md has a list."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
from jax._src import config
from jax._src.lib import cuda_versions, version_str  # there are no public names for these
from jaxlib import version, xla_client

from samestep.backends import eigen, numerics
from samestep.backends.jax.clients import cpus, gpus
from samestep.devices import Device
from samestep.errors import Invalid
from samestep.portable import too_late

# Settings of the user's that change numbers, or what is compiled. A run does not touch them: it may be about them.
SETTINGS = (
    "enable_x64", "default_matmul_precision", "numpy_dtype_promotion", "explicit_x64_dtypes", "default_prng_impl",
    "enable_custom_prng", "threefry_partitionable", "threefry_gpu_kernel_lowering", "random_seed_offset",
    "high_dynamic_range_gumbel", "softmax_custom_jvp", "use_direct_linearize", "allow_f16_reductions", "disable_jit",
    "disable_most_optimizations", "optimization_level", "exec_time_optimization_effort", "memory_fitting_level",
    "memory_fitting_effort", "compiler_enable_remat_pass", "enable_pgle", "eager_constant_folding",
)  # fmt: skip
FORBID = re.compile(r"(thread_guard|no_tracing|no_execution)=True|transfer_guard\w*=dis")
LIBRARY = Path(xla_client.__file__).parent / "libjax_common.so"


def found(devices: Sequence[Device], travels: bool) -> dict[str, Any]:
    variables = numerics.variables(["TENSORFLOW_USE_CUSTOM_CONTRACTION_KERNEL", "NVIDIA_TF32_OVERRIDE"])
    about: dict[str, Any] = {"build": f"{version_str} {getattr(version, '_git_hash', '')}"[:24].strip(), "settings": settings(),
             "xla_flags": hashlib.sha256(flags()).hexdigest()[:16], "variables": variables}  # fmt: skip
    if devices[0].kind == "cuda":
        cards = [gpus()[device.index] for device in devices]
        about["gpu"] = ", ".join(sorted({f"{card.device_kind}, {card.core_count} SMs" for card in cards}))
        parts = ("cuda_runtime", "cudnn", "cublas", "cufft", "cusolver", "cusparse")
        return about | {part: getattr(cuda_versions, f"{part}_get_version", lambda: None)() for part in parts}
    about["caches"] = "fixed" if eigen.has_fixed(LIBRARY) else eigen.caches(LIBRARY)
    return about if travels else {**about, "cpu": numerics.cpu()}


def settings() -> dict[str, str]:
    """As this thread has them."""
    there = {name.removeprefix("jax_"): str(value) for name, value in jax.config.values.items()}
    about = {name: there[name] for name in SETTINGS if name in there}
    return about | {"flax_fix_rng_separator": str(flax.config.flax_fix_rng_separator)}


def flags() -> bytes:
    """XLA's flags in effect. XLA reads XLA_FLAGS once, when JAX first computes. What only writes files is left out."""
    options = xla_client.CompileOptions()
    debug = options.executable_build_options.debug_options
    for name in dir(debug):
        if "dump" in name or name == "xla_force_host_platform_device_count":  # the number of devices has no way in
            setattr(debug, name, type(getattr(debug, name))())
    return bytes(options.SerializeAsString())


def check_contexts() -> None:
    """Refuse what holds for one thread and cannot be given to others, and what forbids a run its work."""
    settings = jax.config.values
    names = [name for name in vars(config) if name.endswith("_context_manager") and f"jax_{name}" not in settings]
    found = ["set_mesh"] * (not jax.sharding.get_abstract_mesh().empty)
    found += [name.removesuffix("_manager") for name in names if getattr(config, name).value]
    found += filter(FORBID.search, map("{0[0]}={0[1]}".format, settings.items()))
    if found:
        raise Invalid(f"JAX's {found[0]} would hold for some threads of a run only, or stop it: leave it out there")


def take_over(settings: dict[str, Any]) -> None:
    """Give this thread another one's settings: contexts such as jax.default_matmul_precision hold for one thread."""
    for name, value in jax.config.values.items():
        if value != settings[name]:
            jax.config._value_holders[name](settings[name]).__enter__()


def require_portable() -> None:
    """Refuse if XLA has read its flags before. Then 1/√x comes from an estimate of the CPU's, and is often off by a bit."""
    numerics.require_avx2()
    x = np.linspace(1, 4, 4096, dtype=np.float32)
    found = jax.jit(jax.lax.rsqrt)(jax.device_put(x, cpus()[0]))
    if b"AVX2" not in flags() or not np.array_equal(found, 1 / np.sqrt(x)):
        raise too_late("JAX has already read its XLA_FLAGS")
    eigen.fix_caches(LIBRARY, f"JAX {jax.__version__}")
