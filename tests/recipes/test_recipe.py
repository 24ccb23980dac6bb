"""Meshes and recipes as values: they print themselves, say who is where, and refuse what does not go together."""

from __future__ import annotations

import importlib
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Linear

from minifsdp.build import build, sizes_of
from minifsdp.cost.bubble import bubble
from minifsdp.cost.data_parallel import (
    Bytes,
    OptimizerState,
    Setting,
    bucket_numbers,
    ddp,
    fsdp,
    padded_buckets,
    zero1,
    zero2,
)
from minifsdp.cost.faults import fault
from minifsdp.cost.model import gpt
from minifsdp.cost.total import cost
from minifsdp.cost.traffic import sent
from minifsdp.cost.zero2 import Arrival, levels
from minifsdp.course.ladder.outline import outline
from minifsdp.divisions import ORDERS, SCHEDULES, ContextParallel, DataParallel, PipelineParallel, TensorParallel
from minifsdp.gpt import GPT, GPTStage
from minifsdp.mesh import AXES, Mesh
from minifsdp.moved import MOVED
from minifsdp.pipeline.actions import check_complete
from minifsdp.pipeline.messages import check_order
from minifsdp.pipeline.schedules.orders import count_stages
from minifsdp.pipeline.simulate import simulate
from minifsdp.recipe import Recipe

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
    short = Recipe.parse("pp = 2, dp=2, tp=2,zero=1,")
    assert short == Recipe(Mesh(pp=2, dp=2, tp=2), DataParallel("zero1"), TensorParallel(), PipelineParallel("1f1b"))
    assert Recipe.parse("dp=8") == Recipe.parse("dp=8,zero=3") == Recipe(Mesh(dp=8), DataParallel("fsdp2"))
    assert Recipe.parse("pp=4").micro_batches == 8
    assert Recipe.parse("") == Recipe()
    assert Recipe.parse("dp=2,pp=2,axes=dp / pp") == Recipe.parse("dp=2,pp=2,axes=dp/pp")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Mesh(dp=2.0), "dp=2.0 is of type float: give a whole number"),  # type: ignore[arg-type]
        (lambda: Mesh(dp=2, axes=["dp"]), "axes=.* is of type list: give a tuple"),  # type: ignore[arg-type]
        (lambda: DataParallel(limit="3"), "limit='3' is of type str"),  # type: ignore[arg-type]
        (lambda: DataParallel(reshard="no"), "reshard='no' is of type str: give True or False"),  # type: ignore[arg-type]
        (lambda: DataParallel("fsdp", "prefetch", depth="all"), "depth='all' is of"),  # type: ignore[arg-type]
        (lambda: TensorParallel("no"), "sequence='no' is of type str"),  # type: ignore[arg-type]
        (lambda: PipelineParallel(micro=True), "micro=True is of type bool"),
        (lambda: ContextParallel(zigzag="no"), "zigzag=.no. is of type str: give True or False"),  # type: ignore[arg-type]
        (lambda: Recipe("dp=2"), "mesh='dp=2': give a Mesh, or a recipe as text"),  # type: ignore[arg-type]
        (lambda: Recipe(Mesh(dp=2), TensorParallel()), "data=TensorParallel.*: give a DataP"),  # type: ignore[arg-type]
        (lambda: Recipe.parse(Recipe()), "is of type Recipe: give a recipe as text"),  # type: ignore[arg-type]
        (lambda: build(GPT(layers=1), "dp=2"), "'dp=2' is of type str: give a Recipe"),  # type: ignore[arg-type]
        (lambda: build(Linear(2, 2), Recipe()), "a recipe divides .*GPT, not Linear"),  # type: ignore[arg-type]
    ],
)
def test_values_of_a_wrong_kind_are_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(TypeError, match=says) as told:
        make()
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: DataParallel(limit=-1), "limit=-1: .* choose 1 or more"),
        (lambda: DataParallel("fsdp", "prefetch", depth=-1), "depth=-1: choose 0, for no unit ahead, or more"),
        (lambda: Mesh(dp=4, replicate=2).peers(0, "replicate"), "axis=replicate: choose from pp, dp"),
        (lambda: gpt(17, 16, 2, heads=3, context=8), "width 16 cannot be divided into 3 heads"),
        (lambda: gpt(17, 16, 0, heads=4, context=8), "layers = 0: a GPT needs at least 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize(
    ("rows", "targets", "says"),
    [
        ((0, 8), (0, 8), "the mean over no tokens is nan; give every rank a row or more"),
        ((4, 8), (2, 8), "4 rows of tokens with 2 of targets: give as many of both"),
    ],
)
def test_a_step_without_a_mean_is_refused(rows: tuple[int, int], targets: tuple[int, int], says: str) -> None:
    trainer = build(GPT(17, 16, layers=1, context=8), Recipe())
    with pytest.raises(ValueError, match=says):
        trainer.step(torch.zeros(rows, dtype=torch.int64), torch.zeros(targets, dtype=torch.int64))


def test_a_stage_refuses_longer_sequences_than_its_model() -> None:
    stage = GPTStage(GPT(17, 16, layers=2, context=8), [0], is_first=True, is_last=False)
    with pytest.raises(ValueError, match="sequences of 9 tokens in a model with context 8: shorten them"):
        stage(torch.zeros(1, 9, dtype=torch.int64))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dp=2,foo=1", "foo is no word of a recipe: choose from zero, pp, dp"),
        ("dp=two", "dp=two: give a whole number, such as dp=2"),
        ("dp=", "dp= has no value: write one behind it, or leave the word out"),
        ("dp", "dp has no number: write one behind it, as in dp=2"),
        ("pp=2 dp=2", "pp=2 dp=2: separate words by commas, as in pp=2,dp=2"),
        ("dp=2,dp=4", "dp is given twice: dp=2 and dp=4"),
        ("dp=2,zero=1,data=ddp", "zero=1 and data=ddp both say what is sharded: leave one out"),
        ("dp=2,data=ddp,limit=2", "limit=2 has no effect with data=ddp: leave it out"),
        ("dp=2,schedule=prefetch,limit=3", "limit=3 has no effect with data=fsdp2 and schedule=prefetch"),
        ("dp=2,limit=0", "limit=0: the unit that computes has to be gathered; choose 1 or more"),
        ("=2", "=2 has no name: write one before it, as in dp=2"),
        ("dp=2,depth=2", "depth=2 has no effect with data=fsdp2"),
        ("dp=2,zero=1,reshard=no", "reshard=no has no effect with data=zero1"),
        ("dp=2,data=fsdp,hold", "^hold has no effect with data=fsdp"),
        ("pp=2,order=naive,micro=4", "micro=4 has no effect with order=naive"),
        ("dp=2,data=fsdp,schedule=sync,depth=all", "^depth=all has no effect with data=fsdp"),
        ("pp=2,dp=2,limit=3", "limit=3 with data=fsdp2 and pp: units stay gathered"),
        ("pp=2,dp=2,hold", "^hold with data=fsdp2 and pp: units stay gathered"),
        ("dp=0", "dp=0: an axis has at least 1 rank"),
        ("ep=2", "ep=2: expert parallelism is not supported yet"),
        ("cp=2,attention=star", "attention=star: choose from ring, gathered, ulysses"),
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
        ("pp=2,data=fsdp,order=zb-h1", "data=fsdp with order=zb-h1: .*choose data=fsdp2, or order=1f1b"),
        ("dp=2,pp=2,zero=2,order=zb-h1", "data=zero2 with order=zb-h1: .*choose zero=1, or order=1f1b"),
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


def test_of_mixed_precision_the_state_is_twelve_bytes_an_element() -> None:
    """ZeRO's example (arXiv 1910.02054, section 3.1): parameters and gradients of two bytes, and K = 12."""
    setting, psi, ranks = Setting(4, itemsize=2, optimizer=OptimizerState(12, 0)), 1000, 4

    def total(found: Bytes) -> float:
        return (found.parameters + found.gradients + found.optimizer) / psi

    assert total(ddp([psi], setting)) == 2 + 2 + 12
    assert total(zero1([psi], psi, setting)) == 2 + 2 + 12 / ranks
    assert total(zero2([psi], psi, setting)) == 2 + (2 + 12) / ranks
    assert total(fsdp([[psi]], setting)) == (2 + 2 + 12) / ranks


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 400), st.integers(2, 4), st.booleans())
def test_the_walk_over_buckets_is_their_closed_form_where_gradients_come_in_order(
    numels: list[int], cap: int, ranks: int, by_all_to_all: bool
) -> None:
    setting = Setting(ranks, by_all_to_all=by_all_to_all)
    numbers, sizes = bucket_numbers(numels, cap), padded_buckets(numels, cap, setting)
    arriving = [Arrival("", 4 * numel, number) for numel, number in zip(numels, numbers, strict=True)][::-1]
    walked = [*levels(arriving, sizes, Counter(numbers), setting, adds=False)]
    form = zero2(numels, cap, setting)
    assert (max(level.most for level in walked), walked[-1].left) == (form.gradients_peak, form.gradients)


@pytest.mark.parametrize("tied", [False, True])
def test_the_shapes_of_a_gpt_are_the_models(tied: bool) -> None:
    sizes = {"vocabulary": 257, "width": 24, "layers": 3, "heads": 4, "context": 8}
    model = outline(**sizes, tied=tied)
    ours = gpt(**sizes, tied=tied)
    assert (ours.root, list(ours.blocks), ours.heads) == (sizes_of(model).root, list(sizes_of(model).blocks), 4)
    assert ours.parameters == [p.numel() for p in model.parameters()]


@pytest.mark.parametrize(
    ("recipe", "sizes", "says"),
    [
        ("tp=4", {"vocabulary": 5}, "5 tokens of the vocabulary leave one of 4 ranks without any: choose fewer ranks"),
        ("tp=2", {"vocabulary": 5}, ""),
        ("tp=3", {"heads": 2}, "2 heads cannot be shared by 3 ranks: choose a multiple of 3 heads"),
        ("tp=2,sequence", {"context": 7}, "7 tokens cannot be shared by 2 ranks: choose a context"),
        ("pp=2,order=interleaved,stages=2", {"layers": 3}, "3 blocks make no 4 stages: choose 4 or more layers"),
        ("pp=2", {"tied": True}, "the embedding's weight is the head's, too.*leave tied=True or pp out"),
        ("tp=2", {"tied": True}, ""),
    ],
)
def test_build_refuses_what_a_ladder_leaves_out(recipe: str, sizes: dict[str, Any], says: str) -> None:
    """Before any process group is there; a cure that is followed works."""
    sizes = {"vocabulary": 17, "width": 16, "layers": 4, "heads": 4, "context": 8, **sizes}
    parsed = Recipe.parse(recipe)
    assert re.search(says, fault(gpt(**sizes), parsed))
    if says:
        with pytest.raises(ValueError, match=f"{recipe}.*: {says}"):
            build(outline(**sizes), parsed)
        with pytest.raises(ValueError, match=says):
            cost(gpt(**sizes), parsed, 0, Setting(parsed.mesh.ranks, batch=48))


@pytest.mark.parametrize("recipe", ["", "dp=2,data=ddp", "dp=2,data=fsdp", "dp=2", "tp=2", "pp=2"])
def test_a_model_without_values_is_refused(recipe: str) -> None:
    says = "embed.weight is on the meta device, without values: call model.to_empty.* and initialize it, or load it"
    with pytest.raises(ValueError, match=says) as told:
        build(outline(vocabulary=17, width=16, layers=2, heads=4, context=8), Recipe.parse(recipe))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("recipe", "frozen", "batch", "says"),
    [
        ("dp=2,precision=bf16", (), 8, "there is no arithmetic of precision=bf16 yet"),
        ("dp=2", ("embed.weight",), 8, "there is no arithmetic of frozen parameters, such as embed.weight"),
        ("dp=2", (), 7, "7 rows are not 2 replicas' 1 micro-batches each: choose a multiple of 2"),
        ("pp=2,dp=2", (), 12, "12 rows are not 2 replicas' 4 micro-batches each: choose a multiple of 8"),
    ],
)
def test_the_arithmetic_refuses_what_it_does_not_predict(
    recipe: str, frozen: tuple[str, ...], batch: int, says: str
) -> None:
    sizes = {"vocabulary": 17, "width": 16, "layers": 4, "heads": 4, "context": 8}
    model, parsed = outline(**sizes), Recipe.parse(recipe)
    for name, p in model.named_parameters():
        p.requires_grad_(name not in frozen)
    for predict in (cost, sent):
        with pytest.raises(ValueError, match=f": {says}"):
            predict(sizes_of(model), parsed, 0, Setting(parsed.mesh.ranks, batch=batch))


@pytest.mark.parametrize(
    ("recipe", "rank", "context", "says"),
    [
        ("dp=2", 2, 0, "rank 2 of 2 ranks: choose 0 to 1"),
        ("dp=2", -1, 0, "rank -1 of 2 ranks: choose 0 to 1"),
        ("dp=2", 0, 9, "sequences of 9 tokens in a model with context 8"),
        ("tp=2,sequence", 0, 7, "7 tokens cannot be shared by 2 ranks: choose a context that is a multiple of 2"),
    ],
)
def test_the_arithmetic_refuses_ranks_and_sequences_that_are_not_there(
    recipe: str, rank: int, context: int, says: str
) -> None:
    numbers, parsed = gpt(17, 16, 4, heads=4, context=8), Recipe.parse(recipe)
    for predict in (cost, sent):
        with pytest.raises(ValueError, match=f": {says}"):
            predict(numbers, parsed, rank, Setting(parsed.mesh.ranks, batch=8, context=context))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_order_has_its_actions_and_a_formula_for_its_bubble(order: str, ranks: int) -> None:
    """The actions are complete and end; the time in which ranks are idle is what the formula says."""
    recipe = Recipe(Mesh(pp=ranks), None, None, PipelineParallel(order, 2 if order == "interleaved" else 1))
    check_complete(recipe.actions, count_stages(recipe.actions), recipe.micro_batches)
    check_order(recipe.actions)
    assert simulate(recipe.actions, {"F": 1, "B": 2, "I": 1, "W": 1}).bubble == pytest.approx(bubble(recipe))


@pytest.mark.parametrize("old", MOVED)
def test_old_paths_are_the_new_modules(old: str) -> None:
    found, new = importlib.import_module(old), importlib.import_module(MOVED[old])
    assert found is new is sys.modules[old]
    assert new.__spec__ is not None
    assert new.__spec__.name == MOVED[old]
