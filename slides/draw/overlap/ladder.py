"""Time and memory of every rung of the ladder."""

from __future__ import annotations

from draw.canvas import MIB, canvas
from draw.measured import rungs
from matplotlib.figure import Figure

from minifsdp.course.plots.palette import LINE, STRATEGY_COLOURS, as_text


def draw_rungs() -> Figure:
    """Milliseconds of a step and peak memory of a rank, for every rung of the ladder."""
    figure = canvas(5.0)
    axes = figure.subplots()
    colours = {"ddp": STRATEGY_COLOURS["DDP"], "zero": STRATEGY_COLOURS["ZeRO-2"], "fsdp": STRATEGY_COLOURS["FSDP"]}
    nudges = {  # points
        "fsdp": (0, 17, "center"),
        "fsdp-overlap": (-9, -10, "right"),
        "zero2": (0, -20, "center"),
        "fsdp-limit": (6, 17, "center"),
        "zero1": (0, -20, "center"),
        "fsdp-prefetch": (0, 20, "center"),
        "fsdp-grad-op": (10, -16, "left"),
        "ddp-bucketed": (10, 10, "left"),
    }
    for name, rung in rungs().items():
        at = (rung["bytes"]["peak"] / MIB, rung["milliseconds"])
        colour = next(colour for begin, colour in colours.items() if name.startswith(begin))
        axes.plot(*at, "o", color=colour, markersize=9)
        right, up, side = nudges.get(name, (11, 0, "left"))
        axes.annotate(name, at, (right, up), textcoords="offset points", ha=side, va="center", color=as_text(colour))
    axes.grid(color=LINE)
    axes.set_xlabel("MiB of a rank at the peak of a step; 2 ranks on a CPU, gloo")
    axes.set_ylabel("ms of a step")
    axes.margins(y=0.2)
    axes.set_xlim(24, 48)
    return figure
