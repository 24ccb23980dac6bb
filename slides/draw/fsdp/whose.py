"""Who stores which layer, and who computes it: FSDP beside a pipeline and tensor parallelism."""

from __future__ import annotations

from draw.canvas import canvas
from draw.fsdp.drawing import bare, box, say
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minifsdp.instruments.plots.palette import INK, SOFT, TAG_COLOURS

LAYERS, RANKS = range(6), range(3)
IN_USE = 0, 1, 2, 3  # whole now: the unit of 1 and 2, and the root, 0 and 3; 4 and 5 are the third unit
NOW = 2
CELL, TALL = 0.5, 0.8  # inches
OWNED, GATHERED = TAG_COLOURS["parameters"], TAG_COLOURS["unsharded"]


def _cells(axes: Axes, left: float, kind: str) -> None:
    """Three ranks by six layers: what a rank owns is solid, what it has gathered light, the rest an outline."""
    for rank, layer in ((rank, layer) for rank in RANKS for layer in LAYERS):
        x, y = left + CELL * layer, -(TALL + 0.14) * rank
        whole = kind == "FSDP" and layer in IN_USE
        box(axes, (x, y), CELL, TALL, GATHERED if whole else "white", edgecolor="none")
        if kind != "pipeline":
            box(axes, (x, y + TALL * (2 - rank) / 3), CELL, TALL / 3, OWNED, edgecolor="none")
        elif layer // 2 == rank:
            box(axes, (x, y), CELL, TALL, OWNED, edgecolor="none")
        box(axes, (x, y), CELL, TALL, "none", edgecolor=SOFT, linewidth=1)
    for rank in RANKS:
        layer = 2 * rank if kind == "pipeline" else NOW
        x, y = left + CELL * layer, -(TALL + 0.14) * rank
        low, part = (TALL * (2 - rank) / 3, TALL / 3) if kind == "tensor parallelism" else (0, TALL)
        box(axes, (x, y + low), CELL, part, "none", edgecolor=INK, linewidth=4, zorder=3)


def draw_whose() -> Figure:
    """What each of three ranks stores, has gathered and computes now, of six layers."""
    figure = canvas(4.8)
    axes = figure.subplots()
    panels = {
        "FSDP": "owns a third of each,\nruns all; root: 0 and 3",
        "pipeline": "owns two layers,\nruns only those",
        "tensor parallelism": "owns a third of each,\nruns that third",
    }
    for place, (kind, says) in enumerate(panels.items()):
        left = 3.45 * place
        _cells(axes, left, kind)
        say(axes, left + 1.5, 1.62, kind, fontsize=20, fontweight="bold")
        say(axes, left + 1.5, -2.4, says)
        for layer in LAYERS:
            say(axes, left + CELL * (layer + 0.5), 1.03, str(layer), color=SOFT)
    say(axes, -0.15, 1.03, "layer", ha="right", color=SOFT)
    for rank in RANKS:
        say(axes, -0.15, TALL / 2 - (TALL + 0.14) * rank, f"rank {rank}", ha="right")
    keys = {"owned": OWNED, "unsharded for now": GATHERED, "computing now": "white"}
    for x, (text, colour) in zip((1.1, 3.2, 6.6), keys.items(), strict=True):
        edge, line = (INK, 4) if colour == "white" else (SOFT, 1)
        box(axes, (x, -3.26), 0.4, 0.3, colour, edgecolor=edge, linewidth=line)
        say(axes, x + 0.55, -3.12, text, ha="left")
    bare(axes, (-1.05, 10.0), (-3.35, 1.85))
    return figure
