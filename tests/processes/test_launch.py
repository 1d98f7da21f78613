"""launch: processes are started by us or by mpiexec, get signals, and end together; the first failure counts."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import process_job
import pytest
from commands import command, finish, is_running

from samestep.errors import BackendMissing
from samestep.processes import launch
from samestep.processes.place import MEET, TORCHRUN

needs_mpi = pytest.mark.skipif(not launch.mpiexec(), reason="needs mpiexec (pip install '.[mpi]')")
ENGINES = ["torch", pytest.param("mpi", marks=needs_mpi)]
STARTER = """
import sys
from samestep.processes import launch
launch.GRACE = float(sys.argv[3])
sys.exit(launch.launch([sys.executable, "-c", sys.argv[2], *sys.argv[4:]], 3, sys.argv[1]))
"""
CHILD = """
import os, pathlib, signal, sys
rank, folder, asked = int(os.environ.get("RANK") or os.environ["PMI_RANK"]), pathlib.Path(sys.argv[1]), 0
def ask(number, frame):
    global asked
    mine = asked = asked + 1  # the next signal may come while this one is handled
    (folder / f"{{rank}}.asked").touch()
    if mine == {needed}:
        sys.exit({status})
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, ask)
(folder / f"{{rank}}.tmp").write_text(str(os.getpid()))
(folder / f"{{rank}}.tmp").rename(folder / f"{{rank}}.pid")
while True:
    signal.pause()
"""


def children(starter: subprocess.Popen[str], folder: Path) -> list[int]:
    """The processes that were started, once they are ready for signals."""
    files = [folder / f"{rank}.pid" for rank in range(3)]
    process_job.await_(lambda: all(file.exists() for file in files) or starter.poll() is not None, "no children")
    assert starter.poll() is None, finish(starter)
    pids = [int(file.read_text()) for file in files]
    assert all(map(is_running, pids))
    return pids


@pytest.mark.parametrize(
    ("child", "status"),
    [
        ("pass", 0),
        ("sys.exit(2 * (rank == 1))", 2),
        ("rank == 2 and os.kill(os.getpid(), 9)", 137),
        ("sys.exit(3) if rank == 1 else signal.pause()", 3),  # the others would wait for ever
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_exit_status_is_that_of_the_first_to_fail(engine: str, child: str, status: int) -> None:
    code = f"import os, signal, sys; rank = int(os.environ.get('RANK') or os.environ['PMI_RANK']); {child}"
    lost = "samestep: rank 2 is gone: it was killed, or its host was lost\n"  # nobody else has said it
    said = lost if status == 137 else ""
    assert finish(command("-c", STARTER, engine, code, 0.2)) == (status, said)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_started_process_finds(engine: str, tmp_path: Path) -> None:
    """Also where the folder for temporary files has a space and a percent sign in its name."""
    temporary = tmp_path / "a 100% b"
    temporary.mkdir()
    child = """
import os, pathlib, sys
from samestep.processes.place import find
place = find()
assert (place.size, place.local_size, place.local_rank) == (3, 3, place.rank)
assert place.started_by == sys.argv[2]
assert pathlib.Path(place.meet.removeprefix("file://")).parent.is_dir(), place
pathlib.Path(sys.argv[1], str(place.rank)).touch()
"""
    by = {"torch": "torchrun", "mpi": "mpi"}[engine]
    stray = {"TMPDIR": str(temporary), "RANK": "7", "PMI_RANK": "7", "SLURM_STEP_NUM_TASKS": "7"}
    assert finish(command("-c", STARTER, engine, child, 5, tmp_path, by, **stray)) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "a 100% b"]
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("signals", "needed", "status", "expected"),
    [
        ([signal.SIGTERM], 1, 143, 143),
        ([signal.SIGINT], 1, 130, 130),
        ([signal.SIGTERM, signal.SIGTERM], 2, 143, 143),
        ([signal.SIGINT, signal.SIGINT], 2, 130, 130),
        ([signal.SIGTERM], 1, 2, 143),  # whoever notices first that another is gone
        ([signal.SIGTERM], 1, 0, 0),  # it was ending anyway
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_signals_are_handed_on(
    engine: str, signals: list[signal.Signals], needed: int, status: int, expected: int, tmp_path: Path
) -> None:
    starter = command("-c", STARTER, engine, CHILD.format(needed=needed, status=status), 10, tmp_path)
    pids = children(starter, tmp_path)
    starter.send_signal(signals[0])
    if signals[1:]:
        asked = [tmp_path / f"{rank}.asked" for rank in range(3)]
        process_job.await_(lambda: all(file.exists() for file in asked), "the signal has not come")
        starter.send_signal(signals[1])
    assert finish(starter) == (expected, "")
    process_job.await_(lambda: not any(map(is_running, pids)), "children are left")


@pytest.mark.parametrize("engine", ENGINES)
def test_no_child_outlives_the_starter(engine: str, tmp_path: Path) -> None:
    """One of them ends when asked, the others ignore it, and are killed."""
    child = CHILD.format(needed="1 + 99 * rank", status=143)
    starter = command("-c", STARTER, engine, child, 0.2, tmp_path)
    pids = children(starter, tmp_path)
    starter.terminate()
    starter.terminate()
    assert finish(starter) == (143, "")
    process_job.await_(lambda: not any(map(is_running, pids)), "children are left")


GRANDCHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
"""


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_starter_takes_all_along(engine: str, watched: bool, tmp_path: Path) -> None:
    """Also what they have started, and the output that they had open. Nobody is left without the process that watches."""
    starter, folder = STARTER, tmp_path / "told"
    folder.mkdir()
    if not watched:  # the broken twin
        twin = tmp_path / "rank.py"
        code = Path(launch.wrapper.__file__).read_text()
        twin.write_text(code.replace("watch(int(lifeline))", "os.fork() or signal.pause()"))
        starter = STARTER.replace("sys.exit", f"launch.wrapper.__file__ = {str(twin)!r}\nsys.exit", 1)
    child = CHILD.format(needed=99, status=0).replace("import os", GRANDCHILD + "import os", 1)
    child = child.replace(".write_text(str(os.getpid()))", '.write_text(f"{os.getpid()} {child.pid}")')
    started = command("-c", starter, engine, child, 10, folder)
    files = [folder / f"{rank}.pid" for rank in range(3)]
    process_job.await_(lambda: all(file.exists() for file in files) or started.poll() is not None, "no children")
    pids = [int(pid) for file in files for pid in file.read_text().split()]
    assert len(pids) == 6
    assert all(map(is_running, pids))
    started.kill()
    try:
        if watched:
            process_job.await_(lambda: not any(map(is_running, pids)), "children are left")
            assert finish(started) == (-signal.SIGKILL, "")  # all have closed its standard error
        else:
            started.wait()
            assert all(map(is_running, pids))
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(os.getpgid(pid), signal.SIGKILL)
        started.communicate()


@pytest.mark.parametrize(
    ("script", "found", "engine"),
    [
        ("import torch", {"torch"}, "torch"),
        ("from torch.nn import Linear\nfrom samestep.models.torch import mlp", {"torch"}, "torch"),
        ("def model():\n    from jax.nn import relu", {"jax"}, "mpi"),
        ("import flax.linen as nn\nimport optax", {"jax"}, "mpi"),
        ("import keras", {"tensorflow"}, "mpi"),
        ("from samestep.models import mxnet", {"mxnet"}, "mpi"),
        ("import torch, paddle", {"torch", "paddle"}, "mpi"),
        ("import numpy, my_models", set(), "mpi"),  # it may be any
        ("this is not Python", set(), "mpi"),
        ("import jax\0", set(), "mpi"),
        ("from .torch import model\nfrom . import jax", set(), "mpi"),  # of its own package
    ],
)
def test_the_engine_that_fits_a_script(
    script: str, found: set[str], engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "script.py"
    file.write_text(script)
    assert launch.frameworks(file) == found
    monkeypatch.setattr(launch, "mpiexec", lambda: "mpiexec")
    assert launch.engine_for(file, None) == engine
    monkeypatch.setattr(launch, "mpiexec", lambda: None)
    if found and "torch" not in found:
        message = f"several processes of {min(found)} need mpiexec; in a clone of samestep: pip install '.[mpi]'"
        with pytest.raises(BackendMissing, match=re.escape(message)):
            launch.engine_for(file, None)
    else:
        assert launch.engine_for(file, None) == "torch"


def test_the_engine_of_the_built_in_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "mpiexec", lambda: "mpiexec")
    assert [launch.engine_for(None, name) for name in (None, "torch", "jax")] == ["torch", "torch", "mpi"]
    assert launch.frameworks(Path("not there.py")) == set()


def test_code_that_older_versions_of_python_refuse_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a null byte in it, before 3.11.4."""

    def parse(code: bytes) -> None:
        raise ValueError("source code string cannot contain null bytes")

    monkeypatch.setattr(launch, "ast", SimpleNamespace(parse=parse))
    assert launch.frameworks(Path(__file__)) == set()


def test_handlers_of_signals_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert launch.launch([sys.executable, "-c", "raise SystemExit(3)"], 1) == 3
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_process_prints_goes_where_ours_goes(engine: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        launch.launch([sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr)"], 1, engine) == 0
    )
    assert capfd.readouterr() == ("out\n", "err\n")


# One thing at a time, without any process


class Starter:
    """Stands for a program that was started: it runs, or has ended; and what was done to it."""

    def __init__(self, ended: bool = False) -> None:
        self.ended, self.did = ended, list[str]()

    def poll(self) -> int | None:
        return 0 if self.ended else None

    def terminate(self) -> None:
        self.did.append("terminate")

    def wait(self, seconds: float | None = None) -> None:
        self.did.append(f"wait {seconds}")
        if seconds:
            raise subprocess.TimeoutExpired("mpiexec", seconds)

    def kill(self) -> None:
        self.did.append("kill")


class Told(launch.Processes):
    """Three processes that were never started, and what rank.py would have told of them."""

    def __init__(self, engine: str = "mpi", ended: str = "---", **told: int) -> None:
        super().__init__(["it"], 3, {}, engine)
        self._starters = [Starter(mark == "x") for mark in ended]  # type: ignore[misc]
        self.tell(**told)

    def tell(self, **told: int) -> None:
        """pid_1=7: the number of rank 1 is 7; of those that have ended, in this order."""
        for name, number in told.items():
            kind, _, rank = name.partition("_")
            file = self._told / f"{rank}.{kind}"
            file.write_text(str(number))
            os.utime(file, ns=(len(list(self._told.iterdir())),) * 2)


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The signals that were sent, and to whom; number 9 has just ended, and number 8 is no longer ours."""
    sent = list[tuple[int, int]]()

    def kill(pid: int, number: int) -> None:
        sent.append((pid, number))
        if pid in (8, 9):
            raise PermissionError if pid == 8 else ProcessLookupError

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(os, "killpg", kill)
    monkeypatch.setattr(os, "getpgid", lambda pid: pid)
    return sent


def test_how_processes_have_ended(killed: list[Any]) -> None:
    """One without a word was killed together with the program that would have left it."""
    with entered(Told(ended="xx-", status_0=3, pid_1=5)) as processes:
        assert processes.states() == [3, -signal.SIGKILL, None]
    with entered(Told(ended="---", status_1=0)) as processes:
        assert processes.states() == [None, 0, None]


@contextlib.contextmanager
def entered(processes: Told) -> Iterator[Told]:
    try:
        yield processes
    finally:
        processes.__exit__()


def test_at_the_end_everything_is_closed_and_ended(killed: list[Any]) -> None:
    with entered(Told(pid_0=5, pid_1=6, status_1=0)) as processes:
        files, folder = (*processes._shown, processes._lifeline, processes._ours), processes._told
    for file in files:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)
    assert not folder.exists()
    assert killed == [(5, signal.SIGKILL)]
    starters: Any = processes._starters
    assert [one.did for one in starters] == [["terminate", "wait 10.0", "kill", "wait None"]] * 3


@pytest.mark.parametrize(
    ("told", "first"),
    [
        ({"status_1": 0, "status_2": 4, "status_0": 5}, 2),
        ({"status_1": 0}, 2),  # it has left no word
        ({"status_1": 0, "status_2": 0}, None),
    ],
)
def test_who_has_failed_first(told: dict[str, int], first: int | None, killed: list[Any]) -> None:
    with entered(Told(ended="--x", **told)) as processes:
        assert processes._first(processes.states()) == first


GONE = "samestep: rank 1 is gone: it was killed, or its host was lost\n"


@pytest.mark.parametrize(
    ("engine", "told", "asked", "said"),
    [
        ("mpi", {}, [], "no such host\n"),
        ("torch", {}, [], "no such host\n"),
        ("mpi", {"pid_2": 5, "status_1": -1}, [], GONE),
        ("mpi", {"pid_2": 5, "status_1": -9}, [15], ""),  # as it was asked to
        ("mpi", {"pid_2": 5, "status_1": 1}, [], ""),  # it has said why
        ("mpi", {"pid_2": 5}, [], ""),
        ("torch", {"pid_2": 5, "status_1": -9}, [], GONE),  # the others have left no word
    ],
)
def test_what_is_said_of_a_process_that_has_failed(
    engine: str, told: dict[str, int], asked: list[int], said: str, killed: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    with entered(Told(engine, **told)) as processes:
        (processes._told / "own").write_text("no such host\n")
        processes.asked = asked
        processes._note(1)
    assert capfd.readouterr() == ("", said)


BAD, LOST = "samestep: bad\n", "samestep: rank 1 is gone\n"


@pytest.mark.parametrize(
    ("left", "said", "counts"),
    [
        ({"0.error": BAD, "1.error": BAD, "2.error": BAD}, BAD, 0),  # once, not once a rank
        ({"0.error": BAD, "2.heard": LOST}, BAD, 0),
        ({"0.heard": LOST, "1.heard": LOST, "2.error": BAD}, f"rank 2: {BAD}", 2),
        ({"1.error": BAD, "2.error": BAD}, f"rank 1: {BAD}", 1),
        ({"0.error": BAD, "1.error": "other\n", "2.error": BAD}, f"{BAD}rank 1: other\n", 0),
        ({"0.heard": LOST, "2.heard": LOST}, LOST, 1),
        ({"0.heard": LOST, "2.heard": "samestep: rank 0 is gone\n"}, LOST, 1),
        ({}, "", 1),
    ],
)
def test_every_error_is_said_once(
    left: dict[str, str], said: str, counts: int, killed: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    with entered(Told(pid_0=5, status_1=3)) as processes:
        for name, text in left.items():
            (processes._told / name).write_text(text)
        assert processes._note(1) == counts
    assert capfd.readouterr() == ("", said)


def test_a_process_leaves_word_with_its_launcher_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.delenv(launch.TOLD, raising=False)
    assert not launch.leave(BAD, heard=False)
    monkeypatch.setenv(launch.TOLD, str(tmp_path))
    assert launch.leave(BAD, heard=False)
    assert launch.leave(LOST, heard=True)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"2.error": BAD, "2.heard": LOST}


def test_every_process_gets_every_signal_once(killed: list[tuple[int, int]]) -> None:
    """In their order, also one whose number is known later; none that has ended, or is just ending."""
    with entered(Told(pid_0=5, pid_2=7, status_2=0)) as processes:
        assert processes.poll() == [None, None, 0]
        assert killed == []
        processes.signal(15)
        processes.poll()
        assert killed == [(5, 15)]
        processes.signal(2)
        processes.tell(pid_1=9)
        for _ in range(2):
            processes.poll()
            assert killed == [(5, 15), (5, 2), (9, 15), (9, 2)]


@pytest.mark.parametrize(("ranks", "ended"), [(None, [8, 9]), ([1], [9]), ([0, 1, 2], [8, 9]), ([], []), ([2], [])])
def test_chosen_processes_are_killed(ranks: list[int] | None, ended: list[int], killed: list[tuple[int, int]]) -> None:
    with entered(Told(pid_0=8, pid_1=9, pid_2=7, status_2=0)) as processes:
        processes.kill(ranks)
        assert killed == [(pid, signal.SIGKILL) for pid in ended]
    with entered(Told()) as processes:  # none has told its number yet
        killed.clear()
        processes.kill()
        assert killed == []


@pytest.mark.parametrize(
    ("seen", "status", "seconds"),
    [
        ([[0, 0]], 0, 0),
        ([[None, 0], [None, 0], [0, 0]], 0, 2),
        ([[None, None], [None, 3], [0, 3]], 3, 2),
        ([[None, -15], [4, -15]], 143, 1),  # the first one counts
        ([[0, -1]], 129, 0),
        ([[None, -9], *[[None, -9]] * 9], 137, 3),  # the other does not end
        ([[None, 1], *[[None, 1]] * 9], 1, 3),
        ([[None, 2], [5, 2]], 5, 1),  # the one that failed by itself counts, not one that heard of it
    ],
)
def test_waiting_for_processes(
    seen: list[list[int | None]], status: int, seconds: int, killed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sleep takes half a second, and those that are left after a failure have one."""
    now, noted = [100.0], list[int]()
    monkeypatch.setattr(launch, "GRACE", 1.0)
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda poll: now.append(now.pop() + 0.5))
    monkeypatch.setattr(launch, "time", clock)
    with entered(Told()) as processes:
        states = iter(seen)
        monkeypatch.setattr(processes, "poll", lambda: next(states))
        monkeypatch.setattr(processes, "_first", lambda states: next((i for i in (1, 0) if states[i]), None))
        monkeypatch.setattr(processes, "_note", lambda failed: noted.append(failed) or (0 if status == 5 else failed))
        assert processes.wait() == status
    assert (now, noted) == ([100.0 + seconds / 2], [1] if status else [])


@pytest.mark.parametrize(
    ("asked", "status", "expected"), [([], 3, 3), ([15, 2], 1, 143), ([2, 15], 143, 130), ([15], 0, 0), ([], 0, 0)]
)
def test_exit_status_after_signals(
    asked: list[int], status: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the first signal, unless all have ended well nevertheless."""
    made = list[Any]()

    class Made(contextlib.nullcontext[None]):
        def __init__(self, *given: Any) -> None:
            super().__init__()
            made.extend(given)
            self.asked = list[int]()

        def signal(self, number: int, frame: object) -> None:
            self.asked.append(number)

        def wait(self) -> int:
            for number in asked:
                signal.raise_signal(number)
            return status

    monkeypatch.setattr(launch, "Processes", Made)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert launch.launch(["it"], 2) == expected
    assert made == [["it"], 2, os.environ, "torch"]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(("platform", "interface"), [("linux", "lo"), ("darwin", "lo0"), ("sunos5", "lo0")])
def test_the_variables_of_started_processes(platform: str, interface: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of other processes than these; one alone has no place to meet."""
    started, stray = list[Any](), {"RANK": "7", "PMI_SIZE": "7", "SLURM_JOB_ID": "7", "OTHER": "x"}

    def start(self: Any, before: list[str], env: dict[str, str]) -> Any:
        started.append((before, dict(env)))
        return Starter()

    monkeypatch.setattr(launch.Processes, "_start", start)
    monkeypatch.setattr(launch, "mpiexec", lambda: "mpiexec")
    monkeypatch.setattr(sys, "platform", platform)
    kept = {"SLURM_JOB_ID": "7", "OTHER": "x"}
    for count, engine in ((1, "torch"), (2, "torch"), (3, "mpi")):
        with launch.Processes(["it"], count, stray, engine) as processes:
            assert len(processes._starters) == len(processes._got) == count
            meet = {MEET: f"file://{processes._told}/meet", "GLOO_SOCKET_IFNAME": interface}
            meet[launch.TOLD] = str(processes._told)
        if engine == "mpi":
            env = {"OTHER": "x", "HYDRA_LAUNCHER": "fork"} | meet
            assert started == [(["mpiexec", "-n", "3"], env)]
        elif count == 1:
            assert started == [([], kept)]
        else:
            places = [dict(zip(TORCHRUN, (rank, "2", rank, "2"), strict=True)) for rank in "01"]
            assert started == [([], kept | meet | place) for place in places]
        started.clear()


def test_mpiexec_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "mpiexec", lambda: None)
    processes = launch.Processes(["it"], 2, {}, "mpi")
    with pytest.raises(
        BackendMissing, match=r"^mpiexec is not there; in a clone of samestep: pip install '\.\[mpi\]'$"
    ):
        processes.__enter__()
    processes.__exit__()


@pytest.mark.parametrize(
    ("there", "found"),
    [(["own", "other"], "own"), (["own"], "own"), (["other"], "other"), ([], None)],
)
def test_the_mpiexec_of_this_python_comes_first(
    there: list[str], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def which(name: str, path: str | None = None) -> str | None:
        assert (name, path) in (("mpiexec", None), ("mpiexec", os.path.dirname(sys.executable)))
        place = "own" if path else "other"
        return place if place in there else None

    monkeypatch.setattr(launch.shutil, "which", which)
    assert launch.mpiexec() == found


def test_a_process_is_started_in_a_session_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C in the terminal reaches it through us, and it inherits what rank.py needs."""
    given = dict[str, Any]()

    def start(command: list[str], **settings: Any) -> Starter:
        given.update(settings, command=command)
        return Starter()

    monkeypatch.setattr(subprocess, "Popen", start)
    with launch.Processes(["it", "-x"], 1, {}, "torch") as processes:
        files = [*processes._shown, processes._lifeline]
        folder = processes._folder.name
    assert (given["start_new_session"], given["pass_fds"]) == (True, files)
    arguments = list(map(str, [files[2], folder, *files[:2]]))
    assert given["command"] == [sys.executable, "-I", "-S", launch.wrapper.__file__, *arguments, "it", "-x"]


# rank.py


@pytest.mark.parametrize(
    ("command", "status", "told"),
    [("true", 0, "0"), ("exit 3", 3, "3"), ("kill -9 $$", 137, "-9"), ("kill -10 $$", 138, "-10")],
)
def test_rank_tells_how_its_command_has_ended(command: str, status: int, told: str, tmp_path: Path) -> None:
    lifeline, ours = os.pipe()
    with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
        files = [lifeline, out.fileno(), err.fileno()]
        given = map(str, [lifeline, tmp_path, *files[1:], "sh", "-c", f"echo $$; echo err >&2; {command}"])
        ended = subprocess.run(
            [sys.executable, "-I", "-S", launch.wrapper.__file__, *given], env=os.environ | {"RANK": "1"}, pass_fds=files,
            start_new_session=True, capture_output=True, timeout=process_job.DEADLINE,
        )  # fmt: skip
    os.close(lifeline)
    os.close(ours)
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, b"", b"")
    assert (tmp_path / "1.status").read_text() == told
    assert (tmp_path / "out").read_text().strip() == (tmp_path / "1.pid").read_text()
    assert (tmp_path / "err").read_text() == "err\n"


WATCHED = """
import os, runpy, signal, sys
lifeline, ours = os.pipe()
seen, kept = os.pipe()
os.dup2(kept, 1)
os.dup2(kept, 90)  # there are gaps before it
os.close(kept)
runpy.run_path(sys.argv[1])["watch"](lifeline)
os.close(1)
os.close(90)
assert os.read(seen, 1) == b""  # the other one has closed them as well
os.write(2, b"closed")
os.close(ours)
signal.pause()
"""


def test_the_watcher_keeps_nothing_open_and_ends_all() -> None:
    ended = subprocess.run(
        [sys.executable, "-I", "-S", "-c", WATCHED, launch.wrapper.__file__], start_new_session=True,
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=process_job.DEADLINE,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (-signal.SIGKILL, b"closed")
