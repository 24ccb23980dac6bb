"""What ZeRO's stages divide by the ranks, and what is left on each."""

from __future__ import annotations

from draw.canvas import GB, canvas
from draw.memory.state import DEVICE, PSI, STATE
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from minifsdp.answers.lab00 import training_bytes, zero_stages

from minifsdp.instruments.plots.drawing import tag_patches
from minifsdp.instruments.plots.palette import (
    COLLECTIVE_COLOURS,
    INK,
    LINE,
    PALE,
    SOFT,
    STRATEGY_COLOURS,
    TAG_COLOURS,
    as_text,
    ink_on,
)

OF_WHAT = f"model state of {PSI / 1e9:.1f} billion parameters, mixed precision, Adam"
RANKS = 64  # of the ZeRO paper's figure 1
STAGES = {  # how many of the three are divided by the ranks: the last ones
    "replicated": 0,
    "stage 1": 1,
    "stage 2": 2,
    "stage 3": 3,
}


def draw_partitions(stage: str) -> Figure:
    """What each of four ranks holds of the three; what it does not, in outline."""
    figure = canvas(4.9)
    axes = figure.subplots()
    ranks, heights = 4, {"parameters": 2, "gradients": 2, "optimizer": 12}
    divided = STATE[len(STATE) - STAGES[stage] :]
    for rank in range(ranks):
        bottom = 0.0
        for tag in STATE:
            height = heights[tag]
            _stripes(axes, rank * 1.25, bottom, height, ranks, rank if tag in divided else None, TAG_COLOURS[tag])
            bottom += height + 0.5
        held = zero_stages(PSI, ranks)[stage] / GB
        axes.text(rank * 1.25 + 0.5, -0.4, f"rank {rank}: {held:g} GB", ha="center", va="top")
    middles = {"parameters": 1.0, "gradients": 3.5, "optimizer": 11.0}
    for tag, middle in middles.items():
        axes.text(-0.1, middle, tag, ha="right", va="center", color=as_text(TAG_COLOURS[tag]))
    axes.text(2.4, -2.3, OF_WHAT, ha="center", va="top", color=SOFT)
    axes.set_xlim(-0.95, 4.9)
    axes.set_ylim(-3.6, 17.2)
    axes.axis("off")
    return figure


def _stripes(axes: Axes, left: float, bottom: float, height: float, parts: int, mine: int | None, colour: str) -> None:
    """`parts` columns, of which one is held, or all."""
    for part in range(parts):
        held = mine is None or part == mine
        face, edge = (colour, "white") if held else (PALE, LINE)
        box = Rectangle((left + part / parts, bottom), 1 / parts, height, facecolor=face, edgecolor=edge, linewidth=1)
        axes.add_patch(box)


def draw_stages() -> Figure:
    """Bytes on each rank under each stage."""
    figure = canvas(4.7)
    axes = figure.subplots()
    mixed = training_bytes([PSI], 2, "adam", master_copy=True)
    for place, count in enumerate(STAGES.values()):
        bottom, divided = 0.0, STATE[len(STATE) - count :]
        for tag in STATE:
            height = mixed[tag] / (RANKS if tag in divided else 1) / GB
            axes.bar(place, height, 0.6, bottom, color=TAG_COLOURS[tag])
            bottom += height
        axes.text(place, bottom + 1.5, f"{bottom:.1f} GB", ha="center", va="bottom", fontsize=24)
    axes.axhline(DEVICE / GB, color=INK, linewidth=1.4, linestyle=(0, (4, 3)))
    axes.text(3.4, DEVICE / GB + 1, f"a device of {DEVICE / GB:.0f} GB", ha="right", va="bottom")
    axes.set_xticks(range(len(STAGES)), STAGES)
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, 140)
    axes.set_xlabel(OF_WHAT)
    axes.set_ylabel(f"GB per rank on {RANKS} ranks")
    axes.legend(handles=tag_patches(reversed(STATE)), loc="upper right")
    return figure


def draw_floor() -> Figure:
    """Bytes on each rank over the number of ranks."""
    figure = canvas(4.7)
    axes = figure.subplots()
    counts = [2**power for power in range(11)]
    names = {"replicated": "DDP", "stage 1": "ZeRO-1", "stage 2": "ZeRO-2", "stage 3": "FSDP"}
    for stage, name in names.items():
        colour = STRATEGY_COLOURS[name]
        sizes = [zero_stages(PSI, count)[stage] / GB for count in counts]
        axes.plot(counts, sizes, color=colour)
        nudge = {"stage 1": 1.12, "stage 2": 0.9}.get(stage, 1.0)
        axes.text(counts[-1] * 1.1, sizes[-1] * nudge, stage, va="center", color=as_text(colour, 7.0))
    axes.axhline(DEVICE / GB, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.text(420, DEVICE / GB * 0.9, f"a device: {DEVICE / GB:.0f} GB", va="top", ha="center")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    ticks = [0.1, 1, 10, 100]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(1, 3000)
    axes.set_xlabel(f"ranks; {PSI / 1e9:.1f} billion parameters, mixed precision, Adam")
    axes.set_ylabel("GB of model state\nper rank")
    return figure


def draw_sent() -> Figure:
    """Elements that a rank sends in a step under each stage, collective by collective."""
    figure = canvas(4.9)
    axes = figure.subplots()
    scatter, after = ("reduce-scatter", "gradients"), ("all-gather", "updated parameters")
    sent = {
        "DDP": [("all-reduce", "gradients: a reduce-scatter, an all-gather")],
        "stage 1": [scatter, after],
        "stage 2": [scatter, after],
        "stage 3": [("all-gather", "parameters: forward"), ("all-gather", "again: backward"), scatter],
    }
    for place, (stage, messages) in enumerate(sent.items()):
        left = 0
        for op, what in messages:
            colour, width = COLLECTIVE_COLOURS[op], 2 if op == "all-reduce" else 1
            axes.barh(-place, width, 0.74, left, color=colour, edgecolor="white", linewidth=2)
            axes.text(left + width / 2, -place, f"{op}\n{what}", ha="center", va="center", color=ink_on(colour))
            left += width
        axes.text(left + 0.04, -place, f"{left} Ψ", va="center", fontsize=24, fontweight="bold")
        axes.text(-0.04, -place, stage, ha="right", va="center")
    axes.set_xlim(-0.45, 3.3)
    axes.set_yticks([])
    axes.set_xticks(range(4), ["0", "Ψ", "2 Ψ", "3 Ψ"])
    axes.set_xlabel("elements sent per rank in a step, times (N - 1) / N in a ring; Ψ: model size")
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_bounds(0, 3)
    return figure
