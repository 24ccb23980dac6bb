"""The pictures: as many panels as rungs, what is drawn is what was given, equal bytes for equal input."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from minifsdp.comm import Call
from minifsdp.course.ladder.axes import AXES
from minifsdp.course.workshop import yours
from minifsdp.instruments import plots
from minifsdp.instruments.machine import Block, Hardware, Program, Run, Segment, measured, replay
from minifsdp.instruments.machine.program import Allocate, Buffer, Free, Issue, Kernel, Mark, RecordStream, Wait
from minifsdp.instruments.machine.versus import Versus
from minifsdp.instruments.plots import Timeline, memory_figure, memory_steps, timeline_figure
from minifsdp.instruments.plots.palette import (
    BLOCK_COLOURS,
    COLLECTIVE_COLOURS,
    EARLIER_COLOURS,
    LANE_COLOURS,
    TAG_COLOURS,
)
from minifsdp.instruments.plots.picture import in_words
from minifsdp.instruments.plots.runs import step_of_run
from minifsdp.instruments.plots.steps import memory_frames
from minifsdp.instruments.plots.style import unit_for
from minifsdp.instruments.watch.timeline import Span

MIB = 2**20
PNG = b"\x89PNG\r\n\x1a\n"


def rung(name: str, scale: int, group: str = "data parallel") -> dict[str, Any]:
    """Parameters, an unsharded unit that comes and goes, gradients that stay; peak 8, 9, 10, ... MiB."""
    tags = {tag: [0, 0, 0, 0] for tag in TAG_COLOURS}
    tags["parameters"] = [4 * MIB * scale] * 4
    tags["unsharded"] = [0, 3 * MIB * scale, 3 * MIB * scale, 0]
    tags["gradients"] = [0, 0, MIB * scale, MIB * scale]
    held = {"parameters": 4 * MIB * scale, "gradients": MIB * scale, "optimizer": 0}
    highest = {"unsharded_peak": 3 * MIB * scale, "gradients_peak": MIB * scale}
    return {
        "name": name,
        "adds": f"what {name} adds",
        "group": group,
        "curve": {"tags": tags, "marks": [[0, "forward"], [2, "backward"], [3, "optimizer"]]},
        "bytes": [held | highest | {"peak": 8 * MIB * scale}, held | highest | {"peak": 7 * MIB * scale}],
        "predicted": [held | highest, held | highest],
        "peak_at_most": [9 * MIB * scale, 8 * MIB * scale],
    }


RUNGS = [rung("ddp", 3), rung("zero2", 2), rung("fsdp", 1)]
SPANS = [
    Span("phase", "forward", 0.0, 0.1),
    Span("compute", "addmm", 0.0, 0.06),
    Span("communication", "all_gather 1.0 MiB", 0.05, 0.04),
    Span("wait", "all_gather 1.0 MiB", 0.06, 0.03),
]
TIMELINES = [
    Timeline("fsdp", SPANS, 0.25),
    Timeline("fsdp-prefetch", SPANS[:3], 0.75),
    Timeline("alone", SPANS[1:2], None),
]


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Figure:
    return memory_figure(RUNGS, tmp_path_factory.mktemp("memory") / "memory.png")


@pytest.fixture(scope="module")
def timeline(tmp_path_factory: pytest.TempPathFactory) -> Figure:
    return timeline_figure(TIMELINES, tmp_path_factory.mktemp("timeline") / "timeline.png")


def test_all_pictures_are_there_and_none_of_them_is_imported_before_it_is_asked_for() -> None:
    program = "import sys; from minifsdp.instruments import plots; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert all(getattr(plots, name) is not None for name in plots.__all__)
    with pytest.raises(AttributeError, match="no attribute 'picture_of_nothing'"):
        _ = plots.picture_of_nothing


def test_a_panel_for_each_rung_and_one_for_each_quantity(memory: Figure) -> None:
    peaks, panels = memory.axes[0], memory.axes[4:]
    assert [panel.get_title(loc="left") for panel in panels] == ["ddp", "zero2", "fsdp"]
    assert [label.get_text() for label in peaks.get_yticklabels()] == ["ddp", "zero2", "fsdp"]
    assert {axes.get_ylim() for axes in memory.axes[:4]} == {peaks.get_ylim()}, "the names are those of all bars"
    assert peaks.yaxis_inverted(), "the first rung is on top"
    assert len({panel.get_ylim() for panel in panels}) == 1  # to be compared, all must have one axis
    assert panels[0].get_ylim()[1] > 24  # which holds the highest


def test_curves_are_stacked_by_tag_in_the_courses_order_and_colours(memory: Figure) -> None:
    for panel, given in zip(memory.axes[4:], RUNGS, strict=True):
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
    peaks, *predicted = memory.axes[:4]
    at_peak = [4.0, 3.0, 1.0, 0.0, 0.0, 0.0]  # the tags in order, when unsharded and gradients are both held
    at_rest, unsharded, gradients = [4.0, 1.0, 0.0], [3.0], [1.0]
    for axes, each in zip((peaks, *predicted), (at_peak, at_rest, unsharded, gradients), strict=True):
        widths = [round(patch.get_width(), 6) for patch in axes.patches]
        assert widths == [3 * w for w in each] + [2 * w for w in each] + each
    marks = [[line.get_xdata()[0] for line in axes.lines] for axes in (peaks, *predicted)]
    assert marks == [[27, 18, 9], [15, 10, 5], [9, 6, 3], [3, 2, 1]], "of the peak, a bound"
    assert [text.get_text() for text in peaks.texts] == ["24.0", "16.0", "8.0"]  # of the rank that holds most


def test_the_title_says_what_is_found(memory: Figure, timeline: Figure) -> None:
    assert memory.get_suptitle() == "Peak memory of a rank: 24.0 MiB with ddp, 8.0 MiB with fsdp"
    assert timeline.get_suptitle() == "Communication under compute: 25% with fsdp, 75% with fsdp-prefetch"


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (4, 1), (6, 2), (10, 2)])
def test_any_number_of_rungs_has_room(count: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figure.get_layout_engine().execute(figure))
    figure = memory_figure([rung(f"rung {i}", 1) for i in range(count)], "nowhere")
    assert len(figure.axes) == count + 4
    tops = {round(axes.get_position().y1, 2) for axes in figure.axes[4:]}
    assert len(tops) == rows


def test_groups_of_rungs_have_headings_and_stand_apart(tmp_path: Path) -> None:
    rungs = [
        rung(name, 1, group) for name, group in [("ddp", "data"), ("fsdp", "data"), ("tp", "tensor"), ("3d", "all")]
    ]
    frame = next(memory_frames(rungs)).axes[0]
    for axes in (memory_figure(rungs, tmp_path / "a.png").axes[0], frame):
        names = {
            label.get_text(): place for place, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
        }
        headings = {text.get_text(): text.get_position()[1] for text in axes.texts}
        order = sorted(
            [*names.items(), *((name, at) for name, at in headings.items() if name.isalpha())], key=itemgetter(1)
        )
        assert [name for name, _ in order] == ["data", "ddp", "fsdp", "tensor", "tp", "all", "3d"]
        assert names["fsdp"] - names["ddp"] == pytest.approx(1)
        assert names["tp"] - names["fsdp"] > 1.5
        bars = {round(bar.get_y() + bar.get_height() / 2, 6) for bar in axes.patches if isinstance(bar, Rectangle)}
        assert bars == {round(at, 6) for at in names.values()}


def test_a_rung_without_a_bound_has_no_diamond_at_its_peak(tmp_path: Path) -> None:
    """On a GPU."""
    rungs = [each | {"peak_at_most": None} for each in RUNGS]
    assert not memory_figure(rungs, tmp_path / "a.png").axes[0].lines
    frame = next(memory_frames(rungs)).axes[0]
    assert not [line for line in frame.lines if len(line.get_xdata())]
    assert "bound" not in frame.get_title(loc="left")


def test_the_animated_ladder_starts_with_its_end_and_then_adds_rung_after_rung(tmp_path: Path) -> None:
    scales = {"ddp": 3, "zero2": 1, "fsdp": 2}
    rungs = [rung(name, scale) for name, scale in scales.items()]
    memory_steps(rungs, tmp_path / "a.gif")
    memory_steps(rungs, tmp_path / "b.gif")
    assert (tmp_path / "a.gif").read_bytes() == (tmp_path / "b.gif").read_bytes()
    with Image.open(tmp_path / "a.gif") as image:
        assert image.n_frames == 1 + len(rungs)  # type: ignore[attr-defined]
    titles = [
        "One model, one step, 3 ways: up to 67% less memory",
        "ddp: 24.0 MiB",
        "zero2: 8.0 MiB, 67% less than ddp",
        "fsdp: 16.0 MiB, 33% less than ddp",
    ]
    below = ["From 24.0 MiB with ddp to 8.0 MiB with zero2", *(f"What {name} adds" for name in scales)]
    for figure, title, says, count, step in zip(
        memory_frames(rungs), titles, below, (3, 1, 2, 3), (None, 0, 1, 2), strict=True
    ):
        assert figure.get_suptitle() == title
        assert says in [text.get_text() for text in figure.texts]
        axes = figure.axes[0]
        bars = [bar for bar in axes.patches if isinstance(bar, Rectangle) and bar.get_width() and bar.get_visible()]
        ends = {round(bar.get_y() + bar.get_height() / 2): bar.get_x() + bar.get_width() for bar in bars}
        assert ends == dict(list(enumerate([24.0, 8.0, 16.0]))[:count])
        assert [text.get_text() for text in axes.texts if text.get_visible()] == ["24.0", "8.0", "16.0"][:count]
        names = axes.get_yticklabels()
        assert [name.get_text() for name in names] == ["ddp", "zero2", "fsdp"]
        assert [name.get_fontweight() == "bold" for name in names] == [row == step for row in range(3)]
        (curves,) = axes.child_axes
        assert curves.get_visible() == (step is not None)
        shown = [area for area in curves.collections if area.get_visible()]
        highest = max((area.get_paths()[0].vertices[:, 1].max() for area in shown), default=0)
        assert highest == (0 if step is None else [24.0, 8.0, 16.0][step]), "the step of the rung that is added"


@pytest.mark.parametrize("axis", AXES)
def test_every_rung_s_headline_and_name_fit(axis: str) -> None:
    rungs = [
        rung(name, 90 + scale) | {"adds": each.adds} for scale, (name, each) in enumerate(AXES[axis].rungs.items(), 1)
    ]
    for figure in memory_frames(rungs):
        for text in figure.texts:
            assert text.get_window_extent().x1 < figure.bbox.width, text.get_text()
        assert min(name.get_window_extent().x0 for name in figure.axes[0].get_yticklabels()) > 0


@pytest.mark.parametrize(("scales", "says"), [((2, 3), "50% more than"), ((2, 2), "as much as")])
def test_a_headline_says_what_more_memory_is(scales: tuple[int, int], says: str) -> None:
    *_, last = memory_frames([rung(name, scale) for name, scale in zip(("a", "b"), scales, strict=True)])
    assert last.get_suptitle() == f"b: {8 * scales[1]:.1f} MiB, {says} a"


def test_a_rung_is_shown_long_enough_to_be_read_and_the_first_frame_longer(tmp_path: Path) -> None:
    memory_steps([rung(f"rung {i}", 1) for i in range(4)], tmp_path / "a.gif")
    with Image.open(tmp_path / "a.gif") as image:
        lengths = []
        for frame in range(image.n_frames):  # type: ignore[attr-defined]
            image.seek(frame)
            lengths.append(image.info["duration"])
    first, *others = lengths
    assert first > max(others)
    assert all(1200 <= length <= 1500 for length in others)


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
            c
            for c in row.collections
            if isinstance(c, PolyCollection)
            and c.get_paths()
            and abs(c.get_paths()[0].vertices[:, 1].mean() - height) < 0.3
        ]
        corners = bars.get_paths()[0].vertices
        drawn[lane.get_text()] = (corners[:, 0].min(), corners[:, 0].max())
        assert to_hex(bars.get_facecolor()[0]).upper() == LANE_COLOURS[lane.get_text()]
    assert drawn["compute"] == pytest.approx((0, 60))
    assert drawn["communication"] == pytest.approx((50, 90))
    assert drawn["wait"] == pytest.approx((60, 90))


def test_each_collective_has_its_declared_colour(tmp_path: Path) -> None:
    spans = [
        Span("communication", "all_gather 1.0 MiB", 0.0, 0.5),
        Span("communication", "reduce_scatter 1.0 MiB", 0.5, 0.09),
        Span("communication", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 0.7, 0.01),
        Span("compute", "addmm", 0.0, 1.0),
    ]
    figure = timeline_figure([Timeline("fsdp", spans, 1.0)], tmp_path / "timeline.png")
    drawn = [[to_hex(colour).upper() for colour in bars.get_facecolor()] for bars in figure.axes[0].collections]
    assert [*COLLECTIVE_COLOURS.values()][:3] in drawn
    assert {"reduce-scatter", "all-reduce"} <= {text.get_text() for text in figure.legends[0].get_texts()}


def test_a_lane_of_copies_is_drawn_where_there_are_some(tmp_path: Path) -> None:
    spans = [Span("compute", "addmm", 0.0, 1.0), Span("copy", "Memcpy DtoH", 0.5, 0.2)]
    figure = timeline_figure([Timeline("fsdp-offload", spans, None)], tmp_path / "timeline.png")
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["copy", "communication", "compute"]


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


STAGES = {
    "built": {"parameters": 4 * MIB},
    "forward": {"activations": 3 * MIB, "parameters": 4 * MIB, "unsharded": MIB},
    "step": {"parameters": 4 * MIB, "gradients": 0, "optimizer": 8 * MIB},
}
SAYS = "Bars: bytes alive when a stage ended."


def words(figure: Figure) -> list[str]:
    legend = figure.axes[0].get_legend()
    return [text.get_text() for text in legend.get_texts()] if legend is not None else []


def graph(series: Mapping[str, Any], **options: Any) -> plots.Picture:
    return plots.lines(series, xlabel="ranks", ylabel="bytes", title="Ring", says="S.", **options)


class TestStages:
    @pytest.fixture
    def picture(self) -> plots.Picture:
        earlier = {"ddp": {"built": 8 * MIB, "step": 24 * MIB}, "zero1": {"step": 16 * MIB}}
        predicted = {"built": 4 * MIB, "step": 13 * MIB}
        return plots.stages(STAGES, title="Adam decides", says=SAYS, lab="04", predicted=predicted, earlier=earlier)

    def test_bars_are_stacked_in_the_ledgers_order_after_the_greys_of_earlier_rungs(
        self, picture: plots.Picture
    ) -> None:
        axes = picture.figure.axes[0]
        drawn = [(to_hex(bar.get_facecolor()).upper(), round(bar.get_height(), 6)) for bar in axes.patches]
        greys = [EARLIER_COLOURS[2], EARLIER_COLOURS[-1]]  # as different as they can be on white
        own = [[4, 0, 0, 0, 0, 0], [4, 1, 0, 0, 3, 0], [4, 0, 0, 8, 0, 0]]
        before = [[8, 0], [0, 0], [24, 16]]
        assert drawn == [
            (colour, height)
            for stage in range(3)
            for colour, height in zip([*greys, *TAG_COLOURS.values()], before[stage] + own[stage], strict=True)
        ]

    def test_diamonds_are_predicted_and_labels_the_sums(self, picture: plots.Picture) -> None:
        axes = picture.figure.axes[0]
        assert [line.get_ydata()[0] for line in axes.lines] == [4, 13]
        assert [text.get_text() for text in axes.texts] == ["4", "8", "12"]
        assert axes.get_ylabel() == "memory of a rank, MiB"

    @pytest.mark.parametrize(
        ("sizes", "labels"),
        [([1.8, 2.06, 0], ["1.80", "2.06", "0.00"]), ([12.5, 2], ["12.5", "2.0"]), ([100.4, 7.5], ["100", "8"])],
    )
    def test_sums_are_rounded_alike(self, sizes: list[float], labels: list[str]) -> None:
        measured = {str(number): {"parameters": size * MIB} for number, size in enumerate(sizes)}
        axes = plots.stages(measured, title="", says="", ylabel="memory").figure.axes[0]
        assert [text.get_text() for text in axes.texts] == labels
        assert axes.get_ylabel() == "memory, MiB"

    def test_the_legend_names_only_what_is_there_as_stacked(self, picture: plots.Picture) -> None:
        present = ["activations", "optimizer", "unsharded", "parameters"]
        assert words(picture.figure) == ["predicted", *present, "ddp", "zero1"]

    def test_the_text_is_finding_pieces_sentence_and_numbers(self, picture: plots.Picture) -> None:
        head, says, measured, predicted, earlier = repr(picture).splitlines()
        assert re.fullmatch(rf"Adam decides \({yours('04')}\)", head)
        assert says == SAYS
        assert measured.startswith("  measured: built (parameters 4,194,304); forward (parameters 4,194,304; unsharded")
        assert predicted == "  predicted: built 4,194,304; step 13,631,488"
        assert earlier.endswith("zero1 (step 16,777,216)")
        assert picture.data["measured"]["step"] == {"parameters": 4 * MIB, "optimizer": 8 * MIB}

    def test_what_is_unknown_is_named(self) -> None:
        with pytest.raises(ValueError, match="no such tag: weights; choose from parameters, unsharded"):
            plots.stages({"built": {"weights": 1}}, title="", says="")
        with pytest.raises(ValueError, match="no such stage: bulit; choose from built, forward, step"):
            plots.stages(STAGES, title="", says="", predicted={"bulit": 1})
        with pytest.raises(ValueError, match="no such stage: end"):
            plots.stages(STAGES, title="", says="", earlier={"ddp": {"end": 1}})


class TestCurve:
    def test_earlier_outlines_are_stretched_until_marks_meet(self) -> None:
        short, long = rung("", 1)["curve"], rung("", 2)["curve"]
        short["marks"] = [[1, "forward"], [3, "step"]]
        tags = {tag: [value for value in values for _ in range(2)] for tag, values in long["tags"].items()}
        long = {"tags": tags, "marks": [[4, "forward"], [7, "step"]]}
        picture = plots.curve(short, title="", says="", earlier={"ddp": long}, predicted_peak=9 * MIB)
        outline, peak, *moments = picture.figure.axes[0].lines
        assert outline.get_xdata()[[0, 4, 7]].tolist() == [0, 1, 3]
        assert max(outline.get_ydata()) == 16
        assert peak.get_ydata()[0] == 9
        assert [line.get_xdata()[0] for line in moments] == [1, 3]
        assert [text.get_text() for text in picture.figure.axes[0].texts] == ["forward", "step"]
        assert picture.data["at the marks"] == {"forward": 7 * MIB, "step": 5 * MIB}
        assert picture.data["earlier peaks"] == {"ddp": 16 * MIB}

    def test_the_legend_names_only_tags_that_can_be_seen(self) -> None:
        curve = rung("", 1)["curve"]
        seen = words(plots.curve(curve, title="", says="").figure)
        assert seen == ["gradients", "unsharded", "parameters"]
        curve["tags"]["communication"] = [0, 1024, 0, 0]
        assert words(plots.curve(curve, title="", says="").figure) == seen

    def test_names_of_short_stages_stand_on_different_lines_and_empty_stages_have_none(self) -> None:
        marks = [[0, "built"], [1, "forward " + 5 * "of a block "], [2, "backward"], [3, "step"]]
        axes = plots.curve(rung("", 1)["curve"] | {"marks": marks}, title="", says="").figure.axes[0]
        names = [(text.get_text().split()[0], text.get_position()[1]) for text in axes.texts]
        assert names == [("forward", -3), ("backward", -14), ("step", -3)]


class TestQuantities:
    def test_a_row_for_each_timeline_and_no_times_in_the_text(self) -> None:
        picture = plots.timeline({"naive": SPANS, "overlap": SPANS[:3]}, title="Waits", says="Lanes.", lab="04")
        assert len(picture.figure.axes) == 2
        assert picture.figure.axes[0].get_title(loc="left") == "naive: 100 ms, 25% of communication under compute"
        assert words(picture.figure) == ["compute", "all-gather", "host waits"]
        assert re.fullmatch(rf"Waits \({yours('04')}\)\nLanes\.", repr(picture))

    def test_names_of_short_phases_stand_over_each_other_and_none_stands_out(self) -> None:
        begins = {"forward": 0.0, "backward": 0.002, "optimizer": 0.099}
        spans = [Span("phase", name, start, 0.001) for name, start in begins.items()]
        row = plots.timeline({"fsdp": [*spans, SPANS[1]]}, title="", says="").figure.axes[0]
        places = {text.get_text(): (text.get_position()[1], text.get_ha()) for text in row.texts}
        assert places == {"forward": (2.0, "left"), "backward": (1.55, "left"), "optimizer": (1.55, "right")}
        assert row.get_ylim()[1] == pytest.approx(2.55)

    def test_expected_points_are_unjoined_and_share_a_marker_with_one_name(self) -> None:
        ranks = [1, 2, 4]
        series = {"ring": (ranks, [0, 1, 1.5]), "naive": (ranks, [0, 2, 6])}
        picture = graph(series, expected=series | {"model": (ranks, [0, 1, 3])}, source="the paper")
        lines = picture.figure.axes[0].lines
        assert [line.get_marker() for line in lines] == ["o", "o", "D", "D", "s"]
        assert [line.get_linestyle() for line in lines] == ["-"] * 2 + ["None"] * 3
        assert words(picture.figure) == ["ring", "naive", "the paper", "model"]
        assert "  measured: ring (x [1 2 4]; y [0 1 1.5]); naive (x [1 2 4]; y [0 2 6])" in repr(picture)

    def test_expected_points_of_several_other_names_have_a_marker_each(self) -> None:
        expected = {name: ([1, 2], [n, n + 1]) for n, name in enumerate(("p = 2", "p = 4", "p = 8"))}
        figure = graph({"ring": ([1, 2], [1, 3])}, expected=expected).figure
        assert [line.get_marker() for line in figure.axes[0].lines] == ["o", "D", "s", "^"]
        assert words(figure) == ["ring", *expected]

    def test_dashes_join_what_reaches_beyond_the_measured_and_levels(self) -> None:
        expected = {"rows": ([1, 2, 64], [1, 2, 64]), "budget": ([1, 4], [8, 8])}
        lines = graph({"rows": ([1, 2, 4], [1, 2, 4])}, expected=expected).figure.axes[0].lines
        assert [(line.get_marker(), line.get_linestyle()) for line in lines] == [("o", "-"), ("D", "--"), ("", "--")]

    def test_stairs_keep_a_value_until_the_next(self) -> None:
        lines = graph({"a": ([0, 1], [0, 1]), "b": ([0, 1], [0, 1])}, stairs=("b",)).figure.axes[0].lines
        assert [line.get_drawstyle() for line in lines] == ["default", "steps-post"]

    @pytest.mark.parametrize(
        ("xs", "ticks"),
        [
            (range(101), list(range(0, 101, 20))),
            ((1, 2, 4, 8, 16, 24, 32, 48, 64), list(range(8, 65, 8))),
            ([x / 20 for x in range(1, 21)], [0.2, 0.4, 0.6, 0.8, 1]),
            ((2, 3, 4), [2, 3, 4]),
        ],
    )
    def test_ticks_are_round_numbers_within_the_data(self, xs: Sequence[float], ticks: list[float]) -> None:
        assert graph({"a": (xs, xs)}).figure.axes[0].get_xticks().tolist() == ticks

    def test_a_logarithmic_axis_has_plain_numbers_and_no_point_at_zero(self) -> None:
        xs = [2, 3, 4, 6, 7, 8, 12, 16, 24, 1000]
        axes = graph({"a": (xs, [0.00001, 0, *[1.0] * 8])}, logx=True, logy=True).figure.axes[0]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["3", "8", "24", "1,000"]
        assert axes.yaxis.get_major_formatter()(0.00001, 0) == "0.00001"
        assert np.isnan(axes.lines[0].get_ydata()).tolist() == [False, True, *[False] * 8]

    def test_a_line_at_nought_is_not_hidden_by_the_axis(self) -> None:
        assert graph({"a": ([1, 2], [0, 0]), "b": ([1, 2], [1, 2])}).figure.axes[0].get_ylim()[0] < 0
        assert graph({"a": ([1, 2], [1, 2])}).figure.axes[0].get_ylim()[0] == 0


def program(steps: int = 2) -> Program:
    """A gather, two kernels of a block and a reduction; a parameter that stays, a buffer freed for another stream."""
    buffers = {0: Buffer("root shard", 4 * MIB, "parameters", "root")}
    instructions: list[Any] = [Allocate(0, 0)]
    for step in range(steps):
        buffer = step + 1
        buffers[buffer] = Buffer("blocks.3 parameters", 12 * MIB, "unsharded", "blocks.3")
        gather, reduce = (Call(op, op, "0", 2 * step + i, 8 * MIB, 2) for i, op in enumerate(("gather", "reduce")))
        kernel = Kernel("mm", "blocks.3", 0, (buffer,), (), 0, 0, 4, 0.01)
        forward = [Allocate(buffer, 1), Issue(gather, "blocks.3", 1, (), (buffer,)), Wait(gather, 0), kernel, kernel]
        backward = [Issue(reduce, "blocks.3", 0, (buffer,), ()), RecordStream(buffer, 0), Free(buffer)]
        instructions += [Mark("step"), Mark("forward"), *forward, Mark("backward"), *backward, Mark("optimizer")]
        instructions += [Wait(reduce, 0), kernel._replace(unit="root", reads=(0,), writes=(0,)), Mark("rest")]
    return Program(instructions, buffers)


PAPER = Hardware("paper 1", {4: 1e12}, 1e12, 32 * MIB, 1e-3, 1e9)


@pytest.fixture
def run() -> Run:
    return replay(program(), measured(program(), 1e-3, 1e9, runs_ahead=True))


class TestRuns:
    def test_bars_bear_their_units_and_the_host_its_phase(self, run: Run) -> None:
        picture = plots.timeline({"overlap": run}, title="", says="")
        row = picture.figure.axes[0]
        assert [label.get_text() for label in row.get_yticklabels()] == ["host", "communication", "compute"]
        written = {text.get_text() for text in row.texts}
        assert {"3", "forward", "backward", "optimizer"} <= written
        assert "model, not measured: this machine, if its host ran ahead" in repr(picture)

    def test_kernels_of_a_unit_are_one_bar_and_collectives_are_not_joined(self) -> None:
        spans = [Span("compute", "blocks.1", start, 0.5) for start in (0.0, 0.5)]
        spans += [Span("communication", "all_gather blocks.1", start, 0.5) for start in (0.0, 0.5)]
        row = plots.timeline({"a": spans}, title="", says="", model="paper").figure.axes[0]
        assert [len(bars.get_paths()) for bars in row.collections] == [2, 1]  # from below: communication, compute
        assert [text.get_text() for text in row.texts] == ["1", "1", "1"]

    def test_a_bar_ends_with_its_phase(self) -> None:
        spans = [Span("compute", "blocks.0", start, 0.5) for start in (0.0, 0.5, 1.0)]
        spans += [Span("phase", "forward", 0.0, 1.0), Span("phase", "backward", 1.0, 0.5)]
        row = plots.timeline({"a": spans}, title="", says="", model="paper").figure.axes[0]
        assert len(row.collections[1].get_paths()) == 2

    def test_spans_of_a_real_step_are_not_labelled(self) -> None:
        picture = plots.timeline({"a": [Span("compute", "addmm", 0.0, 1.0)]}, title="", says="S.")
        assert not picture.figure.axes[0].texts
        assert "model" not in repr(picture)

    def test_rows_on_paper_are_named_where_others_are_measured(self, run: Run) -> None:
        picture = plots.timeline({"measured": SPANS, "if": run}, title="T", says="")
        assert repr(picture).startswith("T (model, not measured: this machine, if its host ran ahead (if))")

    def test_waiting_is_drawn_in_the_hosts_lane(self) -> None:
        spans = [
            Span("compute", "a", 0.0, 1.0),
            Span("host", "forward", 0.0, 1.0),
            Span("wait", "host waits", 0.2, 0.6),
        ]
        row = plots.timeline({"a": spans}, title="", says="", model="paper").figure.axes[0]
        assert [label.get_text() for label in row.get_yticklabels()] == ["host", "communication", "compute"]
        colours = [to_hex(colour).upper() for colour in row.collections[0].get_facecolor()]
        assert colours == [LANE_COLOURS["host"], LANE_COLOURS["wait"]]

    def test_memory_is_drawn_over_the_last_step_of_the_host(self) -> None:
        run = replay(program(), replace(PAPER, capacity=2**40))
        picture = plots.device_memory({"a": run, "b": run}, title="T", says="S.", model="paper")
        rows = picture.figure.axes
        assert len({row.get_ylim() for row in rows}) == len({row.get_xlim() for row in rows}) == 1
        begin = [mark.host for mark in run.marks if mark.name == "step"][-1]
        held = [sample for sample in run.memory if sample.at >= begin]
        low, middle, high = (area.get_paths()[0].vertices for area in rows[0].collections)
        assert low[:, 1].max() == max(sample.allocated for sample in held) / MIB
        assert middle[:, 1].max() == max(sample.active for sample in held) / MIB
        assert high[:, 1].max() == max(sample.reserved for sample in held) / MIB
        assert low[:, 0].max() == pytest.approx((held[-1].at - begin) * 1e3)
        assert "model, not measured: paper" in repr(picture)
        assert picture.data["peak allocated, MiB"]["a"] == max(sample.allocated for sample in held) / MIB

    def test_a_host_that_takes_no_time_has_its_allocations_in_order(self, run: Run) -> None:
        row = plots.device_memory({"a": run}, title="", says="", model="paper").figure.axes[0]
        assert row.get_xlabel().startswith("allocations and frees of all steps, in order")
        assert row.get_xlim() == (0, 4)  # what was there, an allocation and a free in each of two steps

    def test_the_capacity_is_a_line_if_it_is_near_and_retries_are_marks(self, run: Run) -> None:
        near = replay(program(), PAPER)
        row = plots.device_memory({"a": near}, title="", says="", model="paper").figure.axes[0]
        assert [line.get_ydata()[0] for line in row.lines if line.get_linestyle() == "--"] == [32]
        far = plots.device_memory({"a": run}, title="", says="", model="paper").figure.axes[0]
        assert not [line for line in far.lines if line.get_linestyle() == "--"]
        assert near.retries == 1
        picture = plots.device_memory({"a": near}, title="", says="", model="paper")
        assert [line.get_xdata() for line in picture.figure.axes[0].lines if line.get_marker() == "v"]
        assert picture.data["retries"] == {"a": 1}
        assert "1 retry" in picture.figure.axes[0].get_title(loc="left")

    def test_segments_are_drawn_by_stream_and_blocks_by_state(self) -> None:
        large = [
            Block(0, 3 * MIB, 0, False, 3 * MIB),
            Block(3 * MIB, 5 * MIB, 0, False, events=1),
            Block(8 * MIB, 12 * MIB, 0, False),
        ]
        small = [Block(20 * MIB, 2 * MIB, 1, True)]
        segments = [Segment(0, 20 * MIB, 0, False, large), Segment(20 * MIB, 2 * MIB, 1, True, small)]
        picture = plots.blocks({"peak": segments}, title="T", says="S.", model="paper")
        (row,) = picture.figure.axes
        blocks = [box for box in row.patches if box.get_fill()]
        assert [to_hex(box.get_facecolor()).upper() for box in blocks] == [
            *BLOCK_COLOURS.values(),
            BLOCK_COLOURS["free"],
        ]
        assert [(box.get_x(), box.get_width()) for box in blocks] == [(0, 3), (3, 5), (8, 12), (0, 2)]
        assert [label.get_text() for label in row.get_yticklabels()] == ["compute", "stream 1"]
        assert len([box for box in row.patches if not box.get_fill()]) == 2
        expected = {"segments": 2, "reserved, MiB": 22, "in use": 3, "waiting": 5, "free": 14, "largest free": 12}
        assert picture.data["peak"] == expected
        assert "model, not measured: paper" in repr(picture)

    def test_a_long_title_of_a_row_keeps_clear_of_the_legend(self) -> None:
        segments = [Segment(0, 20 * MIB, 0, False, [Block(0, 20 * MIB, 0, False)])]
        row = plots.blocks({"stream 1 wants 3.4 GiB": segments}, title="", says="").figure.axes[0]
        assert max(map(len, row.get_title(loc="left").splitlines())) <= 66

    def test_a_step_that_was_issued_before_it_began_says_so(self) -> None:
        spans = step_of_run(replay(program(8), replace(PAPER, capacity=2**40)))
        (remark,) = [span.name for span in spans if span.lane == "host"]
        assert re.fullmatch(r"issued all of this step \d+ ms before the device began it", remark)

    def test_no_segment_stands_out_or_lies_on_another(self) -> None:
        segments = [
            Segment(100 * number * MIB, size * MIB, number % 3, False, [Block(0, size * MIB, number % 3, False)])
            for number, size in enumerate([20, 2, 40, 64, 2, 2, 20, 20, 30, 12, 12, 12])
        ]
        row = plots.blocks({"a": segments}, title="", says="").figure.axes[0]
        frames = [box.get_bbox() for box in row.patches if not box.get_fill()]
        assert len(frames) == len(segments)
        left, right = row.get_xlim()
        assert all(left <= box.x0 < box.x1 <= right for box in frames)
        assert not [(a, b) for a in frames for b in frames if a is not b and a.overlaps(b)]

    def test_an_allocator_without_segments_is_drawn(self) -> None:
        assert plots.blocks({"a": []}, title="", says="").data["a"]["segments"] == 0

    def test_measured_and_predicted_steps_stand_beside_each_other(self) -> None:
        machine = measured(program(), 1e-3, 1e9)
        result = Versus([0.06, 0.05, 0.09], 0.03, program(), machine)
        picture = plots.versus({"sync": result}, title="T", says="S.")
        axes = picture.figure.axes[0]
        assert [bar.get_height() for bar in axes.patches] == [60]
        dots, diamond = axes.lines
        assert list(dots.get_ydata()) == [60, 50, 90]
        assert diamond.get_ydata()[0] == pytest.approx(1e3 * result.predicted)
        assert axes.texts[0].get_text() == f"60 ms\nmodel {1e3 * result.predicted:.0f} ms"
        assert repr(picture) == "T\nS."  # what varies is not in the text

    def test_equal_runs_give_equal_bytes(self, run: Run) -> None:
        snapshots = run.snapshots
        for draw in (
            lambda: plots.timeline({"a": run}, title="T", says="S."),
            lambda: plots.device_memory({"a": run}, title="T", says="S.", model="paper"),
            lambda: plots.blocks(snapshots, title="T", says="S.", model="paper"),
        ):
            assert draw()._repr_png_() == draw()._repr_png_()


def test_a_picture_shows_itself_the_same_every_time() -> None:
    one, two = (plots.stages(STAGES, title="T", says=SAYS) for _ in range(2))
    assert one._repr_png_() == two._repr_png_() == two._repr_png_()
    assert one._repr_png_().startswith(PNG)
    assert b"Software" not in one._repr_png_()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1234567, "1,234,567"),
        (1.0, "1"),
        (0.123456, "0.1235"),
        (12345678.9, "12,345,679"),
        (np.float64(2.5), "2.5"),
        (np.int64(2500), "2,500"),
        (list(range(20)), "[0 ... 19, 20 numbers]"),
        ({"a": {"b": 1, "c": [2]}}, "a (b 1; c [2])"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_in_words(value: object, said: str) -> None:
    assert in_words(value) == said


@pytest.mark.parametrize(("largest", "name"), [(0, "B"), (1023, "B"), (1024, "KiB"), (MIB, "MiB"), (2**30, "GiB")])
def test_units(largest: int, name: str) -> None:
    assert unit_for(largest)[0] == name
