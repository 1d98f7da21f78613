"""Every file of a run folder, damaged in a thousand ways: it is named, no checkpoint is lost, the run ends with the same bits.

Most of it needs no framework: `go_on` does with a run folder what a fit does. A few whole fits come at the end.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import be_patient

import samestep as ss
from samestep.errors import Invalid
from samestep.fingerprint import of_weights
from samestep.models.torch import mlp
from samestep.runs import checkpoint, folder, run
from samestep.runs.checkpoint import paths
from samestep.runs.diff import compare, describe
from samestep.runs.folder import RunFolder
from samestep.runs.log import events, mended
from samestep.runs.recipe import read_recipe
from samestep.runs.run import Run

STEPS, LAST, SAVED = 3, 9, (3, 5, 8, 9)  # of an epoch; in all; the steps after which a checkpoint is written
RECIPE = {"max_epochs": 3, "seed": 0, "initial": "0" * 64, "portable": False, "name": "résumé"}
CHECKPOINTS = [f"checkpoints/step-{step:09d}.safetensors" for step in SAVED]
FILES = ["events.jsonl", "recipe.json", "lock", "weights.safetensors", "average.safetensors", *CHECKPOINTS]
TRIES = 1000  # flipped bits, and as many lengths, of each file


def tensors(step: int) -> dict[str, Any]:
    return {"w": np.arange(5, dtype=np.float32) / (1 + step), "b": np.array(step, np.int64)}


def go_on(path: Path) -> int:
    """What a fit does with its folder: returns the step that it went on from."""
    made = RunFolder(path, dict(RECIPE), "auto", 9, LAST)
    try:
        found, run = made.checkpoint, Run({}, [])
        run.replay(events(made.log))
        first, numbers = (found.step, found.group("log").get("numbers")) if found else (0, None)
        table = [] if numbers is None else numbers.tolist()
        assert len(run.fingerprints) == first
        assert len(table) == first % STEPS
        assert not found or found.group("model")["w"].tobytes() == tensors(first)["w"].tobytes()
        made({"event": "resume" if first else "start", "devices": ["cpu"], "step": first})
        for step in range(first, LAST):
            losses, hits = [step / 7, step / 3], [step, 1]
            table.append([losses, hits])
            run.fingerprints.append(f"{2**64 * (step + 1) // 11:016x}")
            made({
                "event": "steps", "epoch": 1 + step // STEPS, "first": step, "lr": [0.1], "examples": [4], "loss": [losses],
                "hits": [hits], "fingerprint": run.fingerprints[-1:],
            })  # fmt: skip
            if (step + 1) % STEPS == 0:
                loss = float(np.sum(table))
                row = {"epoch": 1 + step // STEPS, "step": step + 1, "test_loss": loss, "test_accuracy": None}
                table = []
                run.history.append(row)
                made({"event": "epoch", **row})
            if step + 1 in SAVED:
                about = {"step": step + 1, "recipe": RECIPE, "history": list(run.history), "metric": None}
                kept = {f"model:{name}": tensor for name, tensor in tensors(step + 1).items()}
                kept["log:fingerprints"] = np.array([int(p, 16) for p in run.fingerprints], np.uint64)
                made.save(about, kept | ({"log:numbers": np.array(table, np.float64)} if table else {}))
                made.writer.flush()
        made.weights(tensors(LAST))
        made.weights(tensors(99), "average.safetensors")
        prints = {"fingerprint": of_weights(tensors(LAST)), "average": of_weights(tensors(99))}
        made({"event": "end", **prints})
    finally:
        made.close(True)
    return first


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run that has ended. Nothing is synced: thousands of runs are opened."""
    path = tmp_path_factory.mktemp("base") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        assert go_on(path) == 0
        files = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
        assert files == sorted(FILES)
        yield path


def damages(content: bytes, seed: int) -> Iterator[bytes]:
    """A thousand flipped bits and a thousand lengths, or all that there are."""
    chance, bits = random.Random(seed), 8 * len(content)
    for bit in chance.sample(range(bits), min(TRIES, bits)):
        yield content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :]
    for length in chance.sample(range(len(content)), min(TRIES, len(content))):
        yield content[:length]


def said_of(work: Callable[[], Any]) -> tuple[str, Any]:
    """What is said while something is done, in one line each, warnings and an error; and its result."""
    result = None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            result = work()
        except Invalid as error:
            warnings.warn(str(error), stacklevel=2)
    lines = [str(one.message) for one in told]
    assert not [line for line in lines if "\n" in line or not line]
    return " | ".join(lines), result


def facts(path: Path) -> tuple[Any, ...]:
    """All that can be read of a run that has ended."""
    run = Run.load(path)
    weights = [{name: t.tobytes() for name, t in (found or {}).items()} for found in (run.weights(), run.average)]
    return run.recipe, run.fingerprint, run.fingerprints, run.history, weights


@functools.cache
def known(base: Path) -> tuple[tuple[Any, ...], str, dict[str, bytes]]:
    return facts(base), describe(compare(base, base)), {name: (base / name).read_bytes() for name in FILES}


def matters(base: Path, name: str, content: bytes) -> bool:
    """Whether the damage of a file changes what it means."""
    if name == "recipe.json":
        try:
            return read_recipe(content) != RECIPE  # "\\u00e9" is "\\u00E9"
        except ValueError:
            return True
    return name != "lock" and content != known(base)[2][name]


def counted_on(base: Path, name: str, content: bytes) -> bool:
    """Whether a resume needs what is damaged: not the log after the last checkpoint, the weights and older checkpoints."""
    good = known(base)[2][name]
    end = checkpoint.read(base / CHECKPOINTS[-1]).about["events"] if name == "events.jsonl" else len(good)
    return name in ("events.jsonl", "recipe.json", CHECKPOINTS[-1]) and content[:end] != good[:end]


def look(base: Path, path: Path, name: str, content: bytes, opened: bool = True) -> None:
    """Read a folder with a damaged file, and try to go on with it, warnings being errors: so nothing in it changes."""
    expected, _, good = known(base)
    (path / name).write_bytes(content)
    if name in CHECKPOINTS:
        said, found = said_of(lambda: checkpoint.read(path / name).step)
        assert (name in said, found) == (True, None), "the damage is not named"
    else:
        said, found = said_of(lambda: facts(path))
        ended = name != "events.jsonl" or content == good[name] or counted_on(base, name, content)
        if not ended and not said:  # as if it had been killed after its last checkpoint: it is as of that one
            assert Run.load(path).interrupted
            assert found[:4] == expected[:4]
        else:
            assert (name in said, found) == ((True, None) if said else (False, expected))
            assert bool(said) == matters(base, name, content), "the damage is not named"
    if opened:
        said = ""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                RunFolder(path, dict(RECIPE), "auto", 9, LAST).close(False)
            except UserWarning as warned:
                said = str(warned)
        must = matters(base, name, content) and counted_on(base, name, content)
        assert bool(said) == must, "a resume did not notice"
        assert not said or (name in said and f"; it is kept as {Path(name).name}.aside" in said)
        (path / "events.jsonl").write_bytes(good["events.jsonl"])
        (path / "recipe.json").write_bytes(good["recipe.json"])
    (path / name).write_bytes(good[name])


@pytest.mark.parametrize("name", FILES)
def test_a_thousand_damages_of_every_file_are_named(name: str, base: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(base, path)
    needed = name in ("events.jsonl", "recipe.json", CHECKPOINTS[-1])  # the others are seldom opened, to save time
    for number, content in enumerate(damages((base / name).read_bytes(), len(name))):
        look(base, path, name, content, needed or number % 20 == 0)
    assert {file: (path / file).read_bytes() for file in FILES} == known(base)[2]
    assert facts(path) == known(base)[0]
    assert not list(path.rglob("*.aside*"))


def check(base: Path, path: Path, name: str, content: bytes | None) -> None:
    """Damage one file of a run folder, or take it away; compare, go on with it, and look at what has become of every file."""
    expected, equal, good = known(base)
    shutil.copytree(base, path)
    (path / name).unlink() if content is None else (path / name).write_bytes(content)
    harm = content is None or matters(base, name, content)
    said, verdict = said_of(lambda: describe(compare(base, path)))
    short = str(verdict).startswith(
        ("the same as far as both go", "the same: all tensors")
    )  # of a log that was cut short
    assert bool(said or short or verdict != equal) >= (harm and name not in (*CHECKPOINTS, "lock"))
    assert said or short or verdict == equal

    said, step = said_of(lambda: go_on(path))
    assert step == (SAVED[-2] if name == CHECKPOINTS[-1] and harm else LAST), f"not the newest that is intact: {said}"
    held = {file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert {text for file, text in good.items() if file in CHECKPOINTS and file != name} <= held, "a checkpoint is gone"
    if content is not None and harm and counted_on(base, name, content):
        assert content in held, "the damaged file was not kept"
        assert "is kept as" in said
    if name == CHECKPOINTS[-1] and harm:  # what told of the steps after the one before it
        assert content is None or {good["events.jsonl"], good["weights.safetensors"]} <= held
    assert facts(path) == expected
    assert name in CHECKPOINTS[:-1] or compare(base, path).same


@pytest.mark.parametrize("name", FILES)
def test_whatever_was_damaged_the_run_ends_with_the_same_bits_and_no_checkpoint_is_lost(
    name: str, base: Path, tmp_path: Path
) -> None:
    tried = [
        None,
        b"",
        *random.Random(5).sample(list(damages((base / name).read_bytes(), 7)) or [b""], 12 if name != "lock" else 1),
    ]
    for number, content in enumerate(tried):
        check(base, tmp_path / str(number), name, content)


def test_any_content_of_the_lock_will_do(base: Path, tmp_path: Path) -> None:
    for number, content in enumerate((b"\0", b"4711\n", random.Random(0).randbytes(100))):
        check(base, tmp_path / str(number), "lock", content)


def test_several_damages_at_once(base: Path, tmp_path: Path) -> None:
    """The log, the recipe and the newest two checkpoints: the one before them has all that is needed."""
    path = tmp_path / "run"
    shutil.copytree(base, path)
    for name in ("events.jsonl", "recipe.json", *CHECKPOINTS[2:]):
        (path / name).write_bytes(known(base)[2][name][:-50])
    (path / "events.jsonl").write_bytes(b"\0" * 2000)
    said, step = said_of(lambda: go_on(path))
    assert step == SAVED[1]
    assert said.count(" is kept as ") == 4
    assert "losses and rates are lost: 0 to 4; it is kept as events.jsonl.aside" in said
    assert facts(path) == known(base)[0]
    found = compare(base, path)
    assert found.same
    assert found.notes == ["the log of B was damaged: 5 steps left only a fingerprint"]


def test_no_kept_file_takes_the_place_of_another(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(base, path)
    contents = [b"first", b"second\n", b"third\n\n"]
    for content in contents:
        (path / "events.jsonl").write_bytes(content)
        said_of(lambda: go_on(path))
    assert [(path / f"events.jsonl.aside{n}").read_bytes() for n in ("", 1, 2)] == contents


# Broken twins: what was done before


def deletes(patch: pytest.MonkeyPatch) -> None:
    """What cannot be used is deleted."""

    def keep(self: RunFolder, file: Path, why: str, level: int = 7) -> None:
        file.unlink(missing_ok=True)
        warnings.warn(f"{why}; it is kept as {file.name}.aside", stacklevel=level)

    patch.setattr(RunFolder, "_keep", keep)


def needs_its_log(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint cannot be used without the log that it was written with."""

    def refuse(*_: Any) -> bytes:
        raise Invalid("it does not go with the log")

    patch.setattr(folder, "mended", refuse)


def forgets_the_average(patch: pytest.MonkeyPatch) -> None:
    read = run.read_weights
    patch.setattr(run, "read_weights", lambda path, weights, average: read(path, weights, None))


@pytest.mark.parametrize(
    ("breakage", "name", "complaint"),
    [
        (deletes, CHECKPOINTS[-1], "the damaged file was not kept"),
        (deletes, "recipe.json", "the damaged file was not kept"),
        (needs_its_log, "events.jsonl", "not the newest that is intact"),
    ],
)
def test_the_old_ways_are_rejected(
    breakage: Any, name: str, complaint: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = known(base)[2][name]
    content = content[:40] + bytes([content[40] ^ 1]) + content[41:]
    check(base, tmp_path / "right", name, content)
    breakage(monkeypatch)
    with pytest.raises(AssertionError, match=complaint):
        check(base, tmp_path / "wrong", name, content)


def test_a_hash_of_the_weights_alone_would_not_do(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forgets_the_average(monkeypatch)
    path, content = tmp_path / "run", known(base)[2]["average.safetensors"]
    shutil.copytree(base, path)
    with pytest.raises(AssertionError):
        look(base, path, "average.safetensors", content[:-1] + bytes([content[-1] ^ 1]))


# The log


def test_what_is_intact_in_a_log_is_kept(base: Path) -> None:
    """One flipped bit costs the steps of its line; in a seal, also those of the next."""
    log, prints, history = known(base)[2]["events.jsonl"], *known(base)[0][2:4]
    whole = [event for event in events(log) if event["event"] in ("steps", "epoch")]
    for number, line in enumerate(log.split(b"\n")[:-1]):
        at = log.index(line) + 30
        told = list(events(mended(log[:at] + bytes([log[at] ^ 1]) + log[at + 1 :], prints, history)))
        lost = [event for event in told if event["event"] == "lost"]
        assert [p for event in told if event["event"] != "epoch" for p in event["fingerprint"]] == prints
        assert [event for event in told if event["event"] == "epoch"] == [e for e in whole if e["event"] == "epoch"]
        assert [event for event in told if event["event"] != "lost"] == [
            event for event in whole if event.get("first") not in [gap["first"] for gap in lost]
        ]
        hit = list(events(log))[number]
        assert [(gap["first"], gap["last"]) for gap in lost] == (
            [(hit["first"],) * 2] if hit["event"] == "steps" else []
        )


def test_a_mended_log_holds_only_what_the_checkpoint_knows(base: Path) -> None:
    """Intact lines of another run, or of later steps, are not taken."""
    log, prints, history = known(base)[2]["events.jsonl"], *known(base)[0][2:4]
    other = [p[::-1] for p in prints[:4]]
    told = list(events(mended(log, other, history[:1])))
    assert [(e["event"], e.get("first"), e.get("last"), e.get("fingerprint")) for e in told] == [
        ("lost", 0, 3, other), ("epoch", None, None, None),
    ]  # fmt: skip
    told = list(events(mended(log, prints[:4], history[:1])))
    assert [event["event"] for event in told] == ["steps", "steps", "steps", "epoch", "steps"]


# Whole fits


X = np.random.default_rng(0).standard_normal((40, 5)).astype(np.float32)
Y = np.arange(40) % 3


def fit(path: Path | None, **settings: Any) -> Run:
    given = {
        "max_epochs": 3, "batch_size": 16, "shards": 4, "devices": ["cpu"], "progress": False, "checkpoint_every": 2,
        "average": ss.path_average(), "schedule": ss.Plateau(0.5, patience=0, threshold=0.5), "keep_checkpoints": 9,
    }  # fmt: skip
    return ss.Trainer(**given | settings, run_dir=path).fit(mlp((5, 4, 3), seed=1), (X, Y))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        be_patient(patch)
        fit(path)
    return path


@pytest.mark.parametrize("how", ["one bit", "cut short", "empty", "missing"])
@pytest.mark.parametrize(
    "name", ["events.jsonl", "recipe.json", "weights.safetensors", "average.safetensors", "newest"]
)
def test_a_fit_goes_on_and_ends_with_the_same_bits(name: str, how: str, trained: Path, tmp_path: Path) -> None:
    """Also one epoch further than the run had ended, with a Plateau that follows the training loss."""
    path = tmp_path / "run"
    shutil.copytree(trained, path)
    file = paths(path)[-1] if name == "newest" else path / name
    content = file.read_bytes()
    half = len(content) // 2
    cut = {"one bit": content[:half] + bytes([content[half] ^ 4]) + content[half + 1 :], "cut short": content[:half]}
    file.unlink() if how == "missing" else file.write_bytes(cut.get(how, b""))
    before = {other.read_bytes() for other in paths(path) if other != file}
    said, resumed = said_of(lambda: fit(path, max_epochs=4, devices=["cpu"] * 2))
    assert resumed is not None, said
    assert resumed.resumed == (8 if name == "newest" else 9)
    assert bool(said) == (name == "events.jsonl" or (how != "missing" and name in ("recipe.json", "newest")))
    whole = fit(None, max_epochs=4)
    assert (resumed.fingerprints, resumed.fingerprint) == (whole.fingerprints, whole.fingerprint)
    assert {n: t.tobytes() for n, t in (resumed.average or {}).items()} == {
        n: t.tobytes() for n, t in (whole.average or {}).items()
    }
    back = Run.load(path)
    assert (back.fingerprints, back.history) == (resumed.fingerprints, resumed.history)
    assert before <= {other.read_bytes() for other in (path / "checkpoints").iterdir()}
