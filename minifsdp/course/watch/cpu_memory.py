"""Memory of torch's CPU allocator, by torch.profiler's events: a measure that depends on nobody's code.

    with allocator_peaks() as peaks:
        model = ...
        for batch in batches:
            with record_function(WINDOW):
                step(batch)
    peaks  # for each window, the most bytes that were out at once, of those handed out since the `with` began

A block counts at its size from its allocation to its free, whoever asked for it: a tensor, a storage's `resize_`, an
operator for its temporaries, a backend for a collective. Not seen is memory that is not this allocator's: gloo's own
staging, the workspaces of oneDNN.
"""

from __future__ import annotations

import ctypes
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from minifsdp.course.watch.trace import exported

WINDOW = "measured"
"""Name of a `torch.profiler.record_function` around a step whose peak is wanted."""

_CPU, _ERROR = 0, 2  # a device's type in a trace; a level of torch's log


@contextmanager
def allocator_peaks() -> Iterator[list[int]]:
    """Watch the `with` block on all threads.

    Returns:
        a list, filled when the block has ended: bytes at the peak of each window, in order.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own messages would land among the ranks' output
    _keep_books_of_all_threads()
    peaks: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield peaks
    peaks += _peaks(exported(profiler))


def _peaks(trace: Mapping[str, Any]) -> list[int]:
    events = sorted(trace["traceEvents"], key=lambda event: float(event.get("ts", 0)))
    changes = [event for event in events if event["name"] == "[memory]" and event["args"]["Device Type"] == _CPU]
    windows = [(event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] == WINDOW]
    times = [change["ts"] for change in changes]
    after = [change["args"]["Total Allocated"] for change in changes]
    before = [total - change["args"]["Bytes"] for total, change in zip(after, changes, strict=True)]
    start = before[0] if before else 0  # what others hold
    peaks = []
    for begin, end in windows:
        inside = slice(bisect_left(times, begin), bisect_right(times, end))
        # A change knows what threads that nobody watches have freed before it; without one inside, the last is asked.
        levels = before[inside] + after[inside] or after[: inside.start][-1:] or [start]
        peaks.append(max(levels) - start)
    return peaks


def _keep_books_of_all_threads() -> None:
    """Let the allocator's running total, which its events tell, be right from here on.

    By itself the allocator enters only what threads do that the profiler watches. It watches gloo's while they run a
    collective, and no more when they drop its tensors: a block whose last owner was such a thread would count for ever
    (`ProfiledCPUMemoryReporter` in torch's c10/core/CPUAllocator.cpp). The flag for all threads has no Python name.
    """
    c10 = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/libc10.*"))))
    all_threads = ctypes.c_bool.in_dll(c10, "FLAGS_caffe2_report_cpu_memory_usage")
    if all_threads.value:
        return
    unknown = torch.empty(1)  # it warns of the first block that it does not know, and of every thousandth after it
    level = ctypes.c_int.in_dll(c10, "FLAGS_caffe2_log_level")
    before, level.value, all_threads.value = level.value, _ERROR, True
    del unknown
    level.value = before
