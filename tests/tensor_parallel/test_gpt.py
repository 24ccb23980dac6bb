"""The course's GPT on tensor-parallel ranks trains as on one process; what it sends is what the papers say."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from on_ranks import SCALES_SUMMANDS, Checks, mesh_of
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from torchs_calls import GATHER, REDUCTION, torchs_calls
from tp_small_model import adamw, parts, sgd

from minifsdp import comm
from minifsdp.fsdp2 import fully_shard
from minifsdp.gpt import GPT, Block
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.tensor_parallel import parallelize_gpt

check = Checks(__name__)
VOCABULARY, WIDTH, HEADS, LENGTH = 61, 48, 12, 24  # 12 heads and 24 tokens: for 2, 3 and 4 ranks; 61 for none
OPTIONS = {"tp": {}, "sequence": {"sequence": True}, "regather": {"sequence": True, "regather": True}}


def gpt(**sizes: Any) -> GPT:
    torch.manual_seed(0)
    sizes = {"vocabulary": VOCABULARY, "width": WIDTH, "layers": 2, "heads": HEADS, "context": LENGTH, **sizes}
    return GPT(**sizes).to(torch.float64)


def batch(step: int, row: int = 0) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(100 * step + row))
    return tokens[:, :-1], tokens[:, 1:]


def assert_alike(what: Any, expected: Tensor) -> None:
    """A tensor and that of one process; a fused q, k, v is [3, width, ..] here."""
    mine, other = parts(what, expected.view(what.shape))
    torch.testing.assert_close(mine, other, rtol=0, atol=1e-9)


class Step(NamedTuple):
    losses: Tensor  # [rows]
    gradients: list[Tensor]
    norm: Tensor | None


@cache
def trained_by_one_process(rows: int, tied: bool, optimizer: Any, clip: float | None) -> tuple[list[Step], GPT]:
    """Two steps with the rows' mean loss, the second from the state of the first, and the model."""
    alone, steps = gpt(tied=tied), []
    mine = optimizer(alone.parameters())
    for step in range(2):
        losses = torch.stack([alone(*batch(step, each)) for each in range(rows)])
        losses.mean().backward()
        gradients = [p.grad.clone() for p in alone.parameters()]
        norm = None if clip is None else clip_grad_norm_(alone.parameters(), clip)
        steps.append(Step(losses.detach(), gradients, norm))
        mine.step()
        mine.zero_grad()
    return steps, alone


def assert_trains_as_one_process(
    model: Any, rows: int = 1, row: int = 0, optimizer: Any = sgd, clip: float | None = None
) -> None:
    """Losses, gradients, norms and parameters."""
    steps, alone = trained_by_one_process(rows, model.head.weight is model.embed.weight, optimizer, clip)
    mine = optimizer(model.parameters())
    for step, expected in enumerate(steps):
        loss = model(*batch(step, row))
        assert abs(loss.item() - expected.losses[row].item()) < 1e-9
        loss.backward()
        for p, gradient in zip(model.parameters(), expected.gradients, strict=True):
            assert_alike(p.grad, gradient)
        if clip is not None:
            norm = clip_grad_norm_(model.parameters(), clip, foreach=None if SCALES_SUMMANDS else False)
            assert expected.norm > clip
            assert abs(norm.full_tensor() - expected.norm) < 1e-9
        mine.step()
        mine.zero_grad()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert_alike(p, q)


@check(ranks=(2, 4, 3), slow=(3,), options=OPTIONS, tied=(False, True), wide="combinations")
def it_trains_as_one_process_does(options: dict[str, bool], tied: bool) -> None:
    mesh = mesh_of((dist.get_world_size(),), "tp")
    model = parallelize_gpt(gpt(tied=tied), mesh, **options)
    assert (model.head.weight is model.embed.weight) == tied
    assert_trains_as_one_process(model)


@check(ranks=2, options=OPTIONS)
def it_trains_with_the_memory_ledger_and_clipping(options: dict[str, bool]) -> None:
    model = parallelize_gpt(gpt(), mesh_of((2,), "tp"), **options)
    with Ledger():
        assert_trains_as_one_process(model, clip=0.1)


@check(ranks=(4, 6, 8), slow=(6, 8), options=OPTIONS, tied=(True,), optimizer=(sgd,))
@check(ranks=(4, 6, 8), slow=(6, 8), options=OPTIONS, tied=(False,), optimizer=(adamw,), wide=True)
def it_trains_with_fsdp2_outside(options: dict[str, bool], tied: bool, optimizer: Any) -> None:
    """[dp, tp], tp = 2, 3, 4: both cut dimension 0 of most; clipping goes over both."""
    mesh = mesh_of((2, dist.get_world_size() // 2), "dp", "tp")
    model = parallelize_gpt(gpt(tied=tied), mesh["tp"], **options)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    assert all(p.device_mesh.mesh_dim_names == ("dp", "tp") for p in model.parameters())
    assert_trains_as_one_process(model, 2, mesh.get_local_rank("dp"), optimizer, clip=0.1)


@check(ranks=2, options=OPTIONS)
def it_trains_with_recomputation(options: dict[str, bool]) -> None:
    mesh = mesh_of((2,), "tp")
    model = parallelize_gpt(gpt(), mesh, **options)
    for block in model.blocks:
        block.forward = recomputed(block)
    assert_trains_as_one_process(model)


def recomputed(block: Block) -> Any:
    forward = block.forward
    return lambda x: checkpoint(forward, x, use_reentrant=False)


@check(ranks=(2, 3, 4), slow=(3,), options=OPTIONS)
def what_a_block_sends(options: dict[str, bool]) -> None:
    """Two collectives forward and two backward, 8 b s h (t - 1) / t elements: with sequence parallelism as many.

    To gather again sends another half of a ring's all-reduce for each of the two inputs.
    """
    t = dist.get_world_size()
    model = parallelize_gpt(gpt(layers=1), mesh_of((t,), "tp"), **options)
    (block,) = model.blocks
    part = LENGTH // t if options else LENGTH
    x = torch.randn(2, part, WIDTH, dtype=torch.float64, requires_grad=True)
    with comm.record() as forward:
        y = block(x)
    with comm.record() as backward:
        y.sum().backward()
    gathers, reductions = ("all_gather", "reduce_scatter") if options else ("all_reduce", "all_reduce")
    assert [call.op for call in forward] == [gathers, reductions] * 2 if options else [reductions] * 2
    again = [call for call in backward if call.op == "all_gather"][2:] if options.get("regather") else []
    assert len(again) == (2 if options.get("regather") else 0)
    assert len(backward) == len(forward) + len(again)
    share = 2 * LENGTH * WIDTH * 8 * (t - 1) // t
    assert sum(call.wire for call in forward + backward) == (8 + len(again)) * share


@check(ranks=2, sequence=(False, True))
def how_parameters_lie(sequence: bool) -> None:
    model = parallelize_gpt(gpt(), mesh_of((2,), "tp"), sequence)
    expected = {"qkv": Shard(1), "up": Shard(0), "head": Shard(0), "embed": Shard(0)}
    for name, p in model.named_parameters():
        layer, kind = name.split(".")[-2:]
        rows = Shard(1) if kind == "weight" else Replicate()
        wanted = rows if layer in ("out", "down") else expected.get(layer, Replicate())
        assert p.placements == (wanted,), name
    model(*batch(0)).backward()
    summands = {name for name, p in model.named_parameters() if p.grad.placements == (Partial(),)}
    norms = {name for name, _ in model.named_parameters() if "norm" in name or "position" in name}
    assert summands == (norms if sequence else set())


@check(ranks=(2, 3), slow=(3,))
def what_cannot_be_cut_is_refused_in_a_line() -> None:
    mesh = mesh_of((dist.get_world_size(),), "tp")
    with pytest.raises(ValueError, match="heads = 1 of Block cannot be shared by"):
        parallelize_gpt(gpt(heads=1), mesh)
    model = parallelize_gpt(gpt(), mesh, sequence=True)
    with pytest.raises(ValueError, match="sequences of 19 tokens cannot be cut"):
        model(*(t[:, :19] for t in batch(0)))
    model(*batch(0)).backward()  # as if nothing had been


@check(ranks=2, sequence=(False, True))
def an_error_in_forward_leaves_the_model_as_it_was(sequence: bool) -> None:
    model = parallelize_gpt(gpt(), mesh_of((2,), "tp"), sequence)
    before = {name: id(p) for name, p in model.named_parameters()}
    raising = model.blocks[1].down.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(*batch(0))
    raising.remove()
    assert {name: id(p) for name, p in model.named_parameters()} == before
    first = model(*batch(0)).item()
    assert first == parallelize_gpt(gpt(), mesh_of((2,), "tp"), sequence)(*batch(0)).item()


@check(ranks=(2, 4), sequence=(False, True))
def torchs_own_functions_are_called_as_often(sequence: bool) -> None:
    """Collectives native, by wrapping torch.distributed: what a block calls in forward and in backward."""
    tokens, targets = batch(0)

    def called(layers: int) -> tuple[Counter[Any], Counter[Any]]:
        model = parallelize_gpt(gpt(layers=layers), mesh_of((dist.get_world_size(),), "tp"), sequence)
        with torchs_calls() as forward:
            loss = model(tokens, targets)
        with torchs_calls() as backward:
            loss.backward()
        return Counter(forward), Counter(backward)

    size = 2 * LENGTH * WIDTH * 8
    with patch("minifsdp.gloo.wanted", lambda: "native"):
        pairs = zip(called(2), called(1), strict=True)
        of_a_block = [two - one for two, one in pairs]
    expected = {(GATHER, size): 2, (REDUCTION, size): 2} if sequence else {("all_reduce", size): 2}
    assert of_a_block == [expected, expected]


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
