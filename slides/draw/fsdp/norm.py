"""The norm of a sharded gradient: two ranks' parts are the legs of a right triangle."""

from __future__ import annotations

from typing import Any

from draw.canvas import canvas
from draw.fsdp.drawing import say
from draw.fsdp.runs import ranks
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minifsdp.instruments.plots.palette import OUTCOME_COLOURS, RANK_COLOURS, SOFT, TAG_COLOURS, as_text

OWN = RANK_COLOURS[:2]


def norms() -> tuple[float, float, float]:
    """Of the whole gradient, and of each of two ranks' shards."""
    steps = [rank["steps"][0] for rank in ranks()]
    return steps[0]["total_norm"], steps[0]["own_norm"], steps[1]["own_norm"]


def _triangle(axes: Axes, legs: tuple[float, float], colour: str, line: Any = "-") -> None:
    """Shards of rank 0 to the right, shards of rank 1 upwards, the whole gradient from the corner."""
    x, y = legs
    axes.plot([0, x], [0, 0], color=OWN[0], linewidth=5, solid_capstyle="butt")
    axes.plot([x, x], [0, y], color=OWN[1], linewidth=5, solid_capstyle="butt")
    arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 4, "mutation_scale": 24, "linestyle": line}
    axes.annotate("", (x, y), (0, 0), arrowprops=arrow | {"shrinkA": 0, "shrinkB": 0})


def draw_norm() -> Figure:
    """The gradient, the gradient clipped to half its norm, and what clipping each part by its own norm makes of it."""
    figure = canvas(3.2)
    total, first, second = norms()
    limit = total / 2
    right, wrong = OUTCOME_COLOURS["right"], OUTCOME_COLOURS["wrong"]
    cases = (
        ("not clipped", (first, second), TAG_COLOURS["gradients"]),
        ("by the full norm", (first / 2, second / 2), right),
        ("each by its own norm", (min(first, limit), min(second, limit)), wrong),
    )
    for axes, (title, legs, colour) in zip(figure.subplots(1, 3, sharex=True, sharey=True), cases, strict=True):
        _triangle(axes, legs, colour)
        say(axes, 0, 0.76 * total, title, ha="left", color=as_text(colour), fontweight="bold")
        length = (legs[0] ** 2 + legs[1] ** 2) ** 0.5
        say(
            axes,
            0.42 * legs[0],
            0.5 * legs[1] + 0.1 * total,
            f"{length:.2f}",
            ha="right",
            color=as_text(colour),
            fontweight="bold",
        )
        say(axes, legs[0] / 2, -0.09 * total, f"rank 0: {legs[0]:.2f}", color=OWN[0])
        say(axes, legs[0] + 0.04 * total, legs[1] / 2, f"rank 1:\n{legs[1]:.2f}", ha="left", color=OWN[1])
        axes.set(xlim=(-0.02 * total, 1.15 * total), ylim=(-0.16 * total, 0.82 * total), aspect="equal")
        axes.axis("off")
    figure.supxlabel(f"limit: {limit:.2f}, half of the norm; small GPT, 2 ranks, measured", color=SOFT, fontsize=18)
    return figure
