"""Timelines: lanes of the runs that a slide compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from draw.canvas import canvas
from draw.overlap.runs import GPT, LINKED, WIDE, big, laptop, layer_seconds, program, race
from matplotlib.figure import Figure

from minifsdp.course.machine import Run, replay
from minifsdp.course.plots.drawing import lane_patches, lanes, step_of
from minifsdp.course.plots.palette import INK, LANE_COLOURS
from minifsdp.course.watch.timeline import Span


def last_step(run: Run, waits: bool = False) -> list[Span]:
    """With the names of its two long phases; the host's waits only if wanted."""
    begin, middle = run.done - run.seconds, {mark.name: mark.done for mark in run.marks}["backward"]
    phases = [Span("phase", "forward", 0, middle - begin), Span("phase", "backward", middle - begin, run.done - middle)]
    return phases + [span for span in run.last_step() if waits or span.lane != "wait"]


def forward_of(run: Run) -> list[Span]:
    """The last forward, until the device has done all of it."""
    done = {mark.name: mark.done for mark in run.marks}
    return cut(run.spans, done["forward"], done["backward"])


def cut(spans: Sequence[Span], begin: float, end: float) -> list[Span]:
    """What lies between two moments, in seconds, without the host's waits; the first moment becomes 0."""
    parts = [(span, max(span.start, begin), min(span.end, end)) for span in spans if span.lane != "wait"]
    return [Span(span.lane, span.name, first - begin, last - first) for span, first, last in parts if first < last]


@cache
def forwards() -> dict[str, list[Span]]:
    """By host, the forward of three equal blocks."""
    names = {
        "held up in every unit": "held up",
        "runs ahead": "BACKWARD_PRE",
        "held up, with forward prefetch": "held up, both ways",
    }
    return {label: forward_of(replay(program(name, WIDE), LINKED)) for label, name in names.items()}


def timeline(rows: Mapping[str, Sequence[Span]], height: float, model: str) -> Figure:
    """Lanes on one axis of time, a row for each run, units by their numbers."""
    figure = canvas(height)
    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    longest = max(map(step_of, rows.values()))
    for panel, (name, spans) in zip(panels, rows.items(), strict=True):
        lanes(panel, spans, longest, labelled=True)
        for text in panel.texts:
            text.set_fontsize(12)
        panel.set_title(name)
        panel.tick_params(axis="y", labelcolor=INK)
    panels[-1].set_xlabel(f"ms; a model, not measured: {model}")
    patches = lane_patches(span for spans in rows.values() for span in spans)
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches))
    return figure


def draw_step() -> Figure:
    """A step of four blocks, without overlap and with it."""
    runs = {"all on one stream": big(GPT, "sync"), "communication on streams of its own": big(GPT, "BACKWARD_PRE")}
    rows = {f"{name}: {1e3 * run.seconds:.0f} ms": last_step(run) for name, run in runs.items()}
    return timeline(rows, 4.9, GPT.device.name)


def draw_race() -> Figure:
    """The same program without one wait on two links: it reads too early on one of them, and is wrong on both."""
    rows = {"a fast link": forward_of(race(0.25e9)), "a slow link": forward_of(race(20e6))}
    figure = timeline(rows, 4.0, "a GPU of 20 GFLOP/s")
    spans, panel = rows["a slow link"], figure.axes[1]
    arrives = next(span.end for span in spans if span.name == "all_gather blocks.2")
    reads = [span for span in spans if (span.lane, span.name) == ("compute", "blocks.2")]
    begin, end = 1e3 * reads[0].start, 1e3 * min(reads[-1].end, arrives)
    panel.broken_barh([(begin, end - begin)], (0.6, 0.8), facecolor=LANE_COLOURS["wait"], zorder=4)
    panel.text((begin + end) / 2, 0.97, "2: too early", ha="center", va="center", fontsize=12, zorder=5)
    return figure


def draw_laptop() -> Figure:
    """One program on a host that runs ahead, on one that computes, and what prefetch makes of the second."""
    runs = {
        "overlap, if the host ran ahead": laptop("overlap", runs_ahead=True),
        "overlap, the host computes": laptop("overlap"),
        "overlap and prefetch, the host computes": laptop("both ways"),
    }
    rows = {f"{name}: {1e3 * run.seconds:.0f} ms": last_step(run) for name, run in runs.items()}
    return timeline(rows, 4.6, "a laptop of 20 GFLOP/s on a link of 2 ms and 50 MB/s")


def draw_backward() -> Figure:
    """Two blocks of backward, with the reduction first and with the gather first."""
    rows = {}
    for name in ("no prefetch", "BACKWARD_PRE"):
        run = big(GPT, name)
        spans, each = run.last_step(), layer_seconds(run)[1]
        begin = min(span.start for span in spans if "reduce_scatter blocks" in span.name)
        rows[f"{name}: {1e3 * each:.0f} ms a block"] = cut(spans, begin, begin + 2 * each)
    return timeline(rows, 3.6, GPT.device.name)


def draw_held_up() -> Figure:
    """A forward whose host is held up in every unit, beside one that runs ahead, and with forward prefetch."""
    rows = {f"{name}: {step_of(spans):.2f} ms": spans for name, spans in forwards().items()}
    return timeline(rows, 4.6, LINKED.name)
