"""profile: where a step's time goes. It changes no bit, its shares add up, its trace is in order, and every end closes it."""

from __future__ import annotations

import gzip
import json
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import samestep as ss
from samestep.backends import times
from samestep.backends.steps import Made, Steps
from samestep.backends.times import OURS, Times, covered, each_timed, keep, timed, timed_as
from samestep.backends.torch import profile as theirs
from samestep.backends.torch.backend import TorchBackend
from samestep.data.feed import Batch, Pass
from samestep.devices import cpu, gpu
from samestep.errors import Invalid, WrongType
from samestep.models.torch import mlp
from samestep.training.fit import Fit
from samestep.training.profile import ROWS, Profile
from samestep.training.replicas import Replicas

X = np.random.default_rng(0).standard_normal((120, 4)).astype(np.float32)
Y = np.arange(120) % 3
Event = dict[str, Any]


class Slow:
    """Examples that are read while a fit goes on."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: Any) -> tuple[Any, Any]:
        return X[i], Y[i]


@pytest.fixture(autouse=True)
def nothing_is_kept_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("samestep.backends.workers.cores", lambda: 2)
    yield
    assert times._now is None


def fit(profile: Any = None, data: Any = None, **settings: Any) -> ss.Run:
    given = {"max_epochs": 2, "batch_size": 8, "shards": 4, "devices": "cpu", "progress": False, "profile": profile}
    model = mlp((4, 3), seed=1)
    return ss.Trainer(**given | settings).fit(model, data or ss.Data(train=(X, Y), test=(X[:20], Y[:20])))


def events(file: str | Path) -> list[Event]:
    content = json.loads(Path(file).read_bytes())
    assert content["displayTimeUnit"] == "ms"
    return list(content["traceEvents"])


def ours(file: str | Path) -> list[Event]:
    return [event for event in events(file) if event["pid"] == OURS and event["ph"] == "X"]


def tracks(found: list[Event]) -> dict[str, set[str]]:
    """The names of threads, without their numbers, and of what they did."""
    names = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name" and e["pid"] == OURS}
    done: dict[str, set[str]] = defaultdict(set)
    for event in found:
        if event["ph"] == "X" and event["pid"] == OURS:
            done[names[event["tid"]].rpartition("_")[0] or names[event["tid"]]].add(event["name"])
    return done


def rows(err: str) -> dict[str, list[str]]:
    """The table, as it was printed: the name of each row → its words."""
    lines = err[err.index("seconds") :].splitlines()[1:]
    return {words[0]: words[1:] for line in lines if (words := line.split()) and words[-1][-1] in "%0123456789"}


def nested(found: list[Event]) -> None:
    """On each track, what begins within something ends within it."""
    by_track: dict[Any, list[Event]] = defaultdict(list)
    for event in found:
        if event["ph"] == "X":
            by_track[event["pid"], event["tid"]].append(event)
    for mine in by_track.values():
        open_: list[float] = []
        for event in sorted(mine, key=lambda event: (event["ts"], -event["dur"])):
            ended = event["ts"] + event["dur"]
            assert event["dur"] >= 0
            while open_ and open_[-1] <= event["ts"] + 1e-3:
                open_.pop()
            assert not open_ or ended <= open_[-1] + 1e-3, event
            open_.append(ended)


# What is written


def test_bits_are_the_same_and_the_trace_tells_what_was_done(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    plain, told = fit(), fit(file, run_dir=tmp_path / "run")
    assert (plain.fingerprint, plain.fingerprints) == (told.fingerprint, told.fingerprints)
    assert "profile" not in json.dumps(told.recipe)
    found = events(file)
    nested(found)
    mine = ours(file)
    assert [(a["ts"], -a["dur"]) for a in mine[:-1]] == sorted((a["ts"], -a["dur"]) for a in mine[:-1])
    assert mine[0]["name"] == "fit"
    assert mine[0]["ts"] == 0
    assert all(e["ts"] >= 0 and e["ts"] + e["dur"] <= mine[0]["dur"] for e in mine if e["name"] != "checkpoints")
    done = tracks(found)
    assert done["samestep"] == {"compute", "data", "exchange", "update", "waiting"}
    assert done["samestep-checkpoint"] == {"checkpoints"}
    most = {"fit", "steps", "data", "exchange", "looking", "evaluation", "checkpoints", "checks"}
    assert done["MainThread"] >= most
    steps = [event["args"]["step"] for event in mine if event["name"] == "update"]
    assert list(dict.fromkeys(steps)) == list(range(30))
    assert {event["args"]["steps"] for event in mine if event["name"] == "steps"} > {1}
    assert "step" in tracks(events(fit(file, capture=False) and file))["MainThread"]
    shards = [(e["args"]["step"], e["args"]["shard"]) for e in mine if "shard" in e["args"] and e["args"]["step"] == 7]
    assert sorted(shards) == [(7, shard) for shard in range(4)]
    err = capfd.readouterr().err
    assert "torch's profiler watched steps 10 to 19.\n" in err
    assert err.endswith(f"Open it at https://ui.perfetto.dev: {file}\n")


def test_operations_lie_within_what_samestep_did(tmp_path: Path) -> None:
    """So the clocks are the same: in 10 to 19, each operation of a worker lies in a task of that worker."""
    fit(tmp_path / "trace.json")
    found = events(tmp_path / "trace.json")
    (watched,) = [event for event in found if event["name"] == "watched"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["name"] == "thread_name"}
    tasks: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for e in found:
        if e["ph"] == "X" and e["pid"] == OURS and e["name"] in ("compute", "update"):
            tasks[names[OURS, e["tid"]]].append((e["ts"], e["ts"] + e["dur"]))
    operations = [e for e in found if e.get("cat") == "cpu_op" and e["name"] == "aten::addmm"]
    inside = [
        any(lo - 200 <= e["ts"] and e["ts"] + e["dur"] <= hi + 200 for lo, hi in tasks[names[e["pid"], e["tid"]]])
        for e in operations
    ]
    assert len(inside) >= 10 * 4
    assert np.mean(inside) > 0.9
    assert all(watched["ts"] - 200 <= e["ts"] <= watched["ts"] + watched["dur"] + 200 for e in operations)


def test_the_shares_add_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path / "trace.json")
    found = rows(capfd.readouterr().err)
    whole = found.pop("fit")
    assert whole[:2] == ["30", "steps"]
    assert whole[-1] == "100.0%"
    assert set(found) <= set(ROWS)
    # the last words are seconds, a step with its unit, share and perhaps the seconds of others
    shares = [next(word for word in words if word.endswith("%")) for words in found.values()]
    assert sum(float(share[:-1]) for share in shares) == pytest.approx(100, abs=0.06 * len(shares))
    seconds = [float(words[words.index(share) - 3]) for words, share in zip(found.values(), shares, strict=True)]
    assert sum(seconds) == pytest.approx(float(whole[2]), abs=0.001 * len(seconds))
    assert float(found["compute"][-1]) > 0  # of the workers


def test_a_name_that_ends_in_gz_is_compressed(tmp_path: Path) -> None:
    fit(tmp_path / "trace.json.gz", max_epochs=1)
    content = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert any(event["name"] == "looking" for event in content["traceEvents"])


def test_true_means_a_file_in_the_run_folder_or_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fit(True, max_epochs=1)
    fit(True, max_epochs=1, run_dir="run")
    assert ours("profile.json")
    assert ours("run/profile.json")
    assert not list(tmp_path.rglob("*.tmp"))


def test_readers_have_tracks_of_their_own(tmp_path: Path) -> None:
    fit(tmp_path / "trace.json", ss.Data(train=Slow(), readers=None), max_epochs=1)
    assert tracks(events(tmp_path / "trace.json"))["samestep-read"] == {"data"}
    fit(tmp_path / "here.json", ss.Data(train=Slow(), readers=0), max_epochs=1)
    done = tracks(events(tmp_path / "here.json"))
    assert "samestep-read" not in done
    assert "data" in done["MainThread"]


def test_a_resumed_fit_counts_its_own_steps(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fit(None, run_dir=tmp_path / "run", max_epochs=1)
    run = fit(tmp_path / "trace.json", run_dir=tmp_path / "run", max_epochs=3)
    assert run.fingerprint == fit(max_epochs=3).fingerprint
    err = capfd.readouterr().err
    assert rows(err)["fit"][:2] == ["30", "steps"]
    assert "watched steps 25 to 34.\n" in err


def test_a_finished_run_has_no_steps(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fit(None, run_dir=tmp_path / "run", max_epochs=1)
    fit(tmp_path / "trace.json", run_dir=tmp_path / "run", max_epochs=1)
    err = capfd.readouterr().err
    assert rows(err)["fit"][:2] == ["0", "steps"]
    assert "torch's profiler saw no step.\n" in err


def test_a_short_fit_is_watched_as_a_whole(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path / "trace.json", max_epochs=1)
    assert "watched steps 0 to 14.\n" in capfd.readouterr().err


def test_other_frameworks_have_samesteps_own_times(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchBackend, "profiler", lambda self, devices: None)
    plain = fit(tmp_path / "trace.json")
    assert plain.fingerprint == fit().fingerprint
    assert {event["pid"] for event in events(tmp_path / "trace.json")} == {OURS}
    assert "torch tells nothing of its devices: these are samestep's own times.\n" in capfd.readouterr().err


class InTurn(Steps):
    """Several steps in one call, one after the other."""

    def __init__(self, group: Replicas) -> None:
        self.group = group

    def most(self, pass_: Pass) -> int:
        return 1000

    def __call__(self, batches: Sequence[Batch], rates: Sequence[float], t: int) -> list[Made]:
        return [
            (self.group.step(batch, lr, t + i), self.group.replicas[0].fingerprint())
            for i, (batch, lr) in enumerate(zip(batches, rates, strict=True))
        ]


def test_a_call_of_several_steps_ends_where_the_profiler_starts_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = fit(batch_size=4)
    monkeypatch.setattr(TorchBackend, "steps", lambda self, group: InTurn(group))
    assert fit(tmp_path / "trace.json", batch_size=4).fingerprints == plain.fingerprints
    calls = [event["args"] for event in ours(tmp_path / "trace.json") if event["name"] == "steps"]
    ends = [one["step"] + one["steps"] for one in calls]
    assert {10, 20} <= set(ends)
    assert max(one["steps"] for one in calls) > 1
    found = events(tmp_path / "trace.json")
    nested(found)
    (watched,) = [event for event in found if event["name"] == "watched"]
    inside = [e["args"]["step"] for e in found if e["name"] == "steps" and 0 < e["ts"] - watched["ts"] < watched["dur"]]
    assert (min(inside), max(inside) < 20) == (10, True)


# What goes wrong


@pytest.mark.parametrize("step", [5, 14, 25])
def test_a_fit_that_fails_still_writes_it(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = Fit.stretch

    def fails(self: Fit, *given: Any) -> int:
        if self.step == step:
            raise RuntimeError("broken on purpose")
        return min(before(self, *given), step - self.step if self.step < step else 1)

    monkeypatch.setattr(Fit, "stretch", fails)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        fit(tmp_path / "trace.json")
    nested(events(tmp_path / "trace.json"))
    err = capfd.readouterr().err
    assert rows(err)["fit"][:2] == [str(step), "steps"]
    assert {5: "saw no step", 14: "watched steps 10 to 13", 25: "watched steps 10 to 19"}[step] in err
    monkeypatch.undo()
    assert fit(tmp_path / "again.json").fingerprint == fit().fingerprint  # PyTorch's profiler can be started again


@pytest.mark.parametrize("times_", [1, 2])
def test_ctrl_c_still_writes_it(
    times_: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before, left = Fit.look, [times_]

    def interrupted(self: Fit, *given: Any) -> Any:
        while left[0]:
            left[0] -= 1
            signal.raise_signal(signal.SIGINT)
        return before(self, *given)

    monkeypatch.setattr(Fit, "look", interrupted)
    if times_ == 1:
        assert fit(tmp_path / "trace.json").interrupted
    else:
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path / "trace.json")
    nested(events(tmp_path / "trace.json"))
    assert rows(capfd.readouterr().err)["fit"][-1] == "100.0%"


def test_a_profiler_that_fails_costs_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def failing(when: str) -> Iterator[list[Event]]:
        if when == "start":
            raise RuntimeError("no CUPTI")
        yield [{"never": "shown"}]
        raise RuntimeError("no CUPTI")

    for when in ("start", "end"):
        monkeypatch.setattr(TorchBackend, "profiler", lambda self, devices, when=when: failing(when))
        with pytest.warns(UserWarning, match="profile: torch's profiler failed: no CUPTI"):
            run = fit(tmp_path / "trace.json")
        assert run.fingerprint == fit().fingerprint
        assert {event["pid"] for event in events(tmp_path / "trace.json")} == {OURS}


def test_a_file_that_cannot_be_written_costs_no_run(tmp_path: Path) -> None:
    file = tmp_path / f"{'a' * 300}.json"
    with pytest.warns(UserWarning, match="cannot be written: File name too long"):
        run = fit(file, max_epochs=1)
    assert run.fingerprint == fit(max_epochs=1).fingerprint


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for wrong, message in (
        (tmp_path, f"profile: {tmp_path} is a folder: name a file in it, such as {tmp_path / 'profile.json'}"),
        (
            tmp_path / "no" / "a.json",
            f"profile: the folder {tmp_path / 'no'} is not there: make it, or name another one",
        ),
        ("", "profile: . is a folder"),
    ):
        with pytest.raises(Invalid, match=message.replace(".", r"\.")):
            ss.Trainer(profile=wrong)
    for kind in (3, b"a", "a\0b", ["a"]):
        with pytest.raises(WrongType, match="profile must be a path, True or None, got profile="):
            ss.Trainer(profile=kind)  # type: ignore[arg-type]
    ss.Trainer(profile=tmp_path / "run" / "a.json", run_dir=tmp_path / "run")  # which will be there
    ss.Trainer(profile=False)
    assert list(tmp_path.iterdir()) == []


# The parts


def test_without_a_profile_nothing_is_made() -> None:
    assert timed("data") is timed("compute", task=1)
    tasks: list[Callable[[], int]] = [lambda: 1]
    assert each_timed("compute", tasks) is tasks


def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A clock that is set by hand, in nanoseconds."""
    now = [0]
    monkeypatch.setattr(times, "perf_counter_ns", lambda: now[0])
    return now


def test_each_moment_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock(monkeypatch)
    kept = Times()
    keep(kept)
    try:
        for name, inner, lasts in (("compute", "data", 10), ("evaluation", "compute", 100)):
            with timed(name):
                now[0] += lasts
                with timed(inner):
                    now[0] += 2 * lasts

                @timed_as("data")
                def read(lasts: int = lasts) -> int:
                    now[0] += 4 * lasts
                    return lasts

                assert read() == lasts
    finally:
        keep(None)
    assert kept.first.sums == {"compute": 10, "data": 60, "evaluation": 700}
    assert [e["name"] for e in kept.trace(770)][2:] == [
        "fit",
        "compute",
        "data",
        "data",
        "evaluation",
        "compute",
        "data",
    ]


def test_what_others_do_meanwhile_counts_to_the_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock(monkeypatch)
    kept = Times()
    keep(kept)

    def work() -> None:
        with timed("compute"):
            now[0] += 5

    try:
        for name in ("evaluation", "compute"):
            with timed(name):
                thread = threading.Thread(target=work, name=f"of {name}")
                thread.start()
                thread.join()
    finally:
        keep(None)
    assert {track.name: dict(track.sums) for track in kept.tracks[1:]} == {
        "of evaluation": {"evaluation": 5},
        "of compute": {"compute": 5},
    }


def test_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "KEPT", 3)
    kept = Times()
    keep(kept)
    for _ in range(5):
        with timed("data"):
            pass
    keep(None)
    assert len(kept.events) == 3
    assert kept.first.sums["data"] > 0


def test_steps_are_made_up_to_where_the_profiler_starts_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []

    @contextmanager
    def profiler() -> Iterator[list[Event]]:
        seen.append(("start", profile.times.step))  # type: ignore[union-attr]
        yield []
        seen.append(("end", profile.times.step))  # type: ignore[union-attr]

    settings = SimpleNamespace(profile="a.json", run_dir=None)
    backend = SimpleNamespace(name="torch", profiler=lambda devices: profiler())
    one: Any = SimpleNamespace(
        world=SimpleNamespace(rank=0), settings=settings, backend=backend, devices=[], last=100, step=3
    )
    profile = Profile(one)
    assert profile.left(3) > 1000
    profile.begin()
    step, made = 3, []
    while step < 60:
        profile.at(step)
        made.append(min(profile.left(step), 8))
        step += made[-1]
    keep(None)
    assert made[:5] == [8, 2, 8, 2, 8]
    assert seen == [("start", 13), ("end", 23)]


def test_the_others_have_none() -> None:
    one: Any = SimpleNamespace(world=SimpleNamespace(rank=1), settings=SimpleNamespace(profile=True, run_dir="run"))
    one.backend = SimpleNamespace(profiler=lambda devices: pytest.fail("asked"))
    profile = Profile(one)
    profile.begin()
    profile.at(0)
    profile.close()
    assert profile.left(0) > 1000


def test_the_time_that_intervals_cover() -> None:
    draw = np.random.default_rng(0)
    for _ in range(200):
        lo = draw.integers(0, 30, 6)
        spans = [(float(a), float(a + b)) for a, b in zip(lo, draw.integers(0, 8, 6), strict=True)]
        slow = sum(any(a <= t + 0.5 <= b for a, b in spans) for t in range(5, 25))
        assert covered(spans, 5, 25) == slow


def kernels(events: list[Event], base: float) -> list[Event]:
    """What a GPU's track looks like: two streams, of which kernels overlap; and what does not keep it busy."""
    kinds = [
        ("kernel", 10, 30, 7),
        ("gpu_memcpy", 20, 30, 13),
        ("kernel", 90, 10, 7),
        ("gpu_user_annotation", 0, 200, 7),
    ]
    return [
        *({"ph": "X", "cat": kind, "name": "k", "pid": 0, "tid": stream, "ts": base + ts, "dur": dur,
           "args": {"device": 0, "stream": stream}} for kind, ts, dur, stream in kinds),
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "ts": base, "args": {"name": "stream 7"}},
        {"ph": "X", "name": "PyTorch Profiler (0)", "pid": "Traces", "tid": "t", "ts": base, "dur": 1}, *events,
    ]  # fmt: skip


def test_the_busy_and_the_idle_time_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As this machine has none: with the events that PyTorch writes for one added to its file."""
    waited: list[int] = []
    write = torch.profiler.profile.export_chrome_trace

    def export(self: Any, path: str) -> None:
        write(self, path)
        content = json.loads(Path(path).read_text())
        marks = [e["ts"] for e in content["traceEvents"] if e.get("name") == theirs.MARK]
        content["traceEvents"] = kernels(content["traceEvents"], max(marks) + 1000)
        Path(path).write_text(json.dumps(content).replace('"stream": 13', '"occupancy": Infinity'))

    made = torch.profiler.profile

    def on_cpu(activities: Any, **given: Any) -> Any:
        assert len(activities) == 2
        return made(activities=activities[:1], **given)

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    monkeypatch.setattr(theirs, "profile", on_cpu)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(TorchBackend, "profiler", lambda self, devices: theirs.watching([gpu(0), gpu(0), cpu()]))
    fit(tmp_path / "trace.json")
    assert waited == [0, 0]
    found = events(tmp_path / "trace.json")
    (watched,) = [event for event in found if event["name"] == "watched"]
    assert watched["args"]["cuda:0"] == pytest.approx(50)  # 10 to 50 and 90 to 100, in microseconds
    (first, *_) = sorted((e for e in found if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    assert watched["ts"] < first["ts"] < watched["ts"] + watched["dur"]
    assert [e["args"]["name"] for e in found if e["name"] == "thread_name" and e["tid"] == 7 and e["pid"] == 0] == [
        "stream 7"
    ]
    lines = capfd.readouterr().err.splitlines()
    (busy,) = [line.split() for line in lines if line.startswith("cuda:0")]
    (idle,) = [line.split() for line in lines if line.lstrip().startswith("idle")]
    assert busy[1:4] == ["busy,", "while", "watched"]
    assert busy[5:7] == ["5", "µs"]  # a step, of ten
    assert float(busy[-1][:-1]) + float(idle[-1][:-1]) == pytest.approx(100)


def test_marks_are_known_on_both_clocks() -> None:
    with theirs.watching([cpu()]) as found:
        moments = []
        for i in range(3):
            before = times.perf_counter_ns()
            with torch.profiler.record_function(f"moment {i}"):
                moments.append((before / 1e3, times.perf_counter_ns() / 1e3))
    at = {event["name"]: event["ts"] for event in found if event.get("cat") == "user_annotation"}
    assert list(at) == [f"moment {i}" for i in range(3)]
    for i, (lo, hi) in enumerate(moments):
        assert lo - 1000 < at[f"moment {i}"] < hi + 1000  # microseconds; another process may come in between
    assert all(a < b for a, b in pairwise(at.values()))
    assert os.environ["KINETO_LOG_LEVEL"]
