"""One matrix product, split by columns and by rows: the smallest example there is."""

from __future__ import annotations

from collections.abc import Callable

from draw.canvas import canvas
from draw.fsdp.drawing import bare, box, say
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minifsdp.instruments.plots.palette import COLLECTIVE_COLOURS, INK, PALE, RANK_COLOURS, SOFT, ink_on

X, W = [[1, 2, 3], [4, 5, 6]], [[1, 2], [3, 4], [5, 6]]
RANKS = (RANK_COLOURS[0], RANK_COLOURS[2])  # of ranks 0 and 1: two that are far apart
EVERYWHERE = PALE  # on every rank
CELL = 0.86

Matrix = list[list[int]]


def _times(a: Matrix, b: Matrix) -> Matrix:
    return [[sum(p * q for p, q in zip(row, column, strict=True)) for column in zip(*b, strict=True)] for row in a]


def _matrix(axes: Axes, left: float, middle: float, values: Matrix, colour: Callable[[int, int], str] | str) -> float:
    """Cells around a height; returns where the matrix ends."""
    top = middle + CELL * len(values) / 2
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            fill = colour if isinstance(colour, str) else colour(i, j)
            box(axes, (left + CELL * j, top - CELL * (i + 1)), CELL, CELL, fill)
            say(axes, left + CELL * (j + 0.5), top - CELL * (i + 0.5), str(value), color=ink_on(fill))
    return left + CELL * len(values[0])


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = INK) -> None:
    look = {"arrowstyle": "-|>", "color": colour, "lw": 2.4, "shrinkA": 2, "shrinkB": 2}
    axes.annotate("", end, start, arrowprops=look)


def draw_product() -> Figure:
    """By columns, where shards are put side by side; by rows, where partial sums are added."""
    figure = canvas(4.9)
    axes = figure.subplots()
    cut = 2  # rows of w on rank 0, as `torch.chunk` cuts three for two ranks
    summands = [_times([row[part] for row in X], W[part]) for part in (slice(0, cut), slice(cut, 3))]
    product = _times(X, W)
    rows = (
        (4.15, "by columns", lambda i, j: EVERYWHERE, lambda i, j: RANKS[j], "all-gather"),
        (0.55, "by rows", lambda i, j: RANKS[j >= cut], lambda i, j: RANKS[i >= cut], "all-reduce"),
    )
    for y, title, of_x, of_w, collective in rows:
        say(axes, -0.2, y, title, ha="right", fontweight="bold")
        end = _matrix(axes, 0.2, y, X, of_x)
        say(axes, end + 0.4, y, "×")
        end = _matrix(axes, end + 0.8, y, W, of_w)
        say(axes, end + 0.4, y, "=")
        end += 0.8
        if collective == "all-gather":
            for rank, colour in enumerate(RANKS):
                end = _matrix(axes, end, y, [[row[rank]] for row in product], colour) + 0.7
        else:
            end = _matrix(axes, end, y, summands[0], RANKS[0])
            say(axes, end + 0.35, y, "+")
            end = _matrix(axes, end + 0.7, y, summands[1], RANKS[1]) + 0.7
        arrow(axes, (12.0, y), (14.2, y), COLLECTIVE_COLOURS[collective])
        say(axes, 13.05, y + 0.5, collective)
        _matrix(axes, 14.5, y, product, EVERYWHERE)
    for x, name in ((0.2 + 1.5 * CELL, "x"), (0.2 + 4 * CELL + 0.8, "w")):
        say(axes, x, 5.85, name, color=SOFT)
    for left, colour, text in ((0.2, RANKS[0], "rank 0"), (4.0, RANKS[1], "rank 1"), (7.8, EVERYWHERE, "on both")):
        box(axes, (left, -1.75), CELL, 0.6, colour)
        say(axes, left + 1.1, -1.45, text, ha="left")
    bare(axes, (-2.9, 16.4), (-1.9, 6.2))
    return figure
