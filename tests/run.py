"""Runs every test: one framework per process, as some cannot be loaded together. `make test` calls this.

    python tests/run.py [--mxnet PYTHON] [arguments for pytest]

With arguments for pytest (a file, -k ...), only those tests are run, here, in one process.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
# What must also hold on the oldest NumPy that samestep supports, which MXNet brings along.
ON_OLD_NUMPY = ["test_shards.py", "test_draws.py", "test_expressions.py"]

# Frameworks beside PyTorch that have a backend: the conformance suite again, in a process of its own.
OTHERS = ["jax", "tensorflow", "paddle"]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mxnet", type=Path, help="the Python of MXNet's environment")
    options, rest = parser.parse_known_args()
    if rest:
        return subprocess.run([sys.executable, "-m", "pytest", *rest]).returncode
    runs: list[list[str]] = [[sys.executable, "-m", "pytest", "-q"]]
    for file in sorted((TESTS / "parity").glob("test_*.py")):
        if "mxnet" not in file.name:
            runs.append([sys.executable, "-m", "pytest", "-q", str(file)])
    others = [name for name in OTHERS if importlib.util.find_spec(name)]
    for name in others:
        runs.append([sys.executable, "-m", "pytest", "-q", str(TESTS / "conformance"), str(TESTS / f"test_{name}.py")])
    if options.mxnet and options.mxnet.exists():
        old = [str(TESTS / name) for name in ON_OLD_NUMPY]
        runs.append([str(options.mxnet), "-m", "pytest", "-q", *old])
        runs.append([str(options.mxnet), "-m", "pytest", "-q", str(TESTS / "parity" / "test_schedules_mxnet.py")])
    else:
        print("MXNet's tests are skipped: it has an environment of its own, which could not be made here")
    failed = []
    for run in runs:
        print(f"\n$ {' '.join(Path(part).name if '/' in part else part for part in run)}", flush=True)
        backend = next(
            (name for name in others if run[-1].endswith(f"test_{name}.py") and "parity" not in run[-1]), "torch"
        )
        if subprocess.run(run, env=os.environ | {"SAMESTEP_TEST_BACKEND": backend}).returncode:
            failed.append(run)
    print(f"\n{len(runs) - len(failed)} of {len(runs)} test runs passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
