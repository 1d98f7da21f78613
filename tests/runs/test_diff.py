"""diff: the first step, shard and tensor at which two runs differ, and why; on real runs and on files made by hand."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import samestep as ss
from samestep.draws import order
from samestep.errors import Invalid
from samestep.fingerprint import of_weights
from samestep.models.torch import mlp
from samestep.runs import checkpoint
from samestep.runs.diff import Difference, compare, describe, to_json
from samestep.runs.log import events, sealed
from samestep.runs.recipe import read_recipe, recipe_text
from samestep.screen import cli
from samestep.shards import cut_pass

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((40, 5)).astype(np.float32)
Y = RANDOM.integers(0, 3, 40)
TEST = (X[:9] + 1, Y[:9])
NAMES = ["dense1.weight", "dense1.bias", "dense2.weight", "dense2.bias"]
STEPS = 6  # two epochs of 16 + 16 + 8 examples; checkpoints after 3 and 6 steps
NEVER = (
    "the recipes are the same, so this should never happen: look for a data source that gives other examples each time, "
    "code that looks at something else than its arguments, or a device that computes wrongly"
)


def fit(folder: Path, y: Any = Y, test: Any = TEST, model: Any = None, **settings: Any) -> Path:
    given = {"max_epochs": 2, "batch_size": 16, "shards": 4, "devices": 1, "progress": False, "run_dir": folder}
    ss.Trainer(**given | settings).fit(model or mlp((5, 4, 3), dropout=0.0, seed=1), ss.Data((X, y), test))
    return folder


@pytest.fixture(scope="module", autouse=True)
def unhurried() -> Iterator[None]:
    """Each checkpoint is waited for: on a machine that is slow today, one may else take the place of the one before it."""
    submit = checkpoint.Writer.submit

    def wait(self: checkpoint.Writer, *given: Any) -> None:
        submit(self, *given)
        self.flush()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.Writer, "submit", wait)
        patch.setattr("samestep.training.fit.LIVE", 1e9)  # one look at the device, one line in the log, per epoch
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(tmp_path_factory.mktemp("diff") / "base")


@pytest.fixture
def twin(base: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be changed."""
    return Path(shutil.copytree(base, tmp_path / "twin"))


def change_recipe(folder: Path, **values: Any) -> None:
    path = folder / "recipe.json"
    path.write_bytes(recipe_text(read_recipe(path.read_bytes()) | values))


def change_step(folder: Path, step: int, **values: Callable[[Any], Any]) -> None:
    """Change what the log tells of one step: each field by a function of what it was."""
    told = list(events((folder / "events.jsonl").read_bytes()))
    for event in told:
        if event["event"] == "steps" and 0 <= step - event["first"] < len(event["lr"]):
            for name, new in values.items():
                event[name][step - event["first"]] = new(event[name][step - event["first"]])
    write_log(folder, told)


def write_log(folder: Path, told: list[Any]) -> None:
    """A log as samestep would have written it."""
    lines, seal = [], ""
    for event in told:
        line, seal = sealed(event, seal)
        lines.append(line)
    (folder / "events.jsonl").write_bytes(b"".join(lines))


def other_print(_: str) -> str:
    return "0123456789abcdef"


def in_shards(*shards: int) -> Callable[[list[float]], list[float]]:
    return lambda losses: [loss + (shard in shards) for shard, loss in enumerate(losses)]


def end(folder: Path) -> str:
    return str(json.loads((folder / "events.jsonl").read_text().splitlines()[-1])["fingerprint"])


# The same


def test_a_run_is_the_same_as_itself(base: Path) -> None:
    found = compare(base, base)
    assert found.same
    assert (found.kind, found.first_step, found.shards, found.cause) == (None, None, None, None)
    assert (found.steps, found.lengths, found.recipe, found.tensors, found.notes) == (STEPS, (6, 6), [], [], [])
    assert describe(found) == f"the same: 6 steps, fingerprint {end(base)}"


@pytest.mark.parametrize("devices", [2, 3])
def test_the_number_of_devices_makes_no_difference(base: Path, tmp_path: Path, devices: int) -> None:
    other = fit(tmp_path / "other", devices=devices)
    assert describe(compare(base, other)) == f"the same: 6 steps, fingerprint {end(base)}"


def test_a_run_that_was_resumed_is_the_same(base: Path, tmp_path: Path) -> None:
    fit(tmp_path / "run", max_epochs=1)
    found = compare(base, fit(tmp_path / "run", devices=2))
    assert found.same
    assert found.steps == STEPS
    assert "resume" in (tmp_path / "run" / "events.jsonl").read_text()


def test_what_changes_no_step_is_told_and_is_no_difference(base: Path, tmp_path: Path) -> None:
    found = compare(base, fit(tmp_path / "other", test=None))
    assert found.same
    assert found.cause is None
    assert [(name, b) for name, _, b in found.recipe] == [
        ("test.examples", "absent"), ("test.x", "absent"), ("test.y", "absent"), ("test.type", "absent"),
        ("test.sha256", "absent"), ("test", None),
    ]  # fmt: skip


# Real runs that differ


def test_another_seed(base: Path, tmp_path: Path) -> None:
    found = compare(base, fit(tmp_path / "other", seed=5))
    assert not found.same
    assert (found.kind, found.first_step, found.shards) == ("loss", 0, [0, 1, 2, 3])
    assert found.recipe == [("seed", 0, 5)]
    assert describe(found).splitlines()[:6] == [
        "they differ first at step 0, in all 4 shards",
        "cause: another seed, 0 in A and 5 in B, so another order of examples and other noise",
        "",
        "recipe  A  B",
        "seed    0  5",
        "",
    ]
    assert [(t.name, t.step) for t in found.tensors] == [(name, 3) for name in NAMES]


def test_another_number_of_shards(base: Path, tmp_path: Path) -> None:
    found = compare(base, fit(tmp_path / "other", shards=3))
    assert (found.kind, found.shards) == ("shards", None)
    step = found.first_step
    assert found.verdict == f"they differ first at step {step}, in which shard cannot be told: A has 4 and B 3"
    assert found.cause == "another number of shards, 4 in A and 3 in B, so other noise, and sums in another order"
    assert all(0 < (t.largest or 0) < 1e-5 for t in found.tensors)  # only the order of additions is another
    assert compare(tmp_path / "other", base).verdict == found.verdict.replace("A has 4 and B 3", "A has 3 and B 4")


def test_another_batch_size(base: Path, tmp_path: Path) -> None:
    found = compare(base, fit(tmp_path / "other", batch_size=8, seed=3))
    assert describe(found).splitlines()[:4] == [
        "they differ first at step 0: it has 16 examples in A and 8 in B",
        "cause: another batch size, 16 in A and 8 in B",  # the seed has no say in this
        "A ends after 6 steps",
        "no tensors are compared: after no step do both have a checkpoint or final weights",
    ]
    back = compare(tmp_path / "other", base)
    assert back.verdict == "they differ first at step 0: it has 8 examples in A and 16 in B"


@pytest.mark.parametrize("k", range(STEPS))
def test_a_schedule_that_departs_at_step_k(base: Path, tmp_path: Path, k: int) -> None:
    schedule = ss.piecewise([k], [0.1, 0.05]) if k else ss.constant(0.05)
    found = compare(base, fit(tmp_path / "other", schedule=schedule))
    assert (found.kind, found.first_step, found.shards) == ("rate", k, None)
    assert found.verdict == (f"they differ first at step {k}: the learning rate is 0.1 in A and 0.05 in B")
    assert found.cause == f"another schedule, constant(0.1) in A and {schedule} in B"
    assert {t.step for t in found.tensors} == {3 if k < 3 else 6}


def test_a_log_with_the_digits_of_float32_as_they_were_once_written(base: Path, twin: Path) -> None:
    for step in range(STEPS):
        change_step(twin, step, lr=lambda lr: float(np.float32(lr)))
    assert "0.10000000149011612" in (twin / "events.jsonl").read_text()
    assert compare(base, twin).same
    change_step(twin, 3, lr=lambda lr: float(np.nextafter(np.float32(lr), np.float32(1))))
    found = compare(base, twin)
    assert (found.kind, found.first_step) == ("rate", 3)


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_a_precision_that_is_not_a_type_of_numpy(base: Path, twin: Path, precision: str) -> None:
    change_recipe(twin, precision=precision)
    assert compare(base, twin).same
    change_step(twin, 3, fingerprint=other_print)
    found = compare(base, twin)
    assert (found.kind, found.first_step) == ("update", 3)
    assert found.cause == f"another precision, float32 in A and {precision} in B"


def test_a_schedule_of_another_name_and_the_same_rates(base: Path, tmp_path: Path) -> None:
    found = compare(base, fit(tmp_path / "other", schedule=ss.piecewise([STEPS], [0.1, 0.05])))
    assert found.same
    assert found.recipe == [("schedule", "constant(0.1)", "piecewise([6], [0.1, 0.05])")]


def test_a_function_as_schedule_is_known_by_its_code(tmp_path: Path) -> None:
    one = fit(tmp_path / "one", schedule=lambda t: 0.1)
    found = compare(one, fit(tmp_path / "other", schedule=lambda t: 0.1 if t < 2 else 0.2))
    assert (found.kind, found.first_step) == ("rate", 2)
    assert [name for name, _, _ in found.recipe] == ["code.<lambda>()"]
    assert found.cause == "other code or content: code.<lambda>()"


def test_a_function_as_schedule_that_looks_at_something_else(tmp_path: Path) -> None:
    seen = []

    class Rate:
        def __reduce__(self) -> str:
            return "it says nothing of itself"

        def __call__(self, t: int) -> float:
            seen.append(t)
            return 0.1 if len(seen) < 12 else 0.2

    found = compare(*(fit(tmp_path / name, schedule=Rate()) for name in ("one", "other")))
    assert (found.kind, found.recipe) == ("rate", [])
    assert found.cause == "the recipes are the same: the schedule must be a function of more than t"


def test_another_optimizer_is_seen_in_the_update(base: Path, tmp_path: Path) -> None:
    found = compare(base, fit(tmp_path / "other", optimizer=ss.sgd(momentum=0.9)))
    assert (found.kind, found.first_step) == ("update", 1)  # the first velocity is the gradient itself
    assert found.verdict == (
        "they differ first at step 1: the forward pass agrees in every shard, the gradient or the update does not"
    )
    one, other = (f"SGD(momentum={momentum}, nesterov=False, weight_decay=0.0)" for momentum in (0.0, 0.9))
    assert found.cause == f"another optimizer, {one} in A and {other} in B"
    assert [t.name for t in found.tensors] == NAMES + [f"optimizer:velocity:{name}" for name in NAMES]
    assert {(t.step, t.note) for t in found.tensors[4:]} == {(3, "only in B")}


@pytest.mark.parametrize("example", [0, 7, 23, 39])
def test_one_label_names_the_step_and_the_shard(base: Path, tmp_path: Path, example: int) -> None:
    y = Y.copy()
    y[example] = (y[example] + 1) % 3
    found = compare(base, fit(tmp_path / "other", y=y))
    place = order(0, 0, 40).tolist().index(example)
    [(step, shard)] = [
        (step, shard)
        for step, spans in enumerate(cut_pass(40, 16, 4))
        for shard, (lo, hi) in enumerate(spans)
        if lo <= place < hi
    ]
    assert (found.kind, found.first_step, found.shards) == ("loss", step, [shard])
    assert found.verdict == f"they differ first at step {step}, in shard {shard}"
    assert found.cause == "other training data: train.sha256"
    assert describe(found).splitlines()[3].split() == ["recipe", "A", "B"]


def test_other_starting_weights(base: Path, tmp_path: Path) -> None:
    model = mlp((5, 4, 3), dropout=0.0, seed=2)
    found = compare(base, fit(tmp_path / "other", model=model))
    assert (found.kind, found.first_step, found.shards) == ("initial", 0, None)
    assert found.verdict == "they differ from the start: in their starting weights"
    assert found.cause == "other starting weights: the model was drawn from another seed, or changed before the fit"
    both = compare(base, fit(tmp_path / "seeds", model=model, seed=2))
    assert both.verdict == found.verdict
    assert both.cause == "another seed, 0 in A and 2 in B, so another order of examples and other noise"


def test_two_models(base: Path, tmp_path: Path) -> None:
    found = compare(base, fit(tmp_path / "other", model=mlp((5, 6, 3), dropout=0.0, seed=1)))
    assert (found.kind, found.first_step) == ("model", 0)
    assert found.verdict == "they differ from the start: they are of two models"
    assert found.cause == ("another model: parameters.dense1.weight, parameters.dense1.bias, parameters.dense2.weight")
    assert [t.note for t in found.tensors] == [
        "float32 [4, 5] in A, float32 [6, 5] in B",
        "float32 [4] in A, float32 [6] in B",
        "float32 [3, 4] in A, float32 [3, 6] in B",
        "",
    ]


def test_two_models_without_a_common_tensor(base: Path, tmp_path: Path) -> None:
    import torch

    found = compare(base, fit(tmp_path / "other", model=torch.nn.Sequential(torch.nn.Linear(5, 3))))
    assert found.kind == "model"
    assert [(t.name, t.note) for t in found.tensors] == [
        *((name, "only in A") for name in NAMES), ("0.weight", "only in B"), ("0.bias", "only in B"),
    ]  # fmt: skip
    assert (
        found.cause == "another model: parameters.dense1.weight, parameters.dense1.bias, parameters.dense2.weight, ..."
    )


# Runs of unequal length, and unfinished ones


def test_unequal_length(base: Path, tmp_path: Path) -> None:
    short = fit(tmp_path / "short", max_epochs=1)
    found = compare(short, base)
    third = json.loads((base / "events.jsonl").read_text().splitlines()[1])["fingerprint"][-1]
    assert (found.same, found.kind, found.first_step, found.cause) == (False, "length", None, None)
    assert (found.steps, found.lengths, found.tensors) == (3, (3, 6), [])
    assert describe(found).splitlines() == [
        f"the same as far as both go: 3 steps, fingerprint {third}",
        "A ends after 3 steps",
        "",
        "recipe      A  B",
        "max_epochs  1  2",
    ]
    back = compare(base, short)
    assert (back.kind, back.verdict, back.notes) == ("length", found.verdict, ["B ends after 3 steps"])


def test_max_epochs_explains_no_difference(base: Path, tmp_path: Path) -> None:
    short = fit(tmp_path / "short", max_epochs=1)
    change_step(short, 1, fingerprint=other_print)
    found = compare(short, base)
    assert found.first_step == 1
    assert found.cause == NEVER.replace("the recipes are the same", "nothing in which the recipes differ explains this")


def test_an_unfinished_run_with_a_half_written_line(base: Path, twin: Path) -> None:
    lines = (twin / "events.jsonl").read_text().splitlines(keepends=True)
    assert [json.loads(line)["event"] for line in lines] == ["start", "steps", "epoch", "steps", "epoch", "end"]
    (twin / "events.jsonl").write_text("".join(lines[:3]) + lines[3][:100])
    found = compare(base, twin)
    assert (found.kind, found.steps, found.lengths) == ("length", 3, (6, 3))
    assert found.notes == ["B is not finished: it ends after 3 steps"]
    (twin / "events.jsonl").write_text("".join(lines[:-1]))  # killed when all was done but the last line
    found = compare(base, twin)
    assert found.same
    last = json.loads(lines[3])["fingerprint"][-1]
    assert describe(found) == f"the same: 6 steps, fingerprint {last}\nB is not finished: it ends after 6 steps"


def test_weights_from_before_a_resume_are_not_its_last(base: Path, tmp_path: Path) -> None:
    run = fit(tmp_path / "run", max_epochs=1)
    old = (run / "weights.safetensors").read_bytes()
    fit(run, max_epochs=2)
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    (run / "events.jsonl").write_text("".join(lines[:-1]))  # killed again before it ended
    (run / "weights.safetensors").write_bytes(old)
    assert compare(base, run).same


def test_final_weights_against_the_checkpoint_of_a_longer_run(base: Path, tmp_path: Path) -> None:
    short = fit(tmp_path / "short", max_epochs=1, checkpoint_every=None)
    assert not (short / "checkpoints").exists()
    assert compare(short, base).kind == "length"
    change_weights(short, "dense2.bias", [0.5, 0.5, 0.5])
    found = compare(short, base)
    assert (found.kind, [(t.name, t.step) for t in found.tensors]) == ("tensors", [("dense2.bias", 3)])


def test_final_weights_know_no_optimizer(tmp_path: Path) -> None:
    momentum = {"optimizer": ss.sgd(momentum=0.9)}
    one = fit(tmp_path / "one", checkpoint_every=None, **momentum)
    other = fit(tmp_path / "other", **momentum)
    for path in (other, checkpoint.path_of(other, 6)):
        assert compare(one, path).same
        assert compare(path, one).same


def change_weights(folder: Path, name: str, value: Any) -> None:
    from safetensors.numpy import load_file

    tensors = load_file(folder / "weights.safetensors")
    tensors[name] = np.asarray(value, np.float32)
    save_file(tensors, folder / "weights.safetensors")
    told = list(events((folder / "events.jsonl").read_bytes()))
    write_log(folder, [*told[:-1], told[-1] | {"fingerprint": of_weights(tensors)}])


# Logs changed by hand


@pytest.mark.parametrize("step", range(STEPS))
def test_one_fingerprint(base: Path, twin: Path, step: int) -> None:
    change_step(twin, step, fingerprint=other_print)
    found = compare(base, twin)
    assert (found.same, found.kind, found.first_step, found.shards) == (False, "update", step, None)
    assert compare(twin, base).verdict == found.verdict
    assert describe(found) == (
        f"they differ first at step {step}: the forward pass agrees in every shard, the gradient or the update does not\n"
        f"cause: {NEVER}"
    )


@pytest.mark.parametrize(
    ("shards", "words"),
    [((2,), "shard 2"), ((0, 3), "shards 0 and 3"), ((0, 1, 3), "shards 0, 1 and 3"), ((0, 1, 2, 3), "all 4 shards")],
)
def test_losses_name_their_shards(base: Path, twin: Path, shards: tuple[int, ...], words: str) -> None:
    change_step(twin, 4, loss=in_shards(*shards), fingerprint=other_print)
    change_step(twin, 5, loss=in_shards(1))
    found = compare(base, twin)
    assert (found.kind, found.first_step, found.shards) == ("loss", 4, list(shards))
    assert describe(found) == f"they differ first at step 4, in {words}\ncause: {NEVER}"


def test_a_difference_in_the_losses_comes_before_one_in_the_weights(base: Path, twin: Path) -> None:
    change_step(twin, 3, loss=in_shards(1))
    change_step(twin, 2, fingerprint=other_print)
    assert compare(base, twin).verdict.startswith("they differ first at step 2: the forward pass agrees")
    change_step(twin, 2, loss=in_shards(3), lr=lambda lr: lr / 2)
    assert compare(base, twin).verdict == "they differ first at step 2, in shard 3"


def test_hits_alone(base: Path, twin: Path) -> None:
    change_step(twin, 1, hits=lambda hits: [hits[0], hits[1] + 1, *hits[2:]])
    assert compare(base, twin).verdict == "they differ first at step 1, in shard 1"


def test_losses_are_compared_by_their_bits(base: Path, twin: Path, tmp_path: Path) -> None:
    change_step(twin, 1, loss=lambda losses: [0.0, *losses[1:]])
    other = Path(shutil.copytree(twin, tmp_path / "other"))
    assert compare(twin, other).same
    change_step(other, 1, loss=lambda losses: [-0.0, *losses[1:]])
    assert compare(twin, other).shards == [0]


def test_another_number_of_shards_that_changes_no_bit(base: Path, twin: Path) -> None:
    for step in range(STEPS):
        change_step(twin, step, loss=lambda losses: losses[:2], hits=lambda hits: hits[:2])
    change_recipe(twin, shards=2)
    found = compare(base, twin)
    assert (found.same, found.recipe) == (True, [("shards", 4, 2)])
    change_step(twin, 3, lr=lambda lr: lr / 2)
    assert (compare(base, twin).kind, compare(base, twin).first_step) == ("rate", 3)


def test_steps_of_which_only_the_fingerprint_is_known(base: Path, twin: Path) -> None:
    told = list(events((twin / "events.jsonl").read_bytes()))
    prints = told[1]["fingerprint"]
    told[1] = {"event": "lost", "first": 0, "last": 2, "fingerprint": prints}
    write_log(twin, told)
    found = compare(base, twin)
    assert (found.same, found.steps) == (True, STEPS)
    assert found.notes == ["the log of B was damaged: 3 steps left only a fingerprint"]
    assert compare(twin, twin).same
    for other in ("0" * 16, "f" * 16):
        write_log(twin, [told[0], told[1] | {"fingerprint": [prints[0], other, prints[2]]}, *told[2:]])
        found = compare(base, twin)
        assert (found.kind, found.first_step, found.shards) == ("update", 1, None)
        assert found.verdict == "they differ first at step 1, in what cannot be told: one log of it is lost"


def test_large_numbers_are_compared_by_their_values(base: Path, twin: Path, tmp_path: Path) -> None:
    """Of steps, examples and shards."""
    first, *_, end = events((twin / "events.jsonl").read_bytes())
    steps = {
        "event": "steps", "epoch": 1, "first": 0, "examples": [300] * 300, "lr": [0.1] * 300,
        "loss": [[0.5]] * 299 + [[0.5] * 300], "hits": [[1]] * 299 + [[1] * 300], "fingerprint": ["ab"] * 300,
    }  # fmt: skip
    write_log(twin, [first, steps, end])
    shutil.rmtree(twin / "checkpoints")
    other = Path(shutil.copytree(twin, tmp_path / "other"))
    found = compare(twin, other)
    assert (found.same, found.steps, found.lengths, found.notes) == (True, 300, (300, 300), [])
    change_step(other, 299, loss=lambda losses: [0.25] * 300)
    assert compare(twin, other).verdict == "they differ first at step 299, in all 300 shards"


def test_a_model_without_hits(base: Path, twin: Path, tmp_path: Path) -> None:
    told = list(events((twin / "events.jsonl").read_bytes()))
    write_log(twin, [event | ({"hits": None} if "hits" in event else {}) for event in told])
    other = Path(shutil.copytree(twin, tmp_path / "other"))
    assert compare(twin, other).same
    assert compare(twin, base).same
    change_step(other, 5, loss=in_shards(2))
    assert compare(twin, other).shards == [2]


def test_the_evaluation(base: Path, twin: Path) -> None:
    told = list(events((twin / "events.jsonl").read_bytes()))
    was, told[2]["test_loss"] = told[2]["test_loss"], 2.5
    write_log(twin, told)
    found = compare(base, twin)
    assert (found.same, found.kind, found.first_step, found.tensors) == (False, "evaluation", 3, [])
    assert found.verdict == f"they differ first in the test after 3 steps: loss {was} in A, 2.5 in B"
    assert compare(twin, base).verdict == f"they differ first in the test after 3 steps: loss 2.5 in A, {was} in B"
    change_step(twin, 3, lr=lambda lr: lr / 2)  # a Plateau that follows the loss
    assert compare(base, twin).kind == "evaluation"
    change_step(twin, 2, lr=lambda lr: lr / 2)
    assert (compare(base, twin).kind, compare(base, twin).first_step) == ("rate", 2)


# Causes

EVERYTHING = {
    "shards": 8, "seed": 1, "batch_size": 3, "train": {"examples": 40, "sha256": "ab"}, "initial": "ab", "samestep": "9",
    "framework": "jax", "version": "7", "device": "cuda", "schedule": "s", "optimizer": "o", "gradient_clip_val": 0.5,
    "threads_per_shard": 2, "precision": "float64", "sampling": "with_replacement", "loss": "l", "deterministic": False,
    "max_epochs": 3, "average": "a", "test": None, "code": {"loss()": "ab"},
}  # fmt: skip


def cause(base: Path, twin: Path, kind: str, *names: str) -> str | None:
    """What is called the cause of a difference at step 4 when the recipes differ in these."""
    shutil.copy(base / "events.jsonl", twin / "events.jsonl")
    shutil.copy(base / "recipe.json", twin / "recipe.json")
    change_recipe(twin, **{name: EVERYTHING[name] for name in names})
    fields = {"update": {"fingerprint": other_print}, "loss": {"loss": in_shards(1)}, "rate": {"lr": lambda lr: lr / 2}}
    change_step(twin, 4, **fields[kind])
    found = compare(base, twin)
    assert found.kind == kind
    return found.cause


def test_causes_have_an_order(base: Path, twin: Path) -> None:
    names = list(EVERYTHING)
    torch = json.loads((base / "recipe.json").read_text())["version"]
    words = {
        "shards": "another number of shards, 4 in A and 8 in B, so other noise, and sums in another order",
        "seed": "another seed, 0 in A and 1 in B, so another order of examples and other noise",
        "batch_size": "another batch size, 16 in A and 3 in B",
        "train": "other training data: train.x, train.y, train.type, ...",
        "samestep": f"another samestep, {ss.__version__} in A and 9 in B",
        "framework": "another framework, torch in A and jax in B: they agree to rounding only",
        "version": f"another version of the framework, {torch} in A and 7 in B",
        "device": "another kind of device, cpu in A and cuda in B: they agree to rounding only",
        "gradient_clip_val": "another gradient_clip_val, 0.0 in A and 0.5 in B",
        "threads_per_shard": "another threads_per_shard, 1 in A and 2 in B",
        "precision": "another precision, float32 in A and float64 in B",
        "sampling": "another sampling, without_replacement in A and with_replacement in B",
        "loss": "another loss, None in A and l in B",
        "deterministic": "deterministic=False, which gives up sameness",
    }
    for name, sentence in words.items():
        assert cause(base, twin, "update", name) == sentence
        if name in names[:10]:  # with everything that comes after it in the order
            assert cause(base, twin, "update", *names[names.index(name) :]) == sentence


@pytest.mark.parametrize("name", ["optimizer", "gradient_clip_val", "schedule", "initial", "max_epochs"])
def test_what_cannot_explain_other_losses_at_a_later_step(base: Path, twin: Path, name: str) -> None:
    unexplained = NEVER.replace("the recipes are the same", "nothing in which the recipes differ explains this")
    assert cause(base, twin, "loss", name) == unexplained
    assert cause(base, twin, "loss", name, "threads_per_shard") == "another threads_per_shard, 1 in A and 2 in B"


def test_the_schedule_explains_rates_and_nothing_else(base: Path, twin: Path) -> None:
    assert cause(base, twin, "rate", "schedule", "device", "seed") == "another schedule, constant(0.1) in A and s in B"
    assert cause(base, twin, "update", "schedule", "device") == (
        "another kind of device, cpu in A and cuda in B: they agree to rounding only"
    )


def test_what_has_no_place_of_its_own_comes_after_the_test_data_and_before_the_code(base: Path, twin: Path) -> None:
    assert (cause(base, twin, "rate", "optimizer", "test") or "").startswith(
        "other test data, which the schedule follows: "
    )
    assert (cause(base, twin, "rate", "code", "optimizer") or "").startswith("another optimizer, ")


def test_a_cause_names_its_own_entries(base: Path, twin: Path) -> None:
    code = read_recipe((twin / "recipe.json").read_bytes())["code"]
    change_recipe(twin, average="a", code={**code, "loss()": "ab"}, max_epochs=3)
    change_step(twin, 4, loss=in_shards(1))
    assert compare(base, twin).cause == "other code or content: code.loss()"


def test_both_without_determinism(base: Path, twin: Path, tmp_path: Path) -> None:
    change_recipe(twin, deterministic=False)
    other = Path(shutil.copytree(twin, tmp_path / "other"))
    assert compare(twin, other).cause is None
    change_step(other, 2, fingerprint=other_print)
    found = compare(twin, other)
    assert (found.recipe, found.cause) == ([], "deterministic=False, which gives up sameness")


def test_an_entry_that_is_not_known_yet(base: Path, twin: Path) -> None:
    change_recipe(twin, weather="rain")
    change_step(twin, 2, loss=in_shards(0))
    found = compare(base, twin)
    assert (found.recipe, found.cause) == (
        [("weather", "absent", "rain")], "another weather, absent in A and rain in B",
    )  # fmt: skip


def test_long_values_are_shortened_where_they_differ(base: Path, twin: Path, tmp_path: Path) -> None:
    change_recipe(twin, schedule="table([" + "0.1, " * 30 + "0.2])", optimizer="x" * 41)
    other = Path(shutil.copytree(twin, tmp_path / "other"))
    change_recipe(other, schedule="table([" + "0.1, " * 30 + "0.3])", optimizer="y" * 40)
    assert describe(compare(twin, other)).splitlines()[2:] == [
        "recipe     A                                            B",
        "optimizer  " + "x" * 40 + "...  " + "y" * 40,
        "schedule   ...1, 0.1, 0.2])                             ...1, 0.1, 0.3])",
    ]
    change_recipe(other, schedule="table([" + "0.1, " * 30 + "0.2]).shift(1)", optimizer="x" * 41)
    assert describe(compare(twin, other)).splitlines()[2:] == [
        "recipe    A              B",
        "schedule  ...0.1, 0.2])  ...0.1, 0.2]).shift(1)",
    ]


# Tensors, in files made by hand


def save(path: Path, step: int, tensors: dict[str, Any], **recipe: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(checkpoint.pack({"step": step, "recipe": recipe}, tensors)))
    return path


def pair(tmp_path: Path, a: dict[str, Any], b: dict[str, Any], **recipe: Any) -> tuple[Path, Path]:
    return save(tmp_path / "a", 7, a, **recipe), save(tmp_path / "b", 7, b, **recipe)


def test_checkpoints_that_are_the_same(tmp_path: Path) -> None:
    nan = np.array([np.nan, -np.nan, np.inf, -0.0, 1.0], np.float32)
    found = compare(*pair(tmp_path, {"model:w": nan}, {"model:w": nan.copy()}))
    assert describe(found) == "the same: all tensors after 7 steps"
    assert (found.same, found.steps, found.lengths) == (True, 0, (7, 7))


BITS = [
    ("<f4", "<u4", 0x7FC00000, 0x7FC00001), ("<f8", "<u8", 0x7FF8000000000000, 0x7FF8000000000001),
    ("<f4", "<u4", 0x7FC00000, 0xFFC00000),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "view", "one", "other"), BITS)
def test_nans_are_compared_by_their_bits(tmp_path: Path, kind: str, view: str, one: int, other: int) -> None:
    a, b = (np.array([0x3F800000, bits], view).view(kind) for bits in (one, other))
    found = compare(*pair(tmp_path, {"model:w": a}, {"model:w": b}))
    [tensor] = found.tensors
    assert (found.kind, tensor.elements, tensor.size, tensor.ulp) == ("tensors", 1, 2, None)
    assert np.isnan(tensor.largest or 0)
    assert describe(found).splitlines()[-1].split() == ["w", "7", "nan", "-", "1", "of", "2"]
    assert json.loads(to_json(found))["tensors"][0]["largest"] == "nan"


def test_the_sign_of_zero_is_a_difference(tmp_path: Path) -> None:
    a, b = ({"model:w": np.array([zero, 1], np.float32)} for zero in (0.0, -0.0))
    found = compare(*pair(tmp_path, a, b))
    assert not found.same
    assert describe(found).splitlines() == [
        "they differ after 7 steps, in 1 tensor",
        f"cause: {NEVER}",
        "",
        "tensor  after steps  largest difference  in ulp  elements",
        "w       7            0                   -       1 of 2",
    ]


@pytest.mark.parametrize(
    ("a", "b", "largest", "ulp", "elements"),
    [
        (np.float32([1, 2, 3]), np.float32([1, 2, 3.5]), 0.5, 2.0**21, 1),
        (np.float32([1, 1]), np.nextafter(np.float32([1, 1]), np.float32(2)), 2.0**-23, 1, 2),
        (np.float32([1]), np.nextafter(np.float32([1]), np.float32(0)), 2.0**-24, 0.5, 1),
        (np.float64([1, -1]), np.nextafter([1.0, -1], [2, -1]), 2.0**-52, 1, 1),
        (np.float32([1e-45]), np.float32([-1e-45]), 2.0**-148, 2, 1),
        (np.float16([1]), np.float16([2]), 1.0, 512, 1),
        (np.float64([1e308]), np.float64([-1e308]), np.inf, None, 1),
        (np.float32([1, np.inf]), np.float32([1, 2]), np.inf, None, 1),
        (np.int64([2**63 - 1, 5]), np.int64([-(2**63), 4]), 2.0**64, None, 2),
        (np.array([True, False]), np.array([True, True]), 1.0, None, 1),
        (np.array(3, np.int64), np.array(5, np.int64), 2.0, None, 1),
    ],
    ids=["float32", "one ulp", "half", "float64", "tiny", "float16", "overflow", "inf", "int64", "bool", "scalar"],
)
def test_the_largest_difference(tmp_path: Path, a: Any, b: Any, largest: float, ulp: Any, elements: int) -> None:
    [tensor] = compare(*pair(tmp_path, {"model:w": a}, {"model:w": b})).tensors
    assert (tensor.largest, tensor.ulp, tensor.elements, tensor.size) == (largest, ulp, elements, a.size)
    told = json.loads(to_json(compare(tmp_path / "a", tmp_path / "b")))["tensors"][0]
    assert (told["largest"], told["ulp"]) == ("inf" if largest == np.inf else largest, ulp)


def test_shape_type_and_presence(tmp_path: Path) -> None:
    zeros, empty = np.zeros(4, np.float32), np.zeros((0, 3), np.float32)
    a = {"model:a": zeros, "model:b": zeros, "model:c": zeros, "model:empty": empty}
    b = {"model:a": zeros.reshape(2, 2), "model:b": zeros.astype(np.float64), "model:d": zeros, "model:empty": empty}
    found = compare(*pair(tmp_path, a, b))
    assert [(t.name, t.note) for t in found.tensors] == [
        ("a", "float32 [4] in A, float32 [2, 2] in B"),
        ("b", "float32 [4] in A, float64 [4] in B"),
        ("c", "only in A"),
        ("d", "only in B"),
    ]
    assert {(t.largest, t.ulp, t.elements, t.size) for t in found.tensors} == {(None, None, 0, 0)}
    assert describe(found).splitlines() == [
        "they differ after 7 steps, in 4 tensors",
        f"cause: {NEVER}",
        "",
        "tensor  after steps  largest difference                     in ulp  elements",
        "a       7            float32 [4] in A, float32 [2, 2] in B",
        "b       7            float32 [4] in A, float64 [4] in B",
        "c       7            only in A",
        "d       7            only in B",
    ]
    assert json.loads(to_json(found))["tensors"][3] == {
        "name": "d", "step": 7, "largest": None, "ulp": None, "elements": 0, "size": 0, "note": "only in B",
    }  # fmt: skip


def test_tensors_come_in_the_order_in_which_they_begin_to_differ(base: Path, twin: Path, tmp_path: Path) -> None:
    """By the step at which it is first seen; then weights, optimizer, average; then as in the model, not by name."""
    other = Path(shutil.copytree(twin, tmp_path / "other"))
    names = {
        "model:z": 0.0,
        "model:a:0": 0.0,
        "optimizer:m:z": 0.0,
        "optimizer:m:a:0": 0.0,
        "average:z": 0.0,
        "model:q": 0.0,
    }
    changes = {
        3: {"model:q": 1e-3},
        6: {"model:q": 9.0, "model:z": 0.25, "optimizer:m:a:0": 1.0, "optimizer:m:z": 1.0, "average:z": 2.0},
        9: dict.fromkeys(names, 5.0),
    }
    parameters = {"z": [2], "a:0": [2], "q": [2]}
    for folder in (twin, other):
        (folder / "events.jsonl").write_text("")
        shutil.rmtree(folder / "checkpoints")
        change_recipe(folder, parameters=parameters)
        for step, change in changes.items():
            values = names | change if folder is other else names
            tensors = {name: np.array([0, value], np.float64) for name, value in values.items()}
            save(folder / "checkpoints" / f"step-{step:09d}.safetensors", step, tensors)
    save(twin / "checkpoints" / "step-000000004.safetensors", 4, {})  # the other one has none of this step
    found = compare(twin, other)
    assert [(t.name, t.step, t.largest) for t in found.tensors] == [
        ("q", 3, 1e-3), ("z", 6, 0.25), ("optimizer:m:z", 6, 1.0), ("optimizer:m:a:0", 6, 1.0), ("average:z", 6, 2.0),
        ("a:0", 9, 5.0),
    ]  # fmt: skip
    assert found.verdict == "they differ after 3 steps, in 6 tensors"


def test_a_long_list_of_tensors_is_cut(tmp_path: Path) -> None:
    a, b = ({f"model:w{i:04}": np.array([i + value]) for i in range(1030)} for value in (0, 1))
    found = compare(*pair(tmp_path, a, b))
    lines = describe(found).splitlines()
    assert len(found.tensors) == 1030
    assert lines[0] == "they differ after 7 steps, in 1,030 tensors"
    assert [line.split()[0] for line in lines[4:-1]] == [f"w{i:04}" for i in range(20)]
    assert lines[-1] == "and 1,010 more"
    found.tensors = found.tensors[:20]
    assert describe(found).splitlines() == lines[:-1]


def test_as_json(tmp_path: Path) -> None:
    nothing = {
        "same": False, "verdict": "", "kind": None, "first_step": None, "shards": None, "steps": 0, "lengths": (0, 0),
        "cause": None, "notes": [], "recipe": [], "tensors": [],
    }  # fmt: skip
    assert asdict(Difference()) == nothing
    assert to_json(Difference()) == json.dumps(nothing, indent=2)
    with pytest.raises(ValueError, match="JSON"):  # it has no NaN
        to_json(Difference(recipe=[("rate", float("nan"), 0.1)]))


def test_a_tensor_that_differs_though_the_log_does_not(base: Path, twin: Path) -> None:
    change_weights(twin, "dense1.bias", [0, 0, 0, 1])
    found = compare(base, twin)
    assert found.verdict == "they differ after 6 steps, in 1 tensor; the logs of 6 steps are the same"
    assert [(t.name, t.step) for t in found.tensors] == [("dense1.bias", 6)]
    assert found.cause == NEVER


def test_averaged_weights(tmp_path: Path) -> None:
    one = fit(tmp_path / "one", average=ss.swa(1))
    found = compare(one, fit(tmp_path / "other", average=ss.swa(2)))
    assert found.kind == "tensors"
    assert {t.name.partition(":")[0] for t in found.tensors} == {"average"}
    assert found.cause.startswith("another average, Average(kind='swa', start=1,") if found.cause else False
    assert compare(one, one).same


# Checkpoints


def test_a_checkpoint_against_a_run(base: Path, tmp_path: Path) -> None:
    third = checkpoint.path_of(base, 3)
    assert describe(compare(third, base)) == "the same: all tensors after 3 steps"
    other = fit(tmp_path / "other", schedule=0.2)
    found = compare(other, third)
    assert describe(found).splitlines()[:2] == [
        "they differ after 3 steps, in 4 tensors",
        "cause: another schedule, constant(0.2) in A and constant(0.1) in B",
    ]
    shutil.rmtree(other / "checkpoints")
    with pytest.raises(Invalid) as caught:
        compare(other, third)
    assert str(caught.value) == (
        f"nothing can be compared: {other} has weights after steps 6; {third} has weights after steps 3"
    )
    assert compare(checkpoint.path_of(base, 6), other).kind == "tensors"  # its last weights


def test_checkpoints_without_a_log(base: Path, twin: Path) -> None:
    (twin / "events.jsonl").write_text("")
    assert describe(compare(base, twin)) == "the same: all tensors after 6 steps"


def test_of_a_checkpoint_against_final_weights_the_weights_alone_are_compared(base: Path, twin: Path) -> None:
    shutil.rmtree(twin / "checkpoints")
    sixth = checkpoint.read(checkpoint.path_of(base, 6)).tensors
    more = {"average:dense1.bias": np.zeros(4), "optimizer:m:dense1.bias": np.zeros(4), "log:more": np.zeros(1)}
    other = save(twin.parent / "other", 6, {**sixth, **more})
    assert [t.name for t in compare(twin, other).tensors] == []


def test_checkpoints_of_different_steps(base: Path) -> None:
    one, other = checkpoint.path_of(base, 3), checkpoint.path_of(base, 6)
    with pytest.raises(Invalid) as caught:
        compare(one, other)
    assert str(caught.value) == (
        f"nothing can be compared: {one} has weights after steps 3; {other} has weights after steps 6"
    )


# Bad input


def test_runs_that_made_no_step(base: Path, twin: Path) -> None:
    first = (twin / "events.jsonl").read_text().splitlines()[0]
    shutil.rmtree(twin / "checkpoints")
    for text in ("", first + "\n", first[:30]):
        (twin / "events.jsonl").write_text(text)
        for a, b in ((base, twin), (twin, base), (twin, twin)):
            with pytest.raises(Invalid, match=f"nothing can be compared: .*{twin} has 0 steps and no weights"):
                compare(a, b)


def test_what_is_not_a_run(base: Path, twin: Path, tmp_path: Path) -> None:
    def message(path: Path) -> str:
        with pytest.raises(Invalid) as caught:
            compare(base, path)
        with pytest.raises(Invalid) as again:
            compare(path, base)
        assert str(caught.value) == str(again.value)
        assert "\n" not in str(caught.value)
        return str(caught.value).replace(str(path), "PATH")

    assert message(tmp_path / "no") == "PATH does not exist: give the folder of a run, or a checkpoint file"
    assert message(tmp_path / ("a" * 300)).startswith("PATH does not exist")
    (tmp_path / "empty").mkdir()
    missing = "cannot be read (No such file or directory)"
    assert message(tmp_path / "empty") == f"PATH is not the folder of a run: recipe.json {missing}"
    (twin / "events.jsonl").unlink()
    assert message(twin) == f"PATH is not the folder of a run: events.jsonl {missing}"
    for text in ("[1]", "{", "7"):
        (twin / "recipe.json").write_text(text)
        assert message(twin).startswith("PATH/recipe.json is damaged: ")
    (tmp_path / "file").write_text("not a checkpoint")
    assert message(tmp_path / "file").startswith("PATH is damaged, or not a checkpoint: ")


@pytest.mark.parametrize("line", ['{"event": "ste', "", "7", "[1]", '{"event": "steps"}', '{"evnt": 1}', "\x00" * 20])
def test_a_damaged_line_is_named(base: Path, twin: Path, line: str) -> None:
    lines = (twin / "events.jsonl").read_text().splitlines()
    lines[3] = line
    (twin / "events.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(Invalid) as caught:
        compare(base, twin)
    assert str(caught.value).startswith(f"{twin / 'events.jsonl'} is damaged: line 4 is not an event")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("old", "new"), [(b'"epochs": 2', b'"epochs": 3'), (b"0.1", b"0.2"), (b"steps", b"stepz")])
def test_a_line_that_was_changed_is_named(base: Path, twin: Path, old: bytes, new: bytes) -> None:
    log = (base / "events.jsonl").read_bytes()
    assert old in log
    (twin / "events.jsonl").write_bytes(log.replace(old, new, 1))
    number = log[: log.index(old)].count(b"\n") + 1
    for read in (lambda: compare(base, twin), lambda: ss.Run.load(twin)):
        with pytest.raises(
            Invalid,
            match=f"events.jsonl is damaged: line {number} is not an event, or was changed after it was written$",
        ):
            read()
    lines = log.splitlines(keepends=True)
    (twin / "events.jsonl").write_bytes(b"".join([lines[0], *lines[2:]]))
    with pytest.raises(Invalid, match="line 2 is not an event, or was changed"):  # as one is missing
        compare(base, twin)


def test_a_recipe_that_was_changed_is_noticed(base: Path, twin: Path) -> None:
    text = (twin / "recipe.json").read_text()
    (twin / "recipe.json").write_text(text.replace('"seed": 0', '"seed": 1'))
    for read in (lambda: compare(base, twin), lambda: ss.Run.load(twin)):
        with pytest.raises(Invalid, match="recipe.json is damaged: it was changed after it was written"):
            read()
    with pytest.warns(UserWarning, match="recipe.json is damaged: it was changed after it was written; that of the"):
        fit(twin)
    assert compare(base, twin).same


def test_a_log_without_seals_is_noticed(base: Path, twin: Path) -> None:
    (twin / "events.jsonl").write_bytes(re.sub(rb', "seal": "\w+"', b"", (twin / "events.jsonl").read_bytes()))
    with pytest.raises(Invalid, match="is damaged: line 1 is not an event, or was changed after it was written$"):
        compare(base, twin)


@pytest.mark.parametrize("name", ["weights.safetensors", "checkpoints/step-000000003.safetensors"])
def test_damaged_weights_are_named(base: Path, twin: Path, name: str) -> None:
    content = (twin / name).read_bytes()
    for damaged in (content[:-1] + bytes([content[-1] ^ 1]), content[:-3], b""):
        (twin / name).write_bytes(damaged)
        with pytest.raises(Invalid, match=f"{twin / name} is damaged"):
            compare(base, twin)


def test_missing_weights_are_named(base: Path, twin: Path) -> None:
    (twin / "weights.safetensors").unlink()
    with pytest.raises(Invalid, match=f"{twin / 'weights.safetensors'} is damaged: No such file"):
        compare(base, twin)


# The command


@pytest.mark.parametrize(("change", "status"), [(None, 0), ({"fingerprint": other_print}, 1)])
def test_the_command(
    base: Path,
    twin: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: Any,
    status: int,
) -> None:
    if change:
        change_step(twin, 2, **change)

    def call(*arguments: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["samestep", "diff", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.run()
        return (ended.value.code or 0, *capsys.readouterr())

    found = compare(base, twin)
    assert call(base, twin) == (status, describe(found) + "\n", "")
    code, text, _ = call("--json", base, twin)
    told = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert code == status
    assert (told["same"], told["first_step"], told["verdict"]) == (found.same, found.first_step, found.verdict)
    code, text, error = call(base, twin / "nothing")
    assert (code, text, error.count("\n")) == (2, "", 1)
