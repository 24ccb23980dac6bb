"""Meshes and recipes as values: they print themselves, say who is where, and refuse what does not go together."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minifsdp.cost.faults import fault
from minifsdp.cost.model import gpt
from minifsdp.course.ladder.outline import outline
from minifsdp.course.ladder.rungs import sizes_of
from minifsdp.mesh import AXES, Mesh
from minifsdp.moved import MOVED
from minifsdp.recipe import ORDERS, SCHEDULES, DataParallel, PipelineParallel, Recipe, TensorParallel

SIZES = st.integers(1, 4)


@st.composite
def recipes(draw: Any) -> Recipe:
    kind = draw(st.sampled_from([None, *SCHEDULES]))
    schedule = kind and draw(st.sampled_from(["", *SCHEDULES[kind]]))
    depth, flags = draw(st.sampled_from([None, 2])), st.booleans()
    data = kind and DataParallel(kind, schedule, draw(SIZES), depth, draw(flags), draw(flags))
    sequence = draw(flags)
    tensor = draw(st.sampled_from([None, TensorParallel(sequence, sequence and draw(flags))]))
    order = draw(st.sampled_from(ORDERS))
    stages = draw(st.integers(2, 3)) if order == "interleaved" else 1
    pipeline = draw(st.sampled_from([None, PipelineParallel(order, stages, draw(st.integers(0, 9)))]))
    parts = {"dp": data, "tp": tensor, "pp": pipeline}
    sizes = {axis: draw(SIZES) if part is not None else 1 for axis, part in parts.items()}
    if data is not None and data.shards_parameters and sizes["dp"] == 4:
        sizes["replicate"] = draw(st.sampled_from([1, 2]))
    return Recipe(Mesh(**sizes, axes=draw(st.sampled_from([AXES, ("dp", "pp", "tp")]))), data, tensor, pipeline)


@given(st.data())
def test_a_recipe_is_what_it_prints(data: st.DataObject) -> None:
    try:
        recipe = data.draw(recipes())
    except ValueError:
        return
    assert Recipe.parse(str(recipe)) == recipe


def test_words_that_are_usual_may_be_left_out() -> None:
    short = Recipe.parse("pp=2, dp=2, tp=2, zero=1")
    assert short == Recipe(Mesh(pp=2, dp=2, tp=2), DataParallel("zero1"), TensorParallel(), PipelineParallel("1f1b"))
    assert Recipe.parse("dp=8") == Recipe.parse("dp=8,zero=3") == Recipe(Mesh(dp=8), DataParallel("fsdp2"))
    assert Recipe.parse("pp=4").micro_batches == 8
    assert Recipe.parse("") == Recipe()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dp=2,foo=1", "foo is no word of a recipe: choose from zero, pp, dp"),
        ("dp=two", "dp=two: a number is wanted"),
        ("dp=0", "dp=0: an axis has at least 1 rank"),
        ("cp=2", "cp=2: nothing is divided among these ranks"),
        ("zero=4,dp=2", "zero=4: choose from 0, 1, 2, 3"),
        ("dp=2,data=fsdp3", "data=fsdp3: choose from ddp"),
        ("dp=2,zero=1,schedule=limit", "schedule=limit: choose from buckets"),
        ("dp=6,replicate=4", "replicate=4 of dp=6 ranks: choose a divisor of 6"),
        ("dp=2,replicate=2", "replicate=2 of dp=2 ranks: nothing is sharded; choose data=ddp"),
        ("dp=4,replicate=2,zero=1", "replicate=2: only fsdp and fsdp2 have shards"),
        ("dp=2,zero=1,precision=bf16", "precision=bf16 with data=zero1: choose fsdp or fsdp2"),
        ("tp=2,regather", "regather without sequence"),
        ("dp=2,tp=2,data=fsdp", "data=fsdp with tensor parallelism.*choose data=fsdp2"),
        ("dp=2,tp=2,data=ddp,schedule=buckets", "choose schedule=overlap"),
        ("pp=2,order=2f2b", "order=2f2b: choose from 1f1b"),
        ("pp=2,stages=2", "stages=2 with order=1f1b: interleaved has several"),
        ("pp=2,order=interleaved", "stages=1 with order=interleaved"),
        ("dp=2,pp=2,axes=dp", "axes=dp: pp has 2 ranks: say where"),
        ("dp=2,axes=dp/dp", "axes=dp/dp: choose from pp, dp, cp, ep, tp, each once"),
    ],
)
def test_what_does_not_go_is_told_in_a_line(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as told:
        Recipe.parse(text)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("mesh", [Mesh(2, 3, 1, 1, 2), Mesh(dp=4, tp=2, replicate=2), Mesh(3, 2, axes=("dp", "pp"))])
def test_ranks_are_numbered_along_the_last_axis(mesh: Mesh) -> None:
    places = [tuple(mesh.place(rank, axis) for axis in mesh.axes) for rank in range(mesh.ranks)]
    assert places == sorted(set(places))
    for rank in range(mesh.ranks):
        for axis in mesh.divided:
            peers = list(mesh.peers(rank, axis))
            assert [mesh.place(peer, axis) for peer in peers] == list(range(mesh.size(axis)))
            assert all(mesh.place(peer, b) == mesh.place(rank, b) for peer in peers for b in AXES if b != axis)
            assert mesh.axis_of(peers, rank) == axis


def test_of_hybrid_sharding_neighbours_share_a_copy() -> None:
    mesh = Mesh(dp=4, replicate=2)
    assert [mesh.axis_of(ranks, 1) for ranks in ([0, 1], [1, 3], [0, 1, 2, 3], [0, 3])] == [
        "shard",
        "replicate",
        "dp",
        "",
    ]


@pytest.mark.parametrize("tied", [False, True])
def test_the_shapes_of_a_gpt_are_the_models(tied: bool) -> None:
    sizes = {"vocabulary": 257, "width": 24, "layers": 3, "heads": 4, "context": 8}
    model = outline(**sizes, tied=tied)
    ours = gpt(**sizes, tied=tied)
    assert (ours.root, list(ours.blocks), ours.heads) == (sizes_of(model).root, list(sizes_of(model).blocks), 4)
    assert ours.parameters == [p.numel() for p in model.parameters()]


def test_a_vocabulary_that_leaves_a_rank_without_rows() -> None:
    small = gpt(vocabulary=5, width=16, layers=1, heads=4, context=8)
    assert "leave one of 4 ranks without any" in fault(small, Recipe.parse("tp=4"))
    assert fault(small, Recipe.parse("tp=2")) == ""


@pytest.mark.parametrize("old", MOVED)
def test_old_paths_are_the_new_modules(old: str) -> None:
    found, new = importlib.import_module(old), importlib.import_module(MOVED[old])
    assert found is new is sys.modules[old]
    assert new.__spec__ is not None
    assert new.__spec__.name == MOVED[old]
