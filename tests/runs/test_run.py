"""run: what a fit leaves behind, in memory and in its folder; and that a fit that fails leaves nothing false."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from patience import be_patient, one_by_one
from safetensors.numpy import load_file

import samestep as ss
from samestep.draws import order
from samestep.errors import Invalid, NotFinite
from samestep.fingerprint import of_weights
from samestep.models.torch import mlp
from samestep.runs.recipe import read_recipe

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((40, 5)).astype(np.float32)
Y = RANDOM.integers(0, 3, 40)
DATA = ss.Data(train=(X, Y), test=(X[:9] + 1, Y[:9]))
STEPS = 3  # of an epoch: 16 + 16 + 8 examples
FILES = ["events.jsonl", "recipe.json", "weights.safetensors"]  # which a finished run cannot do without
CHECKPOINTS = ["checkpoints", "checkpoints/step-000000003.safetensors", "checkpoints/step-000000006.safetensors"]
KEYS = ["epoch", "step", "lr", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "seconds"]


def fit(data: Any = DATA, **settings: Any) -> ss.Run:
    given = {"max_epochs": 2, "batch_size": 16, "shards": 4, "devices": 1, "progress": False} | settings
    return ss.Trainer(**given).fit(mlp((5, 4, 3), seed=1), data)


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """One look at the device per epoch and every checkpoint written, also on a machine that is slow today."""
    monkeypatch.setattr("samestep.training.fit.LIVE", 1e9)
    be_patient(monkeypatch)


def events(folder: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (folder / "events.jsonl").read_text()
    assert text.endswith("\n")
    told = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    return [{name: value for name, value in event.items() if name != "seal"} for event in told]


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def not_a_number(where: int) -> ss.Data:
    x = X.copy()
    x[where] = np.nan
    return ss.Data((x, Y))


# The run in memory


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = fit()
    assert (run.folder, run.rank, run.resumed) == (None, 0, None)
    assert list(tmp_path.iterdir()) == []


def test_history_has_a_row_per_epoch() -> None:
    run = fit(schedule=lambda t: 0.5 / (1 + t))
    assert [list(row) for row in run.history] == [KEYS, KEYS]
    assert [(row["epoch"], row["step"]) for row in run.history] == [(1, 3), (2, 6)]
    assert [row["lr"] for row in run.history] == [0.16666667, 0.083333336]  # all digits of float32
    for row in run.history:
        assert row["train_accuracy"] * 40 == pytest.approx(round(row["train_accuracy"] * 40))
        assert row["test_accuracy"] * 9 == pytest.approx(round(row["test_accuracy"] * 9))
        assert 0 < row["train_loss"] < 10
        assert 0 < row["test_loss"] < 10
        assert row["seconds"] > 0


def test_history_without_test_examples() -> None:
    row = fit((X, Y)).history[0]
    assert list(row) == KEYS
    assert (row["test_loss"], row["test_accuracy"]) == (None, None)


def test_fingerprints_of_every_step() -> None:
    run = fit()
    assert len(run.fingerprints) == 2 * STEPS
    assert len(set(run.fingerprints)) == 2 * STEPS
    assert all(len(print_) == 16 and set(print_) <= set("0123456789abcdef") for print_ in run.fingerprints)
    assert fit(max_epochs=1).fingerprints == run.fingerprints[:STEPS]


def test_the_fingerprint_is_that_of_the_weights() -> None:
    run = fit()
    assert run.fingerprint == of_weights(run.weights())
    assert run.fingerprint == of_weights({name: t.numpy() for name, t in run.model.state_dict().items()})
    assert run.recipe["initial"] == of_weights({n: t.numpy() for n, t in mlp((5, 4, 3), seed=1).state_dict().items()})


def test_recipe_says_nothing_about_the_number_of_devices(tmp_path: Path) -> None:
    one, three = fit(devices=1, run_dir=tmp_path / "1"), fit(devices=["cpu"] * 3, run_dir=tmp_path / "3")
    assert (one.devices, three.devices) == (["cpu"], ["cpu", "cpu", "cpu"])
    assert one.recipe == three.recipe
    assert (tmp_path / "1/recipe.json").read_bytes() == (tmp_path / "3/recipe.json").read_bytes()
    assert "devices" not in one.recipe


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"batch_size": 8}, {"shards": 3}, {"schedule": 0.2}, {"optimizer": ss.sgd(momentum=0.5)},
     {"max_epochs": 1}, {"gradient_clip_val": 1.0}, {"sampling": "with_replacement"}, {"data": (X, Y)}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_another_recipe_is_told_apart(change: dict[str, Any]) -> None:
    assert fit(**change).recipe != fit().recipe


# The folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "one"


def test_files_of_a_run(folder: Path) -> None:
    run = fit(run_dir=folder)
    assert (run.folder, run.rank, run.resumed) == (folder, 0, None)
    assert files(folder) == sorted([*FILES, *CHECKPOINTS, "lock"])
    assert read_recipe((folder / "recipe.json").read_bytes()) == run.recipe


@pytest.mark.parametrize("live", [1e9, -1.0], ids=["a look at every epoch", "a look at every step"])
def test_events_tell_the_whole_fit(folder: Path, live: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.training.fit.LIVE", live)
    one_by_one(monkeypatch)
    run = fit(run_dir=str(folder), devices=2, schedule=lambda t: 0.1 * (t + 1))
    told = events(folder)
    assert {event["event"] for event in told} == {"start", "steps", "epoch", "end"}
    assert [told[0]["event"], told[-1]["event"]] == ["start", "end"]

    start = told[0]
    assert (start["devices"], start["epochs"], start["steps_per_epoch"]) == (["cpu", "cpu"], 2, STEPS)
    assert (start["examples"], start["shards"], start["model"]) == (40, 4, "MLP")

    steps = [event for event in told if event["event"] == "steps"]
    assert len(steps) == (2 if live > 0 else 2 * STEPS)
    assert [event["first"] + i for event in steps for i in range(len(event["lr"]))] == list(range(2 * STEPS))
    assert [event["epoch"] for event in steps] == [1 + event["first"] // STEPS for event in steps]
    assert sum((event["fingerprint"] for event in steps), []) == run.fingerprints  # noqa: RUF017
    assert [n for event in steps for n in event["examples"]] == [16, 16, 8] * 2
    assert [lr for event in steps for lr in event["lr"]] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    losses, hits = ([row for event in steps for row in event[key]] for key in ("loss", "hits"))
    assert [len(row) for row in losses] == [len(row) for row in hits] == [4] * 2 * STEPS
    for epoch, row in enumerate(run.history):
        of_epoch = slice(epoch * STEPS, (epoch + 1) * STEPS)
        assert sum(map(sum, losses[of_epoch])) / 40 == pytest.approx(row["train_loss"], rel=1e-12)
        assert sum(map(sum, hits[of_epoch])) / 40 == row["train_accuracy"]

    assert [event for event in told if event["event"] == "epoch"] == [{"event": "epoch", **row} for row in run.history]
    assert told[-1]["fingerprint"] == run.fingerprint


def test_events_can_be_read_while_the_fit_goes_on(folder: Path) -> None:
    seen: list[str] = []

    def schedule(t: int) -> float:
        if t == STEPS:  # asked for when the second epoch begins
            seen.extend(event["event"] for event in events(folder))
        return 0.1

    fit(run_dir=folder, schedule=schedule, checkpoint_every=None)
    assert seen == ["start", "steps", "epoch"]


def test_how_often_somebody_looks_changes_no_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = fit()
    monkeypatch.setattr("samestep.training.fit.LIVE", -1.0)
    assert fit(run_dir=folder).fingerprints == usual.fingerprints


def test_weights_on_disk_are_those_of_the_run(folder: Path) -> None:
    run = fit(run_dir=folder)
    stored, held = load_file(folder / "weights.safetensors"), run.weights()
    assert stored.keys() == held.keys() == {"dense1.weight", "dense1.bias", "dense2.weight", "dense2.bias"}
    for name, tensor in stored.items():
        assert (tensor.dtype, tensor.shape) == (held[name].dtype, held[name].shape)
        assert tensor.tobytes() == held[name].tobytes()
    assert of_weights(stored) == run.fingerprint


def test_load_gives_the_run_back(folder: Path) -> None:
    run = fit(run_dir=folder, devices=2)
    back = ss.Run.load(str(folder))
    assert back.history == run.history
    assert (back.recipe, back.devices, back.folder) == (run.recipe, run.devices, folder)
    assert (back.rank, back.resumed, back.load(folder).history) == (0, None, run.history)
    assert (back.fingerprint, back.fingerprints) == (run.fingerprint, run.fingerprints)
    assert of_weights(back.weights()) == run.fingerprint
    with pytest.raises(AttributeError, match=r"^<a loaded run has weights, but no model: model\(my_model\) puts them"):
        back.model.eval()


def test_events_that_are_not_known_are_left_out() -> None:
    run = ss.Run({}, [])
    run.replay([{"event": "before"}, {"event": "start", "devices": ["cpu"]}, {"event": "else"}, {"event": "zoo"}])
    assert run == ss.Run({}, ["cpu"])


def test_numbers_of_numpy_as_settings(folder: Path) -> None:
    numbers = {"seed": np.int64(0), "batch_size": np.int32(16), "shards": np.int64(4), "max_epochs": np.int16(2)}
    run = fit(**numbers, gradient_clip_val=np.float32(0.5), schedule=np.float32(0.1), run_dir=folder)
    assert run.fingerprint == fit(gradient_clip_val=0.5).fingerprint
    assert ss.Run.load(folder).fingerprints == run.fingerprints


# A folder that is damaged, or not that of a finished run


def flip_last_byte(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    "damage",
    [flip_last_byte, lambda content: content[:-7], lambda content: b"\xff" + content[1:], lambda content: b""],
    ids=["one bit", "cut short", "header", "empty"],
)
def test_damaged_weights_are_detected(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    fit(run_dir=folder)
    path = folder / "weights.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(Invalid, match=r"weights\.safetensors is damaged"):
        ss.Run.load(folder)


@pytest.mark.parametrize("name", ["recipe.json", "events.jsonl"])
def test_damaged_json_is_detected(folder: Path, name: str) -> None:
    fit(run_dir=folder)
    path = folder / name
    text = path.read_text()
    path.write_text(text[:20] + text[30:])
    with pytest.raises(Invalid, match=name):
        ss.Run.load(folder)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_run_without_an_end_is_as_it_was_at_its_last_whole_checkpoint(folder: Path, damaged: bool) -> None:
    """As after a run that was killed between its last weights and the end of its log."""
    run = fit(run_dir=folder)
    path, files = folder / "events.jsonl", sorted((folder / "checkpoints").iterdir())
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    back = ss.Run.load(folder)
    assert (back.interrupted, back.fingerprint, back.history) == (True, run.fingerprint, run.history)
    if damaged:
        files[-1].write_bytes(flip_last_byte(files[-1].read_bytes()))
        first, back = fit(max_epochs=1), ss.Run.load(folder)
        assert (back.fingerprint, back.fingerprints) == (first.fingerprint, first.fingerprints)
        assert len(back.history) == 1
        assert back.weights().keys() == run.weights().keys()
    for file in files:
        file.unlink()
    with pytest.raises(Invalid) as caught:
        ss.Run.load(folder)
    told = "holds a run that has not come to an end, and no checkpoint of it: there is nothing to load"
    assert str(caught.value) == f"{folder} {told}"


def test_channels_last_weights_are_stored_in_the_order_of_their_dimensions(folder: Path) -> None:
    """safetensors writes memory as it lies, so what lies otherwise must be put in order first."""
    import torch

    torch.manual_seed(0)
    conv = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    model = torch.nn.Sequential(conv, torch.nn.Flatten(), torch.nn.Linear(16, 3))
    x = RANDOM.standard_normal((40, 3, 3, 3)).astype(np.float32)
    trainer = ss.Trainer(1, 16, devices=1, progress=False, run_dir=folder, average=ss.path_average())
    run = trainer.fit(model, (x, Y))
    weights, average = run.weights(), run.average
    assert not weights["0.weight"].flags["C_CONTIGUOUS"]  # or there is nothing to see
    assert average is not None
    for file, tensors in (("weights.safetensors", weights), ("average.safetensors", average)):
        stored = load_file(folder / file)
        assert {name: t.tolist() for name, t in stored.items()} == {name: t.tolist() for name, t in tensors.items()}
    assert ss.Run.load(folder).fingerprint == run.fingerprint


@pytest.mark.parametrize("name", FILES)
def test_missing_file_is_named(folder: Path, name: str) -> None:
    fit(run_dir=folder)
    (folder / name).unlink()
    with pytest.raises(Invalid) as caught:
        ss.Run.load(folder)
    missing = f"{folder} is not the folder of a run: {name} cannot be read (No such file or directory)"
    assert str(caught.value).startswith(f"{folder / name} is damaged: No such file" if "weights" in name else missing)


def test_load_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for path in (tmp_path / "file", tmp_path / "nothing", tmp_path):
        with pytest.raises(Invalid, match="is not the folder of a run"):
            ss.Run.load(path)


# Folders that cannot be used


def test_a_folder_that_holds_a_run_of_another_recipe_is_left_alone(folder: Path) -> None:
    fit(run_dir=folder)
    before = contents(folder)
    with pytest.raises(Invalid) as caught:
        fit(run_dir=folder, seed=1, shards=2)
    assert str(caught.value) == (
        f"{folder} holds a run of another recipe (shards is 2, was 4; seed is 1, was 0): "
        "choose another run_dir, or delete it"
    )
    assert contents(folder) == before


def test_a_folder_that_holds_a_run_of_this_recipe_gives_it_back(folder: Path) -> None:
    first = fit(run_dir=folder)
    again = fit(run_dir=folder)
    assert (again.resumed, again.fingerprint, again.history) == (2 * STEPS, first.fingerprint, first.history)
    with pytest.raises(Invalid) as caught:
        fit(run_dir=folder, resume=False)
    assert str(caught.value) == f"run folder {folder} already holds a run: choose another, or delete it"
    assert ss.Run.load(folder).fingerprint == first.fingerprint


LONG = pytest.param("new/" + 300 * "a", id="a name too long")


@pytest.mark.parametrize("name", ["file", "file/below", "file/far/below", LONG, "/proc/nope", "/proc/nope/below"])
def test_a_folder_that_cannot_be_written(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("here before")
    with pytest.raises(Invalid) as caught:
        fit(run_dir=tmp_path / name, progress=True)
    assert str(caught.value).startswith(f"run folder {tmp_path / name} cannot be written to: ")
    assert str(caught.value).endswith("; pass another run_dir, or None")
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().err == ""  # it was found out before training
    assert files(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "here before"


def test_a_folder_in_which_a_file_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(Invalid, match="cannot be written to"):
        fit(run_dir=tmp_path)
    assert files(tmp_path) == ["events.jsonl"]


def test_run_dir_must_be_a_path() -> None:
    with pytest.raises(ss.SamestepError, match="run_dir"):
        fit(run_dir=5)


# Fits that fail


def test_failing_at_the_first_step_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotFinite) as caught:
        fit(not_a_number(slice(None)), run_dir=tmp_path / "a" / "b" / "c")
    assert str(caught.value) == (
        "the loss is nan at step 0, shard 0, with learning rate 0.1: "
        "lower the rate, clip the gradient, or look at that shard's examples"
    )
    assert files(tmp_path) == []


@pytest.mark.parametrize("devices", [1, 3])
def test_not_finite_names_step_and_shard(devices: int, tmp_path: Path) -> None:
    place = order(0, 0, 40).tolist().index(7)  # of example 7 in the first epoch: 16 examples a step, 4 a shard
    assert 16 <= place < 32  # the last batch has shards of 2
    for _ in range(2):  # without a checkpoint, it begins anew
        with pytest.raises(NotFinite, match=f"^the loss is nan at step {place // 16}, shard {place % 16 // 4}, "):
            fit(not_a_number(7), devices=devices, run_dir=tmp_path / "run")
        told = events(tmp_path / "run")  # the log keeps the step before
        assert [event["event"] for event in told] == ["start", "steps"]
        assert told[1]["fingerprint"] == fit(devices=devices).fingerprints[:1]


def test_failing_at_the_first_step_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(NotFinite):
        fit(not_a_number(slice(None)), run_dir=tmp_path / "run")
    assert files(tmp_path) == ["run", "run/notes.txt"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFinite):
        fit(not_a_number(slice(None)), run_dir=tmp_path / "empty")
    assert (tmp_path / "empty").is_dir()


def test_failing_before_training_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="labels must be from 0 to 2"):
        fit((X, Y + 1), run_dir=tmp_path / "run")
    with pytest.raises(Invalid, match=r"schedule\(0\) must be finite"):
        fit(schedule=lambda t: -1.0, run_dir=tmp_path / "run")
    assert files(tmp_path) == []


def test_failing_in_a_later_epoch_keeps_what_is_known(folder: Path) -> None:
    with pytest.raises(NotFinite, match=f"^the loss is nan at step {STEPS + 1}, shard 0, with learning rate 1e\\+30"):
        fit(max_epochs=4, schedule=lambda t: 0.1 if t < STEPS else 1e30, run_dir=folder)
    assert files(folder) == sorted([*CHECKPOINTS[:2], "events.jsonl", "lock", "recipe.json"])
    told = events(folder)
    assert [event["event"] for event in told] == ["start", "steps", "epoch", "steps"]
    assert told[1]["fingerprint"] == fit(max_epochs=1).fingerprints
    assert (told[3]["first"], told[3]["lr"]) == (STEPS, [1e30])  # made with that rate, from a loss that was finite
    run = ss.Run.load(folder)
    assert (run.interrupted, run.fingerprint) == (True, fit(max_epochs=1).fingerprint)


def test_a_source_that_fails_in_a_later_epoch_keeps_what_is_known(folder: Path) -> None:
    class Failing:
        reads, most = 0, 10**9

        def __len__(self) -> int:
            return 40

        def __getitem__(self, indices: Any) -> Any:
            self.reads += 1
            if self.reads > self.most:
                raise OSError("gone")
            return X[indices], Y[indices]

    source = Failing()
    fit(source, max_epochs=1)
    source.reads, source.most = 0, source.reads
    with pytest.raises(OSError, match="gone"):
        fit(source, max_epochs=4, run_dir=folder)
    assert [event["event"] for event in events(folder)] == ["start", "steps", "epoch"]


@pytest.mark.parametrize("test_x", [np.full_like(X, np.nan), np.full_like(X, np.inf)], ids=["nan", "inf"])
def test_events_stay_json_when_the_test_loss_is_not_finite(folder: Path, test_x: Any) -> None:
    with contextlib.suppress(NotFinite):  # one may end the fit, or go on; but not write what is not JSON
        fit(ss.Data((X, Y), (test_x, Y)), run_dir=folder)
    assert len(events(folder)) > 1


# The fingerprint of weights

NAMES = st.text(min_size=1, max_size=8)
DTYPES = st.sampled_from([np.float32, np.float64, np.float16, np.int64, np.int8, np.bool_])
TENSORS = DTYPES.flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=3, max_side=4)))


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(NAMES, TENSORS, max_size=5), st.randoms())
def test_fingerprint_does_not_depend_on_order(tensors: dict[str, Any], random: Any) -> None:
    names = list(tensors)
    random.shuffle(names)
    shuffled = {name: tensors[name].copy(order="F") for name in names}
    assert of_weights(shuffled) == of_weights(tensors)
    assert len(of_weights(tensors)) == 64


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(NAMES, TENSORS, min_size=1, max_size=4), st.data())
def test_fingerprint_depends_on_every_byte(tensors: dict[str, Any], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(tensors)))
    content = bytearray(tensors[name].tobytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    changed = np.frombuffer(bytes(content), tensors[name].dtype).reshape(tensors[name].shape)
    assert of_weights(tensors | {name: changed}) != of_weights(tensors)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(NAMES, TENSORS, min_size=1, max_size=4), NAMES)
def test_fingerprint_depends_on_names(tensors: dict[str, Any], other: str) -> None:
    first = next(iter(tensors))
    if other not in tensors:
        renamed = {other if name == first else name: tensor for name, tensor in tensors.items()}
        assert of_weights(renamed) != of_weights(tensors)
    assert of_weights({name: tensors[name] for name in tensors if name != first}) != of_weights(tensors)


def test_fingerprint_depends_on_type_and_shape() -> None:
    zeros = np.zeros(4, np.float32)
    others = [
        zeros.view(np.int32), zeros.astype(">f4"), zeros.view(np.float64), zeros.reshape(2, 2), zeros.reshape(4, 1),
        zeros[:3], np.float32(0), zeros[:1],
    ]  # fmt: skip
    prints = [of_weights({"w": tensor}) for tensor in [zeros, *others]]
    assert len(set(prints)) == len(prints)
    assert of_weights({"w": -zeros}) != of_weights({"w": zeros})  # -0.0 is another number
    assert of_weights({"a": zeros[:1], "b": zeros}) != of_weights({"a": zeros, "b": zeros[:1]})


def test_fingerprint_is_the_same_in_every_process_and_version() -> None:
    # SHA-256 of '["b", "<i8", []]', 8 bytes, '["w", "<f4", [2, 3]]', 24 bytes
    tensors = {"w": np.arange(6, dtype="<f4").reshape(2, 3), "b": np.array(7, "<i8")}
    assert of_weights(tensors) == "7f180f39ae388f33b8f14d19b9e25fea6b18a74f0f3a108b5e563dc9dc331050"


def test_a_run_shows_itself_in_one_line(folder: Path) -> None:
    run = fit(average=ss.swa(1), run_dir=folder, devices=2)
    row = run.history[-1]
    scores = f"test_loss {row['test_loss']:.4g}, test_accuracy {row['test_accuracy']:.4g}"
    told = f"Run(2 epochs, {2 * STEPS} steps on 2 x cpu, {scores}, fingerprint {run.fingerprint[:16]}, {folder})"
    assert repr(run) == repr(ss.Run.load(folder)) == told
    alone = fit(max_epochs=1, data=(X, Y))
    assert re.fullmatch(
        r"Run\(1 epoch, \d+ steps on cpu, train_loss [\d.]+, train_accuracy [\d.]+, fingerprint \w{16}\)", repr(alone)
    )
    assert repr(ss.Run({}, ["cpu"], interrupted=True)) == "Run(0 epochs, 0 steps on cpu, interrupted, fingerprint )"


def test_a_lazy_model_must_be_called_before_it_is_loaded(tmp_path):
    x, y = np.ones((8, 3), "float32"), np.arange(8) % 2
    ss.Trainer(1, 4, run_dir=tmp_path / "run", progress=False).fit(torch.nn.LazyLinear(2), (x, y))
    model, kept = torch.nn.LazyLinear(2), ss.Run.load(tmp_path / "run")
    with pytest.raises(Invalid, match="^the model LazyLinear has no weights yet: call it once with an example$"):
        kept.model(model)
    model(torch.ones(1, 3))
    assert torch.equal(kept.model(model).weight, kept.state_dict()["weight"])
