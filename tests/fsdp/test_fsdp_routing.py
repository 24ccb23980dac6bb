"""Ranks whose data use different parameters of a unit: experts, heads of tasks, an early exit.

The examples are hypothesis', drawn alike on all ranks, which go through them in lockstep: what fails on one rank counts
as failed on all. Each trains a model in double precision and compares gradients and parameters with one process.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from on_ranks import Checks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from minifsdp import comm
from minifsdp.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    OverlapSchedule,
    PrefetchSchedule,
    RateLimitedSchedule,
    ShardingStrategy,
    SyncSchedule,
)
from minifsdp.fsdp.unit import SHARDED
from minifsdp.instruments.launch import report
from minifsdp.instruments.watch.ledger import Ledger

check = Checks(__name__)

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_ZERO2 = ShardingStrategy
WIDTH, ROWS = 3, 4
Fsdp = FullyShardedDataParallel
Route = tuple[bool, ...]
"""Which experts of one call a rank's rows reach; it may be none."""


class Experts(nn.Module):
    """One unit, or two if it is nested: experts in parallel, each used where a row asks for it.

    One of odd `hidden` returns its very input where no row asks for any.
    """

    def __init__(self, experts: int, hidden: int, nested: bool, tied: bool, frozen: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, hidden, bias=False), nn.Tanh(), nn.Linear(hidden, WIDTH))
            for _ in range(experts)
        )
        if tied and experts > 1:
            self.experts[-1][0].weight = self.experts[0][0].weight
        for expert in self.experts[:frozen]:
            expert.requires_grad_(False)
        self.inner = Experts(2, hidden, False, False, 0) if nested else None
        self.passes_on = bool(hidden % 2) and not nested

    def forward(self, x: Tensor, route: Route) -> Tensor:
        if not any(route) and self.passes_on:
            return x
        y = sum((expert(x) for expert, used in zip(self.experts, route, strict=False) if used), torch.zeros_like(x))
        return x + (self.inner(y, route[1:]) if self.inner else y)


@dataclass(frozen=True)
class Call:
    """One call of a unit, and what of it each rank's rows reach."""

    unit: int
    routes: tuple[Route, ...]  # rank by rank


@dataclass(frozen=True)
class Batch:
    """One micro-batch: its calls, and which heads and which call's output each rank's loss depends on."""

    calls: tuple[Call, ...]
    heads: tuple[Route, ...]
    exits: tuple[int, ...]  # after so many calls; those that follow run, and nothing comes of them
    sync: bool


@dataclass(frozen=True)
class Example:
    units: tuple[dict[str, Any], ...]
    embeds: bool  # the root has a layer before the units
    batches: tuple[Batch, ...]
    strategy: ShardingStrategy
    use_orig_params: bool
    schedule: str
    recompute: bool | None  # each call in an activation checkpoint; True: a reentrant one
    ledger: bool


class Net(nn.Module):
    """Units in a row, and heads in the root."""

    def __init__(self, example: Example) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH) if example.embeds else nn.Identity()
        self.units = nn.ModuleList(Experts(**unit) for unit in example.units)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(2))
        self.recompute = example.recompute

    def forward(self, x: Tensor, batch: Batch, rank: int) -> Tensor:
        out = x = self.first(x)
        for place, call in enumerate(batch.calls, 1):
            unit = self.units[call.unit]
            if self.recompute is None:
                x = unit(x, call.routes[rank])
            else:
                x = checkpoint(unit, x, call.routes[rank], use_reentrant=self.recompute)
            if place == batch.exits[rank]:
                out = x
        return sum((h(out).pow(2).mean() for h, used in zip(self.heads, batch.heads[rank], strict=True) if used))


SCHEDULES: dict[str, Callable[..., Any] | None] = {
    "default": None,
    "sync": SyncSchedule,
    "overlap": OverlapSchedule,
    "after": partial(PrefetchSchedule, backward=BackwardPrefetch.BACKWARD_POST),
    "all": partial(PrefetchSchedule, depth=None),
    "limited": RateLimitedSchedule,
    "limited to 1": partial(RateLimitedSchedule, depth=2, limit=1),
}


@st.composite
def examples(draw: st.DrawFn, ranks: int) -> Example:
    """Of one strategy and one schedule: these take turns, see `in_lockstep`."""
    use_orig_params = draw(st.booleans())
    units = []
    for _ in range(draw(st.integers(1, 3))):
        experts = draw(st.integers(1, 3))
        # One by one they can be frozen where parameters stay themselves; else all or none.
        frozen = draw(st.sampled_from(range(experts + 1) if use_orig_params else (0, 0, 0, experts)))
        nested, hidden = draw(st.booleans()), draw(st.sampled_from((2, 2, 5)))
        tied = draw(st.booleans())
        units.append({"experts": experts, "hidden": hidden, "nested": nested, "tied": tied, "frozen": frozen})
    embeds = draw(st.booleans())
    recompute = draw(st.sampled_from((None, None, False, True))) if embeds else None
    if recompute:
        # An open fault: where some ranks' unit returns its very input in a reentrant checkpoint, the next recomputation
        # gathers before this unit's reduction on these ranks, and after it on the others.
        units = [unit | {"hidden": unit["hidden"] & ~1} for unit in units]
    routes = st.tuples(*[st.tuples(*[st.booleans()] * 3)] * ranks)
    batches = []
    for sync in (*draw(st.sampled_from(((), (False,), (True,), (False, False)))), True):
        order = draw(st.lists(st.integers(0, len(units) - 1), min_size=1, max_size=4))
        heads = draw(st.tuples(*[st.sampled_from([(True, True), (True, False), (False, True)])] * ranks))
        # A unit in a reentrant checkpoint that nothing comes of is not run again: as one that a rank does not run.
        least = len(order) if recompute is not None else 0 if embeds else 1
        exits = draw(st.tuples(*[st.sampled_from([len(order), len(order), *range(least, len(order))])] * ranks))
        calls = tuple(Call(unit, draw(routes)) for unit in order)
        batches.append(Batch(calls, heads, exits, sync))
    ledger = draw(st.booleans())
    return Example(tuple(units), embeds, tuple(batches), FULL_SHARD, use_orig_params, "default", recompute, ledger)


def inputs(step: int, batch: int, rank: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(97 * step + 7 * batch + rank))


def as_one_process(example: Example, ranks: int, steps: int) -> list[dict[str, Tensor | None]]:
    """Gradients of each step: the mean over ranks, summed over micro-batches; and at last the parameters."""
    torch.manual_seed(3)
    net = Net(example)
    optimizer, found = torch.optim.AdamW(net.parameters(), 0.1, weight_decay=0.5), []
    for step in range(steps):
        optimizer.zero_grad()
        for number, batch in enumerate(example.batches):
            for rank in range(ranks):
                (net(inputs(step, number, rank), batch, rank) / ranks).backward()
        for unit in own_parameters(net):  # a unit has gradients of all of its parameters or of none, as in torch
            if any(p.grad is not None for p in unit):
                for p in unit:
                    p.grad = torch.zeros_like(p) if p.grad is None and p.requires_grad else p.grad
        found.append({name: p.grad for name, p in net.named_parameters()})
        optimizer.step()
    return [*found, dict(net.named_parameters())]


def own_parameters(net: Net) -> list[list[nn.Parameter]]:
    inside = {p for unit in net.units for p in unit.parameters()}
    units = [u for unit in net.units for u in (unit, unit.inner) if u is not None]
    own = [[p for p in unit.parameters() if not unit.inner or p not in set(unit.inner.parameters())] for unit in units]
    return [*own, [p for p in net.parameters() if p not in inside]]


def as_ranks(example: Example, steps: int) -> list[dict[str, Tensor | None]]:
    torch.manual_seed(3)
    net, options = Net(example), {}
    if example.strategy in (HYBRID_SHARD, HYBRID_ZERO2):
        options["device_mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    model = Fsdp(
        net,
        None,
        example.strategy,
        auto_wrap_policy={Experts},
        use_orig_params=example.use_orig_params,
        schedule=SCHEDULES[example.schedule],
        **options,
    )
    optimizer, found = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5), []
    for step in range(steps):
        optimizer.zero_grad()
        for number, batch in enumerate(example.batches):
            with nullcontext() if batch.sync else model.no_sync():
                model(inputs(step, number, dist.get_rank()), batch, dist.get_rank()).backward()
        found.append(whole_gradients(model))
        optimizer.step()
        for unit in units_of(model):
            assert unit.state is SHARDED, unit.title
            assert not unit.has_gradient, unit.title
    with Fsdp.summon_full_params(model):
        return [*found, {clean(name): p.detach().clone() for name, p in net.named_parameters()}]


def clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def units_of(model: nn.Module) -> list[Any]:
    return [m._unit for m in Fsdp.fsdp_modules(model) if m._unit is not None]


def whole_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Of each parameter; None if no rank has one: a slice of no elements has none."""
    found: dict[str, Tensor | None] = {}
    for prefix, m in model.named_modules():
        if not isinstance(m, Fsdp) or m._unit is None:
            continue
        unit = m._unit
        mine = torch.zeros_like(unit.flat.shard)
        for p, part in zip(unit.shards, unit.view.slices(mine), strict=True):
            part.copy_(torch.zeros_like(part) if p.grad is None else p.grad)
        there = torch.tensor([p.grad is not None for p in unit.shards], dtype=torch.int32)
        dist.all_reduce(there, dist.ReduceOp.MAX)
        full = torch.cat(gathered(mine, unit.group)) if unit.flat.layout.ranks > 1 else mine
        for index, (users, values) in enumerate(zip(unit.view.places, unit.flat.unflatten(full), strict=True)):
            name = clean(f"{prefix}." if prefix else "") + users[0].name
            found[name] = values if there[min(index, len(there) - 1)] else None
    return found


def gathered(part: Tensor, group: Any) -> list[Tensor]:
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    return parts


def assert_alike(example: Example) -> None:
    ranks, steps = dist.get_world_size(), 2
    with Ledger() if example.ledger else nullcontext():
        found = as_ranks(example, steps)
    for number, (got, want) in enumerate(zip(found, as_one_process(example, ranks, steps), strict=True)):
        for name, value in want.items():
            where = f"{name}, {'parameters' if number == steps else f'gradients of step {number}'}"
            mine = got[name]
            assert (mine is None) == (value is None), f"{where}: {mine}, {value}"
            if value is not None:
                assert torch.allclose(mine, value, rtol=1e-9, atol=1e-11), f"{where}: {mine - value}"


def in_lockstep(
    strategies: tuple[ShardingStrategy, ...], test: Callable[[Example], None], count: int, before: int = 0
) -> None:
    """Each example on all ranks; what one of them says of it, all of them tell hypothesis.

    After as many examples as there are pairs of a strategy and a schedule, each pair has had its turn.

    Args:
        before: so many of the first are left out: another check has them, for the same are drawn each time.
    """
    turns = enumerate(zip(cycle(strategies), cycle(SCHEDULES)))

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # to shrink one takes a second of each of thousands
    )
    @given(examples(dist.get_world_size()))
    def run(example: Example) -> None:
        number, (strategy, schedule) = next(turns)
        if number < before:
            return
        example = replace(example, strategy=strategy, schedule=schedule)
        report(example)  # the last one is shown where a rank hangs
        said: list[Any] = [None] * dist.get_world_size()
        try:
            test(copy.deepcopy(example))
            mine = None
        except Exception:
            mine = traceback.format_exc(limit=-6)
        dist.all_gather_object(said, mine)
        assert not any(said), said

    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        run()
    finally:
        torch.set_default_dtype(usual)


class Order(RateLimitedSchedule):
    """Writes down whose backward begins and ends, and which units have an unsharded gradient when one begins."""

    def __init__(self, units: Any) -> None:
        super().__init__(units)
        self.log: list[str] = []
        self.gradients: list[list[str]] = []

    def pre_backward(self, unit: Any) -> None:
        self.log.append(f"begin {unit.title.split()[0]}")
        self.gradients.append([each.title.split()[0] for each in self.units if each.has_gradient])
        super().pre_backward(unit)

    def reduce(self, unit: Any) -> None:
        self.log.append(f"reduce {unit.title.split()[0]}")
        super().reduce(unit)


def routed(*units: str, schedule: Any = Order, **options: Any) -> Any:
    """A model of two units of two experts each, after one step in which rank 1 uses what `units` say."""
    torch.manual_seed(3)
    both, routes = (True, True, False), {"both": (True, True, False), "one": (True, False, False), "none": (False,) * 3}
    calls = tuple(Call(number, (both, routes[mine])) for number, mine in enumerate(units))
    batch = Batch(calls, ((True, True), (True, False)), (len(units),) * 2, True)
    unit = {"experts": 2, "hidden": 2, "nested": False, "tied": False, "frozen": 0}
    example = Example((unit,) * len(units), False, (batch,), FULL_SHARD, False, "default", None, False)
    model = Fsdp(Net(example), auto_wrap_policy={Experts}, schedule=schedule, **options)
    model(inputs(0, 0, dist.get_rank()), batch, dist.get_rank()).backward()
    return model


@check(
    behaviour=20,
    units={"some of a unit": ("both", "one"), "none of one": ("none", "both"), "none of either": ("none", "none")},
)
def the_order_of_a_backward_is_that_of_the_forward_on_every_rank(units: tuple[str, ...]) -> None:
    model = routed(*units)
    expected = ["begin root", "begin units.1", "reduce units.1", "begin units.0", "reduce units.0", "reduce root"]
    assert model._engine.schedule.log == expected


@check()
def an_unused_parameter_does_not_keep_its_units_gradient_beyond_the_units_backward() -> None:
    model = routed("both", "one", schedule=lambda units: Order(units))
    at_root, at_last, at_first = model._engine.schedule.gradients
    assert "units.1" not in at_root + at_last + at_first  # on rank 1 as well, which does not use one of its experts


@check(strategy=(FULL_SHARD, SHARD_GRAD_OP, NO_SHARD))
def a_unit_may_return_its_very_input(strategy: ShardingStrategy) -> None:
    """The hook on such an output is on a node of the unit before: it says nothing of this unit's backward."""

    class Maybe(nn.Linear):
        def forward(self, x: Tensor, used: bool) -> Tensor:
            return super().forward(x) if used else x

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (Maybe(3, 3) for _ in range(3))

        def forward(self, x: Tensor, used: list[bool]) -> Tensor:
            return self.c(self.b(self.a(x, used[0]), used[1]), used[2])

    torch.manual_seed(3)
    net = Three()
    expected = copy.deepcopy(net)
    model = Fsdp(net, None, strategy, auto_wrap_policy={Maybe})
    for step in range(8):
        used = [[rank != 0 or step & 1, rank != 1 or step & 2, bool(rank == step >> 2)] for rank in range(2)]
        model.zero_grad()
        expected.zero_grad()
        x = inputs(step, 0, dist.get_rank()).requires_grad_()
        model(x, used[dist.get_rank()]).square().sum().backward()
        for rank in range(2):
            (expected(inputs(step, 0, rank).requires_grad_(), used[rank]).square().sum() / 2).backward()
        found = whole_gradients(model)
        for name, p in expected.named_parameters():
            assert (found[name] is None) == (p.grad is None), name
            assert p.grad is None or torch.allclose(found[name], p.grad), name


@check(strategy=(FULL_SHARD, SHARD_GRAD_OP, NO_SHARD))
def models_beside_each_other_keep_one_order(strategy: ShardingStrategy) -> None:
    """Two outermost units in one graph: what rank 1 leaves unused in the second does not wait until after the first."""
    both, one = (True, True, False), (True, False, False)
    torch.manual_seed(3)
    plain = nn.ModuleList(Experts(2, 2, False, False, 0) for _ in range(3))
    expected = copy.deepcopy(plain)
    models = [Fsdp(m, None, strategy) for m in plain]
    for step in range(2):
        x = inputs(step, 0, dist.get_rank())
        for model in models:
            x = model(x, (both, one)[dist.get_rank()])
        x.square().sum().backward()
        for rank in range(2):
            x = inputs(step, 0, rank)
            for m in expected:
                x = m(x, (both, one)[rank])
            (x.square().sum() / 2).backward()
    for model, m in zip(models, expected, strict=True):
        found = whole_gradients(model)
        for name, p in m.named_parameters():
            torch.testing.assert_close(found[name], p.grad)


class Judged(nn.Module):
    """Leaves an auxiliary loss on itself, as layers of experts do, made from operations after those of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out = x + self.inner(x).tanh()
        self.loss = self.router(x).softmax(-1).square().mean()
        self.seen.append(self.router(out).square().mean())
        return out


@check(
    strategy=(FULL_SHARD, SHARD_GRAD_OP),
    prefetch=(None, *BackwardPrefetch),
    way=("one", "in a list", "both"),
    wide="combinations",
)
def a_loss_that_a_unit_leaves_on_itself_begins_its_backward(
    strategy: ShardingStrategy, prefetch: BackwardPrefetch | None, way: str
) -> None:
    def total(outermost: nn.Module, net: nn.Sequential, rank: int, step: int) -> Tensor:
        out = outermost(inputs(step, 0, rank)).square().mean()
        judged = [m for m in net.modules() if isinstance(m, Judged)]
        left = [[m.loss] * (way != "in a list") + m.seen[-1:] * (way != "one") for m in judged]
        return out + sum(sum(losses) for losses in left)

    torch.manual_seed(3)
    net = nn.Sequential(Judged(), Judged(), nn.Linear(WIDTH, 2))
    expected = copy.deepcopy(net)
    model = Fsdp(net, None, strategy, auto_wrap_policy={Judged}, backward_prefetch=prefetch)
    for step in range(3):
        total(model, net, dist.get_rank(), step).backward()
        for rank in range(2):
            (total(expected, expected, rank, step) / 2).backward()
    for name, gradient in whole_gradients(model).items():
        torch.testing.assert_close(gradient, expected.get_parameter(name).grad)


@check(behaviour=27, strategy=(FULL_SHARD, SHARD_GRAD_OP, NO_SHARD), use_orig_params=(False, True))
def a_unit_that_no_loss_depends_on_has_no_gradient(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """It takes its turn all the same, since another rank's loss might."""

    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor, who: range) -> Tensor:
            aside, out = self.unused(x), self.used(x)
            return out.sum() + (0.0 * aside.sum() if dist.get_rank() in who else 0.0)

    policy = {nn.Linear}
    model = Fsdp(Aside(), None, strategy, auto_wrap_policy=policy, use_orig_params=use_orig_params)
    for who, is_there in ((range(0), False), (range(1), True), (range(2), True)):
        model.zero_grad()
        model(torch.ones(2, 3), who).backward()
        for p in model.module.unused.parameters():
            if p.numel():
                assert (p.grad is not None) == is_there, who
                assert p.grad is None or not p.grad.any()


@check(dtype=(torch.float64, torch.float32, torch.bfloat16, torch.float16))
def a_sum_over_nothing_is_minus_zero(dtype: torch.dtype) -> None:
    """What a rank without a gradient sends changes no sum, and is recognized where there is no other."""
    for op in (comm.SUM, comm.MEAN):
        parts = torch.full((2 * dist.get_world_size(),), -0.0, dtype=dtype)
        mean = torch.empty(2, dtype=dtype)
        comm.reduce_scatter(mean, parts, comm.world(), op).wait()
        assert mean.signbit().all()
        comm.all_reduce(parts, comm.world(), op).wait()
        assert parts.signbit().all()
        if dist.get_rank() == 0:
            parts.zero_()
        comm.all_reduce(parts, comm.world(), op).wait()
        assert not parts.signbit().any()
        assert not parts.any()


FIRST = {2: 15, 3: 0, 4: 4}
"""How many examples on so many ranks the checks have that are no `wide` ones."""


@check(behaviour=20)
def ranks_may_use_different_parameters_of_a_unit() -> None:
    in_lockstep((FULL_SHARD, SHARD_GRAD_OP, NO_SHARD), assert_alike, FIRST[2])


@check(behaviour=20, count=(21,), wide=True)  # every pair of strategy and schedule
@check(ranks=3, behaviour=20, count=(7,), wide=True)  # each of them
@check(ranks=(2, 3), slow=(2, 3), behaviour=20, count=(60,))
def they_may_in_many_ways(count: int) -> None:
    in_lockstep((FULL_SHARD, SHARD_GRAD_OP, NO_SHARD), assert_alike, count, FIRST[dist.get_world_size()])


@check(ranks=4)
def replicas_may_too() -> None:
    in_lockstep((HYBRID_SHARD, HYBRID_ZERO2), assert_alike, FIRST[4])


@check(ranks=4, count=(8,), wide=True)
@check(ranks=4, slow=(4,), count=(15,))
def replicas_may_in_many_ways(count: int) -> None:
    in_lockstep((HYBRID_SHARD, HYBRID_ZERO2), assert_alike, count, FIRST[4])


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
