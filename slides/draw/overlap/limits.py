"""The price of each limit on gathers: seconds of a step, and reserved memory."""

from __future__ import annotations

from draw.canvas import GIB, canvas
from draw.overlap.runs import DEEP, big
from matplotlib.figure import Figure

from minifsdp.course.plots.palette import BLOCK_COLOURS, INK, LANE_COLOURS

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
