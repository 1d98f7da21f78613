"""The examples that people copy: short, and they do what they say, the same on one and on three devices."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
COPIED = ["finetune_transformers", "gpt", "own_loop", "own_loop_flax", "resnet"]
# Fashion-MNIST is not on every machine: ten bands with noise stand in for it. An example runs once for each number of
# devices, in one process, because most of the time is the import of a framework.
DRIVER = """
import json, os, runpy, sys
import numpy as np
import samestep as ss

rng = np.random.default_rng(0)
patterns = np.zeros((10, 1, 28, 28), "float32")
for i in range(10):
    patterns[i, 0, 2 + 2 * i : 6 + 2 * i] = 1
def clothes(n):
    y = np.arange(n) % 10
    return patterns[y] + 0.1 * rng.standard_normal((n, 1, 28, 28)).astype("float32"), y
data = ss.Data(clothes(1000), clothes(200))
ss.fashion_mnist = lambda: data
example, devices = sys.argv[1], json.loads(sys.argv[2])
sys.argv = [example, "--small"]
for count in devices:
    if count:
        os.environ["SAMESTEP_OVERRIDES"] = json.dumps({"devices": count})
    runpy.run_path(example, run_name="__main__")
"""


def printed(name: str, folder: Path, *devices: int) -> tuple[str, list[str]]:
    """What an example prints, and the fingerprints in it."""
    command = [sys.executable, "-c", DRIVER, str(EXAMPLES / f"{name}.py"), json.dumps(devices)]
    done = subprocess.run(command, cwd=folder, env=dict(os.environ), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, re.findall(r"fingerprint ([0-9a-f]{64})", done.stdout)


def numbers(what: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(rf"{what} ([0-9.]+)\b", text)]


@pytest.mark.parametrize("name", COPIED)
def test_it_is_short_and_says_how_to_start_it(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 60
    doc = text.split('"""')[1]
    assert f"python examples/{name}.py" in doc
    assert re.search(r"^(torchrun --nproc-per-node|mpiexec -n) 2 ", doc, re.M)


def test_gpt(tmp_path: Path) -> None:
    text, prints = printed("gpt", tmp_path, 1, 3)
    assert len(prints) == 2
    assert len(set(prints)) == 1
    assert numbers("perplexity", text)[0] < 40  # of 257 tokens
    bits = [float(number) for number in re.findall(r"([0-9.]+) bits", text)]
    assert 2 ** bits[0] == pytest.approx(numbers("perplexity", text)[0], rel=1e-3)


def test_resnet(tmp_path: Path) -> None:
    text, prints = printed("resnet", tmp_path, 1, 3)
    losses, third = numbers("loss", text), numbers("top three", text)
    assert len(prints) == 2
    assert len(set(prints)) == 1
    assert losses[1] < losses[0] - 0.5
    assert third[1] > 0.5  # by chance: 0.3
    assert losses[:2] == losses[2:]


@pytest.mark.parametrize("name", ["own_loop", "own_loop_flax"])
def test_own_loop(name: str, tmp_path: Path) -> None:
    text, prints = printed(name, tmp_path, 0)
    assert len(prints) == 2
    assert len(set(prints)) == 1
    grown = [int(number) for number in re.findall(r"now (\d+) kinds", text)]
    assert grown[:2] == [3, 4]  # what came next has depended on the loss
    assert (tmp_path / "half.safetensors").exists()


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="transformers is not installed")
def test_finetune_transformers(tmp_path: Path) -> None:
    text, prints = printed("finetune_transformers", tmp_path, 1, 3)
    assert len(prints) == 2
    assert len(set(prints)) == 1
    assert numbers("loss", text)[0] < 2.03  # log(8) = 2.08 for one who knows nothing


def test_the_warm_up_is_the_same_on_one_device_and_on_three(tmp_path: Path) -> None:
    text, _ = printed("warmup", tmp_path, 1, 3)
    one, three = re.findall(r"fingerprint ([0-9a-f]{16})", text)
    assert one == three
