"""What the figures and numbers of all decks share: size, type, units, and how figures become files.

A figure has no title: the slide that shows it says what is to be seen.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.figure import Figure

from minifsdp.instruments.plots.palette import INK, LINE, SOFT

GB, MB, KB = 10**9, 10**6, 10**3
GIB, MIB, KIB = 2**30, 2**20, 2**10
WIDTH, HEIGHT = 11.5, 5.0  # inches; a slide's picture is shown at 100 pixels each

_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 18,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 18,
    "axes.titleweight": "bold",
    "axes.labelcolor": SOFT,
    "axes.edgecolor": SOFT,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": SOFT,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "hatch.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 18,
    "lines.linewidth": 2.4,
    "svg.fonttype": "path",  # the letters are drawn: no font need be where the deck is shown
    "svg.hashsalt": "minifsdp",  # or each run would name its clip paths anew
    "text.color": INK,
}

Draw = Callable[[], Figure]


def in_units(name: str, size: float, digits: int) -> Callable[..., str]:
    """What writes a number in units of `size`, with so many digits unless a deck asks for others."""
    return lambda value, digits=digits: f"{value / size:,.{digits}f} {name}"


def canvas(height: float = HEIGHT, width: float = WIDTH) -> Figure:
    """An empty figure as wide as a slide's text."""
    return Figure(figsize=(width, height), layout="constrained")


def settled(figure: Figure) -> Figure:
    """Laid out, and rounded: the solver's last bit is not the same in every run, and clip paths have names after it."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        axes.set_position([round(each, 6) for each in axes.get_position(original=True).bounds])
    return figure


def check(draw: Draw, problems: Callable[[Figure], list[str]]) -> list[str]:
    """Problems of the figure as it is shown."""
    with style.context(["default", _STYLE]):
        return problems(settled(draw()))


def draw_all(figures: Mapping[str, Draw], folder: Path) -> dict[Path, bytes]:
    """Each figure as SVG, by the file that it belongs in: equal input, equal bytes."""
    drawn = {}
    for name, draw in figures.items():
        image = io.BytesIO()
        with style.context(["default", _STYLE]):
            settled(draw()).savefig(image, format="svg", metadata={"Date": None, "Creator": None})
        drawn[folder / f"{name}.svg"] = image.getvalue()
    return drawn
