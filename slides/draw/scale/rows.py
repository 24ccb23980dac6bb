"""Rank order and parameter order: the copies before and after a collective."""

from __future__ import annotations

from draw.canvas import canvas
from draw.fsdp.drawing import bare, box, padding_box, say
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minifsdp.instruments.plots.palette import GATHER, INK, REDUCE, SOFT, UNIT_COLOURS, ink_on

# w [5, ...] and b [4] over two ranks; each letter is a row of w or two elements of b
W, B = UNIT_COLOURS[0], UNIT_COLOURS[2]
ROWS = ((("w0", "w1", "w2"), ("b0", "b1")), (("w3", "w4", ""), ("b2", "b3")))
CELL = 1.0


def _cell(axes: Axes, x: float, y: float, name: str) -> None:
    if not name:
        padding_box(axes, (x, y), 0.96 * CELL, 0.8)
        return
    colour = W if name[0] == "w" else B
    box(axes, (x, y), 0.96 * CELL, 0.8, colour)
    say(axes, x + 0.48 * CELL, y + 0.4, name, color=ink_on(colour))


def _cells(axes: Axes, x: float, y: float, names: tuple[str, ...]) -> float:
    for number, name in enumerate(names):
        _cell(axes, x + number * CELL, y, name)
    return x + len(names) * CELL


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = INK) -> None:
    look = {"arrowstyle": "-|>", "color": colour, "lw": 2.4, "shrinkA": 2, "shrinkB": 2}
    axes.annotate("", end, start, arrowprops=look)


def draw_rows() -> Figure:
    """From shards to rows, one all-gather, and from rows to unsharded parameters."""
    figure = canvas(4.6)
    axes = figure.subplots()
    for rank, (weight, bias) in enumerate(ROWS):
        top = 6.4 - 1.5 * rank
        say(axes, -0.3, top + 0.4, f"rank {rank}", ha="right")
        there = tuple(name for name in weight if name)
        _cells(axes, 0, top, there)
        _cells(axes, 3.4, top, bias)
        _arrow(axes, (5.7, top + 0.4), (7.2, top + 0.4))
        _cells(axes, 7.4, top, (*weight, *bias, ""))
    say(axes, 2.7, 7.75, "shards (DTensors)", color=SOFT)
    say(axes, 10.4, 7.75, "one row each, in rank order", color=SOFT)
    say(axes, 6.45, 7.15, "copy-in", fontsize=18)
    _arrow(axes, (10.4, 4.7), (10.4, 3.75), GATHER)
    say(axes, 10.8, 4.25, "one all-gather", ha="left", color=INK)
    after = _cells(axes, 4.4, 2.75, (*ROWS[0][0], *ROWS[0][1], ""))
    _cells(axes, after, 2.75, (*ROWS[1][0], *ROWS[1][1], ""))
    say(axes, 4.1, 3.15, "on every rank", ha="right")
    _arrow(axes, (10.4, 2.6), (10.4, 1.55))
    say(axes, 10.8, 2.07, "copy-out", ha="left")
    end = _cells(axes, 4.4, 0.55, (*ROWS[0][0], *ROWS[1][0]))
    _cells(axes, end + 0.6, 0.55, (*ROWS[0][1], *ROWS[1][1]))
    say(axes, 4.1, 0.95, "parameter order", ha="right")
    say(axes, 7.0, 0.1, "w, then its padding", color=SOFT)
    say(axes, end + 2.6, 0.1, "b", color=SOFT)
    bare(axes, (-2.2, 17.0), (-0.3, 8.1))
    return figure


def draw_pack() -> Figure:
    """A rank's gradients, packed by rank for one reduce-scatter."""
    figure = canvas(3.75)
    axes = figure.subplots()
    say(axes, -0.3, 4.4, "gradients", ha="right")
    end = _cells(axes, 0, 4.0, ("w0", "w1", "w2", "w3", "w4"))
    _cells(axes, end + 0.8, 4.0, ("b0", "b1", "b2", "b3"))
    say(axes, 2.5, 5.15, "as autograd produced them", color=SOFT)
    _arrow(axes, (4.9, 3.85), (4.9, 2.95))
    say(axes, 5.3, 3.4, "chunk, pad with zeros, concatenate: one buffer", ha="left")
    say(axes, -0.3, 2.45, "packed", ha="right")
    after = _cells(axes, 0, 2.05, (*ROWS[0][0], *ROWS[0][1], ""))
    _cells(axes, after + 0.3, 2.05, (*ROWS[1][0], *ROWS[1][1], ""))
    _arrow(axes, (3.0, 1.9), (3.0, 0.95), REDUCE)
    _arrow(axes, (9.3, 1.9), (9.3, 0.95), REDUCE)
    say(axes, 6.15, 1.4, "one reduce-scatter", color=INK)
    say(axes, -0.3, 0.45, "mean", ha="right")
    _cells(axes, 0, 0.05, (*ROWS[0][0], *ROWS[0][1], ""))
    _cells(axes, after + 0.3, 0.05, (*ROWS[1][0], *ROWS[1][1], ""))
    say(axes, 3.0, -0.35, "to rank 0", color=SOFT)
    say(axes, 9.3, -0.35, "to rank 1", color=SOFT)
    bare(axes, (-2.6, 16.2), (-0.6, 5.5))
    return figure
