"""What an allocator may give to a request: its own stream's free blocks, and no other memory."""

from __future__ import annotations

from typing import Any

from draw.canvas import canvas
from draw.fsdp.drawing import bare, box, say
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minifsdp.instruments.plots.palette import BLOCK_COLOURS, GATHER, INK, OUTCOME_COLOURS, SOFT, ink_on

RIGHT, WRONG = OUTCOME_COLOURS["right"], OUTCOME_COLOURS["wrong"]
LABELS = {"in use": "in use", "waiting": "freed, waits\nfor compute", "free": "free"}
POOLS = {  # lane: (its height, blocks from the left: state, and where it ends)
    "gather\nstream": (3.6, [("in use", 7.4), ("waiting", 13.0), ("free", 17.4)]),
    "compute\nstream": (0.4, [("in use", 11.2), ("free", 17.4)]),
}
LEFT, TALL = 3.4, 1.6


def draw_rules() -> Figure:
    """A gather asks for memory, beside the blocks of two streams: which of them it gets, and which it does not."""
    figure = canvas(4.4)
    axes = figure.subplots()
    for lane, (bottom, blocks) in POOLS.items():
        say(axes, LEFT - 0.25, bottom + TALL / 2, lane, ha="right")
        left = LEFT
        for state, right in blocks:
            colour = BLOCK_COLOURS[state]
            box(axes, (left, bottom), right - left, TALL, colour)
            say(axes, (left + right) / 2, bottom + TALL / 2, LABELS[state], color=ink_on(colour))
            left = right
        frame: Any = {"edgecolor": INK, "linewidth": 1.6, "fill": False}
        box(axes, (LEFT, bottom), left - LEFT, TALL, "none", **frame)
    box(axes, (19.4, 3.6), 6.0, TALL, "none", edgecolor=INK, linewidth=1.6, linestyle="--", fill=False)
    say(axes, 22.4, 3.6 + TALL / 2, "a new segment")
    box(axes, (8.4, 7.4), 11.2, 1.1, GATHER)
    say(axes, 14.0, 7.95, "the next gather requests a block", color=ink_on(GATHER))
    axes.plot([18.4, 18.4], [7.3, 1.2], color=WRONG, linewidth=2.6)
    for begin, end, text, at, side, colour in (
        ((10.2, 7.3), (10.2, 5.3), "not yet", (9.9, 6.4), "right", WRONG),
        ((15.2, 7.3), (15.2, 5.3), "right away", (14.9, 6.4), "right", RIGHT),
        ((18.4, 1.2), (17.5, 1.2), "never: another stream", (18.8, 1.2), "left", WRONG),
        ((19.4, 7.3), (21.4, 5.3), "if nothing fits:\nslow cudaMalloc", (20.9, 6.7), "left", INK),
    ):
        _arrow(axes, begin, end, colour)
        say(axes, *at, text, ha=side, color=colour, fontweight="bold")
    say(axes, LEFT, -0.25, "a frame is a segment, split into memory blocks", ha="left", color=SOFT)
    bare(axes, (0.0, 26.8), (-0.6, 8.6))
    return figure


def _arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    look: Any = {"arrowstyle": "-|>", "color": colour, "linewidth": 2.6, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, begin, arrowprops=look)
