"""What travels: values in a policy's dtypes, and what a tensor subclass sends."""

from __future__ import annotations

from typing import Any

from draw.canvas import canvas
from draw.fsdp.drawing import bare, box, say
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minifsdp.instruments.plots.palette import DTYPE_COLOURS, GATHER, INK, LINE, REDUCE, SOFT, as_text, ink_on

FP32, BF16 = DTYPE_COLOURS["fp32"], DTYPE_COLOURS["bf16"]
FLOAT8 = LINE


def _arrow(axes: Axes, begin: float, end: float, height: float, text: str, colour: str = INK) -> None:
    """A step from left to right, its name above it."""
    look: Any = {"arrowstyle": "-|>", "color": colour, "linewidth": 2.6, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (end, height), (begin, height), arrowprops=look)
    say(axes, (begin + end) / 2, height + 0.18, text, va="bottom", color=colour, linespacing=1.05)


def _brace(axes: Axes, left: float, right: float, height: float, text: str) -> None:
    look: Any = {"arrowstyle": "|-|,widthA=0.4,widthB=0.4", "color": SOFT, "linewidth": 2, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (left, height), (right, height), arrowprops=look)
    say(axes, (left + right) / 2, height - 0.2, text, va="top", fontfamily="DejaVu Sans Mono")


def draw_dtypes() -> Figure:
    """A unit's values through a step: cast on the way into the gather, and on the way into the reduction."""
    figure = canvas(3.4)
    axes = figure.subplots()
    boxes = (
        (0.0, "parameter\nshards", FP32),
        (6.6, "unsharded", BF16),
        (10.0, "gradients", BF16),
        (19.6, "gradient\nshards", FP32),
    )
    for left, text, colour in boxes:
        box(axes, (left, 1.5), 3.0, 1.0, colour)
        say(axes, left + 1.5, 2.0, text, color=ink_on(colour))
    _arrow(axes, 3.2, 6.4, 2.0, "copy-in casts,\nall-gather", GATHER)
    _arrow(axes, 13.2, 19.4, 2.0, "packing casts,\nreduce-scatter", REDUCE)
    look: Any = {"arrowstyle": "-|>", "color": INK, "linewidth": 2.6, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (8.1, 3.2), (8.1, 2.55), arrowprops=look)
    say(axes, 8.4, 3.5, "outputs:", ha="right")
    say(axes, 8.7, 3.5, "output_dtype", ha="left", fontfamily="DejaVu Sans Mono")
    for middle, dtype, colour in ((4.8, "sent: bf16", BF16), (16.3, "sent: fp32", FP32)):
        fill = {"facecolor": colour, "edgecolor": "none", "pad": 4}
        say(axes, middle, 1.5, dtype, color=ink_on(colour), bbox=fill)
    _brace(axes, 3.4, 12.9, 0.85, "param_dtype")
    _brace(axes, 13.4, 19.2, 0.85, "reduce_dtype")
    _brace(axes, 0.1, 2.9, 0.85, "fp32")
    _brace(axes, 19.7, 22.5, 0.85, "fp32")
    say(axes, 0.1, 3.5, "fp32", ha="left", color=as_text(FP32), fontweight="bold")
    say(axes, 2.2, 3.5, "bf16", ha="left", color=as_text(BF16), fontweight="bold")
    bare(axes, (-0.1, 22.8), (0.0, 3.9))
    return figure


def draw_subclass() -> Figure:
    """A shard of fp32 as float8 and a scale: quantized, gathered, and rebuilt."""
    figure = canvas(3.4)
    axes = figure.subplots()
    box(axes, (0.0, 1.3), 3.4, 1.7, FP32)
    say(axes, 1.7, 2.15, "a shard,\nfp32", color=ink_on(FP32))
    box(axes, (7.4, 1.3), 2.2, 1.0, FLOAT8)
    say(axes, 8.5, 1.8, "float8", color=INK)
    for place in range(4):
        box(axes, (13.2 + 0.85 * place, 1.3), 0.8, 1.0, FLOAT8)
    say(axes, 14.9, 1.02, "from all ranks", color=INK)
    box(axes, (20.2, 1.3), 3.2, 1.0, FLOAT8)
    say(axes, 21.8, 1.8, "the weight", color=INK)
    for left in (7.7, 14.1, 21.0):
        box(axes, (left, 2.45), 1.6, 0.6, FP32)
        say(axes, left + 0.8, 2.75, "scale", color=ink_on(FP32))
    _arrow(axes, 3.6, 7.2, 1.8, "quantize")
    _arrow(axes, 9.8, 13.0, 1.8, "all-gather", GATHER)
    _arrow(axes, 16.8, 20.0, 1.8, "rebuild")
    _brace(axes, 3.6, 9.6, 0.65, "fsdp_pre_all_gather")
    _brace(axes, 13.2, 23.4, 0.65, "fsdp_post_all_gather")
    say(axes, 0.0, 3.4, "4 bytes per element", ha="left", color=SOFT)
    say(axes, 7.4, 3.4, "1 byte per element, and a scale in fp32", ha="left", color=SOFT)
    bare(axes, (-0.1, 23.6), (-0.2, 3.8))
    return figure
