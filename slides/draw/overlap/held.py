"""References and events instead of `record_stream`: one block for the gathers of all units."""

from __future__ import annotations

from functools import cache
from typing import Any

from draw.canvas import MIB, canvas
from draw.overlap.drawing import bare, box
from draw.overlap.pools import DEVICE, GATHERS, QUEUEING
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minifsdp.instruments.machine import Program, Run, replay
from minifsdp.instruments.machine.program import (
    COMPUTE,
    Allocate,
    Buffer,
    Free,
    Instruction,
    Kernel,
    Record,
    WaitEvent,
)
from minifsdp.instruments.plots.palette import INK, TAG_COLOURS, ink_on
from minifsdp.instruments.watch.timeline import Span

UNITS = 3
LANES = {"host": 4.3, "gathers": 3.2, "compute": 2.1}
BLOCKS = {"block A": 0.7, "block B": -0.4}


def unit(number: int) -> list[Instruction]:
    """Gather into a buffer, copy it out into the parameters, compute; the buffer before is freed behind a wait."""
    gathered, whole, arrived, copied = 2 * number, 2 * number + 1, 2 * number, 2 * number + 1
    held: list[Instruction] = [WaitEvent(copied - 2, GATHERS), Free(gathered - 2)] if number else []
    return [
        *held,
        Allocate(gathered, GATHERS),
        Kernel("gather", str(number), GATHERS, (), (gathered,), 0.0, 0, 4, 2e-3),
        Record(arrived, GATHERS),
        WaitEvent(arrived, COMPUTE),
        Allocate(whole, COMPUTE),
        Kernel("copy out", str(number), COMPUTE, (gathered,), (whole,), 0.0, 0, 4, 1.2e-3),
        Record(copied, COMPUTE),
        Kernel("compute", str(number), COMPUTE, (whole,), (whole,), 0.0, 0, 4, 3e-3),
        Free(whole),
    ]


@cache
def three_units() -> Run:
    """The host queues everything at once; it waits for nothing."""
    buffers = {n: Buffer(f"{n}", 32 * MIB, "communication" if n % 2 == 0 else "unsharded") for n in range(2 * UNITS)}
    run = replay(Program([each for n in range(UNITS) for each in unit(n)], buffers), DEVICE)
    assert not run.hazards
    assert run.peak("reserved") == 2 * 32 * MIB  # blocks A and B
    return run


def draw_one_block() -> Figure:
    """Host and streams above; below, in the device's time, whose data the two blocks hold."""
    figure = canvas(4.3)
    axes = figure.subplots()
    spans = sorted(three_units().spans, key=lambda span: span.start)
    over = 1e3 * three_units().done
    names = dict(zip(("gather", "copy out", "compute"), ("all-gather", "copy", "compute"), strict=True))
    works = [list(names)[n % 3] for n in range(3 * UNITS)]  # in the host's order
    for place, work in enumerate(works):
        at = 1e3 * QUEUEING * place
        box(axes, at, LANES["host"], 1e3 * QUEUEING, names[work], "" if work == "copy out" else str(place // 3))
    axes.text(
        1e3 * QUEUEING * len(works) + 0.15,
        LANES["host"],
        "all queued, copies without a number; the host never waits",
        va="center_baseline",
    )
    gathers, copies, computes = (_spans(spans, work) for work in names)
    for number in range(UNITS):
        gather, copy, compute = gathers[number], copies[number], computes[number]
        box(axes, 1e3 * gather.start, LANES["gathers"], 1e3 * gather.duration, "all-gather", str(number))
        box(axes, 1e3 * copy.start, LANES["compute"], 1e3 * copy.duration, "copy", "copy")
        box(axes, 1e3 * compute.start, LANES["compute"], 1e3 * compute.duration, "compute", str(number))
        _holds(axes, "block A", gather.start, copy.end, "communication", number)
        _holds(axes, "block B", copy.start, compute.end, "unsharded", number)
    for copy, gather in zip(copies[:-1], gathers[1:], strict=True):
        arrow: Any = {"arrowstyle": "-|>", "color": INK, "linewidth": 2.4, "shrinkA": 0, "shrinkB": 0}
        begin, end = (1e3 * copy.end, LANES["compute"] + 0.33), (1e3 * gather.start, LANES["gathers"] - 0.33)
        axes.annotate("", end, begin, arrowprops=arrow)
        axes.text(1e3 * copy.end - 0.12, (begin[1] + end[1]) / 2, "event", ha="right", va="center")
    bare(axes, LANES | BLOCKS, over, -0.85, 4.75)
    return figure


def _spans(spans: list[Span], work: str) -> list[Span]:
    """Of one kind of work, by its length: the simulated GPU names a span by its unit."""
    lengths = {"gather": 2e-3, "copy out": 1.2e-3, "compute": 3e-3}
    return [span for span in spans if abs(span.duration - lengths[work]) < 1e-9]


def _holds(axes: Any, block: str, begin: float, end: float, tag: str, number: int) -> None:
    bottom = BLOCKS[block] - 0.32
    colour = TAG_COLOURS[tag]
    axes.add_patch(Rectangle((1e3 * begin, bottom), 1e3 * (end - begin), 0.64, facecolor=colour, edgecolor="white"))
    what = "gathered" if tag == "communication" else "parameters"
    style: Any = {"ha": "center", "va": "center_baseline", "color": ink_on(colour)}
    axes.text(500 * (begin + end), BLOCKS[block], f"{what} {number}", **style)
