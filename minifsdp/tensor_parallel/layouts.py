"""How a tensor lies on N ranks, and how to get from one layout to another.

    Replicate()   every rank has the whole
    Shard(d)      each has a part along dimension d, in rank order, as `torch.chunk` cuts
    Partial()     each has a summand of every element

A move changes the layout. Its backward is a move as well: of the gradient, from the layout in which it arrives to the
one of what has been moved. A summand's gradient is that of the sum, so what was `Partial` gets a whole one.

    move                    gradient    forward          backward
    Replicate -> Replicate  Partial     nothing          all-reduce       f: into a layer that is cut by columns
    Partial -> Replicate                all-reduce       nothing          g: out of a layer that is cut by rows
    Shard -> Replicate      Partial     all-gather       reduce-scatter   f with sequence parallelism
    Partial -> Shard                    reduce-scatter   all-gather       g with sequence parallelism
    Shard -> Replicate      Replicate   all-gather       take the part    where all ranks go on with the whole
    Replicate -> Shard                  take the part    all-gather       where a sequence-parallel region begins
    Replicate -> Partial                rank 0 keeps it  nothing          a bias, before a sum of summands

f and g are those of Megatron-LM (arXiv 1909.08053, section 3), the others of arXiv 2205.05198, section 4.2.2.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from minifsdp import comm
from minifsdp.comm import Group, Label

Layout: TypeAlias = Any
"""`Replicate()`, `Shard(dim)` or `Partial()`: torch's placements, on one dimension of a mesh."""


def f(x: Tensor, group: Group) -> Tensor:
    """Into layers that are cut by columns: each rank's gradient is a summand."""
    return move(x, Replicate(), Replicate(), group, gradient=Partial())


def g(x: Tensor, group: Group) -> Tensor:
    """Out of a layer that is cut by rows: each rank's output is a summand."""
    return move(x, Partial(), Replicate(), group)


def move(
    x: Tensor,
    source: Layout,
    target: Layout,
    group: Group,
    gradient: Layout | None = None,
    size: int | None = None,
    label: Label | None = None,
) -> Tensor:
    """This rank's part in layout `target` of a tensor of which it has `x` in layout `source`.

    Args:
        x: this rank's part.
        source: its layout.
        target: the layout that is wanted.
        group: the ranks.
        gradient: the layout of the gradient that comes back; None: that of the gradient of `target`.
        size: length of the whole tensor along the dimension that `source` shards; None: N equal parts.
        label: the subject of its collectives, in both directions.
    """
    source, target = from_front(source, x.ndim), from_front(target, x.ndim)
    gradient = of_gradient(target) if gradient is None else gradient
    if source == target and gradient == of_gradient(source):
        return x
    moved: Tensor = _Move.apply(x, source, target, gradient, group, size, label)  # type: ignore[no-untyped-call]
    return moved


def from_front(layout: Layout, ndim: int) -> Layout:
    """The layout with its dimension counted from the front."""
    return Shard(layout.dim + ndim) if layout.is_shard() and layout.dim < 0 else layout


def layout_of(x: Any) -> Layout:
    """That of a DTensor on one dimension of a mesh."""
    (layout,) = x.placements
    return layout


def of_gradient(layout: Layout) -> Layout:
    """The layout of the gradient of a tensor that lies so: that of a sum's summands is whole."""
    return Replicate() if layout.is_partial() else layout


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        source: Layout,
        target: Layout,
        gradient: Layout,
        group: Group,
        size: int | None,
        label: Label | None,
    ) -> Tensor:
        moved = relaid(x, source, target, group, size, label)
        if gradient.is_shard() and not source.is_shard(gradient.dim):
            size = x.shape[gradient.dim]
        ctx.back = (gradient, of_gradient(source), group, size, label)
        return moved.view_as(moved) if moved is x else moved

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return relaid(gradient, *ctx.back), None, None, None, None, None, None


def relaid(
    x: Tensor, source: Layout, target: Layout, group: Group, size: int | None = None, label: Label | None = None
) -> Tensor:
    """As `move`, without autograd; `x` itself if there is nothing to do."""
    if source == target:
        return x
    if source.is_partial():
        return reduce_scattered(x, target.dim, group, label) if target.is_shard() else all_reduced(x, group, label)
    whole = all_gathered(x, source.dim, group, size, label) if source.is_shard() else x
    if target.is_shard():
        return part_of(whole, target.dim, group)
    if target.is_partial() and group.rank() > 0:
        return torch.zeros_like(whole)
    return whole


# Collectives join and cut along the first dimension, in equal parts: others are moved there, and padded.


def all_reduced(x: Tensor, group: Group, label: Label | None = None) -> Tensor:
    """The sum over the ranks, in new memory."""
    total = x.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(total, group, label=label).wait()
    return total


def all_gathered(x: Tensor, dim: int, group: Group, size: int | None = None, label: Label | None = None) -> Tensor:
    """The ranks' parts, joined along `dim` to a length of `size`; None: all parts are as long as this one."""
    first = x.movedim(dim, 0)
    rows = first.shape[0] if size is None else -(-size // group.size())
    first = _padded(first, rows)
    whole = first.new_empty(group.size() * rows, *first.shape[1:])
    comm.all_gather(whole.view(-1), first.view(-1), group, label).wait()
    return whole[:size].movedim(0, dim).contiguous().contiguous()


def reduce_scattered(x: Tensor, dim: int, group: Group, label: Label | None = None) -> Tensor:
    """This rank's part along `dim` of the sum over the ranks."""
    first = x.movedim(dim, 0)
    length, rows = first.shape[0], -(-first.shape[0] // group.size())
    first = _padded(first, group.size() * rows)
    part = first.new_empty(rows, *first.shape[1:])
    comm.reduce_scatter(part.view(-1), first.view(-1), group, label=label).wait()
    return part[: max(0, length - group.rank() * rows)].movedim(0, dim).contiguous().contiguous()


def part_of(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's part along `dim` of what every rank has whole, a view; the last ranks' may be shorter, or empty."""
    length, start = x.shape[dim], first_of(x.shape[dim], group)
    return x.narrow(dim, start, min(-(-length // group.size()), length - start))


def first_of(length: int, group: Group) -> int:
    """Where this rank's part of so many elements begins."""
    return min(-(-length // group.size()) * group.rank(), length)


def _padded(x: Tensor, rows: int) -> Tensor:
    """Contiguous, with zeros up to so many rows."""
    if x.shape[0] == rows:
        return x.contiguous()
    padded = x.new_zeros(rows, *x.shape[1:])
    padded[: x.shape[0]] = x
    return padded
