"""A mesh as a picture: a panel for each axis, hosts as boxes of ranks, the ranks of a group in one colour."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from minifsdp.instruments.plots.palette import INK, LINE, PALE, SOFT, group_colour, ink_on
from minifsdp.instruments.plots.style import wall_style
from minifsdp.mesh import Mesh, leaves_host

_COLUMNS, _PANELS = 8, 3  # ranks of a host in a row, axes in a row
_CELL = 0.46  # inches
_GAP, _NAME = 0.35, 1.6  # between hosts, and for a host's name, in cells


def mesh_figure(mesh: Mesh, host: int, path: str | Path, says: Mapping[str, str] | None = None) -> Figure:
    """Draw who is where, and who talks to whom, to a PNG.

    Args:
        mesh: the ranks.
        host: ranks of a host, by their numbers.
        path: the PNG to write.
        says: a line on each axis, below its title.

    Returns:
        The figure, with one axes per axis of `Mesh.lines`.
    """
    axes_of_mesh = list(mesh.lines(0)) or [""]
    columns = min(_COLUMNS, host, mesh.ranks)
    hosts = ceil(mesh.ranks / host)
    rows = hosts * ceil(min(host, mesh.ranks) / columns)
    size = columns + _NAME, rows + hosts * _GAP
    panels = ceil(len(axes_of_mesh) / _PANELS), min(_PANELS, len(axes_of_mesh))
    with wall_style():
        figure = Figure(
            figsize=(max(7.0, _CELL * size[0] * panels[1] + 0.4), (_CELL * size[1] + 0.6) * panels[0] + 0.7),
            layout="constrained",
        )
        grid = figure.subplots(*panels, squeeze=False).flatten()
        for panel, axis in zip(grid, axes_of_mesh, strict=False):
            _draw(panel, mesh, host, axis, columns)
            _frame(panel, size, (says or {}).get(axis, ""))
            if axis:
                panel.set_title(
                    f"{axis}: {'across hosts' if leaves_host(mesh.groups(axis), host) else 'inside a host'}"
                )
        for unused in grid[len(axes_of_mesh) :]:
            unused.remove()
        figure.suptitle(_finding(mesh, host), x=0.012, ha="left")
        places = f"; below each rank its place on {'/'.join(mesh.divided)}" if len(mesh.divided) > 1 else ""
        figure.supxlabel(f"one colour: one group{places}", x=0.012, ha="left", fontsize=8, color=INK)
        figure.savefig(path, format="png", metadata={"Software": None})
    return figure


def _draw(panel: Axes, mesh: Mesh, host: int, axis: str, columns: int) -> None:
    groups = mesh.groups(axis) if axis else []
    numbers = {rank: number for number, group in enumerate(groups) for rank in group}
    rows_of_host = ceil(min(host, mesh.ranks) / columns)
    several = len(mesh.divided) > 1
    for first in range(0, mesh.ranks, host):
        top = first // host * (rows_of_host + _GAP)
        box = FancyBboxPatch(
            (-0.06, top - 0.06), columns + 0.12, rows_of_host + 0.12, "round,pad=0.04", fc=PALE, ec=LINE, lw=0.8
        )
        panel.add_patch(box)
        name: Any = {"ha": "right", "va": "center", "color": SOFT, "fontsize": 7}
        panel.text(-0.22, top + rows_of_host / 2, f"host {first // host}", **name)
        for rank in range(first, min(first + host, mesh.ranks)):
            down, along = divmod(rank - first, columns)
            colour = group_colour(numbers[rank]) if numbers else PALE
            panel.add_patch(Rectangle((along + 0.05, top + down + 0.05), 0.9, 0.9, fc=colour, ec="none"))
            look: Any = {"ha": "center", "va": "center", "color": ink_on(colour)}
            middle = along + 0.5, top + down + (0.36 if several else 0.5)
            panel.text(*middle, str(rank), fontsize=8, fontweight="bold", **look)
            if several:
                place = "/".join(str(mesh.place(rank, each)) for each in mesh.divided)
                panel.text(middle[0], top + down + 0.74, place, fontsize=5.5, **look)


def _frame(panel: Axes, size: tuple[float, float], says: str) -> None:
    """The limits of a panel of so many cells, with room for a line above."""
    columns, rows = size[0] - _NAME, size[1] - _GAP
    panel.set_xlim(-_NAME, columns + 0.2)
    panel.set_ylim(rows + 0.2, -0.65 if says else -0.2)
    panel.text(-_NAME, -0.4, says, va="center", fontsize=8)
    panel.set_aspect("equal")
    panel.axis("off")


def _finding(mesh: Mesh, host: int) -> str:
    """The axes that leave a host."""
    sizes = " x ".join(f"{axis} {mesh.size(axis)}" for axis in mesh.divided) or "1"
    leaving = [axis for axis in mesh.divided if leaves_host(mesh.groups(axis), host)]
    if mesh.ranks <= host:
        return f"{sizes}: all on one host"
    if len(leaving) == len(mesh.divided):
        return f"{sizes}, hosts of {host}: every axis crosses hosts"
    staying = [axis for axis in mesh.divided if axis not in leaving]
    return f"{sizes}, hosts of {host}: {_listed(staying)} stay{'s' * (len(staying) == 1)} inside a host"


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
