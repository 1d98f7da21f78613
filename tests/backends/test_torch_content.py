"""content of PyTorch's objects: tensors are told by all their bits, sparse and quantized ones by what they show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from samestep.backends.torch.content import content
from samestep.content import Model

LONG = torch.arange(5000.0)
CHANGED = LONG.clone()
CHANGED[2500] += 2**-11  # in the middle, which a text leaves out


def hashable(told: Any) -> Any:
    return [part.tobytes() if isinstance(part, np.ndarray) else part for part in told]


def test_a_tensor_is_told_by_all_its_bits() -> None:
    assert repr(LONG) == repr(CHANGED)
    assert hashable(content(LONG, True)) != hashable(content(CHANGED, True))
    assert content(LONG, True)[-1].dtype == np.uint8
    assert content(LONG, True)[-1].nbytes == 4 * len(LONG)


def test_of_a_parameter_the_values_count_only_if_asked_for() -> None:
    one, other = torch.nn.Parameter(LONG), torch.nn.Parameter(CHANGED)
    assert content(one, False) == content(other, False) == ["torch.float32", [5000], True]
    assert hashable(content(one, True)) != hashable(content(other, True))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8)])
def test_what_has_no_memory_of_its_own_kind_is_told_by_a_text(make: Any) -> None:
    one, other = (content(make(torch.tensor(values)), True) for values in ([0.0, 1.0], [0.0, 2.0]))
    assert isinstance(one[-1], str)
    assert one != other


def test_a_layer_is_told_with_the_values_of_buffers_that_are_not_saved() -> None:
    layer = torch.nn.Linear(2, 1, bias=False)
    layer.register_buffer("kept", torch.ones(1))
    layer.register_buffer("passing", torch.ones(1), persistent=False)
    layer.register_buffer("none", None)

    def lengths(weights: bool) -> dict[str, Any]:
        told = content(layer, weights)
        assert isinstance(told, Model)
        return {name: about and len(about) for name, about in told.state[1]}

    assert lengths(False) == {"weight": 3, "bias": None, "kept": 3, "passing": 4, "none": None}
    assert lengths(True) == {"weight": 4, "bias": None, "kept": 4, "passing": 4, "none": None}


def test_a_compiled_model_is_told_by_what_was_compiled() -> None:
    layer = torch.nn.Linear(2, 1)
    assert content(torch.nn.ModuleDict({"_orig_mod": layer}), True) == ["torch.compile", layer]


def test_what_is_no_model_is_told_by_its_state_or_settings() -> None:
    generator = torch.Generator().manual_seed(3)
    assert torch.equal(content(generator, True), generator.get_state())
    assert content(torch.device("cuda", 1), True) == "device cuda"
    layer = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    optimizer.mine, optimizer.other = 3, [layer]
    kind, (group,), rest = content(optimizer, True)
    assert kind is torch.optim.SGD
    assert (group["lr"], group["params"]) == (0.5, [["torch.float32", [1, 2], True]])
    assert rest["mine"] == 3
    assert "other" not in rest
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    kind, settings, of = content(scheduler, True)
    assert (kind, settings["step_size"], settings["optimizer"], of) == (type(scheduler), 7, None, optimizer)
    assert content("text", True) is None
