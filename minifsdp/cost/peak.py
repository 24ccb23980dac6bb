"""An upper bound of all bytes that a rank has at once, on a CPU: a walk over a step in the order of the program.

    at rest       parameters and the optimizer's state: always there (total.py)
    activations   kept so far, and a layer's temporaries (walk.py)
    shards        unsharded parameters, gathers under way, gradients so far and the reductions of them: `Shards`
    optimizer     the temporaries of AdamW, one tensor after another, next to the gradients

It is an upper bound, since what a layer's temporaries are at most is added to what else is there at most meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING

from minifsdp.cost import data_parallel, pipeline, walk
from minifsdp.cost.data_parallel import Gradient, Setting
from minifsdp.cost.fsdp2 import Buffers, gradient_moments, kept_by_rank
from minifsdp.cost.model import Model
from minifsdp.cost.pipeline import Stage
from minifsdp.cost.total import CAP, Divided, StepBytes, bucketed, cost, divide
from minifsdp.cost.walk import Moment

if TYPE_CHECKING:
    from minifsdp.recipe import DataParallel, Recipe


_LOSS = 8  # bytes of a pipeline's loss, which the last stage sends to all as a float64


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


def peak(model: Model, recipe: Recipe, rank: int, setting: Setting) -> int:
    """An upper bound of a rank's bytes; arguments and errors as for `cost`."""
    mine, held = divide(model, recipe, rank, setting), cost(model, recipe, rank, setting)
    losses = mine.sizes.itemsize * (recipe.micro_batches + 1)
    updating = losses + gradients_in_step(held, recipe) + optimizer_step(tensors(mine, recipe))
    return held.parameters + held.optimizer + max(updating, *passes(mine, recipe, held, recipe.mesh.place(rank, "pp")))


def passes(mine: Divided, recipe: Recipe, held: StepBytes, place: int) -> Iterator[int]:
    """Bytes at the moments of forward and backward, of a pipeline action by action.

    Args:
        mine: what the rank has.
        recipe: how it is trained.
        held: its bytes by category.
        place: the rank's in the pipeline.
    """
    stages = [Stage(len(stage.blocks), stage.is_first, stage.is_last) for stage in mine.every]
    parts = dict(zip(sorted({number for number, _, _ in recipe.actions[place]}), mine.parts, strict=True))
    always = always_there(mine, recipe, held)
    left: dict[int, int] = dict.fromkeys(parts, 0) if keeps_buffers(recipe) else {}
    for did, before in pipeline.held_before(recipe.actions, place, stages, mine.sizes, mine.cut):
        if did is None:  # gradients that were kept are reduced
            yield before + _LOSS + (held.unsharded_peak + held.gradients_peak if keeps_gradients(recipe) else 0)
            continue
        number, kind, _ = did
        stage, there = parts[number], always + sum(left.values())
        shards = shards_of(stage, mine, recipe, adds=number in left)
        if kind == "F":
            for moment in walk.forward(stage, mine.sizes, mine.cut, before):
                yield moment.activations + there + shards.forward(moment.unit)
        elif kind == "W":
            yield before + there + of_weights(stage, mine.sizes.itemsize, adds=number in left)
        else:
            for moment in walk.backward(stage, mine.sizes, mine.cut, before, splits=kind == "I"):
                yield moment.activations + there + shards.backward(moment)
        if kind in "BW":
            left.setdefault(number, shards.left)


def of_weights(stage: Model, itemsize: int, adds: bool) -> int:
    """Bytes of the gradients that W makes: the largest is copied on its way to `.grad`."""
    largest = itemsize * max(stage.parameters)
    return 2 * largest if adds else largest + itemsize * sum(stage.parameters)


def keeps_gradients(recipe: Recipe) -> bool:
    """Gradients stay as backward makes them until the end of the passes, where they are reduced."""
    if recipe.data is None or recipe.data.kind in ("ddp", "zero1"):
        return True
    return recipe.data.kind == "fsdp2" and recipe.pipeline is not None


def keeps_buffers(recipe: Recipe) -> bool:
    """Gradients have memory of their own in all passes."""
    return recipe.data is not None and (recipe.data.kind, recipe.data.when) == ("ddp", "overlap")


def always_there(mine: Divided, recipe: Recipe, held: StepBytes) -> int:
    """Bytes that are there in all passes."""
    if recipe.data is not None and recipe.data.kind == "fsdp2" and recipe.pipeline is not None:
        stand_ins = mine.sizes.itemsize * pipeline.parameters_of([part.shapes for part in mine.parts])
        return held.unsharded_peak + stand_ins
    return held.gradients if keeps_buffers(recipe) else 0


# The optimizer


def gradients_in_step(held: StepBytes, recipe: Recipe) -> int:
    """Bytes of gradients while the optimizer computes: ZeRO-1 has the shards of the means as well."""
    if recipe.data is not None and recipe.data.kind == "zero1":
        return held.gradients + held.parameters // recipe.mesh.dp
    return held.gradients


def tensors(mine: Divided, recipe: Recipe) -> list[int]:
    """Bytes of each tensor that the optimizer updates, in its order."""
    itemsize, data = mine.sizes.itemsize, recipe.data
    if data is not None and data.kind.startswith("zero"):
        setting = mine.over["dp"]
        return [size // setting.ranks for size in data_parallel.padded_buckets(*bucketed(mine.parts, recipe, setting))]
    if data is not None and data.kind == "fsdp":
        setting = mine.over["shard"]
        return [setting.padded(sum(unit)) // setting.ranks for part in mine.parts for unit in part.units]
    shapes = [shape for part in mine.parts for _, shape in part.named]
    if data is not None and data.kind == "fsdp2":
        return [itemsize * kept_by_rank(shape, mine.over["shard"]) for shape in shapes]
    return [itemsize * prod(shape) for shape in shapes]


def optimizer_step(sizes: Sequence[int]) -> int:
    """Bytes of AdamW's temporaries: a square root, the denominator made of it, and the one of the tensor before."""
    return max(before + 2 * size for before, size in pairwise([0, *sizes]))


# Data parallelism


def shards_of(stage: Model, mine: Divided, recipe: Recipe, adds: bool) -> Shards:
    """What the ranks of data parallelism divide of a stage, and what they gather and reduce of it.

    Args:
        stage: one of this rank's parts.
        mine: all that it has.
        recipe: how it is trained.
        adds: to the gradients of earlier passes.
    """
    data, setting = recipe.data, mine.over["shard"]
    if data is not None and data.kind == "zero2":
        return _zero2(mine, recipe, adds) if len(mine.parts) == 1 else _zero2_of_stages(stage, mine, recipe)
    if data is not None and data.kind == "fsdp":
        others = sum(setting.padded(sum(part.units[0])) for part in mine.parts if part is not stage)
        return _flat(stage, data, setting, adds, others if setting.ranks > 1 else 0)
    if data is not None and data.kind == "fsdp2" and recipe.pipeline is None:
        return _fsdp2(stage, data, setting)
    left = mine.sizes.itemsize * sum(stage.parameters)
    return Shards(lambda unit: 0, lambda moment: moment.fresh if adds else moment.made, left)


def _zero2(mine: Divided, recipe: Recipe, adds: bool) -> Shards:
    """ZeRO-2: a bucket is filled while the one before it is reduced, or the one after it is filled, too."""
    numels, cap, setting, apart = bucketed(mine.parts, recipe, mine.over["dp"])
    sizes = data_parallel.padded_buckets(numels, cap, setting, apart)
    each = [*data_parallel.buckets(numels, cap, setting.itemsize), *data_parallel.buckets(apart, cap, setting.itemsize)]
    complete = [*accumulate(setting.itemsize * numel for numel in each)]
    kept = [*accumulate((size // setting.ranks for size in sizes), initial=0)]
    reducing = [0, *(size + setting.reducing(size) for size in sizes)]
    filling = [*sizes, 0, 0]

    def backward(moment: Moment) -> int:
        place = sum(size <= moment.made for size in complete)  # of the bucket that is filled
        early = moment.made - (0, *complete)[place] if apart else 0  # in `.grad` until their bucket's turn
        before = reducing[place] + filling[place] + (0 if adds else kept[max(0, place - 1)])
        both = filling[place] + filling[place + 1] + (0 if adds else kept[place])
        return max(before, both) + early + moment.fresh

    return Shards(lambda unit: 0, backward, kept[-1])


def _zero2_of_stages(stage: Model, mine: Divided, recipe: Recipe) -> Shards:
    """ZeRO-2 over several stages: each backward fills all buckets, most of them at its end, with zeros."""
    setting = mine.over["dp"]
    sizes = data_parallel.padded_buckets(*bucketed(mine.parts, recipe, setting))
    kept = sum(sizes) // setting.ranks
    filling = max(size + after for size, after in zip(sizes, [*sizes[1:], 0], strict=True))

    def backward(moment: Moment) -> int:
        is_over = moment.made >= setting.itemsize * sum(stage.parameters)
        complete = (size for size in sizes if size - setting.itemsize * setting.ranks < moment.made or is_over)
        return kept + filling + moment.fresh + max(map(setting.reducing, complete), default=0)

    return Shards(lambda unit: kept, backward, 0)


def _window(blocks: Sequence[int], first: int, last: int) -> int:
    """Bytes of the blocks from `first` to `last`, which are numbered from 1, as far as there are such."""
    return sum(blocks[max(0, first - 1) : max(0, last)])


def _flat(stage: Model, data: DataParallel, setting: Setting, adds: bool, others: int) -> Shards:
    """FSDP: units around the one that computes are gathered, its gradient is unsharded, and others are reduced."""
    root, *blocks = sizes = [setting.padded(sum(unit)) for unit in stage.units]
    every, is_sharded = len(blocks), setting.ranks > 1
    ahead = {"sync": 0, "overlap": 0, "prefetch": data.depth, "limit": data.limit - 1}[data.when]
    ahead = every if ahead is None else ahead
    reductions = {"sync": 0, "overlap": 1, "prefetch": None, "limit": 1}[data.when]
    gradients = [Gradient.of(size, setting) for size in sizes]
    if adds:  # a mean is freed once it is added
        gradients = [replace(gradient, kept=0) for gradient in gradients]
    levels = [*data_parallel.gradient_levels(gradients, reductions)][::-1]

    def unsharded(first: int, last: int) -> int:
        return others + (root + (_window(blocks, first, last) if data.reshard else sum(blocks))) * is_sharded

    def backward(moment: Moment) -> int:
        unit = moment.unit
        if unit > every:  # after the blocks
            return unsharded(unit - ahead, unit) + root + moment.fresh
        complete, begun = levels[unit]
        if moment.is_over:
            return unsharded(unit - ahead, unit - 1) + begun
        return unsharded(unit - ahead, unit) + complete + moment.fresh

    return Shards(lambda unit: unsharded(unit, unit + ahead), backward, sum(sizes) // setting.ranks)


def _fsdp2(part: Model, data: DataParallel, setting: Setting) -> Shards:
    """FSDP2: a gather has a buffer that is copied out; gradients stay as they are made until they are packed."""
    root, *blocks = [Buffers.of(unit, setting) for unit in part.shapes]
    limited, holds = data.when == "limit", data.hold and setting.runs_behind
    ahead = data.limit - 1 if limited else 1
    early = setting.itemsize * sum(map(prod, part.shapes[0][len(part.shapes[0]) - part.head :]))
    levels: dict[tuple[str, int], int] = {}
    for when, unit, size in gradient_moments(root, blocks, early, ahead, limited, holds):
        levels[when, unit] = max(size, levels.get((when, unit), 0))
    every = len(blocks)

    def forward(unit: int) -> int:
        whole = blocks[unit - 1].whole if 0 < unit <= every else 0
        return root.whole + whole + levels.get(("forward", unit), 0)

    def backward(moment: Moment) -> int:
        unit = moment.unit
        if unit > every:
            return root.whole + early + sum(block.whole for block in blocks[every - 1 - ahead :])
        whole = blocks[unit - 1].whole if 0 < unit and not moment.is_over else 0
        return root.whole + whole + levels["end" if moment.is_over else "inside", unit]

    return Shards(forward, backward, root.mean + sum(block.mean for block in blocks))
