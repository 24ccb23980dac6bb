"""Work that a host queues on streams, and where one stream waits for another."""

from __future__ import annotations

from math import hypot
from typing import Any, NamedTuple

from draw.canvas import canvas
from draw.overlap.drawing import COLOURS, bare, box
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from minifsdp.answers.lab06 import finish_times

from minifsdp.instruments.plots.palette import INK

QUEUEING = 0.4e-3  # seconds of the host for a piece, in `draw_queue`
WAITS = {("compute", "all-gather"): 1, ("all-gather", "compute"): 2, ("compute", "reduce-scatter"): 3}


class Piece(NamedTuple):
    """A piece of work that a host queues, as lab 06 has it."""

    name: str
    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    host_waits: bool = False


def forward_pieces() -> list[Any]:
    """Gather (2 ms) and compute (3 ms) of four units."""
    pieces: list[Any] = []
    for unit in "0123":
        pieces.append(Piece(unit, "all-gather", 2e-3))
        pieces.append(Piece(unit, "compute", 3e-3, (len(pieces) - 1,)))
    return pieces


def draw_queue() -> Figure:
    """The host queues eight pieces at once; each begins when its stream has come to it."""
    figure = canvas(4.8)
    axes = figure.subplots()
    pieces, heights = forward_pieces(), {"all-gather": 2.6, "host": 1.3, "compute": 0.0}
    ends, each = [1e3 * end for end in finish_times(pieces, QUEUEING)], 1e3 * QUEUEING
    for number, (piece, end) in enumerate(zip(pieces, ends, strict=True)):
        start, middle = end - 1e3 * piece.seconds, heights[piece.stream]
        side = 0.34 if piece.stream == "all-gather" else -0.34
        line: Any = {"color": COLOURS[piece.stream], "linewidth": 1.6, "zorder": 0}
        axes.plot([each * (number + 0.5), start + 0.1], [heights["host"] + side, middle - side], **line)
        box(axes, each * number, heights["host"], each, piece.stream, piece.name)
        box(axes, start, middle, 1e3 * piece.seconds, piece.stream, piece.name)
    queued, over = each * len(pieces), ends[-1]
    for at, middle, text in ((queued, 1.3, "all queued"), (over, -0.55, "all done")):
        side = "left" if middle > 0 else "right"
        axes.text(at + (0.15 if middle > 0 else 0), middle, f"{text} after {at:.1f} ms", va="center", ha=side)
    bare(axes, {"gathers": 2.6, "host": 1.3, "compute": 0.0}, over, -0.8, 3.0)
    return figure


def draw_waits() -> Figure:
    """A host, and three streams over a step of two units with the four kinds of places at which one waits."""
    figure = canvas(3.2)
    axes = figure.subplots()
    pieces: list[Any] = [
        Piece("step", "compute", 1.5),
        Piece("0", "all-gather", 1.5, (0,)),
        Piece("fwd 0", "compute", 2.0, (1,)),
        Piece("1", "all-gather", 1.5),
        Piece("fwd 1", "compute", 2.0, (3,)),
        Piece("1", "all-gather", 1.5),
        Piece("bwd 1", "compute", 3.0, (5,)),
        Piece("0", "all-gather", 1.5),
        Piece("1", "reduce-scatter", 1.5, (6,)),
        Piece("bwd 0", "compute", 3.0, (7,)),
        Piece("0", "reduce-scatter", 1.5, (9,)),
        Piece("step", "compute", 1.5, (10,)),
    ]
    heights, ends = {"all-gather": 2.3, "compute": 1.15, "reduce-scatter": 0.0}, finish_times(pieces, 0.0)
    each, host = 0.35, 3.25
    for number, piece in enumerate(pieces):
        box(axes, each * number, host, each, piece.stream, "")
    axes.text(each * len(pieces) + 0.2, host, "the host queues every operation and never waits", va="center_baseline")
    for piece, end in zip(pieces, ends, strict=True):
        begin, mine = end - piece.seconds, heights[piece.stream]
        box(axes, begin, mine, piece.seconds, piece.stream, piece.name)
        for earlier in piece.after:
            giver = pieces[earlier].stream
            side = 0.34 if mine < heights[giver] else -0.34
            arrow_from, arrow_to = (ends[earlier] - 0.1, heights[giver] - side), (begin + 0.1, mine + side)
            name_wait(axes, arrow_from, arrow_to, WAITS.get((giver, piece.stream), 4))
    bare(axes, {"host": host, "gathers": 2.3, "compute": 1.15, "reductions": 0.0}, ends[-1], -0.4, 3.65)
    return figure


def name_wait(axes: Axes, begin: tuple[float, float], end: tuple[float, float], number: int) -> None:
    """An arrow from what is waited for to what waits, with its number beside its middle, the farther the flatter."""
    arrow: Any = {"arrowstyle": "-|>", "color": INK, "shrinkA": 0, "shrinkB": 0, "linewidth": 1.8}
    axes.annotate("", end, begin, arrowprops=arrow)
    flatness = 0.75 * (end[0] - begin[0]) / (end[1] - begin[1])  # in inches: 0.75 of the axes' units
    middle = (begin[0] + end[0]) / 2 + 0.42 * hypot(1, flatness), (begin[1] + end[1]) / 2
    round_box: Any = {"boxstyle": "circle,pad=0.12", "facecolor": INK, "edgecolor": "none"}
    axes.text(*middle, str(number), ha="center", va="center", color="white", fontweight="bold", bbox=round_box)
