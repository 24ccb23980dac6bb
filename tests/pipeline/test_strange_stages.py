"""Stages of other kinds: frozen, checkpointed, under autocast, with masks, without parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.functional import mse_loss

from minifsdp import pipeline
from minifsdp.pipeline import PipelineStage

check = Checks(__name__)
WIDTH, MICROS = 6, 4


class Twice(nn.Linear):
    """Used twice in a forward, and a subclass that split backwards leave as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x).tanh())


class Masked(nn.Module):
    """Passes on a tensor, a mask of bools and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Any = None, scale: Any = None) -> Any:
        mask, scale = (x > 0, x.new_tensor(2.0)) if mask is None else (~mask, scale)
        return self.linear(x).masked_fill(mask, 0.5) * scale, mask, scale


def usual() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH, bias=False))


def frozen() -> nn.Module:
    return usual().requires_grad_(requires_grad=False)


MODELS: dict[str, Any] = {  # the stages of three ranks
    "frozen first": lambda: [frozen(), usual(), usual()],
    "frozen between": lambda: [usual(), frozen(), usual()],
    "no parameters": lambda: [usual(), nn.GELU(), usual()],
    "identity": lambda: [usual(), nn.Identity(), usual()],
    "checkpointed": lambda: [checkpoint_wrapper(usual()) for _ in range(3)],
    "used twice": lambda: [Twice(WIDTH, WIDTH), Twice(WIDTH, WIDTH), nn.Sequential(*[nn.Linear(WIDTH, WIDTH)] * 2)],
    "masks": lambda: [Masked(), Masked(), Masked()],
}


def loss_of(output: Any, target: Tensor) -> Tensor:
    return mse_loss(output[0] if isinstance(output, tuple) else output, target)


def through(stages: Any, x: Any) -> Any:
    for stage in stages:
        x = stage(*x) if isinstance(x, tuple) else stage(x)
    return x


@check(ranks=3, model=tuple(MODELS), kind=("Schedule1F1B", "ScheduleInterleavedZeroBubble"))
def trains_as_one_process(model: str, kind: str) -> None:
    rank = dist.get_rank()
    stages = nn.ModuleList(MODELS[model]()).double()
    reference = copy.deepcopy(stages)
    x, target = (torch.randn(MICROS, WIDTH, dtype=torch.float64) for _ in range(2))
    for part in zip(x.chunk(MICROS), target.chunk(MICROS), strict=True):
        (loss_of(through(reference, part[0]), part[1]) / MICROS).backward()
    stage = PipelineStage(stages[rank], rank, 3, "cpu")
    schedule = getattr(pipeline, kind)([stage] if "Bubble" in kind else stage, MICROS, loss_of)
    for step in (1, 2):
        schedule.step(*([x] if rank == 0 else []), target=target if rank == 2 else None)
        for p, q in zip(stages[rank].parameters(), reference[rank].parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if q.grad is not None:
                torch.testing.assert_close(p.grad, step * q.grad, rtol=0, atol=1e-12)


@check(ranks=2, shape=((4, WIDTH), (4, 3, WIDTH)), dtype=(torch.float32, torch.bfloat16))
def a_split_backward_under_autocast(shape: Any, dtype: torch.dtype) -> None:
    """As a whole one: each product is in the low dtype, gradients in the parameters'."""
    rank = dist.get_rank()
    stages = nn.ModuleList(usual() for _ in range(2))
    reference = copy.deepcopy(stages)
    x, target = (torch.randn(*shape) for _ in range(2))
    cast = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
    for part in zip(x.chunk(2), target.chunk(2), strict=True):
        with cast:
            loss = loss_of(through(reference, part[0]), part[1])
        (loss / 2).backward()
    schedule = pipeline.ScheduleInterleavedZeroBubble([PipelineStage(stages[rank], rank, 2, "cpu")], 2, loss_of)
    with cast:
        schedule.step(*([x] if rank == 0 else []), target=target if rank == 1 else None)
    for p, q in zip(stages[rank].parameters(), reference[rank].parameters(), strict=True):
        assert p.grad.dtype == p.dtype
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0.01 if dtype == torch.bfloat16 else 1e-6)


class Doubled(nn.Module):
    """A loss with a parameter whose `.grad` becomes a view of the loss's gradient, which a hook doubles in place."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = loss_of(output, target) + self.shift.reshape(())
        loss.register_hook(lambda gradient: gradient.mul_(2))
        return loss


@check(ranks=2)
def each_micro_batch_begins_with_a_gradient_of_its_own() -> None:
    rank = dist.get_rank()
    stages, loss_fn = nn.ModuleList(usual() for _ in range(2)).double(), Doubled()
    reference = copy.deepcopy(stages)
    x, target = (torch.randn(MICROS, WIDTH, dtype=torch.float64) for _ in range(2))
    schedule = pipeline.Schedule1F1B(PipelineStage(stages[rank], rank, 2, "cpu"), MICROS, loss_fn)
    for number in (1, 2):
        schedule.step(*([x] if rank == 0 else []), target=target if rank == 1 else None)
        (2 * loss_of(through(reference, x), target)).backward()
        for p, q in zip(stages[rank].parameters(), reference[rank].parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-12)
        if rank == 1:
            assert loss_fn.shift.grad.item() == 2 * number


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
