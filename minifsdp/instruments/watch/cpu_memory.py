"""Peak memory of torch's CPU allocator, from torch.profiler's events: a reference independent of any implementation.

    with allocator_peaks() as peaks:
        model = ...
        for batch in batches:
            with record_function(WINDOW):
                step(batch)
    peaks  # for each window, the peak of live bytes allocated since the `with` began

A block counts at its size from its allocation to its free, for any requester: a tensor, a storage's `resize_`, an
operator's temporaries, a backend's buffers for a collective. Memory from other allocators is not counted: gloo's own
staging, oneDNN's workspaces.
"""

from __future__ import annotations

import ctypes
import json
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from minifsdp.instruments.watch.trace import exported, profiling

WINDOW = "measured"
"""Name of the `torch.profiler.record_function` around a step to measure."""

_CPU, _ERROR = 0, 2  # device type in a trace; level of torch's log


@contextmanager
def allocator_peaks() -> Iterator[list[int]]:
    """Measure the `with` block on all threads.

    Returns:
        a list, filled at the end of the block: peak bytes of each window, in order.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keep the profiler's messages out of the ranks' output
    _keep_books_of_all_threads()
    peaks: list[int] = []
    with profiling([ProfilerActivity.CPU], memory=True) as profiler:
        yield peaks
    peaks += _peaks(json.loads(exported(profiler)))


def _peaks(trace: Mapping[str, Any]) -> list[int]:
    events = sorted(trace["traceEvents"], key=lambda event: float(event.get("ts", 0)))
    changes = [event for event in events if event["name"] == "[memory]" and event["args"]["Device Type"] == _CPU]
    windows = [(event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] == WINDOW]
    times = [change["ts"] for change in changes]
    after = [change["args"]["Total Allocated"] for change in changes]
    before = [total - change["args"]["Bytes"] for total, change in zip(after, changes, strict=True)]
    start = before[0] if before else 0  # allocated before the block
    peaks = []
    for begin, end in windows:
        inside = slice(bisect_left(times, begin), bisect_right(times, end))
        # A change's total includes frees on unwatched threads before it; without a change inside, use the last one.
        levels = before[inside] + after[inside] or after[: inside.start][-1:] or [start]
        peaks.append(max(levels) - start)
    return peaks


def _keep_books_of_all_threads() -> None:
    """Make the allocator's running total, which its events report, correct from here on.

    By default the allocator counts only on threads that the profiler watches. It watches gloo's threads while they run
    a collective, but not when they drop its tensors: a block last owned by such a thread would count forever
    (`ProfiledCPUMemoryReporter` in torch's c10/core/CPUAllocator.cpp). The flag for all threads has no Python API.
    """
    c10 = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/libc10.*"))))
    all_threads = ctypes.c_bool.in_dll(c10, "FLAGS_caffe2_report_cpu_memory_usage")
    if all_threads.value:
        return
    unknown = torch.empty(1)  # the allocator warns about the first unknown block, and every thousandth after it
    level = ctypes.c_int.in_dll(c10, "FLAGS_caffe2_log_level")
    before, level.value, all_threads.value = level.value, _ERROR, True
    del unknown
    level.value = before
