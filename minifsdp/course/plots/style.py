"""The common style of all plots: colours safe for colour-blind readers (Okabe and Ito), fonts, units."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from matplotlib import style

TAG_COLOURS = {
    "parameters": "#0072B2",
    "unsharded": "#56B4E9",
    "gradients": "#D55E00",
    "optimizer": "#009E73",
    "activations": "#F0E442",
    "communication": "#CC79A7",
}
"""Colours of the ledger's tags, in stacking order from the bottom."""

LANE_COLOURS = {
    "compute": "#5F6B76",
    "communication": TAG_COLOURS["communication"],
    "copy": "#009E73",
    "host": "#CBD3DA",
    "wait": "#E69F00",
}
"""Colours of the timeline's lanes, from the top."""

REDUCTION_COLOUR = "#882255"
"""Reductions in the communication lane; a schedule decides their positions between the gathers."""

BLOCK_COLOURS = {"in use": TAG_COLOURS["parameters"], "waiting": "#E69F00", "free": "#E3E5E8"}
"""Colours of an allocator's memory, by block state."""

EARLIER_COLOURS = ("#E3E5E8", "#D0D4D8", "#BCC1C7", "#A7ADB5", "#9299A2", "#7D858F")
"""Greys of earlier rungs, in order: the nearer, the darker."""

SERIES_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours of series that differ only by name."""

DIAMOND: dict[str, Any] = {
    "marker": "D",
    "linestyle": "",
    "color": "black",
    "markerfacecolor": "white",
    "markersize": 3.5,
    "clip_on": False,
}
"""Marker of a predicted value."""

PREDICTED = "predicted before any rank starts"

_COMMON: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.frameon": False,
    "figure.dpi": 140,
    "figure.titlesize": 12,
    "figure.titleweight": "bold",
}
_NOTEBOOK: dict[str, Any] = {**_COMMON, "font.size": 9, "axes.titlesize": 9, "figure.dpi": 110, "figure.titlesize": 11}


def wall_style() -> AbstractContextManager[None]:
    """The style of the ladder's figures, which fill a page."""
    return style.context(["default", _COMMON])


def notebook_style() -> AbstractContextManager[None]:
    """The style of plots between the cells of a lab."""
    return style.context(["default", _NOTEBOOK])


def unit_for(largest: float) -> tuple[str, int]:
    """A readable unit for amounts up to `largest` bytes: its name and its size in bytes."""
    for name, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if largest >= size:
            return name, size
    return "B", 1
