"""Where two runs differ: the first step, the shard if it can be told, the tensors, and why. The engine of `samestep diff`.

"At step 17" is the update after 17 updates: its losses are taken before it, its fingerprint after it. Equal means equal
bits: -0.0 is not 0.0, and a NaN is equal to the same NaN only. Runs of unequal length are not the same, as with files.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.errors import Invalid
from samestep.runs import checkpoint
from samestep.runs.checkpoint import Tensors
from samestep.runs.recipe import flat, shown
from samestep.runs.run import read_folder, read_weights
from samestep.schedules.rates import as_written

SHOWN, WIDTH = 20, 40  # tensors in the table; characters of a recipe's value
ABSENT = "absent"  # stands for the value that one of the recipes does not have

CAUSES = {  # where recipes differ in several things, the first that can explain what is seen is the cause
    "shards": "another number of shards, {a} in A and {b} in B, so other noise, and sums in another order",
    "seed": "another seed, {a} in A and {b} in B, so another order of examples and other noise",
    "batch_size": "another batch size, {a} in A and {b} in B",
    "train": "other training data: {names}",
    "parameters": "another model: {names}",
    "initial": "other starting weights: the model was drawn from another seed, or changed before the fit",
    "samestep": "another samestep, {a} in A and {b} in B",
    "framework": "another framework, {a} in A and {b} in B: they agree to rounding only",
    "version": "another version of the framework, {a} in A and {b} in B",
    "device": "another kind of device, {a} in A and {b} in B: they agree to rounding only",
    "portable": "portable={a} in A and {b} in B, so other kernels",
    "schedule": "another schedule, {a} in A and {b} in B",
    "test": "other test data, which the schedule follows: {names}",
    "code": "other code or content: {names}",
    "numerics": "other numerics: {names}",
    "accepted": "a resume that accepted a change of the recipe: {names}",
}
ONLY = {  # all that can explain a first difference of this kind
    "model": {"parameters"}, "initial": {"seed", "initial"}, "shards": {"shards"}, "examples": {"batch_size", "train"},
    "rate": {"schedule", "optimizer", "test", "samestep", "code", "accepted"},
}  # fmt: skip
NEVER = {"max_epochs", "schedule", "test", "deterministic", "unchecked"}  # cannot explain one of any other kind
LATE = {"optimizer", "gradient_clip_val", "average"}  # explain nothing that comes before the update


@dataclass(frozen=True)
class Tensor:
    """A tensor that differs: where this was first seen, and by how much it differs there."""

    name: str
    step: int  # updates made
    largest: float | None = None  # absolute difference; NaN if there is a NaN
    ulp: float | None = None  # largest difference in units of the last place of the larger number
    elements: int = 0  # that differ
    size: int = 0
    note: str = ""  # in place of the numbers: only in one, or of another shape or type


@dataclass
class Difference:
    """What `compare` found; `kind` is what differs first, None if nothing does."""

    same: bool = False
    verdict: str = ""
    kind: str | None = None  # model, initial, shards, examples, loss, rate, update, evaluation, tensors or length
    first_step: int | None = None  # at which they differ; if it is in an evaluation, before which
    shards: list[int] | None = None  # whose losses differ there; None if that cannot be told
    steps: int = 0  # compared
    lengths: tuple[int, int] = (0, 0)  # updates made
    cause: str | None = None
    notes: list[str] = field(default_factory=list)
    recipe: list[tuple[str, Any, Any]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)


@dataclass
class Side:
    """A run folder; or a checkpoint file, as a run that kept no log."""

    path: Path
    recipe: dict[str, Any]
    length: int = 0  # updates made
    steps: dict[int, tuple[Any, ...]] = field(default_factory=dict)  # examples, rate, losses, hits, fingerprint
    tests: dict[int, tuple[Any, ...]] = field(default_factory=dict)  # loss and accuracy, by updates made
    end: str | None = None  # fingerprint of the final weights
    average: str | None = None  # and of the averaged ones
    files: dict[tuple[int, str], Path] = field(default_factory=dict)  # by updates made, and "checkpoint" or "final"


def compare(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Difference:
    """Compare two runs, each given by its folder or by a checkpoint file."""
    left, right = _open(Path(a)), _open(Path(b))
    both = left.steps.keys() & right.steps.keys()
    at = sorted({step for step, _ in left.files} & {step for step, _ in right.files})
    if not both and not at:
        raise Invalid(f"nothing can be compared: {_has(left)}; {_has(right)}")
    found = Difference(steps=len(both), lengths=(left.length, right.length))
    one, other = flat(left.recipe), flat(right.recipe)
    pairs = [(name, one.get(name, ABSENT), other.get(name, ABSENT)) for name in one | other]
    found.recipe = [pair for pair in pairs if repr(pair[1]) != repr(pair[2])]
    changed = list(dict.fromkeys(name.partition(".")[0] for name, _, _ in found.recipe))
    found.tensors = _compare_tensors(left, right, at)
    if first := _first(left, right, changed):
        found.kind, found.first_step, found.verdict, found.shards = first
    else:
        found.kind, found.verdict = _conclude(found, left, right, at)
    found.same = found.kind is None
    if found.kind not in (None, "length"):
        found.cause = _cause(found, left.recipe, right.recipe, changed)
    for name, side in (("A", left), ("B", right)):
        if side.steps and (side.end is None or side.length < max(found.lengths)):
            unfinished = "" if side.end else "is not finished: it "
            found.notes.append(f"{name} {unfinished}ends after {counted(side.length, 'step')}")
        if lost := sum(row[0] is None for row in side.steps.values()):
            found.notes.append(f"the log of {name} was damaged: {counted(lost, 'step')} left only a fingerprint")
    if not at:
        found.notes.append("no tensors are compared: after no step do both have a checkpoint or final weights")
    return found


def _first(left: Side, right: Side, changed: list[str]) -> tuple[str, int, str, list[int] | None] | None:
    """The first difference in the logs: its kind, step, in words, and in which shards."""
    both, tests = left.steps.keys() & right.steps.keys(), left.tests.keys() & right.tests.keys()
    for step in sorted(both | tests):
        if step in tests and "test" not in changed and repr(left.tests[step]) != repr(right.tests[step]):
            losses = f"loss {left.tests[step][0]} in A, {right.tests[step][0]} in B"
            return "evaluation", step, f"they differ first in the test after {counted(step, 'step')}: {losses}", None
        if step in both and (different := _compare_step(left.steps[step], right.steps[step])):
            kind, words, shards = different
            if step == 0 and "framework" not in changed:  # frameworks lay out the same weights in different ways
                if "parameters" in changed:
                    return "model", 0, "they differ from the start: they are of two models", None
                if "initial" in changed:
                    return "initial", 0, "they differ from the start: in their starting weights", None
            return kind, step, f"they differ first at step {step:,}{words}", shards
    return None


def _compare_step(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[str, str, list[int] | None] | None:
    """What differs in a step: its kind, in words, and in which shards. By repr: -0.0 is not 0.0."""
    if repr(a) == repr(b):
        return None
    examples, rates, losses, hits, prints = zip(a, b, strict=True)
    if None in examples:  # of one of them only the fingerprint is known
        return ("update", ", in what cannot be told: one log of it is lost", None) if prints[0] != prints[1] else None
    if examples[0] != examples[1]:
        return "examples", ": it has {:,} examples in A and {:,} in B".format(*examples), None
    alike = len(losses[0]) == len(losses[1])
    if not alike and prints[0] != prints[1]:
        return "shards", f", in which shard cannot be told: A has {len(losses[0])} and B {len(losses[1])}", None
    numbers = zip(*losses, *(hits if None not in hits else losses), strict=True) if alike else ()
    shards = [shard for shard, (x, y, m, n) in enumerate(numbers) if repr((x, m)) != repr((y, n))]
    if shards:
        *most, last = map(str, shards)
        words = f"shards {', '.join(most)} and {last}" if most else f"shard {last}"
        every = most and len(shards) == min(len(losses[0]), examples[0])  # the rest of them are empty
        return "loss", f", in all {len(shards)} shards" if every else f", in {words}", shards
    if repr(rates[0]) != repr(rates[1]):
        return "rate", ": the learning rate is {!r} in A and {!r} in B".format(*rates), None
    words = ": the forward pass agrees in every shard, the gradient or the update does not"
    return ("update", words, None) if prints[0] != prints[1] else None


def _compare_tensors(left: Side, right: Side, at: list[int]) -> list[Tensor]:
    """The tensors that differ: by the number of steps after which this is first seen, then in the order of the model."""
    seen: dict[str, Tensor] = {}
    for step in at:
        kinds = [kind for kind in ("checkpoint", "final") if (step, kind) in left.files and (step, kind) in right.files]
        for kind in kinds or [""]:
            a, b = _tensors(left, step, kind), _tensors(right, step, kind)
            for name in (a | b).keys() - seen.keys():
                if different := _compare_tensor(name.removeprefix("model:"), step, a.get(name), b.get(name)):
                    seen[name] = different
    names = list(left.recipe.get("parameters", {}) | right.recipe.get("parameters", {}))

    def place(name: str) -> tuple[Any, ...]:
        group, _, rest = name.partition(":")
        slot, _, own = rest.partition(":") if group == "optimizer" else ("", "", rest)
        order = names.index(own) if own in names else len(names)
        return seen[name].step, ("model", "optimizer", "average").index(group), slot, order, own

    return [seen[name] for name in sorted(seen, key=place)]


def _tensors(side: Side, step: int, kind: str) -> Tensors:
    """The tensors that a side has after a step. Without a kind: the weights alone, from whichever file there is."""
    if kind == "checkpoint" or (step, "final") not in side.files:
        tensors = checkpoint.read(side.files[step, "checkpoint"]).tensors
    else:
        weights, average = read_weights(side.path, side.end or "", side.average)
        tensors = {f"model:{name}": tensor for name, tensor in weights.items()}
        tensors |= {f"average:{name}": tensor for name, tensor in (average or {}).items()}
    return {name: tensor for name, tensor in tensors.items() if name[:4] != "log:" and (kind or name[:6] == "model:")}


def _compare_tensor(name: str, step: int, a: NDArray[Any] | None, b: NDArray[Any] | None) -> Tensor | None:
    if a is None or b is None:
        return Tensor(name, step, note=f"only in {'B' if a is None else 'A'}")
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return Tensor(name, step, note=f"{a.dtype} {list(a.shape)} in A, {b.dtype} {list(b.shape)} in B")
    x, y = a.ravel(), b.ravel()
    differ = (x.view(np.uint8) != y.view(np.uint8)).reshape(x.size, x.itemsize).any(axis=1)
    if not differ.any():
        return None
    x, y, ulp = x[differ], y[differ], math.nan
    if x.dtype.kind == "f":
        with np.errstate(over="ignore", invalid="ignore"):
            gaps = np.abs(x.astype(np.float64) - y.astype(np.float64))
            largest, ulp = float(gaps.max()), float((gaps / np.spacing(np.maximum(np.abs(x), np.abs(y)))).max())
    else:  # Python's whole numbers do not overflow
        largest = float(max(abs(int(p) - int(q)) for p, q in zip(x.tolist(), y.tolist(), strict=True)))
    return Tensor(name, step, largest, ulp if math.isfinite(ulp) else None, len(x), a.size)


def _conclude(found: Difference, left: Side, right: Side, at: list[int]) -> tuple[str | None, str]:
    """Kind and verdict where the logs, as far as there are any, are the same."""
    steps = counted(found.steps, "step")
    if found.tensors:
        first, many = counted(found.tensors[0].step, "step"), counted(len(found.tensors), "tensor")
        logs = f"; the logs of {steps} are the same" if found.steps else ""
        return "tensors", f"they differ after {first}, in {many}{logs}"
    if not found.steps:
        return None, f"the same: all tensors after {counted(at[-1], 'step')}"
    last = max(left.steps.keys() & right.steps.keys())
    steps += f", fingerprint {left.end if left.end and left.end == right.end else left.steps[last][-1]}"
    if left.length == right.length:
        return None, f"the same: {steps}"
    return "length", f"the same as far as both go: {steps}"


def _cause(found: Difference, left: dict[str, Any], right: dict[str, Any], changed: list[str]) -> str:
    ranks: dict[str, float] = {key: rank for rank, key in enumerate(CAUSES)}
    late = LATE if found.kind not in ("update", "tensors") else set()
    never = NEVER if found.steps else NEVER - {"schedule"}  # of checkpoints the rates are not known
    # Frameworks lay out the same weights in different ways; and where the first step agreed, so did what it began with.
    other = {"parameters", "initial"} if "framework" in changed or found.first_step else set()
    for key in sorted(changed, key=lambda key: ranks.get(key, ranks["code"] - 0.5)):
        if key in ONLY.get(found.kind or "", set(changed) - never - late - other):
            names = [name for name, _, _ in found.recipe if name.partition(".")[0] == key]
            listed = ", ".join(names[:3] + ["..."] * (len(names) > 3))
            words = CAUSES.get(key, f"another {key}, {{a}} in A and {{b}} in B")
            return words.format(a=left.get(key, ABSENT), b=right.get(key, ABSENT), names=listed)
    if False in (left.get("deterministic"), right.get("deterministic")):
        return "deterministic=False, which gives up sameness"
    known = "nothing in which the recipes differ explains this" if changed else "the recipes are the same"
    if found.kind == "rate":
        return f"{known}: the schedule must be a function of more than t"
    unknown = sorted({*left.get("unchecked", ()), *right.get("unchecked", ())})
    listed = f"what the recipe lists as not checked ({'; '.join(unknown)}), " * bool(unknown)
    return (
        f"{known}, so this should never happen: look for {listed}a data source that gives other examples each time, code "
        "that looks at something else than its arguments, or a device that computes wrongly"
    )


def _has(side: Side) -> str:
    steps = ", ".join(str(step) for step in sorted({step for step, _ in side.files}))
    return f"{side.path} has {f'weights after steps {steps}' if steps else f'{side.length} steps and no weights'}"


def _open(path: Path) -> Side:
    if not os.path.exists(path):
        raise Invalid(f"{path} does not exist: give the folder of a run, or a checkpoint file")
    if not os.path.isdir(path):
        one = checkpoint.read(path)
        return Side(path, one.about["recipe"], one.step, files={(one.step, "checkpoint"): path})
    recipe, log = read_folder(path)
    side = Side(path, recipe)
    for event in log:
        if event["event"] == "steps":
            hits = event["hits"] or [None] * len(event["loss"])
            kind = "float32" if recipe.get("precision") == "float32" else "float64"
            rates = [lr if lr is None else as_written(lr, kind) for lr in event["lr"]]  # older logs have more digits
            rows = zip(event["examples"], rates, event["loss"], hits, event["fingerprint"], strict=True)
            side.steps |= enumerate(rows, event["first"])
        elif event["event"] == "lost":
            side.steps |= enumerate(((None, None, [], None, p) for p in event["fingerprint"]), event["first"])
        elif event["event"] == "epoch":
            side.tests[event["step"]] = event["test_loss"], event["test_accuracy"]
        elif event["event"] == "end":
            side.end, side.average = event["fingerprint"], event.get("average")
    side.length = max(side.steps, default=-1) + 1
    for file in checkpoint.paths(path):
        side.files[int(file.stem.removeprefix("step-")), "checkpoint"] = file
    if side.end:  # of a run that was resumed and has not ended again, weights may be there that are no longer its last
        side.files[side.length, "final"] = path / "weights.safetensors"
    return side


def counted(n: int, thing: str) -> str:
    return f"{n:,} {thing}{'' if n == 1 else 's'}"


def describe(found: Difference) -> str:
    """What was found, in words and two tables: the recipes' differences, and the tensors'."""
    lines = [found.verdict, *([f"cause: {found.cause}"] if found.cause else []), *found.notes]
    if found.recipe:
        values = [(name, *shown(str(a), str(b), WIDTH)) for name, a, b in found.recipe]
        lines += ["", *_table([("recipe", "A", "B"), *values])]
    if found.tensors:
        rows = [
            (t.name, f"{t.step:,}", t.note) if t.note else
            (t.name, f"{t.step:,}", f"{t.largest:.3g}", f"{t.ulp:.3g}" if t.ulp else "-", f"{t.elements:,} of {t.size:,}")
            for t in found.tensors[:SHOWN]
        ]  # fmt: skip
        lines += ["", *_table([("tensor", "after steps", "largest difference", "in ulp", "elements"), *rows])]
        lines += [f"and {len(found.tensors) - SHOWN:,} more"] if len(found.tensors) > SHOWN else []
    return "\n".join(lines)


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]


def to_json(found: Difference) -> str:
    about = asdict(found)
    for tensor in about["tensors"]:
        if not math.isfinite(tensor["largest"] or 0):
            tensor["largest"] = str(tensor["largest"])  # JSON has no NaN
    return json.dumps(about, indent=2, allow_nan=False)
