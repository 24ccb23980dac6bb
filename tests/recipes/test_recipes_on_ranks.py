"""Every recipe trains what one process trains, and holds and sends what its arithmetic says, to the byte."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch.optim import AdamW

from minifsdp import comm
from minifsdp.build import LEARNING_RATE, build
from minifsdp.cost.model import gpt
from minifsdp.cost.total import cost
from minifsdp.cost.traffic import Message, sent
from minifsdp.course.ladder.measure import measure_memory
from minifsdp.course.ladder.rungs import closed_form_setting
from minifsdp.gpt import GPT
from minifsdp.instruments.launch import rank_device
from minifsdp.private import group_named
from minifsdp.process_groups import global_ranks
from minifsdp.recipe import Recipe
from minifsdp.trainer import Trainer

check = Checks(__name__)

SIZES: dict[str, Any] = {"vocabulary": 61, "width": 24, "layers": 4, "heads": 4, "context": 8}
ROWS = 16

ON_TWO = (
    *("dp=2,data=ddp", "dp=2,data=ddp,schedule=buckets", "dp=2,data=ddp,schedule=parameters", "dp=2,zero=1"),
    *("dp=2,zero=2", "dp=2,data=fsdp", "dp=2,data=fsdp,schedule=prefetch", "dp=2,data=fsdp,schedule=sync,reshard=no"),
    *("dp=2", "dp=2,schedule=prefetch,hold", "tp=2", "tp=2,sequence", "tp=2,sequence,regather", "pp=2"),
    *("pp=2,order=gpipe", "pp=2,order=naive", "pp=2,order=interleaved,stages=2", "pp=2,order=zb-h1"),
)
ON_FOUR = (
    *("dp=2,tp=2,data=ddp,sequence", "dp=2,tp=2,zero=1,sequence", "dp=2,tp=2,zero=2,sequence", "dp=2,tp=2,sequence"),
    *("pp=2,dp=2,data=ddp", "pp=2,dp=2,zero=1", "pp=2,dp=2,zero=2", "pp=2,dp=2,data=fsdp", "pp=2,dp=2"),
    *("pp=2,dp=2,axes=dp/pp", "pp=2,tp=2", "pp=2,tp=2,sequence,order=gpipe", "dp=4,replicate=2"),
    *("dp=4,replicate=2,data=fsdp", "dp=4,replicate=2,data=fsdp,reshard=no"),
)
ON_EIGHT = (
    *("pp=2,dp=2,tp=2,zero=1,sequence", "pp=2,dp=2,tp=2,sequence", "pp=2,dp=2,tp=2,data=ddp,sequence,regather"),
    *("pp=2,dp=2,tp=2,zero=2", "dp=4,replicate=2,tp=2,sequence", "pp=2,dp=4,replicate=2"),
)


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(**SIZES)


@check(ranks=2, recipe=ON_TWO)
@check(ranks=4, recipe=ON_FOUR)
@check(ranks=8, recipe=ON_EIGHT)
def trains_what_one_process_trains(recipe: str) -> None:
    """Three steps in float64; each rank sees the rows of its place on the axis of data parallelism."""
    parsed, alone = Recipe.parse(recipe), model().double()
    one = Trainer(alone, AdamW(alone.parameters(), LEARNING_RATE))
    ours = build(model().double(), parsed)
    generator = torch.Generator().manual_seed(1)
    share = ROWS // parsed.mesh.dp
    first = parsed.mesh.place(dist.get_rank(), "dp") * share
    for _ in range(3):
        tokens = torch.randint(SIZES["vocabulary"], (ROWS, SIZES["context"] + 1), generator=generator)
        tokens, targets = tokens[:, :-1], tokens[:, 1:]
        mean = ours.step(tokens[first : first + share], targets[first : first + share]).double().reshape(1)
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / dist.get_world_size(), one.step(tokens, targets).reshape(1))


@check(ranks=2, recipe=ON_TWO)
@check(ranks=4, recipe=ON_FOUR)
@check(ranks=8, recipe=ON_EIGHT)
def holds_and_sends_what_is_predicted(recipe: str) -> None:
    """Bytes by category, and calls by axis, operation and size; on this rank."""
    parsed, rank, where = Recipe.parse(recipe), dist.get_rank(), rank_device()
    rows = torch.zeros(ROWS // parsed.mesh.dp, SIZES["context"], dtype=torch.int64, device=where)
    build(model(), parsed)  # its process groups are there
    found = measure_memory(lambda: build(model().to(where), parsed), (rows, rows), where)
    setting = replace(closed_form_setting(dist.get_world_size()), batch=ROWS)
    numbers = gpt(**SIZES)
    predicted = asdict(cost(numbers, parsed, rank, setting))
    assert {key: found["bytes"][key] for key in predicted} == predicted
    calls: list[comm.Call] = [call for call in found["calls"] if call.op != "recv"]
    axis_of = partial(parsed.mesh.axis_of, rank=rank)
    axes = {name: axis_of(global_ranks(group_named(name))) for name in {call.group for call in calls}}
    logged = Counter(Message(axes[call.group], call.op, call.payload) for call in calls)
    assert logged == +sent(numbers, parsed, rank, setting)


@check(ranks=2, recipe=("dp=2,precision=bf16", "dp=2,data=fsdp,precision=bf16"))
def computes_in_its_precision(recipe: str) -> None:
    """Units are gathered in bfloat16; what the optimizer has stays in float32."""
    trainer = build(model(), Recipe.parse(recipe))
    rows = torch.zeros(2, SIZES["context"], dtype=torch.int64)
    with comm.record() as log:
        trainer.step(rows, rows)
    assert {call.dtype for call in log if call.op == "all_gather"} == {torch.bfloat16}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_a_recipe_for_another_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from minifsdp.instruments.launch import launch

    with pytest.raises(Exception, match="the recipe dp=2,data=fsdp2 is for 2 ranks, and there are 1"):
        launch(lambda: build(model(), Recipe.parse("dp=2")), 1)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
