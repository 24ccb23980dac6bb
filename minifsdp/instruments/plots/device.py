"""Memory of a simulated GPU: its allocator over a step, and the blocks in its segments."""

from __future__ import annotations

import textwrap
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from minifsdp.instruments.plots.allocator import (
    BLOCK_WORDS,
    CAPACITY,
    KINDS,
    LETTERS,
    count,
    held_areas,
    held_handles,
    mark_given_back,
    name_phases,
)
from minifsdp.instruments.plots.palette import BLOCK_COLOURS
from minifsdp.instruments.plots.picture import Picture, legend_beside, page
from minifsdp.instruments.plots.style import notebook_style, unit_for
from minifsdp.instruments.watch.trace import PHASES

if TYPE_CHECKING:
    from minifsdp.instruments.machine.blocks import Segment
    from minifsdp.instruments.machine.replay import Memory, Run

_MIB = 2**20
_BAR, _GROUP = 0.8, 0.9  # height of a segment, and gap between streams, in lines
_GAP = 0.006  # between segments, as a fraction of a line


def device_memory(
    runs: Mapping[str, Run],
    *,
    title: str,
    says: str,
    lab: str | None = None,
    model: str,
    steps: int = 1,
) -> Picture:
    """Plot the allocator's memory while the host issues the last step, a row per run, on shared axes.

    The areas are stacked: allocated; freed but perhaps in use on another stream (up to active); cached (up to
    reserved). The time axis is the host's, which finishes before the device. If the host takes no time for a step, the
    allocations and frees of all steps are drawn in order instead.

    Args:
        runs: return values of `replay`, by name.
        title: the finding.
        says: one sentence on how to read it.
        lab: the lab, for the subtitle's count of the learner's answers.
        model: the hardware's name.
        steps: number of last steps to show.

    Returns:
        A picture whose `data` has the plotted peaks by kind, in the axis's unit, and the retries.
    """
    shown = {name: _shown(run, steps) for name, run in runs.items()}
    timed = all(held[-1].at > begin for begin, held in shown.values())
    if not timed:
        shown = {name: (0.0, run.memory) for name, run in runs.items()}
    peaks = {kind: {n: max(getattr(m, kind) for m in held) for n, (_, held) in shown.items()} for kind in KINDS}
    retries = {n: [at for at in runs[n].retries_at if at >= begin] for n, (begin, _) in shown.items()}
    highest = max(peaks["reserved"].values())
    capacities = [run.hardware.capacity for run in runs.values() if run.hardware.capacity < 2 * highest]
    highest = max([1, highest, *capacities])
    unit, size = unit_for(highest)
    longest = max((held[-1].at - begin) * 1e3 if timed else len(held) - 1 for begin, held in shown.values())
    with notebook_style():
        figure = page(1.5 + 1.35 * len(runs), title, says, lab, model)
        rows = figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for row, (name, run) in zip(rows, runs.items(), strict=True):
            begin, held = shown[name]
            at = [(sample.at - begin) * 1e3 for sample in held] if timed else range(len(held))
            held_areas(row, at, {kind: [getattr(sample, kind) for sample in held] for kind in KINDS}, size)
            if timed:
                phases = [((mark.host - begin) * 1e3, mark.name) for mark in run.marks if mark.name in PHASES]
                name_phases(row, phases, longest)
            if run.hardware.capacity in capacities:
                row.axhline(run.hardware.capacity / size, **CAPACITY)
            mark_given_back(row, [at[bisect_left(held, when, key=_moment)] for when in retries[name]], highest / size)
            peak = f"{peaks['reserved'][name] / size:.3g} {unit} reserved at most"
            row.set_ylabel(f"memory, {unit}")
            counted = count(len(retries[name]), "retry", "retries")
            row.set_title(f"{name}: {peak}, {counted}, {_step(run)}")
        rows[0].set_ylim(0, 1.2 * highest / size)
        rows[0].set_xlim(0, longest)
        order = "allocations and frees of all steps, in order: a host takes no time"
        rows[-1].set_xlabel("ms of the host, from the start of the step" if timed else order)
        legend_beside(figure, held_handles(capacity=bool(capacities), given_back=any(retries.values())))
    data: dict[str, Any] = {
        f"peak {kind}, {unit}": {name: peak / size for name, peak in by_name.items()} for kind, by_name in peaks.items()
    }
    return Picture(figure, title, says, {**data, "retries": {name: len(at) for name, at in retries.items()}})


def blocks(
    snapshots: Mapping[str, Sequence[Segment]],
    *,
    title: str,
    says: str,
    lab: str | None = None,
    model: str | None = None,
) -> Picture:
    """Plot an allocator's segments and their blocks, stream by stream.

    Segments are laid end to end, on as many lines as necessary.

    Args:
        snapshots: return values of `CachingAllocator.snapshot()`, by name.
        title: the finding.
        says: one sentence on how to read it.
        lab: the lab, for the subtitle's count of the learner's answers.
        model: the hardware's name if the allocator is simulated; the subtitle then says that it was not measured.

    Returns:
        A picture whose `data` has for each snapshot: the number of segments, and the MiB reserved, in each state and
        of the largest free block.
    """
    widest = max([segment.size for segments in snapshots.values() for segment in segments], default=1)
    whole = max([widest, *(_share(segments) for segments in snapshots.values())])
    placed = {name: _placed(segments, whole) for name, segments in snapshots.items()}
    depths = {name: max([1.0, *(line + _BAR for _, _, line in places)]) for name, places in placed.items()}
    unit, size = unit_for(whole)
    with notebook_style():
        figure = page(1.6 + sum(0.45 + 0.24 * depth for depth in depths.values()), title, says, lab, model)
        ratios = [depth + 1.2 for depth in depths.values()]
        rows = figure.subplots(len(snapshots), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
        for row, (name, places) in zip(rows, placed.items(), strict=True):
            _draw_segments(row, places, size)
            row.set_xlim(-0.004 * whole / size, 1.004 * whole / size)
            row.set_ylim(depths[name] + 0.15, -0.15)
            row.set_title(textwrap.fill(f"{name}: {_sum_of_segments(snapshots[name])}", LETTERS))
        rows[-1].set_xlabel(f"{unit}; a framed bar is a segment")
        patches = [Patch(color=colour, label=BLOCK_WORDS[state]) for state, colour in BLOCK_COLOURS.items()]
        legend_beside(rows[0], patches)
    return Picture(figure, title, says, {name: _sizes(segments) for name, segments in snapshots.items()})


def _shown(run: Run, steps: int) -> tuple[float, list[Memory]]:
    """The host's start of the last steps, and the samples from there, the first being the state at that time."""
    begins = [mark.host for mark in run.marks if mark.name == "step"]
    begin = begins[-min(steps, len(begins))] if begins else run.memory[0].at
    before = [sample for sample in run.memory if sample.at < begin]
    return begin, [*(sample._replace(at=begin) for sample in before[-1:]), *run.memory[len(before) :]]


def _moment(sample: Memory) -> float:
    return sample.at


def _step(run: Run) -> str:
    return f"step {run.seconds * 1e3:.3g} ms" if run.seconds < 1 else f"step {run.seconds:.3g} s"


def _share(segments: Iterable[Segment]) -> float:
    """A line length with which the segments need only a few lines."""
    return sum(segment.size for segment in segments) / 6


def _placed(segments: Sequence[Segment], whole: float) -> list[tuple[Segment, float, float]]:
    """Each segment with its byte offset in a line, and the line."""
    places: list[tuple[Segment, float, float]] = []
    line = -1.0
    for stream in sorted({segment.stream for segment in segments}):
        line, at = line + 1 + (_GROUP if places else 0), 0.0
        for segment in sorted((s for s in segments if s.stream == stream), key=lambda segment: segment.start):
            if at + segment.size > whole:
                line, at = line + 1, 0.0
            places.append((segment, at, line))
            at += segment.size + _GAP * whole
    return places


def _draw_segments(row: Axes, places: Sequence[tuple[Segment, float, float]], size: int) -> None:
    lines: dict[int, list[float]] = {}
    for segment, at, line in places:
        lines.setdefault(segment.stream, []).append(line)
        left = at / size
        for block in segment.blocks:
            style: Any = {"facecolor": BLOCK_COLOURS[block.state], "edgecolor": "white", "linewidth": 0.3}
            row.add_patch(Rectangle((left, line), block.size / size, _BAR, **style))
            left += block.size / size
        frame: Any = {"fill": False, "edgecolor": "black", "linewidth": 0.7}
        row.add_patch(Rectangle((at / size, line), segment.size / size, _BAR, **frame))
    middles = [(min(each) + max(each) + _BAR) / 2 for each in lines.values()]
    row.set_yticks(middles, ["compute" if stream == 0 else f"stream {stream}" for stream in lines])
    row.tick_params(axis="y", length=0)
    row.spines["left"].set_visible(False)


def _sizes(segments: Sequence[Segment]) -> dict[str, float]:
    blocks = [block for segment in segments for block in segment.blocks]
    states = {state: sum(block.size for block in blocks if block.state == state) / _MIB for state in BLOCK_COLOURS}
    reserved = sum(segment.size for segment in segments) / _MIB
    largest = max([block.size for block in blocks if block.state == "free"], default=0) / _MIB
    return {"segments": len(segments), "reserved, MiB": reserved, **states, "largest free": largest}


def _sum_of_segments(segments: Sequence[Segment]) -> str:
    sizes = _sizes(segments)
    unit, size = unit_for(sizes["reserved, MiB"] * _MIB)
    reserved, free, largest = (sizes[each] * _MIB / size for each in ("reserved, MiB", "free", "largest free"))
    pieces = f"{free:.3g} free, at most {largest:.3g} in one piece"
    return f"{reserved:.3g} {unit} in {count(len(segments), 'segment', 'segments')}, {pieces}"
