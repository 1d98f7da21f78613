"""Anything a user may write: constructors, schedules, data, environment variables, command lines. No raw error comes out.

Each try draws its arguments from a seed of its own, so one that fails can be repeated alone. What is raised must be one of
samestep's errors, in one line; a command line ends with status 0, 1 or 2 and says why in one line, or shows its usage.
`SAMESTEP_FUZZ=5000` makes so many tries in each group.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import fractions
import io
import json
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer

import samestep as ss
from samestep import checks, portable
from samestep.backends import find
from samestep.data import fashion
from samestep.devices import resolve
from samestep.errors import Invalid, SamestepError
from samestep.processes import place
from samestep.runs import verify
from samestep.runs.checkpoint import Cadence
from samestep.schedules.kinds import SCHEDULES
from samestep.schedules.text import from_json, parse
from samestep.screen import cli
from samestep.training.trainer import Trainer

TRIES = int(os.environ.get("SAMESTEP_FUZZ", "300"))
Random = random.Random


class Raw(AssertionError):
    """Something else than samestep's own errors was raised, or one in several lines."""


def guarded(seed: str, attempt: Callable[[Random], object]) -> str | None:
    """One try: the message it was refused with, None if it was not."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attempt(Random(seed))
    except SamestepError as error:
        text = str(error)
        if not text.strip() or len(text.splitlines()) != 1:
            raise Raw(f"{seed}: not one line: {text!r}") from error
        return text
    except Exception as error:
        raise Raw(f"{seed}: {type(error).__name__}: {error}") from error
    return None


def all_of(group: str, attempt: Callable[[Random], object], tries: int = TRIES) -> None:
    """Make many tries, and see to it that they are neither all refused nor all let through."""
    refused = [guarded(f"{group} {number}", attempt) for number in range(tries)]
    assert len(set(refused)) > 10
    assert None in refused


# What is drawn


class Lines:
    """Shown in several lines."""

    def __repr__(self) -> str:
        return "first\nsecond"


class Broken:
    """Cannot be shown, and has no length."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


TEXTS = [
    "", " ", "\0", "a\nb", "auto", "cpu", "cpu:1", "cuda", "cuda:1", "gpu:-1", "cuda:99999999999999999999999", "cpu,cpu",
    "cpu,", "2", "-2", "0", "1e3", "nan", "٣", "²", "\ud800", "é", "1 epoch", "0 epochs", "30 s", "1e9 s", "9" * 400 + " s",
    "9" * 5000, "without_replacement", "with_replacement", "numerics", "code,data", "code,,", "none", "never", "x" * 500,
    "{bad", "[]", "null", "file:///x", "%s", "{0}", "runs/a", "epochs", "steps", "min", "max", "cos", "linear",
    "cosine(0.3, 20)", "1", "99999", "65535",
]  # fmt: skip
NUMBERS = [
    0, 1, 2, 3, 8, -1, 255, 2**31, 2**53, 2**53 + 1, 2**63, 2**64, 10**400, 10**5000, 0.0, -0.0, 0.5, 1.0, 1e-320, 1e308, -1e-9,
    float("nan"), float("inf"), float("-inf"), True, False, np.float32(0.1), np.float64("nan"), np.int8(3), np.uint64(2**63),
    np.bool_(True), np.float16(65504), 3j, fractions.Fraction(1, 3), decimal.Decimal("0.1"), decimal.Decimal("sNaN"),
]  # fmt: skip
OTHERS: list[Callable[[], Any]] = [
    lambda: None, object, Lines, Broken, dict, set, bytes, lambda: b"\xff", lambda: Path("here"), lambda: Path("a\0b"),
    lambda: int,
    lambda: (lambda t: 0.1), lambda: (lambda: None), lambda: ss.sgd, ss.sgd, lambda: ss.adam(), lambda: ss.cosine(0.1, 5),
    lambda: ss.constant(0.1).in_epochs(), lambda: ss.Plateau(0.1), lambda: ss.swa(1), ss.path_average, lambda: range(3),
    lambda: range(2**40), lambda: iter([1]), lambda: ss.cpu(), lambda: ss.gpu(7), lambda: torch.device("cpu"),
    lambda: torch.device("meta"), lambda: torch.tensor(0.1), lambda: torch.zeros(3), lambda: datetime.datetime(2000, 1, 1),
    lambda: ValueError("x"), lambda: Ellipsis, lambda: NotImplemented, lambda: torch.nn.Linear(2, 2), lambda: ss, lambda: np,
    lambda: np.random.default_rng(0), lambda: memoryview(b"ab"), lambda: torch.optim.SGD, lambda: warnings,
]  # fmt: skip
TYPES = ["f4", "f8", "f2", "i8", "u1", "bool", "c8", "U3", "S3", "O", "M8[s]", "m8[s]", "V4", "i4,f4", "S0"]


def array(chance: Random) -> Any:
    shape = chance.choice([(), (0,), (1,), (3,), (6,), (6, 2), (0, 2), (6, 1, 2), (6, 0)])
    made = np.zeros(shape, chance.choice(TYPES))
    kind = chance.random()
    if kind < 0.1 and made.dtype.kind in "fiu":
        return torch.from_numpy(made)
    return np.ma.masked_array(made) if kind < 0.15 else made[::-1] if kind < 0.3 and shape else made


def value(chance: Random, depth: int = 2) -> Any:
    kind = chance.random()
    if kind < 0.35:
        return chance.choice(NUMBERS)
    if kind < 0.6:
        return chance.choice(TEXTS)
    if kind < 0.8:
        return chance.choice(OTHERS)()
    if kind < 0.9 or not depth:
        return array(chance)
    some = [value(chance, depth - 1) for _ in range(chance.randrange(4))]
    return chance.choice([list, tuple, lambda these: {str(i): this for i, this in enumerate(these)}])(some)


def sensible(chance: Random) -> Any:
    """What is often right, so that other arguments are looked at as well."""
    return chance.choice([0.1, 1, 2, 5, 0.5, [1, 4], [0.1, 0.2, 0.3], True, "steps"])


# Constructors

FIELDS = [name for name in Trainer.__dataclass_fields__ if not name.startswith("_")]
CALLS: dict[Any, list[str]] = {
    ss.sgd: ["lr", "momentum", "nesterov", "weight_decay"], ss.ema: ["decay", "start"],
    ss.group: ["lr_scale", "weight_decay", "frozen"], ss.adam: ["beta1", "beta2", "eps", "weight_decay"],
    ss.adamw: ["lr", "beta1", "eps"], ss.adagrad: ["eps"], ss.sgld: ["temperature"], ss.swa: ["start", "every", "unit"],
    ss.cpu: ["i"], ss.gpu: ["i"], ss.Device.of: ["name"], parse: ["text"], from_json: ["stored"],
    ss.Plateau: ["lr", "factor", "patience", "mode", "threshold", "cooldown", "floor"], ss.Run.load: [], verify.counts: [],
}  # fmt: skip


def constructor(chance: Random) -> object:
    made = chance.choice([Trainer, Trainer, *CALLS])
    names = FIELDS if made is Trainer else CALLS[made]
    some = chance.sample(names, min(len(names), chance.choice([1, 1, 2, 3])))
    required = {} if made is Trainer else {name: sensible(chance) for name in names if name in ("start", "lr")}
    if made in (verify.counts, ss.Run.load):
        return made(*["--devices"] * (made is verify.counts), chance.choice(TEXTS))
    given = required | {name: value(chance) for name in some}
    if made in (ss.Device.of, parse, from_json):
        return made(*given.values())
    result = made(**given)
    if made is Trainer:
        result.progress = False
        resolve(result.devices, result.shards, BACKEND)
        if result.checkpoint_every is not None:
            Cadence(result.checkpoint_every, 10)
    return repr(result)


BACKEND = find.load("torch")


def test_constructors() -> None:
    all_of("constructor", constructor)


# Schedules

METHODS = ["warmup", "then", "shift", "hold", "every", "clip", "floor", "in_epochs", "bind", "restart", "values", "wat"]
PIECES = [*SCHEDULES, *METHODS, "(", ")", "[", "]", ",", ".", "*", "+", "-", "0.1", "20", "1e999", "'x'", "end=", "lr=", "None",
          "lambda", "**", "9" * 5000, "\0", "{", "f'{1}'", ":=", "\n", "#", "True", "10**9", "~", "é"]  # fmt: skip


@contextlib.contextmanager
def countable() -> Iterator[None]:
    """Python's own words for another number of arguments will do."""
    try:
        yield
    except TypeError as error:
        if isinstance(error, SamestepError) or "argument" not in str(error):
            raise
        raise Invalid(str(error)) from None


def schedule(chance: Random) -> object:
    if chance.random() < 0.5:
        text = "".join(chance.choice(PIECES) for _ in range(chance.randrange(1, 12)))
        if chance.random() < 0.7:
            usual = ["0.1", "5", "[1, 4]", "[1, 2, 3]", "0", "True"]
            arguments = ", ".join(chance.choice(usual) for _ in range(chance.randrange(5)))
            more = chance.choice(["", "", f".{chance.choice(METHODS)}({chance.randrange(9)})", text])
            text = f"{chance.choice(list(SCHEDULES))}({arguments}){more}"
        made = parse(text)
    else:
        make = chance.choice(list(SCHEDULES.values()))
        count = chance.randrange(1, 5)
        wild = chance.randrange(count + 1)
        with countable():
            made = make(*(value(chance) if i == wild else sensible(chance) for i in range(count)))
            if chance.random() < 0.5:
                made = getattr(made, chance.choice(METHODS[:8]))(value(chance))
    assert parse(repr(made)) == from_json(json.loads(json.dumps(made.to_json()))) == made
    bound = made.bind(chance.choice([1, 7]))
    bound(chance.choice([0, 1, 5, 100, 2**62]))
    bound.values(chance.choice([1, 3]))
    return bound(value(chance))


def test_schedules() -> None:
    all_of("schedule", schedule)


# Data


def data(chance: Random) -> object:
    draw = array if chance.random() < 0.8 else value
    x, y = draw(chance), array(chance)
    given = chance.choice([(x, y), [x, y], (x, y), (x, y, x), x, ((x, y), (x, y))])
    made = ss.Data(given, chance.choice([None, None, (x, y), value(chance)]))
    repr(made)
    made.train.read(np.arange(1))
    return made.train.identity()


def test_data() -> None:
    all_of("data", data)


# Environment variables

VARIABLES = [
    *place.TORCHRUN, *sum(place.MPIEXEC, ()), place.MEET, "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID",
    "SLURM_NODEID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID",
    "SLURM_NTASKS", portable.SWITCH,
]  # fmt: skip
SOME = [
    "0",
    "1",
    "2",
    "3",
    "4",
    "-1",
    "node[1-3]",
    "a,b",
    "[",
    "2(x2)",
    "2(x99999999999)",
    "1(x2),",
    "8080",
    "99999",
    "x",
]


def environment(chance: Random) -> object:
    names = [name for name in VARIABLES if chance.random() < chance.choice([0.1, 0.5, 0.9])]
    return place.find({name: chance.choice(SOME if chance.random() < 0.9 else TEXTS) for name in names})


def test_environment_variables() -> None:
    all_of("environment", environment)


def overrides(chance: Random) -> object:
    given: Any = {chance.choice([*FIELDS, "wrong"]): value(chance) for _ in range(chance.randrange(3))}
    text = chance.choice(TEXTS)
    if chance.random() < 0.1:
        text = chance.choice(["{bad", "[1]", "null", "[" * 100_000, '{"seed": 1', "\ufeff{}", '{"a\nb": 1}', '{"": 1}'])
    elif chance.random() < 0.8:
        with contextlib.suppress(ValueError):  # a number of too many digits
            text = json.dumps(given, default=lambda thing: None, skipkeys=True)
    with pytest.MonkeyPatch.context() as patch:
        if "\0" in text or "\ud800" in text:
            text = "{}"  # no variable can hold these
        patch.setenv(place.OVERRIDES, text)
        patch.setenv(portable.SWITCH, chance.choice(["", "0"]))
        return repr(Trainer())


def test_overrides() -> None:
    all_of("overrides", overrides)


# Command lines


class Stopped(SystemExit):
    """Where training would begin."""


OPTIONS = {
    "train": ["--model", "--backend", "--devices", "--shards", "--batch-size", "--epochs", "--lr", "--schedule",
              "--momentum", "--clip", "--seed", "--threads-per-shard", "--sampling", "--no-deterministic", "--accept",
              "--run-dir", "--checkpoint-every", "--resume", "--processes", "-q", "--", "--wat"],
    "verify": ["--backend", "--devices", "--processes", "--all", "--kill", "--resume-on", "--epochs", "--seed",
               "--keep", "--json"],
    "diff": ["--json"], "export": ["--best", "--average"], "devices": [], "data": [],
    "schedule": ["--steps", "--epochs", "--steps-per-epoch", "--png", "--svg", "--json", "--csv"],
}  # fmt: skip
WORDS = [
    "1", "2", "8", "0.1", "cpu", "cpu,cpu", "lenet", "mlp", "torch", "job.py", "folder", "folder/file", "not there", "file.png",
    "not/there.png", "file.svg", "cosine(0.3, 20)", "constant(0.1).in_epochs()", "random", "same", "code", "1 epoch",
    "empty.py", "damaged", "1000000000000000", "1,2", "1,,2", "folder/run.safetensors",
]  # fmt: skip


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with files to trip over; no training begins, no process is started and nothing is fetched."""
    monkeypatch.chdir(tmp_path)
    for name in ("folder", "damaged"):
        Path(name).mkdir()
    for name, text in {"job.py": "pass", "empty.py": "", "folder/file": "# x", "damaged/recipe.json": "[]",
                       "damaged/events.jsonl": "{", "damaged/weights.safetensors": "abc"}.items():  # fmt: skip
        Path(name).write_text(text)

    def stop(*args: object, **named: object) -> Any:
        raise Stopped(0)

    monkeypatch.setattr(cli, "app", typer.main.get_command(cli.app))  # made once: typer would do so at each call
    monkeypatch.setattr(Trainer, "fit", stop)
    monkeypatch.setattr(verify.Runs, "refer", stop)
    monkeypatch.setattr(cli, "launch", stop)
    monkeypatch.setattr(cli, "_ask", lambda framework: "cpu")
    monkeypatch.setattr(fashion, "load", stop)
    monkeypatch.setattr(fashion, "_fetch", stop)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(place.OVERRIDES, "{}")


def command_line(chance: Random) -> object:
    command = chance.choice([*OPTIONS, "train", "schedule", "schedule", "trian"])
    given = [command]
    for _ in range(chance.randrange(5)):
        known = OPTIONS.get(command, [])
        if known and chance.random() < 0.6:
            given.append(chance.choice(known))
        given.append(chance.choice(WORDS if chance.random() < 0.7 else TEXTS))
    if command == "train" and "--portable" in given:
        given.remove("--portable")
    return ended([word.replace("\0", "?") for word in given])


def ended(arguments: list[str]) -> None:
    """Run a command line in this process. It must end as one does: with a status, and with one line if that is 2."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
    path, argv, before = sys.path[:], sys.argv, os.environ.get(place.OVERRIDES)
    try:
        sys.argv = ["samestep", *arguments]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
            patch.setattr(cli.out, "_file", out)
            cli.run()
            status: object = 0
    except SystemExit as end:
        status = end.code or 0
    finally:
        sys.path[:], sys.argv = path, argv
        os.environ[place.OVERRIDES] = before or "{}"
    err.flush()
    said = err.buffer.getvalue().decode()  # type: ignore[attr-defined]
    if "Traceback" in said or status not in (0, 1, 2):
        raise Raw(f"{arguments}: status {status}: {said}")
    if status == 2:
        usage = said.startswith("Usage: ")
        if not usage and not (said.startswith("samestep: ") and said.count("\n") == 1):
            raise Raw(f"{arguments}: not one line: {said!r}")
        raise Invalid(said.splitlines()[-1])


@pytest.mark.usefixtures("workshop")
@pytest.mark.parametrize("part", range(5))  # each in less than the minutes that a test may take
def test_command_lines(part: int) -> None:
    all_of(f"command line {part}", command_line, TRIES // 5)


# Broken twins


def throw(error: BaseException, chance: Random) -> None:
    raise error


def test_a_raw_error_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A constructor that lets an error of Python through, a message of several lines, and a command with a traceback."""
    assert guarded("fine", lambda chance: None) is None
    assert guarded("refused", lambda chance: ss.sgd(momentum=2)) == "sgd: momentum must be below 1, got momentum=2.0"
    with pytest.raises(Raw, match=r"twin: ZeroDivisionError: division by zero"):
        guarded("twin", lambda chance: 1 / 0)
    assert guarded("several lines", partial(throw, Invalid("first\nsecond"))) == "first second"
    lines = Invalid("")
    with pytest.raises(Raw, match="not one line"):
        guarded("twin", partial(throw, lines))
    lines.args = ("first\nsecond",)
    with pytest.raises(Raw, match="not one line"):
        guarded("twin", partial(throw, lines))
    monkeypatch.setattr(checks, "_float", lambda where, name, value: float(value))  # the check is gone
    with pytest.raises(Raw, match="TypeError|ValueError"):
        all_of("constructor", constructor, 1000)
    monkeypatch.undo()
    with pytest.raises(KeyboardInterrupt):  # nobody may swallow it
        guarded("interrupted", partial(throw, KeyboardInterrupt()))


@pytest.mark.usefixtures("workshop")
def test_a_raw_error_of_a_command_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def raw(text: str) -> Any:
        raise ZeroDivisionError(text)

    monkeypatch.setattr("samestep.schedules.text.parse", raw)
    with pytest.raises(Raw, match="ZeroDivisionError"):
        all_of("command line", command_line, 300)
