"""A retry: memory has run out, and the whole device waits while the host gives cached memory back."""

from __future__ import annotations

from functools import cache
from itertools import groupby

from draw.canvas import GIB, canvas
from draw.overlap.allocator import T5
from draw.overlap.lanes import LANES, draw_lanes, name_messages
from draw.overlap.runs import PLENTY
from draw.overlap.schedules import SCHEDULES
from draw.overlap.timelines import last_step
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minifsdp.instruments.machine import Run, replay
from minifsdp.instruments.plots.palette import INK, LANE_COLOURS, OUTCOME_COLOURS, ink_on
from minifsdp.instruments.watch.timeline import Span

BRACKET = 2.72  # its height above the lanes
WRONG = OUTCOME_COLOURS["wrong"]
MODEL = f"{T5.recorded} + {T5.recorded} blocks of a {T5.name} model on a simulated A100"


@cache
def steps() -> tuple[Run, Run]:
    """The same program with enough memory, and with so little that a retry stalls the device."""
    recorded = T5.record(SCHEDULES["BACKWARD_PRE"])
    return replay(recorded, PLENTY), replay(recorded, T5.hardware)


def draw_retry() -> Figure:
    """The step with enough memory, and the one with a retry, on one axis."""
    enough, short = steps()
    figure = canvas(4.35)
    panels = figure.subplots(2, 1, sharex=True)
    for panel, run in zip(panels, (enough, short), strict=True):
        _draw_step(panel, run, short.seconds)
        memory = run.peak("reserved") if run is enough else T5.hardware.capacity
        retry = "" if run is enough else ", with a retry"
        panel.set_title(f"{memory / GIB:.1f} GiB of device memory{retry}: {1e3 * run.seconds:.0f} ms")
    name_messages(panels[0])
    name_waits(panels[1], short)
    panels[1].vlines(1e3 * flush(short)[0], -0.5, BRACKET, color=WRONG, linewidth=2.4, linestyle="--")
    panels[0].get_gridspec().set_height_ratios([high - low for low, high in (panel.get_ylim() for panel in panels)])
    panels[1].spines["bottom"].set_visible(True)
    panels[1].tick_params(axis="x", length=4)
    panels[1].set_xlabel(f"ms, modelled: {MODEL}")
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
    panel.annotate("", (begin, BRACKET), (end, BRACKET), arrowprops=bracket)
    says = "allocation fails: wait, free the cache"
    panel.text((begin + end) / 2, BRACKET + 0.18, says, ha="center", va="bottom")
    panel.set_ylim(-0.5, 3.85)


def idle_since(run: Run) -> float:
    """When the device has done all that was queued before the cached memory is given back."""
    end = flush(run)[1]
    return max(span.end for span in last_step(run) if span.lane in LANES and span.end < end)
