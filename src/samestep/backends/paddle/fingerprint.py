"""The fingerprint of Paddle's vectors after a step, by NumPy in their own memory, which is quicker than Paddle."""

from __future__ import annotations

from collections.abc import Sequence

from samestep.backends.layout import Numbers
from samestep.backends.paddle.flat import Vector, numpy_view
from samestep.fingerprint import Fingerprint


class VectorFingerprint:
    """The fingerprint of vectors that are written to: one number of 64 bits for all of them."""

    def __init__(self, vectors: Sequence[Vector]) -> None:
        self._vectors, self._addresses = list(vectors), list[int]()
        self._fingerprint = Fingerprint([])

    def __call__(self) -> Numbers:
        addresses = [vector.data_ptr() for vector in self._vectors]
        if addresses != self._addresses:  # the first time, and when an operation has moved a vector
            self._addresses, self._fingerprint = addresses, Fingerprint([numpy_view(v) for v in self._vectors])
        return self._fingerprint()
