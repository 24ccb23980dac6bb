"""A transformer block on tensor-parallel ranks: what is sharded, and where it all-reduces."""

from __future__ import annotations

from draw.canvas import canvas
from draw.fsdp.drawing import bare, box, say
from draw.split.product import EVERYWHERE, RANKS, arrow
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minifsdp.instruments.plots.palette import COLLECTIVE_COLOURS, GATHER, INK, REDUCE, SOFT, WHITE, ink_on

SUM = COLLECTIVE_COLOURS["all-reduce"]
LANES = (2.2, 0.9)  # heights of ranks 0 and 1
HALF = 0.45  # of a lane


def _lane_boxes(axes: Axes, left: float, width: float, text: str, whole: bool = False) -> None:
    """A layer on both ranks."""
    for y, colour in zip(LANES, RANKS, strict=True):
        fill = EVERYWHERE if whole else colour
        box(axes, (left, y - HALF), width, 2 * HALF, fill)
        say(axes, left + width / 2, y, text, color=ink_on(fill))


def _bar(axes: Axes, x: float, letter: str, colour: str, width: float = 0.5) -> None:
    """A message between the ranks."""
    bottom, top = LANES[1] - HALF, LANES[0] + HALF
    box(axes, (x, bottom), width, top - bottom, colour)
    say(axes, x + width / 2, (bottom + top) / 2, letter, color=ink_on(colour), fontweight="bold")


def draw_f_g() -> Figure:
    """The MLP between f and g, forward and backward."""
    figure = canvas(3.3)
    axes = figure.subplots()
    for rank, y in enumerate(LANES):
        say(axes, -0.3, y, f"rank {rank}", ha="right")
    _lane_boxes(axes, 0.0, 1.5, "x", whole=True)
    _lane_boxes(axes, 2.6, 3.0, "up: columns")
    _lane_boxes(axes, 5.7, 1.5, "gelu")
    _lane_boxes(axes, 7.3, 3.0, "down: rows")
    _lane_boxes(axes, 11.4, 1.5, "y", whole=True)
    for x, letter in ((1.8, "f"), (10.6, "g")):
        _bar(axes, x, letter, INK)
    for y, name, start, end, marks in (
        (3.75, "forward", 0.2, 12.7, {2.05: "a copy", 10.85: "all-reduce"}),
        (-0.75, "backward", 12.7, 0.2, {2.05: "all-reduce", 10.85: "a copy"}),
    ):
        say(axes, -0.3, y, name, ha="right", fontweight="bold")
        arrow(axes, (start, y), (end, y))
        for x, text in marks.items():
            fill = SUM if text == "all-reduce" else WHITE
            axes.text(
                x,
                y,
                text,
                ha="center",
                va="center",
                color=ink_on(fill),
                bbox={"facecolor": fill, "edgecolor": INK, "pad": 6},
            )
    bare(axes, (-2.6, 13.2), (-1.4, 4.3))
    return figure


def _block(axes: Axes, sequence: bool) -> None:
    """Both halves of a block; between g and f on all tokens, or on a shard of them."""
    for rank, y in enumerate(LANES):
        say(axes, -0.25, y, f"rank {rank}", ha="right")
    left = 0.0
    for first, inner, last in (("qkv", "heads", "out"), ("up", "gelu", "down")):
        _between(axes, left, sequence)
        left += 2.3
        _bar(axes, left, "f", GATHER if sequence else SOFT)
        for text, width in ((first, 1.05), (inner, 1.35), (last, 1.15)):
            _lane_boxes(axes, left + 0.6, width, text)
            left += width + 0.08
        _bar(axes, left + 0.64, "g", REDUCE if sequence else SUM)
        left += 1.3


def _between(axes: Axes, left: float, sequence: bool) -> None:
    """Residual sum and norm."""
    width = 2.15
    if not sequence:
        _lane_boxes(axes, left, width, "+ norm", whole=True)
        return
    for y, colour in zip(LANES, RANKS, strict=True):
        place = 0 if y == LANES[0] else 1
        box(axes, (left, y - HALF), width, 2 * HALF, WHITE, edgecolor=SOFT, linewidth=0.8)
        box(axes, (left + place * width / 2, y - HALF), width / 2, 2 * HALF, colour)
        say(axes, left + (place + 0.5) * width / 2, y, "norm", color=ink_on(colour))


def _explain(axes: Axes, entries: tuple[tuple[str, str], ...]) -> None:
    for number, (colour, text) in enumerate(entries):
        y = -0.55 - 0.75 * number
        box(axes, (0.0, y - 0.25), 0.5, 0.5, colour)
        say(axes, 0.8, y, text, ha="left")


def draw_block() -> Figure:
    """Where a block on two ranks sums."""
    figure = canvas(3.95)
    axes = figure.subplots()
    _block(axes, sequence=False)
    entries = (
        (EVERYWHERE, "replicated: the same work and memory on every rank"),
        (SUM, "g: an all-reduce forward, a copy backward"),
        (SOFT, "f: a copy forward, an all-reduce backward"),
    )
    _explain(axes, entries)
    bare(axes, (-1.6, 14.9), (-2.5, 3.0))
    return figure


def draw_sequence() -> Figure:
    """The same block with the sequence sharded between g and f."""
    figure = canvas(3.9)
    axes = figure.subplots()
    _block(axes, sequence=True)
    entries = (
        (RANKS[0], "norm: only a rank's own tokens; white: the other rank's"),
        (REDUCE, "g: a reduce-scatter forward, an all-gather backward"),
        (GATHER, "f: an all-gather forward, a reduce-scatter backward"),
    )
    _explain(axes, entries)
    bare(axes, (-1.6, 14.9), (-2.5, 3.0))
    return figure


def draw_vocabulary() -> Figure:
    """Logits of some tokens, sharded along the vocabulary, and what each rank sends of them."""
    figure = canvas(3.9)
    axes = figure.subplots()
    tokens, classes = 4, 7
    for rank, (colour, left) in enumerate(zip(RANKS, (0.0, 7.3), strict=True)):
        say(axes, left + 2.1 * classes / 4.3, 5.1, f"rank {rank}: V / t logits of each token")
        for token in range(tokens):
            for each in range(classes):
                target = (token, each) in (((0, 2), (3, 5)) if rank == 0 else ((1, 1), (2, 4)))
                fill = WHITE if target else colour
                box(axes, (left + 0.98 * each, 4.0 - 0.62 * token), 0.98, 0.62, fill)
        arrow(axes, (left + 3.4, 1.95), (left + 3.4, 1.25))
        say(axes, left + 3.7, 1.6, "per token", ha="left", color=SOFT)
        for place, text in enumerate(("max", "Σ exp", "target")):
            box(axes, (left + 2.28 * place, 0.35), 2.2, 0.78, colour)
            say(axes, left + 2.28 * place + 1.1, 0.74, text, color=ink_on(colour))
    box(axes, (0.0, -0.75), 14.16, 0.78, SUM)
    say(axes, 7.1, -0.36, "all-reduce: the maximum first, then both sums", color=ink_on(SUM))
    say(axes, -0.3, 3.9, "tokens", ha="right", color=SOFT)
    say(axes, -0.3, 2.7, "white:\ntargets", ha="right", color=SOFT)
    bare(axes, (-1.9, 14.4), (-0.9, 5.5))
    return figure
