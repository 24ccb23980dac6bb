"""Stages in torch's DistributedDataParallel, which averages gradients only in the first backward after a forward.

Its public names suffice to do this after the last micro-batch. All micro-batches run inside `no_sync`. Then follow one
more forward and backward, of a stand-in for the module that gives each parameter a gradient of zero. torch's reducer
takes them for the last micro-batch, and averages the sums with its own buckets and communication hook.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class _Zero(torch.autograd.Function):
    """Nothing, whose gradient for the parameter is zero, and takes no memory."""

    @staticmethod
    def forward(ctx: Any, p: Tensor) -> Tensor:
        ctx.p = p
        return p.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.new_zeros(()).to(ctx.p.dtype).expand_as(ctx.p)


class _StandIn(nn.Module):
    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        self.held = params  # in a list, in which no module looks for its own

    def forward(self, first: Tensor) -> Tensor:
        zero: Any = _Zero.apply
        return sum((zero(p).to(first) for p in self.held), first)


def check_supported(ddp: DistributedDataParallel) -> None:
    """
    Raises:
        TypeError: it cannot be used with micro-batches.
    """
    for option in ("static_graph", "mixed_precision"):
        if getattr(ddp, option, None):
            raise TypeError(
                f"a stage is wrapped by torch's DistributedDataParallel with {option}, which does not support "
                "accumulation before the first reduction: leave it out, or use minifsdp.ddp's class"
            )


def reduce_accumulated(ddp: DistributedDataParallel) -> None:
    """Average all gradients over its ranks, unless this is inside `no_sync`.

    A parameter without a gradient counts as zero; with `find_unused_parameters`, it counts as unused.
    """
    if not ddp.require_backward_grad_sync:
        return
    module, ignored = ddp.module, set(ddp.parameters_to_ignore)
    params = [p for name, p in module.named_parameters() if p.requires_grad and name not in ignored]
    used = [p for p in params if p.grad is not None] if ddp.find_unused_parameters else params
    first = torch.zeros((), device=params[0].device, requires_grad=True)  # of a rank that has used none
    ddp.module = _StandIn(used)
    try:
        ddp.forward(first).backward()
    finally:
        ddp.module = module
