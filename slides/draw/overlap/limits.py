"""The price of each limit on gathers: seconds of a step, and reserved memory."""

from __future__ import annotations

from collections.abc import Mapping

from draw.canvas import GIB, canvas
from draw.overlap.allocator import limiter
from draw.overlap.runs import DEEP, GPT, big
from matplotlib.figure import Figure

from minifsdp.instruments.machine.shapes import SHAPES
from minifsdp.instruments.plots.palette import BLOCK_COLOURS, INK, LANE_COLOURS

LIMITS = {"k = 1": "k = 1", "k = 2": "k = 2", "k = 3": "k = 3", "no limit": "BACKWARD_PRE"}


def draw_limits() -> Figure:
    """Bars for each limit: how long a step takes, and how much its allocator reserves."""
    figure = canvas(3.5)
    runs = {name: big(DEEP, schedule) for name, schedule in LIMITS.items()}
    times = [run.seconds for run in runs.values()]
    sizes = [run.peak("reserved") / GIB for run in runs.values()]
    panels = figure.subplots(1, 2, sharey=True)
    for panel, title, values, digits, unit, colour in (
        (panels[0], "a step takes", times, 2, "s", LANE_COLOURS["compute"]),
        (panels[1], "the allocator reserves", sizes, 0, "GiB", BLOCK_COLOURS["in use"]),
    ):
        panel.barh(range(len(values)), values, 0.62, color=colour)
        for place, value in enumerate(values):
            weight = "bold" if list(LIMITS)[place] == "k = 2" else "normal"
            panel.text(value + 0.02 * max(values), place, f"{value:.{digits}f} {unit}", va="center", fontweight=weight)
        panel.set_title(title)
        panel.set(xlim=(0, 1.28 * max(values)), xticks=[])
        panel.spines["bottom"].set_visible(False)
        panel.tick_params(axis="y", length=0, labelcolor=INK)
    panels[0].set_yticks(range(len(LIMITS)), list(LIMITS))
    panels[0].invert_yaxis()
    return figure


def limited() -> dict[str, dict[str, float]]:
    """By shape of the paper, a step without the limiter and with it."""
    return {name.removesuffix("-like"): limiter(SHAPES[name]) for name in SHAPES if name != GPT.name}


def _outcome(found: Mapping[str, float]) -> str:
    """The limiter's effect, in words."""
    factor = found["factor"]
    if abs(factor - 1) < 0.005:
        return "no difference"
    return f"{factor:.1f} times as fast" if factor > 1 else f"{100 * (1 - factor):.0f} % slower"


def draw_limiter() -> Figure:
    """For three shapes, a step without the limiter and with it."""
    figure = canvas(3.0)
    panels = figure.subplots(1, len(limited()), sharey=True)
    for panel, (name, found) in zip(panels, limited().items(), strict=True):
        times = [1e3 * found["without"], 1e3 * found["with"]]
        panel.barh((0, 1), times, 0.5, color=LANE_COLOURS["compute"])
        for place, time in enumerate(times):
            panel.text(1.04 * time, place, f"{time:.{1 if time < 100 else 0}f} ms", va="center")
        panel.set_title(f"{name}:\n{_outcome(found)}")
        panel.set(xlim=(0, 1.5 * max(times)), xticks=[])
        panel.spines["bottom"].set_visible(False)
        panel.tick_params(axis="y", length=0, labelcolor=INK)
    panels[0].set_yticks((0, 1), ["no limit", "limit of two"])
    panels[0].invert_yaxis()
    return figure
