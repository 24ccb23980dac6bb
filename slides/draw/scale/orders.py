"""The six orders of three axes on two kinds of links, as recorded, and which axes cross hosts."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from draw.canvas import canvas
from draw.fsdp.drawing import bare, box, say
from draw.measured import RECORD
from draw.scale.groups import AXIS_COLOURS
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from minifsdp.instruments.plots.palette import EARLIER_COLOURS, INK, SOFT, as_text, ink_on
from minifsdp.instruments.plots.style import DIAMOND
from minifsdp.mesh import Mesh, leaves_host

CASES = (  # ranks of a host, and a mesh
    (4, Mesh(pp=2, dp=2, tp=2)),
    (4, Mesh(pp=2, dp=2, tp=2, axes=("dp", "pp", "tp"))),
    (4, Mesh(pp=2, dp=2, tp=2, axes=("tp", "pp", "dp"))),
    (2, Mesh(pp=2, dp=2, tp=2)),
    (8, Mesh(pp=2, dp=4, tp=8)),
    (8, Mesh(pp=8, dp=2, tp=4)),
)


@cache
def record() -> dict[str, Any]:
    """As benchmarks/orders.py wrote it."""
    found: dict[str, Any] = json.loads((RECORD.parent / "cpu" / "orders.json").read_text())
    return found


def _rows(host: int) -> list[dict[str, Any]]:
    return [row for row in record()["rows"] if row["host"] == host]


def seconds_across(axis: str) -> float:
    """Of the step on two hosts that only this axis crosses: the mean of both orders."""
    found = [row["seconds"] for row in _rows(4) if row["across"] == [axis]]
    return float(sum(found) / len(found))


def summary() -> dict[str, Any]:
    """Numbers of the record: links, times relative to the best order, the largest deviation from a prediction."""
    best = seconds_across("pp")
    (inside_delay, inside), (across_delay, across) = record()["inside"], record()["across"]
    return {
        "tp": seconds_across("tp") / best,
        "dp": seconds_across("dp") / best,
        "off": max(abs(row["seconds"] / row["predicted"] - 1) for row in record()["rows"]),
        "inside": f"{1e3 * inside_delay:.0f} ms and {inside / 1e6:.0f} MB/s",
        "across": f"{1e3 * across_delay:.0f} ms and {across / 1e6:.0f} MB/s",
    }


def draw_orders() -> Figure:
    """A bar for each order on two hosts of four: measured, and the prediction on it."""
    figure = canvas(3.8)
    axes = figure.subplots()
    rows = sorted(_rows(4), key=lambda row: (row["predicted"], row["axes"]))
    predicted: Any = {**DIAMOND, "markersize": 11}
    for place, row in enumerate(rows):
        (across,) = row["across"]
        axes.barh(place, row["seconds"], 0.74, color=AXIS_COLOURS[across])
        axes.plot(row["predicted"], place, **predicted)
        on = ink_on(AXIS_COLOURS[across])
        say(axes, 0.05, place, f"{across} across hosts", ha="left", color=on, fontweight="bold")
        say(axes, max(row["seconds"], row["predicted"]) + 0.1, place, f"{row['seconds']:.2f} s", ha="left")
    axes.set_yticks(range(len(rows)), [row["axes"].replace("/", ", ") for row in rows])
    axes.tick_params(axis="y", length=0, pad=8, labelcolor=INK)
    axes.invert_yaxis()
    axes.set(xlim=(0, 4.7), xticks=[])
    axes.spines[["left", "bottom"]].set_visible(False)
    handles = [Line2D([], [], label="predicted", **predicted)]
    figure.legend(handles=handles, loc="outside lower left")
    return figure


def draw_inside() -> Figure:
    """For each case, which axis is inside a host and which crosses."""
    figure = canvas(4.3)
    axes = figure.subplots()
    wide = 4.2
    for column, axis in enumerate(("pp", "dp", "tp")):
        colour = as_text(AXIS_COLOURS[axis])
        say(axes, wide * (column + 0.5), 0.55, axis, color=colour, fontweight="bold")
    say(axes, 3 * wide + 2.0, 0.55, "t · d ranks fit?", color=SOFT)
    for line, (host, mesh) in enumerate(CASES):
        low = -1.0 - line
        order = ", ".join(f"{axis} {mesh.size(axis)}" for axis in mesh.divided)
        say(axes, -0.3, low + 0.45, f"hosts of {host}: {order}", ha="right")
        for column, axis in enumerate(("pp", "dp", "tp")):
            crosses = leaves_host(mesh.groups(axis), host)
            colour = EARLIER_COLOURS[5] if crosses else EARLIER_COLOURS[0]
            box(axes, (wide * column, low), wide - 0.12, 0.88, colour)
            word = "across hosts" if crosses else "inside"
            say(axes, wide * (column + 0.5), low + 0.45, word, color=ink_on(colour))
        fit = mesh.tp * mesh.dp <= host
        says = f"{mesh.tp * mesh.dp} of {host}: {'yes' if fit else 'no'}"
        say(axes, 3 * wide + 2.0, low + 0.45, says, fontweight="bold" if fit else "normal")
    bare(axes, (-9.2, 3 * wide + 4.2), (-len(CASES) - 0.1, 1.0))
    return figure
