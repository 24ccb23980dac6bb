"""Parameters as torch's DTensors, sharded or replicated, and their local parts, with which layers compute.

A DTensor carries its whole shape and its layout, so state dicts, optimizers, clipping, checkpoints and `fully_shard`
work with it. An operator on DTensors has to derive the layout of its result. The layers here know this layout in
advance, so they compute with local parts and name the layout of each gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from minifsdp import comm
from minifsdp.comm import Group, Label
from minifsdp.local_parts import has_hooks, refuse_replaced, replaced
from minifsdp.private import dtensor
from minifsdp.process_groups import mesh_group
from minifsdp.tensor_parallel.layouts import (
    Layout,
    Move,
    are_equal,
    from_front,
    layout_of,
    move,
    moved,
    of_gradient,
    part_of,
    relaid,
)

names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Of modules in their model, for the labels of their collectives."""


def called(module: nn.Module) -> str:
    """Its name in its model, if a plan gave it one, and its class."""
    name, kind = names.get(module), type(module).__name__
    return f"{name} ({kind})" if name else kind


class Ranks(NamedTuple):
    """The ranks that share a layer.

    Attributes:
        mesh: a mesh of one dimension.
        group: the group of the mesh, stored because looking it up takes longer than a small layer.
        label: the layer, as the subject of its collectives.
    """

    mesh: DeviceMesh
    group: Group
    label: Label | None = None

    @staticmethod
    def of(mesh: DeviceMesh, module: nn.Module | None = None) -> Ranks:
        return Ranks(mesh, mesh_group(mesh, 0), None if module is None else Label(called(module)))

    def layout_of(self, x: Any) -> Layout:
        """The layout of a DTensor on these ranks.

        Raises:
            ValueError: it is on other ranks, or on a mesh of several dimensions.
        """
        layout, mesh = layout_of(x), x.device_mesh
        if mesh is not self.mesh and mesh != self.mesh:
            raise ValueError(f"a DTensor on {mesh} in a layer on {self.mesh}: move it there, or pass to_local()")
        return layout


def distribute(p: nn.Parameter, mesh: DeviceMesh, layout: Layout, source: int | None) -> nn.Parameter:
    """The parameter as a DTensor; the same one for all users of a tied parameter.

    Args:
        p: whole on every rank.
        mesh: one dimension.
        layout: `Shard(dim)` or `Replicate()`.
        source: the rank of `mesh` whose values all ranks receive; None: each rank keeps its own values.

    Raises:
        ValueError: it has hooks; it is already sharded over other ranks; or it is tied, and another user has a
            different layout.
    """
    if isinstance(p, DTensor):
        if p.device_mesh != mesh:
            raise ValueError(f"a parameter {list(p.shape)} is on {p.device_mesh}: apply styles before fully_shard")
        if p.placements != (layout,):
            raise ValueError(
                f"a tied parameter cannot be {p.placements[0]} for one user and {layout} for another: change a style"
            )
        return p
    if p not in replaced:
        if has_hooks(p):
            raise ValueError(f"hooks of a parameter {[*p.shape]} would be lost: register them after parallelize_module")
        group = mesh_group(mesh, 0)
        values = p.detach()
        if source is not None and values.device.type != "meta":
            comm.broadcast(values, source, group).wait()
        layout = from_front(layout, p.ndim)
        part = part_of(values, layout.dim, group).clone() if layout.is_shard() else values
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(refuse_replaced)
        replaced[p] = nn.Parameter(
            dtensor.with_spec(part, dtensor.spec(mesh, layout, p.shape, p.dtype)), p.requires_grad
        )
    found: nn.Parameter = replaced[p]
    return distribute(found, mesh, layout, source)


def local_part(t: Tensor, gradient: Layout | None = None) -> Tensor:
    """This rank's part of a DTensor, or the plain tensor itself; see `local_parts`."""
    return local_parts([t], gradient)[0]


def local_parts(
    tensors: Sequence[Any], gradient: Layout | None = None, moves: Sequence[Move | None] | None = None
) -> Sequence[Tensor]:
    """This rank's parts of DTensors, as inputs of a computation; plain tensors are returned unchanged.

    Args:
        gradient: the layout of the gradients; None: each gradient has the layout of its tensor.
        moves: of each DTensor's part, in forward and backward; None: none.
    """
    moves = [None] * len(tensors) if moves is None else moves
    is_trained = [isinstance(t, DTensor) and t.requires_grad for t in tensors] if torch.is_grad_enabled() else []
    if not any(is_trained):
        return [_part(t, move) for t, move in zip(tensors, moves, strict=True)]
    trained = list(compress(tensors, is_trained))
    specs = [_spec(t, gradient) for t in trained]
    parts: Sequence[Tensor] = _LocalParts.apply(specs, list(compress(moves, is_trained)), *trained)  # type: ignore[no-untyped-call]
    if len(trained) == len(tensors):
        return parts
    left = iter(parts)
    others = (_part(t, move) for t, move in zip(tensors, moves, strict=True))
    return [next(left) if each else other for each, other in zip(is_trained, others, strict=True)]


def _part(t: Any, move: Move | None) -> Tensor:
    part: Tensor = dtensor.local_of(t) if isinstance(t, DTensor) else t
    return part if move is None else relaid(part, *move[0])


def _spec(t: Any, layout: Layout | None) -> Any:
    """The spec of the gradient of a DTensor."""
    spec = dtensor.spec_of(t)
    (own,) = spec.placements
    layout = of_gradient(own) if layout is None else layout
    return spec if are_equal(layout, own) else dtensor.spec(spec.mesh, layout, spec.shape, t.dtype)


class _LocalParts(torch.autograd.Function):
    """Takes several tensors at once, because calling an autograd function costs more than the work done here."""

    @staticmethod
    def forward(ctx: Any, specs: Sequence[Any], moves: Sequence[Move | None], *tensors: Any) -> tuple[Tensor, ...]:
        ctx.specs, ctx.moves = specs, moves
        ctx.set_materialize_grads(False)
        return tuple(_part(t, move).detach() for t, move in zip(tensors, moves, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        arriving = zip(gradients, ctx.specs, ctx.moves, strict=True)
        return None, None, *(None if g is None else _as_dtensor(g, spec, move) for g, spec, move in arriving)


def _as_dtensor(gradient: Tensor, spec: Any, move: Move | None) -> Any:
    gradient = gradient if move is None else moved(gradient, move[1], move[0])
    if not gradient.requires_grad:
        return dtensor.with_spec(gradient, spec)
    (layout,) = spec.placements  # backward of backward
    return _Placed.apply(gradient, layout, spec, Ranks.of(spec.mesh))  # type: ignore[no-untyped-call]


def placed(x: Tensor, source: Layout, target: Layout, ranks: Ranks, shape: torch.Size) -> Tensor:
    """A DTensor in layout `target` from this rank's part `x` in layout `source`; its gradient may have any layout.

    Args:
        shape: of the whole tensor.
    """
    source, target = from_front(source, x.ndim), from_front(target, x.ndim)
    spec = dtensor.spec(ranks.mesh, target, shape, x.dtype)
    made: Tensor = _Placed.apply(x, source, spec, ranks)  # type: ignore[no-untyped-call]
    return made


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Layout, spec: Any, ranks: Ranks) -> Any:
        size = spec.shape[source.dim] if source.is_shard() else None
        ctx.back, ctx.ranks = of_gradient(source), ranks
        moved = relaid(x.detach(), source, spec.placements[0], ranks.group, size, ranks.label)
        return dtensor.with_spec(moved, spec)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        found = layout_of(gradient)
        size = gradient.shape[found.dim] if found.is_shard() else None
        ranks: Ranks = ctx.ranks
        back = move(local_part(gradient), found, ctx.back, ranks.group, size=size, label=ranks.label)
        return back, None, None, None
