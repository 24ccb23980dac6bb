"""A parameter that two modules share: in one unit, and as if it were in two."""

from __future__ import annotations

from typing import Any

from draw.canvas import canvas
from draw.fsdp.drawing import bare, box, say
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minifsdp.instruments.plots.palette import OUTCOME_COLOURS, PALE, SOFT, TAG_COLOURS, UNIT_COLOURS, ink_on

ARROW: dict[str, Any] = {"arrowstyle": "-|>", "color": SOFT, "linewidth": 2, "mutation_scale": 18}
MODULES = {"embed.weight": 0.1, "head.weight": 2.85}


def _modules(axes: Axes, left: float, targets: tuple[float, float]) -> None:
    """Both modules, each with an arrow from the part of a flat parameter that it has a view of."""
    for (name, x), target in zip(MODULES.items(), targets, strict=True):
        box(axes, (left + x, 3.0), 2.25, 0.66, PALE)
        say(axes, left + x + 1.12, 3.32, name)
        axes.annotate("", (left + x + 1.12, 2.97), (left + target, 2.25), arrowprops=ARROW)


def _flat(axes: Axes, left: float, width: float, at: float, colour: str) -> None:
    """A flat parameter with the weight in it."""
    box(axes, (left, 1.55), width, 0.66, colour, alpha=0.4)
    box(axes, (left + at, 1.55), 1.25, 0.66, colour)
    say(axes, left + at + 0.62, 1.87, "weight", color=ink_on(colour))


def draw_tied() -> Figure:
    """Views of one weight, whose two gradients autograd adds; and two copies with one gradient each."""
    figure = canvas(3.8)
    axes = figure.subplots()
    right, wrong = OUTCOME_COLOURS["right"], OUTCOME_COLOURS["wrong"]
    colour = TAG_COLOURS["gradients"]
    for left, title, outcome, ink in (
        (0.0, "in one unit: flattened once", "one weight, updated once", right),
        (6.0, "in two units: flattened twice", "two weights, which diverge", wrong),
    ):
        say(axes, left + 0.1, 4.05, title, ha="left", fontsize=20, fontweight="bold")
        say(axes, left + 0.1, -0.02, outcome, ha="left", color=ink, fontweight="bold")
    _modules(axes, 0, (2.3, 2.9))
    _flat(axes, 0.1, 5.0, 1.87, UNIT_COLOURS[0])
    _modules(axes, 6.0, (1.22, 3.97))
    for (left, text), shade in zip(((6.1, "of embed only"), (8.85, "of head only")), (0, 1), strict=True):
        _flat(axes, left, 2.25, 0.5, UNIT_COLOURS[shade])
        box(axes, (left, 0.5), 2.25, 0.66, colour)
        say(axes, left + 1.12, 0.82, text, color=ink_on(colour))
    box(axes, (1.0, 0.5), 3.2, 0.66, colour)
    say(axes, 2.6, 0.82, "of embed + of head", color=ink_on(colour))
    for x in (2.6, 7.22, 9.97):
        axes.annotate("", (x, 1.52), (x, 1.19), arrowprops=ARROW)
    say(axes, -0.1, 0.82, "gradient", ha="right", color=SOFT)
    say(axes, -0.1, 1.87, "flat", ha="right", color=SOFT)
    say(axes, -0.1, 3.32, "modules", ha="right", color=SOFT)
    bare(axes, (-1.5, 11.2), (-0.25, 4.35))
    return figure
