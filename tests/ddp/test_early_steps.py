"""An optimizer that steps inside backward: refused where the gradient is not averaged yet, right where it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from minifsdp import FullyShardedDataParallel, ShardingStrategy
from minifsdp.ddp import BucketedDDP, DistributedDataParallel, NaiveDDP, OverlappedDDP
from minifsdp.fsdp2 import fully_shard
from minifsdp.zero import Zero1Optimizer, Zero2Optimizer

check = Checks(__name__)

DDPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "naive": NaiveDDP,
    "bucketed": BucketedDDP,
    "overlapped": OverlappedDDP,
    "ddp": DistributedDataParallel,
    "views": partial(DistributedDataParallel, gradient_as_bucket_view=True),
    "unused": partial(DistributedDataParallel, find_unused_parameters=True),
    "static": partial(DistributedDataParallel, static_graph=True),
}
FSDPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fsdp2": fully_shard,
    **{
        f"{strategy.name} {'original' if orig else 'flat'}": partial(
            FullyShardedDataParallel, sharding_strategy=strategy, use_orig_params=orig, auto_wrap_policy={nn.Linear}
        )
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
        for orig in (False, True)
    },
}


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def backward(model: nn.Module, step: int = 0) -> None:
    model(rows(step, dist.get_rank())).square().sum().backward()


def stepping(model: nn.Module, kind: Callable[..., Any] = torch.optim.SGD) -> Callable[..., None]:
    """A hook's step: of the optimizer of each parameter that has a gradient."""
    optimizers = [kind([p]) for p in model.parameters()]

    def step(*_: Any) -> None:
        for optimizer in optimizers:
            if optimizer.param_groups[0]["params"][0].grad is not None:
                optimizer.step()
                optimizer.zero_grad()

    return step


def on_accumulated(model: nn.Module, step: Callable[..., None]) -> None:
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)


def on_last_accumulated(model: nn.Module, step: Callable[..., None]) -> None:
    next(model.parameters()).register_post_accumulate_grad_hook(step)


def on_gradient(model: nn.Module, step: Callable[..., None]) -> None:
    for p in model.parameters():
        p.register_hook(step)


def on_node(model: nn.Module, step: Callable[..., None]) -> None:
    model.nodes = [get_gradient_edge(p).node for p in model.parameters()]
    for node in model.nodes:
        node.register_hook(step)


def on_module(model: nn.Module, step: Callable[..., None]) -> None:
    for child in model.children():
        child.register_full_backward_hook(step)


HOOKS = {each.__name__: each for each in (on_accumulated, on_last_accumulated, on_gradient, on_node, on_module)}


def assert_refused(match: str, function: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(RuntimeError, match=match):
        function(*args)


@check(wrap=DDPS, hook=HOOKS, first=("hook", "wrapper"))
def a_step_before_the_reduction_is_refused(wrap: Any, hook: Any, first: str) -> None:
    model = chain()
    before = copy.deepcopy(model)
    if first == "hook":
        hook(model, stepping(model))
    ddp = wrap(model)
    if first == "wrapper":
        hook(model, stepping(model))
    assert_refused(r"SGD steps inside backward.*averaged", backward, ddp)
    dist.broadcast(equal := torch.tensor(all(map(torch.equal, model.parameters(), before.parameters()))), 0)
    assert equal, "nothing is changed"


@check(
    kind={"AdamW": torch.optim.AdamW, "fused": partial(torch.optim.SGD, lr=0.1, fused=True), "ZeRO-1": Zero1Optimizer}
)
def any_optimizer_is_refused(kind: Callable[..., Any]) -> None:
    ddp = DistributedDataParallel(chain())
    make = partial(kind, optimizer_class=torch.optim.SGD, lr=0.1) if kind is Zero1Optimizer else kind
    on_accumulated(ddp, stepping(ddp, make))
    assert_refused("steps inside backward", backward, ddp)


@check()
def a_hook_that_writes_to_its_parameter_is_refused() -> None:
    def write(p: Tensor) -> None:
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.1)

    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        ddp = DistributedDataParallel(chain(), **options)
        on_accumulated(ddp, write)
        assert_refused(r"parameter 0\.weight has a hook and was changed inside backward", backward, ddp)


@check(wrap=DDPS)
def steps_that_need_no_mean_are_left_alone(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Of another model, of the module alone, after backward."""
    ddp, other = wrap(chain()), chain()
    on_accumulated(other, stepping(other))
    before = copy.deepcopy(other)
    backward(nn.Sequential(ddp, nn.Linear(3, 6), other))
    assert not torch.equal(before[0].weight, other[0].weight)
    stepping(ddp)()
    if not isinstance(ddp, NaiveDDP):
        ddp.zero_grad()
        on_accumulated(ddp, stepping(ddp))
        backward(ddp.module)


@check(wrap={name: DDPS[name] for name in ("overlapped", "ddp", "static")})
def inside_no_sync_a_step_in_a_hook_is_refused(wrap: Callable[[nn.Module], nn.Module]) -> None:
    ddp = wrap(chain())
    on_accumulated(ddp, stepping(ddp))
    with ddp.no_sync():
        assert_refused("steps inside backward", backward, ddp)


@check(first=("hook", "optimizer"))
def zero_2_steps_after_backward_only(first: str) -> None:
    model = chain()
    if first == "hook":
        on_accumulated(model, lambda _: optimizer.step())
    optimizer = Zero2Optimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    if first == "optimizer":
        on_accumulated(model, lambda _: optimizer.step())
    assert_refused("Zero2Optimizer steps inside backward", backward, model)


@check(before=(False, True))
def zero_1_refuses_the_steps_of_others(before: bool) -> None:
    model = chain()
    if before:
        on_accumulated(model, stepping(model))
    optimizer = Zero1Optimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    if not before:
        on_accumulated(model, stepping(model))
    assert_refused("SGD steps inside backward, .* Zero1Optimizer has not averaged", backward, model)
    stepping(model)()  # after backward, it is the caller's business
    optimizer.step()


@check(each=(True, False))
def zero_1_averages_in_its_step_wherever_that_is(each: bool) -> None:
    model = chain()
    whole = copy.deepcopy(model)
    params = list(model.parameters())
    of_all = Zero1Optimizer(params, torch.optim.SGD, lr=0.1)
    optimizers = {p: Zero1Optimizer([p], torch.optim.SGD, lr=0.1) if each else of_all for p in params}
    if each:
        del of_all

    def step(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    on_accumulated(model, step)
    assert_trains_as(model, whole, list(model.parameters()))


@check(wrap=FSDPS)
def hooks_of_shards_step_with_the_mean(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = chain()
    whole = copy.deepcopy(model)
    sharded = wrap(model)
    for p in sharded.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)

        def step(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(step)
    assert_trains_as(sharded, whole)


def assert_trains_as(model: nn.Module, whole: nn.Module, params: list[Tensor] | None = None) -> None:
    """With hooks that step, as a plain model with all batches."""
    plain = torch.optim.SGD(whole.parameters(), lr=0.1)
    for step in range(3):
        backward(model, step)
        plain.zero_grad()
        sum(whole(rows(step, rank)).square().sum() / 2 for rank in range(2)).backward()
        plain.step()
    is_fsdp = isinstance(model, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(model) if is_fsdp else nullcontext():
        found = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in model.parameters()]
    for p, q in zip(found, whole.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
