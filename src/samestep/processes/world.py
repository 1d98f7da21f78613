"""The processes of a run, and how numbers get from one to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class World(Protocol):
    """The processes of a run, and how numbers get from one to another."""

    rank: int
    size: int

    def swap(self, sends: Sequence[tuple[int, Any]], receives: Any) -> tuple[Any, Any]:
        """Begin to send vectors to processes, and to receive vectors into memory from processes.

        Returns what leaves and what arrives, each to be waited for.
        """

    def expect(self, receives: Sequence[tuple[int, Any]]) -> Any:
        """Say already what a later swap will receive, where that helps: what this returns is then given to that swap."""

    def wait(self, works: Any) -> None:
        """Wait for what a swap began; ProcessFailed names the process that does not answer."""

    def empty(self, size: int, like: Any) -> Any:
        """Memory for so many numbers, where `swap` can reach it."""

    def bring(self, vector: Any) -> Any:
        """A vector, brought to where `swap` can reach it."""

    def collect(self, content: bytes) -> list[bytes]:
        """What each process has, on every process. This waits."""

    def broadcast(self, content: bytes | None) -> bytes:
        """What process 0 has, on every process. This waits."""

    def vote(self, stop: bool) -> Any:
        """Begin to ask whether anybody wants to stop; `agreed` waits for the answer, which is the same for all."""

    def agreed(self, vote: Any) -> bool: ...
    def fail(self, error: BaseException) -> None:
        """Tell the others why this process ends."""


class Alone:
    """A world of one process, where nothing has to be moved."""

    rank, size = 0, 1

    def swap(self, sends: Sequence[tuple[int, Any]], receives: Any) -> tuple[Any, Any]:
        assert not [*sends, *receives], "there is nobody else"
        return None, None

    def expect(self, receives: Sequence[tuple[int, Any]]) -> Any:
        return receives

    def wait(self, works: Any) -> None:
        pass

    def empty(self, size: int, like: Any) -> Any:
        return like[:0]

    def bring(self, vector: Any) -> Any:
        return vector

    def collect(self, content: bytes) -> list[bytes]:
        return [content]

    def broadcast(self, content: bytes | None) -> bytes:
        return content or b""

    def vote(self, stop: bool) -> bool:
        return stop

    def agreed(self, vote: bool) -> bool:
        return vote

    def fail(self, error: BaseException) -> None:
        pass
