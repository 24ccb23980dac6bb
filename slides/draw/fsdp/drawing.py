"""What the figures of deck 3 are drawn with: boxes, words, and names of rows."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from minifsdp.instruments.plots.palette import INK, SOFT


def box(axes: Axes, at: tuple[float, float], width: float, height: float, colour: str, **style: Any) -> None:
    look: dict[str, Any] = {"facecolor": colour, "edgecolor": "white", "linewidth": 1.2}
    axes.add_patch(Rectangle(at, width, height, **look | style))


def padding_box(axes: Axes, at: tuple[float, float], width: float, height: float) -> None:
    box(axes, at, width, height, "white", edgecolor=SOFT, hatch="////", linewidth=0.8)


def say(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    look: dict[str, Any] = {"ha": "center", "va": "center"}
    axes.text(x, y, text, **look | style)


def bare(axes: Axes, x: tuple[float, float], y: tuple[float, float]) -> None:
    axes.set_xlim(*x)
    axes.set_ylim(*y)
    axes.axis("off")


def named(axes: Axes, names: list[str]) -> None:
    """Rows of bars, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.invert_yaxis()
