"""folder: which run folder is gone on with, which is refused and in which words; nothing is lost. No framework is needed."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samestep.errors import Invalid
from samestep.fingerprint import of_weights
from samestep.runs import checkpoint
from samestep.runs.checkpoint import paths
from samestep.runs.folder import RunFolder

RECIPE = {
    "max_epochs": 1,
    "seed": 0,
    "portable": False,
    "initial": "00",
    "loss": "mse",
    "numerics": {"cpu": {"isa": "avx2"}},
}
WEIGHTS = {"w": np.arange(3.0)}
LAST = 4
END = "): choose another run_dir, or delete it"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)


def opened(path: Path, last: int = LAST, resume: Any = "auto", accept: Iterable[str] = (), **recipe: Any) -> RunFolder:
    return RunFolder(path, RECIPE | recipe, resume, 9, last, accept)


def save(made: RunFolder, prints: list[int], **about: Any) -> None:
    """A checkpoint after so many steps as there are fingerprints."""
    given = {"step": len(prints), "recipe": RECIPE, "history": [], "metric": None} | about
    made.save(given, {"model:w": WEIGHTS["w"], "log:fingerprints": np.array(prints, np.uint64)})
    made.writer.flush()


def steps(made: RunFolder, first: int, prints: list[int]) -> None:
    made({"event": "steps", "first": first, "fingerprint": [f"{one:016x}" for one in prints]})


def train(path: Path, last: int = LAST, ended: bool = True, **recipe: Any) -> Path:
    """A run with a checkpoint after each of the last two of its steps."""
    made = opened(path, last, **recipe)
    made({"event": "start", "devices": ["cpu"]})
    for number in range(last):
        steps(made, number, [number + 1])
        if number + 2 >= last:
            save(made, list(range(1, number + 2)), recipe=RECIPE | recipe)
    if ended:
        made.weights(WEIGHTS)
        made({"event": "end", "fingerprint": of_weights(WEIGHTS)})
    made.close(False)
    return path


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("kept") / "run")


@pytest.fixture
def path(kept: Path, tmp_path: Path) -> Path:
    """The folder of a run that has ended, with checkpoints after steps 3 and 4."""
    shutil.copytree(kept, tmp_path / "run")
    return tmp_path / "run"


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def refusal(path: Path, *given: Any, **settings: Any) -> str:
    """Why a folder is refused, which stays as it was."""
    before = contents(path)
    with pytest.raises(Invalid) as caught:
        opened(path, *given, **settings)
    assert contents(path) == before
    return str(caught.value)


def gone_on(path: Path, *given: Any, **settings: Any) -> tuple[int | None, list[str]]:
    """The step from which it goes on, and what is told."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made = opened(path, *given, **settings)
    made.close(False)
    return made.checkpoint and made.checkpoint.step, [str(one.message) for one in told]


def write(path: Path, about: dict[str, Any], **tensors: Any) -> Path:
    """Change the newest checkpoint, in a way that its hash does not tell."""
    file = paths(path)[-1]
    found = checkpoint.read(file)
    checkpoint.write(file, checkpoint.pack(found.about | about, found.tensors | tensors))
    return file


# Which recipes


def test_another_recipe_is_refused_with_what_can_be_accepted(path: Path) -> None:
    start, accept = (
        f"{path} holds a run of another recipe (",
        ", or go on nevertheless with accept={0!r} (--accept {0})",
    )
    cpu = {"numerics": {"cpu": {"isa": "sse"}}}
    remember, portable = (
        ", which the run will remember",
        "; runs with portable=True (--portable) keep their bits on every CPU",
    )
    told = f"{start}numerics.cpu.isa is 'sse', was 'avx2'"
    numerics = accept.format("numerics") + remember + portable
    assert refusal(path, **cpu) == told + END + numerics
    assert refusal(path, **cpu, accept=["code", "data"]) == told + END + numerics
    both = f"{start}loss is 'mae', was 'mse'; numerics.cpu.isa is 'sse', was 'avx2'{END}"
    assert refusal(path, loss="mae", **cpu) == both + accept.format("code,numerics") + remember + portable
    assert refusal(path, loss="mae") == f"{start}loss is 'mae', was 'mse'{END}{accept.format('code')}{remember}"
    assert refusal(path, seed=1, **cpu) == f"{start}seed is 1, was 0; numerics.cpu.isa is 'sse', was 'avx2'{END}"
    other = refusal(path, initial="01")
    assert (
        other
        == f"{start}initial is '01', was '00'{END}; the model starts from other weights: seed it before it is made"
    )


def test_a_portable_run_on_another_cpu_is_not_told_to_be_portable(tmp_path: Path) -> None:
    train(tmp_path / "run", portable=True)
    text = refusal(tmp_path / "run", portable=True, numerics={"cpu": {"isa": "sse"}})
    assert text.endswith("accept='numerics' (--accept numerics), which the run will remember")


def test_what_was_accepted_is_remembered(path: Path) -> None:
    first = {"step": LAST, "numerics.cpu.isa": "numerics.cpu.isa is 'sse', was 'avx2'"}
    second = {"step": LAST, "loss": "loss is 'mae', was 'mse'"}
    sse: dict[str, Any] = {"numerics": {"cpu": {"isa": "sse"}}}
    given: list[tuple[dict[str, Any], list[str], Any]] = [
        ({}, ["code"], None), (sse, ["numerics"], [first]), (sse, [], [first]),
        (sse | {"loss": "mae"}, ["code", "data"], [first, second]),
    ]  # fmt: skip
    for changes, accept, accepted in given:
        recipe = RECIPE | changes
        made = RunFolder(path, recipe, "auto", 9, LAST, accept)
        assert recipe.get("accepted") == accepted
        assert made.checkpoint is not None
        save(made, [1, 2, 3, 4], recipe=made.checkpoint.about["recipe"])
        made.close(False)


# Which folders


def test_a_folder_is_for_one_run_at_a_time(path: Path) -> None:
    made = opened(path)
    assert refusal(path) == f"another run is going on in {path}: choose another run_dir, or wait"
    made.close(False)
    assert gone_on(path) == (LAST, [])


@pytest.mark.parametrize("missing", ["recipe.json", "checkpoints"])
def test_never_gone_on_with(missing: str, path: Path) -> None:
    (path / missing).rename(path.parent / "away")
    assert refusal(path, resume=False) == f"run folder {path} already holds a run: choose another, or delete it"


def test_what_cannot_be_gone_on_with(path: Path, tmp_path: Path) -> None:
    longer = "raise max_epochs, or choose another run_dir"
    assert refusal(path, 3) == f"{path} holds this run up to step 4, and max_epochs=1 ends at step 3: {longer}"
    other = train(tmp_path / "other")
    words = f"already holds another run than {other}: choose another, or delete it"
    assert refusal(path, resume=other) == f"run folder {path} {words}"
    shutil.rmtree(path / "checkpoints")
    ended = "holds a finished run without a checkpoint: choose another run_dir, or delete it"
    assert refusal(path) == f"run folder {path} {ended}"


def test_weights_stay_until_they_will_be_others(path: Path) -> None:
    before = (path / "weights.safetensors").read_bytes()
    assert gone_on(path) == (LAST, [])
    assert (path / "weights.safetensors").read_bytes() == before
    assert gone_on(path, LAST + 1) == (LAST, [])
    assert not (path / "weights.safetensors").exists()


def test_what_is_left_of_a_killed_run_without_a_checkpoint_is_begun_anew_if_it_is_whole(tmp_path: Path) -> None:
    path = train(tmp_path / "run", ended=False)
    shutil.rmtree(path / "checkpoints")
    recipe = (path / "recipe.json").read_bytes()
    (path / "recipe.json").write_bytes(recipe[:-9])
    assert refusal(path).startswith(f"{path / 'recipe.json'} is damaged: ")
    (path / "recipe.json").write_bytes(recipe)
    assert gone_on(path) == (None, [])
    assert (path / "events.jsonl").read_bytes() == b""


@pytest.mark.parametrize("given", ["folder", "file"])
def test_a_branch_takes_what_came_before_and_leaves_the_other_run_as_it_was(
    given: str, path: Path, tmp_path: Path
) -> None:
    """Also into a folder of which only that of its checkpoints had been made, and one that was half written."""
    new, before, step = tmp_path / "new", contents(path), 4 if given == "folder" else 3
    (new / "checkpoints").mkdir(parents=True)
    half = new / "checkpoints" / "step-000000001.safetensors.tmp"
    half.write_bytes(b"")
    assert gone_on(new, resume=path if given == "folder" else paths(path)[0], initial="01") == (step, [])
    assert contents(path) == before
    assert not half.exists()
    assert [checkpoint.read(file).about["recipe"]["initial"] for file in paths(new)] == ["00"]
    shutil.rmtree(path)
    assert gone_on(new) == (step, [])


# Which checkpoints


MOST = 2**64 - 1


@pytest.mark.parametrize(
    ("about", "prints", "why"),
    [
        ({"step": 3}, [1, 2, 3, 4], "does not go with it"), ({"step": 5}, [1, 2, 3, 4], "does not go with it"),
        ({}, [0, 0, 0, 0], "does not go with it"), ({}, [MOST] * 4, "does not go with it"),
        ({"events": "all"}, [1, 2, 3, 4], "slice indices must be integers or None or have an __index__ method"),
        ({"events_sha256": "", "history": None}, [1, 2, 3, 4], "'NoneType' object is not iterable"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_does_not_go_with_its_log_is_kept_aside(
    about: dict[str, Any], prints: list[int], why: str, path: Path
) -> None:
    file = write(path, about, **{"log:fingerprints": np.array(prints, np.uint64)})
    step, (told,) = gone_on(path)
    assert step == 3
    assert told.startswith(f"checkpoint {file} cannot be used, the one before it is: ")
    assert told.endswith(f"{why}; it is kept as {file.name}.aside")
    assert gone_on(path) == (3, [])


def test_nothing_of_another_run_is_kept_aside(path: Path, tmp_path: Path) -> None:
    """Its log cannot even be read."""
    (path / "events.jsonl").unlink()
    (path / "events.jsonl").mkdir()
    new, before = tmp_path / "far" / "below", contents(path)
    with pytest.warns(UserWarning, match="cannot be used") as told, pytest.raises(Invalid) as caught:
        opened(new, resume=path)
    assert str(caught.value) == f"resume: {path} has no checkpoint that can be used"
    why = f"[Errno 21] Is a directory: '{path / 'events.jsonl'}'"
    assert [str(one.message) for one in told] == [
        f"checkpoint {file} cannot be used, {instead}: {why}"
        for file, instead in zip(
            paths(path)[::-1], ("the one before it is", "and there is none before it"), strict=True
        )
    ]
    assert contents(path) == before
    assert not (tmp_path / "far").exists()


def test_going_back_keeps_newer_checkpoints_aside(path: Path) -> None:
    third, fourth = paths(path)
    before = contents(path)
    step, told = gone_on(path, resume=third)
    words = "is newer than the one that the run goes on from"
    assert (step, told) == (3, [f"checkpoint {fourth} {words}; it is kept as {fourth.name}.aside"])
    for name in (str(fourth.relative_to(path)), "events.jsonl", "weights.safetensors"):
        assert (path / f"{name}.aside").read_bytes() == before[name]
    assert paths(path) == [third]


def test_only_a_damaged_recipe_is_kept_aside(path: Path) -> None:
    """Of later steps it tells nothing, so log and weights stay where they are."""
    before = contents(path)
    (path / "recipe.json").write_text("{")
    step, (told,) = gone_on(path)
    assert step == LAST
    assert told.endswith("; that of the checkpoint is used; it is kept as recipe.json.aside")
    assert set(contents(path)) == {*before, "recipe.json.aside"}


def test_a_run_of_many_steps_goes_on(tmp_path: Path) -> None:
    """Beyond the whole numbers of which Python has but one object each."""
    path, prints, last = tmp_path / "run", list(range(1, 301)), 300
    made = opened(path, last)
    made({"event": "start", "devices": ["cpu"]})
    steps(made, 0, prints[:280])
    steps(made, 280, prints[280:])
    save(made, prints)
    made.weights(WEIGHTS)
    made.close(False)
    assert gone_on(path, last) == (last, [])
    assert (path / "weights.safetensors").exists()
    log = (path / "events.jsonl").read_bytes()
    (path / "events.jsonl").write_bytes(log.replace(b"cpu", b"gpu", 1))
    step, (told,) = gone_on(path, last)
    assert step == last
    assert told.endswith("steps whose losses and rates are lost: none; it is kept as events.jsonl.aside")


def test_what_was_made_for_nothing_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "run"
    (path / "events.jsonl").mkdir(parents=True)
    assert refusal(path) == f"run folder {path} cannot be written to: Is a directory; pass another run_dir, or None"
    assert [file.name for file in path.iterdir()] == ["events.jsonl"]
