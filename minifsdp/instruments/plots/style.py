"""The common style of all plots: fonts, lines, markers, units."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from matplotlib import style

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
