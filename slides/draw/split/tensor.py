"""What tensor parallelism costs and saves: activations by the papers' formula, throughput over t as measured."""

from __future__ import annotations

from draw.canvas import canvas
from draw.fsdp.drawing import say
from matplotlib.figure import Figure

from minifsdp.instruments.plots.palette import (
    INK,
    LINE,
    SERIES_COLOURS,
    SOFT,
    STRATEGY_COLOURS,
    TAG_COLOURS,
    as_text,
    ink_on,
)

# Bytes of a block's activations, over s b h: arXiv 2205.05198, equations 2 and 4, without attention's scores
BLOCK = 34
REPLICATED = {"tp": 10, "tp-sp": 4, "tp-sp-regather": 0}
ON_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 2}
WIDTHS = 1024, 4096, 8192
SPEEDS = {  # tokens/s on each GPU, 3 B parameters, 8 H100 a node: raw data of the Ultra-Scale Playbook
    "alone": {2: 13_923, 4: 12_421, 8: 10_903, 16: 6_246, 32: 2_146},
    "with sequence\nparallelism": {2: 14_167, 4: 13_460, 8: 10_889, 16: 6_160, 32: 3_610},
}


def draw_activations() -> Figure:
    """Bytes of a block's activations over s b h, for some t, on three rungs."""
    figure = canvas(3.85)
    axes = figure.subplots()
    yellow, grey = TAG_COLOURS["activations"], STRATEGY_COLOURS["DDP"]
    ticks, names = [], []
    for place, t in enumerate((1, 2, 4, 8)):
        for side, whole in zip((-0.3, 0, 0.3), REPLICATED.values(), strict=True):
            cut = (BLOCK - whole) / t
            axes.bar(place + side, whole, 0.28, color=grey)
            axes.bar(place + side, cut, 0.28, bottom=whole, color=yellow)
            say(axes, place + side, whole + cut + 1.3, f"{whole + cut:.3g}")
        ticks.append(place)
        names.append(f"t = {t}")
    axes.set_xticks(ticks, names)
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, 39)
    axes.set_ylabel("bytes of activations\nper block / (s b h)")
    for line, (name, whole) in enumerate(REPLICATED.items()):
        side, share = ("left", "middle", "right")[line], f"{BLOCK - whole} / t"
        says = f"{side}: {name}, {f'{whole} + {share}' if whole else share}"
        say(axes, 1.62, 37 - 4.2 * line, says, ha="left")
    say(axes, 1.66, 23.6, " replicated ", ha="left", color=ink_on(grey), bbox={"facecolor": grey, "lw": 0})
    say(axes, 2.52, 23.6, " sharded ", ha="left", color=ink_on(yellow), bbox={"facecolor": yellow, "lw": 0})
    axes.set_xlim(-0.55, 3.6)
    return figure


def sent_by_fsdp(width: int) -> int:
    """Elements of a block's parameters that a rank sends and gets in a step, times (t - 1) / t."""
    return 3 * (12 * width**2 + 13 * width)


def even_tokens(width: int) -> int:
    """Tokens in a step at which a block's activations and its parameters are as much to send."""
    return round(sent_by_fsdp(width) / (8 * width))


def beyond_weights() -> int:
    """Tokens above 4.5 h at which both send as much, because a block has biases and norms, too: at any width."""
    (tokens,) = {round(even_tokens(width) - 4.5 * width) for width in WIDTHS}
    return tokens


def draw_traffic() -> Figure:
    """What tensor parallelism sends over the tokens of a step, relative to FSDP: both send as much at a dot."""
    figure = canvas(3.7)
    axes = figure.subplots()
    most, top = 44_000, 2.0
    for width, colour in zip(WIDTHS, SERIES_COLOURS, strict=False):
        even = even_tokens(width)
        end = min(most, top * even)
        axes.plot([0, end], [0, end / even], color=colour, lw=3)
        axes.plot([even], [1], "o", color=colour, markersize=11)
        look = {"color": as_text(colour), "fontweight": "bold", "ha": "left"}
        say(axes, end + 600, end / even, f"width {width:,}", **look)
        say(axes, even + 600, 0.87, f"{even:,} tokens", **look)
    axes.axhline(1, color=STRATEGY_COLOURS["FSDP"], linestyle="--", zorder=0)
    say(axes, 10_500, 1.13, "FSDP", color=STRATEGY_COLOURS["FSDP"], fontweight="bold")
    axes.set(xlim=(0, 53_000), ylim=(0, 2.1), yticks=[0, 1, 2])
    axes.set_xticks(range(0, most, 10_000), [f"{each:,}" for each in range(0, most, 10_000)])
    axes.set_xlabel("tokens of a step, b s")
    axes.set_ylabel("elements sent,\nmultiples of FSDP's")
    return figure


def draw_node() -> Figure:
    """Throughput over the number of tensor-parallel ranks, and where a node ends."""
    figure = canvas(4.05)
    axes = figure.subplots()
    axes.axvspan(1.6, 11.3, color=LINE, alpha=0.45, lw=0)
    for (name, points), colour in zip(SPEEDS.items(), SERIES_COLOURS, strict=False):
        axes.plot(list(points), list(points.values()), "o-", color=colour)
        look = {"color": as_text(colour), "fontweight": "bold", "ha": "left"}
        say(axes, 34.5, points[32] + (-300 if name == "alone" else 300), name, bbox=ON_WHITE, **look)
    say(axes, 1.75, 2600, "inside a host: NVLink", ha="left", color=INK)
    say(axes, 11.9, 14200, "across hosts", ha="left", color=SOFT)
    say(axes, 7.6, 9700, f"{SPEEDS['alone'][8]:,}", ha="right")
    say(axes, 16.9, 7300, f"{SPEEDS['alone'][16]:,}", ha="left")
    axes.set_xscale("log", base=2)
    axes.set_xticks([2, 4, 8, 16, 32], ["2", "4", "8", "16", "32"])
    axes.set_xlim(1.6, 90)
    axes.set_ylim(0, 15800)
    axes.set_yticks([0, 5000, 10000, 15000], ["0", "5,000", "10,000", "15,000"])
    axes.set_xlabel("tensor-parallel ranks t")
    axes.set_ylabel("tokens/s on each GPU")
    axes.grid(axis="y")
    return figure
