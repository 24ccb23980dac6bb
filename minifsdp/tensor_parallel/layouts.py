"""The layout of a tensor on N ranks, and moves from one layout to another.

    Replicate()   every rank has the whole tensor
    Shard(d)      every rank has a part along dimension d, in rank order, as `torch.chunk` splits it
    Partial()     every rank has a partial sum of the whole tensor

A move changes the layout. Its backward moves the gradient from the layout in which it arrives to the layout of the
input. The gradient of a partial sum is the gradient of the sum, so a `Partial` input gets a `Replicate` gradient.

    move                    gradient    forward          backward
    Replicate -> Replicate  Partial     nothing          all-reduce       f: into a column-parallel layer
    Partial -> Replicate                all-reduce       nothing          g: out of a row-parallel layer
    Shard -> Replicate      Partial     all-gather       reduce-scatter   f with sequence parallelism
    Partial -> Shard                    reduce-scatter   all-gather       g with sequence parallelism
    Shard -> Replicate      Replicate   all-gather       take the part    where all ranks continue on the whole
    Replicate -> Shard                  take the part    all-gather       where a sequence-parallel region begins
    Replicate -> Partial                rank 0 keeps it  nothing          a bias, before partial sums are reduced

f and g are those of Megatron-LM (arXiv 1909.08053, section 3), the others of arXiv 2205.05198, section 4.2.2.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from minifsdp import comm
from minifsdp.comm import Group, Label

Layout: TypeAlias = Any
"""`Replicate()`, `Shard(dim)` or `Partial()`: torch's placement on one dimension of a mesh."""
Move: TypeAlias = tuple[tuple[Any, ...], tuple[Any, ...]]
"""The arguments of `relaid` for a value in forward, and those for its gradient in backward."""


def f(x: Tensor, group: Group) -> Tensor:
    """Move an input into column-parallel layers, where each rank's gradient is a partial sum."""
    return move(x, Replicate(), Replicate(), group, gradient=Partial())


def g(x: Tensor, group: Group) -> Tensor:
    """Move an output out of a row-parallel layer, where each rank's output is a partial sum."""
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
    """Move a tensor from layout `source` to layout `target`.

    Args:
        x: this rank's part in `source`.
        source: the layout of `x`.
        target: the layout of the result.
        group: the ranks.
        gradient: the layout in which the result's gradient arrives; None: `of_gradient(target)`.
        size: length of the whole tensor along the dimension that `source` shards; None: N equal parts.
        label: the subject of its collectives, in both directions.

    Returns:
        This rank's part in `target`; `x` itself if there is nothing to do.
    """
    way = _way(source, target, gradient, x.ndim)
    if way is None:
        return x
    (source, target), (gradient, wanted) = way
    whole = x.shape[gradient.dim] if gradient.is_shard() and not source.is_shard(gradient.dim) else size
    return moved(x, (source, target, group, size, label), (gradient, wanted, group, whole, label))


@cache
def _way(source: Layout, target: Layout, gradient: Layout | None, ndim: int) -> Any:
    """Layouts of a move and of its backward, counted from the front; None: there is nothing to do."""
    source, target = from_front(source, ndim), from_front(target, ndim)
    gradient = from_front(of_gradient(target) if gradient is None else gradient, ndim)
    back = from_front(of_gradient(source), ndim)
    return None if source == target and gradient == back else ((source, target), (gradient, back))


@cache
def from_front(layout: Layout, ndim: int) -> Layout:
    """The layout with its dimension counted from the front; the same object for equal arguments.

    Raises:
        ValueError: the tensor lacks that dimension.
    """
    if not layout.is_shard():
        return layout
    if not -ndim <= layout.dim < ndim:
        raise ValueError(f"{layout} of a tensor with {ndim} dimensions: choose one that it has")
    return Shard(layout.dim + ndim) if layout.dim < 0 else layout


def are_equal(one: Layout, other: Layout) -> bool:
    """`one == other`; torch takes five microseconds to find that two layouts are not of one kind."""
    return one is other or _have_equal_fields(one, other)


@cache
def _have_equal_fields(one: Layout, other: Layout) -> bool:
    return bool(one == other)


@cache
def newly_sharded(source: Layout, target: Layout, ndim: int) -> int | None:
    """The dimension, from the front, that `target` shards and `source` does not; None: there is none."""
    target = from_front(target, ndim)
    return target.dim if target.is_shard() and target != from_front(source, ndim) else None


def layout_of(x: Any) -> Layout:
    """The layout of a DTensor on a mesh of one dimension.

    Raises:
        ValueError: its mesh has more dimensions; or its parts have to be combined in another way than by a sum, for
            example averaged.
    """
    layout, *others = x.placements
    if others:
        raise ValueError(f"a DTensor on {x.device_mesh}: a layer takes one on its tensor-parallel ranks only")
    if not _is_known(layout):
        check_layouts(x=layout)
    return layout


def check_layouts(**layouts: Any) -> None:
    """
    Raises:
        TypeError: one of them is not a layout.
        ValueError: one of them is a placement of torch's that is not supported here.
    """
    for name, layout in layouts.items():
        if not isinstance(layout, Placement):
            raise TypeError(f"{name} = {layout!r}: give Shard(dim), Replicate() or Partial()")
        if not _is_known(layout):
            raise ValueError(f"{name} = {layout}: give Shard(dim), Replicate() or Partial()")


@cache
def _is_known(layout: Layout) -> bool:
    return bool(layout.is_shard() or layout.is_replicate() or layout.is_partial("sum"))


def of_gradient(layout: Layout) -> Layout:
    """The layout of a tensor's gradient; the gradient of a partial sum is the whole gradient of the sum."""
    return Replicate() if layout.is_partial() else layout


def moved(x: Tensor, there: tuple[Any, ...], back: tuple[Any, ...]) -> Tensor:
    """`x`, moved by `relaid` with the arguments `there`, and its gradient with those of `back`."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return relaid(x, *there)
    result: Tensor = _Move.apply(x, there, back)  # type: ignore[no-untyped-call]
    return result


class _Move(torch.autograd.Function):
    """A move of a value in forward and of its gradient in backward; the two are transposes of each other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: tuple[Any, ...], back: tuple[Any, ...]) -> Tensor:
        ctx.there, ctx.back = there, back
        result = relaid(x, *there)
        return x.view_as(x) if result is x else result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return moved(gradient, ctx.back, ctx.there), None, None


def relaid(
    x: Tensor, source: Layout, target: Layout, group: Group, size: int | None = None, label: Label | None = None
) -> Tensor:
    """Like `move`, but without autograd; returns `x` itself if there is nothing to do."""
    if are_equal(source, target):
        return x
    if source.is_partial():
        return reduce_scattered(x, target.dim, group, label) if target.is_shard() else all_reduced(x, group, label)
    whole = all_gathered(x, source.dim, group, size, label) if source.is_shard() else x
    if target.is_shard():
        return part_of(whole, target.dim, group)
    if target.is_partial() and group.rank() > 0:
        return torch.zeros_like(whole)
    return whole


# Collectives concatenate and split along the first dimension, in equal parts: any other is swapped with it, and padded.


def all_reduced(x: Tensor, group: Group, label: Label | None = None) -> Tensor:
    """The sum over the ranks, in new memory."""
    total = x.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(total, group, label=label).wait()
    return total


def all_gathered(x: Tensor, dim: int, group: Group, size: int | None = None, label: Label | None = None) -> Tensor:
    """The ranks' parts, concatenated along `dim` to a length of `size`; None: all parts are as long as this one."""
    first = x.transpose(0, dim)
    rows = first.shape[0] if size is None else -(-size // group.size())
    first = _padded(first, rows)
    whole = first.new_empty(group.size() * rows, *first.shape[1:])
    comm.all_gather(whole.view(-1), first.view(-1), group, label).wait()
    if size not in (None, whole.shape[0]):
        whole = whole[:size]
    return whole.transpose(0, dim).contiguous()


def reduce_scattered(x: Tensor, dim: int, group: Group, label: Label | None = None) -> Tensor:
    """This rank's part along `dim` of the sum over the ranks."""
    first, ranks = x.transpose(0, dim), group.size()
    length, rows = first.shape[0], -(-first.shape[0] // ranks)
    first = _padded(first, ranks * rows)
    part = first.new_empty(rows, *first.shape[1:])
    comm.reduce_scatter(part.view(-1), first.view(-1), group, label=label).wait()
    if length < ranks * rows:
        part = part[: max(0, length - group.rank() * rows)]
    return part.transpose(0, dim).contiguous()


def part_of(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's part along `dim` of a replicated tensor, a view; the last ranks' parts may be shorter, or empty."""
    length, start = x.shape[dim], first_of(x.shape[dim], group)
    return x.narrow(dim, start, min(-(-length // group.size()), length - start))


def first_of(length: int, group: Group) -> int:
    """The index of the first of this rank's elements, out of so many in all."""
    return min(-(-length // group.size()) * group.rank(), length)


def _padded(x: Tensor, rows: int) -> Tensor:
    """The tensor, contiguous, with zeros up to so many rows."""
    if x.shape[0] == rows:
        return x.contiguous()
    padded = x.new_zeros(rows, *x.shape[1:])
    padded[: x.shape[0]] = x
    return padded
