"""The ladders of the course: a step for each rung, from the bottom up, with what it adds."""

from __future__ import annotations

from collections.abc import Mapping

from draw.canvas import canvas
from draw.fsdp.drawing import bare, box, say
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minifsdp.course.ladder.rungs import PIPELINE_RUNGS, RUNGS, TENSOR_RUNGS, Rung
from minifsdp.instruments.plots.palette import PAGE_COLOURS, SOFT, WHITE

WIDTH, NAME, STEP = 23.0, 5.9, 0.2  # of the figure, of a rung's name, and how far a rung begins beyond the one below
LECTURES = (  # and their rungs, from the first to the last
    (2, "ddp-naive", "ddp"),
    (1, "zero1", "zero2"),
    (3, "fsdp-grad-op", "fsdp"),
    (4, "fsdp-overlap", "fsdp-limit"),
    (6, "fsdp2", "fsdp2-hold"),
)


def _stairs(axes: Axes, rungs: Mapping[str, Rung], bottom: float = 0.0) -> None:
    middle = {"ha": "left", "va": "center_baseline"}
    for number, (name, rung) in enumerate(rungs.items()):
        left, y = STEP * number, bottom + number
        box(axes, (left, y), NAME, 1, PAGE_COLOURS["accent"])
        say(axes, left + 0.25, y + 0.5, f"{number + 1}", color=WHITE, **middle)
        say(axes, left + 1.15, y + 0.5, name, color=WHITE, fontweight="bold", **middle)
        say(axes, left + NAME + 0.3, y + 0.5, rung.adds, **middle)


def draw_first() -> Figure:
    """The rungs of the first ladder, and the lecture of each."""
    figure = canvas(4.6)
    axes = figure.subplots()
    _stairs(axes, RUNGS)
    places = list(RUNGS)
    for lecture, first, last in LECTURES:
        low, high = places.index(first) + 0.15, places.index(last) + 0.85
        axes.plot([WIDTH - 3.1] * 2, [low, high], color=SOFT, linewidth=3)
        say(axes, WIDTH - 2.8, (low + high) / 2, f"lecture {lecture}", ha="left", color=SOFT)
    bare(axes, (0, WIDTH), (-0.1, len(RUNGS) + 0.1))
    return figure


def draw_others() -> Figure:
    """The second ladder, and the third below it."""
    figure = canvas(5.2)
    axes = figure.subplots()
    second = len(PIPELINE_RUNGS) + 1.5
    for title, rungs, bottom in (
        ("third ladder: pipelines", PIPELINE_RUNGS, 0.0),
        ("second ladder: tensor parallelism", TENSOR_RUNGS, second),
    ):
        _stairs(axes, rungs, bottom)
        say(axes, 0, bottom + len(rungs) + 0.6, title, ha="left", va="center_baseline", fontweight="bold")
    bare(axes, (0, WIDTH), (-0.1, second + len(TENSOR_RUNGS) + 1.1))
    return figure
