"""A parameter in two layouts: parts in the files of a checkpoint, parts that ranks want, and the reads between them."""

from __future__ import annotations

from typing import Any

from draw.canvas import canvas
from draw.fsdp.drawing import bare, box, say
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from minifsdp.answers.lab15 import reads

from minifsdp.instruments.plots.palette import INK, SOFT, UNIT_COLOURS, ink_on

NAME, SHAPE = "down.weight", (6, 8)
SAVED, WANTED = 2, 3  # ranks of tp, which cut columns; ranks of FSDP2, which cut rows
Box = tuple[tuple[int, int], ...]


def _cut(dim: int, ranks: int) -> list[Box]:
    """Each rank's part of the parameter."""
    share, found = -(-SHAPE[dim] // ranks), list[Box]()
    for rank in range(ranks):
        interval = rank * share, min((rank + 1) * share, SHAPE[dim])
        found.append(((0, SHAPE[0]), interval) if dim else (interval, (0, SHAPE[1])))
    return found


def plan() -> list[list[Any]]:
    """Of each rank its reads, by the answer of exercise 15.9."""
    files = [{NAME: part} for part in _cut(1, SAVED)]
    return [reads(files, {NAME: part}) for part in _cut(0, WANTED)]


def _part(axes: Axes, left: float, low: float, rows: int, columns: int, colour: str, text: str) -> None:
    box(axes, (left, low), 0.97 * columns, 0.95 * rows, colour)
    say(axes, left + columns / 2, low + rows / 2, text, color=ink_on(colour))


def draw_boxes() -> Figure:
    """Left the files, right the ranks' new parts, each in the boxes that they have in common with a file."""
    figure = canvas(4.5)
    axes = figure.subplots()
    for file, ((top, bottom), (first, end)) in enumerate(_cut(1, SAVED)):
        _part(axes, 1.3 * file + first, 0.0, bottom - top, end - first, UNIT_COLOURS[2 * file], f"file {file}")
    say(axes, 4.6, 7.2, f"saved on tp = {SAVED}", fontweight="bold")
    say(axes, 4.6, 6.5, "parts are columns", color=SOFT)
    left, gap = 16.0, 0.7
    for rank, (of_rank, ((top, _), _)) in enumerate(zip(plan(), _cut(0, WANTED), strict=True)):
        for file, name, source, target in of_rank:
            assert name == NAME
            rows, columns = target
            low = SHAPE[0] - top - rows.stop - gap * rank + gap
            says = f"rows {source[0].start}–{source[0].stop - 1}"
            height, wide = rows.stop - rows.start, columns.stop - columns.start
            _part(axes, left + columns.start, low, height, wide, UNIT_COLOURS[2 * file], says)
        say(axes, left - 0.3, low + height / 2, f"rank {rank}", ha="right")
    say(axes, left + 4, 7.2, f"wanted on FSDP2 with {WANTED} ranks", fontweight="bold")
    look: Any = {"arrowstyle": "-|>", "color": INK, "lw": 3}
    axes.annotate("", (13.0, 3.0), (10.4, 3.0), arrowprops=look)
    count = {len(of_rank) for of_rank in plan()}
    say(axes, 11.7, 4.4, "each rank\nreads", color=INK)
    say(axes, 11.7, 1.8, f"{count.pop()} boxes", color=INK, fontweight="bold")
    assert not count
    bare(axes, (-0.1, 24.6), (-1.0, 7.6))
    return figure
