"""Work that a host queues on streams, and where one stream waits for another."""

from __future__ import annotations

from typing import Any, NamedTuple

from draw.canvas import canvas
from draw.overlap.drawing import COLOURS, bare, box
from matplotlib.figure import Figure

from minifsdp.course.plots.palette import INK, SERIES_COLOURS, SOFT
from minifsdp.course.reference.lab06 import finish_times

QUEUEING = 0.4e-3  # seconds of the host for a piece, in `draw_queue`


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
    pieces, heights = forward_pieces(), {"host": 2.6, "all-gather": 1.3, "compute": 0.0}
    ends = finish_times(pieces, QUEUEING)
    for number, (piece, end) in enumerate(zip(pieces, ends, strict=True)):
        queued, start, middle = 1e3 * QUEUEING * (number + 1), 1e3 * (end - piece.seconds), heights[piece.stream]
        axes.plot([queued, start + 0.06], [2.28, middle + 0.34], color=COLOURS[piece.stream], linewidth=1.2, zorder=0)
        box(axes, queued - 1e3 * QUEUEING, heights["host"], 1e3 * QUEUEING, "host", "")
        box(axes, start, middle, 1e3 * piece.seconds, piece.stream, piece.name)
    axes.text(queued + 0.15, heights["host"], f"all is queued after {queued:.1f} ms", va="center", color=SOFT)
    axes.text(1e3 * ends[-1], -0.5, f"over after {1e3 * ends[-1]:.1f} ms", ha="right", va="top", color=SOFT)
    bare(axes, {"host": 2.6, "stream of\ngathers": 1.3, "compute\nstream": 0.0}, 1e3 * ends[-1], -0.85, 3.0)
    return figure


def draw_waits() -> Figure:
    """Three streams over a step of two units, and the four kinds of places at which one waits for another."""
    figure = canvas(4.6)
    axes = figure.subplots()
    pieces: list[Any] = [
        Piece("step", "compute", 1.5),
        Piece("0", "all-gather", 1.5, (0,)),
        Piece("fwd 0", "compute", 2.0, (1,)),
        Piece("1", "all-gather", 1.5),
        Piece("fwd 1", "compute", 2.0, (3,)),
        Piece("1", "all-gather", 1.5),
        Piece("backward 1", "compute", 3.0, (5,)),
        Piece("0", "all-gather", 1.5),
        Piece("1", "reduce-scatter", 1.5, (6,)),
        Piece("backward 0", "compute", 3.0, (7,)),
        Piece("0", "reduce-scatter", 1.5, (9,)),
        Piece("step", "compute", 1.5, (10,)),
    ]
    kinds = [("compute", "all-gather"), ("all-gather", "compute"), ("compute", "reduce-scatter")]
    heights, ends = {"all-gather": 2.0, "compute": 1.0, "reduce-scatter": 0.0}, finish_times(pieces, 0.0)
    for piece, end in zip(pieces, ends, strict=True):
        begin, mine = end - piece.seconds, heights[piece.stream]
        box(axes, begin, mine, piece.seconds, piece.stream, piece.name)
        for earlier in piece.after:
            giver, over = pieces[earlier].stream, ends[earlier]
            edge = 0.32 if mine < heights[giver] else -0.32
            arrow: Any = {"arrowstyle": "-|>", "color": INK, "shrinkA": 0, "shrinkB": 0, "linewidth": 1.4}
            axes.annotate("", (begin + 0.1, mine + edge), (over - 0.1, heights[giver] - edge), arrowprops=arrow)
            pair = (giver, piece.stream)
            number = str(kinds.index(pair) + 1 if pair in kinds else 4)
            at = (over + begin) / 2 + 0.32, (heights[giver] + mine) / 2 + 0.04
            axes.text(*at, number, ha="center", va="center", color=SERIES_COLOURS[0], fontweight="bold")
    bare(axes, {"gathers": 2.0, "compute": 1.0, "reductions": 0.0}, ends[-1], -0.4, 2.4)
    return figure
