"""Timelines: lanes of the runs that a slide compares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from draw.canvas import GIB
from draw.overlap.lanes import LANES, name_phases, timeline
from draw.overlap.runs import GPT, LINKED, WIDE, big, laptop, layer_seconds, program, race
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minifsdp.instruments.machine import Run, replay
from minifsdp.instruments.plots.drawing import step_of
from minifsdp.instruments.plots.palette import OUTCOME_COLOURS, SOFT
from minifsdp.instruments.watch.intervals import subtract, union
from minifsdp.instruments.watch.timeline import Span

GPT_ON = f"{GPT.recorded} blocks of a {GPT.name} model on a simulated A100"


def last_step(run: Run) -> list[Span]:
    """The device's and the host's, from the end of all earlier work."""
    return cut(run, run.done - run.seconds, run.done)


def forward_of(run: Run) -> list[Span]:
    """The last forward, until the device has done all of it."""
    done = {mark.name: mark.done for mark in run.marks}
    return cut(run, done["forward"], done["backward"])


def cut(run: Run, begin: float, end: float) -> list[Span]:
    """What lies between two moments, in seconds; the first becomes 0. The host is busy unless it waits, to its end."""
    waits = union((span.start, span.end) for span in run.spans if span.lane == "wait")
    busy = subtract([(0.0, run.memory[-1].at)], waits)
    spans = run.spans + [Span("host", "host", start, stop - start) for start, stop in busy]
    parts = [(span, max(span.start, begin), min(span.end, end)) for span in spans]
    return [Span(span.lane, span.name, first - begin, last - first) for span, first, last in parts if first < last]


def gaps(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """When nothing computes, in seconds."""
    busy = union((span.start, span.end) for span in spans if span.lane == "compute")
    return subtract([(0.0, max(span.end for span in spans))], busy)


@cache
def forwards() -> dict[str, list[Span]]:
    """By schedule, the forward of three equal blocks: of a host that is held up in every unit, and of one ahead."""
    names = ("held up", "held up, both ways", "BACKWARD_PRE", "both ways")
    return {name: forward_of(replay(program(name, WIDE), LINKED)) for name in names}


def turn(run: Run) -> tuple[float, float]:
    """When the device has done the last forward, and the backward, in milliseconds of the step."""
    done = {mark.name: 1e3 * (mark.done - run.done + run.seconds) for mark in run.marks}
    return done["backward"], done["optimizer"]


def draw_step() -> Figure:
    """A step of four blocks, on one stream, and with streams of its own for communication."""
    runs = {"one stream (blank: root)": big(GPT, "sync"), "separate streams, torch's order": big(GPT, "no prefetch")}
    figure = timeline(titled(runs), 5.2, GPT_ON)
    for panel, run in zip(figure.axes, runs.values(), strict=True):
        name_phases(panel, *turn(run))
    mark_hidden(figure.axes[1], last_step(big(GPT, "no prefetch")))
    return figure


def mark_hidden(panel: Axes, spans: Sequence[Span]) -> None:
    """A line under the communication that overlaps compute, and its share of all communication."""
    sent, computed = (union((s.start, s.end) for s in spans if s.lane == lane) for lane in ("communication", "compute"))
    hidden = subtract(sent, subtract(sent, computed))
    share = sum(end - begin for begin, end in hidden) / sum(end - begin for begin, end in sent)
    colour = OUTCOME_COLOURS["right"]
    for begin, end in hidden:
        if end - begin > 0.01 * step_of(spans) / 1e3:  # else a speck
            panel.plot([1e3 * begin, 1e3 * end], [-0.42, -0.42], color=colour, linewidth=6, solid_capstyle="butt")
    says = f"underlined: {100 * share:.0f} % hidden"
    panel.set_title(says, loc="right", color=colour)


def titled(runs: Mapping[str, Run]) -> dict[str, list[Span]]:
    """The last step of each, with its milliseconds in its name."""
    return {f"{name}: {1e3 * run.seconds:.0f} ms": last_step(run) for name, run in runs.items()}


def draw_race() -> Figure:
    """The same program without one wait on two links: it reads too early on one of them, and is wrong on both."""
    rows = {f"{speed / 1e6:g} MB/s": forward_of(race(speed)) for speed in (0.25e9, 20e6)}
    figure = timeline(rows, 4.0, "3 blocks of width 175 on a simulated GPU of 20 GFLOP/s", messages=["all-gather"])
    for panel, spans in zip(figure.axes, rows.values(), strict=True):
        gather = next(span for span in spans if span.name == "all_gather blocks.2")
        read = next(span for span in spans if (span.lane, span.name) == ("compute", "blocks.2"))
        early = read.start < gather.end
        colour = OUTCOME_COLOURS["wrong" if early else "right"]
        says = "is read {:.0f} ms before it arrives" if early else "arrives {:.0f} ms before it is read"
        arrow: Any = {"arrowstyle": "-|>,head_width=0.4,head_length=0.7", "color": colour, "linewidth": 4, "shrinkA": 0}
        panel.annotate("", (1e3 * read.start, 0.6), (1e3 * gather.end, 0.36), arrowprops={**arrow, "shrinkB": 0})
        title = f"{panel.get_title('left')}: block 2 {says.format(1e3 * abs(read.start - gather.end))}"
        panel.set_title(title, color=colour)
    return figure


def draw_laptop() -> Figure:
    """A host that computes, with gathers issued when it needs them, and one unit earlier."""
    runs = {"gathers issued when needed": laptop("overlap"), "gathers issued one unit early": laptop("both ways")}
    return timeline(titled(runs), 4.5, "3 blocks of width 175, 20 GFLOP/s, a link of 50 MB/s and 2 ms")


def draw_backward() -> Figure:
    """Two blocks of backward, with the reduction first and with the gather first."""
    rows = {}
    for name in ("no prefetch", "BACKWARD_PRE"):
        run = big(GPT, name)
        begin, each = run.done - run.seconds, layer_seconds(run)[1]
        begin = min(span.start for span in run.spans if span.start > begin and "reduce_scatter blocks" in span.name)
        rows[f"{name.replace('no', 'torch, no')}: {1e3 * each:.0f} ms per block"] = cut(run, begin, begin + 2 * each)
    figure = timeline(rows, 4.0, f"backward of a {GPT.name} model on a simulated A100")
    mark_gaps(figure.axes[0], next(iter(rows.values())), 1)
    return figure


def mark_gaps(panel: Axes, spans: Sequence[Span], lane: int, since: float = 0.0, until: float = math.inf) -> None:
    """Dashed frames where nothing computes, between two moments in milliseconds."""
    for begin, end in gaps(spans):
        if since <= 1e3 * begin and 1e3 * end < until and end - begin > 1e-3:
            look: Any = {
                "facecolor": "none",
                "edgecolor": OUTCOME_COLOURS["wrong"],
                "linestyle": "--",
                "linewidth": 1.8,
            }
            panel.broken_barh([(1e3 * begin, 1e3 * (end - begin))], (lane - 0.4, 0.8), **look)
            if end - begin > 0.1 * step_of(spans) / 1e3:
                panel.text(500 * (begin + end), lane, "idle", ha="center", va="center_baseline")


def draw_held_up() -> Figure:
    """A forward whose host is held up in every unit, without forward prefetch and with it."""
    names = {"no forward prefetch": "held up", "forward prefetch": "held up, both ways"}
    rows = {f"{name}: {step_of(forwards()[key]):.2f} ms": forwards()[key] for name, key in names.items()}
    return timeline(
        rows, 4.3, f"3 blocks of width 1,024 on a simulated {LINKED.name}", ["host", *LANES], ["all-gather"]
    )


def draw_frame() -> Figure:
    """What prefetch and the limit each do to host, compute and communication of one step."""
    names = {"no prefetch": "no prefetch", "prefetch": "BACKWARD_PRE", "prefetch, limit of two": "k = 2"}
    runs = {name: big(GPT, schedule) for name, schedule in names.items()}
    figure = timeline({name: last_step(run) for name, run in runs.items()}, 5.2, GPT_ON, ["host", *LANES])
    for panel, (name, run) in zip(figure.axes, runs.items(), strict=True):
        panel.set_title(f"{name}: {1e3 * run.seconds:.0f} ms, {run.peak('reserved') / GIB:.0f} GiB reserved")
        panel.set_ylim(-0.75, 2.5)
    name_phases(figure.axes[-1], *turn(runs["prefetch, limit of two"]))
    first = runs["no prefetch"]
    begin, end = turn(first)
    mark_gaps(figure.axes[0], last_step(first), 1, begin, end - 1)  # the last reductions are no gap
    key = "red frames: compute is idle; numbers: blocks"
    figure.axes[0].text(1e3 * first.seconds, 2, key, ha="right", va="center_baseline", color=SOFT)
    return figure
