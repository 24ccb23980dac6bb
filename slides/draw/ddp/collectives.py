"""What collectives do on four ranks, a ring step by step, and which calls meet."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from draw.canvas import canvas
from draw.ddp.drawing import FOUR
from draw.ddp.traffic import sent_by
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minifsdp import ring
from minifsdp.instruments.plots.palette import (
    COLLECTIVE_COLOURS,
    INK,
    LINE,
    OUTCOME_COLOURS,
    PALE,
    RANK_COLOURS,
    SOFT,
    UNIT_COLOURS,
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
        axes.set(xlim=(-0.5, 9.9), ylim=(-4.1, 0.1), aspect="equal")
        axes.axis("off")

    says = (
        "column: rank; row: chunk; number and shade: the rank that the data comes from;\n"
        "four stripes: a sum; send and receive are not a collective"
    )
    figure.supxlabel(says, color=SOFT, fontsize=18)
    return figure


def _held(half: str, steps: list[Held]) -> list[Held]:
    """By rank and chunk, before each step of a half of the ring and after its last: whose contributions are there.

    Of chunks that were sent in the first half nothing is needed any more, so they are left out.
    """
    adds = half == "reduce-scatter"
    total = {*FOUR}
    holds: list[Held] = []
    for number in range(len(steps) + 1):
        held: Held = {}
        for rank in FOUR:
            if adds:
                own = [(rank - 1 - back) % 4 for back in range(number + 1, 4)]
                held |= {(rank, chunk): {rank} for chunk in own}
            else:
                held |= {(rank, (rank - back) % 4): total for back in range(number + 1)}
        holds.append(held | (steps[number] if number < len(steps) else {}))
    if adds:
        holds[-1] = {(rank, rank): total for rank in FOUR}
    return holds


def draw_ring(half: str) -> Figure:
    """Which chunk goes where in each step of a half of a ring: partial sums that grow first, then whole chunks."""
    adds = half == "reduce-scatter"
    steps = ring_steps()[:3] if adds else ring_steps()[3:]
    colour = COLLECTIVE_COLOURS[half]
    figure = canvas(4.7)
    shape: dict[str, Any] = {"arrowstyle": "-|>", "color": colour, "linewidth": 3, "mutation_scale": 20}
    shape |= {"shrinkA": 0, "shrinkB": 0}
    axes = figure.subplots()
    for number, held in enumerate(_held(half, steps)):
        left, sent = number * 5.15, steps[number] if number < len(steps) else {}
        _grid(axes, left, held)
        axes.text(left + 2, 0.75, f"step {number}" if sent else "afterwards", ha="center", fontweight="bold")
        for rank in FOUR:
            axes.text(left + rank + 0.5, 0.1, str(rank), ha="center", color=SOFT)
        for rank, chunk in sent:
            corner = left + rank + 0.05, -chunk - 0.95
            axes.add_patch(Rectangle(corner, 0.9, 0.9, fill=False, edgecolor=colour, linewidth=4, zorder=3))
            axes.annotate("", (left + rank + 1.24, -chunk - 0.5), (left + rank + 0.85, -chunk - 0.5), arrowprops=shape)
            if rank == 3:  # the other end of its arrow
                axes.annotate("", (left + 0.22, -chunk - 0.5), (left - 0.35, -chunk - 0.5), arrowprops=shape)
    for chunk in FOUR:
        axes.text(-0.5, -chunk - 0.5, f"chunk {chunk}", ha="right", va="center", color=SOFT)
    axes.text(-0.5, 0.1, "rank", ha="right", color=SOFT)
    says = "stripes: ranks whose values are in the sum; framed: sent to the next rank"
    axes.text(9.7, -4.75, says, ha="center", va="center", color=SOFT)
    axes.set(xlim=(-2.3, 19.6), ylim=(-5.1, 1.3))
    axes.axis("off")
    return figure


def draw_turns() -> Figure:
    """The k-th call of one rank meets the k-th of the other: in order, in another order, and with one call missing."""
    figure = canvas(4.5)
    colours = {"A": UNIT_COLOURS[0], "B": UNIT_COLOURS[3]}
    right, wrong = OUTCOME_COLOURS["right"], OUTCOME_COLOURS["wrong"]
    cases = {
        "same order": ("AB", "AB", "A meets A,\nB meets B", right),
        "different order": ("AB", "BA", "same size: wrong sums\nother size: hang or abort", wrong),
        "one call missing": ("AB", "A ", "rank 0 waits\nforever", wrong),
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
