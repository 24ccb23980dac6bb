"""The pictures: as many panels as rungs, what is drawn is what was given, equal bytes for equal input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from minifsdp.course.plots import LANE_COLOURS, REDUCTION_COLOUR, TAG_COLOURS, memory_figure, timeline_figure
from minifsdp.course.timeline import Span

MIB = 2**20
PNG = b"\x89PNG\r\n\x1a\n"


def rung(name: str, scale: int) -> dict[str, Any]:
    """Parameters, an unsharded unit that comes and goes, gradients that stay; peak 8, 9, 10, ... MiB."""
    tags = {tag: [0, 0, 0, 0] for tag in TAG_COLOURS}
    tags["parameters"] = [4 * MIB * scale] * 4
    tags["unsharded"] = [0, 3 * MIB * scale, 3 * MIB * scale, 0]
    tags["gradients"] = [0, 0, MIB * scale, MIB * scale]
    held = {"parameters": 4 * MIB * scale, "gradients": MIB * scale, "optimizer": 0}
    highest = {"unsharded_peak": 3 * MIB * scale, "gradients_peak": MIB * scale}
    return {
        "name": name,
        "curve": {"tags": tags, "marks": [[0, "forward"], [2, "backward"], [3, "optimizer"]]},
        "bytes": [held | highest | {"peak": 8 * MIB * scale}, held | highest | {"peak": 7 * MIB * scale}],
        "predicted": [held | highest, held | highest],
    }


RUNGS = [rung("ddp", 3), rung("zero2", 2), rung("fsdp", 1)]
SPANS = [
    Span("phase", "forward", 0.0, 0.1),
    Span("compute", "addmm", 0.0, 0.06),
    Span("communication", "all_gather 1.0 MiB", 0.05, 0.04),
    Span("wait", "all_gather 1.0 MiB", 0.06, 0.03),
]
TIMELINES = [("fsdp", SPANS, 0.25), ("fsdp-prefetch", SPANS[:3], 0.75), ("alone", SPANS[1:2], None)]


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Figure:
    return memory_figure(RUNGS, tmp_path_factory.mktemp("memory") / "memory.png")


@pytest.fixture(scope="module")
def timeline(tmp_path_factory: pytest.TempPathFactory) -> Figure:
    return timeline_figure(TIMELINES, tmp_path_factory.mktemp("timeline") / "timeline.png")


def test_a_panel_for_each_rung_and_one_for_the_bars(memory: Figure) -> None:
    *panels, bars = memory.axes
    assert [panel.get_title(loc="left") for panel in panels] == ["ddp", "zero2", "fsdp"]
    assert [label.get_text() for label in bars.get_xticklabels()] == ["ddp", "zero2", "fsdp"]
    assert len({panel.get_ylim() for panel in panels}) == 1  # to be compared, all must have one axis
    assert panels[0].get_ylim()[1] > 24  # which holds the highest


def test_curves_are_stacked_by_tag_in_the_courses_order_and_colours(memory: Figure) -> None:
    for panel, given in zip(memory.axes, RUNGS, strict=False):
        assert [to_hex(area.get_facecolor()[0]).upper() for area in panel.collections] == list(TAG_COLOURS.values())
        bottom = np.zeros(4)
        for area, tag in zip(panel.collections, TAG_COLOURS, strict=True):
            top = bottom + np.array(given["curve"]["tags"][tag]) / MIB
            drawn = area.get_paths()[0].vertices
            assert set(drawn[:, 1]) <= {*top, *bottom}
            assert drawn[:, 1].max() == max(*top, *bottom)
            bottom = top
        assert {text.get_text() for text in panel.texts} == {"forward", "backward", "optimizer"}
        assert [line.get_xdata()[0] for line in panel.lines] == [0, 2, 3]


def test_bars_are_the_peaks_by_tag_and_diamonds_the_predictions(memory: Figure) -> None:
    bars = memory.axes[-1]
    heights = [round(patch.get_height(), 6) for patch in bars.patches]
    at_peak = [4.0, 3.0, 1.0, 0.0, 0.0, 0.0]  # the tags in order, when unsharded and gradients are both held
    at_rest, unsharded, gradients = [4.0, 1.0, 0.0], [3.0], [1.0]
    each = at_peak + at_rest + unsharded + gradients
    assert heights == [3 * h for h in each] + [2 * h for h in each] + each
    assert [line.get_ydata()[0] for line in bars.lines] == [15, 9, 3, 10, 6, 2, 5, 3, 1]
    assert [text.get_text() for text in bars.texts] == ["24.0", "16.0", "8.0"]  # of the rank that holds most


def test_the_title_says_what_is_found(memory: Figure, timeline: Figure) -> None:
    assert memory.get_suptitle() == "Peak memory of a rank: 24.0 MiB with ddp, 8.0 MiB with fsdp"
    assert timeline.get_suptitle() == "Communication under compute: 25% with fsdp, 75% with fsdp-prefetch"


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (4, 1), (6, 2), (10, 2)])
def test_any_number_of_rungs_has_room(count: int, rows: int, tmp_path: Path) -> None:
    figure = memory_figure([rung(f"rung {i}", 1) for i in range(count)], tmp_path / "memory.png")
    assert len(figure.axes) == count + 1
    tops = {round(axes.get_position().y1, 2) for axes in figure.axes[:-1]}
    assert len(tops) == rows


def test_a_row_for_each_rung_with_its_lanes_from_compute_down(timeline: Figure) -> None:
    rows = timeline.axes
    assert [row.get_title(loc="left") for row in rows] == [
        "fsdp: 100 ms, 25% of communication under compute",
        "fsdp-prefetch: 100 ms, 75% of communication under compute",
        "alone: 60 ms, no communication",
    ]
    lanes = [[label.get_text() for label in row.get_yticklabels()] for row in rows]
    assert lanes == [["wait", "communication", "compute"], *[["communication", "compute"]] * 2]
    assert {row.get_xlim() for row in rows} == {(0.0, 100.0)}


def test_bars_are_the_spans_in_milliseconds_and_the_lanes_colours(timeline: Figure) -> None:
    row = timeline.axes[0]
    drawn = {}
    for height, lane in zip(row.get_yticks(), row.get_yticklabels(), strict=True):
        (bars,) = [
            c for c in row.collections if c.get_paths() and abs(c.get_paths()[0].vertices[:, 1].mean() - height) < 0.3
        ]
        corners = bars.get_paths()[0].vertices
        drawn[lane.get_text()] = (corners[:, 0].min(), corners[:, 0].max())
        assert to_hex(bars.get_facecolor()[0]).upper() == LANE_COLOURS[lane.get_text()]
    assert drawn["compute"] == pytest.approx((0, 60))
    assert drawn["communication"] == pytest.approx((50, 90))
    assert drawn["wait"] == pytest.approx((60, 90))


def test_gathers_and_reductions_are_told_apart(tmp_path: Path) -> None:
    spans = [
        Span("communication", "all_gather 1.0 MiB", 0.0, 0.5),
        Span("communication", "reduce_scatter 1.0 MiB", 0.5, 0.09),
        Span("communication", "all_reduce 1.0 MiB", 0.7, 0.01),
        Span("compute", "addmm", 0.0, 1.0),
    ]
    figure = timeline_figure([("fsdp", spans, 1.0)], tmp_path / "timeline.png")
    drawn = [[to_hex(colour).upper() for colour in bars.get_facecolor()] for bars in figure.axes[0].collections]
    assert [LANE_COLOURS["communication"], REDUCTION_COLOUR, REDUCTION_COLOUR] in drawn
    assert "reduction" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    memory_figure(RUNGS[:1], tmp_path / "a.png")
    memory_figure(RUNGS[:1], tmp_path / "b.png")
    timeline_figure(TIMELINES[:1], tmp_path / "c.png")
    timeline_figure(TIMELINES[:1], tmp_path / "d.png")
    a, b, c, d = ((tmp_path / name).read_bytes() for name in ("a.png", "b.png", "c.png", "d.png"))
    assert a.startswith(PNG)
    assert c.startswith(PNG)
    assert a == b
    assert c == d
