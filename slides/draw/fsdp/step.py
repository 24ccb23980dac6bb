"""What a step does to its units, in order, and what memory that takes."""

from __future__ import annotations

from typing import Any

from draw.canvas import MIB, canvas
from draw.fsdp.drawing import bare, box, say
from draw.fsdp.runs import ranks
from matplotlib.figure import Figure

from minifsdp.course.plots.palette import GATHER, INK, LANE_COLOURS, LINE, REDUCE, SOFT, TAG_COLOURS, ink_on


def draw_life() -> Figure:
    """One unit over a step: its memory, and under it what computes and what travels."""
    figure = canvas(5.0)
    memory, lanes = figure.subplots(2, 1, sharex=True, height_ratios=(2.7, 1))
    shard, times = 0.34, [0.0, 0.6, 4.0, 6.1, 8.8, 10.9, 13.0, 14.4]
    _, first, freed, second, _, last, reduced, end = times
    layers = {
        "parameters": [shard] * 8,
        "mean": [0, 0, 0, 0, 0, shard, shard, shard],
        "unsharded": [0, 1, 0, 1, 1, 0, 0, 0],
        "gradients": [0, 0, 0, 0, 1, 1, 0, 0],
    }
    colours = [TAG_COLOURS["gradients" if name == "mean" else name] for name in layers]
    memory.stackplot(times, *layers.values(), colors=colours, step="post", linewidth=0)
    memory.step(
        times, [sum(values) for values in zip(*layers.values(), strict=True)], where="post", color="white", lw=1
    )
    say(memory, 5.05, shard / 2, "the shard: P / N", color="white")
    say(memory, 2.3, 0.84, "parameters: P")
    say(memory, 8.5, 0.84, "parameters: P")
    say(memory, 9.85, 1.84, "gradient: P", color=ink_on(TAG_COLOURS["gradients"]))
    memory.hlines(2 * shard, last, reduced, color="white", linewidth=1)
    say(memory, 13.7, 0.51, "shard", color=ink_on(TAG_COLOURS["gradients"]))
    for x, name in ((first, "pre-forward"), (freed, "post-forward"), (second, "pre-backward"), (last, "post-backward")):
        memory.axvline(x, color=INK, linewidth=1, linestyle=(0, (3, 3)))
        lanes.axvline(x, color=INK, linewidth=1, linestyle=(0, (3, 3)))
        y = 2.45 if name == "post-forward" else 2.76
        memory.text(x + 0.08, y, name, ha="left", va="center", color=SOFT)
    memory.set_ylim(0, 2.95)
    memory.set_yticks([0, shard, 1 + shard, 2 + shard], ["0", "P / N", "P + P / N", "2P + P / N"])
    for start, stop, lane, colour, text in (
        (first, 2.1, 0, GATHER, "gather"),
        (2.1, freed, 1, LANE_COLOURS["compute"], "forward"),
        (second, 7.6, 0, GATHER, "gather"),
        (7.6, last, 1, LANE_COLOURS["compute"], "backward"),
        (last, reduced, 0, REDUCE, "reduce"),
    ):
        box(lanes, (start, lane), stop - start, 0.86, colour)
        say(lanes, (start + stop) / 2, lane + 0.42, text, color=ink_on(colour))
    say(lanes, (freed + second) / 2, 1.42, "other units", color=SOFT)
    lanes.set_yticks([0.43, 1.43], ["link", "compute"])
    lanes.tick_params(axis="y", length=0, labelcolor=INK)
    lanes.set_ylim(-0.1, 2.0)
    lanes.set_xlim(0, end)
    lanes.set_xticks([])
    for axes in (memory, lanes):
        axes.spines["bottom"].set_visible(axes is memory)
    lanes.spines["left"].set_visible(False)
    return figure


def draw_log() -> Figure:
    """What a step did to each of four units, in order, and how long each stayed whole."""
    figure = canvas(4.8)
    axes = figure.subplots()
    log = ranks()[0]["steps"][0]["log"]
    blue = TAG_COLOURS["unsharded"]
    looks: dict[str, dict[str, Any]] = {
        "gather": {"facecolor": GATHER},
        "free": {"edgecolor": blue, "linewidth": 2.4},
        "reduce": {"facecolor": REDUCE},
    }

    def event(x: float, y: float, verb: str) -> None:
        box(axes, (x + 0.08, y - 0.34), 0.84, 0.68, "white", **looks[verb])
        say(axes, x + 0.5, y, verb[0].upper(), color={"gather": ink_on(GATHER), "reduce": "white"}.get(verb, INK))

    since: dict[int, int] = {}
    for at, (verb, unit) in enumerate(log):
        if verb == "gather":
            since[unit] = at
        if verb == "free":
            box(axes, (since[unit] + 0.5, 3.28 - unit), at - since[unit], 0.24, blue)
            event(since[unit], 3.4 - unit, "gather")
        event(at, 3.4 - unit, verb)
    for unit, name in enumerate(("root", "block 0", "block 1", "block 2")):
        say(axes, -0.3, 3.4 - unit, name, ha="right")
        axes.axhline(2.9 - unit, color=LINE, linewidth=0.8)
    turn = log.index(("free", 3)) + 1
    axes.vlines(turn, -0.1, 4.3, color=INK, linewidth=1.2, linestyle=(0, (3, 3)))
    say(axes, turn - 0.2, 4.2, "forward", ha="right", color=SOFT)
    say(axes, turn + 0.2, 4.2, "backward", ha="left", color=SOFT)
    for x, verb, text in ((0, "gather", "all-gather"), (5.0, "free", "free"), (8.0, "reduce", "reduce-scatter")):
        event(x, -0.71, verb)
        say(axes, x + 1.2, -0.71, text, ha="left")
    box(axes, (14.3, -0.83), 1.1, 0.24, blue)
    say(axes, 15.6, -0.71, "whole", ha="left")
    bare(axes, (-2.4, len(log) + 1.2), (-1.1, 4.45))
    return figure


def draw_strategies() -> Figure:
    """Parameters on a rank over a step, under both strategies."""
    figure = canvas(4.9)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, name, record in zip(panels, ("FULL_SHARD", "SHARD_GRAD_OP"), ranks()[0]["steps"], strict=True):
        curve = record["curve"]
        heights = [[value / MIB for value in curve["tags"][tag]] for tag in ("parameters", "unsharded")]
        colours = [TAG_COLOURS["parameters"], TAG_COLOURS["unsharded"]]
        axes.stackplot(range(len(heights[0])), *heights, colors=colours, step="post", linewidth=0)
        (turn, _), (end, _) = curve["marks"]
        axes.axvline(turn, color=INK, linewidth=1, linestyle=(0, (3, 3)))
        axes.set_xticks([turn / 2, (turn + end) / 2], ["forward", "backward"])
        axes.tick_params(axis="x", length=0)
        axes.set_xlim(0, end)
        ops = record["ops"]
        sent = f"{ops.count('all_gather')} gathers, {ops.count('reduce_scatter')} reductions"
        axes.set_title(f"{name}: {record['of_ddp']:.2f} × DDP\n{sent}", pad=12)
        say(axes, 0.02 * end, heights[0][0] / 2, "the shards", color="white", ha="left")
        kept = max(curve["tags"]["unsharded"]) / MIB
        say(axes, 0.98 * end, heights[0][0] + kept, f"{kept:.2f} MiB gathered", ha="right", va="bottom")
    panels[0].set_ylabel("parameters, MiB")
    panels[0].set_ylim(0, 2.95)
    return figure
