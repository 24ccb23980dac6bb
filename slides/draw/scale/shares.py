"""Work of each rank under a causal mask, and what attention sends: by formulas, and measured."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from draw.canvas import canvas
from draw.fsdp.drawing import bare, say
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minifsdp import comm
from minifsdp.context_parallel import Cut, RingAttention, UlyssesAttention
from minifsdp.instruments.launch import launch
from minifsdp.instruments.plots.palette import INK, RANK_COLOURS, SERIES_COLOURS, SOFT, as_text

FEW = 3  # ranks
HEADS, KEY_HEADS, TOKENS, DIM = 64, 8, 64, 8  # of the measured attention
ON_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 2}


def _triangle(axes: Axes, cut: Cut, title: str) -> None:
    """Pairs of a query and a key, each query's chunk in its rank's colour."""
    size = 6 / cut.chunks
    owner = {chunk: rank for rank in range(cut.ranks) for chunk in cut.of_rank(rank)}
    for query in range(cut.chunks):
        colour = RANK_COLOURS[owner[query]]
        low = 6 - size * (query + 1)
        corners = [(0, low), (size * (query + 1), low), (size * query, low + size), (0, low + size)]
        axes.fill(*zip(*corners, strict=True), color=colour, lw=0)
        axes.plot([0, 6], [low, low], color="white", lw=1.5)
        say(axes, -0.15, low + size / 2, f"rank {owner[query]}", ha="right")
    say(axes, 2.2, 6.75, title, fontweight="bold")
    say(axes, 3.6, 5.55, "work / mean work", ha="left", color=SOFT)
    for rank in range(cut.ranks):
        says = f"rank {rank}: {cut.ranks * cut.work(rank):.2f}"
        say(axes, 4.9, 4.8 - 0.75 * rank, says, ha="left", color=INK)
    bare(axes, (-1.9, 7.6), (-0.7, 7.1))
    say(axes, 0.1, -0.4, "keys →", ha="left", color=SOFT)


def draw_zigzag() -> Figure:
    """The mask's triangle cut into contiguous chunks, and in zig-zag: work of each rank, relative to the mean."""
    figure = canvas(4.4)
    left, right = figure.subplots(1, 2)
    _triangle(left, Cut(FEW), "contiguous")
    _triangle(right, Cut(FEW, zigzag=True), "zig-zag")
    return figure


@cache
def measured() -> dict[str, list[float]]:
    """By way the bytes that a rank sends in a forward pass on 2, 4 and 8 ranks, in units of all queries."""

    def sent(kind: type) -> float:
        ranks = comm.world().size()
        shapes = [(1, heads, TOKENS // ranks, DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
        with torch.no_grad(), comm.record() as calls:
            kind(comm.world(), Cut(ranks))(*(torch.ones(shape) for shape in shapes))
        return sum(call.wire for call in calls)

    queries = 4 * HEADS * TOKENS * DIM
    with patch.dict("os.environ", MINIFSDP_DEVICE="cpu"):
        found = [
            launch(lambda: [sent(kind) for kind in (RingAttention, UlyssesAttention)], ranks, backend="gloo")[0]
            for ranks in (2, 4, 8)
        ]
    return {name: [each[way] / queries for each in found] for way, name in enumerate(("ring", "ulysses"))}


def ring(r: float, c: int) -> float:
    """Elements that a rank sends in forward, in units of Q; an all-gather of keys and values sends as many."""
    return 2 * r * (c - 1) / c


def ulysses(r: float, c: int) -> float:
    return (2 + 2 * r) / c * (c - 1) / c


def draw_sent() -> Figure:
    """Elements over the number of ranks, for two shares of key heads: equal at a dot."""
    figure = canvas(4.0)
    axes = figure.subplots()
    ranks = [2**k for k in range(1, 7)]
    for r, colour, name in ((1.0, SERIES_COLOURS[0], "r = 1"), (1 / 8, SERIES_COLOURS[1], "r = 1/8")):
        axes.plot(ranks, [ring(r, c) for c in ranks], color=colour)
        axes.plot(ranks, [ulysses(r, c) for c in ranks], color=colour, linestyle=(0, (4, 2)))
        even = 1 + 1 / r
        axes.plot([even], [ring(r, round(even))], "o", color=colour, markersize=13)
        look: Any = {"ha": "left", "color": as_text(colour), "fontweight": "bold", "bbox": ON_WHITE}
        say(axes, ranks[-1] * 1.12, ring(r, ranks[-1]), f"ring or\nall-gather,\n{name}", **look)
        at, aside = (even * 1.02, 1.65) if r == 1 else (even * 0.87, 0.65)
        say(axes, at, aside * ring(r, round(even)), f"c = {even:.0f}", **look)
    for c, of_ring, of_ulysses in zip((2, 4, 8), *measured().values(), strict=True):
        assert abs(of_ring - ring(1 / 8, c)) < 1e-9 > abs(of_ulysses - ulysses(1 / 8, c))
        for size in (of_ring, of_ulysses):
            axes.plot(c, size, "D", markersize=9, markerfacecolor="white", color=SERIES_COLOURS[1], zorder=3)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ranks, [f"{c}" for c in ranks])
    axes.set_yticks([2, 1, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32], ["2", "1", "1/2", "1/4", "1/8", "1/16", "1/32"])
    axes.minorticks_off()
    axes.set_xlim(1.8, 150)
    end = (ulysses(1, 64) + ulysses(1 / 8, 64)) / 2
    say(axes, 72, end, "Ulysses", ha="left", color=INK, fontweight="bold", bbox=ON_WHITE)
    axes.set_xlabel("ranks c; diamonds: measured on 2, 4 and 8 ranks")
    axes.set_ylim(1 / 45, 3.3)
    axes.set_ylabel("sent in forward,\nin units of Q")
    axes.grid(axis="y")
    return figure
