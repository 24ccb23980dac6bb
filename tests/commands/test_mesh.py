"""`minifsdp mesh`: the drawing, what is sent along each axis, and where; one line for what cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from minifsdp.instruments.plots.mesh_text import drawing
from minifsdp.mesh import Mesh

WORDS = "pp=2,dp=2,tp=2,zero=1,sequence"
LINK = "inside=5us@10GB/s,across=200us@1GB/s,host=4"
Command = Callable[..., tuple[int, str, str]]


def rows_of(output: str) -> dict[str, list[str]]:
    """The table's rows by axis."""
    lines = output.partition("axis   link")[2].splitlines()[2:]
    return {line.split()[0]: line.split()[1:] for line in lines if line[:2] in ("pp", "dp", "tp")}


def test_it_draws_and_counts_by_axis(command: Command, tmp_path: Path) -> None:
    code, output, errors = command("mesh", WORDS, "--host", "4", "--out", str(tmp_path))
    assert (code, errors) == (0, "")
    drawn = drawing(Mesh(pp=2, dp=2, tp=2), 4)
    assert output.splitlines()[: len(drawn)] == drawn
    rows = rows_of(output)
    assert [*rows] == ["pp", "dp", "tp"]
    assert [" ".join(row[:2]) for row in rows.values()] == ["across hosts", "inside a", "inside a"]
    assert float(rows["tp"][-1]) > float(rows["dp"][-1]) > float(rows["pp"][-1])
    assert int(rows["tp"][-2]) > int(rows["dp"][-2])
    assert (tmp_path / "mesh.png").read_bytes().startswith(b"\x89PNG")


def test_the_order_decides_what_leaves_a_host_and_links_say_how_long_it_takes(command: Command) -> None:
    seconds = {}
    for axes in ("pp/dp/tp", "tp/dp/pp"):
        code, output, _ = command("mesh", f"{WORDS},axes={axes}", "--link", LINK)
        assert code == 0
        rows = rows_of(output)
        assert [axis for axis, row in rows.items() if row[0] == "across"] == [axes[:2]]
        seconds[axes] = float(output.partition("Messages take ")[2].split()[0])
    assert seconds["tp/dp/pp"] > 5 * seconds["pp/dp/tp"]  # ms


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("dp=2,foo=1",), "foo is no word of a recipe"),
        (("dp=2", "--host", "0"), "hosts of 0 ranks: choose 1 or more"),
        (("tp=8",), "choose a multiple of 8 heads"),
        (("dp=2", "--link", "inside=1ms"), "bad link"),
        (("dp=2", "--host", "2", "--link", LINK), "--host 2 with a link for hosts of 4: leave one of them out"),
        (("dp=2", "--batch", "3"), "choose a multiple of 2"),
    ],
)
def test_what_cannot_be_ends_in_one_line(refused: Callable[..., str], words: tuple[str, ...], says: str) -> None:
    assert says in refused("mesh", *words)
