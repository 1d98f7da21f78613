"""workers: whether there are threads, how many, and that a process has one run at a time."""

from __future__ import annotations

import os
import threading

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
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 7})
    assert workers.cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # as on other systems than Linux
    assert workers.cores() == 11


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
    with mine.at_work([cpu()], 1):  # which can begin again
        assert mine.there is True


@pytest.mark.parametrize(("device", "threads", "least"), [(gpu(0), 1, 1), (cpu(), 2, 2)])
def test_without_threads_the_caller_computes(
    device: object, threads: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "cores", lambda: 3)
    mine = workers.Workers()
    with mine.at_work([device], threads, least=least):  # type: ignore[list-item]
        assert mine.there is False
        assert names(mine, 3) == {threading.current_thread().name}
