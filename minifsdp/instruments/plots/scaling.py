"""The figure of `benchmarks/scaling.py`: a step's growth with ranks and with units, beside the predicted law.

A panel for each quantity that changes: bytes held and sent with the ranks, bytes gathered and messages with the units.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from math import ceil, floor, isfinite, log2
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from minifsdp.instruments.plots.palette import EARLIER_COLOURS, INK, LINE, STRATEGY_COLOURS
from minifsdp.instruments.plots.style import wall_style

MIB = 2**20
_WIDTH = 13.0  # inches
_WAYS: dict[str, tuple[str, dict[str, Any]]] = {  # way: (legend label, marker, smaller than the one before)
    "ddp": ("DDP", {"marker": "s", "markersize": 9, "fillstyle": "none", "color": STRATEGY_COLOURS["DDP"]}),
    "fsdp-grad-op": (
        "FSDP, SHARD_GRAD_OP",
        {"marker": "o", "markersize": 6.5, "color": STRATEGY_COLOURS["SHARD_GRAD_OP"]},
    ),
    "fsdp": ("FSDP, FULL_SHARD", {"marker": "o", "markersize": 3, "color": STRATEGY_COLOURS["FSDP"]}),
}
_LAW: dict[str, Any] = {"linestyle": (0, (4, 3)), "linewidth": 0.9}
_FIT: dict[str, Any] = {"linestyle": "-", "linewidth": 0.7}
_PEAK: dict[str, Any] = {"linestyle": ":", "linewidth": 1.0}
_GREY = EARLIER_COLOURS[-1]

Row = Mapping[str, Any]


class _Panel(NamedTuple):
    """A quantity with a law: its title, its unit, and its value in a row's `found` or `law`."""

    title: str
    ylabel: str
    value: Callable[[Row], float]


_HELD = _Panel(
    "held between steps", "MiB", lambda found: (found["parameters"] + found["gradients"] + found["optimizer"]) / MIB
)
_GATHERED = _Panel("gathered at most", "MiB", lambda found: found["unsharded_peak"] / MIB)
_SENT = _Panel("sent in a step", "MiB", lambda found: found["wire"] / MIB)
_MESSAGES = _Panel("messages in a step", "collectives", lambda found: found["messages"])


def scaling_figure(record: Row, path: str | Path) -> Figure:
    """Plot time, bytes held and bytes sent over ranks (top), and time, bytes gathered and messages over units.

    Args:
        record: the record written by `benchmarks/scaling.py`.
        path: the PNG to write.

    Returns:
        The figure: three axes over the ranks, then three over the units.
    """
    some, few = record["some_units"], record["few_ranks"]
    over_ranks = [row for row in record["rows"] if row["units"] == some and row["ranks"] in record["ranks"]]
    over_units = [row for row in record["rows"] if row["ranks"] == few and row["units"] in record["units"]]
    with wall_style():
        figure = Figure(figsize=(_WIDTH, 6.9), layout="constrained")
        parts: Any = figure.subfigures(3, 1, height_ratios=[6, 6, 1.4])
        held, sent = _draw_row(parts[0], over_ranks, "ranks", f"over the ranks, {some} units", record, (_HELD, _SENT))
        _draw_row(parts[1], over_units, "units", f"over the units, {few} ranks", record, (_GATHERED, _MESSAGES))
        _draw_peaks(held, over_ranks)
        _draw_multiples(sent, 4 * record["parameters"] / MIB)
        handles = _legend()
        parts[2].legend(handles=handles, ncols=len(handles), loc="upper center", fontsize=7.5)
        caption = textwrap.fill(_caption(record), 230)
        parts[2].text(0.01, 0.02, caption, va="bottom", fontsize=7, color=INK)
        figure.suptitle(_finding(record, over_ranks, over_units))
        figure.savefig(path, format="png", metadata={"Software": None})
    return figure


def _draw_row(
    part: Any, rows: Sequence[Row], x: str, title: str, record: Row, panels: Sequence[_Panel]
) -> Sequence[Axes]:
    """Draw the time and each of `panels` over "ranks" or "units"; returns the axes of the panels."""
    row: Sequence[Axes] = part.subplots(1, 1 + len(panels))
    time, *others = row
    _draw_time(time, rows, x, record)
    for axes, panel in zip(others, panels, strict=True):
        _draw(axes, panel, rows, x)
    ticks = sorted({row[x] for row in rows})
    for axes in (time, *others):
        _scale(axes, ticks, x)
    part.suptitle(title, x=0.01, ha="left", fontsize=9.5)
    return others


def _draw_peaks(axes: Axes, rows: Sequence[Row]) -> None:
    for way, (_, look) in _WAYS.items():
        of = [row for row in rows if row["way"] == way]
        axes.plot([row["ranks"] for row in of], [row["peak"] / MIB for row in of], color=look["color"], **_PEAK)


def _draw_multiples(axes: Axes, psi: float) -> None:
    """Draw lines at 2 Ψ and 3 Ψ, the limits of many ranks."""
    for times in (2, 3):
        axes.axhline(times * psi, color=_GREY, linewidth=0.5)
        axes.text(1, times * psi, f"{times} Ψ", color=_GREY, va="bottom", fontsize=7)
    axes.set_ylim(0, 3.3 * psi)


def _draw(axes: Axes, panel: _Panel, rows: Sequence[Row], x: str) -> None:
    """Draw points for every rank's measurement and dashes for the law; ways whose law is 0 are left out."""
    for way, (_, look) in _WAYS.items():
        of = [row for row in rows if row["way"] == way and panel.value(row["law"])]
        axes.plot([row[x] for row in of], [panel.value(row["law"]) for row in of], color=look["color"], **_LAW)
        points = [(row[x], panel.value(found)) for row in of for found in row["found"]]
        axes.plot([at for at, _ in points], [value for _, value in points], linestyle="", **look)
    axes.set_title(panel.title)
    axes.set_ylabel(panel.ylabel)


def _draw_time(axes: Axes, rows: Sequence[Row], x: str, record: Row) -> None:
    """Draw medians with quartiles, with a fitted line over units, or the cores' compute time over ranks."""
    for way, (_, look) in _WAYS.items():
        of = [row for row in rows if row["way"] == way]
        for row in of:
            faint = 0.35 if row["ranks"] > record["cores"] else 1.0
            axes.plot([row[x]] * 2, [1e3 * each for each in row["quartiles"]], color=look["color"], linewidth=0.9)
            axes.plot(row[x], 1e3 * row["seconds"], linestyle="", alpha=faint, **look)
        if x == "units" and of:
            start, each = record["fits"][way]
            xs = np.geomspace(of[0][x], of[-1][x], 50)
            messages = np.interp(xs, [row[x] for row in of], [row["law"]["messages"] for row in of])
            axes.plot(xs, 1e3 * (start + each * messages), color=look["color"], **_FIT)
    alone = [row["seconds"] for row in rows if row["ranks"] == 1]
    if x == "ranks" and alone:
        counts = sorted({row["ranks"] for row in rows})
        line = [1e3 * median(alone) * max(1, count / record["cores"]) for count in counts]
        axes.plot(counts, line, color=_GREY, **_FIT)
    axes.set_title("time of a step")
    axes.set_ylabel("ms")


def _scale(axes: Axes, ticks: Sequence[int], name: str) -> None:
    """Set a logarithmic axis if the values spread widely, else one that starts at 0."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlim(0.85 * ticks[0], ticks[-1] / 0.85)
    low, high = axes.dataLim.ymin, axes.dataLim.ymax
    if not isfinite(low):  # no values: a single rank sends nothing
        axes.set_ylim(0, 1)
        axes.set_yticks([0])
    elif 0 < 4 * low < high:
        axes.set_yscale("log", base=2)
        axes.set_ylim(0.9 * 2 ** floor(log2(low)), 1.1 * 2 ** ceil(log2(high)))
    else:
        axes.set_ylim(0, 1.1 * high)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.set_xlabel(name)
    axes.grid(axis="y", color=LINE, linewidth=0.5)
    axes.set_axisbelow(True)


def _legend() -> list[Line2D]:
    points = [Line2D([], [], label=label, linestyle="", **look) for label, look in _WAYS.values()]
    return [
        *points,
        Line2D([], [], color="black", label="the law", **_LAW),
        Line2D([], [], color="black", label="fitted line", **_FIT),
        Line2D([], [], color=_GREY, label="computation alone, shared out over the cores", **_FIT),
        Line2D([], [], color="black", label="peak of the step, activations included", **_PEAK),
    ]


def _finding(record: Row, over_ranks: Sequence[Row], over_units: Sequence[Row]) -> str:
    if record["differs"]:
        return f"Counts that differ from the law: {len(record['differs'])}"
    first, last = _ends(over_ranks)
    few, many = _ends(over_units)
    return (
        f"FULL_SHARD on {first['ranks']} to {last['ranks']} ranks: "
        f"{_HELD.value(first['law']):.1f} to {_HELD.value(last['law']):.1f} MiB held; "
        f"with {few['units']} to {many['units']} units: {_GATHERED.value(few['law']):.1f} to "
        f"{_GATHERED.value(many['law']):.1f} MiB gathered, in {few['law']['messages']} to "
        f"{many['law']['messages']} messages"
    )


def _ends(rows: Sequence[Row]) -> tuple[Row, Row]:
    of = [row for row in rows if row["way"] == "fsdp"]
    return of[0], of[-1]


def _caption(record: Row) -> str:
    slopes = ", ".join(f"{1e3 * record['fits'][way][1]:.2g} ({label})" for way, (label, _) in _WAYS.items())
    cores = record["cores"]
    return (
        f"{record['parameters']:,} parameters (Ψ) in float32, AdamW, over gloo on {record['cpu']}, {cores} cores, one "
        "thread a rank. Bytes and messages: the points of all ranks, which coincide. Time: medians of the "
        f"slowest rank, with quartiles; the line is a fit, ms for each message: {slopes}. More than {cores} ranks "
        f"share {cores} cores (faint): their time says that it runs, no more. DDP gathers nothing; one rank gathers "
        "nothing, sends nothing and shards nothing."
    )
