"""Any number of Ctrl-C at any moment of a fit or an evaluation: it ends, everything is as before, and the next fit is the same.

An interrupt is sent at a line that samestep runs; from the moment that it is raised, another one comes at every call and at
every return, until the fit has been left. After that all settings must be as they were, and another fit has the same bits.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import samestep as ss
from samestep import signals
from samestep.backends.torch.backend import backend
from samestep.errors import NotFinite
from samestep.signals import Signals
from samestep.training.fit import Fit
from samestep.training.measuring import measured

PACKAGE = str(Path(ss.__file__).parent)
EVERY = int(os.environ.get("SAMESTEP_EVERY_LINE", "23"))  # of so many moments, one is tried; 1: all of them
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.standard_normal((24, 6)).astype(np.float32), RANDOM.integers(0, 3, 24)


class Net(nn.Module):
    """With a buffer that also a forward pass in evaluation writes to, dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.passes += 1
        return self.layers(x)


MODEL = Net()
torch.manual_seed(7)  # what the model drew is not what others find


@pytest.fixture(autouse=True, scope="module")
def two_cores() -> Iterator[None]:
    """On any machine, threads compute side by side: on one core there would be none to put away."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("samestep.backends.workers.cores", lambda: 2)
        yield


def fit(**settings: Any) -> ss.Run:
    usual: dict[str, Any] = {"max_epochs": 1, "batch_size": 12, "shards": 2, "progress": False, "devices": "cpu"}
    return ss.Trainer(**usual | settings).fit(MODEL, ss.Data(train=(X, Y), test=(X[:8], Y[:8])))


def evaluate() -> Any:
    return ss.Trainer(batch_size=12, shards=2, devices="cpu").evaluate(MODEL, (X, Y))


def state() -> dict[str, Any]:
    """All that a fit changes for its time, and the user's model."""
    flags = torch.utils.deterministic.fill_uninitialized_memory
    return {
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "threads": torch.get_num_threads(), "noise": torch.random.get_rng_state().tolist(),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic, flags),
        "mkldnn": torch._C._get_mkldnn_enabled(), "gradients": torch.is_grad_enabled(),
        "busy": (backend.workers._busy.locked(), backend.workers.there), "guard": signals._guard,
        "modes": [module.training for module in MODEL.modules()],
        "model": {name: tensor.tolist() for name, tensor in MODEL.state_dict().items()},
    }  # fmt: skip


class Storm:
    """A Ctrl-C at the n-th line of samestep that the main thread runs; once it is raised, more of them, until the end."""

    def __init__(self, at: int = -1) -> None:
        self.at, self.lines, self.seen, self.raised = at, 0, list[str](), False

    def __enter__(self) -> Storm:
        self._before = signal.signal(signal.SIGINT, self._raise)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        sys.settrace(None)
        signal.signal(signal.SIGINT, self._before)

    def _raise(self, number: int, frame: object) -> None:
        """What Python itself does at a Ctrl-C; from here on, they come all the time."""
        if not self.raised:
            self.raised = True
            sys.setprofile(self._more)
        raise KeyboardInterrupt

    def _more(self, frame: FrameType, event: str, argument: object) -> None:
        if signals._guard:  # after the fit, they would end the test
            signal.raise_signal(signal.SIGINT)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            if self.at < 0:
                self.seen.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            if self.lines == self.at:
                self.lines += 1
                signal.raise_signal(signal.SIGINT)
            self.lines += 1
        return self._trace


def moments(work: Callable[[], Any], only: str = "") -> list[int]:
    """When each line of samestep is run for the first and for the last time, some of them; or one line, for the last time."""
    with Storm() as storm:
        work()
    if only:
        file, _, text = only.partition(": ")
        lines = Path(PACKAGE, file).read_text().splitlines()
        wanted = f"{PACKAGE}/{file}:{next(i for i, line in enumerate(lines, 1) if text in line)}"
        return [max(i for i, line in enumerate(storm.seen) if line == wanted)]
    first = {line: i for i, line in reversed(list(enumerate(storm.seen)))}
    last = {line: i for i, line in enumerate(storm.seen)}
    assert len(first) > 100
    return sorted({*first.values(), *last.values()})[::EVERY]


def tried(work: Callable[[], Any], check: Callable[[], None]) -> int:
    """Interrupt some work at many moments, each of which must end it: how many there were."""
    ended, before = 0, state()
    for at in moments(work):
        with Storm(at) as storm:
            with suppress(KeyboardInterrupt):
                work()
                assert not storm.raised, at
            ended += storm.raised
        assert storm.raised or storm.lines <= at  # with threads, not every run has as many lines
        assert state() == before, at
        check()
    return ended


class Source:
    """Read by threads, in contrast to arrays."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, indices: Any) -> Any:
        return X[indices], Y[indices]


WORK = {
    "fit": fit,
    "evaluation": evaluate,
    "source": lambda: ss.Trainer(1, 12, shards=2, progress=False, devices="cpu").fit(MODEL, Source()),
}


def count_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the loop of a fit, the first one only asks it to stop after the step, so each counts twice."""
    ask = Signals._ask

    def twice(self: Signals, number: int, frame: object) -> None:
        ask(self, number, frame)
        ask(self, number, frame)

    monkeypatch.setattr(Signals, "_ask", twice)


@pytest.mark.parametrize("kind", WORK)
def test_any_number_of_interrupts_at_any_moment(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, threads = fit(), threading.active_count()
    count_twice(monkeypatch)

    def check() -> None:
        assert fit().fingerprints == whole.fingerprints

    assert tried(WORK[kind], check) > 8
    gc.collect()
    assert threading.active_count() == threads


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file that Python itself closes
def test_any_number_of_interrupts_with_a_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards the run can be resumed."""
    whole, folders = fit(), [tmp_path / "0"]
    count_twice(monkeypatch)

    def work() -> None:
        folders.append(tmp_path / str(len(folders)))
        fit(run_dir=folders[-1])

    def check() -> None:
        assert fit(run_dir=folders[-1]).fingerprints == whole.fingerprints

    assert tried(work, check) > 8


LAST_LINES = [
    "backends/workers.py: self._busy.release()",
    "backends/workers.py: self._pool.shutdown(",
]


@pytest.mark.parametrize("line", LAST_LINES)
def test_without_the_guard_an_interrupt_leaves_something_behind(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: a single interrupt, at a line that puts something back."""
    fit()  # the first one runs more lines
    [at] = moments(fit, line)
    threads, before = torch.get_num_threads(), state()
    with Storm(at), pytest.raises(KeyboardInterrupt):
        fit()
    assert state() == before
    monkeypatch.setattr(signals.Guard, "_take", lambda self, number=0, frame=None: self._before(number, frame))
    with Storm(at), pytest.raises(KeyboardInterrupt):
        fit()
    after = state()
    monkeypatch.undo()
    signals._guard = None
    if backend.workers._busy.locked():
        with pytest.raises(ss.SamestepError, match="already going on"):
            fit()
        backend.workers._busy.release()
        backend.workers._pool = None
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.utils.deterministic.fill_uninitialized_memory = before["deterministic"][
        1:
    ]
    MODEL.load_state_dict(Net().state_dict())
    MODEL.train()
    torch.random.set_rng_state(torch.tensor(before["noise"], dtype=torch.uint8))
    assert after != before
    assert state() == before


# When it is heard, and by whom


@contextmanager
def handled(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_held_back_until_it_is_heard() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), signals.Guard():
        ctrl_c()
        ctrl_c()
        done.append("held")
        with signals.heard():
            done.append("heard")
    assert done == ["held"]
    with pytest.raises(KeyboardInterrupt), signals.Guard():
        ctrl_c()
        done.append("at the end")
    with pytest.raises(KeyboardInterrupt), signals.Guard(), signals.heard():
        with signals.heard(False):
            ctrl_c()
            with signals.heard(False):
                done.append("twice")
            done.append("inside")
        done.append("not here")
    with signals.heard(), signals.heard(False), pytest.raises(KeyboardInterrupt):
        ctrl_c()  # outside of a guard, nothing changes
    assert done == ["held", "at the end", "twice", "inside"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_one_does_not_disturb_what_the_first_has_started() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), signals.Guard(), signals.heard():
        try:
            ctrl_c()
        finally:
            ctrl_c()
            with signals.heard():
                ctrl_c()
            done.append("put back")
    assert done == ["put back"]


def test_an_error_does_not_swallow_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, signals.Guard():
        ctrl_c()
        raise NotFinite("the loss is nan")
    assert isinstance(caught.value.__context__, NotFinite)


def test_a_guard_in_a_guard() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), signals.Guard():
        with signals.Guard():
            ctrl_c()
            done.append("inner")
        done.append("outer")
    with pytest.raises(KeyboardInterrupt), signals.Guard(), signals.heard():
        with signals.Guard():
            ctrl_c()
            done.append("inner")
        done.append("not here")
    assert done == ["inner", "outer", "inner"]


def test_a_handler_of_the_users_own() -> None:
    seen = []
    with handled(lambda number, frame: seen.append(number)):
        with signals.Guard():
            ctrl_c()
            assert seen == []
            with signals.heard():
                assert seen == [signal.SIGINT]
                ctrl_c()
                ctrl_c()
            assert len(seen) == 3
            ctrl_c()
        assert len(seen) == 4
        with signals.Guard(), signals.heard():
            ctrl_c()
        assert len(seen) == 5  # once for each, not again at the end
        assert fit().fingerprint
    with handled(signal.SIG_IGN):
        with signals.Guard(), signals.heard():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            ctrl_c()
        with signals.Guard(), signals.heard(), Signals(True) as asked:  # a run folder: they count nevertheless
            ctrl_c()
            assert asked.number == signal.SIGINT
            with pytest.raises(KeyboardInterrupt):
                ctrl_c()


def test_other_threads_hear_nothing() -> None:
    done = []

    def work() -> None:
        with signals.Guard(), signals.heard(), signals.heard(False):
            done.append(signals._guard)

    with signals.Guard():
        guard = signals._guard
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert signals._guard is guard is done[0]


# In the loop of a fit, they only ask


def asked(*numbers: int) -> Signals:
    with Signals(True) as signals_:
        for number in numbers:
            signal.raise_signal(number)
    return signals_


@pytest.mark.parametrize(
    ("numbers", "last"),
    [
        ([], 0),
        ([signal.SIGTERM], signal.SIGTERM),
        ([signal.SIGTERM, signal.SIGTERM], signal.SIGTERM),
        ([signal.SIGINT, signal.SIGTERM], signal.SIGTERM),
        ([signal.SIGINT], signal.SIGINT),
    ],
)
def test_which_signal_has_asked(numbers: list[int], last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Signals, "came", 0)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert asked(*numbers).number == last
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert Signals.came == numbers.count(signal.SIGINT)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_interrupt_stops_at_once(first: int) -> None:
    seen = list[int]()
    with pytest.raises(KeyboardInterrupt):
        asked(first, signal.SIGINT)
    with handled(lambda number, frame: seen.append(number)):
        assert asked(first, signal.SIGINT).number == first
    assert seen == [signal.SIGINT]


@pytest.mark.parametrize(
    ("number", "error", "raised"),
    [
        (signal.SIGINT, NotFinite, KeyboardInterrupt),
        (signal.SIGINT, SystemExit, SystemExit),
        (signal.SIGTERM, NotFinite, NotFinite),
        (0, NotFinite, NotFinite),
    ],
)
def test_which_error_a_fit_ends_with(number: int, error: type[BaseException], raised: type[BaseException]) -> None:
    with pytest.raises(raised), Signals(True) as signals_:
        signals_.number = number
        raise error("something else")


def test_signals_that_nobody_wants_are_as_before() -> None:
    """Without a run folder, SIGTERM ends the process, and an ignored SIGINT stays ignored."""

    def work() -> None:
        with Signals(True):  # Python lets no other thread set handlers
            seen.append(signal.getsignal(signal.SIGTERM))

    seen, before = list[Any](), signal.getsignal(signal.SIGTERM)
    with Signals(False) as signals_:
        assert signal.getsignal(signal.SIGTERM) is before
        ctrl_c()
        assert signals_.number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
    with handled(signal.SIG_IGN), Signals(False) as signals_:
        ctrl_c()
        assert signals_.number == 0
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


class Hooked(nn.Linear):
    """Does something in a forward pass."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__(6, 3)
        self.act = [act]  # not part of what is copied

    def __deepcopy__(self, memo: Any) -> Any:
        twin = Hooked(self.act[0])
        twin.load_state_dict(self.state_dict())
        return twin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.act[0]()
        return super().forward(x)


def test_a_handler_of_the_users_own_is_left_alone_without_a_folder() -> None:
    seen = []
    with handled(lambda number, frame: seen.append(number)):
        with signals.Guard(), signals.heard(), Signals(False) as asked:
            ctrl_c()
        assert (asked.number, seen) == (0, [signal.SIGINT])
        with signals.Guard(), signals.heard(), Signals(True) as asked:  # with one, it is asked to stop first
            ctrl_c()
        assert (asked.number, seen) == (signal.SIGINT, [signal.SIGINT])


def test_an_interrupt_while_the_average_is_evaluated_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate, seen = Fit.average, []

    def average(self: Fit, evaluate_: bool = True) -> None:
        ctrl_c()
        seen.append(evaluate_)
        evaluate(self, evaluate_)

    monkeypatch.setattr(Fit, "average", average)
    run = fit(average=ss.ema(0.9))
    assert (seen, run.interrupted, run.average_metrics is None) == ([True], False, False)


@pytest.mark.parametrize("folder", [False, True])
def test_a_failed_fit_does_not_swallow_an_interrupt(folder: bool, tmp_path: Path) -> None:
    """With a folder, the first interrupt only asks; then the step fails."""

    def act() -> None:
        ctrl_c()
        raise NotFinite("something else")

    with pytest.raises(KeyboardInterrupt):
        ss.Trainer(1, 12, shards=1, devices="cpu", progress=False, run_dir=tmp_path / "run" if folder else None).fit(
            Hooked(act), (X, Y)
        )
    assert not (tmp_path / "run").exists()


def test_the_first_look_at_a_model_is_not_interrupted_between_its_lines() -> None:
    """The backend says itself where it hears: where the model computes."""
    done = []

    def look(*given: Any) -> None:
        ctrl_c()
        done.append(given[2:])

    framework: Any = SimpleNamespace(probe=look, style=lambda *_: False)
    examples: Any = SimpleNamespace(name="train", read=lambda indices, seed, epoch: (indices.tolist(), "y"))
    with pytest.raises(KeyboardInterrupt), signals.Guard(), signals.heard():
        measured(ss.Trainer(), framework, None, examples)
    assert done == [([0], "y", "train x")]
