"""Portable runs: the same bits on every x86-64 CPU with AVX2. Frameworks choose kernels by the CPU unless told otherwise.

Each library reads its variables once, when it first computes, so they must be set before. `import samestep` does so if
SAMESTEP_PORTABLE=1, and `samestep train --portable` before it runs a script. docs/numerics.md says what each one does and what
was shown on which CPUs.
"""

from __future__ import annotations

import os

from samestep.errors import Invalid

SWITCH = "SAMESTEP_PORTABLE"
ENVIRONMENT = {
    "torch": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"},
    "jax": {
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2 --xla_cpu_enable_platform_dependent_math=false",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    },
    "tensorflow": {"TF_ENABLE_ONEDNN_OPTS": "0", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "paddle": {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "mxnet": {"OPENBLAS_CORETYPE": "Haswell", "DNNL_MAX_CPU_ISA": "AVX2"},
}


def wanted() -> bool:
    """Whether the switch is on."""
    return os.environ.get(SWITCH, "0") not in ("", "0")


def set_up() -> None:
    """Set the variables of all frameworks, for this process and for those that it starts."""
    os.environ[SWITCH] = "1"
    for variables in ENVIRONMENT.values():
        for name, value in variables.items():
            if not name.endswith("_FLAGS"):
                os.environ[name] = value
            elif value not in os.environ.get(name, ""):  # a list, which may hold more
                os.environ[name] = f"{os.environ.get(name, '')} {value}".strip()


def too_late(reason: str) -> Invalid:
    """The error for a framework that has chosen its kernels already."""
    return Invalid(
        f"portable: {reason}. Set {SWITCH}=1 before Python starts ({SWITCH}=1 python my.py), run samestep train "
        "--portable my.py, or import samestep with that variable set before a model is made"
    )
