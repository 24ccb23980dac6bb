"""Parameters cut over ranks, or copied to them, as torch's DTensors; and their local parts in a computation.

A DTensor knows its whole shape and its layout, so state dicts, optimizers, clipping, checkpoints and `fully_shard` work
with it. Computing with DTensors means to derive at every operator how the result lies. Our layers know that: they
compute on local parts, and only name the layout of each gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from minifsdp import comm, private
from minifsdp.comm import Group, Label
from minifsdp.process_groups import mesh_group
from minifsdp.tensor_parallel.layouts import Layout, from_front, layout_of, of_gradient, part_of, relaid

_cut: Any = WeakIdKeyDictionary()  # by the parameter that was: a tied one is found again, and stays tied
names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Of modules in their model, for the labels of their collectives."""


class Ranks(NamedTuple):
    """The ranks that share a layer.

    Attributes:
        mesh: of one dimension.
        group: that of the mesh, which takes a while to ask for.
        label: the layer, as the subject of its collectives.
    """

    mesh: DeviceMesh
    group: Group
    label: Label | None = None

    @staticmethod
    def of(mesh: DeviceMesh, module: nn.Module | None = None) -> Ranks:
        kind = type(module).__name__
        name = names.get(module) if module is not None else None
        return Ranks(mesh, mesh_group(mesh, 0), Label(f"{name} ({kind})" if name else kind) if module else None)


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
    """This rank's part of a DTensor, or the plain tensor itself; see `local_parts`."""
    return local_parts([t], gradient)[0]


def local_parts(tensors: Sequence[Any], gradient: Layout | None = None) -> Sequence[Tensor]:
    """This rank's parts of DTensors, for a computation; plain tensors are left alone.

    Args:
        gradient: how the gradients lie that come back; None: as the tensors do.
    """
    if not all(isinstance(t, DTensor) for t in tensors):
        return [local_parts([t], gradient)[0] if isinstance(t, DTensor) else t for t in tensors]
    parts: Sequence[Tensor] = _LocalParts.apply([_spec(t, gradient) for t in tensors], *tensors)  # type: ignore[no-untyped-call]
    return parts


def _spec(t: Any, layout: Layout | None) -> Any:
    """Of the gradient of a DTensor."""
    spec = private.spec_of(t)
    layout = of_gradient(spec.placements[0]) if layout is None else layout
    return spec if layout == spec.placements[0] else private.spec(spec.mesh, layout, spec.shape, t.dtype)


class _LocalParts(torch.autograd.Function):
    """Of several tensors at once: an autograd function costs more than what this one does."""

    @staticmethod
    def forward(ctx: Any, specs: Sequence[Any], *tensors: Any) -> tuple[Tensor, ...]:
        ctx.specs = specs
        ctx.set_materialize_grads(False)
        return tuple(private.local_of(t).detach() for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        made = (None if g is None else private.with_spec(g, spec) for g, spec in zip(gradients, ctx.specs, strict=True))
        return None, *made


def placed(x: Tensor, source: Layout, target: Layout, ranks: Ranks, shape: torch.Size) -> Tensor:
    """A DTensor that lies as `target`, of this rank's `x`, which lies as `source`; its gradient may lie in any way.

    Args:
        shape: of the whole.
    """
    source, target = from_front(source, x.ndim), from_front(target, x.ndim)
    dtensor: Tensor = _Placed.apply(x, source, private.spec(ranks.mesh, target, shape, x.dtype), ranks)  # type: ignore[no-untyped-call]
    return dtensor


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Layout, spec: Any, ranks: Ranks) -> Any:
        size = spec.shape[source.dim] if source.is_shard() else None
        ctx.back, ctx.ranks = of_gradient(source), ranks
        moved = relaid(x.detach(), source, spec.placements[0], ranks.group, size, ranks.label)
        return private.with_spec(moved, spec)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        found = layout_of(gradient)
        size = gradient.shape[found.dim] if found.is_shard() else None
        ranks: Ranks = ctx.ranks
        return relaid(private.local_of(gradient), found, ctx.back, ranks.group, size, ranks.label), None, None, None
