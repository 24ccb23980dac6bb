"""A collective that is started, and waited for later: what stands still on gloo, and what on NCCL."""

from __future__ import annotations

from typing import Any

from draw.canvas import canvas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minifsdp.instruments.plots.palette import COLLECTIVE_COLOURS, INK, LANE_COLOURS, SOFT, ink_on

START, DONE, END = 0.2, 3.5, 4.4
KINDS = {"work": "compute", "wait": "wait", "host": "host", "use": "compute"}
GLOO = {
    "host": [(0.3, 1.9, "work", "work()"), (1.9, DONE, "wait", "wait()"), (DONE, END, "use", "use")],
    "link": [],
}
NCCL = {
    "host": [(0.3, 1.2, "host", "work()"), (1.2, 2.1, "host", "wait()"), (2.1, 2.75, "host", "use")],
    "stream": [(0.5, 2.3, "work", "work()"), (2.3, DONE, "wait", "waits"), (DONE, END, "use", "use")],
    "link": [],
}


def _lanes(axes: Axes, left: float, title: str, lanes: dict[str, list[tuple[float, float, str, str]]]) -> None:
    """Lanes from the top, the link last; a collective is on the link from the start to `DONE`."""
    axes.text(left - 0.85, 1.2, title, fontsize=20, fontweight="bold")
    centre: Any = {"ha": "center", "va": "center"}
    for row, (lane, boxes) in enumerate(lanes.items()):
        y = -0.8 * row - (0.8 if lane == "link" and row == 1 else 0.0)  # both links are on one line
        axes.text(left - 0.1, y + 0.33, lane, ha="right", va="center", color=SOFT)
        colour = COLLECTIVE_COLOURS["reduce-scatter"]
        filled = [(start, end, LANE_COLOURS[KINDS[kind]], text) for start, end, kind, text in boxes]
        for start, end, face, text in filled or [(START, DONE, colour, "reduce-scatter")]:
            look: Any = {"facecolor": face, "edgecolor": "white", "linewidth": 1.5}
            axes.add_patch(Rectangle((left + start, y), end - start, 0.66, **look))
            axes.text(left + (start + end) / 2, y + 0.32, text, color=ink_on(face), **centre)
    axes.plot([left + DONE] * 2, [-2.25, 0.85], color=INK, linestyle=(0, (3, 3)), linewidth=1.6)
    axes.text(left + (START + DONE) / 2, -2.0, "part is undefined", **centre)
    axes.text(left + (DONE + END) / 2 + 0.05, -2.0, "valid", fontweight="bold", **centre)


def draw_waiting() -> Figure:
    """One rank on each backend, from the start of a collective to the use of its output."""
    figure = canvas(3.2)
    axes = figure.subplots()
    _lanes(axes, 0.9, "gloo: wait() blocks the host", GLOO)
    _lanes(axes, 6.75, "NCCL: wait() blocks the stream", NCCL)
    axes.set(xlim=(0, 11.2), ylim=(-2.3, 1.6))
    axes.axis("off")
    return figure
