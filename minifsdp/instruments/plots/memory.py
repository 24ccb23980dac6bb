"""Memory plots of a lab's notebook: by stage of a step, and over its allocations."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import Normal, Stroke

from minifsdp.instruments.plots.drawing import Curve, areas, at_peak, stack, tag_patches, totals
from minifsdp.instruments.plots.palette import EARLIER_COLOURS, TAG_COLOURS, WHITE, as_text, colour_of
from minifsdp.instruments.plots.picture import Picture, given, legend_beside, page
from minifsdp.instruments.plots.style import DIAMOND, notebook_style, unit_for

_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)))  # tell apart earlier rungs, whose greys are similar
_VISIBLE = 5e-4  # a tag's share of the area of a curve, below which the legend leaves it out
_NARROW = 5e-3  # a stage's share of the axis
_CHARACTERS = 100  # of text that fit under the axis


def stages(
    measured: Mapping[str, Mapping[str, float]],
    *,
    title: str,
    says: str,
    lab: str | None = None,
    predicted: Mapping[str, float] | None = None,
    earlier: Mapping[str, Mapping[str, float]] | None = None,
    ylabel: str = "memory of a rank",
) -> Picture:
    """Plot memory at each stage of a step as a bar by tags, beside its prediction and earlier rungs.

    Args:
        measured: by stage, the bytes of each of the ledger's tags.
        title: the finding.
        says: one sentence on how to read it.
        lab: the lab, for the subtitle's count of the learner's answers.
        predicted: by stage, the total bytes of all tags; stages may be missing.
        earlier: by rung, the measured total bytes by stage.
        ylabel: the label of the axis; the unit is appended.

    Raises:
        ValueError: unknown tag or stage.
    """
    predicted, earlier = predicted or {}, earlier or {}
    for group in (predicted, *earlier.values()):
        _known("stage", group, measured)
    for sizes in measured.values():
        _known("tag", sizes, TAG_COLOURS)
    tagged = {stage: {tag: sizes.get(tag, 0) for tag in TAG_COLOURS} for stage, sizes in measured.items()}
    sums = {stage: sum(sizes.values()) for stage, sizes in tagged.items()}
    highest = max([1.0, *sums.values(), *(size for group in (predicted, *earlier.values()) for size in group.values())])
    name, unit = unit_for(highest)
    decimals = _decimals([size / unit for size in sums.values()])
    greys = _colours(list(earlier), apart=True)
    with notebook_style():
        figure = page(3.9, title, says, lab)
        axes = figure.subplots()
        narrow = 0.36 / max(2, len(earlier))
        for place, (stage, sizes) in enumerate(tagged.items()):
            own = place + (0.18 if earlier else 0.0)  # centre of the bar by tags
            for number, (rung, before) in enumerate(earlier.items()):
                left = own - 0.25 - narrow * (len(earlier) - number)
                axes.bar(left, before.get(stage, 0) / unit, 0.9 * narrow, align="edge", color=greys[rung])
            stack(axes, own, 0.46, sizes, unit)
            over = (own, sums[stage] / unit)
            axes.annotate(f"{over[1]:,.{decimals}f}", over, (0, 3), textcoords="offset points", ha="center")
            if stage in predicted:
                axes.plot(own + 0.23, predicted[stage] / unit, **{**DIAMOND, "markersize": 5})
        aside = max(0, 3 - len(tagged)) / 2  # keeps the bars narrow when there are few stages
        axes.set_xlim(-0.5 - aside, len(tagged) - 0.5 + aside)
        axes.set_ylim(0, 1.12 * highest / unit)
        axes.set_xticks(range(len(tagged)), [_folded(stage, len(tagged)) for stage in tagged])
        axes.tick_params(axis="x", length=0)
        axes.set_ylabel(f"{ylabel}, {name}")
        handles = _tags_in(tagged.values()) + [Patch(color=greys[rung], label=rung) for rung in greys]
        if predicted:
            handles.insert(0, Line2D([], [], label="predicted", **{**DIAMOND, "markersize": 5}))
        legend_beside(axes, handles)
    held = {stage: {tag: size for tag, size in sizes.items() if size} for stage, sizes in tagged.items()}
    return Picture(figure, title, says, given(measured=held, predicted=dict(predicted), earlier=dict(earlier)))


def curve(
    curve: Curve,
    *,
    title: str,
    says: str,
    lab: str | None = None,
    predicted_peak: float | None = None,
    earlier: Mapping[str, Curve] | None = None,
) -> Picture:
    """Plot memory by tags over the allocations and frees of a step, with the outlines of earlier rungs.

    Args:
        curve: return value of `Ledger.curve()`; each mark ends the stage that it names.
        title: the finding.
        says: one sentence on how to read it.
        lab: the lab, for the subtitle's count of the learner's answers.
        predicted_peak: bytes.
        earlier: the curves of earlier rungs, stretched to align marks of the same name.
    """
    earlier = earlier or {}
    highest = max(max(totals(each)) for each in (curve, *earlier.values()))
    highest = max(1.0, highest, predicted_peak or 0)
    name, unit = unit_for(highest)
    greys = _colours(list(earlier))
    with notebook_style():
        figure = page(3.9, title, says, lab)
        axes = figure.subplots()
        events = areas(axes, curve, unit)
        lines = {rung: {"color": as_text(greys[rung]), "linestyle": d} for rung, d in zip(earlier, cycle(_DASHES))}
        on_fills: Any = {"path_effects": [Stroke(linewidth=3, foreground=WHITE), Normal()]}
        for rung, before in earlier.items():
            outline = [size / unit for size in totals(before)]
            axes.step(_aligned(before, curve), outline, where="post", linewidth=1.4, **lines[rung], **on_fills)
        handles = [Line2D([], [], label=rung, **line) for rung, line in lines.items()]
        if predicted_peak is not None:
            axes.axhline(predicted_peak / unit, color="black", linewidth=0.9, linestyle=(0, (4, 3)))
            label = f"predicted peak, {_amount(predicted_peak / unit)} {name}"
            handles.insert(0, Line2D([], [], color="black", linewidth=0.9, linestyle=(0, (4, 3)), label=label))
        axes.set_ylim(0, 1.06 * highest / unit)
        axes.set_ylabel(f"memory of a rank, {name}")
        axes.set_xlabel("allocations and frees, in order")
        _name_stages(axes, curve["marks"], events)
        least = _VISIBLE * highest * max(1, events)
        visible = {tag: sizes for tag, sizes in curve["tags"].items() if sum(sizes) > least}
        legend_beside(axes, _tags_in([visible]) + handles)
    marks = {mark: totals(curve)[at] for at, mark in curve["marks"]}
    peaks = {rung: max(totals(before)) for rung, before in earlier.items()}
    held = {tag: size for tag, size in at_peak(curve).items() if size}
    data = given(at_the_peak=held, at_the_marks=marks, predicted_peak=predicted_peak, earlier_peaks=peaks)
    return Picture(figure, title, says, data)


def _known(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no such {what}: {', '.join(unknown)}; choose from {', '.join(known)}")


def _colours(rungs: Sequence[str], apart: bool = False) -> dict[str, str]:
    """The colours of earlier rungs: their own, or else greys, the nearest rung's the darkest.

    `apart`: as different as they can be on white, for bars; lines have their dashes.
    """
    last, palest = len(EARLIER_COLOURS) - 1, 2
    every = max(1, (last - palest) // max(1, len(rungs) - 1)) if apart else 1
    greys = [EARLIER_COLOURS[max(0, last - every * nearer)] for nearer in reversed(range(len(rungs)))]
    return {rung: colour_of(rung) or grey for rung, grey in zip(rungs, greys, strict=True)}


def _tags_in(sizes: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Patches of the nonempty tags, in visual order from the top."""
    present = {tag for each in sizes for tag, size in each.items() if np.any(size)}
    return tag_patches([tag for tag in reversed(TAG_COLOURS) if tag in present])


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _decimals(amounts: Sequence[float]) -> int:
    """The number of decimals that gives the largest amount three digits, four if all are close; 0 if all are whole."""
    largest, least = max(amounts, default=0), min(amounts, default=0)
    if all(amount == int(amount) for amount in amounts):
        return 0
    return (0 if largest >= 100 else 1 if largest >= 10 else 2) + (0.99 * largest < least < largest)


def _folded(name: str, count: int) -> str:
    """A stage's name, wrapped so as not to touch its neighbours."""
    return textwrap.fill(name, max(9, 72 // max(3, count)))


def _aligned(before: Curve, curve: Curve) -> Any:
    """Positions of an earlier curve's events on this curve's axis."""
    ends = [len(totals(each)) - 1 for each in (before, curve)]
    here, there = (
        [0, *(at for at, _ in each["marks"]), end] for each, end in zip((curve, before), reversed(ends), strict=True)
    )
    if [mark for _, mark in before["marks"]] != [mark for _, mark in curve["marks"]]:
        here, there = [0, ends[1]], [0, ends[0]]
    return np.interp(range(ends[0] + 1), there, here)


def _name_stages(axes: Axes, marks: Sequence[tuple[int, str]], events: int) -> None:
    """Draw a line at the end of each stage, and below it its name, on enough lines to keep the names apart.

    A stage without room for a line is left out.
    """
    ends: list[float] = []  # end of the last name on each line, in characters
    begin = 0
    for at, mark in marks:
        if at - begin < _NARROW * events:
            continue
        axes.axvline(at, color="black", linewidth=0.5)
        middle = _CHARACTERS * (begin + at) / 2 / max(1, events - 1)
        begin = at
        first = min(max(0.0, middle - len(mark) / 2), _CHARACTERS - len(mark))
        row = next((row for row, end in enumerate(ends) if end + 1 < first), len(ends))
        ends[row : row + 1] = [first + len(mark)]
        under = ((first + len(mark) / 2) / _CHARACTERS, 0)
        axes.annotate(
            mark, under, (0, -3 - 11 * row), "axes fraction", "offset points", ha="center", va="top", fontsize=8
        )
    axes.xaxis.labelpad = 2 + 11 * len(ends)
