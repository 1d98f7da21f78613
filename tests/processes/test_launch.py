"""launch: processes are started by us or by mpiexec, get signals, and end together; the first failure counts."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import process_job
import pytest
from commands import command, finish, is_running

from samestep.errors import BackendMissing
from samestep.processes import launch

needs_mpi = pytest.mark.skipif(not launch.mpiexec(), reason="needs mpiexec (pip install 'samestep[mpi]')")
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
    asked += 1
    (folder / f"{{rank}}.asked").touch()
    if asked == {needed}:
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
    lost = "samestep: rank 2 is gone: it was killed, or its host was lost\n"  # PyTorch's processes say it themselves
    said = lost if (engine, status) == ("mpi", 137) else ""
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
        message = f"several processes of {min(found)} need mpiexec; pip install 'samestep[mpi]'"
        with pytest.raises(BackendMissing, match=re.escape(message)):
            launch.engine_for(file, None)
    else:
        assert launch.engine_for(file, None) == "torch"


def test_the_engine_of_the_built_in_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "mpiexec", lambda: "mpiexec")
    assert [launch.engine_for(None, name) for name in (None, "torch", "jax")] == ["torch", "torch", "mpi"]
    assert launch.frameworks(Path("not there.py")) == set()


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
