"""The pipeline's picture: a box for each action, where and when it is; the bubble in its titles is the simulator's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.text import Text

from minifsdp.instruments import plots
from minifsdp.instruments.plots.palette import MICRO_BATCH_COLOURS, PALE, lighter
from minifsdp.pipeline.actions import Action
from minifsdp.pipeline.schedules.interleaved import interleaved
from minifsdp.pipeline.schedules.one_f_one_b import one_f_one_b
from minifsdp.pipeline.schedules.zero_bubble import zero_bubble
from minifsdp.pipeline.simulate import Simulation, simulate

UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}


def step(order: Any, ranks: int, micros: int, *more: int) -> Simulation:
    return simulate([list(order(rank, ranks, micros, *more)) for rank in range(ranks)], UNITS)


def boxes(axes: Axes) -> list[tuple[int, float, float, str]]:
    """Rank, beginning, length and colour of each box, without the lanes under them."""
    drawn = [(round(p.get_y() + p.get_height() / 2), p.get_x(), p.get_width(), p) for p in axes.patches]  # type: ignore[attr-defined]
    found = [(rank, left, width, to_hex(p.get_facecolor()).upper()) for rank, left, width, p in drawn]
    return [each for each in found if each[3] != PALE]


def test_a_box_for_each_action_in_the_colour_of_its_micro_batch() -> None:
    simulated = step(zero_bubble, 2, 3)
    picture = plots.pipeline({"ZB-H1": simulated}, title="t", says="s", predicted={"ZB-H1": 0.1})
    _, axes = picture.figure.axes  # the first is the legend's
    tones = {"F": 0.62, "I": 0.0, "W": -0.4}
    expected = [
        (rank, start, end - start, lighter(MICRO_BATCH_COLOURS[action.micro], tones[action.kind]))
        for rank, row in enumerate(simulated.rows)
        for action, start, end in row
    ]
    assert boxes(axes) == expected
    assert [text.get_text() for text in axes.texts] == [str(a.micro) for actions in simulated.plan for a in actions]
    assert axes.get_title(loc="left") == "ZB-H1: 10 units of time, bubble 10.0%, 10.0% by the formula"
    assert "idle share of all ranks' time, over the whole step" in axes.get_xlabel()
    assert picture.data == {"ZB-H1": {"length": 10, "bubble": pytest.approx(0.1)}}


def test_a_second_stage_is_underlined() -> None:
    simulated = step(interleaved, 2, 2, 2)
    _, axes = plots.pipeline({"interleaved": simulated}, title="t", says="s").figure.axes
    second = [action for actions in simulated.plan for action in actions if action.stage >= 2]
    assert len(axes.lines) == len(second) > 0


def test_steps_by_the_clock_are_in_milliseconds_from_their_first_action_and_leave_no_data() -> None:
    rows = [[(Action(0, "F", 0), 7.5, 7.75), (Action(0, "B", 0), 8.0, 8.5)], [(Action(1, "F", 0), 7.75, 8.0)]]
    picture = plots.pipeline({"simulated": step(one_f_one_b, 2, 2), "clock": rows}, title="t", says="s")
    _, above, below = picture.figure.axes
    assert (above.get_xlabel(), below.get_xlabel().partition(";")[0]) == ("units of time", "ms")
    assert [each[:3] for each in boxes(below)] == [(0, 0, 250), (0, 500, 500), (1, 250, 250)]
    assert below.get_title(loc="left") == "clock: 1,000 ms, bubble 50.0%"
    assert set(picture.data) == {"simulated"}


@pytest.mark.parametrize("words", [1, 14, 28, 42])
def test_the_legend_is_below_the_title_and_above_the_lanes_whatever_their_lengths(words: int) -> None:
    steps = {"1F1B": step(one_f_one_b, 4, 8), "ZB-H1": step(zero_bubble, 4, 8), "v = 2": step(interleaved, 4, 8, 2)}
    figure = plots.pipeline(steps, title=" ".join(["finding"] * words), says="s", lab="14").figure
    figure.draw_without_rendering()
    strip, first, *_ = figure.axes
    legend = strip.get_legend()
    assert legend is not None
    (heading,) = (text for text in figure.findobj(Text) if text.get_text().startswith("finding"))
    (subtitle,) = (text for text in figure.texts if text.get_text() == figure.get_label())
    shown = legend.get_window_extent()
    assert len(legend.get_texts()) == 5
    assert first.get_tightbbox().y1 <= shown.y0
    assert shown.y1 <= min(text.get_window_extent().y0 for text in (heading, subtitle))
    assert 0 <= shown.x0 < shown.x1 <= figure.bbox.x1


def test_equal_steps_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        plots.pipeline_figure({"1F1B": step(one_f_one_b, 4, 24)}, tmp_path / name, "title")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
