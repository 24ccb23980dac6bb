"""A mesh of two dimensions: which messages travel along which."""

from __future__ import annotations

from typing import Any

from draw.canvas import canvas
from draw.fsdp.drawing import bare, box, say
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minifsdp.instruments.plots.palette import COLLECTIVE_COLOURS, GATHER, INK, PALE, SOFT, ink_on

HOSTS = PER_HOST = 8
ALL_REDUCE = COLLECTIVE_COLOURS["all-reduce"]


def draw_mesh() -> Figure:
    """64 ranks, a host a row: one row and one column of them in the colours of their messages."""
    figure = canvas(4.05)
    axes = figure.subplots()
    row, column = 2, 5
    for rank in range(HOSTS * PER_HOST):
        host, place = divmod(rank, PER_HOST)
        colour = GATHER if host == row else ALL_REDUCE if place == column else PALE
        box(axes, (1.1 * place, HOSTS - host), 1.04, 0.92, colour)
        say(axes, 1.1 * place + 0.52, HOSTS - host + 0.46, str(rank), color=ink_on(colour) if colour != PALE else SOFT)
    for host in (0, row, HOSTS - 1):
        say(axes, -0.3, HOSTS - host + 0.46, f"host {host}", ha="right", color=SOFT)
    middle = HOSTS - row + 0.46
    says = "along shard, inside a host:\nall-gathers of parameters,\nreduce-scatters of gradients"
    _names(axes, [(9.9, middle), (8.9, middle)], GATHER, says)
    below = 1.1 * column + 0.52
    says = "along replicate, across hosts:\nan all-reduce of gradient\nshards, an eighth of a unit each"
    _names(axes, [(9.9, 1.3), (9.4, 1.3), (9.4, 0.35), (below, 0.35), (below, 1.0)], ALL_REDUCE, says)
    say(axes, 10.2, 3.75, "Shard(0) along a row, Replicate() down a column", ha="left", color=INK)
    bare(axes, (-1.9, 23.2), (0.0, 9.0))
    return figure


def _names(axes: Axes, path: list[tuple[float, float]], colour: str, text: str) -> None:
    """Words, and a line from them to what they name."""
    *before, last, end = path
    axes.plot(*zip(*before, last, strict=True), color=colour, linewidth=3, solid_capstyle="butt")
    look: Any = {"arrowstyle": "-|>", "color": colour, "linewidth": 3, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, last, arrowprops=look)
    say(axes, 10.2, path[0][1], text, ha="left", color=colour)
