"""The run folder: written while a fit goes on, and what of a former fit can be gone on from. run.py says what is in it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from samestep.backends.times import timed_as
from samestep.errors import Invalid
from samestep.runs import checkpoint
from samestep.runs.checkpoint import Checkpoint, Tensors, Writer
from samestep.runs.log import Event, events, last_seal, mended, sealed
from samestep.runs.recipe import ACCEPT, differences, in_words, read_recipe, recipe_text
from samestep.runs.run import plain

# What comes later does not change the steps before it; what was accepted or cannot be checked is told, not compared.
IMMATERIAL = ("max_epochs", "accepted", "unchecked")
WEIGHTS = ("weights.safetensors", "average.safetensors")


class RunFolder:
    """Writes a run folder while a fit goes on; finds out what of it is there already."""

    def __init__(
        self, path: str | os.PathLike[str], recipe: dict[str, Any], resume: Any, keep: int, last: int,
        accept: Iterable[str] = (),
    ) -> None:  # fmt: skip
        self.path, self._accept = Path(path), set(accept)
        self.accepted: dict[str, str] = {}  # what was different, and accepted
        self._made = [folder for folder in [self.path, *self.path.parents] if not os.path.exists(folder)]
        self.checkpoint: Checkpoint | None = None  # to go on from
        self.log = b""  # the events that belong to it
        self._aside: dict[Path, Path] = {}  # what is damaged or in the way, and the names under which it is kept
        new: list[str] = []  # files to take back if nothing comes of it
        with self._writing(), ExitStack() as undo:
            undo.callback(self._take_back, [])
            self.path.mkdir(parents=True, exist_ok=True)
            lock = [] if os.path.exists(self.path / "lock") else ["lock"]
            self._lock = undo.enter_context(open(self.path / "lock", "a"))  # held for as long as the fit lasts
            undo.callback(self._take_back, new)  # while the lock is still held
            self._hold()
            new += lock + [name for name in ("events.jsonl", "recipe.json") if not os.path.exists(self.path / name)]
            self._find(recipe, resume, last)
            if self.checkpoint:  # the run began from those weights, whatever the model that was passed now holds
                old = self.checkpoint.about["recipe"]
                recipe["initial"], past = old["initial"], old.get("accepted", [])
                if now := [{"step": self.checkpoint.step, **self.accepted}] if self.accepted else []:
                    self.checkpoint.about["recipe"] = recipe  # from here on, it is a run of this one
                if past or now:
                    recipe["accepted"] = past + now
            self._prepare(recipe, last)
            undo.pop_all()
        self._begun = bool(self.checkpoint)
        self.writer = Writer(self.path, keep, self._sync)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = f"run folder {self.path} cannot be written to: {error.strerror or error}"
            raise Invalid(f"{why}; pass another run_dir, or None") from None

    def _hold(self) -> None:
        """Keep other runs out, for as long as the lock file is open."""
        held = False
        with suppress(BlockingIOError, FileNotFoundError):  # held, or taken away by one that had held it
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.path.samestat(os.fstat(self._lock.fileno()), os.stat(self.path / "lock"))
        if not held:
            raise Invalid(f"another run is going on in {self.path}: choose another run_dir, or wait")

    def _prepare(self, recipe: dict[str, Any], last: int) -> None:
        """Make the folder one of a run that is going on. Killed in between, it can still be resumed."""
        log, about, found = self.path / "events.jsonl", self.path / "recipe.json", self.checkpoint
        for old, kept in self._aside.items():
            if old in (log, about):  # which are there until they are replaced
                checkpoint.write(kept, [old.read_bytes()])
            else:
                os.replace(old, kept)
        for file in (self.path / checkpoint.FOLDER).glob("step-*.safetensors.tmp"):  # half-written
            file.unlink()
        if self.log and not (log.exists() and log.read_bytes().startswith(self.log)):
            checkpoint.write(log, [self.log])
        elif log.exists():
            os.truncate(log, len(self.log))
        if found and not (own := checkpoint.path_of(self.path, found.step)).exists():  # it is that of another folder
            own.parent.mkdir(exist_ok=True)
            checkpoint.write(own, checkpoint.pack({**found.about, "recipe": recipe}, found.tensors))
        checkpoint.write(about, [recipe_text(recipe)])
        if not found or found.step < last:  # the weights will be others
            for name in WEIGHTS:
                (self.path / name).unlink(missing_ok=True)
        self._digest, self._synced, self._seal = hashlib.sha256(self.log), False, last_seal(self.log)
        self._events = open(log, "ab")  # noqa: SIM115

    def _find(self, recipe: dict[str, Any], resume: Any, last: int) -> None:
        """Look for the checkpoint to go on from: the newest one that is whole."""
        there, mine, here = self.path / "recipe.json", checkpoint.paths(self.path), resume in ("auto", False)
        given = self.path if here else Path(resume)  # a checkpoint, or a run folder
        home = given if given.is_dir() else given.parent.parent
        own = home.exists() and home.samefile(self.path)
        if (there.exists() or mine) and (resume is False or not own):
            which = "a run" if here else f"another run than {home}"
            raise Invalid(f"run folder {self.path} already holds {which}: choose another, or delete it")
        home = self.path if own else home
        files = checkpoint.paths(home) if given.is_dir() else [home / given.parent.name / given.name]
        old, damage = _read(there, read_recipe, recipe)
        besides = IMMATERIAL if here else (*IMMATERIAL, "initial")
        self._check(recipe, old if here else recipe, self.path, besides)
        self._take(files, recipe, besides, last)
        if not self.checkpoint:
            told, wrong = _read(self.path / "events.jsonl", lambda log: list(events(log)), [])
            ended = f"run folder {self.path} holds a finished run without a checkpoint"
            if not here:
                raise Invalid(f"resume: {given} has no checkpoint that can be used")
            if damage or wrong or any(event["event"] == "end" for event in told):
                raise Invalid(f"{damage or wrong or ended}: choose another run_dir, or delete it")
            return
        if damage:
            self._keep(there, f"{damage}; that of the checkpoint is used", 6)
        for file in mine:
            if file > checkpoint.path_of(self.path, self.checkpoint.step) and file not in self._aside:
                self._keep(file, f"checkpoint {file} is newer than the one that the run goes on from", 6)

    def _keep(self, file: Path, why: str, level: int = 7) -> None:
        """Warn of a file that is damaged or in the way, and keep it; with a checkpoint, also what may tell of later steps."""
        if file.exists() and self.path in file.parents:
            later = [self.path / name for name in ("events.jsonl", *WEIGHTS)]
            for old in [file, *filter(os.path.exists, later)] if file.parent != self.path else [file]:
                names = (old.with_name(f"{old.name}.aside{number or ''}") for number in count())
                self._aside[old] = next(name for name in names if not os.path.lexists(name))
            why += f"; it is kept as {self._aside[file].name}"
        warnings.warn(why, stacklevel=level)

    def _check(self, recipe: dict[str, Any], old: dict[str, Any], where: Path, besides: Iterable[str]) -> None:
        found = differences(recipe, old, besides)
        kinds = {name: kind for kind, names in ACCEPT.items() for name in names}
        of = {name: kinds.get(name.partition(".")[0], "") for name in found}
        if set(of.values()) <= self._accept:
            self.accepted |= found
            return
        hint = ""
        if next(iter(found)) == "initial":
            hint = "; the model starts from other weights: seed it before it is made"
        elif "" not in of.values():
            names = ",".join(sorted(set(of.values())))
            hint = f", or go on nevertheless with accept={names!r} (--accept {names}), which the run will remember"
            if not recipe["portable"] and any(name.startswith("numerics.cpu.") for name in found):
                hint += "; runs with portable=True (--portable) keep their bits on every CPU"
        what = f"{where} holds a run of another recipe ({in_words(found)})"
        raise Invalid(f"{what}: choose another run_dir, or delete it{hint}")

    def _take(self, files: list[Path], recipe: dict[str, Any], besides: Iterable[str], last: int) -> None:
        for file in reversed(files):
            path = file.parent.parent / "events.jsonl"
            try:
                found = checkpoint.read(file)
                content = path.read_bytes() if path.exists() else b""
                log = content[: found.about["events"]]
                known = [f"{value:016x}" for value in found.tensors["log:fingerprints"]]
                damaged = hashlib.sha256(log).hexdigest() != found.about["events_sha256"]
                if damaged:
                    log = mended(content, known, found.about["history"])
                prints = [p for event in events(log) if "first" in event for p in event["fingerprint"]]
                if len(prints) != found.step or prints != known:
                    raise Invalid(f"{path} does not go with it")
            except (OSError, ValueError, KeyError, TypeError) as error:
                instead = "the one before it is" if file != files[0] else "and there is none before it"
                self._keep(file, f"checkpoint {file} cannot be used, {instead}: {error}")
                continue
            self._check(recipe, found.about["recipe"], path.parent, besides)
            if found.step > last:
                ends = f"max_epochs={recipe['max_epochs']} ends at step {last}: raise max_epochs, or choose another run_dir"
                raise Invalid(f"{path.parent} holds this run up to step {found.step}, and {ends}")
            if damaged:
                lost = ", ".join(f"{e['first']} to {e['last']}" for e in events(log) if e["event"] == "lost") or "none"
                self._keep(path, f"{path} is damaged or missing; steps whose losses and rates are lost: {lost}")
            self.checkpoint, self.log = found, log
            return

    def __call__(self, event: Event) -> None:
        line, self._seal = sealed(event, self._seal)
        with self._writing():
            self._events.write(line)
            self._digest.update(line)
            if event["event"] != "start":
                self._begun = True
                self._events.flush()

    def save(self, about: dict[str, Any], tensors: Tensors) -> None:
        """Have a checkpoint written, of which the log up to now is a part."""
        with self._writing():
            self._events.flush()
        log = {"events": self._events.tell(), "events_sha256": self._digest.hexdigest()}
        self.writer.submit({**about, **log}, tensors)

    def _sync(self) -> None:
        os.fsync(self._events.fileno())
        if not self._synced:  # the names of the log and of the folder of checkpoints
            checkpoint.sync_folder(self.path)
            self._synced = True

    @timed_as("checkpoints")
    def weights(self, tensors: Tensors, name: str = "weights.safetensors") -> None:
        with self._writing():
            checkpoint.write(self.path / name, [plain(tensors)])

    def close(self, failed: bool) -> None:
        """End the run folder. A fit that failed before anything was learned from it leaves nothing behind."""
        self.writer.close()
        with suppress(OSError):  # a full disk has been told of already
            self._events.close()
        if failed and not self._begun:
            self._take_back(["events.jsonl", "recipe.json", "lock"])
        self._lock.close()

    def _take_back(self, files: Iterable[str]) -> None:
        for name in files:
            with suppress(OSError):
                (self.path / name).unlink()
        for folder in self._made:
            with suppress(OSError):  # not made, or not empty
                folder.rmdir()


def _read(path: Path, reader: Callable[[bytes], Any], otherwise: Any) -> tuple[Any, str]:
    """What a file says, and what is wrong with it; something else if it is not there, or damaged."""
    try:
        return reader(path.read_bytes()) if path.exists() else otherwise, ""
    except ValueError as error:
        return otherwise, f"{path} is damaged: {error}"
