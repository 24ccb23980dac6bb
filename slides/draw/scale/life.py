"""A per-parameter unit over a step, and what `reshard_after_forward` keeps between forward and backward."""

from __future__ import annotations

from draw.canvas import canvas
from draw.fsdp.drawing import box, say
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minifsdp.instruments.plots.palette import (
    BLACK,
    GATHER,
    INK,
    LANE_COLOURS,
    REDUCE,
    SOFT,
    TAG_COLOURS,
    as_text,
    ink_on,
)


def draw_life() -> Figure:
    """One unit over a step: its memory, and under it what computes and what travels."""
    figure = canvas(4.6)
    memory, lanes = figure.subplots(2, 1, sharex=True, height_ratios=(2.6, 1))
    piece = 0.42
    times = [0.0, 0.3, 2.3, 2.9, 4.9, 6.9, 8.9, 9.5, 10.1, 12.7, 13.4, 17.2, 17.6]
    steps = {  # from each time on: rows, whole, leaf gradients, packed gradients, mean
        "rows": [0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0],
        "whole": [0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0],
        "leaves": [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0],
        "packed": [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0],
        "mean": [0, 0, 0, 0, 0, 0, 0, 0, 0, piece, piece, piece, piece],
    }
    layers = {"pieces": [piece] * len(times), **steps}
    tags = ("parameters", "communication", "unsharded", "gradients", "gradients", "gradients")
    colours = [TAG_COLOURS[tag] for tag in tags]
    order = ["pieces", "mean", "whole", "rows", "leaves", "packed"]
    shades = dict(zip(layers, colours, strict=True))
    memory.stackplot(
        times, *(layers[name] for name in order), colors=[shades[name] for name in order], step="post", linewidth=0
    )
    running = [0.0] * len(times)
    for name in order:
        running = [low + high for low, high in zip(running, layers[name], strict=True)]
        memory.step(times, running, where="post", color="white", lw=1)
    say(memory, 1.3, 0.5 + piece, "rows", color=ink_on(shades["rows"]))
    say(memory, 3.6, 0.5 + piece, "unsharded", color=BLACK)
    say(memory, 5.9, piece / 2, "shards", color=ink_on(shades["pieces"]))
    say(memory, 7.9, 0.5 + piece, "rows", color=ink_on(shades["rows"]))
    say(memory, 11.1, 0.5 + piece, "unsharded", color=BLACK)
    say(memory, 11.4, 1.5 + piece, "gradients", color=ink_on(shades["leaves"]))
    say(memory, 15.3, 1.5 * piece, "gradient shard", color=ink_on(shades["mean"]))
    say(memory, 15.3, 0.5 + 2 * piece, "packed", color=ink_on(shades["packed"]))
    for x, text in ((2.6, "copy-\nout"), (9.2, "copy-\nout"), (13.05, "pack")):
        say(memory, x, 3.28, text, color=as_text(LANE_COLOURS["copy"]))
    memory.set_ylim(0, 3.7)
    levels = {"0": 0, "P/N": piece, "P + P/N": 1 + piece, "2P + P/N": 2 + piece, "2P + 2P/N": 2 + 2 * piece}
    memory.set_yticks(list(levels.values()), list(levels))
    for start, stop, lane, colour, text in (
        (0.3, 2.3, 0, GATHER, "gather"),
        (2.3, 2.9, 1, LANE_COLOURS["copy"], ""),
        (2.9, 4.9, 1, LANE_COLOURS["compute"], "forward"),
        (6.9, 8.9, 0, GATHER, "gather"),
        (8.9, 9.5, 1, LANE_COLOURS["copy"], ""),
        (9.5, 12.7, 1, LANE_COLOURS["compute"], "backward"),
        (12.7, 13.4, 1, LANE_COLOURS["copy"], ""),
        (13.4, 17.2, 0, REDUCE, "reduce-scatter"),
    ):
        box(lanes, (start, lane), stop - start, 0.9, colour)
        say(lanes, (start + stop) / 2, lane + 0.43, text, color=ink_on(colour))
    say(lanes, 5.9, 0.43, "other\nunits", color=SOFT)
    lanes.set_yticks([0.43, 1.43], ["link", "compute"])
    lanes.tick_params(axis="y", length=0, labelcolor=INK)
    lanes.set_ylim(-0.05, 2.0)
    lanes.set_xlim(0, 17.6)
    lanes.set_xticks([])
    for axes in (memory, lanes):
        axes.spines["bottom"].set_visible(axes is memory)
    lanes.spines["left"].set_visible(False)
    return figure


def draw_reshard() -> Figure:
    """On 64 ranks in hosts of 8: parameters kept from forward to backward, and where backward gathers from."""
    figure = canvas(3.7)
    axes = figure.subplots()
    ranks, per_host = 64, 8
    choices = {
        "True": (0, "backward gathers from 64 ranks"),
        "8": (1 / per_host, "from 8, inside the host"),
        "False": (1, "backward gathers nothing"),
    }
    for place, (more, says) in enumerate(choices.values()):
        whole = TAG_COLOURS["unsharded"]
        axes.barh(place, 1 / ranks, 0.6, color=TAG_COLOURS["parameters"])
        axes.barh(place, more, 0.6, left=1 / ranks, color=whole)
        says = f"{says}: keeps {1 / ranks + more:.3f}"
        if more == 1:
            say(axes, 0.5, place, says, color=ink_on(whole))
        else:
            say(axes, 1 / ranks + more + 0.01, place, says, ha="left")
    axes.set_title("reshard_after_forward", fontfamily="DejaVu Sans Mono")
    patches = {"own shard": "parameters", "kept in addition": "unsharded"}
    handles = [Patch(color=TAG_COLOURS[tag], label=text) for text, tag in patches.items()]
    figure.legend(handles=handles, loc="upper right", ncols=2, handlelength=1.0, columnspacing=1)
    axes.set_yticks(range(len(choices)), list(choices))
    axes.invert_yaxis()
    axes.set_xticks([0, 0.5, 1])
    axes.set_xlabel("fraction of a unit that a rank keeps from forward to backward")
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_xlim(0, 1.05)
    return figure
