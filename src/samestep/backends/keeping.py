"""What an optimizer of a framework keeps, for checkpoints: its state, counters, slow weights, an optimizer inside it.

Numbers, texts, arrays, and lists and dictionaries of them are stored: arrays as they are, the rest as one JSON text. Anything
else must have the content that it had when the fit began, or there is no checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from typing import Any

import numpy as np

from samestep.backends.layout import Tensors
from samestep.backends.updaters import NativeUpdater
from samestep.content import Content
from samestep.devices import cpu
from samestep.errors import Invalid, WrongType

TEXT = "attributes"  # the name of the JSON text among the arrays
PLAIN = (type(None), bool, int, float, str)


class KeepingUpdater(NativeUpdater):
    """An optimizer in Python: what it keeps is found by looking."""

    optimizer: Any

    def keep(self, root: Callable[[], Any], kind: type, named: dict[str, Any], besides: Container[Any] = ()) -> Tensors:
        """Look at all below a root, and into optimizers (`kind`), but not at `named` things, nor its attributes `besides`."""
        self._root, self._kind, self._named, self._besides = root, kind, named, besides
        self._first: dict[str, Any] = {}  # path → what was there when the fit began
        self._content: dict[str, Any] = {}  # path → the content that it had, if it cannot be stored
        return self.tensors()

    def tensors(self) -> Tensors:
        self._begins, self._found = not self._first, dict[str, Any]()
        self._seen: dict[Any, str] = {TEXT: ""}  # ids, paths and addresses in memory → paths
        for name, thing in self._named.items():
            self._shares(thing, name)
        text = json.dumps(self._told("", self._root()))
        return self._found | {TEXT: np.frombuffer(text.encode(), np.uint8)}

    def load(self, tensors: Tensors) -> None:
        try:
            self._stored, self._rebuilt = tensors, dict(self._named)  # path → what was made again
            self._restored(json.loads(tensors[TEXT].tobytes()))
        except KeyError as error:
            raise Invalid(f"the checkpoint is of another optimizer: {error} is only in one of them") from None

    def _shares(self, thing: Any, path: str) -> bool:
        """Take note of a thing; whether it is an array in the memory of one that was seen before."""
        self._seen[id(thing)] = self._seen[path] = path
        address = thing.data_ptr() if self.replica.backend.is_array(thing) and hasattr(thing, "data_ptr") else 0
        return bool(address) and self._seen.setdefault(("at", address), path) != path

    def _told(self, path: str, thing: Any) -> Any:
        """A thing as JSON: [kind, path, whether it is still the object that it was when the fit began, what is inside]."""
        if type(thing) in PLAIN:
            return thing
        if id(thing) in self._seen:
            return ["same", self._seen[id(thing)], False, None]
        while path in self._seen:
            path += "'"
        shares, prefix, backend = self._shares(thing, path), f"{path}." if path else "", self.replica.backend
        held = (self._first.setdefault(path, thing) if self._begins else self._first.get(path)) is thing
        kind, inside = type(thing).__name__, []
        if backend.is_array(thing) and (held or not shares):
            kind, self._found[path] = "array", (array := backend.get(thing))
            order = np.argsort([-stride for stride in array.strides], kind="stable").tolist()
            inside = [order, backend.device_of(thing) == self.replica.device]
        elif type(thing) in (list, tuple):
            inside = [self._told(f"{prefix}{i}", one) for i, one in enumerate(thing)]
        elif isinstance(thing, dict) and (held or type(thing) is dict):
            named = ((f"{prefix}{self._seen.get(id(key), key)}", key, one) for key, one in thing.items())
            kind, inside = "dict", [[self._told(f"{prefix}key", key), self._told(at, one)] for at, key, one in named]
        elif isinstance(thing, self._kind) and held:
            besides = self._besides if thing is self.optimizer else ()
            kept = {name: one for name, one in vars(thing).items() if name not in besides}
            kind, inside = "object", [[name, self._told(f"{prefix}{name}", one)] for name, one in kept.items()]
        else:
            content = Content(backend.content)
            content.add(path, thing)
            if not self._begins and content.parts != self._content.get(path):
                what = f"the optimizer keeps a {kind} ({path}), which updates change and a checkpoint cannot hold"
                raise WrongType(f"{what}: pass checkpoint_every=None, or another optimizer")
            kind, held, self._content[path] = "unchanged", True, content.parts
        return [kind, path, held, inside]

    def _restored(self, told: Any) -> Any:
        """The inverse of `_told`. What was the same object all the time still is, for those who refer to it."""
        if not isinstance(told, list):
            return told
        (kind, path, held, inside), backend, made = told, self.replica.backend, self._rebuilt
        if kind == "same":
            return made[path]
        new: Any = self._first[path] if held else [] if kind == "list" else {}
        made[path] = new
        if kind == "array":
            order, here = inside
            array = np.array(self._stored[path].transpose(order), order="C").transpose(np.argsort(order))
            if held:
                backend.assign(new, backend.put(array, backend.device_of(new)))
            else:
                made[path] = backend.copy(array, self.replica.device if here else cpu())
        elif kind == "list":
            new[:] = map(self._restored, inside)
        elif kind == "tuple":
            made[path] = tuple(map(self._restored, inside))
        elif kind in ("dict", "object"):
            values = {self._restored(key): self._restored(one) for key, one in inside}
            space, besides = new if kind == "dict" else vars(new), self._besides if new is self.optimizer else ()
            for name in [name for name in space if name not in values and name not in besides]:
                del space[name]
            space.update(values)
        return made[path]
