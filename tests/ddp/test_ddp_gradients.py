"""What a user of DDP may do with a gradient: hook it, clip it on its way, look at it through another tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from minifsdp.ddp import DistributedDataParallel
from minifsdp.instruments.watch.ledger import Ledger

check = Checks(__name__)

VIEWS = (False, True)
Torchs = nn.parallel.DistributedDataParallel


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 5), nn.Tanh(), nn.Linear(5, 3))


def twins(build: Callable[[], nn.Module] = chain, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Ours and torch's around equal models."""
    torch.manual_seed(1)
    model = build()
    return DistributedDataParallel(copy.deepcopy(model), **options), Torchs(model, **options)


def step(model: nn.Module, number: int = 0) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))
    model(x).square().mean().backward()


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-7, rtol=1e-5)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters()]


def clamp(p: Tensor) -> None:
    p.grad.clamp_(-1e-2, 1e-2)


@check()
def a_users_hook_sees_the_gradient_of_this_rank() -> None:
    for views in VIEWS:
        seen: list[list[Tensor]] = []
        for model in twins(gradient_as_bucket_view=views):
            mine: list[Tensor] = []
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(lambda p, mine=mine: mine.append(p.grad.clone()))
            for number in range(3):  # .grad is None, then kept, then None again
                step(model, number)
                if number == 1:
                    model.zero_grad()
            seen.append(mine)
        assert_equal(*seen)


@check()
def gradients_have_their_parameters_strides() -> None:
    """So channels-last kernels find what they want (reducer.cpp, `initialize_bucket_views`)."""

    def images() -> nn.Module:
        model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv2d(4, 3, 3, groups=1, bias=False), nn.Flatten())
        model[1].weight = nn.Parameter(model[1].weight.detach().permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3))
        return model[:1].to(memory_format=torch.channels_last).extend(model[1:])

    for views in VIEWS:
        ours, theirs = twins(images, gradient_as_bucket_view=views)
        for number in range(2):
            for model in (ours, theirs):
                x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(number + 10 * dist.get_rank()))
                model(x).square().mean().backward()
            assert_equal(gradients(ours), gradients(theirs))
            if views:
                strides = [p.stride() for p in ours.parameters()]
                assert [g.stride() for g in gradients(ours)] == [g.stride() for g in gradients(theirs)] == strides


@check()
def what_a_users_hook_does_to_a_gradient_is_what_is_averaged() -> None:
    for views in VIEWS:
        both = twins(gradient_as_bucket_view=views)
        for model in both:
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(clamp)
            step(model)
        assert_equal(*map(gradients, both))
        assert all(grad.abs().max() <= 1e-2 for grad in gradients(both[0]))


@check()
def a_view_of_a_gradient_that_is_kept_shows_the_mean() -> None:
    for views in VIEWS:
        both = twins(gradient_as_bucket_view=views)
        seen = []
        for model in both:
            step(model)
            seen.append([grad.view(-1) for grad in gradients(model)])
            model.zero_grad(set_to_none=False)
            step(model, 1)
        assert_equal(seen[0], [grad.flatten() for grad in gradients(both[0])])
        assert_equal(seen[0], [grad.flatten() for grad in gradients(both[1])])
        if not views:  # torch builds its buckets anew after the first backward, and these views show the old ones
            assert_equal(*seen)


@check()
def a_gradient_put_there_by_hand_shows_the_mean_through_its_views() -> None:
    """Memory of its own, with another tensor on all of it: only what this backward has made may move."""
    seen = []
    both = twins()
    for model in both:
        mine = []
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
            mine.append(p.grad.view(-1))
        step(model)
        seen.append(mine)
    assert_equal(*seen)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Undefined(nn.Module):
    """A function of the user's gives no gradient for `scale`, which backward reaches all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return NoGradient.apply(self.layer(x), self.scale)


@check()
def a_gradient_that_a_function_leaves_undefined_counts_as_zero() -> None:
    for views in VIEWS:
        both = twins(Undefined, gradient_as_bucket_view=views)
        for model in both:
            step(model)
            step(model, 1)
        assert_equal(*map(gradients, both))


@check()
def a_gradient_that_is_undefined_everywhere_is_none_where_unused_parameters_are_looked_for() -> None:
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        both = twins(Undefined, **options)
        for model in both:
            step(model)
            step(model, 1)
        assert [p.grad is None for p in both[0].parameters()] == [p.grad is None for p in both[1].parameters()]
        assert both[0].module.scale.grad is None


@check()
def gradients_of_another_dtype_are_refused() -> None:
    model = chain()
    weight = model[0].weight
    if hasattr(weight, "grad_dtype"):
        weight.grad_dtype = torch.float64
        with pytest.raises(ValueError, match=r"parameter 0\.weight has grad_dtype torch\.float64"):
            DistributedDataParallel(model)


@check()
def a_reducers_hooks_end_with_it() -> None:
    model = chain()
    for views in VIEWS:
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=views)
        assert [hooks_of(p) for p in model.parameters()] == [1] * 6
        step(ddp)
    ddp._set_static_graph()
    assert [hooks_of(p) for p in model.parameters()] == [1] * 6
    step(ddp)
    del ddp
    assert [hooks_of(p) for p in model.parameters()] == [0] * 6


def hooks_of(param: Tensor) -> int:
    """On the node that accumulates its gradient."""
    node = get_gradient_edge(param).node
    handle = node.register_hook(lambda *_: None)
    count = len(handle.hooks_dict_ref()) - 1
    handle.remove()
    return count


@check()
def the_ledger_changes_none_of_it_and_counts_each_gradient_once() -> None:
    psi = sum(p.nbytes for p in chain().parameters())
    for views in VIEWS:
        with Ledger() as ledger:
            model = DistributedDataParallel(chain(), gradient_as_bucket_view=views)
            seen: dict[Tensor, Tensor] = {}
            ledger.watch(model)
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.update({p: p.grad.clone()}))
            step(model)
        assert ledger.peak_of("gradients") == psi
        plain = copy.deepcopy(model.module)
        plain.zero_grad()
        step(plain)
        assert_equal([seen[p] for p in model.parameters()], gradients(plain))


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
