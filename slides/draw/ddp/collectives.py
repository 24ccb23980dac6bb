"""What collectives do on four ranks, the ring's steps, and which calls meet."""

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
from minifsdp.course.plots.palette import INK, LINE, OUTCOME_COLOURS, PALE, RANK_COLOURS, SOFT, UNIT_COLOURS, ink_on

RIGHT, WRONG = OUTCOME_COLOURS.values()

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


def _grid(axes: Axes, left: float, held: Held, faint: Held | None = None) -> None:
    """Ranks as columns, chunks as rows; a cell has a stripe for each rank whose contribution is in it."""
    for rank, chunk in ((rank, chunk) for rank in FOUR for chunk in FOUR):
        corner, strong = (left + rank + 0.05, -chunk - 0.95), (rank, chunk) in held
        axes.add_patch(Rectangle(corner, 0.9, 0.9, facecolor=PALE, edgecolor=LINE, linewidth=0.8))
        owners = sorted((held if strong else faint or {}).get((rank, chunk), ()))
        for place, owner in enumerate(owners):
            width, alpha = 0.9 / len(owners), 1.0 if strong else 0.22
            at = (corner[0] + place * width, corner[1])
            axes.add_patch(Rectangle(at, width, 0.9, facecolor=RANK_COLOURS[owner], alpha=alpha))
    for rank in FOUR:
        axes.text(left + rank + 0.5, -4.12, str(rank), ha="center", va="top", color=SOFT)
    axes.set_aspect("equal")
    axes.axis("off")


def draw_primitives() -> Figure:
    """Each operation on four ranks, before and after."""
    figure = canvas(5.1)
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
        _grid(axes, 5.6, after)
        axes.annotate("", (5.4, -2), (4.2, -2), arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.6})
        axes.set_title(name, loc="center", fontsize=20)
        axes.set(xlim=(-0.4, 10), ylim=(-5, 0.2))
    figure.axes[0].text(-0.1, -4.12, "rank", ha="right", va="top", color=SOFT)
    return figure


def draw_ring(half: str) -> Figure:
    """Which chunk goes where in each step of a half of the ring: partial sums first, then whole chunks."""
    own: Held = {(r, c): {r} for r in FOUR for c in FOUR} if half == "reduce-scatter" else {}
    steps = ring_steps()[:3] if own else ring_steps()[3:]
    afterwards = ring_steps()[3] if own else {(r, c): {*FOUR} for r in FOUR for c in FOUR}
    figure = canvas(4.4)
    figure.set_layout_engine("constrained", rect=(0.02, 0, 0.9, 1))
    panels = figure.subplots(1, 4)
    here: Held = {}
    for number, (axes, sent) in enumerate(zip(panels, steps, strict=False)):
        here = sent if own else here | sent
        _grid(axes, 0, here, own)
        style = {"arrowstyle": "-|>", "color": INK, "linewidth": 2.2, "mutation_scale": 17}
        for rank, chunk in sent:
            y, last = -chunk - 0.5, rank == FOUR[-1]
            axes.annotate("", (4.4 if last else rank + 1.5, y), (rank + 0.5, y), arrowprops=style)
            if last:  # and in again on the left
                axes.annotate("", (0.5, y), (-0.4, y), arrowprops=style)
        here = here | {((rank + 1) % 4, chunk): owners for (rank, chunk), owners in sent.items()}
        axes.set_title(f"step {number}", loc="center", fontsize=20)
    _grid(panels[-1], 0, afterwards, own)
    panels[-1].set_title("afterwards", loc="center", fontsize=20)
    panels[0].text(-0.1, -4.12, "rank", ha="right", va="top", color=SOFT)
    for chunk in FOUR:
        panels[-1].text(4.15, -chunk - 0.5, f"chunk {chunk}", va="center", color=SOFT)
    for axes in panels:
        axes.set(xlim=(-0.55, 4.45), ylim=(-4.9, 0.2))
    return figure


def draw_turns() -> Figure:
    """The k-th call of one rank meets the k-th of the other: in order, in another order, and with one left out."""
    figure = canvas(4.6)
    colours = {"A": UNIT_COLOURS[0], "B": UNIT_COLOURS[2]}
    cases = {
        "same order": ("AB", "AB", "right"),
        "another order": ("AB", "BA", "equal sizes: wrong sums,\nother sizes: a hang"),
        "one left out": ("AB", "A ", "rank 0 waits for ever"),
    }
    for axes, (name, (*ranks, outcome)) in zip(figure.subplots(1, 3), cases.items(), strict=True):
        for rank, calls in enumerate(ranks):
            axes.text(2.2 * rank + 0.7, 0.15, f"rank {rank}", ha="center")
            for turn, call in enumerate(calls.strip()):
                axes.add_patch(Rectangle((2.2 * rank, -turn - 0.85), 1.4, 0.7, facecolor=colours[call]))
                axes.text(
                    2.2 * rank + 0.7,
                    -turn - 0.5,
                    call,
                    ha="center",
                    va="center",
                    color=ink_on(colours[call]),
                    fontsize=20,
                )
        for turn, (mine, theirs) in enumerate(zip(*ranks, strict=True)):
            line, colour = ("-", INK) if mine == theirs else (":", WRONG)
            axes.plot([1.45, 2.15], [-turn - 0.5] * 2, color=colour, linestyle=line)
        if " " in ranks[1]:
            axes.text(2.9, -1.5, "?", ha="center", va="center", color=WRONG, fontsize=24)
        axes.text(1.8, -2.25, outcome, ha="center", va="top", color=RIGHT if outcome == "right" else WRONG)
        axes.set_title(name, loc="center", fontsize=20)
        axes.set(xlim=(-0.6, 4.2), ylim=(-3.0, 0.7))
        axes.axis("off")
    return figure
