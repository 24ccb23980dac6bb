"""`minifsdp ladder --axis tensor`: the run as a user has it, from the record that it leaves."""

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

ALL = ["ddp", "tp", "tp-sp", "tp-sp-regather", "tp-fsdp2"]
LAYERS, WIDTH, CONTEXT, BATCH = 2, 24, 12, 12


def settings_on(ranks: int, **given: Any) -> Settings:
    return Settings.on("tensor", ranks=ranks, layers=LAYERS, width=WIDTH, context=CONTEXT, steps=2, **given)


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 4])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ladder.Request, Path]:
    out = tmp_path_factory.mktemp("ladder")
    return climb(settings_on(request.param), out), out


@pytest.fixture(scope="module")
def record(run: tuple[ladder.Request, Path]) -> dict[str, Any]:
    return record_in(run[1])


def test_the_rungs_that_so_many_ranks_can_climb(run: tuple[ladder.Request, Path], record: dict[str, Any]) -> None:
    there = len(ALL) if record["ranks"] == 4 else -1
    assert_climbed(*run, ALL[:there], ALL[there:], "timeline.png")
    assert (record["axis"], record["heads"]) == ("tensor", 12)


def test_losses_equal_one_process(record: dict[str, Any]) -> None:
    assert_losses_equal_one_process(record)


def test_bytes_are_as_predicted_on_every_rank(record: dict[str, Any]) -> None:
    assert_bytes_are_as_predicted_on_every_rank(record)


def test_peaks_are_bounded_on_every_rank(run: tuple[ladder.Request, Path], record: dict[str, Any]) -> None:
    assert_peaks_are_bounded_on_every_rank(run[0].settings, record)


def test_what_each_rung_frees(record: dict[str, Any]) -> None:
    held = {rung["name"]: rung["bytes"][0] for rung in record["rungs"]}
    assert held["tp"]["parameters"] < held["ddp"]["parameters"]
    falling = [held[name]["activations"] for name in ("tp", "tp-sp", "tp-sp-regather")]
    assert falling == sorted(falling, reverse=True)
    assert len(set(falling)) == 3
    if "tp-fsdp2" in held:  # state by dp x tp = 4, but for padding, activations by the rows of dp
        assert held["tp-fsdp2"]["parameters"] < 1.1 * held["tp"]["parameters"]
        assert held["tp-fsdp2"]["activations"] < held["tp-sp"]["activations"]


def test_sequence_parallelism_sends_as_much(record: dict[str, Any]) -> None:
    """8 b s h (t - 1) / t elements for each block, 4 for embedding and head; the loss sends three numbers per token."""
    share, tokens, sent = (record["ranks"] - 1) / record["ranks"], BATCH * CONTEXT, {}
    for rung in record["rungs"]:
        sent[rung["name"]] = sum(total["wire"] for total in rung["collectives"].values())
    of_tp = share * 4 * (tokens * WIDTH * (8 * LAYERS + 4) + 2 * 3 * tokens)
    summands = share * 4 * 2 * WIDTH * (4 * LAYERS + 2 + CONTEXT)  # of norms and positions, after backward
    assert sent["tp"] == pytest.approx(of_tp, abs=3)
    assert sent["tp-sp"] == pytest.approx(of_tp + summands, abs=3)
    assert sent["tp-sp-regather"] == pytest.approx(of_tp + summands + share * 4 * 2 * LAYERS * tokens * WIDTH, abs=3)


def test_the_table_fits_and_ticks(record: dict[str, Any]) -> None:
    assert_the_table_fits_and_ticks(record)


def test_the_explorer_shows_parts(run: tuple[ladder.Request, Path]) -> None:
    """A rank has a part of every block at all times; with FSDP2 outside, the part of a part is gathered."""
    data = explorer_in(run[1])
    for rung in data["rungs"]:
        entries = rung["variants"][0]["ranks"][0]["entries"]
        held = {entry[3] for entry in entries if entry[1] is None}
        assert rung["variants"][0]["units"] == ["root", "blocks.0", "blocks.1"]
        assert held == {"ddp": {"whole"}, "tp-fsdp2": {"shard", "on its way", "whole"}}.get(rung["name"], {"shard"})
        if rung["name"].startswith("tp"):
            assert any("of blocks.0.up (Linear) issued" in str(entry[1]) for entry in entries)


def test_a_rank_s_rows_are_those_of_its_replica() -> None:
    settings, plans = settings_on(4), {"ddp": [0, 1, 2, 3], "tp": [0] * 4, "tp-fsdp2": [0, 0, 1, 1]}
    (whole, _), *_ = settings.batches()
    for name, rows in plans.items():
        for rank, row in enumerate(rows):
            mine, _ = settings.shares(rank, whole.device)[name][0]
            size = len(mine)
            assert size == BATCH // (max(rows) + 1)
            assert mine.equal(whole[row * size : (row + 1) * size])
