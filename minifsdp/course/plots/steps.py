"""Animated memory plot, one frame per rung."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from minifsdp.course.plots.drawing import areas, at_peak, stack, tag_patches, totals
from minifsdp.course.plots.ladder import Rung
from minifsdp.course.plots.palette import LANE_COLOURS
from minifsdp.course.plots.style import wall_style

_MIB = 2**20
_FRAME, _LAST = 1800, 5000  # milliseconds
_TO_COME = LANE_COLOURS["host"]


def memory_steps(rungs: Sequence[Rung], path: str | Path) -> list[Figure]:
    """Animate the memory of rank 0 over one step, rung by rung, beside the peaks of earlier rungs.

    Args:
        rungs: as for `plots.memory_figure`, each also with "adds", its addition to the rung before.
        path: the GIF to write. Equal input gives equal bytes.

    Returns:
        The frames' figures.
    """
    with wall_style():
        figures = [_frame(rungs, place) for place in range(len(rungs))]
        frames = [_image(figure) for figure in figures]
    durations = [_FRAME] * (len(frames) - 1) + [_LAST]
    frames[0].save(path, format="GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0)
    return figures


def _frame(rungs: Sequence[Rung], place: int) -> Figure:
    rung = rungs[place]
    highest = 1.12 * max(max(totals(each["curve"])) for each in rungs) / _MIB
    figure = Figure(figsize=(9.6, 4.0), layout="constrained", dpi=100)
    step, peaks = figure.subplots(1, 2, width_ratios=(1.15, 1), sharey=True)
    areas(step, rung["curve"], _MIB)
    step.set_ylim(0, highest)
    step.set_ylabel("memory of rank 0, MiB", fontsize=10)
    step.tick_params(labelsize=10)
    _name_phases(step, rung["curve"])
    figure.suptitle(f"{place + 1}  {rung['name']}: {rung['adds']}", x=0.012, ha="left", fontsize=13)
    step.set_title("over a step", fontsize=10, fontweight="normal")
    for number, each in enumerate(rungs):
        sizes = at_peak(each["curve"])
        if number <= place:
            stack(peaks, number, 0.74, sizes, _MIB)
        if number == place:
            text = f"{sum(sizes.values()) / _MIB:.1f}"
            peaks.text(number, sum(sizes.values()) / _MIB, text, ha="center", va="bottom", fontsize=11)
    peaks.set_xlim(-0.6, len(rungs) - 0.4)
    peaks.set_xticks(range(len(rungs)), [str(number + 1) for number in range(len(rungs))], fontsize=10)
    for number, label in enumerate(peaks.get_xticklabels()):
        label.set_color("black" if number <= place else _TO_COME)
    peaks.tick_params(axis="x", length=0)
    peaks.tick_params(axis="y", left=False, labelleft=False)
    peaks.spines["left"].set_visible(False)
    peaks.set_title("at the peak of each rung so far", fontsize=10, fontweight="normal")
    figure.legend(handles=tag_patches(), loc="outside lower center", ncols=6, fontsize=10)
    return figure


def _name_phases(axes: Axes, curve: Any) -> None:
    begins = [start for start, _ in curve["marks"]]
    ends = [*begins[1:], len(totals(curve))]
    for start, end, (_, phase) in zip(begins, ends, curve["marks"], strict=True):
        axes.axvline(start, color="black", linewidth=0.6)
        style: Any = {"transform": axes.get_xaxis_transform(), "fontsize": 10}
        if end - start > 0.12 * ends[-1]:
            axes.text((start + end) / 2, -0.025, phase, ha="center", va="top", **style)


def _image(figure: Figure) -> Image.Image:
    pixels = io.BytesIO()
    figure.savefig(pixels, format="png", metadata={"Software": None})
    return Image.open(pixels).convert("RGB").quantize(64, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
