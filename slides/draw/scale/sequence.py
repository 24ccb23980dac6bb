"""The sequence on several ranks: which keys and heads a rank has while it attends, and how blocks of keys add up."""

from __future__ import annotations

from typing import Any

import torch
from draw.canvas import canvas
from draw.fsdp.drawing import bare, box, say
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minifsdp.instruments.plots.palette import (
    GATHER,
    LINE,
    PALE,
    RANK_COLOURS,
    SOFT,
    ink_on,
)

RANKS = 4
ME = 1  # the rank whose tensors are shown
CELL = 0.76


def _grid(axes: Axes, left: float, low: float, name: str, has: Any) -> None:
    """Tokens down, heads across; `has` says of a chunk and a head which colour the cell has."""
    for chunk in range(RANKS):
        for head in range(RANKS):
            colour = has(chunk, head)
            at = left + CELL * head, low + CELL * (RANKS - 1 - chunk)
            box(axes, at, 0.96 * CELL, 0.96 * CELL, colour or PALE, **({} if colour else {"edgecolor": LINE}))
    say(axes, left + CELL * RANKS / 2, low + CELL * RANKS + 0.32, name, color=SOFT)


def draw_ways() -> Figure:
    """For each way what rank 1 has of queries, and of keys and values, while it attends."""
    figure = canvas(4.1)
    axes = figure.subplots()

    def own(chunk: int, head: int) -> str | None:
        return RANK_COLOURS[chunk] if chunk == ME else None

    def every(chunk: int, head: int) -> str | None:
        return RANK_COLOURS[chunk]

    def one_at_a_time(chunk: int, head: int) -> str | None:
        return RANK_COLOURS[chunk] if chunk in (ME, ME - 1) else None

    def of_my_heads(chunk: int, head: int) -> str | None:
        return RANK_COLOURS[chunk] if head == ME else None

    ways: tuple[tuple[str, Any, Any, str], ...] = (
        ("all-gather", own, every, "one gather, then all\nkeys are in memory"),
        ("ring", own, one_at_a_time, "keys go round: those that\nit has, those that arrive"),
        ("Ulysses", of_my_heads, of_my_heads, "all-to-all: all tokens\nof some heads, and back"),
    )
    for number, (name, queries, keys, says) in enumerate(ways):
        left = 7.7 * number
        say(axes, left, 4.75, name, ha="left", fontweight="bold")
        _grid(axes, left, 0.65, "Q", queries)
        _grid(axes, left + 3.35, 0.65, "K and V", keys)
        say(axes, left, -0.35, says, ha="left")
        if name == "ring":
            look: Any = {"arrowstyle": "-|>", "color": GATHER, "lw": 3, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (left + 6.65, 2.3), (left + 6.65, 3.6), arrowprops=look)
    for rank, colour in enumerate(RANK_COLOURS):
        box(axes, (5.6 * rank, -1.85), 0.62, 0.62, colour)
        say(axes, 5.6 * rank + 0.85, -1.54, f"rank {rank}'s tokens", ha="left", color=SOFT)
    bare(axes, (-0.1, 22.2), (-1.95, 5.05))
    return figure


# Online softmax

SCORES = ((1.0, 2.0), (4.0, 3.0))  # of one query, by block of keys
VALUES = ((10.0, 20.0), (30.0, 40.0))


def _sums(scores: tuple[float, ...], values: tuple[float, ...]) -> tuple[float, float, float]:
    """A block's top score, sum of weights, and weighted sum of values."""
    s, v = torch.tensor(scores, dtype=torch.float64), torch.tensor(values, dtype=torch.float64)
    weights = (s - s.max()).exp()
    return s.max().item(), weights.sum().item(), (weights * v).sum().item()


def blocks() -> tuple[list[tuple[float, float, float]], list[float], tuple[float, float, float]]:
    """The sums of both blocks, the factors that rescale them, and the sums together."""
    found = [_sums(*each) for each in zip(SCORES, VALUES, strict=True)]
    top = max(each for each, _, _ in found)
    factors = [torch.tensor(each - top, dtype=torch.float64).exp().item() for each, _, _ in found]
    total = sum(f * weights for f, (_, weights, _) in zip(factors, found, strict=True))
    out = sum(f * out for f, (_, _, out) in zip(factors, found, strict=True))
    at_once = torch.tensor([*SCORES[0], *SCORES[1]], dtype=torch.float64).softmax(0)
    assert abs(out / total - (at_once @ torch.tensor([*VALUES[0], *VALUES[1]], dtype=torch.float64)).item()) < 1e-12
    return found, factors, (top, total, out)


def draw_softmax() -> Figure:
    """A table: two blocks of keys, and both rescaled and added."""
    figure = canvas(3.7)
    axes = figure.subplots()
    found, factors, (top, total, out) = blocks()
    columns = 5.2, 8.4, 11.2, 14.0, 17.0, 21.0
    for at, head in zip(columns, ("scores", "values", "top", "total", "out", "rescaled by"), strict=True):
        say(axes, at, 4.05, head, color=SOFT)
    for line, ((its_top, its_total, its_out), factor) in enumerate(zip(found, factors, strict=True)):
        y, colour = 3.0 - 1.15 * line, RANK_COLOURS[3 - line]
        box(axes, (0.0, y - 0.5), 23.4, 1.0, colour)
        listed = (", ".join(f"{each:g}" for each in row) for row in (SCORES[line], VALUES[line]))
        cells = (*listed, f"{its_top:g}", f"{its_total:.3f}", f"{its_out:.2f}", f"{factor:.3f}")
        say(axes, 0.3, y, f"round {line}", ha="left", color=ink_on(colour), fontweight="bold")
        for at, text in zip(columns, cells, strict=True):
            say(axes, at, y, text, color=ink_on(colour))
    say(axes, 0.3, 0.65, "together", ha="left", fontweight="bold")
    for at, text in zip(columns[2:], (f"{top:g}", f"{total:.3f}", f"{out:.2f}"), strict=False):
        say(axes, at, 0.65, text, fontweight="bold")
    says = f"out / total = {out / total:.3f}: the attention of one softmax over all four keys"
    say(axes, 0.3, -0.45, says, ha="left")
    bare(axes, (-0.1, 23.6), (-0.9, 4.4))
    return figure
