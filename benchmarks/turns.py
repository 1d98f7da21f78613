"""Processes that prepare side by side and are measured in turns.

What takes minutes to compile is compiled at once, and while one is measured, nothing else runs.

The parent starts itself once for each configuration. A child says when it is ready, and then waits for its turns. What a child
prints otherwise is told when it is ready. Its memory is its own: nothing of the others counts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

MARK = "@turn "


class Turns:
    """In a child: its turns."""

    def __init__(self) -> None:
        self.ready, self.about = False, dict[str, Any]()
        self.began = time.perf_counter()

    def say(self, **told: Any) -> None:
        print(MARK + json.dumps(told), flush=True)

    def wait(self) -> str:
        """Until the parent asks for something: "go", or another word."""
        if not self.ready:
            self.ready = True
            self.say(ready=True, prepared=time.perf_counter() - self.began, **self.about)
        word = sys.stdin.readline().strip()
        if word in ("", "end"):
            self.say(ended=True, **self.about)
            sys.stdout.flush()
            os._exit(0)
        return word


class Child:
    """In the parent: one of them."""

    def __init__(self, name: str, command: Sequence[str], env: dict[str, str]) -> None:
        self.name, self.told = name, list[str]()
        self.process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | env, start_new_session=True,
        )  # fmt: skip
        self.answer: dict[str, Any] | None = None
        self.there = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith(MARK):
                self._put(json.loads(line.removeprefix(MARK)))
            else:
                self.told.append(line.rstrip()[:300])
        self._put({"failed": True})

    def _put(self, answer: dict[str, Any]) -> None:
        with self.there:
            while self.answer is not None and "failed" not in self.answer:
                self.there.wait()
            self.answer = answer
            self.there.notify_all()

    def heard(self, until: float) -> dict[str, Any] | None:
        """What it says next; None if it fails, or says nothing until that moment."""
        with self.there:
            self.there.wait_for(lambda: self.answer is not None, max(0.0, until - time.monotonic()))
            answer = self.answer
            if answer and "failed" not in answer:
                self.answer = None
                self.there.notify_all()
                return answer
        return None

    def ask(self, word: str, seconds: float = 120) -> dict[str, Any] | None:
        assert self.process.stdin
        try:
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()
        except OSError:
            return None
        return self.heard(time.monotonic() + seconds)

    def end(self) -> dict[str, Any]:
        answer = self.ask("end", 10) or {}
        self.kill()
        return answer

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its compilers, too
        self.process.wait()
