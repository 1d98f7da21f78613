"""Worker processes that read a source ahead, each with a source of its own, made from what can be pickled.

A worker answers indices with their examples (or examples with what a transform makes of them), so the order of its work
decides nothing. It ends when its socket does: with the run, also when this process is killed. (A socket takes a large array
at once; multiprocessing's pipes take it in small pieces.)
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from samestep.data.source import Source
from samestep.data.transform import Transform
from samestep.errors import ProcessFailed, place, told

NAME, UNGUARDED = "samestep-read", 77  # of a worker; its exit status if the script that it imports begins a fit


class Workers:
    def __init__(self, source: Source | Transform, count: int) -> None:
        self.name, content, context = source.name, pickle.dumps(source), multiprocessing.get_context("spawn")
        self._idle: list[Any] = []
        for _ in range(count):
            ours, theirs = socket.socketpair()
            process = context.Process(target=_work, args=(theirs,), name=NAME, daemon=True)
            # Which it inherits: also while it starts, Ctrl-C is for the run alone.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()  # so that the socket ends with the process
            self._idle.append((process, ours, ours.makefile("rb"), content))

    def read(self, *asked: Any) -> Any:
        process, ours, file, content = self._idle.pop(0)  # there is one: as many threads read as there are workers
        try:
            ours.sendall(content + pickle.dumps(asked))
            answer = pickle.load(file)
        except (EOFError, OSError, pickle.UnpicklingError):
            process.join(5)
            how = f"ended with exit code {process.exitcode}: see what it wrote, or use fewer readers"
            if process.exitcode == UNGUARDED:
                how = 'imports this script: begin the fit under if __name__ == "__main__":, or use Data(readers=None)'
            raise ProcessFailed(f"worker process {process.pid}, which reads {self.name}, {how}") from None
        finally:
            self._idle.append((process, ours, file, b""))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        for _, ours, file, _ in self._idle:
            file.close()
            ours.close()
        for process, *_ in self._idle:  # which end side by side
            process.join(1)
            process.kill()  # if it has not ended by itself
            process.join()


def _work(end: socket.socket) -> None:
    os.setsid()  # a signal to the group of the run is for the run, which may go on to a checkpoint
    os.environ["OMP_NUM_THREADS"] = "1"
    file, source = end.makefile("rwb"), None
    with suppress(OSError):  # of an answer: the run has ended
        while True:
            try:
                source = pickle.load(file) if source is None else source
                if "torch" in sys.modules:
                    sys.modules["torch"].set_num_threads(1)
                answer = source.read(*pickle.load(file))
            except Exception as error:
                answer = ProcessFailed(f"a worker met {told(error)} (try readers=None)")
                if where := place(error):
                    error.add_note(f"raised in a process that reads examples ({where})")
                with suppress(Exception):  # not every error can be made again from what is sent
                    answer = pickle.loads(pickle.dumps(error)) if source is not None else answer
            pickle.dump(answer, file, 5)  # from 5 on, arrays go without a copy
            file.flush()
