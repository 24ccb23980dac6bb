"""The bubble over the number of micro-batches, and the step over their size."""

from __future__ import annotations

from functools import cache

from draw.canvas import canvas
from draw.fsdp.drawing import say
from draw.split.lanes import RANKS, UNITS, plan_of
from matplotlib.figure import Figure

from minifsdp.cost.pipeline import bubble
from minifsdp.instruments.plots.palette import INK, SERIES_COLOURS, as_text
from minifsdp.pipeline.schedules.gpipe import gpipe
from minifsdp.pipeline.schedules.one_f_one_b import one_f_one_b
from minifsdp.pipeline.simulate import simulate

COUNTS = (1, 2, 4, 8, 16, 32, 64)
MICROS_AT_95 = next(micros for micros in range(1, 1000) if bubble(RANKS, micros) <= 0.05)
ON_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 2}
ROWS = 48  # the batch, and milliseconds of a stage's forward: for any micro-batch, and for each row
FIXED, EACH = 4.0, 1.0


def draw_bubbles() -> Figure:
    """(p - 1) / (m + p - 1) as lines, GPipe and 1F1B by the simulator on them."""
    figure = canvas(4.3)
    axes = figure.subplots()
    for ranks, colour in zip((2, 4, 8, 16), SERIES_COLOURS, strict=False):
        axes.plot(COUNTS, [100 * bubble(ranks, micros) for micros in COUNTS], color=colour)
        for order, marker, size in ((gpipe, "o", 11), (one_f_one_b, "x", 9)):
            plans = ([list(order(rank, ranks, micros)) for rank in range(ranks)] for micros in COUNTS)
            found = [100 * simulate(plan, UNITS).bubble for plan in plans]
            face = {"markerfacecolor": "white"} if marker == "o" else {"markeredgewidth": 2.4}
            axes.plot(COUNTS, found, marker, color=colour, markersize=size, **face)
        between = 6  # micro-batches: lines are far apart
        say(axes, between, 100 * bubble(ranks, between), f"p = {ranks}", color=as_text(colour), bbox=ON_WHITE)
    axes.set_xscale("log", base=2)
    axes.set_xticks(COUNTS, [str(each) for each in COUNTS])
    axes.set_xlim(0.9, 72)
    axes.set_ylim(-2, 100)
    axes.set_xlabel("micro-batches m")
    axes.set_ylabel("bubble, % of the step")
    axes.grid(axis="y")
    key = "○ GPipe and × 1F1B by the simulator,\nlines: (p − 1) / (m + p − 1)"
    say(axes, 11, 90, key, ha="left", color=INK, bbox=ON_WHITE)
    return figure


@cache
def _steps() -> dict[int, float]:
    """Milliseconds of a step with 1F1B, by the number of micro-batches."""
    found = {}
    for micros in (each for each in range(1, ROWS + 1) if ROWS % each == 0):
        forward = FIXED + EACH * ROWS / micros
        found[micros] = simulate(plan_of(one_f_one_b, micros), {"F": forward, "B": 2 * forward}).length
    return found


def fastest() -> dict[str, str]:
    """The best number of micro-batches, and its step beside the longest with the smallest ones."""
    steps = _steps()
    best = min(steps, key=steps.__getitem__)
    return {"micros": f"{best}", "rows": f"{ROWS // best}", "step": f"{steps[best]:.0f}", "small": f"{steps[ROWS]:.0f}"}


def draw_sizes() -> Figure:
    """A step of 48 rows, cut into 1 to 48 micro-batches: idle time and the fixed cost of each micro-batch."""
    figure = canvas(4.3)
    axes = figure.subplots()
    steps = _steps()
    best = min(steps, key=steps.__getitem__)
    axes.plot(list(steps), list(steps.values()), "o-", color=SERIES_COLOURS[0])
    for micros, length in steps.items():
        share = 100 * bubble(RANKS, micros)
        if micros in (1, 2, 6, 16, 48):
            side = "left" if micros < best else "right" if micros > best else "center"  # off the line
            say(axes, micros, length + 60, f"{length:.0f} ms", ha=side, fontweight="bold")
            say(axes, micros, 30, f"{share:.0f} %")
    say(axes, 1.0, 105, "bubble:", ha="left")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(steps), [str(each) for each in steps])
    axes.set_ylim(0, 850)
    axes.set_xlim(0.7, 66)
    axes.minorticks_off()
    axes.set_xlabel(f"micro-batches, {ROWS} samples in total")
    axes.set_ylabel("ms of a step")
    return figure
