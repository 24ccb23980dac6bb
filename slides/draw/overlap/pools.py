"""Whose a freed block is: three units on two streams, and the blocks that the course's allocator gives them."""

from __future__ import annotations

from typing import Any

from draw.canvas import MIB, canvas
from draw.overlap.allocator import STILL_READ, Watched
from draw.overlap.drawing import bare, box
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minifsdp.instruments.machine import Program, Run, replay
from minifsdp.instruments.machine.hardware import Measured
from minifsdp.instruments.machine.program import (
    COMPUTE,
    Allocate,
    Buffer,
    Free,
    Instruction,
    Kernel,
    Record,
    RecordStream,
    Synchronize,
    WaitEvent,
)
from minifsdp.instruments.plots.palette import INK, LANE_COLOURS, PALE, SOFT, TAG_COLOURS, ink_on

GATHERS = 1  # a stream
QUEUEING = 0.4e-3  # seconds of the host for a piece of work
DEVICE = Measured("chosen", {}, 1.0, 2**40, 0.0, 1.0, launch=QUEUEING, segment=(0.0, 0.0))
LANES = {"host": 5.2, "gathers": 4.2, "compute": 3.2}
BLOCKS = {"block A": 1.9, "block B": 0.9, "block C": -0.1}


def unit(number: int) -> list[Instruction]:
    """Gather a unit, compute with it and an activation, and free both: the gathered block with its second reader."""
    whole, activation, gathered, read = 2 * number, 2 * number + 1, 2 * number, 2 * number + 1
    return [
        Allocate(whole, GATHERS),
        Kernel("gather", str(number), GATHERS, (), (whole,), 0.0, 0, 4, 2e-3),
        Record(gathered, GATHERS),
        WaitEvent(gathered, COMPUTE),
        Allocate(activation, COMPUTE),
        Kernel("compute", str(number), COMPUTE, (whole,), (activation,), 0.0, 0, 4, 3e-3),
        Record(read, COMPUTE),
        RecordStream(whole, COMPUTE),
        Free(whole),
        Free(activation),
    ]


def three_units() -> tuple[Run, Watched]:
    """The host queues two units, waits until the first has been computed, and queues a third."""
    buffers = {
        2 * n + k: Buffer(f"{n}", 32 * MIB, tag, str(n))
        for n in range(3)
        for k, tag in ((0, "unsharded"), (1, "activations"))
    }
    made = list[Watched]()

    def watched(capacity: int, queues: Any) -> Watched:
        made.append(Watched(capacity, queues))
        return made[0]

    return replay(Program([*unit(0), *unit(1), Synchronize(1), *unit(2)], buffers), DEVICE, watched), made[0]


def draw_pools() -> Figure:
    """Host and streams above, and below, on the same axis, the three blocks that serve all requests."""
    figure = canvas(5.0)
    axes = figure.subplots()
    run, allocator = three_units()
    draw_streams(axes, run)
    draw_block_lives(axes, allocator, 1e3 * run.done)
    bare(axes, LANES | BLOCKS, 1e3 * run.done, -0.6, 5.65)
    return figure


def draw_streams(axes: Axes, run: Run) -> None:
    """What the host queues, and when the streams do it."""
    pieces = [span for span in run.spans if span.lane != "wait"]
    waits = next(span for span in run.spans if span.lane == "wait")
    for number, span in enumerate(pieces):
        queued = QUEUEING * number + (waits.duration if QUEUEING * number >= waits.start else 0.0)
        lane, kind = ("compute", "compute") if span.lane == "compute" else ("gathers", "all-gather")
        box(axes, 1e3 * queued, LANES["host"], 1e3 * QUEUEING, kind, span.name)
        box(axes, 1e3 * span.start, LANES[lane], 1e3 * span.duration, kind, span.name)
    look: Any = {"facecolor": LANE_COLOURS["wait"], "edgecolor": "white"}
    axes.broken_barh([(1e3 * waits.start, 1e3 * waits.duration)], (LANES["host"] - 0.32, 0.64), **look)
    middle = 1e3 * (waits.start + waits.duration / 2)
    axes.text(middle, LANES["host"], "waits for compute 0", ha="center", va="center_baseline")
    axes.vlines(
        1e3 * waits.end, BLOCKS["block A"] - 0.36, LANES["compute"] - 0.32, colors=INK, linestyles="--", zorder=4
    )


def draw_block_lives(axes: Axes, allocator: Watched, over: float) -> None:
    """Each block, by its address: in use, freed and still read, or free."""
    gathers_first = [*allocator.places[::2], *allocator.places[1::2]]
    names = dict(zip(dict.fromkeys(gathers_first), BLOCKS, strict=True))
    for height in BLOCKS.values():
        axes.add_patch(Rectangle((0, height - 0.32), over, 0.64, facecolor=PALE))
    for buffer, ((asked, freed, free), place) in enumerate(zip(allocator.lives, allocator.places, strict=True)):
        bottom = BLOCKS[names[place]] - 0.32
        if free > freed:
            axes.add_patch(Rectangle((1e3 * freed, bottom), 1e3 * (free - freed), 0.64, **STILL_READ))
            words: Any = {"ha": "center", "va": "center", "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 2}}
            axes.text(500 * (freed + free), bottom + 0.32, f"freed, waits for compute {buffer // 2}", **words)
        colour = TAG_COLOURS["activations" if buffer % 2 else "unsharded"]
        axes.add_patch(
            Rectangle((1e3 * asked, bottom), 1e3 * (freed - asked), 0.64, facecolor=colour, edgecolor="white")
        )
        middle = 500 * (asked + freed)
        axes.text(middle, bottom + 0.32, str(buffer // 2), ha="center", va="center_baseline", color=ink_on(colour))
    last = 1e3 * allocator.lives[-1][1]
    axes.text(last + 0.2, BLOCKS["block C"], "yellow: activations, free at once", va="center", color=SOFT)
    axes.text(over - 0.1, BLOCKS["block B"], "blue: gathered", va="center", ha="right", color=SOFT)
