"""Gradients between backwards inside `no_sync`: seen, dropped and refused as torch's are. And hooks on parameters."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch import Tensor, nn

from minifsdp.cost.data_parallel import Setting, accumulated
from minifsdp.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from minifsdp.grad_scaler import ShardedGradScaler
from minifsdp.instruments.watch.ledger import Ledger

check = Checks(__name__)

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, *_ = ShardingStrategy
Fsdp = FullyShardedDataParallel
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "grad op": {"sharding_strategy": SHARD_GRAD_OP},
    "replicated": {"sharding_strategy": NO_SHARD},
    "low": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
    "offloaded": {"cpu_offload": CPUOffload(True)},
}


class Block(nn.Linear):
    """A unit."""


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(5, 5), nn.Tanh(), nn.Linear(5, 3))


def wrapped(orig: bool = False, **options: Any) -> Fsdp:
    return Fsdp(plain(), auto_wrap_policy={Block}, use_orig_params=orig, **options)


def backward(model: nn.Module, seed: int) -> None:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))
    model(x).square().sum().backward()


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@check(behaviour=26, kind=KINDS, orig=(False, True), set_to_none=(True, False), wide="combinations")
def zero_grad_drops_what_no_sync_has_accumulated(kind: dict[str, Any], orig: bool, set_to_none: bool) -> None:
    """In the middle of a window, and between a forward and its backward; the gradients are those of what follows."""
    expected = wrapped(orig, **kind)
    backward(expected, 2)
    model = wrapped(orig, **kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for before in ([], [3]):  # backwards outside, whose mean goes as well
        for seed in before:
            backward(model, seed)
        with model.no_sync():
            backward(model, 1)
        optimizer.zero_grad(set_to_none)
        backward(model, 2)
        assert_same(gradients(model), gradients(expected))
        model.zero_grad(set_to_none)


@check(behaviour=26, kind=KINDS, orig=(False, True))
def what_no_sync_accumulates_is_the_gradient_of_the_shards(kind: dict[str, Any], orig: bool) -> None:
    """This rank's own, whole, and not the mean that backwards before it have left, which comes back afterwards."""
    model, mean, own = wrapped(orig, **kind), wrapped(orig, **kind), plain()
    backward(model, 1)
    with model.no_sync():
        backward(model, 2)
    backward(own, 2)
    numel = sum(p.numel() for p in own.parameters())
    seen = [p.grad for p in model.parameters() if p.grad is not None]
    assert numel <= sum(g.numel() for g in seen) <= numel + 4  # padding
    total = sum(float(g.double().square().sum()) for g in seen)
    expected = sum(float(p.grad.double().square().sum()) for p in own.parameters())
    assert total == pytest.approx(expected, rel=1e-5 if "mixed_precision" not in kind else 0.05)
    backward(model, 3)
    backward(mean, 1)
    with mean.no_sync():
        backward(mean, 2)
        with Fsdp.summon_full_params(mean):  # nothing is lost on the way
            pass
    backward(mean, 3)
    assert_same(gradients(model), gradients(mean))
    assert all(g is None or g.shape == p.shape for g, p in zip(gradients(model), model.parameters(), strict=True))


@check(behaviour=26, kind={name: kind for name, kind in KINDS.items() if name != "replicated"}, orig=(False, True))
def a_step_with_it_is_refused(kind: dict[str, Any], orig: bool) -> None:
    """Each rank would step with its own gradient, or clip by a norm of it. Torch's step fails on the sizes."""
    model = wrapped(orig, **kind)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), ShardedGradScaler(device="cpu")
    scaler.scale(torch.ones(()))
    with model.no_sync():
        backward(model, 1)
    for use in (optimizer.step, partial(model.clip_grad_norm_, 1.0), partial(scaler.unscale_, optimizer)):
        with pytest.raises(
            RuntimeError, match=r"inside no_sync\(\) have not been reduced: before clipping or step\(\)"
        ):
            use()
    optimizer.zero_grad()
    model.clip_grad_norm_(1.0)
    optimizer.step()


@check(behaviour=26)
def one_parameter_alone_is_dropped() -> None:
    """With original parameters each has a gradient of its own, as an optimizer of some of them drops it."""
    model = wrapped(orig=True)
    with model.no_sync():
        backward(model, 1)
        model.module[2].weight.grad = None
        backward(model, 2)
    backward(model, 3)
    others, last = wrapped(orig=True), wrapped(orig=True)
    for seed in (1, 2, 3):
        with others.no_sync() if seed < 3 else warnings.catch_warnings():
            backward(others, seed)
    for seed in (2, 3):
        with last.no_sync() if seed < 3 else warnings.catch_warnings():
            backward(last, seed)
    for (name, p), a, b in zip(model.named_parameters(), others.parameters(), last.parameters(), strict=True):
        expected = b if name == "2.weight" else a
        assert p.grad is None or torch.equal(p.grad, expected.grad), name


# Hooks


@check(kind=KINDS, orig=(False, True), wide="combinations")
def hooks_of_what_the_optimizer_has_see_reduced_gradients(kind: dict[str, Any], orig: bool) -> None:
    model, expected = wrapped(orig, **kind), wrapped(orig, **kind)
    for _ in range(4):
        backward(expected, 1)
    seen: list[Tensor] = []
    for p in model.parameters():
        p.register_hook(lambda gradient: 2 * gradient)
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    with model.no_sync():
        backward(model, 2)
        assert not seen
    model.zero_grad()
    backward(model, 1)
    backward(model, 1)
    held = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(seen) == 2 * len(held) > 0
    assert {id(gradient) for gradient in seen} == {id(gradient) for gradient in held}
    present = [None if found is None or not found.numel() else found for found in gradients(model)]
    assert_same(present, gradients(expected))


@check()
def hooks_that_would_be_lost_are_refused() -> None:
    for kind in ("register_hook", "register_post_accumulate_grad_hook"):
        module = plain()
        getattr(module[2].weight, kind)(lambda _: None)
        with pytest.raises(
            RuntimeError, match=r"^hooks of weight would be lost: .* wrapping, or use_orig_params=True$"
        ):
            Fsdp(module[2])
        module = plain().to("meta")
        getattr(module[2].weight, kind)(lambda _: None)
        with pytest.raises(RuntimeError, match=r"^hooks of weight would be lost: register them after wrapping$"):
            Fsdp(module[2], use_orig_params=True, param_init_fn=lambda each: each.to_empty(device="cpu", recurse=False))


@check()
def hooks_run_on_all_ranks_alike() -> None:
    """A collective in one does not hang where nothing of the parameter is here."""
    model = wrapped(True)
    sums: list[Tensor] = []

    def hook(p: nn.Parameter) -> None:
        assert p.grad is not None
        assert p.grad.shape == p.shape
        norm = p.grad.double().norm()
        dist.all_reduce(norm)
        sums.append(norm)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    backward(model, 1)
    assert len(sums) == len(list(model.parameters()))


def first_rows(gradient: Tensor) -> None:
    gradient[:2] = 0


HOOKS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "rows in place": first_rows,
    "rows of a copy": lambda gradient: torch.cat([torch.zeros_like(gradient[:2]), gradient[2:]]),
    "a mask of its shape": lambda gradient: gradient * (torch.arange(gradient.numel()) % 3 > 0).view_as(gradient),
    "each element": lambda gradient: gradient.clamp(-0.1, 0.1),
}


@check(kind=KINDS, hook=HOOKS, wide="combinations")
def a_hook_of_an_original_parameter_has_its_shape(kind: dict[str, Any], hook: Any) -> None:
    model, expected = wrapped(True, **kind), wrapped(True, **kind)
    backward(expected, 1)
    for p in model.parameters():
        p.register_hook(hook)
    backward(model, 1)
    with Fsdp.summon_full_params(model, with_grads=True), Fsdp.summon_full_params(expected, with_grads=True):
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            changed = hook(q.grad)
            torch.testing.assert_close(p.grad, q.grad if changed is None else changed)


@check()
def a_hook_that_returns_another_shape_is_refused() -> None:
    model = wrapped(orig=True)
    model.module[2].weight.register_hook(lambda gradient: gradient.sum())
    with pytest.raises(
        RuntimeError, match=r"^a hook of register_hook on .*weight got a Tensor \(\d+, \d+\) and returned a Tensor \(\)"
    ):
        backward(model, 1)


@check(orig=(False, True))
def an_optimizer_that_steps_in_backward_is_refused(orig: bool) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    module = plain()
    _apply_optimizer_in_backward(torch.optim.SGD, module[2].parameters(), {"lr": 0.1})
    with pytest.raises(RuntimeError, match=r"^the optimizer of weight is to step in backward"):
        Fsdp(module[2], use_orig_params=orig)


@check()
def a_sharded_parameter_says_where_it_will_be() -> None:
    """As code that moves its inputs asks: `x.to(model.weight.device)`."""
    weight = wrapped().module[2].weight
    assert weight.device == torch.device("cpu")
    assert torch.ones(2, dtype=torch.float64).to(weight).dtype is torch.float32
    assert torch.ones(2).to(weight.device).sum() == 2
    assert len(weight) == 3
    with pytest.raises(RuntimeError, match="which is sharded"):
        weight.to(torch.float64)


PRECISIONS = {
    "fp32": (MixedPrecision(), 4),
    "fp16, reduced in fp32": (MixedPrecision(torch.float16, torch.float32), 4),
    "fp16": (MixedPrecision(torch.float16), 2),
    "reduced in bf16": (MixedPrecision(reduce_dtype=torch.bfloat16), 4),
}


@check(strategy=(FULL_SHARD, NO_SHARD), orig=(False, True))
def a_low_dtype_of_the_reduction_does_not_round_what_is_accumulated(strategy: ShardingStrategy, orig: bool) -> None:
    """In bf16 256 + 1 is 256, and 2.5e-8 is nothing in fp16: sums are taken in the parameters' dtype, and cast once."""
    for low, scales in ((torch.bfloat16, [256.0] + 50 * [1.0]), (torch.float16, 40 * [2.5e-8])):
        policy = MixedPrecision(reduce_dtype=low)
        with Ledger() as ledger:
            model = Fsdp(nn.Linear(4, 4, bias=False), None, strategy, mixed_precision=policy, use_orig_params=orig)
            for window in range(2):
                for number, scale in enumerate(scales, 1):
                    with model.no_sync() if number < len(scales) else contextlib.nullcontext():
                        (model(torch.ones(1, 4)).sum() * scale).backward()
                for p in model.parameters():
                    exact = torch.full_like(p, sum(scales) * (window + 1))
                    assert p.grad is None if not p.numel() else torch.allclose(p.grad, exact, rtol=0.1, atol=0)
            shard = sum(p.numel() for p in model.parameters()) * 4
            assert ledger.live()["gradients"] == shard


@check(ranks=3, precision=PRECISIONS, orig=(False, True))
def what_no_sync_has_accumulated_has_the_bytes_of_the_wider_dtype(
    precision: tuple[MixedPrecision, int], orig: bool
) -> None:
    policy, itemsize = precision
    with Ledger() as ledger:
        model = wrapped(orig, mixed_precision=policy)
        ledger.watch(model)
        with model.no_sync():
            backward(model, 1)
        units = [unit for m in Fsdp.fsdp_modules(model) if (unit := m._unit) is not None]
        shapes = [[unit.flat.numel] for unit in units]
        assert ledger.live()["gradients"] == accumulated(shapes, Setting(dist.get_world_size()), itemsize)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
