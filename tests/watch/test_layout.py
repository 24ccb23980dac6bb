"""The drawings of where parameters lie: which element is drawn where, in whose shard, under which rank's number."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from minifsdp.instruments import plots
from minifsdp.instruments.plots.palette import UNIT_COLOURS

SIZES = {"a.weight": 12, "a.bias": 3, "b.weight": 7}
LAYERS = ["a", "inner.b", "inner.c", "d"]
LAYOUTS = {
    "root": {"a.weight": 60, "a.bias": 10, "d.weight": 132, "d.bias": 11, "padding": 3},
    "inner": {"inner.b.weight": 90, "inner.b.bias": 9, "inner.c.weight": 40, "inner.c.bias": 2, "padding": 3},
}


class Box(NamedTuple):
    left: float
    right: float
    bottom: float
    colour: str


def boxes(axes: Axes) -> list[Box]:
    """The filled parts of all rows, in the order in which they were drawn."""
    patches = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_fill()]
    return [
        Box(each.get_x(), each.get_x() + each.get_width(), each.get_y(), to_hex(each.get_facecolor()))
        for each in patches
    ]


def texts(axes: Axes) -> dict[str, tuple[float, float]]:
    return {text.get_text(): text.get_position() for text in axes.texts}


def owners(ranks: int, length: int) -> list[str]:
    """For each element of the padded flat parameter, whose it is."""
    elements = [name for name, size in SIZES.items() for _ in range(size)]
    return elements + ["padding"] * (ranks * length - len(elements))


def bounds_of(ranks: int, length: int) -> dict[str, list[tuple[int, int]]]:
    whole = owners(ranks, length)
    shards = [whole[rank * length : (rank + 1) * length] for rank in range(ranks)]
    return {
        name: [
            (shard.index(name), shard.index(name) + shard.count(name)) if name in shard else (0, 0) for shard in shards
        ]
        for name in SIZES
    }


def flat(ranks: int) -> plots.Picture:
    length = -(-22 // ranks)
    return plots.flat_layout(SIZES, bounds_of(ranks, length), length, title="Cut", says="Parts.")


def units(ranks: int = 4) -> plots.Picture:
    return plots.units(LAYERS, LAYOUTS, ranks, title="Units", says="Layers.")


def test_biases_are_dotted_and_no_weight_is_whatever_the_unit() -> None:
    layouts = {unit: {f"{unit}.weight": 9, f"{unit}.bias": 3, "padding": 1} for unit in ("root", "b0", "b1", "b2")}
    axes = plots.units(list(layouts), layouts, 1, title="", says="").figure.axes[1]
    patches = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert [(patch.get_width(), patch.get_hatch()) for patch in patches] == 4 * [(9, None), (3, "...."), (1, "//////")]
    assert len({patch.get_facecolor() for patch in patches[::3]}) == 4, "each unit has a colour"


class TestFlatLayout:
    def test_the_numbers_are_where_the_parameters_lie_and_who_holds_them(self) -> None:
        assert flat(4).data == {
            "offsets": {"a.weight": [0, 12], "a.bias": [12, 15], "b.weight": [15, 22]},
            "padding": [22, 24],
            "ranks": {"a.weight": [0, 1], "a.bias": [2], "b.weight": [2, 3]},
        }

    @pytest.mark.parametrize("ranks", [1, 3, 4, 16])
    def test_every_element_has_its_colour_in_both_rows(self, ranks: int) -> None:
        length = -(-22 // ranks)
        drawn = boxes(flat(ranks).figure.axes[0])
        colour = {box.colour: None for box in drawn if box.bottom == 1.0}
        names = dict(zip([*SIZES, "padding"] if ranks * length > 22 else SIZES, colour, strict=True))
        for at, owner in enumerate(owners(ranks, length)):
            for bottom in (0.0, 1.0):
                over = [box for box in drawn if box.bottom == bottom and box.left < at + 0.5 < box.right]
                assert over[-1].colour == names[owner], (at, owner, bottom)  # the last covers the others

    def test_each_rank_s_number_stands_under_its_shard(self) -> None:
        axes = flat(16).figure.axes[0]
        outlines = [patch for patch in axes.patches if isinstance(patch, Rectangle) and not patch.get_fill()]
        assert len(outlines) == 16
        for rank, outline in enumerate(outlines):
            assert outline.get_x() < texts(axes)[str(rank)][0] < outline.get_x() + outline.get_width()

    def test_names_say_the_offsets(self) -> None:
        assert {"a.weight [0, 12)", "a.bias [12, 15)", "b.weight [15, 22)", "padding [22, 24)"} <= texts(
            flat(4).figure.axes[0]
        ).keys()


class TestUnits:
    def test_the_numbers_are_the_layers_elements_padding_and_shards(self) -> None:
        assert units().data == {
            "root": {"layers": "a+d", "elements": 213, "padding": 3, "shard": 54},
            "inner": {"layers": "b+c", "elements": 141, "padding": 3, "shard": 36},
        }

    def test_layers_stand_in_the_order_in_which_they_run_in_their_unit_s_colour(self) -> None:
        axes = units().figure.axes[0]
        assert [box.colour for box in boxes(axes)] == [UNIT_COLOURS[i].lower() for i in (0, 1, 1, 0)]
        assert [name for name in texts(axes) if name] == ["a", "b", "c", "d"]

    def test_segments_are_the_parameters_end_to_end(self) -> None:
        drawn = boxes(units().figure.axes[1])
        for height, layout in zip((1, 0), LAYOUTS.values(), strict=True):
            edges = [0, *accumulate(layout.values())]
            assert [(box.left, box.right) for box in drawn if box.bottom == height] == list(pairwise(edges))

    @pytest.mark.parametrize("ranks", [2, 4])
    def test_cuts_and_rank_numbers_are_those_of_the_shards(self, ranks: int) -> None:
        axes = units(ranks).figure.axes[1]
        cuts = [
            [float(segment[0][0]) for segment in lines.get_segments()]
            for lines in axes.collections
            if isinstance(lines, LineCollection)
        ]
        lengths = [sum(layout.values()) / ranks for layout in LAYOUTS.values()]
        assert cuts == [[rank * length for rank in range(ranks + 1)] for length in lengths]
        numbers = [
            (text.get_text(), text.get_position()[0]) for text in axes.texts if text.get_verticalalignment() == "top"
        ]
        assert numbers == [(f"rank {rank}", (rank + 0.5) * length) for length in lengths for rank in range(ranks)]

    def test_no_cut_goes_through_a_name(self) -> None:
        figure = units().figure
        figure.draw_without_rendering()
        axes = figure.axes[1]
        to_data = axes.transData.inverted()
        for number, layout in enumerate(LAYOUTS.values()):
            length = sum(layout.values()) // 4
            names = [
                text
                for text in axes.texts
                if text.get_verticalalignment() == "center" and int(text.get_position()[1]) == 1 - number
            ]
            assert names
            for text in names:
                (left, _), (right, _) = to_data.transform(text.get_window_extent())
                assert left // length == right // length, text.get_text()

    def test_the_axis_says_what_it_counts(self) -> None:
        assert "elements" in units().figure.axes[1].get_xlabel()
