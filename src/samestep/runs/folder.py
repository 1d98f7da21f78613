"""The run folder: written while a fit goes on, and what of a former fit can be gone on from. run.py says what is in it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from samestep.errors import Invalid
from samestep.runs import checkpoint
from samestep.runs.checkpoint import Checkpoint, Tensors, Writer
from samestep.runs.log import Event, chain, events, last_seal, sealed
from samestep.runs.recipe import ACCEPT, differences, in_words, read_recipe, recipe_text
from samestep.runs.run import plain

# What comes later does not change the steps before it; what was accepted or cannot be checked is told, not compared.
IMMATERIAL = ("max_epochs", "accepted", "unchecked")


class RunFolder:
    """Writes a run folder while a fit goes on; finds out what of it is there already."""

    def __init__(
        self, path: str | os.PathLike[str], recipe: dict[str, Any], resume: Any = "auto", keep: int = 3, last: int = 0,
        accept: Iterable[str] = (),
    ) -> None:  # fmt: skip
        self.path, self._accept = Path(path), set(accept)
        self.accepted: dict[str, str] = {}  # what was different, and accepted
        self._made = [folder for folder in [self.path, *self.path.parents] if not os.path.exists(folder)]
        self.checkpoint: Checkpoint | None = None  # to go on from
        self.log = b""  # the events that belong to it
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
        self._begun = self.checkpoint is not None
        self.writer = Writer(self.path, keep, self._sync)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Invalid(
                f"run folder {self.path} cannot be written to: {error.strerror or error}; pass another run_dir, or None"
            ) from error

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
        for file in checkpoint.paths(self.path):  # damaged, or about to be made again
            if not found or file > checkpoint.path_of(self.path, found.step):
                file.unlink()
        for file in (self.path / checkpoint.FOLDER).glob("step-*.safetensors.tmp"):  # half-written
            file.unlink()
        if self.log and not (log.exists() and log.read_bytes().startswith(self.log)):
            checkpoint.write(log, [self.log])
        elif log.exists():
            os.truncate(log, len(self.log))
        if found and not (own := checkpoint.path_of(self.path, found.step)).exists():  # it is that of another folder
            own.parent.mkdir(exist_ok=True)
            checkpoint.write(own, checkpoint.pack({**found.about, "recipe": recipe}, found.tensors))
        text = recipe_text(recipe)
        if not about.exists() or about.read_bytes() != text:
            checkpoint.write(about, [text])
        if not found or found.step < last:  # the weights will be others
            for old in ("weights.safetensors", "average.safetensors"):
                (self.path / old).unlink(missing_ok=True)
        self._digest, self._synced, self._seal = hashlib.sha256(self.log), False, last_seal(self.log)
        self._events = open(log, "ab")  # noqa: SIM115

    def _find(self, recipe: dict[str, Any], resume: Any, last: int) -> None:
        """Look for the checkpoint to go on from: the newest one that is whole."""
        there = self.path / "recipe.json"
        if resume not in ("auto", False):  # a checkpoint, or a run folder
            given = Path(resume)
            files = checkpoint.paths(given) if given.is_dir() else [given]
            home = given if given.is_dir() else given.parent.parent
            if there.exists() and not (home.exists() and home.samefile(self.path)):
                raise Invalid(
                    f"run folder {self.path} already holds another run than {home}: choose another, or delete it"
                )
            self._take(files, recipe, (*IMMATERIAL, "initial"), last)
            if not self.checkpoint:
                raise Invalid(f"resume: {given} has no checkpoint that can be used")
            return
        files = checkpoint.paths(self.path)
        if not there.exists() and not files:
            return
        if resume is False:
            raise Invalid(f"run folder {self.path} already holds a run: choose another, or delete it")
        if there.exists():
            try:
                old = read_recipe(there.read_bytes())
            except (ValueError, TypeError) as error:
                raise Invalid(f"{there} is damaged: {error}; choose another run_dir, or delete it") from error
            self._check(recipe, old, self.path, IMMATERIAL)
        self._take(files, recipe, IMMATERIAL, last)
        if not self.checkpoint and (self.path / "weights.safetensors").exists() and self._ended():
            raise Invalid(
                f"run folder {self.path} holds a finished run without a checkpoint: choose another, or delete it"
            )

    def _ended(self) -> bool:
        """Whether the log comes to an end; if not, the run was killed just after its weights were written."""
        log = self.path / "events.jsonl"
        try:
            return log.exists() and any(event["event"] == "end" for event in events(log.read_bytes()))
        except ValueError as error:
            raise Invalid(f"{log} is damaged: {error}; choose another run_dir, or delete it") from error

    def _check(self, recipe: dict[str, Any], old: dict[str, Any], where: Path, besides: Iterable[str]) -> None:
        found = differences(recipe, old, besides)
        kinds = {name: kind for kind, names in ACCEPT.items() for name in names}
        of = {name: kinds.get(name.partition(".")[0], "") for name in found}
        if not found or set(of.values()) <= self._accept:
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
        raise Invalid(
            f"{where} holds a run of another recipe ({in_words(found)}): choose another run_dir, or delete it{hint}"
        )

    def _take(self, files: list[Path], recipe: dict[str, Any], besides: Iterable[str], last: int) -> None:
        for file in reversed(files):
            home = file.parent.parent
            try:
                found = checkpoint.read(file)
                log = (home / "events.jsonl").read_bytes()[: found.about["events"]]
                if hashlib.sha256(log).hexdigest() != found.about["events_sha256"]:
                    raise Invalid(f"{home / 'events.jsonl'} does not go with it")
                prints = [p for event in events(log) if event["event"] == "steps" for p in event["fingerprint"]]
                if len(prints) != found.step or chain(prints) != found.about["chain"]:
                    raise Invalid(f"the fingerprints in {home / 'events.jsonl'} are not its own")
            except (OSError, ValueError, KeyError, TypeError) as error:
                instead = "the one before it is" if file != files[0] else "and there is none before it"
                warnings.warn(f"checkpoint {file} cannot be used, {instead}: {error}", stacklevel=6)
                continue
            self._check(recipe, found.about["recipe"], home, besides)
            if found.step > last:
                raise Invalid(
                    f"{home} holds this run up to step {found.step}, and max_epochs={recipe['max_epochs']} "
                    f"ends at step {last}: raise max_epochs, or choose another run_dir"
                )
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
