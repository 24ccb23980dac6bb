"""Other pictures of a lab's notebook: what ran when, and anything measured over a quantity."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from minifsdp.course.plots.drawing import lane_patches, lanes, row_title, step_of
from minifsdp.course.plots.picture import Picture, given, legend_beside, page
from minifsdp.course.plots.style import SERIES_COLOURS, notebook_style
from minifsdp.course.timeline import Span, overlap

_ROW = 78  # characters over a row of a timeline
_FEW = 16  # as many points are shown one by one
_DASHES: Any = [(0, (4, 3)), (0, (1, 1.5)), (0, (6, 2, 1, 2))]

Points = tuple[Sequence[float], Sequence[float]]


def timeline(rungs: Mapping[str, Sequence[Span]], *, title: str, says: str, lab: str | None = None) -> Picture:
    """What ran when, a row of lanes for each name, all on one time axis.

    Args:
        rungs: by name, the spans that `timeline.read_trace` gives.
        title: the finding.
        says: one sentence on how to read it.
        lab: whose pieces ran, for the subtitle.
    """
    longest = max([step_of(spans) for spans in rungs.values()] + [1e-3])
    with notebook_style():
        figure = page(1.45 + 1.1 * len(rungs), title, says, lab)
        rows = figure.subplots(len(rungs), 1, sharex=True, squeeze=False)[:, 0]
        for row, (name, spans) in zip(rows, rungs.items(), strict=True):
            lanes(row, spans, longest, inside=True)
            row.set_title(textwrap.fill(row_title(name, spans, overlap(spans)), _ROW))
        rows[-1].set_xlabel("ms from the start of the step")
        legend_beside(rows[0], lane_patches(span for spans in rungs.values() for span in spans))
    return Picture(figure, title, says, {})


def lines(
    series: Mapping[str, Points],
    *,
    xlabel: str,
    ylabel: str,
    title: str,
    says: str,
    lab: str | None = None,
    expected: Mapping[str, Points] | None = None,
    logx: bool = False,
    logy: bool = False,
) -> Picture:
    """Measured points over a quantity, and expected ones, dashed and with diamonds.

    Args:
        series: by name, xs and ys.
        xlabel: the quantity, with its unit.
        ylabel: what was measured, with its unit.
        title: the finding.
        says: one sentence on how to read it.
        lab: whose pieces ran, for the subtitle.
        expected: the same; a name may be that of a series.
        logx: logarithmic axis.
        logy: logarithmic axis.
    """
    expected = expected or {}
    colours = {name: SERIES_COLOURS[number % len(SERIES_COLOURS)] for number, name in enumerate(series)}
    with notebook_style():
        figure = page(3.9, title, says, lab)
        axes = figure.subplots()
        for name, (xs, ys) in series.items():
            dots: Any = {"marker": "o" if len(xs) <= _FEW else "", "markersize": 4}
            axes.plot(xs, ys, color=colours[name], label=name, clip_on=False, **dots)
        unnamed = [name for name in expected if name in series]  # these need one entry in the legend between them
        for number, (name, (xs, ys)) in enumerate(expected.items()):
            dashes = _DASHES[0 if name in series else number % len(_DASHES)]
            hollow: Any = {"marker": "D" if len(xs) <= _FEW else "", "markersize": 7.5, "markerfacecolor": "none"}
            label = name if name not in series else "expected" if name == unnamed[0] else ""
            axes.plot(xs, ys, color="black", linewidth=0.9, linestyle=dashes, label=label, clip_on=False, **hollow)
        axes.set(xlabel=xlabel, ylabel=textwrap.fill(ylabel, 38))
        _scale(axes, sorted({x for xs, _ in (*series.values(), *expected.values()) for x in xs}), logx, logy)
        legend_beside(axes, axes.get_legend_handles_labels()[0])
    points = {name: {"x": list(xs), "y": list(ys)} for name, (xs, ys) in series.items()}
    wanted = {name: {"x": list(xs), "y": list(ys)} for name, (xs, ys) in expected.items()}
    return Picture(figure, title, says, given(measured=points, expected=wanted))


def _scale(axes: Axes, xs: Sequence[float], logx: bool, logy: bool) -> None:
    """Ticks at the data where they are few and have short names."""
    if logx:
        axes.set_xscale("log", base=2)
    names = [f"{x:,.7g}" for x in xs]
    if len(xs) <= 9 and max(map(len, names), default=0) <= 7 and (logx or _even(xs)):
        axes.set_xticks(xs, names)
        axes.minorticks_off()
    elif not logx and all(x == int(x) for x in xs):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # there are no half ranks
    if logy:
        axes.set_yscale("log")
    else:
        if axes.dataLim.ymin >= 0:
            axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _even(xs: Sequence[float]) -> bool:
    """Whether ticks at all points keep apart."""
    return len(xs) < 2 or min(b - a for a, b in pairwise(xs)) > (xs[-1] - xs[0]) / 14
