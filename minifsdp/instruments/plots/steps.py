"""Animated memory plot, one frame per rung."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from minifsdp.instruments.plots.drawing import areas, at_peak, grouped, name_groups, rows_of_tags, tag_patches
from minifsdp.instruments.plots.ladder import Rung
from minifsdp.instruments.plots.palette import BLACK, INK, LINE, SOFT, TAG_COLOURS
from minifsdp.instruments.plots.style import DIAMOND, wall_style

_MIB = 2**20
_FIRST, _FRAME = 3000, 1300  # milliseconds
_LARGE, _TYPE, _SMALL = 19, 15, 13  # points: on a phone the picture is shown at 40 %
_ROW, _GAP = 0.33, 0.85  # a row in inches, and what is between groups of rows in rows
_ABOVE, _BELOW = 1.2, 0.45  # inches, of titles and of the legend
_MARK: Any = {**DIAMOND, "markersize": 7}


def memory_steps(rungs: Sequence[Rung], path: str | Path) -> None:
    """Animate the peak of each rung, with the memory over its step; the first frame has them all.

    Args:
        rungs: as for `plots.memory_figure`, each also with "adds", its addition to the rung before.
        path: the GIF to write. Equal input gives equal bytes.
    """
    colours = _colours()
    frames = [_image(figure).quantize(palette=colours, dither=Image.Dither.NONE) for figure in memory_frames(rungs)]
    durations = [_FIRST] + [_FRAME] * len(rungs)
    frames[0].save(path, format="GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0)


def memory_frames(rungs: Sequence[Rung]) -> Iterator[Figure]:
    """The frames: always the same figure. Everything is drawn into it once, and each frame shows a part of it."""
    with wall_style():
        peaks = [sum(at_peak(rung["curve"]).values()) / _MIB for rung in rungs]
        places, headings = grouped([rung["group"] for rung in rungs], _GAP)
        figure = _figure(places[-1] + 1, any(rung["peak_at_most"] for rung in rungs))
        axes = figure.axes[0]
        height = figure.get_figheight()
        title = figure.suptitle("", x=0.012, y=1 - 0.12 / height, ha="left", va="top", fontsize=_LARGE)
        below = figure.text(0.012, 1 - 0.5 / height, "", va="top", fontsize=_TYPE, color=SOFT)
        rows = _draw_rows(axes, rungs, max(peaks), places)
        name_groups(axes, headings, _SMALL)
        (step,) = axes.child_axes
        for place in (None, *range(len(rungs))):
            title.set_text(_title(rungs, peaks, place))
            below.set_text(_below(rungs, peaks, place))
            step.set_visible(place is not None)
            for number, row in enumerate(rows):
                row.show(drawn=place is None or number <= place, current=number == place)
            yield figure


def _figure(rows: float, has_bounds: bool) -> Figure:
    """The frame without its rungs."""
    height = _ABOVE + _ROW * rows + _BELOW
    figure = Figure(figsize=(9.6, height), dpi=100)
    axes = figure.add_axes((0.2, _BELOW / height, 0.79, _ROW * rows / height))
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_visible(False)
    bound = ";  \N{WHITE DIAMOND}: bound computed before any rank starts" if has_bounds else ""
    says = f"MiB of a rank at the peak of a step{bound}"
    axes.set_title(says, fontsize=_SMALL, fontweight="normal", color=SOFT, pad=4)
    style: Any = {"ncols": 6, "fontsize": _SMALL, "handlelength": 1, "columnspacing": 1.2}
    figure.legend(handles=tag_patches(), loc="lower center", bbox_to_anchor=(0.5, 0), **style)
    return figure


@dataclass(frozen=True)
class _Row:
    """The artists of one rung.

    Attributes:
        bar: its peak, by tags, and the bound.
        number: its peak in MiB, at the end of the bar.
        name: the rung's.
        step: the memory over its step, by tags.
        axes: those of the steps of all rungs.
        events: of this rung's step.
    """

    bar: Sequence[Artist]
    number: Text
    name: Text
    step: Sequence[Artist]
    axes: Axes
    events: int

    def show(self, drawn: bool, current: bool) -> None:
        """Show the bar, if it is drawn already; in bold, and with the step, the rung that is drawn now."""
        for artist in (*self.bar, self.number):
            artist.set_visible(drawn)
        self.name.set_color(INK if drawn else LINE)
        for text in (self.number, self.name):
            text.set_fontweight("bold" if current else "normal")
        for artist in self.step:
            artist.set_visible(current)
        if current:
            self.axes.set_xlim(0, max(1, self.events - 1))


def _draw_rows(axes: Axes, rungs: Sequence[Rung], highest: float, places: Sequence[float]) -> list[_Row]:
    ends = rows_of_tags(axes, [at_peak(rung["curve"]) for rung in rungs], 0.76, _MIB, places)
    axes.set_xlim(0, 1.14 * highest)
    axes.set_yticks(places, [rung["name"] for rung in rungs], fontsize=_TYPE)
    step = axes.inset_axes((0.66, 0.03, 0.34, 0.36))
    step.set_ylim(0, 1.05 * highest)
    step.set_yticks([])
    step.spines["left"].set_visible(False)
    step.set_title("over its step", fontsize=_SMALL, fontweight="normal", color=SOFT)
    rows = []
    for row, (place, end, name, rung) in enumerate(zip(places, ends, axes.get_yticklabels(), rungs, strict=True)):
        bar = axes.patches[len(TAG_COLOURS) * row :][: len(TAG_COLOURS)]
        bounds = [max(rung["peak_at_most"]) / _MIB] if rung["peak_at_most"] else []
        marks = axes.plot(bounds, [place] * len(bounds), **_MARK)
        number = axes.text(max(end, *bounds, 0) + 0.018 * highest, place, f"{end:.1f}", va="center", fontsize=_TYPE)
        events = areas(step, rung["curve"], _MIB)
        rows.append(_Row([*bar, *marks], number, name, step.collections[-len(TAG_COLOURS) :], step, events))
    return rows


def _title(rungs: Sequence[Rung], peaks: Sequence[float], place: int | None) -> str:
    """The rung and its peak, compared with the first one's."""
    if place is None:
        saved = 1 - min(peaks) / max(peaks)
        return f"One model, one step, {len(rungs)} ways: up to {saved:.0%} less memory"
    title = f"{rungs[place]['name']}: {peaks[place]:.1f} MiB"
    change = round(100 * (peaks[place] / peaks[0] - 1))
    if place == 0:
        return title
    compared = f"{abs(change)}% {'more' if change > 0 else 'less'} than" if change else "as much as"
    return f"{title}, {compared} {rungs[0]['name']}"


def _below(rungs: Sequence[Rung], peaks: Sequence[float], place: int | None) -> str:
    """The rung's addition."""
    if place is not None:
        adds: str = rungs[place]["adds"]
        return adds[0].upper() + adds[1:]
    most, least = peaks.index(max(peaks)), peaks.index(min(peaks))
    return (
        f"From {peaks[most]:.1f} MiB with {rungs[most]['name']} to {peaks[least]:.1f} MiB with {rungs[least]['name']}"
    )


def _colours() -> Image.Image:
    """A palette of the figure's colours, and of their edges on white."""
    mixed = []
    for colour in (*TAG_COLOURS.values(), BLACK, INK, SOFT, LINE):
        parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
        mixed += [255 - (255 - part) * k // 4 for k in range(1, 5) for part in parts]
    image = Image.new("P", (1, 1))
    image.putpalette([255, 255, 255, *mixed])
    return image


def _image(figure: Figure) -> Image.Image:
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
