"""What a function, a model or any other object is, as hashes by name: its code and its content, not where it lies in memory.

Functions are known by their bytecode, constants and defaults, by what they close over, and by the globals that they name;
objects by their class and their state. A class or function of an installed package is known by its name and the package's
version. What cannot be looked into (a lock, an open file, a connection, code in C that belongs to no package) is listed as not
checked. A backend says what the models and arrays of its framework are (`Backend.content`).
"""

from __future__ import annotations

import argparse
import copyreg
import dis
import functools
import hashlib
import itertools
import re
import sys
import types
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

MOST = 1_000  # parts that are told one by one
WHOLE = 2**28  # bytes of an array that are all hashed; of a larger one, 1,024 rows or fewer
PLAIN = (type(None), bool, int, float, complex, str, type(...), type(NotImplemented))
IN_C = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, np.ufunc)
# What objects of these kinds are made of.
MADE_OF = {
    types.MethodType: ("__func__", "__self__"), functools.partial: ("func", "args", "keywords"), staticmethod: ("__func__",),
    classmethod: ("__func__",), property: ("fget", "fset", "fdel"), functools.cached_property: ("func",),
}  # fmt: skip
SPACES = (types.ModuleType, types.SimpleNamespace, argparse.Namespace)  # of which a function's names say what it uses
# What a class has from Python and what decides nothing: texts, places in a file, types of arguments.
BESIDES = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__", "__static_attributes__",
           "__abstractmethods__", "_abc_impl", "__parameters__", "__orig_bases__", "__dataclass_params__",
           "__dataclass_fields__", "__match_args__", "__slotnames__"}  # fmt: skip
OF_A_PROCESS = {"_original_object_hash"}  # transformers' note of Python's hash of texts, another one in every process
OURS = {*sys.stdlib_module_names, "samestep"}  # what the recipe's own entries say the version of
PACKAGES = {"site-packages", "dist-packages"}  # folders in which what pip or Debian installed lies


@dataclass(frozen=True)
class Model:
    """What a backend says of a model, or of a layer of one: each becomes a part of its own, named by its path."""

    kind: type
    state: Any  # all that decides what it computes, but the layers below it
    below: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(thing: Any, hidden: Container[str], weights: Any, below: dict[str, Any]) -> Model:
        """A layer with its attributes but the hidden ones. Hooks are kept under numbers that count those of a process."""
        state = {name: list(value.values()) if "hooks" in name and isinstance(value, dict) else value
                 for name, value in vars(thing).items() if name not in hidden}  # fmt: skip
        return Model(type(thing), [state, weights], dict(below))


def divided(attributes: dict[str, Any], layer: type | tuple[type, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """State and layers for a `Model`: also layers in lists and dictionaries, by names such as blocks.0."""
    state: dict[str, Any] = {}
    layers: dict[str, Any] = {}
    for name, value in attributes.items():
        inside = {name: value}
        if isinstance(value, (list, tuple, Mapping)) and not isinstance(value, layer):
            pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
            inside = {f"{name}.{key}": one for key, one in pairs}
        below = {key: one for key, one in inside.items() if isinstance(one, layer)}
        rest = {key: one for key, one in inside.items() if key not in below}
        layers |= below
        state[name] = [type(value), rest] if below else value
    return state, layers


class Content:
    """The parts of some objects: name → hash. Equal parts, in any process, mean equal code and content."""

    def __init__(self, known: Callable[[Any, bool], Any] = lambda thing, weights: None) -> None:
        self.parts: dict[str, str] = {}
        self.unchecked: list[str] = []
        self._known = known  # `content` of a backend
        self._digests: dict[int, bytes] = {}
        self._kept: list[Any] = []  # so that no other object gets the number of one that was seen

    def add(self, name: str, thing: Any, weights: bool = True) -> None:
        """Take in an object, with the values of its weights or without. Code that it refers to becomes a part of its own."""
        self._weights = weights
        try:
            digest = self._of(thing, name)
        except RecursionError:
            digest = self._unknown(thing, name)
        self.parts[name] = digest.hex()[:16]

    def told(self) -> dict[str, str]:
        """All parts; of a model with very many layers, one hash for them all."""
        if len(self.parts) <= MOST:
            return dict(self.parts)
        deep = {name for name in self.parts if name.split(".")[0] in self.parts and "." in name}
        whole = _hash("deep", *(f"{name} {self.parts[name]}".encode() for name in sorted(deep)))
        return {name: value for name, value in self.parts.items() if name not in deep} | {"layers": whole.hex()[:16]}

    # One object

    def _of(self, thing: Any, where: str) -> bytes:
        if type(thing) in PLAIN or isinstance(thing, (np.dtype, np.generic)):
            return _hash(type(thing).__name__, repr(thing).encode())
        if isinstance(thing, (bytes, bytearray)):
            return _hash("bytes", bytes(thing))
        if id(thing) not in self._digests:
            self._digests[id(thing)] = _hash("again", str(len(self._kept)).encode())  # while it is looked into
            self._kept.append(thing)
            self._digests[id(thing)] = self._inside(thing, where)
        return self._digests[id(thing)]

    def _inside(self, thing: Any, where: str) -> bytes:
        other = self._known(thing, self._weights)
        if isinstance(other, Model):
            return self._model(other, where)
        if other is not None:
            return self._of(other, where)
        if isinstance(thing, type):
            return self._class(thing)
        if isinstance(thing, types.FunctionType):
            return self._function(thing)
        if isinstance(thing, types.CodeType):
            return self._code(thing, thing.co_consts)
        if isinstance(thing, types.ModuleType):
            return _hash("module", _named(thing))
        if isinstance(thing, IN_C):
            return self._in_c(thing, where)
        for kind, names in MADE_OF.items():
            if isinstance(thing, kind):
                return self._all(kind.__name__, [getattr(thing, name) for name in names], where)
        if isinstance(thing, np.ndarray) and thing.dtype != object:
            about = f"{thing.dtype.str} {thing.shape}".encode()
            part = thing if thing.nbytes <= WHOLE else thing[:: -(-len(thing) // 1024)]
            return _hash("array", about, hashlib.sha256(np.ascontiguousarray(part).data).digest())
        if isinstance(thing, (set, frozenset)):
            return _hash(type(thing).__name__, *sorted(self._of(one, where) for one in thing))
        if type(thing) in (list, tuple):
            return self._all(type(thing).__name__, thing, where)
        if type(thing) is dict:
            return self._all("dict", [part for pair in thing.items() for part in pair], where)
        return self._object(thing, where)

    def _all(self, kind: str, things: Iterable[Any], where: str) -> bytes:
        return _hash(kind, *(self._of(thing, where) for thing in things))

    def _object(self, thing: Any, where: str) -> bytes:
        """Any other object: what copying it would take along."""
        try:
            registered: Any = copyreg.dispatch_table.get(type(thing))
            reduced = registered(thing) if registered else thing.__reduce_ex__(2)
        except Exception:  # it cannot be copied, and says so in its own way
            return self._unknown(thing, where)
        if isinstance(reduced, str):
            return _hash("global", reduced.encode())
        # A class, what it is made from, its state, and if it is a container what is in it.
        made, arguments, state, *inside = [*reduced, None, None, None][:5]
        if type(state) is dict:
            state = {name: value for name, value in state.items() if name not in OF_A_PROCESS}
        items = [list(items) if items is not None else None for items in inside]
        return self._all("object", [made, arguments, state, *items], where)

    def _model(self, about: Model, where: str) -> bytes:
        own = self._all("model", [about.kind, about.state, list(about.below)], where)
        for name, layer in about.below.items():
            path = f"{where}.{name}"
            self._part(path, functools.partial(self._of, layer, path))
        return own

    # Code

    def _class(self, kind: type) -> bytes:
        if _is_installed(kind.__module__):
            return _hash("class", _named(kind))

        def own() -> bytes:
            inside = {name: value for name, value in vars(kind).items() if name not in BESIDES}
            return self._all("class", [*kind.__bases__, inside], kind.__qualname__)

        return self._part(f"class {kind.__qualname__}", own)

    def _function(self, function: types.FunctionType) -> bytes:
        code, where = function.__code__, f"{function.__qualname__}()"

        def closed() -> list[bytes]:
            cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
            return [self._of(_content_of(cell), f"{where}, {name}") for name, cell in cells]

        def own() -> bytes:
            text = (None, *code.co_consts[1:]) if function.__doc__ is not None else code.co_consts
            attributes = {name: value for name, value in vars(function).items() if name != "__wrapped__"}
            parts = (function.__defaults__, function.__kwdefaults__, attributes)
            digests = [self._code(code, text), *(self._of(part, where) for part in parts), *closed()]
            digests += self._globals(function.__globals__, *_names(code), where)
            return _hash("function", *digests)

        if _is_installed(function.__module__):
            return _hash("function", _named(function), *closed())
        return self._part(where, own)

    def _part(self, name: str, own: Callable[[], bytes]) -> bytes:
        """A part with a name of its own. Whoever refers to it knows only the name, so that what was changed is told once."""
        name = re.sub(r"(?<![^ ])\S*<locals>\.", "", name)
        numbered = itertools.chain([name], (f"{name} {number}" for number in itertools.count(2)))
        name = next(one for one in numbered if one not in self.parts)
        self.parts[name] = ""
        self.parts[name] = own().hex()[:16]
        return _hash("part", name.encode())

    def _globals(self, space: dict[str, Any], used: list[str], names: list[str], where: str) -> list[bytes]:
        """What a function uses of a space: those names that it looks up there. `names` are all that it has."""
        found = []
        for name in used:
            if name in space and not (name.startswith("__") and name.endswith("__")):
                found += [name.encode(), *self._used(space[name], names, f"{where}, {name}")]
        return found

    def _used(self, value: Any, names: list[str], where: str) -> list[bytes]:
        """A global; of a module or namespace, only what a function's names can mean."""
        if not isinstance(value, SPACES):
            return [self._of(value, where)]
        if isinstance(value, types.ModuleType) and _is_installed(value.__name__):
            return [_hash("module", _named(value))]
        names = [name for name in names if vars(value).get(name) is not value]
        return self._globals(vars(value), names, names, where)

    def _code(self, code: types.CodeType, constants: tuple[Any, ...]) -> bytes:
        inner = [self._of(part, code.co_name) for part in constants]
        names = (*code.co_names, "|", *code.co_varnames, "|", *code.co_freevars, "|", *code.co_cellvars)
        about = f"{code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount} {code.co_flags} {names}"
        return _hash("code", code.co_code, about.encode(), getattr(code, "co_exceptiontable", b""), *inner)

    def _in_c(self, thing: Any, where: str) -> bytes:
        """A function written in C: known by the version of its package."""
        home = getattr(thing, "__self__", None)
        if home is not None and not isinstance(home, types.ModuleType):
            return self._all("method", [thing.__name__, home], where)
        module = getattr(thing, "__module__", None) or getattr(getattr(thing, "__objclass__", 0), "__module__", "numpy")
        if not _is_installed(module):
            return self._unknown(thing, where)
        name = getattr(thing, "__qualname__", thing.__name__)  # of a method, with its class
        return _hash("function", f"{module}.{name} {_version(module)}".encode())

    def _unknown(self, thing: Any, where: str) -> bytes:
        kind = type(thing)
        self.unchecked.append(f"{where}: {kind.__module__}.{kind.__qualname__}".replace("builtins.", ""))
        return _hash("not checked", f"{kind.__module__}.{kind.__qualname__}".encode())


def _hash(kind: str, *parts: bytes) -> bytes:
    digest = hashlib.sha256(kind.encode())
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _content_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty: what it is to hold does not exist yet
        return "empty"


def _names(code: types.CodeType) -> tuple[list[str], list[str]]:
    """The names that some code looks up as globals; and all of globals and attributes. With the functions inside it."""
    steps = dis.get_instructions(code)
    used, names = [step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")], [*code.co_names]
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            used, names = used + _names(part)[0], names + _names(part)[1]
    return list(dict.fromkeys(used)), list(dict.fromkeys(names))


@functools.cache
def _is_installed(module: str | None) -> bool:
    """Whether a module belongs to Python, to an installed package, or to samestep, and so is known by a version."""
    root = str(module).partition(".")[0]
    if root in OURS:
        return True
    found = sys.modules.get(str(module)) or sys.modules.get(root)
    return not PACKAGES.isdisjoint(Path(getattr(found, "__file__", None) or "").parts)


def _named(thing: Any) -> bytes:
    if isinstance(thing, types.ModuleType):
        return f"{thing.__name__} {_version(thing.__name__)}".encode()
    return f"{thing.__module__}.{thing.__qualname__} {_version(thing.__module__)}".encode()


@functools.cache
def _version(module: str) -> str:
    """The version of the package that a module belongs to. Python's own is recorded elsewhere."""
    root = module.partition(".")[0]
    if root in OURS:
        return ""
    version = getattr(sys.modules.get(root), "__version__", None)
    try:
        return str(version) if version else metadata.version(root)
    except metadata.PackageNotFoundError:
        return ""
