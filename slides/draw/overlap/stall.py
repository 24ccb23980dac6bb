"""A retry: memory has run out, and the whole device waits while the host gives cached memory back."""

from __future__ import annotations

from functools import cache
from itertools import groupby
from typing import Any

from draw.canvas import GIB, canvas
from draw.overlap.allocator import T5
from draw.overlap.lanes import LANES, draw_lanes, name_messages
from draw.overlap.runs import PLENTY
from draw.overlap.schedules import SCHEDULES
from draw.overlap.timelines import last_step
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minifsdp.course.machine import Run, replay
from minifsdp.course.plots.palette import BLOCK_COLOURS, INK, LANE_COLOURS, OUTCOME_COLOURS, ink_on
from minifsdp.course.watch.timeline import Span

WRONG = OUTCOME_COLOURS["wrong"]
MODEL = f"{T5.recorded} + {T5.recorded} blocks of {T5.name}, A100"


@cache
def steps() -> tuple[Run, Run]:
    """The same program with enough memory, and with so little that a retry stalls the device."""
    recorded = T5.record(SCHEDULES["BACKWARD_PRE"])
    return replay(recorded, PLENTY), replay(recorded, T5.hardware)


def draw_stall() -> Figure:
    """A step in which an allocation fails, and its memory."""
    _, run = steps()
    figure = canvas(4.9)
    panels = figure.subplots(2, 1, sharex=True, height_ratios=(4.2, 3))
    _draw_step(panels[0], run, run.seconds)
    name_messages(panels[0])
    name_waits(panels[0], run)
    draw_memory(panels[1], run)
    for panel in panels:
        panel.axvline(1e3 * flush(run)[0], color=WRONG, linewidth=2.4, linestyle="--")
    panels[1].set_xlabel(f"ms; modelled, not measured: {MODEL}")
    return figure


def draw_retry() -> Figure:
    """The step with enough memory, and the one with a retry, on one axis."""
    enough, short = steps()
    figure = canvas(4.4)
    panels = figure.subplots(2, 1, sharex=True)
    for panel, run in zip(panels, (enough, short), strict=True):
        _draw_step(panel, run, short.seconds)
        memory = run.peak("reserved") if run is enough else T5.hardware.capacity
        retry = "" if run is enough else ", with a retry"
        panel.set_title(f"{memory / GIB:.1f} GiB{retry}: {1e3 * run.seconds:.0f} ms")
    name_messages(panels[0])
    begin, end = 1e3 * idle_since(short), 1e3 * flush(short)[1]
    panels[1].text((begin + end) / 2, 0.5, "idle", ha="center", va="center_baseline", color=WRONG, fontweight="bold")
    wait = max((span for span in merged(last_step(short)) if span.lane == "wait"), key=lambda span: span.duration)
    middle, ink = 1e3 * (wait.start + wait.duration / 2), ink_on(LANE_COLOURS["wait"])
    panels[1].text(middle, 2, "the host waits", ha="center", va="center_baseline", color=ink)
    panels[1].spines["bottom"].set_visible(True)
    panels[1].tick_params(axis="x", length=4)
    panels[1].set_xlabel(f"ms; modelled, not measured: {MODEL}")
    return figure


def _draw_step(panel: Axes, run: Run, longest: float) -> None:
    draw_lanes(panel, merged(last_step(run)), 1e3 * longest, ["host", *LANES], numbered=False)
    panel.spines["bottom"].set_visible(False)
    panel.tick_params(axis="x", length=0)


def merged(spans: list[Span]) -> list[Span]:
    """The host's waits of one kind, one after the other, as one; what it does in between is not seen."""
    waits = groupby((span for span in spans if span.lane == "wait"), key=lambda span: span.name)
    runs = [(name, list(group)) for name, group in waits]
    long = [Span("wait", name, each[0].start, each[-1].end - each[0].start) for name, each in runs]
    hidden = [span for span in spans if any(wait.start <= span.start < wait.end for wait in long)]
    return [span for span in spans if span.lane not in ("host", "wait") or span not in hidden] + long


def flush(run: Run) -> tuple[float, float]:
    """When the last step's allocation fails, and when the cached memory has been given back, in its seconds."""
    waits = [span for span in last_step(run) if span.lane == "wait"]
    begin = next(span.start for span in waits if span.name == "host waits")
    return begin, max(span.end for span in waits if span.name == "cudaFree")


def name_waits(panel: Axes, run: Run) -> None:
    """What holds up the host, how often, and what the device does meanwhile."""
    spans = last_step(run)
    for wait in (span for span in merged(spans) if span.lane == "wait"):
        calls = sum(span.name == wait.name and wait.start <= span.start < wait.end for span in spans)
        text = "waits" if wait.name == "host waits" else f"{calls} {wait.name}"
        if wait.duration > 0.014 * len(text) * run.seconds:
            middle = 1e3 * (wait.start + wait.duration / 2)
            panel.text(middle, 2, text, ha="center", va="center_baseline", color=ink_on(LANE_COLOURS["wait"]))
    begin, end = (1e3 * each for each in flush(run))
    middle = (1e3 * idle_since(run) + end) / 2
    panel.text(middle, 0.5, "the device is idle", ha="center", va="center_baseline", color=WRONG, fontweight="bold")
    bracket = {"arrowstyle": "|-|,widthA=0.35,widthB=0.35", "color": INK, "linewidth": 2, "shrinkA": 0, "shrinkB": 0}
    panel.annotate("", (begin, 2.72), (end, 2.72), arrowprops=bracket)
    panel.text((begin + end) / 2, 2.9, "synchronize, free the cache", ha="center", va="bottom")
    panel.set_ylim(-0.5, 3.7)


def idle_since(run: Run) -> float:
    """When the device has done all that was queued before the cached memory is given back."""
    end = flush(run)[1]
    return max(span.end for span in last_step(run) if span.lane in LANES and span.end < end)


def draw_memory(panel: Axes, run: Run) -> None:
    """Reserved and allocated GiB over the host's last step."""
    begin = run.done - run.seconds
    held = [sample for sample in run.memory if sample.at >= begin]
    at = [1e3 * (sample.at - begin) for sample in held] + [1e3 * run.seconds]
    allocated = [sample.allocated / GIB for sample in held] + [held[-1].allocated / GIB]
    panel.fill_between(at, allocated, step="post", color=BLOCK_COLOURS["in use"], linewidth=0)
    times, sizes = reserved(run)
    panel.plot(times, sizes, drawstyle="steps-post", color=INK)
    capacity = run.hardware.capacity / GIB
    panel.axhline(capacity, color=WRONG, linewidth=1.2)
    look: Any = {"color": INK, "va": "bottom"}
    boxed: Any = {"fontweight": "bold", "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1}}
    panel.text(15, sizes[0] + 1.2, "reserved", **look)
    panel.text(15, 0.2, "allocated", **{**look, "color": ink_on(BLOCK_COLOURS["in use"])})
    panel.text(1e3 * flush(run)[0] + 1, 3.9, "allocation fails", **{**look, "color": WRONG}, **boxed)
    panel.set_yticks([0, capacity], ["0 GiB", f"{capacity:.1f} GiB"])
    panel.set_ylim(0, 1.15 * capacity)


def reserved(run: Run) -> tuple[list[float], list[float]]:
    """Milliseconds and GiB of the last step: how long a call of the driver takes says how much it is for."""
    begin = run.done - run.seconds
    size = [sample.reserved for sample in run.memory if sample.at < begin][-1] / GIB
    times, sizes = [0.0], [size]
    each_call, each_gib = run.hardware.segment
    for span in last_step(run):
        if span.name in ("cudaMalloc", "cudaFree"):
            size += (span.duration - each_call) / each_gib * (1 if span.name == "cudaMalloc" else -1)
            times.append(1e3 * span.end)
            sizes.append(size)
    return [*times, 1e3 * run.seconds], [*sizes, size]
