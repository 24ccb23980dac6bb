"""ZeRO's idea: what one rank needs of the model state in each phase of a step."""

from __future__ import annotations

from draw.canvas import canvas
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minifsdp.instruments.plots.palette import LINE, PALE, SOFT, TAG_COLOURS, as_text, ink_on

RANKS, MINE = 4, 1
PHASES = "forward", "backward", "step()"
NEEDS = {  # in each phase
    "optimizer": ("nothing", "nothing", "its quarter"),
    "gradients": ("nothing", "all, layer by layer", "its quarter"),
    "parameters": ("all, layer by layer", "all, layer by layer", "its quarter"),
}
NAMES = {"optimizer": "optimizer state", "gradients": "gradients", "parameters": "parameters"}
REST = {"parameters": TAG_COLOURS["unsharded"], "gradients": TAG_COLOURS["gradients"]}


def draw_needs() -> Figure:
    """Three kinds of state by three phases; solid is the rank's quarter, paler the rest."""
    figure = canvas(4.35)
    axes = figure.subplots()
    for column, phase in enumerate(PHASES):
        axes.text(2.85 * column + 1.2, 0.35, phase, ha="center", fontsize=20, fontweight="bold")
    axes.text(9.9, 0.35, "it keeps 1/4", ha="center", fontsize=20, fontweight="bold")
    for row, (tag, needs) in enumerate(NEEDS.items()):
        colour, y = TAG_COLOURS[tag], -1.42 * row - 0.7
        axes.text(-0.2, y + 0.3, NAMES[tag], ha="right", va="center", color=as_text(colour), fontweight="bold")
        for column, need in enumerate(needs):
            for part in range(RANKS):
                own = part == MINE and need != "nothing"
                face = colour if own else REST.get(tag, PALE) if need.startswith("all") else PALE
                alpha = 0.45 if need.startswith("all") and not own and tag == "gradients" else 1.0
                look = {"facecolor": face, "edgecolor": LINE, "linewidth": 1, "alpha": alpha}
                axes.add_patch(Rectangle((2.85 * column + 0.6 * part, y), 0.6, 0.6, **look))
            ink = SOFT if need == "nothing" else as_text(colour)
            axes.text(2.85 * column + 1.2, y - 0.12, need, ha="center", va="top", color=ink)
        axes.add_patch(Rectangle((9.1, y), 1.6, 0.6, facecolor=colour))
        axes.text(9.9, y + 0.29, f"stage {row + 1}", ha="center", va="center", color=ink_on(colour), fontweight="bold")
    axes.text(-0.2, 0.35, f"rank {MINE} of {RANKS} needs", ha="right")
    axes.set(xlim=(-2.9, 10.8), ylim=(-4.1, 0.8))
    axes.axis("off")
    return figure
