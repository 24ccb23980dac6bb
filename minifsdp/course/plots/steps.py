"""Animated memory plot, one frame per rung."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

from minifsdp.course.plots.drawing import areas, at_peak, rows_of_tags, tag_patches
from minifsdp.course.plots.ladder import Rung
from minifsdp.course.plots.palette import BLACK, INK, LINE, SOFT, TAG_COLOURS
from minifsdp.course.plots.style import wall_style

_MIB = 2**20
_FIRST, _FRAME = 1900, 500  # milliseconds; twelve rungs take less than eight seconds
_LARGE, _TYPE, _SMALL = 19, 16, 13  # points: on a phone the picture is shown at 40 %


def memory_steps(rungs: Sequence[Rung], path: str | Path) -> list[Figure]:
    """Animate the peak of each rung, with the memory of rank 0 over its step; the first frame has them all.

    Args:
        rungs: as for `plots.memory_figure`, each also with "adds", its addition to the rung before.
        path: the GIF to write. Equal input gives equal bytes.

    Returns:
        The frames' figures.
    """
    with wall_style():
        figures = [_frame(rungs, place) for place in (None, *range(len(rungs)))]
        pictures = [_image(figure) for figure in figures]
    colours = _colours()
    frames = [each.quantize(palette=colours, dither=Image.Dither.NONE) for each in pictures]
    durations = [_FIRST] + [_FRAME] * len(rungs)
    frames[0].save(path, format="GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0)
    return figures


def _frame(rungs: Sequence[Rung], place: int | None) -> Figure:
    """The rungs up to `place`, the step of that one beside them; None: all rungs, and no step."""
    height = 1.6 + 0.4 * len(rungs)
    figure = Figure(figsize=(9.6, height), dpi=100)
    axes = figure.add_axes((0.2, 0.45 / height, 0.79, 1 - 1.35 / height))
    peaks = [sum(at_peak(rung["curve"]).values()) / _MIB for rung in rungs]
    last = len(rungs) - 1 if place is None else place
    ends = rows_of_tags(axes, [at_peak(rung["curve"]) for rung in rungs[: last + 1]], 0.76, _MIB)
    for row, end in enumerate(ends):
        bold = "bold" if row == place else "normal"
        axes.text(end + 0.012 * max(peaks), row, f"{end:.1f}", va="center", fontsize=_TYPE, fontweight=bold)
    axes.set_yticks(range(len(rungs)), [rung["name"] for rung in rungs], fontsize=_TYPE)
    for row, label in enumerate(axes.get_yticklabels()):
        label.set_color(INK if row <= last else LINE)
        label.set_fontweight("bold" if row == place else "normal")
    axes.set_ylim(len(rungs) - 0.5, -0.5)
    axes.set_xlim(0, 1.13 * max(peaks))
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_visible(False)
    if place is not None:
        _draw_step(axes.inset_axes((0.66, 0.03, 0.34, 0.36)), rungs[place], 1.05 * max(peaks))
    sentence = _sentence(rungs, peaks, place)
    at: Any = {"x": 0.012, "y": 1 - 0.12 / height, "ha": "left", "va": "top"}
    figure.suptitle(sentence[0].upper() + sentence[1:], fontsize=_LARGE, **at)
    axes.set_title("MiB of a rank at the peak of a step", fontsize=_SMALL, fontweight="normal", color=SOFT, pad=4)
    style: Any = {"ncols": 6, "fontsize": _SMALL, "handlelength": 1, "columnspacing": 1.2}
    figure.legend(handles=tag_patches(), loc="lower center", bbox_to_anchor=(0.5, 0), **style)
    return figure


def _draw_step(axes: Any, rung: Rung, highest: float) -> None:
    areas(axes, rung["curve"], _MIB)
    axes.set_ylim(0, highest)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_title("over its step", fontsize=_SMALL, fontweight="normal", color=SOFT)


def _sentence(rungs: Sequence[Rung], peaks: Sequence[float], place: int | None) -> str:
    """The rung's addition, and the change of the peak."""
    if place is None:
        saved = 1 - min(peaks) / max(peaks)
        return f"One model, one step, {len(rungs)} ways: up to {saved:.0%} less memory"
    if place == 0:
        return f"{rungs[0]['adds']}: {peaks[0]:.1f} MiB"
    change = peaks[place] - peaks[place - 1]
    number = "no change" if abs(change) < 0.05 else f"{change:+.1f} MiB".replace("-", "\N{MINUS SIGN}")
    return f"{rungs[place]['adds']}: {number}"


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
    pixels = io.BytesIO()
    figure.savefig(pixels, format="png", metadata={"Software": None})
    return Image.open(pixels).convert("RGB")
