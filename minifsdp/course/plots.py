"""The course's pictures: memory over a step, peaks beside their prediction, timelines.

One style, and the same colours everywhere: Okabe and Ito's, which colour-blind readers tell apart. Equal input gives
equal bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from minifsdp.course.timeline import Span

TAG_COLOURS = {
    "parameters": "#0072B2",
    "unsharded": "#56B4E9",
    "gradients": "#D55E00",
    "optimizer": "#009E73",
    "activations": "#F0E442",
    "communication": "#CC79A7",
}
"""The ledger's tags in the order in which they are stacked, from the bottom."""

LANE_COLOURS = {"compute": "#5F6B76", "communication": TAG_COLOURS["communication"], "wait": "#E69F00"}
"""The timeline's lanes from the top."""

REDUCTION_COLOUR = "#882255"
"""Reductions in the communication lane: where they stand between the gathers is what a schedule decides."""

_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.frameon": False,
    "figure.dpi": 140,
    "figure.titlesize": 12,
    "figure.titleweight": "bold",
}
_MIB = 2**20
_MODEL_STATE = ("parameters", "gradients", "optimizer")
_WIDTH = 13.0  # inches
_DIAMOND: dict[str, Any] = {
    "marker": "D",
    "linestyle": "",
    "color": "black",
    "markerfacecolor": "white",
    "markersize": 3.5,
    "clip_on": False,
}

Rung = Mapping[str, Any]


def memory_figure(rungs: Sequence[Rung], path: str | Path) -> Figure:
    """Memory of rank 0 over one step, a panel per rung, and below the peaks beside what was predicted.

    Args:
        rungs: each has `name`; `curve`, with `tags` ({tag: bytes after each event of the ledger}) and `marks`
            ([[index of a phase's first event, its name], ...]); `bytes`, per rank the measured `parameters`,
            `gradients`, `optimizer`, `unsharded_peak`, `gradients_peak` and `peak`; `predicted`, per rank all but the
            last. All in bytes.
        path: the PNG to write.

    Returns:
        The figure: an axes per rung, then that of the bars.
    """
    with style.context(["default", _STYLE]):
        rows = ceil(len(rungs) / 5)
        columns = ceil(len(rungs) / rows)
        figure = Figure(figsize=(_WIDTH, 2.0 * rows + 4.4), layout="constrained")
        parts: Any = figure.subfigures(2, 1, height_ratios=[2.0 * rows + 0.4, 4.0])
        top, bottom = parts
        panels = top.subplots(rows, columns, sharey=True, squeeze=False).flatten()
        highest = max(sum(_at_peak(rung).values()) for rung in rungs) * 1.04 / _MIB
        for panel, rung in zip(panels, rungs, strict=False):
            _draw_curve(panel, rung, highest)
        for unused in panels[len(rungs) :]:
            unused.remove()
        _draw_peaks(bottom.subplots(), rungs)
        top.supylabel("memory of rank 0, MiB", fontsize=8)
        top.supxlabel("allocations and frees of one step, in order", fontsize=8)
        figure.suptitle(_memory_finding(rungs))
        figure.savefig(path, format="png", metadata={"Software": None})
    return figure


def timeline_figure(rungs: Sequence[tuple[str, Sequence[Span], float | None]], path: str | Path) -> Figure:
    """What ran when: for each rung its lanes, all on one time axis.

    Args:
        rungs: name, spans as `timeline.read_trace` gives them, and their `timeline.overlap`.
        path: the PNG to write.

    Returns:
        The figure, an axes per rung.
    """
    with style.context(["default", _STYLE]):
        figure = Figure(figsize=(_WIDTH, 1.05 * len(rungs) + 1.2), layout="constrained")
        rows = figure.subplots(len(rungs), 1, sharex=True, squeeze=False)[:, 0]
        longest = max((span.end for _, spans, _ in rungs for span in spans), default=1e-3) * 1e3
        for row, (name, spans, overlap) in zip(rows, rungs, strict=True):
            _draw_lanes(row, spans, longest)
            step = max((span.end for span in spans), default=0.0) * 1e3
            hidden = "no communication" if overlap is None else f"{overlap:.0%} of communication under compute"
            row.set_title(f"{name}: {step:.0f} ms, {hidden}")
        rows[-1].set_xlabel("ms from the start of the step")
        labels = {"compute": "compute", "communication": "all-gather", "wait": "host waits"}
        patches = [Patch(color=LANE_COLOURS[lane], label=label) for lane, label in labels.items()]
        patches.insert(2, Patch(color=REDUCTION_COLOUR, label="reduction"))
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches))
        figure.suptitle(_overlap_finding(rungs))
        figure.savefig(path, format="png", metadata={"Software": None})
    return figure


def _draw_curve(panel: Axes, rung: Rung, highest: float) -> None:
    """`highest`: MiB of the axis that the rungs share."""
    tags, marks = rung["curve"]["tags"], rung["curve"]["marks"]
    heights = [[value / _MIB for value in tags[tag]] for tag in TAG_COLOURS]
    events = len(heights[0])
    panel.stackplot(range(events), heights, colors=TAG_COLOURS.values(), step="post", linewidth=0)
    panel.set_title(rung["name"])
    panel.set_xlim(0, max(1, events - 1))
    panel.set_ylim(0, highest)
    panel.set_xticks([])
    for number, (start, phase) in enumerate(marks):
        panel.axvline(start, color="black", linewidth=0.5)
        at, side = (start, "left") if start + events * len(phase) / 40 <= events else (events - 1, "right")
        below = -0.03 - 0.1 * (number % 2)  # in turn on two lines, so that a short phase has room for its name
        panel.text(at, below, phase, ha=side, va="top", fontsize=7, transform=panel.get_xaxis_transform())


def _draw_peaks(axes: Axes, rungs: Sequence[Rung]) -> None:
    """Four bars a rung: everything at the peak; then, each with its prediction, three things that can be predicted."""
    for place, rung in enumerate(rungs):
        measured, predicted = rung["bytes"], rung["predicted"]
        at_peak = _at_peak(rung)
        _stack(axes, place - 0.22, 0.36, at_peak)
        label = f"{_most(measured, 'peak') / _MIB:.1f}"
        axes.text(place - 0.22, sum(at_peak.values()) / _MIB, label, ha="center", va="bottom")
        bars = [
            ({tag: _most(measured, tag) for tag in _MODEL_STATE}, sum(_most(predicted, tag) for tag in _MODEL_STATE)),
            ({"unsharded": _most(measured, "unsharded_peak")}, _most(predicted, "unsharded_peak")),
            ({"gradients": _most(measured, "gradients_peak")}, _most(predicted, "gradients_peak")),
        ]
        for offset, (sizes, prediction) in zip((0.06, 0.2, 0.34), bars, strict=True):
            _stack(axes, place + offset, 0.12, sizes)
            axes.plot(place + offset, prediction / _MIB, **_DIAMOND)
    axes.set_xticks(range(len(rungs)), [rung["name"] for rung in rungs])
    axes.set_ylabel("MiB, the rank that holds most")
    axes.set_title(
        "for each rung, from the left: all at its peak; model state at rest, after the step; "
        "unsharded at most; gradients and their buffers at most"
    )
    aside = max(0, 5 - len(rungs)) / 2  # so that few rungs do not get fat bars
    axes.set_xlim(-0.5 - aside, len(rungs) - 0.5 + aside)
    axes.set_ylim(0, 1.08 * axes.dataLim.ymax)
    handles: list[Any] = [Patch(color=colour, label=tag) for tag, colour in TAG_COLOURS.items()]
    handles.append(Line2D([], [], label="predicted before any rank starts", **_DIAMOND))
    axes.legend(handles=handles, ncols=len(handles), loc="upper center", bbox_to_anchor=(0.5, -0.08))


def _stack(axes: Axes, x: float, width: float, sizes: Mapping[str, float]) -> None:
    """A bar of `sizes` bytes by tag."""
    bottom = 0.0
    for tag, size in sizes.items():
        axes.bar(x, size / _MIB, width, bottom / _MIB, color=TAG_COLOURS[tag])
        bottom += size


def _at_peak(rung: Rung) -> dict[str, float]:
    """Bytes by tag at the event after which rank 0 held most."""
    tags = rung["curve"]["tags"]
    totals = [sum(values) for values in zip(*(tags[tag] for tag in TAG_COLOURS), strict=True)]
    peak = totals.index(max(totals))
    return {tag: tags[tag][peak] for tag in TAG_COLOURS}


def _most(ranks: Sequence[Mapping[str, float]], key: str) -> float:
    return max(rank[key] for rank in ranks)


def _memory_finding(rungs: Sequence[Rung]) -> str:
    peaks = {rung["name"]: _most(rung["bytes"], "peak") / _MIB for rung in rungs}
    first, least = next(iter(peaks)), min(peaks, key=lambda name: peaks[name])
    if peaks[least] == peaks[first]:
        return f"Peak memory of a rank: {peaks[first]:.1f} MiB with {first}"
    return f"Peak memory of a rank: {peaks[first]:.1f} MiB with {first}, {peaks[least]:.1f} MiB with {least}"


def _overlap_finding(rungs: Sequence[tuple[str, Sequence[Span], float | None]]) -> str:
    shares = {name: share for name, _, share in rungs if share is not None}
    if not shares:
        return "Compute and communication over one step"
    first, most = next(iter(shares)), max(shares, key=lambda name: shares[name])
    if most == first:
        return f"Communication under compute: at most {shares[most]:.0%}, with {most}"
    return f"Communication under compute: {shares[first]:.0%} with {first}, {shares[most]:.0%} with {most}"


def _draw_lanes(row: Axes, spans: Sequence[Span], longest: float) -> None:
    """`longest`: milliseconds of the axis that the rungs share."""
    present = {span.lane for span in spans} - {"phase"}
    lanes = sorted(
        present | {"compute", "communication"}, key=lambda lane: (list(LANE_COLOURS).index(_kind(lane)), lane)
    )
    for height, lane in enumerate(reversed(lanes)):
        mine = [span for span in spans if span.lane == lane]
        bars = [(span.start * 1e3, span.duration * 1e3) for span in mine]
        colours = [_colour(span) for span in mine]
        row.broken_barh(bars, (height - 0.4, 0.8), facecolors=colours, edgecolor="white", linewidth=0.3)
    row.set_yticks(range(len(lanes)), reversed(lanes))
    row.set_ylim(-0.5, len(lanes) + 0.1)
    row.set_xlim(0, longest)
    row.tick_params(axis="y", length=0)
    for phase in (span for span in spans if span.lane == "phase"):
        row.axvline(phase.start * 1e3, color="black", linewidth=0.6)
        row.text(phase.start * 1e3 + 0.002 * longest, len(lanes) - 0.45, phase.name, fontsize=7, va="bottom")


def _colour(span: Span) -> str:
    reduction = span.lane == "communication" and "reduce" in span.name
    return REDUCTION_COLOUR if reduction else LANE_COLOURS[_kind(span.lane)]


def _kind(lane: str) -> str:
    """`compute (stream 7)` as `compute`."""
    return lane.split()[0]
