"""Reentrant checkpoints inside a unit: a leaf may have a gradient of each, and all of them count."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minifsdp import FullyShardedDataParallel, comm
from minifsdp.fsdp2 import fully_shard

check = Checks(__name__)

recomputed = partial(checkpoint, use_reentrant=True)


class Shared(nn.Module):
    """One layer, called in several places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.other = nn.Linear(4, 4)


class InTwo(Shared):
    def forward(self, x: Tensor) -> Tensor:
        return recomputed(self.layer, recomputed(self.layer, self.other(x)).tanh()).tanh()


class AroundAnother(Shared):
    def forward(self, x: Tensor) -> Tensor:
        return recomputed(self.layer, self.other(recomputed(self.layer, x)).tanh()).tanh()


class OutsideBefore(Shared):
    def forward(self, x: Tensor) -> Tensor:
        return recomputed(self.layer, self.layer(self.other(x)).tanh()).tanh()


class InOne(Shared):
    def forward(self, x: Tensor) -> Tensor:
        return self.other(recomputed(self.layer, x)).tanh()


KINDS = {kind.__name__: kind for kind in (InTwo, AroundAnother, OutsideBefore, InOne)}


def model_of(kind: str, calls: int) -> nn.Sequential:
    torch.manual_seed(0)
    unit = KINDS[kind]()
    return nn.Sequential(nn.Linear(4, 4), *[unit] * calls, nn.Linear(4, 4)).double()


def gradients(model: Any) -> list[Tensor]:
    torch.manual_seed(dist.get_rank())
    model(torch.randn(3, 4, dtype=torch.float64)).square().sum().backward()
    return [p.grad for p in model.parameters()]


def averaged(model: nn.Module) -> list[Tensor]:
    found = gradients(model)
    for gradient in found:
        dist.all_reduce(gradient)
    return [gradient / dist.get_world_size() for gradient in found]


@check(kind=tuple(KINDS), calls=(1, 2))
def all_gradients_of_a_leaf_arrive(kind: str, calls: int) -> None:
    wanted = averaged(model_of(kind, calls))
    model = model_of(kind, calls)
    fully_shard(model[1])
    fully_shard(model)
    for _ in range(2):
        model.zero_grad()
        with comm.record() as log:
            found = [gradient.full_tensor() for gradient in gradients(model)]  # type: ignore[attr-defined]
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-14)
        assert [call.op for call in log].count("reduce_scatter") == 2


@check(kind=tuple(KINDS), calls=(1, 2))
def all_gradients_of_a_leaf_arrive_in_a_flat_unit(kind: str, calls: int) -> None:
    wanted = averaged(model_of(kind, calls))
    model = model_of(kind, calls)
    inner = FullyShardedDataParallel(model[1], use_orig_params=True)
    for place in range(calls):
        model[1 + place] = inner
    sharded = FullyShardedDataParallel(model, use_orig_params=True)
    for _ in range(2):
        sharded.zero_grad()
        gradients(sharded)
        with FullyShardedDataParallel.summon_full_params(sharded, with_grads=True):
            found = [p.grad.clone() for p in sharded.parameters()]
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
