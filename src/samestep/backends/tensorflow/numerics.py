"""What decides TensorFlow's numbers beside the model: its build, kernels, settings. docs/numerics.md has a list."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common.global_state import get_global_attribute  # Keras tells its scopes nowhere else
from tensorflow.python.framework import config, ops

from samestep import portable
from samestep.backends import eigen, numerics
from samestep.backends.symbols import function
from samestep.errors import Invalid

VARIABLES = ("TF_ONEDNN_ASSUME_FROZEN_WEIGHTS", "TF_SET_ONEDNN_FPMATH_MODE", "TF_USE_DEEP_CONV2D", "TF_ENABLE_ONEDNN_SPMM",
             "TF_ENABLE_ZENDNN_OPTS", "TF_XLA_FLAGS", "XLA_FLAGS")  # fmt: skip
FRAMEWORK, KERNELS = (Path(tf.__file__).parent / f"libtensorflow_{name}.so.2" for name in ("framework", "cc"))


def found(devices: Any, travels: bool) -> dict[str, Any]:
    """Settings of the user's are recorded, not touched: the run may be about them."""
    settings = {name: getattr(keras.config, name)() for name in ("floatx", "epsilon", "image_data_format")}
    settings |= {"dtype_policy": keras.config.dtype_policy().name, "deterministic_ops": config.is_op_determinism_enabled(),
                 "tf32": tf.config.experimental.tensor_float_32_execution_enabled(),
                 "promotion": ops.get_dtype_conversion_mode().name,
                 "keeps_denormals": bool((np.array([1e-39], np.float32) * np.float32(0.5)).any())}  # fmt: skip
    about = {"build": f"{tf.__version__} {tf.version.GIT_VERSION}", "keras": keras.__version__, "onednn": onednn(),
             "kernels": kernels(), "caches": "fixed" if computes_as_everywhere() else eigen.caches(FRAMEWORK),
             "settings": settings, "variables": numerics.variables(VARIABLES)}  # fmt: skip
    return about | ({} if travels else {"cpu": numerics.cpu()})


def check_scopes() -> None:
    """Refuse those that change what variables are: a run makes some and reads others."""
    scopes = [name for name in ("stateless_scope", "symbolic_scope", "autocast_scope") if get_global_attribute(name)]
    scopes += ["a tf.distribute strategy"] * tf.distribute.has_strategy() + ["a graph"] * (not tf.executing_eagerly())
    if scopes:
        raise Invalid(f"the fit is inside {scopes[0]}, where variables are others: leave it out, around a fit")


def onednn() -> bool | None:
    """Whether TensorFlow computes with oneDNN's operations. It asks a variable, or else the CPU, once. None: it hides that."""
    ask = function(FRAMEWORK, "_ZN10tensorflow12IsMKLEnabledEv")
    return bool(ask() & 1) if ask else None


@functools.cache
def kernels() -> str:
    """How matrices are multiplied, by oneDNN and by Eigen. Measured: only with AVX-512 are these rows summed in turn."""
    rows = np.random.Generator(np.random.Philox(key=0)).standard_normal((5, 300), np.float32)
    with tf.device("/CPU:0"):
        sums = tf.linalg.matmul(rows, np.ones((300, 3), np.float32)).numpy()[:, 0]
    return "AVX512" if (sums == np.add.accumulate(rows, 1)[:, -1]).all() else "AVX2"


def computes_as_everywhere() -> bool:
    """Whether a portable run has begun in this process."""
    return eigen.has_fixed(KERNELS)


def require_portable() -> None:
    numerics.require_avx2()
    if onednn() is not False or kernels() != "AVX2":
        raise portable.too_late("TensorFlow has already chosen its kernels by the CPU")
    eigen.fix_caches(KERNELS, f"TensorFlow {tf.__version__}")
