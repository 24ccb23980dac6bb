"""Gradient clipping by the norm over all ranks' shards."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from functools import reduce
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from minifsdp import comm
from minifsdp.comm import Group, Label
from minifsdp.device import compute_device
from minifsdp.local_parts import groups_of, local_gradient, ranks_of
from minifsdp.optimizer_checks import check_shards
from minifsdp.private import name_of
from minifsdp.whole_tensors import is_flat

_NORM = Label("the gradients' norm (clip_grad_norm_)")
_agreed: Any = WeakIdKeyDictionary()
"""Parameters, of different ranks, for which these have found the same norm."""
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for parameters of FSDP2 and tensor parallelism, and plain ones between them.

    The norm is a plain tensor, which prints, instead of a DTensor, and NaN if one gradient is. There is one all-reduce
    for each process group instead of one for each parameter. To be called on all ranks, in any order of the parameters.

    Raises:
        ValueError: p is not above zero; a parameter is a flat shard, whose model has a method for this, or is on other
            ranks; or ranks that share some of the parameters have others of their own, such as experts, so that their
            norms differ.
        RuntimeError: a parameter is no shard, but an unsharded one; gradients have not been reduced; or the norm is not
            finite, and `error_if_nonfinite`.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    check_shards(params, "clip_grad_norm_ has parameters that were taken {}:", "Give it")
    _check_here(params)
    if any(map(is_flat, params)):
        raise ValueError("a parameter is a flat shard of FSDP: call clip_grad_norm_ of its FullyShardedDataParallel")
    groups = next((found for found in map(groups_of, params) if found), ())
    device = compute_device(None, params, groups[0]) if groups else params[0].device if params else torch.device("cpu")
    return clip_grad_norm({}, params, float(max_norm), float(norm_type), device, error_if_nonfinite)


def _check_here(params: Iterable[Tensor]) -> None:
    """
    Raises:
        ValueError: a parameter is on other ranks only, so that this one has no part of its gradient's norm.
    """
    for mesh in {p.device_mesh for p in params if isinstance(p, DTensor)}:
        if mesh.get_coordinate() is None:
            raise ValueError(
                f"clip_grad_norm_ has parameters on ranks {mesh.mesh.flatten().tolist()}, and this is rank "
                f"{comm.world().rank()}: give each rank those of its own meshes, add up the norms to the power of "
                "norm_type by hand, and call torch.nn.utils.clip_grads_with_norm_"
            )


@torch.no_grad()
def clip_grad_norm(
    sharded: Mapping[tuple[Group, ...], Iterable[Tensor]],
    replicated: Iterable[Tensor],
    max_norm: float,
    norm_type: float,
    device: torch.device,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients in place so that their total norm is at most `max_norm`.

    A rank sees 1/N of the sharded gradients, so the p-th powers of their norms are added over the ranks. A replicated
    gradient counts once. Padding is zero and adds nothing.

    Args:
        sharded: parameters of which each rank has a part, by the groups that they are sharded over.
        replicated: parameters that are the same on every rank.
        norm_type: p; may be infinity.
        error_if_nonfinite: refuse to scale by a norm that is infinite or NaN.

    Returns:
        the total norm before clipping, a scalar of the gradients' dtype, equal on all ranks.

    Raises:
        ValueError: p is not above zero; or, in the first call, the ranks have different norms.
        RuntimeError: with torch's text, the norm is not finite, and `error_if_nonfinite`.
    """
    if not norm_type > 0:
        raise ValueError(
            f"norm_type={norm_type} has no norm that shards can add up: give a number above 0, or infinity"
        )
    parts = _by_ranks([*sharded.items(), *((groups_of(p), [p]) for p in replicated)])  # which may be sharded by others
    params = [*chain(*parts.values())]
    # On every rank the same, unlike the gradients' dtypes: a rank may have none
    dtype = reduce(torch.promote_types, (p.dtype for p in params), torch.float32)
    power, add = (1.0, torch.maximum) if math.isinf(norm_type) else (norm_type, torch.add)
    total = torch.zeros((), dtype=dtype, device=device)
    for groups, theirs in sorted(parts.items(), key=lambda each: [*map(name_of, each[0])]):  # one order on all ranks
        part = _norm(theirs, norm_type, dtype, device) ** power
        for group in groups:
            if math.isinf(norm_type):
                # As integers, their bits have the order of the numbers, and NaN is above infinity: MAX may lose a NaN.
                comm.all_reduce(part.abs_().view(_BITS[dtype]), group, comm.MAX, _NORM).wait()
            else:
                comm.all_reduce(part, group, comm.SUM, _NORM).wait()
        total = add(total, part)
    total = total ** (1 / power)
    _check_agreed(total, parts)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    gradients = [g for g in map(local_gradient, params) if g is not None]
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


def _by_ranks(given: Iterable[tuple[tuple[Group, ...], Iterable[Tensor]]]) -> dict[tuple[Group, ...], list[Tensor]]:
    """Parameters by groups, of which those of the same ranks count as one."""
    known: dict[Any, tuple[Group, ...]] = {}
    parts: dict[tuple[Group, ...], list[Tensor]] = {}
    for groups, theirs in given:
        parts.setdefault(known.setdefault(ranks_of(groups), groups), []).extend(theirs)
    return parts


def _check_agreed(total: Tensor, parts: Mapping[tuple[Group, ...], list[Tensor]]) -> None:
    """Compare the norm once among all ranks that share a parameter: nothing shows which ranks have the others.

    Raises:
        ValueError: it differs, on all these ranks.
    """
    if len(parts) == 1 or all(p in _agreed for p in chain(*parts.values())):
        return
    groups = {name_of(group): group for them in parts for group in them}
    both = torch.stack([total, -total])
    for _, group in sorted(groups.items(), key=lambda each: (each[1].size(), each[0])):  # the last one hears of all
        comm.all_reduce(both, group, comm.MAX, _NORM).wait()
    most, least = both[0].item(), -both[1].item()
    if math.isfinite(most) and most - least > 1e-3 * most:
        raise ValueError(
            f"clip_grad_norm_ found norms from {least:.4g} to {most:.4g} on ranks that share parameters, because "
            "others, such as experts, are not the same on all of these ranks: make those DTensors on a mesh of all of "
            "them, or add up the norms of each mesh by hand and call torch.nn.utils.clip_grads_with_norm_"
        )
    _agreed.update(dict.fromkeys(chain(*parts.values())))


def _norm(params: Iterable[Tensor], norm_type: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The p-norm of the parameters' gradients as one vector, in `dtype`."""
    gradients = (g for g in map(local_gradient, params) if g is not None and g.numel())
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=dtype).to(device, non_blocking=True) for g in gradients]
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total
