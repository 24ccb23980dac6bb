"""What a rank holds on each rung of the ladder, and how many rows fit beside it."""

from __future__ import annotations

from typing import Any

from draw.canvas import MIB, canvas
from draw.fsdp.drawing import named, say
from draw.fsdp.runs import LAB, ROWS, ranks
from draw.peaks import held
from matplotlib.figure import Figure

from minifsdp.cost.data_parallel import Setting
from minifsdp.course.ladder.measure import Settings
from minifsdp.course.ladder.rungs import sizes_of
from minifsdp.instruments.plots.palette import INK, SOFT, STRATEGY_COLOURS, TAG_COLOURS, as_text, ink_on

BUDGET = 16 * MIB


def most_rows(peaks: dict[int, int]) -> int:
    """The largest number of rows that fits; one more was tried, and does not."""
    return max(count for count, size in peaks.items() if size <= BUDGET)


def ladder_units() -> dict[str, int]:
    """Bytes of the root and of a block on the ladder, which has 2 ranks."""
    root, block, *_ = sizes_of(Settings().model()).units
    return {"root": Setting(2).padded(sum(root)), "block": Setting(2).padded(sum(block))}


def draw_rungs() -> Figure:
    """What a rank holds under FULL_SHARD between steps and at the peak of one, piece by piece."""
    figure = canvas(4.0)
    axes = figure.subplots()
    rest, peak = held()["fsdp"]
    root, block = (ladder_units()[name] for name in ("root", "block"))
    assert peak["unsharded"] == root + block
    words = {"parameters": "shards"}
    for place, sizes in enumerate((rest, peak)):
        left = 0.0
        for tag in ("parameters", "optimizer", "unsharded", "gradients", "activations", "communication"):
            pieces = {"root": root, "block": block} if tag == "unsharded" and sizes[tag] else {tag: sizes[tag]}
            for name, size in pieces.items():
                width, colour = size / MIB, TAG_COLOURS[tag]
                axes.barh(place, width, 0.6, left, color=colour, edgecolor="white", linewidth=1.2)
                if width > 3:
                    say(axes, left + width / 2, place, f"{words.get(name, name)}\n{width:.1f}", color=ink_on(colour))
                elif width > 0.05:
                    at = left + width / 2
                    low = {"root": 0.42, "block": 0.72, "gradients": 0.42}.get(name, 0.42)
                    axes.plot([at, at], [place + 0.3, place + low], color=SOFT, linewidth=1.4)
                    text, side = f"{name} {width:.1f}", "right" if name in ("root", "block") else "left"
                    say(axes, at, place + low + 0.1, text, ha=side, color=INK)
                left += width
        say(axes, left + 0.4, place, f"{left:.1f} MiB", ha="left", fontweight="bold")
    named(axes, ["between\nsteps", "at the\npeak"])
    axes.set(xlim=(0, 31), ylim=(1.95, -0.4), xticks=[])
    axes.spines["bottom"].set_visible(False)
    figure.supxlabel("MiB per rank", color=SOFT, fontsize=18)
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
        axes.text(fits + 0.2, 1.2, f"{fits} samples", **look)
    axes.axhline(BUDGET / MIB, color=INK, linewidth=2, linestyle=(0, (4, 3)))
    axes.text(0.3, BUDGET / MIB + 0.4, f"budget: {BUDGET // MIB} MiB", va="bottom")
    axes.text(0.3, 24.6, f"GPT of {LAB.layers} blocks, 2 ranks, measured", color=SOFT, va="center")
    axes.set_xlim(0, 24.5)
    axes.set_ylim(0, 26)
    axes.set_xlabel("samples per rank")
    axes.set_ylabel("peak per rank, MiB")
    return figure
