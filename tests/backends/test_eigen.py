"""eigen: the sizes of caches are asked for and written, in memory that is made up."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from samestep.backends import eigen
from samestep.errors import Invalid

FILE = Path("made_up.so")


@pytest.fixture(autouse=True)
def _asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eigen, "_fixed", set())
    eigen.caches.cache_clear()


@ctypes.CFUNCTYPE(None, *[ctypes.POINTER(ctypes.c_int)] * 3)
def query(first: Any, second: Any, third: Any) -> None:
    first[0], second[0], third[0] = 11, 22, 33


def asked(found: Any, place: int | None, monkeypatch: pytest.MonkeyPatch) -> list[int] | None:
    eigen.caches.cache_clear()
    monkeypatch.setattr(eigen, "function", lambda library, name: found)
    monkeypatch.setattr(eigen, "address", lambda library, name: place)
    return eigen.caches(FILE)


def test_the_cpus_sizes_are_asked_for_by_a_function_or_at_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    place = ctypes.cast(query, ctypes.c_void_p).value

    def by_name(first: Any, second: Any, third: Any) -> None:
        query(*(ctypes.cast(one, ctypes.POINTER(ctypes.c_int)) for one in (first, second, third)))

    assert asked(by_name, None, monkeypatch) == [11, 22, 33]
    assert asked(None, place, monkeypatch) == [11, 22, 33]
    assert asked(None, None, monkeypatch) is None


def test_portable_runs_have_these_sizes_and_eigen_asks_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, known = (ctypes.c_long * 4)(1, 2, 3, 4), ctypes.c_bool(False)
    there = {f"_Z{eigen.SIZES}": ctypes.addressof(sizes), f"_ZGV{eigen.SIZES}": ctypes.addressof(known)}
    monkeypatch.setattr(eigen, "address", lambda library, name: there[name])
    assert eigen.has_fixed(FILE) is False
    eigen.fix_caches(FILE, "X")
    assert list(sizes) == [32_768, 1_048_576, 33_554_432, 4]
    assert known.value is True
    assert (eigen.has_fixed(FILE), eigen.has_fixed(Path("other.so"))) == (True, False)
    sizes[0] = 7
    eigen.fix_caches(FILE, "X")  # once is enough
    assert sizes[0] == 7


@pytest.mark.parametrize("hidden", ["_Z", "_ZGV"])
def test_a_build_that_hides_the_sizes_is_refused(hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (ctypes.c_long * 3)(1, 2, 3)
    there = {f"{kind}{eigen.SIZES}": ctypes.addressof(sizes) for kind in ("_Z", "_ZGV") if kind != hidden}
    monkeypatch.setattr(eigen, "address", lambda library, name: there.get(name))
    with pytest.raises(Invalid) as error:
        eigen.fix_caches(FILE, "Framework 1.0")
    assert str(error.value) == (
        "portable: Framework 1.0 sums in an order that depends on the CPU's caches, and this build does not say where it "
        "keeps their sizes"
    )
    assert (list(sizes), eigen.has_fixed(FILE)) == ([1, 2, 3], False)
