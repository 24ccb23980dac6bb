"""Buckets: which gradients they hold, when they are reduced, and how large they should be."""

from __future__ import annotations

from typing import Any

from draw.canvas import MIB, canvas
from draw.ddp.drawing import GOOD
from draw.ddp.runs import CAP, ON_PAPER, SIZE, all_reduce, backward_of, bucket_sizes, exposed, parameters, rung
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minifsdp.instruments.machine import Run
from minifsdp.instruments.plots.palette import (
    COLLECTIVE_COLOURS,
    LANE_COLOURS,
    SOFT,
    TAG_COLOURS,
    UNIT_COLOURS,
    as_text,
    ink_on,
)
from minifsdp.instruments.watch.intervals import union

CAPS = (0, 1, 2, 5, 10, 25, 50, 100, 200, 400, 1000)  # MiB


def draw_buckets() -> Figure:
    """The gradients in the order of backward, one message each, and in buckets."""
    figure = canvas(3.6)
    axes = figure.subplots()
    colour, left = TAG_COLOURS["gradients"], 0.0
    for name, p in reversed(parameters().items()):
        width, edge = p.nbytes / MIB, 0.8 if p.nbytes > MIB else 0
        axes.add_patch(Rectangle((left, 1.6), width, 0.8, facecolor=colour, edgecolor="white", linewidth=edge))
        if name.endswith("norm1.weight"):  # the last of its block
            axes.text(left - 13, 2.45, name.split(".")[1], ha="center", va="bottom", color=SOFT)
        left += width
    middle = left - width / 2
    axes.text(middle, 2.0, "embedding", ha="center", va="center", color=ink_on(colour))
    says = f"{len(parameters())} gradients of a {SIZE}, by block, last first"
    axes.text(0, 2.92, says, color=as_text(colour), fontweight="bold")
    axes.set(xlim=(0, left), ylim=(-0.1, 3.35))
    left = 0.0
    for number, size in enumerate(bucket_sizes(CAP)):
        width, shade = size / MIB, UNIT_COLOURS[number % 2]
        axes.add_patch(Rectangle((left, 0), width, 0.8, facecolor=shade, edgecolor="white", linewidth=2))
        look: Any = {"ha": "center", "va": "center"}
        axes.text(left + width / 2, 0.4, f"{width:.0f}" + " MiB" * (width > 50), color=ink_on(shade), **look)
        left += width
    says = f"{len(bucket_sizes(CAP))} buckets, closed at {CAP} MiB or more"
    axes.text(0, 0.92, says, color=UNIT_COLOURS[0], fontweight="bold")
    axes.axis("off")
    return figure


def _bars(run: Run, lane: str, gap: float) -> list[tuple[float, float]]:
    """Start and duration in ms, from the beginning of backward to that of the optimizer; joined over such gaps."""
    done = {mark.name: 1e3 * mark.done for mark in run.marks}
    spans = [(1e3 * span.start, 1e3 * span.end + gap) for span in run.spans if span.lane == lane]
    late = union(span for span in spans if done["backward"] - 1e-6 <= span[0] < done["optimizer"] - 1e-6)
    return [(start - done["backward"], end - gap - start) for start, end in late]


def draw_timeline() -> Figure:
    """Backward above, reductions below, for the three rungs: after backward, in buckets, during it."""
    figure = canvas(4.7)
    axes = figure.subplots()
    longest, reduce = 1e3 * backward_of(rung("naive")), COLLECTIVE_COLOURS["all-reduce"]
    for place, (kind, when) in enumerate({"naive": "after", "bucketed": "after", "ddp": "during"}.items()):
        y, end = -2.5 * place, 1e3 * backward_of(rung(kind))
        backward, *copies = _bars(rung(kind), "compute", 0.05)
        axes.broken_barh([backward], (y, 0.9), facecolors=LANE_COLOURS["compute"])
        axes.text(backward[1] / 2, y + 0.43, "backward", color="white", ha="center", va="center")
        axes.broken_barh(copies, (y, 0.9), facecolors=LANE_COLOURS["copy"])
        sent, edge = _bars(rung(kind), "communication", -1e-6), 1.0 if place else 0.3
        axes.broken_barh(sent, (y - 0.95, 0.9), facecolors=reduce, edgecolor="white", linewidth=edge)
        name = f"rung {place + 1}: {len(sent)} sent\n{when} backward"
        axes.text(-0.015 * longest, y - 0.03, name, ha="right", va="center")
        axes.text(end + 0.01 * longest, y - 0.03, f"{end:.1f} ms", va="center", fontweight="bold")
        if kind == "ddp":
            start, width = sent[-1]
            axes.text(start + width / 2, y - 0.5, f"{width:.1f} ms", ha="center", va="center", color="white")
        for start, width in copies[5:6]:
            axes.text(start + width / 2, y + 1.02, "copies", ha="center", color=as_text(LANE_COLOURS["copy"]))
    axes.text(9.3, -0.52, "all-reduces", ha="right", va="center", color=reduce)
    axes.text(1.12 * longest, -6.75, f"{SIZE}, {ON_PAPER}", color=SOFT, ha="right")
    axes.set(xlim=(-0.24 * longest, 1.12 * longest), ylim=(-6.9, 1.0))
    axes.axis("off")
    return figure


def draw_caps() -> Figure:
    """How long the last reductions outlast backward, over the size of a bucket."""
    figure = canvas(5.0)
    axes = figure.subplots()
    times, torchs = [1e3 * exposed(cap) for cap in CAPS], CAPS.index(CAP)
    axes.plot(times, "o-", color=GOOD, markersize=9)
    axes.plot(torchs, times[torchs], "o", color=GOOD, markersize=18)
    says = f"{times[torchs]:.1f} ms at torch's cap,\nas on the previous slides"
    axes.text(torchs, times[torchs] + 1.6, says, ha="center", color=GOOD, fontweight="bold")
    axes.text(0.25, times[0], f"{len(parameters())} latencies", va="center")
    axes.text(len(CAPS) - 1, times[-1] + 0.5, "no overlap", ha="right")
    floor = 1e3 * all_reduce(max(p.nbytes for p in parameters().values()))
    axes.axhline(floor, color=SOFT, linewidth=1.4, linestyle=(0, (4, 3)))
    axes.text(0, floor - 0.35, f"{floor:.1f} ms: the embedding, which comes last", va="top")
    axes.text(len(CAPS) - 1, 0.2, f"{SIZE},\n{ON_PAPER}", color=SOFT, ha="right", linespacing=1.05)
    axes.set_xticks(range(len(CAPS)), ["each\nalone", *map(str, CAPS[1:-1]), "all in\none"])
    axes.set(ylim=(0, 10.8), xlabel="bucket cap, MiB", ylabel="ms after the last gradient")
    return figure
