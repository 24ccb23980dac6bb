"""Gradient clipping by the norm over all ranks' shards."""

from __future__ import annotations

import math
import warnings
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
    sharded, replicated = list(sharded), list(replicated)
    # On every rank the same, unlike the gradients' dtypes: a rank may have none
    dtype = reduce(torch.promote_types, (p.dtype for p in (*sharded, *replicated)), torch.float32)
    gradients = [[p.grad for p in params if p.grad is not None] for params in (sharded, replicated)]
    ours, everyones = (_norm(grads, norm_type, dtype, device) for grads in gradients)
    if math.isinf(norm_type):
        comm.all_reduce(ours, group, comm.MAX).wait()
        total = torch.maximum(ours, everyones)
    else:
        power = ours**norm_type
        comm.all_reduce(power, group).wait()
        total = (power + everyones**norm_type) ** (1 / norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in (g for grads in gradients for g in grads):
        gradient.mul_(scale.to(gradient.device, gradient.dtype))
    dtypes = {g.dtype for grads in gradients for g in grads}
    if not dtypes:
        warnings.warn(
            f"Called FSDP.clip_grad_norm_() on rank {group.rank()} with no gradients -- returning the total norm in "
            f"the default dtype {total.dtype}",
            stacklevel=3,
        )
        return total
    return total.to(reduce(torch.promote_types, dtypes))


def _norm(gradients: list[Tensor], norm_type: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The p-norm of all of them as one vector, in `dtype`."""
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=dtype).to(device) for g in gradients if g.numel()]
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total
