"""SIGKILL to a real process at a step drawn at random; what goes on afterwards, on other devices, ends with the same bits.

tests/chaos does this at length, for PyTorch. This is its short form for every framework.
"""

import random
import shutil
from pathlib import Path

import pytest

from conformance import suite
from samestep.optimizers.updating import FlatUpdater
from samestep.runs import checkpoint
from samestep.runs.verify import Job, Start, Way

SEED = 1
STEPS = 12
EXAMPLES, BATCH = 28, 5  # six batches an epoch, with empty shards, and a last one of three

JOB = f"""
import sys, threading
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from conformance import suite
from samestep.training.replicas import Replicas

step, model, last = Replicas.step, sys.argv[1], int(sys.argv[2])

def waits(self, *rest):
    if rest[-1] == last:  # a quick job must not end before it is killed
        threading.Event().wait(300)
        sys.exit("nobody has killed it")
    return step(self, *rest)

Replicas.step = waits
suite.fit(model, 1, {EXAMPLES}, {BATCH})
"""


def kill(script, model, devices, folder, step):
    """Start, or go on, on so many devices, and die when the log tells of the step."""
    job = Job(script, [model, str(min(step + 3, STEPS - 1))])
    with Start(job, Way(devices), folder, every=1) as start:
        there = start.until(lambda: start.steps() >= step and any(checkpoint.paths(folder)))
        assert there, start.said()
        assert start.lose([0]), start.said()


# Every kill is a process that compiles anew: where that takes long, one model with dropout and batch norm is enough.
@pytest.mark.parametrize("model", [suite.NORMED] + ["mlp_with_dropout"] * (not suite.COMPILES))
def test_killed_at_random_and_resumed_on_other_devices(model, tmp_path, monkeypatch):
    chance = random.Random(f"{SEED} {model}")
    first, second = sorted(chance.sample(range(1, STEPS - 1), 2))
    counts = chance.sample((1, 2, 3, 5, 8), 3)
    script, folder, twin = tmp_path / "job.py", tmp_path / "run", tmp_path / "twin"
    script.write_text(JOB)
    for step, count in zip((first, second), counts[:2], strict=True):
        kill(script, model, count, folder, step)
    shutil.copytree(folder, twin)
    whole = suite.fit(model, 1, EXAMPLES, BATCH)
    assert len(set(whole.fingerprints)) == STEPS  # it learns at every step
    run = suite.fit(model, counts[2], EXAMPLES, BATCH, run_dir=folder)
    assert run.resumed, f"killed at {first} and {second}: it began anew"
    assert len(run.devices) == counts[2]
    suite.same(run, whole)

    monkeypatch.setattr(FlatUpdater, "load", lambda self, tensors: None)  # a resume that forgets the momentum
    with pytest.raises(AssertionError, match="differs"):
        suite.same(suite.fit(model, counts[2], EXAMPLES, BATCH, run_dir=twin), whole)
