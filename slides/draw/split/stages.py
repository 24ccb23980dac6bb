"""What two of the schedules change: more stages on each rank, and a backward in two halves."""

from __future__ import annotations

from typing import Any

from draw.canvas import canvas
from draw.fsdp.drawing import bare, box, say
from draw.split.lanes import RANKS, UNITS, runs, sent
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minifsdp.instruments.plots.palette import INK, MICRO_BATCH_COLOURS, PALE, RANK_COLOURS, SOFT, ink_on, lighter
from minifsdp.instruments.plots.schedules import TONES

LAYERS = 8
_BRACKET: Any = {"arrowstyle": "|-|,widthA=0.35,widthB=0.35", "color": SOFT, "lw": 2, "shrinkA": 0, "shrinkB": 0}
_ARROW: Any = {"arrowstyle": "-|>", "color": INK, "lw": 2.4, "shrinkA": 0, "shrinkB": 0}


def _wait(axes: Axes, begin: float, end: float, height: float, text: str) -> None:
    axes.annotate("", (begin, height), (end, height), arrowprops=_BRACKET)
    say(axes, (begin + end) / 2, height + 0.22, text, va="bottom")


def _stages(axes: Axes, bottom: float, name: str, each: int) -> None:
    """The layers of a forward in order, in their ranks' colours; an arrow where the next one is on another rank."""
    run, per_stage = runs()[name], LAYERS // (RANKS * each)
    ranks = [layer // per_stage % RANKS for layer in range(LAYERS)]
    for layer, rank in enumerate(ranks):
        colour, width, place = RANK_COLOURS[rank], 2 - 0.4 / per_stage, layer % per_stage
        left = 2 * (layer - place) + width * place
        box(axes, (left, bottom), width, 1.0, colour)
        say(axes, left + width / 2, bottom + 0.5, f"rank {rank}", color=ink_on(colour))
        if layer and ranks[layer - 1] != rank:
            axes.annotate("", (2 * layer - 0.02, bottom + 0.5), (2 * layer - 0.38, bottom + 0.5), arrowprops=_ARROW)
    last = ranks.index(RANKS - 1)
    _wait(axes, 0.0, 2 * last - 0.4, bottom + 1.25, f"rank {RANKS - 1} waits for {last} layers")
    stages = "1 stage per rank" if each == 1 else f"{each} stages per rank"
    say(axes, 0.0, bottom + 2.5, f"{stages}: bubble {run.bubble:.0%}, {sent(run)} messages".replace("%", " %"),
        ha="left", fontweight="bold")  # fmt: skip


def draw_interleaved() -> Figure:
    """One and two stages on each rank: how long the last rank waits, and how often activations change ranks."""
    figure = canvas(4.7)
    axes = figure.subplots()
    _stages(axes, 3.9, "1F1B", 1)
    _stages(axes, 0.0, "interleaved", 2)
    says = "boxes: the layers, in the order of a forward; arrows: messages to another rank"
    say(axes, 0.0, -0.65, says, ha="left", color=SOFT)
    bare(axes, (-0.1, 15.8), (-1.0, 6.7))
    return figure


def _backward(axes: Axes, left: float, name: str, split: bool) -> None:
    """One micro-batch's backward over all ranks: the stage before starts after I and W, or after I alone."""
    base = MICRO_BATCH_COLOURS[0]
    hue, i, w = {kind: lighter(base, TONES[kind]) for kind in "IW"}, UNITS["I"], UNITS["W"]
    step = i if split else i + w
    for y, rank in enumerate(reversed(range(RANKS))):
        begin = left + y * step
        box(axes, (left, y - 0.4), RANKS * (i + w), 0.8, PALE)
        for kind, at, wide in (("I", begin, i), ("W", begin + i, w)):
            box(axes, (at, y - 0.4), wide, 0.8, hue[kind])
            say(axes, at + wide / 2, y, kind, color=ink_on(hue[kind]), fontweight="bold")
        if rank:
            axes.annotate("", (begin + step, y + 0.66), (begin + step, y + 0.34), arrowprops=_ARROW)
        say(axes, left - 0.15, y, f"rank {rank}", ha="right")
    waits = (RANKS - 1) * step
    _wait(axes, left, left + waits, RANKS - 0.3, f"rank 0 waits {waits:g} units")
    say(
        axes,
        left,
        RANKS + 0.95,
        f"{name}: bubble {runs()[name].bubble:.0%}".replace("%", " %"),
        ha="left",
        fontweight="bold",
    )


def draw_zero_bubble() -> Figure:
    """The way of a gradient back to rank 0, with whole backwards and with the first halves alone."""
    figure = canvas(3.7)
    axes = figure.subplots()
    _backward(axes, 0.0, "1F1B", split=False)
    _backward(axes, 10.2, "ZB-H1", split=True)
    bare(axes, (-1.4, 18.3), (-0.5, RANKS + 1.3))
    return figure
