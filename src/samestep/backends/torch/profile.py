"""What PyTorch's profiler sees of some steps: operations and kernels, as events of a trace on the clock of samestep's times."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter_ns
from typing import Any

import torch
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile, record_function

from samestep.backends.times import covered, seen
from samestep.devices import Device

BUSY = ("kernel", "gpu_memcpy", "gpu_memset")  # kinds of events
MARK = "samestep clock"
WANTED = ("profile_all_threads", "trace_only")  # what samestep's threads do, too; nothing is made but the file
# It would write lines of its own to standard error; and its ways to end CUPTI and to begin it anew crash with CUDA graphs.
for _name, _value in (("KINETO_LOG_LEVEL", "99"), ("TEARDOWN_CUPTI", "0"), ("DISABLE_CUPTI_LAZY_REINIT", "1")):
    os.environ.setdefault(_name, _value)


@contextmanager
def watching(devices: Sequence[Device]) -> Iterator[list[dict[str, Any]]]:
    """Yields a list, which is filled at the end. Its first event says from when to when, and how long each GPU was busy."""
    gpus = sorted({device.index for device in devices if device.kind == "cuda"})
    known = _ExperimentalConfig.__init__.__doc__ or ""  # of older versions, less
    wanted: dict[str, Any] = {name: True for name in WANTED if name in known}
    kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA][: len(gpus)]]
    found: list[dict[str, Any]] = []
    with profile(activities=kinds, experimental_config=_ExperimentalConfig(**wanted)) as profiler:
        marks = [_mark() for _ in range(5)]
        for gpu in gpus:
            torch.cuda.synchronize(gpu)  # all that was launched before is over
        began = perf_counter_ns() / 1e3
        try:
            yield found
        finally:
            for gpu in gpus:
                torch.cuda.synchronize(gpu)
            ended = perf_counter_ns() / 1e3
    with TemporaryDirectory() as folder:
        profiler.export_chrome_trace(path := f"{folder}/trace.json")
        events = json.loads(Path(path).read_bytes(), parse_constant=lambda _: None)["traceEvents"]
    theirs = sorted(
        event["ts"] for event in events if event.get("name") == MARK and event.get("cat") == "user_annotation"
    )
    (before, inside), mark = min(zip(marks, theirs, strict=True), key=lambda pair: pair[0][1] - pair[0][0])
    shift = (before + inside) / 2 - mark  # in microseconds, of which the best of five marks leaves some open
    events = [{**event, "ts": event["ts"] + shift} for event in events if isinstance(event.get("pid"), int)]
    busy = defaultdict[str, list[tuple[float, float]]](list)
    for event in events:
        if event.get("cat") in BUSY:
            busy[f"cuda:{event['args']['device']}"].append((event["ts"], event["ts"] + event["dur"]))
    found += seen("torch.profiler", began, ended, {name: covered(busy[name], began, ended) for name in sorted(busy)})
    found += [event for event in events if event["name"] != MARK]


def _mark() -> tuple[float, float]:
    """An event whose beginning is known on both clocks: it lies between these two times."""
    before = perf_counter_ns()
    with record_function(MARK):
        return before / 1e3, perf_counter_ns() / 1e3
