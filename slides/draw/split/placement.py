"""Layers on ranks: by number, and so that the slowest stage is as fast as possible."""

from __future__ import annotations

from collections.abc import Sequence

from draw.canvas import canvas
from draw.fsdp.drawing import bare, box, say
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minifsdp.instruments.plots.palette import RANK_COLOURS, SOFT, ink_on
from minifsdp.pipeline import divide

BLOCKS, WIDTH, VOCABULARY, RANKS = 6, 96, 2304, 4  # the model of lab 14
NAMES = ["embed", *map(str, range(BLOCKS)), "head"]
BLOCK = 12 * WIDTH**2
COSTS = [0.0, *[1.0] * BLOCKS, WIDTH * VOCABULARY / BLOCK]  # products with weights, of a block's


def _row(axes: Axes, top: float, title: str, placed: Sequence[Sequence[str]]) -> None:
    cost = dict(zip(NAMES, COSTS, strict=True))
    stages = [sum(cost[name] for name in names) for names in placed]
    left = 0.0
    say(axes, -0.15, top + 1.05, title, ha="left", va="bottom", fontweight="bold")
    for rank, (names, colour) in enumerate(zip(placed, RANK_COLOURS, strict=True)):
        begin = left
        for name in names:
            width = max(cost[name], 0.14)
            box(axes, (left, top), width, 0.9, colour)
            if cost[name]:
                word = f"block {name}" if name.isdigit() else name
                say(axes, left + width / 2, top + 0.45, word, color=ink_on(colour))
            left += width
        look = {"fontweight": "bold"} if stages[rank] == max(stages) else {"color": SOFT}
        says = f"rank {rank}: {stages[rank]:g}"
        say(axes, (begin + left) / 2, top - 0.12, says, va="top", **look)
        left += 0.12


def draw_placement() -> Figure:
    """The layers of lab 14's model on four ranks, as wide as the time that they take."""
    figure = canvas(4.2)
    axes = figure.subplots()
    each = len(NAMES) // RANKS
    _row(axes, 2.4, "two layers on each rank", [NAMES[each * rank : each * (rank + 1)] for rank in range(RANKS)])
    _row(axes, 0.0, "the slowest stage as fast as possible", divide(NAMES, RANKS, COSTS))
    says = "Width: time of a layer. Numbers: time of a rank, in block times."
    say(axes, -0.15, -0.95, says, ha="left", color=SOFT)
    bare(axes, (-0.2, 8.7), (-1.25, 4.0))
    return figure
