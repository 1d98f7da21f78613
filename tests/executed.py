"""Which test executes which function: recorded once for all tests, so that mutants.py runs those that may notice a change.

It is a plugin of pytest, and is imported by every process that a test starts (PYTEST_DONT_REWRITE: the import comes first).
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).parents[1]
FIRST = 12.0  # seconds of tests, as they were recorded: those that are run first for a mutant
NONE = 5  # pytest's exit status where there was no test to run
RECORDING = 1500.0  # seconds for all tests of a file
NOTES = "EXECUTED_NOTES"  # the file in which a process of pytest notes what it runs
ONLY = "EXECUTED_ONLY"  # the file with the names of the tests that it is to run, in this order
KNOWN = "EXECUTED_KNOWN"  # the file with the names of those that it is to leave out
WATCH = "EXECUTED_WATCH"  # set: also the functions that are executed
SCRIPTS = {
    "processes/rank.py": ("processes/launch.py", "Processes._start")
}  # runs where nothing is noted → who starts it


LOADED = {
    "torch": ("hypothesis", "numpy", "torch", "torch._inductor", "torch.distributed", "rich.console", "typer"),
    "jax": ("hypothesis", "numpy", "jax", "optax", "flax.nnx", "flax.linen"),
}  # before anything is changed


# In the processes of the tests: what is executed is noted


class Notes:
    """One line for each test that begins or ends, and for each function of samestep that it executes."""

    def __init__(self) -> None:
        self.file, self.seen = os.environ.get(NOTES), dict[int, Any]()  # which keeps them, or ids would come again
        self.test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        if self.file and os.environ.get(WATCH):
            threading.settrace(self.watch)
            self.begin(self.test)
            os.register_at_fork(after_in_child=lambda: self.begin(""))  # of a server that has outlived its test

    def write(self, *note: Any) -> None:
        if self.file:
            with open(self.file, "a") as file:
                file.write(json.dumps(note) + "\n")

    def watch(self, frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if id(code) not in self.seen:
            self.seen[id(code)] = code
            before, _, path = code.co_filename.rpartition("/samestep/")
            if before.endswith("/src"):
                self.write("function", self.test, path, code.co_qualname.partition(".<locals>")[0])

    def begin(self, test: str) -> None:
        self.test = test
        self.seen.clear()
        if self.file and os.environ.get(WATCH):
            sys.settrace(self.watch)  # again: a test may have had a use of its own for it

    # As a plugin of pytest

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep those that were asked for. pytest itself would stop at a name that another version has written otherwise."""
        if ONLY in os.environ:
            names = Path(os.environ[ONLY]).read_text().splitlines()
            files = tuple(name + end for name in names if "::" not in name for end in ("::", "/"))
            place = {name: i for i, name in enumerate(names)}
            known = set(Path(os.environ[KNOWN]).read_text().splitlines())
            kept = [item for item in items if item.nodeid in place or item.nodeid.startswith(files)]
            kept = [item for item in kept if item.nodeid not in known]
            items[:] = sorted(kept, key=lambda item: place.get(item.nodeid, len(names)))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.begin(nodeid)
        self.write("begin", nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.write(report.outcome, report.nodeid, report.when, report.duration)

    def pytest_fixture_setup(self, fixturedef: Any) -> None:
        if fixturedef.scope != "function":  # what it executes is not executed again for the other tests of the file
            self.begin("")

    def pytest_runtest_call(self, item: Any) -> None:
        self.begin(item.nodeid)


NOTED = Notes()


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(NOTED)


# Running tests


@dataclass(frozen=True)
class Tree:
    """A copy of the checkout, in which code may be changed."""

    root: Path
    servers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict, compare=False)

    @staticmethod
    def of(folder: Path) -> Tree:
        for name in ("src", "tests", "examples", "benchmarks", "docs"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for file in filter(Path.is_file, ROOT.iterdir()):  # README.md, pyproject.toml, ...
            shutil.copy(file, folder)
        for name in ("tmp", "site"):
            (folder / name).mkdir()
        (folder / "site" / "sitecustomize.py").write_text("import executed")  # in every process that a test starts
        return Tree(folder)

    def file(self, name: str) -> Path:
        return self.root / "src" / "samestep" / name

    def run(
        self, backend: str, tests: Sequence[str], limit: float, watch: bool = False, known: Iterable[str] = ()
    ) -> tuple[int, list[list[Any]]]:
        """pytest's exit status (124: it took too long), and what was noted. 0 also if none of these tests is there."""
        notes, only, out = (self.root / "tmp" / name for name in ("notes", "tests", "known"))
        notes.write_text("")
        out.write_text("\n".join(known))
        names = [name for name in tests if not name.startswith("--")]
        only.write_text("\n".join(names))
        given = [
            *dict.fromkeys(name.partition("::")[0] for name in names),
            *(one for one in tests if one.startswith("--")),
        ]
        paths = [self.root / "src", self.root / "tests", *([self.root / "site"] if watch else [])]
        paths += [Path(path).absolute() for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        env = {
            NOTES: str(notes), ONLY: str(only), KNOWN: str(out), WATCH: "1" if watch else "",
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
        }  # fmt: skip
        command = ["-q", "-p", "executed", "--assert=plain", *([] if watch else ["-x"]), *given]
        status = 124
        server = self.server(backend)
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps([env, command]).encode() + b"\n")
        child = int(server.stdout.readline())
        if select.select([server.stdout], [], [], limit)[0]:
            status = int(server.stdout.readline())
        with_children(child)
        if status == 124:
            server.stdout.readline()
        return status * (status != NONE), [json.loads(line) for line in notes.read_text().splitlines()]

    def server(self, backend: str) -> subprocess.Popen[bytes]:
        """A process that has loaded a framework, but nothing of samestep: it forks for each run of pytest."""
        if backend not in self.servers:
            env = os.environ | {
                "SAMESTEP_TEST_BACKEND": backend, "TMPDIR": str(self.root / "tmp"),
                "PYTHONDONTWRITEBYTECODE": "1",  # two mutants of one second and one size would share a .pyc
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # several share a GPU
            }  # fmt: skip
            for name in ("CI", "PYTEST_CURRENT_TEST", NOTES, ONLY, KNOWN, WATCH):
                env.pop(name, None)
            self.servers[backend] = subprocess.Popen(
                [sys.executable, self.root / "tests" / "executed.py", backend], cwd=self.root, env=env, bufsize=0,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        return self.servers[backend]

    def close(self) -> None:
        for server in self.servers.values():
            with server:
                server.kill()


def serve(backend: str) -> None:
    """For each line that comes, pytest in a process of its own: say which one it is, and how it ended."""
    import pytest

    for name in LOADED[backend]:
        with suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        if child := os.fork():
            print(child, flush=True)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        os.setsid()
        output = os.open("tmp/output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream, file in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
            os.dup2(file, stream)
        env, arguments = json.loads(line)
        os.environ.update(env)
        sys.path[:0] = env["PYTHONPATH"].split(os.pathsep)
        status = 1
        with suppress(BaseException):
            status = int(pytest.main(arguments))
        os._exit(status)


def with_children(group: int) -> None:
    """End a process and those that it has left behind."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


# Which test executes which function


def runs() -> list[tuple[str, str]]:
    """A backend and a file for each process of pytest. Files that only read the code are left out."""
    files = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    apart = ("parity/test_schedules", "test_tensorflow", "test_paddle", "test_mxnet", "test_jax", "test_house")
    found = [("torch", name) for name in files if not any(word in name for word in apart)]
    found += [("torch", f"tests/parity/test_schedules_{name}.py") for name in ("torch", "formulas")] + [
        ("torch", "src")
    ]
    if importlib.util.find_spec("jax"):
        found += [("jax", name) for name in files if "/conformance/" in name or "jax" in name]
    return found


def record(into: Path, trees: SimpleQueue[Tree], jobs: int, anew: Sequence[str] = ()) -> None:
    """Run the tests that are not in the recording yet, or all tests of some files.

    Of those that pass: how long they take, and which functions they execute.
    """
    kept: dict[str, Any] = json.loads(into.read_text()) if into.exists() else {}
    lock = threading.Lock()

    def one(run: tuple[str, str]) -> None:
        backend, file = run
        before = {"seconds": {}, "functions": {}} if anew else kept.get(" ".join(run), {"seconds": {}, "functions": {}})
        names, tree = [*before["seconds"]], trees.get()
        status, notes = tree.run(backend, [file], RECORDING, watch=True, known=names)
        trees.put(tree)
        good = {note[1] for note in notes if note[0] == "passed" and note[2] == "call"}
        good -= {note[1] for note in notes if note[0] == "failed"}
        seconds = (
            {file: 0.0} | before["seconds"] | dict.fromkeys(sorted(good), 0.0)
        )  # of the whole file, and of each test
        functions: dict[str, set[str]] = defaultdict(set)
        for name, tests in before["functions"].items():
            functions[name] = {names[i] for i in tests}
        for what, test, *about in notes:
            if what == "function" and (not test or test in good):
                functions["::".join(about)].add(test or file)
            elif what == "passed" and test in good:
                seconds[test] += about[1]
                seconds[file] += about[1]
        number = {name: i for i, name in enumerate(seconds)}
        with lock:
            kept[f"{backend} {file}"] = {
                "seconds": {name: round(value, 2) for name, value in seconds.items()},
                "functions": {name: sorted(map(number.get, tests)) for name, tests in sorted(functions.items())},
            }  # fmt: skip
            into.with_suffix(".new").write_text(json.dumps(kept))
            into.with_suffix(".new").replace(into)
            failed = sorted({note[1] for note in notes if note[0] == "failed"})
            print(f"{backend} {file}: {len(good)} tests, status {status}", *failed, sep="\n  ", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, [run for run in runs() if not anew or run[1] in anew]))


@dataclass(frozen=True)
class Test:
    backend: str
    file: str
    name: str  # as pytest calls it; that of the file where it is not known which of its tests
    seconds: float


class Map:
    """Which tests execute a function, from a recording."""

    def __init__(self, file: Path, limit: float = 240.0) -> None:
        self.limit = limit  # seconds of the tests after the first ones
        self.tests: dict[str, list[Test]] = defaultdict(list)
        for run, found in json.loads(file.read_text()).items():
            tests = [Test(*run.split(" "), *about) for about in found["seconds"].items()]
            for function, numbers in found["functions"].items():
                self.tests[function] += [tests[i] for i in numbers]

    def stages(self, file: str, function: str) -> Iterator[list[Test]]:
        """Tests to run at once: of the file of the same name and the quickest two of every file first, then as many as
        there is time for."""
        file, function = SCRIPTS.get(file, (file, function))
        of_file = [name for name in self.tests if name.startswith(f"{file}::") and "<" not in name]
        of_class = [name for name in of_file if name.startswith(f"{file}::{function}.")]
        names = [f"{file}::{function}"] if f"{file}::{function}" in of_file and not of_class else of_class or of_file
        found = sorted(
            {test for name in names for test in self.tests[name]}, key=lambda test: (test.seconds, test.name)
        )
        files: dict[tuple[str, str], list[Test]] = defaultdict(list)
        for test in found:
            files[test.backend, test.file].append(test)
        order = sorted(files.values(), key=lambda tests: sum(test.seconds for test in tests))
        own = [test for tests in order for test in tests if test.file.endswith(f"/test_{Path(file).stem}.py")]
        quick = sorted(
            (test for tests in order for test in tests[:2] if test not in own), key=lambda test: test.seconds
        )
        first = _within(FIRST, own) + _within(FIRST, quick)
        then = _within(self.limit, [test for tests in order for test in tests if test not in first])
        for stage in (first, then):
            for backend in ("torch", "jax"):
                if mine := [test for test in stage if test.backend == backend]:
                    yield mine


def _within(limit: float, tests: Sequence[Test]) -> list[Test]:
    """As many of these tests as there are seconds for, and at least one."""
    chosen: list[Test] = []
    for test in tests:
        if test.seconds <= limit or not chosen:
            chosen.append(test)
            limit -= test.seconds
    return chosen


if __name__ == "__main__":
    serve(sys.argv[1])
