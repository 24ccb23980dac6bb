"""Plots of an allocator's memory over a step, simulated or on a GPU, beside the ledger's count."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from minifsdp.instruments.plots.drawing import LETTER
from minifsdp.instruments.plots.palette import BLOCK_COLOURS, OUTCOME_COLOURS, SOFT
from minifsdp.instruments.plots.picture import Picture, legend_beside, page
from minifsdp.instruments.plots.style import notebook_style, unit_for, wall_style

KINDS = ("allocated", "active", "reserved")
BLOCK_WORDS = {"in use": "in use", "waiting": "freed, waiting for an event", "free": "free"}

CAPACITY: dict[str, Any] = {"color": "black", "linewidth": 0.9, "linestyle": (0, (4, 3))}

LETTERS = 66  # characters per line of a row's title in a notebook
_WALL = 180  # the same in the ladder's figure
_OUTLINE: dict[str, Any] = {"color": SOFT, "linewidth": 0.8}
_LEDGER: dict[str, Any] = {"color": "black", "linewidth": 1.1}
_GIVEN_BACK: dict[str, Any] = {
    "marker": "v",
    "linestyle": "",
    "color": OUTCOME_COLOURS["wrong"],
    "markersize": 6,
    "clip_on": False,
}

Recorded = Mapping[str, Any]
"""The return value of `MemoryHistory.beside`: "curve", "ledger", "alloc_retries", "peaks"."""


def allocator_figure(rungs: Sequence[Mapping[str, Any]], path: str | Path) -> Figure:
    """Plot the memory of torch's allocator and the ledger's count over one step of rank 0 on a GPU, a row per rung.

    Args:
        rungs: each has `name`, and `cuda`, the return value of `MemoryHistory.beside`.
        path: the PNG to write.

    Returns:
        The figure, an axes per rung.
    """
    recorded = {rung["name"]: rung["cuda"] for rung in rungs}
    with wall_style():
        figure = Figure(figsize=(13.0, 1.35 * len(rungs) + 1.2), layout="constrained")
        handles = _draw(figure, recorded, _WALL)
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
        figure.suptitle(_finding(recorded))
        figure.savefig(path, format="png", metadata={"Software": None})
    return figure


def allocator_memory(recorded: Mapping[str, Recorded], *, title: str, says: str, lab: str | None = None) -> Picture:
    """The same plot for a notebook; the measured counterpart of `device_memory`.

    Args:
        recorded: return values of `MemoryHistory.beside`, by name.
        title: the finding.
        says: one sentence on how to read it.
        lab: the lab, for the subtitle's count of the learner's answers.

    Returns:
        A picture without `data`: measurements differ from run to run.
    """
    with notebook_style():
        figure = page(1.5 + 1.5 * len(recorded), title, says, lab)
        legend_beside(figure, _draw(figure, recorded, LETTERS))
    return Picture(figure, title, says, {})


def held_areas(axes: Axes, at: Sequence[float], held: Mapping[str, Sequence[float]], unit: int) -> None:
    """Draw stacked areas: allocated; freed but perhaps in use (up to active); cached (up to reserved).

    Args:
        axes: the axes to draw on.
        at: the time from which each sample holds.
        held: bytes of each sample, by kind.
        unit: bytes per unit of the axis.
    """
    bounds = [[0.0] * len(at), *([size / unit for size in held[kind]] for kind in KINDS)]
    for (low, high), colour in zip(pairwise(bounds), BLOCK_COLOURS.values(), strict=True):
        axes.fill_between(at, low, high, step="post", color=colour, linewidth=0)
    axes.step(at, bounds[-1], where="post", **_OUTLINE)


def name_phases(axes: Axes, phases: Sequence[tuple[float, str]], longest: float) -> None:
    """Draw a line at the start of each phase, and its name if there is room; `longest` is the end of the axis."""
    for (at, name), (after, _) in pairwise([*phases, (inf, "")]):
        if at < 0:
            continue
        axes.axvline(at, color="black", linewidth=0.5)
        width = 1.5 * LETTER * len(name) * longest
        if width < after - at:
            x, side = (at + 0.004 * longest, "left") if at + width < longest else (at - 0.004 * longest, "right")
            axes.text(x, 0.995, name, ha=side, va="top", fontsize=7, transform=axes.get_xaxis_transform())


def mark_given_back(axes: Axes, at: Sequence[float], highest: float) -> None:
    """Mark the times at which the cache was flushed, at height `highest`."""
    if at:
        axes.plot(at, [highest] * len(at), **_GIVEN_BACK)


def held_handles(*, capacity: bool = False, given_back: bool = False, ledger: bool = False) -> list[Any]:
    """Legend handles, in visual order from the top."""
    in_use, waiting, free = BLOCK_COLOURS.values()
    return [
        *([Line2D([], [], label="cache given back", **_GIVEN_BACK)] if given_back else []),
        *([Line2D([], [], label="capacity", **CAPACITY)] if capacity else []),
        Line2D([], [], label="reserved", **_OUTLINE),
        Patch(color=free, label="cached"),
        Patch(color=waiting, label=BLOCK_WORDS["waiting"]),
        Patch(color=in_use, label="allocated"),
        *([Line2D([], [], label="in the ledger", **_LEDGER)] if ledger else []),
    ]


def count(number: int, one: str, several: str) -> str:
    return f"{number or 'no'} {one if number == 1 else several}"


def _draw(figure: Figure, recorded: Mapping[str, Recorded], letters: int) -> list[Any]:
    """Draw a row per step on shared axes, with `letters` characters per line of title; returns legend handles."""
    rows = figure.subplots(len(recorded), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    highest = max(1, *(max(each["curve"]["reserved"]) for each in recorded.values()))
    longest = max(each["curve"]["us"][-1] for each in recorded.values()) / 1e3
    unit, size = unit_for(highest)
    for row, (name, each) in zip(rows, recorded.items(), strict=True):
        curve, ledger = each["curve"], each["ledger"]
        held_areas(row, _ms(curve["us"]), curve, size)
        row.step(_ms(ledger["us"]), [total / size for total in ledger["bytes"]], where="post", **_LEDGER)
        name_phases(row, [(at / 1e3, phase) for at, phase in curve["marks"]], longest)
        mark_given_back(row, _ms(curve["given_back"]), highest / size)
        row.set_ylabel(f"memory, {unit}")
        row.set_title(textwrap.fill(f"{name}: {_in_words(each)}", letters))
    rows[0].set_ylim(0, 1.2 * highest / size)
    rows[0].set_xlim(0, longest)
    rows[-1].set_xlabel("ms of the host, from the start of the step")
    given_back = any(each["curve"]["given_back"] for each in recorded.values())
    return held_handles(given_back=given_back, ledger=True)


def _ms(us: Sequence[float]) -> list[float]:
    return [at / 1e3 for at in us]


def _in_words(recorded: Recorded) -> str:
    curve = recorded["curve"]
    unit, size = unit_for(max(curve["reserved"]))
    reserved, active, allocated = (f"{max(curve[kind]) / size:.3g}" for kind in reversed(KINDS))
    counted = f"{max(recorded['ledger']['bytes']) / size:.3g} in the ledger"
    sizes = f"{reserved} {unit} reserved at most, {active} active, {allocated} allocated, {counted}"
    return f"{sizes}; {count(recorded['alloc_retries'], 'retry', 'retries')}"


def _finding(recorded: Mapping[str, Recorded]) -> str:
    """The largest and smallest ratios of reserved memory to allocated memory, in words."""
    curves = {name: each["curve"] for name, each in recorded.items()}
    times = {name: max(curve["reserved"]) / max(1, *curve["allocated"]) for name, curve in curves.items()}
    most, least = (choose(times, key=lambda name: times[name]) for choose in (max, min))
    finding = f"The allocator reserves up to {times[most]:.1f} times what tensors have, with {most}"
    return finding if times[most] == times[least] else f"{finding}; {times[least]:.1f} times with {least}"
