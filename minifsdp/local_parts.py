"""Parameters sharded by tensor parallelism: data parallelism averages and updates their local parts.

For a plain parameter the local part is the parameter itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from minifsdp import comm, private
from minifsdp.comm import Group, Label
from minifsdp.private import dtensor
from minifsdp.process_groups import global_ranks, mesh_group

replaced: Any = WeakIdKeyDictionary()
"""DTensors by the whole parameters that they replace. A module outside the plan may still have the whole one."""
sharers: Any = WeakIdKeyDictionary()
"""Such a parameter's modules: their names."""


def refuse_replaced(p: Tensor) -> None:
    """
    Raises:
        ValueError: the whole parameter is trained, too, so that two copies of a tied weight would part.
    """
    raise ValueError(
        f"{sharers.get(p, f'two modules with a weight {list(p.shape)}')} share a parameter, and only one of them is "
        "parallel: give both a style, in one plan or in two calls, and they stay tied"
    )


def has_hooks(p: Tensor) -> bool:
    """True if hooks would be lost with a parameter, other than those of measurements."""
    return bool(private.hooks_of(p)) or has_post_hooks(p)


def has_post_hooks(p: Tensor) -> bool:
    """True if a user has hooks that follow the accumulation of its gradient; measurements have `only_measures`."""
    return not all(getattr(hook, "only_measures", False) for hook in private.post_hooks_of(p).values())


def local_of(t: Tensor) -> Tensor:
    """This rank's part, the tensor itself: no autograd, no wait."""
    return dtensor.local_of(t) if isinstance(t, DTensor) else t


def like(local: Tensor, t: Tensor) -> Tensor:
    """`local` as this rank's part of a tensor in the layout of `t`, such as its gradient."""
    return dtensor.with_spec(local, dtensor.spec_of(t)) if isinstance(t, DTensor) else local


@torch.no_grad()
def local_gradient(p: Tensor) -> Tensor | None:
    """This rank's part of `p.grad` in the layout of `p`.

    Partial sums, as left by sequence parallelism, are first reduced over the tensor-parallel ranks, once and for all.
    """
    gradient: Any = p.grad
    if isinstance(gradient, DTensor) and gradient.placements != p.placements:  # type: ignore[attr-defined]
        p.grad = gradient = like(as_placed(gradient, dtensor.spec_of(p), gradient.dtype), p)
    return None if gradient is None else local_of(gradient)


def as_placed(gradient: Tensor, spec: Any, dtype: torch.dtype, label: Label | None = None) -> Tensor:
    """The local part of a gradient, in its parameter's placement over the tensor-parallel ranks.

    Args:
        spec: of the parameter; None: no style has placed it.
        dtype: in which partial sums are added up, if these ranks have some, as with sequence parallelism.
        label: of the collective that does it.
    """
    if spec is None:
        return gradient
    moves = list(zip(gradient.placements, spec.placements, strict=True))  # type: ignore[attr-defined]
    if all(found == wanted for found, wanted in moves):
        return local_of(gradient)
    if not all(found == wanted or (found.is_partial("sum") and wanted.is_replicate()) for found, wanted in moves):
        return local_of(gradient.to(dtype).redistribute(placements=spec.placements))  # type: ignore[attr-defined]
    local = local_of(gradient).to(dtype, copy=True)
    for dim, (found, wanted) in enumerate(moves):
        if found != wanted:
            comm.all_reduce(local, mesh_group(spec.mesh, dim), label=label).wait()
    return local


def cuts_of(p: Tensor) -> dict[int, Any]:
    """By mesh dimension the placements by which a parameter is sharded.

    FSDP2 after tensor parallelism makes strided shards, for which torch's `is_shard` returns False.
    """
    return {i: each for i, each in enumerate(p.placements) if hasattr(each, "dim")} if isinstance(p, DTensor) else {}


def groups_of(p: Any) -> tuple[Group, ...]:
    """The process groups over which a parameter is sharded."""
    return tuple(mesh_group(p.device_mesh, dim) for dim in cuts_of(p))


def ranks_of(groups: Iterable[Group]) -> tuple[Any, ...]:
    """Their ranks, by which all ranks tell groups apart: torch may have several of the same, and use any of them."""
    return tuple(map(_ranks_of, groups))


def _ranks_of(group: Group) -> Any:
    try:
        return tuple(global_ranks(group))
    except KeyError:  # torch does not know it, and makes no other of these ranks
        return group


def groups_on_meshes(params: Iterable[Any]) -> list[Group]:
    """The process groups along all dimensions of the meshes that parameters are on, also where they are replicated."""
    meshes = dict.fromkeys(p.device_mesh for p in params if isinstance(p, DTensor))
    return [mesh_group(mesh, dim) for mesh in meshes for dim in range(mesh.ndim)]


def check_replicated(p: Tensor, name: str, group: Group) -> None:
    """
    Raises:
        ValueError: the parameter is a DTensor on ranks of the group over which it would be averaged or sharded.
    """
    if isinstance(p, DTensor):
        shared = set(global_ranks(group)) & set(p.device_mesh.mesh.flatten().tolist())
        if len(shared) > 1:
            raise ValueError(
                f"{name} is a DTensor on ranks {sorted(shared)}, among which it would be averaged: pass the process "
                "group of its replicas, such as mesh.get_group('dp'), or their mesh, such as mesh['dp']"
            )
