"""Shared drawing functions: a bar by tags, a curve by tags, the lanes of a timeline, the names of phases."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from minifsdp.instruments.plots.palette import COLLECTIVE_COLOURS, LANE_COLOURS, SOFT, TAG_COLOURS, ink_on
from minifsdp.instruments.watch.timeline import Span

LETTER = 0.011  # width of a character, as a fraction of a notebook's timeline
_LINE = 0.45  # height of a line of phase names, in lanes

Curve = Mapping[str, Any]
"""`{"tags": {tag: bytes after each event of the ledger}, "marks": [[index of an event, its name], ...]}`."""


def stack(axes: Axes, x: float, width: float, sizes: Mapping[str, float], unit: int) -> None:
    """Draw a stacked bar of `sizes` bytes by tag."""
    bottom = 0.0
    for tag, size in sizes.items():
        axes.bar(x, size / unit, width, bottom / unit, color=TAG_COLOURS[tag])
        bottom += size


def rows_of_tags(
    axes: Axes, rows: Sequence[Mapping[str, float]], height: float, unit: int, places: Sequence[float]
) -> list[float]:
    """Draw the same from left to right, a bar for each of `rows` at its place on y; returns their ends in units."""
    ends = [list(accumulate((size / unit for size in sizes.values()), initial=0.0)) for sizes in rows]
    heights = [place for place, sizes in zip(places, rows, strict=True) for _ in sizes]
    widths = [size / unit for sizes in rows for size in sizes.values()]
    lefts = [left for each in ends for left in each[:-1]]
    axes.barh(heights, widths, height, lefts, color=[TAG_COLOURS[tag] for sizes in rows for tag in sizes])
    return [each[-1] for each in ends]


def grouped(groups: Sequence[str], gap: float) -> tuple[list[float], dict[float, str]]:
    """Places on y of rows, from the group of each, and those of the groups' headings.

    Args:
        groups: neighbours with the same one belong together; if all have the same, it needs no heading.
        gap: between groups, in rows; a heading is in the middle of the gap above its group.
    """
    runs = [(group, len([*rows])) for group, rows in groupby(groups)]
    if len(runs) < 2:
        return [float(row) for row in range(len(groups))], {}
    places: list[float] = []
    headings: dict[float, str] = {}
    for number, (group, rows) in enumerate(runs, 1):
        first = len(places) + number * gap
        places += [first + row for row in range(rows)]
        headings[first - (1 + gap) / 2] = group
    return places, headings


def name_groups(axes: Axes, headings: Mapping[float, str], size: float) -> None:
    """Write the headings of groups of rows above the names of the rows."""
    left: Any = {"ha": "right", "va": "center", "color": SOFT, "fontsize": size, "fontstyle": "italic"}
    for place, heading in headings.items():
        axes.text(-0.01, place, heading, transform=axes.get_yaxis_transform(), **left)


def areas(axes: Axes, curve: Curve, unit: int) -> int:
    """Draw bytes by tag over the events of a step; returns the number of events."""
    heights = [[value / unit for value in curve["tags"][tag]] for tag in TAG_COLOURS]
    events = len(heights[0])
    axes.stackplot(range(events), heights, colors=TAG_COLOURS.values(), step="post", linewidth=0)
    axes.set_xlim(0, max(1, events - 1))
    axes.set_xticks([])
    return events


def totals(curve: Curve) -> list[float]:
    """Total bytes of all tags after each event."""
    return [sum(values) for values in zip(*(curve["tags"][tag] for tag in TAG_COLOURS), strict=True)]


def at_peak(curve: Curve) -> dict[str, float]:
    """Bytes by tag at the peak."""
    held = totals(curve)
    peak = held.index(max(held))
    return {tag: curve["tags"][tag][peak] for tag in TAG_COLOURS}


def lanes(
    row: Axes,
    spans: Sequence[Span],
    longest: float,
    begin: float = 0.0,
    labelled: bool = False,
) -> None:
    """Draw the lanes of a step, compute on top. If there is a host lane, the host's waits are drawn in it.

    Streams with no visible kernel are left out.

    Args:
        row: the axes to draw on.
        spans: the spans of the step.
        longest: the end, in milliseconds, of the axis that the rows share.
        begin: its start, in milliseconds; negative if a host is ahead of its device.
        labelled: merge a unit's kernels within a phase, and write the last part of its name into bars with room for it.
    """
    spans, whole = visible(spans, longest), longest - begin
    phases = [span for span in spans if span.lane == "phase"]
    present = {span.lane for span in spans} - {"phase"}
    present -= {"wait"} if "host" in present else set()
    names = sorted(
        present | {"compute", "communication"}, key=lambda lane: (list(LANE_COLOURS).index(_kind(lane)), lane)
    )
    for height, lane in enumerate(reversed(names)):
        mine = [span for span in spans if span.lane == lane]
        mine = _joined(mine, phases, 0.002 * whole / 1e3) if labelled and _kind(lane) == "compute" else mine
        mine += [span for span in spans if span.lane == "wait" and lane == "host"]
        bars = [(span.start * 1e3, span.duration * 1e3) for span in mine]
        colours = [_colour(span) for span in mine]
        edges = [0.0 if labelled and width < 0.004 * whole else 0.8 if labelled else 0.3 for _, width in bars]
        row.broken_barh(bars, (height - 0.4, 0.8), facecolors=colours, edgecolor="white", linewidth=edges)
        if labelled:
            _label(row, mine, height, whole)
    row.set_yticks(range(len(names)), reversed(names))
    row.set_xlim(begin, longest)
    row.tick_params(axis="y", length=0)
    lines = _name_phases(row, phases, 0.5 if "host" in names else -0.5, len(names), longest, whole)
    row.set_ylim(-0.5, len(names) + 0.1 + _LINE * (lines - 1))


def _name_phases(row: Axes, phases: Sequence[Span], low: float, over: float, longest: float, whole: float) -> int:
    """Draw a line at the start of every phase, from `low`, and its name above the lanes; returns the lines of names.

    Names keep within the axis, which ends at `longest` and is `whole` wide, apart from each other, and off the lines.
    """
    gap = 0.005 * whole
    named = [(phase.start * 1e3, LETTER * len(phase.name) * whole + 2 * gap, phase.name) for phase in phases]
    rightward = [each for each in reversed(named) if each[0] + each[1] <= longest]
    placed: list[tuple[float, float, int]] = []  # the ends of a name, and its line
    for at, width, name in [*rightward, *(each for each in named if each not in rightward)]:
        left, right = (at, at + width) if at + width <= longest else (at - width, at)
        line = 1 + max((line for start, end, line in placed if start < right and left < end), default=-1)
        placed.append((left, right, line))
        row.vlines(at, low, over - 0.03 + _LINE * line, color="black", linewidth=0.6)
        x, side = (at + gap, "left") if left == at else (at - gap, "right")
        row.text(x, over - 0.45 + _LINE * line, name, fontsize=7, ha=side, va="bottom")
    return 1 + max((line for *_, line in placed), default=0)


def _joined(spans: Sequence[Span], phases: Sequence[Span], gap: float) -> list[Span]:
    """The spans, with neighbours of the same name and phase merged if at most `gap` seconds apart."""
    joined: list[Span] = []
    starts = [phase.start for phase in phases]
    begun = 0  # phases
    for span in sorted(spans, key=lambda span: span.start):
        earlier, begun = begun, bisect_right(starts, span.start)
        before = joined[-1] if joined and begun == earlier else None
        if before is not None and before.name == span.name and span.start <= before.end + gap:
            joined[-1] = before._replace(duration=max(span.end, before.end) - before.start)
        else:
            joined.append(span)
    return joined


def visible(spans: Sequence[Span], longest: float) -> list[Span]:
    """Leave out streams other than the compute stream, and copies, that are all too short to be seen.

    Args:
        longest: milliseconds of the axis.
    """
    seen = {span.lane for span in spans if span.duration * 1e3 > 0.002 * longest}
    return [span for span in spans if span.lane in seen or not ("stream" in span.lane or span.lane == "copy")]


def _label(row: Axes, spans: Sequence[Span], height: float, whole: float) -> None:
    """Write `all_gather blocks.3` as `3` into its bar. What the host does is written whole, as is a remark."""
    for span in spans:
        name = span.name if span.lane == "host" else span.name.split()[-1].rpartition(".")[2]
        look: Any = {"va": "center", "fontsize": 7}
        if not span.duration:
            row.text(0.005 * whole, height - 0.03, name, backgroundcolor="white", **look)
        elif not _covered(span, spans) and (len(name) + 0.8) * LETTER * whole < span.duration * 1e3:
            colour = ink_on(_colour(span))
            middle = (span.start + span.duration / 2) * 1e3
            row.text(middle, height - 0.03, name, ha="center", color=colour, **look)


def _covered(span: Span, spans: Sequence[Span]) -> bool:
    """True if it is a wait of the host, or lies under one."""
    return any(each.lane == "wait" and each.start < span.end and span.start < each.end for each in spans)


def lane_patches(spans: Iterable[Span] | None = None) -> list[Patch]:
    """Legend patches of a timeline: all lanes, or only those among `spans`."""
    named = {
        "compute": LANE_COLOURS["compute"],
        **COLLECTIVE_COLOURS,
        "copy to or from the host": LANE_COLOURS["copy"],
        "host issues": LANE_COLOURS["host"],
        "host waits": LANE_COLOURS["wait"],
    }
    # from a trace, where the host has no lane and few steps copy to or from it
    everything = set(named.values()) - {LANE_COLOURS["host"], LANE_COLOURS["copy"], COLLECTIVE_COLOURS["broadcast"]}
    present = (
        everything if spans is None else {_colour(span) for span in spans if span.lane != "phase" and span.duration}
    )
    return [Patch(color=colour, label=name) for name, colour in named.items() if colour in present]


def tag_patches(tags: Iterable[str] = TAG_COLOURS) -> list[Any]:
    return [Patch(color=TAG_COLOURS[tag], label=tag) for tag in tags]


def step_of(spans: Sequence[Span]) -> float:
    """The end of the last span, in milliseconds."""
    return max((span.end for span in spans), default=0.0) * 1e3


def row_title(name: str, spans: Sequence[Span], overlap: float | None) -> str:
    hidden = "no communication" if overlap is None else f"{overlap:.0%} of communication under compute"
    step = step_of(spans)
    return f"{name}: {step:.{0 if step >= 10 else 2}f} ms, {hidden}"


def _colour(span: Span) -> str:
    kind = _kind(span.lane)
    if kind != "communication":
        return LANE_COLOURS[kind]
    name = span.name.lower().replace("_", "").replace("-", "")  # NCCL's kernels: AllReduce
    return next(
        (colour for op, colour in COLLECTIVE_COLOURS.items() if op.replace("-", "") in name), LANE_COLOURS[kind]
    )


def _kind(lane: str) -> str:
    """`compute (stream 7)` as `compute`."""
    return lane.split()[0]
