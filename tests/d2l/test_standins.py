"""standins: a GPU that is not there is another one, or the CPU. Machines with GPUs are made up here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from samestep.d2l.standins import standing_in

CELL = {"__name__": "__main__", "torch": torch}


class Recorder(TorchFunctionMode):
    """Notes the devices that PyTorch is told, and makes everything on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        here = [str(value) for value in [*args, *kwargs.values()] if isinstance(value, torch.device)]
        self.told += here
        kwargs |= {name: "cpu" for name, value in kwargs.items() if isinstance(value, torch.device)}
        args = ["cpu" if isinstance(value, torch.device) else value for value in args]
        return function(*args, **kwargs)


@contextmanager
def machine(gpus: int) -> Iterator[Recorder]:
    """A chapter that runs on a machine with so many GPUs."""
    with pytest.MonkeyPatch.context() as patch, Recorder() as recorder:
        patch.setattr(torch.cuda, "device_count", lambda: gpus)
        patch.setattr(torch.cuda, "synchronize", lambda device=None: recorder.told.append(f"waited for {device}"))
        with standing_in("torch"):
            yield recorder


def told(gpus: int, code: str) -> list[str]:
    """The devices that a cell's code leads to."""
    with machine(gpus) as recorder:
        exec(code, dict(CELL))
    return recorder.told


@pytest.mark.parametrize(
    ("gpus", "first", "second"), [(0, "cpu", "cpu"), (1, "cuda:0", "cuda:0"), (2, "cuda:0", "cuda:1")]
)
def test_gpus_that_cells_name(gpus: int, first: str, second: str) -> None:
    assert told(gpus, "torch.ones(2, device='cuda')") == [first]
    assert told(gpus, "torch.device('cuda:1')") == [second]
    assert told(gpus, "torch.ones(2).to('cuda:1')") == [second]
    assert told(gpus, "torch.ones(2).cuda()") == [first]
    assert told(gpus, "torch.ones(2).cuda(1)") == [second]
    assert told(gpus, "torch.ones(2).cuda(device='cuda:1')") == [second]
    assert told(gpus, "torch.nn.Linear(2, 2).to('cuda:1')")[0] == second
    assert told(gpus, "torch.nn.parallel.scatter(torch.ones(3), ['cuda:0', 'cuda:1'])") == [first, second]
    assert told(gpus, "torch.ones(2, device='cpu'); torch.ones(2).to('meta')") == []


def test_waiting_is_for_all_gpus() -> None:
    assert told(3, "torch.cuda.synchronize()") == ["waited for 0", "waited for 1", "waited for 2"]
    assert told(0, "torch.cuda.synchronize()") == []


@pytest.mark.parametrize(("gpus", "of_a_cell"), [(0, 0), (1, 2), (2, 2), (4, 4)])
def test_one_gpu_is_two_for_cells_and_one_for_samestep(gpus: int, of_a_cell: int) -> None:
    with machine(gpus):
        space = dict(CELL)
        exec("count = torch.cuda.device_count()", space)
        assert (space["count"], torch.cuda.device_count()) == (of_a_cell, gpus)


def test_the_names_try_gpus_that_stand_for_others() -> None:
    from samestep.d2l import torch as d2l

    with machine(1):
        assert [d2l.try_gpu(i) for i in range(3)] == [torch.device("cuda:0")] * 3
        assert d2l.try_all_gpus() == [torch.device("cuda:0")]
    with machine(0):
        assert d2l.try_gpu(1) == torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:  # where no chapter runs, as in the book
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        assert [d2l.try_gpu(i) for i in range(2)] == [torch.device("cuda:0"), torch.device("cpu")]
