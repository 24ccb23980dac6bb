"""Expert parallelism: tokens go to the ranks of their experts, and come back."""

from __future__ import annotations

from typing import Any

from draw.canvas import canvas
from draw.fsdp.drawing import bare, box, say
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minifsdp.instruments.plots.palette import GATHER, INK, RANK_COLOURS, UNIT_COLOURS, ink_on

CHOSEN = ((0, 2, 1, 3), (2, 2, 0, 1))  # by rank, the expert of each of its tokens
PER_RANK = 2  # experts


def arrived() -> list[list[tuple[int, int]]]:
    """By rank the tokens of its experts: the rank that they come from, and the expert."""
    every = [(rank, expert) for rank, experts in enumerate(CHOSEN) for expert in experts]
    return [[each for each in every if each[1] // PER_RANK == rank] for rank in range(len(CHOSEN))]


def _token(axes: Axes, x: float, y: float, home: int, expert: int) -> None:
    colour = RANK_COLOURS[2 * home]
    box(axes, (x, y), 0.92, 0.9, colour)
    say(axes, x + 0.46, y + 0.45, f"{expert}", color=ink_on(colour))


def draw_experts() -> Figure:
    """Two ranks with two experts each: tokens, their experts, and the tokens back at home."""
    figure = canvas(3.75)
    axes = figure.subplots()
    there = arrived()
    look: Any = {"arrowstyle": "-|>", "color": GATHER, "lw": 2.4, "shrinkA": 0, "shrinkB": 0}
    lows = 3.0, 0.0
    for rank, low in enumerate(lows):
        say(axes, -0.3, low + 0.85, f"rank {rank}", ha="right")
        for place, expert in enumerate(CHOSEN[rank]):
            for left in (0.0, 19.6):
                _token(axes, left + place, low + 0.4, rank, expert)
        for slot in range(PER_RANK):
            expert = PER_RANK * rank + slot
            mine = [token for token in there[rank] if token[1] == expert]
            y = low + 1.05 - 1.2 * slot
            for place, token in enumerate(mine):
                _token(axes, 7.9 + place, y, *token)
            colour = UNIT_COLOURS[rank]
            box(axes, (11.3, y), 4.0, 0.9, colour)
            say(axes, 13.3, y + 0.45, f"expert {expert}", color=ink_on(colour))
        for other in lows:
            begin, end = low + 0.85, other + 0.85 + 0.12 * (low - other)
            axes.annotate("", (7.5, end), (4.3, begin), arrowprops=look)
            axes.annotate("", (19.2, end), (15.7, begin), arrowprops=look)
    for x, text in ((2.0, "tokens"), (13.3, "experts"), (21.6, "results")):
        say(axes, x, 5.5, text, color=INK)
    for x in (5.9, 17.4):
        say(axes, x, 5.5, "all-to-all", color=GATHER, fontweight="bold")
    bare(axes, (-2.1, 23.7), (-0.4, 6.0))
    return figure
