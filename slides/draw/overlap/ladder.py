"""Time and memory of every rung of the ladder."""

from __future__ import annotations

from typing import Any

from draw.canvas import MIB, canvas
from draw.measured import ladder_run, rungs
from matplotlib.figure import Figure

from minifsdp.course.plots.palette import LINE, SOFT, STRATEGY_COLOURS, as_text

COLOURS = {"ddp": STRATEGY_COLOURS["DDP"], "zero": STRATEGY_COLOURS["ZeRO-2"], "fsdp": STRATEGY_COLOURS["FSDP"]}
PLACES = {  # of names, in MiB and ms, away from the points
    "fsdp": (25.2, 112),
    "fsdp-overlap": (28.6, 124),
    "fsdp-limit": (31.0, 106),
    "fsdp-prefetch": (35.0, 94),
    "fsdp-grad-op": (36.5, 46),
    "zero2": (27.6, 46),
    "zero1": (31.6, 46),
    "ddp-bucketed": (40.9, 84),
    "ddp-naive": (39.4, 150),
    "ddp": (46.5, 52),
}


def draw_rungs() -> Figure:
    """Milliseconds of a step and peak memory of a rank, for every rung of the ladder."""
    figure = canvas(4.7)
    axes = figure.subplots()
    for name, rung in rungs().items():
        at = (rung["bytes"]["peak"] / MIB, rung["milliseconds"])
        colour = next(colour for begin, colour in COLOURS.items() if name.startswith(begin))
        lead: Any = {"arrowstyle": "-", "color": colour, "linewidth": 1.2, "shrinkA": 2, "shrinkB": 6}
        look: Any = {"ha": "center", "va": "center", "color": as_text(colour), "arrowprops": lead}
        weight = "bold" if name in ("ddp", "fsdp-limit") else "normal"
        axes.annotate(name, at, PLACES[name], fontweight=weight, **look)
        axes.plot(*at, "o", color=colour, markeredgecolor="white", markersize=15 if weight == "bold" else 11)
    axes.text(
        24.3, 4, f"no GPU: a CPU of {ladder_run()['cores']} cores, 2 ranks, the ladder's model", color=SOFT, va="bottom"
    )
    axes.grid(color=LINE)
    axes.set_xlabel("peak MiB per rank in a step")
    axes.set_ylabel("ms per step")
    axes.set_ylim(0, 165)
    axes.set_xlim(24, 48)
    return figure
