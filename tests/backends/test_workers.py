"""workers: whether there are threads, how many, and that a process has one run at a time."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from samestep.backends import workers
from samestep.devices import cpu, gpu
from samestep.errors import Invalid


def names(at_work: workers.Workers, count: int) -> set[str]:
    """The threads that run tasks which all wait for each other, or the only one there is."""
    if not at_work.there:
        return set(at_work.map([lambda: threading.current_thread().name] * count))
    meet = threading.Barrier(count)

    def task() -> str:
        meet.wait(60)
        return threading.current_thread().name

    return set(at_work.map([task] * count))


def test_cores_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 11)
    monkeypatch.setattr(os, "sched_getaffinity", {0: {3, 5, 7}}.__getitem__)
    assert workers.cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # as on other systems than Linux
    assert workers.cores() == 11
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert workers.cores() == 1


@pytest.mark.parametrize(
    ("cores", "threads", "processes", "count"), [(15, 2, 3, "2"), (16, 1, 1, "16"), (1, 2, 1, "1"), (4, 1, 8, "1")]
)
def test_as_many_shards_at_a_time_as_the_processes_of_a_host_have_cores_for(
    cores: int, threads: int, processes: int, count: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "cores", lambda: cores)
    monkeypatch.setattr(workers, "find", lambda: SimpleNamespace(local_size=processes))
    assert str(workers.side_by_side(threads)) == count  # a whole number


def test_threads_are_there_for_as_long_as_a_run_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "cores", lambda: 3)
    mine, prepared = workers.Workers(), list[str]()
    assert mine.there is False
    with mine.at_work([cpu()], 1, lambda: prepared.append(threading.current_thread().name)):
        assert mine.there is True
        assert len(names(mine, 3)) == 3
        with pytest.raises(Invalid, match="already going on"), mine.at_work([cpu()], 1):
            pass
    assert mine.there is False
    assert len(prepared) == 3
    with mine.at_work([cpu()], 3):  # which can begin again
        assert mine.there is True
        assert len(names(mine, 1)) == 1


@pytest.mark.parametrize(("device", "threads", "least"), [(gpu(0), 1, 1), (cpu(), 2, 2)])
def test_without_threads_the_caller_computes(
    device: object, threads: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "cores", lambda: 3)
    mine = workers.Workers()
    with mine.at_work([device], threads, least=least):  # type: ignore[list-item]
        assert mine.there is False
        assert names(mine, 3) == {threading.current_thread().name}


def test_threads_end_with_the_run_and_nobody_waits_for_one_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[Any]()

    class Pool:
        def __init__(self, *about: Any, initializer: Any) -> None:
            told.append((*about, initializer()))

        def submit(self, task: Any) -> Any:
            return task()

        def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
            told.append((wait, cancel_futures))

    monkeypatch.setattr(workers, "cores", lambda: 3)
    monkeypatch.setattr(workers, "ThreadPoolExecutor", Pool)
    mine: Any = workers.Workers()
    assert mine.beside(lambda: "done") == "done"
    with mine.at_work([cpu()], 1, lambda: "prepared"):
        assert mine.beside(lambda: "done") == "done"
    beside = (False, False)  # it ends by itself
    assert told == [
        (1, "samestep-beside", None), beside, (3, "samestep", "prepared"), (1, "samestep-beside", "prepared"), beside,
        (True, True),
    ]  # fmt: skip
