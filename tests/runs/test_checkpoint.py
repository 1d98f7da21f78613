"""checkpoint: a file is whole or not there, damage is found, a full disk does no harm, and training waits for memory only."""

from __future__ import annotations

import builtins
import errno
import hashlib
import json
import os
import resource
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from patience import be_patient, one_by_one
from safetensors import safe_open
from safetensors.numpy import load, load_file
from torch import nn

import samestep as ss
from samestep.errors import Invalid, WrongType
from samestep.runs import checkpoint
from samestep.runs.checkpoint import Cadence, Writer, pack, parse, paths, read, unpack

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((40, 5)).astype(np.float32)
Y = RANDOM.integers(0, 3, 40)
DATA = ss.Data(train=(X, Y), test=(X[:9] + 1, Y[:9]))
STEPS = 3  # of an epoch: 16 + 16 + 8 examples
DEADLINE = 180.0  # seconds after which a test that waits has failed
FULL = os.strerror(errno.ENOSPC)


def net(hidden: int = 4) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 3))


def fit(data: Any = DATA, hidden: int = 4, **settings: Any) -> ss.Run:
    given = {
        "max_epochs": 2,
        "batch_size": 16,
        "shards": 4,
        "devices": "cpu",
        "progress": False,
        "optimizer": ss.adam(),
    }
    return ss.Trainer(**given | settings).fit(net(hidden), data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


def names(folder: Path) -> list[str]:
    return [path.name for path in paths(folder)]


def name(*steps: int) -> list[str]:
    return [f"step-{step:09d}.safetensors" for step in steps]


def in_time(function: Callable[[], Any]) -> Any:
    """Call a function that might wait for ever if it were wrong."""
    result: list[Any] = []

    def call() -> None:
        try:
            result.append(function())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(DEADLINE)
    assert not thread.is_alive(), f"still waiting after {DEADLINE:g} s"
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


# The format


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[ss.Run, Path]:
    """A run that averages, and its folder with the checkpoints after steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("made") / "run"
    with pytest.MonkeyPatch.context() as patch:
        be_patient(patch)
        run = fit(
            run_dir=folder, checkpoint_every=2, keep_checkpoints=9, average=ss.path_average(), devices=["cpu"] * 2
        )
    return run, folder


MODEL = {
    "0.weight": (4, 5), "0.bias": (4,), "1.weight": (4,), "1.bias": (4,), "1.running_mean": (4,), "1.running_var": (4,),
    "1.num_batches_tracked": (), "2.weight": (3, 4), "2.bias": (3,),
}  # fmt: skip
TRAINED = [name for name in MODEL if "running" not in name and "num" not in name]


def test_a_checkpoint_is_a_safetensors_file_with_these_names(made: tuple[ss.Run, Path]) -> None:
    run, folder = made
    path = paths(folder)[-1]
    tensors = load_file(path)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        **{f"model:{name}": shape for name, shape in MODEL.items()},
        **{f"average:{name}": shape for name, shape in MODEL.items()},
        **{f"optimizer:{slot}:{name}": MODEL[name] for slot in ("mean", "square") for name in TRAINED},
        "log:fingerprints": (6,),
    }
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"float32", "int64", "uint64"}
    assert [f"{print_:016x}" for print_ in tensors["log:fingerprints"]] == run.fingerprints
    for name, weight in run.weights().items():
        assert tensors[f"model:{name}"].tobytes() == weight.tobytes()
    assert run.average is not None
    for name, weight in run.average.items():
        assert tensors[f"average:{name}"].tobytes() == weight.tobytes()
    back = read(path)
    assert (back.step, back.tensors.keys()) == (6, tensors.keys())
    assert back.group("model").keys() == MODEL.keys()
    assert back.group("optimizer").keys() == {f"{slot}:{name}" for slot in ("mean", "square") for name in TRAINED}


def test_what_a_checkpoint_says_about_itself(made: tuple[ss.Run, Path]) -> None:
    run, folder = made
    assert [read(path).step for path in paths(folder)] == [2, 4, 6]
    log = (folder / "events.jsonl").read_bytes()
    for path in paths(folder):
        with safe_open(path, "np") as file:
            metadata = file.metadata()
        assert metadata.keys() == {"sha256", "samestep"}
        about = json.loads(metadata["samestep"])
        # no rank, no device, no generator, no place in the data: those follow from the step
        assert sorted(about) == [
            "average", "events", "events_sha256", "history", "metric", "recipe", "step", "time",
        ]  # fmt: skip
        step = about["step"]
        assert about["recipe"] == run.recipe
        assert about["history"] == run.history[: step // 3]
        tensors = load_file(path)
        assert [f"{print_:016x}" for print_ in tensors["log:fingerprints"]] == run.fingerprints[:step]
        # losses and hits of the steps of the unfinished epoch, which the log has too
        told = [event for event in map(json.loads, log[: about["events"]].splitlines()) if event["event"] == "steps"]
        numbers = [[*one, *other] for event in told for one, other in zip(event["loss"], event["hits"], strict=True)]
        assert tensors.get("log:numbers", np.zeros(0)).tolist() == numbers[step // 3 * 3 :]
        assert about["average"] == sum([float(np.float32(0.001))] * step)  # Adam's own rate was applied so often
        assert about["metric"] == (run.history[-1]["test_loss"] if step == 6 else None)
        assert log[about["events"] - 1 : about["events"]] == b"\n"
        assert about["events_sha256"] == hashlib.sha256(log[: about["events"]]).hexdigest()
        told = [json.loads(line) for line in log[: about["events"]].splitlines()]
        assert sum(len(event["lr"]) for event in told if event["event"] == "steps") == step
        assert "end" not in {event["event"] for event in told}


def test_the_hash_covers_all_but_itself(made: tuple[ss.Run, Path]) -> None:
    content = paths(made[1])[0].read_bytes()
    size = int.from_bytes(content[:8], "little")
    assert size % 8 == 0  # tensors begin at a multiple of 8, where a reader can map them
    kept = json.loads(content[8 : 8 + size])["__metadata__"]["sha256"]
    blank = content[8:].replace(kept.encode(), b"0" * 64, 1)
    assert hashlib.sha256(blank).hexdigest() == kept


def test_without_test_examples_the_training_loss_is_the_metric(folder: Path, patient: None) -> None:
    run = fit((X, Y), run_dir=folder)
    assert [checkpoint.metric(path) for path in paths(folder)] == [row["train_loss"] for row in run.history]


DTYPES = st.sampled_from([np.dtype(f"<{kind}") for kind in checkpoint.TYPES if kind != "b1"] + [np.dtype(bool)])
TENSORS = DTYPES.flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda a: a,
    "another order": lambda a: np.asfortranarray(a) if a.ndim else a,
    "channels last": lambda a: np.moveaxis(np.ascontiguousarray(np.moveaxis(a, 1, -1)), -1, 1) if a.ndim > 1 else a,
    "every other": lambda a: a[::2] if a.ndim else a,
    "backwards": lambda a: a[..., ::-1] if a.ndim else a,
}


@settings(deadline=None, max_examples=150)
@given(st.dictionaries(st.text(max_size=8), st.tuples(TENSORS, st.sampled_from(sorted(LAYOUTS))), max_size=5))
def test_what_is_packed_is_unpacked(drawn: dict[str, tuple[Any, str]]) -> None:
    tensors = {f"model:{name}": LAYOUTS[layout](array) for name, (array, layout) in drawn.items()}
    about = {"step": 7, "text": '"0000', "half": 0.1, "zeros": checkpoint.NO_HASH, "nothing": None}
    content = b"".join(pack(about, tensors))
    assert int.from_bytes(content[:8], "little") % 8 == 0
    back = unpack(content, "x")
    assert back.about == about
    for others in (back.tensors, load(content)):
        assert others.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert (others[name].dtype, others[name].shape) == (tensor.dtype, tensor.shape)
            assert others[name].tobytes() == tensor.tobytes()


def test_the_other_end_first_is_stored_as_everybody_reads_it() -> None:
    back = unpack(b"".join(pack({}, {"w": np.arange(3, dtype=">f4")})), "x").tensors["w"]
    assert back.tobytes() == np.arange(3, dtype="<f4").tobytes()


@pytest.mark.parametrize("dtype", ["complex64", "V2", "U3", "M8[s]", "object"])
def test_what_a_checkpoint_cannot_hold(dtype: str) -> None:
    with pytest.raises(WrongType) as caught:
        pack({}, {"model:w": np.zeros(2, dtype)})
    assert str(caught.value) == (f"model:w is of type {np.dtype(dtype)}, which a checkpoint cannot hold: convert it")


# Damage


def assert_damaged(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(Invalid) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path} is damaged, or not a checkpoint: ")
    assert "\n" not in str(caught.value)


def check_damages(content: bytes, path: Path, count: int) -> None:
    """Flips of single bits, truncations and extensions, each of which must be found."""
    random, header = np.random.default_rng(4), 8 + int.from_bytes(content[:8], "little")
    path.write_bytes(content)
    assert read(path).step == 4  # as it is, it can be read
    for i in range(count):
        # every fourth is in the length or the text of the header, where less of the file is
        end = header if i % 4 == 0 else len(content)
        at, n = int(random.integers(end)), int(random.integers(1, 200))
        flipped = content[:at] + bytes([content[at] ^ 1 << int(random.integers(8))]) + content[at + 1 :]
        extra = bytes(n) if i % 2 else random.bytes(n)
        assert_damaged(path, [flipped, flipped, content[:at], content + extra][i // 4 % 4])
    path.write_bytes(content)
    assert read(path).step == 4


def test_a_thousand_damages_are_all_found(made: tuple[ss.Run, Path], tmp_path: Path) -> None:
    check_damages(paths(made[1])[1].read_bytes(), tmp_path / "damaged.safetensors", 1000)


def hash_of_the_tensors(content: bytes) -> bytes:
    return content[8 + int.from_bytes(content[:8], "little") :]


def hash_of_the_header(content: bytes) -> bytes:
    return content[: 8 + int.from_bytes(content[:8], "little")]


@pytest.mark.parametrize("part", [hash_of_the_tensors, hash_of_the_header])
def test_a_hash_of_less_than_the_file_would_not_do(
    part: Callable[[bytes], bytes], made: tuple[ss.Run, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken twin, which the test above must reject: it verifies a part of the file, and leaves the rest to the parser."""
    content, path = paths(made[1])[1].read_bytes(), tmp_path / "damaged.safetensors"
    kept = part(content)

    def forgiving(content: bytes, name: str) -> Any:
        try:
            tensors = load(content)
            about = json.loads(
                json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]["samestep"]
            )
        except Exception as error:
            raise Invalid(f"{name} is damaged, or not a checkpoint: {error}".replace("\n", " ")) from error
        if part(content) != kept:
            raise Invalid(f"{name} is damaged, or not a checkpoint: its hash does not hold")
        return checkpoint.Checkpoint(about, tensors)

    monkeypatch.setattr(checkpoint, "unpack", forgiving)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_damages(content, path, 1000)


def test_a_damaged_length_is_found_without_taking_memory(made: tuple[ss.Run, Path], tmp_path: Path) -> None:
    content, path = paths(made[1])[1].read_bytes(), tmp_path / "damaged.safetensors"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for bit in range(64):
        length = (int.from_bytes(content[:8], "little") ^ 1 << bit).to_bytes(8, "little")
        assert_damaged(path, length + content[8:])
        assert checkpoint.metric(path) is None or bit < 3  # within the padding, the text is still whole
    size = int.from_bytes(content[:8], "little")
    for length in (0, 1, size - 1, size + 1, len(content) - 8, len(content), 2**40, 2**63 - 1, 2**64 - 1):
        assert_damaged(path, length.to_bytes(8, "little") + content[8:])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_pieces_that_have_changed_places_are_found(made: tuple[ss.Run, Path], tmp_path: Path) -> None:
    """What a sum without places would not see: two tensors exchanged, and the name of one given to the other."""
    content = paths(made[1])[1].read_bytes()
    swapped = content.replace(b"model:1.running_mean", b"model:1.running_moan", 1)
    assert_damaged(tmp_path / "one", swapped)
    swapped = content[:-32] + content[-16:] + content[-32:-16]
    assert swapped != content
    assert_damaged(tmp_path / "two", swapped)


def test_files_that_are_not_checkpoints(made: tuple[ss.Run, Path], tmp_path: Path) -> None:
    assert_damaged(tmp_path / "weights", (made[1] / "weights.safetensors").read_bytes())
    for content in (b"", b"\0" * 8, b"\2" + bytes(7) + b"{}", b"\x80\x04K\x01.", b"[" * 100_000):
        assert_damaged(tmp_path / "other", content)
    for header in (b"[]", b'{"__metadata__": {"sha256": 5}}'):
        assert_damaged(tmp_path / "header", len(header).to_bytes(8, "little") + header)
    deep = b"[" * 100_000
    assert_damaged(tmp_path / "deep", len(deep).to_bytes(8, "little") + deep)
    with pytest.raises(Invalid) as caught:
        read(tmp_path / "nothing")
    assert str(caught.value) == f"{tmp_path / 'nothing'} cannot be read: No such file or directory"
    with pytest.raises(Invalid) as caught:
        read(tmp_path)
    assert str(caught.value) == f"{tmp_path} cannot be read: Is a directory"


def test_a_file_whose_hash_holds_and_whose_tensors_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(checkpoint.TYPES, "f4", "F31")
    assert_damaged(tmp_path / "other", b"".join(pack({"step": 1}, {"w": np.zeros(2, np.float32)})))


def test_a_metric_is_read_only_if_the_header_is_shorter_than_the_file(tmp_path: Path) -> None:
    (content,) = pack({"metric": 0.5}, {})
    for length, metric in ((len(content) - 8, 0.5), (len(content), None), (2**63 - 1, None)):
        (tmp_path / "file").write_bytes(length.to_bytes(8, "little") + content[8:])
        assert checkpoint.metric(tmp_path / "file") == metric


def test_only_checkpoints_are_taken_for_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for other in (
        "step-000000003.safetensors.tmp",
        "step-mine.safetensors",
        "step-000000002.bak",
        "notes",
        *name(2, 10, 1),
    ):
        (tmp_path / "checkpoints" / other).write_text("")
    assert names(tmp_path) == name(1, 2, 10)
    assert paths(tmp_path / "nothing") == []


# Writing


def test_what_is_on_the_disk_before_what(folder: Path, monkeypatch: pytest.MonkeyPatch, patient: None) -> None:
    """The log, then the file, then its name, then the folder: whenever the power fails, what is there is whole."""
    done: list[tuple[Any, ...]] = []
    fsync, replace = os.fsync, os.replace

    def record_sync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        done.append(("sync", str(path.relative_to(folder.parent)), path.stat().st_size if path.is_file() else None))
        fsync(fd)

    def record_replace(old: Path, new: Path) -> None:
        done.append(("rename", str(old.relative_to(folder.parent)), new.name, old.stat().st_size))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_replace)
    fit(run_dir=folder, checkpoint_every=1, keep_checkpoints=9, max_epochs=1)
    assert names(folder) == name(1, 2, 3)

    def whole(file: str, then: str) -> list[tuple[Any, ...]]:
        size = (folder.parent / file).stat().st_size
        return [("sync", f"{file}.tmp", size), ("rename", f"{file}.tmp", Path(file).name, size), ("sync", then, None)]

    expected = whole("run/recipe.json", "run")
    for i, file in enumerate(name(1, 2, 3)):
        log = read(folder / "checkpoints" / file).about["events"]
        expected += [("sync", "run/events.jsonl", log), *([("sync", "run", None)] if i == 0 else [])]
        expected += whole(f"run/checkpoints/{file}", "run/checkpoints")
    assert done == expected + whole("run/weights.safetensors", "run")


class Failing:
    """A file on which one operation fails, after so many bytes where it is `write`."""

    def __init__(self, file: Any, what: str, number: int) -> None:
        self.file, self.what, self.number, self.room = file, what, number, 1000

    def _fail(self) -> None:
        raise OSError(self.number, os.strerror(self.number))

    def write(self, data: Any) -> int:
        if self.what == "write" and len(data) > self.room:
            self.file.write(bytes(data[: self.room]))
            self._fail()
        self.room -= len(data)
        return int(self.file.write(data))

    def flush(self) -> None:
        if self.what == "flush":
            self._fail()
        self.file.flush()

    def __enter__(self) -> Failing:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def fails(monkeypatch: pytest.MonkeyPatch, what: str, number: int, steps: set[int]) -> None:
    """Let something fail while the checkpoints of these steps are written."""
    tmp = {f"{file}.tmp" for file in name(*steps)}

    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    def opening(path: Any, mode: str = "r") -> Any:
        if Path(path).name not in tmp:
            return builtins.open(path, mode)
        return fail() if what == "open" else Failing(builtins.open(path, mode), what, number)

    def watch(function: Any, of: Callable[[Any], Path]) -> Any:
        return lambda first, *rest: fail() if of(first).name in tmp else function(first, *rest)

    monkeypatch.setattr(checkpoint, "open", opening, raising=False)
    if what == "fsync":
        monkeypatch.setattr(os, "fsync", watch(os.fsync, lambda fd: Path(os.readlink(f"/proc/self/fd/{fd}"))))
    if what == "replace":
        monkeypatch.setattr(os, "replace", watch(os.replace, Path))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
@pytest.mark.parametrize("what", ["open", "write", "flush", "fsync", "replace"])
def test_a_checkpoint_that_cannot_be_written_does_no_harm(
    what: str, number: int, folder: Path, monkeypatch: pytest.MonkeyPatch, patient: None
) -> None:
    undisturbed = fit()
    seen: list[list[str]] = []
    write = checkpoint.write

    def look(path: Path, pieces: Any) -> None:
        try:
            write(path, pieces)
        except OSError:
            seen.append(sorted(p.name for p in (folder / "checkpoints").glob("*")))
            raise

    monkeypatch.setattr(checkpoint, "write", look)
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fails(patch, what, number, {1, 3, 4})
        run = fit(run_dir=folder, checkpoint_every=1, keep_checkpoints=1)
    assert [str(one.message) for one in told] == [
        f"{failed} could not be written ({os.strerror(number)}); {kept}, and training goes on"
        for failed, kept in zip(
            name(1, 3, 4), ["there is none before it", *(f"{n} is kept" for n in name(2, 2))], strict=True
        )
    ]
    assert {one.category for one in told} == {UserWarning}
    assert seen == [[], name(2), name(2)]  # the one before is there, and nothing half-written
    assert run.fingerprints == undisturbed.fingerprints
    assert run.fingerprint == undisturbed.fingerprint
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == name(6)
    assert read(paths(folder)[0]).step == 6


def test_the_checkpoint_before_a_failed_one_can_be_resumed_from(
    folder: Path, monkeypatch: pytest.MonkeyPatch, patient: None
) -> None:
    with monkeypatch.context() as patch:
        fails(patch, "write", errno.ENOSPC, {3, 4, 5, 6})
        with pytest.warns(UserWarning, match="could not be written") as told:
            fit(run_dir=folder, checkpoint_every=1)
    assert len(told) == 4
    assert names(folder) == name(1, 2)
    run = fit(run_dir=folder)
    assert (run.resumed, run.fingerprints) == (2, fit().fingerprints)


def test_warnings_that_are_errors_end_the_fit_and_nobody_waits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, "write", errno.ENOSPC, {1, 2, 3, 4, 5, 6})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"could not be written \(No space left on device\)"):
            in_time(lambda: fit(run_dir=folder, checkpoint_every=1))


LOG = "run folder {} cannot be written to: No space left on device; pass another run_dir, or None"


@pytest.mark.parametrize("lines", [1, 2, 4])
def test_a_log_that_cannot_be_written_ends_the_fit_with_one_line(
    lines: int, folder: Path, monkeypatch: pytest.MonkeyPatch, patient: None
) -> None:
    """The log is written through to the disk with every event, so it is the event's own line that fails."""

    class Full:
        def __init__(self, file: Any) -> None:
            self.file, self.left = file, lines

        def write(self, data: bytes) -> int:
            if not self.left:
                raise OSError(errno.ENOSPC, FULL)
            self.left -= 1
            return int(self.file.write(data))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    with monkeypatch.context() as patch:
        opening = lambda path, mode: (  # noqa: E731
            Full(builtins.open(path, mode)) if mode == "ab" else builtins.open(path, mode)  # noqa: SIM115
        )
        patch.setattr("samestep.runs.folder.open", opening, raising=False)
        with pytest.raises(Invalid) as caught:
            fit(run_dir=folder, checkpoint_every=1)
    assert str(caught.value) == LOG.format(folder)
    kept = min(lines - 1, 2)  # start, step 1, step 2, step 3, epoch: the checkpoint of step 3 comes after the epoch
    assert names(folder) == name(*[1, 2, 3][:kept])
    if lines == 1:
        assert not folder.exists()  # nothing was learned from it
    run = fit(run_dir=folder)
    assert (run.resumed, run.fingerprints) == (kept or None, fit().fingerprints)


def test_weights_that_cannot_be_written_leave_a_run_that_can_be_resumed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint.write

    def full(path: Path, pieces: Any) -> None:
        if path.name == "weights.safetensors":
            raise OSError(errno.ENOSPC, FULL)
        write(path, pieces)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write", full)
        with pytest.raises(Invalid) as caught:
            fit(run_dir=folder)
    assert str(caught.value) == LOG.format(folder)
    run = fit(run_dir=folder)
    assert (run.resumed, run.fingerprint) == (6, fit().fingerprint)
    assert ss.Run.load(folder).fingerprint == run.fingerprint


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["recipe.json", "events.jsonl"])
def test_a_resume_that_finds_the_disk_full_leaves_the_run_as_it_was(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(run_dir=folder)
    before = contents(folder)
    with monkeypatch.context() as patch:

        def opening(path: Any, mode: str = "r") -> Any:
            if Path(path).name in (name, f"{name}.tmp") and "r" not in mode:
                raise OSError(errno.ENOSPC, FULL)
            return builtins.open(path, mode)

        for module in ("checkpoint", "folder"):
            patch.setattr(f"samestep.runs.{module}.open", opening, raising=False)
        with pytest.raises(Invalid) as caught:
            fit(run_dir=folder, max_epochs=3)
    assert str(caught.value) == LOG.format(folder)
    after = contents(folder)
    assert after.keys() >= {key for key in before if "weights" not in key}
    assert all(after[key] == before[key] for key in before if key.startswith("checkpoints/"))
    run = fit(run_dir=folder, max_epochs=3)
    assert (run.resumed, run.fingerprints) == (6, fit(max_epochs=3).fingerprints)


# A disk that is really full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A file system of so many bytes."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    place, mounted = tmp_path / "disk", []

    def mount(size: int) -> Path:
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"needs the right to mount a small file system: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for path in mounted:
        subprocess.run(["umount", path], check=True)


WIDE = 8192  # hidden units: 8192 * 11 + 3 weights and 2 * 8192 + 1 buffers


def test_a_disk_that_is_full(small_disk: Callable[[int], Path], tmp_path: Path, patient: None) -> None:
    undisturbed = fit(hidden=WIDE)
    fit(hidden=WIDE, run_dir=tmp_path / "measure", max_epochs=1)
    one = paths(tmp_path / "measure")[0].stat().st_size
    assert one > 1 << 20
    place = small_disk(2 * one + one // 2 + (256 << 10))  # two checkpoints, the weights, and the log
    folder = place / "run"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run = fit(hidden=WIDE, run_dir=folder, checkpoint_every=1, keep_checkpoints=9)
    assert [str(each.message) for each in told] == [
        f"{failed} could not be written ({FULL}); {name(2)[0]} is kept, and training goes on"
        for failed in name(3, 4, 5, 6)
    ]
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == name(1, 2)
    assert [read(path).step for path in paths(folder)] == [1, 2]
    assert run.fingerprints == undisturbed.fingerprints
    assert ss.Run.load(folder).fingerprint == undisturbed.fingerprint

    (folder / "weights.safetensors").unlink()
    ballast, room = place / "ballast", os.statvfs(place)
    with open(ballast, "wb") as file:
        file.write(bytes(room.f_bavail * room.f_frsize))
    assert os.statvfs(place).f_bavail == 0
    kept = contents(folder)
    with pytest.raises(Invalid) as caught:
        fit(hidden=WIDE, run_dir=folder, checkpoint_every=1, keep_checkpoints=9, max_epochs=3)
    assert str(caught.value) == LOG.format(folder)
    assert {key: text for key, text in contents(folder).items() if key != "events.jsonl"} == {
        key: text for key, text in kept.items() if key != "events.jsonl"
    }
    with pytest.raises(Invalid) as caught:
        fit(hidden=WIDE, run_dir=place / "another")
    assert str(caught.value) == LOG.format(place / "another")
    assert sorted(p.name for p in place.iterdir()) == ["ballast", "run"]

    ballast.unlink()
    paths(folder)[0].unlink()  # room for one more
    resumed = fit(hidden=WIDE, run_dir=folder, keep_checkpoints=1)
    assert (resumed.resumed, resumed.fingerprints) == (2, undisturbed.fingerprints)
    assert resumed.fingerprint == undisturbed.fingerprint


# Which checkpoints are kept


def nothing() -> None:
    pass


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Callable[..., Writer]]:
    made: list[Writer] = []

    def make(keep: int = 3, before: Callable[[], None] = nothing) -> Writer:
        made.append(Writer(tmp_path, keep, before))
        return made[-1]

    yield make
    for each in made:
        in_time(each.close)


METRICS = [None, 0.5, None, 0.25, 0.4, 0.25, None, 0.6]  # of steps 1 to 8; the best is step 4, the first of two


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (1, [[1], [2], [2, 3], [4], [4, 5], [4, 6], [4, 7], [4, 8]]),
        (2, [[1], [1, 2], [2, 3], [3, 4], [4, 5], [4, 5, 6], [4, 6, 7], [4, 7, 8]]),
        (3, [[1], [1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6], [4, 5, 6, 7], [4, 6, 7, 8]]),
    ],
)
def test_the_last_few_and_the_best_are_kept(
    keep: int, kept: list[list[int]], writer: Callable[..., Writer], tmp_path: Path
) -> None:
    first = writer(keep)
    seen = []
    for step, metric in enumerate(METRICS, 1):
        if step == 6:  # a run that is resumed knows the best from the files
            in_time(first.close)
            first = writer(keep)
        first.submit({"step": step, "metric": metric}, {"w": np.full(3, step)})
        in_time(first.flush)
        seen.append(names(tmp_path))
    assert seen == [name(*steps) for steps in kept]
    assert [checkpoint.metric(path) for path in paths(tmp_path)] == [METRICS[step - 1] for step in kept[-1]]
    assert [read(path).tensors["w"].tolist() for path in paths(tmp_path)] == [[step] * 3 for step in kept[-1]]


def test_a_checkpoint_that_somebody_has_deleted_is_not_missed(writer: Callable[..., Writer], tmp_path: Path) -> None:
    one = writer(1)
    for step in (1, 2):
        one.submit({"step": step, "metric": None}, {"w": np.zeros(2)})
        in_time(one.flush)  # warnings are errors
        paths(tmp_path)[0].unlink()
    assert one.written == 2


def test_which_checkpoint_is_kept_when_one_cannot_be_written(writer: Callable[..., Writer], tmp_path: Path) -> None:
    """The last one, also of later steps; never the one that was to be written again."""
    states = iter([None, OSError(errno.ENOSPC, FULL), OSError("gone"), None, OSError(errno.EIO, "broken")])

    def before() -> None:
        if state := next(states):
            raise state

    one = writer(9, before)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in (5, 5, 3, 2, 5):
            one.submit({"step": step, "metric": None}, {"w": np.zeros(2)})
            in_time(one.flush)
    assert [str(warning.message) for warning in told] == [
        f"{name(step)[0]} could not be written ({why}); {kept}, and training goes on"
        for step, why, kept in (
            (5, FULL, "there is none before it"), (3, "gone", f"{name(5)[0]} is kept"), (5, "broken", f"{name(2)[0]} is kept"),
        )
    ]  # fmt: skip
    assert names(tmp_path) == name(2, 5)


def test_a_fit_keeps_the_last_few_and_the_best(folder: Path, patient: None) -> None:
    """With a rate that becomes far too high, the first epochs are the best."""
    schedule = lambda t: 0.05 if t < 2 * STEPS else 5.0  # noqa: E731
    run = fit(run_dir=folder, max_epochs=6, keep_checkpoints=2, schedule=schedule)
    losses = [row["test_loss"] for row in run.history]
    best = 1 + int(np.argmin(losses))
    assert best < 5  # or there is nothing to see
    assert names(folder) == name(best * STEPS, 5 * STEPS, 6 * STEPS)
    assert [checkpoint.metric(path) for path in paths(folder)] == [losses[best - 1], *losses[-2:]]


@pytest.mark.parametrize(
    ("every", "steps"),
    [(1, [1, 2, 3, 4, 5, 6, 7, 8, 9]), (4, [4, 8, 9]), (9, [9]), (100, [9]), ("2 steps", [2, 4, 6, 8, 9]),
     ("1 epoch", [3, 6, 9]), ("2 epochs", [6, 9]), ("1 h", [9]), (None, [])],
)  # fmt: skip
def test_when_a_fit_writes_checkpoints(every: Any, steps: list[int], folder: Path, patient: None) -> None:
    run = fit(run_dir=folder, max_epochs=3, checkpoint_every=every, keep_checkpoints=99)
    assert names(folder) == name(*steps)
    assert run.fingerprint == fit(max_epochs=3).fingerprint


UNCHECKED: dict[str, Any] = {"rehearse": False, "check_every": None}  # they would compute shards, too


def test_every_so_many_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient: None) -> None:
    one_by_one(monkeypatch)
    shards: list[None] = []  # that have been computed; each takes 2.5 seconds, a step 10
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(monotonic=lambda: 2.5 * len(shards)))

    def loss(output: Any, y: Any) -> Any:
        if output.requires_grad:
            shards.append(None)
        return nn.functional.cross_entropy(output, y)

    for every, steps in (("25 s", [3, 6, 9]), ("20 s", [2, 4, 6, 8, 9]), ("0.5 min", [3, 6, 9])):
        fit(run_dir=tmp_path / every, max_epochs=3, checkpoint_every=every, keep_checkpoints=99, loss=loss, **UNCHECKED)
        assert names(tmp_path / every) == name(*steps)


# Training does not wait for the disk


def test_a_slow_disk_gets_the_newest(writer: Callable[..., Writer], tmp_path: Path) -> None:
    busy, free = threading.Event(), threading.Event()

    def before() -> None:
        busy.set()
        assert free.wait(DEADLINE)

    slow = writer(9, before)
    w = np.zeros(4)
    slow.submit({"step": 1, "metric": None}, {"w": w})
    assert busy.wait(DEADLINE)
    for step in (2, 3, 4):  # each returns, though nothing has been written
        w[:] = step
        slow.submit({"step": step, "metric": None}, {"w": w})
        assert slow.written == 0
    assert paths(tmp_path) == []
    w[:] = -1  # what was handed over is a copy
    free.set()
    in_time(slow.flush)
    assert (names(tmp_path), slow.written) == (name(1, 4), 2)
    assert [read(path).tensors["w"].tolist() for path in paths(tmp_path)] == [[0.0] * 4, [4.0] * 4]


def test_what_is_written_is_never_mixed(writer: Callable[..., Writer], tmp_path: Path) -> None:
    """Every file holds what its tensors were when it was handed over, while names, shapes and types change."""
    steps, gate, made = 60, threading.Semaphore(0), {}
    writer_ = writer(steps, lambda: assert_acquired(gate))
    value = np.zeros((2, 3), np.float32)
    for step in range(1, steps + 1):
        value[:] = step
        tensors: dict[str, Any] = {"model:w": value, "model:t": value.T}
        if step % 3 == 0:
            tensors["optimizer:v"] = np.full(step % 7, step)
        if step % 4 == 0:
            tensors["model:w"] = value.astype(np.float64)
        made[step] = {key: tensor.copy() for key, tensor in tensors.items()}
        writer_.submit({"step": step, "metric": None}, tensors)
        value[:] = -1
        if step % 5 == 0 or step % 7 == 0:
            gate.release(2)
            in_time(writer_.flush)
    found = [read(path) for path in paths(tmp_path)]
    assert len(found) == writer_.written > 15
    assert found[-1].step == steps
    for one in found:
        assert one.tensors.keys() == made[one.step].keys()
        for key, tensor in made[one.step].items():
            assert one.tensors[key].dtype == tensor.dtype
            assert one.tensors[key].tobytes() == tensor.tobytes()


def assert_acquired(gate: threading.Semaphore) -> None:
    assert gate.acquire(timeout=DEADLINE)


def test_a_fit_goes_on_while_the_disk_hangs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first checkpoint is not written before the last epoch has begun: were training to wait for it, it never would."""
    begun, write = threading.Event(), checkpoint.write

    def hang(path: Path, pieces: Any) -> None:
        assert path.parent.name != "checkpoints" or begun.wait(DEADLINE), "training waits for the disk"
        write(path, pieces)

    def schedule(t: int) -> float:
        if t == 3 * STEPS:
            assert paths(folder) == []
            begun.set()
        return 0.001

    monkeypatch.setattr(checkpoint, "write", hang)
    run = fit(run_dir=folder, max_epochs=4, checkpoint_every=1, schedule=schedule)
    assert names(folder)[-1:] == name(4 * STEPS)
    assert run.fingerprint == fit(max_epochs=4).fingerprint


def test_the_best_is_written_however_slow_the_disk_is(
    writer: Callable[..., Writer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that wait while the first is written, the best and the newest are left."""
    begun, go, write = threading.Event(), threading.Event(), checkpoint.write

    def hang(path: Path, pieces: Any) -> None:
        begun.set()
        assert go.wait(DEADLINE)
        write(path, pieces)

    monkeypatch.setattr(checkpoint, "write", hang)
    slow = writer(keep=1)
    for step, metric in enumerate([0.9, 0.5, None, 0.2, None, 0.7, 0.4], 1):
        slow.submit({"step": step, "metric": metric}, {"w": np.zeros(1, np.float32)})
        assert begun.wait(DEADLINE)
    assert sorted(slow._tasks.values()) == [0.2, 0.4, 0.9]
    go.set()
    in_time(slow.flush)
    assert [path.stem for path in paths(tmp_path)] == ["step-000000004", "step-000000007"]


def test_what_goes_wrong_in_the_thread_is_raised_where_it_is_waited_for(writer: Callable[..., Writer]) -> None:
    message = "^w is of type complex64, which a checkpoint cannot hold: convert it$"
    broken = writer()
    broken.submit({"step": 1, "metric": None}, {"w": np.zeros(2, np.complex64)})
    with pytest.raises(WrongType, match=message):
        in_time(broken.flush)
    with pytest.raises(WrongType, match=message):
        in_time(lambda: broken.submit({"step": 2, "metric": None}, {"w": np.zeros(2)}))
    in_time(broken.close)


def test_closing_writes_what_waits(writer: Callable[..., Writer], tmp_path: Path) -> None:
    closing = writer()
    closing.submit({"step": 1, "metric": None}, {"w": np.zeros(2)})
    in_time(closing.close)
    assert names(tmp_path) == name(1)


# When


@pytest.mark.parametrize(
    ("every", "means"),
    [
        (1, (1, "steps")), (50, (50, "steps")), (np.int64(7), (7, "steps")), ("50", (50, "steps")),
        ("1 step", (1, "steps")), ("3steps", (3, "steps")), ("1 epoch", (1, "epochs")), (" 2  epochs ", (2, "epochs")),
        ("30 s", (30.0, "seconds")), ("0.5s", (0.5, "seconds")), ("2 seconds", (2.0, "seconds")),
        ("1 second", (1.0, "seconds")), ("5 min", (300.0, "seconds")), ("1.5 minutes", (90.0, "seconds")),
        ("1 minute", (60.0, "seconds")), ("2 h", (7200.0, "seconds")), ("1 hour", (3600.0, "seconds")),
        ("0.5 hours", (1800.0, "seconds")), (2**53, (2**53, "steps")), (str(2**53), (2**53, "steps")),
    ],
)  # fmt: skip
def test_what_a_user_may_write(every: Any, means: tuple[float, str]) -> None:
    assert parse(every) == means
    assert type(parse(every)[0]) is type(means[0])
    ss.Trainer(checkpoint_every=every)


@pytest.mark.parametrize(
    "every",
    ["", " ", "epoch", "0", "0 steps", "0 epochs", "0 s", "0.0 h", "-1", "-1 epoch", "1.5 epochs", "2.5", "1 day", "1 Epoch",
     "1 epoch 2", "one epoch", "1e3", "nan s", "inf s", "1,5 s", "30 ms", "9" * 400, "9" * 5000 + " steps", "none"],
)  # fmt: skip
def test_what_a_user_may_not_write(every: str) -> None:
    with pytest.raises(Invalid) as caught:
        ss.Trainer(checkpoint_every=every)
    assert str(caught.value) == (
        f"checkpoint_every must be a number of steps, or such as '1 epoch', '30 s' or '5 min', got {every!r}"
    )


@pytest.mark.parametrize("every", [1.0, True, False, [1], (1, "epoch"), b"1 epoch", np.float32(1)])
def test_what_is_not_even_a_text(every: Any) -> None:
    with pytest.raises(WrongType) as caught:
        ss.Trainer(checkpoint_every=every)
    assert str(caught.value) == (
        f"checkpoint_every must be a number of steps, or such as '1 epoch' or '30 s', or None, got {every!r}"
    )


def test_numbers_out_of_range() -> None:
    for every, message in ((0, "at least 1"), (-3, "at least 1"), (2**53 + 1, f"at most {2**53}")):
        with pytest.raises(Invalid) as caught:
            ss.Trainer(checkpoint_every=every)
        assert str(caught.value) == f"checkpoint_every must be {message}, got checkpoint_every={every}"


def test_cadence_of_steps_and_epochs() -> None:
    def due(every: Any) -> list[int]:
        cadence = Cadence(every, steps_per_epoch=5)
        return [step for step in range(1, 21) if cadence.due(step)]

    assert due(None) == []
    assert due(7) == [7, 14]
    assert due("1 epoch") == [5, 10, 15, 20]
    assert due("3 epochs") == [15]
    assert due("1000 h") == []
    assert [Cadence(every, 5).seconds for every in (None, 7, "3 epochs", "3 min")] == [0.0, 0.0, 0.0, 180.0]


def test_cadence_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(monotonic=lambda: clock.now))
    cadence, due = Cadence("30 s", 5), []
    for seconds in (0, 29.5, 30, 31, 59, 61, 200, 201, 229.5, 230):
        clock.now = 100.0 + seconds
        if cadence.due(1):
            due.append(seconds)
    assert due == [30, 61, 200, 230]  # counted from the last one, not made up for
