"""content of PyTorch's objects: tensors are told by all their bits, sparse and quantized ones by what they show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from samestep.backends.torch.content import content

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
