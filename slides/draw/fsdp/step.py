"""What a step does to its units, in order, and what memory that takes."""

from __future__ import annotations

from typing import Any

from draw.canvas import MIB, canvas
from draw.fsdp.drawing import bare, box, say
from draw.fsdp.runs import ranks
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minifsdp.instruments.plots.palette import (
    BLACK,
    GATHER,
    INK,
    LANE_COLOURS,
    LINE,
    REDUCE,
    SOFT,
    TAG_COLOURS,
    WHITE,
    ink_on,
)


def draw_life() -> Figure:
    """One unit over a step: its memory, and under it what computes and what travels."""
    figure = canvas(4.3)
    memory, lanes = figure.subplots(2, 1, sharex=True, height_ratios=(2.6, 1))
    shard, times = 0.27, [0.0, 0.4, 4.9, 7.9, 11.0, 13.2, 16.9, 17.6]
    _, first, freed, second, grown, last, reduced, end = times
    layers = {
        "parameters": [shard] * 8,
        "mean": [0, 0, 0, 0, 0, shard, shard, shard],
        "unsharded": [0, 1, 0, 1, 1, 0, 0, 0],
        "gradients": [0, 0, 0, 0, 1, 1, 0, 0],
    }
    colours = [TAG_COLOURS["gradients" if name == "mean" else name] for name in layers]
    memory.stackplot(times, *layers.values(), colors=colours, step="post", linewidth=0)
    heights = [sum(values) for values in zip(*layers.values(), strict=True)]
    memory.step(times, heights, where="post", color="white", lw=1)
    say(memory, (first + freed) / 2, shard / 2, "the shard", color=ink_on(colours[0]))
    say(memory, (first + freed) / 2, 0.75, "unsharded\nparameters", color=BLACK)
    say(memory, (second + grown) / 2, 0.75, "unsharded\nparameters", color=BLACK)
    say(memory, (grown + last) / 2, 1.75, "full\ngradient", color=ink_on(colours[3]))
    say(memory, (last + reduced) / 2, 0.5 + 2 * shard, "gradient, being\nreduced", color=ink_on(colours[3]))
    memory.hlines(2 * shard, last, reduced, color="white", linewidth=1.4)
    say(memory, (last + end) / 2, 1.5 * shard, "its shard", color=ink_on(colours[3]))
    for x, name in ((first, "pre-forward"), (freed, "post-forward"), (second, "pre-backward"), (last, "post-backward")):
        for axes in (memory, lanes):
            axes.axvline(x, color=INK, linewidth=1.4, linestyle=(0, (3, 3)))
        say(memory, x + 0.1, 2.55, name, ha="left")
    memory.set_ylim(0, 2.75)
    memory.set_yticks([0, shard, 1 + shard, 2 + shard], ["0", "P/N", "P + P/N", "2P + P/N"])
    for start, stop, lane, colour, text in (
        (first, 2.9, 0, GATHER, "all-gather"),
        (2.9, freed, 1, LANE_COLOURS["compute"], "forward"),
        (second, 10.4, 0, GATHER, "all-gather"),
        (10.4, last, 1, LANE_COLOURS["compute"], "backward"),
        (last, reduced, 0, REDUCE, "reduce-scatter"),
    ):
        box(lanes, (start, lane), stop - start, 0.9, colour)
        say(lanes, (start + stop) / 2, lane + 0.43, text, color=ink_on(colour))
    say(lanes, (freed + second) / 2, 1.43, "other units", color=SOFT)
    lanes.set_yticks([0.43, 1.43], ["link", "compute"])
    lanes.tick_params(axis="y", length=0, labelcolor=INK)
    lanes.set_ylim(-0.05, 2.0)
    lanes.set_xlim(0, end)
    lanes.set_xticks([])
    for axes in (memory, lanes):
        axes.spines["bottom"].set_visible(axes is memory)
    lanes.spines["left"].set_visible(False)
    return figure


LOOKS: dict[str, dict[str, Any]] = {
    "gather": {"facecolor": GATHER},
    "compute": {"facecolor": LANE_COLOURS["compute"]},
    "free": {"facecolor": WHITE, "edgecolor": TAG_COLOURS["unsharded"], "linewidth": 2.4},
    "reduce": {"facecolor": REDUCE},
}


def _event(axes: Axes, x: float, y: float, verb: str) -> None:
    """A box in a row of events, with the verb's first letter."""
    box(axes, (x + 0.04, y - 0.36), 0.92, 0.72, "white", **LOOKS[verb])
    say(axes, x + 0.5, y - 0.02, verb[0].upper(), color=ink_on(LOOKS[verb]["facecolor"]))


def draw_log() -> Figure:
    """What a step did to each of four units, in order, and how long each stayed whole."""
    figure = canvas(4.8)
    axes = figure.subplots()
    log = ranks()[0]["steps"][0]["log"]
    since: dict[int, int] = {}
    for at, (verb, unit) in enumerate(log):  # below the events, how long a unit is whole
        if verb == "gather":
            since[unit] = at
        if verb == "free":
            box(axes, (since[unit] + 0.5, 2.96 - unit), at - since[unit], 0.88, TAG_COLOURS["unsharded"])
    for at, (verb, unit) in enumerate(log):
        _event(axes, at, 3.4 - unit, verb)
    for unit, name in enumerate(("root", "block 0", "block 1", "block 2")):
        say(axes, -0.4, 3.4 - unit, name, ha="right")
        axes.axhline(2.9 - unit, color=LINE, linewidth=1, zorder=0)
    turn = [at for at, event in enumerate(log) if event == ("compute", 0)][1] + 1  # the head, and the loss
    axes.vlines(turn, -0.1, 4.4, color=INK, linewidth=1.6, linestyle=(0, (3, 3)))
    say(axes, turn - 0.3, 4.2, "forward", ha="right", fontweight="bold")
    say(axes, turn + 0.3, 4.2, "backward", ha="left", fontweight="bold")
    names = {"gather": "all-gather", "compute": "compute", "free": "free", "reduce": "reduce-scatter"}
    for x, (verb, text) in zip((-1.5, 4.5, 9.7, 13.1), names.items(), strict=True):
        _event(axes, x, -0.75, verb)
        say(axes, x + 1.3, -0.77, text, ha="left")
    box(axes, (20.6, -1.11), 1.5, 0.72, TAG_COLOURS["unsharded"])
    say(axes, 22.4, -0.77, "unsharded", ha="left")
    bare(axes, (-3.4, len(log) + 0.2), (-1.2, 4.45))
    return figure


def draw_strategies() -> Figure:
    """Parameters on a rank over a step, under both strategies."""
    figure, top = canvas(4.6), 14.8
    panels = figure.subplots(1, 2, sharey=True)
    for axes, name, record in zip(panels, ("FULL_SHARD", "SHARD_GRAD_OP"), ranks()[0]["strategies"], strict=True):
        curve = record["curve"]
        heights = [[value / MIB for value in curve["tags"][tag]] for tag in ("parameters", "unsharded")]
        colours = [TAG_COLOURS["parameters"], TAG_COLOURS["unsharded"]]
        axes.stackplot(range(len(heights[0])), *heights, colors=colours, step="post", linewidth=0)
        (turn, _), (end, _) = curve["marks"]
        axes.axvline(turn, color=INK, linewidth=1.6, linestyle=(0, (3, 3)))
        axes.set_xticks([turn / 2, (turn + end) / 2], ["forward", "backward"])
        axes.tick_params(axis="x", length=0)
        axes.set_xlim(0, end)
        gathers = f"{record['ops'].count('all_gather')} gathers, {record['of_ddp']:.2f} × DDP's bytes"
        axes.set_title(name, fontsize=20, pad=38)
        say(axes, 0, 1.06 * top, gathers, ha="left")
        say(axes, end / 2, heights[0][0] / 2, "the shards", color=ink_on(colours[0]))
        kept = max(curve["tags"]["unsharded"]) / MIB
        say(axes, 0.98 * end, heights[0][0] + kept + 0.01 * top, f"{kept:.2f} MiB gathered", ha="right", va="bottom")
    panels[0].set_ylabel("parameters, MiB")
    panels[0].set_ylim(0, top)
    return figure
