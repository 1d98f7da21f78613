"""Runs every test: one framework per process, as some cannot be loaded together. `make test` calls this.

    python tests/run.py [--mxnet PYTHON] [--also PYTHON]... [--at-once N] [arguments for pytest]

Several processes run at once, half as many as there are cores but at least two; what each one prints comes when it has
ended, and the end of what failed once more at the very end. One that hangs is ended, and says where each of its threads
was. With arguments for pytest (a file, -k ...), only those tests are run, here, in one process.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parent
LIMIT = 25 * 60.0  # seconds for one of the processes; they take up to 10 minutes on two cores
# What must also hold on the oldest NumPy that samestep supports, which MXNet brings along.
ON_OLD_NUMPY = ["test_shards.py", "test_draws.py", "schedules/test_text.py"]
# Frameworks beside PyTorch in this environment: the conformance suite again, in a process of its own.
OTHERS = ["jax", "tensorflow", "paddle"]
# Tests that mostly wait for processes they have started: a run of their own, beside the rest.
PROCESSES = ["processes", "runs/test_verify.py", "chaos"]
# Tests that need frameworks beside PyTorch: not with other versions of Python, whose environments have none.
ALL_FRAMEWORKS = ["examples", "wild"]
# The references of NumPy would fight for the cores with the tests beside them, and XLA compiles many a program again.
QUICKER = {
    "OPENBLAS_NUM_THREADS": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


@dataclass(frozen=True)
class Run:
    """One process of pytest."""

    name: str
    files: list[Path] = field(default_factory=list)
    backend: str = "torch"
    python: str = sys.executable
    but: list[Path] = field(default_factory=list)  # what to leave out

    def __call__(self) -> tuple[Run, int, str, float]:
        began = time.monotonic()
        command = [
            self.python,
            "-m",
            "pytest",
            "-q",
            "--durations=5",
            *map(str, self.files),
            *(f"--ignore={path}" for path in self.but),
        ]
        env = os.environ | QUICKER | {"SAMESTEP_TEST_BACKEND": self.backend}
        env.pop("CI", None)  # there, pytest takes minutes or hours to spell out how large things differ, also for twins
        with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryFile("w+") as output:
            # a file, no pipe: what a test has left behind could hold its end
            env["JAX_COMPILATION_CACHE_DIR"] = cache
            process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
            try:
                process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)  # pytest's handler prints the stacks of all threads
                process.wait()
            output.seek(0)
            return self, process.returncode, output.read(), time.monotonic() - began


def runs(mxnet: Path | None, also: list[Path]) -> list[Run]:
    """All of them, the longest first."""
    apart = [TESTS / name for name in PROCESSES]
    found = [Run("PyTorch, and what needs no framework", but=apart), Run("processes", apart)]
    for python in also:
        version = python.parts[-3].rpartition("-")[2]
        if python.exists():
            name = f"Python {version}: PyTorch, and what needs no framework"
            found.append(Run(name, but=[*apart, *(TESTS / name for name in ALL_FRAMEWORKS)], python=str(python)))
        else:
            print(f"the tests with Python {version} are skipped: it is not installed, or has no environment ({python})")
    for name in OTHERS:
        if importlib.util.find_spec(name):
            found.append(
                Run(name, [TESTS / "conformance", TESTS / "wild", TESTS / "backends" / f"test_{name}.py"], name)
            )
        else:
            print(f"{name}'s tests are skipped: it is not installed")
    if mxnet:
        python_of_mxnet = str(mxnet)
        files = [TESTS / "conformance", TESTS / "wild", TESTS / "backends" / "test_mxnet.py"]
        found.append(Run("MXNet", files, "mxnet", python_of_mxnet))
    for file in sorted((TESTS / "parity").glob("test_*.py")):
        if "mxnet" not in file.name:
            found.append(Run(file.stem, [file]))
    if mxnet:
        found.append(Run("on an old NumPy", [TESTS / name for name in ON_OLD_NUMPY], python=python_of_mxnet))
        found.append(
            Run("test_schedules_mxnet", [TESTS / "parity" / "test_schedules_mxnet.py"], python=python_of_mxnet)
        )
    else:
        print("MXNet's tests are skipped: it has an environment of its own, which could not be made here")
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mxnet", type=Path, help="the Python of MXNet's environment")
    parser.add_argument("--at-once", type=int, default=max(2, (os.cpu_count() or 2) // 2))
    parser.add_argument("--also", type=Path, action="append", default=[], help="a Python of another version")
    options, rest = parser.parse_known_args()
    if rest:
        return subprocess.run([sys.executable, "-m", "pytest", *rest]).returncode
    todo = runs(options.mxnet if options.mxnet and options.mxnet.exists() else None, options.also)
    failed: list[str] = []
    with ThreadPoolExecutor(options.at_once) as pool:
        for done in as_completed([pool.submit(run) for run in todo]):
            run, status, output, seconds = done.result()
            title = f"$ {run.name}: {'failed' if status else 'passed'} after {seconds:.0f} s"
            print(f"\n{title}\n{output.rstrip()}", flush=True)
            if status:
                failed.append(title + "\n" + output.rstrip()[-6000:])
    print(*(f"\nonce more, its end: {end}" for end in failed), sep="\n")
    print(f"\n{len(todo) - len(failed)} of {len(todo)} test runs passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
