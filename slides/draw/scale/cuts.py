"""Where a flat parameter and a parameter of its own are cut, and what is padded."""

from __future__ import annotations

import torch
from draw.canvas import canvas
from draw.fsdp.drawing import bare, box, say
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minifsdp.course.ladder.measure import Settings
from minifsdp.fsdp2.cut import Cut, Rows
from minifsdp.instruments.plots.palette import RANK_COLOURS, SERIES_COLOURS, SOFT, as_text, ink_on

RANKS = 4
WEIGHT, BIAS = (7, 6), (7,)
LAB = Settings(layers=1, width=105, context=16)


def starts() -> str:
    """Where rank 1's shard of lab 12's block begins, in words."""
    block = LAB.model().blocks[0]
    offset = -(-sum(p.numel() for p in block.parameters()) // RANKS)
    for name, p in block.named_parameters():
        if offset < p.numel():
            row, element = divmod(offset, p[0].numel())
            return f"`{name}` {list(p.shape)}, row {row}, element {element}"
        offset -= p.numel()
    raise ValueError("a shard begins in padding")


def _cells(axes: Axes, left: float, owners: list[list[int]]) -> None:
    """A matrix, each element in its rank's colour."""
    for row, ranks in enumerate(owners):
        for column, rank in enumerate(ranks):
            box(axes, (left + column, -row), 0.96, 0.94, RANK_COLOURS[rank])


def draw_chunks() -> Figure:
    """A layer's weight and bias over four ranks: as one flat parameter, and each by itself."""
    figure = canvas(4.6)
    axes = figure.subplots()
    (rows, columns), whole = WEIGHT, WEIGHT[0] * WEIGHT[1] + BIAS[0]
    shard = -(-whole // RANKS)
    flat = [[(row * columns + column) // shard for column in range(columns)] for row in range(rows)]
    flat_bias = [[(rows * columns + row) // shard] for row in range(rows)]
    cut = -(-rows // RANKS)
    for left, title, weight, bias in (
        (0, "one flat parameter", flat, flat_bias),
        (13, "per parameter", [[row // cut] * columns for row in range(rows)], [[row // cut] for row in range(rows)]),
    ):
        say(axes, left + 4.2, 2.1, title, fontweight="bold")
        _cells(axes, left, weight)
        _cells(axes, left + 7.4, bias)
        say(axes, left + 3, 1.35, f"weight {list(WEIGHT)}", color=SOFT)
        say(axes, left + 7.9, 1.35, "bias", color=SOFT)
    for rank, colour in enumerate(RANK_COLOURS):
        box(axes, (2.2 + 4.6 * rank, -7.9), 1.0, 0.8, colour)
        say(axes, 3.5 + 4.6 * rank, -7.5, f"rank {rank}", ha="left")
    bare(axes, (-0.3, 22.0), (-8.1, 2.7))
    return figure


def draw_rows_of_ranks() -> Figure:
    """Parameters of 8, 7, 5 and 1 rows on four ranks: which rank holds which rows."""
    figure = canvas(3.5)
    axes = figure.subplots()
    wide, cell = 5.6, 1.7
    for rank in range(RANKS):
        say(axes, wide * rank + 2.1, 1.35, f"rank {rank}", fontweight="bold")
    for line, rows in enumerate((8, 7, 5, 1)):
        say(axes, -0.5, 0.4 - line, f"{rows} row{'s' * (rows > 1)}", ha="right")
        cut = Cut(torch.Size([rows]), 0, RANKS)
        for rank, colour in enumerate(RANK_COLOURS):
            left, (held,) = wide * rank, cut.local(rank)
            for row in range(held):
                box(axes, (left + cell * row, -line), cell, 0.78, colour)
                say(axes, left + cell * (row + 0.5), 0.39 - line, str(rank * cut.rows + row), color=ink_on(colour))
            if not held:
                box(axes, (left, -line), 2 * cell, 0.78, "white", edgecolor=SOFT, linestyle=(0, (3, 3)))
                say(axes, left + cell, 0.39 - line, "empty", color=SOFT)
    bare(axes, (-3.2, 21.2), (-3.2, 1.8))
    return figure


def _share(shapes: list[tuple[int, ...]], ranks: int, itemsize: int) -> float:
    """Bytes of padding and gaps, as a part of the parameters' bytes."""
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    cuts = [Cut(torch.Size(shape), 0, ranks) for shape in shapes]
    used = sum(torch.Size(shape).numel() for shape in shapes)
    return Rows(cuts, ranks, [dtype] * len(cuts)).numel / used - 1


def draw_padding() -> Figure:
    """Padding over the number of ranks, for the lab's odd block and for one of an even width."""
    figure = canvas(3.7)
    axes = figure.subplots()
    powers = [2**k for k in range(1, 11)]
    widths = {"width 1,024": Settings(layers=1, width=1024, context=16), "width 105": LAB}
    for (name, settings), colour in zip(widths.items(), SERIES_COLOURS, strict=False):
        shapes = [tuple(p.shape) for p in settings.model().blocks[0].parameters()]
        shares = [100 * _share(shapes, ranks, 4) for ranks in powers]
        axes.plot(powers, shares, "o-", color=colour, clip_on=False)
        say(axes, powers[-1] * 1.2, max(shares[-1], 45), name, ha="left", color=as_text(colour), fontweight="bold")
    axes.set_xscale("log", base=2)
    axes.set_xticks(powers, [f"{ranks:,}" for ranks in powers])
    axes.set_xlim(1.7, 1200)
    axes.set_ylim(0, 490)
    axes.set_yticks([0, 200, 400], ["0 %", "200 %", "400 %"])
    axes.set_xlabel("ranks")
    axes.set_ylabel("padding, share of\na block's bytes")
    axes.grid(axis="y")
    return figure
