"""A Chrome trace of one rank's step: torch.profiler's events, named collectives, and an emulated link's messages.

Open it in Perfetto (ui.perfetto.dev); timeline.py reads it.
"""

from __future__ import annotations

import json
import os
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from minifsdp import comm
from minifsdp.instruments.link.emulated import EmulatedLink, HostLinks, Transfer
from minifsdp.instruments.system.scratch import scratch_folder

PHASES = ("forward", "backward", "optimizer")
"""Names of a step's phases, for `torch.profiler.record_function`."""

RANGE = re.compile(r"(issue|wait) (\w+) (\S+) (\d+) B")
"""The name of the range around an issue or a wait: the phase, the operation, group and order, payload."""

TRACES = "MINIFSDP_TRACES"
"""Environment variable with a folder for a copy of every trace; the labs delete theirs after reading."""

MIB = 2**20
_CLOCK = "clock of the link"  # a range that starts at a reading of `time.perf_counter`
_LINK_LANE = 1_000_000_000  # thread id in the trace, used by no real thread


@contextmanager
def record_trace(path: str | Path, link: EmulatedLink | HostLinks | None = None) -> Iterator[None]:
    """Profile the `with` block on this rank and write a Chrome trace to `path`, unless the block raises.

    Each issue and each wait of a collective is a named range. Wrap the phases of the step in
    `record_function("forward")` and so on (`PHASES`) to label them. The profiler's first start takes about a second and
    varies between ranks: enter the block on all ranks, pass a barrier inside, then run the step.

    Args:
        path: the file, written atomically.
        link: the emulated link that carries the collectives, if any; its messages get their own lane.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keep the profiler's messages out of the ranks' output
    on_cuda = torch.cuda.is_initialized()
    with profiling([ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]) as profiler:
        marked_at = _mark_clock()
        comm.observers.append(_named_range)
        try:
            yield
        finally:
            comm.observers.remove(_named_range)
            if on_cuda:
                torch.cuda.synchronize()
    text = exported(profiler)
    if link is not None:
        messages = [message for message in link.transfers if message.start >= marked_at]
        text = json.dumps(_with_transfers(json.loads(text), messages, marked_at))
    _write_whole(Path(path), text)
    if folder := os.environ.get(TRACES):
        _keep_copy(Path(folder), Path(path), text)


def _named_range(call: comm.Call, phase: Literal["issue", "wait"]) -> AbstractContextManager[Any]:
    """A profiler range around an issue or a wait; `RANGE` parses its name."""
    return record_function(f"{phase} {call.op} {call.group}#{call.order} {call.payload} B")


def _mark_clock() -> float:
    """Add a range to the trace and return its start in seconds of `time.perf_counter`."""
    with record_function("first range"):  # initializes the profiler, which takes milliseconds
        pass
    now = time.perf_counter()
    with record_function(_CLOCK):
        return now


@contextmanager
def profiling(activities: Sequence[ProfilerActivity], memory: bool = False) -> Iterator[profile]:
    """Profile the `with` block; pass the profiler to `exported` afterwards.

    With `acc_events`, the profiler would not warn that it forgets earlier cycles, which do not exist here. But it would
    make a Python object of every event when it stops: 0.3 s for a step of 0.05 s.
    """
    profiler = profile(activities=activities, profile_memory=memory)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Profiler clears events")
        profiler.start()
    try:
        yield profiler
    finally:
        profiler.stop()


def exported(profiler: profile) -> str:
    """The Chrome trace of a stopped profiler, as JSON."""
    with scratch_folder() as folder:
        file = folder / "trace.json"
        profiler.export_chrome_trace(str(file))
        return file.read_text()


def _with_transfers(trace: dict[str, Any], transfers: list[Transfer], marked_at: float) -> dict[str, Any]:
    """The trace with the link's messages as a thread, shifted from the `perf_counter` clock to the trace's."""
    mark = next(event for event in trace["traceEvents"] if event["name"] == _CLOCK)
    lane = {"pid": mark["pid"], "tid": _LINK_LANE}
    added: list[dict[str, Any]] = [{"ph": "M", "name": "thread_name", **lane, "args": {"name": "emulated link"}}]
    for op, payload, start, end, _ in transfers:
        name, begin = f"{op} {payload / MIB:.1f} MiB", mark["ts"] + (start - marked_at) * 1e6
        message = {"ph": "X", "cat": "link", "name": name, "ts": begin, "dur": (end - start) * 1e6}
        added.append(message | lane)
    return trace | {"traceEvents": trace["traceEvents"] + added}


def _keep_copy(folder: Path, path: Path, text: str) -> None:
    """Copy a trace to the folder, named by its file, its rank and a running number."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = f"-rank{os.environ['RANK']}" if "RANK" in os.environ else ""
    names = (folder / f"{path.stem}{rank}-{number}.json" for number in count(1))
    _write_whole(next(name for name in names if not name.exists()), text)


def _write_whole(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
