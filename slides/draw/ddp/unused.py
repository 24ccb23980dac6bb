"""Two ranks' buckets in a backward that reaches no use of one parameter on one of them."""

from __future__ import annotations

from typing import Any

from draw.canvas import canvas
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minifsdp.instruments.plots.palette import INK, OUTCOME_COLOURS, SOFT, TAG_COLOURS, UNIT_COLOURS, as_text, ink_on

BUCKETS = ("w5", "w4"), ("w3", "w2"), ("w1", "w0")  # in the order of backward
UNUSED = 1, "w2"  # rank, parameter
FATES = (
    ("reduced", "right"),
    ("rank 0 waits for rank 1,\nwhere it is never full", "wrong"),
    ("full, but waits\nfor bucket 1", "wrong"),
)


def draw_unused() -> Figure:
    """Buckets as columns, ranks above and below, and between them what becomes of each bucket."""
    figure = canvas(3.7)
    axes = figure.subplots()
    colour, centre = TAG_COLOURS["gradients"], {"ha": "center", "va": "center"}
    for bucket, (names, (fate, outcome)) in enumerate(zip(BUCKETS, FATES, strict=True)):
        left = 3.5 * bucket
        axes.text(left + 1.4, 1.0, f"bucket {bucket}", color=UNIT_COLOURS[0], fontweight="bold", **centre)
        axes.text(left + 1.4, -0.75, fate, color=OUTCOME_COLOURS[outcome], fontweight="bold", **centre)
        for rank in range(2):
            y = -2.15 * rank
            for place, name in enumerate(names):
                missing = (rank, name) == UNUSED
                look: dict[str, Any] = {"facecolor": colour, "edgecolor": "white"}
                if missing:
                    look = {"facecolor": "white", "edgecolor": SOFT, "linestyle": (0, (3, 3)), "linewidth": 2}
                axes.add_patch(Rectangle((left + 0.1 + 1.3 * place, y + 0.04), 1.26, 0.58, **look))
                text = f"{name}: none" if missing else name
                axes.text(
                    left + 0.73 + 1.3 * place, y + 0.32, text, color=SOFT if missing else ink_on(colour), **centre
                )
            axes.add_patch(
                Rectangle((left, y - 0.08), 2.76, 0.82, fill=False, edgecolor=UNIT_COLOURS[0], linewidth=2.4)
            )
    for rank in range(2):
        axes.text(-0.2, 0.32 - 2.15 * rank, f"rank {rank}", ha="right", va="center", color=INK)
    says = "gradients arrive from the left; a parameter without a gradient fires no hook"
    axes.text(-1.1, -2.72, says, va="center", color=as_text(colour))
    axes.set(xlim=(-1.15, 9.85), ylim=(-3.0, 1.3))
    axes.axis("off")
    return figure
