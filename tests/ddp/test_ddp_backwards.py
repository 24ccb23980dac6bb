"""Which backwards DDP reduces: each that comes from a forward outside `no_sync`, whatever it reaches, or none of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.checkpoint import checkpoint

from minifsdp import comm
from minifsdp.ddp import BucketedDDP, DistributedDataParallel, NaiveDDP, OverlappedDDP
from minifsdp.zero import Zero1Optimizer, Zero2Optimizer

check = Checks(__name__)

Ddp = partial(DistributedDataParallel, bucket_cap_mb=200 / 2**20)
ALL: dict[str, Callable[..., nn.Module]] = {
    "plain": Ddp,
    "views": partial(Ddp, gradient_as_bucket_view=True),
    "unused": partial(Ddp, find_unused_parameters=True),
    "static": partial(Ddp, static_graph=True),
    "lesson": partial(OverlappedDDP, bucket_cap_mb=200 / 2**20),
}
DROP_IN = {name: wrap for name, wrap in ALL.items() if name != "lesson"}


class Heads(nn.Module):
    """A body and two heads, under reentrant checkpoints or none."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3)
        self.call = partial(checkpoint, use_reentrant=True) if checkpoints else lambda layer, x: layer(x)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.call(self.body, x).tanh()
        return self.call(self.left, x), self.call(self.right, x)


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


Scenario = Callable[[Callable[..., Any], int], None]
"""Runs forwards and backwards of a model on the batches of a rank."""


def second(model: Callable[..., Any], rank: int) -> None:
    left, right = model(rows(0, rank))
    (left.square() + right.square()).sum().backward(retain_graph=True)
    (left.abs() * right).sum().backward()


def second_of_a_part(model: Callable[..., Any], rank: int) -> None:
    left, right = model(rows(0, rank))
    (left.square() + right.square()).sum().backward(retain_graph=True)
    right.sum().backward()


def three(model: Callable[..., Any], rank: int) -> None:
    left, right = model(rows(0, rank))
    for output in (left * right, left, right):
        output.square().sum().backward(retain_graph=True)


def two_forwards_then_two_backwards(model: Callable[..., Any], rank: int) -> None:
    for left, right in [model(rows(step, rank)) for step in range(2)]:
        (left * right).sum().backward()


def grad_first(model: Callable[..., Any], rank: int) -> None:
    x = rows(0, rank).requires_grad_()
    left, right = model(x)
    torch.autograd.grad((left * right).sum(), x, retain_graph=True)
    (left * right).sum().backward()


def grad_of_parameters_first(model: Any, rank: int) -> None:
    left, right = model(rows(0, rank))
    torch.autograd.grad((left * right).sum(), list(model.parameters()), retain_graph=True)
    (left * right).sum().backward()


def penalty(model: Callable[..., Any], rank: int) -> None:
    """The norm of a gradient in the loss, whose second backward comes by the outputs, too."""
    x = rows(0, rank).requires_grad_()
    left, right = model(x)
    (slope,) = torch.autograd.grad((left * right).sum(), x, create_graph=True)
    (slope.square().sum() + left.sum() + right.sum()).backward()


def only_some(model: Any, rank: int) -> None:
    """`backward(inputs=...)`, first for all parameters, then for one."""
    params = list(model.parameters())
    left, right = model(rows(0, rank).requires_grad_())
    (left * right).sum().backward(inputs=params, retain_graph=True)
    left.square().sum().backward(inputs=params[:1])


def changed_in_place(model: Callable[..., Any], rank: int) -> None:
    left, right = model(rows(0, rank))
    left, right = left.view(-1).mul_(2), right.mul_(3)
    (left * right.view(-1)).sum().backward(retain_graph=True)
    left.sum().backward()


def zeroed_between(model: Any, rank: int) -> None:
    left, right = model(rows(0, rank))
    (left * right).sum().backward(retain_graph=True)
    model.zero_grad()
    (left + right).square().sum().backward()


REDUCED: dict[str, Scenario] = {
    each.__name__: each
    for each in (
        *(second, second_of_a_part, three, two_forwards_then_two_backwards, grad_first, grad_of_parameters_first),
        *(penalty, only_some, changed_in_place, zeroed_between),
    )
}


def whole_of(model: nn.Module, scenario: Scenario) -> nn.Module:
    """The mean over the ranks of what a plain copy of the model computes for each."""
    whole = copy.deepcopy(model)
    parts = []
    for rank in range(dist.get_world_size()):
        whole.zero_grad()
        scenario(whole, rank)
        parts.append([p.grad for p in whole.parameters()])
    for p, *grads in zip(whole.parameters(), *parts, strict=True):
        p.grad = sum(grads) / len(grads) if None not in grads else None
    return whole


def assert_means(model: nn.Module, whole: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-5), name


@check(wrap=ALL, scenario=REDUCED)
def every_backward_is_reduced(wrap: Callable[..., nn.Module], scenario: Scenario) -> None:
    ddp = wrap(Heads())
    whole = whole_of(ddp.module, scenario)
    for _ in range(3):  # a static graph is known from the second on
        ddp.zero_grad()
        scenario(ddp, dist.get_rank())
        assert_means(ddp, whole)


@check(wrap={"naive": NaiveDDP, "bucketed": BucketedDDP}, scenario=REDUCED)
def reductions_that_the_loop_asks_for_may_be_repeated(wrap: Callable[..., nn.Module], scenario: Scenario) -> None:
    ddp = wrap(Heads())
    whole = whole_of(ddp.module, scenario)
    scenario(ddp, dist.get_rank())
    for _ in range(2):
        ddp.sync_gradients()
        assert_means(ddp, whole)


@check(
    optimizer={"zero1": Zero1Optimizer, "zero2": Zero2Optimizer}, wrap={"alone": lambda module: module, "over DDP": Ddp}
)
def zero_steps_with_every_backward(optimizer: Callable[..., Any], wrap: Callable[..., nn.Module]) -> None:
    for scenario in (second, second_of_a_part, two_forwards_then_two_backwards, penalty):
        model = wrap(Heads())
        plain = getattr(model, "module", model)
        whole = whole_of(plain, scenario)
        sharded = optimizer(plain.parameters(), torch.optim.SGD, lr=0.1)
        scenario(model, dist.get_rank())
        sharded.step()
        torch.optim.SGD(whole.parameters(), lr=0.1).step()
        for p, q in zip(plain.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p, q)


@contextmanager
def reductions() -> Iterator[list[comm.Call]]:
    """The all-reduces that are issued inside the `with`."""
    calls: list[comm.Call] = []

    @contextmanager
    def watch(call: comm.Call, phase: str) -> Iterator[None]:
        calls.extend([call] * (phase == "issue"))
        yield

    comm.observers.append(watch)
    try:
        yield calls
    finally:
        comm.observers.remove(watch)


@check(wrap=ALL)
def a_backward_from_a_forward_inside_no_sync_is_not_reduced_until_one_is(wrap: Callable[..., nn.Module]) -> None:
    rank = dist.get_rank()

    def scenario(model: Callable[..., Any], rank: int) -> None:
        for step in range(4):
            left, right = model(rows(step, rank))
            (left * right).sum().backward()

    ddp = wrap(Heads())
    whole = whole_of(ddp.module, scenario)
    first = ddp(rows(0, rank))
    with ddp.no_sync():
        second, third = ddp(rows(1, rank)), ddp(rows(2, rank))
    (first[0] * first[1]).sum().backward()
    with reductions() as calls:
        for left, right in (second, third):
            (left * right).sum().backward()
        assert not calls
        left, right = ddp(rows(3, rank))
        (left * right).sum().backward()
    assert calls
    assert_means(ddp, whole)


@check()
def the_communication_hook_reduces_the_second_backward() -> None:
    for options in ({}, {"gradient_as_bucket_view": True}):
        ddp = Ddp(Heads(), **options)
        ddp.register_comm_hook(None, allreduce_hook)
        second(ddp, dist.get_rank())
        assert_means(ddp, whole_of(ddp.module, second))


@check()
def a_rank_whose_second_loss_uses_no_parameter_takes_part() -> None:
    """What this rank's outputs do not depend on is unused, as in the first backward."""

    class Maybe(Heads):
        def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
            left, _ = super().forward(x)
            return left, scale * 2

    ddp = Ddp(Maybe(), find_unused_parameters=True)
    whole = copy.deepcopy(ddp.module)
    scale = torch.ones(1, requires_grad=True)
    left, other = ddp(rows(0, dist.get_rank()), scale)
    left.sum().backward(retain_graph=True)
    (left.square().sum() if dist.get_rank() == 0 else other.sum()).backward()
    for rank in range(2):
        left, _ = whole(rows(0, rank), scale)
        (left.sum() + (left.square().sum() if rank == 0 else 0)).div(2).backward()
    assert_means(ddp, whole)


# Reentrant checkpoints: backwards inside backward


def twice(model: Callable[..., Any], rank: int) -> None:
    outputs = [model(rows(step, rank).requires_grad_()) for step in range(2)]
    sum((left * right).sum() for left, right in outputs).backward()


@check(wrap={name: wrap for name, wrap in ALL.items() if name != "static"})
def two_forwards_under_reentrant_checkpoints_are_refused(wrap: Callable[..., nn.Module]) -> None:
    """Though all gradients are there when the backward inside backward ends."""
    with pytest.raises(
        RuntimeError, match=r"ready only once.*use_reentrant=False|second gradient.*use_reentrant=False"
    ):
        twice(wrap(Heads(checkpoints=True)), dist.get_rank())


@check()
def two_forwards_under_reentrant_checkpoints_are_reduced_in_a_static_graph() -> None:
    ddp = Ddp(Heads(checkpoints=True), static_graph=True)
    whole = whole_of(ddp.module, twice)
    for _ in range(3):
        ddp.zero_grad()
        with reductions() as calls:
            twice(ddp, dist.get_rank())
        assert_means(ddp, whole)
    assert len(calls) == len(ddp.reducer.buckets)


@check(wrap={name: wrap for name, wrap in ALL.items() if name != "unused"})  # which takes them for unused, as torch
def one_forward_under_reentrant_checkpoints_is_reduced_once(wrap: Callable[..., nn.Module]) -> None:
    def once(model: Callable[..., Any], rank: int) -> None:
        left, right = model(rows(0, rank).requires_grad_())
        (left * right).sum().backward()

    ddp = wrap(Heads(checkpoints=True))
    whole = whole_of(ddp.module, once)
    for _ in range(3):
        ddp.zero_grad()
        once(ddp, dist.get_rank())
        assert_means(ddp, whole)


@check(wrap=DROP_IN)
def a_checkpoint_around_the_model_is_reduced_with_the_backward_around_it(wrap: Callable[..., nn.Module]) -> None:
    def scenario(model: Callable[..., Any], rank: int) -> None:
        left, right = model(rows(0, rank))
        again = checkpoint(model, rows(1, rank).requires_grad_(), use_reentrant=True)
        (left * right + again[0] * again[1]).sum().backward()

    ddp = wrap(Heads())
    whole = whole_of(ddp.module, scenario)
    scenario(ddp, dist.get_rank())
    assert_means(ddp, whole)


# Backwards that no output announces


class Holder:
    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors


class Hidden(Heads):
    """Its outputs are in an object of the user's."""

    def forward(self, x: Tensor) -> Any:
        return Holder(*super().forward(x))


@check(wrap=ALL)
def a_backward_that_no_output_announces_is_reduced_or_refused(wrap: Callable[..., nn.Module]) -> None:
    def scenario(model: Callable[..., Any], rank: int) -> None:
        left, right = model(rows(0, rank)).tensors
        (left * right).sum().backward()

    ddp = wrap(Hidden())
    if isinstance(ddp, OverlappedDDP):
        with pytest.raises(RuntimeError, match="let forward return"):
            scenario(ddp, dist.get_rank())
        return
    whole = whole_of(ddp.module, scenario)
    for _ in range(3):
        ddp.zero_grad()
        scenario(ddp, dist.get_rank())
        assert_means(ddp, whole)
    hidden = ddp(rows(0, dist.get_rank())).tensors
    (hidden[0] * hidden[1]).sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ready only once"):
        hidden[0].sum().backward()


@check(wrap={name: wrap for name, wrap in DROP_IN.items() if name != "static"})
def hidden_outputs_of_reentrant_checkpoints_are_reduced_or_refused(wrap: Callable[..., nn.Module]) -> None:
    ddp = wrap(Hidden(checkpoints=True))
    outputs = [ddp(rows(step, dist.get_rank()).requires_grad_()).tensors for step in range(2)]
    with pytest.raises(RuntimeError, match="ready only once"):
        sum((left * right).sum() for left, right in outputs).backward()


@check(wrap={name: wrap for name, wrap in ALL.items() if name != "static"})
def a_gradients_backward_after_another_is_refused(wrap: Callable[..., nn.Module]) -> None:
    """It does not come by the outputs."""
    ddp = wrap(Heads())
    x = rows(0, dist.get_rank()).requires_grad_()
    left, right = ddp(x)
    (left * right).sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"ready only once|gradients of gradients"):
        torch.autograd.grad(left.sum() + right.sum(), x, create_graph=True)[0].square().sum().backward()


@check(wrap={name: wrap for name, wrap in DROP_IN.items() if name not in ("static", "unused")})
def backwards_from_some_outputs_each_are_told_the_cure(wrap: Callable[..., nn.Module]) -> None:
    left, right = wrap(Heads())(rows(0, dist.get_rank()))
    left.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"ready only once.*find_unused_parameters=True"):
        right.sum().backward()


@check(wrap=ALL)
def gradients_of_the_module_itself_stay_this_ranks(wrap: Callable[..., nn.Module]) -> None:
    ddp = wrap(Heads())
    second(ddp, dist.get_rank())
    ddp.zero_grad()
    if dist.get_rank() == 0:
        second(ddp.module, 0)
        plain = copy.deepcopy(ddp.module)
        plain.zero_grad()
        second(plain, 0)
        assert_means(ddp.module, plain)


@check()
def a_second_backward_in_join_is_refused() -> None:
    ddp = Ddp(Heads())
    with pytest.raises(RuntimeError, match=r"inside join\(\) a forward has one backward"), ddp.join():
        second(ddp, dist.get_rank())
    ddp = Ddp(Heads())
    with ddp.join(enable=False):
        second(ddp, dist.get_rank())
    assert_means(ddp, whole_of(ddp.module, second))


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
