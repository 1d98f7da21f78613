"""The recipe knows all that decides the bits: code, content and numerics. A resume under another one is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import samestep as ss
from conformance.suite import BACKEND, same, zoo
from samestep.errors import Invalid

CHANGES = zoo.changes()
OTHER_PROCESS = """
import json, sys
sys.path[:0] = {path!r}
from conformance.test_recipe import fit
from conformance.suite import zoo
zoo.mlp_with_dropout()  # names that count what a process has made go on counting
print(json.dumps(fit(None, 1).recipe))
"""


def fit(folder: Path | None, epochs: int, **given) -> ss.Run:
    random = np.random.default_rng(0)
    data = random.random((24, 1, 28, 28), dtype=np.float32), random.integers(0, 10, 24)
    model = given.pop("model", zoo.small)()
    schedule = given.get("schedule")
    if callable(schedule) and not schedule.__code__.co_argcount:
        given["schedule"] = schedule()  # a scheduler of the framework, made anew as a script would
    settings = {"max_epochs": epochs, "batch_size": 12, "shards": 2, "devices": 1, "progress": False, "run_dir": folder}
    return ss.Trainer(**settings | given).fit(model, data)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_stop_and_resume_is_refused_and_can_be_accepted(name: str, tmp_path: Path) -> None:
    before, after, named = CHANGES[name]
    fit(tmp_path / "a", 1, **before)
    with pytest.raises(Invalid) as refused:
        fit(tmp_path / "a", 2, **after)
    assert re.search(re.escape(named) + r"( 2)? (is|has other code or content)", str(refused.value))
    assert "accept='code'" in str(refused.value)
    if name != "a frozen layer":  # whose optimizer has other vectors
        run = fit(tmp_path / "a", 2, accept="code", **after)
        (accepted,) = run.recipe["accepted"]
        assert accepted["step"] == 2
        assert any(name.removeprefix("code.").startswith(named) for name in accepted)
        assert ss.Run.load(tmp_path / "a").recipe["accepted"] == [accepted]
        fit(tmp_path / "a", 3, **after)  # from here on it is a run of that recipe


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_not_changed_goes_on(name: str, tmp_path: Path) -> None:
    """The twin: made again, everything is as it was; also with more epochs."""
    before, _, _ = CHANGES[name]
    fit(tmp_path, 1, **before)
    resumed = fit(tmp_path, 2, **before)
    assert resumed.resumed == 2
    assert "accepted" not in resumed.recipe
    same(resumed, fit(None, 2, **before))


@pytest.mark.parametrize("name", zoo.settings())
def test_a_setting_of_the_framework_is_in_the_recipe_or_has_no_way_in(name: str) -> None:
    usual = fit(None, 1)
    change, put_back = zoo.settings()[name]
    change()
    try:
        other = fit(None, 1)
    finally:
        put_back()
    if other.recipe["numerics"] == usual.recipe["numerics"]:
        same(usual, other)
    assert fit(None, 1).recipe == usual.recipe  # it was put back


def test_another_process_has_the_same_recipe() -> None:
    code = OTHER_PROCESS.format(path=[str(Path(__file__).parents[1])])
    seen = [
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed, "SAMESTEP_TEST_BACKEND": BACKEND},
            capture_output=True, text=True, check=True,
        ).stdout.splitlines()[-1]
        for seed in ("1", "2")
    ]  # fmt: skip
    assert json.loads(seen[0]) == json.loads(seen[1]) == json.loads(json.dumps(fit(None, 1).recipe))


def test_what_cannot_be_looked_into_is_named(tmp_path: Path) -> None:
    with open(os.devnull) as file:

        def schedule(t: int) -> float:
            return 0.1 + 0 * file.fileno()

        run = fit(tmp_path, 1, schedule=schedule)
        (name,) = run.recipe["unchecked"]
        assert "schedule(), file: " in name
        with pytest.warns(UserWarning, match="resumed without checking whether these have changed: .*schedule.*file"):
            fit(tmp_path, 2, schedule=schedule)
