"""What models of other packages do to their buffers and weights, in PyTorch: trained, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import samestep as ss
from samestep.backends.torch.flat import Flat
from samestep.backends.torch.lane import Lane
from samestep.backends.torch.noise import with_generator
from samestep.errors import Invalid, NotRepeatable


def numbers(dtype: Any) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    return random.standard_normal((61, 12)).astype(dtype), random.integers(0, 3, 61)


def trainer(**settings: Any) -> ss.Trainer:
    """On so many replicas on the CPU: the models here make tensors there."""
    settings["devices"] = ["cpu"] * settings.get("devices", 3)
    return ss.Trainer(**{"max_epochs": 2, "batch_size": 16, "progress": False, "seed": 3} | settings)


class Kept(nn.Module):
    """One buffer is needed in the backward pass, and after that another one of its type is written."""

    def __init__(self, which: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.outer = nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("turned", torch.arange(7, -1, -1))  # as num_batches_tracked, int64
        self.register_buffer("mean", torch.zeros(3))  # as running_mean, float32
        self.which = which

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.inner(x)
        if self.which == "turned":
            inner = inner + self.inner.bias[self.turned]  # autograd keeps the indices
        output = self.outer(self.norm(inner))  # and the running statistics
        if self.which == "mean" and self.training:
            self.mean.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return output - self.mean


@pytest.mark.parametrize("which", ["turned", "mean"])
def test_a_buffer_may_be_written_while_autograd_keeps_another(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = numbers(np.float32)
    one, three = (trainer(devices=count, shards=4).fit(Kept(which), data) for count in (1, 3))
    assert one.fingerprint == three.fingerprint
    assert bool(one.weights()["mean"].any()) == (which == "mean")
    # As views of one vector they had one version in common.
    monkeypatch.setattr(Flat, "twin", lambda self: Flat(self.layout, self.vector.clone(), False))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trainer(shards=4).fit(Kept(which), data)


class Halved(nn.Linear):
    """Writes its weight in evaluation only, from the second time on."""

    times = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and (self.times or len(x) > 1):
            with torch.no_grad():
                self.weight.mul_(0.5)
        return super().forward(x)


def test_weights_written_in_evaluation_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data, model = numbers(np.float32), Halved(12, 3)
    one, three = (trainer(devices=count).fit(model, data) for count in (1, 3))
    assert one.fingerprint == three.fingerprint
    with pytest.raises(Invalid, match="a trained weight was written to in the forward pass.*also in evaluation"):
        trainer().fit(model, ss.Data(data, data))
    start, model.times = model.weight.detach().clone(), 1  # then the pass of one example, before a fit, writes as well
    trainer().fit(model, data)
    assert torch.equal(model.weight, start)  # in a copy
    model.times = 0
    monkeypatch.setattr(Lane, "_check_fixed", lambda self, written: None)
    unchecked = trainer(devices=1, check_every=None).fit(model, ss.Data(data, data))
    assert unchecked.fingerprint != one.fingerprint  # the test data has changed the weights


class Stretched(nn.Linear):
    """Adapts a buffer to the longest input so far, and notes the length, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__(12, 3)
        self.longest, self.merged = 8, False
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def train(self, mode: bool = True) -> nn.Module:
        self.merged = not mode  # as adapters of low rank do
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > self.longest:
            self.longest, self.scale = x.shape[1], torch.tensor(0.5)
        return super().forward(x) * self.scale


def test_the_pass_before_a_fit_leaves_a_model_as_it_was() -> None:
    data, model = numbers(np.float32), Stretched()
    with pytest.raises(Invalid, match="'scale' was written to in the forward pass"):
        trainer().fit(model, data)  # with the length noted and the buffer put back, it trained without the scale
    assert (model.longest, model.merged, model.scale.item(), model.training) == (8, False, 1.0, True)
    model(torch.zeros(1, 12))
    assert trainer(devices=1).fit(model, data).fingerprint == trainer(devices=3).fit(model, data).fingerprint


def test_a_model_that_makes_a_layer_in_its_first_pass_keeps_it() -> None:
    class Builds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.built = nn.Linear(12, 8), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.built:
                self.outer, self.built = nn.Linear(8, 3), True
            return self.outer(self.inner(x))

    model = Builds()
    weights = trainer().fit(model, numbers(np.float32)).weights()
    assert model.built
    assert not np.array_equal(weights["outer.weight"], model.outer.weight.detach().numpy())


class Drawing(nn.Linear):
    """Its noise comes from an operation that has several overloads with a generator."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        torch.manual_seed(0)
        super().__init__(12, 3)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (self.draw(x) if self.training else 0)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.randint(1, 5, (len(x), 1)),
        lambda x: torch.randint(5, (len(x), 1)),
        lambda x: torch.randint_like(x[:, :1], 1, 5),
        lambda x: torch.randperm(len(x))[:, None],
    ],
)
def test_whole_numbers_are_drawn_from_the_key_of_the_shard(draw: Any) -> None:
    data = numbers(np.float32)
    one, three, other = (trainer(devices=n, seed=s).fit(Drawing(draw), data) for n, s in ((1, 3), (3, 3), (1, 4)))
    assert one.fingerprint == three.fingerprint != other.fingerprint


def test_an_operation_is_given_the_overload_that_takes_what_it_takes() -> None:
    aten = torch.ops.aten
    assert with_generator(aten.randint.low) is aten.randint.low_generator  # randint.generator takes no lower end
    assert with_generator(aten.randint.default) is aten.randint.generator
    assert with_generator(aten.bernoulli.p) is aten.bernoulli.p
    assert with_generator(aten.native_dropout.default) is None


class Spiking(nn.Linear):
    """Keeps a state of the batch's size in a buffer, as snnTorch does."""

    def __init__(self, persistent: bool = False, fresh: bool = True) -> None:
        torch.manual_seed(0)
        super().__init__(12, 3)
        self.fresh = fresh
        self.register_buffer("mem", torch.zeros(()), persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = self.mem.detach() if self.mem.shape == (len(x), 3) and not self.fresh else 0
        self.mem = super().forward(x) + start
        return self.mem


def test_a_buffer_of_the_batchs_size_may_be_made_anew_in_each_pass() -> None:
    data = numbers(np.float32)
    one, three = (trainer(devices=count).fit(Spiking(), data) for count in (1, 3))
    assert one.fingerprint == three.fingerprint
    with pytest.raises(
        NotRepeatable, match="(the loss|its result) is not the same"
    ):  # what is kept from batch to batch
        trainer().fit(Spiking(fresh=False), data)
    with pytest.raises(Invalid, match="in the place of the buffer 'mem': use persistent=False"):
        trainer().fit(Spiking(persistent=True), data)


def test_a_weight_that_starts_from_the_first_batch_is_refused_as_a_weight() -> None:
    class FromData(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.bias.data = x.mean(0)[:3]
            return super().forward(x)

    with pytest.raises(Invalid, match=r"'bias' was written to .*only the optimizer may do that"):
        trainer().fit(FromData(12, 3), numbers(np.float32))
