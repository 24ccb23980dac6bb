"""Buckets: which gradients they hold, when they are reduced, and how large they should be."""

from __future__ import annotations

from typing import Any

from draw.canvas import MIB, canvas
from draw.ddp.drawing import GOOD
from draw.ddp.runs import ON_PAPER, all_reduce, backward_of, bucket_sizes, exposed, parameters, rung
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minifsdp.course.machine import Run
from minifsdp.course.plots.palette import LANE_COLOURS, REDUCE, SOFT, TAG_COLOURS, as_text, ink_on
from minifsdp.course.watch.intervals import union

CAPS = (0, 1, 2, 5, 10, 25, 50, 100, 200, 400, 1000)  # MiB


def draw_buckets() -> Figure:
    """The gradients in the order of backward, one message each, and in buckets."""
    figure = canvas(4.4)
    axes = figure.subplots()
    colour, left = TAG_COLOURS["gradients"], 0.0
    for name, p in reversed(parameters().items()):
        width, edge = p.nbytes / MIB, 0.8 if p.nbytes > MIB else 0
        axes.add_patch(Rectangle((left, 1.5), width, 0.8, facecolor=colour, edgecolor="white", linewidth=edge))
        if name.endswith("norm1.weight"):  # the last of its block
            axes.text(left - 14, 2.36, name.split(".")[1], ha="center", va="bottom", color=SOFT)
        left += width
    middle = left - width / 2
    axes.text(middle, 1.9, "embedding,\nwhich is the head", ha="center", va="center", color=ink_on(colour))
    axes.text(
        0, 2.75, f"{len(parameters())} gradients in the order of backward, and their blocks", color=as_text(colour)
    )
    axes.set(xlim=(0, left), ylim=(-0.6, 3.2))
    left = 0.0
    for number, size in enumerate(bucket_sizes(25)):
        width = size / MIB
        look: Any = {"ha": "center"}
        box = Rectangle((left, 0), width, 0.8, facecolor=REDUCE, edgecolor="white", linewidth=2)
        axes.add_patch(box)
        axes.text(left + width / 2, 0.4, str(number), va="center", color="white", **look)
        axes.text(left + width / 2, -0.1, f"{width:.0f}", va="top", color=SOFT, **look)
        left += width
    axes.text(0, 0.95, f"{len(bucket_sizes(25))} buckets, and their MiB", color=REDUCE)
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
    figure = canvas(5.0)
    axes = figure.subplots()
    longest = 1e3 * backward_of(rung("naive"))
    rungs = {"naive": "one each,\nafterwards", "bucketed": "buckets,\nafterwards", "ddp": "buckets,\nduring it"}
    for place, (kind, name) in enumerate(rungs.items()):
        y, end = -2.6 * place, 1e3 * backward_of(rung(kind))
        axes.broken_barh(_bars(rung(kind), "compute", 0.05), (y, 0.8), facecolors=LANE_COLOURS["compute"])
        sent, edge = _bars(rung(kind), "communication", -1e-6), 1.0 if place else 0.3
        axes.broken_barh(sent, (y - 0.95, 0.8), facecolors=REDUCE, edgecolor="white", linewidth=edge)
        axes.text(-0.015 * longest, y - 0.1, name, ha="right", va="center")
        axes.text(end + 0.01 * longest, y - 0.1, f"{end:.1f} ms", va="center", fontsize=20)
    for start, _ in sent:
        axes.plot([start, start], [y, y + 0.8], color="white", linewidth=1.4)
    axes.text(0.72 * longest, y - 0.1, "white lines: a bucket is full", color=SOFT, va="center")
    axes.text(0, 0.95, "backward", color=LANE_COLOURS["compute"])
    axes.text(0.19 * longest, 0.95, "all-reduces", color=REDUCE)
    axes.text(1.14 * longest, -7.2, ON_PAPER, color=SOFT, ha="right")
    axes.set(xlim=(-0.16 * longest, 1.14 * longest), ylim=(-7.4, 1.6))
    axes.axis("off")
    return figure


def draw_caps() -> Figure:
    """How long the last reductions outlast backward, over the size of a bucket."""
    figure = canvas(4.8)
    axes = figure.subplots()
    times = [1e3 * exposed(cap) for cap in CAPS]
    axes.plot(times, "o-", color=GOOD)
    torchs = CAPS.index(25)
    line = {"arrowstyle": "-", "color": SOFT}
    axes.annotate("torch's default", (torchs, times[torchs] + 0.2), (torchs, 5.6), ha="center", arrowprops=line)
    floor = 1e3 * all_reduce(max(p.nbytes for p in parameters().values()))
    axes.axhline(floor, color=SOFT, linewidth=1.4, linestyle=(0, (4, 3)))
    axes.text(0, floor - 0.35, f"{floor:.1f} ms: the embedding alone, which comes last", va="top", color=SOFT)
    axes.text(len(CAPS) - 1, 0.4, ON_PAPER, color=SOFT, ha="right")
    axes.set_xticks(range(len(CAPS)), ["each\nalone", *map(str, CAPS[1:-1]), "all in\none"])
    axes.set(ylim=(0, 10.5), xlabel="a bucket is closed at ... MiB", ylabel="ms after backward")
    return figure
