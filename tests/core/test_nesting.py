"""Two wrappers for one parameter are refused in one line, torch's as well; side by side they train."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from on_ranks import Checks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from minifsdp import comm
from minifsdp.ddp import BucketedDDP, DistributedDataParallel, NaiveDDP, OverlappedDDP
from minifsdp.fsdp import FullyShardedDataParallel, ShardingStrategy
from minifsdp.fsdp.shard import shard
from minifsdp.fsdp2 import fully_shard
from minifsdp.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from minifsdp.zero import Zero1Optimizer, Zero2Optimizer

check = Checks(__name__)

CPU = torch.device("cpu")
Wrap = Callable[[nn.Module], nn.Module]

FSDP1: dict[str, Wrap] = {
    "flat": FullyShardedDataParallel,
    "originals": lambda module: FullyShardedDataParallel(module, use_orig_params=True),
    "no-shard": lambda module: FullyShardedDataParallel(module, sharding_strategy=ShardingStrategy.NO_SHARD),
}
DDP: dict[str, Wrap] = {
    "DDP": DistributedDataParallel,
    **{kind.__name__: kind for kind in (OverlappedDDP, BucketedDDP, NaiveDDP)},
}
OURS: dict[str, Wrap] = {**FSDP1, **DDP, "fully_shard": fully_shard}
TORCHS: dict[str, Wrap] = {
    "torchs-FSDP": lambda module: torchs.FullyShardedDataParallel(module, device_id=CPU),
    "torchs-originals": lambda module: torchs.FullyShardedDataParallel(module, device_id=CPU, use_orig_params=True),
    "torchs-fully_shard": torchs.fully_shard,
}
TORCHS_DDP: dict[str, Wrap] = {"torchs-DDP": nn.parallel.DistributedDataParallel}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)), nn.Linear(6, 6))


def nest(inner: Wrap) -> nn.Sequential:
    made = model()
    made[1] = inner(made[1])
    return made


def nests(inner: str, outer: str) -> bool:
    return all(kind in FSDP1 for kind in (inner, outer)) or inner == outer == "fully_shard"


def losses(wrapped: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    """Of all ranks' samples, before each of three steps."""
    optimizer = optimizer or torch.optim.SGD(wrapped.parameters(), lr=0.1)
    found = []
    for step in range(3):
        torch.manual_seed(step)
        loss = wrapped(torch.randn(4, 6).chunk(2)[dist.get_rank()]).square().mean()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        found.append(whole.item() / 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found


def assert_refused(make: Callable[[], Any], cure: str = "") -> None:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        make()
    text = str(caught.value)
    assert re.search("cannot take|is around|sharded already|is a DTensor|a shard of FSDP|was replaced", text), text
    assert cure in text
    assert "\n" not in text


# Refused


@check()
def ours_around_another_kind() -> None:
    for inner, wrap in {**OURS, **TORCHS, **TORCHS_DDP}.items():
        made = nest(wrap)
        for outer in (each for each in OURS if not nests(inner, each)):
            assert_refused(lambda made=made, outer=outer: OURS[outer](made), "parameters")


@check()
def ours_inside_another_kind() -> None:
    for outer in (*FSDP1, "fully_shard", *TORCHS):
        made = {**OURS, **TORCHS}[outer](model())
        part = getattr(made, "module", made)[1]
        for inner in (each for each in OURS if not nests(each, outer)):
            assert_refused(lambda part=part, inner=inner: OURS[inner](part), "parameters")


@check()
def torchs_around_and_inside_ours() -> None:
    for ours in (*FSDP1, "fully_shard"):
        for wrap in TORCHS.values():
            assert_refused(lambda ours=ours, wrap=wrap: wrap(nest(OURS[ours])), "one library")
            made = OURS[ours](model())
            assert_refused(lambda made=made, wrap=wrap: wrap(getattr(made, "module", made)[1]), "one library")


@check()
def torchs_ddp_around_ours() -> None:
    """Its constructor asks nothing of ours, so the first forward refuses; original parameters differ in size."""
    for ours in ("flat", "no-shard", "DDP"):
        made = nn.parallel.DistributedDataParallel(nest(OURS[ours]))
        assert_refused(lambda made=made: made(torch.randn(2, 6)), "one of them")


@check()
def ddp_whose_parameters_went_to_another() -> None:
    for later in (*FSDP1, "fully_shard", "DDP"):
        made = DistributedDataParallel(model())
        made.module[1] = OURS[later](made.module[1])
        assert_refused(lambda made=made: made(torch.randn(2, 6)))


def parallel(module: nn.Module) -> nn.Module:
    plan = {"1.0": ColwiseParallel(), "1.2": RowwiseParallel()}
    return parallelize_module(module, init_device_mesh("cpu", (2,)), plan)


@check()
def what_the_same_ranks_have_sharded() -> None:
    for wrap in OURS.values():
        assert_refused(lambda wrap=wrap: wrap(parallel(model())))
    for name in (*FSDP1, "fully_shard"):
        wrapped = OURS[name](model())
        assert_refused(lambda wrapped=wrapped: parallel(getattr(wrapped, "module", wrapped)), "before")
    for name in ("flat", "originals", "fully_shard"):
        for zero in (Zero1Optimizer, Zero2Optimizer):
            shards = OURS[name](model()).parameters()
            assert_refused(lambda shards=shards, zero=zero: zero(shards, torch.optim.SGD, lr=0.1))
    for name in ("flat", "originals", "fully_shard"):
        assert_refused(lambda name=name: shard(nest(OURS[name]), lambda module: False, comm.world()))


# Right


def ignoring(part: nn.Module) -> dict[str, Any]:
    return {"ignored_states": list(part.parameters())}


def ddp_ignoring(whole: nn.Module, ddp: Wrap) -> nn.Module:
    names = [name for name, _ in whole.named_parameters() if name.startswith("1.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(whole, names)
    return ddp(whole)


@check()
def each_leaves_out_what_the_other_has() -> None:
    around: dict[str, Wrap] = {
        "FSDP": lambda whole: FullyShardedDataParallel(whole, **ignoring(whole[1])),
        "fully_shard": lambda whole: fully_shard(whole, ignored_params=set(whole[1].parameters())),
        "DDP": lambda whole: ddp_ignoring(whole, DistributedDataParallel),
        "torchs-DDP": lambda whole: ddp_ignoring(whole, nn.parallel.DistributedDataParallel),
    }
    expected = losses(DistributedDataParallel(model()))
    for inner in ("flat", "originals", "fully_shard", "DDP", "torchs-DDP"):
        for outer, wrap in around.items():
            if inner == "originals" and outer in ("FSDP", "torchs-DDP"):
                continue  # FSDP with flat parameters; and torch's DDP compares sizes of ignored parameters as well
            made = wrap(nest({**OURS, **TORCHS_DDP}[inner]))
            assert losses(made) == pytest.approx(expected, abs=1e-6), (inner, outer)


@check()
def wrappers_of_one_kind_nest() -> None:
    expected = losses(DistributedDataParallel(model()))
    for wrap in (*FSDP1.values(), fully_shard):
        assert losses(wrap(nest(wrap))) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
