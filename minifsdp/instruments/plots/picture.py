"""A figure as the value of a notebook cell: an image for the reader, text for comparing outputs."""

from __future__ import annotations

import io
import numbers
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from minifsdp.instruments.plots import subtitle
from minifsdp.instruments.plots.palette import INK, SOFT
from minifsdp.instruments.plots.style import notebook_style

WIDTH = 8.0  # inches
_TITLE = 84  # characters per line
_SENTENCE = 118
_NAME = 26
_LINE = 13.5  # points
_SHOWN = 12  # up to this number, a list's numbers are shown one by one


class Picture:
    """The return value of a lab's plot, displayed if it is the last value of a cell.

    Attributes:
        figure: the matplotlib figure.
        title: the finding.
        says: how to read it.
        data: the plotted numbers by name; empty if they differ from run to run.
    """

    def __init__(self, figure: Figure, title: str, says: str, data: Mapping[str, Any]) -> None:
        self.figure, self.title, self.says, self.data = figure, title, says, dict(data)

    def __repr__(self) -> str:
        subtitle = str(self.figure.get_label())
        head = f"{self.title} ({subtitle})" if subtitle else self.title
        return "\n".join([head, self.says, *(f"  {name}: {in_words(value)}" for name, value in self.data.items())])

    def _repr_png_(self) -> bytes:
        image = io.BytesIO()
        with notebook_style():
            self.figure.savefig(image, format="png", metadata={"Software": None})
        return image.getvalue()


def page(height: float, title: str, says: str, lab: str | None, model: str | None = None) -> Figure:
    """An empty figure with the finding, a subtitle (the model, whose answers), and the sentence at the bottom."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    heading = textwrap.wrap(title, _TITLE) or [""]
    remarks = [f"model, not measured: {model}"] if model is not None else []
    if lab is not None:
        remarks.append(subtitle.of_lab(lab))
    if remarks:
        figure.set_label("; ".join(remarks))
        below = ScaledTranslation(0, -(4 + _LINE * len(heading)) / 72, figure.dpi_scale_trans)
        place = figure.transFigure + below
        line = figure.text(0.012, 1, "; ".join(remarks), va="top", color=SOFT, transform=place)
        line.set_in_layout(False)
        heading.append("")  # reserves its space
    figure.suptitle("\n".join(heading), x=0.012, ha="left", linespacing=1.2)
    figure.supxlabel(textwrap.fill(says, _SENTENCE), x=0.012, ha="left", fontsize=8.5, color=INK)
    return figure


def legend_beside(axes: Axes | Figure, handles: Sequence[Any]) -> None:
    """Draw the legend to the right of the axes or the figure, aligned at the top, with long names wrapped."""
    names = [textwrap.fill(str(handle.get_label()), _NAME) for handle in handles]
    if isinstance(axes, Figure):
        axes.legend(handles, names, loc="outside right upper")
        return
    axes.legend(handles, names, loc="upper left", bbox_to_anchor=(1.01, 1.02), borderaxespad=0)


def given(**numbers: Any) -> dict[str, Any]:
    """The numbers that are present, by name."""
    return {name.replace("_", " "): each for name, each in numbers.items() if each is not None and each != {}}


def in_words(value: Any) -> str:
    """A number, mapping or list as compact text, identical on every machine."""
    match value:
        case Mapping():
            return "; ".join(f"{name} {_grouped(each)}" for name, each in value.items())
        case list() | tuple() if len(value) > _SHOWN:
            return f"[{in_words(value[0])} ... {in_words(value[-1])}, {len(value)} numbers]"
        case list() | tuple():
            return "[" + " ".join(in_words(each) for each in value) + "]"
        case numbers.Real() if abs(number := float(value)) < 1e4 and number != round(number):
            return f"{float(value):.4g}"
        case numbers.Real():
            return f"{float(value):,.0f}"
    return str(value)


def _grouped(value: Any) -> str:
    return f"({in_words(value)})" if isinstance(value, Mapping) else in_words(value)
