"""What the figures of deck 4 are drawn with: boxes in lanes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from minifsdp.instruments.plots.palette import GATHER, INK, LANE_COLOURS, REDUCE, ink_on

COLOURS = {
    "all-gather": GATHER,
    "compute": LANE_COLOURS["compute"],
    "copy": LANE_COLOURS["copy"],
    "reduce-scatter": REDUCE,
    "host": LANE_COLOURS["host"],
}


def box(axes: Axes, left: float, middle: float, width: float, kind: str, text: str) -> None:
    """A piece of work, from `left` on."""
    look: Any = {"facecolor": COLOURS[kind], "edgecolor": "white", "linewidth": 1.5}
    axes.add_patch(Rectangle((left, middle - 0.32), width, 0.64, **look))
    axes.text(left + width / 2, middle, text, ha="center", va="center_baseline", color=ink_on(COLOURS[kind]))


def bare(axes: Axes, names: Mapping[str, float], right: float, low: float, high: float) -> None:
    """No frame; the lanes' names on the left."""
    axes.set_yticks(list(names.values()), names)
    axes.set_xlim(0, right)
    axes.set_ylim(low, high)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_xticks([])
