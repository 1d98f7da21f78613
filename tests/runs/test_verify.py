"""verify: what it runs, that it finds what depends on the number of devices or on being resumed, and what it says.

Most of it are real runs of a small script, in processes of their own.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from samestep.errors import Invalid
from samestep.processes.launch import Processes
from samestep.processes.place import OVERRIDES
from samestep.runs import verify as module
from samestep.runs.diff import Difference, describe, to_json
from samestep.runs.run import Run
from samestep.runs.verify import Job, Report, Row, Runs, Start, Way, choose, counts, draw, table
from samestep.screen import cli

STEPS = 40
SCRIPT = """
import os, sys
import numpy as np
import torch
import samestep as ss

random = np.random.default_rng(0)
x, y = random.standard_normal((64, 6)).astype("float32"), random.integers(0, 3, 64)
torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
model = torch.nn.Sequential(torch.nn.Linear(6, 256), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(256, 3))
calls = []  # several threads add to it

def loss(output, y):
    calls.extend([0] * (len(y) == 2 and output.requires_grad))  # a shard that is trained
    value = torch.nn.functional.cross_entropy(output, y, reduction="none")
    TWIN
    return value

trainer = ss.Trainer(max_epochs=10, batch_size=16, devices=5, optimizer=ss.sgd(momentum=0.9), loss=loss, seed=3,
                     run_dir="mine", checkpoint_every=None, resume=False, rehearse=False, check_every=None)
trainer.fit(model, (x, y))
"""


class Done(NamedTuple):
    status: object
    out: str
    err: str


Verify = Callable[..., Done]


@pytest.fixture(autouse=True)
def sealed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder to work in; temporary folders are made beside it."""
    for name in ("here", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Verify:
    def call(*arguments: object) -> Done:
        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["samestep", "verify", *map(str, arguments)])
            patch.setenv(OVERRIDES, "{}")
            with pytest.raises(SystemExit) as ended:
                cli.run()
                sys.exit(0)
        return Done(ended.value.code or 0, *capsys.readouterr())

    return call


def script(twin: str = "pass", text: str = SCRIPT) -> Path:
    path = Path("../script.py")
    path.write_text(text.replace("TWIN", twin))
    return path


def left() -> list[str]:
    """What verify has left behind; PyTorch makes a temporary folder of its own."""
    folders = Path(".").iterdir(), Path("../temporary").glob("samestep*")
    return sorted(str(path) for folder in folders for path in folder)


# Real runs


def test_the_same_in_every_way(verify: Verify) -> None:
    options = ["--devices", "1,2,9", "--processes", "1,2", "--kill", "1", "--seed", "5", "--keep", "kept", "--json"]
    done = verify(script(), *options, "--", "7")
    assert (done.status, done.err) == (0, "")
    told = json.loads(done.out)
    ways = ["1 device", "2 devices", "9 devices", "2 processes", "2 processes x 2 devices"]
    assert [run["way"] for run in told["runs"]][:5] == ways
    assert [run["verdict"] for run in told["runs"]] == ["reference", "same", "does not fit", *["same"] * 3]
    ran = [run for run in told["runs"] if run["verdict"] != "does not fit"]
    assert {run["steps"] for run in ran} == {STEPS}
    assert (told["same"], told["seed"], told["kept"], told["difference"]) == (True, 5, "kept", None)

    runs = [Run.load(run["folder"]) for run in ran]
    assert [len(run.devices) for run in runs][:4] == [1, 2, 2, 4]  # not the script's own
    assert len({run.fingerprint for run in runs}) == len({tuple(run.fingerprints) for run in runs}) == 1
    assert {run["fingerprint"] for run in ran} == {runs[0].fingerprint}
    assert runs[0].recipe["initial"] == initial(7)  # the script was given its argument

    # what the seed decides: killed when, how, and resumed where
    chance, fitting = random.Random(5), [Way(1), Way(2), Way(1, 2), Way(2, 2)]
    first, then, ranks, step = draw(fitting, STEPS, "random", chance)
    who, killed = "" if len(ranks) == first.processes else f"rank {ranks[0]} ", ran[-1]
    assert killed["way"] == f"{first}, {who}killed at step {step}, then {then}"
    assert (killed["killed_at"], len(runs[-1].devices)) == (step, then.total)
    events = [json.loads(line) for line in Path(killed["folder"], "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "resume"] == [killed["resumed_at"]]
    assert 0 < killed["resumed_at"] < STEPS
    assert not Path("mine").exists()


def initial(seed: int) -> str:
    import torch

    from samestep.fingerprint import of_weights

    torch.manual_seed(seed)
    layers = torch.nn.Linear(6, 256), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(256, 3)
    return of_weights({name: tensor.numpy() for name, tensor in torch.nn.Sequential(*layers).state_dict().items()})


def test_a_loss_that_knows_its_rank(verify: Verify) -> None:
    twin = script('value = value * (1 + int(os.environ.get("RANK", 0)))')
    done = verify(twin, "--devices", 1, "--processes", "1,2", "--kill", 0)
    assert (done.status, done.err) == (1, "")
    lines = done.out.splitlines()
    assert [line.split()[-1] for line in lines[1:3]] == ["reference", "DIFFERS"]
    prints = [line.split()[-2] for line in lines[1:3]]
    assert prints[0] != prints[1]
    assert lines[3:5] == ["A: 1 device; B: 2 processes", "they differ first at step 0, in shards 4, 5, 6 and 7"]
    folder = re.fullmatch(r"the runs are kept in (.*)", lines[-1])
    assert folder, lines[-1]
    kept = [Run.load(Path(folder[1], name)) for name in ("1-device", "2-processes")]  # to look at with `samestep diff`
    assert [run.fingerprint[:16] for run in kept] == prints


def test_a_model_that_counts_its_calls(verify: Verify) -> None:
    """Every copy of the model counts for itself: the more devices, the later a count is reached."""
    text = SCRIPT.replace("trainer =", COUNTER + "trainer =")
    done = verify(script(text=text), "--devices", "1,2", "--processes", 1, "--kill", 0, "--json", "--keep", "kept")
    told = json.loads(done.out)
    assert (done.status, told["same"], told["differs"]) == (1, False, "2 devices")
    assert told["difference"]["first_step"] == 5  # with two devices, a copy has been called 40 times after 10 steps
    assert told["difference"]["verdict"].startswith(
        f"they differ first at step {told['difference']['first_step']}, in "
    )


COUNTER = """
class Counting(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * (2 if self.calls > 40 else 1)

model = Counting(model)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one thread, so that a device has one copy
"""


def test_a_loss_that_counts_its_calls(verify: Verify) -> None:
    """From the 20th step of a process on, all are other ones; nothing but a resume shows it."""
    text = SCRIPT.replace("loss=loss", "loss=ss.per_shard(loss)")  # which is not tried before: only steps are counted
    twin = script(f"value = value * (2 if len(calls) > {8 * 19} else 1)", text)
    options = ["--devices", 1, "--processes", 1, "--kill", 1, "--resume-on", "same", "--json"]
    for seed in range(3):  # a kill that comes before the first checkpoint was written, on a busy machine, shows nothing
        done = verify(twin, *options, "--seed", seed, "--keep", f"kept-{seed}")
        told = json.loads(done.out)
        killed = told["runs"][-1]
        if killed["resumed_at"]:
            break
    assert [run["verdict"] for run in told["runs"]] == ["reference", "DIFFERS"]
    assert 0 < killed["resumed_at"] < STEPS
    assert (done.status, told["differs"]) == (1, killed["way"])
    assert told["difference"]["first_step"] == max(19, killed["resumed_at"])


# What cannot be verified


FAILS = "raise RuntimeError('the disk is on fire')\n"
TWICE = SCRIPT + "ss.Trainer(max_epochs=1, batch_size=8).fit(model, (x, y))\n"
AGAIN = SCRIPT + "trainer.fit(model, (x, y))\n"


def test_a_script_that_fails(verify: Verify) -> None:
    done = verify(script(text=FAILS))
    assert (done.status, done.out) == (2, "")
    lines = done.err.splitlines()
    assert lines[0] == "samestep: ../script.py failed on 1 device with status 1:"
    assert lines[1:3] == ["Traceback (most recent call last):", '  File "../script.py", line 1, in <module>']
    assert lines[-1] == "RuntimeError: the disk is on fire"
    many = verify(script(text="for i in range(50): print(i)\n" + FAILS)).err.splitlines()
    assert len(many) == 21  # not all of it
    assert left() == []


def test_a_script_without_a_fit(verify: Verify) -> None:
    done = verify(script(text="print('hello')"))
    message = "samestep: ../script.py has left no run: a script to verify makes a samestep.Trainer and calls its fit\n"
    assert done == Done(2, "", message)
    assert left() == []


@pytest.mark.parametrize("text", [TWICE, AGAIN], ids=["another fit", "the same fit again"])
def test_a_script_that_fits_twice(text: str, verify: Verify) -> None:
    done = verify(script(text=text), "--epochs", 1)
    assert (done.status, done.out) == (2, "")
    first, why = done.err.splitlines()
    one = "a run folder holds one run, so leave one fit in it"
    assert first == f"samestep: ../script.py failed after its fit had ended ({one}) with status 2:"
    assert why.startswith("samestep: ")
    assert " holds a " in why
    assert left() == []


def test_a_way_that_fails(verify: Verify) -> None:
    """One way works and another does not: that is not the same."""
    twin = script(text="import os\nassert os.environ.get('WORLD_SIZE') != '2', 'not with me'\n" + SCRIPT)
    done = verify(twin, "--devices", 1, "--processes", "1,2", "--kill", 0, "--epochs", 1, "--keep", "kept")
    assert (done.status, done.err) == (1, "")
    lines = done.out.splitlines()
    assert [line.split()[-1] for line in lines[1:3]] == ["reference", "FAILED"]
    assert lines[3] == "../script.py failed on 2 processes:"
    assert "AssertionError: not with me" in lines[4:]
    assert lines[-1] == "the runs are kept in kept"


BAD = {
    "missing.py": "missing.py is not a file",
    "{script} --devices 0": "--devices must be counts such as 1,2,3, got '0'",
    "{script} --devices 1,,2": "--devices must be counts such as 1,2,3, got '1,,2'",
    "{script} --devices cpu": "--devices must be counts such as 1,2,3, got 'cpu'",
    "{script} --processes -1": "--processes must be counts such as 1,2,3, got '-1'",
    "{script} --kill -1": "--kill must be at least 0, got --kill=-1",
    "{script} --epochs 0": "--epochs must be at least 1, got --epochs=0",
    "{script} --resume-on there": "--resume-on must be random, same or a number of devices, got 'there'",
    "{script} --resume-on 0": "--resume-on must be random, same or a number of devices, got '0'",
    "{script} --keep ..": "--keep needs a new or empty folder, got ..: Not empty",
    "{script} --keep {script}": "--keep needs a new or empty folder, got ../script.py: File exists",
    "{script} --keep /proc/nope": "--keep needs a new or empty folder, got /proc/nope: No such file or directory",
}


@pytest.mark.parametrize(("given", "message"), BAD.items(), ids=BAD)
def test_bad_input_is_one_line(given: str, message: str, verify: Verify) -> None:
    done = verify(*given.format(script=script(text="raise SystemExit('the script was run')")).split())
    assert done == Done(2, "", f"samestep: {message}\n")
    assert left() == []


# What is run


def test_choose_does_not_take_the_whole_product() -> None:
    names = "1 device, 2 devices, 3 devices, 8 devices, 2 processes, 3 processes, 2 processes x 3 devices"
    assert ", ".join(map(str, choose([1, 2, 3, 8], [1, 2, 3], 8))) == names
    assert len(choose([1, 2, 3, 8], [1, 2, 3], 8, every=True)) == 12
    assert choose([1, 2], [1, 2], shards=3) == [Way(1, 1), Way(2, 1), Way(1, 2)]  # no mixed one fits
    assert choose([2, 4], [2], shards=8) == [Way(2, 2), Way(4, 2)]
    assert choose([1, 2], [1, 2], shards=4) == [Way(1, 1), Way(2, 1), Way(1, 2), Way(2, 2)]


def test_ways_and_jobs_by_name() -> None:
    names = ["1 device", "3 devices", "2 processes", "2 processes x 3 devices"]
    assert [str(way) for way in (Way(), Way(3), Way(1, 2), Way(3, 2))] == names
    assert (Way().total, Way(3, 2).total) == (1, 6)
    assert str(Job(Path("my.py"), backend="jax")) == "my.py"


def test_counts() -> None:
    assert counts("--devices", " 8, 1,2,2") == [1, 2, 8]
    for text in ("", "1;2", "1.5", "²", "0,1"):
        with pytest.raises(Invalid, match=re.escape(f"--devices must be counts such as 1,2,3, got {text!r}")):
            counts("--devices", text)


def test_draw_resumes_in_another_way() -> None:
    chance, ways = random.Random(0), [Way(1), Way(2), Way(1, 3)]
    drawn = [draw(ways, STEPS, "random", chance) for _ in range(500)]
    assert {first for first, _, _, _ in drawn} == {then for _, then, _, _ in drawn} == set(ways)
    assert all(first != then for first, then, _, _ in drawn)
    assert {step for _, _, _, step in drawn} == set(range(1, STEPS))
    ranks = {tuple(ranks) for first, _, ranks, _ in drawn if first == Way(1, 3)}
    assert ranks == {(0, 1, 2), (0,), (1,), (2,)}  # all, or one of them
    assert drawn[:9] == [draw(ways, STEPS, "random", again) for again in [random.Random(0)] for _ in range(9)]

    alone = [draw([Way(2)], 1, "random", chance) for _ in range(50)]
    assert {(then, step) for _, then, _, step in alone} == {(Way(2), 1)}  # there is no other
    assert draw(ways, 5, "4", chance)[1] == Way(4)
    first, then, _, _ = draw(ways, 5, "same", chance)
    assert first == then


def test_half_of_the_kills_are_of_one_process() -> None:
    def drawn(way: Way, number: float | None) -> list[int]:
        chance: Any = random.Random(0)
        chance.random = lambda: pytest.fail("nothing is to be drawn") if number is None else number
        return draw([way], STEPS, "same", chance)[2]

    assert drawn(Way(1, 2), 0.5) == [0, 1]
    assert len(drawn(Way(1, 2), 0.49)) == 1
    assert drawn(Way(2), None) == [0]


def test_command() -> None:
    train = [sys.executable, "-m", "samestep", "train", "--quiet"]
    own = [*train, "--devices=2", "--run-dir=run", "--resume=auto", "my.py", "--", "--lr", "1"]
    assert Job(Path("my.py"), ["--lr", "1"]).command(Way(2, 3), Path("run")) == own
    built_in = [*train, "--devices=1", "--run-dir=run", "--resume=auto", "--epochs=1", "--checkpoint-every=1"]
    assert Job(epochs=1).command(Way(), Path("run"), every=1) == built_in


# Processes


SHOWS = """
import json, os, sys
if 0: import torch  # a script of PyTorch
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SAMESTEP_OVERRIDES")
print(json.dumps({name: os.environ.get(name) for name in names}))
"""


def test_processes_know_their_places_and_nothing_of_those_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv(OVERRIDES, '{"seed": 1}')
    job, places = Job(script(text=SHOWS)), []
    for way in (Way(), Way(1, 2)):
        with Start(job, way, Path("run")) as start:
            assert start.wait() == 0
        *shown, told = sorted(start.said().splitlines(), key=lambda line: line.startswith("samestep: "))
        assert told.endswith("has made no Trainer, so that the options had no effect")  # by one process for all
        places += [json.loads(line) for line in sorted(shown)]
    settings = [json.loads(place.pop("SAMESTEP_OVERRIDES")) for place in places]
    assert [given["devices"] for given in settings] == ["1", "1", "1"]
    assert not any("seed" in given for given in settings)
    none = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"))
    two = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert places == [none, *(none | two | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01")]


def test_what_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(Processes, "__init__", lambda self, *given: seen.append(given[:4]))
    monkeypatch.setattr(module, "engine_for", lambda script, backend: f"that of {script} and {backend}")
    monkeypatch.setenv(OVERRIDES, '{"seed": 1}')
    env = {name: value for name, value in os.environ.items() if name not in (OVERRIDES, "PYTHONUNBUFFERED")}
    env["PYTHONUNBUFFERED"] = "1"
    job, folder = Job(backend="jax"), Path("run")
    start = Start(job, Way(2), folder)
    Start(job, Way(1, 2), folder, 7)
    assert (start.folder, start.output, start.output.read_bytes(), start.survivors) == (folder, Path("run.txt"), b"", 0)
    assert seen == [
        (job.command(Way(2), folder), 1, env, "torch"),
        (job.command(Way(1, 2), folder, 7), 2, env, "that of None and jax"),
    ]


def test_the_end_of_what_was_printed() -> None:
    start = Start.__new__(Start)
    start.output = Path("run.txt")
    start.output.write_bytes("".join(f"line {i}\n" for i in range(30)).encode() + b"\xff\n\n")
    assert start.said().splitlines() == [f"line {i}" for i in range(11, 30)] + ["\ufffd"]


def test_waiting_for_a_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked for until a process has ended, with whatever status."""
    start, states = Start.__new__(Start), [[None, None], [None, None], [None, 0]]
    monkeypatch.setattr(start, "poll", lambda: states.pop(0), raising=False)
    answers = [False, False, True]
    assert start.until(lambda: answers.pop(0)) is True
    assert (answers, states) == ([], [[None, 0]])
    assert start.until(lambda: False) is False
    assert states == []


@pytest.mark.parametrize(
    ("ranks", "states", "hit"),
    [
        ([0], [-9, None, 1], True),
        ([0, 1], [0, -9, None], True),
        ([1, 2], [None, 0, -15], False),
        ([0], [9, -9, None], False),
    ],
)
def test_a_kill_that_came_too_late_is_known(
    ranks: list[int], states: list[int | None], hit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, killed = Start.__new__(Start), list[Any]()
    monkeypatch.setattr(start, "kill", lambda ranks=None: killed.append(ranks), raising=False)
    monkeypatch.setattr(start, "wait", lambda: 0, raising=False)
    monkeypatch.setattr(start, "poll", lambda: states, raising=False)
    monkeypatch.setattr(start, "_read", lambda name: 4711, raising=False)
    assert (start.lose(ranks), start.survivors, killed) == (hit, 1, [ranks, None])


def test_a_kill_at_the_very_start_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is killed before the number of the process is known."""
    start, told, events = Start.__new__(Start), iter([None, None, 4711]), list[Any]()
    monkeypatch.setattr(start, "_read", lambda name: events.append(name) or next(told), raising=False)
    monkeypatch.setattr(start, "kill", lambda ranks=None: events.append(ranks), raising=False)
    monkeypatch.setattr(start, "wait", lambda: 0, raising=False)
    states = iter([[None], [None], [-9]])
    monkeypatch.setattr(start, "poll", lambda: next(states), raising=False)
    assert start.lose([0])
    assert events == ["0.pid"] * 3 + [[0], None]


WORKER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
child.wait()
"""


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has asked for its status yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited for a minute"
        time.sleep(0.01)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_script_started_dies_with_it() -> None:
    with Start(Job(script(text=WORKER)), Way(), Path("run")) as start:
        assert start.until(lambda: start.output.read_text().endswith("\n"))
        worker = int(start.output.read_text())
        assert start.lose([0])
        assert start.survivors == 0
    wait_for(lambda: gone(worker))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["TERM", "INT"])
def test_a_signal_ends_what_was_started(number: int, status: int) -> None:
    command = [sys.executable, "-m", "samestep", "verify", str(script(text=WORKER)), "--keep", "kept"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        output = Path("kept/1-device.txt")
        worker = int(wait_for(lambda: output.exists() and output.read_text()))
        process.send_signal(number)
        assert process.wait(60) == status
    wait_for(lambda: gone(worker))


def test_steps_are_read_from_the_end_of_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.runs.verify.TAIL", 200)
    start = Start.__new__(Start)
    start.folder, log = tmp_path, tmp_path / "events.jsonl"
    assert start.steps() == 0
    line = json.dumps({"event": "steps", "first": 22, "fingerprint": ["a", "b", "c"]}) + "\n"
    log.write_text(9 * line.replace("22", "10") + line + '{"event": "epoch"}\n')
    assert start.steps() == 25
    log.write_text(log.read_text() + line.replace("22", "30")[:-1])  # not yet whole
    assert start.steps() == 25
    log.write_text(line)
    assert start.steps() == 25
    log.write_text('{"event": "start"}\n')
    assert start.steps() == 0
    log.write_text(4 * line)
    for tail, steps in ((len(line), 25), (len(line) - 1, 0)):  # so much is read and no more
        monkeypatch.setattr("samestep.runs.verify.TAIL", tail)
        assert start.steps() == steps


# What is shown


def test_conclusion() -> None:
    rows = [Row("1 device", verdict="reference", steps=60, fingerprint="ab" * 32)]
    assert Report("my.py", 0, rows).conclusion() == f"the same in 1 way: 60 steps, fingerprint {'ab' * 32}"
    more = [*rows, Row("2 devices", verdict="same"), *(Row("killed", verdict="same", killed_at=i) for i in (1, 2, 3))]
    assert (
        Report("my.py", 0, more)
        .conclusion()
        .startswith("the same in 2 ways and after 3 kills: 60 steps, fingerprint ab")
    )
    assert Report("my.py", 0, more[1:]).conclusion() == "the same in 1 way and after 3 kills: 0 steps, fingerprint "
    rows += [
        Row("2 devices", verdict="same", steps=60, fingerprint="ab" * 32),
        Row("9 devices", verdict="does not fit"),
        Row("2 devices, killed ...", verdict="same", killed_at=3, resumed_at=2, steps=60, fingerprint="ab" * 32),
        Row("1 device, killed ...", verdict="not killed", killed_at=59, steps=60, fingerprint="ab" * 32),
    ]
    report = Report("my.py", 0, rows, kept="here")
    assert report.same
    assert report.conclusion().splitlines() == [
        f"the same in 2 ways and after 1 kill: 60 steps, fingerprint {'ab' * 32}",
        "1 run ended before the kill: more steps are needed",
        "the runs are kept in here",
    ]
    columns = [[str(cell) for cell in column.cells] for column in table(report).columns]
    assert columns[0] == [row.way for row in rows]
    assert columns[1:3] == [["60", "60", "", "60", "60"], ["", "", "", "2", ""]]
    assert columns[3] == [("ab" * 8) * (row.verdict != "does not fit") for row in rows]
    assert columns[4] == [row.verdict for row in rows]


def test_a_table_to_the_letter() -> None:
    """Where there is little room, the ways are folded, and nothing else."""
    rows = [
        Row("1 device", verdict="reference", steps=1234567, fingerprint="0123456789abcdef" * 4),
        Row("3 devices, killed at step 7, then 2 devices", verdict="does not fit", resumed_at=6),
    ]
    console = Console(width=64, color_system=None)
    with console.capture() as shown:
        console.print(table(Report("my.py", 0, rows)))
    assert [line.rstrip() for line in shown.get().splitlines()] == [
        "way            steps  resumed at  fingerprint",
        "1 device     1234567              0123456789abcdef  reference",
        "3 devices,                     6                    does not fit",
        "killed at",
        "step 7,",
        "then 2",
        "devices",
    ]


def test_a_report_as_json() -> None:
    found = Difference(verdict="differ", kind="loss", first_step=7, shards=[1], steps=60, lengths=(60, 60))
    report = Report("my.py", 3, [Row("1 device", "run", "DIFFERS")], found, "1 device", "here")
    row = {
        "way": "1 device", "folder": "run", "verdict": "DIFFERS", "steps": None, "killed_at": None, "resumed_at": None,
        "fingerprint": "", "message": "",
    }  # fmt: skip
    told = {"same": False, "job": "my.py", "seed": 3, "runs": [row], "difference": json.loads(to_json(found)),
            "differs": "1 device", "kept": "here"}  # fmt: skip
    assert report.to_json() == json.dumps(told, indent=2)
    assert json.loads(Report("my.py", 3).to_json())["difference"] is None


def test_conclusion_where_runs_are_not_the_same() -> None:
    first = Row("1 device", verdict="reference", steps=60, fingerprint="ab" * 32)
    found = Difference(verdict="differ", kind="loss", first_step=7, shards=[1], steps=60, lengths=(60, 60))
    for row, words in (
        (Row("2 devices", verdict="DIFFERS"), ["A: 1 device; B: 2 devices", *describe(found).splitlines()]),
        (Row("2 devices", verdict="FAILED", message="no memory"), ["my.py failed on 2 devices:", "no memory"]),
    ):
        report = Report("my.py", 0, [first, row], kept="here", difference=found, differs="2 devices")
        assert not report.same
        assert report.conclusion().splitlines() == [*words, "the runs are kept in here"]


def test_the_built_in_job_is_one_epoch(monkeypatch: pytest.MonkeyPatch, verify: Verify) -> None:
    seen: list[list[str]] = []

    def command(self: Job, way: Way, folder: Path, every: int | None = None) -> list[str]:
        seen.append([str(self), str(self.epochs), str(way)])
        return [sys.executable, "-c", "raise SystemExit('no data here')"]

    monkeypatch.setattr(Job, "command", command)
    done = verify()
    assert done == Done(2, "", "samestep: the built-in job failed on 1 device with status 1:\nno data here\n")
    assert seen == [["the built-in job", "1", "1 device"]]
    assert os.listdir() == []
    verify("--epochs=3")
    assert seen[1:] == [["the built-in job", "3", "1 device"]]


# What is decided, with stand-ins for the runs


class Pretended:
    """In place of `Runs`: notes what is asked of it; the first run has 4 shards and 9 steps."""

    shards, verdict = 4, "same"

    def __init__(self, job: Job, root: Path, report: Report, tell: Callable[[], None], tidy: bool) -> None:
        self.root, self.report, self.tell = root, report, tell
        self.first = SimpleNamespace(fingerprints=["ab"] * 9)
        self.asked: list[Any] = [tidy]
        LAST[:] = [self]

    def refer(self, way: Way) -> None:
        self.asked.append(way)
        self.report.runs.append(Row(str(way), verdict=self.verdict))
        self.tell()

    def run(self, way: Way) -> None:
        self.asked.append(way)

    def kill(self, number: int, *drawn: Any) -> None:
        self.asked.append((number, *drawn))


LAST: list[Pretended] = []


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Runs", Pretended)
    monkeypatch.setattr(module, "draw", lambda ways, *given: (list(ways), *given[:2]))


@pytest.mark.usefixtures("pretended")
def test_what_verify_asks_for() -> None:
    told: list[str] = []
    report = module.verify(
        Job(), [1, 2, 3], [1, 2], kill=2, resume_on="4", seed=7, tell=lambda report: told.append(report.runs[-1].way)
    )
    drawn = [Way(1), Way(2), Way(3), Way(1, 2), Way(2, 2)], 9, "4"
    others = [Way(2), Way(3), Way(1, 2), Way(2, 2)]
    assert LAST[0].asked == [True, Way(1), *others, (1, *drawn), (2, *drawn)]
    assert (report.job, report.seed, report.kept, told) == ("the built-in job", 7, "", ["1 device"])
    assert left() == []
    module.verify(Job(), [1, 2, 3], [1, 2], every=True, kill=0, resume_on="3", keep=Path("a/b"))
    assert LAST[0].asked == [False, Way(1), Way(2), Way(3), Way(1, 2), Way(2, 2), Way(3, 2)]


@pytest.mark.usefixtures("pretended")
def test_what_verify_asks_for_if_nothing_is_said() -> None:
    assert module.verify(Job()).seed == 0
    drawn = [Way(1), Way(2), Way(3), Way(1, 2), Way(2, 2), Way(1, 3)], 9, "random"
    others = [Way(2), Way(3), Way(8), Way(1, 2), Way(1, 3), Way(2, 2)]
    assert LAST[0].asked == [True, Way(1), *others, *((number, *drawn) for number in (1, 2, 3))]


def test_a_kill_is_resumed_on_what_was_given_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Runs", Pretended)
    for seed in range(20):
        module.verify(Job(), [1], [1], kill=1, seed=seed)
        assert LAST[0].asked[2:] == [(1, Way(1), Way(1), [0], LAST[0].asked[-1][-1])]
        module.verify(Job(), [2], [1, 2], kill=1, seed=seed)
        first, then = LAST[0].asked[-1][1:3]
        assert {first, then} == {Way(2), Way(2, 2)}


@pytest.mark.usefixtures("pretended")
def test_a_resume_on_more_devices_than_shards_is_refused() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Invalid, match=r"^--resume-on 5 needs at least 5 shards, got shards=4$"):
        module.verify(Job(), resume_on="5")
    assert LAST[0].asked == [True, Way(1)]
    assert signal.getsignal(signal.SIGTERM) is before
    assert left() == []


@pytest.mark.usefixtures("pretended")
def test_which_folders_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a verification that fails, and those that were asked for; one that is gone already is no trouble."""
    assert module.verify(Job(), kill=0, keep=Path("new/folder")).kept == "new/folder"
    assert os.listdir("new") == ["folder"]
    monkeypatch.setattr(Pretended, "run", lambda self, way: self.root.exists() and self.root.rmdir())
    assert module.verify(Job(), kill=0).kept == ""
    monkeypatch.undo()
    monkeypatch.setattr(module, "Runs", Pretended)
    monkeypatch.setattr(Pretended, "verdict", "FAILED")
    kept = module.verify(Job(), kill=0).kept
    assert (Path(kept).name[:16], Path(kept).is_dir()) == ("samestep-verify-", True)


class Ended:
    """In place of `Start`: processes that have ended already, after they have left what `does` leaves."""

    does: Callable[[Ended], int] = lambda self: 0
    step, hit = 5, True

    def __init__(self, job: Job, way: Way, folder: Path, every: int | None = None) -> None:
        self.way, self.folder, self.status, self.log = way, folder, 0, folder / "events.jsonl"
        STARTED.append((str(way), every))

    def __enter__(self) -> Ended:
        self.folder.mkdir(exist_ok=True)
        self.status = self.does()
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def until(self, condition: Callable[[], bool]) -> bool:
        return condition()

    def steps(self) -> int:
        return self.step

    def lose(self, ranks: list[int]) -> bool:
        assert ranks == [1, 2]
        return self.hit

    def wait(self) -> int:
        return self.status

    def said(self) -> str:
        return "no memory"


STARTED: list[tuple[str, int | None]] = []


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Runs after a reference of 4 shards, whose folders are removed where they are the same."""
    STARTED.clear()
    monkeypatch.setattr(module, "Start", Ended)
    monkeypatch.setattr(module, "events", lambda log: [json.loads(line) for line in log.splitlines()])
    monkeypatch.setattr(Run, "load", lambda folder: SimpleNamespace(**vars(FIRST)))
    monkeypatch.setattr(module.diff, "compare", lambda one, other: Difference(same=True, verdict="compared"))
    made = Runs(Job(), Path("."), Report("job", 0), lambda: None, tidy=True)
    made.run_folder, made.first, made.shards = Path("1-device"), FIRST, 4  # type: ignore[assignment]
    return made


FIRST = SimpleNamespace(fingerprints=["aa", "bb"], fingerprint="bb", recipe={"shards": "4"}, interrupted=False)


def does(monkeypatch: pytest.MonkeyPatch, *told: str, status: int = 0) -> None:
    """From now on, processes leave a log of these events and end with this status."""

    def work(self: Ended) -> int:
        self.log.write_text("".join(json.dumps({"event": event, "step": i}) + "\n" for i, event in enumerate(told)))
        return status

    monkeypatch.setattr(Ended, "does", work)


def test_the_reference(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    runs.tell = lambda: told.append(runs.report.runs[-1].verdict)
    does(monkeypatch, "start", "steps", "epoch", "end")
    runs.refer(Way(2))
    assert runs.report.runs == [Row("2 devices", "2-devices", "reference", 2, fingerprint="bb")]
    assert (runs.run_folder, runs.shards, STARTED) == (Path("2-devices"), 4, [("2 devices", None)])
    assert told == ["running", "reference"]


ONE = "a run folder holds one run, so leave one fit in it"


@pytest.mark.parametrize(
    ("told", "status", "message"),
    [
        (("end", "resume", "end"), 0, f"the built-in job fits more than once: {ONE}"),
        (("start", "end"), 3, f"the built-in job failed after its fit had ended ({ONE}) with status 3:\nno memory"),
        (("start", "steps"), 3, "the built-in job failed on 1 device with status 3:\nno memory"),
        (
            ("start", "steps"),
            0,
            "the built-in job has left no run: a script to verify makes a samestep.Trainer and calls its fit",
        ),
    ],
)
def test_what_is_no_reference(
    told: tuple[str, ...], status: int, message: str, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    does(monkeypatch, *told, status=status)
    with pytest.raises(Invalid) as caught:
        runs.refer(Way())
    assert str(caught.value) == message


def test_as_many_devices_as_shards_fit(runs: Runs) -> None:
    for way in (Way(4), Way(5), Way(2, 2), Way(3, 2)):
        runs.run(way)
    assert [row.verdict for row in runs.report.runs] == ["same", "does not fit", "same", "does not fit"]
    assert STARTED == [("4 devices", None), ("2 processes x 2 devices", None)]
    assert os.listdir() == []


def test_a_kill_and_what_became_of_it(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the step or after it; each step is saved, before the kill and after it."""
    does(monkeypatch, "start", "steps", "resume", "epoch", "resume", "steps", "epoch", "end")
    for number, step in enumerate((5, 4, 6), 1):
        runs.kill(number, Way(1, 3), Way(2), [1, 2], step)
    way = "3 processes, rank 1 killed at step {}, then 2 devices"
    assert runs.report.runs == [
        Row(way.format(5), "kill-1", "same", 2, 5, 4, "bb"),
        Row(way.format(4), "kill-2", "same", 2, 4, 4, "bb"),
        Row(way.format(6), "kill-3", "not killed", 2, 6, None, "bb"),
    ]
    assert STARTED == [("3 processes", 1), ("2 devices", 1)] * 2 + [("3 processes", 1)]
    monkeypatch.setattr(Ended, "hit", False)
    runs.kill(4, Way(1, 3), Way(2), [1, 2], 5)
    assert runs.report.runs[-1].verdict == "not killed"
    does(monkeypatch, "start", "steps", "epoch", "end")
    monkeypatch.setattr(Ended, "hit", True)
    monkeypatch.setattr(Ended, "lose", lambda self, ranks: True)
    runs.kill(5, Way(1, 300), Way(2), range(300), 5)
    last = Row("300 processes, killed at step 5, then 2 devices", "kill-5", "same", 2, 5, 0, "bb")
    assert runs.report.runs[-1] == last  # from the start


def test_a_kill_whose_resume_fails(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    does(monkeypatch, "start", status=1)
    runs.kill(1, Way(1, 3), Way(2), [1, 2], 5)
    assert (runs.report.runs[0].verdict, runs.report.runs[0].message) == ("FAILED", "no memory")
    assert os.listdir() == ["kill-1"]


def test_a_run_that_cannot_be_read_has_failed(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(folder: Path) -> None:
        raise Invalid(f"{folder} is damaged")

    monkeypatch.setattr(Run, "load", damaged)
    runs.run(Way(2))
    assert runs.report.runs == [Row("2 devices", "2-devices", "FAILED", message="2-devices is damaged")]


def test_a_run_that_was_interrupted_has_failed(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "load", lambda folder: SimpleNamespace(**vars(FIRST) | {"interrupted": True}))
    runs.run(Way(2))
    assert runs.report.runs == [Row("2 devices", "2-devices", "FAILED", message="it was interrupted: no memory")]


def test_what_is_the_same(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fingerprint, the last one, and what diff says; of those that differ, the first is shown and all are kept."""
    runs.run(Way(1))
    assert (runs.report.difference, runs.report.differs) == (None, "")
    differing = [{"fingerprints": ["aa"]}, {"fingerprint": "aa"}, {"fingerprint": "cc"}]
    for devices, change in enumerate(differing, 2):
        monkeypatch.setattr(Run, "load", lambda folder, c=change: SimpleNamespace(**vars(FIRST) | c))
        runs.run(Way(devices))
    monkeypatch.setattr(Run, "load", lambda folder: FIRST)
    monkeypatch.setattr(module.diff, "compare", lambda one, other: Difference(verdict=f"{one} is not {other}"))
    runs.run(Way(2, 2))
    assert [row.verdict for row in runs.report.runs] == ["same"] + ["DIFFERS"] * 4
    assert runs.report.difference == Difference(same=True, verdict="compared")
    assert runs.report.differs == "2 devices"
    assert sorted(os.listdir()) == ["2-devices", "2-processes-x-2-devices", "3-devices", "4-devices"]
    runs.report.difference = None
    runs.run(Way(2, 2))
    assert runs.report.difference == Difference(verdict="1-device is not 2-processes-x-2-devices")


def test_kept_folders_are_not_removed(runs: Runs) -> None:
    runs.tidy = False
    runs.run(Way(2))
    assert (runs.report.runs[0].verdict, os.listdir()) == ("same", ["2-devices"])
