"""The front door: all of FSDP in one function, beside one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch import Tensor, nn

from minifsdp import comm
from minifsdp.fsdp import OverlapSchedule, PrefetchSchedule, RateLimitedSchedule, SyncSchedule
from minifsdp.fsdp.schedules.host import HostSchedule
from minifsdp.fsdp.shard import shard
from minifsdp.instruments.watch.ledger import Ledger

check = Checks(__name__)

WIDTH = 5
SCHEDULES: dict[str, Callable[..., Any]] = {
    "sync": SyncSchedule,
    "overlap": OverlapSchedule,
    "prefetch": PrefetchSchedule,
    "two ahead": partial(PrefetchSchedule, depth=2),
    "limit": RateLimitedSchedule,
    "host": HostSchedule,
}


class Block(nn.Module):
    """A unit with another inside."""

    def __init__(self, inner: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.inner = Block() if inner else None

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = x + torch.tanh(self.linear(x)) * scale
        return self.inner(x) if self.inner is not None else x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight  # tied inside the root
        self.blocks = nn.ModuleList([Block(), Block(inner=True), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.last(x)


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


@check(schedule=tuple(SCHEDULES), ranks=(2, 3))
def it_trains_as_one_process(schedule: str) -> None:
    model = Net()
    plain = copy.deepcopy(model)
    shards = shard(model, is_block, comm.world(), SCHEDULES[schedule])
    optimizer, theirs = (torch.optim.AdamW(params, 0.01, foreach=False) for params in (shards, plain.parameters()))
    ranks = dist.get_world_size()
    for step in range(3):
        torch.manual_seed(step)
        batch = torch.randn(ranks, 4, WIDTH)
        model(batch[dist.get_rank()]).square().mean().backward()
        plain(batch.flatten(0, 1)).square().mean().backward()
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()
        torch.manual_seed(10 + step)
        x = torch.randn(4, WIDTH)
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x))


@check(ranks=(2, 3))
def a_rank_holds_its_part_between_steps() -> None:
    with Ledger() as ledger:
        model = Net()
        numel = sum(p.numel() for p in model.parameters())
        shards = shard(model, is_block, comm.world())
        model(torch.ones(2, WIDTH)).square().mean().backward()
    ranks = dist.get_world_size()
    assert len(shards) == 5
    assert numel / ranks <= sum(p.numel() for p in shards) < numel / ranks + len(shards)
    assert not [p for p in model.parameters() if p.numel()]  # the optimizer has them
    live = ledger.live()
    assert live["unsharded"] == 0
    assert live["gradients"] == sum(p.numel() for p in shards) * 4


@check()
def a_forward_that_raises_is_forgotten() -> None:
    model = Net()
    shards = shard(model, is_block, comm.world())
    with pytest.raises(RuntimeError):
        model(torch.ones(2, WIDTH + 1))
    model(torch.ones(2, WIDTH)).square().mean().backward()
    assert all(p.grad is not None for p in shards)


@check()
def a_parameter_of_two_units_is_refused() -> None:
    model = Net()
    model.blocks[2].linear.weight = model.first.weight
    with pytest.raises(
        ValueError, match=r"first\.weight and blocks\.2\.linear\.weight are one parameter, in two units"
    ):
        shard(model, is_block, comm.world())


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
