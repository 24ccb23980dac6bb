"""Schedules of a pipeline on four ranks: a lane for each rank, a box for each action, numbered by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from draw.canvas import canvas
from draw.fsdp.drawing import say
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minifsdp.cost.pipeline import messages
from minifsdp.instruments.plots.palette import INK, PALE, SOFT, ink_on, lighter
from minifsdp.instruments.plots.schedules import TONES, colour_of
from minifsdp.pipeline.actions import Action, Plan, homes_of
from minifsdp.pipeline.schedules.gpipe import gpipe
from minifsdp.pipeline.schedules.interleaved import interleaved
from minifsdp.pipeline.schedules.naive import naive
from minifsdp.pipeline.schedules.one_f_one_b import one_f_one_b
from minifsdp.pipeline.schedules.zero_bubble import zero_bubble
from minifsdp.pipeline.simulate import Simulation, simulate

RANKS, MICROS = 4, 8
UNITS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
KINDS = {"F": "forward", "B": "backward"}


def plan_of(order: Callable[..., Iterable[Action]], micros: int = MICROS, *more: int) -> Plan:
    return [list(order(rank, RANKS, micros, *more)) for rank in range(RANKS)]


def _times(factor: float) -> Mapping[str, float]:
    return {kind: factor * units for kind, units in UNITS.items()}


def run_naively(micros: int) -> Simulation:
    """The whole batch at once, which takes as long as its micro-batches together."""
    return simulate([list(naive(rank, RANKS)) for rank in range(RANKS)], _times(micros))


@cache
def runs() -> dict[str, Simulation]:
    """A step with each schedule, by name."""
    return {
        "naive": run_naively(MICROS),
        "GPipe": simulate(plan_of(gpipe), UNITS),
        "1F1B": simulate(plan_of(one_f_one_b), UNITS),
        "interleaved": simulate(plan_of(interleaved, MICROS, 2), _times(0.5)),
        "ZB-H1": simulate(plan_of(zero_bubble), UNITS),
    }


def sent(run: Simulation) -> int:
    """Messages of all ranks."""
    homes = [home for _, home in sorted(homes_of(run.plan).items())]
    return sum(messages(actions, homes, rank) for rank, actions in enumerate(run.plan))


def _draw(axes: Axes, name: str, run: Simulation, longest: float) -> None:
    axes.barh(range(RANKS), run.length, 0.84, color=PALE)
    for rank, row in enumerate(run.rows):
        for action, start, end in row:
            colour = colour_of(action)
            axes.barh(rank, end - start, 0.84, start, color=colour, edgecolor="white", linewidth=0.8)
            if end - start >= 1:
                say(axes, (start + end) / 2, rank + 0.03, str(action.micro), color=ink_on(colour))
    axes.set_title(f"{name}: {run.length:g} units of time, bubble {100 * run.bubble:.0f} %")
    axes.set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set(xticks=[], ylim=(RANKS - 0.35, -0.5), xlim=(0, longest))
    axes.spines[["left", "bottom"]].set_visible(False)


def _pair(runs: Mapping[str, Simulation], height: float) -> Figure:
    """Two steps, one above the other, and what the lightness of a box says."""
    figure = canvas(height)
    longest = max(run.length for run in runs.values())
    for axes, (name, run) in zip(figure.subplots(2), runs.items(), strict=True):
        _draw(axes, name, run, longest)
    patches = [Patch(color=lighter(SOFT, TONES[kind]), label=name) for kind, name in KINDS.items()]
    handles = [*patches, Patch(facecolor=PALE, edgecolor=SOFT, linewidth=0.5, label="idle")]
    figure.legend(handles=handles, loc="outside lower left", ncols=4, handlelength=1.0, columnspacing=1)
    return figure


def draw_micro_batches() -> Figure:
    """A batch at once, and in four micro-batches: the same work, on four ranks one after the other and at once."""
    few = 4
    runs = {"one batch": run_naively(few), f"{few} micro-batches": simulate(plan_of(gpipe, few), UNITS)}
    return _pair(runs, 4.25)


def draw_order() -> Figure:
    """GPipe and 1F1B, and the three parts of rank 0's list."""
    figure = _pair({name: runs()[name] for name in ("GPipe", "1F1B")}, 5.2)
    row = runs()["1F1B"].rows[0]
    first_backward = next(start for action, start, _ in row if action.kind == "B")
    ahead = sum(start < first_backward for _, start, _ in row) - 1  # forwards before the first pair
    times = (0.0, row[ahead].start, row[-ahead].start, row[-1].end)
    axes = figure.axes[1]
    axes.set_ylim(RANKS - 0.35, -1.7)
    axes.get_gridspec().set_height_ratios([RANKS, RANKS + 1.2])  # lanes of one height
    for begin, end, text in zip(
        times, times[1:], ("rank 0: warm-up", "steady state: F and B alternate", "cool-down"), strict=False
    ):
        look: Any = {"arrowstyle": "|-|,widthA=0.3,widthB=0.3", "color": SOFT, "lw": 1.6, "shrinkA": 1, "shrinkB": 1}
        axes.annotate("", (end, -0.62), (begin, -0.62), arrowprops=look)
        say(axes, max((begin + end) / 2, 3.2), -1.15, text, color=SOFT)
    return figure
