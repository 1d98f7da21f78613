"""symbols: what a library lists, found in a file that is made up, so that it does not depend on how a framework was built."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samestep.backends import symbols

NAMES = b"\0first\0second\0secondary\0"


def library(path: Path, kind: int = 2) -> Path:
    """An ELF file with three sections: nothing, symbols, and their names. Each symbol lies at ten times its place in NAMES.

    One more symbol would have a name that lies behind all sections, where no names are.
    """
    at = [NAMES.index(b"\0" + name + b"\0") + 1 for name in (b"first", b"second", b"secondary")]
    at.append(len(NAMES) + 3 * 64 + 1)
    rows = [*((i, 0, 10 * i, 0) for i in at), (at[0], 0, 999, 0)]  # of two with one name, the first counts
    table = np.array(rows, "<u4,<u4,<u8,<u8").tobytes()
    start = 64 + len(table) + len(NAMES)
    header = bytearray(64)
    struct.pack_into("<Q", header, 40, start)
    struct.pack_into("<H", header, 60, 3)
    sections = [
        (0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        (0, kind, 0, 0, 64, len(table), 2, 0, 0, 24),
        (0, 3, 0, 0, 64 + len(table), len(NAMES), 0, 0, 0, 0),
    ]
    listed = b"".join(struct.pack("<IIQQQQIIQQ", *one) for one in sections)
    path.write_bytes(bytes(header) + table + NAMES + listed + b"\0third\0")
    return path


@pytest.mark.parametrize(("name", "place"), [(b"first", 10), (b"second", 70), (b"secondary", 140)])
def test_where_a_name_lies(tmp_path: Path, name: bytes, place: int) -> None:
    assert symbols.offset(library(tmp_path / "made_up.so"), name) == place


@pytest.mark.parametrize("name", [b"third", b"sec", b"ondary", b""])
def test_a_name_that_is_not_there(tmp_path: Path, name: bytes) -> None:
    assert symbols.offset(library(tmp_path / "made_up.so"), name) is None


def test_a_library_that_lists_nothing(tmp_path: Path) -> None:
    assert symbols.offset(library(tmp_path / "made_up.so", kind=11), b"first") is None


def test_an_address_is_that_of_a_loaded_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = library(tmp_path / "made_up.so")
    assert symbols.address(file, "second") is None  # it is not loaded
    lines = [
        f"7f00-7fff r-xp 0000 08:01 1 {file}",
        f"5042-6000 r--p 0000 08:01 1 {file}",
        "1000-2000 r--p 0000 08:01 2 /lib/x.so",
    ]
    monkeypatch.setattr(Path, "read_text", lambda self: "\n".join(lines))
    assert symbols.address(file, "second") == 0x5042 + 70
    assert symbols.address(file, "third") is None
    monkeypatch.setattr(Path, "exists", lambda self: False)  # as on other systems than Linux
    assert symbols.address(file, "second") is None


def test_a_function_of_a_library(tmp_path: Path) -> None:
    core: Any = np._core if hasattr(np, "_core") else np.core
    file = Path(core._multiarray_umath.__file__)
    assert symbols.function(file, "PyInit__multiarray_umath") is not None
    assert symbols.function(file, "no_such_function") is None
    assert symbols.function(tmp_path / "no_such_library.so", "PyInit__multiarray_umath") is None
