"""A unit whose parameters stay themselves, over a step: the buffers between its pieces and whole parameters."""

from __future__ import annotations

from draw.canvas import canvas
from draw.fsdp.drawing import box, say
from matplotlib.figure import Figure

from minifsdp.course.plots.palette import BLACK, GATHER, INK, LANE_COLOURS, REDUCE, SOFT, TAG_COLOURS, as_text, ink_on

SHARD = 0.27
FIRST, OUT, READY, FREED = (
    0.4,
    3.0,
    3.6,
    5.9,
)  # forward: the gather begins, is over, is copied out, and is of no more use
SECOND, OUT_2, READY_2, LAST = 9.6, 12.2, 12.8, 15.6
PACKED, REDUCED, END = 16.3, 19.9, 20.6


def draw_life() -> Figure:
    """Memory of one unit, and under it what travels, what is copied and what computes."""
    figure = canvas(5.0)
    memory, lanes = figure.subplots(2, 1, sharex=True, height_ratios=(2.3, 1.25))
    backward = [READY_2 + part * (LAST - READY_2) / 6 for part in range(6)]  # a gradient per parameter
    times = [0.0, FIRST, OUT, READY, FREED, SECOND, OUT_2, READY_2, *backward[1:], LAST, PACKED, REDUCED, END]
    at = {name: index for index, name in enumerate(times)}
    layers = {
        "parameters": [SHARD] * len(times),
        "mean": [0.0] * len(times),
        "unsharded": [0.0] * len(times),
        "communication": [0.0] * len(times),
        "gradients": [0.0] * len(times),
        "packed": [0.0] * len(times),
    }

    def fill(name: str, start: float, end: float, height: float = 1.0) -> None:
        for index in range(at[start], at[end]):
            layers[name][index] = height

    fill("communication", FIRST, READY)
    fill("unsharded", OUT, FREED)
    fill("communication", SECOND, READY_2)
    fill("unsharded", OUT_2, LAST)
    for number, start in enumerate(backward[1:], 1):
        fill("gradients", start, PACKED, number / 6)
    fill("gradients", LAST, PACKED)
    fill("packed", LAST, REDUCED)
    fill("mean", REDUCED, END, SHARD)
    layers["mean"][-1] = SHARD
    tags = {"mean": "gradients", "packed": "gradients"}
    colours = [TAG_COLOURS[tags.get(name, name)] for name in layers]
    memory.stackplot(times, *layers.values(), colors=colours, step="post", linewidth=0)
    heights = [sum(values) for values in zip(*layers.values(), strict=True)]
    memory.step(times, heights, where="post", color="white", lw=1)
    memory.hlines(1 + SHARD, LAST, PACKED, color="white", linewidth=1.4)
    say(memory, (FREED + SECOND) / 2, SHARD / 2, "its pieces", color=ink_on(colours[0]))
    for start, out, end in ((FIRST, OUT, FREED), (SECOND, OUT_2, LAST)):
        say(memory, (start + out) / 2, 0.75, "in rank\norder", color=BLACK)
        say(memory, (out + end) / 2, 0.75, "whole", color=BLACK)
    say(memory, PACKED + 1.5, 0.75, "packed", color=ink_on(colours[4]))
    say(memory, 12.95, 2.3, "gradients", ha="left", color=as_text(TAG_COLOURS["gradients"]))
    for x, name in ((FIRST, "pre-forward"), (FREED, "post-forward"), (SECOND, "pre-backward"), (LAST, "post-backward")):
        for axes in (memory, lanes):
            axes.axvline(x, color=INK, linewidth=1.4, linestyle=(0, (3, 3)))
        say(memory, x + 0.1, 2.6, name, ha="left")
    memory.set_ylim(0, 2.8)
    memory.set_yticks([0, SHARD, 1 + SHARD, 2 + SHARD], ["0", "P/N", "P + P/N", "2P + P/N"])
    compute, copy = LANE_COLOURS["compute"], LANE_COLOURS["copy"]
    for start, stop, lane, colour, text in (
        (FIRST + 0.25, OUT, 0, GATHER, "gather"),
        (READY, FREED, 2, compute, "forward"),
        (SECOND + 0.25, OUT_2, 0, GATHER, "gather"),
        (READY_2, LAST, 2, compute, "backward"),
        (PACKED, REDUCED, 0, REDUCE, "reduce"),
        (FIRST, FIRST + 0.25, 1, copy, ""),
        (OUT, READY, 1, copy, ""),
        (SECOND, SECOND + 0.25, 1, copy, ""),
        (OUT_2, READY_2, 1, copy, ""),
        (LAST, PACKED, 1, copy, ""),
    ):
        box(lanes, (start, lane), stop - start, 0.9, colour)
        say(lanes, (start + stop) / 2, lane + 0.43, text, color=ink_on(colour))
    for x, text, side in ((FIRST + 0.35, "in", "left"), (READY + 0.1, "out", "left"), (SECOND + 0.35, "in", "left")):
        say(lanes, x, 1.43, text, ha=side, color=SOFT)
    say(lanes, READY_2 + 0.1, 1.43, "out", ha="left", color=SOFT)
    say(lanes, PACKED + 0.1, 1.43, "chunk, cat", ha="left", color=SOFT)
    lanes.set_yticks([0.43, 1.43, 2.43], ["link", "copies", "compute"])
    lanes.tick_params(axis="y", length=0, labelcolor=INK)
    lanes.set_ylim(-0.05, 3.0)
    lanes.set_xlim(0, END)
    lanes.set_xticks([])
    for axes in (memory, lanes):
        axes.spines["bottom"].set_visible(axes is memory)
    lanes.spines["left"].set_visible(False)
    return figure
