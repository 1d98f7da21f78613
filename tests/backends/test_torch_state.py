"""State has a home in PyTorch, and what surrounds a fit reaches all of its threads or none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conformance.zoo_torch import LearnedScale, Momentum, Plain
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import samestep as ss
from samestep.backends import workers
from samestep.errors import Invalid, Written, WrongType

NUMBERS = np.random.default_rng(0)
DATA = NUMBERS.normal(size=(32, 6)).astype("float32"), NUMBERS.integers(0, 3, 32)


def fit(model: nn.Module, epochs: int = 2, devices: int = 1, **settings: Any) -> ss.Run:
    """On the CPU: most of this is about its threads."""
    given = {"max_epochs": epochs, "batch_size": 16, "shards": 4, "devices": ["cpu"] * devices, "progress": False}
    return ss.Trainer(**given | settings).fit(model, DATA)


# Frozen parameters that are declared as state


@pytest.mark.parametrize("how", ["copy_", "data", "data = "])
def test_a_momentum_encoder_is_state_if_it_is_declared(how: str, tmp_path: Path) -> None:
    runs = [fit(Momentum(how), devices=devices, state="follower.*") for devices in (1, 2, 3)]
    assert len({run.fingerprint for run in runs}) == 1
    fit(Momentum(how), 1, state="follower.*", run_dir=tmp_path)
    assert fit(Momentum(how), 2, state="follower.*", run_dir=tmp_path).fingerprint == runs[0].fingerprint
    before, after = Momentum(how).follower.weight.detach().numpy(), runs[0].weights()["follower.weight"]
    assert (before != after).all()
    assert runs[0].recipe["state"] == ["follower.*"]
    # Every shard saw the same weights of the first encoder, so the step is the one that a single shard would make.
    whole = fit(Momentum(how), epochs=1, batch_size=32, shards=1, state="follower.*")
    expected = before * np.float32(0.9) + Plain().inner.weight.detach().numpy() * np.float32(0.1)
    np.testing.assert_allclose(whole.weights()["follower.weight"], expected, rtol=1e-6)


def test_a_pattern_that_names_other_parameters_does_not_help() -> None:
    with pytest.raises(Written, match="'follower.bias' was written to in the forward pass.*state='follower.bias'"):
        fit(Momentum("copy_"), state="follower.weight")


@pytest.mark.parametrize("pattern", ["folower.*", "inner.weight"])
def test_a_pattern_that_fits_nothing_is_an_error(pattern: str) -> None:
    with pytest.raises(Invalid, match=f"state: nothing that is not trained is called {pattern!r}"):
        fit(Momentum("copy_"), state=["follower.*", pattern])


# Losses


def test_a_loss_that_is_a_module_is_trained_kept_and_resumed(tmp_path: Path) -> None:
    loss = LearnedScale()
    runs = [fit(Plain(), devices=devices, loss=loss, state="loss.calls") for devices in (1, 2, 3)]
    assert len({run.fingerprint for run in runs}) == 1
    weights = runs[0].weights()
    assert weights["loss.scale"] != 1
    assert weights["loss.calls"] == 4  # two epochs of two steps: each shard counts once, and the mean over them is kept
    assert (loss.scale.item(), loss.calls.item()) == (1, 0)  # the user's own is left as it was
    for epochs in (1, 2):
        run = fit(Plain(), epochs, loss=LearnedScale(), state="loss.calls", run_dir=tmp_path)
    assert run.fingerprint == runs[0].fingerprint
    assert set(run.model.state_dict()) == {"inner.weight", "inner.bias", "outer.weight", "outer.bias"}


def test_the_gradient_of_a_loss_is_that_of_one_model() -> None:
    """A scale inside the model, or inside the loss: the same weights in the end."""

    class Scaled(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    inside, outside = fit(Scaled()).weights(), fit(Plain(), loss=LearnedScale(), state="loss.calls").weights()
    np.testing.assert_allclose(inside["scale"], outside["loss.scale"], rtol=1e-6)
    np.testing.assert_allclose(inside["inner.weight"], outside["inner.weight"], rtol=1e-5, atol=1e-7)


def test_class_weights_are_constants_of_the_loss() -> None:
    given = {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))}
    runs = [fit(Plain(), devices=devices, **given) for devices in (1, 3)]
    assert runs[0].fingerprint == runs[1].fingerprint != fit(Plain()).fingerprint
    assert set(runs[0].weights()) == {"inner.weight", "inner.bias", "outer.weight", "outer.bias"}


def test_a_name_that_model_and_loss_share_is_refused() -> None:
    class Both(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.loss = nn.Linear(1, 1)
            self.loss.scale = nn.Parameter(torch.ones(()))

    with pytest.raises(Invalid, match="has the name of one of the loss"):
        fit(Both(), loss=LearnedScale())


# Buffers and constants of every type


class Kept(Plain):
    """Buffers of many types, which every forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", torch.tensor([1 + 2j, 3j]))
        self.register_buffer("short", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("small", torch.ones(3, dtype=torch.float16))
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("byte", torch.tensor([200], dtype=torch.uint8))
        self.frozen = nn.Linear(6, 6).bfloat16().requires_grad_(False)
        self.turn = nn.Parameter(torch.tensor([1j, 2 + 1j]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.waves *= 1j
                self.short = self.short * 2
                self.small += 0.5
                self.flag |= True
                self.byte += 1
        return super().forward(x + self.frozen.weight[0].float() * (self.turn * self.waves).real.sum())


def test_buffers_of_every_type_survive(tmp_path: Path) -> None:
    runs = [fit(Kept(), devices=devices) for devices in (1, 3)]
    for epochs in (1, 2):
        runs.append(fit(Kept(), epochs, run_dir=tmp_path))
    assert runs[0].fingerprint == runs[1].fingerprint == runs[3].fingerprint
    model = runs[3].model
    start = Kept()
    assert torch.equal(model.waves, start.waves)  # four turns by a right angle, one for each step
    assert torch.equal(runs[2].model.waves, -start.waves)
    assert model.short.tolist() == [16.0] * 3
    assert model.small.tolist() == [3.0] * 3
    assert model.flag.item() is True
    assert model.byte.item() == 204
    assert (model.short.dtype, model.waves.dtype, model.frozen.weight.dtype) == (
        torch.bfloat16, torch.complex64, torch.bfloat16,
    )  # fmt: skip
    assert torch.equal(model.frozen.weight, start.frozen.weight)
    assert torch.equal(model.turn, start.turn)


def test_a_complex_change_needs_both_parts() -> None:
    """The twin: taken as one real number, a complex change would lose its second part."""
    changes = torch.tensor([1j]) - torch.tensor([1.0 + 0j])
    with pytest.warns(UserWarning, match="discards the imaginary part"):
        assert changes.to(torch.float32).tolist() == [-1.0]


def test_a_state_dict_of_copies_will_do() -> None:
    class Copies(Plain):
        def state_dict(self, *args: Any, **options: Any) -> Any:
            return {name: tensor.clone() for name, tensor in super().state_dict(*args, **options).items()}

    assert fit(Copies()).fingerprint == fit(Plain()).fingerprint


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_model_is_refused_in_one_line() -> None:
    with pytest.raises(WrongType, match=r"a model of torch.jit cannot be copied.*pass what it was made from"):
        fit(torch.jit.script(nn.Sequential(nn.Linear(6, 3))))


# Noise


class Jitter(torch.autograd.Function):
    """Draws in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (1 + torch.rand_like(gradient))


class Jittered(Plain):
    """Jitters the gradients of some shards, depending on their first example."""

    def __init__(self, above: float) -> None:
        super().__init__()
        self.above = above

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        return Jitter.apply(output) if float(x[0, 0]) > self.above else output


@pytest.mark.parametrize("above", [-math.inf, 0.9], ids=["from the first shard on", "later"])
def test_noise_in_the_backward_pass_is_keyed(above: float) -> None:
    plain = fit(Plain()).fingerprint
    found = {fit(Jittered(above), devices=devices).fingerprint for devices in (1, 2, 3)}
    assert len(found) == 1
    assert found != {plain}


# What surrounds a fit


class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Creates(Plain):
    """Makes a tensor where the default device is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.zeros(3)


TAKEN = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "a default device": lambda: torch.device("meta"),
}
REFUSED = {
    "autocast .cpu.": lambda: torch.autocast("cpu"), "Mode": Mode, "Dispatch": Dispatch,
}  # fmt: skip


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("name", TAKEN)
def test_a_mode_around_a_fit_reaches_no_thread(name: str, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "cores", lambda: cores)
    model = Creates()
    plain = fit(model).fingerprint
    with TAKEN[name]():
        assert fit(model).fingerprint == plain
        assert torch.is_inference_mode_enabled() == (name == "inference_mode")
        assert torch.is_grad_enabled() == (name == "a default device")


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("name", REFUSED)
def test_a_mode_that_changes_numbers_is_refused(name: str, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "cores", lambda: cores)
    with REFUSED[name](), pytest.raises(Invalid, match=f"{name} around a fit reaches only some of its threads"):
        fit(Plain())


def test_the_default_type_is_in_the_recipe() -> None:
    before = fit(Plain()).recipe["numerics"]["settings"]["default_dtype"]
    torch.set_default_dtype(torch.float64)
    try:
        model = Plain().float()
        assert fit(model).recipe["numerics"]["settings"]["default_dtype"] != before
    finally:
        torch.set_default_dtype(torch.float32)
