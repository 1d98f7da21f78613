"""The fingerprint of vectors after a step, against Python's whole numbers; what it must tell apart."""

import hashlib
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from bits_reference import of_bytes

from samestep import fingerprint
from samestep.backends.torch.fingerprint import VectorFingerprint, laid_out, of_rows, on_gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("n", [0, 1, 8192, 40_007])
def test_fingerprints_against_whole_numbers_of_python(n: int, dtype: torch.dtype) -> None:
    """On the host, and as a GPU computes them."""
    vector = (torch.rand(n, generator=torch.Generator().manual_seed(n)) * 100).to(dtype)
    raw = vector.view(torch.uint8)
    total = of_bytes(raw.numpy().tobytes())
    assert int(on_gpu([laid_out(raw)], of_rows)) % (1 << 64) == total
    assert int(VectorFingerprint([vector])()) % (1 << 64) == total


def test_vectors_on_another_device_are_not_brought_to_the_host() -> None:
    """The device "meta" has no numbers, so to read them is an error."""
    for n in (5, 9000):
        there = VectorFingerprint([torch.empty(n, device="meta"), torch.empty(3, dtype=torch.int64, device="meta")])()
        assert (there.device.type, there.dtype, there.shape) == ("meta", torch.int64, (1,))


@pytest.mark.parametrize("n", [5, 2 * 1023, 40_007])
def test_a_compiler_reads_it_as_a_whole(n: int) -> None:
    """Nothing in it looks at numbers, or at tables that are made there; and a vector of bytes is one of words."""
    read = torch.compile(of_rows, backend="aot_eager", fullgraph=True, dynamic=False)
    vectors = [torch.rand(n, generator=torch.Generator().manual_seed(n)), torch.arange(3)]
    rows = [laid_out(vector.view(torch.uint8)) for vector in vectors]
    assert int(on_gpu(rows, read)) == int(VectorFingerprint(vectors)())


def test_the_numbers_of_a_fingerprint_never_change_and_are_odd() -> None:
    """Beyond 131,072 they begin again."""
    numbers = fingerprint.odd(131_072 + 3)
    raw = np.random.Philox(key=0).random_raw(131_072) | np.uint64(1)
    assert numbers[:-3].view(np.uint64).tolist() == raw.tolist()
    assert numbers[-3:].tolist() == numbers[:3].tolist()
    assert [int(number) % 1000 for number in raw[:4]] == [259, 459, 49, 557]
    assert len(set(raw.tolist())) == 131_072
    assert not (raw % 2 == 0).any()


def test_a_short_hash_of_arrays_and_a_text() -> None:
    one = np.arange(6, dtype=np.int8)
    assert (
        fingerprint.hashed(one, one[::2], text="é")
        == hashlib.sha256("é".encode() + bytes([0, 1, 2, 3, 4, 5, 0, 2, 4])).hexdigest()[:16]
    )
    assert len(fingerprint.hashed()) == 16


def test_the_fingerprint_of_a_step_tells_places_apart() -> None:
    prints = set()
    for place in (
        2 * fingerprint.COLUMNS + 3,
        3 * fingerprint.COLUMNS + 2,
        2,
        3,
        2 * fingerprint.COLUMNS,
        4 * fingerprint.COLUMNS + 2,
    ):
        vector = np.zeros(4 * fingerprint.COLUMNS + 5, np.float32)
        vector[place] = 1.0
        prints.add(int(fingerprint.of_vectors([vector])[0]))
    assert len(prints) == 6


def check_signs(dtype: str) -> None:
    """Signs are the highest bits: where a sum wraps around, they must not cancel each other."""
    signs = [[-0.0 if place in (i, j) else 0.0 for place in range(16)] for i in range(16) for j in range(i + 1)]
    assert len({int(fingerprint.of_vectors([np.array(numbers, dtype)])[0]) for numbers in signs}) == len(signs) == 136
    n = fingerprint.COLUMNS
    before, corners = np.zeros(9 * n, dtype), [2, 3, n + 2, n + 3, 5 * n + 7]
    changes: list[Any] = [list(places) for k in (1, 2, 3) for places in itertools.combinations(corners, k)]
    for change in [*changes, slice(0, 9), slice(0, 8 * n), slice(4, 9 * n), slice(n, 3 * n)]:
        after = before.copy()
        after[change] = -0.0
        assert fingerprint.of_vectors([after]) != fingerprint.of_vectors([before]), change


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_signs_that_change_show_in_the_fingerprint_of_a_step(dtype: str) -> None:
    check_signs(dtype)


def test_a_twin_with_an_even_number_of_columns_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "COLUMNS", 1024)
    with pytest.raises(AssertionError):
        check_signs("float64")
