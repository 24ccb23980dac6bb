"""Other plots of a lab's notebook: timelines, and measurements over a quantity."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import cycle, pairwise
from math import nan
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from minifsdp.instruments.plots.drawing import lane_patches, lanes, row_title, step_of
from minifsdp.instruments.plots.palette import EARLIER_COLOURS, SERIES_COLOURS, SOFT, colour_of
from minifsdp.instruments.plots.picture import Picture, given, legend_beside, page
from minifsdp.instruments.plots.runs import on_paper, step_of_run
from minifsdp.instruments.plots.style import DIAMOND, notebook_style
from minifsdp.instruments.watch.timeline import Span, overlap

if TYPE_CHECKING:
    from minifsdp.instruments.machine.replay import Run
    from minifsdp.instruments.machine.versus import Versus

_ROW = 78  # characters per line of a timeline row's title
_FEW = 16  # up to this number, points are shown one by one
_MARKERS = "Ds^v"  # of expected points: a diamond, and one for each name that no series has
_TICKS = MaxNLocator(9, steps=[1, 2, 4, 5, 8, 10])

Points = tuple[Sequence[float], Sequence[float]]


def timeline(
    rungs: Mapping[str, Sequence[Span] | Run],
    *,
    title: str,
    says: str,
    lab: str | None = None,
    model: str | None = None,
) -> Picture:
    """Plot a timeline, with a row of lanes for each name, all on one time axis.

    A simulated GPU's bars show the last part of their unit's name if there is room. A `Run` whose host runs ahead also
    has a host lane with its phases and waits; the vertical lines then mark the device's phases.

    Args:
        rungs: by name, the spans from `timeline.read_trace` or a simulated GPU's `Run.last_step()`; or a `Run`.
        title: the finding.
        says: one sentence on how to read it.
        lab: the lab, for the subtitle's count of the learner's answers.
        model: the hardware's name if it is simulated; the subtitle then says that nothing was measured. By default
            that of the `Run`s, with their names if other rows are measured.
    """
    if model is None:
        model = on_paper(rungs)
    rows_of = {name: each if isinstance(each, Sequence) else step_of_run(each) for name, each in rungs.items()}
    longest = max([step_of(spans) for spans in rows_of.values()] + [1e-3])
    begin = 1e3 * min((span.start for spans in rows_of.values() for span in spans if span.lane == "host"), default=0.0)
    lanes_in_all = sum(len({span.lane for span in spans} - {"phase"}) for spans in rows_of.values())
    with notebook_style():
        figure = page(1.45 + max(1.1 * len(rungs), 0.55 * len(rungs) + 0.22 * lanes_in_all), title, says, lab, model)
        rows = figure.subplots(len(rungs), 1, sharex=True, squeeze=False)[:, 0]
        for row, (name, spans) in zip(rows, rows_of.items(), strict=True):
            labelled = model is not None or not isinstance(rungs[name], Sequence)
            lanes(row, spans, longest, begin, labelled)
            row.set_title(textwrap.fill(row_title(name, spans, overlap(spans)), _ROW))
        rows[-1].set_xlabel("ms from the start of the step" + (" on the device" if begin < 0 else ""))
        legend_beside(rows[0], lane_patches(span for spans in rows_of.values() for span in spans))
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
    """Plot measured points over a quantity, joined by lines, and expected points as diamonds.

    Dashes join expected points only outside the measured range, or if there are too many for diamonds. Expected points
    of equal height that share no name with a series are drawn as a level, a dashed line. Each name that no series has
    gets a marker of its own.

    Args:
        series: xs and ys, by name.
        xlabel: the quantity, with its unit.
        ylabel: the measured quantity, with its unit.
        title: the finding.
        says: one sentence on how to read it.
        lab: the lab, for the subtitle's count of the learner's answers.
        model: the hardware's name if the GPU is simulated; the subtitle then says that nothing was measured.
        expected: the same; may share names with series.
        source: legend label of expected points that share a series' name.
        stairs: names of series drawn as steps, each value constant up to the next point.
        logx: logarithmic axis.
        logy: logarithmic axis.
    """
    expected = expected or {}
    others = cycle(SERIES_COLOURS)
    colours = {name: colour_of(name) or next(others) for name in series}
    with notebook_style():
        figure = page(3.9, title, says, lab, model)
        axes = figure.subplots()
        for name, (xs, ys) in series.items():
            dots: Any = {"marker": "o" if len(xs) <= _FEW else "", "markersize": 4}
            drawn = "steps-post" if name in stairs else "default"
            ys = [y if y > 0 or not logy else nan for y in ys]  # a logarithmic line is interrupted at a zero
            axes.plot(xs, ys, color=colours[name], label=name, clip_on=False, drawstyle=drawn, **dots)
        _plot_expected(axes, expected, series, colours, source)
        xlabel, ylabel = (f"{label} (logarithmic)" if log else label for label, log in ((xlabel, logx), (ylabel, logy)))
        axes.set(xlabel=xlabel, ylabel=textwrap.fill(ylabel, 38))
        _scale(axes, sorted({x for xs, _ in (*series.values(), *expected.values()) for x in xs}), logx, logy)
        legend_beside(axes, axes.get_legend_handles_labels()[0])
    points = {name: {"x": list(xs), "y": list(ys)} for name, (xs, ys) in series.items()}
    wanted = {name: {"x": list(xs), "y": list(ys)} for name, (xs, ys) in expected.items()}
    kind = "measured" if model is None else "model"
    return Picture(figure, title, says, given(**{kind: points}, expected=wanted))


def _plot_expected(
    axes: Axes, expected: Mapping[str, Points], series: Mapping[str, Points], colours: Mapping[str, str], source: str
) -> None:
    unnamed = [name for name in expected if name in series]  # these share one legend entry
    free = _MARKERS[1:] if unnamed else _MARKERS  # the diamond belongs to the shared entry
    shapes = dict(zip((name for name in expected if name not in series), cycle(free), strict=False))
    measured = {x for xs, _ in series.values() for x in xs}
    for name, (xs, ys) in expected.items():
        level = name not in series and len(set(ys)) == 1
        beyond = min(xs) < min(measured) or max(xs) > max(measured)
        dashes: Any = (0, (4, 3)) if level or beyond or len(xs) > _FEW else ""
        shape = "" if level or len(xs) > _FEW else shapes.get(name, _MARKERS[0])
        hollow: Any = {"marker": shape, "markersize": 7.5, "fillstyle": "none"}
        line: Any = {"color": colours.get(name, "black"), "linewidth": 0.9, "linestyle": dashes}
        label = name if name not in series else source if name == unnamed[0] else ""
        axes.plot(xs, ys, label=label, clip_on=False, markeredgecolor="black", **line, **hollow)


def versus(results: Mapping[str, Versus], *, title: str, says: str, lab: str | None = None) -> Picture:
    """Plot step times by schedule: bars for the measured median, dots for each step, diamonds for the model.

    Args:
        results: return value of `machine.versus`.
        title: the finding.
        says: one sentence on how to read it.
        lab: the lab, for the subtitle's count of the learner's answers.
    """
    dot: Any = {"marker": "o", "linestyle": "", "color": SOFT, "markersize": 3, "alpha": 0.7}
    diamond: Any = {**DIAMOND, "markersize": 6}
    highest = max(max([each.predicted, *each.measured]) for each in results.values()) * 1e3
    with notebook_style():
        figure = page(3.9, title, says, lab)
        axes = figure.subplots()
        for place, each in enumerate(results.values()):
            axes.bar(place, each.median * 1e3, 0.5, color=EARLIER_COLOURS[2])
            spread = [
                place + 0.16 * (2 * number + 1 - len(each.measured)) / len(each.measured)
                for number in range(len(each.measured))
            ]
            axes.plot(spread, [seconds * 1e3 for seconds in each.measured], **dot)
            axes.plot(place + 0.34, each.predicted * 1e3, **diamond)
            top = max([each.predicted, *each.measured]) * 1e3
            text = f"{each.median * 1e3:.0f} ms\nmodel {each.predicted * 1e3:.0f} ms"
            axes.annotate(text, (place, top), (0, 4), textcoords="offset points", ha="center", va="bottom")
        axes.set_xticks(range(len(results)), [textwrap.fill(name, 18) for name in results])
        axes.tick_params(axis="x", length=0)
        axes.set(ylabel="time of a step, ms", xlim=(-0.6, len(results) - 0.4), ylim=(0, 1.2 * highest))
        handles = [
            Patch(color=EARLIER_COLOURS[2], label="measured, median"),
            Line2D([], [], label="each step", **dot),
            Line2D([], [], label="the model of this machine", **diamond),
        ]
        legend_beside(axes, handles)
    return Picture(figure, title, says, {})


def _scale(axes: Axes, xs: Sequence[float], logx: bool, logy: bool) -> None:
    """Put ticks at the data points if they are few and their labels short."""
    if logx:
        axes.set_xscale("log", base=2)
    names = [_plain(x) for x in xs]
    if len(xs) <= 9 and max(map(len, names), default=0) <= 7 and (logx or _even(xs)):
        axes.set_xticks(xs, names)
        axes.minorticks_off()
    elif not logx:
        whole = all(x == int(x) for x in xs)  # no fractional ranks
        ticks = [round(float(x), 9) for x in _TICKS.tick_values(xs[0], xs[-1])]
        axes.set_xticks([x for x in ticks if xs[0] <= x <= xs[-1] and (x == int(x) or not whole)])
    else:
        apart = _apart(xs)
        axes.set_xticks(apart, [_plain(x) for x in apart])
        axes.minorticks_off()
    if logy:
        axes.set_yscale("log")
        if axes.dataLim.ymax < 1e3 * axes.dataLim.ymin:
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_minor_locator(NullLocator())
    elif axes.dataLim.ymin >= 0:
        axes.set_ylim(bottom=0 if axes.dataLim.ymin else -0.03 * axes.dataLim.ymax)  # keep a line at 0 off the axis
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))


def _plain(value: float) -> str:
    """A number without an exponent: 1,000 or 0.00001."""
    return f"{value:,.10g}" if abs(value) >= 1e-4 or not value else f"{value:.10f}".rstrip("0")


def _apart(xs: Sequence[float]) -> list[float]:
    """Points, the last one among them, far enough apart for names on a logarithmic axis."""
    chosen = [xs[-1]]
    for x in reversed(xs):
        if 2.4 * x <= chosen[-1]:
            chosen.append(x)
    return chosen[::-1]


def _even(xs: Sequence[float]) -> bool:
    """True if ticks at all points are far enough apart."""
    return len(xs) < 2 or min(b - a for a, b in pairwise(xs)) > (xs[-1] - xs[0]) / 14
