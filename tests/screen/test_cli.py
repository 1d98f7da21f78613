"""cli: what each command prints; and that bad input is one line on standard error, status 2, and nothing written.

The command runs in this process, in an empty folder, with 64 + 32 synthetic images in place of Fashion-MNIST.
"""

from __future__ import annotations

import gzip
import hashlib
import inspect
import io
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer
from patience import be_patient, one_by_one
from rich.console import Console
from screen.command import TEST, TRAIN, Done, Samestep, samestep, sealed

import samestep as ss
from samestep import fingerprint as fingerprints
from samestep.backends import find
from samestep.data import fashion
from samestep.errors import Invalid, ProcessFailed
from samestep.processes.launch import TOLD
from samestep.processes.place import MEET
from samestep.runs import verify
from samestep.screen import cli
from samestep.screen.ending import LATER, report
from samestep.training.fit import Fit

pytestmark = pytest.mark.usefixtures("sealed")
QUICK = ("--epochs", "1", "--batch-size", "16", "--model", "mlp")


def written() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*"))


def fingerprint(done: Done) -> str:
    found = re.search(r"^fingerprint ([0-9a-f]{64})$", done.out, re.MULTILINE)
    assert found, done
    return found[1]


# train


def test_train_ends_with_the_result(samestep: Samestep) -> None:
    done = samestep("train", "--epochs", 2, "--batch-size", 16, "--devices", "cpu,cpu", "--run-dir", "runs/mine")
    assert done.status == 0
    run = ss.Run.load("runs/mine")
    seconds = (run.history[0]["seconds"] + run.history[1]["seconds"]) / 2
    assert done.out.splitlines() == [
        f"test accuracy {run.history[-1]['test_accuracy']:.4f}, {seconds:.2f} s/epoch, on cpu, cpu",
        f"fingerprint {run.fingerprint}",
        "run folder runs/mine",
    ]
    assert (run.recipe["model"], run.recipe["max_epochs"], run.recipe["batch_size"]) == ("LeNetModern", 2, 16)
    assert run.recipe["train"]["examples"] == 64
    lines = done.err.splitlines()
    assert len(lines) == 4  # the job, what is trained, and one line per epoch
    rate = "cosine(0.00625, 1).warmup(1).in_epochs(smooth=True)"
    assert lines[0] == f"lenet_modern on Fashion-MNIST: SGD with momentum 0.9, rate {rate}"
    assert "LeNetModern" in lines[1]
    assert lines[2].split()[:2] == ["epoch", "1/2"]
    assert f"{run.history[1]['test_loss']:.4f}" in lines[3]


def test_train_gives_the_same_on_any_number_of_devices(samestep: Samestep) -> None:
    ended = [samestep("train", *QUICK, "--run-dir", "none", "--devices", n) for n in (1, 2, 3)]
    assert len({fingerprint(done) for done in ended}) == 1
    assert [done.out.splitlines()[0].split(" on ")[1] for done in ended] == ["cpu", "cpu, cpu", "cpu, cpu, cpu"]
    assert fingerprint(samestep("train", *QUICK, "--run-dir", "none", "--seed", 1)) != fingerprint(ended[0])


def test_train_without_a_folder_writes_nothing(samestep: Samestep) -> None:
    done = samestep("train", *QUICK, "--run-dir", "none", "--quiet")
    assert (done.status, done.err) == (0, "")
    assert len(done.out.splitlines()) == 2
    assert written() == []


def test_train_chooses_a_folder(samestep: Samestep) -> None:
    done = samestep("train", *QUICK, "-q")
    folder = done.out.splitlines()[-1].removeprefix("run folder ")
    assert re.fullmatch(r"runs/\d{8}-\d{6}-mlp", folder)
    assert ss.Run.load(folder).fingerprint == fingerprint(done)


@pytest.mark.parametrize(("name", "model"), [("mlp", "MLP"), ("lenet_modern", "LeNetModern"), ("lenet", "LeNet")])
def test_train_models(name: str, model: str, samestep: Samestep) -> None:
    done = samestep("train", "--epochs", 1, "--batch-size", 32, "--model", name, "--run-dir", "run")
    assert done.status == 0
    assert json.loads(Path("run/recipe.json").read_text())["model"] == model


def test_train_takes_every_setting(samestep: Samestep) -> None:
    options = {
        "shards": 3, "clip": 0.5, "lr": 0.05, "momentum": 0.9, "seed": 7, "threads-per-shard": 2,
        "sampling": "with_replacement", "memory-format": "channels_last",
    }  # fmt: skip
    given = [text for name, value in options.items() for text in (f"--{name}", value)]
    done = samestep("train", *QUICK, *given, "--no-deterministic", "--run-dir", "run")
    recipe = ss.Run.load("run").recipe
    assert recipe["memory_format"] == "channels_last"
    assert {name: recipe[name] for name in ("shards", "seed", "threads_per_shard", "sampling", "deterministic")} == {
        "shards": 3, "seed": 7, "threads_per_shard": 2, "sampling": "with_replacement", "deterministic": False
    }  # fmt: skip
    assert (recipe["gradient_clip_val"], recipe["schedule"]) == (0.5, "constant(0.05)")
    assert recipe["optimizer"] == "SGD(momentum=0.9, nesterov=False, weight_decay=0.0)"
    assert done.status == 0


@pytest.fixture
def caught(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The Trainer and the optimizer that `train` makes; its fit gives a run of three epochs, made up."""
    seen: list[Any] = []

    def fit(self: ss.Trainer, *given: object) -> object:
        seen.append(self)
        history = [{"test_accuracy": 0.25 * i, "seconds": 1.25 * i} for i in (1, 2, 3)]
        return SimpleNamespace(
            rank=0, history=history, devices=["cpu", "gpu"], fingerprint="ab", folder=self.run_dir, interrupted=False
        )

    monkeypatch.setattr(ss.Trainer, "fit", fit)
    return seen


def test_train_says_how_the_last_epoch_was_and_how_long_one_took(samestep: Samestep, caught: list[Any]) -> None:
    text = "test accuracy 0.7500, 2.50 s/epoch, on cpu, gpu\nfingerprint ab\n"
    assert samestep("train", "--run-dir", "none") == Done(0, text, "")
    assert samestep("train", "--run-dir", "run") == Done(0, text + "run folder run\n", "")


def test_the_settings_of_the_built_in_job(samestep: Samestep, caught: list[Any]) -> None:
    for given in JOBS:
        samestep("train", "--run-dir", "none", *given.split())
    made = [(one.max_epochs, one.batch_size, str(one.schedule), one.optimizer.momentum, one.progress) for one in caught]
    assert dict(zip(JOBS, made, strict=True)) == JOBS


JOBS = {
    "": (10, 256, "cosine(0.1, 9).warmup(1).in_epochs(smooth=True)", 0.9, None),
    "--epochs 2": (2, 256, "cosine(0.1, 1).warmup(1).in_epochs(smooth=True)", 0.9, None),
    "--epochs 1": (1, 256, "cosine(0.1, 1).warmup(0).in_epochs(smooth=True)", 0.9, None),
    "--batch-size 64": (10, 64, "cosine(0.025, 9).warmup(1).in_epochs(smooth=True)", 0.9, None),
    "--batch-size 4096": (10, 4096, "cosine(0.2, 9).warmup(1).in_epochs(smooth=True)", 0.9, None),
    "--lr 0.5": (10, 256, "constant(0.5)", 0.9, None),
    "--lr 0.5 --momentum 0": (10, 256, "constant(0.5)", 0.0, None),
    "--schedule cosine(0.3,10) --quiet --epochs 3": (3, 256, "cosine(0.3, 10)", 0.9, False),
    "--model lenet": (10, 256, "constant(0.2)", 0.0, None),  # the chapter's
    "--model lenet --momentum 0.5": (10, 256, "constant(0.2)", 0.5, None),
    "--model mlp": (10, 256, "constant(0.2)", 0.0, None),
}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("", 'lenet on Fashion-MNIST, as in "Dive into Deep Learning": SGD, rate constant(0.2)'),
        ("--momentum 0.5", "lenet on Fashion-MNIST: SGD with momentum 0.5, rate constant(0.2)"),
        ("--lr 0.1", "lenet on Fashion-MNIST: SGD, rate constant(0.1)"),
    ],
)
def test_the_first_line_names_the_job(given: str, line: str, samestep: Samestep) -> None:
    options = ["--model", "lenet", "--epochs", 1, "--batch-size", 32, "--run-dir", "none", *given.split()]
    assert samestep("train", *options).err.splitlines()[0] == line


def test_the_help_names_the_book_and_the_recipes(samestep: Samestep) -> None:
    told = " ".join(samestep("train", "--help").out.split())
    for part in (
        '"Dive into Deep Learning"',
        "momentum 0.9",
        "0.1 with batches of 256",
        "rate of 0.2",
        "[lenet_modern]",
    ):
        assert part in told


# Bad input


BAD = {
    "--lr 0.1 --schedule constant(1)": "choose one of --lr and --schedule",
    "--epochs 0": "at least 1, got max_epochs=0",
    "--batch-size 0": "batch_size must be at least 1, got batch_size=0",
    "--shards 0": "shards must be at least 1, got shards=0",
    "--shards 2 --devices 3": "3 devices need at least 3 shards, got shards=2: raise shards or use fewer devices",
    "--devices tpu": "unknown device 'tpu': use 'cpu', 'cuda' or 'cuda:i'",
    "--devices cuda:7": "device cuda:7 is not there: torch sees cpu",
    "--devices 0": "devices must be at least 1, got 0",
    "--devices ²": "unknown device '²'",
    "--lr nan": "schedule must be finite and at least 0, got schedule=nan",
    "--lr inf": "schedule must be finite and at least 0, got schedule=inf",
    "--lr -1": "schedule must be finite and at least 0, got schedule=-1.0",
    "--momentum 1": "momentum must be below 1, got momentum=1.0",
    "--clip -1": "must be finite and at least 0, got gradient_clip_val=-1.0",
    "--seed -1": "seed must be at least 0, got seed=-1",
    "--seed 18446744073709551616": "seed must be at most 18446744073709551615, got seed=18446744073709551616",
    "--threads-per-shard 0": "threads_per_shard must be at least 1",
    "--precision half": "precision must be one of 'float32', 'tf32', 'bfloat16', got precision='half'",
    "--memory-format nhwc": "memory_format must be one of 'auto', 'contiguous', 'channels_last', got memory_format='nhwc'",
    "--sampling all": "sampling must be one of without_replacement, with_replacement, in_order, got sampling='all'",
    "--model vgg": "unknown model 'vgg': choose one of lenet, lenet_modern, mlp, resnet18",
    "--backend caffe": "no backend 'caffe': samestep has torch, jax, tensorflow, paddle",
    "--checkpoint-every never": "must be a number of steps, or such as '1 epoch', '30 s' or '5 min', got 'never'",
    "--checkpoint-every 0": "'5 min', got '0'",
    "--checkpoint-every -1": "'5 min', got '-1'",
    "--checkpoint-every 1.5": "'5 min', got '1.5'",
    "--resume nowhere": "resume: nowhere is not there",
    "--resume {file} --run-dir none": "resume needs a run_dir to go on in: the folder of the run, or a new one",
    "--processes 0": "--processes must be at least 1, got --processes=0",
    "--run-dir /proc/nope": "run folder /proc/nope cannot be written to: No such file or directory",
    "--run-dir {file}/below": "/below cannot be written to: Not a directory",
    "--run-dir {long}": "cannot be written to: File name too long",
    "missing.py": "missing.py is not a file",
    ".": ". is not a file",
    "{file} --model mlp": "--model goes with the built-in job; ",
    "{file} --backend jax": "--backend goes with the built-in job; ",
    "{file} --momentum 0.9": "--momentum goes with the built-in job; ",
}


def bad(given: str, tmp_path: Path) -> list[str]:
    (tmp_path / "file").write_text("raise SystemExit('the script was run')")
    return given.format(file=tmp_path / "file", long=300 * "a").split()


@pytest.mark.parametrize(("given", "message"), BAD.items(), ids=BAD)
def test_bad_input_is_one_line(given: str, message: str, samestep: Samestep, tmp_path: Path) -> None:
    done = samestep("train", *bad(given, tmp_path))
    assert done.status == 2
    assert done.out == ""
    assert len(done.err.splitlines()) == 1
    assert done.err.startswith("samestep: ")
    assert message in done.err
    assert written() == []


@pytest.mark.parametrize("given", [given for given in BAD if "--run-dir" not in given])
def test_bad_input_is_found_before_the_data_is_fetched(
    given: str, samestep: Samestep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fashion, "load", lambda: pytest.fail("Fashion-MNIST was read"))
    assert samestep("train", *bad(given, tmp_path)).status == 2


def test_a_folder_that_holds_a_run_is_left_alone(samestep: Samestep) -> None:
    first = samestep("train", *QUICK, "--run-dir", "run")
    done = samestep("train", *QUICK, "--run-dir", "run", "--resume", "never")
    assert done == Done(2, "", "samestep: run folder run already holds a run: choose another, or delete it\n")
    done = samestep("train", *QUICK, "--run-dir", "run", "--clip", 1, "--shards", 4)
    assert done == Done(2, "", "samestep: run holds a run of another recipe (shards is 4, was 8; gradient_clip_val is 1.0, "
                        "was 0.0): choose another run_dir, or delete it\n")  # fmt: skip
    done = samestep("train", *QUICK, "--run-dir", "run", "--seed", 1)
    assert (done.status, done.out) == (2, "")
    assert re.fullmatch(
        r"samestep: run holds a run of another recipe \(initial is '[0-9a-f]{64}', was '[0-9a-f]{64}'; seed is 1, was 0\): "
        r"choose another run_dir, or delete it; the model starts from other weights: seed it before it is made\n",
        done.err,
    )
    assert ss.Run.load("run").fingerprint == fingerprint(first)


# Resuming


def test_train_goes_on_where_it_was(samestep: Samestep) -> None:
    whole = samestep("train", *QUICK, "--epochs", 3, "--run-dir", "none", "-q")
    samestep("train", *QUICK, "--run-dir", "run", "--checkpoint-every", 1)
    assert sorted(path.name for path in Path("run/checkpoints").iterdir())[-1] == "step-000000004.safetensors"
    done = samestep("train", *QUICK, "--epochs", 3, "--run-dir", "run", "--devices", 3)
    assert fingerprint(done) == fingerprint(whole)
    assert "resumed after step 4" in done.err.splitlines()
    again = samestep("train", *QUICK, "--epochs", 3, "--run-dir", "run", "-q")
    assert (fingerprint(again), again.err) == (fingerprint(whole), "")


def test_train_goes_on_from_another_folder(samestep: Samestep) -> None:
    whole = samestep("train", *QUICK, "--epochs", 2, "--run-dir", "none", "-q")
    samestep("train", *QUICK, "--run-dir", "old", "-q")
    for source, folder in (("old", "one"), ("old/checkpoints/step-000000004.safetensors", "two")):
        done = samestep("train", *QUICK, "--epochs", 2, "--resume", source, "--run-dir", folder)
        assert fingerprint(done) == fingerprint(whole)
        assert "resumed after step 4" in done.err.splitlines()


def test_what_train_cannot_go_on_from_is_one_line(samestep: Samestep) -> None:
    samestep("train", *QUICK, "--run-dir", "old", "-q")
    before = written()
    Path("empty").mkdir()
    for options, message in (
        (("--resume", "empty"), "resume: empty has no checkpoint that can be used"),
        (("--resume", "old", "--shards", 4, "--epochs", 2),
         "old holds a run of another recipe (shards is 4, was 8): choose another run_dir, or delete it"),
        (("--resume", "old", "--batch-size", 64),
         "old holds a run of another recipe (batch_size is 64, was 16): choose another run_dir, or delete it"),
    ):  # fmt: skip
        done = samestep("train", *QUICK, "--run-dir", "new", *options)
        assert done == Done(2, "", f"samestep: {message}\n")
    Path("empty").rmdir()
    assert written() == before


def test_a_script_goes_on_where_it_was(samestep: Samestep, script: Callable[..., Path]) -> None:
    whole = json.loads(samestep("train", script()).out)
    samestep("train", script(), "--epochs", 1, "--run-dir", "run", "--checkpoint-every", "2 steps")
    done = samestep("train", script(), "--run-dir", "run", "--devices", 2)
    assert json.loads(done.out)["fingerprint"] == whole["fingerprint"]
    done = samestep("train", script(), "--run-dir", "run", "--resume", "never")
    message = "run folder run already holds a run: choose another, or delete it"
    assert done == Done(2, "", f"samestep: script.py, line 10: {message}\n")


# export


def test_export(samestep: Samestep, monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)
    trained = samestep("train", *QUICK, "--epochs", 2, "--run-dir", "run", "-q")
    run = ss.Run.load("run")
    assert samestep("export", "run", "w.safetensors") == Done(0, "w.safetensors: the weights at the end\n", "")
    assert weights_in("w.safetensors") == run.fingerprint == fingerprint(trained)
    first = "run/checkpoints/step-000000004.safetensors"
    assert samestep("export", first, "w.safetensors") == Done(0, "w.safetensors: the weights after step 4\n", "")
    assert weights_in("w.safetensors") == fingerprint(samestep("train", *QUICK, "--run-dir", "none", "-q"))
    best = min(run.history, key=lambda row: row["test_loss"])["step"]
    done = samestep("export", "run", "[b].safetensors", "--best")
    assert done == Done(0, f"[b].safetensors: the weights after step {best}\n", "")


def test_export_of_an_average_says_so(samestep: Samestep) -> None:
    from samestep.models.torch import mlp

    data = np.ones((8, 1, 28, 28), "float32"), np.arange(8) % 2
    run = ss.Trainer(1, 2, average=ss.ema(0.5), run_dir="run", progress=False).fit(mlp(), data)
    assert samestep("export", "run", "a", "--average") == Done(0, "a: the averaged weights at the end\n", "")
    assert weights_in("a") == fingerprints.of_weights(run.average or {}) != run.fingerprint


STOPS = """
import signal
from pathlib import Path
import numpy as np
import torch
import samestep as ss

torch.manual_seed(0)
x = np.random.default_rng(0).standard_normal((40, 5)).astype("float32")

def rate(t):
    if t == 5 and not list(Path("run").glob("checkpoints/*")):
        signal.raise_signal(signal.SIGINT)
    return 0.1

trainer = ss.Trainer(4, 10, devices=1, schedule=rate, run_dir="run", checkpoint_every=99, progress=False)
run = trainer.fit(torch.nn.Linear(5, 2), (x, np.arange(40) % 2))
print(run.interrupted, len(run.fingerprints))
"""


def test_an_interrupted_script_goes_on_after_its_fit_and_can_be_resumed(samestep: Samestep) -> None:
    """Rates are asked for before an epoch: the signal is there at the beginning of the second."""
    Path("my script.py").write_text(STOPS)
    done = samestep("train", "my script.py", "--devices", 2)
    assert (done.status, done.out) == (130, "True 5\n")
    line = "samestep train --run-dir run 'my script.py' --devices 2"
    assert done.err == f"interrupted after step 5 of 16: to resume it, {line}\n"
    assert ss.Run.load("run").interrupted
    done = samestep(*shlex.split(line)[1:])
    assert (done.status, done.out, done.err) == (0, "False 16\n", "")


def test_an_interrupted_job_says_how_to_resume_it(samestep: Samestep, monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one(monkeypatch)
    looked, sent = Fit.look, list[int]()

    def look(self: Fit, *given: Any) -> Any:
        if self.step == 2 and not sent:
            sent.append(self.step)
            signal.raise_signal(signal.SIGINT)
        return looked(self, *given)

    monkeypatch.setattr(Fit, "look", look)
    monkeypatch.setattr("samestep.training.fit.LIVE", 0)
    done = samestep("train", *QUICK, "--run-dir", "run")
    assert (done.status, done.out) == (130, "")
    assert re.search(r"\ninterrupted after step \d of \d+: to resume it, samestep train .*--run-dir run\n$", done.err)
    done = samestep("train", *QUICK, "--run-dir", "run")
    assert done.status == 0
    assert "resumed after step" in done.err


def weights_in(path: str) -> str:
    """The fingerprint of a file that PyTorch's own model takes, every name of it."""
    from safetensors.torch import load_file

    from samestep.fingerprint import of_weights as of
    from samestep.models.torch import mlp

    model = mlp(seed=5)
    model.load_state_dict(load_file(path), strict=True)
    return of({name: tensor.numpy() for name, tensor in model.state_dict().items()})


try:
    Path().with_name("w")
except ValueError as error:
    NAMELESS = str(error)  # other words in other versions of Python


def test_what_cannot_be_exported_is_one_line(samestep: Samestep) -> None:
    samestep("train", *QUICK, "--run-dir", "run", "--checkpoint-every", 99, "-q")
    before = written()
    for given, message in {
        "nothing w": "nothing cannot be read: No such file or directory",
        "run nowhere/w": "nowhere/w cannot be written: No such file or directory",
        "run run": "run cannot be written: Is a directory",
        "run .": f". cannot be written: {NAMELESS}",
        "run w --average": "run/checkpoints/step-000000004.safetensors has no averaged weights",
        "run/weights.safetensors w": "run/weights.safetensors is damaged, or not a checkpoint: '__metadata__'",
        "run/checkpoints w": "run/checkpoints has no weights and no checkpoint",
        "run/checkpoints w --best": "run/checkpoints has no checkpoint of the end of an epoch",
    }.items():
        assert samestep("export", *given.split()) == Done(2, "", f"samestep: {message}\n")
        assert written() == before


def test_a_rate_that_is_too_high_is_one_line_and_leaves_the_step_before(
    samestep: Samestep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samestep.training.fit.LIVE", 1e9)  # no look at the numbers before the end of the epoch
    done = samestep("train", *QUICK, "--lr", "1e30", "--run-dir", "run", "-q")
    assert done.status == 2
    assert re.fullmatch(r"samestep: the loss is nan at step 1, shard 0, with learning rate 1e\+30: .*\n", done.err)
    log = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    assert [(event["event"], len(event.get("fingerprint", []))) for event in log] == [("start", 0), ("steps", 1)]


@pytest.mark.parametrize(
    "arguments",
    [["train", "--epochs", "x"], ["train", "--lr", "fast"], ["train", "--wat"], ["trian"], ["devices", "x"]],
)
def test_usage_errors(arguments: list[str], samestep: Samestep) -> None:
    done = samestep(*arguments)
    assert (done.status, done.out) == (2, "")
    assert arguments[-1] in done.err or "integer" in done.err or "number" in done.err
    assert written() == []


def test_interrupted(samestep: Samestep, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fashion, "load", interrupt)
    done = samestep("train")
    assert done.status == 130  # as a shell reports an interrupt
    assert "Traceback" not in done.err
    assert written() == []


# train SCRIPT

SCRIPT = """
import json, sys
import numpy as np
import samestep as ss
from samestep.models.torch import mlp

random = np.random.default_rng(0)
x, y = random.standard_normal((40, 6)).astype("float32"), random.integers(0, 3, 40)
trainer = ss.Trainer(max_epochs=3, batch_size=16, shards=4, SETTINGS)
run = trainer.fit(mlp((6, 8, 3)), (x, y))
print(json.dumps({
    "name": __name__, "arguments": sys.argv, "devices": run.devices, "fingerprint": run.fingerprint,
    "folder": str(run.folder), "recipe": run.recipe,
}))
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    def write(settings: str = "devices=1, seed=5", text: str = SCRIPT) -> Path:
        path = tmp_path / "script.py"
        path.write_text(text.replace("SETTINGS", settings))
        return path

    return write


def test_script_runs_as_the_main_program(samestep: Samestep, script: Callable[..., Path]) -> None:
    done = samestep("train", script(), "--quiet")
    assert (done.status, done.err) == (0, "")
    told = json.loads(done.out)
    assert (told["name"], told["arguments"]) == ("__main__", [str(script())])
    assert (told["devices"], told["recipe"]["max_epochs"], told["recipe"]["seed"]) == (["cpu"], 3, 5)
    assert written() == []


def test_options_for_a_script_without_a_trainer_are_told(samestep: Samestep) -> None:
    Path("none.py").write_text("print('done')")
    told = "samestep: none.py has made no Trainer, so that the options had no effect\n"
    assert samestep("train", "none.py", "--epochs", 3) == Done(0, "done\n", told)
    assert samestep("train", "none.py") == Done(0, "done\n", "")


def test_options_go_before_the_settings_of_a_script(samestep: Samestep, script: Callable[..., Path]) -> None:
    options = ["--devices", 3, "--epochs", 2, "--seed", 6, "--shards", 5, "--batch-size", 8, "--lr", 0.5]
    done = samestep("train", script(), *options, "--run-dir", "run")
    told = json.loads(done.out)
    assert told["devices"] == ["cpu"] * 3
    assert told["folder"] == "run"
    recipe = told["recipe"]
    assert [recipe[name] for name in ("max_epochs", "seed", "shards", "batch_size", "schedule")] == [
        2,
        6,
        5,
        8,
        "constant(0.5)",
    ]
    assert ss.Run.load("run").fingerprint == told["fingerprint"]


def test_a_script_gives_the_same_on_any_number_of_devices(samestep: Samestep, script: Callable[..., Path]) -> None:
    told = [json.loads(samestep("train", script(), "--devices", n).out) for n in (1, 2, 3)]
    assert [len(each["devices"]) for each in told] == [1, 2, 3]
    assert len({each["fingerprint"] for each in told}) == 1


def test_devices_go_before_num_gpus_of_a_script(samestep: Samestep, script: Callable[..., Path]) -> None:
    done = samestep("train", script("num_gpus=2"), "--devices", 3)
    assert json.loads(done.out)["devices"] == ["cpu"] * 3


def test_run_dir_none_for_a_script(samestep: Samestep, script: Callable[..., Path]) -> None:
    assert json.loads(samestep("train", script("run_dir='mine'"), "--run-dir", "none").out)["folder"] == "None"
    assert written() == []


def test_quiet_for_a_script(samestep: Samestep, script: Callable[..., Path]) -> None:
    for progress in (True, None):
        assert len(samestep("train", script(f"progress={progress}")).err.splitlines()) == 4
    assert samestep("train", script("progress=True"), "--quiet").err == ""


def test_a_profile_of_a_script(samestep: Samestep, script: Callable[..., Path]) -> None:
    plain, done = samestep("train", script(), "-q"), samestep("train", script(), "-q", "--profile", "--run-dir", "run")
    assert json.loads(done.out)["fingerprint"] == json.loads(plain.out)["fingerprint"]
    last = done.err.splitlines()[-1]
    assert last == f"Open it at https://ui.perfetto.dev: {Path('run', 'profile.json')}"
    assert any(event["name"] == "update" for event in json.loads(Path("run/profile.json").read_text())["traceEvents"])


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ("no/trace.json", "profile: the folder no is not there: make it, or name another one"),
        (".", "profile: . is a folder: name a file in it, such as profile.json"),
        ("", "profile: . is a folder"),
    ],
)
def test_a_profile_that_cannot_be_written_is_one_line(
    profile: str, message: str, samestep: Samestep, script: Callable[..., Path]
) -> None:
    done = samestep("train", script(f"devices=1, profile={profile!r}"))
    assert (done.status, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert message in done.err
    assert written() == []


def test_a_profile_of_the_built_in_job(samestep: Samestep) -> None:
    done = samestep("train", *QUICK, "-q", "--profile", "--run-dir", "none")
    assert done.status == 0
    assert re.search(r"^fit +4 steps +[\d.]+ +[\d.]+ ms +100\.0% *$", done.err, re.MULTILINE)
    assert written() == ["profile.json"]


def test_arguments_of_a_script(samestep: Samestep, script: Callable[..., Path]) -> None:
    done = samestep("train", "--seed", 1, script(), "--devices", 2, "--", "--devices", "9", "-x", "data")
    told = json.loads(done.out)
    assert told["arguments"] == [str(script()), "--devices", "9", "-x", "data"]
    assert (told["devices"], told["recipe"]["seed"]) == (["cpu", "cpu"], 1)


def test_a_script_imports_from_its_own_folder(samestep: Samestep, script: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "beside_the_script.py").write_text("answer = 42")
    done = samestep("train", script(text="import beside_the_script\nprint(beside_the_script.answer)"))
    assert (done.status, done.out) == (0, "42\n")


def test_the_folder_of_a_script_is_looked_in_first(samestep: Samestep, script: Callable[..., Path]) -> None:
    assert samestep("train", script(text="import sys\nprint(sys.path[0])")).out == f"{script().parent}\n"


SHOWS = "import os\nprint(os.environ['SAMESTEP_OVERRIDES'])"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("", {}),
        ("--schedule constant(1) --quiet", {"schedule": "constant(1)", "progress": False}),
        ("--lr 0.5 --clip 2 --seed 0", {"schedule": 0.5, "gradient_clip_val": 2.0, "seed": 0}),
        ("--resume never --run-dir none", {"resume": False, "run_dir": None}),
        ("--resume auto --run-dir a", {"resume": "auto", "run_dir": "a"}),
        ("--resume next --run-dir old", {"resume": "next", "run_dir": "old"}),
        ("--portable --accept code", {"portable": True, "accept": "code"}),
        ("--deterministic --checkpoint-every 3", {"deterministic": True, "checkpoint_every": "3"}),
    ],
)
def test_a_script_gets_the_settings_that_were_given(
    given: str, told: object, samestep: Samestep, script: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no others, which would go before its own."""
    switched: list[bool] = []
    monkeypatch.setattr(cli.switch, "set_up", lambda: switched.append(True))
    assert json.loads(samestep("train", script(text=SHOWS), *given.split()).out) == told
    assert switched == [True] * ("--portable" in given)


def test_several_processes_are_started_once(
    samestep: Samestep, script: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for one process, and not again in each of them."""
    started: list[Any] = []
    monkeypatch.setattr(cli, "launch", lambda *given: started.append(given) or 7)
    monkeypatch.delenv(MEET, raising=False)
    shows = script(text=SHOWS)
    assert samestep("train", shows, "--processes", 1) == Done(0, "{}\n", "")
    assert started == []
    for count in (2, 3):
        assert samestep("train", shows, "--processes", count) == Done(7, "", "")
        command = [sys.executable, "-m", "samestep", "train", str(shows), "--processes", str(count)]
        assert started.pop() == (command, count, cli.engine_for(shows, None))
    monkeypatch.setenv(MEET, "file:///there")
    assert samestep("train", shows, "--processes", 2) == Done(0, "{}\n", "")


def test_a_script_ends_with_its_own_status(samestep: Samestep, script: Callable[..., Path]) -> None:
    assert samestep("train", script(text="raise SystemExit(3)")).status == 3


FAILS = """
import numpy as np, torch, typer
import samestep as ss

class Source(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return np.zeros(5, "float32"), int(WHAT)  # line 9

class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x[:, :CUT])  # line 13

def fit():
    return ss.Trainer(1, BATCH).fit(Net(5, 3), Source())  # line 16

fit()
"""


def failing(what: str = "'1'", cut: int = 5, batch: object = 8) -> str:
    return FAILS.replace("WHAT", what).replace("CUT", str(cut)).replace("BATCH", str(batch))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (failing(batch=0), "line 16: batch_size must be at least 1, got batch_size=0"),
        (failing(batch="'8'"), "line 16: batch_size must be a whole number, got batch_size='8'"),
    ],
)  # fmt: skip
def test_an_error_of_ours_names_the_line_of_the_script(
    text: str, line: str, samestep: Samestep, script: Callable[..., Path]
) -> None:
    assert samestep("train", script(text=text)) == Done(2, "", f"samestep: script.py, {line}\n")


@pytest.mark.parametrize(
    ("text", "frames", "last"),
    [
        (failing(cut=3), [18, 16, 13], "RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x3 and 5x3)"),
        (failing("{}['x']"), [18, 16, 9], "KeyError: 'x'"),
        (failing("'q'"), [18, 16, 9], "ValueError: invalid literal for int() with base 10: 'q'"),
        (
            "import json\n\njson.loads('{')\n",
            [3],
            "json.decoder.JSONDecodeError: Expecting property name enclosed in double",
        ),
        ("import nowhere\n", [1], "ModuleNotFoundError: No module named 'nowhere'"),
        ("x = = 1\n", [1], "SyntaxError: invalid syntax"),
        ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    int('q')\n", [2, 4], "ValueError: invalid literal for int()"),
    ],
)
def test_an_error_of_a_script_shows_its_own_lines(
    text: str, frames: list[int], last: str, samestep: Samestep, script: Callable[..., Path]
) -> None:
    path = script(text=text)
    done = samestep("train", path)
    assert (done.status, done.out) == (1, "")
    assert [int(n) for n in re.findall(rf'File "{re.escape(str(path))}", line (\d+)', done.err)] == frames
    assert done.err.count('File "') == len(frames)
    assert done.err.splitlines()[-1].startswith(last)


def test_every_line_can_be_seen(
    samestep: Samestep, script: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMESTEP_TRACEBACK", "1")
    for text, status in ((failing(cut=3), 1), (failing(batch=0), 2)):
        done = samestep("train", script(text=text))
        assert done.status == status
        for name in ("runpy", "typer", "trainer.py"):
            assert name in done.err
    assert "SAMESTEP_TRACEBACK=1" in samestep("--help").out


def test_an_error_of_a_command_itself_shows_what_led_there_without_typer(
    samestep: Samestep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fashion, "load", lambda: {}["x"])
    done = samestep("train", "--run-dir", "none")
    assert done.status == 1
    assert "typer" not in done.err
    assert re.search(r'File ".*test_cli.py", line \d+, in <lambda>', done.err)  # which is the user here
    monkeypatch.setattr(fashion, "load", json.decoder.JSONDecoder().decode)
    assert re.search("cli.py.*job.py.*TypeError", samestep("train", "--run-dir", "none").err, re.DOTALL)


@pytest.mark.parametrize(
    ("error", "rank", "said", "turn"),
    [
        (Invalid("bad"), 0, "samestep: bad\n", 0),
        (Invalid("bad"), 2, "rank 2: samestep: bad\n", 1),
        (SystemExit("no data"), 1, "rank 1: no data\n", 1),
        (ProcessFailed("rank 2 failed: KeyError"), 0, "samestep: rank 2 failed: KeyError\n", 2),
        (ProcessFailed("rank 2 failed: KeyError"), 1, "", 2),
        (ProcessFailed("rank 0 is gone"), 1, "samestep: rank 0 is gone\n", 0),
        (ProcessFailed("rank 0 is gone"), 2, "", 0),
    ],
)
def test_who_speaks_where_another_launcher_started_the_processes(
    error: BaseException, rank: int, said: str, turn: int, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 of what all met, then whoever met it, then rank 0 of what it heard: torchrun ends those that come later."""
    waited = list[float]()
    monkeypatch.setattr("samestep.screen.ending.time", SimpleNamespace(sleep=waited.append))
    monkeypatch.delenv(TOLD, raising=False)
    monkeypatch.setenv("RANK", str(rank))
    assert report(error) == (1 if isinstance(error, SystemExit) else 2)
    assert (capsys.readouterr(), waited) == (("", said), [turn * LATER])


@pytest.mark.parametrize("given", ["--devices 5", "--lr nan", "--epochs 0", "--devices tpu", "--run-dir /proc/nope"])
def test_bad_settings_for_a_script_are_one_line(given: str, samestep: Samestep, script: Callable[..., Path]) -> None:
    done = samestep("train", script(), *given.split())
    assert (done.status, done.out) == (2, "")
    assert re.fullmatch("samestep: .*\n", done.err)
    assert written() == []


# The other commands


def test_train_with_torch_by_name_is_the_default(samestep: Samestep) -> None:
    done = samestep("train", *QUICK, "--run-dir", "none", "-q", "--backend", "torch")
    assert fingerprint(done) == fingerprint(samestep("train", *QUICK, "--run-dir", "none", "-q"))


@pytest.mark.parametrize("command", ["train", "verify"])
def test_a_framework_that_is_not_installed(command: str, samestep: Samestep, monkeypatch: pytest.MonkeyPatch) -> None:
    there = find.installed
    monkeypatch.setattr(find, "installed", lambda name: None if name == "paddle" else there(name))
    done = samestep(command, "--backend", "paddle")
    assert done == Done(
        2,
        "",
        "samestep: 'paddle' is not installed; in a clone of samestep: pip install -c constraints.txt '.[paddle]'\n",
    )
    assert written() == []


def test_verify_refuses_a_framework_for_a_script_and_one_that_it_does_not_know(samestep: Samestep) -> None:
    Path("my.py").write_text("")
    done = samestep("verify", "my.py", "--backend", "jax")
    assert done == Done(
        2, "", "samestep: --backend goes with the built-in job; my.py has a model and an optimizer of its own\n"
    )
    done = samestep("verify", "--backend", "caffe")
    assert (done.status, done.out) == (2, "")
    assert re.fullmatch("samestep: no backend 'caffe': samestep has torch, .*\n", done.err)


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `verify` is asked for; it tells of a run that is the same, unless the seed is 1."""
    asked: list[Any] = []

    def pretend(
        job: verify.Job, *counts: list[int], tell: Callable[[verify.Report], None], **given: Any
    ) -> verify.Report:
        asked.append((job, *counts, given))
        row = verify.Row(
            "1 device", verdict=["same", "FAILED"][given["seed"]], steps=3, fingerprint="ab" * 32, message="[no]"
        )
        report = verify.Report("[b]my.py[/b]", 0, [row])
        tell(report)
        return report

    monkeypatch.setattr(verify, "verify", pretend)
    return asked


def test_verify_hands_on_what_was_given(
    samestep: Samestep, verified: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    switched: list[bool] = []
    monkeypatch.setattr(cli.switch, "set_up", lambda: switched.append(True))
    Path("my.py").write_text("")
    done = samestep("verify", "my.py", "--devices", "2,1", "--processes", "3", "--", "-x", "7")
    assert (done.status, done.err, switched) == (0, "", [])
    assert done.out.splitlines()[-1] == f"the same in 1 way: 3 steps, fingerprint {'ab' * 32}"
    samestep(
        "verify", "my.py", "--epochs", 2, "--portable", "--all", "--kill", 0, "--resume-on", "same", "--keep", "kept"
    )
    samestep("verify", "--backend", "torch")
    usual = {"every": False, "kill": 3, "resume_on": "random", "seed": 0, "keep": None}
    other = {"every": True, "kill": 0, "resume_on": "same", "seed": 0, "keep": Path("kept")}
    counts = [1, 2, 3, 8], [1, 2, 3]
    assert verified == [
        (verify.Job(Path("my.py"), ["-x", "7"]), [1, 2], [3], usual),
        (verify.Job(Path("my.py"), [], 2), *counts, other),
        (verify.Job(None, [], 1, "torch"), *counts, usual),
    ]
    assert switched == [True]


def test_verify_ends_with_status_1_where_something_differs(samestep: Samestep, verified: list[Any]) -> None:
    done = samestep("verify", "--seed", 1)
    assert (done.status, done.out.splitlines()[2:]) == (1, ["[b]my.py[/b] failed on 1 device:", "[no]"])
    done = samestep("verify", "--seed", 1, "--json")
    assert (done.status, json.loads(done.out)["same"]) == (1, False)
    assert samestep("verify", "--json").status == 0


@pytest.mark.parametrize(("terminal", "options"), [(True, []), (True, ["--json"]), (False, []), (False, ["--json"])])
def test_verify_shows_its_progress_on_a_terminal(
    terminal: bool, options: list[str], samestep: Samestep, verified: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that is gone at the end."""
    done: list[Any] = []

    class Live:
        def __init__(self, **given: object) -> None:
            done.append(given)

        def __enter__(self) -> None:
            done.append("shown")

        def __exit__(self, *_: object) -> None:
            done.append("gone")

        def update(self, table: Any) -> None:
            done.append(len(table.rows))

    monkeypatch.setattr("rich.live.Live", Live)
    monkeypatch.setattr(cli, "out", Console(force_terminal=terminal, file=io.StringIO()))
    samestep("verify", *options)
    given = {"console": cli.out, "refresh_per_second": 4, "transient": True}
    assert done == ([given, "shown", 1, "gone"] if terminal and not options else [given, 1])


def test_verify_runs_the_built_in_job_with_the_framework() -> None:
    job = verify.Job(epochs=1, backend="jax")
    assert job.command(verify.Way(2), Path("folder"))[3:] == [
        "train", "--quiet", "--devices=2", "--run-dir=folder", "--resume=auto", "--epochs=1", "--backend=jax",
    ]  # fmt: skip
    assert (str(job), str(verify.Job())) == ("the built-in job with jax", "the built-in job")


def test_devices(samestep: Samestep, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each framework is asked in a process of its own; here only PyTorch and one that cannot be loaded."""
    versions = {"torch": metadata.version("torch"), "jax": "0.0"}
    monkeypatch.setattr(find, "installed", versions.get)
    ask = cli._ask
    monkeypatch.setattr(cli, "_ask", lambda name: ask(name if name == "torch" else "caffe"))
    done = samestep("devices")
    assert (done.status, done.err) == (0, "")
    lines = [line.split() for line in done.out.splitlines()]
    cpu = next(line for line in lines if line[:1] == ["cpu"])
    total, used = float(cpu[1]), float(cpu[3])
    assert cpu[2] == cpu[4] == "GiB"
    assert 0 < used < total
    seen = [str(device) for device in find.load("torch").devices()]
    assert ["torch", versions["torch"], *", ".join(seen).split()] in lines
    assert " ".join(lines[-4]).startswith(
        "jax 0.0 cannot be loaded: samestep.errors.WrongType: no backend 'caffe': samestep has torch, "
    )
    assert [line[0] for line in lines[-5:]] == ["torch", "jax", "tensorflow", "paddle", "mxnet"]
    assert lines[-3:] == [[name, "not", "installed"] for name in ("tensorflow", "paddle", "mxnet")]
    assert written() == []


def test_devices_to_the_letter(samestep: Samestep, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = {"cpu": (15 << 29, 3 << 29), "cuda:0": (141 << 30, 0)}
    backend = SimpleNamespace(devices=lambda: list(memory), memory=memory.get)
    monkeypatch.setattr(find, "default", lambda: backend)
    monkeypatch.setattr(find, "installed", {"torch": "2.0", "jax": "0.4"}.get)
    monkeypatch.setattr(cli, "_ask", {"torch": "cpu, cuda:0", "jax": "cannot be loaded: [b]no[/b]"}.get)
    done = samestep("devices")
    assert (done.status, done.err) == (0, "")
    assert [line.rstrip() for line in done.out.splitlines()] == [
        "device  memory     used",
        "cpu     7.5 GiB    1.5 GiB",
        "cuda:0  141.0 GiB  0.0 GiB",
        "",
        "framework   version         devices",
        "torch       2.0             cpu, cuda:0",
        "jax         0.4             cannot be loaded: [b]no[/b]",
        "tensorflow  not installed",
        "paddle      not installed",
        "mxnet       not installed",
    ]


@pytest.mark.parametrize(
    ("status", "out", "err", "told"),
    [
        (0, "a greeting\ncpu, cuda:0\n", "a warning\n", "cpu, cuda:0"),
        (1, "a greeting\n", "Traceback\nImportError: no\n", "cannot be loaded: ImportError: no"),
        (-11, "", "", "cannot be loaded: status -11"),
    ],
)
def test_what_a_framework_says(status: int, out: str, err: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = SimpleNamespace(returncode=status, stdout=out, stderr=err)
    monkeypatch.setattr(subprocess, "run", lambda command, **given: done)
    assert cli._ask("torch") == told


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Path]:
    """The four files with small content, in the cache."""
    folder = tmp_path / "cache" / "samestep" / "fashion-mnist"
    folder.mkdir(parents=True)
    contents = {name: name.encode() for name in fashion.FILES}
    monkeypatch.setattr(
        fashion, "FILES", {name: (len(text), hashlib.sha256(text).hexdigest()) for name, text in contents.items()}
    )
    for name, text in contents.items():
        (folder / name).write_bytes(gzip.compress(text))
    return {name: folder / name for name in contents}


def states(done: Done) -> dict[str, str]:
    rows = [line.split() for line in done.out.splitlines()]
    return {row[0]: row[1] for row in rows if row[0] in fashion.FILES}


def test_data_that_is_missing(samestep: Samestep, tmp_path: Path) -> None:
    done = samestep("data")
    assert (done.status, done.err) == (0, "")
    assert states(done) == dict.fromkeys(fashion.FILES, "missing")
    assert not (tmp_path / "cache").exists()


def test_data_that_is_there(samestep: Samestep, small: dict[str, Path]) -> None:
    done = samestep("data")
    assert (done.status, done.err) == (0, "")
    assert states(done) == dict.fromkeys(small, "ok")
    assert all(f"{path.stat().st_size}" in done.out for path in small.values())


def test_data_shows_whole_paths(samestep: Samestep, small: dict[str, Path]) -> None:
    lines = samestep("data").out.splitlines()
    assert all(any(line.rstrip().endswith(str(path)) for line in lines) for path in small.values())


def test_data_to_the_letter(samestep: Samestep, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [
        fashion.FileStatus("one", Path("/the/[b]/one"), "ok", 1234567),
        fashion.FileStatus("two", None, "missing", 0),
    ]
    monkeypatch.setattr(fashion, "status", lambda: files)
    assert samestep("data").out.splitlines() == [
        "one                         ok        1,234,567 bytes  /the/[b]/one",
        "two                         missing                 -  -",
    ]


def test_data_in_a_folder_of_ones_own(
    samestep: Samestep, small: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = next(iter(small))
    small[first].rename(tmp_path / first)
    assert states(samestep("data"))[first] == "missing"
    monkeypatch.setenv("SAMESTEP_DATA", str(tmp_path))
    assert states(samestep("data")) == dict.fromkeys(small, "ok")


def test_data_that_is_damaged(samestep: Samestep, small: dict[str, Path]) -> None:
    first, second, *others = small
    small[first].write_bytes(gzip.compress(b"something else"))
    small[second].unlink()
    done = samestep("data")
    assert states(done) == {first: "damaged", second: "missing"} | dict.fromkeys(others, "ok")
    assert done.status == 2
    assert re.fullmatch("samestep: .*damaged.*\n", done.err)


def test_version(samestep: Samestep) -> None:
    for more in ([], ["--help"], ["train"]):
        assert samestep("--version", *more) == Done(0, f"samestep {ss.__version__}\n", "")


OPTIONS = {
    (): ["--version", "train", "verify", "diff", "export", "chapter", "schedule", "devices", "data", "bench", "lab"],
    ("train",): [
        "SCRIPT", "--model", "--devices", "--shards", "--batch-size", "--epochs", "--lr", "--schedule", "--momentum", "--clip",
        "--seed", "--threads-per-shard", "--sampling", "--deterministic", "--no-deterministic", "--run-dir", "--quiet",
        "-q", "--checkpoint-every", "--resume", "--processes", "--backend",
        "--portable", "--accept", "--profile", "--precision", "--memory-format", "--compile",
    ],
    ("verify",): [
        "--backend", "--devices", "--processes", "--all", "--kill", "--resume-on", "--epochs", "--seed", "--keep", "--json",
        "--portable",
    ],
    ("diff",): ["--json"],
    ("export",): ["--best", "--average"],
    ("chapter",): ["--tab", "--epochs", "--examples", "--figures", "--seed"],
    ("schedule",): ["--steps", "--epochs", "--steps-per-epoch", "--png", "--svg", "--json", "--csv"],
    ("devices",): [],
    ("data",): [],
    ("bench",): ["devices"],
    ("bench", "devices"): ["--backend", "--png", "--json", "--quick"],
    ("lab",): ["figure", "run", "rates", "curvature", "sweep"],
    ("lab", "figure"): [
        "--list", "--objective", "--optimizer", "--schedule", "--noise", "--steps", "--start", "--seed", "--trajectories",
        "--png", "--json", "--csv",
    ],
    ("lab", "run"): [
        "--list", "--objective", "--optimizer", "--schedule", "--noise", "--steps", "--start", "--seed", "--trajectories",
        "--png", "--json", "--csv",
    ],
    ("lab", "rates"): [
        "--model", "--backend", "--devices", "--from", "--to", "--steps", "--png", "--json", "--csv",
    ],
    ("lab", "curvature"): ["--model", "--backend", "--devices", "--products", "--json"],
    ("lab", "sweep"): [
        "--model", "--backend", "--of", "--values", "--lr", "--batch-size", "--epochs", "--seeds", "--at-once",
        "--folder", "--png", "--json", "--csv",
    ],
}  # fmt: skip


@pytest.mark.parametrize("command", OPTIONS)
def test_help(command: tuple[str, ...], samestep: Samestep) -> None:
    done = samestep(*command, "--help")
    assert (done.status, done.err) == (0, "")
    assert re.match(rf"Usage: .*{' '.join(['samestep', *command])} \[OPTIONS\]", done.out)
    words = set(re.findall(r"[\w-]+", done.out))
    assert words >= {"--help", *OPTIONS[command]}
    assert ("--install-completion" in words) == (command == ())


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tra", ["train"]),
        ("train --model le", ["lenet", "lenet_modern"]),
        ("train --backend j", ["jax"]),
        ("verify --backend p", ["paddle"]),
        ("train --ep", ["--epochs"]),
        ("nothing", []),
    ],
)
def test_a_shell_completes_commands_options_and_values(
    typed: str, offered: list[str], samestep: Samestep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_SAMESTEP_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"samestep {typed}")
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split())))
    assert samestep().out.split() == offered


def test_the_script_of_completion_is_shown(samestep: Samestep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_SAMESTEP_COMPLETE", "source_bash")  # --show-completion asks which shell has started it
    done = samestep()
    assert done.status == 0
    assert "_SAMESTEP_COMPLETE=complete_bash" in done.out


def test_every_option_has_a_line_of_help() -> None:
    from typer.main import get_command

    commands = get_command(cli.app).commands  # type: ignore[attr-defined]
    assert sorted(commands) == sorted(OPTIONS[()][1:])
    inner = {(room, name): command for room in ("bench", "lab") for name, command in commands[room].commands.items()}
    for name, command in ({(name,): command for name, command in commands.items()} | inner).items():
        assert command.help, name
        for option in command.params:
            assert getattr(option, "help", None), f"{name} {option.name}"
            assert {*option.opts} & {
                "script",
                "file",
                "name",
                "expressions",
                "a",
                "b",
                "source",
                "target",
                *OPTIONS[name],
            }, f"{name} {option.name} is not in OPTIONS"


def test_what_is_printed_is_plain(samestep: Samestep) -> None:
    """Errors that nobody expected are Python's own, and numbers have no colours."""
    assert samestep("--version").status == 0
    assert not cli.app.pretty_exceptions_enable
    assert cli.out.render_str("7 steps, 0.5 s").spans == []


def test_no_command_shows_help(samestep: Samestep) -> None:
    done = samestep()
    assert done.status == 2
    assert "train" in done.out + done.err


def test_as_a_process_of_its_own() -> None:
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from samestep.screen.cli import run; run()"
    command = [sys.executable, "-c", code, str(Path(ss.__file__).parents[1]), "train", "--epochs", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == "samestep: max_epochs must be at least 1, got max_epochs=0\n"
    assert (done.returncode, done.stdout) == (2, "")
    assert written() == []


def test_devices_without_a_framework(samestep: Samestep, monkeypatch: pytest.MonkeyPatch) -> None:
    from samestep.errors import BackendMissing

    def none() -> None:
        raise BackendMissing(
            "no framework is installed; in a clone of samestep: pip install -c constraints.txt '.[torch]'"
        )

    monkeypatch.setattr("samestep.backends.find.default", none)
    done = samestep("devices")
    assert done.status == 0
    assert "no framework is installed; in a clone of samestep: pip install -c constraints.txt '.[torch]'" in done.out


def test_the_defaults_of_all_commands() -> None:
    """Where nothing is given, the Trainer, or `verify`, decides."""
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    given = {name: {p.name: p.default for p in command.params} for name, command in commands.items()}
    told = {
        name: {key: value for key, value in about.items() if value not in (None, False)}
        for name, about in given.items()
    }
    assert told == {
        "train": {}, "diff": {}, "export": {}, "devices": {}, "data": {}, "schedule": {}, "bench": {}, "lab": {}, "chapter": {},
        "verify": {"devices": "1,2,3,8", "processes": "1,2,3", "kill": 3, "resume_on": "random"},
    }  # fmt: skip
    usual = {name: one.default for name, one in inspect.signature(verify.verify).parameters.items()}
    for name in ("kill", "resume_on", "seed", "every", "keep"):
        assert given["verify"][name] == usual[name]
    for name in ("devices", "processes"):
        assert given["verify"][name] == ",".join(map(str, usual[name]))
