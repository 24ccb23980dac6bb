"""Parameters cut over ranks, or copied to them, as torch's DTensors; and their local parts in a computation.

A DTensor knows its whole shape and its layout, so state dicts, optimizers, clipping, checkpoints and `fully_shard` work
with it. Computing with DTensors means to derive at every operator how the result lies. Our layers know that: they
compute on local parts, and only name the layout of each gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from minifsdp import comm, private
from minifsdp.process_groups import mesh_group
from minifsdp.tensor_parallel.layouts import Layout, from_front, layout_of, of_gradient, part_of, relaid

_cut: Any = WeakIdKeyDictionary()  # by the parameter that was: a tied one is found again, and stays tied


def distribute(p: nn.Parameter, mesh: DeviceMesh, layout: Layout, source: int | None) -> nn.Parameter:
    """The parameter as a DTensor that lies so; the same one for all users of a tied parameter.

    Args:
        p: whole, the same on all ranks unless `source` says whose values count.
        mesh: one dimension.
        layout: `Shard(dim)` or `Replicate()`.
        source: the rank of `mesh` whose values all get; None: each keeps its own.

    Raises:
        ValueError: a tied parameter is wanted in another layout than before.
    """
    if isinstance(p, DTensor):
        if p.placements != (layout,):
            raise ValueError(
                f"a tied parameter would lie as {p.placements[0]} and as {layout}: change one user's style"
            )
        return p
    if p not in _cut:
        group = mesh_group(mesh, 0)
        values = p.detach()
        if source is not None and values.device.type != "meta":
            comm.broadcast(values, source, group).wait()
        layout = from_front(layout, p.ndim)
        part = part_of(values, layout.dim, group).clone() if layout.is_shard() else values
        _cut[p] = nn.Parameter(private.with_spec(part, private.spec(mesh, layout, p.shape, p.dtype)), p.requires_grad)
    found: nn.Parameter = _cut[p]
    return distribute(found, mesh, layout, source)


def local_part(t: Tensor, gradient: Layout | None = None) -> Tensor:
    """This rank's part of a DTensor, for a computation after which its gradient lies so; None: as `t` does."""
    if not isinstance(t, DTensor):
        return t
    spec = private.spec_of(t)
    gradient = of_gradient(t.placements[0]) if gradient is None else gradient
    if (gradient,) != spec.placements:
        spec = private.spec(spec.mesh, gradient, t.shape, t.dtype)
    part: Tensor = _LocalPart.apply(t, spec)  # type: ignore[no-untyped-call]
    return part


class _LocalPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Any, spec: Any) -> Tensor:
        ctx.spec = spec
        local = private.local_of(t)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return private.with_spec(gradient, ctx.spec), None


def placed(x: Tensor, source: Layout, target: Layout, mesh: DeviceMesh, shape: torch.Size) -> Tensor:
    """A DTensor that lies as `target`, of this rank's `x`, which lies as `source`; its gradient may lie in any way.

    Args:
        shape: of the whole.
    """
    source, target = from_front(source, x.ndim), from_front(target, x.ndim)
    dtensor: Tensor = _Placed.apply(x, source, private.spec(mesh, target, shape, x.dtype))  # type: ignore[no-untyped-call]
    return dtensor


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Layout, spec: Any) -> Any:
        group, size = mesh_group(spec.mesh, 0), spec.shape[source.dim] if source.is_shard() else None
        ctx.back, ctx.group = of_gradient(source), group
        return private.with_spec(relaid(x.detach(), source, spec.placements[0], group, size), spec)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        found = layout_of(gradient)
        size = gradient.shape[found.dim] if found.is_shard() else None
        return relaid(private.local_of(gradient), found, ctx.back, ctx.group, size), None, None
