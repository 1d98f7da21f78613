"""Precision, memory format and compiling are part of the recipe: the same bits on any number of devices, and others without."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import samestep as ss
from conformance import suite
from samestep.errors import Invalid

OTHERS = [{"precision": "tf32"}, {"precision": "bfloat16"}, {"memory_format": "channels_last"}, {"compile": True}]


@pytest.mark.parametrize("settings", [*OTHERS, {"streams": 2}], ids=lambda given: next(iter(given)))
def test_what_a_framework_does_not_have_is_refused(settings):
    if suite.BACKEND == "torch":
        pytest.skip("PyTorch has them")
    with pytest.raises(
        Invalid, match=f"^{next(iter(settings))}=.* is for PyTorch, and the model is of {suite.BACKEND}: "
    ):
        suite.fit("lenet", "cpu", **settings)


@pytest.mark.parametrize(
    "settings", [{"precision": "float16"}, {"memory_format": "nhwc"}, {"compile": "yes"}, {"streams": 0}]
)
def test_what_cannot_be_meant_is_refused(settings):
    with pytest.raises((ValueError, TypeError), match=next(iter(settings))):
        ss.Trainer(**settings)


torch_only = pytest.mark.skipif(suite.BACKEND != "torch", reason="these settings are PyTorch's")


@torch_only
def test_tf32_needs_a_gpu():
    with pytest.raises(Invalid, match="precision='tf32' is a mode of GPUs"):
        suite.fit("lenet", "cpu", precision="tf32")


@torch_only
@pytest.mark.parametrize("model", ["lenet_modern", suite.NORMED])
def test_channels_last_is_the_same_on_any_number_of_devices_and_resumed(model, tmp_path):
    one = suite.everywhere(model, tmp_path, memory_format="channels_last")
    assert one.recipe["memory_format"] == "channels_last"
    plain = suite.fit(model, "cpu", memory_format="contiguous")
    assert "memory_format" not in plain.recipe
    suite.same(one, suite.fit(model, "cpu"))  # the default on a CPU
    assert one.fingerprints != plain.fingerprints
    assert {name: t.shape for name, t in one.weights().items()} == {
        name: t.shape for name, t in plain.weights().items()
    }


@torch_only
def test_weights_of_convolutions_lie_with_their_channels_last():
    import torch

    from samestep.backends.making import Making
    from samestep.backends.torch.backend import TorchBackend
    from samestep.devices import cpu

    backend, conv = TorchBackend(), torch.nn.Conv2d(3, 8, 5)
    for memory_format in ("contiguous", "channels_last"):
        backend.making = Making(memory_format=memory_format)
        weight = backend.replica(conv, None, cpu(), 1).weights.views[0]
        assert weight.is_contiguous(memory_format=torch.channels_last) == (memory_format == "channels_last")
        assert torch.equal(weight, conv.weight)


@torch_only
def test_the_user_s_settings_of_precision_decide_nothing_and_come_back():
    import torch

    one = suite.fit("lenet_modern", "cpu")
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("medium")  # products of bfloat16, where the CPU has them
        torch.backends.cudnn.allow_tf32 = False
        other = suite.fit("lenet_modern", "cpu")
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("medium", False)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
    suite.same(one, other)
    assert one.recipe["numerics"]["settings"] == other.recipe["numerics"]["settings"]


@torch_only
def test_a_resume_under_another_recipe_is_refused(tmp_path):
    kept = {"run_dir": tmp_path / "run", "checkpoint_every": 1}
    suite.fit("lenet_modern", "cpu", memory_format="channels_last", **kept)
    with pytest.raises(Invalid, match="memory_format is .*, was 'channels_last'"):
        suite.fit("lenet_modern", "cpu", memory_format="contiguous", **kept)


def test_every_framework_has_the_usual_memory_format():
    """So a Trainer that says so is for all."""
    suite.same(suite.fit("mlp_with_dropout", "cpu"), suite.fit("mlp_with_dropout", "cpu", memory_format="contiguous"))


def views(when):
    """A net that sees its numbers in the order that they usually have in memory: always, in training, or never."""
    import torch

    class Views(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.dense = torch.nn.Conv2d(1, 4, 9), torch.nn.Linear(4 * 20 * 20, 10)

        def forward(self, x):
            x = self.conv(x)
            return self.dense(x.view(len(x), -1) if when(self.training) else x.flatten(1))

    torch.manual_seed(0)
    return Views()


@torch_only
@pytest.mark.parametrize("when", [lambda training: True, lambda training: training, lambda training: not training])
def test_a_model_that_cannot_compute_with_channels_last_does_not_by_default(when):
    data = suite.data("lenet", 64)
    run = ss.Trainer(1, 32, devices=["cpu"] * 2, progress=False).fit(views(when), data)
    assert "memory_format" not in run.recipe
    suite.same(run, ss.Trainer(1, 32, devices="cpu", progress=False, memory_format="contiguous").fit(views(when), data))
    if when(True):
        with pytest.raises(Invalid, match=r"^use reshape in the model, or Trainer\(memory_format='contiguous'\)"):
            ss.Trainer(1, 32, devices="cpu", progress=False, memory_format="channels_last").fit(views(when), data)


@torch_only
@pytest.mark.parametrize("net", ["lazy", "without convolutions", "float64"])
def test_which_models_have_channels_last_by_default(net):
    import torch

    make = {
        "lazy": lambda: torch.nn.Sequential(torch.nn.LazyConv2d(4, 9), torch.nn.Flatten(), torch.nn.LazyLinear(10)),
        "without convolutions": lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)),
        "float64": lambda: views(lambda training: False).double(),
    }
    data = suite.data("lenet", 64)
    if net == "float64":
        data = ss.Data(train=(data.train.x.astype("float64"), data.train.y))
    run = ss.Trainer(1, 32, devices="cpu", progress=False).fit(make[net](), data)
    assert run.recipe.get("memory_format") == ("channels_last" if net == "lazy" else None)


APART = """
from pathlib import Path
from conformance import suite
from torch._dynamo.utils import counters, get_compilation_metrics

one = suite.everywhere({model!r}, Path({folder!r}), **{settings!r})
plain = suite.fit({model!r}, "cpu")
print(one.recipe["precision"], one.recipe.get("compile"), one.fingerprints == plain.fingerprints)
print({{str(t.dtype) for t in one.weights().values()}}, "numbers_of" in {{m.co_name for m in get_compilation_metrics()}})
print(dict(counters["graph_break"]))
"""


def apart(settings, folder, model="lenet_modern"):
    """What a process of its own prints: oneDNN and the compiler read their variables when they start."""
    env = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-W", "ignore", "-c", APART.format(model=model, settings=settings, folder=str(folder))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@torch_only
def test_bfloat16_is_the_same_on_any_number_of_devices_and_resumed(tmp_path):
    assert apart({"precision": "bfloat16"}, tmp_path) == ["bfloat16 None False", "{'float32'} False", "{}"]


@torch_only
@pytest.mark.parametrize("model", ["lenet_modern", "mlp_with_dropout"])
def test_compiled_shards_are_the_same_on_any_number_of_devices_and_resumed(model, tmp_path):
    """Model and loss are compiled as one, and not only the update is. The bits may be those of the operations, or not."""
    import shutil

    if not shutil.which(os.environ.get("CXX", "g++")):
        with pytest.raises(Invalid, match="compile=True needs a C\\+\\+ compiler"):
            suite.fit("lenet_modern", "cpu", compile=True)
        return
    recipe, compiled, breaks = apart({"compile": True}, tmp_path, model)
    assert recipe.startswith("float32 True")
    assert compiled == "{'float32'} True"
    assert breaks == "{}"


@torch_only
def test_portable_runs_are_not_compiled():
    told = pytest.raises(Invalid, match="portable: torch.compile writes kernels for this CPU")
    with mock.patch.dict(os.environ), told:  # a portable Trainer sets variables
        suite.fit("lenet_modern", "cpu", compile=True, portable=True)
