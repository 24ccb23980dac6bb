"""Memory and traffic of every rung of the ladder."""

from __future__ import annotations

from draw.canvas import MIB, canvas
from draw.measured import rungs
from matplotlib.figure import Figure

from minifsdp.instruments.plots.palette import INK, SOFT, STRATEGY_COLOURS, ink_on

RANKS = 4
COLOURS = {
    "ddp": STRATEGY_COLOURS["DDP"],
    "zero1": STRATEGY_COLOURS["ZeRO-1"],
    "zero2": STRATEGY_COLOURS["ZeRO-2"],
    "fsdp-grad-op": STRATEGY_COLOURS["SHARD_GRAD_OP"],
    "fsdp": STRATEGY_COLOURS["FSDP"],
}


def draw_rungs() -> Figure:
    """Peak memory of a rank on every rung, and the bytes that it sends in a step."""
    figure = canvas(4.45)
    axes = figure.subplots()
    found = rungs(RANKS)
    most = max(rung["bytes"]["peak"] for rung in found.values()) / MIB
    for place, (name, rung) in enumerate(found.items()):
        peak, colour = rung["bytes"]["peak"] / MIB, next(c for begin, c in COLOURS.items() if name.startswith(begin))
        weight = "bold" if name in ("ddp", "fsdp-limit") else "normal"
        axes.barh(place, peak, 0.82, color=colour)
        axes.text(
            peak - 0.4, place, f"{peak:.1f}", va="center_baseline", ha="right", color=ink_on(colour), fontweight=weight
        )
        axes.text(1.22 * most, place, f"{rung['sent'] / MIB:.1f}", va="center_baseline", ha="right", fontweight=weight)
    axes.set_yticks(range(len(found)), list(found))
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.invert_yaxis()
    axes.text(0, -0.72, "MiB per rank at the peak of a step", color=SOFT, va="bottom")
    axes.text(1.22 * most, -0.72, "MiB sent", color=SOFT, va="bottom", ha="right")
    axes.set(xlim=(0, 1.22 * most), xticks=[], ylim=(len(found) - 0.45, -0.6))
    axes.spines[["left", "bottom"]].set_visible(False)
    return figure
