"""readers: a source is read by one thread at a time, or by processes; each example is what it is, whoever reads it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sources
from sources import BAD, X, Y
from torch.utils.data import Dataset

import samestep as ss
from samestep.backends.torch.backend import backend
from samestep.data import feed as feeding
from samestep.data import source as reading
from samestep.data.examples import Data
from samestep.data.feed import Feed
from samestep.data.readers import Workers
from samestep.data.source import Source
from samestep.devices import cpu
from samestep.errors import Invalid, ProcessFailed, WrongType
from samestep.models.torch import mlp

PATIENCE = 60.0  # seconds; only a broken test waits this long


def fit(data: Any, **settings: Any) -> ss.Run:
    given = {"max_epochs": 2, "batch_size": 16, "shards": 3, "devices": 1, "progress": False} | settings
    return ss.Trainer(**given).fit(mlp((5, 4, 3), seed=1), data)


@pytest.fixture(scope="module")
def plain() -> ss.Run:
    return fit(Data((X, Y), (X[:11], Y[:11])))


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("samestep")]


@contextmanager
def started(source: Any, count: int = 1) -> Iterator[Workers]:
    workers = Workers(Source("train", source), count)
    try:
        yield workers
    finally:
        workers.close()


# One thread at a time


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_an_open_file_gives_the_same_bits_on_any_number_of_devices(devices: int, plain: ss.Run, tmp_path: Path) -> None:
    with (source := sources.File(tmp_path / "x")).file:
        runs = [fit(Data(source, (X[:11], Y[:11])), devices=devices) for _ in range(2)]
    assert [run.fingerprint for run in runs] == [plain.fingerprint] * 2
    assert [run.fingerprints for run in runs] == [plain.fingerprints] * 2


class Meeting(sources.File):
    """Between seek and read, a thread waits for another one to have sought too."""

    thread_safe = True  # which is not true

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.barrier = threading.Barrier(2, timeout=PATIENCE)

    def between(self) -> None:
        self.barrier.wait()


def read_two(source: Any) -> list[list[float]]:
    """The first two examples, each as a shard of its own, read ahead."""
    feed = Feed(backend, Source("train", source), [cpu()], None)
    try:
        pass_ = feed.start(np.arange(2), [(0, 1), (1, 2)])
        return [pass_.shard(span, cpu())[0][0].tolist() for span in ((0, 1), (1, 2))]
    finally:
        feed.close()


def test_two_threads_at_a_time_corrupt_an_open_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: how every source was read before."""
    monkeypatch.setattr(feeding.os, "cpu_count", lambda: 2)
    with (source := Meeting(tmp_path / "x")).file:
        assert read_two(source) != X[:2].tolist()
    with (other := sources.File(tmp_path / "y")).file:
        assert read_two(other) == X[:2].tolist()


class Barrier(sources.Table):
    """Nobody gets an example before two threads have asked for one."""

    thread_safe = True

    def __init__(self) -> None:
        super().__init__()
        self.barrier = threading.Barrier(2, timeout=PATIENCE)

    def __getitem__(self, indices: Any) -> Any:
        self.barrier.wait()
        return super().__getitem__(indices)


def test_a_source_that_says_it_is_thread_safe_is_read_by_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding.os, "cpu_count", lambda: 2)
    assert read_two(Barrier()) == X[:2].tolist()


@pytest.mark.parametrize(("cores", "threads"), [(8, 4), (4, 4), (3, 3), (None, 1)])
def test_at_most_four_threads_read_and_one_what_is_not_thread_safe(
    cores: int | None, threads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(feeding.os, "cpu_count", lambda: cores)
    np.save(tmp_path / "x.npy", X)
    nearly = sources.Table()
    nearly.thread_safe = 1  # type: ignore[attr-defined]
    found = []
    for given in (Barrier(), (np.load(tmp_path / "x.npy", mmap_mode="r"), Y), sources.Table(), nearly):
        feed = Feed(backend, Data(given).train, [cpu()], None)
        feed.start(np.arange(2), [(0, 2)])
        assert feed._readers is not None
        found.append(feed._readers._max_workers)
        readers = feed._readers
        feed.start(np.arange(2), [(0, 2)])
        assert feed._readers is readers  # the same ones for every pass
        feed.close()
    assert found == [threads, threads, 1, 1]


class Noting(sources.Table):
    """Notes who reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.readers = set[str]()

    def __getitem__(self, indices: Any) -> Any:
        self.readers.add(threading.current_thread().name)
        return super().__getitem__(indices)


def test_any_other_source_is_read_by_one_thread_beside_the_callers(plain: ss.Run) -> None:
    assert fit(source := Noting()).fingerprint == plain.fingerprint
    assert source.readers == {threading.current_thread().name, "samestep-read_0"}


class Parked(sources.Table):
    """A read that the test lets go on."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.released = threading.Event(), threading.Event()

    def __getitem__(self, indices: Any) -> Any:
        self.entered.set()
        assert self.released.wait(PATIENCE)
        return super().__getitem__(indices)


def test_while_one_source_is_read_no_other_is_as_they_may_share_a_file() -> None:
    source = Parked()
    feed = Feed(backend, Source("train", source), [cpu()], None)
    pass_ = feed.start(np.arange(2), [(0, 1), (1, 2)])
    consumer = threading.Thread(target=pass_.shard, args=((0, 1), cpu()))
    consumer.start()
    assert source.entered.wait(PATIENCE)
    assert not reading.READING.acquire(blocking=False)  # which every read of this thread would wait for
    given_up = threading.Event()
    with pass_._lock:  # when all that is to be read has been asked for
        later = pass_._ahead[1, 2]
    later.add_done_callback(lambda _: given_up.set())
    closing = threading.Thread(target=feed.close)
    closing.start()
    assert given_up.wait(PATIENCE)  # what nobody needs any more is not read
    assert later.cancelled()
    source.released.set()
    consumer.join()
    closing.join()
    assert reading.READING.acquire(blocking=False)
    reading.READING.release()


class Alone(sources.Table):
    """Refuses to be read by two threads at a time, and notes who reads."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.threads = threading.Lock(), set[str]()

    def __getitem__(self, indices: Any) -> Any:
        assert self.lock.acquire(blocking=False), "two threads at a time"
        self.threads.add(threading.current_thread().name)
        try:
            return super().__getitem__(indices)
        finally:
            self.lock.release()


def test_training_and_test_examples_may_be_one_object() -> None:
    source = Alone()
    fit(Data(source, source), devices=3)
    assert source.threads == {threading.current_thread().name, "samestep-read_0"}


def test_how_a_source_lies_in_memory_does_not_reach_the_kernels() -> None:
    images = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 4, 5, 3)
    feed = Feed(backend, Source("train", sources.Table(images.transpose(0, 3, 1, 2), Y[:2])), [cpu()], None)
    x, _ = feed.start(np.arange(2), [(0, 2)]).shard((0, 2), cpu())
    feed.close()
    assert x.is_contiguous()
    assert (x.numpy() == images.transpose(0, 3, 1, 2)).all()


class Rows(sources.Table):
    """A source in SQLite."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.connection = sqlite3.connect(":memory:", **settings)
        self.connection.execute("create table examples (i integer primary key, x blob)")
        self.connection.executemany("insert into examples values (?, ?)", [(i, x.tobytes()) for i, x in enumerate(X)])

    def __getitem__(self, indices: Any) -> Any:
        rows = [self.connection.execute("select x from examples where i = ?", [int(i)]).fetchone() for i in indices]
        return np.stack([np.frombuffer(row[0], np.float32) for row in rows]), Y[indices]


def test_sqlite(plain: ss.Run) -> None:
    refused = Rows()
    with pytest.raises(Invalid) as caught:
        fit(refused)
    how = "connect to SQLite with check_same_thread=False, or use Data(readers=0)"
    assert str(caught.value) == f"train: {how}: a thread reads it"
    source = Rows(check_same_thread=False)
    assert fit(source, devices=2).fingerprint == plain.fingerprint
    for opened in (refused, source):
        opened.connection.close()


# Workers


@pytest.mark.parametrize(("readers", "devices"), [(None, 3), (0, 2), (1, 1), (3, 2)])
def test_same_bits_for_any_number_of_readers(readers: int | None, devices: int, plain: ss.Run) -> None:
    run = fit(Data(sources.Table(), sources.Table(X[:11], Y[:11]), readers=readers), devices=devices)
    assert (run.fingerprint, run.fingerprints) == (plain.fingerprint, plain.fingerprints)
    assert run.history[-1]["test_loss"] == plain.history[-1]["test_loss"]
    assert run.recipe == fit(Data(sources.Table(), sources.Table(X[:11], Y[:11]))).recipe


def test_an_evaluation_by_workers() -> None:
    def evaluate(data: Any) -> Any:
        return ss.Trainer(devices=1, shards=3, progress=False).evaluate(mlp((5, 4, 3), seed=1), data)

    assert evaluate(Data(sources.Table(), readers=2)) == evaluate((X, Y))


def test_workers_open_a_file_of_their_own(plain: ss.Run, tmp_path: Path) -> None:
    with (source := sources.Reopened(tmp_path / "x")).file:
        assert fit(Data(source, readers=2), devices=2).fingerprint == plain.fingerprint


def test_every_shard_is_read_by_a_worker_and_all_of_them_work(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed(backend, Data(sources.Telling(), readers=2).train, [cpu()], None)
    spans = [(i, i + 1) for i in range(8)]
    pass_ = feed.start(np.arange(8), spans)
    told = np.concatenate([pass_.shard(span, cpu())[0].numpy() for span in spans])
    assert [process.daemon for process in multiprocessing.active_children()] == [True] * 2  # they end with the run
    assert set(told[:, 0].tolist()) == {process.pid for process in multiprocessing.active_children()}
    feed.close()
    # Each has a session of its own, so that Ctrl-C is for the run alone; and none has imported a framework.
    assert (told[:, 0] == told[:, 1]).all()
    assert not told[:, 2].any()
    assert "torch" in sys.modules


def test_a_worker_computes_with_one_thread() -> None:
    with started(sources.WithTorch()) as workers:
        assert workers.read(np.arange(1))[0].tolist() == [[1]]


def test_a_source_that_cannot_be_pickled_is_read_by_one_thread(plain: ss.Run, tmp_path: Path) -> None:
    line = r"^readers=2: one thread reads train instead, as no other process can get it: cannot pickle '(_io.)?FileIO' "
    with (source := sources.File(tmp_path / "x")).file, pytest.warns(UserWarning, match=line) as caught:
        run = fit(Data(source, readers=2))
    assert len(caught) == 1
    assert run.fingerprint == plain.fingerprint


@pytest.mark.parametrize("kind", ["memmap", "thread_safe"])
def test_what_threads_may_read_is_read_by_threads(kind: str, plain: ss.Run, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    given: Any = (np.load(tmp_path / "x.npy", mmap_mode="r"), Y) if kind == "memmap" else sources.Table()
    if kind == "thread_safe":
        given.thread_safe = True
    data = Data(given, readers=3)
    assert fit(data).fingerprint == plain.fingerprint
    feed = Feed(backend, data.train, [cpu()], None)
    assert (feed._staff(), feed._workers) == (3, None)


@pytest.mark.parametrize("readers", [None, 2])
@pytest.mark.parametrize(
    ("source", "error", "line"),
    [
        (sources.Failing(OSError, "disk 4 does not answer"), OSError, "disk 4 does not answer"),
        (sources.Failing(EOFError, "the file is cut"), EOFError, "the file is cut"),
        (sources.Table(X, np.where(np.arange(50) == BAD, 7, 1)), Invalid, "train y: labels must be from 0 to 2, as the model "
         "gives 3 scores, got labels from 1 to 7"),
        (sources.Failing(ValueError, "no such row"), WrongType, "train[indices] must give a pair of arrays (x, y) for an array "
         "of indices, but Failing raised ValueError: no such row (sources.py, line 82)"),
    ],
)  # fmt: skip
def test_an_error_is_the_same_whoever_reads(
    source: Any, error: type[Exception], line: str, readers: int | None
) -> None:
    with pytest.raises(error) as caught:
        fit(Data(source, readers=readers), devices=2)
    assert str(caught.value) == line


def test_an_error_of_another_process_says_where_it_was_raised() -> None:
    with started(sources.Failing(OSError, "disk 4 does not answer")) as workers, pytest.raises(OSError) as caught:
        workers.read(np.array([BAD]))
    assert str(caught.value) == "disk 4 does not answer"
    assert caught.value.__notes__ == ["raised in a process that reads examples (sources.py, line 82)"]


def test_an_error_that_cannot_be_sent_is_told() -> None:
    with started(sources.Failing(sources.Odd, 4, "no answer")) as workers:
        with pytest.raises(ProcessFailed) as caught:
            workers.read(np.array([BAD]))
        assert str(caught.value) == "a worker met Odd: disk 4: no answer (sources.py, line 82) (try readers=None)"
        assert workers.read(np.arange(2))[1].tolist() == Y[:2].tolist()  # and it goes on


def test_a_source_that_cannot_be_made_again() -> None:
    with pytest.raises(ProcessFailed) as caught:
        fit(Data(sources.NotMadeAgain(), readers=2))
    assert (
        str(caught.value)
        == "a worker met RuntimeError: no licence for this process (sources.py, line 106) (try readers=None)"
    )


def test_a_worker_that_dies_is_named() -> None:
    with pytest.raises(ProcessFailed) as caught:
        fit(Data(sources.Killed(), readers=2), devices=2)
    line = str(caught.value)
    assert line.startswith("worker process ")
    assert line.endswith("which reads train, ended with exit code -9: see what it wrote, or use fewer readers")


def test_a_worker_that_ends_by_itself_is_named() -> None:
    with started(sources.Ended()) as workers, pytest.raises(ProcessFailed, match="ended with exit code 99: see what"):
        workers.read(np.arange(1))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_worker_that_died_while_nobody_asked_is_named(number: signal.Signals) -> None:
    with started(sources.Table(), 2) as workers:
        for _ in range(2):
            workers.read(np.arange(3))
        victim = multiprocessing.active_children()[0]
        os.kill(victim.pid or 0, number)
        victim.join()
        for _ in range(2):  # again and again
            with pytest.raises(ProcessFailed, match=rf"^worker process {victim.pid}, .* exit code -{int(number)}: "):
                for _ in range(2):
                    workers.read(np.arange(3))


def test_a_signal_to_the_group_is_not_for_workers() -> None:
    with started(sources.Telling(), 2) as workers:
        pids = [int(workers.read(np.arange(1))[0][0, 0]) for _ in range(4)]
        assert pids == pids[:2] * 2  # they take turns
        assert len(set(pids)) == 2
        assert [os.getpgid(pid) for pid in pids] == pids
        assert os.getpgrp() not in pids


def test_a_worker_that_is_still_starting_does_not_hear_of_a_ctrl_c() -> None:
    with started(sources.Telling()) as workers:
        [child] = multiprocessing.active_children()
        os.kill(int(child.pid or 0), signal.SIGINT)  # it imports NumPy now
        assert int(workers.read(np.arange(1))[0][0, 0]) == child.pid
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])  # the run itself does


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        if i == 33:
            raise ValueError("broken image")
        return X[i], Y[i]


@pytest.mark.parametrize("readers", [None, 0, 2])
def test_an_error_inside_an_item_is_the_users_own(readers: int | None) -> None:
    with pytest.raises(ValueError, match=r"^broken image$") as caught:
        fit(Data(Broken(), readers=readers))
    assert type(caught.value) is ValueError


PARENT = """
import os, signal, numpy as np, sources
from samestep.data.readers import Workers
from samestep.data.source import Source

if __name__ == "__main__":
    workers = Workers(Source("train", sources.Table()), 2)
    for _ in range(2):
        workers.read(np.arange(2))
    print("killed", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""

UNGUARDED = """
import samestep as ss, sources
from samestep.models.torch import mlp

print("once more")
ss.Trainer(1, run_dir="run", progress=False).fit(mlp((5, 4, 3)), ss.Data(sources.Table(), readers=1))
"""


def run_script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Runs a script, and waits for all that holds its output: for its workers, too."""
    (folder / "script.py").write_text(text)
    paths = [str(Path(module.__file__ or "").parents[up]) for module, up in ((sources, 0), (ss, 1))]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "script.py"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE)


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    done = run_script(tmp_path, PARENT)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGKILL, "killed\n", "")


def test_a_script_without_a_guard_is_told_to_have_one(tmp_path: Path) -> None:
    done = run_script(tmp_path, UNGUARDED)
    line = done.stderr.splitlines()[-1]
    assert line.startswith("samestep.errors.ProcessFailed: worker process ")
    assert line.endswith(
        'imports this script: begin the fit under if __name__ == "__main__":, or use Data(readers=None)'
    )
    assert done.stdout == "once more\n" * 2
    assert done.stderr.count("Traceback") == 1  # the worker said nothing


def test_readers_must_be_a_count() -> None:
    with pytest.raises(Invalid, match="^readers must be at least 0, got readers=-1$"):
        Data((X, Y), readers=-1)


# Examples that are not like others


class Items(Dataset):  # type: ignore[type-arg]
    def __init__(self, x: Any = X, y: Any = Y) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


class Mixed(sources.Table):
    def __getitem__(self, indices: Any) -> Any:
        x, y = super().__getitem__(indices)
        return x.astype(np.float64 if BAD in indices else np.float32), y


def test_a_shard_of_another_type_is_refused() -> None:
    with pytest.raises(WrongType) as caught:
        fit(Mixed(), batch_size=3)
    assert (
        str(caught.value)
        == "train must be of one type, got x of float32 with y of int64 and x of float64 with y of int64"
    )


@pytest.mark.parametrize(
    ("x", "y", "types"),
    [
        ([*X[:BAD], X[BAD].astype(np.float64), *X[BAD + 1 :]], Y, "dtype('float32') to dtype('float64')"),
        (X, [*Y[:BAD].tolist(), 1.0, *Y[BAD + 1 :].tolist()], "dtype('int64') to dtype('float64')"),
    ],
)
def test_an_item_of_another_type_is_refused(x: Any, y: Any, types: str) -> None:
    with pytest.raises(WrongType) as caught:
        fit(Items(x, y), shards=1)
    assert str(caught.value).startswith(
        "train[i] must give a pair (x, y), of one shape and type for all i, but Items raised"
    )
    assert types in str(caught.value)
    assert "\n" not in str(caught.value)


def test_whole_numbers_of_any_type_may_be_labels(plain: ss.Run) -> None:
    assert fit(Items(X, [*Y[:BAD].tolist(), *Y[BAD:].astype(np.uint8)])).fingerprint == plain.fingerprint


@pytest.mark.parametrize("kind", [lambda x, y: (x, y), sources.Table, Items], ids=["arrays", "source", "dataset"])
@pytest.mark.parametrize(
    ("x", "y", "dtype"),
    [(X.astype("U3"), Y, "<U3"), (np.zeros(50, "f4,f4"), Y, r"\[\('f0', '<f4'\)"), (X.astype(object), Y, "object"),
     (X, Y.astype("S1"), r"\|S1"), (X, Y.astype("M8[s]"), "date")],
)  # fmt: skip
def test_examples_that_are_no_numbers_are_refused(kind: Any, x: Any, y: Any, dtype: str) -> None:
    with pytest.raises(WrongType, match=rf"train [xy] must be numbers, got an array of {dtype}.*: convert it"):
        fit(kind(x, y), loss=lambda output, y: output.mean(1))


@pytest.mark.parametrize("readers", [None, 1])
def test_a_fit_that_is_refused_leaves_no_reader_behind(readers: int | None) -> None:
    """Its loss was tried on the first batch, so somebody has read by then; the fixture looks."""
    for refused in (
        {"loss": lambda output, y: output.var()},
        {"monitor": "test_top5", "loss": lambda output, y: output.mean()},
    ):
        with pytest.raises(Invalid, match="couples examples|^monitor: this fit has train_loss"):
            fit(Data(sources.Table(), readers=readers), **refused)
