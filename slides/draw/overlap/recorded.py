"""Figures from the record of an H100: step times and memory of five rungs, overlap on one rank, the rate limiter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any, NamedTuple

from draw.canvas import MIB, canvas
from draw.measured import recorded
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minifsdp.instruments.plots.palette import BLOCK_COLOURS, GATHER, INK, LANE_COLOURS, OUTCOME_COLOURS, TAG_COLOURS

RUNGS = "fsdp", "fsdp-overlap", "fsdp-prefetch", "fsdp-limit", "fsdp2"
COMPUTE, HIDDEN = LANE_COLOURS["compute"], OUTCOME_COLOURS["right"]


class Shown(NamedTuple):
    """Of a rung: seconds of a step, the share of communication under compute, bytes unsharded at the peak of rank 0."""

    seconds: float
    overlap: float
    unsharded: int


def rungs_recorded() -> dict[str, Shown]:
    found = {rung["name"]: rung for rung in recorded()["ladder"]["results"]["rungs"]}
    return {
        name: Shown(median(rung["step_seconds"]), rung["overlap"], rung["bytes"][0]["unsharded_peak"])
        for name, rung in ((name, found[name]) for name in RUNGS)
    }


def tested() -> dict[str, float]:
    """All figures of the tests, by name."""
    figures = recorded()["tests"]["results"]["figures"].values()
    return {name: value for test in figures for name, value in test.items() if name != "world"}


def draw_recorded() -> Figure:
    """Rungs of the ladder on two ranks: a step, what is sent under compute, and what is unsharded at the peak."""
    figure, rungs = canvas(3.6), rungs_recorded()
    panels = iter(figure.subplots(1, 3, sharey=True))
    _draw(panels, "a step takes", {name: 1e3 * each.seconds for name, each in rungs.items()}, "{:.0f} ms", COMPUTE)
    overlaps = {name: 100 * each.overlap for name, each in rungs.items()}
    _draw(panels, "sent under compute", overlaps, "{:.0f} %", HIDDEN)
    whole = {name: each.unsharded / MIB for name, each in rungs.items()}
    _draw(panels, "unsharded, peak", whole, "{:.0f} MiB", TAG_COLOURS["unsharded"])
    return figure


def draw_tested() -> Figure:
    """One rank's overlap on two schedules; and with and without a limit, memory as it comes and retries under a cap."""
    figure, tests = canvas(3.9), tested()
    left, right = figure.subfigures(1, 2, width_ratios=(6, 5))
    alone = {
        "compute": tests["overlap.overlap.compute_ms"],
        "collectives": tests["overlap.overlap.communication_ms"],
        "both, one stream": tests["overlap.sync.both_ms"],
        "both, overlap": tests["overlap.overlap.both_ms"],
    }
    _draw(iter([left.subplots()]), "rank 0 alone", alone, "{:.1f} ms", (COMPUTE, GATHER, COMPUTE, HIDDEN))
    panels, names = iter(right.subplots(2, 1)), {"no limit": "without", "k = 2": "with"}
    reserved = {name: tests[f"limiter.reserved_{key}_mib"] for name, key in names.items()}
    _draw(panels, "2 ranks, no cap: reserved", reserved, "{:,.0f} MiB", BLOCK_COLOURS["in use"])
    retries = {name: tests[f"limiter.retries_{key}"] for name, key in names.items()}
    _draw(panels, f"capped at {tests['limiter.cap_mib']:,.0f} MiB: retries", retries, "{}", OUTCOME_COLOURS["wrong"])
    return figure


def _draw(panels: Iterator[Axes], title: str, values: Mapping[str, float], says: str, colours: Any) -> None:
    """The next panel: a bar for each value, the first on top."""
    panel, most = next(panels), max(values.values())
    panel.barh(range(len(values)), list(values.values()), 0.66, color=colours)
    for place, value in enumerate(values.values()):
        panel.text(value + 0.03 * most, place, says.format(value), va="center_baseline")
    panel.set_title(title)
    panel.set_yticks(range(len(values)), list(values))
    panel.tick_params(axis="y", length=0, labelcolor=INK)
    panel.set(xlim=(0, 1.5 * most), xticks=[], ylim=(len(values) - 0.5, -0.5))
    panel.spines["bottom"].set_visible(False)
