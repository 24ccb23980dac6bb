"""What the record of an H100 shows: times and memory of some rungs, overlap of one rank, and the limiter's memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any, NamedTuple

from draw.canvas import MIB, canvas
from draw.measured import recorded
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minifsdp.course.plots.palette import BLOCK_COLOURS, GATHER, INK, LANE_COLOURS, OUTCOME_COLOURS, TAG_COLOURS

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
    """Three panels of rungs above; below, one rank's overlap on two schedules, and memory with and without a limit."""
    figure = canvas(4.75)
    above, below = figure.subfigures(2, 1, height_ratios=(6.2, 5.0))
    panels, rungs = iter(above.subplots(1, 3, sharey=True)), rungs_recorded()
    _draw(panels, "a step takes", {name: 1e3 * each.seconds for name, each in rungs.items()}, "{:.0f} ms", COMPUTE)
    overlaps = {name: 100 * each.overlap for name, each in rungs.items()}
    _draw(panels, "sent under compute", overlaps, "{:.0f} %", HIDDEN)
    whole = {name: each.unsharded / MIB for name, each in rungs.items()}
    _draw(panels, "unsharded, peak", whole, "{:.0f} MiB", TAG_COLOURS["unsharded"])
    panels, tests = iter(below.subplots(1, 2, width_ratios=(5, 4))), tested()
    alone = {
        "compute": tests["overlap.overlap.compute_ms"],
        "collectives": tests["overlap.overlap.communication_ms"],
        "both, one stream": tests["overlap.sync.both_ms"],
        "both, overlap": tests["overlap.overlap.both_ms"],
    }
    _draw(panels, "rank 0 alone, delayed collectives", alone, "{:.1f} ms", (COMPUTE, GATHER, COMPUTE, HIDDEN))
    limits = {
        f"no limit,\nretries: {tests['limiter.retries_without']}": tests["limiter.reserved_without_mib"],
        f"k = 2,\nretries: {tests['limiter.retries_with']}": tests["limiter.reserved_with_mib"],
    }
    _draw(panels, "reserved", limits, "{:,.0f} MiB", BLOCK_COLOURS["in use"])
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
