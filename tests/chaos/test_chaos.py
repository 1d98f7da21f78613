"""SIGKILL at random moments, and at every line: what goes on afterwards ends with the same bits, and has lost nothing.

The full form, with 100 kills, is benchmarks/chaos.py (`make chaos`).
"""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import samestep as ss
from samestep.models.torch import mlp
from samestep.runs import checkpoint
from samestep.runs.checkpoint import Writer
from samestep.runs.folder import RunFolder
from samestep.runs.verify import Job, Way

HERE = Path(__file__).parent
SEED = 1


@pytest.fixture(scope="module")
def chaos() -> ModuleType:
    path = HERE.parents[1] / "benchmarks" / "chaos.py"
    spec = importlib.util.spec_from_file_location("benchmark_chaos", path)
    assert spec
    assert spec.loader
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_killed_at_random_moments(chaos: ModuleType, tmp_path: Path) -> None:
    chance, peace = random.Random(SEED), chaos.in_peace(tmp_path / "peace")
    assert len(peace.fingerprints) == len(set(peace.fingerprints)) == 60  # it learns at every step
    ways = [Way(1), Way(3), Way(2, 2), Way(8)]
    moments = ["step", "checkpoint", "opening", "end"]
    *kills, ending = chaos.one_run(1, tmp_path / "run", moments, peace, chance, chaos.JOB, ways)
    assert [kill.moment for kill in kills] == moments, f"seed {SEED}: it ended before it was killed"
    assert not [kill for kill in kills if kill.lost or kill.survivors]
    assert all(kill.then != kill.way for kill in kills)
    assert (ending.fingerprint, ending.same) == (peace.fingerprint, True), f"seed {SEED}"
    assert not list((tmp_path / "run").rglob("*.tmp")), "what was half-written is still there"


FORGETS = """
from samestep.optimizers.updating import FlatUpdater
FlatUpdater.load = lambda self, tensors: None  # the optimizer's state
import job
job.main()
"""


def test_a_resume_that_forgets_something_is_noticed(chaos: ModuleType, tmp_path: Path) -> None:
    """A broken twin of the job: killed and resumed it ends elsewhere than in peace."""
    (tmp_path / "twin.py").write_text(f"import sys\nsys.path.insert(0, {str(HERE)!r})\n{FORGETS}")
    twin, ways = Job(tmp_path / "twin.py", ["--width", "64"]), [Way(1), Way(2)]
    peace = chaos.in_peace(tmp_path / "peace", twin)
    kill, ending = chaos.one_run(1, tmp_path / "run", ["step"], peace, random.Random(SEED), twin, ways)
    assert kill.resumed > 0
    assert not ending.same


EVERY_STATE = r"""
# Does with a run folder what a fit does, and is killed when a line of run.py or checkpoint.py has changed something in it, for
# the first, second, third, ... time. Then the next one must go on from the newest checkpoint. Every session is forked.
import json, os, shutil, signal, sys, threading, traceback
from pathlib import Path
import numpy as np
from samestep.runs import checkpoint
from samestep.fingerprint import of_weights
from samestep.runs.folder import RunFolder
from samestep.runs.log import events
from samestep.runs.run import Run

os.fsync = lambda file: None  # what was written is there after a kill, if not after a loss of power
STEPS, RECIPE, root = 4, {"max_epochs": 1, "seed": 0, "initial": "0" * 64}, sys.argv[1]
FILES = {sys.modules[name].__file__ for name in ("samestep.runs.folder", "samestep.runs.checkpoint")}

def weights(step):
    return {"w": np.full(3, step, np.float32)}

def session(folder, every, stop=None):
    made = RunFolder(folder, RECIPE, "auto", 2, STEPS)
    first = made.checkpoint.step if made.checkpoint else 0
    assert not first or made.checkpoint.group("model")["w"].tolist() == [first] * 3
    prints = [p for event in events(made.log) if event["event"] == "steps" for p in event["fingerprint"]]
    made({"event": "resume" if first else "start", "devices": ["cpu"]})

    def save(step):
        about = {"step": step, "recipe": RECIPE, "history": [], "metric": None}
        known = np.array([int(p, 16) for p in prints], np.uint64)
        made.save(about, {f"model:{name}": tensor for name, tensor in weights(step).items()} | {"log:fingerprints": known})

    for step in range(first, STEPS):
        prints.append(f"{step:016x}")
        made({"event": "steps", "first": step, "fingerprint": [prints[-1]]})
        if step + 1 == stop:
            made.writer.flush()
            os._exit(0)
        if every and (step + 1) % every == 0:
            save(step + 1)
    if every:
        save(STEPS)
        made.writer.flush()
    made.weights(weights(STEPS))
    made({"event": "end", "fingerprint": of_weights(weights(STEPS))})
    made.close(False)
    return first

def forked(work):
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]

def state(folder):
    entries = [entry for place in (folder, f"{folder}/checkpoints") if os.path.isdir(place) for entry in os.scandir(place)]
    return [(e.path, s.st_ino, s.st_size, s.st_mtime_ns) for e in entries for s in [e.stat(follow_symlinks=False)]]

def killed_at(number, folder, every):
    seen, lock = [state(folder)], threading.Lock()

    def trace(frame, kind, argument):
        if frame.f_code.co_filename not in FILES:
            return None
        with lock:
            try:
                now = state(folder)
            except FileNotFoundError:  # the other thread is at it
                now = seen[-1]
            if now != seen[-1]:
                seen.append(now)
                if len(seen) > number:
                    os.kill(os.getpid(), signal.SIGKILL)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    session(folder, every)

def recovers(folder, every):
    whole = [checkpoint.read(path).step for path in checkpoint.paths(folder)]  # one that is not whole is an error
    log = Path(folder, "events.jsonl")
    ended = log.exists() and '{"event": "end"' in log.read_text()
    try:
        first = session(folder, every)
    except ValueError as error:
        refused = f"run folder {folder} holds a finished run without a checkpoint: choose another run_dir, or delete it"
        assert str(error) == refused and ended and not every, error
        return
    assert first == max(whole, default=0), f"went on from step {first}, had checkpoints {whole}"
    run = Run.load(folder)
    assert run.fingerprints == [f"{step:016x}" for step in range(STEPS)], run.fingerprints
    assert not [name for _, _, names in os.walk(folder) for name in names if name.endswith(".tmp")], "half-written"

kills, failures = 0, []
for every, stop in ((1, None), (STEPS, None), (None, None), (2, 3)):
    base, folder = f"{root}/base-{every}-{stop}", f"{root}/killed"
    if stop:  # a run that was killed one step after its last checkpoint
        assert not forked(lambda: session(base, every, stop))
    number, status = 0, signal.SIGKILL
    while status:
        shutil.rmtree(folder, ignore_errors=True)
        if stop:
            shutil.copytree(base, folder)
        number += 1
        status = forked(lambda: killed_at(number, folder, every))
        assert status in (0, signal.SIGKILL), status
        if forked(lambda: recovers(folder, every)):
            failures.append((every, stop, number))
    kills += number
assert kills > 50, kills
print(json.dumps(failures))
"""


def test_killed_whenever_something_was_written(tmp_path: Path) -> None:
    """SIGKILL in every state that a run folder goes through, not only where chance has it: what was saved is not lost."""
    command = [sys.executable, "-W", "error", "-c", EVERY_STATE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_the_last_checkpoint_is_there_before_the_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run with weights and without a checkpoint would not be gone on with: it would be taken for a finished one."""
    go, seen, weights, flush, sync = threading.Event(), [], RunFolder.weights, Writer.flush, RunFolder._sync

    def writing(self: RunFolder, *arguments: object) -> None:
        seen.append(len(checkpoint.paths(self.path)))
        go.set()
        weights(self, *arguments)

    def flushing(self: Writer) -> None:
        go.set()
        flush(self)

    def syncing(self: RunFolder) -> None:
        """Let the checkpoint wait until the fit either waits for it or goes on without."""
        assert go.wait(60)
        sync(self)

    monkeypatch.setattr(RunFolder, "weights", writing)
    monkeypatch.setattr(RunFolder, "_sync", syncing)
    monkeypatch.setattr(Writer, "flush", flushing)
    x, y = np.ones((8, 2), np.float32), np.zeros(8, np.int64)
    ss.Trainer(1, 8, devices=1, run_dir=tmp_path / "run").fit(mlp((2, 4, 2)), (x, y))
    assert seen == [1]
