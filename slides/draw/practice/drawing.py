"""What the figures of deck 5 are drawn with: boxes, and a canvas without axes."""

from __future__ import annotations

from typing import Any

from draw.canvas import canvas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minifsdp.instruments.plots.palette import DTYPE_COLOURS, INK, ink_on

FP32, BF16 = DTYPE_COLOURS["fp32"], DTYPE_COLOURS["bf16"]


def box(axes: Axes, x: float, y: float, size: tuple[float, float], colour: str, text: str = "", **style: Any) -> None:
    """A box with a word in its middle; `style` is the word's."""
    width, height = size
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", linewidth=1.5))
    look: dict[str, Any] = {"ha": "center", "va": "center", "color": ink_on(colour) if colour.startswith("#") else INK}
    axes.text(x + width / 2, y + height / 2, text, **(look | style))


def bare(height: float, right: float, top: float, left: float = 0.0, bottom: float = 0.0) -> tuple[Figure, Axes]:
    """A canvas for a drawing without axes."""
    figure = canvas(height)
    axes = figure.subplots()
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    axes.axis("off")
    return figure, axes
