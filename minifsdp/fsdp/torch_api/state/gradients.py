"""Gradients while parameters are whole: `summon_full_params(with_grads=True)`, for `use_orig_params=True`.

A parameter's gradient has the parameter's shape: a slice has a slice, and a whole parameter a whole gradient. Without
`with_grads`, gradients are hidden inside the `with`, and the slices return afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minifsdp import comm
from minifsdp.fsdp.flat_unit import FlatUnit

Gradients = list[Tensor | None]
"""One per shard of a unit."""


def pop(unit: FlatUnit) -> Gradients:
    """The shards' gradients, which they then no longer have."""
    gradients = [p.grad for p in unit.shards]
    assign(unit, [None] * len(gradients))
    return gradients


def assign(unit: FlatUnit, gradients: Gradients) -> None:
    for p, gradient in zip(unit.shards, gradients, strict=True):
        p.grad = gradient


def gather(unit: FlatUnit, slices: Gradients) -> Gradients:
    """Whole gradients, in the shards' dtype. A parameter has one if it has a part of it on some rank.

    Their memory is not freed but left to who may still hold them.
    """
    if unit.contents.ranks == 1:
        return slices
    present = torch.tensor([float(part is not None) for part in slices], device=unit.device)
    comm.all_reduce(present, unit.group, comm.MAX).wait()
    parts = {p: part for p, part in zip(unit.shards, slices, strict=True) if part is not None}
    _, wholes = unit.contents.gather(parts, unit.contents.shard.dtype, "gradients")
    return [whole if there else None for whole, there in zip(wholes, present.tolist(), strict=True)]


def scatter(unit: FlatUnit, wholes: Gradients, slices: Gradients) -> Gradients:
    """This rank's parts of whole gradients, in the memory of `slices` where there is some."""
    if unit.contents.ranks == 1:
        return wholes
    parts: Gradients = []
    for index, (p, whole, before) in enumerate(zip(unit.shards, wholes, slices, strict=True)):
        part = None if whole is None or not p.numel() else unit.contents.part_of(index, whole)
        if part is not None:
            part = before.copy_(part) if before is not None else part.to(p.device, copy=True)
        parts.append(part)
    return parts
