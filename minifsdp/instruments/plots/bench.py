"""The figure of `minifsdp bench`: seconds per step, and peak bytes per step if measured."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from minifsdp.instruments.plots.palette import CONTESTANT_COLOURS
from minifsdp.instruments.plots.style import DIAMOND, unit_for, wall_style

_FAMILIES = {
    "plain": "no communication",
    "torch": "torch",
    "minifsdp": "minifsdp",
    "rung": "minifsdp, rungs of the ladder",
}
_PAIRS = (("our-fsdp", "torch-fsdp1"), ("our-ddp-view", "torch-ddp-view"), ("our-ddp", "torch-ddp"))
_WIDTH = 13.0  # inches
_APART = 0.5  # gap between families, in rows
_MODEL = "device model, not measured"

Record = Mapping[str, Any]


def bench_figure(record: Record, path: str | Path) -> Figure:
    """Plot each contestant's median step with quartiles, and beside it the peak memory if measured.

    Args:
        record: the content of `bench.json`.
        path: the PNG to write.

    Returns:
        The figure: the axes of the seconds, then that of the bytes if memory was measured.
    """
    rows = record["contestants"]
    places = _places(rows)
    measured = any(row["bytes"] for row in rows)
    with wall_style():
        figure = Figure(figsize=(_WIDTH, 0.27 * places[-1] + 2.2), layout="constrained")
        panels = figure.subplots(
            1, 2 if measured else 1, sharey=True, squeeze=False, width_ratios=[3, 2][: measured + 1]
        )
        handles = _draw_seconds(panels[0, 0], record, places)
        figure.legend(handles=handles, ncols=len(handles), loc="outside lower center")
        if measured:
            _draw_bytes(panels[0, 1], rows, places)
        for axes in panels[0]:
            axes.tick_params(axis="y", length=0)
            axes.spines["left"].set_visible(False)
        figure.suptitle(_finding(rows))
        figure.savefig(path, format="png", metadata={"Software": None})
    return figure


def _places(rows: Sequence[Record]) -> list[float]:
    """The rows' positions from the top, with gaps between families."""
    changes = (row["family"] != before["family"] for before, row in pairwise(rows))
    return list(accumulate((1 + _APART * change for change in changes), initial=0.0))


def _draw_seconds(axes: Axes, record: Record, places: Sequence[float]) -> list[Any]:
    """Draw the step times; returns legend handles."""
    rows = record["contestants"]
    highest = 1e3 * max(max(row["quartiles"][1], row["model_seconds"] or 0) for row in rows)
    for place, row in zip(places, rows, strict=True):
        low, high = (1e3 * each for each in row["quartiles"])
        axes.barh(place, 1e3 * row["median"], 0.72, color=CONTESTANT_COLOURS[row["family"]])
        axes.plot([low, high], [place, place], color="black", linewidth=0.9)
        if row["model_seconds"] is not None:
            axes.plot(1e3 * row["model_seconds"], place, **DIAMOND)
        wrong = "" if row["agrees"] else "   WRONG LOSSES"
        end = max(high, 1e3 * (row["model_seconds"] or 0))
        text = f"{_number(1e3 * row['median'])} ms{_times(rows, row, _seconds)}{wrong}"
        axes.text(end + 0.015 * highest, place, text, va="center", fontsize=7)
    axes.set_yticks(places, [row["name"] for row in rows])
    axes.set_ylim(places[-1] + 0.6, -0.6)  # first row on top
    axes.set_xlim(0, 1.3 * highest)
    axes.set_xlabel("a step, ms: median of the slowest rank, with quartiles")
    model = record["model"]
    axes.set_title(
        f"{model['parameters']:,} parameters, {record['ranks']} x {record['batch']} sequences of {model['context']} "
        f"tokens, {record['steps']} steps each in turn, on {record['device']}\n{textwrap.fill(record['world'], 110)}"
    )
    families = dict.fromkeys(row["family"] for row in rows)
    handles: list[Any] = [Patch(color=CONTESTANT_COLOURS[name], label=_FAMILIES[name]) for name in families]
    handles.append(Line2D([], [], color="black", linewidth=0.9, label="quartiles"))
    if any(row["model_seconds"] is not None for row in rows):
        handles.append(Line2D([], [], label=_MODEL, **DIAMOND))
    return handles


def _draw_bytes(axes: Axes, rows: Sequence[Record], places: Sequence[float]) -> None:
    """Draw peak allocated bytes; on CUDA, in front of peak reserved bytes."""
    reserved = "reserved_peak" in rows[0]["bytes"]
    outer = [row["bytes"]["reserved_peak" if reserved else "allocated_peak"] for row in rows]
    name, size = unit_for(max(outer))
    for place, row, most in zip(places, rows, outer, strict=True):
        held = row["bytes"]
        if reserved:
            axes.barh(place, most / size, 0.72, color="none", edgecolor="black", linewidth=0.6)
        axes.barh(place, held["allocated_peak"] / size, 0.72, color=CONTESTANT_COLOURS[row["family"]])
        retries = f", retries: {held['alloc_retries']}" if held.get("alloc_retries") else ""
        text = f" {_number(held['allocated_peak'] / size)} {name}{_times(rows, row, _peak)}{retries}"
        axes.text(most / size, place, text, va="center", fontsize=7)
    axes.set_xlim(0, 1.45 * max(outer) / size)
    axes.set_xlabel(f"peak of a step, {name}: the rank that holds most")
    axes.set_title("filled: allocated; outline: reserved" if reserved else "allocated, by the allocator's own events")


def _seconds(row: Record) -> float:
    return float(row["median"])


def _peak(row: Record) -> float:
    return float(row["bytes"]["allocated_peak"])


def _times(rows: Sequence[Record], row: Record, amount: Callable[[Record], float]) -> str:
    """The ratio to the first baseline in the run, as a label; "" for the baseline itself."""
    baseline = next((each for each in rows if each["name"] in row["ratios"]), row)
    return "" if baseline is row else f"   {amount(row) / amount(baseline):.2f} x {baseline['name']}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def _finding(rows: Sequence[Record]) -> str:
    if wrong := [row["name"] for row in rows if not row["agrees"]]:
        return f"No result: {', '.join(wrong)} computed something else"
    named = {row["name"]: row for row in rows}
    for ours, theirs in _PAIRS:
        if ours in named and theirs in named:
            a, b = named[ours], named[theirs]
            held = f", and {_peak(a) / _peak(b):.2f} x the bytes" if a["bytes"] else ""
            return f"A step: {ours} takes {_seconds(a) / _seconds(b):.2f} x the time of {theirs}{held}"
    return f"A step: {min(rows, key=_seconds)['name']} is the fastest of {len(rows)}"
