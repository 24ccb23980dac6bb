"""`minifsdp ladder` on the axes but data, and of recipes: the run as a user has it, from the record that it leaves."""

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

from minifsdp.course.cli.ladder import _files as files_of
from minifsdp.course.ladder import run as ladder
from minifsdp.course.ladder.axes import AXES
from minifsdp.course.ladder.measure import Settings
from minifsdp.recipe import MICROS, Recipe

ALL = {
    "tensor": ["ddp", "tp", "tp-sp", "tp-sp-regather", "tp-fsdp2"],
    "pipeline": ["alone", "naive", "gpipe", "1f1b", "interleaved", "zb-h1", "1f1b-ddp", "1f1b-fsdp2"],
    "3d": ["ddp", "3d", "3d-fsdp2"],
}
ON_TWO = {"tensor": 4, "pipeline": 6}  # as many of them, from the first, need no more than two ranks
LAYERS, WIDTH, CONTEXT = 2, 24, 12
BATCH = {"tensor": 12, "pipeline": 16, "3d": 16}
OWN = "pp=2,tp=2,order=gpipe"
ANOTHER = "dp=2,tp=2,axes=tp/dp,data=zero1,sequence"


def settings_on(axis: str, ranks: int, **given: Any) -> Settings:
    layers = 2 * ranks if axis == "pipeline" else LAYERS
    sizes: dict[str, Any] = {"layers": layers, "width": WIDTH, "context": CONTEXT, "steps": 2, "batch": BATCH[axis]}
    return Settings.on(axis, ranks=ranks, **{**sizes, **given})


def runs(axis: str) -> list[Any]:
    """Axis and ranks of the runs on an axis."""
    if axis == "3d":
        return [pytest.param((axis, 8), id="3d-8")]
    return [
        pytest.param((axis, 2), id=f"{axis}-2", marks=pytest.mark.slow),
        pytest.param((axis, 4), id=f"{axis}-4"),
    ]


@pytest.fixture(scope="module", params=[each for axis in ALL for each in runs(axis)])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ladder.Request, Path]:
    axis, ranks = request.param
    out = tmp_path_factory.mktemp("ladder")
    if axis == "pipeline":
        (out / "timeline.png").write_text("of another ladder")
    return climb(settings_on(axis, ranks), out), out


@pytest.fixture(scope="module")
def record(run: tuple[ladder.Request, Path]) -> dict[str, Any]:
    return record_in(run[1])


def of_axis(axis: str) -> pytest.MarkDecorator:
    """For tests of one axis alone."""
    return pytest.mark.parametrize("run", runs(axis), indirect=True)


# On every axis


def test_the_rungs_that_so_many_ranks_can_climb(run: tuple[ladder.Request, Path], record: dict[str, Any]) -> None:
    axis, ranks = record["axis"], record["ranks"]
    there = ON_TWO[axis] if ranks == 2 else len(ALL[axis])
    lanes = "timeline.png" if axis == "tensor" else "pipeline.png"
    assert_climbed(*run, ALL[axis][:there], ALL[axis][there:], lanes)


def test_losses_equal_one_process(record: dict[str, Any]) -> None:
    assert_losses_equal_one_process(record)


def test_bytes_are_as_predicted_on_every_rank(record: dict[str, Any]) -> None:
    assert_bytes_are_as_predicted_on_every_rank(record)


def test_bytes_by_axis_are_as_predicted_on_every_rank(record: dict[str, Any]) -> None:
    for rung in record["rungs"]:
        assert rung["sent"] == rung["predicted_sent"], rung["name"]


def test_peaks_are_bounded_on_every_rank(record: dict[str, Any]) -> None:
    assert_peaks_are_bounded_on_every_rank(record)


def test_the_table_fits_and_ticks(record: dict[str, Any]) -> None:
    assert_the_table_fits_and_ticks(record)


def test_the_command_names_the_files_that_are_there(run: tuple[ladder.Request, Path], record: dict[str, Any]) -> None:
    request, out = run
    line = files_of(request, record["rungs"])
    assert all(path.name in line for path in out.iterdir() if not path.name.startswith("trace-"))


# Tensor parallelism


@of_axis("tensor")
def test_the_record_has_the_axis_and_the_heads(record: dict[str, Any]) -> None:
    assert (record["axis"], record["heads"]) == ("tensor", 12)


@of_axis("tensor")
def test_what_each_tensor_rung_frees(record: dict[str, Any]) -> None:
    held = {rung["name"]: rung["bytes"][0] for rung in record["rungs"]}
    assert held["tp"]["parameters"] < held["ddp"]["parameters"]
    falling = [held[name]["activations"] for name in ("tp", "tp-sp", "tp-sp-regather")]
    assert falling == sorted(falling, reverse=True)
    assert len(set(falling)) == 3
    if "tp-fsdp2" in held:  # state by dp x tp = 4, but for padding, activations by the rows of dp
        assert held["tp-fsdp2"]["parameters"] < 1.1 * held["tp"]["parameters"]
        assert held["tp-fsdp2"]["activations"] < held["tp-sp"]["activations"]


@of_axis("tensor")
def test_sequence_parallelism_sends_as_much(record: dict[str, Any]) -> None:
    """8 b s h (t - 1) / t elements for each block, 4 for embedding and head; the loss sends three numbers per token."""
    share, tokens, sent = (record["ranks"] - 1) / record["ranks"], BATCH["tensor"] * CONTEXT, {}
    for rung in record["rungs"]:
        sent[rung["name"]] = sum(total["wire"] for total in rung["collectives"].values())
    of_tp = share * 4 * (tokens * WIDTH * (8 * LAYERS + 4) + 2 * 3 * tokens)
    summands = share * 4 * 2 * WIDTH * (4 * LAYERS + 2 + CONTEXT)  # of norms and positions, after backward
    assert sent["tp"] == pytest.approx(of_tp, abs=3)
    assert sent["tp-sp"] == pytest.approx(of_tp + summands, abs=3)
    assert sent["tp-sp-regather"] == pytest.approx(of_tp + summands + share * 4 * 2 * LAYERS * tokens * WIDTH, abs=3)


@of_axis("tensor")
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
    settings, plans = settings_on("tensor", 4), {"ddp": [0, 1, 2, 3], "tp": [0] * 4, "tp-fsdp2": [0, 0, 1, 1]}
    (whole, _), *_ = settings.batches()
    for name, rows in plans.items():
        for rank, row in enumerate(rows):
            mine, _ = settings.shares(rank, whole.device)[name][0]
            size = len(mine)
            assert size == BATCH["tensor"] // (max(rows) + 1)
            assert mine.equal(whole[row * size : (row + 1) * size])


# Pipeline parallelism


@of_axis("pipeline")
def test_what_each_pipeline_rung_frees(record: dict[str, Any]) -> None:
    held = {rung["name"]: rung["bytes"][0] for rung in record["rungs"]}
    assert held["naive"]["parameters"] < held["alone"]["parameters"]
    ids = 8 * CONTEXT * (MICROS * record["ranks"] - 1)  # positions, of each micro-batch
    assert held["gpipe"]["activations"] == held["naive"]["activations"] + ids, "micro-batches alone free nothing"
    assert held["1f1b"]["activations"] < held["interleaved"]["activations"] < held["gpipe"]["activations"]
    if "1f1b-fsdp2" in held:
        assert held["1f1b-fsdp2"]["parameters"] < 0.6 * held["1f1b-ddp"]["parameters"]
        assert held["1f1b-fsdp2"]["unsharded_peak"] > held["1f1b-fsdp2"]["parameters"]


@of_axis("pipeline")
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


@of_axis("pipeline")
def test_bubbles_by_the_formulas(record: dict[str, Any]) -> None:
    p = record["ranks"]
    bubbles = {rung["name"]: rung["bubble"] for rung in record["rungs"] if "bubble" in rung}
    expected = {"naive": (p - 1) / p, "gpipe": (p - 1) / (3 * p - 1), "interleaved": (p - 1) / (5 * p - 1)}
    for name, formula in expected.items():
        assert bubbles[name][1] == pytest.approx(formula)
    assert all(0 < measured < 1 for measured, _ in bubbles.values())
    assert "alone" not in bubbles


@of_axis("pipeline")
def test_the_explorer_names_the_units_of_all_ranks(run: tuple[ladder.Request, Path], record: dict[str, Any]) -> None:
    data = explorer_in(run[1])
    units = {rung["name"]: rung["variants"][0]["units"] for rung in data["rungs"]}
    p = record["ranks"]
    assert units["alone"] == ["root", *(f"blocks.{n}" for n in range(2 * p))]
    of_rank = [[f"blocks.{2 * rank + place}" for rank in range(p)] for place in range(2)]
    assert units["1f1b"] == ["root", *(" | ".join(names) for names in of_rank)]


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
        ladder.check(settings_on("pipeline", 4, **given), "cpu", tmp_path)


# Three axes, and recipes


@of_axis("3d")
def test_the_table_has_room_for_the_longest_name_of_any_ladder(record: dict[str, Any]) -> None:
    """This one has the most columns."""
    name = max((name for axis in AXES.values() for name in axis.rungs), key=len)
    assert_the_table_fits_and_ticks(record | {"rungs": [record["rungs"][1] | {"name": name}]})


@of_axis("3d")
def test_of_the_three_axes_tensor_parallelism_sends_most(record: dict[str, Any]) -> None:
    assert [set(rung["sent"][0]) for rung in record["rungs"]] == [{"dp"}, {"pp", "dp", "tp"}, {"pp", "dp", "tp"}]
    totals = {axis: sum(op["payload"] for op in ops.values()) for axis, ops in record["rungs"][1]["sent"][0].items()}
    assert totals["tp"] > max(totals["dp"], totals["pp"])


def test_fewer_ranks_make_no_three_axes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--rungs 3d: 4 ranks are no mesh of three axes.*choose 8"):
        ladder.check(settings_on("3d", ranks=4), "cpu", tmp_path)


def test_recipes_are_climbed_beside_a_rung(tmp_path: Path) -> None:
    """Of two recipes the same ranks divide a layer, and in the first they have some of the layers only."""
    climb(settings_on("3d", ranks=4).beside(None, [Recipe.parse(OWN), Recipe.parse(ANOTHER)]), tmp_path)
    record = record_in(tmp_path)
    assert [rung["name"] for rung in record["rungs"]] == ["ddp", OWN, ANOTHER]
    assert record["recipes"] == [OWN, ANOTHER]
    assert_the_table_fits_and_ticks(record)
    assert_losses_equal_one_process(record)
    assert_bytes_are_as_predicted_on_every_rank(record)
    for rung in record["rungs"]:
        assert rung["sent"] == rung["predicted_sent"], rung["name"]


def test_a_recipe_is_given_once() -> None:
    """Whatever the words."""
    with pytest.raises(ValueError, match="--recipe dp=2,data=fsdp2 is given twice: once is enough"):
        Settings().beside(None, [Recipe.parse("dp=2"), Recipe.parse("dp=2,zero=3")])


@pytest.mark.parametrize(
    ("recipe", "ranks", "says"),
    [
        (OWN, 8, f"--recipe {OWN}: it is for 4 ranks, not 8: give it alone, without --ranks"),
        ("pp=4", 4, "--recipe pp=4: 2 blocks make no 4 stages: choose 4 or more layers"),
        ("tp=8", 8, "--recipe tp=8: 4 heads cannot be shared by 8 ranks"),
    ],
)
def test_a_recipe_that_does_not_go(tmp_path: Path, recipe: str, ranks: int, says: str) -> None:
    given = settings_on("3d", ranks=ranks, rungs=("ddp",)).beside(("ddp",), [Recipe.parse(recipe)])
    with pytest.raises(ValueError, match=says):
        ladder.check(given, "cpu", tmp_path)
