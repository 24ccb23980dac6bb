"""Pipelines over a step: a lane for each rank, a box for each action, coloured by micro-batch."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from minifsdp.instruments.plots.palette import INK, MICRO_BATCH_COLOURS, PALE, SOFT, ink_on, lighter
from minifsdp.instruments.plots.picture import Picture, page
from minifsdp.instruments.plots.style import notebook_style, wall_style
from minifsdp.pipeline.actions import Action
from minifsdp.pipeline.simulate import Rows, Simulation, bubble_of, length_of

TONES = {"F": 0.62, "B": 0.0, "I": 0.0, "W": -0.4}
"""Share of white in a micro-batch's colour; negative: of black."""

_NAMES = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights"}
_CONVENTION = "bubble: idle share of all ranks' time, over the whole step"
_LANE, _PANEL, _LEGEND = 0.25, 0.46, 0.24  # inches: a lane, the title of a panel, the legend
_DIGIT = 0.062  # inches


class _Lanes(NamedTuple):
    """A step to be drawn: rows of a simulation, or by the clock."""

    rows: Rows
    simulated: bool

    @classmethod
    def of(cls, step: Rows | Simulation) -> _Lanes:
        return cls(step.rows, True) if isinstance(step, Simulation) else cls(step, False)

    @property
    def unit(self) -> str:
        return "units of time" if self.simulated else "ms"

    @property
    def length(self) -> float:
        """In its unit."""
        return length_of(self.rows) * (1 if self.simulated else 1e3)

    def words(self, predicted: float | None) -> str:
        """Length and bubble."""
        length = f"{self.length:,.{0 if self.length >= 100 else 1}f}".removesuffix(".0") + f" {self.unit}"
        formula = "" if predicted is None else f", {predicted:.1%} by the formula"
        return f"{length}, bubble {bubble_of(self.rows):.1%}{formula}"


def pipeline(
    steps: Mapping[str, Rows | Simulation],
    *,
    title: str,
    says: str,
    lab: str | None = None,
    predicted: Mapping[str, float] | None = None,
) -> Picture:
    """Plot the steps of pipelines, one above the other: a lane for each rank, a box for each action.

    A box has the colour and the number of its micro-batch, from light to dark: forward, backward or the gradient of the
    input, gradients of the weights. A line under a box marks the second stage of a rank, two lines the third.

    Args:
        steps: by name, the return value of `simulate`; or for each rank its actions with their beginnings and ends,
            in seconds. Steps of one unit share their axis.
        title: the finding.
        says: one sentence on how to read it.
        lab: the lab, for the subtitle's count of the learner's answers.
        predicted: bubbles by a formula, by name, for the panels' titles.

    Returns:
        A picture whose `data` has the length and the bubble of each simulated step.
    """
    with notebook_style():
        figure = page(1.35 + _height(steps), title, says, lab)
        _draw(figure, steps, predicted or {}, figure.get_figwidth())
    shown = {name: step for name, step in steps.items() if isinstance(step, Simulation)}
    data = {name: {"length": step.length, "bubble": step.bubble} for name, step in shown.items()}
    return Picture(figure, title, says, data)


def pipeline_figure(
    steps: Mapping[str, Rows | Simulation], path: str | Path, title: str, predicted: Mapping[str, float] | None = None
) -> Figure:
    """The same as a PNG that fills a page; arguments as for `pipeline`."""
    with wall_style():
        figure = Figure(figsize=(13.0, 1.2 + _height(steps)), layout="constrained")
        figure.suptitle(title, x=0.012, ha="left")
        _draw(figure, steps, predicted or {}, figure.get_figwidth())
        figure.savefig(path, format="png", metadata={"Software": None})
    return figure


def _height(steps: Mapping[str, Rows | Simulation]) -> float:
    """Inches of the legend and all panels."""
    return _LEGEND + sum(_PANEL + _LANE * len(_Lanes.of(step).rows) for step in steps.values())


def _draw(figure: Figure, steps: Mapping[str, Rows | Simulation], predicted: Mapping[str, float], width: float) -> None:
    panels = {name: _Lanes.of(step) for name, step in steps.items()}
    longest = {each.unit: max(p.length for p in panels.values() if p.unit == each.unit) for each in panels.values()}
    heights = [0.2 + len(each.rows) for each in panels.values()]
    strip, *axes = figure.subplots(1 + len(panels), 1, height_ratios=[_LEGEND / _LANE, *heights])
    strip.axis("off")  # below the figure's title, however many lines that has
    strip.legend(handles=_handles(panels), loc="center left", ncols=6, handlelength=1.2, columnspacing=1.2, borderpad=0)
    for row, (name, each) in zip(axes, panels.items(), strict=True):
        _draw_lanes(row, each, longest[each.unit], 0.88 * width)
        row.set_title(textwrap.fill(f"{name}: {each.words(predicted.get(name))}", 96))
    names = [each.unit for each in panels.values()]
    for row, unit, below in zip(axes, names, [*names[1:], ""], strict=True):
        if unit != below:
            row.set_xlabel(unit if below else f"{unit}; {_CONVENTION}")
        else:
            row.set_xticklabels([])


def _draw_lanes(axes: Axes, lanes: _Lanes, longest: float, inches: float) -> None:
    """Draw one step; `inches` is the width of the axis, which ends at `longest`."""
    begin = min(start for row in lanes.rows for _, start, _ in row)
    scale = 1 if lanes.simulated else 1e3
    axes.barh(range(len(lanes.rows)), lanes.length, 0.84, color=PALE)
    for rank, row in enumerate(lanes.rows):
        stages = sorted({action.stage for action, _, _ in row})
        for action, start, end in row:
            left, width = scale * (start - begin), scale * (end - start)
            room = width / longest * inches
            _draw_box(axes, action, rank, left, width, room)
            for line in range(stages.index(action.stage)):
                at, inset = rank + 0.34 - 0.11 * line, min(0.2, 0.02 / max(room, 1e-9)) * width
                ink = ink_on(colour_of(action))
                axes.plot([left + inset, left + width - inset], [at, at], color=ink, lw=0.9, solid_capstyle="butt")
    axes.set_yticks(range(len(lanes.rows)), [f"rank {rank}" for rank in range(len(lanes.rows))])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(lanes.rows) - 0.5, -0.5)
    axes.set_xlim(0, longest)


def _draw_box(axes: Axes, action: Action, rank: int, left: float, width: float, room: float) -> None:
    colour, label = colour_of(action), str(action.micro)
    axes.barh(rank, width, 0.84, left, color=colour, edgecolor="white", linewidth=0.5 if room > 0.03 else 0.0)
    if len(label) * _DIGIT + 0.02 <= room:
        style: Any = {"ha": "center", "va": "center", "fontsize": 7, "color": ink_on(colour)}
        axes.text(left + width / 2, rank - 0.02, label, **style)


def colour_of(action: Action) -> str:
    """The colour of an action: its micro-batch's, lighter for a forward, darker for gradients of weights."""
    return lighter(MICRO_BATCH_COLOURS[action.micro % len(MICRO_BATCH_COLOURS)], TONES[action.kind])


def _handles(panels: Mapping[str, _Lanes]) -> list[Any]:
    """Legend patches of the kinds that occur, in grey, of idle time, and of a rank's later stages."""
    kinds = {action.kind for each in panels.values() for row in each.rows for action, _, _ in row}
    names = {kind: name for kind, name in _NAMES.items() if kind in kinds}
    if {"B", "I"} <= kinds:
        del names["I"]
        names["B"] = "backward, whole or input"
    patches = [Patch(color=lighter(SOFT, TONES[kind]), label=name) for kind, name in names.items()]
    idle = Patch(facecolor=PALE, edgecolor=lighter(INK, 0.7), linewidth=0.5, label="idle")
    several = any(len({action.stage for action, _, _ in row}) > 1 for each in panels.values() for row in each.rows)
    later = [Line2D([], [], color=INK, lw=0.9, label="2nd stage of a rank")] if several else []
    return [*patches, idle, *later]
