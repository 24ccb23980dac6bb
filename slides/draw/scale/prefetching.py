"""Gathers one unit ahead, and two: what that makes of computations of different lengths."""

from __future__ import annotations

from typing import Any

from draw.canvas import canvas
from draw.fsdp.drawing import box, say
from matplotlib.figure import Figure

from minifsdp.instruments.plots.palette import GATHER, INK, LANE_COLOURS, OUTCOME_COLOURS, ink_on

GATHER_MS, COMPUTE_MS = 2.0, (3.0, 1.0, 3.0, 1.0, 3.0)
COMPUTE = LANE_COLOURS["compute"]


def starts(ahead: int) -> tuple[list[float], list[float]]:
    """When each unit's gather and computation begin, in ms: a gather once the unit `ahead` before it has begun."""
    gathers, computes = list[float](), list[float]()
    for unit in range(len(COMPUTE_MS)):
        issued = computes[unit - ahead] if unit >= ahead else computes[0] if unit else 0.0
        gathers.append(max(issued, gathers[-1] + GATHER_MS if gathers else 0.0))
        before = computes[-1] + COMPUTE_MS[unit - 1] if computes else 0.0
        computes.append(max(gathers[-1] + GATHER_MS, before))
    return gathers, computes


def draw_ahead() -> Figure:
    """Forward of five units: with the default, compute waits twice; with a list of two, it does not."""
    figure = canvas(4.2)
    panels = figure.subplots(2, 1, sharex=True)
    ways = {"default: one unit ahead": 1, "with a list: two units ahead": 2}
    over = {ahead: starts(ahead)[1][-1] + COMPUTE_MS[-1] for ahead in ways.values()}
    for panel, (name, ahead) in zip(panels, ways.items(), strict=True):
        gathers, computes = starts(ahead)
        for unit, (gather, compute) in enumerate(zip(gathers, computes, strict=True)):
            box(panel, (gather, 0), GATHER_MS, 0.86, GATHER)
            say(panel, gather + GATHER_MS / 2, 0.43, str(unit), color=ink_on(GATHER))
            box(panel, (compute, 1), COMPUTE_MS[unit], 0.86, COMPUTE)
            say(panel, compute + COMPUTE_MS[unit] / 2, 1.43, str(unit), color=ink_on(COMPUTE))
            end = computes[unit - 1] + COMPUTE_MS[unit - 1] if unit else compute
            if compute > end:
                frame: Any = {"edgecolor": OUTCOME_COLOURS["wrong"], "linestyle": "--", "linewidth": 2, "fill": False}
                box(panel, (end, 1), compute - end, 0.86, "none", **frame)
                say(panel, (end + compute) / 2, 1.43, "idle")
        panel.set_title(f"{name}: {over[ahead]:.0f} ms")
        panel.set_yticks([0.43, 1.43], ["gathers", "compute"])
        panel.tick_params(axis="y", length=0, pad=10, labelcolor=INK)
        panel.set(xlim=(0, max(over.values())), ylim=(-0.25, 2.0))
        panel.spines[["left", "bottom"]].set_visible(False)
        panel.tick_params(axis="x", length=0, labelbottom=False)
    panels[1].set_xlabel("assumed: 2 ms per gather, compute of 3, 1, 3, 1 and 3 ms")
    return figure
