"""The timeline of a step: reduce a Chrome trace to lanes, and compute the overlap of communication and compute.

`trace.record_trace` writes the trace. `read_trace` reduces it to spans in a few lanes, `overlap` reduces those to one
number, and `plots.timeline_figure` draws them.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from minifsdp.instruments.watch.intervals import length, meets, subtract, union
from minifsdp.instruments.watch.trace import MIB, PHASES, RANGE

_GAP = 200e-6  # seconds between operations that still count as compute: interpreter overhead
_LAUNCHES = ("cuda_runtime", "cuda_driver")  # categories of calls that queue a kernel or a copy
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of device work


class Span(NamedTuple):
    """A timed operation or phase.

    Attributes:
        lane: "compute", "communication", "wait" or "phase"; on CUDA also "copy", and "compute (stream 20)" and the like
            for all streams but the busiest.
        name: its name, such as "all_gather 1.5 MiB".
        start: seconds from the beginning of the step.
        duration: seconds.
    """

    lane: str
    name: str
    start: float
    duration: float

    @property
    def end(self) -> float:
        return self.start + self.duration


def read_trace(path: str | Path) -> list[Span]:
    """The spans of a trace, ordered by start, in seconds.

    If phases are marked, the step is the time that they enclose, and the rest is left out; otherwise it is the whole
    trace.

    On CPU, where host and device are the same, the lanes are

    - compute: the operations of the main thread, except issuing collectives and waiting for them. Neighbours are merged
      into one span, named after the longest.
    - communication: the messages of the emulated link, if there was one. Otherwise gloo's own ranges (`gloo:...`),
      one for each collective in order of issue: they run on gloo's threads, also while the main thread computes. A
      reduce-scatter is an all-reduce there: it clones its input when issued and copies its part out when waited for,
      both on the main thread, and the span is the all-reduce in between, named reduce-scatter. A collective without
      such a range lasts from its issue to the end of its wait.
    - wait: the host blocked until a collective ends.

    On CUDA the lanes show the device's work:

    - communication: the kernels named nccl*, and the spin kernels of the emulated link.
    - compute: all other kernels, and memory operations on the device (`copy_` between contiguous tensors of one dtype
      is a memcpy, `zero_` a memset). The stream with the most of them has this lane, each other stream its own.
    - copy: copies between device and host, which occupy no multiprocessor and count as neither of the two.

    There is no wait lane: the host runs ahead, and the streams wait.

    Args:
        path: a Chrome trace written by `record_trace`, or by torch.profiler alone.

    Raises:
        ValueError: the file is not a Chrome trace.
    """
    events = _events(path)
    on_device = any(event.category in _ON_DEVICE for event in events)
    return _within_phases(_device_spans(events) if on_device else _host_spans(events))


def overlap(spans: Iterable[Span]) -> float | None:
    """The fraction of communication time that overlaps with compute; None without communication.

    1 means that all communication is hidden behind compute, 0 that none is. Host waits are not compute.
    """
    spans = list(spans)
    communication = union((span.start, span.end) for span in spans if span.lane == "communication")
    compute = union((span.start, span.end) for span in spans if span.lane.startswith("compute"))
    seconds = length(communication)
    return (seconds - length(subtract(communication, compute))) / seconds if seconds else None


class _Event(NamedTuple):
    category: str
    name: str
    thread: Any
    start: float  # seconds
    end: float  # seconds
    args: dict[str, Any]

    def span(self, lane: str, name: str | None = None) -> Span:
        return Span(lane, name or self.name, self.start, self.end - self.start)


def _events(path: str | Path) -> list[_Event]:
    """The trace's events with a duration, ordered by start, outer events before inner ones."""
    try:
        found = [event for event in json.loads(Path(path).read_text())["traceEvents"] if event["ph"] == "X"]
        events = [
            _Event(e.get("cat", ""), e["name"], e["tid"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6, e.get("args", {}))
            for e in found
        ]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not a Chrome trace") from None
    return sorted(events, key=lambda event: (event.start, -event.end))


def _host_spans(events: list[_Event]) -> list[Span]:
    threads = Counter(event.thread for event in events if event.category == "cpu_op")
    threads.update(event.thread for event in events if RANGE.fullmatch(event.name))
    main_thread = threads.most_common(1)[0][0] if threads else None
    main = [event for event in events if event.thread == main_thread]
    carried = [event.span("communication") for event in events if event.category == "link"]
    waits = [event.span("wait", _title(event.name)) for event in main if _part(event.name) == "wait"]
    phases = [event.span("phase") for event in main if event.name in PHASES]
    return _host_compute(main) + (carried or _gloo_spans(events, main)) + waits + phases


def _host_compute(main: list[_Event]) -> list[Span]:
    """Outermost operations without a collective inside; neighbours are merged, but not across collectives or phases."""
    blocked = union((e.start, e.end) for e in main if _part(e.name) or e.name.startswith("c10d::"))
    edges = sorted([start for start, _ in blocked] + [event.start for event in main if event.name in PHASES] + [inf])
    runs: list[list[_Event]] = []
    for event in main:
        before = runs[-1][-1] if runs else None
        inner = before is not None and event.start < before.end
        if inner or event.category != "cpu_op" or meets(blocked, event.start, event.end):
            continue
        if before and event.start <= before.end + _GAP and event.start < edges[bisect_left(edges, before.end)]:
            runs[-1].append(event)
        else:
            runs.append([event])
    spans = []
    for run in runs:
        longest = max(run, key=lambda event: event.end - event.start)
        name = longest.name.removeprefix("autograd::engine::evaluate_function: ").removeprefix("aten::")
        spans.append(Span("compute", name, run[0].start, run[-1].end - run[0].start))
    return spans


def _gloo_spans(events: list[_Event], main: list[_Event]) -> list[Span]:
    """A span per collective of `comm`, then gloo's other ranges; barriers carry no data and are left out."""
    left = [e for e in events if e.name.startswith("gloo:") and e.name != "gloo:barrier"]
    ends: dict[str, float] = {}
    for event in main:
        if _part(event.name) == "wait":
            ends.setdefault(event.name.removeprefix("wait "), event.end)  # a second wait returns at once
    issued = [event for event in main if _part(event.name) == "issue"]
    operations = Counter(_operation(issue) for issue in issued)
    messages = {op: sum(_carries(op, event) for event in left) // count for op, count in operations.items()}
    spans, taken = [], []
    for issue in issued:
        op, start, end = _operation(issue), issue.start, ends.get(issue.name.removeprefix("issue "), issue.end)
        taken.append((start, end))
        mine = [event for event in left if _carries(op, event) and start <= event.start <= end][: max(1, messages[op])]
        if mine:
            left = [event for event in left if event not in mine]
            start, end = min(event.start for event in mine), max(event.end for event in mine)
        spans.append(Span("communication", _title(issue.name), start, end - start))
    others = [event for event in left if not any(start <= event.start <= end for start, end in taken)]
    return spans + [event.span("communication", event.name.removeprefix("gloo:")) for event in others]


def _operation(issue: _Event) -> str:
    """`all_gather` of the range `issue all_gather 0#12 1048576 B`."""
    return issue.name.split()[1]


def _carries(op: str, event: _Event) -> bool:
    """True if gloo's range may be one of the messages of such a collective (gloo.py)."""
    message = event.name.removeprefix("gloo:")
    made_of = {
        "all_gather": ("broadcast", "all_gather"),
        "reduce_scatter": ("send", "recv", "all_to_all", "all_reduce"),
    }
    return message.startswith(made_of.get(op, (op,)))


def _device_spans(events: list[_Event]) -> list[Span]:
    queued = [event for event in events if event.category in _ON_DEVICE]
    lanes = {"communication": _is_communication, "copy": _is_copy}
    spans = [work.span(lane, _short(work.name)) for lane, is_of in lanes.items() for work in queued if is_of(work)]
    compute = [work for work in queued if not _is_communication(work) and not _is_copy(work)]
    busiest = Counter(work.args["stream"] for work in compute).most_common(1)
    for work in compute:
        stream = work.args["stream"]
        lane = "compute" if stream == busiest[0][0] else f"compute (stream {stream})"
        spans.append(work.span(lane, _short(work.name)))
    return spans + _device_phases(events, queued)


def _device_phases(events: list[_Event], queued: list[_Event]) -> list[Span]:
    """Phases on the device: from the first to the last work queued in a phase by any thread; backward has its own.

    (The profiler's own `gpu_user_annotation` covers only kernels of the annotating thread.)
    """
    launches = {e.args["correlation"]: e.start for e in events if e.category in _LAUNCHES and "correlation" in e.args}
    spans = []
    for phase in (event for event in events if event.category == "user_annotation" and event.name in PHASES):
        launched = [e for e in queued if phase.start <= launches.get(e.args.get("correlation"), inf) < phase.end]
        if launched:
            begin, end = min(e.start for e in launched), max(e.end for e in launched)
            spans.append(Span("phase", phase.name, begin, end - begin))
    return spans


def _is_communication(work: _Event) -> bool:
    return work.name.startswith("nccl") or "spin_kernel" in work.name


def _is_copy(work: _Event) -> bool:
    return work.category == "gpu_memcpy" and ("HtoD" in work.name or "DtoH" in work.name)


def _short(kernel: str) -> str:
    """`void at::native::some_kernel<4, float>(int)` as `some_kernel`, `Memset (Device)` as `Memset`."""
    if "spin_kernel" in kernel:
        return "link"
    return kernel.split("(")[0].split("<")[0].removeprefix("void ").split("::")[-1].strip()


def _part(name: str) -> str | None:
    """`"issue"` or `"wait"` if the range belongs to a collective of `comm`, else None."""
    match = RANGE.fullmatch(name)
    return match[1] if match else None


def _title(name: str) -> str:
    """`wait all_gather 0#12 1048576 B` as `all_gather 1.0 MiB`."""
    match = RANGE.fullmatch(name)
    return f"{match[2]} {int(match[4]) / MIB:.1f} MiB" if match else name


def _within_phases(spans: list[Span]) -> list[Span]:
    """The spans clipped to the time from the first phase to the last, with the start at second 0."""
    frame = [span for span in spans if span.lane == "phase"] or spans
    if not frame:
        return []
    begin, end = min(span.start for span in frame), max(span.end for span in frame)
    cut = []
    for lane, name, start, duration in spans:
        first, last = max(start, begin), min(start + duration, end)
        if first < last:
            cut.append(Span(lane, name, first - begin, last - first))
    return sorted(cut, key=lambda span: span.start)
