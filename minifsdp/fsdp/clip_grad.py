"""Gradient clipping by the norm over all ranks' shards."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor

from minifsdp import comm
from minifsdp.comm import Group


@torch.no_grad()
def clip_grad_norm(
    sharded: Iterable[Tensor],
    replicated: Iterable[Tensor],
    max_norm: float,
    norm_type: float,
    group: Group,
    device: torch.device,
) -> Tensor:
    """Scale gradients in place so that their total norm is at most `max_norm`.

    A rank sees 1/N of the sharded gradients: their norms^p add up over the ranks. A replicated gradient counts once.
    Padding is zero and adds nothing.

    Args:
        sharded: parameters of which each rank has a part.
        replicated: parameters that are the same on every rank.
        norm_type: p; may be infinity.

    Returns:
        the total norm before clipping, a scalar of the gradients' dtype, equal on all ranks.
    """
    gradients = [[p.grad for p in params if p.grad is not None] for params in (sharded, replicated)]
    ours, everyones = (_norm(grads, norm_type, device) for grads in gradients)
    if math.isinf(norm_type):
        comm.all_reduce(ours, group, comm.MAX).wait()
        total = torch.maximum(ours, everyones)
    else:
        power = ours**norm_type
        comm.all_reduce(power, group).wait()
        total = (power + everyones**norm_type) ** (1 / norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in (g for grads in gradients for g in grads):
        gradient.mul_(scale.to(gradient.dtype))
    dtypes = {g.dtype for grads in gradients for g in grads}
    return total.to(reduce(torch.promote_types, dtypes)) if dtypes else total


def _norm(gradients: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The p-norm of all of them as one vector, in float32 at least."""
    norms = [
        torch.linalg.vector_norm(g, norm_type, dtype=torch.promote_types(g.dtype, torch.float32))
        for g in gradients
        if g.numel()
    ]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), device=device)
