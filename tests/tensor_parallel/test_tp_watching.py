"""Order check, log of collectives, description and recorder see what tensor-parallel ranks do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks, mesh_of
from torch.distributed.tensor import Partial, Replicate

from minifsdp import comm
from minifsdp.comm import Call
from minifsdp.course.ladder.rungs import Trainer
from minifsdp.fsdp2 import fully_shard
from minifsdp.gpt import GPT
from minifsdp.instruments import describe
from minifsdp.instruments.launch import RankError, launch
from minifsdp.instruments.machine import A100, record_steps, replay
from minifsdp.instruments.machine.program import Issue
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.instruments.watch.step import take_step
from minifsdp.order import Order
from minifsdp.tensor_parallel import parallelize_gpt, sum_gradients

check = Checks(__name__)
OPTIONS = {"tp": {}, "sequence": {"sequence": True}, "regather": {"sequence": True, "regather": True}}
TOKENS = torch.arange(24).view(2, 12)


def gpt(layers: int = 2) -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=61, width=24, layers=layers, heads=12, context=12)


def cut(layers: int = 2, **options: bool) -> Any:
    return parallelize_gpt(gpt(layers), mesh_of((dist.get_world_size(),)), **options)


def cut_and_sharded() -> Any:
    mesh = mesh_of((2, 2), "dp", "tp")
    model = parallelize_gpt(gpt(), mesh["tp"], sequence=True)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def subjects(calls: list[Call]) -> list[str]:
    return [f"{call.op} of {call.label.what}" if call.label else call.op for call in calls]


def no_other_collectives() -> Any:
    """DTensor's own go past comm.py, and so past its log, its order check and an emulated link."""
    return patch("torch.distributed._functional_collectives.all_reduce", side_effect=AssertionError("past comm.py"))


@check()
def a_collective_names_its_layer() -> None:
    model = cut(layers=1)
    with comm.record() as forward:
        loss = model(TOKENS, TOKENS)
    with comm.record() as backward:
        loss.backward()
    of_blocks = ["blocks.0.out (Linear)", "blocks.0.down (Linear)"]
    of_loss = ["the loss (cross_entropy)"] * 2
    assert subjects(forward) == [f"all_reduce of {what}" for what in ["embed (Embedding)", *of_blocks, *of_loss]]
    back = ["head (Linear)", "blocks.0.up (Linear)", "blocks.0.qkv (Linear)"]
    assert subjects(backward) == [f"all_reduce of {what}" for what in back]


@check(options=OPTIONS)
def all_collectives_have_names(options: dict[str, bool]) -> None:
    model = cut(**options)
    with comm.record() as calls:
        model(TOKENS, TOKENS).backward()
        sum_gradients(model.parameters())
    assert len(calls) > 10
    assert all(call.label is not None for call in calls)


@check(ranks=(2, 3))
def summands_are_summed_in_one_message() -> None:
    model = cut(sequence=True)
    model(TOKENS, TOKENS).backward()
    whole = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    summands = [p for p in model.parameters() if p.grad.placements == (Partial(),)]
    with comm.record() as calls:
        sum_gradients(model.parameters())
    (call,) = calls
    assert (call.op, call.payload) == ("all_reduce", sum(p.numel() * 4 for p in summands))
    assert all(p.grad.placements == (Replicate(),) for p in summands)
    with comm.record() as calls:
        sum_gradients(model.parameters())
    assert not calls
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), whole[name])
    with no_other_collectives():
        torch.optim.AdamW(model.parameters()).step()


@check(ranks=4)
def summands_under_fsdp2_are_summed_by_comm() -> None:
    model = cut_and_sharded()
    with no_other_collectives(), comm.record() as calls:
        model(TOKENS, TOKENS).backward()
        torch.optim.AdamW(model.parameters()).step()
    group = model.embed.weight.device_mesh.get_group("tp").group_name
    sums = subjects([call for call in calls if (call.group, call.op) == (group, "all_reduce")])
    units = Counter(what.removeprefix("all_reduce of ") for what in sums if "loss" not in what)
    # weight and bias of each norm, and the positions
    assert units == {"blocks.0 (Block)": 4, "blocks.1 (Block)": 4, "root (GPT)": 3}


def held_after_a_step(ledger: Ledger, model: Any, then: Callable[[], None] = lambda: None) -> tuple[Any, int]:
    """Bytes by tag after the optimizer's second step, and the peak of unsharded ones in it; `then` follows backward."""
    optimizer = torch.optim.AdamW(model.parameters())
    ledger.watch(model, optimizer)
    for _ in range(2):
        ledger.reset_peaks()
        model(TOKENS, TOKENS).backward()
        then()
        optimizer.step()
        held, unsharded = ledger.live(), ledger.peak_of("unsharded")
        optimizer.zero_grad()
    return held, unsharded


@check(ranks=4)
def a_description_has_the_parts_bytes() -> None:
    with Ledger() as ledger:
        model = cut_and_sharded()
        described = describe(model)
        held, unsharded = held_after_a_step(ledger, model)
    predicted = described.predicted
    assert described.ranks == 2
    assert [row.name for row in described.rows] == ["root (GPT)", "blocks.0 (Block)", "blocks.1 (Block)"]
    assert predicted.parameters == held["parameters"]
    assert predicted.gradients == held["gradients"]
    assert predicted.optimizer == held["optimizer"]
    assert predicted.unsharded_peak == unsharded


@check(ranks=(2, 4), options={"tp": {}, "sequence": {"sequence": True}})
def a_description_of_layers_has_the_parts_bytes(options: dict[str, bool]) -> None:
    with Ledger() as ledger:
        model = cut(**options)
        model.blocks[0].up.weight.requires_grad_(False)
        described = describe(model)
        held, _ = held_after_a_step(ledger, model, lambda: sum_gradients(model.parameters()))
    predicted, ranks = described.predicted, dist.get_world_size()
    assert described.ranks == ranks
    for tag in ("parameters", "gradients", "optimizer"):
        assert getattr(predicted, tag) == held[tag], tag
    rows = {row.name: row for row in described.rows}
    up, norm = rows["blocks.0.up (Linear)"], rows["blocks.0.norm1 (LayerNorm)"]
    assert up.whole > up.rank >= up.whole // ranks
    assert norm.rank == norm.whole
    assert up.frozen == 24 * 96
    assert up.strategy == "weight Shard(0), bias Shard(0)"
    assert "blocks.0.down (Linear)" in str(described)


@check(options=OPTIONS)
def a_program_has_its_collectives_and_no_wait_is_missing(options: dict[str, bool]) -> None:
    def build() -> Trainer:
        parameters = list((model := cut(**options)).parameters())
        return Trainer(model, torch.optim.AdamW(parameters), [lambda: sum_gradients(parameters)])

    trainer = build()
    with comm.record() as calls:
        take_step(trainer, (TOKENS, TOKENS), torch.device("cpu"))
    program = record_steps(build, (TOKENS, TOKENS), steps=1)
    issued = [each.call for each in program.instructions if isinstance(each, Issue)]
    assert len(issued) > 10
    assert subjects(issued) == subjects(calls)
    assert replay(program, A100).hazards == []


# Order


def steps_with_announcements(**options: bool) -> list[str]:
    said: list[str] = []
    announce = Order.announce
    with patch.object(Order, "announce", lambda self, what: (said.append(what), announce(self, what))):
        model = cut(layers=1, **options)
        model(TOKENS, TOKENS).backward()
        sum_gradients(model.parameters())
    return said


def around_a_block_on_rank_0() -> None:
    model = cut()
    if dist.get_rank() == 0:
        del model.blocks[1]
    model(TOKENS, TOKENS)


def test_ranks_compare_what_they_are_about_to_issue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    for said in launch(lambda: steps_with_announcements(sequence=True), 2):
        assert "reduce-scatter of blocks.0.out (Linear), 576 x float32" in said
        assert said[-1].startswith("all-reduce of gradients of sequence-parallel layers")
        assert len(said) == 8 + 6 + 1  # forward with the loss, backward, and the sum after it


def test_another_path_ends_with_both_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    with pytest.raises(RankError) as error:
        launch(around_a_block_on_rank_0, 2, timeout=60)
    assert "rank 0: all-reduce of the loss (cross_entropy)" in str(error.value)
    assert "rank 1: all-reduce of blocks.1.out (Linear)" in str(error.value)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
