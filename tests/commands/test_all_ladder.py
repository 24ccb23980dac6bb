"""`minifsdp ladder --axis all`, whose picture is README's: its rungs and its predictions, without starting a rank."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from minifsdp.course.ladder.axes import AXES
from minifsdp.course.ladder.measure import Settings
from minifsdp.course.ladder.pictures import described
from minifsdp.course.ladder.rungs import ALL_RUNGS, closed_form_setting, sizes_of
from minifsdp.instruments.launch.world import choose_world

README = Path(__file__).parents[2] / "README.md"
RANKS = 8
SETTINGS = Settings.on("all", batch=16)
GROUPS = ["data parallel", "tensor parallel", "pipeline", "two axes", "three axes"]


def test_each_rung_is_another_ladder_s_and_none_is_there_twice() -> None:
    others = [Settings.on(axis, ranks=RANKS) for axis in AXES if axis != "all"]
    recipes = {name: SETTINGS.recipe(name) for name in ALL_RUNGS}
    for name, recipe in recipes.items():
        assert recipe in [settings.recipe(name) for settings in others if name in settings.rungs], name
    assert len({*map(str, recipes.values())}) == len(recipes)


def test_eight_ranks_are_the_default_and_climb_all_rungs() -> None:
    assert SETTINGS.ranks == RANKS
    assert SETTINGS.faults(sizes_of(SETTINGS.model())) == {}
    assert SETTINGS.batch % SETTINGS.rows == 0


def test_the_picture_leads_from_one_axis_to_three_and_shows_the_rank_that_holds_most() -> None:
    def measured(rank: int) -> dict[str, Any]:
        return {name: {"bytes": {"peak": rank % 6}, "curve": rank} for name in ALL_RUNGS}

    record = {"rungs": [{"name": name} for name in ALL_RUNGS]}
    drawn = described(SETTINGS, record, [measured(rank) for rank in range(RANKS)])
    assert [rung["name"] for rung in drawn] == list(ALL_RUNGS)
    assert [group for group, _ in groupby(rung["group"] for rung in drawn)] == GROUPS
    assert {rung["curve"] for rung in drawn} == {5}


def test_the_words_below_the_front_page_s_picture_are_true() -> None:
    """Within the bounds of peaks; to the digit they are compared in tests/tools/test_page_commands.py."""
    sizes, setting = sizes_of(SETTINGS.model()), closed_form_setting(RANKS, choose_world(RANKS, "cpu"))
    places = [replace(setting, rank=rank, batch=SETTINGS.batch) for rank in range(RANKS)]
    bounds = {
        name: max(rung.peak(sizes, place, SETTINGS.limit) for place in places) / 2**20
        for name, rung in ALL_RUNGS.items()
    }
    alt = r"!\[.* on (\d+) rungs: .* from ([\d.]+) MiB with (\S+) to ([\d.]+) MiB with (\S+)\]"
    said = re.search(alt, README.read_text())
    assert said is not None
    rungs, *peaks = said.groups()
    assert int(rungs) == len(ALL_RUNGS)
    for peak, name, furthest in zip(peaks[::2], peaks[1::2], (max, min), strict=True):
        assert name == furthest(bounds, key=lambda each: bounds[each])
        assert bounds[name] / 1.1 <= float(peak) <= bounds[name] + 0.05
