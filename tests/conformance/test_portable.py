"""Portable runs have fingerprints that are everybody's: those in tests/portable.json, on every CPU with AVX2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.suite import BACKEND
from samestep.backends import numerics
from samestep.backends.find import installed, load
from samestep.errors import Invalid

PROGRAM = Path(__file__).parents[1] / "portable.py"
KNOWN = json.loads(PROGRAM.with_suffix(".json").read_text()).get(BACKEND)

SCRIPT = """
{first}
import numpy as np
import samestep as ss
from conformance.suite import zoo
{then}
run = ss.Trainer(1, 4, shards=2, devices=1, progress=False{given}).fit(
    zoo.small(), (np.zeros((4, 1, 28, 28), np.float32), np.arange(4)))
print(run.recipe["portable"], "cpu" in run.recipe["numerics"])
"""


def python(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(PROGRAM.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    usual = {name: value for name, value in os.environ.items() if not name.startswith(("MKL_", "ONEDNN_", "ATEN_"))}
    env = usual | {"PYTHONPATH": paths, "SAMESTEP_TEST_BACKEND": BACKEND} | environ
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=900)


def of(first: str = "", then: str = "", given: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    return python("-c", SCRIPT.format(first=first, then=then, given=given), **environ)


@pytest.mark.skipif(not KNOWN, reason="not portable as far as was shown")
def test_the_fingerprints_are_everybodys(tmp_path: Path) -> None:
    if KNOWN["version"] != installed(BACKEND):
        pytest.skip(f"they are of {BACKEND} {KNOWN['version']}")
    done = python(str(PROGRAM))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(KNOWN['fingerprints'])} runs of {BACKEND}" in done.stdout


def test_in_time_the_run_is_portable() -> None:
    done = of(SAMESTEP_PORTABLE="1")
    assert done.stdout.splitlines()[-1:] == ["True False"], done.stderr
    done = of(first="import os; os.environ['SAMESTEP_PORTABLE'] = '1'")
    assert done.stdout.splitlines()[-1:] == ["True False"], done.stderr
    done = of(SAMESTEP_PORTABLE="0")
    assert done.stdout.splitlines()[-1:] == ["False True"], done.stderr


def test_a_cpu_without_avx2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "cpu", lambda: {"vendor": "GenuineIntel", "sets": ""})
    with pytest.raises(Invalid, match="portable: this CPU has no AVX2"):
        load(BACKEND).require_portable()
