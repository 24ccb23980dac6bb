"""What a unit of parameters that are sharded individually costs, beside a flat one: the table that lab 12 prints."""

from __future__ import annotations

import re

from draw.canvas import MIB, canvas
from draw.fsdp.drawing import named, say
from draw.measured import told
from matplotlib.figure import Figure

from minifsdp.cost import data_parallel
from minifsdp.cost.data_parallel import Bytes
from minifsdp.cost.fsdp2 import fsdp2
from minifsdp.course.ladder.measure import Settings
from minifsdp.course.ladder.rungs import sizes_of
from minifsdp.instruments.plots.palette import BLOCK_COLOURS, COLLECTIVE_COLOURS, LANE_COLOURS

COLUMNS = {  # by title: the rows of the table, the unit, and a colour
    "collectives": (("all-gathers", "reduce-scatters"), 1, COLLECTIVE_COLOURS["all-gather"]),
    "MiB sent": (("bytes sent",), MIB, COLLECTIVE_COLOURS["all-gather"]),
    "MiB copied": (("bytes copied",), MIB, LANE_COLOURS["copy"]),
    "MiB at the peak": (("bytes at the peak",), MIB, BLOCK_COLOURS["in use"]),
}


def _rows() -> dict[str, tuple[int, int]]:
    """Of a step: of the flat unit, and of the learner's."""
    found = {}
    for line in told("12", "C26"):
        name, *values = re.split(r"\s{2,}", line.strip())
        if len(values) == 3:
            flat, yours = (int(value.replace(",", "")) for value in values[:2])
            found[name] = flat, yours
    return found


def draw_copies() -> Figure:
    """A panel for each quantity, a bar for each kind of unit."""
    figure = canvas(3.0)
    panels = figure.subplots(1, len(COLUMNS), sharey=True)
    for axes, (title, (names, unit, colour)) in zip(panels, COLUMNS.items(), strict=True):
        values = [sum(_rows()[name][kind] for name in names) / unit for kind in (0, 1)]
        axes.barh((0, 1), values, 0.5, color=colour)
        for place, value in enumerate(values):
            look = {"fontweight": "bold"} if title == "MiB copied" else {}
            say(axes, value + 0.05 * max(values), place, f"{value:.{0 if unit == 1 else 2}f}", ha="left", **look)
        axes.set_title(title)
        axes.set(xlim=(0, 1.75 * max(values)), xticks=[])
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(axis="y", length=0)
    named(panels[0], ["flat", "per parameter"])
    return figure


def both() -> tuple[Bytes, Bytes]:
    """Predicted bytes of the ladder's model on rank 0 of 2: flat, and per parameter."""
    sizes, setting = sizes_of(Settings().model()), data_parallel.Setting(2)
    each = fsdp2(sizes.shapes, sizes.head, setting, ahead=1, limited=True, holds=False)
    return data_parallel.fsdp(sizes.units, setting), each
