"""The figure of `minifsdp bench`: what a step takes, and where it was weighed, what it holds."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from minifsdp.course.plots.style import DIAMOND, EARLIER_COLOURS, SERIES_COLOURS, unit_for, wall_style

_FAMILIES = {  # family: (colour, what the legend calls it)
    "plain": (EARLIER_COLOURS[0], "no communication"),
    "torch": (EARLIER_COLOURS[3], "torch"),
    "minifsdp": (SERIES_COLOURS[0], "minifsdp"),
    "rung": (SERIES_COLOURS[5], "minifsdp, rungs of the ladder"),
}
_WIDTH = 13.0  # inches
_MODEL = "device model, not measured"

Record = Mapping[str, Any]


def bench_figure(record: Record, path: str | Path) -> Figure:
    """A bar per contestant for the median step, with its quartiles; where there are bytes, the peaks beside it.

    Args:
        record: the content of `bench.json`.
        path: the PNG to write.

    Returns:
        The figure: the axes of the seconds, then, if contestants were weighed, that of the bytes.
    """
    rows = record["contestants"]
    weighed = any(row["bytes"] for row in rows)
    with wall_style():
        figure = Figure(figsize=(_WIDTH, 0.27 * len(rows) + 1.9), layout="constrained")
        panels = figure.subplots(1, 2 if weighed else 1, sharey=True, squeeze=False, width_ratios=[3, 2][: weighed + 1])
        handles = _draw_seconds(panels[0, 0], record)
        figure.legend(handles=handles, ncols=len(handles), loc="outside lower center")
        if weighed:
            _draw_bytes(panels[0, 1], rows)
        figure.suptitle(_finding(rows))
        figure.savefig(path, format="png", metadata={"Software": None})
    return figure


def _draw_seconds(axes: Axes, record: Record) -> list[Any]:
    """Returns what the legend explains."""
    rows = record["contestants"]
    baseline = next(iter(rows[0]["ratios"]), None)
    highest = 1e3 * max(max(row["quartiles"][1], row["model_seconds"] or 0) for row in rows)
    for place, row in enumerate(rows):
        low, high = (1e3 * each for each in row["quartiles"])
        middle = 1e3 * row["median"]
        axes.barh(place, middle, 0.72, color=_FAMILIES[row["family"]][0])
        axes.plot([low, high], [place, place], color="black", linewidth=0.9)
        if row["model_seconds"] is not None:
            axes.plot(1e3 * row["model_seconds"], place, **DIAMOND)
        ratio = "" if baseline in (None, row["name"]) else f"   {row['ratios'][baseline]:.2f} x {baseline}"
        wrong = "" if row["agrees"] else "   WRONG LOSSES"
        end = max(high, 1e3 * (row["model_seconds"] or 0))
        axes.text(end + 0.015 * highest, place, f"{middle:.3g} ms{ratio}{wrong}", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)  # the first on top
    axes.set_xlim(0, 1.3 * highest)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("a step, ms: median of the slowest rank, with quartiles")
    model = record["model"]
    axes.set_title(
        f"{model['parameters']:,} parameters, {record['ranks']} x {record['batch']} sequences of {model['context']} "
        f"tokens, {record['steps']} steps each in turn, on {record['device']}\n{textwrap.fill(record['world'], 110)}"
    )
    families = dict.fromkeys(row["family"] for row in rows)
    handles: list[Any] = [Patch(color=_FAMILIES[name][0], label=_FAMILIES[name][1]) for name in families]
    handles.append(Line2D([], [], color="black", linewidth=0.9, label="quartiles"))
    if any(row["model_seconds"] is not None for row in rows):
        handles.append(Line2D([], [], label=_MODEL, **DIAMOND))
    return handles


def _draw_bytes(axes: Axes, rows: list[Record]) -> None:
    """Allocated at most, in front of what was reserved for it."""
    name, size = unit_for(max(row["bytes"]["reserved_peak"] for row in rows))
    for place, row in enumerate(rows):
        held = row["bytes"]
        axes.barh(place, held["reserved_peak"] / size, 0.72, color="none", edgecolor="black", linewidth=0.6)
        axes.barh(place, held["allocated_peak"] / size, 0.72, color=_FAMILIES[row["family"]][0])
        retries = f", retries: {held['alloc_retries']}" if held["alloc_retries"] else ""
        text = f" {held['allocated_peak'] / size:.3g} {name}{retries}"
        axes.text(held["reserved_peak"] / size, place, text, va="center", fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.2)
    axes.set_xlabel(f"peak of a step, {name}")
    axes.set_title("filled: allocated; outline: reserved")


def _finding(rows: list[Record]) -> str:
    if wrong := [row["name"] for row in rows if not row["agrees"]]:
        return f"No result: {', '.join(wrong)} computed something else"
    seconds = {row["name"]: row["median"] for row in rows}
    pairs = [("our-fsdp", "torch-fsdp1"), ("our-ddp-view", "torch-ddp-view"), ("our-ddp", "torch-ddp")]
    there = [
        f"{ours} takes {seconds[ours] / seconds[theirs]:.2f} x {theirs}"
        for ours, theirs in pairs
        if ours in seconds and theirs in seconds
    ]
    fastest = min(seconds, key=lambda name: seconds[name])
    return "A step: " + (", ".join(there[:2]) or f"{fastest} is the fastest of {len(rows)}")
