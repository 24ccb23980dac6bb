"""The two figures of `minifsdp ladder`: every rung's memory, and every rung's timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D

from minifsdp.instruments.plots.drawing import (
    areas,
    at_peak,
    grouped,
    lane_patches,
    lanes,
    name_groups,
    row_title,
    rows_of_tags,
    step_of,
    tag_patches,
    visible,
)
from minifsdp.instruments.plots.style import DIAMOND, PREDICTED, wall_style
from minifsdp.instruments.watch.timeline import Span

_MIB = 2**20
_PREDICTED = {  # title: by tag, the key of the measured and of the predicted bytes
    "Model state\nbefore zero_grad()": {tag: tag for tag in ("parameters", "gradients", "optimizer")},
    "Unsharded,\nat most": {"unsharded": "unsharded_peak"},
    "Gradients,\nat most": {"gradients": "gradients_peak"},
    "Activations kept,\nat most": {"activations": "activations"},
}
_WIDTH, _LANES = 10.0, 13.0  # inches: of what a README shows, and of lanes
_PANEL, _BAR = 1.75, 0.2  # inches in height: of a rung's panel, and of its bar
_GAP = 0.9  # between groups of bars, in bars
_BROAD = 0.7  # a bar's breadth, in rows
_MARK: Any = {**DIAMOND, "markersize": 4.5}
_FAR = 1.5  # from the median

Rung = Mapping[str, Any]


def memory_figure(rungs: Sequence[Rung], path: str | Path) -> Figure:
    """Plot the peaks, and what was predicted; below, a panel per rung: the memory of the rank that holds most.

    Args:
        rungs: each has `name`; `group`, the heading that it has in common with its neighbours; `curve`, of the rank
            that holds most over one step, with `tags` ({tag: bytes after each event of the ledger}) and `marks`
            ([[index of a phase's first event, its name], ...]); `bytes`, per rank the measured `parameters`,
            `gradients`, `optimizer`, `unsharded_peak`, `gradients_peak`, perhaps `activations`, and `peak`;
            `predicted`, the same per rank except the last; `peak_at_most`, per rank a bound of that, or None. All in
            bytes.
        path: the PNG to write.

    Returns:
        The figure: axes of the peaks, the model state, the unsharded parameters and the gradients, then one per rung.
    """
    with wall_style():
        places, headings = grouped([rung["group"] for rung in rungs], _GAP)
        rows = ceil(len(rungs) / 5)
        bars, panels = _BAR * max(places[-1] + 1, 5) + 1.3, _PANEL * rows + 0.4
        figure = Figure(figsize=(_WIDTH, bars + panels + 0.3), layout="constrained")
        parts: Any = figure.subfigures(2, 1, height_ratios=[bars, panels])
        top, bottom = parts
        _draw_bars(top, rungs, places, headings)
        _draw_curves(bottom, rungs, rows)
        figure.suptitle(_memory_finding(rungs))
        figure.savefig(path, format="png", metadata={"Software": None})
    return figure


def _draw_bars(
    figure: SubFigure, rungs: Sequence[Rung], places: Sequence[float], headings: Mapping[float, str]
) -> None:
    """Draw the bars of all rungs, and their legend."""
    predictions = _predicted(rungs)
    peaks, *predicted = figure.subplots(
        1, 1 + len(predictions), sharey=True, width_ratios=[1.7] + [1] * len(predictions)
    )
    _draw_peaks(peaks, rungs, places)
    for axes, (title, keys) in zip(predicted, predictions.items(), strict=True):
        _draw_predicted(axes, rungs, title, keys, places)
        axes.set_xlabel("MiB")
    for axes in (peaks, *predicted):
        axes.tick_params(axis="y", length=0)
    peaks.set_yticks(places, [rung["name"] for rung in rungs])
    name_groups(peaks, headings, 8)
    aside = max(0, 5 - len(rungs)) / 2  # keeps the bars narrow when there are few rungs
    peaks.set_ylim(places[-1] + 0.5 + aside, -0.5 - aside)
    peaks.set_xlabel("MiB, the rank that holds most")
    handles = [*tag_patches(), Line2D([], [], label=PREDICTED, **_MARK)]
    figure.legend(handles=handles, ncols=len(handles), loc="outside lower center")


def _draw_curves(figure: SubFigure, rungs: Sequence[Rung], rows: int) -> None:
    """Draw the panels of all rungs, which share one axis."""
    panels = figure.subplots(rows, ceil(len(rungs) / rows), sharey=True, squeeze=False).flatten()
    highest = max(sum(at_peak(rung["curve"]).values()) for rung in rungs) * 1.04 / _MIB
    for panel, rung in zip(panels, rungs, strict=False):
        _draw_curve(panel, rung, highest)
    for unused in panels[len(rungs) :]:
        unused.remove()
    figure.supylabel("memory of the rank that holds most, MiB", fontsize=8)
    figure.supxlabel("allocations and frees of one step, in order", fontsize=8)


class Timeline(NamedTuple):
    """A traced step.

    Attributes:
        name: the rung's.
        spans: from `timeline.read_trace`.
        overlap: from `timeline.overlap`.
        usual: seconds of the median step; None: unknown.
    """

    name: str
    spans: Sequence[Span]
    overlap: float | None
    usual: float | None = None


def timeline_figure(rungs: Sequence[Timeline], path: str | Path, about: str = "") -> Figure:
    """Plot the timeline lanes of each rung, all on one time axis.

    Args:
        rungs: the steps.
        path: the PNG to write.
        about: a few words on where they were taken, for the axis.

    Returns:
        The figure, with one axes per rung.
    """
    with wall_style():
        figure = Figure(figsize=(_LANES, 1.05 * len(rungs) + 1.2), layout="constrained")
        rows = figure.subplots(len(rungs), 1, sharex=True, squeeze=False)[:, 0]
        longest = max((span.end for rung in rungs for span in rung.spans), default=1e-3) * 1e3
        for row, rung in zip(rows, rungs, strict=True):
            lanes(row, rung.spans, longest)
            row.set_title(row_title(rung.name, rung.spans, rung.overlap) + _unusual(rung))
        rows[-1].set_xlabel("ms from the start of the step" + (f"; {about}" if about else ""))
        patches = lane_patches(span for rung in rungs for span in visible(rung.spans, longest))
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches))
        figure.suptitle(_overlap_finding(rungs))
        figure.savefig(path, format="png", metadata={"Software": None})
    return figure


def _draw_curve(panel: Axes, rung: Rung, highest: float) -> None:
    """Draw one rung's curve; `highest` is the end of the shared axis in MiB."""
    events = areas(panel, rung["curve"], _MIB)
    panel.set_title(rung["name"])
    panel.set_ylim(0, highest)
    for number, (start, phase) in enumerate(rung["curve"]["marks"]):
        panel.axvline(start, color="black", linewidth=0.5)
        at, side = (start, "left") if start + events * len(phase) / 40 <= events else (events - 1, "right")
        below = -0.03 - 0.1 * (number % 2)  # alternate between two lines, so that names of short phases fit
        panel.text(at, below, phase, ha=side, va="top", fontsize=7, transform=panel.get_xaxis_transform())


def _draw_peaks(axes: Axes, rungs: Sequence[Rung], places: Sequence[float]) -> None:
    """Draw a bar per rung: all bytes at its peak, by tags, and a diamond for its bound."""
    ends = rows_of_tags(axes, [at_peak(rung["curve"]) for rung in rungs], _BROAD, _MIB, places)
    for place, end, rung in zip(places, ends, rungs, strict=True):
        if rung["peak_at_most"]:
            axes.plot(max(rung["peak_at_most"]) / _MIB, place, **_MARK)
        axes.text(end + 0.035 * max(ends), place, f"{_most(rung['bytes'], 'peak') / _MIB:.1f}", va="center")
    axes.set_title("Peak of a step\n(\N{WHITE DIAMOND}: at most)")
    axes.set_xlim(0, 1.16 * max(ends))


def _draw_predicted(
    axes: Axes, rungs: Sequence[Rung], title: str, keys: Mapping[str, str], places: Sequence[float]
) -> None:
    """Draw a bar per rung, the bytes under `keys` by tag, each with a diamond for its prediction."""
    rows = [{tag: _most(rung["bytes"], key) for tag, key in keys.items()} for rung in rungs]
    rows_of_tags(axes, rows, _BROAD, _MIB, places)
    for place, rung in zip(places, rungs, strict=True):
        prediction = sum(_most(rung["predicted"], key) for key in keys.values())
        axes.plot(prediction / _MIB, place, **_MARK)
    axes.set_title(title)
    axes.set_xlim(0, 1.08 * max(axes.dataLim.xmax, 1e-3))


def _predicted(rungs: Sequence[Rung]) -> dict[str, dict[str, str]]:
    """The entries of `_PREDICTED` that these rungs have predictions of."""
    found = {title: keys for title, keys in _PREDICTED.items() if _has(rungs, keys)}
    if len(found) == len(_PREDICTED) and not any(_most(rung["predicted"], "unsharded_peak") for rung in rungs):
        del found["Unsharded,\nat most"]
    return found


def _has(rungs: Sequence[Rung], keys: Mapping[str, str]) -> bool:
    return all(key in rungs[0]["predicted"][0] for key in keys.values())


def _most(ranks: Sequence[Mapping[str, float]], key: str) -> float:
    return max(rank[key] for rank in ranks)


def _memory_finding(rungs: Sequence[Rung]) -> str:
    peaks = {rung["name"]: _most(rung["bytes"], "peak") / _MIB for rung in rungs}
    most, least = max(peaks, key=lambda name: peaks[name]), min(peaks, key=lambda name: peaks[name])
    if peaks[least] == peaks[most]:
        return f"Peak memory of a rank: {peaks[most]:.1f} MiB with {most}"
    return f"Peak memory of a rank: {peaks[most]:.1f} MiB with {most}, {peaks[least]:.1f} MiB with {least}"


def _unusual(rung: Timeline) -> str:
    """A warning if the step is far from the rung's median."""
    if rung.usual is None or 1 / _FAR < step_of(rung.spans) / (1e3 * rung.usual) < _FAR:
        return ""
    return f" (not a usual step: the median is {1e3 * rung.usual:.0f} ms)"


def _overlap_finding(rungs: Sequence[Timeline]) -> str:
    shares = {rung.name: rung.overlap for rung in rungs if rung.overlap is not None}
    if not shares:
        return "Compute and communication over one step"
    first, most = next(iter(shares)), max(shares, key=lambda name: shares[name])
    if most == first:
        return f"Communication under compute: at most {shares[most]:.0%}, with {most}"
    return f"Communication under compute: {shares[first]:.0%} with {first}, {shares[most]:.0%} with {most}"
