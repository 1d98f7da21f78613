"""numerics of PyTorch: what is told of builds, GPUs and settings that are made up, and which kernels a portable run takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from samestep.backends import numerics
from samestep.backends.torch import numerics as of_torch
from samestep.devices import cpu, gpu
from samestep.errors import Invalid


def test_how_pytorch_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.0+cpu")
    monkeypatch.setattr(torch.version, "git_version", "0123456789abcdef0123")
    monkeypatch.setattr(torch.__config__, "show", lambda: "  - Intel(R) MKL-DNN v3.7.1 (Git Hash 8d26)")
    here, travels = (of_torch.found([cpu()], travels=travels) for travels in (False, True))
    assert (here["build"], here["onednn"]) == ("2.9.0+cpu 0123456789abcd", "v3.7.1")
    assert here["cpu"] == numerics.cpu()
    assert here == {**travels, "cpu": numerics.cpu()}
    assert "cpu" not in travels
    assert travels["kernels"] == torch.backends.cpu.get_cpu_capability()
    assert ("mkl" in travels) == torch.backends.mkl.is_available()
    monkeypatch.setattr(torch.version, "git_version", None)
    monkeypatch.setattr(torch.__config__, "show", lambda: "nothing of it")
    assert (about := of_torch.found([cpu()], True))["build"] == "2.9.0+cpu "
    assert about["onednn"] is None


def test_gpus_are_told_by_their_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [SimpleNamespace(name=name, multi_processor_count=n) for name, n in (("B", 4), ("A", 3), ("B", 4))]
    monkeypatch.setattr(torch.cuda, "get_device_properties", cards.__getitem__)
    about = of_torch.found([gpu(0), gpu(1), gpu(2)], travels=False)
    assert about["gpu"] == "A, 3 SMs, B, 4 SMs"
    assert (about["cuda"], about["cudnn"]) == (torch.version.cuda, torch.backends.cudnn.version())
    assert not about.keys() & {"cpu", "kernels"}


def test_the_order_of_products_in_einsum_is_told_if_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    einsum, found = torch.backends.opt_einsum, []
    for enabled, available in ((True, True), (True, False), (False, True), (False, False)):
        fake = SimpleNamespace(strategy="greedy", enabled=enabled, is_available=lambda available=available: available)
        monkeypatch.setattr(torch.backends, "opt_einsum", fake)
        found.append(of_torch.settings(gpu=False)["einsum"])
    monkeypatch.setattr(torch.backends, "opt_einsum", einsum)
    assert found == ["greedy", "as written", "as written", "as written"]


def test_the_precision_of_products_is_asked_of_the_library_that_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"matmul": "none", "conv": "tf32", "rnn": "ieee"}
    monkeypatch.setattr(torch._C, "_get_fp32_precision_getter", lambda by, what: f"{by}: {said[what]}", raising=False)
    for gpu_, by in ((False, "mkldnn"), (True, "cuda")):
        found = of_torch.settings(gpu_)
        assert [found[k] for k in said] == [f"{by}: ieee", f"{by}: tf32", f"{by}: ieee"]
    monkeypatch.delattr(torch._C, "_get_fp32_precision_getter")  # before PyTorch 2.9
    found = of_torch.settings(gpu=False)
    assert (found["matmul"], found["tf32"]) == ("highest", torch.backends.cudnn.allow_tf32)
    assert "conv" not in found
    assert "mkldnn_enabled" in found


@pytest.mark.parametrize(
    ("kernels", "branch", "why"),
    [
        ("AVX512", None, "PyTorch already computes with AVX512"),
        ("DEFAULT", None, "PyTorch already computes with DEFAULT"),
        ("ALTIVEC", 3, "PyTorch already computes with ALTIVEC"),
        ("AVX2", 1, "MKL has already chosen its kernels by the CPU"),
        ("AVX2", 3, None),
        ("AVX2", None, None),
    ],
)
def test_a_portable_run_needs_kernels_that_were_chosen_in_time(
    kernels: str, branch: int | None, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numerics, "cpu", lambda: {"vendor": "", "sets": "AVX2"})
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "".join(kernels))  # not the same object
    monkeypatch.setattr(numerics, "mkl", lambda library: {} if branch is None else {"mkl_branch": branch})
    monkeypatch.setattr(torch.library, "get_kernel", print, raising=False)
    if why is None:
        of_torch.require_portable()
    else:
        with pytest.raises(Invalid, match=why):
            of_torch.require_portable()
    monkeypatch.delattr(torch.library, "get_kernel")
    with pytest.raises(Invalid, match=r"^portable: needs PyTorch 2.9 or later, got "):
        of_torch.require_portable()
