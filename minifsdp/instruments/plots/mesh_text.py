"""A mesh drawn in a terminal: hosts as boxes of ranks, the place of each rank on every axis, and groups that talk.

╭ host 0 ────────────────────╮ ╭ host 1 ────────────────────╮
│   0      1      2      3   │ │   4      5      6      7   │
│ 0/0/0  0/0/1  0/1/0  0/1/1 │ │ 1/0/0  1/0/1  1/1/0  1/1/1 │
╰────────────────────────────╯ ╰────────────────────────────╯
pp  0 4  1 5  2 6  3 7                           across hosts
dp  0 2  1 3  4 6  5 7                          inside a host
tp  0 1  2 3  4 5  6 7                          inside a host
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from rich.text import Text

from minifsdp.instruments.plots.palette import group_colour, ink_on
from minifsdp.mesh import Mesh, leaves_host

WIDTH = 80  # columns
USUAL_HOST = 8  # ranks
_GROUP = 6  # ranks of a group that are listed one by one


def drawing(mesh: Mesh, host: int = USUAL_HOST) -> list[str]:
    """The lines of the drawing, without colours; arguments and errors as for `coloured`."""
    return [line.plain for line in coloured(mesh, host)]


def coloured(mesh: Mesh, host: int = USUAL_HOST) -> list[Text]:
    """The lines of the drawing, of at most 80 columns for up to ten axes.

    In the place of a rank, two ranks have the same colour on an axis if they are in one group along it.

    Args:
        mesh: the ranks.
        host: ranks of a host, by their numbers; the last one may have fewer.

    Raises:
        ValueError: a host without a rank.
    """
    if host < 1:
        raise ValueError(f"hosts of {host} ranks: choose 1 or more")
    hosts = [range(first, min(first + host, mesh.ranks)) for first in range(0, mesh.ranks, host)]
    return [*_heading(mesh, hosts), *_boxes(mesh, hosts), *_axes(mesh, host)]


def _heading(mesh: Mesh, hosts: Sequence[Sequence[int]]) -> Iterator[Text]:
    sizes = " x ".join(f"{axis} {mesh.size(axis)}" for axis in mesh.divided)
    of = f" = {sizes}" if sizes else ""
    where = f"{len(hosts)} hosts of {len(hosts[0])}" if len(hosts) > 1 else "one host"
    yield Text(f"{mesh.ranks} rank{'s' * (mesh.ranks > 1)}{of}, on {where}")
    if _has_places(mesh):
        yield Text(f"below each rank its place on {'/'.join(mesh.divided)}")


def _has_places(mesh: Mesh) -> bool:
    """With one axis, a rank's place is its number."""
    return len(mesh.divided) > 1


def _boxes(mesh: Mesh, hosts: Sequence[Sequence[int]]) -> Iterator[Text]:
    """Hosts side by side, as many as fit; one that does not fit has several rows of ranks."""
    cell = max(len(_place(mesh, mesh.ranks - 1)), len(str(mesh.ranks - 1)))
    rows = ceil(len(hosts[0]) / max(1, (WIDTH - 2) // (cell + 2)))
    columns = ceil(len(hosts[0]) / rows)
    beside = max(1, (WIDTH + 1) // (_wide(columns, cell) + 1)) if rows == 1 else 1
    for first in range(0, len(hosts), beside):
        numbers = range(first, min(first + beside, len(hosts)))
        boxes = [_box(mesh, number, hosts[number], columns, cell) for number in numbers]
        yield from (Text(" ").join(lines) for lines in zip(*boxes, strict=True))


def _wide(columns: int, cell: int) -> int:
    """Columns of the terminal that a host takes."""
    return max((cell + 2) * columns + 2, len("╭ host 00 ╮"))


def _box(mesh: Mesh, number: int, ranks: Sequence[int], columns: int, cell: int) -> list[Text]:
    """A host with rows of ranks and, below each rank, its place."""
    inside = _wide(columns, cell) - 2
    lines = [Text(f"╭ host {number} ".ljust(inside + 1, "─") + "╮")]
    for first in range(ranks[0], ranks[-1] + 1, columns):
        row = [rank for rank in range(first, first + columns) if rank in ranks]
        places = [[_coloured_place(mesh, rank) for rank in row]] if _has_places(mesh) else []
        for cells in ([Text(str(rank)) for rank in row], *places):
            middle = Text().join(_centred(each, cell + 2) for each in cells)
            middle.pad_right(inside - len(middle))
            lines.append(Text.assemble("│", middle, "│"))
    return [*lines, Text(f"╰{'─' * inside}╯")]


def _centred(text: Text, width: int) -> Text:
    left = (width - len(text)) // 2
    return Text.assemble(" " * left, text, " " * (width - len(text) - left))


def _place(mesh: Mesh, rank: int) -> str:
    return "/".join(str(mesh.place(rank, axis)) for axis in mesh.divided)


def _coloured_place(mesh: Mesh, rank: int) -> Text:
    places = [
        Text(str(mesh.place(rank, axis)), style=_style(mesh.groups(axis).index(tuple(mesh.peers(rank, axis)))))
        for axis in mesh.divided
    ]
    return Text("/").join(places)


def _style(group: int) -> str:
    colour = group_colour(group)
    return f"{ink_on(colour)} on {colour}"


def _axes(mesh: Mesh, host: int) -> Iterator[Text]:
    """Of each axis its groups, and whether they leave a host."""
    names = list(mesh.lines(0))
    width = max(map(len, names), default=0)
    for name in names:
        groups = mesh.groups(name)
        where = "across hosts" if leaves_host(groups, host) else "inside a host"
        room = WIDTH - width - 2 - len(where) - 2
        marked = [Text(each, _style(number)) for number, each in enumerate(_listed(groups, room))]
        styled = Text("  ").join(marked)
        styled.pad_right(room - len(styled))
        yield Text.assemble(f"{name:{width}}  ", styled, f"  {where}")


def _listed(groups: Sequence[Sequence[int]], room: int) -> list[str]:
    """As many groups as fit, one at least; the last one says if there are more."""
    said = [_group(ranks) for ranks in groups]
    for count in range(len(said), 1, -1):
        shown = [*said[: count - 1], said[count - 1] + " ..." * (count < len(said))]
        if len("  ".join(shown)) <= room:
            return shown
    return [said[0] + " ..." * (len(said) > 1)]


def _group(ranks: Sequence[int]) -> str:
    if len(ranks) <= _GROUP:
        return " ".join(map(str, ranks))
    return f"{ranks[0]} {ranks[1]} .. {ranks[-1]}"
