"""optimizers: the formulas by hand, parity with torch.optim, and that neither slices nor threads change a bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from samestep.errors import Invalid, WrongType
from samestep.optimizers import SGD, sgd
from samestep.shards import cut

# float64, 200 steps: torch fuses a product and a sum where samestep rounds each, so the last digits may differ.
TOLERANCE = 1e-12

EVERY = [
    sgd(),
    sgd(weight_decay=0.01),
    sgd(momentum=0.9),
    sgd(momentum=0.9, weight_decay=0.01),
    sgd(momentum=0.9, nesterov=True),
    sgd(momentum=0.9, nesterov=True, weight_decay=0.01),
]

# The formulas


@pytest.mark.parametrize(
    ("optimizer", "weights", "velocities"),
    [
        (sgd(), [[0.5, -2.25], [1.0, -2.5], [0.5, -2.5]], None),
        (sgd(weight_decay=0.25), [[0.375, -2.0], [0.8515625, -2.125], [0.138671875, -1.59375]], None),
        (
            sgd(momentum=0.5),
            [[0.5, -2.25], [0.875, -2.5625], [1.125, -3.1875]],
            [[1.0, 0.5], [-1.5, 1.25], [-0.25, 0.625]],
        ),
        (
            sgd(momentum=0.5, weight_decay=0.25),
            [[0.375, -2.0], [0.6953125, -2.125], [0.662109375, -1.84375]],
            [[1.25, 0.0], [-1.28125, 0.5], [0.033203125, -0.28125]],
        ),
        (
            sgd(momentum=0.5, nesterov=True),
            [[0.25, -2.375], [0.9375, -2.78125], [0.5625, -3.09375]],
            [[1.0, 0.5], [-1.5, 1.25], [-0.25, 0.625]],
        ),
        (
            sgd(momentum=0.5, nesterov=True, weight_decay=0.25),
            [[0.0625, -2.0], [0.728515625, -2.1875], [0.045166015625, -1.4921875]],
            [[1.25, 0.0], [-1.359375, 0.5], [0.00244140625, -0.296875]],
        ),
    ],
    ids=repr,
)
def test_three_steps_by_hand(optimizer: SGD, weights: list[list[float]], velocities: list[list[float]] | None) -> None:
    """Worked out with fractions of powers of two, which float64 holds exactly: x = (1, -2), η = 1/2, 1/4, 1."""
    x = np.array([1.0, -2.0])
    state = {name: np.zeros(2) for name in optimizer.slots}
    assert list(state) == (["velocity"] if velocities else [])
    for step, (g, lr) in enumerate([([1.0, 0.5], 0.5), ([-2.0, 1.0], 0.25), ([0.5, 0.0], 1.0)]):
        x, state = optimizer.update(x, np.array(g), state, lr)
        assert x.tolist() == weights[step]
        assert {name: v.tolist() for name, v in state.items()} == ({"velocity": velocities[step]} if velocities else {})


@pytest.mark.parametrize("optimizer", EVERY, ids=repr)
def test_update_leaves_what_it_was_given_as_it_was(optimizer: SGD) -> None:
    x, g = np.array([1.0, 2.0]), np.array([3.0, 4.0])
    state = {name: np.array([5.0, 6.0]) for name in optimizer.slots}
    new, new_state = optimizer.update(x, g, state, 0.5)
    assert (x.tolist(), g.tolist()) == ([1.0, 2.0], [3.0, 4.0])
    assert {name: v.tolist() for name, v in state.items()} == {name: [5.0, 6.0] for name in optimizer.slots}
    assert new.tolist() != x.tolist()
    assert all(new_state[name].tolist() != [5.0, 6.0] for name in optimizer.slots)


@pytest.mark.parametrize("optimizer", EVERY, ids=repr)
def test_parity_with_torch_over_200_steps_of_a_changing_rate(optimizer: SGD) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(50, dtype=torch.float64, generator=generator)
    noise = torch.randn(200, 50, dtype=torch.float64, generator=generator)
    curvature = torch.linspace(0.1, 2.0, 50, dtype=torch.float64)

    theirs = start.clone().requires_grad_()
    torchs = torch.optim.SGD([theirs], lr=1.0, **dataclasses.asdict(optimizer))
    ours, state = start.clone(), {name: torch.zeros_like(start) for name in optimizer.slots}
    for t in range(200):
        lr = 0.1 / (1 + t / 20)
        torchs.param_groups[0]["lr"] = lr
        theirs.grad = curvature * theirs.detach() + noise[t]
        torchs.step()
        ours, state = optimizer.update(ours, curvature * ours + noise[t], state, lr)
    assert (ours - start).norm() > 1  # there was something to compare
    torch.testing.assert_close(ours, theirs.detach(), rtol=TOLERANCE, atol=TOLERANCE)


def steps(optimizer: SGD, x: Any, gradients: Any) -> Any:
    state = {name: torch.zeros_like(x) for name in optimizer.slots}
    for g, lr in zip(gradients, (0.3, 0.1, 0.07), strict=True):
        x, state = optimizer.update(x, g, state, lr)
    return torch.cat([x, *state.values()])


@pytest.mark.parametrize("optimizer", EVERY, ids=repr)
def test_slices_are_updated_to_the_same_bits_as_the_whole(optimizer: SGD) -> None:
    generator = torch.Generator().manual_seed(1)
    x, gradients = torch.randn(1003, generator=generator), torch.randn(3, 1003, generator=generator)
    whole = steps(optimizer, x, gradients).reshape(-1, 1003)
    pieces = [steps(optimizer, x[lo:hi], gradients[:, lo:hi]).reshape(-1, hi - lo) for lo, hi in cut(1003, 7)]
    assert whole.dtype == torch.float32
    assert torch.cat(pieces, dim=1).numpy().tobytes() == whole.numpy().tobytes()


@pytest.mark.parametrize("optimizer", EVERY, ids=repr)
def test_threads_do_not_change_a_bit(optimizer: SGD) -> None:
    generator = torch.Generator().manual_seed(2)
    x, gradients = torch.randn(100_003, generator=generator), torch.randn(3, 100_003, generator=generator)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(steps(optimizer, x, gradients).numpy().tobytes())
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1] == results[2]


# The values


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"momentum": 1}, Invalid, "sgd: momentum must be at least 0 and below 1, got momentum=1.0"),
        ({"momentum": -0.1}, Invalid, "sgd: momentum must be at least 0 and below 1, got momentum=-0.1"),
        ({"momentum": float("nan")}, Invalid, "sgd: momentum must be at least 0 and below 1, got momentum=nan"),
        ({"momentum": "a"}, WrongType, "sgd: momentum must be a number, got momentum='a'"),
        ({"momentum": True}, WrongType, "sgd: momentum must be a number, got momentum=True"),
        ({"momentum": None}, WrongType, "sgd: momentum must be a number, got momentum=None"),
        ({"nesterov": True}, Invalid, "sgd: nesterov=True needs a momentum above 0, got momentum=0.0"),
        ({"momentum": 0.9, "nesterov": 1}, WrongType, "sgd: nesterov must be True or False, got nesterov=1"),
        ({"weight_decay": -1}, Invalid, "sgd: weight_decay must be finite and at least 0, got weight_decay=-1.0"),
        ({"weight_decay": np.inf}, Invalid, "sgd: weight_decay must be finite and at least 0, got weight_decay=inf"),
        ({"weight_decay": np.nan}, Invalid, "sgd: weight_decay must be finite and at least 0, got weight_decay=nan"),
        ({"weight_decay": "a"}, WrongType, "sgd: weight_decay must be a number, got weight_decay='a'"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as error:
        sgd(**arguments)
    assert type(error.value) is kind
    assert str(error.value) == message


def test_an_optimizer_is_a_value() -> None:
    optimizer = sgd(0.9, True, 1)
    assert repr(optimizer) == "SGD(momentum=0.9, nesterov=True, weight_decay=1.0)"
    assert optimizer == sgd(momentum=0.9, nesterov=True, weight_decay=1.0) != sgd(momentum=0.9)
    assert {optimizer: "found"}[sgd(0.9, True, 1.0)] == "found"
    with pytest.raises(dataclasses.FrozenInstanceError):
        optimizer.momentum = 0.5  # type: ignore[misc]


def test_the_default_is_plain_descent() -> None:
    assert repr(sgd()) == "SGD(momentum=0.0, nesterov=False, weight_decay=0.0)"
    assert sgd().slots == ()
    assert sgd(momentum=0.1).slots == ("velocity",)
