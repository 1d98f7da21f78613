"""What a Group says about bad input, in one line each. That its steps are those of a fit: conformance/test_own_loop.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import samestep as ss
from samestep.errors import Invalid, SamestepError, WrongType
from samestep.runs import checkpoint

X, Y = np.random.default_rng(0).random((16, 4)).astype("float32"), np.arange(16) % 3


def group(**settings: Any) -> ss.Group:
    return ss.Group(torch.nn.Linear(4, 3), shards=4, devices=["cpu"] * 3, **settings)


def stepped(**settings: Any) -> ss.Group:
    made = group(**settings)
    made.step(X, Y)
    return made


@pytest.mark.parametrize(
    ("ask", "error", "said"),
    [
        (lambda: group(max_epochs=3), Invalid, "Group has no max_epochs: it takes batch_size, capture, "),
        (lambda: group().save("x"), Invalid, "save: the group has not made a step yet"),
        (
            lambda: group().step(X),
            WrongType,
            "a Group needs x and y, or one dictionary with the labels in it, got ndarray",
        ),
        (lambda: group().step(X, Y[:3]), Invalid, "x and y must be of one length, got 16 examples and 3 labels"),
        (lambda: group().step(X[:0], Y[:0]), Invalid, "there are no examples"),
        (
            lambda: group(loss=lambda o, y: o.sum()).step(X[:1], Y[:1]),
            Invalid,
            "^the first batch of a Group must have two examples or more, got 1: whether its loss is a mean or a sum is seen",
        ),
        (lambda: stepped().step(X.astype("f2"), Y), WrongType, "x is float16 and the model float32: convert one"),
        (
            lambda: stepped().step(X, Y / 2),
            WrongType,
            "the default loss, softmax cross-entropy, needs a tensor of scores",
        ),
        (
            lambda: stepped().step({"input": X, "labels": Y}),
            Invalid,
            r"^a batch must have the structure of the first one, x of float32 \(4,\), y of int64 \(\), "
            r"got \['input'\] of float32 \(4,\), \['labels'\] of int64 \(\)$",
        ),
        (lambda: group().step(X, Y, lr="fast"), WrongType, "lr must be a number, got lr='fast'"),
        (lambda: group().step(X, Y, lr=-1), Invalid, "lr must be finite and at least 0, got lr=-1.0"),
        (lambda: setattr(group(), "lr", "fast"), WrongType, "^lr must be a number, got lr='fast'$"),
        (lambda: setattr(group(), "lr", True), WrongType, "^lr must be a number, got lr=True$"),
        (lambda: setattr(group(), "lr", -0.5), Invalid, "^lr must be finite and at least 0, got lr=-0.5$"),
        (lambda: setattr(group(), "lr", np.nan), Invalid, "^lr must be finite and at least 0, got lr=nan$"),
        (
            lambda: group(metrics={"m": lambda o, y: o.mean()}).step(X, Y),
            WrongType,
            "metric 'm' must return .sum, weight",
        ),
        (
            lambda: group(loss=lambda o, y: (o.T @ o).logsumexp(0).mean()).step(X, Y),
            Invalid,
            "the loss couples examples",
        ),
    ],
)
def test_bad_input(ask: Callable[[], Any], error: type[SamestepError], said: str) -> None:
    with pytest.raises(error, match=said) as raised:
        ask()
    assert "\n" not in str(raised.value)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    made, path = group(), tmp_path / "group.safetensors"
    made.step(X, Y)
    made.save(path)
    with pytest.raises(Invalid, match=r"nowhere/a cannot be written: No such file"):
        made.save(tmp_path / "nowhere" / "a")
    with pytest.raises(Invalid, match="^None cannot be written: "):
        made.save(None)  # type: ignore[arg-type]
    return path


def test_a_group_has_weights_before_its_first_step(saved: Path, tmp_path: Path) -> None:
    linear = torch.nn.Linear(4, 3)
    fresh = ss.Group(linear, shards=4, devices=2)
    assert np.array_equal(fresh.weights()["bias"], linear.bias.detach().numpy())
    assert torch.equal(fresh.model.weight, linear.weight)
    assert fresh.model is not linear
    loaded = ss.Group.load(saved, linear, devices=2)
    assert not np.array_equal(loaded.weights()["bias"], fresh.weights()["bias"])
    loaded.save(tmp_path / "again")
    before, after = checkpoint.read(saved), checkpoint.read(tmp_path / "again")
    assert before.about == after.about
    assert {name: array.tobytes() for name, array in before.tensors.items()} == {
        name: array.tobytes() for name, array in after.tensors.items()
    }
    prints = loaded.fingerprint
    loaded.evaluate(X, Y)
    assert (loaded.fingerprint, loaded.steps) == (prints, 1)
    with pytest.raises(Invalid, match="another model was saved"):
        ss.Group.load(saved, torch.nn.Linear(4, 2)).weights()


def test_batches_of_other_lengths_are_of_one_structure() -> None:
    linear, rng = torch.nn.Linear(4, 3), np.random.default_rng(0)
    made = ss.Group(linear, shards=2, devices=1)
    for length in (5, 2, 7):
        x, y = rng.random((6, length, 4)).astype("float32"), rng.integers(0, 3, (6, length))
        scores = linear(torch.from_numpy(x)).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(scores, torch.from_numpy(y).flatten()).item()
        assert abs(made.step(x, y, lr=0.0).loss - loss) < 1e-6


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"seed": 3}, "was saved with seed=0, and not with 3"),
        ({"shards": 5}, "was saved with shards=4, and not with 5"),
        ({"optimizer": ss.adam()}, "was saved with optimizer=.'SGD', .*, and not with .'Adam', "),
        (
            {"optimizer": torch.optim.SGD},
            "was saved with optimizer=.'SGD', .*, and not with the framework's own: give the",
        ),
    ],
)
def test_what_was_saved_with_other_settings(settings: dict[str, Any], said: str, saved: Path) -> None:
    with pytest.raises(Invalid, match=said):
        ss.Group.load(saved, torch.nn.Linear(4, 3), **settings)


def test_what_was_saved_from_another_model(saved: Path) -> None:
    told = r"another model was saved: its 'weight' had shape .3, 4., and has .2, 4. here"
    with pytest.raises(Invalid, match=told):
        ss.Group.load(saved, torch.nn.Linear(4, 2)).step(X, Y % 2)
    told = "another model was saved: its 'bias' had shape .3,., and has None here"
    with pytest.raises(Invalid, match=told):
        ss.Group.load(saved, torch.nn.Linear(4, 3, bias=False)).step(X, Y)
    assert ss.Group.load(saved, torch.nn.Linear(4, 3)).step(X, Y).step == 2


def test_what_is_not_of_a_group(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="cannot be read: No such file"):
        ss.Group.load(tmp_path / "none", torch.nn.Linear(4, 3))
    (tmp_path / "text").write_text("hello")
    with pytest.raises(Invalid, match="is damaged, or not a checkpoint"):
        ss.Group.load(tmp_path / "text", torch.nn.Linear(4, 3))
    ss.Trainer(1, 8, devices=1, progress=False, run_dir=tmp_path / "run").fit(torch.nn.Linear(4, 3), (X, Y))
    [path] = (tmp_path / "run" / "checkpoints").iterdir()
    with pytest.raises(Invalid, match="was written by a fit: start from its weights with Trainer.fit"):
        ss.Group.load(path, torch.nn.Linear(4, 3))


# The rate


def steps_of(made: ss.Group, rates: list[Any]) -> list[str]:
    return [made.step(X, Y, **({} if lr is None else {"lr": lr})).fingerprint for lr in rates]


def rated(**settings: Any) -> ss.Group:
    torch.manual_seed(0)
    return group(**settings)


@pytest.mark.parametrize(
    ("optimizer", "rates"),
    [
        (ss.adam(), [0.001] * 4),
        (ss.adam(lr=0.02), [0.02] * 4),
        (ss.sgd(lr=ss.poly(0.4, 4)), [0.4, 0.3, 0.2, 0.1]),
        (ss.sgd(lr="poly(0.4, 2).in_epochs(2)"), [0.4, 0.4, 0.2, 0.2]),
        (ss.sgd(lr=lambda t: 0.4 / (1 + t)), [0.4 / (1 + t) for t in range(4)]),
    ],
)
def test_a_group_follows_the_rate_of_its_optimizer(optimizer: Any, rates: list[float]) -> None:
    plain = ss.adam() if "Adam" in repr(optimizer) else ss.sgd()
    assert steps_of(rated(optimizer=optimizer), [None] * 4) == steps_of(rated(optimizer=plain), rates)
    told = steps_of(rated(optimizer=optimizer), [0.5] * 4)  # that of the step counts more
    assert told == steps_of(rated(optimizer=plain), [0.5] * 4) != steps_of(rated(optimizer=plain), rates)


def test_a_group_that_was_loaded_goes_on_with_its_rate(tmp_path: Path) -> None:
    optimizer, path = ss.sgd(momentum=0.9, lr=ss.poly(0.4, 4)), tmp_path / "group"
    whole = steps_of(rated(optimizer=optimizer), [None] * 4)
    half = rated(optimizer=optimizer)
    steps_of(half, [None] * 2)
    half.save(path)
    loaded = ss.Group.load(path, torch.nn.Linear(4, 3), devices="cpu")
    assert steps_of(loaded, [None] * 2) == whole[2:]
    other = ss.Group.load(path, torch.nn.Linear(4, 3), devices="cpu", optimizer=ss.sgd(momentum=0.9))
    assert steps_of(other, [None] * 2) != whole[2:]  # another one may be given


def test_a_file_of_a_group_without_a_rate_is_read(tmp_path: Path) -> None:
    """As those that were written before optimizers had one."""
    made, path = rated(optimizer=ss.adam()), tmp_path / "group"
    made.step(X, Y)
    made.save(path)
    found = checkpoint.read(path)
    assert found.about.pop("lr") is None
    assert "lr" not in found.about["optimizer"][1]
    checkpoint.write(path, checkpoint.pack(found.about, found.tensors))
    again = steps_of(ss.Group.load(path, torch.nn.Linear(4, 3), devices="cpu"), [None])
    assert again == steps_of(made, [None])


def test_a_function_as_the_rate_is_given_again(tmp_path: Path) -> None:
    made, path = rated(optimizer=ss.sgd(lr=lambda t: 0.1)), tmp_path / "group"
    made.step(X, Y)
    made.save(path)
    with pytest.raises(Invalid, match="was saved with a function as the rate: give the optimizer and its lr again$"):
        ss.Group.load(path, torch.nn.Linear(4, 3))
    assert ss.Group.load(path, torch.nn.Linear(4, 3), optimizer=ss.sgd(lr=lambda t: 0.1)).steps == 1


@pytest.mark.parametrize("lr", [ss.Plateau(0.1), ss.cosine(0.1, 3).in_epochs()], ids=repr)
def test_a_rate_that_needs_epochs_is_refused(lr: Any) -> None:
    with pytest.raises(Invalid) as caught:
        group(optimizer=ss.sgd(lr=lr))
    said = str(caught.value)
    assert said.startswith("a Group has no epochs and no schedulers, got the rate ")
    assert said.endswith(": give a schedule in steps, such as .in_epochs(steps_per_epoch), or lr to every step")


def test_the_rate_of_the_next_step(tmp_path: Path) -> None:
    made = group(optimizer=ss.sgd(lr=ss.poly(0.4, 4)))
    for _ in range(2):
        made.step(X, Y)
    assert (made.lr, made.rates) == (0.4 * 0.5, [0.4, 0.4 * 0.75])
    made.lr = np.float32(0.25)  # type: ignore[assignment]
    made.step(X, Y)
    made.step(X, Y, lr=0.5)
    assert (made.lr, made.rates[2:]) == (0.25, [0.25, 0.5])
    made.save(path := tmp_path / "group")
    loaded = ss.Group.load(path, torch.nn.Linear(4, 3), devices=2)
    assert (loaded.lr, loaded.rates) == (0.25, made.rates)
    made.lr = loaded.lr = None
    assert made.lr == loaded.lr == 0.0  # the end of the schedule
    assert group().lr == 0.1
    assert group(optimizer=ss.adam()).lr == 0.001
    assert group(optimizer=lambda p: torch.optim.Adam(p, lr=0.3)).lr == 0.3
    with pytest.raises(Invalid, match="a learning rate of 1e.39 is too large for float32"):
        made.lr = 1e39
        made.step(X, Y)
    assert len(made.rates) == made.steps == 4


def test_rates_are_kept_by_their_changes_and_an_older_file_has_none(tmp_path: Path) -> None:
    made, path = group(), tmp_path / "group"
    made.lr = 0.5
    for lr in (None, None, 0.25, None, None):
        made.step(X, Y, lr=lr)
    assert made.rates == [0.5, 0.5, 0.25, 0.5, 0.5]
    made.save(path)
    kept = checkpoint.read(path)
    assert kept.tensors["rates:from"].tolist() == [0, 2, 3]
    assert kept.tensors["rates:lr"].tolist() == [0.5, 0.25, 0.5]
    tensors = {name: array for name, array in kept.tensors.items() if not name.startswith("rates:")}
    about = {name: value for name, value in kept.about.items() if name != "by_hand"}
    checkpoint.write(path, checkpoint.pack(about, tensors))
    older = ss.Group.load(path, torch.nn.Linear(4, 3), devices=1)
    assert (older.lr, older.rates) == (0.1, [None] * 5)
    older.step(X, Y)
    assert older.rates == [None] * 5 + [0.1]
