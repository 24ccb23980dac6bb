"""What a rank holds on each rung of the ladder, and how many rows fit beside it."""

from __future__ import annotations

from typing import Any

from draw.canvas import MIB, canvas
from draw.fsdp.drawing import named
from draw.fsdp.runs import LAB, ROWS, ranks
from draw.measured import rungs
from matplotlib.figure import Figure

from minifsdp.course.ladder.closed_form import Setting
from minifsdp.course.ladder.measure import Settings
from minifsdp.course.ladder.rungs import sizes_of
from minifsdp.course.plots.palette import INK, SOFT, STRATEGY_COLOURS, TAG_COLOURS, as_text

BUDGET = 16 * MIB


def most_rows(peaks: dict[int, int]) -> int:
    """The largest number of rows that fits; one more was tried, and does not."""
    return max(count for count, size in peaks.items() if size <= BUDGET)


def ladder_units() -> dict[str, int]:
    """Bytes of the root and of a block on the ladder, which has 2 ranks."""
    root, block, *_ = sizes_of(Settings().model()).units
    return {"root": Setting(2).padded(sum(root)), "block": Setting(2).padded(sum(block))}


def draw_rungs() -> Figure:
    """Bytes of each rung by what they are for: measured, and what the closed form says."""
    figure = canvas(4.2)
    shown = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "fsdp-grad-op": "SHARD_GRAD_OP", "fsdp": "FULL_SHARD"}
    columns = {
        "parameters": ("parameters", "parameters\nat rest"),
        "unsharded_peak": ("unsharded", "gathered\nat the peak"),
        "gradients_peak": ("gradients", "gradients\nat the peak"),
        "optimizer": ("optimizer", "optimizer\nstate"),
    }
    for axes, (key, (tag, title)) in zip(figure.subplots(1, 4, sharex=True, sharey=True), columns.items(), strict=True):
        for place, rung in enumerate(rungs()[name] for name in shown):
            size, predicted = rung["bytes"][key] / MIB, rung["predicted"][key] / MIB
            axes.barh(place, size, 0.64, color=TAG_COLOURS[tag])
            axes.plot(predicted, place, "D", color=INK, markerfacecolor="white", markersize=8, clip_on=False)
            axes.text(max(size, predicted) + 1.6, place, f"{size:.1f}" if size else "0", va="center")
        axes.set_title(title)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.set_xlim(0, 27)
    named(axes, list(shown.values()))
    figure.supxlabel("MiB per rank on 2 ranks, GPT of 6 blocks; diamonds: predicted", color=SOFT, fontsize=18)
    return figure


def draw_batch() -> Figure:
    """Peak of a rank over the rows of its batch, and what fits into a budget."""
    figure = canvas(5.0)
    axes = figure.subplots()
    for name, tried in ranks()[0]["rows"].items():
        colour = STRATEGY_COLOURS[name]
        look: dict[str, Any] = {"color": as_text(colour), "fontweight": "bold"}
        axes.plot(list(tried), [size / MIB for size in tried.values()], "o-", color=colour, linewidth=4, markersize=9)
        axes.text(ROWS[-1] + 0.4, tried[ROWS[-1]] / MIB, name, va="center", **look)
        fits = most_rows(tried)
        axes.vlines(fits, 0, tried[fits] / MIB, color=colour, linewidth=2, linestyle=(0, (4, 3)))
        axes.text(fits + 0.2, 1.2, f"{fits} rows", **look)
    axes.axhline(BUDGET / MIB, color=INK, linewidth=2, linestyle=(0, (4, 3)))
    axes.text(0.3, BUDGET / MIB + 0.4, f"budget: {BUDGET // MIB} MiB", va="bottom")
    axes.text(0.3, 24.6, f"GPT of {LAB.layers} blocks, 2 ranks, measured", color=SOFT, va="center")
    axes.set_xlim(0, 24.5)
    axes.set_ylim(0, 26)
    axes.set_xlabel("rows per rank")
    axes.set_ylabel("peak per rank, MiB")
    return figure
