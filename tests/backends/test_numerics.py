"""numerics: what is told of the machine and of libraries, from files and libraries that are made up."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from samestep.backends import numerics
from samestep.backends.torch import numerics as of_torch
from samestep.errors import Invalid


def test_the_vendor_is_what_the_machine_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda self: str(self) == "/proc/cpuinfo")
    monkeypatch.setattr(Path, "read_text", lambda self: "processor\t: 0\nvendor_id\t: Somebody\nmodel\t: 7\n")
    assert numerics.cpu()["vendor"] == "Somebody"
    monkeypatch.setattr(Path, "read_text", lambda self: "Processor : of another kind\n")
    assert numerics.cpu()["vendor"] == platform.machine()
    monkeypatch.setattr(Path, "exists", lambda self: False)
    assert numerics.cpu()["vendor"] == platform.machine()


def test_instruction_sets_are_those_that_numpy_found(monkeypatch: pytest.MonkeyPatch) -> None:
    core = np._core if hasattr(np, "_core") else np.core
    features: dict[str, bool] = core._multiarray_umath.__cpu_features__
    assert numerics.cpu()["sets"].split() == [name for name in numerics.SETS if features.get(name)]
    monkeypatch.setattr(core._multiarray_umath, "__cpu_features__", {"AVX2": False, "FMA3": True})
    assert numerics.cpu()["sets"] == "FMA3"
    with pytest.raises(Invalid, match="^portable: this CPU has no AVX2"):
        numerics.require_avx2()


def test_the_numbers_of_mkl_and_onednn_for_portable_runs() -> None:
    """MKL_CBWR_COMPATIBLE in mkl_types.h, and dnnl_cpu_isa_avx2 in dnnl_types.h."""
    assert (numerics.COMPATIBLE, numerics.AVX2) == (3, 7)


def test_variables_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*numerics.VARIABLES, "MINE", "YOURS"):
        monkeypatch.delenv(name, raising=False)
    assert numerics.variables(["MINE"]) == {}
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    monkeypatch.setenv("MINE", "1")
    monkeypatch.setenv("YOURS", "2")
    assert numerics.variables(["MINE"]) == {"MKL_CBWR": "AVX2", "MINE": "1"}


def test_mkl_tells_version_and_branch() -> None:
    def version(text: Any, size: int) -> None:
        assert size == 200
        text.value = b"Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 20240605 for 64"

    asked: list[int] = []
    library: Any = SimpleNamespace(
        MKL_Get_Version_String=version, mkl_serv_cbwr_get=lambda which: asked.append(which) or 9
    )
    assert numerics.mkl(library) == {"mkl": "2024.2-Product 20240605", "mkl_branch": 9}
    assert asked == [1]
    assert numerics.mkl(None) == {}


def test_onednn_tells_three_numbers_and_an_instruction_set() -> None:
    numbers = (ctypes.c_int * 4)(3, 7, 11, 99)

    class Version:
        restype: Any = None

        def __call__(self) -> Any:
            return ctypes.cast(numbers, self.restype)

    library: Any = SimpleNamespace(dnnl_version=Version(), dnnl_get_effective_cpu_isa=lambda: 5)
    assert numerics.onednn(library) == {"onednn": "3.7.11", "onednn_isa": 5}
    assert numerics.onednn(None) == {}


def test_a_variable_is_set_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "before")
    monkeypatch.delenv("YOURS", raising=False)
    for name, before in (("MINE", "before"), ("YOURS", None)):
        with pytest.raises(OSError), numerics.variable(name, "now"):
            assert numerics.os.environ[name] == "now"
            raise OSError
        assert numerics.os.environ.get(name) == before


def test_settings_of_pytorch_are_those_of_the_device() -> None:
    on_cpu, on_gpu = of_torch.settings(gpu=False), of_torch.settings(gpu=True)
    assert on_cpu.keys() >= {*of_torch.CPU, "default_dtype", "denormals", "einsum", "mha_fastpath", "matmul"}
    assert on_gpu.keys() >= {*of_torch.GPU, "default_dtype", "denormals", "einsum", "mha_fastpath", "matmul"}
    assert not on_cpu.keys() & set(of_torch.GPU)
    assert not on_gpu.keys() & set(of_torch.CPU)


def test_whether_the_smallest_numbers_become_zero() -> None:
    assert of_torch.settings(gpu=False)["denormals"] == numerics.denormals() == "kept"
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no such setting")
    try:
        assert of_torch.settings(gpu=False)["denormals"] == numerics.denormals() == "flushed"
    finally:
        torch.set_flush_denormal(False)
