"""The drawing of who is where: every rank on its host and at its place, and who talks to whom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from matplotlib.patches import FancyBboxPatch, Rectangle

from minifsdp.instruments.plots.mesh import mesh_figure
from minifsdp.instruments.plots.mesh_text import coloured, drawing
from minifsdp.mesh import Mesh

CUBE = Mesh(pp=2, dp=2, tp=2)
SQUARE = Mesh(dp=8, tp=8)
MANY = Mesh(pp=4, dp=2, cp=2, tp=4)


def test_eight_ranks_on_two_hosts() -> None:
    assert drawing(CUBE, 4) == [
        "8 ranks = pp 2 x dp 2 x tp 2, on 2 hosts of 4",
        "below each rank its place on pp/dp/tp",
        "╭ host 0 ────────────────────╮ ╭ host 1 ────────────────────╮",
        "│   0      1      2      3   │ │   4      5      6      7   │",
        "│ 0/0/0  0/0/1  0/1/0  0/1/1 │ │ 1/0/0  1/0/1  1/1/0  1/1/1 │",
        "╰────────────────────────────╯ ╰────────────────────────────╯",
        "pp  0 4  1 5  2 6  3 7                                              across hosts",
        "dp  0 2  1 3  4 6  5 7                                             inside a host",
        "tp  0 1  2 3  4 5  6 7                                             inside a host",
    ]


@pytest.mark.parametrize(
    ("mesh", "host"), [(Mesh(), 8), (CUBE, 1), (CUBE, 3), (CUBE, 8), (SQUARE, 8), (MANY, 8), (MANY, 16), (MANY, 64)]
)
def test_every_rank_is_once_on_its_host_in_80_columns(mesh: Mesh, host: int) -> None:
    lines = drawing(mesh, host)
    assert max(map(len, lines)) <= 80
    inside: dict[int, list[int]] = {}
    hosts: list[int] = []
    for line in lines:
        if line.startswith("╭"):
            hosts = [int(number) for number in re.findall(r"host (\d+)", line)]
        for number, cell in zip(hosts, re.findall("│([^│]+)│", line), strict=False):
            if "/" not in cell:
                inside.setdefault(number, []).extend(map(int, cell.split()))
    assert inside == {first // host: [*range(mesh.ranks)][first : first + host] for first in range(0, mesh.ranks, host)}


def colours_of(mesh: Mesh) -> dict[int, list[str]]:
    """Of each rank's place the colours, axis by axis."""
    found: dict[int, list[str]] = {}
    ranks: list[int] = []
    for line in coloured(mesh):
        if line.plain.startswith("│") and "/" not in line.plain:
            ranks = [int(number) for number in re.findall(r"\d+", line.plain)]
        elif line.plain.startswith("│"):
            styles = [str(span.style) for span in line.spans if span.style]
            axes = len(mesh.divided)
            found |= {rank: styles[axes * place :][:axes] for place, rank in enumerate(ranks)}
    return found


@pytest.mark.parametrize("mesh", [CUBE, SQUARE, Mesh(dp=4, tp=2, axes=("tp", "dp"))])
def test_two_ranks_have_the_same_colour_on_an_axis_if_they_are_in_one_group(mesh: Mesh) -> None:
    colours = colours_of(mesh)
    assert [*colours] == [*range(mesh.ranks)]
    for place, axis in enumerate(mesh.divided):
        for rank in range(mesh.ranks):
            same = [other for other in colours if colours[other][place] == colours[rank][place]]
            assert same == [*mesh.peers(rank, axis)]


def test_a_host_has_a_rank() -> None:
    with pytest.raises(ValueError, match="hosts of 0 ranks: choose 1 or more"):
        drawing(CUBE, 0)


def test_other_groups_than_those_of_an_axis() -> None:
    """Who averages gradients, and of hybrid sharding shards and copies."""
    lines = {line.split()[0]: line for line in drawing(Mesh(dp=2, cp=2, tp=2), 4)}
    assert lines["dp_cp"].split()[1:9] == ["0", "2", "4", "6", "1", "3", "5", "7"]
    assert "across hosts" in lines["dp_cp"]
    hybrid = {line.split()[0]: line for line in drawing(Mesh(dp=8, replicate=2), 4)}
    assert "inside a host" in hybrid["shard"]
    assert "across hosts" in hybrid["replicate"]


@pytest.mark.parametrize(
    ("mesh", "host", "panels"), [(CUBE, 4, 3), (SQUARE, 8, 2), (Mesh(dp=2, cp=2, tp=2), 4, 4), (Mesh(), 8, 1)]
)
def test_the_picture_has_a_panel_for_each_axis_whose_groups_have_a_colour_each(
    mesh: Mesh, host: int, panels: int, tmp_path: Path
) -> None:
    figure = mesh_figure(mesh, host, tmp_path / "mesh.png")
    assert (tmp_path / "mesh.png").read_bytes().startswith(b"\x89PNG")
    assert len(figure.axes) == panels
    for panel, axis in zip(figure.axes, mesh.lines(0), strict=False):
        cells = [patch for patch in panel.patches if isinstance(patch, Rectangle)]
        hosts = [patch for patch in panel.patches if isinstance(patch, FancyBboxPatch)]
        assert (len(cells), len(hosts)) == (mesh.ranks, -(-mesh.ranks // host))
        for group in mesh.groups(axis):
            assert len({cells[rank].get_facecolor() for rank in group}) == 1
        assert len({cell.get_facecolor() for cell in cells}) == len(mesh.groups(axis))


def test_equal_meshes_give_equal_pictures(tmp_path: Path) -> None:
    for name in ("one.png", "other.png"):
        mesh_figure(CUBE, 4, tmp_path / name, {"tp": "73 messages"})
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "other.png").read_bytes()
