"""A rank's list with 1F1B, and the messages between replicas of its stage that each way of data parallelism needs."""

from __future__ import annotations

from draw.canvas import canvas
from draw.fsdp.drawing import say
from draw.split.lanes import MICROS, RANKS, runs
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from minifsdp.answers.lab14 import when_to_reduce

from minifsdp.cost.pipeline import data_parallel
from minifsdp.instruments.plots.palette import GATHER, INK, PALE, REDUCE, SOFT, ink_on
from minifsdp.instruments.plots.schedules import colour_of

RANK = 1
WAYS = {"ZeRO-1": "zero1", "ZeRO-2": "zero2", "ZeRO-3": "fsdp", "FSDP2, kept": "fsdp2"}


def _marks(way: str) -> tuple[list[float], list[float]]:
    """The times of gathers and of reductions."""
    run = runs()["1F1B"]
    row = run.rows[RANK]
    once, every = ([row[at].end for at in when_to_reduce(run.plan[RANK], zero)] for zero in (1, 2))
    gathers = {
        "zero1": [row[-1].end + 1],
        "zero2": [row[-1].end + 1],
        "fsdp": [each.start for each in row],
        "fsdp2": [row[0].start],
    }
    found = gathers[way], once if way in ("zero1", "fsdp2") else every
    assert tuple(map(len, found)) == tuple(data_parallel(way, MICROS))
    return found


def _ticks(axes: Axes, at: list[float], top: float, colour: str) -> None:
    for time in at:
        axes.plot([time, time], [top, top + 0.34], color=colour, lw=6, solid_capstyle="butt")


def draw_reductions() -> Figure:
    """One lane of 1F1B; below it two lanes for each way: a mark for each gather above, for each reduction below."""
    figure = canvas(4.35)
    axes = figure.subplots()
    run = runs()["1F1B"]
    for action, start, end in run.rows[RANK]:
        colour = colour_of(action)
        axes.barh(0, end - start, 0.84, start, color=colour, edgecolor="white", linewidth=0.8)
        say(axes, (start + end) / 2, 0.03, str(action.micro), color=ink_on(colour))
    names = [f"rank {RANK} of {RANKS}"]
    for height, (name, way) in enumerate(WAYS.items(), 1):
        gathers, reductions = _marks(way)
        axes.barh(height, run.length + 0.8, 0.84, color=PALE, zorder=0)
        _ticks(axes, gathers, height - 0.36, GATHER)
        _ticks(axes, reductions, height + 0.02, REDUCE)
        factor = (len(gathers) + len(reductions)) / sum(data_parallel("zero1", MICROS))
        for column, (number, colour) in enumerate(((len(gathers), GATHER), (len(reductions), REDUCE))):
            say(axes, run.length + 2.8 + 2.6 * column, height, f"{number}", color=colour, fontweight="bold")
        say(axes, run.length + 9.2, height, f"{factor:g} ×", fontweight="bold")
        names.append(name)
    say(axes, run.length + 4.1, 0, "collectives", color=SOFT)
    say(axes, run.length + 9.2, 0, "bytes", color=SOFT)
    say(axes, 0, 5.0, "all-gather of parameters", ha="left", color=GATHER, fontweight="bold")
    say(axes, 19, 5.0, "reduce-scatter of gradients", ha="left", color=REDUCE, fontweight="bold")
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set(xticks=[], ylim=(5.4, -0.6), xlim=(-0.4, run.length + 11.0))
    for side in axes.spines.values():
        side.set_visible(False)
    return figure
