"""What collectives do on four ranks, a ring step by step, and which calls meet."""

from __future__ import annotations

from functools import cache
from math import cos, pi, sin
from typing import Any

import torch
from draw.canvas import canvas
from draw.ddp.drawing import FOUR
from draw.ddp.traffic import sent_by
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle

from minifsdp import ring
from minifsdp.course.plots.palette import (
    COLLECTIVE_COLOURS,
    INK,
    LINE,
    OUTCOME_COLOURS,
    PALE,
    RANK_COLOURS,
    SOFT,
    UNIT_COLOURS,
    WHITE,
    ink_on,
)

Held = dict[tuple[int, int], set[int]]
"""By rank and chunk, whose contributions are in it."""


@cache
def ring_steps() -> list[Held]:
    """What each of four ranks sends in each step of an all-reduce: element c of rank r is 2 ** (r + 4 c)."""

    def program(group: Any) -> None:
        chunks = [2.0 ** (group.rank() + 4 * chunk) for chunk in FOUR]
        ring.all_reduce(torch.tensor(chunks, dtype=torch.float64), group)

    steps = []
    for messages in zip(*sent_by(program, 4), strict=True):
        held: Held = {}
        for rank, message in enumerate(messages):
            bits = [bit for bit in range(16) if int(message) >> bit & 1]
            held[rank, bits[0] // 4] = {bit % 4 for bit in bits}
        steps.append(held)
    return steps


def _grid(axes: Axes, left: float, held: Held) -> None:
    """Ranks as columns, chunks as rows; a cell names its contributor, or has a stripe for each of several."""
    for rank, chunk in ((rank, chunk) for rank in FOUR for chunk in FOUR):
        x, y = left + rank + 0.05, -chunk - 0.95
        axes.add_patch(Rectangle((x, y), 0.9, 0.9, facecolor=PALE, edgecolor=LINE, linewidth=0.8))
        owners = sorted(held.get((rank, chunk), ()))
        for place, owner in enumerate(owners):
            width = 0.9 / len(owners)
            axes.add_patch(Rectangle((x + place * width, y), width, 0.9, facecolor=RANK_COLOURS[owner]))
        if len(owners) == 1:
            ink = ink_on(RANK_COLOURS[owners[0]])
            axes.text(x + 0.45, y + 0.43, str(owners[0]), ha="center", va="center_baseline", color=ink)


def draw_primitives() -> Figure:
    """Each operation on four ranks, before and after."""
    figure = canvas(5.0)
    own: Held = {(r, c): {r} for r in FOUR for c in FOUR}
    total = {*FOUR}
    cases: dict[str, tuple[Held, Held]] = {
        "broadcast": ({(0, c): {0} for c in FOUR}, {(r, c): {0} for r in FOUR for c in FOUR}),
        "reduce": (own, {(0, c): total for c in FOUR}),
        "all-reduce": (own, dict.fromkeys(own, total)),
        "all-gather": ({(r, r): {r} for r in FOUR}, {(r, c): {c} for r in FOUR for c in FOUR}),
        "reduce-scatter": (own, {(r, r): total for r in FOUR}),
        "send, receive": ({(1, c): {1} for c in FOUR}, {(r, c): {1} for r in (1, 2) for c in FOUR}),
    }
    for axes, (name, (before, after)) in zip(figure.subplots(2, 3).flat, cases.items(), strict=True):
        _grid(axes, 0, before)
        _grid(axes, 5.4, after)
        axes.annotate("", (5.3, -2), (4.1, -2), arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 2})
        axes.set_title(name, loc="center")
        axes.set(xlim=(-0.5, 9.9), ylim=(-4.9, 0.1), aspect="equal")
        axes.axis("off")

    for axes, x, says in ((figure.axes[0], 0, "a column is a rank"), (figure.axes[4], 5.4, "four stripes are a sum")):
        axes.text(x, -4.15, says, va="top", color=SOFT, in_layout=False)
    return figure


def _at(turn: float) -> tuple[float, float]:
    """A place on the ring, so many ranks clockwise from the top; inches."""
    return 1.1 * sin(turn * pi / 2), 1.45 * cos(turn * pi / 2)


def _packet(axes: Axes, at: tuple[float, float], chunk: int, owners: set[int]) -> None:
    """A chunk: its number, and a stripe for each rank whose contribution is in it, as they joined."""
    number, stripe, height = 0.26, 0.12, 0.38
    width = number + stripe * len(owners)
    left, bottom = at[0] - width / 2, at[1] - height / 2
    axes.add_patch(Rectangle((left, bottom), width, height, facecolor=WHITE, zorder=3))
    for place, owner in enumerate(sorted(owners, key=lambda rank: (rank - chunk - 1) % 4)):
        corner, colour = (left + number + place * stripe, bottom), RANK_COLOURS[owner]
        axes.add_patch(Rectangle(corner, stripe, height, facecolor=colour, zorder=4))
    axes.add_patch(Rectangle((left, bottom), width, height, fill=False, edgecolor=INK, linewidth=1.4, zorder=5))
    axes.text(left + number / 2, at[1] - 0.01, str(chunk), ha="center", va="center_baseline", zorder=6)


def _ring(axes: Axes, colour: str) -> None:
    """Four ranks on a ring, and the arrows between them."""
    shape: dict[str, Any] = {"connectionstyle": "arc3,rad=-0.2", "shrinkA": 0, "shrinkB": 0}
    for rank in FOUR:
        (x, y), ink = _at(rank), ink_on(RANK_COLOURS[rank])
        axes.add_patch(Circle((x, y), 0.29, facecolor=RANK_COLOURS[rank], zorder=3))
        axes.text(x, y - 0.01, str(rank), ha="center", va="center_baseline", color=ink, zorder=4)
        look = {"arrowstyle": "-|>", "color": colour, "linewidth": 3, "mutation_scale": 24} | shape
        axes.annotate("", _at(rank + 0.82), _at(rank + 0.2), arrowprops=look)
    axes.set(xlim=(-1.43, 1.43), ylim=(-2.15, 1.8), aspect="equal")
    axes.axis("off")


def _inside(rank: int) -> tuple[float, float]:
    """The place next to a rank, towards the middle of the ring."""
    return 0.42 * sin(rank * pi / 2), 0.93 * cos(rank * pi / 2)


def _slots(axes: Axes, rank: int, chunks: set[int]) -> None:
    """Which chunks a rank has."""
    x, y = _inside(rank)
    for chunk in FOUR:
        colour = INK if chunk in chunks else WHITE
        axes.add_patch(Rectangle((x - 0.36 + 0.18 * chunk, y - 0.09), 0.18, 0.18, facecolor=colour, edgecolor=SOFT))


def draw_ring(half: str) -> Figure:
    """Which chunk goes where in each step of a half of a ring: partial sums that grow first, then whole chunks."""
    adds = half == "reduce-scatter"
    steps: list[Held] = [*(ring_steps()[:3] if adds else ring_steps()[3:]), {}]
    figure = canvas(4.6)
    for number, (axes, sent) in enumerate(zip(figure.subplots(1, 4), steps, strict=True)):
        _ring(axes, COLLECTIVE_COLOURS[half] if sent else LINE)
        for (rank, chunk), owners in sent.items():
            _packet(axes, _at(rank + 0.5), chunk, owners)
        for rank in FOUR:
            if not adds:
                _slots(axes, rank, {(rank - back) % 4 for back in range(number + 1)})
            elif not sent:
                _packet(axes, _inside(rank), rank, {*FOUR})
        axes.set_title(f"step {number}" if sent else "afterwards", loc="center")
        says = f"sums of {number + 1}" if number else "one rank's part"
        axes.text(0, -2, says if adds else f"each has {number + 1} of 4", ha="center", color=SOFT)
    if adds:
        figure.axes[0].text(0, 0, "a box is\na chunk", ha="center", va="center", color=SOFT)
    return figure


def draw_turns() -> Figure:
    """The k-th call of one rank meets the k-th of the other: in order, in another order, and with one left out."""
    figure = canvas(4.5)
    colours = {"A": UNIT_COLOURS[0], "B": UNIT_COLOURS[3]}
    right, wrong = OUTCOME_COLOURS["right"], OUTCOME_COLOURS["wrong"]
    cases = {
        "same order": ("AB", "AB", "A meets A,\nB meets B", right),
        "another order": ("AB", "BA", "same size: wrong sums\nother size: hang or abort", wrong),
        "one left out": ("AB", "A ", "rank 0 waits\nfor ever", wrong),
    }
    for axes, (name, (*ranks, outcome, colour)) in zip(figure.subplots(1, 3), cases.items(), strict=True):
        for rank, calls in enumerate(ranks):
            axes.text(2.2 * rank + 0.7, 0.12, f"rank {rank}", ha="center")
            for turn, call in enumerate(calls.strip()):
                axes.add_patch(Rectangle((2.2 * rank, -turn - 0.85), 1.4, 0.7, facecolor=colours[call]))
                look: Any = {"color": ink_on(colours[call]), "fontsize": 24, "fontweight": "bold"}
                axes.text(2.2 * rank + 0.7, -turn - 0.52, call, ha="center", va="center", **look)
        for turn, (mine, theirs) in enumerate(zip(*ranks, strict=True)):
            line, ink = ("-", right) if mine == theirs else (":", wrong)
            axes.plot([1.45, 2.15], [-turn - 0.5] * 2, color=ink, linestyle=line, linewidth=4)
        if " " in ranks[1]:
            axes.text(2.9, -1.5, "?", ha="center", va="center", color=wrong, fontsize=36)
        axes.text(1.8, -2.2, outcome, ha="center", va="top", color=colour)
        axes.set_title(name, loc="center", fontsize=20)
        axes.set(xlim=(-0.55, 4.15), ylim=(-3.0, 0.6))
        axes.axis("off")
    return figure
