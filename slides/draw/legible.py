"""Figures must be readable from the back of a room: type of 18 pt, a contrast of 4.5 : 1, as wide as the slide.

A figure of 11.5 inches is shown 1,104 of a slide's 1,280 pixels wide, so a letter of 18 pt has 24 of its 720 pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from draw.canvas import WIDTH
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.path import Path
from matplotlib.text import Text

from minifsdp.instruments.plots.palette import WHITE, contrast

LEAST_TYPE = 18  # points
LEAST_CONTRAST = 4.5
HEIGHTS = 3.0, 5.2  # inches: lower is a strip, higher is shrunk to fit below a title


def illegible(figure: Figure) -> list[str]:
    """One line for each text that is too small, too pale or cut off, and for a figure that wastes its slide."""
    figure.draw_without_rendering()
    width, height = figure.get_size_inches()
    found = []
    if width != WIDTH or not HEIGHTS[0] <= height <= HEIGHTS[1]:
        found.append(f"{width} x {height} inches: {WIDTH} x {HEIGHTS[0]} to {HEIGHTS[1]} fill a slide")
    filled = list(_filled(figure))
    ticks = {id(each) for axes in figure.axes for at in (axes.xaxis, axes.yaxis) for each in at.get_ticklabels()}
    for text in _texts(figure):
        what = repr(text.get_text())
        if text.get_fontsize() < LEAST_TYPE:
            found.append(f"{what} has {text.get_fontsize():g} pt: {LEAST_TYPE} at least")
        extent, page = text.get_window_extent(), figure.bbox.padded(1)
        whole = page.contains(extent.x0, extent.y0) and page.contains(extent.x1, extent.y1)
        if not whole and id(text) not in ticks:  # ticks beyond an axis have labels, which are not drawn
            found.append(f"{what} is cut off")
        ratio = contrast(to_hex(text.get_color()), _behind(text, filled))
        if ratio < LEAST_CONTRAST:
            found.append(f"{what} has a contrast of {ratio:.1f}: {LEAST_CONTRAST} at least")
    return found


def _texts(figure: Figure) -> Iterator[Text]:
    """All texts that are seen; of an axis that is switched off, none is."""
    bare = [axis for axes in figure.axes if not axes.axison for axis in (axes.xaxis, axes.yaxis)]
    off = {id(text) for axis in bare for text in axis.findobj(Text)}
    for text in figure.findobj(Text):
        if isinstance(text, Text) and text.get_text().strip() and text.get_visible() and id(text) not in off:
            yield text


def _filled(figure: Figure) -> Iterator[tuple[float, Path, str]]:
    """Filled shapes that text may lie on, each with its place in the order of drawing."""
    for axes in figure.axes:
        for patch in axes.patches:
            if patch.get_fill() and patch.get_visible():
                shape = patch.get_path().transformed(patch.get_transform())
                yield patch.get_zorder(), shape, _on_white(patch.get_facecolor())
        for shapes in axes.collections:
            if isinstance(shapes, PolyCollection) and not isinstance(shapes, PathCollection):
                for path, colour in zip(shapes.get_paths(), _cycled(shapes.get_facecolor()), strict=False):
                    yield shapes.get_zorder(), path.transformed(shapes.get_transform()), _on_white(colour)


def _cycled(colours: Any) -> Iterator[Any]:
    while len(colours):
        yield from colours


def _behind(text: Text, filled: list[tuple[float, Path, str]]) -> str:
    """The colour that is drawn last where the text has its middle."""
    box = text.get_bbox_patch()
    if isinstance(box, Patch) and box.get_fill():
        return _on_white(box.get_facecolor())
    extent = text.get_window_extent()
    at = (extent.x0 + extent.x1) / 2, (extent.y0 + extent.y1) / 2
    below = [(order, n, colour) for n, (order, shape, colour) in enumerate(filled) if shape.contains_point(at)]
    return max(below)[2] if below else WHITE


def _on_white(colour: Any) -> str:
    """What a colour that lets light through looks like on white."""
    red, green, blue, alpha = (*to_rgb(colour), colour[3] if len(colour) == 4 else 1.0)
    return to_hex(tuple(alpha * each + 1 - alpha for each in (red, green, blue)))
