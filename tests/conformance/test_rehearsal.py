"""A fit finds hidden state before its first update, and what appears later by spot checks; and it raises no false alarms.

Each row of a zoo's `unruly` breaks the rules in one way. The twins show what happens without the checks.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

import samestep as ss
from conformance.suite import data, same, zoo
from samestep.errors import NotRepeatable, SamestepError

UNCHECKED = {"rehearse": False, "check_every": None}


class Counter:
    """1 for so many calls, and then more with each."""

    def __init__(self, after: int = 0) -> None:
        self.after, self.calls = after, itertools.count(1)

    def __call__(self) -> float:
        return 1 + max(0, next(self.calls) - self.after) / 64

    def __deepcopy__(self, memo: object) -> Counter:
        return self  # all copies of a model count together, as a global would


class Seeded(random.Random):
    def __deepcopy__(self, memo: object) -> Seeded:
        return self


def unruly():
    return zoo.unruly(Counter(), Seeded(0))


def fit(model, devices=1, **settings) -> ss.Run:
    """On the CPU: a GPU computes in turn, and replays what was recorded, so that much of this cannot happen there."""
    numbers = np.random.default_rng(0)
    examples = numbers.normal(size=(32, 6)).astype("float32"), numbers.integers(0, 3, 32)
    given = {"max_epochs": 2, "batch_size": 16, "shards": 4, "devices": ["cpu"] * devices, "progress": False} | settings
    return ss.Trainer(**given).fit(model, examples)


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("name", unruly())
def test_what_breaks_the_rules_is_named(name: str, devices: int) -> None:
    make, settings, said, _ = unruly()[name]
    with pytest.raises(SamestepError, match=said) as raised:
        fit(make(), devices, **settings)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", [name for name, row in unruly().items() if row[3]])
def test_without_the_checks_nobody_notices(name: str) -> None:
    """The twin: other bits on other numbers of devices, or weights that never move."""
    make, settings, _, then = unruly()[name]
    one, three = (fit(make(), devices, **settings, **UNCHECKED) for devices in (1, 3))
    still = one.recipe["initial"] in (one.fingerprint, three.fingerprint)
    assert {"differs": one.fingerprint != three.fingerprint, "stays": still, "moves": not still}[then]


def test_what_appears_late_is_found_by_a_spot_check() -> None:
    model = zoo.late(Counter(after=60))
    with pytest.raises(
        NotRepeatable,
        match=r"shard \d was computed twice at step [1-9]\d*, on \S+ and on \S+: (the loss|its result) is",
    ):
        fit(model, max_epochs=50, check_every=1)


def test_what_appears_late_is_not_found_without() -> None:
    # two counts, as it would be left to chance whether the calls of three devices come in another order than those of one
    runs = [fit(zoo.late(Counter(after)), n, max_epochs=12, check_every=None) for n, after in ((1, 60), (3, 80))]
    assert runs[0].fingerprint != runs[1].fingerprint


def test_a_device_that_computes_wrongly_is_named(monkeypatch) -> None:
    """One bit of one shard, on one of two devices, from some moment on."""
    gradient, seen = zoo.Replica.gradient, []

    def wrong(self, x, y, key, shard):
        if self not in seen:
            seen.append(self)
        vector = gradient(self, x, y, key, shard)
        broken = len(seen) > 1 and self is seen[1] and calls() > 3
        return vector * 1.0000001 if broken else vector

    calls = Counter(after=30)
    monkeypatch.setattr(zoo.Replica, "gradient", wrong)
    with pytest.raises(
        NotRepeatable, match=r"shard \d was computed twice at step \d+, on \S+ and on \S+: .* is not the same"
    ):
        fit(zoo.late(lambda: 1.0), 2, max_epochs=200, check_every=1)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_checks_leave_no_trace(devices: int, tmp_path: Path) -> None:
    """With them and without, the bits are the same; and a run may be resumed with the rehearsal it began with only."""
    model = "mlp_with_dropout"
    with_checks, without = (
        ss.Trainer(max_epochs=2, batch_size=49, devices=devices, progress=False, **settings).fit(
            getattr(zoo, model)(), data(model, 97)
        )
        for settings in ({"check_every": 1}, UNCHECKED)
    )
    same(with_checks, without)
    assert "rehearse" not in with_checks.recipe
    assert without.recipe["rehearse"] is False


def test_without_determinism_there_is_nothing_to_compare() -> None:
    fit(unruly()["a counter"][0](), deterministic=False)


def test_examples_that_are_others_when_read_again_are_named() -> None:
    numbers = np.random.default_rng(0)

    class Changing:
        def __len__(self) -> int:
            return 64  # of which the first look at the data takes 32

        def __getitem__(self, indices):
            x = np.ones((len(indices), 6), "float32")
            x[indices == 21] += numbers.random()
            return x, indices % 3

    trainer = ss.Trainer(max_epochs=1, batch_size=64, shards=4, progress=False)
    with pytest.raises(NotRepeatable, match="example 21 of train is not the same; a source must give the same example"):
        trainer.fit(zoo.late(lambda: 1.0), Changing())
    unchecked = ss.Trainer(max_epochs=1, batch_size=64, shards=4, progress=False, **UNCHECKED)
    runs = [unchecked.fit(zoo.late(lambda: 1.0), Changing()) for _ in range(2)]
    assert runs[0].fingerprint != runs[1].fingerprint


def test_check_every_is_checked() -> None:
    for wrong in ("10 s", "never", 0, 1.5):
        with pytest.raises(SamestepError, match="check_every must be"):
            ss.Trainer(check_every=wrong)
