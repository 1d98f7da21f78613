"""optimizers: the formulas by hand, parity with torch.optim, and that neither slices, threads nor devices change a bit."""

from __future__ import annotations

import dataclasses
import inspect
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from conformance import suite

from samestep import draws
from samestep.errors import Invalid, WrongType
from samestep.optimizers.rules import SGD, SGLD, AdaGrad, Adam, Optimizer, adagrad, adam, adamw, sgd, sgld
from samestep.schedules.kinds import cosine
from samestep.shards import cut

# float64, 200 steps: torch fuses a product and a sum where samestep rounds each, and orders the factors of Adam in its own
# way (lr / (1 - beta1^t) first), so the last digits may differ.
TOLERANCE = 1e-12

QUIET: list[Optimizer] = [
    sgd(),
    sgd(weight_decay=0.01),
    sgd(momentum=0.9),
    sgd(momentum=0.9, weight_decay=0.01),
    sgd(momentum=0.9, nesterov=True),
    sgd(momentum=0.9, nesterov=True, weight_decay=0.01),
    adagrad(),
    adagrad(eps=0.1),
    adam(),
    adam(beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.01),
    adamw(),
    adamw(beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.1),
]
EVERY = [*QUIET, sgld(temperature=0.01)]

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


# For Adam with both betas 1/2. Its corrected mean is 1, 1, -1 in the first coordinate and -2, -2, 2 in the second, the
# corrected square 1, 1, 4 and 4, 4, 16: so the directions with eps = 0 are 1, 1, -1/2 and -1, -1, 1/2.
GRADIENTS = [[1.0, -2.0], [1.0, -2.0], [-2.5, 5.0]]
MOMENTS = {
    "mean": [[0.5, -1.0], [0.75, -1.5], [-0.875, 1.75]],
    "square": [[0.5, 2.0], [0.75, 3.0], [3.5, 14.0]],
}


@pytest.mark.parametrize(
    ("optimizer", "gradients", "weights", "slots"),
    [
        (  # 3/6, 5/8; 4/8, 0; 12/16, -12/16 of the rates
            adagrad(eps=3),
            [[3.0, 5.0], [4.0, 0.0], [12.0, -12.0]],
            [[0.75, -2.3125], [0.625, -2.3125], [-0.125, -1.5625]],
            {"squares": [[9.0, 25.0], [25.0, 25.0], [169.0, 169.0]]},
        ),
        (adam(beta1=0.5, beta2=0.5, eps=0), GRADIENTS, [[0.5, -1.5], [0.25, -1.25], [0.75, -1.75]], MOMENTS),
        (
            adam(beta1=0.5, beta2=0.5, eps=1),
            GRADIENTS,
            [[0.75, -2 + 1 / 3], [0.625, -2 + 1 / 3 + 1 / 6], [0.625 + 1 / 3, -2 + 1 / 3 + 1 / 6 - 0.4]],
            MOMENTS,
        ),
        (  # gradients that are GRADIENTS after x/4 was added to them
            adam(beta1=0.5, beta2=0.5, eps=0, weight_decay=0.25),
            [[0.75, -1.5], [0.875, -1.625], [-2.5625, 5.3125]],
            [[0.5, -1.5], [0.25, -1.25], [0.75, -1.75]],
            MOMENTS,
        ),
        (
            adamw(beta1=0.5, beta2=0.5, eps=0, weight_decay=0.25),
            GRADIENTS,
            [[0.375, -1.25], [0.1015625, -0.921875], [0.576171875, -1.19140625]],
            MOMENTS,
        ),
    ],
    ids=["adagrad", "adam", "adam, eps", "adam, weight decay", "adamw"],
)
def test_three_adaptive_steps_by_hand(
    optimizer: AdaGrad | Adam, gradients: list[list[float]], weights: list[list[float]], slots: dict[str, Any]
) -> None:
    """As above: x = (1, -2), η = 1/2, 1/4, 1, in numbers that float64 holds exactly, but for the thirds and the 0.4."""
    x = np.array([1.0, -2.0])
    state = {name: np.zeros(2) for name in optimizer.slots}
    assert list(state) == list(slots)
    for t, (g, lr) in enumerate(zip(gradients, (0.5, 0.25, 1.0), strict=True)):
        x, state = optimizer.update(x, np.array(g), state, lr, t)
        assert x.tolist() == weights[t]
        assert {name: v.tolist() for name, v in state.items()} == {name: values[t] for name, values in slots.items()}


def test_three_steps_of_sgld_by_hand() -> None:
    """With T = 1/4, the rates 1/2, 2, 8 give noise of sizes 1/2, 1, 2."""
    x, optimizer = np.array([1.0, -2.0]), sgld(temperature=0.25)
    weights = [[1.0, -2.25], [4.0, -3.25], [-2.0, 4.75]]
    noise = [[1.0, 0.0], [-1.0, 3.0], [-1.0, 4.0]]
    for t, (g, lr) in enumerate([([1.0, 0.5], 0.5), ([-2.0, 2.0], 2.0), ([0.5, 0.0], 8.0)]):
        x, state = optimizer.update(x, np.array(g), {}, lr, t, np.array(noise[t]))
        assert (x.tolist(), state) == (weights[t], {})


def test_the_first_step_of_adam_has_the_length_of_the_rate() -> None:
    """The zeros that its averages start from are taken out, whatever the betas."""
    for optimizer in (
        adam(eps=0),
        adam(beta1=0.5, beta2=0.75, eps=0),
        adam(beta1=0, beta2=0, eps=0),
        adamw(eps=0, weight_decay=0),
    ):
        x, _ = optimizer.update(np.zeros(2), np.array([3.0, -1e-5]), dict.fromkeys(optimizer.slots, np.zeros(2)), 0.5)
        np.testing.assert_allclose(x, [-0.5, 0.5], rtol=TOLERANCE)


@pytest.mark.parametrize("optimizer", EVERY, ids=repr)
def test_update_leaves_what_it_was_given_as_it_was(optimizer: Optimizer) -> None:
    x, g, z = np.array([1.0, 2.0]), np.array([3.0, 4.0]), np.array([7.0, 8.0])
    state = {name: np.array([5.0, 6.0]) for name in optimizer.slots}
    new, new_state = optimizer.update(x, g, state, 0.5, 0, z)
    assert (x.tolist(), g.tolist(), z.tolist()) == ([1.0, 2.0], [3.0, 4.0], [7.0, 8.0])
    assert {name: v.tolist() for name, v in state.items()} == {name: [5.0, 6.0] for name in optimizer.slots}
    assert new.tolist() != x.tolist()
    assert all(new_state[name].tolist() != [5.0, 6.0] for name in optimizer.slots)


def of_torch(optimizer: Any, parameters: list[Any]) -> torch.optim.Optimizer:
    """The optimizer of torch.optim that does the same."""
    if isinstance(optimizer, SGD):
        return torch.optim.SGD(parameters, **dataclasses.asdict(optimizer) | {"lr": optimizer.default_lr})
    if isinstance(optimizer, AdaGrad):
        return torch.optim.Adagrad(parameters, eps=optimizer.eps)
    made = torch.optim.AdamW if optimizer.decoupled else torch.optim.Adam
    betas = optimizer.beta1, optimizer.beta2
    return made(parameters, betas=betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay)


@pytest.mark.parametrize("optimizer", QUIET, ids=repr)
def test_parity_with_torch_over_200_steps_of_a_changing_rate(optimizer: Optimizer) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(50, dtype=torch.float64, generator=generator)
    noise = torch.randn(200, 50, dtype=torch.float64, generator=generator)
    curvature = torch.linspace(0.1, 2.0, 50, dtype=torch.float64)

    theirs = start.clone().requires_grad_()
    torchs = of_torch(optimizer, [theirs])
    ours, state = start.clone(), {name: torch.zeros_like(start) for name in optimizer.slots}
    for t in range(200):
        lr = 0.1 / (1 + t / 20)
        torchs.param_groups[0]["lr"] = lr
        theirs.grad = curvature * theirs.detach() + noise[t]
        torchs.step()
        ours, state = optimizer.update(ours, curvature * ours + noise[t], state, lr, t, None)
    assert (ours - start).norm() > 1  # there was something to compare
    torch.testing.assert_close(ours, theirs.detach(), rtol=TOLERANCE, atol=TOLERANCE)


def steps(optimizer: Optimizer, x: Any, gradients: Any, noise: Any) -> Any:
    state = dict.fromkeys(optimizer.slots, x * 0)
    for t, lr in enumerate((0.3, 0.1, 0.07)):
        x, state = optimizer.update(x, gradients[t], state, lr, t, noise[t])
    return [x, *state.values()]


def vectors(n: int, dtype: Any = np.float32) -> tuple[Any, Any, Any]:
    random = np.random.default_rng(n)
    return random.standard_normal(n).astype(dtype), *(random.standard_normal((3, n)).astype(dtype) for _ in "gz")


@pytest.mark.parametrize("optimizer", EVERY, ids=repr)
def test_slices_are_updated_to_the_same_bits_as_the_whole(optimizer: Optimizer) -> None:
    x, gradients, noise = map(torch.from_numpy, vectors(1003))
    whole = torch.stack(steps(optimizer, x, gradients, noise))
    pieces = [torch.stack(steps(optimizer, x[lo:hi], gradients[:, lo:hi], noise[:, lo:hi])) for lo, hi in cut(1003, 7)]
    assert whole.dtype == torch.float32
    assert whole.isfinite().all()
    assert torch.cat(pieces, dim=1).numpy().tobytes() == whole.numpy().tobytes()


@pytest.mark.parametrize("optimizer", EVERY, ids=repr)
def test_threads_do_not_change_a_bit(optimizer: Optimizer) -> None:
    x, gradients, noise = map(torch.from_numpy, vectors(100_003))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(torch.stack(steps(optimizer, x, gradients, noise)).numpy().tobytes())
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("optimizer", EVERY, ids=repr)
def test_numpy_and_torch_agree(optimizer: Optimizer, dtype: Any) -> None:
    """The formula written once has one result: to the bit, but for torch's roots, which MKL may round to the other side."""
    x, gradients, noise = vectors(1003, dtype)
    ours = steps(optimizer, x, gradients, noise)
    theirs = [vector.numpy() for vector in steps(optimizer, *map(torch.from_numpy, (x, gradients, noise)))]
    assert all(vector.dtype == dtype for vector in ours)
    if isinstance(optimizer, (SGD, SGLD)):
        assert [vector.tobytes() for vector in ours] == [vector.tobytes() for vector in theirs]
    else:  # a root in each of three steps, whose changes are below 1
        np.testing.assert_allclose(theirs, ours, rtol=0, atol=3 * np.finfo(dtype).eps)


@pytest.mark.parametrize("optimizer", EVERY, ids=repr)
def test_the_number_of_devices_does_not_change_a_bit(optimizer: Optimizer) -> None:
    rate = lambda t: 0.01 / (1 + t)  # noqa: E731
    suite.check(lambda k: suite.fit("mlp_with_dropout", k, optimizer=optimizer, schedule=rate), (2, 3))


# Noise


def test_the_noise_of_sgld_enters_as_the_root_of_twice_rate_and_temperature() -> None:
    x, gradients, noise = vectors(1003, np.float64)
    for lr, temperature in ((0.1, 1.0), (0.3, 0.01), (1e-3, 0.0)):
        new, _ = sgld(temperature=temperature).update(x, gradients[0], {}, lr, 0, noise[0])
        assert new.tolist() == (x - gradients[0] * lr + noise[0] * sqrt(2 * lr * temperature)).tolist()
    assert new.tolist() == sgd().update(x, gradients[0], {}, 1e-3)[0].tolist()  # without temperature: plain descent
    assert [optimizer.noisy for optimizer in EVERY] == [False] * len(QUIET) + [True]


def test_sgld_on_a_quadratic_has_the_variance_of_its_discretised_chain() -> None:
    """f = a·x²/2 makes x ← (1 − ηa)·x + √(2ηT)·z, whose variance stays at v = (1 − ηa)²·v + 2ηT.

    So v = 2ηT / (1 − ρ²) with ρ = 1 − ηa; the limit η → 0 would be T/a. Of 1,000 chains of n steps each, the mean of x² has
    the standard error v·√(2 / (1000·n)·(1 + ρ²) / (1 − ρ²)): the squares of a chain have the correlations ρ²ᵏ.
    """
    a, lr, temperature, n = 2.0, 0.25, 0.3, 400
    rho = 1 - lr * a
    variance = 2 * lr * temperature / (1 - rho**2)
    error = variance * sqrt(2 / (1000 * n) * (1 + rho**2) / (1 - rho**2))
    x, total = np.zeros(1000), 0.0
    for t in range(-50, n):  # the 50 steps before the first that counts forget the start: ρ⁵⁰ < 1e-15
        x, _ = sgld(temperature=temperature).update(x, a * x, {}, lr, t, draws.normal(7, t + 50, 1000, "float64"))
        total += float(x @ x) if t >= 0 else 0.0
    assert abs(total / (1000 * n) - variance) < 4 * error
    assert abs(temperature / a - variance) > 50 * error  # precise enough to see the discretisation


def test_the_noise_of_a_step_is_standard_normal_and_follows_from_seed_and_step() -> None:
    z = draws.normal(0, 0, 100_000, "float64")
    assert abs(z.mean()) < 4 / sqrt(100_000)
    assert abs((z**2).mean() - 1) < 4 * sqrt(2 / 100_000)
    assert abs((z**4).mean() - 3) < 4 * sqrt(96 / 100_000)
    assert z.tolist() == draws.normal(0, 0, 100_000, "float64").tolist()
    assert draws.normal(0, 0, 100_000, "float32").tolist() == z.astype(np.float32).tolist()
    others = [draws.normal(seed, step, 100_000, "float64") for seed, step in ((0, 1), (1, 0), (1, 1))]
    for other in others:
        assert abs(np.corrcoef(z, other)[0, 1]) < 4 / sqrt(100_000)


def test_a_fit_with_sgld_adds_that_noise() -> None:
    """With the rate so small that the gradient's share is lost in rounding, the steps of the weights are the noise."""
    settings = {"optimizer": sgld(temperature=1e20), "schedule": 1e-20, "gradient_clip_val": 1e-3}
    moved, seeds = [], (0, 0, 1)
    for seed in seeds:
        run = suite.fit("embedding", 2, **settings, seed=seed)
        start = suite.zoo.embedding().embedding.weight.detach().numpy().astype(np.float64)
        moved.append(run.weights()["embedding.weight"] - start)
    size = sqrt(2)  # per step; 4 steps
    assert abs((moved[0] ** 2).mean() / (4 * size**2) - 1) < 4 * sqrt(2 / moved[0].size)
    assert (moved[0] == moved[1]).all()
    assert abs(np.corrcoef(moved[0].ravel(), moved[2].ravel())[0, 1]) < 4 / sqrt(moved[0].size)


# The values


RANGE = "must be finite and at least 0"


@pytest.mark.parametrize(
    ("make", "arguments", "kind", "message"),
    [
        (sgd, {"momentum": 1}, Invalid, "sgd: momentum must be below 1, got momentum=1.0"),
        (sgd, {"momentum": -0.1}, Invalid, f"sgd: momentum {RANGE}, got momentum=-0.1"),
        (sgd, {"momentum": float("nan")}, Invalid, f"sgd: momentum {RANGE}, got momentum=nan"),
        (sgd, {"momentum": "a"}, WrongType, "sgd: momentum must be a number, got momentum='a'"),
        (sgd, {"momentum": True}, WrongType, "sgd: momentum must be a number, got momentum=True"),
        (sgd, {"momentum": None}, WrongType, "sgd: momentum must be a number, got momentum=None"),
        (sgd, {"nesterov": True}, Invalid, "sgd: nesterov=True needs a momentum above 0, got momentum=0.0"),
        (sgd, {"momentum": 0.9, "nesterov": 1}, WrongType, "sgd: nesterov must be True or False, got nesterov=1"),
        (sgd, {"weight_decay": -1}, Invalid, f"sgd: weight_decay {RANGE}, got weight_decay=-1"),
        (sgd, {"weight_decay": np.inf}, Invalid, f"sgd: weight_decay {RANGE}, got weight_decay=inf"),
        (sgd, {"weight_decay": np.nan}, Invalid, f"sgd: weight_decay {RANGE}, got weight_decay=nan"),
        (sgd, {"weight_decay": "a"}, WrongType, "sgd: weight_decay must be a number, got weight_decay='a'"),
        (adagrad, {"eps": -1e-10}, Invalid, f"adagrad: eps {RANGE}, got eps=-1e-10"),
        (adagrad, {"eps": np.nan}, Invalid, f"adagrad: eps {RANGE}, got eps=nan"),
        (adagrad, {"eps": "a"}, WrongType, "adagrad: eps must be a number, got eps='a'"),
        (adam, {"beta1": 1.0}, Invalid, "adam: beta1 must be below 1, got beta1=1.0"),
        (adam, {"beta1": -0.1}, Invalid, f"adam: beta1 {RANGE}, got beta1=-0.1"),
        (adam, {"beta1": (0.9, 0.999)}, WrongType, "adam: beta1 must be a number, got beta1=(0.9, 0.999)"),
        (adam, {"beta2": 1}, Invalid, "adam: beta2 must be below 1, got beta2=1.0"),
        (adam, {"beta2": True}, WrongType, "adam: beta2 must be a number, got beta2=True"),
        (adam, {"eps": np.inf}, Invalid, f"adam: eps {RANGE}, got eps=inf"),
        (adam, {"weight_decay": -0.5}, Invalid, f"adam: weight_decay {RANGE}, got weight_decay=-0.5"),
        (adamw, {"beta1": 2}, Invalid, "adamw: beta1 must be below 1, got beta1=2.0"),
        (adamw, {"beta2": np.nan}, Invalid, f"adamw: beta2 {RANGE}, got beta2=nan"),
        (adamw, {"eps": None}, WrongType, "adamw: eps must be a number, got eps=None"),
        (adamw, {"weight_decay": "a"}, WrongType, "adamw: weight_decay must be a number, got weight_decay='a'"),
        (adam, {"lr": -1}, Invalid, f"adam: lr {RANGE}, got lr=-1.0"),
        (sgd, {"lr": True}, WrongType, "sgd: lr must be a number, got lr=True"),
        (adamw, {"lr": "cosin(1, 2)"}, Invalid, "schedule: no schedule is called 'cosin'; did you mean cosine?"),
        (sgld, {"temperature": -1}, Invalid, f"sgld: temperature {RANGE}, got temperature=-1"),
        (sgld, {"temperature": np.inf}, Invalid, f"sgld: temperature {RANGE}, got temperature=inf"),
        (sgld, {"temperature": "hot"}, WrongType, "sgld: temperature must be a number, got temperature='hot'"),
    ],
)
def test_bad_arguments_are_refused(make: Any, arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as error:
        make(**arguments)
    assert type(error.value) is kind
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("optimizer", "same", "other", "field", "text"),
    [
        (sgd(momentum=0.9, nesterov=True, weight_decay=1),
         sgd(weight_decay=1.0, momentum=0.9, nesterov=True), sgd(momentum=0.9), "momentum",
         "SGD(momentum=0.9, nesterov=True, weight_decay=1.0)"),
        (adagrad(eps=1), adagrad(eps=1.0), adagrad(), "eps", "AdaGrad(eps=1.0)"),
        (adam(beta1=0, beta2=np.float64(0.5)), adam(beta1=0.0, beta2=0.5), adam(), "beta2",
         "Adam(beta1=0.0, beta2=0.5, eps=1e-08, weight_decay=0.0, decoupled=False)"),
        (adamw(weight_decay=0), adamw(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0), adam(), "decoupled",
         "Adam(beta1=0.9, beta2=0.999, eps=1e-08, weight_decay=0.0, decoupled=True)"),
        (sgld(temperature=2), sgld(temperature=2.0), sgld(), "temperature", "SGLD(temperature=2.0)"),
    ],
    ids=["sgd", "adagrad", "adam", "adamw", "sgld"],
)  # fmt: skip
def test_an_optimizer_is_a_value(optimizer: Any, same: Any, other: Any, field: str, text: str) -> None:
    assert repr(optimizer) == text
    assert optimizer == same != other
    assert {optimizer: "found"}[same] == "found"
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(optimizer, field, 0.5)


def test_the_defaults_are_those_of_torch() -> None:
    parameters = [torch.zeros(1, requires_grad=True)]
    assert adagrad().eps == torch.optim.Adagrad(parameters).defaults["eps"]
    for ours, theirs in ((adam(), torch.optim.Adam(parameters)), (adamw(), torch.optim.AdamW(parameters))):
        assert (ours.beta1, ours.beta2) == theirs.defaults["betas"]
        assert (ours.eps, ours.weight_decay) == (theirs.defaults["eps"], theirs.defaults["weight_decay"])
    assert sgld() == SGLD(1.0)


def test_the_defaults_of_the_classes_are_those_of_the_functions() -> None:
    """For those who derive an optimizer of their own."""
    assert (SGD(), AdaGrad(), Adam(), SGLD()) == (sgd(), adagrad(), adam(), sgld())
    assert [inspect.signature(kind.update).parameters["t"].default for kind in (Optimizer, SGD, SGLD)] == [0, 0, 0]


def test_the_default_is_plain_descent() -> None:
    assert repr(sgd()) == "SGD(momentum=0.0, nesterov=False, weight_decay=0.0)"
    assert sgd().slots == ()
    assert sgd(momentum=0.1).slots == ("velocity",)


def test_an_update_of_ones_own_is_what_is_made() -> None:
    """Also of a class derived from one of samestep's, for which the Trainer has quicker ways."""
    from samestep import Trainer

    class Backwards(SGD):
        def update(self, x, g, state, lr, t=0, z=None):  # type: ignore[no-untyped-def]
            return x + g * lr, state

    def weights(optimizer: SGD, shards: int) -> list[float]:
        torch.manual_seed(0)
        x = torch.eye(4).numpy()
        trainer = Trainer(1, 4, shards=shards, optimizer=optimizer, schedule=0.5, progress=False)
        run = trainer.fit(torch.nn.Linear(4, 2, bias=False), (x, np.array([0, 1, 0, 1])))
        found: list[float] = run.weights()["weight"].ravel().tolist()
        return found

    torch.manual_seed(0)
    start = torch.nn.Linear(4, 2, bias=False).weight.detach().ravel().tolist()
    for shards in (1, 2):
        there, back = weights(SGD(), shards), weights(Backwards(), shards)
        assert there != start
        np.testing.assert_allclose(np.array(back) - start, np.array(start) - there, rtol=1e-5, atol=1e-7)


# The rate that is given with an optimizer


@pytest.mark.parametrize(
    ("make", "default"), [(sgd, 0.1), (adam, 0.001), (adamw, 0.001), (adagrad, 0.01), (sgld, 0.01)]
)
def test_each_optimizer_has_a_rate_of_its_own(make: Any, default: float) -> None:
    from samestep import Trainer

    data = np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1])

    def recipe(**settings: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        run = Trainer(1, 4, progress=False, devices="cpu", **settings).fit(torch.nn.Linear(4, 2), data)
        assert run.history[0]["lr"] == float(run.recipe["schedule"][len("constant(") : -1])
        return run.recipe | {"result": run.fingerprint}

    assert recipe(optimizer=make())["schedule"] == f"constant({default})"
    assert recipe(optimizer=make()) == recipe(optimizer=make(lr=default))
    # wherever it is written, it stands in one place of the recipe
    given = [
        recipe(optimizer=make(lr=0.05)),
        recipe(optimizer=make(), lr=0.05),
        recipe(optimizer=make(), schedule=0.05),
    ]
    assert given[0] == given[1] == given[2] != recipe(optimizer=make())
    assert given[0]["schedule"] == "constant(0.05)"
    assert given[0]["optimizer"] == repr(make())


def test_the_rate_of_adam_and_adagrad_is_that_of_torch_and_keras() -> None:
    parameters = [torch.zeros(1, requires_grad=True)]
    for ours, theirs in ((adam(), torch.optim.Adam), (adamw(), torch.optim.AdamW), (adagrad(), torch.optim.Adagrad)):
        assert ours.default_lr == theirs(parameters).defaults["lr"]


def test_a_rate_is_shown_if_it_was_given() -> None:
    given = adam(lr=1e-3)
    assert (
        repr(given) == "Adam(lr=constant(0.001), beta1=0.9, beta2=0.999, eps=1e-08, weight_decay=0.0, decoupled=False)"
    )
    assert (
        given == adam(lr="constant(0.001)") == adam(1e-3) != adam()
    )  # the first argument, as in torch, optax and Keras
    with pytest.raises(TypeError, match="positional"):
        adam(1e-3, 0.9)  # type: ignore[misc]
    assert (
        repr(sgd(momentum=0.9, lr=cosine(0.3, 20)))
        == "SGD(lr=cosine(0.3, 20), momentum=0.9, nesterov=False, weight_decay=0.0)"
    )


def test_an_optimizer_of_ones_own_needs_no_rate() -> None:
    class Sign(Optimizer):
        def update(self, x, g, state, lr, t=0, z=None):  # type: ignore[no-untyped-def]
            return x - g.sign() * lr, state

    from samestep import Trainer

    torch.manual_seed(0)
    trainer = Trainer(1, 4, optimizer=Sign(), progress=False, devices="cpu")
    run = trainer.fit(torch.nn.Linear(4, 2), (np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1])))
    assert (run.recipe["schedule"], run.history[0]["lr"]) == ("constant(0.1)", 0.1)
