"""Several forwards before their backwards, as the micro-batches of a pipeline have them: GPipe and 1F1B."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch import Tensor, nn

from minifsdp import comm
from minifsdp.fsdp import (
    FullyShardedDataParallel as Fsdp,
)
from minifsdp.fsdp import (
    ModuleWrapPolicy,
    OverlapSchedule,
    PrefetchSchedule,
    RateLimitedSchedule,
    ShardingStrategy,
    StateDictType,
    SyncSchedule,
)
from minifsdp.fsdp.schedules.host import HostSchedule
from minifsdp.instruments.watch.ledger import Ledger

check = Checks(__name__)

FULL, GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
SCHEDULES = {
    "sync": SyncSchedule,
    "overlap": OverlapSchedule,
    "prefetch": PrefetchSchedule,
    "limit": RateLimitedSchedule,
    "host": HostSchedule,
}
GPIPE = ["f0", "f1", "f2", "f3", "b0", "b1", "b2", "b3"]
LIFO = ["f0", "f1", "f2", "f3", "b3", "b2", "b1", "b0"]
ONE_F_ONE_B = ["f0", "f1", "b0", "f2", "b1", "f3", "b2", "b3"]
ORDERS = {"gpipe": GPIPE, "lifo": LIFO, "1f1b": ONE_F_ONE_B}
BLOCKS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(BLOCKS)])


def wrapped(strategy: ShardingStrategy, **options: Any) -> Any:
    return Fsdp(net(), None, strategy, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def rows(number: int, rank: int) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * number + rank))


def run(model: Any, order: list[str], last_only: bool) -> dict[str, int]:
    """Forwards and backwards in this order; the all-gathers of each."""
    losses: dict[str, Tensor] = {}
    gathers: dict[str, int] = {}
    left = sum(each[0] == "b" for each in order)
    for each in order:
        kind, number = each
        with comm.record() as calls:
            if kind == "f":
                losses[number] = model(rows(int(number), dist.get_rank())).square().mean()
            else:
                left -= 1
                if last_only and left:
                    with model.no_sync():
                        losses.pop(number).backward()
                else:
                    losses.pop(number).backward()
        gathers[each] = [call.op for call in calls].count("all_gather")
    return gathers


@check(order=ORDERS, strategy=(FULL, GRAD_OP), schedule=SCHEDULES, last_only=(False, True), wide="combinations")
def gradients_are_those_of_one_process(
    order: list[str], strategy: ShardingStrategy, schedule: Any, last_only: bool
) -> None:
    model, plain = wrapped(strategy, schedule=schedule, use_orig_params=True), net()
    for number in range(4):
        for rank in range(dist.get_world_size()):
            (plain(rows(number, rank)).square().mean() / dist.get_world_size()).backward()
    run(model, order, last_only)
    with Fsdp.summon_full_params(model, with_grads=True):
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


@check(order=ORDERS, schedule=SCHEDULES, wide="combinations")
def what_stays_whole_is_gathered_once_for_all_micro_batches(order: list[str], schedule: Any) -> None:
    model = wrapped(GRAD_OP, schedule=schedule)
    assert sum(run(model, order, last_only=True).values()) == BLOCKS
    with torch.no_grad():
        model(rows(0, 0))
    assert all(m._unit.state.name == "SHARDED" for m in Fsdp.fsdp_modules(model) if m._unit is not None)


def units_of(model: Any) -> list[Any]:
    return [m._unit for m in Fsdp.fsdp_modules(model) if m._unit is not None]


@check(strategy=(FULL, GRAD_OP), schedule=SCHEDULES, use_orig_params=(False, True), wide="combinations")
def each_unit_reduces_now_or_later(strategy: ShardingStrategy, schedule: Any, use_orig_params: bool) -> None:
    model, plain = wrapped(strategy, schedule=schedule, use_orig_params=use_orig_params), net()
    for number in range(3):
        for rank in range(dist.get_world_size()):
            (plain(rows(number, rank)).square().mean() / dist.get_world_size()).backward()
    reductions = []
    for number, later in enumerate([{0, 2}, {2, 3}, {}]):
        for index, unit in enumerate(units_of(model)):
            unit.reduces = index not in later
        with comm.record() as calls:
            model(rows(number, dist.get_rank())).square().mean().backward()
        reductions.append([call.label.what for call in calls if call.op == "reduce_scatter"])
    names = [unit.title for unit in units_of(model)]
    assert reductions == [[names[3], names[1]], [names[1], names[0]], names[::-1]]
    with Fsdp.summon_full_params(model, with_grads=use_orig_params):
        found = [p.grad for p in model.parameters()] if use_orig_params else None
    expected = [p.grad for p in plain.parameters()]
    if found is None:
        shards = [torch.cat([g.flatten() for g in expected[i : i + 4]]) for i in range(0, len(expected), 4)]
        ranks, rank = dist.get_world_size(), dist.get_rank()
        found = [unit.shards[0].grad for unit in units_of(model)]
        expected = [nn.functional.pad(s, (0, -len(s) % ranks)).chunk(ranks)[rank] for s in shards]
    torch.testing.assert_close(found, expected)


@check(schedule=SCHEDULES)
def what_backward_leaves_whole_is_not_gathered_until_a_step(schedule: Any) -> None:
    model = wrapped(FULL, schedule=schedule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = units_of(model)[1:3]
    for unit in kept:
        unit.reshard_after_backward = False

    def gathered(step: Any) -> list[str]:
        with comm.record() as calls:
            step()
        return [call.label.what for call in calls if call.op == "all_gather"]

    def forward() -> None:
        forward.loss = model(rows(0, dist.get_rank())).square().mean()

    forward()
    forward.loss.backward()
    names = {unit.title for unit in kept}
    assert [unit.state.name for unit in units_of(model)] == ["SHARDED", "UNSHARDED", "UNSHARDED", "SHARDED"]
    assert names.isdisjoint(gathered(forward))  # the second micro-batch of a step
    assert len(names & set(gathered(lambda: forward.loss.backward()))) == 2  # they were freed after forward
    optimizer.step()
    before = [float(forward.loss)]
    assert names < set(gathered(forward))
    before.append(float(forward.loss))
    assert before[1] < before[0]


@check(order={"gpipe": GPIPE, "1f1b": ONE_F_ONE_B}, frozen=("", "0.", "up"))
def a_unit_is_freed_once_its_own_backward_is_over(order: list[str], frozen: str) -> None:
    """Not at the end of the micro-batch's, though other micro-batches have yet to reach it."""
    with Ledger() as ledger:
        model = wrapped(FULL, schedule=SyncSchedule, use_orig_params=True)
        for name, p in model.named_parameters():
            p.requires_grad_(not (frozen and frozen in name))
        ledger.reset_peaks()
        run(model, order, last_only=True)
        ranks, numel = dist.get_world_size(), sum(p.numel() for p in Block().parameters())
        assert ledger.peak_of("unsharded") == 4 * ranks * -(-numel // ranks)  # of one block


@check(order=ORDERS)
def every_backward_prefetches(order: list[str]) -> None:
    ahead: dict[int, list[bool]] = defaultdict(list)

    class Counted(PrefetchSchedule):
        def begin_backward(self, units: Any) -> None:
            super().begin_backward(units)
            ahead[len(ahead)] = []

        def issue_backward(self, unit: Any) -> None:
            ahead[len(ahead) - 1].append(unit.state.name != "SHARDED")
            super().issue_backward(unit)

    run(wrapped(FULL, schedule=Counted), order, last_only=False)
    # But for the first: there is nothing before it that could gather it
    assert ahead == {number: [False] + [True] * (BLOCKS - 1) for number in range(4)}


@check(how=("optimizer", "in place", "optimizer of one rank's gradients"), orig=(False, True))
def values_that_have_changed_are_gathered_again(how: str, orig: bool) -> None:
    """Though a graph of the old ones is alive, and its backward may still come."""
    model = wrapped(GRAD_OP, use_orig_params=orig)
    x = rows(0, 0)
    before = model(x)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with torch.no_grad():
        for p in model.parameters():
            if how == "in place":
                p.add_(1)
            elif how == "optimizer" or dist.get_rank() == 0:
                p.grad = torch.ones_like(p)
    if how != "in place":
        optimizer.step()
        optimizer.zero_grad()
    after, expected = model(x), net()
    with torch.no_grad(), Fsdp.summon_full_params(model):
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            q.copy_(p)
    torch.testing.assert_close(after, expected(x))
    assert not torch.equal(before, after)


@check()
def what_a_local_state_dict_loads_is_gathered_again() -> None:
    """It is written to the shards past autograd, which counts no version of it."""
    model, other = wrapped(GRAD_OP), wrapped(GRAD_OP)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    x = rows(0, 0)
    model(x)  # with grad, and without a backward: the units stay whole
    kind = StateDictType.LOCAL_STATE_DICT
    with Fsdp.state_dict_type(model, kind), Fsdp.state_dict_type(other, kind):
        model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model(x), other(x))


@check()
def what_one_rank_holds_on_to_is_no_concern_of_the_others() -> None:
    """All ranks issue the same collectives, though one keeps a graph alive and the other does not."""
    model = wrapped(GRAD_OP)
    held = []
    gathers = []
    for number in range(3):
        with comm.record() as calls:
            output = model(rows(number, 0))
        gathers.append(len(calls))
        if dist.get_rank() == 0:
            held.append(output)
        del output
    assert gathers == [BLOCKS, 0, 0]
    with comm.record() as calls:
        model(rows(3, 0)).sum().backward()
    assert [call.op for call in calls] == ["reduce_scatter"] * BLOCKS
    for p in model.parameters():
        assert p.grad is not None


@check(strategy=(FULL, GRAD_OP))
def no_memory_piles_up_over_steps(strategy: ShardingStrategy) -> None:
    model = wrapped(strategy)
    optimizer = torch.optim.AdamW(model.parameters())
    with Ledger() as ledger:
        marks = []
        for _ in range(3):
            run(model, ONE_F_ONE_B, last_only=True)
            optimizer.step()
            optimizer.zero_grad()
            marks.append(ledger.mark("step"))
    assert marks[1] == marks[2]
    assert marks[2]["unsharded"] == 0


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
