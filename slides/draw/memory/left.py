"""What sharding leaves whole: a rank's memory at the peak of a step, under DDP and FSDP."""

from __future__ import annotations

from draw.canvas import MIB, canvas
from draw.peaks import held
from matplotlib.figure import Figure

from minifsdp.instruments.plots.drawing import tag_patches
from minifsdp.instruments.plots.palette import INK, SOFT, TAG_COLOURS, ink_on


def draw_left() -> Figure:
    """Bytes by tag at the peak; the ledger's run of the ladder's model."""
    figure = canvas(3.7)
    axes = figure.subplots()
    shown = [tag for tag in TAG_COLOURS if any(peak[tag] for _, peak in held().values())]
    for place, (_, peak) in enumerate(held().values()):
        left = 0.0
        for tag in shown:
            size = peak[tag] / MIB
            axes.barh(place, size, 0.6, left, color=TAG_COLOURS[tag], edgecolor="white", linewidth=1)
            if size > 2:
                axes.text(
                    left + size / 2, place, f"{size:.1f}", ha="center", va="center", color=ink_on(TAG_COLOURS[tag])
                )
            left += size
        axes.text(left + 0.5, place, f"{left:.1f}", va="center", fontweight="bold")
    shard, unit, gradients = (peak[tag] / MIB for tag in ("parameters", "unsharded", "gradients"))
    axes.plot([shard + 0.1, shard + unit + gradients - 0.1], [1.4, 1.4], color=INK, clip_on=False)
    says = f"{unit:.1f} MiB of unsharded root and block, {gradients:.1f} MiB of gradients"
    axes.text(shard, 1.5, says, va="top")
    axes.set_yticks(range(2), [rung.upper() for rung in held()])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set(xlim=(0, 49), ylim=(1.95, -0.45), xticks=[])
    axes.spines["bottom"].set_visible(False)
    figure.legend(handles=tag_patches(shown), loc="outside upper center", ncols=3)
    figure.supxlabel("MiB per rank at the peak of a step", color=SOFT, fontsize=18)
    return figure
