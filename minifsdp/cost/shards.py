"""Bytes of data parallelism at each moment of a stage's passes: gathered parameters, gradients, reductions; no tensors.

none, DDP after backward, ZeRO-1    gradients as backward makes them
DDP during backward                 all gradients have their place in buckets; a layer's are copied there
ZeRO-2                              a bucket, from its first gradient on, is filled while the one before it is reduced
FSDP                                units gathered around the one that computes, its unsharded gradient, reductions
FSDP2                               the same, with buffers of gathers and of packed gradients
FSDP2 around a pipeline             all units gathered, and gradients as backward makes them
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import compress
from math import prod
from typing import TYPE_CHECKING

from minifsdp.cost import data_parallel
from minifsdp.cost.data_parallel import Gradient, Setting
from minifsdp.cost.fsdp2 import Buffers, gradient_moments
from minifsdp.cost.model import Model
from minifsdp.cost.total import Divided, gathered_beside, of_fsdp, of_fsdp2, root_is_first, zero2_levels
from minifsdp.cost.walk import Moment

if TYPE_CHECKING:
    from minifsdp.divisions import DataParallel
    from minifsdp.recipe import Recipe


@dataclass(frozen=True)
class Shards:
    """Bytes that data parallelism has of a stage next to what is there at rest, and to gradients of earlier passes.

    Attributes:
        forward: while a unit computes.
        backward: at a moment of it.
        left: of gradients, after backward.
    """

    forward: Callable[[int], int]
    backward: Callable[[Moment], int]
    left: int


def keeps_gradients(recipe: Recipe) -> bool:
    """Gradients stay as backward makes them until the end of the passes, where they are reduced."""
    if recipe.data is None or recipe.data.kind in ("ddp", "zero1"):
        return True
    return recipe.data.kind == "fsdp2" and recipe.pipeline is not None


def has_buffers(recipe: Recipe) -> bool:
    """Gradients have memory of their own in all passes."""
    return recipe.data is not None and (recipe.data.kind, recipe.data.when) == ("ddp", "overlap")


def shards_of(stage: Model, mine: Divided, recipe: Recipe, adds: bool) -> Shards:
    """A stage in data parallelism: parts that ranks divide, gather and reduce.

    Args:
        stage: one of this rank's parts.
        mine: all that it has.
        recipe: how it is trained.
        adds: to the gradients of earlier passes.
    """
    data, setting = recipe.data, mine.over["shard"]
    if data is not None and data.kind == "zero2":
        return _zero2(stage, mine, recipe, adds)
    if data is not None and data.kind == "fsdp":
        return _flat(stage, data, setting, adds, gathered_beside(stage, mine.parts, data, setting))
    if data is not None and data.kind == "fsdp2" and recipe.pipeline is None:
        return _fsdp2(stage, data, setting)
    left = mine.sizes.itemsize * sum(stage.parameters)
    return Shards(lambda unit: 0, lambda moment: moment.fresh if adds else moment.made, left)


def _zero2(stage: Model, mine: Divided, recipe: Recipe, adds: bool) -> Shards:
    """ZeRO-2: what its buckets have while a layer's gradients come. Of several stages each fills all of them."""
    several = len(mine.parts) > 1
    (levels,) = compress(zero2_levels(mine, recipe, adds or several), (part is stage for part in mine.parts))
    kept = levels[-1].left
    before = kept if adds or several else 0

    def backward(moment: Moment) -> int:
        near = (level for level in levels if moment.made - moment.fresh <= level.made <= moment.made)
        there = max((max(level.most, level.left) for level in near), default=before)
        return there + moment.fresh - (0 if several else before)  # which an earlier backward has left

    return Shards(lambda unit: kept if several else 0, backward, 0 if several else kept)


def _flat(stage: Model, data: DataParallel, setting: Setting, adds: bool, others: int) -> Shards:
    """FSDP: units around the one that computes are gathered, its gradient is unsharded, and others are reduced."""
    root, *blocks = sizes = [setting.padded(sum(unit)) for unit in stage.units]
    every, is_sharded, how = len(blocks), setting.ranks > 1, {"forward_depth": 0, "reductions": 0, **of_fsdp(data)}
    ahead = every if how["forward_depth"] is None else how["forward_depth"]
    ahead = min(ahead, how.get("limit", every + 1) - 1)
    gradients = [Gradient.of(size, setting) for size in sizes]
    if adds:  # a mean is freed once it is added
        gradients = [replace(gradient, kept=0) for gradient in gradients]
    levels = [*data_parallel.gradient_levels(gradients, how["reductions"], root_is_first=root_is_first(stage, data))][
        ::-1
    ]

    def unsharded(first: int, last: int) -> int:
        """Of the root and of the blocks from `first` to `last`, which are numbered from 1, as far as there are such."""
        window = blocks[max(0, first - 1) : max(0, last)] if data.reshard else blocks
        return others + (root + sum(window)) * is_sharded

    def backward(moment: Moment) -> int:
        unit = moment.unit
        next_ones = unsharded(unit - 1 - ahead, unit - 1) if "backward" in how else unsharded(1, 0)
        if unit > every:  # after the blocks
            return next_ones + root + moment.fresh
        complete, begun = levels[unit]
        if moment.is_over:
            return next_ones + begun
        return unsharded(unit - ahead, unit) + complete + moment.fresh

    return Shards(lambda unit: unsharded(unit, unit + ahead), backward, sum(sizes) // setting.ranks)


def _fsdp2(stage: Model, data: DataParallel, setting: Setting) -> Shards:
    """FSDP2: a gather has a buffer that is copied out; gradients stay as they are made until they are packed."""
    root, *blocks = [Buffers.of(unit, setting) for unit in stage.shapes]
    every, how, shapes = len(blocks), of_fsdp2(data, setting), stage.shapes[0]
    early = setting.itemsize * sum(map(prod, shapes[len(shapes) - stage.head :]))
    levels: dict[tuple[str, int], int] = {}
    for when, unit, size in gradient_moments(root, blocks, early, **how):
        key = "inside" if when == "begin" else when, unit
        levels[key] = max(size, levels.get(key, 0))

    def whole(unit: int, is_over: bool = False) -> int:
        """Of the root, and of the block that computes; without resharding, also of all before it."""
        first = unit - 1 if data.reshard else 0
        return root.whole + sum(block.whole for block in blocks[max(0, first) : max(0, unit - is_over)])

    def forward(unit: int) -> int:
        return whole(unit) + levels.get(("forward", unit), 0)

    def backward(moment: Moment) -> int:
        unit = moment.unit
        if unit > every:  # after the blocks
            ahead = blocks[max(0, every - 1 - how["ahead"]) :] if data.reshard else []
            return whole(unit) + early + sum(block.whole for block in ahead)
        return whole(unit, moment.is_over) + levels["end" if moment.is_over else "inside", unit]

    return Shards(forward, backward, root.mean + sum(block.mean for block in blocks))
