"""`minifsdp ladder --axis pipeline`: the run as a user has it, from the record that it leaves."""

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
    explorer_in,
    record_in,
)

from minifsdp.course.ladder import run as ladder
from minifsdp.course.ladder.measure import Settings
from minifsdp.recipe import MICROS

ALL = ["alone", "naive", "gpipe", "1f1b", "interleaved", "zb-h1", "1f1b-ddp", "1f1b-fsdp2"]
WIDTH, CONTEXT, BATCH = 24, 12, 16


def settings_on(ranks: int, **given: Any) -> Settings:
    sizes: dict[str, Any] = {"layers": 2 * ranks, "width": WIDTH, "context": CONTEXT, "steps": 2, "batch": BATCH}
    return Settings.on("pipeline", ranks=ranks, **{**sizes, **given})


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 4])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ladder.Request, Path]:
    out = tmp_path_factory.mktemp("ladder")
    (out / "timeline.png").write_text("of another ladder")
    return climb(settings_on(request.param), out), out


@pytest.fixture(scope="module")
def record(run: tuple[ladder.Request, Path]) -> dict[str, Any]:
    return record_in(run[1])


def test_the_rungs_that_so_many_ranks_can_climb(run: tuple[ladder.Request, Path], record: dict[str, Any]) -> None:
    there = len(ALL) if record["ranks"] == 4 else -2
    assert_climbed(*run, ALL[:there], ALL[there:], "pipeline.png")


def test_losses_equal_one_process(record: dict[str, Any]) -> None:
    assert_losses_equal_one_process(record)


def test_bytes_are_as_predicted_on_every_rank(record: dict[str, Any]) -> None:
    assert_bytes_are_as_predicted_on_every_rank(record)


def test_peaks_are_bounded_on_every_rank(run: tuple[ladder.Request, Path], record: dict[str, Any]) -> None:
    assert_peaks_are_bounded_on_every_rank(run[0].settings, record)


def test_what_each_rung_frees(record: dict[str, Any]) -> None:
    held = {rung["name"]: rung["bytes"][0] for rung in record["rungs"]}
    assert held["naive"]["parameters"] < held["alone"]["parameters"]
    ids = 8 * CONTEXT * (MICROS * record["ranks"] - 1)  # positions, of each micro-batch
    assert held["gpipe"]["activations"] == held["naive"]["activations"] + ids, "micro-batches alone free nothing"
    assert held["1f1b"]["activations"] < held["interleaved"]["activations"] < held["gpipe"]["activations"]
    if "1f1b-fsdp2" in held:
        assert held["1f1b-fsdp2"]["parameters"] < 0.6 * held["1f1b-ddp"]["parameters"]
        assert held["1f1b-fsdp2"]["unsharded_peak"] > held["1f1b-fsdp2"]["parameters"]


def test_messages_of_rank_0(record: dict[str, Any]) -> None:
    """Activations up; with two stages on a rank, the last rank's second stage sends its gradients here, too."""
    ranks = record["ranks"]
    micros = MICROS * ranks
    calls = {rung["name"]: {op: each["calls"] for op, each in rung["collectives"].items()} for rung in record["rungs"]}
    assert calls["alone"] == {}
    assert calls["naive"] == {"send": 1, "recv": 1, "broadcast": 1}
    for name in ("gpipe", "1f1b", "zb-h1"):
        assert calls[name] == {"send": micros, "recv": micros, "broadcast": 1}
    assert calls["interleaved"] == {"send": 3 * micros, "recv": 3 * micros, "broadcast": 1}
    if ranks == 4:
        once = {"send": 4, "recv": 4, "broadcast": 1}
        assert calls["1f1b-ddp"] == once | {"all_reduce": 1}
        units = 1 + 4  # the embeddings, and half of the blocks
        assert calls["1f1b-fsdp2"] == once | {"all_gather": units, "reduce_scatter": units}


def test_bubbles_by_the_formulas(record: dict[str, Any]) -> None:
    p = record["ranks"]
    bubbles = {rung["name"]: rung["bubble"] for rung in record["rungs"] if "bubble" in rung}
    expected = {"naive": (p - 1) / p, "gpipe": (p - 1) / (3 * p - 1), "interleaved": (p - 1) / (5 * p - 1)}
    for name, formula in expected.items():
        assert bubbles[name][1] == pytest.approx(formula)
    assert all(0 < measured < 1 for measured, _ in bubbles.values())
    assert "alone" not in bubbles


def test_the_explorer_names_the_units_of_all_ranks(run: tuple[ladder.Request, Path], record: dict[str, Any]) -> None:
    data = explorer_in(run[1])
    units = {rung["name"]: rung["variants"][0]["units"] for rung in data["rungs"]}
    p = record["ranks"]
    assert units["alone"] == ["root", *(f"blocks.{n}" for n in range(2 * p))]
    of_rank = [[f"blocks.{2 * rank + place}" for rank in range(p)] for place in range(2)]
    assert units["1f1b"] == ["root", *(" | ".join(names) for names in of_rank)]


def test_the_table_fits_and_ticks(record: dict[str, Any]) -> None:
    assert_the_table_fits_and_ticks(record)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"batch": 12}, "--batch 12 cannot be shared equally by 8 micro-batches: choose a multiple of 8"),
        ({"layers": 6, "rungs": ("interleaved",)}, "6 blocks make no 8 stages: choose 8 or more layers"),
        ({"layers": 3, "rungs": ("1f1b", "gpipe")}, "3 blocks make no 4 stages"),
    ],
)
def test_what_cannot_be_is_refused_before_it_starts(given: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        ladder.check(settings_on(4, **given), "cpu", tmp_path)
