"""`minifsdp ladder --axis 3d` and `--recipe`: the run as a user has it, from the record that it leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from other_ladders import (
    assert_bytes_are_as_predicted_on_every_rank,
    assert_climbed,
    assert_losses_equal_one_process,
    assert_peaks_are_bounded_on_every_rank,
    assert_the_table_fits_and_ticks,
    climb,
    record_in,
)

from minifsdp.course.ladder import run as ladder
from minifsdp.course.ladder.measure import Settings
from minifsdp.recipe import Recipe

ALL = ["ddp", "3d", "3d-fsdp2"]
OWN = "pp=2,tp=2,order=gpipe"
ANOTHER = "dp=2,tp=2,data=zero1,sequence"


def settings(**given: Any) -> Settings:
    return Settings.on("3d", layers=2, width=24, context=12, batch=16, steps=2, **given)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[ladder.Request, Path]:
    out = tmp_path_factory.mktemp("ladder")
    return climb(settings(ranks=8), out), out


@pytest.fixture(scope="module")
def record(run: tuple[ladder.Request, Path]) -> dict[str, Any]:
    return record_in(run[1])


def test_three_axes_are_a_rung_like_others(run: tuple[ladder.Request, Path], record: dict[str, Any]) -> None:
    assert_climbed(*run, ALL, [], "pipeline.png")
    assert_losses_equal_one_process(record)
    assert_bytes_are_as_predicted_on_every_rank(record)
    assert_peaks_are_bounded_on_every_rank(run[0].settings, record)
    assert_the_table_fits_and_ticks(record)


def test_bytes_by_axis_are_as_predicted_on_every_rank(record: dict[str, Any]) -> None:
    """Of the three axes, tensor parallelism sends most."""
    for rung in record["rungs"]:
        assert rung["sent"] == rung["predicted_sent"], rung["name"]
    assert [set(rung["sent"][0]) for rung in record["rungs"]] == [{"dp"}, {"pp", "dp", "tp"}, {"pp", "dp", "tp"}]
    totals = {axis: sum(op["payload"] for op in ops.values()) for axis, ops in record["rungs"][1]["sent"][0].items()}
    assert totals["tp"] > max(totals["dp"], totals["pp"])


def test_fewer_ranks_make_no_three_axes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--rungs 3d: 4 ranks are no mesh of three axes.*choose 8"):
        ladder.check(settings(ranks=4), "cpu", tmp_path)


def test_recipes_are_climbed_beside_a_rung(tmp_path: Path) -> None:
    """Of two recipes the same ranks divide a layer, and in the first they have some of the layers only."""
    climb(settings(ranks=4).beside(None, [Recipe.parse(OWN), Recipe.parse(ANOTHER)]), tmp_path)
    record = record_in(tmp_path)
    assert [rung["name"] for rung in record["rungs"]] == ["ddp", OWN, ANOTHER]
    assert record["recipes"] == [OWN, ANOTHER]
    assert_losses_equal_one_process(record)
    assert_bytes_are_as_predicted_on_every_rank(record)
    for rung in record["rungs"]:
        assert rung["sent"] == rung["predicted_sent"], rung["name"]


@pytest.mark.parametrize(
    ("recipe", "ranks", "says"),
    [
        (OWN, 8, f"--recipe {OWN}: it is for 4 ranks, not 8: leave --ranks out"),
        ("pp=4", 4, "--recipe pp=4: 2 blocks make no 4 stages: choose 4 or more layers"),
        ("tp=8", 8, "--recipe tp=8: 4 heads cannot be shared by 8 ranks"),
    ],
)
def test_a_recipe_that_does_not_go(tmp_path: Path, recipe: str, ranks: int, says: str) -> None:
    given = settings(ranks=ranks, rungs=("ddp",)).beside(("ddp",), [Recipe.parse(recipe)])
    with pytest.raises(ValueError, match=says):
        ladder.check(given, "cpu", tmp_path)
