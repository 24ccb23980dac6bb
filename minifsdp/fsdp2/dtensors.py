"""Sharded parameters as torch's DTensors, including those that tensor parallelism has already sharded.

Optimizers, state dicts, checkpoints and clipping work with DTensors without further code, because each DTensor knows
its whole shape, its mesh and its placement.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from minifsdp import private
from minifsdp.draws import draw_whole
from minifsdp.fsdp2.cut import Cut
from minifsdp.local_parts import as_placed as as_placed
from minifsdp.local_parts import like as like
from minifsdp.local_parts import local_of as local_of
from minifsdp.private import dtensor


def on(device: torch.device, local: Tensor) -> Tensor:
    """A rank's part, copied to the device if it is in host memory; on CUDA the copy is queued."""
    return local if local.device == device else local.to(device, non_blocking=True)


def spec_of(p: Tensor) -> Any:
    """The placement that a tensor-parallel style has already given a parameter; None if there is none."""
    return dtensor.spec_of(p) if isinstance(p, DTensor) else None


def whole_like(whole: Tensor, spec: Any) -> Tensor:
    """A tensor that is whole for the data-parallel ranks, placed as by a tensor-parallel style (`spec_of`)."""
    return whole if spec is None else dtensor.with_spec(whole, spec)


def shard(p: nn.Parameter, cut: Cut, mesh: DeviceMesh, rank: int, to: torch.device) -> nn.Parameter:
    """The parameter as a DTensor that is sharded over the last dimension of `mesh`, and replicated over any other.

    It has the hooks of `p`, which get reduced gradients from now on.
    """
    spec = spec_of(p)
    values = local_of(p.detach())
    if values.device.type != "meta":
        values = values.to(to)
    local = cut.of(values, rank).clone(memory_format=torch.contiguous_format)
    placements: list[Any] = [*[Replicate()] * (mesh.ndim - 1), Shard(cut.dim)]
    if spec is not None:
        inner = prod(spec.mesh.size(dim) for dim, each in enumerate(spec.placements) if each.is_shard(cut.dim))
        if inner > 1:  # cut by both: this cut is the outer one of the mesh and the inner one of the tensor
            placements[-1] = dtensor.StridedShard(cut.dim, split_factor=inner)
        placements += spec.placements
        mesh = dtensor.join_meshes([mesh, spec.mesh])
    draw_whole(mesh)
    stride = torch.empty(p.shape, device="meta").stride()
    sharded = DTensor.from_local(local, mesh, placements, run_check=False, shape=p.shape, stride=stride)
    made = nn.Parameter(sharded, p.requires_grad)
    private.pass_on_hooks(p, made)
    return made


def pin(sharded: Tensor) -> None:
    """Move this rank's part, which is in host memory, to pinned memory, unless it is still on meta."""
    local = local_of(sharded)
    if local.numel() and local.device.type == "cpu" and not local.is_pinned():
        dtensor.put_local(sharded, local.pin_memory())


def dim_of(placement: Any, p: nn.Parameter, name: str) -> int:
    """The dimension that a placement function chooses; 0 if it returns None.

    Raises:
        ValueError: it returns something other than a `Shard`, or a dimension that the parameter lacks.
    """
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise ValueError(f"shard_placement_fn returned {placement!r} for {name}: return Shard(dim) or None")
    if not -p.ndim <= placement.dim < p.ndim:
        raise ValueError(f"shard_placement_fn wants {placement} of {name}, which has {p.ndim} dimensions")
    return placement.dim % p.ndim
