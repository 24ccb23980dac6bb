"""Gradient clipping by the norm over all ranks' shards."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from functools import reduce
from itertools import chain

import torch
from torch import Tensor

from minifsdp import comm
from minifsdp.comm import Group, Label

_NORM = Label("the gradients' norm (clip_grad_norm_)")


@torch.no_grad()
def clip_grad_norm(
    sharded: Mapping[tuple[Group, ...], Iterable[Tensor]],
    replicated: Iterable[Tensor],
    max_norm: float,
    norm_type: float,
    device: torch.device,
) -> Tensor:
    """Scale gradients in place so that their total norm is at most `max_norm`.

    A rank sees 1/N of the sharded gradients, so the p-th powers of their norms are added over the ranks. A replicated
    gradient counts once. Padding is zero and adds nothing.

    Args:
        sharded: parameters of which each rank has a part, by the groups that they are sharded over.
        replicated: parameters that are the same on every rank.
        norm_type: p; may be infinity.

    Returns:
        the total norm before clipping, a scalar of the gradients' dtype, equal on all ranks.
    """
    params = [*chain(*sharded.values()), *replicated]
    # On every rank the same, unlike the gradients' dtypes: a rank may have none
    dtype = reduce(torch.promote_types, (p.dtype for p in params), torch.float32)
    power, op, add = (1.0, comm.MAX, torch.maximum) if math.isinf(norm_type) else (norm_type, comm.SUM, torch.add)
    total = _norm(replicated, norm_type, dtype, device) ** power
    for groups, theirs in sharded.items():
        part = _norm(theirs, norm_type, dtype, device) ** power
        for group in groups:
            comm.all_reduce(part, group, op, _NORM).wait()
        total = add(total, part)
    total = total ** (1 / power)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    gradients = [p.grad for p in params if p.grad is not None]
    scales = {where: scale.to(where) for where in {g.device for g in gradients}}  # the host waits, if one is there
    for gradient in gradients:
        gradient.mul_(scales[gradient.device].to(gradient.dtype))
    if not gradients:
        warnings.warn(
            f"Called FSDP.clip_grad_norm_() on rank {comm.world().rank()} with no gradients -- returning the total "
            f"norm in the default dtype {total.dtype}",
            stacklevel=3,
        )
        return total
    return total.to(reduce(torch.promote_types, (g.dtype for g in gradients)))


def _norm(params: Iterable[Tensor], norm_type: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The p-norm of the parameters' gradients as one vector, in `dtype`."""
    gradients = (p.grad for p in params if p.grad is not None and p.grad.numel())
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=dtype).to(device, non_blocking=True) for g in gradients]
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total
