"""The figure of `benchmarks/orders.py`: a step's time with each order of a mesh's axes, beside the prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from minifsdp.instruments.plots.palette import EARLIER_COLOURS, SOFT
from minifsdp.instruments.plots.style import DIAMOND, wall_style

_PREDICTED: dict[str, Any] = {**DIAMOND, "markersize": 5}


def orders_figure(rows: Sequence[Mapping[str, Any]], path: str | Path) -> Figure:
    """Draw a panel for each size of hosts, to a PNG.

    Args:
        rows: "host", "axes" (outermost first), "across" (the axes that leave a host), "seconds", "quartiles" and
            "predicted", in seconds.
        path: the PNG to write.
    """
    sizes = list(dict.fromkeys(row["host"] for row in rows))
    most = max(max(row["seconds"], row["predicted"], *row["quartiles"]) for row in rows)
    with wall_style():
        figure = Figure(figsize=(4.6 * len(sizes), 2.6), layout="constrained")
        panels = figure.subplots(1, len(sizes), sharex=True, squeeze=False)[0]
        for panel, size in zip(panels, sizes, strict=True):
            of_size = [row for row in rows if row["host"] == size]
            for place, row in enumerate(of_size):
                low, high = row["quartiles"]
                panel.barh(place, row["seconds"], 0.66, color=EARLIER_COLOURS[1])
                panel.plot([low, high], [place] * 2, color=SOFT, lw=1.2)
                panel.plot(row["predicted"], place, **_PREDICTED)
                across = " and ".join(row["across"]) or "none"
                panel.text(0.02 * most, place, f"{across} across", va="center", fontsize=7.5)
            panel.set_yticks(range(len(of_size)), [row["axes"] for row in of_size])
            panel.set_ylim(len(of_size) - 0.5, -0.5)
            panel.set_xlim(0, 1.06 * most)
            panel.tick_params(axis="y", length=0)
            panel.set_title(f"hosts of {size}")
            panel.set_xlabel("seconds of a step")
        handles = [Patch(color=EARLIER_COLOURS[1], label="measured"), Line2D([], [], label="predicted", **_PREDICTED)]
        figure.legend(handles=handles, ncols=2, loc="outside lower right")
        figure.suptitle(finding(rows), x=0.012, ha="left")
        figure.savefig(path, format="png", metadata={"Software": None})
    return figure


def finding(rows: Sequence[Mapping[str, Any]]) -> str:
    """The best order, and the worst one."""
    first = [row for row in rows if row["host"] == rows[0]["host"]]
    best, worst = (choose(first, key=lambda row: float(row["seconds"])) for choose in (min, max))
    across, times = " and ".join(worst["across"]), worst["seconds"] / best["seconds"]
    return f"With {across} across hosts, a step takes {times:.1f} times as long as with {' and '.join(best['across'])}"
