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
_TICKS = MaxNLocator(9, steps=[1, 2, 4, 5, 8, 10])

Points = tuple[Sequence[float], Sequence[float]]


def timeline(
    rungs: Mapping[str, Sequence[Span]], *, title: str, says: str, lab: str | None = None, model: str | None = None
) -> Picture:
    """What ran when, a row of lanes for each name, all on one time axis.

    Args:
        rungs: by name, the spans that `timeline.read_trace` or a paper GPU's `Run.last_step()` gives.
        title: the finding.
        says: one sentence on how to read it.
        lab: whose pieces ran, for the subtitle.
        model: the hardware's name, if it is on paper: the subtitle says that nothing was measured.
    """
    longest = max([step_of(spans) for spans in rungs.values()] + [1e-3])
    with notebook_style():
        figure = page(1.45 + 1.1 * len(rungs), title, says, lab, model)
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
    model: str | None = None,
    expected: Mapping[str, Points] | None = None,
    source: str = "expected",
    stairs: Sequence[str] = (),
    logx: bool = False,
    logy: bool = False,
) -> Picture:
    """Measured points over a quantity, joined by lines, and expected ones, as diamonds.

    Dashes join expected points only beyond what was measured, or where they are too many for diamonds. Those of one
    height and with a name of their own are a level: a dashed line.

    Args:
        series: by name, xs and ys.
        xlabel: the quantity, with its unit.
        ylabel: what was measured, with its unit.
        title: the finding.
        says: one sentence on how to read it.
        lab: whose pieces ran, for the subtitle.
        model: the hardware's name, if the points come from a paper GPU: the subtitle says that nothing was measured.
        expected: the same; a name may be that of a series.
        source: what the legend calls expected points that have a series' name.
        stairs: the series whose values stay until the next point.
        logx: logarithmic axis.
        logy: logarithmic axis.
    """
    expected = expected or {}
    colours = {name: SERIES_COLOURS[number % len(SERIES_COLOURS)] for number, name in enumerate(series)}
    with notebook_style():
        figure = page(3.9, title, says, lab, model)
        axes = figure.subplots()
        for name, (xs, ys) in series.items():
            dots: Any = {"marker": "o" if len(xs) <= _FEW else "", "markersize": 4}
            drawn = "steps-post" if name in stairs else "default"
            axes.plot(xs, ys, color=colours[name], label=name, clip_on=False, drawstyle=drawn, **dots)
        unnamed = [name for name in expected if name in series]  # these need one entry in the legend between them
        measured = {x for xs, _ in series.values() for x in xs}
        for name, (xs, ys) in expected.items():
            level = name not in series and len(set(ys)) == 1
            beyond = min(xs) < min(measured) or max(xs) > max(measured)
            dashes: Any = (0, (4, 3)) if level or beyond or len(xs) > _FEW else ""
            hollow: Any = {"marker": "" if level or len(xs) > _FEW else "D", "markersize": 7.5, "fillstyle": "none"}
            line: Any = {"color": colours.get(name, "black"), "linewidth": 0.9, "linestyle": dashes}
            label = name if name not in series else source if name == unnamed[0] else ""
            axes.plot(xs, ys, label=label, clip_on=False, markeredgecolor="black", **line, **hollow)
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
    elif not logx:
        whole = all(x == int(x) for x in xs)  # there are no half ranks
        ticks = [round(float(x), 9) for x in _TICKS.tick_values(xs[0], xs[-1])]
        axes.set_xticks([x for x in ticks if xs[0] <= x <= xs[-1] and (x == int(x) or not whole)])
    if logy:
        axes.set_yscale("log")
    elif axes.dataLim.ymin >= 0:
        axes.set_ylim(bottom=0 if axes.dataLim.ymin else -0.03 * axes.dataLim.ymax)  # a line at 0 is not the axis
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _even(xs: Sequence[float]) -> bool:
    """Whether ticks at all points keep apart."""
    return len(xs) < 2 or min(b - a for a, b in pairwise(xs)) > (xs[-1] - xs[0]) / 14
